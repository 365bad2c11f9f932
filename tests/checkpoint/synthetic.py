"""Checkpoints under published names that transformers cannot write here: quantised, fused, with further layers.

Only names, dtypes and shapes are right; values are random bytes, different in every tensor and expert.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from smoe_profiles.tensors import ITEM_BYTES, encode_header, open_checkpoint

E, H, I, V = 8, 32, 16, 64  # noqa: E741
Entry = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""

SIZES = {"hidden_size": H, "vocab_size": V, "num_hidden_layers": 3}
V3 = {
    "model_type": "deepseek_v3",
    "n_routed_experts": E,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    **SIZES,
}

PER_EXPERT: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {
    "bf16": [("weight", "BF16", (I, H))],
    "fp8 blocks": [("weight", "F8_E4M3", (I, H)), ("weight_scale_inv", "F32", (1, 1))],
    "fp8 blocks, e8m0 scales": [("weight", "F8_E4M3", (I, H)), ("scale", "F8_E8M0", (1, 2))],
    "fp8 with a scale of another name": [("weight", "F8_E4M3", (I, H)), ("qscale_weight", "F32", ())],
    "fp8 per tensor, static inputs": [
        ("weight", "F8_E4M3", (I, H)),
        ("weight_scale", "F32", (1,)),
        ("input_scale", "F32", (1,)),
    ],
    "fp8 per channel": [("weight", "F8_E4M3", (I, H)), ("weight_scale", "BF16", (I, 1))],
    "int4 pack-quantized": [
        ("weight_packed", "I32", (I, H // 8)),
        ("weight_scale", "BF16", (I, 1)),
        ("weight_shape", "I64", (2,)),
        ("weight_zero_point", "I32", (I // 8, 1)),
        ("weight_g_idx", "I32", (H,)),
        ("input_global_scale", "F32", (1,)),
    ],
    "nvfp4 compressed-tensors": [
        ("weight_packed", "U8", (I, H // 2)),
        ("weight_scale", "F8_E4M3", (I, H // 16)),
        ("weight_global_scale", "F32", (1,)),
        ("input_global_scale", "F32", (1,)),
    ],
    "nvfp4 modelopt": [
        ("weight", "U8", (I, H // 2)),
        ("weight_scale", "F8_E4M3", (I, H // 16)),
        ("weight_scale_2", "F32", ()),
        ("input_scale", "F32", ()),
    ],
    "mxfp4": [("weight_packed", "U8", (I, H // 2)), ("weight_scale", "F8_E8M0", (I, 1))],
    "mxfp8": [("weight", "F8_E4M3", (I, H)), ("weight_scale", "F8_E8M0", (I, 1))],
    "gptq": [
        ("qweight", "I32", (H // 8, I)),
        ("qzeros", "I32", (1, I // 8)),
        ("scales", "F16", (1, I)),
        ("g_idx", "I32", (H,)),
        ("bias", "F16", (I,)),
    ],
    "awq": [("qweight", "I32", (H, I // 8)), ("qzeros", "I32", (1, I // 8)), ("scales", "F16", (1, I))],
    "bitsandbytes nf4": [
        ("weight", "U8", (I * H // 2, 1)),
        ("weight.absmax", "U8", (I * H // 64,)),
        ("weight.quant_map", "F32", (16,)),
        ("weight.nested_absmax", "F32", (1,)),
        ("weight.nested_quant_map", "F32", (256,)),
        ("weight.quant_state.bitsandbytes__nf4", "U8", (-1,)),  # a text, of another length for every expert
    ],
    "bitsandbytes int8": [("weight", "I8", (I, H)), ("SCB", "F32", (I,)), ("weight_format", "U8", ())],
}
"""What an expert's projection consists of, by scheme."""


def attention(prefix: str) -> list[Entry]:
    return [(f"{prefix}.self_attn.o_proj.weight", "BF16", (H, H)), (f"{prefix}.input_layernorm.weight", "BF16", (H,))]


def outside() -> list[Entry]:
    return [
        ("model.embed_tokens.weight", "BF16", (V, H)),
        ("model.norm.weight", "BF16", (H,)),
        ("lm_head.weight", "BF16", (V, H)),
    ]


