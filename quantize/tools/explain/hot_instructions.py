"""Which instructions are hot while a model runs, from samples of the program counter and a disassembly.

The runtime's kernels are compiled ahead of time and stripped of their names, so that an address in its library is all
there is to see. `perf` samples addresses, `objdump` tells which instructions stand around them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PRODUCTS = {
    "exact": re.compile(r"\{?(?:vpdp(?:bu|bs)[us]ds?|tdpb[us][us]d|[us]{1,2}dot|[us]{1,2}mmla)\b"),
    "saturating": re.compile(r"vpmaddubsw\b"),
    "float": re.compile(r"(?:vfn?m(?:add|sub)\d*[ps][sd]|fmla)\b"),
}
"""Multiply-accumulate instructions of x86 and ARM: of 8-bit integers into 32 bits, into 16 bits, of floats."""

RATE = 1999  # samples per second; a prime, so that no loop keeps in step with it
NEAR = 256  # bytes between two samples of one loop
MARGIN = 96  # bytes around a loop that are disassembled too: its ends are not sampled
LOOPS = 16
TIMEOUT = 60.0  # seconds for a tool
FEW = 50  # samples that tell nothing


@dataclass(frozen=True, slots=True)
class Hot:
    """Where the time of a run went, as instructions.

    Attributes:
        samples: Samples of the program counter inside the runtime's library.
        loops: By multiply-accumulate instruction the share of `samples` in loops made of it, 0..1, most first.
        note: One sentence for people: what was found, or why nothing was.
    """

    samples: int
    loops: dict[str, float]
    note: str

    @property
    def exact(self) -> float:
        """The share of samples in loops of exact integer products."""
        return sum(share for name, share in self.loops.items() if PRODUCTS["exact"].match(name))


def hot_instructions(run: Callable[[], object], library: Path, *, seconds: float = 1.0) -> Hot:
    """Call `run` again and again while `perf` samples this process, and return the instructions that were hot.

    Args:
        run: What to look at; all of its work is done in `library`.
        library: The runtime's shared library.
        seconds: How long to sample.
    """
    for tool in ("perf", "objdump"):
        if shutil.which(tool) is None:
            return _nothing(f"hot instructions were not looked for: there is no {tool} on the PATH")
    try:
        with tempfile.TemporaryDirectory(prefix="requant-") as folder:
            addresses = parse_samples(_sampled(run, Path(folder) / "perf.data", seconds), library.name)
        if addresses.total() < FEW:
            return _nothing(f"hot instructions were not found: {addresses.total()} samples fell into {library.name}")
        sections = parse_sections(_output("objdump", "--section-headers", str(library)))
        return summarise(addresses, lambda start, stop: _disassembled(library, sections, start, stop))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        return _nothing(f"hot instructions were not found: {' '.join(reason.split())[:160]}")


def _nothing(note: str) -> Hot:
    return Hot(0, {}, note)


def _sampled(run: Callable[[], object], file: Path, seconds: float) -> str:
    """Sample this process while it runs, and return what `perf script` prints."""
    run()  # what happens once only is not of interest
    command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(RATE), "-p", str(os.getpid()), "-o", str(file)]
    with subprocess.Popen(
        [*command, "--", "sleep", str(seconds)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        end = time.monotonic() + seconds + TIMEOUT
        while process.poll() is None and time.monotonic() < end:
            run()
        if process.poll() is None:
            process.kill()
        message = process.stderr.read() if process.stderr is not None else ""
    if process.returncode:
        raise subprocess.SubprocessError(f"perf is not permitted, or fails: {message}")
    return _output("perf", "script", "-i", str(file), "-F", "ip,dso", "--show-mmap-events")


def _output(*command: str) -> str:
    """Return what a command prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT)
    return done.stdout


MAPPED = re.compile(r"\[0x([0-9a-f]+)\(0x([0-9a-f]+)\) @ (0|0x[0-9a-f]+) .*\]: \S+ (.*)$")
SAMPLE = re.compile(r"^\s*([0-9a-f]+)\s+\((.*)\)\s*$")


