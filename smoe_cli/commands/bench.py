"""smoe bench: what a placement is worth where it is served, timed on this machine's GPUs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from smoe_cli.options import Common, HashesOption, PlacementOption

SIZES = "64,256,1024,4096,16384"


def bench(
    common: Common,
    placement: PlacementOption = None,
    trace: Annotated[
        str | None, typer.Option("--trace", help="Held-out rows to replay; default: the folder's.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option("--layer", help="Decoder layer to replay; default: the middle MoE layer.")
    ] = None,
    tokens: Annotated[str, typer.Option("--tokens", help="Batch sizes.")] = SIZES,
    hidden: Annotated[
        int | None, typer.Option("--hidden", min=8, help="Hidden size to run at; default: the model's.")
    ] = None,
    width: Annotated[
        int | None, typer.Option("--width", min=8, help="Expert width to run at; default: the model's.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Count rows on the CPU, without times.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Keep the JSON document here too.")] = None,
    hashes: HashesOption = False,
) -> None:
    """Time every way of running a layer under a placement. On as many local ranks as it has."""
    from smoe_cli.benching import bench_placement
    from smoe_cli.folder import TABLES, TRACE, choose_placement
    from smoe_profiles.tables import open_tables
    from smoe_profiles.trace import open_trace

    document = bench_placement(
        choose_placement(common.dir, placement, hashes=hashes),
        open_tables(common.dir / TABLES, hashes=hashes),
        open_trace(Path(trace) if trace else common.dir / TRACE, hashes=hashes),
        layer_id=layer,
        sizes=(hidden, width),
        tokens=tokens,
        cpu=cpu,
        out=out,
        console=common.console,
    )
    common.console.result(document, lambda: _show(common, document, timed=not cpu))


def _show(common: Common, document: dict[str, Any], *, timed: bool = True) -> None:
    """Rows counted and, of GPUs, times: those of a CPU say nothing."""
    where = document["machine"]
    (workload,) = document["workloads"].values()
    rows = [
        [
            str(one["tokens"]),
            one["case"],
            f"{one['local_share']:.3f}",
            f"{one['total_rows']:,}",
            *(_times(one) if timed else []),
        ]
        for one in workload["results"]
    ]
    title = f"{workload['origin']}, {where['ranks']} ranks of {where['device']}, {where['date']}"
    common.console.table(title, ["tokens", "way", "lar", "rows", *(["us", "of layer"] if timed else [])], rows)
    for one in workload["ratios"]:
        time = f"time {one['time_ratio']:.3f}, " if timed else ""
        common.console.line(f"T {one['tokens']}: {one['against']} / {one['case']}: {time}rows {one['row_ratio']:.3f}")
    share = "; of layer: what exchanges take of it" if timed else ""
    common.console.line(f"rows: through the busiest direction of the busiest rank{share}")


def _times(one: dict[str, Any]) -> list[str]:
    """Microseconds, and the exchanges' share of the layer where that was measured."""
    share = one.get("communication_share")
    return [f"{one['total'] * 1e6:,.1f}", "" if share is None else f"{share:.0%}"]
