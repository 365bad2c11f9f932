"""The loop over requests and experts of the later paper, Semantic Parallelism (arXiv 2503.04398 v4).

What stands for what: a request is a kind of row of the problem (a token id with its table row, or an expert set), its
length the number of rows of that kind, its expert affinity the kind's demand. Every term of a score is a share, so
that the weights, all 1 as the public reproduction has them, mean something; the paper prints none. Load counts
activations, and of the pairs met the one best for the problem's goal is kept.

Axes: E experts, G ranks, U requests.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

from smoe_solvers.assignment import Int32Array
from smoe_solvers.methods.starts import Stop, never
from smoe_solvers.objectives import coactivation, score
from smoe_solvers.problem import Problem
from smoe_solvers.seeds import random_placement

STEPS = 8
SWAPS = 64
SEARCH_BLOCKS = 12

Float64Array = npt.NDArray[np.float64]


def alternating(problem: Problem, generator: np.random.Generator, stop: Stop = never) -> Int32Array:
    """Place experts by the requests' ranks, then requests by the experts', some times; the best placement met."""
    search = problem.few_blocks(SEARCH_BLOCKS)
    length = np.zeros(search.demand.shape[1])
    np.add.at(length, search.kind, search.multiplicity)
    used = np.flatnonzero(length)
    length, request = length[used], np.ascontiguousarray(search.demand[:, used].T, np.float64)
    joint = coactivation(search).astype(np.float64)
    joint /= np.maximum(joint.sum(axis=1, keepdims=True), 1)
    ranks = problem.num_ranks
    first = random_placement(problem, generator)
    request_to_rank = _schedule(request, length, first, ranks)
    best, lowest = problem.contiguous(), np.inf
    for _ in range(STEPS):
        wanted = _wanted(request, length, request_to_rank, ranks)
        placement = _place(problem, joint, wanted)
        _swap(placement, generator.integers(problem.num_experts, size=(SWAPS, 2)), joint, wanted, problem.allowed)
        objective = score(problem, placement).objective
        if objective < lowest:
            best, lowest = placement, objective
        if stop():
            break
        request_to_rank = _schedule(request, length, placement, ranks)
    return best


def _schedule(request: Float64Array, length: Float64Array, placement: Int32Array, ranks: int) -> Int32Array:
    """Requests in order of length, each to the best rank with room, U / G a rank. request: [U, E]. Returns [U]."""
    order = np.argsort(-length, kind="stable")
    unit = request / np.maximum(np.linalg.norm(request, axis=1, keepdims=True), 1e-12)
    to_experts = np.stack([request[:, placement == g].sum(axis=1) for g in range(ranks)], axis=1)
    to_experts /= np.maximum(to_experts.sum(axis=1, keepdims=True), 1e-12)
    request_to_rank: Int32Array = _fill(order, unit, length, to_experts, -(-len(length) // ranks))
    return request_to_rank


@njit(cache=True)
def _fill(order, unit, length, to_experts, cap):  # type: ignore[no-untyped-def]
    """Greedy: cosine with the requests already on a rank, plus the share of activations its experts take."""
    requests, ranks = to_experts.shape
    held = np.zeros((ranks, unit.shape[1]))
    room = np.full(ranks, cap)
    request_to_rank = np.zeros(requests, np.int32)
    for u in order:
        best, rank = -1.0, -1
        for g in range(ranks):
            if room[g] > 0:
                norm = np.sqrt((held[g] * held[g]).sum())
                value = to_experts[u, g]
                if norm > 0:
                    value += (held[g] * unit[u]).sum() / norm
                if value > best:
                    best, rank = value, g
        request_to_rank[u] = rank
        room[rank] -= 1
        held[rank] += length[u] * unit[u]
    return request_to_rank


def _wanted(request: Float64Array, length: Float64Array, request_to_rank: Int32Array, ranks: int) -> Float64Array:
    """Share of every expert's demand that the requests of each rank have, [E, G]."""
    rows = np.zeros((len(length), ranks))
    rows[np.arange(len(length)), request_to_rank] = length
    wanted = request.T @ rows
    share: Float64Array = wanted / np.maximum(wanted.sum(axis=1, keepdims=True), 1e-12)
    return share


def _place(problem: Problem, joint: Float64Array, wanted: Float64Array) -> Int32Array:
    """Experts by load, hottest first, to the best rank with room: co-activation there + requests there - load there."""
    placement = np.full(problem.num_experts, -1, np.int32)
    room, rank_load = problem.capacity, np.zeros(problem.num_ranks)
    beside = np.zeros_like(wanted)
    total = max(int(problem.load.sum()), 1)
    for expert in np.argsort(-problem.load, kind="stable"):
        value = beside[expert] + wanted[expert] - rank_load / total
        rank = int(np.where((room > 0) & problem.allowed[expert], value, -np.inf).argmax())
        placement[expert] = rank
        room[rank] -= 1
        rank_load[rank] += problem.load[expert]
        beside[:, rank] += joint[:, expert]
    return placement


@njit(cache=True)
def _swap(placement, pairs, joint, wanted, allowed):  # type: ignore[no-untyped-def]
    """Random swaps, in place, that raise the affinity to experts and requests together."""
    for i in range(len(pairs)):
        a, b = pairs[i]
        p, q = placement[a], placement[b]
        if p == q or not allowed[a, q] or not allowed[b, p]:
            continue
        gain = wanted[a, q] - wanted[a, p] + wanted[b, p] - wanted[b, q]
        for e in range(len(placement)):
            if e != a and e != b:
                sign = np.int64(placement[e] == q) - np.int64(placement[e] == p)
                gain += sign * (joint[a, e] + joint[e, a] - joint[b, e] - joint[e, b])
        if gain > 0:
            placement[a], placement[b] = q, p
