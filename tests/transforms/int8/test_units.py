"""Which operators are decided together."""

from itertools import pairwise
from pathlib import Path

import onnx_ir as ir
import pytest

from requant.transforms.graphs.queries import node_name
from requant.transforms.int8.plan import Unit
from requant.transforms.int8.units import units
from requant.transforms.patterns.elementwise import clip_bounds

HEADER = '<ir_version: 8, opset_import: ["" : 17, "my.domain" : 1]>\n'
SAMPLES = sorted((Path(__file__).parents[3] / "sample_models").glob("*.onnx"))
CONSTANTS = """<float[2,2,1,1] w = {1, 2, 3, 4}, float[2,2] m = {1, 2, 3, 4}, float zero = {0}, float one = {1},
    float two = {2}, float three = {3}, float six = {6}, float half = {0.5}, float root = {1.41421}>"""


def graph(body: str, inputs: str = "float[N,2,4,4] x", outputs: str = "float[N,2,4,4] y") -> ir.Graph:
    return ir.from_onnx_text(f"{HEADER}g ({inputs}) => ({outputs})\n{CONSTANTS} {{\n{body}\n}}").graph


ABSORBED = {
    "Conv-Relu": "[a] t = Conv(x, w) [b] y = Relu(t)",
    "Conv-Relu6": "[a] t = Conv(x, w) [b] y = Clip(t, zero, six)",
    "Conv-Clip-above": '[a] t = Conv(x, w) [b] y = Clip(t, "", six)',
    "Gemm-Relu": "[a] t = Gemm(x, m) [b] y = Relu(t)",
    "MatMul-Relu": "[a] t = MatMul(x, m) [b] y = Relu(t)",
    "Add-Relu": "[a] t = Add(x, x) [b] y = Relu(t)",
    "Mul-Relu": "[a] t = Mul(x, x) [b] y = Relu(t)",
}


@pytest.mark.parametrize("body", ABSORBED.values(), ids=ABSORBED.keys())
def test_a_relu_belongs_to_what_it_alone_reads(body: str) -> None:
    (unit,) = units(graph(body))
    assert unit.name == "a"
    assert unit.nodes == ("a", "b")
    assert unit.inputs == ("x",)
    assert unit.outputs == ("y",)


SEPARATE = {
    "bounds-above-zero": "[a] t = Conv(x, w) [b] y = Clip(t, one, six)",
    "empty-bounds": "[a] t = Conv(x, w) [b] y = Clip(t, zero, zero)",
    "computed-bound": "[a] t = Conv(x, w) [c] s = ReduceMax <keepdims=0> (x) [b] y = Clip(t, zero, s)",
    "bound-itself": "[a] t = Conv(x, w) [b] y = Clip(x, zero, t)",
    "another-domain": "[a] t = Conv(x, w) [b] y = my.domain.Relu(t)",
    "not-absorbing": "[a] t = Sigmoid(x) [b] y = Relu(t)",
    "of-another-domain": "[a] t = my.domain.Conv(x, w) [b] y = Relu(t)",
    "read-twice": "[a] t = Conv(x, w) [b] u = Relu(t) [c] v = my.domain.Any(t) [d] y = Add(u, v)",
}


@pytest.mark.parametrize("body", SEPARATE.values(), ids=SEPARATE.keys())
def test_a_clip_that_saturation_cannot_do_is_a_unit_of_its_own(body: str) -> None:
    found = {unit.nodes for unit in units(graph(body))}
    assert {("a",), ("b",)} <= found


def test_a_result_that_the_user_reads_is_not_absorbed() -> None:
    made = graph("[a] t = Conv(x, w) [b] y = Relu(t)", outputs="float[N,2,4,4] y, float[N,2,4,4] t")
    assert [unit.nodes for unit in units(made)] == [("a",), ("b",)]


def test_a_result_that_a_body_reads_is_not_absorbed() -> None:
    made = graph(
        """[a] t = Conv(x, w)
        [b] u = Relu(t)
        [c] y = If(c) <then_branch = then () => (float[N,2,4,4] p) { p = Identity(t) },
                       else_branch = else () => (float[N,2,4,4] q) { q = Identity(u) }>""",
        inputs="float[N,2,4,4] x, bool c",
    )
    assert [(unit.nodes, unit.outputs) for unit in units(made)] == [
        (("a",), ("t",)),
        (("b",), ("u",)),
        (("c",), ("y",)),
    ]


