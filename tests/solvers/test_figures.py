"""The figures of docs/terms.md against loops over tokens, experts and ranks."""

from dataclasses import astuple
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_solvers.assignment import assign_rule
from smoe_solvers.choices import Assignment
from smoe_solvers.figures import (
    Figures,
    batches,
    home_by_scores,
    home_without_shuffle,
    mean_figures,
    measure,
    measure_groups,
    quota,
    rank_accuracy,
    wire_rows,
)
from smoe_solvers.predictors import local_counts, quantise
from smoe_solvers.redundancy import single_hosts
from tests.solvers.reference import clustered_rows, hungarian, placements, routings, rule, total

some = settings(max_examples=50, deadline=None)
EXPERTS, RANKS, TOP_K = 8, 4, 2


@st.composite
def parts(draw):
    """(rows, placement, home of each row, batch)."""
    rows = draw(routings(EXPERTS, TOP_K, max_rows=40))
    home = draw(st.lists(st.integers(0, RANKS - 1), min_size=len(rows), max_size=len(rows)))
    return rows, draw(placements(EXPERTS, RANKS)), np.array(home, np.int32), draw(st.integers(1, 45))


def max_over_mean(load):
    return Fraction(max(load) * len(load), sum(load))


def busiest(rows, placement, home):
    """Rows through the busiest direction of the busiest rank: each token once to each other rank it needs."""
    sent, received = [0] * RANKS, [0] * RANKS
    for row, here in zip(rows, home, strict=True):
        for there in {int(placement[e]) for e in row} - {int(here)}:
            sent[here] += 1
            received[there] += 1
    return max(sent + received)


@some
@given(part=parts())
def test_figures_equal_loops(part):
    rows, placement, home, batch = part
    found = measure(local_counts(rows, single_hosts(placement, RANKS)), home, batch, None)
    local, needed, remote, load = 0, 0, 0, [0] * RANKS
    for row, here in zip(rows, home, strict=True):
        ranks = [int(placement[e]) for e in row]
        local += ranks.count(int(here))
        needed += len(set(ranks))
        remote += len(set(ranks) - {int(here)})
        for g in ranks:
            load[g] += 1
    in_batches = [slice(i, i + batch) for i in range(0, len(rows), batch)]
    loads = [np.bincount(placement[rows[cut]].reshape(-1), minlength=RANKS).tolist() for cut in in_batches]
    through = sum(busiest(rows[cut], placement, home[cut]) for cut in in_batches)
    assert found.lar == pytest.approx(float(Fraction(local, rows.size)))
    assert found.fanout == pytest.approx(float(Fraction(needed, len(rows))))
    assert found.remote_fanout == pytest.approx(float(Fraction(remote, len(rows))))
    assert found.remote_fanout_busiest == pytest.approx(float(Fraction(through * RANKS, len(rows))))
    assert found.load_imbalance == pytest.approx(float(max_over_mean(load)))
    weights = [sum(one) for one in loads]
    each = [float(max_over_mean(one)) for one in loads]
    assert found.load_imbalance_batch == pytest.approx(np.average(each, weights=weights))


@some
@given(part=parts())
def test_local_and_remote_activations_are_all_there_are(part):
    rows, placement, home, batch = part
    found = measure(local_counts(rows, single_hosts(placement, RANKS)), home, batch, None)
    remote = sum(placement[e] != here for row, here in zip(rows, home, strict=True) for e in row)
    assert found.lar + remote / rows.size == pytest.approx(1)
    without_home = sum(here not in placement[row] for row, here in zip(rows, home, strict=True))
    assert found.remote_fanout == pytest.approx(found.fanout - 1 + without_home / len(rows))


@some
@given(wishes=st.lists(st.tuples(*[st.integers(0, 5)] * RANKS), min_size=1, max_size=30))
def test_token_imbalance_is_of_the_wishes_before_any_quota(wishes):
    wished = [0] * RANKS
    for row in wishes:
        wished[row.index(max(row))] += 1
    counts = np.ones((len(wishes), RANKS), np.int32)
    found = measure(counts, np.zeros(len(wishes), np.int32), 8, np.array(wishes))
    assert found.token_imbalance == pytest.approx(float(max_over_mean(wished)))
    assert measure(counts, np.zeros(len(wishes), np.int32), 8, None).token_imbalance == 1


def test_one_rank_has_nothing_remote():
    counts = np.full((5, 1), 2, np.int32)
    assert measure(counts, np.zeros(5, np.int32), 2, None) == Figures(1, 1, 0, 0, 1, 1, 1)


@some
@given(part=parts(), data=st.data())
def test_groups_of_rows_are_measured_like_loops(part, data):
    rows, placement, home, _ = part
    group = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows))))
    found = measure_groups(local_counts(rows, single_hosts(placement, RANKS)), home, group, 5)
    for number in range(5):
        mine = [(row, int(here)) for row, here, one in zip(rows, home, group, strict=True) if one == number]
        assert found.rows[number] == len(mine)
        if not mine:
            assert np.isnan(found.lar[number])
            assert np.isnan(found.remote_fanout[number])
            continue
        local = sum(int(placement[e]) == here for row, here in mine for e in row)
        remote = sum(len({int(placement[e]) for e in row} - {here}) for row, here in mine)
        assert found.lar[number] == pytest.approx(float(Fraction(local, len(mine) * TOP_K)))
        assert found.remote_fanout[number] == pytest.approx(float(Fraction(remote, len(mine))))


