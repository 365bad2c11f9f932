"""What smoe profile does: data sets through a model into trace/, and what is known of a model beforehand."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smoe_cli.console import Console
from smoe_cli.errors import UsageError
from smoe_profiles.artefact import Draft, check_target, library_versions, publish, staging_path
from smoe_profiles.choices import BATCH_TOKENS, Dtype, EarlyGate, Level, Pack, SplitBy, SplitMode
from smoe_profiles.datasets import Survey, is_local, limit_tokens, read_documents, survey
from smoe_profiles.errors import ImpossibleError, InputError, MachineError
from smoe_profiles.models import Model, model_identity, readable_size
from smoe_profiles.split import Document, assign_parts

if TYPE_CHECKING:
    from smoe_profiles.capture.processes import Processes


@dataclass(frozen=True)
class RecordingPlan:
    """One profiling run; datasets: (spec, source name) in order."""

    model: Model
    datasets: list[tuple[str, str]]
    seq_len: int
    pack: Pack
    max_tokens: int | None
    dtype: Dtype
    device: str
    device_map: str | None
    tensor_parallel: bool
    decode: int
    chat_template: bool
    early_gate: EarlyGate
    split: SplitMode
    split_by: SplitBy
    order: bool

    def __post_init__(self) -> None:
        if self.decode and self.pack is Pack.WINDOWS:
            raise UsageError("--decode goes on from a document's end; windows have none. Use --pack isolate.")
        if not self.order and self.early_gate is not EarlyGate.NONE:
            raise UsageError("--early-gate is recorded row by row, and --no-order keeps no rows; choose one.")
        if self.tensor_parallel and self.device_map:
            raise UsageError("--tensor-parallel and --device-map are two ways to spread a model; choose one.")

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(source for _, source in self.datasets))

    def parameters(self) -> dict[str, Any]:
        """What the trace's manifest says of the run; paths and devices are no part of it."""
        return {
            "datasets": [{"spec": Path(spec).name, "source": source} for spec, source in self.datasets],
            "seq_len": self.seq_len,
            "pack": self.pack.value,
            "max_tokens": self.max_tokens,
            "dtype": self.dtype.value,
            "decode": self.decode,
            "chat_template": self.chat_template,
            "early_gate": self.early_gate.value,
            "batch_tokens": BATCH_TOKENS,
            "split": self.split.value,
            "split_by": self.split_by.value,
        }

    def documents(self, encode: Callable[[Any], list[int]]) -> Iterator[Document]:
        """All data sets' documents, one set after another; max_tokens is shared out, what one leaves passed on."""
        left = self.max_tokens
        for number, (spec, source) in enumerate(self.datasets):
            share = None if left is None else -(-left // (len(self.datasets) - number))
            stream = read_documents(spec, source, encode, self.model.spec.vocab_size)
            for document in limit_tokens(stream, share):
                left = None if left is None else left - len(document.token_ids)
                yield document


def name_sources(specs: list[str], sources: list[str]) -> list[str]:
    """A name for each data set: the one given, or its file's. Raises UsageError if they do not match up."""
    if sources and len(sources) != len(specs):
        raise UsageError(f"{len(sources)} --source for {len(specs)} --dataset; give one for each, or none.")
    return sources or [Path(spec.partition("#")[0]).name.split(".")[0] for spec in specs]


def describe_model(model: Model) -> dict[str, Any]:
    """What is known of a model without loading it: layers, router, memory."""
    first = model.spec.layers[0]
    return {
        "model": model.name,
        "answered_from": model.described_by,
        "here": model.folder is not None,
        "family": model.spec.family.model_type,
        "layers": model.spec.num_hidden_layers,
        "moe_layers": [layer.id for layer in model.spec.layers],
        "experts": first.num_experts,
        "top_k": first.top_k,
        "router_rule": first.rule,
        "memory_bytes": model.nbytes,
        "memory": f"{model.size} of weights as stored, {readable_size(2 * model.nbytes)} in float32",
    }


def record_trace(plan: RecordingPlan, target: Path, *, force: bool, console: Console) -> dict[str, Any]:
    """Run the plan and publish trace/. Everything that can be refused is refused before the model loads.

    Under torchrun every process comes here; the first one publishes, and alone returns what was written.
    """
    from smoe_profiles.capture.loading import load_tokenizer
    from smoe_profiles.capture.processes import Processes

    processes = Processes.from_environment()
    if processes.first:
        check_target(target, force=force)
    device = processes.device(plan.device)
    _check_device(device)
    identity = model_identity(plan.model)
    encode = load_tokenizer(plan.model, chat=plan.chat_template)
    found = _survey(plan, encode, console if processes.first else Console(quiet=True))
    with processes.joined(device), _shared_draft(plan, target, identity, found, processes, force=force) as draft:
        rows = _record(plan, draft.path, encode, found, device, processes, console)
        if not processes.first:
            return {}
        _finish(plan, draft, rows, processes)
    return {
        "path": str(target),
        "model": plan.model.name,
        "level": draft.parameters["level"],
        "rows": rows,
        "layers": len(plan.model.spec.layers),
    }


def _check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UsageError(
            f"--device {device!r} is none that torch knows; cpu, cuda, cuda:1 and mps are usual."
        ) from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise MachineError(f"--device {device}: torch sees no CUDA device on this machine.")


def describe_run(plan: RecordingPlan, console: Console) -> dict[str, Any]:
    """What the plan would do: the model's layers and memory and, where the model is here, the tokens to run."""
    document = describe_model(plan.model) | {"device": plan.device_map or plan.device}
    if plan.model.folder is not None:
        from smoe_profiles.capture.loading import load_tokenizer

        found = _survey(plan, load_tokenizer(plan.model, chat=plan.chat_template), console)
        document |= {"documents": found and found.documents, "tokens": found and found.tokens}
    return document


def _survey(plan: RecordingPlan, encode: Callable[[Any], list[int]], console: Console) -> Survey | None:
    """Every document read once, where that ends; of a hub data set without a limit, only the first."""
    names = ", ".join(spec for spec, _ in plan.datasets)
    bounded = plan.max_tokens is not None or all(is_local(spec) for spec, _ in plan.datasets)
    console.note(f"reading {names}")
    with console.progress("reading", plan.max_tokens, "tokens") as advance:
        documents = _reported(plan.documents(encode), advance)
        found = survey(documents if bounded else islice(documents, 1))
    if not found.documents:
        raise InputError(f"dataset {names} is empty; there is nothing to profile.")
    return found if bounded else None


def _reported(documents: Iterator[Document], advance: Callable[[int], None]) -> Iterator[Document]:
    for document in documents:
        advance(len(document.token_ids))
        yield document


@contextmanager
def _shared_draft(
    plan: RecordingPlan,
    target: Path,
    identity: dict[str, Any],
    found: Survey | None,
    processes: "Processes",
    *,
    force: bool,
) -> Iterator[Draft]:
    """The staging folder on every process; the first one made it, and publishes it on the way out."""
    parameters = plan.parameters() | {"documents": asdict(found) if found else None}
    key = parameters | {
        "model": identity,
        "processes": processes.count,
        "tensor_parallel": plan.tensor_parallel,
        "order": plan.order,
        "versions": library_versions(),
    }
    if not processes.first:
        processes.wait()
        yield Draft(staging_path(target), staging_path(target), dict(parameters))
        return
    with publish(target, "trace", parameters=parameters, model=identity, force=force, resume=key) as draft:
        processes.wait()
        yield draft


def _part_name(rank: int, processes: "Processes") -> str:
    return "part" if processes.count == 1 else f"part-{rank:02d}"


def _record(
    plan: RecordingPlan,
    folder: Path,
    encode: Callable[[Any], list[int]],
    found: Survey | None,
    device: str,
    processes: "Processes",
    console: Console,
) -> dict[str, int]:
    """Run this process' share; returns the rows of all processes by part."""
    from smoe_profiles.capture.loading import LoadOptions, load_model
    from smoe_profiles.capture.processes import ALONE
    from smoe_profiles.capture.profile import CaptureOptions, record, trace_layers
    from smoe_profiles.trace_writer import TraceWriter

    share = ALONE if plan.tensor_parallel else processes
    scratch = folder / f".rank-{processes.rank:02d}"
    if plan.tensor_parallel and not processes.first:
        scratch.mkdir(exist_ok=True)  # every process runs every batch; what the first one writes is kept
        folder = scratch
    early = plan.early_gate is not EarlyGate.NONE
    writer = TraceWriter(
        folder, trace_layers(plan.model), plan.sources, name=_part_name(share.rank, share), early=early
    )
    if writer.appended and processes.first:
        console.note(f"continuing after {sum(writer.rows.values()):,} recorded rows")
    options = LoadOptions(plan.dtype.value, device, plan.device_map, plan.tensor_parallel)
    console = console if processes.first else Console(quiet=True)
    console.note(f"loading {plan.model.name}, {plan.model.size} of weights, on {plan.device_map or device}")
    loaded = load_model(plan.model, options)
    total = None if found is None else (found.tokens + found.documents * plan.decode) // share.count
    console.note(f"profiling {plan.model.name} on {', '.join(plan.sources)}")
    with console.progress("profiling", total, "tokens") as advance:
        documents = assign_parts(plan.documents(encode), plan.split, plan.split_by)
        capture = CaptureOptions(plan.sources, plan.pack, plan.seq_len, plan.decode, plan.early_gate)
        try:
            record(plan.model, loaded, documents, writer, capture, advance, share)
        except (InputError, ImpossibleError):
            raise
        except BaseException:
            console.note(f"the rows so far are kept in {folder}; the same command goes on from there")
            raise
    writer.close()
    everyone = processes.gather(writer.rows)
    rows = {part: sum(rows[part] for rows in everyone[: share.count]) for part in writer.rows}
    if found and sum(rows.values()) < found.tokens:
        raise InputError(
            f"{sum(rows.values()):,} rows were recorded of {found.tokens:,} tokens; {', '.join(plan.sources)} changed "
            "while it was read. Run it again."
        )
    return rows


def _finish(plan: RecordingPlan, draft: Draft, rows: dict[str, int], processes: "Processes") -> None:
    """What the first process adds when every row is written."""
    from smoe_profiles.capture.profile import linear_path, trace_layers
    from smoe_profiles.levels import reduce_to_counts

    layers = trace_layers(plan.model)
    if not plan.order:
        reduce_to_counts(draft.path, layers)
    if plan.early_gate is not EarlyGate.NONE:
        from smoe_profiles.capture.linear import write_linear

        count = 1 if plan.tensor_parallel else processes.count
        names = [_part_name(rank, processes if count > 1 else type(processes)()) for rank in range(count)]
        write_linear(draft.path / "linear", layers, [linear_path(draft.path, name) for name in names])
    draft.run["model"] = plan.model.location
    draft.parameters |= {
        "level": (Level.TOKEN if plan.order else Level.TOKEN_COUNT).value,
        "ordered": True,
        "layers": [asdict(layer) for layer in layers],
        "vocab_size": plan.model.spec.vocab_size,
        "rows": rows,
    }
