"""One small file of every engine, written by hand, and what becomes of it."""

import base64
import io
import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from smoe_profiles.choices import ImportFormat, Level, SplitMode
from smoe_profiles.errors import InputError
from smoe_profiles.importers.detect import recognise
from smoe_profiles.importers.records import Fault
from smoe_profiles.importers.store import Wanted
from smoe_profiles.trace import UNKNOWN_TOKEN
from tests.profiles.importers.helpers import DEEPSEEK, MIXTRAL, columns, distinct_rows, entries, options, read, store

HELD = Wanted(split=SplitMode.HELDOUT)
SHIFT = np.roll(np.arange(8), 3)
"""A slot map: slot p holds expert SHIFT[p]."""


def routing(rows, layers=3, experts=8, top_k=2, seed=0):
    """[row, layer, slot]."""
    return distinct_rows(np.random.default_rng(seed), (rows, layers, top_k), experts).astype(np.int32)


def sets(rows):
    return np.sort(rows, axis=-1).tolist()


# SGLang's recorder


def step_counts():
    counts = np.zeros((5, 4, 64), np.int32)  # steps 3 and 4 of the circular buffer were never used
    counts[:3, 1:] = np.random.default_rng(0).integers(0, 9, (3, 3, 64))
    return counts


def test_unused_steps_of_sglangs_circular_buffer_add_nothing(tmp_path):
    counts = step_counts()
    torch.save({"rank": 0, "logical_count": torch.from_numpy(counts), "average": None}, tmp_path / "stat.pt")
    found = store(tmp_path, [tmp_path / "stat.pt"], options(DEEPSEEK))
    assert found.trace.level is Level.COUNT
    assert [layer.id for layer in found.trace.layers] == [1, 2, 3]
    total = counts.sum(axis=0)
    for index in range(3):
        wanted = {expert: count for expert, count in enumerate(total[index + 1].tolist()) if count}
        assert entries(found.trace, index) == wanted


def test_a_layer_without_any_count_was_not_recorded(tmp_path):
    counts = step_counts()
    counts[:, 2] = 0
    torch.save({"rank": 0, "logical_count": torch.from_numpy(counts)}, tmp_path / "stat.pt")
    with pytest.raises(InputError, match="has experts in layer 2, but all their counts are zero"):
        store(tmp_path, [tmp_path / "stat.pt"], options(DEEPSEEK))


def test_slot_counts_of_every_pass_and_rank_are_mapped_to_experts(tmp_path):
    counts = np.random.default_rng(0).integers(0, 9, (2, 2, 3, 10)).astype(np.int32)  # rank, pass, layer, slot
    slots = np.tile([*SHIFT, 0, 1], (3, 1))
    for rank in range(2):
        records = [
            {
                "forward_pass_id": number,
                "rank": rank,
                "gatherer_key": "primary",
                "global_physical_count": torch.from_numpy(counts[rank, number]),
            }
            for number in range(2)
        ]
        dump = {"records": records, "last_physical_to_logical_map": torch.from_numpy(slots)}
        torch.save(dump, tmp_path / f"pass_{rank}.pt")
    found = store(tmp_path, [tmp_path / "pass_0.pt", tmp_path / "pass_1.pt"], options(MIXTRAL))
    wanted = np.zeros((3, 8), int)
    for layer in range(3):
        for slot in range(10):
            wanted[layer, slots[layer, slot]] += counts[:, :, layer, slot].sum()
    for layer in range(3):
        assert entries(found.trace, layer) == dict(enumerate(wanted[layer].tolist()))
    assert found.records.facts.id_space == "physical"


def test_a_dense_layer_may_have_any_slots_in_the_map(tmp_path):
    counts = np.random.default_rng(0).integers(1, 9, (4, 64)).astype(np.int32)
    counts[0] = 0
    slots = np.tile(np.arange(64), (4, 1))
    slots[0] = 2**40
    record = {"forward_pass_id": 1, "rank": 0, "global_physical_count": torch.from_numpy(counts)}
    content = {"records": [record], "last_physical_to_logical_map": torch.from_numpy(slots)}
    torch.save(content, tmp_path / "pass.pt")
    found = store(tmp_path, [tmp_path / "pass.pt"], options(DEEPSEEK))
    assert [layer.id for layer in found.trace.layers] == [1, 2, 3]
    assert entries(found.trace, 2) == dict(enumerate(counts[3].tolist()))


