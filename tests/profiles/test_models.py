"""Which model is meant, with no network; and when two copies are the same model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from smoe_profiles.errors import ImpossibleError, InputError, MachineError
from smoe_profiles.models import (
    SHORT_NAMES,
    bundled_names,
    describe_identity,
    find_model,
    map_hash,
    model_identity,
    recorded_map,
    same_model,
)
from smoe_profiles.tables import save_arrays
from tests.profiles.tiny_models import CONFIGS, MOE_LAYERS, build_model

PUBLISHED = {
    "deepseek-v2": (59, 160, 6, 8),
    "deepseek-v2-lite": (26, 64, 6, 1),
    "mixtral-8x7b": (32, 8, 2, 1),
    "mixtral-8x22b": (56, 8, 2, 1),
    "qwen1.5-moe-a2.7b": (24, 60, 4, 1),
    "qwen3-30b-a3b": (48, 128, 8, 1),
    "olmoe-1b-7b": (16, 64, 8, 1),
    "deepseek-v3": (58, 256, 8, 8),
    "qwen3-235b-a22b": (94, 128, 8, 1),
    "qwen3-next-80b-a3b": (48, 512, 10, 1),
    "gpt-oss-20b": (24, 32, 4, 1),
    "gpt-oss-120b": (36, 128, 4, 1),
    "llama-4-scout": (48, 16, 1, 1),
    "glm-4.5-air": (45, 128, 8, 1),
    "minimax-m2": (62, 256, 8, 1),
    "phi-3.5-moe": (32, 16, 2, 1),
    "lfm2-8b-a1b": (22, 32, 4, 1),
    "dbrx": (40, 16, 4, 1),
}
"""MoE layers, experts, experts a token, groups that count: from the model cards."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_short_name_answers_with_the_published_layer_table_and_no_network(name):
    model = find_model(name, download=False)
    layers = model.spec.layers
    assert (len(layers), layers[0].num_experts, layers[0].top_k, layers[0].num_groups) == PUBLISHED[name]
    assert (model.folder, model.location) == (None, name)
    assert model.nbytes > 10**9


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_the_experts_of_a_short_name_hold_most_of_its_published_parameters(name):
    """An independent check of hidden size, expert width, layers and E at once."""
    spec = find_model(name, download=False).spec
    experts = sum(3 * layer.num_experts * spec.hidden_size * spec.expert_width for layer in spec.layers)
    assert 0.85 < experts / (SHORT_NAMES[name].billions * 1e9) < 1


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_files_of_a_model_that_is_not_here_are_a_matter_of_the_machine(name):
    with pytest.raises(MachineError, match=f"hf download {SHORT_NAMES[name].hub_id}"):
        find_model(name, download=False).files()


@pytest.mark.parametrize("name", bundled_names())
def test_bundled_models_are_found_by_name_with_their_weights(name):
    model = find_model(name)
    assert model.files().nbytes > 0
    assert len(model_identity(model)["router_sha256"]) == 64


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_gives_its_layer_table(name, tiny):
    model = find_model(str(tiny(name)))
    assert [layer.id for layer in model.spec.layers] == MOE_LAYERS[name]
    assert model.location == str(tiny(name).resolve())


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "~/nothing", "a/b/c"])
def test_a_path_that_is_missing_is_called_a_missing_folder(name):
    with pytest.raises(InputError, match=f"^model '{re.escape(name)}': there is no such folder\\.$"):
        find_model(name)


@pytest.mark.parametrize(
    ("name", "meant"), [("mixtral-8x7", "mixtral-8x7b"), ("DeepSeek-V2-Light", "deepseek-v2-lite")]
)
def test_a_misspelt_short_name_is_answered_with_the_nearest(name, meant):
    with pytest.raises(InputError, match=f"did you mean {meant}. smoe models lists"):
        find_model(name)


def test_a_name_like_no_other_is_answered_with_where_the_names_stand():
    with pytest.raises(InputError, match=r"'nothing' is no folder, hub id or short name; smoe models lists"):
        find_model("nothing")


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"model\.gguf"):
        find_model(str(tmp_path / "model.gguf"))


def test_a_folder_without_config_names_the_missing_file(tmp_path):
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / 'config.json'} is missing")):
        find_model(str(tmp_path))


