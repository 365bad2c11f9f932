"""smoe report: what the artefacts in a folder say, on one page."""

from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer

from smoe_cli.console import WIDTH
from smoe_cli.options import Common, ForceOption, PlacementOption

TITLES = {"microseconds": "predicted layer time, us", "remote_fanout": "rows a token sends to other ranks"}


def report(
    common: Common,
    placement: PlacementOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The page to write; default: report-epG.html in -C, named after the placement."),
    ] = None,
    force: ForceOption = False,
) -> None:
    """Say whether placing is worth it, and show why. From whatever is in -C; --json prints the data instead."""
    from smoe_cli.report.document import describe
    from smoe_cli.report.gathering import gather

    found = gather(common.dir, placement)
    if common.console.json:
        common.console.result(describe(found), lambda: None)
        return
    from smoe_cli.report.page import render
    from smoe_cli.report.writing import check_page, page_path, write_page

    path = out or page_path(common.dir, found.name)
    check_page(path, force=force)
    document = describe(found)
    write_page(path, render(document))
    following = document["verdict"]["next"]
    common.console.result(document, lambda: _show(common, document, path), following["command"] if following else None)


def _show(common: Common, document: dict[str, Any], path: Path) -> None:
    """The verdict and what it rests on; all else is on the page."""
    verdict = document["verdict"]
    common.console.line(fill(f"{path}: {document['title']}", WIDTH, break_long_words=False, break_on_hyphens=False))
    common.console.line(fill(verdict["headline"], WIDTH))
    if verdict["figures"]:
        columns = ["use of the placement", "contiguous", "balancer", "here", "times", "needed"]
        title = f"{TITLES[verdict['basis']]}, held-out; times better than the better of contiguous and balancer"
        common.console.table(title, columns, [_row(figure) for figure in verdict["figures"]])
    for text in (*verdict["cautions"], verdict["map_only"], verdict["conditions_text"]):
        if text:
            common.console.line(fill(text, WIDTH))


def _row(figure: dict[str, Any]) -> list[str]:
    balanced = figure["load_balancer"]
    return [
        f"{figure['label']} ({figure['way']})",
        f"{figure['contiguous']:.2f}",
        "" if balanced is None else f"{balanced:.2f}",
        f"{figure['value']:.2f}",
        f"{figure['speedup']:.3f}",
        f"{figure['threshold']:.2f}",
    ]
