"""smoe evaluate: what a placement and a shuffle are worth on held-out tokens."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from smoe_cli.console import Console
from smoe_cli.options import Common, HashesOption, PlacementOption
from smoe_solvers.choices import Mode, Predictor

SHUFFLING = (Mode.SPECULATIVE, Mode.DP_EP)
"""Ways to run a layer that move tokens, or whole requests, to the ranks of their experts."""


def evaluate(
    common: Common,
    trace: Annotated[
        str | None, typer.Option("--trace", help="Held-out rows to measure on; default: the folder's.")
    ] = None,
    placement: PlacementOption = None,
    predictor: Annotated[
        list[Predictor] | None, typer.Option("--predictor", help="Where scores come from; default: token; repeatable.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Tokens in a batch.")] = 1024,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Use the first so many rows.")] = None,
    mode: Annotated[
        Mode,
        typer.Option(
            "--mode",
            help="How the layer is run, for predicted times and --fail-*: tokens shuffled (speculative), requests "
            "routed (dp-ep), or neither.",
        ),
    ] = Mode.SPECULATIVE,
    hardware: Annotated[
        str, typer.Option("--hardware", help="nvlink-h200, pcie, ethernet, or a file of smoe bench.")
    ] = "nvlink-h200",
    requests: Annotated[
        Path | None,
        typer.Option("--requests", help="Arrivals and lengths as JSON lines; default: each held-out sequence is one."),
    ] = None,
    fail_under: Annotated[
        list[str] | None,
        typer.Option("--fail-under", help="lar=.45: exit 5 if it is below (placed+shuffled, or placed); repeatable."),
    ] = None,
    fail_over: Annotated[
        list[str] | None, typer.Option("--fail-over", help="remote_fanout=1.7: exit 5 if it is above; repeatable.")
    ] = None,
    hashes: HashesOption = False,
) -> None:
    """Measure a placement on held-out rows, in six states. Writes evaluation-epG/ and replaces an older one."""
    from smoe_cli.errors import CheckFailedError, UsageError
    from smoe_cli.evaluation.measuring import measure_placement
    from smoe_cli.folder import TABLES, TRACE, applied, can_regroup, choose_placement
    from smoe_cli.hardware import load_hardware
    from smoe_cli.placement import RUNTIME, read_placement
    from smoe_cli.runtime_file import preferred_predictors
    from smoe_profiles.tables import open_tables
    from smoe_profiles.trace import open_trace

    under, over = _thresholds("--fail-under", fail_under or []), _thresholds("--fail-over", fail_over or [])
    predictors = predictor or [Predictor.TOKEN]
    if requests and mode is not Mode.DP_EP:
        raise UsageError("--requests is read with --mode dp-ep only; add it.")
    chosen = choose_placement(common.dir, placement, hashes=hashes)
    measured = open_trace(Path(trace) if trace else common.dir / TRACE, hashes=hashes)
    document = measure_placement(
        chosen,
        open_tables(common.dir / TABLES, hashes=hashes),
        measured,
        predictors=predictors,
        batch=batch,
        max_tokens=max_tokens,
        arrivals=requests,
        hardware=load_hardware(hardware),
        console=common.console,
    )
    moved = not read_placement(chosen).contiguous
    regroup = moved and can_regroup(chosen.model, len(document["layers"])) and not applied(chosen)
    following = common.next("regroup" if regroup else "report", "--placement", chosen.path.name)
    notes = [
        _told_by_ids(document["context"]["unseen_tokens"], measured.has_token_ids),
        _preferred(preferred_predictors(chosen.record / RUNTIME), predictors),
    ]
    common.console.result(document, lambda: show(common.console, document, mode, notes), following)
    state, judge, judged = _judged(document, mode)
    failures = [f"{name} is {judged[name]:.4f}, under {bound}" for name, bound in under.items() if judged[name] < bound]
    failures += [f"{name} is {judged[name]:.4f}, over {bound}" for name, bound in over.items() if judged[name] > bound]
    if failures:
        raise CheckFailedError(f"{state}, {judge}, rule: {'; '.join(failures)}.")


def _judged(document: dict[str, Any], mode: Mode) -> tuple[str, str, dict[str, float]]:
    """What thresholds hold for: state, predictor and figures, the placement as it is run in this mode."""
    tree = document[mode] if mode is Mode.DP_EP else document
    state = "placed+shuffled" if mode in SHUFFLING else "placed"
    by_predictor = tree["total"][state]
    first = document["context"]["predictors"][0]
    predictor = first if first in by_predictor else next(iter(by_predictor))
    return state, predictor, by_predictor[predictor]["rule"]


def _told_by_ids(unseen: float, has_token_ids: bool) -> str:
    """How many rows the token table can say nothing of, and whether that is for want of ids."""
    if not has_token_ids:
        return "the trace has no token ids: the token predictor sends every row by popularity alone"
    return f"{unseen:.1%} of rows are ids that the tables never saw"


def _preferred(by_layer: Sequence[Predictor], measured: Sequence[Predictor]) -> str | None:
    """A hint where validation preferred, in most layers, a predictor that was not measured."""
    others = Counter(one for one in by_layer if one not in measured)
    if Predictor.SELECTED in measured or 2 * others.total() <= len(by_layer):
        return None
    listed = ", ".join(f"{name} in {count}" for name, count in others.most_common())
    return f"validation preferred {listed} of {len(by_layer)} layers: --predictor selected measures each layer's own"


def show(console: Console, document: dict[str, Any], mode: Mode, notes: Sequence[str | None]) -> None:
    """What a reader of this way of running wants to see. notes: on the scores that rows are shuffled by."""
    if mode is Mode.DP_EP:
        show_requests(console, document)
    elif mode is Mode.SPECULATIVE:
        show_tokens(console, document)
    else:
        show_states(console, document, mode)
    if "travel" in document and mode is not Mode.DP_EP:
        _show_links(console, document, mode)
    if mode not in SHUFFLING:
        return
    _show_travel(console, document)
    for note in notes:
        if note:
            console.line(note)
    console.line("by layer, phase, source and token frequency, and experts: --json")


def show_tokens(console: Console, document: dict[str, Any]) -> None:
    """The states, what each predictor knows, and what travels."""
    show_states(console, document)
    for predictor in document["context"]["predictors"]:
        figures = document["total"]["placed+shuffled"][predictor]["rule"]
        named = document["experts"]["total"].get(predictor, {}).get("traffic", {})
        experts = f", expert F1 {named['f1']:.2f}" if "f1" in named else ""
        console.line(
            f"{predictor}: best rank {figures['rank_accuracy']:.1%} right, "
            f"{figures['oracle_share']:.1%} of the oracle's lar{experts}"
        )


def show_requests(console: Console, document: dict[str, Any]) -> None:
    """The states of attention-DP: each rank holds its own requests' rows."""
    context = document["context"]
    requests = context["requests"]
    title = (
        f"{requests['count']:,} requests ({requests['from']}) of {requests['rows']:,} rows, "
        f"EP {context['ranks']}, one a rank in each round; times of batches of {context['batch']}"
    )
    total = document["dp-ep"]["total"]
    balancer = document["load_balancer"][Mode.DP_EP]["total"]
    _show_table(console, title, total, balancer, context["hardware"], Mode.DP_EP)
    at_once = {
        router: total[state][router]["exact"]["lar"]
        for state, router in (("placed+shuffled", "token"), ("oracle", "oracle"))
    }
    console.line(
        "lar with a round's requests placed at once: {token:.3f} (token), {oracle:.3f} (oracle)".format(**at_once)
    )
    if "routing" in requests:
        console.line("the file holds no routing: held-out sequences in turn, cut or repeated")


