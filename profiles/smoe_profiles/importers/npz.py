"""NumPy archives: ids [layer, token, slot] with their facts beside them, (token, expert, count) triples, counts.

Default keys: ids, tokens, weights, layer_ids (or layers, layer_id), seq_len, first_pos, num_experts, top_k and
vocab_size; triples tok_L{L}, exp_L{L}, cnt_L{L}; counts expert_counts [layer, E]; batches of vLLM-MoE-Logger
batch_size, prompt_len.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from smoe_profiles.choices import Level
from smoe_profiles.errors import InputError
from smoe_profiles.importers.files import Archive, Array, counts, whole_numbers
from smoe_profiles.importers.records import (
    DECODE,
    PREFILL,
    CountRecords,
    Facts,
    LayerAxis,
    Piece,
    ReadOptions,
    Records,
    count_entries,
    join,
)
from smoe_profiles.levels import Entries

AXES = ("batch", "layer", "token", "slot")
DEFAULT_AXES = {3: "layer,token,slot", 2: "token,slot"}
LAYER_KEYS = ("layer_ids", "layers", "layer_id")
TRIPLES = ("tok", "exp", "cnt")

IntArray = npt.NDArray[np.int64]


def read(paths: Sequence[Path], options: ReadOptions) -> Records:
    """All archives together; they must be of one kind. Rows keep the archives' order, counts add up."""
    archives = [Archive(path) for path in paths]
    kinds = [_kind(archive, options) for archive in archives]
    if len(set(kinds)) > 1:
        other = next(index for index, kind in enumerate(kinds) if kind != kinds[0])
        raise InputError(f"{paths[0]} holds {kinds[0]}, but {paths[other]} holds {kinds[other]}; import them apart.")
    if kinds[0] == "ids":
        facts = _same_facts([_facts(archive, options) for archive in archives], paths)
        return join([_piece(archive, options, index) for index, archive in enumerate(archives)], facts)
    reader, level = {"triples": (_triples, Level.TOKEN_COUNT), "counts": (_counts, Level.COUNT)}[kinds[0]]
    found = [reader(archive, options) for archive in archives]
    facts = _same_facts([facts for facts, _ in found], paths)
    return CountRecords(facts, level, [_added(list(layer)) for layer in zip(*(each for _, each in found), strict=True)])


def _kind(archive: Archive, options: ReadOptions) -> str:
    if options.ids is not None:
        return "ids"
    if _triple_layers(archive):
        return "triples"
    if options.triples:
        raise InputError(f"{archive.path} has no triples tok_L0, exp_L0, cnt_L0; it holds {', '.join(archive)}.")
    for key, kind in (("ids", "ids"), ("expert_counts", "counts")):
        if key in archive:
            return kind
    if "expert_to_rank" in archive or "physical_to_logical_map" in archive:
        raise InputError(f"{archive.path} is a placement of experts on ranks, not a record of routing; it has no ids.")
    raise InputError(
        f"{archive.path} has no array 'ids', triples or 'expert_counts'; it holds {', '.join(archive) or 'nothing'}. "
        "Name the expert ids with --ids."
    )


def _same_facts(facts: Sequence[Facts], paths: Sequence[Path]) -> Facts:
    """What the archives say together; one may be silent where another speaks. Raises InputError if two differ."""
    merged = facts[0]
    for other, path in zip(facts, paths, strict=True):
        for name in ("layer_ids", "num_experts", "top_k", "vocab_size"):
            one, two = getattr(merged, name), getattr(other, name)
            if one is None:
                merged = replace(merged, **{name: two})
            elif two is not None and one != two:
                raise InputError(f"{path} has {name} = {two}, but {paths[0]} has {one}; import them apart.")
    return merged


def _facts(archive: Archive, options: ReadOptions, layer_ids: tuple[int, ...] | None = None) -> Facts:
    numbers = _layer_numbers(archive, options) if layer_ids is None else layer_ids
    return Facts(
        axis=LayerAxis.NUMBERED if numbers else LayerAxis.ORDINAL,
        layer_ids=numbers,
        num_experts=archive.number("num_experts"),
        top_k=archive.number("top_k"),
        vocab_size=archive.number("vocab_size"),
    )


def _layer_numbers(archive: Archive, options: ReadOptions) -> tuple[int, ...]:
    """Decoder layers: those given as numbers, or of the key given, or of a default key; empty if there is none."""
    given = options.layer_ids
    if given is not None and re.fullmatch(r"\d{1,9}(,\d{1,9})*", given):
        return tuple(int(number) for number in given.split(","))
    key = given if given is not None else next((key for key in LAYER_KEYS if key in archive), None)
    if key is None:
        return ()
    numbers = whole_numbers(archive[key], f"{archive.path}, {key}")
    return tuple(int(number) for number in numbers.reshape(-1))


