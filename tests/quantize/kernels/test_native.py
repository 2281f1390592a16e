"""The native operators against their definition in NumPy, bit for bit, on every instruction set of this CPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from requant import NATIVE_DOMAIN
from requant.calibration.model.session import Array
from requant.quantize.kernels.library import VERSION, Kernels, names_of
from requant.quantize.kernels.nodes import OMITTED

from ...native import FOUND, NOTHING, needs_library

pytestmark = needs_library


class Open:
    """A uint8 tensor that is no constant."""


def session(
    operator: str,
    inputs: Sequence[Array | Open | None],
    threads: int = 1,
    domain: str = NATIVE_DOMAIN,
    **attributes: Any,
) -> ort.InferenceSession:
    """Load a model with one operator; the arguments are those of `model_of`, and the threads of the session."""
    return load(model_of(operator, inputs, domain, **attributes), threads)


def model_of(
    operator: str, inputs: Sequence[Array | Open | None], domain: str = NATIVE_DOMAIN, **attributes: Any
) -> onnx.ModelProto:
    """Return a model with one operator; all inputs but uint8 ``x``, and those of which only a type is given, are constants.

    Args:
        operator: The operator.
        inputs: The values; an `Open` for a uint8 tensor that is given at each run.
        domain: The domain of the operator.
        attributes: Its attributes.
    """
    names = ["x", *(OMITTED if array is None else f"c{index}" for index, array in enumerate(inputs[1:]))]
    more = [name for name, array in zip(names, inputs, strict=True) if isinstance(array, Open)]
    node = helper.make_node(operator, names, ["y"], domain=domain, **attributes)
    constants = [
        numpy_helper.from_array(array, name)
        for name, array in zip(names[1:], inputs[1:], strict=True)
        if array is not None and not isinstance(array, Open)
    ]
    constants.append(NOTHING)
    x = inputs[0]
    assert isinstance(x, np.ndarray)
    ends = [helper.make_tensor_value_info(name, TensorProto.UINT8, [None] * x.ndim) for name in ("y", "x")]
    ends += [helper.make_tensor_value_info(name, TensorProto.UINT8, None) for name in more]
    graph = helper.make_graph([node], "one", ends[1:], ends[:1], constants)
    imports = [
        helper.make_opsetid(*each) for each in {domain: VERSION if domain == NATIVE_DOMAIN else 1, "": 17}.items()
    ]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def load(model: onnx.ModelProto, threads: int = 1) -> ort.InferenceSession:
    """Load a model with native operators."""
    assert isinstance(FOUND, Kernels)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.register_custom_ops_library(str(FOUND.library))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


MEMORY = """
import sys
import onnxruntime as ort

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))