def pass_record(number, tokens, rank=0, mode=1, padding=0, lens=None, start=0, layers=3):
    """A per_token record of Mixtral's shape: two of eight slots used, ids are slots."""
    slots = np.full((layers, tokens + padding, 8), -1, np.int32)
    slots[:, :tokens, :2] = np.moveaxis(routing(tokens, layers, seed=number * 10 + rank), 0, 1)
    return {
        "forward_pass_id": number,
        "rank": rank,
        "gatherer_key": "primary",
        "input_ids": [100 * number + token for token in range(tokens)],
        "positions": list(range(start, start + tokens)),
        "extend_seq_lens": lens,
        "forward_mode": mode,
        "topk_ids_of_layer": torch.from_numpy(slots),
        "misc_objects": [],
    }


def save_records(path, records, layers=3):
    slots = torch.from_numpy(np.tile(SHIFT, (layers, 1)))
    torch.save({"records": records, "last_physical_to_logical_map": slots}, path)
    return path


def logical(record):
    tokens = len(record["input_ids"])
    return SHIFT[record["topk_ids_of_layer"].numpy()[:, :tokens, :2]]


def test_rows_of_sglangs_passes_become_experts_with_their_tokens_phases_and_borders(tmp_path):
    records = [pass_record(1, 5, lens=[2, 3], padding=3), pass_record(2, 4, mode=2, start=40)]
    found = store(tmp_path, [save_records(tmp_path / "token.pt", records)], options(MIXTRAL), HELD)
    rows = columns(found.trace, "token_id", "phase", "experts_00", "experts_02")
    assert rows.sequence.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert rows.position.tolist() == [0, 1, 2, 3, 4, 40, 41, 42, 43]
    assert rows.token_id.tolist() == [*range(100, 105), *range(200, 204)]
    assert rows.phase.tolist() == ["prefill"] * 5 + ["decode"] * 4
    wanted = np.concatenate([logical(record) for record in records], axis=1)
    assert rows.experts_00.tolist() == sets(wanted[0])
    assert rows.experts_02.tolist() == sets(wanted[2])


@pytest.mark.parametrize(
    ("record", "lengths"),
    [
        ({"forward_mode": 2, "positions": [8, 9, 9, 4, 5, 5]}, [2, 1, 2, 1]),
        ({"forward_mode": 1, "positions": [0, 1, 5, 6, 0, 1]}, [2, 2, 2]),
        ({"forward_mode": 1, "positions": [0, 1, 2, 3, 4, 5], "extend_seq_lens": [2, 0, 4]}, [2, 0, 4]),
        ({"forward_mode": 3, "positions": [0, 1, 2, 9, 9, 4, 88], "extend_seq_lens": [3, 1, 1, 1]}, [3, 1, 1, 1]),
    ],
    ids=["decode", "no lengths", "lengths", "mixed, padded positions"],
)
def test_no_position_stands_twice_in_a_sequence_of_a_pass(record, lengths, tmp_path):
    found = read([save_records(tmp_path / "token.pt", [pass_record(1, 6) | record])], chosen_options=options(MIXTRAL))
    assert found.seq_len.tolist() == lengths
    assert found.position.tolist() == record["positions"][:6]


def test_zero_rows_that_rocm_pads_with_are_no_tokens(tmp_path):
    record = pass_record(1, 6, padding=4)
    record["topk_ids_of_layer"][:, 6:, :2] = 0
    found = read([save_records(tmp_path / "token.pt", [record])], chosen_options=options(MIXTRAL))
    assert found.ids[0].shape == (6, 2)


def test_a_pass_whose_rows_were_scattered_over_ranks_is_rejected_and_counted(tmp_path):
    whole, scattered = pass_record(1, 400), pass_record(2, 400)
    scattered["topk_ids_of_layer"][:, 200:] = -1
    found = read([save_records(tmp_path / "token.pt", [whole, scattered])], chosen_options=options(MIXTRAL))
    assert found.rejected[Fault.UNMATCHED].rows == 400
    with pytest.raises(InputError, match=r"400 of 800 rows are rejected.*rows and tokens differ: 400"):
        store(tmp_path, [tmp_path / "token.pt"], options(MIXTRAL))


