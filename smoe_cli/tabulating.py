"""What smoe build-tables does: traces into tables/, a share of their rows into a shard, all shards into tables/."""

import re
from pathlib import Path
from typing import Any

from smoe_cli.console import Console
from smoe_cli.errors import UsageError
from smoe_cli.folder import TABLES, model_of
from smoe_profiles.artefact import Artefact, check_target, open_artefact, publish
from smoe_profiles.errors import InputError
from smoe_profiles.models import Model, is_unknown
from smoe_profiles.table_rows import Share
from smoe_profiles.table_writer import SHARD, check_traces, merge_shards, order_shards, write_shard, write_tables
from smoe_profiles.trace import Trace, open_trace
from smoe_profiles.workers import Workers


def parse_share(text: str) -> Share:
    """`i/n`, from 1 to n. Raises UsageError for anything else."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text)
    share = Share(int(found[1]), int(found[2])) if found else None
    if share is None or share.number > share.of:
        raise UsageError(f"--shard {text!r}: i/n is meant, the i-th of n shards, i from 1 to n.")
    return share


def shard_path(folder: Path, share: Share) -> Path:
    return folder / f"{TABLES}-{share.number}-of-{share.of}"


def open_traces(paths: list[Path], *, hashes: bool) -> list[Trace]:
    """Traces that can be counted together, opened."""
    traces = [open_trace(path, hashes=hashes) for path in paths]
    check_traces(traces)
    return traces


def build_whole(
    traces: list[Trace],
    folder: Path,
    model: str | None,
    *,
    seed: int,
    min_count: int,
    workers: Workers,
    force: bool,
    console: Console,
) -> dict[str, Any]:
    """Count traces into tables/. Returns what was written."""
    target = folder / TABLES
    check_target(target, force=force)
    artefacts = [trace.artefact for trace in traces]
    named = _named(artefacts)
    found = _model(named, folder, model, _location(artefacts), console, ids=any(one.has_token_ids for one in traces))
    with (
        publish(target, TABLES, parameters={}, model=named.model, seed=seed, parents=artefacts, force=force) as draft,
        console.progress("tables", len(traces[0].layers), "layers") as advance,
    ):
        draft.parameters |= write_tables(draft.path, traces, found, seed, advance, min_count=min_count, workers=workers)
        written = dict(draft.parameters)
    return {"path": str(target), **written}


def build_shard(
    traces: list[Trace], folder: Path, share: Share, *, seed: int, workers: Workers, force: bool, console: Console
) -> dict[str, Any]:
    """Count a share of the traces' rows into tables-i-of-n/. Returns what was written."""
    target = shard_path(folder, share)
    check_target(target, force=force)
    artefacts = [trace.artefact for trace in traces]
    with (
        publish(
            target, SHARD, parameters={}, model=_named(artefacts).model, seed=seed, parents=artefacts, force=force
        ) as draft,
        console.progress("tables", len(traces[0].layers), "layers") as advance,
    ):
        draft.parameters |= write_shard(draft.path, traces, share, seed, advance, workers=workers)
        draft.run["model"] = _location(artefacts)
        written = dict(draft.parameters)
    return {"path": str(target), **written}


def merge_shards_of(
    folder: Path,
    model: str | None,
    *,
    seed: int,
    min_count: int,
    hashes: bool,
    workers: Workers,
    force: bool,
    console: Console,
) -> dict[str, Any]:
    """Add up every shard in `folder` into tables/. Returns what was written.

    Raises InputError if there is none, one is missing or stands twice, or they are not of one whole; UsageError for a
    seed that is not theirs.
    """
    target = folder / TABLES
    check_target(target, force=force)
    paths = sorted(path for path in folder.glob(f"{TABLES}-*-of-*") if path.is_dir())
    if not paths:
        raise InputError(f"{folder} holds no shards; make them with smoe build-tables --shard i/n.")
    shards = order_shards([open_artefact(path, SHARD, hashes=hashes) for path in paths])
    if seed and seed != shards[0].manifest["seed"]:
        raise UsageError(f"--seed {seed}: these shards were made with seed {shards[0].manifest['seed']}; leave it out.")
    found = _model(shards[0], folder, model, _location(shards), console, ids=True)
    layers = shards[0].parameters["layers"]
    with (
        publish(
            target,
            TABLES,
            parameters={},
            model=shards[0].model,
            seed=shards[0].manifest["seed"],
            parents=_parents(shards[0]),
            force=force,
        ) as draft,
        console.progress("adding", len(layers), "layers") as advance,
    ):
        draft.parameters |= merge_shards(draft.path, shards, found, advance, min_count=min_count, workers=workers)
        written = dict(draft.parameters)
    return {"path": str(target), "shards": len(shards), **written}


def _named(artefacts: list[Artefact]) -> Artefact:
    """The artefact that says most of its model: imports may know its layers only."""
    return next((artefact for artefact in artefacts if not is_unknown(artefact.model)), artefacts[0])


def _location(artefacts: list[Artefact]) -> str | None:
    """Where the first run that knew its model found it."""
    return next((str(name) for artefact in artefacts if (name := artefact.run().get("model"))), None)


def _model(
    artefact: Artefact, folder: Path, wanted: str | None, located: str | None, console: Console, *, ids: bool
) -> Model | None:
    """The model whose embedding gives neighbours: the one named, or where the trace was recorded from.

    None for an import made without the model's weights: nothing is downloaded for a table of neighbours.
    ids: whether the rows have token ids.
    """
    if not ids:
        console.note("the trace has no token ids: experts can be placed, but no token foretells its experts")
    if wanted or not is_unknown(artefact.model):
        return model_of(artefact, folder, wanted or located)
    if ids:
        console.note("no model's weights are here: ids never seen take popularity, unless --model FOLDER is given")
    return None


def _parents(shard: Artefact) -> list[Artefact]:
    """The traces a shard was made from, by kind and id: they need not lie here."""
    return [
        Artefact(shard.path, shard.record, {"kind": parent["kind"]}, parent["id"])
        for parent in shard.manifest["parents"]
    ]
