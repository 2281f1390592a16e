"""Damage to side files: to their bytes, to the values of JSON, to texts, and to what is at their path."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

Damage = Callable[[Random, bytes], bytes]

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, 1e308, -1e308, 5e-324, float("nan"), float("inf"),
    float("-inf"), "", "text", "\x1b[31m\u202e", "\0", "a\n::stop-commands::x\n", "x" * 100_000, [], {}, [[]], [None], {"": None}, {"a": 1},
    ["x"] * 1000, "1", "nan", "../../etc/passwd", "/dev/zero", "</script><img src=x onerror=alert(7131)>", [1, 2, 3], [-1.5, "a"],
)  # fmt: skip


def cut(random: Random, data: bytes) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def flip(random: Random, data: bytes) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(random.choice((1, 1, 3, 30))):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def insert(random: Random, data: bytes) -> bytes:
    """Insert, remove or repeat a stretch."""
    at, end = sorted((random.randrange(len(data) + 1), random.randrange(len(data) + 1)))
    new = random.choice(
        (random.randbytes(5), b"\0", b'"', b"}", b"{", b"]", b",", b"\n", b"\xff", b"", data[at:end] * 2)
    )
    return data[:at] + new + data[random.choice((at, end)) :]


def foreign(random: Random, data: bytes) -> bytes:
    """Return something else."""
    text = data.decode("utf-8", errors="replace")
    return random.choice(
        (
            b"", b"\n", b"\0" * 100, random.randbytes(300), b"null", b"[]", b"{}", b"7", b'"text"', b"true", b"NaN", b"[" * 200_000, b"]",
            b'{"a":' * 100_000, b"[" * 50_000 + b"]" * 50_000, b"9" * 100_000, b"\xff\xfe" + text.encode("utf-16-le"), text.encode("utf-16"),
            b"\xef\xbb\xbf" + data, data + data, data[::-1], b"<?xml version='1.0'?>", b"PK\x03\x04", b"a = " + b"[" * 5000,
            b"a" + b".a" * 20_000 + b" = 1\n", b"[" + b"a." * 20_000 + b"a]\n", b"a = 1979-99-99\n", b"\x80\x04\x95",
        )
    )  # fmt: skip


def not_text(random: Random, data: bytes) -> bytes:
    """Put bytes that are no UTF-8, NUL, or escapes to a place inside."""
    at = random.randrange(len(data) + 1)
    return (
        data[:at]
        + random.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\0", b"\x1b[2J", b"\xe2\x80\xae", b"\x9b"))
        + data[at:]
    )


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return every container with every key or index in it."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(inner):
        found.append((value, key))
        _places(each, found)
    return found


def _parsed(data: bytes) -> Any:
    """Return the value of JSON, or of the last line of a file with a JSON value in each line."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):  # of an earlier damage
        return None


def json_value(random: Random, data: bytes) -> bytes:
    """Replace values by values of other types and sizes."""
    document = _parsed(data)
    places = _places(document, [])
    if not places:
        return text_number(random, data)
    for _ in range(random.choice((1, 1, 1, 3))):
        container, key = random.choice(places)
        try:
            container[key] = random.choice(VALUES)
        except (KeyError, IndexError, TypeError):
            continue
    return _dumped(document)


