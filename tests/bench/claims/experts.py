"""Which experts an id uses: precision, F1, hotness, kurtosis."""

from collections.abc import Iterator

import numpy as np
from scipy.sparse import csr_array

from smoe_profiles.inspection.concentration import excess_kurtosis
from smoe_solvers.expert_prediction import (
    context_numbers,
    cumulative_hotness,
    expert_counts,
    hottest_sets,
    likely_sets,
    mean_by_type,
    score_rows,
    score_types,
)
from tests.bench.claims.data import NAMES, SPLITS, TRIPLES, Bench, Ints, Line, Part, Routing, drawn_part, shares
from tests.bench.claims.local import triples

V2_LITE_LAYERS = (1, 6, 11, 16, 21, 26)


def topk(bench: Bench) -> Iterator[Line]:
    """Definitions of precision, recall and F1 of the experts foretold from the id alone, 25 % of sequences to fit."""
    for name in ("law", "intent", "gen", "ref-deepseek-v2"):
        routing = bench.routing(name)
        found: dict[str, list[tuple[float, float, float]]] = {}
        coverage = []
        for seed in range(SPLITS):
            part = drawn_part(routing, 0.25, seed)
            coverage.append(part.coverage)
            for layer in range(len(routing.experts)):
                for what, scores in definitions(part, layer).items():
                    found.setdefault(what, []).append(scores)
        where = f"{NAMES[name]}; 25/75 by sequence, {SPLITS} draws, {np.mean(coverage):.0%} of rows of a known id"
        for what, each in found.items():
            yield where, what, shares(np.nanmean(each, axis=0))


