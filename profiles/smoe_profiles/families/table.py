"""The table of model families: one row of data each, shared by capture, regroup and verify.

A row says which config keys hold E and K, which layers are MoE layers, where router and experts stand on disk and in
transformers, and where the choice can be read. A new family is a new row, never a new code path; a row that differs
little from another is written as the difference. Names were read from the transformers 5.24 sources and from
published checkpoints.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class Point(StrEnum):
    """Where a layer's choice is read: ids and weights on their way into the experts, or logits out of the router."""

    EXPERTS_INPUT = "experts-input"
    ROUTER_OUTPUT = "router-output"


@dataclass(frozen=True)
class Disk:
    """The tensor names of one MoE layer in the files.

    block: the MoE block, with `{layer}`; other names are relative to it unless they hold `{layer}` themselves.
    router: tensors with an expert axis that are no expert's own (weight first; biases follow).
    parts: an expert's projections, (gate,) up, down, under `experts.<n>.`; empty where experts are fused.
    shared: sub-modules of the block that every token uses; copied as they are.
    """

    block: str
    router: tuple[str, ...]
    parts: tuple[str, ...]
    shared: tuple[str, ...] = ()
    embedding: str = "model.embed_tokens.weight"

    def router_names(self, layer: int) -> list[str]:
        """Full names of a layer's router tensors, the weight first."""
        return [(name if "{layer}" in name else f"{self.block}.{name}").format(layer=layer) for name in self.router]


@dataclass(frozen=True)
class Family:
    """One model type's MoE layout. Config keys may be dotted; of several, the first that the config holds counts.

    config.json:
    nested: the key under which the text model's config lies.
    experts_keys, top_k_keys, hidden_key: keys of E, K and H; E and K may be lists with one number a layer.
    layers_keys: keys of the number of decoder layers, or of a list with one entry a layer.
    layer_rule: which decoder layers are MoE layers, a key of `config.LAYER_RULES`.
    dense_keys, dense_first: keys of the number of leading dense layers, and the class's own number where none is set.
    rule: how the router scores experts, as printed to the user.
    group_keys, group_defaults: keys of a group-limited router (groups, groups chosen) and the class's own numbers.
    group_aliases: other keys of the number of groups. group_method_key: set to "greedy", it switches groups off.
    group_score: how a group is scored, `max` of its experts or `sum2`, the sum of its two best.
    zero_key, zero_experts: key or fixed number of choices behind the experts that compute nothing.
    router_tail_key: key of further router rows that are never chosen. router_width_key: the router's input width, if
    not H. hash_key, hash_first: key of the number of leading layers that look experts up by token id.

    On disk: the published names first, then those transformers writes where they differ.
    unmovable: why the experts cannot be renumbered although they lie in tensors of their own.

    In transformers:
    layers: the decoder list under the base model. memory_block: the MoE block in a decoder layer.
    watched, point: the module in the block whose call shows the choice, and on which side of it to look.
    logits_at, weigh: of a router's output, which element holds the logits (if there are several), and how the chosen
    ones become weights.
    left_padding: False where generating over padding on the left changes what the tokens attend.
    zero_by_weight: the one zero expert arrives as id 0 with weight 0.
    memory_router: the router tensors' names in the block, where they are not those on disk.
    before_router: what the layer's input runs through before the router's weight, of modules in a decoder layer.
    hidden_at: which tensor to take of such a module's several.
    router_bias: a bias of the logits themselves. router_scale: a factor [H] of the router's input, besides H ** -0.5.
    """

    model_type: str
    disk: tuple[Disk, ...]
    experts_keys: tuple[str, ...]
    rule: str
    layer_rule: str = "all"
    nested: str = ""
    top_k_keys: tuple[str, ...] = ("num_experts_per_tok",)
    hidden_key: str = "hidden_size"
    layers_keys: tuple[str, ...] = ("num_hidden_layers",)
    dense_keys: tuple[str, ...] = ("first_k_dense_replace",)
    dense_first: int = 0
    group_keys: tuple[str, ...] = ()
    group_defaults: tuple[int, int] = (1, 1)
    group_aliases: tuple[str, ...] = ()
    group_method_key: str = ""
    group_score: str = "sum2"
    zero_key: str = ""
    zero_experts: int = 0
    router_tail_key: str = ""
    router_width_key: str = ""
    hash_key: str = ""
    hash_first: int = 0
    unmovable: str = ""
    layers: str = "layers"
    memory_block: str = "mlp"
    watched: str = "experts"
    point: Point = Point.EXPERTS_INPUT
    logits_at: int = 0
    weigh: str = "softmax"
    left_padding: bool = True
    zero_by_weight: bool = False
    memory_router: tuple[str, ...] = ()
    before_router: tuple[str, ...] = ("post_attention_layernorm",)
    hidden_at: int = -1
    router_bias: str = ""
    router_scale: str = ""

    def in_memory(self, name: str) -> str:
        """A name in the block as a path from the decoder layer."""
        return f"{self.memory_block}.{name}" if self.memory_block else name

    def router_in_memory(self) -> list[str]:
        """The router tensors as paths from the decoder layer, in the order of `Disk.router`."""
        return [self.in_memory(name) for name in self.memory_router or self.disk[0].router]


