"""Placements out to engines and in from them: files as the engines read them, and everything they would not notice."""

import json
import pickle
import zipfile

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_cli.engines import sglang, trtllm
from smoe_cli.engines.choices import Target
from smoe_cli.engines.engine_map import EngineMap, ModelLayers, faults, select_layers
from smoe_cli.engines.files import WRITERS, read_engine_map
from smoe_cli.placement import read_placement
from smoe_profiles.artefact import open_artefact
from smoe_profiles.errors import InputError
from tests.conftest import smoe
from tests.engines import readers

TOY = ModelLayers(moe=(1, 2, 3), num_experts=8, hidden=4, extra=1, family="deepseek_v3")
SLOTS = np.array([[7, 6, 5, 4, 3, 2, 1, 0], [0, 2, 4, 6, 1, 3, 5, 7], [0, 1, 2, 3, 4, 5, 6, 7]])
COPIES = np.concatenate([SLOTS[:, :4], [[0], [1], [4]], SLOTS[:, 4:], [[7], [0], [0]]], axis=1)
"""One redundant slot a rank."""


def toy(slots=SLOTS):
    return EngineMap(slots, TOY.moe, num_ranks=2)


def by_rank(slots):
    return [readers.chunks(row, 2) for row in slots.tolist()]


def write(target, path, slots=SLOTS):
    form, writer, suffix = WRITERS[target]
    path = path / f"file{suffix}"
    writer(path, toy(slots), TOY)
    return form, path


# Out.


@pytest.mark.parametrize("slots", [SLOTS, COPIES])
@pytest.mark.parametrize("target", [Target.SGLANG, Target.SGLANG_PT])
def test_sglang_reads_a_row_for_every_hidden_layer_and_one_key(tmp_path, target, slots):
    redundant = slots.shape[1] - 8
    found = readers.sglang(
        write(target, tmp_path, slots)[1], hidden_layers=4, num_experts=8, redundant=redundant, ep_size=2
    )
    assert [found[layer] for layer in TOY.moe] == by_rank(slots)


def test_a_dense_layer_has_an_identity_row_for_sglang(tmp_path):
    _, path = write(Target.SGLANG, tmp_path, COPIES)
    assert json.loads(path.read_text())["physical_to_logical_map"][0] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]


@pytest.mark.parametrize("slots", [SLOTS, COPIES])
def test_tensorrt_llm_finds_every_moe_layer_and_the_mtp_layer_behind_them(tmp_path, slots):
    found = readers.trtllm(write(Target.TRTLLM, tmp_path, slots)[1], moe_layers=TOY.moe, mtp_layers=(4,), ep_size=2)
    assert [found[layer] for layer in TOY.moe] == by_rank(slots)
    assert sorted(found) == [1, 2, 3, 4]


@pytest.mark.parametrize("slots", [SLOTS, COPIES])
def test_ascend_takes_moe_layers_by_position(tmp_path, slots):
    found = readers.ascend(write(Target.ASCEND, tmp_path, slots)[1], ep_size=2)
    assert list(found.values()) == by_rank(slots)


@pytest.mark.parametrize("slots", [SLOTS, COPIES])
def test_eplb_tensors_say_the_same_thing_three_times(tmp_path, slots):
    found = readers.eplb(write(Target.EPLB, tmp_path, slots)[1], num_experts=8, ep_size=2)
    assert list(found.values()) == by_rank(slots)


@st.composite
def maps(draw):
    """A sound map of two layers: every expert somewhere, none twice on a rank."""
    ranks, size, redundant = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(0, 2))
    experts = ranks * size
    rows = []
    for _ in range(2):
        order = draw(st.permutations(range(experts)))
        held = [list(order[rank * size : (rank + 1) * size]) for rank in range(ranks)]
        for rank in range(ranks):
            foreign = [expert for expert in order if expert not in held[rank]]
            held[rank] += foreign[: min(redundant, experts - size)]
        rows.append([expert for rank in held for expert in rank])
    return np.array(rows), ranks, experts


