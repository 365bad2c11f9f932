"""Exact assignments of sample blocks, kept optimal while experts swap.

Every block is filled to G x quota rows by rows that demand nothing, so that any prices are a valid start: each row
sits on a rank that is best for it after prices, and what is too many on a rank moves along cheapest rank-to-rank paths.
A path's cost is what the move loses, so a swap that cannot gain enough is given up in the middle.

Axes: M entries of all blocks (a kind of row and how often it occurs), B blocks, E experts, G ranks. A node beyond the
ranks stands for leaving the quota at a charge.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numba import njit

from smoe_solvers.assignment import Int32Array, Int64Array
from smoe_solvers.problem import Problem

FAR = np.int64(1) << 60
FILLER = -1


class Rows(NamedTuple):
    """The rows of a problem, by entry and by expert; never changed.

    kind: [M], FILLER for rows that fill a block up; multiplicity: [M]; block_start: [B + 1]; quota: [B]; cap: charge
    off the quota.
    entry_start: [M + 1], expert, amount: [D] who is demanded by each entry, and how much.
    expert_start: [E, B + 1] where each expert's entries of each block are in entry, demand: [D].
    """

    kind: Int64Array
    multiplicity: Int32Array
    block_start: Int64Array
    quota: Int64Array
    cap: np.int64
    entry_start: Int64Array
    expert: Int32Array
    amount: Int32Array
    expert_start: Int64Array
    entry: Int32Array
    demand: Int32Array


class Assigned(NamedTuple):
    """An optimal assignment of the rows under a placement.

    score: [M, G] demand by rank; flow: [G, M] how many of an entry are on a rank; price: [B, G + 1] duals;
    off: [B, G] rows a rank is charged for, above (positive) or below its quota.
    edge: [B, G, G] the least that a row loses by moving from one rank to another, or less: a row that set it may have
    left since. It is looked up again when no row is found to move at that price.
    """

    score: Int32Array
    flow: Int32Array
    price: Int64Array
    off: Int64Array
    edge: Int64Array


def lay_out(problem: Problem) -> Rows:
    """A problem's rows with blocks filled up, ordered both ways."""
    lengths = [problem.multiplicity[a:b].sum() for a, b in pairwise(problem.block_start)]
    missing = problem.quota * problem.num_ranks - np.array(lengths, np.int64)
    short = np.flatnonzero(missing)
    kind = np.insert(problem.kind, problem.block_start[short + 1], FILLER)
    starts = problem.block_start + np.concatenate([[0], np.cumsum(missing > 0)])
    kind_of, expert_of = np.nonzero(problem.demand.T)
    kind_start = np.searchsorted(kind_of, np.arange(problem.demand.shape[1] + 1))
    width = np.where(kind == FILLER, 0, np.diff(kind_start, append=0)[kind])
    entry_start = np.concatenate([[0], np.cumsum(width)]).astype(np.int64)
    entry = np.repeat(np.arange(len(kind)), width)
    expert = expert_of[kind_start[kind[entry]] + np.arange(len(entry)) - entry_start[entry]]
    amount = problem.demand[expert, kind[entry]]
    order = np.argsort(expert, kind="stable")
    borders = np.arange(problem.num_experts)[:, None] * (len(kind) + 1) + starts
    return Rows(
        kind=kind,
        multiplicity=np.insert(problem.multiplicity, problem.block_start[short + 1], missing[short]).astype(np.int32),
        block_start=starts.astype(np.int64),
        quota=problem.quota,
        cap=np.int64(problem.cap),
        entry_start=entry_start,
        expert=expert.astype(np.int32),
        amount=amount.astype(np.int32),
        expert_start=np.searchsorted(expert[order] * (len(kind) + 1) + entry[order], borders).astype(np.int64),
        entry=entry[order].astype(np.int32),
        demand=amount[order].astype(np.int32),
    )


def empty_assignment(rows: Rows, num_ranks: int) -> Assigned:
    """Room for an assignment, all prices zero."""
    entries, blocks = len(rows.multiplicity), len(rows.quota)
    return Assigned(
        score=np.zeros((entries, num_ranks), np.int32),
        flow=np.zeros((num_ranks, entries), np.int32),
        price=np.zeros((blocks, num_ranks + 1), np.int64),
        off=np.zeros((blocks, num_ranks), np.int64),
        edge=np.zeros((blocks, num_ranks, num_ranks), np.int64),
    )


