"""Local activation rate, its transfer to other texts, and the size of the table behind it."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli.placement import read_runtime
from smoe_profiles.artefact import open_artefact
from smoe_solvers.expert_prediction import (
    hottest_sets,
)
from tests.bench.claims.data import DATA, NAMES, PROMPTS, TABLES_ONLY, TRIPLES, Bench, Ints, Line, held_of, shares


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
    layers = len(listed["deepseek-v2"]["moe_layers"])
    yield "formula", "102,400 ids x 60 layers x 2 bytes", f"{102_400 * 60 * 2 / 2**20:.2f} MiB"
    what = f"102,400 ids x {layers} MoE layers x 1 byte (layer 0 is dense; ranks and confidences are u8)"
    yield "smoe models: deepseek-v2", what, f"{102_400 * layers / 2**20:.2f} MiB, as much again for the confidence"
    target = bench.placed(bench.fitted("law"), 8)
    arrays, _ = read_runtime(open_artefact(target, "placement"))
    for name in ("token_rank", "token_confidence", "token_scores"):
        shape = " x ".join(f"{number:,}" for number in arrays[name].shape)
        found = f"{arrays[name].nbytes / 2**20:.2f} MiB"
        yield f"{NAMES['law']}, EP8, runtime.safetensors", f"{name}, {shape} {arrays[name].dtype}", found
