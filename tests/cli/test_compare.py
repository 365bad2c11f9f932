"""smoe cocluster --compare, --method and what is proved: figures recounted from the trace, nothing written."""

import json
import sys

import numpy as np
import pytest

from smoe_profiles.trace import open_trace
from smoe_solvers.choices import Method
from tests.conftest import smoe
from tests.solvers.reference import clustered_rows, lar_of_exact_shuffle, mean_fanout, one_hot

RANKS = 2


def traced(folder, experts, top_k, rows, ids, sequences=30):
    """Two layers of clustered routing, imported and counted. Returns the folder."""
    generator = np.random.default_rng(7)
    routed = np.stack([clustered_rows(generator, rows, experts, top_k, 3) for _ in range(2)])
    folder.mkdir()
    np.savez(
        folder / "rows.npz",
        ids=routed.astype(np.uint8),
        tokens=generator.integers(0, ids, rows).astype(np.uint32),
        seq_len=np.full(sequences, rows // sequences, np.int32),
        layer_ids=np.array([3, 4], np.uint8),
        num_experts=experts,
        top_k=top_k,
        vocab_size=ids,
    )
    smoe("import", "rows.npz", "-C", "out", cwd=folder)
    smoe("build-tables", "-C", "out", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return traced(tmp_path_factory.mktemp("compare") / "a", 12, 2, 1500, 40)


@pytest.fixture(scope="module")
def compared(folder):
    return smoe(
        "cocluster", "--ep", RANKS, "--compare", "--json", "--jobs", 1, "--effort", "fast", "-C", "out", cwd=folder
    ).json()


def test_all_methods_are_shown_and_nothing_is_written(folder, compared):
    assert set(compared["methods"]) == set(Method)
    assert compared["skipped"] == {}
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["tables", "trace"]


def test_methods_have_the_time_of_the_search(compared):
    budget = compared["seconds_a_layer"]
    assert compared["methods"]["ce"]["seconds"] == budget
    for name, found in compared["methods"].items():
        if name in ("contiguous", "load"):
            assert found["starts"] == 1
        elif name not in ("ce", "exact"):
            assert found["seconds"] >= budget


def test_the_best_of_all_placements_is_found_by_exact(compared):
    least = compared["methods"]["exact"]["searched"]
    assert all(found["searched"] >= least - 1e-12 for found in compared["methods"].values())
    assert compared["methods"]["contiguous"]["searched"] > least


def test_held_out_figures_of_contiguous_are_a_recount_of_the_trace(folder, compared):
    trace = open_trace(folder / "out/trace")
    placement = np.repeat([0, 1], 6)
    counted = {"lar": [], "fanout": [], "load_imbalance": [], "objective": []}
    for index in trace.layers:
        rows = trace.experts(index, "heldout")
        starts = [*range(0, len(rows), 1024), len(rows)]
        demand = one_hot(rows, 12)
        counted["lar"].append(lar_of_exact_shuffle(demand, np.arange(len(rows)), starts, placement, RANKS) / 2)
        counted["fanout"].append(mean_fanout(rows.tolist(), placement))
        load = np.bincount(placement[rows.reshape(-1)], minlength=RANKS)
        counted["load_imbalance"].append(load.max() / load.mean())
        deviation = np.abs(load - load.mean()).sum() / load.sum()
        fanout = float(counted["fanout"][-1]) / 2
        counted["objective"].append(0.9 * (1 - counted["lar"][-1]) + 0.1 * deviation + 0.25 * fanout)
    found = compared["methods"]["contiguous"]["heldout"]
    for name, values in counted.items():
        assert found[name] == pytest.approx(float(np.mean([float(value) for value in values]))), name


def test_the_table_names_every_method_and_what_was_held_out(folder):
    shown = smoe(
        "cocluster",
        "--ep",
        RANKS,
        "--compare",
        "--effort",
        "fast",
        "--goal",
        "fanout",
        "--jobs",
        1,
        "-C",
        "out",
        cwd=folder,
    )
    for method in Method:
        assert method.value in shown.out
    assert "heldout rows" in shown.out
    assert "skipped" not in shown.out


def test_without_a_trace_validation_judges_and_evaluate_is_named(folder):
    smoe("build-tables", "--trace", folder / "out/trace", "-C", "alone", cwd=folder)
    shown = smoe("cocluster", "--ep", RANKS, "--compare", "--effort", "fast", "--jobs", 1, "-C", "alone", cwd=folder)
    assert "validation rows" in shown.out
    assert "smoe evaluate judges" in " ".join(shown.out.split())


def test_methods_whose_package_is_missing_are_skipped_with_the_pip_line(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    found = smoe(
        "cocluster", "--ep", RANKS, "--compare", "--json", "--jobs", 1, "--effort", "fast", "-C", "out", cwd=folder
    ).json()
    assert found["skipped"] == {"metis": "needs pymetis; pip install smoe[bench]"}
    assert "metis" not in found["methods"]


def test_a_method_whose_package_is_missing_exits_6(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    failed = smoe("cocluster", "--ep", RANKS, "--method", "metis", "--jobs", 1, "-C", "out", cwd=folder, code=6)
    assert "pymetis is not installed; pip install smoe[bench]." in failed.err


@pytest.mark.parametrize("method", ["kmeans2d", "exact", "ce-plain"])
def test_a_placement_by_any_method_says_how_it_was_found(folder, method):
    name = ["--name", method]
    smoe("cocluster", "--ep", RANKS, "--method", method, *name, "--jobs", 1, "-C", "out", cwd=folder)
    lines = (folder / f"out/placement-ep2-{method}/solver.jsonl").read_text().splitlines()
    origins = {json.loads(line)["origin"] for line in lines}
    assert origins == {"enumeration" if method == "exact" else method}


def test_a_proved_placement_says_so_and_a_bound_shows_its_gap(folder):
    shown = smoe("cocluster", "--ep", RANKS, "--name", "proved", "--jobs", 1, "-C", "out", cwd=folder)
    line = json.loads((folder / "out/placement-ep2-proved/solver.jsonl").read_text().splitlines()[0])
    assert line["certificate"] == {
        "kind": "optimal", "value": line["objective"], "gap": 0.0, "pairs": None, "pairs_bound": None,
    }  # fmt: skip
    assert "gap to the best possible objective: at most 0.0%" in shown.out
    shown = smoe("cocluster", "--ep", 2, "--method", "ils", "--name", "b", "--jobs", 1, "-C", "out", cwd=folder)
    known = json.loads((folder / "out/placement-ep2-b/solver.jsonl").read_text().splitlines()[0])["certificate"]
    assert known["kind"] == "bound"
    assert known["value"] <= line["objective"]
    assert known["pairs"] <= known["pairs_bound"]
    assert "co-activation kept inside ranks" in shown.out


def test_an_exact_answer_out_of_reach_exits_4(tmp_path):
    large = traced(tmp_path / "b", 64, 2, 900, 600)
    failed = smoe("cocluster", "--ep", 16, "--method", "exact", "--jobs", 1, "-C", "out", cwd=large, code=4)
    assert "layer 3: the exact programme would have" in failed.err
    assert not (large / "out/placement-ep16").exists()
