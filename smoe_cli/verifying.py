"""What smoe verify does: prove that what regroup wrote for a placement is the same model."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from smoe_cli.checkpoint.rewrite import expected_rewrite
from smoe_cli.checkpoint.verify import compare_tensors
from smoe_cli.console import Console
from smoe_cli.folder import CHECKPOINT, MAP, TRACE, model_of, sibling
from smoe_cli.layer_numbers import parse_layers
from smoe_cli.placement import PLACEMENT_FILE, RUNTIME, Placement, read_placement
from smoe_profiles.artefact import Artefact, open_artefact
from smoe_profiles.datasets import find_file
from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.models import Model, find_model, map_hash, recorded_map
from smoe_profiles.tensors import open_checkpoint, read_json, read_shard

if TYPE_CHECKING:  # torch is imported only where a model is run
    from smoe_cli.checkpoint.comparison import LayerReport

PROMPT_TOKENS = 128
PROMPTS = 8

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Trial:
    """What models are run on. input_ids: [B, S], from `source`; only: the MoE layers to compare, None: all there is."""

    input_ids: IntArray
    source: str
    only: list[int] | None


def verify_model(
    chosen: Artefact,
    folder: Path,
    model_name: str | None,
    dataset: str | None,
    *,
    tensors_only: bool,
    layers: str | None,
    hashes: bool,
    console: Console,
) -> dict[str, Any]:
    """Check the checkpoint and the map that regroup wrote for a placement.

    layers: the MoE layers to run, such as 1-4,9; None: the whole model. Returns {passed, failures, ...} of the
    checkpoint, with the map's under `map` where there are both, else of the one there is. Raises InputError if nothing
    was written, UsageError if the model has no such layer.
    """
    checkpoint, mapped = sibling(chosen.path, CHECKPOINT), sibling(chosen.path, MAP)
    if not checkpoint.exists() and not mapped.exists():
        raise InputError(f"neither {checkpoint} nor {mapped} exists; write one with smoe regroup.")
    if dataset:
        find_file(dataset)
    model = model_of(chosen, folder, model_name)
    trial = None
    if not tensors_only:
        only = None if layers is None else parse_layers(layers, [layer.id for layer in model.spec.layers])
        _check_runs(model, only, checkpoint=checkpoint.exists(), mapped=mapped.exists())
        trial = Trial(*_prompts(model, dataset, folder), only)
    found = []
    if checkpoint.exists():
        found.append(_verify_checkpoint(_open(checkpoint, hashes, console), chosen, model, trial, console))
    if mapped.exists():
        found.append(_verify_map(open_artefact(mapped, MAP, hashes=hashes), chosen, model, trial, console))
    for document in found:
        document["passed"] = not document["failures"]
    if len(found) == 2:
        found[0]["map"] = found[1]
        found[0]["passed"] = all(document["passed"] for document in found)
    return found[0]


def _open(checkpoint: Path, hashes: bool, console: Console) -> Artefact:
    if not hashes:
        return open_artefact(checkpoint, CHECKPOINT)
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    with console.progress("hashing", size, "bytes") as advance:
        return open_artefact(checkpoint, CHECKPOINT, hashes=True, progress=advance)


def _verify_checkpoint(
    written: Artefact, chosen: Artefact, model: Model, trial: Trial | None, console: Console
) -> dict[str, Any]:
    placement = read_placement(written)
    before = recorded_map(model.local_folder(), *placement.physical_to_logical.shape)
    relative = placement.physical_to_logical  # slots to experts of the model the placement was made for
    if before is not None:
        relative = np.take_along_axis(np.argsort(before, axis=1), relative, axis=1)
    failures = _record_failures(written, chosen, placement, relative)
    rewrite = expected_rewrite(model, relative)
    with console.progress("comparing tensors", model.nbytes, "bytes") as advance:
        try:
            failures += compare_tensors(rewrite, open_checkpoint(written.path), advance)
        except InputError as error:  # its index or a header, not an input of ours
            failures.append(str(error))
    routing = None
    if trial and not failures:
        routing = _verify_routing(model, find_model(str(written.path)), relative, trial, console)
        failures = routing.pop("failures")
    return {
        "path": str(written.path),
        "layout": CHECKPOINT,
        "tensors": sum(1 for _ in rewrite.files),
        "bytes": model.nbytes,
        "failures": failures,
        "routing": routing,
    }


def _record_failures(written: Artefact, chosen: Artefact, placement: Placement, relative: IntArray) -> list[str]:
    """Whether a folder's own record is the placement it claims. relative: its map as the placement would have it."""
    failures = []
    if written.parent_id("placement") != chosen.id:
        failures.append(f"it was made from another version of {chosen.path.name}; run smoe regroup --force")
    elif map_hash(relative) != read_placement(chosen).map_sha256:
        failures.append(f"{PLACEMENT_FILE} holds another map than {chosen.path}")
    shard = read_shard(written.record / RUNTIME)
    recorded = next((shard.read(tensor) for tensor in shard.tensors if tensor.name == "physical_to_logical"), b"")
    if recorded != placement.physical_to_logical.astype("<u2").tobytes():
        failures.append(f"{RUNTIME} and {PLACEMENT_FILE} record different maps")
    if shard.metadata.get("layout") != written.kind:
        failures.append(f"{RUNTIME} says layout {shard.metadata.get('layout')!r}; it lies in a {written.kind} folder")
    return failures


