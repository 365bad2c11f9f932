"""Whether two sources of a trace are of one model: the same token ids must choose the same experts.

Axes: U token ids, E experts, K experts a token. Tables are counts of (token id, expert), [U, E] sparse.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

MIN_SHARED = 30
"""Two sources are compared token by token if so many ids were seen twice in both."""

MIN_OWN = 0.1
"""A source tells its model if two rows of one id share at least this share of K experts more than chance."""

MIXED_AGREEMENT = 0.2
"""Below it two sources are two models. Domains of one model reach 0.4 to 0.9 as a mean over layers (DeepSeek-V2-Lite,
gpt-oss-20b, OLMoE, Mixtral on unlike texts), two numberings of the same experts 0.1 at most. Loads tell nothing of the
kind: their distance is alike in both cases."""

DISJOINT = 0.95
"""Without token ids two sources are two models if their loads lie so far apart in every layer."""

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Kinship:
    """Whether two sources route the same token ids alike, in experts that two rows share beyond chance.

    token_ids: seen at least twice in both; own: two rows of one id, in each source; cross: one row in each.
    """

    token_ids: int
    own: tuple[float, float]
    cross: float


def load_distance(one: Int64Array, other: Int64Array) -> float:
    """Total variation between two loads, [E] each: 0 alike, 1 disjoint. An empty load is like any."""
    if not one.sum() or not other.sum():
        return 0.0
    return float(np.abs(one / one.sum() - other / other.sum()).sum() / 2)


def kinship(one: csr_array, other: csr_array, top_k: int) -> Kinship:
    """How alike two sources route the ids that both hold at least twice, a common id counting by its rarer side.

    one, other: [U, E] counts. Chance is what rows of two different ids share, so that a load alike in both is no kin.
    """
    rows = [np.asarray(table.sum(axis=1), np.float64) / top_k for table in (one, other)]
    shared = np.flatnonzero((rows[0] >= 2) & (rows[1] >= 2))
    if len(shared) < 2:
        return Kinship(len(shared), (0.0, 0.0), 0.0)
    a, b = one[shared].astype(np.float64), other[shared].astype(np.float64)
    n, m = rows[0][shared], rows[1][shared]
    weight = np.minimum(n, m) / np.minimum(n, m).sum()
    means = [(weight / size) @ table for size, table in ((n, a), (m, b))]

    def beyond_chance(left: int, right: int, product: csr_array, pairs: npt.NDArray[np.float64]) -> float:
        raw = np.asarray(product.sum(axis=1))
        alike = raw / ((n, m)[left] * (n, m)[right])
        other_ids = (means[left] @ means[right] - weight**2 @ alike) / (1 - (weight**2).sum())
        found = (raw - ((n, m)[left] * top_k if left == right else 0)) / pairs
        return float(weight @ found - other_ids)

    own = beyond_chance(0, 0, a * a, n * (n - 1)), beyond_chance(1, 1, b * b, m * (m - 1))
    return Kinship(len(shared), own, beyond_chance(0, 1, a * b, n * m))


def agreement(kinships: Sequence[tuple[Kinship, int]]) -> float | None:
    """Over all layers: 1 if two sources route the same ids alike, 0 if as by chance; None if that cannot be told.

    kinships: each layer's, with its K.
    """
    enough = [(kin, top_k) for kin, top_k in kinships if kin.token_ids >= MIN_SHARED]
    if not enough or any(np.mean([kin.own[side] / top_k for kin, top_k in enough]) < MIN_OWN for side in (0, 1)):
        return None
    scale = sum(float(np.sqrt(np.prod(np.maximum(kin.own, 0)))) / top_k for kin, top_k in enough)
    return sum(kin.cross / top_k for kin, top_k in enough) / scale if scale else None
