"""Every family of the table: what its capture points show is what its router's rule says, recomputed by hand.

The rules are those of `router_rules.py`; the logits come from the router's own inputs, seen by a hook of the test's own
on a module that the test names.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from smoe_profiles.capture.loading import LoadOptions, load_model
from smoe_profiles.capture.points import capture_points, read_choice, router_input, router_logits
from smoe_profiles.errors import ImpossibleError
from smoe_profiles.families.table import FAMILIES, Point
from smoe_profiles.models import disk_names, find_model, input_embedding, model_identity, same_model
from tests.profiles.router_rules import (
    Chosen,
    dense,
    each_sigmoid,
    gelu,
    inkling,
    longest_gap_without_skip,
    of_the_chosen,
    rms,
    scored,
    sigmoid,
    sigmoids,
    softmax,
    sparsemixer,
    sqrt_softplus,
    value,
)
from tests.profiles.tiny_models import EXPERTS, FAMILY_CONFIGS, MOE_LAYERS, VOCAB, installed

NEAR_TIE = 1e-5
LENGTHS = (24, 15)


@dataclass(frozen=True)
class Case:
    """One family by hand: its rule, K, and where its parts stand in a decoder layer.

    gate: the module whose first input is the router's. weight, bias: the router's weight and its selection bias.
    norm: what stands before the router; kind: how it computes.
    """

    rule: Callable[..., Chosen]
    k: int = 2
    gate: str = "mlp.gate"
    weight: str = "mlp.gate.weight"
    bias: str = ""
    norm: str = "post_attention_layernorm"
    kind: str = "rms"
    layers: str = "model.layers"
    more: dict[str, str] = field(default_factory=dict)


GATE_BIAS = "mlp.gate.e_score_correction_bias"
ROUTER = {"gate": "mlp.router", "weight": "mlp.router.weight"}
V3 = partial(Case, partial(sigmoids, scale=2.5), bias=GATE_BIAS)
V3_GROUPS = partial(Case, partial(sigmoids, scale=2.5, groups=(4, 2, 2)), bias=GATE_BIAS)
QWEN3 = Case(softmax)
TEXT = "model.language_model.layers"
GRANITE = Case(of_the_chosen, gate="block_sparse_moe.router", weight="block_sparse_moe.router.weight")
LLAMA4 = Case(each_sigmoid, k=1, gate="feed_forward.router", weight="feed_forward.router.weight")
GEMMA4 = partial(
    Case,
    softmax,
    gate="router",
    weight="router.proj.weight",
    norm="router.norm",
    kind="gemma",
    more={"factor": "router.per_expert_scale"},
)
INKLING = partial(Case, inkling, bias=GATE_BIAS, more={"scale": "mlp.gate.global_scale"})
CASES = {
    "deepseek_v2": Case(partial(softmax, norm=False, scale=16.0)),
    "deepseek_v2_grouped": Case(partial(softmax, norm=False, scale=16.0, groups=(4, 2, 1)), k=3),
    "deepseek_v2_vacuous": Case(partial(softmax, norm=False, scale=16.0)),
    "mixtral": Case(softmax),
    "minimax": Case(softmax),
    "minimax_m2": Case(sigmoids, bias="mlp.e_score_correction_bias"),
    "minimax_m3_vl_text": Case(sigmoids, bias=GATE_BIAS, kind="rms of 1 + weight"),
    "minimax_m3_vl": Case(sigmoids, bias=GATE_BIAS, kind="rms of 1 + weight", layers=TEXT),
    "phimoe": Case(sparsemixer, kind="layer", **ROUTER),
    "qwen2_moe": Case(partial(softmax, norm=False)),
    "qwen3_moe": QWEN3,
    "qwen3_vl_moe": Case(softmax, layers=TEXT),
    "qwen3_next": Case(softmax, kind="rms of 1 + weight"),
    "qwen3_5_moe_text": Case(softmax, kind="rms of 1 + weight"),
    "qwen3_5_moe": Case(softmax, kind="rms of 1 + weight"),
    "qwen4_exp_text": Case(softmax, norm="mlp_hyper_connection", kind="wide streams"),
    "qwen4_exp": Case(softmax, norm="mlp_hyper_connection", kind="wide streams"),
    "olmoe": Case(partial(softmax, norm=False), k=3),
    "flex_olmo": Case(partial(softmax, norm=False), kind="none"),
    "mellum": QWEN3,
    "cohere2_moe": Case(of_the_chosen, norm="input_layernorm", kind="layer"),
    "flint": Case(sigmoids),
    "lara_mini": QWEN3,
    "deepseek_v3": V3_GROUPS(),
    "deepseek_v32": V3(),
    "kimi_k25": V3_GROUPS(layers=TEXT),
    "mistral4": Case(partial(softmax, scale=2.5, groups=(4, 2, 2))),
    "deepseek_v4": Case(partial(sqrt_softplus, scale=2.5), bias=GATE_BIAS, kind="streams"),
    "glm4_moe": V3_GROUPS(),
    "glm4v_moe": V3(layers=TEXT),
    "glm4_moe_lite": V3(),
    "glm_moe_dsa": V3(),
    "dots1": V3(),
    "solar_open": V3(),
    "mimo_v2_flash": V3(),
    "sarvam_mla": V3(),
    "sarvam_moe": V3(),
    "bailing_hybrid": V3_GROUPS(k=3),
    "kimi_linear": Case(partial(sigmoids, scale=2.446), bias=GATE_BIAS),
    "axk1": V3_GROUPS(),
    "axk2": V3(kind="gated"),
    "beam": Case(partial(sigmoids, groups=(4, 2, 2)), bias=GATE_BIAS, norm="pre_feedforward_layernorm"),
    "exaone_moe": V3(),
    "hy_v4": V3(kind="streams"),
    "nemotron_h": Case(
        sigmoids,
        gate="mixer.gate",
        weight="mixer.gate.weight",
        bias="mixer.gate.e_score_correction_bias",
        norm="norm",
    ),
    "hy_v3": Case(partial(sigmoids, scale=2.826), bias="mlp.e_score_correction_bias"),
    "afmoe": Case(
        partial(sigmoids, scale=1.5),
        gate="mlp.router.gate",
        weight="mlp.router.gate.weight",
        bias="mlp.expert_bias",
        norm="pre_mlp_layernorm",
    ),
    "laguna": Case(
        partial(scored, score=lambda logits: [sigmoid(5 * np.tanh(logit / 5)) for logit in logits]), bias=GATE_BIAS
    ),
    "kolibri1": Case(each_sigmoid, bias=GATE_BIAS),
    "lfm2_moe": Case(
        sigmoids,
        gate="feed_forward.gate",
        weight="feed_forward.gate.weight",
        bias="feed_forward.expert_bias",
        norm="ffn_norm",
    ),
    "ernie4_5_moe": Case(softmax, bias="mlp.gate.moe_statics.e_score_correction_bias"),
    "jamba": Case(
        partial(softmax, norm=False),
        gate="feed_forward.router",
        weight="feed_forward.router.weight",
        norm="pre_ff_layernorm",
    ),
    "hunyuan_v1_moe": Case(softmax, weight="mlp.gate.wg.weight"),
    "longcat_flash": Case(
        partial(softmax, norm=False, scale=6.0),
        k=3,
        gate="mlp.router",
        weight="mlp.router.classifier.weight",
        bias="mlp.router.e_score_correction_bias",
        norm="post_attention_layernorm.0",
    ),
    "zaya": Case(
        longest_gap_without_skip,
        k=1,
        weight="mlp.gate.router_mlp.out_proj.weight",
        bias="mlp.gate.balancing_biases",
        kind="zaya",
    ),
    "dbrx": Case(
        partial(softmax, power=2),
        gate="ffn.router",
        weight="ffn.router.layer.weight",
        norm="norm_attn_norm.norm_2",
        kind="layer",
        layers="transformer.blocks",
    ),
    "gpt_oss": Case(of_the_chosen, **ROUTER),
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE,
    "granitemoehybrid": GRANITE,
    "granitemoe_swa": GRANITE,
    "jetmoe": Case(of_the_chosen, gate="mlp.router", weight="mlp.router.layer.weight"),
    "aria_text": Case(of_the_chosen, **ROUTER),
    "aria": Case(of_the_chosen, layers=TEXT, **ROUTER),
    "llama4_text": LLAMA4,
    "llama4": LLAMA4,
    "gemma4_text": GEMMA4(),
    "gemma4": GEMMA4(layers=TEXT),
    "inkling_text": INKLING(),
    "inkling_mm_model": INKLING(layers=TEXT),
    "muse_spark": Case(
        partial(scored, score=lambda logits: [sigmoid(0.1767766952966369 * logit) for logit in logits], scale=2.5),
        bias=GATE_BIAS,
        norm="pre_feedforward_layernorm",
        kind="rms of 1 + weight",
        layers=TEXT,
    ),
    "step3p7": Case(sigmoids, bias=GATE_BIAS, kind="rms of 1 + weight", layers=TEXT),
}


KNOWN = installed(CASES)


def one_stream(layer, hidden):
    """Hyper-connections: a mix of the streams, weighed by what all of them say (arXiv 2409.19606)."""
    streams = hidden.shape[-2]
    flat = rms(hidden.reshape(*hidden.shape[:-2], -1), layer.ffn_hc.input_norm.eps)
    raw = (flat @ value(layer, "ffn_hc.fn").T)[..., :streams]
    mix = sigmoid(raw * value(layer, "ffn_hc.scale")[0] + value(layer, "ffn_hc.base")[:streams]) + 1e-6
    return (mix[..., None] * hidden).sum(-2)


def one_of_wide_streams(path, layer, hidden):
    """Hyper-connections whose streams lie side by side: each feature of each normed stream has a gate of low rank."""
    module = layer.get_submodule(path)
    streams = hidden.reshape(*hidden.shape[:-1], module.hc_count, -1)
    flat = rms(streams, module.hc_norm.eps).reshape(hidden.shape) * (1 + value(module, "hc_norm.weight"))
    inner = dense(module, "input_mix_weight_down", flat) / module.hc_count
    gates = sigmoid(dense(module, "input_mix_weight_up", inner * sigmoid(inner)))
    return (gates * flat).reshape(streams.shape).mean(-2)


def normed(case: Case, layer, hidden):
    """What stands before the router, on [..., H] (or streams of it)."""
    if case.kind == "none":
        return hidden
    if case.kind == "wide streams":
        return one_of_wide_streams(case.norm, layer, hidden)
    if case.kind == "streams":
        hidden = one_stream(layer, hidden)
    module = layer.get_submodule(case.norm)
    module = getattr(module, "norm", module) if case.kind == "gated" else module
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = value(module, "weight")
    if case.kind == "layer":
        bias = value(module, "bias")
        centred = hidden - hidden.mean(-1, keepdims=True)
        return rms(centred, eps, weight) + (0 if bias is None else bias)
    if case.kind == "gemma":
        return rms(hidden, eps) * value(layer, "router.scale") * hidden.shape[-1] ** -0.5
    out = rms(hidden, eps, 1 + weight if case.kind == "rms of 1 + weight" else weight)
    if case.kind == "gated":
        inner = dense(layer, f"{case.norm}.mlp.fc1", out)
        return out * sigmoid(dense(layer, f"{case.norm}.mlp.fc2", inner * sigmoid(inner)))
    return out


def through_router(case: Case, layer, hidden, state=None):
    """Logits of the router on its own input [..., H], and what it hands to the next layer's router, if anything."""
    if case.kind == "zaya":
        state = dense(layer, "mlp.gate.down_proj", hidden) + (
            0 if state is None else state * value(layer, "mlp.gate.router_states_scale")
        )
        path = "mlp.gate.router_mlp"
        inner = rms(state, layer.mlp.gate.router_mlp.norm.variance_epsilon, value(layer, f"{path}.norm.weight"))
        hidden = gelu(dense(layer, f"{path}.fc2", gelu(dense(layer, f"{path}.fc1", inner))))
    bias = value(layer, "mlp.router.bias") if case.weight == "mlp.router.weight" else None
    return hidden @ value(layer, case.weight).T + (0 if bias is None else bias), state


