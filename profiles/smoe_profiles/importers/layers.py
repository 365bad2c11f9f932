"""Which MoE layer each entry of a file's layer axis is, with its E and K.

Engines number layers in three ways (records.LayerAxis) and leave dense ones blank, which reads as expert 0 chosen K
times: they are dropped by the model's config, never by their content.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smoe_profiles.errors import InputError
from smoe_profiles.importers.records import CountRecords, Facts, LayerAxis, Records, TokenRecords
from smoe_profiles.models import Model
from smoe_profiles.trace import TraceLayer


@dataclass(frozen=True)
class Chosen:
    """The layers of a trace; entries: which entry of the file's layer axis each one is; expected: of the model."""

    layers: tuple[TraceLayer, ...]
    entries: tuple[int, ...]
    expected: int | None
    notes: tuple[str, ...] = ()


def choose_layers(records: Records, model: Model | None, where: str) -> Chosen:
    """Match the layer axis with the model's MoE layers, or take the file's word where no model is given.

    Raises InputError where the two disagree, or a blank layer needs a model to be told from a dense one.
    """
    numbers = records.facts.layer_ids
    if len(set(numbers)) != len(numbers) or min(numbers, default=0) < 0:
        raise InputError(f"{where} numbers its layers {list(numbers)}; each must stand once.")
    chosen = _without_model(records, where) if model is None else _with_model(records, model, where)
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
            _check_sizes(records, entry, table[number], model, where)
        elif records.facts.axis is LayerAxis.NUMBERED or not records.blank(entry):
            raise InputError(
                f"{where} has experts in layer {number}, but {model.name} has none there; is it the trace of another "
                "model?"
            )
    if not layers:
        raise InputError(f"{where} has none of the {len(table)} MoE layers of {model.name}.")
    return Chosen(layers, tuple(entry for entry, _ in kept), len(table))


def _numbers(records: Records, moe: Sequence[int], model: Model, where: str) -> list[int]:
    """The decoder layer of every entry of the axis."""
    facts, found = records.facts, _length(records)
    if facts.axis is LayerAxis.NUMBERED:
        return list(facts.layer_ids)
    hidden = model.spec.num_hidden_layers
    if found == hidden:
        return list(range(hidden))
    if found == len(moe) and facts.axis is LayerAxis.ORDINAL:
        return list(moe)
    wanted = f"{hidden} layers" if facts.axis is LayerAxis.HIDDEN else f"{len(moe)} MoE layers"
    raise InputError(f"{where} has {found} layers, but {model.name} has {wanted}.")


def _check_sizes(records: Records, entry: int, layer: TraceLayer, model: Model, where: str) -> None:
    facts = records.facts
    slots = records.ids[entry].shape[1] if isinstance(records, TokenRecords) else facts.top_k
    total = layer.num_experts + layer.num_zero
    for name, found, wanted in (("experts", facts.num_experts, total), ("experts a token", slots, layer.top_k)):
        if found is not None and found != wanted and not (name == "experts" and found == layer.num_experts):
            hint = " Is it the trace of another model, or are these slots of a balanced engine?"
            raise InputError(f"{where} has {found} {name} in layer {layer.id}, but {model.name} has {wanted}.{hint}")


def _without_model(records: Records, where: str) -> Chosen:
    facts = records.facts
    entries = tuple(range(_length(records)))
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
    notes = list(_order_notes(facts))
    num_experts, top_k = facts.num_experts, _top_k(records)
    if num_experts is None:
        num_experts = max(_largest(records, entry) for entry in entries) + 1
        notes.append(f"{where} does not say how many experts a layer has; {num_experts} from the largest id")
    if top_k is None:
        notes.append(f"{where} does not say how many experts a token has; give --model")
    layers = tuple(TraceLayer(number, num_experts, top_k or 0) for number in numbers)
    return Chosen(layers, entries, None, tuple(notes))


def _order_notes(facts: Facts) -> list[str]:
    if facts.axis is LayerAxis.ORDINAL:
        return ["layers are numbered from 0 in the file's order; give --model for the decoder's own numbers"]
    return []


def _length(records: Records) -> int:
    return len(records.ids if isinstance(records, TokenRecords) else records.entries)


def _top_k(records: Records) -> int | None:
    return records.ids[0].shape[1] if isinstance(records, TokenRecords) else records.facts.top_k


def _largest(records: Records, entry: int) -> int:
    if isinstance(records, TokenRecords):
        return int(records.ids[entry].max(initial=0))
    return max(int(records.entries[entry][name].max(initial=0)) for name in _expert_keys(records))


def _expert_keys(records: CountRecords) -> list[str]:
    return [name for name in records.entries[0] if name not in ("token_id", "count")]


def _check_id_type(records: Records, layer: TraceLayer, entry: int, where: str) -> None:
    """Ids that wrapped in a narrow type cannot be told from others: refuse a type that is too narrow (F-26)."""
    if not isinstance(records, TokenRecords):
        return
    dtype, total = records.ids[entry].dtype, layer.num_experts + layer.num_zero
    if total - 1 > np.iinfo(dtype).max:
        raise InputError(
            f"{where} keeps expert ids as {dtype}, which cannot name the {total} experts of layer {layer.id}: ids have "
            "wrapped around."
        )
