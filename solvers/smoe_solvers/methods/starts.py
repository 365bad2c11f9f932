"""What the methods share: they draw, look at the problem's goal, keep the best, and can be told to stop."""

from collections.abc import Callable

from smoe_solvers.assignment import Int32Array
from smoe_solvers.objectives import score, search_view
from smoe_solvers.problem import Problem

Stop = Callable[[], bool]
"""Asked between steps whether time is up; without a time limit the answer is always no, and counts alone decide."""


def never() -> bool:
    return False


def best_start(problem: Problem, start: Callable[[], Int32Array], starts: int, stop: Stop) -> Int32Array:
    """The best of up to `starts` placements for the problem's goal, one at least; ties to the first."""
    view = search_view(problem)
    best = start()
    lowest = score(view, best).objective
    for _ in range(starts - 1):
        if stop():
            break
        placement = start()
        objective = score(view, placement).objective
        if objective < lowest:
            best, lowest = placement, objective
    return best