options, before = ort.SessionOptions(), resident()
options.register_custom_ops_library(sys.argv[1])
session = ort.InferenceSession(sys.argv[2], options)
print(resident() - before)
"""


def test_a_session_holds_weights_twice(tmp_path: Path) -> None:
    """The runtime keeps the constant, and the kernel its packed copy; the list that it was packed from is freed."""
    wide, w = 4096, np.ones((8192, 4096, 1, 1), np.int8)
    scalars: list[Array] = [np.asarray(0.1, np.float32), np.asarray(0, np.uint8)]
    vectors: list[Array] = [np.ones(len(w), np.float32), np.zeros(len(w), np.int8)]
    arrays: list[Array] = [*scalars, w, *vectors, *scalars, np.zeros(len(w), np.int32)]
    model = model_of("Convolution", [np.zeros((1, 1, 1, wide), np.uint8), *arrays])
    onnx.save(model, tmp_path / "wide.onnx")
    assert isinstance(FOUND, Kernels)
    command = [sys.executable, "-c", MEMORY, str(FOUND.library), str(tmp_path / "wide.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 3 * w.nbytes


# ----------------------------------------------------------------------------------------------------- convolution


@dataclass(frozen=True)
class Case:
    """A convolution: its sizes, attributes and seed."""

    batch: int = 1
    size: tuple[int, int] = (5, 6)
    group: int = 1
    inputs: int = 4  # of a group
    outputs: int = 4  # of a group
    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    zeros: tuple[int, int] = (128, 128)
    largest: int = 127  # magnitude of the weights
    table: str = ""
    residual: bool = False
    seed: int = 0
    arrays: dict[str, Array] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        channels, results = self.group * self.inputs, self.group * self.outputs
        shape = (results, self.inputs, *self.kernel)
        reach = np.sqrt(np.prod(shape[1:])) * 255 * self.largest / 3
        tables = {"": None, "one": (256,), "each": (results, 256), "curve": None}[self.table]
        self.arrays.update(
            x=random.integers(0, 256, (self.batch, *self.size, channels)).astype(np.uint8),
            x_scale=np.asarray(0.02, np.float32),
            w=random.integers(-self.largest - 1, self.largest + 1, shape).astype(np.int8),
            w_scale=random.uniform(0.5, 1.5, results).astype(np.float32),
            y_scale=np.asarray(0.02 * reach / 100, np.float32),
            bias=random.integers(-int(reach) - 1, int(reach) + 1, results).astype(np.int32),
        )
        if tables:
            self.arrays["table"] = random.integers(0, 256, tables).astype(np.uint8)
        if self.table == "curve":
            width = float(self.arrays["y_scale"]) * 255 / 64
            self.arrays["curve"] = random.integers([[-3000], [-32767]], [[18000], [32768]], (2, 64)).astype(np.int16)
            self.arrays["grid"] = np.asarray([-self.zeros[1] / 8 * width, width], np.float32)
        spans = [d * (k - 1) + 1 for d, k in zip(self.dilations, self.kernel, strict=True)]
        lengths = [size + self.pads[i] + self.pads[i + 2] for i, size in enumerate(self.size)]
        rest = [(length - span) // s + 1 for length, span, s in zip(lengths, spans, self.strides, strict=True)]
        if self.residual and min(rest) > 0:
            self.arrays["residual"] = random.integers(0, 256, (self.batch, *rest, results)).astype(np.uint8)

    @property
    def residual_scale(self) -> Array:
        return np.asarray(0.7 * self.arrays["y_scale"], np.float32)

    @property
    def feed(self) -> dict[str, Array]:
        """The tensors of a run."""
        given = {"x": self.arrays["x"]}
        return {**given, "c9": self.arrays["residual"]} if self.residual else given

    @property
    def constants(self) -> list[Array | Open | None]:
        given = self.arrays
        zeros = [np.asarray(zero, np.uint8) for zero in self.zeros]
        # a channel without -128 may have the zero point -1
        least = given["w"].min(axis=(1, 2, 3))
        zero = -((least > -128) & (np.arange(least.size) + self.seed) % 2).astype(np.int8)
        weight = [given["w"] + zero.reshape(-1, 1, 1, 1), given["w_scale"], zero]
        residual: list[Array | Open | None] = [None, None, None]
        if self.residual:
            residual = [Open(), self.residual_scale, np.asarray(self.zeros[0] ^ 77, np.uint8)]
        most = [given["x_scale"], zeros[0], *weight, given["y_scale"], zeros[1], given["bias"], given.get("table")]
        return [*most, *residual, given.get("curve"), given.get("grid")]

    @property
    def attributes(self) -> dict[str, Any]:
        return {"group": self.group, "strides": self.strides, "dilations": self.dilations, "pads": self.pads}

    def run(self, threads: int = 1) -> Array:
        """Compute it with the native operator."""
        opened = session("Convolution", [self.arrays["x"], *self.constants], threads, **self.attributes)
        return np.asarray(opened.run(None, self.feed)[0])

    def expected(self) -> Array:
        """Compute it from its definition: exact sums, one multiplication in float32, rounded half to even."""
        given, (x_zero, y_zero) = self.arrays, self.zeros
        top, left, bottom, right = self.pads
        x = np.pad(given["x"].astype(np.int64) - x_zero, ((0, 0), (top, bottom), (left, right), (0, 0)))
        spans = [d * (k - 1) + 1 for d, k in zip(self.dilations, self.kernel, strict=True)]
        windows = np.lib.stride_tricks.sliding_window_view(x, spans, axis=(1, 2))
        windows = windows[:, :: self.strides[0], :: self.strides[1], :, :: self.dilations[0], :: self.dilations[1]]
        grouped = windows.reshape(*windows.shape[:3], self.group, self.inputs, *self.kernel)
        w = given["w"].astype(np.int64).reshape(self.group, self.outputs, self.inputs, *self.kernel)
        sums = np.einsum("nyxgikl,goikl->nyxgo", grouped, w).reshape(*windows.shape[:3], -1) + given["bias"]
        unit = given["grid"][1] / np.float32(1024) if self.table == "curve" else given["y_scale"]
        multiplier = given["x_scale"] * given["w_scale"] / unit
        more = np.zeros((), np.float32)
        if self.residual:
            more = (given["residual"].astype(np.float32) - (self.zeros[0] ^ 77)) * (self.residual_scale / unit)
        assert multiplier.dtype == more.dtype == np.float32
        if self.table == "curve":
            start = -given["grid"][0] / unit - np.float32(2**15)
            t = np.clip(np.rint(once(sums.astype(np.float32), multiplier, start) + more), -(2**15), 2**15 - 1)
            return through_curve(given["curve"], t)
        index = np.rint(sums.astype(np.float32) * multiplier + more) + y_zero
        y: Array = np.clip(index, 0, 255).astype(np.int64)
        table = given.get("table")
        if table is None:
            return y.astype(np.uint8)
        if table.ndim == 1:
            return np.asarray(table[y])
        return np.take_along_axis(table.T, y.reshape(-1, y.shape[-1]), 0).reshape(y.shape)


def through_curve(curve: Array, places: Array) -> Array:
    """Return the results of a curve, uint8, at places from -2^15 to 2^15 - 1."""
    segment, inside = np.divmod(places.astype(np.int64) + 2**15, 1024)
    middle, slope = curve.astype(np.int64)[:, segment]
    line: Array = np.clip(middle + ((slope * (64 * (inside - 512)) + 2**14) >> 15), -(2**15), 2**15 - 1)
    return (line >> 6).clip(0, 255).astype(np.uint8)


def once(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c, rounded once to float32; a rounding to float64 comes before it, and decides once in 2**28."""
    found: Array = (a.astype(np.float64) * b + c).astype(np.float32)
    return found


def fits(case: Case) -> bool:
    """Return whether the padded input is as large as the kernel, and no depthwise convolution has a residual."""
    if case.residual and case.group > 1 and case.inputs == case.outputs == 1:
        return False
    lengths = [size + case.pads[axis] + case.pads[axis + 2] for axis, size in enumerate(case.size)]
    spans = [d * (k - 1) + 1 for d, k in zip(case.dilations, case.kernel, strict=True)]
    return all(length >= span for length, span in zip(lengths, spans, strict=True))


small = st.integers(1, 3)
CASES = st.builds(
    Case,
    batch=st.integers(1, 3),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    group=st.sampled_from([1, 1, 2, 5]),
    inputs=st.integers(1, 21),
    outputs=st.integers(1, 40),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    strides=st.tuples(small, small),
    dilations=st.tuples(small, small),
    pads=st.tuples(*[st.integers(0, 4)] * 4),
    zeros=st.tuples(st.integers(0, 255), st.integers(0, 255)),
    largest=st.sampled_from([127, 63, 1]),
    table=st.sampled_from(["", "one", "each", "curve"]),
    residual=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
).filter(fits)
DEPTHWISE = st.builds(
    lambda case, channels: replace(case, group=channels, inputs=1, outputs=1, residual=False),
    CASES,
    st.integers(2, 140),
)
patient = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
many = settings(patient, max_examples=4 * settings().max_examples)


