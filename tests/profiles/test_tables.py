"""Every count against loops over the rows, every file against the library that defines its format."""

import json
from collections import Counter
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from smoe_profiles.errors import InputError
from smoe_profiles.models import find_model
from smoe_profiles.neighbours import nearest_neighbours
from smoe_profiles.split import PARTS
from smoe_profiles.table_rows import Share, choose_blocks, survey_rows
from smoe_profiles.table_writer import write_tables
from smoe_profiles.tables import NO_NEIGHBOUR, Counts, add_counts, count_tokens, load_arrays, save_arrays
from smoe_profiles.trace import Rows, TraceLayer
from tests.profiles.conftest import publish_trace, random_rows
from tests.profiles.tables_by_hand import as_counter, blocks_by_hand, counted, in_tables, of_part, publish_rows, whole
from tests.profiles.tiny_models import VOCAB

FIT_PARTS = ("fit", "validation")
many = settings(max_examples=50, deadline=None)


def routings(experts=6, top_k=2):
    """A seeded routing of up to 30 rows: token ids [N] and experts [N, K]."""

    def draw(count, seed):
        generator = np.random.default_rng(seed)
        ids = np.stack([generator.permutation(experts)[:top_k] for _ in range(count)]) if count else []
        return (
            generator.integers(0, 5, count).astype(np.uint32),
            np.array(ids, np.uint16).reshape(count, top_k),
        )

    return st.builds(draw, st.integers(0, 30), st.integers(0, 10**6))


@given(routings())
@many
def test_token_counts_equal_a_loop_over_rows(routing):
    tokens, experts = routing
    found = count_tokens(tokens, experts, 6)
    assert as_counter(found) == counted(tokens, experts)
    keys = list(zip(found.token_id.tolist(), found.expert.tolist(), strict=True))
    assert keys == sorted(keys)


@given(st.lists(routings(), min_size=1, max_size=4))
@many
def test_counts_of_shards_add_up_to_the_counts_of_the_whole(shards):
    total = count_tokens(*shards[0], 6)
    for shard in shards[1:]:
        total = add_counts(total, count_tokens(*shard, 6))
    whole = count_tokens(*(np.concatenate(column) for column in zip(*shards, strict=True)), 6)
    for name in ("token_id", "expert", "count"):
        assert getattr(total, name).tolist() == getattr(whole, name).tolist()


def test_counts_beyond_32_bits_add_up():
    one = Counts(np.array([7], np.uint32), np.array([3], np.uint16), np.array([2**40]))
    total = add_counts(one, one)
    assert as_counter(total) == {(7, 3): 2**41}


def test_the_largest_ids_are_counted():
    tokens, experts = np.array([2**32 - 1], np.uint32), np.array([[65535]], np.uint16)
    assert as_counter(count_tokens(tokens, experts, 65536)) == {(2**32 - 1, 65535): 1}


@given(st.integers(0, 10**6), st.integers(1, 12))
@many
def test_an_unseen_id_takes_the_seen_id_of_highest_cosine(seed, block):
    generator = np.random.default_rng(seed)
    vocab = int(generator.integers(1, 20))
    embedding = generator.normal(size=(vocab + 2, 4)).astype(np.float32)
    seen = generator.random(vocab) < 0.5
    found = nearest_neighbours(embedding, seen, block)
    exact = embedding.astype(np.float64)
    for token in range(vocab):
        if not seen.any():
            assert found[token] == NO_NEIGHBOUR
        elif seen[token]:
            assert found[token] == token
        else:
            cosine = {
                other: exact[token] @ exact[other] / np.linalg.norm(exact[token]) / np.linalg.norm(exact[other])
                for other in range(vocab)
                if seen[other]
            }
            assert cosine[int(found[token])] >= max(cosine.values()) - 1e-6


def test_ids_beyond_the_embedding_have_no_neighbour_and_are_none():
    embedding = np.array([[1, 0], [0, 1]], np.float32)
    seen = np.array([True, False, True, False])
    assert nearest_neighbours(embedding, seen).tolist() == [0, 0, 2, NO_NEIGHBOUR]


