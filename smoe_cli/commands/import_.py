"""smoe import: an engine's records of routing, or NumPy archives, into a trace."""

from pathlib import Path
from typing import Annotated, Any

import typer

from smoe_cli.engines.choices import ImportKind
from smoe_cli.options import Common, ForceOption
from smoe_profiles.choices import ImportFormat, SplitBy, SplitMode


def import_(
    common: Common,
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Files of one format; for trtllm also folders.")],
    from_: Annotated[
        ImportFormat, typer.Option("--from", help="Whose records they are; auto: told by content.")
    ] = ImportFormat.AUTO,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Short name, hub id or folder: which layers have experts, how many, how many a token."
        ),
    ] = None,
    ids: Annotated[str | None, typer.Option("--ids", help="npz: key of the expert ids; default: ids.")] = None,
    axes: Annotated[
        str | None,
        typer.Option("--axes", help="npz: the ids' axes, out of batch, layer, token, slot; default: layer,token,slot."),
    ] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", help="npz: key of the token ids; default: tokens.")] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="npz: key of the gate weights; default: weights.")
    ] = None,
    layer_ids: Annotated[
        str | None,
        typer.Option("--layer-ids", help="npz: key of the decoder layers, or numbers: 0,7,15; default: layer_ids."),
    ] = None,
    seq_lens: Annotated[
        str | None, typer.Option("--seq-lens", help="npz: key of the tokens of each sequence; default: seq_len.")
    ] = None,
    triples: Annotated[
        bool, typer.Option("--triples", help="npz: read (token, expert, count) triples: tok_L0, exp_L0, cnt_L0.")
    ] = False,
    no_order: Annotated[
        bool, typer.Option("--no-order", help="Keep counts by token id only: prompts cannot be read back.")
    ] = False,
    source: Annotated[
        list[str] | None, typer.Option("--source", help="A name for each FILE, in order; default: its file name.")
    ] = None,
    split: Annotated[
        SplitMode, typer.Option("--split", help="hash: fit, validation and held-out; fit: no held-out; heldout: only.")
    ] = SplitMode.HASH,
    split_by: Annotated[
        SplitBy, typer.Option("--split-by", help="hash of a sequence's ids, or order: even fit, odd held-out.")
    ] = SplitBy.HASH,
    as_: Annotated[
        ImportKind, typer.Option("--as", help="placement: read one FILE as an engine's placement.")
    ] = ImportKind.TRACE,
    ep: Annotated[
        int | None, typer.Option("--ep", min=1, help="placement: its ranks, where the file does not say.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="placement: keep it beside others as placement-epG-NAME.")
    ] = None,
    force: ForceOption = False,
) -> None:
    """Read another program's records of routing: writes trace/. With --as placement an engine's: placement-epG/."""
    from smoe_cli.errors import UsageError
    from smoe_cli.folder import TRACE, step_after_trace
    from smoe_cli.importing import ImportPlan, import_trace, name_files
    from smoe_profiles.artefact import check_target
    from smoe_profiles.importers.records import ReadOptions
    from smoe_profiles.importers.store import Wanted
    from smoe_profiles.models import find_model

    if as_ is ImportKind.PLACEMENT:
        _import_placement(common, files, model, ep, name, force)
        return
    if ep is not None or name is not None:
        raise UsageError(f"{'--name' if ep is None else '--ep'} is for placements; add --as placement.")
    target = common.dir / TRACE
    check_target(target, force=force)
    plan = ImportPlan(
        files=files,
        sources=name_files(files, source or []),
        format=from_,
        options=ReadOptions(
            model=find_model(model, download=False) if model else None,
            ids=ids,
            axes=axes,
            tokens=tokens,
            weights=weights,
            layer_ids=layer_ids,
            seq_lens=seq_lens,
            triples=triples,
        ),
        wanted=Wanted(split=split, split_by=split_by, order=not no_order),
    )
    document = import_trace(plan, target, force=force, console=common.console)
    words, where = step_after_trace(target, document["level"], document["rows"].get("fit", 0))
    common.console.result(document, lambda: _show(common, document), common.next(*words, where=where))


def _import_placement(
    common: Common, files: list[Path], model: str | None, ep: int | None, name: str | None, force: bool
) -> None:
    from smoe_cli.engines.importing import import_placement
    from smoe_cli.errors import UsageError

    if len(files) > 1:
        raise UsageError(f"{len(files)} files; --as placement reads one.")
    document = import_placement(
        files[0], common.dir, model_name=model, ep=ep, name=name, force=force, console=common.console
    )
    following = common.next("evaluate", "--placement", Path(document["path"]).name)
    common.console.result(
        document, lambda: _show_placement(common, document), following if document["predictors"] else None
    )


def _show_placement(common: Common, document: dict[str, Any]) -> None:
    what = "with predictors from the tables here" if document["predictors"] else "a map alone: there are no tables here"
    common.console.line(f"{document['path']}: {document['layers']} MoE layers of {document['slots']} slots, {what}")
    if document["in_order"]:
        common.console.note(
            f"note: left out, as the tables have no counts of them: {document['in_order']} layers with experts in order"
        )


def _show(common: Common, document: dict[str, Any]) -> None:
    rows, expected, rejected = document["rows"], document["layers_expected"], document["rejected"]
    layers = f"{document['layers_found']}{f' of {expected}' if expected else ''} MoE layers"
    lost = sum(rejected.values())
    parts = ", ".join(f"{count:,} {name.replace('heldout', 'held-out')}" for name, count in rows.items())
    common.console.line(
        f"{document['path']}: {sum(rows.values()):,} tokens of {document['model']} ({parts}), "
        f"level {document['level']}, {layers}; padding left out: {document['padding']:,}, rejected: {lost:,}"
    )
    if document["level"] == "token" and not document["has_token_ids"]:
        key = " (--tokens names their key)" if document["format"] == ImportFormat.NPZ else ""
        common.console.line(f"no token ids in it{key}: experts can be placed, but no token foretells its experts")
    elif document.get("unknown_token_ids"):
        common.console.line(
            f"without a token id: {document['unknown_token_ids']:,}, which count for placing, not for predicting"
        )
    for reason, count in rejected.items():
        common.console.line(f"rejected, {reason}: {count:,}")
    for note in document["notes"]:
        common.console.note(f"note: {note}.")
