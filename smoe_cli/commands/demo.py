"""smoe demo: the main job end to end on the bundled tiny model, ending with one table."""

import shlex

import typer

from smoe_cli.options import Common

MODEL, EP, TOKENS = "tiny-deepseek", 8, 40_000


def demo(common: Common) -> None:
    """Run the whole path on the bundled tiny-deepseek. In the folder's demo/; shows what it gains."""
    from smoe_cli.app import run

    steps = (
        f"profile --model {MODEL} --max-tokens {TOKENS}",
        "build-tables",
        f"cocluster --ep {EP} --effort fast",
        f"regroup --placement placement-ep{EP}",
        f"verify --placement placement-ep{EP}",
        f"evaluate --placement placement-ep{EP}",
    )
    folder = common.dir / "demo"
    for step in steps:
        last = step == steps[-1]
        common.console.note(f"$ smoe {step} -C {folder}")
        arguments = [*shlex.split(step), "--dir", str(folder)]
        if step.split()[0] not in ("verify", "evaluate"):
            arguments.append("--force")
        if common.console.json and last:
            arguments.append("--json")
        if common.console.quiet or not last:
            arguments.append("--quiet")
        code = run(arguments) if last or not common.console.json else _silently(arguments)
        if code:
            raise typer.Exit(code)


def _silently(arguments: list[str]) -> int:
    """Run a step with its results off stdout, so that --json leaves one document there."""
    import sys
    from contextlib import redirect_stdout

    from smoe_cli.app import run

    with redirect_stdout(sys.stderr):
        return run(arguments)