def test_equal_neighbours_go_to_the_lower_id_and_a_zero_row_is_no_error():
    embedding = np.array([[1, 0], [0, 1], [0, 1], [0, 2], [0, 0]], np.float32)
    seen = np.array([True, True, True, False, False])
    assert nearest_neighbours(embedding, seen).tolist() == [0, 1, 2, 1, 0]


@given(
    st.lists(st.tuples(st.integers(1, 90), st.sampled_from([0, 1]), st.sampled_from([0, 0, 0, 1, 2])), max_size=9),
    st.integers(0, 5),
    st.integers(20, 200),
)
@settings(max_examples=25, deadline=None)
def test_sample_rows_equal_blocks_cut_by_hand(tmp_path_factory, runs, seed, group):
    """Runs of sources and parts, in row groups of any size; blocks of 8 rows stand for 1,024."""
    folder = tmp_path_factory.mktemp("blocks")
    runs = [(1, 0, 0), (1, 0, 1), *runs]
    layers = [TraceLayer(0, 4, 1)]
    rows = random_rows(np.random.default_rng(seed), sum(length for length, _, _ in runs), layers)
    for name, place in (("source", 1), ("split", 2)):
        getattr(rows, name)[:] = [run[place] for run in runs for _ in range(run[0])]
    trace = publish_rows(folder / "trace", layers, [rows], group=group, file=4 * group)
    with patch("smoe_profiles.table_rows.BLOCK_ROWS", 8):
        survey = survey_rows([trace], folder, Share(), 64, seed)
    for part, max_blocks, min_blocks in (("fit", 48, 1), ("validation", 16, 8)):
        mine = np.flatnonzero(of_part(rows, part))
        blocks = blocks_by_hand(rows.source[mine], 8, max_blocks, min_blocks, seed)
        sampled = survey.samples[part]
        assert sampled.row.tolist() == [int(row) for start, stop in blocks for row in mine[start:stop]]
        assert sampled.block.tolist() == [n for n, (start, stop) in enumerate(blocks) for _ in range(start, stop)]


