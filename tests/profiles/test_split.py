"""Fit, validation and held-out: fixed by a document's ids, whatever the machine or order."""

import hashlib
import struct
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_profiles.choices import SplitBy, SplitMode
from smoe_profiles.split import Document, assign_parts, document_fraction, part_of

PARTS = ["fit", "validation", "heldout"]
ids_lists = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6)
corpora = st.lists(ids_lists, min_size=1, max_size=40)
distinct = st.lists(ids_lists, min_size=3, max_size=30, unique_by=tuple)
few = settings(max_examples=60, deadline=None)


def document(ids, source="s"):
    return Document(np.array(ids, np.uint32), source)


def parts(documents, mode=SplitMode.HASH, by=SplitBy.HASH):
    return [item.part for item in assign_parts(documents, mode, by)]


def fraction_by_hand(ids):
    digest = hashlib.sha256(b"".join(struct.pack("<I", number) for number in ids)).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def part_by_hand(ids):
    place = fraction_by_hand(ids)
    return "fit" if place < 0.7 else "validation" if place < 0.8 else "heldout"


@given(ids_lists)
@few
def test_a_documents_place_is_the_sha256_of_its_ids(ids):
    assert document_fraction(np.array(ids, np.uint32)) == fraction_by_hand(ids)
    assert part_of(document_fraction(np.array(ids, np.uint32))) == part_by_hand(ids)


def test_shares_are_seven_one_two_in_ten():
    found = Counter(parts(document([number]) for number in range(5000)))
    assert found["fit"] / 5000 == pytest.approx(0.7, abs=0.025)
    assert found["validation"] / 5000 == pytest.approx(0.1, abs=0.015)
    assert found["heldout"] / 5000 == pytest.approx(0.2, abs=0.02)


def test_documents_far_beyond_the_look_ahead_still_go_by_their_own_hash():
    corpus = [[number, 7] for number in range(2500)]
    assert parts(map(document, corpus)) == [part_by_hand(ids) for ids in corpus]


@given(distinct, st.randoms(use_true_random=False))
@few
def test_a_document_lands_in_the_same_part_in_any_order(corpus, random):
    found = dict(zip(map(tuple, corpus), parts(map(document, corpus)), strict=True))
    shuffled = list(corpus)
    random.shuffle(shuffled)
    assert dict(zip(map(tuple, shuffled), parts(map(document, shuffled)), strict=True)) == found


@given(distinct)
@few
def test_an_empty_part_takes_the_documents_of_smallest_hash(corpus):
    found = parts(map(document, corpus))
    by_hash = [part_by_hand(ids) for ids in corpus]
    assert set(found) == set(PARTS)
    moved = [i for i in range(len(corpus)) if found[i] != by_hash[i]]
    assert all(found[i] not in by_hash for i in moved)
    for i in moved:
        left = [j for j in range(len(corpus)) if by_hash[j] == by_hash[i] and j not in moved]
        assert all(fraction_by_hand(corpus[i]) <= fraction_by_hand(corpus[j]) for j in left)


@pytest.mark.parametrize(("rows", "length"), [(100, 10), (1005, 100), (50_000, 4096), (7, 1)])
def test_one_long_row_is_cut_into_blocks_that_are_hashed_like_documents(rows, length):
    ids = np.arange(rows, dtype=np.uint32)
    found = list(assign_parts([Document(ids, "book")], SplitMode.HASH, SplitBy.HASH))
    assert [item.document.token_ids.tolist() for item in found] == [
        ids[start : start + length].tolist() for start in range(0, rows, length)
    ]
    assert {item.document.source for item in found} == {"book"}
    assert {item.part for item in found} == set(PARTS)


def test_two_documents_are_cut_without_joining_them():
    found = list(assign_parts([document(range(60), "a"), document(range(45), "b")], SplitMode.HASH, SplitBy.HASH))
    assert [(item.document.source, len(item.document.token_ids)) for item in found] == [
        *[("a", 10)] * 6,
        *[("b", 10)] * 4,
        ("b", 5),
    ]


@pytest.mark.parametrize("count", [3, 7, 8, 9, 40, 1200])
def test_fit_keeps_one_document_in_eight_as_validation(count):
    expected = ["validation" if index % 8 == 7 else "fit" for index in range(count)]
    if count < 8:
        expected[-1] = "validation"
    assert parts((document([number]) for number in range(count)), SplitMode.FIT) == expected


@pytest.mark.parametrize("by", list(SplitBy))
def test_heldout_forces_every_document(by):
    assert set(parts((document([number]) for number in range(1100)), SplitMode.HELDOUT, by)) == {"heldout"}


@pytest.mark.parametrize("count", [4, 15, 16, 33, 1100])
def test_order_takes_even_sequences_for_fit_and_odd_ones_for_heldout(count):
    found = parts((document([number]) for number in range(count)), SplitMode.HASH, SplitBy.ORDER)
    assert found[1::2] == ["heldout"] * (count // 2)
    even = found[::2]
    expected = ["validation" if index % 8 == 7 else "fit" for index in range(len(even))]
    if len(even) < 8:
        expected[-1] = "validation"
    assert even == expected


def test_order_without_borders_is_first_half_against_second():
    found = list(assign_parts([document(range(1000))], SplitMode.HASH, SplitBy.ORDER))
    held = [item.part == "heldout" for item in found]
    assert held == [False] * 5 + [True] * 5
    assert [item.part for item in found[:5]].count("validation") == 1


@given(corpora, st.sampled_from(list(SplitMode)), st.sampled_from(list(SplitBy)))
@few
def test_every_document_comes_out_exactly_once_and_in_order(corpus, mode, by):
    found = list(assign_parts([document(ids, f"s{i}") for i, ids in enumerate(corpus)], mode, by))
    joined = [(item.document.source, int(token)) for item in found for token in item.document.token_ids]
    assert joined == [(f"s{i}", token) for i, ids in enumerate(corpus) for token in ids]
    assert {item.part for item in found} <= set(PARTS)
    if len(corpus) >= 3:
        assert len(found) == len(corpus)


def test_an_empty_input_gives_nothing():
    assert parts([]) == []


def test_the_input_is_streamed():
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield document([taken])

    stream = assign_parts(endless(), SplitMode.HASH, SplitBy.HASH)
    for _ in range(2000):
        next(stream)
    assert taken <= 2001
