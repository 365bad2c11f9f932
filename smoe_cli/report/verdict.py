"""Is it worth it? One answer, the figures it rests on, and what to do next.

Every way to use a placement is held against the better of contiguous experts and the engine's own load balancer, run
without a shuffle, by predicted layer time where the model's shape is known and by remote fan-out otherwise. THRESHOLDS
says how much better it must be; ANSWERS, in which order the answers are tried.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from smoe_cli.placing.validation import block_facts
from smoe_cli.report.gathering import Found
from smoe_cli.report.states import (
    BALANCER,
    ROUTER,
    ROWS,
    RULE,
    SHUFFLE,
    TIME,
    TODAY,
    state_row,
    state_value,
)
from smoe_cli.report.wording import (
    BUSY_RANK,
    FEW_REQUESTS,
    PLACED,
    UNITS,
    cautions,
    conditions_text,
    headline,
    sentence,
)
from smoe_profiles.table_rows import MIN_BLOCKS

Tree = dict[str, Any]

SHUFFLED, ROUTED = "placed+shuffled", "requests"


@dataclass(frozen=True)
class Use:
    """One way to use a placement, in words and in what was measured: a table's state, and the way it is run.

    plain: how the baselines that it is held against are run.
    """

    use: str
    label: str
    needs: str
    table: str
    state: str
    way: str
    plain: str


USES = (
    Use(PLACED, "today's engines, tokens spread over ranks", TODAY, "tokens", "placed", "sp-ep", "sp-ep"),
    Use(PLACED, "today's engines, attention-DP", TODAY, "requests", "placed", "dp-ep", "dp-ep"),
    Use(SHUFFLED, "tokens shuffled to their experts", SHUFFLE, "tokens", "placed+shuffled", "speculative", "sp-ep"),
    Use(
        ROUTED, "attention-DP, requests sent to their experts", ROUTER, "requests", "placed+shuffled", "dp-ep", "dp-ep"
    ),
)


@dataclass(frozen=True)
class Threshold:
    """How many times better than the better baseline a use must be to count, and why so much."""

    basis: str
    use: str
    at_least: float
    rule: str


THRESHOLDS = (
    Threshold(TIME, PLACED, 1.03, "An exported map costs nothing to try: 3 % of the layer's predicted time is enough."),
    Threshold(TIME, SHUFFLED, 1.05, "A run time that shuffles has to be adopted: 5 % of the layer's predicted time."),
    Threshold(TIME, ROUTED, 1.05, "A request router has to be put in front: 5 % of the layer's predicted time."),
    Threshold(ROWS, PLACED, 1.10, "Without a time, 10 % fewer rows sent: what they cost is not known."),
    Threshold(ROWS, SHUFFLED, 1.15, "Without a time, 15 % fewer rows sent, for a run time that has to be adopted."),
    Threshold(ROWS, ROUTED, 1.15, "Without a time, 15 % fewer rows sent, for a router that has to be put in front."),
)

LEAST = 1e-9
"""Stands for no rows at all, so that a ratio of them is a number."""

MORE_LOAD = 1.05
"""Without a time, how much more than under its baselines the busiest rank may compute for fewer rows to count: on
DeepSeek-V2-Lite, 28 % fewer rows for 12 % more on the busiest rank lose to a load balancer by predicted time.
"""

SAME_TIME = 0.005
"""Where no state's predicted time differs more from another's, whatever rows it sends, the time is fixed cost."""

ANSWERS = {
    "nothing": "Placing confirmed no gain on validation blocks, enough to show one, and returned contiguous experts.",
    "unmeasured": "There is no evaluation of this placement.",
    "worth-it": "A use in today's engines reaches its threshold.",
    "needs-more": "Only a shuffling run time or a request router reaches its threshold.",
    "undecided": "Validation rows were too few to confirm any gain; or a threshold is reached, but in doubt: under "
    "attention-DP with fewer requests than ranks, or, no "
    f"layer time being known, with a busiest rank that computes more than {MORE_LOAD:g} times as much as with the "
    "baselines.",
    "little": "No use reaches its threshold.",
}
"""In the order they are tried: the first whose rule holds."""


def verdict(found: Found, states: Tree | None) -> Tree:
    """The first screen's document. states: what `states_section` gives, None without an evaluation."""
    basis = _basis(states) if states else None
    conditions = _conditions(found)
    few = conditions is not None and conditions["requests"]["count"] < conditions["ranks"]
    figures = _figures(states, basis, few) if states and basis else []
    scarce = too_few_rows(found)
    answer = _answer(found, scarce, figures)
    fixed = basis == TIME and states is not None and _fixed_cost(states)
    return {
        "answer": answer,
        "headline": headline(answer, figures, fixed, conditions, scarce),
        "reasons": [sentence(figure) for figure in figures],
        "cautions": cautions(states, basis, conditions, fixed) if states and basis and conditions else [],
        "basis": basis,
        "fixed_cost": fixed,
        "figures": figures,
        "thresholds": [
            {"answer": "worth-it" if one.use == PLACED else "needs-more"} | asdict(one) for one in THRESHOLDS
        ],
        "answers": [{"answer": name, "rule": rule} for name, rule in ANSWERS.items()],
        "conditions": conditions,
        "conditions_text": conditions_text(conditions) if conditions else "",
    }


