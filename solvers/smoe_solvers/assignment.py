"""Assignment of tokens to ranks under a quota: the exact one and the rule that is served (design 4.1).

Axes: T tokens, G ranks, M entries of a block (a kind of row and how often it occurs), U kinds. Scores are integers, so
that every rank computes the same plan.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

HARD = np.int64(1) << 40
"""A price cap no row ever pays: the quota holds exactly."""

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

_INFINITE = np.int64(1) << 60


@njit(cache=True)
def _relax_edges(scores, kind, flow, rank, edge, via):  # type: ignore[no-untyped-def]
    """Cheapest way to move one row off `rank` to each other rank: edge[rank, h] and the entry it moves."""
    ranks = scores.shape[1]
    for h in range(ranks):
        edge[rank, h] = _INFINITE
        via[rank, h] = -1
    for m in range(len(kind)):
        if flow[m, rank] > 0:
            u = kind[m]
            here = scores[u, rank]
            for h in range(ranks):
                cost = np.int64(here) - scores[u, h]
                if cost < edge[rank, h]:
                    edge[rank, h] = cost
                    via[rank, h] = m


@njit(cache=True)
def _distances_from(over, edge, distance, previous):  # type: ignore[no-untyped-def]
    """Bellman-Ford from all overfull ranks at once; a flow optimal for its own loads has no negative cycle."""
    ranks = edge.shape[0]
    distance[:] = _INFINITE
    previous[:] = -1
    distance[over] = 0
    for _ in range(ranks):
        changed = False
        for g in range(ranks):
            if distance[g] < _INFINITE:
                for h in range(ranks):
                    if edge[g, h] < _INFINITE and distance[g] + edge[g, h] < distance[h]:
                        distance[h] = distance[g] + edge[g, h]
                        previous[h] = g
                        changed = True
        if not changed:
            break


@njit(cache=True)
def _set_prices(edge, load, quota, cap, price):  # type: ignore[no-untyped-def]
    """Dual prices of the ranks: distances to rank 0, where free capacity links ranks as well."""
    ranks = len(load)
    price[:] = _INFINITE
    price[0] = 0
    for _ in range(ranks + 1):
        changed = False
        for g in range(ranks):
            for h in range(ranks):
                cost = edge[g, h]
                if cap < HARD:
                    cost = min(cost, (-cap if load[g] < quota else cap) + (-cap if load[h] > quota else cap))
                elif load[g] < quota:
                    cost = min(cost, 0)
                if g != h and cost < _INFINITE and price[h] < _INFINITE and cost + price[h] < price[g]:
                    price[g] = cost + price[h]
                    changed = True
        if not changed:
            break
    lowest = price.min()
    for g in range(ranks):
        price[g] = min(price[g] - lowest, HARD)  # a rank with no row at all reaches nothing


@njit(cache=True)
def _initial_flow(scores, kind, multiplicity, price, flow):  # type: ignore[no-untyped-def]
    """Every row to its best rank at the given prices, ties to the lower. Returns the ranks' loads."""
    ranks = scores.shape[1]
    load = np.zeros(ranks, np.int64)
    for m in range(len(kind)):
        u = kind[m]
        best = 0
        for g in range(1, ranks):
            if scores[u, g] - price[g] > scores[u, best] - price[best]:
                best = g
        flow[m, :] = 0
        flow[m, best] = multiplicity[m]
        load[best] += multiplicity[m]
    return load


@njit(cache=True)
def _push(source, target, previous, via, flow, load, quota):  # type: ignore[no-untyped-def]
    """Move as many rows as the path from source to target carries and both ends want."""
    amount = min(load[source] - quota, quota - load[target])
    h = target
    while h != source:
        g = previous[h]
        amount = min(amount, flow[via[g, h], g])
        h = g
    h = target
    while h != source:
        g = previous[h]
        flow[via[g, h], g] -= amount
        flow[via[g, h], h] += amount
        h = g
    load[source] -= amount
    load[target] += amount


@njit(cache=True)
def _value(scores, kind, flow, load, quota, cap):  # type: ignore[no-untyped-def]
    value = np.int64(0)
    for m in range(len(kind)):
        for g in range(len(load)):
            value += np.int64(flow[m, g]) * scores[kind[m], g]
    if cap < HARD:
        for g in range(len(load)):
            value -= cap * abs(load[g] - quota)
    return value


