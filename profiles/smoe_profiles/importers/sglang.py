"""SGLang 0.5.23's expert distribution recorder (.pt), and the replies of its server.

stat, stat_approx: `logical_count` [step, layer, E], summed over ranks; the buffer is circular, so steps are added up.
per_pass, per_token: `records` of one rank each and `last_physical_to_logical_map` [layer, P], in force when dumped.
The layer axis has every decoder layer; ids of records are physical slots and are mapped back to logical experts.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_profiles.choices import Level
from smoe_profiles.errors import InputError
from smoe_profiles.importers import replies
from smoe_profiles.importers.files import Array, first_bytes, load_torch, number_list, tensor
from smoe_profiles.importers.records import (
    DECODE,
    PREFILL,
    CountRecords,
    Facts,
    Fault,
    LayerAxis,
    Piece,
    ReadOptions,
    Records,
    Rejected,
    join,
)
from smoe_profiles.levels import Entries
from smoe_profiles.models import Model

DECODE_MODE = 2
"""ForwardMode.DECODE; EXTEND is 1, MIXED 3."""

REBALANCED = "slots are mapped by the map at the time of the dump; record with EPLB off, or dump at every rebalance"


def read(paths: Sequence[Path], options: ReadOptions) -> Records:
    """Files of one recorder mode: steps of stat add up, records of several ranks are merged by forward_pass_id."""
    if first_bytes(paths[0]).lstrip()[:1] in (b"{", b"["):
        return replies.read(paths, options)
    dumps = [load_torch(path) for path in paths]
    kinds = {_kind(dump, path) for dump, path in zip(dumps, paths, strict=True)}
    if len(kinds) > 1:
        raise InputError(f"{', '.join(map(str, paths))} are of several recorder modes; import one mode at a time.")
    if kinds == {"logical_count"}:
        return _stat(dumps, paths)
    records, slots = _merged(dumps, paths)
    if all("topk_ids_of_layer" in record.content for record in records):
        return _per_token(records, slots, options.model)
    return _per_pass(records, slots)


def _kind(dump: Any, path: Path) -> str:
    keys = ("logical_count", "records")
    found = [key for key in keys if isinstance(dump, dict) and key in dump]
    if not found:
        raise InputError(f"{path} is no dump of SGLang's recorder: it has neither {' nor '.join(keys)}.")
    return found[0]


def _stat(dumps: Sequence[Any], paths: Sequence[Path]) -> Records:
    """Counts of every step and file added up, per layer [E]."""
    total: Array | None = None
    for dump, path in zip(dumps, paths, strict=True):
        counts = tensor(dump["logical_count"], f"{path}, logical_count")
        if counts.ndim not in (2, 3):
            raise InputError(f"{path} has logical_count {list(counts.shape)}; [step, layer, expert] was expected.")
        summed = counts.astype(np.int64).reshape(-1, *counts.shape[-2:]).sum(axis=0)
        if total is not None and total.shape != summed.shape:
            raise InputError(f"{path} counts {list(summed.shape)} layers and experts; {paths[0]} {list(total.shape)}.")
        total = summed if total is None else total + summed
    assert total is not None
    return CountRecords(
        Facts(LayerAxis.HIDDEN, num_experts=total.shape[1]), Level.COUNT, [_entries(row) for row in total]
    )


def _entries(counts: npt.NDArray[np.int64]) -> Entries:
    return {"expert": np.arange(len(counts)), "count": counts}


@dataclass(frozen=True)
class _Record:
    """One forward pass on one rank, with the file it came from."""

    content: dict[str, Any]
    forward_pass: int
    rank: int
    where: str
    source: int


def _merged(dumps: Sequence[Any], paths: Sequence[Path]) -> tuple[list[_Record], Array]:
    """All ranks' records by forward pass and rank, and the one slot map, [layer, P]."""
    records: dict[tuple[int, int, str], _Record] = {}
    slots: Array | None = None
    for source, (dump, path) in enumerate(zip(dumps, paths, strict=True)):
        own = tensor(dump.get("last_physical_to_logical_map"), f"{path}, last_physical_to_logical_map", 2)
        if slots is not None and not np.array_equal(own, slots):
            raise InputError(f"{path} has another last_physical_to_logical_map than {paths[0]}; import them apart.")
        slots = own
        for record in _listed(dump["records"], path):
            where = f"{path}, forward pass {record['forward_pass_id']}"
            key = (record["forward_pass_id"], record["rank"], str(record.get("gatherer_key", "primary")))
            if key in records:
                raise InputError(f"{where} of rank {record['rank']} stands in {records[key].where} already.")
            records[key] = _Record(record, key[0], key[1], where, source)
    assert slots is not None
    if slots.size == 0 or slots.min() < 0:
        raise InputError(f"{paths[0]} has a last_physical_to_logical_map that leaves slots empty or has none.")
    return [records[key] for key in sorted(records)], slots


