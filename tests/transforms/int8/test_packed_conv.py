"""First convolutions on blocks of pixels: the same sums of the same integers, and what is left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from requant.calibration.model.session import Array
from requant.quantize.runtime.isa import detect
from requant.quantize.runtime.profile import profiled
from requant.transforms import verify
from requant.transforms.graphs.inference import inferred
from requant.transforms.graphs.queries import constant
from requant.transforms.int8 import packed_conv
from requant.transforms.int8.insert_qdq import insert_qdq
from requant.transforms.int8.packed_conv import taps_of
from requant.transforms.int8.plan import Choice, Impl, Plan
from requant.transforms.int8.qparams import QParams, Scheme
from requant.transforms.int8.units import units

OUTPUTS = 6
ZEROS = {"u8": np.asarray(113, np.uint8), "s8": np.asarray(-15, np.int8)}


def build(
    shape: str = "2,3,8,8",
    weights: tuple[int, ...] = (OUTPUTS, 3, 3, 3),
    nodes: str = "[conv] y = Conv(x, w, b)",
    **used: str,
) -> ir.Model:
    """Make a model of ONNX text that reads x, weights w and a bias b, both at random, in place of ``conv``'s facts."""
    random = np.random.default_rng(3)
    arrays = {"w": random.standard_normal(weights), "b": random.standard_normal(weights[0])}
    constants = ", ".join(
        f"float[{','.join(map(str, array.shape))}] {name} = {{{', '.join(f'{v:.6f}' for v in array.ravel())}}}"
        for name, array in arrays.items()
    )
    rank = ",".join("ABCDE"[: len(weights)])
    text = nodes.replace("Conv(", f"Conv <{used.get('facts', 'strides = [2, 2]')}> (", 1)
    head = f'<ir_version: 8, opset_import: ["" : {used.get("opset", "17")}]>'
    outputs = ", ".join(f"float[{rank}] {name}" for name in used.get("outputs", "y").split())
    return ir.from_onnx_text(f"{head} g (float[{shape}] x) => ({outputs}) <{constants}> {{ {text} }}")


def written(model: ir.Model, scheme: Scheme | None = None, *, exact: bool = True, float_units: str = "") -> ir.Model:
    """Return a copy in which all units but `float_units` compute in integers."""
    scheme, model = scheme or Scheme(), model.clone()
    for name, value in inferred(model).items():
        known = {value.name: value for node in model.graph for value in node.outputs}
        if name in known and value.type is not None:
            known[name].type, known[name].shape = value.type, value.shape
    found = units(model.graph)
    plan = Plan(found, {u.name: Choice(Impl.FLOAT if u.name in float_units else Impl.U8) for u in found})
    steps = {tensor: np.asarray(0.03 if tensor == "x" else 0.3, np.float32) for tensor in plan.observed}
    zero = ZEROS[scheme.activation]
    qparams = {tensor: QParams(scale=step, zero_point=zero) for tensor, step in steps.items()}
    insert_qdq(model, plan=plan, qparams=qparams, scheme=scheme, exact=exact)
    verify(model)
    return model


