"""What ranks exchange, by kernels that store straight into the memory of other GPUs (`region`).

Axes as in `exchange`. Every operation is one kernel: it stores rows where they are wanted, signals, waits, and sums
what came. Stores cross the link faster than loads, and what is sent need not lie in shared memory. All ranks call the
same operations in the same order, each on one stream. `all_gather` and `dispatch` return views of shared memory, which
others may overwrite as soon as this rank has taken part in the next operation on slots of that kind (see `region`).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smoe_cli.runtime.collectives import CollectiveExchange, take_rows
from smoe_cli.runtime.exchange import Exchange, Norm, Plan, Received, Routed
from smoe_cli.runtime.launch import FORMS, Launch, launch_for
from smoe_cli.runtime.region import (
    CODES,
    OPERATIONS,
    Allocation,
    Sizes,
    agreed,
    count_processors,
    meet,
    open_region,
    raise_together,
    why_not,
)
from smoe_profiles.errors import MachineError

PATIENCE = 60.0
"""Seconds that a kernel waits for another rank before it gives it up."""

FEW_BYTES = 1 << 18
"""Up to so many bytes [T, H] are sent whole to every rank to be summed; more are summed at homes and gathered."""


class SymmetricExchange:
    """`Exchange` over memory that all ranks of a group map. Opening it is collective."""

    def __init__(
        self,
        sizes: Sizes,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        *,
        patience: float = PATIENCE,
        allocate: Callable[[int], Allocation] | None = None,
    ) -> None:
        self.sizes, self.device, self.group = sizes, device, group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._agree_on_launches()
        self.patience = patience
        self.region = open_region(sizes, device, group, patience, allocate)
        self._pushes = self._gathers = 0
        self._received_needs: Tensor | None = None
        self._everyone = torch.arange(self._places() // self.num_ranks, dtype=torch.int32, device=device)
        self._in_capture = False
        self.fence()
        self.check()

    def reduce_scatter(
        self, partial: Tensor, plan: Plan, residual: Tensor | None = None, norm: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        tokens, homes = len(plan.place_of_token), (plan.rows_per_rank, self.sizes.hidden)
        self._check(partial, plan.rows_per_rank)
        _check_shape("shares of sums", partial, (tokens, self.sizes.hidden))
        if residual is not None:
            _check_shape("rows before", residual, homes)
        if norm is not None and norm.weight.dtype != partial.dtype:
            raise MachineError(f"Weights of a norm are {norm.weight.dtype}, rows {partial.dtype}; give both one type.")
        return self._sum(partial, plan.token_of_place, plan.rows_per_rank, plan.rows_per_rank, residual, norm)

    def scatter(self, rows: Tensor, plan: Plan) -> Tensor:
        start = self.rank * plan.rows_per_rank
        return take_rows(rows, plan.token_of_place[start : start + plan.rows_per_rank])

    def all_gather(self, rows: Tensor, plan: Plan, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        from smoe_cli.runtime.sag import all_gather

        self._check(rows, plan.rows_per_rank)
        _check_shape("home rows", rows, (plan.rows_per_rank, self.sizes.hidden))
        if labels is not None:
            _check_shape("labels", labels, (plan.rows_per_rank,))
        slot = self._gather_slot()
        tokens = len(plan.place_of_token)
        if tokens:
            all_gather(
                self.region,
                slot,
                self._launch("all_gather", plan.rows_per_rank),
                rows.contiguous(),
                plan,
                None if labels is None else labels.contiguous(),
            )
        gathered = self.region.view(f"gathered{slot}", rows.dtype, tokens, rows.shape[1])
        return gathered, None if labels is None else self.region.view(f"labels{slot}", torch.uint8, tokens)

    def dispatch(self, routed: Routed) -> Received:
        from smoe_cli.runtime.dispatch import dispatch

        own, top_k = routed.experts.shape
        self._check(routed.rows, own)
        _check_shape("home rows", routed.rows, (own, self.sizes.hidden))
        _check_shape("experts' weights", routed.weights, (own, top_k))
        _check_shape("rows' needs", routed.needs, (own,))
        if top_k > self.sizes.top_k:
            raise MachineError(f"{top_k} experts a row were routed; the exchange was opened for {self.sizes.top_k}.")
        slot, places = self._push_slot(), self.num_ranks * own
        if own:
            whole = Routed(
                routed.rows.contiguous(),
                routed.experts.to(torch.int32).contiguous(),
                routed.weights.to(torch.float32).contiguous(),
                routed.needs.to(torch.int32).contiguous(),
            )
            dispatch(self.region, slot, self._launch("dispatch", own), whole)
        needs = self.region.view(f"needs{slot}", torch.int32, places)
        self._received_needs = needs
        return Received(
            rows=self.region.view(f"pushed{slot}", routed.rows.dtype, places, routed.rows.shape[1]),
            experts=self.region.view(f"experts{slot}", torch.int32, places, top_k),
            weights=self.region.view(f"weights{slot}", torch.float32, places, top_k),
            needs=needs,
        )

    def combine(self, parts: Tensor, routed: Routed) -> Tensor:
        from smoe_cli.runtime.combine import combine

        own = len(routed.needs)
        self._check(parts, own)
        needs = self._received_needs
        if needs is None or len(needs) != len(parts):
            raise MachineError(f"{len(parts)} rows to combine do not follow a dispatch of as many.")
        if not own:
            return parts.new_empty(0, parts.shape[1])
        return combine(self.region, self._push_slot(), self._launch("combine", own), parts.contiguous(), needs)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Few rows go to every rank at once; many are summed at homes first, which sends fewer."""
        from smoe_cli.runtime.plan import identity_plan

        tokens = len(partial)
        self._check(partial, -(-tokens // self.num_ranks))
        few = self.num_ranks == 2 or partial.nbytes <= FEW_BYTES
        if few and self.num_ranks * tokens <= self._places():
            return self._sum(partial, self._everyone, 0, tokens, None, None)[0]
        plan = identity_plan(tokens, self.num_ranks, partial.device)
        return self.all_gather(self.reduce_scatter(partial, plan)[0], plan)[0]

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
        """Capture what is done inside. All ranks enter together; the graph begins and ends with a fence, so that it may
        be replayed before and after anything, as long as all ranks replay the same. pool: as `torch.cuda.graph`'s."""
        meet(self.group, self.device)
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            self._in_capture = True
            try:
                self.fence()
                yield
                self.fence()
            finally:
                self._in_capture = False
        meet(self.group, self.device)

    def fence(self) -> None:
        """Work enqueued after this runs when all ranks have done what they were given before."""
        from smoe_cli.runtime.barrier import fence_kernel

        region = self.region
        fence_kernel[(1,)](
            region.bases, region.flags, region.epochs, region.failures, region.rank, CODES["fence"], region.timeout,
            G=self.num_ranks, PROTOCOL=region.protocol, num_warps=1,
        )  # fmt: skip

    def check(self) -> None:
        """Wait for the device; raise MachineError if a kernel gave a rank up. Once a step is enough."""
        codes = self.region.failures.tolist()
        missing = [f"rank {rank} in {OPERATIONS[code - 1]}" for rank, code in enumerate(codes) if code]
        if missing:
            raise MachineError(
                f"Rank {self.rank} waited {self.patience:g} s in vain for {', '.join(missing)}. That process has died, "
                "hangs, or did not call the same operations; results since then are void: stop all ranks."
            )

    def _sum(
        self,
        partial: Tensor,
        token_of_place: Tensor,
        spread: int,
        cap: int,
        residual: Tensor | None,
        norm: Norm | None,
    ) -> tuple[Tensor, Tensor]:
        """Rank p's home rows are the tokens token_of_place[p * spread :][:cap]; with spread 0 they are everyone's."""
        from smoe_cli.runtime.srs import reduce_scatter

        if not cap:
            return partial.new_empty(0, partial.shape[1]), partial.new_empty(0, partial.shape[1])
        residual = None if residual is None else residual.contiguous()
        launch = self._launch("reduce_scatter" if norm is None else "reduce_scatter_norm", cap)
        slot = self._push_slot()
        return reduce_scatter(
            self.region, slot, launch, partial.contiguous(), token_of_place, spread, cap, residual, norm
        )

    def _launch(self, operation: str, cap: int) -> Launch:
        return launch_for(operation, cap, self.num_ranks, self.sizes.hidden, self.sizes.dtype.itemsize)

    def _push_slot(self) -> int:
        self._refuse_foreign_capture()
        self._pushes += 1
        return self._pushes % 2

    def _gather_slot(self) -> int:
        self._refuse_foreign_capture()
        self._gathers += 1
        return self._gathers % 2

    def _refuse_foreign_capture(self) -> None:
        if self.device.type == "cuda" and not self._in_capture and torch.cuda.is_current_stream_capturing():
            raise MachineError(
                "A CUDA graph is captured without fences, and its replays would overwrite rows still in use; "
                "capture with SymmetricExchange.capture(graph)."
            )

    def _places(self) -> int:
        return -(-self.sizes.max_tokens // self.num_ranks) * self.num_ranks

    def _check(self, rows: Tensor, cap: int) -> None:
        if rows.dtype != self.sizes.dtype or rows.shape[1] != self.sizes.hidden:
            raise MachineError(
                f"Rows are {rows.dtype} of {rows.shape[1]} columns; the exchange was opened for {self.sizes.dtype} of "
                f"{self.sizes.hidden}."
            )
        if cap * self.num_ranks > self._places():
            raise MachineError(
                f"{cap} rows a rank do not fit; the exchange was opened for {self.sizes.max_tokens} tokens."
            )

    def _agree_on_launches(self) -> None:
        """Ranks that launch differently wait for each other for ever."""
        import triton

        processors = str(count_processors(self.device))
        facts = (str(self.sizes), triton.__version__, torch.__version__, processors, str(FORMS))
        told: list[tuple[str, ...]] = [()] * self.num_ranks
        dist.all_gather_object(told, facts, self.group)
        different = next((other for other in told if other != facts), None)
        trouble = None if different is None else f"opened with {facts[:4]}, another rank with {different[:4]}"
        raise_together(trouble, self.group)


def _check_shape(what: str, found: Tensor, wanted: tuple[int, ...]) -> None:
    """Kernels take sizes on trust: of fewer rows than they are told of they would read, and send, what lies behind."""
    if found.shape != wanted:
        raise MachineError(f"The {what} are {list(found.shape)} where {list(wanted)} must come.")


def open_exchange(sizes: Sizes, device: torch.device, group: dist.ProcessGroup | None = None) -> Exchange:
    """The kernels where all ranks can use them, else torch.distributed on all ranks, with one warning that says why."""
    reason = why_not(device, group)
    if reason is None:
        try:
            return SymmetricExchange(sizes, device, group)
        except MachineError as error:
            reason = str(error)
    reason = agreed(reason, group)
    if dist.get_rank(group) == 0 and device.type == "cuda":
        warnings.warn(f"Rows are exchanged by torch.distributed, which is slower: {reason}", stacklevel=2)
    return CollectiveExchange(group)
