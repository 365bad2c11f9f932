"""Every balanced placement, where there are few enough to try them all (Mixtral's 8 experts: 35 on two ranks)."""

from collections.abc import Iterator
from itertools import combinations
from math import factorial

import numpy as np

from smoe_solvers.assignment import Int32Array
from smoe_solvers.objectives import score, search_view
from smoe_solvers.problem import Problem

CHEAP = 5000


def count_placements(num_experts: int, num_ranks: int) -> int:
    """Balanced placements up to the names of the ranks: E! / ((E/G)!^G G!)."""
    labelled = factorial(num_experts) // int(factorial(num_experts // num_ranks) ** num_ranks)
    return labelled // factorial(num_ranks)


def balanced_placements(num_experts: int, num_ranks: int) -> Iterator[Int32Array]:
    """All of them: each rank takes the lowest expert left and some companions. Yields [E] int32."""
    placement = np.full(num_experts, -1, np.int32)
    size = num_experts // num_ranks

    def fill(rank: int) -> Iterator[Int32Array]:
        left = [expert for expert in range(num_experts) if placement[expert] < 0]
        if not left:
            yield placement.copy()
            return
        for companions in combinations(left[1:], size - 1):
            members = [left[0], *companions]
            placement[members] = rank
            yield from fill(rank + 1)
            placement[members] = -1

    yield from fill(0)


def enumerate_placements(problem: Problem) -> Int32Array:
    """The best of all balanced placements for the problem's objective, ties to the first in order."""
    view = search_view(problem)
    best, lowest = problem.contiguous(), np.inf
    for placement in balanced_placements(problem.num_experts, problem.num_ranks):
        if problem.allowed[np.arange(len(placement)), placement].all():
            objective = score(view, placement).objective
            if objective < lowest - 1e-12:
                best, lowest = placement, objective
    return best