def test_ranks_are_merged_by_forward_pass_and_a_record_given_twice_is_an_error(tmp_path):
    ranks = [[pass_record(2, 3, rank), pass_record(1, 3, rank)] for rank in range(2)]
    paths = [save_records(tmp_path / f"token_{rank}.pt", records) for rank, records in enumerate(ranks)]
    found = read(paths, chosen_options=options(MIXTRAL))
    assert found.token_id.tolist() == [100, 101, 102, 100, 101, 102, 200, 201, 202, 200, 201, 202]
    assert found.source.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]
    with pytest.raises(InputError, match=r"forward pass 2 of rank 0 stands in .*token_0\.pt"):
        read([paths[0], save_records(tmp_path / "again.pt", ranks[0])], chosen_options=options(MIXTRAL))


def test_ranks_that_all_saw_the_same_tokens_count_once(tmp_path):
    paths = [save_records(tmp_path / f"{rank}.pt", [pass_record(1, 5) | {"rank": rank}]) for rank in range(2)]
    found = read(paths, chosen_options=options(MIXTRAL))
    assert len(found.token_id) == 5
    assert "ranks [1] recorded the same tokens" in found.facts.notes[1]


def test_an_extra_slot_of_fused_shared_experts_is_refused(tmp_path):
    record = pass_record(1, 5)
    record["topk_ids_of_layer"][:, :, 2] = 7
    with pytest.raises(InputError, match="forward pass 1 uses 3 slots a token, but tiny-mixtral has 2"):
        read([save_records(tmp_path / "token.pt", [record])], chosen_options=options(MIXTRAL))


def test_dense_layers_of_the_recorder_stay_blank_through_the_slot_map(tmp_path):
    record = pass_record(1, 30, layers=4)
    slots = np.full((4, 30, 8), -1, np.int32)
    slots[:, :, :6] = np.moveaxis(routing(30, 4, 64, 6), 0, 1)
    slots[0] = 0
    record["topk_ids_of_layer"] = torch.from_numpy(slots)
    content = {
        "records": [record],
        "last_physical_to_logical_map": torch.from_numpy(np.tile(np.arange(64)[::-1].copy(), (4, 1))),
    }
    torch.save(content, tmp_path / "token.pt")
    found = store(tmp_path, [tmp_path / "token.pt"], options(DEEPSEEK), HELD)
    assert [layer.id for layer in found.trace.layers] == [1, 2, 3]
    assert columns(found.trace, "experts_03").experts_03.tolist() == sets(63 - slots[3, :, :6])
    with pytest.raises(InputError, match="not which of them have experts; give --model"):
        read([tmp_path / "token.pt"])


# replies


def base64_npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def test_rows_of_a_reply_belong_to_its_tokens_from_the_start_and_the_last_has_none(tmp_path):
    tokens = list(range(50, 60))
    routed = routing(9)
    reply = {
        "prompt_token_ids": tokens[:6],
        "choices": [{"routed_experts": base64_npy(routed), "token_ids": tokens[6:]}],
    }
    (tmp_path / "reply.json").write_text(json.dumps(reply))
    assert recognise(tmp_path / "reply.json") is ImportFormat.VLLM
    found = store(tmp_path, [tmp_path / "reply.json"], options(MIXTRAL), HELD)
    rows = columns(found.trace, "token_id", "phase", "experts_01")
    assert rows.token_id.tolist() == tokens[:-1]
    assert rows.phase.tolist() == ["prefill"] * 6 + ["decode"] * 3
    assert rows.experts_01.tolist() == sets(routed[:, 1])


def replied(path, rows, **facts):
    """A reply of so many rows."""
    path.write_text(json.dumps({"routed_experts": base64_npy(routing(rows).astype(np.uint8))} | facts))
    return path


@pytest.mark.parametrize(
    ("rows", "facts", "message"),
    [
        (10, {}, "10 rows for 10 tokens; at most 9 were expected"),
        (8, {"start": 0}, "8 rows for 10 tokens; 9 from position 0 were expected"),
        (9, {"start": 1}, "9 rows for 10 tokens; 8 from position 1 were expected"),
        (2, {}, "2 rows for 4 sampled tokens"),
        (9, {"completion_tokens": 5}, "completion_tokens = 5, but 4 token ids"),
        (9, {"start": "0"}, "= '0'; a whole number was expected"),
        (9, {"start": 2**32}, "= 4294967296; a whole number was expected"),
    ],
)
def test_rows_that_no_tokens_could_give_are_an_error_and_never_a_shift(rows, facts, message, tmp_path):
    path = replied(tmp_path / "reply.json", rows, input_ids=list(range(6)), output_ids=[1, 2, 3, 4], **facts)
    with pytest.raises(InputError, match=rf"reply\.json, reply 0 has .*{message}"):
        read([path])


