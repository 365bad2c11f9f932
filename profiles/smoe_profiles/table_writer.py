"""Writing tables: from traces, from a shard of them, and from all shards.

The tables of all shards added up are, byte for byte, those that one run over the whole traces writes.
"""

import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_profiles.artefact import SCRATCH, Artefact, file_hash
from smoe_profiles.errors import ImpossibleError, InputError, MachineError
from smoe_profiles.gate_sums import add_records
from smoe_profiles.models import Model, describe_identity, input_embedding, same_model
from smoe_profiles.neighbours import StoredEmbedding, nearest_neighbours
from smoe_profiles.table_layers import LayerCounts, add_written, count_layers, empty_counts, token_slots, write_layer
from smoe_profiles.table_rows import BLOCK_ROWS, Share, Survey, survey_rows
from smoe_profiles.table_samples import SampleRows, merge_samples, share_samples, write_samples
from smoe_profiles.tables import FIT_PARTS, VOCABULARY, Int64Array, UInt32Array, load_arrays, save_arrays
from smoe_profiles.tensors import Shape
from smoe_profiles.trace import Trace, TraceLayer, read_layers
from smoe_profiles.workers import LocalWorkers, Workers

SHARD = "tables-shard"
LINEAR = "linear"
PROCESS_WORK = 1 << 25
"""Activations that are worth a process of their own, which takes a second to start."""

PROCESS_BYTES = 1 << 25
"""Bytes of shards that are."""

CHUNK_LAYERS = 10
"""Most layers of a task where there are several workers: so much is lost with one, and progress takes such steps."""

ALONE = LocalWorkers()

Progress = Callable[[int], None]


def check_traces(traces: Sequence[Trace]) -> None:
    """Raises InputError for traces that cannot be counted together, ImpossibleError for ones that cannot be at all."""
    for one, other in combinations(traces, 2):
        if not same_model(one.artefact.model, other.artefact.model) or one.layers != other.layers:
            sides = [f"{describe_identity(trace.artefact.model)}, {len(trace.layers)} layers" for trace in (one, other)]
            raise InputError(f"{one.artefact.path} is of {sides[0]}, but {other.artefact.path} of {sides[1]}.")
        if one.artefact.id == other.artefact.id:
            raise InputError(f"{one.artefact.path} and {other.artefact.path} are the same trace; name it once.")
    for trace in traces:
        zero = [layer.label for layer in trace.layers if layer.num_zero]
        if zero:
            raise ImpossibleError(
                f"{trace.artefact.path} has zero experts (num_zero, layers {', '.join(zero)}); "
                "tables of such models cannot be made yet."
            )


def write_tables(
    folder: Path,
    traces: Sequence[Trace],
    model: Model | None,
    seed: int,
    progress: Progress,
    *,
    min_count: int = 1,
    workers: Workers = ALONE,
) -> dict[str, Any]:
    """Write every table of some traces of one model into `folder`; progress(layers) as they are done.

    model: whose input embedding gives neighbours; None: ids never seen take popularity. min_count: ids that occur less
    often count as never seen. workers: who counts layers; they must see traces and folder under the same paths.
    Returns the parameters for the manifest. Raises InputError if the fit or validation part is empty.
    Memory, a process: 8 S E bytes of S counted ids, 4 E^3 of the 2-gram, and one row group, whatever the rows.
    """
    check_traces(traces)
    with _scratch(folder, [trace.artefact for trace in traces], workers) as scratch:
        survey = survey_rows(traces, scratch, Share(), _vocabulary(traces), seed)
        counted = _write_vocabulary(folder / VOCABULARY, survey.occurrences, min_count, model)
        _write_counted(folder, survey, counted, scratch, workers, progress, whole=True)
        add_records([trace.artefact.path / LINEAR for trace in traces], folder / LINEAR)
    return _parameters(survey, seed) | _choices(model, min_count)


def write_shard(
    folder: Path, traces: Sequence[Trace], share: Share, seed: int, progress: Progress, *, workers: Workers = ALONE
) -> dict[str, Any]:
    """Write one shard of `write_tables`: the same files, of the share's rows alone, with nothing dropped.

    The early gate's record, which is of whole traces, goes with the first shard. Returns the parameters.
    """
    check_traces(traces)
    with _scratch(folder, [trace.artefact for trace in traces], workers) as scratch:
        survey = survey_rows(traces, scratch, share, _vocabulary(traces), seed)
        save_arrays(folder / VOCABULARY, {"occurrences": survey.occurrences})
        counted = np.flatnonzero(survey.occurrences.any(axis=0)).astype(np.uint32)
        _write_counted(folder, survey, counted, scratch, workers, progress, whole=False)
        if share.number == 1:
            add_records([trace.artefact.path / LINEAR for trace in traces], folder / LINEAR)
    return _parameters(survey, seed) | {"shard": asdict(share)}


