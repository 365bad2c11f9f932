"""SGLang's initial expert location (0.5.23): `--init-expert-location FILE`, as JSON or as a tensor file.

One key, `physical_to_logical_map` [decoder layers, slots]: any other key would be passed on as an argument. Dense
layers have rows too. Only some model classes ask for a location; for the others the file is ignored.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli.engines.engine_map import EngineMap, ModelLayers, identity_row

KEY = "physical_to_logical_map"
FOLLOWING = (
    "deepseek", "qwen2_moe", "qwen3", "qwen4", "gpt_oss", "glm4", "glm_moe", "glm5", "minimax_m2", "minimax_m3",
    "longcat", "bailing", "step3", "exaone_moe", "nemotron_h", "mimo_v2", "sarvam", "kimi_k2",
)  # fmt: skip
"""How the families begin whose model class in SGLang asks for a location."""


def rows(found: EngineMap, layers: ModelLayers) -> list[list[int]]:
    """A row for each decoder layer; layers without experts hold the identity."""
    assert found.layer_ids is not None
    by_layer = dict(zip(found.layer_ids, found.slots.tolist(), strict=True))
    plain = identity_row(found.slots.shape[1], layers.num_experts)
    return [by_layer.get(layer, plain) for layer in range(layers.hidden)]


def write_json(path: Path, found: EngineMap, layers: ModelLayers) -> None:
    path.write_text(json.dumps({KEY: rows(found, layers)}) + "\n", encoding="utf-8")


def write_pt(path: Path, found: EngineMap, layers: ModelLayers) -> None:
    import torch

    torch.save({KEY: torch.tensor(rows(found, layers), dtype=torch.int64)}, path)


def notes(found: EngineMap, layers: ModelLayers) -> list[str]:
    """What a user must know before starting the engine with it."""
    redundant = found.slots.shape[1] - layers.num_experts
    flags = f"--ep-num-redundant-experts {redundant} --ep-size {found.num_ranks}"
    said = [f"start with --init-expert-location FILE {flags}"]
    if not layers.family.startswith(FOLLOWING):
        said.append(f"SGLang's class for {layers.family} does not ask for a location; the file would be ignored there")
    if layers.extra:
        said.append("draft (MTP) layers keep their experts in order")
    return said


def matches(content: Any) -> bool:
    return isinstance(content, dict) and KEY in content


def parse(content: dict[str, Any]) -> EngineMap:
    return EngineMap(np.asarray(content[KEY]), every_layer=True)