@settings(max_examples=40, deadline=None)
@given(found=maps(), target=st.sampled_from(sorted(WRITERS)))
def test_every_form_read_back_is_the_placement_that_was_written(tmp_path_factory, found, target):
    slots, ranks, experts = found
    layers = ModelLayers(moe=(2, 3), num_experts=experts, hidden=4, extra=0, family="qwen3_moe")
    _, writer, suffix = WRITERS[target]
    path = tmp_path_factory.mktemp("form") / f"file{suffix}"
    writer(path, EngineMap(slots, layers.moe, num_ranks=ranks), layers)
    back = select_layers(read_engine_map(path), layers)
    assert (back.slots == slots).all()
    assert back.layer_ids == layers.moe
    assert back.num_ranks in (None, ranks)
    assert faults(back, experts, ranks) == []


def test_a_model_whose_class_ignores_the_file_is_warned_of():
    said = sglang.notes(toy(), ModelLayers((1,), 8, 4, 0, "mixtral"))
    assert any("mixtral does not ask for a location" in note for note in said)
    assert not any("does not ask" in note for note in sglang.notes(toy(), TOY))
    assert any("multi-token prediction" in note for note in trtllm.notes(toy(), TOY))


# What an engine would not notice.


@pytest.mark.parametrize(
    ("row", "ranks", "said"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 0], 2, "does not hold expert 7"),
        ([0, 1, 2, 3, 4, 5, 6, 8], 2, "names expert 8 of 8"),
        ([0, 1, 2, 3, 4, 5, 6, 7, 0, 0], 2, "holds expert 0 twice on rank 1"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 3, "the smallest legal redundancy is 1 (9 slots)"),
        ([0, 1, 2, 3, 4, 5, 6, 7, 0], 2, "the smallest legal redundancy is 0 (8 slots)"),
    ],
)
def test_a_map_that_would_serve_wrongly_is_told_by_its_fault(row, ranks, said):
    (fault,) = faults(EngineMap(np.array([row]), (3,)), 8, ranks)
    assert said in fault
    if "slots are not" not in fault:
        assert "layer 3" in fault


def test_an_expert_twice_on_a_device_silently_lost_a_slot():
    """The engine keeps one of the two and has a slot too few."""
    twice = np.array([[0, 0, 1, 2], [0, 1, 2, 3]])
    assert faults(EngineMap(twice, (0, 1)), 3, 2)[0] == "layer 0 holds expert 0 twice on rank 0"


def test_redundancy_is_derived_from_the_map_not_from_an_option(tmp_path):
    """A map with copies was loaded with an option that said none."""
    _, path = write(Target.SGLANG, tmp_path, COPIES)
    assert any("--ep-num-redundant-experts 2" in note for note in sglang.notes(toy(COPIES), TOY))
    assert read_engine_map(path).slots.shape[1] == 10


def test_a_map_of_other_layers_than_the_model_is_refused_whole():
    """One bad layer was skipped in silence, and the old map stayed in half the state."""
    with pytest.raises(ValueError, match="does not name layer 3"):
        select_layers(EngineMap(SLOTS[:2], (1, 2)), TOY)
    with pytest.raises(ValueError, match="it has 3 rows; the model has 4 decoder layers"):
        select_layers(EngineMap(SLOTS, every_layer=True), TOY)
    with pytest.raises(ValueError, match="it has 2 rows; the model has 3 MoE layers"):
        select_layers(EngineMap(SLOTS[:2]), TOY)
    with pytest.raises(ValueError, match="which of them have experts is the model's to say"):
        select_layers(EngineMap(SLOTS, every_layer=True), None)


def test_a_draft_layer_does_not_take_the_main_stacks_placement(tmp_path):
    """An MTP layer keeps its experts in order."""
    _, path = write(Target.TRTLLM, tmp_path)
    assert yaml.safe_load(path.read_text())["initial_global_assignments"][4] == list(range(8))


