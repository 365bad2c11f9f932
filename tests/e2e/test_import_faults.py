"""smoe import: faults that other importers had, and calls that cannot be meant, are refused with a reason."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import import_bench
from tests.engine_writers import (
    FORMATS,
    megatron_buffer,
    megatron_list,
    npz_counts,
    npz_trace,
    routing,
    sglang_per_token,
    sglang_reply,
    trtllm_raw,
    verl_batch,
    vllm_npy,
    vllm_reply,
)
from tests.import_bench import Trace, from_zero, spoilt, wanted, wanted_in_order, wanted_rows

bench, known, long = import_bench.bench, import_bench.known, import_bench.long


# Faults of other importers.


def test_a_row_of_minus_ones_alone_is_padding_and_a_partial_one_an_error_with_its_place(bench, known):
    model = bench.model(known)
    files = megatron_buffer(bench.folder, known)
    assert [experts for *_, experts in bench.trace("replay", files, "--model", model).rows()] == wanted_rows(known)
    rows = torch.load(files[0], weights_only=True)
    rows[17, 1, 0] = -1
    torch.save(rows, files[0])
    said = bench.refused("replay", files, "--model", model, out="partial")
    assert "-1" in said
    assert "17" in said


def test_the_last_sampled_token_gets_no_row_and_no_id_moves_by_one(bench, known):
    trace = bench.trace("vllm", vllm_reply(bench.folder, known), "--model", bench.model(known))
    assert trace.table.num_rows == len(known.tokens) - len(known.lengths)
    assert trace.sequences() == wanted(known, rows="last")


@pytest.mark.parametrize("rows", [slice(-3, None), slice(0, 2)], ids=["tail", "head"])
@pytest.mark.parametrize("write", [vllm_npy, vllm_reply, sglang_reply, verl_batch, npz_trace])
def test_zero_filled_rows_are_not_expert_zero(write, rows, bench, known):
    broken = known
    for index in range(*rows.indices(known.lengths[2])):
        broken = spoilt(broken, known.spans[2].start + index, 0)
    said = bench.refused("auto", write(bench.folder, broken), "--model", bench.model(known))
    assert "repeat" in said or "distinct" in said or "zero" in said


@pytest.mark.parametrize("ids", [[0, 0], [3, 5]], ids=["zeros", "one stale row"])
@pytest.mark.parametrize("write", [vllm_npy, vllm_reply, sglang_reply, verl_batch])
def test_a_sequence_whose_rows_are_all_equal_is_rejected(write, ids, bench, known):
    assert known.lengths[6] == 10
    stale = spoilt(known, known.spans[6], ids)
    bench.refused("auto", write(bench.folder, stale), "--model", bench.model(known))


def test_a_sequence_of_one_row_is_not_taken_for_a_stale_one(bench):
    known = routing(lengths=(7, 1, 9, 6, 1, 4))
    trace = bench.trace("npz", npz_trace(bench.folder, known))
    assert trace.sequences() == wanted(known)


@pytest.mark.parametrize("write", [sglang_reply, vllm_reply])
def test_a_reply_that_starts_after_a_cached_prefix_keeps_its_positions(write, bench, known):
    trace = bench.trace("auto", write(bench.folder, known, start=2), "--model", bench.model(known))
    assert trace.sequences(tokens=False) == wanted(known, rows="last", tokens=False, start=2)


def test_a_prefix_without_routes_takes_no_other_row_with_it(bench, known):
    gone = known.spans[2].start + np.arange(4)
    files = verl_batch(bench.folder, spoilt(known, gone, -1))
    trace = bench.trace("replay", files, "--model", bench.model(known))
    expected = wanted_in_order(known)
    expected[2] = expected[2][4:]
    assert from_zero(trace.sequences()) == from_zero(expected, tokens=False)


@pytest.mark.parametrize("write", [sglang_reply, vllm_reply])
def test_a_reply_with_more_rows_than_its_tokens_is_refused(write, bench, known):
    files = write(bench.folder, known)
    content = json.loads(files[0].read_text())
    if write is sglang_reply:
        content[3]["meta_info"]["completion_tokens"] = 1
        content[3]["output_ids"] = content[3]["output_ids"][:1]
    else:
        content["choices"][3]["token_ids"] = content["choices"][3]["token_ids"][:1]
    files[0].write_text(json.dumps(content))
    named = "replies.json, reply " + f"{3:032x}" if write is sglang_reply else "completion.json, reply cmpl-1, choice 3"
    assert f"{named} has 5 rows for 4 tokens" in bench.refused("auto", files, "--model", bench.model(known))


def test_a_hole_in_a_sequence_leaves_a_gap_in_its_positions(bench, known):
    hole = known.spans[2].start + np.array([3, 4])
    files = verl_batch(bench.folder, spoilt(known, hole, -1))
    trace = bench.trace("replay", files, "--model", bench.model(known))
    assert [0, 1, 2, 5, 6, 7, 8] in [[position for position, *_ in rows] for rows in trace.sequences()]


@pytest.mark.parametrize("write", [verl_batch, megatron_list])
def test_an_id_above_255_is_refused_and_does_not_wrap(write, bench):
    known = routing(experts=256)
    wide = replace(known.with_rows(0, 4, [256, 7]), num_experts=257)
    assert "256" in bench.refused("replay", write(bench.folder, wide), "--model", bench.model(known))


def test_unsigned_16_bit_ids_are_read(bench):
    known = routing(layers=3, experts=300)
    for write in (vllm_npy, vllm_reply, npz_trace):
        files = write(bench.folder, known)
        trace = bench.trace("auto", files, "--model", bench.model(known), out=write.__name__)
        rows = "all" if write is npz_trace else "last"
        assert trace.sequences(tokens=False) == wanted(known, rows=rows, tokens=False)


@pytest.mark.parametrize("order", [1, -1])
def test_requests_of_different_widths_are_not_cut_to_the_narrower(order, bench):
    known = routing(layers=3, experts=300)
    narrow = known.spans[3]
    known = spoilt(known, slice(narrow.start, narrow.stop, 2), [7, 255])
    known = spoilt(known, slice(narrow.start + 1, narrow.stop, 2), [255, 8])
    files = vllm_npy(bench.folder, known)
    np.save(files[3], np.load(files[3]).astype(np.uint8))
    assert {np.load(path).dtype.itemsize for path in files} == {1, 2}
    trace = bench.trace("vllm", files[::order], "--model", bench.model(known))
    assert trace.sequences() == wanted(known, rows="last", tokens=False)


def test_a_list_with_another_stages_routers_is_refused(bench, known):
    files = megatron_list(bench.folder, known)
    rows = torch.load(files[0], weights_only=True)
    torch.save([*rows, *rows[:2]], files[0])
    said = bench.refused("replay", files, "--model", bench.model(known))
    assert "5" in said
    assert "3" in said


def test_one_import_leaves_nothing_for_the_next_in_the_same_process(bench, known):
    other = routing(layers=3, seed=9)
    files = megatron_list(bench.folder, known)
    bench.trace("replay", files, "--model", bench.model(known), out="one")
    files = megatron_list(bench.folder, other)
    trace = bench.trace("replay", files, "--model", bench.model(other), out="two")
    assert trace.layers == [(1, 8, 2), (2, 8, 2)]
    assert [experts for *_, experts in trace.rows()] == wanted_rows(other)


# Rejected rows.

BAD_ROWS = {"an expert twice": [3, 3], "an id too high": [3, 8], "a partial row": [3, -1], "an id below -1": [3, -2]}


def wide_npz(folder, known):
    """As npz_trace, in a type that can hold any fault."""
    return npz_trace(folder, known, ids=known.experts.astype(np.int32))


@pytest.mark.parametrize("write", [wide_npz, verl_batch])
@pytest.mark.parametrize("reason", BAD_ROWS)
def test_rows_rejected_above_one_in_a_thousand_are_counted_and_stop_the_import(reason, write, bench, long):
    broken = long
    for row in (5, 400, 1000):
        broken = spoilt(broken, row, BAD_ROWS[reason])
    said = bench.refused("auto", write(bench.folder, broken), "--model", bench.model(long))
    assert "3 " in said
    assert "2,160" in said or "2160" in said


@pytest.mark.parametrize("write", [wide_npz, verl_batch])
@pytest.mark.parametrize("reason", BAD_ROWS)
def test_rows_rejected_below_one_in_a_thousand_are_reported_and_leave_the_rest_whole(reason, write, bench, long):
    broken = spoilt(long, 400, BAD_ROWS[reason], layers=[1])
    broken = spoilt(broken, 1000, BAD_ROWS[reason])
    done = bench.run("auto", write(bench.folder, broken), "--model", bench.model(long), "--json")
    assert list(done.json()["rejected"].values()) == [2]
    trace = Trace(bench.folder / "out" / "trace")
    expected = wanted_in_order(long)
    del expected[2][40]
    del expected[5][100]
    ids = write is wide_npz
    expected = [[(position, token if ids else None, experts) for position, token, experts in rows] for rows in expected]
    assert trace.sequences() == sorted(expected, key=repr)


def test_exactly_one_in_a_thousand_is_still_taken(bench):
    known = routing(layers=3, lengths=(100,) * 20)
    broken = spoilt(spoilt(known, 50, [3, 3]), 1500, [3, 3])
    assert bench.trace("npz", npz_trace(bench.folder, broken)).table.num_rows == 1998


def test_a_dump_without_fault_reports_nothing_rejected(bench, known):
    assert bench.run("npz", npz_trace(bench.folder, known), "--json").json()["rejected"] == {}


def test_padding_is_counted_apart_from_rejected_rows(bench, known):
    done = bench.run("replay", megatron_buffer(bench.folder, known, spare=9), "--model", bench.model(known), "--json")
    assert (done.json()["padding"], done.json()["rejected"]) == (9, {})


def test_a_forced_import_that_fails_leaves_the_trace_that_was_there(bench, known):
    bench.trace("npz", npz_trace(bench.folder, known))
    bench.refused("npz", npz_trace(bench.folder, spoilt(known, 3, [3, 3])), "--force")
    assert Trace(bench.folder / "out" / "trace").sequences() == wanted(known)


# Targets and usage.


def test_an_existing_trace_is_kept_without_force_and_replaced_with_it(bench, known):
    other = routing(seed=5)
    bench.trace("npz", npz_trace(bench.folder, known))
    files = npz_trace(bench.folder, other)
    said = bench.refused("npz", files, code=4)
    assert "trace" in said
    assert "--force" in said
    assert bench.trace("npz", files, "--force").sequences() == wanted(other)
    assert {path.name for path in (bench.folder / "out").iterdir()} == {"trace"}


def test_json_is_one_document_that_says_what_was_found(bench, known):
    document = bench.run("npz", npz_trace(bench.folder, known), "--json").json()
    assert document["level"] == "token"
    assert sum(document["rows"].values()) == len(known.tokens)


@pytest.mark.parametrize("engine", ["auto", "sglang", "vllm", "trtllm", "replay", "exflow", "npz"])
def test_a_file_that_does_not_exist_is_named(engine, bench, known):
    assert "nothing.npz" in bench.refused(engine, [bench.folder / "nothing.npz"], "--model", bench.model(known))


def test_a_file_given_twice_would_count_twice(bench, known):
    (path,) = npz_counts(bench.folder, known)
    assert "counts.npz is given twice" in bench.refused("npz", [path, path])


def test_of_several_files_the_one_at_fault_is_named(bench, known):
    files = vllm_npy(bench.folder, spoilt(known, known.spans[5].start, [3, 3]))
    assert "row 0 of /request-05.npy" in bench.refused("vllm", files, "--model", bench.model(known))


def test_an_engine_that_is_not_known_is_a_usage_error(bench, known):
    done = bench.run("lmdeploy", npz_trace(bench.folder, known), code=2)
    assert "lmdeploy" in done.err


def test_no_file_at_all_is_a_usage_error(bench):
    bench.run("auto", [], code=2)


@pytest.mark.parametrize(
    "name", [name for name, form in FORMATS.items() if form.model and form.engine in ("sglang", "vllm")]
)
def test_a_dump_that_does_not_name_its_layers_asks_for_the_model(name, bench, known):
    form = FORMATS[name]
    assert "--model" in bench.refused(form.engine, form.write(bench.folder, known))


@pytest.mark.parametrize("write", [megatron_list, megatron_buffer, verl_batch])
def test_layers_numbered_without_a_model_are_said_to_be(write, bench, known):
    assert "--model" in bench.run("replay", write(bench.folder, known)).err


def test_statistics_that_name_their_layers_need_no_model(bench, known):
    trace = bench.trace("trtllm", trtllm_raw(bench.folder, known))
    assert trace.layers == [(layer, 8, 2) for layer in known.layer_ids]
    assert [experts for *_, experts in trace.rows()] == wanted_rows(known)


def test_another_formats_file_is_not_read_as_the_named_one(bench, known):
    model = bench.model(known)
    bench.refused("vllm", sglang_per_token(bench.folder, known), "--model", model)
    bench.refused("sglang", vllm_npy(bench.folder, known), "--model", model)
    bench.refused("trtllm", npz_trace(bench.folder, known), "--model", model)


def test_a_file_of_no_known_format_is_refused_with_the_formats_that_are(bench):
    path = bench.folder / "notes.txt"
    path.write_text("expert 3 was busy\n")
    said = bench.refused("auto", [path])
    assert "notes.txt" in said
    assert ".npz" in said
