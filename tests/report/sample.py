"""A report's document made by hand: 3 MoE layers of 16 experts, top 4, on 4 ranks, with hostile names and tokens."""

import numpy as np

LAYERS, EXPERTS, RANKS, TOP_K = [1, 2, 5], 16, 4, 4

HOSTILE = (
    "</script><img src=x onerror=document.title='pwned'>",
    "<script>document.title='pwned'</script>",
    '"><svg onload=alert(1)>',
    "\u202egnp.exe\u202c",
    "nul\x00and\x1b[31mred\x1b[0m",
    "line\u2028break\nand\ttab",
    "{{ 7*7 }}{% raw %}",
    "&lt;b&gt; <a href='https://example.org/'>link</a>",
    " the",
    "%{x}<extra></extra>",
    "مرحبا",  # ordinary text that is written from the right
    "e\u0301\u0302\u0303\u0304\u0305\u0306",
)
"""Token texts and names that must be shown as text and do nothing."""


def sample_document() -> dict:
    """Every section, every verdict part; figures are small and round, not measured."""
    rng = np.random.default_rng(5)
    per_layer = len(LAYERS)
    rank_of_slot = np.repeat(np.arange(RANKS), EXPERTS // RANKS)
    placed = np.stack([rng.permutation(EXPERTS) for _ in LAYERS])
    load = rng.integers(200, 4000, (per_layer, EXPERTS))
    slots = {
        "contiguous": {"rank": rank_of_slot.tolist(), "expert": [list(range(EXPERTS))] * per_layer},
        "placed": {"rank": rank_of_slot.tolist(), "expert": placed.tolist()},
    }
    rank_load = {
        side: [
            np.bincount(rank_of_slot, load[at][slots[side]["expert"][at]]).astype(int).tolist()
            for at in range(per_layer)
        ]
        for side in slots
    }
    blocks = np.where(rank_of_slot[:, None] == rank_of_slot, 78, 42)
    cells = np.clip(blocks + rng.integers(-12, 12, (per_layer, EXPERTS, EXPERTS)), 0, 100)
    cells[:, range(EXPERTS), range(EXPERTS)] = -1
    return {
        "format": "smoe-report",
        "format_version": 1,
        "title": "sample: 3 MoE layers of 16 experts, top 4, on 4 ranks",
        "model": {
            "family": "sample",
            "num_experts": EXPERTS,
            "top_k": TOP_K,
            "vocab_size": 32,
            "rule": "softmax",
            "group_limited": False,
        },
        "layers": LAYERS,
        "ranks": RANKS,
        "placement": "placement-ep4",
        "artefacts": [
            {"name": "trace", "kind": "trace", "id": "a" * 64, "used": True, "note": None},
            {"name": HOSTILE[0], "kind": "evaluation", "id": "b" * 64, "used": False, "note": HOSTILE[3]},
        ],
        "verdict": _verdict(),
        "sections": {
            "states": _states(),
            "expert_load": {
                "source": "heldout",
                "load": load.tolist(),
                "slots": slots,
                "rank_load": rank_load,
                "imbalance": {
                    side: [max(of) / (sum(of) / RANKS) for of in by_layer] for side, by_layer in rank_load.items()
                },
            },
            "coactivation": {
                "note": "levels are rounded",
                "layers": LAYERS,
                "pool": 1,
                "levels": {"low": 0, "chance": 50, "high": 100, "factor": 8},
                "rank": {"contiguous": rank_of_slot.tolist(), "placed": rank_of_slot.tolist()},
                "experts": {side: [[str(e) for e in of] for of in slots[side]["expert"]] for side in slots},
                "cells": {
                    "contiguous": rng.integers(20, 80, cells.shape).tolist(),
                    "placed": cells.tolist(),
                },
                "inside": {
                    "contiguous": [0.21, 0.2, 0.22],
                    "placed": [0.41, 0.38, 0.44],
                    "chance": [0.2, 0.2, 0.2],
                },
            },
            "traffic": _traffic(rng),
            "prediction": _prediction(),
            "reliability": _reliability(),
            "transfer": _transfer(),
            "solver": _solver(),
            "tokens": _tokens(),
            "trace": {
                "level": "token",
                "rows": {"fit": 700, "validation": 100, "heldout": 200},
                "sources": ["law", HOSTILE[1]],
                "facts": [["level", "token"], ["rows", "1,000"], ["source", HOSTILE[1]]],
            },
        },
        "missing": {},
    }


def unmeasured_document() -> dict:
    """What stands in a folder that holds nothing yet."""
    document = sample_document()
    document |= {"ranks": None, "placement": None, "layers": [], "artefacts": []}
    document["verdict"] = {
        "answer": "unmeasured",
        "headline": "Nothing is measured yet.",
        "reasons": [],
        "cautions": [],
        "basis": None,
        "fixed_cost": False,
        "figures": [],
        "thresholds": [],
        "answers": [{"answer": "unmeasured", "rule": "There is no evaluation."}],
        "next": {"command": "smoe profile --model M -C 'a <b> c'", "why": "It records a trace."},
        "conditions": None,
        "conditions_text": "",
        "map_only": None,
        "engines": [],
    }
    document["missing"] = {
        name: {"sentence": f"Not measured: {name}.", "command": f"smoe do-{name}"} for name in document["sections"]
    }
    document["sections"] = dict.fromkeys(document["sections"])
    return document


def _verdict() -> dict:
    common = {"contiguous": 100.0, "load_balancer": 96.0, "baseline": "load_balancer", "threshold": 1.02, "unit": "us"}
    common |= {
        "load_imbalance": 1.36,
        "load_baseline": 1.35,
        "evenest": "contiguous",
        "undecided": False,
        "doubt": None,
    }
    return {
        "answer": "needs-more",
        "headline": "Worth it with a request router: 1.23 times faster layers.",
        "reasons": ["An exported placement alone gives 1.01 times.", f"Source {HOSTILE[1]} was left out."],
        "cautions": ["Loads were measured, not modelled."],
        "basis": "microseconds",
        "fixed_cost": False,
        "figures": [
            {
                "use": "placed",
                "label": "today's engines, tokens spread (sp-ep)",
                "needs": "nothing beyond an engine that takes a map or checkpoint",
                "way": "sp-ep",
                "state": "placed",
                "value": 95.0,
                "speedup": 96 / 95,
                "reached": False,
            }
            | common,
            {
                "use": "placed+shuffled",
                "label": "tokens shuffled (speculative)",
                "needs": "a shuffling run time",
                "way": "speculative",
                "state": "placed+shuffled",
                "value": 84.0,
                "speedup": 96 / 84,
                "reached": True,
            }
            | common,
            {
                "use": "requests",
                "label": "attention-DP (dp-ep)",
                "needs": "a request router",
                "way": "dp-ep",
                "state": "placed+shuffled",
                "value": 78.0,
                "speedup": 96 / 78,
                "reached": True,
            }
            | common,
        ],
        "answers": [{"answer": "needs-more", "rule": "Only a router reaches its threshold."}],
        "thresholds": [
            {
                "answer": "worth-it",
                "basis": "microseconds",
                "use": "placed",
                "at_least": 1.02,
                "rule": "placed is 1.02 times faster.",
            }
        ],
        "next": {"command": "smoe export --to sglang -C 'my runs'", "why": "It writes the map."},
        "conditions": None,
        "conditions_text": "Held-out: 200 rows, batches of 64, quota ceil(T/G), rule, token, nvlink-h200.",
        "map_only": "This placement splits groups, so that it is a map only.",
        "engines": [
            {"engine": "SGLang", "takes": "map", "command": "smoe export --to sglang", "note": None},
            {"engine": "vLLM", "takes": "checkpoint", "command": None, "note": "needs regroup"},
        ],
    }


def _row(state: str, predictor: str, label: str, group: str, needs: str, lar: float, ways: dict[str, float]) -> dict:
    spread = [0.9, 1.0, 1.1]
    fanout = 3.2 - 2 * lar
    return {
        "state": state,
        "predictor": predictor,
        "label": label,
        "group": group,
        "needs": needs,
        "total": {
            "lar": lar,
            "fanout": fanout,
            "remote_fanout": fanout - lar,
            "load_imbalance": 1.1 + lar,
            "load_imbalance_batch": 1.3 + lar,
            "wire_rows": dict.fromkeys(ways, fanout),
            "microseconds": ways,
        },
        "layers": {
            "lar": [lar * by for by in spread],
            "fanout": [fanout * by for by in spread],
            "remote_fanout": [(fanout - lar) * by for by in spread],
            "load_imbalance": [1.1 + lar * by for by in spread],
            "microseconds": {way: [time * by for by in spread] for way, time in ways.items()},
        },
    }


def _states() -> dict:
    engine = "an engine that takes a map or checkpoint"
    start, balancer = "as every engine starts", "the engine's own balancer"
    runtime, future = "a shuffling run time", "knowing the future"
    tokens = [
        _row("contiguous", "none", "contiguous", "baseline", start, 0.25, {"ar-ep": 120.0, "sp-ep": 100.0}),
        _row("load_balancer", "none", "load balancer", "baseline", balancer, 0.25, {"ar-ep": 118.0, "sp-ep": 96.0}),
        _row("placed", "none", "placed", "placed", engine, 0.26, {"ar-ep": 115.0, "sp-ep": 95.0}),
        _row("shuffled", "token", "shuffled (token)", "more", runtime, 0.36, {"speculative": 92.5}),
        _row("placed+shuffled", "token", "placed + shuffled (token)", "more", runtime, 0.5432, {"speculative": 84.0}),
        _row("contiguous+oracle", "oracle", "contiguous + oracle", "ceiling", future, 0.42, {"speculative": 90.0}),
        _row("oracle", "oracle", "oracle", "ceiling", future, 0.62, {"speculative": 80.0}),
    ]
    requests = [
        _row("contiguous", "none", "contiguous", "baseline", start, 0.25, {"dp-ep": 100.0}),
        _row("placed", "none", "placed", "placed", engine, 0.26, {"dp-ep": 94.0}),
        _row("placed+shuffled", "token", "placed + routed (token)", "more", "a request router", 0.47, {"dp-ep": 78.0}),
    ]
    return {"hardware": "nvlink-h200", "tokens": tokens, "requests": requests}


def _traffic(rng: np.random.Generator) -> dict:
    states = ["contiguous", "placed", "placed+shuffled"]
    by_layer = {}
    for at, state in enumerate(states):
        pairs = rng.integers(500, 900, (len(LAYERS), RANKS, RANKS)) // (at + 1)
        pairs[:, range(RANKS), range(RANKS)] = 0
        by_layer[state] = pairs
    return {
        "unit": "rows, held-out total, sum over layers",
        "rows": 200,
        "predictor": "token",
        "states": states,
        "total": {state: pairs.sum(axis=0).tolist() for state, pairs in by_layer.items()},
        "layers": LAYERS,
        "by_layer": {state: pairs.tolist() for state, pairs in by_layer.items()},
        "travel": None,
        "note": None,
    }


def _prediction() -> dict:
    figures = {"token": 0.54, "markov": 0.41, "fused": 0.56}
    names = ("lar", "oracle_share", "rank_accuracy", "expert_f1")
    total = {
        predictor: dict(zip(names, (lar, lar / 0.62, lar + 0.2, None), strict=True))
        for predictor, lar in figures.items()
    }
    layers = {
        predictor: {
            name: None if value is None else [value, value * 0.9, None if name == "rank_accuracy" else value * 1.1]
            for name, value in of.items()
        }
        for predictor, of in total.items()
    }
    groups = [
        {"group": group, "rows": rows, "lar": figures, "oracle_share": dict.fromkeys(figures, 0.8)}
        for group, rows in (("unseen", 12), ("1000+", 188))
    ]
    return {
        "predictors": list(figures),
        "chance": 0.25,
        "total": total,
        "layers": layers,
        "ceiling": {"total": 0.62, "layers": [0.6, 0.62, 0.64]},
        "preferred": ["token", "fused", "fused"],
        "groups": {"by_phase": [], "by_frequency": groups},
    }


def _reliability() -> dict:
    curves = {
        predictor: [[step / 5, step / 5 - off, 200 - 8 * step] for step in range(20)]
        for predictor, off in (("token", 0.05), ("markov", 0.3))
    }
    return {
        "predictors": list(curves),
        "top_k": TOP_K,
        "total": curves,
        "layers": {predictor: [curve] * len(LAYERS) for predictor, curve in curves.items()},
        "error": {"token": 0.05, "markov": 0.3},
    }


def _transfer() -> dict:
    figures = {
        state: {"lar": lar, "remote_fanout": 2 - lar} for state, lar in (("contiguous", 0.25), ("placed+shuffled", 0.5))
    }
    sources = ["law", HOSTILE[1]]
    shifted = {"lar": [[0.5, 0.4], [0.38, None]], "remote_fanout": [[1.5, 1.6], [1.62, None]]}
    return {
        "sources": [{"source": source, "rows": 100, "figures": figures} for source in sources],
        "predictor": "token",
        "matrix": {
            "placements": ["placement-ep4", "placement-ep4-law"],
            "fitted_on": ["law", HOSTILE[7]],
            "sources": sources,
            "placed": shifted,
            "placed+shuffled": shifted,
            "contiguous": {"lar": [0.25, 0.25], "remote_fanout": [1.8, 1.8]},
        },
        "matrix_note": None,
    }


def _solver() -> dict:
    steps = (("contiguous", 0.9), ("seeds", 0.8), ("seeds polished", 0.78), ("cross-entropy", 0.76), ("polish", 0.75))
    layers = [
        {
            "layer": layer,
            "origin": "cross-entropy + descent",
            "objective": 0.75 + 0.01 * at,
            "stages": [
                {"name": name, "objective": value + 0.01 * at, "lar": 1 - value, "fanout": 3 * value}
                for name, value in steps
            ],
            "certificate": {
                "kind": kind,
                "value": value,
                "gap": None if value is None else 0.75 / value - 1,
                "pairs": None,
                "pairs_bound": None,
            },
            "validation_gain": 0.1,
            "validation_two_standard_errors": 0.01,
            "note": "",
            "moved": None,
        }
        for at, (layer, kind, value) in enumerate(
            zip(LAYERS, ("bound", "optimal", "unknown"), (0.5, 0.76, None), strict=True)
        )
    ]
    return {
        "goal": "blend",
        "method": "ce",
        "effort": "default",
        "confirmed": True,
        "layers": layers,
        "summary": {"gap": 0.25, "optimal": 1, "bounded": 1, "gain": 0.1},
    }


def _tokens() -> dict:
    def entry(at: int) -> dict:
        text = HOSTILE[at % len(HOSTILE)] if at != 13 else None
        return {"id": at, "text": text, "count": 100 + at, "share": 0.9 - at / 100, "lift": 3.5 - at / 20}

    return {
        "min_count": 16,
        "note": "ids seen fewer than 16 times are left out",
        "texts": True,
        "base": [0.25] * RANKS,
        "ranks": [
            [entry(at) for at in range(12)],
            [entry(at) for at in range(3)],
            [],
            [entry(at) for at in (6, 7, 8, 13)],
        ],
        "layers": LAYERS,
        "by_layer": [[[entry(at) for at in range(5)], [entry(0)], [], [entry(1), entry(2)]]] * len(LAYERS),
    }
