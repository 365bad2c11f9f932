"""What went wrong elsewhere when counting, each a test named after it."""

import shutil

import numpy as np
import pytest

from smoe_profiles.artefact import open_artefact
from smoe_profiles.errors import InputError
from smoe_profiles.table_layers import add_written, empty_counts, token_slots, write_layer
from smoe_profiles.table_writer import SHARD, order_shards
from smoe_profiles.tables import NO_NEIGHBOUR, Tables, count_tokens
from smoe_profiles.trace import TraceLayer
from smoe_solvers.predictors import TokenChoice, rank_counts, token_table
from tests.profiles.conftest import random_rows
from tests.profiles.tables_by_hand import as_counter, contents, counted, in_tables, merged, publish_rows, shard, whole

LAYERS = [TraceLayer(0, 8, 2), TraceLayer(1, 70, 2), TraceLayer(2, 8, 2)]


def rows_of(seed, count=200):
    return random_rows(np.random.default_rng(seed), count, LAYERS)


@pytest.fixture
def trace(tmp_path):
    return publish_rows(tmp_path / "trace", LAYERS, [rows_of(0)], group=50)


def test_vocabulary_rows_that_no_tokenizer_names_fall_back_and_are_no_index_error(tmp_path):
    """The vocabulary is padded to 100, ids end at 64."""
    trace = publish_rows(tmp_path / "trace", LAYERS, [rows_of(0)], vocab_size=100)
    tables = whole(tmp_path / "tables", trace)
    occurrences, neighbour = tables.vocabulary()
    assert occurrences.shape == (2, 100)
    assert (neighbour[64:] == NO_NEIGHBOUR).all()
    counts = tables.counts(LAYERS[0])
    hosts = np.arange(8)[:, None] // 4 == np.arange(2)
    activations = rank_counts((counts.token_id, counts.expert, counts.count), 100, hosts)
    seen = activations.sum(axis=1) / 2
    scores = token_table(activations, seen, np.array([0.25, 0.75]), neighbour, 2, TokenChoice(1.0, "neighbour"))
    assert scores[64:].tolist() == [[0.5, 1.5]] * 36


def test_fewer_ids_than_the_largest_id_do_not_shift_or_lose_any(tmp_path):
    """Three ids alone, far apart; tables go by id, not by how many there are."""
    rows = rows_of(0)
    rows.token_id[:] = np.array([3, 40_000, 99_999], np.uint32)[rows.token_id % 3]
    tables = whole(tmp_path / "tables", publish_rows(tmp_path / "trace", LAYERS, [rows], vocab_size=100_000))
    used = in_tables(rows)
    assert as_counter(tables.counts(LAYERS[1])) == counted(rows.token_id[used], rows.experts[1][used])
    assert np.flatnonzero(tables.vocabulary()[1] != NO_NEIGHBOUR).tolist() == [3, 40_000, 99_999]


@pytest.mark.parametrize("count", [2**24 + 1, 2**31 + 1, 2**32 - 1, 2**32 + 1, 2**38 + 1])
def test_counters_do_not_stop_at_2_to_the_24th(tmp_path, count, trace):
    """Whole numbers all the way, written, read, and added up with another shard's."""
    counts = empty_counts(LAYERS[1:2], 0, np.array([5], np.uint32), count)
    for place, expert in ((0, 7), (1, 69)):
        counts.tokens.low[place, expert], counts.tokens.high[place, expert] = count % 256, count // 256
    write_layer(tmp_path, LAYERS[1], counts, whole=True)
    tables = Tables(open_artefact(trace.artefact.path, "trace"), tuple(LAYERS), 64)
    object.__setattr__(tables.artefact, "path", tmp_path)
    assert as_counter(tables.counts(LAYERS[1])) == {(5, 7): count, (5, 69): count}
    total = empty_counts(LAYERS[1:2], 0, np.array([5], np.uint32), 2 * count)
    for _ in range(2):
        add_written(total, tmp_path, LAYERS[1], token_slots(total.token_id, 64))
    assert int(total.tokens.low[0, 7]) + 256 * int(total.tokens.high[0, 7]) == 2 * count


