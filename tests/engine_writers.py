"""Dumps as inference engines write them, made from one known routing: what an importer must give back.

Axes: L hidden layers (layer 0 is dense), M = L - 1 MoE layers with ids 1 to L - 1, E experts, P >= E physical slots,
K experts a token, T tokens, S sequences lying one after another. Every writer takes a folder and a Routing, and
returns the files to import. Layouts and field names are those of the engines' releases of late 2026.
"""

import base64
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

PREFILL, DECODE = 1, 2
"""SGLang's ForwardMode.EXTEND and ForwardMode.DECODE."""

SGLANG_WIDTH = 8
"""Columns of SGLang's top-k buffer, whatever K is."""

UNKNOWN = 2**32 - 1
"""Stands for a token id that is not known in .npz traces."""

Files = list[Path]


@dataclass(frozen=True)
class Routing:
    """experts, weights: [M, T, K]; tokens: [T]; lengths: [S], their sum is T."""

    num_experts: int
    vocab_size: int
    experts: np.ndarray
    weights: np.ndarray
    tokens: np.ndarray
    lengths: tuple[int, ...]

    @property
    def layer_ids(self) -> list[int]:
        return list(range(1, len(self.experts) + 1))

    @property
    def num_layers(self) -> int:
        return len(self.experts) + 1

    @property
    def top_k(self) -> int:
        return self.experts.shape[2]

    @property
    def spans(self) -> list[slice]:
        ends = np.cumsum(self.lengths)
        return [slice(int(end) - length, int(end)) for end, length in zip(ends, self.lengths, strict=True)]

    @property
    def hidden(self) -> np.ndarray:
        """As engines lay it out: [T, L, K], the dense layer all zeros."""
        rows = self.experts.transpose(1, 0, 2)
        return np.concatenate([np.zeros_like(rows[:, :1]), rows], axis=1)

    def counts(self) -> np.ndarray:
        """[M, E] activations."""
        return np.stack([np.bincount(layer.ravel(), minlength=self.num_experts) for layer in self.experts])

    def token_counts(self, layer: int) -> dict[tuple[int, int], int]:
        """(token id, expert) -> activations at the MoE layer of that ordinal."""
        pairs = np.stack([np.repeat(self.tokens, self.top_k), self.experts[layer].ravel()], axis=1)
        found, number = np.unique(pairs, axis=0, return_counts=True)
        return {(int(t), int(e)): int(n) for (t, e), n in zip(found, number, strict=True)}

    def pairs(self, layer: int) -> np.ndarray:
        """[E, E]: tokens that chose both experts; the diagonal counts each expert's tokens."""
        chosen = np.zeros((len(self.tokens), self.num_experts), np.int64)
        np.put_along_axis(chosen, self.experts[layer], 1, axis=1)
        return chosen.T @ chosen

    def with_rows(self, layer: int, rows: int | slice | Sequence[int], value: object) -> "Routing":
        """A copy in which the MoE layer of that ordinal holds other ids in some rows."""
        experts = self.experts.copy()
        experts[layer, rows] = value
        return replace(self, experts=experts)


def routing(
    *, layers: int = 4, experts: int = 8, top_k: int = 2, vocab: int = 50, lengths=(7, 5, 9, 6, 8, 4, 10, 6), seed=0
) -> Routing:
    """Random routing in which every expert, the highest id included, is used in every layer."""
    generator = np.random.default_rng(seed)
    total = sum(lengths)
    chosen = generator.random((layers - 1, total, experts)).argsort(axis=2)[:, :, :top_k]
    if top_k > 1:
        chosen[:, 0, :] = np.arange(experts - top_k, experts)
    else:
        chosen[:, 0, 0] = experts - 1
    weights = np.sort(generator.random((layers - 1, total, top_k)), axis=2)[:, :, ::-1].astype(np.float16)
    return Routing(
        experts, vocab, chosen.astype(np.int64), weights, generator.integers(0, vocab, total), tuple(lengths)
    )


