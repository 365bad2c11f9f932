"""smoe profile as a user meets it: killed and run again, on several processes, generating, and with the early gate."""

import json
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smoe_profiles.tensors import read_json
from tests.forked import begin, end
from tests.profiles.tiny_models import VOCAB, build_model


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny model `m` in float32 and prompts of many lengths in words the model's tokenizer knows."""
    folder = tmp_path_factory.mktemp("profile")
    build_model("qwen2_moe", folder / "m")
    generator = np.random.default_rng(0)
    lengths = generator.integers(3, 90, 150)
    texts = [" ".join(f"w{i}" for i in generator.integers(1, VOCAB, length)) for length in lengths]
    (folder / "p.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def rows_of(trace):
    """All rows as one table, sorted by sequence and position."""
    parts = [pq.read_table(path) for path in sorted(Path(trace).glob("part*.parquet"))]
    return pa.concat_tables(parts).unify_dictionaries().sort_by([("sequence", "ascending"), ("position", "ascending")])


def hashed_bytes(trace):
    """Every file that the design calls `the same bytes`."""
    files = (path for path in Path(trace).rglob("*") if path.is_file() and path.name != "run.json")
    return {path.relative_to(trace).as_posix(): path.read_bytes() for path in files}


def kill_at(arguments, folder, journal, size):
    """Run smoe until its journal has grown to `size` bytes, and kill it there."""
    process = begin(*arguments, cwd=folder)
    give_up = time.monotonic() + 300
    while time.monotonic() < give_up and process.is_alive():
        if journal.exists() and journal.stat().st_size >= size:
            break
        time.sleep(0.005)
    process.kill()
    return end(process, folder)[0]


@pytest.mark.parametrize(
    ("early_gate", "sizes"),
    [
        pytest.param("none", (210_000, 430_000), id="plain"),
        pytest.param("sample", (1_000_000, 1_200_000), id="early", marks=pytest.mark.slow),
    ],
)  # sizes of the journal after the first and after the second batch, and a little
def test_a_run_killed_twice_and_started_again_gives_the_same_bytes(early_gate, sizes, run_smoe, tmp_path):
    texts = Path(__file__).parents[1] / "fixtures/texts/heldout.jsonl.gz"
    command = ["profile", "--model", "tiny-deepseek", "--dataset", str(texts), "--max-tokens", "14000"]
    command += ["--early-gate", early_gate]
    run_smoe(*command, "-C", "whole", "-q", cwd=tmp_path)
    journal = tmp_path / "killed/.trace.partial/.part.journal"
    for size in sizes:
        assert kill_at([*command, "-C", "killed"], tmp_path, journal, size) == -signal.SIGKILL
        assert not (tmp_path / "killed/trace").exists()
    last = run_smoe(*command, "-C", "killed", cwd=tmp_path)
    assert "continuing after" in last.err
    assert hashed_bytes(tmp_path / "killed/trace") == hashed_bytes(tmp_path / "whole/trace")
    assert not (tmp_path / "killed/.trace.partial").exists()


def test_what_a_killed_run_left_is_not_used_for_other_parameters(place, run_smoe, tmp_path):
    command = ["profile", "--model", str(place / "m"), "--dataset", str(place / "p.jsonl"), "-q"]
    staging = tmp_path / "smoe-out/.trace.partial"
    kill_at([*command], tmp_path, staging / ".part.journal", 20_000)
    assert staging.exists()
    run_smoe(*command, "--seq-len", "16", cwd=tmp_path)
    run_smoe(*command, "--seq-len", "16", "-C", "clean", cwd=tmp_path)
    assert hashed_bytes(tmp_path / "smoe-out/trace") == hashed_bytes(tmp_path / "clean/trace")


def on_two(folder, *arguments):
    """One command in two processes, which find each other as those of torchrun do; the first one's stdout.

    That torchrun starts them so, the documentation's test shows.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    started = [begin(*arguments, cwd=folder, **meet, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in (0, 1)]
    first, second = [end(process, folder) for process in started]
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert second[1] == ""
    return first[1]


def test_two_processes_record_the_same_rows_as_one_and_speak_with_one_voice(place, run_smoe, tmp_path):
    command = ["profile", "--model", str(place / "m"), "--dataset", str(place / "p.jsonl"), "--json"]
    run_smoe(*command, "-C", "one", cwd=tmp_path)
    said = on_two(tmp_path, *command, "-C", "two")
    assert json.loads(said)["path"] == "two/trace"
    parts = sorted(path.name for path in (tmp_path / "two/trace").glob("*.parquet"))
    assert parts == ["part-00-00000.parquet", "part-01-00000.parquet"]
    assert rows_of(tmp_path / "one/trace").equals(rows_of(tmp_path / "two/trace"))
    one, two = (read_json(tmp_path / name / "trace/manifest.json") for name in ("one", "two"))
    assert one["parameters"] == two["parameters"]


def test_layers_split_over_two_processes_choose_the_same_experts(run_smoe, tmp_path):
    texts = Path(__file__).parents[1] / "fixtures/texts/heldout.jsonl.gz"
    command = ["profile", "--model", "tiny-mixtral", "--dataset", str(texts), "--max-tokens", "1000"]
    command += ["--dtype", "float32"]
    run_smoe(*command, "-C", "one", "-q", cwd=tmp_path)
    on_two(tmp_path, *command, "--tensor-parallel", "-C", "split")
    one, split = rows_of(tmp_path / "one/trace"), rows_of(tmp_path / "split/trace")
    assert one["token_id"].equals(split["token_id"])
    for name in ("experts_00", "experts_02"):
        same = [set(a) == set(b) for a, b in zip(one[name].to_pylist(), split[name].to_pylist(), strict=True)]
        assert np.mean(same) > 0.998  # sums are in another order, so a near tie may fall otherwise


def test_a_device_map_records_the_same_rows_as_a_device(place, run_smoe, tmp_path):
    command = ["profile", "--model", str(place / "m"), "--dataset", str(place / "p.jsonl"), "-q"]
    run_smoe(*command, "-C", "one", cwd=tmp_path)
    run_smoe(*command, "--device-map", "auto", "-C", "spread", cwd=tmp_path)
    assert hashed_bytes(tmp_path / "one/trace") == hashed_bytes(tmp_path / "spread/trace")


@pytest.fixture(scope="module")
def decoded(place, run_smoe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoded")
    command = ["profile", "--model", str(place / "m"), "--dataset", str(place / "p.jsonl"), "--decode", "5", "-q"]
    run_smoe(*command, "--seq-len", "32", cwd=folder)
    return rows_of(folder / "smoe-out/trace")


def test_decode_rows_follow_each_document_and_say_so(decoded):
    phase = np.array(decoded["phase"].to_pylist())
    sequence, position = decoded["sequence"].to_numpy(), decoded["position"].to_numpy()
    assert set(phase) == {"prefill", "decode"}
    for number in np.unique(sequence):
        mine = sequence == number
        assert position[mine].tolist() == list(range(mine.sum()))
        kinds = phase[mine].tolist()
        generated = kinds.count("decode")
        assert generated <= 5
        assert kinds == ["prefill"] * (len(kinds) - generated) + ["decode"] * generated


def test_generated_rows_are_those_of_a_plain_forward_over_the_whole_text(decoded, place):
    """Greedy tokens and their experts recomputed without a cache, a batch or padding."""
    import torch
    from transformers import AutoModelForCausalLM

    from smoe_profiles.capture.points import capture_points
    from smoe_profiles.capture.recorder import Recorder
    from smoe_profiles.models import find_model

    model = AutoModelForCausalLM.from_pretrained(place / "m", dtype=torch.float32).eval()
    points = capture_points(model, find_model(str(place / "m")).spec)
    sequence = decoded["sequence"].to_numpy()
    checked = 0
    for number in range(12):
        mine = decoded.filter(pa.array(sequence == number))
        ids, phase = mine["token_id"].to_numpy(), mine["phase"].to_pylist()
        prompt = phase.count("prefill")
        start = (prompt - 1) // 32 * 32  # the last chunk is what generation goes on from
        with torch.inference_mode(), Recorder(points) as recorder:
            logits = model(torch.from_numpy(ids[start:].astype(np.int64))[None], use_cache=False).logits[0]
            captured = recorder.take()
            experts = captured.by_layer(captured.to_numpy(np.ones(len(ids) - start, bool))[0])
        assert logits.argmax(dim=-1)[prompt - start - 1 : -1].tolist() == ids[prompt:].tolist()
        for layer, column in zip((0, 2), experts, strict=True):
            recorded = np.array(mine[f"experts_{layer:02d}"].to_pylist())[start:]
            assert np.mean((np.sort(recorded) == np.sort(column)).all(axis=1)) > 0.97
            checked += len(recorded)
    assert checked > 300


def test_nothing_after_an_end_token_is_recorded(decoded):
    ends = decoded.filter(pa.compute.equal(decoded["phase"], "decode"))["token_id"].to_pylist()
    assert 0 not in ends  # the tiny models' end token


def test_decode_does_not_go_with_windows(place, run_smoe, tmp_path):
    command = ["profile", "--model", str(place / "m"), "--dataset", str(place / "p.jsonl"), "--decode", "2"]
    assert "windows" in run_smoe(*command, "--pack", "windows", cwd=tmp_path, code=2).err


def test_no_order_leaves_counts_by_token_from_which_no_prompt_can_be_read(place, run_smoe, tmp_path):
    command = ["profile", "--model", str(place / "m"), "--dataset", str(place / "p.jsonl"), "-q"]
    run_smoe(*command, "-C", "rows", cwd=tmp_path)
    run_smoe(*command, "-C", "counts", "--no-order", cwd=tmp_path)
    names = {path.name for path in (tmp_path / "counts/trace").iterdir()}
    assert names == {"counts_00.parquet", "counts_02.parquet", "manifest.json", "run.json"}
    rows, counts = rows_of(tmp_path / "rows/trace"), pq.read_table(tmp_path / "counts/trace/counts_02.parquet")
    expected = {}
    for token, experts, part in zip(
        rows["token_id"].to_pylist(), rows["experts_02"].to_pylist(), rows["split"].to_pylist(), strict=True
    ):
        for expert in experts:
            expected[token, expert, part] = expected.get((token, expert, part), 0) + 1
    found = {(row["token_id"], row["expert"], row["split"]): row["count"] for row in counts.to_pylist()}
    assert found == expected
    refused = run_smoe("build-tables", "-C", "counts", cwd=tmp_path, code=4).err
    assert "level token-count; level token is needed" in refused


def test_the_early_gate_is_the_router_on_the_layers_input(place, run_smoe, tmp_path):
    """Recomputed from the hidden states that transformers itself returns."""
    import torch
    from transformers import AutoModelForCausalLM

    command = ["profile", "--model", str(place / "m"), "--dataset", str(place / "p.jsonl"), "--early-gate", "all"]
    run_smoe(*command, "-q", cwd=tmp_path)
    rows = rows_of(tmp_path / "smoe-out/trace")
    model = AutoModelForCausalLM.from_pretrained(place / "m", dtype=torch.float32).eval()
    first = rows.filter(pa.array(rows["sequence"].to_numpy() == 0))
    ids = torch.from_numpy(first["token_id"].to_numpy().astype(np.int64))[None]
    with torch.inference_mode():
        hidden = model(ids, output_hidden_states=True, use_cache=False).hidden_states
        for number in (0, 2):
            layer = model.model.layers[number]
            logits = layer.post_attention_layernorm(hidden[number])[0] @ layer.mlp.gate.weight.T
            order = np.argsort(-logits.numpy(), axis=1, kind="stable")
            recorded = np.array(first[f"early_{number:02d}"].to_pylist())
            values = np.array(first[f"early_logits_{number:02d}"].to_pylist())
            assert np.mean(recorded == order[:, :8]) > 0.99
            assert values == pytest.approx(np.sort(logits.numpy(), axis=1)[:, ::-1][:, :8], abs=2e-2, rel=2e-3)


def test_the_linear_sums_are_those_of_the_rows(place, run_smoe, tmp_path):
    """Least squares from the sums predicts the sampled rows' true logits better than the early gate does."""
    from safetensors.numpy import load_file

    command = ["profile", "--model", str(place / "m"), "--dataset", str(place / "p.jsonl"), "--early-gate", "all"]
    run_smoe(*command, "--decode", "3", "-q", cwd=tmp_path)
    rows = rows_of(tmp_path / "smoe-out/trace").to_pydict()
    arrays, facts, embedding = (
        load_file(tmp_path / f"smoe-out/trace/linear/{name}.safetensors") for name in ("layer_02", "rows", "embedding")
    )
    table = embedding["embedding"]
    assert table.shape == (VOCAB + 1, 32)
    assert not table[-1].any()
    assert arrays["xx"][-1, -1] == rows["split"].count("fit")
    assert arrays["xx"].shape == (32 + 8 + 5 * 32 + 1,) * 2
    of_row = {key: i for i, key in enumerate(zip(rows["sequence"], rows["position"], strict=True))}
    recent = facts["heldout.recent"]
    agree = []
    for i, key in enumerate(zip(facts["heldout.sequence"].tolist(), facts["heldout.position"].tolist(), strict=True)):
        before = [of_row.get((key[0], key[1] - back)) for back in range(5)]
        assert recent[i].tolist() == [2**32 - 1 if at is None else rows["token_id"][at] for at in before]
        best = np.argsort(-arrays["heldout.logits"][i])[:2].tolist()
        agree.append(set(best) == set(rows["experts_02"][of_row[key]]))
    assert np.mean(agree) > 0.97
    ids = np.where(recent == 2**32 - 1, VOCAB, recent)
    parts = [
        arrays["heldout.inputs"],
        arrays["heldout.early"],
        table[ids].reshape(len(ids), -1),
        np.ones((len(ids), 1)),
    ]
    x, y = np.concatenate(parts, axis=1).astype(np.float64), arrays["heldout.logits"].astype(np.float64)
    weights = np.linalg.lstsq(arrays["xx"] + 1e-2 * np.eye(201), arrays["xy"], rcond=None)[0]
    assert np.mean((x @ weights - y) ** 2) < np.mean((arrays["heldout.early"] - y) ** 2)


TEMPLATE = "{% for m in messages %}{{ 'w7 ' if m.role == 'user' else 'w8 ' }}{{ m.content }} {% endfor %}w9"


@pytest.fixture
def chatting(place, tmp_path):
    """The tiny model with a chat template."""
    folder = tmp_path / "chat"
    folder.mkdir()
    for path in (place / "m").iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_the_chat_template_is_put_around_texts_and_messages(chatting, run_smoe, tmp_path):
    turns = [{"role": "user", "content": "w3 w4"}, {"role": "assistant", "content": "w5"}]
    shared = [{"from": "human", "value": "w6"}]
    rows = [{"text": "w1 w2"}, {"messages": turns}, {"conversations": shared}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_smoe("profile", "--model", chatting, "--dataset", "c.jsonl", "--chat-template", "-q", cwd=tmp_path)
    found = rows_of(tmp_path / "smoe-out/trace")
    assert found["token_id"].to_pylist() == [7, 1, 2, 9, 7, 3, 4, 8, 5, 9, 7, 6, 9]


def test_a_model_without_a_chat_template_is_refused_before_it_loads(place, run_smoe, tmp_path):
    command = ["profile", "--model", str(place / "m"), "--dataset", str(place / "p.jsonl"), "--chat-template"]
    assert "has no chat template" in run_smoe(*command, cwd=tmp_path, code=4).err


def test_messages_without_the_chat_template_are_refused(place, run_smoe, tmp_path):
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "w1"}]}) + "\n")
    error = run_smoe("profile", "--model", place / "m", "--dataset", "c.jsonl", cwd=tmp_path, code=3).err
    assert "--chat-template" in error


