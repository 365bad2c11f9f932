"""The `smoe` command: its sub-commands, and the way every failure leaves it."""

import os
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from smoe_cli import errors, signals
from smoe_cli.commands import (
    bench,
    build_tables,
    cocluster,
    demo,
    evaluate,
    export,
    import_,
    inspect_,
    models,
    profile,
    regroup,
    report,
    verify,
)
from smoe_cli.options import command

app = typer.Typer(
    name="smoe",
    help="Place the experts of a Mixture-of-Experts model so that serving it on several GPUs sends less.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

COMMANDS = (
    profile.profile,
    import_.import_,
    inspect_.inspect,
    build_tables.build_tables,
    cocluster.cocluster,
    evaluate.evaluate,
    regroup.regroup,
    verify.verify,
    export.export,
    report.report,
    demo.demo,
    models.models,
    bench.bench,
)


def command_name(function: Callable[..., None]) -> str:
    """A command's name from its function's; a trailing underscore keeps Python's own words apart."""
    return function.__name__.strip("_").replace("_", "-")


for function in COMMANDS:
    app.command(name=command_name(function))(command(function))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"smoe {version('smoe')}")
        raise typer.Exit


@app.callback()
def smoe(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before a command; typer shows the app's help text."""


PLAIN_WORDS = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}
"""What an option's value must be, by the name that pydantic has for the fault."""


def _in_plain_words(error: typer.TyperException) -> None:
    """Say of a value that an option does not take what typer says in pydantic's words."""
    listed = getattr(error.__cause__, "errors", None)
    if listed is None or not hasattr(error, "message"):
        return
    fault = listed()[0]
    wanted, facts = PLAIN_WORDS.get(fault["type"]), fault.get("ctx", {})
    seen = f"{fault['input']!r} is not "
    error.message = f"{seen}{wanted.format(**facts)}." if wanted else str(facts.get("error", fault["msg"]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        code = app(args=arguments, prog_name="smoe", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        _in_plain_words(error)
        show = getattr(error, "show", None)
        if show:
            show()
        return int(getattr(error, "exit_code", errors.USAGE))
    except SystemExit as error:  # outside a command: shell completion, or a reader that left while help was printed
        return errors.report(errors.ReaderGone()) if errors.is_reader_gone(error) else _exit_code(error)
    except BaseException as error:  # noqa: BLE001 (the last resort: every failure gets its sentence and code)
        return errors.report(error)
    return code if isinstance(code, int) else 0


def _exit_code(error: SystemExit) -> int:
    return error.code if isinstance(error.code, int) else int(bool(error.code))


def main() -> NoReturn:
    """Entry point of the `smoe` script."""
    signals.listen()
    closed = sys.stdout is None
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # print(file=None) would write to the other one
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (open until the end)
    code = run(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C from here on ends the program without a traceback
    sys.exit(errors.BROKEN_PIPE if closed and not code else code)
