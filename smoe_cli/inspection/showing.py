"""How smoe inspect's documents look on a terminal of 80 columns; the verdict comes last, in one line."""

import textwrap
from typing import Any

from smoe_cli.console import WIDTH, Console

HASH_DIGITS = 64
NAMED_LAYERS = 6
"""So many layers with experts never used are listed; --json has them all."""


def show_trace(console: Console, document: dict[str, Any]) -> None:
    _head(console, document, f"level {document['level']}, {document['rows']['total']:,} rows")
    _show_rows(console, document)
    _show_layers(console, document)
    _show_coverage(console, document)
    for text in document["missing"]:
        _say(console, f"not there: {text}")
    _show_lint(console, document)


def _head(console: Console, document: dict[str, Any], facts: str) -> None:
    _say(console, f"{document['path']}: {document['kind']}, {facts}, {_size(document['bytes'])}")
    _say(console, f"model: {document['model_name']}{_sizes(document)}")
    for parent in document["parents"]:
        beside = ", ".join(parent["beside"])
        state = {"found": f"{beside}, beside it", "another": f"not {beside} beside it", "absent": "not beside it"}
        _say(console, f"made from {parent['kind']} {parent['id'][:12]}: {state[parent['state']]}")


def _sizes(document: dict[str, Any]) -> str:
    if document["model"].get("router_sha256") is None:
        return ""  # an unknown model is named by its sizes
    layers = list(document["layers"].values()) or document["model"].get("layers", [])
    kinds = dict.fromkeys((layer["num_experts"], layer.get("top_k")) for layer in layers)
    sizes = [f"{experts} experts{f', top {top_k}' if top_k else ''}" for experts, top_k in kinds]
    return f"; {len(layers)} MoE layers of {' or '.join(sizes)}" if sizes else ""


def _show_rows(console: Console, document: dict[str, Any]) -> None:
    sources, phases = document["sources"], document["phases"]
    alike = any(source["agreement"] is not None for source in sources.values())
    columns = ["rows", "all", "fit", "validation", "held-out", "load distance", *(["agreement"] if alike else [])]
    rows = [["all", *_parts(document["rows"], "total"), "", *([""] if alike else [])]]
    for found in (sources, phases):
        for name, facts in found.items():
            distance = f"{facts['load_distance']['mean']:.3f}" if len(found) > 1 else ""
            rows.append([name, *_parts(facts, "rows"), distance, *([_number(facts.get("agreement"))] if alike else [])])
    console.table("rows by part: all, each source, each phase", columns, rows)
    if len(sources) > 1 or len(phases) > 1:
        _say(console, "load distance: total variation of expert load from the whole trace, mean of layers")
    if alike:
        _say(console, "agreement: token ids routed as in the largest source; 1 alike, 0 as by chance")


def _parts(facts: dict[str, Any], total: str) -> list[str]:
    return [f"{facts[name]:,}" for name in (total, "fit", "validation", "heldout")]


def _show_layers(console: Console, document: dict[str, Any]) -> None:
    layers, ep = document["layers"], document["ep"]
    top_k = max(layer["top_k"] for layer in layers.values())
    columns = ["layer", "min", "max", "unused", *([f"EP {ep}"] if ep else [])]
    columns += ["kurtosis", "hottest", "F1", "mean F1"]
    rows = []
    for name, layer in layers.items():
        load, ranks = layer["load"], layer["ranks"]
        spread = load["mean"] or 1
        concentration, prediction = layer["concentration"] or {}, layer["prediction"] or {}
        rows.append(
            [
                name,
                _number(load["min"] / spread),
                _number(load["imbalance"]),
                str(len(layer["unused"])),
                *([_number(ranks["imbalance"])] if ep else []),
                _number(concentration.get("kurtosis")),
                _number(concentration.get("hottest")),
                _number(prediction.get("median_f1")),
                _number(prediction.get("mean_f1")),
            ]
        )
    console.table("experts by layer", columns, rows)
    _say(console, "min, max: load of the least and the most used expert over the mean; max is the imbalance")
    if ep:
        _say(console, f"EP {ep}: load of the busiest of {ep} contiguous ranks over the mean")
    first = next(iter(layers.values()))
    if first["concentration"]:
        _say(
            console,
            f"kurtosis over E, hottest (share of an id's {top_k} most used experts): medians of "
            f"{first['concentration']['token_ids']:,} ids seen twice or more; "
            f"{_number(first['concentration']['full_kurtosis'])} and 1 if an id always chooses the same experts",
        )
    if first["prediction"]:
        _say(
            console,
            f"F1 (median, mean): an id's {top_k} most used experts on fit rows against held-out rows, of which "
            f"{first['prediction']['covered']:,} of {first['prediction']['rows']:,} have an id seen there",
        )


def _show_coverage(console: Console, document: dict[str, Any]) -> None:
    token_ids = document["token_ids"]
    if token_ids["seen"] is not None:
        unknown = f"; {token_ids['unknown_rows']:,} rows without one" if token_ids["unknown_rows"] else ""
        _say(console, f"token ids: {token_ids['seen']:,} of {token_ids['vocabulary']:,} seen{unknown}")
    unused = {name: layer["unused"] for name, layer in document["layers"].items() if layer["unused"]}
    listed = [
        f"layer {name}: {', '.join(map(str, experts[:8]))}{', ...' if len(experts) > 8 else ''}"
        for name, experts in list(unused.items())[:NAMED_LAYERS]
    ]
    if unused:
        more = f"; and {len(unused) - NAMED_LAYERS} more layers" if len(unused) > NAMED_LAYERS else ""
        _say(console, f"experts never used: {'; '.join(listed)}{more}")


