"""What runtime.safetensors holds: its arrays by name, type and axes, and its metadata, checked before use.

Axes: L MoE layers, P slots, E experts, G ranks, V vocabulary, D features of the linear map.
"""

import json
from pathlib import Path
from typing import Any

from smoe_profiles.errors import InputError, reason
from smoe_profiles.tensors import Shape, Shard, check_arrays, read_shard
from smoe_solvers.choices import Predictor

RUNTIME_VERSION = 1
STORED: list[Predictor] = [predictor for predictor in Predictor if predictor is not Predictor.SELECTED]
"""The predictors that `predictor` numbers."""

LAYOUTS = ("checkpoint", "map")
MOST_RANKS = 255
"""Labels of ranks are bytes."""


def check_runtime(path: Path) -> dict[str, str]:
    """The metadata of a file whose arrays are all there and fit together, before any of them is loaded.

    A file with the map alone, of a placement that no tables stand behind, names no predictors.
    Raises InputError for another version, or naming what does not fit.
    """
    shard = read_shard(path)
    version = shard.metadata.get("format_version")
    if version != str(RUNTIME_VERSION):
        raise InputError(f"{path} has format_version {version}; this smoe reads {RUNTIME_VERSION}.")
    ranks, layout = _whole(shard, "num_ranks"), shard.metadata.get("layout")
    if layout not in LAYOUTS or ranks > MOST_RANKS:
        raise InputError(f"{path} is for {ranks} ranks in the layout {layout!r}; smoe writes {' and '.join(LAYOUTS)}.")
    check_arrays(shard, {"layer_ids": ("I32", None), "physical_to_logical": ("U16", None, None)})
    named = _document(shard, "predictors")
    if named == []:
        return shard.metadata
    if not isinstance(named, list) or not set(map(str, named)) <= set(STORED):
        raise InputError(f"{path} names the predictors {named!r}; this smoe knows {', '.join(STORED)}.")
    check_arrays(shard, _shapes(shard, ranks, _whole(shard, "vocab_size"), _whole(shard, "top_k")))
    choice = _document(shard, "token_table")
    if not isinstance(choice, dict) or choice.keys() != {"pseudo", "unseen"} or type(choice["pseudo"]) is not float:
        raise InputError(f"{path} has token_table {choice!r}; how the token table was smoothed was expected.")
    return shard.metadata


def preferred_predictors(path: Path) -> list[Predictor]:
    """What validation preferred in each layer, [L]; nothing of a file with the map alone."""
    shard, names = read_shard(path), json.loads(check_runtime(path)["predictors"])
    stored = next((shard.read(tensor) for tensor in shard.tensors if tensor.name == "predictor"), b"")
    return [Predictor(names[number]) for number in stored]


def _shapes(shard: Shard, ranks: int, vocab: int, top_k: int) -> dict[str, Shape]:
    layers, slots = next(tensor.shape for tensor in shard.tensors if tensor.name == "physical_to_logical")
    if not layers or not 0 < top_k <= slots:
        raise InputError(f"{shard.path} has top_k {top_k} and {slots} slots in {layers} layers.")
    shapes: dict[str, Shape] = {
        "layer_ids": ("I32", layers),
        "token_scores": ("U8", layers, vocab, ranks),
        "token_rank": ("U8", layers, vocab),
        "token_confidence": ("U8", layers, vocab),
        "markov2_scores": ("U8", layers, ranks * ranks, ranks),
        "markov1_scores": ("U8", layers, ranks, ranks),
        "popularity": ("U8", layers, ranks),
        "predictor": ("U8", layers),
        "fusion.weights": ("F32", layers, 4),
    }
    mapped = next((tensor for tensor in shard.tensors if tensor.name == "linear.weight"), None)
    if mapped is not None and len(mapped.shape) == 3:
        features, experts = mapped.shape[1:]
        shapes |= dict.fromkeys(("linear.temperature", "early.temperature"), ("F32", layers))
        shapes |= {"linear.weight": ("F32", layers, features, experts), "early.affine": ("F32", layers, 2, experts)}
    return shapes


def _whole(shard: Shard, key: str) -> int:
    text = shard.metadata.get(key, "")
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or not int(text):
        raise InputError(f"{shard.path} has {key} {text!r}; a whole number above 0 was expected.")
    return int(text)


def _document(shard: Shard, key: str) -> Any:
    text = shard.metadata.get(key, "")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{shard.path} has {key} {text!r}, which is not JSON ({reason(error)}).") from error
