"""smoe build-tables: count routing into the tables that placing and predicting need."""

from typing import Annotated, Any

import typer

from smoe_cli.console import Console
from smoe_cli.options import Common, ForceOption, HashesOption, JobsOption, ModelOption, RayOption, SeedOption


def build_tables(
    common: Common,
    trace: Annotated[
        list[str] | None,
        typer.Option("--trace", help="A trace to count; repeatable for one model; default: the folder's own."),
    ] = None,
    model: ModelOption = None,
    shard: Annotated[
        str | None, typer.Option("--shard", help="i/n: count the i-th of n equal runs of rows into tables-i-of-n/.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Add the folder's shards up into tables/.")] = False,
    min_count: Annotated[
        int, typer.Option("--min-count", min=1, help="Token ids seen less often count as never seen.")
    ] = 1,
    seed: SeedOption = 0,
    jobs: JobsOption = 0,
    ray: RayOption = None,
    hashes: HashesOption = False,
    force: ForceOption = False,
) -> None:
    """Count a trace's routing: writes tables/. With --shard: tables-i-of-n/."""
    from pathlib import Path

    from smoe_cli.errors import UsageError
    from smoe_cli.folder import TRACE
    from smoe_cli.tabulating import build_shard, build_whole, merge_shards_of, open_traces, parse_share
    from smoe_cli.workers import open_workers

    console = common.console
    if merge and (trace or shard):
        raise UsageError("--merge adds up the folder's shards; leave out --trace and --shard.")
    if shard and (model or min_count > 1):
        raise UsageError("--model and --min-count belong to the whole: give them with --merge, not with --shard.")
    share = parse_share(shard) if shard else None
    paths = [Path(name) for name in trace] if trace else [common.dir / TRACE]
    traces = [] if merge else open_traces(paths, hashes=hashes)
    with open_workers(jobs, ray, console.note) as workers:
        how: dict[str, Any] = {"seed": seed, "workers": workers, "force": force, "console": console}
        if merge:
            document = merge_shards_of(common.dir, model, min_count=min_count, hashes=hashes, **how)
        elif share:
            document = build_shard(traces, common.dir, share, **how)
        else:
            document = build_whole(traces, common.dir, model, min_count=min_count, **how)
    rows = sum(document["rows"].values())
    if not share:
        _warn_of_few_rows(console, document)
    part = f"shard {share.number} of {share.of} of " if share else ""
    console.result(
        document,
        lambda: console.line(f"{document['path']}: {part}{len(document['layers'])} MoE layers from {rows:,} rows"),
        common.next(*(("build-tables", "--merge") if share else ("cocluster", "--ep", "G"))),
    )


def _warn_of_few_rows(console: Console, document: dict[str, Any]) -> None:
    """Where a part has fewer rows than a layer has experts, chance decides what is counted of most of them."""
    experts = max(layer["num_experts"] for layer in document["layers"])
    few = [f"{rows:,} {part}" for part, rows in document["rows"].items() if rows < experts]
    if few:
        console.note(
            f"warning: {' and '.join(few)} rows are fewer than the {experts} experts of a layer; what is placed by "
            "them says little of other text. Record more."
        )
