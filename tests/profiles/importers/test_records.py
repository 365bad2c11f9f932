"""Every row is judged before it counts, and each way a dump goes wrong has its name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe_profiles.errors import InputError
from smoe_profiles.importers.layers import choose_layers
from smoe_profiles.importers.records import (
    CONSTANT_ROWS,
    FAULTS,
    Facts,
    Fault,
    LayerAxis,
    Piece,
    check_rows,
    constant_sequences,
    join,
)
from smoe_profiles.importers.store import document_starts, sound_rows
from smoe_profiles.trace import UNKNOWN_TOKEN
from tests.profiles.importers.helpers import distinct_rows

NUMBERED = Facts(LayerAxis.NUMBERED, (2, 5), num_experts=8)


def records(ids, facts=NUMBERED, **values):
    return join([Piece(np.asarray(ids), "dump.bin", **values)], facts)


def sound_ids(count, layers=2, top_k=2, experts=8):
    return distinct_rows(np.random.default_rng(0), (layers, count, top_k), experts)


def judged(ids, **values):
    found = records(ids, **values)
    return sound_rows(found, choose_layers(found, None, "dump.bin"), "dump.bin")


def slow_fault(rows, num_ids):
    """One row's fault, written out: rows is one list of ids a layer."""
    if all(expert == -1 for row in rows for expert in row):
        return Fault.PADDING
    found = []
    for row, count in zip(rows, num_ids, strict=True):
        if -1 in row:
            found.append(Fault.PARTLY_NEGATIVE)
        elif any(not 0 <= expert < count for expert in row):
            found.append(Fault.OUT_OF_RANGE)
        elif len(row) > 1 and set(row) == {0}:
            found.append(Fault.ZERO_FILLED)
        elif len(set(row)) < len(row):
            found.append(Fault.REPEATED)
    return min(found, key=FAULTS.index, default=None)


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 6))
def test_the_row_check_agrees_with_a_slow_loop(data, layers, top_k, count):
    num_ids = data.draw(st.lists(st.integers(1, 5), min_size=layers, max_size=layers))
    row = st.lists(st.integers(-2, 5), min_size=top_k, max_size=top_k)
    ids = [np.array(data.draw(st.lists(row, min_size=count, max_size=count)), int).reshape(-1, top_k) for _ in num_ids]
    found = check_rows(ids, num_ids)
    for index in range(count):
        rows = [layer[index].tolist() for layer in ids]
        wanted = slow_fault(rows, num_ids)
        assert (None if found.fault[index] < 0 else FAULTS[found.fault[index]]) == wanted
        if wanted not in (None, Fault.PADDING):
            assert found.layer[index] == next(
                layer
                for layer, (row, size) in enumerate(zip(rows, num_ids, strict=True))
                if slow_fault([row], [size]) == wanted or (wanted is Fault.PARTLY_NEGATIVE and -1 in row)
            )


@given(st.lists(st.lists(st.integers(0, 2), max_size=2 * CONSTANT_ROWS), max_size=5))
def test_constant_sequences_are_those_a_slow_loop_finds(sequences):
    rows = np.array([expert for sequence in sequences for expert in sequence], int)[:, None]
    lengths = np.array([len(sequence) for sequence in sequences], int)
    wanted = [len(sequence) >= CONSTANT_ROWS and len(set(sequence)) == 1 for sequence in sequences]
    assert constant_sequences([rows], lengths).tolist() == wanted


def test_a_row_of_minus_ones_is_padding_and_a_partly_negative_one_is_rejected_with_its_position():
    ids = sound_ids(3000)
    ids[:, 7] = -1
    assert judged(ids).padding == 1
    ids[1, 9, 0] = -1
    found = judged(ids)
    assert found.padding == 1
    assert 9 not in found.rows
    assert found.rejected[Fault.PARTLY_NEGATIVE].rows == 1
    assert found.rejected[Fault.PARTLY_NEGATIVE].first == f"row 9 of dump.bin, layer 5: {ids[1, 9].tolist()}"


def test_a_row_that_is_minus_one_in_one_layer_only_is_no_padding():
    ids = sound_ids(3000)
    ids[0, 4] = -1
    assert judged(ids).rejected[Fault.PARTLY_NEGATIVE].rows == 1


@pytest.mark.parametrize("rows", [slice(0, 20), slice(-20, None)], ids=["first rows", "tail"])
def test_zero_filled_rows_are_not_expert_zero(rows):
    ids = sound_ids(200)
    ids[:, rows] = 0
    with pytest.raises(InputError, match=r"20 of 200 rows are rejected.*zero-filled: 20 \(first: row"):
        judged(ids)


def test_a_sequence_whose_rows_are_all_equal_was_not_routed():
    ids = sound_ids(30_000)
    ids[:, 100 : 100 + CONSTANT_ROWS] = [[[3, 1]], [[2, 4]]]
    lengths = np.array([100, CONSTANT_ROWS, 30_000 - 100 - CONSTANT_ROWS])
    found = judged(ids, seq_len=lengths)
    assert found.rejected[Fault.CONSTANT].rows == CONSTANT_ROWS
    assert not set(found.rows) & set(range(100, 100 + CONSTANT_ROWS))


def test_zeros_of_a_split_server_are_found_where_a_token_has_one_expert():
    ids = np.zeros((1, 40, 1), np.int64)
    with pytest.raises(InputError, match="sequence of equal rows: 40"):
        judged(ids, facts=Facts(LayerAxis.NUMBERED, (0,), num_experts=4))


