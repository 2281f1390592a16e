"""The contract of a command on hostile input, as checks of what it printed and left behind."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import onnx

LINE = 400
"""The largest number of characters of a line on stderr."""
CODES = {0, 1, 2, 129, 130, 143}
"""Done, not worth having, wrong; the last three: interrupted, by code that data may name."""
CACHE = "home/.cache/requant/"
"""What lies here may stay after a refusal: results of measurements, for the next run."""
SECRET = "a-text-from-outside"
"""The content of files that no model may make requant read or copy."""
HTML = "</script><img src=x onerror=alert(7131)>"
LOG_COMMAND = "::stop-commands::attack"

# C0 without tab and newline, DEL, C1, marks that reorder text, line separators.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
TEMPORARY = re.compile(r"(^|/)\.requant-|\.tmp|\.part$|(^|/)tmp[a-z0-9_]{8}|onnxruntime_profile|\.ses")

# What may stand on stderr beside a refusal: notes, and lines that tell where long work is.
KNOWN = re.compile(r"requant: |note: |warning: | *\d+\.\d\d s  \w")

Listing = Mapping[str, tuple[int, int]]
"""Size and time of the last change in ns of each path below a folder."""


def listing(folder: Path) -> Listing:
    """Return everything below a folder; links are not followed."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            status = os.lstat(path)
            is_folder = stat.S_ISDIR(status.st_mode)
            found[os.path.relpath(path, folder)] = (0, 0) if is_folder else (status.st_size, status.st_mtime_ns)
    return found


def printed(stdout: bytes, stderr: bytes, code: int) -> Iterator[str]:
    """Yield what is wrong with the output of a command."""
    for name, data in (("stdout", stdout), ("stderr", stderr)):
        text = data.decode("utf-8", errors="backslashreplace")
        if "Traceback (most recent call last)" in text:
            yield f"traceback: {_last_line(text)}"
        if (found := CONTROL.search(text)) is not None:
            yield f"control: {found[0]!r} on {name}, near {text[max(0, found.start() - 40) : found.end() + 20]!r}"
        if any(line.startswith("::") for line in text.splitlines()):
            yield f"log command: a line of {name} starts with ::"
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            yield f"control: {name} is not UTF-8"
    lines = stderr.decode("utf-8", errors="backslashreplace").split("\n")
    longest = max(lines, key=len)
    if len(longest) > LINE:
        yield f"long line: {len(longest)} characters on stderr: {longest[:100]!r}"
    told = [line for line in lines if line.strip() and not KNOWN.match(line)]
    if code == 2 and "Traceback" not in "\n".join(lines):
        if not lines[-2:-1] or not lines[-2].startswith("requant: "):
            yield f"no reason: exit code 2, and stderr ends with {lines[-2:]!r:.150}"
        elif told:
            yield f"more lines: exit code 2 with other text on stderr: {told[0]!r:.200}"


def _last_line(text: str) -> str:
    """Return the innermost error of a traceback with its place in the source."""
    lines = text.strip().splitlines()
    places = [line.strip() for line in lines if line.strip().startswith("File ")]
    where = re.sub(r'File ".*/(.*?)", line (\d+), in (.*)', r"\1:\2 \3", places[-1]) if places else ""
    ours = [place for place in places if "site-packages" not in place and "/lib/python" not in place]
    own = re.sub(r'File "(?:.*/)?(\w+/\w+\.py)", line (\d+), in (.*)', r"\1:\2", ours[-1]) if ours else ""
    return f"{lines[-1][:160]} [{where}; {own}]"


def left(before: Listing, after: Listing, code: int, folder: Path) -> Iterator[str]:
    """Yield what a command left that it should not have left, and outputs that are not whole."""
    made = [path for path in after if path not in before and not path.startswith(("out/", "home/.cache"))]
    made = [path for path in made if path not in ("home/.cache", "home/.cache/requant")]
    changed = [p for p in after if p in before and before[p] != after[p] and not p.startswith(("out/", CACHE))]
    for path in (p for p in after if p not in before and p.startswith("home/.cache")):
        if TEMPORARY.search(path):
            yield f"leftover: {path}"
    made, changed = ([p for p in paths if p not in _told(folder)] if code == 2 else paths for paths in (made, changed))
    for path in made:
        if path.startswith(("tmp/", "home/")) or TEMPORARY.search(path) or code not in (0, 1):
            yield f"leftover: {path} (exit code {code})"
    if code not in (0, 1):
        yield from (f"changed: {path} (exit code {code})" for path in changed)
        yield from (f"lost: {path} (exit code {code})" for path in before if path not in after and _is_input(path))
        return
    for path in (*made, *changed):
        if not path.startswith(("tmp/", "home/")) and after[path] != (0, 0):
            yield from _whole(folder / path)


def _told(folder: Path) -> set[str]:
    """Return what the last line on stderr calls written, or will go on from: what failed after them does not hide them."""
    stderr = folder / "out" / "stderr"
    lines = stderr.read_text(errors="replace").splitlines() if stderr.exists() else []
    last = lines[-1] if lines else ""
    told = [folder / "work" / path for path in last.partition("; written: ")[2].split(", ") if path]
    if "; the same command goes on where it stopped" in last:
        told += (folder / "work").glob(".*.checkpoint-*")
    inner = [each for path in told for each in (path, *path.rglob("*"))]
    return {str(path.relative_to(folder)) for path in inner}


def _is_input(path: str) -> bool:
    return path.startswith("work/") and ".checkpoint" not in path


def _whole(path: Path) -> Iterator[str]:
    """Yield what is wrong with a written file."""
    read = READERS.get(path.suffix)
    try:
        if read is not None:
            read(path)
    except Exception as error:  # noqa: BLE001 - the message is the finding
        yield f"output: {path.name} cannot be read: {' '.join(str(error).split())[:150]}"
    if path.suffix in (".onnx", ".json", ".html", ".data") and SECRET.encode() in path.read_bytes():
        yield f"secret: {path.name} holds the content of a file outside"


def _page(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if not text.rstrip().endswith("</html>"):
        raise ValueError("the page is cut")
    if "<img src=x onerror" in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL) or HTML in text:
        raise ValueError("the page holds HTML of the model's author")


def _json(path: Path) -> None:
    json.loads(path.read_text(encoding="utf-8"))


def _toml(path: Path) -> None:
    tomllib.loads(path.read_text(encoding="utf-8"))


def _model(path: Path) -> None:
    onnx.load(path)  # with external data


READERS: dict[str, Callable[[Path], None]] = {".onnx": _model, ".json": _json, ".html": _page, ".toml": _toml}