GROUPS = {
    "SiLU": ("[a] s = Sigmoid(x) [b] y = Mul(x, s)", {"ab": "gate"}),
    "SiLU-swapped": ("[b] s = Sigmoid(x) [a] y = Mul(s, x)", {"ba": "gate"}),
    "hard-swish": ("[a] s = HardSigmoid <alpha = 0.16667> (x) [b] y = Mul(x, s)", {"ab": "gate"}),
    "tanh-shrunk": ("[a] s = Tanh(x) [b] y = Mul(x, s)", {"ab": "function"}),
    "sum of a sigmoid": ("[a] s = Sigmoid(x) [b] y = Add(x, s)", {"ab": "function"}),
    "gate of a sum": ("[a] t = Add(x, half) [b] s = Sigmoid(t) [c] y = Mul(x, s)", {"abc": "function"}),
    "Mish": ("[a] s = Softplus(x) [b] t = Tanh(s) [c] y = Mul(x, t)", {"abc": "function"}),
    "erf-GELU": (
        "[a] d = Div(x, root) [b] e = Erf(d) [c] p = Add(e, one) [d] h = Mul(x, p) [e] y = Mul(h, half)",
        {"abcde": "function"},
    ),
    "scaled hard-swish": (
        "[a] s = HardSigmoid(x) [b] h = Mul(x, s) [c] u = Mul(h, half) [d] t = Add(two, u) [e] y = Sqrt(t)",
        {"abcd": "function", "e": "Sqrt"},
    ),
    "tanh-GELU": (
        """[a] c = Pow(x, three) [b] s = Mul(c, half) [c] t = Add(x, s) [d] u = Mul(t, root)
        [e] v = Tanh(u) [f] p = Add(v, one) [g] h = Mul(x, half) [h] y = Mul(h, p)""",
        {"abcdefgh": "function"},
    ),
    "RMS-norm": (
        """[a] q = Mul(x, x) [b] v = ReduceMean <axes = [-1]> (q) [c] e = Add(v, half) [d] r = Sqrt(e)
        [e] i = Reciprocal(r) [f] y = Mul(x, i)""",
        {"abcdef": "group"},
    ),
    "layer-norm": (
        """[a] u = ReduceMean <axes = [-1]> (x) [b] d = Sub(x, u) [c] p = Pow(d, two)
        [d] v = ReduceMean <axes = [-1]> (p) [e] e = Add(v, half) [f] s = Sqrt(e) [g] y = Div(d, s)""",
        {"ab": "group", "cdefg": "group"},  # x fans out and joins, then x - mean(x) does
    ),
}


@pytest.mark.parametrize(("body", "expected"), GROUPS.values(), ids=GROUPS.keys())
def test_a_fan_out_that_joins_again_is_a_group(body: str, expected: dict[str, str]) -> None:
    made = graph(body)
    found = units(made)
    assert ["".join(sorted(unit.nodes)) for unit in found] == ["".join(sorted(nodes)) for nodes in expected]
    for unit, (nodes, op) in zip(found, expected.items(), strict=True):
        assert unit.op == op
        assert unit.name == unit.nodes[-1] == nodes[-1]
        assert len(unit.inputs) == len(unit.outputs) == 1
        check_order(made, unit)


def check_order(made: ir.Graph, unit: Unit) -> None:
    """No node of a unit reads what it or a later one computes."""
    nodes = [made.node(name) for name in unit.nodes]
    for place, node in enumerate(nodes):
        later = {later.outputs[0] for later in nodes[place:]}
        assert not later.intersection(value for value in node.inputs if value is not None)


