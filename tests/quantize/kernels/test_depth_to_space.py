"""The native DepthToSpace: the definition, refusals, and models with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from requant.calibration.model.session import Array

from ...native import needs_library
from .flow import check_equal, native_operators, quantized
from .test_native import session

pytestmark = needs_library


def defined(x: Array, block: int, *, depth_first: bool) -> Array:
    """Return the result by its definition in ONNX, of an image in NHWC."""
    batch, height, width, depth = x.shape
    channels = depth // block**2
    order = (block, block, channels) if depth_first else (channels, block, block)
    parts = x.reshape(batch, height, width, *order)
    turned = parts.transpose((0, 1, 3, 2, 4, 5) if depth_first else (0, 1, 4, 2, 5, 3))
    return turned.reshape(batch, height * block, width * block, channels)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 6)),
    block=st.sampled_from([1, 2, 3, 4, 17]),
    channels=st.sampled_from([1, 2, 3, 16, 28, 64, 70, 130]),
    depth_first=st.booleans(),
    threads=st.integers(1, 3),
)
def test_it_is_its_definition(
    isa: str, sizes: tuple[int, int, int], block: int, channels: int, depth_first: bool, threads: int
) -> None:
    channels = channels if block < 17 else 2
    x = np.random.default_rng(channels).integers(0, 256, (*sizes, channels * block**2)).astype(np.uint8)
    found = session("DepthToSpace", [x], threads, blocksize=block, depth_first=int(depth_first)).run(None, {"x": x})[0]
    np.testing.assert_array_equal(found, defined(x, block, depth_first=depth_first))


@pytest.mark.parametrize(
    ("block", "shape"),
    [(0, (1, 2, 2, 4)), (-2, (1, 2, 2, 4)), (1025, (1, 2, 2, 4)), (2, (1, 2, 2, 6)), (2, (2, 2, 4))],
)
def test_what_it_refuses(block: int, shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.uint8)
    with pytest.raises(Exception, match=r"ai\.requant\.DepthToSpace"):
        session("DepthToSpace", [x], blocksize=block).run(None, {"x": x})


def test_an_empty_batch_has_an_empty_result() -> None:
    x = np.zeros((0, 2, 3, 8), np.uint8)
    assert session("DepthToSpace", [x], blocksize=2).run(None, {"x": x})[0].shape == (0, 4, 6, 2)


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_a_model_with_it_computes_what_its_body_does(mode: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        net (float[N,8,10,12] x) => (float[N,3,20,24] y) {{
          [first] a = Conv<pads = [1, 1, 1, 1]>(x, v)
          [last] b = Conv<pads = [1, 1, 1, 1]>(a, w)
          [up] y = DepthToSpace<blocksize = 2, mode = "{mode}">(b)
        }}""")
    for name, outputs in {"v": 8, "w": 12}.items():
        weights = rng.standard_normal((outputs, 8, 3, 3)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(weights, name))
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((8, 8, 10, 12)).astype(np.float32))
    result, found = quantized(tmp_path / "m.onnx", kernels="exact")
    assert native_operators(found) == ["Convolution", "Convolution", "DepthToSpace"]
    assert result.forms["u8->u8 native"] == 3
    check_equal(tmp_path / "m.onnx", found)
