"""What smoe bench does: one layer's held-out routing and what each plan would know of it, replayed on this machine.

Axes: N held-out rows, E experts, P slots, G ranks, K experts a token.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from smoe_cli.console import Console
from smoe_cli.errors import UsageError
from smoe_cli.evaluation.breakdown import CEILINGS, ORACLE, row_facts
from smoe_cli.evaluation.measuring import LayerRun, held_out, walk_layers
from smoe_cli.evaluation.requests import held_out_requests
from smoe_cli.placement import layer_predictors, read_placement, read_runtime
from smoe_cli.runtime.replay import default_cases
from smoe_cli.runtime.workload import CONTIGUOUS, PLACED, Shape, Workload
from smoe_profiles.artefact import Artefact
from smoe_profiles.errors import ImpossibleError, InputError, MachineError, SmoeError
from smoe_profiles.models import find_model
from smoe_profiles.tables import Tables
from smoe_profiles.trace import Trace, TraceLayer
from smoe_solvers.choices import Predictor
from smoe_solvers.predictors import TokenChoice
from smoe_solvers.requests import route, route_in_turn

PREDICTORS = (Predictor.TOKEN, Predictor.MARKOV)
BATCH = 1024
ON_CPU = ("--device", "cpu", "--calls", "1", "--repeats", "1")


def record_workload(
    chosen: Artefact, tables: Tables, trace: Trace, *, layer_id: int | None, hidden: int, width: int
) -> Workload:
    """The held-out routing of one layer (None: the middle one) under a placement and under contiguous ranks.

    hidden, width: sizes to run it at, H and I. Raises InputError if the placement has no such layer.
    """
    placement = read_placement(chosen)
    arrays, metadata = read_runtime(chosen)
    served = [layer_predictors(arrays, metadata, index) for index in range(len(placement.layer_ids))]
    wanted = placement.layer_ids[len(placement.layer_ids) // 2] if layer_id is None else layer_id
    if wanted not in placement.layer_ids:
        raise InputError(f"{chosen.path} has no layer {wanted}; it has {', '.join(map(str, placement.layer_ids))}.")
    rows = held_out(trace, PREDICTORS, served[0], None)
    choice = TokenChoice(**json.loads(metadata["token_table"]))
    votes: dict[str, npt.NDArray[np.int64]] = {}
    kept: LayerRun | None = None
    for run in walk_layers(rows, tables, placement, served, choice, predictors=PREDICTORS, batch=BATCH):
        for name, scores in run.token_scores.items():
            votes[name] = votes.get(name, np.zeros(scores.shape, np.int64)) + scores
        kept = run if run.layer.id == wanted else kept
    assert kept is not None
    index, ranks = placement.layer_ids.index(wanted), placement.num_ranks
    contiguous = np.arange(placement.num_experts)
    return Workload(
        shape=Shape(hidden, width, placement.num_experts, kept.layer.top_k),
        num_ranks=ranks,
        experts=torch.from_numpy(kept.experts.astype(np.int32)),
        weights=torch.from_numpy(_weights(trace, kept.layer, len(rows.token_id))),
        slots={
            CONTIGUOUS: torch.from_numpy(contiguous.astype(np.int32)),
            PLACED: torch.from_numpy(placement.physical_to_logical[index].astype(np.int32)),
        },
        scores=_scores(kept),
        own_rows=_own_rows(trace, votes[PLACED], ranks),
        origin=f"layer {wanted} of {trace.artefact.path.parent.name}, {len(rows.token_id):,} held-out rows",
    )


def _scores(run: LayerRun) -> dict[tuple[str, str], torch.Tensor]:
    """Scores of every predictor, and of the oracle, under each placement: [N, G] uint8."""
    placement_of = {"shuffled": CONTIGUOUS, "placed+shuffled": PLACED, **{CEILINGS[p]: p for p in (CONTIGUOUS, PLACED)}}
    return {
        (placement_of[shuffle.state], shuffle.predictor): torch.from_numpy(shuffle.scores)
        for shuffle in run.shuffles
        if shuffle.scores is not None and (shuffle.predictor == ORACLE) == (shuffle.state in CEILINGS.values())
    }


def _weights(trace: Trace, layer: TraceLayer, rows: int) -> npt.NDArray[np.float32]:
    """The gate's weights, [N, K]; equal ones where they were not recorded."""
    column = layer.column.replace("experts", "weights")
    weights: npt.NDArray[np.float32] = trace.read([column], "heldout")[column][:rows].astype(np.float32)
    return np.where(np.isnan(weights), np.float32(1 / layer.top_k), weights)