# Hostile files.


TEXTS = {
    "empty.json": "",
    "other.json": '{"logical_count": [[1, 2]]}',
    "twice.json": '{"physical_to_logical_map": [[0]], "physical_to_logical_map": [[1]]}',
    "deep.json": "[" * 100_000 + "]" * 100_000,
    "ragged.json": '{"physical_to_logical_map": [[0, 1], [0]]}',
    "floats.json": '{"physical_to_logical_map": [[0.5, 1.0]]}',
    "negative.json": '{"physical_to_logical_map": [[-1, 0]]}',
    "huge.json": '{"physical_to_logical_map": [[99999999999, 0]]}',
    "none.json": '{"physical_to_logical_map": []}',
    "code.yaml": "initial_global_assignments: !!python/object/apply:os.system ['touch pwned']",
    "keys.yaml": "initial_global_assignments: {a: [0, 1]}",
    "list.yaml": "initial_global_assignments: [1, 2]",
    "devices.json": '{"layer_list": [{"layer_id": 0, "device_list": [{"device_id": 3, "device_expert": [0]}]}]}',
}


def cut_short(path):
    torch.save({"phy2log": torch.arange(4)}, path)
    path.write_bytes(path.read_bytes()[:-40])


FILES = {
    "pickle.pt": lambda path: path.write_bytes(pickle.dumps(zipfile.ZipFile)),
    "cut.pt": cut_short,
    "uneven.npz": lambda path: np.savez(path, expert_to_rank=np.array([[0, 0, 0, 1]])),
    "floats.npz": lambda path: np.savez(path, expert_to_rank=np.array([[0.0, 1.0]])),
}


@pytest.mark.parametrize("kind", [*TEXTS, *FILES])
def test_a_broken_or_hostile_placement_file_is_an_input_error_that_names_it(tmp_path, kind):
    path = tmp_path / kind
    FILES.get(kind, lambda path: path.write_text(TEXTS[path.name]))(path)
    with pytest.raises(InputError, match=kind.replace(".", r"\.")):
        read_engine_map(path)
    assert list(tmp_path.iterdir()) == [path]


# By command.


@pytest.fixture
def folder(deepseek_path, tmp_path):
    """A finished working folder, its artefacts shared and its own files apart."""
    for each in (deepseek_path / "smoe-out").iterdir():
        (tmp_path / each.name).symlink_to(each)
    return tmp_path


@pytest.mark.parametrize("target", sorted(WRITERS))
def test_what_export_writes_import_reads_back_as_the_same_placement(deepseek_path, folder, target):
    document = smoe("export", "--to", target, "--json", "-C", folder, cwd=deepseek_path).json()
    assert document["layers"] > 0
    suffix = WRITERS[target][2]
    kept = folder / f"other{suffix}"
    smoe("export", "--to", target, "--out", kept, "-C", folder, cwd=deepseek_path)
    smoe(
        "import",
        kept,
        "--as",
        "placement",
        "--ep",
        8,
        "--name",
        "back",
        "--model",
        "tiny-deepseek",
        "-C",
        folder,
        cwd=folder,
    )
    before, after = (open_artefact(folder / name, "placement") for name in ("placement-ep8", "placement-ep8-back"))
    assert read_placement(before).map_sha256 == read_placement(after).map_sha256
    assert read_placement(before).layer_ids == read_placement(after).layer_ids
    smoe("inspect", kept, "--model", "tiny-deepseek", "--ep", 8, "--strict", cwd=folder)


def test_an_imported_placement_is_evaluated_like_one_that_was_solved(deepseek_path, folder):
    path = folder / "map.pt"
    smoe("export", "--to", "eplb", "--out", path, "-C", folder, cwd=deepseek_path)
    smoe("import", path, "--as", "placement", "--ep", 8, "--name", "back", "-C", folder, cwd=folder)
    other = deepseek_path / "other" / "trace"
    figures = [
        smoe("evaluate", "--placement", name, "--trace", other, "--json", "-C", folder, cwd=folder).json()["total"]
        for name in ("placement-ep8", "placement-ep8-back")
    ]
    assert figures[0] == figures[1]


