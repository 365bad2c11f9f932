"""Every family transformers can run: regrouped, verified byte for byte, and run beside its source."""

import numpy as np
import pytest
import torch

from smoe_cli.checkpoint.comparison import TOLERANCE
from smoe_cli.checkpoint.layouts import blocking_layer
from smoe_cli.checkpoint.loaded import compare_loaded, compare_mapped
from smoe_cli.checkpoint.rewrite import expected_rewrite
from smoe_cli.checkpoint.verify import compare_tensors
from smoe_profiles.capture.loading import LoadOptions, load_model
from smoe_profiles.models import find_model
from smoe_profiles.tensors import open_checkpoint
from tests.checkpoint import synthetic
from tests.checkpoint.conftest import edit_tensors, editable, permutations, regroup, whole_groups
from tests.profiles.tiny_models import EXPERTS, FAMILY_CONFIGS, MOE_LAYERS, VOCAB, installed

FAMILIES = installed(FAMILY_CONFIGS)
GROUPED = [  # by hand: configs with fewer groups chosen than there are, and a score that lets that matter
    *("deepseek_v2_grouped", "deepseek_v3", "kimi_k25", "mistral4", "glm4_moe", "bailing_hybrid", "axk1", "beam"),
]
RUN_ALL = [*("llama4_text", "llama4", "jetmoe", "aria_text", "aria")]
"""Families whose experts are not handed the ids of those chosen."""
PROMPTS = np.random.default_rng(1).integers(0, VOCAB, (2, 16))


def same_function(name, seed):
    return whole_groups(name, seed) if name in GROUPED else permutations(name, seed)


def logits(folder):
    model = load_model(find_model(str(folder)), LoadOptions(dtype="float32"))
    with torch.inference_mode():
        return model(input_ids=torch.from_numpy(PROMPTS), use_cache=False).logits


