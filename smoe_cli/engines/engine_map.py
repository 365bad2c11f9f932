"""A placement as an engine's file says it, and what is wrong with it.

Axes: N rows (layers), P slots, E experts, G ranks. Slot p lies on rank p // (P / G) in every engine.
"""

from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EngineMap:
    """slots: [N, P] the expert of every slot. layer_ids: [N] decoder layers; None: rows are MoE layers in order, or,
    with every_layer, all decoder layers, dense ones too. num_ranks: G, or None where the file does not say.
    """

    slots: Int64Array
    layer_ids: tuple[int, ...] | None = None
    every_layer: bool = False
    num_ranks: int | None = None


@dataclass(frozen=True)
class ModelLayers:
    """What an engine's file needs to know of a model. moe: ids of its MoE layers; hidden: all decoder layers;
    extra: layers of multi-token prediction behind them.
    """

    moe: tuple[int, ...]
    num_experts: int
    hidden: int
    extra: int
    family: str


def identity_row(slots: int, num_experts: int) -> list[int]:
    """Experts in order, starting over where there are more slots."""
    return [slot % num_experts for slot in range(slots)]


def fill_layers(found: EngineMap, layers: ModelLayers) -> EngineMap:
    """The same with a row for every MoE layer, identity where it has none: engines read rows by position."""
    assert found.layer_ids is not None
    held = dict(zip(found.layer_ids, found.slots, strict=True))
    plain = np.array(identity_row(found.slots.shape[1], layers.num_experts))
    slots = np.stack([held.get(layer, plain) for layer in layers.moe])
    return EngineMap(slots, layers.moe, False, found.num_ranks)


def select_layers(found: EngineMap, layers: ModelLayers | None) -> EngineMap:
    """The same map with one row for each MoE layer, named by its decoder layer.

    Raises ValueError where the rows cannot be told.
    """
    if found.every_layer:
        if layers is None:
            raise ValueError("its rows are all decoder layers; which of them have experts is the model's to say")
        if len(found.slots) != layers.hidden:
            raise ValueError(f"it has {len(found.slots)} rows; the model has {layers.hidden} decoder layers")
        return EngineMap(found.slots[list(layers.moe)], layers.moe, False, found.num_ranks)
    if found.layer_ids is None:
        if layers is not None and len(found.slots) != len(layers.moe):
            raise ValueError(f"it has {len(found.slots)} rows; the model has {len(layers.moe)} MoE layers")
        ids = layers.moe if layers is not None else tuple(range(len(found.slots)))
        return EngineMap(found.slots, ids, False, found.num_ranks)
    if layers is None:
        return found
    missing = sorted(set(layers.moe) - set(found.layer_ids))
    if missing:
        raise ValueError(f"it does not name layer {missing[0]}, which has experts")
    rows = [found.layer_ids.index(layer) for layer in layers.moe]
    return EngineMap(found.slots[rows], layers.moe, False, found.num_ranks)


def faults(found: EngineMap, num_experts: int | None, num_ranks: int) -> list[str]:
    """Everything an engine would not notice before it serves wrongly, one sentence each; empty if sound.

    num_experts: of the model, or None to take the largest id that is named.
    """
    slots = found.slots.shape[1]
    experts = int(found.slots.max()) + 1 if num_experts is None else num_experts
    said = []
    if slots % num_ranks:
        smallest = ceil(experts / num_ranks) * num_ranks - experts
        said.append(
            f"{slots} slots are not the same number on each of {num_ranks} ranks; "
            f"the smallest legal redundancy is {smallest} ({experts + smallest} slots)"
        )
    names = found.layer_ids or tuple(range(len(found.slots)))
    for name, row in zip(names, found.slots, strict=True):
        if row.min() < 0 or row.max() >= experts:
            said.append(f"layer {name} names expert {int(row.max() if row.min() >= 0 else row.min())} of {experts}")
            continue
        absent = np.flatnonzero(np.bincount(row, minlength=experts) == 0)
        if len(absent):
            said.append(f"layer {name} does not hold expert {absent[0]}" + _more(len(absent) - 1))
        if slots % num_ranks == 0 and (twice := _twice_on_a_rank(row, num_ranks)):
            said.append(f"layer {name} holds expert {twice[0]} twice on rank {twice[1]}")
    return said


def _more(count: int) -> str:
    return f" and {count} more" if count else ""


def _twice_on_a_rank(row: Int64Array, num_ranks: int) -> tuple[int, int] | None:
    for rank, held in enumerate(row.reshape(num_ranks, -1)):
        experts, times = np.unique(held, return_counts=True)
        if (times > 1).any():
            return int(experts[times.argmax()]), rank
    return None
