"""smoe verify: prove that what regroup wrote is the same model."""

from typing import Annotated, Any

import typer

from smoe_cli.options import Common, HashesOption, ModelOption, PlacementOption


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
    """Compare the regrouped checkpoint with its source: every tensor, then every layer's routing and the logits."""
    from smoe_cli.errors import CheckFailedError
    from smoe_cli.folder import choose_placement
    from smoe_cli.regrouping import verify_model

    chosen = choose_placement(common.dir, placement, hashes=hashes)
    document = verify_model(
        chosen, common.dir, model, dataset, tensors_only=tensors_only, hashes=hashes, console=common.console
    )
    following = common.next(f"smoe evaluate --placement {chosen.path.name}")
    if document["passed"]:
        common.console.result(document, lambda: common.console.line(_summary(document)), following)
        return
    if common.console.json:
        common.console.result(document, lambda: None)
    listed = "; ".join(document["failures"][:5])
    more = f"; and {len(document['failures']) - 5} more" if len(document["failures"]) > 5 else ""
    raise CheckFailedError(f"{document['path']} is not the same model: {listed}{more}.")


def _summary(document: dict[str, Any]) -> str:
    if document["layout"] == "map":
        return f"{document['path']}: verified. A map rewrites nothing; it names every expert once and fits the model."
    text = (
        f"{document['path']}: verified. {document['tensors']} tensors ({document['bytes']:,} bytes) equal under the map"
    )
    routing = document["routing"]
    if routing is None:
        return f"{text}; no layer was run (--tensors-only)."
    return (
        f"{text}; {routing['tokens']:,} tokens ({routing['prompts']}) choose the same experts in all "
        f"{len(routing['layers'])} MoE layers, {routing['ties']} ties; logits differ by at most "
        f"{routing['logit_max_error']:.1e} of their scale."
    )