def test_a_real_engines_placement_is_recognised_checked_and_exported(tmp_path):
    """Balanced over 16 ranks, as a serving stack ships one for DeepSeek-V3."""
    generator = np.random.default_rng(0)
    to_rank = np.stack([generator.permutation(np.repeat(np.arange(16), 16)) for _ in range(58)]).astype(np.uint8)
    path = tmp_path / "rearranged.npz"
    np.savez(path, expert_to_rank=to_rank, layer_ids=np.arange(3, 61, dtype=np.uint8), num_ranks=np.int32(16))
    smoe("import", path, "--as", "placement", "--model", "deepseek-v3", cwd=tmp_path)
    placement = read_placement(open_artefact(tmp_path / "smoe-out/placement-ep16", "placement"))
    assert (placement.expert_to_rank == to_rank).all()
    smoe("export", "--to", "sglang", "--model", "deepseek-v3", cwd=tmp_path)
    readers.sglang(
        tmp_path / "smoe-out/placement-ep16.sglang.json", hidden_layers=61, num_experts=256, redundant=0, ep_size=16
    )
    assert "map-only" in smoe("export", "--to", "vllm", "--model", "deepseek-v3", cwd=tmp_path, code=4).err


def test_vllm_takes_the_regrouped_checkpoint_under_linear_placement(deepseek_path, folder):
    said = smoe("export", "--to", "vllm", "-C", folder, cwd=deepseek_path).out
    assert "--enable-expert-parallel" in said
    assert "--expert-placement-strategy linear" in said
    assert "do not give --enable-eplb" in said


def test_the_regroup_that_vllm_needs_was_named_without_its_folder(deepseek_path, folder):
    (folder / "checkpoint-ep8").unlink(missing_ok=True)
    said = smoe("export", "--to", "vllm", "-C", folder, cwd=deepseek_path).out
    assert f"(write it first: smoe regroup --placement placement-ep8 -C {folder})" in said


def test_export_leaves_what_is_there_alone_without_force(deepseek_path, folder):
    path = folder / "there.json"
    path.write_text("mine")
    assert (
        "--force replaces it"
        in smoe("export", "--to", "sglang", "--out", path, "-C", folder, cwd=deepseek_path, code=4).err
    )
    assert path.read_text() == "mine"
    smoe("export", "--to", "sglang", "--out", path, "--force", "-C", folder, cwd=deepseek_path)
    assert "physical_to_logical_map" in path.read_text()


def test_export_for_a_model_of_other_layers_is_refused(folder):
    assert (
        "tiny-mixtral has"
        in smoe("export", "--to", "sglang", "--model", "tiny-mixtral", "-C", folder, cwd=folder, code=3).err
    )


def test_strict_inspection_of_a_broken_map_exits_5_and_says_what_is_wrong(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"physical_to_logical_map": [[0, 0, 1, 1]] * 5}))
    said = smoe("inspect", path, "--ep", 2, "--strict", "--model", "tiny-mixtral", cwd=tmp_path, code=3).err
    assert "decoder layers" in said
    np.savez(tmp_path / "map.npz", physical_to_logical_map=np.array([[0, 0, 1, 2]]), layer_ids=np.array([4]))
    said = smoe("inspect", tmp_path / "map.npz", "--ep", 2, "--strict", cwd=tmp_path, code=5).err
    assert "layer 4 holds expert 0 twice on rank 0" in said


def test_options_of_placements_do_not_go_with_traces(tmp_path):
    assert "add --as placement" in smoe("import", "x.npz", "--ep", 2, cwd=tmp_path, code=2).err
    assert (
        "does not say for how many ranks"
        in smoe("import", write(Target.EPLB, tmp_path)[1], "--as", "placement", cwd=tmp_path, code=2).err
    )
