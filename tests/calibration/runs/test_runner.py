"""The runner: statistics equal NumPy's, memory stays bounded, and every failure names tensor and sample."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from requant import RequantError, UnknownNameError
from requant.calibration import (
    Channels,
    DataError,
    Execution,
    Histogram,
    MinMax,
    Observations,
    Place,
    Sample,
    Source,
    input_specs,
    observe,
    open_session,
    open_source,
    run_logged,
)
from requant.calibration.model.session import Array
from requant.calibration.runs.pieces import PIECE
from requant.calibration.statistics.histogram import Statistic

MODEL = """<ir_version: 8, opset_import: ["" : {opset}]>
g ({type}[N, C, T] x) => ({type}[N, C, T] y)
<{type}[1] w> {{
    a = Mul(x, w)
    b = Relu(a)
    i = Cast <to = 7> (b)
    f = Cast <to = {code}> (i)
    y = Sub(b, f)
}}"""
CODES = {"float": 1, "float16": 10, "double": 11}
DTYPES: dict[str, Any] = {"float": np.float32, "float16": np.float16, "double": np.float64}
TENSORS = ("x", "a", "b", "f", "w", "y")

histograms = pytest.mark.parametrize("histogram", [False, True], ids=["minmax", "histogram"])


def binary(model: str | ir.Model) -> bytes:
    parsed = ir.from_onnx_text(model) if isinstance(model, str) else model
    return bytes(ir.to_proto(parsed).SerializeToString())


def model(kind: str = "float", opset: int = 17) -> bytes:
    made = ir.from_onnx_text(MODEL.format(type=kind, code=CODES[kind], opset=opset))
    weight = ir.tensor(np.array([-2], DTYPES[kind]), name="w")  # the text form cannot hold float16
    made.graph.register_initializer(ir.Value(name="w", const_value=weight))
    return binary(made)


def source(arrays: list[Array], data: bytes | None = None) -> Source:
    return open_source([{"x": array} for array in arrays], input_specs(open_session(data or model())))


def expected(x: Array) -> dict[str, Array]:
    """The tensors of MODEL; every operation in it is exact."""
    a = x * x.dtype.type(-2)
    b = np.maximum(a, 0)
    f = b.astype(np.int64).astype(x.dtype)
    return {"x": x, "a": a, "b": b, "f": f, "w": np.array([-2], x.dtype), "y": b - f}


def data(*shapes: tuple[int, ...], dtype: Any = np.float32) -> list[Array]:
    rng = np.random.default_rng(7)
    return [(rng.standard_normal(shape) * 8).astype(dtype) for shape in shapes]


SPECS = input_specs(open_session(model()))
VARYING = [(1, 2, 5), (3, 1, 4), (1, 7, 1), (2, 2, 2)]


@histograms
@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("opset", [11, 13, 17, 21])
def test_statistics_equal_numpys_for_varying_shapes(histogram: bool, kind: str, opset: int) -> None:
    arrays = data(*VARYING, dtype=DTYPES[kind])
    bytes_ = model(kind, opset)
    seen = observe(bytes_, TENSORS, source(arrays, bytes_), histogram=histogram)
    statistic: type[Statistic] = Histogram if histogram else MinMax
    for name in TENSORS:
        values = np.concatenate([expected(array)[name].ravel() for array in arrays])
        assert seen.ranges[name] == statistic.of(values), name
    assert seen.samples == len(arrays)
    assert set(seen.ranges) == set(TENSORS)


@histograms
def test_any_split_over_machines_gives_the_same(histogram: bool) -> None:
    arrays = data(*VARYING)
    whole = observe(model(), TENSORS, source(arrays), histogram=histogram)
    merged = Observations()
    for array in reversed(arrays):
        merged |= observe(model(), TENSORS, source([array]), histogram=histogram)
    assert (merged.ranges, merged.moments, merged.samples) == (whole.ranges, whole.moments, whole.samples)


@pytest.mark.parametrize(
    ("histogram", "values"), [(False, None), (True, None), (True, 5)], ids=["minmax", "histogram", "of some values"]
)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shards", [2, 5])
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "iterable"])
def test_shards_merge_to_the_whole_bit_by_bit(
    histogram: bool, values: int | None, batch: int, shards: int, sized: bool
) -> None:
    arrays = data(*[(1, 3, 4)] * 7, (1, 3, 9), *[(2, 3, 4)] * 4)
    axes = {"a": 1, "y": -2}

    def run(**options: Any) -> Observations:
        feeds = source(arrays) if sized else open_source(lambda: iter([{"x": x} for x in arrays]), SPECS)
        execution = Execution(batch=batch, histogram_values=values, **options)
        return observe(model(), TENSORS, feeds, histogram=histogram, channel_axis=axes, execution=execution)

    whole = run(workers=1)
    assert whole.samples == len(arrays)
    assert run(workers=3) == whole
    parts = [run(shard=(index + 1, shards)) for index in range(shards)]
    assert sum(part.samples for part in parts) == len(arrays)
    for order in (parts, parts[::-1]):
        assert reduce(or_, order) == whole


def test_neither_batch_nor_groups_change_which_values_are_counted() -> None:
    arrays = data(*[(1, 3, 40)] * 7, (1, 3, 9))

    def run(**options: Any) -> Observations:
        tensors = [name for name in TENSORS if name != "w"]  # which a run has once, whatever its batch
        return observe(model(), tensors, source(arrays), histogram=True, execution=Execution(**options))

    whole = run(histogram_values=50)
    assert run(histogram_values=50, batch=3).ranges == whole.ranges  # every operation of the model is exact
    assert run(histogram_values=50, memory_limit=1).ranges == whole.ranges
    full = run(histogram_values=None)
    for name, statistic in whole.ranges.items():
        assert isinstance(statistic, Histogram)
        found = full.ranges[name]
        assert (statistic.lo, statistic.hi, statistic.count) == (found.lo, found.hi, getattr(found, "count", 0))
    assert whole.ranges["a"] != full.ranges["a"]
    assert whole.runs == full.runs


@histograms
def test_the_model_may_be_a_file_with_external_data(tmp_path: Path, histogram: bool) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 64] x) => (float[N, 64] y) { y = Relu(x) }'
    made = ir.from_onnx_text(text)
    weight = ir.Tensor(np.eye(64, dtype=np.float32) * 3, name="w")
    made.graph.register_initializer(ir.Value(name="w", const_value=weight, type=ir.TensorType(weight.dtype)))
    node = ir.node("MatMul", [made.graph.inputs[0], made.graph.initializers["w"]])
    node.outputs[0].name = "z"
    made.graph.append(node)
    made.graph.outputs.append(node.outputs[0])
    path = tmp_path / "m.onnx"
    ir.save(made, path, external_data="m.data", size_threshold_bytes=100)
    before = path.read_bytes()
    (x,) = data((2, 64))
    seen = observe(path, ["z"], [Sample({"x": x}, None, "here")], histogram=histogram)
    assert (seen.ranges["z"].lo, seen.ranges["z"].hi) == (x.min() * 3, x.max() * 3)
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.data", "m.onnx"]


@histograms
def test_models_without_the_default_operator_set(histogram: bool) -> None:
    text = """<ir_version: 8, opset_import: ["com.microsoft" : 1]>
    g (float[N] x) => (float[N] y) { y = com.microsoft.Gelu(x) }"""
    (x,) = data((5,))
    seen = observe(binary(text), ["x"], [Sample({"x": x}, None, "here")], histogram=histogram)
    assert (seen.ranges["x"].lo, seen.ranges["x"].hi) == (x.min(), x.max())


@histograms
@pytest.mark.parametrize("ir_version", [3, 8])
def test_initializers_among_the_inputs_are_constants(histogram: bool, ir_version: int) -> None:
    text = f"""<ir_version: {ir_version}, opset_import: ["" : 11]>
    g (float[N, 2] x, float[2] w) => (float[N, 2] y) <float[2] w = {{1, 2}}> {{ y = Add(x, w) }}"""
    (x,) = data((3, 2))
    seen = observe(binary(text), ["w", "x"], [Sample({"x": x}, None, "here")], histogram=histogram)
    assert (seen.ranges["w"].lo, seen.ranges["w"].hi) == (1, 2)
    assert (seen.ranges["x"].lo, seen.ranges["x"].hi) == (x.min(), x.max())


@histograms
def test_scalars_are_tensors_too(histogram: bool) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[N] x) => (float y) { s = ReduceSum <keepdims = 0> (x) y = Neg(s) }"""
    samples = [Sample({"x": np.array([value], np.float32)}, None, "here") for value in (3, 4)]
    seen = observe(binary(text), ["s", "y"], samples, histogram=histogram)
    assert [(seen.ranges[name].lo, seen.ranges[name].hi) for name in ("s", "y")] == [(3, 4), (-4, -3)]


