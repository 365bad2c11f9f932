"""What smoe import does: files of another program and a model's layer table into trace/."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoe_cli.console import Console
from smoe_cli.errors import UsageError
from smoe_profiles.artefact import check_unchanged, file_stamp, publish
from smoe_profiles.choices import ImportFormat
from smoe_profiles.importers.detect import read_records
from smoe_profiles.importers.layers import Chosen, choose_layers
from smoe_profiles.importers.records import CountRecords, ReadOptions, Records, TokenRecords
from smoe_profiles.importers.store import Sound, Wanted, count_notes, sound_rows, vocabulary, write_records
from smoe_profiles.models import UNKNOWN_FAMILY, Model, model_identity
from smoe_profiles.tensors import INDEX, SINGLE
from smoe_profiles.trace import UNKNOWN_TOKEN

MAX_SOURCES = 2**15 - 1
"""Traces number their sources with 16 bits."""

ARCHIVE_OPTIONS = ("ids", "axes", "tokens", "weights", "layer_ids", "seq_lens", "triples")


@dataclass(frozen=True)
class ImportPlan:
    """One import; sources: a name for each file."""

    files: list[Path]
    sources: list[str]
    format: ImportFormat
    options: ReadOptions
    wanted: Wanted


def name_files(files: list[Path], sources: list[str]) -> list[str]:
    """A name for each file: the one given, or its own. Raises UsageError if they do not match up, or are too many."""
    if sources and len(sources) != len(files):
        raise UsageError(f"{len(sources)} --source for {len(files)} files; give one for each, or none.")
    names = sources or [path.resolve().name.split(".")[0] for path in files]
    if len(set(names)) > MAX_SOURCES:
        raise UsageError(
            f"{len(set(names))} sources are more than {MAX_SOURCES}; give files a common name by --source."
        )
    return names


def import_trace(plan: ImportPlan, target: Path, *, force: bool, console: Console) -> dict[str, Any]:
    """Read, check and publish trace/. Everything that can be refused is refused before anything is written."""
    console.note(f"reading {_first_of(plan.files)}")
    files = [path for given in plan.files for path in (given.iterdir() if given.is_dir() else [given])]
    stamps = {path: file_stamp(path) for path in files if path.is_file()}
    kind, records = read_records(plan.files, plan.format, plan.options)
    check_unchanged(stamps)
    named = [name for name in ARCHIVE_OPTIONS if getattr(plan.options, name)]
    if named and kind is not ImportFormat.NPZ:
        raise UsageError(f"--{named[0].replace('_', '-')} is for NumPy archives; {plan.files[0]} is of format {kind}.")
    model, where = plan.options.model, _first_of(plan.files)
    chosen = choose_layers(records, model, where)
    sound = sound_rows(records, chosen, where) if isinstance(records, TokenRecords) else None
    vocab_size = vocabulary(records, model.spec.vocab_size if model else None, where)
    notes = [*records.facts.notes, *chosen.notes]
    if isinstance(records, CountRecords):
        notes += count_notes(records, chosen, where)
    console.detail(f"{where} is of format {kind}")
    imported = _imported(kind, records, sound)
    with publish(
        target, "trace", parameters=_parameters(plan), model=identity(model, chosen, vocab_size), force=force
    ) as draft:
        draft.parameters |= write_records(draft.path, records, chosen, sound, plan.sources, plan.wanted)
        draft.parameters |= {"vocab_size": vocab_size, "imported": imported}
        if model is not None:
            draft.run["model"] = model.location
        written = dict(draft.parameters)
    return {
        "path": str(target),
        "model": model.name if model else "unknown model",
        "layers_found": len(chosen.layers),
        "layers_expected": chosen.expected,
        "notes": notes,
        "sources": list(dict.fromkeys(plan.sources)),
        **{key: written[key] for key in ("level", "ordered", "rows", "vocab_size")},
        **imported,
    }


def _first_of(files: list[Path]) -> str:
    return f"{files[0]} and {len(files) - 1} more" if len(files) > 1 else str(files[0])


def _parameters(plan: ImportPlan) -> dict[str, Any]:
    """What the trace's manifest says of the import; paths are no part of it."""
    pairs = zip(plan.files, plan.sources, strict=True)
    return {
        "datasets": [{"spec": path.resolve().name, "source": source} for path, source in pairs],
        "split": plan.wanted.split.value,
        "split_by": plan.wanted.split_by.value,
    }


def _imported(kind: ImportFormat, records: Records, sound: Sound | None) -> dict[str, Any]:
    """Where the rows came from and what became of them. id_space: of the file; what is stored is logical always."""
    facts: dict[str, Any] = {"format": kind.value, "id_space": records.facts.id_space}
    if isinstance(records, CountRecords) or sound is None:
        by_token = "token_id" in records.entries[0] if isinstance(records, CountRecords) else False
        return facts | {"has_weights": False, "has_token_ids": by_token, "rejected": {}, "padding": 0}
    unknown = int((records.token_id[sound.rows] == UNKNOWN_TOKEN).sum())
    return facts | {
        "has_weights": records.weights is not None,
        "has_token_ids": unknown < len(sound.rows),
        "unknown_token_ids": unknown,
        "rejected": {reason.value: entry.rows for reason, entry in sound.rejected.items()},
        "padding": sound.padding,
    }


def identity(model: Model | None, chosen: Chosen, vocab_size: int) -> dict[str, Any]:
    """The traced model's identity: whole where its weights are here, else (a config alone) what its layers say."""
    if (
        model is not None
        and model.folder is not None
        and any((model.folder / name).exists() for name in (INDEX, SINGLE))
    ):
        return model_identity(model)
    layers = [
        {
            "id": layer.id,
            "num_experts": layer.num_experts,
            "top_k": layer.top_k,
            "num_groups": 1,
            "rule": UNKNOWN_FAMILY,
        }
        for layer in chosen.layers
    ]
    return {
        "family": model.spec.family.model_type if model else UNKNOWN_FAMILY,
        "vocab_size": vocab_size,
        "layers": model.spec.layer_table() if model else layers,
        "router_sha256": None,
        "map_sha256": None,
        "tokenizer_sha256": None,
    }
