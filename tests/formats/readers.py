"""Readers written from docs/formats/ alone: json, pyarrow, safetensors and NumPy, nothing of smoe."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from safetensors import safe_open
from safetensors.numpy import load_file

NOT_KNOWN = 4294967295


def read_manifest(folder):
    """(manifest, id), the files' sizes and contents checked: docs/formats/artefacts.md."""
    record = folder / "smoe" if (folder / "smoe/manifest.json").exists() else folder
    text = (record / "manifest.json").read_bytes()
    manifest = json.loads(text)
    assert (manifest["format"], manifest["format_version"]) == ("smoe", 1)
    for name, facts in manifest["files"].items():
        assert not Path(name).is_absolute()
        content = (folder / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (facts["bytes"], facts["sha256"])
    return manifest, hashlib.sha256(text).hexdigest()


def layer_label(layer):
    return f"{layer['stack']}{layer['id']:02d}"


def read_trace(folder):
    """{column: list of values, one a row}, level `token`: docs/formats/trace.md."""
    manifest, _ = read_manifest(folder)
    assert manifest["parameters"]["level"] == "token"
    parts = [pq.read_table(folder / name) for name in sorted(manifest["files"]) if name.endswith(".parquet")]
    return {name: [value for part in parts for value in part[name].to_pylist()] for name in parts[0].column_names}


def read_counts(folder, label):
    """{(split, keys...): count} of one layer of a trace below level `token`, or of tables."""
    table = pq.read_table(folder / f"counts_{label}.parquet").to_pydict()
    keys = [name for name in ("token_id", "expert", "other") if name in table]
    found = dict(zip(zip(table["split"], *(table[key] for key in keys), strict=True), table["count"], strict=True))
    assert len(found) == len(table["count"]), "an entry stands twice"
    return found


def read_samples(folder, split):
    """{column: list} of samples.parquet's rows of one part: docs/formats/tables.md."""
    rows = [row for row in pq.read_table(folder / "samples.parquet").to_pylist() if row["split"] == split]
    return {name: [row[name] for row in rows] for name in rows[0]}


def read_placement(folder):
    """{layer: (expert of each slot, rank of each slot)}: docs/formats/placement.md."""
    table = pq.read_table(folder / "placement.parquet").to_pydict()
    ranks = max(table["rank"]) + 1
    found = {}
    for layer, slot, expert, rank in zip(*(table[n] for n in ("layer", "physical", "logical", "rank")), strict=True):
        slots, hosts = found.setdefault(layer, ([], []))
        assert slot == len(slots)
        slots.append(expert)
        hosts.append(rank)
    for slots, hosts in found.values():
        whole, more = divmod(len(slots), ranks)
        assert hosts == [rank for rank in range(ranks) for _ in range(whole + (rank < more))]
        assert set(slots) == set(range(max(slots) + 1))
    return found


class Runtime:
    """Scores of every predictor from runtime.safetensors: docs/formats/runtime.md. index: of an MoE layer."""

    def __init__(self, path):
        with safe_open(path, "numpy") as file:
            self.facts = file.metadata()
        self.tensors = load_file(path)
        assert self.facts["format_version"] == "1"
        self.ranks, self.top_k = int(self.facts["num_ranks"]), int(self.facts["top_k"])

    def chosen(self):
        return [json.loads(self.facts["predictors"])[number] for number in self.tensors["predictor"]]

    def held_by(self, index):
        """The experts of every rank, each in rising order."""
        slots = self.tensors["physical_to_logical"][index]
        whole, more = divmod(len(slots), self.ranks)
        edges = np.cumsum([0] + [whole + (rank < more) for rank in range(self.ranks)])
        return [sorted(slots[edges[rank] : edges[rank + 1]].tolist()) for rank in range(self.ranks)]

    def token(self, index, token_id):
        table = self.tensors["token_scores"][index]
        return table[token_id] if token_id < len(table) else self.tensors["popularity"][index]

    def markov(self, index, two, one):
        if one is None:
            return self.tensors["popularity"][index]
        if two is None:
            return self.tensors["markov1_scores"][index, one]
        return self.tensors["markov2_scores"][index, two * self.ranks + one]

    def paper(self, index, token_id, two, one):
        token, markov = self.token(index, token_id), self.markov(index, two, one)
        better = markov if markov.max() > token.max() else token
        return np.where(np.arange(self.ranks) == better.argmax(), better, 0)

    def early_gate(self, index, early):
        slope, intercept = self.tensors["early.affine"][index]
        return self._by_rank(index, early.astype(np.float32) * slope + intercept, "early.temperature")

    def linear(self, index, features):
        return self._by_rank(
            index, features.astype(np.float32) @ self.tensors["linear.weight"][index], "linear.temperature"
        )

    def fused(self, index, parts):
        """parts: scores of token, markov, early-gate and linear."""
        weights = self.tensors["fusion.weights"][index].astype(np.float64)
        return np.rint(
            np.clip(sum(w * np.asarray(part, float) for w, part in zip(weights, parts, strict=True)), 0, 255)
        )

    def _by_rank(self, index, logits, temperature):
        logits = logits.astype(np.float64)
        falling = np.sort(logits)[::-1]
        middle, spread = falling[self.top_k - 1 : self.top_k + 1].mean(), logits.std() + 1e-12
        chance = 1 / (1 + np.exp(-(logits - middle) / (float(self.tensors[temperature][index]) * spread)))
        chance *= self.top_k / chance.sum()
        expected = np.array([sum(chance[expert] for expert in held) for held in self.held_by(index)])
        return np.rint(np.clip(expected, 0, self.top_k) * 255 / self.top_k)


def read_linear(folder, label):
    """(features [n, D], true logits [n, E]) of the sampled held-out rows: docs/formats/trace.md."""
    layer, rows = load_file(folder / f"layer_{label}.safetensors"), load_file(folder / "rows.safetensors")
    embedding = load_file(folder / "embedding.safetensors")["embedding"]
    recent = rows["heldout.recent"].astype(np.int64)
    looked_up = embedding[np.where(recent == NOT_KNOWN, len(embedding) - 1, recent)].reshape(len(recent), -1)
    columns = [layer["heldout.inputs"], layer["heldout.early"], looked_up, np.ones((len(recent), 1))]
    return np.concatenate([column.astype(np.float32) for column in columns], axis=1), layer["heldout.logits"]
