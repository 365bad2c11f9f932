"""Looking at a trace: every number against a slow loop, at every level, and files that cannot be read."""

import statistics
import tracemalloc
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.stats import kurtosis

from smoe_profiles import trace_writer
from smoe_profiles.artefact import publish
from smoe_profiles.choices import Level
from smoe_profiles.errors import InputError
from smoe_profiles.inspection.concentration import concentration, excess_kurtosis, hottest, median_of
from smoe_profiles.inspection.kinship import load_distance
from smoe_profiles.levels import write_level
from smoe_profiles.split import PARTS
from smoe_profiles.trace import PHASES, UNKNOWN_TOKEN, Rows, TraceLayer, open_trace
from tests.profiles.conftest import IDENTITY, SOURCES, publish_trace, random_rows, trace_parameters
from tests.profiles.planted_traces import LAYERS, kinds, look, lower_trace, plant, routed_rows, with_experts

# Numbers.


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 12), st.integers(1, 8))
def test_kurtosis_is_scipys(seed, experts, rows):
    generator = np.random.default_rng(seed)
    table = generator.integers(0, 5, (rows, experts)) * generator.integers(0, 2, (rows, experts))
    table[0] = 3
    found = excess_kurtosis(csr_array(table))
    for row, value in zip(table, found, strict=True):
        if len(set(row.tolist())) == 1:
            assert np.isnan(value)
        else:
            assert value == pytest.approx(kurtosis(row.astype(float)), rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_hottest_and_concentration_equal_a_loop(seed, top_k):
    generator = np.random.default_rng(seed)
    table = generator.integers(0, 4, (6, 7)) * generator.integers(0, 2, (6, 7))
    hot = hottest(csr_array(table), top_k)
    shares, tails = [], []
    for counts, found in zip(table, hot, strict=True):
        order = sorted((e for e in range(7) if counts[e]), key=lambda e: (-counts[e], e))[:top_k]
        assert sorted(order) == np.flatnonzero(found).tolist()
        if counts.sum() >= 2 * top_k:
            shares.append(sum(counts[e] for e in order) / counts.sum())
            tails += [kurtosis(counts.astype(float))] if len(set(counts.tolist())) > 1 else []
    made = concentration(csr_array(table), top_k)
    assert made.token_ids == len(shares)
    assert made.hottest == (pytest.approx(statistics.median(shares)) if shares else None)
    assert made.kurtosis == (pytest.approx(statistics.median(tails)) if tails else None)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=12))
def test_the_median_of_counted_values_is_the_median(values):
    assert median_of(Counter(values)) == (statistics.median(values) if values else None)


def small_trace(path, fit, heldout, layer):
    """(token id, experts) pairs of two parts as a trace."""
    pairs = [*fit, *heldout]
    rows = Rows(
        sequence=np.zeros(len(pairs), np.uint32),
        position=np.arange(len(pairs), dtype=np.uint32),
        token_id=np.array([token for token, _ in pairs], np.uint32),
        phase=np.zeros(len(pairs), np.int16),
        source=np.zeros(len(pairs), np.int16),
        split=np.array([0] * len(fit) + [2] * len(heldout), np.int16),
        experts=[np.array([experts for _, experts in pairs], np.uint16)],
        weights=[None],
    )
    return publish_trace(path, [layer], [rows])


def test_f1_by_hand(tmp_path):
    """Token 5's hottest two are 1 and 2 (3 comes up once); token 6 has a tie, which goes to 0 and 4; 7 is not known."""
    fit = [(5, [1, 2]), (5, [1, 3]), (5, [2, 1]), (6, [4, 0]), (6, [7, 4])]
    heldout = [(5, [1, 2]), (5, [3, 1]), (5, [3, 6]), (6, [0, 4]), (7, [1, 2])]
    found = look(small_trace(tmp_path / "trace", fit, heldout, TraceLayer(0, 8, 2))).layers[0].prediction
    assert (found.rows, found.covered) == (5, 4)
    assert found.median_f1 == 0.75  # of 1, 1/2, 0, 1
    assert found.mean_f1 == pytest.approx(2.5 / 4)


