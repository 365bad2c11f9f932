"""Fit, validation and held-out parts, fixed once by whoever records a trace.

A document goes to a part by the hash of its token ids, so that the same document lands in the same part on every
machine and in every order. Everything here streams: a part left empty is noticed in a bounded look-ahead.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from smoe_profiles.choices import SplitBy, SplitMode

PARTS = ("fit", "validation", "heldout")
SHARES = (0.7, 0.1, 0.2)
BLOCK_TOKENS = 4096
LOOK_AHEAD = 1000
VALIDATION_EVERY = 8

TokenIds = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Document:
    """One document: its token ids [n] and the name of the data set it came from."""

    token_ids: TokenIds
    source: str


@dataclass(frozen=True)
class Assigned:
    """A document with its part."""

    document: Document
    part: str


def document_fraction(token_ids: TokenIds) -> float:
    """A document's place in [0, 1): the first 8 bytes of the sha256 of its ids as little-endian u32.

    >>> round(document_fraction(np.array([17, 4, 2], np.uint32)), 4)
    0.8531
    """
    digest = hashlib.sha256(np.ascontiguousarray(token_ids, "<u4").tobytes()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def part_of(fraction: float) -> str:
    """The part of a place in [0, 1): fit below .7, validation below .8, held-out above."""
    return PARTS[int(np.searchsorted(np.cumsum(SHARES)[:-1], fraction, side="right"))]


def assign_parts(documents: Iterable[Document], mode: SplitMode, by: SplitBy) -> Iterator[Assigned]:
    """Give every document its part, in input order.

    An input of fewer than three documents has no borders to go by: it is cut into blocks of min(4096, rows / 10)
    tokens, which count as documents (`order`: the first half is fit, the second held-out).

    >>> texts = [Document(np.arange(start, start + 4, dtype=np.uint32), "docs") for start in range(5)]
    >>> [assigned.part for assigned in assign_parts(texts, SplitMode.HASH, SplitBy.ORDER)]
    ['fit', 'heldout', 'fit', 'heldout', 'validation']
    """
    stream = iter(documents)
    head = list(_take(stream, LOOK_AHEAD))
    if len(head) < len(PARTS):
        head, whole = _cut_into_blocks(head), False
    else:
        whole = True
    if mode is SplitMode.HELDOUT:
        yield from (Assigned(document, "heldout") for document in chain(head, stream))
    elif mode is SplitMode.FIT:
        yield from _one_in_eight(head, stream)
    elif by is SplitBy.ORDER:
        yield from _by_order(head, stream, whole)
    else:
        parts = _fill_empty([document_fraction(document.token_ids) for document in head])
        yield from (Assigned(document, part) for document, part in zip(head, parts, strict=True))
        yield from (Assigned(document, part_of(document_fraction(document.token_ids))) for document in stream)


def _take(stream: Iterator[Document], count: int) -> Iterator[Document]:
    for _ in range(count):
        try:
            yield next(stream)
        except StopIteration:
            return


def _cut_into_blocks(documents: list[Document]) -> list[Document]:
    rows = sum(len(document.token_ids) for document in documents)
    length = max(1, min(BLOCK_TOKENS, rows // 10))
    return [
        Document(document.token_ids[start : start + length], document.source)
        for document in documents
        for start in range(0, len(document.token_ids), length)
    ]


def _fill_empty(fractions: list[float]) -> list[str]:
    """Parts by hash; a part left empty takes the documents of smallest hash from the largest part."""
    parts = [part_of(fraction) for fraction in fractions]
    for part, share in zip(PARTS, SHARES, strict=True):
        if part in parts:
            continue
        for _ in range(max(1, round(share * len(parts)))):
            sizes = {name: parts.count(name) for name in PARTS}
            donor = max(PARTS, key=lambda name: sizes[name])
            if sizes[donor] < 2:
                break
            smallest = min((fraction, i) for i, fraction in enumerate(fractions) if parts[i] == donor)[1]
            for i, fraction in enumerate(fractions):  # copies of one document stay together
                if fraction == fractions[smallest]:
                    parts[i] = part
    return parts


def _one_in_eight(head: list[Document], stream: Iterator[Document]) -> Iterator[Assigned]:
    """All to fit, the last of every eight to validation; a short input gives its last document."""
    last = len(head) - 1 if len(head) < VALIDATION_EVERY else -1
    for index, document in enumerate(chain(head, stream)):
        validation = index % VALIDATION_EVERY == VALIDATION_EVERY - 1 or index == last
        yield Assigned(document, "validation" if validation else "fit")


def _by_order(head: list[Document], stream: Iterator[Document], whole: bool) -> Iterator[Assigned]:
    half = (len(head) + 1) // 2
    fit_seen = 0
    for index, document in enumerate(chain(head, stream)):
        if index % 2 if whole else index >= half:
            yield Assigned(document, "heldout")
        else:
            fit_seen += 1
            last_of_few = half < VALIDATION_EVERY and fit_seen == half
            validation = fit_seen % VALIDATION_EVERY == 0 or last_of_few
            yield Assigned(document, "validation" if validation else "fit")
