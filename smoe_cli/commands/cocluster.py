"""smoe cocluster: place the experts on ranks so that tokens stay local."""

from collections import Counter
from typing import Annotated, Any

import typer

from smoe_cli.options import Common, ForceOption, HashesOption, JobsOption, SeedOption
from smoe_solvers.choices import Effort, Goal, Groups, Method, Seeds


def cocluster(
    common: Common,
    ep: Annotated[int, typer.Option("--ep", min=1, help="Expert-parallel ranks to place for.")],
    goal: Annotated[
        Goal, typer.Option("--goal", help="lar: activations at home; fanout: ranks a token needs; blend: both; ilp.")
    ] = Goal.BLEND,
    method: Annotated[Method, typer.Option("--method", help="ce, or a baseline: contiguous, metis.")] = Method.CE,
    theta: Annotated[
        float, typer.Option("--theta", min=0, max=1, help="Weight of load balance (lar, blend, ilp).")
    ] = 0.1,
    mu: Annotated[float, typer.Option("--mu", min=0, max=1000, help="Weight of fan-out in blend.")] = 0.25,
    effort: Annotated[
        Effort, typer.Option("--effort", help="How much to search; counts, not seconds.")
    ] = Effort.DEFAULT,
    groups: Annotated[
        Groups, typer.Option("--groups", help="whole: keep router groups together, for a same-function checkpoint.")
    ] = Groups.FREE,
    seeds: Annotated[
        Seeds, typer.Option("--seeds", help="metis: start from METIS too (needs smoe[bench]).")
    ] = Seeds.OWN,
    name: Annotated[str | None, typer.Option("--name", help="Keep it beside others as placement-epG-NAME.")] = None,
    seed: SeedOption = 0,
    jobs: JobsOption = 0,
    hashes: HashesOption = False,
    force: ForceOption = False,
) -> None:
    """Place experts on EP ranks so that tokens stay local: writes placement-epG/."""
    from smoe_cli.folder import TABLES, placement_path
    from smoe_cli.solving import SolveOptions, check_ep, publish_placement
    from smoe_profiles.artefact import check_target
    from smoe_profiles.tables import open_tables

    target = placement_path(common.dir, ep, name)
    tables = open_tables(common.dir / TABLES, hashes=hashes)
    check_ep(tables.artefact.model["layers"], ep, groups is Groups.WHOLE)
    check_target(target, force=force)
    options = SolveOptions(
        ep=ep,
        goal=goal,
        method=method,
        effort=effort,
        theta=theta,
        mu=mu,
        seed=seed,
        whole_groups=groups is Groups.WHOLE,
        metis_seeds=seeds is Seeds.METIS,
    )
    document = publish_placement(tables, target, options, jobs=jobs, force=force, console=common.console)
    common.console.result(
        document, lambda: _show(common, document), common.next(f"smoe regroup --placement {target.name}")
    )


def _gain(found: dict[str, Any]) -> str:
    error = found["validation_two_standard_errors"]
    return f"{found['validation_gain']:+.4f} ± {'?' if error is None else f'{error:.4f}'}"


def _show(common: Common, document: dict[str, Any]) -> None:
    rows = []
    for layer in document["layers"]:
        stages = layer["stages"]
        first, last = stages[0]["objective"], layer["objective"]
        rows.append(
            [
                str(layer["layer"]),
                f"{first:.4f}",
                f"{last:.4f}",
                str(layer["origin"]),
                _gain(layer),
            ]
        )
    columns = ["layer", "contiguous", "placed", "found by", "validation gain"]
    common.console.table(f"{document['path']}: {document['goal']} on the fit rows, lower is better", columns, rows)
    sizes, chosen = document["runtime_bytes"], Counter(document["predictors"]).most_common()
    preferred = ", ".join(f"{name} in {count}" for name, count in chosen)
    common.console.line(f"predictors preferred on validation: {preferred} of {len(document['layers'])} layers")
    common.console.line(
        f"run-time tables: {sum(sizes.values()) / 1e6:.1f} MB, of which the rank of every token id "
        f"{sizes['token_rank'] / 1e6:.1f} MB and its scores {sizes['token_scores'] / 1e6:.1f} MB"
    )
    gain = _gain(document)
    if document["confirmed"]:
        common.console.line(f"confirmed on validation blocks, mean over layers: {gain} (two standard errors)")
    else:
        common.console.line(
            f"nothing to gain: {gain} on validation blocks is not confirmed; the placement is contiguous."
        )
