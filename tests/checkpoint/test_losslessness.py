"""When is a renumbered model the same function? Random routers and permutations, run before and after."""

import json
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_cli.checkpoint.comparison import TOLERANCE
from smoe_cli.checkpoint.layouts import blocking_layer
from smoe_profiles.families.config import read_spec
from tests.profiles.tiny_families import DIRECT_MLA, MLA
from tests.profiles.tiny_models import _COMMON

TOKENS = 300


@dataclass(frozen=True)
class Rule:
    """A family with a group rule or none, and what a config of its needs besides the numbers drawn."""

    model_type: str
    block: str
    more: dict[str, object]
    grouped: bool


RULES = [
    Rule(
        "deepseek_v2", "mlp", DIRECT_MLA | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0}, True
    ),
    Rule("deepseek_v3", "mlp", MLA | {"norm_topk_prob": True}, True),
    Rule("glm4_moe", "mlp", {"head_dim": 16, "norm_topk_prob": True}, True),
    Rule("mixtral", "mlp", {}, False),
    Rule("qwen3_moe", "mlp", {"head_dim": 16, "decoder_sparse_step": 1}, False),
    Rule("minimax_m2", "mlp", {"head_dim": 16}, False),
    Rule("gpt_oss", "mlp", {"head_dim": 16, "layer_types": ["full_attention"]}, False),
]


@st.composite
def routers(draw):
    """A rule, numbers of experts, chosen and groups, and a permutation of the experts."""
    rule = draw(st.sampled_from(RULES))
    groups = draw(st.sampled_from([1, 2, 4])) if rule.grouped else 1
    size = draw(st.sampled_from([2, 3, 4]))
    chosen = draw(st.integers(1, groups))
    top_k = draw(st.integers(1, min(4, chosen * size)))
    whole = draw(st.booleans())
    experts = groups * size
    order = draw(st.permutations(range(experts)))
    if whole:
        inside = [draw(st.permutations(range(size))) for _ in range(groups)]
        order = [group * size + inside[group][i] for group in draw(st.permutations(range(groups))) for i in range(size)]
    return rule, experts, top_k, groups, chosen, np.array(order)


def make(rule, experts, top_k, groups, chosen, seed):
    """(one decoder layer's MoE block, the config as read from JSON)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    numbers = {
        **_COMMON,
        "num_hidden_layers": 1,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": 8,
        "intermediate_size": 8,
        **dict.fromkeys(("n_routed_experts",) if rule.grouped else ("num_local_experts", "num_experts"), experts),
        **(
            {"n_group": groups, "topk_group": chosen, "first_k_dense_replace": 0, "n_shared_experts": 1}
            if rule.grouped
            else {}
        ),
        **rule.more,
    }
    torch.manual_seed(seed)
    config = AutoConfig.for_model(rule.model_type, **numbers)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    block = getattr(model.model.layers[0], rule.block)
    with torch.no_grad():
        for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
            tensor.normal_(std=0.1 if "bias" in name else 0.4)
    return block.eval(), json.loads(json.dumps({"model_type": rule.model_type} | numbers))


def renumber(block, order):
    """Every tensor with an expert axis in the new order, by its shape alone."""
    with torch.no_grad():
        for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
            if "shared" not in name and tensor.shape[0] == len(order):
                tensor.copy_(tensor[torch.from_numpy(order)].clone())


def run(block, hidden):
    """(output, chosen experts [T, K])."""
    seen = []
    handle = block.experts.register_forward_pre_hook(
        lambda _module, args, kwargs: seen.extend(
            value for value in (*args, *kwargs.values()) if not value.is_floating_point()
        ),
        with_kwargs=True,
    )
    with torch.inference_mode():
        output = block(hidden)
    handle.remove()
    return output[0] if isinstance(output, tuple) else output, seen[0].reshape(-1, seen[0].shape[-1])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(routers(), st.integers(0, 1000))
def test_a_map_that_passes_is_the_same_function_and_one_that_is_stopped_is_not(drawn, seed):
    rule, experts, top_k, groups, chosen, order = drawn
    block, config = make(rule, experts, top_k, groups, chosen, seed)
    layers = read_spec(config, "config.json").layers
    assert [layer.num_experts for layer in layers] == [experts]
    hidden = torch.from_numpy(np.random.default_rng(seed).normal(size=(1, TOKENS, 32)).astype(np.float32))
    before, ids = run(block, hidden)
    renumber(block, order)
    after, slots = run(block, hidden)
    same = (np.sort(order[slots.numpy()], axis=1) == np.sort(ids.numpy(), axis=1)).all(axis=1)
    if blocking_layer(layers, order[None]) is None:
        assert same.all()
        assert float((after - before).abs().max() / before.abs().max()) <= TOLERANCE
    else:
        assert not same.all(), "a map that is harmless was stopped"
