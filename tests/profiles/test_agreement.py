"""Two traces of one text: what agrees, what is a near tie, and what is another text."""

from dataclasses import asdict, replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_profiles import trace_writer
from smoe_profiles.errors import InputError
from smoe_profiles.inspection.agreement import compare_traces, match_rows, near_ties
from smoe_profiles.trace import Rows, schema
from tests.profiles.conftest import publish_trace
from tests.profiles.planted_traces import LAYERS, plant, quiet, routed_rows

# Two traces of one text.


def weighed(rows, seed=0):
    generator = np.random.default_rng(seed)
    weights = [np.sort(generator.random(experts.shape).astype(np.float16), axis=1)[:, ::-1] for experts in rows.experts]
    return replace(rows, weights=[values.astype(np.float32) for values in weights])


def agree(one, other):
    matching = match_rows(one, other)
    return matching, compare_traces(one, other, matching, quiet)


def test_a_trace_agrees_with_itself(tmp_path):
    trace = publish_trace(tmp_path / "trace", LAYERS, [weighed(routed_rows())])
    matching, layers = agree(trace, trace)
    assert (matching.alone, matching.other_alone) == (0, 0)
    for found in layers:
        assert (found.rows, found.equal, found.ties, found.differing, found.jaccard) == (600, 600, 0, 0, 1.0)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_agreement_equals_a_loop_whatever_the_order_of_rows(seed, tmp_path_factory):
    generator = np.random.default_rng(seed)
    one = weighed(routed_rows(seed, 80))
    other = routed_rows(seed, 80)
    changed = generator.random(80) < 0.4
    for index, layer in enumerate(LAYERS):
        other.experts[index][changed, -1] = [
            generator.choice(np.setdiff1d(np.arange(layer.num_experts), row[:-1]))
            for row in other.experts[index][changed]
        ]
    other = weighed(other, 1)
    order = generator.permutation(80)[:70]
    other = Rows(
        **{
            name: getattr(other, name)[order]
            for name in ("sequence", "position", "token_id", "phase", "source", "split")
        },
        experts=[experts[order] for experts in other.experts],
        weights=[weights[order] for weights in other.weights],
    )
    base = tmp_path_factory.mktemp("agree")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_writer, "ROW_GROUP", 16)
        traces = [publish_trace(base / name, LAYERS, [rows]) for name, rows in (("one", one), ("other", other))]
    matching, layers = agree(*traces)
    assert (matching.alone, matching.other_alone) == (10, 0)
    place = {key: i for i, key in enumerate(zip(other.sequence, other.position, strict=True))}
    for index, found in enumerate(layers):
        pairs = [
            (set(one.experts[index][i].tolist()), set(other.experts[index][place[key]].tolist()))
            for i, key in enumerate(zip(one.sequence, one.position, strict=True))
            if key in place
        ]
        assert found.rows == 70
        assert found.equal == sum(a == b for a, b in pairs)
        assert found.ties + found.differing == sum(a != b for a, b in pairs)
        assert found.jaccard == pytest.approx(np.mean([len(a & b) / len(a | b) for a, b in pairs]))
    back = agree(*traces[::-1])[1]
    assert [(f.equal, f.ties, f.differing) for f in back] == [(f.equal, f.ties, f.differing) for f in layers]


UNIT = float(np.spacing(np.float16(0.25)))


@pytest.mark.parametrize(
    ("one", "other", "tied"),
    [
        (([1, 2], [0.5, 0.25]), ([1, 3], [0.5, 0.25]), True),
        (([1, 2], [0.5, 0.25]), ([1, 3], [0.5, 0.25 + 2 * UNIT]), True),
        (([1, 2], [0.5, 0.25]), ([1, 3], [0.5, 0.25 + 3 * UNIT]), False),
        (([2, 1], [0.5, 0.25]), ([3, 1], [0.5, 0.25]), False),
        (([1, 2], [0.25, 0.25]), ([3, 4], [0.25, 0.25]), True),
        (([1, 2], [0.5, 0.25]), ([3, 4], [0.5, 0.25]), False),
        (([1, 2], [0.5, np.nan]), ([1, 3], [0.5, 0.25]), False),
    ],
    ids=["equal", "two units", "three units", "not at the K-th place", "all tied", "all but one", "no weight"],
)
def test_near_ties_are_told_from_differences(one, other, tied):
    arrays = [np.array([side]) for side in (one[0], np.float16(one[1]), other[0], np.float16(other[1]))]
    found, known = near_ties(*arrays)
    assert found.tolist() == [tied]
    assert known.tolist() == [not np.isnan(arrays[1]).any()]


def test_rows_that_differ_without_weights_are_counted_as_such(tmp_path):
    other = routed_rows()
    other.experts[0][:5] = [0, 1, 2]
    traces = [publish_trace(tmp_path / name, LAYERS, [rows]) for name, rows in (("a", routed_rows()), ("b", other))]
    found = agree(*traces)[1][0]
    assert found.unweighed == found.differing > 0
    assert found.ties == 0


def test_traces_of_two_texts_are_an_input_error(tmp_path):
    other = replace(routed_rows(1), token_id=np.full(600, 63, np.uint32))
    traces = [
        publish_trace(tmp_path / name, LAYERS, [rows])
        for name, rows in (("a", replace(routed_rows(), token_id=np.full(600, 62, np.uint32))), ("b", other))
    ]
    with pytest.raises(InputError, match="not of the same text"):
        match_rows(*traces)


def test_traces_of_two_sizes_are_an_input_error(tmp_path):
    one = publish_trace(tmp_path / "a", LAYERS, [routed_rows()])
    layers = [replace(LAYERS[0], num_experts=32), LAYERS[1]]
    other = publish_trace(tmp_path / "b", layers, [routed_rows()])
    with pytest.raises(InputError, match=r"16 experts.*32"):
        compare_traces(one, other, match_rows(one, other), quiet)


def test_schema_of_planted_rows_is_the_traces(tmp_path):
    """What the tests plant differs from a real trace in nothing but the sickness."""
    trace = plant(tmp_path / "trace", LAYERS, [routed_rows()])
    table = pq.read_table(tmp_path / "trace/part-00000.parquet")
    wanted = schema(LAYERS)
    assert {name: wanted.field(name).type for name in ("experts_01", "experts_04", "sequence")} == {
        name: table.schema.field(name).type for name in ("experts_01", "experts_04", "sequence")
    }
    assert trace.artefact.parameters["layers"] == [asdict(layer) for layer in LAYERS]
