"""What DeepSeek's EPLB returns: `phy2log` [layers, P], `log2phy` [layers, E, most copies] padded with -1, `logcnt`
[layers, E]; rows are MoE layers in order.
"""

from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli.engines.engine_map import EngineMap, Int64Array, ModelLayers

KEY = "phy2log"


def copies(slots: Int64Array, num_experts: int) -> tuple[Int64Array, Int64Array]:
    """log2phy [N, E, X], the slots of every expert in rising order padded with -1, and logcnt [N, E]."""
    logcnt = np.stack([np.bincount(row, minlength=num_experts) for row in slots])
    log2phy = np.full((*logcnt.shape, int(logcnt.max())), -1, np.int64)
    for layer, row in enumerate(slots):
        order = np.argsort(row, kind="stable")
        first = np.searchsorted(row[order], np.arange(num_experts))
        log2phy[layer, row[order], np.arange(len(row)) - first[row[order]]] = order
    return log2phy, logcnt.astype(np.int64)


def write(path: Path, found: EngineMap, layers: ModelLayers) -> None:
    import torch

    log2phy, logcnt = copies(found.slots, layers.num_experts)
    arrays = {KEY: found.slots, "log2phy": log2phy, "logcnt": logcnt}
    torch.save({name: torch.from_numpy(np.ascontiguousarray(array, np.int64)) for name, array in arrays.items()}, path)


def notes(_found: EngineMap, _layers: ModelLayers) -> list[str]:
    return ["rows are the MoE layers in order, as rebalance_experts returns them"]


def matches(content: Any) -> bool:
    return isinstance(content, dict) and KEY in content


def parse(content: dict[str, Any]) -> EngineMap:
    return EngineMap(np.asarray(content[KEY]))
