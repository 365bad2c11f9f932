"""The Cross-Entropy co-clustering: seeds, rounds of sampling around the incumbent, exact polish (solver_study.md 10).

A row-stochastic matrix P[E, G] is the search distribution. Each round draws balanced placements from it, polishes the
best, relabels the elite to the incumbent (ranks have no names) and moves P towards them. It stops by counts, never by
the clock, so that one seed gives one plan.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from numba import njit
from scipy.optimize import linear_sum_assignment

from smoe_solvers.assignment import Int32Array, Int64Array
from smoe_solvers.choices import Effort, Goal
from smoe_solvers.descent import descend
from smoe_solvers.objectives import score, search_view
from smoe_solvers.problem import Problem
from smoe_solvers.seeds import pair_cut, soft_kmeans

POPULATION = 40
ELITE_SHARE = 0.1
SMOOTHING = 0.5
FLOOR = 0.02
SEED_SHARE = 0.7
STALE_ROUNDS = 8
SEARCH_BLOCKS = 12
PAIR_SEEDS = 5
FINALISTS = 3


@dataclass(frozen=True)
class Settings:
    """soft: random starts; polished: seeds given an exact descent; rounds of CE; elites polished in each round."""

    soft: int
    polished: int
    rounds: int
    elites_polished: int


SETTINGS = {
    Effort.FAST: Settings(soft=6, polished=2, rounds=0, elites_polished=0),
    Effort.DEFAULT: Settings(soft=20, polished=3, rounds=10, elites_polished=2),
    Effort.THOROUGH: Settings(soft=60, polished=8, rounds=40, elites_polished=6),
}


@dataclass(frozen=True)
class Candidate:
    """A placement with its objective on the problem it was searched on."""

    placement: Int32Array
    objective: float
    origin: str


@dataclass
class Stage:
    """What one stage of the search reached: its best objective, lar and fan-out on the whole problem."""

    name: str
    objective: float
    lar: float
    fanout: float


@dataclass
class Solution:
    """The chosen placement and the log of how the search came to it."""

    placement: Int32Array
    objective: float
    origin: str
    stages: list[Stage] = field(default_factory=list)
    stopped: dict[str, int] = field(default_factory=dict)


@njit(cache=True)
def _draw_balanced(probability, order, uniform, capacity):  # type: ignore[no-untyped-def]
    """Placements drawn expert by expert in the given order, full ranks masked. Returns [P, E] int32."""
    experts, ranks = probability.shape
    placements = np.zeros((len(order), experts), np.int32)
    for i in range(len(order)):
        room = capacity.copy()
        for j in range(experts):
            e = order[i, j]
            total = 0.0
            for g in range(ranks):
                if room[g] > 0:
                    total += probability[e, g]
            left = uniform[i, j] * total
            chosen = -1
            for g in range(ranks):
                if room[g] > 0:
                    if chosen < 0 or left > 0:
                        chosen = g
                    left -= probability[e, g]
            placements[i, e] = chosen
            room[chosen] -= 1
    return placements


@dataclass
class CrossEntropy:
    """The search distribution: ask for placements, tell their objectives.

    probability: [E, G], rows sum to 1; incumbent: the best placement met, which fixes the rank labels.
    """

    problem: Problem
    incumbent: Candidate
    generator: np.random.Generator
    probability: npt.NDArray[np.float64] = field(init=False)
    stale: int = 0

    def __post_init__(self) -> None:
        self.restart([self.incumbent.placement])

    def restart(self, around: list[Int32Array]) -> None:
        """Start again around some placements: their mean, mixed with the uniform distribution."""
        seeds = np.mean([self._one_hot(self._relabel(placement)) for placement in around], axis=0)
        self.probability = self._floored(SEED_SHARE * seeds + (1 - SEED_SHARE) / self.problem.num_ranks)
        self.stale = 0

    def ask(self, count: int) -> Int32Array:
        """Up to `count` balanced placements from the distribution, [<= count, E]; experts come in random order."""
        experts = len(self.probability)
        order = self.generator.permuted(np.tile(np.arange(experts), (count, 1)), axis=1)
        uniform = self.generator.random((count, experts))
        placements: Int32Array = _draw_balanced(self.probability, order, uniform, self.problem.capacity)
        legal = self.problem.allowed[np.arange(experts), placements].all(axis=1)
        return placements[legal]

    def tell(self, elite: list[Candidate]) -> None:
        """Move the distribution towards the elite, and the incumbent to the best of them if it is better."""
        if elite[0].objective < self.incumbent.objective - 1e-12:
            self.incumbent, self.stale = elite[0], 0
        else:
            self.stale += 1
        mean = np.mean([self._one_hot(self._relabel(candidate.placement)) for candidate in elite], axis=0)
        self.probability = self._floored((1 - SMOOTHING) * self.probability + SMOOTHING * mean)

    def _one_hot(self, placement: Int32Array) -> npt.NDArray[np.float64]:
        return np.eye(self.problem.num_ranks)[placement]

    def _relabel(self, placement: Int32Array) -> Int32Array:
        return relabel(placement, self._one_hot(self.incumbent.placement), self.problem.capacity)

    def _floored(self, probability: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        floored = np.maximum(probability, FLOOR / self.problem.num_ranks) * self.problem.allowed
        rows: npt.NDArray[np.float64] = floored / floored.sum(axis=1, keepdims=True)
        return rows


def relabel(placement: Int32Array, towards: npt.NDArray[np.floating], capacity: Int64Array) -> Int32Array:
    """The same clusters with rank labels that agree most with `towards` [E, G] (a G x G assignment).

    A cluster keeps to ranks of its own size. capacity: [G].
    """
    ranks = towards.shape[1]
    overlap = np.stack([towards[placement == g].sum(axis=0) for g in range(ranks)])
    overlap = np.where(capacity[:, None] == capacity[None, :], overlap, -np.inf)
    old, new = linear_sum_assignment(overlap, maximize=True)
    label = np.empty(ranks, np.int32)
    label[old] = new
    renamed: Int32Array = label[placement]
    return renamed


def cross_entropy(
    problem: Problem,
    goal: Goal,
    effort: Effort,
    generator: np.random.Generator,
    extra_seeds: dict[str, Int32Array] | None = None,
) -> Solution:
    """Co-cluster one layer: never worse on the goal than the contiguous placement or any seed.

    extra_seeds: placements by origin to start from as well (METIS, when asked for).
    """
    settings = SETTINGS[effort]
    whole, problem = problem, search_view(problem)
    search = problem.few_blocks(SEARCH_BLOCKS)
    seeds = make_seeds(search, goal, settings, generator)
    seeds += [Candidate(placement, 0.0, origin) for origin, placement in (extra_seeds or {}).items()]
    seeds = _rank(search, seeds)
    log = [_stage(whole, "contiguous", problem.contiguous()), _stage(whole, "seeds", seeds[0].placement)]
    polished = _polish(search, seeds[: settings.polished], generator)
    log.append(_stage(whole, "seeds polished", polished[0].placement))
    rounds = 0
    if settings.rounds:
        found, rounds = _rounds(search, polished, seeds, settings, generator)
        polished = sorted([*found, *polished], key=lambda candidate: candidate.objective)
        log.append(_stage(whole, "cross-entropy", polished[0].placement))
    ends = _polish(problem, polished[:FINALISTS], generator)
    log.append(_stage(whole, "polish", ends[0].placement))
    everything = _rank(problem, [*ends, *seeds, Candidate(problem.contiguous(), 0.0, "contiguous")])
    best = everything[0]
    return Solution(best.placement, best.objective, best.origin, log, {"rounds": rounds, "seeds": len(seeds)})


def make_seeds(problem: Problem, goal: Goal, settings: Settings, generator: np.random.Generator) -> list[Candidate]:
    """Soft 2-D k-means starts (fan-out: descents from pair cuts), pair cuts, and the contiguous placement."""
    seeds = [Candidate(problem.contiguous(), 0.0, "contiguous")]
    has_sets = len(problem.sets) > 0
    if goal is Goal.FANOUT:
        for _ in range(settings.soft):
            start = pair_cut(problem, generator)
            seeds.append(Candidate(descend(problem, start, generator), 0.0, _descended("pair cut")))
        return seeds
    seeds += [Candidate(soft_kmeans(problem, generator), 0.0, "soft 2-D k-means") for _ in range(settings.soft)]
    if has_sets:
        seeds += [Candidate(pair_cut(problem, generator), 0.0, "pair cut") for _ in range(PAIR_SEEDS)]
    return seeds


def _rank(problem: Problem, candidates: list[Candidate]) -> list[Candidate]:
    """Candidates with their objective on `problem`, best first; ties keep their order."""
    scored = [Candidate(c.placement, score(problem, c.placement).objective, c.origin) for c in candidates]
    return sorted(scored, key=lambda candidate: candidate.objective)


def _polish(problem: Problem, candidates: list[Candidate], generator: np.random.Generator) -> list[Candidate]:
    return _rank(
        problem,
        [Candidate(descend(problem, c.placement, generator), 0.0, _descended(c.origin)) for c in candidates],
    )


def _descended(origin: str) -> str:
    return origin if origin.endswith("descent") else f"{origin} + descent"


def _rounds(
    problem: Problem,
    polished: list[Candidate],
    seeds: list[Candidate],
    settings: Settings,
    generator: np.random.Generator,
) -> tuple[list[Candidate], int]:
    """The CE rounds. Returns the incumbents met, best last first, and the number of rounds."""
    state = CrossEntropy(problem, polished[0], generator)
    state.restart([candidate.placement for candidate in polished])
    fresh = iter(seeds[settings.polished :])
    incumbents = [state.incumbent]
    elites = max(1, round(POPULATION * ELITE_SHARE))
    rounds = 0
    for _ in range(settings.rounds):
        drawn = [Candidate(placement, 0.0, "cross-entropy") for placement in state.ask(POPULATION)]
        if not drawn:
            break
        rounds += 1
        ranked = _rank(problem, drawn)
        better = _polish(problem, ranked[: settings.elites_polished], generator)
        state.tell(sorted([*better, *ranked[settings.elites_polished : elites]], key=lambda c: c.objective))
        if state.incumbent is not incumbents[0]:
            incumbents.insert(0, state.incumbent)
        if state.stale >= STALE_ROUNDS:
            seed = next(fresh, None)
            state.restart([seed.placement if seed else _shaken(state.incumbent.placement, generator)])
    return incumbents, rounds


def _shaken(placement: Int32Array, generator: np.random.Generator, swaps: int = 4) -> Int32Array:
    shaken = placement.copy()
    for _ in range(swaps):
        a, b = generator.integers(len(shaken), size=2)
        shaken[a], shaken[b] = shaken[b], shaken[a]
    return shaken


def _stage(problem: Problem, name: str, placement: Int32Array) -> Stage:
    result = score(problem, placement)
    return Stage(name, result.objective, result.lar, result.fanout)
