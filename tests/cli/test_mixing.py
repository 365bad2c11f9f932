"""Sources weighed: shares of blocks by a mix, and weights that go to the source that gains least."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_cli.errors import UsageError
from smoe_cli.placing.mixing import (
    MOST_REPEATS,
    check_sources,
    chosen_blocks,
    equal_mix,
    gains_by_source,
    read_mix,
    robust_mix,
    weigh_blocks,
)
from smoe_profiles.errors import ImpossibleError
from smoe_profiles.tables import Samples


def samples(source, rows=4):
    count = rows * len(source)
    return Samples(
        token_id=np.arange(count, dtype=np.uint32),
        experts=np.arange(2 * count, dtype=np.uint16).reshape(count, 2),
        block_start=np.arange(0, count + 1, rows),
        phase=np.arange(count).astype(np.int16),
        source=tuple(source),
    )


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    weights=st.lists(st.floats(0.2, 1.0), min_size=4, max_size=4),
)
def test_every_source_has_its_share_of_blocks(counts, weights):
    names = [f"s{number}" for number in range(len(counts))]
    source = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    total = sum(weights[: len(names)])
    mix = {name: weight / total for name, weight in zip(names, weights, strict=False)}
    chosen = chosen_blocks(source, mix)
    assert len(chosen) <= MOST_REPEATS * len(source) + len(names)
    for name in names:
        share = sum(source[block] == name for block in chosen) / len(chosen)
        assert share == pytest.approx(mix[name], abs=(len(names) + 1) / len(chosen))
    unthinned = max(count / mix[name] for name, count in zip(names, counts, strict=True))
    if unthinned <= MOST_REPEATS * len(source):
        assert set(chosen.tolist()) == set(range(len(source)))  # no block is dropped where repeating the rest suffices


def test_weighed_rows_stay_together_and_in_their_blocks():
    one = samples(["a", "b", "b", "b"])
    found = weigh_blocks(one, {"a": 0.5, "b": 0.5})
    assert found.source == ("a", "a", "a", "b", "b", "b")
    assert found.token_id.tolist() == [*range(4)] * 3 + [*range(4, 16)]
    assert (found.experts[:, 0] == 2 * found.token_id).all()
    assert (found.phase == found.token_id).all()
    assert found.block_start.tolist() == [0, 4, 8, 12, 16, 20, 24]
    assert one.source == ("a", "b", "b", "b")


def test_a_source_left_out_of_the_mix_has_no_blocks():
    assert weigh_blocks(samples(["a", "b", "c"]), {"b": 1.0}).source == ("b",)
    with pytest.raises(ImpossibleError, match="no sample block is from c"):
        weigh_blocks(samples(["a", "b"]), {"c": 1.0})


def test_a_mix_is_read_as_shares_and_a_typo_is_named():
    assert read_mix(["law=3", "code=1"], ["law", "code", "chat"]) == {"law": 0.75, "code": 0.25}
    assert read_mix(["a=b=2"], ["a=b"]) == {"a=b": 1.0}
    with pytest.raises(UsageError, match="'lwa'; the tables' sources are law, code"):
        read_mix(["lwa=1"], ["law", "code"])
    for wrong in ("law", "law=", "law=-1", "law=inf", "law=x", "law=0"):
        with pytest.raises(UsageError, match="NAME=WEIGHT"):
            read_mix([wrong], ["law"])


def test_one_source_or_none_known_leaves_nothing_to_weigh():
    assert check_sources(samples(["b", "a", "b"]), "tables") == ["a", "b"]
    with pytest.raises(ImpossibleError, match="one source, a"):
        check_sources(samples(["a", "a"]), "tables")
    with pytest.raises(ImpossibleError, match="smoe build-tables"):
        check_sources(Samples(np.zeros(1, np.uint32), np.zeros((1, 1), np.uint16), np.array([0, 1])), "tables")


def test_gains_are_told_by_source():
    gains = np.array([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]])
    assert gains_by_source(gains, ["a", "b", "a"]) == {"a": 3.0, "b": 3.0}


def test_weight_goes_to_the_source_that_gains_least():
    """Two sources that want opposite things: what one gains in proportion to its share."""
    tried = robust_mix(["a", "b"], lambda mix: {"a": 0.8 * mix["a"], "b": 0.2 * mix["b"]}, rounds=12)
    best = max(tried, key=lambda one: one.worst)
    assert best.worst > tried[0].worst
    assert best.mix["b"] > best.mix["a"]
    assert best.worst == pytest.approx(0.16, abs=0.04)  # at b = .8 both gain .16
    assert tried[0].mix == equal_mix(["a", "b"])


def test_sources_that_gain_alike_end_the_search():
    assert len(robust_mix(["a", "b"], lambda _mix: {"a": 0.1, "b": 0.1})) == 1
