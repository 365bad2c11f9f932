"""Looking at a trace: every number against a slow loop, every sickness planted in a real artefact and found."""

import statistics
import tracemalloc
from collections import Counter, defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.stats import kurtosis

from smoe_profiles import trace_writer
from smoe_profiles.artefact import publish
from smoe_profiles.choices import Level
from smoe_profiles.errors import InputError
from smoe_profiles.inspection.agreement import compare_traces, match_rows, near_ties
from smoe_profiles.inspection.concentration import concentration, excess_kurtosis, hottest, median_of
from smoe_profiles.inspection.counts import inspect_counts
from smoe_profiles.inspection.kinship import kinship, load_distance
from smoe_profiles.inspection.lint import LABELS, Finding, judge
from smoe_profiles.inspection.repetition import MIN_RUN, DecodeRows, EqualRuns, set_keys
from smoe_profiles.inspection.rows import inspect_rows
from smoe_profiles.inspection.scan import Facts, LayerGroup
from smoe_profiles.levels import write_level
from smoe_profiles.split import PARTS
from smoe_profiles.trace import PHASES, UNKNOWN_TOKEN, Rows, TraceLayer, open_trace, schema
from tests.profiles.conftest import IDENTITY, SOURCES, publish_trace, random_rows, trace_parameters

FIXTURE = Path(__file__).parents[1] / "fixtures/routing/gptoss20b_layers.npz"
LAYERS = [TraceLayer(1, 16, 3), TraceLayer(4, 12, 2)]
VOCAB = 64
DECODE = PHASES.index("decode")


def quiet(_count):
    pass


def look(trace):
    return (inspect_rows if trace.level is Level.TOKEN else inspect_counts)(trace, quiet)


def routed_rows(seed=0, count=600, layers=LAYERS, vocab=VOCAB, first_sequence=0):
    """Rows whose experts depend on the token id as a router's do, with noise; sequences of 20 tokens, all parts."""
    model, text = np.random.default_rng(99), np.random.default_rng(seed)
    token_id = (vocab * text.random(count) ** 2).astype(np.uint32)
    experts = []
    for layer in layers:
        taste = model.normal(size=(vocab, layer.num_experts))
        scores = taste[token_id] + text.normal(0, 0.6, (count, layer.num_experts))
        experts.append(np.argsort(-scores, axis=1)[:, : layer.top_k].astype(np.uint16))
    sequence = first_sequence + np.arange(count) // 20
    return Rows(
        sequence=sequence.astype(np.uint32),
        position=(np.arange(count) % 20).astype(np.uint32),
        token_id=token_id,
        phase=np.zeros(count, np.int16),
        source=np.zeros(count, np.int16),
        split=np.array([(0, 2, 0, 1)[number % 4] for number in sequence], np.int16),
        experts=experts,
        weights=[None] * len(layers),
    )


def with_experts(rows, index, experts):
    return replace(rows, experts=[experts if i == index else old for i, old in enumerate(rows.experts)])


def plant(path, layers, batches, columns=None, rows=None):
    """A trace artefact of whatever columns hold, one part a batch: what TraceWriter refuses to write.

    columns: by batch, name -> Arrow array in place of the batch's own.
    """
    with publish(path, "trace", parameters={}, model=IDENTITY) as draft:
        total = dict.fromkeys(PARTS, 0)
        for number, batch in enumerate(batches):
            table = arrow_table(layers, batch)
            for name, column in (columns[number] if columns else {}).items():
                table = table.set_column(table.schema.get_field_index(name), name, column)
            pq.write_table(table, draft.path / f"part-{number:05d}.parquet", write_page_checksum=True)
            for code, part in enumerate(PARTS):
                total[part] += int((batch.split == code).sum())
        draft.parameters |= trace_parameters(layers, rows or total, VOCAB)
    return open_trace(path)