def merge_shards(
    folder: Path,
    shards: Sequence[Artefact],
    model: Model | None,
    progress: Progress,
    *,
    min_count: int = 1,
    workers: Workers = ALONE,
) -> dict[str, Any]:
    """Add all shards up into the tables of the whole. shards: in order, as `order_shards` gives them."""
    layers, vocab = read_layers(shards[0])
    paths = [shard.path for shard in shards]
    counted_ids: dict[str, Shape] = {"occurrences": ("I64", len(FIT_PARTS), vocab)}
    occurrences = np.sum([load_arrays(path / VOCABULARY, counted_ids)["occurrences"] for path in paths], axis=0)
    counted = _write_vocabulary(folder / VOCABULARY, occurrences, min_count, model)
    rows = sum(shards[0].parameters["rows"].values())
    with _scratch(folder, shards, workers) as scratch:
        tasks = [
            (folder, scratch, paths, layers, index, counted, occurrences.shape[1], rows) for index in range(len(layers))
        ]
        size = sum(file["bytes"] for shard in shards for file in shard.manifest["files"].values())
        (workers if size >= PROCESS_BYTES else ALONE).run(_merge_layer, tasks, lambda _: progress(1))
    merge_samples(folder / "samples.parquet", paths, layers)
    add_records([path / LINEAR for path in paths], folder / LINEAR)
    return _of_the_whole(shards[0]) | _choices(model, min_count)


def order_shards(shards: Sequence[Artefact]) -> list[Artefact]:
    """The shards by number. What they are is read from their manifests, not from their names.

    Raises InputError where one is missing, stands twice, or is of other traces, parameters or model.
    """
    by_number: dict[int, Artefact] = {}
    first = shards[0]
    for shard in shards:
        number, of = _share(shard).number, _share(shard).of
        if of != _share(first).of:
            raise InputError(f"{shard.path} is one of {of} shards, {first.path} one of {_share(first).of}.")
        if number in by_number:
            raise InputError(f"{shard.path} and {by_number[number].path} are both shard {number} of {of}.")
        by_number[number] = shard
        differing = _difference(first, shard)
        if differing:
            raise InputError(f"{shard.path} and {first.path} differ in {differing}; they are not shards of one whole.")
    missing = [str(number) for number in range(1, _share(first).of + 1) if number not in by_number]
    if missing:
        raise InputError(f"{first.path.parent} lacks shard {', '.join(missing)} of {_share(first).of}.")
    return [by_number[number] for number in sorted(by_number)]


def _share(shard: Artefact) -> Share:
    try:
        share = Share(**shard.parameters["shard"])
        if 1 <= share.number <= share.of:
            return share
    except (KeyError, TypeError):
        pass
    raise InputError(f"{shard.record / 'manifest.json'} does not say which shard it is.")


def _difference(one: Artefact, other: Artefact) -> str | None:
    """The first thing in which two manifests differ that shards of one whole have in common."""
    sides = [
        {"traces": shard.manifest["parents"], "model": shard.model, "seed": shard.manifest.get("seed")}
        | _of_the_whole(shard)
        for shard in (one, other)
    ]
    return next((key for key in sides[0] | sides[1] if sides[0].get(key) != sides[1].get(key)), None)


def _of_the_whole(shard: Artefact) -> dict[str, Any]:
    return {key: value for key, value in shard.parameters.items() if key != "shard"}


def _vocabulary(traces: Sequence[Trace]) -> int:
    return max(trace.vocab_size for trace in traces)


@contextmanager
def _scratch(folder: Path, read: Sequence[Artefact], workers: Workers) -> Iterator[Path]:
    """A folder inside the staging folder for what is read again; gone with its caller.

    read: what the workers read; every machine must see both. Raises MachineError if one does not.
    """
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH}scratch-", dir=folder) as name:
        workers.everywhere(_check_sight, Path(name), {artefact.record: artefact.id for artefact in read})
        yield Path(name)


