"""Sections on what a placement does: load of experts and ranks, co-activation, traffic.

Axes: E experts, G ranks, P slots, L layers. Each function takes its part of the report's document and gives a Section.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from smoe_cli.report.drawing.parts import DIVERGING, FEW, STATES, Chart, Figure, Section, Table, heat
from smoe_cli.report.drawing.text import TIMES, label, number, percent, times

SIDES = {"contiguous": "Before: contiguous", "placed": "After: placed"}
BAR = {"thickness": 10, "outlinewidth": 0}
"""The scale beside a heat map."""

BARE_AXIS = {"showticklabels": False, "ticklen": 0, "showgrid": False}


def expert_load(part: dict[str, Any], layers: Sequence[int]) -> Section:
    """Expert by rank, before and after; the ranks' own load beside."""
    counted = {"heldout": "held-out rows", "tables": "the tables' rows, fit and validation"}[part["source"]]
    if not part["rank_load"]:
        lead = f"One cell an expert, hottest first; the colour is its load against the layer's mean expert ({counted})."
        summary = "Load of every expert; without a placement there are no ranks to compare."
        views = {
            str(layer): _load_figure(load, [0] * len(load), range(len(load)))
            for layer, load in zip(layers, part["load"], strict=True)
        }
        return Section(lead, [Chart("load-contiguous", "Experts", summary, views, height=200)], chooser="Layer")
    lead = (
        "One cell an expert, a row a rank, hottest first; the colour is its load against the layer's mean expert "
        f"({counted}). Bars: a rank's load against the mean rank. Experts chosen together decide what lies together, "
        "not their load; this shows what that costs in balance."
    )
    charts = [
        Chart(
            f"load-{side}",
            title,
            _imbalance(part["imbalance"][side]),
            {str(layer): _rank_figure(part, side, at) for at, layer in enumerate(layers)},
        )
        for side, title in SIDES.items()
    ]
    return Section(lead, charts, [_rank_table(part, side, layers) for side in SIDES], chooser="Layer")


def _imbalance(values: Sequence[float]) -> str:
    mean = number(sum(values) / len(values))
    return f"Busiest rank over the mean rank: {mean} on the mean over layers, at most {number(max(values))}."


def _rank_table(part: dict[str, Any], side: str, layers: Sequence[int]) -> Table:
    by_layer, imbalance = part["rank_load"][side], part["imbalance"][side]
    heads = ["layer", *(f"rank {rank}" for rank in range(len(by_layer[0]))), "max / mean"]
    rows = [
        [str(layer), *(number(value) for value in by_layer[at]), number(imbalance[at])]
        for at, layer in enumerate(layers)
    ]
    return Table(f"{SIDES[side]}: activations by rank", heads, rows)


def _rank_figure(part: dict[str, Any], side: str, at: int) -> Figure:
    """One layer's experts by rank, and bars of the ranks on a scale that both sides share."""
    slots, rank_load = part["slots"][side], part["rank_load"][side][at]
    figure = _load_figure(part["load"][at], slots["rank"], slots["expert"][at])
    mean = sum(rank_load) / len(rank_load) or 1.0
    top = max(max(by_layer[at]) for by_layer in part["rank_load"].values()) / mean
    bars = {
        "type": "bar",
        "orientation": "h",
        "xaxis": "x2",
        "y": [f"rank {rank}" for rank in range(len(rank_load))],
        "x": [value / mean for value in rank_load],
        "text": [f"{value / mean:.2f}" for value in rank_load],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": "var(--bar)"},
        "customdata": [f"{value:,}" for value in rank_load],
        "hovertemplate": f"%{{y}}<br>%{{customdata}} activations<br>%{{x:.3f}}{TIMES} the mean rank<extra></extra>",
    }
    beside = {"domain": [0.75, 1], "range": [0, 1.35 * top or 1], "title": "rank"} | BARE_AXIS
    layout = figure["layout"]
    layout |= {"xaxis": layout["xaxis"] | {"domain": [0, 0.72]}, "xaxis2": beside, "bargap": 0.15}
    return {"data": [*figure["data"], bars], "layout": layout}


