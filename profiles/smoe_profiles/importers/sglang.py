"""SGLang 0.5.23's expert distribution recorder (.pt), and the replies of its server.

stat, stat_approx: `logical_count` [step, layer, E], summed over ranks; the buffer is circular, so steps are added up.
per_pass, per_token: `records` of one rank each and `last_physical_to_logical_map` [layer, P], in force when dumped.
The layer axis has every decoder layer; ids of records are physical slots and are mapped back to logical experts.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_profiles.choices import Level
from smoe_profiles.errors import InputError
from smoe_profiles.importers import replies
from smoe_profiles.importers.files import Array, counts, first_bytes, load_torch, number_list, tensor
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
    count_entries,
    join,
    require_model,
)
from smoe_profiles.models import Model

DECODE_MODE = 2
"""ForwardMode.DECODE; EXTEND is 1, MIXED 3."""

SLOT_MAP = "last_physical_to_logical_map"
REBALANCED = "slots are mapped by the map at the time of the dump; record with EPLB off, or dump at every rebalance"

IntArray = npt.NDArray[np.int64]


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
    passes, slots = _merged(dumps, paths)
    model = require_model(options.model, str(paths[0]))
    _check_map(slots, model, paths[0])
    if all("topk_ids_of_layer" in one.record for one in passes):
        return _per_token(passes, slots, model)
    return _per_pass(passes, slots, model)


def _kind(dump: Any, path: Path) -> str:
    keys = ("logical_count", "records")
    found = [key for key in keys if isinstance(dump, dict) and key in dump]
    if not found:
        raise InputError(f"{path} is no dump of SGLang's recorder: it has neither {' nor '.join(keys)}.")
    return found[0]


def _stat(dumps: Sequence[Any], paths: Sequence[Path]) -> Records:
    """Counts of every step and file added up, per layer [E]."""
    tables: list[IntArray] = []
    for dump, path in zip(dumps, paths, strict=True):
        where = f"{path}, logical_count"
        steps = counts(tensor(dump["logical_count"], where), where)
        if steps.ndim not in (2, 3) or not steps.size:
            raise InputError(f"{path} has logical_count {list(steps.shape)}; [step, layer, expert] was expected.")
        tables.append(steps.reshape(-1, *steps.shape[-2:]).sum(axis=0))
        if tables[0].shape != tables[-1].shape:
            shapes = f"{list(tables[-1].shape)} layers and experts; {paths[0]} {list(tables[0].shape)}"
            raise InputError(f"{path} counts {shapes}.")
    total = np.sum(tables, axis=0)
    facts = Facts(LayerAxis.HIDDEN, num_experts=total.shape[1])
    return CountRecords(facts, Level.COUNT, [count_entries(row) for row in total])


@dataclass(frozen=True)
class _Pass:
    """One forward pass on one rank, with the file it came from."""

    record: dict[str, Any]
    number: int
    rank: int
    where: str
    source: int


def _merged(dumps: Sequence[Any], paths: Sequence[Path]) -> tuple[list[_Pass], Array]:
    """All ranks' passes by number and rank, and the one slot map, [layer, P]."""
    passes: dict[tuple[int, int, str], _Pass] = {}
    slots: Array | None = None
    for source, (dump, path) in enumerate(zip(dumps, paths, strict=True)):
        own = tensor(dump.get(SLOT_MAP), f"{path}, {SLOT_MAP}", 2)
        if own.size == 0 or own.min() < 0:
            raise InputError(f"{path} has a {SLOT_MAP} that leaves slots empty or has none.")
        if slots is not None and not np.array_equal(own, slots):
            raise InputError(f"{path} has another {SLOT_MAP} than {paths[0]}; import them apart.")
        slots = own
        for record in _listed(dump["records"], path):
            number, rank = record["forward_pass_id"], record["rank"]
            where = f"{path}, forward pass {number}"
            key = (number, rank, str(record.get("gatherer_key", "primary")))
            if key in passes:
                raise InputError(f"{where} of rank {rank} stands in {passes[key].where} already.")
            passes[key] = _Pass(record, number, rank, where, source)
    assert slots is not None
    return [passes[key] for key in sorted(passes)], slots


