"""What `make fuzz` found in the readers, each with its smallest input: a sentence now, where another error escaped.

Here smoe's own artefacts, and small files that would fill the memory; files of others are in `test_found_foreign.py`.
"""

import gzip
import io
import json
import lzma
import re
import subprocess
import sys
import zipfile
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from smoe_cli.engines.files import read_engine_map
from smoe_cli.evaluation.requests import read_arrivals
from smoe_cli.inspection.inspecting import inspect_artefact
from smoe_cli.inspection.summaries import summarise
from smoe_cli.placement import read_runtime
from smoe_profiles.artefact import open_artefact
from smoe_profiles.choices import Level
from smoe_profiles.datasets import read_documents
from smoe_profiles.errors import InputError
from smoe_profiles.families.config import read_spec
from smoe_profiles.gates import gate_record
from smoe_profiles.importers.files import Archive
from smoe_profiles.levels import read_level
from smoe_profiles.parquet import read_parquet
from smoe_profiles.tables import counts_path, load_arrays, onegram_path, open_tables, statistics_path
from smoe_profiles.tensors import read_json, read_shard
from smoe_profiles.trace import TraceLayer, open_trace
from tests.fuzz import sound
from tests.fuzz.readers import QUIET
from tests.profiles.importers.helpers import read


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return sound.working_folder(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def levels(tmp_path_factory):
    return sound.traces(tmp_path_factory.mktemp("levels"))


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    return sound.gated_tables(tmp_path_factory.mktemp("gated"))


def lay(files, folder):
    """Files in a folder, path -> bytes."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def keep_true(path):
    """Give the manifest the size that a changed file has now."""
    record = next(folder for folder in path.parents if (folder / "manifest.json").exists())
    manifest = json.loads((record / "manifest.json").read_text())
    manifest["files"][path.relative_to(record).as_posix()]["bytes"] = path.stat().st_size
    (record / "manifest.json").write_text(json.dumps(manifest))


def change_table(path, change):
    pq.write_table(change(pq.read_table(path)), path)
    keep_true(path)


def change_arrays(path, **changes):
    """Arrays replaced, or taken out where None is given."""
    arrays = {name: array for name, array in (load_file(path) | changes).items() if array is not None}
    metadata = read_shard(path).metadata
    save_file(arrays, path, metadata)
    keep_true(path)


def change_manifest(path, **changes):
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    (path / "manifest.json").write_text(json.dumps({key: value for key, value in manifest.items() if value is not ...}))


def inspected(path):
    return inspect_artefact(path, ep=None, hashes=False, console=QUIET)


# Paths and JSON.


@pytest.mark.parametrize("reader", [read_json, read_shard, lambda path: read([path])])
def test_a_loop_of_links_and_a_folder_where_a_file_was_expected(reader, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "loop", tmp_path):
        with pytest.raises(InputError, match=re.escape(str(path))):
            reader(path)


def test_a_number_of_more_digits_than_python_reads(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": ' + "9" * 5000 + "}")
    with pytest.raises(InputError, match="not valid JSON"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_number_that_is_none_in_a_manifest(number, made, tmp_path):
    """smoe inspect --json would have to write it back, and JSON cannot."""
    path = lay(made, tmp_path) / "tables"
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"min_count": 1', f'"min_count": {number}'))
    with pytest.raises(InputError, match="is no number"):
        open_artefact(path, "tables")


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"router_sha256": 5}},
        {"model": {"layers": [1]}},
        {"model": {"family": None, "layers": 7}},
        {"seed": ...},
        {"seed": "0"},
        {"files": {"é" * 300: {"bytes": 1, "sha256": ""}}},
    ],
)
def test_a_manifest_whose_parts_are_of_other_types(changes, made, tmp_path):
    path = lay(made, tmp_path) / "tables"
    change_manifest(path, **changes)
    with pytest.raises(InputError):
        inspected(path)


def test_a_run_json_that_is_no_table(made, tmp_path):
    path = lay(made, tmp_path) / "tables"
    (path / "run.json").write_text("[]")
    with pytest.raises(InputError, match=r"run\.json is \[\]"):
        open_artefact(path, "tables").run()


def test_a_sentence_that_quotes_a_file_is_short_and_does_not_command_the_terminal():
    said = str(InputError(f"key {'x' * 10**5}\x1b[2J\ud800\0 is wrong"))
    assert len(said) < 1300
    assert said.isprintable()
    assert said.endswith(r"\x1b[2J\ud800\x00 is wrong")


def test_more_layers_than_any_model_has_in_a_config():
    config = {"model_type": "mixtral", "num_hidden_layers": 10**30, "num_local_experts": 8, "num_experts_per_tok": 2}
    with pytest.raises(InputError, match="at most 10000 layers"):
        read_spec(config | {"vocab_size": 9, "hidden_size": 9}, "config.json")


def test_a_parent_whose_kind_is_a_path(made, tmp_path):
    path = lay(made, tmp_path) / "tables"
    change_manifest(path, parents=[{"kind": "/dev", "id": "0"}])
    assert inspected(path)["parents"][0]["state"] == "absent"


# Traces and tables.


def twice(table):
    return pa.Table.from_arrays([*table.columns, table["token_id"]], [*table.column_names, "token_id"])


def test_a_column_that_a_trace_has_twice(levels, tmp_path):
    path = lay(levels, tmp_path) / "token"
    part = next(path.glob("*.parquet"))
    change_table(part, twice)
    with pytest.raises(InputError, match="has 2 column token_id"):
        inspected(path)
    with pytest.raises(InputError, match="has 2 column token_id"):
        open_trace(path).read(["token_id"], "fit")


FLIPPED = """
import sys
from pathlib import Path
from smoe_profiles.errors import InputError
from smoe_profiles.parquet import open_parquet

path, refused = Path(sys.argv[1]), 0
content = path.read_bytes()
length = int.from_bytes(content[-8:-4], "little")
for place in range(len(content) - 8 - length, len(content) - 8):
    damaged = bytearray(content)
    damaged[place] ^= 4
    path.write_bytes(damaged)
    try:
        open_parquet(path)
    except InputError:
        refused += 1
print(refused)
"""


def test_size_statistics_that_end_the_process_where_a_columns_metadata_is_looked_at(levels, tmp_path):
    """Nothing catches that: pyarrow aborts. One bit of the footer flipped at a time, in a process of its own."""
    path = lay(levels, tmp_path) / "count" / "counts_03.parquet"
    done = subprocess.run([sys.executable, "-c", FLIPPED, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def put(name, values):
    return lambda table: table.set_column(table.column_names.index(name), name, values(table))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("count", lambda table: pa.array([[1]] * len(table))),
        ("count", lambda table: pa.array([float("nan")] * len(table))),
        ("count", lambda table: pa.array([2**63] * len(table), pa.uint64())),
        ("expert", lambda table: pa.array([8] * len(table), pa.uint16())),
        ("split", lambda table: pa.array([None] * len(table), pa.string()).dictionary_encode()),
    ],
)
def test_counts_of_a_lower_level_that_are_no_counts(name, values, levels, tmp_path):
    path = lay(levels, tmp_path) / "count"
    change_table(path / "counts_01.parquet", put(name, values))
    trace = open_trace(path, needs=Level.COUNT)
    with pytest.raises(InputError, match=r"counts_01\.parquet"):
        read_level(trace, trace.layers[0], "fit")


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.drop_columns(["token_id"]),
        lambda table: table.drop_columns(["split"]),
        put("count", lambda table: pa.array([float("nan")] * len(table))),
        put("expert", lambda table: pa.array([300] * len(table), pa.uint16())),
        put("token_id", lambda table: pa.array([50] * len(table), pa.uint32())),
        put("split", lambda table: pa.array([["fit"]] * len(table))),
    ],
)
def test_token_counts_of_tables_that_are_none(change, gated, tmp_path):
    path = lay(gated, tmp_path) / "tables"
    layer = open_tables(path).layers[0]
    change_table(counts_path(path, layer), change)
    with pytest.raises(InputError, match=r"counts_01\.parquet"):
        open_tables(path).counts(layer)


def test_statistics_of_another_shape_or_below_zero(gated, tmp_path):
    path = lay(gated, tmp_path) / "tables"
    tables = open_tables(path)
    for popularity in (np.ones((8, 2), np.int64), np.ones((2, 8)), -np.ones((2, 8), np.int64), None):
        change_arrays(statistics_path(path, tables.layers[1]), popularity=popularity)
        with pytest.raises(InputError, match="popularity"):
            tables.statistics(tables.layers[1])
    change_arrays(onegram_path(path, tables.layers[1]), onegram=None, other=np.ones(1))
    with pytest.raises(InputError, match="onegram is missing"):
        tables.onegram(tables.layers[1])


def test_samples_without_a_row_of_a_part_or_of_an_expert_that_is_not_there(gated, tmp_path):
    path = lay(gated, tmp_path) / "tables"
    tables = open_tables(path)
    samples = path / "samples.parquet"
    whole = pq.read_table(samples)
    column = pa.array([[1, 8]] * len(whole), pa.list_(pa.uint16(), 2))
    change_table(samples, put("experts_02", lambda _: column))
    with pytest.raises(InputError, match="names expert 8"):
        list(tables.samples("fit"))
    change_table(samples, lambda table: table.slice(0, 0))
    with pytest.raises(InputError, match="no sample of the part fit"):
        list(tables.samples("fit"))


def test_an_early_gates_record_whose_files_do_not_fit_together(gated, tmp_path):
    path = lay(gated, tmp_path) / "tables"
    layer = open_tables(path).layers[0]
    early = load_file(path / "linear" / "layer_01.safetensors")["validation.early"]
    for damage in (None, early[:4], early.astype(np.float32)):
        change_arrays(path / "linear" / "layer_01.safetensors", **{"validation.early": damage})
        with pytest.raises(InputError, match=r"validation\.early"):
            gate_record(path).rows(layer, "validation")
    change_arrays(path / "linear" / "layer_01.safetensors", **{"validation.early": early})
    change_arrays(path / "linear" / "rows.safetensors", **{"heldout.recent": np.zeros((24, 0), np.uint32)})
    with pytest.raises(InputError, match="does not say which tokens"):
        gate_record(path).token_id("heldout")
    lay({name: gated[name] for name in gated if name.endswith("rows.safetensors")}, tmp_path)
    embedding = load_file(path / "linear" / "embedding.safetensors")["embedding"]
    change_arrays(path / "linear" / "embedding.safetensors", embedding=embedding[:4])
    with pytest.raises(InputError, match="it has 4 embeddings"):
        gate_record(path).rows(layer, "validation")


def test_a_type_of_tensor_that_numpy_does_not_have(tmp_path):
    header = json.dumps({"x": {"dtype": "I6", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(InputError, match="cannot be read as arrays"):
        load_arrays(tmp_path / "x.safetensors")


# Placements and how they were found.


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"popularity": None}, "popularity is missing"),
        ({"markov2_scores": np.zeros((3, 16, 4), np.int8)}, "markov2_scores is I8"),
        ({"token_scores": np.zeros((2, 50, 4), np.uint8)}, "token_scores is U8"),
        ({"physical_to_logical": None}, "physical_to_logical is missing"),
        ({"predictor": np.full(3, 9, np.uint8)}, "numbers a predictor 9"),
    ],
)
def test_run_time_tables_whose_arrays_do_not_fit_together(changes, named, made, tmp_path):
    path = lay(made, tmp_path) / "placement-ep4"
    change_arrays(path / "runtime.safetensors", **changes)
    with pytest.raises(InputError, match=named):
        read_runtime(open_artefact(path, "placement"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_ranks", ""), ("num_ranks", "9" * 9), ("top_k", "-1"), ("predictors", "[1]"), ("token_table", "[]")],
)
def test_run_time_tables_whose_metadata_is_wrong(key, value, made, tmp_path):
    path = lay(made, tmp_path) / "placement-ep4"
    runtime = path / "runtime.safetensors"
    save_file(load_file(runtime), runtime, read_shard(runtime).metadata | {key: value})
    keep_true(runtime)
    with pytest.raises(InputError, match=r"runtime\.safetensors"):
        read_runtime(open_artefact(path, "placement"))


def test_a_solver_log_that_lacks_a_layer_or_says_words_for_numbers(made, tmp_path):
    path = lay(made, tmp_path) / "placement-ep4"
    lines = (path / "solver.jsonl").read_text().splitlines()
    words = lines[0].replace('"validation_gain": ', '"validation_gain": "x", "y": ')
    for damaged in (lines[1:], ["[]"], [words, *lines[1:]]):
        (path / "solver.jsonl").write_text("\n".join(damaged))
        keep_true(path / "solver.jsonl")
        with pytest.raises(InputError):
            summarise(open_artefact(path, "placement"), hashes=False)


def test_an_evaluation_whose_figures_are_no_numbers(made, tmp_path):
    path = lay(made, tmp_path) / "evaluation-ep4"
    whole = json.loads((path / "evaluation.json").read_text())
    timed = whole["context"] | {"hardware": "pcie"}  # and no time beside the figures
    cases = {"total": {"contiguous": 1}, "context": {}, "load_balancer": {"total": {"lar": "x"}}}
    for key, value in [*cases.items(), ("context", timed)]:
        (path / "evaluation.json").write_text(json.dumps(whole | {key: value}))
        keep_true(path / "evaluation.json")
        with pytest.raises(InputError, match="does not hold what smoe evaluate writes"):
            summarise(open_artefact(path, "evaluation"), hashes=False)


# Small files that would fill the memory.


@pytest.fixture
def narrow(monkeypatch):
    """Bounds a thousand times lower, so that the tests' own bombs are small too."""
    monkeypatch.setattr("smoe_profiles.unpacking.MOST_UNPACKED", 1 << 18)


def packed_zeros(size=1 << 20):
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(size, np.uint8))
    return buffer.getvalue()


