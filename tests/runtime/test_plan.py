"""Plans on the device: the rule of smoe_solvers to the last place, in plain torch and as a Triton kernel."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_cli.runtime import plan as runtime_plan
from smoe_cli.runtime.plan import identity_plan, make_plan, plan_hash, plan_of_places
from smoe_solvers import assignment
from smoe_solvers.assignment import assign_rule, row_chunks

ROOT = Path(__file__).parents[2]


def scores_of(tokens, ranks, high=256, seed=0):
    return np.random.default_rng(seed).integers(0, high, (tokens, ranks)).astype(np.uint8)


def check(scores):
    """The plan of these scores, held against the assignment and counted by hand."""
    tokens, ranks = scores.shape
    capacity = -(-tokens // ranks)
    plan = make_plan(torch.from_numpy(scores), ranks)
    to_rank = assign_rule(scores, capacity)
    assert plan.rows_per_rank == capacity
    assert (plan.place_of_token.dtype, plan.token_of_place.dtype) == (torch.int32, torch.int32)
    places = plan.place_of_token.tolist()
    assert [place // capacity for place in places] == to_rank.tolist()
    expected = [-1] * (ranks * capacity)
    for token, place in enumerate(places):
        expected[place] = token
    assert plan.token_of_place.tolist() == expected
    return places, to_rank, capacity


def test_the_rule_has_the_same_constants_on_the_device():
    for name in ("COARSE_ROUNDS", "FINE_ROUNDS", "UNIT", "FIRST_STEP", "LAST_STEP", "COSTS", "LEVELS"):
        assert getattr(runtime_plan, name) == getattr(assignment, name), name


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 8), tokens=st.integers(0, 90), high=st.sampled_from([1, 2, 7, 256]), seed=st.integers(0, 2**32)
)
def test_plan_puts_every_token_where_the_rule_says_in_order_of_position(ranks, tokens, high, seed):
    scores = scores_of(tokens, ranks, high, seed)
    if not tokens:
        plan = make_plan(torch.from_numpy(scores), ranks)
        assert (len(plan.token_of_place), len(plan.place_of_token)) == (0, 0)
        return
    places, to_rank, capacity = check(scores)
    met = [0] * ranks
    for place, rank in zip(places, to_rank, strict=True):
        assert place == rank * capacity + met[rank]
        met[rank] += 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_plan_of_batches_of_all_sizes_about_the_number_of_ranks(ranks):
    for tokens in (1, ranks - 1, ranks, ranks + 1, 257, 1000):
        check(scores_of(tokens, ranks))


@pytest.mark.parametrize(("tokens", "ranks"), [(2041, 8), (5003, 8), (4100, 3), (8200, 2)])
def test_plan_of_several_chunks_lets_their_tokens_take_turns(tokens, ranks):
    places, to_rank, capacity = check(scores_of(tokens, ranks))
    rows = row_chunks(capacity, ranks, capacity)
    for number in range(rows.max() + 1):
        slots = np.flatnonzero(rows == number)
        for rank in range(ranks):
            members = [t for t in range(tokens) if rows[t // ranks] == number and to_rank[t] == rank]
            assert [places[t] for t in members] == (rank * capacity + slots[: len(members)]).tolist()


def test_identity_plan_leaves_rows_where_they_are():
    plan = identity_plan(10, 4, "cpu")
    assert plan.place_of_token.tolist() == list(range(10))
    assert plan.token_of_place.tolist() == [*range(10), -1, -1]


def test_hash_of_a_plan_tells_it_from_any_with_two_tokens_exchanged():
    places = make_plan(torch.from_numpy(scores_of(40, 4)), 4).place_of_token
    hashes = {int(plan_hash(plan_of_places(places, 4)))}
    for first in range(0, 40, 3):
        for second in range(first):
            other = places.clone()
            other[[first, second]] = places[[second, first]]
            hashes.add(int(plan_hash(plan_of_places(other, 4))))
    assert len(hashes) == 1 + sum(range(0, 40, 3))
    assert int(plan_hash(plan_of_places(places.clone(), 4))) in hashes


INTERPRETED = """
import torch
from smoe_cli.runtime import plan
from smoe_cli.runtime.plan import plain_plan
from smoe_cli.runtime.plan_kernel import plan_rows

generator = torch.Generator().manual_seed(0)
for number, (ranks, tokens, high) in enumerate(CASES):
    if number >= len(CASES) - 2:
        plan.chunk_rows = lambda ranks: 8  # three chunks, small enough for the interpreter
    table = torch.randint(0, high, (300, ranks), generator=generator, dtype=torch.uint8)
    index = torch.randint(0, 310, (tokens,), generator=generator)
    scores = table[index.clamp(max=299)]
    plain = plain_plan(scores, ranks)
    for found in [plan_rows(table, index)] + [plan_rows(scores)] * (tokens < 6):
        assert torch.equal(plain.place_of_token, found.place_of_token), (ranks, tokens)
        assert torch.equal(plain.token_of_place, found.token_of_place), (ranks, tokens)
print("equal", len(CASES))
"""


def test_kernel_in_the_interpreter_makes_the_plain_plan():
    pytest.importorskip("triton")
    cases = [(ranks, tokens, 256) for ranks in (2, 4, 8) for tokens in (1, 5, 64)]
    cases += [(2, 257, 9), (8, 257, 4), (4, 1000, 256), (3, 65, 256), (4, 0, 256), (8, 150, 256), (4, 90, 256)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = INTERPRETED.replace("CASES", repr(cases))
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.stdout.strip() == f"equal {len(cases)}", ran.stderr


COMPILED = """
import re, subprocess, sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from smoe_cli.runtime.plan_kernel import _plan_kernel, num_warps

for block in (64, 1024):
    warps = num_warps(block)
    names = _plan_kernel.arg_names
    kinds = {"table": "*u8", "index": "*i64", "place_of_token": "*i32", "token_of_place": "*i32"}
    constants = {"RANKS": 8, "PADDED": 8, "EACH": block // (32 * warps), "THREADS": 32 * warps}
    constants |= {"GATHER": True, "SPLIT": False}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in kinds}
    source = ASTSource(_plan_kernel, signature, constants, attributes)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    path = Path(sys.argv[1]) / f"{block}.cubin"
    path.write_bytes(code.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    print(block, *re.findall(r"(?:REG|STACK|LOCAL):(\\d+)", said), len(re.findall("ld.global.v2.b32", code.asm["ptx"])))
"""


def test_kernel_compiles_for_a_gpu_without_spilling_and_loads_a_row_of_scores_at_once(tmp_path):
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", COMPILED, str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = re.findall(r"(\d+) (\d+) (\d+) (\d+) (\d+)", ran.stdout)
    assert [int(block) for block, *_ in found] == [64, 1024], ran.stderr
    for block, registers, stack, local, row_loads in (map(int, line) for line in found):
        assert (stack, local) == (0, 0), block
        assert registers <= 255, block
        assert row_loads >= 1, block
