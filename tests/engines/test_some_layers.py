"""Placements unlike what an engine's file asks: of some layers, of a model not named, of ranks of unlike size."""

import json

import numpy as np
import pytest

from smoe_cli.engines.files import WRITERS
from smoe_cli.placement import read_placement
from smoe_profiles.artefact import open_artefact
from tests.conftest import smoe
from tests.engines import readers
from tests.report.test_document import routed

MODEL = "tiny-mixtral"
"""Three MoE layers of 8 experts, of which a trace here has two."""

IN_ORDER = {0: [[0, 1, 2, 3], [4, 5, 6, 7]], 2: [[0, 1, 2, 3, 4], [5, 6, 7, 0, 1]]}
"""By redundant slots, the experts of both ranks in a layer without a record."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two placements of the layers 0 and 1, one with copies."""
    path = tmp_path_factory.mktemp("some")
    smoe("import", routed(path, "some", 3, rows=800, layers=2), "--model", MODEL, cwd=path)
    smoe("build-tables", cwd=path)
    for more in ((), ("--redundant", 1, "--name", "copies")):
        smoe("cocluster", "--ep", 2, "--effort", "fast", "--jobs", 1, *more, cwd=path)
    return path


def held(path, target, redundant):
    """Experts of each rank in every layer, in order, as the engine reads them."""
    reads = {
        "sglang": lambda: readers.sglang(path, hidden_layers=3, num_experts=8, redundant=redundant, ep_size=2),
        "trtllm": lambda: readers.trtllm(path, moe_layers=(0, 1, 2), mtp_layers=(), ep_size=2),
        "eplb": lambda: readers.eplb(path, num_experts=8, ep_size=2),
        "ascend": lambda: readers.ascend(path, ep_size=2),
    }
    return list(reads[target.split("-")[0]]().values())


@pytest.mark.parametrize("name", ["placement-ep2", "placement-ep2-copies"])
@pytest.mark.parametrize("target", sorted(WRITERS))
def test_a_file_of_some_layers_lacked_the_others_and_an_engine_took_them_by_position(folder, tmp_path, target, name):
    path = tmp_path / f"file{WRITERS[target][2]}"
    said = smoe("export", "--to", target, "--placement", name, "--out", path, cwd=folder).out
    assert "3 MoE layers" in said
    assert f"layers not in {name}, with their experts in order: 1" in said
    placement = read_placement(open_artefact(folder / "smoe-out" / name, "placement"))
    copies = placement.physical_to_logical.shape[1] - 8
    rows = [readers.chunks(row, 2) for row in placement.physical_to_logical.tolist()]
    assert held(path, target, copies) == [*rows, IN_ORDER[copies]]
    smoe("inspect", path, "--model", MODEL, "--ep", 2, "--strict", cwd=tmp_path)


@pytest.mark.parametrize("named", [(), ("--model", MODEL)])
@pytest.mark.parametrize("name", ["placement-ep2", "placement-ep2-copies"])
def test_an_import_of_more_layers_than_the_tables_have_was_a_bug_in_smoe(folder, tmp_path, name, named):
    path = tmp_path / "map.json"
    smoe("export", "--to", "sglang", "--placement", name, "--out", path, cwd=folder)
    imported = ("import", path, "--as", "placement", "--ep", 2, *named, "--name", "back", "--force")
    assert (
        "left out, as the tables have no counts of them: 1 layers with experts in order"
        in smoe(*imported, cwd=folder).err
    )
    before, after = (
        read_placement(open_artefact(folder / "smoe-out" / each, "placement")) for each in (name, "placement-ep2-back")
    )
    assert (before.layer_ids, before.map_sha256) == (after.layer_ids, after.map_sha256)


def test_experts_moved_in_a_layer_that_the_tables_do_not_have_are_not_dropped(folder, tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"physical_to_logical_map": [list(range(8)), list(range(8)), [7, 1, 2, 3, 4, 5, 6, 0]]}))
    imported = ("import", path, "--as", "placement", "--ep", 2, "--name", "moved")
    assert "moves experts of layer 2" in smoe(*imported, cwd=folder, code=3).err


