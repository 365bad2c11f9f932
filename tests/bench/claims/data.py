"""Real routing, taken through smoe, with the rows of all parts in one order; and how figures are written.

Axes: L MoE layers, N rows, K experts a token, E experts, G ranks, V ids.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from smoe_profiles.split import PARTS
from smoe_profiles.trace import Trace, open_trace, to_numpy
from smoe_solvers.choices import Predictor
from smoe_solvers.expert_prediction import (
    context_numbers,
)

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("SMOE_DATA", ROOT.parent / "shared/data")).resolve()
BATCH = 1024
TABLES_ONLY = (Predictor.TOKEN, Predictor.PAPER, Predictor.FUSED)
"""T alone; the more confident of T and A; both mixed."""

SPLITS = 5
PSEUDO = 4.0
FIT_ROWS, HELD_ROWS = 98_304, 16_384

NAMES = {
    "law": "DeepSeek-V2-Lite, law (zh)",
    "intent": "DeepSeek-V2-Lite, intent",
    "summary": "DeepSeek-V2-Lite, summary (no token ids)",
    "gen": "gpt-oss-20b, generated",
    "gen_b": "gpt-oss-20b, generated b",
    "qwen": "Qwen1.5-MoE, GSM8K prompts",
    "olmoe0": "OLMoE, GSM8K, layer 0 (no token ids)",
    "ref-deepseek-v2": "ref-deepseek-v2, mixed text",
    "ref-deepseek-v2-grouped": "ref-deepseek-v2-grouped, mixed text",
    "ref-mixtral": "ref-mixtral, mixed text",
    "tiny-deepseek": "tiny-deepseek, builtin text",
}
ARCHIVES = {
    "law": "dsv2lite_esft_law",
    "intent": "dsv2lite_esft_intent",
    "summary": "dsv2lite_esft_summary",
    "gen": "gptoss20b_gen",
    "gen_b": "gptoss20b_gen_b",
    "qwen": "qwen15moe_gsm8k",
    "olmoe0": "olmoe1b7b_gsm8k_layer0",
}
PROMPTS = {
    "mmlu": "mmlu_mix",
    "gsm8k": "gsm8k_test",
    "humaneval": "humaneval",
    "books": "longdoc_books",
}
TRIPLES = {
    "mixtral8x7b": ("arxiv", "book", "github", "wikipedia"),
    "olmoe1b7b": ("book", "github", "wikipedia"),
}
STAND_INS = {
    "ShareGPT": "law, intent (the published model, other prompts); gen, gen_b (other model, chat-like prompts)",
    "LMSYS-Chat-1M": "gen, gen_b; mixed text with dialogues for the ref- models",
    "MMLU": "prompts/mmlu_mix (MMLU itself, 471 prompts) on ref-deepseek-v2; gen and gen_b answer MMLU prompts",
    "LongBench": "prompts/longdoc_books on ref-deepseek-v2; summary (no token ids)",
    "routing of DeepSeek-V2, Qwen3-30B-A3B, all layers of Mixtral-8x7B": "DeepSeek-V2-Lite; gpt-oss-20b; "
    "ref-mixtral, and Mixtral-8x7B counts of layers 0, 7, 15",
}  # fmt: skip


def held_of(name: str) -> str:
    """A data set and how its rows were divided."""
    return f"{NAMES[name]}; {'train/test' if name.startswith('ref-') else '80/20'}"


Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]
Line = tuple[str, str, str]
"""Data and split; what is measured; the figure."""


# Data: traces through smoe, with the rows of all parts in one order.


class Bench:
    """The working folders, made by smoe commands as they are needed."""

    def __init__(self, work: Path) -> None:
        self.work = work

    def smoe(self, makes: Path | None, *arguments: object) -> dict[str, Any]:
        """Run one command with --json, unless what it makes is there. Fails with the command's own words."""
        if makes is not None and makes.exists():
            return {}
        words = [str(argument) for argument in arguments]
        print("smoe " + " ".join(words), file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "smoe_cli", *words, "--json", "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"smoe {' '.join(words)}: exit {done.returncode}\n{done.stderr}")
        return dict(json.loads(done.stdout))

    def fitted(self, name: str) -> Path:
        """The folder whose trace/ has the fit and validation rows of a data set, and, of imports, the held-out ones."""
        folder = self.work / name
        if name in ARCHIVES:
            self.smoe(folder / "trace", "import", DATA / f"traces/{ARCHIVES[name]}.npz", "-C", folder)
        elif name == "tiny-deepseek":
            self.smoe(folder / "trace", "profile", "--model", name, "-C", folder)
        elif name.startswith("ref-"):
            self._profile(folder, name, "train", "fit", FIT_ROWS)
        return folder

    def held(self, name: str) -> Path:
        """The folder whose trace/ has the held-out rows."""
        if not name.startswith("ref-"):
            return self.fitted(name)
        folder = self.work / f"{name}-test"
        self._profile(folder, name, "test", "heldout", HELD_ROWS)
        return folder

    def _profile(self, folder: Path, model: str, key: str, split: str, rows: int) -> None:
        text = ("--dataset", DATA / f"models/ref_tokens.npz#{key}", "--pack", "windows", "--max-tokens", rows)
        source = ("--model", DATA / "models" / model, "--dtype", "float32", "--split", split)
        self.smoe(folder / "trace", "profile", *source, *text, "-C", folder)

    def prompts(self, name: str) -> Path:
        """ref-deepseek-v2 on one set of prompts, split by document."""
        folder = self.work / f"prompts-{name}"
        text = ("--dataset", DATA / f"prompts/{PROMPTS[name]}.jsonl.xz", "--max-tokens", HELD_ROWS * 2)
        model = ("--model", DATA / "models/ref-deepseek-v2", "--dtype", "float32")
        self.smoe(folder / "trace", "profile", *model, *text, "-C", folder)
        return folder

    def cut(self, name: str, share: float) -> tuple[Path, Path]:
        """A data set whose first-drawn sequences fit, a share of all, and whose others are held out."""
        fit, rest = (self.work / f"{name}-{share:g}-{part}" for part in ("fit", "rest"))
        if not (rest / "trace").exists():
            chosen = draw_sequences(self.routing(name), share, 0)
            for folder, kept, mode in ((fit, chosen, "fit"), (rest, ~chosen, "heldout")):
                folder.mkdir(exist_ok=True)
                write_part(DATA / f"traces/{ARCHIVES[name]}.npz", folder / f"{name}.npz", kept)
                self.smoe(folder / "trace", "import", folder / f"{name}.npz", "--split", mode, "-C", folder)
        return fit, rest

    def placed(self, folder: Path, ep: int, goal: str = "lar") -> Path:
        """The placement of a folder's trace."""
        self.smoe(folder / "tables", "build-tables", "-C", folder)
        name = () if goal == "lar" else ("--name", goal)
        target = folder / f"placement-ep{ep}{'' if goal == 'lar' else f'-{goal}'}"
        self.smoe(target, "cocluster", "--ep", ep, "--goal", goal, "--effort", "fast", *name, "-C", folder)
        return target

    def evaluated(self, folder: Path, ep: int, trace: Path, goal: str = "lar") -> dict[str, dict[str, Any]]:
        """state -> predictor -> figures of the served rule, mean over layers, held-out rows of `trace`."""
        target = self.placed(folder, ep, goal)
        found = self.smoe(
            *(None, "evaluate", "--placement", target.name, "--trace", trace / "trace", "-C", folder),
            *(word for name in TABLES_ONLY for word in ("--predictor", name)),
        )
        return {
            state: {name: by_rule["rule"] for name, by_rule in by_name.items()}
            for state, by_name in found["total"].items()
        }

    @cache  # noqa: B019 - one bench a run
    def routing(self, name: str) -> "Routing":
        """All rows of a data set, in order."""
        if name.startswith("prompts-"):
            return read_routing(open_trace(self.prompts(name.removeprefix("prompts-")) / "trace"))
        routing = read_routing(open_trace(self.fitted(name) / "trace"))
        if self.held(name) != self.fitted(name):
            routing = routing.followed_by(read_routing(open_trace(self.held(name) / "trace")))
        if name in ("gen", "gen_b"):  # most rows have no weights there, but the archive keeps the gate's order
            with np.load(DATA / f"traces/{ARCHIVES[name]}.npz") as archive:
                routing = replace(routing, experts=archive["ids"].astype(np.int64))
        return routing


@dataclass(frozen=True)
class Routing:
    """Rows in order. experts: [L, N, K] by falling weight; token, sequence, part (into PARTS): [N]."""

    layer_ids: tuple[int, ...]
    experts: Ints
    token: Ints
    sequence: Ints
    part: Ints
    num_experts: int
    vocab: int

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    @property
    def held(self) -> Ints:
        return self.part == PARTS.index("heldout")

    def take(self, rows: Ints) -> "Routing":
        columns = {name: getattr(self, name)[rows] for name in ("token", "sequence", "part")}
        return replace(self, experts=self.experts[:, rows], **columns)

    def followed_by(self, other: "Routing") -> "Routing":
        moved = replace(other, sequence=other.sequence + self.sequence.max() + 1)
        columns = {
            name: np.concatenate([getattr(self, name), getattr(moved, name)]) for name in ("token", "sequence", "part")
        }
        return replace(self, experts=np.concatenate([self.experts, other.experts], axis=1), **columns)


def read_routing(trace: Trace) -> Routing:
    """Every row of a trace, in the order of its files."""
    names = ["token_id", "sequence", "split", *(layer.column for layer in trace.layers)]
    groups = [{name: to_numpy(group[name]) for name in names} for group in trace.groups(names)]
    columns = {name: np.concatenate([group[name] for group in groups]) for name in names}
    return Routing(
        tuple(layer.id for layer in trace.layers),
        np.stack([columns[layer.column] for layer in trace.layers]).astype(np.int64),
        columns["token_id"].astype(np.int64),
        columns["sequence"].astype(np.int64),
        np.array([PARTS.index(name) for name in columns["split"]]),
        trace.layers[0].num_experts,
        trace.vocab_size,
    )


def draw_sequences(routing: Routing, share: float, seed: int) -> Ints:
    """Which sequences fit: drawn without replacement until they hold this share of the rows. [S] bool."""
    lengths = np.bincount(routing.sequence)
    order = np.random.default_rng(seed).permutation(len(lengths))
    before = np.cumsum(lengths[order]) - lengths[order]
    chosen = np.zeros(len(lengths), np.bool_)
    chosen[order[before < share * lengths.sum()]] = True
    return chosen


def write_part(source: Path, target: Path, sequences: Ints) -> None:
    """An archive's sequences [S] bool, as an archive; gate weights are left out where not every row has them."""
    with np.load(source) as archive:
        rows = np.repeat(sequences, archive["seq_len"])
        facts = {name: archive[name] for name in ("layer_ids", "num_experts", "top_k")}
        facts |= {"vocab_size": archive["vocab_size"]} if "vocab_size" in archive else {}
        if archive["weights"].shape[1] == len(rows) if "weights" in archive else False:
            facts["weights"] = archive["weights"][:, rows]
        facts["vocab_size"] = facts.get("vocab_size", archive["tokens"].max() + 1)
        np.savez_compressed(
            target, ids=archive["ids"][:, rows], tokens=archive["tokens"][rows], seq_len=archive["seq_len"][sequences],
            **facts,
        )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Known rows against others. index: [N] token ids numbered from 0, U of them; fit: [N] bool."""

    routing: Routing
    index: Ints
    ids: int
    fit: Ints

    @property
    def coverage(self) -> float:
        """Share of the other rows whose token id was seen."""
        return float(np.isin(self.index[~self.fit], self.index[self.fit]).mean())


def part_by(routing: Routing, fit: Ints) -> Part:
    numbers, size = context_numbers([routing.token])
    return Part(routing, numbers, size, fit)


def drawn_part(routing: Routing, share: float, seed: int) -> Part:
    return part_by(routing, draw_sequences(routing, share, seed)[routing.sequence])


def share(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def shares(values: Sequence[float] | Ints, mark: str = " / ") -> str:
    return mark.join(share(float(value)) for value in values)