def test_a_layer_in_which_every_expert_is_chosen_has_equal_rows():
    ids = np.tile([0, 1], (1, 40, 1))
    assert not judged(ids, facts=Facts(LayerAxis.NUMBERED, (0,), num_experts=2)).rejected


@pytest.mark.parametrize(("dtype", "experts"), [(np.uint8, 256), (np.uint16, 257), (np.uint16, 512)])
def test_the_largest_id_of_a_narrow_type_is_an_expert(dtype, experts):
    ids = np.array([[[experts - 1, 0], [1, 2]]], dtype)
    found = records(ids, facts=Facts(LayerAxis.NUMBERED, (0,), num_experts=experts))
    layers = choose_layers(found, None, "dump.bin")
    assert sound_rows(found, layers, "dump.bin").rows.tolist() == [0, 1]
    assert layers.layers[0].num_experts == experts


def test_ids_that_must_have_wrapped_in_a_narrow_type_are_refused():
    found = records(np.array([[[255, 0]]], np.uint8), facts=Facts(LayerAxis.NUMBERED, (0,), num_experts=257))
    with pytest.raises(InputError, match="uint8, which cannot name the 257 experts of layer 0"):
        choose_layers(found, None, "dump.bin")


def test_a_huge_unsigned_id_is_out_of_range_and_no_minus_one():
    ids = sound_ids(3000).astype(np.uint64)
    ids[:, 8] = 2**64 - 1
    found = judged(ids)
    assert found.padding == 0
    assert found.rejected[Fault.OUT_OF_RANGE].rows == 1


def test_pieces_of_different_types_are_widened_before_they_are_joined():
    pieces = [
        Piece(np.array([[[255, 3]]], np.uint8), "turn 1"),
        Piece(np.array([[[-1, -1]]], np.int8), "turn 2"),
        Piece(np.array([[[511, 256]]], np.uint16), "turn 3"),
    ]
    found = join(pieces, Facts(LayerAxis.NUMBERED, (0,), num_experts=512))
    assert found.ids[0].tolist() == [[255, 3], [-1, -1], [511, 256]]


def test_at_most_one_row_in_a_thousand_may_be_rejected():
    ids = sound_ids(1000)
    ids[0, 0] = [3, 3]
    assert judged(ids).rejected[Fault.REPEATED].rows == 1
    with pytest.raises(InputError, match=r"1 of 999 rows are rejected, and at most 0\.1% may be"):
        judged(ids[:, :-1])


def test_padding_does_not_count_as_rejected_and_nothing_else_is_no_import():
    ids = sound_ids(50)
    ids[:, 10:] = -1
    assert (judged(ids).padding, len(judged(ids).rows)) == (40, 10)
    with pytest.raises(InputError, match="no rows but 50 of padding"):
        judged(np.full((2, 50, 2), -1))


def test_positions_keep_their_gaps_where_rows_are_left_out():
    ids = sound_ids(10)
    ids[:, 3:5] = -1
    found = records(ids, position=np.arange(10) + 16)
    kept = sound_rows(found, choose_layers(found, None, "dump.bin"), "dump.bin").rows
    assert found.position[kept].tolist() == [16, 17, 18, 21, 22, 23, 24, 25]


def test_token_ids_not_known_are_told_from_token_ids_out_of_range():
    found = records(sound_ids(3), token_id=np.array([5, 4294967295, -1]))
    assert found.token_id.tolist() == [5, UNKNOWN_TOKEN, UNKNOWN_TOKEN]
    with pytest.raises(InputError, match="token id 4294967296"):
        records(sound_ids(1), token_id=np.array([2**32]))
    with pytest.raises(InputError, match="token id -2"):
        records(sound_ids(1), token_id=np.array([-2]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": np.array([2, 2])}, "3 rows, but its sequences have 4"),
        ({"seq_len": np.array([4, -1])}, "has a sequence of -1 tokens"),
        ({"token_id": np.arange(4)}, r"3 rows, but token_id for \[4\]"),
        ({"position": np.arange(2)}, "3 rows, but position"),
        ({"weights": np.zeros((2, 4, 2), np.float32)}, "the same axes with at most as many tokens"),
        ({"weights": np.zeros((2, 3, 2), np.int32)}, "weights int32"),
        (
            {"weights": np.array([[[0.5, 1]], [[65504, 65505]]])},
            r"weights \[65504.0, 65505.0\] in row 0, entry 1 of its",
        ),
        ({"weights": np.array([[[0.5, 1]], [[1, -0.25]]])}, r"weights \[1.0, -0.25\]"),
        ({"weights": np.array([[[np.nan, 1]], [[1, 1]]])}, r"weights \[nan, 1.0\] in row 0, entry 0"),
        ({"weights": np.array([[[np.inf, 1]], [[1, 1]]], np.float16)}, r"weights \[inf, 1.0\]"),
    ],
)
def test_a_piece_that_contradicts_itself_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        records(sound_ids(3), **change)


def test_files_of_different_layers_or_slots_are_not_joined():
    with pytest.raises(InputError, match="b has 2 layers and 3 experts a token; a has 2 and 2"):
        join([Piece(sound_ids(3), "a"), Piece(sound_ids(3, top_k=3), "b")], NUMBERED)
    with pytest.raises(InputError, match="no rows of routing"):
        join([], NUMBERED)


def test_decode_rows_are_split_by_runs_and_not_token_by_token():
    phase = np.array([0, 0, *[1] * 200, 0], np.int16)
    sequence = np.array([0, 0, *range(1, 201), 201])
    assert document_starts(sequence, phase) == [0, 2, 66, 130, 194, 202]
