"""The report's page: one HTML file that needs nothing else, from the report's document.

The first screen and every table are plain HTML. Charts are drawn by plotly when they come near the window: the library
and the figures lie in the page as deflate in base64, which no text of theirs can leave, and cost nothing until then.
The page's Content-Security-Policy lets only these scripts run, known by their hashes, and nothing be fetched.
"""

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from smoe_cli.report.drawing import measuring, placing, search, tokens
from smoe_cli.report.drawing.overview import ANSWERS, MEANINGS, cards, state_tables
from smoe_cli.report.drawing.parts import Section
from smoe_cli.report.drawing.text import number, visible
from smoe_profiles.errors import MachineError

SECTIONS: dict[str, tuple[str, Callable[[dict[str, Any], Sequence[int]], Section]]] = {
    "states": ("States by layer", measuring.states),
    "expert_load": ("Load of experts and ranks", placing.expert_load),
    "coactivation": ("Experts chosen together", placing.coactivation),
    "traffic": ("Traffic between ranks", placing.traffic),
    "prediction": ("Prediction", measuring.prediction),
    "reliability": ("Reliability of the scores", measuring.reliability),
    "transfer": ("Transfer between sources", measuring.transfer),
    "solver": ("The solver's way and its bound", search.solver),
    "tokens": ("Telling tokens", tokens.tokens),
    "trace": ("The trace", measuring.trace),
}
"""Sections in the order of the page: key in the document -> heading, and what draws it."""


def render(document: dict[str, Any]) -> str:
    """The whole page. document: what `smoe report --json` prints.

    Raises MachineError where the packages of the `report` extra are missing.
    """
    try:
        from markupsafe import Markup

        template = _template()
        sections = {
            key: draw(document["sections"][key], document["layers"])
            for key, (_, draw) in SECTIONS.items()
            if document["sections"][key] is not None
        }
        charts = [chart for section in sections.values() for chart in section.charts]
        library = _plotly() if charts else ""
    except ModuleNotFoundError as error:
        raise MachineError(f"{error.name} is not installed; pip install smoe[report].") from error
    figures = {
        chart.name: {"views": list(chart.views.values()), "square": chart.square, "height": chart.height}
        for chart in charts
    }
    script = _asset("page.js")
    page: str = template.render(
        document=document,
        verdict=document["verdict"],
        answers=ANSWERS,
        meanings=MEANINGS,
        cards=cards(document["verdict"]),
        state_tables=state_tables(document["sections"]["states"]),
        headings={key: heading for key, (heading, _) in SECTIONS.items()},
        sections=sections,
        policy=_policy(script, library),
        style=Markup(_asset("page.css")),
        script=Markup(script),
        library=Markup(_packed(library)),
        figures=Markup(_packed(json.dumps(figures, separators=(",", ":")))),
    )
    return page


def _template() -> Any:
    """The page's template: every string is made visible, then escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, finalize=_seen
    )
    environment.filters["number"] = number
    return environment.from_string(_asset("page.html.jinja"))


def _seen(value: Any) -> Any:
    """What the template prints: strings with nothing unseen in them; Markup, which is the page's own, as it is."""
    return visible(value) if type(value) is str else value


def _asset(name: str) -> str:
    return (files("smoe_cli.report.drawing") / "assets" / name).read_text(encoding="utf-8")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


@lru_cache(maxsize=4)
def _packed(text: str) -> str:
    """Deflate in base64: letters, digits, `+/=` alone."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _policy(*scripts: str) -> str:
    """Only these scripts run, and nothing is fetched.

    Styles may be inline: plotly writes them as it draws, and with no address allowed they can reach nothing.
    """
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
