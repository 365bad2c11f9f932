"""Randomly initialised checkpoints of every family in the table, a tokenizer for them, and their routers by hand.

Small enough to build in a tenth of a second, wide enough initialised that experts differ and near ties are rare.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tests.profiles.tiny_families import EXPERTS, FAMILIES, HIDDEN, QWEN, VOCAB

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_V2 = {
    "num_hidden_layers": 3,
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "routed_scaling_factor": 16.0,
    "norm_topk_prob": False,
}
_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}

CONFIGS: dict[str, dict[str, object]] = {
    "deepseek_v2": {"model_type": "deepseek_v2", **_V2, "num_experts_per_tok": 2},
    "deepseek_v2_grouped": {"model_type": "deepseek_v2", **_V2, **_GROUPS, "num_experts_per_tok": 3},
    "deepseek_v2_vacuous": {"model_type": "deepseek_v2", **_V2, **_GROUPS, "num_experts_per_tok": 2},
    "mixtral": {
        "model_type": "mixtral",
        "num_hidden_layers": 2,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 16,
        **QWEN,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
        "head_dim": 16,
        **QWEN,
    },
    "olmoe": {
        "model_type": "olmoe",
        "num_hidden_layers": 2,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
    },
}
MOE_LAYERS = {
    "deepseek_v2": [1, 2],
    "deepseek_v2_grouped": [1, 2],
    "deepseek_v2_vacuous": [1, 2],
    "mixtral": [0, 1],
    "qwen2_moe": [0, 2],
    "qwen3_moe": [1, 3],
    "olmoe": [0, 1],
}
"""By hand, from the families' own rules."""


FAMILY_CONFIGS = CONFIGS | {name: {"model_type": name, **config} for name, (config, _) in FAMILIES.items()}
MOE_LAYERS |= {name: layers for name, (_, layers) in FAMILIES.items()}
"""Every family of the table, the first ones in several variants."""


def installed(names: Iterable[str]) -> list[str]:
    """Those of the names whose family the installed transformers knows: some came after the oldest supported one."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return [name for name in names if FAMILY_CONFIGS[name]["model_type"] in CONFIG_MAPPING_NAMES]


def build_model(name: str, folder: Path, *, seed: int = 0, **save: object) -> Path:
    """Write a checkpoint of FAMILY_CONFIGS[name] with its tokenizer into `folder`; `save` goes to save_pretrained."""
    import torch
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = dict(FAMILY_CONFIGS[name])
    model_type, wrapped = config.pop("model_type"), "text_config" in config
    config = config | {"text_config": _COMMON | config["text_config"]} if wrapped else _COMMON | config
    torch.manual_seed(seed)
    made = AutoConfig.for_model(model_type, **config)
    text_alone = not wrapped and type(made) in MODEL_FOR_CAUSAL_LM_MAPPING
    kind = AutoModelForCausalLM if text_alone else AutoModelForImageTextToText
    model = kind.from_config(made, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
        if name not in CONFIGS:
            _fill_the_rest(model)
    model.save_pretrained(folder, **save)
    write_tokenizer(folder)
    return folder


def _fill_the_rest(model: Any) -> None:
    """Values that a fresh model leaves at 0 or 1: selection biases, norms, scales and tables of experts."""
    import torch

    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        last = name.rpartition(".")[2]
        if last in ("e_score_correction_bias", "expert_bias", "balancing_biases") or name.endswith("router.bias"):
            tensor.normal_(std=0.2)
        elif last == "tid2eid":
            tensor.copy_(torch.rand(len(tensor), EXPERTS).argsort()[:, : tensor.shape[1]])
        elif tensor.dim() == 1 and (("norm" in name and last == "weight") or last.endswith("scale") or last == "base"):
            tensor.uniform_(0.5, 1.5)


def cached_model(base: Path, name: str) -> Path:
    """The checkpoint of that name under `base`, built on first use; never to be written to."""
    folder = base / "tiny-checkpoints" / name
    if not (folder / "tokenizer.json").exists():
        build_model(name, folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A word-level tokenizer whose word `wN` is id N."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


def choose_by_hand(name: str, logits: np.ndarray) -> tuple[list[int], list[float], float]:
    """One token's experts by falling weight, their weights, and the gap in score to the first expert left out.

    logits: [E]. Plain loops over the rule as the papers and model cards state it.
    """
    config = CONFIGS[name]
    shifted = np.exp(logits.astype(np.float64) - logits.max())
    scores = [float(value) for value in shifted / shifted.sum()]
    allowed = set(range(len(scores)))
    gap = 1.0
    if config.get("topk_method") == "group_limited_greedy":
        groups, chosen = int(config["n_group"]), int(config["topk_group"])
        size = len(scores) // groups
        best = [max(scores[group * size : (group + 1) * size]) for group in range(groups)]
        ranked = sorted(range(groups), key=lambda group: -best[group])
        gap = best[ranked[chosen - 1]] - best[ranked[chosen]]
        allowed = {expert for expert in allowed if expert // size in ranked[:chosen]}
    order = sorted(allowed, key=lambda expert: -scores[expert])
    top_k = int(config["num_experts_per_tok"])
    picked = order[:top_k]
    gap = min(gap, scores[order[top_k - 1]] - scores[order[top_k]])
    weights = [scores[expert] for expert in picked]
    if name == "mixtral" or config.get("norm_topk_prob"):
        weights = [weight / sum(weights) for weight in weights]
    if name.startswith("deepseek_v2"):
        weights = [weight * float(config["routed_scaling_factor"]) for weight in weights]
    return picked, weights, gap