def model_folder(folder: Path, known: Routing, **changes: object) -> Path:
    """A model of which only config.json is here: enough to know its MoE layers."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "deepseek_v2",
        "hidden_size": 32,
        "num_hidden_layers": known.num_layers,
        "vocab_size": known.vocab_size,
        "n_routed_experts": known.num_experts,
        "num_experts_per_tok": known.top_k,
        "first_k_dense_replace": 1,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


# SGLang.


def slots(known: Routing, *, redundant: int = 4, seed: int = 3) -> np.ndarray:
    """A physical-to-logical map [L, P] in which `redundant` experts a layer have two slots; each layer its own."""
    generator = np.random.default_rng(seed)
    every = np.arange(known.num_experts)
    rows = [
        generator.permutation(np.r_[every, generator.permutation(every)[:redundant]]) for _ in range(known.num_layers)
    ]
    return np.stack(rows)


def physical(known: Routing, slot_map: np.ndarray, *, seed: int = 4) -> np.ndarray:
    """The routing in slot ids, any of an expert's slots: [M, T, K]."""
    generator = np.random.default_rng(seed)
    found = np.empty_like(known.experts)
    for layer, rows in enumerate(known.experts):
        places = [np.flatnonzero(slot_map[layer + 1] == expert) for expert in range(known.num_experts)]
        found[layer] = [[generator.choice(places[expert]) for expert in row] for row in rows]
    return found


def sglang_stat(folder: Path, known: Routing, *, steps: int = 12, used: int = 9) -> Files:
    """One circular buffer of counts: unused steps are zero, and the oldest step does not come first."""
    counts = np.zeros((steps, known.num_layers, known.num_experts), np.int32)
    for step, rows in enumerate(np.array_split(np.arange(len(known.tokens)), used)):
        for layer, experts in enumerate(known.experts):
            counts[step, layer + 1] = np.bincount(experts[rows].ravel(), minlength=known.num_experts)
    path = folder / "expert_distribution_recorder_1795000000.25.pt"
    content = {
        "rank": 0,
        "logical_count": torch.from_numpy(np.roll(counts, 5, axis=0)),
        "average_utilization_rate_over_window": 0.71,
    }
    torch.save(content, path)
    return [path]


def _detail(folder: Path, rank: int, records: list[dict], slot_map: np.ndarray) -> Path:
    path = folder / f"expert_distribution_recorder_1795000000.5_{rank}.pt"
    torch.save({"records": records, "last_physical_to_logical_map": torch.from_numpy(slot_map)}, path)
    return path


def sglang_per_pass(folder: Path, known: Routing, *, ranks: int = 1, passes: int = 3) -> Files:
    """Counts a pass over physical slots; each rank counts its own tokens."""
    slot_map = slots(known)
    ids = physical(known, slot_map)
    files = []
    for rank, own in enumerate(np.array_split(np.arange(len(known.tokens)), ranks)):
        records = []
        for number, rows in enumerate(np.array_split(own, passes)):
            counts = np.zeros(slot_map.shape, np.int32)
            for layer in range(len(ids)):
                counts[layer + 1] = np.bincount(ids[layer, rows].ravel(), minlength=slot_map.shape[1])
            records.append(
                {
                    "forward_pass_id": number,
                    "rank": rank,
                    "gatherer_key": "primary",
                    "global_physical_count": torch.from_numpy(counts),
                }
            )
        files.append(_detail(folder, rank, records, slot_map))
    return files