@many
@given(case=st.one_of(CASES, DEPTHWISE), threads=st.integers(1, 3))
def test_a_convolution_is_its_definition_bit_for_bit(isa: str, case: Case, threads: int) -> None:
    np.testing.assert_array_equal(case.run(threads), case.expected())


@pytest.mark.parametrize("group", [1, 64], ids=["dense", "depthwise"])
def test_sums_do_not_saturate(isa: str, group: int) -> None:
    """The largest products of all signs: pairs of them exceed 16 bits."""
    case = Case(group=group, inputs=64 // group, outputs=64 // group, kernel=(3, 3), pads=(1, 1, 1, 1), zeros=(0, 128))
    case.arrays["x"][:] = 255
    for low, high in product((-128, 127), repeat=2):
        case.arrays["w"][:] = np.resize(np.array([low, high], np.int8), case.arrays["w"].shape)
        case.arrays["y_scale"] = np.asarray(8.0, np.float32) if group > 1 else np.asarray(500.0, np.float32)
        np.testing.assert_array_equal(case.run(), case.expected())


@pytest.mark.parametrize("group", [1, 64], ids=["dense", "depthwise"])
def test_results_that_no_int32_holds_are_clipped(isa: str, group: int) -> None:
    case = Case(group=group, inputs=64 // group, outputs=64 // group, kernel=(3, 3), zeros=(7, 128))
    case.arrays["y_scale"] = np.asarray(1e-9, np.float32)
    found = case.run()
    np.testing.assert_array_equal(found, case.expected())
    assert {0, 255} <= set(found.ravel().tolist())


@pytest.mark.parametrize(("group", "kernel"), [(1, 1), (1, 3), (96, 3), (96, 5)])
def test_it_equals_the_runtime_s_own_convolution(isa: str, group: int, kernel: int) -> None:
    """The weights have 7 bits, so that the runtime adds exactly without VNNI too."""
    pads = (kernel // 2,) * 4
    case = Case(2, (14, 15), group, 96 // group, 96 // group, (kernel, kernel), pads=pads, zeros=(117, 9), largest=63)
    x = case.arrays["x"]
    attributes = {**case.attributes, "channels_last": 1}
    own = session("QLinearConv", [x, *case.constants[:8]], domain="com.microsoft", **attributes)
    np.testing.assert_array_equal(case.run(), own.run(None, {"x": x})[0])


def test_the_number_of_threads_changes_no_bit(isa: str) -> None:
    case = Case(3, (33, 31), 1, 48, 80, (3, 3), pads=(1, 1, 1, 1))
    first = case.run(1)
    for threads in (2, 3, 5):
        np.testing.assert_array_equal(case.run(threads), first)


def test_one_session_serves_several_threads(isa: str) -> None:
    """Runs of different sizes at the same time: each has its own patches."""
    cases = [Case(1, (7 + 5 * i, 9), 1, 30, 50, (3, 3), pads=(1, 1, 1, 1)) for i in range(4)]
    constants = cases[0].constants
    opened = session("Convolution", [cases[0].arrays["x"], *constants], 2, **cases[0].attributes)
    wrong: list[int] = []

    def work(index: int) -> None:
        x, expected = cases[index].arrays["x"], alone[index]
        for _ in range(30):
            if not np.array_equal(opened.run(None, {"x": x})[0], expected):
                wrong.append(index)

    alone = [np.asarray(opened.run(None, {"x": case.arrays["x"]})[0]) for case in cases]
    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


@pytest.mark.parametrize("outputs", [5, 24, 40, 112])
def test_results_that_take_the_place_of_the_residual_are_the_same(isa: str, outputs: int) -> None:
    """The runtime gives them one memory if nothing reads the residual later, and no output of the model is one of them."""
    case = Case(batch=2, size=(7, 9), inputs=21, outputs=outputs, kernel=(3, 3), pads=(1, 1, 1, 1), residual=True)
    constants = {f"c{index}": each for index, each in enumerate(case.constants)}
    names = [
        "x",
        *("t" if isinstance(each, Open) else OMITTED if each is None else name for name, each in constants.items()),
    ]
    given = [numpy_helper.from_array(each, name) for name, each in constants.items() if isinstance(each, np.ndarray)]
    given += [NOTHING, numpy_helper.from_array(np.arange(256, dtype=np.uint8), "same")]
    nodes = [
        helper.make_node("Table", ["r", "same"], ["t"], domain=NATIVE_DOMAIN),
        helper.make_node("Convolution", names, ["y"], domain=NATIVE_DOMAIN, **case.attributes),
        helper.make_node("Table", ["y", "same"], ["z"], domain=NATIVE_DOMAIN),
    ]
    shapes = {"x": case.arrays["x"].shape, **dict.fromkeys("rtyz", case.arrays["residual"].shape)}
    info = {name: helper.make_tensor_value_info(name, TensorProto.UINT8, shape) for name, shape in shapes.items()}
    for results in ("z", "zt"):
        ends = [info["x"], info["r"]], [info[name] for name in results]
        graph = helper.make_graph(nodes, "g", *ends, given, value_info=[info["t"], info["y"]])
        imports = [helper.make_opsetid(NATIVE_DOMAIN, VERSION), helper.make_opsetid("", 17)]
        model = load(helper.make_model(graph, opset_imports=imports, ir_version=8))
        found = model.run(None, {"x": case.arrays["x"], "r": case.arrays["residual"]})[0]
        np.testing.assert_array_equal(found, case.expected())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strides": [0, 1]}, "(strides|dilations) must be from 1 to 32768"),
        ({"dilations": [1, -1]}, "(strides|dilations) must be from 1 to 32768"),
        ({"strides": [1]}, "strides must have two values"),
        ({"pads": [0, 0, -1, 0]}, "pads must be from 0 to 32768"),
        ({"pads": [0, 0]}, "pads must have four values"),
        ({"group": 3}, "group must divide the output channels"),
        ({"group": 0}, "group must divide the output channels"),
    ],
    ids=str,
)
def test_attributes_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    case = Case()
    with pytest.raises(Exception, match=message):
        session("Convolution", [case.arrays["x"], *case.constants], **{**case.attributes, **change})


@pytest.mark.parametrize(
    ("index", "array", "message"),
    [
        (3, np.zeros((4, 4, 1), np.int8), "w must have four axes"),
        (3, np.zeros((0, 4, 1, 1), np.int8), "w must not be empty"),
        (4, np.ones(3, np.float32), "w_scale must have one value, or one for each output"),
        (1, np.ones(2, np.float32), "scales and zero points must be constants of one value"),
        (7, np.zeros(0, np.uint8), "scales and zero points must be constants of one value"),
        (5, np.full(4, 127, np.int8), "w without its zero points must be int8"),
        (5, np.full(3, 0, np.int8), "w_zero_point must have one value, or one for each output"),
        (8, np.zeros(3, np.int32), "B must have one value for each output"),
        (9, np.zeros(255, np.uint8), "the table must be"),
        (13, np.zeros((2, 63), np.int16), "the curve must be .2, 64."),
        (13, np.full((2, 64), -(2**15), np.int16), "the curve must be above -32768"),
        (14, np.zeros(2, np.float32), "the grid must be a beginning and a width"),
        (9, np.zeros(256, np.uint8), "a convolution has a table or a curve"),
        *((index, np.full(1, scale, np.float32), "scales") for index in (1, 6) for scale in (0, -1, np.nan, np.inf)),
        *((4, np.full(1, scale, np.float32), "w_scale must be 0 or positive") for scale in (-1, np.nan, np.inf)),
    ],
)
def test_constants_that_do_not_fit_are_refused(index: int, array: Array, message: str) -> None:
    case = Case(table="curve" if index > 12 or array.size == 256 else "one")
    inputs = [case.arrays["x"], *case.constants]
    inputs[index] = array
    with pytest.raises(Exception, match=message):
        session("Convolution", inputs, **case.attributes)


def test_inputs_that_must_be_constants_are_refused_if_they_are_not() -> None:
    case = Case(table="one")
    inputs: list[Any] = [case.arrays["x"], *case.constants]
    inputs[9] = Open()
    with pytest.raises(Exception, match="input 9 must be a constant"):
        session("Convolution", inputs, **case.attributes)


def test_a_residual_must_fit() -> None:
    case = Case(residual=True)
    opened = session("Convolution", [case.arrays["x"], *case.constants], **case.attributes)
    with pytest.raises(Exception, match="the residual must have the shape of the result"):
        opened.run(None, {**case.feed, "c9": case.arrays["residual"][:, 1:]})
    depthwise = Case(group=4, inputs=1, outputs=1, residual=True)
    with pytest.raises(Exception, match="a depthwise convolution has no residual"):
        session("Convolution", [depthwise.arrays["x"], *depthwise.constants], **depthwise.attributes)


def test_inputs_that_do_not_fit_are_refused_and_empty_ones_are_not() -> None:
    case = Case(kernel=(3, 3))
    opened = session("Convolution", [case.arrays["x"], *case.constants], **case.attributes)
    with pytest.raises(Exception, match="the padded input is smaller than the kernel"):
        opened.run(None, {"x": np.zeros((1, 2, 5, 4), np.uint8)})
    with pytest.raises(Exception, match="input channels of w"):
        opened.run(None, {"x": np.zeros((1, 5, 5, 3), np.uint8)})
    assert opened.run(None, {"x": np.zeros((0, 5, 5, 4), np.uint8)})[0].shape == (0, 3, 3, 4)


def refusal(operator: str) -> str:
    """Return how the runtime refuses an operator with a constant that it does not take; empty if it does not."""
    try:
        session(operator, [np.array(["text"])])
    except Exception as error:  # noqa: BLE001 - it has several types
        return str(error)
    return ""


@pytest.mark.parametrize("operator", FOUND.operators if isinstance(FOUND, Kernels) else [])
def test_the_library_has_an_operator_under_all_its_names(operator: str) -> None:
    unknown = "not a registered"
    assert unknown not in refusal(names_of(operator)[-1])
    assert unknown in refusal(f"{operator}_{len(names_of(operator)) + 1}")


@pytest.mark.parametrize(
    ("index", "array", "type_"),
    [
        (1, np.ones(1, np.float64), "float"),
        (3, np.ones((4, 4, 1, 1), np.uint8), "int8"),
        (8, np.ones(4, np.float32), "int32"),
    ],
)
def test_element_types_that_do_not_fit_are_refused(index: int, array: Array, type_: str) -> None:
    case = Case()
    inputs = [case.arrays["x"], *case.constants]
    inputs[index] = array
    with pytest.raises(Exception, match=f"Convolution: input {index} must be a tensor of {type_}"):
        session("Convolution", inputs, **case.attributes)


def test_a_missing_input_is_refused() -> None:
    case = Case()
    with pytest.raises(Exception, match="Convolution: input 7 must be a tensor of uint8"):
        session("Convolution", [case.arrays["x"], *case.constants][:7], **case.attributes)


@pytest.mark.parametrize("name", names_of("Convolution"))
def test_an_operator_has_several_names_and_takes_constants_of_its_body(name: str) -> None:
    case = Case(table="one")
    more: list[Array | None] = [np.asarray(1, np.float32), np.zeros(3, np.int8)]
    opened = session(name, [case.arrays["x"], *case.constants, *more], **case.attributes)
    np.testing.assert_array_equal(opened.run(None, {"x": case.arrays["x"]})[0], case.expected())


# ----------------------------------------------------------------------------------------------------------- table


@patient
@given(
    shape=st.lists(st.integers(0, 70), min_size=0, max_size=4).map(tuple),
    each=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_table_is_its_definition(isa: str, shape: tuple[int, ...], each: bool, threads: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    each = each and bool(shape) and shape[-1] > 0
    table = random.integers(0, 256, (shape[-1], 256) if each else 256).astype(np.uint8)
    x = random.integers(0, 256, shape).astype(np.uint8)
    found = session("Table", [x, table], threads).run(None, {"x": x})[0]
    channels = np.broadcast_to(np.arange(shape[-1]), shape) if each else None
    np.testing.assert_array_equal(found, table[x] if channels is None else table[channels, x])


@pytest.mark.parametrize("shape", [(255,), (256, 4), (1, 2, 256), (0, 256)])
def test_tables_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(Exception, match=r"must be \(256,\) or \(C, 256\)"):
        session("Table", [np.zeros((2, 3), np.uint8), np.zeros(shape, np.uint8)])


# ---------------------------------------------------------------------------------------------------- Add and Mul


SHAPES = st.lists(st.integers(0, 40), min_size=0, max_size=4).map(tuple)


@patient
@given(
    operator=st.sampled_from(["Add", "Mul"]),
    shape=SHAPES,
    repeated=st.sampled_from(["no", "by image", "for all"]),
    zeros=st.tuples(*[st.integers(0, 255)] * 3),
    clipped=st.booleans(),
    step=st.sampled_from([1.0, 1.0, 1e-12]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_sum_and_a_product_are_their_definition(
    isa: str,
    operator: str,
    shape: tuple[int, ...],
    repeated: str,
    zeros: tuple[int, int, int],
    clipped: bool,
    step: float,
    threads: int,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    other = shape
    if repeated != "no" and len(shape) > 1:
        other = (shape[0] if repeated == "by image" else 1, *[1] * (len(shape) - 2), shape[-1])
    a, b = (random.integers(0, 256, each).astype(np.uint8) for each in (shape, other))
    scales = (random.uniform(0.005, 0.05, 3) * [1, 1, step]).astype(np.float32)
    table = random.integers(0, 256, 256).astype(np.uint8) if clipped else None
    (sa, za), (sb, zb), (sy, zy) = zip(map(np.asarray, scales), (np.asarray(z, np.uint8) for z in zeros), strict=True)
    opened = session(operator, [a, sa, za, Open(), sb, zb, sy, zy, table], threads)
    found = opened.run(None, {"x": a, "c2": b})[0]
    x, y = a.astype(np.float32) - zeros[0], b.astype(np.float32) - zeros[1]
    real = x * (y * (sa * sb / sy)) if operator == "Mul" else x * (sa / sy) + y * (sb / sy)
    assert real.dtype == np.float32
    expected = np.clip(np.rint(real) + zeros[2], 0, 255).astype(np.uint8)
    np.testing.assert_array_equal(found, expected if table is None else table[expected])


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (2, 2, 5, 4), (1, 1, 5, 4), (3, 1, 1, 4), (2, 1, 1, 3)], ids=str)
def test_a_sum_refuses_shapes_that_do_not_repeat(shape: tuple[int, ...]) -> None:
    one, zero = np.asarray(1, np.float32), np.asarray(0, np.uint8)
    x = np.zeros((2, 3, 5, 4), np.uint8)
    opened = session("Add", [x, one, zero, Open(), one, zero, one, zero, None])
    with pytest.raises(Exception, match="b must have the shape of a, or one value for each index of the last axis"):
        opened.run(None, {"x": x, "c2": np.zeros(shape, np.uint8)})


# --------------------------------------------------------------------------------------------------------- average


@patient
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(1, 40), st.integers(1, 150)),
    zeros=st.tuples(st.integers(0, 255), st.integers(0, 255)),
    ratio=st.sampled_from([0.2, 1.0, 3.0]),
    threads=st.integers(1, 3),
)
def test_an_average_is_its_definition(
    isa: str, shape: tuple[int, int, int, int], zeros: tuple[int, int], ratio: float, threads: int
) -> None:
    x = np.random.default_rng(sum(shape)).integers(0, 256, shape).astype(np.uint8)
    scales = [np.float32(0.02 * ratio), np.float32(0.02)]
    pairs = [(np.asarray(scale), np.asarray(zero, np.uint8)) for scale, zero in zip(scales, zeros, strict=True)]
    found = session("GlobalAveragePool", [x, *pairs[0], *pairs[1]], threads).run(None, {"x": x})[0]
    pixels = shape[1] * shape[2]
    multiplier = scales[0] / scales[1] / np.float32(pixels)
    sums = (x.astype(np.int64) - zeros[0]).sum(axis=(1, 2), keepdims=True).astype(np.float32)
    expected = np.clip(np.rint(multiplier * sums) + zeros[1], 0, 255).astype(np.uint8)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 0, 4, 3)], ids=["three axes", "no pixels"])
