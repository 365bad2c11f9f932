"""A workload's batch as one rank sees it in each way of running a layer, and the rows that must travel.

Axes: T tokens, G ranks, C = ceil(T / G) rows of a rank, K experts a token, H hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from smoe_cli.runtime.exchange import Plan, Routed
from smoe_cli.runtime.plan import identity_plan, make_plan
from smoe_cli.runtime.workload import CONTIGUOUS, Workload, batch_rows, expert_slots

SHUFFLING, ATTENTION_DP = "speculative", "dp-ep"


@dataclass(frozen=True)
class Case:
    """One way of running a layer. predictor: whose plan shuffles; None without a shuffle. library: sums and gathers by
    the communication library (NCCL), not by our kernels."""

    mode: str
    placement: str
    predictor: str | None = None
    library: bool = False

    @property
    def name(self) -> str:
        parts = (self.mode, self.placement, self.predictor, "library" if self.library else None)
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class Batch:
    """T tokens in one case, on one rank. partial: [T, H]; parts: [G * C, H] what its experts made of received rows;
    scores: None where nothing is shuffled; everywhere: what the router chose for all T; rows: stage -> rows through the
    busiest direction of the busiest rank; busiest_load: activations of the rank that serves most.
    """

    plan: Plan
    scores: Tensor | None
    partial: Tensor
    routed: Routed
    parts: Tensor
    everywhere: tuple[Tensor, Tensor]
    num_slots: int
    rows: dict[str, int]
    local_share: float
    busiest_load: int


def make_batch(
    workload: Workload, case: Case, tokens: int, rank: int, device: torch.device, dtype: torch.dtype
) -> Batch:
    """The case's batch; the same on every rank but for what lies there."""
    ranks, slots = workload.num_ranks, workload.slots[case.placement]
    scores = None
    if case.mode == ATTENTION_DP:
        capacity = -(-tokens // ranks)
        own = workload.own_rows[case.placement][:, torch.arange(capacity) % (len(workload.experts) // ranks)]
        row_of_place, plan = own.reshape(-1).long(), identity_plan(capacity * ranks, ranks, torch.device("cpu"))
    else:
        rows = batch_rows(workload, tokens)
        plan = identity_plan(tokens, ranks, torch.device("cpu"))
        if case.predictor:
            scores = workload.scores[case.placement, case.predictor][rows].contiguous()
            plan = make_plan(scores, ranks)
        occupied = plan.token_of_place >= 0
        row_of_place = torch.where(occupied, rows[plan.token_of_place.clamp(min=0).long()], -1)
    needs = rank_needs(workload, slots, row_of_place)
    home = slice(rank * plan.rows_per_rank, (rank + 1) * plan.rows_per_rank)
    chosen = row_of_place[home].clamp(min=0)
    place = expert_slots(slots, workload.shape.num_experts).to(torch.int32)
    experts, weights = _routing(workload, place, chosen, device)
    generator = torch.Generator(device).manual_seed(rank)

    def noise(rows: int) -> Tensor:
        return torch.randn(rows, workload.shape.hidden, generator=generator, device=device, dtype=dtype)

    return Batch(
        plan=Plan(plan.token_of_place.to(device), plan.place_of_token.to(device), ranks),
        scores=None if scores is None else scores.to(device),
        partial=noise(tokens),
        routed=Routed(
            rows=noise(plan.rows_per_rank),
            experts=experts,
            weights=weights,
            needs=_bits(needs[home]).to(device),
        ),
        parts=noise(len(row_of_place)),
        everywhere=_routing(workload, place, row_of_place[plan.place_of_token.long()], device),
        num_slots=len(slots),
        rows=stage_rows(case.mode, needs, row_of_place >= 0, ranks),
        local_share=_local_share(workload, slots, row_of_place, ranks),
        busiest_load=_busiest_load(workload, slots, row_of_place),
    )


def _routing(workload: Workload, place: Tensor, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Slots [n, K] int32 and weights [n, K] of some rows. place: [E] the slot of every expert."""
    return place[workload.experts[rows].long()].to(device), workload.weights[rows].to(device)


def rank_needs(workload: Workload, slots: Tensor, row_of_place: Tensor) -> Tensor:
    """Which ranks serve the row at each place, [G * C, G] bool; all False where there is no row (-1)."""
    rank = _rank_of_expert(workload, slots)[workload.experts[row_of_place.clamp(min=0)].long()]
    needed = torch.zeros(len(row_of_place), workload.num_ranks, dtype=torch.bool)
    needed.scatter_(1, rank, torch.ones_like(rank, dtype=torch.bool))
    needed[row_of_place < 0] = False
    return needed


def _rank_of_expert(workload: Workload, slots: Tensor) -> Tensor:
    return expert_slots(slots, workload.shape.num_experts) // (len(slots) // workload.num_ranks)


def _bits(needs: Tensor) -> Tensor:
    return (needs.to(torch.int32) << torch.arange(needs.shape[1], dtype=torch.int32)).sum(1).to(torch.int32)


def _local_share(workload: Workload, slots: Tensor, row_of_place: Tensor, ranks: int) -> float:
    """Activations served at home, of all (lar)."""
    there = row_of_place >= 0
    home = torch.arange(len(row_of_place)) // (len(row_of_place) // ranks)
    rank = _rank_of_expert(workload, slots)[workload.experts[row_of_place[there]].long()]
    return float((rank == home[there][:, None]).float().mean())


def _busiest_load(workload: Workload, slots: Tensor, row_of_place: Tensor) -> int:
    rank = _rank_of_expert(workload, slots)[workload.experts[row_of_place[row_of_place >= 0]].long()]
    return int(rank.flatten().bincount().max())


def stage_rows(mode: str, needs: Tensor, occupied: Tensor, ranks: int) -> dict[str, int]:
    """Rows in or out of the busiest rank, whichever is more, by stage. needs: [G * C, G]; occupied: [G * C]."""
    own = occupied.reshape(ranks, -1).sum(1)
    home = torch.arange(len(needs)) // (len(needs) // ranks)
    remote = needs.clone()
    remote[torch.arange(len(needs)), home] = False
    sent = torch.zeros(ranks, dtype=torch.int64).index_add_(0, home, remote.sum(1))
    exchanged = int(torch.maximum(sent, remote.sum(0)).max())
    tokens = int(own.sum())
    gathered = int(torch.maximum(tokens - own, (ranks - 1) * own).max())
    moved = {"dispatch": exchanged, "combine": exchanged}
    match mode:
        case "dp-ep":
            return moved
        case "replicated":
            return {"all-reduce": 2 * gathered, "all-reduce experts": 2 * gathered}
        case "ar-ep":
            return {"all-reduce": 2 * gathered, **moved, "all-gather": gathered}
    return {"reduce-scatter": gathered, **moved, "all-gather": gathered}


def default_cases(workload: Workload) -> list[Case]:
    """Everything worth comparing on a workload."""
    plain = [Case(mode, placement) for mode in ("sp-ep", ATTENTION_DP) for placement in workload.slots]
    shuffled = [Case(SHUFFLING, placement, predictor) for placement, predictor in workload.scores]
    library = [Case(mode, CONTIGUOUS, library=True) for mode in ("ar-ep", "sp-ep")]
    return [*library, *plain, *shuffled, Case("replicated", CONTIGUOUS)]
