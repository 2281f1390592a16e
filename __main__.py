"""The program: ``requant``, and ``python -m requant``."""

from __future__ import annotations

from requant.processes.supervisor import supervised


def run() -> None:
    """Run the command line of this process in a child process, and end with its exit code; never returns."""
    supervised(_command)


def _command() -> None:
    from requant.cli import main

    main()


if __name__ == "__main__":
    run()