def _show_lint(console: Console, document: dict[str, Any]) -> None:
    for finding in document["lint"]:
        where = f"layer {finding['layer']}: " if finding["layer"] is not None else ""
        _say(console, f"lint: {where}{finding['message']}")
    console.line(document["verdict"])


def show_agreement(console: Console, document: dict[str, Any]) -> None:
    """One row a layer: how many matched rows name the same experts."""
    rows = document["rows"]
    _say(console, f"{document['path']} against {document['against']['path']}")
    alone = f"{rows['only_here']:,} only here, {rows['only_there']:,} only there"
    _say(console, f"{rows['matched']:,} rows are of the same sequence, position and token id; {alone}")
    if not document["same_model"]:
        _say(console, f"models: {document['model_name']}; {document['against']['model_name']}")
    table = [
        [
            name,
            f"{found['equal_share']:.2%}",
            f"{found['tie_share']:.2%}",
            f"{found['differing']:,}",
            f"{found['jaccard']:.4f}",
        ]
        for name, found in document["layers"].items()
    ]
    console.table("agreement by layer", ["layer", "equal", "near ties", "rows that differ", "Jaccard"], table)
    for key, where in (("layers_only_here", "here"), ("layers_only_there", "there")):
        if document[key]:
            _say(console, f"layers only {where}: {', '.join(document[key])}")
    if document["total"]["unweighed"]:
        _say(console, "rows that differ and hold no weights count as differing: ties cannot be told")
    console.line(document["verdict"])


def show_summary(console: Console, document: dict[str, Any]) -> None:
    """An artefact that is no trace: manifest, parents, and its figures by layer or by state."""
    count = document["files"]
    _head(console, document, f"{count} file{'s' if count > 1 else ''}")
    facts = [f"{key} {_plain(value)}" for key, value in document["parameters"].items() if _says_something(value)]
    if facts:
        _say(console, f"parameters: {', '.join(facts)}")
    if document.get("token_ids"):
        counted = "{seen:,} of {vocabulary:,} seen in the rows counted".format(**document["token_ids"])
        _say(console, f"token ids: {counted} (fit and validation; held-out rows are left out)")
    if document.get("total"):
        from smoe_cli.commands.evaluate import show_states

        show_states(console, document)
    elif document["layers"]:
        _show_layer_facts(console, document)
    _show_lint(console, document)


def _show_layer_facts(console: Console, document: dict[str, Any]) -> None:
    layers = document["layers"]
    if document["kind"] == "tables":
        rows = [[name, _number(facts["load_imbalance"]), str(facts["unused"])] for name, facts in layers.items()]
        console.table("experts by layer", ["layer", "expert imbalance", "never used"], rows)
        _say(console, "expert imbalance: load of the most used expert over the mean")
        return
    columns = {"moved": "moved", "origin": "found by", "objective": "objective", "validation_gain": "gain"}
    columns = {key: name for key, name in columns.items() if any(facts[key] is not None for facts in layers.values())}
    states = ("contiguous", "placed") if document["tables"] else ()
    copied = [len(facts["copied"]) for facts in layers.values()]
    rows = [
        [
            name,
            *(facts[key] if key == "origin" else _number(facts[key], 0 if key == "moved" else 4) for key in columns),
            *(_number(facts["rank_imbalance"][state]) for state in states),
        ]
        for name, facts in layers.items()
    ]
    console.table(f"placement on {document['ranks']} ranks", ["layer", *columns.values(), *states], rows)
    _say(console, "moved: experts without a slot on their rank of a contiguous placement")
    if any(copied):
        _say(
            console,
            f"{document['slots']} slots: {min(copied)} to {max(copied)} experts of a layer have several, which are "
            "taken to share their load equally",
        )
    if document["validation_gain"] is not None:
        kept = "" if document["parameters"].get("confirmed", True) else ", not confirmed: experts are where they were"
        _say(console, f"gain: over contiguous on validation blocks; mean {document['validation_gain']:.4f}{kept}")
    if document["tables"]:
        _say(console, "contiguous, placed: load of the busiest rank over the mean, from the tables beside it")
    else:
        _say(console, "not there: the tables it was made from, so that the load of its ranks is not known")


def _say(console: Console, text: str) -> None:
    """A sentence, folded to the width of a table."""
    for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False):
        console.line(line)


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _says_something(value: Any) -> bool:
    """Whether a parameter is worth a word: it is set, and no table."""
    return value is not None and value is not False and value != [] and not isinstance(value, dict)


def _plain(value: Any) -> str:
    """A parameter as text; of a hash the part by which people know it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if value is True:
        return "yes"
    if isinstance(value, str) and len(value) == HASH_DIGITS:
        return value[:12]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,} bytes"


def show_engine_map(console: Console, document: dict[str, Any]) -> None:
    """An engine's placement file, and everything that is wrong with it."""
    console.line(
        f"{document['path']}: {document['layers']} layers of {document['num_experts']} experts in {document['slots']} "
        f"slots on {document['ranks']} ranks, {document['redundant']} of them redundant"
    )
    for fault in document["lint"] or [document["verdict"]]:
        console.line(fault)