@njit(cache=True)
def assign_all(rows, expert_to_rank, assigned):  # type: ignore[no-untyped-def]
    """Assign all blocks under a placement, starting from the prices at hand. Returns the value, less the charges."""
    assigned.score[:] = 0
    for m in range(len(assigned.score)):
        for i in range(rows.entry_start[m], rows.entry_start[m + 1]):
            assigned.score[m, expert_to_rank[rows.expert[i]]] += rows.amount[i]
    return assign_scores(rows, assigned)


@njit(cache=True)
def assign_scores(rows, assigned):  # type: ignore[no-untyped-def]
    """Assign all blocks by the scores at hand, from the prices at hand. Returns the value, less the charges."""
    score, flow, price, off, edge = assigned
    ranks = score.shape[1]
    load = np.empty(ranks, np.int64)
    total = np.int64(0)
    flow[:] = 0
    off[:] = 0
    for b in range(len(rows.quota)):
        load[:] = 0
        for g in range(ranks):
            price[b, g] = min(max(price[b, g] - price[b, ranks], -rows.cap), rows.cap)
        price[b, ranks] = 0
        start, stop = rows.block_start[b], rows.block_start[b + 1]
        for m in range(start, stop):
            best = 0
            for g in range(1, ranks):
                if score[m, g] - price[b, g] > score[m, best] - price[b, best]:
                    best = g
            flow[best, m] = rows.multiplicity[m]
            load[best] += rows.multiplicity[m]
        for g in range(ranks):
            _cheapest_moves(score, flow, start, stop, g, edge[b])
        rebalance(score, flow, start, stop, rows.quota[b], rows.cap, price[b], off[b], edge[b], load, FAR)
        for g in range(ranks):
            total -= rows.cap * abs(off[b, g])
            for m in range(start, stop):
                total += np.int64(flow[g, m]) * score[m, g]
    return total


@njit(cache=True)
def rebalance(score, flow, start, stop, quota, cap, price, off, edge, load, budget):  # type: ignore[no-untyped-def]
    """Move rows of one block until every rank is at its quota, optimal again. Returns the value lost, or above budget.

    All rows must be on ranks that are best for them after prices. flow, price, off, edge and load [G] follow moves.
    """
    ranks = score.shape[1]
    distance = np.empty(ranks + 1, np.int64)
    previous = np.empty(ranks + 1, np.int64)
    settled = np.empty(ranks + 1, np.bool_)
    excess = np.zeros(ranks + 1, np.int64)
    for g in range(ranks):
        excess[g] = load[g] - quota - off[g]
        excess[ranks] += off[g]
    lost = raised = np.int64(0)
    while excess.max() > 0:
        node = _nearest(excess, edge, off, cap, price, distance, previous, settled)
        for g in range(ranks + 1):  # valid for an edge that is too cheap as well
            if settled[g]:
                price[g] += distance[node] - distance[g]
        raised += distance[node]  # of all ranks with too many, above those with too few
        lost += raised * _push(score, flow, start, stop, price, off, excess, load, previous, node, edge)
        if lost > budget:
            return lost
    return lost


@njit(cache=True)
def _edge_cost(node, h, edge, off, cap):  # type: ignore[no-untyped-def]
    """What one row loses by going from node to h, where the last node is leaving the quota."""
    if h == len(off):
        return cap if off[node] >= 0 else -cap
    if node == len(off):
        return cap if off[h] <= 0 else -cap
    return edge[node, h]


@njit(cache=True)
def _nearest(excess, edge, off, cap, price, distance, previous, settled):  # type: ignore[no-untyped-def]
    """The node with too few rows that is nearest to those with too many, after prices; Dijkstra's tree on the way."""
    nodes = len(excess)
    settled[:] = False
    for g in range(nodes):
        distance[g] = 0 if excess[g] > 0 else FAR
        previous[g] = -1
    while True:
        node = -1
        for g in range(nodes):
            if not settled[g] and distance[g] < FAR and (node < 0 or distance[g] < distance[node]):
                node = g
        settled[node] = True
        if excess[node] < 0:
            return node
        for h in range(nodes):
            if not settled[h]:
                cost = _edge_cost(node, h, edge, off, cap)
                reached = distance[node] + cost - price[node] + price[h]
                if cost < FAR and reached < distance[h]:
                    distance[h] = reached
                    previous[h] = node


