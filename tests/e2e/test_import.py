"""smoe import: what an engine's dump said is what the trace says, row by row; and what cannot be true is refused.

Every dump is made from a routing that is known here, and the trace is read back with pyarrow and json alone.
"""

import base64
import hashlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.engine_writers import (
    FORMATS,
    TRIPLE_LAYERS,
    UNKNOWN,
    encoded_npy,
    exflow_trace,
    megatron_buffer,
    megatron_list,
    model_folder,
    npz_counts,
    npz_members,
    npz_trace,
    npz_triples,
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
    trtllm_raw,
    verl_batch,
    vllm_npy,
    vllm_reply,
)

PARTS = {"fit", "validation", "heldout"}


# Reading a trace without smoe.


@dataclass(frozen=True)
class Trace:
    path: Path

    @property
    def manifest(self):
        return json.loads((self.path / "manifest.json").read_text())

    @property
    def level(self):
        return self.manifest["parameters"]["level"]

    @property
    def layers(self):
        return [(layer["id"], layer["num_experts"], layer["top_k"]) for layer in self.manifest["parameters"]["layers"]]

    @property
    def table(self):
        """All rows of level `token`, by sequence and position."""
        tables = [pq.read_table(path) for path in sorted(self.path.glob("part-*.parquet"))]
        assert len(tables) == 1
        return tables[0].sort_by([("sequence", "ascending"), ("position", "ascending")])

    def column(self, name):
        return self.table[name].to_pylist()

    def experts(self, layer):
        """[rows, K]"""
        return np.array(self.column(f"experts_{layer:02d}"))

    def rows(self, *, tokens=True):
        """One (sequence, position, token id, each layer's experts in order of id) a row."""
        ids = [column for column in self.table.column_names if column.startswith("experts_")]
        names = ["sequence", "position", "token_id", *ids]
        found = zip(*(self.column(name) for name in names), strict=True)
        return [
            (sequence, position, token if tokens else None, tuple(tuple(sorted(ids)) for ids in experts))
            for sequence, position, token, *experts in found
        ]

    def sequences(self, *, tokens=True):
        """Every sequence as its rows, without its number; in an order that does not depend on numbers."""
        found = {}
        for sequence, *row in self.rows(tokens=tokens):
            found.setdefault(sequence, []).append(tuple(row))
        return sorted(found.values(), key=repr)

    def counts(self, layer):
        """Key columns -> count over all parts, of a level below `token`."""
        table = pq.read_table(self.path / f"counts_{layer:02d}.parquet")
        keys = [name for name in table.column_names if name not in ("count", "split")]
        assert set(table["split"].to_pylist()) <= PARTS
        found = Counter()
        for *key, count in zip(*(table[name].to_pylist() for name in [*keys, "count"]), strict=True):
            found[tuple(key)] += count
        return keys, found


def wanted(known, *, rows="all", tokens=True, start=0):
    """The sequences of a known routing in the form of Trace.sequences."""
    found = []
    for span in known.spans:
        stop = span.stop - 1 if rows == "last" else span.stop
        found.append(
            [
                (
                    index - span.start,
                    int(known.tokens[index]) if tokens else None,
                    tuple(tuple(sorted(layer[index].tolist())) for layer in known.experts),
                )
                for index in range(span.start + start, stop)
            ]
        )
    return sorted(found, key=repr)


def wanted_rows(known):
    """Every row's experts in the order of the dump."""
    return [tuple(tuple(sorted(layer[row].tolist())) for layer in known.experts) for row in range(len(known.tokens))]


def assert_counts(trace, known, layers):
    for ordinal, layer in enumerate(layers):
        keys, found = trace.counts(layer)
        if trace.level == "count":
            assert keys == ["expert"]
            assert found == {(e,): n for e, n in enumerate(known.counts()[ordinal].tolist()) if n}
        elif trace.level == "token-count":
            assert keys == ["token_id", "expert"]
            assert found == known.token_counts(ordinal)
        else:
            assert keys == ["expert", "other"]
            together = known.pairs(ordinal)
            for one in range(known.num_experts):
                for other in range(one + 1, known.num_experts):
                    assert found[one, other] == found[other, one] == together[one, other]


# Running the command.


