"""What loading refuses in one line, and what it mends."""

import itertools
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from requant import RequantError
from requant.calibration import Calibrator, open_session
from requant.calibration.model.file_tensor import FileTensor
from requant.quantize.model import files
from requant.quantize.model.files import load_model, size_on_disk
from requant.quantize.tools.inspect.inspect import inspect_model

TEXT = """<ir_version: 8, opset_import: ["" : 17, "l" : 1]>
g (float[N,4] x, bool c) => (float[N,4] y) <float[4] w = {1, 2, 3, 4}> {
    [mul] t = Mul(x, w)
    [call] u = l.Block(t)
    [branch] y = If(c) <
        then_branch = then () => (float[N,4] a) { [inside] a = Relu(u) },
        else_branch = else () => (float[N,4] b) { b = Identity(u) }
    >
}
<domain: "l", opset_import: ["" : 17]>
Block (a) => (b) { b = Sigmoid(a) }"""


def network() -> onnx.ModelProto:
    return onnx.parser.parse_model(TEXT)


def raw(proto: onnx.ModelProto, data: bytes) -> None:
    proto.graph.initializer[0].ClearField("float_data")
    proto.graph.initializer[0].raw_data = data


def call_itself(proto: onnx.ModelProto) -> None:
    proto.functions[0].node[0].domain, proto.functions[0].node[0].op_type = "l", "Block"
    proto.functions[0].opset_import.append(helper.make_opsetid("l", 1))


def call_often(proto: onnx.ModelProto) -> None:
    """Thirty functions, of which each calls the next one twice: 2^30 nodes."""
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("l", 1)]
    names = ["Block", *(f"F{number}" for number in range(30))]
    del proto.functions[:]
    for name, callee in itertools.pairwise(names):
        calls = [helper.make_node(callee, ["a"], ["t"], domain="l"), helper.make_node(callee, ["t"], ["b"], domain="l")]
        proto.functions.append(helper.make_function("l", name, ["a"], ["b"], calls, imports))
    last = [helper.make_node("Relu", ["a"], ["b"])]
    proto.functions.append(helper.make_function("l", names[-1], ["a"], ["b"], last, imports))


def set_fields(path: str, value: object) -> Callable[[onnx.ModelProto], None]:
    """Return a function that sets a field, or an element of it: ``graph.node.0.op_type``."""

    def spoil(proto: onnx.ModelProto) -> None:
        *way, last = path.split(".")
        place: object = proto
        for part in way:
            place = place[int(part)] if part.isdecimal() else getattr(place, part)  # type: ignore[index]
        if last.isdecimal():
            place[int(last)] = value  # type: ignore[index]
        else:
            setattr(place, last, value)

    return spoil


BROKEN: dict[str, tuple[Callable[[onnx.ModelProto], None], str]] = {
    "no-initializer": (lambda p: p.graph.ClearField("initializer"), "node 'mul' (Mul) reads 'w', which nothing"),
    "cycle": (set_fields("graph.node.0.input.0", "u"), "the nodes form a cycle with node 'mul' (Mul)"),
    "data-type-0": (set_fields("graph.initializer.0.data_type", 0), "tensor 'w' has no data type"),
    "data-type-99": (set_fields("graph.initializer.0.data_type", 99), "tensor 'w' has the unknown data type 99"),
    "negative-length": (set_fields("graph.initializer.0.dims.0", -4), "tensor 'w' has the shape [-4]"),
    "overflow": (set_fields("graph.initializer.0.dims.0", 2**62), "which is not possible"),
    "too-few-entries": (lambda p: p.graph.initializer[0].float_data.pop(), "has 3 entries of float_data, but"),
    "too-much-raw-data": (lambda p: raw(p, bytes(17)), "has 17 entries of raw_data, but its type and shape need 16"),
    "type-99-of-an-input": (set_fields("graph.input.0.type.tensor_type.elem_type", 99), "not a valid ONNX model"),
    "unknown-operator": (set_fields("graph.node.0.op_type", "Mull"), "No Op registered for Mull"),
    "two-values-of-a-name": (set_fields("graph.node.0.output.0", "y"), "'y'"),
    "two-nodes-of-one-tensor": (
        lambda p: p.graph.node.extend(
            onnx.helper.make_node(*each)
            for each in (("Relu", ["x"], ["a"]), ("Relu", ["b"], ["a"]), ("Neg", ["a"], ["b"]))
        ),
        "two nodes compute the tensor 'a'",
    ),
    "reference-outside-of-a-function": (
        lambda p: p.graph.node[1].attribute.append(
            onnx.AttributeProto(name="k", ref_attr_name="k", type=onnx.AttributeProto.FLOAT)
        ),
        "attribute 'k' of node 'call' (Block) refers to an attribute of a function",
    ),
    "a-circle-of-functions": (call_itself, "functions of the model call each other in a circle: l.Block -> l.Block"),
    "functions-without-end": (call_often, "would become more than 200,000 nodes"),
}


