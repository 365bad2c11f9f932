"""smoe regroup: write the checkpoint with its experts renumbered, or the map where that would change the model."""

from enum import StrEnum
from typing import Annotated

import typer

from smoe_cli.options import Common, DryRunOption, ForceOption, HashesOption, ModelOption, PlacementOption


class Layout(StrEnum):
    """auto: a checkpoint where that is the same function, else a map; or insist on one."""

    AUTO = "auto"
    CHECKPOINT = "checkpoint"
    MAP = "map"


def regroup(
    common: Common,
    placement: PlacementOption = None,
    model: ModelOption = None,
    layout: Annotated[Layout, typer.Option("--layout", help="auto decides and says why.")] = Layout.AUTO,
    hashes: HashesOption = False,
    force: ForceOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Apply a placement: writes checkpoint-epG/, or map-epG/ where a checkpoint would be another function."""
    from smoe_cli.folder import choose_placement
    from smoe_cli.regrouping import regroup_model

    chosen = choose_placement(common.dir, placement, hashes=hashes)
    document = regroup_model(
        chosen, common.dir, model, layout.value, force=force, dry_run=dry_run, console=common.console
    )
    following = None if dry_run else common.next(f"smoe verify --placement {chosen.path.name}")
    common.console.result(document, lambda: common.console.line(str(document["message"])), following)