def _basis(states: Tree) -> str | None:
    """What every use can be judged by; None where none was measured."""
    rows = [state_row(states, use.table, use.state) for use in USES]
    if all(row is None for row in rows):
        return None
    times = [(row or {}).get("total", {}).get("microseconds") or {} for row in rows]
    return TIME if all(use.way in found for use, found in zip(USES, times, strict=True)) else ROWS


def _fixed_cost(states: Tree) -> bool:
    """Whether all states, run alike, take the same predicted time."""
    for table in ("tokens", "requests"):
        by_way: dict[str, list[float]] = {}
        for row in states[table]:
            for way, time in (row["total"][TIME] or {}).items():
                by_way.setdefault(way, []).append(time)
        if any(max(times) > (1 + SAME_TIME) * min(times) for times in by_way.values()):
            return False
    return True


def _figures(states: Tree, basis: str, few: bool) -> list[Tree]:
    """Every use against its baselines, as the schema of the report says. few: requests, too few to count."""
    needed = {one.use: one.at_least for one in THRESHOLDS if one.basis == basis}
    figures = [_figure(states, use, basis, needed[use.use], few and use.table == "requests") for use in USES]
    return [figure for figure in figures if figure]


def _figure(states: Tree, use: Use, basis: str, at_least: float, few: bool) -> Tree | None:
    """One use; None where it was not measured."""
    row = state_row(states, use.table, use.state)
    baselines = {name: state_row(states, use.table, name) for name in ("contiguous", BALANCER)}
    plain = {name: state_value(baseline, basis, use.plain) for name, baseline in baselines.items()}
    known = {name: value for name, value in plain.items() if value is not None}
    value = state_value(row, basis, use.way)
    if row is None or value is None or not known:
        return None
    better = min(known, key=lambda name: known[name])
    speedup = max(known[better], LEAST) / max(value, LEAST)
    load = row["total"]["load_imbalance"]
    loads = {name: one["total"]["load_imbalance"] for name, one in baselines.items() if one}
    evenest = min(loads, key=lambda name: loads[name])
    doubt = None
    if speedup >= at_least and few:
        doubt = FEW_REQUESTS
    elif speedup >= at_least and basis == ROWS and load > MORE_LOAD * loads[evenest]:
        doubt = BUSY_RANK
    return {
        **{name: getattr(use, name) for name in ("use", "label", "needs", "way", "state")},
        "value": value,
        **plain,
        "baseline": better,
        "speedup": speedup,
        "threshold": at_least,
        "load_imbalance": load,
        "load_baseline": loads[evenest],
        "evenest": evenest,
        "reached": speedup >= at_least and doubt is None,
        "undecided": doubt is not None,
        "doubt": doubt,
        "unit": UNITS[basis],
    }


def too_few_rows(found: Found) -> bool:
    """Whether a placement's gain was not confirmed for want of validation blocks."""
    if not _unconfirmed(found) or found.placed is None:
        return False
    blocks = block_facts(found.tables)["validation_blocks"] if found.tables else math.inf
    errors = [line.get("validation_two_standard_errors", 0.0) for line in found.placed.log or []]
    return None in errors or blocks < MIN_BLOCKS["validation"]


def _unconfirmed(found: Found) -> bool:
    return found.placed is not None and found.placed.artefact.parameters.get("confirmed") is False


def _answer(found: Found, scarce: bool, figures: Sequence[Tree]) -> str:
    reached = {figure["use"] for figure in figures if figure["reached"]}
    if _unconfirmed(found):
        return "undecided" if scarce else "nothing"
    if not figures:
        return "unmeasured"
    if PLACED in reached:
        return "worth-it"
    if reached:
        return "needs-more"
    return "undecided" if any(figure["undecided"] for figure in figures) else "little"


def _conditions(found: Found) -> Tree | None:
    if found.measured is None:
        return None
    context = found.measured.context
    return {
        **{name: context.get(name) for name in ("part", "rows", "batch", "quota", "unseen_tokens", "hardware")},
        "ranks": context["ranks"],
        "other_trace": found.trace is not None and context.get("trace") != found.trace.artefact.id,
        "assignment": RULE,
        "predictor": context["predictors"][0],
        "requests": {name: context["requests"].get(name) for name in ("count", "rows", "from")},
    }
