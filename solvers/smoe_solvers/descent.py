"""Exact descent: swap two experts of different ranks while the objective falls.

Most swaps end at a bound read from two tables, what either expert could gain by moving alone; the rest at the bound by
the blocks' prices, or in the middle of assigning the rows again. What is accepted is exact for the objective.

Axes: E experts, G ranks, S distinct expert sets.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from smoe_solvers.assignment import Int32Array, Int64Array
from smoe_solvers.objectives import search_view, set_rank_counts
from smoe_solvers.problem import UNIT, Problem
from smoe_solvers.rebalance import (
    FAR,
    assign_all,
    empty_assignment,
    lay_out,
    move_bounds,
    rebalance,
    shift_block,
    swap_gain_bound,
    unshift_block,
)

TOLERANCE = 1e-12
MAX_PASSES = 100


class Sets(NamedTuple):
    """The fan-out rows: sets: [S, K]; weight: [S]; of: [D] the sets of each expert from start: [E + 1] on."""

    sets: Int32Array
    weight: Int64Array
    of: Int64Array
    start: Int64Array


class Terms(NamedTuple):
    """What is charged: load: [E] activations; allowed: [E, G]; prices of local demand, load deviation and fan-out."""

    load: Int64Array
    allowed: npt.NDArray[np.bool_]
    local: float
    deviation: float
    fanout: float


class Descent:
    """Descents on one problem: what does not change between them is laid out once."""

    def __init__(self, problem: Problem) -> None:
        problem = search_view(problem)
        self.problem = problem
        self.rows = lay_out(problem)
        members = problem.sets.reshape(-1)
        order = np.argsort(members, kind="stable")
        self.sets = Sets(
            problem.sets,
            problem.set_weight,
            (order // max(problem.sets.shape[1], 1)).astype(np.int64),
            np.searchsorted(members[order], np.arange(problem.num_experts + 1)).astype(np.int64),
        )
        weights = problem.weights
        self.terms = Terms(problem.load, problem.allowed, weights.local, weights.load, weights.fanout)
        self.pairs = np.stack(np.triu_indices(problem.num_experts, 1), axis=1)
        self.assigned = empty_assignment(self.rows, problem.num_ranks)
        self.spare = empty_assignment(self.rows, problem.num_ranks)

    def score(self, expert_to_rank: Int32Array) -> float:
        """The objective of one placement, [E] int32; the same as objectives.score gives."""
        return self._objective(assign_all(self.rows, expert_to_rank, self.assigned), expert_to_rank)

    def run(
        self, expert_to_rank: Int32Array, generator: np.random.Generator, max_passes: int = MAX_PASSES
    ) -> tuple[Int32Array, float]:
        """A placement no swap improves, from the one given, and its objective."""
        placement = np.array(expert_to_rank, np.int32)
        pairs = generator.permutation(self.pairs)
        local = _descend(placement, pairs, self.rows, self.assigned, self.spare, self.sets, self.terms, max_passes)
        return placement, self._objective(local, placement)

    def _objective(self, local: int, placement: Int32Array) -> float:
        problem, ranks = self.problem, self.problem.num_ranks
        total = problem.weights.local * (problem.activations * UNIT - local)
        if problem.weights.fanout > 0:
            spread = (set_rank_counts(problem.sets, placement, ranks) > 0).sum(axis=1)
            total += problem.weights.fanout * float(spread @ problem.set_weight)
        if problem.weights.load > 0:
            load = np.bincount(placement, problem.load, ranks)
            total += problem.weights.load * float(np.abs(load - load.mean()).sum())
        return float(total)


def descend(
    problem: Problem, expert_to_rank: Int32Array, generator: np.random.Generator, max_passes: int = MAX_PASSES
) -> Int32Array:
    """A placement no single swap improves, from the one given; never worse, exact for the problem's objective.

    expert_to_rank: [E] int32, left as it is. Swaps are tried in one random order from `generator`.
    """
    return Descent(problem).run(expert_to_rank, generator, max_passes)[0]


@njit(cache=True)
def _descend(expert_to_rank, pairs, rows, assigned, spare, sets, terms, max_passes):  # type: ignore[no-untyped-def]
    """Swap until no pair helps; expert_to_rank becomes the answer. Returns the value of the assignment."""
    experts, ranks = terms.allowed.shape
    local = assign_all(rows, expert_to_rank, assigned)
    gains = np.zeros((experts, ranks), np.float64)
    move_bounds(rows, assigned, expert_to_rank, gains)
    counts = set_rank_counts(sets.sets, expert_to_rank, ranks)
    spread = np.zeros((experts, ranks), np.int64)
    for s in range(len(sets.sets)):
        _add_spread(s, 1, sets, counts, expert_to_rank, spread)
    rank_load = np.zeros(ranks, np.float64)
    for e in range(experts):
        rank_load[expert_to_rank[e]] += terms.load[e]
    mean_load = rank_load.mean()
    since_change = 0
    for step in range(max_passes * len(pairs)):
        since_change += 1
        if since_change > len(pairs):
            break
        x, y = pairs[step % len(pairs), 0], pairs[step % len(pairs), 1]
        p, q = expert_to_rank[x], expert_to_rank[y]
        if p == q or not terms.allowed[x, q] or not terms.allowed[y, p]:
            continue
        moved = np.float64(terms.load[y] - terms.load[x])
        change = terms.deviation * _load_change(moved, p, q, rank_load, mean_load)
        apart = spread[x, q] + spread[y, p]
        if gains[x, q] + gains[y, p] <= _least_gain(change + terms.fanout * apart, terms):
            continue
        if terms.fanout > 0:
            change += terms.fanout * (apart + _shared(x, y, p, q, sets, counts))
        gain = _swap_rows(x, y, p, q, _least_gain(change, terms), rows, assigned, spare)
        if gain == -FAR:
            continue
        local += gain
        if terms.fanout > 0:
            _swap_sets(x, y, p, q, sets, counts, expert_to_rank, spread)
        expert_to_rank[x], expert_to_rank[y] = q, p
        if terms.local > 0:
            move_bounds(rows, assigned, expert_to_rank, gains)
        rank_load[p] += moved
        rank_load[q] -= moved
        since_change = 0
    return local


@njit(cache=True)
def _least_gain(change, terms):  # type: ignore[no-untyped-def]
    """A swap that changes the other terms by `change` must gain more local demand than this."""
    if terms.local > 0:
        return np.int64(np.floor((change + TOLERANCE) / terms.local))
    return np.int64(-1) if change < -TOLERANCE else np.int64(0)


@njit(cache=True)
def _load_change(moved, p, q, rank_load, mean):  # type: ignore[no-untyped-def]
    """Change of summed load deviation if `moved` activations go from q to p."""
    before = abs(rank_load[p] - mean) + abs(rank_load[q] - mean)
    return abs(rank_load[p] + moved - mean) + abs(rank_load[q] - moved - mean) - before


@njit(cache=True)
def _swap_rows(x, y, p, q, least, rows, assigned, spare):  # type: ignore[no-untyped-def]
    """Swap x (on p) and y (on q) in all blocks if that gains more local demand than `least`. Returns the gain.

    If not, all is as it was and the answer is -FAR. spare: room for what may have to be restored.
    """
    blocks, ranks = len(rows.quota), assigned.score.shape[1]
    gain = np.int64(0)
    for b in range(blocks):
        gain += swap_gain_bound(x, y, p, q, b, rows, assigned)
    if gain <= least:
        return -FAR
    load = np.empty(ranks, np.int64)
    for b in range(blocks):
        start, stop = rows.block_start[b], rows.block_start[b + 1]
        _copy_block(assigned, spare, b, start, stop)
        shift_block(x, y, p, q, b, rows, assigned, load)
        gain -= rebalance(
            assigned.score, assigned.flow, start, stop, rows.quota[b], rows.cap, assigned.price[b], assigned.off[b],
            assigned.edge[b], load, gain - least - 1,
        )  # fmt: skip
        if gain <= least:
            for c in range(b + 1):
                unshift_block(x, y, p, q, c, rows, assigned)
                _copy_block(spare, assigned, c, rows.block_start[c], rows.block_start[c + 1])
            return -FAR
    return gain


@njit(cache=True)
def _copy_block(source, target, b, start, stop):  # type: ignore[no-untyped-def]
    """Copy one block's assignment, all but the scores."""
    for g in range(len(source.flow)):
        target.flow[g, start:stop] = source.flow[g, start:stop]
    target.price[b] = source.price[b]
    target.off[b] = source.off[b]
    target.edge[b] = source.edge[b]


