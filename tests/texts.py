"""Hostile and legitimate texts, models that hold them everywhere, and what outputs may hold."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HOSTILE = {
    "escape": "\x1b]0;owned\x07\x1b[31mred",
    "c1": "\x9b31mred\x85",
    "right-to-left": "a\u202egnp.exe",
    "isolate": "\u2066a\u2069",
    "nul": "a\x00b",
    "backspace": "a\b\b\bb\x07",
    "return": "good\rbad",
    "command": "x\n::stop-commands::token",
    "line-command": "::stop-commands::token",
    "old-command": "##[add-mask]a ##vso[task.complete]",
    "markup": "[red]a[/red][/nope]",
    "html": '</script><!--<img src=x onerror="alert(1)">',
    "quotes": "a\"b'c\\d",
    "zero-width": "a\u200bb\u2060c\ufeff\u00ad",
    "separators": "a\u2028b\u2029c\u3000d",
    "tags": "a\U000e0041\U000e007f",
    "emoji-code": ":skull:",
    "toml": '"\n[quantize]\ndata = "evil.py:feeds"\n#',
    "markdown": "|a|`b`](https://example.org) ![c](d) $e$ @f",
    "long": 100_000 * "n",
    "words": 1_000 * "two words ",
}
SURROGATE = "a\udcffb"
READABLE = (
    "é",
    "e\u0301",
    "日本語",
    "👍🏽",
    "❤\ufe0f",
    "Ωmega µ",
    "naïve/ß",
    "שלום",
    "हिन्दी",
    "/model/conv1.weight:0",
    "onnx::Conv_1",
)


def hostile_model(path: Path, text: str, *, input_name: str | None = None) -> Path:
    """Write two products and a Relu whose every name and text begins with `text`."""
    name = text.__add__
    given = name("in") if input_name is None else input_name
    random = np.random.default_rng(0)
    weights = [numpy_helper.from_array(random.normal(size=(8, 8)).astype(np.float32), name(each)) for each in "WV"]
    nodes = [
        helper.make_node("MatMul", [given, name("W")], [name("product")], name=name("first"), doc_string=text),
        helper.make_node("Relu", [name("product")], [name("relu")], name=name("relu node")),
        helper.make_node("MatMul", [name("relu"), name("V")], [name("out")], name=name("last")),
    ]
    ports = [helper.make_tensor_value_info(each, TensorProto.FLOAT, [name("N"), 8]) for each in (given, name("out"))]
    graph = helper.make_graph(nodes, name("graph"), ports[:1], ports[1:], weights, doc_string=text)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(name("domain"), 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name=text, doc_string=text)
    helper.set_model_props(model, {name("key"): text})
    onnx.save(model, path)
    return path


def assert_printable(text: str, most: int | None = None) -> None:
    """Assert that a text has printable lines, none of them a command of a CI system or longer than `most`."""
    assert {char for char in text if char != "\n" and not char.isprintable()} == set()
    assert re.search(r"##\w*\[", text) is None
    assert most is None or max(map(len, text.split("\n"))) <= most


STAGE = re.compile(r" *\d+\.\d\d s  \w")
"""The begin of a line that tells where long work is."""


def without_stages(text: str) -> str:
    """Return what a command printed on stderr without the lines that tell where long work is.

    How many there are depends on how busy the machine is.
    """
    return "".join(line for line in text.splitlines(keepends=True) if not STAGE.match(line))
