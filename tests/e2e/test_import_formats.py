"""smoe import: what an engine's dump said is what the trace says, row by row.

Every dump is made from a routing that is known here, and the trace is read back with pyarrow and json alone.
"""

import json
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests import import_bench
from tests.engine_writers import (
    FORMATS,
    TRIPLE_LAYERS,
    exflow_trace,
    megatron_list,
    npz_trace,
    physical,
    routing,
    sglang_per_pass,
    sglang_per_token,
    sglang_record,
    sglang_reply,
    sglang_stat,
    slots,
    trtllm_counts,
    trtllm_folder,
    verl_batch,
    vllm_npy,
    vllm_reply,
)
from tests.import_bench import (
    PARTS,
    assert_counts,
    from_zero,
    listing,
    replace_sequences,
    wanted,
    wanted_in_order,
    wanted_rows,
)

bench, known = import_bench.bench, import_bench.known


# What the dump said.


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_back_the_routing_it_was_made_from(name, bench, known):
    form = FORMATS[name]
    trace = bench.trace("auto", form.write(bench.folder, known), *bench.options(form, known))
    assert trace.level == form.level
    if trace.level != "token":
        assert not list(trace.path.glob("part-*"))
        layers = TRIPLE_LAYERS if name in ("npz triples", "npz counts") else known.layer_ids
        assert trace.layers == [(layer, known.num_experts, known.top_k) for layer in layers]
        assert_counts(trace, known, layers)
        return
    assert trace.layers == [(layer, known.num_experts, known.top_k) for layer in known.layer_ids]
    assert [name for name in trace.table.column_names if name.startswith("experts_")] == [
        f"experts_{layer:02d}" for layer in known.layer_ids
    ]
    if form.borders:
        ids = form.tokens == "all"
        assert trace.sequences(tokens=ids) == wanted(known, rows=form.rows, tokens=ids)
    else:
        assert [experts for *_, experts in trace.rows()] == wanted_rows(known)
    if form.tokens == "none":
        assert set(trace.column("token_id")) == {None}
    assert sum(trace.manifest["parameters"]["rows"].values()) == trace.table.num_rows
    places = [row[:2] for row in trace.rows()]
    assert len(set(places)) == len(places)
    assert set(trace.column("split")) <= PARTS
    assert set(trace.column("phase")) <= {"prefill", "decode"}


@pytest.mark.parametrize("given", ["auto", "exflow"])
def test_an_exflow_trace_gives_one_expert_a_row_and_no_token_ids(given, bench):
    known = routing(top_k=1)
    trace = bench.trace(given, exflow_trace(bench.folder, known), "--model", bench.model(known))
    assert (trace.level, trace.layers) == ("token", [(1, 8, 1), (2, 8, 1), (3, 8, 1)])
    assert [experts for *_, experts in trace.rows()] == wanted_rows(known)
    assert set(trace.column("token_id")) == {None}


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_dump_gives_the_same_bytes_twice_with_its_format_named_or_told(name, bench, known):
    form = FORMATS[name]
    files, options = form.write(bench.folder, known), bench.options(form, known)
    one, other = (listing(bench.trace(given, files, *options, out=given).path) for given in ("auto", form.engine))
    assert one.keys() == other.keys() >= {"manifest.json", "run.json"}
    assert [name for name in one if name != "run.json" and one[name] != other[name]] == []


def test_a_short_name_stands_for_the_models_layers_without_any_file(bench):
    known = routing(layers=27, experts=64, top_k=6, vocab=102400)
    trace = bench.trace("vllm", vllm_npy(bench.folder, known), "--model", "deepseek-v2-lite")
    assert trace.layers == [(layer, 64, 6) for layer in range(1, 27)]
    assert trace.sequences() == wanted(known, rows="last", tokens=False)


# Layers and ids.


