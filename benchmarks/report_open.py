"""Measure how long report pages take to open in Chromium, until the page is drawn and responds; charts may follow.

requant quantize ... --report run.html
python -m benchmarks.report_open run.html
"""

from __future__ import annotations

import shutil
import statistics
import sys
from pathlib import Path

TIMES = 7
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

ANSWERS = """Math.max(performance.getEntriesByName("requant-ready")[0].startTime,
    performance.getEntriesByName("first-contentful-paint")[0].startTime)"""


def measure(paths: list[Path]) -> list[tuple[str, int, float, float]]:
    """Return for each page its name, its bytes, and the minimum and median milliseconds until it responds."""
    from playwright.sync_api import sync_playwright

    rows = []
    with sync_playwright() as playwright:
        program = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for path in paths:
            spent = []
            for _ in range(TIMES):
                page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
                page.goto(path.resolve().as_uri())
                page.wait_for_selector("html[data-ready=yes]")
                page.wait_for_timeout(200)  # the browser reports the first paint late
                spent.append(page.evaluate(ANSWERS))
                page.context.close()
            rows.append((path.name, path.stat().st_size, min(spent), statistics.median(spent)))
        browser.close()
    return rows


if __name__ == "__main__":
    for name, size, least, middle in measure([Path(argument) for argument in sys.argv[1:]]):
        print(f"{name}: {size / 1e6:.1f} MB, minimum {least:.0f} ms, median {middle:.0f} ms")
