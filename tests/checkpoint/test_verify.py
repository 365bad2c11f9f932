"""Faults of a regrouped checkpoint, planted one by one: each is found, and found by name."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from smoe_cli.checkpoint.layerwise import compare_routing
from smoe_cli.checkpoint.rewrite import expected_rewrite
from smoe_cli.checkpoint.verify import compare_tensors
from smoe_profiles.errors import ImpossibleError
from smoe_profiles.models import find_model
from smoe_profiles.tensors import open_checkpoint
from tests.checkpoint.conftest import edit_tensors, editable, permutations, regroup, whole_groups
from tests.profiles.tiny_models import CONFIGS, MOE_LAYERS, VOCAB

BLOCK = "model.layers.{}.block_sparse_moe"
GATE = f"{BLOCK}.gate.weight"
EXPERT = f"{BLOCK}.experts.{{}}.w1.weight"
ORDER = permutations("mixtral", 3)
PROMPTS = np.random.default_rng(1).integers(0, VOCAB, (3, 16))


@pytest.fixture(scope="module")
def right(tiny, tmp_path_factory):
    """A faultless regrouped Mixtral."""
    return regroup(tiny("mixtral"), ORDER, tmp_path_factory.mktemp("right") / "copy")


@pytest.fixture
def copy(right, tmp_path):
    """A regrouped Mixtral to damage."""
    return editable(right, tmp_path / "copy")


def failures(source, written, order=ORDER):
    model = find_model(str(source))
    done = []
    found = compare_tensors(expected_rewrite(model, order), open_checkpoint(written), done.append)
    assert sum(done) == model.nbytes
    return found


def exchange(one, other):
    def change(tensors):
        tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()

    return change


@pytest.mark.parametrize("name", CONFIGS)
def test_a_right_copy_has_no_failures(name, tiny, tmp_path):
    order = permutations(name, 5)
    assert failures(tiny(name), regroup(tiny(name), order, tmp_path / "copy"), order) == []


def test_the_source_itself_is_no_copy(tiny):
    """A map that is recorded and was never applied."""
    assert failures(tiny("mixtral"), tiny("mixtral"))


def test_two_expert_tensors_exchanged_are_found(tiny, copy):
    edit_tensors(copy, exchange(EXPERT.format(1, 2), EXPERT.format(1, 6)))
    assert failures(tiny("mixtral"), copy) == [
        f"{EXPERT.format(1, slot)}: bytes differ" for slot in sorted((2, 6), key=lambda slot: ORDER[1, slot])
    ]


def test_two_router_rows_exchanged_are_found_by_row(tiny, copy):
    def change(tensors):
        tensors[GATE.format(0)][[1, 4]] = tensors[GATE.format(0)][[4, 1]].clone()

    edit_tensors(copy, change)
    assert failures(tiny("mixtral"), copy) == [f"{GATE.format(0)}: rows 1, 4"]


def test_a_router_left_in_the_old_order_is_found(tiny, copy):
    old = load_file(tiny("mixtral") / "model.safetensors")[GATE.format(1)]
    edit_tensors(copy, lambda tensors: tensors.update({GATE.format(1): old}))
    moved = [str(slot) for slot in range(8) if ORDER[1, slot] != slot]
    assert failures(tiny("mixtral"), copy) == [f"{GATE.format(1)}: rows {', '.join(moved)}"]


def test_a_layer_shifted_by_one_is_found(tiny, copy):
    def change(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.0.")]:
            exchange(name, name.replace("layers.0.", "layers.1."))(tensors)

    edit_tensors(copy, change)
    found = failures(tiny("mixtral"), copy)
    for layer in (0, 1):
        assert any(line.startswith(GATE.format(layer)) for line in found)
        assert sum(line.startswith(f"{BLOCK.format(layer)}.experts.") for line in found) == 24


@pytest.mark.parametrize("name", [EXPERT.format(0, 3), GATE.format(1), "lm_head.weight", "model.norm.weight"])
def test_a_missing_tensor_is_found(name, tiny, copy):
    edit_tensors(copy, lambda tensors: tensors.pop(name))
    assert failures(tiny("mixtral"), copy) == [f"{name}: missing"]


def test_a_tensor_the_source_does_not_have_is_found(tiny, copy):
    edit_tensors(copy, lambda tensors: tensors.update(extra=torch.zeros(2)))
    assert failures(tiny("mixtral"), copy) == ["extra: not in the source"]


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", EXPERT.format(1, 0), GATE.format(0)])
def test_one_changed_bit_is_found(name, tiny, copy):
    def change(tensors):
        flat = tensors[name].view(torch.int32).reshape(-1)
        flat[-1] ^= 1

    edit_tensors(copy, change)
    (line,) = failures(tiny("mixtral"), copy)
    assert line.startswith(f"{name}: ")


def test_another_dtype_or_shape_is_found(tiny, copy):
    def change(tensors):
        tensors[GATE.format(0)] = tensors[GATE.format(0)].to(torch.bfloat16)
        tensors["model.norm.weight"] = tensors["model.norm.weight"].reshape(2, 16)

    edit_tensors(copy, change)
    assert sorted(failures(tiny("mixtral"), copy)) == [
        f"{GATE.format(0)}: BF16 [8, 32], not F32 [8, 32]",
        "model.norm.weight: F32 [2, 16], not F32 [32]",
    ]


@pytest.mark.parametrize("fault", ["changed", "missing"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_side_file_that_is_not_the_sources_is_found(fault, name, tiny, copy):
    if fault == "missing":
        (copy / name).unlink()
    else:
        (copy / name).write_text((copy / name).read_text() + " ")
    assert failures(tiny("mixtral"), copy) == [f"{name}: not the source's file"]


@pytest.mark.parametrize("name", ["extra.safetensors", "pytorch_model.bin", "original/consolidated.pth", "notes.txt"])
def test_a_stray_file_is_found_by_its_name(name, tiny, copy):
    """Some readers take every weight file of a folder; an old one there would bring back the old numbering."""
    (copy / name).parent.mkdir(exist_ok=True)
    shutil.copy(tiny("mixtral") / "model.safetensors", copy / name)
    assert failures(tiny("mixtral"), copy) == [f"{name}: a file that is not the source's"]


def test_an_index_of_the_copy_is_not_believed(tiny, copy):
    """A shard that the index leaves out is a missing tensor and a stray file, not a smaller model."""
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    gone = EXPERT.format(1, 3)
    for shard, names in (
        ("model-00001-of-00002.safetensors", set(tensors) - {gone}),
        ("model-00002-of-00002.safetensors", {gone}),
    ):
        save_file({name: tensors[name] for name in names}, copy / shard, metadata={"format": "pt"})
    weight_map = dict.fromkeys(set(tensors) - {gone}, "model-00001-of-00002.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert failures(tiny("mixtral"), copy) == [
        f"{gone}: missing",
        "model-00002-of-00002.safetensors: a file that is not the source's",
    ]


def test_config_with_another_number_of_experts_a_token_is_found(tiny, copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 3}))
    assert failures(tiny("mixtral"), copy) == ["config.json: not the source's file"]


def routing(source, written, order):
    done = []
    report = compare_routing(find_model(str(source)), find_model(str(written)), np.asarray(order), PROMPTS, done.append)
    assert sum(done) == find_model(str(source)).spec.num_hidden_layers
    return report


@pytest.mark.parametrize("name", CONFIGS)
def test_routing_and_logits_of_a_right_copy_agree(name, tiny, tmp_path):
    order = (whole_groups if name == "deepseek_v2_grouped" else permutations)(name, 5)
    report = routing(tiny(name), regroup(tiny(name), order, tmp_path / "copy"), order)
    assert report.passed
    assert [layer.layer for layer in report.layers] == MOE_LAYERS[name]
    assert {layer.tokens for layer in report.layers} == {PROMPTS.size}
    assert sum(layer.ties for layer in report.layers) == report.logits_excused == 0
    assert report.logit_tokens == PROMPTS.size


@pytest.mark.parametrize("name", ["deepseek_v3", "minimax_m2", "phimoe", "ernie4_5_moe", "exaone_moe", "qwen3_next"])
def test_biases_and_renamed_routers_travel_with_the_experts(name, tiny, tmp_path):
    order = (whole_groups if name == "deepseek_v3" else permutations)(name, 5)
    assert routing(tiny(name), regroup(tiny(name), order, tmp_path / "copy"), order).passed


@pytest.mark.parametrize("name", ["jamba", "hy_v3", "qwen3_5_moe"])
def test_a_model_that_cannot_be_run_layer_by_layer_says_what_still_can_be_proved(name, tiny, tmp_path):
    order = permutations(name, 5)
    written = regroup(tiny(name), order, tmp_path / "copy")
    assert failures(tiny(name), written, order) == []
    with pytest.raises(ImpossibleError, match=r"layer by layer\. smoe verify --tensors-only"):
        routing(tiny(name), written, order)


def test_a_map_that_does_not_belong_to_the_copy_is_found(tiny, right):
    report = routing(tiny("mixtral"), right, ORDER[::-1])
    assert not report.passed
    assert all(layer.mismatches > 0 for layer in report.layers)


def test_a_torn_group_is_found_where_tensors_alone_agree(tiny, tmp_path):
    order = permutations("deepseek_v2_grouped", 7)
    written = regroup(tiny("deepseek_v2_grouped"), order, tmp_path / "copy")
    assert failures(tiny("deepseek_v2_grouped"), written, order) == []
    report = routing(tiny("deepseek_v2_grouped"), written, order)
    assert not report.passed
    assert sum(layer.mismatches for layer in report.layers) > 0


def test_a_router_row_exchanged_shows_in_its_own_layer_only(tiny, copy):
    def change(tensors):
        tensors[GATE.format(0)][[1, 4]] = tensors[GATE.format(0)][[4, 1]].clone()

    edit_tensors(copy, change)
    report = routing(tiny("mixtral"), copy, ORDER)
    assert [layer.passed for layer in report.layers] == [False, True]
    assert report.layers[0].mismatches > 0
    assert report.logit_max_error > 1e-3
    assert not report.passed


def test_two_experts_exchanged_show_in_their_own_layer_though_routing_agrees(tiny, copy):
    def change(tensors):
        for part in ("w1", "w2", "w3"):
            exchange(*(EXPERT.replace("w1", part).format(1, slot) for slot in (2, 6)))(tensors)

    edit_tensors(copy, change)
    report = routing(tiny("mixtral"), copy, ORDER)
    assert [layer.mismatches for layer in report.layers] == [0, 0]
    assert [layer.passed for layer in report.layers] == [True, False]


def test_a_value_that_is_no_number_does_not_pass(tiny, copy):
    def change(tensors):
        tensors[EXPERT.format(1, 2)][0, 0] = float("nan")

    edit_tensors(copy, change)
    assert not routing(tiny("mixtral"), copy, ORDER).passed


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_a_fault_outside_every_moe_layer_shows_in_the_logits(name, tiny, copy):
    edit_tensors(copy, lambda tensors: tensors.update({name: tensors[name] * 1.1}))
    report = routing(tiny("mixtral"), copy, ORDER)
    assert all(layer.passed for layer in report.layers)
    assert not report.passed


def twins(tiny, tmp_path):
    """A Mixtral whose experts 2 and 5 of layer 1 have the same router row, and its copy with the two exchanged."""
    source = editable(tiny("mixtral"), tmp_path / "source")

    def same_rows(tensors):
        tensors[GATE.format(1)][5] = tensors[GATE.format(1)][2]

    edit_tensors(source, same_rows)
    order = np.tile(np.arange(8), (2, 1))
    order[1, [2, 5]] = [5, 2]
    return source, regroup(source, order, tmp_path / "copy"), order


def test_exact_ties_are_excused_and_counted(tiny, tmp_path):
    source, written, order = twins(tiny, tmp_path)
    report = routing(source, written, order)
    assert report.layers[1].ties > 0
    assert report.layers[1].mismatches == 0
    assert report.passed
    assert 0 < report.logits_excused < report.logit_tokens


def test_a_tie_excuses_only_the_experts_that_tie(tiny, tmp_path):
    """A wrong row elsewhere is still found in a model that has ties."""
    source, written, order = twins(tiny, tmp_path)

    def change(tensors):
        tensors[GATE.format(1)][[0, 7]] = tensors[GATE.format(1)][[7, 0]].clone()

    edit_tensors(written, change)
    report = routing(source, written, order)
    assert report.layers[1].mismatches > 0
    assert not report.passed


def test_equal_logits_with_other_selection_biases_are_no_tie(tiny, tmp_path):
    """Experts 2 and 3 of a group have one router row, and the copy has left their biases behind."""
    source, gate = editable(tiny("deepseek_v3"), tmp_path / "source"), "model.layers.2.mlp.gate"

    def same_rows(tensors):
        tensors[f"{gate}.weight"][3] = tensors[f"{gate}.weight"][2]
        tensors[f"{gate}.e_score_correction_bias"][[2, 3]] = torch.tensor([0.0, 0.01])

    edit_tensors(source, same_rows)
    order = np.tile(np.arange(8), (2, 1))
    order[1, [2, 3]] = [3, 2]
    written = regroup(source, order, tmp_path / "copy")
    assert routing(source, written, order).passed

    def leave_behind(tensors):
        tensors[f"{gate}.e_score_correction_bias"][[2, 3]] = torch.tensor([0.0, 0.01])

    edit_tensors(written, leave_behind)
    report = routing(source, written, order).layers[1]
    assert report.mismatches > 0
    assert report.ties == 0


def test_a_sharded_copy_of_a_whole_source_is_compared_all_the_same(tiny, right, tmp_path):
    folder = tmp_path / "sharded"
    shutil.copytree(right, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half = len(tensors) // 2
    weight_map = {}
    for number, names in enumerate((list(tensors)[:half], list(tensors)[half:]), 1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert failures(tiny("mixtral"), folder) == []
