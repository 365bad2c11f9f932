"""How well shuffles foretell where a row's experts are: by layer and predictor, and how far scores can be trusted.

Axes: L MoE layers, K experts a token.
"""

from collections.abc import Sequence
from typing import Any

from smoe_cli.evaluation.breakdown import BANDS
from smoe_cli.evaluation.detail import BINS
from smoe_cli.report.gathering import Found
from smoe_cli.report.states import RULE
from smoe_solvers.predictors import SCORE_MAX

Tree = dict[str, Any]

SHUFFLED, CEILING = "placed+shuffled", "oracle"
KNOWN = ("lar", "oracle_share", "rank_accuracy")
GROUPS = ("by_phase", "by_frequency")
APART = ("lar", "oracle_share")
"""What evaluate measures of groups of rows."""

ROUNDING = 1e-6


def prediction_section(found: Found) -> Tree | None:
    """Placed and shuffled, by the served rule; the ceiling is a shuffle that knows the true routing."""
    if found.measured is None:
        return None
    document, predictors = found.measured.document, found.measured.context["predictors"]
    layers = list(document["layers"].values())
    experts = document.get("experts") or {}
    named = [experts.get("layers", {}).get(layer, {}) for layer in document["layers"]]

    def known(figures: Tree, by_experts: Tree, predictor: str) -> Tree:
        rule = figures[SHUFFLED][predictor][RULE]
        return {name: rule[name] for name in KNOWN} | {"expert_f1": _f1(by_experts, predictor)}

    by_layer = {
        predictor: [known(layer, names, predictor) for layer, names in zip(layers, named, strict=True)]
        for predictor in predictors
    }
    return {
        "predictors": predictors,
        "chance": 1 / found.measured.context["ranks"],
        "total": {one: known(document["total"], experts.get("total", {}), one) for one in predictors},
        "layers": {one: _columns(rows) for one, rows in by_layer.items()},
        "ceiling": {
            "total": document["total"][CEILING]["oracle"][RULE]["lar"],
            "layers": [layer[CEILING]["oracle"][RULE]["lar"] for layer in layers],
        },
        "preferred": (found.placed.served or None) if found.placed else None,
        "groups": {key: _groups(document.get(key) or {}, predictors) for key in GROUPS},
    }


def _f1(by_predictor: Tree, predictor: str) -> float | None:
    """Of the experts a predictor names, how many are true; None of one that names ranks only."""
    f1: float | None = by_predictor.get(predictor, {}).get("traffic", {}).get("f1")
    return f1


def _columns(rows: Sequence[Tree]) -> Tree:
    """A column a figure, [L]; None for the experts where no layer names any."""
    columns: Tree = {name: [row[name] for row in rows] for name in rows[0]}
    if all(value is None for value in columns["expert_f1"]):
        columns["expert_f1"] = None
    return columns


def _groups(found: Tree, predictors: Sequence[str]) -> list[Tree]:
    """Rows taken apart, bands of frequency from never seen on; groups without rows are left out."""
    order = [*BANDS, *found]
    return [
        {
            "group": group,
            "rows": facts["rows"],
            **{name: {one: facts["total"][SHUFFLED][one][name] for one in predictors} for name in APART},
        }
        for group, facts in sorted(found.items(), key=lambda item: order.index(item[0]))
        if facts["rows"]
    ]


def reliability_section(found: Found) -> Tree | None:
    """Predicted against measured local activations, by layer and pooled over layers."""
    layers = (found.measured.document.get("detail") or {}).get("layers") if found.measured else None
    if not layers or found.measured is None:
        return None
    top_k = found.measured.artefact.model["layers"][0]["top_k"]
    by_layer = {
        one: [layer["reliability"][one] for layer in layers.values()] for one in found.measured.context["predictors"]
    }
    total = {one: pooled([bin_ for layer in bins for bin_ in layer], top_k) for one, bins in by_layer.items()}
    return {
        "predictors": list(by_layer),
        "top_k": top_k,
        "total": total,
        "layers": by_layer,
        "error": {one: _error(bins) for one, bins in total.items()},
    }


def pooled(bins: Sequence[Sequence[float]], top_k: int) -> list[list[float]]:
    """Bins of several layers in one: those of equal scores are added up. bins: [predicted, measured, rows] each."""
    sums: dict[int, list[float]] = {}
    for predicted, measured, rows in bins:
        score = predicted * SCORE_MAX / top_k
        number = min(int((score + ROUNDING) * BINS / (SCORE_MAX + 1)), BINS - 1)
        held = sums.setdefault(number, [0.0, 0.0, 0])
        held[0], held[1], held[2] = held[0] + predicted * rows, held[1] + measured * rows, held[2] + rows
    return [[said / rows, held / rows, rows] for _, (said, held, rows) in sorted(sums.items())]


def _error(bins: Sequence[Sequence[float]]) -> float:
    """Mean distance between predicted and measured, weighed by rows."""
    return sum(abs(said - held) * rows for said, held, rows in bins) / sum(rows for *_, rows in bins)
