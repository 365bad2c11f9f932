"""Rows of the table of families whose routers are DeepSeek's kind: leading dense layers, shared experts, groups."""

from dataclasses import replace

from smoe_profiles.families.names import (
    BIAS_IN_BLOCK,
    FUSED,
    GATE,
    GATE_BIAS,
    GATE_UP_DOWN,
    MLP,
    N_ROUTED_EXPERTS,
    NUM_EXPERTS,
    OLD_TEXT_EMBEDDING,
    SHARED,
    SIGMOID_BIAS,
    SPARSE,
    TEXT_EMBEDDING,
    TEXT_LAYERS,
    TEXT_MLP,
    W1_W3_W2,
)
from smoe_profiles.families.schema import Disk, Family

DEEPSEEK_V2 = Family(
    "deepseek_v2",
    (Disk(MLP, GATE, GATE_UP_DOWN, SHARED),),
    N_ROUTED_EXPERTS,
    "softmax",
    "first_dense",
    group_keys=("n_group", "topk_group"),
    group_method_key="topk_method",
    group_score="max",
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    disk=(Disk(MLP, GATE_BIAS, GATE_UP_DOWN, SHARED),),
    rule=SIGMOID_BIAS,
    dense_first=3,
    group_defaults=(8, 4),
    group_method_key="",
    group_score="sum2",
)
V4_DISK = Disk("model.layers.{layer}.ffn", ("gate.weight", "gate.bias"), W1_W3_W2, SHARED, tables=("gate.tid2eid",))
GLM4 = replace(DEEPSEEK_V3, model_type="glm4_moe", dense_first=1, group_defaults=(1, 1))
"""The rule of DeepSeek-V3, with groups only where a config asks for them."""
DEEPSEEK_LIKE: tuple[Family, ...] = (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    replace(DEEPSEEK_V3, model_type="deepseek_v32"),
    replace(
        DEEPSEEK_V3,
        model_type="kimi_k25",
        nested="text_config",
        disk=(
            Disk(f"language_model.{MLP}", GATE_BIAS, GATE_UP_DOWN, SHARED, OLD_TEXT_EMBEDDING),
            # As transformers writes it, whose rename for the vision tower's blocks catches the layers too.
            Disk("language_model.model.blocks.{layer}.mlp", GATE_BIAS, GATE_UP_DOWN, SHARED, OLD_TEXT_EMBEDDING),
        ),
        layers=TEXT_LAYERS,
    ),
    replace(
        DEEPSEEK_V3,
        model_type="mistral4",
        disk=(Disk(MLP, GATE, FUSED, SHARED),),
        rule="softmax",
        dense_first=0,
        group_defaults=(1, 1),
    ),
    Family(
        "deepseek_v4",
        (
            replace(V4_DISK, block="layers.{layer}.ffn", embedding="embed.weight"),
            V4_DISK,
        ),
        N_ROUTED_EXPERTS,
        "sqrt softplus + bias",
        hash_key="num_hash_layers",
        hash_first=3,
        memory_router=GATE_BIAS,
        before_router=("ffn_hc", "post_attention_layernorm"),  # the layer's input has several streams
        left_padding=False,  # its compressed attention counts blocks from the first position, padding included
    ),
    GLM4,
    replace(
        GLM4,
        model_type="glm4v_moe",
        nested="text_config",
        disk=(Disk(TEXT_MLP, GATE_BIAS, GATE_UP_DOWN, SHARED, TEXT_EMBEDDING),),
        layers=TEXT_LAYERS,
    ),
    replace(GLM4, model_type="glm4_moe_lite"),
    replace(GLM4, model_type="glm_moe_dsa", dense_first=3),
    replace(GLM4, model_type="dots1", dense_first=0),
    replace(GLM4, model_type="solar_open", layer_rule="all"),
    replace(GLM4, model_type="mimo_v2_flash"),
    replace(GLM4, model_type="sarvam_mla"),
    replace(
        GLM4,
        model_type="sarvam_moe",
        disk=(Disk(MLP, ("gate.weight", "gate.expert_bias"), GATE_UP_DOWN, SHARED, "model.word_embeddings.weight"),),
        memory_router=GATE_BIAS,
    ),
    replace(
        GLM4,
        model_type="bailing_hybrid",
        disk=(Disk(MLP, ("gate.weight", "gate.expert_bias"), GATE_UP_DOWN, SHARED, "model.word_embeddings.weight"),),
        experts_keys=NUM_EXPERTS,
        top_k_keys=("num_experts_per_token", "num_experts_per_tok"),
        dense_first=2,
        group_defaults=(8, 4),
        group_aliases=("num_expert_group",),
        memory_router=GATE_BIAS,
    ),
    replace(
        GLM4,
        model_type="kimi_linear",
        disk=(Disk(SPARSE, GATE_BIAS, W1_W3_W2, SHARED),),
        experts_keys=NUM_EXPERTS,
        top_k_keys=("num_experts_per_token", "num_experts_per_tok"),
        group_aliases=("num_expert_group",),
    ),
    replace(GLM4, model_type="axk1", group_defaults=(8, 4)),
    replace(GLM4, model_type="axk2"),
    replace(
        GLM4,
        model_type="beam",
        experts_keys=NUM_EXPERTS,
        dense_first=3,
        group_defaults=(8, 4),
        before_router=("pre_feedforward_layernorm",),
    ),
    replace(
        GLM4,
        model_type="exaone_moe",
        disk=(Disk(MLP, BIAS_IN_BLOCK, GATE_UP_DOWN, SHARED),),
        experts_keys=NUM_EXPERTS,
        memory_router=GATE_BIAS,
    ),
    replace(
        GLM4,
        model_type="hy_v4",
        disk=(Disk(MLP, GATE_BIAS, FUSED, SHARED),),
        before_router=("ffn_hc", "post_attention_layernorm"),
    ),
    replace(
        GLM4,
        model_type="nemotron_h",
        disk=(
            Disk(
                "backbone.layers.{layer}.mixer",
                GATE_BIAS,
                ("up_proj.weight", "down_proj.weight"),
                (*SHARED, "fc1_latent_proj.", "fc2_latent_proj."),
                "backbone.embeddings.weight",
            ),
        ),
        layer_rule="block_types",
        layers_keys=("layers_block_type", "hybrid_override_pattern"),
        memory_block="mixer",
        before_router=("norm",),
    ),
)
