"""Sections on what was measured on held-out rows: states by layer, prediction, reliability, transfer, the trace itself.

Axes: L layers, S sources. Each function takes its part of the report's document and gives a Section.
"""

from collections.abc import Sequence
from typing import Any

from smoe_cli.report.drawing.parts import (
    LAYER_AXIS,
    SERIES,
    STATES,
    Chart,
    Figure,
    Section,
    Table,
    heat,
    level,
    line,
    of_layers,
)
from smoe_cli.report.drawing.text import label, number, percent

MEASURES = {
    "lar": "local activation rate (lar)",
    "remote_fanout": "remote fan-out",
    "load_imbalance": "load imbalance",
    "fanout": "fan-out",
}
"""Figures of a state that are drawn by layer, and how they are called."""

TIME = "predicted layer time, µs"
KNOWN = {
    "lar": "lar",
    "oracle_share": "share of the oracle's lar",
    "rank_accuracy": "best rank right",
    "expert_f1": "expert F1",
}


def states(part: dict[str, Any], layers: Sequence[int]) -> Section:
    """The states of the first screen, layer by layer."""
    charts, tables = [], []
    for key, title in (("tokens", "Tokens spread over ranks"), ("requests", "Requests routed (attention-DP)")):
        rows = part[key]
        if not rows:
            continue
        measures = _by_measure(_best(rows))
        views = {
            name: {
                "data": [line(label(said), of_layers(layers), values, STATES[state]) for state, said, values in series],
                "layout": {"xaxis": LAYER_AXIS, "yaxis": {"title": name}, "hovermode": "x unified"},
            }
            for name, series in measures.items()
        }
        summary = f"lar by layer: {_ranges(_best(rows))}."
        charts.append(Chart(f"states-{key}", title, summary, views))
        for name, series in measures.items():
            cells = [[str(layer), *(number(values[at]) for _, _, values in series)] for at, layer in enumerate(layers)]
            tables.append(Table(f"{title}: {name} by layer", ["layer", *(said for _, said, _ in series)], cells))
    lead = "The same states layer by layer. Look for layers that stand apart: they are where a placement pays or fails."
    return Section(lead, charts, tables, chooser="Figure")


