"""Assignment of tokens to ranks under a quota: the exact one and the rule that is served (docs/terms.md).

Axes: T tokens, G ranks, M entries of a block (a kind of row and how often it occurs), U kinds. Scores are integers, so
that every rank computes the same plan. The rule is stated here and computed again on the device, to the same integers,
by smoe_cli/runtime/plan.py and plan_kernel.py: the constants below are part of it.
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

ROUNDS = 18
"""Rounds of prices, each of a smaller step than the one before."""
FIRST_STEP = 40
"""What a price rises by in the first round if its rank has a quota too much, in score units."""
SMALLER = 13
"""Sixteenths of a step that the next one has."""
CROWDED = 4
"""A rank with more quotas than that too much rises no faster: later rounds could not take it back."""
NARROWEST = 4
"""Noise is as wide as the step, but at least so many score units."""
UNIT = 256
"""A score unit of prices and noise."""
LEVELS = 8
"""Costs of moving are told apart by octaves of score units, up to the last; between two ranks exactly."""
COSTS = 256
"""Costs of moving between two ranks: differences of scores."""


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
    Returns the total score, less the charges. Cost: O(moved rows * (M * G + G^3)).
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

    >>> import numpy as np
    >>> assign_exact(np.array([[200, 180], [200, 20], [0, 100], [150, 140]]), quota=2)  # at most two tokens a rank
    array([0, 0, 1, 1], dtype=int32)
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
    """The assignment that is served: prices that balance the ranks, then what is still too much moves where it costs
    least. Near exact; exact for two ranks in one chunk.

    scores: [T, G] uint8, of which 255 are all of a token's experts: among more than two ranks, differences of a few
    units are ties where that balances them. Returns token_to_rank: [T] int32. Raises ValueError if quota * G < T.
    Batches beyond `chunk_rows` are cut into chunks that are assigned alone, each under its part of the quota. Cost:
    ROUNDS of prices and at most G of moves, O(T * G) each, no sort.

    >>> import numpy as np
    >>> assign_rule(np.array([[200, 180], [200, 20], [0, 100], [150, 140]], np.uint8), quota=2)
    array([0, 0, 1, 1], dtype=int32)
    """
    tokens, ranks = scores.shape
    _check_quota(tokens, ranks, quota)
    token_to_rank = np.zeros(tokens, np.int32)
    if ranks == 1 or not tokens:
        return token_to_rank
    chunk_of_row = row_chunks(quota, ranks, -(-tokens // ranks))
    chunk = np.repeat(chunk_of_row, ranks)[:tokens]
    for number, rows in enumerate(np.bincount(chunk_of_row)):
        members = np.flatnonzero(chunk == number)
        token_to_rank[members] = _assign_chunk(scores[members], rows)
    return token_to_rank


def chunk_rows(ranks: int) -> int:
    """Rows of G consecutive tokens that are assigned together; a power of two of tokens that one GPU block can hold."""
    return max(2040, (1 << 14) >> (ranks - 1).bit_length()) // ranks


def row_chunks(quota: int, ranks: int, rows: int) -> Int64Array:
    """The chunk of every row of G places, [quota]. rows: those that hold tokens.

    Each run of as many rows as there are chunks gives one row to each chunk, in an order that changes from run to run,
    so that a text that repeats itself does not fill one chunk.
    """
    chunks = max(1, -(-rows // chunk_rows(ranks)))
    row = np.arange(quota)
    chunk: Int64Array = (row + _mixed(row // chunks * 40503)) % chunks
    return chunk


def _check_quota(tokens: int, ranks: int, quota: int) -> None:
    if quota * ranks < tokens:
        raise ValueError(f"{ranks} ranks with a quota of {quota} cannot hold {tokens} tokens")


@njit(cache=True)
def _mixed(number):  # type: ignore[no-untyped-def]
    """Eight bits that look random, from the lower sixteen of a number."""
    low = number & 0xFFFF
    low = low ^ (low >> 7)
    return ((low * 30011) & 0xFFFF) >> 8


@njit(cache=True)
def _noise(token, rank):  # type: ignore[no-untyped-def]
    """0 to 255, alike for a position in a chunk and a rank always: a byte of 32 mixed bits that four ranks share."""
    bits = ((2 * token + rank // 4 % 2 + 1 + (rank // 8 << 16)) * 0x1E3779B1) & 0xFFFFFFFF
    bits = ((bits ^ bits >> 16) * 0x05EBCA6B) & 0xFFFFFFFF
    return ((bits ^ bits >> 16) >> (8 * (rank % 4))) & 255


@njit(cache=True)
def _best_ranks(value, home, load):  # type: ignore[no-untyped-def]
    """Every token to its best rank, ties to the lower; home: [N] and load: [G], out."""
    load[:] = 0
    for t in range(len(value)):
        best = 0
        for g in range(1, value.shape[1]):
            if value[t, g] > value[t, best]:
                best = g
        home[t] = best
        load[best] += 1


@njit(cache=True)
def _balanced(scores, quota):  # type: ignore[no-untyped-def]
    """Scores in UNIT and noise, less prices at which few tokens are beyond the quota. scores, result: [N, G] int64."""
    tokens, ranks = scores.shape
    noise = np.zeros((tokens, ranks), np.int64)
    for t in range(tokens):
        for g in range(ranks):
            noise[t, g] = _noise(t, g)
    home, load = np.zeros(tokens, np.int32), np.zeros(ranks, np.int64)
    price = np.zeros(ranks, np.int64)
    inverse = (UNIT << 8) // quota  # on the device a division for every rank and round would cost more than the round
    step = FIRST_STEP << 4
    for _ in range(ROUNDS):
        _best_ranks(scores * UNIT + max(step >> 4, NARROWEST) * noise - price, home, load)
        if load.max() > quota:
            price += np.minimum(load - quota, CROWDED * quota) * (step * inverse) >> 12
        step = step * SMALLER >> 4
    return scores * UNIT + NARROWEST * noise - price


@njit(cache=True)
def _level(cost, ranks):  # type: ignore[no-untyped-def]
    """A cost to compare: between two ranks itself, else the binary logarithm of its score units, rounded down."""
    if ranks == 2:
        return cost
    power = 0
    while power < LEVELS - 1 and cost // UNIT + 1 >> power > 1:
        power += 1
    return power


@njit(cache=True)
def _move_beyond(value, quota, home, load):  # type: ignore[no-untyped-def]
    """Ranks beyond the quota give up the tokens that lose least on the best open rank, first positions first.

    value: [N, G] less prices. Changes home and load. A rank that gave tokens up is full, so it happens once a rank.
    """
    tokens, ranks = value.shape
    while load.max() > quota:
        levels = COSTS if ranks == 2 else LEVELS
        histogram = np.zeros((ranks, levels), np.int64)
        cost, target = np.zeros(tokens, np.int64), np.zeros(tokens, np.int32)
        for t in range(tokens):
            if load[home[t]] > quota:
                best = -1
                for g in range(ranks):
                    if load[g] < quota and (best < 0 or value[t, g] > value[t, best]):
                        best = g
                target[t] = best
                cost[t] = _level(value[t, home[t]] - value[t, best], ranks)
                histogram[home[t], cost[t]] += 1
        border, among = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        for g in range(ranks):
            leaving = max(load[g] - quota, 0)
            while histogram[g, border[g]] <= leaving and border[g] < levels - 1:
                leaving -= histogram[g, border[g]]
                border[g] += 1
            among[g] = leaving
        full = load > quota
        for t in range(tokens):
            here = home[t]
            if full[here] and (cost[t] < border[here] or (cost[t] == border[here] and among[here] > 0)):
                among[here] -= cost[t] == border[here]
                home[t] = target[t]
                load[here] -= 1
                load[target[t]] += 1


@njit(cache=True)
def _assign_chunk(scores, quota):  # type: ignore[no-untyped-def]
    """The rule for tokens that are assigned together. scores: [N, G] uint8. Returns [N] int32.

    Between two ranks the order of the costs alone is exact: no prices, and no noise that could change the order.
    """
    tokens, ranks = scores.shape
    home, load = np.zeros(tokens, np.int32), np.zeros(ranks, np.int64)
    value = scores.astype(np.int64)
    if ranks > 2:
        value = _balanced(value, quota)
    _best_ranks(value, home, load)
    _move_beyond(value, quota, home, load)
    return home
