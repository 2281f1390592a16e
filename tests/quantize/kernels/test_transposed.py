"""The native ConvTranspose: its definition, refusals, which ones it computes, and models with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from requant.calibration.model.session import Array
from requant.transforms.patterns.conv_transposes import has_whole_strides

from ...native import needs_library
from .flow import check_alike, native_operators, quantized
from .test_native import session

pytestmark = needs_library


@dataclass(frozen=True)
class Case:
    """A transposed convolution: its sizes, attributes and seed. Its result has whole strides."""

    batch: int = 1
    size: tuple[int, int] = (3, 4)
    inputs: int = 5
    outputs: int = 3
    kernel: tuple[int, int] = (4, 3)
    strides: tuple[int, int] = (2, 2)
    before: tuple[int, int] = (1, 1)
    grown: tuple[int, int] = (0, 0)  # of the smaller image, in pixels
    table: str = ""
    seed: int = 0

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes; what ``grown`` asks for is padding behind the image, or an output padding."""
        more = [
            k - s - p - g * s for k, s, p, g in zip(self.kernel, self.strides, self.before, self.grown, strict=True)
        ]
        behind, longer = [max(each, 0) for each in more], [max(-each, 0) for each in more]
        return {"strides": self.strides, "pads": [*self.before, *behind], "output_padding": longer}

    @property
    def arrays(self) -> dict[str, Array]:
        rng = np.random.default_rng(self.seed)
        tables = {"": None, "one": (256,), "each": (self.outputs, 256)}
        shape = tables[self.table]
        return {
            "x": rng.integers(0, 256, (self.batch, *self.size, self.inputs)).astype(np.uint8),
            "w": rng.integers(-127, 128, (self.inputs, self.outputs, *self.kernel)).astype(np.int8),
            "w_scale": rng.uniform(0.001, 0.002, self.outputs).astype(np.float32),
            "bias": rng.integers(-9999, 9999, self.outputs).astype(np.int32),
            **({} if shape is None else {"table": rng.integers(0, 256, shape).astype(np.uint8)}),
        }

    def run(self, threads: int = 1) -> Array:
        """Compute it with the native operator."""
        given_ = self.arrays
        opened = session("ConvTranspose", [given_["x"], *constants(given_)], threads, **self.attributes)
        return np.asarray(opened.run(None, {"x": given_["x"]})[0])

    def expected(self) -> Array:
        """Compute it from its definition: each pixel adds its products with the kernel to the result; exact sums."""
        given_, facts = self.arrays, self.attributes
        x, w = given_["x"].astype(np.int64) - X_ZERO, given_["w"].astype(np.int64)
        (down, across), (height, width) = self.strides, self.kernel
        top, left, bottom, right = facts["pads"]
        rows, columns = (
            (size - 1) * step + k for size, step, k in zip(self.size, self.strides, self.kernel, strict=True)
        )
        sums = np.zeros(
            (self.batch, rows + facts["output_padding"][0], columns + facts["output_padding"][1], self.outputs)
        )
        for i, j in np.ndindex(self.size):
            part = np.einsum("ni,iohw->nhwo", x[:, i, j], w)
            sums[:, i * down : i * down + height, j * across : j * across + width] += part
        sums = sums[:, top : sums.shape[1] - bottom, left : sums.shape[2] - right] + given_["bias"]
        real = sums.astype(np.float32) * (X_SCALE * given_["w_scale"] / Y_SCALE)
        y: Array = np.clip(np.rint(real) + Y_ZERO, 0, 255).astype(np.uint8)
        if self.table == "one":
            y = np.asarray(given_["table"][y])
        if self.table == "each":
            y = np.asarray(given_["table"][np.arange(self.outputs), y])
        return y


X_SCALE, Y_SCALE = (np.asarray(value, np.float32) for value in (0.02, 0.03))
X_ZERO, Y_ZERO = 117, 120


def constants(arrays: dict[str, Array]) -> list[Array | None]:
    """Return the inputs behind x."""
    zeros = [np.asarray(value, np.uint8) for value in (X_ZERO, Y_ZERO)]
    weights = [arrays["w"], arrays["w_scale"], np.zeros(arrays["w_scale"].shape, np.int8)]
    return [X_SCALE, zeros[0], *weights, Y_SCALE, zeros[1], arrays["bias"], arrays.get("table")]


