"""Exact descent with copies: put another expert into a slot, or swap two slots, while the objective falls.

Copies and first places are optimised together. A step's gain is bounded by two tables, of what its parts could gain
alone; then by the blocks' prices; what is accepted is exact.

Axes: E experts, G ranks, P slots, U kinds of rows, M entries of all B blocks, S distinct expert sets. Slots lie on
ranks in order, P / G a rank. `hosts`: [E, G] whether a rank holds a copy. Copies of an expert share its load equally.
A step (x, p, y, q): x leaves rank p for q and y comes from there; q < 0: y comes from nowhere.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from smoe_solvers.assignment import HARD, Int32Array, Int64Array, transport
from smoe_solvers.objectives import coactivation
from smoe_solvers.problem import Problem
from smoe_solvers.redundancy import MAX_RANKS, BoolArray, count_bits, cover, host_masks

TOLERANCE = 1e-12
MAX_SWEEPS = 50


class Rows(NamedTuple):
    """What is read of a problem, under its names.

    sets_of: [D] the sets of each expert, from sets_start: [E + 1] on; joint: [E, E] rows that use two experts together.
    """

    demand: Int32Array
    kind: Int64Array
    multiplicity: Int64Array
    block_start: Int64Array
    quota: Int64Array
    cap: np.int64
    sets: npt.NDArray[np.int64]
    set_weight: Int64Array
    sets_of: Int64Array
    sets_start: Int64Array
    joint: Int64Array
    load: Int64Array
    allowed: BoolArray
    local: float
    deviation: float
    fanout: float


class State(NamedTuple):
    """Hosts and what follows from them, kept up to date.

    hosts: [E, G]; masks: [E] the same as bits; copies: [E]; rank_load: [G]; scores: [U, G] demand by rank;
    value: [B], price: [B, G], flow: [M, G] of the exact assignment; best: [M] best score after prices; held: [S, G]
    experts of a set on a rank; size: [S] its least cover; wanted: [K] and covers: [2 ** K] are scratch.
    """

    hosts: BoolArray
    masks: npt.NDArray[np.uint64]
    copies: Int64Array
    rank_load: npt.NDArray[np.float64]
    scores: Int32Array
    value: Int64Array
    price: Int64Array
    flow: Int32Array
    best: Int64Array
    held: npt.NDArray[np.int16]
    size: Int64Array
    wanted: npt.NDArray[np.uint64]
    covers: npt.NDArray[np.uint64]


def lay_out(problem: Problem) -> Rows:
    """A problem's rows, and the sets of every expert."""
    members = problem.sets.reshape(-1)
    order = np.argsort(members, kind="stable")
    weights = problem.weights
    return Rows(
        problem.demand,
        problem.kind,
        problem.multiplicity,
        problem.block_start,
        problem.quota,
        problem.cap,
        problem.sets.astype(np.int64),
        problem.set_weight,
        (order // max(problem.sets.shape[1], 1)).astype(np.int64),
        np.searchsorted(members[order], np.arange(problem.num_experts + 1)).astype(np.int64),
        coactivation(problem),
        problem.load,
        problem.allowed,
        weights.local,
        weights.load,
        weights.fanout,
    )


def settle(rows: Rows, hosts: BoolArray) -> State:
    """The state of a placement. hosts: [E, G], copied."""
    ranks = hosts.shape[1]
    copies = hosts.sum(axis=1)
    state = State(
        hosts=hosts.copy(),
        masks=host_masks(hosts),
        copies=copies,
        rank_load=(rows.load / copies) @ hosts,
        scores=np.ascontiguousarray((rows.demand.T.astype(np.int64) @ hosts).astype(np.int32)),
        value=np.zeros(len(rows.quota), np.int64),
        price=np.zeros((len(rows.quota), ranks), np.int64),
        flow=np.zeros((len(rows.kind), ranks), np.int32),
        best=np.zeros(len(rows.kind), np.int64),
        held=hosts.astype(np.int16)[rows.sets].sum(axis=1, dtype=np.int16)
        if len(rows.sets)
        else np.zeros((0, ranks), np.int16),
        size=np.zeros(len(rows.sets), np.int64),
        wanted=np.zeros(rows.sets.shape[1], np.uint64),
        covers=np.zeros(1 << rows.sets.shape[1], np.uint64),
    )
    _settle(rows, state)
    return state


@njit(cache=True)
def _settle(rows, state):  # type: ignore[no-untyped-def]
    for b in range(len(rows.quota)):
        _assign(b, rows, state.scores, state.price, state.value, state.flow)
        _best_after_prices(b, rows, state)
    for s in range(len(rows.sets)):
        state.size[s] = cover_size(s, rows, state)


@njit(cache=True)
def _assign(b, rows, scores, price, value, flow):  # type: ignore[no-untyped-def]
    """Assign one block exactly, from the prices it has where all quotas are filled."""
    start, stop = rows.block_start[b], rows.block_start[b + 1]
    ranks = scores.shape[1]
    if rows.cap < HARD or rows.multiplicity[start:stop].sum() != rows.quota[b] * ranks:
        price[b] = 0
    value[b] = transport(
        scores,
        rows.kind[start:stop],
        rows.multiplicity[start:stop],
        rows.quota[b],
        rows.cap,
        price[b],
        flow[start:stop],
    )


@njit(cache=True)
def _best_after_prices(b, rows, state):  # type: ignore[no-untyped-def]
    for m in range(rows.block_start[b], rows.block_start[b + 1]):
        u = rows.kind[m]
        top = state.scores[u, 0] - state.price[b, 0]
        for g in range(1, state.scores.shape[1]):
            top = max(top, state.scores[u, g] - state.price[b, g])
        state.best[m] = top


@njit(cache=True)
def cover_size(s, rows, state):  # type: ignore[no-untyped-def]
    for k in range(rows.sets.shape[1]):
        state.wanted[k] = state.masks[rows.sets[s, k]]
    return count_bits(cover(state.wanted, len(state.wanted), state.covers))


@njit(cache=True)
def bit(rank):  # type: ignore[no-untyped-def]
    return np.uint64(1) << np.uint64(MAX_RANKS - 1 - rank)


@njit(cache=True)
def flip(expert, rank, rows, state):  # type: ignore[no-untyped-def]
    """Give a rank a copy of an expert, or take it away, in all that costs little: hosts, masks, copies, load."""
    for g in range(len(state.rank_load)):
        if state.hosts[expert, g]:
            state.rank_load[g] -= rows.load[expert] / state.copies[expert]
    state.hosts[expert, rank] = not state.hosts[expert, rank]
    state.masks[expert] ^= bit(rank)
    state.copies[expert] += 1 if state.hosts[expert, rank] else -1
    for g in range(len(state.rank_load)):
        if state.hosts[expert, g]:
            state.rank_load[g] += rows.load[expert] / state.copies[expert]


@njit(cache=True)
def _contains(members, expert):  # type: ignore[no-untyped-def]
    for member in members:  # noqa: SIM110 (compiled: a generator would be slower)
        if member == expert:
            return True
    return False


@njit(cache=True)
def deviation(rank_load):  # type: ignore[no-untyped-def]
    return np.abs(rank_load - rank_load.mean()).sum()


@njit(cache=True)
def _fanout_change(x, p, y, q, rows, state):  # type: ignore[no-untyped-def]
    """Change of summed fan-out where x has left p (for q, if any) and y has left q (or come from nowhere) for p.

    state: masks are the new ones, held and size the old ones.
    """
    change = np.int64(0)
    for i in range(rows.sets_start[x], rows.sets_start[x + 1]):
        s = rows.sets_of[i]
        if q < 0 and state.held[s, p] == 1:  # the rank covered x alone, which another host can do as well
            continue
        if q >= 0 and state.held[s, p] == 1 and state.held[s, q] == 0:  # two ranks trade names
            continue
        change += rows.set_weight[s] * (cover_size(s, rows, state) - state.size[s])
    for i in range(rows.sets_start[y], rows.sets_start[y + 1]):
        s = rows.sets_of[i]
        if q < 0 and state.held[s, p] == 0:  # a rank of y alone shortens no cover
            continue
        if q >= 0 and state.held[s, q] == 1 and state.held[s, p] == 0:
            continue
        if not _contains(rows.sets[s], x):
            change += rows.set_weight[s] * (cover_size(s, rows, state) - state.size[s])
    return change


@njit(cache=True)
def _recount(expert, rank, rows, state):  # type: ignore[no-untyped-def]
    """Bring held and size up to date after a flip."""
    step = 1 if state.hosts[expert, rank] else -1
    for i in range(rows.sets_start[expert], rows.sets_start[expert + 1]):
        s = rows.sets_of[i]
        state.held[s, rank] += step
        state.size[s] = cover_size(s, rows, state)


@njit(cache=True)
def _shift(x, p, y, q, rows, state):  # type: ignore[no-untyped-def]
    for u in range(state.scores.shape[0]):
        shift = rows.demand[y, u] - rows.demand[x, u]
        state.scores[u, p] += shift
        if q >= 0:
            state.scores[u, q] -= shift


@njit(cache=True)
def _bound(b, x, p, y, q, rows, state):  # type: ignore[no-untyped-def]
    """Upper bound on one block's gain in local demand: the old prices stay feasible after the step."""
    bound = np.int64(0)
    ranks = state.scores.shape[1]
    for m in range(rows.block_start[b], rows.block_start[b + 1]):
        u = rows.kind[m]
        shift = rows.demand[y, u] - rows.demand[x, u]
        if shift != 0:
            top = state.scores[u, p] + shift - state.price[b, p]
            if q >= 0:
                top = max(top, state.scores[u, q] - shift - state.price[b, q])
            for g in range(ranks):
                if g != p and g != q:
                    top = max(top, state.scores[u, g] - state.price[b, g])
            bound += rows.multiplicity[m] * (top - state.best[m])
    return bound


@njit(cache=True)
def _step_blocks(x, p, y, q, least, rows, state, work):  # type: ignore[no-untyped-def]
    """Take the step in the blocks if that gains more local demand than `least`; says whether it did.

    work: (bound [B], trial value [B], trial price [B, G], trial flow [M, G]).
    """
    bound, value, price, flow = work
    blocks = len(rows.quota)
    left = np.int64(0)
    for b in range(blocks):
        bound[b] = _bound(b, x, p, y, q, rows, state)
        left += bound[b]
    if left <= least:
        return False
    _shift(x, p, y, q, rows, state)
    gain = np.int64(0)
    for b in range(blocks):
        price[b] = state.price[b]
        _assign(b, rows, state.scores, price, value, flow)
        gain += value[b] - state.value[b]
        left -= bound[b]
        if gain + left <= least:
            _shift(y, p, x, q, rows, state)
            return False
    state.value[:] = value
    state.price[:] = price
    state.flow[:] = flow
    for b in range(blocks):
        _best_after_prices(b, rows, state)
    return True


@njit(cache=True)
def _bound_local(rows, state, moving, adding):  # type: ignore[no-untyped-def]
    """Upper bounds on the gain in local demand, by expert and rank: a step gains at most the sum of its two parts.

    moving: [E, G, G] if a copy moves; adding: [E, G] if one comes, or, where the rank has one, if it goes.
    """
    experts, ranks = state.hosts.shape
    moving[:] = 0
    adding[:] = 0
    for b in range(len(rows.quota)):
        price = state.price[b]
        for m in range(rows.block_start[b], rows.block_start[b + 1]):
            u, best = rows.kind[m], state.best[m]
            first, second = -HARD, -HARD
            for g in range(ranks):
                after = state.scores[u, g] - price[g]
                if after > first:
                    first, second = after, first
                elif after > second:
                    second = after
            for e in range(experts):
                d = np.int64(rows.demand[e, u])
                if d == 0:
                    continue
                for p in range(ranks):
                    after = state.scores[u, p] - price[p]
                    if not state.hosts[e, p]:
                        adding[e, p] += rows.multiplicity[m] * max(0, after + d - best)
                        continue
                    top = max(after - d, second if after == first else first)
                    adding[e, p] += rows.multiplicity[m] * (top - best)
                    for q in range(ranks):
                        if not state.hosts[e, q]:
                            there = state.scores[u, q] - price[q] + d
                            moving[e, p, q] += rows.multiplicity[m] * (max(top, there) - best)


@njit(cache=True)
def _bound_fanout(rows, state, moving, adding):  # type: ignore[no-untyped-def]
    """Lower bounds on the change of summed fan-out, as in `_bound_local`.

    A step's change may be below the sum of its parts by as much as twice the rows that use both experts.
    """
    ranks = state.hosts.shape[1]
    moving[:] = 0
    adding[:] = 0
    for s in range(len(rows.sets)):
        for k in range(rows.sets.shape[1]):
            e = rows.sets[s, k]
            for p in range(ranks):
                if not state.hosts[e, p]:
                    if state.held[s, p] > 0:  # a rank of e alone shortens no cover
                        adding[e, p] += _flipped(s, e, bit(p), rows, state)
                    continue
                if state.copies[e] > 1 and state.held[s, p] > 1:
                    adding[e, p] += _flipped(s, e, bit(p), rows, state)
                for q in range(ranks):
                    if not state.hosts[e, q] and state.held[s, q] > 0:
                        moving[e, p, q] += _flipped(s, e, bit(p) | bit(q), rows, state)


@njit(cache=True)
def _flipped(s, expert, bits, rows, state):  # type: ignore[no-untyped-def]
    """Change of one set's fan-out, times its weight, if an expert's hosts were other by these bits."""
    state.masks[expert] ^= bits
    change = rows.set_weight[s] * (cover_size(s, rows, state) - state.size[s])
    state.masks[expert] ^= bits
    return change


@njit(cache=True)
def _step(i, j, slots, slot_rank, rows, state):  # type: ignore[no-untyped-def]
    """The (x, p, y, q) of a step, p < 0 if it cannot be: x leaves rank p for q, y comes to p from q; q < 0: no swap."""
    x, p = slots[i], slot_rank[i]
    if j < len(slots):
        y, q = slots[j], slot_rank[j]
        legal = p != q and not state.hosts[x, q] and not state.hosts[y, p] and rows.allowed[x, q] and rows.allowed[y, p]
    else:
        y, q = j - len(slots), -1
        legal = state.copies[x] > 1 and not state.hosts[y, p] and rows.allowed[y, p]
    return x, (p if legal else -1), y, q


@njit(cache=True)
def _take(x, p, y, q, rows, state):  # type: ignore[no-untyped-def]
    """A step in hosts, masks, copies and load; taken twice, it is undone."""
    flip(x, p, rows, state)
    flip(y, p, rows, state)
    if q >= 0:
        flip(x, q, rows, state)
        flip(y, q, rows, state)


@njit(cache=True)
def _descend(slots, slot_rank, moves, rows, state, max_sweeps):  # type: ignore[no-untyped-def]
    """Sweeps of steps until one takes none; slots becomes the answer.

    moves: [Q, 2] a slot, and another slot or P + an expert. The bounds are of a sweep's start: once a step is taken
    they only say what to look at, and the last sweep proves that nothing is left.
    """
    experts, ranks = state.hosts.shape
    work = (
        np.zeros(len(rows.quota), np.int64),
        np.zeros(len(rows.quota), np.int64),
        np.zeros_like(state.price),
        np.zeros_like(state.flow),
    )
    local, spread = (
        (np.zeros((experts, ranks, ranks), np.int64), np.zeros((experts, ranks), np.int64)),
        (np.zeros((experts, ranks, ranks), np.int64), np.zeros((experts, ranks), np.int64)),
    )
    for _ in range(max_sweeps):
        if rows.local > 0:
            _bound_local(rows, state, local[0], local[1])
        if rows.fanout > 0:
            _bound_fanout(rows, state, spread[0], spread[1])
        taken = 0
        for i, j in moves:
            x, p, y, q = _step(i, j, slots, slot_rank, rows, state)
            if p >= 0 and _try(x, p, y, q, local, spread, rows, state, work):
                slots[i] = y
                if q >= 0:
                    slots[j] = x
                taken += 1
        if not taken:
            break


@njit(cache=True)
def _try(x, p, y, q, local, spread, rows, state, work):  # type: ignore[no-untyped-def]
    """Take a step if it lowers the objective; says whether it did. local, spread: the bounds."""
    before = deviation(state.rank_load)
    _take(x, p, y, q, rows, state)
    change = rows.deviation * (deviation(state.rank_load) - before)
    best = rows.fanout * (_parts(x, p, y, q, spread) - 2 * rows.joint[x, y]) - rows.local * _parts(x, p, y, q, local)
    kept = change + best < -TOLERANCE
    if kept and rows.fanout > 0:
        change += rows.fanout * _fanout_change(x, p, y, q, rows, state)
    if kept and rows.local > 0:
        kept = _step_blocks(x, p, y, q, np.int64(np.floor((change + TOLERANCE) / rows.local)), rows, state, work)
    elif kept:
        kept = change < -TOLERANCE
    if not kept:
        _take(x, p, y, q, rows, state)
    elif rows.fanout > 0:
        _recount(x, p, rows, state)
        _recount(y, p, rows, state)
        if q >= 0:
            _recount(x, q, rows, state)
            _recount(y, q, rows, state)
    return kept


@njit(cache=True)
def _parts(x, p, y, q, bounds):  # type: ignore[no-untyped-def]
    """The sum of the bounds of what a step is made of. bounds: ([E, G, G] moving, [E, G] coming or going)."""
    moving, flipping = bounds
    if q < 0:
        return flipping[x, p] + flipping[y, p]
    return moving[x, p, q] + moving[y, q, p]


def descend(rows: Rows, hosts: BoolArray, generator: np.random.Generator, max_sweeps: int = MAX_SWEEPS) -> State:
    """The state that no step improves, from these hosts; steps are tried in one random order."""
    experts, ranks = hosts.shape
    slots = slots_of(hosts)
    swaps = np.stack(np.triu_indices(len(slots), 1), axis=1)
    places, entering = np.divmod(np.arange(len(slots) * experts), experts)
    moves = generator.permutation(np.concatenate([swaps, np.stack([places, len(slots) + entering], axis=1)]))
    state = settle(rows, hosts)
    _descend(slots, np.repeat(np.arange(ranks), len(slots) // ranks), moves, rows, state, max_sweeps)
    return state


def objective(rows: Rows, state: State) -> float:
    """The objective of a state, less what no placement changes."""
    spread = rows.fanout * float(rows.set_weight @ state.size)
    return spread + rows.deviation * float(deviation(state.rank_load)) - rows.local * float(state.value.sum())


def slots_of(hosts: BoolArray) -> Int64Array:
    """The expert of every slot, ascending inside a rank, [P]. hosts: [E, G]."""
    return np.nonzero(hosts.T)[1]
