"""`routed_experts` of server replies and arrays (SGLang 0.5.23, vLLM 0.33.0): logical ids [rows, layer, slot].

Row i is the token at position start + i; the last token of a sequence was never fed back and has no row. SGLang
sends base64 of raw int32, vLLM base64 of a .npy; both hold every decoder layer, dense ones zero, and no weights.
"""

import base64
import binascii
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_profiles.errors import InputError
from smoe_profiles.importers.files import (
    NPY_MAGIC,
    Array,
    first_bytes,
    load_json,
    load_npy,
    npy_from_bytes,
    number_list,
    whole_numbers,
)
from smoe_profiles.importers.records import (
    DECODE,
    PREFILL,
    Facts,
    LayerAxis,
    Piece,
    ReadOptions,
    Records,
    join,
)
from smoe_profiles.models import Model

KEY = "routed_experts"
PROMPT_KEYS = ("prompt_token_ids", "input_ids")
OUTPUT_KEYS = ("output_ids", "output_token_ids", "token_ids")
START_KEYS = ("routed_experts_start_len", "routed_experts_prompt_start", "start")

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Reply:
    """One sequence: its encoded routing, and the tables in which its other facts are looked up, nearest first."""

    routed: Any
    tables: tuple[dict[str, Any], ...]
    where: str

    def find(self, keys: Sequence[str]) -> Any:
        found = (table[key] for table in self.tables for key in keys if table.get(key) is not None)
        return next(found, None)


def read(paths: Sequence[Path], options: ReadOptions) -> Records:
    """Replies (.json, .jsonl) and arrays (.npy), one sequence each."""
    pieces = [piece for index, path in enumerate(paths) for piece in _pieces(path, index, options.model)]
    return join(pieces, Facts(LayerAxis.HIDDEN))


def _pieces(path: Path, source: int, model: Model | None) -> Iterator[Piece]:
    if first_bytes(path).startswith(NPY_MAGIC):
        yield Piece(np.moveaxis(_three(load_npy(path), str(path)), 0, 1), str(path), source)
        return
    replies = [reply for document in load_json(path) for reply in find_replies(document, str(path))]
    if not replies:
        raise InputError(f"{path} has no {KEY}: not in a reply, its meta_info or its choices.")
    for reply in replies:
        yield _piece(reply, source, model)


def find_replies(document: Any, path: str) -> Iterator[Reply]:
    """Every sequence of a reply: its own routing, that of meta_info, of its choices, or of a list of replies."""
    if isinstance(document, list):
        for entry in document:
            yield from find_replies(entry, path)
    if not isinstance(document, dict):
        return
    meta = document.get("meta_info")
    choices = document.get("choices")
    nested = [meta] if isinstance(meta, dict) else []
    nested += [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    for tables in ((document,), *((table, document) for table in nested)):
        if tables[0].get(KEY) is not None:
            name = next(
                (str(value) for table in tables for value in (table.get("id"), table.get("index")) if value), ""
            )
            yield Reply(tables[0][KEY], tables, f"{path}{f', reply {name}' if name else ''}")


def _piece(reply: Reply, source: int, model: Model | None) -> Piece:
    routed = _decoded(reply, model)
    rows, start = len(routed), reply.find(START_KEYS) or 0
    if type(start) is not int or not 0 <= start < 2**32:
        raise InputError(f"{reply.where} starts at {start!r}; a position was expected.")
    prompt, output = (_ids(reply, keys) for keys in (PROMPT_KEYS, OUTPUT_KEYS))
    token_id, prompt_len = _aligned(reply.where, rows, start, prompt, output)
    position = np.arange(start, start + rows, dtype=np.int64)
    phase = np.where(position < prompt_len, PREFILL, DECODE).astype(np.int16)
    ids = np.moveaxis(routed, 0, 1)
    return Piece(ids, reply.where, source, token_id=token_id, position=position, phase=phase)


def _ids(reply: Reply, keys: Sequence[str]) -> IntArray | None:
    found = reply.find(keys)
    return None if found is None else number_list(found, f"{reply.where}, {keys[0]}")


def _aligned(
    where: str, rows: int, start: int, prompt: IntArray | None, output: IntArray | None
) -> tuple[IntArray | None, int]:
    """The token id of every row, [rows], and the length of the prompt (start + rows where it is not known).

    The rows end one before the last token, so that output ids alone can be placed too. Raises InputError if rows and
    tokens do not match.
    """
    if prompt is None and output is None:
        return None, start + rows
    if output is None:
        assert prompt is not None
        known = prompt[start : start + rows]
        return np.concatenate([known, np.full(rows - len(known), -1, np.int64)]), len(prompt)
    prompt_len = start + rows + 1 - len(output) if prompt is None else len(prompt)
    tokens = np.concatenate([np.full(max(prompt_len, 0), -1, np.int64) if prompt is None else prompt, output])
    if len(tokens) - 1 - start != rows:
        raise InputError(
            f"{where} has {rows} rows for {len(tokens)} tokens from position {start}; {len(tokens) - 1 - start} were "
            "expected: the last token has no row."
        )
    return tokens[start : start + rows], prompt_len


def _decoded(reply: Reply, model: Model | None) -> Array:
    """The routing of one reply, [rows, layer, slot]."""
    if not isinstance(reply.routed, str):
        raise InputError(f"{reply.where} has {KEY} of type {type(reply.routed).__name__}; base64 text was expected.")
    try:
        data = base64.b64decode(reply.routed, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{reply.where} has {KEY} that is no base64 ({error}).") from error
    if data.startswith(NPY_MAGIC):
        return _three(npy_from_bytes(data, reply.where), reply.where)
    if model is None:
        raise InputError(f"{reply.where} has {KEY} of raw int32, which does not say its shape; give --model.")
    layers, top_k = model.spec.num_hidden_layers, max(layer.top_k for layer in model.spec.layers)
    if len(data) % (4 * layers * top_k):
        raise InputError(
            f"{reply.where} has {len(data)} bytes of routing, which is no number of rows of {layers} layers and "
            f"{top_k} experts ({model.name})."
        )
    return np.frombuffer(data, "<i4").reshape(-1, layers, top_k)


def _three(array: Array, where: str) -> Array:
    return whole_numbers(array, where, 3)
