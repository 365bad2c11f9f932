"""Options every command has, declared once; and where a value comes from: flag, SMOE_* variable, config, default."""

import inspect
import shlex
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.models import OptionInfo

from smoe_cli import errors
from smoe_cli.config import read_config
from smoe_cli.console import Console

DEFAULT_DIR = Path("smoe-out")


@dataclass(frozen=True)
class Common:
    """The working folder that holds all artefacts, and how to talk to the user."""

    dir: Path
    console: Console

    def next(self, *words: str, where: Path | None = None) -> str:
        """The command to run next, ready to be pasted into a shell: next("verify", "--hashes").

        where: the folder it is for; None: the same one.
        """
        folder = self.dir if where is None else where
        return shlex.join(["smoe", *words, *([] if folder == DEFAULT_DIR else ["-C", str(folder)])])


DirOption = Annotated[Path, typer.Option("-C", "--dir", file_okay=False, help="Folder that holds all artefacts.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress or notes.")]
VerboseOption = Annotated[int, typer.Option("--verbose", "-v", count=True, help="Say more.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", is_eager=True, callback=read_config, help="TOML file with defaults for options."),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed; the same seed and input give the same bytes.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and stop.")]
JobsOption = Annotated[int, typer.Option("--jobs", "-j", min=0, help="Processes; 0: one a core.")]
RayOption = Annotated[
    str | None,
    typer.Option("--ray", help="Work on a Ray cluster: HOST:PORT, ray://HOST:PORT or auto (needs smoe[ray])."),
]
HashesOption = Annotated[bool, typer.Option("--hashes", help="Check the contents of every input file, not only sizes.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Short name, hub id or folder; default: the trace's model.")
]
PlacementOption = Annotated[
    str | None, typer.Option("--placement", help="Which placement, by folder name; needed only if several fit.")
]

COMMON: dict[str, tuple[Any, Any]] = {
    "dir": (DirOption, DEFAULT_DIR),
    "json": (JsonOption, False),
    "quiet": (QuietOption, False),
    "verbose": (VerboseOption, 0),
    "debug": (DebugOption, False),
    "config": (ConfigOption, None),
}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the common options; it receives them as its first argument, a Common."""
    signature = inspect.signature(function)
    own = list(signature.parameters.values())[1:]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in COMMON.items()
    ]

    @wraps(function)
    def run(**values: Any) -> None:
        common = {name: values.pop(name) for name in COMMON}
        console = Console(json=common["json"], quiet=common["quiet"], verbose=common["verbose"])
        try:
            function(Common(dir=common["dir"], console=console), **values)
        except BaseException as error:
            if common["debug"]:
                traceback.print_exception(error)
            outwards = _outwards(error)
            if outwards is error:
                raise
            raise outwards from error

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + shared
    for parameter in parameters:
        for info in get_args(parameter.annotation)[1:]:
            if isinstance(info, OptionInfo):
                info.envvar, info.show_envvar = f"SMOE_{parameter.name.strip('_').upper()}", False
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _outwards(error: BaseException) -> BaseException:
    """An error as it leaves a command: the few that typer would swallow become ones that it does not know."""
    if isinstance(error, BrokenPipeError) or errors.is_reader_gone(error):
        return errors.ReaderGone()
    if isinstance(error, KeyboardInterrupt):
        return errors.Interrupted()
    if isinstance(error, SystemExit):  # of a library: what it was to do is not done, whatever code it names
        return RuntimeError(f"something ended the program with SystemExit({error.code!r})")
    return error
