"""What `verify` finds, and what it leaves to others."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from requant.transforms import VerifyError, signature, verify
from requant.transforms.pipelines.verify import MOST_STEPS

MODEL = """<ir_version: 8, opset_import: ["" : 17, "my.domain" : 1]>
g (float[N,4] x, bool c) => (float[N,4] y) <float[4] w = {1, 2, 3, 4}> {
    [mul] t = Mul(x, w)
    [custom] u = my.domain.Anything <level = 3> (t)
    [branch] y = If(c) <
        then_branch = then () => (float[N,4] a) { [inside] a = Relu(u) },
        else_branch = else () => (float[N,4] b) { b = Identity(u) }
    >
}"""


def model() -> ir.Model:
    return ir.from_onnx_text(MODEL)


def inside(model: ir.Model) -> ir.Node:
    return model.graph.node("branch").attributes["then_branch"].as_graph().node("inside")


def written(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def dangle(model: ir.Model) -> None:
    model.graph.node("custom").replace_input_with(0, ir.Value(name="gone"))


def dangle_inside(model: ir.Model) -> None:
    inside(model).replace_input_with(0, ir.Value(name="gone"))


def dangle_output(model: ir.Model) -> None:
    model.graph.outputs[0] = ir.Value(name="y", type=ir.TensorType(ir.DataType.FLOAT))


def duplicate(model: ir.Model) -> None:
    model.graph.node("mul").outputs[0].name = "w"


def leave_unnamed(model: ir.Model) -> None:
    model.graph.node("mul").outputs[0].name = None


def disorder(model: ir.Model) -> None:
    node = model.graph.node("mul")
    inputs = tuple(node.inputs)
    model.graph.remove(node)
    model.graph.append(node)
    assert tuple(node.inputs) == inputs


def forget_opset(model: ir.Model) -> None:
    del model.graph.opset_imports["my.domain"]


def misspell(model: ir.Model) -> None:
    inside(model).op_type = "Rleu"


def lose_type(model: ir.Model) -> None:
    model.graph.inputs[0].type = None


BROKEN: list[tuple[Callable[[ir.Model], None], str]] = [
    (dangle, "node 'custom' (Anything) reads 'gone', which nothing computes"),
    (dangle_inside, "node 'inside' (Relu) reads 'gone', which nothing computes"),
    (dangle_output, "nothing computes the graph output 'y'"),
    (duplicate, "two values are named 'w'"),
    (leave_unnamed, "output 0 of node 'mul' (Mul) has no name"),
    (disorder, "node 'custom' (Anything) comes before the node that computes 't'"),
    (
        forget_opset,
        (
            "node 'custom' (Anything) has domain 'my.domain', but the model imports no operator set of this domain; "
            "it imports: ai.onnx"
        ),
    ),
    (misspell, "onnx.checker: No Op registered for Rleu with domain_version of 17"),
    (lose_type, "onnx.checker: Field 'type' of 'value_info' is required but missing."),
]


@pytest.mark.parametrize(("spoil", "message"), BROKEN, ids=[spoil.__name__ for spoil, _ in BROKEN])
def test_verify_says_what_is_wrong(spoil: Callable[[ir.Model], None], message: str) -> None:
    broken = model()
    verify(broken)
    spoil(broken)
    with pytest.raises(VerifyError) as caught:
        verify(broken)
    assert str(caught.value) == message


LOOP = """<ir_version: 8, opset_import: ["" : 17]>
g (float[4] x, int64 any, bool flag) => (float[4] y)
<int64 most = {MOST}, bool yes = {1}, bool no = {0}> {
    [loop] y = Loop(TIMES, GOING, x) <body = step (int64 i, bool going, float[4] s) => (bool out, float[4] t) {
        t = Neg(s)
        out = ENDING
    }>
}"""


def loop(
    *, steps: int = MOST_STEPS + 1, times: str = "most", going: str = "yes", ending: str = "Identity(going)"
) -> str:
    text = LOOP.replace("MOST", str(steps)).replace("TIMES", times)
    return text.replace("GOING", going).replace("ENDING", ending)


@pytest.mark.parametrize(
    ("going", "ending"), [("yes", "Identity(going)"), ("", "Identity(going)"), ("flag", "Identity(yes)")]
)
def test_a_loop_that_takes_long_is_refused(going: str, ending: str) -> None:
    with pytest.raises(
        VerifyError, match=r"node 'loop' \(Loop\) runs 100,000,001 times, which takes many minutes at least"
    ):
        verify(ir.from_onnx_text(loop(going=going, ending=ending)))


@pytest.mark.parametrize("ending", ["Identity(going)", "Identity(yes)"])
def test_a_loop_that_never_ends_is_refused(ending: str) -> None:
    with pytest.raises(VerifyError, match=r"node 'loop' \(Loop\) never ends"):
        verify(ir.from_onnx_text(loop(times="", ending=ending)))


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": MOST_STEPS},
        {"times": "any"},
        {"times": "", "ending": "Not(going)"},
        {"times": "", "going": "flag"},
        {"going": "no"},
        {"going": "flag"},
        {"ending": "Not(going)"},
        {"ending": "Identity(no)"},
    ],
    ids=str,
)
def test_a_loop_that_may_end_is_not(changes: dict[str, Any]) -> None:
    verify(ir.from_onnx_text(loop(**changes)))


def narrow(model: ir.Model) -> None:
    model.graph.inputs[0].shape = ir.Shape([2, 4])


def forget_length(model: ir.Model) -> None:
    model.graph.outputs[0].shape = ir.Shape([None, 4])


@pytest.mark.parametrize("change", [narrow, forget_length])
def test_a_port_may_become_more_or_less_precise(change: Callable[[ir.Model], None]) -> None:
    before, after = model(), model()
    change(after)
    verify(after, like=signature(before))


def rename_input(model: ir.Model) -> None:
    model.graph.inputs[0].name = "image"


def drop_input(model: ir.Model) -> None:
    model.graph.node("mul").replace_input_with(0, model.graph.initializers["w"])
    model.graph.inputs.pop(0)


def reshape(model: ir.Model) -> None:
    model.graph.inputs[0].shape = ir.Shape(["N", 5])


def add_axis(model: ir.Model) -> None:
    model.graph.outputs[0].shape = ir.Shape(["N", 4, 1])


def lose_output_type(model: ir.Model) -> None:
    model.graph.outputs[0].type = None


def lose_shape(model: ir.Model) -> None:
    model.graph.outputs[0].shape = None


def test_an_output_needs_no_type_and_no_shape() -> None:
    """ONNX Runtime infers both."""
    undeclared = model()
    lose_output_type(undeclared)
    lose_shape(undeclared)
    verify(undeclared, like=signature(undeclared))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename_input, "the graph inputs were x, c and are now image, c"),
        (drop_input, "the graph inputs were x, c and are now c"),
        (reshape, "the graph input was x: FLOAT [N, 4] and is now x: FLOAT [N, 5]"),
        (add_axis, "the graph output was y: FLOAT [N, 4] and is now y: FLOAT [N, 4, 1]"),
        (lose_output_type, "the graph output was y: FLOAT [N, 4] and is now y: unknown [N, 4]"),
        (lose_shape, "the graph output was y: FLOAT [N, 4] and is now y: FLOAT"),
    ],
)
def test_inputs_and_outputs_must_stay(change: Callable[[ir.Model], None], message: str) -> None:
    before, after = model(), model()
    change(after)
    with pytest.raises(VerifyError) as caught:
        verify(after, like=signature(before))
    assert str(caught.value) == message


def test_verify_changes_nothing() -> None:
    checked = model()
    weight = ir.Tensor(np.ones((100, 100), np.float32), name="a_large_one")
    before_w = checked.graph.initializers.pop("w")
    value = ir.Value(name="a_large_one", const_value=weight, shape=weight.shape, type=ir.TensorType(weight.dtype))
    checked.graph.register_initializer(value)
    checked.graph.register_initializer(before_w)
    before = written(checked)
    verify(checked)
    assert written(checked) == before


def test_the_cost_does_not_grow_with_the_weights() -> None:
    large = model()
    reads: list[str] = []

    def read() -> ir.Tensor[np.ndarray]:
        reads.append("read")
        return ir.Tensor(np.zeros((1 << 15, 1 << 10), np.float32), name="large")

    shape = ir.Shape([1 << 15, 1 << 10])
    lazy = ir.LazyTensor(read, dtype=ir.DataType.FLOAT, shape=shape, name="large")
    value = ir.Value(name="large", const_value=lazy, shape=shape, type=ir.TensorType(ir.DataType.FLOAT))
    large.graph.register_initializer(value)
    started = perf_counter()
    verify(large)
    assert not reads
    assert perf_counter() - started < 1


def test_an_ir_version_that_onnx_does_not_know_is_refused_with_the_way_out() -> None:
    newer = model()
    newer.ir_version = 99
    with pytest.raises(
        VerifyError, match=r"IR version 99, and the installed onnx .* knows [0-9]+: install a newer onnx"
    ):
        verify(newer)
