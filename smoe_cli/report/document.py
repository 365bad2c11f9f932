"""The report as data: everything that the page draws and `smoe report --json` prints, from whatever is in a folder.

The same artefacts give the same document: nothing volatile is in it. Sections that cannot be made are null, and
`missing` says which command makes them. Strings out of artefacts (sources, token texts) are kept as they are; whoever
draws them escapes them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smoe_cli.report.coactivation import coactivation_section
from smoe_cli.report.following import engines, evener, map_only, next_step
from smoe_cli.report.gathering import Found
from smoe_cli.report.loads import load_section, traffic_section
from smoe_cli.report.prediction import prediction_section, reliability_section
from smoe_cli.report.recorded import trace_section
from smoe_cli.report.search import solver_section
from smoe_cli.report.states import states_section
from smoe_cli.report.tokens import tokens_section
from smoe_cli.report.transfer import transfer_section
from smoe_cli.report.verdict import verdict
from smoe_profiles.artefact import Artefact
from smoe_profiles.errors import InputError
from smoe_profiles.models import UNKNOWN_FAMILY

FORMAT, FORMAT_VERSION = "smoe-report", 1
SHAPE_ERRORS = (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError, StopIteration)
"""What a file that is whole but hostile leads to: nothing else checks evaluation.json and solver.jsonl."""

SECTIONS: dict[str, tuple[Callable[[Found], dict[str, Any] | None], str, str]] = {
    "states": (
        lambda found: states_section(found.measured) if found.measured else None,
        "The states side by side need an evaluation.",
        "evaluate",
    ),
    "expert_load": (load_section, "Expert load needs an evaluation or tables.", "build-tables"),
    "coactivation": (coactivation_section, "Co-activation needs tables.", "build-tables"),
    "traffic": (traffic_section, "Traffic between ranks needs an evaluation that keeps it.", "evaluate"),
    "prediction": (prediction_section, "Prediction needs an evaluation.", "evaluate"),
    "reliability": (reliability_section, "The reliability curve needs an evaluation that keeps it.", "evaluate"),
    "transfer": (transfer_section, "Transfer between sources needs an evaluation.", "evaluate"),
    "solver": (solver_section, "Progress and bound need a placement that cocluster made.", "cocluster --ep {ranks}"),
    "tokens": (
        tokens_section,
        "Tokens of each rank need a placement, and the tables it was made from with token ids seen often enough.",
        "cocluster --ep {ranks}",
    ),
    "trace": (trace_section, "What was recorded needs the trace.", "profile --model M"),
}
"""What makes a section, what it needs, and the command that makes that."""


def describe(found: Found) -> dict[str, Any]:
    """The document of what was found. Raises InputError for artefacts that are whole but not what smoe writes."""
    assert found.anchor is not None
    if found.placed is not None and "imported" in found.placed.artefact.parameters and _unnamed(found.anchor):
        raise InputError(
            f"{found.anchor.path} was imported without its model or tables, so it cannot be reported; import it "
            "again with --model M --force, or beside the tables of a trace, where smoe evaluate can measure it too."
        )
    try:
        document = _document(found)
        json.dumps(document, allow_nan=False)  # a figure that is no number stops here, not in a browser
    except SHAPE_ERRORS as error:
        raise InputError(
            f"{found.anchor.path} holds something else than smoe writes there ({error!r}); make it and what was made "
            "from it again."
        ) from error
    return document


def _document(found: Found) -> dict[str, Any]:
    sections = {name: make(found) for name, (make, _, _) in SECTIONS.items()}
    judged = verdict(found, sections["states"])
    judged["cautions"] += evener(found, judged)
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "title": _title(found),
        "model": _model(found),
        "layers": found.layer_ids,
        "ranks": found.ranks,
        "placement": found.name,
        "artefacts": [
            {"name": name, "kind": kind, "id": identity, "used": note is None, "note": note}
            for name, kind, identity, note in sorted(found.notes)
        ],
        "verdict": judged | {"next": next_step(found, judged), "map_only": map_only(found), "engines": engines(found)},
        "sections": sections,
        "missing": {
            name: {"sentence": needs, "command": found.command(*command.format(ranks=found.ranks or "G").split())}
            for name, (_, needs, command) in SECTIONS.items()
            if sections[name] is None
        },
    }


def _unnamed(placement: Artefact) -> bool:
    """Whether nothing said how many experts a token takes: the identity is what the slots tell."""
    return all("top_k" not in layer for layer in placement.model["layers"])


def _layers(found: Found) -> list[dict[str, Any]]:
    assert found.anchor is not None
    layers: list[dict[str, Any]] = found.anchor.model["layers"]
    return layers


def _model(found: Found) -> dict[str, Any]:
    assert found.anchor is not None
    first = _layers(found)[0]
    return {
        "family": found.anchor.model.get("family", UNKNOWN_FAMILY),
        "num_experts": first["num_experts"],
        "top_k": first["top_k"],
        "vocab_size": found.anchor.model.get("vocab_size"),
        "rule": first.get("rule", ""),
        "group_limited": any(row.get("num_groups", 1) > 1 for row in _layers(found)),
    }


def _title(found: Found) -> str:
    model, covered, total = _model(found), len(found.layer_ids), len(_layers(found))
    family = "A model" if model["family"] == UNKNOWN_FAMILY else model["family"]
    name = Path(found.model_name).name if found.model_name else family
    ranks = f", on {found.ranks} ranks" if found.ranks else ""
    layers = f"{total}" if covered == total else f"{covered} of {total}"
    sizes = f"{layers} MoE layers of {model['num_experts']} experts, top {model['top_k']}"
    return f"{name}: {sizes}{ranks}"
