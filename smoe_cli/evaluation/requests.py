"""Attention-DP: each rank holds its own requests' rows, and the request router is the shuffle.

Axes: R requests in order of arrival, S held-out sequences, N held-out rows, G ranks, L MoE layers. A request has one
rank for all layers, chosen when it arrives from its prompt's token ids alone, and stays there while it decodes.
"""

import json
import lzma
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_cli.evaluation.breakdown import CEILINGS, NONE, ORACLE, RowFacts, mean_tree, share
from smoe_cli.evaluation.pricing import Pricing
from smoe_profiles.artefact import file_hash
from smoe_profiles.errors import InputError, reason
from smoe_profiles.unpacking import OPENERS, check_stream
from smoe_solvers.assignment import Int32Array, Int64Array
from smoe_solvers.choices import Assignment, Predictor
from smoe_solvers.figures import Figures, imbalance
from smoe_solvers.redundancy import Copies
from smoe_solvers.requests import (
    RequestLoad,
    cyclic_sums,
    measure_requests,
    route,
    route_exact,
    route_in_turn,
    rows_by_rank,
)

WAY = "dp-ep"
UNITS = {"t_s": 1.0, "timestamp_ms": 1e-3}
"""Fields that say when a request arrived, and their seconds."""

STATES = {
    "contiguous": ("contiguous", "shuffled", "contiguous+oracle"),
    "placed": ("placed", "placed+shuffled", "oracle"),
}
"""Of each placement: requests in turn, by the token table, and by true routing."""


@dataclass(frozen=True)
class Requests:
    """What arrives. order: [N] held-out rows by sequence and position; start: [S + 1] into it.

    sequence: [R] whose rows a request takes; prompt, length: [R] rows known on arrival, and in all.
    facts: how they came about, for the document.
    """

    order: Int64Array
    start: Int64Array
    sequence: Int64Array
    prompt: Int64Array
    length: Int64Array
    facts: dict[str, Any]

    def sums(self, values: npt.NDArray[np.integer], length: Int64Array) -> Int64Array:
        """Sums over each request's first `length` rows, [R, G]. values: [N, G]."""
        return cyclic_sums(values[self.order], self.start, self.sequence, length)

    def serve(self, copies: Copies, home: Int32Array) -> tuple[Int64Array, Int64Array]:
        """Activations that every rank serves and rows that need it, [R, G] each, where a request's home decides.

        home: [R]. Rows are served once for each home that some request of their sequence has.
        """
        ranks = copies.hosts.shape[1]
        pairs, pair = np.unique(self.sequence * ranks + home, return_inverse=True)
        sequence, here = np.divmod(pairs, ranks)
        size = np.diff(self.start)[sequence]
        start = np.concatenate([[0], np.cumsum(size)])
        rows = self.order[np.repeat(self.start[sequence] - start[:-1], size) + np.arange(start[-1])]
        served = replace(copies, experts=copies.experts[rows]).served(np.repeat(here, size).astype(np.int32))
        length = self.length
        return cyclic_sums(served, start, pair, length), cyclic_sums((served > 0).astype(np.int8), start, pair, length)


def held_out_requests(facts: RowFacts) -> Requests:
    """Every held-out sequence as one request, in the trace's order; its prompt is what was prefilled."""
    order = np.lexsort((facts.position, facts.sequence)).astype(np.int64)
    _, first = np.unique(facts.sequence[order], return_index=True)
    start = np.append(first, len(order)).astype(np.int64)
    prefilled = np.add.reduceat((facts.phase[order] == "prefill").astype(np.int64), start[:-1])
    told = {"from": "held-out sequences", "count": len(first), "rows": len(order), "prompt_rows": int(prefilled.sum())}
    return Requests(order, start, np.arange(len(first)), prefilled, np.diff(start), told)


def arriving_requests(path: Path, facts: RowFacts) -> Requests:
    """Arrivals and lengths of a file, routed like held-out sequences: the i-th takes the i-th of them, starting over.

    Raises InputError for a file that cannot be read.
    """
    arrivals = read_arrivals(path)
    own = held_out_requests(facts)
    prompt, length = arrivals[:, 1].astype(np.int64), arrivals[:, 1:].sum(axis=1).astype(np.int64)
    told = {
        "from": path.name,
        "sha256": file_hash(path),
        "count": len(arrivals),
        "rows": int(length.sum()),
        "prompt_rows": int(prompt.sum()),
        "seconds": float(arrivals[-1, 0] - arrivals[0, 0]),
        "routing": "not in the file: the i-th arrival takes the next held-out sequence, cut or repeated to its length",
    }
    sequence = np.arange(len(arrivals)) % len(own.sequence)
    return replace(own, sequence=sequence, prompt=prompt, length=length, facts=told)


