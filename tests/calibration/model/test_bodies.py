"""Tensors in bodies of If, Loop and Scan: their extremes equal NumPy's, over whatever was computed and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from requant import RequantError, UnknownNameError
from requant.calibration import DataError, Histogram, MinMax, Sample, observe, parse_rule
from requant.calibration.model.session import Array

KINDS: dict[str, Any] = {"float": np.float32, "float16": np.float16, "double": np.float64}
OPSETS = (7, 11, 13, 17, 21, 25)

kinds = pytest.mark.parametrize("kind", KINDS)
opsets = pytest.mark.parametrize("opset", OPSETS)
histograms = pytest.mark.parametrize("histogram", [False, True], ids=["minmax", "histogram"])

Seen = defaultdict[str, list[Array]]
Values = dict[str, Any]


def binary(text: str) -> bytes:
    return bytes(ir.to_proto(ir.from_onnx_text(text)).SerializeToString())


def header(opset: int) -> str:
    return f'<ir_version: {3 if opset < 9 else 8}, opset_import: ["" : {opset}, "com.microsoft" : 1]>'


def samples(*feeds: Values) -> list[Sample]:
    return [
        Sample({name: np.asarray(value) for name, value in feed.items()}, None, f"sample {index}")
        for index, feed in enumerate(feeds)
    ]


def vectors(*lengths: int, dtype: Any = np.float32) -> list[Array]:
    """Multiples of 1/8, on which everything below is exact in float16 too."""
    rng = np.random.default_rng(3)
    return [(rng.integers(-40, 40, length) / 8).astype(dtype) for length in lengths]


def extremes(seen: Seen) -> dict[str, MinMax]:
    values = {name: np.concatenate([array.ravel() for array in arrays]) for name, arrays in seen.items()}
    return {name: MinMax.of(array) for name, array in values.items() if array.size}


# ---------------------------------------------------------------------------------------------------------- If

BRANCHES = """{header}
g ({type}[N] x, bool take) => ({type}[N] y) {{
    outer = Neg(x)
    r = If (take) <
        then_branch = yes () => ({type}[N] yes_out) {{ twice = Add(outer, outer)  yes_out = Relu(twice) }},
        else_branch = no () => ({type}[N] no_out) {{ no_out = Abs(outer) }}
    >
    y = Neg(r)
}}"""
IN_BRANCHES = ("twice", "yes_out", "no_out")


def branches(seen: Seen, x: Array, take: bool) -> None:
    seen["outer"].append(-x)
    if take:
        seen["twice"].append(-x - x)
        seen["yes_out"].append(np.maximum(-x - x, 0))
    else:
        seen["no_out"].append(np.abs(x))
    seen["y"].append(-seen["yes_out" if take else "no_out"][-1])


@kinds
@pytest.mark.parametrize("taken", [(True, False, True), (True, True, True), (False, False, False)], ids=str)
def test_a_branch_has_the_values_of_the_samples_that_took_it(kind: str, taken: Sequence[bool]) -> None:
    seen: Seen = defaultdict(list)
    feeds: list[Values] = [
        {"x": x, "take": take} for x, take in zip(vectors(5, 1, 7, dtype=KINDS[kind]), taken, strict=True)
    ]
    for feed in feeds:
        branches(seen, **feed)
    model = binary(BRANCHES.format(header=header(17), type=kind))
    assert observe(model, [*IN_BRANCHES, "outer", "y"], samples(*feeds), histogram=False).ranges == extremes(seen)


def test_an_empty_branch_and_no_names_are_fine() -> None:
    model = binary(BRANCHES.format(header=header(17), type="float"))
    feed = {"x": np.zeros(0, np.float32), "take": True}
    for names in (IN_BRANCHES, ()):
        seen = observe(model, names, samples(feed), histogram=False)
        assert (seen.ranges, seen.runs, seen.broken, seen.samples) == ({}, {}, {}, 1)


# -------------------------------------------------------------------------------------------------------- Loop

LOOP = """{header}
g ({type}[N] x, int64 turns) => ({type}[N] last, {type}[T, N] all) {{
    go = Constant <value = bool {{1}}> ()
    step = Neg(x)
    last, all = Loop (turns, go, x) <
        body = b (int64 i, bool going, {type}[N] old) => (bool still, {type}[N] new, {type}[N] kept) {{
            still = Identity(going)
            new = Sub(old, step)
            inner = Add(new, old)
            kept = Neg(inner)
        }}
    >
}}"""
IN_LOOP = ("old", "new", "inner", "kept")


def loop(seen: Seen, x: Array, turns: int) -> None:
    old = x
    for _ in range(turns):
        new = old + x
        for name, value in zip(IN_LOOP, (old, new, new + old, -(new + old)), strict=True):
            seen[name].append(value)
        old = new


@kinds
@pytest.mark.parametrize("turns", [(3, 0, 1), (0, 0, 0), (5, 4, 3)], ids=str)
def test_a_loop_has_the_values_of_all_its_iterations(kind: str, turns: Sequence[int]) -> None:
    seen: Seen = defaultdict(list)
    feeds: list[Values] = [
        {"x": x, "turns": n} for x, n in zip(vectors(4, 6, 2, dtype=KINDS[kind]), turns, strict=True)
    ]
    for feed in feeds:
        loop(seen, **feed)
    model = binary(LOOP.format(header=header(17), type=kind))
    assert observe(model, IN_LOOP, samples(*feeds), histogram=False).ranges == extremes(seen)


def test_iterations_may_differ_in_shape_and_have_no_values() -> None:
    text = f"""{header(17)}
    g (float[N] x, int64 turns) => (float[M] last) {{
        go = Constant <value = bool {{1}}> ()
        one = Constant <value = float {{1}}> ()
        zero = Constant <value = float {{0}}> ()
        last = Loop (turns, go, x) <
            body = b (int64 i, bool going, float[K] old) => (bool still, float[L] new) {{
                still = Identity(going)
                positive = Greater(old, zero)
                left = Compress(old, positive)
                new = Sub(left, one)
            }}
        >
    }}"""
    seen: Seen = defaultdict(list)
    feeds: list[Values] = [
        {"x": np.array([3, -7, 0.5, 2], np.float32), "turns": 6},
        {"x": np.array([-1], np.float32), "turns": 2},
    ]
    for feed in feeds:
        x = feed["x"]
        for _ in range(feed["turns"]):
            seen["left"].append(x[x > 0])
            x = x[x > 0] - 1
            seen["new"].append(x)
    seen_by_runtime = observe(binary(text), ["left", "new"], samples(*feeds), histogram=False).ranges
    assert seen_by_runtime == extremes(seen)
    assert seen_by_runtime["left"].count == 3 + 2 + 1


# -------------------------------------------------------------------------------------------------------- Scan

SCAN = """{header}
g ({type}[{batch}2] start, {type}[{batch}T, 2] x) => ({type}[{batch}2] last, {type}[{batch}{out}] all) {{
    last, all = Scan ({lengths}start, x) <
        num_scan_inputs = 1, {options}
        body = b ({type}[2] old, {type}[2] row) => ({type}[2] new, {type}[2] kept) {{
            new = Add(old, row)
            inner = Sub(new, old)
            kept = Relu(inner)
        }}
    >
}}"""
IN_SCAN = ("old", "row", "new", "inner", "kept")


def scan(seen: Seen, start: Array, x: Array) -> None:
    old = start
    for row in x:
        new = old + row
        for name, value in zip(IN_SCAN, (old, row, new, new - old, np.maximum(new - old, 0)), strict=True):
            seen[name].append(value)
        old = new


@pytest.mark.parametrize("opset", [opset for opset in OPSETS if opset > 8])
@pytest.mark.parametrize(
    "options",
    ["", "scan_output_axes = [1], scan_output_directions = [1], scan_input_directions = [1],"],
    ids=["plain", "options"],
)
def test_a_scan_has_the_values_of_all_its_steps(opset: int, options: str) -> None:
    seen: Seen = defaultdict(list)
    feeds: list[Values] = [
        {"start": start, "x": x.reshape(-1, 2)} for start, x in zip(vectors(2, 2), vectors(6, 2), strict=True)
    ]
    for feed in feeds:
        scan(seen, feed["start"], feed["x"][::-1] if options else feed["x"])
    out = "2, T" if options else "T, 2"
    text = SCAN.format(header=header(opset), type="float", options=options, batch="", lengths="", out=out)
    assert observe(binary(text), IN_SCAN, samples(*feeds), histogram=False).ranges == extremes(seen)


def test_the_first_scan_has_batches_and_may_have_lengths() -> None:
    form = {"header": header(8), "type": "float", "options": "", "batch": "B, ", "out": "T, 2"}
    starts, x = vectors(4)[0].reshape(2, 2), vectors(12)[0].reshape(2, 3, 2)
    seen: Seen = defaultdict(list)
    for start, rows in zip(starts, x, strict=True):
        scan(seen, start, rows)
    feeds = samples({"start": starts, "x": x})
    model = ir.from_onnx_text(SCAN.format(lengths="x, ", **form))
    model.graph[0].replace_input_with(0, None)
    bytes_ = ir.to_proto(model).SerializeToString()
    assert observe(bytes_, IN_SCAN, feeds, histogram=False).ranges == extremes(seen)

    text = SCAN.format(lengths="lengths, ", **form).replace("T, 2] x", "T, 2] x, int64[B] lengths")
    with pytest.raises(RequantError, match=r"'new' is in a body of the Scan node '.*', which has sequence lengths"):
        observe(binary(text), ["new"], feeds, histogram=False)


# ------------------------------------------------------------------------------------------------------- nested

NESTED = """{header}
g ({type}[N] x, int64 turns, bool odd) => ({type}[N] y) {{
    go = Constant <value = bool {{1}}> ()
    y, flag = Loop (turns, go, x, odd) <
        body = outer (int64 i, bool go1, {type}[N] a, bool f) => (bool go2, {type}[N] a2, bool f2) {{
            go2 = Identity(go1)
            f2 = Not(f)
            a2 = If (f) <
                then_branch = yes () => ({type}[N] from_yes) {{
                    p = Add(a, x)
                    from_yes = Loop (i, go, p) <
                        body = deep (int64 j, bool go3, {type}[N] b) => (bool go4, {type}[N] b2) {{
                            go4 = Identity(go3)
                            q = Sub(b, x)
                            b2 = Sub(q, a)
                        }}
                    >
                }},
                else_branch = no () => ({type}[N] from_no) {{ from_no = Neg(a) }}
            >
        }}
    >
}}"""
IN_NESTED = ("a", "a2", "p", "from_yes", "b", "q", "b2", "from_no")


def nested(seen: Seen, x: Array, turns: int, odd: bool) -> None:
    a, f = x, odd
    for i in range(turns):
        seen["a"].append(a)
        if f:
            b = a + x
            seen["p"].append(b)
            for _ in range(i):
                q = b - x
                for name, value in (("b", b), ("q", q), ("b2", q - a)):
                    seen[name].append(value)
                b = q - a
            seen["from_yes"].append(b)
            a = b
        else:
            a = -a
            seen["from_no"].append(a)
        seen["a2"].append(a)
        f = not f


@kinds
@opsets
def test_bodies_in_bodies(kind: str, opset: int) -> None:
    seen: Seen = defaultdict(list)
    cases = [(4, True), (0, True), (1, True), (1, False), (3, False), (2, False)]
    arrays = vectors(3, 5, 2, 4, 1, 6, dtype=KINDS[kind])
    feeds: list[Values] = [{"x": x, "turns": n, "odd": odd} for x, (n, odd) in zip(arrays, cases, strict=True)]
    for feed in feeds:
        nested(seen, **feed)
    model = binary(NESTED.format(header=header(opset), type=kind))
    together = observe(model, IN_NESTED, samples(*feeds), histogram=False).ranges
    assert together == extremes(seen)
    assert set(together) == set(IN_NESTED)
    for name in IN_NESTED:
        assert observe(model, [name], samples(*feeds), histogram=False).ranges == {name: together[name]}


@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch_not_taken_in_an_iteration_adds_no_value(sign: int) -> None:
    # a zero for the branch not taken would widen ranges that do not reach it
    seen: Seen = defaultdict(list)
    feed: Values = {"x": np.array([3, 5, 4], np.float32) * np.float32(sign), "turns": 2, "odd": True}
    nested(seen, **feed)
    model = binary(NESTED.format(header=header(17), type="float"))
    ranges = observe(model, IN_NESTED, samples(feed), histogram=False).ranges
    assert ranges == extremes(seen)
    assert ranges["from_no"].lo * ranges["from_no"].hi > 0
    assert ranges["from_yes"].lo * ranges["from_yes"].hi > 0


def test_a_loop_that_does_not_turn_may_hold_tensors_of_any_rank() -> None:
    text = f"""{header(17)}
    g (float[N] x, int64[R] shape, int64 turns) => (float[N] y) {{
        go = Constant <value = bool {{1}}> ()
        y = Loop (turns, go, x) <
            body = b (int64 i, bool going, float[N] old) => (bool still, float[N] new) {{
                still = Identity(going)
                shaped = Reshape(old, shape)
                new = Neg(old)
            }}
        >
    }}"""
    shapes = ([2, 3], [6], [1, 6, 1])
    feeds: list[Values] = [
        {"x": vectors(6)[0], "shape": shape, "turns": turns} for shape, turns in zip(shapes, (0, 1, 0), strict=True)
    ]
    seen = observe(binary(text), ["shaped"], samples(*feeds), histogram=False)
    assert seen.ranges == {"shaped": MinMax.of(vectors(6)[0])}


def test_what_no_sample_reached_has_no_range() -> None:
    model = binary(NESTED.format(header=header(17), type="float"))
    (x,) = vectors(4)
    feed = {"x": x, "turns": 1, "odd": True}  # the inner loop does not turn in the first iteration
    assert set(observe(model, IN_NESTED, samples(feed), histogram=False).ranges) == {"a", "a2", "p", "from_yes"}
    feed = {"x": x, "turns": 0, "odd": True}
    assert observe(model, IN_NESTED, samples(feed), histogram=False).ranges == {}


def test_the_model_is_not_changed_and_its_own_names_are_avoided() -> None:
    text = BRANCHES.format(header=header(17), type="float")
    names = {"twice": "requant_tap_body0", "outer": "requant_tap0_ReduceMin"}
    renamed = text
    for old, new in names.items():
        renamed = renamed.replace(old, new)
    feeds = samples({"x": vectors(5)[0], "take": True})
    plain = observe(binary(text), ["twice", "yes_out", "outer"], feeds, histogram=False).ranges
    other = observe(binary(renamed), [names["twice"], "yes_out", names["outer"]], feeds, histogram=False).ranges
    assert other == {names.get(name, name): seen for name, seen in plain.items()}


# ---------------------------------------------------------------------------------------------- what is in them


@histograms
@pytest.mark.parametrize("opset", [7, 21])
@pytest.mark.parametrize("position", [0, 8])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_what_is_not_finite_names_tensor_and_sample(histogram: bool, opset: int, position: int, value: float) -> None:
    model = binary(NESTED.format(header=header(opset), type="float"))
    x = np.ones(9, np.float32)
    x[position] = value
    feeds: list[Values] = [{"x": np.ones(9, np.float32), "turns": 2, "odd": False}, {"x": x, "turns": 2, "odd": False}]
    for name in ("b", "from_no", "a"):
        with pytest.raises(DataError, match=r"^sample 1: output 'y' holds NaN or infinity; the input 'x' holds"):
            observe(model, [name], samples(*feeds), histogram=histogram)


def test_nan_only() -> None:
    feeds = samples({"x": np.full(3, np.nan, np.float32), "take": False})
    with pytest.raises(DataError, match=r"^sample 0: output 'y' holds NaN or infinity; the input 'x' holds NaN$"):
        observe(binary(BRANCHES.format(header=header(17), type="float")), ["no_out"], feeds, histogram=False)


@kinds
def test_finite_values_whose_sum_overflows_are_fine(kind: str) -> None:
    top = np.finfo(KINDS[kind]).max
    x = np.array([top, top, top, -1], KINDS[kind])
    model = binary(BRANCHES.format(header=header(17), type=kind))
    # `outer` is reduced in the graph at first, and fetched whole after its sum has overflowed
    seen = observe(model, ["no_out", "outer"], samples(*[{"x": x, "take": False}] * 2), histogram=False)
    assert seen.ranges == {"no_out": MinMax(1, float(top), 8), "outer": MinMax(float(-top), 1, 8)}


def test_the_extremes_of_doubles_are_exact() -> None:
    x = np.array([1 + 2**-50, 1e300, -(2 - 2**-52)])
    model = binary(BRANCHES.format(header=header(17), type="double"))
    assert observe(model, ["twice"], samples({"x": x, "take": True}), histogram=False).ranges == {
        "twice": MinMax(-2e300, 2 * (2 - 2**-52), 3)
    }


def test_negative_zero_is_zero() -> None:
    feeds = samples({"x": np.full(3, 0.0, np.float32), "take": True})
    seen = observe(binary(BRANCHES.format(header=header(17), type="float")), ["twice"], feeds, histogram=False)
    assert [str(seen.ranges["twice"].lo), str(seen.ranges["twice"].hi)] == ["0.0", "0.0"]


def test_scalars_and_constants_of_bodies() -> None:
    text = f"""{header(17)}
    g (float[N] x, bool take) => (float y) {{
        y = If (take) <
            then_branch = yes () => (float s) <float[2] w = {{-3, 5}}> {{ r = Mul(x, w)  s = ReduceSum <keepdims = 0> (r) }},
            else_branch = no () => (float k) {{ k = Constant <value_float = 2.5> () }}
        >
    }}"""
    feeds: list[Values] = [{"x": np.array([1, 2], np.float32), "take": take} for take in (True, False)]
    assert observe(binary(text), ["s", "w", "k"], samples(*feeds), histogram=False).ranges == {
        "s": MinMax(7, 7, 1),
        "w": MinMax(-3, 5, 2),
        "k": MinMax(2.5, 2.5, 1),
    }


def test_types_that_only_the_runtime_knows() -> None:
    text = f"""{header(17)}
    g (float[N] x, bool take) => (float[N] y) {{
        y = If (take) <
            then_branch = yes () => (float[N] p) {{ f = com.microsoft.QuickGelu (x)  p = Relu(f) }},
            else_branch = no () => (float[N] q) {{ i = Cast <to = 7> (x)  q = Cast <to = 1> (i) }}
        >
    }}"""
    feed = {"x": np.array([2.0, 40.0], np.float32), "take": True}
    seen = observe(binary(text), ["f", "p"], samples(feed), histogram=False).ranges
    assert seen["f"] == seen["p"]
    assert (seen["f"].hi, seen["f"].count) == (40, 2)
    with pytest.raises(RequantError, match=r"Type 'tensor\(int64\)' of input parameter \(i\) .* is invalid"):
        observe(binary(text), ["i"], samples(feed), histogram=False)


# --------------------------------------------------------------------------------------------------- histograms


def test_histograms_are_of_the_main_graph_and_rules_take_what_there_is() -> None:
    model = binary(BRANCHES.format(header=header(17), type="float"))
    feeds = samples(*({"x": x, "take": take} for x, take in zip(vectors(40, 40), (True, False), strict=True)))
    names = [*IN_BRANCHES, "x", "outer", "y"]
    seen = observe(model, names, feeds, histogram=True, channel_axis={"y": 0, "x": 0})
    plain = observe(model, names, feeds, histogram=False)
    assert {name: type(statistic) for name, statistic in seen.ranges.items()} == (
        dict.fromkeys(IN_BRANCHES, MinMax) | dict.fromkeys(("x", "outer", "y"), Histogram)
    )
    assert set(seen.channels) == {"x", "y"}
    first, second = (observe(model, names, [feed], histogram=True) for feed in feeds)
    assert (first | second).ranges == seen.ranges
    rule = parse_rule("percentile(60)")
    for name in IN_BRANCHES:
        assert seen.ranges[name] == plain.ranges[name]
        assert rule(seen.ranges[name]) == (seen.ranges[name].lo, seen.ranges[name].hi)
    assert rule(seen.ranges["outer"])[1] < seen.ranges["outer"].hi


# ------------------------------------------------------------------------------------------------------ refusals


@histograms
def test_refused_tensors(histogram: bool) -> None:
    model = binary(NESTED.format(header=header(17), type="float"))
    feeds = samples({"x": vectors(4)[0], "turns": 2, "odd": True})
    with pytest.raises(UnknownNameError, match="no tensor named 'from_yess'; did you mean 'from_yes'"):
        observe(model, ["from_yess"], feeds, histogram=histogram)
    with pytest.raises(RequantError, match=r"^tensor 'go4' is a tensor\(bool\); only float"):
        observe(model, ["go4"], feeds, histogram=histogram)
    with pytest.raises(RequantError, match=r"^tensor 'q' is in a body; channels are observed in the main graph only$"):
        observe(model, ["q"], feeds, histogram=histogram, channel_axis={"x": 0, "q": 0})


@pytest.mark.parametrize("name", ["inner", "x"])
def test_a_name_of_several_tensors_is_refused(name: str) -> None:
    text = f"""{header(17)}
    g (float[N] x, bool take) => (float[N] y) {{
        y = If (take) <
            then_branch = yes () => (float[N] p) {{ inner = Neg(x)  p = Relu(inner) }},
            else_branch = no () => (float[N] q) {{ inner = Abs(x)  q = Neg(inner)  x = Neg(inner) }}
        >
    }}"""
    with pytest.raises(RequantError, match=f"^2 graphs of the model have a tensor '{name}'; give each its own name$"):
        observe(binary(text), [name], [], histogram=False)


def test_bodies_that_hand_nothing_out_are_refused() -> None:
    text = f"""{header(17)}
    g (seq(float[N]) xs) => (seq(float[N]) ys) {{
        [map] ys = SequenceMap (xs) <body = b (float[N] x) => (float[N] y) {{ z = Neg(x)  y = Relu(z) }}>
    }}"""
    with pytest.raises(
        RequantError, match=r"^tensor 'z' is in a body of the SequenceMap node 'map'; only bodies of If, Loop and Scan"
    ):
        observe(binary(text), ["z"], [], histogram=False)
