"""What a section of the report is made of: charts, the tables that say the same, and a chooser between views.

A chart's figure is plain JSON for plotly. Colours in it are the names of CSS variables, `var(--placed)`, which the page
resolves when it draws, so that one figure serves light, dark and print.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Figure = dict[str, Any]
"""{"data": traces, "layout": what differs from the page's common layout}."""


@dataclass(frozen=True)
class Style:
    """How a series is told apart, by colour and without it."""

    colour: str
    dash: str = "solid"
    symbol: str = "circle"


STATES = {
    "contiguous": Style("var(--contiguous)", "solid", "circle"),
    "load_balancer": Style("var(--load-balancer)", "dash", "square"),
    "placed": Style("var(--placed)", "solid", "diamond"),
    "shuffled": Style("var(--shuffled)", "dot", "triangle-up"),
    "placed+shuffled": Style("var(--placed-shuffled)", "solid", "star"),
    "contiguous+oracle": Style("var(--ceiling)", "dot", "circle-open"),
    "oracle": Style("var(--ceiling)", "dash", "star-open"),
}
SERIES = tuple(
    Style(f"var(--series-{number})", dash, symbol)
    for number, (dash, symbol) in enumerate(
        (
            ("solid", "circle"),
            ("dash", "square"),
            ("dot", "diamond"),
            ("dashdot", "triangle-up"),
            ("longdash", "cross"),
            ("solid", "x"),
        )
    )
)
"""Styles of predictors and sources, in turn."""

FEW = 12
"""Layers up to which each is told by its own mark, entry or row at once."""

SEQUENTIAL = [[step / 8, f"var(--cividis-{step})"] for step in range(9)]
DIVERGING = [[step / 6, f"var(--diverging-{step})"] for step in range(7)]


@dataclass(frozen=True)
class Chart:
    """One drawing place. views: view -> figure, drawn one at a time; shape: height over width, or pixels of height.

    summary: what is to be seen, in a sentence, for those who do not see it.
    """

    name: str
    title: str
    summary: str
    views: dict[str, Figure]
    square: bool = False
    height: int = 360


@dataclass(frozen=True)
class Table:
    """Cells as they are shown. heads: one a column; the first cell of a row is its header.

    folded: closed until asked for; words: columns of text, which stand left.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = True
    words: Sequence[int] = ()


@dataclass(frozen=True)
class Section:
    """One section as it is shown. chooser: what the views of its charts are chosen by ("Layer"), if there are several.

    lead: how to read it; notes: what was left out or quantised.
    """

    lead: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    chooser: str = ""
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def views(self) -> list[str]:
        """What the chooser offers, in order."""
        return list(self.charts[0].views) if self.charts else []


def line(name: str, x: Sequence[Any], y: Sequence[float | None], style: Style, **more: Any) -> Figure:
    """A series of points joined by a line; many points are smaller."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": style.colour, "dash": style.dash, "width": 2},
        "marker": {"color": style.colour, "symbol": style.symbol, "size": 8 if len(x) <= FEW else 5},
        "hovertemplate": "%{y:.3f}",
    } | more


def heat(z: Sequence[Sequence[float | None]], **more: Any) -> Figure:
    """A heat map with rows from the top."""
    return {"type": "heatmap", "z": [list(row) for row in z], "colorscale": SEQUENTIAL, "hoverongaps": False} | more


def level(name: str, value: float) -> list[Figure]:
    """A horizontal line across a plot with its name at the right end, as layout shapes and annotations."""
    return [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}
        | {"line": {"color": "var(--muted)", "width": 1, "dash": "dot"}}
        | {"label": {"text": name, "textposition": "end", "font": {"color": "var(--muted)", "size": 12}}}
    ]


LAYER_AXIS = {"title": "layer", "type": "category", "tickangle": 0, "nticks": 20}


def of_layers(layers: Sequence[int]) -> list[str]:
    """Layers as categories of an axis: a model's ids have holes that a number line would show as distances."""
    return [str(layer) for layer in layers]