def difference(one, other):
    return float((one - other).abs().max() / one.abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_legal_renumbering_is_the_same_model(name, tiny, tmp_path):
    order = same_function(name, 3)
    source = find_model(str(tiny(name)))
    assert blocking_layer(source.spec.layers, order) is None
    copy = regroup(source, order, tmp_path / "copy")
    assert compare_tensors(expected_rewrite(source, order), open_checkpoint(copy), lambda _: None) == []
    steps = []
    report = compare_loaded(source, find_model(str(copy)), order, PROMPTS, steps.append, generate=False)
    assert report.passed
    assert len(steps) == len(MOE_LAYERS[name])
    assert [layer.layer for layer in report.layers] == MOE_LAYERS[name]
    assert {(layer.tokens, layer.mismatches, layer.ties) for layer in report.layers} == {(PROMPTS.size, 0, 0)}
    before, after = synthetic.contents(tiny(name)), synthetic.contents(copy)
    assert after.keys() == before.keys()  # no name is composed, doubled or dropped
    assert {key: found[:2] for key, found in after.items()} == {key: found[:2] for key, found in before.items()}
    assert sum(after[key] != before[key] for key in before) >= 2 * len(MOE_LAYERS[name])


@pytest.mark.parametrize(
    "name", ["gpt_oss", "deepseek_v4", "longcat_flash", "zaya", "dbrx", "ernie4_5_moe", "gemma4_text"]
)
def test_logits_agree_as_another_program_would_see_them(name, tiny, tmp_path):
    """The comparison above is ours; this one is a model call and a difference."""
    copy = regroup(tiny(name), permutations(name, 8), tmp_path / "copy")
    assert difference(logits(tiny(name)), logits(copy)) <= TOLERANCE


@pytest.mark.parametrize("name", installed(GROUPED))
def test_groups_torn_apart_make_another_model(name, tiny, tmp_path):
    order = permutations(name, 7)
    source = find_model(str(tiny(name)))
    assert blocking_layer(source.spec.layers, order).id == MOE_LAYERS[name][0]
    copy = find_model(str(regroup(source, order, tmp_path / "copy")))
    report = compare_loaded(source, copy, order, PROMPTS, lambda _: None, generate=False)
    assert sum(layer.mismatches for layer in report.layers) > 0
    assert report.logit_max_error > 1e-2
    assert not report.passed


FORGOTTEN = {
    "a selection bias": ("deepseek_v3", "model.layers.2.mlp.gate.e_score_correction_bias"),
    "a router": ("gpt_oss", "model.layers.1.mlp.router.weight"),
    "a router's own bias": ("gpt_oss", "model.layers.1.mlp.router.bias"),
    "a scale an expert": ("gemma4_text", "model.layers.1.router.per_expert_scale"),
    "a table of token ids": ("deepseek_v4", "model.layers.0.ffn.gate.tid2eid"),
    "one fused projection": ("granitemoe", "model.layers.1.block_sparse_moe.output_linear.weight"),
    "rows of experts, zero experts behind them": ("longcat_flash", "model.layers.1.mlp.router.classifier.weight"),
    "blocks of rows": ("dbrx", "transformer.blocks.1.ffn.experts.mlp.v1"),
}


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_a_tensor_left_in_the_old_order_is_found_by_name_and_by_running(forgotten, tiny, tmp_path):
    """Each of these alone makes another model; none stops an engine from starting."""
    name, tensor = FORGOTTEN[forgotten]
    order = same_function(name, 4)
    source = find_model(str(tiny(name)))
    copy = regroup(source, order, tmp_path / "copy")
    before = synthetic.contents(tiny(name))
    tensor = tensor if tensor in before else tensor.removeprefix("model.")
    synthetic.put(copy, {tensor: before[tensor][2]})
    found = compare_tensors(expected_rewrite(source, order), open_checkpoint(copy), lambda _: None)
    assert [line.split(":")[0] for line in found] == [tensor]
    report = compare_loaded(source, find_model(str(copy)), order, PROMPTS, lambda _: None, generate=False)
    assert not report.passed
    layer = int(next(part for part in tensor.split(".") if part.isdigit()))
    assert [found.layer for found in report.layers if not found.passed] == [layer]


@pytest.mark.parametrize("name", ["mixtral"])
def test_greedy_text_agrees_for_64_tokens_and_shows_a_fault_that_the_prompt_does_not(name, tiny, tmp_path):
    """The first token right, the rest wrong. Here one embedding that no prompt holds."""
    order = same_function(name, 6)
    source = find_model(str(tiny(name)))
    copy = regroup(source, order, tmp_path / "copy")
    report = compare_loaded(source, find_model(str(copy)), order, PROMPTS, lambda _: None)
    assert (report.generated, report.generated_differ, report.passed) == (64, 0, True)
    tensors = synthetic.contents(copy)
    table = next(key for key in tensors if key.endswith("embed_tokens.weight"))
    values = np.frombuffer(tensors[table][2], np.float32).reshape(VOCAB, -1).copy()
    values[np.setdiff1d(np.arange(VOCAB), PROMPTS)] *= -1
    synthetic.put(copy, {table: values.tobytes()})
    report = compare_loaded(source, find_model(str(copy)), order, PROMPTS, lambda _: None)
    assert all(layer.passed for layer in report.layers)
    assert report.generated_differ == 1
    assert not report.passed


@pytest.mark.parametrize("name", [*FAMILIES[::4], "longcat_flash", "zaya", "dbrx", "muse_spark"])
def test_a_map_applied_after_routing_changes_no_output(name, tiny):
    source, order = find_model(str(tiny(name))), permutations(name, 9)
    reports = compare_mapped(source, order, PROMPTS, lambda _: None)
    assert [report.layer for report in reports] == ([] if name in RUN_ALL else MOE_LAYERS[name])
    assert all(report.passed for report in reports)


@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_prompts_shorter_than_there_are_ranks_are_compared_too(tokens, tiny, tmp_path):
    """One token, and a number that nothing divides."""
    source, order = find_model(str(tiny("mixtral"))), permutations("mixtral", 3)
    copy = find_model(str(regroup(source, order, tmp_path / "copy")))
    report = compare_loaded(source, copy, order, PROMPTS[:1, :tokens], lambda _: None, generate=False)
    assert report.passed
    assert report.logit_tokens == tokens


def test_a_map_with_copies_changes_no_output_either(tiny):
    order = np.array([[*range(EXPERTS), 3, 1, 0, 6]] * 2)
    reports = compare_mapped(find_model(str(tiny("mixtral"))), order, PROMPTS, lambda _: None)
    assert [report.passed for report in reports] == [True, True]


def test_a_tie_is_counted_excused_and_no_reason_to_call_another_text_a_fault(tiny, tmp_path):
    """Two experts of one router row; which of them is first depends on their numbers alone."""
    source = editable(tiny("mixtral"), tmp_path / "source")
    name = "model.layers.1.block_sparse_moe.gate.weight"
    edit_tensors(source, lambda tensors: tensors[name].__setitem__(5, tensors[name][2]))
    order = np.tile(np.arange(EXPERTS), (2, 1))
    order[1, [2, 5]] = [5, 2]
    copy = find_model(str(regroup(source, order, tmp_path / "copy")))
    report = compare_loaded(find_model(str(source)), copy, order, PROMPTS, lambda _: None)
    assert [layer.ties > 0 for layer in report.layers] == [False, True]
    assert 0 < report.logits_excused < report.logit_tokens
    assert (report.generated, report.passed) == (0, True)