@njit(cache=True)
def _cheapest_moves(score, flow, start, stop, rank, edge):  # type: ignore[no-untyped-def]
    """edge[rank, h]: the least that a row on `rank` loses by moving to h."""
    ranks = score.shape[1]
    edge[rank, :] = FAR
    for m in range(start, stop):
        if flow[rank, m] > 0:
            here = score[m, rank]
            for h in range(ranks):
                edge[rank, h] = min(edge[rank, h], np.int64(here - score[m, h]))


@njit(cache=True)
def _room(score, flow, start, stop, price, g, h, wanted):  # type: ignore[no-untyped-def]
    """How many rows on rank g can move to rank h at no loss after prices, up to those wanted."""
    room = np.int64(0)
    for m in range(start, stop):
        if flow[g, m] > 0 and score[m, g] - price[g] == score[m, h] - price[h]:
            room += flow[g, m]
            if room >= wanted:
                return wanted
    return room


@njit(cache=True)
def _move(score, flow, start, stop, price, g, h, amount, edge):  # type: ignore[no-untyped-def]
    """Move as many of those rows, the first ones; what leaves h may then be cheaper."""
    for m in range(start, stop):
        if flow[g, m] > 0 and score[m, g] - price[g] == score[m, h] - price[h]:
            moved = min(amount, np.int64(flow[g, m]))
            flow[g, m] -= moved
            flow[h, m] += moved
            amount -= moved
            for k in range(score.shape[1]):
                edge[h, k] = min(edge[h, k], np.int64(score[m, h] - score[m, k]))
            if amount == 0:
                return


@njit(cache=True)
def _push(score, flow, start, stop, price, off, excess, load, previous, target, edge):  # type: ignore[no-untyped-def]
    """Move as many rows as the path to `target` carries at its price and both ends want. Returns how many.

    None if an edge was out of date: then the edges from its rank are looked up again.
    """
    ranks = score.shape[1]
    amount = -excess[target]
    h = target
    while previous[h] >= 0:
        g = previous[h]
        if g == ranks:
            amount = min(amount, off[h]) if off[h] > 0 else amount
        elif h == ranks:
            amount = min(amount, -off[g]) if off[g] < 0 else amount
        else:
            amount = _room(score, flow, start, stop, price, g, h, amount)
            if amount == 0:
                _cheapest_moves(score, flow, start, stop, g, edge)
                return amount
        h = g
    amount = min(amount, excess[h])
    excess[h] -= amount
    excess[target] += amount
    h = target
    while previous[h] >= 0:
        g = previous[h]
        if g == ranks:
            off[h] -= amount
        elif h == ranks:
            off[g] += amount
        else:
            _move(score, flow, start, stop, price, g, h, amount, edge)
            load[g] -= amount
            load[h] += amount
        h = g
    return amount


@njit(cache=True)
def swap_gain_bound(x, y, p, q, b, rows, assigned):  # type: ignore[no-untyped-def]
    """Upper bound on one block's gain if x (on p) and y (on q) swap: the old prices stay feasible."""
    score, price = assigned.score, assigned.price
    ranks = score.shape[1]
    i, i_stop = rows.expert_start[x, b], rows.expert_start[x, b + 1]
    j, j_stop = rows.expert_start[y, b], rows.expert_start[y, b + 1]
    bound = np.int64(0)
    while i < i_stop or j < j_stop:
        m, shift, i, j = _next_shift(rows.entry, rows.demand, i, i_stop, j, j_stop)
        if shift == 0:
            continue
        before = np.int64(score[m, 0]) - price[b, 0]
        after = before + (shift if p == 0 else (-shift if q == 0 else 0))
        for g in range(1, ranks):
            value = score[m, g] - price[b, g]
            before = max(before, value)
            if g == p:
                value += shift
            elif g == q:
                value -= shift
            after = max(after, value)
        bound += rows.multiplicity[m] * (after - before)
    return bound


