"""vllm-ascend's static expert map: `additional_config.eplb_config.expert_map_path`, JSON.

Layers are taken by position among the MoE layers, not by their `layer_id`; every device lists as many experts.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli.engines.engine_map import EngineMap, ModelLayers

KEY = "layer_list"


def write(path: Path, found: EngineMap, _layers: ModelLayers) -> None:
    assert found.num_ranks is not None
    listed = []
    for ordinal, row in enumerate(found.slots):
        held = row.reshape(found.num_ranks, -1).tolist()
        devices = [{"device_id": device, "device_expert": experts} for device, experts in enumerate(held)]
        listed.append({"layer_id": ordinal, "device_count": found.num_ranks, "device_list": devices})
    path.write_text(json.dumps({"moe_layer_count": len(listed), KEY: listed}) + "\n", encoding="utf-8")


def notes(found: EngineMap, layers: ModelLayers) -> list[str]:
    said = ["set additional_config.eplb_config.expert_map_path to FILE; the legacy runner alone reads it"]
    if found.slots.shape[1] > layers.num_experts:
        said.append("a rank uses one fixed copy of an expert, number rank mod copies, not the nearest")
    return said


def matches(content: Any) -> bool:
    return isinstance(content, dict) and KEY in content


def parse(content: dict[str, Any]) -> EngineMap:
    rows = []
    for layer in content[KEY]:
        devices = sorted(layer["device_list"], key=lambda device: int(device["device_id"]))
        if [device["device_id"] for device in devices] != list(range(len(devices))):
            raise ValueError(f"layer {layer['layer_id']} does not list every device once")
        if len({len(device["device_expert"]) for device in devices}) != 1:
            raise ValueError(f"layer {layer['layer_id']}: devices hold different numbers of experts")
        rows.append([expert for device in devices for expert in device["device_expert"]])
    return EngineMap(np.asarray(rows), num_ranks=len(content[KEY][0]["device_list"]))
