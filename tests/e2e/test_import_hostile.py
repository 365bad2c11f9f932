"""smoe import of hostile and broken files: one sentence, nothing written, and code inside a file never runs."""

import base64
import io
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests import import_bench
from tests.engine_writers import (
    FORMATS,
    encoded_npy,
    exflow_trace,
    npz_members,
    routing,
    trtllm_raw,
)
from tests.import_bench import (
    Trace,
    assert_counts,
    wanted_rows,
)

bench, known = import_bench.bench, import_bench.known


# Hostile and broken files.


def subprocess_smoe(*arguments):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SMOE_")}
    return subprocess.run(
        [sys.executable, "-m", "smoe_cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env=kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
    )


class Payload:
    """Unpickling this creates a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def pickled_files(folder, marker):
    """Every container of the formats that could carry a pickle, each with code inside."""
    hostile = Payload(marker)
    with (folder / "bare.pt").open("wb") as file:
        pickle.dump(hostile, file)
    torch.save({"records": [hostile], "last_physical_to_logical_map": torch.zeros(2, 2)}, folder / "records.pt")
    torch.save(hostile, folder / "saved.pt")
    torch.save({"records": hostile}, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    array = np.array([hostile], dtype=object)
    np.save(folder / "object.npy", array, allow_pickle=True)
    np.savez(folder / "object.npz", ids=array)
    np.savez(folder / "beside.npz", **{**npz_members(routing()), "tokens": array})
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    choice = {"index": 0, "routed_experts": base64.b64encode(buffer.getvalue()).decode()}
    (folder / "reply.json").write_text(json.dumps({"choices": [choice]}))
    (folder / "renamed.npz").write_bytes((folder / "bare.pt").read_bytes())
    (folder / "renamed.npy").write_bytes((folder / "bare.pt").read_bytes())
    (folder / "renamed.json").write_bytes((folder / "bare.pt").read_bytes())
    return sorted(path for path in folder.iterdir() if path.is_file())


def test_code_inside_a_file_never_runs(bench, known):
    folder = bench.folder / "hostile"
    folder.mkdir()
    marker = bench.folder / "it-ran"
    model = bench.model(known)
    for path in pickled_files(folder, marker):
        for engine in ("auto", {".pt": "replay", ".npz": "npz"}.get(path.suffix, "vllm")):
            assert path.name in bench.refused(engine, [path], "--model", model)
            assert not marker.exists(), path
    pickle.loads((folder / "bare.pt").read_bytes())
    assert marker.exists()


def test_code_inside_a_file_never_runs_in_a_process_of_its_own_either(bench, known):
    marker = bench.folder / "it-ran"
    path = bench.folder / "expert_distribution_recorder_1_0.pt"
    torch.save({"records": [Payload(marker)], "last_physical_to_logical_map": torch.zeros(2, 2)}, path)
    done = subprocess_smoe("import", path, "--model", bench.model(known), "-C", bench.folder / "out")
    assert done.returncode == 3, done.stderr
    assert re.search("^error: ", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr
    assert not done.stdout
    assert not marker.exists()
    assert not (bench.folder / "out" / "trace").exists()


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_cut_short_is_refused(name, bench, known):
    form = FORMATS[name]
    files, options = form.write(bench.folder, known), bench.options(form, known)
    path = files[0] if files[0].is_file() else sorted(files[0].glob("*.safetensors"))[0]
    whole = path.read_bytes()
    for kept in (0, 1, 7, len(whole) // 2, len(whole) - 20):
        path.write_bytes(whole[:kept])
        assert path.name in bench.refused("auto", files, *options)
    path.write_bytes(whole[: len(whole) // 2])
    assert path.name in bench.refused(form.engine, files, *options)


@pytest.mark.parametrize("name", ["npz trace", "npz counts", "megatron list", "sglang stat"])
def test_a_flipped_byte_fails_with_a_sentence_or_changes_nothing(name, bench, known):
    """Zip members carry a checksum, so that no flipped byte can become another expert."""
    form = FORMATS[name]
    options = [*bench.options(form, known), "--force"]
    (path,) = form.write(bench.folder, known)
    whole = path.read_bytes()
    for place in np.linspace(40, len(whole) - 40, 12).astype(int):
        data = bytearray(whole)
        data[place] ^= 0x10
        path.write_bytes(data)
        code = bench.code(form.engine, [path], *options)
        assert code in (0, 3), place
        if code:
            continue
        trace = Trace(bench.folder / "out" / "trace")
        if form.level == "token":
            assert [experts for *_, experts in trace.rows()] == wanted_rows(known), place
        else:
            assert_counts(trace, known, [layer for layer, *_ in trace.layers])


def lying_npy(shape):
    """An .npy whose header promises far more than follows."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}"
    padded = header.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode() + b"\0" * 64


@pytest.mark.parametrize("shape", [(10**13, 4, 2), (10**6, 4, 2), (-1, 4, 2), (2**62, 2**62, 2)])
def test_a_header_that_promises_more_than_the_file_holds_is_refused(shape, bench, known):
    model = bench.model(known)
    data = lying_npy(shape)
    array = bench.folder / "lying.npy"
    array.write_bytes(data)
    archive = bench.folder / "lying.npz"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("ids.npy", data)
        for name, value in npz_members(known).items():
            if name != "ids":
                buffer = io.BytesIO()
                np.save(buffer, value)
                file.writestr(f"{name}.npy", buffer.getvalue())
    reply = bench.folder / "lying.json"
    reply.write_text(json.dumps({"choices": [{"index": 0, "routed_experts": base64.b64encode(data).decode()}]}))
    for engine, path in (("vllm", array), ("npz", archive), ("vllm", reply)):
        assert path.name in bench.refused(engine, [path], "--model", model)


JSON_TEXTS = {
    "no JSON": "{",
    "no UTF-8": b"\xff\xfe{}",
    "empty list": "[]",
    "empty object": "{}",
    "a number": "3",
    "null": "null",
    "too deep": "[" * 100_000,
    "no routes in a SGLang reply": json.dumps({"text": "", "meta_info": {"prompt_tokens": 3}}),
    "a SGLang reply with null": json.dumps({"meta_info": {"routed_experts": None}}),
    "a SGLang reply with a number": json.dumps({"meta_info": {"routed_experts": 5}}),
    "meta_info is a list": json.dumps({"meta_info": ["routed_experts"]}),
    "no base64": json.dumps({"meta_info": {"routed_experts": "@@@@"}}),
    "half a number": json.dumps({"meta_info": {"routed_experts": base64.b64encode(b"12345").decode()}}),
    "half a row": json.dumps({"meta_info": {"routed_experts": base64.b64encode(b"\0" * 12).decode()}}),
    "no routes in a vLLM reply": json.dumps({"choices": [{"index": 0, "text": ""}]}),
    "no choices": json.dumps({"choices": []}),
    "choices is a number": json.dumps({"choices": 7}),
    "no array inside": json.dumps({"choices": [{"routed_experts": base64.b64encode(b"hello").decode()}]}),
    "too few axes": json.dumps({"choices": [{"routed_experts": encoded_npy(np.zeros((3, 4), np.uint8))}]}),
    "other layers": json.dumps({"choices": [{"routed_experts": encoded_npy(np.zeros((3, 9, 2), np.uint8))}]}),
    "another K": json.dumps({"choices": [{"routed_experts": encoded_npy(np.zeros((3, 4, 5), np.uint8))}]}),
    "floats": json.dumps({"choices": [{"routed_experts": encoded_npy(np.zeros((3, 4, 2), np.float32))}]}),
    "nothing was routed": json.dumps({"choices": [{"routed_experts": encoded_npy(np.zeros((0, 4, 2), np.uint8))}]}),
}


@pytest.mark.parametrize("name", JSON_TEXTS)
def test_json_of_another_shape_is_refused(name, bench, known):
    named = "no rows" if name == "nothing was routed" else "reply.json"
    path = bench.folder / "reply.json"
    text = JSON_TEXTS[name]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for engine in ("auto", "sglang", "vllm"):
        assert named in bench.refused(engine, [path], "--model", bench.model(known))


PT_CONTENTS = {
    "nothing": {},
    "None": None,
    "a string": "records",
    "an empty list": [],
    "no records": {"last_physical_to_logical_map": torch.zeros(4, 8, dtype=torch.int64)},
    "records without content": {"records": [], "last_physical_to_logical_map": torch.zeros(4, 8, dtype=torch.int64)},
    "records of numbers": {"records": [1], "last_physical_to_logical_map": torch.zeros(4, 8, dtype=torch.int64)},
    "counts of one axis": {"rank": 0, "logical_count": torch.zeros(8, dtype=torch.int32)},
    "counts of other experts": {"rank": 0, "logical_count": torch.ones(3, 4, 16, dtype=torch.int32)},
    "negative counts": {"rank": 0, "logical_count": torch.full((3, 4, 8), -2, dtype=torch.int32)},
    "counts that are zero": {"rank": 0, "logical_count": torch.zeros(3, 4, 8, dtype=torch.int32)},
    "floats": torch.full((6, 3, 2), 0.5),
    "five axes": torch.zeros(2, 3, 4, 3, 2, dtype=torch.int64),
    "another K": torch.zeros(6, 3, 5, dtype=torch.int64),
    "routers of unequal length": [torch.tensor([[0, 1], [1, 2], [4, 7]])[:rows] for rows in (3, 2, 3)],
    "strings in the list": ["a", "b", "c"],
    "a sparse tensor": torch.eye(4).to_sparse(),
    "only padding": torch.full((6, 3, 2), -1, dtype=torch.int64),
}


@pytest.mark.parametrize("name", PT_CONTENTS)
def test_a_torch_file_of_another_shape_is_refused(name, bench, known):
    empty = name in ("an empty list", "counts that are zero", "only padding")
    path = bench.folder / "dump.pt"
    torch.save(PT_CONTENTS[name], path)
    for engine in ("auto", "sglang", "replay"):
        said = bench.refused(engine, [path], "--model", bench.model(known))
        assert "dump.pt" in said or (empty and "no rows" in said)


def test_exflow_ids_outside_the_layer_are_refused(bench):
    known = routing(top_k=1)
    files = exflow_trace(bench.folder, known.with_rows(1, [3], 8))
    assert "8" in bench.refused("exflow", files, "--model", bench.model(known))


def test_exflow_traces_are_for_models_that_choose_one_expert(bench, known):
    assert "trace.npy" in bench.refused("exflow", exflow_trace(bench.folder, known), "--model", bench.model(known))


def test_raw_rows_of_another_width_are_refused(bench, known):
    (folder,) = trtllm_raw(bench.folder, known)
    path = folder / "rank0_raw.safetensors"
    save_file({key: np.repeat(value, 2, axis=1) for key, value in load_file(path).items()}, path)
    assert path.name in bench.refused("trtllm", [folder], "--model", bench.model(known))
