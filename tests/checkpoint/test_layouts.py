"""Which tensor moves with which expert, and where a renumbering would change the model."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_cli.checkpoint.layouts import (
    INTEGERS,
    Claim,
    Role,
    blocking_layer,
    claim_tensors,
    new_name,
    renumber,
    row_order,
)
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.families.config import MoeLayer
from smoe_profiles.families.table import FAMILIES
from smoe_profiles.models import find_model
from smoe_profiles.tensors import TensorInfo
from tests.checkpoint.conftest import edit_tensors, editable, permutations
from tests.profiles.tiny_models import CONFIGS, MOE_LAYERS

PARTS = {
    "mixtral": ("block_sparse_moe", ("w1", "w2", "w3")),
    **{name: ("mlp", ("gate_proj", "up_proj", "down_proj")) for name in CONFIGS if name != "mixtral"},
}


def claims_of(folder):
    model = find_model(str(folder))
    return claim_tensors(model, model.files()).claims


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_are_renamed_routers_permuted_and_all_else_copied(name, tiny):
    block, parts = PARTS[name]
    expected = {}
    for layer in MOE_LAYERS[name]:
        expected[f"model.layers.{layer}.{block}.gate.weight"] = Role.PERMUTED
        for expert in range(8):
            for part in parts:
                expected[f"model.layers.{layer}.{block}.experts.{expert}.{part}.weight"] = Role.RENAMED
    claims = claims_of(tiny(name))
    assert {key: claim.role for key, claim in claims.items() if claim.role is not Role.COPIED} == expected
    assert set(claims) > set(expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_new_names_are_the_old_names_exchanged_among_experts(name, tiny):
    order = permutations(name, 3)
    logical_to_physical = np.argsort(order, axis=1)
    claims = claims_of(tiny(name))
    renamed = {key: new_name(key, claim, logical_to_physical) for key, claim in claims.items()}
    assert sorted(renamed.values()) == sorted(claims)
    block, parts = PARTS[name]
    for index, layer in enumerate(MOE_LAYERS[name]):
        for slot in range(8):
            old = f"model.layers.{layer}.{block}.experts.{order[index, slot]}.{parts[0]}.weight"
            assert renamed[old] == f"model.layers.{layer}.{block}.experts.{slot}.{parts[0]}.weight"


@given(st.permutations(range(6)), st.integers(0, 3))
def test_rows_behind_those_of_the_experts_stay_where_they_are(order, tail):
    claim = Claim(Role.PERMUTED, 1, rows=6 + tail)
    found = row_order(claim, np.array([range(6), order]))
    assert found.tolist() == [*order, *range(6, 6 + tail)]


@given(st.permutations(range(6)), st.sampled_from(["I64", "I32", "I16", "U32", "U16", "U8"]))
def test_expert_numbers_are_renumbered_in_their_own_type(order, dtype):
    values = np.array([3, 0, 5, 5, 1], INTEGERS[dtype])
    slots = np.argsort(order)
    found = renumber(values.tobytes(), TensorInfo("t", dtype, (5,), 0, values.nbytes), slots)
    assert np.frombuffer(found, INTEGERS[dtype]).tolist() == [order.index(value) for value in values]


@settings(max_examples=200, deadline=None)
@given(st.permutations(range(8)), st.sampled_from([1, 2, 4, 8]))
def test_a_map_is_blocked_exactly_when_a_new_group_mixes_old_ones(order, groups):
    layer = MoeLayer(5, 8, 3, groups, "softmax")
    size = 8 // groups
    mixes = any(
        len({order[slot] // size for slot in range(group * size, (group + 1) * size)}) > 1 for group in range(groups)
    )
    found = blocking_layer([layer], np.array([order]))
    assert found == (layer if groups > 1 and mixes else None)


def test_the_first_layer_that_blocks_is_named():
    layers = [MoeLayer(number, 8, 3, 4, "softmax") for number in (1, 2, 3)]
    mixed = [0, 2, 1, 3, 4, 5, 6, 7]
    assert blocking_layer(layers, np.array([list(range(8)), mixed, mixed])) == layers[1]


def damaged(tiny, tmp_path, name, change):
    folder = editable(tiny(name), tmp_path / "damaged")
    edit_tensors(folder, change)
    return folder


UNKNOWN = {
    "a selection bias no rule claims": ("mixtral", "model.layers.1.block_sparse_moe.gate.bias", (8,)),
    "a correction bias of another family": ("deepseek_v2", "model.layers.1.mlp.gate.e_score_correction_bias", (8,)),
    "an expert axis that is not the first, among the experts": ("gpt_oss", "model.layers.0.mlp.experts.odd", (3, 8)),
    "a scale of the router": ("gpt_oss", "model.layers.1.mlp.router.weight_scale", (8, 1)),
    "rows of zero experts that no rule claims": ("longcat_flash", "model.layers.1.mlp.router.other", (12,)),
    "an expert axis that is not the first": ("mixtral", "model.layers.0.block_sparse_moe.mystery", (3, 8)),
    "a second router": ("qwen3_moe", "model.layers.1.mlp.gate_1.weight", (8, 4)),
}


@pytest.mark.parametrize("fault", UNKNOWN)
def test_an_unclaimed_tensor_with_an_expert_axis_stops_by_its_name(fault, tiny, tmp_path):
    name, tensor, shape = UNKNOWN[fault]
    folder = damaged(tiny, tmp_path, name, lambda tensors: tensors.update({tensor: torch.zeros(shape)}))
    with pytest.raises(ImpossibleError, match=tensor.replace(".", r"\.")):
        claims_of(folder)


def test_a_shared_expert_as_wide_as_there_are_experts_is_copied(tiny, tmp_path):
    name = "model.layers.1.mlp.shared_experts.gate_proj.weight"
    folder = damaged(tiny, tmp_path, "deepseek_v2", lambda tensors: tensors.update({name: torch.zeros(8, 32)}))
    assert claims_of(folder)[name].role is Role.COPIED


SELECTION_BIAS = {
    *("gate.e_score_correction_bias", "e_score_correction_bias", "gate.bias", "gate.expert_bias", "expert_bias"),
    *("experts.e_score_correction_bias", "model.layers.{layer}.moe.router.expert_bias", "router_bias", "router.bias"),
    *("moe_statics.e_score_correction_bias", "router.e_score_correction_bias", "gate.balancing_biases"),
}
"""By hand, from published files; what capture calls it in memory adds two more."""


def test_the_selection_bias_has_a_row_under_each_of_its_names():
    """A bias under a name no row knows stops the run; one that a row knows moves with the router."""
    names = {name for family in FAMILIES.values() for disk in family.disk for name in disk.router[1:]}
    assert names == SELECTION_BIAS | {"router.per_expert_scale"}


GATE = "model.layers.1.block_sparse_moe.gate.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.{}.w1.weight"


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name, *shape):
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


BROKEN = {
    "no expert 7": (drop(*(EXPERT.replace("w1", part).format(7) for part in ("w1", "w2", "w3"))), "no expert 7"),
    "no expert 0": (drop(*(EXPERT.replace("w1", part).format(0) for part in ("w1", "w2", "w3"))), "no expert 0"),
    "half an expert": (drop(EXPERT.format(5)), r"experts.5"),
    "half of expert 0": (drop(EXPERT.format(0)), "expert"),
    "an expert too many": (put(EXPERT.format(8), 24, 32), "expert 8"),
    "no router": (drop(GATE), r"no router gate\.weight"),
    "a router of E + 1 rows": (put(GATE, 9, 32), r"gate\.weight has shape \[9, 32\]"),
    "a router on the other axis": (put(GATE, 32, 8), r"gate\.weight"),
    "an expert with a scale the others lack": (put(EXPERT.format(3) + "_scale_inv", 1, 1), r"experts.3"),
    "an expert of another shape": (put(EXPERT.format(3), 24, 31), "experts.3"),
    "fused experts beside single ones": (put("model.layers.1.block_sparse_moe.experts.gate_up_proj", 8, 6, 4), "fused"),
    "an expert numbered with a leading zero": (put(EXPERT.format("03"), 24, 32), "experts.03"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_checkpoint_that_does_not_hold_what_its_config_says_is_an_input_error(fault, tiny, tmp_path):
    change, named = BROKEN[fault]
    with pytest.raises(InputError, match=named):
        claims_of(damaged(tiny, tmp_path, "mixtral", change))


def test_every_tensor_of_an_expert_moves_whatever_its_suffix(tiny, tmp_path):
    """Scales, zero points and packed weights of quantised checkpoints travel under unknown suffixes."""
    extra = {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.{suffix}": torch.full(shape, expert, dtype=dtype)
        for layer in (0, 1)
        for expert in range(8)
        for suffix, shape, dtype in (
            ("weight_scale_inv", (1, 1), torch.float32),
            ("g_idx", (32,), torch.int32),
            ("input_scale", (), torch.bfloat16),
        )
    }
    claims = claims_of(damaged(tiny, tmp_path, "mixtral", lambda tensors: tensors.update(extra)))
    for name in extra:
        assert claims[name].role is Role.RENAMED
        assert f".{claims[name].expert}." in name
