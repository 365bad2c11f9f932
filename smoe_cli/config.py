"""`--config FILE.toml`: defaults of options, top-level keys for every command, a [command] table for one.

The whole file is checked, other commands' tables too: a misspelt name is found at the file's first use.
"""

import tomllib
from pathlib import Path
from typing import Any

import typer

from smoe_profiles.errors import reason

Options = dict[str, Any]
"""A command's parameters by the name a file gives them: no trailing underscore."""


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make a file's values the defaults of the command that runs.

    Raises BadParameter for a file, a name or a value that cannot be meant.
    """
    if path is None:
        return None
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{path} cannot be read as TOML ({reason(error)}).") from error
    commands: dict[str, Any] = context.find_root().command.commands  # type: ignore[attr-defined]
    options = {name: _options(command) for name, command in commands.items()}
    shared = {key: value for key, value in content.items() if not isinstance(value, dict) and key not in options}
    everywhere = {name: option for command in options.values() for name, option in command.items()}
    _values(f"{path}: no smoe command", shared, everywhere)
    chosen: dict[str, Any] = {}
    for name, table in content.items():
        if name in shared:
            continue
        if name not in options:
            raise typer.BadParameter(f"{path}: [{name}] names no smoe command; there are {', '.join(options)}.")
        if not isinstance(table, dict):
            raise typer.BadParameter(f"{path}: {name} = {table!r}; a table [{name}] was expected.")
        values = _values(f"{path}: smoe {name}", table, options[name])
        chosen = values if name == context.info_name else chosen
    own = options[str(context.info_name)]
    usable = {key: value for key, value in shared.items() if _plain(key) in own}
    context.default_map = _values(str(path), usable, own) | chosen
    return path


def _options(command: Any) -> Options:
    return {str(option.name).strip("_"): option for option in command.params if option.name not in ("config", "help")}


def _plain(key: str) -> str:
    return key.replace("-", "_")


def _values(who: str, table: dict[str, Any], options: Options) -> dict[str, Any]:
    """A table's values by parameter. Raises BadParameter, naming `who` has no such option or takes no such value."""
    found = {}
    for key, value in table.items():
        option = options.get(_plain(key))
        if option is None:
            raise typer.BadParameter(f"{who} has no option {key!r}.")
        found[option.name] = _value(f"{who}, {key} = {value!r}", option, value)
    return found


def _value(where: str, option: Any, value: Any) -> Any:
    """A value as the command line would give it: text, a list of texts if repeatable, true or false for a flag."""
    if getattr(option, "multiple", False) or option.nargs == -1:
        return [_text(where, one) for one in (value if isinstance(value, list) else [value])]
    if getattr(option, "is_flag", False) and not getattr(option, "count", False):
        if not isinstance(value, bool):
            raise typer.BadParameter(f"{where}: true or false was expected.")
        return value
    return _text(where, value)


def _text(where: str, value: Any) -> str:
    if isinstance(value, bool | list | dict):
        raise typer.BadParameter(f"{where}: one number or text was expected.")
    return str(value)