def _piece(archive: Archive, options: ReadOptions, source: int) -> Piece:
    key = options.ids or "ids"
    where = str(archive.path)
    raw = whole_numbers(archive[key], f"{where}, {key}")
    axes = _axis_names(options.axes, raw, f"{where}, {key}")
    ids, batches = _arranged(raw, axes)
    rows = ids.shape[1]
    named = archive[options.weights or "weights"] if options.weights or "weights" in archive else None
    tokens = _flat(archive, options.tokens, "tokens", batches)
    lengths = _flat(archive, options.seq_lens, "seq_len", None)
    if lengths is None and batches > 1:
        lengths = np.full(batches, rows // batches, np.int64)
    phase = position = None
    batch, prompts = (_flat(archive, None, key, None) for key in ("batch_size", "prompt_len"))
    if lengths is None and batch is not None and prompts is not None:
        for name, found in (("batch_size", batch), ("prompt_len", prompts)):
            if not 0 <= found.min(initial=0) <= found.max(initial=0) <= rows:
                raise InputError(f"{where} has {name} from {found.min()} to {found.max()}, but {rows} rows.")
        lengths, phase = logger_batches(batch, prompts)
    first = _flat(archive, None, "first_pos", None)
    if first is not None and lengths is not None and first.shape == lengths.shape and lengths.sum() == rows:
        position = np.arange(rows) - np.repeat(np.cumsum(lengths) - lengths - first, lengths)
    weights = None if named is None else _arranged(named, _axis_names(options.axes, named, f"{where}, weights"))[0]
    return Piece(ids, where, source, lengths, tokens, position, phase, weights)


def _axis_names(axes: str | None, array: Array, where: str) -> tuple[str, ...]:
    if not array.size:
        raise InputError(f"{where} has shape {list(array.shape)}: the files hold no rows.")
    names = tuple((axes or DEFAULT_AXES.get(array.ndim, "")).replace(" ", "").split(","))
    known = set(names) <= set(AXES) and len(set(names)) == len(names) and "token" in names
    if not known or len(names) != array.ndim:
        raise InputError(
            f"{where} has shape {list(array.shape)}, and its axes are given as {','.join(names)!r}; --axes names each "
            f"once, out of {', '.join(AXES)}."
        )
    return names


def _arranged(array: Array, names: tuple[str, ...]) -> tuple[Array, int]:
    """The array as [layer, token, slot], batches one after another, and the number of batches; views where possible."""
    wide = array[(...,) + (None,) * (len(AXES) - len(names))]
    order = [*names, *(name for name in AXES if name not in names)]
    batch, layer, token, slot = (order.index(name) for name in AXES)
    moved = wide.transpose(layer, batch, token, slot)
    return moved.reshape(moved.shape[0], -1, moved.shape[3]), moved.shape[1]


def _flat(archive: Archive, named: str | None, default: str, batches: int | None) -> IntArray | None:
    """An array of whole numbers as [n] int64: the one named, or the default key's; None if it is not there."""
    if named is None and default not in archive:
        return None
    key = named or default
    array = whole_numbers(archive[key], f"{archive.path}, {key}")
    if array.ndim > 2 or (array.ndim == 2 and array.shape[0] != batches):
        raise InputError(f"{archive.path}: {key} has shape {list(array.shape)}; one number a token was expected.")
    return array.reshape(-1).astype(np.int64)


def logger_batches(batch: IntArray, prompts: IntArray) -> tuple[IntArray, npt.NDArray[np.int16]]:
    """Sequences and phases of vLLM-MoE-Logger's batches: one row of each running request, then whole new prompts.

    batch: rows of each batch; prompts: tokens of each prompt. The decode rows of a batch are one sequence.
    """
    lengths: list[int] = []
    phases: list[int] = []
    started, waiting = 0, prompts.tolist()
    for size in batch.tolist():
        left, decode = size, min(size, started) if waiting else size
        left -= decode
        fresh = []
        while left > 0 and waiting and waiting[0] <= left:
            fresh.append(waiting.pop(0))
            left -= fresh[-1]
        started += len(fresh)
        fresh += [left] if left else []
        lengths += [decode] * bool(decode) + fresh
        phases += [DECODE] * bool(decode) + [PREFILL] * len(fresh)
    return np.array(lengths, np.int64), np.repeat(np.array(phases, np.int16), lengths)


def _triple_layers(archive: Archive) -> list[int]:
    found = (re.fullmatch(r"tok_L(\d{1,9})", key) for key in archive)
    return sorted(int(match[1]) for match in found if match)


def _triples(archive: Archive, options: ReadOptions) -> tuple[Facts, list[Entries]]:
    """(token, expert, count) of every layer, as their own entries."""
    layers = _triple_layers(archive)
    tables = []
    for layer in layers:
        keys = [f"{name}_L{layer}" for name in TRIPLES]
        columns = [counts(archive[key], f"{archive.path}, {key}", 1) for key in keys]
        if len({len(column) for column in columns}) > 1:
            lengths = ", ".join(f"{key}: {len(column)}" for key, column in zip(keys, columns, strict=True))
            raise InputError(f"{archive.path} has triples of unequal length ({lengths}).")
        tables.append(dict(zip(("token_id", "expert", "count"), columns, strict=True)))
    return _facts(archive, options, tuple(layers)), tables


def _counts(archive: Archive, options: ReadOptions) -> tuple[Facts, list[Entries]]:
    """expert_counts [layer, E] as entries of level count."""
    table = counts(archive["expert_counts"], f"{archive.path}, expert_counts", 2)
    facts = _facts(archive, options)
    if len(facts.layer_ids) != len(table):
        raise InputError(
            f"{archive.path} has expert_counts of {len(table)} layers and {len(facts.layer_ids)} layer numbers; "
            "give --layer-ids, a key or numbers such as 0,7,15."
        )
    num_experts = table.shape[1]
    if facts.num_experts not in (None, num_experts):
        raise InputError(f"{archive.path} counts {num_experts} experts, but says num_experts = {facts.num_experts}.")
    return replace(facts, num_experts=num_experts), [count_entries(row) for row in table]


def _added(tables: Sequence[Entries]) -> Entries:
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
