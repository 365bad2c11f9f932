"""The compiled loops against slow ones, for every width of id that a trace stores."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_profiles.counting import (
    add_bigrams,
    add_entries,
    add_pairs,
    add_sorted,
    add_token_counts,
    add_transitions,
    find_entries,
    number_blocks,
)

WIDTHS = (np.uint8, np.uint16)


def routing(seed, count, width, experts=6, top_k=3):
    generator = np.random.default_rng(seed)
    ids = [generator.permutation(experts)[:top_k] for _ in range(count)]
    return np.array(ids, width).reshape(count, top_k), generator.integers(0, 3, count).astype(np.uint8)


many = settings(max_examples=30, deadline=None)
seeds, lengths, widths = st.integers(0, 10**6), st.integers(0, 30), st.sampled_from(WIDTHS)


def value(low, high):
    return low + 256 * high.astype(np.int64)


@given(seeds, lengths, widths)
@many
def test_token_counts_take_rows_in_any_order_up_to_the_first_that_is_not_counted(seed, count, width):
    experts, _ = routing(seed, count, width)
    generator = np.random.default_rng(seed)
    order, counted = generator.permutation(count).astype(np.uint32), int(generator.integers(0, count + 1))
    place = np.sort(generator.integers(0, 4, count)).astype(np.int32)
    place[counted:] = -1
    low, high = np.full((4, 6), 254, np.uint8), np.zeros((4, 6), np.uint32)
    add_token_counts(low, high, place, order, experts)
    expected = np.full((4, 6), 254)
    for number in range(counted):
        for expert in experts[order[number]]:
            expected[place[number], expert] += 1
    assert value(low, high).tolist() == expected.tolist()


def test_counters_carry_over_at_every_256():
    low, high = np.zeros((1, 2), np.uint8), np.zeros((1, 2), np.uint32)
    experts = np.array([[1]] * 5000, np.uint8)
    add_token_counts(low, high, np.zeros(5000, np.int32), np.arange(5000, dtype=np.uint32), experts)
    assert value(low, high).tolist() == [[0, 5000]]
    add_bigrams(low, high, np.zeros(5000, np.uint8), np.zeros(5000, np.uint32), experts)
    assert value(low, high).tolist() == [[0, 10_000]]


@given(seeds, lengths, widths)
@many
def test_pairs_are_counted_once_for_each_two_slots(seed, count, width):
    experts, part = routing(seed, count, width)
    popularity, pairs = np.zeros((2, 6), np.uint32), np.zeros((2, 6, 6), np.uint32)
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
    transitions, low, high = np.zeros((2, 9, 6), np.uint32), np.zeros((81, 6), np.uint8), np.zeros((81, 6), np.uint32)
    add_transitions(transitions, part, before, experts)
    add_bigrams(low, high, part, before[:, 0].astype(np.uint32) * np.uint32(9) + before[:, 1], experts)
    expected, expected_bigrams = np.zeros_like(transitions), np.zeros((9, 9, 6), int)
    for row in np.flatnonzero(part < 2):
        for expert in experts[row]:
            expected_bigrams[before[row, 0], before[row, 1], expert] += 1
            for earlier in before[row]:
                expected[part[row], earlier, expert] += 1
    assert transitions.tolist() == expected.tolist()
    assert value(low, high).reshape(9, 9, 6).tolist() == expected_bigrams.tolist()


counters = st.lists(
    st.lists(st.sampled_from([0, 1, 2, 255, 256, 2**33]), min_size=3, max_size=3), min_size=1, max_size=6
)


@given(counters, st.sampled_from([1, 2, 256, 300]))
@many
def test_entries_are_the_counters_that_are_large_enough_in_order(counters, least):
    counters = np.array(counters, np.uint64)
    low, high = counters.astype(np.uint8), (counters >> np.uint64(8)).astype(np.uint32)
    row, column, count = (np.empty(counters.size, kind) for kind in (np.int64, np.uint16, np.uint64))
    filled = find_entries(low, high, least, row, column, count)
    expected = [(r, c, counters[r, c]) for r in range(len(counters)) for c in range(3) if counters[r, c] >= least]
    assert list(zip(row[:filled], column[:filled], count[:filled], strict=True)) == expected
    total_low, total_high = low.copy(), high.copy()
    twice = [np.concatenate([column, column]) for column in (row[:filled], column[:filled], count[:filled])]
    add_entries(total_low, total_high, *twice)
    assert value(total_low, total_high).tolist() == (counters + 2 * counters * (counters >= least)).tolist()


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
    low, high = np.zeros((1, largest + 1), np.uint8), np.zeros((1, largest + 1), np.uint32)
    add_token_counts(low, high, np.zeros(1, np.int32), np.zeros(1, np.uint32), np.array([[largest]], width))
    assert low[0, largest] == 1
