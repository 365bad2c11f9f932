"""How much to search: fixed counts from the size of the problem, never from the clock.

The work of a round grows with E x G x rows; assigning rows under the quota costs about twelve times what their fan-out
does. One layer may cost an effort's BUDGET, all layers together TOTAL. As many rounds are done as that pays for, at
most MOST_ROUNDS times the usual ones and one for each expert; where not even the usual ones fit there are fewer starts,
and fewer descents in a round.
"""

from dataclasses import dataclass, replace

from smoe_solvers.choices import Effort
from smoe_solvers.problem import Problem

ASSIGNMENT = 12
"""What assigning rows costs, in units of counting their fan-out."""

SEARCH_ROWS = 4096
"""Rows that are searched; the answer is polished on all."""

FULL_ROWS = 6144
"""Up to here all rows are searched: one batch more is cheaper than a second problem."""

POLISH_ROWS = 16_384
"""Rows the answer is polished on, evenly spread where there are more."""

DENSE = 2_000_000
"""E x rows from which the polish leaves small demand out, as the search does."""


@dataclass(frozen=True)
class Settings:
    """soft: random starts; polished: seeds given an exact descent; rounds of CE; elites polished and kicks in each.

    restarts: of the distribution, in a row without a better incumbent, before the search ends; blocks, sets: of the
    problem, that are searched; finalists: answers polished, on polish_blocks; thin: whether without small demand.
    """

    soft: int
    polished: int
    rounds: int
    elites_polished: int
    kicks: int
    restarts: int = 4
    blocks: int = 4
    sets: int = SEARCH_ROWS
    finalists: int = 3
    polish_blocks: int = 16
    thin: int = 0


SETTINGS = {
    Effort.FAST: Settings(soft=6, polished=2, rounds=0, elites_polished=0, kicks=0),
    Effort.DEFAULT: Settings(soft=20, polished=3, rounds=16, elites_polished=2, kicks=4),
    Effort.THOROUGH: Settings(soft=60, polished=8, rounds=64, elites_polished=4, kicks=8, restarts=8),
}
START_ROUNDS = 2
"""What seeds and the last polish cost, in rounds."""

MOST_ROUNDS = 4
"""Times the usual rounds, where they are cheap."""

BUDGET = {Effort.FAST: 1e8, Effort.DEFAULT: 4.9e8, Effort.THOROUGH: 4e9}
TOTAL = {Effort.FAST: 2e9, Effort.DEFAULT: 1.25e10, Effort.THOROUGH: 1e11}


def settings_for(problem: Problem, effort: Effort, layers: int = 1) -> Settings:
    """The counts for one of `layers` layers like this."""
    usual = SETTINGS[effort]
    blocks, sets = problem.num_blocks, len(problem.sets)
    rows = int(problem.multiplicity.sum())
    polish_blocks = blocks if rows <= POLISH_ROWS else max(1, round(blocks * POLISH_ROWS / rows))
    if rows > FULL_ROWS:
        blocks = max(1, round(blocks * SEARCH_ROWS / rows))
    if sets > FULL_ROWS:
        sets = SEARCH_ROWS
    cost = problem.num_experts * problem.num_ranks * max(ASSIGNMENT * min(rows, SEARCH_ROWS) + sets, 1)
    affordable = max(min(BUDGET[effort], TOTAL[effort] / layers) / cost - START_ROUNDS, 0)
    share = min(1.0, affordable / max(usual.rounds, 1))
    return replace(
        usual,
        soft=max(round(usual.soft * share), min(usual.soft, 6)),
        polished=max(round(usual.polished * share), min(usual.polished, 2)),
        elites_polished=max(round(usual.elites_polished * share), min(usual.elites_polished, 1)),
        kicks=max(round(usual.kicks * share), min(usual.kicks, 1)),
        rounds=int(min(usual.rounds * MOST_ROUNDS, problem.num_experts, affordable)) if usual.rounds else 0,
        blocks=blocks,
        sets=sets,
        finalists=max(round(usual.finalists * share), 1),
        polish_blocks=polish_blocks,
        thin=int(problem.num_experts * min(rows, POLISH_ROWS) > DENSE),
    )