@dataclass(frozen=True)
class Bench:
    """A folder of its own for one test: dumps, a model's config, and the command."""

    folder: Path
    smoe: object

    def model(self, known, **changes):
        return model_folder(self.folder / "model", known, **changes)

    def run(self, engine, files, *options, out="out", code=0):
        return self.smoe(
            "import", *files, "--from", engine, *options, "-C", self.folder / out, cwd=self.folder, code=code
        )

    def code(self, engine, files, *options):
        """Whichever exit code it is."""
        try:
            self.run(engine, files, *options)
        except AssertionError as error:
            return int(str(error).split()[1])
        return 0

    def trace(self, engine, files, *options, out="out"):
        self.run(engine, files, *options, out=out)
        return Trace(self.folder / out / "trace")

    def refused(self, engine, files, *options, code=3, out="out"):
        """The command must fail with one sentence and leave nothing behind; returns the sentence."""
        before = listing(self.folder / out)
        done = self.run(engine, files, *options, out=out, code=code)
        assert not done.out
        assert "Traceback" not in done.err
        assert [line[:7] for line in done.err.splitlines()].count("error: ") == 1
        assert listing(self.folder / out) == before
        return done.err[done.err.index("error: ") :].replace(str(self.folder), "")  # its name may hold any number


def listing(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def bench(tmp_path, run_smoe):
    return Bench(tmp_path, run_smoe)


@pytest.fixture
def known():
    return routing()


@pytest.fixture
def long():
    """2,160 tokens, so that two rows are less than 0.1 % and three are more."""
    return routing(layers=3, lengths=(180,) * 12)


# What the dump said.


@pytest.mark.parametrize("given", ["auto", "named"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_back_the_routing_it_was_made_from(name, given, bench, known):
    form = FORMATS[name]
    options = ["--model", bench.model(known)] if form.model else []
    engine = "auto" if given == "auto" else form.engine
    trace = bench.trace(engine, form.write(bench.folder, known), *options)
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
def test_the_same_dump_gives_the_same_bytes_twice(name, bench, known):
    form = FORMATS[name]
    options = ["--model", bench.model(known)] if form.model else []
    files = form.write(bench.folder, known)
    one, other = (listing(bench.trace("auto", files, *options, out=out).path) for out in ("one", "two"))
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


def from_zero(sequences, *, tokens=True):
    """Sequences with their first position called 0: where one starts inside its padding is not looked at."""
    found = [[(p - rows[0][0], token if tokens else None, ids) for p, token, ids in rows] for rows in sequences]
    return sorted(found, key=repr)


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


def wanted_in_order(known):
    return [wanted(replace_sequences(known, [number]))[0] for number in range(len(known.lengths))]


def replace_sequences(known, chosen):
    """Only the chosen sequences, in that order."""
    rows = np.concatenate([np.arange(known.spans[number].start, known.spans[number].stop) for number in chosen])
    return replace(
        known,
        experts=known.experts[:, rows],
        weights=known.weights[:, rows],
        tokens=known.tokens[rows],
        lengths=tuple(known.lengths[number] for number in chosen),
    )


def test_rows_of_a_prompt_stay_together_and_no_two_prompts_share_a_sequence(bench, known):
    trace = bench.trace("sglang", sglang_per_token(bench.folder, known, decoded=2), "--model", bench.model(known))
    prompts = {}
    for (sequence, *row), phase in zip(trace.rows(), trace.column("phase"), strict=True):
        if phase == "prefill":
            prompts.setdefault(sequence, []).append(tuple(row))
    expected = [rows[:-2] for rows in wanted_in_order(known)]
    assert sorted(prompts.values(), key=repr) == sorted(expected, key=repr)


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


# Faults of other importers.


def spoilt(known, row, value, *, layers=None):
    """A copy of the routing with other ids in one row of every layer, or of the layers of those ordinals."""
    for layer in range(len(known.experts)) if layers is None else layers:
        known = known.with_rows(layer, row, value)
    return known


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
    assert "5" in bench.refused("auto", files, "--model", bench.model(known))


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


@pytest.mark.parametrize("weight", [1e30, np.inf])
def test_a_weight_that_half_precision_cannot_hold_is_refused(weight, bench, known):
    weights = known.weights.astype(np.float64)
    weights[1, 7, 0] = weight
    assert "weights" in bench.refused("npz", npz_trace(bench.folder, known, weights=weights))


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
    """A document's place in [0, 1), as design 3 has it."""
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


# Hostile and broken files.


def subprocess_smoe(*arguments):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SMOE_")}
    return subprocess.run(
        [sys.executable, "-m", "smoe_cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
    )


class Payload:
    """Unpickling this creates a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def pickled_files(folder, marker):
    """Every container of the formats that could carry a pickle, each with code inside."""
    hostile = Payload(marker)
    with (folder / "bare.pt").open("wb") as file:
        pickle.dump(hostile, file)
    torch.save({"records": [hostile], "last_physical_to_logical_map": torch.zeros(2, 2)}, folder / "records.pt")
    torch.save(hostile, folder / "saved.pt")
    torch.save({"records": hostile}, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    array = np.array([hostile], dtype=object)
    np.save(folder / "object.npy", array, allow_pickle=True)
    np.savez(folder / "object.npz", ids=array)
    np.savez(folder / "beside.npz", **{**npz_members(routing()), "tokens": array})
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    choice = {"index": 0, "routed_experts": base64.b64encode(buffer.getvalue()).decode()}
    (folder / "reply.json").write_text(json.dumps({"choices": [choice]}))
    (folder / "renamed.npz").write_bytes((folder / "bare.pt").read_bytes())
    (folder / "renamed.npy").write_bytes((folder / "bare.pt").read_bytes())
    (folder / "renamed.json").write_bytes((folder / "bare.pt").read_bytes())
    return sorted(path for path in folder.iterdir() if path.is_file())


def test_code_inside_a_file_never_runs(bench, known):
    folder = bench.folder / "hostile"
    folder.mkdir()
    marker = bench.folder / "it-ran"
    model = bench.model(known)
    for path in pickled_files(folder, marker):
        for engine in ("auto", {".pt": "replay", ".npz": "npz"}.get(path.suffix, "vllm")):
            assert path.name in bench.refused(engine, [path], "--model", model)
            assert not marker.exists(), path
    pickle.loads((folder / "bare.pt").read_bytes())
    assert marker.exists()


def test_code_inside_a_file_never_runs_in_a_process_of_its_own_either(bench, known):
    marker = bench.folder / "it-ran"
    path = bench.folder / "expert_distribution_recorder_1_0.pt"
    torch.save({"records": [Payload(marker)], "last_physical_to_logical_map": torch.zeros(2, 2)}, path)
    done = subprocess_smoe("import", path, "--model", bench.model(known), "-C", bench.folder / "out")
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert not done.stdout
    assert not marker.exists()
    assert not (bench.folder / "out" / "trace").exists()


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_cut_short_is_refused(name, bench, known):
    form = FORMATS[name]
    options = ["--model", bench.model(known)] if form.model else []
    files = form.write(bench.folder, known)
    path = files[0] if files[0].is_file() else sorted(files[0].glob("*.safetensors"))[0]
    whole = path.read_bytes()
    for kept in (0, 1, 7, len(whole) // 2, len(whole) - 20):
        path.write_bytes(whole[:kept])
        for engine in ("auto", form.engine):
            assert path.name in bench.refused(engine, files, *options)


@pytest.mark.parametrize("name", ["npz trace", "npz counts", "megatron list", "sglang stat"])
def test_a_flipped_byte_fails_with_a_sentence_or_changes_nothing(name, bench, known):
    """Zip members carry a checksum, so that no flipped byte can become another expert."""
    form = FORMATS[name]
    options = ["--model", bench.model(known), "--force"] if form.model else ["--force"]
    (path,) = form.write(bench.folder, known)
    whole = path.read_bytes()
    for place in np.linspace(40, len(whole) - 40, 12).astype(int):
        data = bytearray(whole)
        data[place] ^= 0x10
        path.write_bytes(data)
        code = bench.code(form.engine, [path], *options)
        assert code in (0, 3), place
        if code:
            continue
        trace = Trace(bench.folder / "out" / "trace")
        if form.level == "token":
            assert [experts for *_, experts in trace.rows()] == wanted_rows(known), place
        else:
            assert_counts(trace, known, [layer for layer, *_ in trace.layers])


def lying_npy(shape):
    """An .npy whose header promises far more than follows."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}"
    padded = header.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode() + b"\0" * 64


@pytest.mark.parametrize("shape", [(10**13, 4, 2), (10**6, 4, 2), (-1, 4, 2), (2**62, 2**62, 2)])
def test_a_header_that_promises_more_than_the_file_holds_is_refused(shape, bench, known):
    model = bench.model(known)
    data = lying_npy(shape)
    array = bench.folder / "lying.npy"
    array.write_bytes(data)
    archive = bench.folder / "lying.npz"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("ids.npy", data)
        for name, value in npz_members(known).items():
            if name != "ids":
                buffer = io.BytesIO()
                np.save(buffer, value)
                file.writestr(f"{name}.npy", buffer.getvalue())
    reply = bench.folder / "lying.json"
    reply.write_text(json.dumps({"choices": [{"index": 0, "routed_experts": base64.b64encode(data).decode()}]}))
    for engine, path in (("vllm", array), ("npz", archive), ("vllm", reply)):
        assert path.name in bench.refused(engine, [path], "--model", model)


JSON_TEXTS = {
    "no JSON": "{",
    "no UTF-8": b"\xff\xfe{}",
    "empty list": "[]",
    "empty object": "{}",
    "a number": "3",
    "null": "null",
    "too deep": "[" * 100_000,
    "no routes in a SGLang reply": json.dumps({"text": "", "meta_info": {"prompt_tokens": 3}}),
    "a SGLang reply with null": json.dumps({"meta_info": {"routed_experts": None}}),
    "a SGLang reply with a number": json.dumps({"meta_info": {"routed_experts": 5}}),
    "meta_info is a list": json.dumps({"meta_info": ["routed_experts"]}),
    "no base64": json.dumps({"meta_info": {"routed_experts": "@@@@"}}),
    "half a number": json.dumps({"meta_info": {"routed_experts": base64.b64encode(b"12345").decode()}}),
    "half a row": json.dumps({"meta_info": {"routed_experts": base64.b64encode(b"\0" * 12).decode()}}),
    "no routes in a vLLM reply": json.dumps({"choices": [{"index": 0, "text": ""}]}),
    "no choices": json.dumps({"choices": []}),
    "choices is a number": json.dumps({"choices": 7}),
    "no array inside": json.dumps({"choices": [{"routed_experts": base64.b64encode(b"hello").decode()}]}),
    "too few axes": json.dumps({"choices": [{"routed_experts": encoded_npy(np.zeros((3, 4), np.uint8))}]}),
    "other layers": json.dumps({"choices": [{"routed_experts": encoded_npy(np.zeros((3, 9, 2), np.uint8))}]}),
    "another K": json.dumps({"choices": [{"routed_experts": encoded_npy(np.zeros((3, 4, 5), np.uint8))}]}),
    "floats": json.dumps({"choices": [{"routed_experts": encoded_npy(np.zeros((3, 4, 2), np.float32))}]}),
    "nothing was routed": json.dumps({"choices": [{"routed_experts": encoded_npy(np.zeros((0, 4, 2), np.uint8))}]}),
}


@pytest.mark.parametrize("name", JSON_TEXTS)
def test_json_of_another_shape_is_refused(name, bench, known):
    named = "no rows" if name == "nothing was routed" else "reply.json"
    path = bench.folder / "reply.json"
    text = JSON_TEXTS[name]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for engine in ("auto", "sglang", "vllm"):
        assert named in bench.refused(engine, [path], "--model", bench.model(known))


PT_CONTENTS = {
    "nothing": {},
    "None": None,
    "a string": "records",
    "an empty list": [],
    "no records": {"last_physical_to_logical_map": torch.zeros(4, 8, dtype=torch.int64)},
    "records without content": {"records": [], "last_physical_to_logical_map": torch.zeros(4, 8, dtype=torch.int64)},
    "records of numbers": {"records": [1], "last_physical_to_logical_map": torch.zeros(4, 8, dtype=torch.int64)},
    "counts of one axis": {"rank": 0, "logical_count": torch.zeros(8, dtype=torch.int32)},
    "counts of other experts": {"rank": 0, "logical_count": torch.ones(3, 4, 16, dtype=torch.int32)},
    "negative counts": {"rank": 0, "logical_count": torch.full((3, 4, 8), -2, dtype=torch.int32)},
    "counts that are zero": {"rank": 0, "logical_count": torch.zeros(3, 4, 8, dtype=torch.int32)},
    "floats": torch.full((6, 3, 2), 0.5),
    "five axes": torch.zeros(2, 3, 4, 3, 2, dtype=torch.int64),
    "another K": torch.zeros(6, 3, 5, dtype=torch.int64),
    "routers of unequal length": [torch.tensor([[0, 1], [1, 2], [4, 7]])[:rows] for rows in (3, 2, 3)],
    "strings in the list": ["a", "b", "c"],
    "a sparse tensor": torch.eye(4).to_sparse(),
    "only padding": torch.full((6, 3, 2), -1, dtype=torch.int64),
}


@pytest.mark.parametrize("name", PT_CONTENTS)
def test_a_torch_file_of_another_shape_is_refused(name, bench, known):
    empty = name in ("an empty list", "counts that are zero", "only padding")
    path = bench.folder / "dump.pt"
    torch.save(PT_CONTENTS[name], path)
    for engine in ("auto", "sglang", "replay"):
        said = bench.refused(engine, [path], "--model", bench.model(known))
        assert "dump.pt" in said or (empty and "no rows" in said)


def test_exflow_ids_outside_the_layer_are_refused(bench):
    known = routing(top_k=1)
    files = exflow_trace(bench.folder, known.with_rows(1, [3], 8))
    assert "8" in bench.refused("exflow", files, "--model", bench.model(known))


def test_exflow_traces_are_for_models_that_choose_one_expert(bench, known):
    assert "trace.npy" in bench.refused("exflow", exflow_trace(bench.folder, known), "--model", bench.model(known))


def test_raw_rows_of_another_width_are_refused(bench, known):
    (folder,) = trtllm_raw(bench.folder, known)
    path = folder / "rank0_raw.safetensors"
    save_file({key: np.repeat(value, 2, axis=1) for key, value in load_file(path).items()}, path)
    assert path.name in bench.refused("trtllm", [folder], "--model", bench.model(known))


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
