"""Options every command has, declared once; and where a value comes from: flag, SMOE_* variable, config, default."""

import inspect
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.models import OptionInfo

from smoe_cli import errors
from smoe_cli.console import Console

DEFAULT_DIR = Path("smoe-out")


@dataclass(frozen=True)
class Common:
    """The working folder that holds all artefacts, and how to talk to the user."""

    dir: Path
    console: Console

    def next(self, command: str) -> str:
        """The command to run next, in the same folder."""
        return command if self.dir == DEFAULT_DIR else f"{command} -C {shlex.quote(str(self.dir))}"


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make a TOML file the defaults: top-level keys for every command, a [command] table for one."""
    if path is None:
        return None
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read as TOML ({error}).") from error
    command = str(context.info_name)
    known = {str(parameter.name).strip("_"): str(parameter.name) for parameter in context.command.params}
    shared = {key: value for key, value in content.items() if not isinstance(value, dict)}
    own = content.get(command, {})
    if not isinstance(own, dict):
        raise typer.BadParameter(f"{path}: {command} = {own!r}; a table [{command}] was expected.")
    values = {key.replace("-", "_"): value for key, value in own.items()}
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise typer.BadParameter(f"{path}: smoe {command} has no option {unknown[0]!r}.")
    defaults = {key.replace("-", "_"): value for key, value in shared.items()}
    context.default_map = {known[key]: value for key, value in (defaults | values).items() if key in known}
    return path


DirOption = Annotated[Path, typer.Option("-C", "--dir", help="Folder that holds all artefacts.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress or notes.")]
VerboseOption = Annotated[int, typer.Option("--verbose", "-v", count=True, help="Say more.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", is_eager=True, callback=_read_config, help="TOML file with defaults for options."),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed; the same seed and input give the same bytes.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and stop.")]
JobsOption = Annotated[int, typer.Option("--jobs", "-j", min=0, help="Processes; 0: one a core.")]
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
        except KeyboardInterrupt as error:
            raise errors.Interrupted from error
        except BrokenPipeError as error:
            raise errors.ReaderGone from error

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + shared
    for parameter in parameters:
        for info in get_args(parameter.annotation)[1:]:
            if isinstance(info, OptionInfo):
                info.envvar, info.show_envvar = f"SMOE_{parameter.name.strip('_').upper()}", False
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
