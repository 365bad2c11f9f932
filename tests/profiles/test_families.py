"""From a raw config.json to the layer table, before anything heavy is imported."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.families.config import read_spec
from smoe_profiles.families.table import FAMILIES, REFUSED

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


def minimal(family):
    """The keys without which a config is refused, by the row; settings of a wrapped text model go under its key."""
    config = SIZES | {family.hidden_key: 32, family.experts_keys[0]: 8, family.top_k_keys[0]: 1}
    config |= {key: 1 for key in (family.router_tail_key, family.router_width_key) if key}
    config[family.layers_keys[0]] = ["moe"] * 6 if family.layer_rule == "block_types" else 6
    for key in [key for key in config if "." in key]:
        outer, inner = key.split(".")
        config[outer] = config.get(outer, {}) | {inner: config.pop(key)}
    return {"model_type": family.model_type} | ({family.nested: config} if family.nested else config)


MINIMAL = {name: minimal(family) for name, family in FAMILIES.items()}
MINIMAL |= {name: MINIMAL[name] | {"num_experts_per_tok": 2} for name in ("deepseek_v2", "mixtral", "qwen2_moe")}


def ids(config):
    return [layer.id for layer in read_spec(config, "config.json").layers]


def test_deepseek_v2_as_published_has_59_moe_layers_of_160_experts_in_8_groups():
    spec = read_spec(DEEPSEEK_V2, "config.json")
    assert [layer.id for layer in spec.layers] == list(range(1, 60))
    assert {(layer.num_experts, layer.top_k, layer.num_groups) for layer in spec.layers} == {(160, 6, 8)}
    assert spec.layers[0].rule == "softmax, 3 of 8 groups"
    assert (spec.vocab_size, spec.hidden_size, spec.num_hidden_layers) == (102400, 5120, 60)


DENSE = {  # how many layers each class makes dense where a config does not say
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "beam", "kimi_k25", "step3p7"), 3),
    **dict.fromkeys(("bailing_hybrid", "lfm2_moe", "flint"), 2),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "mimo_v2_flash", "sarvam_moe", "sarvam_mla", "kimi_linear"), 1),
    **dict.fromkeys(
        ("glm4v_moe", "axk1", "axk2", "exaone_moe", "hy_v3", "hy_v4", "afmoe", "laguna", "ernie4_5_moe"), 1
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_says_no_more_than_its_sizes_gets_its_class_defaults(family):
    spec = read_spec(MINIMAL[family], "config.json")
    expected = [1, 3, 5] if family == "jamba" else list(range(DENSE.get(family, 0), 6))
    assert [layer.id for layer in spec.layers] == expected
    grouped = ("deepseek_v3", "deepseek_v32", "bailing_hybrid", "axk1", "beam", "kimi_k25")
    assert {layer.num_groups for layer in spec.layers} == {8 if family in grouped else 1}
    assert {(layer.num_experts, layer.num_zero_experts) for layer in spec.layers} == {(8, int(family == "zaya"))}


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
    """transformers 5.24 writes num_experts as num_local_experts, by the family's alias."""
    config = {
        "num_local_experts" if key == "num_experts" else key: value for key, value in MINIMAL["qwen3_moe"].items()
    }
    assert [layer.num_experts for layer in read_spec(config, "config.json").layers] == [8] * 6


@pytest.mark.parametrize(
    "config",
    [
        {**SIZES, "model_type": "llama"},
        {**SIZES, "model_type": "a_family_of_tomorrow", "num_experts": 8},
        {**SIZES, "model_type": "mixtral"},
        {**SIZES, "model_type": "dbrx", "d_model": 32, "n_layers": 2, "ffn_config": {"moe_top_k": 2}},
        {"model_type": "llama4", "text_config": SIZES},
    ],
)
def test_the_refusal_says_how_a_family_is_added(config):
    with pytest.raises(ImpossibleError, match=r"A new family is one row in smoe_profiles/families/table\.py"):
        read_spec(config, "config.json")


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_moe_model_that_cannot_be_a_row_is_refused_with_its_reason(model_type):
    assert model_type not in FAMILIES
    with pytest.raises(ImpossibleError) as refused:
        read_spec({**SIZES, "model_type": model_type, "num_experts": 8}, "config.json")
    assert f"{model_type!r} (config.json) cannot be profiled: {REFUSED[model_type]}" in str(refused.value)


