"""What the validation rows say of a finished placement beside its goal. Axes: L layers, E experts, G ranks."""

from typing import Any

import numpy as np

from smoe_cli.placement import Placement, contiguous_placement
from smoe_profiles.tables import Tables
from smoe_solvers.predictors import local_counts


def validation_facts(tables: Tables, placement: Placement) -> dict[str, Any]:
    """The blocks a gain is judged on, how many rows are in one, and the fan-out with contiguous experts and placed."""
    contiguous = contiguous_placement(placement.layer_ids, placement.num_experts, placement.num_ranks)
    return {
        **block_facts(tables),
        "validation_fanout": None  # a row may choose among copies
        if placement.redundant
        else {"contiguous": _fanout(tables, contiguous), "placed": _fanout(tables, placement)},
    }


def block_facts(tables: Tables) -> dict[str, int]:
    """The blocks that a gain is judged on, and how many rows are in one."""
    start = next(tables.samples("validation")).block_start
    return {"validation_blocks": len(start) - 1, "validation_block_rows": round(float(np.diff(start).mean()))}


def _fanout(tables: Tables, placement: Placement) -> float:
    """Ranks that a row needs, mean over rows and layers."""
    layers = zip(tables.samples("validation"), placement.hosts, strict=True)
    return float(np.mean([(local_counts(rows.experts, hosts) > 0).sum(axis=1).mean() for rows, hosts in layers]))
