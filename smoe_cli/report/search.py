"""How the solver got where it is, layer by layer, and how far from the best there is (solver.jsonl)."""

from statistics import mean
from typing import Any

from smoe_cli.report.gathering import Found

LINE = (
    "layer",
    "origin",
    "objective",
    "stages",
    "certificate",
    "validation_gain",
    "validation_two_standard_errors",
    "note",
    "moved",
)
SETTINGS = ("goal", "method", "effort", "confirmed")


def solver_section(found: Found) -> dict[str, Any] | None:
    """Stages and certificate of every layer; None of a placement that was imported."""
    if found.placed is None or found.placed.log is None:
        return None
    layers: list[dict[str, Any]] = [{name: line.get(name) for name in LINE} for line in found.placed.log]
    certificates = [layer["certificate"] for layer in layers]
    gaps = [one["gap"] for one in certificates if one["gap"] is not None]
    gains = [layer["validation_gain"] for layer in layers if layer["validation_gain"] is not None]
    kinds = [one["kind"] for one in certificates]
    parameters = found.placed.artefact.parameters
    return {
        **{name: parameters.get(name) for name in SETTINGS},
        "layers": layers,
        "summary": {
            "gap": mean(gaps) if gaps else None,
            "optimal": kinds.count("optimal"),
            "bounded": kinds.count("bound"),
            "gain": mean(gains) if gains else None,
        },
    }