@histograms
def test_tensors_without_elements_contribute_nothing(histogram: bool) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[N] x) => (float[M] y) <float zero = {0}, int64[1] none = {0}> {
        positive = Greater(x, zero)
        y = Compress(x, positive)
        never = Slice(x, none, none)
    }"""
    arrays = [np.array(values, np.float32) for values in ([-1, -2], [3, -4], [-5, 6])]
    samples = [Sample({"x": array}, None, f"sample {index}") for index, array in enumerate(arrays)]
    for axes in ({}, {"y": 0, "never": 0}):
        seen = observe(binary(text), ["y", "never"], samples, histogram=histogram, channel_axis=axes)
        assert (set(seen.ranges), set(seen.channels)) == ({"y"}, set(axes) - {"never"})
        assert (seen.ranges["y"].lo, seen.ranges["y"].hi, seen.ranges["y"].count) == (3, 6, 2)


IMAGES = """<ir_version: 8, opset_import: ["" : {opset}]>
g (float[N, 3, 6, 6] x) => (float[N, 20, 6, 6] y) <float low = {{{low}}}, float six = {{6}}> {{
    r = {root} (x)
    c = Conv <pads = [1, 1, 1, 1]> (r, first)
    a = Relu (c)
    d = Conv <pads = [1, 1, 1, 1]> (a, second)
    b = Clip (d, low, six)
    e = Concat <axis = 1> (a, b)
    p = MaxPool <kernel_shape = [2, 2]> (e)
    y = Conv <pads = [1, 1, 1, 1]> (b, second)
}}"""


def images(opset: int = 17, low: float = 0, root: str = "Identity") -> bytes:
    made = ir.from_onnx_text(IMAGES.format(opset=opset, low=low, root=root))
    rng = np.random.default_rng(3)
    for name, channels in (("first", 3), ("second", 20)):
        weight = ir.tensor(rng.standard_normal((20, channels, 3, 3)).astype(np.float32), name=name)
        made.graph.register_initializer(ir.Value(name=name, const_value=weight))
    return binary(made)


@pytest.mark.parametrize("opset", [11, 17, 22])
@pytest.mark.parametrize("low", [0, -1, 2])
def test_images_between_convolutions_are_reduced_where_they_are(opset: int, low: float) -> None:
    # The same session gives the tensors whole and reduced: the extremes are those of the very same values.
    samples = [Sample({"x": x}, None, "here") for x in data((1, 3, 6, 6), (0, 3, 6, 6), (2, 3, 6, 6), (0, 3, 6, 6))]
    names = ("c", "a", "d", "b", "e", "p")
    reduced = observe(images(opset, low), names, samples, histogram=False)
    whole = observe(images(opset, low), names, samples, histogram=True)
    for name in names:
        lo = 0.0 if name == "a" or (name in "bep" and low >= 0) else whole.ranges[name].lo
        assert reduced.ranges[name] == MinMax(lo, whole.ranges[name].hi, whole.ranges[name].count)


def test_nan_is_found_in_images() -> None:
    x = np.ones((1, 3, 6, 6), np.float32)
    x[0, 1, 2, 3] = -1
    good = np.ones((4, 3, 6, 6), np.float32)
    samples = [Sample({"x": array}, None, where) for array, where in ((good, "good"), (x, "bad"))]
    seen = observe(images(root="Sqrt"), ["a"], samples, histogram=False, execution=Execution(strict=False))
    assert seen.broken["a"] == Place(1, "bad")


@histograms
def test_negative_zero_is_zero(histogram: bool) -> None:
    seen = observe(model(), ["x"], source([np.full((1, 1, 3), -0.0, np.float32)]), histogram=histogram)
    assert [str(seen.ranges["x"].lo), str(seen.ranges["x"].hi)] == ["0.0", "0.0"]


@histograms
@pytest.mark.parametrize("value", [np.inf, -np.inf], ids=str)
def test_infinity_names_tensor_and_sample(histogram: bool, value: float) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) { r = Reciprocal(x) y = Relu(r) }'
    zero = np.copysign(np.float32(0), np.float32(value))
    samples = [Sample({"x": np.array(x, np.float32)}, None, f"sample {i}") for i, x in enumerate([[1, 2], [2, zero]])]
    if value < 0:  # the output is finite
        seen = observe(binary(text), ["r", "y"], samples, histogram=histogram)
        assert seen.broken == {"r": Place(1, "sample 1")}
        assert set(seen.ranges) == set(seen.runs) == {"y"}
        return
    with pytest.raises(DataError, match=r"^sample 1: output 'y' holds NaN or infinity; made by the Reciprocal"):
        observe(binary(text), ["r"], samples, histogram=histogram)


@histograms
@pytest.mark.parametrize("position", range(20))
def test_nan_is_found_wherever_it_is(histogram: bool, position: int) -> None:
    # The runtime's ReduceMin and ReduceMax step over NaN.
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) { r = Sqrt(x) y = Neg(r) }'
    x = np.ones(20, np.float32)
    x[position] = -1
    with pytest.raises(DataError, match=r"^here: output 'y' holds NaN or infinity; made by the Sqrt"):
        observe(binary(text), ["r"], [Sample({"x": x}, None, "here")], histogram=histogram)


@pytest.mark.parametrize("kind", ["float", "float16"])
def test_finite_values_whose_sum_overflows_are_fine(kind: str) -> None:
    top = np.finfo(DTYPES[kind]).max
    x = np.full((1, 1, 4), top / 4, DTYPES[kind]) * DTYPES[kind]([1, 1, 2, 1])
    x[0, 0, 0] = -1
    arrays = [
        *data((1, 9, 4), dtype=DTYPES[kind]),
        np.broadcast_to(x, (64, 9, 4)).copy(),
        *data((1, 9, 4), dtype=DTYPES[kind]),
    ]
    bytes_ = model(kind)
    names = ["a", "x", "b"]
    seen = observe(
        bytes_,
        names,
        source(arrays, bytes_),
        histogram=False,
        channel_axis={"w": 0},
    )
    assert seen.channels["w"].count == len(arrays)
    for name in names:
        assert seen.ranges[name] == MinMax.of(np.concatenate([expected(array)[name] for array in arrays])), name


@histograms
def test_refused_tensors(histogram: bool) -> None:
    with pytest.raises(UnknownNameError, match=r"no tensor named 'bb'; did you mean 'b'"):
        observe(model(), ["a", "bb"], source(data((1, 1, 1))), histogram=histogram)
    with pytest.raises(RequantError, match=r"tensor 'i' is a tensor\(int64\); only float"):
        observe(model(), ["i"], source(data((1, 1, 1))), histogram=histogram)


@histograms
@pytest.mark.parametrize("samples", [[], open_source([], ())], ids=["list", "source"])
def test_no_samples_are_refused(histogram: bool, samples: Any) -> None:
    with pytest.raises(DataError, match="no samples"):
        observe(model(), ["a"], samples, histogram=histogram)


@histograms
def test_failing_runs_name_the_sample(histogram: bool) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N, M] x) => (float[K, L] y) { y = MatMul(x, x) }'
    samples = [Sample({"x": np.ones(shape, np.float32)}, None, str(shape)) for shape in [(2, 2), (2, 3)]]
    with pytest.raises(RequantError, match=r"^\(2, 3\): the model fails: .*MatMul") as caught:
        observe(binary(text), ["y"], samples, histogram=histogram)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "problem"),
    [(b"no model", "^the model: not"), (Path("none.onnx"), "^none.onnx: no such file$")],
    ids=["bytes", "missing"],
)
def test_models_that_cannot_be_read(given: Any, problem: str) -> None:
    with pytest.raises(RequantError, match=problem):
        observe(given, ["a"], [], histogram=False)


@histograms
def test_channel_means(histogram: bool) -> None:
    arrays = data((1, 3, 5), (2, 3, 4))
    seen = observe(model(), ["a"], source(arrays), histogram=histogram, channel_axis={"a": 1, "y": -2, "x": 1})
    assert set(seen.ranges) == {"a"}
    statistic: type[Statistic] = Histogram if histogram else MinMax
    assert seen.ranges["a"] == statistic.of(np.concatenate([expected(array)["a"].ravel() for array in arrays]))
    for name in ("a", "y", "x"):
        first, second = (Channels.of(expected(array)[name], 1) for array in arrays)
        merged, found = first | second, seen.channels[name]
        assert (found.lo.tolist(), found.hi.tolist(), found.count) == (
            merged.lo.tolist(),
            merged.hi.tolist(),
            merged.count,
        )
        # sums of n values in float32 in the graph
        magnitude = sum(np.abs(expected(array)[name]).sum(axis=(0, 2), dtype=np.float64) for array in arrays)
        assert (np.abs(found.total.value - merged.total.value) <= 8 * np.finfo(np.float32).eps * magnitude).all()
    with pytest.raises(RequantError, match="tensor 'a' has 2 channels in one run and 7 in another"):
        observe(model(), [], source(data((1, 2, 5), (1, 7, 5))), histogram=histogram, channel_axis={"a": 1})
    with pytest.raises(RequantError, match=r"tensor 'a' has no axis 3"):
        observe(model(), [], source(arrays), histogram=histogram, channel_axis={"a": 3})


@histograms
def test_progress_tells_how_much_is_done(histogram: bool) -> None:
    arrays = data(*VARYING)
    steps: list[tuple[int, int | None]] = []
    observe(
        model(),
        ["a", "y"],
        source(arrays),
        histogram=histogram,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert [total for _, total in steps] == [4] * len(steps)
    assert sorted(done for done, _ in steps) == [done for done, _ in steps]
    assert steps[-1] == (4, 4)


@histograms
def test_memory_holds_a_few_samples_whatever_their_number(histogram: bool) -> None:
    alive: set[int] = set()
    most = 0

    def samples() -> Iterator[dict[str, Array]]:
        nonlocal most
        for index in range(60):
            array = np.full((1, 2, 3), index, np.float32)
            alive.add(index)
            weakref.finalize(array, alive.discard, index)
            most = max(most, len(alive))
            yield {"x": array}

    specs = input_specs(open_session(model()))
    one = Execution(workers=1)
    seen = observe(model(), TENSORS, open_source(samples, specs), histogram=histogram, execution=one)
    assert seen.samples == 60
    assert most <= 3 * PIECE  # the piece at work, the next one, and the one that is read


# ---------------------------------------------------------------------------------------------------- logging

LOGGING = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N] x) => (float[N] y) {
    y = Neg(x)
    hi = ReduceMax <keepdims = 1> (x)
    lo = ReduceMin <keepdims = 1> (x)
    range = Concat <axis = 0> (lo, hi)
    all = Identity(x)
}"""
RANGE, ALL = ";conv/relu__print__;__requant_min_max:", ";all__print__;values:"


