"""Batches of real scores for one_gpu.py: token tables of the traces, held-out rows, contiguous and placed experts.

`OMP_NUM_THREADS=1 PYTHONPATH=. python tests/bench/real_scores.py scores.npy` writes [B, 1024, 8] uint8. Data:
../shared/data, or SMOE_DATA. Some minutes of searches; --keep DIR keeps them and uses what is there.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from tests.bench.claims.data import BATCH, NAMES, Bench
from tests.bench.claims.rule import placements_of, table_scores

RANKS, DRAWN = 8, 150


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--keep", type=Path)
    asked = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory(prefix="smoe-scores-") as fresh:
        bench = Bench(asked.keep or Path(fresh))
        bench.work.mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            routing = bench.routing(name)
            known = routing.token < routing.vocab
            if name in ("summary", "olmoe0") or routing.num_experts % RANKS:
                continue
            for placement in placements_of(bench, name, routing, RANKS):
                for index in range(len(routing.experts)):
                    scores = table_scores(routing, known, placement, index)
                    whole = len(scores) // BATCH * BATCH
                    found.extend(scores[:whole].reshape(-1, BATCH, RANKS).astype(np.uint8))
    drawn = np.random.default_rng(0).choice(len(found), DRAWN, replace=False)
    np.save(asked.out, np.stack([found[number] for number in drawn]))
    print(f"{DRAWN} of {len(found)} batches")


if __name__ == "__main__":
    main()
