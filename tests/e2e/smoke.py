"""`make smoke`: the five commands on both bundled models, each in an empty folder, as a CI job would run them."""

import subprocess
import sys
import tempfile
import time

RUNS = {"tiny-deepseek": 8, "tiny-mixtral": 2}
TOKENS = 24_000


def main() -> None:
    for model, ep in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            for step in (
                f"profile --model {model} --max-tokens {TOKENS}",
                "build-tables",
                f"cocluster --ep {ep} --effort fast",
                "regroup",
                "verify",
            ):
                started = time.monotonic()
                subprocess.run([sys.executable, "-m", "smoe_cli", *step.split(), "--quiet"], cwd=folder, check=True)
                print(f"{time.monotonic() - started:6.1f} s  smoe {step}", flush=True)


if __name__ == "__main__":
    main()