def logging_model(**metadata: object) -> bytes:
    made = ir.from_onnx_text(LOGGING)
    values = {value.name: value for node in made.graph for value in node.outputs}
    for old, new in (("range", RANGE), ("all", ALL)):
        values[old].name = new
        made.graph.outputs.append(values[old])
    made.metadata_props.update({f"requant.{key}": json.dumps(value) for key, value in metadata.items()})
    return binary(made)


def test_a_log_has_no_control_characters() -> None:
    model = logging_model().replace(b";all__print__", b";a\x1bl__print__")
    with pytest.raises(RequantError, match=r"cannot contain the name of output ';a\\x1bl__print__;values:'"):
        log(model, [0, 1])


def log(model: bytes, *arrays: Any) -> list[str]:
    lines: list[str] = []
    samples = [Sample({"x": np.array(array, np.float32)}, None, "here") for array in arrays]
    assert run_logged(model, samples, lines.append) == len(lines)
    return lines


def test_log_has_a_line_per_output_and_sample() -> None:
    assert log(logging_model(), [-20.887871, 1e-7], [1, 0.5, 3]) == [
        f"{RANGE}[-20.88787][1e-07]\n",
        f"{ALL}[-20.88787][1e-07]\n",
        f"{RANGE}[0.5][3.0]\n",
        f"{ALL}[1.0][0.5][3.0]\n",
    ]


