"""The program: ``requant``, and ``python -m requant``."""

from __future__ import annotations

from requant.system.imports import forget_empty_paths


def run() -> None:
    """Run the command line of this process in a child process, and end with its exit code; never returns."""
    forget_empty_paths()  # before anything else is imported
    from requant.system.supervisor import supervised

    supervised(_command)


def _command() -> None:
    from requant.cli import main

    main()


if __name__ == "__main__":
    run()