NO_GROUPS = {
    "residual around a Conv": "[a] c = Conv(x, w) [b] y = Add(x, c)",
    "residual around a Relu": "[a] c = Relu(x) [b] y = Add(x, c)",
    "another domain": "[a] c = my.domain.Sigmoid(x) [b] y = Mul(x, c)",
    "other operand computed": "[a] s = Sigmoid(x) [b] c = Conv(x, w) [d] y = Mul(s, c)",
    "no fan-out": "[a] s = Sigmoid(x) [b] y = Tanh(s)",
}


@pytest.mark.parametrize("body", NO_GROUPS.values(), ids=NO_GROUPS.keys())
def test_other_fan_outs_are_not_groups(body: str) -> None:
    assert not {"group", "gate"} & {unit.op for unit in units(graph(body))}


def test_a_group_whose_inside_the_user_reads_is_no_group() -> None:
    made = graph("[a] s = Sigmoid(x) [b] y = Mul(x, s)", outputs="float[N,2,4,4] y, float[N,2,4,4] s")
    assert [unit.op for unit in units(made)] == ["Sigmoid", "Mul"]


def test_a_group_whose_inside_a_body_reads_is_no_group() -> None:
    made = graph(
        """[a] s = Sigmoid(x)
        [b] p = Mul(x, s)
        [c] y = If(c) <then_branch = then () => (float[N,2,4,4] r) { r = Identity(s) },
                       else_branch = else () => (float[N,2,4,4] q) { q = Identity(p) }>""",
        inputs="float[N,2,4,4] x, bool c",
    )
    assert [unit.op for unit in units(made)] == ["Sigmoid", "Mul", "If"]


def test_a_long_chain_of_cheap_operators_ends_no_search_in_a_group() -> None:
    chain = " ".join(f"[n{i}] t{i} = Neg({f't{i - 1}' if i else 'x'})" for i in range(40))
    assert "group" not in {unit.op for unit in units(graph(f"{chain} [z] y = Add(x, t39)"))}


def test_a_relu_after_a_group_is_not_absorbed_by_it() -> None:
    made = graph("[a] s = Sigmoid(x) [b] p = Mul(x, s) [c] y = Relu(p)")
    assert [unit.nodes for unit in units(made)] == [("a", "b"), ("c",)]


def test_nodes_without_a_name_are_known_by_their_first_output() -> None:
    made = graph("t = Conv(x, w) u = Relu(t) s = Sigmoid(u) y = Mul(u, s)")
    for node in made:
        node.name = None
    assert [(unit.name, unit.nodes) for unit in units(made)] == [("t", ("t", "u")), ("y", ("s", "y"))]


def test_constants_are_no_inputs() -> None:
    made = graph("k = Constant <value_float = 2.0> () [a] t = Mul(x, k) [b] y = Conv(t, w)")
    assert [unit.inputs for unit in units(made) if unit.name in "ab"] == [("x",), ("t",)]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_every_node_is_in_one_unit_and_units_are_in_execution_order(path: Path) -> None:
    made = ir.load(path).graph
    found = units(made)
    names = [name for unit in found for name in unit.nodes]
    assert sorted(names) == sorted(node_name(node) for node in made)
    assert len({unit.name for unit in found}) == len(found)
    place = {node_name(node): index for index, node in enumerate(made)}
    assert all(place[one.nodes[-1]] < place[other.nodes[-1]] for one, other in pairwise(found))


@pytest.mark.parametrize(
    ("clip", "bounds"),
    [
        ("Relu(x)", (0.0, float("inf"))),
        ("Clip(x)", (-float("inf"), float("inf"))),
        ("Clip(x, zero, six)", (0.0, 6.0)),
        ('Clip(x, "", six)', (-float("inf"), 6.0)),
        ("Clip(x, half, six)", None),
    ],
    ids=str,
)
def test_bounds(clip: str, bounds: tuple[float, float] | None) -> None:
    assert clip_bounds(graph(f"[a] y = {clip}").node("a")) == bounds


def test_bounds_that_are_attributes() -> None:
    made = ir.from_onnx_text(
        '<ir_version: 7, opset_import: ["" : 6]> g (float[N] x) => (float[N] y) '
        "{ [a] y = Clip <min = -1.0, max = 6.0> (x) }"
    )
    assert clip_bounds(made.graph.node("a")) == (-1.0, 6.0)