def test_a_dense_layer_in_the_middle_is_left_out_and_later_layers_keep_their_numbers(bench):
    known = routing(layers=5)
    config = {"model_type": "qwen2_moe", "num_experts": 8, "mlp_only_layers": [0, 2], "decoder_sparse_step": 1}
    model = bench.model(known, **config)
    zeroed = known.with_rows(1, slice(None), 0)
    trace = bench.trace("vllm", vllm_npy(bench.folder, zeroed), "--model", model)
    assert trace.layers == [(1, 8, 2), (3, 8, 2), (4, 8, 2)]
    kept = replace(known, experts=known.experts[[0, 2, 3]])
    assert trace.sequences() == wanted(kept, rows="last", tokens=False)


@pytest.mark.parametrize("filler", [-1, 0])
def test_dense_layers_of_a_recorder_are_dropped_whatever_they_hold(filler, bench, known):
    files = sglang_per_token(bench.folder, known, padding=0)
    content = torch.load(files[0], weights_only=True)
    for record in content["records"]:
        record["topk_ids_of_layer"][0] = filler
    torch.save(content, files[0])
    trace = bench.trace("sglang", files, "--model", bench.model(known))
    assert trace.sequences() == wanted(known)


@pytest.mark.parametrize(("experts", "bits"), [(255, 8), (256, 8), (257, 16), (512, 16)])
@pytest.mark.parametrize("write", [npz_trace, vllm_npy, verl_batch])
def test_the_highest_expert_id_survives_the_narrowest_type(write, experts, bits, bench):
    known = routing(layers=3, experts=experts)
    trace = bench.trace("auto", write(bench.folder, known), "--model", bench.model(known))
    rows = "last" if write is vllm_npy else "all"
    assert trace.sequences(tokens=False) == wanted(known, rows=rows, tokens=False)
    assert trace.experts(1).max() == experts - 1
    assert trace.table.schema.field("experts_01").type.value_type.bit_width == bits


def test_megatron_rows_carry_over_from_int32_and_int64_alike(bench, known):
    model = bench.model(known)
    files = megatron_list(bench.folder, known)
    one = bench.trace("replay", files, "--model", model, out="one")
    torch.save([rows.to(torch.int32) for rows in torch.load(files[0], weights_only=True)], files[0])
    other = bench.trace("replay", files, "--model", model, out="two")
    assert one.rows() == other.rows()


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_a_padded_batch_gives_its_real_rows_on_either_side_with_or_without_dense_layers(dense, left, bench, known):
    trace = bench.trace(
        "replay", verl_batch(bench.folder, known, left=left, dense=dense), "--model", bench.model(known)
    )
    assert from_zero(trace.sequences()) == wanted(known, tokens=False)


# SGLang's recorder.


def test_prefill_and_decode_passes_are_told_apart(bench, known):
    trace = bench.trace("sglang", sglang_per_token(bench.folder, known, decoded=2), "--model", bench.model(known))
    phases = trace.column("phase")
    found = Counter((phase, *row) for phase, (_, *row) in zip(phases, trace.rows(), strict=True))
    expected = Counter()
    for rows, span in zip(wanted_in_order(known), known.spans, strict=True):
        prompt = span.stop - span.start - 2
        expected.update(("prefill", *row) for row in rows[:prompt])
        expected.update(("decode", *row) for row in rows[prompt:])
    assert found == expected


def test_rows_of_a_prompt_stay_together_and_no_two_prompts_share_a_sequence(bench, known):
    trace = bench.trace("sglang", sglang_per_token(bench.folder, known, decoded=2), "--model", bench.model(known))
    prompts = {}
    for (sequence, *row), phase in zip(trace.rows(), trace.column("phase"), strict=True):
        if phase == "prefill":
            prompts.setdefault(sequence, []).append(tuple(row))
    expected = [rows[:-2] for rows in wanted_in_order(known)]
    assert sorted(prompts.values(), key=repr) == sorted(expected, key=repr)