def _listed(records: Any, path: Path) -> list[dict[str, Any]]:
    if not isinstance(records, list) or not records:
        raise InputError(f"{path} has no records; was the recorder started before it was dumped?")
    for index, record in enumerate(records):
        numbers = [record.get(key) for key in ("forward_pass_id", "rank")] if isinstance(record, dict) else [None]
        if not all(type(number) is int for number in numbers):
            raise InputError(f"{path}: record {index} does not name its forward_pass_id and rank.")
    return records


def _moe_layers(slots: Array, model: Model) -> list[int]:
    """Decoder layers with experts, of those that the map has."""
    return [layer.id for layer in model.spec.layers if layer.id < len(slots)]


def _check_map(slots: Array, model: Model, path: Path) -> None:
    """Raises InputError unless every layer's slots serve all experts of the model and no others."""
    for layer in model.spec.layers:
        if layer.id >= len(slots):
            break
        row, total = slots[layer.id], layer.num_experts + layer.num_zero_experts
        if row.max() >= total:
            found = int(row.max()) + 1
            raise InputError(
                f"{path} maps the slots of layer {layer.id} to {found} experts, but {model.name} has {total}."
            )
        missing = np.setdiff1d(np.arange(layer.num_experts), row)
        if len(missing):
            raise InputError(f"{path} maps no slot of layer {layer.id} to expert {missing[0]}; each must be served.")


def _per_pass(passes: Sequence[_Pass], slots: Array, model: Model) -> Records:
    """Counts by slot of every pass and rank, added up and mapped to experts; dense layers stay by slot."""
    total = np.zeros(slots.shape, np.int64)
    for one in passes:
        where = f"{one.where}, global_physical_count"
        found = counts(tensor(one.record.get("global_physical_count"), where, 2), where)
        if found.shape != slots.shape:
            raise InputError(f"{one.where} counts {list(found.shape)} slots; the map has {list(slots.shape)}.")
        total += found
    logical = list(total)
    for layer in _moe_layers(slots, model):
        logical[layer] = np.zeros(int(slots[layer].max()) + 1, np.int64)
        np.add.at(logical[layer], slots[layer], total[layer])
    facts = Facts(LayerAxis.HIDDEN, id_space="physical", notes=(REBALANCED,))
    return CountRecords(facts, Level.COUNT, [count_entries(row) for row in logical])


@dataclass(frozen=True)
class _Chosen:
    """A pass of per_token. ids: [layer, row, slot column] physical, -1 where unused; tokens: [T], T <= rows."""

    forward: _Pass
    ids: Array
    tokens: IntArray


def _per_token(passes: Sequence[_Pass], slots: Array, model: Model) -> Records:
    """The ids of every pass. A pass whose rows without -1 are not its tokens is rejected whole: it was scattered."""
    layers = _moe_layers(slots, model)
    kept, notes = _without_copies([_chosen(one, len(slots)) for one in passes])
    top_k = _used_columns(kept, layers, model)
    pieces: list[Piece] = []
    lost, first = 0, "no tokens"
    for chosen in kept:
        rows = _whole_rows(chosen.ids[:, :, :top_k], layers, len(chosen.tokens))
        if rows is None:
            first = first if lost else f"{chosen.forward.where}: {len(chosen.tokens)} tokens"
            lost += len(chosen.tokens)
        elif len(chosen.tokens):
            pieces.append(_piece(chosen, _logical(chosen.forward, rows, slots, layers)))
    if not pieces:
        raise InputError(f"{passes[0].where}: no pass has as many rows without -1 as tokens ({first}).")
    rejected = {Fault.UNMATCHED: Rejected(lost, first)} if lost else {}
    return join(pieces, Facts(LayerAxis.HIDDEN, id_space="physical", notes=(REBALANCED, *notes)), rejected)


def _chosen(one: _Pass, layers: int) -> _Chosen:
    ids = tensor(one.record["topk_ids_of_layer"], f"{one.where}, topk_ids_of_layer", 3)
    if len(ids) != layers:
        raise InputError(f"{one.where} has {len(ids)} layers; the map has {layers}.")
    return _Chosen(one, ids, number_list(one.record.get("input_ids"), f"{one.where}, input_ids"))


