"""Faults that tools of this kind have had while recording, each named after what went wrong.

Others of the kind are held elsewhere: padding on either side, chunks, generation and batch mates in
`test_family_batches.py` and `test_capture.py`; rules rebuilt from router logits, group limits and fused shared experts
in `test_family_capture.py`; stale rows, statistics over padding and experts never used in `test_inspection.py`.
"""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from smoe_profiles import trace_writer
from smoe_profiles.capture.loading import LoadOptions, load_model
from smoe_profiles.capture.points import capture_points, read_choice
from smoe_profiles.capture.profile import BEHIND, CaptureOptions, record, trace_layers
from smoe_profiles.choices import Level
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.families.config import read_spec
from smoe_profiles.models import find_model
from smoe_profiles.split import Assigned, Document
from smoe_profiles.tensors import read_json
from smoe_profiles.trace import open_trace
from smoe_profiles.trace_writer import TraceWriter
from tests.profiles.tiny_models import VOCAB


@pytest.fixture(scope="module")
def olmoe(tiny):
    model = find_model(str(tiny("olmoe")))
    return model, load_model(model, LoadOptions("float32"))


def documents(count, length=20):
    generator = np.random.default_rng(0)
    return [
        Assigned(Document(generator.integers(1, VOCAB, length).astype(np.uint32), "text"), "fit") for _ in range(count)
    ]


def recorded(olmoe, docs, folder):
    model, loaded = olmoe
    folder.mkdir()
    writer = TraceWriter(folder, trace_layers(model), ["text"])
    record(model, loaded, docs, writer, CaptureOptions(["text"]), lambda _: None)
    writer.close()
    return pq.read_table(folder / "part-00000.parquet")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing its compiler
def test_hooks_on_a_compiled_model_never_ran(olmoe):
    model, loaded = olmoe
    with pytest.raises(ImpossibleError, match="compiled"):
        capture_points(torch.compile(loaded, backend="eager"), model.spec)


def test_a_fast_path_that_bypasses_the_experts_recorded_nothing(olmoe, tmp_path, monkeypatch):
    """A kernel that replaces the whole block: the experts' module is never called, and the first batch says so."""
    block = olmoe[1].base_model.layers[1].mlp
    monkeypatch.setattr(block, "forward", lambda hidden, *_args, **_kwargs: hidden)
    with pytest.raises(RuntimeError, match="layer 1 were never called"):
        recorded(olmoe, documents(1), tmp_path / "trace")


def test_an_aborted_request_lost_its_rows(olmoe, tmp_path):
    """Every token of every document has its row, one after another."""
    docs = documents(40, length=23)
    table = recorded(olmoe, docs, tmp_path / "trace")
    expected = [(number, position) for number in range(40) for position in range(23)]
    assert list(zip(table["sequence"].to_pylist(), table["position"].to_pylist(), strict=True)) == expected


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_expert_ids_of_another_integer_width_did_not_fit(kind, olmoe):
    point = capture_points(olmoe[1], olmoe[0].spec)[0]
    ids = torch.tensor([[0, 5, 7]], dtype=kind)
    found, weights = read_choice(point, (torch.zeros(1, 32), ids, torch.ones(1, 3)), {})
    assert (found.tolist(), weights.tolist()) == ([[0, 5, 7]], [[1, 1, 1]])


def test_a_fused_shared_expert_added_a_column(olmoe):
    point = capture_points(olmoe[1], olmoe[0].spec)[0]
    with pytest.raises(ImpossibleError, match="does not show 3 experts"):
        read_choice(point, (torch.zeros(1, 32), torch.tensor([[0, 5, 7, 8]]), torch.ones(1, 4)), {})


def test_an_id_beyond_the_last_expert_reached_the_counter(olmoe, tmp_path, monkeypatch):
    def beyond(*_):
        return torch.tensor([[0, 1, 8]] * 20), torch.ones(20, 3)

    monkeypatch.setattr("smoe_profiles.capture.recorder.read_choice", beyond)
    with pytest.raises(InputError, match=r"layer 0 holds expert id 8; it has 8 experts"):
        recorded(olmoe, documents(1), tmp_path / "trace")


def test_host_memory_grew_with_the_number_of_tokens(olmoe, tmp_path, monkeypatch):
    """What waits to be written stays below a row group and the batches that may wait."""
    monkeypatch.setattr(trace_writer, "ROW_GROUP", 512)
    waiting = []
    append = TraceWriter.append

    def watched(self, rows):
        append(self, rows)
        waiting.append(self._pending_rows)

    monkeypatch.setattr(TraceWriter, "append", watched)
    table = recorded(olmoe, documents(40 * BEHIND), tmp_path / "trace")
    assert len(table) == 40 * BEHIND * 20
    assert max(waiting) < 512


def test_a_run_did_not_say_with_which_batches_and_number_format_it_was_made(tiny, tmp_path, run_smoe):
    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "w1 w2 w3"}) + "\n")
    run_smoe("profile", "--model", tiny("olmoe"), "--dataset", "p.jsonl", "--dtype", "float32", "-q", cwd=tmp_path)
    parameters = read_json(tmp_path / "smoe-out/trace/manifest.json")["parameters"]
    assert (parameters["dtype"], parameters["batch_tokens"]) == ("float32", 4096)
    assert parameters["documents"]["tokens"] == 3


def test_the_same_run_twice_gave_other_rows(olmoe, tmp_path):
    one, two = (recorded(olmoe, documents(30), tmp_path / name) for name in ("one", "two"))
    assert one.equals(two)


def test_dropout_or_noise_was_on_while_recording(tiny):
    loaded = load_model(find_model(str(tiny("jamba"))), LoadOptions("float32"))
    assert not any(part.training for part in loaded.modules())


@pytest.mark.parametrize("model_type", ["switch_transformers", "nllb-moe"])
def test_a_router_that_returns_probabilities_for_logits_was_trusted(model_type):
    with pytest.raises(ImpossibleError, match=model_type):
        read_spec({"model_type": model_type, "num_experts": 8}, "config.json")


def test_prompts_that_changed_while_they_were_read_gave_fewer_rows(tiny, tmp_path, run_smoe, monkeypatch):
    from smoe_cli import recording

    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "w1 w2 w3"}) + "\n")
    survey = recording.survey

    def then_cut(stream):
        found = survey(stream)
        (tmp_path / "p.jsonl").write_text(json.dumps({"text": "w1 w2"}) + "\n")
        return found

    monkeypatch.setattr(recording, "survey", then_cut)
    command = ["profile", "--model", tiny("olmoe"), "--dataset", "p.jsonl"]
    assert "2 rows were recorded of 3 tokens" in run_smoe(*command, cwd=tmp_path, code=3).err
    assert not (tmp_path / "smoe-out/trace").exists()


def test_counts_by_token_were_taken_for_rows(tiny, tmp_path, run_smoe):
    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "w1 w2 w3"}) + "\n")
    run_smoe("profile", "--model", tiny("olmoe"), "--dataset", "p.jsonl", "--no-order", "-q", cwd=tmp_path)
    with pytest.raises(ImpossibleError, match="level token-count; level token is needed"):
        open_trace(tmp_path / "smoe-out/trace")
    assert open_trace(tmp_path / "smoe-out/trace", needs=Level.COUNT).level is Level.TOKEN_COUNT
