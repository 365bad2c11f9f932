"""From a raw config.json to the layer table, before anything heavy is imported (design 3, 6)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.families.config import read_spec
from smoe_profiles.families.table import FAMILIES

DEEPSEEK_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 5120,
    "model_type": "deepseek_v2",
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "vocab_size": 102400,
}
"""The published keys of deepseek-ai/DeepSeek-V2 that matter here."""
SIZES = {"hidden_size": 32, "vocab_size": 64, "num_hidden_layers": 6}
MINIMAL = {
    "deepseek_v2": {**SIZES, "model_type": "deepseek_v2", "n_routed_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {**SIZES, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {**SIZES, "model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {**SIZES, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {**SIZES, "model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2},
}


def ids(config):
    return [layer.id for layer in read_spec(config, "config.json").layers]


def test_deepseek_v2_as_published_has_59_moe_layers_of_160_experts_in_8_groups():
    spec = read_spec(DEEPSEEK_V2, "config.json")
    assert [layer.id for layer in spec.layers] == list(range(1, 60))
    assert {(layer.num_experts, layer.top_k, layer.num_groups) for layer in spec.layers} == {(160, 6, 8)}
    assert spec.layers[0].rule == "softmax, 3 of 8 groups"
    assert (spec.vocab_size, spec.hidden_size, spec.num_hidden_layers) == (102400, 5120, 60)


def test_every_family_of_the_table_has_a_minimal_config_here():
    assert set(MINIMAL) == set(FAMILIES)


@pytest.mark.parametrize("family", MINIMAL)
def test_a_minimal_config_makes_every_layer_a_free_moe_layer(family):
    spec = read_spec(MINIMAL[family], "config.json")
    assert [layer.id for layer in spec.layers] == list(range(6))
    assert {layer.num_groups for layer in spec.layers} == {1}


@given(
    st.integers(1, 12),
    st.integers(1, 5),
    st.lists(st.integers(0, 14), max_size=5),
    st.sampled_from(["qwen2_moe", "qwen3_moe"]),
)
def test_qwen_layers_follow_step_and_mlp_only_layers(layers, step, dense, family):
    config = MINIMAL[family] | {
        "num_hidden_layers": layers,
        "decoder_sparse_step": step,
        "mlp_only_layers": dense,
    }
    expected = [layer for layer in range(layers) if not (layer in dense or (layer + 1) % step)]
    if expected:
        assert ids(config) == expected
    else:
        with pytest.raises(ImpossibleError, match="none of the"):
            ids(config)


@given(st.integers(1, 12), st.integers(0, 13))
def test_deepseek_layers_start_after_the_dense_ones(layers, first):
    config = MINIMAL["deepseek_v2"] | {"num_hidden_layers": layers, "first_k_dense_replace": first}
    if first < layers:
        assert ids(config) == list(range(first, layers))
    else:
        with pytest.raises(ImpossibleError, match="nothing to place"):
            ids(config)


def groups(**keys):
    return read_spec(DEEPSEEK_V2 | keys, "config.json").layers[0].num_groups


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, 8),
        ({"topk_method": "greedy"}, 1),
        ({"n_group": 1, "topk_group": 1}, 1),
        ({"n_group": None, "topk_group": None}, 1),
        ({"topk_group": 8}, 1),
        ({"topk_group": 6}, 1),
        ({"num_experts_per_tok": 3}, 1),
        ({"num_experts_per_tok": 4}, 8),
        ({"n_group": 16, "topk_group": 3}, 16),
    ],
)
def test_groups_count_only_where_they_can_change_the_choice(keys, expected):
    assert groups(**keys) == expected


def test_groups_without_a_method_do_not_count_as_transformers_reads_greedy():
    config = {key: value for key, value in DEEPSEEK_V2.items() if key != "topk_method"}
    assert read_spec(config, "config.json").layers[0].num_groups == 1


def test_groups_that_do_not_divide_the_experts_are_refused():
    with pytest.raises(InputError, match=r"160 experts do not divide into n_group = 7"):
        groups(n_group=7)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**SIZES, "model_type": "llama"}, "llama"),
        ({**SIZES, "model_type": "switch_transformers", "num_experts": 8}, "switch_transformers"),
        ({**SIZES}, "None"),
        ({**SIZES, "model_type": "mixtral"}, "num_local_experts"),
        ({**MINIMAL["deepseek_v2"], "n_routed_experts": None}, "n_routed_experts"),
        ({**MINIMAL["qwen2_moe"], "num_experts": 0}, "num_experts"),
    ],
)
def test_a_dense_or_unknown_model_is_refused_from_its_config_alone(config, named):
    with pytest.raises(ImpossibleError, match=rf"(config\.json.*{named})|({named}.*config\.json)"):
        read_spec(config, "config.json")


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("mixtral", "num_experts_per_tok", 9),
        ("mixtral", "num_experts_per_tok", 0),
        ("mixtral", "num_experts_per_tok", "2"),
        ("mixtral", "vocab_size", -1),
        ("mixtral", "hidden_size", None),
        ("mixtral", "num_hidden_layers", 2.5),
        ("qwen2_moe", "decoder_sparse_step", 0),
        ("qwen2_moe", "decoder_sparse_step", "every"),
        ("qwen2_moe", "mlp_only_layers", 3),
        ("deepseek_v2", "first_k_dense_replace", "one"),
        ("deepseek_v2", "first_k_dense_replace", None),
        ("deepseek_v2", "moe_layer_freq", [0, 1, 1]),
    ],
)
def test_a_config_that_makes_no_sense_is_an_input_error_naming_key_and_file(family, key, value):
    with pytest.raises(InputError, match=rf"config\.json.*{key}"):
        read_spec(MINIMAL[family] | {key: value}, "config.json")


@pytest.mark.parametrize("value", ["eight", [8], {"a": 1}, -8])
def test_a_group_count_that_makes_no_sense_is_an_input_error(value):
    with pytest.raises(InputError, match=r"config\.json.*n_group"):
        groups(n_group=value)


def test_qwen3_moe_as_newer_transformers_saves_it_is_known():
    """transformers 5.24 writes num_experts as num_local_experts (checkpoints.md, the family's alias)."""
    config = {
        "num_local_experts" if key == "num_experts" else key: value for key, value in MINIMAL["qwen3_moe"].items()
    }
    assert [layer.num_experts for layer in read_spec(config, "config.json").layers] == [8] * 6
