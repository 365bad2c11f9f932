"""The families' router rules by hand: plain loops over one token's logits, in float64, from papers and model cards.

Then what stands before a router: a norm, an activation, a dense layer.
"""

from functools import partial, reduce

import numpy as np
import torch

from tests.profiles.tiny_families import EXPERTS

Chosen = tuple[list[int], list[float], float]
"""One token's experts, their weights, and the gap to the first expert left out, of the largest score."""


def sigmoid(value):
    return 1 / (1 + np.exp(-value))


def shares(values):
    """Softmax."""
    raised = [np.exp(value - max(values)) for value in values]
    return [value / sum(raised) for value in raised]


def best(scores: list[float], k: int, allowed: set[int] | None = None) -> tuple[list[int], float]:
    """The k best of the allowed, and the gap behind them."""
    order = sorted(range(len(scores)) if allowed is None else allowed, key=lambda expert: -scores[expert])
    left_out = scores[order[k]] if k < len(order) else -np.inf
    return order[:k], (scores[order[k - 1]] - left_out) / max(abs(score) for score in scores)


def scored(logits, k, *, score, bias=None, groups=None, norm=True, scale=1.0, power=1) -> Chosen:
    """Score all experts, choose by score plus bias, weigh by score.

    groups: (number of groups, groups chosen, experts that make a group's score). power: of the norm over the chosen.
    """
    scores = score(logits)
    choice = [value + (0 if bias is None else bias[expert]) for expert, value in enumerate(scores)]
    allowed, gap = None, 1.0
    if groups:
        count, chosen, counted = groups
        size = len(choice) // count
        of_group = [sum(sorted(choice[g * size : (g + 1) * size])[-counted:]) for g in range(count)]
        kept, gap = best(of_group, chosen)
        allowed = {expert for expert in range(len(choice)) if expert // size in kept}
    ids, behind = best(choice, k, allowed)
    weights = [scores[expert] for expert in ids]
    total = sum(weight**power for weight in weights) ** (1 / power) if norm else 1.0
    return ids, [weight / total * scale for weight in weights], min(gap, behind)


softmax = partial(scored, score=shares)
sigmoids = partial(scored, score=lambda logits: [sigmoid(logit) for logit in logits])
sqrt_softplus = partial(scored, score=lambda logits: [np.sqrt(np.log1p(np.exp(logit))) for logit in logits])


def of_the_chosen(logits, k, *, bias=None, weigh=shares) -> Chosen:
    """Choose by logit (plus bias), weigh the chosen logits alone."""
    ids, gap = best([logit + (0 if bias is None else bias[expert]) for expert, logit in enumerate(logits)], k)
    return ids, weigh([logits[expert] for expert in ids]), gap


each_sigmoid = partial(of_the_chosen, weigh=lambda chosen: [sigmoid(logit) for logit in chosen])


def sparsemixer(logits, k) -> Chosen:
    """Two picks; each weighed among the experts within 2 % of the best (arXiv 2409.12136, without training noise)."""
    left, ids, weights, gap = dict(enumerate(logits)), [], [], 1.0
    for _ in range(k):
        top = max(left, key=lambda expert: left[expert])
        gap = min(gap, (left[top] - max(v for e, v in left.items() if e != top)) / max(map(abs, logits)))
        close = [e for e, v in left.items() if (left[top] - v) / max(abs(v), left[top]) <= 0.02]
        ids.append(top)
        weights.append(shares([left[top], *(left[e] for e in close if e != top)])[0])
        del left[top]
    return ids, weights, gap


def inkling(logits, k, *, bias, scale) -> Chosen:
    """Sigmoids; the shared experts behind the routed ones are never chosen but share the normalisation."""
    scores = [sigmoid(logit) for logit in logits]
    ids, gap = best([scores[expert] + bias[expert] for expert in range(EXPERTS)], k)
    total = sum(scores[expert] for expert in ids) + sum(scores[EXPERTS:])
    return ids, [8.0 * scale * scores[expert] / total for expert in ids], gap


def longest_gap_without_skip(logits, k, *, bias) -> Chosen:
    """Softmax over E + 1; the last class skips the experts, so its weight does not count."""
    ids, weights, gap = softmax(logits, k, bias=bias, norm=False)
    return ids, [0.0 if expert == EXPERTS else weight for expert, weight in zip(ids, weights, strict=True)], gap


def value(module, path) -> np.ndarray | None:
    """A parameter or buffer by its path, in float64; None if the module has none of that name."""
    found = reduce(lambda part, name: getattr(part, name, None), path.split("."), module)
    return None if found is None else found.detach().double().numpy()


def rms(hidden, eps, weight=1.0):
    return hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + eps) * weight


def gelu(hidden):
    return hidden * 0.5 * (1 + torch.erf(torch.from_numpy(hidden) / np.sqrt(2)).numpy())


def dense(layer, path, hidden):
    bias = value(layer, f"{path}.bias")
    return hidden @ value(layer, f"{path}.weight").T + (0 if bias is None else bias)
