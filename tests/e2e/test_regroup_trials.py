"""Hostile and faulty checkpoints, plans and places: a documented code, one sentence, nothing written, source untouched.

The trials are those of the design's reliability list that concern checkpoints and placements; a killed run and a full
disk have a file of their own.
"""

import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.conftest import permutations
from tests.conftest import smoe
from tests.e2e.regroup_paths import INDEX, file_bytes, make_path, set_map, split_shards, tensor_bytes
from tests.profiles.tiny_models import cached_model

GATE = "model.layers.1.block_sparse_moe.gate.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A sharded Mixtral in made/source, and a placement for it in made/smoe-out."""
    folder = tmp_path_factory.mktemp("trials")
    tiny = cached_model(tmp_path_factory.getbasetemp(), "mixtral")
    source = split_shards(tiny, folder / "source", 2)
    make_path(folder, source, permutations("mixtral", 1))
    return folder


@pytest.fixture
def work(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "work"))


def refused(work, code, *named, arguments=()):
    """regroup leaves with this code and one sentence, and changes nothing anywhere."""
    before = file_bytes(work)
    failed = smoe("regroup", "--model", "source", *arguments, cwd=work, code=code)
    assert failed.err.count("error: ") == 1
    assert "Traceback" not in failed.err
    assert "bug" not in failed.err
    for text in named:
        assert text in failed.err
    assert not failed.out
    assert file_bytes(work) == before


def shard(work, number=1):
    return work / f"source/model-{number:05d}-of-00002.safetensors"


def edit(work, change):
    """Change the tensors of whichever shard holds the first name that `change` touches: change(dict)."""
    for number in (1, 2):
        tensors = load_file(shard(work, number))
        if change(tensors):
            save_file(tensors, shard(work, number), metadata={"format": "pt"})
            held = {name: shard(work, n).name for n in (1, 2) for name in load_file(shard(work, n))}
            (work / "source" / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": held}))
            return
    raise AssertionError("no shard was changed")


def edit_index(work, change):
    index = json.loads((work / "source" / INDEX).read_text())
    change(index["weight_map"])
    (work / "source" / INDEX).write_text(json.dumps(index))


def test_a_header_that_claims_ten_gigabytes_in_a_kilobyte(work):
    shard(work).write_bytes((10 * 10**9).to_bytes(8, "little") + bytes(1000))
    refused(work, 3, "claims 10000000000")


def test_offsets_that_overlap(work):
    data = shard(work).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    second = sorted((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])[
        1
    ]
    start, stop = header[second]["data_offsets"]
    header[second]["data_offsets"] = [start - 4, stop - 4]
    encoded = json.dumps(header).encode()
    shard(work).write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + length :])
    refused(work, 3, second, "starts at byte")


@pytest.mark.parametrize("name", ["../source/model-00001-of-00002.safetensors", "/etc/passwd", "..", "a/b.safetensors"])
def test_an_index_that_names_a_file_elsewhere(name, work):
    edit_index(work, lambda weight_map: weight_map.update({"lm_head.weight": name}))
    refused(work, 3, "not a file of this folder")


def test_an_index_that_names_a_missing_shard(work):
    """Every input is readable before the first byte is written."""
    edit_index(work, lambda weight_map: weight_map.update({"lm_head.weight": "model-00003-of-00003.safetensors"}))
    refused(work, 3, "model-00003-of-00003.safetensors is missing")


def test_a_tensor_in_two_shards(work):
    tensors = load_file(shard(work, 2))
    tensors["lm_head.weight"] = load_file(shard(work, 1)).get("lm_head.weight", torch.zeros(256, 32))
    save_file(tensors, shard(work, 2), metadata={"format": "pt"})
    refused(work, 3, "lm_head.weight stands in")


def test_an_index_with_a_key_twice(work):
    text = (work / "source" / INDEX).read_text()
    (work / "source" / INDEX).write_text(text.replace('"lm_head.weight"', '"lm_head.weight": "x", "lm_head.weight"'))
    refused(work, 3, "repeats the key")


