"""smoe cocluster: place the experts on ranks so that tokens stay local."""

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe_cli.options import Common, ForceOption, HashesOption, JobsOption, RayOption, SeedOption
from smoe_solvers.choices import Effort, Goal, Groups, Method, Mode, Seeds

if TYPE_CHECKING:
    from smoe_cli.placing.solve_options import SolveOptions
    from smoe_profiles.tables import Tables
    from smoe_profiles.workers import Workers


def cocluster(
    common: Common,
    ep: Annotated[int, typer.Option("--ep", min=1, help="Expert-parallel ranks to place for.")],
    goal: Annotated[
        Goal,
        typer.Option(
            "--goal",
            help="lar: activations at home; fanout: ranks a token needs; blend: both; ilp; time: predicted layer time.",
        ),
    ] = Goal.BLEND,
    method: Annotated[
        Method, typer.Option("--method", help="ce: the search; exact: a proof; the others: to compare with.")
    ] = Method.CE,
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
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            min=0.1,
            help="Seconds a layer, after which a method stops; without it counts decide, not the clock.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Show all methods at equal time, as the clock has it; write no placement."),
    ] = False,
    mode: Annotated[
        Mode, typer.Option("--mode", help="How the layer is run, for goal time and the predicted times shown.")
    ] = Mode.SPECULATIVE,
    hardware: Annotated[
        str, typer.Option("--hardware", help="Hardware model: nvlink-h200, pcie, ethernet, or a JSON file.")
    ] = "nvlink-h200",
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, help="Nodes of equal, consecutive ranks: fewer rows cross them.")
    ] = 1,
    rank_cost: Annotated[
        Path | None,
        typer.Option("--rank-cost", help="Measured cost from rank to rank, G x G, zero diagonal (.json, .npy)."),
    ] = None,
    redundant: Annotated[
        int, typer.Option("--redundant", min=0, help="Extra expert slots on every rank, filled with copies.")
    ] = 0,
    uneven: Annotated[
        bool,
        typer.Option("--uneven", help="Let the first E mod EP ranks hold one expert more; no engine map says that."),
    ] = False,
    balance_sources: Annotated[
        bool, typer.Option("--balance-sources", help="Weigh all sources of the tables alike, however long their texts.")
    ] = False,
    mix: Annotated[
        list[str] | None, typer.Option("--mix", help="NAME=WEIGHT: a source's part of the traffic; repeatable.")
    ] = None,
    robust: Annotated[
        bool, typer.Option("--robust", help="Look for the mix under which the source that gains least gains most.")
    ] = False,
    from_: Annotated[
        str | None,
        typer.Option("--from", help="Stay near this placement: every moved expert must pay for its transfer."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Keep it beside others as placement-epG-NAME.")] = None,
    seed: SeedOption = 0,
    jobs: JobsOption = 0,
    ray: RayOption = None,
    hashes: HashesOption = False,
    force: ForceOption = False,
) -> None:
    """Place experts on EP ranks: writes placement-epG/. Those that tokens choose together are to lie together."""
    from smoe_cli.folder import TABLES, can_regroup, has_heldout_rows, placement_path
    from smoe_cli.hardware import find_cost, load_hardware, read_rank_cost
    from smoe_cli.placing.mixing import choose_mix
    from smoe_cli.placing.solve_options import (
        MACHINE,
        SolveOptions,
        check_ep,
        check_nodes,
        check_options,
        options_given,
    )
    from smoe_cli.placing.solving import choose_robust_mix, placement_to_stay_near, publish_placement
    from smoe_cli.workers import open_workers
    from smoe_profiles.artefact import check_target
    from smoe_profiles.tables import open_tables

    machine = load_hardware(hardware)
    target = placement_path(common.dir, ep, name)
    tables = open_tables(common.dir / TABLES, hashes=hashes)
    check_ep(tables.artefact.model["layers"], ep, groups is Groups.WHOLE, redundant, uneven=uneven)
    check_nodes(ep, nodes)
    near = None if from_ is None else placement_to_stay_near(common.dir, from_, tables, ep)
    sources, shares = choose_mix(tables, balance=balance_sources, mix=mix or [], robust=robust)
    costs = None if rank_cost is None else read_rank_cost(rank_cost, ep)
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
        time_limit=time_limit,
        mode=mode,
        hardware=machine.name,
        nodes=nodes,
        rank_cost=costs,
        redundant=redundant,
        uneven=uneven,
        mix=shares,
        start=near.id if near else None,
    )
    check_options(options, compare=compare)
    given = asdict(options) | {"hardware": hardware}  # as it was named: a file, not what is in it
    measure = None
    if has_heldout_rows(common.dir):
        measure = common.next("evaluate", "--placement", target.name, *options_given(given, MACHINE))
    if compare:
        with open_workers(jobs, ray, common.console.note) as workers:
            document = _compare(common, tables, options, workers)
        named = ["--name", name] if name else []
        kept = options_given(given, (*MACHINE, "theta", "mu", "mix"))
        place = None if target.exists() else common.next("cocluster", "--ep", str(ep), "--goal", goal, *kept, *named)
        common.console.result(document, lambda: _show_comparison(common, document), place or measure)
        return
    cost = find_cost(tables.artefact, common.dir, machine, mode, ep, needed=goal is Goal.TIME)
    check_target(target, force=force or (near is not None and near.path == target))
    with open_workers(jobs, ray, common.console.note) as workers:
        tried = choose_robust_mix(tables, sources, options, workers, common.console) if robust else []
        if tried:
            best = max(tried, key=lambda one: one.worst)
            options = replace(options, mix=tuple(best.mix.items()))
        document = publish_placement(
            tables,
            target,
            options,
            workers=workers,
            force=force,
            console=common.console,
            cost=cost,
            old=near.placement if near else None,
        )
    document["mixes_tried"] = [asdict(one) | {"mean": one.mean, "worst": one.worst} for one in tried]
    moved = document["confirmed"] and can_regroup(tables.artefact.model, len(tables.layers))
    following = common.next("regroup", "--placement", target.name) if moved else measure
    common.console.result(document, lambda: _show(common, document), following)


