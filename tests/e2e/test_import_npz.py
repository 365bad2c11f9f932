"""smoe import of NumPy archives: members and axes, how rows are shared out, and what the trace is good for."""

import hashlib
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests import import_bench
from tests.engine_writers import (
    TRIPLE_LAYERS,
    UNKNOWN,
    npz_counts,
    npz_members,
    npz_trace,
    npz_triples,
    routing,
)
from tests.import_bench import PARTS, assert_counts, replace_sequences, wanted, wanted_rows

bench, known = import_bench.bench, import_bench.known


# Plain .npz files.


def test_weights_stay_with_their_experts(bench, known):
    trace = bench.trace("npz", npz_trace(bench.folder, known))
    for ordinal, layer in enumerate(known.layer_ids):
        for row, (ids, weights) in enumerate(
            zip(trace.column(f"experts_{layer:02d}"), trace.column(f"weights_{layer:02d}"), strict=True)
        ):
            expected = zip(known.experts[ordinal, row].tolist(), known.weights[ordinal, row].tolist(), strict=True)
            assert sorted(zip(ids, weights, strict=True)) == sorted(expected)


def test_rows_whose_weights_are_not_known_have_none(bench, known):
    files = npz_trace(bench.folder, known, weights=known.weights[:, :20])
    trace = bench.trace("npz", files)
    assert trace.sequences() == wanted(known)
    for layer in known.layer_ids:
        assert [weights is None for weights in trace.column(f"weights_{layer:02d}")] == [
            row >= 20 for row in range(len(known.tokens))
        ]


@pytest.mark.parametrize("weight", [1e30, np.inf, np.nan, -0.25])
def test_a_weight_that_half_precision_cannot_hold_or_no_gate_could_give_is_refused(weight, bench, known):
    weights = known.weights.astype(np.float64)
    weights[1, 7, 0] = weight
    said = bench.refused("npz", npz_trace(bench.folder, known, weights=weights))
    assert f"trace.npz has weights [{weight}, " in said


def test_a_trace_without_weights_has_the_column_and_no_value(bench, known):
    trace = bench.trace("npz", npz_trace(bench.folder, known, without=["weights"]))
    assert set(trace.column("weights_01")) == {None}


def test_unknown_token_ids_are_null_and_known_ones_stay(bench, known):
    tokens = known.tokens.astype(np.uint32)
    tokens[[3, 10, 11]] = UNKNOWN
    trace = bench.trace("npz", npz_trace(bench.folder, known, tokens=tokens))
    found = trace.column("token_id")
    assert found == [None if token == UNKNOWN else token for token in tokens.tolist()]


def test_a_trace_without_token_ids_keeps_its_sequences(bench, known):
    trace = bench.trace("npz", npz_trace(bench.folder, known, without=["tokens"]))
    assert trace.sequences() == wanted(known, tokens=False)


def test_the_highest_token_id_of_the_vocabulary_is_kept(bench, known):
    tokens = known.tokens.copy()
    tokens[7] = known.vocab_size - 1
    trace = bench.trace("npz", npz_trace(bench.folder, known, tokens=tokens.astype(np.uint32)))
    assert trace.column("token_id")[7] == known.vocab_size - 1


def test_a_trace_without_borders_keeps_every_row_in_order(bench, known):
    trace = bench.trace("npz", npz_trace(bench.folder, known, without=["seq_len"]))
    assert [(token, experts) for _, _, token, experts in trace.rows()] == list(
        zip(known.tokens.tolist(), wanted_rows(known), strict=True)
    )
    assert set(trace.column("split")) == PARTS


def test_members_of_other_names_and_axes_are_read_when_named(bench, known):
    path = bench.folder / "mine.npz"
    members = npz_members(known)
    np.savez(
        path,
        routes=members["ids"].transpose(1, 0, 2),
        gates=members["weights"].transpose(1, 0, 2),
        words=members["tokens"],
        which=members["layer_ids"],
        ends=members["seq_len"],
    )
    trace = bench.trace(
        "npz",
        [path],
        *("--ids", "routes", "--axes", "token,layer,slot", "--weights", "gates", "--tokens", "words"),
        *("--layer-ids", "which", "--seq-lens", "ends", "--model", bench.model(known)),
    )
    assert trace.sequences() == wanted(known)
    assert trace.layers == [(layer, 8, 2) for layer in known.layer_ids]
    assert None not in trace.column("weights_02")


