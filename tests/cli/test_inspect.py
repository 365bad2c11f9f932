"""smoe inspect as a user meets it: the document, 80 columns, one verdict, and its exit codes."""

import json
import os
import shutil
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest

from smoe_cli.app import run
from smoe_profiles.choices import Level
from tests.profiles.conftest import publish_trace
from tests.profiles.planted_traces import (
    LAYERS,
    decoding,
    lower_trace,
    plant,
    renumbered,
    routed_rows,
    two_sources,
    with_experts,
)

os.environ["HF_HUB_OFFLINE"] = "1"
KEYS = {"level", "rows", "sources", "phases", "layers", "lint", "verdict"}


def smoe(*arguments, code=0):
    """One command in this process: its stdout, lines and document. Fails with stderr if the exit code is another."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        found = run([str(argument) for argument in arguments])
    assert found == code, f"exit {found}\n{out.getvalue()}\n{err.getvalue()}"
    text = out.getvalue()
    return SimpleNamespace(
        out=text, lines=text.splitlines(), err=err.getvalue(), json=lambda: json.loads(text, parse_constant=pytest.fail)
    )


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A working folder of tiny-deepseek up to an evaluation, and the same text in float32 and bfloat16."""
    folder = tmp_path_factory.mktemp("inspect")
    for dtype in ("float32", "bfloat16"):
        command = (
            "profile",
            "--model",
            "tiny-deepseek",
            "--max-tokens",
            "4000",
            "--dtype",
            dtype,
            "-C",
            folder / dtype,
        )
        smoe(*command)
    for command in (["build-tables"], ["cocluster", "--ep", "8", "--effort", "fast", "--jobs", "1"]):
        smoe(*command, "-C", folder / "float32")
    for command in ("regroup", "evaluate"):
        smoe(command, "-C", folder / "float32")
    return folder


@pytest.fixture
def sick(tmp_path):
    """A trace whose layer 4 holds nothing but expert 0."""
    return plant(tmp_path / "trace", LAYERS, [with_experts(routed_rows(), 1, np.zeros((600, 2), np.uint16))])


# The bundled model.


def test_a_profile_of_the_bundled_model_is_healthy(profiled):
    found = smoe("inspect", "-C", profiled / "float32", "--strict", "--json").json()
    assert found.keys() >= KEYS
    assert found["lint"] == []
    assert found["verdict"] == "healthy: none of the known sick patterns in 4,000 rows of 3 MoE layers"
    assert found["rows"]["total"] == 4000
    assert sum(source["rows"] for source in found["sources"].values()) == 4000
    assert list(found["layers"]) == ["1", "2", "3"]
    for layer in found["layers"].values():
        assert sum(layer["load"]["share"]) == pytest.approx(1)
        assert layer["load"]["mean"] == 1 / 64
        assert layer["load"]["imbalance"] == pytest.approx(max(layer["load"]["share"]) * 64)
        assert layer["prediction"]["mean_f1"] > 0.4
        assert layer["concentration"]["hottest"] > 0.5


def test_the_human_form_fits_80_columns_and_ends_with_the_verdict(profiled):
    found = smoe("inspect", "-C", profiled / "float32", "--ep", "8")
    assert max(map(len, found.lines)) <= 80
    assert found.lines[-1].startswith("healthy: ")
    assert "EP 8" in found.out


def test_load_of_contiguous_ranks_is_the_sum_of_their_experts(profiled):
    layer = smoe("inspect", "-C", profiled / "float32", "--ep", "4", "--json").json()["layers"]["2"]
    assert layer["ranks"]["share"] == pytest.approx(np.array(layer["load"]["share"]).reshape(4, 16).sum(axis=1))


def test_a_profile_agrees_with_itself(profiled):
    trace = profiled / "float32/trace"
    found = smoe("inspect", trace, "--against", trace, "--strict", "--json").json()
    assert found["rows"] == {"matched": 4000, "only_here": 0, "only_there": 0}
    assert found["total"]["equal_share"] == found["total"]["jaccard"] == 1.0
    assert all(layer["equal"] == 4000 for layer in found["layers"].values())
    assert found["verdict"].startswith("same: 4,000 rows")