def _show_travel(console: Console, document: dict[str, Any]) -> None:
    """What travels in both ways of running."""
    first = document["context"]["predictors"][0]
    total, routing = document["total"], document["dp-ep"]["total"]
    plain = total["contiguous"]["none"]["rule"]["wire_rows"]["sp-ep"]
    speculative = total["placed+shuffled"][first]["rule"]["wire_rows"]["speculative"]
    unrouted = routing["contiguous"]["none"]["rule"]["wire_rows"]["dp-ep"]
    routed = routing["placed+shuffled"]["token"]["rule"]["wire_rows"]["dp-ep"]
    console.line(
        f"rows between ranks in all exchanges of a layer, a token: {plain:.2f} as it is,\n"
        f"{speculative:.2f} speculative ({first}); dp-ep {unrouted:.2f}, {routed:.2f} with requests routed"
    )


def _show_links(console: Console, document: dict[str, Any], mode: Mode) -> None:
    """What the dispatch of tokens travels, where the placement was made for ranks that are not equally far apart."""
    total, first = document["travel"]["total"], document["context"]["predictors"][0]
    what = "crossing" if "crossing" in total["placed"]["none"] else "travel"
    told = "rows to other nodes" if what == "crossing" else "cost of rows to other ranks, in units of the least"
    figures = [f"{total[state]['none'][what]:.3f} {state}" for state in ("contiguous", "load-balanced", "placed")]
    if mode is Mode.SPECULATIVE:
        figures.append(f"{total['placed+shuffled'][first][what]:.3f} placed+shuffled ({first})")
    console.line(f"{told}, a token: {', '.join(figures)}")


