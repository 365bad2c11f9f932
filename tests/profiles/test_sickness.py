"""Looking at a trace: every sickness planted in a real artefact and found, and health left alone."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from smoe_profiles.inspection.kinship import kinship
from smoe_profiles.inspection.lint import LABELS, Finding, judge
from smoe_profiles.inspection.repetition import MIN_RUN, DecodeRows, EqualRuns, set_keys
from smoe_profiles.inspection.rows import inspect_rows
from smoe_profiles.inspection.scan import Facts, LayerGroup
from smoe_profiles.trace import UNKNOWN_TOKEN, Rows, TraceLayer
from tests.profiles.conftest import SOURCES, publish_trace
from tests.profiles.planted_traces import (
    DECODE,
    FIXTURE,
    LAYERS,
    decoding,
    kinds,
    lists,
    look,
    message,
    plant,
    quiet,
    renumbered,
    routed_rows,
    two_sources,
    with_experts,
)

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
