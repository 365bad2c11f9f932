"""The claim itself: a legally renumbered model is the same function, an illegally renumbered one is not.

Both folders are loaded by transformers, in float32, as a serving engine would.
"""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from smoe_cli.checkpoint.comparison import TOLERANCE
from smoe_cli.checkpoint.layouts import blocking_layer
from smoe_profiles.models import find_model
from tests.checkpoint.conftest import permutations, regroup, whole_groups
from tests.profiles.tiny_models import CONFIGS, MOE_LAYERS, VOCAB

FREE = [name for name in CONFIGS if name != "deepseek_v2_grouped"]
PROMPTS = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, (2, 24)))


def run(folder):
    """(logits [B, S, V], chosen experts by decoder layer [T, K]) of a checkpoint folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    chosen = {}
    for index, layer in enumerate(model.base_model.layers):
        experts = getattr(layer.mlp, "experts", None)
        if experts is not None:
            experts.register_forward_pre_hook(
                lambda _module, args, index=index: chosen.update({index: args[1].numpy()})
            )
    with torch.inference_mode():
        return model(PROMPTS, use_cache=False).logits, chosen


@pytest.fixture(scope="module")
def original(tiny):
    cache = {}

    def load(name):
        if name not in cache:
            cache[name] = run(tiny(name))
        return cache[name]

    return load


def differences(name, order, original, tiny, folder):
    """(largest logit difference as a share of the largest logit, tokens that choose other experts)."""
    logits, chosen = original(name)
    new_logits, new_chosen = run(regroup(tiny(name), order, folder))
    assert list(chosen) == list(new_chosen) == MOE_LAYERS[name]
    others = 0
    for index, layer in enumerate(MOE_LAYERS[name]):
        logical = order[index][new_chosen[layer]]
        others += int((np.sort(logical, axis=1) != np.sort(chosen[layer], axis=1)).any(axis=1).sum())
    return float((new_logits - logits).abs().max() / logits.abs().max()), others


@pytest.mark.parametrize("name", FREE)
def test_any_renumbering_keeps_routing_and_logits(name, tiny, original, tmp_path):
    order = permutations(name, 7)
    assert blocking_layer(find_model(str(tiny(name))).spec.layers, order) is None
    error, others = differences(name, order, original, tiny, tmp_path / "copy")
    assert others == 0
    assert error <= TOLERANCE


@pytest.mark.parametrize("seed", [1, 2])
def test_whole_groups_keep_a_group_limited_model(seed, tiny, original, tmp_path):
    order = whole_groups("deepseek_v2_grouped", seed)
    assert blocking_layer(find_model(str(tiny("deepseek_v2_grouped"))).spec.layers, order) is None
    error, others = differences("deepseek_v2_grouped", order, original, tiny, tmp_path / "copy")
    assert others == 0
    assert error <= TOLERANCE


def test_groups_torn_apart_make_another_model_and_are_found_beforehand(tiny, original, tmp_path):
    order = permutations("deepseek_v2_grouped", 7)
    assert blocking_layer(find_model(str(tiny("deepseek_v2_grouped"))).spec.layers, order).id == 1
    error, others = differences("deepseek_v2_grouped", order, original, tiny, tmp_path / "copy")
    assert others > 0
    assert error > 1e-3
