"""`blockpilot <verb>`: the commands, and how a call ends.

Status 0: done; 1: it failed, or `verify` found a difference that rounding does not explain; 2: what was asked for is
wrong; 130: interrupted. An error is one line.
"""

import io
import os
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from transformers.utils import logging

from .cli_benchmark import benchmark_command
from .cli_calibrate import calibrate_command
from .cli_common import package_version
from .cli_evaluate import evaluate_command
from .cli_generate import generate
from .cli_hub import export_command, push_command
from .cli_policy import train_policy_command
from .cli_prepare import prepare
from .cli_report import report_command
from .cli_scaling import scaling_command
from .cli_sweep import check_replay_command, sweep
from .cli_train import train_drafter
from .cli_verify import verify

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"blockpilot {package_version()}")
        raise typer.Exit()


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Adaptive block-diffusion speculative decoding."""


app.command("generate", short_help="Answer prompts, and compare with plain generate.")(generate)
app.command("verify", short_help="Is the output plain generate's own?")(verify)
app.command("prepare", short_help="Have a target answer prompts.")(prepare)
app.command("train-drafter", short_help="Train a drafter for a target.")(train_drafter)
app.command("sweep", short_help="What every block size would have accepted on texts.")(sweep)
app.command("check-replay", short_help="Is a sweep what decoding does?")(check_replay_command)
app.command("calibrate", short_help="Measure what passes cost here, for decisions.")(calibrate_command)
app.command("train-policy", short_help="Train a policy on a sweep.")(train_policy_command)
app.command("evaluate", short_help="What policies are worth on prompts that no training saw.")(evaluate_command)
app.command("benchmark", short_help="Time plain generate, peers and our rules side by side.")(benchmark_command)
app.command("scaling", short_help="What calls cost by the length of prompt and answer.")(scaling_command)
app.command("report", short_help="Records of both as tables and pictures.")(report_command)
app.command("export", short_help="Write the Hub repositories to a folder.")(export_command)
app.command("push", short_help="Upload the Hub repositories.")(push_command)


def main() -> None:
    """Entry point of the `blockpilot` command."""
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
    logging.disable_progress_bar()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an answer may hold what the terminal's encoding does not
    sys.exit(_run(sys.argv[1:] or ["--help"]))


def _run(arguments: list[str]) -> int:
    """Run a command and return its exit status."""
    try:
        status = app(arguments, prog_name="blockpilot", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except (ValueError, TypeError) as error:
        return _fail(str(error), 2)
    except (OSError, ImportError) as error:
        return _fail(str(error), 1)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _fail(_usage_message(error), 2)
    if status == 130:
        print("interrupted", file=sys.stderr)
    return status or 0


def _usage_message(error: Any) -> str:
    """What is wrong with the command line, and where its options are told."""
    command = error.ctx.command_path if getattr(error, "ctx", None) is not None else "blockpilot"
    message = error.format_message().rstrip(". ")
    return f"{message}{'' if message.endswith('?') else '.'} See `{command} --help`."


def _fail(message: str, status: int) -> int:
    text = Text.assemble(("error:", "bold red"), " ", " ".join(message.split()))
    Console(stderr=True, highlight=False).print(text, soft_wrap=True)
    return status


if __name__ == "__main__":
    main()
