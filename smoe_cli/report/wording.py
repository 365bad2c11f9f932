"""The verdict in words: headline, one sentence a figure, what the figures do not say, and how it was measured."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from smoe_cli.report.states import BALANCER, ROWS, TIME, state_row, state_value

Tree = dict[str, Any]

PLACED = "placed"
"""The use that needs nothing more than today's engines."""

UNITS = {TIME: "us", ROWS: "rows"}


class Said(NamedTuple):
    """How figures of a unit are told."""

    unit: str
    digits: int
    better: str
    saved: str


SAID = {
    "us": Said("us a layer", 1, "as fast as", "less predicted layer time"),
    "rows": Said("rows a token to other ranks", 3, "fewer than", "fewer rows to other ranks, layer time unknown"),
}
BUSY_RANK, FEW_REQUESTS = "load", "requests"
"""Why a figure that reaches its threshold does not count."""

DOUBTS = {
    BUSY_RANK: "reached in rows, but the busiest rank computes {load_imbalance:.2f} times the mean instead of "
    "{load_baseline:.2f} {than}",
    FEW_REQUESTS: "reached, but with fewer requests than ranks, too few to count",
}

WAYS = {"sp-ep": "tokens spread over ranks (sp-ep)", "dp-ep": "attention-DP (dp-ep)"}
"""How today's engines run a layer, in words."""

LOADS = {"placed": "placed", "contiguous": "contiguous", BALANCER: "under the load balancer"}
"""States whose load is set side by side, in words."""

THAN = {"contiguous": "with contiguous experts", BALANCER: "under the load balancer"}
"""Baselines, in words."""

FEW_BATCHES, FEW_ROUNDS = 4, 8
"""Fewer batches, or rounds of one request a rank, than these are said to be few."""


def headline(
    answer: str,
    figures: Sequence[Tree],
    fixed: bool,
    conditions: Tree | None = None,
    scarce: bool = False,
) -> str:
    """The answer in one sentence. fixed: whether every predicted time is fixed cost; scarce: whether validation rows
    were too few."""
    reached = [figure for figure in figures if figure["reached"]]
    match answer:
        case "unmeasured":
            return "Not measured yet."
        case "worth-it":
            today = [one for one in reached if one["use"] == PLACED]
            best = max(today, key=lambda one: one["speedup"])
            return f"Worth it in today's engines with {WAYS[best['way']]}{_rests(today, conditions)}: {_less(best)}."
        case "needs-more":
            best = max(reached, key=lambda one: one["speedup"])
            needs = " or ".join(dict.fromkeys(one["needs"] for one in reached))
            return f"Worth it only with {needs}{_rests(reached, conditions)}: {_less(best)}."
        case "undecided" if scarce:
            return "Undecided: too few validation rows to confirm any gain, so that experts were left where they are."
        case "undecided":
            return _undecided([figure for figure in figures if figure["undecided"]])
        case "nothing":
            return "Nothing to gain from placing experts: they are best left where they are."
    if fixed:
        return "Little to gain: nearly all predicted layer time is fixed cost, which no placement changes."
    return "Little to gain: no way to use this placement reaches its threshold."


def _undecided(figures: Sequence[Tree]) -> str:
    """What stands in the way of an answer."""
    busy = [figure["evenest"] for figure in figures if figure["doubt"] == BUSY_RANK]
    if not busy:
        return "Undecided: only attention-DP reaches its threshold, with fewer requests than ranks: too few to count."
    return (
        f"Undecided: fewer rows travel, but the busiest rank computes more than {THAN[busy[0]]}, and no layer time is "
        "known."
    )


def _rests(counting: Sequence[Tree], conditions: Tree | None) -> str:
    """A word of warning where nothing but attention-DP counts, and it rests on few requests."""
    alone = all(figure["way"] == "dp-ep" for figure in counting)
    few = conditions is not None and conditions["requests"]["count"] < _enough_requests(conditions)
    return ", on few requests" if alone and few else ""


def _enough_requests(conditions: Tree) -> int:
    """How many requests would even out."""
    return int(FEW_ROUNDS * conditions["ranks"])


def _less(figure: Tree) -> str:
    return f"{1 - 1 / figure['speedup']:.1%} {SAID[figure['unit']].saved}"