@pytest.mark.parametrize(("spoil", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_model_is_refused_in_one_line(
    tmp_path: Path, spoil: Callable[[onnx.ModelProto], None], message: str
) -> None:
    path, proto = tmp_path / "m.onnx", network()
    spoil(proto)
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(RequantError) as caught:
        inspect_model(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: ")
    assert message in said
    assert "\n" not in said
    assert len(said) < 400


def test_a_name_must_be_utf_8_but_a_remark_is_repaired(tmp_path: Path) -> None:
    path, proto = tmp_path / "m.onnx", network()
    proto.graph.doc_string = proto.producer_name = "caf\xe9"
    broken = "caf\xe9".encode()
    path.write_bytes(proto.SerializeToString().replace(broken, b"caf\xff\xfe"))
    assert load_model(path).producer_name == "caf\ufffd\ufffd"
    proto.graph.node[0].name = "na\xefve"
    path.write_bytes(proto.SerializeToString().replace("na\xefve".encode(), b"na\xff\xfeve"))
    with pytest.raises(RequantError, match=r"the field name of a NodeProto is not UTF-8: 'na\ufffd\ufffdve'"):
        load_model(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"PK\x03\x04" + bytes(40), "looks like a zip archive, as torch.save writes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12", "'git lfs pull' gets the file"),
        (b"\x28\0\0\0ORTM" + bytes(40), "looks like a model in the ORT format"),
        (b"\x10\0\0\0\0\0\0\0{" + b'"w": {}}', "looks like a safetensors file"),
        (b"hello, I am no model at all", "looks like text"),
    ],
    ids=["empty", "zip", "lfs", "ort", "safetensors", "text"],
)
def test_a_file_of_another_format_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(RequantError, match="not an ONNX model") as caught:
        load_model(tmp_path / "m.onnx")
    assert message in str(caught.value)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.onnx")
    for read in (load_model, open_session, Calibrator):
        with pytest.raises(RequantError, match="is a FIFO, not a model"):
            read(tmp_path / "m.onnx")
    assert stat.S_ISFIFO((tmp_path / "m.onnx").stat().st_mode)


def test_graphs_that_lie_too_deeply_in_each_other(tmp_path: Path) -> None:
    body = b"\x0a\x01y"  # an output name; each level wraps it as attribute.g of a node of a graph
    for _ in range(60):
        for tag in (b"\x32", b"\x2a", b"\x0a"):
            size, head = len(body), b""
            while size > 127:
                head, size = head + bytes([size & 127 | 128]), size >> 7
            body = tag + head + bytes([size]) + body
    size, head = len(body), b""
    while size > 127:
        head, size = head + bytes([size & 127 | 128]), size >> 7
    (tmp_path / "m.onnx").write_bytes(b"\x08\x08\x3a" + head + bytes([size]) + body)
    with pytest.raises(RequantError, match="its graphs lie inside each other too deeply"):
        load_model(tmp_path / "m.onnx")


# ------------------------------------------------------------------------------------------------------- mending


def test_a_negative_length_is_a_free_axis(tmp_path: Path) -> None:
    proto = network()
    inner = proto.graph.node[2].attribute[0].g.output[0]
    proto.graph.value_info.append(helper.make_tensor_value_info("t", 1, ["N", 4]))
    for value in (proto.graph.input[0], proto.graph.output[0], proto.graph.value_info[0], inner):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    onnx.save(proto, tmp_path / "m.onnx")
    model = load_model(tmp_path / "m.onnx")
    assert [str(value.shape) for value in (model.graph.inputs[0], model.graph.outputs[0])] == ["[None,4]", "[None,4]"]
    inspect_model(tmp_path / "m.onnx")


def test_models_that_only_the_runtime_runs_are_mended(tmp_path: Path) -> None:
    """Nodes in any order, no import of com.microsoft, the long name of the standard domain, a graph without a name."""
    proto = network()
    proto.graph.node.append(helper.make_node("Gelu", ["y"], ["z"], domain="com.microsoft"))
    proto.graph.output.append(helper.make_tensor_value_info("z", 1, None))
    proto.graph.name, proto.opset_import[0].domain = "", "ai.onnx"
    nodes = list(reversed(proto.graph.node))
    fresh = onnx.GraphProto(node=nodes)
    del proto.graph.node[:]
    proto.graph.node.extend(fresh.node)
    old = numpy_helper.from_array(np.zeros(4, np.float32), "w")
    proto.graph.initializer.insert(0, old)
    onnx.save(proto, tmp_path / "m.onnx")
    feed = {"x": np.ones((1, 4), np.float32), "c": np.array(True)}
    expected = open_session(tmp_path / "m.onnx").run(None, feed)
    model = load_model(tmp_path / "m.onnx")
    assert [node.op_type for node in model.graph] == ["Mul", "Block", "If", "Gelu"]
    mended = open_session(files.serialize(model).data).run(None, feed)
    assert all(np.array_equal(one, other) for one, other in zip(expected, mended, strict=True))


def test_a_sparse_initializer_must_fit_its_size(tmp_path: Path) -> None:
    proto = network()
    values = numpy_helper.from_array(np.ones(1, np.float32), "w")
    indices = numpy_helper.from_array(np.zeros(1, np.int64), "i")
    del proto.graph.initializer[:]
    proto.graph.sparse_initializer.append(onnx.SparseTensorProto(values=values, indices=indices, dims=[2**40]))
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(RequantError, match=r"sparse initializer 'w' cannot be made dense: 12 bytes would have the sh"):
        load_model(tmp_path / "m.onnx")


# ------------------------------------------------------------------------------------------- files that change


def external(tmp_path: Path) -> Path:
    proto = network()
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.arange(4, dtype=np.float32), "w"))
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.data")
    return tmp_path / "m.onnx"