def test_requests_at_the_same_position_of_a_decode_pass_do_not_share_a_sequence(bench, known):
    files = sglang_per_token(bench.folder, known, decoded=2)
    assert any(
        len(set(record["positions"])) < len(record["positions"])
        for record in torch.load(files[0], weights_only=True)["records"]
        if record["extend_seq_lens"] is None
    )
    places = [row[:2] for row in bench.trace("sglang", files, "--model", bench.model(known)).rows()]
    assert len(set(places)) == len(places) == len(known.tokens)


def test_two_prompts_that_meet_without_a_restart_are_parted_by_their_lengths(bench, known):
    """A chunk that starts at position 3 right after a prompt of three tokens looks like its continuation."""
    slot_map = slots(known)
    ids = physical(known, slot_map)
    short = replace(known, lengths=(3, len(known.tokens) - 3))
    record = sglang_record(short, ids, np.r_[0:3, 6:12], number=0, lengths=[3, 6])
    assert record["positions"] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    path = bench.folder / "expert_distribution_recorder_1_0.pt"
    torch.save({"records": [record], "last_physical_to_logical_map": torch.from_numpy(slot_map)}, path)
    trace = bench.trace("sglang", [path], "--model", bench.model(known), "--split", "heldout")
    rows = trace.rows()
    assert [position for _, position, *_ in rows] == record["positions"]
    assert rows[2][0] != rows[3][0]


def test_data_parallel_ranks_are_merged(bench, known):
    files = sglang_per_token(bench.folder, known, ranks=2)
    trace = bench.trace("sglang", files, "--model", bench.model(known))
    assert trace.sequences() == wanted(known)


def test_ranks_that_saw_the_same_rows_count_once(bench, known):
    files = sglang_per_token(bench.folder, known, copies=3)
    trace = bench.trace("sglang", files, "--model", bench.model(known))
    assert trace.sequences() == wanted(known)


def test_the_order_in_which_ranks_are_named_is_no_matter(bench, known):
    files = sglang_per_token(bench.folder, known, ranks=2)
    model = bench.model(known)
    one = bench.trace("sglang", files, "--model", model, out="one")
    other = bench.trace("sglang", files[::-1], "--model", model, out="two")
    assert one.sequences() == other.sequences()


def test_one_pass_of_one_rank_given_twice_is_an_error(bench, known):
    files = sglang_per_token(bench.folder, known)
    again = bench.folder / "expert_distribution_recorder_2_0.pt"
    shutil.copy(files[0], again)
    said = bench.refused("sglang", [*files, again], "--model", bench.model(known))
    assert "rank 0" in said
    assert "pass" in said


def test_counts_of_ranks_and_passes_add_up(bench, known):
    files = sglang_per_pass(bench.folder, known, ranks=2)
    assert_counts(bench.trace("sglang", files, "--model", bench.model(known)), known, known.layer_ids)


def test_unused_steps_of_a_circular_buffer_do_not_change_the_counts(bench, known):
    model = bench.model(known)
    for steps in (9, 40):
        files = sglang_stat(bench.folder, known, steps=steps)
        trace = bench.trace("sglang", files, "--model", model, out=f"steps-{steps}")
        assert_counts(trace, known, known.layer_ids)


def test_a_count_dump_whose_sum_no_tokens_could_give_is_said(bench, known):
    files = sglang_stat(bench.folder, known)
    content = torch.load(files[0], weights_only=True)
    content["logical_count"][0, 2, 0] += 1
    torch.save(content, files[0])
    assert "layer 2" in bench.run("sglang", files, "--model", bench.model(known)).err


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda record: record.update(input_ids=record["input_ids"] + [1, 2, 3]), "pass 1"),
        (lambda record: record["topk_ids_of_layer"][:, :, 2].fill_(1), "3"),
        (lambda record: record["topk_ids_of_layer"][1, 0, :2].fill_(12), "12"),
        (lambda record: record.pop("input_ids"), "input_ids"),
        (lambda record: record.pop("positions"), "positions"),
        (lambda record: record.update(extend_seq_lens=[1, 2]), "pass 1"),
        (lambda record: record.update(topk_ids_of_layer=record["topk_ids_of_layer"][:, :, 0]), "topk_ids_of_layer"),
        (lambda record: record.update(topk_ids_of_layer=record["topk_ids_of_layer"][:-1]), "3 layers"),
        (lambda record: record.update(topk_ids_of_layer=[1, 2]), "topk_ids_of_layer"),
        (lambda record: record["input_ids"].__setitem__(0, 50), "50"),
    ],
    ids=[
        "a rank's slice only",
        "a fused shared expert",
        "a slot that does not exist",
        "no token ids",
        "no positions",
        "lengths of another pass",
        "no layer axis",
        "a layer too few",
        "no tensor",
        "a token outside the vocabulary",
    ],
)
def test_a_recorder_pass_that_cannot_be_true_is_refused_and_named(spoil, named, bench, known):
    files = sglang_per_token(bench.folder, known, padding=0)
    content = torch.load(files[0], weights_only=True)
    spoil(content["records"][1])
    torch.save(content, files[0])
    assert named in bench.refused("sglang", files, "--model", bench.model(known))


