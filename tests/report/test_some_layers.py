"""A trace of some of a model's MoE layers goes the whole way: reported, exported as a map, never as a checkpoint."""

import shutil

import pytest

from tests.conftest import smoe
from tests.report.test_document import routed


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each command said of two of the three MoE layers of tiny-mixtral, and where."""
    path = tmp_path_factory.mktemp("some")
    smoe("import", routed(path, "some", 3, rows=800, layers=2), "--model", "tiny-mixtral", cwd=path)
    smoe("build-tables", cwd=path)
    placed = smoe("cocluster", "--ep", 4, "--effort", "fast", "--jobs", 1, cwd=path)
    measured = smoe("evaluate", "--batch", 64, cwd=path)
    return path, placed.err, measured.err


def test_a_report_on_some_layers_was_refused_as_damaged(said):
    document = smoe("report", "--json", cwd=said[0]).json()
    assert "tiny-mixtral: 2 of 3 MoE layers of 8 experts" in document["title"]
    assert document["layers"] == [0, 1]
    assert len(document["sections"]["expert_load"]["load"]) == 2
    assert "has 2 of the model's 3 MoE layers" in document["verdict"]["map_only"]
    assert {one["engine"]: one["takes"] for one in document["verdict"]["engines"]}["vLLM"] == "no"


def test_the_page_on_some_layers_is_drawn(said):
    pytest.importorskip("plotly")
    assert "2 of 3 MoE layers" in smoe("report", cwd=said[0]).out


def test_export_of_some_layers_to_vllm_was_a_bug_in_smoe(said):
    refused = smoe("export", "--to", "vllm", cwd=said[0], code=4).err
    assert "places 2 of 3 MoE layers of tiny-mixtral" in refused
    assert "no whole checkpoint" in refused
    smoe("export", "--to", "sglang", cwd=said[0])


def test_the_step_after_placing_some_layers_was_a_regroup_that_refuses(said):
    _, placed, measured = said
    assert "next: smoe evaluate --placement placement-ep4" in placed
    assert "next: smoe report --placement placement-ep4" in measured
    smoe("regroup", cwd=said[0], code=3)


def test_the_step_of_a_trace_that_names_no_model_failed_when_pasted(said, tmp_path):
    shutil.copytree(said[0] / "smoe-out", tmp_path / "smoe-out")
    (tmp_path / "smoe-out/trace/run.json").unlink()
    smoe("export", "--to", "sglang", cwd=tmp_path, code=2)
    takes = smoe("report", "--json", cwd=tmp_path).json()["verdict"]["engines"][0]
    assert takes["command"] == "smoe export --to sglang --model MODEL"
