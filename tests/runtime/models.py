"""Small models of the families that the run time runs, placements for them, and what one process makes of them."""

from functools import cache
from pathlib import Path

import numpy as np
import torch

from smoe_cli.placement import RUNTIME, Placement, write_runtime
from smoe_profiles.models import BUNDLED, find_model
from smoe_solvers.choices import Predictor
from smoe_solvers.predictors import LayerPredictors, MarkovTables, TokenChoice
from tests.checkpoint.conftest import regroup

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 44,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "num_experts_per_tok": 3,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "num_attention_heads": 8,
}
CONFIGS = {
    "grouped": {
        **_COMMON,
        "model_type": "deepseek_v2",
        "num_hidden_layers": 3,
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "moe_intermediate_size": 12,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "routed_scaling_factor": 2.0,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
    "qwen": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "moe_intermediate_size": 12,
        "mlp_only_layers": [1],
        "attention_bias": True,
        "norm_topk_prob": True,
    },
}
CONFIGS["few"] = CONFIGS["qwen"] | {"num_experts": 3, "num_experts_per_tok": 1}
"""qwen: fewer key heads than four ranks, biases, and a dense layer between; grouped: only a map is the same model; few:
fewer experts than four ranks, and one alone for a token.
"""


@cache
def _saved(name: str, base: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    settings = dict(CONFIGS[name])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(base / name)
    return base / name


def model_folder(name: str, base: Path) -> Path:
    """A bundled model's folder, or that of a random one made in `base`."""
    return BUNDLED / name if name.startswith("tiny") else _saved(name, base)


def random_placement(folder: Path, ranks: int, seed: int = 0) -> Placement:
    """Experts dealt out at random, in every layer anew."""
    spec, generator = find_model(str(folder)).spec, np.random.default_rng(seed)
    experts = spec.layers[0].num_experts
    order = np.stack([generator.permutation(experts) for _ in spec.layers])
    return Placement(tuple(layer.id for layer in spec.layers), order, ranks)


def write_tables(path: Path, folder: Path, placement: Placement, layout: str, chosen: Predictor = Predictor.TOKEN):
    """runtime.safetensors with tables of chance, which shuffle tokens as wildly as any."""
    spec, generator = find_model(str(folder)).spec, np.random.default_rng(0)
    ranks, experts = placement.num_ranks, placement.num_experts

    def chance(*shape: int):
        return generator.integers(0, 256, shape, np.uint8)

    def noise(*shape: int):
        return generator.standard_normal(shape, np.float32)

    hidden = spec.hidden_size
    layers = [
        LayerPredictors(
            chance(spec.vocab_size, ranks),
            MarkovTables(chance(ranks**2, ranks), chance(ranks, ranks), chance(ranks)),
            early_temperature=0.3,
            linear_temperature=0.2,
            early=noise(2, experts),
            linear=noise(hidden + experts + 5 * hidden + 1, experts),
            fusion=(0.4, 0.1, 0.2, 0.3),
            chosen=chosen,
        )
        for _ in placement.layer_ids
    ]
    path.parent.mkdir(exist_ok=True, parents=True)
    settings = {"top_k": spec.layers[0].top_k, "choice": TokenChoice(4.0, "popularity"), "model": {}}
    write_runtime(path, placement, layers, layout=layout, **settings)


def make_map(folder: Path, ranks: int, base: Path) -> Path:
    """A map folder of a random placement."""
    target = base / f"map-{folder.name}-ep{ranks}"
    if not target.exists():
        write_tables(target / RUNTIME, folder, random_placement(folder, ranks), "map")
    return target


def make_checkpoint(folder: Path, ranks: int, base: Path) -> Path:
    """A renumbered checkpoint of a random placement, with its tables inside."""
    target = base / f"checkpoint-{folder.name}-ep{ranks}"
    if not target.exists():
        placement = random_placement(folder, ranks)
        regroup(folder, placement.physical_to_logical, target)
        write_tables(target / "smoe" / RUNTIME, folder, placement, "checkpoint")
    return target


@cache
def reference(folder: Path):
    """The library's model in this process, fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def reference_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """[S, V] of one sequence [S]."""
    return reference(folder)(ids[None]).logits[0]


def check_greedy(folder: Path, prompt: torch.Tensor, tokens: list[int]) -> None:
    """The continuation is the model's own, or leaves it where its two best logits are nearly equal."""
    logits = reference_logits(folder, torch.cat([prompt, torch.tensor(tokens)]))[len(prompt) - 1 : -1]
    best = logits.topk(2, dim=-1)
    for token, values, ids in zip(tokens, best.values, best.indices, strict=True):
        if token != ids[0]:
            assert float(values[0] - values[1]) < 1e-4
            return
