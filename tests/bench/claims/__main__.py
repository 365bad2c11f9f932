"""The published claims (arXiv 2503.04398), each beside its measured counterpart, as one table. `make reproduce`.

    python -m tests.bench.claims [CLAIM ...] [--keep DIR]

Data: ../shared/data, or SMOE_DATA. Every smoe command that is run is written to standard error. --keep keeps the
working folders and uses what is there.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from tests.bench.claims.data import DATA, STAND_INS, Bench, Line
from tests.bench.claims.experts import hotness, kurtosis, topk
from tests.bench.claims.local import lar, size, transfer
from tests.bench.claims.next_layer import ngrams
from tests.bench.claims.routes import routes
from tests.bench.claims.rule import assignment
from tests.bench.claims.tokens import bigram, unseen


def data(_: Bench) -> Iterator[Line]:
    for name, instead in STAND_INS.items():
        yield name, "not to be had here; stands in", instead


@dataclass(frozen=True)
class Claim:
    """One published statement and the function that measures its counterpart."""

    published: str
    lines: Callable[[Bench], Iterator[Line]]


CLAIMS = {
    "routes": Claim("89 % of token-expert routes foretold", routes),
    "topk": Claim("precision 96.3 %, F1 78.8 % (recall 67 %) from the token id, 25/75", topk),
    "ngrams": Claim("about 70 % confidence in the next layer from five layers", ngrams),
    "kurtosis": Claim("most tokens' kurtosis above 8", kurtosis),
    "hotness": Claim("median F1 by layer 1/1/1/.833/.833/.833; P25 1/.833/.833/.667/.667/.667; "
                     "hotness 1/.917/.889/.889/.833/.833; 20/80", hotness),
    "lar": Claim("lar +43 % / +61 % (v1-3: DeepSeek-V2 / Mixtral); +37 % / +43 % (v5: V2-Lite / Qwen3-30B)", lar),
    "transfer": Claim("lar from .25: .465 in-domain, .407-.416 on another data set (V2-Lite); .469, .353-.393 (Qwen3)",
                      transfer),
    "size": Claim("T of DeepSeek-V2 is 11.7 MB", size),
    "bigram": Claim("the token and its few preceding tokens name the experts", bigram),
    "unseen": Claim("ids never seen take their nearest neighbour's row", unseen),
    "assignment": Claim("(ours) the served rule reaches .99 of the exact sum of scores", assignment),
    "data": Claim("ShareGPT, LMSYS-Chat-1M, MMLU, LongBench", data),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help=f"of {', '.join(CLAIMS)}; default: all")
    parser.add_argument("--keep", type=Path, help="keep the working folders here, and use what is there")
    asked = parser.parse_args()
    wrong = set(asked.claims) - set(CLAIMS)
    if wrong:
        parser.error(f"no claim {min(wrong)}; there are {', '.join(CLAIMS)}")
    if not (DATA / "traces").is_dir():
        parser.error(f"{DATA} has no traces/; set SMOE_DATA")
    with tempfile.TemporaryDirectory(prefix="smoe-claims-") as fresh:
        bench = Bench(asked.keep or Path(fresh))
        bench.work.mkdir(parents=True, exist_ok=True)
        print("| claim | published | data, split | measured | ours |\n| --- | --- | --- | --- | --- |")
        for name in asked.claims or CLAIMS:
            started = perf_counter()
            for where, what, found in CLAIMS[name].lines(bench):
                print(f"| {name} | {CLAIMS[name].published} | {where} | {what} | {found} |", flush=True)
            print(f"{name}: {perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