@pytest.mark.parametrize("said", [{}, {"routed_experts_start_len": 16}])
def test_a_reply_after_a_prefix_cache_hit_starts_where_it_says_or_its_rows_end(said, tmp_path):
    path = replied(tmp_path / "reply.json", 15, prompt_token_ids=list(range(30)), token_ids=[7, 8], **said)
    found = store(tmp_path, [path], options(MIXTRAL), HELD)
    rows = columns(found.trace, "token_id", "phase")
    assert rows.position.tolist() == list(range(16, 31))
    assert rows.token_id.tolist() == [*range(16, 30), 7]
    assert rows.phase.tolist() == ["prefill"] * 14 + ["decode"]
    assert found.records.facts.notes == ("1 of 1 sequences have no rows for their first tokens, and start behind them",)


@pytest.mark.parametrize(
    ("facts", "first", "token_id"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 3}, 2, [-1] * 9),
        ({"output_ids": [5, 6, 7]}, None, [*[-1] * 7, 5, 6]),
        ({"start": 4, "output_ids": [5, 6, 7]}, 4, [*[-1] * 7, 5, 6]),
        ({"start": 4, "input_ids": [*range(12)]}, 4, [*range(4, 12), -1]),
        ({"input_ids": [*range(12)]}, None, [-1] * 9),
        ({}, None, [-1] * 9),
    ],
)
def test_tokens_are_placed_by_what_is_known_and_positions_not_known_are_said(facts, first, token_id, tmp_path):
    found = read([replied(tmp_path / "reply.json", 9, **facts)])
    assert found.position.tolist() == list(range(first or 0, (first or 0) + 9))
    assert found.token_id.tolist() == [UNKNOWN_TOKEN if token == -1 else token for token in token_id]
    assert (first is None) == any("their positions are not known" in note for note in found.facts.notes)


def test_the_lengths_of_an_answer_with_one_choice_place_its_rows_and_of_several_do_not(tmp_path):
    answer = {"usage": {"prompt_tokens": 6, "completion_tokens": 4}}
    choices = [{"routed_experts": base64_npy(routing(7))}] * 2
    (tmp_path / "one.json").write_text(json.dumps(answer | {"choices": choices[:1]}))
    (tmp_path / "two.json").write_text(json.dumps(answer | {"choices": choices}))
    assert read([tmp_path / "one.json"]).position.tolist() == list(range(2, 9))
    assert read([tmp_path / "two.json"]).position.tolist() == [*range(7)] * 2


def test_the_reply_and_the_choice_at_fault_are_named(tmp_path):
    sound, short = ({"index": index, "routed_experts": base64_npy(routing(9)[:, : 3 - index])} for index in range(2))
    (tmp_path / "reply.json").write_text(json.dumps({"id": "cmpl-7", "choices": [sound, short]}))
    with pytest.raises(InputError, match=r"reply\.json, reply cmpl-7, choice 1 has 2 layers .*; .*choice 0 has 3"):
        read([tmp_path / "reply.json"])


def test_raw_int32_of_sglang_needs_the_model_for_its_shape(tmp_path):
    routed = routing(11)
    replies = [{"output_ids": [1, 2, 3], "meta_info": {"routed_experts": base64.b64encode(routed.tobytes()).decode()}}]
    (tmp_path / "replies.jsonl").write_text("\n".join(json.dumps(reply) for reply in replies * 3))
    assert recognise(tmp_path / "replies.jsonl") is ImportFormat.SGLANG
    found = store(tmp_path, [tmp_path / "replies.jsonl"], options(MIXTRAL), HELD)
    rows = columns(found.trace, "token_id", "phase", "experts_00")
    assert rows.token_id[:11].tolist() == [UNKNOWN_TOKEN] * 9 + [1, 2]  # output ids are placed from the end
    assert rows.phase[:11].tolist() == ["prefill"] * 9 + ["decode"] * 2
    assert rows.experts_00.tolist() == sets(routed[:, 0]) * 3
    with pytest.raises(InputError, match=r"reply 0: every decoder layer is listed.* give --model"):
        read([tmp_path / "replies.jsonl"])
    with pytest.raises(InputError, match="264 bytes of routing, which is no number of rows of 4 layers and 6 experts"):
        read([tmp_path / "replies.jsonl"], chosen_options=options(DEEPSEEK))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_an_array_of_vllm_is_one_sequence(dtype, tmp_path):
    routed = routing(12).astype(dtype)
    np.save(tmp_path / "one.npy", routed)
    np.save(tmp_path / "two.npy", routed[:5])
    found = store(tmp_path, [tmp_path / "one.npy", tmp_path / "two.npy"], options(MIXTRAL), HELD)
    rows = columns(found.trace, "experts_02", "source")
    assert "2 of 2 sequences do not say at which position they start" in found.records.facts.notes[0]
    assert rows.sequence.tolist() == [0] * 12 + [1] * 5
    assert rows.source.tolist() == ["one"] * 12 + ["two"] * 5
    assert rows.experts_02.tolist() == sets(np.concatenate([routed, routed[:5]])[:, 2])


