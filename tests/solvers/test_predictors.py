"""Scores from token ids and from the labels of the layers before, against loops."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_solvers.predictors import (
    BACK_OFF,
    MarkovTables,
    TokenChoice,
    local_counts,
    markov_scores,
    markov_tables,
    paper_scores,
    popularity_by_rank,
    quantise,
    rank_counts,
    rank_labels,
    token_table,
)
from smoe_solvers.redundancy import single_hosts
from tests.solvers.reference import placements, routings

some = settings(max_examples=50, deadline=None)
EXPERTS, RANKS, TOP_K, VOCAB = 6, 3, 2, 7

triples = st.dictionaries(
    st.tuples(st.integers(0, VOCAB - 1), st.integers(0, EXPERTS - 1)), st.integers(1, 60), max_size=20
)


def columns(counts):
    """(token_id, expert, count) arrays of a dictionary."""
    token, expert = (np.array([key[axis] for key in counts], np.int64) for axis in (0, 1))
    return token, expert, np.array(list(counts.values()), np.int64)


def by_rank(counts, placement):
    table = [[0] * RANKS for _ in range(VOCAB)]
    for (token, expert), count in counts.items():
        table[token][placement[expert]] += count
    return table


@some
@given(counts=triples, placement=placements(EXPERTS, RANKS))
def test_rank_counts_equal_loops(counts, placement):
    found = rank_counts(columns(counts), VOCAB, single_hosts(placement, RANKS))
    assert found.tolist() == by_rank(counts, placement)


@some
@given(
    popularity=st.lists(st.integers(0, 99), min_size=EXPERTS, max_size=EXPERTS), placement=placements(EXPERTS, RANKS)
)
def test_popularity_by_rank_is_each_rank_s_share(popularity, placement):
    shares = [
        sum(Fraction(one, sum(popularity) or 1) for e, one in enumerate(popularity) if placement[e] == g)
        for g in range(RANKS)
    ]
    assert popularity_by_rank(np.array(popularity), single_hosts(placement, RANKS)) == pytest.approx(
        np.array(shares, float)
    )


@some
@given(
    counts=triples,
    placement=placements(EXPERTS, RANKS),
    share=st.lists(st.integers(1, 9), min_size=RANKS, max_size=RANKS),
    neighbour=st.lists(st.integers(0, VOCAB + 1), min_size=VOCAB, max_size=VOCAB),
    pseudo=st.sampled_from([1, 4, 16]),
    unseen=st.sampled_from(["neighbour", "popularity"]),
)
def test_token_table_equals_fractions(counts, placement, share, neighbour, pseudo, unseen):
    """Activations of a row of the id, started with some rows of popularity; unseen ids borrow, or stay popular."""
    activations = by_rank(counts, placement)
    popular = [Fraction(one, sum(share)) for one in share]

    def own(row):
        seen = Fraction(sum(row), TOP_K)
        return [(n + pseudo * TOP_K * p) / (seen + pseudo) for n, p in zip(row, popular, strict=True)]

    expected = [own(row) for row in activations]
    if unseen == "neighbour":
        borrowed = [t for t in range(VOCAB) if not sum(activations[t]) and neighbour[t] < VOCAB]
        expected = [own(activations[neighbour[t]]) if t in borrowed else expected[t] for t in range(VOCAB)]
    table = token_table(
        np.array(activations, np.float64),
        np.array(activations, np.float64).sum(axis=1) / TOP_K,
        np.array(popular, np.float64),
        np.array(neighbour),
        TOP_K,
        TokenChoice(float(pseudo), unseen),
    )
    assert table == pytest.approx(np.array(expected, np.float64))
    assert table.sum(axis=1) == pytest.approx(np.full(VOCAB, float(TOP_K)))


@some
@given(rows=routings(EXPERTS, TOP_K), placement=placements(EXPERTS, RANKS))
def test_labels_and_counts_equal_loops(rows, placement):
    counts = local_counts(rows, single_hosts(placement, RANKS))
    labels = rank_labels(rows, single_hosts(placement, RANKS))
    for t, row in enumerate(rows):
        held = [sum(placement[e] == g for e in row) for g in range(RANKS)]
        assert counts[t].tolist() == held
        assert labels[t] == held.index(max(held))


def test_a_label_tied_between_ranks_is_the_lower():
    placement = np.array([2, 1, 0, 2, 1, 0])
    rows = np.array([[0, 1], [1, 0], [0, 2], [0, 3], [1, 4]])
    assert rank_labels(rows, single_hosts(placement, 3)).tolist() == [1, 1, 0, 2, 1]


# The Markov tables.


@st.composite
def labelled_counts(draw):
    """(label two layers before, label one before, n_g) of some rows."""
    row = st.tuples(
        st.integers(0, RANKS - 1),
        st.integers(0, RANKS - 1),
        st.sampled_from([(2, 0, 0), (0, 2, 0), (0, 0, 2), (1, 1, 0), (1, 0, 1), (0, 1, 1)]),
    )
    rows = draw(st.lists(row, min_size=1, max_size=30))
    two, one, counts = zip(*rows, strict=True)
    return np.array(two, np.uint8), np.array(one, np.uint8), np.array(counts, np.int32)


def as_byte(expected):
    """The scale of a score: 255 is K. Both neighbours where rounding is a tie."""
    return float(expected * 255 / TOP_K)


def smoothed(rows, prior):
    """Mean of the rows, started with BACK_OFF rows of the prior."""
    start = int(BACK_OFF)
    return [(sum(int(row[g]) for row in rows) + start * prior[g]) / Fraction(len(rows) + start) for g in range(RANKS)]


@some
@given(data=labelled_counts())
def test_markov_tables_equal_fractions(data):
    two, one, counts = data
    tables = markov_tables(two, one, counts, TOP_K)
    none = [Fraction(int(counts[:, g].sum()), len(counts)) for g in range(RANKS)]
    assert tables.none == pytest.approx([as_byte(x) for x in none], abs=0.5 + 1e-9)
    for near in range(RANKS):
        after_one = smoothed(counts[one == near], none)
        assert tables.one[near] == pytest.approx([as_byte(x) for x in after_one], abs=0.5 + 1e-9)
        for far in range(RANKS):
            after_two = smoothed(counts[(one == near) & (two == far)], after_one)
            assert tables.two[far * RANKS + near] == pytest.approx([as_byte(x) for x in after_two], abs=0.5 + 1e-9)


@some
@given(data=labelled_counts())
def test_unknown_labels_back_off(data):
    two, one, counts = data
    alone = markov_tables(None, None, counts, TOP_K)
    assert (alone.one == alone.none).all()
    assert (alone.two == alone.none).all()
    after_one = markov_tables(None, one, counts, TOP_K)
    for far in range(RANKS):
        assert (after_one.two[far * RANKS : (far + 1) * RANKS] == after_one.one).all()
    tables = markov_tables(two, one, counts, TOP_K)
    assert (markov_scores(tables, None, None, len(one)) == tables.none).all()
    assert markov_scores(tables, None, one, len(one)).tolist() == [tables.one[near].tolist() for near in one]
    looked_up = [tables.two[int(far) * RANKS + int(near)].tolist() for far, near in zip(two, one, strict=True)]
    assert markov_scores(tables, two, one, len(one)).tolist() == looked_up


def test_markov_context_of_many_ranks_does_not_wrap():
    """Sixty-four ranks: the last context is 4,095, beyond a byte."""
    ranks = 64
    two = np.zeros((ranks * ranks, ranks), np.uint8)
    two[4095, 63] = 9
    tables = MarkovTables(two, np.zeros((ranks, ranks), np.uint8), np.zeros(ranks, np.uint8))
    last = np.array([63], np.uint8)
    assert markov_scores(tables, last, last, 1)[0, 63] == 9
    counts = np.eye(ranks, dtype=np.int32)[[63] * 50]
    assert markov_tables(np.repeat(last, 50), np.repeat(last, 50), counts, 1).two[4095].argmax() == 63


# Bytes.


@some
@given(expected=st.lists(st.floats(-1, 9), min_size=1, max_size=20), top_k=st.integers(1, 8))
def test_a_byte_is_the_share_of_k_and_never_wraps(expected, top_k):
    scores = quantise(np.array(expected), top_k)
    assert scores.dtype == np.uint8
    for value, found in zip(expected, scores, strict=True):
        assert found == pytest.approx(min(max(value, 0), top_k) * 255 / top_k, abs=0.5 + 1e-9)


@pytest.mark.parametrize("top_k", [1, 2, 4, 6, 8])
def test_none_and_all_of_k_are_the_ends_of_a_byte(top_k):
    assert quantise(np.array([0, top_k]), top_k).tolist() == [0, 255]


@some
@given(scores=st.lists(st.tuples(*[st.integers(0, 255)] * 6), min_size=1, max_size=20))
def test_paper_takes_the_more_confident_table_s_rank_alone(scores):
    both = np.array(scores, np.uint8)
    token, markov = both[:, :3], both[:, 3:]
    found = paper_scores(token, markov)
    for t, m, row in zip(token.tolist(), markov.tolist(), found.tolist(), strict=True):
        chosen = m if max(m) > max(t) else t
        best = chosen.index(max(chosen))
        assert row == [chosen[best] if g == best else 0 for g in range(3)]


def test_paper_prefers_the_token_table_when_both_are_as_confident():
    token, markov = np.array([[0, 7, 0]], np.uint8), np.array([[7, 0, 0]], np.uint8)
    assert paper_scores(token, markov).tolist() == [[0, 7, 0]]
    assert (token.tolist(), markov.tolist()) == ([[0, 7, 0]], [[7, 0, 0]])
