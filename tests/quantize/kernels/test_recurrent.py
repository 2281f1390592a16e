"""GRUs and LSTMs in functions: the native operators, their bodies, and the plan."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from requant import NATIVE_DOMAIN
from requant.calibration.model.session import Array, open_session
from requant.quantize import Options, quantize_model
from requant.quantize.gate.layers import layers_of
from requant.quantize.kernels.recurrent import wrap_recurrent
from requant.quantize.runtime.macs import multiply_accumulates
from requant.transforms.int8.qparams import Scheme
from requant.transforms.int8.recurrent import BACKWARD, FEW_INPUTS, STATES, keeps_input, to_int8_recurrent
from requant.transforms.int8.units import units
from requant.transforms.int8.weights import WeightWriter
from requant.transforms.int8.writer import Writer

from ...native import by_row, needs_library

pytestmark = needs_library
GATES = {"GRU": 3, "LSTM": 4}


@dataclass(frozen=True)
class Net:
    """A model of one operator with free numbers of steps and items.

    Attributes:
        op: GRU or LSTM.
        way: The direction.
        sizes: The inputs and the values of the state.
        reset: ``linear_before_reset`` of a GRU.
        bias: Whether it has biases.
        start: Whether the first states are inputs.
        lengths: Whether the lengths of the sequences are inputs.
    """

    op: str
    way: str = "forward"
    sizes: tuple[int, int] = (12, 16)
    reset: int = 1
    bias: bool = True
    start: bool = True
    lengths: bool = False

    @property
    def states(self) -> list[str]:
        return ["h", "c"][: STATES[self.op]]

    def model(self) -> onnx.ModelProto:
        (width, size), count, gates = self.sizes, len(BACKWARD[self.way]), GATES[self.op]
        random = np.random.default_rng(5)
        shapes = {"w": (count, gates * size, width), "r": (count, gates * size, size), "b": (count, 2 * gates * size)}
        ports = {each: f"float[{count},N,{size}] {each}" for each in self.states}
        starts = "".join(f", {port}0" for port in ports.values()) if self.start else ""
        inputs = [
            "x",
            "w",
            "r",
            "b" * self.bias,
            "n" * self.lengths,
            *(f"{each}0" * self.start for each in self.states),
        ]
        attributes = f", linear_before_reset = {self.reset}" if self.op == "GRU" else ""
        text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[S,N,{width}] x{", int32[N] n" * self.lengths}{starts})
            => (float[S,{count},N,{size}] y, {", ".join(ports.values())}) {{
            [op] y, {", ".join(self.states)} = {self.op} <hidden_size = {size}, direction = "{self.way}"{attributes}>
                ({", ".join(inputs)})
        }}"""
        proto = onnx.parser.parse_model(text)
        for name, shape in shapes.items():
            if name != "b" or self.bias:
                array = random.normal(size=shape) / (1 if name == "b" else np.sqrt(shape[-1]))
                proto.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
        return proto