def _verify_map(
    written: Artefact, chosen: Artefact, model: Model, trial: Trial | None, console: Console
) -> dict[str, Any]:
    """A map rewrites nothing: check that it is the placement's own, for this model, and right when it is applied."""
    placement = read_placement(written)
    failures = _record_failures(written, chosen, placement, placement.physical_to_logical)
    routing = None
    if trial and not failures:
        routing = _run_mapped(model, placement.physical_to_logical, trial, console)
        failures = routing.pop("failures")
    return {"path": str(written.path), "layout": MAP, "failures": failures, "routing": routing}


def _run_mapped(model: Model, physical_to_logical: IntArray, trial: Trial, console: Console) -> dict[str, Any]:
    from smoe_cli.checkpoint.comparison import layer_failures
    from smoe_cli.checkpoint.loaded import compare_mapped

    count = len(trial.only or model.spec.layers)
    with console.progress("applying the map", count, "layers") as advance:
        layers = compare_mapped(model, physical_to_logical, trial.input_ids, advance, trial.only)
    return _summary(layers, trial) | {"failures": layer_failures(layers)}


def _verify_routing(model: Model, written: Model, relative: IntArray, trial: Trial, console: Console) -> dict[str, Any]:
    """Run both: whole and as transformers loads them where memory allows, else one decoder layer at a time."""
    from smoe_cli.checkpoint.layerwise import compare_routing
    from smoe_cli.checkpoint.loaded import compare_loaded

    whole = _is_run_whole(model, trial.only)
    decoder_layers = max(trial.only) + 1 if trial.only else model.spec.num_hidden_layers
    count = len(model.spec.layers) if whole else decoder_layers
    with console.progress("comparing layers", count, "layers") as advance:
        if whole:
            report = compare_loaded(model, written, relative, trial.input_ids, advance)
        else:
            report = compare_routing(model, written, relative, trial.input_ids, advance, trial.only)
    return _summary(report.layers, trial) | {
        "logit_max_error": report.logit_max_error,
        "logits_excused": report.logits_excused,
        "generated": report.generated,
        "failures": report.failures(),
    }


def _is_run_whole(model: Model, only: list[int] | None) -> bool:
    """Whether a model and its copy are loaded whole; some layers alone never need that."""
    from smoe_cli.checkpoint.loaded import fits_in_memory

    return only is None and fits_in_memory(model, 2)


def _check_runs(model: Model, only: list[int] | None, *, checkpoint: bool, mapped: bool) -> None:
    """Raises ImpossibleError, before the tensors are read, if a model cannot be run as its checkpoint or map needs."""
    from smoe_cli.checkpoint.layerwise import LayerLoader
    from smoe_cli.checkpoint.loaded import fits_in_memory

    config = read_json(model.local_folder() / "config.json")
    settings = config.get("quantization_config")
    if settings:
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        raise ImpossibleError(
            f"{model.name} is quantised ({method}), and verify runs models in float32 only; "
            "smoe verify --tensors-only proves its bytes."
        )
    if (checkpoint and not _is_run_whole(model, only)) or (mapped and not fits_in_memory(model, 1)):
        LayerLoader(model).check_names()


def _summary(layers: "list[LayerReport]", trial: Trial) -> dict[str, Any]:
    return {
        "prompts": trial.source,
        "tokens": int(trial.input_ids.size),
        "ties": sum(layer.ties for layer in layers),
        "layers": [asdict(layer) for layer in layers],
    }


def _prompts(model: Model, dataset: str | None, folder: Path) -> tuple[IntArray, str]:
    """Prompts [B, S] of equal length: from the data set given, else the trace's held-out rows, else builtin text.

    Also says which.
    """
    rows = [] if dataset else _heldout_rows(folder)
    source = "held-out rows of the trace"
    if not rows:
        from smoe_profiles.capture.loading import load_tokenizer
        from smoe_profiles.datasets import BUILTIN, read_documents

        source = dataset or BUILTIN
        documents = read_documents(source, source, load_tokenizer(model), model.spec.vocab_size)
        rows = [document.token_ids for _, document in zip(range(PROMPTS), documents, strict=False)]
        if len(rows) == 1:
            rows = [rows[0][i : i + PROMPT_TOKENS] for i in range(0, len(rows[0]), PROMPT_TOKENS)][:PROMPTS]
    if not rows:
        raise InputError(f"dataset {source} is empty; verify needs at least one prompt.")
    length = min(PROMPT_TOKENS, max(len(row) for row in rows))
    padded = np.zeros((len(rows), length), np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row[:length]
    return padded, source


def _heldout_rows(folder: Path) -> list[npt.NDArray[np.uint32]]:
    """The first held-out sequences of the folder's trace, if it has any."""
    from smoe_profiles.trace import open_trace

    if not (folder / TRACE).exists():
        return []
    trace = open_trace(folder / TRACE)
    if not trace.rows("heldout"):
        return []
    facts = trace.read(["sequence", "token_id"], "heldout")
    sequences = np.unique(facts["sequence"])[:PROMPTS]
    return [facts["token_id"][facts["sequence"] == sequence] for sequence in sequences]
