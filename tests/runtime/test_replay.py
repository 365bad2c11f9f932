"""What a bench replays: batches, and the rows that must travel, counted by hand."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_cli.hardware import load_hardware
from smoe_cli.runtime.bench import compare, hardware_model
from smoe_cli.runtime.replay import Case, default_cases, make_batch, rank_needs, stage_rows
from smoe_cli.runtime.workload import Shape, Workload, load_workload
from tests.conftest import smoe

CPU = torch.device("cpu")


def workload(rows=40, ranks=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(rows)]).int()
    slots = {"contiguous": torch.arange(8).int(), "placed": torch.randperm(8, generator=generator).int()}
    scores = {}
    for name, held in slots.items():
        rank = torch.empty(8, dtype=torch.int64)
        rank[held.long()] = torch.arange(8) // (8 // ranks)
        counts = torch.stack([(rank[experts.long()] == g).sum(1) for g in range(ranks)], dim=1)
        scores[name, "oracle"] = (counts * 127).to(torch.uint8)
    own = torch.stack([torch.arange(rows // ranks) * ranks + g for g in range(ranks)]).int()
    return Workload(
        Shape(16, 8, 8, 2), ranks, experts, torch.rand(rows, 2), slots, scores, dict.fromkeys(slots, own), "made"
    )


def test_a_workload_read_back_is_the_one_that_was_saved(tmp_path):
    one = workload()
    one.save(tmp_path / "w.safetensors")
    other = load_workload(tmp_path / "w.safetensors")
    assert (one.shape, one.num_ranks, one.origin) == (other.shape, other.num_ranks, other.origin)
    assert torch.equal(one.experts, other.experts)
    for name in ("slots", "scores", "own_rows"):
        before, after = getattr(one, name), getattr(other, name)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_file_that_is_no_workload_is_named(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="is no workload"):
        load_workload(tmp_path / "x.safetensors")


def rows_by_hand(needs, occupied, ranks):
    """Row by row: who receives and who sends in a gather and in a dispatch; the busiest direction of all."""
    capacity = len(needs) // ranks
    into, out_of = [0] * ranks, [0] * ranks
    gathered_in, gathered_out = [0] * ranks, [0] * ranks
    for place, ranks_needed in enumerate(needs.tolist()):
        home = place // capacity
        for rank in range(ranks):
            if rank == home or not occupied[place]:
                continue
            gathered_out[home] += 1
            gathered_in[rank] += 1
            if ranks_needed[rank]:
                out_of[home] += 1
                into[rank] += 1
    return max(*into, *out_of), max(*gathered_in, *gathered_out)


@settings(max_examples=60, deadline=None)
@given(ranks=st.sampled_from([2, 3, 4]), capacity=st.integers(1, 5), bits=st.integers(0, 2**40))
def test_rows_are_those_through_the_busiest_direction_of_the_busiest_rank(ranks, capacity, bits):
    generator = torch.Generator().manual_seed(bits % 2**31)
    occupied = torch.rand(ranks * capacity, generator=generator) < 0.8
    needs = (torch.rand(ranks * capacity, ranks, generator=generator) < 0.5) & occupied[:, None]
    exchanged, gathered = rows_by_hand(needs, occupied, ranks)
    assert stage_rows("speculative", needs, occupied, ranks) == {
        "reduce-scatter": gathered,
        "dispatch": exchanged,
        "combine": exchanged,
        "all-gather": gathered,
    }
    assert stage_rows("dp-ep", needs, occupied, ranks) == {"dispatch": exchanged, "combine": exchanged}
    assert stage_rows("ar-ep", needs, occupied, ranks)["all-reduce"] == 2 * gathered


@pytest.mark.parametrize("tokens", [1, 3, 7, 40, 100])
@pytest.mark.parametrize("mode", ["sp-ep", "speculative", "dp-ep"])
def test_every_rank_sees_its_own_rows_of_one_batch(tokens, mode):
    made = workload()
    case = Case(mode, "placed", "oracle" if mode == "speculative" else None)
    batches = [make_batch(made, case, tokens, rank, CPU, torch.float32) for rank in range(2)]
    assert batches[0].rows == batches[1].rows
    assert torch.equal(batches[0].plan.token_of_place, batches[1].plan.token_of_place)
    if mode == "dp-ep":
        return
    slot = torch.empty(8, dtype=torch.int64)
    slot[made.slots["placed"].long()] = torch.arange(8)
    placed = torch.cat([batch.routed.experts for batch in batches])
    for token, place in enumerate(batches[0].plan.place_of_token.tolist()):
        assert placed[place].tolist() == slot[made.experts[token % 40].long()].tolist()


def test_needs_name_the_ranks_of_a_rows_experts():
    made = workload()
    row_of_place = torch.tensor([0, -1, 5, 7])
    needed = rank_needs(made, made.slots["contiguous"], row_of_place)
    for place, row in enumerate(row_of_place.tolist()):
        expected = set() if row < 0 else {expert // 4 for expert in made.experts[row].tolist()}
        assert set(needed[place].nonzero().flatten().tolist()) == expected


def test_a_shuffle_that_knows_the_routing_sends_fewer_rows():
    made = workload(rows=400)
    plain, known = (
        make_batch(made, case, 400, 0, CPU, torch.float32).rows["dispatch"]
        for case in (Case("sp-ep", "placed"), Case("speculative", "placed", "oracle"))
    )
    assert 0 < known < plain


def timed(mode, placement, total, rows, library=False):
    case = f"{mode} {placement}"
    where = {"tokens": 8, "mode": mode, "placement": placement, "library": library, "case": case}
    return where | {"total": total, "total_rows": rows}


def test_ratios_compare_a_shuffle_with_the_same_kernels_without_one():
    results = [timed("sp-ep", "contiguous", 3.0, 30), timed("sp-ep", "contiguous", 9.0, 30, library=True)]
    results += [timed("sp-ep", "placed", 2.0, 20), timed("speculative", "placed", 1.0, 15)]
    found = {one["against"]: one for one in compare(results)}
    assert found["sp-ep placed"]["time_ratio"] == 2.0
    assert found["sp-ep placed"]["row_ratio"] == pytest.approx(20 / 15)
    assert found["sp-ep contiguous"]["bound"] == pytest.approx(3.0 / (30 / 15))


def test_what_a_bench_measured_is_a_hardware_model(tmp_path):
    made = workload()
    stages = {"reduce-scatter": 1e-5, "dispatch": 2e-5, "combine": 2e-5, "all-gather": 1e-5}
    results = []
    for tokens in (8, 16):
        found = timed("sp-ep", "contiguous", 6e-5, 4) | {"tokens": tokens, "layer": 1e-4, "busiest_load": tokens}
        results.append(found | {"seconds": stages, "rows": dict.fromkeys(stages, tokens)})
        both = {"all-reduce": 3e-5, "all-reduce experts": 3e-5}
        found = timed("replicated", "contiguous", 6e-5, 4) | {"tokens": tokens, "layer": 1e-4, "busiest_load": tokens}
        results.append(found | {"seconds": both, "rows": dict.fromkeys(both, 2 * tokens)})
    model = hardware_model(made, results, {"ranks": 2, "device": "X", "date": "2026-11-30"})
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"workloads": {}, "hardware": model}))
    found = load_hardware(str(path))
    assert found.name == "2 x X, 2026-11-30"
    assert model["stages"]["dispatch"] == [[8 * 16 * 2, 2e-5], [16 * 16 * 2, 2e-5]]
    assert found.expert_flops == pytest.approx(16 * 6 * 16 * 8 / 4e-5)


def test_every_way_of_running_is_among_the_cases():
    names = {case.mode for case in default_cases(workload())}
    assert names == {"ar-ep", "sp-ep", "speculative", "dp-ep", "replicated"}


def test_bench_replays_a_placement_on_processes_of_the_cpu(mixtral_path, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    for each in (mixtral_path / "smoe-out").iterdir():
        (folder / each.name).symlink_to(each)
    found = smoe(
        *(
            "bench",
            "--cpu",
            "--tokens",
            "33",
            "--trace",
            mixtral_path / "other" / "trace",
            "--out",
            tmp_path / "kept.json",
        ),
        *("--json", "-C", folder),
        cwd=tmp_path,
    ).json()
    assert found == json.loads((tmp_path / "kept.json").read_text())
    (made,) = found["workloads"].values()
    by_case = {one["case"]: one for one in made["results"]}
    assert found["machine"]["ranks"] == 2
    assert by_case["speculative placed oracle"]["local_share"] > by_case["sp-ep placed"]["local_share"]
    assert all(one["total"] > 0 and one["total_rows"] > 0 for one in made["results"])


def test_bench_says_how_many_gpus_are_missing(mixtral_path, tmp_path):
    devices = torch.cuda.device_count()
    if devices >= 2:
        pytest.skip("needs a machine with fewer GPUs than the placement has ranks")
    said = smoe("bench", "-C", mixtral_path / "smoe-out", cwd=tmp_path, code=6).err
    assert f"has 2 ranks, this machine {devices} GPUs" in said
    assert "--cpu" in said