def read_arrivals(path: Path) -> npt.NDArray[np.float64]:
    """JSON lines with t_s or timestamp_ms, input_length and output_length, by time: [R, 3] seconds and both lengths.

    Raises InputError naming the first line that is none.
    """
    opened: Callable[..., Any] = OPENERS.get(path.suffix, open)
    rows = array("d")
    try:
        check_stream(path)
        with opened(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                rows.extend(_arrival(line, f"{path}, line {number}"))
    except (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as requests ({reason(error)}).") from error
    if not rows:
        raise InputError(f"{path} holds no request.")
    arrivals = np.array(rows).reshape(-1, 3)
    return arrivals[np.argsort(arrivals[:, 0], kind="stable")]


def _arrival(line: str, where: str) -> tuple[float, int, int]:
    try:
        fields = json.loads(line)
        unit = next(name for name in UNITS if name in fields)
        arrived = float(fields[unit]) * UNITS[unit]
        lengths = fields["input_length"], fields["output_length"]
    except (ValueError, TypeError, KeyError, StopIteration, OverflowError, RecursionError) as error:
        wanted = "t_s or timestamp_ms, input_length and output_length"
        raise InputError(f"{where} is no request: an object with {wanted} was expected.") from error
    if not np.isfinite(arrived) or any(type(length) is not int for length in lengths) or not _possible(*lengths):
        raise InputError(f"{where} arrives at {arrived:g} with lengths {lengths}; whole numbers of tokens are needed.")
    return arrived, *lengths


def _possible(prompt: int, output: int) -> bool:
    return prompt >= 1 and output >= 0 and prompt + output < 2**31


@dataclass
class RequestSums:
    """Sums over requests' rows of one placement, walked layer by layer.

    held, needed: [R, G] a layer, of all rows; copies: a layer's rows where experts have several copies, kept because
    homes are known only after all layers; wishes: [R, G] token scores of the prompt, over all layers.
    """

    requests: Requests
    held: list[Int64Array] = field(default_factory=list)
    needed: list[Int64Array] = field(default_factory=list)
    copies: list[Copies | None] = field(default_factory=list)
    wishes: Int64Array | None = None

    def add(self, counts: npt.NDArray[np.int32], scores: npt.NDArray[np.uint8] | None, copies: Copies | None) -> None:
        """Take in one layer. counts: [N, G] n_g; scores: [N, G] of the token table; None: no router."""
        requests = self.requests
        self.held.append(requests.sums(counts, requests.length))
        self.needed.append(requests.sums((counts > 0).astype(np.int8), requests.length))
        self.copies.append(copies)
        if scores is None:
            return
        wished = requests.sums(scores, requests.prompt)
        self.wishes = wished if self.wishes is None else self.wishes + wished

    def load(self, index: int, home: Int32Array) -> RequestLoad:
        """What requests at these homes ask of every rank in the index-th layer. home: [R]."""
        held, needed, copies = self.held[index], self.needed[index], self.copies[index]
        if copies is None:
            return RequestLoad(held, held, needed, needed.sum(axis=1))
        served, needed = self.requests.serve(copies, home)
        return RequestLoad(
            held, served, needed, self.requests.sums(copies.fanout()[:, None], self.requests.length)[:, 0]
        )

    def routes(self) -> list["Route"]:
        """Round robin, the token table's router, and the one that knows the true routing."""
        assert self.wishes is not None
        truth = np.sum(self.held, axis=0)
        return [
            self.in_turn(),
            Route(self, Predictor.TOKEN.value, self.wishes, _homes(self.wishes)),
            Route(self, ORACLE, truth, _homes(truth)),
        ]

    def in_turn(self) -> "Route":
        """Round robin."""
        turns = route_in_turn(*self.held[0].shape)
        return Route(self, NONE, None, {how.value: turns for how in Assignment})


def _homes(wishes: Int64Array) -> dict[str, Int32Array]:
    """As they come (the rule that is served), and a round at once."""
    return {Assignment.RULE.value: route(wishes), Assignment.EXACT.value: route_exact(wishes)}


@dataclass(frozen=True)
class Route:
    """One way to score requests under one placement. wishes: [R, G] or None; homes: [R] by assignment."""

    sums: RequestSums
    router: str
    wishes: Int64Array | None
    homes: dict[str, Int32Array]

    def measure(self, index: int) -> dict[str, Figures]:
        """Figures of the index-th layer by assignment."""
        length = self.sums.requests.length
        return {
            how: measure_requests(self.sums.load(index, home), length, home, self.wishes)
            for how, home in self.homes.items()
        }

    def row_imbalance(self, how: str) -> float:
        """Rows that the busiest rank holds, over the mean."""
        ranks = self.sums.held[0].shape[1]
        return imbalance(rows_by_rank(self.sums.requests.length, self.homes[how], ranks))


def requests_in_turn(sums: RequestSums, layer_ids: Sequence[str], pricing: Pricing) -> dict[str, Any]:
    """{total, layers: {id: ...}} -> figures, of requests that take ranks in turn."""
    route = sums.in_turn()
    layers = {
        layer: pricing.requests(route.measure(index)[Assignment.RULE.value]) for index, layer in enumerate(layer_ids)
    }
    return {"total": mean_tree(list(layers.values())), "layers": layers}


def request_document(sums: dict[str, RequestSums], layer_ids: Sequence[str], pricing: Pricing) -> dict[str, Any]:
    """{total, layers: {id: ...}} -> state -> router -> assignment -> figures. sums: of both placements."""
    routes = {
        state: found
        for placement, mine in sums.items()
        for state, found in zip(STATES[placement], mine.routes(), strict=True)
    }
    routes = {state: routes[state] for state in CEILINGS}
    layers = {layer: _layer_document(routes, index, pricing) for index, layer in enumerate(layer_ids)}
    return {"total": mean_tree(list(layers.values())), "layers": layers}


def _layer_document(routes: dict[str, Route], index: int, pricing: Pricing) -> dict[str, Any]:
    """One layer, each state with its share of the oracle's lar and what is sent and returned."""
    measured = {state: found.measure(index) for state, found in routes.items()}

    def plain(state: str, how: str) -> dict[str, Any]:
        figures = measured[state][how]
        compared = replace(figures, oracle_share=share(figures.lar, measured[CEILINGS[state]][how].lar))
        held = {"row_imbalance": routes[state].row_imbalance(how)}
        return pricing.requests(compared) | held

    return {state: {found.router: {how: plain(state, how) for how in found.homes}} for state, found in routes.items()}
