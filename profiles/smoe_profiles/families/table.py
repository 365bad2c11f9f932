"""The table of model families: one row of data each, shared by capture, regroup and verify.

A row says which config keys hold E and K, which layers are MoE layers, where router and experts stand on disk and in
transformers, and where the choice can be read. A new family is a new row, never a new code path; a row that differs
little from another is written as the difference. Names were read from the transformers 5.24 sources and from
published checkpoints.
"""

from dataclasses import replace

from smoe_profiles.families.deepseek import DEEPSEEK_LIKE
from smoe_profiles.families.names import (
    BIAS_IN_BLOCK,
    CHOSEN_ONLY,
    FEED_FORWARD,
    FUSED,
    GATE,
    GATE_BIAS,
    GATE_UP_DOWN,
    MLP,
    N_ROUTED_EXPERTS,
    NUM_EXPERTS,
    NUM_LOCAL_EXPERTS,
    OLD_TEXT_EMBEDDING,
    SHARED,
    SHARED_GATED,
    SIGMOID_BIAS,
    SPARSE,
    TEXT_EMBEDDING,
    TEXT_LAYERS,
    TEXT_MLP,
    TWO_LINEAR,
    W1_W3_W2,
)
from smoe_profiles.families.schema import Disk, Family, Point

MIXTRAL = Family("mixtral", (Disk(SPARSE, GATE, W1_W3_W2),), NUM_LOCAL_EXPERTS, "softmax")
MINIMAX_M3 = Family(
    "minimax_m3_vl_text", (Disk(MLP, GATE_BIAS, FUSED, SHARED),), NUM_LOCAL_EXPERTS, SIGMOID_BIAS, "first_dense"
)
QWEN2 = Family("qwen2_moe", (Disk(MLP, GATE, GATE_UP_DOWN, SHARED_GATED),), NUM_EXPERTS, "softmax", "sparse_step")
QWEN3 = replace(QWEN2, model_type="qwen3_moe", disk=(Disk(MLP, GATE, GATE_UP_DOWN),))
QWEN3_5 = replace(QWEN2, model_type="qwen3_5_moe_text", layer_rule="all")
QWEN4 = replace(
    QWEN3_5,
    model_type="qwen4_exp_text",
    before_router=("mlp_hyper_connection",),  # the layer's input holds several streams, mixed into one
    hidden_at=0,
)
OLMOE = replace(QWEN3, model_type="olmoe", layer_rule="all")
GRANITE = Family(
    "granitemoe",
    (Disk(SPARSE, ("router.layer.weight",), FUSED, fused=TWO_LINEAR),),
    NUM_LOCAL_EXPERTS,
    CHOSEN_ONLY,
    memory_block="block_sparse_moe",
    memory_router=("router.weight",),
)
ARIA = Family(
    "aria_text",
    (Disk(MLP, ("router.weight",), FUSED, SHARED),),
    ("moe_num_experts",),
    CHOSEN_ONLY,
    top_k_keys=("moe_topk",),
    # Up to 5.17 its experts are handed the logits and choose for themselves.
    watched="router",
    point=Point.ROUTER_OUTPUT,
)
LLAMA4 = Family(
    "llama4_text",
    (Disk(FEED_FORWARD, ("router.weight",), FUSED),),
    NUM_LOCAL_EXPERTS,
    "sigmoid of the chosen",
    "interleaved",
    layers="model.layers",  # its class is its own base model
    memory_block="feed_forward",
    # Every expert runs on every token, scaled by 0 where not chosen: the ids never reach the experts.
    watched="router",
    point=Point.ROUTER_OUTPUT,
    logits_at=1,
    weigh="sigmoid",
)
BESIDE_EXPERTS = (
    "self_attn.",
    "mlp.",
    "input_layernorm",
    "pre_",
    "post_",
    "per_layer_",
    "layer_scalar",
    "router.scale",
)
GEMMA4 = Family(
    "gemma4_text",
    (Disk("model.layers.{layer}", ("router.proj.weight", "router.per_expert_scale"), FUSED, BESIDE_EXPERTS),),
    NUM_EXPERTS,
    "softmax",
    top_k_keys=("top_k_experts",),
    memory_block="",
    before_router=("router.norm",),
    router_scale="router.scale",
)
INKLING = Family(
    "inkling_text",
    (Disk(MLP, GATE_BIAS, FUSED, SHARED),),
    N_ROUTED_EXPERTS,
    SIGMOID_BIAS,
    "first_dense",
    dense_keys=("dense_mlp_idx",),
    router_tail_key="n_shared_experts",
)

