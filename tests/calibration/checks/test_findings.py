"""Sanity checks: each finding fires on a planted case, names what it is about, and is silent on right data."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from requant.calibration import DataError, Observations, Sample, input_specs, observe, open_session, open_source
from requant.calibration.checks.findings import ENOUGH, Finding, explain_broken, findings, growth, growth_curve, probe
from requant.calibration.checks.first_layers import first_layers
from requant.calibration.checks.normalisation import Probe
from requant.calibration.model.session import Array
from requant.calibration.runs import broken
from requant.calibration.runs.broken import UNNAMED, first_broken
from requant.calibration.statistics.extremes import MinMax
from requant.calibration.statistics.observations import Place
from requant.calibration.statistics.sums import Channels, Runs

MODELS = Path(__file__).parents[3] / "sample_models"
HEAD = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> g '


def binary(text: str) -> bytes:
    return bytes(ir.to_proto(ir.from_onnx_text(HEAD + text)).SerializeToString())


def sample(**feed: Any) -> Sample:
    return Sample({name: _float32(value) for name, value in feed.items()}, None, "here")


def _float32(value: Any) -> Array:
    array = np.asarray(value)
    return array if array.dtype == np.bool_ else array.astype(np.float32)


# ------------------------------------------------------------------------------------------- the first node

IF = """(float[N] x, bool c) => (float[M] y) {{
    a = {before} (x)
    [branch] y = If (c) <
        then_branch = yes () => (float[M] t) {{ q = Neg (a) [inner] t = {inside} (q) }},
        else_branch = no () => (float[M] e) {{ e = Identity (x) }}>
}}"""
LOOP = """(float[N] x) => (float[N] y) <int64 n = {9}> {
    [loop] y = Loop (n, , x) <body = body (int64 i, bool c, float[N] s) => (bool d, float[N] t) {
        d = Identity (c) t = Mul (s, s) }>
}"""
BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "a node": (
        "(float[N] x) => (float[N] y) { a = Neg (x) [log] b = Log (a) c = Relu (b) y = Add (c, a) }",
        {"x": [1, 2, -3]},
        "made by Log 'log' from finite 'a' (-2 to 3)",
    ),
    "a node without a name": (
        "(float[N] x) => (float[N] y) { a = Sqrt (x) y = Neg (a) }",
        {"x": [-4, -4]},
        "made by the Sqrt that computes 'a' from finite 'x' (all -4)",
    ),
    "a constant operand": (
        "(float[N] x) => (float[N] y) <float[1] w = {0}> { [div] y = Div (x, w) }",
        {"x": [1, 2]},
        "made by Div 'div' from finite 'x' (1 to 2), 'w' (all 0)",
    ),
    "NaN of infinity": (
        "(float[N] x) => (float[N] y) { [e] a = Exp (x) b = Neg (a) c = Relu (b) [s] d = Sub (a, a) y = Mul (d, c) }",
        {"x": [1, 200]},
        "infinity made by Exp 'e' from finite 'x' (1 to 200) becomes NaN in Sub 's'",
    ),
    "a mask that Softmax takes back": (
        """(float[N] x) => (float[N] y) {
            m = Constant <value = float[2] {-inf, 0.0}> () a = Add (x, m) s = Softmax (a) [l] y = Log (s) }""",
        {"x": [1, 2]},
        "made by Log 'l' from finite 's' (0 to 1)",
    ),
    "a mask of everything": (
        "(float[N] x) => (float[N] y) { m = Constant <value = float[2] {-inf, -inf}> () a = Add (x, m) [s] y = Softmax (a) }",
        {"x": [1, 2]},
        "the constant 'm' holds infinity, which becomes NaN in Softmax 's'",
    ),
    "an initializer": (
        "(float[N] x) => (float[N] y) <float[2] w = {inf, 1}> { y = Mul (x, w) }",
        {"x": [1, 2]},
        "the initializer 'w' holds infinity",
    ),
    "two chains": (
        "(float[N] x) => (float[N] y) { [e] a = Exp (x) b = Neg (x) [l] c = Log (b) y = Add (a, c) }",
        {"x": [200, 200]},
        "made by Log 'l' from finite 'b' (all -200)",
    ),
    "two nodes": (
        "(float[N] x) => (float[N] y) { [first] a = Log (x) [second] b = Sqrt (x) y = Add (a, b) }",
        {"x": [-1]},
        "made by Log 'first' from finite 'x' (all -1)",
    ),
    "two nodes, read the other way round": (
        "(float[N] x) => (float[N] y) { [first] a = Log (x) [second] b = Sqrt (x) y = Add (b, a) }",
        {"x": [-1]},
        "made by Log 'first' from finite 'x' (all -1)",
    ),
    "a tensor without values": (
        """(float[N] x) => (float[M] y) <float zero = {0}> {
            some = Greater (x, zero) e = Compress (x, some) [log] l = Log (x) y = Concat <axis = 0> (e, l) }""",
        {"x": [-1, -2]},
        "made by Log 'log' from finite 'x' (-2 to -1)",
    ),
    "an operator of another domain": (
        "(float[N] x) => (float[N] y) { g = com.microsoft.Gelu (x) [l] y = Log (g) }",
        {"x": [-1]},
        "made by Log 'l' from finite 'g' (all -0.1587)",
    ),
    "integers in between": (
        "(float[N] x) => (float[N] y) { i = Cast <to = 7> (x) f = Cast <to = 1> (i) [r] y = Reciprocal (f) }",
        {"x": [0.5, 3]},
        "made by Reciprocal 'r' from finite 'f' (0 to 3)",
    ),
    "in a branch": (
        IF.format(before="Identity", inside="Log"),
        {"x": [1, 2], "c": np.array(True)},
        "made by Log 'inner' from finite 'q' (-2 to -1) in a body of If 'branch'",
    ),
    "before a branch": (
        IF.format(before="Log", inside="Exp"),
        {"x": [-1, 2], "c": np.array(True)},
        "made by the Log that computes 'a' from finite 'x' (-1 to 2)",
    ),
    "far behind": (
        "(float[N] x) => (float[N] y) { [e] a0 = Exp (x) "
        + " ".join(f"a{i + 1} = Relu (a{i})" for i in range(9))
        + " [s] b = Sub (a9, a9) c = Neg (b) y = Relu (c) }",
        {"x": [1, 200]},
        "infinity made by Exp 'e' from finite 'x' (1 to 200) becomes NaN in Sub 's'",
    ),
    "fed back in a loop": (LOOP, {"x": [1, 1e15]}, "made by Loop 'loop' from finite 'x' (1 to 1e+15)"),
}


@pytest.mark.parametrize("together", [broken.TOGETHER, 8, 1])
@pytest.mark.parametrize("case", BROKEN)
def test_the_first_node_that_is_not_finite(case: str, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken, "TOGETHER", together)  # values that one run returns; 1: one tensor in each run
    text, feed, expected = BROKEN[case]
    assert first_broken(binary(text), sample(**feed)) == expected


@pytest.mark.parametrize("opset", [11, 13, 18, 21])
def test_the_first_node_in_any_opset(opset: int) -> None:
    text = "(float[N] x) => (float[N] y) { [log] a = Log (x) y = Relu (a) }"
    model = binary(text).replace(b"\x10\x11", bytes([0x10, opset]))
    assert first_broken(model, sample(x=[-1])).startswith("made by Log 'log'")


@pytest.mark.parametrize("run", [1, 4, 16, 64])  # of one sign; which of them make NaN depends on the kernel
def test_sums_that_overflow_are_not_taken_for_nan(run: int) -> None:
    huge = np.where(np.arange(128) // run % 2, -3e38, 3e38)
    text = "(float[N] x) => (float[N] y) { [neg] a = Neg (x) [log] y = Log (a) }"
    assert first_broken(binary(text), sample(x=huge)) == "made by Log 'log' from finite 'a' (-3e+38 to 3e+38)"


def test_nothing_is_named_where_nothing_is_found() -> None:
    finite = binary("(float[N] x) => (float[N] y) { y = Neg (x) }")
    assert first_broken(finite, sample(x=[1])) == UNNAMED
    assert first_broken(finite, sample(x=[[1]])) == UNNAMED  # the model cannot even be run
    assert first_broken(b"no model", sample(x=[1])) == UNNAMED


def test_an_output_that_is_not_finite_is_an_error_with_the_node() -> None:
    text, _, _ = BROKEN["a node"]
    data = [sample(x=[-1]), Sample({"x": _float32([5])}, None, "data.npz, sample 1")]
    expected = "data.npz, sample 1: output 'y' holds NaN or infinity; made by Log 'log' from finite 'a' (all -5)"
    with pytest.raises(DataError, match=re.escape(expected)):
        observe(binary(text), ["a"], data, histogram=False)


def test_inner_tensors_that_are_not_finite_are_explained() -> None:
    model = binary("""(float[N] x) => (float[N] y) {
        [log] a = Log (x) b = Neg (a) n = IsNaN (b) f = Cast <to = 1> (n) y = Add (f, x) }""")
    source = open_source([{"x": _float32(x)} for x in ([1], [2], [-3], [-4])], input_specs(open_session(model)))
    seen = observe(model, ["a", "b", "f"], source, histogram=False)
    causes = explain_broken(model, source, seen)
    (told,) = (finding for finding in findings(seen, causes=causes) if finding.kind == "broken")
    where = next(iter(seen.broken.values())).where
    cause = "made by Log 'log' from finite 'x' (all -3)"
    assert told.message == f"'a', 'b' hold NaN or infinity at {where}, {cause}; they have no ranges"
    assert "2" in where


# ------------------------------------------------------------------------------------------- right data


@pytest.fixture(scope="module")
def images() -> Array:
    with np.load(MODELS / "digits.npz") as file:
        return np.asarray(file["calib/image"])


def probed(model: Path | bytes, images: Array, name: str = "image") -> Probe:
    return probe(model, [Sample({name: image[None]}, None, f"sample {i}") for i, image in enumerate(images)])


@pytest.mark.parametrize(
    "name", ["digits", "digits_mobile", pytest.param("digits_transformer", marks=pytest.mark.slow)]
)
def test_right_data_are_not_remarked_upon(name: str) -> None:
    path = MODELS / f"{name}.onnx"
    source = open_source(f"{MODELS / 'digits.npz'}:calib", input_specs(open_session(path)))
    tensors = [value.name or "" for node in ir.load(path).graph for value in node.outputs]
    seen = observe(path, ["image", *tensors], source, histogram=False)
    assert findings(seen, probed=probe(path, source), inputs=["image"]) == ()


# ------------------------------------------------------------------------------------------- normalisation

WRONG: dict[str, Callable[[Array], Array]] = {
    "0..255": lambda image: image * 255,
    "-1..1": lambda image: image * 2 - 1,
    "standardized": lambda image: (image - 0.1307) / 0.3081,
    "divided by 255 twice": lambda image: image / 255,
    "all zero": np.zeros_like,
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["digits", "digits_mobile"])
def test_data_that_contradict_a_batch_normalization(name: str, wrong: str, images: Array) -> None:
    given = WRONG[wrong](images[:16])
    (finding,) = findings(Observations(), probed=probed(MODELS / f"{name}.onnx", given))
    assert (finding.kind, finding.name, finding.severity) == ("normalisation", "image", "warning")
    assert f"'image' has a mean of {given.mean(dtype=np.float64):.3g} " in finding.message


def test_what_the_data_should_be_follows_from_the_batch_normalization(images: Array) -> None:
    (deviation,) = probed(MODELS / "digits.onnx", images[:16] * 255).deviations
    # that of the training images, which are moved about more than these are
    assert deviation.recorded == pytest.approx([images.mean()], abs=0.05)
    assert deviation.deviation / deviation.scale == pytest.approx(images.std(), abs=0.05)


def test_expected_statistics_are_those_of_the_first_batch_normalization() -> None:
    found = first_layers(ir.load(MODELS / "digits.onnx").graph).norms
    assert list(found) == ["conv1_out"]
    weights = {value.name: value.const_value for value in ir.load(MODELS / "digits.onnx").graph.initializers.values()}
    node = next(node for node in ir.load(MODELS / "digits.onnx").graph if node.name == "bn1")
    for values, index, epsilon in ((found["conv1_out"].mean, 3, 0.0), (found["conv1_out"].variance, 4, 1e-5)):
        tensor = weights[node.inputs[index].name]  # type: ignore[union-attr]
        assert tensor is not None
        assert np.array_equal(values, tensor.numpy().astype(np.float64) + np.float64(np.float32(epsilon)))


@pytest.mark.parametrize(
    "other",
    [
        lambda image: image[:, :, ::-1],
        lambda image: image[..., ::-1],
        lambda image: (image + np.roll(image, 1, 2) + np.roll(image, 1, 3) + np.roll(image, -1, 2)) / 4,
        lambda image: (image > 0.5).astype(np.float32),
    ],
    ids=["upside down", "mirrored", "blurred", "black and white"],
)
def test_other_pictures_of_the_same_scale_are_no_contradiction(other: Callable[[Array], Array], images: Array) -> None:
    assert findings(Observations(), probed=probed(MODELS / "digits.onnx", other(images[:16]))) == ()


NORM = """(float[N, 4] x) => (float[N, 4] y) <float[4] g = {1, 1, 1, 1}, float[4] b = {0, 0, 0, 0},
    float[4] m = {0, 0, 0, 0}, float[4] v = {1, 1, 1, 1}> { [norm] y = BatchNormalization (x, g, b, m, v) }"""


@pytest.mark.parametrize("factor", [0.01, 100])
def test_all_channels_must_be_off(factor: float) -> None:
    right = np.random.default_rng(3).standard_normal((16, 500, 4)).astype(np.float32)
    samples = [Sample({"x": array}, None, "") for array in right]
    assert findings(Observations(), probed=probe(binary(NORM), samples)) == ()
    for off, kinds in (([0, 1], []), ([0, 1, 2, 3], [("normalisation", "norm")])):
        wrong = right.copy()
        wrong[..., off] *= factor
        samples = [Sample({"x": array}, None, "") for array in wrong]
        seen = probe(binary(NORM), samples)
        told = findings(Observations(), probed=seen)
        assert [(finding.kind, finding.name) for finding in told] == kinds
    (deviation,) = seen.deviations
    # The deviation of 8000 normal values is off by 1 / sqrt(2 * 8000), once in a thousand times by 4 times that.
    assert abs(deviation.scale / factor - 1) < 4 / 16_000**0.5


def test_copies_of_one_sample_are_not_taken_for_many(images: Array) -> None:
    (deviation,) = probed(MODELS / "digits.onnx", np.repeat(images[:2], 8, axis=0)).deviations
    assert deviation.samples == 2


def test_pixels_into_a_model_with_a_bias_of_normalised_data(images: Array) -> None:
    assert probed(MODELS / "digits_transformer.onnx", images).deviations == ()
    (finding,) = findings(Observations(), probed=probed(MODELS / "digits_transformer.onnx", images * 255))
    assert (finding.kind, finding.name, finding.severity) == ("normalisation", "patches", "note")
    assert finding.message.startswith("'patches' reads data in 0..255, and the standard deviation after it is ")
    assert findings(Observations(), probed=probed(MODELS / "digits_transformer.onnx", images * 1000)) == ()  # no pixels


def test_a_bias_of_pixels_and_normalised_data() -> None:
    model = binary(
        "(float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {1,2,3,4,5,6}, float[2] b = {-300, 200}> { y = Gemm (x, w, b) }"
    )
    data = np.random.default_rng(3).random((4, 3)).astype(np.float32)
    (finding,) = findings(Observations(), probed=probed(model, data, "x"))
    assert "check whether the model needs data in 0..255" in finding.message
    assert findings(Observations(), probed=probed(model, data * 255, "x")) == ()


@pytest.mark.parametrize("gate", ["Sigmoid", "Tanh", "HardSigmoid"])
def test_gates_that_saturate(gate: str) -> None:
    model = binary(f"""(float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {{1, -1, 1, -1}}> {{
        a = MatMul (x, w) [gate] g = {gate} (a) y = MatMul (g, w) }}""")
    data = np.random.default_rng(3).random((4, 2)).astype(np.float32)
    assert findings(Observations(), probed=probed(model, data, "x")) == ()
    (finding,) = findings(Observations(), probed=probed(model, data * 255, "x"))
    assert (finding.kind, finding.name, finding.severity) == ("normalisation", "gate", "warning")
    assert finding.message.startswith(
        "gate 'gate' and most other first gates are saturated ('gate' in 100% of its values)"
    )


def picture(seed: int) -> Array:
    """A smooth picture (32, 48, 3): random waves, whose colours are alike."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:32, :48] / 48
    waves = [np.sin(2 * np.pi * (f * rows + g * columns) + p) for f, g, p in rng.uniform(-1.5, 1.5, (6, 3))]
    grey = np.sum(waves, axis=0)
    return np.asarray(np.stack([grey + rng.normal(0, 0.5) + 0.3 * wave for wave in waves[:3]], -1), np.float32)


LAYOUTS = {
    "NCHW": "(float[N, 3, 32, 48] x) => (float[N, 3, 32, 48] y)",
    "NHWC": "(float[N, 32, 48, 3] x) => (float[N, 32, 48, 3] y)",
}


@pytest.mark.parametrize("axes", LAYOUTS)
@pytest.mark.parametrize("reshaped", [False, True], ids=["right", "reshaped"])
def test_pictures_in_the_other_layout(axes: str, reshaped: bool) -> None:
    pixels = np.stack([picture(seed) for seed in range(4)])
    planes = pixels.transpose(0, 3, 1, 2)
    right, other = (planes, pixels) if axes == "NCHW" else (pixels, planes)
    given = np.ascontiguousarray(other).reshape(right.shape) if reshaped else np.ascontiguousarray(right)
    found = findings(Observations(), probed=probed(binary(LAYOUTS[axes] + " { y = Neg (x) }"), given, "x"))
    assert [(finding.kind, finding.name, finding.severity) for finding in found] == (
        [("layout", "x", "warning")] if reshaped else []
    )


def test_noise_has_no_layout() -> None:
    noise = np.random.default_rng(3).standard_normal((4, 3, 32, 48)).astype(np.float32)
    assert findings(Observations(), probed=probed(binary(LAYOUTS["NCHW"] + " { y = Neg (x) }"), noise, "x")) == ()


def test_noise_that_resembles_itself_a_little_has_no_layout() -> None:
    noise = np.random.default_rng(3).standard_normal((4, 1, 32 * 3 * 48)).astype(np.float32)
    noise = noise + 1.5 * np.roll(noise, 3 * 48, axis=-1)  # correlated by 1.5 / (1 + 1.5**2) with itself
    given = noise.reshape(4, 3, 32, 48)
    assert findings(Observations(), probed=probed(binary(LAYOUTS["NCHW"] + " { y = Neg (x) }"), given, "x")) == ()


# ------------------------------------------------------------------------------------------- the statistics


def seen_of(ranges: dict[str, tuple[float, float]], samples: int = 64, count: int = 640) -> Observations:
    return Observations(ranges={name: MinMax(lo, hi, count) for name, (lo, hi) in ranges.items()}, samples=samples)


def test_constant_tensors() -> None:
    seen = seen_of({"x": (0, 0), "mask": (1, 1), "dead": (0, 0), "a": (2, 2), "b": (3, 3), "y": (0, 1)})
    told = findings(seen, inputs=["x", "mask", "y"])
    assert [(finding.kind, finding.name, finding.severity) for finding in told] == [
        ("constant", "mask", "warning"),
        ("constant", "x", "warning"),
        ("constant", "dead", "note"),
        ("constant", "a", "note"),
    ]
    assert told[0].message.startswith("input 'mask' is 1 in all samples;")
    assert told[1].message.startswith("input 'x' is 0 in all samples; that is right for a first state only")
    assert told[2].message.startswith("zero in all samples: 'dead';")
    assert told[3].message.startswith("constant in all samples: 'a', 'b';")


def test_constant_inputs_of_one_value_are_one_line() -> None:
    caches = {f"cache{i}": (0.0, 0.0) for i in range(4)}
    told = findings(seen_of({**caches, "mask": (1, 1), "past": (1, 1)}), inputs=[*caches, "mask", "past"])
    assert [finding.message.partition(" in all")[0] for finding in told] == [
        "inputs 'cache0', 'cache1', 'cache2' and 1 more are 0",
        "inputs 'mask', 'past' are 1",
    ]


def test_many_constant_tensors_are_one_line() -> None:
    (told,) = findings(seen_of({f"t{i}": (0, 0) for i in range(9)}))
    assert "'t0', 't1', 't2' and 6 more;" in told.message


def test_a_scalar_that_stays_the_same_is_no_matter() -> None:
    assert findings(seen_of({"scale": (3, 3)}, count=64)) == ()


def test_dead_channels() -> None:
    values = np.random.default_rng(3).standard_normal((64, 4, 5)).astype(np.float32)
    values[:, 1:3] = 0
    channels = {name: Channels.of(values, 1) for name in "abcd"} | {"live": Channels.of(values[:, ::3], 1)}
    (told,) = findings(Observations(channels=channels, samples=64))
    assert told.severity == "note"
    expected = "channels that are constant in all samples: 2 of 4 of 'a', 2 of 4 of 'b', 2 of 4 of 'c', and 2 channels of 1 more tensor"
    assert told.message == expected


def grown(widths: Sequence[Sequence[float]]) -> Observations:
    """Tensors whose ranges have these widths after 1, 2, ... samples."""
    runs = {}
    for index, row in enumerate(widths):
        runs[f"t{index}"] = Runs.of(range(len(row)), np.array([[0, width] for width in row], np.float64))
    return Observations({name: MinMax(0, 1, 999) for name in runs}, runs, samples=len(widths[0]))


def test_ranges_that_still_grow() -> None:
    growing, still = [n**0.5 for n in range(1, 101)], [1.0] * 100
    seen = grown([growing, still])
    (told,) = findings(seen)
    assert (told.kind, told.name, told.severity) == ("growing", "", "warning")
    # a doubling takes 1 - sqrt(1 / 2) of the one, and nothing of the other
    assert "by 15% on average" in told.message
    assert "(1: 0.55, 3: 0.59, 7: 0.63, 15: 0.69, 31: 0.78, 63: 0.90, 100: 1.00 of the final width" in told.message
    assert told.curve == growth_curve(seen) == tuple((n, (n**0.5 / 10 + 1) / 2) for n in (1, 3, 7, 15, 31, 63, 100))
    assert findings(grown([growing, still, still])) == ()
    assert findings(grown([[0.8] * 70 + [1.0] * 30])) == ()  # one sample is wider than all others
    assert told.message.endswith("mean over 2 tensors); add samples, or choose a rule that clips")
    (alone,) = growth(seen.without({"t1"}), held=16)
    kept = "16 of the given samples judge the model and give no ranges"
    assert alone.message.endswith(f"mean over 1 tensor); add samples ({kept}), or choose a rule that clips")


@pytest.mark.parametrize("samples", [64, 65, 100, 127, 128])
@pytest.mark.parametrize("tail", ["normal", "exponential", "cauchy"])
def test_ranges_of_independent_values_grow_only_with_heavy_tails(tail: str, samples: int) -> None:
    # An exponential tensor's growth per doubling has a mean of 0.06 and a deviation of 0.08: that of 100, 0.008.
    rng = np.random.default_rng(samples)
    runs = {}
    for index in range(100):
        values = getattr(rng, f"standard_{tail}")((samples, 1000))
        runs[f"t{index}"] = Runs.of(range(samples), np.stack([values.min(-1), values.max(-1)], -1))
    told = findings(Observations({name: MinMax(0, 1, 999) for name in runs}, runs, samples=samples))
    assert [finding.kind for finding in told] == (["growing"] if tail == "cauchy" else [])


@pytest.mark.parametrize(("samples", "few"), [(1, True), (ENOUGH - 1, True), (ENOUGH, False)])
def test_too_few_samples(samples: int, few: bool) -> None:
    told = findings(grown([[1.0] * samples]))
    assert [(finding.kind, finding.severity) for finding in told] == ([("few", "note")] if few else [])


def test_copies() -> None:
    repeated = {f"d{i}": (Place(i, f"data.npz, sample {i}"), 3 if i in (4, 7, 9) else 1) for i in range(50)}
    (told,) = findings(Observations(repeated=repeated, samples=56))
    assert (told.kind, told.severity) == ("duplicates", "warning")
    named = "data.npz, sample 4 (3 times) and data.npz, sample 7 (3 times)"
    assert told.message == f"6 of 56 samples are copies of others: {named}; remove them, because they only take time"
    (told,) = findings(
        Observations(repeated=repeated | {f"e{i}": (Place(i, ""), 1) for i in range(50, 99)}, samples=200)
    )
    assert told.severity == "note"
    assert told.message.startswith("6 of the first 105 samples are copies")


def test_copies_are_found_in_a_run() -> None:
    model = binary("(float[N] x) => (float[N] y) { y = Neg (x) }")
    source = open_source([{"x": _float32([i % 5, 1])} for i in range(ENOUGH)], input_specs(open_session(model)))
    (told,) = findings(observe(model, ["y"], source, histogram=False))
    assert told.message.startswith(f"{ENOUGH - 5} of {ENOUGH} samples are copies")


def test_findings_are_json() -> None:
    bare = Finding("few", "", "only 3 samples", "note")
    assert bare.to_json() == {"kind": "few", "name": "", "severity": "note", "message": "only 3 samples"}
    curved = Finding("growing", "", "", "warning", ((1, 0.5), (3, 1.0))).to_json()
    assert json.loads(json.dumps(curved))["curve"] == [[1, 0.5], [3, 1.0]]


def test_findings_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from requant.quantize.console.quantized import bar, print_findings

    told = (
        Finding("growing", "", "the ranges still grow", "warning", ((1, 0.25), (3, 1.0))),
        Finding("constant", "a[0]", "constant: 'a[0]'", "note"),
    )
    print_findings(told)
    out, err = capsys.readouterr()
    lines = [line.split() for line in err.splitlines()]
    assert out == ""
    assert lines[0] == "warning: the ranges still grow".split()
    assert lines[2:4] == [["1", "0.25", "█" * 8], ["3", "1.00", "█" * 32]]
    assert lines[4] == ["note:", "constant:", "'a[0]'"]
    assert [bar(share, 2) for share in (0, 1 / 16, 0.5, 9 / 16, 2)] == ["", "▏", "█", "█▏", "██"]


# ------------------------------------------------------------------------------------------- real models

KIT = Path(__file__).parents[4] / "shared" / "realkit"
REASON = "" if (KIT / "realkit.py").is_file() else "no kit of real models in ../shared/realkit"
if not REASON and importlib.util.find_spec("PIL") is None:
    REASON = "the kit of real models needs Pillow"

IMAGENET = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], np.float32).reshape(2, 1, 3, 1, 1)
PICTURES: dict[str, Callable[[Array], Array]] = {
    "mbv1_075": lambda fed: (fed + 1) / 2,
    "cifar_resnet20": lambda fed: fed * IMAGENET[1] + IMAGENET[0],
}
"""How the feeds of tasks become pictures in 0..1 again, (N, 3, H, W)."""
MISTAKES: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "0..1": ("normalisation", lambda image: image),
    "0..255": ("normalisation", lambda image: image * 255),
    "-128..127": ("normalisation", lambda image: image * 255 - 128),
    "divided by 255 twice": ("normalisation", lambda image: image / 255),
    "std without mean": ("normalisation", lambda image: image / IMAGENET[1]),
    "reshaped pixels": (
        "layout",
        lambda image: np.ascontiguousarray((image * 2 - 1).transpose(0, 2, 3, 1)).reshape(image.shape),
    ),
}


