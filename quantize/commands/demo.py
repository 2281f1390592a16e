"""`requant demo`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from .app import PATH, ToolCommand
from .options import force_option
from .printing import print_line
from .progress import shown_progress


@click.command(cls=ToolCommand, section="quantize")
@click.argument("folder", type=PATH, default=Path("requant_demo"))
@click.option("--no-open", "closed", is_flag=True, help="Do not open the report in the browser.")
@force_option
def demo(folder: Path, closed: bool, force: bool) -> None:
    """Quantize a small trained model in FOLDER, and open the report. It needs no model and no data of yours.

    FOLDER is made if it does not exist; by default it is requant_demo. The report is opened where stdout is a terminal
    and there is a display.

    \b
    requant demo
    requant demo digits --no-open
    """
    from ..console.quantized import print_quantized
    from ..project.demo import run_demo

    with shown_progress() as progress:
        done = run_demo(folder, force=force, progress=progress)
    print_quantized(done.result)
    print_line(f"report  {done.report}")
    for command in done.commands:
        print_line(f"next    {command}")
    if not closed:
        open_page(done.report)


def open_page(page: Path) -> None:
    """Open a page in the browser, if stdout is a terminal and there is a display."""
    if not (sys.stdout.isatty() and _has_display()):
        return
    import webbrowser

    webbrowser.open(page.resolve().as_uri())


def _has_display() -> bool:
    """Return whether a browser can show a window to the user of this process."""
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
