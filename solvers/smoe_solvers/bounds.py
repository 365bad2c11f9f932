"""How good a placement is: proofs and bounds.

Two experts are on one rank or not: X[e, f] in {0, 1}, with ones on the diagonal, E / G ones in every row, and
G X - J positive semidefinite (J all ones). Dropping only "in {0, 1}" leaves a semidefinite programme that bounds any
weighted sum of X over all placements; the co-activation kept inside ranks is such a sum.
Local demand and fan-out of a row are concave and convex in what the row's experts have in common, so a tangent turns
them into one too. ADMM solves the programme roughly; its multipliers are then feasible for the dual once their largest
eigenvalue is paid for, so every bound here is valid however early ADMM stops. The quota and the load are left out of
the bound, which is why it is loose for the objective and tight for co-activation.

Axes: E experts, G ranks, U kinds of rows, S sets.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import numpy as np
import numpy.typing as npt

from smoe_solvers.assignment import Int32Array
from smoe_solvers.choices import Effort
from smoe_solvers.objectives import coactivation, lower_bound, score
from smoe_solvers.problem import UNIT, Problem

ITERATIONS = 100
CHECK_EVERY = 25
OVER_RELAXATION = 1.6
TANGENTS = 3
ROUNDING = 1e-9

DIGITS = 4
"""Bounds are rounded away from the optimum: the last bits of linear algebra depend on the number of threads."""

AFFORDABLE = {Effort.FAST: 0, Effort.DEFAULT: 128, Effort.THOROUGH: 512}
"""Experts up to which a bound is computed: about 0.6 s a layer at 64, growing with the cube."""

Float64Array = npt.NDArray[np.float64]


class Proved(StrEnum):
    """What is known of a placement: no other is better, none is better by more than the gap, or nothing."""

    OPTIMAL = "optimal"
    BOUND = "bound"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Certificate:
    """value: no placement has a lower objective; gap: how far above it this one is, as a share of its objective.

    pairs, pairs_bound: share of co-activation this placement keeps inside ranks, and the most that any could.
    """

    kind: Proved = Proved.UNKNOWN
    value: float | None = None
    gap: float | None = None
    pairs: float | None = None
    pairs_bound: float | None = None


def certificate(objective: float, value: float | None, *, proved: bool = False) -> Certificate:
    """What a lower bound says of an objective; nothing if there is no bound."""
    if value is None:
        return Certificate()
    gap = 0.0 if proved else max(objective - value, 0.0) / max(abs(objective), 1e-12)
    return Certificate(Proved.OPTIMAL if proved else Proved.BOUND, value, gap)


def certify(problem: Problem, placement: Int32Array, effort: Effort) -> Certificate:
    """A bound on the objective and on co-activation, if the effort affords it: `unknown` otherwise."""
    if problem.num_experts > AFFORDABLE[effort] or problem.num_ranks == 1:
        return Certificate()
    joint = coactivation(problem).astype(np.float64)
    total = max(joint.sum(), 1.0)
    pairs_bound, relaxed = largest_sum(joint / total, problem.num_ranks)
    lowest = lower_bound(problem)
    for step in range(TANGENTS):
        constant, weights = _tangent(problem, relaxed)
        highest, there = largest_sum(weights, problem.num_ranks)
        lowest = max(lowest, problem.weights.local * problem.activations * UNIT - constant - highest)
        relaxed = relaxed + (there - relaxed) * 2 / (step + 3)
    lowest = np.floor(max(lowest, 0.0) * 10**DIGITS) / 10**DIGITS
    pairs_bound = np.ceil(pairs_bound * 10**DIGITS) / 10**DIGITS
    found = certificate(score(problem, placement).objective, float(lowest))
    inside = float(joint[placement[:, None] == placement].sum() / total)
    return Certificate(found.kind, found.value, found.gap, inside, float(pairs_bound))


def largest_sum(weights: Float64Array, num_ranks: int) -> tuple[float, Float64Array]:
    """No placement has a sum of weights inside ranks above the first; the second is where the programme puts X.

    weights: [E, E] symmetric, any diagonal. Unequal ranks are filled up with experts of no weight, one a rank.
    """
    experts = len(weights)
    size = -(-experts // num_ranks) * num_ranks
    scale = max(float(np.abs(weights).sum()), 1e-300)
    padded = np.zeros((size, size))
    padded[:experts, :experts] = weights / scale
    bound, relaxed = _solve(padded, num_ranks)
    return (bound + ROUNDING) * scale, relaxed[:experts, :experts]


def _solve(weights: Float64Array, num_ranks: int) -> tuple[float, Float64Array]:
    """ADMM on Z = X - J / G: semidefinite and orthogonal to ones on one side, fixed diagonal and floor on the other."""
    experts, diagonal, floor = len(weights), 1 - 1 / num_ranks, -1 / num_ranks
    centre = np.eye(experts) - 1 / experts
    centred = centre @ weights @ centre
    rho = max(float(np.linalg.norm(centred)), 1e-12) * num_ranks**0.5 / experts
    boxed, dual = diagonal * np.eye(experts), np.zeros_like(weights)
    best = np.inf
    for iteration in range(1, ITERATIONS + 1):
        value, vector = np.linalg.eigh(centre @ (boxed - dual) @ centre + centred / rho)
        positive = vector[:, value > 0]
        conic = (positive * value[value > 0]) @ positive.T
        target = OVER_RELAXATION * conic + (1 - OVER_RELAXATION) * boxed + dual
        before, boxed = boxed, np.maximum(target, floor)
        np.fill_diagonal(boxed, diagonal)
        dual = target - boxed
        if iteration % CHECK_EVERY == 0:
            best = min(best, dual_bound(weights, rho * dual, num_ranks))
            unequal = np.linalg.norm(conic - boxed) / np.linalg.norm(boxed)
            moving = np.linalg.norm(boxed - before) / max(float(np.linalg.norm(dual)), 1e-12)
            change = float(np.clip(np.sqrt((unequal + 1e-12) / (moving + 1e-12)), 0.5, 2))
            rho, dual = rho * change, dual / change
    return best, boxed + 1 / num_ranks


def dual_bound(weights: Float64Array, multiplier: Float64Array, num_ranks: int) -> float:
    """An upper bound on the sum of weights inside ranks, from any multipliers: weak duality.

    weights: [E, E], E a multiple of G; multiplier: [E, E] symmetric, of the diagonal (any sign) and of "X >= 0" (those
    above zero are ignored). Where the multipliers are not feasible the excess eigenvalue is paid for on the trace.
    """
    experts = len(weights)
    paid = np.minimum(multiplier, 0)
    np.fill_diagonal(paid, multiplier.diagonal())
    centre = np.eye(experts) - 1 / experts
    excess = max(float(np.linalg.eigvalsh(centre @ (weights - paid) @ centre)[-1]), 0.0)
    trace = experts * (1 - 1 / num_ranks)
    prices = paid.diagonal().sum() * (1 - 1 / num_ranks) - (paid.sum() - paid.diagonal().sum()) / num_ranks
    return float(weights.sum() / num_ranks + prices + excess * trace)


def _tangent(problem: Problem, relaxed: Float64Array) -> tuple[float, Float64Array]:
    """A linear function of X, at least the objective's reward of every placement and close to it near `relaxed`.

    The reward is weighted local demand less weighted fan-out. Returns its constant and weights [E, E].
    """
    constant, weights = 0.0, np.zeros((problem.num_experts, problem.num_experts))
    if problem.weights.local:
        for_local = _local_tangent(problem, relaxed)
        constant += problem.weights.local * for_local[0]
        weights += problem.weights.local * for_local[1]
    if problem.weights.fanout:
        for_fanout = _fanout_tangent(problem, relaxed)
        constant -= problem.weights.fanout * for_fanout[0]
        weights -= problem.weights.fanout * for_fanout[1]
    return constant, weights


def _local_tangent(problem: Problem, relaxed: Float64Array) -> tuple[float, Float64Array]:
    """Local demand from above, in UNITs.

    A row with demand d, k in all, on a rank that holds m of it: m^2 + (k - m)^2 / (G - 1) <= d' X d, so that m is at
    most k / G + sqrt(c (d' X d - k^2 / G)) with c = 1 - 1 / G, a concave function that lies below its tangents.
    """
    ranks = problem.num_ranks
    rows = np.zeros(problem.demand.shape[1])
    np.add.at(rows, problem.kind, problem.multiplicity)
    demand = problem.demand.astype(np.float64)
    whole = demand.sum(axis=0)
    spread = np.maximum(np.einsum("eu,eu->u", demand, relaxed @ demand) - whole**2 / ranks, UNIT)
    root = np.sqrt((1 - 1 / ranks) * spread)
    slope = (1 - 1 / ranks) / (2 * root)
    constant = rows @ (whole / ranks + root - slope * (spread + whole**2 / ranks))
    return float(constant), (demand * (rows * slope)) @ demand.T


def _fanout_tangent(problem: Problem, relaxed: Float64Array) -> tuple[float, Float64Array]:
    """Summed fan-out from below: for each set the best line under all ways to share it (see `supporting_lines`)."""
    experts = problem.num_experts
    constant, weights = 0.0, np.zeros(experts * experts)
    sizes = (problem.sets >= 0).sum(axis=1)
    for size in np.unique(sizes):
        chosen = sizes == size
        sets = problem.sets[chosen]
        sets = sets[sets >= 0].reshape(len(sets), size)
        rows = problem.set_weight[chosen]
        flat = (sets[:, :, None] * experts + sets[:, None, :]).reshape(len(sets), -1)
        pairs = (relaxed.reshape(-1)[flat].sum(axis=1) - size) / 2
        heights, slopes = supporting_lines(int(size), problem.num_ranks, int(problem.capacity[0]))
        line = (heights[:, None] + slopes[:, None] * pairs).argmax(axis=0)
        constant += float(rows @ (heights[line] - slopes[line] * size / 2))
        np.add.at(weights, flat, (rows * slopes[line] / 2)[:, None])
    return constant, weights.reshape(experts, experts)


@cache
def supporting_lines(size: int, num_ranks: int, capacity: int) -> tuple[Float64Array, Float64Array]:
    """Lines height + slope * pairs that no way to share `size` experts among ranks lies below: ranks against pairs."""
    shares = set(_shares(size, num_ranks, capacity))
    slopes = {(d - b) / (c - a) for a, b in shares for c, d in shares if c > a and d < b} | {0.0}
    heights = {slope: min(ranks - slope * pairs for pairs, ranks in shares) for slope in slopes}
    return np.array(list(heights.values())), np.array(list(heights))


def _shares(left: int, ranks: int, most: int) -> list[tuple[int, int]]:
    """(pairs on one rank, ranks used) of every way to share `left` experts among ranks, at most `most` on one."""
    if left == 0:
        return [(0, 0)]
    if ranks == 0:
        return []
    return [
        (pairs + part * (part - 1) // 2, used + 1)
        for part in range(min(left, most), 0, -1)
        for pairs, used in _shares(left - part, ranks - 1, part)
    ]
