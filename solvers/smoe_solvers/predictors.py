"""From what is known before the router runs to a score per rank (docs/formats/runtime.md).

Axes: V vocabulary, T tokens, E experts, G ranks, K experts a token. A score is the expected number of a token's K
experts that a rank holds, as u8: 255 is K. `hosts`: [E, G] whether a rank holds a copy of an expert; one with copies on
two ranks counts on both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls
from scipy.sparse import coo_array

from smoe_solvers.assignment import Int64Array, UInt8Array
from smoe_solvers.choices import Predictor

SCORE_MAX = 255
BACK_OFF = 4.0
"""Rows of the coarser table that a Markov context starts with."""

BoolArray = npt.NDArray[np.bool_]
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


FUSED = (Predictor.TOKEN, Predictor.MARKOV, Predictor.EARLY_GATE, Predictor.LINEAR)
"""What the calibrated mix is made of, in the order of its weights."""

SHARPNESS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0)
"""Temperatures tried for inclusion, in units of the logits' spread over experts."""


@dataclass(frozen=True)
class Context:
    """What is known of T tokens before a layer's router runs; None where it is not there.

    token_id: [T]; two, one: [T] u8 rank labels two layers and one layer before; early: [T, E] the router's logits on
    the layer's input; features: [T, D] of the linear map.
    """

    token_id: npt.NDArray[np.integer]
    two: UInt8Array | None = None
    one: UInt8Array | None = None
    early: npt.NDArray[np.floating] | None = None
    features: npt.NDArray[np.floating] | None = None


@dataclass(frozen=True)
class LayerPredictors:
    """One layer's tables contracted to ranks, and what turns its features into scores.

    token: [V, G] u8; markov: the paper's A; temperature of early-gate and linear inclusion (0: not fitted);
    early: [2, E] slope and intercept from each early logit to the true one, or None; linear: [D, E] or None;
    fusion: weights of FUSED; chosen: what validation preferred here.
    """

    token: UInt8Array
    markov: MarkovTables
    early_temperature: float = 0.0
    linear_temperature: float = 0.0
    early: npt.NDArray[np.floating] | None = None
    linear: npt.NDArray[np.floating] | None = None
    fusion: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0)
    chosen: Predictor = Predictor.TOKEN

    def available(self) -> list[Predictor]:
        """The predictors that were fitted, `selected` aside."""
        gates = [Predictor.EARLY_GATE] if self.early is not None else []
        maps = [Predictor.LINEAR] if self.linear is not None else []
        return [Predictor.TOKEN, Predictor.MARKOV, Predictor.PAPER, *gates, *maps, Predictor.FUSED]


def score(
    layer: LayerPredictors,
    predictor: Predictor,
    context: Context,
    hosts: BoolArray,
    top_k: int,
) -> UInt8Array:
    """Scores [T, G] u8 of a predictor. hosts: [E, G].

    Raises ValueError if the context lacks what the predictor needs.
    """
    match predictor:
        case Predictor.SELECTED:
            return score(layer, layer.chosen, context, hosts, top_k)
        case Predictor.TOKEN:
            return token_scores(layer, context)
        case Predictor.MARKOV:
            return markov_scores(layer.markov, context.two, context.one, len(context.token_id))
        case Predictor.PAPER:
            markov = markov_scores(layer.markov, context.two, context.one, len(context.token_id))
            return paper_scores(token_scores(layer, context), markov)
        case Predictor.EARLY_GATE:
            logits, temperature = early_logits(layer, context), layer.early_temperature
        case Predictor.LINEAR:
            logits, temperature = linear_logits(layer, context), layer.linear_temperature
        case Predictor.FUSED:
            parts = [
                weight * score(layer, part, context, hosts, top_k).astype(np.float64)
                for part, weight in zip(FUSED, layer.fusion, strict=True)
                if weight
            ]
            parts.append(np.zeros((len(context.token_id), hosts.shape[1])))  # perhaps no part has a weight
            mixed: UInt8Array = np.rint(np.clip(np.sum(parts, axis=0), 0, SCORE_MAX)).astype(np.uint8)
            return mixed
    return quantise(by_rank(inclusion(logits, top_k, temperature), hosts), top_k)


def token_scores(layer: LayerPredictors, context: Context) -> UInt8Array:
    """Rows of the token table; an id beyond the vocabulary (not known) takes popularity."""
    known = context.token_id < len(layer.token)
    rows = layer.token[np.where(known, context.token_id, 0)]
    return np.where(known[:, None], rows, layer.markov.none)


def early_logits(layer: LayerPredictors, context: Context) -> npt.NDArray[np.floating]:
    """The early router's logits, each expert's put on the scale of its true ones, [T, E]."""
    if layer.early is None:
        raise ValueError("the early gate was not fitted")
    slope, intercept = layer.early.astype(np.float32)
    corrected: npt.NDArray[np.floating] = _there(context.early, Predictor.EARLY_GATE) * slope + intercept
    return corrected


def linear_logits(layer: LayerPredictors, context: Context) -> npt.NDArray[np.floating]:
    """The linear map's logits, [T, E]."""
    if layer.linear is None:
        raise ValueError("the linear map was not fitted")
    return _there(context.features, Predictor.LINEAR) @ layer.linear.astype(np.float32)


def _there(values: npt.NDArray[np.floating] | None, predictor: Predictor) -> npt.NDArray[np.floating]:
    if values is None:
        raise ValueError(f"{predictor} needs the early gate's record")
    return values