def _without_copies(passes: Sequence[_Chosen]) -> tuple[list[_Chosen], list[str]]:
    """Without data-parallel attention every rank sees the same tokens: keep one of ranks that recorded the same."""
    digests: dict[int, Any] = {}
    for chosen in passes:
        digest = digests.setdefault(chosen.forward.rank, hashlib.sha256())
        digest.update(repr((chosen.forward.number, chosen.ids.shape)).encode())
        digest.update(chosen.tokens.tobytes() + np.ascontiguousarray(chosen.ids).tobytes())
    first: dict[str, int] = {}
    for rank, digest in sorted(digests.items()):
        first.setdefault(digest.hexdigest(), rank)
    copies = sorted(set(digests) - set(first.values()))
    notes = [f"ranks {copies} recorded the same tokens as others and are left out"] if copies else []
    return [chosen for chosen in passes if chosen.forward.rank not in copies], notes


def _used_columns(passes: Sequence[_Chosen], layers: list[int], model: Model) -> int:
    """How many of the 8 columns are in use: K. Raises InputError where the model has another K (fused experts)."""
    used = [int((chosen.ids[layers] >= 0).any(axis=(0, 1)).sum()) for chosen in passes]
    top_k = max(layer.top_k for layer in model.spec.layers)
    if max(used) not in (0, top_k):
        raise InputError(
            f"{passes[used.index(max(used))].forward.where} uses {max(used)} slots a token, but {model.name} has "
            f"{top_k} experts a token; record with shared-expert fusion off, K of at most 8, and give the --model that "
            "was served."
        )
    return top_k


def _whole_rows(ids: Array, layers: list[int], tokens: int) -> Array | None:
    """The first rows, one a token; None if they are not all there. Rows behind them are padding, -1 or (ROCm) zero."""
    whole = np.asarray((ids[layers] >= 0).all(axis=(0, 2)))
    head, tail = whole[:tokens], ids[layers][:, tokens:]
    return ids[:, :tokens] if len(head) == tokens and head.all() and not (tail > 0).any() else None


def _logical(one: _Pass, ids: Array, slots: Array, layers: list[int]) -> IntArray:
    """Slots as experts. Raises InputError for a slot that the map does not have."""
    mapped = ids.astype(np.int64)
    for layer in layers:
        if mapped[layer].max(initial=0) >= slots.shape[1]:
            raise InputError(
                f"{one.where} uses slot {mapped[layer].max()} in layer {layer}; the map has slots 0 to "
                f"{slots.shape[1] - 1}."
            )
        mapped[layer] = slots[layer][mapped[layer]]
    return mapped


def _piece(chosen: _Chosen, ids: IntArray) -> Piece:
    one, rows = chosen.forward, len(chosen.tokens)
    decode = one.record.get("forward_mode") == DECODE_MODE
    position = number_list(one.record.get("positions"), f"{one.where}, positions")[:rows]
    if len(position) < rows:
        raise InputError(f"{one.where} has {len(position)} positions for {rows} tokens.")
    return Piece(
        ids,
        one.where,
        one.source,
        seq_len=_sequences(one, position, decode=decode),
        token_id=chosen.tokens,
        position=position,
        phase=np.full(rows, DECODE if decode else PREFILL, np.int16),
    )


def _sequences(one: _Pass, position: IntArray, *, decode: bool) -> IntArray:
    """Rows of each sequence of a pass, in none of which a position repeats.

    Extended sequences are told by their lengths or, without them, by positions that do not go on. A decode pass has a
    row of every running request and does not say whose: it is cut where positions do not rise.
    """
    rows, steps = len(position), np.diff(position)
    lengths = one.record.get("extend_seq_lens")
    if decode or lengths is None:
        borders = np.flatnonzero(steps <= 0 if decode else steps != 1) + 1
        return np.diff(np.concatenate([[0], borders, [rows]]))
    found = number_list(lengths, f"{one.where}, extend_seq_lens")
    if found.min(initial=0) < 0 or found.sum() != rows:
        raise InputError(f"{one.where} has extend_seq_lens {shortened(found.tolist())}, but {rows} tokens.")
    goes_on = np.ones(rows + 1, np.bool_)
    goes_on[np.cumsum(found) - found] = False
    if (steps[goes_on[1:rows]] <= 0).any():
        raise InputError(f"{one.where} has positions that do not rise within a sequence of its extend_seq_lens.")
    return found
