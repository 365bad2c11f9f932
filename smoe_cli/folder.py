"""The working folder (-C): which artefacts lie where, and which one a command means."""

import re
from pathlib import Path
from typing import Any

from smoe_cli.errors import UsageError
from smoe_cli.options import DEFAULT_DIR
from smoe_profiles.artefact import Artefact, open_artefact, restore_set_aside
from smoe_profiles.choices import Level
from smoe_profiles.errors import InputError, SmoeError
from smoe_profiles.models import Model, describe_identity, find_model, is_unknown, model_identity, same_model
from smoe_profiles.trace import open_trace

TRACE, TABLES, PLACEMENT, CHECKPOINT, MAP, EVALUATION = (
    "trace",
    "tables",
    "placement",
    "checkpoint",
    "map",
    "evaluation",
)


def sibling(placement: Path, kind: str) -> Path:
    """The checkpoint, map or evaluation folder that belongs to a placement: the same name, another first word."""
    return placement.with_name(placement.name.replace(PLACEMENT, kind, 1))


def placement_path(folder: Path, ep: int, name: str | None) -> Path:
    """Where a placement goes. Raises UsageError for a name that is more than one plain word."""
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UsageError(f"--name {name!r} may hold letters, digits, dot, dash and underscore only.")
    return folder / f"{PLACEMENT}-ep{ep}{f'-{name}' if name else ''}"


def choose_placement(folder: Path, wanted: str | None, *, hashes: bool = False) -> Artefact:
    """The placement a command means: the one named (a bare name is in `folder`), or the only one that fits.

    Raises UsageError if several fit and none is named, InputError if there is none.
    """
    found = placements(folder)
    names = ", ".join(path.name for path in found)
    if wanted:
        path = folder / wanted if Path(wanted).name == wanted else Path(wanted)
        restore_set_aside(path)
        if names and not path.exists():
            raise InputError(f"there is no placement {path}; {folder} holds {names}.")
        return open_artefact(path, PLACEMENT, hashes=hashes)
    if not found:
        raise InputError(f"{folder} holds no placement; make one with smoe cocluster --ep G.")
    if len(found) > 1:
        raise UsageError(f"{folder} holds several placements; choose one with --placement: {names}.")
    return open_artefact(found[0], PLACEMENT, hashes=hashes)


def placements(folder: Path) -> list[Path]:
    """The placements that a working folder holds, by name."""
    return sorted(path for path in folder.glob(f"{PLACEMENT}-ep*") if (path / "manifest.json").exists())


def has_heldout_rows(folder: Path) -> bool:
    """Whether evaluate can measure on the folder's own trace."""
    try:
        return open_trace(folder / TRACE).rows("heldout") > 0
    except SmoeError:  # none, or of no use
        return False


def step_after_trace(trace: Path, level: str, fit_rows: int) -> tuple[tuple[str, ...], Path]:
    """The command that goes on from a trace, and the folder to run it in.

    A trace of held-out rows alone is measured where a placement is: FOLDER, for the user to fill in, if none is here.
    """
    if level != Level.TOKEN:
        return ("inspect",), trace.parent
    if fit_rows:
        return ("build-tables",), trace.parent
    if placements(trace.parent):
        return ("evaluate",), trace.parent
    return ("evaluate", "--trace", str(trace)), DEFAULT_DIR if placements(DEFAULT_DIR) else Path("FOLDER")


def applied(placement: Artefact) -> bool:
    """Whether regroup has written a checkpoint or map of this very placement, and not of one it replaced."""
    for kind in (CHECKPOINT, MAP):
        try:
            written = open_artefact(sibling(placement.path, kind), kind)
        except InputError:  # none, or damaged
            continue
        if written.parent_id(PLACEMENT) == placement.id:
            return True
    return False


def can_regroup(model: dict[str, Any], num_layers: int) -> bool:
    """Whether regroup can write a placement of so many layers: its model's weights are known, and it has them all."""
    return not is_unknown(model) and num_layers == len(model["layers"])


def trace_model_name(folder: Path) -> str:
    """Where the traced model was, from trace/run.json. Raises UsageError if that is not known."""
    path = folder / TRACE
    if not path.exists():
        raise UsageError(f"{folder} holds no trace that says which model it is; give --model.")
    name = open_artefact(path, TRACE).run().get("model")
    if not name:
        raise UsageError(f"{path} does not say where its model is; give --model.")
    return str(name)


def model_of(artefact: Artefact, folder: Path, wanted: str | None) -> Model:
    """The model an artefact was made for: the one given, or where the trace found it; its identity is checked.

    Raises InputError if it is another model.
    """
    model = find_model(wanted or trace_model_name(folder))
    identity = model_identity(model)
    if not same_model(identity, artefact.model):
        raise InputError(
            f"{artefact.path} is for {describe_identity(artefact.model)}, "
            f"but {model.name} is {describe_identity(identity)}."
        )
    return model
