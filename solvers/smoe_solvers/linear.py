"""A linear map from what is known before attention to the router's logits, fitted from sums (predictor `linear`).

Axes: D features (the last is constant 1), E experts, T tokens.
"""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

RIDGE = (1.0, 10.0, 100.0, 1000.0)
"""Penalties tried, in rows: how many rows of standardised noise each feature is worth."""


def fit_linear(xx: FloatArray, xy: FloatArray, ridge: float) -> FloatArray:
    """Ridge regression on standardised features: weights [D, E] for raw features, the constant unpenalised.

    xx: [D, D] sum of x x'; xy: [D, E] sum of x y'; both over rows whose last feature is 1.
    Cost: one Cholesky solve of D x D.
    """
    rows = xx[-1, -1]
    mean, target = xx[-1, :-1] / rows, xy[-1] / rows
    covariance = xx[:-1, :-1] / rows - np.outer(mean, mean)
    scale = np.sqrt(np.maximum(np.diag(covariance), 1e-12))
    together = xy[:-1] / rows - np.outer(mean, target)
    normal = covariance / np.outer(scale, scale) + (ridge / rows) * np.eye(len(mean))
    slopes = np.linalg.solve(normal, together / scale[:, None]) / scale[:, None]
    return np.concatenate([slopes, (target - mean @ slopes)[None]])


def fit_affine(xx: FloatArray, xy: FloatArray, first: int) -> FloatArray:
    """Least squares of each expert's logit on its own early logit: [2, E], slopes and intercepts.

    xx, xy: as for `fit_linear`; first: where the E early logits begin among the features.
    """
    rows, experts = xx[-1, -1], np.arange(xy.shape[1])
    early, target = xx[-1, first + experts] / rows, xy[-1] / rows
    variance = xx[first + experts, first + experts] / rows - early**2
    covariance = xy[first + experts, experts] / rows - early * target
    slopes = covariance / np.maximum(variance, 1e-12)
    return np.stack([slopes, target - slopes * early])


def choose_ridge(
    xx: FloatArray, xy: FloatArray, features: npt.NDArray[np.floating], logits: npt.NDArray[np.floating]
) -> tuple[float, FloatArray]:
    """The penalty of least squared error on validation rows, and its weights. features: [N, D]; logits: [N, E]."""
    found = [(ridge, fit_linear(xx, xy, ridge)) for ridge in RIDGE]
    errors = [float(((features @ weights - logits) ** 2).mean()) for _, weights in found]
    return found[int(np.argmin(errors))]