# TensorRT-LLM


def trtllm_folder(path, ranks, suffix="rank{}.safetensors", experts=8, top_k=2):
    path.mkdir(exist_ok=True)
    (path / "meta_info.json").write_text(json.dumps({"num_experts": experts, "num_experts_per_token": top_k}))
    for rank, arrays in enumerate(ranks):
        save_file(arrays, path / suffix.format(rank))
    return path


def test_counts_of_tensorrt_llm_add_up_over_iterations_and_ranks(tmp_path):
    generator = np.random.default_rng(0)
    ranks = [{f"{step}_{layer}": generator.integers(0, 9, 8) for step in (4, 5) for layer in (3, 7)} for _ in range(2)]
    found = store(tmp_path, [trtllm_folder(tmp_path / "stats", ranks)])
    assert [layer.id for layer in found.trace.layers] == [3, 7]
    for index, layer in enumerate((3, 7)):
        wanted = sum(rank[f"{step}_{layer}"] for rank in ranks for step in (4, 5))
        assert entries(found.trace, index) == {expert: n for expert, n in enumerate(wanted.tolist()) if n}


def test_raw_ids_beside_counts_are_read_once_and_alone(tmp_path):
    folder = trtllm_folder(tmp_path / "stats", [{"0_3": np.ones(8, np.int64)}])
    raw = [{f"{step}_3": routing(6, 1, seed=step)[:, 0] for step in (0, 1)}]
    trtllm_folder(folder, raw, "rank{}_raw.safetensors")
    found = store(tmp_path, [folder], wanted=HELD)
    assert found.trace.level is Level.TOKEN
    rows = columns(found.trace, "token_id", "experts_03")
    assert rows.experts_03.tolist() == sets(np.concatenate([raw[0]["0_3"], raw[0]["1_3"]]))
    assert set(rows.token_id.tolist()) == {UNKNOWN_TOKEN}
    one = store(tmp_path / "counts", [folder / "rank0.safetensors"])
    assert entries(one.trace, 0) == dict.fromkeys(range(8), 1)
    assert not one.records.facts.notes


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_beside_those_given_are_said_not_to_be_read(rank, tmp_path):
    folder = trtllm_folder(tmp_path / "stats", [{"0_3": np.full(8, count)} for count in (1, 2, 3)])
    found = store(tmp_path, [folder / f"rank{rank}.safetensors"])
    assert entries(found.trace, 0) == dict.fromkeys(range(8), rank + 1)
    unread = ", ".join(f"rank{other}.safetensors" for other in range(3) if other != rank)
    assert found.records.facts.notes == (f"{unread} of {folder} are not read",)


def test_a_folder_and_a_file_in_it_are_one_thing_given_twice(tmp_path):
    folder = trtllm_folder(tmp_path / "stats", [{"0_3": np.ones(8, np.int64)}])
    with pytest.raises(InputError, match=r"rank0\.safetensors is given twice"):
        read([folder / "rank0.safetensors", folder])