def test_two_number_formats_agree_but_for_ties_and_few_rows(profiled):
    traces = [profiled / dtype / "trace" for dtype in ("float32", "bfloat16")]
    found = smoe("inspect", traces[0], "--against", traces[1], "--json").json()
    assert found["same_model"]
    assert found["rows"]["matched"] == 4000
    for layer in found["layers"].values():
        assert 0.9 < layer["equal_share"] < 1
        assert layer["ties"] > 0
        assert layer["equal"] + layer["ties"] + layer["differing"] == 4000
        assert layer["equal_share"] < layer["jaccard"] < 1
    failed = smoe("inspect", traces[0], "--against", traces[1], "--strict", code=5)
    assert "differ by more than near ties" in failed.err
    assert failed.lines[-1].startswith("different: ")


# Traces.


def test_sickness_is_told_in_one_line_and_fails_only_when_strict(sick):
    told = smoe("inspect", sick.artefact.path)
    assert told.lines[-1] == "sick: layer 4: rows filled with expert 0"
    assert any(line.startswith("lint: layer 4: 600 of 600 rows") for line in told.lines)
    assert max(map(len, told.lines)) <= 80
    failed = smoe("inspect", sick.artefact.path, "--strict", "--json", code=5)
    assert failed.json()["lint"][0]["kind"] == "zero-filled"
    assert "sick: layer 4" in failed.err


def test_sources_and_phases_that_differ_show(tmp_path):
    one, other = two_sources(decoding(routed_rows(0)), decoding(routed_rows(1, first_sequence=100)))
    other.experts[0][other.phase == 1] = [0, 1, 2]
    found = smoe("inspect", plant(tmp_path / "trace", LAYERS, [one, other]).artefact.path, "--json").json()
    for kind, names in (("sources", {"prose", "code"}), ("phases", {"prefill", "decode"})):
        assert found[kind].keys() == names
        for facts in found[kind].values():
            distance = facts["load_distance"]
            assert distance["mean"] == pytest.approx(np.mean(list(distance["layers"].values())))
            assert distance["layers"]["1"] > 2 * distance["layers"]["4"] > 0
            assert facts["rows"] == facts["fit"] + facts["validation"] + facts["heldout"]
    assert found["sources"]["code"]["phases"] == {"prefill": 120, "decode": 480}


def test_two_models_in_one_trace_are_told(tmp_path):
    batches = two_sources(routed_rows(0), renumbered(routed_rows(1, first_sequence=100)))
    found = smoe("inspect", publish_trace(tmp_path / "trace", LAYERS, batches).artefact.path, "--strict", code=5)
    assert found.lines[-1] == "sick: rows of two models"
    assert "agreement" in found.out


@pytest.mark.parametrize("level", [Level.TOKEN_COUNT, Level.PAIR, Level.COUNT])
def test_every_level_is_shown_and_says_what_it_lacks(level, tmp_path):
    path = lower_trace(tmp_path / "trace", level, routed_rows()).artefact.path
    found = smoe("inspect", path, "--ep", "4", "--strict", "--json").json()
    assert found["level"] == level.value
    assert found["sources"] == found["phases"] == {}
    assert found["layers"]["1"]["ranks"]["imbalance"] >= 1
    told = smoe("inspect", path)
    assert any(line.startswith("not there: no rows") for line in told.lines)
    assert max(map(len, told.lines)) <= 80


def test_experts_never_used_and_layers_never_hit_give_no_nan(tmp_path):
    rows = routed_rows()
    rows = replace(rows, experts=[np.minimum(rows.experts[0], 12), np.full((600, 2), 12, np.uint16)])
    found = smoe("inspect", plant(tmp_path / "trace", LAYERS, [rows]).artefact.path, "--ep", "2", "--json").json()
    assert found["layers"]["1"]["unused"] == [13, 14, 15]
    empty = found["layers"]["4"]
    assert empty["unused"] == list(range(12))
    assert empty["load"]["imbalance"] is empty["ranks"]["imbalance"] is None
    assert {finding["kind"] for finding in found["lint"] if finding["layer"] == "4"} >= {"no-rows", "out-of-range"}
    smoe("inspect", tmp_path / "trace")


def test_an_ep_that_does_not_divide_is_refused_with_those_that_do(sick):
    failed = smoe("inspect", sick.artefact.path, "--ep", "5", code=4)
    assert "16 experts (layer 1)" in failed.err
    assert "Valid --ep: 2, 4, 8, 16" in failed.err


