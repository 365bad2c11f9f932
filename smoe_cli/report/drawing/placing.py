"""Sections on what a placement does: load of experts and ranks, co-activation, traffic.

Axes: E experts, G ranks, P slots, L layers. Each function takes its part of the report's document and gives a Section.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from smoe_cli.report.drawing.parts import DIVERGING, FEW, STATES, Chart, Figure, Section, Table, heat
from smoe_cli.report.drawing.text import TIMES, label, number, percent, times

SIDES = {"contiguous": "Before: contiguous", "placed": "After: placed"}


def expert_load(part: dict[str, Any], layers: Sequence[int]) -> Section:
    """Expert by rank, before and after; the ranks' own load beside."""
    known = {side: title for side, title in SIDES.items() if part["slots"][side]}
    charts = [
        Chart(
            f"load-{side}",
            title,
            _imbalance(part, side),
            {
                str(layer): _load_figure(
                    part["load"][at],
                    part["slots"][side]["rank"],
                    part["slots"][side]["expert"][at],
                    part["rank_load"] and part["rank_load"][side][at],
                    max((max(by_layer[at]) for by_layer in (part["rank_load"] or {}).values()), default=0),
                )
                for at, layer in enumerate(layers)
            },
        )
        for side, title in known.items()
    ]
    tables = []
    if part["rank_load"]:
        ranks = range(len(part["rank_load"]["contiguous"][0]))
        for side, title in SIDES.items():
            cells = [
                [
                    str(layer),
                    *(number(value) for value in part["rank_load"][side][at]),
                    number(part["imbalance"][side][at]),
                ]
                for at, layer in enumerate(layers)
            ]
            heads = ["layer", *(f"rank {rank}" for rank in ranks), "max / mean"]
            tables.append(Table(f"{title}: activations by rank", heads, cells))
    counted = {"heldout": "held-out activations", "tables": "the tables' activations (fit and validation)"}[
        part["source"]
    ]
    lead = (
        f"One cell an expert, a row a rank, hottest first; the colour is its load against the layer's mean expert "
        f"({counted}). Bars: a rank's load against the mean rank. Co-activation, not load, decides what lies together; "
        "this shows what that costs in balance."
    )
    return Section(lead, charts, tables, chooser="Layer")


def _imbalance(part: dict[str, Any], side: str) -> str:
    if not part["imbalance"]:
        return "Load of every expert; without a placement there are no ranks to compare."
    values = part["imbalance"][side]
    mean = number(sum(values) / len(values))
    return f"Busiest rank over the mean rank: {mean} on the mean over layers, at most {number(max(values))}."


def _load_figure(
    load: Sequence[int], rank: Sequence[int], expert: Sequence[int], rank_load: Sequence[int] | None, top: float
) -> Figure:
    """load: [E]; rank, expert: [P]; rank_load: [G]; top: the largest shown beside it.

    An expert of several copies shows an equal part of its load at each.
    """
    copies = Counter(expert)
    mean = sum(load) / len(load) or 1.0
    ranks = sorted(set(rank))
    cells: list[list[tuple[float, str]]] = []
    for r in ranks:
        mine = sorted((e for e, at in zip(expert, rank, strict=True) if at == r), key=lambda e: -load[e] / copies[e])
        cells.append([(load[e] / copies[e] / mean, _expert_text(e, load[e], copies[e], mean)) for e in mine])
    width = max(map(len, cells))
    names = [f"rank {r}" for r in ranks] if rank_load else ["experts"]
    experts = heat(
        [[value for value, _ in row] + [None] * (width - len(row)) for row in cells],
        text=[[text for _, text in row] + [""] * (width - len(row)) for row in cells],
        y=names,
        hovertemplate="%{y}<br>%{text}<extra></extra>",
        zmin=0,
        zmax=max(load) / mean,
        xgap=1,
        ygap=2,
        colorbar={
            "title": {"text": f"{TIMES} mean expert", "side": "right", "font": {"size": 11}},
            "thickness": 10,
            "outlinewidth": 0,
        },
    )
    layout: Figure = {
        "xaxis": {
            "showticklabels": False,
            "ticklen": 0,
            "title": "experts of the rank, hottest first",
            "showgrid": False,
        },
        "yaxis": {"autorange": "reversed", "type": "category", "showgrid": False},
        "showlegend": False,
    }
    if not rank_load:
        return {"data": [experts], "layout": layout}
    mean_rank = sum(rank_load) / len(rank_load) or 1.0
    bars = {
        "type": "bar",
        "orientation": "h",
        "xaxis": "x2",
        "y": names,
        "x": [value / mean_rank for value in rank_load],
        "text": [f"{value / mean_rank:.2f}" for value in rank_load],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": "var(--bar)"},
        "customdata": [f"{value:,}" for value in rank_load],
        "hovertemplate": f"%{{y}}<br>%{{customdata}} activations<br>%{{x:.3f}}{TIMES} the mean rank<extra></extra>",
    }
    layout["xaxis"]["domain"] = [0, 0.72]
    layout["xaxis2"] = {
        "domain": [0.75, 1],
        "range": [0, 1.35 * top / mean_rank],
        "title": "rank",
        "showticklabels": False,
    }
    layout["xaxis2"] |= {"showgrid": False, "ticklen": 0}
    layout["bargap"] = 0.15
    return {"data": [experts, bars], "layout": layout}


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
        charts.append(Chart(f"coactivation-{side}", title, _inside(part, side), views, square=True))
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
        return "Without a placement, experts stand in their own order."
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
        "ticktext": [str(r) for r in middles],
        "showgrid": False,
        "zeroline": False,
        "range": [-0.5, len(rank) - 0.5],
        "ticks": "",
    }
    low, chance, high = levels["low"], levels["chance"], levels["high"]
    factor = levels["factor"]
    matrix = heat(
        [[None if value < 0 else value for value in row] for row in cells],
        colorscale=DIVERGING,
        zmin=low,
        zmax=high,
        hovertemplate="%{text}<extra></extra>",
        colorbar={
            "tickvals": [low, chance, high],
            "ticktext": [f"≤ 1/{factor}", "chance", f"≥ {times(factor, 0)}"],
            "thickness": 10,
            "outlinewidth": 0,
        },
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
            "xaxis": {"title": "rank"} | axis,
            "yaxis": {"title": "rank"} | axis | {"range": [len(rank) - 0.5, -0.5]},
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
    tables = [Table(f"Rows sent between ranks ({part['unit']})", heads, summary, folded=False)] + [
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
        colorbar={"thickness": 10, "outlinewidth": 0, "tickformat": "~s"},
    ) | ({"texttemplate": "%{z:.2~s}", "textfont": {"size": 11}} if few else {})
    return {
        "data": [matrix],
        "layout": {
            "xaxis": {"title": "to rank", "type": "category", "showgrid": False},
            "yaxis": {"title": "from rank", "type": "category", "autorange": "reversed", "showgrid": False},
        },
    }
