"""smoe evaluate: what a placement and a shuffle are worth on held-out tokens."""

import math
from typing import Annotated, Any

import typer

from smoe_cli.console import Console
from smoe_cli.options import Common, HashesOption, PlacementOption
from smoe_solvers.choices import Predictor

JUDGED = "placed+shuffled"


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
    fail_under: Annotated[
        list[str] | None, typer.Option("--fail-under", help="lar=.45: exit 5 if placed+shuffled is below; repeatable.")
    ] = None,
    fail_over: Annotated[
        list[str] | None, typer.Option("--fail-over", help="remote_fanout=1.7: exit 5 if it is above; repeatable.")
    ] = None,
    hashes: HashesOption = False,
) -> None:
    """Measure a placement on held-out tokens in six states: writes evaluation-epG/ (replacing an older one)."""
    from pathlib import Path

    from smoe_cli.errors import CheckFailedError
    from smoe_cli.evaluation import measure_placement
    from smoe_cli.folder import CHECKPOINT, MAP, TABLES, TRACE, choose_placement, sibling
    from smoe_profiles.tables import open_tables
    from smoe_profiles.trace import open_trace

    under, over = _thresholds("--fail-under", fail_under or []), _thresholds("--fail-over", fail_over or [])
    predictors = predictor or [Predictor.TOKEN]
    chosen = choose_placement(common.dir, placement, hashes=hashes)
    document = measure_placement(
        chosen,
        open_tables(common.dir / TABLES, hashes=hashes),
        open_trace(Path(trace) if trace else common.dir / TRACE, hashes=hashes),
        predictors=predictors,
        batch=batch,
        max_tokens=max_tokens,
        console=common.console,
    )
    applied = any(sibling(chosen.path, kind).exists() for kind in (CHECKPOINT, MAP))
    following = None if applied else common.next(f"smoe regroup --placement {chosen.path.name}")
    common.console.result(document, lambda: show_states(common.console, document), following)
    judged = document["total"][JUDGED][predictors[0].value]["rule"]
    failures = [f"{name} is {judged[name]:.4f}, under {bound}" for name, bound in under.items() if judged[name] < bound]
    failures += [f"{name} is {judged[name]:.4f}, over {bound}" for name, bound in over.items() if judged[name] > bound]
    if failures:
        raise CheckFailedError(f"{JUDGED}, {predictors[0].value}, rule: {'; '.join(failures)}.")


def show_states(console: Console, document: dict[str, Any]) -> None:
    """One row a state: the mean over layers, by the served rule."""
    context = document["context"]
    rows = []
    for state, by_predictor in document["total"].items():
        for predictor, by_assignment in by_predictor.items():
            figures = by_assignment["rule"]
            label = state if predictor in ("none", "oracle") else f"{state} ({predictor})"
            names = ("lar", "fanout", "remote_fanout", "load_imbalance")
            rows.append([label, *(f"{figures[name]:.3f}" for name in names)])
    title = (
        f"{context['rows']:,} held-out tokens, EP {context['ranks']}, batches of {context['batch']}, "
        f"quota {context['quota']}; contiguous lar is 1/{context['ranks']} in expectation"
    )
    console.table(title, ["state", "lar", "fan-out", "remote fan-out", "load imbalance"], rows)


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