def test_an_average_refuses_what_is_no_image(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.uint8)
    one, zero = np.asarray(1, np.float32), np.asarray(0, np.uint8)
    opened = session("GlobalAveragePool", [x, one, zero, one, zero])
    with pytest.raises(Exception, match=r"ai\.requant\.GlobalAveragePool"):
        opened.run(None, {"x": x})


# ---------------------------------------------------------------------------------------------------------- Concat


@patient
@given(
    shape=st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple),
    widths=st.lists(st.integers(0, 70), min_size=2, max_size=4),
    tables=st.tuples(*[st.booleans()] * 4),
    threads=small,
    seed=st.integers(0, 2**32 - 1),
)
def test_a_concatenation_is_its_definition(
    isa: str, shape: tuple[int, ...], widths: list[int], tables: tuple[bool, ...], threads: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    parts = [random.integers(0, 256, (*shape, width)).astype(np.uint8) for width in widths]
    known = [random.integers(0, 256, 256).astype(np.uint8) if wanted else None for wanted in tables]
    inputs: list[Array | Open | None] = [None] * 8
    for place, (part, table) in enumerate(zip(parts, known, strict=False)):
        inputs[2 * place : 2 * place + 2] = [Open() if place else part, table]
    opened = session("Concat", inputs, threads)
    feed = {f"c{2 * place - 1}" if place else "x": part for place, part in enumerate(parts)}
    wanted = [part if table is None else table[part] for part, table in zip(parts, known, strict=False)]
    np.testing.assert_array_equal(opened.run(None, feed)[0], np.concatenate(wanted, -1))


def test_a_concatenation_refuses_what_does_not_fit() -> None:
    x = np.zeros((2, 3), np.uint8)
    opened = session("Concat", [x, None, Open(), *[None] * 5])
    for shape in ((3, 3), (2, 2, 3), (3,)):
        with pytest.raises(Exception, match="the tensors may differ in their last axis alone"):
            opened.run(None, {"x": x, "c1": np.zeros(shape, np.uint8)})
    with pytest.raises(Exception, match=r"a table must be \(256,\)"):
        session("Concat", [x, np.zeros(255, np.uint8), Open(), *[None] * 5])


# ----------------------------------------------------------------------------------------------------------- pools


def lengths(shape: Sequence[int], window: Mapping[str, Any]) -> list[int]:
    """Return the lengths of the axes of a pool's result, as the runtime computes them; it refuses those below 0."""
    found = []
    for axis in range(2):
        before, after = window["pads"][axis], window["pads"][axis + 2]
        kernel, step = window["kernel_shape"][axis], window["strides"][axis]
        dilation = window.get("dilations", (1, 1))[axis]
        free = before + shape[1 + axis] + after - dilation * (kernel - 1) - 1
        more = -(-free // step) if window["ceil_mode"] or free < 0 else free // step
        found.append(more if more * step >= before + shape[1 + axis] else more + 1)
    return found


def window_of(
    kernel_shape: tuple[int, int], strides: tuple[int, int], pads: tuple[int, int, int, int], ceil_mode: int
) -> dict[str, Any]:
    """Return the attributes of a pool whose pads are smaller than its kernel."""
    smaller = [min(pad, size - 1) for pad, size in zip(pads, kernel_shape * 2, strict=True)]
    return {"kernel_shape": kernel_shape, "strides": strides, "pads": smaller, "ceil_mode": ceil_mode}


four = st.integers(1, 4)
WINDOWS = st.builds(
    window_of, st.tuples(four, four), st.tuples(small, small), st.tuples(*[st.integers(0, 3)] * 4), st.integers(0, 1)
)
IMAGE_SHAPES = st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(1, 9), st.integers(1, 70))
ASIDE = window_of((2, 1), (1, 1), (1, 0, 1, 0), 1)
"""With a dilation, the taps of windows side by side are above and below an image of one row."""

LONGER = [window_of((1, 4), (1, 3), (0, 1, 0, 0), ceil) for ceil in (0, 1)]
"""A kernel that is longer than the padded image, of which the result has a pixel all the same."""


@patient
@example(shape=(1, 1, 3, 1), window=ASIDE, dilations=(2, 1), threads=1)
@example(shape=(1, 2, 1, 3), window=LONGER[0], dilations=(1, 1), threads=1)
@example(shape=(1, 2, 1, 3), window=LONGER[1], dilations=(1, 1), threads=1)
@given(shape=IMAGE_SHAPES, window=WINDOWS, dilations=st.tuples(st.integers(1, 2), st.integers(1, 2)), threads=small)
def test_a_maximum_is_that_of_the_runtime(
    isa: str, shape: tuple[int, ...], window: dict[str, Any], dilations: tuple[int, int], threads: int
) -> None:
    x = np.random.default_rng(sum(shape)).integers(0, 256, shape).astype(np.uint8)
    window = {**window, "dilations": dilations}
    assume(min(lengths(shape, window)) >= 0)
    found = session("MaxPool", [x], threads, **window).run(None, {"x": x})[0]
    assert list(found.shape[1:3]) == lengths(shape, window)
    assume(x.size)
    stock = session("MaxPool", [x.transpose(0, 3, 1, 2)], domain="", **window)
    expected = stock.run(None, {"x": np.ascontiguousarray(x.transpose(0, 3, 1, 2))})[0]
    assume(expected.shape[2:] == found.shape[1:3])  # the runtime begins a last kernel behind the image
    np.testing.assert_array_equal(found, expected.transpose(0, 2, 3, 1))


@patient
@example(shape=(1, 2, 1, 3), window=LONGER[0], every=False, zeros=(3, 5), threads=1)
@example(shape=(1, 2, 1, 3), window=LONGER[1], every=False, zeros=(3, 5), threads=1)
@given(
    shape=IMAGE_SHAPES,
    window=WINDOWS,
    every=st.booleans(),
    zeros=st.tuples(st.integers(0, 255), st.integers(0, 255)),
    threads=small,
)
def test_a_mean_is_its_definition(
    isa: str, shape: tuple[int, ...], window: dict[str, Any], every: bool, zeros: tuple[int, int], threads: int
) -> None:
    x = np.random.default_rng(sum(shape)).integers(0, 256, shape).astype(np.uint8)
    assume(min(lengths(shape, {**window, "strides": (1, 1)} if every else window)) >= int(every))
    one, zero = [np.asarray(0.02, np.float32), np.asarray(0.013, np.float32)], [np.asarray(z, np.uint8) for z in zeros]
    attributes = {**window, "count_include_pad": int(every)}
    opened = session("AveragePool", [x, one[0], zero[0], one[1], zero[1]], threads, **attributes)
    found = opened.run(None, {"x": x})[0]
    rows, columns = lengths(shape, window)
    (kh, kw), (sh, sw), (top, left, _, _) = window["kernel_shape"], window["strides"], window["pads"]
    expected = np.zeros((shape[0], rows, columns, shape[3]), np.uint8)
    for row, column in product(range(rows), range(columns)):
        y, z = row * sh - top, column * sw - left
        part = x[:, max(y, 0) : y + kh, max(z, 0) : z + kw].astype(np.int64)
        inside = part.shape[1] * part.shape[2]
        multiplier = one[0] / one[1] / np.float32(kh * kw if every else inside)
        sums = (part.sum(axis=(1, 2)) - inside * zeros[0]).astype(np.float32)
        expected[:, row, column] = np.clip(np.rint(multiplier * sums) + zeros[1], 0, 255)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("shape", "window", "message"),
    [
        ((1, 2, 3), {}, "x must be"),
        ((1, 1, 4, 3), {"kernel_shape": [3, 2]}, "smaller than the kernel"),
        ((1, 1, 4, 3), {"strides": [2, 2], "count_include_pad": 1}, "smaller than the kernel"),
        ((1, 4, 4, 3), {"pads": [2, 0, 0, 0]}, "pads must be smaller than the kernel"),
        ((1, 4, 4, 3), {"kernel_shape": [2]}, "kernel_shape must have two values"),
    ],
)
def test_a_pool_refuses_what_it_does_not_compute(shape: tuple[int, ...], window: dict[str, Any], message: str) -> None:
    x = np.zeros(shape, np.uint8)
    one, zero = np.asarray(1, np.float32), np.asarray(0, np.uint8)
    further: dict[str, list[Array]] = {"MaxPool": [], "AveragePool": [one, zero, one, zero]}
    for operator, more in further.items():
        with pytest.raises(Exception, match=message):
            session(operator, [x, *more], **{"kernel_shape": [2, 2], **window}).run(None, {"x": x})


