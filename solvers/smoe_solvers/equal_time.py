"""Methods at equal time: each is started again with new draws until its share of processor time is used.

The clock decides here, and only here: what comes out depends on the machine.
"""

from dataclasses import dataclass
from time import process_time

import numpy as np

from smoe_solvers.assignment import Int32Array
from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.cross_entropy import cross_entropy
from smoe_solvers.methods.exact import exact
from smoe_solvers.objectives import score, search_view
from smoe_solvers.problem import Problem
from smoe_solvers.solve import SEARCHES

DRAWS_NOTHING = (Method.CONTIGUOUS, Method.LOAD)
"""Methods whose second start would be their first."""

OPTIONAL = {Method.METIS: "pymetis", Method.MTKAHYPAR: "mtkahypar"}
"""Packages that some methods need."""


@dataclass(frozen=True)
class Timed:
    """The best placement for the goal that a method found, [E]; its starts, and the processor seconds they took."""

    placement: Int32Array
    starts: int
    seconds: float


def search_timed(
    problem: Problem, goal: Goal, effort: Effort, generator: np.random.Generator, layers: int = 1
) -> Timed:
    """The Cross-Entropy search, once, by its own counts for one of `layers` layers: its time is what the others get."""
    started = process_time()
    placement = cross_entropy(problem, goal, effort, generator, layers=layers).placement
    return Timed(placement, 1, process_time() - started)


def run_for(problem: Problem, method: Method, seconds: float, seed: list[int]) -> Timed | None:
    """A method as it is, started until `seconds` are over; not compared with contiguous. None: no answer in time.

    Raises TooLargeError if the exact programme would be too large, ModuleNotFoundError if a package is missing.
    """
    started = process_time()
    if method is Method.EXACT:
        found = exact(problem, seconds).placement
        return None if found is None else Timed(found, 1, process_time() - started)

    def over() -> bool:
        return process_time() - started >= seconds

    view = search_view(problem)
    best, lowest, starts = problem.contiguous(), np.inf, 0
    while starts == 0 or not (over() or method in DRAWS_NOTHING):
        placement = SEARCHES[method](problem, np.random.default_rng([*seed, starts]), over)
        objective = score(view, placement).objective
        if objective < lowest:
            best, lowest = placement, objective
        starts += 1
    return Timed(best, starts, process_time() - started)
