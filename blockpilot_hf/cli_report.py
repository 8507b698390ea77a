"""`blockpilot report`: tables and pictures of benchmark and scaling records, from this machine or another."""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from .benchmark_display import compared_table, fitted, markdown_parts, readme_table, told_benchmark
from .benchmark_latex import latex_table
from .benchmark_plots import check_plots, draw_benchmark
from .benchmark_reading import read_record, record_labels
from .cli_console import TABLE_WIDTH, Screen
from .evaluation_display import Table
from .scaling_display import told_scaling
from .scaling_plot import draw_scaling
from .scaling_reading import is_scaling, is_scaling_record, read_scaling_record
from .units import require_extra


class ReportFormat(Enum):
    """What tables are written as."""

    TERMINAL = "terminal"
    MARKDOWN = "markdown"
    LATEX = "latex"


def report_command(
    records: Annotated[
        list[Path],
        typer.Argument(
            metavar="RECORD...",
            exists=True,
            dir_okay=False,
            help="Records that `blockpilot benchmark` wrote, or that `blockpilot scaling` wrote.",
        ),
    ],
    format: Annotated[ReportFormat, typer.Option(help="What tables are written as.")] = ReportFormat.TERMINAL,
    plots: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for pictures (PNG).", metavar="DIR")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File for the tables.", show_default="standard output")
    ] = None,
) -> None:
    """
    Show records as tables and pictures. Several of benchmarks, say one per dtype, get one table together first. Only
    the files are read: no model is loaded, and nothing is measured.
    """
    if plots is not None:
        require_extra("matplotlib")
    _check_output(output, records)
    are_scaling = _are_scaling(records)
    if are_scaling and format == ReportFormat.LATEX:
        raise ValueError(
            "`--format latex` has tables of benchmarks only. Use terminal or markdown for scaling records."
        )
    read = [read_scaling_record(path) if are_scaling else read_record(path) for path in records]
    labels = record_labels(read)
    if plots is not None and not are_scaling:
        for path, record in zip(records, read, strict=True):
            check_plots(record, path)
    written = _written(read, labels, format)
    pictures: list[Path] = []
    if plots is not None:  # before anything is shown: a closed pipe must not cost the pictures
        plots.mkdir(parents=True, exist_ok=True)
        for record, label in zip(read, labels, strict=True):
            draw = draw_scaling if are_scaling else draw_benchmark
            pictures += draw(record, plots, prefix=_slug(label) if len(read) > 1 else "")
    screen = Screen()
    if output is None:
        print(written, end="") if written is not None else _show(screen, read, labels)
    else:
        _write(output, written if written is not None else _shown(read, labels))
    if output is not None or pictures:
        told = [f"tables: {output}"] if output is not None else []
        told += [f"plots: {', '.join(map(str, pictures))}"] if pictures else []
        # Tables for another program stay alone on standard output.
        if output is not None or format == ReportFormat.TERMINAL:
            screen.line()
            screen.line(", ".join(told))


def show_record(screen: Screen, record: Mapping[str, Any]) -> None:
    """A record's tables and lines on a screen; wide tables in parts that fit."""
    was_line = False
    for part in _told(record):
        if isinstance(part, Table):
            _show_table(screen, part)
        else:
            if not was_line:
                screen.line()
            screen.line(part)
        was_line = isinstance(part, str)


def _told(record: Mapping[str, Any]) -> Iterator[Table | str]:
    return told_scaling(record) if is_scaling(record) else told_benchmark(record)


def _are_scaling(paths: Sequence[Path]) -> bool:
    kinds = [is_scaling_record(path) for path in paths]
    if any(kinds) and not all(kinds):
        raise ValueError(
            f"{paths[kinds.index(True)]} is a scaling record and {paths[kinds.index(False)]} is none. Name records "
            "of one kind."
        )
    return any(kinds)


def _show_table(screen: Screen, whole: Table) -> None:
    """In parts that fit, unless the screen is so narrow that rows become lines."""
    for table in fitted(whole, screen.width) if screen.width >= TABLE_WIDTH else [whole]:
        screen.line()
        screen.table(table.title, table.header, table.rows)


def _show(screen: Screen, records: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> None:
    if len(records) > 1 and not is_scaling(records[0]):
        _show_table(screen, compared_table(records))
    for record, label in zip(records, labels, strict=True):
        if len(records) > 1:
            screen.line()
            screen.line(label, style="bold")
        show_record(screen, record)


def _shown(records: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> str:
    """The same as text."""
    with redirect_stdout(io.StringIO()) as text:
        _show(Screen(), records, labels)
    return text.getvalue()


def _written(records: Sequence[Mapping[str, Any]], labels: Sequence[str], format: ReportFormat) -> str | None:
    """The tables as text for other programs; `None` for a terminal, which has its width."""
    if format == ReportFormat.LATEX:
        return "\n".join(latex_table(record) for record in records)
    if format == ReportFormat.MARKDOWN:
        if len(records) == 1:
            return markdown_parts(_told(records[0]))
        parts = [f"## {label}\n\n{markdown_parts(_told(one))}" for label, one in zip(labels, records, strict=True)]
        return "\n".join(parts if is_scaling(records[0]) else [f"{readme_table(records)}\n", *parts])
    return None


def _check_output(output: Path | None, records: Sequence[Path]) -> None:
    if output is None:
        return
    if any(output.resolve() == path.resolve() for path in records):
        raise ValueError(f"`--output {output}` is one of the records, which it would replace. Name another file.")
    if not output.resolve().parent.is_dir():
        raise ValueError(f"`--output {output}` is in a folder that does not exist. Make {output.parent} first.")


def _write(path: Path, text: str) -> None:
    """Under its name only when whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text.lstrip("\n"), encoding="utf-8")
    os.replace(beside, path)


def _slug(label: str) -> str:
    """A label as the start of a file's name."""
    words = "".join(character if character.isalnum() else " " for character in label).split()
    return f"{'-'.join(words)}-"


__all__ = ["ReportFormat", "report_command", "show_record"]
