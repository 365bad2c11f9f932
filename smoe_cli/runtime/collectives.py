"""What ranks exchange, on torch.distributed: NCCL where GPUs have no peer access, gloo on the CPU.

Axes as in `exchange`. Rows travel as bytes, so that any type goes over any backend, and sums are made here, in rank
order, so that they are the same bits as those of the kernels. Both modes pad to C rows a rank. `dispatch` and `combine`
read how many rows go where on the host: one synchronisation a dispatch, and no CUDA graph.

The library's own reductions (`library_*`) order their sums as they like; they are benchmark baselines only.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from smoe_cli.runtime.exchange import Norm, Plan, Received, Routed
from smoe_cli.runtime.plan import identity_plan

ALIGNMENT = 16
"""Labels travel behind the rows of the same message; their place is rounded up to this many bytes."""

# torch 2.13 gave both other names, and warns of the old ones
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def rms_norm(rows: Tensor, norm: Norm) -> Tensor:
    """RMS normalisation in fp32, rounded before the weights as transformers does. rows: [..., H]."""
    wide = rows.float()
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + norm.epsilon)
    return norm.weight * scaled.to(rows.dtype)


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], zero where the index is -1. rows: [T, ...]; index: [n]."""
    if not len(rows):
        return rows.new_zeros(len(index), *rows.shape[1:])
    found = rows.index_select(0, index.clamp(min=0))
    return found.masked_fill_((index < 0).view(-1, *[1] * (rows.dim() - 1)), 0)


def rank_bits(needs: Tensor, num_ranks: int) -> Tensor:
    """A column a rank of a bit mask: [n, G] bool. needs: [n] int32."""
    return ((needs[:, None] >> torch.arange(num_ranks, device=needs.device, dtype=needs.dtype)) & 1).bool()


@dataclass(frozen=True)
class _Moves:
    """One dispatch. sent, received: rows to and from each rank, own ones aside; picked: own rows in the order they
    leave; places: places in the order their rows arrive; kept: [C] own rows that need this rank.
    """

    sent: list[int]
    received: list[int]
    picked: Tensor
    places: Tensor
    kept: Tensor


