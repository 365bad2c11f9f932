"""Exact descent: swap two experts of different ranks while the objective falls (solver_study.md section 2).

A swap's gain in local activations is bounded by the blocks' dual prices before anything is solved again; nearly all
swaps end there. The rest is solved block by block and given up as soon as the bound of what is left cannot save it.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

from smoe_solvers.assignment import Int32Array
from smoe_solvers.objectives import block_value, rank_scores, search_view, set_rank_counts
from smoe_solvers.problem import Problem

TOLERANCE = 1e-12
MAX_PASSES = 100


@njit(cache=True)
def _contains(members, expert):  # type: ignore[no-untyped-def]
    for member in members:  # noqa: SIM110 (compiled: a generator would be slower)
        if member == expert:
            return True
    return False


@njit(cache=True)
def _fanout_change(a, b, p, q, sets, set_weight, counts, sets_of, sets_start):  # type: ignore[no-untyped-def]
    """Change of summed fan-out if a (on p) and b (on q) swap; only sets with exactly one of them count."""
    change = np.int64(0)
    for i in range(sets_start[a], sets_start[a + 1]):
        s = sets_of[i]
        if not _contains(sets[s], b):
            change += set_weight[s] * (np.int64(counts[s, q] == 0) - np.int64(counts[s, p] == 1))
    for i in range(sets_start[b], sets_start[b + 1]):
        s = sets_of[i]
        if not _contains(sets[s], a):
            change += set_weight[s] * (np.int64(counts[s, p] == 0) - np.int64(counts[s, q] == 1))
    return change


@njit(cache=True)
def _move_counts(expert, old, new, counts, sets_of, sets_start):  # type: ignore[no-untyped-def]
    for i in range(sets_start[expert], sets_start[expert + 1]):
        counts[sets_of[i], old] -= 1
        counts[sets_of[i], new] += 1


@njit(cache=True)
def _best_after_prices(scores, kind, start, stop, price, best):  # type: ignore[no-untyped-def]
    """best[m] = max over ranks of score less price, for the entries of one block."""
    for m in range(start, stop):
        u = kind[m]
        top = scores[u, 0] - price[0]
        for g in range(1, scores.shape[1]):
            top = max(top, scores[u, g] - price[g])
        best[m] = top


@njit(cache=True)
def _gain_bound(a, b, p, q, demand, scores, kind, multiplicity, start, stop, price, best):  # type: ignore[no-untyped-def]
    """Upper bound on one block's gain in local demand: the old duals stay feasible after the swap."""
    bound = np.int64(0)
    ranks = scores.shape[1]
    for m in range(start, stop):
        u = kind[m]
        shift = demand[b, u] - demand[a, u]
        if shift != 0:
            top = max(scores[u, p] + shift - price[p], scores[u, q] - shift - price[q])
            for g in range(ranks):
                if g != p and g != q:
                    top = max(top, scores[u, g] - price[g])
            bound += multiplicity[m] * (top - best[m])
    return bound


@njit(cache=True)
def _shift_scores(a, b, p, q, demand, scores):  # type: ignore[no-untyped-def]
    for u in range(scores.shape[0]):
        shift = demand[b, u] - demand[a, u]
        scores[u, p] += shift
        scores[u, q] -= shift


@njit(cache=True)
def _load_change(moved, p, q, rank_load, mean):  # type: ignore[no-untyped-def]
    """Change of summed load deviation if `moved` activations go from q to p."""
    before = abs(rank_load[p] - mean) + abs(rank_load[q] - mean)
    return abs(rank_load[p] + moved - mean) + abs(rank_load[q] - moved - mean) - before


@njit(cache=True)
def _swap_blocks(  # type: ignore[no-untyped-def]
    x, y, p, q, least, demand, scores, kind, multiplicity, block_start, quota, cap, value, price, best, flow, work
):
    """Swap x (on p) and y (on q) in the blocks if that gains more local demand than `least`; says whether it did.

    If so, scores, value, price and best are the new ones; otherwise all is as it was, most often after the bound alone.
    work: (bound [B], trial value [B], trial price [B, G]).
    """
    bound, trial, trial_price = work
    blocks = len(quota)
    left = np.int64(0)
    for b in range(blocks):
        start, stop = block_start[b], block_start[b + 1]
        bound[b] = _gain_bound(x, y, p, q, demand, scores, kind, multiplicity, start, stop, price[b], best)
        left += bound[b]
    if left <= least:
        return False
    _shift_scores(x, y, p, q, demand, scores)
    gain = np.int64(0)
    for b in range(blocks):
        trial_price[b] = price[b]
        start, stop = block_start[b], block_start[b + 1]
        trial[b] = block_value(scores, kind, multiplicity, start, stop, quota[b], cap, trial_price[b], flow)
        gain += trial[b] - value[b]
        left -= bound[b]
        if gain + left <= least:
            _shift_scores(x, y, q, p, demand, scores)
            return False
    value[:] = trial
    price[:] = trial_price
    for b in range(blocks):
        _best_after_prices(scores, kind, block_start[b], block_start[b + 1], price[b], best)
    return True