@pytest.mark.parametrize(("operator", "value"), [("MaxPool", 0), ("AveragePool", 7)])
def test_a_pool_of_padding_alone_is_defined(operator: str, value: int) -> None:
    """The image has no pixels: nothing is larger than 0, and the mean is 0, which the zero point stands for."""
    x, one = np.zeros((1, 0, 3, 4), np.uint8), np.asarray(1, np.float32)
    scales: list[Any] = [one, np.asarray(3, np.uint8), one, np.asarray(7, np.uint8)]
    more = scales if operator == "AveragePool" else []
    found = session(operator, [x, *more], kernel_shape=[3, 3], pads=[2, 2, 2, 2]).run(None, {"x": x})[0]
    np.testing.assert_array_equal(found, np.full((1, 2, 5, 4), value, np.uint8))


def test_a_mean_of_more_values_than_it_can_add_is_refused() -> None:
    one, zero = np.asarray(1, np.float32), np.asarray(0, np.uint8)
    with pytest.raises(Exception, match="too many taps"):
        session("AveragePool", [np.zeros((1, 4, 4, 3), np.uint8), one, zero, one, zero], kernel_shape=[3000, 3000])


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize("operator", ["Add", "Mul", "AveragePool"])
def test_scales_that_are_no_positive_numbers_are_refused(operator: str, scale: float) -> None:
    x, one, zero = np.zeros((1, 4, 4, 3), np.uint8), np.asarray(1, np.float32), np.asarray(0, np.uint8)
    wrong = np.asarray(scale, np.float32)
    inputs: list[Any] = [x, one, zero, Open(), one, zero, wrong, zero, None]
    window: dict[str, Any] = {}
    if operator == "AveragePool":
        inputs, window = [x, wrong, zero, one, zero], {"kernel_shape": [2, 2]}
    with pytest.raises(Exception, match="scales and their ratios must be positive numbers"):
        session(operator, inputs, **window)