class CollectiveExchange:
    """`Exchange` over a process group; all its ranks call the same methods in the same order."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._moves: _Moves | None = None

    def reduce_scatter(
        self, partial: Tensor, plan: Plan, residual: Tensor | None = None, norm: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        parts = self._to_each(take_rows(partial, plan.token_of_place)).view(self.num_ranks, -1, partial.shape[1])
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        if residual is not None:
            total = total + residual.float()
        summed = total.to(partial.dtype)
        return summed, summed if norm is None else rms_norm(summed, norm)

    def scatter(self, rows: Tensor, plan: Plan) -> Tensor:
        start = self.rank * plan.rows_per_rank
        return take_rows(rows, plan.token_of_place[start : start + plan.rows_per_rank])

    def all_gather(self, rows: Tensor, plan: Plan, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        payload = _bytes(rows).reshape(-1)
        size = len(payload)
        if labels is not None:
            payload = torch.cat([payload, labels, labels.new_zeros(-(size + len(labels)) % ALIGNMENT)])
        gathered = gather_equal(payload, self.group).view(self.num_ranks, -1)
        by_place = gathered[:, :size].reshape(-1).view(rows.dtype).view(-1, rows.shape[1])
        if labels is None:
            return by_place[plan.place_of_token], None
        by_place_labels = gathered[:, size : size + len(labels)].reshape(-1)
        return by_place[plan.place_of_token], by_place_labels[plan.place_of_token]

    def dispatch(self, routed: Routed) -> Received:
        own, top_k = routed.experts.shape
        told = [routed.needs[:, None], routed.experts, routed.weights.contiguous().view(torch.int32)]
        known = gather_equal(torch.cat(told, dim=1), self.group)
        needs = known[:, 0].contiguous()
        moves = self._plan_moves(rank_bits(needs, self.num_ranks), own)
        rows = routed.rows.new_empty(self.num_ranks * own, routed.rows.shape[1])
        rows[moves.places] = self._all_to_all(routed.rows[moves.picked], moves.sent, moves.received)
        rows[self.rank * own : (self.rank + 1) * own] = routed.rows
        self._moves = moves
        weights = known[:, 1 + top_k :].contiguous().view(torch.float32)
        return Received(rows, known[:, 1 : 1 + top_k].contiguous(), weights, needs)

    def combine(self, parts: Tensor, routed: Routed) -> Tensor:
        moves = self._moves
        assert moves is not None, "combine follows a dispatch"
        own = len(routed.rows)
        returned = torch.split(self._all_to_all(parts[moves.places], moves.received, moves.sent), moves.sent)
        homes = torch.split(moves.picked, moves.sent)
        total = parts.new_zeros(own, parts.shape[1], dtype=torch.float32)
        for rank in range(self.num_ranks):
            if rank == self.rank:
                mine = parts[self.rank * own : (self.rank + 1) * own]
                total = torch.where(moves.kept[:, None], total + mine.float(), total)
            else:
                total.index_add_(0, homes[rank], returned[rank].float())
        return total.to(parts.dtype)

    def all_reduce(self, partial: Tensor) -> Tensor:
        plan = identity_plan(len(partial), self.num_ranks, partial.device)
        return self.all_gather(self.reduce_scatter(partial, plan)[0], plan)[0]

    def _plan_moves(self, wanted: Tensor, own: int) -> _Moves:
        """wanted: [G * C, G]; own: C."""
        counts = wanted.view(self.num_ranks, own, self.num_ranks).sum(dim=1).tolist()
        start, stop = self.rank * own, (self.rank + 1) * own
        out_of = wanted[start:stop].clone()
        out_of[:, self.rank] = False
        into = wanted[:, self.rank].clone()
        into[start:stop] = False
        return _Moves(
            sent=[0 if rank == self.rank else counts[self.rank][rank] for rank in range(self.num_ranks)],
            received=[0 if rank == self.rank else counts[rank][self.rank] for rank in range(self.num_ranks)],
            picked=out_of.T.nonzero()[:, 1],
            places=into.nonzero()[:, 0],
            kept=wanted[start:stop, self.rank],
        )

    def _all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Consecutive runs of rows to the ranks in order. Returns what they sent here."""
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(_bytes(found), _bytes(rows.contiguous()), received, sent, group=self.group)
        return found

    def _to_each(self, rows: Tensor) -> Tensor:
        """The g-th of G equal runs of rows to rank g."""
        each = [len(rows) // self.num_ranks] * self.num_ranks
        return self._all_to_all(rows, each, each)


def gather_equal(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Every rank's values, which have one shape, one after another. values: [n, ...]."""
    found = values.new_empty(dist.get_world_size(group) * len(values), *values.shape[1:])
    if values.numel():
        _all_gather(_bytes(found), _bytes(values.contiguous()), group=group)
    return found


def _bytes(values: Tensor) -> Tensor:
    """The same memory as uint8, its last axis longer."""
    return values.view(torch.uint8)


def library_reduce_scatter(partial: Tensor, plan: Plan, group: dist.ProcessGroup | None = None) -> Tensor:
    """Permute, then the library's reduce-scatter. partial: [T, H]. Returns [C, H]."""
    found = partial.new_empty(plan.rows_per_rank, partial.shape[1])
    _reduce_scatter(found, take_rows(partial, plan.token_of_place), group=group)
    return found


def library_all_reduce(partial: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The library's sum over ranks of [T, H], in place."""
    dist.all_reduce(partial, group=group)
    return partial


def library_all_gather(rows: Tensor, plan: Plan, group: dist.ProcessGroup | None = None) -> Tensor:
    """The library's all-gather, then permute. rows: [C, H]. Returns [T, H]."""
    found = rows.new_empty(plan.num_ranks * len(rows), rows.shape[1])
    _all_gather(found, rows, group=group)
    return found[plan.place_of_token]
