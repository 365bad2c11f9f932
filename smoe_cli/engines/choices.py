"""Names of what can be chosen; imports nothing, so that a command line can list them at no cost."""

from enum import StrEnum


class Target(StrEnum):
    """Whose form of a placement to write."""

    SGLANG = "sglang"
    SGLANG_PT = "sglang-pt"
    TRTLLM = "trtllm"
    EPLB = "eplb"
    ASCEND = "ascend"
    VLLM = "vllm"


class ImportKind(StrEnum):
    """What a file is read as."""

    TRACE = "trace"
    PLACEMENT = "placement"
