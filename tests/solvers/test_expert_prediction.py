"""Experts foretold from ids, contexts and the layers before, against plain loops on at most 200 rows."""

from collections import Counter
from fractions import Fraction
from math import isnan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_solvers.expert_prediction import (
    NO_TOKEN,
    SetScores,
    context_numbers,
    cumulative_hotness,
    expected_activations,
    expert_counts,
    hottest_sets,
    likely_sets,
    mean_by_type,
    ngram_guess,
    score_rows,
    score_types,
    tokens_before,
    top_k_hits,
)

some = settings(max_examples=60, deadline=None)
EXPERTS, TOP_K, IDS = 7, 3, 5

rows_of = st.lists(
    st.tuples(st.integers(0, IDS - 1), st.permutations(range(EXPERTS)).map(lambda order: order[:TOP_K])),
    min_size=2,
    max_size=200,
)


def arrays(rows):
    return np.array([index for index, _ in rows], np.int64), np.array([experts for _, experts in rows], np.uint8)


def counted(rows):
    """Context -> Counter of experts."""
    found = {}
    for index, experts in rows:
        found.setdefault(index, Counter()).update(experts)
    return found


def hot_by_hand(counter, size):
    return set(sorted(counter, key=lambda expert: (-counter[expert], expert))[:size])


@some
@given(rows=rows_of, size=st.integers(1, EXPERTS))
def test_hottest_sets_and_their_share_equal_loops(rows, size):
    counts = expert_counts(*arrays(rows), IDS, EXPERTS)
    sets, share = hottest_sets(counts, size), cumulative_hotness(counts, size)
    for index in range(IDS):
        counter = counted(rows).get(index, Counter())
        assert counts[index].tolist() == [counter[expert] for expert in range(EXPERTS)]
        hot = hot_by_hand(counter, size)
        assert set(np.flatnonzero(sets[index])) == hot
        if counter:
            assert share[index] == pytest.approx(sum(counter[expert] for expert in hot) / counter.total())
        else:
            assert isnan(share[index])


@some
@given(rows=rows_of, least=st.sampled_from([0.25, 0.5, 0.75, 1.0]))
def test_likely_sets_are_those_most_rows_used(rows, least):
    sets = likely_sets(expert_counts(*arrays(rows), IDS, EXPERTS), TOP_K, least)
    for index in range(IDS):
        mine = [experts for other, experts in rows if other == index]
        expected = {
            e for e in range(EXPERTS) if mine and 0 < sum(e in row for row in mine) >= Fraction(least) * len(mine)
        }
        assert set(np.flatnonzero(sets[index])) == expected


@some
@given(fit=rows_of, held=rows_of, size=st.integers(1, EXPERTS))
def test_precision_recall_and_f1_equal_loops_by_row_and_by_type(fit, held, size):
    predicted = hottest_sets(expert_counts(*arrays(fit), IDS, EXPERTS), size)
    by_row = score_rows(predicted, *arrays(held))
    hot = {index: hot_by_hand(counter, size) for index, counter in counted(fit).items()}
    for number, (index, experts) in enumerate(held):
        _same_scores(by_row, number, hot.get(index, set()), set(experts))
    by_type = score_types(predicted, expert_counts(*arrays(held), IDS, EXPERTS) > 0)
    for index in range(IDS):
        _same_scores(by_type, index, hot.get(index, set()), set(counted(held).get(index, ())))


def _same_scores(scores, number, predicted, true):
    hits = len(predicted & true)
    assert scores.recall[number] == pytest.approx(hits / len(true) if true else 0)
    if predicted:
        assert scores.precision[number] == pytest.approx(hits / len(predicted))
        assert scores.f1[number] == pytest.approx(2 * hits / (len(predicted) + len(true)))
    else:
        assert isnan(scores.precision[number])
        assert isnan(scores.f1[number])


@some
@given(fit=rows_of, held=rows_of)
def test_k_hottest_of_ids_with_k_experts_have_one_figure_for_all_three(fit, held):
    """Sets of equal size: precision, recall and F1 are one number, so a published gap needs another definition."""
    index, experts = arrays(held)
    scores = score_rows(hottest_sets(expert_counts(*arrays(fit), IDS, EXPERTS), TOP_K), index, experts)
    known = ~np.isnan(scores.precision)
    assert scores.precision[known] == pytest.approx(scores.recall[known])
    assert scores.f1[known] == pytest.approx(scores.recall[known])


def test_means_leave_out_what_predicts_nothing():
    scores = SetScores(np.array([1.0, np.nan, 0.5]), np.array([0.5, 0.0, 0.5]), np.array([0.6, np.nan, 0.5]))
    assert scores.means() == pytest.approx((0.75, 0.5, 0.55))
    assert scores.take(np.array([True, False, False])).means() == pytest.approx((1.0, 0.5, 0.6))
    assert all(isnan(value) for value in scores.take(np.array([False, True, False])).means())


@some
@given(st.lists(st.tuples(st.integers(0, IDS - 1), st.integers(0, 6)), min_size=1, max_size=50))
def test_a_mean_by_type_equals_a_loop(pairs):
    index, values = (np.array(column) for column in zip(*pairs, strict=True))
    found = mean_by_type(values.astype(float), index, IDS)
    for number in range(IDS):
        mine = [value for other, value in pairs if other == number]
        assert found[number] == pytest.approx(np.mean(mine)) if mine else isnan(found[number])


