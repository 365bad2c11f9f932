"""Requests given to ranks, against loops over requests, rows and ranks."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_solvers.figures import measure
from smoe_solvers.requests import (
    RequestLoad,
    cyclic_sums,
    measure_requests,
    route,
    route_exact,
    route_in_turn,
    rows_by_rank,
)

some = settings(max_examples=60, deadline=None)
RANKS = 3

scores = st.lists(st.tuples(*[st.integers(0, 6)] * RANKS), min_size=1, max_size=20).map(
    lambda rows: np.array(rows, np.int64)
)


@st.composite
def served(draw):
    """(n_g of every row, border of sequences, each request's sequence and length), at most 200 rows in all."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    counts = draw(
        st.lists(st.tuples(*[st.integers(0, 4)] * RANKS), min_size=sum(lengths), max_size=sum(lengths)).map(np.array)
    )
    counts[:, 0] += counts.sum(axis=1) == 0
    requests = draw(
        st.lists(st.tuples(st.integers(0, len(lengths) - 1), st.integers(1, 20)), min_size=1, max_size=10).map(np.array)
    )
    start = np.concatenate([[0], np.cumsum(lengths)])
    return counts.astype(np.int32), start, requests[:, 0], requests[:, 1]


def rows_of(start, sequence, length):
    """Row numbers of a request, one after another."""
    first, last = start[sequence], start[sequence + 1]
    return [first + place % (last - first) for place in range(length)]


@some
@given(served=served())
def test_a_request_runs_through_its_sequence_again_and_again(served):
    counts, start, sequence, length = served
    found = cyclic_sums(counts, start, sequence, length)
    for request, (one, rows) in enumerate(zip(sequence, length, strict=True)):
        assert found[request].tolist() == counts[rows_of(start, one, rows)].sum(axis=0).tolist()


@some
@given(scores=scores)
def test_each_request_takes_its_best_rank_of_those_left_in_its_round(scores):
    taken, by_hand = set(), []
    for row in scores.tolist():
        if len(taken) == RANKS:
            taken = set()
        rank = max((g for g in range(RANKS) if g not in taken), key=lambda g: (row[g], -g))
        taken.add(rank)
        by_hand.append(rank)
    assert route(scores).tolist() == by_hand


@some
@given(scores=scores)
def test_a_round_touches_every_rank_once_and_at_once_is_never_worse_than_as_they_come(scores):
    greedy, exact, turns = route(scores), route_exact(scores), route_in_turn(*scores.shape)
    for first in range(0, len(scores), RANKS):
        part = slice(first, first + RANKS)
        size = len(scores[part])
        for home in (greedy, exact, turns):
            assert len(set(home[part].tolist())) == size
        best = max(
            sum(scores[first + place, rank] for place, rank in enumerate(order))
            for order in permutations(range(RANKS), size)
        )
        total = {name: scores[part][np.arange(size), home[part]].sum() for name, home in (("g", greedy), ("e", exact))}
        assert total["e"] == best >= total["g"]


def test_requests_in_turn_go_round_the_ranks():
    assert route_in_turn(7, 3).tolist() == [0, 1, 2, 0, 1, 2, 0]


@some
@given(served=served(), data=st.data())
def test_figures_of_requests_equal_those_of_their_rows(served, data):
    counts, start, sequence, length = served
    home = np.array(
        data.draw(st.lists(st.integers(0, RANKS - 1), min_size=len(length), max_size=len(length))), np.int32
    )
    sums = [cyclic_sums(values, start, sequence, length) for values in (counts, (counts > 0).astype(np.int8))]
    load = RequestLoad(sums[0], sums[0], sums[1], sums[1].sum(axis=1))
    found = measure_requests(load, length, home, None)
    rows = [rows_of(start, one, size) for one, size in zip(sequence, length, strict=True)]
    expanded, homes = counts[np.concatenate(rows)], np.repeat(home, length)
    whole = measure(expanded, homes, len(expanded), None)
    for name in ("lar", "fanout", "remote_fanout", "load_imbalance"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name))
    busiest, imbalance, activations = 0, [], []
    for first in range(0, len(length), RANKS):
        mine = slice(sum(length[:first]), sum(length[: first + RANKS]))
        sent, received = [0] * RANKS, [0] * RANKS
        for row, here in zip(expanded[mine], homes[mine], strict=True):
            for there in set(np.flatnonzero(row).tolist()) - {int(here)}:
                sent[here] += 1
                received[there] += 1
        busiest += max(sent + received)
        load = expanded[mine].sum(axis=0)
        imbalance.append(load.max() / load.mean())
        activations.append(load.sum())
    assert found.remote_fanout_busiest == pytest.approx(busiest * RANKS / len(expanded))
    assert found.load_imbalance_batch == pytest.approx(np.average(imbalance, weights=activations))


def test_imbalance_of_the_wishes_counts_rows_and_accuracy_counts_requests():
    activations = np.array([[4, 0, 2], [1, 3, 2], [0, 0, 6]])
    wishes = np.array([[9, 1, 1], [5, 1, 0], [0, 0, 1]])
    rows = np.array([3, 3, 6])
    needed = np.minimum(activations, 1)
    load = RequestLoad(activations, activations, needed, needed.sum(axis=1))
    found = measure_requests(load, rows, np.array([0, 1, 2]), wishes)
    assert found.token_imbalance == 6 * 3 / 12
    assert found.rank_accuracy == pytest.approx(2 / 3)
    assert rows_by_rank(rows, np.array([1, 1, 2]), 3).tolist() == [0, 6, 6]
