"""Which MoE layer each entry of a file's layer axis is, with its E and K.

Engines number layers in three ways (records.LayerAxis) and leave dense ones blank, which reads as expert 0 chosen K
times: they are dropped by the model's config, never by their content.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smoe_profiles.errors import InputError
from smoe_profiles.importers.records import LayerAxis, Records, TokenRecords, require_model
from smoe_profiles.models import Model
from smoe_profiles.trace import TraceLayer

MAX_EXPERTS = 2**16
"""Traces keep expert ids as u16 at most."""


@dataclass(frozen=True)
class Chosen:
    """The layers of a trace; entries: which entry of the file's layer axis each one is; expected: of the model."""

    layers: tuple[TraceLayer, ...]
    entries: tuple[int, ...]
    expected: int | None
    notes: tuple[str, ...] = ()


def choose_layers(records: Records, model: Model | None, where: str) -> Chosen:
    """Match the layer axis with the model's MoE layers, or take the file's word where no model is given.

    Raises InputError where the two disagree, or dense layers cannot be told without a model.
    """
    numbers = records.facts.layer_ids
    if len(set(numbers)) != len(numbers) or min(numbers, default=0) < 0:
        raise InputError(f"{where} numbers its layers {list(numbers)}; each must stand once.")
    if model is None and records.facts.axis is not LayerAxis.HIDDEN:
        chosen = _without_model(records, where)
    else:
        chosen = _with_model(records, require_model(model, where), where)
    for layer, entry in zip(chosen.layers, chosen.entries, strict=True):
        _check_id_type(records, layer, entry, where)
    return chosen


def _with_model(records: Records, model: Model, where: str) -> Chosen:
    table = {
        layer.id: TraceLayer(layer.id, layer.num_experts, layer.top_k, num_zero=layer.num_zero_experts)
        for layer in model.spec.layers
    }
    numbers = _numbers(records, list(table), model, where)
    kept = [(entry, number) for entry, number in enumerate(numbers) if number in table]
    layers = tuple(table[number] for _, number in kept)
    for entry, number in enumerate(numbers):
        if number in table:
            _check_sizes(records, table[number], model, where)
        elif records.facts.axis is LayerAxis.NUMBERED or not records.blank(entry):
            raise InputError(
                f"{where} has experts in layer {number}, but {model.name} has none there{_first_use(records, entry)}; "
                "is it the trace of another model?"
            )
    if not layers:
        raise InputError(f"{where} has none of the {len(table)} MoE layers of {model.name}.")
    return Chosen(layers, tuple(entry for entry, _ in kept), len(table))


def _numbers(records: Records, moe: Sequence[int], model: Model, where: str) -> list[int]:
    """The decoder layer of every entry of the axis."""
    facts, found = records.facts, records.num_entries
    if facts.axis is LayerAxis.NUMBERED:
        return list(facts.layer_ids)
    hidden = model.spec.num_hidden_layers
    if found == hidden:
        return list(range(hidden))
    if found == len(moe) and facts.axis is LayerAxis.ORDINAL:
        return list(moe)
    wanted = f"{hidden} layers" if facts.axis is LayerAxis.HIDDEN else f"{len(moe)} MoE layers"
    raise InputError(f"{where} has {found} layers, but {model.name} has {wanted}.")


def _check_sizes(records: Records, layer: TraceLayer, model: Model, where: str) -> None:
    num_experts, total = records.facts.num_experts, layer.num_experts + layer.num_zero
    for name, found, wanted in (("experts", num_experts, total), ("experts a token", records.top_k, layer.top_k)):
        if found is not None and found != wanted and not (name == "experts" and found == layer.num_experts):
            hint = " Is it the trace of another model, or are these slots of a balanced engine?"
            raise InputError(f"{where} has {found} {name} in layer {layer.id}, but {model.name} has {wanted}.{hint}")


def _without_model(records: Records, where: str) -> Chosen:
    facts = records.facts
    entries = tuple(range(records.num_entries))
    if facts.axis is LayerAxis.NUMBERED:
        numbers: Sequence[int] = facts.layer_ids
    else:
        numbers = entries
        blank = next((entry for entry in entries if records.blank(entry)), None)
        if blank is not None:
            raise InputError(
                f"{where}: layer {blank} is zero throughout, so it may be dense; give --model, so that the layers with "
                "experts are known."
            )
    notes = []
    if facts.axis is LayerAxis.ORDINAL:
        notes.append("layers are numbered from 0 in the file's order; give --model for the decoder's own numbers")
    num_experts, top_k = facts.num_experts, records.top_k
    if num_experts is None:
        num_experts = max(records.largest(entry) for entry in entries) + 1
        notes.append(f"{where} does not say how many experts a layer has; {num_experts} from the largest id")
    if top_k is None:
        notes.append(f"{where} does not say how many experts a token has; give --model")
    layers = tuple(TraceLayer(number, num_experts, top_k or 0) for number in numbers)
    return Chosen(layers, entries, None, tuple(notes))


def _first_use(records: Records, entry: int) -> str:
    """Where a layer is first not blank, in words."""
    if not isinstance(records, TokenRecords):
        return ""
    return f" (first: {records.row_name(int((records.ids[entry] > 0).any(axis=1).argmax()))})"


def _check_id_type(records: Records, layer: TraceLayer, entry: int, where: str) -> None:
    """Ids that wrapped in a narrow type cannot be told from others: refuse a type that is too narrow."""
    total = layer.num_experts + layer.num_zero
    if total > MAX_EXPERTS:
        raise InputError(f"{where} has {total} experts in layer {layer.id}; a trace can name {MAX_EXPERTS}.")
    if not isinstance(records, TokenRecords):
        return
    dtype = records.ids[entry].dtype
    if total - 1 > np.iinfo(dtype).max:
        raise InputError(
            f"{where} keeps expert ids as {dtype}, which cannot name the {total} experts of layer {layer.id}: ids have "
            "wrapped around."
        )