def sentence(figure: Tree) -> str:
    """One figure in words, the load balancer beside it where it was measured."""
    words = SAID[figure["unit"]]
    plain = [f"{figure['contiguous']:.{words.digits}f} with contiguous experts"]
    if figure[BALANCER] is not None:
        plain.append(f"{figure[BALANCER]:.{words.digits}f} with the engine's load balancer")
    reached = "reached" if figure["reached"] else "not reached"
    doubt = DOUBTS[figure["doubt"]].format(**figure, than=THAN[figure["evenest"]]) if figure["undecided"] else ""
    return (
        f"{figure['label'][0].upper()}{figure['label'][1:]} ({figure['way']}): "
        f"{figure['value']:.{words.digits}f} {words.unit}, {' and '.join(plain)}; {figure['speedup']:.3f} times "
        f"{words.better} the better of these, {figure['threshold']:.2f} needed: "
        f"{doubt or reached}."
    )


def cautions(states: Tree, basis: str, conditions: Tree, fixed: bool) -> list[str]:
    """What the figures do not say by themselves."""
    said = _scarce(conditions)
    if fixed:
        said.append(
            "Nearly all predicted time is fixed cost: whatever rows a state sends, it takes as long as any other run "
            "the same way; a model or batch so small says nothing of larger ones."
        )
    rows = {state: state_row(states, "tokens", state) for state in (*LOADS, "shuffled", "placed+shuffled")}
    alone, both = (state_value(rows[state], basis, "speculative") for state in ("shuffled", "placed+shuffled"))
    if alone is not None and both is not None:
        unit = SAID[UNITS[basis]].unit
        said.append(f"A shuffle without placing gives {alone:.2f} {unit}, with placing {both:.2f}.")
    loads = {name: row["total"]["load_imbalance"] for name, row in rows.items() if row and name in LOADS}
    if len(loads) > 1:
        told = ", ".join(f"{LOADS[name]} {load:.2f}" for name, load in loads.items())
        said.append(f"The busiest rank computes, times the mean rank: {told}.")
    before, after = rows["contiguous"], rows["placed"]
    if basis == ROWS and before and after:
        moved = [row["total"]["wire_rows"]["sp-ep"] for row in (before, after)]
        said.append(
            f"sp-ep moves every row before and after as well: {moved[1]:.1f} rows a token in all, instead of "
            f"{moved[0]:.1f}."
        )
        said.append(
            "No layer time is predicted: that needs the model's config.json (a folder or a short name, given with "
            "--model when a trace is recorded or imported), and an evaluation made since (smoe evaluate)."
        )
    return said


def _scarce(conditions: Tree) -> list[str]:
    """Where too little was measured to rely on."""
    said = []
    rows, requests, enough = conditions["rows"], conditions["requests"]["count"], _enough_requests(conditions)
    if rows < FEW_BATCHES * conditions["batch"]:
        said.append(
            f"Only {rows:,} held-out tokens were measured, fewer than {FEW_BATCHES} batches: record more before "
            "relying on small differences."
        )
    if requests < enough:
        said.append(
            f"Attention-DP rests on {requests:,} requests over {conditions['ranks']} ranks, where {enough:,} would "
            "even out: measure with more sequences, or with --requests."
        )
    return said


def conditions_text(conditions: Tree) -> str:
    """How it was measured, for the foot of the first screen."""
    machine = conditions["hardware"]
    timed = f"times predicted for {machine}" if machine else "no hardware model"
    whose = " of another trace than this folder's" if conditions["other_trace"] else ""
    unseen = conditions["unseen_tokens"]
    known = "no row has an id that the tables saw"
    if unseen < 1:
        known = f"{unseen:.1%} of rows are ids that the tables never saw"
    return (
        f"{conditions['rows']:,} held-out tokens{whose} in batches of {conditions['batch']:,}, "
        f"quota {conditions['quota']}, assignment by the served {conditions['assignment']}, "
        f"predictor {conditions['predictor']}, {timed}; "
        f"{known}; attention-DP: "
        f"{conditions['requests']['count']:,} requests ({conditions['requests']['from']}), mean over layers."
    )