def arrow_table(layers, rows):
    names = {"phase": PHASES, "source": SOURCES, "split": PARTS}
    columns = {name: pa.array(getattr(rows, name), pa.uint32()) for name in ("sequence", "position", "token_id")}
    for name, words in names.items():
        columns[name] = pa.array([words[code] for code in getattr(rows, name)], pa.string()).dictionary_encode()
    for layer, experts in zip(layers, rows.experts, strict=True):
        columns[layer.column] = lists(experts, layer.id_type)
    return pa.table(columns)


def lists(ids, kind):
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(ids).reshape(-1), kind), ids.shape[1])


def kinds(inspection):
    """What was found, layer by layer."""
    return sorted((finding.layer or "", finding.kind) for finding in inspection.findings)


def message(inspection, kind):
    return next(finding.message for finding in inspection.findings if finding.kind == kind)


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


def lower_trace(path, level, rows, layers=LAYERS):
    """The rows as counts of a lower level."""
    with publish(path, "trace", parameters={}, model=IDENTITY) as draft:
        for index, layer in enumerate(layers):
            parts = {}
            for code, part in enumerate(PARTS):
                here = rows.split == code
                ids, token = rows.experts[index][here].astype(np.int64), rows.token_id[here].astype(np.int64)
                columns = {
                    Level.TOKEN_COUNT: {"token_id": np.repeat(token, layer.top_k), "expert": ids.reshape(-1)},
                    Level.COUNT: {"expert": ids.reshape(-1)},
                    Level.PAIR: {
                        "expert": np.repeat(ids, layer.top_k, axis=1).reshape(-1),
                        "other": np.tile(ids, layer.top_k).reshape(-1),
                    },
                }[level]
                parts[part] = columns | {"count": np.ones(len(columns["expert"]), np.int64)}
            write_level(draft.path, layer, level, parts)
        counts = {part: int((rows.split == code).sum()) for code, part in enumerate(PARTS)}
        draft.parameters |= trace_parameters(layers, counts) | {"level": level.value, "ordered": False}
    return open_trace(path, needs=Level.COUNT)


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


# Sickness.


def test_a_healthy_trace_has_no_finding(tmp_path):
    found = look(publish_trace(tmp_path / "trace", LAYERS, [routed_rows()]))
    assert found.findings == []
    assert found.verdict == "healthy: none of the known sick patterns in 600 rows of 2 MoE layers"


def test_a_layer_of_zeros(tmp_path):
    """A split prefill and decode returns only zeros."""
    rows = with_experts(routed_rows(), 1, np.zeros((600, 2), np.uint16))
    found = look(plant(tmp_path / "trace", LAYERS, [rows]))
    assert kinds(found) == [("4", "zero-filled")]
    assert "600 of 600 rows are nothing but expert 0; first row 0 (part-00000.parquet" in message(found, "zero-filled")
    assert found.verdict == "sick: layer 4: rows filled with expert 0"


def test_a_tail_filled_with_zeros(tmp_path):
    rows = routed_rows()
    rows.experts[0][590:] = 0
    found = look(plant(tmp_path / "trace", LAYERS, [rows]))
    assert kinds(found) == [("1", "zero-filled")]
    assert found.findings[0].rows == 10
    assert "first row 590" in found.findings[0].message


def test_one_expert_in_every_row(tmp_path):
    """A shared expert recorded as a routed one."""
    rows = routed_rows()
    rows.experts[0][:, 0] = 15
    rows.experts[0][:, 1:] %= 15
    repeated = rows.experts[0][:, 1] == rows.experts[0][:, 2]
    rows.experts[0][repeated, 2] = (rows.experts[0][repeated, 1] + 1) % 15
    found = look(publish_trace(tmp_path / "trace", LAYERS, [rows]))
    assert kinds(found) == [("1", "always-chosen")]
    assert "expert 15 in every one of 600 rows" in found.findings[0].message


def test_a_layer_of_one_expert_a_token_that_is_always_0(tmp_path):
    layer = TraceLayer(0, 8, 1)
    rows = replace(routed_rows(), experts=[np.zeros((600, 1), np.uint16)], weights=[None])
    found = look(publish_trace(tmp_path / "trace", [layer], [rows]))
    assert kinds(found) == [("0", "always-chosen"), ("0", "equal-rows")]


