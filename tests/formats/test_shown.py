"""What the pages of docs/formats/ show to write is read as they say, and machines and benches are all told of."""

import inspect
import json
import re
from collections import Counter
from contextlib import chdir

import numpy as np
import pytest

from smoe_cli.evaluation.requests import read_arrivals
from smoe_cli.hardware import load_hardware
from smoe_cli.runtime import bench
from smoe_solvers.layer_time import Stage
from tests.conftest import smoe
from tests.formats.pages import PAGES, ROOT, page, said_on, written_keys
from tests.formats.readers import (
    read_trace,
)


def test_the_hardware_model_on_the_page_is_one(tmp_path):
    text = re.search(r"^```json\n(.*?)^```", (PAGES / "machines.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    (tmp_path / "mine.json").write_text(text)
    found = load_hardware(str(tmp_path / "mine.json"))
    assert found.name == "two of these"
    assert found.curves[Stage.DISPATCH](0).item() == 6.0e-06


def test_the_archive_on_the_page_is_imported_as_it_says(tmp_path):
    [text] = re.findall(r"^```python\n(.*?)^```", page("inputs"), re.MULTILINE | re.DOTALL)
    made = {}
    with chdir(tmp_path):
        exec(compile(text, "inputs.md", "exec"), made)  # the page is ours
    smoe("import", "mine.npz", cwd=tmp_path)
    found = read_trace(tmp_path / "smoe-out/trace")
    assert found["token_id"] == made["tokens"].tolist()
    assert Counter(found["sequence"]) == {0: 200, 1: 150, 2: 250}
    for label, ids in zip(("03", "04"), made["ids"], strict=True):
        assert found[f"experts_{label}"] == np.sort(ids, axis=1).tolist()


@pytest.mark.parametrize("time", [{"t_s": 1.5}, {"timestamp_ms": 1500}])
def test_requests_are_read_as_the_page_says(time, tmp_path):
    late, early = ({"input_length": 3, "output_length": 2, "more": True}, {"input_length": 7, "output_length": 0})
    lines = [json.dumps(time | late), json.dumps(dict.fromkeys(time, 0) | early)]
    (tmp_path / "requests.jsonl").write_text("\n".join(lines))
    assert read_arrivals(tmp_path / "requests.jsonl").tolist() == [[0, 7, 0], [1.5, 3, 2]]


def test_the_options_on_the_page_are_taken(tmp_path):
    [text] = re.findall(r"^```toml\n(.*?)^```", page("inputs"), re.MULTILINE | re.DOTALL)
    (tmp_path / "smoe.toml").write_text(text)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"text": "one document " * 40}) + "\n")
    found = smoe("profile", "--config", "smoe.toml", "--dry-run", "--json", cwd=tmp_path).json()
    assert found["model"] == "tiny-mixtral"
    (tmp_path / "wrong.toml").write_text("nothing = 1")
    smoe("profile", "--config", "wrong.toml", cwd=tmp_path, code=2)


def test_every_key_of_the_published_benches_and_of_hardware_models_is_on_the_page():
    said = said_on(page("machines"))
    benches = sorted((ROOT / "docs/results").glob("bench-*.json"))
    assert benches
    for path in benches:
        found = json.loads(path.read_text())
        found["machine"]["environment"] = {}
        if "hardware" in found:  # measured on GPUs
            found["hardware"]["provenance"] = {}
        assert written_keys(found, skip=("workloads",)) - said == set()
    for path in (ROOT / "smoe_cli/hardware").glob("*.json"):
        assert written_keys(json.loads(path.read_text()) | {"provenance": {}}) - said <= {"provenance"}


def test_every_key_that_a_bench_would_write_today_is_on_the_page():
    """Published benches may be older than the program: keys are read from the source too."""
    said = said_on(page("machines"))
    cases = (bench.prepare_case, bench.Prepared.document, bench.attended_layers)
    for function in (*cases, bench.compare, bench.machine, bench.hardware_model, bench.run):
        keys = set(re.findall(r'"(\w+)": ', inspect.getsource(function)))
        assert keys
        assert keys - said == set()
