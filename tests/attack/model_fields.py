"""Damage to single fields of a valid model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .bases import texts
from .judge import HTML, LOG_COMMAND, SECRET

Model = onnx.ModelProto

NAMES: tuple[Callable[[Random], str], ...] = (
    lambda random: "",
    lambda random: "\x1b]0;owned\x07\x1b[31mred",
    lambda random: "a\u202egnp.exe",
    lambda random: "nul\0name",
    lambda random: f"line\n{LOG_COMMAND}\n",
    lambda random: HTML,
    lambda random: "c1\x9b31m\x85next",
    lambda random: "\r\roverwritten",
    lambda random: "x" * random.choice((500, 10_000, 1_000_000)),
    lambda random: "../" * 20 + "etc/passwd",
    lambda random: "]]>&quot;<!--\"'`$(touch owned)",
    lambda random: "| a | b |\n|---|---|",
    lambda random: "[link=http://evil]click[/link] [bold]",
    lambda random: "{{ 7 * 7 }}{% raw %}%s%n",
    lambda random: "x",
    lambda random: "\u2028\u2066\ufeff",
    lambda random: "/" + "a/" * 3000,
)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _a_graph(random: Random, model: Model) -> onnx.GraphProto:
    return random.choice(list(_graphs(model.graph)))


def _rename(model: Model, old: str, new: str) -> None:
    for graph in _graphs(model.graph):
        for node in graph.node:
            node.input[:] = [new if name == old else name for name in node.input]
            node.output[:] = [new if name == old else name for name in node.output]
        for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
            value.name = new if value.name == old else value.name


def names(random: Random, model: Model, folder: Path) -> None:
    """Rename nodes, tensors, axes, operators or texts to what a terminal, a page or a CI log would interpret."""
    for _ in range(random.randint(1, 3)):
        new = random.choice(NAMES)(random)
        node = random.choice(_a_graph(random, model).node)
        what = random.randrange(9)
        if what == 0:
            node.name = new
        elif what == 1 and node.output:
            _rename(model, node.output[0], new)
        elif what == 2 and node.input:
            _rename(model, random.choice(node.input), new)
        elif what == 3:
            model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = new
        elif what == 4:
            node.op_type = new
        elif what == 5:
            node.domain = new
            model.opset_import.append(helper.make_opsetid(new, 1))
        elif what == 6:
            model.producer_name = model.doc_string = model.graph.name = model.graph.doc_string = node.doc_string = new
        elif what == 7:
            model.metadata_props.add(key=new, value=random.choice(NAMES)(random))
        elif node.attribute:
            random.choice(node.attribute).name = new


def initializer_missing(random: Random, model: Model, folder: Path) -> None:
    graph = random.choice([g for g in _graphs(model.graph) if g.initializer])
    del graph.initializer[random.randrange(len(graph.initializer))]


def initializer_twice(random: Random, model: Model, folder: Path) -> None:
    graph = random.choice([g for g in _graphs(model.graph) if g.initializer])
    copy = graph.initializer.add()
    copy.CopyFrom(random.choice(graph.initializer[:-1]))
    if random.random() < 0.5:
        del copy.dims[:]


def cycle(random: Random, model: Model, folder: Path) -> None:
    """Let a node read its own result, or that of a later node."""
    nodes = _a_graph(random, model).node
    at = random.randrange(len(nodes))
    later = random.choice(nodes[at:])
    if nodes[at].input:
        nodes[at].input[random.randrange(len(nodes[at].input))] = later.output[0]


def order(random: Random, model: Model, folder: Path) -> None:
    """Shuffle the nodes."""
    graph = _a_graph(random, model)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node]
    random.shuffle(nodes)
    del graph.node[:]
    graph.node.extend(nodes)


def _a_tensor(random: Random, model: Model) -> TensorProto:
    found: list[TensorProto] = [t for g in _graphs(model.graph) for t in g.initializer]
    return random.choice(found)


def data_type(random: Random, model: Model, folder: Path) -> None:
    """Give a tensor, or an input, an element type that does not exist or does not fit."""
    new = random.choice((0, 8, 14, 16, 17, 23, 24, 25, 26, 27, 99, 2**31 - 1, -1))
    if random.random() < 0.6:
        _a_tensor(random, model).data_type = new
    else:
        value = random.choice((*model.graph.input, *model.graph.output))
        value.type.tensor_type.elem_type = new


def raw_size(random: Random, model: Model, folder: Path) -> None:
    """Let the bytes of a tensor not fit its type and shape."""
    tensor = _a_tensor(random, model)
    raw = tensor.raw_data or b"\0" * 8
    tensor.raw_data = random.choice((b"", raw[:-1], raw[: len(raw) // 2], raw + b"\0", raw * 3))
    if random.random() < 0.3:
        tensor.float_data.extend([1.0, 2.0])


DIMS = (-1, 0, -(2**63), 2**31, 2**40, 2**62, 2**63 - 1, -7, 1)


def dims(random: Random, model: Model, folder: Path) -> None:
    """Give a tensor dimensions that are negative or huge."""
    tensor = _a_tensor(random, model)
    if tensor.dims and random.random() < 0.7:
        tensor.dims[random.randrange(len(tensor.dims))] = random.choice(DIMS)
    else:
        tensor.dims.extend(random.choice(DIMS) for _ in range(random.choice((1, 2, 70))))


def input_dims(random: Random, model: Model, folder: Path) -> None:
    """Give an input or an output dimensions that are negative, zero or huge, or no shape."""
    value = random.choice((*model.graph.input, *model.graph.output))
    shape = value.type.tensor_type.shape
    kind = random.randrange(4)
    if kind == 0:
        value.type.tensor_type.ClearField("shape")
    elif kind == 1:
        shape.dim.add().dim_value = random.choice(DIMS)
    else:
        for dim in random.sample(list(shape.dim), random.randint(1, len(shape.dim))):
            dim.dim_value = random.choice(DIMS)


def opsets(random: Random, model: Model, folder: Path) -> None:
    kind = random.randrange(5)
    if kind == 0:
        del model.opset_import[:]
    elif kind == 1:
        model.opset_import[0].version = random.choice((0, 1, 5, 6, 28, 29, 999, -1, 2**62))
    elif kind == 2:
        model.opset_import.append(helper.make_opsetid("", random.choice((7, 13, 22))))
    elif kind == 3:
        model.opset_import[0].domain = "not.there"
    else:
        model.opset_import.append(helper.make_opsetid(random.choice(NAMES)(random), 1))


def ir_version(random: Random, model: Model, folder: Path) -> None:
    model.ir_version = random.choice((0, 1, 2, 3, 4, 12, 13, 14, 99, 2**31, -1, 2**62))


def operator(random: Random, model: Model, folder: Path) -> None:
    """Name an operator that does not exist, or another one."""
    node = random.choice(_a_graph(random, model).node)
    node.op_type = random.choice(
        ("NotThere", "", "Conv", "Loop", "If", "Reshape", "SequenceMap", "Constant", "LSTM", "Scan", "Resize", "Einsum")
    )
    node.domain = random.choice(("", "", "ai.onnx", "com.microsoft", "ai.onnx.ml", "not.there"))


def arity(random: Random, model: Model, folder: Path) -> None:
    """Add or remove inputs and outputs of a node."""
    node = random.choice(_a_graph(random, model).node)
    kind = random.randrange(5)
    if kind == 0:
        del node.input[:]
    elif kind == 1:
        node.input.extend([*node.input, ""] * random.choice((1, 20)))
    elif kind == 2:
        del node.output[:]
    elif kind == 3:
        node.output.extend(f"more{i}" for i in range(random.choice((1, 50))))
    elif node.input:
        node.input[random.randrange(len(node.input))] = ""


def attributes(random: Random, model: Model, folder: Path) -> None:
    """Give an attribute another type or an impossible value."""
    node = random.choice(_a_graph(random, model).node)
    known = [attribute.name for attribute in node.attribute] or ["axis", "perm", "body", "value", "to", "keepdims"]
    name = random.choice(known)
    kept = [a for a in node.attribute if a.name != name or random.random() < 0.1]
    del node.attribute[:]
    node.attribute.extend(kept)
    values: tuple[Any, ...] = (
        2**62,
        -(2**63),
        0.5,
        float("nan"),
        "text",
        b"\xff",
        [1, 2, 3],
        [-1, 2**40],
        ["a"],
        [],
        numpy_tensor(),
    )
    value = random.choice(values)
    added = helper.make_attribute(name, value, attr_type=onnx.AttributeProto.INTS if value == [] else None)
    if random.random() < 0.3:
        added.type = random.choice(onnx.AttributeProto.AttributeType.values())
    if random.random() < 0.1:
        added.ref_attr_name = "nowhere"
    node.attribute.append(added)


def numpy_tensor() -> TensorProto:
    return numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3), "t")


def body(random: Random, model: Model, folder: Path) -> None:
    """Break a body of control flow: no outputs, other inputs, no nodes, a name from the outer graph, missing."""
    found = [(n, a) for g in _graphs(model.graph) for n in g.node for a in n.attribute if a.HasField("g")]
    if not found:
        model.graph.node.append(helper.make_node("If", [model.graph.input[0].name], ["unread"], "broken_if"))
        return
    node, attribute = random.choice(found)
    graph, kind = attribute.g, random.randrange(7)
    if kind == 0:
        del graph.output[:]
    elif kind == 1:
        graph.input.add().name = "extra"
    elif kind == 2:
        del graph.node[:]
    elif kind == 3:
        graph.node[0].output[0] = model.graph.input[0].name
    elif kind == 4:
        node.attribute.remove(attribute)
    elif kind == 5:
        attribute.ClearField("g")
    else:
        graph.output[0].name = "nowhere"


def value_info(random: Random, model: Model, folder: Path) -> None:
    """Declare wrong types and shapes of inner tensors."""
    outputs = [name for node in model.graph.node for name in node.output]
    for name in random.sample(outputs, min(len(outputs), 3)):
        shape = [random.choice((*DIMS, 3, 5)) for _ in range(random.randrange(6))]
        model.graph.value_info.append(helper.make_tensor_value_info(name, random.choice((1, 7, 3, 8, 10)), shape))


def interface(random: Random, model: Model, folder: Path) -> None:
    """Damage the list of inputs and outputs."""
    graph, kind = model.graph, random.randrange(8)
    if kind == 0:
        graph.input.append(graph.input[0])
    elif kind == 1:
        graph.output.append(graph.output[0])
    elif kind == 2:
        del graph.output[:]
    elif kind == 3:
        del graph.input[:]
    elif kind == 4:
        graph.output.add().name = "nowhere"
    elif kind == 5:
        graph.input.append(helper.make_tensor_value_info("unread", 1, [2**40]))
    elif kind == 6:
        graph.output[0].ClearField("type")
    else:
        graph.input.append(graph.output[0])


def no_graph(random: Random, model: Model, folder: Path) -> None:
    """Remove the graph, its nodes, or everything between inputs and outputs."""
    kind = random.randrange(3)
    if kind == 0:
        model.ClearField("graph")
    elif kind == 1:
        del model.graph.node[:]
    else:
        model.graph.output[0].CopyFrom(model.graph.input[0])
        del model.graph.node[:]


def numbers(random: Random, model: Model, folder: Path) -> None:
    """Put NaN, infinities, the largest numbers or numbers near zero into weights and scales."""
    tensors = [t for g in _graphs(model.graph) for t in g.initializer if t.data_type == TensorProto.FLOAT]
    tensor = random.choice(tensors)
    values = numpy_helper.to_array(tensor).copy().reshape(-1)
    new = random.choice((np.nan, np.inf, -np.inf, 3.4e38, 1e-45, 0.0, -1.0, -0.0))
    count = random.choice((1, len(values)))
    values[random.sample(range(len(values)), count)] = new
    tensor.CopyFrom(numpy_helper.from_array(values.reshape(tuple(tensor.dims)), tensor.name))


def special_tensors(random: Random, model: Model, folder: Path) -> None:
    """Add sparse, text and segmented initializers, and sequences and maps as inputs."""
    graph, kind = model.graph, random.randrange(5)
    if kind == 0:
        indices = numpy_helper.from_array(np.array([0, random.choice((1, -5, 2**40))], np.int64), "indices")
        values = numpy_helper.from_array(np.ones(2, np.float32), "sparse")
        graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [random.choice((4, -1, 2**50))]))
    elif kind == 1:
        graph.initializer.append(texts("texts", b"a", b"\xff\0", dims=[2]))
    elif kind == 2:
        _a_tensor(random, model).segment.begin = 3
    elif kind == 3:
        kind_of = helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [2]))
        graph.input.append(helper.make_value_info("sequence", kind_of))
    else:
        kind_of = helper.make_map_type_proto(7, helper.make_tensor_type_proto(1, [2]))
        graph.output.append(helper.make_value_info(graph.node[-1].output[0], kind_of))


RUBBISH = ("", "{", "null", "[]", "{}", '{"a": NaN}', "[" * 100_000, "9" * 5000, "\x1b[31m", "\0", "-1", '{"x": 1e999}')


def metadata(random: Random, model: Model, folder: Path) -> None:
    """Fill the properties that requant reads with rubbish."""
    keys = (
        "requant", "requant.transforms", "requant.version", "requant.options", "requant.ranges", "requant.compiled",
        "requant.state", "requant.runs_on",
        "requant.kernels", "requant.plan", "pkg.onnx.function", "quantization",
    )  # fmt: skip
    from requant.quantize.runtime.compiled_for import KEY
    from requant.transforms import METADATA_KEY
    from requant.transforms.externalize_weights import EXTERNAL
    from requant.transforms.inline_functions import ORIGIN
    from requant.transforms.insert_logging import FIRST_N, SUMMARIZE

    real = (KEY, METADATA_KEY, EXTERNAL, FIRST_N, SUMMARIZE)
    for _ in range(random.randint(1, 4)):
        model.metadata_props.add(key=random.choice((*real, *real, *keys)), value=random.choice(RUBBISH))
    if random.random() < 0.4:
        random.choice(model.graph.node).metadata_props.add(key=ORIGIN, value=random.choice(RUBBISH))


def external(random: Random, model: Model, folder: Path) -> None:
    """Store weights in files that are missing, short, outside, absolute, links, pipes or folders."""
    tensors = [t for g in _graphs(model.graph) for t in g.initializer]
    for tensor in random.sample(tensors, random.randint(1, len(tensors))):
        raw = numpy_helper.to_array(tensor).tobytes()
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in _external(random, raw, folder).items():
            tensor.external_data.add(key=key, value=value)


def _external(random: Random, raw: bytes, folder: Path) -> dict[str, str]:
    """Make a file for a tensor, and return how the tensor names it."""
    kind = random.randrange(14)
    (folder.parent / "secret.txt").write_text(SECRET * 4096)
    fixed = {"offset": "0", "length": str(len(raw))}
    if kind == 0:
        return {"location": "missing.bin", **fixed}
    if kind == 1:
        (folder / "short.bin").write_bytes(raw[: len(raw) // 2])
        return {"location": "short.bin", **fixed}
    if kind == 2:
        return {"location": random.choice(("/etc/passwd", "/dev/zero", "/proc/self/environ", "/dev/stdin")), **fixed}
    if kind == 3:
        return {"location": "../secret.txt", **fixed}
    if kind == 4:
        _fresh(folder / "link.bin").symlink_to("../secret.txt")
        return {"location": "link.bin", **fixed}
    if kind == 5:
        os.link(folder.parent / "secret.txt", _fresh(folder / "hard.bin"))
        return {"location": "hard.bin", **fixed}
    if kind == 6:
        os.mkfifo(_fresh(folder / "pipe.bin"))
        return {"location": "pipe.bin", **fixed}
    (folder / "good.bin").write_bytes(raw)
    return {
        7: {"location": "good.bin", "offset": "-1", "length": fixed["length"]},
        8: {"location": "good.bin", "offset": str(2**63), "length": fixed["length"]},
        9: {"location": "good.bin", "offset": "0", "length": str(random.choice((0, 1, 2**62, -1)))},
        10: {"location": "good.bin", "offset": "x", "length": "y"},
        11: {"location": random.choice(("", ".", "..", "a\0b", "good.bin/x", "\x1b[31m" + "x" * 600)), **fixed},
        12: {"offset": "0"},
        13: {"location": "good.bin", **fixed, "checksum": "wrong", "other": "\x1b"},
    }[kind]


def _fresh(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path


def scales(random: Random, model: Model, folder: Path) -> None:
    """Give quantization nodes impossible scales and zero points: wrong types, shapes, signs, NaN."""
    names = [n for node in model.graph.node if "Linear" in node.op_type for n in node.input[1:]]
    tensors = [t for t in model.graph.initializer if t.name in names]
    if not tensors:
        return numbers(random, model, folder)
    tensor = random.choice(tensors)
    shape = random.choice(((), (1,), (8,), (3,), (0,), (2, 2), tuple(tensor.dims)))
    dtype = random.choice((np.float32, np.float64, np.int8, np.uint8, np.int32, np.float16))
    value = random.choice((0, -1, np.nan, np.inf, 1e-45, 3e38, 255, 1))
    with np.errstate(all="ignore"):
        array = np.full(shape, value).astype(dtype)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return None


def function_table(random: Random, model: Model, folder: Path) -> None:
    """Break local functions: recursion, a missing one, two of a name, wrong signatures."""
    opset = [helper.make_opsetid("", 21), helper.make_opsetid("bad", 1)]
    kind = random.randrange(6)
    calls = {0: ["A"], 1: ["B"], 2: ["Missing"], 3: ["Relu"], 4: ["A"], 5: ["A", "A"]}[kind]
    if not any(o.domain == "bad" for o in model.opset_import):
        model.opset_import.append(helper.make_opsetid("bad", 1))
    inner = [helper.make_node(op, ["a"], [f"b{i}"], domain="bad") for i, op in enumerate(calls)]
    model.functions.append(helper.make_function("bad", "A", ["a"], ["b0"], inner, opset))
    if kind in (1, 3):
        back = [helper.make_node("A" if kind == 1 else "Relu", ["a"], ["b0"], domain="bad" if kind == 1 else "")]
        model.functions.append(helper.make_function("bad", "B", ["a", "extra"], ["b0"], back, opset))
    if kind == 4:
        model.functions.append(model.functions[-1])
    name = model.graph.input[0].name
    call = helper.make_node("A", [name] * random.randrange(4), ["called"], domain="bad")
    model.graph.node.insert(0, call)
    for node in list(model.graph.node)[1:]:
        node.input[:] = ["called" if given == name else given for given in node.input]


MUTATIONS: dict[str, Callable[[Random, Model, Path], None]] = {
    "names": names,
    "initializer-missing": initializer_missing,
    "initializer-twice": initializer_twice,
    "cycle": cycle,
    "order": order,
    "data-type": data_type,
    "raw-size": raw_size,
    "dims": dims,
    "input-dims": input_dims,
    "opsets": opsets,
    "ir-version": ir_version,
    "operator": operator,
    "arity": arity,
    "attributes": attributes,
    "body": body,
    "value-info": value_info,
    "interface": interface,
    "no-graph": no_graph,
    "numbers": numbers,
    "special-tensors": special_tensors,
    "metadata": metadata,
    "external": external,
    "scales": scales,
    "function-table": function_table,
}
