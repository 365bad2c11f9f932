"""Sums over all threads of a block, or over those before, known to every thread after one barrier; Triton's own
reduction and scan take several.

Axes: M threads of a block. Every thread adds two words of four 16-bit fields, which must not overflow.

The assembly stands for one word of a thread. That is how Triton lays out [1, M] with M threads; laid out otherwise,
sums would be wrong, so whoever launches such a kernel asks `is_sound` first.
"""

import re
from functools import cache

import torch
import triton
import triton.language as tl


def sums_code(warps: int) -> str:
    """PTX of `block_sums` for a block of so many warps. Two buffers take turns, so that no thread writes what another
    has yet to read: between two writes of one lies the barrier of the other.
    """
    meeting = [
        ".reg .b32 e, f, g, h, buffer, mine;",
        ".reg .pred first;",
        f".shared .align 16 .b32 sums[{2 * warps * 4}];",
        "mov.u32 buffer, sums;",
        "and.b32 e, $4, 1;",
        f"mad.lo.u32 buffer, e, {warps * 16}, buffer;",
        "mov.u32 mine, %tid.x;",
        "and.b32 e, mine, 31;",
        "setp.eq.u32 first, e, 0;",
        "shr.u32 mine, mine, 5;",
        "mad.lo.u32 mine, mine, 16, buffer;",
        "@first st.shared.v4.b32 [mine], {a, b, c, d};",
        "bar.sync 0;",
        "ld.shared.v4.b32 {a, b, c, d}, [buffer];",
    ]
    for warp in range(1, warps):
        meeting.append(f"ld.shared.v4.b32 {{e, f, g, h}}, [buffer+{warp * 16}];")
        meeting += [f"add.u32 {total}, {total}, {more};" for total, more in ("ae", "bf", "cg", "dh")]
    lines = [
        ".reg .b32 a, b, c, d;",
        "mov.b64 {a, b}, $2;",
        "mov.b64 {c, d}, $3;",
        *(f"redux.sync.add.s32 {word}, {word}, 0xffffffff;" for word in "abcd"),
        *(meeting if warps > 1 else []),
        "mov.b64 $0, {a, b};",
        "mov.b64 $1, {c, d};",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


def before_code(warps: int) -> str:
    """PTX of `sums_before` for a block of so many warps."""
    words, kept = "abcd", "efgh"
    lines = [
        ".reg .b32 a, b, c, d, e, f, g, h, other, mine;",
        ".reg .pred p;",
        "mov.b64 {a, b}, $2;",
        "mov.b64 {c, d}, $3;",
        *(f"mov.u32 {own}, {word};" for own, word in zip(kept, words, strict=True)),
    ]
    for distance in (1, 2, 4, 8, 16):
        for word in words:
            lines.append(f"shfl.sync.up.b32 other|p, {word}, {distance}, 0, 0xffffffff;")
            lines.append(f"@p add.u32 {word}, {word}, other;")
    if warps > 1:
        lines += [
            f".shared .align 16 .b32 ahead[{warps * 4}];",
            "mov.u32 mine, %tid.x;",
            "and.b32 other, mine, 31;",
            "setp.eq.u32 p, other, 31;",
            "shr.u32 mine, mine, 5;",
            "mov.u32 other, ahead;",
            "mad.lo.u32 other, mine, 16, other;",
            "@p st.shared.v4.b32 [other], {a, b, c, d};",
            "bar.sync 0;",
        ]
    lines += [f"sub.u32 {word}, {word}, {own};" for own, word in zip(kept, words, strict=True)]
    for warp in range(warps - 1):
        lines.append(f"ld.shared.v4.b32 {{e, f, g, h}}, [ahead+{warp * 16}];")
        lines.append(f"setp.gt.u32 p, mine, {warp};")
        lines += [f"@p add.u32 {word}, {word}, {more};" for more, word in zip(kept, words, strict=True)]
    lines += ["mov.b64 $0, {a, b};", "mov.b64 $1, {c, d};"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit
def _add(one, other, more, most):
    return one + more, other + most


@triton.jit
def block_sums(one, other, turn, CODE: tl.constexpr):
    """The sums of both words, alike in all threads. one, other: [1, M] int64; turn: differs by one from the call before
    where the same call is repeated and no other barrier lies between; CODE: `sums_code`, or nothing to let Triton
    reduce.
    """
    if CODE != "":
        one, other = tl.inline_asm_elementwise(
            CODE, "=l,=l,l,l,r", [one, other, turn], dtype=(tl.int64, tl.int64), is_pure=False, pack=1
        )
    else:
        all_one, all_other = tl.reduce((one, other), 1, _add, keep_dims=True)
        one, other = all_one + one * 0, all_other + other * 0
    return one, other


@triton.jit
def sums_before(one, other, CODE: tl.constexpr):
    """The sums of both words over the threads before. one, other: [1, M] int64; CODE: `before_code`, or nothing to let
    Triton scan. Between two calls lies another barrier, so that no thread writes what another has yet to read.
    """
    if CODE != "":
        one, other = tl.inline_asm_elementwise(
            CODE, "=l,=l,l,l", [one, other], dtype=(tl.int64, tl.int64), is_pure=False, pack=1
        )
    else:
        one_until, other_until = tl.associative_scan((one, other), 1, _add)
        one, other = one_until - one, other_until - other
    return one, other


@cache
def runs_here(device: torch.device) -> bool:
    """Whether a device knows the assembly: `redux` came with compute capability 8.0."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    return nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


def is_sound(ttgir: str, warps: int) -> bool:
    """Whether a compiled kernel gives every thread one word of each of its block sums. ttgir: its intermediate form."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", ttgir, re.MULTILINE))
    each_one = f"{{sizePerThread = [1, 1], threadsPerWarp = [1, 32], warpsPerCTA = [1, {warps}], order = [1, 0]}}"
    uses = re.findall(r"elementwise_inline_asm .* pure = false\} (.*) ->", ttgir)
    words = [word for use in uses for word in re.findall(r"tensor<(\d+x\d+)xi\d+, ([^>]*)>", use)]
    return len(words) == sum(use.count("%") for use in uses) > 0 and all(
        shape == f"1x{32 * warps}" and layouts.get(layout) == f"#ttg.blocked<{each_one}>" for shape, layout in words
    )
