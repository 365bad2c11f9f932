"""The table of model families: one row of data each, shared by capture, regroup and verify.

A row says which config keys hold E and K, where the router and the experts stand on disk, what moves
with an expert, and which layers are MoE layers. A new family is a new row, never a new code path.
Names were read from the transformers 5.24 sources and from published checkpoints.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One model type's MoE layout.

    experts_keys, top_k_key: config keys of E (published files use the first, transformers may write another) and K.
    block: the MoE block's name on disk, with `{layer}`; tensor names below are relative to it.
    router: tensors with E on axis 0 that belong to the router (weight first; biases follow).
    parts: an expert's projections on disk as (gate, up, down), under `experts.<n>.`.
    shared: sub-modules of the block that every token uses; copied as they are.
    memory_block: the block's name in transformers, relative to the decoder layer.
    layer_rule: which decoder layers are MoE layers, a key of `config.LAYER_RULES`.
    rule: how the router scores experts, as printed to the user.
    group_keys: config keys of a group-limited router (groups, groups chosen), or empty.
    """

    model_type: str
    experts_keys: tuple[str, ...]
    top_k_key: str
    block: str
    router: tuple[str, ...]
    parts: tuple[str, str, str]
    rule: str
    layer_rule: str
    shared: tuple[str, ...] = ()
    memory_block: str = "mlp"
    group_keys: tuple[str, ...] = ()


GATE_UP_DOWN = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
W1_W3_W2 = ("w1.weight", "w3.weight", "w2.weight")

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="deepseek_v2",
            experts_keys=("n_routed_experts",),
            top_k_key="num_experts_per_tok",
            block="model.layers.{layer}.mlp",
            router=("gate.weight",),
            parts=GATE_UP_DOWN,
            rule="softmax",
            layer_rule="first_k_dense",
            shared=("shared_experts.",),
            group_keys=("n_group", "topk_group"),
        ),
        Family(
            model_type="mixtral",
            experts_keys=("num_local_experts",),
            top_k_key="num_experts_per_tok",
            block="model.layers.{layer}.block_sparse_moe",
            router=("gate.weight",),
            parts=W1_W3_W2,
            rule="softmax",
            layer_rule="all",
        ),
        Family(
            model_type="qwen2_moe",
            experts_keys=("num_experts",),
            top_k_key="num_experts_per_tok",
            block="model.layers.{layer}.mlp",
            router=("gate.weight",),
            parts=GATE_UP_DOWN,
            rule="softmax",
            layer_rule="sparse_step",
            shared=("shared_expert.", "shared_expert_gate."),
        ),
        Family(
            model_type="qwen3_moe",
            experts_keys=("num_experts", "num_local_experts"),
            top_k_key="num_experts_per_tok",
            block="model.layers.{layer}.mlp",
            router=("gate.weight",),
            parts=GATE_UP_DOWN,
            rule="softmax",
            layer_rule="sparse_step",
        ),
        Family(
            model_type="olmoe",
            experts_keys=("num_experts",),
            top_k_key="num_experts_per_tok",
            block="model.layers.{layer}.mlp",
            router=("gate.weight",),
            parts=GATE_UP_DOWN,
            rule="softmax",
            layer_rule="all",
        ),
    )
}

EMBEDDING = "model.embed_tokens.weight"
"""The input embedding on disk, [V, H]; the same name in every family of the table so far."""
