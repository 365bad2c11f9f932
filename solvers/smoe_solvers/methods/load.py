"""Greedy balance of load alone, as load balancers of serving engines place experts (EPLB's global policy)."""

import numpy as np
import numpy.typing as npt

from smoe_solvers.assignment import Int32Array, Int64Array
from smoe_solvers.methods.starts import Stop, never
from smoe_solvers.problem import Problem, rank_capacity


def load(problem: Problem, _generator: np.random.Generator, _stop: Stop = never) -> Int32Array:
    """Hottest expert first, each to the least loaded rank with room; ties to lower numbers. Draws nothing."""
    return _pack(problem.load, problem.capacity, problem.allowed)


def balance_load(load: npt.NDArray[np.number], num_ranks: int, num_slots: int) -> Int64Array:
    """Experts by load in equal slots, further slots filled with copies: physical_to_logical, [P].

    load: [E] activations; num_slots: P, at least E. Each further slot copies the expert whose copies bear
    most; then copies are packed like experts, so that a rank may get two of one expert (EPLB, rebalance_experts).
    """
    copies = np.ones(len(load), np.int64)
    logical = list(range(len(load)))
    for _ in range(num_slots - len(load)):
        logical.append(int((load / copies).argmax()))
        copies[logical[-1]] += 1
    everywhere = np.ones((num_slots, num_ranks), np.bool_)
    rank = _pack((load / copies)[logical], rank_capacity(num_slots, num_ranks), everywhere)
    return np.array(logical, np.int64)[np.argsort(rank, kind="stable")]


def _pack(
    weight: npt.NDArray[np.number], capacity: npt.NDArray[np.integer], allowed: npt.NDArray[np.bool_]
) -> Int32Array:
    """Heaviest first, each to the least loaded rank with room. weight: [N]; capacity: [G]; allowed: [N, G]."""
    rank_of = np.empty(len(weight), np.int32)
    room, rank_load = np.array(capacity), np.zeros(len(capacity))
    for item in np.argsort(-weight, kind="stable"):
        rank = int(np.where((room > 0) & allowed[item], rank_load, np.inf).argmin())
        rank_of[item] = rank
        room[rank] -= 1
        rank_load[rank] += weight[item]
    return rank_of
