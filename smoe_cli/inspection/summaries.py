"""What smoe inspect says of an artefact that is no trace: its manifest, its parents and the figures in its files.

Axes: L MoE layers, E experts, G ranks.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_cli.evaluation.measuring import STATES
from smoe_cli.folder import CHECKPOINT, EVALUATION, MAP, PLACEMENT, TABLES, TRACE
from smoe_cli.placement import contiguous_placement, read_placement
from smoe_profiles.artefact import Artefact, open_artefact
from smoe_profiles.errors import InputError
from smoe_profiles.models import describe_identity, is_unknown, same_model
from smoe_profiles.tables import Tables
from smoe_profiles.tensors import read_json, read_json_lines
from smoe_profiles.trace import read_layers
from smoe_solvers.choices import Mode

MANIFESTS = ("smoe/manifest.json", "manifest.json")

SHOWN = ("lar", "fanout", "remote_fanout", "load_imbalance")
HIDDEN = ("layers",)
"""Parameters that are shown in another form."""


def artefact_kind(path: Path) -> str:
    """What kind of artefact a folder is. Raises InputError if it is none."""
    for name in MANIFESTS:
        record = path / name
        if record.exists():
            manifest = read_json(record)
            kind = manifest.get("kind") if isinstance(manifest, dict) else None
            if isinstance(kind, str):
                return kind
            raise InputError(f"{record} does not say what kind of artefact this is; it is not a smoe manifest.")
    if not path.exists():
        beside = _held_in(path.parent)
        raise InputError(f"{path} is missing{f'; {path.parent} holds {beside}' if beside else ''}.")
    held = _held_in(path)
    raise InputError(f"{path} has no manifest.json; {f'name one of {held} in it' if held else 'it is no artefact'}.")


def _held_in(folder: Path) -> str:
    """The artefacts in a folder, by name."""
    found = {record.relative_to(folder).parts[0] for name in MANIFESTS for record in folder.glob(f"*/{name}")}
    return ", ".join(sorted(found))


def describe(artefact: Artefact) -> dict[str, Any]:
    """What every artefact says of itself."""
    files = artefact.manifest["files"]
    return {
        "path": str(artefact.path),
        "kind": artefact.kind,
        "id": artefact.id,
        "model": artefact.model,
        "model_name": _model_name(artefact),
        "created": artefact.run().get("created"),
        "bytes": sum(facts["bytes"] for facts in files.values()),
        "files": len(files),
        "parents": _parents(artefact),
    }


def _model_name(artefact: Artefact) -> str:
    """A model's identity in words; where its weights were not read, behind the name that its trace was given."""
    described = describe_identity(artefact.model)
    if not is_unknown(artefact.model):
        return described
    traces = [artefact] if artefact.kind == TRACE else _beside(artefact, TRACE)
    names = [trace.run().get("model") for trace in traces if same_model(trace.model, artefact.model)]
    return ", ".join([*map(str, filter(None, names[:1])), described])


def _parents(artefact: Artefact) -> list[dict[str, Any]]:
    """Each parent, and whether an artefact beside this one is it: `found`, `another` of its kind only, or `absent`."""
    parents = []
    for parent in artefact.manifest["parents"]:
        beside = _beside(artefact, parent["kind"])
        same = [other.path.name for other in beside if other.id == parent["id"]]
        state = "found" if same else "another" if beside else "absent"
        names = same or [other.path.name for other in beside]
        parents.append({"kind": parent["kind"], "id": parent["id"], "state": state, "beside": names})
    return parents


def _beside(artefact: Artefact, kind: str) -> list[Artefact]:
    """The whole artefacts of a kind in the same folder."""
    found = []
    for path in sorted(artefact.path.absolute().parent.iterdir()):
        if not path.name.startswith(kind):
            continue
        try:
            found.append(open_artefact(path, kind))
        except InputError:
            continue
    return found


def summarise(artefact: Artefact, *, hashes: bool) -> dict[str, Any]:
    """An artefact of any kind but a trace as one JSON document."""
    document = describe(artefact) | {
        "parameters": {key: value for key, value in artefact.parameters.items() if key not in HIDDEN},
        "layers": {},
    }
    if artefact.kind == TABLES:
        document |= _tables(artefact)
    elif artefact.kind in (PLACEMENT, CHECKPOINT, MAP):
        document |= _placement(artefact)
    elif artefact.kind == EVALUATION:
        document |= _evaluation(artefact)
    stale = [parent for parent in document["parents"] if parent["state"] == "another" and parent["kind"] != "trace"]
    messages = [f"made from {old['kind']} {old['id'][:12]}, not {', '.join(old['beside'])} beside it" for old in stale]
    document["lint"] = [
        {"kind": "another-parent", "layer": None, "rows": 0, "message": message} for message in messages
    ]
    checked = "contents are as its manifest says" if hashes else "sizes are as its manifest says"
    document["verdict"] = f"stale: {messages[0]}" if stale else f"whole: all {checked}"
    return document


