"""smoe verify: prove that what regroup wrote is the same model."""

from typing import Annotated, Any

import typer

from smoe_cli.layer_numbers import name_layers
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
    layers: Annotated[
        str | None,
        typer.Option("--layers", help="Compare bytes, and run only these MoE layers: 1-4,9; no logits."),
    ] = None,
    hashes: HashesOption = False,
) -> None:
    """Prove that what regroup wrote is the same model. Every byte, every layer's routing, the logits and the text."""
    from smoe_cli.errors import CheckFailedError, UsageError
    from smoe_cli.folder import choose_placement, has_heldout_rows
    from smoe_cli.placing.solve_options import MACHINE, as_asked, options_given
    from smoe_cli.verifying import verify_model

    if tensors_only and layers is not None:
        raise UsageError("--tensors-only runs no layer, and --layers says which to run; give one.")
    chosen = choose_placement(common.dir, placement, hashes=hashes)
    document = verify_model(
        chosen,
        common.dir,
        model,
        dataset,
        tensors_only=tensors_only,
        layers=layers,
        hashes=hashes,
        console=common.console,
    )
    elsewhere = () if has_heldout_rows(common.dir) else ("--trace", "OTHER/trace")
    machine = options_given(as_asked(chosen.parameters), MACHINE)
    following = common.next("evaluate", "--placement", chosen.path.name, *elsewhere, *machine)
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


def _layers(routing: dict[str, Any]) -> str:
    """The MoE layers that were run: MoE layers 1-4, 9."""
    layers = [layer["layer"] for layer in routing["layers"]]
    return f"MoE layer{'s' if len(layers) > 1 else ''} {name_layers(layers)}"


def _map_summary(document: dict[str, Any]) -> str:
    text = f"{document['path']}: verified. A map rewrites nothing; it names every expert once and fits the model"
    routing = document["routing"]
    if routing is None or not routing["layers"]:
        return f"{text}; no layer was run."
    error = max(layer["max_error"] for layer in routing["layers"])
    return (
        f"{text}; applied after routing in {_layers(routing)} it changes no output by more than "
        f"{error:.1e} of its scale ({routing['tokens']:,} tokens, {routing['prompts']})."
    )


def _checkpoint(document: dict[str, Any]) -> str:
    text = (
        f"{document['path']}: verified. {document['tensors']} tensors ({document['bytes']:,} bytes) equal under the map"
    )
    routing = document["routing"]
    if routing is None:
        return f"{text}; no layer was run (--tensors-only)."
    if routing["logit_max_error"] is None:
        return (
            f"{text}; {routing['tokens']:,} tokens ({routing['prompts']}) choose the same experts, {routing['ties']} "
            f"ties, in {_layers(routing)}; no other layer was compared, and no logits (--layers)."
        )
    greedy = f" and {routing['generated']} greedy tokens are equal" if routing["generated"] else ""
    return (
        f"{text}; {routing['tokens']:,} tokens ({routing['prompts']}) choose the same experts in all "
        f"{len(routing['layers'])} MoE layers, {routing['ties']} ties; logits differ by at most "
        f"{routing['logit_max_error']:.1e} of their scale{greedy}."
    )