@some
@given(part=parts(), seed=st.integers(0, 9))
def test_groups_weighted_by_their_rows_are_the_whole(part, seed):
    rows, placement, home, batch = part
    counts = local_counts(rows, single_hosts(placement, RANKS))
    found = measure_groups(counts, home, np.random.default_rng(seed).integers(0, 3, len(rows)), 3)
    whole = measure(counts, home, batch, None)
    for name in ("lar", "remote_fanout"):
        mean = np.nansum(getattr(found, name) * found.rows) / len(rows)
        assert mean == pytest.approx(getattr(whole, name))


@some
@given(part=parts(), data=st.data())
def test_a_rank_is_right_if_it_is_the_first_of_those_with_most_experts(part, data):
    rows, placement, home, batch = part
    drawn = st.lists(st.tuples(*[st.integers(0, 3)] * RANKS), min_size=len(rows), max_size=len(rows))
    wishes = np.array(data.draw(drawn))
    right = 0
    for row, wish in zip(rows, wishes.tolist(), strict=True):
        held = [sum(int(placement[e]) == g for e in row) for g in range(RANKS)]
        right += wish.index(max(wish)) == held.index(max(held))
    counts = local_counts(rows, single_hosts(placement, RANKS))
    assert rank_accuracy(wishes, counts) == pytest.approx(float(Fraction(right, len(rows))))
    assert measure(counts, home, batch, wishes).rank_accuracy == rank_accuracy(wishes, counts)
    assert measure(counts, home, batch, counts).rank_accuracy == 1
    assert measure(counts, home, batch, None).rank_accuracy is None


# Homes.


@some
@given(rows=st.integers(1, 60), ranks=st.integers(1, 8), size=st.integers(1, 40))
def test_without_a_shuffle_the_i_th_row_lies_on_rank_i_over_the_quota(rows, ranks, size):
    by_hand = []
    for start in range(0, rows, size):
        batch = min(size, rows - start)
        by_hand += [i // -(-batch // ranks) for i in range(batch)]
    found = home_without_shuffle(rows, ranks, size)
    assert found.tolist() == by_hand
    assert found.max() < ranks


def test_the_last_partial_batch_is_kept_and_has_its_own_quota():
    assert batches(10, 4) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert home_without_shuffle(10, 2, 4).tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 1]
    assert [quota(rows, 4) for rows in (0, 1, 4, 5, 1024)] == [0, 1, 1, 2, 256]


@some
@given(
    scores=st.lists(st.tuples(*[st.integers(0, 9)] * RANKS), min_size=1, max_size=40), size=st.sampled_from([5, 12, 50])
)
def test_a_shuffle_is_one_assignment_a_batch(scores, size):
    table = np.array(scores, np.uint8)
    served = home_by_scores(table, size, Assignment.RULE)
    exact = home_by_scores(table, size, Assignment.EXACT)
    for start in range(0, len(table), size):
        batch = table[start : start + size]
        most = -(-len(batch) // RANKS)
        assert served[start : start + size].tolist() == rule(batch, most)
        assert total(batch, exact[start : start + size]) == hungarian(batch, most)
        assert np.bincount(exact[start : start + size]).max() <= most


def test_a_shuffle_by_true_counts_keeps_more_local_than_none():
    rows = clustered_rows(np.random.default_rng(0), 300, EXPERTS, TOP_K, 4)
    counts = local_counts(rows, single_hosts(np.arange(EXPERTS) // 2, RANKS))
    still = measure(counts, home_without_shuffle(300, RANKS, 128), 128, None)
    shuffled = [measure(counts, home_by_scores(counts, 128, how), 128, counts) for how in Assignment]
    assert still.lar < min(one.lar for one in shuffled)
    assert {one.fanout for one in shuffled} == {still.fanout}
    assert {one.load_imbalance for one in shuffled} == {still.load_imbalance}


def test_the_rule_reads_the_same_bytes_as_the_run_time():
    scores = np.random.default_rng(0).integers(0, 200, (64, RANKS)).astype(np.uint8)
    assert home_by_scores(scores, 64, Assignment.RULE).tolist() == assign_rule(scores, 16).tolist()


def test_counts_are_not_lost_in_the_noise_of_the_rule():
    rows = clustered_rows(np.random.default_rng(1), 512, EXPERTS, TOP_K, 4)
    counts = local_counts(rows, single_hosts(np.arange(EXPERTS) // 2, RANKS))
    served = home_by_scores(counts, 256, Assignment.RULE)
    assert served.tolist() == home_by_scores(quantise(counts, counts.max()), 256, Assignment.RULE).tolist()
    exact = home_by_scores(counts, 256, Assignment.EXACT)
    assert total(counts, served) > 0.99 * total(counts, exact)


# What travels.


@some
@given(remote=st.fractions(0, 8).map(float), ranks=st.integers(1, 64))
def test_wire_rows_add_up_the_collectives_of_each_way(remote, ranks):
    scatter = gather = ranks - 1
    all_reduce, dispatch, combine = 2 * (ranks - 1), remote, remote
    assert wire_rows(remote, ranks) == pytest.approx(
        {
            "ar-ep": all_reduce + dispatch + combine + gather,
            "sp-ep": scatter + dispatch + combine + gather,
            "speculative": scatter + dispatch + combine + gather,
            "dp-ep": dispatch + combine,
            "replicated": all_reduce + all_reduce,
        }
    )


def test_the_mean_over_layers_is_figure_by_figure():
    first = Figures(0.2, 3, 2, 2.5, 1.1, 1.3, 1.5, 0.5, 0.9)
    second = Figures(0.4, 2, 1, 1.5, 1.3, 1.7, 2.5, 0.7, 0.7)
    assert astuple(mean_figures([first, second])) == pytest.approx((0.3, 2.5, 1.5, 2.0, 1.2, 1.5, 2.0, 0.6, 0.8))
    without = Figures(0.2, 3, 2, 2.5, 1.1, 1.3, 1.5)
    assert mean_figures([without, without]) == without
