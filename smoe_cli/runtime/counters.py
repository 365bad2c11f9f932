"""What a layer sent, and how long its stages took: counted where it happens, added up over ranks.

Axes: G ranks, n home rows of one call. Rows are rows of H elements that leave a rank, a stage's bytes its rows times H
times the element size; what travels beside the rows (needs, expert ids and weights, labels) is not counted.
Reduce-scatter, all-gather and all-reduce count the padded C rows a rank.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smoe_cli.runtime.exchange import Plan
from smoe_cli.runtime.slots import Served

COMMUNICATION = ("reduce_scatter", "dispatch", "combine", "all_gather", "all_reduce", "scores")
STAGES = (*COMMUNICATION, "plan", "router", "experts", "shared")
FIGURES = ("lar", "fanout", "remote_fanout", "overflow", "load_imbalance")


@dataclass
class LayerCounters:
    """One layer on one rank; off, it costs nothing.

    sums: tokens, local (activations served at home) and overflow (rows that the quota kept from their best rank), all
    []; needed, dispatched (rows that need, and were sent for, each rank) and load (activations), all [G]. rows: what
    left this rank by stage, `dispatch` and `combine` aside.
    """

    enabled: bool = False
    calls: int = 0
    row_bytes: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _spans: list[tuple[str, Any, Any]] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str, like: Tensor, rows: int = 0) -> Iterator[None]:
        """Time what happens inside. like: [n, H] as the rows that leave this rank; rows: how many do."""
        if not self.enabled:
            yield
            return
        self.rows[name] += rows
        self.row_bytes = like.shape[1] * like.element_size()
        begin = _now(like.is_cuda)
        yield
        self._spans.append((name, begin, _now(like.is_cuda)))

    def add_routing(self, served: Served, here: Tensor, rank: int, *, dispatched: bool) -> None:
        """Rows that were routed. here: [n] which of them lie on this rank; dispatched: whether they are sent on."""
        if not self.enabled:
            return
        counts = torch.where(here[:, None], served.counts, 0)
        needed = (counts > 0).sum(dim=0)
        found = {"tokens": here.sum(), "local": counts[:, rank].sum(), "needed": needed, "load": counts.sum(dim=0)}
        self.calls += 1
        self._add(found | {"dispatched": needed if dispatched else torch.zeros_like(needed)})

    def add_plan(self, plan: Plan, scores: Tensor, rank: int) -> None:
        """Which of this rank's home rows score higher elsewhere. scores: [T, G]."""
        if not self.enabled or not len(scores):
            return
        own = plan.token_of_place[rank * plan.rows_per_rank : (rank + 1) * plan.rows_per_rank].long()
        mine = scores[own.clamp(min=0)].int()
        self._add({"overflow": ((mine[:, rank] < mine.amax(dim=1)) & (own >= 0)).sum()})

    def seconds(self) -> dict[str, float]:
        """Time of each stage on this rank, all calls together."""
        found: dict[str, float] = defaultdict(float)
        if any(not isinstance(begin, float) for _, begin, _ in self._spans):
            torch.cuda.synchronize()
        for name, begin, end in self._spans:
            found[name] += end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3
        return dict(found)

    def plain(self) -> dict[str, Any]:
        """This rank's numbers without tensors."""
        sums = {name: value.tolist() for name, value in self.sums.items()}
        seconds = self.seconds()
        return {
            "calls": self.calls,
            "row_bytes": self.row_bytes,
            "sums": sums,
            "rows": dict(self.rows),
            "seconds": seconds,
        }

    def _add(self, more: Mapping[str, Tensor]) -> None:
        for name, value in more.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value


def gather_counters(layers: Mapping[int, LayerCounters], group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """All ranks' counters as one document, the same on every rank: {ranks, total, layers: {id: figures}}."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, {number: counters.plain() for number, counters in layers.items()}, group=group)
    documents = {str(number): summarise([rank[number] for rank in found]) for number in layers}
    return {"ranks": len(found), "total": _total(list(documents.values())), "layers": documents}


def summarise(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One layer's figures in the words of docs/terms.md, from each rank's `plain`.

    rows, bytes: what left the ranks, all together; busiest_rows: through the busiest direction of the busiest rank;
    seconds: of the slowest rank. Shares are None where nothing was routed.
    """
    each = range(len(ranks))

    def column(name: str) -> list[Any]:
        return [rank["sums"].get(name, 0) for rank in ranks]

    def remote(name: str) -> list[list[int]]:
        return [[0 if g == home or not row else row[g] for g in each] for home, row in enumerate(column(name))]

    load = [sum(row[g] for row in column("load") if row) for g in each]
    sent = remote("dispatched")
    out_of, into = [sum(row) for row in sent], [sum(row[g] for row in sent) for g in each]
    by_stage = {name: [rank["rows"].get(name, 0) for rank in ranks] for name in COMMUNICATION}
    by_stage |= {"dispatch": out_of, "combine": into}
    rows = {name: sum(found) for name, found in by_stage.items()}
    busiest = {name: max(found) for name, found in by_stage.items()}
    busiest |= {name: max(*into, *out_of) for name in ("dispatch", "combine")}
    tokens = sum(column("tokens"))
    row_bytes = max(rank["row_bytes"] for rank in ranks)
    return {
        "calls": max(rank["calls"] for rank in ranks),
        "tokens": tokens,
        "lar": _share(sum(column("local")), sum(load)),
        "fanout": _share(sum(sum(row) for row in column("needed") if row), tokens),
        "remote_fanout": _share(sum(map(sum, remote("needed"))), tokens),
        "overflow": _share(sum(column("overflow")), tokens),
        "load_imbalance": _share(max(load) * len(load), sum(load)),
        "rows": rows,
        "bytes": {name: found * row_bytes for name, found in rows.items()},
        "busiest_rows": busiest,
        "seconds": {name: max(rank["seconds"].get(name, 0.0) for rank in ranks) for name in STAGES},
    }


def _total(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over layers of what adds up, means of the figures, and communication's share of the time."""
    summed: dict[str, Any] = {
        name: {stage: sum(layer[name][stage] for layer in layers) for stage in layers[0][name]}
        for name in ("rows", "bytes", "busiest_rows", "seconds")
    }
    known = {name: [layer[name] for layer in layers if layer[name] is not None] for name in FIGURES}
    means = {name: _share(sum(values), len(values)) for name, values in known.items()}
    waiting = sum(summed["seconds"][name] for name in COMMUNICATION)
    return means | summed | {"communication_share": _share(waiting, sum(summed["seconds"].values()))}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _now(on_device: bool) -> Any:
    if not on_device:
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