def show_states(console: Console, document: dict[str, Any], mode: Mode = Mode.SPECULATIVE) -> None:
    """One row a state: the mean over layers, by the served rule; without those that shuffle where the mode does not."""
    context = document["context"]
    title = (
        f"{context['rows']:,} held-out tokens, EP {context['ranks']}, batches of {context['batch']}, "
        f"quota {context['quota']}; contiguous lar is 1/{context['ranks']} in expectation"
    )
    total = document["total"]
    if mode is not Mode.SPECULATIVE:
        total = {state: total[state] for state in ("contiguous", "placed")}
    _show_table(console, title, total, document["load_balancer"]["total"], context["hardware"], mode)


def _show_table(
    console: Console, title: str, total: dict[str, Any], balancer: dict[str, Any], hardware: str | None, mode: Mode
) -> None:
    """One row a state and predictor, experts placed by load alone after contiguous ones.

    total: state -> predictor -> assignment -> figures; a state without a shuffle is timed as sp-ep beside speculative.
    """
    labelled = []
    for state, by_predictor in total.items():
        for predictor, by_assignment in by_predictor.items():
            label = state if predictor in ("none", "oracle") else f"{state} ({predictor})"
            labelled.append((label, by_assignment["rule"]))
    labelled.insert(1, ("load-balanced", balancer))
    rows = []
    for label, figures in labelled:
        names = ("lar", "fanout", "remote_fanout", "load_imbalance")
        times = figures.get("microseconds", {})
        time = times.get(mode, times.get(Mode.SP_EP))
        rows.append([label, *(f"{figures[name]:.3f}" for name in names), *([f"{time:.1f}"] if time else [])])
    columns = ["state", "lar", "fan-out", "remote fan-out", "load imbalance"]
    console.table(title, [*columns, "layer us"] if hardware else columns, rows)
    if hardware:
        compared = "; sp-ep where tokens stay" if mode is Mode.SPECULATIVE else ""
        console.line(f"layer us: predicted, {mode} on {hardware}{compared}")


def _thresholds(option: str, texts: list[str]) -> dict[str, float]:
    """`lar=.45` -> {"lar": 0.45}. Raises BadParameter for an unknown figure or a value that is no number."""
    known = (
        "lar",
        "fanout",
        "remote_fanout",
        "remote_fanout_busiest",
        "load_imbalance",
        "load_imbalance_batch",
        "token_imbalance",
    )
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            bound = float(value)
        except ValueError:
            bound = math.nan
        if name not in known or not math.isfinite(bound):
            raise typer.BadParameter(f"{text!r}: FIGURE=NUMBER with one of {', '.join(known)}.", param_hint=option)
        if name in found:
            raise typer.BadParameter(f"{name} is bounded twice; give each figure once.", param_hint=option)
        found[name] = bound
    return found
