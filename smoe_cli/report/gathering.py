"""What lies in a working folder, opened: the artefacts a report rests on, and why others are left out.

Nothing but a wrong name or an ambiguous choice stops a report: an artefact that is missing, damaged or made from
another one is left out and said so.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from smoe_cli.errors import UsageError
from smoe_cli.folder import EVALUATION, PLACEMENT, TABLES, TRACE, applied, choose_placement, sibling
from smoe_cli.options import DEFAULT_DIR
from smoe_cli.placement import Placement, read_placement, read_runtime
from smoe_profiles.artefact import Artefact, open_artefact
from smoe_profiles.choices import Level
from smoe_profiles.errors import InputError
from smoe_profiles.models import describe_identity, same_model
from smoe_profiles.tables import Tables, open_tables
from smoe_profiles.tensors import read_json, read_json_lines
from smoe_profiles.trace import Trace, open_trace
from smoe_solvers.choices import Predictor

SOLVER_LOG = "solver.jsonl"

MODEL_COMMANDS = ("export", "regroup", "verify")
"""Commands that need a model, by default the one that the trace names."""

Opened = TypeVar("Opened")


@dataclass(frozen=True)
class Measured:
    """An evaluation-epG/ and what it measured."""

    artefact: Artefact
    document: dict[str, Any]

    @property
    def context(self) -> dict[str, Any]:
        context: dict[str, Any] = self.document["context"]
        return context


@dataclass(frozen=True)
class Placed:
    """A placement-epG/. served: the predictor that validation preferred, by layer; none of an imported placement.

    log: the lines of solver.jsonl, None where it was imported. applied: whether regroup has written it.
    """

    artefact: Artefact
    placement: Placement
    served: list[str]
    log: list[dict[str, Any]] | None
    applied: bool


@dataclass
class Found:
    """A working folder's artefacts that belong together, None where there is none.

    name: of the placement that the report is about, said of an evaluation whose placement is gone too.
    named: what --placement must be given, None where it need not. others: evaluations of further placements, by their
    name. notes: (folder name, kind, id, why it is not used).
    """

    folder: Path
    name: str | None = None
    trace: Trace | None = None
    tables: Tables | None = None
    placed: Placed | None = None
    measured: Measured | None = None
    others: dict[str, Measured] = field(default_factory=dict)
    notes: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    named: str | None = None

    @property
    def anchor(self) -> Artefact | None:
        """The artefact whose model the report names, the most derived first."""
        opened = (self.placed, self.measured, self.tables, self.trace)
        return next((one.artefact for one in opened if one is not None), None)

    @property
    def ranks(self) -> int | None:
        """G, of the placement or of what was measured."""
        if self.placed is not None:
            return self.placed.placement.num_ranks
        return None if self.measured is None else int(self.measured.context["ranks"])

    @property
    def layer_ids(self) -> list[int]:
        """The MoE layers that are covered: all of the model's, or those that were recorded."""
        if self.placed is not None:
            return list(self.placed.placement.layer_ids)
        if self.measured is not None:
            return [int(layer) for layer in self.measured.document["layers"]]
        opened = self.tables or self.trace
        return [layer.id for layer in opened.layers] if opened else []

    @property
    def model_name(self) -> str | None:
        """What the trace calls its model, a short name, hub id or folder; None where it does not say."""
        name = self.trace.artefact.run().get("model") if self.trace else None
        return str(name) if name else None

    def needs_model(self, command: str) -> bool:
        """Whether a command must be told which model it is."""
        return command in MODEL_COMMANDS and self.model_name is None

    def command(self, *words: str, chosen: bool = False, where: Path | None = None) -> str:
        """A command line for this folder. chosen: of a command that needs the placement's name where several fit.

        where: another folder that it is for.
        """
        model = ["--model", "MODEL"] if self.needs_model(words[0]) else []
        named = ["--placement", self.named] if chosen and self.named else []
        here = where or self.folder
        folder = [] if here == DEFAULT_DIR or "-C" in words else ["-C", str(here)]
        return shlex.join(["smoe", *words, *model, *named, *folder])


