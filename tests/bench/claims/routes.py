"""How many token-expert routes the tables foretell."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli.placement import Placement, layer_predictors, read_placement, read_runtime
from smoe_profiles.artefact import open_artefact
from smoe_solvers.expert_prediction import (
    expert_counts,
    hottest_sets,
    score_rows,
)
from smoe_solvers.predictors import (
    Context,
    LayerPredictors,
    local_counts,
    rank_labels,
    score,
)
from tests.bench.claims.data import TABLES_ONLY, Bench, Ints, Line, Part, Routing, held_of, part_by, share, shares


def routes(bench: Bench) -> Iterator[Line]:
    """Shares that "route prediction" may mean, on held-out rows, mean over layers."""
    for name in ("law", "intent", "gen", "ref-deepseek-v2", "ref-mixtral"):
        routing = bench.routing(name)
        part = part_by(routing, ~routing.held)
        hot = np.mean([hot_recall(part, layer, routing.top_k) for layer in range(len(routing.experts))])
        where = f"{held_of(name)}, {part.coverage:.0%} of held-out rows of a known id"
        yield where, "an activation's expert is among the id's K hottest", share(float(hot))
        for ep in (4,) if name == "ref-mixtral" else (4, 8):
            each = [
                [rank_shares(scores[predictor], counts) for predictor in TABLES_ONLY]
                for scores, counts in rank_scores(bench.placed(bench.fitted(name), ep), routing)
            ]
            total = bench.evaluated(bench.fitted(name), ep, bench.held(name))["placed+shuffled"]
            for predictor, found in zip(TABLES_ONLY, np.mean(each, axis=0), strict=True):
                figures = (total[predictor]["rank_accuracy"], *found, total[predictor]["oracle_share"])
                yield where, f"EP{ep}, {predictor}: {ROUTE_SHARES}", shares(figures)


ROUTE_SHARES = (
    "its rank is the one of most experts, ties to the lower / ties right / holds any / activations on it / "
    "lar over the oracle's, quota and rule"
)


def hot_recall(part: Part, layer: int, size: int) -> float:
    """Share of the other rows' activations on their id's `size` hottest experts; unseen ids count as misses."""
    routing = part.routing
    experts = routing.experts[layer]
    counts = expert_counts(part.index[part.fit], experts[part.fit], part.ids, routing.num_experts)
    return float(score_rows(hottest_sets(counts, size), part.index[~part.fit], experts[~part.fit]).recall.mean())


def open_placed(target: Path) -> tuple[Placement, list[LayerPredictors]]:
    artefact = open_artefact(target, "placement")
    placement, (arrays, metadata) = read_placement(artefact), read_runtime(artefact)
    return placement, [layer_predictors(arrays, metadata, index) for index in range(len(placement.layer_ids))]


def rank_scores(target: Path, routing: Routing) -> Iterator[tuple[dict[str, Ints], Ints]]:
    """Layer by layer, of the held-out rows: scores [N, G] by predictor, and n_g [N, G]."""
    placement, layers = open_placed(target)
    held = routing.take(routing.held)
    labels: list[Any] = [None, None]
    for index, layer in enumerate(layers):
        hosts = placement.hosts[index]
        counts = local_counts(held.experts[index], hosts)
        context = Context(held.token, *labels[-2:])
        yield {name: score(layer, name, context, hosts, routing.top_k) for name in TABLES_ONLY}, counts
        labels.append(rank_labels(held.experts[index], hosts))


def rank_shares(scores: Ints, counts: Ints) -> tuple[float, float, float]:
    """Of the best-scored rank: it holds most of the token's experts; it holds any; activations on it. No quota."""
    there = counts[np.arange(len(counts)), scores.argmax(axis=1)]
    return float((there == counts.max(axis=1)).mean()), float((there > 0).mean()), float(there.sum() / counts.sum())
