"""From checked records to the content of a trace: rows of level `token`, or counts of a lower level.

Axes: N rows of a file, of which M are sound, K experts a token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_profiles.choices import Level, SplitBy, SplitMode
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.importers.layers import Chosen
from smoe_profiles.importers.records import (
    DECODE,
    FAULTS,
    CountRecords,
    Fault,
    Records,
    Rejected,
    TokenRecords,
    check_rows,
    constant_sequences,
)
from smoe_profiles.levels import Entries, write_level
from smoe_profiles.split import PARTS, Document, assign_parts
from smoe_profiles.tables import count_tokens
from smoe_profiles.trace import UNKNOWN_TOKEN, Rows, TraceLayer
from smoe_profiles.trace_writer import ROW_GROUP, TraceWriter, sort_by_weight

MAX_REJECTED = 0.001
"""An import that rejects a larger share of its rows fails: the dump is not what it is taken for."""

DECODE_ROWS = 64
"""Decode passes carry no request ids: they are split by runs of at least so many rows, not token by token."""


@dataclass(frozen=True)
class Sound:
    """The rows to keep, [M] indices in file order; padding: rows of -1 alone; rejected: by fault."""

    rows: npt.NDArray[np.int64]
    padding: int
    rejected: dict[Fault, Rejected]


@dataclass(frozen=True)
class Wanted:
    """How rows are shared out and kept; order: False leaves counts by token id only, so that no prompt can be read."""

    split: SplitMode = SplitMode.HASH
    split_by: SplitBy = SplitBy.HASH
    order: bool = True


def sound_rows(records: TokenRecords, chosen: Chosen, where: str) -> Sound:
    """Judge every row. Raises InputError if more than MAX_REJECTED of the rows are rejected, or none is left."""
    ids = [records.ids[entry] for entry in chosen.entries]
    check = check_rows(ids, [layer.num_experts + layer.num_zero for layer in chosen.layers])
    fault = check.fault.copy()
    if any(layer.top_k < layer.num_experts for layer in chosen.layers):
        sequence, good = np.repeat(np.arange(len(records.seq_len)), records.seq_len), fault < 0
        seq_len = np.bincount(sequence[good], minlength=len(records.seq_len))
        constant = constant_sequences(ids if good.all() else [layer[good] for layer in ids], seq_len)
        fault[good & constant[sequence]] = FAULTS.index(Fault.CONSTANT)
    rejected = dict(records.rejected)
    for name in FAULTS[1:]:
        hit = np.flatnonzero(fault == FAULTS.index(name))
        if len(hit):
            entry = check.layer[hit[0]]
            first = f"{records.row_name(hit[0])}, layer {chosen.layers[entry].id}: {ids[entry][hit[0]].tolist()}"
            rejected[name] = Rejected(len(hit), first)
    padding = int((fault == FAULTS.index(Fault.PADDING)).sum())
    kept = np.flatnonzero(fault < 0)
    _check_share(len(kept), padding, rejected, where)
    return Sound(kept, padding, rejected)


def _check_share(kept: int, padding: int, rejected: dict[Fault, Rejected], where: str) -> None:
    lost = sum(entry.rows for entry in rejected.values())
    if lost > MAX_REJECTED * (kept + lost):
        reasons = "; ".join(f"{name}: {entry.rows} (first: {entry.first})" for name, entry in rejected.items())
        raise InputError(
            f"{where}: {lost} of {kept + lost} rows are rejected, and at most {MAX_REJECTED:.1%} may be. {reasons}."
        )
    if not kept:
        raise InputError(f"{where} holds no rows but {padding} of padding; there is nothing to import.")


def vocabulary(records: Records, model_vocab: int | None, where: str) -> int:
    """The number of token ids: the file's or the model's where said, else the largest id + 1, at least 1."""
    if isinstance(records, TokenRecords):
        known = records.token_id[records.token_id != UNKNOWN_TOKEN].astype(np.int64)
    elif records.level is Level.TOKEN_COUNT:
        known = np.concatenate([entries["token_id"] for entries in records.entries])
    else:
        known = np.empty(0, np.int64)
    largest = int(known.max(initial=-1))
    said = max(records.facts.vocab_size or 0, model_vocab or 0)
    if said and largest >= said:
        if isinstance(records, TokenRecords):
            where = records.row_name(int(np.argmax(records.token_id == largest)))
        raise InputError(f"{where} holds token id {largest}; the vocabulary has {said} entries.")
    return max(said, largest + 1, 1)


def write_records(
    folder: Path, records: Records, chosen: Chosen, sound: Sound | None, sources: Sequence[str], wanted: Wanted
) -> dict[str, Any]:
    """Write the records into a trace's folder. sound: of token records; sources: a name for each file.

    Returns what the manifest says of level, order, layers and rows.
    Raises ImpossibleError for `order` False where no token id is known.
    """
    if isinstance(records, CountRecords):
        level, ordered = records.level, False
        rows = _write_counts(folder, records, chosen, wanted.split)
    else:
        assert sound is not None
        part = split_rows(records, chosen, sound.rows, wanted)
        if wanted.order:
            level = Level.TOKEN
            rows, ordered = _write_rows(folder, records, chosen, sound.rows, part, sources)
        else:
            level, ordered = Level.TOKEN_COUNT, False
            rows = _write_token_counts(folder, records, chosen, sound.rows, part)
    return {
        "level": level.value,
        "ordered": ordered,
        "layers": [asdict(layer) for layer in chosen.layers],
        "rows": rows,
    }


def split_rows(
    records: TokenRecords, chosen: Chosen, rows: npt.NDArray[np.int64], wanted: Wanted
) -> npt.NDArray[np.int16]:
    """The part of every kept row, [M] indices into PARTS.

    A sequence is a document. It is hashed by its token ids or, where one is not known, by the experts of its first
    layer, each row as a set.
    """
    sequence = np.repeat(np.arange(len(records.seq_len)), records.seq_len)[rows]
    starts = document_starts(sequence, records.phase[rows])
    token_id, experts = records.token_id[rows], records.ids[chosen.entries[0]][rows].astype(np.uint32)

    def documents() -> Iterator[Document]:
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
            ids = token_id[start:stop]
            yield Document(np.sort(experts[start:stop], axis=1) if (ids == UNKNOWN_TOKEN).any() else ids, "")

    assigned = list(assign_parts(documents(), wanted.split, wanted.split_by))
    codes = np.array([PARTS.index(item.part) for item in assigned], np.int16)
    return np.repeat(codes, [len(item.document.token_ids) for item in assigned])


def document_starts(sequence: npt.NDArray[np.int64], phase: npt.NDArray[np.int16]) -> list[int]:
    """First rows of the documents, one a sequence; sequences of decode rows are joined up to DECODE_ROWS."""
    starts = [0]
    for start in (np.flatnonzero(sequence[1:] != sequence[:-1]) + 1).tolist():
        decoding = phase[start] == DECODE and phase[starts[-1]] == DECODE
        if not decoding or start - starts[-1] >= DECODE_ROWS:
            starts.append(start)
    return starts


def _write_rows(
    folder: Path,
    records: TokenRecords,
    chosen: Chosen,
    rows: npt.NDArray[np.int64],
    part: npt.NDArray[np.int16],
    sources: Sequence[str],
) -> tuple[dict[str, int], bool]:
    """Level `token`: rows by falling weight where weights are known, by id elsewhere. Returns rows by part, ordered."""
    names = list(dict.fromkeys(sources))
    numbers = {name: number for number, name in enumerate(names)}
    code = np.array([numbers[name] for name in sources], np.int16)
    sequence = np.repeat(np.arange(len(records.seq_len)), records.seq_len)
    weighted = _has_weights(records, chosen, rows)
    writer = TraceWriter(folder, chosen.layers, names)
    for start, stop in _runs(weighted):
        taken = rows[start:stop]
        experts, weights = _sorted(records, chosen, taken, bool(weighted[start]))
        writer.append(
            Rows(
                sequence=sequence[taken].astype(np.uint32),
                position=records.position[taken].astype(np.uint32),
                token_id=records.token_id[taken],
                phase=records.phase[taken],
                source=code[records.source[taken]],
                split=part[start:stop],
                experts=experts,
                weights=weights,
            )
        )
    writer.close()
    return writer.rows, bool(weighted.all())


def _has_weights(records: TokenRecords, chosen: Chosen, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    if records.weights is None:
        return np.zeros(len(rows), np.bool_)
    known = np.ones(len(rows), np.bool_)
    for entry in chosen.entries:
        known &= ~np.isnan(records.weights[entry][rows, 0])
    return known


def _runs(flags: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Runs of equal flags, none longer than a row group."""
    borders = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)]
    for start, stop in pairwise(borders):
        for first in range(start, stop, ROW_GROUP):
            yield first, min(first + ROW_GROUP, stop)