def fits(case: Case) -> bool:
    """Return whether the smaller image has pixels, and all pads are smaller than the kernel."""
    pads = zip(case.attributes["pads"], 2 * case.kernel, strict=True)
    positive = all(size + grown > 0 for size, grown in zip(case.size, case.grown, strict=True))
    return positive and all(pad < length for pad, length in pads)


def with_less_padding(case: Case) -> Case:
    """Return a case whose first pads are smaller than the kernel."""
    (top, left), (height, width) = case.before, case.kernel
    return replace(case, before=(min(top, height - 1), min(left, width - 1)))


few = st.integers(1, 4)
CASES = (
    st.builds(
        Case,
        batch=st.integers(1, 3),
        size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
        inputs=st.integers(1, 40),
        outputs=st.integers(1, 40),
        kernel=st.tuples(st.integers(1, 6), st.integers(1, 6)),
        strides=st.tuples(few, few),
        before=st.tuples(st.integers(0, 4), st.integers(0, 4)),
        grown=st.tuples(st.integers(-1, 1), st.integers(-1, 1)),
        table=st.sampled_from(["", "one", "each"]),
        seed=st.integers(0, 2**32 - 1),
    )
    .map(with_less_padding)
    .filter(fits)
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=CASES, threads=st.integers(1, 3))
def test_it_is_its_definition_bit_for_bit(isa: str, case: Case, threads: int) -> None:
    np.testing.assert_array_equal(case.run(threads), case.expected())


def test_the_number_of_threads_changes_no_bit(isa: str) -> None:
    case = Case(2, (33, 31), 48, 40)
    first = case.run(1)
    np.testing.assert_array_equal(first, case.expected())
    for threads in (2, 3):
        np.testing.assert_array_equal(case.run(threads), first)


def test_an_empty_batch_has_an_empty_result() -> None:
    assert replace(Case(), batch=0).run().shape == (0, 6, 8, 3)


REFUSED: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "a dilation": ({"dilations": [2, 1]}, (1, 3, 4, 5), (5, 3, 2, 2)),
    "no whole strides": ({"strides": [2, 2]}, (1, 3, 4, 5), (5, 3, 3, 3)),
    "a long stride": ({"strides": [257, 1]}, (1, 3, 4, 5), (5, 3, 257, 1)),
    "a negative pad": ({"pads": [-1, 0, 0, 0]}, (1, 3, 4, 5), (5, 3, 1, 1)),
    "three output paddings": ({"output_padding": [0, 0, 0]}, (1, 3, 4, 5), (5, 3, 1, 1)),
    "other channels": ({}, (1, 3, 4, 6), (5, 3, 1, 1)),
    "no image": ({}, (3, 4, 5), (5, 3, 1, 1)),
    "no pixels": ({}, (1, 0, 4, 5), (5, 3, 1, 1)),
    "too much padding": ({"pads": [2, 0, 2, 0]}, (1, 3, 4, 5), (5, 3, 1, 1)),
    "weights of three axes": ({}, (1, 3, 4, 5), (5, 3, 1)),
    "no weights": ({}, (1, 3, 4, 5), (5, 3, 0, 1)),
}


@pytest.mark.parametrize(("attributes", "x", "w"), REFUSED.values(), ids=REFUSED)
def test_what_it_refuses(attributes: dict[str, Any], x: tuple[int, ...], w: tuple[int, ...]) -> None:
    arrays = {**Case().arrays, "w": np.ones(w, np.int8)}
    image = np.zeros(x, np.uint8)
    with pytest.raises(Exception, match=r"ai\.requant"):
        session("ConvTranspose", [image, *constants(arrays)], **attributes).run(None, {"x": image})


def test_it_refuses_zero_points_of_weights() -> None:
    given_ = constants(Case().arrays)
    given_[4] = np.ones(3, np.int8)
    with pytest.raises(Exception, match="w_zero_point must be 0"):
        session("ConvTranspose", [Case().arrays["x"], *given_], **Case().attributes)


# ------------------------------------------------------------------------------------------------- which ones it is