@pytest.mark.parametrize(
    ("first", "experts", "said"),
    [(1, 8, "does not have layer 0"), (0, 64, "names expert 63 of 8"), (0, 4, "does not hold expert 4")],
)
def test_a_map_of_another_model_than_the_tables_is_refused(folder, tmp_path, first, experts, said):
    path = tmp_path / "map.npz"
    to_rank = np.tile(np.repeat([0, 1], experts // 2), (3, 1))
    np.savez(path, expert_to_rank=to_rank, layer_ids=np.arange(first, first + 3))
    assert said in smoe("import", path, "--as", "placement", "--name", "other", cwd=folder, code=3).err


def test_a_map_of_another_model_named_beside_the_tables_was_a_bug_in_smoe(folder, tmp_path):
    path = tmp_path / "map.npz"
    np.savez(path, expert_to_rank=np.tile(np.repeat([0, 1], 30), (24, 1)))
    imported = ("import", path, "--as", "placement", "--model", "qwen1.5-moe-a2.7b", "--name", "other")
    assert "is for another model than smoe-out/tables" in smoe(*imported, cwd=folder, code=3).err


def test_rows_of_layers_that_an_unknown_models_tables_do_not_have_were_dropped_in_silence(tmp_path):
    smoe("import", routed(tmp_path, "some", 3, rows=800, layers=2), cwd=tmp_path)
    smoe("build-tables", cwd=tmp_path)
    rows = np.array([[0, 1, 2, 3, 4, 5, 6, 7]] * 2 + [[7, 1, 2, 3, 4, 5, 6, 0]])
    np.savez(tmp_path / "map.npz", physical_to_logical_map=rows, layer_ids=[0, 1, 2])
    imported = ("import", "map.npz", "--as", "placement", "--ep", 2)
    assert "moves experts of layer 2" in smoe(*imported, cwd=tmp_path, code=3).err
    np.savez(tmp_path / "map.npz", physical_to_logical_map=rows[[2, 1, 0]], layer_ids=[0, 1, 2])
    assert "no counts of them: 1 layers" in smoe(*imported, cwd=tmp_path).err


def test_sglangs_rows_of_layers_that_an_unknown_models_tables_do_not_have_were_dropped_in_silence(tmp_path):
    smoe("import", routed(tmp_path, "some", 3, rows=800, layers=2), "--layer-ids", "0,2", cwd=tmp_path)
    smoe("build-tables", cwd=tmp_path)
    plain, moved = list(range(8)), [7, 1, 2, 3, 4, 5, 6, 0]
    path, imported = tmp_path / "map.json", ("import", "map.json", "--as", "placement", "--ep", 2)
    path.write_text(json.dumps({"physical_to_logical_map": [plain, moved, plain]}))
    assert "moves experts of layer 1" in smoe(*imported, cwd=tmp_path, code=3).err
    path.write_text(json.dumps({"physical_to_logical_map": [moved, plain, moved]}))
    assert "no counts of them: 1 layers" in smoe(*imported, cwd=tmp_path).err
    placement = read_placement(open_artefact(tmp_path / "smoe-out" / "placement-ep2", "placement"))
    assert placement.layer_ids == (0, 2)
    assert placement.physical_to_logical.tolist() == [moved, moved]


def test_a_placement_without_a_model_was_told_to_be_damaged(tmp_path):
    np.savez(tmp_path / "map.npz", expert_to_rank=np.array([[0, 1, 0, 1]]), layer_ids=[3])
    smoe("import", "map.npz", "--as", "placement", cwd=tmp_path)
    refused = smoe("report", cwd=tmp_path, code=3).err
    assert "was imported without its model or tables" in refused
    assert "--model M --force" in refused
    shown = smoe("inspect", "placement-ep2", cwd=tmp_path).out
    assert "4 experts" in shown
    assert "None" not in shown
    assert "smoe-out holds no trace" in smoe("export", "--to", "sglang", cwd=tmp_path, code=2).err


def test_ranks_of_unlike_size_are_what_vllm_serves_of_the_regrouped_checkpoint(deepseek_path, tmp_path):
    for name in ("trace", "tables"):
        (tmp_path / name).symlink_to(deepseek_path / "smoe-out" / name)
    smoe("cocluster", "--ep", 3, "--uneven", "--effort", "fast", "--jobs", 1, "-C", tmp_path, cwd=tmp_path)
    smoe("regroup", "-C", tmp_path, cwd=tmp_path)
    said = smoe("export", "--to", "vllm", "-C", tmp_path, cwd=tmp_path).out
    assert f"vllm serve {tmp_path / 'checkpoint-ep3'} --tensor-parallel-size 3" in said
    assert "do not give a DeepEP all-to-all backend" in said
    placement = read_placement(open_artefact(tmp_path / "checkpoint-ep3", "checkpoint"))
    for layer, row in enumerate(placement.physical_to_logical):
        for rank, first, last in (
            (0, 0, 22),
            (1, 22, 43),
            (2, 43, 64),
        ):  # vLLM: E // G each, the first E mod G one more
            assert sorted(row[first:last]) == np.flatnonzero(placement.expert_to_rank[layer] == rank).tolist()
    assert "no engine's map can say that" in smoe("export", "--to", "ascend", "-C", tmp_path, cwd=tmp_path, code=4).err