def gather(folder: Path, wanted: str | None) -> Found:
    """Open everything in a folder that a report can use. wanted: a placement's folder name, needed if several fit.

    Raises InputError if there is nothing, UsageError if several placements fit and none is named.
    """
    found = Found(folder)
    names = _placement_names(folder)
    path = _chosen_path(folder, names, wanted)
    if path is not None:
        found.named = wanted if len(names) > 1 or path.parent != folder else None
        found.name = path.name
        found.placed = _open(found, path, PLACEMENT, _read_placed)
        found.measured = _open(found, sibling(path, EVALUATION), EVALUATION, _read_measured)
        if found.measured and found.placed and not _is_parent(found.measured.artefact, found.placed.artefact):
            _leave_out(found, found.measured.artefact, f"it measured another {path.name}")
            found.measured = None
    found.tables = _open(found, folder / TABLES, TABLES, open_tables)
    if found.tables and not _of_tables(found, found.tables.artefact):
        _leave_out(found, found.tables.artefact, f"{found.name} was made from other tables")
        found.tables = None
    found.trace = _open(found, folder / TRACE, TRACE, lambda path: open_trace(path, needs=Level.COUNT))
    if found.trace and found.anchor and not same_model(found.trace.artefact.model, found.anchor.model):
        _leave_out(found, found.trace.artefact, f"it is of {describe_identity(found.trace.artefact.model)}")
        found.trace = None
    for name in names:
        if name != found.name:
            measured = _open(found, folder / name.replace(PLACEMENT, EVALUATION, 1), EVALUATION, _read_measured)
            if measured and found.anchor and same_model(measured.artefact.model, found.anchor.model):
                found.others[name] = measured
    if found.anchor is None:
        broken = next((note for *_, note in found.notes if note), None)
        raise InputError(
            f"{folder} holds nothing to report on{f' ({broken})' if broken else ''}; record a trace first: "
            f"{found.command('profile', '--model', 'M')}."
        )
    return found


def _placement_names(folder: Path) -> list[str]:
    """Names of the placements in a folder, an evaluation standing in for one that is gone."""
    paths = [path for kind in (PLACEMENT, EVALUATION) for path in folder.glob(f"{kind}-ep*")]
    whole = [path.name for path in paths if (path / "manifest.json").exists()]
    return sorted({name.replace(EVALUATION, PLACEMENT, 1) for name in whole})


def _chosen_path(folder: Path, names: list[str], wanted: str | None) -> Path | None:
    if wanted is not None:
        path = folder / wanted if Path(wanted).name == wanted else Path(wanted)
        if not any((one / "manifest.json").exists() for one in (path, sibling(path, EVALUATION))):
            choose_placement(folder, wanted)  # says what is wrong with it
        return path
    if len(names) > 1:
        raise UsageError(f"{folder} holds several placements; choose one with --placement: {', '.join(names)}.")
    return folder / names[0] if names else None


def _open(found: Found, path: Path, kind: str, read: Callable[[Path], Opened]) -> Opened | None:
    """What `read` makes of a folder; None where there is none, or it is broken, which is noted."""
    if not path.exists():
        return None
    try:
        opened = read(path)
    except (InputError, ValueError, KeyError, TypeError, IndexError) as error:
        why = str(error) if isinstance(error, InputError) else f"{path} is damaged ({error!r}); make it again"
        found.notes.append((path.name, kind, None, why))
        return None
    artefact: Artefact = getattr(opened, "artefact")  # noqa: B009 (every reader's answer has one)
    found.notes.append((path.name, kind, artefact.id, None))
    return opened


def _leave_out(found: Found, artefact: Artefact, why: str) -> None:
    found.notes = [(*line[:3], why) if line[2] == artefact.id else line for line in found.notes]


def _read_placed(path: Path) -> Placed:
    artefact = open_artefact(path, PLACEMENT)
    placement = read_placement(artefact)
    arrays, metadata = read_runtime(artefact)
    names = json.loads(metadata["predictors"])
    served = [str(Predictor(names[int(number)])) for number in arrays["predictor"].tolist()] if names else []
    log = path / SOLVER_LOG
    lines = read_json_lines(log) if log.exists() else None
    return Placed(artefact, placement, served, lines, applied(artefact))


def _read_measured(path: Path) -> Measured:
    artefact = open_artefact(path, EVALUATION)
    document = read_json(path / "evaluation.json")
    held = document if isinstance(document, dict) else {}
    if any(not isinstance(held.get(key), dict) for key in ("context", "total", "layers")):
        raise InputError(f"{path / 'evaluation.json'} is not what smoe evaluate writes; measure again.")
    return Measured(artefact, by_layer(held))


def by_layer(tree: Any) -> Any:
    """The same with everything told by layer in the layers' order: JSON keys are sorted as text, `10` before `2`."""
    if not isinstance(tree, dict):
        return tree
    found = {key: by_layer(value) for key, value in tree.items()}
    if isinstance(found.get("layers"), dict):
        found["layers"] = dict(sorted(found["layers"].items(), key=lambda item: int(item[0])))
    return found


def _is_parent(child: Artefact, parent: Artefact) -> bool:
    return child.parent_id(parent.kind) == parent.id


def _of_tables(found: Found, tables: Artefact) -> bool:
    """Whether tables are those that a placement was made from, or what was measured; of the same model otherwise."""
    if found.placed is not None and found.placed.artefact.parent_id(TABLES):
        return _is_parent(found.placed.artefact, tables)
    if found.measured is not None:
        return bool(found.measured.context.get("tables") == tables.id)
    return found.anchor is None or same_model(tables.model, found.anchor.model)