def _tables(artefact: Artefact) -> dict[str, Any]:
    tables = Tables(artefact, *read_layers(artefact))
    occurrences, _ = tables.vocabulary()
    layers = {}
    for layer in tables.layers:
        load = tables.statistics(layer)["popularity"].sum(axis=0)
        facts = {"num_experts": layer.num_experts, "top_k": layer.top_k, "unused": int((load == 0).sum())}
        layers[str(layer.id)] = facts | {"load_imbalance": _imbalance(load)}
    seen = int((occurrences.sum(axis=0) > 0).sum())
    return {"layers": layers, "token_ids": {"seen": seen, "vocabulary": tables.vocab_size}}


def _evaluation(artefact: Artefact) -> dict[str, Any]:
    path = artefact.path / "evaluation.json"
    content = read_json(path, own=True)
    try:
        total = {state: content["total"][state] for state in STATES}
        shown = [found["rule"] for predictors in total.values() for found in predictors.values()]
        for figures in (*shown, content["load_balancer"]["total"]):
            times = figures.get("microseconds", {})
            numbers = [*(figures[name] for name in SHOWN), *times.values()]
            _check(all(isinstance(value, int | float) for value in numbers))
            timed = times.get(Mode.SPECULATIVE, times.get(Mode.SP_EP))
            _check(bool(timed) or not content["context"]["hardware"])
        context = content["context"]
        _check(isinstance(context["rows"], int) and isinstance(context["hardware"], str | None))
        _check({"ranks", "batch", "quota"} <= context.keys())
        return {"total": total, "load_balancer": content["load_balancer"], "context": context}
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} does not hold what smoe evaluate writes ({error!r}).") from error


def _check(sound: bool) -> None:
    if not sound:
        raise TypeError("a figure is no number")


def _placement(artefact: Artefact) -> dict[str, Any]:
    """Slots of every layer, how its experts were found, and the load of the ranks if the tables lie beside it."""
    placement = read_placement(artefact)
    solved = _solver_lines(artefact)
    if solved and solved.keys() != set(placement.layer_ids):
        raise InputError(f"{artefact.path} says how layers {sorted(solved)} were placed, not {placement.layer_ids}.")
    tables = _source_tables(artefact)
    experts, ranks = placement.num_experts, placement.num_ranks
    contiguous = contiguous_placement(placement.layer_ids, experts, ranks).hosts[0]
    layers = {}
    for number, hosts in zip(placement.layer_ids, placement.hosts, strict=True):
        line = solved.get(number, {})
        facts: dict[str, Any] = {key: line.get(key) for key in ("origin", "objective", "validation_gain")}
        slots = hosts.sum(axis=1)
        facts |= {"num_experts": experts, "moved": int((contiguous & ~hosts).sum())}
        facts |= {"copied": {int(expert): int(slots[expert]) for expert in np.flatnonzero(slots > 1)}}
        facts |= {"rank_imbalance": {"contiguous": None, "placed": None}, "top_k": None}
        layer = next((layer for layer in tables.layers if layer.id == number), None) if tables else None
        if tables and layer:
            load = tables.statistics(layer)["popularity"].sum(axis=0)
            by_rank = {"contiguous": contiguous, "placed": hosts}
            found = {name: _imbalance((load / held.sum(axis=1)) @ held) for name, held in by_rank.items()}
            facts |= {"rank_imbalance": found, "top_k": layer.top_k}
        layers[str(number)] = facts
    gains = [line["validation_gain"] for line in solved.values()]
    return {
        "ranks": ranks,
        "slots": placement.physical_to_logical.shape[1],
        "layers": layers,
        "tables": str(tables.artefact.path) if tables else None,
        "validation_gain": sum(gains) / len(gains) if gains else None,
    }


def _solver_lines(artefact: Artefact) -> dict[int, dict[str, Any]]:
    path = artefact.path / "solver.jsonl"
    if not path.exists():
        return {}
    lines = read_json_lines(path)
    kinds = {"layer": int, "origin": str, "objective": int | float, "validation_gain": int | float}
    for line in lines:
        if not isinstance(line, dict) or not all(isinstance(line.get(key), kind) for key, kind in kinds.items()):
            raise InputError(f"{path} has a line {line!r}, which does not say how a layer was placed.")
    return {line["layer"]: line for line in lines}


def _source_tables(artefact: Artefact) -> Tables | None:
    """The tables that a placement was made from, or that a checkpoint's or map's placement was, if they are beside."""
    for kind in (PLACEMENT, TABLES):
        wanted = artefact.parent_id(kind)
        if wanted:
            found = next((other for other in _beside(artefact, kind) if other.id == wanted), None)
            if found is None or kind == TABLES:
                return Tables(found, *read_layers(found)) if found else None
            artefact = found
    return None


def _imbalance(load: npt.NDArray[Any]) -> float | None:
    """Greatest over mean; None where nothing was counted."""
    return float(load.max() / load.mean()) if load.sum() else None