def test_padding_that_rocm_writes_as_expert_zero_is_dropped(bench, known):
    files = sglang_per_token(bench.folder, known, padding=3)
    content = torch.load(files[0], weights_only=True)
    for record in content["records"]:
        record["topk_ids_of_layer"][1:, -3:, : known.top_k] = 0
    torch.save(content, files[0])
    trace = bench.trace("sglang", files, "--model", bench.model(known))
    assert trace.sequences() == wanted(known)


@pytest.mark.parametrize("write", [sglang_per_token, sglang_per_pass])
@pytest.mark.parametrize("fault", ["missing", "another shape", "an expert that does not exist", "an expert left out"])
def test_a_slot_map_that_does_not_fit_is_refused(fault, write, bench, known):
    files = write(bench.folder, known)
    content = torch.load(files[0], weights_only=True)
    name, named = "last_physical_to_logical_map", "map"
    if fault == "missing":
        del content[name]
        named = name
    elif fault == "another shape":
        content[name] = content[name][:2]
    elif fault == "an expert that does not exist":
        content[name][1, 0] = 8
        named = "9 experts"
    else:
        content[name][1][content[name][1] == 5] = 4
        named = "no slot of layer 1 to expert 5"
    torch.save(content, files[0])
    assert named in bench.refused("sglang", files, "--model", bench.model(known))


# Replies.


def test_one_reply_and_a_batch_of_replies_read_alike(bench, known):
    model = bench.model(known)
    batch = sglang_reply(bench.folder, known)
    each = [
        sglang_reply(bench.folder, replace_sequences(known, [number]), name=f"{number}.json")[0]
        for number in range(len(known.lengths))
    ]
    one = bench.trace("sglang", batch, "--model", model, out="one")
    other = bench.trace("sglang", each, "--model", model, out="two")
    assert one.sequences() == other.sequences() == wanted_some(one, known)


def wanted_some(trace, known):
    """As wanted, with exactly the token ids that the trace claims to know; those it claims must be right."""
    full = wanted(known, rows="last")
    claimed = trace.sequences()
    experts = {tuple(row[2] for row in rows): rows for rows in claimed}
    found = []
    for rows in full:
        mine = experts[tuple(row[2] for row in rows)]
        found.append(
            [(p, t if theirs[1] is not None else None, e) for (p, t, e), theirs in zip(rows, mine, strict=True)]
        )
    return sorted(found, key=repr)


def test_sampled_tokens_of_a_reply_get_their_own_ids(bench, known):
    trace = bench.trace("sglang", sglang_reply(bench.folder, known, prompt=3), "--model", bench.model(known))
    assert trace.sequences() == wanted_some(trace, known)
    late = [
        token
        for token, position in zip(trace.column("token_id"), trace.column("position"), strict=True)
        if position >= 3
    ]
    assert None not in late


@pytest.mark.parametrize("write", [sglang_reply, vllm_reply])
def test_rows_after_the_prompt_are_decoded_ones(write, bench, known):
    trace = bench.trace("auto", write(bench.folder, known, prompt=3), "--model", bench.model(known))
    for position, phase in zip(trace.column("position"), trace.column("phase"), strict=True):
        assert phase == ("prefill" if position < 3 else "decode")