def decoding(rows):
    """The second half of every sequence as decode rows."""
    return replace(rows, phase=np.where(rows.position >= 4, DECODE, 0).astype(np.int16))


def test_decode_rows_that_never_change(tmp_path):
    rows = decoding(routed_rows())
    for sequence in (3, 7):
        constant = (rows.sequence == sequence) & (rows.phase == DECODE)
        rows.experts[1][constant] = [7, 2]
    found = look(publish_trace(tmp_path / "trace", LAYERS, [rows]))
    assert kinds(found) == [("4", "constant-decode")]
    assert "2 of 30 sequences" in found.findings[0].message
    assert "first sequence 3" in found.findings[0].message
    assert found.findings[0].rows == 32


def test_decode_steps_of_many_requests_in_turn_that_never_change(tmp_path):
    """An engine writes a step's rows one request after another: the constant rows are not neighbours."""
    rows = decoding(routed_rows())
    rows.experts[1][rows.phase == DECODE] = np.stack([rows.sequence % 11, np.full(600, 11)], 1)[rows.phase == DECODE]
    order = np.lexsort((rows.sequence, rows.position))
    rows = Rows(
        **{
            name: getattr(rows, name)[order]
            for name in ("sequence", "position", "token_id", "phase", "source", "split")
        },
        experts=[experts[order] for experts in rows.experts],
        weights=[None, None],
    )
    found = look(publish_trace(tmp_path / "trace", LAYERS, [rows]))
    assert ("4", "constant-decode") in kinds(found)
    assert "30 of 30 sequences" in message(found, "constant-decode")


def test_a_generation_that_repeats_one_token_is_not_sick(tmp_path):
    rows = decoding(routed_rows())
    same = (rows.sequence == 3) & (rows.phase == DECODE)
    rows.token_id[same] = 9
    for experts in rows.experts:
        experts[same] = experts[same][0]
    assert look(publish_trace(tmp_path / "trace", LAYERS, [rows])).findings == []


def test_one_stale_row_repeated_over_different_tokens(tmp_path):
    """A padded region returns one stale row of real ids."""
    rows = routed_rows()
    rows.experts[0][100 : 100 + MIN_RUN + 20] = [3, 9, 4]
    rows.experts[0][110] = [9, 4, 3]  # another order is the same set
    found = look(publish_trace(tmp_path / "trace", LAYERS, [rows]))
    assert kinds(found) == [("1", "equal-rows")]
    assert "1 run of equal rows over changing tokens" in found.findings[0].message
    assert "from row 100" in found.findings[0].message


def test_a_long_run_of_one_token_is_not_sick(tmp_path):
    rows = routed_rows()
    rows.token_id[100:200] = 9
    rows.experts[0][100:200] = [3, 9, 4]
    assert look(publish_trace(tmp_path / "trace", LAYERS, [rows])).findings == []


def test_a_router_that_likes_to_stay_is_not_sick(tmp_path):
    """Nine rows in ten choose the expert of the row before: runs beyond 32 are what chance makes of that."""
    generator = np.random.default_rng(0)
    count, layer = 6000, TraceLayer(0, 4, 1)
    moves = np.cumsum(generator.random(count) < 0.1)
    rows = replace(
        routed_rows(count=count),
        experts=[generator.integers(0, 4, count)[moves].astype(np.uint16)[:, None]],
        weights=[None],
    )
    found = inspect_rows(publish_trace(tmp_path / "trace", [layer], [rows]), quiet)
    assert found.findings == []


def test_an_id_twice_in_a_row(tmp_path):
    rows = routed_rows()
    rows.experts[1][[7, 41]] = [5, 5]
    found = look(plant(tmp_path / "trace", LAYERS, [rows]))
    assert kinds(found) == [("4", "repeated-ids")]
    assert found.findings[0].message == (
        "2 of 600 rows repeat an id; first row 7 (part-00000.parquet, sequence 0): [5, 5]"
    )