def test_a_config_is_read_without_importing_torch_or_transformers():
    code = (
        "import sys\n"
        "from smoe_profiles.families.config import read_spec\n"
        "from smoe_profiles.errors import ImpossibleError\n"
        "try:\n    read_spec({'model_type': 'llama'}, 'config.json')\n"
        "except ImpossibleError:\n    print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


KINDS = st.lists(st.booleans(), min_size=1, max_size=10)


@given(KINDS, st.sampled_from(["glm4_moe_lite", "laguna", "mellum", "minimax_m3_vl_text", "hy_v3"]), st.booleans())
def test_kinds_listed_layer_by_layer_win_over_a_number_of_dense_layers(kinds, family, as_types):
    config = MINIMAL[family] | {"num_hidden_layers": len(kinds), "first_k_dense_replace": 0}
    config |= (
        {"mlp_layer_types": ["sparse" if kind else "dense" for kind in kinds]}
        if as_types
        else {"moe_layer_freq": [int(kind) for kind in kinds]}
    )
    if any(kinds):
        assert ids(config) == [layer for layer, kind in enumerate(kinds) if kind]
    else:
        with pytest.raises(ImpossibleError, match="nothing to place"):
            ids(config)


@given(st.integers(1, 12), st.integers(1, 4), st.lists(st.integers(0, 14), max_size=5) | st.none())
def test_llama4_layers_are_listed_or_every_nth(layers, step, listed):
    text = MINIMAL["llama4_text"] | {"num_hidden_layers": layers, "interleave_moe_layer_step": step}
    text |= {} if listed is None else {"moe_layers": listed}
    expected = [n for n in range(layers) if (n in listed if listed is not None else n % step == step - 1)]
    for config in (text, {"model_type": "llama4", "text_config": text}):
        if expected:
            assert ids(config) == expected
        else:
            with pytest.raises(ImpossibleError, match="nothing to place"):
                ids(config)


@given(st.integers(1, 12), st.integers(0, 5), st.integers(-1, 12), st.integers(1, 4))
def test_ernie_layers_lie_between_start_and_end(layers, start, end, step):
    config = MINIMAL["ernie4_5_moe"] | {
        "num_hidden_layers": layers,
        "moe_layer_start_index": start,
        "moe_layer_end_index": end,
        "moe_layer_interval": step,
    }
    last = layers - 1 if end == -1 else end
    expected = [layer for layer in range(layers) if start <= layer <= last and not (layer + 1) % step]
    assert expected == [] or ids(config) == expected


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 3))
def test_jamba_layers_come_in_a_period(layers, period, offset):
    config = MINIMAL["jamba"] | {"num_hidden_layers": layers, "expert_layer_period": period}
    expected = [layer for layer in range(layers) if layer % period == offset]
    assert expected == [] or ids(config | {"expert_layer_offset": offset}) == expected


@given(st.integers(1, 12), st.lists(st.integers(0, 14), max_size=5), st.booleans())
def test_step3p7_layers_are_numbers_in_a_list_or_in_a_text(layers, listed, as_text):
    text = MINIMAL["step3p7"]["text_config"] | {"num_hidden_layers": layers}
    enum = ",".join(map(str, listed)) if as_text else listed
    expected = sorted({layer for layer in listed if layer < layers})
    config = {"model_type": "step3p7", "text_config": text | {"moe_layers_enum": enum}}
    if expected:
        assert ids(config) == expected
    else:
        with pytest.raises(ImpossibleError, match="nothing to place"):
            ids(config)