def test_logged_values_read_back_as_the_same_float32() -> None:
    rng = np.random.default_rng(5)
    values = rng.integers(0, 2**32, 2_000, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    (line,) = [line for line in log(logging_model(), values) if line.startswith(ALL)]
    read = [float(part) for part in line.removeprefix(ALL).strip()[1:-1].split("][")]
    assert np.array(read, np.float32).tolist() == values.tolist()
    assert max(map(len, line.split("]["))) <= len("[-1.23456789e-38]") + len(ALL)  # float32's digits, not float64's


def test_log_limits() -> None:
    model = logging_model(log_first_n={RANGE: 1, ALL: -1}, log_summarize={ALL: 2})
    assert log(model, [1, 2, 3], [4, 5, 6]) == [f"{RANGE}[1.0][3.0]\n", f"{ALL}[1.0][2.0]\n", f"{ALL}[4.0][5.0]\n"]


def test_outputs_that_the_metadata_lists_are_logged() -> None:
    made = ir.from_onnx_text('<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) { y = Neg(x) }')
    made.metadata_props["requant.log_first_n"] = '{"y": -1}'
    assert log(binary(made), [1, 2]) == ["y[-1.0][-2.0]\n"]


def test_log_refusals() -> None:
    with pytest.raises(RequantError, match=r"^the model: has no logged outputs; apply the transform insert_logging"):
        run_logged(model(), [], print)
    with pytest.raises(DataError, match="no samples"):
        run_logged(logging_model(), [], print)
    with pytest.raises(RequantError, match=r"'requant.log_first_n' must be a JSON object of numbers, not '3'"):
        log(logging_model(log_first_n=3), [1])
