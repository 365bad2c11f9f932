"""The best placement there is: all of them tried, where they are few enough, else a mixed-integer programme."""

from collections.abc import Iterator
from itertools import combinations
from math import factorial, prod

import numpy as np

from smoe_solvers.assignment import Int32Array
from smoe_solvers.methods.programme import Proof, prove
from smoe_solvers.objectives import score, search_view
from smoe_solvers.problem import Problem, rank_capacity

CHEAP = 5000
"""So few placements are all tried instead of searched among (Mixtral's 8 experts: 35 on two ranks)."""

LISTED = 20_000
"""So few are all tried where the best one is asked for; a programme takes longer."""


def exact(problem: Problem, time_limit: float | None = None) -> Proof:
    """The best placement for the problem's goal, with its proof, or what the time limit left of it.

    time_limit: seconds for HiGHS. Raises TooLargeError if there are too many placements and rows for either way.
    """
    if count_placements(problem.num_experts, problem.num_ranks) <= LISTED:
        placement = enumerate_placements(problem)
        return Proof(placement, True, score(problem, placement).objective, by="enumeration")
    return prove(problem, time_limit)


def count_placements(num_experts: int, num_ranks: int) -> int:
    """Balanced placements up to the names of ranks of one size: E! / (product of sizes! x larger ranks! x others!)."""
    sizes = [int(size) for size in rank_capacity(num_experts, num_ranks)]
    larger = num_experts % num_ranks
    labelled = factorial(num_experts) // prod(factorial(size) for size in sizes)
    return labelled // (factorial(larger) * factorial(num_ranks - larger))


def balanced_placements(num_experts: int, num_ranks: int) -> Iterator[Int32Array]:
    """All of them: the lowest expert left opens the next rank, of either size, with some companions. Yields [E]."""
    placement = np.full(num_experts, -1, np.int32)
    capacity = rank_capacity(num_experts, num_ranks)

    def fill(open_ranks: tuple[int, ...]) -> Iterator[Int32Array]:
        left = [expert for expert in range(num_experts) if placement[expert] < 0]
        if not left:
            yield placement.copy()
            return
        for rank in {int(capacity[rank]): rank for rank in reversed(open_ranks)}.values():
            for companions in combinations(left[1:], int(capacity[rank]) - 1):
                members = [left[0], *companions]
                placement[members] = rank
                yield from fill(tuple(other for other in open_ranks if other != rank))
                placement[members] = -1

    yield from fill(tuple(range(num_ranks)))


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
