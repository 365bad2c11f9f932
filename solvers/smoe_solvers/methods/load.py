"""Greedy balance of load alone, as load balancers of serving engines place experts (EPLB without copies)."""

import numpy as np

from smoe_solvers.assignment import Int32Array
from smoe_solvers.methods.starts import Stop, never
from smoe_solvers.problem import Problem


def load(problem: Problem, _generator: np.random.Generator, _stop: Stop = never) -> Int32Array:
    """Hottest expert first, each to the least loaded rank with room; ties to lower numbers. Draws nothing."""
    placement = np.empty(problem.num_experts, np.int32)
    room, rank_load = problem.capacity, np.zeros(problem.num_ranks)
    for expert in np.argsort(-problem.load, kind="stable"):
        rank = int(np.where((room > 0) & problem.allowed[expert], rank_load, np.inf).argmin())
        placement[expert] = rank
        room[rank] -= 1
        rank_load[rank] += problem.load[expert]
    return placement
