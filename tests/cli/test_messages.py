"""What the program says, where it once said it in a library's words, too late, cut off, or left something behind."""

import json
import shutil

import numpy as np
import pytest

from tests.cli.processes import names
from tests.conftest import smoe

ROWS, EXPERTS, TOP_K = 40, 16, 2


@pytest.fixture
def short_trace(tmp_path):
    """A working folder whose trace has 40 rows of two layers of 16 experts."""
    generator = np.random.default_rng(0)
    ids = generator.random((2, ROWS, EXPERTS)).argsort(axis=2)[:, :, :TOP_K].astype(np.uint8)
    np.savez(tmp_path / "few.npz", ids=ids, tokens=generator.integers(0, 9, ROWS), num_experts=EXPERTS, top_k=TOP_K)
    smoe("import", "few.npz", "-C", "out", cwd=tmp_path)
    return tmp_path / "out"


def test_no_command_is_cut_short_in_the_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    listed = smoe("--help", cwd=".").out.partition("Commands:\n")[2].splitlines()
    assert listed
    assert all(line.endswith(".") and not line.endswith("...") and len(line) <= 80 for line in listed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cocluster", "--ep", "eight"], "'--ep': 'eight' is not a whole number."),
        (["cocluster", "--ep", "0"], "'--ep': '0' is not at least 1."),
        (["cocluster", "--ep", "4", "--mu", "x"], "'--mu': 'x' is not a number."),
        (["cocluster", "--ep", "4", "--theta", "2"], "'--theta': '2' is not at most 1.0."),
        (["regroup", "--layout", "foo"], "'--layout': 'foo' is not one of 'auto', 'checkpoint', 'map'."),
    ],
)
def test_a_value_that_an_option_does_not_take_is_refused_in_plain_words(words, said, tmp_path):
    error = smoe(*words, cwd=tmp_path, code=2).err
    assert said in error
    assert "Input should" not in error


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"no json\n", "JSON parse error"),
        ("a.txt", b"\x80\x81", "it is not text in UTF-8"),
        ("b.jsonl", json.dumps({"conversations": [{"from": "human"}]}).encode(), "there is no 'value'"),
    ],
)
def test_a_broken_data_set_is_described_without_a_class_of_python(name, content, said, model, tmp_path):
    (tmp_path / name).write_bytes(content)
    error = smoe("profile", "--model", model, "--dataset", name, cwd=tmp_path, code=3).err
    assert f"dataset {name} cannot be read ({said}" in error
    assert "Error:" not in error
    assert names(tmp_path) == {name}


def test_a_failed_import_leaves_no_empty_folder(tmp_path):
    for name, content, seen in (
        ("a.npz", b"words", "the text 'words'"),
        ("b.npz", b"\xfd7zXZ\0", "the bytes fd 37 7a"),
    ):
        (tmp_path / name).write_bytes(content)
        error = smoe("import", name, "-C", "new/out", cwd=tmp_path, code=3).err
        assert f"it begins with {seen}" in error
    assert names(tmp_path) == {"a.npz", "b.npz"}


def test_a_dry_run_makes_no_folder_and_shows_the_device(model, prompts, tmp_path):
    command = ("profile", "--model", model, "--dataset", f"{prompts}#few", "--dry-run", "-C", tmp_path / "out")
    assert "\ndevice: cpu (" in smoe(*command, cwd=tmp_path).out
    assert "\ndevice: cuda:1 (" in smoe(*command, "--device", "cuda:1", cwd=tmp_path).out
    assert names(tmp_path) == set()


def test_a_dry_run_shows_its_plan_though_the_trace_exists(model, prompts, made):
    command = ("profile", "--model", model, "--dataset", f"{prompts}#few", "--dry-run", "-C", made)
    shown = smoe(*command, cwd=".", code=4)
    assert "\ntokens: 768\n" in shown.out
    assert f"{made / 'trace'} exists already" in shown.err


def test_fewer_rows_than_experts_are_warned_of_and_go_through(short_trace, made):
    warned = smoe("build-tables", "-C", short_trace, cwd=".").err
    assert "validation rows are fewer than the 16 experts of a layer" in warned
    assert "fit" not in warned
    smoe("cocluster", "--ep", "2", "--effort", "fast", "--jobs", "1", "-C", short_trace, cwd=".")
    shutil.copytree(made / "trace", short_trace.parent / "enough/trace")
    assert "warning" not in smoe("build-tables", "-C", short_trace.parent / "enough", cwd=".").err


def test_inspected_tables_say_which_rows_and_whose_load_they_count(made):
    shown = " ".join(smoe("inspect", "tables", "-C", made, cwd=".").out.split())
    assert "seen in the rows counted (fit and validation; held-out rows are left out)" in shown
    assert "expert imbalance: load of the most used expert over the mean" in shown


def test_an_artefact_that_is_missing_is_not_called_no_artefact(made):
    error = smoe("inspect", "placement-ep8", "-C", made, cwd=".", code=3).err
    assert f"{made / 'placement-ep8'} is missing; {made} holds checkpoint-ep4, placement-ep4, tables, trace." in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluate", "--mode", "dp-ep", "--requests", "nope"], "nope cannot be read as requests (No such file"),
        (["inspect", "words"], "words is not valid JSON (it is not text in UTF-8)"),
        (["cocluster", "--ep", "2", "--rank-cost", "words"], "costs between ranks (it is not text in UTF-8)"),
        (["report", "--placement", "placement-ep2"], "placement-ep2; OUT holds placement-ep4."),
    ],
)
def test_a_file_that_cannot_be_used_is_described_without_pythons_words(words, said, made, tmp_path):
    (tmp_path / "words").write_bytes(b"\xfe\x81")
    error = smoe(*words, "-C", made, cwd=tmp_path, code=3).err
    assert said.replace("OUT", str(made)) in error
    assert "codec" not in error
    assert "Errno" not in error
