"""Predicted layer times of what evaluate measures, for each way a state can be run.

Axes: N rows in batches of T, G ranks, K experts a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from smoe_cli.evaluation.breakdown import Shuffle, plain_figures
from smoe_cli.hardware import Hardware, layer_shape
from smoe_profiles.tables import Tables
from smoe_solvers.choices import Mode
from smoe_solvers.figures import Figures, batches, wire_rows
from smoe_solvers.layer_time import LayerCost, count_traffic

UNSHUFFLED = (Mode.SP_EP, Mode.AR_EP, Mode.REPLICATED)
"""Ways to run a layer that leave a token where its position puts it."""


@dataclass(frozen=True)
class Pricing:
    """What figures are priced with. costs: of a layer by way of running, none where its shape is not at hand.

    hidden_size: H or None; top_k: K; batch: T.
    """

    costs: Mapping[Mode, LayerCost]
    hidden_size: int | None
    top_k: int
    batch: int

    def shuffle(self, shuffle: Shuffle, figures: dict[str, Figures]) -> dict[str, dict[str, object]]:
        """A state's figures by assignment, with rows sent, bytes and microseconds by way of running."""
        ranks = shuffle.counts.shape[1]
        return {
            how: plain_figures(one, wire_rows(one.remote_fanout, ranks), self.hidden_size, self._times(shuffle, how))
            for how, one in figures.items()
        }

    def _times(self, shuffle: Shuffle, how: str) -> dict[str, float]:
        """Microseconds of a batch by way of running: the mean over batches, each weighed by its rows."""
        if not self.costs:
            return {}
        home, rows = shuffle.homes[how], len(shuffle.counts)
        block_start = np.array([*(part.start for part in batches(rows, self.batch)), rows], np.int64)
        traffic = count_traffic(shuffle.served(how), home, block_start)
        ways = UNSHUFFLED if shuffle.scores is None else (Mode.SPECULATIVE,)
        return {way: float(np.average(self.costs[way].seconds(traffic), weights=traffic.rows)) * 1e6 for way in ways}

    def requests(self, figures: Figures) -> dict[str, object]:
        """Figures of requests that keep their rank (attention-DP), with what one batch sends and takes."""
        rows = {Mode.DP_EP.value: 2 * figures.remote_fanout}
        times = {}
        if self.costs:
            cost = self.costs[Mode.DP_EP]
            rank_rows = self.batch / cost.num_ranks
            exchange = cost.exchange(np.array([figures.remote_fanout_busiest * rank_rows]))
            experts = cost.experts(np.array([figures.load_imbalance_batch * self.top_k * rank_rows]))
            times[Mode.DP_EP.value] = float(exchange[0] + experts[0]) * 1e6
        return plain_figures(figures, rows, self.hidden_size, times)


def price(tables: Tables, hardware: Hardware, num_ranks: int, hidden_size: int | None, batch: int) -> Pricing:
    """Costs of the tables' layers on this hardware; without times where the model's shape is not at hand."""
    shape = layer_shape(tables.artefact, tables.artefact.path.parent)
    costs = {mode: hardware.layer_cost(mode, num_ranks, shape) for mode in Mode} if shape else {}
    return Pricing(costs, hidden_size, tables.layers[0].top_k, batch)
