"""The states side by side, as smoe evaluate measured them: what is had today, what needs more, and the ceiling.

Axes: L MoE layers.
"""

from collections.abc import Sequence
from typing import Any

from smoe_cli.report.gathering import Measured

Tree = dict[str, Any]

TODAY = "an engine that takes a map or checkpoint"
SHUFFLE = "a shuffling run time"
ROUTER = "a request router"

GROUPS: dict[str, tuple[str, str, str]] = {
    "contiguous": ("baseline", "as every engine starts", "as every engine starts"),
    "load_balancer": ("baseline", "the engine's own load balancer", "the engine's own load balancer"),
    "placed": ("placed", TODAY, TODAY),
    "shuffled": ("more", SHUFFLE, ROUTER),
    "placed+shuffled": ("more", SHUFFLE, ROUTER),
    "contiguous+oracle": ("ceiling", "knowing the future", "knowing the future"),
    "oracle": ("ceiling", "knowing the future", "knowing the future"),
}
"""States in reading order: their group, and what they need where tokens are spread over ranks, where requests are."""

FIGURES = ("lar", "fanout", "remote_fanout", "load_imbalance")
TOTALS = (*FIGURES, "load_imbalance_batch", "wire_rows")
RULE = "rule"
REQUESTS = "dp-ep"
TIME, ROWS = "microseconds", "remote_fanout"
"""What states are judged by: time in some way of running, and rows without a time."""

BALANCER = "load_balancer"


def states_section(measured: Measured) -> Tree:
    """Both tables, tokens spread over ranks and requests kept on one (attention-DP), by the served rule."""
    document = measured.document
    return {
        "hardware": measured.context.get("hardware"),
        "tokens": _rows(document, document.get(BALANCER), measured.context["predictors"], 1),
        "requests": _rows(
            document.get(REQUESTS) or {},
            (document.get(BALANCER) or {}).get(REQUESTS),
            measured.context["predictors"],
            2,
        ),
    }


def _rows(measured: Tree, balanced: Tree | None, predictors: Sequence[str], needs: int) -> list[Tree]:
    """One row a state and predictor, in the order of `predictors`.

    measured: {total, layers} of state -> predictor; balanced: {total, layers}; needs: which part of GROUPS' facts.
    """
    rows = []
    for state, facts in GROUPS.items():
        if state == BALANCER:
            found = _balancer(balanced) if balanced else {}
        else:
            found = {
                predictor: (figures[RULE], [layer[state][predictor][RULE] for layer in measured["layers"].values()])
                for predictor, figures in _in_order(measured.get("total", {}).get(state, {}), predictors)
            }
        for predictor, (total, layers) in found.items():
            named = {"state": state, "predictor": predictor, "label": _label(state, predictor, balanced)}
            rows.append(named | {"group": facts[0], "needs": facts[needs]} | _tell(total, layers))
    return rows


def _tell(total: Tree, layers: list[Tree]) -> Tree:
    """Figures of a row: the mean over layers, and each layer's in columns."""
    columns = {name: [layer[name] for layer in layers] for name in FIGURES}
    return {
        "total": {name: total[name] for name in TOTALS} | {"microseconds": total.get("microseconds") or None},
        "layers": columns | {"microseconds": _times(layers)},
    }


def _in_order(by_predictor: Tree, predictors: Sequence[str]) -> list[tuple[str, Tree]]:
    """A state's predictors as they were asked for; what has none, and the oracle, stands alone."""
    order = [*predictors, *by_predictor]
    return sorted(by_predictor.items(), key=lambda item: order.index(item[0]))


def _balancer(balanced: Tree) -> dict[str, tuple[Tree, list[Tree]]]:
    """The load balancer's figures, which stand without predictor and assignment."""
    return {"none": (balanced["total"], list(balanced["layers"].values()))}


def _times(layers: list[Tree]) -> dict[str, list[float]] | None:
    """way -> [L] microseconds; None where the model's shape is not known."""
    ways = layers[0].get("microseconds") or {}
    return {way: [layer["microseconds"][way] for layer in layers] for way in ways} or None


def _label(state: str, predictor: str, balanced: Tree | None) -> str:
    name = state.replace("_", " ").replace("+", " + ")
    if state == BALANCER and balanced and "method" in balanced:
        return f"{name} ({balanced['method'].upper()})"
    return name if predictor in ("none", "oracle") else f"{name} ({predictor})"


def state_row(states: Tree, table: str, state: str) -> Tree | None:
    """A state's row, by its first predictor. states: what `states_section` gives."""
    return next((row for row in states[table] if row["state"] == state), None)


def state_value(row: Tree | None, basis: str, way: str) -> float | None:
    """What a state is judged by; None where it was not measured."""
    if row is None:
        return None
    value: float | None = (row["total"][TIME] or {}).get(way) if basis == TIME else row["total"][basis]
    return value