def test_weights_in_a_file_that_shrinks_are_an_error_and_no_signal(tmp_path: Path) -> None:
    path = external(tmp_path)
    tensor = load_model(path).graph.initializers["w"].const_value
    assert isinstance(tensor, FileTensor)
    assert tensor.numpy().tolist() == [0, 1, 2, 3]
    assert tensor.tobytes() == tensor.numpy().tobytes()
    os.truncate(tmp_path / "m.data", 8)
    for read in (tensor.numpy, tensor.tobytes):
        with pytest.raises(RequantError, match="ends inside the weights 'w': the file became shorter"):
            read()
    with pytest.raises(RequantError, match="ends inside 'w': 16 bytes are needed"):
        load_model(path)


def test_an_array_in_use_is_not_read_twice_and_not_kept(tmp_path: Path) -> None:
    tensor = load_model(external(tmp_path)).graph.initializers["w"].const_value
    assert tensor is not None
    part = tensor.numpy()[1:]
    assert np.shares_memory(part, tensor.numpy())
    assert not tensor.numpy().flags.writeable
    del part
    (tmp_path / "m.data").write_bytes(np.ones(4, np.float32).tobytes())
    assert tensor.numpy().tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", [ir.DataType.INT4, ir.DataType.UINT2, ir.DataType.BFLOAT16, ir.DataType.BOOL])
def test_a_tensor_in_a_file_equals_the_mapped_one(tmp_path: Path, kind: ir.DataType) -> None:
    held = ir.Tensor((np.arange(15) % 2).reshape(5, 3).astype(kind.numpy()), dtype=kind)
    (tmp_path / "w").write_bytes(b"before" + held.tobytes())
    mapped = ir.ExternalTensor("w", 6, None, kind, shape=ir.Shape([5, 3]), name="w", base_dir=tmp_path)
    read = FileTensor.of(mapped, tmp_path)
    assert read.numpy().dtype == mapped.numpy().dtype
    assert (read.numpy() == mapped.numpy()).all()
    assert read.tobytes() == held.tobytes()


def test_external_data_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    path = external(tmp_path)
    (tmp_path / "m.data").unlink()
    os.mkfifo(tmp_path / "m.data")
    with pytest.raises(RequantError, match="external data of 'w' is missing"):
        load_model(path)
    assert size_on_disk(path) == path.stat().st_size