@some
@given(rows=rows_of, data=st.data())
def test_hits_are_the_overlap_with_the_k_most_expected(rows, data):
    _, experts = arrays(rows)
    expected = np.array(
        data.draw(st.lists(st.permutations(range(EXPERTS)), min_size=len(rows), max_size=len(rows))), float
    ) // 2  # fmt: skip
    for row, chosen, hits in zip(expected.tolist(), experts.tolist(), top_k_hits(expected, experts), strict=True):
        best = sorted(range(EXPERTS), key=lambda expert: (-row[expert], expert))[:TOP_K]
        assert hits == len(set(best) & set(chosen))


@some
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12), back=st.integers(1, 8))
def test_the_token_before_never_crosses_a_border(lengths, back):
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(length) for length in lengths])
    token_id = np.arange(len(sequence)) + 100
    before = tokens_before(token_id, sequence, back)
    assert before.tolist() == [
        int(t) - back if p >= back else NO_TOKEN for t, p in zip(token_id, position, strict=True)
    ]


@some
@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 2**40), st.integers(0, 2)), min_size=1, max_size=60))
def test_contexts_are_equal_where_all_columns_are(rows):
    numbers, size = context_numbers([np.array(column, np.int64) for column in zip(*rows, strict=True)])
    assert len(set(numbers.tolist())) == len(set(rows)) == size == numbers.max() + 1
    pairs = dict(zip(rows, numbers.tolist(), strict=True))
    assert all(pairs[row] == number for row, number in zip(rows, numbers.tolist(), strict=True))


@st.composite
def split_rows(draw):
    """(token, previous token, experts, fit) of some rows, at least one of each part."""
    rows = draw(rows_of)
    fit = draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    previous = draw(st.lists(st.integers(-1, IDS - 1), min_size=len(rows), max_size=len(rows)))
    return *arrays(rows), np.array(previous, np.int64), np.array([True, False, *fit[2:]])


@some
@given(data=split_rows(), pseudo=st.tuples(st.integers(1, 8), st.integers(1, 8)))
def test_expectations_back_off_from_bigram_to_token_to_popularity(data, pseudo):
    token, experts, previous, fit = data
    contexts = [context_numbers([token])[0], context_numbers([token, previous])[0]]
    found = expected_activations(contexts, experts, fit, EXPERTS, pseudo)
    assert found.sum(axis=1) == pytest.approx(np.full(len(found), TOP_K))
    rows = np.flatnonzero(fit)
    popular = [Fraction(int((experts[rows] == e).sum()), len(rows)) for e in range(EXPERTS)]
    for row, t in zip(found, np.flatnonzero(~fit), strict=True):
        expected = popular
        same_token = [r for r in rows if token[r] == token[t]]
        same_pair = [r for r in same_token if previous[r] == previous[t]]
        for mine, start in zip((same_token, same_pair), pseudo, strict=True):
            used = [int((experts[mine] == e).sum()) for e in range(EXPERTS)]
            expected = [(n + start * p) / (len(mine) + start) for n, p in zip(used, expected, strict=True)]
        assert row == pytest.approx([float(value) for value in expected])


@some
@given(data=st.lists(st.tuples(*[st.integers(0, 2)] * 5), min_size=2, max_size=200), least=st.integers(1, 4))
def test_ngrams_back_off_to_the_longest_known_history(data, least):
    """Three labels of history and a label, the fifth number deciding the part."""
    history = np.array([row[:3] for row in data], np.int64)
    label = np.array([row[3] for row in data], np.int64)
    fit = np.array([True, False, *(row[4] > 0 for row in data[2:])])
    guess = ngram_guess(history, label, fit, least)
    known = [row for row, used in zip(data, fit, strict=True) if used]
    for number, t in enumerate(np.flatnonzero(~fit)):
        order, votes = 3, Counter()
        while order >= 0:
            votes = Counter(row[3] for row in known if row[3 - order : 3] == data[t][3 - order : 3])
            if order == 0 or votes.total() >= least:
                break
            order -= 1
        best = min(votes, key=lambda name: (-votes[name], name))
        assert (guess.label[number], guess.order[number]) == (best, order)
        assert guess.confidence[number] == pytest.approx(votes[best] / votes.total())


def test_more_history_never_lowers_the_share_of_fitted_rows_foretold():
    """On the rows fitted on; on others it may, which is why the published confidence is shown beside both."""
    labels = np.random.default_rng(0).integers(0, 4, (200, 6))
    twice, fit = np.concatenate([labels, labels]), np.arange(400) < 200
    right = [(ngram_guess(twice[:, 5 - n : 5], twice[:, 5], fit, 1).label == labels[:, 5]).mean() for n in range(6)]
    assert right == sorted(right)
    assert right[-1] > right[0] + 0.2


def test_without_rows_to_fit_on_nothing_can_be_foretold():
    with pytest.raises(ValueError, match="no row"):
        ngram_guess(np.zeros((2, 1), np.int64), np.zeros(2, np.int64), np.zeros(2, np.bool_), 1)
