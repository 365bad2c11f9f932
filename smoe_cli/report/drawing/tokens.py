"""The section on telling tokens: those whose experts lie on one rank.

Axes: G ranks, L layers. Texts may be hostile: `text.token` shows them, the template escapes them.
"""

from collections.abc import Sequence
from typing import Any

from smoe_cli.report.drawing.parts import Section, Table
from smoe_cli.report.drawing.text import number, percent, times, token


def tokens(part: dict[str, Any], _: Sequence[int]) -> Section:
    """Tokens whose experts lie on one rank."""
    ranks = [
        Table(
            f"Rank {rank}",
            ["token", "share", "lift", "rows"],
            [
                [_token(entry), percent(entry["share"], 0), times(entry["lift"], 1), number(entry["count"])]
                for entry in found
            ],
            folded=False,
        )
        for rank, found in enumerate(part["ranks"])
    ]
    most = max((len(found) for layer in part["by_layer"] for found in layer), default=0)
    by_layer = [
        Table(
            f"Layer {layer}: the most telling tokens of every rank",
            ["rank", *(str(place + 1) for place in range(most))],
            [
                [f"rank {rank}", *(_token(entry) for entry in found), *[""] * (most - len(found))]
                for rank, found in enumerate(part["by_layer"][at])
            ],
        )
        for at, layer in enumerate(part["layers"])
    ]
    lead = (
        "Tokens that lean to a rank: the share of their activations that its experts take (mean over layers), how "
        "many times the rank's usual share that is, and in how many rows they were seen. Outer "
        "spaces are shown as ␣, what cannot be seen as an escape."
    )
    return Section(lead, tables=[*ranks, *by_layer], notes=[part["note"]] if part["note"] else [])


def _token(entry: dict[str, Any]) -> str:
    return f"#{entry['id']}" if entry["text"] is None else token(entry["text"])