def wrapped(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the operator in a function."""
    model = ir.from_proto(proto)
    (unit,) = units(model.graph)
    writer = WeightWriter(Writer.of(model, Scheme()), Scheme().weight_params)
    count = 1 if keeps_input(model.graph[0]) else 2
    assert to_int8_recurrent(model.graph[0], writer) == count
    assert wrap_recurrent(model, [unit]) == 1
    made = ir.to_proto(model)
    onnx.checker.check_model(made, full_check=True)
    return made


def feed_of(proto: onnx.ModelProto, steps: int, items: int, seed: int) -> dict[str, Array]:
    random, feed = np.random.default_rng(seed), dict[str, Array]()
    for each in proto.graph.input:
        dims = each.type.tensor_type.shape.dim
        lengths = [{"S": steps, "N": items}.get(dim.dim_param, dim.dim_value) for dim in dims]
        if each.name == "n":
            feed["n"] = random.integers(0, steps + 1, lengths).astype(np.int32)
        else:
            feed[each.name] = random.normal(0.2, 1, lengths).astype(np.float32)
    return feed


def rounded(x: Array) -> Array:
    """Return rows rounded to 8 bits, as numbers."""
    integers, step = by_row(x)
    found: Array = integers.astype(np.float64) * step
    return found


def sigmoid(value: Array) -> Array:
    return 1 / (1 + np.exp(-value))


@dataclass(frozen=True)
class Definition:
    """What the operator is defined to compute in one direction.

    Attributes:
        net: The operator.
        w: The weights of the inputs, float64 (I, G H).
        r: The weights of the state, float64 (H, G H).
        of_input: The biases of the inputs, float64 (G H,).
        of_state: The biases of the state, float64 (G H,).
    """

    net: Net
    w: Array
    r: Array
    of_input: Array
    of_state: Array

    @classmethod
    def of(cls, net: Net, proto: onnx.ModelProto, direction: int) -> Definition:
        arrays = {each.name: numpy_helper.to_array(each) for each in proto.graph.initializer}
        rows = GATES[net.op] * net.sizes[1]
        stored = {
            name: arrays[f"{name}/int8"] * arrays[f"{name}/scale"].astype(np.float64)[:, None]
            if f"{name}/int8" in arrays
            else arrays[name].astype(np.float64)
            for name in "wr"
        }
        w, r = (stored[name].reshape(-1, rows, stored[name].shape[-1])[direction].T for name in "wr")
        bias = arrays["b"][direction].astype(np.float64) if net.bias else np.zeros(2 * rows)
        return cls(net, w, r, *bias.reshape(2, rows))

    def next(self, x: Array, before: Array, cell: Array) -> tuple[Array, Array]:
        """Return the states and cells of some items behind one step."""
        few = FEW_INPUTS * self.net.sizes[0] <= self.net.sizes[1]
        p = (x if few else rounded(x)) @ self.w + self.of_input
        return self._lstm(p, before, cell) if self.net.op == "LSTM" else (self._gru(p, before), cell)

    def _lstm(self, p: Array, before: Array, cell: Array) -> tuple[Array, Array]:
        i, o, f, c = np.split(p + rounded(before) @ self.r + self.of_state, 4, axis=-1)
        kept = sigmoid(f) * cell + sigmoid(i) * np.tanh(c)
        return sigmoid(o) * np.tanh(kept), kept

    def _gru(self, p: Array, before: Array) -> Array:
        size = self.net.sizes[1]
        h = rounded(before) @ self.r + self.of_state
        z, gate = (sigmoid(p[:, part] + h[:, part]) for part in (slice(size), slice(size, 2 * size)))
        if self.net.reset:
            added = gate * h[:, 2 * size :]
        else:
            kept = (gate * before).astype(np.float32)
            added = rounded(kept) @ self.r[:, 2 * size :] + self.of_state[2 * size :]
        n = np.tanh(p[:, 2 * size :] + added)
        found: Array = n + z * (before - n)
        return found


NETS = st.builds(
    Net,
    op=st.sampled_from([*STATES]),
    way=st.sampled_from([*BACKWARD]),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    reset=st.sampled_from([0, 1]),
    bias=st.booleans(),
    start=st.booleans(),
    lengths=st.booleans(),
)


@settings(
    max_examples=2 * settings().max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(net=NETS, shape=st.tuples(st.integers(1, 6), st.integers(1, 4)), seed=st.integers(0, 999))
def test_each_step_is_that_of_the_definition(isa: str, net: Net, shape: tuple[int, int], seed: int) -> None:
    """The states are those that the operator found itself: a state near a half may become one of two integers."""
    proto = wrapped(net.model())
    feed = feed_of(net.model(), *shape, seed)
    y, *last = open_session(proto.SerializeToString()).run(None, feed)
    zeros, ends = np.zeros_like(y[0, 0]), feed.get("n", np.full(shape[1], shape[0]))
    for direction, back in enumerate(BACKWARD[net.way]):
        definition = Definition.of(net, proto, direction)
        # an item without steps has no states, as in the runtime
        some = (ends > 0)[:, None]
        before, cell = (feed[name][direction] * some if name in feed else zeros for name in ("h0", "c0"))
        most = max(1, np.abs(cell).max())
        for step in reversed(range(shape[0])) if back else range(shape[0]):
            alive = (step < ends)[:, None]
            expected, kept = definition.next(feed["x"][step], before, cell)
            # each function is exact to 1e-4; with the gate in front, r times the state may be rounded to another step
            off = 4e-4 * most + (0 if net.reset or net.op == "LSTM" else np.abs(before).max() / 100)
            if net.op == "LSTM":
                off *= step_count(back, step, shape[0])  # the cells are those of the definition, whose errors add up
            np.testing.assert_allclose(y[step, direction], np.where(alive, expected, 0), rtol=0, atol=off)
            before, cell = np.where(alive, y[step, direction], before), np.where(alive, kept, cell)
        np.testing.assert_array_equal(last[0][direction], before)
        if net.op == "LSTM":
            np.testing.assert_allclose(last[1][direction], cell, rtol=0, atol=4e-4 * most * shape[0])


def step_count(back: int, step: int, steps: int) -> int:
    """Return how many steps a direction has computed, with this one."""
    return steps - step if back else step + 1


@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("way", [*BACKWARD])
@pytest.mark.parametrize(("op", "reset"), [("GRU", 0), ("GRU", 1), ("LSTM", 0)])
def test_the_body_is_the_float_operator(op: str, reset: int, way: str, lengths: bool) -> None:
    net = Net(op, way, reset=reset, lengths=lengths)
    proto = net.model()
    made, feed = wrapped(proto), feed_of(proto, 9, 4, 7)
    assert [node.op_type for node in made.graph.node] == [op]
    assert made.graph.node[0].domain == NATIVE_DOMAIN
    expected = ort.InferenceSession(proto.SerializeToString()).run(None, feed)
    without = ort.InferenceSession(made.SerializeToString()).run(None, feed)
    native = open_session(made.SerializeToString()).run(None, feed)
    for before, body, after in zip(expected, without, native, strict=True):
        assert before.shape == body.shape == after.shape
        # int8 weights have steps of 1/127 of about three deviations, and so have states
        assert np.square(body - before).mean() < 1e-4
        assert np.square(after - before).mean() < 4e-4
        assert not np.array_equal(after, body)
        np.testing.assert_array_equal(after == 0, before == 0)  # behind the end of an item


@pytest.mark.parametrize("op", [*STATES])
def test_a_step_counts_all_its_products(op: str) -> None:
    model = ir.from_proto(wrapped(Net(op, "bidirectional").model()))
    node = next(each for each in model.graph if each.domain == NATIVE_DOMAIN)
    macs = multiply_accumulates(f"ai.requant.{op}", node, [(9, 4, 12)], [(9, 2, 4, 16)])
    assert macs == 9 * 4 * 2 * GATES[op] * 16 * (12 + 16)


@pytest.mark.parametrize("op", [*STATES])
def test_a_check_knows_the_roles_of_its_constants(op: str) -> None:
    (layer,) = layers_of(ir.from_proto(wrapped(Net(op).model()))).values()
    named = ["weight", "weight scale", "weight zero point", "bias"]
    named += ["recurrence", "recurrence scale", "recurrence zero point"]
    assert {*named} <= {*layer.constants}


@pytest.mark.parametrize(
    ("ops", "name", "array", "message"),
    [
        (STATES, "x", np.zeros((3, 2, 5), np.float32), "the last one with the columns of w"),
        (STATES, "h0", np.zeros((1, 3, 16), np.float32), "a row for each item"),
        (["LSTM"], "c0", np.zeros((1, 3, 16), np.float32), "a row for each item"),
        (STATES, "n", np.zeros(3, np.int32), "a length for each item"),
        (STATES, "n", np.array([1, 4], np.int32), "at most the number of steps"),
        (STATES, "n", np.array([-1, 2], np.int32), "at most the number of steps"),
    ],
)
def test_other_shapes_end_with_one_line(ops: Iterable[str], name: str, array: Array, message: str) -> None:
    for op in ops:
        net = Net(op, lengths=True)
        proto = wrapped(net.model())
        for each in proto.graph.input:
            each.type.tensor_type.ClearField("shape")
        feed = feed_of(net.model(), 3, 2, 0)
        with pytest.raises(Exception, match=f"ai.requant.{op}: .*{message}"):
            open_session(proto.SerializeToString()).run(None, {**feed, name: array})


@pytest.mark.parametrize("op", [*STATES])
def test_a_sequence_may_have_no_steps(op: str) -> None:
    """Then the last states are the first ones. The runtime's LSTM does not write them, and its GRU ends the process."""
    net = Net(op)
    feed = feed_of(net.model(), 0, 2, 0)
    y, *last = open_session(wrapped(net.model()).SerializeToString()).run(None, feed)
    assert y.shape == (0, 1, 2, 16)
    for name, found in zip(net.states, last, strict=True):
        np.testing.assert_array_equal(found, feed[f"{name}0"])


@pytest.mark.parametrize("op", [*STATES])
def test_it_is_native_where_a_plan_says_so(tmp_path: Path, op: str) -> None:
    onnx.save(Net(op, sizes=(12, 32), start=False).model(), tmp_path / "m.onnx")
    x = np.random.default_rng(0).normal(size=(8, 5, 2, 12)).astype(np.float32)
    plan = {"schema": 1, "units": {"op": {"operator": op, "implementation": "dynamic native"}}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    asked = Options(plan=tmp_path / "plan.json", seconds=0.05, force_int8=True, effort="low")
    made = quantize_model(tmp_path / "m.onnx", [{"x": each} for each in x], tmp_path / "q.onnx", asked)
    assert made.forms["dynamic native"] == 1
    assert [node.op_type for node in onnx.load(tmp_path / "q.onnx").graph.node] == [op]


@pytest.mark.parametrize("op", [*STATES])
def test_the_function_has_the_standard_form(op: str) -> None:
    made = wrapped(Net(op, lengths=True).model())
    (function,) = made.functions
    found = [f"{', '.join(n.output)} = {n.op_type}({', '.join(n.input)})" for n in function.node]
    results, starts = ["y", "y1", "y2"][: 1 + STATES[op]], ["start", "cell"][: STATES[op]]
    assert found == [
        "t0 = Cast(w)",  # the runtime computes constants in front of the operator once
        "t1 = Unsqueeze(w_scale, c0)",
        "t2 = Mul(t0, t1)",
        "t3 = Reshape(t2, c1)",
        "t4 = Cast(r)",
        "t5 = Unsqueeze(r_scale, c2)",
        "t6 = Mul(t4, t5)",
        "t7 = Reshape(t6, c3)",
        f"{', '.join(results)} = {op}(x, t3, t7, B, lengths, {', '.join(starts)})",
    ]
    assert [*function.output] == results


@pytest.mark.parametrize("way", ["forward", "bidirectional"])
@pytest.mark.parametrize("op", [*STATES])
def test_an_input_of_few_values_stays_float(op: str, way: str) -> None:
    """Its noise is gone: one value of each row is far larger than the others."""
    net = Net(op, way, sizes=(8, 32), start=False)
    proto = net.model()
    feed = feed_of(proto, 9, 4, 7)
    feed["x"][..., 0] *= 500
    w = next(each for each in proto.graph.initializer if each.name == "w")
    array = numpy_helper.to_array(w).copy()
    array[..., 0] /= 500
    w.CopyFrom(numpy_helper.from_array(array, "w"))
    made = wrapped(proto)
    call, (function,) = made.graph.node[0], made.functions
    assert call.input[1] == "w"
    assert call.input[2] == call.input[3]  # what stands for omitted inputs
    found = [f"{n.op_type}({', '.join(n.input)})" for n in function.node]
    assert found[-1].startswith(f"{op}(x, w, t3, B")
    expected = ort.InferenceSession(proto.SerializeToString()).run(None, feed)
    for session in (ort.InferenceSession(made.SerializeToString()), open_session(made.SerializeToString())):
        for before, after in zip(expected, session.run(None, feed), strict=True):
            assert np.square(after - before).mean() < 1e-4
    model = ir.from_proto(made)
    shapes = [(9, 4, 8)], [(9, len(BACKWARD[way]), 4, 32)]
    assert multiply_accumulates(f"ai.requant.{op}", model.graph[0], *shapes) == 36 * len(BACKWARD[way]) * (
        GATES[op] * 32 * (8 + 32)
    )
    (layer,) = layers_of(model).values()
    assert {"weight", "bias", "recurrence", "recurrence scale"} <= {*layer.constants}


@pytest.mark.parametrize("op", [*STATES])
def test_without_the_library_the_weights_are_computed_at_load(op: str, tmp_path: Path) -> None:
    """A DequantizeLinear would run each time, and take longer than a step of a small operator."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(wrapped(Net(op, lengths=True).model()).SerializeToString(), options)
    assert [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node] == [op]


@pytest.mark.parametrize("op", [*STATES])
def test_outputs_that_a_model_omits_get_names(op: str) -> None:
    proto = Net(op, lengths=True).model()
    proto.graph.node[0].output[0] = ""
    del proto.graph.output[0]
    feed = feed_of(proto, 6, 3, 1)
    made = wrapped(proto)
    assert all(made.graph.node[0].output)
    expected = ort.InferenceSession(proto.SerializeToString()).run(None, feed)
    for before, after in zip(expected, open_session(made.SerializeToString()).run(None, feed), strict=True):
        assert np.square(after - before).mean() < 4e-4
