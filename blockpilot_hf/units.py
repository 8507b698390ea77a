"""Long work cut into units: dealt out to any number of processes, kept as it is done, and put together as one dataset.

What a unit gives depends on the unit alone, so the dataset is the same however many processes there are and however
often they were stopped. Knows nothing of what is computed.
"""

import contextlib
import hashlib
import importlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

_UNITS, _SETTINGS, _STATE, _UNFINISHED = "units", "settings.json", "state.json", ".unfinished"
_POLL_S = 0.2
# By the launchers of accelerate and torch, and by the common ones of MPI.
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)

Progress = Callable[[Any, str], Iterable[Any]]


def require_extra(module: str) -> Any:
    """
    A module of the `train` extra, imported.

    Raises:
        `ImportError`: if it is not installed, with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != module.split(".")[0]:
            raise  # it is there, and something that it needs is not
        raise ImportError(
            f"`{module}` is needed for this and is not installed. Install it with `pip install 'blockpilot-hf[train]'`."
        ) from error


def processes() -> tuple[int, int]:
    """
    This process's index, and how many there are, under `accelerate launch`, `torchrun` or MPI; else 0 of 1. Units need
    no messages between processes, so no process group is opened.

    Raises:
        `ValueError`: if the environment names an index without a number of processes, or one out of range.
    """
    for rank, world_size in _RANKS:
        if rank in os.environ or world_size in os.environ:
            found = os.environ.get(rank, ""), os.environ.get(world_size, "")
            if not all(part.isdecimal() for part in found) or int(found[0]) >= int(found[1]):
                raise ValueError(
                    f"`{rank}` must be an index below `{world_size}`, got {found[0]!r} and {found[1]!r}. Start with "
                    "`accelerate launch`, which sets both, or unset both for one process."
                )
            return int(found[0]), int(found[1])
    return 0, 1


def run_units(
    units: Sequence[Any],
    compute: Callable[[Any], list[dict[str, Any]]],
    output: str | Path,
    *,
    settings: dict[str, Any],
    columns: dict[str, str] | None = None,
    description: str = "units",
    progress: Progress | None = None,
) -> Any:
    """
    Rows of all units, in order, as a dataset on disk: `datasets.load_from_disk(output)` loads it again.

    A unit's rows are kept in `output/units` as soon as they are there, and are not computed again by a later call.
    Every process starts with the units whose index leaves its own index as remainder, then helps with those that nobody
    works on: nothing stays behind when one of them dies. Each returns when the dataset is whole.

    Args:
        units (`Sequence`): The same in every process.
        compute (`Callable`): A unit to its rows. What it returns must depend on the unit and `settings` alone.
        output (`str` or `Path`): Folder of the dataset; new, empty, or of an earlier call with the same settings.
        settings (`dict`): All that the rows depend on, as JSON takes it; kept in `output/settings.json`.
        columns (`dict[str, str]`, *optional*):
            Name and type of every column: `string`, `bool`, `int32`, `int64`, `float32`, `float64`, and lists of them,
            such as `int32[]`. Found from the rows without.
        description (`str`, *optional*): What the bar calls the units.
        progress (`Callable`, *optional*):
            `progress(done, description)` goes through `done`, which has a length and gives an item for every unit that
            is done, by whichever process; first those that were before, `done.num_before` of them.

    Returns:
        `datasets.Dataset`.

    Raises:
        `ValueError`: if there are no units; if `output` holds something else, or results of other settings.
        `ImportError`: if `datasets` is not installed.
        `OSError`: if results cannot be written.
    """
    datasets = require_extra("datasets")
    output, (index, num_processes) = Path(output), processes()
    if not units:
        raise ValueError("There is nothing to do: no units.")
    output.mkdir(parents=True, exist_ok=True)
    with FileLock(output / ".lock"):
        _check_settings(output, settings)
    if not is_finished(output):
        own = range(index, len(units), num_processes)
        # The others' from the end, where they come last themselves.
        order = [*own, *(i for i in reversed(range(len(units))) if i not in own)]
        done = _Done(order, lambda i: compute(units[i]), output, columns)
        for _ in done if progress is None else progress(done, description):
            pass
    with FileLock(output / ".lock"):
        if not is_finished(output):
            _put_together(output, len(units), settings)
        shutil.rmtree(output / _UNITS, ignore_errors=True)
    return datasets.load_from_disk(str(output))


def check_output(output: str | Path) -> None:
    """
    What can be told of an output folder before the work is known.

    Raises:
        `ValueError`: if it is a file, or holds other things.
    """
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file. Name a folder with `--output`.")
    if not output.is_dir() or (output / _SETTINGS).is_file():
        return
    # A run that was killed before its settings were written leaves the lock, and what stands beside them.
    if any(not found.name.startswith((".lock", _SETTINGS)) for found in output.iterdir()):
        raise ValueError(
            f"{output} holds other files, and is not the output of an earlier call. Name a new folder with `--output`."
        )


def is_finished(output: str | Path) -> bool:
    """Whether all units of a folder are done and put together."""
    return (Path(output) / _STATE).is_file()


def num_done_units(output: str | Path) -> int:
    """Units that an unfinished folder has already."""
    return sum(1 for _ in (Path(output) / _UNITS).glob("*.parquet"))


def read_settings(output: str | Path) -> dict[str, Any]:
    """
    The settings that [`run_units`] was called with.

    Raises:
        `ValueError`: if the folder has none, or its dataset is not whole yet.
    """
    output = Path(output)
    if not (output / _SETTINGS).is_file():
        raise ValueError(f"{output} has no {_SETTINGS}. Name a folder that one of the commands wrote with `--output`.")
    check_finished(output)
    return json.loads((output / _SETTINGS).read_text(encoding="utf-8"))


def check_finished(output: str | Path) -> None:
    """
    Raises:
        `ValueError`: if the folder is one of [`run_units`] and its units are not all done.
    """
    if (Path(output) / _SETTINGS).is_file() and not is_finished(output):
        raise ValueError(f"{output} is not finished. Run the command that writes it once more: it goes on.")


class _Done:
    """
    Gives the index of every unit when it is done, computing those that nobody else does. `num_before` of them were done
    at the start and come first.
    """

    def __init__(
        self,
        order: list[int],
        compute: Callable[[int], list[dict[str, Any]]],
        output: Path,
        columns: dict[str, str] | None,
    ):
        self._compute, self._output = compute, output
        before = [i for i in order if _unit_file(output, i).is_file()]
        self.num_before = len(before)
        self._order = [*before, *(i for i in order if i not in set(before))]
        self._schema = None if columns is None else _schema(columns)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        left = self._order
        while left:
            busy = []
            for i in left:
                if self._is_done(i) or self._do(i):
                    yield i
                else:
                    busy.append(i)
            if len(busy) == len(left):
                time.sleep(_POLL_S)
            left = busy

    def _is_done(self, i: int) -> bool:
        return _unit_file(self._output, i).is_file() or is_finished(self._output)

    def _do(self, i: int) -> bool:
        """Whether the unit is done now. It is not if another process works on it."""
        file = _unit_file(self._output, i)
        lock = FileLock(file.with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)  # released by the system if we are killed
        except Timeout:
            return False
        try:
            if not self._is_done(i):
                _write_rows(self._compute(i), file, self._schema)
        finally:
            lock.release()
        return True


def _unit_file(output: Path, i: int) -> Path:
    return output / _UNITS / f"{i:05d}.parquet"


def _write_rows(rows: list[dict[str, Any]], file: Path, schema: Any) -> None:
    """Under its final name a file is always whole."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows, schema=schema)
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(table, beside)
        os.replace(beside, file)
    except OSError as error:
        raise OSError(
            f"{file} cannot be written: {error}. Free some space and run the same command again: it goes on."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def _put_together(output: Path, num_units: int, settings: dict[str, Any]) -> None:
    """One unit after another through memory. `state.json`, without which there is no dataset, comes last."""
    import datasets
    import pyarrow
    import pyarrow.parquet
    from datasets.arrow_writer import ArrowWriter

    files = [_unit_file(output, i) for i in range(num_units)]
    schemas = [schema for file in files if len(schema := pyarrow.parquet.read_schema(file))]
    schema = pyarrow.unify_schemas([s.remove_metadata() for s in schemas], promote_options="permissive")
    unfinished = output / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    try:
        with ArrowWriter(path=str(unfinished / "rows.arrow"), schema=schema) as writer:
            for file in files:
                digest.update(file.read_bytes())
                table = pyarrow.parquet.read_table(file)
                if table.num_rows:
                    writer.write_table(table.select(schema.names).cast(schema))
            writer.finalize()
        rows = datasets.Dataset.from_file(str(unfinished / "rows.arrow"))
        # A fingerprint of the rows, where the default one is of the file's path.
        rows = datasets.Dataset(rows.data, info=rows.info, fingerprint=digest.hexdigest()[:16])
        with _no_bars(datasets):
            rows.save_to_disk(str(unfinished / "dataset"))
        del rows
        for path in sorted((unfinished / "dataset").iterdir(), key=lambda path: path.name == _STATE):
            os.replace(path, output / path.name)
    except OSError as error:
        raise OSError(
            f"The dataset cannot be written to {output}: {error}. Its units are all there: free some space and run the "
            "same command again."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def _no_bars(datasets: Any) -> Iterator[None]:
    """The library's own bars; afterwards as before."""
    if datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def _schema(columns: dict[str, str]) -> Any:
    import pyarrow

    names = {"string", "bool", "int32", "int64", "float32", "float64"}

    def type_of(name: str, column: str) -> Any:
        if name.endswith("[]"):
            return pyarrow.list_(type_of(name[:-2], column))
        if name not in names:
            raise ValueError(
                f"Column {column!r} has the type {name!r}. Allowed: {', '.join(sorted(names))}, with `[]`."
            )
        return getattr(pyarrow, "bool_" if name == "bool" else name)()

    return pyarrow.schema([(column, type_of(name, column)) for column, name in columns.items()])


def _check_settings(output: Path, settings: dict[str, Any]) -> None:
    """Writes them where there are none. The caller holds the lock."""
    path, ours = output / _SETTINGS, json.loads(json.dumps(settings))
    check_output(output)
    if not path.is_file():
        beside = path.with_name(f"{_SETTINGS}.new")
        beside.write_text(json.dumps(ours, indent=2) + "\n", encoding="utf-8")
        os.replace(beside, path)
        return
    theirs = json.loads(path.read_text(encoding="utf-8"))
    different = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    if different:
        words = ", ".join(f"`{name}` was {theirs.get(name)!r} and is {ours.get(name)!r} now" for name in different)
        raise ValueError(
            f"{output} holds results of other settings: {words}. Use the same settings to go on, or another folder "
            "with `--output`."
        )


__all__ = [
    "Progress",
    "check_finished",
    "check_output",
    "is_finished",
    "num_done_units",
    "processes",
    "read_settings",
    "require_extra",
    "run_units",
]
