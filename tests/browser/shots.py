"""Photographs the report of a folder, and measures what opening it costs: `make shots`.

The folder is one that `smoe report` reads (SMOE_FOLDER), or made here from the reference model in SMOE_DATA. A person
looks at each picture; the limits on size and time are held here, where one page is opened at a time.
"""

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from tests.browser.chromium import Chromium, Page, find_chromium
from tests.browser.conftest import DRAWN
from tests.conftest import smoe

DATA = Path(os.environ.get("SMOE_DATA", "../shared/data")).resolve()
IMAGES = Path("docs/images")
MOST_BYTES, MOST_SECONDS, MOST_PICTURE = 6_000_000, 2.0, 150_000
OPENINGS = 5
SHOTS = {
    "report-light": (1400, "light", None, 1000),
    "report-dark": (1400, "dark", None, 1000),
    "report-phone-light": (390, "light", None, 1000),
    "report-phone-dark": (390, "dark", "coactivation", 1000),
    "report-coactivation": (1400, "light", "coactivation", 780),
    "report-load-dark": (1400, "dark", "expert_load", 680),
    "report-traffic": (1400, "light", "traffic", 800),
}
"""Picture -> width, scheme, the section at its top (None: the first screen), height."""

OPENED = """(() => {
  const paint = performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? 0;
  return Math.max(performance.getEntriesByType("navigation")[0].loadEventEnd, paint) / 1000;
})()"""
"""Seconds until the page had loaded and shown something."""


def reference_folder(into: Path) -> Path:
    """A folder with everything that the report shows: ref-deepseek-v2 on eight ranks."""
    model, corpus = DATA / "models/ref-deepseek-v2", DATA / "corpus/test.jsonl.xz"
    for command in (
        ("profile", "--model", model, "--dataset", corpus, "--max-tokens", "50000"),
        ("build-tables",),
        ("cocluster", "--ep", "8"),
        ("evaluate", "--predictor", "token", "--predictor", "markov", "--predictor", "fused"),
    ):
        smoe(*command, "-C", "ref-deepseek-v2", "--quiet", cwd=into)
    return into / "ref-deepseek-v2"


def photograph(browser: Chromium, path: Path) -> None:
    """Every picture of SHOTS, and what the console said meanwhile."""
    for name, (width, scheme, section, height) in SHOTS.items():
        page = browser.open(path, width, height, scheme)
        page.ask(DRAWN)
        if section:
            page.ask(f"document.getElementById('{section}').scrollIntoView({{ behavior: 'instant' }})")
        picture = IMAGES / f"{name}.webp"
        page.photograph(picture)
        print(f"{picture}: {picture.stat().st_size:,} bytes")
        assert page.faults() == []
        assert picture.stat().st_size <= MOST_PICTURE
        page.close()


def check_figures(browser: Chromium, path: Path, folder: Path) -> None:
    """The first screen shows what the evaluation measured, each figure as it stands there."""
    evaluation = json.loads(next(folder.glob("evaluation-*/evaluation.json")).read_text(encoding="utf-8"))
    page = browser.open(path)
    shown = set(page.ask("[...document.querySelectorAll('.states data')].map((cell) => +cell.value)"))
    page.close()
    for total in (evaluation["total"], evaluation["dp-ep"]["total"]):
        for state, by_predictor in total.items():
            for predictor, by_assignment in by_predictor.items():
                figures = by_assignment["rule"]
                for name in ("lar", "remote_fanout", "load_imbalance"):
                    assert figures[name] in shown, f"{state}, {predictor}: {name} {figures[name]}"


def seconds_to_open(browser: Chromium, path: Path) -> float:
    """Median of the time until the page has loaded and shown its first content."""
    found = []
    for _ in range(OPENINGS):
        page: Page = browser.open(path)
        page.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        found.append(page.ask(OPENED))
        page.close()
    return statistics.median(found)


def main() -> None:
    """Make the page, open it, photograph it; exit 1 where a limit is passed."""
    command = find_chromium()
    if command is None:
        sys.exit("no Chromium on this machine (apt install chromium)")
    with tempfile.TemporaryDirectory(prefix="smoe-shots-") as scratch:
        folder = Path(os.environ["SMOE_FOLDER"]) if "SMOE_FOLDER" in os.environ else reference_folder(Path(scratch))
        path = Path(scratch) / "report.html"
        smoe("report", "-C", folder.name, "--out", path, "--quiet", cwd=folder.resolve().parent)
        browser = Chromium(command)
        try:
            seconds = seconds_to_open(browser, path)
            print(f"{path.stat().st_size:,} bytes, open in {seconds:.2f} s (median of {OPENINGS})")
            check_figures(browser, path, folder)
            IMAGES.mkdir(exist_ok=True)
            photograph(browser, path)
        finally:
            browser.close()
        if path.stat().st_size > MOST_BYTES or seconds > MOST_SECONDS:
            sys.exit(f"more than {MOST_BYTES:,} bytes or {MOST_SECONDS} s")


if __name__ == "__main__":
    main()