def experts(block: str, form: str, parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> list[Entry]:
    return [
        (f"{block}.experts.{expert}.{part}.{suffix}", dtype, tuple(40 + expert if n < 0 else n for n in shape))
        for expert in range(E)
        for part in parts
        for suffix, dtype, shape in PER_EXPERT[form]
    ]


def router(block: str, names: tuple[str, ...] = ("gate.weight", "gate.e_score_correction_bias")) -> list[Entry]:
    weight, *biases = names
    return [(f"{block}.{weight}", "BF16", (E, H)), *((f"{block}.{name}", "F32", (E,)) for name in biases)]


def deepseek_v3(form: str) -> list[Entry]:
    """One dense layer, two MoE layers, and layer 3 with a stack of its own that predicts a further token."""
    entries = outside() + attention("model.layers.0") + [("model.layers.0.mlp.gate_proj.weight", "BF16", (I, H))]
    for layer in (1, 2, 3):
        block = f"model.layers.{layer}.mlp"
        entries += attention(f"model.layers.{layer}") + router(block) + experts(block, form)
        entries.append((f"{block}.shared_experts.gate_proj.weight", "BF16", (E, H)))
    return [
        *entries,
        ("model.layers.3.eh_proj.weight", "BF16", (H, 2 * H)),
        ("model.layers.3.enorm.weight", "BF16", (H,)),
    ]


@dataclass(frozen=True)
class Case:
    """A checkpoint. layers: how many are MoE layers; fused: how the names of its fused experts end."""

    config: dict[str, object]
    entries: list[Entry]
    layers: int
    fused: tuple[str, ...] = ()


def _llama_like(model_type: str, **config: object) -> dict[str, object]:
    return {"model_type": model_type, "num_local_experts": E, "num_experts_per_tok": 2, **SIZES, **config}


def _gpt_oss() -> Case:
    entries = outside()
    for layer in range(3):
        block = f"model.layers.{layer}.mlp"
        entries += attention(f"model.layers.{layer}") + router(block, ("router.weight", "router.bias"))
        for part, rows in (("gate_up_proj", 2 * I), ("down_proj", H)):
            entries += [
                (f"{block}.experts.{part}_blocks", "U8", (E, rows, 1, 16)),
                (f"{block}.experts.{part}_scales", "U8", (E, rows, 1)),
                (f"{block}.experts.{part}_bias", "BF16", (E, rows)),
            ]
    return Case(_llama_like("gpt_oss"), entries, 3, ("_blocks", "_scales", "_bias"))


def _qwen3_5() -> Case:
    """Fused as published, one scale an expert for static inputs, a stack of mtp.* with another number of experts."""
    config = {"num_experts": E, "num_experts_per_tok": 2, **SIZES}
    entries = outside()
    for layer in range(3):
        block = f"model.language_model.layers.{layer}.mlp"
        entries += [*router(block, ("gate.weight",)), (f"{block}.shared_expert.gate_proj.weight", "BF16", (I, H))]
        for part, shape in (("gate_up_proj", (E, 2 * I, H)), ("down_proj", (E, H, I))):
            entries += [
                (f"{block}.experts.{part}", "F8_E4M3", shape),
                (f"{block}.experts.{part}_scale_inv", "F32", (E, 1, 1)),
                (f"{block}.experts.{part}_activation_scale", "F32", (E,)),
            ]
    for expert in range(2 * E):
        entries.append((f"mtp.layers.0.mlp.experts.{expert}.gate_proj.weight", "BF16", (I, H)))
    entries.append(("mtp.layers.0.mlp.gate.weight", "BF16", (2 * E, H)))
    fused = ("gate_up_proj", "down_proj", "_scale_inv", "_activation_scale")
    return Case({"model_type": "qwen3_5_moe", "text_config": config}, entries, 3, fused)


def _square() -> Case:
    """Transposed fused experts whose sides are as long as there are experts: no shape tells which axis is which."""
    entries = []
    for layer in range(3):
        block = f"model.language_model.layers.{layer}.mlp"
        entries += [(f"{block}.gate.weight", "BF16", (E, E))]
        entries += [
            (f"{block}.experts.gate_up_proj", "BF16", (E, E, E)),
            (f"{block}.experts.down_proj", "BF16", (E, E, E)),
        ]
    config = {"num_experts": E, "num_experts_per_tok": 2, **SIZES, "hidden_size": E}
    return Case({"model_type": "qwen3_vl_moe", "text_config": config}, entries, 3, ("gate_up_proj", "down_proj"))


def _step() -> Case:
    config = {"moe_num_experts": E, "moe_top_k": 2, "moe_layers_enum": "1,2", **SIZES}
    entries = outside()
    for layer in (1, 2):
        block = f"model.layers.{layer}.moe"
        entries += router(block, ("gate.weight", "router_bias"))
        for part in ("gate_proj", "up_proj", "down_proj"):
            entries += [
                (f"{block}.{part}.weight", "F8_E4M3", (E, I, H)),
                (f"{block}.{part}.weight_scale_inv", "F32", (E, 1, 1)),
            ]
        entries.append((f"model.layers.{layer}.share_expert.gate_proj.weight", "BF16", (E, H)))
    fused = ("proj.weight", "proj.weight_scale_inv")
    return Case({"model_type": "step3p7", "text_config": config}, entries, 2, fused)


def _llama4() -> Case:
    """As a quantised Llama 4 is stored: one tensor an expert, though its class fuses them."""
    config = _llama_like("llama4_text", num_experts_per_tok=1)
    entries = outside()
    for layer in range(3):
        block = f"language_model.model.layers.{layer}.feed_forward"
        entries += [(f"{block}.router.weight", "BF16", (E, H)), *experts(block, "int4 pack-quantized")]
        entries.append((f"{block}.shared_expert.gate_proj.weight_packed", "I32", (I, H // 8)))
    return Case({"model_type": "llama4", "text_config": config}, entries, 3)


def _deepseek_v4() -> Case:
    """The published names: no `model.`, bias under `gate.bias`, one layer that chooses by token id, mtp.* as wide."""
    config = {"n_routed_experts": E, "num_experts_per_tok": 2, "num_hash_layers": 1, **SIZES}
    entries = [("embed.weight", "BF16", (V, H)), ("head.weight", "BF16", (V, H))]
    for layer in range(3):
        block = f"layers.{layer}.ffn"
        entries += router(block, ("gate.weight", "gate.bias") if layer else ("gate.weight",))
        entries += experts(block, "fp8 blocks, e8m0 scales", ("w1", "w2", "w3"))
        entries += [(f"{block}.shared_experts.w1.weight", "F8_E4M3", (I, H))]
    entries.append(("layers.0.ffn.gate.tid2eid", "I64", (V, 2)))
    for expert in range(E // 2):
        entries.append((f"mtp.0.ffn.experts.{expert}.w1.weight", "F8_E4M3", (I, H)))
    entries += [("mtp.0.ffn.gate.weight", "BF16", (E // 2, H)), ("mtp.0.ffn.gate.tid2eid", "I64", (V, 2))]
    return Case({"model_type": "deepseek_v4", **config}, entries, 3)


CASES: dict[str, Case] = {form: Case(V3, deepseek_v3(form), 2) for form in PER_EXPERT} | {
    "mxfp4 gpt-oss": _gpt_oss(),
    "fp8 fused, further experts under mtp": _qwen3_5(),
    "fused and transposed, square": _square(),
    "fp8 in three fused tensors": _step(),
    "quantised llama 4": _llama4(),
    "deepseek_v4 as published": _deepseek_v4(),
}


def write(folder: Path, case: Case, *, seed: int = 0, shards: int = 1) -> Path:
    """Write a case into a new folder, its tensors dealt out to shards in order."""
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(case.config, indent=2))
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        part = case.entries[number * len(case.entries) // shards : (number + 1) * len(case.entries) // shards]
        sized = [(key, dtype, shape, int(np.prod(shape)) * ITEM_BYTES[dtype]) for key, dtype, shape in part]
        data = b"".join(_values(generator, key, size) for key, _, _, size in sized)
        (folder / name).write_bytes(encode_header({"format": "pt"}, sized) + data)
        weight_map |= dict.fromkeys((key for key, *_ in part), name)
    if shards > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _values(generator: np.random.Generator, name: str, size: int) -> bytes:
    if name.endswith("tid2eid"):
        return generator.integers(0, E // 2 if name.startswith("mtp") else E, size // 8).astype("<i8").tobytes()
    return generator.bytes(size)


def contents(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a folder: dtype, shape, bytes."""
    return {tensor.name: (tensor.dtype, tensor.shape, shard.read(tensor)) for shard, tensor in open_checkpoint(folder)}


def put(folder: Path, tensors: dict[str, bytes]) -> None:
    """Overwrite tensors of equal size in place."""
    found = open_checkpoint(folder).by_name()
    for name, data in tensors.items():
        shard, tensor = found[name]
        assert len(data) == tensor.nbytes
        with shard.path.open("r+b") as file:
            file.seek(tensor.start)
            file.write(data)