def test_arrays_do_not_say_where_they_start_and_it_is_said(bench, known):
    files = vllm_npy(bench.folder, known, start=2)
    done = bench.run("vllm", files, "--model", bench.model(known))
    assert "8 of 8 sequences do not say at which position they start" in done.err


def test_several_requests_keep_the_order_in_which_they_were_given(bench, known):
    files = vllm_npy(bench.folder, known)
    trace = bench.trace("vllm", files, "--model", bench.model(known))
    ends = wanted_rows(known)
    in_order = [ends[row] for span in known.spans for row in range(span.start, span.stop - 1)]
    assert [experts for *_, experts in trace.rows()] == in_order
    assert len(set(trace.column("sequence"))) == len(known.lengths)


# TensorRT-LLM.


def test_a_raw_dump_beside_the_statistics_is_not_counted_twice(bench, known):
    files = trtllm_folder(bench.folder, known, ["counts", "raw"])
    trace = bench.trace("trtllm", files, "--model", bench.model(known))
    if trace.level == "count":
        assert_counts(trace, known, known.layer_ids)
    else:
        assert [experts for *_, experts in trace.rows()] == wanted_rows(known)


def test_raw_rows_of_all_ranks_are_kept(bench, known):
    files = trtllm_folder(bench.folder, known, ["raw"], ranks=2)
    trace = bench.trace("trtllm", files, "--model", bench.model(known))
    assert Counter(experts for *_, experts in trace.rows()) == Counter(wanted_rows(known))


def test_a_missing_rank_file_is_named(bench, known):
    (folder,) = trtllm_counts(bench.folder, known, ranks=3)
    (folder / "rank1.safetensors").unlink()
    assert "rank 1" in bench.refused("trtllm", [folder], "--model", bench.model(known))


def test_one_rank_of_several_is_read_and_the_others_are_said_to_be_left(bench, known):
    (folder,) = trtllm_counts(bench.folder, known, ranks=3)
    done = bench.run("trtllm", [folder / "rank0.safetensors"], "--model", bench.model(known))
    assert "rank1.safetensors, rank2.safetensors of" in done.err
    assert "are not read" in done.err


def test_a_gap_in_the_iterations_is_refused(bench, known):
    (folder,) = trtllm_counts(bench.folder, known, ranks=1)
    path = folder / "rank0.safetensors"
    save_file({key: value for key, value in load_file(path).items() if not key.startswith("10_")}, path)
    assert "gap" in bench.refused("trtllm", [folder], "--model", bench.model(known))


def test_slot_ids_of_a_balancer_are_refused_since_their_map_is_not_in_the_dump(bench, known):
    wide = replace(known, num_experts=12)
    files = trtllm_counts(bench.folder, wide)
    said = bench.refused("trtllm", files, "--model", bench.model(known))
    assert "12" in said
    assert "8" in said


@pytest.mark.parametrize("name", ["num_experts", "num_experts_per_token", "meta_info.json"])
def test_a_statistics_folder_that_lacks_something_says_what(name, bench, known):
    (folder,) = trtllm_counts(bench.folder, known)
    path = folder / "meta_info.json"
    content = {key: value for key, value in json.loads(path.read_text()).items() if key != name}
    path.write_text(json.dumps(content))
    if name == "meta_info.json":
        path.unlink()
    assert name in bench.refused("trtllm", [folder], "--model", bench.model(known))


@pytest.mark.parametrize("key", ["8", "8_x", "_1", "8_1_2"])
def test_a_statistics_key_that_names_no_layer_is_refused(key, bench, known):
    (folder,) = trtllm_counts(bench.folder, known, ranks=1)
    path = folder / "rank0.safetensors"
    save_file(load_file(path) | {key: np.zeros(8, np.int64)}, path)
    assert key in bench.refused("trtllm", [folder], "--model", bench.model(known))
