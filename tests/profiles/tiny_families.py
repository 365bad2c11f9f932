"""Tiny configs of the families that came after the first ones, and their MoE layers by hand."""

VOCAB = 256
EXPERTS = 8
HIDDEN = 32

QWEN = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_V3 = {
    "num_hidden_layers": 3,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
DIRECT_MLA = MLA | {"q_lora_rank": None}
_INDEX = {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}
_LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "num_hidden_layers": 2}
_TWO = QWEN | {"num_hidden_layers": 2, "head_dim": 16}
_THREE = _TWO | {"num_hidden_layers": 3, "num_shared_experts": 1}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_KINDS = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_LLAMA4 = _LOCAL | {
    "num_hidden_layers": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "head_dim": 16,
    "intermediate_size_mlp": 24,
}
_GEMMA4 = {
    "num_hidden_layers": 2,
    "enable_moe_block": True,
    "num_experts": EXPERTS,
    "top_k_experts": 2,
    "moe_intermediate_size": 12,
    "head_dim": 16,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "layer_types": ["sliding_attention", "full_attention"],
}
_QWEN3_5 = _TWO | _LINEAR | {"shared_expert_intermediate_size": 16}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_VISION = _VISION | {"num_heads": 2, "depth": 1, "out_hidden_size": HIDDEN, "num_position_embeddings": 16}
_M3 = (
    _LOCAL
    | _KINDS
    | {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "dense_intermediate_size": 24,
        "shared_intermediate_size": 12,
        "rotary_dim": 8,
        "index_head_dim": 8,
        "index_n_heads": 2,
    }
)
_QWEN4 = (
    _QWEN3_5
    | _MIXED
    | {
        "num_hidden_layers": 3,
        "hc_count": 4,
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    }
)
_ARIA = {"num_hidden_layers": 2, "moe_num_experts": EXPERTS, "moe_topk": 2, "moe_num_shared_experts": 1}
_INKLING = _KINDS | {
    "num_hidden_layers": 3,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
    "head_dim": 16,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "d_rel": 4,
    "rel_extent": 32,
}