def _sorted(
    records: TokenRecords, chosen: Chosen, rows: npt.NDArray[np.int64], weighted: bool
) -> tuple[list[npt.NDArray[np.uint16]], list[npt.NDArray[np.float32] | None]]:
    ids = [records.ids[entry][rows].astype(np.int64) for entry in chosen.entries]
    if not weighted or records.weights is None:
        return [np.sort(chosen_ids, axis=1).astype(np.uint16) for chosen_ids in ids], [None] * len(ids)
    given = [records.weights[entry][rows].astype(np.float32) for entry in chosen.entries]
    pairs = [sort_by_weight(one, other) for one, other in zip(ids, given, strict=True)]
    return [experts for experts, _ in pairs], [weights for _, weights in pairs]


def _write_token_counts(
    folder: Path, records: TokenRecords, chosen: Chosen, rows: npt.NDArray[np.int64], part: npt.NDArray[np.int16]
) -> dict[str, int]:
    """Level `token-count` from rows: those whose token id is not known cannot be counted. Returns rows by part."""
    known = records.token_id[rows] != UNKNOWN_TOKEN
    if not known.any():
        raise ImpossibleError(
            "--no-order keeps counts by token id, and no token id is known here; give --tokens or leave --no-order out."
        )
    by_part = {name: rows[known & (part == code)] for code, name in enumerate(PARTS)}
    for layer, entry in zip(chosen.layers, chosen.entries, strict=True):
        size = layer.num_experts + layer.num_zero
        entries: dict[str, Entries] = {}
        for name, taken in by_part.items():
            counts = count_tokens(records.token_id[taken], records.ids[entry][taken].astype(np.uint16), size)
            entries[name] = {
                "token_id": counts.token_id.astype(np.int64),
                "expert": counts.expert.astype(np.int64),
                "count": counts.count,
            }
        write_level(folder, layer, Level.TOKEN_COUNT, entries)
    return {name: len(taken) for name, taken in by_part.items()}