@pytest.mark.parametrize("text", ["", "[]", "5", "{", '{"model_type": "mixtral", "model_type": "llama"}'])
def test_a_config_that_is_no_json_object_is_an_input_error(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        find_model(str(tmp_path))


def test_a_dense_model_is_refused_before_its_weights_are_looked_at(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    with pytest.raises(ImpossibleError, match="'llama'"):
        find_model(str(tmp_path))


def identity(folder):
    return model_identity(find_model(str(folder)))


def copy_with(source: Path, target: Path, change) -> Path:
    """A copy of a checkpoint with its tensors changed by `change(dict)`."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


GATE = "model.layers.1.block_sparse_moe.gate.weight"


def test_identity_does_not_depend_on_dtype(tiny, tmp_path):
    def to(dtype):
        def change(tensors):
            for name in tensors:
                tensors[name] = tensors[name].to(torch.bfloat16).to(dtype)

        return change

    copies = [
        identity(copy_with(tiny("mixtral"), tmp_path / str(dtype), to(dtype)))
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    ]
    assert copies[0] == copies[1] == copies[2]
    assert copies[0]["router_sha256"] != identity(tiny("mixtral"))["router_sha256"]


def test_identity_does_not_depend_on_sharding_or_the_folder(tiny, tmp_path):
    sharded = build_model("mixtral", tmp_path / "sharded", max_shard_size="30KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert same_model(identity(sharded), identity(tiny("mixtral")))


def test_identity_does_not_depend_on_experts_or_embeddings(tiny, tmp_path):
    def change(tensors):
        for name in tensors:
            if "gate.weight" not in name:
                tensors[name] = tensors[name] + 1

    assert same_model(identity(copy_with(tiny("mixtral"), tmp_path / "copy", change)), identity(tiny("mixtral")))


@pytest.mark.parametrize("row", [0, 7])
def test_identity_changes_with_one_router_weight(row, tiny, tmp_path):
    def change(tensors):
        tensors[GATE][row, 3] += 1e-3

    other = identity(copy_with(tiny("mixtral"), tmp_path / "copy", change))
    assert not same_model(other, identity(tiny("mixtral")))


def test_identity_changes_when_two_layers_exchange_their_routers(tiny, tmp_path):
    first = GATE.replace("layers.1", "layers.0")

    def change(tensors):
        tensors[first], tensors[GATE] = tensors[GATE].clone(), tensors[first].clone()

    assert not same_model(identity(copy_with(tiny("mixtral"), tmp_path / "copy", change)), identity(tiny("mixtral")))


def test_another_rule_is_another_model_though_the_routers_are_equal(tiny, tmp_path):
    copy = copy_with(tiny("mixtral"), tmp_path / "copy", lambda _: None)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 3}))
    assert not same_model(identity(copy), identity(tiny("mixtral")))


def test_the_tokenizer_is_hashed_but_compared_apart(tiny, tmp_path):
    copy = copy_with(tiny("mixtral"), tmp_path / "copy", lambda _: None)
    (copy / "tokenizer.json").write_text("{}")
    assert same_model(identity(copy), identity(tiny("mixtral")))
    assert identity(copy)["tokenizer_sha256"] != identity(tiny("mixtral"))["tokenizer_sha256"]


def regrouped(source, target, physical_to_logical):
    """A copy with permuted routers and the record that says so."""

    def change(tensors):
        for layer, order in enumerate(physical_to_logical):
            name = GATE.replace("layers.1", f"layers.{layer}")
            tensors[name] = tensors[name][torch.from_numpy(order)].contiguous()

    copy = copy_with(source, target, change)
    (copy / "smoe").mkdir()
    arrays = {"physical_to_logical": physical_to_logical.astype(np.uint16)}
    save_arrays(copy / "smoe" / "runtime.safetensors", arrays)
    return copy


def test_a_regrouped_model_is_its_source_with_a_map(tiny, tmp_path):
    order = np.array([[1, 0, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0]])
    source, copy = identity(tiny("mixtral")), regrouped(tiny("mixtral"), tmp_path / "copy", order)
    found = identity(copy)
    assert recorded_map(copy, 2, 8).tolist() == order.tolist()
    assert found["router_sha256"] == source["router_sha256"]
    assert found["map_sha256"] == map_hash(order) != source["map_sha256"]
    assert not same_model(found, source)
    assert "regrouped by map" in describe_identity(found)


@pytest.mark.parametrize(
    "record",
    [
        np.zeros((2, 8), np.uint16),
        np.arange(8, dtype=np.uint16)[None],
        np.tile(np.arange(9, dtype=np.uint16), (2, 1)),
        np.tile(np.arange(7, dtype=np.uint16), (2, 1)),
        np.arange(8, dtype=np.uint16),
        np.tile(np.arange(8, dtype=np.int64), (2, 1)),
    ],
    ids=["no permutation", "one layer", "nine slots", "seven slots", "one axis", "wide numbers"],
)
def test_a_record_that_cannot_have_made_this_model_is_an_input_error(record, tiny, tmp_path):
    copy = copy_with(tiny("mixtral"), tmp_path / "copy", lambda _: None)
    (copy / "smoe").mkdir()
    save_arrays(copy / "smoe" / "runtime.safetensors", {"physical_to_logical": record})
    with pytest.raises(InputError, match="smoe"):
        identity(copy)


@pytest.mark.parametrize("fault", ["missing", "one row more", "integers"])
def test_a_router_that_does_not_fit_the_config_is_named(fault, tiny, tmp_path):
    def change(tensors):
        if fault == "missing":
            del tensors[GATE]
        elif fault == "one row more":
            tensors[GATE] = torch.zeros(9, 32)
        else:
            tensors[GATE] = torch.zeros(8, 32, dtype=torch.int8)

    with pytest.raises(InputError, match=re.escape(GATE)):
        identity(copy_with(tiny("mixtral"), tmp_path / "copy", change))


V2_KEYS = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV2Config",
        "AutoModel": "modeling_deepseek.DeepseekV2Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
    },
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "kv_lora_rank": 16,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 16,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 2,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.39.3",
    "use_cache": True,
    "v_head_dim": 16,
    "vocab_size": 256,
}
"""config.json of deepseek-ai/DeepSeek-V2, its keys and rules, with small sizes."""


def hub_cache(home: Path, hub_id: str, tmp_path: Path) -> Path:
    """A cache as huggingface_hub lays it out, holding a tiny DeepSeek-V2. Returns the snapshot."""
    from transformers import AutoModelForCausalLM, DeepseekV2Config

    from tests.profiles.tiny_models import write_tokenizer

    torch.manual_seed(0)
    plain = {key: value for key, value in V2_KEYS.items() if key != "auto_map"}
    model = AutoModelForCausalLM.from_config(DeepseekV2Config(**plain), dtype=torch.bfloat16)
    made = tmp_path / "made"
    model.save_pretrained(made, max_shard_size="60KB")
    write_tokenizer(made)
    (made / "config.json").write_text(json.dumps(V2_KEYS))
    for name in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (made / name).write_text(f"open({str(tmp_path / 'code-ran')!r}, 'w').close()\n")
    repository = home / "hub" / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    for number, path in enumerate(sorted(made.iterdir())):
        blob = repository / "blobs" / f"{number:040x}"
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def test_deepseek_v2_in_the_hub_cache_is_found_by_its_short_name_and_profiled_offline(tmp_path):
    """The named use case: a published config's own keys, shards behind links, code beside them that must not run."""
    home = tmp_path / "hf"
    hub_cache(home, "deepseek-ai/DeepSeek-V2", tmp_path)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"text": " ".join(f"w{(7 * i + j) % 256}" for j in range(40))}) + "\n" for i in range(12))
    )
    smoe = [sys.executable, "-m", "smoe_cli"]
    options = ["--model", "deepseek-v2", "--dataset", str(tmp_path / "prompts.jsonl"), "-C", str(tmp_path / "out")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"):
        environment.pop(variable, None)
    done = subprocess.run(
        [*smoe, "profile", *options, "--json"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert sum(json.loads(done.stdout)["rows"].values()) == 480
    manifest = json.loads((tmp_path / "out" / "trace" / "manifest.json").read_text())
    assert [layer["id"] for layer in manifest["model"]["layers"]] == [1, 2]
    assert {layer["num_groups"] for layer in manifest["model"]["layers"]} == {8}
    assert json.loads((tmp_path / "out" / "trace" / "run.json").read_text())["model"] == "deepseek-v2"
    assert not (tmp_path / "code-ran").exists()
