"""Router-replay tensors in .pt files: verl [batch, token, layer, slot] and Megatron-LM, both of 2026; logical ids.

Megatron: a list of [token, slot], one an MoE layer of the run (get_recorded_data), or its static buffer
[token, MoE layer, slot]. verl: one tensor of a batch, padded with -1 or by an attention mask beside it. No weights.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smoe_profiles.errors import InputError
from smoe_profiles.importers.files import Array, load_torch, tensor
from smoe_profiles.importers.records import Facts, LayerAxis, Piece, ReadOptions, Records, join

ROUTING_KEYS = ("routed_experts", "router_indices", "expert_ids", "topk_ids", "ids")
TOKEN_KEYS = ("input_ids", "tokens")
MASK_KEY = "attention_mask"


def read(paths: Sequence[Path], _options: ReadOptions) -> Records:
    """Each file holds every MoE layer of the run: routers of one pipeline stage alone do not say which they are."""
    pieces = [piece for source, path in enumerate(paths) for piece in _pieces(load_torch(path), f"{path}", source)]
    return join(pieces, Facts(LayerAxis.ORDINAL))


def _pieces(content: Any, where: str, source: int) -> Iterator[Piece]:
    table = content if isinstance(content, dict) else {}
    if table:
        key = next((key for key in ROUTING_KEYS if key in table), None)
        if key is None:
            raise InputError(f"{where} is a table without any of {', '.join(ROUTING_KEYS)}; it holds no replay tensor.")
        content = table[key]
    if isinstance(content, list | tuple):
        if all(getattr(entry, "ndim", 0) == 3 for entry in content):  # one sequence each
            for index, entry in enumerate(content):
                yield Piece(np.moveaxis(tensor(entry, where), 1, 0), f"{where}, sequence {index}", source)
        else:
            yield _of_list(content, where, source)
        return
    routed = tensor(content, where)
    if routed.ndim == 3:
        yield Piece(np.moveaxis(routed, 1, 0), where, source)
        return
    if routed.ndim != 4 or not routed.size:
        raise InputError(f"{where} has shape {list(routed.shape)}; [batch, token, layer, slot] was expected.")
    yield from _batch(routed, table, where, source)


def _of_list(content: Sequence[Any], where: str, source: int) -> Piece:
    """One [token, slot] for each MoE layer. Raises InputError if they differ: lists of several runs."""
    layers = [tensor(entry, f"{where}, router {index}", 2) for index, entry in enumerate(content)]
    shapes = {layer.shape for layer in layers}
    if len(shapes) != 1:
        raise InputError(
            f"{where} has routers of {len(shapes)} shapes {sorted(shapes)}; one list holds one run's MoE layers."
        )
    return Piece(np.stack(layers), where, source)


def _batch(routed: Array, table: dict[str, Any], where: str, source: int) -> Iterator[Piece]:
    """Every sequence of a padded batch, counted from its first row that is no padding.

    Rows that the mask leaves out become -1, so that they count as padding whatever they were filled with.
    """
    names = {"mask": (MASK_KEY,), "tokens": TOKEN_KEYS}
    found = {name: next((table[key] for key in keys if key in table), None) for name, keys in names.items()}
    beside = {name: None if value is None else tensor(value, f"{where}, {name}", 2) for name, value in found.items()}
    for name, array in beside.items():
        if array is not None and array.shape != routed.shape[:2]:
            raise InputError(f"{where}: {name} has shape {list(array.shape)}; the routing has {list(routed.shape)}.")
    for index, sequence in enumerate(routed):
        mask, tokens = (None if array is None else array[index] for array in beside.values())
        padding = (sequence == -1).all(axis=(1, 2)) if mask is None else mask == 0
        padded = sequence.astype(np.int64)
        padded[padding] = -1
        first = int(np.argmin(padding))
        yield Piece(
            np.moveaxis(padded, 1, 0),
            f"{where}, sequence {index}",
            source,
            token_id=None if tokens is None else np.where(padding, -1, tokens.astype(np.int64)),
            position=np.maximum(np.arange(len(sequence)) - first, 0),
        )