def inclusion(logits: npt.NDArray[np.floating], top_k: int, temperature: float) -> npt.NDArray[np.float64]:
    """Each expert's probability to be among the top K, [T, E]; rows sum to K.

    A logistic curve around the middle between the K-th and the next logit. temperature is in units of a row's own
    spread, so that one number serves tokens of sharp and of flat logits. E must exceed K.
    """
    values = logits.astype(np.float64)
    last = values.shape[1] - top_k  # where the K-th largest stands in rising order
    border = np.partition(values, (last - 1, last), axis=1)[:, last - 1 : last + 1].mean(axis=1, keepdims=True)
    spread = values.std(axis=1, keepdims=True) + 1e-12
    distance = (values - border) / (temperature * spread)
    found: npt.NDArray[np.float64] = 1 / (1 + np.exp(-np.clip(distance, -60, 60)))
    found *= top_k / found.sum(axis=1, keepdims=True)
    return found


def by_rank(experts: npt.NDArray[np.float64], hosts: BoolArray) -> npt.NDArray[np.float64]:
    """Sums over each rank's experts, [T, G]. experts: [T, E]; hosts: [E, G]."""
    summed: npt.NDArray[np.float64] = experts @ hosts.astype(np.float64)
    return summed


def choose_temperature(
    logits: npt.NDArray[np.floating],
    counts: npt.NDArray[np.int32],
    hosts: BoolArray,
    top_k: int,
) -> float:
    """The temperature whose expected counts a rank are nearest the true ones, in squares.

    counts: [T, G] true n_g; hosts: [E, G].
    """

    def error(temperature: float) -> float:
        expected = by_rank(inclusion(logits, top_k, temperature), hosts)
        return float(((expected - counts) ** 2).mean())

    return min(SHARPNESS, key=error)


def fit_fusion(scores: Sequence[UInt8Array | None], counts: npt.NDArray[np.int32], top_k: int) -> tuple[float, ...]:
    """Non-negative least-squares weights of the parts of FUSED, so that the mix is calibrated to true counts.

    scores: [T, G] u8 of each part, None where it is not there (weight 0); counts: [T, G] true n_g.
    """
    here = [number for number, part in enumerate(scores) if part is not None]
    columns = np.stack([np.asarray(scores[number], np.float64).reshape(-1) for number in here], axis=1)
    weights, _ = nnls(columns * (top_k / SCORE_MAX), counts.reshape(-1).astype(np.float64))
    found = np.zeros(len(scores))
    found[here] = weights
    return tuple(float(weight) for weight in found)


def quantise(expected: npt.NDArray[np.number], top_k: int) -> UInt8Array:
    """Expected activations a rank (0 .. K) as u8 (0 .. 255)."""
    scores: UInt8Array = np.rint(np.clip(expected, 0, top_k) * (SCORE_MAX / top_k)).astype(np.uint8)
    return scores


def popularity_by_rank(popularity: Int64Array, hosts: BoolArray) -> npt.NDArray[np.float64]:
    """Share of all activations whose expert each rank holds, [G]. popularity: [E]; hosts: [E, G]."""
    share: npt.NDArray[np.float64] = (popularity @ hosts.astype(np.float64)) / max(popularity.sum(), 1)
    return share


def rank_counts(counts: Counts, vocab: int, hosts: BoolArray) -> npt.NDArray[np.float64]:
    """Activations of every token id that every rank could serve, [V, G].

    counts: (token_id, expert, count), all [C]; hosts: [E, G].
    """
    token_id, expert, count = counts
    by_expert = coo_array((count.astype(np.float64), (token_id, expert)), shape=(vocab, len(hosts))).tocsr()
    return np.asarray(by_expert @ hosts.astype(np.float64))


def occurrences(counts: Counts, vocab: int, top_k: int) -> npt.NDArray[np.float64]:
    """Rows behind the counts of every token id, [V]."""
    token_id, _, count = counts
    return np.bincount(token_id, weights=count, minlength=vocab).astype(np.float64) / top_k


def token_table(
    activations: npt.NDArray[np.float64],
    seen: npt.NDArray[np.float64],
    share: npt.NDArray[np.float64],
    neighbour: npt.NDArray[np.integer],
    top_k: int,
    choice: TokenChoice,
) -> npt.NDArray[np.float64]:
    """Expected activations of every token id on every rank, [V, G] float; rows sum to K where no expert has copies.

    activations: [V, G] as `rank_counts` gives them; seen: [V] rows, as `occurrences` gives them; share: [G] popularity
    by rank; neighbour: [V] the id whose row an unseen id takes (an id of V or more: popularity).
    """
    vocab = len(neighbour)
    smoothed = activations + choice.pseudo * top_k * share
    table: npt.NDArray[np.float64] = smoothed / (seen[:, None] + choice.pseudo)
    if choice.unseen == "neighbour":
        borrowed = np.flatnonzero((seen == 0) & (neighbour < vocab))
        table[borrowed] = table[neighbour[borrowed]]
    return table


def rank_labels(experts: npt.NDArray[np.integer], hosts: BoolArray) -> UInt8Array:
    """The rank that holds most of each row's experts, ties to the lower. experts: [T, K]. Returns [T] u8."""
    labels: UInt8Array = local_counts(experts, hosts).argmax(axis=1).astype(np.uint8)
    return labels


def local_counts(experts: npt.NDArray[np.integer], hosts: BoolArray) -> npt.NDArray[np.int32]:
    """n_g(t): how many of each row's experts every rank holds. experts: [T, K]; hosts: [E, G]. Returns [T, G] int32.

    >>> hosts = np.array([[True, False], [True, False], [False, True], [False, True]])
    >>> local_counts(np.array([[0, 1], [1, 2]]), hosts)
    array([[2, 0],
           [1, 1]], dtype=int32)
    """
    held = hosts.astype(np.int32)
    counts = np.zeros((len(experts), hosts.shape[1]), np.int32)
    for choice in experts.T:
        counts += held[choice]
    return counts


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
