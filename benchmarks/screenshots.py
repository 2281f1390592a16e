"""Take the pictures of docs/images: report, `requant view`, several runs, `requant check`, a notebook, and the site.

The site must be in build/site (`make docs`).

python -m benchmarks.screenshots [FOLDER]
"""

from __future__ import annotations

import contextlib
import html
import os
import pty
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from .report_open import BROWSERS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, ViewportSize

ROOT = Path(__file__).parents[1]
REQUANT = str(Path(sys.executable).with_name("requant"))
LOOKS: dict[str, tuple[int, int, bool]] = {
    "light": (1280, 800, False),
    "dark": (1280, 800, True),
    "phone": (390, 844, False),
}
"""By name: width and height of the window in pixels, and whether it is dark."""
COLUMNS = {"light": 100, "dark": 100, "phone": 48}
"""Columns of the terminal."""
RUNS = {"minmax": ("--calibration", "minmax", "--effort", "low"), "auto": (), "high": ("--effort", "high")}
"""By name: the options of the runs that are compared."""
DATA = "digits.npz:calib"
SITE = ROOT / "build" / "site"
CELL = f"""from requant import quantize_model

quantize_model("digits.onnx", "{DATA}", "digits_int8.onnx")"""
"""A cell of a notebook. Its value is shown below it."""


def main(folder: Path) -> None:
    """Make all pages from the sample models, and take their pictures."""
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        work = Path(made)
        pages = make_pages(work)
        program = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, path in pages.items():
            for look in LOOKS:
                page = opened(browser, path, look)
                page.wait_for_selector("html[data-ready=yes]")
                page.screenshot(path=folder / f"{name}-{look}.png")
        charts = opened(browser, pages["report"], "dark")
        charts.set_viewport_size({"width": 1280, "height": 1330})
        charts.evaluate("scrollTo(0, document.getElementById('noise').offsetTop - 20)")
        charts.wait_for_selector("#chart-histogram .bar")
        charts.screenshot(path=folder / "report-charts.png")
        for name, look, path in (*make_terminals(work), *make_notebooks(work)):
            page = opened(browser, path, look)
            page.set_viewport_size({"width": 390 if look == "phone" else 860, "height": 40})
            page.screenshot(path=folder / f"{name}-{look}.png", full_page=True)
        for look in LOOKS:
            page = opened(browser, SITE / "tutorial.html", look)
            page.wait_for_load_state("networkidle")
            page.screenshot(path=folder / f"site-{look}.png")
        browser.close()


def opened(browser: Browser, path: Path, look: str) -> Page:
    """Open a file in a window of its own."""
    width, height, dark = LOOKS[look]
    window: ViewportSize = {"width": width, "height": height}
    scheme = "dark" if dark else "light"
    context = browser.new_context(viewport=window, color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(path.as_uri())
    return page


def make_pages(work: Path) -> dict[str, Path]:
    """Quantize a model, compare three runs of it, and view another model; return the pages by name."""
    for name in ("digits.onnx", "digits_mobile.onnx", "digits.npz"):
        shutil.copy(ROOT / "sample_models" / name, work)
    for name, options in RUNS.items():
        reports = ("--report", f"{name}.json", "--report", f"{name}.html")
        run(work, "quantize", "digits.onnx", "--data", DATA, "-o", f"digits_{name}.onnx", *reports, *options)
    run(work, "report", *(f"{name}.json" for name in RUNS), "-o", "runs.html")
    run(work, "view", "digits_mobile.onnx", "-o", "view.html")
    return {"report": work / "auto.html", "runs": work / "runs.html", "view": work / "view.html"}


def make_terminals(work: Path) -> Iterator[tuple[str, str, Path]]:
    """Write what `requant check` prints, as pages: a terminal of each look."""
    check = ("check", "--float", "digits.onnx", "--model", "digits_auto.onnx", "--data", "digits.npz")
    run(work, *check, "--update")
    for look, columns in COLUMNS.items():
        printed = on_terminal(work, columns, *check)
        path = work / f"check-{look}.html"
        path.write_text(as_page(f"$ requant {' '.join(check)}\n{printed}", columns, dark=LOOKS[look][2]))
        yield "check", look, path


def make_notebooks(work: Path) -> Iterator[tuple[str, str, Path]]:
    """Run the cell of a notebook, and write it and what a notebook shows of its value, as pages: one of each look."""
    statements, value = CELL.rsplit("\n", 1)
    program = f"{statements}\nprint(({value})._repr_html_())"
    shown = subprocess.run([sys.executable, "-c", program], cwd=work, check=True, capture_output=True, text=True).stdout
    for look in LOOKS:
        path = work / f"notebook-{look}.html"
        ink, paper, shade = ("#ddd", "#111", "#222") if LOOKS[look][2] else ("#222", "#fff", "#f5f5f5")
        style = (
            f"body {{ margin: 0; padding: 1rem; font: 13px/1.4 sans-serif; color: {ink}; background: {paper} }} "
            f"pre {{ padding: .6rem; background: {shade}; white-space: pre-wrap }} td, th {{ vertical-align: top }}"
        )
        cell = f"<style>{style}</style><pre>{html.escape(CELL)}</pre>{shown}"
        path.write_text(f'<!doctype html><meta charset="utf-8">{cell}')
        yield "notebook", look, path


def run(work: Path, *arguments: str) -> None:
    """Run a command in a folder.

    Raises:
        CalledProcessError: The command fails.
    """
    subprocess.run([REQUANT, *arguments], cwd=work, check=True, capture_output=True)


def on_terminal(work: Path, columns: int, *arguments: str) -> str:
    """Run a command on a terminal; return what it prints there, else what it prints on stderr."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color"}
    child = subprocess.Popen(
        [REQUANT, *arguments], cwd=work, stdout=terminal, stderr=subprocess.PIPE, env=environment, text=True
    )
    os.close(terminal)
    assert child.stderr is not None
    aside = child.stderr.read()
    child.wait()
    parts: list[bytes] = []
    with contextlib.suppress(OSError):  # at the end the terminal is closed
        while part := os.read(controller, 65536):
            parts.append(part)
    os.close(controller)
    return b"".join(parts).decode().replace("\r\n", "\n") or aside


def as_page(text: str, columns: int, *, dark: bool) -> str:
    """Return terminal text as HTML."""
    from rich.console import Console
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI
    from rich.text import Text

    console = Console(record=True, width=columns, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(text))
    size = 13 if columns > 60 else 11.5
    layout = (
        '<!doctype html><meta charset="utf-8"><style>{stylesheet} body {{ margin: 0; padding: 1.2rem; '
        "color: {foreground}; background: {background}; }} "
        f"pre {{{{ margin: 0; font: {size}px/1.45 'DejaVu Sans Mono', monospace; }}}}</style><pre>{{code}}</pre>"
    )
    return console.export_html(theme=MONOKAI if dark else DEFAULT_TERMINAL_THEME, code_format=layout)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs" / "images")