def _check_sight(scratch: Path, read: dict[Path, str]) -> None:
    missing = [record for record, known in read.items() if not _is_there(record / "manifest.json", known)]
    if missing or not scratch.is_dir():
        raise MachineError(
            f"node {socket.gethostname()} does not see {missing[0] if missing else scratch.parent.parent}: workers "
            "read traces and write tables, so all need one file system; or count with --shard, then --merge."
        )


def _is_there(manifest: Path, known: str) -> bool:
    return manifest.is_file() and file_hash(manifest) == known


def _parameters(survey: Survey, seed: int) -> dict[str, Any]:
    """What the manifest says of the whole traces, alike in all shards."""
    return {
        "layers": [asdict(layer) for layer in survey.traces[0].layers],
        "vocab_size": survey.occurrences.shape[1],
        "rows": survey.rows,
        "sources": survey.sources,
        "seed": seed,
        "block_rows": BLOCK_ROWS,
        "blocks": {part: len(np.unique(survey.samples[part].block)) for part in FIT_PARTS},
    }


def _choices(model: Model | None, min_count: int) -> dict[str, Any]:
    return {"neighbours": "embedding" if model else "popularity", "min_count": min_count}


def _write_vocabulary(path: Path, occurrences: Int64Array, min_count: int, model: Model | None) -> UInt32Array:
    """Occurrences and neighbours; ids that are rarer than min_count stand there as never seen. Returns the others."""
    kept = occurrences.sum(axis=0) >= max(min_count, 1)
    embedding = StoredEmbedding(*input_embedding(model)) if model else None
    arrays = {"occurrences": occurrences * kept, "neighbour": nearest_neighbours(embedding, kept)}
    save_arrays(path, arrays)
    return np.flatnonzero(kept).astype(np.uint32)


def _write_counted(
    folder: Path,
    survey: Survey,
    counted: UInt32Array,
    scratch: Path,
    workers: Workers,
    progress: Progress,
    *,
    whole: bool,
) -> None:
    """Every layer's files, and the samples, which take a column from each layer."""
    survey.facts.arrange(survey.runs(), counted, survey.occurrences.shape[1])
    samples = share_samples(survey)
    layers = survey.traces[0].layers
    work = (survey.stop - survey.first) * sum(layer.top_k for layer in layers)
    chunks = _chunks(len(layers), min(workers.count, work // PROCESS_WORK + 1))
    task = survey, counted, samples, scratch, folder, whole
    experts: list[npt.NDArray[Any]] = []
    if len(chunks) == 1:
        for rows in _count_chunk(chunks[0], *task):
            experts.append(rows)
            progress(1)
    else:
        found = workers.run(_list_chunk, [(chunk, *task) for chunk in chunks], lambda rows: progress(len(rows)))
        experts = [rows for chunk in found for rows in chunk]
    write_samples(folder / "samples.parquet", survey, samples, experts)


def _chunks(layers: int, jobs: int) -> list[range]:
    """Equal runs of at least two layers: each reads the two before it as well, so that none is read a third time."""
    wanted = max(jobs, -(-layers // CHUNK_LAYERS)) if jobs > 1 else 1
    count = max(min(wanted, layers // 2), 1)
    edges = [layers * number // count for number in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def _count_chunk(
    numbers: range,
    survey: Survey,
    counted: UInt32Array,
    samples: SampleRows,
    scratch: Path,
    folder: Path,
    whole: bool,
) -> Iterator[npt.NDArray[Any]]:
    with tempfile.TemporaryDirectory(dir=scratch) as own:
        write = partial(_write_aside, folder, Path(own), whole)
        yield from count_layers(survey, numbers, counted, samples.row, Path(own), write)


def _list_chunk(*task: Any) -> list[npt.NDArray[Any]]:
    return list(_count_chunk(*task))


def _write_aside(folder: Path, scratch: Path, whole: bool, layer: TraceLayer, counts: LayerCounts) -> None:
    """A layer's files, moved into `folder` when they are whole: a worker given up for lost may still be writing."""
    with tempfile.TemporaryDirectory(dir=scratch) as own:
        write_layer(Path(own), layer, counts, whole=whole)
        for path in Path(own).iterdir():
            path.replace(folder / path.name)


def _merge_layer(
    folder: Path,
    scratch: Path,
    shards: Sequence[Path],
    layers: Sequence[TraceLayer],
    index: int,
    counted: UInt32Array,
    vocab: int,
    rows: int,
) -> None:
    counts, slot = empty_counts(layers, index, counted, rows), token_slots(counted, vocab)
    for shard in shards:
        add_written(counts, shard, layers[index], slot)
    _write_aside(folder, scratch, True, layers[index], counts)
