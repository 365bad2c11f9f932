"""The shipped hardware model `nvlink-h200`, from what was measured with the kernels as they are launched; and what the
shipped models predict beside what layers took.

    python tests/bench/shipped_hardware.py --write smoe_cli/hardware/nvlink-h200.json
    PYTHONPATH=.:profiles:solvers python tests/bench/shipped_hardware.py

Reads docs/results/: `kernels_gpu.py` for all stages but the all-reduce, which `smoe bench` timed. FLOP/s come from a
run of their own: they are of batches that fill the experts. Predicted are the exchanges of every case of `smoe bench`.
"""

import argparse
import json
import re
from pathlib import Path
from statistics import fmean

import numpy as np
from scipy.stats import linregress

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
MEASURED = {
    "nvlink-h200": ("nvlink", "nvlink-v2", "nvlink-mixtral"),
    "pcie": ("host-memory", "host-memory-v2", "host-memory-mixtral"),
    "ethernet": ("sockets",),
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


def model():
    """The file's text."""
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
    return re.sub(r"\[\s+(\S+),\s+(\S+)\s+\]", r"[\1, \2]", json.dumps(document, indent=1)) + "\n"


def predicted_over_measured(name, file):
    """Of the exchanges of every case that ran with our kernels or collectives: (workload, T) -> shares. Those of
    replicated experts are left out: the model is made of their all-reduce.
    """
    from smoe_cli.hardware import load_hardware
    from smoe_solvers.layer_time import Stage

    curves, found = load_hardware(name).curves, {}
    for workload, measured in read(file)["workloads"].items():
        row = measured["shape"]["hidden"] * 2
        for one in measured["results"]:
            if not one["library"] and one["mode"] != "replicated":
                predicted = sum(float(curves[Stage(stage)](rows * row)) for stage, rows in one["rows"].items())
                found.setdefault((workload, one["tokens"]), []).append(predicted / one["total"])
    return found


LEAST_TOKENS, LEAST_SPREAD = 1024, 1.05
"""Below, a layer's time says nothing of a few activations more."""


def load_prices(file):
    """What an activation more on the busiest rank costs a layer, as a share of what is predicted: (workload, T) -> the
    share by a line through the cases that spread their tokens, its standard error, highest load over lowest. Exchanges
    are taken off first.
    """
    found = {}
    for name, measured in read(file)["workloads"].items():
        shape = measured["shape"]
        predicted = 6 * shape["hidden"] * shape["width"] / FLOPS
        cases = [one for one in measured["results"] if "layer" in one and one["mode"] in ("sp-ep", "speculative")]
        for tokens in sorted({one["tokens"] for one in cases if one["tokens"] >= LEAST_TOKENS}):
            mine = [one for one in cases if one["tokens"] == tokens]
            loads = np.array([one["busiest_load"] for one in mine], float)
            spread = loads.max() / loads.min()
            if spread >= LEAST_SPREAD:
                line = linregress(loads, [one["layer"] - one["total"] for one in mine])
                found[name, tokens] = line.slope / predicted, line.stderr / predicted, spread
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if arguments.write:
        arguments.write.write_text(model(), encoding="utf-8")
        return
    for name, files in MEASURED.items():
        for file in files:
            for (workload, tokens), shares in predicted_over_measured(name, f"bench-2xh200-{file}.json").items():
                spread = f"{min(shares):.2f} to {max(shares):.2f}"
                print(f"{name} {workload} T {tokens}: predicted over measured {fmean(shares):.2f}, {spread}")
    for file in MEASURED["nvlink-h200"]:
        for (workload, tokens), (share, error, spread) in load_prices(f"bench-2xh200-{file}.json").items():
            print(
                f"{workload} T {tokens}: an activation more on the busiest rank costs {share:.2f} ± {2 * error:.2f} of "
                f"what is predicted (two standard errors); loads differ {spread:.2f} times"
            )


if __name__ == "__main__":
    main()