def test_ids_padded_on_either_side_with_their_mask_give_the_rows_of_the_text_alone(place, run_smoe, tmp_path):
    plain = [[5, 6, 7, 8], [9, 10]]
    padded = [
        {"input_ids": [0, 0, 5, 6, 7, 8], "attention_mask": [0, 0, 1, 1, 1, 1]},
        {"input_ids": [9, 10, 0, 0, 0, 0], "attention_mask": [1, 1, 0, 0, 0, 0]},
    ]
    for name, rows in (("plain", [{"input_ids": ids} for ids in plain]), ("padded", padded)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run_smoe("profile", "--model", place / "m", "--dataset", f"{name}.jsonl", "-C", name, "-q", cwd=tmp_path)
    one, two = (rows_of(tmp_path / f"{name}/trace").drop_columns(["source"]) for name in ("plain", "padded"))
    assert one.equals(two)


def test_a_fault_in_the_last_line_is_found_before_the_model_runs(place, run_smoe, tmp_path):
    (tmp_path / "bad.jsonl").write_text((place / "p.jsonl").read_text() + json.dumps({"input_ids": [VOCAB]}) + "\n")
    error = run_smoe("profile", "--model", place / "m", "--dataset", "bad.jsonl", cwd=tmp_path, code=3).err
    assert "profiling" not in error
    assert not (tmp_path / "smoe-out/.trace.partial").exists()


def test_a_dry_run_says_how_many_tokens_and_refuses_what_the_run_would(place, run_smoe, tmp_path):
    command = ["profile", "--model", place / "m", "--dry-run", "--json"]
    document = run_smoe(*command, "--dataset", place / "p.jsonl", cwd=tmp_path).json()
    assert (document["documents"], document["tokens"]) == (150, sum(len(t.split()) for t in texts_of(place)))
    run_smoe(*command, "--dataset", "missing.jsonl", cwd=tmp_path, code=3)
    (tmp_path / "smoe-out/trace").mkdir(parents=True)
    run_smoe(*command, "--dataset", place / "p.jsonl", cwd=tmp_path, code=4)


def texts_of(place):
    return [json.loads(line)["text"] for line in (place / "p.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("device", "code"), [("nonsense", 2), ("cuda", 6)])
def test_a_device_that_is_not_there_is_refused_before_anything_loads(device, code, place, run_smoe, tmp_path):
    import torch

    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("gpu: this machine has the device")
    command = ["profile", "--model", place / "m", "--dataset", place / "p.jsonl", "--device", device]
    assert f"--device {device}".replace("nonsense", "'nonsense'") in run_smoe(*command, cwd=tmp_path, code=code).err


def test_weights_that_are_no_numbers_end_the_run_with_the_way_out(place, run_smoe, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "broken"
    folder.mkdir()
    for path in (place / "m").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.gate.weight"][:] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    error = run_smoe("profile", "--model", folder, "--dataset", place / "p.jsonl", cwd=tmp_path, code=3).err
    assert "layer 2" in error


@pytest.mark.parametrize("flag", [["--no-order", "--early-gate", "all"], ["--tensor-parallel", "--device-map", "auto"]])
def test_options_that_contradict_each_other_are_refused(flag, place, run_smoe, tmp_path):
    run_smoe("profile", "--model", place / "m", "--dataset", place / "p.jsonl", *flag, cwd=tmp_path, code=2)
