"""Attack requant with broken models, data and side files: ``python -m tests.attack --seconds 600 --seed 1``.

``make attack`` runs this. A failure prints a command that runs its case alone; with ``--keep`` its folder stays.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path

from .case import Case, Outcome, Ran
from .families import FAMILIES
from .server import Limits, Server, run_all

CLASSES = ("traceback", "signal", "hang", "cpu", "leftover", "memory", "long line", "control")
"""The columns of the table; other classes are counted together."""


def main() -> int:
    """Run the attacks of the command line, print the failures and a table; return 1 after a failure."""
    options = _parse()
    root = Path(options.keep or tempfile.mkdtemp(prefix="attack-")).absolute()
    server = Server(
        root, options.jobs, bool(options.keep), bool(options.keep and options.only), Limits(cpu=options.cpu)
    )
    outcomes = []
    try:
        cases = _chosen(options, root)
        for outcome in run_all(cases, server):
            outcomes.append(outcome)
            if outcome.problems:
                _print_failure(outcome, options.seed)
            elif options.verbose:
                _print_commands(outcome)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        if not options.keep:
            shutil.rmtree(root, ignore_errors=True)
    print(groups(outcomes, options.seed))
    print(table(outcomes, by_kind=not options.markdown))
    return 1 if any(outcome.problems for outcome in outcomes) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY[:CASES]", type=_family, help="[default: all, without end]"
    )
    parser.add_argument("--seed", type=int, default=0, help="every seed gives other cases")
    parser.add_argument("--cases", type=int, default=2**62, help="cases of a family without a number")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after so many seconds")
    parser.add_argument("--start", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", metavar="KIND[:NUMBER]", help="one kind, or one case")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases at a time")
    parser.add_argument("--cpu", type=int, default=60, help="seconds of CPU of a command [default: 60]")
    parser.add_argument(
        "--keep", metavar="DIR", help="a folder where the files of failed cases stay; with --only, of all cases"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/trust.md")
    parser.add_argument("--verbose", action="store_true", help="print every command")
    return parser.parse_args()


def _family(text: str) -> tuple[str, int | None]:
    """Return the name of a family and the number of its cases; None if it is not given."""
    name, _, count = text.partition(":")
    if name not in FAMILIES:
        raise argparse.ArgumentTypeError(f"no family {name!r}; one of {', '.join(FAMILIES)}")
    return name, int(count) if count else None


def _chosen(options: argparse.Namespace, root: Path) -> Iterator[Case]:
    """Yield the cases of the command line: the families take turns."""
    ends = {
        name: options.start + (count or options.cases) for name, count in options.families or zip(FAMILIES, repeat(0))
    }
    until = time.monotonic() + options.seconds
    for name in ends:
        FAMILIES[name].prepare(root)
    kind, _, number = (options.only or "").partition(":")
    numbers = [int(number)] if number else range(options.start, max(ends.values()))
    for at in numbers:
        for name in (name for name, end in ends.items() if at < end or number):
            case = FAMILIES[name].cases(name, options.seed)(at)
            if time.monotonic() > until:
                return
            if kind in ("", case.kind):
                yield case


def _print_failure(outcome: Outcome, seed: int) -> None:
    print(f"python -m tests.attack {outcome.family} --seed {seed} --only {outcome.kind}:{outcome.number}")
    if outcome.fault:
        print(f"    harness: {outcome.fault}")
    for ran in outcome.ran:
        for problem in ran.problems:
            print(f"    {problem}\n        requant {' '.join(ran.command)}")
    sys.stdout.flush()


def _print_commands(outcome: Outcome) -> None:
    for ran in outcome.ran:
        print(f"{outcome.kind}:{outcome.number} {ran.code} {ran.cpu} s {ran.peak} MB requant {' '.join(ran.command)}")


def groups(outcomes: Iterable[Outcome], seed: int) -> str:
    """Return the failures that look alike, the most frequent first, each with one example."""
    alike: dict[str, list[tuple[Outcome, Ran, str]]] = defaultdict(list)
    for outcome in outcomes:
        for ran in outcome.ran:
            for problem in ran.problems:
                kind, _, detail = problem.partition(": ")
                place = re.search(r"\[[^\]]*\]$", detail)
                key = place[0] if place else re.sub(r"[0-9]+|'.*|\".*|requant-\w+", "~", detail)[:60]
                alike[f"{outcome.family} {kind} {key}"].append((outcome, ran, problem))
    lines = []
    for key, found in sorted(alike.items(), key=lambda item: -len(item[1])):
        outcome, ran, problem = found[0]
        lines += [f"{len(found)} x {key}", f"    {problem[:300]!r}", f"    requant {shlex.join(ran.command)[:300]}"]
        lines.append(
            f"    python -m tests.attack {outcome.family} --seed {seed} --only {outcome.kind}:{outcome.number}"
        )
    return "\n".join(lines)


def table(outcomes: Iterable[Outcome], *, by_kind: bool) -> str:
    """Return counts in markdown: a row for each family, or for each kind of damage."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[f"{outcome.family}, {outcome.kind}" if by_kind else outcome.family].append(outcome)
        groups["all"].append(outcome)
    head = ("input", "cases", "commands", "exit 0 or 1", "exit 2", *CLASSES, "other", "largest CPU", "largest memory")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name in [*sorted(groups.keys() - {"all"}), *(["all"] if groups else [])]:
        lines.append(f"| {' | '.join([name, *_row(groups[name])])} |")
    return "\n".join(lines)


def _row(outcomes: list[Outcome]) -> list[str]:
    ran = [ran for outcome in outcomes for ran in outcome.ran]
    found = Counter(problem.partition(":")[0] for outcome in outcomes for problem in outcome.problems)
    codes = Counter(each.code for each in ran)
    counts = [len(outcomes), len(ran), codes[0] + codes[1], codes[2], *(found[name] for name in CLASSES)]
    other = sum(found.values()) - sum(found[name] for name in CLASSES)
    cpu, peak = max((r.cpu for r in ran), default=0.0), max((r.peak for r in ran), default=0.0)
    return [*map(str, [*counts, other]), f"{cpu:.1f} s", f"{peak:.0f} MB"]


if __name__ == "__main__":
    sys.exit(main())