def parse_samples(text: str, library: str) -> Counter[int]:
    """Return how often each place of a library's file, in bytes from its beginning, was sampled.

    Args:
        text: Of ``perf script -F ip,dso --show-mmap-events``.
        library: The name of the library's file.
    """
    mapped: list[tuple[int, int, int]] = []
    found: Counter[int] = Counter()
    for line in text.splitlines():
        if (match := MAPPED.search(line)) is not None:
            if Path(match[4]).name == library:
                mapped.append((int(match[1], 16), int(match[2], 16), int(match[3], 16)))
        elif (match := SAMPLE.match(line)) is not None and Path(match[2]).name == library:
            address = int(match[1], 16)
            place = next(
                (address - start + offset for start, size, offset in mapped if 0 <= address - start < size), -1
            )
            if place >= 0:
                found[place] += 1
    return found


SECTION = re.compile(r"^\s*\d+\s+\S+\s+([0-9a-f]+)\s+([0-9a-f]+)\s+[0-9a-f]+\s+([0-9a-f]+)\s", re.MULTILINE)


def parse_sections(text: str) -> list[tuple[int, int, int]]:
    """Return (place in the file, bytes, address) of each section that ``objdump --section-headers`` lists."""
    return [(int(match[3], 16), int(match[1], 16), int(match[2], 16)) for match in SECTION.finditer(text)]


INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\t(?:\{\w+\} )?([a-z][\w.]*)", re.MULTILINE)


def parse_instructions(text: str) -> list[str]:
    """Return the mnemonics that ``objdump --disassemble --no-show-raw-insn`` prints, in order."""
    return [match[2] for match in INSTRUCTION.finditer(text)]


def _disassembled(library: Path, sections: Sequence[tuple[int, int, int]], start: int, stop: int) -> list[str]:
    """Return the mnemonics between two places of a file."""
    shift = next((address - place for place, size, address in sections if place <= start < place + size), 0)
    text = _output(
        "objdump",
        "--disassemble",
        "--no-show-raw-insn",
        f"--start-address={start + shift}",
        f"--stop-address={stop + shift}",
        str(library),
    )
    return parse_instructions(text)


def summarise(addresses: Counter[int], disassemble: Callable[[int, int], Iterable[str]]) -> Hot:
    """Attribute samples to the multiply-accumulate instruction that their loop is made of.

    Args:
        addresses: Samples by place.
        disassemble: Gives the mnemonics between two places.
    """
    total, shares = addresses.total(), Counter[str]()
    for start, stop, count in loops(addresses)[:LOOPS]:
        names = Counter(
            name
            for name in disassemble(max(0, start - MARGIN), stop + MARGIN)
            if any(pattern.match(name) for pattern in PRODUCTS.values())
        )
        if names:
            shares[names.most_common(1)[0][0]] += count
    found = {name: count / total for name, count in shares.most_common()}
    listed = ", ".join(f"{share:.0%} in loops of {name}" for name, share in found.items())
    return Hot(total, found, f"of {total} samples in the runtime: {listed or 'none in loops of multiply-accumulates'}")


def loops(addresses: Counter[int]) -> list[tuple[int, int, int]]:
    """Return (first place, last place, samples) of each run of places less than `NEAR` apart, most samples first."""
    places = sorted(addresses)
    cuts = [0, *(i for i in range(1, len(places)) if places[i] - places[i - 1] >= NEAR), len(places)]
    parts = [places[begin:end] for begin, end in pairwise(cuts) if end > begin]
    counted = [(part[0], part[-1], sum(addresses[place] for place in part)) for part in parts]
    return sorted(counted, key=lambda part: -part[2])


def runtime_library() -> Path:
    """Return the shared library that holds the runtime's kernels."""
    from onnxruntime.capi import onnxruntime_pybind11_state

    return Path(onnxruntime_pybind11_state.__file__)
