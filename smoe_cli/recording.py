"""What smoe profile does: data sets through a model into trace/, and what is known of a model beforehand."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from smoe_cli.console import Console
from smoe_cli.errors import UsageError
from smoe_profiles.artefact import publish
from smoe_profiles.choices import Dtype, Level, Pack, SplitBy, SplitMode
from smoe_profiles.errors import InputError
from smoe_profiles.models import Model, model_identity


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
    split: SplitMode
    split_by: SplitBy

    def parameters(self) -> dict[str, Any]:
        """What the trace's manifest says of the run; paths and devices are no part of it."""
        return {
            "datasets": [{"spec": Path(spec).name, "source": source} for spec, source in self.datasets],
            "seq_len": self.seq_len,
            "pack": self.pack.value,
            "max_tokens": self.max_tokens,
            "dtype": self.dtype.value,
            "split": self.split.value,
            "split_by": self.split_by.value,
        }


def name_sources(specs: list[str], sources: list[str]) -> list[str]:
    """A name for each data set: the one given, or its file's. Raises UsageError if they do not match up."""
    if sources and len(sources) != len(specs):
        raise UsageError(f"{len(sources)} --source for {len(specs)} --dataset; give one for each, or none.")
    return sources or [Path(spec.partition("#")[0]).name.split(".")[0] for spec in specs]


def describe_model(model: Model) -> dict[str, Any]:
    """What is known of a model without loading it: layers, router, memory."""
    first = model.spec.layers[0]
    ids = [layer.id for layer in model.spec.layers]
    return {
        "model": model.name,
        "answered_from": model.described_by,
        "here": model.folder is not None,
        "family": model.spec.family.model_type,
        "layers": model.spec.num_hidden_layers,
        "moe_layers": f"{len(ids)} ({ids[0]} to {ids[-1]})",
        "experts": first.num_experts,
        "top_k": first.top_k,
        "router_rule": first.rule,
        "memory_bytes": model.nbytes,
        "memory": f"{model.nbytes / 1e9:.1f} GB of weights as stored, {model.nbytes * 2 / 1e9:.1f} GB in float32",
    }


def record_trace(plan: RecordingPlan, target: Path, *, force: bool, console: Console) -> dict[str, Any]:
    """Run the plan and publish trace/. Everything that can be refused is refused before the model loads."""
    from smoe_profiles.capture.profile import LoadOptions, load_model, load_tokenizer, record, trace_layers
    from smoe_profiles.datasets import limit_tokens, read_documents
    from smoe_profiles.split import Document, assign_parts
    from smoe_profiles.trace_writer import TraceWriter

    identity = model_identity(plan.model)
    tokenize = load_tokenizer(plan.model)

    def documents() -> Iterator[Document]:
        for spec, source in plan.datasets:
            yield from read_documents(spec, source, tokenize, plan.model.spec.vocab_size)

    stream = limit_tokens(documents(), plan.max_tokens)
    first = next(stream, None)
    if first is None:
        raise InputError(
            f"dataset {', '.join(spec for spec, _ in plan.datasets)} is empty; there is nothing to profile."
        )
    console.note(f"profiling {plan.model.name} on {', '.join(source for _, source in plan.datasets)}")
    loaded = load_model(plan.model, LoadOptions(plan.dtype.value, plan.device, plan.device_map))
    layers, sources = trace_layers(plan.model), list(dict.fromkeys(source for _, source in plan.datasets))
    with publish(target, "trace", parameters=plan.parameters(), model=identity, force=force) as draft:
        writer = TraceWriter(draft.path, layers, sources)
        assigned = assign_parts(chain([first], stream), plan.split, plan.split_by)
        with console.progress("profiling", plan.max_tokens, "tokens") as advance:
            record(
                plan.model,
                loaded,
                assigned,
                writer,
                sources=sources,
                pack=plan.pack,
                seq_len=plan.seq_len,
                progress=advance,
            )
        writer.close()
        draft.run["model"] = plan.model.location
        draft.parameters |= {
            "level": Level.TOKEN.value,
            "ordered": True,
            "layers": [asdict(layer) for layer in layers],
            "vocab_size": plan.model.spec.vocab_size,
            "rows": writer.rows,
        }
    return {"path": str(target), "model": plan.model.name, "rows": writer.rows, "layers": len(layers)}