def calibration_feeds(task: str, number: int) -> tuple[Path, list[dict[str, Array]]]:
    """Return a model of the kit and feeds for it."""
    realkit: Any = importlib.import_module("realkit")
    return realkit.TASKS[task].model, realkit.TASKS[task].calib(number)


@pytest.mark.skipif(bool(REASON), reason=REASON)
@pytest.mark.slow
class TestRealModels:
    @pytest.fixture(autouse=True)
    def _kit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(KIT)

    @pytest.mark.parametrize(
        "task",
        [
            "mbv1_075",
            "cifar_resnet20",
            "yolox_nano",
            "kwt1",
            "silero_vad",
            "ultraface_rfb_320",
            "road_segmentation_adas",
            "superres",
            "mnist_cntk",
            "stories260k",
        ],
    )
    def test_right_data_contradict_nothing(self, task: str) -> None:
        model, feeds = calibration_feeds(task, 16)
        assert findings(Observations(), probed=probe(model, [Sample(feed, None, "") for feed in feeds])) == ()

    @pytest.mark.parametrize("mistake", MISTAKES)
    @pytest.mark.parametrize("task", PICTURES)
    def test_wrong_data_are_told(self, task: str, mistake: str) -> None:
        model, feeds = calibration_feeds(task, 16)
        kind, wrong = MISTAKES[mistake]
        fed = (wrong(PICTURES[task](feed["input"])) for feed in feeds)
        samples = [Sample({"input": array.astype(np.float32)}, None, "") for array in fed]
        told = findings(Observations(), probed=probe(model, samples))
        assert [(finding.kind, finding.name, finding.severity) for finding in told] == [(kind, "input", "warning")]