def test_ids_above_256_do_not_fall_into_one_bin(tmp_path):
    """Neighbouring ids above what half precision tells apart, tokens and experts both."""
    layers = [TraceLayer(0, 2100, 2)]
    rows = random_rows(np.random.default_rng(0), 60, layers, 64)
    rows.experts[0][:] = 2049 + np.arange(120).reshape(60, 2) % 40
    rows.token_id[:] = 4097 + np.arange(60) % 3
    tables = whole(tmp_path / "tables", publish_rows(tmp_path / "trace", layers, [rows], vocab_size=5000))
    used = in_tables(rows)
    assert as_counter(tables.counts(layers[0])) == counted(rows.token_id[used], rows.experts[0][used])
    assert as_counter(count_tokens(rows.token_id, rows.experts[0], 2100)) == counted(rows.token_id, rows.experts[0])


def test_shards_of_an_input_that_changed_in_between_are_not_added_up(tmp_path, trace):
    """Items are not skipped or counted twice by number; the trace's identity and the seed must be the same."""
    first = shard(tmp_path / "tables-1-of-2", [trace], 1, 2)
    grown = publish_rows(tmp_path / "grown", LAYERS, [rows_of(0), rows_of(1)], group=50)
    with pytest.raises(InputError, match="differ in traces"):
        order_shards([first, shard(tmp_path / "tables-2-of-2", [grown], 2, 2)])
    with pytest.raises(InputError, match="differ in seed"):
        order_shards([first, shard(tmp_path / "seeded", [trace], 2, 2, seed=1)])


def test_a_shard_that_is_missing_twice_or_of_another_number_is_named(tmp_path, trace):
    """What is done is read from finished shards, by what their manifests say."""
    shards = [shard(tmp_path / f"tables-{n}-of-3", [trace], n, 3) for n in (1, 2, 3)]
    assert order_shards(shards[::-1]) == shards
    with pytest.raises(InputError, match="lacks shard 2 of 3"):
        order_shards([shards[0], shards[2]])
    shutil.copytree(tmp_path / "tables-2-of-3", tmp_path / "tables-02-of-3")
    doubled = open_artefact(tmp_path / "tables-02-of-3", SHARD)
    with pytest.raises(InputError, match="are both shard 2 of 3"):
        order_shards([*shards, doubled])
    with pytest.raises(InputError, match="one of 2 shards"):
        order_shards([*shards, shard(tmp_path / "tables-2-of-2", [trace], 2, 2)])
    (tmp_path / "tables-3-of-3" / "statistics_01.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="statistics_01"):
        open_artefact(tmp_path / "tables-3-of-3", SHARD)


def test_the_layout_of_files_and_row_groups_moves_no_row_to_another_shard(tmp_path):
    """Shards are runs of rows, so another block layout of the same rows gives the same files."""
    rows, found = rows_of(4, 333), []
    for name, group, file in (("a", 10, 30), ("b", 64, 64), ("c", 65_536, 2**20)):
        trace = publish_rows(tmp_path / name, LAYERS, [rows], group=group, file=file)
        shards = [shard(tmp_path / f"{name}-{n}", [trace], n, 3) for n in (1, 2, 3)]
        files = [contents(one.path) for one in [*shards, merged(tmp_path / f"{name}-all", shards, [trace]).artefact]]
        found.append([{name: data for name, data in one.items() if name != "manifest.json"} for one in files])
    assert found[0] == found[1] == found[2]


def test_the_order_and_choice_of_samples_hang_on_the_seed_and_rows_alone(tmp_path, trace):
    """The seed and versions are kept, and the sample's ids themselves lie in the tables."""
    tables = whole(tmp_path / "tables", trace, seed=5)
    again = whole(tmp_path / "again", trace, seed=5)
    assert contents(tables.artefact.path) == contents(again.artefact.path)
    manifest = tables.artefact.manifest
    assert (manifest["seed"], tables.artefact.parameters["seed"]) == (5, 5)
    assert {"numpy", "pyarrow", "numba"} <= set(manifest["versions"])
    assert manifest["parents"] == [{"kind": "trace", "id": trace.artefact.id}]
    assert len(next(tables.samples("fit")).token_id)
