"""One layer from problem to checked placement: pick the method, search, compare with contiguous, confirm the gain."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import numpy as np
import numpy.typing as npt

from smoe_solvers.assignment import Int32Array
from smoe_solvers.bounds import Certificate, certificate
from smoe_solvers.choices import Effort, Goal, Method
from smoe_solvers.cross_entropy import Solution, Stage, cross_entropy
from smoe_solvers.hierarchy import Links, linked_objective, solve_linked
from smoe_solvers.methods.alternating import alternating
from smoe_solvers.methods.ce_plain import ce_plain
from smoe_solvers.methods.exact import CHEAP, count_placements, exact
from smoe_solvers.methods.ils import ils
from smoe_solvers.methods.kmeans2d import kmeans2d
from smoe_solvers.methods.load import load
from smoe_solvers.methods.metis import metis, metis_placements
from smoe_solvers.methods.mtkahypar import mtkahypar
from smoe_solvers.methods.programme import Proof
from smoe_solvers.methods.spectral import spectral
from smoe_solvers.methods.starts import Stop, never
from smoe_solvers.objectives import coactivation, score
from smoe_solvers.problem import Problem, check_placement
from smoe_solvers.timed import Timing, solve_time

SEARCHES: dict[Method, Callable[[Problem, np.random.Generator, Stop], Int32Array]] = {
    Method.CONTIGUOUS: lambda problem, _generator, _stop: problem.contiguous(),
    Method.LOAD: load,
    Method.METIS: metis,
    Method.MTKAHYPAR: mtkahypar,
    Method.KMEANS2D: kmeans2d,
    Method.SPECTRAL: spectral,
    Method.ALTERNATING: alternating,
    Method.ILS: ils,
    Method.CE_PLAIN: ce_plain,
}
"""The methods beside `ce` and `exact`, which have more to tell than a placement."""


@dataclass
class Solved(Solution):
    """A solution, what is proved of it, and what came in the way of the method asked for (empty: nothing)."""

    certificate: Certificate = field(default_factory=Certificate)
    note: str = ""


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
    layers: int = 1,
    time_limit: float | None = None,
    timing: Timing | None = None,
    links: Links | None = None,
) -> Solved:
    """The best placement the method finds, valid and never worse on the goal than contiguous.

    metis_seeds: let the Cross-Entropy search start from METIS placements too. layers: how many such layers there are,
    which its effort is shared among. time_limit: seconds; without it counts alone decide, so that one seed gives one
    plan. timing: what goal time is judged by; links: ranks not equally far apart, for which what the method finds is
    placed anew.
    Raises TooLargeError if the exact programme would be too large, ModuleNotFoundError if a method's package is
    missing, ValueError if goal time lacks its timing or is to be searched by another method than ce.
    """
    if goal is Goal.TIME:
        return _timed(problem, method, effort, generator, timing, layers)
    proof = None
    few = problem.allowed.all() and count_placements(problem.num_experts, problem.num_ranks) <= CHEAP
    if method in SEARCHES:
        solution = _fixed(problem, SEARCHES[method](problem, generator, _deadline(time_limit)), method.value)
    else:
        if method is Method.EXACT or few:
            proof = exact(problem, time_limit)
        if proof and proof.proved and proof.placement is not None:
            solution = _fixed(problem, proof.placement, proof.by)
        else:
            extra = _metis_seeds(problem) if metis_seeds else {}
            solution = cross_entropy(problem, goal, effort, generator, extra, layers=layers, time_limit=time_limit)
            solution = _better_incumbent(problem, proof, solution)
    if solution.objective > score(problem, problem.contiguous()).objective:
        solution = _fixed(problem, problem.contiguous(), "contiguous")
    if links is not None:
        solution, proof = solve_linked(problem, goal, links, solution.placement, effort, generator, layers), None
    check_placement(solution.placement, problem.num_ranks, problem.allowed)
    return _with_proof(solution, proof)


def _timed(
    problem: Problem,
    method: Method,
    effort: Effort,
    generator: np.random.Generator,
    timing: Timing | None,
    layers: int,
) -> Solved:
    if timing is None or method is not Method.CE:
        raise ValueError("goal time is searched by ce alone, on rows and a layer's cost")
    solution = solve_time(problem, timing, effort, generator, layers=layers)
    check_placement(solution.placement, problem.num_ranks, problem.allowed)
    return _with_proof(solution, None)


def _deadline(time_limit: float | None) -> Stop:
    if time_limit is None:
        return never
    end = monotonic() + time_limit
    return lambda: monotonic() > end


def _better_incumbent(problem: Problem, proof: Proof | None, solution: Solution) -> Solution:
    """What an exact method had when it stopped, where that is better than the search's answer."""
    if proof is None or proof.placement is None:
        return solution
    incumbent = _fixed(problem, proof.placement, f"{proof.by}, not proved")
    return incumbent if incumbent.objective < solution.objective else solution


def _with_proof(solution: Solution, proof: Proof | None) -> Solved:
    known = Certificate() if proof is None else certificate(solution.objective, proof.bound, proved=proof.proved)
    return Solved(**vars(solution), certificate=known, note="" if proof is None else proof.note)


def validation_gains(
    blocks: list[Problem], placement: Int32Array, links: Links | None = None
) -> npt.NDArray[np.float64]:
    """What a placement gains over contiguous on each validation block, one problem a block. Returns [B]."""

    def objective(block: Problem, where: Int32Array) -> float:
        return score(block, where).objective if links is None else linked_objective(block, where, links)

    return np.array([objective(block, block.contiguous()) - objective(block, placement) for block in blocks])


def confirm(gains: npt.NDArray[np.float64]) -> Confirmation:
    """Judge gains over blocks, [B]; of a whole placement, their mean over layers."""
    spread = float(gains.std(ddof=1)) if len(gains) > 1 else float("inf")
    return Confirmation(float(gains.mean()), 2 * spread / len(gains) ** 0.5)


def _metis_seeds(problem: Problem) -> dict[str, Int32Array]:
    """By origin, those that the router's groups allow."""
    placements = metis_placements(coactivation(problem), problem.num_ranks)
    expert = np.arange(problem.num_experts)
    return {
        f"METIS seed {seed}": placement
        for seed, placement in enumerate(placements)
        if problem.allowed[expert, placement].all()
    }


def _fixed(problem: Problem, placement: Int32Array, origin: str) -> Solution:
    stages = [
        Stage(name, (result := score(problem, where)).objective, result.lar, result.fanout)
        for name, where in (("contiguous", problem.contiguous()), (origin, placement))
    ]
    return Solution(placement, stages[-1].objective, origin, stages)