def plain(model: ir.Model, scheme: Scheme | None = None, **how: Any) -> ir.Model:
    """Return the same without packing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("requant.transforms.int8.insert_qdq.pack_pixels", lambda *_, **__: False)
        return written(model, scheme, **how)


def ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def producer(value: ir.Value | None) -> ir.Node:
    node = value.producer() if value is not None else None
    assert node is not None
    return node


def proto(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(model).SerializeToString())


def run(model: ir.Model, x: Array) -> list[Array]:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = ort.InferenceSession(proto(model), options, providers=["CPUExecutionProvider"])
    return [np.asarray(found) for found in session.run(None, {"x": x})]


def draw(shape: tuple[int, ...]) -> Array:
    """Return an input, some of it out of range.

    Without VNNI it has no integers above 129: 129 * (127 + 127) fits in 16 bits. Packing changes the pairs of products
    that are added in 16 bits, so that others saturate.
    """
    high = 4 if detect().exact else (129 - 113) * 0.03
    return np.random.default_rng(5).uniform(-4, high, shape).astype(np.float32)


def check_same(model: ir.Model, shape: tuple[int, ...], scheme: Scheme | None = None, packed: int = 1) -> None:
    """Check that the packed model gives, to the bit, what the other gives."""
    made, other = written(model, scheme), plain(model, scheme)
    assert ops(made).count("SpaceToDepth") == packed
    assert "SpaceToDepth" not in ops(other)
    x = draw(shape)
    for after, before in zip(run(made, x), run(other, x), strict=True):
        assert after.shape == before.shape
        assert after.tobytes() == before.tobytes()
        assert np.ptp(before) > 0  # there is something to compare


SIDES = st.integers(1, 6).map(lambda half: 2 * half)
PADS = st.integers(0, 5)
SCHEMES = {
    "s8 weights": Scheme(),
    "u8 weights": Scheme(weight="u8"),
    "symmetric": Scheme(symmetric=True),
}


@settings(max_examples=80)
@given(
    kernel=st.tuples(st.integers(2, 7), st.integers(2, 7)),
    pads=st.tuples(PADS, PADS, PADS, PADS),
    sides=st.tuples(SIDES, SIDES),
    channels=st.integers(1, 4),
    scheme=st.sampled_from(sorted(SCHEMES)),
)
def test_the_sums_are_the_same(
    kernel: tuple[int, int], pads: tuple[int, ...], sides: tuple[int, int], channels: int, scheme: str
) -> None:
    """Of every kernel, padding and size."""
    ends = [side + pads[axis] + pads[axis + 2] - kernel[axis] for axis, side in enumerate(sides)]
    assume(min(ends) >= 0)  # the kernel fits
    shape, weights = (2, channels, *sides), (OUTPUTS, channels, *kernel)
    model = build(",".join(map(str, shape)), weights, facts=f"strides = [2, 2], pads = {list(pads)}")
    check_same(model, shape, SCHEMES[scheme])


@pytest.mark.parametrize("kernel", range(2, 8))
@pytest.mark.parametrize("begin", range(6))
@pytest.mark.parametrize("length", [2, 4, 10])
def test_every_tap_reads_the_pixel_that_it_read(kernel: int, begin: int, length: int) -> None:
    """Tap t of output o reads pixel 2 o + t - begin, and no block beyond the padding is read."""
    for end in range(6):
        made = (length + begin + end - kernel) // 2 + 1
        if length + begin + end < kernel:
            continue
        taps = taps_of(kernel, begin, length, made)
        assert taps is not None
        first, last = taps.pads
        for output in range(made):
            pixels = 2 * (output + taps.block - first) + taps.within
            assert pixels.tolist() == [2 * output + tap - begin for tap in range(kernel)]
        assert length // 2 + first + last - taps.taps + 1 == made  # of a convolution of stride 1
        assert sorted(set(taps.block)) == list(range(taps.taps))


MODELS = {
    "Relu absorbed": ("[conv] t = Conv(x, w, b) [relu] y = Relu(t)", "y", 1),
    "no bias": ("[conv] y = Conv(x, w)", "y", 1),
    "two readers of the input": ("[conv] t = Conv(x, w, b) [other] u = Conv(x, w, b)", "t u", 1),
    "two of the same weights": ("[conv] t = Conv(x, w, b) [other] u = Conv <strides = [2, 2]> (x, w, b)", "t u", 2),
    "behind a pooling": (
        "[pool] p = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x) [conv] y = Conv(p, w, b)",
        "y",
        1,
    ),
    "read on": (
        "[conv] t = Conv(x, w, b) [pool] y = MaxPool <kernel_shape = [2, 2]> (t) [more] u = Conv(x, w)",
        "y u",
        1,
    ),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("nodes", "outputs", "packed"), MODELS.values(), ids=MODELS)
def test_the_sums_are_the_same_wherever_it_stands(nodes: str, outputs: str, packed: int, scheme: str) -> None:
    model = build(nodes=nodes, outputs=outputs)
    check_same(model, (2, 3, 8, 8), SCHEMES[scheme], packed)


@pytest.mark.parametrize("shape", ["N,3,8,8", "2,3,8,8"])
def test_the_integer_kernel_runs_it(shape: str) -> None:
    runs = profiled(proto(written(build(shape))), {"x": draw((2, 3, 8, 8))}).runs
    assert {run.op for run in runs if run.macs} == {"QLinearConv"}
    (conv,) = [run for run in runs if run.op == "QLinearConv"]
    assert conv.outputs == ((2, 3, 3, OUTPUTS),) or conv.outputs == ((2, OUTPUTS, 3, 3),)
    assert [run.reads for run in runs if run.op == "SpaceToDepth"] == [("float",)]


def test_it_is_written_as_told() -> None:
    made = written(build(facts="strides = [2, 2], pads = [1, 1, 1, 1]"), Scheme(weight="u8"))
    (conv,) = [node for node in made.graph if node.op_type == "Conv"]
    facts = {name: conv.attributes.get_ints(name) for name in ("strides", "kernel_shape", "pads")}
    assert facts == {"strides": (1, 1), "kernel_shape": (2, 2), "pads": (1, 1, 0, 0)}
    dq = producer(conv.inputs[1])
    weights, scale, zero = (tensor.numpy() for tensor in map(constant, dq.inputs) if tensor is not None)
    assert weights.shape == (OUTPUTS, 12, 2, 2)
    assert weights.dtype == zero.dtype == np.uint8
    blocks = weights.reshape(OUTPUTS, 2, 2, 3, 2, 2)  # row and column in the block, channel, row and column of blocks
    assert np.array_equal(blocks[:, 0, :, :, 0], np.broadcast_to(zero.reshape(-1, 1, 1, 1), (OUTPUTS, 2, 3, 2)))
    assert (blocks[:, 1, 1] != zero.reshape(-1, 1, 1, 1)).mean() > 0.9
    assert scale.shape == zero.shape == (OUTPUTS,)
    assert "w/int8" not in made.graph.initializers


LEFT = {
    "odd height": {"shape": "2,3,9,8"},
    "odd width": {"shape": "2,3,8,7"},
    "five channels": {"shape": "2,5,8,8", "weights": (OUTPUTS, 5, 3, 3)},
    "groups": {"shape": "2,4,8,8", "weights": (OUTPUTS, 2, 3, 3), "facts": "strides = [2, 2], group = 2"},
    "dilated": {"facts": "strides = [2, 2], dilations = [2, 2]"},
    "stride 1": {"facts": "strides = [1, 1]"},
    "no stride": {"facts": "pads = [0, 0, 0, 0]"},
    "stride 3": {"facts": "strides = [3, 3]"},
    "stride 2 of rows": {"facts": "strides = [2, 1]"},
    "padded by rule": {"facts": 'strides = [2, 2], auto_pad = "SAME_UPPER"'},
    "one tap": {"weights": (OUTPUTS, 3, 1, 1)},
    "one row of taps": {"weights": (OUTPUTS, 3, 1, 3)},
    "unknown height": {"shape": "2,3,H,8"},
    "unknown height, as many samples as channels": {"shape": "4,4,H,8", "weights": (OUTPUTS, 4, 3, 3)},
    "unknown channels": {"shape": "2,C,8,8"},
    "one axis": {"shape": "2,3,8", "weights": (OUTPUTS, 3, 3), "facts": "strides = [2]"},
    "three axes": {"shape": "2,3,8,8,8", "weights": (OUTPUTS, 3, 3, 3, 3), "facts": "strides = [2, 2, 2]"},
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_alone(case: str) -> None:
    model = build(**LEFT[case])  # type: ignore[arg-type]
    assert proto(written(model)) == proto(plain(model))


def test_a_convolution_in_float_is_left_alone() -> None:
    model = build(nodes="[conv] t = Conv(x, w, b) [other] y = Conv(x, w, b)", outputs="t y")
    assert proto(written(model, float_units="conv")) == proto(plain(model, float_units="conv"))


def test_activations_of_int8_are_left_alone() -> None:
    """The runtime would run the convolution in float."""
    scheme = Scheme(activation="s8")
    assert proto(written(build(), scheme)) == proto(plain(build(), scheme))
    runs = profiled(proto(written(build(), scheme)), {"x": draw((2, 3, 8, 8))}).runs
    assert {run.op for run in runs if run.macs} == {"QLinearConv"}


def test_where_sums_are_of_16_bits_the_weights_stay_as_they_were_relieved() -> None:
    """In blocks other pairs of products would be added in 16 bits."""
    assert proto(written(build(), exact=False)) == proto(plain(build(), exact=False))


@pytest.mark.parametrize("kernel", [2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("begin", [0, 1, 2, 3])
def test_unpacked_weights_are_those_before_packing(kernel: int, begin: int) -> None:
    random = np.random.default_rng(kernel)
    weights = random.integers(1, 127, (5, 3, kernel, kernel)).astype(np.int8)
    side = 12
    for end in (0, 1, 2, 3):
        count = (side + begin + end - kernel) // 2 + 1
        taps = taps_of(kernel, begin, side, count)
        if taps is None or begin >= kernel:
            continue
        packed = packed_conv._packed(weights, np.zeros(5, np.int8), (taps, taps))
        found, pads = packed_conv.unpacked(packed, [taps.pads[0], taps.pads[0], taps.pads[1], taps.pads[1]])
        offset = begin - pads[0]  # less than 0 if zeros in front are kept
        assert found.shape[2] <= kernel + 1
        before = -offset if offset < 0 else 0
        np.testing.assert_array_equal(found[:, :, before : before + kernel, before : before + kernel], weights)
        assert np.count_nonzero(found) == weights.size
        assert (side + pads[0] + pads[2] - found.shape[2]) // 2 + 1 == count


@pytest.mark.parametrize(
    ("shape", "weights", "inferred_again"), [("2,3,8,8", 3, False), ("N,3,8,8", 3, True), ("N,8,8,8", 8, False)]
)
def test_shapes_are_inferred_only_where_packing_reads_one_that_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, shape: str, weights: int, inferred_again: bool
) -> None:
    told: list[ir.Model] = []

    def spy(model: ir.Model) -> dict[str, ir.Value]:
        told.append(model)
        return inferred(model)

    monkeypatch.setattr("requant.transforms.int8.insert_qdq.inferred", spy)
    made = written(build(shape, (OUTPUTS, weights, 3, 3), "[conv] h = Conv(x, w, b) y = Relu(h)"))
    assert bool(told) == inferred_again
    assert ops(made).count("SpaceToDepth") == (weights == 3)