# --------------------------------------------------------------------------------------------------------- library


def test_an_instruction_set_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUANT_KERNELS_ISA", "mmx")
    with pytest.raises(Exception, match="REQUANT_KERNELS_ISA: no mmx on this CPU"):
        session("Table", [np.zeros(3, np.uint8), np.zeros(256, np.uint8)])


def test_the_library_is_small() -> None:
    assert isinstance(FOUND, Kernels)
    assert os.path.getsize(FOUND.library) < 1_000_000


def test_no_code_runs_while_the_library_is_loaded() -> None:
    # the source of an instruction set is compiled to it: a constructor in it would end the processes of older CPUs
    assert isinstance(FOUND, Kernels)
    assert b".init_array" not in Path(FOUND.library).read_bytes()


def test_a_model_without_the_library_is_not_loaded() -> None:
    node = helper.make_node("Table", ["x", "t"], ["y"], domain=NATIVE_DOMAIN)
    ends = [helper.make_tensor_value_info(name, TensorProto.UINT8, [3]) for name in "xy"]
    table = numpy_helper.from_array(np.zeros(256, np.uint8), "t")
    graph = helper.make_graph([node], "one", ends[:1], ends[1:], [table])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(NATIVE_DOMAIN, VERSION)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    onnx.checker.check_model(model)
    with pytest.raises(Exception, match=r"ai\.requant"):
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