@pytest.mark.parametrize("blocks", [1, 47, 48, 49, 10_000])
def test_blocks_are_spread_evenly_and_never_exceed_their_budget(blocks):
    chosen = choose_blocks(blocks, 48, 0)
    assert len(chosen) == min(blocks, 48)
    assert (np.diff(chosen) > 0).all()
    assert 0 <= chosen[0] <= chosen[-1] < blocks
    assert np.diff(chosen, prepend=-1).max() <= -(-blocks // len(chosen)) + 1


def test_another_seed_takes_other_blocks():
    assert choose_blocks(1000, 40, 3).tolist() != choose_blocks(1000, 40, 4).tolist()


ARRAYS = {
    "b_scores": np.arange(6, dtype=np.uint8).reshape(2, 3),
    "a_counts": np.arange(4, dtype=np.int64),
    "ids": np.arange(3, dtype=np.uint16),
    "labels": np.arange(5, dtype=np.int32),
    "wide": np.arange(2, dtype=np.uint32),
    "floats": np.array([[0.5]], np.float32),
    "empty": np.empty((0, 4), np.int64),
    "scalar": np.array(7, np.int64),
    "turned": np.arange(6, dtype=np.int64).reshape(2, 3).T,
}


def test_saved_arrays_are_read_by_the_safetensors_library_and_lie_aligned(tmp_path):
    path = tmp_path / "a.safetensors"
    save_arrays(path, ARRAYS, {"who": "me"})
    found = load_file(path)
    assert set(found) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        assert found[name].tolist() == array.tolist()
        assert load_arrays(path)[name].tolist() == array.tolist()
    with safe_open(path, "np") as file:
        assert file.metadata() == {"who": "me"}
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name, array in ARRAYS.items():
        assert (8 + length + header[name]["data_offsets"][0]) % array.itemsize == 0


def test_the_same_arrays_in_any_order_give_the_same_bytes(tmp_path):
    save_arrays(tmp_path / "one", ARRAYS, {"a": "1", "b": "2"})
    save_arrays(tmp_path / "two", dict(reversed(ARRAYS.items())), {"b": "2", "a": "1"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda _data: b"", lambda data: b"\xff" * 8 + data[8:]])
def test_a_damaged_array_file_is_an_input_error_naming_it(damage, tmp_path):
    path = tmp_path / "statistics_00.safetensors"
    save_arrays(path, ARRAYS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match="statistics_00"):
        load_arrays(path)


LAYERS = [TraceLayer(1, 8, 2), TraceLayer(2, 6, 3), TraceLayer(5, 70, 2)]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(rows, tables) of a trace of 2,000 rows over three layers of different size, without a model."""
    folder = tmp_path_factory.mktemp("tables")
    rows = random_rows(np.random.default_rng(1), 2000, LAYERS)
    trace = publish_trace(folder / "trace", LAYERS, [rows])
    return rows, whole(folder / "tables", trace)


def test_counts_of_each_part_are_kept_apart_and_add_up(small):
    rows, tables = small
    for index, layer in enumerate(LAYERS):
        for parts in (["fit"], ["validation"], FIT_PARTS):
            mine = np.logical_or.reduce([of_part(rows, part) for part in parts])
            expected = counted(rows.token_id[mine], rows.experts[index][mine])
            assert as_counter(tables.counts(layer, parts)) == expected


def test_heldout_rows_are_in_no_table(small):
    rows, tables = small
    used = sum(of_part(rows, part).sum() for part in FIT_PARTS)
    assert tables.artefact.parameters["rows"] == {part: int(of_part(rows, part).sum()) for part in FIT_PARTS}
    for layer in LAYERS:
        assert tables.counts(layer).count.sum() == used * layer.top_k
    occurrences, _ = tables.vocabulary()
    assert occurrences.sum() == used


def test_statistics_equal_loops(small):
    rows, tables = small
    for index, layer in enumerate(LAYERS):
        found = tables.statistics(layer)
        assert ("transitions" in found) == (index > 0)
        for number, part in enumerate(FIT_PARTS):
            mine = np.flatnonzero(of_part(rows, part))
            popularity = np.zeros(layer.num_experts, int)
            together = np.zeros((layer.num_experts, layer.num_experts), int)
            before = np.zeros((LAYERS[index - 1].num_experts, layer.num_experts), int)
            for row in mine:
                for one in rows.experts[index][row]:
                    popularity[one] += 1
                    for other in rows.experts[index][row]:
                        together[one, other] += 1
                    for earlier in rows.experts[index - 1][row]:
                        before[earlier, one] += 1
            assert found["popularity"][number].tolist() == popularity.tolist()
            assert found["coactivation"][number].tolist() == together.tolist()
            if index:
                assert found["transitions"][number].tolist() == before.tolist()


def test_the_2_gram_file_stands_on_the_top_experts_of_the_two_layers_before(small):
    rows, tables = small
    expected = Counter()
    for row in np.flatnonzero(in_tables(rows)):
        for expert in rows.experts[2][row]:
            expected[int(rows.experts[0][row, 0]), int(rows.experts[1][row, 0]), int(expert)] += 1
    table = pq.read_table(tables.artefact.path / "bigram_05.parquet").to_pylist()
    found = {(row["first"], row["second"], row["expert"]): row["count"] for row in table}
    assert found == {key: count for key, count in expected.items() if count > 1}
    assert not list(tables.artefact.path.glob("bigram_0[12].parquet"))


def test_occurrences_and_neighbours_without_a_model(small):
    rows, tables = small
    occurrences, neighbour = tables.vocabulary()
    for number, part in enumerate(FIT_PARTS):
        assert occurrences[number].tolist() == [
            int((rows.token_id[of_part(rows, part)] == token).sum()) for token in range(64)
        ]
    seen = occurrences.sum(axis=0) > 0
    assert neighbour.tolist() == [token if seen[token] else NO_NEIGHBOUR for token in range(64)]
    assert tables.artefact.parameters["neighbours"] == "popularity"


def test_samples_are_the_same_rows_in_every_layer(small):
    rows, tables = small
    for part in FIT_PARTS:
        mine = of_part(rows, part)
        tokens = rows.token_id[mine]
        samples = list(tables.samples(part))
        assert len(samples) == len(LAYERS)
        starts = samples[0].block_start
        assert starts[0] == 0
        assert starts[-1] == len(samples[0].token_id)
        assert (np.diff(starts) > 0).all()
        for index, sample in enumerate(samples):
            assert sample.token_id.tolist() == samples[0].token_id.tolist()
            assert sample.block_start.tolist() == starts.tolist()
            experts = rows.experts[index][mine]
            for start, stop in pairwise(starts):
                block = sample.token_id[start:stop]
                places = [
                    place
                    for place in range(len(tokens) - len(block) + 1)
                    if (tokens[place : place + len(block)] == block).all()
                ]
                assert any(
                    (experts[place : place + len(block)] == sample.experts[start:stop]).all() for place in places
                )
    assert len(next(iter(tables.samples("validation"))).block_start) == 9


def test_the_same_trace_gives_the_same_bytes(small, tmp_path):
    rows, _ = small
    trace = publish_trace(tmp_path / "trace", LAYERS, [rows])
    first, again = (whole(tmp_path / name, trace) for name in ("one", "two"))
    assert first.artefact.manifest["files"] == again.artefact.manifest["files"]
    assert first.artefact.id == again.artefact.id


def test_neighbours_come_from_the_models_own_input_embedding(tiny, tmp_path):
    layers = [TraceLayer(0, 8, 2), TraceLayer(1, 8, 2)]
    rows = random_rows(np.random.default_rng(2), 60, layers, VOCAB)
    trace = publish_trace(tmp_path / "trace", layers, [rows], VOCAB)
    tables = whole(tmp_path / "tables", trace, find_model(str(tiny("mixtral"))))
    embedding = load_file(tiny("mixtral") / "model.safetensors")["model.embed_tokens.weight"]
    occurrences, neighbour = tables.vocabulary()
    seen = occurrences.sum(axis=0) > 0
    assert neighbour.tolist() == nearest_neighbours(embedding, seen).tolist()
    assert tables.artefact.parameters["neighbours"] == "embedding"


@pytest.mark.parametrize("part", ["fit", "heldout"])
def test_a_trace_without_fit_or_validation_rows_is_an_input_error(part, tmp_path):
    rows = random_rows(np.random.default_rng(0), 20, LAYERS)
    rows.split[:] = PARTS.index(part)
    trace = publish_trace(tmp_path / "trace", LAYERS, [rows])
    with pytest.raises(InputError, match="0 validation rows"):
        write_tables(tmp_path, [trace], None, 0, lambda _: None)


def test_a_trace_of_no_rows_is_an_input_error(tmp_path):
    trace = publish_trace(tmp_path / "trace", LAYERS, [])
    with pytest.raises(InputError, match="trace"):
        write_tables(tmp_path, [trace], None, 0, lambda _: None)


def test_a_token_id_outside_the_vocabulary_is_an_input_error(tmp_path):
    rows = random_rows(np.random.default_rng(0), 40, LAYERS)
    rows.token_id[0] = 64
    trace = publish_trace(tmp_path / "trace", LAYERS, [rows])
    with pytest.raises(InputError, match="64"):
        write_tables(tmp_path, [trace], None, 0, lambda _: None)


def test_a_very_short_part_gives_blocks_of_single_rows(tmp_path):
    rows: Rows = random_rows(np.random.default_rng(0), 5, LAYERS)
    rows.split[:] = [0, 0, 0, 1, 1]
    trace = publish_trace(tmp_path / "trace", LAYERS, [rows])
    tables = whole(tmp_path / "tables", trace)
    assert [sample.block_start.tolist() for sample in tables.samples("validation")] == [[0, 1, 2]] * 3
