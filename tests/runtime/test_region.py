"""What is asked and agreed before ranks share memory, and how it is laid out and launched on."""

import subprocess
import sys

import pytest
import torch

from smoe_cli.runtime.collectives import CollectiveExchange
from smoe_cli.runtime.launch import FORMS, launch_for, tile_width
from smoe_cli.runtime.region import ALIGNMENT, MAX_BLOCKS, Sizes, _obstacle, _unlinked, agreed, layout, raise_together
from smoe_cli.runtime.symmetric import open_exchange
from smoe_profiles.errors import MachineError
from tests.runtime.ranks import ranks

SIZES = Sizes(1001, 2880, 6, torch.bfloat16)


def test_parts_of_a_region_are_aligned_and_do_not_overlap():
    offsets, size = layout(SIZES, 4)
    starts = sorted(offsets.values())
    assert all(start % ALIGNMENT == 0 for start in starts)
    assert len(set(starts)) == len(starts)
    rows = 4 * 251 * 2880 * 2
    for name, length in (("pushed0", rows), ("gathered1", rows), ("labels0", 1004), ("experts1", 1004 * 6 * 4)):
        after = min(start for start in [*starts, size] if start > offsets[name])
        assert after - offsets[name] >= length
    assert offsets["flags"] == 0
    assert offsets["stamp"] == starts[-1]


def test_a_hidden_size_that_is_no_multiple_of_eight_is_refused():
    with pytest.raises(MachineError, match="Hidden size 100 is not a multiple of 8"):
        Sizes(8, 100, 2, torch.bfloat16)


def test_a_type_without_sums_is_refused():
    with pytest.raises(MachineError, match="float8_e4m3fn"):
        Sizes(8, 96, 2, torch.float8_e4m3fn)


@pytest.mark.parametrize("hidden", [96, 2048, 2880, 4096, 5120, 7168])
@pytest.mark.parametrize("operation", FORMS)
def test_a_launch_has_room_for_its_flags_and_covers_every_row(operation, hidden):
    for cap in (1, 2, 3, 31, 32, 33, 500, 8192):
        launch = launch_for(operation, cap, 2, hidden, 2)
        assert launch == launch_for(operation, cap, 2, hidden, 2)
        assert launch.blocks < MAX_BLOCKS - 2
        assert launch.steps(cap) * launch.blocks * launch.tiles * launch.rows >= cap
        assert (launch.steps(cap) - 1) * launch.blocks * launch.tiles * launch.rows < cap
        assert launch.rows * launch.width <= 2 * 8192


def test_tiles_of_a_wide_row_leave_few_lanes_idle():
    assert [tile_width(hidden, 8192) for hidden in (2048, 4096, 5120, 7168, 2880, 96)] == [
        2048,
        4096,
        1024,
        1024,
        1024,
        64,
    ]


def test_a_pair_without_peer_access_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (2, 1))
    assert _unlinked([("here", 0), ("here", 1)]) is None
    assert _unlinked([("here", 0), ("here", 1), ("here", 2)]) == "GPU 2 has no peer access to GPU 1"


def test_ranks_on_two_hosts_or_on_one_gpu_are_told_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert _unlinked([("here", 0), ("there", 1)]) == "the ranks are on 2 hosts"
    assert "a GPU of its own" in _unlinked([("here", 0), ("here", 0)])
    assert "device numbers are [0, 2]" in _unlinked([("here", 0), ("here", 2)])


def on_cpu():
    sizes = Sizes(8, 96, 2, torch.float32)
    exchange = open_exchange(sizes, torch.device("cpu"))
    return type(exchange) is CollectiveExchange


def test_without_cuda_every_rank_takes_torch_distributed_and_no_kernel_is_launched():
    assert ranks(2).run(on_cpu) == [True, True]


def trouble_of_the_second():
    import torch.distributed as dist

    mine = "it smokes" if dist.get_rank() == 1 else None
    try:
        raise_together(mine, None)
    except MachineError as error:
        return str(error), agreed(None, None)
    return None


def test_what_goes_wrong_on_one_rank_stops_all_with_the_same_words():
    assert ranks(2).run(trouble_of_the_second) == [("rank 1: it smokes", None)] * 2


WITHOUT_TRITON = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import torch
from smoe_cli.runtime import collectives, region, symmetric
torch.version.cuda = torch.version.cuda or "13.0"
print(region._obstacle(torch.device("cuda")))
"""


def test_where_triton_does_not_exist_the_modules_import_and_say_what_to_install():
    said = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=True).stdout
    assert said == "Triton is not installed: pip install 'smoe[runtime]'\n"


def test_other_devices_than_cuda_are_an_obstacle():
    assert "need CUDA devices" in _obstacle(torch.device("cpu"))