# ------------------------------------------------------------------------------------------- rows in float, a matrix of int8

FUNCTIONS = (
    lambda v: v,
    lambda v: np.maximum(v, 0),
    lambda v: v * share_below(v),
    lambda v: v / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3))),
    lambda v: v / (1 + np.exp(-v)),
)


def share_below(value: Array) -> Array:
    """Return the share of a normal distribution below a value."""
    return np.asarray(np.vectorize(lambda each: 0.5 * math.erfc(-each / math.sqrt(2)))(value))


def matmul(
    w: Array,
    scale: Array,
    bias: Array | None,
    function: int = 0,
    threads: int = 1,
    *,
    adds: bool = False,
    gated: int = 0,
) -> ort.InferenceSession:
    """Load a model with one product of rows in float and a matrix of int8; with ``adds`` the residual is an input ``r``."""
    assert isinstance(FOUND, Kernels)
    values = {"w": w, "s": scale, "z": np.zeros_like(scale, np.int8)} | ({} if bias is None else {"b": bias})
    node = helper.make_node(
        "MatMul",
        ["x", "w", "s", "z", OMITTED if bias is None else "b", "r" if adds else OMITTED],
        ["y"],
        domain=NATIVE_DOMAIN,
        function=function,
        gated=gated,
    )
    tensors = [NOTHING, *(numpy_helper.from_array(array, name) for name, array in values.items())]
    x, r, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xry")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(NATIVE_DOMAIN, VERSION)]
    model = helper.make_model(
        helper.make_graph([node], "g", [x, r] if adds else [x], [y], tensors), opset_imports=opsets, ir_version=8
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.register_custom_ops_library(os.fspath(FOUND.library))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def defined(x: Array, w: Array, scale: Array, bias: Array | None, function: int) -> Array:
    """Return what the operator is defined to compute, in float64, and the sum of what its terms can be."""
    least, most = np.minimum(x.min(-1, keepdims=True), 0), np.maximum(x.max(-1, keepdims=True), 0)
    step = most / np.float32(255) - least / np.float32(255)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(step > 0, np.float32(1) / step, np.float32(0))
    zero = np.rint(-least * inverse)
    rounded = np.clip(np.rint(x * inverse) + zero, 0, 255) - zero
    value = (rounded.astype(np.float64) @ w.astype(np.float64)) * step.astype(np.float64) * scale
    return np.asarray(FUNCTIONS[function](value + (0 if bias is None else bias)))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.sampled_from([(1,), (3,), (2, 5), (1, 33), (4, 2, 9), (70,)]),
    inputs=st.integers(1, 200),
    outputs=st.integers(1, 100),
    function=st.integers(0, 4),
    each=st.booleans(),
    bias=st.booleans(),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 9999),
)
def test_rows_times_a_matrix_are_their_definition(
    isa: str,
    shape: tuple[int, ...],
    inputs: int,
    outputs: int,
    function: int,
    each: bool,
    bias: bool,
    threads: int,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    w = random.integers(-127, 128, (inputs, outputs)).astype(np.int8)
    scale = random.uniform(0, 0.02, outputs if each else ()).astype(np.float32)
    b = random.normal(size=outputs).astype(np.float32) if bias else None
    x = random.normal(random.choice([0.0, 3.0]), 2, (*shape, inputs)).astype(np.float32)
    x[..., 0, :] *= random.integers(0, 2)
    (found,) = matmul(w, scale, b, function, threads).run(None, {"x": x})
    expected = defined(x, w, scale, b, function)
    # a sum of up to 255 * 127 * inputs steps is rounded to float three times; GELU is exact to 3e-6
    size = 255 * 127 * inputs * float(scale.max()) * float(np.abs(x).max()) / 127 + 5
    np.testing.assert_allclose(found, expected, rtol=0, atol=3 * 2**-23 * size + 3e-6)


def test_rows_that_are_not_finite_become_nan_and_others_do_not(isa: str) -> None:
    w, x = np.ones((40, 5), np.int8), np.ones((6, 40), np.float32)
    x[1, 3], x[2, 39], x[3] = np.nan, -np.inf, 1e-42
    (found,) = matmul(w, np.full(5, 0.5, np.float32), np.full(5, 2, np.float32)).run(None, {"x": x})
    assert np.isnan(found[1:3]).all()
    np.testing.assert_array_equal(found[3], 2)
    np.testing.assert_allclose(found[[0, 4, 5]], 22, rtol=1e-6)


@pytest.mark.parametrize("outputs", [5, 48])
@pytest.mark.parametrize("function", [0, 2])
@pytest.mark.parametrize("gated", [0, 1])
def test_a_product_adds_a_tensor_behind_its_function_or_is_gated(
    isa: str, function: int, gated: int, outputs: int
) -> None:
    random = np.random.default_rng(0)
    w, scale = random.integers(-127, 128, (20, outputs)).astype(np.int8), np.full(outputs, 0.01, np.float32)
    x, r = random.normal(size=(4, 9, 20)).astype(np.float32), random.normal(size=(4, 9, outputs)).astype(np.float32)
    (alone,) = matmul(w, scale, None, function).run(None, {"x": x})
    made, joined = matmul(w, scale, None, function, adds=True, gated=gated), np.multiply if gated else np.add
    for other in (r, r[:1], r[0, :1], r[:, :, :1]):
        np.testing.assert_array_equal(made.run(None, {"x": x, "r": other})[0], joined(alone, other))
    np.testing.assert_array_equal(made.run(None, {"x": x[:1], "r": r})[0], joined(alone[:1], r))
    with pytest.raises(Exception, match="the shapes do not fit together"):
        made.run(None, {"x": x, "r": r[:2]})


def test_a_product_has_the_same_bytes_with_any_number_of_threads(isa: str) -> None:
    random = np.random.default_rng(0)
    w, x = random.integers(-127, 128, (300, 900)).astype(np.int8), random.normal(size=(50, 300)).astype(np.float32)
    runs = [matmul(w, np.ones(900, np.float32), None, 2, threads).run(None, {"x": x})[0] for threads in (1, 2, 5)]
    assert runs[0].tobytes() == runs[1].tobytes() == runs[2].tobytes()


@pytest.mark.parametrize(
    ("w", "scale", "bias", "function", "message"),
    [
        ((3, 4, 1), (4,), None, 0, "w must have two axes"),
        ((0, 4), (4,), None, 0, "w must have two axes, and must not be empty"),
        ((3, 4), (3,), None, 0, "w_scale must have one value, or one for each output"),
        ((3, 4), (4,), (3,), 0, "B must have one value for each output"),
        ((3, 4), (4,), None, 5, "the function must be from 0 to 4"),
        ((70_000, 1), (1,), None, 0, "w has too many inputs"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(
    w: tuple[int, ...], scale: tuple[int, ...], bias: tuple[int, ...] | None, function: int, message: str
) -> None:
    b = None if bias is None else np.zeros(bias, np.float32)
    with pytest.raises(Exception, match=message):
        matmul(np.ones(w, np.int8), np.ones(scale, np.float32), b, function)


def test_rows_that_do_not_fit_are_refused_and_no_rows_are_not() -> None:
    made = matmul(np.ones((3, 4), np.int8), np.ones(4, np.float32), None)
    with pytest.raises(Exception, match="the last axis of x must be the inputs of w"):
        made.run(None, {"x": np.zeros((2, 4), np.float32)})
    assert made.run(None, {"x": np.zeros((0, 3), np.float32)})[0].shape == (0, 4)