def _write_counts(folder: Path, records: CountRecords, chosen: Chosen, split: SplitMode) -> dict[str, int]:
    """Counts of a lower level, whole in one part: they know no documents. Returns about how many rows were counted."""
    part = "heldout" if split is SplitMode.HELDOUT else "fit"
    rows = 0
    for layer, entry in zip(chosen.layers, chosen.entries, strict=True):
        write_level(folder, layer, records.level, {part: records.entries[entry]})
        rows = max(rows, _counted_rows(records.level, records.entries[entry], layer))
    return {name: rows if name == part else 0 for name in PARTS}


def _counted_rows(level: Level, entries: Entries, layer: TraceLayer) -> int:
    """Rows behind a layer's counts; where K is not known, activations."""
    top_k, count = max(layer.top_k, 1), entries["count"]
    if level is not Level.PAIR:
        return round(int(count.sum()) / top_k)
    own = int(count[entries["expert"] == entries["other"]].sum())
    return round(own / top_k) if own else round(int(count.sum()) / max(top_k * (top_k - 1), 1))


def count_notes(records: CountRecords, chosen: Chosen, where: str) -> list[str]:
    """What makes counts doubtful: sums that K does not divide.

    Raises InputError for an expert outside its layer, or a layer without any count.
    """
    for layer, entry in zip(chosen.layers, chosen.entries, strict=True):
        largest, total = records.largest(entry), layer.num_experts + layer.num_zero
        if largest >= total:
            raise InputError(f"{where}: expert {largest} is outside layer {layer.id}, which has {total}.")
        if records.blank(entry):
            raise InputError(f"{where} has experts in layer {layer.id}, but all their counts are zero.")
    if records.level is not Level.COUNT:
        return []
    odd = [
        layer.id
        for layer, entry in zip(chosen.layers, chosen.entries, strict=True)
        if layer.top_k and int(records.entries[entry]["count"].sum()) % layer.top_k
    ]
    return [f"{where}: the counts of layer {odd[0]} do not divide by K = {chosen.layers[0].top_k}"] if odd else []
