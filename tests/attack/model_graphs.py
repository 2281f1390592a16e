"""Models that are hostile as a whole: they ask for terabytes, nest without end, or crash the runtime."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from .bases import BOOL, FLOAT, INT64, build, mlp, tensor, texts, weights

Node = onnx.NodeProto
Model = onnx.ModelProto
_node, _value = helper.make_node, helper.make_tensor_value_info
_X = [_value("x", FLOAT, ["N", 16])]


def _with(nodes: list[Node], constants: list[TensorProto], last: str, **settings: Any) -> Model:
    """Return a model that adds a scalar of the tensor `last` to a linear layer of x."""
    after = [
        _node("Cast", [last], ["as_float"], to=FLOAT),
        _node("ReduceMax", ["as_float"], ["scalar"], keepdims=0),
        _node("MatMul", ["x", "w"], ["h"], "product"),
        _node("Add", ["h", "scalar"], ["y"], "sum"),
    ]
    given = [*constants, weights("w", 16, 8)]
    return build([*nodes, *after], _X, [_value("y", FLOAT, ["N", 8])], given, **settings)


HUGE = (10**9, 10**10, 10**12, 2**62, 2**31, 3 * 10**8)


def huge_constant(random: Random) -> Model:
    """Ask for gigabytes to exabytes from constants alone, where folding would compute them."""
    size, kind = random.choice(HUGE), random.randrange(9)
    one = tensor("one", [1.0], np.float32)
    many = tensor("many", [size])
    square = tensor("many", [size, random.choice((1, 1000, size))])
    shapes = {
        0: ([_node("ConstantOfShape", ["many"], ["t"])], [many]),
        1: ([_node("Expand", ["one", "many"], ["t"])], [one, many]),
        2: ([_node("Tile", ["one", "many"], ["t"])], [one, many]),
        3: ([_node("Range", ["zero", "end", "step"], ["t"])], [tensor("zero", 0), tensor("end", size), tensor("step", 1)]),
        4: ([_node("ConstantOfShape", ["many"], ["t"])], [square]),
        5: ([_node("OneHot", ["at", "depth", "pair"], ["t"])], [tensor("at", [0, 1]), tensor("depth", size), tensor("pair", [0, 1])]),
        6: ([_node("Pad", ["one", "many"], ["t"])], [one, tensor("many", [size, size])]),
        7: ([_node("RandomNormal", [], ["t"], shape=[size])], []),
        8: ([_node("Resize", ["one", "", "many"], ["t"])], [one, tensor("many", [float(size)], np.float32)]),
    }  # fmt: skip
    return _with(*shapes[kind], "t")


def doubling(random: Random) -> Model:
    """Double a constant 40 times."""
    times, op = random.choice((24, 32, 40, 64)), random.choice(("Concat", "Tile", "Expand", "Einsum"))
    constants = [tensor("t0", [1.0, 2.0], np.float32), tensor("two", [2]), tensor("rows", [2, 1])]
    nodes = []
    for i in range(times):
        if op == "Concat":
            nodes.append(_node("Concat", [f"t{i}", f"t{i}"], [f"t{i + 1}"], axis=0))
        elif op == "Tile":
            nodes.append(_node("Tile", [f"t{i}", "two"], [f"t{i + 1}"]))
        elif op == "Expand":
            flat = [_node("Expand", [f"t{i}", "rows"], [f"e{i}"]), _node("Reshape", [f"e{i}", "flat"], [f"t{i + 1}"])]
            nodes += flat
        else:
            nodes.append(_node("Einsum", [f"t{i}", f"t{i}"], [f"s{i}"], equation="i,j->ij"))
            nodes.append(_node("Reshape", [f"s{i}", "flat"], [f"t{i + 1}"]))
    return _with(nodes, [*constants, tensor("flat", [-1])], f"t{times}")


def live_doubling(random: Random) -> Model:
    """Double an activation until its size passes every memory; only running shows it."""
    times = random.choice((20, 30, 40))
    nodes = [_node("Concat", ["x" if i == 0 else f"t{i}"] * 2, [f"t{i + 1}"], axis=1) for i in range(times)]
    return _with(nodes, [], f"t{times}")


def crash_division(random: Random) -> Model:
    """Divide the smallest integer by -1, or an integer by zero: SIGFPE in native code."""
    wide = random.random() < 0.7
    kind = np.int64 if wide else np.int32
    a = np.iinfo(kind).min
    constants = [tensor("a", [a], kind), tensor("b", [random.choice((-1, -1, 0))], kind)]
    op = random.choice(("Div", "Mod"))
    if random.random() < 0.5:
        return _with([_node(op, ["a", "b"], ["t"])], constants, "t")
    live = [_node("ReduceMax", ["x"], ["m"], keepdims=0), _node("Cast", ["m"], ["i"], to=INT64 if wide else 6)]
    live += [_node("Sub", ["i", "i"], ["z"]), _node("Add", ["a", "z"], ["az"]), _node(op, ["az", "b"], ["t"])]
    return _with(live, constants, "t")


def crash_reshape(random: Random) -> Model:
    """Read DequantizeLinear -> Reshape in the body of an If alone: the runtime's optimizer aborts."""
    read = random.choice(("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten"))
    extra = {"Reshape": ["shape"], "Unsqueeze": ["axes"]}.get(read, [])
    then = helper.make_graph(
        [_node("MatMul", ["r", "w"], ["then_y"])], "then", [], [_value("then_y", FLOAT, None)], [weights("w", 16, 8)]
    )
    other = helper.make_graph([_node("Identity", ["zeros"], ["else_y"])], "else", [], [_value("else_y", FLOAT, None)])
    nodes = [
        _node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        _node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        _node(read, ["d", *extra], ["r"]),
        _node("ReduceMax", ["x"], ["m"], keepdims=0),
        _node("Greater", ["m", "limit"], ["c"]),
        _node("If", ["c"], ["y"], then_branch=then, else_branch=other),
    ]
    constants = [
        tensor("s", 0.1, np.float32),
        tensor("z", 128, np.uint8),
        tensor("shape", [-1, 16]),
        tensor("axes", [0]),
        tensor("limit", -1e9, np.float32),
        tensor("zeros", np.zeros((1, 8)), np.float32),
    ]
    return build(nodes, _X, [_value("y", FLOAT, None)], constants)


