"""The Cross-Entropy co-clustering: seeds, rounds of sampling around the incumbent, exact polish.

A row-stochastic matrix P[E, G] is the search distribution. Each round draws balanced placements from it, descends from
the best of them and from kicks of the incumbent, relabels the elite to the incumbent (ranks have no names) and moves P
towards them. It stops by counts, never by the clock unless it is asked to, so that one seed gives one plan.
"""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit
from scipy.optimize import linear_sum_assignment

from smoe_solvers.assignment import Int32Array, Int64Array
from smoe_solvers.choices import Effort, Goal
from smoe_solvers.descent import Descent
from smoe_solvers.objectives import lower_bound, score, search_view
from smoe_solvers.problem import Problem
from smoe_solvers.seeds import pair_cut, soft_kmeans
from smoe_solvers.settings import SETTINGS, Settings, settings_for

POPULATION = 40
ELITE_SHARE = 0.1
SMOOTHING = 0.5
FLOOR = 0.02
SEED_SHARE = 0.7
STALE_ROUNDS = 8
PAIR_SEEDS = 5
KICK_SWAPS = 4
TOLERANCE = 1e-12


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
    """The chosen placement and the log of how the search came to it.

    stopped: counts of what was done; reasons: why the rounds ended (`CrossEntropy.stop`); settings: how much to do.
    """

    placement: Int32Array
    objective: float
    origin: str
    stages: list[Stage] = field(default_factory=list)
    stopped: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, float] = field(default_factory=dict)
    settings: dict[str, int] = field(default_factory=dict)


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
    """The search distribution: ask for placements, tell their objectives, stop when a reason is met.

    probability: [E, G], rows sum to 1; incumbent: the best placement met, which fixes the rank labels; rounds: elites
    told; stale: rounds since the incumbent changed or the search restarted; restarts: since the incumbent changed.
    fresh: placements to restart from; met: the incumbents before.
    """

    problem: Problem
    incumbent: Candidate
    generator: np.random.Generator
    settings: Settings = SETTINGS[Effort.DEFAULT]
    fresh: list[Int32Array] = field(default_factory=list)
    time_limit: float | None = None
    probability: npt.NDArray[np.float64] = field(init=False)
    rounds: int = 0
    stale: int = 0
    restarts: int = 0
    met: list[Candidate] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.bound = lower_bound(self.problem)
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
        """Move the distribution towards the elite, and the incumbent to the best of them if it is better.

        elite: best first. After STALE_ROUNDS without a better incumbent the distribution restarts, from a fresh seed
        or from the incumbent with random swaps.
        """
        self.rounds += 1
        if elite[0].objective < self.incumbent.objective - TOLERANCE:
            self.met.append(self.incumbent)
            self.incumbent, self.stale, self.restarts = elite[0], 0, 0
        else:
            self.stale += 1
        mean = np.mean([self._one_hot(self._relabel(candidate.placement)) for candidate in elite], axis=0)
        self.probability = self._floored((1 - SMOOTHING) * self.probability + SMOOTHING * mean)
        if self.stale >= STALE_ROUNDS:
            self.restarts += 1
            self.restart([self.fresh.pop(0) if self.fresh else self.kick()])

    def kick(self) -> Int32Array:
        """The incumbent with a few random swaps of experts that may take each other's place."""
        kicked = self.incumbent.placement.copy()
        for _ in range(KICK_SWAPS):
            a, b = self.generator.integers(len(kicked), size=2)
            if self.problem.allowed[a, kicked[b]] and self.problem.allowed[b, kicked[a]]:
                kicked[a], kicked[b] = kicked[b], kicked[a]
        return kicked

    def stop(self) -> dict[str, float]:
        """The reasons met to stop, with what met them; empty: go on."""
        seconds = time.monotonic() - self.started
        met = {
            "rounds": (self.rounds, self.rounds >= self.settings.rounds),
            "restarts": (self.restarts, self.restarts >= self.settings.restarts),
            "optimum": (self.bound, self.incumbent.objective <= self.bound + TOLERANCE),
            "seconds": (seconds, self.time_limit is not None and seconds >= self.time_limit),
        }
        return {reason: float(value) for reason, (value, reached) in met.items() if reached}

    def save(self) -> dict[str, Any]:
        """All that a search needs to go on: plain arrays, numbers and strings."""
        return {
            "probability": self.probability.copy(),
            "placements": np.stack([c.placement for c in (self.incumbent, *self.met)]),
            "objectives": np.array([c.objective for c in (self.incumbent, *self.met)]),
            "origins": [c.origin for c in (self.incumbent, *self.met)],
            "fresh": np.array(self.fresh, np.int32).reshape(-1, self.problem.num_experts),
            "counts": np.array([self.rounds, self.stale, self.restarts]),
            "generator": self.generator.bit_generator.state,
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Go on where `save` was called; the generator must be of the same kind."""
        self.probability = saved["probability"].copy()
        rows = zip(saved["placements"], saved["objectives"], saved["origins"], strict=True)
        self.incumbent, *self.met = [Candidate(p.copy(), float(value), origin) for p, value, origin in rows]
        self.fresh = [placement.copy() for placement in saved["fresh"]]
        self.rounds, self.stale, self.restarts = (int(count) for count in saved["counts"])
        self.generator.bit_generator.state = saved["generator"]

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


def advance(search: CrossEntropy, descent: Descent) -> None:
    """One round: draw, descend from the best draws and from kicks of the incumbent, tell the elite."""
    settings, generator = search.settings, search.generator
    ranked = _rank(descent, [Candidate(placement, 0.0, "cross-entropy") for placement in search.ask(POPULATION)])
    elites = max(1, round(POPULATION * ELITE_SHARE))
    starts = ranked[: settings.elites_polished]
    starts += [Candidate(search.kick(), 0.0, "cross-entropy, kicked") for _ in range(settings.kicks)]
    better = _descend(descent, starts, generator)
    search.tell(sorted([*better, *ranked[settings.elites_polished : elites]], key=lambda c: c.objective))


def cross_entropy(
    problem: Problem,
    goal: Goal,
    effort: Effort,
    generator: np.random.Generator,
    extra_seeds: dict[str, Int32Array] | None = None,
    *,
    layers: int = 1,
    time_limit: float | None = None,
) -> Solution:
    """Co-cluster one layer: never worse on the goal than the contiguous placement or any seed.

    extra_seeds: placements by origin to start from as well (METIS, when asked for). layers: how many such layers there
    are to solve (`settings_for`). time_limit: seconds after which no further round starts; what comes out then depends
    on the machine, and Solution.reasons says so.
    """
    whole, problem = problem, search_view(problem)
    settings = settings_for(problem, effort, layers)
    sample = problem.few_blocks(settings.blocks).few_sets(settings.sets).thinned()
    descent = Descent(sample)
    seeds = make_seeds(descent, goal, settings, generator)
    seeds += [Candidate(placement, 0.0, origin) for origin, placement in (extra_seeds or {}).items()]
    seeds = _rank(descent, seeds)
    log = [_stage(whole, "contiguous", problem.contiguous()), _stage(whole, "seeds", seeds[0].placement)]
    polished = _descend(descent, seeds[: settings.polished], generator)
    log.append(_stage(whole, "seeds polished", polished[0].placement))
    search = CrossEntropy(
        sample,
        polished[0],
        generator,
        settings,
        [seed.placement for seed in seeds[settings.polished :]],
        time_limit,
    )
    search.restart([candidate.placement for candidate in polished])
    while not search.stop():
        advance(search, descent)
    if search.rounds:
        polished = sorted([search.incumbent, *reversed(search.met), *polished], key=lambda c: c.objective)
        log.append(_stage(whole, "cross-entropy", polished[0].placement))
    large = problem.few_blocks(settings.polish_blocks)
    ends = _descend(Descent(large.thinned() if settings.thin else large), polished[: settings.finalists], generator)
    log.append(_stage(whole, "polish", ends[0].placement))
    best = _best(problem, [*ends, *seeds])
    return Solution(
        best.placement,
        score(whole, best.placement).objective,
        best.origin,
        log,
        {"rounds": search.rounds, "seeds": len(seeds), "restarts": search.restarts},
        search.stop(),
        asdict(settings),
    )


def make_seeds(descent: Descent, goal: Goal, settings: Settings, generator: np.random.Generator) -> list[Candidate]:
    """Soft 2-D k-means starts (fan-out: descents from pair cuts), pair cuts, and the contiguous placement."""
    problem = descent.problem
    seeds = [Candidate(problem.contiguous(), 0.0, "contiguous")]
    if goal is Goal.FANOUT:
        cuts = [Candidate(pair_cut(problem, generator), 0.0, "pair cut") for _ in range(settings.soft)]
        return seeds + _descend(descent, cuts, generator)
    seeds += [
        Candidate(soft_kmeans(problem, generator, descent.rows), 0.0, "soft 2-D k-means") for _ in range(settings.soft)
    ]
    if len(problem.sets):
        seeds += [Candidate(pair_cut(problem, generator), 0.0, "pair cut") for _ in range(PAIR_SEEDS)]
    return seeds


def _rank(descent: Descent, candidates: list[Candidate]) -> list[Candidate]:
    """Candidates with their objective on the descent's problem, best first; ties keep their order."""
    scored = [Candidate(c.placement, descent.score(c.placement), c.origin) for c in candidates]
    return sorted(scored, key=lambda candidate: candidate.objective)


def _best(problem: Problem, candidates: list[Candidate]) -> Candidate:
    """The best candidate on a whole problem; ties to the first."""
    return min(candidates, key=lambda candidate: score(problem, candidate.placement).objective)


def _descend(descent: Descent, candidates: list[Candidate], generator: np.random.Generator) -> list[Candidate]:
    """Where descents from the candidates end, best first."""
    ends = [Candidate(*descent.run(c.placement, generator), _descended(c.origin)) for c in candidates]
    return sorted(ends, key=lambda candidate: candidate.objective)


def _descended(origin: str) -> str:
    return origin if origin.endswith("descent") else f"{origin} + descent"


def _stage(problem: Problem, name: str, placement: Int32Array) -> Stage:
    result = score(problem, placement)
    return Stage(name, result.objective, result.lar, result.fanout)
