"""Names of what can be chosen; imports nothing, so that a command line can list them at no cost."""

from enum import StrEnum

BATCH_TOKENS = 4096
"""Padded positions of a batch while profiling."""


class SplitMode(StrEnum):
    """How documents are shared out: by hash, all but one in eight to fit, or all to held-out."""

    HASH = "hash"
    FIT = "fit"
    HELDOUT = "heldout"


class SplitBy(StrEnum):
    """What `hash` mode goes by: the document's hash, or the order of the input (even fit, odd held-out)."""

    HASH = "hash"
    ORDER = "order"


class Pack(StrEnum):
    """isolate: no document attends another (long ones in chunks); windows: documents of one part joined and cut."""

    ISOLATE = "isolate"
    WINDOWS = "windows"


class Dtype(StrEnum):
    """Number format of the weights while profiling; auto: as stored."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Level(StrEnum):
    """What a trace knows: each token's experts, counts by token id, pairs of experts, or only counts of experts."""

    TOKEN = "token"
    TOKEN_COUNT = "token-count"
    PAIR = "pair"
    COUNT = "count"


class EarlyGate(StrEnum):
    """On which rows the router is asked before attention: none, one batch in eight, or all."""

    NONE = "none"
    SAMPLE = "sample"
    ALL = "all"


class ImportFormat(StrEnum):
    """Whose records smoe import reads; auto: told by content."""

    AUTO = "auto"
    SGLANG = "sglang"
    VLLM = "vllm"
    TRTLLM = "trtllm"
    REPLAY = "replay"
    EXFLOW = "exflow"
    NPZ = "npz"
