"""Models that somebody made by hand to harm: each operator refuses what it cannot compute, and no program ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from requant import NATIVE_DOMAIN
from requant.calibration.model.session import OPERATORS, Array
from requant.quantize.kernels.library import VERSION
from requant.quantize.kernels.nodes import OMITTED

from ...native import NOTHING, needs_library
from .test_native import load

pytestmark = needs_library

MOST = 2**31 - 1
IMAGE = np.ones((1, 4, 4, 8), np.uint8)
SCALE, ZERO, NONE = np.float32(0.1), np.uint8(0), np.zeros(0, np.float32)


FLOATS = ("MatMulNBits", "GRU", "LSTM", "Normalization", "CachedAttention")
RESULTS = {"GRU": 2, "LSTM": 3, "CachedAttention": 3}


@dataclass(frozen=True)
class Given:
    """An input that is no constant, and its values in a run."""

    values: Array


def model_of(operator: str, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> onnx.ModelProto:
    """Return a model with one operator; the first input is no constant, and None is left out."""
    names = [OMITTED if each is None else f"i{index}" for index, each in enumerate(inputs)]
    values, constants = [], [NOTHING]
    for index, (name, each) in enumerate(zip(names, inputs, strict=True)):
        array = np.asarray(each.values if isinstance(each, Given) else each)
        if isinstance(each, Given) or index == 0:
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            values.append(helper.make_tensor_value_info(name, kind, [None] * array.ndim))
        elif each is not None:
            constants.append(numpy_helper.from_array(array, name))
    results = ["y", "k", "v"][: RESULTS.get(operator, 1)]
    kind = TensorProto.FLOAT if operator in FLOATS else TensorProto.UINT8
    node = helper.make_node(operator, names, results, domain=NATIVE_DOMAIN, **attributes)
    outputs = [helper.make_tensor_value_info(name, kind, None) for name in results]
    graph = helper.make_graph([node], "one", values, outputs, constants)
    imports = [helper.make_opsetid(NATIVE_DOMAIN, VERSION), helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def run(operator: str, inputs: Sequence[Any], **attributes: Any) -> Array:
    """Return the first result of an operator."""
    opened = load(model_of(operator, inputs, attributes))
    feed = {f"i{index}": each.values for index, each in enumerate(inputs) if isinstance(each, Given)}
    found: Array = opened.run(None, feed)[0]
    return found


def weighted(w: Array, x: Array = IMAGE) -> list[Any]:
    """Return the inputs of a convolution, transposed or not."""
    return [x, SCALE, ZERO, w, np.float32(0.01), np.zeros(1, np.int8), SCALE, ZERO]


def cell(gates: int) -> list[Any]:
    """Return the inputs of a GRU or an LSTM of rows without columns."""
    rows = 8 * gates
    stored = (np.ones(rows, np.float32), np.zeros(1, np.int8))
    return [np.ones((2, 1, 0), np.float32), np.ones((rows, 0), np.int8), *stored, np.ones((rows, 8), np.int8), *stored]


PLAIN, DEPTHWISE, GROUPED = (np.ones((outputs, inputs, 3, 3), np.int8) for outputs, inputs in ((16, 8), (8, 1), (8, 4)))
CASES: dict[str, tuple[str, list[Any], dict[str, Any], str]] = {
    **{
        f"{name} {kind}": ("Convolution", weighted(w), {attribute: [MOST, MOST], "pads": [MOST] * 4, **more}, "32768")
        for name, w, more in (
            ("plain", PLAIN, {}),
            ("depthwise", DEPTHWISE, {"group": 8}),
            ("groups", GROUPED, {"group": 2}),
        )
        for kind, attribute in (("strides", "strides"), ("dilations", "dilations"))
    },
    "pads": ("Convolution", weighted(PLAIN), {"pads": [32769, 0, 0, 0]}, "32768"),
    "deep sums": (
        "Convolution",
        weighted(np.full((16, 66000, 1, 1), 127, np.int8), np.zeros((1, 1, 1, 66000), np.uint8)),
        {},
        "too many products",
    ),
    "transposed deep sums": (
        "ConvTranspose",
        weighted(np.full((66000, 2, 1, 1), 127, np.int8), np.zeros((1, 1, 1, 66000), np.uint8)),
        {},
        "too many products",
    ),
    "transposed pads": (
        "ConvTranspose",
        weighted(np.ones((8, 4, 3, 3), np.int8)),
        {"pads": [30000] * 4, "output_padding": [59997, 59997]},
        "pads must be smaller",
    ),
    "transposed groups": ("ConvTranspose", weighted(np.ones((8, 4, 1, 1), np.int8)), {"group": 2}, "group must be 1"),
    **{
        f"blocks {k} {n}": (
            "MatMulNBits",
            [np.ones((1, 16), np.float32), np.zeros(0, np.uint8), NONE],
            {"K": k, "N": n, "bits": 8, "block_size": 16},
            "K and N must be positive",
        )
        for k, n in ((2**62, 1024), (2**36, 2**32), (16, 2**31), (0, 4))
    },
    "GRU": ("GRU", cell(3), {}, "matrices of constants"),
    "LSTM": ("LSTM", cell(4), {}, "matrices of constants"),
    "lines": ("Lines", [IMAGE, np.zeros((3, 8), np.float32)], {"least": 200, "most": 100}, "least must not be above"),
    "epsilon": ("Normalization", [np.ones((1, 8), np.float32), np.ones(8, np.float32)], {"epsilon": -1.0}, "epsilon"),
}


@pytest.mark.parametrize(("operator", "inputs", "attributes", "message"), CASES.values(), ids=CASES)
def test_it_is_refused(operator: str, inputs: list[Any], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as raised:
        load(model_of(operator, inputs, attributes))
    assert NATIVE_DOMAIN in str(raised.value)


@pytest.mark.parametrize("tensors", [1, 2, 3])
def test_a_concat_may_leave_out_the_inputs_behind_its_last_tensor(tensors: int) -> None:
    inputs = [Given(IMAGE), *[None, Given(IMAGE)] * (tensors - 1)]
    assert run("Concat", inputs).shape == (1, 4, 4, 8 * tensors)


@pytest.mark.parametrize(("queries", "past", "fresh", "window"), [(300, 0, 300, 2**62), (500, 2, 0, 1), (500, 0, 3, 2)])
def test_a_window_may_lie_behind_all_keys(queries: int, past: int, fresh: int, window: int) -> None:
    """A query that sees no key is 0; all values are 1 here."""
    q, k, cache = (np.ones(shape, np.float32) for shape in ((1, queries, 8), (1, fresh, 8), (1, 1, past, 8)))
    caches = [None, Given(cache), Given(cache)] if past else []
    found = run("CachedAttention", [Given(q), Given(k), Given(k), *caches], heads=1, shared=1, window=window)
    place = np.arange(past, past + queries)
    sees = np.minimum(place + 1, past + fresh) > np.maximum(place + 1 - window, 0)
    np.testing.assert_allclose(found[0], np.repeat(sees[:, None], 8, axis=1), atol=1e-2)  # shares of 8 bits


def test_all_new_keys_of_an_attention_need_angles() -> None:
    """Without lengths there may be more new keys than queries; each is turned."""
    q, k, angles = (np.ones(shape, np.float32) for shape in ((1, 1, 2), (1, 6, 2), (1, 1)))
    inputs = [Given(q), Given(k), Given(k), *[None] * 5, Given(angles), Given(angles)]
    with pytest.raises(Exception, match="more places than cosines"):
        run("CachedAttention", inputs, heads=1, shared=1)


SHORT_OF_MEMORY = f"""
import resource, sys
import numpy as np, onnxruntime as ort
options = ort.SessionOptions()
options.log_severity_level, options.intra_op_num_threads = 4, 1
options.register_custom_ops_library({str(OPERATORS)!r})
session = ort.InferenceSession(sys.stdin.buffer.read(), options, providers=["CPUExecutionProvider"])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
try:
    session.run(None, {{"i0": np.ones((1, 4, 4, 8), np.uint8)}})
except Exception as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
def test_a_lack_of_memory_is_an_error_of_the_run() -> None:
    """What the kernel reaches over takes 1.2 GB."""
    model = model_of(
        "Convolution", weighted(PLAIN), {"dilations": [6000, 6000], "pads": [6000] * 4}
    ).SerializeToString()
    done = subprocess.run([sys.executable, "-c", SHORT_OF_MEMORY], input=model, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"bad_alloc" in done.stdout
