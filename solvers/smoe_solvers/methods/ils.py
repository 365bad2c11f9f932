"""Iterated local search: exact descent, four random swaps, keep what is not worse; a fixed number of kicks."""

import numpy as np

from smoe_solvers.assignment import Int32Array
from smoe_solvers.descent import Descent, descend
from smoe_solvers.methods.starts import Stop, never
from smoe_solvers.problem import Problem
from smoe_solvers.seeds import random_placement

KICKS = 40
SWAPS = 4
SEARCH_BLOCKS = 12


def ils(problem: Problem, generator: np.random.Generator, stop: Stop = never) -> Int32Array:
    """From a random start; searched on a few blocks where there are many, then polished on all."""
    search = Descent(problem.few_blocks(SEARCH_BLOCKS))
    best, lowest = search.run(random_placement(problem, generator), generator)
    for _ in range(KICKS):
        if stop():
            break
        trial, objective = search.run(_kicked(best, problem, generator), generator)
        if objective <= lowest:
            best, lowest = trial, objective
    return descend(problem, best, generator)


def _kicked(placement: Int32Array, problem: Problem, generator: np.random.Generator) -> Int32Array:
    """Some random swaps, those that the router's groups allow."""
    kicked = placement.copy()
    for _ in range(SWAPS):
        a, b = generator.integers(len(kicked), size=2)
        if problem.allowed[a, kicked[b]] and problem.allowed[b, kicked[a]]:
            kicked[a], kicked[b] = kicked[b], kicked[a]
    return kicked
