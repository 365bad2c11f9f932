"""What looking at a trace found, layer by layer.

Axes: E experts, U token ids seen.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smoe_profiles.inspection.concentration import Concentration, Prediction
from smoe_profiles.inspection.kinship import Kinship, agreement
from smoe_profiles.inspection.lint import Finding, judge, label
from smoe_profiles.trace import Trace, TraceLayer

NO_TOKEN_IDS = "no token ids: concentration and prediction are not known"
NOTHING_TO_PREDICT = "no fit or no held-out rows: nothing to predict"

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LayerReport:
    """One layer's numbers. count: [E] activations; zero_count: those of zero experts.

    by_source, by_phase: name -> [E]; kinship: source -> how it compares with the largest source. concentration and
    prediction are None where the trace holds no token ids.
    """

    layer: TraceLayer
    rows: int
    count: Int64Array
    zero_count: int
    by_source: dict[str, Int64Array]
    by_phase: dict[str, Int64Array]
    concentration: Concentration | None
    prediction: Prediction | None
    kinship: dict[str, Kinship]


@dataclass(frozen=True)
class Census:
    """What rows there are. rows: [parts, sources, phases]; token_ids: [U] seen, sorted; unknown: rows without an id."""

    sources: list[str]
    phases: list[str]
    rows: Int64Array
    token_ids: npt.NDArray[np.uint32]
    unknown: int


@dataclass(frozen=True)
class Inspection:
    """A trace, looked at. rows: by part; census: None below level token; missing: what the trace cannot tell."""

    trace: Trace
    rows: dict[str, int]
    census: Census | None
    token_ids: int | None
    layers: list[LayerReport]
    findings: list[Finding]
    missing: list[str]

    @property
    def verdict(self) -> str:
        return judge(self.findings, sum(self.rows.values()), [label(report.layer) for report in self.layers])

    def agreement(self, source: str) -> float | None:
        """How alike a source routes its token ids to the largest source; None if that cannot be told."""
        return source_agreement(self.layers, source)


def source_agreement(layers: list[LayerReport], source: str) -> float | None:
    """The same, from the layers alone."""
    return agreement([(report.kinship[source], report.layer.top_k) for report in layers if source in report.kinship])
