"""The published claims (arXiv 2503.04398), each beside its measured counterpart, as one table. `make reproduce`.

    python tests/bench/reproduce.py [CLAIM ...] [--keep DIR]

Data: ../shared/data, or SMOE_DATA. Every smoe command that is run is written to standard error. --keep keeps the
working folders and uses what is there. Axes: L MoE layers, N rows, K experts a token, E experts, G ranks, V ids.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from smoe_cli.placement import Placement, layer_predictors, read_placement, read_runtime
from smoe_profiles.artefact import open_artefact
from smoe_profiles.inspection.concentration import excess_kurtosis
from smoe_profiles.models import find_model, input_embedding
from smoe_profiles.neighbours import nearest_neighbours
from smoe_profiles.split import PARTS
from smoe_profiles.tensors import as_float32
from smoe_profiles.trace import Trace, open_trace, to_numpy
from smoe_solvers.assignment import _exchange_pass, _regret_rounds, assign_exact
from smoe_solvers.choices import Assignment, Predictor
from smoe_solvers.expert_prediction import (
    context_numbers,
    cumulative_hotness,
    expected_activations,
    expert_counts,
    hottest_sets,
    likely_sets,
    mean_by_type,
    ngram_guess,
    score_rows,
    score_types,
    tokens_before,
    top_k_hits,
)
from smoe_solvers.figures import batches, home_by_scores, home_without_shuffle, measure, quota
from smoe_solvers.predictors import (
    Context,
    LayerPredictors,
    TokenChoice,
    local_counts,
    occurrences,
    popularity_by_rank,
    quantise,
    rank_counts,
    rank_labels,
    score,
    token_table,
)
from smoe_solvers.redundancy import single_hosts

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("SMOE_DATA", ROOT.parent / "shared/data")).resolve()
BATCH = 1024
TABLES_ONLY = (Predictor.TOKEN, Predictor.PAPER, Predictor.FUSED)
"""T alone; the more confident of T and A; both mixed."""

SPLITS = 5
PSEUDO = 4.0
FIT_ROWS, HELD_ROWS = 98_304, 16_384
V2_LITE_LAYERS = (1, 6, 11, 16, 21, 26)

NAMES = {
    "law": "DeepSeek-V2-Lite, law (zh)",
    "intent": "DeepSeek-V2-Lite, intent",
    "summary": "DeepSeek-V2-Lite, summary (no token ids)",
    "gen": "gpt-oss-20b, generated",
    "gen_b": "gpt-oss-20b, generated b",
    "qwen": "Qwen1.5-MoE, GSM8K prompts",
    "olmoe0": "OLMoE, GSM8K, layer 0 (no token ids)",
    "ref-deepseek-v2": "ref-deepseek-v2, mixed text",
    "ref-deepseek-v2-grouped": "ref-deepseek-v2-grouped, mixed text",
    "ref-mixtral": "ref-mixtral, mixed text",
    "tiny-deepseek": "tiny-deepseek, builtin text",
}
ARCHIVES = {
    "law": "dsv2lite_esft_law",
    "intent": "dsv2lite_esft_intent",
    "summary": "dsv2lite_esft_summary",
    "gen": "gptoss20b_gen",
    "gen_b": "gptoss20b_gen_b",
    "qwen": "qwen15moe_gsm8k",
    "olmoe0": "olmoe1b7b_gsm8k_layer0",
}
PROMPTS = {
    "mmlu": "mmlu_mix",
    "gsm8k": "gsm8k_test",
    "humaneval": "humaneval",
    "books": "longdoc_books",
}
TRIPLES = {
    "mixtral8x7b": ("arxiv", "book", "github", "wikipedia"),
    "olmoe1b7b": ("book", "github", "wikipedia"),
}
STAND_INS = {
    "ShareGPT": "law, intent (the published model, other prompts); gen, gen_b (other model, chat-like prompts)",
    "LMSYS-Chat-1M": "gen, gen_b; mixed text with dialogues for the ref- models",
    "MMLU": "prompts/mmlu_mix (MMLU itself, 471 prompts) on ref-deepseek-v2; gen and gen_b answer MMLU prompts",
    "LongBench": "prompts/longdoc_books on ref-deepseek-v2; summary (no token ids)",
    "routing of DeepSeek-V2, Qwen3-30B-A3B, all layers of Mixtral-8x7B": "DeepSeek-V2-Lite; gpt-oss-20b; "
    "ref-mixtral, and Mixtral-8x7B counts of layers 0, 7, 15",
}  # fmt: skip


def held_of(name: str) -> str:
    """A data set and how its rows were divided."""
    return f"{NAMES[name]}; {'train/test' if name.startswith('ref-') else '80/20'}"


Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]
Line = tuple[str, str, str]
"""Data and split; what is measured; the figure."""


# Data: traces through smoe, with the rows of all parts in one order.


class Bench:
    """The working folders, made by smoe commands as they are needed."""

    def __init__(self, work: Path) -> None:
        self.work = work

    def smoe(self, makes: Path | None, *arguments: object) -> dict[str, Any]:
        """Run one command with --json, unless what it makes is there. Fails with the command's own words."""
        if makes is not None and makes.exists():
            return {}
        words = [str(argument) for argument in arguments]
        print("smoe " + " ".join(words), file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "smoe_cli", *words, "--json", "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"smoe {' '.join(words)}: exit {done.returncode}\n{done.stderr}")
        return dict(json.loads(done.stdout))

    def fitted(self, name: str) -> Path:
        """The folder whose trace/ has the fit and validation rows of a data set, and, of imports, the held-out ones."""
        folder = self.work / name
        if name in ARCHIVES:
            self.smoe(folder / "trace", "import", DATA / f"traces/{ARCHIVES[name]}.npz", "-C", folder)
        elif name == "tiny-deepseek":
            self.smoe(folder / "trace", "profile", "--model", name, "-C", folder)
        elif name.startswith("ref-"):
            self._profile(folder, name, "train", "fit", FIT_ROWS)
        return folder

    def held(self, name: str) -> Path:
        """The folder whose trace/ has the held-out rows."""
        if not name.startswith("ref-"):
            return self.fitted(name)
        folder = self.work / f"{name}-test"
        self._profile(folder, name, "test", "heldout", HELD_ROWS)
        return folder

    def _profile(self, folder: Path, model: str, key: str, split: str, rows: int) -> None:
        text = ("--dataset", DATA / f"models/ref_tokens.npz#{key}", "--pack", "windows", "--max-tokens", rows)
        source = ("--model", DATA / "models" / model, "--dtype", "float32", "--split", split)
        self.smoe(folder / "trace", "profile", *source, *text, "-C", folder)

    def prompts(self, name: str) -> Path:
        """ref-deepseek-v2 on one set of prompts, split by document."""
        folder = self.work / f"prompts-{name}"
        text = ("--dataset", DATA / f"prompts/{PROMPTS[name]}.jsonl.xz", "--max-tokens", HELD_ROWS * 2)
        model = ("--model", DATA / "models/ref-deepseek-v2", "--dtype", "float32")
        self.smoe(folder / "trace", "profile", *model, *text, "-C", folder)
        return folder

    def cut(self, name: str, share: float) -> tuple[Path, Path]:
        """A data set whose first-drawn sequences fit, a share of all, and whose others are held out."""
        fit, rest = (self.work / f"{name}-{share:g}-{part}" for part in ("fit", "rest"))
        if not (rest / "trace").exists():
            chosen = draw_sequences(self.routing(name), share, 0)
            for folder, kept, mode in ((fit, chosen, "fit"), (rest, ~chosen, "heldout")):
                folder.mkdir(exist_ok=True)
                write_part(DATA / f"traces/{ARCHIVES[name]}.npz", folder / f"{name}.npz", kept)
                self.smoe(folder / "trace", "import", folder / f"{name}.npz", "--split", mode, "-C", folder)
        return fit, rest

    def placed(self, folder: Path, ep: int, goal: str = "lar") -> Path:
        """The placement of a folder's trace."""
        self.smoe(folder / "tables", "build-tables", "-C", folder)
        name = () if goal == "lar" else ("--name", goal)
        target = folder / f"placement-ep{ep}{'' if goal == 'lar' else f'-{goal}'}"
        self.smoe(target, "cocluster", "--ep", ep, "--goal", goal, "--effort", "fast", *name, "-C", folder)
        return target

    def evaluated(self, folder: Path, ep: int, trace: Path, goal: str = "lar") -> dict[str, dict[str, Any]]:
        """state -> predictor -> figures of the served rule, mean over layers, held-out rows of `trace`."""
        target = self.placed(folder, ep, goal)
        found = self.smoe(
            *(None, "evaluate", "--placement", target.name, "--trace", trace / "trace", "-C", folder),
            *(word for name in TABLES_ONLY for word in ("--predictor", name)),
        )
        return {
            state: {name: by_rule["rule"] for name, by_rule in by_name.items()}
            for state, by_name in found["total"].items()
        }

    @cache  # noqa: B019 - one bench a run
    def routing(self, name: str) -> "Routing":
        """All rows of a data set, in order."""
        if name.startswith("prompts-"):
            return read_routing(open_trace(self.prompts(name.removeprefix("prompts-")) / "trace"))
        routing = read_routing(open_trace(self.fitted(name) / "trace"))
        if self.held(name) != self.fitted(name):
            routing = routing.followed_by(read_routing(open_trace(self.held(name) / "trace")))
        if name in ("gen", "gen_b"):  # most rows have no weights there, but the archive keeps the gate's order
            with np.load(DATA / f"traces/{ARCHIVES[name]}.npz") as archive:
                routing = replace(routing, experts=archive["ids"].astype(np.int64))
        return routing


@dataclass(frozen=True)
class Routing:
    """Rows in order. experts: [L, N, K] by falling weight; token, sequence, part (into PARTS): [N]."""

    layer_ids: tuple[int, ...]
    experts: Ints
    token: Ints
    sequence: Ints
    part: Ints
    num_experts: int
    vocab: int

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    @property
    def held(self) -> Ints:
        return self.part == PARTS.index("heldout")

    def take(self, rows: Ints) -> "Routing":
        columns = {name: getattr(self, name)[rows] for name in ("token", "sequence", "part")}
        return replace(self, experts=self.experts[:, rows], **columns)

    def followed_by(self, other: "Routing") -> "Routing":
        moved = replace(other, sequence=other.sequence + self.sequence.max() + 1)
        columns = {
            name: np.concatenate([getattr(self, name), getattr(moved, name)]) for name in ("token", "sequence", "part")
        }
        return replace(self, experts=np.concatenate([self.experts, other.experts], axis=1), **columns)


def read_routing(trace: Trace) -> Routing:
    """Every row of a trace, in the order of its files."""
    names = ["token_id", "sequence", "split", *(layer.column for layer in trace.layers)]
    groups = [{name: to_numpy(group[name]) for name in names} for group in trace.groups(names)]
    columns = {name: np.concatenate([group[name] for group in groups]) for name in names}
    return Routing(
        tuple(layer.id for layer in trace.layers),
        np.stack([columns[layer.column] for layer in trace.layers]).astype(np.int64),
        columns["token_id"].astype(np.int64),
        columns["sequence"].astype(np.int64),
        np.array([PARTS.index(name) for name in columns["split"]]),
        trace.layers[0].num_experts,
        trace.vocab_size,
    )


def draw_sequences(routing: Routing, share: float, seed: int) -> Ints:
    """Which sequences fit: drawn without replacement until they hold this share of the rows. [S] bool."""
    lengths = np.bincount(routing.sequence)
    order = np.random.default_rng(seed).permutation(len(lengths))
    before = np.cumsum(lengths[order]) - lengths[order]
    chosen = np.zeros(len(lengths), np.bool_)
    chosen[order[before < share * lengths.sum()]] = True
    return chosen


def write_part(source: Path, target: Path, sequences: Ints) -> None:
    """An archive's sequences [S] bool, as an archive; gate weights are left out where not every row has them."""
    with np.load(source) as archive:
        rows = np.repeat(sequences, archive["seq_len"])
        facts = {name: archive[name] for name in ("layer_ids", "num_experts", "top_k")}
        facts |= {"vocab_size": archive["vocab_size"]} if "vocab_size" in archive else {}
        if archive["weights"].shape[1] == len(rows) if "weights" in archive else False:
            facts["weights"] = archive["weights"][:, rows]
        facts["vocab_size"] = facts.get("vocab_size", archive["tokens"].max() + 1)
        np.savez_compressed(
            target, ids=archive["ids"][:, rows], tokens=archive["tokens"][rows], seq_len=archive["seq_len"][sequences],
            **facts,
        )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Known rows against others. index: [N] token ids numbered from 0, U of them; fit: [N] bool."""

    routing: Routing
    index: Ints
    ids: int
    fit: Ints

    @property
    def coverage(self) -> float:
        """Share of the other rows whose token id was seen."""
        return float(np.isin(self.index[~self.fit], self.index[self.fit]).mean())


def part_by(routing: Routing, fit: Ints) -> Part:
    numbers, size = context_numbers([routing.token])
    return Part(routing, numbers, size, fit)


def drawn_part(routing: Routing, share: float, seed: int) -> Part:
    return part_by(routing, draw_sequences(routing, share, seed)[routing.sequence])


def share(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def shares(values: Sequence[float] | Ints, mark: str = " / ") -> str:
    return mark.join(share(float(value)) for value in values)


# 1: 89 % of routes.


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


# 2: precision and F1 at 25/75; 5: F1 by layer at 20/80.


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


# 3: the next layer from the layers before.

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


# 4: kurtosis.


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


# 6: local activation rate; 7: transfer.


def lar(bench: Bench) -> Iterator[Line]:
    """lar of placed+shuffled against contiguous, as points and as a ratio, beside what it costs in balance."""
    for name in ("law", "intent", "gen"):
        for ep in (4, 8):
            fit, rest = bench.cut(name, 0.2)
            yield from _lar_lines(f"{NAMES[name]}; 20/80 by sequence, EP{ep}", bench.evaluated(fit, ep, rest))
            total = bench.evaluated(bench.fitted(name), ep, bench.held(name))
            yield from _lar_lines(f"{held_of(name)}, EP{ep}", total)
    for name, degrees in (("ref-deepseek-v2", (4, 8)), ("ref-deepseek-v2-grouped", (4, 8)), ("ref-mixtral", (2, 4))):
        for ep in degrees:
            total = bench.evaluated(bench.fitted(name), ep, bench.held(name))
            yield from _lar_lines(f"{NAMES[name]}; train/test, EP{ep}", total)


def _lar_lines(where: str, total: dict[str, dict[str, Any]]) -> Iterator[Line]:
    plain = total["contiguous"]["none"]["lar"]
    for predictor in TABLES_ONLY:
        placed = total["placed+shuffled"][predictor]
        shuffled = total["shuffled"][predictor]["lar"]
        gain = f"{100 * (placed['lar'] - plain):+.1f} points, {placed['lar'] / plain - 1:+.0%}"
        states = shares((plain, shuffled, placed["lar"], total["oracle"]["oracle"]["lar"]), " → ")
        costs = f"remote {total['contiguous']['none']['remote_fanout']:.2f} → {placed['remote_fanout']:.2f}"
        balance = f"load {total['contiguous']['none']['load_imbalance']:.2f} → {placed['load_imbalance']:.2f}"
        what = f"{predictor}: lar contiguous → shuffled → placed+shuffled → oracle; gain"
        yield where, what, f"{states}; {gain}; {costs}; {balance}"


def transfer(bench: Bench) -> Iterator[Line]:
    """lar at EP4 on the held-out rows of one data set with tables and placement of another."""
    real = [("DeepSeek-V2-Lite", ["law", "intent"]), ("gpt-oss-20b", ["gen", "gen_b"])]
    for model, names in real:
        yield from _transfer_lines(bench, model, {name: bench.fitted(name) for name in names})
    yield from _transfer_lines(bench, "ref-deepseek-v2", {name: bench.prompts(name) for name in PROMPTS})
    for model, domains in TRIPLES.items():
        for fitted in domains:
            others = [domain for domain in domains if domain != fitted]
            found = [_triple_recall(model, fitted, other) for other in (fitted, *others)]
            where = f"{model}, counts of {fitted}; on itself, {', '.join(others)}; mean of layers 0, 7, 15"
            yield where, "activations of an id that was seen", shares([seen for seen, _ in found])
            yield where, "of those, among the id's K hottest (itself: not held out)", shares([hit for _, hit in found])


def _transfer_lines(bench: Bench, model: str, folders: dict[str, Path]) -> Iterator[Line]:
    for fitted, folder in folders.items():
        found, median = [], []
        for other in folders.values():
            total = bench.evaluated(folder, 4, other)
            found.append(total["placed+shuffled"]["token"]["lar"])
            median.append(total["shuffled"]["token"]["lar"])
        where = f"{model}, fitted on {fitted}; held-out of {', '.join(folders)}; 80/20, EP4"
        yield where, "lar placed+shuffled, token, quota and rule (contiguous .25)", shares(found)
        yield where, "lar shuffled alone, token", shares(median)


@cache
def triples(model: str, domain: str, layer: int) -> tuple[Ints, int]:
    """Counts of (token id, expert), dense [V, E], and K."""
    with np.load(DATA / f"traces/{model}_counts_{domain}.npz") as archive:
        token, expert, count = (archive[f"{name}_L{layer}"].astype(np.int64) for name in ("tok", "exp", "cnt"))
        table = np.zeros((2**16, int(archive["num_experts"])), np.int64)
        np.add.at(table, (token, expert), count)
        return table, int(archive["top_k"])


def _triple_recall(model: str, fitted: str, other: str) -> tuple[float, float]:
    """Shares of one text's activations: of an id that the other text has, and of these on the K hottest there."""
    seen, hits = [], []
    for layer in (0, 7, 15):
        known, top_k = triples(model, fitted, layer)
        table, _ = triples(model, other, layer)
        covered = table[known.any(axis=1)].sum()
        seen.append(covered / table.sum())
        hits.append(np.where(hottest_sets(known, top_k), table, 0).sum() / covered)
    return float(np.mean(seen)), float(np.mean(hits))


# 8: the size of T.


def size(bench: Bench) -> Iterator[Line]:
    """Bytes of the table of ranks, from the formula and from a file."""
    listed = {model["model"]: model for model in bench.smoe(None, "models")["models"]}
    layers = int(listed["deepseek-v2"]["moe_layers"].split()[0])
    yield "formula", "102,400 ids x 60 layers x 2 bytes", f"{102_400 * 60 * 2 / 2**20:.2f} MiB"
    what = f"102,400 ids x {layers} MoE layers x 1 byte (layer 0 is dense; ranks and confidences are u8)"
    yield "smoe models: deepseek-v2", what, f"{102_400 * layers / 2**20:.2f} MiB, as much again for the confidence"
    target = bench.placed(bench.fitted("law"), 8)
    arrays, _ = read_runtime(open_artefact(target, "placement"))
    for name in ("token_rank", "token_confidence", "token_scores"):
        shape = " x ".join(f"{number:,}" for number in arrays[name].shape)
        found = f"{arrays[name].nbytes / 2**20:.2f} MiB"
        yield f"{NAMES['law']}, EP8, runtime.safetensors", f"{name}, {shape} {arrays[name].dtype}", found


# 9: the token and the tokens before it.


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


# Token ids never seen.


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
            home_by_scores(_token_scores(*case, index, placement)[held.token], BATCH, Assignment.RULE) for case in cases
        ]
        homes.insert(2, home_without_shuffle(len(mine), placement.num_ranks, BATCH))
        at_home = np.stack([counts[np.arange(len(mine)), home] for home in homes]) / routing.top_k
        found.append([*at_home[:3, mine].mean(axis=1), *at_home[[0, 1, 3]].mean(axis=1)])
    return int(mine.sum()), list(np.mean(found, axis=0))


