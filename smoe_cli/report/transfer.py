"""What holds on which texts: one placement measured source by source, and placements of several mixes side by side.

Axes: n placements, S sources.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smoe_cli.folder import PLACEMENT
from smoe_cli.report.gathering import Found, Measured
from smoe_cli.report.states import GROUPS
from smoe_profiles.artefact import open_artefact
from smoe_profiles.errors import InputError

Tree = dict[str, Any]

FIGURES = ("lar", "remote_fanout")
JUDGED = ("placed", "placed+shuffled")


def transfer_section(found: Found) -> Tree | None:
    """By source, and the matrix where several placements of as many ranks were measured on several sources."""
    measured = found.measured
    if measured is None or not measured.document.get("by_source"):
        return None
    sources = {name: facts for name, facts in measured.document["by_source"].items() if facts["rows"]}
    matrix = _matrix(found, measured, list(sources))
    return {
        "predictor": measured.context["predictors"][0],
        "sources": [
            {"source": name, "rows": facts["rows"], "figures": _by_state(measured, facts["total"])}
            for name, facts in sources.items()
        ],
        "matrix": matrix,
        "matrix_note": None if matrix else _why_none(found, list(sources)),
    }


def _by_state(measured: Measured, total: Tree) -> Tree:
    return {state: _figures(measured, total, state) for state in GROUPS if state in total}


def _figures(measured: Measured, total: Tree, state: str) -> dict[str, float]:
    """A state's figures; of shuffled ones by the first predictor."""
    by_predictor = total[state]
    first = measured.context["predictors"][0]
    figures = by_predictor[first] if first in by_predictor else next(iter(by_predictor.values()))
    return {name: figures[name] for name in FIGURES}


def _matrix(found: Found, measured: Measured, sources: Sequence[str]) -> Tree | None:
    """Placements by sources; None with one source, or where all were fitted on the same ones."""
    alike = {
        name: other
        for name, other in {str(found.name): measured, **found.others}.items()
        if other.context["ranks"] == measured.context["ranks"]
    }
    ordered = dict(sorted(alike.items()))
    fitted = [fitted_on(found.folder, name, other) for name, other in ordered.items()]
    if len(set(fitted)) < 2 or len(sources) < 2:
        return None
    contiguous = {name: [_of_source(measured, source, "contiguous")[name] for source in sources] for name in FIGURES}
    return {
        "placements": list(ordered),
        "fitted_on": fitted,
        "sources": list(sources),
        **{state: _columns(ordered, sources, state) for state in JUDGED},
        "contiguous": contiguous,
    }


def _columns(measured: Mapping[str, Measured], sources: Sequence[str], state: str) -> Tree:
    """[n][S] of each figure."""
    rows = [[_of_source(one, source, state) for source in sources] for one in measured.values()]
    return {name: [[cell[name] for cell in row] for row in rows] for name in FIGURES}


def _of_source(measured: Measured, source: str, state: str) -> dict[str, float | None]:
    """A state's figures on one source; None where none of its rows were measured."""
    facts = measured.document.get("by_source", {}).get(source)
    if not facts or not facts["rows"]:
        return dict.fromkeys(FIGURES)
    return dict(_figures(measured, facts["total"], state))


def fitted_on(folder: Path, name: str, measured: Measured) -> str:
    """The sources a placement was fitted on: in its own mix, or as they were traced."""
    try:
        mix = open_artefact(folder / name, PLACEMENT).parameters.get("mix")
    except InputError:  # its evaluation outlived it
        mix = None
    if mix:
        return ", ".join(f"{source} {share:.2f}" for source, share in mix if share)
    return ", ".join(measured.context.get("fitted_on") or ["unknown"])


def _why_none(found: Found, sources: Sequence[str]) -> str:
    if len(sources) < 2:
        return (
            f"All held-out rows are of one source ({', '.join(sources)}): record or import several with --source, and "
            "place for each with --mix, to see what holds on the others."
        )
    words = ("--ep", str(found.ranks), "--mix", f"{sources[0]}=1", "--name", "one-source")
    command = found.command("cocluster", *words)
    return f"Every placement measured was fitted on the same sources: {command}, then smoe evaluate, adds another."
