"""The shipped hardware model `nvlink-h200`, from what was measured with the kernels as they are launched.

    python tests/bench/nvlink_model.py > smoe_cli/hardware/nvlink-h200.json

Reads docs/results/: `kernels_gpu.py` for all stages but the all-reduce, which `smoe bench` timed. FLOP/s come from a
run of their own: they are of batches that fill the experts.
"""

import json
import re
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "docs/results"
FLOPS = 5.4e14
PROVENANCE = {
    "devices": "2 x NVIDIA H200 of one host (experts: one)",
    "link": "NVLink 4 (NV18), NVLS multicast off",
    "measured": {
        "reduce-scatter": "SRS, H 4096, bf16, 64 to 32,768 tokens, as launched, CUDA graphs of 100 calls or more",
        "all-gather": "SAG, same conditions",
        "all-reduce": "shares sent to every rank and summed there, H 2048, 64 to 16,384 tokens, and H 4096, in graphs",
        "dispatch": "de-duplicated dispatch, H 2048 and 7168, top-8, 1,024 to 16,384 tokens; every token needs the "
        "other rank (at 1,024 also .5 and .2 of them), graphs of 100 calls",
        "combine": "pre-reduced combine, same conditions",
        "expert_flops": "bf16 grouped GEMM, gate and up, silu, down, CUDA-graph replay: 490 to 610 TFLOP/s from 1,000 "
        "rows an expert on, at H x width 2048 x 1408, 2880 x 2880 and 7168 x 2048. Smaller batches are bound by "
        "reading weights: 8 experts of 2048 x 1408 take 70 us up to 128 rows each",
    },
}
SUMS = {"reduce-scatter": "reduce_scatter", "all-gather": "all_gather"}
REDUCED = (("bench-2xh200-nvlink.json", "v2lite", 64), ("bench-2xh200-nvlink-mixtral.json", "mixtral", 16384))
"""File, workload, and from how many tokens on."""


def read(name):
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def stages():
    """[bytes, seconds] by stage."""
    kernels = read("kernels-2xh200.json")
    sums = [one for one in kernels["sums"] if one["hidden"] == 4096]
    routed = [one for one in kernels["routed"] if one["share"] == 1 or one["tokens"] == 1024]
    found = {stage: [[one["bytes"], one["seconds"][name]] for one in sums] for stage, name in SUMS.items()}
    found["all-reduce"] = [
        [one["rows"]["all-reduce"] * workload["shape"]["hidden"] * 2, one["seconds"]["all-reduce"]]
        for file, name, least in REDUCED
        for workload in [read(file)["workloads"][name]]
        for one in workload["results"]
        if one["mode"] == "replicated" and one["tokens"] >= least
    ]
    for name in ("dispatch", "combine"):
        found[name] = [[one["bytes"], one["seconds"][name]] for one in routed]
    return {stage: smooth(points) for stage, points in found.items()}


def smooth(points):
    """Rising in bytes, one a number of bytes (the faster), four digits."""
    fastest = {}
    for size, seconds in sorted(points, reverse=True):
        fastest[int(size)] = float(f"{seconds:.4g}")
    return [list(point) for point in sorted(fastest.items())]


def main():
    where = read("kernels-2xh200.json")["machine"]
    versions = {name: where[name] for name in ("torch", "triton", "nccl")}
    document = {
        "format": "smoe-hardware",
        "format_version": 1,
        "name": "nvlink-h200",
        "stages": stages(),
        "expert_flops": FLOPS,
        "provenance": {"date": where["date"], "versions": versions} | PROVENANCE,
    }
    print(re.sub(r"\[\s+(\S+),\s+(\S+)\s+\]", r"[\1, \2]", json.dumps(document, indent=1)))


if __name__ == "__main__":
    main()