@njit(cache=True)
def _next_shift(entry, demand, i, i_stop, j, j_stop):  # type: ignore[no-untyped-def]
    """Merge two experts' entries: the next entry, y's demand less x's, and the positions after it."""
    if j == j_stop or (i < i_stop and entry[i] < entry[j]):
        return entry[i], -demand[i], i + 1, j
    if i == i_stop or entry[j] < entry[i]:
        return entry[j], demand[j], i, j + 1
    return entry[i], demand[j] - demand[i], i + 1, j + 1


@njit(cache=True)
def shift_block(x, y, p, q, b, rows, assigned, load):  # type: ignore[no-untyped-def]
    """Change the scores of one block as x (on p) and y (on q) swap, and put its rows on ranks that are now best.

    load: [G], how many rows every rank then has.
    """
    score, flow, price, off, edge = assigned
    ranks = score.shape[1]
    for g in range(ranks):
        load[g] = rows.quota[b] + off[b, g]
    i, i_stop = rows.expert_start[x, b], rows.expert_start[x, b + 1]
    j, j_stop = rows.expert_start[y, b], rows.expert_start[y, b + 1]
    while i < i_stop or j < j_stop:
        m, shift, i, j = _next_shift(rows.entry, rows.demand, i, i_stop, j, j_stop)
        if shift == 0:
            continue
        score[m, p] += shift
        score[m, q] -= shift
        best = 0
        top = score[m, 0] - price[b, 0]
        for g in range(1, ranks):
            value = score[m, g] - price[b, g]
            if value > top or (value == top and load[g] < load[best]):
                top = value
                best = g
        for g in range(ranks):
            amount = flow[g, m]
            if amount > 0 and score[m, g] - price[b, g] < top:
                flow[g, m] = 0
                flow[best, m] += amount
                load[g] -= amount
                load[best] += amount
        for g in range(ranks):
            if flow[g, m] > 0:
                for h in range(ranks):
                    edge[b, g, h] = min(edge[b, g, h], np.int64(score[m, g] - score[m, h]))


@njit(cache=True)
def unshift_block(x, y, p, q, b, rows, assigned):  # type: ignore[no-untyped-def]
    """Give one block's scores back what `shift_block` changed."""
    for i in range(rows.expert_start[x, b], rows.expert_start[x, b + 1]):
        assigned.score[rows.entry[i], p] += rows.demand[i]
        assigned.score[rows.entry[i], q] -= rows.demand[i]
    for j in range(rows.expert_start[y, b], rows.expert_start[y, b + 1]):
        assigned.score[rows.entry[j], q] += rows.demand[j]
        assigned.score[rows.entry[j], p] -= rows.demand[j]


@njit(cache=True)
def move_bounds(rows, assigned, expert_to_rank, bounds):  # type: ignore[no-untyped-def]
    """bounds[e, h]: upper bound on the gain of all blocks if expert e alone moved to another rank h.

    Bounds of two moves add up to one for their swap: after prices a row's best is convex in what a rank gains.
    """
    score, price = assigned.score, assigned.price
    ranks = score.shape[1]
    value = np.empty(ranks, np.float64)  # whole numbers; compiled loops are faster on floats
    bounds[:] = 0
    for b in range(len(rows.quota)):
        for m in range(rows.block_start[b], rows.block_start[b + 1]):
            best, top, second = 0, -np.inf, -np.inf
            for g in range(ranks):
                value[g] = score[m, g] - price[b, g]
                if value[g] > top:
                    best, top, second = g, value[g], top
                elif value[g] > second:
                    second = value[g]
            times = np.float64(rows.multiplicity[m])
            for i in range(rows.entry_start[m], rows.entry_start[m + 1]):
                e, amount = rows.expert[i], np.float64(rows.amount[i])
                p = expert_to_rank[e]
                without = max(second, top - amount) if p == best else top
                for h in range(ranks):
                    after = value[h] + amount
                    after = after if after > without else without
                    bounds[e, h] += times * (after - top)