def _load_figure(load: Sequence[int], rank: Sequence[int], expert: Sequence[int]) -> Figure:
    """load: [E]; rank, expert: [P]. An expert of several copies shows an equal part of its load at each."""
    copies = Counter(expert)
    mean = sum(load) / len(load) or 1.0
    rows = []
    for r in sorted(set(rank)):
        mine = [e for e, at in zip(expert, rank, strict=True) if at == r]
        rows.append(sorted(mine, key=lambda e: -load[e] / copies[e]))
    width = max(map(len, rows))
    experts = heat(
        [[load[e] / copies[e] / mean for e in row] + [None] * (width - len(row)) for row in rows],
        text=[[_expert_text(e, load[e], copies[e], mean) for e in row] + [""] * (width - len(row)) for row in rows],
        y=[f"rank {r}" for r in range(len(rows))] if len(rows) > 1 else ["experts"],
        hovertemplate="%{y}<br>%{text}<extra></extra>",
        zmin=0,
        zmax=max(load) / mean or 1,
        xgap=1,
        ygap=2,
        colorbar=BAR | {"title": {"text": f"{TIMES} mean expert", "side": "right", "font": {"size": 11}}},
    )
    return {
        "data": [experts],
        "layout": {
            "xaxis": {"title": "experts, hottest first"} | BARE_AXIS,
            "yaxis": {"autorange": "reversed", "type": "category", "showgrid": False},
            "showlegend": False,
        },
    }


def _expert_text(expert: int, load: int, copies: int, mean: float) -> str:
    shared = f", {copies} copies" if copies > 1 else ""
    return f"expert {expert}{shared}<br>{load:,} activations<br>{times(load / mean)} the mean expert"


def coactivation(part: dict[str, Any], _: Sequence[int]) -> Section:
    """Which experts are chosen together, sorted by rank."""
    charts = []
    for side, title in SIDES.items():
        if not part["cells"][side]:
            continue
        views = {
            str(layer): _pairs_figure(
                part["cells"][side][at], part["rank"][side], part["experts"][side][at], part["levels"]
            )
            for at, layer in enumerate(part["layers"])
        }
        shown = title if part["inside"] else "Experts in their own order"
        charts.append(Chart(f"coactivation-{side}", shown, _inside(part, side), views, square=True))
    tables = []
    if part["inside"]:
        cells = [
            [str(layer), *(percent(part["inside"][key][at]) for key in ("chance", "contiguous", "placed"))]
            for at, layer in enumerate(part["layers"])
        ]
        heads = ["layer", "by chance", "contiguous", "placed"]
        tables.append(
            Table("Pairs chosen together whose two experts share a rank", heads, cells, folded=len(cells) > FEW)
        )
    lead = (
        "Experts in order of their rank, lines where a rank ends. A warm cell: two experts chosen for the same token "
        "more often than by chance. A placement works where warm cells gather in the blocks on the diagonal."
    )
    return Section(lead, charts, tables, chooser="Layer", notes=[part["note"]] if part["note"] else [])


def _inside(part: dict[str, Any], side: str) -> str:
    if not part["inside"]:
        return "Without a placement there are no blocks to look for."
    mean = {key: sum(values) / len(values) for key, values in part["inside"].items()}
    return f"{percent(mean[side])} of pairs share a rank, {percent(mean['chance'])} by chance (mean over layers)."


def _pairs_figure(
    cells: Sequence[Sequence[int]], rank: Sequence[int], experts: Sequence[str], levels: dict[str, Any]
) -> Figure:
    """cells: [M, M], -1 is no value; rank, experts: [M]. The page writes the hover text of a pair from `pairs`."""
    ends = [at + 0.5 for at in range(len(rank) - 1) if rank[at] != rank[at + 1]]
    middles = {r: [at for at, other in enumerate(rank) if other == r] for r in sorted(set(rank))}
    line_style = {"color": "var(--ink)", "width": 1.25}
    axis = {
        "tickmode": "array",
        "tickvals": [sum(of) / len(of) for of in middles.values()],
        "ticktext": [str(r) for r in middles] if len(middles) > 1 else [""],
        "showgrid": False,
        "zeroline": False,
        "range": [-0.5, len(rank) - 0.5],
        "ticks": "",
    }
    title = "rank" if len(middles) > 1 else "experts"
    low, chance, high = levels["low"], levels["chance"], levels["high"]
    factor = levels["factor"]
    matrix = heat(
        [[None if value < 0 else value for value in row] for row in cells],
        colorscale=DIVERGING,
        zmin=low,
        zmax=high,
        hovertemplate="%{text}<extra></extra>",
        colorbar=BAR
        | {"tickvals": [low, chance, high], "ticktext": [f"≤ 1/{factor}", "chance", f"≥ {times(factor, 0)}"]},
    )
    return {
        "data": [matrix],
        "pairs": {
            "rank": list(rank),
            "experts": [label(names) for names in experts],
            "chance": chance,
            "factor": factor,
        },
        "layout": {
            "xaxis": {"title": title} | axis,
            "yaxis": {"title": title} | axis | {"range": [len(rank) - 0.5, -0.5]},
            "shapes": [
                {
                    "type": "line",
                    axis_of: "paper",
                    f"{across}0": 0,
                    f"{across}1": 1,
                    f"{along}0": end,
                    f"{along}1": end,
                    "line": line_style,
                }
                for end in ends
                for axis_of, across, along in (("xref", "x", "y"), ("yref", "y", "x"))
            ],
        },
    }