def definitions(part: Part, layer: int) -> dict[str, tuple[float, float, float]]:
    """Precision, recall, F1 of one layer by every definition tried; ids never seen predict nothing and are left out."""
    routing, top_k = part.routing, part.routing.top_k
    experts = routing.experts[layer]
    index, true = part.index[~part.fit], experts[~part.fit]
    known = expert_counts(part.index[part.fit], experts[part.fit], part.ids, routing.num_experts)
    others = expert_counts(index, true, part.ids, routing.num_experts)
    hot, fewer = hottest_sets(known, top_k), top_k - max(1, top_k // 3)
    by_row = score_rows(hot, index, true)
    by_type = np.nanmean(mean_by_type(np.nan_to_num(by_row.f1), index, part.ids)[known.sum(axis=1) > 0])
    often = (others.sum(axis=1) >= 8 * top_k)[:, None]
    return {
        "by row: K hottest against the row's K": by_row.means(),
        "by token id: the same, mean over ids": (by_type, by_type, by_type),
        f"by row: {fewer} hottest against the row's K": score_rows(hottest_sets(known, fewer), index, true).means(),
        "by row: experts of half the id's rows against the row's K": score_rows(
            likely_sets(known, top_k, 0.5), index, true
        ).means(),
        "by token id: K hottest against K hottest of the others": _types(hot, hottest_sets(others, top_k)),
        "by token id: K hottest against all it uses elsewhere": _types(hot, others > 0),
        "by token id of 8 rows or more: the same": _types(hot & often, (others > 0) & often),
        "by token id of 8 rows or more: against experts of a fifth of its rows or more": _types(
            hot & often, likely_sets(others, top_k, 0.2) & often
        ),
    }


def _types(predicted: Ints, used: Ints) -> tuple[float, float, float]:
    return score_types(predicted, used).take(used.any(axis=1)).means()


def hotness(bench: Bench) -> Iterator[Line]:
    """F1 of the K hottest by layer, and how much of an id's use lies on them, 20 % of sequences to fit."""
    for name in ("law", "intent", "gen", "ref-deepseek-v2"):
        routing = bench.routing(name)
        wanted = {"gen": (0, 5, 10, 15, 20, 23), "ref-deepseek-v2": routing.layer_ids}.get(name, V2_LITE_LAYERS)
        parts = [drawn_part(routing, 0.2, seed) for seed in range(SPLITS)]
        each = [[f1_quantiles(part, routing.layer_ids.index(number)) for part in parts] for number in wanted]
        by_layer = np.mean(each, axis=1)
        covered = np.mean([part.coverage for part in parts])
        where = (
            f"{NAMES[name]}; 20/80 by sequence, mean of {SPLITS} draws, {covered:.0%} of rows of a known id; "
            f"layers {'/'.join(map(str, wanted))}"
        )
        for column, what in enumerate(F1_FIGURES):
            yield where, what, shares(by_layer[:, column], "/")


F1_FIGURES = (
    "F1 by row, median",
    "F1 by row, P25",
    "F1 by row, mean",
    "F1 by token id (K hottest of each side), median",
    "F1 by token id (K hottest of each side), P25",
    "cumulative hotness of the K hottest, median over ids of all rows",
    "the same, ids of two rows or more",
    "the same, weighted by traffic, mean",
    "hottest expert beyond the K, median over ids of two rows or more",
)


def f1_quantiles(part: Part, layer: int) -> list[float]:
    """F1_FIGURES of one layer; ids never seen are left out."""
    routing, top_k = part.routing, part.routing.top_k
    experts = routing.experts[layer]
    index, true = part.index[~part.fit], experts[~part.fit]
    known = expert_counts(part.index[part.fit], experts[part.fit], part.ids, routing.num_experts)
    others = expert_counts(index, true, part.ids, routing.num_experts)
    hot = hottest_sets(known, top_k)
    row = score_rows(hot, index, true).f1
    both = (known.sum(axis=1) > 0) & (others.sum(axis=1) > 0)
    kind = score_types(hot, hottest_sets(others, top_k)).f1[both]
    total = known + others
    hotness_of = cumulative_hotness(total, top_k)
    twice = total.sum(axis=1) >= 2 * top_k
    beyond = cumulative_hotness(total, top_k + 1) - hotness_of
    return [
        float(np.nanmedian(row)),
        float(np.nanquantile(row, 0.25)),
        float(np.nanmean(row)),
        float(np.median(kind)),
        float(np.quantile(kind, 0.25)),
        float(np.median(hotness_of)),
        float(np.median(hotness_of[twice])),
        float(np.average(hotness_of, weights=total.sum(axis=1))),
        float(np.median(beyond[twice])),
    ]


def kurtosis(bench: Bench) -> Iterator[Line]:
    """Share of token ids whose activation counts over the experts have a kurtosis above 8."""
    for name in ("law", "intent", "gen", "ref-deepseek-v2", "ref-mixtral"):
        routing = bench.routing(name)
        numbers, ids = context_numbers([routing.token])
        shuffled = np.random.default_rng(0).permutation(numbers)
        where = f"{NAMES[name]}; all rows, mean over layers; E {routing.num_experts}, K {routing.top_k}"
        for least in (1, 2, 8, 32):
            real, chance = (
                np.mean([_above_eight(_counts_of(index, ids, routing, n), least, routing.top_k)
                         for n in range(len(routing.experts))], axis=0)
                for index in (numbers, shuffled)
            )  # fmt: skip
            what = f"ids of {least} rows or more: share above 8, Pearson / excess; median Pearson; ids"
            yield where, what, f"{shares(real[:2])}; {real[2]:.1f}; {int(real[3]):,}"
            what = "the same with ids dealt out at random"
            yield where, what, f"{shares(chance[:2])}; {chance[2]:.1f}"
    for model, domains in TRIPLES.items():
        for layer in (0, 7, 15):
            table, top_k = triples(model, domains[-1], layer)
            rows = _above_eight(csr_array(table), 8, top_k)
            where = f"{model}, {domains[-1]}, layer {layer}; E {table.shape[1]}, K {top_k}"
            what = "ids of 8 rows or more: share above 8, Pearson / excess; median Pearson; ids"
            yield where, what, f"{shares(rows[:2])}; {rows[2]:.1f}; {int(rows[3]):,}"


def _counts_of(index: Ints, ids: int, routing: Routing, layer: int) -> csr_array:
    return csr_array(expert_counts(index, routing.experts[layer], ids, routing.num_experts))


def _above_eight(table: csr_array, least: int, top_k: int) -> list[float]:
    """Of ids with `least` rows: share above 8 by Pearson's kurtosis and by Fisher's (less 3), Pearson's median, ids."""
    excess = excess_kurtosis(table[np.asarray(table.sum(axis=1)) >= least * top_k])
    excess = excess[~np.isnan(excess)]
    return [float((excess + 3 > 8).mean()), float((excess > 8).mean()), float(np.median(excess)) + 3, len(excess)]
