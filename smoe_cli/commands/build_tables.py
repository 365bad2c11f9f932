"""smoe build-tables: count a trace's routing into the tables that placing and predicting need."""

from typing import Annotated

import typer

from smoe_cli.options import Common, ForceOption, HashesOption, ModelOption, SeedOption


def build_tables(
    common: Common,
    trace: Annotated[str | None, typer.Option("--trace", help="The trace to count; default: the folder's own.")] = None,
    model: ModelOption = None,
    seed: SeedOption = 0,
    hashes: HashesOption = False,
    force: ForceOption = False,
) -> None:
    """Count a trace's routing: writes tables/."""
    from pathlib import Path

    from smoe_cli.folder import TABLES, TRACE, model_of
    from smoe_cli.importing import require_token_ids
    from smoe_profiles.artefact import check_target, publish
    from smoe_profiles.models import is_unknown
    from smoe_profiles.tables import write_tables
    from smoe_profiles.trace import open_trace

    target = common.dir / TABLES
    check_target(target, force=force)
    opened = open_trace(Path(trace) if trace else common.dir / TRACE, hashes=hashes)
    require_token_ids(opened)
    unnamed = is_unknown(opened.artefact.model) and not model
    found = None if unnamed else model_of(opened.artefact, common.dir, model or opened.artefact.run().get("model"))
    facts = {"seed": seed}
    with (
        publish(
            target,
            TABLES,
            parameters=facts,
            model=opened.artefact.model,
            seed=seed,
            parents=[opened.artefact],
            force=force,
        ) as draft,
        common.console.progress("tables", len(opened.layers), "layers") as advance,
    ):
        draft.parameters |= write_tables(draft.path, opened, found, seed, advance)
        facts = dict(draft.parameters)
    document = {"path": str(target), **facts}
    rows = opened.rows("fit") + opened.rows("validation")
    common.console.result(
        document,
        lambda: common.console.line(f"{target}: {len(opened.layers)} MoE layers from {rows:,} rows"),
        common.next("smoe cocluster --ep G"),
    )
