"""Where work lies and where rows travel: expert load by rank before and after, and rows between pairs of ranks.

Axes: L MoE layers, E experts, P slots, G ranks.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_cli.placement import Placement, contiguous_placement
from smoe_cli.report.gathering import Found, Measured
from smoe_cli.report.states import GROUPS
from smoe_solvers.figures import imbalance

IntArray = npt.NDArray[np.integer]

MOST_PAIRS = 100_000
"""Entries of pair matrices by layer; with more, only their sum over layers is drawn."""

SIDES = ("contiguous", "placed")


def load_section(found: Found) -> dict[str, Any] | None:
    """Load of every expert and rank: of held-out rows where they were measured, else of the tables' rows."""
    detail = _detail(found.measured)
    if detail:
        load = [layer["expert_load"] for layer in detail.values()]
        by_rank = {side: [layer["rank_load"][side] for layer in detail.values()] for side in SIDES}
    elif found.tables:
        load = [
            found.tables.statistics(layer)["popularity"].sum(axis=0)[: layer.num_experts].tolist()
            for layer in found.tables.layers
        ]
        by_rank = {}
    else:
        return None
    if found.placed is None:
        alone = [list(range(len(row))) for row in load]
        slots: dict[str, Any] = {"contiguous": {"rank": [0] * len(load[0]), "expert": alone}, "placed": None}
        return _section(detail is not None, load, slots, by_rank)
    placement = found.placed.placement
    sides = dict(zip(SIDES, (_contiguous(placement), placement), strict=True))
    if not by_rank:
        by_rank = {side: _rank_load(np.array(load), one).tolist() for side, one in sides.items()}
    slots = {
        side: {"rank": one.slot_to_rank.tolist(), "expert": one.physical_to_logical.tolist()}
        for side, one in sides.items()
    }
    return _section(detail is not None, load, slots, by_rank)


def _section(held_out: bool, load: list[list[int]], slots: dict[str, Any], by_rank: dict[str, Any]) -> dict[str, Any]:
    uneven = {side: [float(imbalance(np.array(row))) for row in rows] for side, rows in by_rank.items()}
    return {
        "source": "heldout" if held_out else "tables",
        "load": load,
        "slots": slots,
        "rank_load": by_rank or None,
        "imbalance": uneven or None,
    }


def _contiguous(placement: Placement) -> Placement:
    return contiguous_placement(placement.layer_ids, placement.num_experts, placement.num_ranks)


def _rank_load(load: IntArray, placement: Placement) -> npt.NDArray[np.int64]:
    """Activations by rank, [L, G], an expert's shared equally by its copies. load: [L, E]."""
    shares = placement.hosts / placement.hosts.sum(axis=2, keepdims=True)
    by_rank: npt.NDArray[np.int64] = np.rint(np.einsum("le,leg->lg", load, shares)).astype(np.int64)
    return by_rank


def _detail(measured: Measured | None) -> dict[str, Any] | None:
    """layer id -> what evaluate kept to be drawn; None in evaluations of before it was kept."""
    layers: dict[str, Any] | None = (measured.document.get("detail") or {}).get("layers") if measured else None
    return layers or None


def traffic_section(found: Found) -> dict[str, Any] | None:
    """Rows sent from rank to rank; rows that find work at home stand apart."""
    detail = _detail(found.measured)
    if detail is None or found.measured is None:
        return None
    kept = next(iter(detail.values()))["pairs"]
    states = [state for state in GROUPS if state in kept]
    pairs = {state: np.array([layer["pairs"][state] for layer in detail.values()], np.int64) for state in states}
    home = {state: np.diagonal(rows.sum(axis=0)).tolist() for state, rows in pairs.items()}
    for rows in pairs.values():
        everyone = np.arange(rows.shape[1])
        rows[:, everyone, everyone] = 0
    small = sum(rows.size for rows in pairs.values()) <= MOST_PAIRS
    return {
        "unit": "rows of held-out tokens, summed over layers",
        "rows": found.measured.context["rows"],
        "predictor": found.measured.context["predictors"][0],
        "states": states,
        "total": {state: rows.sum(axis=0).tolist() for state, rows in pairs.items()},
        "home": home,
        "layers": [int(layer) for layer in detail] if small else [],
        "by_layer": {state: rows.tolist() for state, rows in pairs.items()} if small else {},
        "travel": _travel(found.measured.document),
        "note": None if small else f"{len(detail)} layers are too many to draw each pair of ranks: their sum is shown",
    }


def _travel(evaluation: dict[str, Any]) -> list[dict[str, Any]] | None:
    """What rows travel a token and layer, mean over layers, in the order measured; None of ranks equally far apart."""
    if "travel" not in evaluation:
        return None
    return [
        {"state": state, "predictor": predictor, "travel": figures["travel"], "crossing": figures.get("crossing")}
        for state, by_predictor in evaluation["travel"]["total"].items()
        for predictor, figures in by_predictor.items()
    ]