def _compare(common: Common, tables: "Tables", options: "SolveOptions", workers: "Workers") -> dict[str, Any]:
    from smoe_cli.placing.comparing import compare_methods, held_out_trace

    trace = held_out_trace(common.dir, tables)
    with common.console.progress("comparing", len(tables.layers), "layers") as advance:
        return compare_methods(tables, trace, options, workers, advance)


def _show_comparison(common: Common, document: dict[str, Any]) -> None:
    part = "heldout" if "heldout" in document["methods"]["contiguous"] else "validation"
    digits = {"lar": 3, "fanout": 2, "load_imbalance": 2}
    rows = [
        [method, f"{found['searched']:.3f} {found[part]['objective']:.3f}"]
        + [f"{found['fit'][name]:.{places}f} {found[part][name]:.{places}f}" for name, places in digits.items()]
        + [f"{found['seconds']:.1f}"]
        for method, found in sorted(document["methods"].items(), key=lambda item: float(item[1]["searched"]))
    ]
    title = (
        f"{document['goal']} on EP{document['ep']}, mean of {document['layers']} layers, on fit and {part} rows, exact "
        f"shuffle of {document['batch']} rows; the objective (lower is better) as searched, then on {part} rows"
    )
    common.console.table(title, ["method", "objective", *digits, "seconds"], rows)
    for method, reason in document["skipped"].items():
        common.console.line(f"skipped: {method} ({reason})")
    if part == "validation":
        common.console.line("no held-out rows lie beside the tables; smoe evaluate judges a placement on others.")


def _gain(found: dict[str, Any], digits: int) -> str:
    error = found["validation_two_standard_errors"]
    return f"{found['validation_gain']:+.{digits}f} ± {'?' if error is None else f'{error:.{digits}f}'}"


def _show_quality(common: Common, certificates: list[dict[str, Any]]) -> None:
    """How far from the best there is, for layers of which something is known."""
    gaps = [known["gap"] for known in certificates if known["gap"] is not None]
    if gaps:
        common.console.line(f"gap to the best possible objective: at most {mean(gaps):.1%}, mean of {len(gaps)} layers")
    pairs = [(known["pairs"], known["pairs_bound"]) for known in certificates if known["pairs_bound"] is not None]
    if pairs:
        kept, most = (mean(side) for side in zip(*pairs, strict=True))
        common.console.line(f"co-activation kept inside ranks: {kept:.3f}, of at most {most:.3f} possible")