def transposed(attributes: str) -> ir.Node:
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        net (float[N,4,H,W] x, float[4,3,a,b] w) => (float[N,3,c,d] y) {{ y = ConvTranspose<{attributes}>(x, w) }}"""
    (node,) = ir.from_onnx_text(text).graph
    return node


@pytest.mark.parametrize(
    ("attributes", "kernel", "found"),
    [
        ("strides = [2, 2]", (2, 2), True),
        ("strides = [2, 2], pads = [1, 1, 1, 1]", (4, 4), True),
        ("strides = [2, 2], pads = [1, 1, 1, 1]", (3, 3), False),
        ("strides = [2, 2], pads = [1, 1, 1, 1], output_padding = [1, 1]", (3, 3), True),
        ("strides = [2, 1], pads = [0, 1, 0, 1]", (2, 3), True),
        ('strides = [2, 2], auto_pad = "SAME_UPPER"', (2, 2), False),
        ("strides = [2, 2], output_shape = [8, 8]", (2, 2), False),
        ("strides = [2, 2], group = 2", (2, 2), False),
        ("strides = [2, 2], dilations = [2, 2]", (2, 2), False),
        ("strides = [257, 1]", (257, 1), False),
        ("strides = [2, 2], pads = [2, 2, 2, 2]", (2, 2), False),
        ("strides = [1, 1]", (200, 200), False),  # more products than int32 holds
        ("strides = [2]", (2,), False),
    ],
)
def test_which_ones_have_whole_strides(attributes: str, kernel: tuple[int, ...], found: bool) -> None:
    weights = ir.tensor(np.zeros((4, 3, *kernel), np.float32))
    assert has_whole_strides(transposed(attributes), weights) is found
    assert not has_whole_strides(transposed(attributes), None)


# ------------------------------------------------------------------------------------------------------------ models


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the path of two convolutions with a transposed one and a Relu between them, and its data beside it."""
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        net (float[N,8,10,12] x) => (float[N,8,20,24] y) {
          [first] a = Conv<pads = [1, 1, 1, 1]>(x, v)
          [up] b = ConvTranspose<strides = [2, 2], pads = [1, 1, 1, 1]>(a, u, bias)
          [relu] c = Relu(b)
          [last] y = Conv<pads = [1, 1, 1, 1]>(c, w)
        }""")
    arrays = {"v": (8, 8, 3, 3), "u": (8, 8, 4, 4), "w": (8, 8, 3, 3), "bias": (8,)}
    for name, shape in arrays.items():
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((8, 8, 10, 12)).astype(np.float32))
    return tmp_path / "m.onnx"


def test_it_stands_between_native_convolutions_and_the_body_computes_the_same(model: Path) -> None:
    result, found = quantized(model, kernels="native")
    assert native_operators(found) == ["Convolution", "ConvTranspose", "Convolution"]
    assert result.forms["u8->u8 native"] == 3
    check_alike(model, found)


@pytest.mark.parametrize("options", [{"kernels": "stock"}, {"kernels": "exact"}, {"portable": True, "place": "rules"}])
def test_it_stays_float_where_it_may_not_be_native(model: Path, options: dict[str, Any]) -> None:
    result, found = quantized(model, **options)
    assert not [node for node in found.graph.node if node.op_type == "ConvTranspose" and node.domain]
    (reason,) = [row.reason for row in result.float_nodes if row.operator == "ConvTranspose"]
    assert reason == "the runtime has no integer kernel for ConvTranspose; its weights are too few for a gain"


@pytest.mark.slow
def test_large_weights_are_int8_in_the_file_where_it_stays_float(model: Path) -> None:
    """The native form is one more, where its time decides; the file is as small without it."""
    proto = onnx.load(model)
    (weights,) = [each for each in proto.graph.initializer if each.name == "u"]
    larger = np.random.default_rng(1).standard_normal((8, 160, 4, 4)).astype(np.float32)
    weights.CopyFrom(numpy_helper.from_array(larger, "u"))
    (last,) = [each for each in proto.graph.initializer if each.name == "w"]
    last.CopyFrom(numpy_helper.from_array(np.ones((8, 160, 3, 3), np.float32), "w"))
    (bias,) = [each for each in proto.graph.initializer if each.name == "bias"]
    bias.CopyFrom(numpy_helper.from_array(np.zeros(160, np.float32), "bias"))
    onnx.save(proto, model)
    assert quantized(model, kernels="stock")[0].forms["weight-only"] == 1
    assert quantized(model, kernels="native")[0].forms["u8->u8 native"] == 3