@njit(cache=True)
def _add_spread(s, sign, sets, counts, expert_to_rank, spread):  # type: ignore[no-untyped-def]
    """Add one set to (or take it from) spread[e, h], the change of summed fan-out if expert e alone moved to rank h."""
    ranks = counts.shape[1]
    weight = sign * sets.weight[s]
    for k in range(sets.sets.shape[1]):
        e = sets.sets[s, k]
        if e >= 0:
            alone = counts[s, expert_to_rank[e]] == 1
            for h in range(ranks):
                if h != expert_to_rank[e]:
                    spread[e, h] += weight * (np.int64(counts[s, h] == 0) - np.int64(alone))


@njit(cache=True)
def _contains(members, expert):  # type: ignore[no-untyped-def]
    for member in members:  # noqa: SIM110 (compiled: a generator would be slower)
        if member == expert:
            return True
    return False


@njit(cache=True)
def _shared(x, y, p, q, sets, counts):  # type: ignore[no-untyped-def]
    """What the sum of two moves leaves out for their swap: sets with both keep their ranks."""
    both = np.int64(0)
    if sets.start[x + 1] - sets.start[x] > sets.start[y + 1] - sets.start[y]:
        x, y, p, q = y, x, q, p
    for i in range(sets.start[x], sets.start[x + 1]):
        s = sets.of[i]
        if _contains(sets.sets[s], y):
            both += sets.weight[s] * (np.int64(counts[s, p] == 1) + np.int64(counts[s, q] == 1))
    return both