ROWS = (
    MIXTRAL,
    replace(MIXTRAL, model_type="minimax"),
    replace(
        MIXTRAL,
        model_type="minimax_m2",
        disk=(Disk(SPARSE, BIAS_IN_BLOCK, W1_W3_W2),),
        rule=SIGMOID_BIAS,
    ),
    MINIMAX_M3,
    replace(
        MINIMAX_M3,
        model_type="minimax_m3_vl",
        nested="text_config",
        disk=(Disk(f"language_model.{SPARSE}", BIAS_IN_BLOCK, W1_W3_W2, SHARED, OLD_TEXT_EMBEDDING),),
        layers=TEXT_LAYERS,
        memory_router=GATE_BIAS,
    ),
    replace(MIXTRAL, model_type="phimoe", rule="sparsemixer", memory_router=("router.weight",)),
    QWEN2,
    QWEN3,
    replace(
        QWEN3,
        model_type="qwen3_vl_moe",
        nested="text_config",
        disk=(Disk(TEXT_MLP, GATE, FUSED, (), TEXT_EMBEDDING),),
        layers=TEXT_LAYERS,
    ),
    replace(QWEN2, model_type="qwen3_next"),
    QWEN3_5,
    replace(
        QWEN3_5,
        model_type="qwen3_5_moe",
        nested="text_config",
        disk=(Disk(TEXT_MLP, GATE, GATE_UP_DOWN, SHARED_GATED, TEXT_EMBEDDING),),
    ),
    QWEN4,
    replace(
        QWEN4,
        model_type="qwen4_exp",
        nested="text_config",
        disk=(Disk(TEXT_MLP, GATE, GATE_UP_DOWN, SHARED_GATED, TEXT_EMBEDDING),),
    ),
    OLMOE,
    replace(OLMOE, model_type="flex_olmo", before_router=()),
    replace(OLMOE, model_type="mellum", layer_rule="first_dense"),
    replace(
        OLMOE,
        model_type="cohere2_moe",
        disk=(Disk(MLP, GATE, GATE_UP_DOWN, SHARED),),
        rule="top-k of the logits",
        layer_rule="first_dense",
        before_router=("input_layernorm",),  # attention and experts run side by side
    ),
    replace(QWEN2, model_type="flint", rule="sigmoid", dense_first=2),
    replace(OLMOE, model_type="lara_mini", disk=(Disk(MLP, GATE, FUSED, SHARED_GATED),)),
    *DEEPSEEK_LIKE,
    Family(
        "hy_v3",
        (Disk(MLP, ("router.gate.weight", "expert_bias"), GATE_UP_DOWN, ("shared_mlp.",)),),
        NUM_EXPERTS,
        SIGMOID_BIAS,
        "first_dense",
        dense_first=1,
        memory_router=BIAS_IN_BLOCK,
    ),
    Family(
        "afmoe",
        (Disk(MLP, ("router.gate.weight", "expert_bias"), GATE_UP_DOWN, SHARED),),
        NUM_EXPERTS,
        SIGMOID_BIAS,
        "first_dense",
        dense_keys=("num_dense_layers",),
        dense_first=1,
        before_router=("pre_mlp_layernorm",),
    ),
    Family(
        "laguna",
        (Disk(MLP, ("gate.weight", "experts.e_score_correction_bias"), GATE_UP_DOWN, ("shared_expert.",)),),
        NUM_EXPERTS,
        SIGMOID_BIAS,
        "first_dense",
        dense_first=1,
        memory_router=GATE_BIAS,
    ),
    Family(
        "kolibri1",
        (Disk(MLP, ("gate.weight", "model.layers.{layer}.moe.router.expert_bias"), GATE_UP_DOWN, SHARED),),
        NUM_LOCAL_EXPERTS,
        "logit + bias",
        memory_router=GATE_BIAS,
    ),
    Family(
        "lfm2_moe",
        (Disk(FEED_FORWARD, ("gate.weight", "expert_bias"), W1_W3_W2),),
        NUM_EXPERTS,
        SIGMOID_BIAS,
        "first_dense",
        dense_keys=("num_dense_layers",),
        dense_first=2,
        memory_block="feed_forward",
        before_router=("ffn_norm",),
    ),
    Family(
        "ernie4_5_moe",
        (Disk(MLP, ("gate.weight", "moe_statics.e_score_correction_bias"), GATE_UP_DOWN, SHARED),),
        ("moe_num_experts",),
        "softmax + bias",
        "interval",
        top_k_keys=("moe_k",),
        dense_first=1,
        memory_router=("gate.weight", "gate.moe_statics.e_score_correction_bias"),
    ),
    Family(
        "jamba",
        (Disk(FEED_FORWARD, ("router.weight",), GATE_UP_DOWN),),
        NUM_EXPERTS,
        "softmax",
        "period",
        memory_block="feed_forward",
        before_router=("pre_ff_layernorm",),
    ),
    Family(
        "hunyuan_v1_moe",
        (Disk(MLP, ("gate.wg.weight",), GATE_UP_DOWN, ("shared_mlp.",)),),
        NUM_EXPERTS,
        "softmax",
        top_k_keys=("moe_topk",),
    ),
    Family(
        "longcat_flash",
        (Disk(MLP, ("router.classifier.weight", "router.e_score_correction_bias"), GATE_UP_DOWN),),
        N_ROUTED_EXPERTS,
        "softmax + bias",
        top_k_keys=("moe_topk",),
        layers_keys=("num_layers",),  # of two attention blocks each
        zero_key="zero_expert_num",
        before_router=("post_attention_layernorm.0",),
    ),
    Family(
        "zaya",
        (Disk(MLP, ("gate.router_mlp.out_proj.weight", "gate.balancing_biases"), FUSED),),
        NUM_EXPERTS,
        "softmax + bias",
        zero_experts=1,
        zero_by_weight=True,
        router_width_key="router_hidden_size",
        # Without what the router of the layer before hands on: that is not known before the layer.
        before_router=(
            "post_attention_layernorm",
            "mlp.gate.down_proj",
            "mlp.gate.router_mlp.norm",
            "mlp.gate.router_mlp.fc1",
            "mlp.gate.router_mlp.act_fn",
            "mlp.gate.router_mlp.fc2",
            "mlp.gate.router_mlp.act_fn",
        ),
    ),
    Family(
        "dbrx",
        (
            Disk(
                "transformer.blocks.{layer}.ffn",
                ("router.layer.weight",),
                FUSED,
                embedding="transformer.wte.weight",
                row_blocks=True,
            ),
        ),
        ("ffn_config.moe_num_experts",),
        "softmax",
        top_k_keys=("ffn_config.moe_top_k",),
        hidden_key="d_model",
        layers_keys=("n_layers",),
        layers="blocks",
        memory_block="ffn",
        before_router=("norm_attn_norm.norm_2",),
    ),
    Family(
        "gpt_oss",
        (Disk(MLP, ("router.weight", "router.bias"), FUSED),),
        NUM_LOCAL_EXPERTS,
        CHOSEN_ONLY,
        router_bias="router.bias",
    ),
    GRANITE,
    replace(GRANITE, model_type="granitemoeshared"),
    replace(GRANITE, model_type="granitemoehybrid"),
    replace(GRANITE, model_type="granitemoe_swa", disk=(Disk(SPARSE, ("router.weight",), FUSED),)),
    Family(
        "jetmoe",
        (Disk(MLP, ("router.layer.weight",), FUSED, fused=TWO_LINEAR, apart=("self_attention.experts.",)),),
        NUM_LOCAL_EXPERTS,
        CHOSEN_ONLY,
        # No module of experts; the router hands on rows already sorted by expert, so its logits are read.
        watched="router",
        point=Point.ROUTER_OUTPUT,
        logits_at=4,
    ),
    ARIA,
    replace(
        ARIA,
        model_type="aria",
        nested="text_config",
        disk=(Disk(f"language_model.{MLP}", ("router.weight",), FUSED, SHARED, OLD_TEXT_EMBEDDING),),
        layers=TEXT_LAYERS,
    ),
    LLAMA4,
    replace(
        LLAMA4,
        model_type="llama4",
        nested="text_config",
        disk=(Disk(f"language_model.{FEED_FORWARD}", ("router.weight",), FUSED, (), OLD_TEXT_EMBEDDING),),
    ),
    GEMMA4,
    replace(
        GEMMA4,
        model_type="gemma4",
        nested="text_config",
        disk=(replace(GEMMA4.disk[0], block="model.language_model.layers.{layer}", embedding=TEXT_EMBEDDING),),
        layers=TEXT_LAYERS,
    ),
    INKLING,
    replace(
        INKLING,
        model_type="inkling_mm_model",
        nested="text_config",
        disk=(
            Disk("model.llm.layers.{layer}.mlp", ("gate.weight", "gate.bias"), FUSED, SHARED, "model.llm.embed.weight"),
        ),
        layers=TEXT_LAYERS,
        memory_router=GATE_BIAS,
    ),
    Family(
        "muse_spark",
        (
            Disk(
                TEXT_MLP,
                GATE_BIAS,
                FUSED,
                ("pre_expert_proj.", "pre_expert_norm.", "post_expert_proj.", "experts.post_expert_norm."),
                TEXT_EMBEDDING,
            ),
        ),
        NUM_LOCAL_EXPERTS,
        SIGMOID_BIAS,
        "first_dense",
        nested="text_config",
        layers=TEXT_LAYERS,
        before_router=("pre_feedforward_layernorm",),
    ),
    Family(
        "step3p7",
        (
            Disk(
                "model.layers.{layer}.moe",
                ("gate.weight", "router_bias"),
                FUSED,
                fused=("gate_proj.", "up_proj.", "down_proj."),
            ),
        ),
        ("moe_num_experts", "n_routed_experts", "num_local_experts"),
        SIGMOID_BIAS,
        "enumerated",
        nested="text_config",
        top_k_keys=("moe_top_k", "num_experts_per_tok"),
        dense_first=3,
        layers=TEXT_LAYERS,
        memory_router=GATE_BIAS,
    ),
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in ROWS}

REFUSED: dict[str, str] = {
    "switch_transformers": "its experts drop tokens beyond a capacity, so the choice is not the token's alone",
    "nllb-moe": "its experts drop tokens beyond a capacity, and it is an encoder and a decoder",
    "doge": "its experts are pairs of product keys, not numbered rows of one router",
    "ernie4_5_vl_moe": "text and vision tokens have a stack of experts each",
    "qwen3_omni_moe": "thinker and talker have a stack of experts each",
    "dots3_note": "text and vision tokens have a stack of experts each",
    "vitpose": "its experts lie in a vision tower",
    "muse_spark_text": "transformers loads it only inside muse_spark",
}
"""MoE models that cannot be a row, and why."""
