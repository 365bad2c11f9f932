"""smoe verify: prove that what regroup wrote is the same model."""

from typing import Annotated, Any

import typer

from smoe_cli.options import Common, HashesOption, ModelOption, PlacementOption

LISTED = 5


def verify(
    common: Common,
    placement: PlacementOption = None,
    model: ModelOption = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="Prompts to compare on; default: the trace's held-out rows.")
    ] = None,
    tensors_only: Annotated[bool, typer.Option("--tensors-only", help="Compare bytes only, run no layer.")] = False,
    hashes: HashesOption = False,
) -> None:
    """Compare what regroup wrote with its source: every byte, then every layer's routing, the logits and the text."""
    from smoe_cli.errors import CheckFailedError
    from smoe_cli.folder import choose_placement
    from smoe_cli.verifying import verify_model

    chosen = choose_placement(common.dir, placement, hashes=hashes)
    document = verify_model(
        chosen, common.dir, model, dataset, tensors_only=tensors_only, hashes=hashes, console=common.console
    )
    following = common.next("evaluate", "--placement", chosen.path.name)
    if document["passed"]:
        common.console.result(document, lambda: common.console.line(_summary(document)), following)
        return
    if common.console.json:
        common.console.result(document, lambda: None)
    failed = next(found for found in _both(document) if found["failures"])
    listed = "; ".join(failed["failures"][:LISTED])
    more = f"; and {len(failed['failures']) - LISTED} more" if len(failed["failures"]) > LISTED else ""
    raise CheckFailedError(f"{failed['path']} is not the same model: {listed}{more}.")


def _both(document: dict[str, Any]) -> list[dict[str, Any]]:
    """A checkpoint's document, and that of the map beside it."""
    return [document, document["map"]] if "map" in document else [document]


def _summary(document: dict[str, Any]) -> str:
    return "\n".join(
        _map_summary(found) if found["layout"] == "map" else _checkpoint(found) for found in _both(document)
    )


def _map_summary(document: dict[str, Any]) -> str:
    text = f"{document['path']}: verified. A map rewrites nothing; it names every expert once and fits the model"
    routing = document["routing"]
    if routing is None or not routing["layers"]:
        return f"{text}; no layer was run."
    error = max(layer["max_error"] for layer in routing["layers"])
    return (
        f"{text}; applied after routing in {len(routing['layers'])} MoE layers it changes no output by more than "
        f"{error:.1e} of its scale ({routing['tokens']:,} tokens, {routing['prompts']})."
    )


def _checkpoint(document: dict[str, Any]) -> str:
    text = (
        f"{document['path']}: verified. {document['tensors']} tensors ({document['bytes']:,} bytes) equal under the map"
    )
    routing = document["routing"]
    if routing is None:
        return f"{text}; no layer was run (--tensors-only)."
    greedy = f" and {routing['generated']} greedy tokens are equal" if routing["generated"] else ""
    return (
        f"{text}; {routing['tokens']:,} tokens ({routing['prompts']}) choose the same experts in all "
        f"{len(routing['layers'])} MoE layers, {routing['ties']} ties; logits differ by at most "
        f"{routing['logit_max_error']:.1e} of their scale{greedy}."
    )
