"""A NumPy archive that says each expert's rank: `expert_to_rank` [MoE layers, E] and `layer_ids`, or slots outright as
`physical_to_logical_map`. Read only.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from smoe_cli.engines.engine_map import EngineMap

MOST_RANKS = 1 << 16


def matches(content: Any) -> bool:
    return isinstance(content, Mapping) and any(key in content for key in ("expert_to_rank", "physical_to_logical_map"))


def parse(content: Mapping[str, Any]) -> EngineMap:
    ids = tuple(int(layer) for layer in content["layer_ids"]) if "layer_ids" in content else None
    if "physical_to_logical_map" in content:
        return EngineMap(np.asarray(content["physical_to_logical_map"]), ids)
    to_rank = np.asarray(content["expert_to_rank"])
    if to_rank.ndim != 2 or not np.issubdtype(to_rank.dtype, np.integer):
        form = f"{to_rank.dtype} {list(to_rank.shape)}"
        raise ValueError(f"expert_to_rank is {form}; whole numbers [layers, E] were expected")
    ranks = int(to_rank.max(initial=0)) + 1
    if to_rank.min(initial=0) < 0 or ranks > MOST_RANKS:
        raise ValueError(f"it names ranks {to_rank.min()} to {ranks - 1}; 0 to {MOST_RANKS - 1} are possible")
    sizes = np.stack([np.bincount(row, minlength=ranks) for row in to_rank.astype(np.int64)])
    if (sizes != sizes[0, 0]).any():
        raise ValueError("ranks hold different numbers of experts; a map of slots needs the same on each")
    return EngineMap(np.argsort(to_rank, axis=1, kind="stable"), ids, num_ranks=ranks)
