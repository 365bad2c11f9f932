"""TensorRT-LLM's static load balancer file: `moe_config.load_balancer: FILE.yaml`, WideEP backend.

`num_slots`, `initial_global_assignments` by decoder layer, `layer_updates_per_iter` 0 (more would replace the placement
while serving). A layer that is absent is a KeyError in the engine, those of multi-token prediction too.
"""

from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli.engines.engine_map import EngineMap, ModelLayers, identity_row

KEY = "initial_global_assignments"


def write(path: Path, found: EngineMap, layers: ModelLayers) -> None:
    import yaml

    assert found.layer_ids is not None
    slots = found.slots.shape[1]
    assignments = dict(zip(found.layer_ids, found.slots.tolist(), strict=True))
    plain = identity_row(slots, layers.num_experts)
    assignments |= {layers.hidden + extra: plain for extra in range(layers.extra)}
    content = {"num_slots": slots, KEY: assignments, "layer_updates_per_iter": 0}
    path.write_text(yaml.safe_dump(content, default_flow_style=None, sort_keys=False, width=1 << 20), encoding="utf-8")


def notes(_found: EngineMap, layers: ModelLayers) -> list[str]:
    said = ["set moe_config.load_balancer to FILE, with the WideEP backend"]
    if layers.extra:
        said.append(f"{layers.extra} layers of multi-token prediction keep their experts in order")
    return said


def matches(content: Any) -> bool:
    return isinstance(content, dict) and KEY in content


def parse(content: dict[str, Any]) -> EngineMap:
    assignments = content[KEY]
    ids = tuple(sorted(int(layer) for layer in assignments))
    return EngineMap(np.asarray([assignments[layer] for layer in ids]), layer_ids=ids)