def test_one_id_more_than_k(tmp_path):
    """Fused shared experts add a column."""
    rows = routed_rows()
    wide = np.concatenate([rows.experts[1], np.full((600, 1), 11)], axis=1)
    wide[:, :2] = np.where(wide[:, :2] == 11, 10, wide[:, :2])
    wide[:, 1] = np.where(wide[:, 0] == wide[:, 1], (wide[:, 0] + 1) % 10, wide[:, 1])
    found = look(plant(tmp_path / "trace", LAYERS, [rows], [{"experts_04": lists(wide, pa.uint8())}]))
    assert kinds(found) == [("4", "always-chosen"), ("4", "wrong-width")]
    assert "3 ids in 600 rows; the manifest says K = 2; a shared expert" in message(found, "wrong-width")


def test_parts_of_two_models_that_differ_in_k(tmp_path):
    one, other = routed_rows(), routed_rows(1, first_sequence=100)
    wide = np.concatenate([other.experts[1], (other.experts[1].max(axis=1) + 1)[:, None] % 12], axis=1)
    wide[:, 2] = [next(e for e in range(12) if e not in row[:2]) for row in wide]
    found = look(plant(tmp_path / "trace", LAYERS, [one, other], [{}, {"experts_04": lists(wide, pa.uint8())}]))
    assert kinds(found) == [("4", "mixed-models"), ("4", "wrong-width")]
    assert "part-00000.parquet: 2, part-00001.parquet: 3" in message(found, "mixed-models")


@pytest.mark.parametrize(
    ("kind", "bad"), [(pa.uint8(), 12), (pa.int64(), -1), (pa.int64(), 65536 + 2), (pa.uint64(), 2**63)]
)
def test_an_id_outside_the_layer(kind, bad, tmp_path):
    """Ids past the last expert, padding that was kept, ids that would wrap to valid ones."""
    rows = routed_rows()
    values = rows.experts[1].tolist()
    values[30][1] = bad
    column = pa.FixedSizeListArray.from_arrays(pa.array([e for row in values for e in row], kind), 2)
    found = look(plant(tmp_path / "trace", LAYERS, [rows], [{"experts_04": column}]))
    assert kinds(found) == [("4", "out-of-range")]
    assert "1 of 600 rows hold ids outside [0, 12); first row 30 (part-00000.parquet, sequence 1)" in message(
        found, "out-of-range"
    )
    assert str(bad) in message(found, "out-of-range")
    assert found.layers[1].count.sum() == 1199


def test_rows_without_ids_and_rows_of_another_length(tmp_path):
    rows = routed_rows()
    values = rows.experts[1].tolist()
    values[3], values[4], values[5] = None, [1], [2, None]
    found = look(plant(tmp_path / "trace", LAYERS, [rows], [{"experts_04": pa.array(values, pa.list_(pa.uint8()))}]))
    assert kinds(found) == [("4", "empty-rows"), ("4", "wrong-width")]
    assert "1 ids in 1 rows, 2 ids in 597 rows" in message(found, "wrong-width")
    assert message(found, "empty-rows").startswith("2 rows")


@pytest.mark.parametrize("column", [pa.array(["1,2"] * 600), pa.array([[1.0, 2.5]] * 600, pa.list_(pa.float32(), 2))])
def test_ids_that_are_no_whole_numbers(column, tmp_path):
    found = look(plant(tmp_path / "trace", LAYERS, [routed_rows()], [{"experts_04": column}]))
    assert kinds(found) == [("4", "no-rows"), ("4", "wrong-type")]


def test_token_ids_outside_the_vocabulary(tmp_path):
    rows = routed_rows()
    rows.token_id[:3] = [64, 4_000_000_000, 64]
    found = look(publish_trace(tmp_path / "trace", LAYERS, [rows]))
    assert kinds(found) == [("", "token-range")]
    assert "2 token ids, up to 4000000000" in found.findings[0].message