def loop_numbers(batches, index, layer):
    """Load, prediction and loads by source and phase of one layer, row by row."""
    load, by_source, by_phase = Counter(), defaultdict(Counter), defaultdict(Counter)
    fit, held = defaultdict(Counter), []
    for rows in batches:
        for i, experts in enumerate(rows.experts[index].tolist()):
            load.update(experts)
            by_source[SOURCES[rows.source[i]]].update(experts)
            by_phase[PHASES[rows.phase[i]]].update(experts)
            if rows.split[i] == 0 and rows.token_id[i] != UNKNOWN_TOKEN:
                fit[rows.token_id[i]].update(experts)
            elif rows.split[i] == 2:
                held.append((rows.token_id[i], set(experts)))
    f1 = []
    for token, experts in held:
        if token in fit:
            hot = sorted(fit[token], key=lambda e: (-fit[token][e], e))[: layer.top_k]
            f1.append(2 * len(experts & set(hot)) / (len(hot) + len(experts)))
    return load, by_source, by_phase, len(held), f1


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4), unknown=st.booleans())
def test_every_number_equals_a_loop_whatever_the_row_groups(seed, sizes, unknown, tmp_path_factory):
    generator = np.random.default_rng(seed)
    batches = [random_rows(generator, size, LAYERS, first_sequence=100 * i) for i, size in enumerate(sizes)]
    for rows in batches:
        rows.phase[:] = generator.integers(0, 2, len(rows.phase))
        rows.token_id[generator.random(len(rows.token_id)) < 0.2 * unknown] = UNKNOWN_TOKEN
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_writer, "ROW_GROUP", 16)
        patch.setattr(trace_writer, "PART_ROWS", 48)
        trace = publish_trace(tmp_path_factory.mktemp("rows") / "trace", LAYERS, batches)
    found = look(trace)
    assert found.rows == {part: trace.rows(part) for part in PARTS}
    seen = {int(token) for rows in batches for token in rows.token_id} - {UNKNOWN_TOKEN}
    assert found.token_ids == len(seen)
    for index, (layer, report) in enumerate(zip(LAYERS, found.layers, strict=True)):
        load, by_source, by_phase, held, f1 = loop_numbers(batches, index, layer)
        assert report.count.tolist() == [load[e] for e in range(layer.num_experts)]
        for kept, counted in ((report.by_source, by_source), (report.by_phase, by_phase)):
            assert kept.keys() == counted.keys()
            for name, counts in counted.items():
                assert kept[name].tolist() == [counts[e] for e in range(layer.num_experts)]
        if report.prediction is None:
            assert not held or not found.rows["fit"] or not seen
        else:
            assert (report.prediction.rows, report.prediction.covered) == (held, len(f1))
            assert report.prediction.median_f1 == (pytest.approx(statistics.median(f1)) if f1 else None)
            assert report.prediction.mean_f1 == (pytest.approx(statistics.mean(f1)) if f1 else None)


def test_load_distance_is_total_variation():
    assert load_distance(np.array([2, 2, 0]), np.array([1, 0, 1])) == pytest.approx(0.5)
    assert load_distance(np.array([3, 0]), np.array([30, 0])) == 0
    assert load_distance(np.array([3, 0]), np.array([0, 1])) == 1
    assert load_distance(np.array([0, 0]), np.array([0, 1])) == 0


def test_experts_never_hit_are_counted_as_zero_and_give_no_nan(tmp_path):
    fit, heldout = [(1, [0, 1])] * 4, [(1, [1, 0])]
    report = look(small_trace(tmp_path / "trace", fit, heldout, TraceLayer(0, 8, 2))).layers[0]
    assert np.flatnonzero(report.count == 0).tolist() == [2, 3, 4, 5, 6, 7]
    assert report.concentration.hottest == 1
    assert report.concentration.kurtosis == pytest.approx(kurtosis([5.0, 5, 0, 0, 0, 0, 0, 0]))


def test_a_layer_that_uses_every_expert_in_every_row_has_no_kurtosis_and_is_not_sick(tmp_path):
    rows = routed_rows(layers=[TraceLayer(0, 4, 4)])
    found = look(publish_trace(tmp_path / "trace", [TraceLayer(0, 4, 4)], [rows]))
    assert found.layers[0].concentration.kurtosis is None
    assert found.findings == []


def test_zero_experts_are_counted_apart(tmp_path):
    layer = TraceLayer(0, 4, 2, num_zero=2)
    trace = small_trace(tmp_path / "trace", [(1, [0, 5]), (1, [4, 1])], [(1, [0, 5])], layer)
    report = look(trace).layers[0]
    assert report.count.tolist() == [2, 1, 0, 0]
    assert report.zero_count == 3
    assert look(trace).findings == []