FAMILIES: dict[str, tuple[dict[str, object], list[int]]] = {
    "deepseek_v3": (_V3 | MLA | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}, [1, 2]),
    "deepseek_v32": (_V3 | MLA | _INDEX | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}, [1, 2]),
    "kimi_k25": (
        {
            "text_config": _V3
            | MLA
            | {"model_type": "deepseek_v3", "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
            "vision_config": _VISION,
        },
        [1, 2],
    ),
    "mistral4": (_V3 | MLA | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}, [1, 2]),
    "deepseek_v4": (
        _V3
        | _INDEX
        | {
            "q_lora_rank": 16,
            "head_dim": 16,
            "num_key_value_heads": 1,
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "layer_types": [
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "sliding_window": 16,
            "o_groups": 2,
            "o_lora_rank": 8,
        },
        [0, 1, 2],
    ),
    "minimax": (
        _LOCAL | {"head_dim": 16, "layer_types": ["full_attention", "linear_attention"], "block_size": 16},
        [0, 1],
    ),
    "minimax_m2": (_LOCAL | {"head_dim": 16}, [0, 1]),
    "minimax_m3_vl_text": (_M3, [1, 2]),
    "minimax_m3_vl": (
        {
            "text_config": _M3 | {"model_type": "minimax_m3_vl_text"},
            "vision_config": _VISION | {"patch_size": 4, "image_size": 8},
            "projector_hidden_size": 16,
        },
        [1, 2],
    ),
    "phimoe": (_LOCAL, [0, 1]),
    "qwen3_next": (_QWEN3_5, [0, 1]),
    "qwen3_5_moe_text": (_QWEN3_5, [0, 1]),
    "qwen3_5_moe": (
        {
            "text_config": _QWEN3_5 | {"model_type": "qwen3_5_moe_text"},
            "vision_config": _QWEN_VISION,
        },
        [0, 1],
    ),
    "qwen3_vl_moe": (
        {
            "text_config": _TWO
            | {
                "model_type": "qwen3_vl_moe_text",
                "num_hidden_layers": 3,
                "mlp_only_layers": [1],
                "rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]},
            },
            "vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]},
        },
        [0, 2],
    ),
    "qwen4_exp_text": (_QWEN4, [0, 1, 2]),
    "qwen4_exp": (
        {"text_config": _QWEN4 | {"model_type": "qwen4_exp_text"}, "vision_config": _QWEN_VISION},
        [0, 1, 2],
    ),
    "flex_olmo": ({"num_experts": EXPERTS, "num_experts_per_tok": 2, "num_hidden_layers": 2}, [0, 1]),
    "mellum": (_TWO, [0, 1]),
    "cohere2_moe": (_THREE | _KINDS, [1, 2]),
    "flint": (_TWO | {"num_hidden_layers": 3, "mlp_only_layers": [0]}, [1, 2]),
    "lara_mini": (_TWO | _LINEAR | {"shared_expert_intermediate_size": 16}, [0, 1]),
    "gpt_oss": (
        _LOCAL | {"head_dim": 16, "layer_types": ["full_attention"] * 2, "rope_parameters": _ROPE},
        [0, 1],
    ),
    "granitemoe": (_LOCAL, [0, 1]),
    "granitemoeshared": (_LOCAL | {"shared_intermediate_size": 12}, [0, 1]),
    "granitemoe_swa": (_LOCAL, [0, 1]),
    "granitemoehybrid": (
        _LOCAL
        | _MAMBA
        | {
            "shared_intermediate_size": 12,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_chunk_size": 16,
        },
        [0, 1],
    ),
    "llama4_text": (_LLAMA4, [1, 3]),
    "llama4": (
        {
            "text_config": _LLAMA4 | {"model_type": "llama4_text"},
            "vision_config": _VISION
            | {
                "patch_size": 4,
                "image_size": 8,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
        },
        [1, 3],
    ),
    "glm4_moe": (_V3 | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "head_dim": 16}, [1, 2]),
    "glm4v_moe": (
        {
            "text_config": _V3
            | {
                "model_type": "glm4v_moe_text",
                "head_dim": 16,
                "rope_parameters": _ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
            },
            "vision_config": _VISION | {"num_heads": 2, "depth": 1, "out_hidden_size": HIDDEN},
        },
        [1, 2],
    ),
    "glm4_moe_lite": (_V3 | MLA, [1, 2]),
    "glm_moe_dsa": (_V3 | MLA | _INDEX | {"first_k_dense_replace": 1}, [1, 2]),
    "ernie4_5_moe": (
        {
            "num_hidden_layers": 4,
            "moe_num_experts": EXPERTS,
            "moe_k": 2,
            "moe_intermediate_size": 12,
            "moe_num_shared_experts": 1,
            "moe_layer_end_index": 2,
        },
        [1, 2],
    ),
    "dots1": (_V3 | {"first_k_dense_replace": 1, "head_dim": 16}, [1, 2]),
    "jamba": (
        _MAMBA
        | {
            "num_hidden_layers": 4,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_dt_rank": 4,
        },
        [1, 3],
    ),
    "lfm2_moe": (_THREE | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]}, [1, 2]),
    "hunyuan_v1_moe": ({"num_hidden_layers": 2, "num_experts": EXPERTS, "moe_topk": 2, "head_dim": 16}, [0, 1]),
    "dbrx": (
        {
            "d_model": HIDDEN,
            "n_heads": 2,
            "n_layers": 2,
            "max_seq_len": 256,
            "rope_parameters": _ROPE,
            "ffn_config": {
                "ffn_hidden_size": 16,
                "moe_num_experts": EXPERTS,
                "moe_top_k": 2,
                "moe_normalize_expert_weights": 2.0,
            },
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        },
        [0, 1],
    ),
    "longcat_flash": (
        MLA
        | {
            "num_layers": 2,
            "n_routed_experts": EXPERTS,
            "zero_expert_num": 4,
            "moe_topk": 3,
            "ffn_hidden_size": 24,
            "expert_ffn_hidden_size": 12,
            "head_dim": 8,
        },
        [0, 1],
    ),
    "kimi_linear": (
        DIRECT_MLA
        | _MIXED
        | {
            "num_hidden_layers": 3,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "n_shared_experts": 1,
            "linear_head_dim": 8,
            "linear_num_heads": 2,
        },
        [1, 2],
    ),
    "nemotron_h": (
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "moe_shared_expert_intermediate_size": 12,
            "head_dim": 16,
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "use_mamba_kernels": False,
        },
        [1, 4],
    ),
    "jetmoe": (_LOCAL | {"kv_channels": 16}, [0, 1]),
    "aria_text": (_ARIA, [0, 1]),
    "aria": (
        {
            "text_config": _ARIA | {"model_type": "aria_text"},
            "vision_config": _VISION | {"model_type": "idefics3_vision", "image_size": 8, "patch_size": 4},
            "projector_patch_to_query_dict": {4: 4},
        },
        [0, 1],
    ),
    "afmoe": (_THREE | {"num_dense_layers": 1, "route_scale": 1.5}, [1, 2]),
    "exaone_moe": (_THREE | {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5}, [1, 2]),
    "hy_v3": (_THREE, [1, 2]),
    "hy_v4": (_V3 | MLA | _INDEX | {"hc_mult": 2}, [1, 2]),
    "mimo_v2_flash": (_V3 | {"head_dim": 24, "v_head_dim": 24, "num_key_value_heads": 1}, [1, 2]),
    "solar_open": (_V3 | {"num_hidden_layers": 2, "head_dim": 16}, [0, 1]),
    "bailing_hybrid": (
        DIRECT_MLA
        | _MIXED
        | {
            "num_hidden_layers": 3,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "head_dim": 8,
        },
        [1, 2],
    ),
    "sarvam_moe": (_V3 | {"first_k_dense_replace": 1, "head_dim": 16}, [1, 2]),
    "sarvam_mla": (_V3 | DIRECT_MLA | {"first_k_dense_replace": 1}, [1, 2]),
    "axk1": (_V3 | MLA | {"n_group": 4, "topk_group": 2}, [1, 2]),
    "axk2": (_V3 | MLA | _INDEX, [1, 2]),
    "laguna": (
        _TWO | {"num_hidden_layers": 3, "shared_expert_intermediate_size": 12, "moe_router_logit_softcapping": 5.0},
        [1, 2],
    ),
    "zaya": (_TWO | {"num_experts_per_tok": 1, "router_hidden_size": 16}, [0, 1]),
    "gemma4_text": (_GEMMA4, [0, 1]),
    "gemma4": (
        {
            "text_config": _GEMMA4 | {"model_type": "gemma4_text"},
            "vision_config": _VISION | {"num_key_value_heads": 2, "head_dim": 8},
        },
        [0, 1],
    ),
    "beam": (_THREE | _KINDS | {"n_group": 4, "topk_group": 2}, [1, 2]),
    "inkling_text": (_INKLING, [1, 2]),
    "inkling_mm_model": (
        {
            "text_config": _INKLING | {"model_type": "inkling_text"},
            "vision_config": {
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": 4,
            },
            "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
        },
        [1, 2],
    ),
    "muse_spark": (
        {
            "text_config": _LOCAL
            | _KINDS
            | {
                "model_type": "muse_spark_text",
                "num_hidden_layers": 3,
                "head_dim": 16,
                "moe_intermediate_size": 12,
                "moe_hidden_size": 16,
                "routed_scaling_factor": 2.5,
            },
            "vision_config": _VISION | {"pos_emb_height": 4, "pos_emb_width": 4},
            "audio_config": {
                "patch_sizes": [2],
                "hidden_sizes": [8],
                "depths": [1],
                "num_hidden_layers": 1,
                "out_hidden_size": HIDDEN,
            },
            "out_hidden_size": 64,
            "projector_hidden_size": 16,
        },
        [1, 2],
    ),
    "step3p7": (
        {
            "text_config": _THREE
            | {
                "model_type": "step3p5",
                "n_routed_experts": EXPERTS,
                "moe_layers_enum": "0,2",
                "share_expert_dim": 12,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "sliding_window": 16,
            },
            "vision_config": _VISION | {"image_size": 8, "patch_size": 4},
        },
        [0, 2],
    ),
    "kolibri1": (
        _TWO | {"shared_expert_intermediate_size": 12, "layer_types": ["sliding_attention", "full_attention"]},
        [0, 1],
    ),
}
"""A config, and its MoE layers by hand. A wrapped text model has its settings under text_config."""
