"""A placement belongs to one numbering of a model: what composes does, and what does not is refused."""

import json
import shutil

import numpy as np
import pytest

from smoe_cli.placement import read_placement
from smoe_profiles.artefact import open_artefact
from smoe_profiles.models import find_model, model_identity, recorded_map
from tests.checkpoint.conftest import permutations
from tests.conftest import smoe
from tests.e2e.regroup_paths import file_bytes, make_path, set_map, tensor_bytes
from tests.profiles.tiny_models import EXPERTS, cached_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return cached_model(tmp_path_factory.getbasetemp(), "mixtral")


@pytest.fixture(scope="module")
def once(source, tmp_path_factory):
    """A working folder with placement-ep4 and checkpoint-ep4."""
    folder = tmp_path_factory.mktemp("once")
    make_path(folder, source, permutations("mixtral", 1))
    smoe("regroup", "-q", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def twice(once, tmp_path_factory):
    """The regrouped model profiled on other prompts, placed for 2 ranks, and regrouped again."""
    folder = tmp_path_factory.mktemp("twice")
    make_path(folder, once / "smoe-out/checkpoint-ep4", permutations("mixtral", 2), ep=2, seed=5)
    smoe("regroup", "-q", cwd=folder)
    return folder


def map_of(folder):
    model = find_model(str(folder))
    return recorded_map(folder, len(model.spec.layers), EXPERTS)


def test_a_placement_from_a_regrouped_models_trace_composes(source, once, twice):
    first, second = map_of(once / "smoe-out/checkpoint-ep4"), map_of(twice / "smoe-out/checkpoint-ep2")
    own = read_placement(open_artefact(twice / "smoe-out/placement-ep2", "placement")).physical_to_logical
    assert np.array_equal(second, np.take_along_axis(first, own, axis=1))
    assert (own != np.arange(EXPERTS)).any()
    found, wanted = (tensor_bytes(folder) for folder in (twice / "smoe-out/checkpoint-ep2", source))
    for layer, row in enumerate(second):
        for slot, logical in enumerate(row):
            name = f"model.layers.{layer}.block_sparse_moe.experts.{{}}.w2.weight"
            assert found[name.format(slot)] == wanted[name.format(logical)]


def test_every_checkpoint_of_a_model_has_the_sources_routers_and_a_map_of_its_own(source, once, twice):
    folders = (source, once / "smoe-out/checkpoint-ep4", twice / "smoe-out/checkpoint-ep2")
    identities = [model_identity(find_model(str(folder))) for folder in folders]
    assert len({identity["router_sha256"] for identity in identities}) == 1
    assert len({identity["map_sha256"] for identity in identities}) == 3


def test_a_checkpoint_regrouped_twice_verifies(twice):
    found = smoe("verify", "--json", "--hashes", cwd=twice).json()
    assert found["passed"]
    assert found["routing"]["generated"] == 64


def test_the_inverse_holds_the_first_sources_bytes_after_one_map_or_two(source, once, twice):
    wanted = tensor_bytes(source)
    for folder in (once, twice):
        made = "inverse-ep4" if folder is once else "inverse-ep2"
        smoe("regroup", "--inverse", "-q", "--force", cwd=folder)
        restored = folder / "smoe-out" / made
        assert tensor_bytes(restored) == wanted
        assert model_identity(find_model(str(restored))) == model_identity(find_model(str(source)))
        for name, data in file_bytes(source).items():
            if name != "model.safetensors":
                assert (restored / name).read_bytes() == data
        open_artefact(restored, "inverse", hashes=True)


def test_the_inverse_needs_no_placement_only_the_checkpoint(once, tmp_path, source):
    given = shutil.copytree(once / "smoe-out/checkpoint-ep4", tmp_path / "given")
    shown = smoe("regroup", "--inverse", "--model", given, "--json", cwd=tmp_path).json()
    assert shown["path"] == "smoe-out/inverse-given"
    assert tensor_bytes(tmp_path / "smoe-out/inverse-given") == tensor_bytes(source)


def test_a_restored_model_is_the_source_again_and_takes_its_placement(once):
    smoe("regroup", "--inverse", "-q", "--force", cwd=once)
    shown = smoe("regroup", "--model", "smoe-out/inverse-ep4", "--dry-run", "--force", cwd=once)
    assert "would write" in shown.out


def test_what_was_never_regrouped_has_no_inverse(source, once):
    failed = smoe("regroup", "--inverse", "--model", source, cwd=once, code=4)
    assert "not a regrouped checkpoint" in failed.err
    smoe("regroup", "--inverse", "--layout", "map", cwd=once, code=2)


def test_a_placement_is_not_applied_to_what_it_made(once):
    failed = smoe("regroup", "--model", "smoe-out/checkpoint-ep4", "--force", cwd=once, code=4)
    assert "already regrouped by placement-ep4" in failed.err


@pytest.mark.parametrize("direction", ["the source's placement", "the regrouped model's placement"])
def test_a_placement_of_another_numbering_of_the_same_model_leaves_with_4(direction, source, once, twice):
    """Both would run and give another layout than was optimised."""
    folder, model = (once, twice / "smoe-out/checkpoint-ep2") if direction.startswith("the source") else (twice, source)
    before = file_bytes(folder / "smoe-out")
    failed = smoe("regroup", "--model", model, "--force", cwd=folder, code=4)
    assert "number their experts differently" in failed.err
    assert file_bytes(folder / "smoe-out") == before


@pytest.mark.parametrize(
    "command",
    [("evaluate", "--trace", "{once}/smoe-out/trace"), ("build-tables", "--trace", "{once}/smoe-out/trace", "--force")],
)
def test_traces_made_before_a_regrouping_are_not_mixed_with_what_came_after(command, once, twice):
    arguments = [part.format(once=once) for part in command]
    if command[0] == "build-tables":
        arguments += ["--trace", "smoe-out/trace"]
    failed = smoe(*arguments, cwd=twice, code=3)
    assert "map" in failed.err


def test_the_record_in_a_checkpoint_says_that_its_map_is_never_applied(twice):
    from safetensors import safe_open

    with safe_open(twice / "smoe-out/checkpoint-ep2/smoe/runtime.safetensors", "np") as file:
        assert file.metadata()["layout"] == "checkpoint"
        identity = json.loads(file.metadata()["model"])
        assert np.array_equal(file.get_tensor("physical_to_logical"), map_of(twice / "smoe-out/checkpoint-ep2"))
    assert identity == open_artefact(twice / "smoe-out/checkpoint-ep2", "checkpoint").model


def test_a_checkpoint_of_a_placement_since_replaced_does_not_count_as_applied(once, tmp_path):
    from smoe_cli.folder import applied, choose_placement

    folder = shutil.copytree(once, tmp_path / "copy")
    assert applied(choose_placement(folder / "smoe-out", None))
    set_map(folder / "smoe-out/placement-ep4", permutations("mixtral", 3))
    assert not applied(choose_placement(folder / "smoe-out", None))
    failed = smoe("verify", "--tensors-only", cwd=folder, code=5)
    assert "another version of placement-ep4" in failed.err


def test_checkpoint_and_map_of_one_placement_are_both_verified(once, tmp_path):
    folder = shutil.copytree(once, tmp_path / "copy")
    smoe("regroup", "--layout", "map", "-q", cwd=folder)
    found = smoe("verify", "--json", cwd=folder).json()
    assert (found["layout"], found["map"]["layout"], found["passed"]) == ("checkpoint", "map", True)
    assert [layer["layer"] for layer in found["map"]["routing"]["layers"]] == [0, 1]
    path = folder / "smoe-out/map-ep4/runtime.safetensors"
    data = path.read_bytes()
    start = data.index(b'"physical_to_logical"')
    offset = (
        8
        + int.from_bytes(data[:8], "little")
        + json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["physical_to_logical"]["data_offsets"][0]
    )
    assert start > 0
    path.write_bytes(data[:offset] + data[offset + 2 : offset + 4] + data[offset : offset + 2] + data[offset + 4 :])
    failed = smoe("verify", "--tensors-only", cwd=folder, code=5)
    assert "map-ep4" in failed.err
    assert "record different maps" in failed.err


def test_a_model_larger_than_memory_is_run_layer_by_layer_and_says_that_no_text_was(once, monkeypatch):
    from smoe_cli.checkpoint import loaded

    monkeypatch.setattr(loaded, "available_memory", lambda: 1000)
    found = smoe("verify", "--json", cwd=once).json()
    assert (found["passed"], found["routing"]["generated"]) == (True, 0)
    assert [layer["layer"] for layer in found["routing"]["layers"]] == [0, 1]
    assert "greedy" not in smoe("verify", cwd=once).out


def test_a_map_of_a_model_larger_than_memory_is_applied_layer_by_layer(once, tmp_path, monkeypatch):
    from smoe_cli.checkpoint import loaded

    folder = shutil.copytree(once, tmp_path / "copy")
    shutil.rmtree(folder / "smoe-out/checkpoint-ep4")
    smoe("regroup", "--layout", "map", "-q", cwd=folder)
    monkeypatch.setattr(loaded, "available_memory", lambda: 1000)
    assert "applied after routing in MoE layers 0-1" in smoe("verify", cwd=folder).out
    assert "no layer was run" in smoe("verify", "--tensors-only", cwd=folder).out


def test_a_quantised_model_is_not_run_and_its_bytes_are_proved(tmp_path, source):
    """The bytes of both forms are compared; only a model in plain floats is run."""
    model = shutil.copytree(source, tmp_path / "model")
    make_path(tmp_path, model, permutations("mixtral", 4))
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (model / "config.json").write_text(json.dumps(config))
    smoe("regroup", "-q", cwd=tmp_path)
    failed = smoe("verify", cwd=tmp_path, code=4)
    assert "quantised (fp8)" in failed.err
    assert "no layer was run" in smoe("verify", "--tensors-only", cwd=tmp_path).out