@njit(cache=True)
def _swap_sets(x, y, p, q, sets, counts, expert_to_rank, spread):  # type: ignore[no-untyped-def]
    """Swap x (on p) and y (on q), with counts and spread."""
    for sign in (-1, 1):
        for a, b, old, new in ((x, y, p, q), (y, x, q, p)):
            for i in range(sets.start[a], sets.start[a + 1]):
                s = sets.of[i]
                both = _contains(sets.sets[s], b)
                if both and a == y:
                    continue
                if sign == 1 and not both:
                    counts[s, old] -= 1
                    counts[s, new] += 1
                _add_spread(s, sign, sets, counts, expert_to_rank, spread)
        expert_to_rank[x], expert_to_rank[y] = q, p


@njit(cache=True)
def _pair_descent(expert_to_rank, pairs, inside, joint, allowed):  # type: ignore[no-untyped-def]
    improved = True
    while improved:
        improved = False
        for i in range(len(pairs)):
            a, b = pairs[i, 0], pairs[i, 1]
            p, q = expert_to_rank[a], expert_to_rank[b]
            if p == q or not allowed[a, q] or not allowed[b, p]:
                continue
            gain = inside[a, q] + inside[b, p] - inside[a, p] - inside[b, q] - 2 * joint[a, b]
            if gain > 0:
                expert_to_rank[a], expert_to_rank[b] = q, p
                for e in range(len(expert_to_rank)):
                    inside[e, p] += joint[e, b] - joint[e, a]
                    inside[e, q] += joint[e, a] - joint[e, b]
                improved = True


def pair_descent(
    joint: npt.NDArray[np.int64], expert_to_rank: Int32Array, problem: Problem, generator: np.random.Generator
) -> Int32Array:
    """Swaps until no swap raises the co-activation kept inside ranks. joint: [E, E], diagonal zero."""
    placement = np.array(expert_to_rank, np.int32)
    first, second = np.triu_indices(len(joint), 1)
    pairs = generator.permutation(np.stack([first, second], axis=1))
    inside = np.stack([joint[:, placement == g].sum(axis=1) for g in range(problem.num_ranks)], axis=1)
    _pair_descent(placement, pairs, inside, joint, problem.allowed)
    return placement
