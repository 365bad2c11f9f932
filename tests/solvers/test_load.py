"""Balancing load as serving engines do, against a bookkeeping with lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from smoe_solvers.methods.load import balance_load


def balanced_by_hand(load, ranks, slots):
    """The slot lists of every rank: the most burdened expert is copied, then the heaviest goes where least lies."""
    copies = [1] * len(load)
    while sum(copies) < slots:
        copies[max(range(len(load)), key=lambda expert: (load[expert] / copies[expert], -expert))] += 1
    items = [(expert, load[expert] / copies[expert]) for expert in range(len(load))]
    further = [1] * len(load)
    while len(items) < slots:
        expert = max(range(len(load)), key=lambda expert: (load[expert] / further[expert], -expert))
        further[expert] += 1
        items.append((expert, load[expert] / copies[expert]))
    held, borne = [[] for _ in range(ranks)], [0.0] * ranks
    for expert, weight in sorted(items, key=lambda item: -item[1]):
        room = [g for g in range(ranks) if len(held[g]) < slots // ranks]
        rank = min(room, key=lambda g: (borne[g], g))
        held[rank].append(expert)
        borne[rank] += weight
    return held


@given(
    load=st.lists(st.integers(0, 1000), min_size=4, max_size=12).filter(lambda load: len(load) % 4 == 0),
    ranks=st.sampled_from([2, 4]),
    extra=st.integers(0, 2),
)
def test_the_most_burdened_expert_is_copied_and_the_heaviest_goes_where_least_lies(load, ranks, extra):
    slots = len(load) + ranks * extra
    found = balance_load(np.array(load), ranks, slots).reshape(ranks, -1)
    assert [sorted(row) for row in found.tolist()] == [sorted(row) for row in balanced_by_hand(load, ranks, slots)]
    assert set(found.reshape(-1).tolist()) == set(range(len(load)))


def test_experts_that_ranks_cannot_share_equally_leave_the_first_ranks_one_more():
    assert balance_load(np.array([9, 5, 4, 3, 1]), 2, 5).tolist() == [0, 3, 4, 1, 2]
