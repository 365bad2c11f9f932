"""One layer from problem to checked placement: pick the method, search, compare with contiguous, confirm the gain."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smoe_solvers.assignment import Int32Array
from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.cross_entropy import Solution, Stage, cross_entropy
from smoe_solvers.methods.exact import CHEAP, count_placements, enumerate_placements
from smoe_solvers.methods.metis import metis_placements
from smoe_solvers.objectives import coactivation, score
from smoe_solvers.problem import Problem, check_placement


@dataclass(frozen=True)
class Confirmation:
    """Whether a gain over contiguous holds on blocks the search never saw: their mean, and two standard errors."""

    mean_gain: float
    two_standard_errors: float

    @property
    def confirmed(self) -> bool:
        return self.mean_gain > self.two_standard_errors


def solve(
    problem: Problem,
    goal: Goal,
    method: Method,
    effort: Effort,
    generator: np.random.Generator,
    *,
    metis_seeds: bool = False,
) -> Solution:
    """The best placement the method finds, valid and never worse on the goal than contiguous.

    metis_seeds: let the Cross-Entropy search start from METIS placements too.
    """
    if method is Method.CONTIGUOUS:
        solution = _fixed(problem, problem.contiguous(), "contiguous")
    elif method is Method.METIS:
        placements = metis_placements(coactivation(problem), problem.num_ranks)
        legal = [placement for placement in placements if _legal(problem, placement)] or [problem.contiguous()]
        solution = _fixed(problem, min(legal, key=lambda placement: score(problem, placement).objective), "METIS")
    elif problem.allowed.all() and count_placements(problem.num_experts, problem.num_ranks) <= CHEAP:
        solution = _fixed(problem, enumerate_placements(problem), "enumeration")
    else:
        extra = _metis_seeds(problem) if metis_seeds else {}
        solution = cross_entropy(problem, goal, effort, generator, extra)
    if solution.objective > score(problem, problem.contiguous()).objective:
        solution = _fixed(problem, problem.contiguous(), "contiguous")
    check_placement(solution.placement, problem.num_ranks, problem.allowed)
    return solution


def validation_gains(blocks: list[Problem], placement: Int32Array) -> npt.NDArray[np.float64]:
    """What a placement gains over contiguous on each validation block, one problem a block. Returns [B]."""
    return np.array(
        [score(block, block.contiguous()).objective - score(block, placement).objective for block in blocks]
    )


def confirm(gains: npt.NDArray[np.float64]) -> Confirmation:
    """Judge gains over blocks, [B]; of a whole placement, their mean over layers (design 4.2)."""
    spread = float(gains.std(ddof=1)) if len(gains) > 1 else float("inf")
    return Confirmation(float(gains.mean()), 2 * spread / len(gains) ** 0.5)


def _legal(problem: Problem, placement: Int32Array) -> bool:
    return bool(problem.allowed[np.arange(len(placement)), placement].all())


def _metis_seeds(problem: Problem) -> dict[str, Int32Array]:
    placements = metis_placements(coactivation(problem), problem.num_ranks)
    return {f"METIS seed {seed}": placement for seed, placement in enumerate(placements) if _legal(problem, placement)}


def _fixed(problem: Problem, placement: Int32Array, origin: str) -> Solution:
    stages = [
        Stage(name, (result := score(problem, where)).objective, result.lar, result.fanout)
        for name, where in (("contiguous", problem.contiguous()), (origin, placement))
    ]
    return Solution(placement, stages[-1].objective, origin, stages)