@pytest.mark.usefixtures("narrow")
def test_an_archive_that_unpacks_to_very_much(tmp_path):
    for name in ("bomb.npz", "bomb.pt"):
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("ids.npy", packed_zeros())
    with pytest.raises(InputError, match="array ids unpacks from"):
        Archive(tmp_path / "bomb.npz")["ids"]
    with pytest.raises(InputError, match=r"ids\.npy unpacks from"):
        read([tmp_path / "bomb.pt"], kind="replay")


@pytest.mark.usefixtures("narrow")
def test_a_column_that_unpacks_to_very_much(tmp_path):
    table = pa.table({"text": ["x" * (1 << 20)]})
    pq.write_table(table, tmp_path / "bomb.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(InputError, match="unpacks from"):
        list(read_documents(str(tmp_path / "bomb.parquet"), "x", list, 50))


def test_a_run_of_equal_values_that_is_longer_than_any_row_group(monkeypatch, tmp_path):
    monkeypatch.setattr("smoe_profiles.parquet.MOST_ROWS", 1000)
    table = pa.table({"rank": pa.array(np.zeros(2000, np.uint16))})
    pq.write_table(table, tmp_path / "bomb.parquet")
    with pytest.raises(InputError, match="row group of 2000 rows"):
        read_parquet(tmp_path / "bomb.parquet", table.schema)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_requests_and_texts_that_unpack_to_very_much(suffix, tmp_path):
    pack = {".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    path = tmp_path / f"bomb.jsonl{suffix}"
    path.write_bytes(pack(b" " * (1 << 20)))
    with pytest.raises(InputError, match="unpacks from"):
        read_arrivals(path)
    with pytest.raises(InputError, match="unpacks from"):
        list(read_documents(str(path), "x", list, 50))


def test_names_in_yaml_that_stand_for_very_many_entries_or_for_themselves(monkeypatch, tmp_path):
    monkeypatch.setattr("smoe_cli.engines.files.MOST_ENTRIES", 1000)
    laughs = "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    deep = f"a0: &a0 [1]\n{laughs}initial_global_assignments: {{1: *a11}}\n"
    for text in (deep, "initial_global_assignments: &a [*a]\n"):
        (tmp_path / "lb.yaml").write_text(text)
        with pytest.raises(InputError, match="stand for more than"):
            read_engine_map(tmp_path / "lb.yaml")


def test_tables_for_more_token_ids_than_the_files_hold(gated, tmp_path):
    """A vocabulary of 10^12 in the manifest alone."""
    path = lay(gated, tmp_path) / "tables"
    parameters = open_artefact(path, "tables").parameters | {"vocab_size": 10**12}
    change_manifest(path, parameters=parameters)
    with pytest.raises(InputError, match=r"1000000000000\] was expected"):
        open_tables(path).vocabulary()
    layers = [asdict(replace(TraceLayer(1, 8, 2), num_experts=10**12))]
    change_manifest(path, parameters=parameters | {"layers": layers})
    with pytest.raises(InputError):
        open_tables(path).statistics(open_tables(path).layers[0])
