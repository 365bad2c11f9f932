"""Tables of many rows: shards that add up, several traces, any number of processes, rare and unknown ids."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_profiles.capture import linear
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.gate_sums import SAMPLE_ROWS, SUMS, add_records
from smoe_profiles.table_layers import empty_counts, write_layer
from smoe_profiles.table_rows import Share
from smoe_profiles.table_writer import check_traces
from smoe_profiles.tables import FIT_PARTS, NO_NEIGHBOUR, Tables, load_arrays, open_tables, save_arrays
from smoe_profiles.trace import UNKNOWN_TOKEN, TraceLayer
from smoe_profiles.workers import LocalWorkers
from tests.profiles.conftest import random_rows
from tests.profiles.tables_by_hand import (
    as_counter,
    contents,
    counted,
    early_rows,
    in_tables,
    merged,
    of_part,
    publish_rows,
    shard,
    whole,
)

LAYERS = [TraceLayer(1, 8, 2), TraceLayer(2, 6, 3), TraceLayer(5, 70, 2), TraceLayer(6, 8, 1)]


def rows_of(seed, count, layers=LAYERS, unknown=0.1):
    generator = np.random.default_rng(seed)
    rows = random_rows(generator, count, layers)
    rows.token_id[generator.random(count) < unknown] = UNKNOWN_TOKEN
    rows.phase[:] = generator.integers(0, 2, count)
    return rows


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """(rows, traces) of two traces, in many row groups and files."""
    folder = tmp_path_factory.mktemp("two")
    rows = [rows_of(1, 900), rows_of(2, 300)]
    sources = ("prose", "code"), ("prose", "chat")
    traces = [
        publish_rows(folder / f"trace{n}", LAYERS, [rows[n]], group=64, file=256, sources=sources[n]) for n in (0, 1)
    ]
    return rows, traces


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 400), st.sampled_from([1, 3]))
@settings(max_examples=15, deadline=None)
def test_shards_add_up_to_the_tables_of_the_whole_byte_for_byte(tmp_path_factory, seed, of, count, min_count):
    folder = tmp_path_factory.mktemp("shards")
    rows = rows_of(seed, count)
    rows.split[:2] = [0, 1]
    traces = [
        publish_rows(folder / "a", LAYERS, [rows], group=16 + seed % 50, file=100),
        publish_rows(folder / "b", LAYERS, [rows_of(seed + 1, 30)], group=7),
    ]
    with patch("smoe_profiles.table_rows.BLOCK_ROWS", 16):
        expected = whole(folder / "whole", traces, min_count=min_count)
        shards = [shard(folder / f"tables-{n}-of-{of}", traces, n, of) for n in range(1, of + 1)]
        found = merged(folder / "merged", shards[::-1], traces, min_count=min_count)
    assert contents(found.artefact.path) == contents(expected.artefact.path)
    assert found.artefact.id == expected.artefact.id


def test_shares_are_equal_runs_that_cover_every_row_once():
    for rows in (0, 1, 7, 65_537):
        bounds = [Share(number, 4).bounds(rows) for number in range(1, 5)]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == rows
        assert all(one[1] == other[0] for one, other in pairwise(bounds))
        assert max(stop - start for start, stop in bounds) - min(stop - start for start, stop in bounds) <= 1


@pytest.mark.parametrize("jobs", [2, 3, 0])
def test_any_number_of_processes_gives_the_same_bytes(two, tmp_path, jobs):
    _, traces = two
    expected = whole(tmp_path / "one", traces)
    with patch("smoe_profiles.table_writer.PROCESS_WORK", 1):
        found = whole(tmp_path / "many", traces, workers=LocalWorkers(jobs))
    assert contents(found.artefact.path) == contents(expected.artefact.path)


def test_no_column_is_read_more_than_twice_from_parquet_whatever_the_jobs(two, tmp_path):
    from smoe_profiles.table_writer import _chunks

    for layers in range(1, 12):
        for jobs in range(1, 9):
            chunks = _chunks(layers, jobs)
            reads = Counter(index for chunk in chunks for index in range(max(chunk.start - 2, 0), chunk.stop))
            assert sorted(index for chunk in chunks for index in chunk) == list(range(layers))
            assert max(reads.values()) <= 2
    _, traces = two
    asked = Counter()
    groups = type(traces[0]).groups

    def watched(self, columns, only=None):
        asked.update((self.artefact.id, column) for column in columns)
        return groups(self, columns, only)

    with patch.object(type(traces[0]), "groups", watched):
        whole(tmp_path / "tables", traces)
    for layer in LAYERS:
        assert [asked[trace.artefact.id, layer.column] for trace in traces] == [1, 1]


def test_nothing_of_the_scratch_is_left(two, tmp_path):
    tables = whole(tmp_path / "tables", two[1])
    assert not list(tables.artefact.path.glob(".*"))


def test_two_traces_add_up_and_sources_keep_their_names(two, tmp_path):
    rows, traces = two
    tables = whole(tmp_path / "tables", traces)
    both = [np.concatenate([one.token_id[in_tables(one)] for one in rows])]
    for index, layer in enumerate(LAYERS):
        experts = np.concatenate([one.experts[index][in_tables(one)] for one in rows])
        known = both[0] != UNKNOWN_TOKEN
        assert as_counter(tables.counts(layer)) == counted(both[0][known], experts[known])
        assert tables.statistics(layer)["popularity"].sum() == experts.size
    assert tables.artefact.parameters["sources"] == ["chat", "code", "prose"]
    assert [parent["id"] for parent in tables.artefact.manifest["parents"]] == [trace.artefact.id for trace in traces]
    assert tables.artefact.parameters["rows"] == {
        part: sum(int(of_part(one, part).sum()) for one in rows) for part in FIT_PARTS
    }


def test_a_sample_block_never_holds_rows_of_two_traces(tmp_path):
    layers = [TraceLayer(0, 8, 2)]
    one, other = rows_of(3, 1500, layers, 0), rows_of(4, 1500, layers, 0)
    for rows, token in ((one, 1), (other, 2)):
        rows.split[:], rows.source[:], rows.token_id[:] = 0, 0, token
    other.split[:9] = 1
    traces = [publish_rows(tmp_path / name, layers, [rows]) for name, rows in (("a", one), ("b", other))]
    sample = next(whole(tmp_path / "tables", traces).samples("fit"))
    blocks = np.split(sample.token_id, sample.block_start[1:-1])
    assert [len(block) for block in blocks] == [1024, 476, 1024, 467]
    assert all(len(set(block.tolist())) == 1 for block in blocks)


def test_the_1_gram_stands_on_the_top_expert_of_the_layer_before(two, tmp_path):
    rows, traces = two
    tables = whole(tmp_path / "tables", traces)
    assert tables.onegram(LAYERS[0]) is None
    for index, layer in enumerate(LAYERS[1:], 1):
        expected = np.zeros((2, LAYERS[index - 1].num_experts, layer.num_experts), int)
        for one in rows:
            for row in np.flatnonzero(in_tables(one)):
                for expert in one.experts[index][row]:
                    expected[int(of_part(one, "validation")[row]), one.experts[index - 1][row, 0], expert] += 1
        assert tables.onegram(layer).tolist() == expected.tolist()
    assert tables.bigram(LAYERS[1]) is None
    bigram = tables.bigram(LAYERS[3])
    assert bigram["count"].sum() == sum(in_tables(one).sum() for one in rows)


def test_rare_ids_count_as_never_seen(two, tmp_path):
    rows, traces = two
    everything, tables = whole(tmp_path / "all", traces), whole(tmp_path / "tables", traces, min_count=13)
    tokens = np.concatenate([one.token_id[in_tables(one)] for one in rows])
    often = {token for token, count in Counter(tokens.tolist()).items() if count >= 13 and token != UNKNOWN_TOKEN}
    assert 0 < len(often) < 64
    occurrences, neighbour = tables.vocabulary()
    assert set(np.flatnonzero(occurrences.sum(axis=0)).tolist()) == often
    assert neighbour.tolist() == [token if token in often else NO_NEIGHBOUR for token in range(64)]
    for layer in LAYERS:
        expected = {key: count for key, count in as_counter(everything.counts(layer)).items() if key[0] in often}
        assert as_counter(tables.counts(layer)) == expected
        for name, array in everything.statistics(layer).items():
            assert tables.statistics(layer)[name].tolist() == array.tolist()
    assert tables.artefact.parameters["min_count"] == 13


def test_unknown_ids_are_in_no_token_count_but_in_everything_else(tmp_path):
    rows = rows_of(7, 500, unknown=0.5)
    tables = whole(tmp_path / "tables", publish_rows(tmp_path / "trace", LAYERS, [rows], group=100))
    used, known = in_tables(rows), rows.token_id != UNKNOWN_TOKEN
    for index, layer in enumerate(LAYERS):
        assert as_counter(tables.counts(layer)) == counted(
            rows.token_id[used & known], rows.experts[index][used & known]
        )
        assert tables.statistics(layer)["popularity"].sum() == used.sum() * layer.top_k
    for part in FIT_PARTS:
        for index, sample in enumerate(tables.samples(part)):
            assert sample.token_id.tolist() == rows.token_id[of_part(rows, part)].tolist()
            assert sample.experts.tolist() == rows.experts[index][of_part(rows, part)].tolist()
            assert sample.phase.tolist() == rows.phase[of_part(rows, part)].tolist()
            assert sample.early is None


def test_samples_carry_the_early_gate_and_say_where_it_was_not_asked(tmp_path):
    rows = [rows_of(seed, 200) for seed in (1, 2, 3)]
    asked = replace(rows[0], early=early_rows(np.random.default_rng(0), 200, LAYERS))
    traces = [
        publish_rows(tmp_path / "a", LAYERS, [asked, rows[1]], group=64, early=True),
        publish_rows(tmp_path / "b", LAYERS, [rows[2]], group=64),
    ]
    tables = whole(tmp_path / "tables", traces)
    mine = of_part(rows[0], "fit")
    for index, (layer, sample) in enumerate(zip(LAYERS, tables.samples("fit"), strict=True)):
        ids, logits = sample.early
        assert ids.shape == logits.shape == (len(sample.token_id), layer.num_early)
        assert (ids.dtype, logits.dtype) == (np.uint16, np.float16)
        assert ids[: mine.sum()].tolist() == asked.early.ids[index][mine].tolist()
        assert logits[: mine.sum()].tolist() == asked.early.logits[index][mine].tolist()
        assert np.isnan(logits[mine.sum() :]).all()
    stored = pq.read_table(tables.artefact.path / "samples.parquet")
    nulls = len(stored) - sum(of_part(rows[0], part).sum() for part in FIT_PARTS)
    assert stored[LAYERS[0].early_columns[0]].null_count == nulls
    shards = [shard(tmp_path / f"tables-{n}-of-2", traces, n, 2) for n in (1, 2)]
    assert contents(merged(tmp_path / "merged", shards, traces).artefact.path) == contents(tables.artefact.path)


def gate_record(folder, seed, rows):
    """linear/ as a trace keeps it."""
    generator = np.random.default_rng(seed)
    folder.mkdir()
    save_arrays(folder / "embedding.safetensors", {"embedding": np.ones((5, 2), np.float16)})
    facts = {
        f"{part}.recent": generator.integers(0, 5, (rows, 5)).astype(np.uint32) for part in ("validation", "heldout")
    }
    save_arrays(folder / "rows.safetensors", facts)
    arrays = {"xx": generator.normal(size=(3, 3)), "xy": generator.normal(size=(3, 4)), "yy": generator.normal(size=4)}
    arrays |= {
        f"{part}.experts": generator.integers(0, 4, (rows, 2)).astype(np.uint16) for part in ("validation", "heldout")
    }
    save_arrays(folder / "layer_00.safetensors", arrays)


def test_gate_records_of_several_traces_add_up(tmp_path):
    for name, seed, rows in (("a", 1, 16_000), ("b", 2, 1_000)):
        gate_record(tmp_path / name, seed, rows)
    add_records([tmp_path / "a", tmp_path / "none", tmp_path / "b"], tmp_path / "both")
    one, other, both = (load_arrays(tmp_path / name / "layer_00.safetensors") for name in ("a", "b", "both"))
    for name in SUMS:
        assert both[name].tolist() == (one[name] + other[name]).tolist()
    expected = np.concatenate([one["heldout.experts"], other["heldout.experts"][:384]])
    assert both["heldout.experts"].tolist() == expected.tolist()
    assert len(load_arrays(tmp_path / "both/rows.safetensors")["validation.recent"]) == SAMPLE_ROWS
    add_records([tmp_path / "a"], tmp_path / "alone")
    assert contents(tmp_path / "alone") == contents(tmp_path / "a")
    assert (SAMPLE_ROWS, SUMS) == (linear.SAMPLE_ROWS, linear.SUMS)


def test_gate_records_of_other_embeddings_do_not_add_up(tmp_path):
    gate_record(tmp_path / "a", 1, 4)
    gate_record(tmp_path / "b", 2, 4)
    save_arrays(tmp_path / "b/embedding.safetensors", {"embedding": np.zeros((5, 2), np.float16)})
    with pytest.raises(InputError, match="differ in embedding"):
        add_records([tmp_path / "a", tmp_path / "b"], tmp_path / "both")


def test_a_gate_record_goes_through_shards_once(two, tmp_path):
    for name in "ab":
        trace = two[1]["ab".index(name)]
        shutil.copytree(trace.artefact.path, tmp_path / name)
        gate_record(tmp_path / name / "linear", ord(name), 10)
    traces = [
        replace(trace, artefact=replace(trace.artefact, path=tmp_path / name))
        for trace, name in zip(two[1], "ab", strict=True)
    ]
    expected = whole(tmp_path / "whole", traces)
    shards = [shard(tmp_path / f"tables-{n}-of-3", traces, n, 3) for n in (1, 2, 3)]
    found = merged(tmp_path / "merged", shards, traces)
    assert (found.artefact.path / "linear/layer_00.safetensors").exists()
    assert contents(found.artefact.path) == contents(expected.artefact.path)


def test_zero_experts_are_refused_by_name(tmp_path):
    layers = [TraceLayer(0, 8, 2), TraceLayer(3, 8, 2, num_zero=2)]
    rows = random_rows(np.random.default_rng(0), 40, layers)
    with pytest.raises(ImpossibleError, match=r"zero experts \(num_zero, layers 03\)"):
        whole(tmp_path / "tables", publish_rows(tmp_path / "trace", layers, [rows]))


def test_traces_of_two_models_or_one_trace_twice_are_refused(two, tmp_path):
    _, traces = two
    other = publish_rows(tmp_path / "other", LAYERS[:2], [rows_of(1, 50, LAYERS[:2])])
    with pytest.raises(InputError, match="2 layers"):
        check_traces([traces[0], other])
    model = {**traces[1].artefact.manifest["model"], "router_sha256": "1" * 64}
    manifest = {**traces[1].artefact.manifest, "model": model}
    with pytest.raises(InputError, match="trace1"):
        check_traces([traces[0], replace(traces[1], artefact=replace(traces[1].artefact, manifest=manifest))])
    with pytest.raises(InputError, match="the same trace; name it once"):
        check_traces([traces[0], traces[1], traces[0]])


@pytest.mark.parametrize(
    ("experts", "message"), [([[3, 3]], r"row 0: experts \[3, 3\] repeat"), ([[8, 1]], "expert id 8; it has 8")]
)
def test_damaged_rows_are_named(tmp_path, experts, message):
    """The writer refuses them, so they are put in behind its back."""
    layers = [TraceLayer(0, 8, 2)]
    rows = random_rows(np.random.default_rng(0), 40, layers)
    rows.split[0] = 0
    rows.experts[0][0] = experts[0]
    with patch("smoe_profiles.trace_writer.check_layers"):
        trace = publish_rows(tmp_path / "trace", layers, [rows])
    with pytest.raises(InputError, match=message):
        whole(tmp_path / "tables", trace)


def test_rows_that_the_manifest_does_not_know_are_an_input_error(tmp_path):
    rows = rows_of(0, 40)
    trace = publish_rows(tmp_path / "trace", LAYERS, [rows])
    trace.artefact.parameters["rows"]["fit"] += 1
    with pytest.raises(InputError, match="other rows than its manifest says"):
        whole(tmp_path / "tables", trace)


def test_large_tables_are_the_bytes_of_one_plain_write(tmp_path):
    """Counters are looked through and written in runs; the file is what one write of all entries gives."""
    import pyarrow as pa

    layer, vocab = TraceLayer(0, 300, 2), 7000
    counts = empty_counts([layer], 0, np.arange(vocab, dtype=np.uint32) * 3, 100)
    dense = np.random.default_rng(0).integers(0, 4, (2, vocab, 300)).astype(np.uint32)
    counts.tokens.low[:] = dense.reshape(-1, 300)
    write_layer(tmp_path, layer, counts, whole=True)
    part, token, expert = np.nonzero(dense)
    assert len(part) > 2**21
    table = pa.table(
        {
            "token_id": (token * 3).astype(np.uint32),
            "expert": expert.astype(np.uint16),
            "count": dense[part, token, expert],
            "split": pa.DictionaryArray.from_arrays(part.astype(np.int8), pa.array(FIT_PARTS)),
        }
    )
    pq.write_table(table, tmp_path / "plain.parquet", compression="zstd")
    assert (tmp_path / "counts_00.parquet").read_bytes() == (tmp_path / "plain.parquet").read_bytes()


def test_tables_of_before_phases_were_kept_can_still_be_read(two, tmp_path):
    tables = whole(tmp_path / "tables", two[1])
    path = tables.artefact.path / "samples.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["phase"]), path)
    assert next(tables.samples("fit")).phase is None


def test_two_stacks_of_layers_do_not_share_files(tmp_path):
    layers = [TraceLayer(0, 8, 2), TraceLayer(0, 4, 2, stack="mtp_")]
    rows = random_rows(np.random.default_rng(0), 60, layers)
    tables: Tables = whole(tmp_path / "tables", publish_rows(tmp_path / "trace", layers, [rows]))
    assert open_tables(tables.artefact.path).statistics(layers[1])["popularity"].shape == (2, 4)
    assert tables.statistics(layers[0])["popularity"].shape == (2, 8)
    assert json.loads((tables.artefact.path / "manifest.json").read_text())["files"]
