"""The streaming rewrite: experts renumbered, router rows permuted, every other byte as it was."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from smoe_cli.checkpoint.rewrite import plan_rewrite
from smoe_cli.checkpoint.writer import write_checkpoint
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.models import find_model
from smoe_profiles.tensors import encode_header, open_checkpoint
from tests.checkpoint.conftest import edit_tensors, editable, permutations, regroup
from tests.profiles.tiny_models import CONFIGS, MOE_LAYERS

INDEX = "model.safetensors.index.json"
LAYOUT = {
    "mixtral": ("block_sparse_moe", ("w1", "w2", "w3")),
    **{name: ("mlp", ("gate_proj", "up_proj", "down_proj")) for name in CONFIGS if name != "mixtral"},
}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def by_hand(name: str, tensors: dict[str, torch.Tensor], order: np.ndarray) -> dict[str, torch.Tensor]:
    """What a renumbered checkpoint must hold, expert by expert."""
    block, parts = LAYOUT[name]
    expected = dict(tensors)
    for index, layer in enumerate(MOE_LAYERS[name]):
        for slot, logical in enumerate(order[index]):
            for part in parts:
                prefix = f"model.layers.{layer}.{block}.experts"
                expected[f"{prefix}.{slot}.{part}.weight"] = tensors[f"{prefix}.{logical}.{part}.weight"]
        gate = f"model.layers.{layer}.{block}.gate.weight"
        expected[gate] = torch.stack([tensors[gate][logical] for logical in order[index]])
    return expected


def same_tensors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted
    )


def test_two_experts_exchanged_by_hand_equal_what_is_written(tiny, tmp_path):
    order = np.tile(np.arange(8), (2, 1))
    order[1, [2, 5]] = [5, 2]
    written = load_file(regroup(tiny("mixtral"), order, tmp_path / "copy") / "model.safetensors")
    source = load_file(tiny("mixtral") / "model.safetensors")
    expected = dict(source)
    for part in ("w1", "w2", "w3"):
        two, five = (f"model.layers.1.block_sparse_moe.experts.{expert}.{part}.weight" for expert in (2, 5))
        expected[two], expected[five] = source[five], source[two]
    gate = "model.layers.1.block_sparse_moe.gate.weight"
    expected[gate] = source[gate][[0, 1, 5, 3, 4, 2, 6, 7]]
    assert same_tensors(written, expected)
    assert not same_tensors(written, source)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_is_renumbered_expert_by_expert(name, tiny, tmp_path):
    order = permutations(name, 11)
    written = regroup(tiny(name), order, tmp_path / "copy")
    assert same_tensors(tensors_of(written), by_hand(name, tensors_of(tiny(name)), order))


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(["deepseek_v2", "mixtral", "qwen2_moe", "olmoe"]), st.integers(0, 10**6))
def test_regrouping_and_then_the_inverse_gives_the_same_tensor_bytes(tiny, tmp_path_factory, name, seed):
    folder = tmp_path_factory.mktemp("inverse")
    order = permutations(name, seed)
    there = regroup(tiny(name), order, folder / "there")
    back = regroup(there, np.argsort(order, axis=1), folder / "back")
    source = find_model(str(tiny(name))).files().by_name()
    found = open_checkpoint(back).by_name()
    assert found.keys() == source.keys()
    for key, (shard, tensor) in source.items():
        assert found[key][0].read(found[key][1]) == shard.read(tensor)
        assert (found[key][1].dtype, found[key][1].shape) == (tensor.dtype, tensor.shape)
    shutil.rmtree(folder)


def test_two_maps_one_after_the_other_are_one_map(tiny, tmp_path):
    first, second = permutations("olmoe", 1), permutations("olmoe", 2)
    stepwise = regroup(regroup(tiny("olmoe"), first, tmp_path / "one"), second, tmp_path / "two")
    at_once = regroup(tiny("olmoe"), np.take_along_axis(first, second, axis=1), tmp_path / "both")
    assert same_tensors(tensors_of(stepwise), tensors_of(at_once))


def test_the_same_map_writes_the_same_bytes(tiny, tmp_path):
    order = permutations("mixtral", 4)
    one, two = (regroup(tiny("mixtral"), order, tmp_path / name) for name in ("one", "two"))
    for path in one.iterdir():
        assert (two / path.name).read_bytes() == path.read_bytes()


@pytest.fixture(scope="module")
def sharded(tiny, tmp_path_factory):
    """A Mixtral in five shards cut by name, so that experts of one layer straddle them."""
    folder = editable(tiny("mixtral"), tmp_path_factory.mktemp("sharded") / "model")
    tensors = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number in range(5):
        piece = dict(tensors[number * len(tensors) // 5 : (number + 1) * len(tensors) // 5])
        name = f"model-{number + 1:05d}-of-00005.safetensors"
        save_file(piece, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(piece, name)
    index = {"metadata": {"total_size": sum(t.nbytes for _, t in tensors), "note": "kept"}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    homes = {shard for name, shard in weight_map.items() if "layers.1.block_sparse_moe.experts" in name}
    assert len(homes) > 1
    return folder


def test_a_sharded_checkpoint_gets_an_index_that_is_true(sharded, tmp_path):
    order = np.tile(np.arange(8)[::-1], (2, 1))
    written = regroup(sharded, order, tmp_path / "copy")
    assert same_tensors(tensors_of(written), by_hand("mixtral", tensors_of(sharded), order))
    index, before = (json.loads((folder / INDEX).read_text()) for folder in (written, sharded))
    held = {}
    for path in written.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            held |= dict.fromkeys(file.keys(), path.name)
    assert index["weight_map"] == held
    assert index["weight_map"] != before["weight_map"]
    assert index["metadata"] == before["metadata"]
    open_checkpoint(written)


def test_shards_keep_their_names_and_sizes_of_data(sharded, tmp_path):
    written = open_checkpoint(regroup(sharded, permutations("mixtral", 9), tmp_path / "copy"))
    source = open_checkpoint(sharded)
    assert [(shard.path.name, sum(t.nbytes for t in shard.tensors)) for shard in written.shards] == [
        (shard.path.name, sum(t.nbytes for t in shard.tensors)) for shard in source.shards
    ]


def test_sharding_does_not_change_what_is_written(sharded, tiny, tmp_path):
    order = permutations("mixtral", 9)
    whole = regroup(tiny("mixtral"), order, tmp_path / "whole")
    parts = regroup(sharded, order, tmp_path / "parts")
    assert same_tensors(tensors_of(whole), tensors_of(parts))


def test_metadata_is_kept_and_the_format_added_for_older_readers(tiny, tmp_path):
    folder = editable(tiny("mixtral"), tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    for number, metadata in enumerate(({"made_by": "me", "format": "pt"}, {"note": "no format"}, None)):
        save_file(tensors, folder / "model.safetensors", metadata=metadata)
        written = regroup(folder, permutations("mixtral", 0), tmp_path / f"copy-{number}")
        with safe_open(written / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"} | (metadata or {})


def test_dtypes_torch_does_not_know_are_moved_as_bytes(tiny, tmp_path):
    """F8_E8M0 scales and packed integers: a cast would destroy them."""
    folder = editable(tiny("mixtral"), tmp_path / "source")
    shard = find_model(str(folder)).files().shards[0]
    entries = [(t.name, t.dtype, t.shape, t.nbytes) for t in shard.tensors]
    data = [shard.read(tensor) for tensor in shard.tensors]
    generator = np.random.default_rng(0)
    extra = {}
    for layer in (0, 1):
        for expert in range(8):
            for suffix, dtype in (("weight_scale", "F8_E8M0"), ("packed", "I32"), ("odd", "F4")):
                name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.{suffix}"
                extra[name] = generator.bytes(12)
                entries.append((name, dtype, (3,) if dtype == "I32" else (12,), 12))
                data.append(extra[name])
    (folder / "model.safetensors").write_bytes(encode_header({"format": "pt"}, entries) + b"".join(data))
    order = permutations("mixtral", 5)
    found = open_checkpoint(regroup(folder, order, tmp_path / "copy")).by_name()
    for layer in (0, 1):
        for slot, logical in enumerate(order[layer]):
            for suffix in ("weight_scale", "packed", "odd"):
                shard, tensor = found[f"model.layers.{layer}.block_sparse_moe.experts.{slot}.w1.{suffix}"]
                wanted = extra[f"model.layers.{layer}.block_sparse_moe.experts.{logical}.w1.{suffix}"]
                assert shard.read(tensor) == wanted


def test_side_files_are_copied_and_other_copies_of_the_weights_are_not(tiny, tmp_path):
    folder = editable(tiny("mixtral"), tmp_path / "source")
    kept = {"LICENSE": b"free", "chat_template.jinja": b"{{ x }}", "assets/notes.txt": b"n", "modeling_x.py": b"pass"}
    stale = {
        "pytorch_model.bin": b"old",
        "pytorch_model.bin.index.json": b'{"weight_map": {"a": "pytorch_model.bin"}}',
        "original/consolidated.00.pth": b"old",
        "consolidated.safetensors": b"old",
        "model.gguf": b"old",
        "tf_model.h5": b"old",
    }
    hidden = {".git/config": b"x", ".cache/huggingface/download/x.lock": b""}
    for name, data in (kept | stale | hidden).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    model = find_model(str(folder))
    written = regroup(model, permutations("mixtral", 0), tmp_path / "copy")
    names = {path.relative_to(written).as_posix() for path in written.rglob("*") if path.is_file()}
    own = {path.name for path in tiny("mixtral").iterdir()}
    assert names == own | set(kept)
    for name in own - {"model.safetensors"} | set(kept):
        assert (written / name).read_bytes() == (folder / name).read_bytes()
    left_out = plan_rewrite(model, permutations("mixtral", 0), tmp_path / "new").left_out()
    assert set(left_out) == set(stale) - {"pytorch_model.bin.index.json"}


def test_a_source_behind_hub_cache_links_is_only_read_and_the_copy_holds_no_link(tiny, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(tiny("mixtral").iterdir())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")

    def state():
        return {
            path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
            for path in blobs.iterdir()
        }

    before = state()
    written = regroup(snapshot, permutations("mixtral", 2), tmp_path / "copy")
    assert state() == before
    assert not any(path.is_symlink() for path in written.rglob("*"))
    assert {path.name for path in written.iterdir()} == {path.name for path in snapshot.iterdir()}


def test_a_read_only_source_gives_a_copy_that_can_be_written(tiny, tmp_path):
    folder = editable(tiny("mixtral"), tmp_path / "source")
    for path in folder.iterdir():
        path.chmod(0o444)
    written = regroup(folder, permutations("mixtral", 2), tmp_path / "copy")
    assert all(path.stat().st_mode & 0o200 for path in written.iterdir())


def plan(folder, target, layers=2, experts=8):
    return plan_rewrite(find_model(str(folder)), np.tile(np.arange(experts), (layers, 1)), target)


@pytest.mark.parametrize("where", ["inside", "around", "same", "through a link"])
def test_a_target_and_a_source_inside_each_other_are_refused(where, tiny, tmp_path):
    folder = editable(tiny("mixtral"), tmp_path / "models" / "mixtral")
    (tmp_path / "link").symlink_to(folder)
    target = {
        "inside": folder / "smoe-out" / "checkpoint-ep4",
        "around": tmp_path / "models",
        "same": folder,
        "through a link": tmp_path / "link" / "checkpoint-ep4",
    }[where]
    before = sorted(path.name for path in folder.rglob("*"))
    with pytest.raises(ImpossibleError, match="inside each other"):
        plan(folder, target)
    assert sorted(path.name for path in folder.rglob("*")) == before


@pytest.mark.parametrize(("layers", "experts"), [(1, 8), (3, 8), (2, 6), (2, 16)])
def test_a_map_for_another_shape_of_model_is_an_input_error(layers, experts, tiny, tmp_path):
    with pytest.raises(InputError):
        plan(tiny("mixtral"), tmp_path / "copy", layers, experts)


@pytest.mark.parametrize("row", [[0] * 8, [1, 2, 3, 4, 5, 6, 7, 8], [-1, 1, 2, 3, 4, 5, 6, 7]])
def test_a_map_that_is_no_permutation_is_an_input_error(row, tiny, tmp_path):
    with pytest.raises(InputError):
        plan_rewrite(find_model(str(tiny("mixtral"))), np.array([list(range(8)), row]), tmp_path / "copy")


def test_a_missing_expert_stops_before_the_first_byte(tiny, tmp_path):
    folder = editable(tiny("mixtral"), tmp_path / "source")
    edit_tensors(folder, lambda t: [t.pop(name) for name in list(t) if "layers.1.block_sparse_moe.experts.7" in name])
    with pytest.raises(InputError, match="layer 1 has no expert 7"):
        plan(folder, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_shard_cut_short_between_plan_and_write_is_an_input_error(tiny, tmp_path):
    folder = editable(tiny("mixtral"), tmp_path / "source")
    rewrite = plan(folder, tmp_path / "copy")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    (tmp_path / "copy").mkdir()
    with pytest.raises(InputError, match="cut short"):
        write_checkpoint(rewrite, tmp_path / "copy", lambda _: None)


def test_pickled_weights_are_never_opened(tiny, tmp_path):
    folder = editable(tiny("mixtral"), tmp_path / "source")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    with pytest.raises(InputError, match="safetensors checkpoints only"):
        plan(folder, tmp_path / "copy")
