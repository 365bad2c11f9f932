"""Names of what can be chosen; imports nothing, so that a command line can list them at no cost."""

from enum import StrEnum


class Goal(StrEnum):
    """What a placement is optimised for (docs/terms.md)."""

    LAR = "lar"
    FANOUT = "fanout"
    BLEND = "blend"
    ILP = "ilp"
    TIME = "time"


class Mode(StrEnum):
    """How a layer is run (docs/terms.md): what moves every row, and where a row lies when it is dispatched."""

    AR_EP = "ar-ep"
    SP_EP = "sp-ep"
    SPECULATIVE = "speculative"
    DP_EP = "dp-ep"
    REPLICATED = "replicated"


class Method(StrEnum):
    """How to place: the Cross-Entropy search, a proof that nothing is better, or one of the methods to compare with.

    Their modules in smoe_solvers/methods say what each does.
    """

    CE = "ce"
    EXACT = "exact"
    ILS = "ils"
    KMEANS2D = "kmeans2d"
    ALTERNATING = "alternating"
    CE_PLAIN = "ce-plain"
    SPECTRAL = "spectral"
    METIS = "metis"
    MTKAHYPAR = "mtkahypar"
    LOAD = "load"
    CONTIGUOUS = "contiguous"


class Effort(StrEnum):
    """How much to search; counts, not seconds."""

    FAST = "fast"
    DEFAULT = "default"
    THOROUGH = "thorough"


class Assignment(StrEnum):
    """How tokens get a rank from scores: the rule that is served, or min-cost flow as the reference."""

    RULE = "rule"
    EXACT = "exact"


class Predictor(StrEnum):
    """Where the scores come from.

    The token table; the Markov tables; the paper's more confident of both; the layer's router asked before attention;
    a linear map from what is known there; a calibrated mix; or, layer by layer, whichever validation preferred.
    """

    TOKEN = "token"
    MARKOV = "markov"
    PAPER = "paper"
    EARLY_GATE = "early-gate"
    LINEAR = "linear"
    FUSED = "fused"
    SELECTED = "selected"


class Groups(StrEnum):
    """What happens to a group-limited router's groups: anything, or they stay whole."""

    FREE = "free"
    WHOLE = "whole"


class Seeds(StrEnum):
    """Where the search starts: its own seeds, or METIS placements too."""

    OWN = "own"
    METIS = "metis"