def test_memory_does_not_grow_with_rows(tmp_path):
    layer = TraceLayer(0, 16, 3)
    peaks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_writer, "ROW_GROUP", 2000)
        for name, batches in (("short", 4), ("long", 40)):
            rows = [routed_rows(seed, 2000, [layer], first_sequence=100 * seed) for seed in range(batches)]
            trace = publish_trace(tmp_path / name, [layer], rows)
            tracemalloc.start()
            look(trace)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


# Below level token.


@pytest.mark.parametrize("level", [Level.TOKEN_COUNT, Level.PAIR, Level.COUNT])
def test_lower_levels_tell_the_same_as_the_rows_and_say_what_they_do_not_hold(level, tmp_path):
    rows = routed_rows()
    whole, found = (
        look(publish_trace(tmp_path / "rows", LAYERS, [rows])),
        look(lower_trace(tmp_path / "c", level, rows)),
    )
    assert found.findings == []
    assert found.rows == whole.rows
    assert any("no rows" in text for text in found.missing)
    for one, other in zip(found.layers, whole.layers, strict=True):
        assert one.count.tolist() == other.count.tolist()
        assert one.rows == other.rows
        if level is Level.TOKEN_COUNT:
            assert one.concentration == other.concentration
            assert one.prediction.mean_f1 == pytest.approx(other.prediction.mean_f1)
            assert (one.prediction.covered, one.prediction.median_f1) == (other.prediction.covered, None)
        else:
            assert one.concentration is None
            assert one.prediction is None


def test_pairs_without_their_diagonal_still_tell_the_load(tmp_path):
    rows = routed_rows()
    layer = LAYERS[0]
    ids = rows.experts[0].astype(np.int64)
    pairs = np.array([(a, b) for row in ids for a in row for b in row if a != b])
    with publish(tmp_path / "trace", "trace", parameters={}, model=IDENTITY) as draft:
        entries = {"expert": pairs[:, 0], "other": pairs[:, 1], "count": np.ones(len(pairs), np.int64)}
        write_level(draft.path, layer, Level.PAIR, {"fit": entries})
        counts = {"fit": len(ids), "validation": 0, "heldout": 0}
        draft.parameters |= trace_parameters([layer], counts) | {"level": "pair"}
    report = look(open_trace(tmp_path / "trace", needs=Level.COUNT)).layers[0]
    assert report.count.tolist() == np.bincount(ids.reshape(-1), minlength=layer.num_experts).tolist()


def test_counts_of_one_expert_only_are_found_at_level_count(tmp_path):
    rows = with_experts(routed_rows(), 1, np.zeros((600, 2), np.uint16))
    found = look(lower_trace(tmp_path / "trace", Level.COUNT, rows))
    assert kinds(found) == [("4", "zero-filled")]


def test_counts_that_k_does_not_divide_are_found_at_level_token_count(tmp_path):
    rows = routed_rows()
    trace = lower_trace(tmp_path / "trace", Level.TOKEN_COUNT, rows, [LAYERS[0]])
    wrong = replace(trace, layers=(replace(LAYERS[0], top_k=2),))
    assert kinds(look(wrong)) == [("1", "wrong-width")]


# Files that cannot be read.


def test_damaged_parquet_is_an_input_error(tmp_path):
    trace = publish_trace(tmp_path / "trace", LAYERS, [routed_rows()])
    part = tmp_path / "trace/part-00000.parquet"
    part.write_bytes(part.read_bytes()[:200])
    with pytest.raises(InputError, match=r"part-00000\.parquet cannot be read"):
        look(trace)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("split", pa.array([1] * 600)),
        ("split", pa.array(["test"] * 600).dictionary_encode()),
        ("source", pa.array([None] * 600, pa.string())),
        ("token_id", pa.array(["word"] * 600)),
        ("sequence", pa.array([[1]] * 600)),
    ],
)
def test_facts_of_another_kind_are_an_input_error(name, column, tmp_path):
    with pytest.raises(InputError, match="part-00000"):
        look(plant(tmp_path / "trace", LAYERS, [routed_rows()], [{name: column}]))


def test_a_missing_layer_is_an_input_error(tmp_path):
    trace = plant(tmp_path / "trace", LAYERS, [routed_rows()])
    with pytest.raises(InputError, match="has no column experts_09"):
        look(replace(trace, layers=(TraceLayer(9, 8, 2),)))