def _own_rows(trace: Trace, votes: npt.NDArray[np.int64], ranks: int) -> dict[str, torch.Tensor]:
    """Rows of the requests on every rank, [G, N // G]: in turn, and by a router that follows the token table's votes.

    A rank with fewer rows than that starts over.
    """
    requests = held_out_requests(row_facts(trace, None, len(votes)))
    sums = requests.sums(votes, requests.prompt)
    routed = {CONTIGUOUS: route_in_turn(len(sums), ranks), PLACED: route(sums)}
    owner = np.empty(len(votes), np.int64)
    found = {}
    for name, rank in routed.items():
        owner[requests.order] = np.repeat(rank, np.diff(requests.start))
        rows = [np.flatnonzero(owner == g) for g in range(ranks)]
        if not all(map(len, rows)):
            raise InputError(f"{trace.artefact.path} has too few held-out sequences for {ranks} ranks.")
        found[name] = torch.from_numpy(np.stack([np.resize(own, len(votes) // ranks) for own in rows]).astype(np.int32))
    return found


def bench_placement(
    chosen: Artefact,
    tables: Tables,
    trace: Trace,
    *,
    layer_id: int | None,
    sizes: tuple[int | None, int | None],
    tokens: str,
    cpu: bool,
    out: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Replay a placement's held-out routing on one process a rank. Returns the bench's document.

    sizes: hidden and expert width, None for the model's own. Raises UsageError for sizes that cannot be,
    ImpossibleError for a placement with copies or unequal ranks, MachineError where there are fewer GPUs than ranks or
    the processes fail.
    """
    if not re.fullmatch(r"[1-9]\d{0,7}(,[1-9]\d{0,7})*", tokens):
        raise UsageError(f"--tokens {tokens!r} is no list of batch sizes; give numbers such as 64,1024.")
    placement = read_placement(chosen)
    if placement.physical_to_logical.shape[1] != placement.num_experts or placement.num_experts % placement.num_ranks:
        raise ImpossibleError(
            f"{chosen.path.name} has copies of experts, or ranks with unequally many; smoe bench replays placements in "
            "which every rank has as many experts and each is there once."
        )
    ranks, devices = placement.num_ranks, torch.cuda.device_count()
    if not cpu and devices < ranks:
        raise MachineError(f"{chosen.path.name} has {ranks} ranks, this machine {devices} GPUs; --cpu runs without.")
    hidden, width = (given or own for given, own in zip(sizes, _model_sizes(trace, sizes), strict=True))
    if hidden % 8:
        raise UsageError(f"--hidden {hidden} is not divisible by 8; the kernels move rows in 16-byte pieces.")
    workload = record_workload(chosen, tables, trace, layer_id=layer_id, hidden=hidden, width=width)
    with tempfile.TemporaryDirectory(prefix="smoe-bench-") as folder:
        path, result = Path(folder) / f"{chosen.path.name}.safetensors", Path(folder) / "bench.json"
        workload.save(path)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "smoe_cli.runtime.bench", "--workload", str(path), "--tokens", tokens, "--out", str(result)]
        cases = len(default_cases(workload)) * len(tokens.split(","))
        with (
            console.progress("timing", cases, "cases") as advance,
            (Path(folder) / "errors").open("w+", encoding="utf-8") as errors,
            subprocess.Popen(
                [*command, *(ON_CPU if cpu else [])], stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:  # one a case, then the ratios of some
                advance(" over " not in line)
            process.wait()
            errors.seek(0)
            said = errors.read()
        if process.returncode or not result.exists():
            raise MachineError(f"the {ranks} processes of the bench failed: {_first_error(said)}")
        text = result.read_text(encoding="utf-8")
    if out is not None:
        out.write_text(text, encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def _first_error(said: str) -> str:
    """The exception that the first process ended with; torchrun writes a page about all of them below it."""
    found = [line for line in said.splitlines() if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (found or said.split("\n", 1))[0] or "no message"


def _model_sizes(trace: Trace, wanted: tuple[int | None, int | None]) -> tuple[int, int]:
    """Hidden size and expert width of the traced model. Raises UsageError where its config is not at hand."""
    if None not in wanted:
        return wanted[0] or 0, wanted[1] or 0
    try:
        spec = find_model(str(trace.artefact.run().get("model")), download=False).spec
    except SmoeError as error:
        raise UsageError(f"the model of {trace.artefact.path} is not here; give --hidden and --width.") from error
    if not spec.expert_width:
        raise UsageError(f"the model of {trace.artefact.path} does not say how wide an expert is; give --width.")
    return spec.hidden_size, spec.expert_width