def test_settings_nested_a_hundred_thousand_deep(work):
    (work / "source/config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    refused(work, 3, "config.json")


def drop(*names):
    def change(tensors):
        held = [name for name in names if name in tensors]
        for name in held:
            tensors.pop(name)
        return held

    return change


def test_experts_0_to_6_of_8(work):
    for number in (1, 2):
        names = [EXPERT.format(7, part) for part in ("w1", "w2", "w3")]
        if set(names) & set(load_file(shard(work, number))):
            edit(work, drop(*names))
    refused(work, 3, "layer 1 has no expert 7")


def test_a_router_of_nine_rows(work):
    def change(tensors):
        if GATE in tensors:
            tensors[GATE] = torch.zeros(9, 32)
        return GATE in tensors

    edit(work, change)
    refused(work, 3, "gate.weight", "[9, 32]")


def test_another_number_of_experts_in_the_config_than_in_the_weights(work):
    path = work / "source/config.json"
    path.write_text(path.read_text().replace('"num_local_experts": 8', '"num_local_experts": 16'))
    refused(work, 3, "gate.weight")


def test_another_model_than_the_placements(work, tmp_path_factory):
    shutil.rmtree(work / "source")
    shutil.copytree(cached_model(tmp_path_factory.getbasetemp(), "olmoe"), work / "source")
    refused(work, 3, "placement-ep4 is for mixtral")


@pytest.mark.parametrize("fault", ["an expert twice", "an expert missing", "a layer missing", "an expert too many"])
def test_a_plan_that_is_no_permutation(fault, work):
    """One bad layer, and no layer is applied."""
    order = permutations("mixtral", 1)
    order = {
        "an expert twice": np.array([[0, 0, 2, 3, 4, 5, 6, 7], order[1]]),
        "an expert missing": order[:, order[0] < 7],
        "a layer missing": order[:1],
        "an expert too many": np.array([[*range(7), 8], order[1]]),
    }[fault]
    import pyarrow as pa
    import pyarrow.parquet as pq

    layers, slots = len(order), len(order[0])
    table = {
        "layer": np.repeat(np.arange(layers, dtype=np.uint16), slots),
        "physical": np.tile(np.arange(slots, dtype=np.uint16), layers),
        "logical": np.asarray(order).astype(np.uint16).reshape(-1),
        "rank": np.tile((np.arange(slots) * 4 // slots).astype(np.uint16), layers),
    }
    path = work / "smoe-out/placement-ep4"
    pq.write_table(pa.table(table), path / "placement.parquet")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["placement.parquet"]["bytes"] = (path / "placement.parquet").stat().st_size
    (path / "manifest.json").write_text(json.dumps(manifest))
    refused(work, 3)


def test_a_placement_file_cut_short(work):
    path = work / "smoe-out/placement-ep4/placement.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    refused(work, 3, "placement.parquet")


def test_groups_broken_by_a_checkpoint_that_was_insisted_on(tmp_path, tmp_path_factory):
    """The key of config.json is named; without insisting a map is written, and says why."""
    source = cached_model(tmp_path_factory.getbasetemp(), "deepseek_v3")
    shutil.copytree(source, tmp_path / "source")
    make_path(tmp_path, tmp_path / "source", permutations("deepseek_v3", 1))
    refused(tmp_path, 4, "n_group = 4", arguments=("--layout", "checkpoint"))
    shown = smoe("regroup", cwd=tmp_path)
    assert "map only. The router is group-limited (n_group = 4, layer 1)" in shown.out
    assert "TensorRT-LLM" in shown.out
    assert sorted(path.name for path in (tmp_path / "smoe-out/map-ep4").iterdir()) == [
        *("manifest.json", "placement.parquet", "run.json", "runtime.safetensors"),
    ]
    verified = smoe("verify", "--json", cwd=tmp_path).json()
    assert (verified["layout"], verified["passed"]) == ("map", True)
    assert [layer["layer"] for layer in verified["routing"]["layers"]] == [1, 2]


def test_experts_with_copies_are_a_map_and_never_a_checkpoint(work):
    """How many copies there are is read from the map, not from an option."""
    order = permutations("mixtral", 1)
    set_map(work / "smoe-out/placement-ep4", np.concatenate([order, order[:, [3, 2, 1, 0]]], axis=1))
    refused(work, 4, "several slots", arguments=("--layout", "checkpoint"))
    assert "map only. This placement holds experts in several slots" in smoe("regroup", cwd=work).out


def test_a_target_that_exists(work):
    smoe("regroup", "-q", cwd=work)
    refused(work, 4, "exists already")


def test_a_dry_run_shows_its_plan_before_it_refuses_a_target_that_exists(work):
    smoe("regroup", "-q", cwd=work)
    before = file_bytes(work)
    planned = smoe("regroup", "--model", "source", "--dry-run", cwd=work, code=4)
    assert planned.out.startswith("would write smoe-out/checkpoint-ep4: checkpoint")
    assert "exists already" in planned.err
    assert file_bytes(work) == before


@pytest.mark.parametrize("alias", ["inside", "dots", "link", "blobs"])
def test_an_output_that_is_the_source_under_another_name(alias, work):
    """The first write would destroy what is read."""
    source = work / "source"
    if alias == "blobs":  # a hub cache: the folder holds links, the target lies where they point
        blobs = work / "blobs"
        source.rename(blobs)
        source.mkdir()
        for path in blobs.iterdir():
            (source / path.name).symlink_to(path)
    inside = {"inside": source, "dots": work / "source/../source", "link": work / "link", "blobs": work / "blobs"}[
        alias
    ]
    (work / "link").symlink_to(source)
    (work / "smoe-out").rename(inside / "smoe-out")
    refused(work, 4, "inside each other", arguments=("-C", str(inside / "smoe-out")))


def test_a_working_folder_that_cannot_be_written(work, monkeypatch):
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: mode == os.R_OK or (real(path, mode) and "smoe-out" not in str(path))
    )
    refused(work, 6, "not writable")


def test_a_disk_that_is_too_small_is_known_before_the_first_byte(work, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    refused(work, 6, "too full", "1,000 are free")


def test_a_source_that_changes_while_it_is_read(work, monkeypatch):
    from smoe_cli.checkpoint import writer

    real, seen = writer.write_all, []

    def write(descriptor, data):
        if not seen:
            seen.append(1)
            os.utime(shard(work), (1, 1))
        real(descriptor, data)

    monkeypatch.setattr(writer, "write_all", write)
    failed = smoe("regroup", "--model", "source", cwd=work, code=3)
    assert "changed while it was read" in failed.err
    assert not list((work / "smoe-out").glob("*checkpoint*"))


def test_a_second_run_into_the_same_folder_waits_its_turn(work, monkeypatch):
    from smoe_cli.checkpoint import writer

    real = writer.write_all
    started, go_on, codes = threading.Event(), threading.Event(), []

    def slow(descriptor, data):
        started.set()
        go_on.wait(20)
        real(descriptor, data)

    monkeypatch.setattr(writer, "write_all", slow)
    from smoe_cli.app import run

    arguments = ["regroup", "--model", str(work / "source"), "-C", str(work / "smoe-out"), "-q"]
    first = threading.Thread(target=lambda: codes.append(run(arguments)))
    first.start()
    assert started.wait(20)
    failed = smoe(*arguments, cwd=work, code=6)
    go_on.set()
    first.join()
    assert "being written by another smoe command" in failed.err
    assert codes == [0]


def test_code_in_the_models_folder_is_copied_and_never_run(work):
    path = work / "source/config.json"
    config = json.loads(path.read_text()) | {"auto_map": {"AutoConfig": "evil.Config"}}
    path.write_text(json.dumps(config))
    (work / "source/evil.py").write_text("open('owned', 'w').close()\n")
    smoe("regroup", "--model", "source", "-q", cwd=work)
    assert (work / "smoe-out/checkpoint-ep4/evil.py").exists()
    assert not (work / "owned").exists()


def test_pickled_weights_alone(work):
    for number in (1, 2):
        shard(work, number).unlink()
    (work / "source" / INDEX).unlink()
    (work / "source/pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    refused(work, 3, "safetensors checkpoints only")
    assert not (work / "owned").exists()


def test_an_adapter_over_the_experts(work):
    (work / "source/adapter_config.json").write_text('{"target_modules": ["w1"]}')
    refused(work, 4, "adapter", "merge it")


@pytest.mark.parametrize("name", ["with space", "new\nline", "Grüße", os.fsdecode(b"not-utf8-\xff")])
def test_odd_folder_names(name, work):
    odd = work / name
    (work / "source").rename(odd)
    smoe("regroup", "--model", f"./{name}", "-q", "--json", cwd=work)
    assert tensor_bytes(work / "smoe-out/checkpoint-ep4").keys() == tensor_bytes(odd).keys()


def test_the_plan_is_shown_and_nothing_written(work):
    before = file_bytes(work)
    found = smoe("regroup", "--model", "source", "--dry-run", "--json", cwd=work).json()
    assert file_bytes(work) == before
    assert found["tensors"] == {"copied": 15, "renamed": 48, "permuted": 2, "renumbered": 0}
    assert (found["shards"], found["dry_run"], found["layout"]) == (2, True, "checkpoint")
    assert found["bytes"] == sum(len(data) for data in tensor_bytes(work / "source").values())
    assert found["free_bytes"] > 0
    assert found["peak_memory_bytes"] < 300e6
