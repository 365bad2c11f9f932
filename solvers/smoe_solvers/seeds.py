"""Placements to start a search from.

Axes: E experts, G ranks, U kinds of rows, M entries. Every seed is a balanced placement, [E] int32.
"""

import numpy as np
import numpy.typing as npt
from numba import njit
from scipy.optimize import linear_sum_assignment

from smoe_solvers.assignment import Int32Array
from smoe_solvers.descent import pair_descent
from smoe_solvers.objectives import block_value, coactivation
from smoe_solvers.problem import UNIT, Problem
from smoe_solvers.rebalance import Rows, assign_scores, empty_assignment, lay_out

KMEANS_ROUNDS = 30
GRAIN = UNIT // 16
"""Centroid scores are rounded to this, so that many rows can move together; exact scores would move them one by one."""

FORBIDDEN = 1e15


def random_placement(problem: Problem, generator: np.random.Generator) -> Int32Array:
    """A uniformly random balanced placement among the allowed ones."""
    return place_experts(generator.random((problem.num_experts, problem.num_ranks)), problem)


def place_experts(affinity: npt.NDArray[np.floating], problem: Problem) -> Int32Array:
    """The balanced placement of highest total affinity, exact (a transport problem). affinity: [E, G]."""
    rank_of_slot = problem.contiguous()
    cost = np.where(problem.allowed, affinity, -FORBIDDEN)
    expert, slot = linear_sum_assignment(cost[:, rank_of_slot], maximize=True)
    placement = np.empty(problem.num_experts, np.int32)
    placement[expert] = rank_of_slot[slot]
    return placement


def rank_demand(problem: Problem, scores: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Demand of the rows each rank would hold under an exact assignment by `scores`. scores: [U, G]. Returns [E, G]."""
    flow = np.zeros((len(problem.kind), problem.num_ranks), np.int32)
    rows = np.zeros((scores.shape[0], problem.num_ranks))
    for block in range(problem.num_blocks):
        start, stop = problem.block_start[block], problem.block_start[block + 1]
        price = np.zeros(problem.num_ranks, np.int64)
        block_value(
            scores,
            problem.kind,
            problem.multiplicity,
            start,
            stop,
            problem.quota[block],
            problem.cap,
            price,
            flow,
        )
        np.add.at(rows, problem.kind[start:stop], flow[: stop - start])
    return problem.demand @ rows


def soft_kmeans(problem: Problem, generator: np.random.Generator, rows: Rows | None = None) -> Int32Array:
    """Two-dimensional balanced k-means with soft centroids, from a random start to a fixed point.

    Rows go to ranks by exact quota assignment on centroid scores; a centroid is its rank's activation histogram,
    L2-normalised; experts go to ranks by an exact equal-size assignment. rows: the problem's, where laid out before.
    """
    rows = lay_out(problem) if rows is None else rows
    assigned = empty_assignment(rows, problem.num_ranks)
    placement = random_placement(problem, generator)
    centroid = (placement[:, None] == np.arange(problem.num_ranks)).astype(np.float64)
    for _ in range(KMEANS_ROUNDS):
        centroid /= np.maximum(np.linalg.norm(centroid, axis=0), 1e-12)
        _score_by_centroids(rows, centroid / GRAIN, assigned.score)
        assign_scores(rows, assigned)
        affinity = _demand_by_rank(rows, assigned.flow, problem.num_experts)
        moved = place_experts(affinity / UNIT, problem)
        if (moved == placement).all():
            break
        placement, centroid = moved, affinity
    return placement


@njit(cache=True)
def _score_by_centroids(rows, centroid, score):  # type: ignore[no-untyped-def]
    """score[m, g]: what entry m demands, weighed by the centroid of rank g. centroid: [E, G]."""
    ranks = centroid.shape[1]
    for m in range(len(score)):
        likes = np.zeros(ranks)
        for i in range(rows.entry_start[m], rows.entry_start[m + 1]):
            for g in range(ranks):
                likes[g] += rows.amount[i] * centroid[rows.expert[i], g]
        for g in range(ranks):
            score[m, g] = np.int32(np.rint(likes[g]))


@njit(cache=True)
def _demand_by_rank(rows, flow, num_experts):  # type: ignore[no-untyped-def]
    """Demand of the rows that each rank holds, [E, G]. flow: [G, M]."""
    demand = np.zeros((num_experts, len(flow)))
    for m in range(len(rows.kind)):
        for i in range(rows.entry_start[m], rows.entry_start[m + 1]):
            for g in range(len(flow)):
                demand[rows.expert[i], g] += np.float64(flow[g, m]) * rows.amount[i]
    return demand


def pair_cut(problem: Problem, generator: np.random.Generator) -> Int32Array:
    """Co-activation kept inside ranks, by swap descent from a random start."""
    return pair_descent(coactivation(problem), random_placement(problem, generator), problem, generator)
