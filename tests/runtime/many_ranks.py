"""Four and eight ranks, in as many processes: kernels, exchanges, layers, and a model that generates; no speed.

    make ranks

Too long for every change. The model is ref-deepseek-v2 of ../shared/data (or SMOE_DATA) under a map of random placement
and random tables; without it the bundled tiny-deepseek is taken. Figures are printed.
"""

import os
import time
from pathlib import Path

import pytest
import torch

from smoe_profiles.models import BUNDLED
from tests.runtime.emulation import emulated
from tests.runtime.models import make_map, reference_logits
from tests.runtime.ranks import Ranks, ranks
from tests.runtime.test_collectives import DTYPES, send_and_combine, sum_and_gather
from tests.runtime.test_generate import generated, prompt_ids
from tests.runtime.test_layer import MAPS, check_modes
from tests.runtime.test_symmetric import all_operations, fresh_rounds

SHARED = Path(os.environ.get("SMOE_DATA", Path(__file__).parents[3] / "shared/data")) / "models/ref-deepseek-v2"
MODEL = SHARED if SHARED.exists() else BUNDLED / "tiny-deepseek"
PROMPTS = ("The old house stood at the end of the road", "Water boils at a temperature that depends on")
NEW_TOKENS = 64
Ranks.patience = 1200.0


@pytest.fixture(autouse=True)
def told_time(request):
    started = time.monotonic()
    yield
    print(f"\n{request.node.name}: {time.monotonic() - started:.0f} s")


@pytest.mark.parametrize("number", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_sum_gather_dispatch_and_combine_as_the_reference(number, dtype, tmp_path):
    sizes = (1, number - 1, number, number + 1, 4 * number + 1)
    emulated(number).run(all_operations, tmp_path, dtype, sizes, 96)


@pytest.mark.parametrize("number", [4, 8])
def test_no_row_is_torn_or_stale_while_ranks_sleep(number, tmp_path):
    assert emulated(number).run(fresh_rounds, tmp_path, 1, 30) == [None] * number


@pytest.mark.parametrize("number", [4, 8])
def test_exchanges_over_gloo_equal_a_sum_in_rank_order(number):
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for tokens in (0, 1, number - 1, number, number + 1, 33):
            ranks(number).run(sum_and_gather, tokens, dtype)
        for capacity in (0, 1, 5):
            needs = torch.randint(0, 1 << number, (number * capacity,), generator=generator, dtype=torch.int32)
            ranks(number).run(send_and_combine, capacity, dtype, needs)


@pytest.mark.parametrize("number", [4, 8])
def test_every_mode_gives_the_same_bits_on_every_rank(number):
    for tokens in (1, number - 1, number + 1, 40):
        check_modes(number, MAPS["permuted"], tokens)


@pytest.mark.parametrize(("number", "mode"), [(8, "speculative"), (8, "sp-ep"), (4, "speculative"), (4, "replicated")])
def test_64_greedy_tokens_are_those_of_one_process(number, mode, tmp_path):
    prompts = [argument for text in PROMPTS for argument in ("--prompt", text)]
    arguments = ("--model", MODEL, "--map", make_map(MODEL, number, tmp_path), "--mode", mode, *prompts)
    told = ranks(number).run(generated, *arguments, "--max-new-tokens", NEW_TOKENS, "--json", "--debug-plan")
    assert told == told[:1] * number
    for text, result in zip(PROMPTS, told[0]["results"], strict=True):
        prompt, tokens = prompt_ids(MODEL, text), torch.tensor(result["tokens"])
        best = reference_logits(MODEL, torch.cat([prompt, tokens]))[len(prompt) - 1 : -1].topk(2, dim=-1)
        equal = (best.indices[:, 0] == tokens).long().cumprod(dim=0).sum()
        gap = float(best.values[equal, 0] - best.values[equal, 1]) if equal < len(tokens) else None
        print(f"{MODEL.name}, {number} ranks, {mode}: {equal} of {len(tokens)} tokens equal, gap there {gap}")
        assert len(tokens) == NEW_TOKENS
        assert gap is None or gap < 1e-4
    total = told[0]["counters"]["total"]
    print({name: round(total[name], 3) for name in ("lar", "fanout", "remote_fanout")}, total["rows"])