def _best(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a state, shuffled by the predictor with the most lar: the others are told under prediction."""
    judged = [row for row in rows if row["state"] == "placed+shuffled"]
    best = max(judged, key=lambda row: row["total"]["lar"])["predictor"] if judged else None
    return [row for row in rows if row["predictor"] in ("none", "oracle", best)]


def _ranges(rows: Sequence[dict[str, Any]]) -> str:
    """lar over layers of the states that nothing but the placement and the shuffle tell apart."""
    told = ("contiguous", "placed", "placed+shuffled")
    spans = [
        (row["label"], min(row["layers"]["lar"]), max(row["layers"]["lar"])) for row in rows if row["state"] in told
    ]
    return ", ".join(f"{said} {number(least)} to {number(most)}" for said, least, most in spans)


def _by_measure(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[str, str, list[float | None]]]]:
    """measure -> (state, label, [L] values). Time is that of the quickest way of running a state."""
    found = {
        said: [(row["state"], row["label"], row["layers"][name]) for row in rows] for name, said in MEASURES.items()
    }
    timed = [row for row in rows if row["layers"]["microseconds"]]
    if timed:
        found[TIME] = [
            (row["state"], f"{row['label']}, {way}", row["layers"]["microseconds"][way])
            for row in timed
            for way in [min(row["total"]["microseconds"], key=row["total"]["microseconds"].__getitem__)]
        ]
    return found


def prediction(part: dict[str, Any], layers: Sequence[int]) -> Section:
    """How well each predictor knows where a token's experts are, by layer."""
    known = {
        name: {
            predictor: of[name]
            for predictor, of in part["layers"].items()
            if any(v is not None for v in of[name] or [])
        }
        for name in KNOWN
    }
    known = {name: series for name, series in known.items() if series}
    views = {KNOWN[name]: _predictor_figure(name, series, part, layers) for name, series in known.items()}
    by_layer = [
        Table(
            f"{KNOWN[name]} by layer",
            ["layer", *series],
            [[str(layer), *(number(values[at]) for values in series.values())] for at, layer in enumerate(layers)],
        )
        for name, series in known.items()
    ]
    best = max(part["total"], key=lambda predictor: part["total"][predictor]["lar"])
    summary = (
        f"{best} is the best predictor on the mean: lar {number(part['total'][best]['lar'])} "
        f"of at most {number(part['ceiling']['total'])}, {number(part['chance'])} by chance."
    )
    return Section(
        "What the shuffle knows before routing. lar is what it keeps local; the oracle knows the true routing under "
        "the same quota.",
        [Chart("prediction", "Predictors by layer", summary, views)],
        [_predictor_table(part, len(layers)), *_group_tables(part), *by_layer],
        chooser="Figure",
    )


def _predictor_figure(
    name: str, series: dict[str, list[float | None]], part: dict[str, Any], layers: Sequence[int]
) -> Figure:
    styles = dict(zip(part["predictors"], SERIES * 2, strict=False))
    x = of_layers(layers)
    data = [line(label(predictor), x, values, styles[predictor]) for predictor, values in series.items()]
    if name == "lar":
        data.append(line("oracle (ceiling)", x, part["ceiling"]["layers"], STATES["oracle"]))
    layout: Figure = {"xaxis": LAYER_AXIS, "yaxis": {"title": KNOWN[name]}, "hovermode": "x unified"}
    if name in ("lar", "rank_accuracy"):
        layout["shapes"] = level("chance (1/G)", part["chance"])
    return {"data": data, "layout": layout}


def _predictor_table(part: dict[str, Any], layers: int) -> Table:
    preferred = part["preferred"] or []
    rows = [
        [predictor, *(number(figures[name]) for name in KNOWN), f"{preferred.count(predictor)} of {layers}"]
        for predictor, figures in part["total"].items()
    ]
    heads = ["predictor", *KNOWN.values(), "layers that validation gave it"]
    return Table("Predictors, mean over layers", heads, rows, folded=False)


def _group_tables(part: dict[str, Any]) -> list[Table]:
    captions = {"by_phase": "lar by phase", "by_frequency": "lar by how often the tables saw the token id"}
    return [
        Table(
            caption,
            ["group", "rows", *part["predictors"]],
            [
                [group["group"], number(group["rows"]), *(number(group["lar"].get(p)) for p in part["predictors"])]
                for group in part["groups"][key]
            ],
        )
        for key, caption in captions.items()
        if part["groups"][key]
    ]


def reliability(part: dict[str, Any], layers: Sequence[int]) -> Section:
    """Predicted against measured local activations."""
    views = {"all": _reliability_figure(part["total"], part["top_k"])}
    if len(layers) > 1:
        for at, layer in enumerate(layers):
            bins = {predictor: by_layer[at] for predictor, by_layer in part["layers"].items()}
            views[str(layer)] = _reliability_figure(bins, part["top_k"])
    errors = ", ".join(f"{predictor} {number(error, 2)}" for predictor, error in part["error"].items())
    rows = [
        [predictor, number(predicted, 2), number(measured, 2), number(int(count))]
        for predictor, bins in part["total"].items()
        for predicted, measured, count in bins
    ]
    return Section(
        "On the diagonal, a score means what it says: so many of a token's experts will be local. Points below it "
        "promise too much. Larger points stand for more rows.",
        [
            Chart(
                "reliability",
                "Predicted and measured local activations",
                f"Mean distance from the diagonal, in activations of {part['top_k']}: {errors}.",
                views,
                square=True,
                height=440,
            )
        ],
        [Table("Reliability, layers pooled", ["predictor", "predicted", "measured", "rows"], rows)],
        chooser="Layer",
    )


def _reliability_figure(bins: dict[str, list[list[float]]], top_k: int) -> Figure:
    largest = max((count for series in bins.values() for _, _, count in series), default=1)
    data = [
        line(
            label(predictor),
            [predicted for predicted, _, _ in series],
            [measured for _, measured, _ in series],
            style,
            customdata=[int(count) for _, _, count in series],
            hovertemplate="predicted %{x:.2f}, measured %{y:.2f}<br>%{customdata:,} rows",
        )
        for (predictor, series), style in zip(bins.items(), SERIES * 2, strict=False)
    ]
    for trace, series in zip(data, bins.values(), strict=True):
        trace["marker"]["size"] = [6 + 14 * (count / largest) ** 0.5 for _, _, count in series]
        trace["line"]["width"] = 1
    top = max(
        (max(predicted, measured) for series in bins.values() for predicted, measured, _ in series), default=top_k
    )
    top = min(top_k, top * 1.08)
    diagonal = {
        "type": "line",
        "x0": 0,
        "y0": 0,
        "x1": top,
        "y1": top,
        "line": {"color": "var(--muted)", "dash": "dot"},
    }
    axis = {"range": [0, top]}
    return {
        "data": data,
        "layout": {
            "xaxis": {"title": "predicted local activations"} | axis,
            "yaxis": {"title": "measured"} | axis,
            "shapes": [diagonal],
        },
    }


def transfer(part: dict[str, Any], _: Sequence[int]) -> Section:
    """What a placement is worth on each source, and on sources it was not fitted on."""
    sources = part["sources"]
    names = [entry["source"] for entry in sources]
    measured = [state for state in STATES if any(state in entry["figures"] for entry in sources)]
    charts = (
        [Chart("transfer-sources", "By source", _spread(sources), _source_views(sources, measured))] if sources else []
    )
    tables = [
        Table(
            f"By source ({part['predictor']})",
            ["source", "rows", *(f"{state} {figure}" for state in measured for figure in ("lar", "remote fan-out"))],
            [
                [
                    entry["source"],
                    number(entry["rows"]),
                    *(
                        number(entry["figures"].get(state, {}).get(figure))
                        for state in measured
                        for figure in ("lar", "remote_fanout")
                    ),
                ]
                for entry in sources
            ],
        )
    ] * bool(names)
    matrix = part["matrix"]
    if matrix:
        charts.append(_matrix_chart(matrix))
        tables += [_matrix_table(matrix, state) for state in ("placed", "placed+shuffled")]
    lead = "A placement fitted on one kind of text, used on another. Rows of equal colour transfer well."
    return Section(lead, charts, tables, notes=[part["matrix_note"]] if part["matrix_note"] else [])


def _spread(sources: Sequence[dict[str, Any]]) -> str:
    known = {entry["source"]: entry["figures"]["placed"]["lar"] for entry in sources if "placed" in entry["figures"]}
    if not known:
        return "Held-out figures by source."
    if len(known) == 1:
        return f"lar of the placement alone: {number(next(iter(known.values())))}."
    least, most = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    return f"lar of the placement alone: from {number(known[least])} ({least}) to {number(known[most])} ({most})."


def _source_views(sources: Sequence[dict[str, Any]], measured: Sequence[str]) -> dict[str, Figure]:
    names = [label(entry["source"]) for entry in sources]
    return {
        said: {
            "data": [
                {
                    "type": "bar",
                    "name": state,
                    "x": names,
                    "y": [entry["figures"].get(state, {}).get(figure) for entry in sources],
                    "marker": {
                        "color": STATES[state].colour,
                        "pattern": {"shape": "/" if state == "contiguous+oracle" else ""},
                    },
                    "hovertemplate": "%{y:.3f}",
                }
                for state in measured
            ],
            "layout": {"barmode": "group", "yaxis": {"title": said, "rangemode": "tozero"}, "hovermode": "x unified"}
            | {"xaxis": {"type": "category"}},
        }
        for figure, said in (("lar", "lar"), ("remote_fanout", "remote fan-out"))
    }


def _matrix_chart(matrix: dict[str, Any]) -> Chart:
    rows = [
        label(f"{folder} ({fitted})") for folder, fitted in zip(matrix["placements"], matrix["fitted_on"], strict=True)
    ]
    views = {
        f"{state}, {said}": {
            "data": [
                heat(
                    matrix[state][figure],
                    x=[label(source) for source in matrix["sources"]],
                    y=rows,
                    texttemplate="%{z:.3f}",
                    hovertemplate="%{y}<br>on %{x}: %{z:.3f}",
                    name="",
                )
            ],
            "layout": {
                "xaxis": {"title": "held-out rows of", "type": "category"},
                "yaxis": {"autorange": "reversed", "type": "category"},
            },
        }
        for figure, said in (("lar", "lar"), ("remote_fanout", "remote fan-out"))
        for state in ("placed", "placed+shuffled")
    }
    summary = f"{len(rows)} placements on {len(matrix['sources'])} sources."
    return Chart(
        "transfer-matrix", "Fitted on one source, used on another", summary, views, height=160 + 44 * len(rows)
    )


def _matrix_table(matrix: dict[str, Any], state: str) -> Table:
    cells = [
        [folder, fitted, *(number(value) for value in matrix[state]["lar"][at])]
        for at, (folder, fitted) in enumerate(zip(matrix["placements"], matrix["fitted_on"], strict=True))
    ]
    cells.append(["contiguous", ABOVE_ALL, *(number(value) for value in matrix["contiguous"]["lar"])])
    return Table(f"Transfer, {state}: lar", ["placement", "fitted on", *matrix["sources"]], cells)


ABOVE_ALL = "nothing"


def trace(part: dict[str, Any], _: Sequence[int]) -> Section:
    """What was recorded."""
    facts = Table("What was recorded", ["fact", "value"], part["facts"], folded=False, words=(1,))
    rows = part["rows"] or {}
    whole = sum(rows.values())
    shares = [[name, number(count), percent(count / whole if whole else None)] for name, count in rows.items()]
    parts = Table("Rows by part", ["part", "rows", "share"], shares, folded=False)
    return Section("The rows that every figure here rests on.", tables=[facts, parts] if rows else [facts])