def traffic(part: dict[str, Any], _: Sequence[int]) -> Section:
    """Rows from rank to rank."""
    totals = {state: part["total"][state] for state in STATES if state in part["total"]}
    ranks = len(next(iter(totals.values())))
    views = {"all": part["total"]} | {
        str(layer): {state: by_layer[at] for state, by_layer in part["by_layer"].items()}
        for at, layer in enumerate(part["layers"])
    }
    tops = {view: max(max(map(max, pairs)) for pairs in by_state.values()) or 1 for view, by_state in views.items()}
    charts = [
        Chart(
            f"traffic-{at}",
            _state_title(state, part["predictor"]),
            _busiest(pairs),
            {view: _traffic_figure(by_state[state], tops[view]) for view, by_state in views.items()},
            square=True,
        )
        for at, (state, pairs) in enumerate(totals.items())
    ]
    summary = [[_state_title(state, part["predictor"]), *_directions(pairs)] for state, pairs in totals.items()]
    heads = ["state", "rows in all", "busiest pair", "most sent by a rank", "most received by a rank", "busiest / mean"]
    tables = [
        Table(f"Rows sent between ranks ({part['unit']})", heads, summary, folded=False),
        *_travel(part["travel"]),
    ]
    tables += [
        Table(
            f"{_state_title(state, part['predictor'])}: rows from rank (down) to rank (across)",
            ["from", *(f"rank {rank}" for rank in range(ranks))],
            [[f"rank {rank}", *(number(value) for value in row)] for rank, row in enumerate(pairs)],
        )
        for state, pairs in totals.items()
    ]
    lead = (
        "Rows that a de-duplicating dispatch sends from a token's home rank to each rank with one of its experts, "
        f"over {part['rows']:,} held-out rows. One scale for all states of a view: darker is less."
    )
    return Section(lead, charts, tables, chooser="Layer", notes=[part["note"]] if part["note"] else [])


def _travel(rows: Sequence[dict[str, Any]] | None) -> list[Table]:
    """What rows travel where ranks are not equally far apart."""
    if rows is None:
        return []
    nodes = rows[0]["crossing"] is not None
    cells = [
        [
            _state_title(row["state"], row["predictor"]),
            number(row["travel"]),
            *([number(row["crossing"])] if nodes else []),
        ]
        for row in rows
    ]
    heads = [
        "state",
        "cost (1: between the two nearest ranks)",
        *(["rows to other nodes"] if nodes else []),
    ]
    return [Table("What rows travel, a token and layer", heads, cells, folded=False)]


def _state_title(state: str, predictor: str) -> str:
    return f"{state} ({predictor})" if "shuffled" in state else state


def _directions(pairs: Sequence[Sequence[int]]) -> list[str]:
    """Rows in all, of the busiest pair, and of the busiest rank in each direction. pairs: [G, G]."""
    sent = [sum(row) for row in pairs]
    received = [sum(column) for column in zip(*pairs, strict=True)]
    mean = sum(sent) / len(sent)
    busiest = max(*sent, *received)
    return [
        number(sum(sent)),
        number(max(map(max, pairs))),
        number(max(sent)),
        number(max(received)),
        number(busiest / mean if mean else None),
    ]


def _busiest(pairs: Sequence[Sequence[int]]) -> str:
    total, pair, *_ = _directions(pairs)
    return f"{total} rows in all, at most {pair} between two ranks."


def _traffic_figure(pairs: Sequence[Sequence[int]], top: int) -> Figure:
    names = [str(rank) for rank in range(len(pairs))]
    few = len(names) <= 8
    matrix = heat(
        [[None if at == to else value for to, value in enumerate(row)] for at, row in enumerate(pairs)],
        x=names,
        y=names,
        zmin=0,
        zmax=top,
        hovertemplate="rank %{y} to rank %{x}<br>%{z:,} rows<extra></extra>",
        colorbar=BAR | {"tickformat": "~s"},
    ) | ({"texttemplate": "%{z:.2~s}", "textfont": {"size": 11}} if few else {})
    return {
        "data": [matrix],
        "layout": {
            "xaxis": {"title": "to rank", "type": "category", "showgrid": False},
            "yaxis": {"title": "from rank", "type": "category", "autorange": "reversed", "showgrid": False},
        },
    }
