"""What graph and hypergraph partitioners share: independent parts of the problem, equal parts, weights that fit.

Axes: E experts, G ranks.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from smoe_solvers.assignment import Int32Array, Int64Array
from smoe_solvers.problem import Problem, rank_capacity

WEIGHT_LIMIT = 2**30
"""Partitioners sum weights in 32 bits."""


def independent_parts(problem: Problem) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Experts and the ranks they share: one part, or one for each router group kept whole (`group_mask`)."""
    _, part = np.unique(problem.allowed, axis=0, return_inverse=True)
    for number in range(part.max() + 1):
        experts = np.flatnonzero(part.reshape(-1) == number)
        yield experts, np.flatnonzero(problem.allowed[experts[0]])


def placed_in_parts(problem: Problem, divide: Callable[[Int64Array, int], Int32Array]) -> Int32Array:
    """The placement made of independent parts. divide: (experts, ranks) -> labels below `ranks`, equal parts."""
    placement = np.empty(problem.num_experts, np.int32)
    for experts, ranks in independent_parts(problem):
        placement[experts] = ranks[divide(experts, len(ranks))]
    return placement


def shrunk(weights: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Weights scaled so that sums of them cannot overflow, at least 1 each."""
    total = float(weights.sum())
    scaled = weights if total < WEIGHT_LIMIT else (weights * (WEIGHT_LIMIT / total)).astype(np.int64)
    return np.maximum(scaled, 1)


def equal_parts(labels: Int32Array, joint: npt.NDArray[np.int64], num_ranks: int) -> Int32Array:
    """Every rank its share: larger parts get the ranks that hold more, then the moves that lose least co-activation.

    labels: [E] parts of any size; joint: [E, E] co-activation, diagonal zero. Returns a new [E].
    """
    capacity = rank_capacity(len(labels), num_ranks)
    placement = labels.copy()
    if capacity[0] > capacity[-1]:
        by_size = np.argsort(-np.bincount(labels, minlength=num_ranks), kind="stable")
        placement = np.argsort(by_size).astype(np.int32)[labels]
    while ((surplus := np.bincount(placement, minlength=num_ranks) - capacity) > 0).any():
        inside = np.stack([joint[:, placement == g].sum(axis=1) for g in range(num_ranks)], axis=1)
        movable = np.flatnonzero(surplus[placement] > 0)
        short = np.flatnonzero(surplus < 0)
        loss = inside[movable, placement[movable]][:, None] - inside[np.ix_(movable, short)]
        expert, rank = np.unravel_index(loss.argmin(), loss.shape)
        placement[movable[expert]] = short[rank]
    return placement
