"""Which experts are used together, sorted by rank: what a placement is for is seen as blocks on the diagonal.

A cell compares how often two experts were chosen by one token with what their popularity alone would give. It is kept
as one small whole number on a logarithmic scale; many experts are pooled, inside a rank, and of very many layers some
are left out, so that a page stays small. `inside` is exact, of all pairs.

Axes: L MoE layers, E experts, P slots, G ranks, M cells a side.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_cli.placement import Placement, contiguous_placement
from smoe_cli.report.gathering import Found
from smoe_profiles.tables import Tables
from smoe_profiles.trace import TraceLayer

FACTOR = 8
HIGH = 100
EMPTY = -1
MOST_SIDE = 64
MOST_CELLS = 300_000

FloatArray = npt.NDArray[np.float64]
Pools = list[npt.NDArray[np.int64]]
"""The experts of every cell, [M] lists."""


def coactivation_section(found: Found) -> dict[str, Any] | None:
    """Both orders, contiguous and placed, of the layers kept."""
    tables = found.tables
    if tables is None:
        return None
    ids = tuple(layer.id for layer in tables.layers)
    experts = tables.layers[0].num_experts
    placement = found.placed.placement if found.placed else None
    orders = {"contiguous": contiguous_placement(ids, experts, placement.num_ranks if placement else 1)}
    if placement:
        orders["placed"] = placement
    pool = max(pool_size(one) for one in orders.values())
    side = len(pools_of(orders["contiguous"], 0, pool)[0])
    kept = kept_layers(len(ids), max(1, MOST_CELLS // side**2))
    pairs = {index: symmetric_pairs(tables, tables.layers[index]) for index in kept}
    found_orders = {name: _order(one, pairs, pool) for name, one in orders.items()}
    return {
        "note": _note(pool, len(kept), len(ids)),
        "layers": [ids[index] for index in kept],
        "pool": pool,
        "levels": {"low": 0, "chance": HIGH // 2, "high": HIGH, "factor": FACTOR},
        **{
            key: {name: found_orders[name][key] if name in found_orders else None for name in ("contiguous", "placed")}
            for key in ("rank", "experts", "cells")
        },
        "inside": _inside(orders, pairs) if placement else None,
    }


def _note(pool: int, kept: int, layers: int) -> str:
    parts = [
        f"how often two experts serve one token, over what their popularity gives by chance: {FACTOR} times more is "
        f"{HIGH}, as by chance {HIGH // 2}, {FACTOR} times less 0, on a logarithmic scale in whole numbers"
    ]
    if pool > 1:
        parts.append(f"{pool} experts of a rank are pooled in a cell")
    if kept < layers:
        parts.append(f"{kept} of {layers} layers are shown, evenly spaced")
    return "; ".join(parts)


def kept_layers(layers: int, most: int) -> list[int]:
    """At most `most` of so many layers, evenly spaced, the first and the last among them."""
    if layers <= most:
        return list(range(layers))
    return sorted({int(index) for index in np.linspace(0, layers - 1, most).round()})


def pool_size(placement: Placement) -> int:
    """Experts a cell so that a side has at most MOST_SIDE cells, or one a rank."""
    sizes = np.bincount(placement.slot_to_rank, minlength=placement.num_ranks)
    pool = 1
    while pool < sizes.max() and np.ceil(sizes / pool).sum() > MOST_SIDE:
        pool += 1
    return pool


def pools_of(placement: Placement, index: int, pool: int) -> tuple[Pools, list[int]]:
    """A layer's cells in order of slots, and their ranks: runs of `pool` slots that never cross a rank's end."""
    rank_of = placement.slot_to_rank
    cells: Pools = []
    ranks: list[int] = []
    for rank in range(placement.num_ranks):
        held = placement.physical_to_logical[index][rank_of == rank]
        for start in range(0, len(held), pool):
            cells.append(held[start : start + pool])
            ranks.append(rank)
    return cells, ranks


def symmetric_pairs(tables: Tables, layer: TraceLayer) -> FloatArray:
    """How many rows chose both of two experts, [E, E], the diagonal zero; both parts of the tables."""
    counted = tables.statistics(layer)["coactivation"].sum(axis=0)[: layer.num_experts, : layer.num_experts]
    pairs: FloatArray = counted.astype(np.float64)
    np.fill_diagonal(pairs, 0)
    return pairs


def expected_pairs(pairs: FloatArray) -> FloatArray:
    """What each pair would have if experts met by popularity alone; the sum is the same. pairs: [E, E]."""
    popularity = pairs.sum(axis=1)
    expected = np.outer(popularity, popularity)
    np.fill_diagonal(expected, 0)
    total = float(expected.sum())
    scale = float(pairs.sum()) / total if total else 0.0
    return np.asarray(expected * scale, np.float64)


def quantise(observed: FloatArray, expected: FloatArray) -> npt.NDArray[np.int64]:
    """Levels 0 to HIGH on a logarithmic scale, EMPTY where nothing is expected; one row is added to both sides."""
    levels = (np.log((observed + 1) / (expected + 1)) / math.log(FACTOR) + 1) * (HIGH / 2)
    return np.where(expected > 0, levels.round().clip(0, HIGH), EMPTY).astype(np.int64)


def _order(placement: Placement, pairs: dict[int, FloatArray], pool: int) -> dict[str, Any]:
    """One order's cells. pairs: by index of the layer."""
    named, cells = [], []
    ranks: list[int] = []
    for index, counted in pairs.items():
        pools, ranks = pools_of(placement, index, pool)
        member = np.zeros((len(pools), placement.num_experts))
        for cell, experts in enumerate(pools):
            member[cell, experts] = 1
        levels = quantise(member @ counted @ member.T, member @ expected_pairs(counted) @ member.T)
        named.append([", ".join(map(str, sorted(experts.tolist()))) for experts in pools])
        cells.append(levels.tolist())
    return {"rank": ranks, "experts": named, "cells": cells}


def _inside(orders: dict[str, Placement], pairs: dict[int, FloatArray]) -> dict[str, list[float]]:
    """Share of pairs whose experts share a rank: under both orders, and of all pairs of experts if used alike."""
    shares = {name: list(_shares(placement, pairs)) for name, placement in orders.items()}
    alike = {index: 1.0 - np.eye(len(counted)) for index, counted in pairs.items()}
    return shares | {"chance": list(_shares(orders["placed"], alike))}


def _shares(placement: Placement, pairs: dict[int, FloatArray]) -> Iterator[float]:
    for index, counted in pairs.items():
        hosts = placement.hosts[index].astype(np.float64)
        together = hosts @ hosts.T > 0
        yield float(counted[together].sum() / (counted.sum() or 1))