@njit(cache=True)
def _descend(  # type: ignore[no-untyped-def]
    expert_to_rank,
    pairs,
    num_ranks,
    demand,
    kind,
    multiplicity,
    block_start,
    quota,
    cap,
    sets,
    set_weight,
    sets_of,
    sets_start,
    load,
    allowed,
    local_weight,
    load_weight,
    fanout_weight,
    max_passes,
):
    blocks = len(quota)
    scores = rank_scores(demand, expert_to_rank, num_ranks)
    counts = set_rank_counts(sets, expert_to_rank, num_ranks)
    flow = np.zeros((len(kind), num_ranks), np.int32)
    price = np.zeros((blocks, num_ranks), np.int64)
    value = np.zeros(blocks, np.int64)
    best = np.zeros(len(kind), np.int64)
    work = (np.zeros(blocks, np.int64), np.zeros(blocks, np.int64), np.zeros((blocks, num_ranks), np.int64))
    rank_load = np.zeros(num_ranks, np.float64)
    for e in range(len(load)):
        rank_load[expert_to_rank[e]] += load[e]
    mean_load = rank_load.mean()
    for b in range(blocks):
        start, stop = block_start[b], block_start[b + 1]
        value[b] = block_value(scores, kind, multiplicity, start, stop, quota[b], cap, price[b], flow)
        _best_after_prices(scores, kind, start, stop, price[b], best)
    since_change = 0
    for step in range(max_passes * len(pairs)):
        since_change += 1
        if since_change > len(pairs):
            return
        x, y = pairs[step % len(pairs), 0], pairs[step % len(pairs), 1]
        p, q = expert_to_rank[x], expert_to_rank[y]
        if p == q or not allowed[x, q] or not allowed[y, p]:
            continue
        moved = np.float64(load[y] - load[x])
        change = load_weight * _load_change(moved, p, q, rank_load, mean_load)
        if fanout_weight > 0:
            change += fanout_weight * _fanout_change(x, y, p, q, sets, set_weight, counts, sets_of, sets_start)
        if blocks > 0:
            least = np.int64(np.floor((change + TOLERANCE) / local_weight))
            swapped = _swap_blocks(
                x, y, p, q, least, demand, scores, kind, multiplicity, block_start, quota, cap, value, price, best,
                flow, work,
            )  # fmt: skip
            if not swapped:
                continue
        elif change >= -TOLERANCE:
            continue
        expert_to_rank[x], expert_to_rank[y] = q, p
        rank_load[p] += moved
        rank_load[q] -= moved
        if fanout_weight > 0:
            _move_counts(x, p, q, counts, sets_of, sets_start)
            _move_counts(y, q, p, counts, sets_of, sets_start)
        since_change = 0


def descend(
    problem: Problem, expert_to_rank: Int32Array, generator: np.random.Generator, max_passes: int = MAX_PASSES
) -> Int32Array:
    """A placement no single swap improves, from the one given; never worse, exact for the problem's objective.

    expert_to_rank: [E] int32, left as it is. Swaps are tried in one random order from `generator`.
    """
    problem = search_view(problem)
    placement = np.array(expert_to_rank, np.int32)
    first, second = np.triu_indices(problem.num_experts, 1)
    pairs = generator.permutation(np.stack([first, second], axis=1))
    members = problem.sets.reshape(-1)
    order = np.argsort(members, kind="stable")
    starts = np.searchsorted(members[order], np.arange(problem.num_experts + 1)).astype(np.int64)
    weights = problem.weights
    _descend(
        placement,
        pairs,
        problem.num_ranks,
        problem.demand,
        problem.kind,
        problem.multiplicity,
        problem.block_start,
        problem.quota,
        problem.cap,
        problem.sets,
        problem.set_weight,
        order // max(problem.sets.shape[1], 1),
        starts,
        problem.load,
        problem.allowed,
        weights.local,
        weights.load,
        weights.fanout,
        max_passes,
    )
    return placement


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
