"""The kernels compiled for a GPU (sm_90) without one: what the machine code must have, by pitfall."""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from smoe_cli.runtime import barrier, block_sums, combine, dispatch, launch, plan_kernel, sag, srs, weighing  # noqa: E402

POINTERS = {
    "*i64": ["bases", "index", "position"],
    "*i32": ["token_of_place", "place_of_token", "needs", "experts", "flags", "epochs", "failures"],
    "*fp32": ["weights"],
    "*u8": ["labels", "table"],
    "*bf16": ["partial", "residual", "weight", "summed", "normed", "staged", "rows", "parts", "mixed"],
    "*i1": ["here"],
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names} | {"epsilon": "fp32", "timeout": "i64"}
TYPES |= {"products": "*bf16", "total": "*bf16"}
KERNELS = {
    "reduce_scatter": (srs.srs_kernel, {"RESIDUAL": False, "NORM": False}),
    "reduce_scatter_norm": (srs.srs_kernel, {"RESIDUAL": True, "NORM": True}),
    "all_gather": (sag.sag_kernel, {"LABELS": True}),
    "dispatch": (dispatch.dispatch_kernel, {"K": 6, "KW": 8}),
    "combine": (combine.combine_kernel, {}),
}


def compiled(kernel, warps, constants, types=TYPES, **options):
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if signature[name].startswith("*")
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, **options})


def resources(cubin, folder):
    """Registers and bytes of stack of a thread, as the disassembler tells."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}


@pytest.fixture(scope="module", params=[(name, ranks) for name in KERNELS for ranks in (2, 8)], ids=str)
def built(request, tmp_path_factory):
    (name, ranks), hidden = request.param, 5120
    form = launch.launch_for(name, 8192, ranks, hidden, 2)
    kernel, constants = KERNELS[name]
    if "SPLIT" in [parameter.name for parameter in kernel.params]:
        constants = constants | {"SPLIT": form.split}
    shape = {"H": hidden, "W": form.width, "N": form.rows, "G": ranks, "PROTOCOL": barrier.PTX.value}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        code = compiled(kernel, form.warps, constants | shape)
    return code.asm["ptx"], code.asm["ttir"], resources(code.asm["cubin"], tmp_path_factory.mktemp("cubin")), form


def test_rows_move_sixteen_bytes_at_a_time(built):
    ptx = built[0]
    assert re.search(r"ld\.global\.v4\.b32", ptx)
    assert re.search(r"st\.global\.v4\.b32", ptx)
    assert not re.search(r"(ld|st)\.global\.[a-z:.0-9]*[bu]16", ptx), "accesses two bytes wide"


def test_one_release_and_one_acquire_a_peer_at_system_scope(built):
    ptx = built[0]
    assert len(re.findall(r"st\.release\.sys", ptx)) == 1
    assert len(re.findall(r"ld\.acquire\.sys", ptx)) == 1


def test_the_block_meets_before_its_release_and_after_its_wait_but_not_while_it_polls(built):
    ptx = built[0]
    release, poll = ptx.index("st.release.sys"), ptx.index("POLL:")
    spin = ptx[poll : ptx.index("LEAVE:")]
    assert "bar.sync" not in spin
    assert re.search(r"bar\.sync\s+0;(?!.*(ld|st)\.global\.v4)", ptx[:release].split("st.global.v4")[-1], re.DOTALL)
    assert "bar.sync" in ptx[poll:].split("ld.global")[0] or "bar.sync" in ptx[ptx.index("LEAVE:") :]


def test_row_times_hidden_is_computed_in_sixty_four_bits(built):
    _, ttir, _, _ = built
    assert re.search(r"arith\.muli .*: tensor<\d+x1xi64>", ttir)
    assert not re.search(r"arith\.muli .*: tensor<\d+x1xi32>", ttir)


def test_nothing_is_spilt_and_registers_leave_room_for_the_block(built):
    _, _, used, form = built
    assert used["LOCAL"] == 0
    assert used["REG"] * form.warps * 32 <= 65_536


@pytest.mark.parametrize(("hidden", "top_k"), [(5120, 6), (4096, 2)])
def test_the_weighing_of_products_moves_sixteen_bytes_rounds_every_product_and_spills_nothing(hidden, top_k, tmp_path):
    width = launch.tile_width(hidden, weighing.ELEMENTS)
    shape = {"H": hidden, "W": width, "N": weighing.ELEMENTS // width, "K": top_k, "PROTOCOL": barrier.PTX.value}
    code = compiled(weighing.weighing_kernel, weighing.WARPS, shape, enable_fp_fusion=False)
    ptx = code.asm["ptx"]
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= top_k
    assert re.search(r"st\.global\.v4\.b32", ptx)
    assert not re.search(r"(ld|st)\.global\.[a-z:.0-9]*[bu]16", ptx), "accesses two bytes wide"
    assert not re.search(r"\bfma\.", ptx), "a product that is not rounded before it is added"
    assert re.search(r"arith\.muli .*: tensor<\d+x1xi64>", code.asm["ttir"])
    used = resources(code.asm["cubin"], tmp_path)
    assert used["LOCAL"] == 0
    assert used["REG"] <= 64


def built_plan(block, ranks):
    warps = plan_kernel.num_warps(block)
    shape = {"RANKS": ranks, "PADDED": plan_kernel.triton.next_power_of_2(ranks), "ROW": plan_kernel.ROWS.get(ranks)}
    shape |= {"EACH": block // (32 * warps), "THREADS": 32 * warps, "GATHER": True, "SPLIT": block > 1024}
    shape |= {"SUMS": block_sums.sums_code(warps), "BEFORE": block_sums.before_code(warps)}
    return compiled(plan_kernel._plan_kernel, warps, shape, TYPES | {"rows": "i32"}, enable_fp_fusion=True), warps


@pytest.mark.parametrize(("block", "ranks"), [(64, 8), (1024, 8), (2048, 8), (1024, 4), (64, 2)])
def test_the_plan_loads_a_row_of_scores_at_once_spills_nothing_and_meets_once_a_sum(block, ranks, tmp_path):
    code, warps = built_plan(block, ranks)
    used = resources(code.asm["cubin"], tmp_path)
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    assert used["REG"] <= 255
    ptx = code.asm["ptx"]
    assert not re.search(r"ld\.global\.[a-z:.0-9]*[bu]8", ptx), "scores are loaded one by one"
    assert block_sums.is_sound(code.asm["ttgir"], warps)
    assert len(re.findall(r"redux\.sync\.add", ptx)) >= 4 * 6
    assert ptx.count("sums[") == ptx.count("[buffer];") == (0 if warps == 1 else ptx.count("redux.sync.add") // 4)
    assert ptx.count("ahead[") == (0 if warps == 1 else ptx.count("shfl.sync.up") // 20) <= 2


def test_sums_whose_words_lie_otherwise_are_told_from_sound_ones():
    """Rows of six scores spread a thread's words over several: every one would be summed alone."""
    code, warps = built_plan(1024, 6)
    assert "elementwise_inline_asm" in code.asm["ttgir"]
    assert not block_sums.is_sound(code.asm["ttgir"], warps)
    good, _ = built_plan(256, 8)
    assert not block_sums.is_sound(good.asm["ttgir"], warps=4)
    assert not block_sums.is_sound(good.asm["ttgir"].replace("threadsPerWarp = [1, 32]", "threadsPerWarp = [2, 16]"), 2)
    assert not block_sums.is_sound("", 1)
