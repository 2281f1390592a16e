"""The program: ``requant``, and ``python -m requant``."""

from __future__ import annotations

import gc

from requant.system.imports import forget_empty_paths

OBJECTS = (50_000, 10, 3)
"""The thresholds of Python's garbage collector. A model is many objects that live long. With the default thresholds, a
third of the time of a model of 20,000 nodes is spent on visiting them."""


def run() -> None:
    """Run the command line of this process in a child process, and end with its exit code; never returns."""
    forget_empty_paths()  # before anything else is imported
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback
    from requant.system.supervisor import supervised

    supervised(_command)


def _command() -> None:
    gc.set_threshold(*OBJECTS)
    from requant.cli import main

    main()


if __name__ == "__main__":
    run()