def test_co_occurrence_is_level_pair(tmp_path):
    counts = np.random.default_rng(0).integers(1, 9, (8, 8))
    folder = trtllm_folder(tmp_path / "stats", [{"0_2": counts}], "cooccurrence_rank{}.safetensors")
    found = store(tmp_path, [folder])
    assert found.trace.level is Level.PAIR
    assert entries(found.trace, 0)[3, 5] == counts[3, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / "rank0.safetensors").unlink(), "no file of rank 0"),
        (lambda path: (path / "meta_info.json").unlink(), "meta_info.json cannot be read"),
        (lambda path: (path / "meta_info.json").write_text("{}"), "num_experts_per_token = None, None"),
        (lambda path: save_file({"0_3": np.ones(9, np.int64)}, path / "rank0.safetensors"), r"0_3 has shape \[9\]"),
        (lambda path: save_file({"weird": np.ones(8, np.int64)}, path / "rank0.safetensors"), "holds weird"),
        (lambda path: save_file({"0_3": np.ones(8, np.float32)}, path / "rank0.safetensors"), r"0_3 \(F32\)"),
        (lambda path: save_file({"0_4": np.ones(8, np.int64)}, path / "rank1.safetensors"), "layers .4.; other ranks"),
    ],
)
def test_an_incomplete_folder_of_statistics_is_refused(change, message, tmp_path):
    folder = trtllm_folder(tmp_path / "stats", [{"0_3": np.ones(8, np.int64)}] * 2)
    change(folder)
    with pytest.raises(InputError, match=message):
        read([folder])


# router replay and ExFlow


def test_a_list_of_megatrons_routers_is_one_layer_each(tmp_path):
    routed = routing(20)
    torch.save([torch.from_numpy(routed[:, layer]) for layer in range(3)], tmp_path / "replay.pt")
    assert recognise(tmp_path / "replay.pt") is ImportFormat.REPLAY
    found = store(tmp_path, [tmp_path / "replay.pt"], options(MIXTRAL), HELD)
    assert columns(found.trace, "experts_01").experts_01.tolist() == sets(routed[:, 1])


def test_routers_of_another_pipeline_stage_in_the_list_are_noticed(tmp_path):
    routed = torch.from_numpy(routing(20))
    torch.save([routed[:, 0], routed[:, 1], routed[:, 2], routed[:7, 0]], tmp_path / "mixed.pt")
    with pytest.raises(InputError, match="routers of 2 shapes"):
        read([tmp_path / "mixed.pt"])
    torch.save([routed[:, layer % 3] for layer in range(5)], tmp_path / "many.pt")
    with pytest.raises(InputError, match="5 layers, but tiny-mixtral has 3 MoE layers"):
        store(tmp_path, [tmp_path / "many.pt"], options(MIXTRAL))


def test_the_static_buffer_of_megatron_ends_in_padding(tmp_path):
    routed = routing(20)
    routed[12:] = -1
    torch.save(torch.from_numpy(routed), tmp_path / "buffer.pt")
    found = store(tmp_path, [tmp_path / "buffer.pt"], options(MIXTRAL), HELD)
    assert found.sound.padding == 8
    assert columns(found.trace, "experts_00").experts_00.tolist() == sets(routed[:12, 0])


@pytest.mark.parametrize("masked", [True, False])
def test_a_padded_batch_of_verl_counts_positions_from_its_first_token(masked, tmp_path):
    routed = routing(20).reshape(2, 10, 3, 2)
    mask = np.ones((2, 10), np.int64)
    mask[0, :3] = mask[1, 6:] = 0
    routed[mask == 0] = 0 if masked else -1
    content = {"routed_experts": torch.from_numpy(routed), "input_ids": torch.arange(20).reshape(2, 10)}
    content |= {"attention_mask": torch.from_numpy(mask)} if masked else {}
    torch.save(content, tmp_path / "batch.pt")
    found = store(tmp_path, [tmp_path / "batch.pt"], options(MIXTRAL), HELD)
    rows = columns(found.trace, "token_id", "experts_02")
    assert found.sound.padding == 7
    assert rows.position.tolist() == [*range(7), *range(6)]
    assert rows.token_id.tolist() == [*range(3, 10), *range(10, 16)]
    assert rows.experts_02.tolist() == sets(routed[mask == 1][:, 2])


def test_exflow_has_one_expert_a_layer(tmp_path):
    routed = np.random.default_rng(0).integers(0, 16, (40, 5))
    np.save(tmp_path / "trace.npy", routed)
    assert recognise(tmp_path / "trace.npy") is ImportFormat.EXFLOW
    found = store(tmp_path, [tmp_path / "trace.npy"], wanted=HELD)
    assert [layer.top_k for layer in found.trace.layers] == [1] * 5
    assert columns(found.trace, "experts_04").experts_04[:, 0].tolist() == routed[:, 4].tolist()