@pytest.fixture(scope="module")
def runs(tiny):
    """runs(name): one padded batch through a family's model, everything the tests look at, once."""
    cache: dict[str, Any] = {}

    def run(name):
        if name not in cache:
            cache[name] = run_once(name, find_model(str(tiny(name))))
        return cache[name]

    return run


def run_once(name, model):
    network = load_model(model, LoadOptions("float32"))
    case = CASES[name]
    layers = {layer: network.get_submodule(case.layers)[layer] for layer in MOE_LAYERS[name]}
    seen = SimpleNamespace(model=model, network=network, layers=layers, gate={}, input={}, calls=[], choices={})
    seen.points, handles = capture_points(network, model.spec), []
    for point in seen.points:
        number, layer = point.layer.id, layers[point.layer.id]
        handles += [keep_input(layer.get_submodule(case.gate), seen.gate, number), listen(point, seen)]
        handles.append(keep_input(layer, seen.input, number))
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, VOCAB, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.stack([torch.arange(max(LENGTHS)) < length for length in LENGTHS]).long()
    seen.tokens = (tokens * mask).reshape(-1).numpy()
    with torch.inference_mode():
        network(input_ids=tokens * mask, attention_mask=mask, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def keep_input(module, store, number):
    def hook(_module, args, kwargs):
        store[number] = next(iter([*args, *kwargs.values()])).detach()

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def listen(point, seen):
    """A plain hook on the watched module."""

    def hook(_module, args, kwargs, output=None):
        seen.calls.append(point.layer.id)
        seen.choices[point.layer.id] = read_choice(point, args, kwargs, output)

    if point.point is Point.EXPERTS_INPUT:
        return point.watched.register_forward_pre_hook(hook, with_kwargs=True)
    return point.watched.register_forward_hook(hook, with_kwargs=True)


def by_hand(name, seen):
    """layer -> each token's choice, from the router's inputs."""
    case, state, found = CASES[name], None, {}
    for number, layer in seen.layers.items():
        hidden = seen.gate[number].double().numpy()
        hidden = normed(case, layer, hidden) if case.kind == "gemma" else hidden
        logits, state = through_router(case, layer, hidden, state)
        options = {"bias": value(layer, case.bias)} if case.bias else {}
        options = {key: bias.reshape(-1) for key, bias in options.items() if bias is not None}
        if "scale" in case.more:
            options["scale"] = float(value(layer, case.more["scale"])[0])
        rows = [case.rule(list(row), case.k, **options) for row in logits.reshape(-1, logits.shape[-1])]
        if "factor" in case.more:
            factor = value(layer, case.more["factor"])
            rows = [(ids, [w * factor[e] for e, w in zip(ids, weights, strict=True)], g) for ids, weights, g in rows]
        table = value(layer, "mlp.gate.tid2eid")
        if table is not None:
            rows = [
                looked_up(list(row), table[token])
                for row, token in zip(logits.reshape(-1, EXPERTS), seen.tokens, strict=True)
            ]
        found[number] = rows
    return found


def looked_up(logits, ids) -> Chosen:
    """A hash layer: the experts stand in a table, the weights come from the router."""
    scores = [np.sqrt(np.log1p(np.exp(logits[int(expert)]))) for expert in ids]
    return [int(expert) for expert in ids], [2.5 * score / sum(scores) for score in scores], 1.0


def test_every_family_of_the_table_is_tried():
    assert {config["model_type"] for config in FAMILY_CONFIGS.values()} == set(FAMILIES)
    assert set(CASES) == set(FAMILY_CONFIGS) == set(MOE_LAYERS)


@pytest.mark.parametrize("name", KNOWN)
def test_captured_ids_and_weights_are_those_of_the_rule_applied_to_the_routers_input(name, runs):
    """Group routing was implemented in two ways, one of them wrong; here it is the model's own, by hand."""
    seen = runs(name)
    for layer, expected in by_hand(name, seen).items():
        ids, weights = (tensor.numpy() for tensor in seen.choices[layer])
        assert ids.shape == weights.shape == (seen.tokens.size, CASES[name].k)
        ties = 0
        for row, (experts, by_weight, gap) in enumerate(expected):
            if gap < NEAR_TIE:
                ties += 1
                continue
            assert set(ids[row].tolist()) == set(experts)
            wanted = dict(zip(experts, by_weight, strict=True))
            assert weights[row].tolist() == pytest.approx([wanted[e] for e in ids[row].tolist()], rel=1e-4, abs=1e-7)
        assert ties < 0.1 * len(expected)


@pytest.mark.parametrize("name", KNOWN)
def test_layers_carry_the_decoders_own_numbers_and_each_is_seen_once(name, runs):
    seen = runs(name)
    assert [point.layer.id for point in seen.points] == MOE_LAYERS[name]
    assert all(point.decoder_layer is seen.layers[point.layer.id] for point in seen.points)
    assert seen.calls == MOE_LAYERS[name]


@pytest.mark.parametrize("name", KNOWN)
def test_early_logits_are_the_router_on_the_layers_normed_input(name, runs):
    seen = runs(name)
    for point in seen.points:
        hidden = seen.input[point.layer.id]
        layer = point.decoder_layer
        expected, _ = through_router(CASES[name], layer, normed(CASES[name], layer, hidden.double().numpy()))
        expected = expected.reshape(-1, expected.shape[-1])[:, :EXPERTS]
        with torch.inference_mode():
            found = router_logits(point, router_input(point, hidden))
        assert found.dtype == torch.float32
        assert found.shape == (seen.tokens.size, EXPERTS)
        assert np.abs(found.numpy() - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", KNOWN)
def test_files_hold_the_routers_under_the_names_of_the_row(name, runs):
    seen = runs(name)
    files = seen.model.files().by_name()
    disk = disk_names(seen.model, files)
    for point in seen.points:
        pairs = zip(disk.router_names(point.layer.id), point.family.router_in_memory(), strict=True)
        for stored, path in pairs:
            held = value(point.decoder_layer, path)
            assert (stored in files) == (held is not None)
            if held is not None:
                shard, tensor = files[stored]
                written = np.frombuffer(shard.read(tensor), np.float32).reshape(tensor.shape)
                # transformers sets the bias of zaya's skip class again whenever it loads.
                assert np.array_equal(written.reshape(-1)[:EXPERTS], held.reshape(-1)[:EXPERTS])
    assert input_embedding(seen.model)[1].shape == (VOCAB, seen.model.spec.hidden_size)


@pytest.mark.parametrize("name", KNOWN)
def test_identity_is_the_same_twice_and_another_when_a_router_weight_changes(name, tiny, tmp_path):
    first, second = (model_identity(find_model(str(tiny(name)))) for _ in range(2))
    assert first == second
    copy = shutil.copytree(tiny(name), tmp_path / "copy")
    model = find_model(str(copy))
    disk = disk_names(model, model.files().by_name())
    tensors = load_file(copy / "model.safetensors")
    tensors[disk.router_names(MOE_LAYERS[name][-1])[0]][-1, -1] += 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert not same_model(first, model_identity(find_model(str(copy))))


def test_kimi_under_its_published_names_is_the_same_model(runs, tmp_path):
    """transformers writes `blocks` where the published files say `layers`."""
    seen = runs("kimi_k25")
    copy = shutil.copytree(seen.model.local_folder(), tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    published = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): tensors[name] for name in tensors
    }
    assert published.keys() != tensors.keys()
    save_file(published, copy / "model.safetensors", metadata={"format": "pt"})
    model = find_model(str(copy))
    assert same_model(model_identity(model), model_identity(seen.model))
    held, expected = (network.state_dict() for network in (load_model(model, LoadOptions("float32")), seen.network))
    assert all(held[name].equal(expected[name]) for name in expected)


def test_a_model_no_class_of_transformers_loads_as_text_is_refused_by_its_folder(tiny, tmp_path):
    copy = shutil.copytree(tiny("mixtral"), tmp_path / "copy")
    model = find_model(str(copy))
    (copy / "config.json").write_text('{"model_type": "siglip_vision_model"}')
    with pytest.raises(ImpossibleError, match=r"transformers cannot load .*copy \(.*SiglipVisionConfig"):
        load_model(model, LoadOptions("float32"))


def test_a_skipped_token_of_zaya_is_the_zero_expert(runs):
    """At the experts it looks like expert 0 with weight 0."""
    ids, weights = runs("zaya").choices[1]
    point = runs("zaya").points[1]
    raw = torch.tensor([[3], [0], [0]]), torch.tensor([[0.5], [0.0], [0.25]])
    assert read_choice(point, (torch.zeros(3, 32), *raw), {})[0].tolist() == [[3], [EXPERTS], [0]]
    assert ((ids == EXPERTS) == (weights == 0)).all()


def test_zero_experts_of_longcat_are_chosen_and_recorded(runs):
    ids = torch.cat([ids for ids, _ in runs("longcat_flash").choices.values()])
    assert ids.max() >= EXPERTS
    assert ids.max() < EXPERTS + 4


@pytest.mark.parametrize(
    "call",
    [
        ((torch.zeros(4, 32),), {}),
        ((torch.zeros(4, 32), torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, 3)), {}),
        ((torch.zeros(4, 32), torch.zeros(4, 2, dtype=torch.int64)), {}),
    ],
)
def test_a_call_that_does_not_show_k_experts_is_refused_with_its_layer(call, runs):
    with pytest.raises(ImpossibleError, match=r"layer 1: .*Experts does not show 2 experts a token"):
        read_choice(runs("mixtral").points[1], *call)


def test_names_of_the_experts_inputs_do_not_matter(runs):
    ids, weights = torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]])
    named = {"hidden_states": torch.zeros(1, 32), "routing_weights": weights, "router_indices": ids, "other": None}
    found = read_choice(runs("gpt_oss").points[0], (), named)
    assert found[0].equal(ids)
    assert found[1].equal(weights)


def test_a_model_without_the_rows_modules_is_refused_by_path(runs):
    with pytest.raises(ImpossibleError, match=r"MixtralForCausalLM has no layers\.0\.mlp\.router"):
        capture_points(runs("mixtral").network, runs("jetmoe").model.spec)