def _listed(records: Any, path: Path) -> list[dict[str, Any]]:
    if not isinstance(records, list) or not records:
        raise InputError(f"{path} has no records; was the recorder started before it was dumped?")
    for index, record in enumerate(records):
        numbers = [record.get(key) for key in ("forward_pass_id", "rank")] if isinstance(record, dict) else [None]
        if not all(type(number) is int for number in numbers):
            raise InputError(f"{path}: record {index} does not name its forward_pass_id and rank.")
    return records


def _per_pass(records: Sequence[_Record], slots: Array) -> Records:
    """Counts by slot of every pass and rank, added up and mapped to experts."""
    total = np.zeros(slots.shape, np.int64)
    for record in records:
        counts = tensor(record.content.get("global_physical_count"), f"{record.where}, global_physical_count", 2)
        if counts.shape != slots.shape:
            raise InputError(f"{record.where} counts {list(counts.shape)} slots; the map has {list(slots.shape)}.")
        total += counts
    size = int(slots.max()) + 1
    logical = np.zeros((len(slots), size), np.int64)
    for layer, row in enumerate(total):
        np.add.at(logical[layer], slots[layer], row)
    facts = Facts(LayerAxis.HIDDEN, num_experts=size, id_space="physical", notes=(REBALANCED,))
    return CountRecords(facts, Level.COUNT, [_entries(row) for row in logical])


def _per_token(records: Sequence[_Record], slots: Array, model: Model | None) -> Records:
    """The ids of every pass. A pass whose rows without -1 are not its tokens is rejected whole: it was scattered."""
    chosen = {id(record): _topk(record, len(slots)) for record in records}
    kept, notes = _without_copies(records, chosen)
    layers = _expert_layers(kept, chosen, model)
    top_k = _used_slots([chosen[id(record)] for record in kept], layers, model)
    pieces: list[Piece] = []
    lost, first = 0, ""
    for record in kept:
        tokens = number_list(record.content.get("input_ids"), f"{record.where}, input_ids")
        rows = _whole_rows(chosen[id(record)][:, :, :top_k], layers, len(tokens))
        if rows is None:
            lost += len(tokens)
            first = first or f"{record.where}: {len(tokens)} tokens"
        elif len(tokens):
            pieces.append(_piece(record, _logical(rows, slots, layers), tokens))
    rejected = {Fault.UNMATCHED: Rejected(lost, first)} if lost else {}
    if not pieces:
        raise InputError(f"{records[0].where}: no pass has as many rows without -1 as tokens ({first or 'no tokens'}).")
    facts = Facts(LayerAxis.HIDDEN, num_experts=int(slots.max()) + 1, id_space="physical", notes=(REBALANCED, *notes))
    return join(pieces, facts, rejected)


def _topk(record: _Record, layers: int) -> Array:
    """[layer, token, slot], unused slots -1."""
    ids = tensor(record.content["topk_ids_of_layer"], f"{record.where}, topk_ids_of_layer", 3)
    if len(ids) != layers:
        raise InputError(f"{record.where} has {len(ids)} layers; the map has {layers}.")
    return ids