@njit(cache=True)
def transport(scores, kind, multiplicity, quota, cap, price, flow):  # type: ignore[no-untyped-def]
    """Best assignment of a block's rows to ranks, exact: successive cheapest paths on the G-node residual graph.

    scores: [U, G] int32; kind, multiplicity: [M] entries of the block; quota: rows a rank takes at no charge; cap: what
    each row above or below the quota costs (HARD: the quota is a limit). price: [G] int64, prices to start from (zero,
    or those of a similar block that fills every quota), replaced by the optimal duals; flow: [M, G] int32, out.
    Returns the total score, less the charges. Cost: O(moved rows * (M * G + G^3)); solver_study.md section 2.
    """
    ranks = scores.shape[1]
    load = _initial_flow(scores, kind, multiplicity, price, flow)
    edge = np.empty((ranks, ranks), np.int64)
    via = np.empty((ranks, ranks), np.int64)
    distance = np.empty(ranks, np.int64)
    previous = np.empty(ranks, np.int64)
    for g in range(ranks):
        _relax_edges(scores, kind, flow, g, edge, via)
    while load.max() > quota:
        _distances_from(load > quota, edge, distance, previous)  # the cheapest of all first: a charge may end it
        target = -1
        for h in range(ranks):
            if load[h] < quota and distance[h] < _INFINITE and (target < 0 or distance[h] < distance[target]):
                target = h
        if target < 0 or (cap < HARD and distance[target] >= 2 * cap):
            break
        source = target
        while previous[source] >= 0:
            source = previous[source]
        _push(source, target, previous, via, flow, load, quota)
        h = target
        while h >= 0:
            _relax_edges(scores, kind, flow, h, edge, via)
            h = previous[h]
    _set_prices(edge, load, quota, cap, price)
    return _value(scores, kind, flow, load, quota, cap)


def assign_exact(scores: npt.NDArray[np.integer], quota: int) -> Int32Array:
    """The assignment of highest total score under the quota (min-cost flow).

    scores: [T, G] integers. Returns token_to_rank: [T] int32. Raises ValueError if quota * G < T.
    """
    tokens, ranks = scores.shape
    _check_quota(tokens, ranks, quota)
    flow = np.zeros((tokens, ranks), np.int32)
    transport(
        np.ascontiguousarray(scores, np.int32),
        np.arange(tokens),
        np.ones(tokens, np.int64),
        np.int64(quota),
        HARD,
        np.zeros(ranks, np.int64),
        flow,
    )
    ranks_taken: Int32Array = flow.argmax(axis=1).astype(np.int32)
    return ranks_taken


def assign_rule(scores: UInt8Array, quota: int) -> Int32Array:
    """The assignment that is served: regret rounds under the quota, then two passes of pairwise exchange.

    scores: [T, G] uint8. Returns token_to_rank: [T] int32; ties by position, then by lower rank.
    Raises ValueError if quota * G < T. Cost: O(G * T * G) for at most G rounds, then two exchange passes.
    """
    tokens, ranks = scores.shape
    _check_quota(tokens, ranks, quota)
    wide = scores.astype(np.int32)
    token_to_rank = _regret_rounds(wide, quota)
    for _ in range(2):
        if not _exchange_pass(wide, token_to_rank):
            break
    return token_to_rank


def _check_quota(tokens: int, ranks: int, quota: int) -> None:
    if quota * ranks < tokens:
        raise ValueError(f"{ranks} ranks with a quota of {quota} cannot hold {tokens} tokens")


def _regret_rounds(scores: Int32Array, quota: int) -> Int32Array:
    """Each round every open token asks for its best open rank; a rank takes those that would lose most elsewhere."""
    tokens, ranks = scores.shape
    token_to_rank = np.full(tokens, -1, np.int32)
    room = np.full(ranks, quota, np.int64)
    while (waiting := np.flatnonzero(token_to_rank < 0)).size:
        open_ranks = np.flatnonzero(room)
        offered = scores[np.ix_(waiting, open_ranks)]
        wish = offered.argmax(axis=1)
        best = offered[np.arange(len(waiting)), wish]
        offered[np.arange(len(waiting)), wish] = -1
        regret = best - np.maximum(offered.max(axis=1), 0)
        for column, rank in enumerate(open_ranks):
            asking = np.flatnonzero(wish == column)
            taken = asking[np.argsort(-regret[asking], kind="stable")][: room[rank]]
            token_to_rank[waiting[taken]] = rank
            room[rank] -= len(taken)
    return token_to_rank


def _exchange_pass(scores: Int32Array, token_to_rank: Int32Array) -> bool:
    """Swap tokens between every two ranks, best gains first, while a swap gains; changes token_to_rank in place."""
    ranks = scores.shape[1]
    changed = False
    for p in range(ranks):
        for q in range(p + 1, ranks):
            ends = []
            for here, there in ((p, q), (q, p)):
                on = np.flatnonzero(token_to_rank == here)
                gain = scores[on, there] - scores[on, here]
                order = np.argsort(-gain, kind="stable")
                ends.append((on[order], gain[order]))
            (from_p, gain_p), (from_q, gain_q) = ends
            pairs = min(len(from_p), len(from_q))
            swaps = int(np.count_nonzero(gain_p[:pairs] + gain_q[:pairs] > 0))
            token_to_rank[from_p[:swaps]] = q
            token_to_rank[from_q[:swaps]] = p
            changed |= swaps > 0
    return changed