def test_rows_that_the_manifest_does_not_count(tmp_path):
    """Rows overwritten or lost."""
    found = look(plant(tmp_path / "trace", LAYERS, [routed_rows()], rows={"fit": 999, "validation": 0, "heldout": 0}))
    assert kinds(found) == [("", "row-count")]


def test_a_trace_without_rows(tmp_path):
    rows = routed_rows(count=0)
    found = look(plant(tmp_path / "trace", LAYERS, [rows]))
    assert [kind for _, kind in kinds(found)] == ["no-rows"] * 3
    assert found.verdict == "sick: layers 1-4: no rows"


def two_sources(one, other):
    return [replace(one, source=np.zeros(600, np.int16)), replace(other, source=np.ones(600, np.int16))]


def renumbered(rows, seed=5):
    """The same rows by a model whose experts are numbered otherwise in every layer."""
    generator = np.random.default_rng(seed)
    return replace(
        rows,
        experts=[generator.permutation(16 if k == 0 else 12)[e].astype(np.uint16) for k, e in enumerate(rows.experts)],
    )


def test_rows_of_two_models(tmp_path):
    """A regrouped model's rows among the original's: every count is fine, but the same ids choose other experts."""
    batches = two_sources(routed_rows(0), renumbered(routed_rows(1, first_sequence=100)))
    found = look(publish_trace(tmp_path / "trace", LAYERS, batches))
    assert kinds(found) == [("", "mixed-models")]
    assert "code and prose route the same token ids to unrelated experts" in found.findings[0].message


def test_two_texts_of_one_model_are_not_mixed(tmp_path):
    found = look(publish_trace(tmp_path / "t", LAYERS, two_sources(routed_rows(0), routed_rows(1, first_sequence=100))))
    assert found.findings == []
    assert found.agreement("code") == pytest.approx(1, abs=0.1)
    assert found.agreement("prose") is None


def test_rows_of_two_models_without_token_ids(tmp_path):
    one, other = routed_rows(0), routed_rows(1, first_sequence=100)
    halves = [
        replace(one, experts=[one.experts[0] % 8, one.experts[1] % 6]),
        replace(other, experts=[other.experts[0] % 8 + 8, other.experts[1] % 6 + 6]),
    ]
    batches = [replace(rows, token_id=np.full(600, UNKNOWN_TOKEN, np.uint32)) for rows in two_sources(*halves)]
    found = look(plant(tmp_path / "trace", LAYERS, batches, [{"token_id": pa.nulls(600, pa.uint32())}] * 2))
    assert ("", "mixed-models") in kinds(found)
    assert "different experts in every layer" in message(found, "mixed-models")


# Thresholds on real routing.


def real_rows(permute=None):
    """gpt-oss-20b, three layers, generated tokens (fixtures/routing/README.md), sequences alternating in source."""
    with np.load(FIXTURE) as archive:
        lengths = archive["seq_len"]
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        layers = [TraceLayer(int(number), int(archive["num_experts"]), 4) for number in archive["layer_ids"]]
        experts, token_id = archive["ids"].astype(np.uint16), archive["tokens"].astype(np.uint32)
        vocab = int(archive["vocab_size"])
    source = (sequence % 2).astype(np.int16)
    if permute is not None:
        experts[:, source == 1] = permute[experts[:, source == 1]]
    position = np.arange(len(sequence)) - np.searchsorted(sequence, sequence)
    rows = Rows(
        sequence=sequence.astype(np.uint32),
        position=position.astype(np.uint32),
        token_id=token_id,
        phase=np.full(len(sequence), DECODE, np.int16),
        source=source,
        split=np.where(sequence % 3 == 2, 2, 0).astype(np.int16),
        experts=list(experts),
        weights=[None] * len(layers),
    )
    return layers, rows, vocab


def test_real_decode_rows_are_healthy(tmp_path):
    layers, rows, vocab = real_rows()
    found = look(publish_trace(tmp_path / "trace", layers, [rows], vocab))
    assert found.findings == []
    assert min(found.agreement(name) or 1 for name in SOURCES) > 0.5
    assert all(report.prediction.mean_f1 > 0.35 for report in found.layers)