def _without_copies(records: Sequence[_Record], chosen: dict[int, Array]) -> tuple[list[_Record], list[str]]:
    """Without data-parallel attention every rank sees the same tokens: keep one of ranks that recorded the same."""
    digests: dict[int, Any] = {}
    for record in records:
        digest = digests.setdefault(record.rank, hashlib.sha256())
        ids = np.ascontiguousarray(chosen[id(record)])
        digest.update(repr((record.forward_pass, record.content.get("input_ids"), ids.shape)).encode())
        digest.update(ids.tobytes())
    first: dict[str, int] = {}
    for rank, digest in sorted(digests.items()):
        first.setdefault(digest.hexdigest(), rank)
    copies = sorted(set(digests) - set(first.values()))
    notes = [f"ranks {copies} recorded the same tokens as others and are left out"] if copies else []
    return [record for record in records if record.rank not in copies], notes


def _expert_layers(records: Sequence[_Record], chosen: dict[int, Array], model: Model | None) -> list[int]:
    """Decoder layers with experts: the model's, else those not blank (layers.choose_layers asks for the model then)."""
    count = len(chosen[id(records[0])])
    if model is not None:
        return [layer.id for layer in model.spec.layers if layer.id < count]
    return [layer for layer in range(count) if any((chosen[id(record)][layer] > 0).any() for record in records)]


def _used_slots(chosen: Sequence[Array], layers: list[int], model: Model | None) -> int:
    """How many of the 8 slots are in use: K. Raises InputError where the model has another K (fused shared experts)."""
    used = max((int((ids[layers] >= 0).any(axis=(0, 1)).sum()) for ids in chosen), default=0)
    if model is not None and layers and used:
        top_k = max(layer.top_k for layer in model.spec.layers)
        if used != top_k:
            raise InputError(
                f"the records use {used} slots a token, but {model.name} has {top_k} experts a token; record with "
                "shared-expert fusion off, K of at most 8, and give the --model that was served."
            )
    return max(used, 1)


def _whole_rows(ids: Array, layers: list[int], tokens: int) -> Array | None:
    """The first rows, one a token; None if they are not all there. Rows behind them are padding, -1 or (ROCm) zero."""
    whole = np.asarray((ids[layers] >= 0).all(axis=(0, 2)))
    head, tail = whole[:tokens], ids[layers][:, tokens:]
    return ids[:, :tokens] if len(head) == tokens and head.all() and not (tail > 0).any() else None


def _logical(ids: Array, slots: Array, layers: list[int]) -> npt.NDArray[np.int64]:
    """Slots as experts; a slot outside the map stays outside [0, E)."""
    mapped = ids.astype(np.int64)
    for layer in layers:
        outside = mapped[layer] >= slots.shape[1]
        inside = np.where(outside, 0, mapped[layer])
        mapped[layer] = np.where(outside, mapped[layer] + slots.max() + 1, slots[layer].astype(np.int64)[inside])
    return mapped


def _piece(record: _Record, ids: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> Piece:
    """A pass as rows: its extended sequences, or the running requests of a decode pass as one block."""
    decode = record.content.get("forward_mode") == DECODE_MODE
    given = {
        name: None if record.content.get(name) is None else number_list(record.content[name], f"{record.where}, {name}")
        for name in ("positions", "extend_seq_lens")
    }
    lengths, positions = given["extend_seq_lens"], given["positions"]
    known = lengths is not None and not decode and lengths.min(initial=0) >= 0 and lengths.sum() == len(tokens)
    return Piece(
        ids,
        record.where,
        record.source,
        seq_len=lengths if known else None,
        token_id=tokens,
        position=positions[: len(tokens)] if positions is not None and len(positions) >= len(tokens) else None,
        phase=np.full(len(tokens), DECODE if decode else PREFILL, np.int16),
    )