def many_nodes(random: Random) -> Model:
    """Return a model of 2,000 or 20,000 nodes."""
    return _nodes(random, random.choice((2_000, 20_000)))


def most_nodes(random: Random) -> Model:
    """Return a model of 100,000 nodes."""
    return _nodes(random, 100_000)


def _nodes(random: Random, count: int) -> Model:
    """Return a chain, a fan or a comb of many nodes, or layers whose factors belong into their weights."""
    kind = random.randrange(4)
    if kind == 0:
        op = random.choice(("Relu", "Identity", "Neg"))
        nodes = [_node(op, ["x" if i == 0 else f"t{i}"], [f"t{i + 1}"], f"n{i}") for i in range(count)]
        return _with(nodes, [], f"t{count}")
    if kind == 1:
        nodes = [_node("Relu", ["x"], [f"t{i}"]) for i in range(count // 10)]
        return _with([*nodes, _node("Sum", [f"t{i}" for i in range(count // 10)], ["t"])], [], "t")
    if kind == 2:
        nodes = []
        for i in range(count // 20):
            nodes.append(_node("Gemm", ["x" if i == 0 else f"t{i}", f"w{i}"], [f"s{i}"]))
            nodes.append(_node("Mul", [f"s{i}", "k"], [f"t{i + 1}"]))
        layers = [weights(f"w{i}", 16, 16) for i in range(count // 20)]
        return _with(nodes, [*layers, weights("k", 16)], f"t{count // 20}")
    nodes = [_node("Constant", [], [f"c{i}"], value_float=float(i)) for i in range(count // 10)]
    nodes += [_node("Add", ["x" if i == 0 else f"t{i}", f"c{i}"], [f"t{i + 1}"]) for i in range(count // 10)]
    return _with(nodes, [], f"t{count // 10}")


def deep_bodies(random: Random) -> Model:
    """Nest Ifs."""
    depth = random.choice((2, 5, 10, 20, 30))  # protobuf reads 100 messages in each other, three for each If
    result = _value("y", FLOAT, None)
    inner = [_node("Relu", ["x"], ["y0"])]
    for i in range(depth):
        then = helper.make_graph(inner, f"then{i}", [], [_value(f"y{i}", FLOAT, None)])
        other = helper.make_graph([_node("Identity", ["x"], [f"o{i}"])], f"else{i}", [], [_value(f"o{i}", FLOAT, None)])
        inner = [_node("If", ["yes"], [f"y{i + 1}"], f"if{i}", then_branch=then, else_branch=other)]
    inner[-1].output[0] = "y"
    return build(inner, [*_X, _value("yes", BOOL, [])], [result])


def deep_functions(random: Random) -> Model:
    """Nest calls of local functions: each calls the one below once, or twice, which doubles the nodes each time."""
    depth, calls = random.choice(((5, 2), (12, 2), (20, 2), (30, 2), (200, 1), (2000, 1)))
    opset = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    functions = [helper.make_function("own", "F0", ["a"], ["b"], [_node("Relu", ["a"], ["b"])], opset)]
    for i in range(1, depth):
        chain = ["a", *(f"m{k}" for k in range(1, calls)), "b"]
        inner = [_node(f"F{i - 1}", [chain[k]], [chain[k + 1]], domain="own") for k in range(calls)]
        functions.append(helper.make_function("own", f"F{i}", ["a"], ["b"], inner, opset))
    nodes = [_node(f"F{depth - 1}", ["x"], ["t"], domain="own")]
    return _with(nodes, [], "t", functions=functions, opset_imports=opset)


def endless_loop(random: Random) -> Model:
    """Loop 2^62 times, over constants or over the input."""
    fixed = random.random() < 0.5
    body = helper.make_graph(
        [_node("Identity", ["going"], ["going_out"]), _node("Neg", ["s"], ["s_out"])],
        "body",
        [_value("i", INT64, []), _value("going", BOOL, []), _value("s", FLOAT, None)],
        [_value("going_out", BOOL, []), _value("s_out", FLOAT, None)],
    )
    times = random.choice((2**62, 10**9))
    constants = [tensor("times", times), tensor("yes", True, np.bool_), tensor("one", 1.0, np.float32)]
    return _with([_node("Loop", ["times", "yes", "one" if fixed else "x"], ["t"], body=body)], constants, "t")


def growing_loop(random: Random) -> Model:
    """Stack a result in each of many iterations of a Loop."""
    body = helper.make_graph(
        [_node("Identity", ["going"], ["going_out"]), _node("Expand", ["one", "big"], ["row"])],
        "body",
        [_value("i", INT64, []), _value("going", BOOL, [])],
        [_value("going_out", BOOL, []), _value("row", FLOAT, None)],
    )
    constants = [
        tensor("times", random.choice((10**5, 10**7))),
        tensor("yes", True, np.bool_),
        tensor("one", [1.0], np.float32),
        tensor("big", [10**6]),
    ]
    return _with([_node("Loop", ["times", "yes"], ["t"], body=body)], constants, "t")


def huge_operator(random: Random) -> Model:
    """Give operators attributes that ask for impossible sizes, strides, groups and axes."""
    big = random.choice((0, -1, 2**31 - 1, 2**31, 2**40, 2**62, -(2**62)))
    kind = random.randrange(8)
    shape = tensor("shape", [1, 1, 4, 4])
    square = _node("Reshape", ["x", "shape"], ["i"])
    k = weights("k", 1, 1, 3, 3)
    nodes = {
        0: _node("Conv", ["i", "k"], ["t"], strides=[big, 1], pads=[1, 1, 1, 1]),
        1: _node("Conv", ["i", "k"], ["t"], pads=[big, 1, 1, 1]),
        2: _node("Conv", ["i", "k"], ["t"], dilations=[big, 1]),
        3: _node("Conv", ["i", "k"], ["t"], group=big),
        4: _node("MaxPool", ["i"], ["t"], kernel_shape=[big, 1]),
        5: _node("ConvTranspose", ["i", "k"], ["t"], output_padding=[big, 0], strides=[big, 1]),
        6: _node("Transpose", ["i"], ["t"], perm=[big, 1, 2, 3]),
        7: _node("Softmax", ["i"], ["t"], axis=big),
    }
    return _with([square, nodes[kind]], [shape, k], "t")


def bad_constants(random: Random) -> Model:
    """Fold operators over constants that they cannot take: indices and axes out of range, shapes that do not fit."""
    kind, at = random.randrange(8), random.choice((-100, 7, 2**40, -(2**63)))
    table = tensor("c", np.arange(6).reshape(2, 3), np.float32)
    nodes = {
        0: (_node("Gather", ["c", "i"], ["t"]), [tensor("i", [at])]),
        1: (_node("Reshape", ["c", "i"], ["t"]), [tensor("i", [at, -1])]),
        2: (_node("Slice", ["c", "i", "i", "i", "i"], ["t"]), [tensor("i", [at])]),
        3: (_node("Slice", ["c", "i", "i", "a", "z"], ["t"]), [tensor("i", [1]), tensor("a", [0]), tensor("z", [0])]),
        4: (_node("Unsqueeze", ["c", "i"], ["t"]), [tensor("i", [at])]),
        5: (_node("Split", ["c", "i"], ["t"], axis=0), [tensor("i", [at])]),
        6: (_node("MatMul", ["c", "c"], ["t"]), []),
        7: (_node("TopK", ["c", "i"], ["t", "u"]), [tensor("i", [at])]),
    }
    node, constants = nodes[kind]
    return _with([node], [table, *constants], "t")


def strings(random: Random) -> Model:
    """Compute with texts, sequences and optionals, which no integer kernel takes."""
    words = texts("texts", b"\x1b[31m", "\u202e".encode(), dims=[2])
    kind = random.randrange(3)
    if kind == 0:
        nodes = [_node("StringConcat", ["texts", "texts"], ["s"]), _node("Shape", ["s"], ["t"])]
    elif kind == 1:
        nodes = [_node("SequenceConstruct", ["x", "x"], ["s"]), _node("SequenceLength", ["s"], ["t"])]
    else:
        nodes = [_node("Optional", ["x"], ["s"]), _node("OptionalHasElement", ["s"], ["t"])]
    return _with(nodes, [words], "t")


def shared(random: Random) -> Model:
    """Give many names to few tensors: the same weight read by hundreds of nodes, and one constant as every input."""
    count = random.choice((50, 400))
    nodes = [_node("Gemm", ["x" if i == 0 else f"t{i}", "s", "c"], [f"t{i + 1}"], "same") for i in range(count)]
    return _with(nodes, [weights("s", 16, 16), tensor("c", 0, np.float32)], f"t{count}")


def wide(random: Random) -> Model:
    """Return a model with thousands of inputs, outputs or constants."""
    count, kind = random.choice((300, 3000)), random.randrange(3)
    model = mlp()
    if kind == 0:
        model.graph.input.extend(_value(f"more{i}", FLOAT, [1]) for i in range(count))
    elif kind == 1:
        model.graph.initializer.extend(tensor(f"more{i}", i, np.float32) for i in range(count))
    else:
        names = [f"more{i}" for i in range(count)]
        model.graph.node.extend(_node("Identity", ["x"], [name]) for name in names)
        model.graph.output.extend(_value(name, FLOAT, ["N", 16]) for name in names)
    return model


GRAPHS: dict[str, Callable[[Random], Model]] = {
    "huge-constant": huge_constant,
    "doubling": doubling,
    "live-doubling": live_doubling,
    "crash-division": crash_division,
    "crash-reshape": crash_reshape,
    "many-nodes": many_nodes,
    "deep-bodies": deep_bodies,
    "deep-functions": deep_functions,
    "endless-loop": endless_loop,
    "growing-loop": growing_loop,
    "huge-operator": huge_operator,
    "bad-constants": bad_constants,
    "strings": strings,
    "shared": shared,
    "wide": wide,
}