def test_real_rows_of_a_renumbered_model_are_told_from_the_original(tmp_path):
    layers, rows, vocab = real_rows(np.random.default_rng(0).permutation(32).astype(np.uint16))
    found = look(publish_trace(tmp_path / "trace", layers, [rows], vocab))
    assert kinds(found) == [("", "mixed-models")]


# Parts of the lint against loops.


def group_of(token, key, sequence=None):
    count = len(token)
    zeros = np.zeros(count, np.int64)
    facts = Facts(np.arange(count), zeros if sequence is None else sequence, token, zeros, zeros, zeros)
    return LayerGroup(facts, key[:, None], Counter(), 0, None, "part")


@settings(max_examples=60, deadline=None)
@given(
    data=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.booleans()), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_runs_equal_a_loop_wherever_row_groups_are_cut(data, cuts):
    key, token, skipped = (np.array(column) for column in zip(*data, strict=True))
    token, key = token.astype(np.uint32), key.astype(np.uint64)
    token[token == 2] = UNKNOWN_TOKEN
    skipped &= np.arange(len(key)) % 3 == 0
    runs = EqualRuns()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("smoe_profiles.inspection.repetition.MIN_RUN", 3)
        for piece in np.split(np.arange(len(key)), sorted(cut for cut in cuts if cut <= len(key))):
            if len(piece):
                group = group_of(token[piece], key[piece])
                runs.add(key[piece], replace(group, facts=replace(group.facts, row=piece)), skipped[piece])
        runs.finish()
    wanted, length, pairs, equal = Counter(), 1, 0, 0
    for i in range(1, len(key)):
        change = token[i] != token[i - 1] or token[i] == UNKNOWN_TOKEN
        same = key[i] == key[i - 1] and not skipped[i]
        pairs, equal = pairs + change, equal + (change and same)
        if not same:
            wanted[length] += 1
            length = 1
        else:
            length += change
    wanted[length] += 1
    assert runs.runs == Counter({size: count for size, count in wanted.items() if size >= 3})
    assert (runs.pairs, runs.equal) == (pairs, equal)


@settings(max_examples=40, deadline=None)
@given(
    data=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=80),
    cut=st.integers(0, 80),
)
def test_constant_decode_equals_a_loop_wherever_row_groups_are_cut(data, cut):
    sequence, key, token = (np.array(column) for column in zip(*data, strict=True))
    rows, limit = DecodeRows(), 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("smoe_profiles.inspection.repetition.MIN_DECODE", limit)
        patch.setattr("smoe_profiles.inspection.repetition.longest_by_chance", lambda _trials, _stay: 0)
        for here in (slice(0, cut), slice(cut, None)):
            if len(key[here]):
                rows.add(key[here].astype(np.uint64), token[here].astype(np.uint32), sequence[here])
        found, count = rows.constant(0.5)
    wanted = [
        number
        for number in range(4)
        if sum(sequence == number) >= limit
        and len(set(key[sequence == number])) == 1
        and len(set(token[sequence == number])) > 1
    ]
    assert found.tolist() == wanted
    assert count == sum(sum(sequence == number) for number in wanted)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_two_rows_have_one_key_if_and_only_if_they_name_one_set(seed):
    ids = np.random.default_rng(seed).integers(0, 4, (20, 3))
    keys = set_keys(ids)
    for i, row in enumerate(ids):
        for j, other in enumerate(ids):
            assert (keys[i] == keys[j]) == (sorted(row) == sorted(other))


