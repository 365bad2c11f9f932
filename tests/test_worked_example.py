"""The paper's picture, 5 -> 3 -> 1 remote activations with 2 ranks, 8 tokens and top-2, needs six experts.

With four, a token's two experts are either on one rank or split, and a split token costs one whatever its home. If
a, b, c tokens use the pairs of the three balanced placements, a + b + c = 8, an exact shuffle leaves at least 8 - a.
"""

from itertools import product


def remote_after_shuffle(same_rank, other):
    """same_rank: tokens whose experts share rank 0 and rank 1; other: split tokens. Quota 4."""
    return other + 2 * sum(max(0, count - 4) for count in same_rank)


def test_four_experts_cannot_go_from_three_to_one_by_an_exact_shuffle():
    seen = set()
    for pairs in product(range(9), repeat=6):  # tokens on {0,1} {2,3} | {0,2} {1,3} | {0,3} {1,2}
        if sum(pairs) == 8:
            results = [remote_after_shuffle(pairs[i : i + 2], 8 - sum(pairs[i : i + 2])) for i in range(0, 6, 2)]
            seen.add((results[0], min(results[1:])))
    assert (3, 1) not in seen
    assert (3, 5) in seen
