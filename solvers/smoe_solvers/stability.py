"""A new placement that stays near an old one: each moved expert is a transfer of its weights, and must pay for it.

Axes: E experts, G ranks.
"""

import numpy as np

from smoe_solvers.assignment import Int32Array
from smoe_solvers.cross_entropy import relabel
from smoe_solvers.objectives import score, search_view
from smoe_solvers.problem import Problem

CHARGE = 1 / 5000
"""Part of the old placement's objective that a moved expert must save at least."""


def settle(problem: Problem, old: Int32Array, new: Int32Array, charge: float = CHARGE) -> Int32Array:
    """The new placement with those moves undone that do not pay: swaps towards the old one, the best first, while
    objective plus charges falls. Never worse than `old` where `new` is not.

    old, new: [E]; ranks of `new` are renamed to agree most with `old`. Returns [E] int32.
    """
    problem = search_view(problem)
    old = np.asarray(old, np.int32)
    before = score(problem, old).objective
    price = charge * abs(before)
    current = relabel(np.asarray(new, np.int32), np.eye(problem.num_ranks)[old], problem.capacity)
    if not problem.allowed[np.arange(len(current)), current].all():
        current = np.asarray(new, np.int32).copy()
    total = _charged(problem, current, old, price)
    while (found := _best_step(problem, current, old, price)) is not None and found[1] < total - 1e-12:
        current, total = found
    return current if total < before else old.copy()


def moved(old: Int32Array, new: Int32Array) -> int:
    """Experts on another rank than before."""
    return int((np.asarray(old) != np.asarray(new)).sum())


def _charged(problem: Problem, placement: Int32Array, old: Int32Array, price: float) -> float:
    return score(problem, placement).objective + price * moved(old, placement)


def _best_step(problem: Problem, current: Int32Array, old: Int32Array, price: float) -> tuple[Int32Array, float] | None:
    """The best swap that brings a moved expert home, with its charged objective; None if all are home.

    Ties go to the lower pair of experts. Cost: an exact evaluation for each moved expert and each of its partners.
    """
    best: tuple[Int32Array, float] | None = None
    for expert in np.flatnonzero(current != old):
        for partner in np.flatnonzero((current == old[expert]) & (current != old)):
            swapped = current.copy()
            swapped[expert], swapped[partner] = current[partner], current[expert]
            if not (problem.allowed[expert, swapped[expert]] and problem.allowed[partner, swapped[partner]]):
                continue
            total = _charged(problem, swapped, old, price)
            if best is None or total < best[1] - 1e-12:
                best = swapped, total
    return best
