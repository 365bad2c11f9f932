"""From what is known before the router runs to a score per rank (design 4.1).

Axes: V vocabulary, T tokens, E experts, G ranks, K experts a token. A score is the expected number of a token's K
activations that a rank would serve, as u8: 255 is K.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smoe_solvers.assignment import Int64Array, UInt8Array

SCORE_MAX = 255
BACK_OFF = 4.0
"""Rows of the coarser table that a Markov context starts with."""

Counts = tuple[npt.NDArray[np.integer], npt.NDArray[np.integer], npt.NDArray[np.integer]]


@dataclass(frozen=True)
class TokenChoice:
    """How the token table is smoothed: rows of popularity each id starts with, and what an id never seen takes."""

    pseudo: float
    unseen: str


@dataclass(frozen=True)
class MarkovTables:
    """The paper's A, by rank labels: scores after two, one and no known labels.

    two: [G * G, G] (label two layers before, label one layer before); one: [G, G]; none: [G]; all u8.
    """

    two: UInt8Array
    one: UInt8Array
    none: UInt8Array


def quantise(expected: npt.NDArray[np.number], top_k: int) -> UInt8Array:
    """Expected activations a rank (0 .. K) as u8 (0 .. 255)."""
    scores: UInt8Array = np.rint(np.clip(expected, 0, top_k) * (SCORE_MAX / top_k)).astype(np.uint8)
    return scores


def popularity_by_rank(
    popularity: Int64Array, expert_to_rank: npt.NDArray[np.integer], num_ranks: int
) -> npt.NDArray[np.float64]:
    """Share of all activations that each rank serves, [G]. popularity, expert_to_rank: [E]."""
    load = np.bincount(expert_to_rank, weights=popularity, minlength=num_ranks)
    share: npt.NDArray[np.float64] = load / max(load.sum(), 1)
    return share


def rank_counts(
    counts: Counts, vocab: int, expert_to_rank: npt.NDArray[np.integer], num_ranks: int
) -> npt.NDArray[np.float64]:
    """Activations of every token id on every rank, [V, G]. counts: (token_id, expert, count), all [C]."""
    token_id, expert, count = counts
    keys = token_id.astype(np.int64) * num_ranks + expert_to_rank[expert]
    flat = np.bincount(keys, weights=count.astype(np.float64), minlength=vocab * num_ranks)
    return flat.astype(np.float64).reshape(vocab, num_ranks)


def token_table(
    activations: npt.NDArray[np.float64],
    share: npt.NDArray[np.float64],
    neighbour: npt.NDArray[np.integer],
    top_k: int,
    choice: TokenChoice,
) -> npt.NDArray[np.float64]:
    """Expected activations of every token id on every rank, [V, G] float; rows sum to K.

    activations: [V, G] as `rank_counts` gives them; share: [G] popularity by rank; neighbour: [V] the id whose row an
    unseen id takes (an id of V or more: popularity).
    """
    vocab = len(neighbour)
    occurrences = activations.sum(axis=1, keepdims=True) / top_k
    table: npt.NDArray[np.float64] = (activations + choice.pseudo * top_k * share) / (occurrences + choice.pseudo)
    if choice.unseen == "neighbour":
        borrowed = np.flatnonzero((occurrences[:, 0] == 0) & (neighbour < vocab))
        table[borrowed] = table[neighbour[borrowed]]
    return table


def rank_labels(
    experts: npt.NDArray[np.integer], expert_to_rank: npt.NDArray[np.integer], num_ranks: int
) -> UInt8Array:
    """The rank that holds most of each row's experts, ties to the lower. experts: [T, K]. Returns [T] u8."""
    labels: UInt8Array = local_counts(experts, expert_to_rank, num_ranks).argmax(axis=1).astype(np.uint8)
    return labels


def local_counts(
    experts: npt.NDArray[np.integer], expert_to_rank: npt.NDArray[np.integer], num_ranks: int
) -> npt.NDArray[np.int32]:
    """n_g(t): how many of each row's experts every rank holds. experts: [T, K]. Returns [T, G] int32."""
    rank = expert_to_rank[experts]
    return np.stack([(rank == g).sum(axis=1) for g in range(num_ranks)], axis=1).astype(np.int32)


def markov_tables(
    labels_two: UInt8Array | None, labels_one: UInt8Array | None, counts: npt.NDArray[np.int32], top_k: int
) -> MarkovTables:
    """Fit the paper's A from sample rows: labels of the two MoE layers before, [T] each or None, and n_g, [T, G]."""
    ranks = counts.shape[1]
    none = counts.mean(axis=0)
    one = np.tile(none, (ranks, 1))
    if labels_one is not None:
        one = _conditional(labels_one.astype(np.int64), counts, ranks, one)
    two = np.tile(one, (ranks, 1))
    if labels_one is not None and labels_two is not None:
        context = labels_two.astype(np.int64) * ranks + labels_one
        two = _conditional(context, counts, ranks * ranks, two)
    return MarkovTables(quantise(two, top_k), quantise(one, top_k), quantise(none, top_k))


def _conditional(
    context: Int64Array, counts: npt.NDArray[np.int32], contexts: int, prior: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Mean n_g given the context, each context starting with BACK_OFF rows of its prior. Returns [contexts, G]."""
    total = np.zeros((contexts, counts.shape[1]))
    np.add.at(total, context, counts)
    seen = np.bincount(context, minlength=contexts)[:, None]
    smoothed: npt.NDArray[np.float64] = (total + BACK_OFF * prior) / (seen + BACK_OFF)
    return smoothed


def markov_scores(
    tables: MarkovTables, labels_two: UInt8Array | None, labels_one: UInt8Array | None, tokens: int
) -> UInt8Array:
    """Scores of T tokens from the labels known after routing the layers before. Returns [T, G] u8."""
    ranks = len(tables.none)
    if labels_one is None:
        return np.tile(tables.none, (tokens, 1))
    if labels_two is None:
        return np.take(tables.one, labels_one, axis=0)
    return np.take(tables.two, labels_two.astype(np.int64) * ranks + labels_one, axis=0)


def paper_scores(token: UInt8Array, markov: UInt8Array) -> UInt8Array:
    """The paper's rule: the rank of T or of A, whichever is more confident; its confidence there, zero elsewhere."""
    chosen: UInt8Array = np.where((markov.max(axis=1) > token.max(axis=1))[:, None], markov, token)
    scores: UInt8Array = np.zeros_like(token)
    rows = np.arange(len(scores))
    best = chosen.argmax(axis=1)
    scores[rows, best] = chosen[rows, best]
    return scores