def _token_scores(rows: Routing, neighbour: Ints, rule: str, layer: int, placement: Placement) -> Ints:
    """The token table of some rows, [V, G] u8."""
    hosts, experts = placement.hosts[layer], rows.experts[layer]
    flat = (np.repeat(rows.token, rows.top_k), experts.reshape(-1), np.ones(experts.size, np.int64))
    activations, seen = rank_counts(flat, rows.vocab, hosts), occurrences(flat, rows.vocab, rows.top_k)
    popularity = np.bincount(experts.reshape(-1), minlength=rows.num_experts)
    share = popularity_by_rank(popularity, hosts)
    table = token_table(activations, seen, share, neighbour, rows.top_k, TokenChoice(PSEUDO, rule))
    return quantise(table, rows.top_k)


# The served rule against the exact assignment.


PASSES = (0, 1, 2, 4, 8, 64)
"""Exchange passes after which the sum of scores is looked at; two are served."""


def assignment(bench: Bench) -> Iterator[Line]:
    """The rule's sum of scores as a share of the exact one: of a whole trace, and of its worst batch by passes."""
    for name in NAMES:
        routing = bench.routing(name)
        known = routing.token < routing.vocab if name not in ("summary", "olmoe0") else routing.token < 0
        kind = "token table" if known.any() else "true routing, no ids"
        for ep in (4, 8):
            if routing.num_experts % ep:
                yield NAMES[name], f"EP{ep}", f"{routing.num_experts} experts do not divide"
                continue
            sums = [
                batch
                for placement in _placements(bench, name, routing, ep)
                for scores in _score_rows(routing, known, placement)
                for batch in rule_sums(scores)
            ]
            yield f"{NAMES[name]}; EP{ep}, {kind}, held-out rows", SUM_FIGURES, _sums_text(sums)
    for model, domains in TRIPLES.items():
        for domain in domains:
            for ep in (4, 8):
                drawn = [_drawn_scores(model, domain, layer, ep) for layer in (0, 7, 15)]
                sums = [batch for scores in drawn for batch in rule_sums(scores)]
                where = f"{model}, {domain}; EP{ep}, token table, layers 0, 7, 15, rows drawn by the ids' frequency"
                yield where, SUM_FIGURES, _sums_text(sums)


