"""`routed_experts` of server replies and arrays (SGLang 0.5.23, vLLM 0.33.0): logical ids [rows, layer, slot].

Row i is the token at position start + i; the last token of a sequence was never fed back and has no row. SGLang
sends base64 of raw int32, vLLM base64 of a .npy; both hold every decoder layer, dense ones zero, and no weights.
"""

import base64
import binascii
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_profiles.errors import InputError, reason
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
    require_model,
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

    def number(self, *keys: str) -> int | None:
        value = self.find(keys)
        if value is not None and (type(value) is not int or not 0 <= value < 2**32):
            raise InputError(f"{self.where} has {keys[0]} = {shortened(value)}; a whole number was expected.")
        return value

    def tokens(self, keys: Sequence[str], length_key: str) -> tuple[IntArray | None, int | None]:
        """Token ids and how many there are, each None if not known. Raises InputError if the two differ."""
        ids, length = self.find(keys), self.number(length_key)
        if ids is None:
            return None, length
        known = number_list(ids, f"{self.where}, {keys[0]}")
        if length not in (None, len(known)):
            raise InputError(f"{self.where} has {length_key} = {length}, but {len(known)} token ids.")
        return known, len(known)


def read(paths: Sequence[Path], options: ReadOptions) -> Records:
    """Replies (.json, .jsonl) and arrays (.npy), one sequence each."""
    pieces = [piece for index, path in enumerate(paths) for piece in _pieces(path, index, options.model)]
    return join(pieces, Facts(LayerAxis.HIDDEN, notes=tuple(_start_notes(pieces))))


def _start_notes(pieces: Sequence[Piece]) -> Iterator[str]:
    unknown = sum(piece.position is None for piece in pieces)
    late = sum(piece.position is not None and bool(piece.position[:1].any()) for piece in pieces)
    if unknown:
        yield (
            f"{unknown} of {len(pieces)} sequences do not say at which position they start: their positions are not "
            "known and are counted from 0"
        )
    if late:
        yield f"{late} of {len(pieces)} sequences have no rows for their first tokens, and start behind them"


def _pieces(path: Path, source: int, model: Model | None) -> Iterator[Piece]:
    if first_bytes(path).startswith(NPY_MAGIC):
        yield Piece(np.moveaxis(whole_numbers(load_npy(path), str(path), 3), 0, 1), str(path), source)
    else:
        for reply in load_replies(path):
            yield _piece(reply, source, model)


def load_replies(path: Path) -> list[Reply]:
    """The sequences of a file of replies, one or a list a line. Raises InputError if there is none."""
    documents = [
        entry for content in load_json(path) for entry in (content if isinstance(content, list) else [content])
    ]
    found = [
        reply
        for number, document in enumerate(documents)
        if isinstance(document, dict)
        for reply in _sequences(document, str(path), number)
    ]
    if not found:
        raise InputError(f"{path} has no {KEY}: not in a reply, its meta_info or its choices.")
    return found


def _sequences(document: dict[str, Any], path: str, number: int) -> Iterator[Reply]:
    """The routing of a reply itself, of its meta_info, and of each of its choices; number: of the reply in its file."""
    meta, choices, usage = (document.get(key) for key in ("meta_info", "choices", "usage"))
    meta = meta if isinstance(meta, dict) else {}
    where = f"{path}, reply {document.get('id') or meta.get('id') or number}"
    if document.get(KEY) is not None:
        yield Reply(document[KEY], (document,), where)
    if meta.get(KEY) is not None:
        yield Reply(meta[KEY], (meta, document), where)
    tables = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    whole = (document, usage) if len(tables) == 1 and isinstance(usage, dict) else (document,)
    for number, choice in enumerate(tables):
        if choice.get(KEY) is not None:
            yield Reply(choice[KEY], (choice, *whole), f"{where}, choice {choice.get('index', number)}")


def _piece(reply: Reply, source: int, model: Model | None) -> Piece:
    """The rows of a reply. Prompt ids are placed where the start is known, output ids from the end."""
    routed = _decoded(reply, model)
    rows = len(routed)
    prompt, prompt_len = reply.tokens(PROMPT_KEYS, "prompt_tokens")
    output, output_len = reply.tokens(OUTPUT_KEYS, "completion_tokens")
    start = _start(reply, rows, prompt_len, output_len)
    first_output = rows  # the row of the first output token
    if output_len is not None:
        first_output = rows + 1 - output_len
    elif start is not None and prompt_len is not None:
        first_output = prompt_len - start
    token_id = np.full(rows, -1, np.int64)
    if prompt is not None and start is not None:
        known = prompt[start : start + rows]
        token_id[: len(known)] = known
    if output is not None:
        token_id[first_output:] = output[:-1]
    return Piece(
        np.moveaxis(routed, 0, 1),
        reply.where,
        source,
        token_id=token_id,
        position=None if start is None else np.arange(start, start + rows, dtype=np.int64),
        phase=np.where(np.arange(rows) < first_output, PREFILL, DECODE).astype(np.int16),
    )


def _start(reply: Reply, rows: int, prompt_len: int | None, output_len: int | None) -> int | None:
    """The position of the first row: as said, or such that the rows end before the last token.

    None where it is neither said nor follows. Raises InputError if rows and tokens do not match.
    """
    said = reply.number(*START_KEYS)
    if output_len is not None and rows + 1 < output_len:
        raise InputError(f"{reply.where} has {rows} rows for {output_len} sampled tokens, of which the last has none.")
    if output_len is None or prompt_len is None:
        return said
    total = prompt_len + output_len
    start = total - 1 - rows
    if start < 0 or said not in (None, start):
        wanted = f"at most {total - 1}" if said is None else f"{total - 1 - said} from position {said}"
        raise InputError(
            f"{reply.where} has {rows} rows for {total} tokens; {wanted} were expected, since the last token has none."
        )
    return start


def _decoded(reply: Reply, model: Model | None) -> Array:
    """The routing of one reply, [rows, layer, slot]."""
    if not isinstance(reply.routed, str):
        raise InputError(f"{reply.where} has {KEY} of type {type(reply.routed).__name__}; base64 text was expected.")
    try:
        data = base64.b64decode(reply.routed, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{reply.where} has {KEY} that is no base64 ({reason(error)}).") from error
    if data.startswith(NPY_MAGIC):
        return whole_numbers(npy_from_bytes(data, reply.where), reply.where, 3)
    model = require_model(model, reply.where)
    layers, top_k = model.spec.num_hidden_layers, max(layer.top_k for layer in model.spec.layers)
    if len(data) % (4 * layers * top_k):
        raise InputError(
            f"{reply.where} has {len(data)} bytes of routing, which is no number of rows of {layers} layers and "
            f"{top_k} experts ({model.name})."
        )
    return np.frombuffer(data, "<i4").reshape(-1, layers, top_k)
