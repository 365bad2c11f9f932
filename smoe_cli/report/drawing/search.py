"""The section on the solver: the way down of every layer, and how far below it could be."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from smoe_cli.report.drawing.parts import FEW, Chart, Figure, Section, Style, Table, line
from smoe_cli.report.drawing.text import label, number, percent

BOUND = "bound"
DEPTHS = 5


def solver(part: dict[str, Any], _: Sequence[int]) -> Section:
    """Objective by stage, a line a layer, down to its bound."""
    layers, summary = part["layers"], part["summary"]
    gap = f", {percent(summary['gap'])} above it on the mean" if summary["gap"] is not None else ""
    known = f"{summary['optimal']} of {len(layers)} layers proved optimal, {summary['bounded']} with a bound{gap}."
    confirmed = "confirmed" if part["confirmed"] else "not confirmed"
    return Section(
        f"Goal {part['goal']}, method {part['method']}, effort {part['effort']}; the gain was {confirmed} on "
        "validation blocks. Lower is better; the dotted end leads to a bound that no placement can pass, itself "
        "perhaps out of reach.",
        [Chart("solver", "From contiguous to the placement", known, {"": _figure(layers, part["goal"])})],
        [_layer_table(layers), _stage_table(layers)],
    )


def _figure(layers: Sequence[dict[str, Any]], goal: str) -> Figure:
    stages = dict.fromkeys(label(stage["name"]) for layer in layers for stage in layer["stages"])
    depth = [round(at / max(1, len(layers) - 1) * (DEPTHS - 1)) for at in range(len(layers))]
    return {
        "data": [
            trace
            for layer, deep in zip(layers, depth, strict=True)
            for trace in _descent(layer, Style(f"var(--depth-{deep})"))
        ],
        "layout": {
            "xaxis": {"type": "category", "categoryorder": "array", "categoryarray": [*stages, BOUND]},
            "yaxis": {"title": f"objective ({label(goal)})"},
            "showlegend": len(layers) <= FEW,
        },
    }


def _descent(layer: dict[str, Any], style: Style) -> list[Figure]:
    """One layer's stages, and the dotted end to its bound where one is known."""
    name, bound = f"layer {layer['layer']}", layer["certificate"]["value"]
    x = [label(stage["name"]) for stage in layer["stages"]]
    y = [stage["objective"] for stage in layer["stages"]]
    said = f"{name}, %{{x}}: %{{y:.4f}}<extra></extra>"
    drawn = [line(name, x, y, style, hovertemplate=said)]
    if bound is not None and y:
        end = replace(style, dash="dot", symbol="line-ew-open")
        drawn.append(line("", [x[-1], BOUND], [y[-1], bound], end, hovertemplate=said, showlegend=False))
    return drawn


def _layer_table(layers: Sequence[dict[str, Any]]) -> Table:
    heads = ["layer", "found by", "objective", "bound", "gap", "gain on validation ± 2 s.e.", "note"]
    rows = [
        [
            str(layer["layer"]),
            layer["origin"],
            number(layer["objective"], 4),
            number(layer["certificate"]["value"], 4),
            percent(layer["certificate"]["gap"]),
            _plus_minus(layer["validation_gain"], layer["validation_two_standard_errors"]),
            layer["note"],
        ]
        for layer in layers
    ]
    return Table("Layers", heads, rows, folded=len(layers) > FEW, words=(1, 6))


def _stage_table(layers: Sequence[dict[str, Any]]) -> Table:
    rows = [
        [
            str(layer["layer"]),
            stage["name"],
            number(stage["objective"], 4),
            number(stage["lar"]),
            number(stage["fanout"]),
        ]
        for layer in layers
        for stage in layer["stages"]
    ]
    return Table("Stages", ["layer", "stage", "objective", "lar", "fan-out"], rows, words=(1,))


def _plus_minus(value: float | None, error: float | None) -> str:
    return number(value) if value is None or error is None else f"{number(value)} ± {number(error)}"
