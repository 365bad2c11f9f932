"""smoe inspect: what an artefact holds, and whether a trace shows signs of having been recorded wrongly."""

from pathlib import Path
from typing import Annotated

import typer

from smoe_cli.options import Common, HashesOption
from smoe_profiles.choices import Level


def inspect(
    common: Common,
    artefact: Annotated[
        Path | None,
        typer.Argument(metavar="ARTEFACT", help="Any artefact's folder, or its name in -C; default: the trace."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", help="Compare with another trace of the same text.")
    ] = None,
    ep: Annotated[
        int | None,
        typer.Option(
            "--ep", min=1, help="Show the load of so many contiguous ranks too; of a placement file: its ranks."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Of an engine's placement file: the model it must fit.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 5 if something is sick; with --against, if rows really differ.")
    ] = False,
    hashes: HashesOption = False,
) -> None:
    """Look at an artefact or an engine's placement. Of a trace: load, concentration, coverage, signs of sickness."""
    from smoe_cli.engines.importing import inspect_engine_map
    from smoe_cli.errors import CheckFailedError, UsageError
    from smoe_cli.folder import TABLES, TRACE, step_after_trace
    from smoe_cli.inspection.inspecting import compare, find_artefact, inspect_artefact
    from smoe_cli.inspection.showing import show_agreement, show_engine_map, show_summary, show_trace

    console = common.console
    path = find_artefact(common.dir, artefact)
    if model is not None and not path.is_file():
        raise UsageError(f"--model is for an engine's placement file; {path} is none.")
    if path.is_file() and against is None:
        document = inspect_engine_map(path, model_name=model, ep=ep)
        console.result(document, lambda: show_engine_map(console, document))
        failed = bool(document["lint"])
    elif against is not None:
        if ep is not None:
            raise UsageError("--ep does not go with --against: the comparison shows no load.")
        document = compare(path, find_artefact(common.dir, against), hashes=hashes, console=console)
        console.result(document, lambda: show_agreement(console, document))
        failed = document["total"]["differing"] > 0 or not document["layers"]
    else:
        document = inspect_artefact(path, ep=ep, hashes=hashes, console=console)
        show = show_trace if document["kind"] == "trace" else show_summary
        failed = bool(document["lint"])
        following = None
        if path == common.dir / TRACE and document.get("level") == Level.TOKEN and not failed:
            words, where = step_after_trace(path, document["level"], document["rows"]["fit"])
            following = None if (common.dir / TABLES).exists() else common.next(*words, where=where)
        console.result(document, lambda: show(console, document), following)
    if strict and failed:
        raise CheckFailedError(f"{path}: {document['verdict']}.")
