"""smoe models: which models have a short name, and which are on this machine."""

from smoe_cli.options import Common


def models(common: Common) -> None:
    """List bundled models, and short names of published ones."""
    from smoe_cli.recording import describe_model
    from smoe_profiles.models import SHORT_NAMES, bundled_names, find_model

    documents = [describe_model(find_model(name, download=False)) for name in [*bundled_names(), *SHORT_NAMES]]

    def show() -> None:
        rows = [
            [
                str(document["model"]),
                str(len(document["moe_layers"])),
                str(document["experts"]),
                str(document["top_k"]),
                str(document["router_rule"]),
                "yes" if document["here"] else "no",
            ]
            for document in documents
        ]
        common.console.table("Models", ["name", "MoE layers", "E", "K", "router", "here"], rows)

    common.console.result({"models": documents}, show, common.next("profile", "--model", "NAME"))