def sglang_record(
    known: Routing,
    ids: np.ndarray,
    rows: np.ndarray,
    *,
    number: int,
    rank: int = 0,
    lengths: list[int] | None,
    padding: int = 0,
) -> dict:
    """One pass of `per_token`. ids: physical [M, T, K]; rows: tokens of the pass; lengths: None for a decode pass."""
    positions = np.concatenate([np.arange(length) for length in known.lengths])[rows]
    top = np.full((known.num_layers, len(rows) + padding, SGLANG_WIDTH), -1, np.int32)
    top[1:, : len(rows), : known.top_k] = ids[:, rows]
    return {
        "forward_pass_id": number,
        "rank": rank,
        "gatherer_key": "primary",
        "input_ids": known.tokens[rows].tolist(),
        "positions": positions.tolist(),
        "extend_seq_lens": lengths,
        "forward_mode": DECODE if lengths is None else PREFILL,
        "topk_ids_of_layer": torch.from_numpy(top),
        "misc_objects": [],
    }


def sglang_per_token(
    folder: Path, known: Routing, *, ranks: int = 1, copies: int = 1, decoded: int = 0, padding: int = 3
) -> Files:
    """Token ids and physical top-k ids a pass, with padded rows.

    ranks: data-parallel ranks, each with its own sequences; copies: tensor-parallel ranks that all saw the same rows;
    decoded: how many last tokens of every sequence came from decode passes, one row a running request each.
    """
    slot_map = slots(known)
    ids = physical(known, slot_map)
    files = []
    for rank, own in enumerate(np.array_split(np.arange(len(known.lengths)), ranks)):
        records = []
        for half in np.array_split(own, 2):
            spans = [known.spans[sequence] for sequence in half]
            rows = np.concatenate([np.arange(span.start, span.stop - decoded) for span in spans])
            lengths = [span.stop - decoded - span.start for span in spans]
            records.append({"rows": rows, "lengths": lengths})
        last = np.array([known.spans[sequence].stop for sequence in own])
        records += [{"rows": last - step, "lengths": None} for step in range(decoded, 0, -1)]
        for copy in range(copies):
            passes = [
                sglang_record(known, ids, number=number, rank=rank + copy, padding=padding, **record)
                for number, record in enumerate(records)
            ]
            files.append(_detail(folder, rank + copy, passes, slot_map))
    return files


def sglang_reply(folder: Path, known: Routing, *, start: int = 0, prompt: int = 3, name: str = "replies.json") -> Files:
    """The reply to one batched request: raw int32 bytes without a header; the last sampled token has no row."""
    replies = []
    for number, span in enumerate(known.spans):
        length = span.stop - span.start
        rows = known.hidden[span][start : length - 1].astype("<i4")
        replies.append(
            {
                "text": "…",
                "output_ids": known.tokens[span][prompt:].tolist(),
                "meta_info": {
                    "id": f"{number:032x}",
                    "finish_reason": {"type": "stop"},
                    "prompt_tokens": prompt,
                    "completion_tokens": length - prompt,
                    "cached_tokens": 0,
                    "routed_experts": base64.b64encode(rows.tobytes()).decode(),
                },
            }
        )
    path = folder / name
    path.write_text(json.dumps(replies if len(replies) > 1 else replies[0]))
    return [path]


# vLLM.


def compact(rows: np.ndarray, num_experts: int) -> np.ndarray:
    return rows.astype(np.uint8 if num_experts <= 256 else np.uint16)


def vllm_npy(folder: Path, known: Routing, *, start: int = 0) -> Files:
    """One array a request, [its tokens - 1 - start, L, K]."""
    files = []
    for number, span in enumerate(known.spans):
        path = folder / f"request-{number:02d}.npy"
        np.save(path, compact(known.hidden[span][start:-1], known.num_experts))
        files.append(path)
    return files


def encoded_npy(rows: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, rows)
    return base64.b64encode(buffer.getvalue()).decode()


def vllm_reply(folder: Path, known: Routing, *, start: int = 0, prompt: int = 3) -> Files:
    """The reply to one completion request of several prompts that asked for token ids too."""
    choices = [
        {
            "index": number,
            "text": "…",
            "finish_reason": "stop",
            "prompt_token_ids": known.tokens[span][:prompt].tolist(),
            "token_ids": known.tokens[span][prompt:].tolist(),
            "routed_experts": encoded_npy(compact(known.hidden[span][start:-1], known.num_experts)),
        }
        for number, span in enumerate(known.spans)
    ]
    usage = {"prompt_tokens": prompt * len(choices), "completion_tokens": len(known.tokens) - prompt * len(choices)}
    path = folder / "completion.json"
    path.write_text(json.dumps({"id": "cmpl-1", "object": "text_completion", "choices": choices, "usage": usage}))
    return [path]


