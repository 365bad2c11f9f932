"""A page on disk: whole or not at all, and never over a file that is something else."""

import os
from pathlib import Path

from smoe_cli.folder import PLACEMENT
from smoe_profiles.artefact import sync_to_disk
from smoe_profiles.errors import ImpossibleError, InputError, MachineError

MARK = b'<meta name="generator" content="smoe report">'
"""Every page holds it near its start, so that an older report can be told from any other file."""

HEAD = 4096


def page_path(folder: Path, placement: str | None) -> Path:
    """Where a page goes: report-epG.html beside the placement that it is about, report.html without one."""
    name = placement.replace(PLACEMENT, "report", 1) if placement else "report"
    return folder / f"{name}.html"


def check_page(path: Path, *, force: bool) -> None:
    """Refuse, before any work, a place where a page cannot go.

    Raises ImpossibleError for a folder, or for a file that is no report and not to be replaced; InputError or
    MachineError where nothing can be written.
    """
    if path.is_dir():
        raise ImpossibleError(f"{path} is a folder; give --out a file.")
    if path.exists() and not force:
        with path.open("rb") as file:
            known = MARK in file.read(HEAD)
        if not known:
            raise ImpossibleError(f"{path} is not a smoe report; --force replaces it.")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is no folder; make it first.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise MachineError(f"{path.parent} is not writable.")


def write_page(path: Path, page: str) -> None:
    """Write the page beside its place, sync it, and rename it there."""
    staged = path.with_name(f".{path.name}.partial")
    try:
        with staged.open("w", encoding="utf-8", newline="\n") as file:
            file.write(page)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
        sync_to_disk(path.parent)
    finally:
        staged.unlink(missing_ok=True)