def _dumped(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode("utf-8", errors="surrogatepass")


def json_keys(random: Random, data: bytes) -> bytes:
    """Remove, rename, repeat and add keys and entries."""
    document = _parsed(data)
    places = _places(document, [])
    if not places:
        return lines(random, data)
    for _ in range(random.choice((1, 2, 5))):
        container, key = random.choice(places)
        kind = random.randrange(4)
        if isinstance(container, list):
            if key < len(container):
                container.insert(key, container[key]) if kind else container.pop(key)
        elif key in container:
            value = container[key]
            if kind == 0:
                del container[key]
            elif kind == 1:
                container[random.choice(("\x1b[31m", "x" * 5000, "", "nowhere", key + "\u202e"))] = container.pop(key)
            elif kind == 2:
                container["more"] = value
            else:
                container[key] = [value]
    return _dumped(document)


def json_twice(random: Random, data: bytes) -> bytes:
    """Write a key twice."""
    text = data.decode("utf-8", errors="replace")
    keys = list(re.finditer(r'"[^"\n]{1,80}"\s*:', text))
    if not keys:
        return data + data
    key = random.choice(keys)
    value = random.choice(("1", "null", "[]", "{}", '"x"'))
    return (text[: key.start()] + f"{key[0]} {value}, " + text[key.start() :]).encode()


def json_deep(random: Random, data: bytes) -> bytes:
    """Nest a value thousands of levels deep."""
    text, depth = data.decode("utf-8", errors="replace"), random.choice((500, 5_000, 100_000))
    found = list(re.finditer(r"(?<=[:=,\[]) ?(-?[0-9][0-9.e+-]*|\"[^\"\n]*\"|true|null)", text))
    opening, closing = random.choice((("[", "]"), ('{"a":', "}"), ("{a=", "}")))
    at = random.choice(found).span() if found else (0, 0)
    return (text[: at[0]] + " " + opening * depth + "1" + closing * depth + text[at[1] :]).encode()


def schema(random: Random, data: bytes) -> bytes:
    """Claim another version of the format."""
    text = data.decode("utf-8", errors="replace")
    new = random.choice(("0", "-1", "2", "999", "1e9", '"1"', "null", "1.0", "true", "9" * 400))
    changed, count = re.subn(r'("(?:schema|version|format)"\s*:\s*)[^,}\n]+', rf"\g<1>{new}", text, count=1)
    return changed.encode() if count else text_number(random, data)


NUMBERS = (
    "nan", "inf", "-inf", "NaN", "Infinity", "1e999", "-1e999", "9" * 5000, "1e-999", "0x10", "1_0", "--1", "1e", ".", "'text'", "[]", "{}",
    "true", "1979-05-27", "-0.0", "00", "18446744073709551616",
)  # fmt: skip


def text_number(random: Random, data: bytes) -> bytes:
    """Replace a number of a text."""
    changed = _replaced(random, data, r"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?", random.choice(NUMBERS))
    return insert(random, data) if changed is None else changed


def _replaced(random: Random, data: bytes, pattern: str, new: str) -> bytes | None:
    """Replace one match of a pattern in a text; None if there is none."""
    text = data.decode("utf-8", errors="replace")
    found = list(re.finditer(pattern, text))
    if not found:
        return None
    at = random.choice(found)
    return (text[: at.start()] + new + text[at.end() :]).encode("utf-8", errors="replace")


def lines(random: Random, data: bytes) -> bytes:
    """Shuffle, repeat, remove or lengthen lines."""
    rows = data.split(b"\n")
    kind, at = random.randrange(5), random.randrange(len(rows))
    if kind == 0:
        random.shuffle(rows)
    elif kind == 1:
        rows *= random.choice((2, 50))
    elif kind == 2:
        del rows[at]
    elif kind == 3:
        rows[at] *= random.choice((2, 1 + 10**6 // (1 + len(rows[at]))))
    else:
        rows.insert(
            at,
            random.choice(
                (b"[more]", b"model = 1", b'"', b"=", b"'''", b";x__print__;__min:[", b"\\", b"[[a]]", b"a.b = 1")
            ),
        )
    return b"\n".join(rows)


def text_value(random: Random, data: bytes) -> bytes:
    """Replace a text in quotes."""
    new = json.dumps(random.choice(VALUES), ensure_ascii=random.random() < 0.5)
    changed = _replaced(random, data, r'"[^"\n]*"', new)
    return lines(random, data) if changed is None else changed


DAMAGES: dict[str, Damage] = {
    "cut": cut,
    "flipped": flip,
    "inserted": insert,
    "foreign": foreign,
    "not-text": not_text,
    "json-value": json_value,
    "json-keys": json_keys,
    "json-twice": json_twice,
    "json-deep": json_deep,
    "schema": schema,
    "number": text_number,
    "lines": lines,
    "text-value": text_value,
}
"""Damages to the content of a file."""


def at_path(random: Random, path: Path) -> None:
    """Replace a file by something that is no file, or by a link."""
    kind = random.randrange(8)
    path.unlink()
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to("nowhere")
    elif kind == 3:
        path.symlink_to(path.name)
    elif kind == 4:
        path.symlink_to("/dev/zero")
    elif kind == 5:
        path.symlink_to("/dev/null")
    elif kind == 6:
        path.symlink_to("m.onnx")
    else:
        with open(path, "wb") as sparse:
            sparse.truncate(2**36)