# TensorRT-LLM.


def trtllm_folder(
    folder: Path, known: Routing, kinds: Sequence[str], *, ranks: int = 1, first: int = 8, iterations: int = 4
) -> Files:
    """kinds: of `counts`, `raw`, `cooccurrence`; iterations 8 to 11, so that text order is not their order."""
    target = folder / "statistics"
    target.mkdir()
    meta = {"num_experts": known.num_experts, "num_experts_per_token": known.top_k}
    (target / "meta_info.json").write_text(json.dumps(meta))
    names = {"counts": "rank{}.safetensors", "raw": "rank{}_raw.safetensors"}
    for kind in kinds:
        for rank, own in enumerate(np.array_split(np.arange(len(known.tokens)), ranks)):
            tensors = {}
            for step, rows in enumerate(np.array_split(own, iterations)):
                for layer, number in enumerate(known.layer_ids):
                    part = replace(known, experts=known.experts[:, rows], tokens=known.tokens[rows])
                    content = {
                        "counts": lambda part=part, layer=layer: part.counts()[layer],
                        "raw": lambda part=part, layer=layer: part.experts[layer].astype(np.int32),
                        "cooccurrence": lambda part=part, layer=layer: part.pairs(layer),
                    }[kind]()
                    tensors[f"{first + step}_{number}"] = np.ascontiguousarray(content)
            save_file(tensors, target / names.get(kind, "cooccurrence_rank{}.safetensors").format(rank))
    return [target]


def trtllm_counts(folder: Path, known: Routing, *, ranks: int = 2) -> Files:
    return trtllm_folder(folder, known, ["counts"], ranks=ranks)


def trtllm_raw(folder: Path, known: Routing) -> Files:
    return trtllm_folder(folder, known, ["raw"])


def trtllm_cooccurrence(folder: Path, known: Routing) -> Files:
    return trtllm_folder(folder, known, ["cooccurrence"])


# Training frameworks.


def megatron_list(folder: Path, known: Routing) -> Files:
    """RouterReplay.get_recorded_data(): one [T, K] a router instance, MoE layers only."""
    path = folder / "recorded.pt"
    torch.save([torch.from_numpy(rows.copy()) for rows in known.experts], path)
    return [path]


def megatron_buffer(folder: Path, known: Routing, *, spare: int = 9) -> Files:
    """The static buffer [max_tokens, M, K]; rows not used yet are -1."""
    rows = known.experts.transpose(1, 0, 2).astype(np.int32)
    filler = np.full((spare, *rows.shape[1:]), -1, np.int32)
    path = folder / "buffer.pt"
    torch.save(torch.from_numpy(np.concatenate([rows, filler])), path)
    return [path]


def verl_batch(folder: Path, known: Routing, *, left: bool = False, dense: bool = False) -> Files:
    """[sequences, longest, layers, K], padded with -1; dense: all hidden layers, as a rollout engine hands them on."""
    rows = known.hidden if dense else known.hidden[:, 1:]
    batch = np.full((len(known.lengths), max(known.lengths), *rows.shape[1:]), -1, np.int16)
    for number, span in enumerate(known.spans):
        length = span.stop - span.start
        batch[number, slice(-length, None) if left else slice(length)] = rows[span]
    path = folder / "routed_experts.pt"
    torch.save(torch.from_numpy(batch), path)
    return [path]


def exflow_trace(folder: Path, known: Routing) -> Files:
    """One id a token and MoE layer: top-1 models only."""
    path = folder / "trace.npy"
    np.save(path, known.experts[:, :, 0].T)
    return [path]


# Plain .npz files.


