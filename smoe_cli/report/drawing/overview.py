"""The first screen: is it worth it for me? The ways to use a placement as cards, and the states as one table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smoe_cli.report.drawing.text import change, number, times

USES = {
    "placed": "Today's engines",
    "placed+shuffled": "With a shuffling run time",
    "requests": "With a request router",
}
ANSWERS = {
    "worth-it": "Worth it",
    "needs-more": "Needs more than today's engines",
    "little": "Little to gain",
    "nothing": "Nothing to gain",
    "undecided": "Undecided",
    "unmeasured": "Not measured yet",
}
UNITS = {
    "us": ("faster", "slower", "As fast", "µs a layer, predicted"),
    "rows": ("fewer rows", "more rows", "As many rows", "rows a token and layer"),
}
"""Of a unit: how better, worse and neither is said, and what the values are."""

DOUBTS = {"load": "too much on one rank", "requests": "too few requests"}
"""Why a use that reaches its threshold does not count."""

GROUPS = {
    "baseline": "Without a placement",
    "placed": "Placed: what today's engines give",
    "more": "More: needs {needs}",
    "ceiling": "Ceiling: the true routing known beforehand",
}
COLUMNS = {"lar": "lar", "remote_fanout": "remote fan-out", "load_imbalance": "load imbalance"}

MEANINGS = {
    "lar": "local activation rate: the share of a token's experts that lie on its rank. Higher is better.",
    "remote fan-out": "how many other ranks a token's row is sent to: what the wire carries. Lower is better.",
    "load imbalance": "activations of the busiest rank over the mean rank. 1 is even; the busiest rank sets the pace.",
    "contiguous": "experts in the checkpoint's order, as every engine starts.",
    "load balancer": "experts placed by load alone with the same slots, as an engine's own balancer (EPLB) does.",
    "placed": "experts where this placement puts them; tokens stay where they are.",
    "shuffled": "tokens moved to the rank where a predictor expects their experts.",
    "oracle": "a shuffle that knows the true routing: no predictor passes it.",
    "predicted layer time": "of one MoE layer and batch, by the hardware model from bytes and the busiest rank's work.",
}


@dataclass(frozen=True)
class Bar:
    """One of the values that a card compares. width: percent of the widest."""

    label: str
    value: float
    width: float
    kind: str


@dataclass(frozen=True)
class Card:
    """One way to use the placement. gain: `1.14× faster`; outcome: whether that counts, in words."""

    title: str
    needs: str
    label: str
    gain: str
    unit: str
    rule: str
    outcome: str
    reached: bool
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Cell:
    """A figure: what it is, what is shown, and how far it is from contiguous."""

    value: float | None
    shown: str
    change: str = ""


@dataclass(frozen=True)
class StateTable:
    """heads: figures; ways: of running, whose time is known; groups: (title, rows of (label, state, cells))."""

    caption: str
    heads: Sequence[str]
    ways: Sequence[str]
    groups: Sequence[tuple[str, Sequence[tuple[str, str, Sequence[Cell]]]]]


def cards(verdict: dict[str, Any]) -> list[Card]:
    """The figures that the answer rests on, one card a way to use the placement."""
    return [_card(figure) for figure in verdict["figures"]]


def _card(figure: dict[str, Any]) -> Card:
    *_, unit = UNITS[figure["unit"]]
    needed = figure["threshold"]
    against = "contiguous" if figure["baseline"] == "contiguous" else "the load balancer"
    values = [
        ("contiguous", figure["contiguous"], "contiguous"),
        ("load balancer", figure["load_balancer"], "load-balancer"),
    ]
    values.append((figure["state"].replace("+", " + "), figure["value"], figure["state"].replace("+", "-")))
    known = [(label, value, kind) for label, value, kind in values if value is not None]
    widest = max(value for _, value, _ in known) or 1.0
    return Card(
        title=USES[figure["use"]],
        needs=figure["needs"],
        label=figure["label"].removeprefix("today's engines, "),
        gain=_gain(figure["speedup"], figure["unit"]),
        unit=unit,
        rule=f"Against {against}, the better of the two; counts from {times(needed)}.",
        outcome=_outcome(figure),
        reached=figure["reached"],
        bars=[Bar(label, value, round(100 * value / widest, 1), kind) for label, value, kind in known],
    )


def _gain(speedup: float, unit: str) -> str:
    better, worse, neither, _ = UNITS[unit]
    if round(max(speedup, 1 / speedup), 2) == 1:
        return neither
    return f"{times(speedup)} {better}" if speedup > 1 else f"{times(1 / speedup)} {worse}"


def _outcome(figure: dict[str, Any]) -> str:
    if figure["reached"]:
        return "✓ counts"
    if figure["undecided"]:
        return DOUBTS[figure["doubt"]]
    return "too little to count" if figure["speedup"] >= 1 else "no gain"


def state_tables(part: dict[str, Any] | None) -> list[StateTable]:
    """The states by what they need: tokens spread over ranks, and requests routed."""
    if part is None:
        return []
    captions = {
        "tokens": "Tokens spread over the ranks (tensor-parallel attention)",
        "requests": "Requests kept whole on a rank (attention-DP)",
    }
    return [_state_table(caption, part[key]) for key, caption in captions.items() if part[key]]


def _state_table(caption: str, rows: Sequence[dict[str, Any]]) -> StateTable:
    ways = list(dict.fromkeys(way for row in rows for way in row["total"]["microseconds"] or {}))
    base = next((row["total"] for row in rows if row["state"] == "contiguous"), rows[0]["total"])
    groups = []
    for group, title in GROUPS.items():
        mine = [row for row in rows if row["group"] == group]
        if mine:
            lines = [(row["label"], row["state"].replace("+", "-"), _cells(row["total"], base, ways)) for row in mine]
            groups.append((title.format(needs=mine[0]["needs"]), lines))
    return StateTable(caption, list(COLUMNS.values()), ways, groups)


def _cells(total: dict[str, Any], base: dict[str, Any], ways: Sequence[str]) -> list[Cell]:
    pairs = [(total[name], base[name]) for name in COLUMNS]
    times, base_times = total["microseconds"] or {}, base["microseconds"] or {}
    pairs += [(times.get(way), base_times.get(way)) for way in ways]
    return [Cell(v, number(v), change(v, b) if v is not None and b and total is not base else "") for v, b in pairs]
