"""The command-line reference, generated from the commands' own signatures: `python -m smoe_cli.reference FILE`."""

import inspect
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from typer.models import ArgumentInfo, OptionInfo

from smoe_cli.app import COMMANDS, command_name
from smoe_cli.options import COMMON, command


@dataclass(frozen=True)
class Option:
    """One option of one command, as a user sees it."""

    key: str
    names: str
    kind: str
    default: str
    repeatable: bool
    help: str

    def frozen(self) -> str:
        """One line that changes when anything a script may rely on changes."""
        return f"{self.names} <{self.kind}>{'...' if self.repeatable else ''} = {self.default}"


def command_options() -> dict[str, list[Option]]:
    """Every command's options by command name, in the order of the help page."""
    return {
        command_name(function): [
            _option(parameter) for parameter in inspect.signature(command(function)).parameters.values()
        ]
        for function in COMMANDS
    }


def _option(parameter: inspect.Parameter) -> Option:
    annotation, info = get_args(parameter.annotation)[:2]
    assert isinstance(info, OptionInfo | ArgumentInfo)
    choices = [kind for kind in get_args(annotation) if kind is not NoneType]
    plain = choices[0] if isinstance(annotation, UnionType) else annotation
    repeatable = get_origin(plain) is list
    plain = get_args(plain)[0] if repeatable else plain
    required = parameter.default is inspect.Parameter.empty
    default = "required" if required else str(getattr(parameter.default, "value", parameter.default))
    # Option("--ep", ...) keeps its first name as `default` until typer reads the annotation.
    names = [info.default] if isinstance(info.default, str) else []
    shown = info.metavar or "" if isinstance(info, ArgumentInfo) else ", ".join([*names, *(info.param_decls or ())])
    return Option(parameter.name, shown, _kind(plain, info), default, repeatable, info.help or "")


def _kind(plain: Any, info: OptionInfo | ArgumentInfo) -> str:
    if plain is bool or (isinstance(info, OptionInfo) and info.count):
        return "flag"
    if issubclass(plain, StrEnum):
        return "|".join(plain)
    return {int: "whole number", float: "number", Path: "path", str: "text"}[plain]


def page() -> str:
    """The whole reference as Markdown."""
    lines = [
        "# Command line",
        "",
        "Generated from the program by `make docs`; a test holds the two together. A value comes from the command",
        "line, else from the variable `SMOE_<OPTION>` (`SMOE_SEQ_LEN`), else from `--config`, else from the default.",
        "",
        "## Options of every command",
        "",
        *_table([option for option in command_options()["profile"] if option.key in COMMON]),
    ]
    for function in COMMANDS:
        name = command_name(function)
        own = [option for option in command_options()[name] if option.key not in COMMON]
        lines += ["", f"## smoe {name}", "", inspect.getdoc(function) or "", ""]
        lines += _table(own) if own else ["No options of its own."]
    return "\n".join(lines) + "\n"


def _table(options: list[Option]) -> list[str]:
    rows = ["| option | value | default | meaning |", "| --- | --- | --- | --- |"]
    for option in options:
        names = ", ".join(f"`{name}`" for name in option.names.split(", "))
        kind = option.kind.replace("|", " \\| ") + (", repeatable" if option.repeatable else "")
        silent = option.kind == "flag" or option.default in ("None", "required")
        default = {"required": "required"}.get(option.default, "") if silent else f"`{option.default}`"
        rows.append(f"| {names} | {kind} | {default} | {option.help} |")
    return rows


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
