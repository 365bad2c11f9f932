"""Our exports loaded by SGLang's own code, and its load balancer's output read by ours; no GPU is needed.

    pip download sglang==0.5.23 --no-deps && unzip -q sglang-*.whl 'sglang/srt/eplb/*' -d sglang-code
    python -m tests.bench.engine_code sglang-code

The two modules that are run ask their server for settings; a stand-in answers for 61 layers, 256 experts and 16 ranks.
"""

import sys
import types
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from smoe_cli.engines import eplb, sglang
from smoe_cli.engines.engine_map import EngineMap, ModelLayers, faults, select_layers
from smoe_cli.engines.files import read_engine_map

LAYERS = ModelLayers(moe=tuple(range(3, 61)), num_experts=256, hidden=61, extra=1, family="deepseek_v3")
RANKS, REDUNDANT = 16, 32


def stand_in(name: str, **members: object) -> None:
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


def load(name: str, path: Path) -> types.ModuleType:
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def settings(file: Path) -> None:
    moe = types.SimpleNamespace(
        init_expert_location=str(file),
        ep_num_redundant_experts=REDUNDANT,
        ep_dispatch_algorithm="static",
        ep_join_mode=None,
        moe_a2a_backend="none",
    )
    stand_in(
        "sglang.srt.runtime_context",
        get_device=lambda: types.SimpleNamespace(device="cpu"),
        get_exec=lambda: types.SimpleNamespace(moe=moe),
        get_parallel=lambda: types.SimpleNamespace(
            ep_size=RANKS, elastic_ep_initial_size=None, nnodes=2, tp_size=RANKS
        ),
        get_resources=lambda: None,
    )
    described = types.SimpleNamespace(
        get_model_config_for_expert_location=lambda _config: types.SimpleNamespace(
            num_layers=LAYERS.hidden, num_logical_experts=LAYERS.num_experts, num_groups=8
        )
    )
    stand_in("sglang.srt.model_loader", get_model_architecture=lambda _config: (described, None))
    elastic = dict.fromkeys(("elastic_expanded_world_enabled",), lambda: False)
    stand_in("sglang.srt.elastic_ep", **elastic)
    stand_in("sglang.srt.elastic_ep.elastic_ep", **elastic)


def our_map() -> EngineMap:
    """Every expert once, and two further ones on each rank."""
    generator = np.random.default_rng(0)
    rows = []
    for _ in LAYERS.moe:
        held = generator.permutation(LAYERS.num_experts).reshape(RANKS, -1)
        more = [generator.choice(np.setdiff1d(np.arange(256), row), REDUNDANT // RANKS, replace=False) for row in held]
        rows.append(np.concatenate([held, more], axis=1).reshape(-1))
    return EngineMap(np.stack(rows), LAYERS.moe, num_ranks=RANKS)


def main() -> None:
    code = Path(sys.argv[1]) / "sglang/srt/eplb"
    found = our_map()
    with TemporaryDirectory() as folder:
        for write, name in ((sglang.write_json, "map.json"), (sglang.write_pt, "map.pt")):
            path = Path(folder) / name
            write(path, found, LAYERS)
            settings(path)
            location = load("sglang_expert_location", code / "expert_location.py")
            metadata = location.compute_initial_expert_location_metadata(
                types.SimpleNamespace(hf_config=None), moe_ep_rank=3
            )
            read = metadata.physical_to_logical_map.numpy()
            assert (read[list(LAYERS.moe)] == found.slots).all()
            assert (read[:3] == np.arange(288) % 256).all()
            log2phy, logcnt = eplb.copies(found.slots, 256)
            valid = metadata.logical_to_all_physical_map_num_valid.numpy()[3:]
            assert (valid <= logcnt).all()  # it may keep the nearest copies alone
            assert metadata.num_local_physical_experts == 18
            print(f"{name}: SGLang's own code reads the {read.shape[0]} x {read.shape[1]} map back as it was written")
        balancer = load("sglang_deepseek_eplb", code / "eplb_algorithms/deepseek.py")
        load_counts = torch.from_numpy(np.random.default_rng(1).gamma(0.5, 1000, (58, 256)))
        phy2log, log2phy, logcnt = balancer.rebalance_experts(load_counts, 288, 8, 2, RANKS, True)
        torch.save({"phy2log": phy2log, "log2phy": log2phy, "logcnt": logcnt}, Path(folder) / "eplb.pt")
        back = select_layers(read_engine_map(Path(folder) / "eplb.pt"), LAYERS)
        ours, counted = eplb.copies(back.slots, 256)
        assert (counted == logcnt.numpy()).all()
        width = ours.shape[2]
        assert (np.sort(ours, axis=2) == np.sort(log2phy.numpy()[:, :, :width], axis=2)).all()
        said = faults(back, 256, RANKS)
        layers, slots = phy2log.shape
        print(f"eplb.pt: its balancer's {layers} x {slots} map is read; {len(said)} layers have faults: {said[:1]}")


if __name__ == "__main__":
    main()