GATE_UP_DOWN = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
W1_W3_W2 = ("w1.weight", "w3.weight", "w2.weight")
FUSED: tuple[str, ...] = ()
MLP = "model.layers.{layer}.mlp"
SPARSE = "model.layers.{layer}.block_sparse_moe"
TEXT_MLP = "model.language_model.layers.{layer}.mlp"
FEED_FORWARD = "model.layers.{layer}.feed_forward"
TEXT_EMBEDDING = "model.language_model.embed_tokens.weight"
OLD_TEXT_EMBEDDING = "language_model.model.embed_tokens.weight"
TEXT_LAYERS = "language_model.layers"
GATE = ("gate.weight",)
GATE_BIAS = ("gate.weight", "gate.e_score_correction_bias")
BIAS_IN_BLOCK = ("gate.weight", "e_score_correction_bias")
SHARED = ("shared_experts.",)
SHARED_GATED = ("shared_expert.", "shared_expert_gate.")
NUM_EXPERTS = ("num_experts", "num_local_experts")
NUM_LOCAL_EXPERTS = ("num_local_experts", "num_experts")
N_ROUTED_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
CHOSEN_ONLY = "softmax of the chosen"
SIGMOID_BIAS = "sigmoid + bias"

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
GLM4 = replace(DEEPSEEK_V3, model_type="glm4_moe", dense_first=1, group_defaults=(1, 1))
"""The rule of DeepSeek-V3, with groups only where a config asks for them."""
GRANITE = Family(
    "granitemoe",
    (Disk(SPARSE, ("router.layer.weight",), FUSED),),
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
GEMMA4 = Family(
    "gemma4_text",
    (Disk("model.layers.{layer}", ("router.proj.weight", "router.per_expert_scale"), FUSED),),
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
            Disk("layers.{layer}.ffn", ("gate.weight", "gate.bias"), W1_W3_W2, SHARED, "embed.weight"),
            Disk("model.layers.{layer}.ffn", ("gate.weight", "gate.bias"), W1_W3_W2, SHARED),
        ),
        N_ROUTED_EXPERTS,
        "sqrt softplus + bias",
        hash_key="num_hash_layers",
        hash_first=3,
        unmovable="its hash layers name experts in a table of token ids",
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
        unmovable="its router has rows of zero experts",
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
        (Disk("transformer.blocks.{layer}.ffn", ("router.layer.weight",), FUSED, (), "transformer.wte.weight"),),
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
        (Disk(MLP, ("router.layer.weight",), FUSED),),
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
        disk=(Disk("model.language_model.layers.{layer}", GEMMA4.disk[0].router, FUSED, (), TEXT_EMBEDDING),),
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
                ("pre_expert_proj.", "pre_expert_norm.", "post_expert_proj."),
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
        (Disk("model.layers.{layer}.moe", ("gate.weight", "router_bias"), FUSED),),
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