def test_layers_that_are_not_neighbours_keep_their_numbers(bench, known):
    files = npz_trace(bench.folder, known, layer_ids=np.array([0, 8, 23], np.uint8))
    trace = bench.trace("npz", files)
    assert [layer for layer, *_ in trace.layers] == [0, 8, 23]
    assert {"experts_00", "experts_08", "experts_23"} <= set(trace.table.column_names)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seq_len": np.array([7, 5], np.int32)}, "12"),
        ({"seq_len": np.array([60, -5], np.int32)}, "-5"),
        ({"tokens": np.zeros(54, np.uint32)}, "54"),
        ({"tokens": np.full(55, 50, np.uint32)}, "50"),
        ({"weights": np.zeros((3, 55, 3), np.float16)}, "weights"),
        ({"weights": np.zeros((3, 56, 2), np.float16)}, "weights"),
        ({"layer_ids": np.array([1, 2], np.uint8)}, "3 layers"),
        ({"layer_ids": np.array([1, 1, 2], np.uint8)}, "[1, 1, 2]"),
        ({"top_k": np.int32(3)}, "top_k"),
        ({"num_experts": np.int32(0)}, "trace.npz"),
        ({"ids": np.zeros((3, 55), np.uint8)}, "trace.npz"),
        ({"ids": np.full((3, 55, 2), 0.5)}, "ids"),
        ({"ids": np.zeros((3, 0, 2), np.uint8), "tokens": np.zeros(0, np.uint32)}, "no rows"),
    ],
)
def test_members_that_contradict_each_other_are_refused_and_named(changes, named, bench, known):
    assert known.tokens.shape == (55,)
    assert named in bench.refused("npz", npz_trace(bench.folder, known, **changes))


def test_missing_ids_are_named(bench, known):
    assert "ids" in bench.refused("npz", npz_trace(bench.folder, known, without=["ids"]))


@pytest.mark.parametrize(("name", "said"), [("layer_ids", "numbered from 0"), ("num_experts", "8 from the largest id")])
def test_what_had_to_be_guessed_is_said(name, said, bench, known):
    assert said in bench.run("npz", npz_trace(bench.folder, known, without=[name])).err


def test_a_member_named_on_the_command_line_that_is_not_there_is_an_error(bench, known):
    said = bench.refused("npz", npz_trace(bench.folder, known), "--tokens", "words")
    assert "words" in said


def test_a_model_with_other_layers_than_the_file_is_refused(bench, known):
    other = routing(experts=16)
    said = bench.refused("npz", npz_trace(bench.folder, known), "--model", bench.model(other))
    assert "16" in said
    assert "8" in said


def test_triples_of_unequal_length_are_refused(bench, known):
    files = npz_triples(bench.folder, known)
    with np.load(files[0]) as loaded:
        members = dict(loaded)
    np.savez(files[0], **(members | {"cnt_L7": members["cnt_L7"][:-1]}))
    assert "L7" in bench.refused("npz", files)


def test_triples_are_the_counts_and_not_the_expert_counts_beside_them(bench, known):
    trace = bench.trace("npz", npz_triples(bench.folder, known))
    assert_counts(trace, known, TRIPLE_LAYERS)


