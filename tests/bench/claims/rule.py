"""The served rule against the exact assignment."""

from collections.abc import Iterator

import numpy as np

from smoe_cli.placement import Placement
from smoe_solvers.assignment import assign_exact, assign_rule
from smoe_solvers.figures import batches, quota
from smoe_solvers.predictors import (
    TokenChoice,
    local_counts,
    popularity_by_rank,
    quantise,
    token_table,
)
from smoe_solvers.redundancy import single_hosts
from tests.bench.claims.data import BATCH, NAMES, PSEUDO, TRIPLES, Bench, Ints, Line, Routing, share
from tests.bench.claims.local import triples
from tests.bench.claims.routes import open_placed
from tests.bench.claims.tokens import token_scores

SUM_FIGURES = (
    "rule / exact, all batches; batches below .99; worst batch: rows that prefer its most wanted rank over the quota, "
    "rule / exact"
)


def assignment(bench: Bench) -> Iterator[Line]:
    """The rule's sum of scores as a share of the exact one: of a whole trace, and of its worst batch by itself."""
    for name in NAMES:
        routing = bench.routing(name)
        known = routing.token < routing.vocab if name not in ("summary", "olmoe0") else routing.token < 0
        for ep in (4, 8):
            if routing.num_experts % ep:
                yield NAMES[name], f"EP{ep}", f"{routing.num_experts} experts do not divide"
                continue
            placements = list(placements_of(bench, name, routing, ep))
            kinds = {"token table": table_scores, "true routing": _true_scores}
            for kind, score in kinds.items() if known.any() else [("true routing", _true_scores)]:
                sums = [
                    batch
                    for placement in placements
                    for index in range(len(routing.experts))
                    for batch in rule_sums(score(routing, known, placement, index))
                ]
                yield f"{NAMES[name]}; EP{ep}, {kind}, held-out rows", SUM_FIGURES, _sums_text(sums)
    for model, domains in TRIPLES.items():
        for domain in domains:
            for ep in (4, 8):
                drawn = [_drawn_scores(model, domain, layer, ep) for layer in (0, 7, 15)]
                sums = [batch for scores in drawn for batch in rule_sums(scores)]
                where = f"{model}, {domain}; EP{ep}, token table, layers 0, 7, 15, rows drawn by the ids' frequency"
                yield where, SUM_FIGURES, _sums_text(sums)


def _sums_text(sums: list[tuple[float, float, float]]) -> str:
    """sums: of each batch, what `rule_sums` gives."""
    crowding, served, exact = np.array(sums).T
    ratio = served / exact
    worst = int(ratio.argmin())
    below = f"{(ratio < 0.99).sum()} of {len(ratio)}"
    return f"{served.sum() / exact.sum():.4f}; {below}; {crowding[worst]:.1f}, {share(ratio[worst])}"


def placements_of(bench: Bench, name: str, routing: Routing, ep: int) -> Iterator[Placement]:
    """Contiguous, and the one smoe finds where tables can be built."""
    layers, experts = len(routing.experts), routing.num_experts
    flat = np.tile((np.arange(experts) // (experts // ep)).astype(np.int32), (layers, 1))
    yield Placement.of_ranks(routing.layer_ids, flat, ep)
    if name not in ("summary", "olmoe0", "qwen"):
        yield open_placed(bench.placed(bench.fitted(name), ep))[0]


def table_scores(routing: Routing, known: Ints, placement: Placement, index: int) -> Ints:
    """A layer's scores of the held-out rows by a table of the others, [N, G] u8."""
    nobody = np.full(routing.vocab, routing.vocab)
    table = token_scores(routing.take(~routing.held & known), nobody, "popularity", index, placement)
    return table[routing.token[routing.held & known]]


def _true_scores(routing: Routing, known: Ints, placement: Placement, index: int) -> Ints:
    """The oracle's, [N, G] u8."""
    held = routing.held & known if known.any() else routing.held
    return quantise(local_counts(routing.experts[index][held], placement.hosts[index]), routing.top_k)


def _drawn_scores(model: str, domain: str, layer: int, ep: int) -> Ints:
    """Eight batches of ids drawn by their frequency, scored by the domain's own counts. [8 * 1024, G] u8."""
    table, top_k = triples(model, domain, layer)
    rows = table.sum(axis=1)
    token = np.random.default_rng(layer).choice(len(rows), 8 * BATCH, p=rows / rows.sum())
    hosts = single_hosts(np.arange(table.shape[1]) // (table.shape[1] // ep), ep)
    by_rank = (table @ hosts).astype(np.float64)
    share_of = popularity_by_rank(table.sum(axis=0), hosts)
    nobody = np.full(len(rows), len(rows))
    scored = token_table(by_rank, rows / top_k, share_of, nobody, top_k, TokenChoice(PSEUDO, "popularity"))
    return quantise(scored, top_k)[token]


def rule_sums(scores: Ints) -> Iterator[tuple[float, float, float]]:
    """Of each batch: rows that prefer the most wanted rank, over the quota; the rule's sum of scores; the exact one.

    scores: [N, G] u8.
    """
    for part in batches(len(scores), BATCH):
        mine = scores[part].astype(np.uint8)
        rows, most = np.arange(len(mine)), quota(len(mine), mine.shape[1])
        served, exact = (
            mine[rows, place].sum(dtype=np.int64) for place in (assign_rule(mine, most), assign_exact(mine, most))
        )
        yield np.bincount(mine.argmax(axis=1)).max() / most, float(served), float(exact)
