"""The next layer from the layers before."""

from collections.abc import Iterator

import numpy as np

from smoe_cli.placement import Placement
from smoe_solvers.expert_prediction import (
    ngram_guess,
)
from smoe_solvers.predictors import (
    rank_labels,
)
from tests.bench.claims.data import Bench, Ints, Line, Routing, held_of, shares
from tests.bench.claims.routes import open_placed

LEAST = 2
HISTORY = (1, 2, 3, 4, 5)


def ngrams(bench: Bench) -> Iterator[Line]:
    """The label of a layer from those of the n layers before, n = 1..5: right, confident, and hitting the token's K."""
    for name in ("law", "intent", "summary", "gen", "gen_b", "ref-deepseek-v2", "ref-mixtral"):
        routing = bench.routing(name)
        orders = [order for order in HISTORY if order < len(routing.experts)]
        where = (
            f"{held_of(name)}, the {len(routing.layer_ids) - orders[-1]} layers with {orders[-1]} before them, "
            f"n = {', '.join(map(str, orders))}"
        )
        top = routing.experts[:, :, 0]
        yield from _ngram_lines(where, f"first expert of {routing.num_experts}", routing, top, orders)
        if name in ("summary", "gen_b"):
            continue
        placement, _ = open_placed(bench.placed(bench.fitted(name), 4))
        labels = placed_labels(routing, placement).astype(np.int64)
        yield from _ngram_lines(where, "rank of most experts, EP4, placed", routing, labels, orders)


def placed_labels(routing: Routing, placement: Placement) -> Ints:
    """The rank that holds most of each row's experts, [L, N] u8."""
    pairs = zip(routing.experts, placement.hosts, strict=True)
    return np.stack([rank_labels(experts, hosts) for experts, hosts in pairs])


def _ngram_lines(where: str, what: str, routing: Routing, labels: Ints, orders: list[int]) -> Iterator[Line]:
    """labels: [L, N]. The same layers are foretold for every n."""
    fit = ~routing.held
    right, sure, closed, hit = ([[] for _ in orders] for _ in range(4))  # type: tuple[list[list[float]], ...]
    for layer in range(orders[-1], len(labels)):
        true, experts = labels[layer][~fit], routing.experts[layer][~fit]
        for number, order in enumerate(orders):
            history = np.ascontiguousarray(labels[layer - order : layer].T)
            guess = ngram_guess(history, labels[layer], fit, LEAST)
            right[number].append(float((guess.label == true).mean()))
            sure[number].append(float(guess.confidence.mean()))
            hit[number].append(float((experts == guess.label[:, None]).any(axis=1).mean()))
            closed[number].append(_seen_share(history[fit], labels[layer][fit]))
    yield where, f"{what}: right, held-out", shares(np.mean(right, axis=1))
    if "expert" in what.split(" of ")[0]:
        yield where, f"{what}: among the token's K, held-out", shares(np.mean(hit, axis=1))
    yield where, f"{what}: confidence on held-out rows", shares(np.mean(sure, axis=1))
    yield where, f"{what}: confidence on the fitted rows themselves, no back-off", shares(np.mean(closed, axis=1))


def _seen_share(history: Ints, label: Ints) -> float:
    """Share of rows that their context's commonest label fits, on the very rows it was counted from."""
    twice, labels = np.concatenate([history, history]), np.concatenate([label, label])
    fit = np.arange(len(twice)) < len(history)
    return float(ngram_guess(twice, labels, fit, 1).confidence.mean())