def test_a_placement_is_not_taken_for_a_trace(bench):
    path = bench.folder / "placement.npz"
    ranks = np.tile(np.arange(8, dtype=np.uint8) // 2, (3, 1))
    np.savez(path, expert_to_rank=ranks, layer_ids=np.arange(1, 4, dtype=np.uint8), num_ranks=np.int32(4))
    for engine in ("auto", "npz"):
        assert "placement" in bench.refused(engine, [path])


# Split and order.


def place_by_hash(tokens):
    """A document's place in [0, 1), as docs/formats/trace.md has it."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens, "<u4").tobytes()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def parts_of_sequences(trace):
    found = {}
    for sequence, split in zip(trace.column("sequence"), trace.column("split"), strict=True):
        assert found.setdefault(sequence, split) == split, "a sequence lies in two parts"
    return list(found.values())


def test_a_document_goes_to_the_part_its_hash_says(bench):
    known = routing(lengths=(6,) * 40)
    trace = bench.trace("npz", npz_trace(bench.folder, known))
    places = [place_by_hash(known.tokens[span]) for span in known.spans]
    expected = ["fit" if place < 0.7 else "validation" if place < 0.8 else "heldout" for place in places]
    assert set(expected) == PARTS
    assert parts_of_sequences(trace) == expected


def test_everything_can_be_held_out(bench, known):
    trace = bench.trace("npz", npz_trace(bench.folder, known), "--split", "heldout")
    assert set(trace.column("split")) == {"heldout"}
    assert trace.manifest["parameters"]["rows"] == {"fit": 0, "validation": 0, "heldout": len(known.tokens)}


def test_split_fit_keeps_one_in_eight_as_validation_and_holds_nothing_out(bench):
    known = routing(lengths=(6,) * 16)
    trace = bench.trace("npz", npz_trace(bench.folder, known), "--split", "fit")
    assert Counter(parts_of_sequences(trace)) == {"fit": 14, "validation": 2}


def test_split_by_order_holds_out_every_other_sequence(bench):
    known = routing(lengths=(6,) * 32)
    trace = bench.trace("npz", npz_trace(bench.folder, known), "--split-by", "order")
    parts = parts_of_sequences(trace)
    assert set(parts[1::2]) == {"heldout"}
    assert Counter(parts[0::2]) == {"fit": 14, "validation": 2}


def test_split_by_order_without_borders_holds_out_the_second_half(bench):
    known = routing(lengths=(200,))
    trace = bench.trace("npz", npz_trace(bench.folder, known, without=["seq_len"]), "--split-by", "order")
    parts = trace.column("split")
    assert set(parts[:100]) == {"fit", "validation"}
    assert set(parts[100:]) == {"heldout"}


def test_no_order_keeps_the_sums_and_nothing_to_read_a_prompt_from(bench, known):
    trace = bench.trace("npz", npz_trace(bench.folder, known), "--no-order")
    assert trace.level == "token-count"
    assert not list(trace.path.glob("part-*"))
    assert_counts(trace, known, known.layer_ids)
    for path in trace.path.glob("*.parquet"):
        table = pq.read_table(path)
        assert set(table.column_names) == {"token_id", "expert", "count", "split"}
        keys = list(zip(*(table[name].to_pylist() for name in ("split", "token_id", "expert")), strict=True))
        assert len(keys) == len(set(keys))
        for part in PARTS:
            mine = [key for key in keys if key[0] == part]
            assert mine == sorted(mine)


def test_no_order_gives_the_same_counts_whatever_the_order_of_documents(bench):
    known = routing(lengths=(6,) * 40)
    turned = replace_sequences(known, list(range(40))[::-1])
    one = bench.trace("npz", npz_trace(bench.folder, known), "--no-order", out="one")
    other = bench.trace("npz", npz_trace(bench.folder, turned), "--no-order", out="two")
    for layer in known.layer_ids:
        name = f"counts_{layer:02d}.parquet"
        assert (one.path / name).read_bytes() == (other.path / name).read_bytes()


# What comes after.


def test_tables_count_what_was_imported(bench):
    known = routing(lengths=(40,) * 30)
    bench.trace("npz", npz_trace(bench.folder, known), "--split", "fit")
    bench.smoe("build-tables", "-C", bench.folder / "out", cwd=bench.folder)
    for ordinal, layer in enumerate(known.layer_ids):
        table = pq.read_table(bench.folder / "out" / "tables" / f"counts_{layer:02d}.parquet")
        found = Counter()
        for row in table.to_pylist():
            found[row["token_id"], row["expert"]] += row["count"]
        assert found == known.token_counts(ordinal)


def test_counts_alone_are_too_low_a_level_for_tables(bench, known):
    bench.trace("npz", npz_counts(bench.folder, known))
    done = bench.smoe("build-tables", "-C", bench.folder / "out", cwd=bench.folder, code=4)
    assert "level count" in done.err
