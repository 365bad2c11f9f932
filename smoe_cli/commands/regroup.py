"""smoe regroup: write the checkpoint with its experts renumbered, or the map where that would change the model."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from smoe_cli.options import (
    Common,
    DryRunOption,
    ForceOption,
    HashesOption,
    JobsOption,
    ModelOption,
    PlacementOption,
)


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
    inverse: Annotated[
        bool, typer.Option("--inverse", help="Write a regrouped checkpoint back under its source's numbers.")
    ] = False,
    jobs: JobsOption = 0,
    hashes: HashesOption = False,
    force: ForceOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Apply a placement: writes checkpoint-epG/ or map-epG/. A map where a checkpoint would be another function."""
    from smoe_cli.errors import UsageError
    from smoe_cli.folder import CHECKPOINT, choose_placement, sibling
    from smoe_cli.regrouping import regroup_model, restore_model
    from smoe_profiles.artefact import check_target
    from smoe_profiles.models import find_model

    if inverse and layout is not Layout.AUTO:
        raise UsageError("--inverse writes a checkpoint; leave --layout out.")
    following = None
    how: dict[str, Any] = {"jobs": jobs, "force": force or dry_run, "dry_run": dry_run, "console": common.console}
    if inverse:
        regrouped = model or str(sibling(choose_placement(common.dir, placement, hashes=hashes).path, CHECKPOINT))
        document = restore_model(find_model(regrouped), common.dir, **how)
    else:
        chosen = choose_placement(common.dir, placement, hashes=hashes)
        document = regroup_model(chosen, common.dir, model, layout.value, **how)
        following = None if dry_run else common.next("verify", "--placement", chosen.path.name)
    text = f"would write {document['message']} {document.get('cost', '')}" if dry_run else document["message"]
    common.console.result(document, lambda: common.console.line(str(text).rstrip()), following)
    if dry_run:  # the plan is shown before the run itself would be refused
        check_target(Path(document["path"]), force=force)