@pytest.mark.parametrize("enum", ["3,four", 3, [1.5], [-1]])
def test_step3p7_layers_that_make_no_sense_are_an_input_error(enum):
    text = MINIMAL["step3p7"]["text_config"] | {"moe_layers_enum": enum}
    with pytest.raises(InputError, match=r"config\.json has moe_layers_enum"):
        ids({"model_type": "step3p7", "text_config": text})


def test_mistral4_groups_by_a_sum_of_two_are_never_vacuous():
    config = MINIMAL["mistral4"] | {"n_group": 4, "topk_group": 2}
    layer = read_spec(config, "config.json").layers[0]
    assert (layer.num_groups, layer.rule) == (4, "softmax, 2 of 4 groups")


def test_nemotron_layers_are_the_letter_e_of_its_pattern():
    config = {key: value for key, value in MINIMAL["nemotron_h"].items() if key != "layers_block_type"}
    spec = read_spec(config | {"hybrid_override_pattern": "MEM*E-E"}, "config.json")
    assert ([layer.id for layer in spec.layers], spec.num_hidden_layers) == ([1, 4, 6], 7)


def test_hash_layers_of_deepseek_v4_say_so():
    config = MINIMAL["deepseek_v4"] | {"num_hash_layers": 2}
    assert [layer.rule for layer in read_spec(config, "config.json").layers][:3] == [
        "token hash",
        "token hash",
        "sqrt softplus + bias",
    ]
    listed = config | {"mlp_layer_types": ["moe", "hash_moe", *["moe"] * 4]}
    assert [layer.rule == "token hash" for layer in read_spec(listed, "config.json").layers][:3] == [False, True, False]


def test_experts_and_top_k_may_differ_from_layer_to_layer():
    config = MINIMAL["hunyuan_v1_moe"] | {"num_experts": [8, 8, 16, 16, 4, 4], "moe_topk": [2, 2, 4, 4, 1, 1]}
    layers = read_spec(config, "config.json").layers
    assert [(layer.num_experts, layer.top_k) for layer in layers] == [(8, 2)] * 2 + [(16, 4)] * 2 + [(4, 1)] * 2
    with pytest.raises(InputError, match=r"config\.json has moe_topk = .* 6 entries"):
        read_spec(config | {"moe_topk": [2, 2]}, "config.json")


def test_zero_experts_are_counted_apart_and_written_only_where_there_are_any():
    spec = read_spec(MINIMAL["longcat_flash"] | {"zero_expert_num": 4}, "config.json")
    assert spec.layer_table()[0]["num_zero_experts"] == 4
    assert spec.router_shape(spec.layers[0]) == (12, 32)
    assert "num_zero_experts" not in read_spec(MINIMAL["mixtral"], "config.json").layer_table()[0]


def test_a_sum_of_two_is_never_vacuous_and_a_best_expert_is_where_k_is_small():
    config = MINIMAL["deepseek_v3"] | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}
    layer = read_spec(config, "config.json").layers[0]
    assert (layer.num_groups, layer.rule) == (4, "sigmoid + bias, 2 of 4 groups")
    assert groups(n_group=16, topk_group=6) == 1


def test_groups_are_found_under_a_familys_other_name():
    config = MINIMAL["kimi_linear"] | {"num_expert_group": 4, "topk_group": 2}
    assert {layer.num_groups for layer in read_spec(config, "config.json").layers} == {4}


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("dbrx", "ffn_config.moe_num_experts", {"moe_num_experts": "8", "moe_top_k": 1}),
        ("glm4_moe_lite", "mlp_layer_types", ["dense"]),
        ("llama4", "text_config", None),
        ("llama4_text", "moe_layers", [1.5]),
    ],
)
def test_a_nested_or_listed_setting_that_makes_no_sense_is_named(family, key, value):
    with pytest.raises(InputError, match=rf"config\.json.*{key}"):
        read_spec(MINIMAL[family] | {key.partition(".")[0]: value}, "config.json")
