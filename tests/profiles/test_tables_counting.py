"""The compiled loops against slow ones, for every width of id that a trace stores."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_profiles.counting import (
    add_bigrams,
    add_pairs,
    add_sorted,
    add_token_counts,
    add_transitions,
    find_entries,
    number_blocks,
)
from smoe_profiles.trace import UNKNOWN_TOKEN

WIDTHS = (np.uint8, np.uint16)


def routing(seed, count, width, experts=6, top_k=3):
    generator = np.random.default_rng(seed)
    ids = [generator.permutation(experts)[:top_k] for _ in range(count)]
    return np.array(ids, width).reshape(count, top_k), generator.integers(0, 3, count).astype(np.uint8)


many = settings(max_examples=30, deadline=None)
seeds, lengths, widths = st.integers(0, 10**6), st.integers(0, 30), st.sampled_from(WIDTHS)


@given(seeds, lengths, widths)
@many
def test_token_counts_leave_out_other_parts_unknown_ids_and_ids_without_a_place(seed, count, width):
    experts, part = routing(seed, count, width)
    token_id = np.random.default_rng(seed).choice([0, 1, 2, 3, UNKNOWN_TOKEN], count).astype(np.uint32)
    slot = np.array([1, -1, 0, 2], np.int32)
    counts = np.zeros((2, 3, 6), np.uint32)
    add_token_counts(counts, slot, part, token_id, experts)
    expected = np.zeros_like(counts)
    for row in range(count):
        if part[row] < 2 and token_id[row] in (0, 2, 3):
            for expert in experts[row]:
                expected[part[row], {0: 1, 2: 0, 3: 2}[int(token_id[row])], expert] += 1
    assert counts.tolist() == expected.tolist()


@given(seeds, lengths, widths)
@many
def test_pairs_are_counted_once_for_each_two_slots(seed, count, width):
    experts, part = routing(seed, count, width)
    popularity, pairs = np.zeros((2, 6), np.int64), np.zeros((2, 6, 6), np.int64)
    add_pairs(popularity, pairs, part, experts)
    expected = Counter(
        (int(part[row]), int(experts[row, i]), int(experts[row, j]))
        for row in range(count)
        for i in range(3)
        for j in range(i + 1, 3)
        if part[row] < 2
    )
    assert {key: int(pairs[key]) for key in zip(*map(np.ndarray.tolist, np.nonzero(pairs)), strict=True)} == expected
    for code in range(2):
        assert popularity[code].tolist() == np.bincount(experts[part == code].reshape(-1), minlength=6).tolist()


@given(seeds, lengths, widths, widths)
@many
def test_transitions_and_2_grams_follow_the_same_row(seed, count, width, other_width):
    experts, part = routing(seed, count, width)
    before, _ = routing(seed + 1, count, other_width, 9, 2)
    transitions, bigrams = np.zeros((2, 9, 6), np.int64), np.zeros((9, 9, 6), np.uint64)
    add_transitions(transitions, part, before, experts)
    first, second = (np.ascontiguousarray(before[:, k]) for k in range(2))
    add_bigrams(bigrams, part, first, second, experts)
    expected, expected_bigrams = np.zeros_like(transitions), np.zeros_like(bigrams)
    for row in np.flatnonzero(part < 2):
        for expert in experts[row]:
            expected_bigrams[before[row, 0], before[row, 1], expert] += 1
            for earlier in before[row]:
                expected[part[row], earlier, expert] += 1
    assert transitions.tolist() == expected.tolist()
    assert bigrams.tolist() == expected_bigrams.tolist()


@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=6), st.integers(1, 3))
@many
def test_entries_are_the_counters_that_are_large_enough_in_order(counters, least):
    counters = np.array(counters, np.uint32)
    row, column, count = (np.empty(counters.size, kind) for kind in (np.int64, np.uint16, np.uint32))
    filled = find_entries(counters, least, row, column, count)
    expected = [(r, c, counters[r, c]) for r in range(len(counters)) for c in range(3) if counters[r, c] >= least]
    assert list(zip(row[:filled], column[:filled], count[:filled], strict=True)) == expected


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5), st.integers(1, 40))
@many
def test_blocks_end_at_their_length_and_where_the_source_changes_however_rows_stream(source, length, step):
    source, state, found = np.array(source, np.int32), np.zeros(3, np.int64), []
    for start in range(0, len(source), step):
        block = np.empty(len(source[start : start + step]), np.int64)
        number_blocks(source[start : start + step], length, state, block)
        found += block.tolist()
    expected, in_block = [], 0
    for row in range(len(source)):
        new = row == 0 or source[row] != source[row - 1] or in_block == length
        expected.append(expected[-1] + new if expected else 0)
        in_block = 1 if new else in_block + 1
    assert found == expected
    assert state[0] == len(set(expected))


entries = st.dictionaries(st.integers(-9, 9), st.integers(1, 2**40))


@given(entries, entries)
@many
def test_two_sorted_lists_add_up(one, other):
    lists = [
        (np.array(sorted(part), np.int64), np.array([part[key] for key in sorted(part)], np.int64))
        for part in (one, other)
    ]
    keys, counts = np.empty(len(one) + len(other), np.int64), np.empty(len(one) + len(other), np.int64)
    filled = add_sorted(keys, counts, *lists)
    expected = dict(sorted((Counter(one) + Counter(other)).items()))
    assert dict(zip(keys[:filled].tolist(), counts[:filled].tolist(), strict=True)) == expected
    assert keys[:filled].tolist() == list(expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_largest_id_of_a_width_is_counted(width):
    largest = int(np.iinfo(width).max)
    popularity, pairs = np.zeros((2, largest + 1), np.int64), np.zeros((2, 2, 2), np.int64)
    add_pairs(popularity, pairs, np.zeros(1, np.uint8), np.array([[largest]], width))
    assert popularity[0, largest] == 1