def _show(common: Common, document: dict[str, Any]) -> None:
    from smoe_profiles.table_rows import BLOCK_ROWS, MIN_BLOCKS

    timed = document["goal"] == Goal.TIME
    digits, unit = (2, " us") if timed else (4, "")
    rows = []
    for layer in document["layers"]:
        least = layer["certificate"]["value"]
        rows.append(
            [
                str(layer["layer"]),
                f"{layer['stages'][0]['objective']:.{digits}f}",
                f"{layer['objective']:.{digits}f}",
                str(layer["origin"]),
                "?" if least is None else f"{least:.{digits}f}",
                _gain(layer, digits),
            ]
        )
    columns = ["layer", "contiguous", "placed", "found by", "at best", "validation gain"]
    goal = f"{document['goal']}{', microseconds' if timed else ''}"
    common.console.table(f"{document['path']}: {goal} on the fit rows, lower is better", columns, rows)
    common.console.line("at best: no placement can be lower; ?: not known")
    size = f"blocks of {document['validation_block_rows']:,} rows"
    judged = f"{document['validation_blocks']} validation {size}, ± two standard errors"
    common.console.line(f"validation gain: contiguous less placed{' in us' if timed else ''}, {judged}")
    if times := document["validation_microseconds"]:
        common.console.line(
            f"predicted layer time ({document['mode']}, {document['hardware']}), validation {size} "
            f"as batches of {BLOCK_ROWS:,}: "
            f"{times['placed']:.1f} us, contiguous {times['contiguous']:.1f} us"
        )
    _show_quality(common, [layer["certificate"] for layer in document["layers"]])
    sizes, chosen = document["runtime_bytes"], Counter(document["predictors"]).most_common()
    preferred = ", ".join(f"{name} in {count}" for name, count in chosen)
    common.console.line(f"predictors preferred on validation: {preferred} of {len(document['layers'])} layers")
    common.console.line(
        f"run-time tables: {sum(sizes.values()) / 1e6:.1f} MB, of which the rank of every token id "
        f"{sizes['token_rank'] / 1e6:.1f} MB and its scores {sizes['token_scores'] / 1e6:.1f} MB"
    )
    for one in document["mixes_tried"]:
        shares = ", ".join(f"{name} {share:.2f}" for name, share in one["mix"].items())
        common.console.line(f"mix {shares}: gain {one['mean']:.4f} in the mean of sources, {one['worst']:.4f} at worst")
    by_source = document["gains_by_source"] or {}
    if len(by_source) > 1:
        listed = ", ".join(f"{name} {gain:+.4f}" for name, gain in by_source.items())
        common.console.line(f"validation gain by source: {listed}")
    if document["start"]:
        moves = sum(layer["moved"] for layer in document["layers"])
        common.console.line(f"{moves} experts moved from the placement it stays near, in all layers")
    if document["redundant"]:
        saved = mean(layer["validation_gain_of_copies"] for layer in document["layers"])
        common.console.line(
            f"{document['redundant']} extra slots a rank, {document['extra_slots']:+.1%} expert slots: "
            f"{saved:+.4f} on validation blocks over no copies, mean over layers"
        )
    gain = f"{_gain(document, digits)}{unit}"
    if document["confirmed"]:
        common.console.line(f"confirmed on validation blocks, mean over layers: {gain} (two standard errors)")
        _show_fanout(common, document)
    elif document["validation_two_standard_errors"] is None or document["validation_blocks"] < MIN_BLOCKS["validation"]:
        common.console.line(
            "nothing can be confirmed on so few validation rows: record more text; the placement is contiguous."
        )
    else:
        common.console.line(
            f"nothing to gain: {gain} on validation blocks is not confirmed; the placement is contiguous."
        )


def _show_fanout(common: Common, document: dict[str, Any]) -> None:
    """What a goal that weighs other things may have cost."""
    fanout = document["validation_fanout"]
    if fanout and fanout["placed"] > fanout["contiguous"]:
        gained = "predicted time" if document["goal"] == Goal.TIME else "load or locality"
        common.console.line(
            f"tokens reach more ranks than with contiguous experts ({fanout['placed']:.2f} for "
            f"{fanout['contiguous']:.2f}): this goal trades that for {gained}; --goal fanout does not"
        )