SUM_FIGURES = (
    "rule / exact, all batches; batches below .99; worst batch: rows that prefer its most wanted rank over the quota, "
    "rule / exact after 0 / 1 / 2 (served) / 4 / 8 / 64 exchange passes"
)


def _sums_text(sums: list[list[float]]) -> str:
    """sums: of each batch, what `rule_sums` gives."""
    table = np.array(sums)
    served = table[:, 1 + PASSES.index(2)]
    ratio = served / table[:, -1]
    worst = table[ratio.argmin()]
    total = served.sum() / table[:, -1].sum()
    below = f"{(ratio < 0.99).sum()} of {len(ratio)}"
    return f"{total:.4f}; {below}; {worst[0]:.1f}, {shares(worst[1:-1] / worst[-1])}"


def _placements(bench: Bench, name: str, routing: Routing, ep: int) -> Iterator[Placement]:
    """Contiguous, and the one smoe finds where tables can be built."""
    layers, experts = len(routing.experts), routing.num_experts
    flat = np.tile((np.arange(experts) // (experts // ep)).astype(np.int32), (layers, 1))
    yield Placement.of_ranks(routing.layer_ids, flat, ep)
    if name not in ("summary", "olmoe0", "qwen"):
        yield open_placed(bench.placed(bench.fitted(name), ep))[0]


def _score_rows(routing: Routing, known: Ints, placement: Placement) -> Iterator[Ints]:
    """Scores of the held-out rows, layer by layer, [N, G] u8."""
    for index in range(len(routing.experts)):
        if not known.any():
            held = routing.experts[index][routing.held]
            yield quantise(local_counts(held, placement.hosts[index]), routing.top_k)
        else:
            nobody = np.full(routing.vocab, routing.vocab)
            table = _token_scores(routing.take(~routing.held & known), nobody, "popularity", index, placement)
            yield table[routing.token[routing.held & known]]


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


def rule_sums(scores: Ints) -> Iterator[list[float]]:
    """Of each batch: rows that prefer the most wanted rank, over the quota; the rule's sum of scores after PASSES
    exchange passes; the exact one. scores: [N, G] u8."""
    for part in batches(len(scores), BATCH):
        mine = scores[part].astype(np.int32)
        rows, most = np.arange(len(mine)), quota(len(mine), mine.shape[1])
        place = _regret_rounds(mine, most)
        sums = [np.bincount(mine.argmax(axis=1)).max() / most]
        for done in range(PASSES[-1] + 1):
            if done in PASSES:
                sums.append(float(mine[rows, place].sum()))
            _exchange_pass(mine, place)
        yield [*sums, float(mine[rows, assign_exact(mine, most)].sum())]


# Data sets that cannot be had.


def data(_: Bench) -> Iterator[Line]:
    for name, instead in STAND_INS.items():
        yield name, "not to be had here; stands in", instead


@dataclass(frozen=True)
class Claim:
    """One published statement and the function that measures its counterpart."""

    published: str
    lines: Callable[[Bench], Iterator[Line]]


CLAIMS = {
    "routes": Claim("89 % of token-expert routes foretold", routes),
    "topk": Claim("precision 96.3 %, F1 78.8 % (recall 67 %) from the token id, 25/75", topk),
    "ngrams": Claim("about 70 % confidence in the next layer from five layers", ngrams),
    "kurtosis": Claim("most tokens' kurtosis above 8", kurtosis),
    "hotness": Claim("median F1 by layer 1/1/1/.833/.833/.833; P25 1/.833/.833/.667/.667/.667; "
                     "hotness 1/.917/.889/.889/.833/.833; 20/80", hotness),
    "lar": Claim("lar +43 % / +61 % (v1-3: DeepSeek-V2 / Mixtral); +37 % / +43 % (v5: V2-Lite / Qwen3-30B)", lar),
    "transfer": Claim("lar from .25: .465 in-domain, .407-.416 on another data set (V2-Lite); .469, .353-.393 (Qwen3)",
                      transfer),
    "size": Claim("T of DeepSeek-V2 is 11.7 MB", size),
    "bigram": Claim("the token and its few preceding tokens name the experts", bigram),
    "unseen": Claim("ids never seen take their nearest neighbour's row", unseen),
    "assignment": Claim("(ours) the served rule reaches .99 of the exact sum of scores", assignment),
    "data": Claim("ShareGPT, LMSYS-Chat-1M, MMLU, LongBench", data),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help=f"of {', '.join(CLAIMS)}; default: all")
    parser.add_argument("--keep", type=Path, help="keep the working folders here, and use what is there")
    asked = parser.parse_args()
    wrong = set(asked.claims) - set(CLAIMS)
    if wrong:
        parser.error(f"no claim {min(wrong)}; there are {', '.join(CLAIMS)}")
    if not (DATA / "traces").is_dir():
        parser.error(f"{DATA} has no traces/; set SMOE_DATA")
    with tempfile.TemporaryDirectory(prefix="smoe-claims-") as fresh:
        bench = Bench(asked.keep or Path(fresh))
        bench.work.mkdir(parents=True, exist_ok=True)
        print("| claim | published | data, split | measured | ours |\n| --- | --- | --- | --- | --- |")
        for name in asked.claims or CLAIMS:
            started = perf_counter()
            for where, what, found in CLAIMS[name].lines(bench):
                print(f"| {name} | {CLAIMS[name].published} | {where} | {what} | {found} |", flush=True)
            print(f"{name}: {perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
