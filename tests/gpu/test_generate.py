"""A model shared by all GPUs through our kernels is the model on one; see generate_ranks.py for what must hold."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.gpus import COUNT, SHARED

ROOT = Path(__file__).parents[2]
MODEL = Path(os.environ.get("SMOE_DATA", ROOT.parent / "shared/data")) / "models/ref-deepseek-v2"
RANKS = max((ranks for ranks in (2, 4, 8) if ranks <= COUNT), default=0)
"""The model has eight heads."""


@pytest.mark.gpu
@pytest.mark.skipif(RANKS == 0, reason=f"needs two GPUs of one host, {COUNT} found")
@pytest.mark.parametrize("backend", ["symmetric"] if SHARED else ["symmetric", "collectives"])
def test_ranks_on_gpus_give_the_logits_and_the_text_of_one_process(backend, tmp_path):
    from tests.runtime.models import make_map

    if not MODEL.exists():
        pytest.skip(f"{MODEL} is not there; name its folder's root by SMOE_DATA")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [str(ROOT / "tests/gpu/generate_ranks.py"), str(MODEL), str(make_map(MODEL, RANKS, tmp_path)), backend]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
