"""Scoring placements exactly: the objective of a Problem, and its terms in the words of docs/terms.md."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from numba import njit

from smoe_solvers.assignment import HARD, Int64Array, transport
from smoe_solvers.problem import UNIT, Problem


@dataclass(frozen=True)
class Score:
    """One placement's objective (lower is better) and terms: lar under the quota, mean fan-out, load deviation."""

    objective: float
    lar: float
    fanout: float
    load_deviation: float


@njit(cache=True)
def rank_scores(demand, expert_to_rank, num_ranks):  # type: ignore[no-untyped-def]
    """Demand summed by rank: [U, G] int32."""
    experts, kinds = demand.shape
    scores = np.zeros((kinds, num_ranks), np.int32)
    for e in range(experts):
        g = expert_to_rank[e]
        for u in range(kinds):
            scores[u, g] += demand[e, u]
    return scores


@njit(cache=True)
def set_rank_counts(sets, expert_to_rank, num_ranks):  # type: ignore[no-untyped-def]
    """How many of each set's experts every rank holds: [S, G] int16."""
    counts = np.zeros((len(sets), num_ranks), np.int16)
    for s in range(len(sets)):
        for k in range(sets.shape[1]):
            if sets[s, k] >= 0:
                counts[s, expert_to_rank[sets[s, k]]] += 1
    return counts


@njit(cache=True)
def block_value(scores, kind, multiplicity, start, stop, quota, cap, price, flow):  # type: ignore[no-untyped-def]
    """Exact assignment of one block; `price` holds its starting prices and receives its duals."""
    ranks = scores.shape[1]
    rows = np.int64(0)
    for m in range(start, stop):
        rows += multiplicity[m]
    if cap < HARD or rows != quota * ranks:  # with free capacity only zero prices are a valid start
        price[:] = 0
    return transport(scores, kind[start:stop], multiplicity[start:stop], quota, cap, price, flow)


@njit(cache=True)
def _terms(expert_to_rank, num_ranks, demand, kind, multiplicity, block_start, quota, cap, sets, set_weight, load):  # type: ignore[no-untyped-def]
    """Local demand and charges (both in UNITs), rows' fan-out, and summed load deviation of one placement."""
    local = charges = np.int64(0)
    if len(kind):
        scores = rank_scores(demand, expert_to_rank, num_ranks)
        price = np.zeros(num_ranks, np.int64)
        flow = np.zeros((len(kind), num_ranks), np.int32)
        for b in range(len(quota)):
            local += block_value(
                scores, kind, multiplicity, block_start[b], block_start[b + 1], quota[b], cap, price, flow
            )
            if cap < HARD:
                rows = flow[: block_start[b + 1] - block_start[b]].sum(axis=0)
                charges += cap * np.abs(rows - quota[b]).sum()
    spread = np.int64(0)
    counts = set_rank_counts(sets, expert_to_rank, num_ranks)
    for s in range(len(sets)):
        for g in range(num_ranks):
            if counts[s, g] > 0:
                spread += set_weight[s]
    rank_load = np.zeros(num_ranks, np.float64)
    for e in range(len(load)):
        rank_load[expert_to_rank[e]] += load[e]
    return local + charges, charges, spread, np.abs(rank_load - rank_load.mean()).sum()


def score(problem: Problem, expert_to_rank: npt.NDArray[np.integer]) -> Score:
    """Everything the objective knows about one placement. expert_to_rank: [E].

    >>> from smoe_solvers import Goal, build_problem
    >>> experts = np.array([[0, 2], [0, 2], [1, 3], [1, 3]], np.uint16)
    >>> problem = build_problem(Goal.BLEND, 2, experts, np.array([0, 4]), np.bincount(experts.reshape(-1)))
    >>> apart, together = (score(problem, np.array(ranks)) for ranks in ([0, 0, 1, 1], [0, 1, 0, 1]))
    >>> (apart.lar, apart.fanout), (together.lar, together.fanout)
    ((0.5, 2.0), (1.0, 1.0))
    >>> together.objective < apart.objective
    True
    """
    local, charges, spread, deviation = _terms(
        np.ascontiguousarray(expert_to_rank, np.int32),
        problem.num_ranks,
        problem.demand,
        problem.kind,
        problem.multiplicity,
        problem.block_start,
        problem.quota,
        problem.cap,
        problem.sets,
        problem.set_weight,
        problem.load,
    )
    weights = problem.weights
    missed = problem.activations * UNIT - local + charges
    return Score(
        objective=weights.local * missed + weights.fanout * spread + weights.load * deviation,
        lar=local / (problem.activations * UNIT),
        fanout=spread / max(int(problem.set_weight.sum()), 1),
        load_deviation=deviation / max(int(problem.load.sum()), 1),
    )


def lower_bound(problem: Problem) -> float:
    """An objective no placement falls below: every row has its rank to itself. Reached where clusters never mix."""
    size = int(problem.capacity.max())
    weights, total = problem.weights, 0.0
    if len(problem.kind):
        most = np.sort(problem.demand, axis=0)[-size:].sum(axis=0, dtype=np.int64)
        total += weights.local * (problem.activations * UNIT - int(most[problem.kind] @ problem.multiplicity))
    if len(problem.sets):
        least = -(-(problem.sets >= 0).sum(axis=1) // size)
        total += weights.fanout * float(least @ problem.set_weight)
    return total


def search_view(problem: Problem) -> Problem:
    """The problem without the parts its weights ignore, so that scoring many placements costs no more than needed."""
    empty = np.zeros(0, np.int64)
    if problem.weights.local == 0:
        problem = replace(
            problem, demand=problem.demand[:, :0], kind=empty, multiplicity=empty, quota=empty, block_start=empty[:1]
        )
    if problem.weights.fanout == 0:
        problem = replace(problem, sets=problem.sets[:0], set_weight=empty)
    return problem


def coactivation(problem: Problem) -> Int64Array:
    """Rows in which two experts are used together, [E, E], diagonal zero, from the fan-out sets."""
    from scipy.sparse import csr_array

    row, column = np.nonzero(problem.sets >= 0)
    expert = problem.sets[row, column].astype(np.int64)
    one_hot = csr_array((np.ones(len(row), np.int64), (row, expert)), (len(problem.sets), problem.num_experts))
    joint = np.asarray((one_hot.T @ (one_hot * problem.set_weight[:, None])).todense(), np.int64)
    np.fill_diagonal(joint, 0)
    return joint