def npz_members(known: Routing) -> dict[str, np.ndarray]:
    return {
        "ids": compact(known.experts, known.num_experts),
        "weights": known.weights,
        "tokens": known.tokens.astype(np.uint32),
        "seq_len": np.array(known.lengths, np.int32),
        "layer_ids": np.array(known.layer_ids, np.uint8),
        "num_experts": np.int32(known.num_experts),
        "top_k": np.int32(known.top_k),
        "vocab_size": np.int32(known.vocab_size),
    }


def npz_trace(folder: Path, known: Routing, *, without: Sequence[str] = (), **changes: object) -> Files:
    path = folder / "trace.npz"
    members = {name: value for name, value in npz_members(known).items() if name not in without}
    np.savez_compressed(path, **(members | changes))
    return [path]


TRIPLE_LAYERS = (0, 7, 15)
"""Layer numbers of triples and count files: neither adjacent nor counted from one."""


def _sampled_members(known: Routing) -> dict[str, np.ndarray]:
    return {
        "layers": np.array(TRIPLE_LAYERS, np.int64),
        "num_experts": np.int64(known.num_experts),
        "top_k": np.int64(known.top_k),
        "num_tokens": np.int64(len(known.tokens)),
    }


def npz_triples(folder: Path, known: Routing) -> Files:
    """(token, expert, count) of three layers, beside expert counts of another run, which differ a little."""
    members = _sampled_members(known) | {"expert_counts": known.counts() + 1}
    for ordinal, layer in enumerate(TRIPLE_LAYERS):
        entries = sorted(known.token_counts(ordinal).items())
        members[f"tok_L{layer}"] = np.array([token for (token, _), _ in entries], np.uint16)
        members[f"exp_L{layer}"] = np.array([expert for (_, expert), _ in entries], np.uint8)
        members[f"cnt_L{layer}"] = np.array([count for _, count in entries], np.uint16)
    path = folder / "triples.npz"
    np.savez_compressed(path, **members)
    return [path]


def npz_counts(folder: Path, known: Routing) -> Files:
    path = folder / "counts.npz"
    np.savez_compressed(path, expert_counts=known.counts().astype(np.int64), **_sampled_members(known))
    return [path]


@dataclass(frozen=True)
class Format:
    """engine: the value of --from; level: what the trace can know; model: the file does not name its MoE layers.

    rows: `all` tokens, or all but the `last` of each sequence; borders: whether sequences can be told apart;
    tokens: `all` ids are there, `some`, or `none`.
    """

    engine: str
    level: str
    write: Callable[[Path, Routing], Files]
    model: bool = True
    rows: str = "all"
    borders: bool = True
    tokens: str = "none"


FORMATS = {
    "sglang stat": Format("sglang", "count", sglang_stat),
    "sglang per_pass": Format("sglang", "count", sglang_per_pass),
    "sglang per_token": Format("sglang", "token", sglang_per_token, tokens="all"),
    "sglang reply": Format("sglang", "token", sglang_reply, rows="last", tokens="some"),
    "vllm npy": Format("vllm", "token", vllm_npy, rows="last"),
    "vllm reply": Format("vllm", "token", vllm_reply, rows="last", tokens="all"),
    "trtllm counts": Format("trtllm", "count", trtllm_counts),
    "trtllm raw": Format("trtllm", "token", trtllm_raw, borders=False),
    "trtllm cooccurrence": Format("trtllm", "pair", trtllm_cooccurrence),
    "megatron list": Format("replay", "token", megatron_list, borders=False),
    "megatron buffer": Format("replay", "token", megatron_buffer, borders=False),
    "verl batch": Format("replay", "token", verl_batch),
    "npz trace": Format("npz", "token", npz_trace, model=False, tokens="all"),
    "npz triples": Format("npz", "token-count", npz_triples, model=False),
    "npz counts": Format("npz", "count", npz_counts, model=False),
}
"""Every format but ExFlow's, which holds models of K = 1 only."""
