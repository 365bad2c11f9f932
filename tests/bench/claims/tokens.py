"""The token with the tokens before it, and token ids never seen."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from smoe_cli.placement import Placement
from smoe_profiles.models import find_model, input_embedding
from smoe_profiles.neighbours import nearest_neighbours
from smoe_profiles.split import PARTS
from smoe_profiles.tensors import as_float32
from smoe_solvers.choices import Assignment, Predictor
from smoe_solvers.expert_prediction import (
    context_numbers,
    expected_activations,
    tokens_before,
    top_k_hits,
)
from smoe_solvers.figures import home_by_scores, home_without_shuffle, measure
from smoe_solvers.predictors import (
    Context,
    LayerPredictors,
    TokenChoice,
    local_counts,
    occurrences,
    popularity_by_rank,
    quantise,
    rank_counts,
    score,
    token_table,
)
from tests.bench.claims.data import BATCH, DATA, NAMES, PSEUDO, SPLITS, Bench, Ints, Line, Routing, held_of, shares
from tests.bench.claims.next_layer import placed_labels
from tests.bench.claims.routes import open_placed


def bigram(bench: Bench) -> Iterator[Line]:
    """Experts given (previous token, token), and one token more, backing off to the token, against the token alone."""
    for name in ("law", "intent", "gen", "gen_b", "ref-deepseek-v2", "ref-mixtral"):
        routing = bench.routing(name)
        contexts = token_contexts(routing)
        fit, held = ~routing.held, routing.held
        known = [float(np.isin(numbers[held], numbers[fit]).mean()) for numbers in contexts]
        counts = " / ".join(f"{len(np.unique(numbers[fit])):,}" for numbers in contexts)
        where = f"{held_of(name)}; id / with 1 / with 2 ids before: {counts} contexts, {shares(known)} of rows seen"
        starts = choose_starts(routing, contexts)
        ep = 4 if name == "ref-mixtral" else 8
        placement, layers = open_placed(bench.placed(bench.fitted(name), ep))
        labels = placed_labels(routing, placement)
        found = np.mean(
            [
                [
                    _context_figures(routing, contexts[:depth], starts[:depth], layer, placement, layers, labels)
                    for depth in (1, 2, 3)
                ]
                for layer in range(len(routing.experts))
            ],
            axis=0,
        )
        yield where, "activations among the K most expected; no quota", shares(found[:, 0])
        yield where, f"lar, EP{ep}, placed+shuffled, rule", shares(found[:, 1])
        yield where, "the same mixed with the layers before (fused, weights as fitted for the id)", shares(found[:, 2])


def token_contexts(routing: Routing) -> list[Ints]:
    """The token, with the one before it, with the two before it: numbers of distinct contexts, [N] each."""
    columns = [routing.token, *(tokens_before(routing.token, routing.sequence, back) for back in (1, 2))]
    return [context_numbers(columns[: depth + 1])[0] for depth in range(3)]


def choose_starts(routing: Routing, contexts: list[Ints]) -> list[float]:
    """Rows of the coarser context that a context starts with: chosen one after another, on validation rows."""
    chosen: list[float] = []
    seen = ~routing.held
    fit = (routing.part == PARTS.index("fit"))[seen]
    layers = routing.experts[:: max(1, len(routing.experts) // 4), seen]
    for depth in range(len(contexts)):
        numbers = [context[seen] for context in contexts[: depth + 1]]
        options = [[*chosen, start] for start in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)]
        hits = [
            sum(
                top_k_hits(expected_activations(numbers, one, fit, routing.num_experts, option), one[~fit]).sum()
                for one in layers
            )
            for option in options
        ]
        chosen = options[int(np.argmax(hits))]
    return chosen


def _context_figures(
    routing: Routing,
    contexts: list[Ints],
    starts: list[float],
    layer: int,
    placement: Placement,
    layers: list[LayerPredictors],
    labels: Ints,
) -> tuple[float, float, float]:
    """Held-out: activations among the K most expected; lar of these scores; lar mixed with the layers before."""
    experts, held = routing.experts[layer], routing.held
    expected = expected_activations(contexts, experts, ~held, routing.num_experts, starts)
    hits = top_k_hits(expected, experts[held]).sum() / experts[held].size
    hosts = placement.hosts[layer]
    scores = quantise(expected @ hosts, routing.top_k)
    before = [labels[layer - back, held] if layer >= back else None for back in (2, 1)]
    own_row = replace(layers[layer], token=scores)
    mixed = score(own_row, Predictor.FUSED, Context(np.arange(len(scores)), *before), hosts, routing.top_k)
    counts = local_counts(experts[held], hosts)
    return float(hits), rule_lar(scores, counts), rule_lar(mixed, counts)


def rule_lar(scores: Ints, counts: Ints) -> float:
    return measure(counts, home_by_scores(scores, BATCH, Assignment.RULE), BATCH, scores).lar


def unseen(bench: Bench) -> Iterator[Line]:
    """A fifth of the vocabulary is taken out of the fitted rows: its rows from the nearest neighbour or popularity."""
    for name in ("ref-deepseek-v2", "ref-mixtral", "tiny-deepseek"):
        routing = bench.routing(name)
        model = find_model(str(DATA / "models" / name) if name.startswith("ref-") else name)
        shard, tensor = input_embedding(model)
        embedding = as_float32(tensor, shard.read(tensor))
        for ep in (4,) if name == "ref-mixtral" else (4, 8):
            placement, _ = open_placed(bench.placed(bench.fitted(name), ep))
            rows, figures = _unseen_draw(routing, embedding, placement, np.zeros(routing.vocab, np.bool_))
            where = f"{held_of(name)}, EP{ep}, placed; rows of ids the fitted rows really lack ({rows})"
            yield where, UNSEEN_FIGURES[0], shares(figures[:3])
            draws = [_unseen_draw(routing, embedding, placement, _fifth(routing.vocab, seed)) for seed in range(SPLITS)]
            means = np.mean([figures for _, figures in draws], axis=0)
            wins = sum(figures[0] > figures[1] for _, figures in draws)
            where = f"{NAMES[name]}; a fifth of the vocabulary taken out, {SPLITS} draws, EP{ep}, placed"
            found = f"{shares(means[:3])} ({np.mean([rows for rows, _ in draws]):.0f} rows; neighbour better in {wins})"
            yield where, UNSEEN_FIGURES[0], found
            yield where, UNSEEN_FIGURES[1], shares(means[3:])


UNSEEN_FIGURES = (
    "lar of the rows of ids not fitted on: neighbour / popularity / home of no shuffle",
    "lar of all held-out rows: neighbour / popularity / nothing taken out",
)


def _fifth(vocab: int, seed: int) -> Ints:
    """A fifth of all ids, [V] bool."""
    taken = np.zeros(vocab, np.bool_)
    taken[np.random.default_rng(seed).choice(vocab, vocab // 5, replace=False)] = True
    return taken


def _unseen_draw(routing: Routing, embedding: Any, placement: Placement, taken: Ints) -> tuple[int, list[float]]:
    """Held-out rows of ids not fitted on when `taken` [V] are left out, and UNSEEN_FIGURES, mean over layers."""
    held, fit = routing.take(routing.held), routing.take(~routing.held)
    kept = fit.take(~taken[fit.token])
    seen = np.bincount(kept.token, minlength=routing.vocab) > 0
    mine = taken[held.token] if taken.any() else ~seen[held.token]
    neighbour = nearest_neighbours(embedding, seen)
    own = nearest_neighbours(embedding, np.bincount(fit.token, minlength=routing.vocab) > 0)
    cases = ((kept, neighbour, "neighbour"), (kept, neighbour, "popularity"), (fit, own, "neighbour"))
    found = []
    for index in range(len(routing.experts)):
        counts = local_counts(held.experts[index], placement.hosts[index])
        homes = [
            home_by_scores(token_scores(*case, index, placement)[held.token], BATCH, Assignment.RULE) for case in cases
        ]
        homes.insert(2, home_without_shuffle(len(mine), placement.num_ranks, BATCH))
        at_home = np.stack([counts[np.arange(len(mine)), home] for home in homes]) / routing.top_k
        found.append([*at_home[:3, mine].mean(axis=1), *at_home[[0, 1, 3]].mean(axis=1)])
    return int(mine.sum()), list(np.mean(found, axis=0))


def token_scores(rows: Routing, neighbour: Ints, rule: str, layer: int, placement: Placement) -> Ints:
    """The token table of some rows, [V, G] u8."""
    hosts, experts = placement.hosts[layer], rows.experts[layer]
    flat = (np.repeat(rows.token, rows.top_k), experts.reshape(-1), np.ones(experts.size, np.int64))
    activations, seen = rank_counts(flat, rows.vocab, hosts), occurrences(flat, rows.vocab, rows.top_k)
    popularity = np.bincount(experts.reshape(-1), minlength=rows.num_experts)
    share = popularity_by_rank(popularity, hosts)
    table = token_table(activations, seen, share, neighbour, rows.top_k, TokenChoice(PSEUDO, rule))
    return quantise(table, rows.top_k)