def loop_kinship(one, other):
    """From rows: mean overlap of two rows of one id, and of two different ids, weighted by the rarer side."""
    counts = [Counter(token for token, _ in rows) for rows in (one, other)]
    shared = sorted(t for t in counts[0] if counts[0][t] >= 2 and counts[1].get(t, 0) >= 2)
    weight = {t: min(counts[0][t], counts[1][t]) for t in shared}
    total = sum(weight.values())
    by_id = [{t: [set(e) for token, e in rows if token == t] for t in shared} for rows in (one, other)]

    def beyond(left, right):
        alike = chance = norm = 0.0
        for t in shared:
            for u in shared:
                pairs = [
                    len(a & b)
                    for i, a in enumerate(by_id[left][t])
                    for j, b in enumerate(by_id[right][u])
                    if t != u or left != right or i != j
                ]
                share = weight[t] / total * weight[u] / total
                if t == u:
                    alike += weight[t] / total * np.mean(pairs)
                else:
                    chance, norm = chance + share * np.mean(pairs), norm + share
        return alike - chance / norm

    return len(shared), (beyond(0, 0), beyond(1, 1)), beyond(0, 1)


def test_kinship_equals_a_loop_over_pairs_of_rows():
    sides, tables = [], []
    for seed in (0, 1):
        rows = routed_rows(seed, 120, vocab=12)
        sides.append(list(zip(rows.token_id.tolist(), rows.experts[0].tolist(), strict=True)))
        table = np.zeros((12, 16), np.int64)
        np.add.at(table, (rows.token_id[:, None], rows.experts[0]), 1)
        tables.append(csr_array(table))
    found = kinship(*tables, 3)
    count, own, cross = loop_kinship(*sides)
    assert found.token_ids == count
    assert found.own == pytest.approx(own)
    assert found.cross == pytest.approx(cross)


def test_the_verdict_is_one_line_and_names_layers_as_ranges():
    layers = [str(number) for number in range(1, 9)]

    def of(kind, *names):
        return [finding(kind, name) for name in names]

    def finding(kind, name):
        return Finding(kind, name, 1, "")

    found = judge(
        [*of("repeated-ids", "8"), *of("zero-filled", "1", "2", "3", "7"), *of("token-range", None)], 9, layers
    )
    assert found == (
        "sick: token ids outside the vocabulary; layers 1-3, 7: rows filled with expert 0; "
        "layer 8: an id twice in a row"
    )
    assert "\n" not in found
    assert set(LABELS) >= {"repeated-ids", "zero-filled"}


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


# Two traces of one text.


def weighed(rows, seed=0):
    generator = np.random.default_rng(seed)
    weights = [np.sort(generator.random(experts.shape).astype(np.float16), axis=1)[:, ::-1] for experts in rows.experts]
    return replace(rows, weights=[values.astype(np.float32) for values in weights])


def agree(one, other):
    matching = match_rows(one, other)
    return matching, compare_traces(one, other, matching, quiet)


def test_a_trace_agrees_with_itself(tmp_path):
    trace = publish_trace(tmp_path / "trace", LAYERS, [weighed(routed_rows())])
    matching, layers = agree(trace, trace)
    assert (matching.alone, matching.other_alone) == (0, 0)
    for found in layers:
        assert (found.rows, found.equal, found.ties, found.differing, found.jaccard) == (600, 600, 0, 0, 1.0)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_agreement_equals_a_loop_whatever_the_order_of_rows(seed, tmp_path_factory):
    generator = np.random.default_rng(seed)
    one = weighed(routed_rows(seed, 80))
    other = routed_rows(seed, 80)
    changed = generator.random(80) < 0.4
    for index, layer in enumerate(LAYERS):
        other.experts[index][changed, -1] = [
            generator.choice(np.setdiff1d(np.arange(layer.num_experts), row[:-1]))
            for row in other.experts[index][changed]
        ]
    other = weighed(other, 1)
    order = generator.permutation(80)[:70]
    other = Rows(
        **{
            name: getattr(other, name)[order]
            for name in ("sequence", "position", "token_id", "phase", "source", "split")
        },
        experts=[experts[order] for experts in other.experts],
        weights=[weights[order] for weights in other.weights],
    )
    base = tmp_path_factory.mktemp("agree")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_writer, "ROW_GROUP", 16)
        traces = [publish_trace(base / name, LAYERS, [rows]) for name, rows in (("one", one), ("other", other))]
    matching, layers = agree(*traces)
    assert (matching.alone, matching.other_alone) == (10, 0)
    place = {key: i for i, key in enumerate(zip(other.sequence, other.position, strict=True))}
    for index, found in enumerate(layers):
        pairs = [
            (set(one.experts[index][i].tolist()), set(other.experts[index][place[key]].tolist()))
            for i, key in enumerate(zip(one.sequence, one.position, strict=True))
            if key in place
        ]
        assert found.rows == 70
        assert found.equal == sum(a == b for a, b in pairs)
        assert found.ties + found.differing == sum(a != b for a, b in pairs)
        assert found.jaccard == pytest.approx(np.mean([len(a & b) / len(a | b) for a, b in pairs]))
    back = agree(*traces[::-1])[1]
    assert [(f.equal, f.ties, f.differing) for f in back] == [(f.equal, f.ties, f.differing) for f in layers]


