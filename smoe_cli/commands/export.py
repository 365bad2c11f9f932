"""smoe export: a placement in the form a serving engine reads."""

from pathlib import Path
from typing import Annotated, Any

import typer

from smoe_cli.engines.choices import Target
from smoe_cli.options import Common, ForceOption, HashesOption, ModelOption, PlacementOption


def export(
    common: Common,
    to: Annotated[Target, typer.Option("--to", help="Whose form; vllm: how to serve the regrouped checkpoint.")],
    placement: PlacementOption = None,
    model: ModelOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The file to write; default: beside the placement, named after it.")
    ] = None,
    hashes: HashesOption = False,
    force: ForceOption = False,
) -> None:
    """Write a placement as a serving engine's own file. Nothing is copied and the model stays as it is."""
    from smoe_cli.engines.exporting import described_model, export_placement
    from smoe_cli.folder import choose_placement

    chosen = choose_placement(common.dir, placement, hashes=hashes)
    document = export_placement(chosen, described_model(chosen, common.dir, model), to, out, force=force)
    common.console.result(document, lambda: _show(common, document))


def _show(common: Common, document: dict[str, Any]) -> None:
    if document["path"]:
        common.console.line(f"{document['path']}: {document['layers']} MoE layers of {document['slots']} slots")
    for note in document["notes"]:
        common.console.line(note)
