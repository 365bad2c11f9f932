"""smoe profile: run prompts through a model and record which experts every token used."""

from typing import Annotated, Any

import typer

from smoe_cli.options import Common, DryRunOption, ForceOption
from smoe_profiles.choices import Dtype, EarlyGate, Pack, SplitBy, SplitMode

BUILTIN_TOKENS = 200_000


def profile(
    common: Common,
    model: Annotated[str, typer.Option("--model", help="Short name (see smoe models), hub id or folder.")],
    dataset: Annotated[
        list[str] | None,
        typer.Option("--dataset", help="builtin, .jsonl, .txt, .parquet, FILE.npz#key or hub id; repeatable."),
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option("--source", help="A name for each --dataset, in order; default: its file name.")
    ] = None,
    seq_len: Annotated[int, typer.Option("--seq-len", min=1, help="Longest row through the model, in tokens.")] = 512,
    pack: Annotated[
        Pack, typer.Option("--pack", help="isolate: no document sees another; windows: documents joined and cut.")
    ] = Pack.ISOLATE,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            min=1,
            help=f"Stop after so many tokens, shared over data sets; default: all (builtin: {BUILTIN_TOKENS}).",
        ),
    ] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Format of the weights; auto: as stored.")] = Dtype.AUTO,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, mps.")] = "cpu",
    device_map: Annotated[
        str | None,
        typer.Option("--device-map", help="Spread a large model over devices, e.g. auto (needs accelerate)."),
    ] = None,
    tensor_parallel: Annotated[
        bool, typer.Option("--tensor-parallel", help="Split each layer over the processes of torchrun.")
    ] = False,
    decode: Annotated[
        int, typer.Option("--decode", min=0, help="Generate up to so many tokens after each document, and record them.")
    ] = 0,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Put texts or messages into the model's chat template.")
    ] = False,
    early_gate: Annotated[
        EarlyGate, typer.Option("--early-gate", help="Also ask each router before attention, on these rows.")
    ] = EarlyGate.NONE,
    split: Annotated[
        SplitMode, typer.Option("--split", help="hash: fit, validation and held-out; fit: no held-out; heldout: only.")
    ] = SplitMode.HASH,
    split_by: Annotated[
        SplitBy, typer.Option("--split-by", help="hash of a document's ids, or order: even fit, odd held-out.")
    ] = SplitBy.HASH,
    no_order: Annotated[
        bool, typer.Option("--no-order", help="Store counts by token id only, so that no prompt can be read back.")
    ] = False,
    force: ForceOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Record which experts a model's tokens use: writes trace/."""
    from smoe_cli.folder import TRACE, step_after_trace
    from smoe_cli.recording import RecordingPlan, describe_run, name_sources, record_trace
    from smoe_profiles.artefact import check_target
    from smoe_profiles.datasets import find_file
    from smoe_profiles.models import find_model

    target = common.dir / TRACE
    specs = dataset or ["builtin"]
    sources = name_sources(specs, source or [])
    for spec in specs:
        find_file(spec)
    plan = RecordingPlan(
        model=find_model(model, download=not dry_run),
        datasets=list(zip(specs, sources, strict=True)),
        seq_len=seq_len,
        pack=pack,
        max_tokens=max_tokens or (BUILTIN_TOKENS if specs == ["builtin"] else None),
        dtype=dtype,
        device=device,
        device_map=device_map,
        tensor_parallel=tensor_parallel,
        decode=decode,
        chat_template=chat_template,
        early_gate=early_gate,
        split=split,
        split_by=split_by,
        order=not no_order,
    )
    if dry_run:
        document = describe_run(plan, common.console)
        common.console.result(document, lambda: _show_model(common, document))
        check_target(target, force=force)  # the plan is shown before the run itself would be refused
        return
    document = record_trace(plan, target, force=force, console=common.console)
    if not document:  # of several processes, one speaks
        return
    words, where = step_after_trace(target, document["level"], document["rows"]["fit"])
    common.console.result(document, lambda: _show(common, document), common.next(*words, where=where))


def _show(common: Common, document: dict[str, Any]) -> None:
    rows = document["rows"]
    common.console.line(
        f"{document['path']}: {sum(rows.values()):,} tokens of {document['model']} "
        f"({rows['fit']:,} fit, {rows['validation']:,} validation, {rows['heldout']:,} held-out)"
    )


def _show_model(common: Common, document: dict[str, Any]) -> None:
    ids = document["moe_layers"]
    shown = document | {
        "moe_layers": f"{len(ids)} ({ids[0]} to {ids[-1]})",
        "here": "yes" if document["here"] else "no",
    }
    shown["device"] = f"{document['device']} (--device or --device-map chooses)"
    for key, value in shown.items():
        if value is not None and not key.endswith("_bytes"):
            common.console.line(f"{key.replace('_', ' ')}: {value}")