UNIT = float(np.spacing(np.float16(0.25)))


@pytest.mark.parametrize(
    ("one", "other", "tied"),
    [
        (([1, 2], [0.5, 0.25]), ([1, 3], [0.5, 0.25]), True),
        (([1, 2], [0.5, 0.25]), ([1, 3], [0.5, 0.25 + 2 * UNIT]), True),
        (([1, 2], [0.5, 0.25]), ([1, 3], [0.5, 0.25 + 3 * UNIT]), False),
        (([2, 1], [0.5, 0.25]), ([3, 1], [0.5, 0.25]), False),
        (([1, 2], [0.25, 0.25]), ([3, 4], [0.25, 0.25]), True),
        (([1, 2], [0.5, 0.25]), ([3, 4], [0.5, 0.25]), False),
        (([1, 2], [0.5, np.nan]), ([1, 3], [0.5, 0.25]), False),
    ],
    ids=["equal", "two units", "three units", "not at the K-th place", "all tied", "all but one", "no weight"],
)
def test_near_ties_are_told_from_differences(one, other, tied):
    arrays = [np.array([side]) for side in (one[0], np.float16(one[1]), other[0], np.float16(other[1]))]
    found, known = near_ties(*arrays)
    assert found.tolist() == [tied]
    assert known.tolist() == [not np.isnan(arrays[1]).any()]


def test_rows_that_differ_without_weights_are_counted_as_such(tmp_path):
    other = routed_rows()
    other.experts[0][:5] = [0, 1, 2]
    traces = [publish_trace(tmp_path / name, LAYERS, [rows]) for name, rows in (("a", routed_rows()), ("b", other))]
    found = agree(*traces)[1][0]
    assert found.unweighed == found.differing > 0
    assert found.ties == 0


def test_traces_of_two_texts_are_an_input_error(tmp_path):
    other = replace(routed_rows(1), token_id=np.full(600, 63, np.uint32))
    traces = [
        publish_trace(tmp_path / name, LAYERS, [rows])
        for name, rows in (("a", replace(routed_rows(), token_id=np.full(600, 62, np.uint32))), ("b", other))
    ]
    with pytest.raises(InputError, match="not of the same text"):
        match_rows(*traces)


def test_traces_of_two_sizes_are_an_input_error(tmp_path):
    one = publish_trace(tmp_path / "a", LAYERS, [routed_rows()])
    layers = [replace(LAYERS[0], num_experts=32), LAYERS[1]]
    other = publish_trace(tmp_path / "b", layers, [routed_rows()])
    with pytest.raises(InputError, match=r"16 experts.*32"):
        compare_traces(one, other, match_rows(one, other), quiet)


def test_schema_of_planted_rows_is_the_traces(tmp_path):
    """What the tests plant differs from a real trace in nothing but the sickness."""
    trace = plant(tmp_path / "trace", LAYERS, [routed_rows()])
    table = pq.read_table(tmp_path / "trace/part-00000.parquet")
    wanted = schema(LAYERS)
    assert {name: wanted.field(name).type for name in ("experts_01", "experts_04", "sequence")} == {
        name: table.schema.field(name).type for name in ("experts_01", "experts_04", "sequence")
    }
    assert trace.artefact.parameters["layers"] == [asdict(layer) for layer in LAYERS]