def test_a_comparison_needs_rows_on_both_sides(sick, tmp_path):
    counts = lower_trace(tmp_path / "counts", Level.COUNT, routed_rows()).artefact.path
    assert "level count" in smoe("inspect", sick.artefact.path, "--against", counts, code=4).err
    assert "--ep" in smoe("inspect", sick.artefact.path, "--against", sick.artefact.path, "--ep", "2", code=2).err


# Other artefacts.


def test_an_artefact_is_named_by_path_or_in_the_working_folder(profiled):
    folder = profiled / "float32"
    one = smoe("inspect", "placement-ep8", "-C", folder, "--json").json()
    assert one == smoe("inspect", folder / "placement-ep8", "--json").json()
    assert smoe("inspect", "-C", folder, "--json").json()["kind"] == "trace"


KINDS = ["tables", "placement", "checkpoint", "evaluation"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_artefact_says_what_it_is_and_where_it_came_from(kind, profiled):
    name = kind if kind == "tables" else f"{kind}-ep8"
    found = smoe("inspect", name, "-C", profiled / "float32", "--hashes", "--strict", "--json").json()
    assert found["kind"] == kind
    assert found["parents"]
    assert all(parent["state"] == "found" for parent in found["parents"])
    assert found["bytes"] > 0
    told = smoe("inspect", name, "-C", profiled / "float32")
    assert max(map(len, told.lines)) <= 80
    assert told.lines[-1].startswith("whole: ")


def test_a_placement_shows_its_goal_gains_and_the_load_of_its_ranks(profiled):
    found = smoe("inspect", "placement-ep8", "-C", profiled / "float32", "--json").json()
    trace = smoe("inspect", "-C", profiled / "float32", "--ep", "8", "--json").json()
    assert found["parameters"]["goal"] == "blend"
    assert found["ranks"] == 8
    for name, layer in found["layers"].items():
        assert layer["rank_imbalance"]["placed"] >= 1
        assert layer["top_k"] == 6
        # of fit and validation rows, where the trace's figure is of all
        assert layer["rank_imbalance"]["contiguous"] == pytest.approx(
            trace["layers"][name]["ranks"]["imbalance"], rel=0.3
        )
    checkpoint = smoe("inspect", "checkpoint-ep8", "-C", profiled / "float32", "--json").json()
    for name, layer in checkpoint["layers"].items():
        assert layer["rank_imbalance"] == found["layers"][name]["rank_imbalance"]


def test_an_evaluation_shows_its_six_states(profiled):
    found = smoe("inspect", "evaluation-ep8", "-C", profiled / "float32")
    for state in ("contiguous", "placed", "placed+shuffled (token)", "oracle"):
        assert state in found.out


def test_a_placement_whose_tables_were_made_again_is_stale(profiled, tmp_path):
    folder = shutil.copytree(profiled / "float32", tmp_path / "out")
    smoe("build-tables", "--seed", "1", "--force", "-C", folder)
    found = smoe("inspect", "placement-ep8", "-C", folder, "--strict", code=5)
    assert found.lines[-1].startswith("stale: made from tables ")
    assert "not there: the tables" in found.out
    shutil.rmtree(folder / "tables")
    found = smoe("inspect", "placement-ep8", "-C", folder, "--strict", "--json").json()
    assert [parent["state"] for parent in found["parents"]] == ["absent"]


def test_changed_contents_are_found_on_request(profiled, tmp_path):
    folder = shutil.copytree(profiled / "float32/tables", tmp_path / "tables")
    path = folder / "counts_01.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    smoe("inspect", folder)
    assert "does not have the contents" in smoe("inspect", folder, "--hashes", code=3).err


def test_what_is_no_artefact_is_refused_with_what_is_there(profiled, tmp_path):
    assert "name one of" in smoe("inspect", profiled / "float32", code=3).err
    assert "it is no artefact" in smoe("inspect", tmp_path, code=3).err
    (tmp_path / "manifest.json").write_text("[]")
    assert "not a smoe manifest" in smoe("inspect", tmp_path, code=3).err
    assert "--ep is for traces" in smoe("inspect", profiled / "float32/tables", "--ep", "8", code=2).err
