"""What every registered transform promises, on every sample model and on small models with a difficulty each."""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from math import prod, sqrt
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx_ir.passes.common import NameFixPass

from requant.calibration.model.mend import mend
from requant.transforms import METADATA_KEY, REGISTRY, parse, run, signature, verify
from requant.transforms.graphs.queries import every_node, node_name

# What a transform needs: the parameters of its step, and the pipelines that bring a float model to its stage.
# {log} is a file that names every node of the model at that stage whose range a log can freeze, {ranges} one of all
# float tensors of the graph; {node} is the first node of the model, {outputs} are its outputs.
WEIGHTS = "quantize_weights(minimum_size=1)"
QUANTIZE = f"{WEIGHTS} quantize_nodes"
LOG = "min_max_log_file={log}"
FREEZE = f"freeze_max({LOG}) freeze_min({LOG}) freeze_requantization_ranges({LOG})"
FUSE = "fuse_quantized_conv_and_requantize fuse_quantized_matmul_and_requantize"
OPTIONS = {
    "convert_opset": "to=18",
    "extract_subgraph": 'outputs="{outputs}"',
    "freeze_max": LOG,
    "freeze_min": LOG,
    "freeze_requantization_ranges": LOG,
    "insert_logging": "show_name=true",
    "insert_qdq": "min_max_log_file={ranges}",
    "quantize_weights": "minimum_size=1",
    "remove_attribute": "attribute_name=alpha",
    "remove_nodes": "op=Identity, op=Dropout",
    "rename_attribute": "old_attribute_name=kernel, new_attribute_name=kernel_shape",
    "rename_node": 'old_node_name="{node}", new_node_name=renamed',
    "rename_op": "old_op_name=Relu, new_op_name=my.domain.Relu",
}
PREPARE = {
    "quantize_nodes": [WEIGHTS],
    "insert_logging": [QUANTIZE],
    "freeze_max": [QUANTIZE],
    "freeze_min": [QUANTIZE],
    "freeze_requantization_ranges": [QUANTIZE],
    "fuse_quantized_conv_and_requantize": [QUANTIZE, FREEZE],
    "fuse_quantized_matmul_and_requantize": [QUANTIZE, FREEZE],
    "insert_qdq": ["convert_opset"],
    "qoperator_to_qdq": [QUANTIZE, FREEZE, FUSE],
    "remove_qdq": [WEIGHTS],
    "rerange_quantized_concat": [QUANTIZE, FREEZE, FUSE],
}
RENAMING = {"obfuscate_names", "rename_node"}
RECORDS = {
    "ReduceMax": "__max:[2]",
    "ReduceMin": "__min:[-1]",
    "RequantizationRange": "__requant_min_max:[-3][4]",
}

HEADER = '<ir_version: 8, opset_import: ["" : 17, "my.domain" : 1]>\n'
SMALL = {
    "if-body": """g (float[N,4] x, bool c) => (float[N,4] y)
        <float[4] w = {1, 2, 3, 4}, float[4] same = {1, 2, 3, 4},
         float[4,4] m = {1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 1, 2, 0, 0, 0, 1}> {
        p = MatMul(x, m)
        a = Mul(p, w)
        copy = Identity(a)
        y = If(c) <
            then_branch = then () => (float[N,4] t) { b = Identity(copy)  t = Mul(b, same) },
            else_branch = else () => (float[N,4] e) {
                k = Constant <value = float[4] {4, 3, 2, 1}> ()  d = Relu(copy)  e = Add(d, k)
            }
        >
    }""",
    "unknown-domain": """g (float[N,4] x) => (float[N,4] y)
        <float[4] w = {1, 2, 3, 4}, float[4,4] m = {1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 1, 2, 0, 0, 0, 1}> {
        p = MatMul(x, m)
        a = my.domain.Norm <level = 3> (p, w)
        b = my.domain.Norm <level = 3> (p, w)
        k = my.domain.Table <each = body (float[4] u) => (float[4] v) {
            i = Identity(u)  j = Relu(i)  h = Relu(i)  v = Add(j, h)
        }> (w)
        s = Shape(a)
        t = Add(a, b)
        r = Reshape(t, s)
        y = Mul(r, k)
    }""",
    "inner-output": """g (float[N,2,4,4] x) => (float[N,2,4,4] y, float[N,2,4,4] inner, float[N,2,4,4] copy)
        <float[2,2,1,1] w = {1, 2, 3, 4}, float[2] one = {2, 1}, float[2] zero = {0, 1}> {
        inner = Conv(x, w)
        copy = Identity(inner)
        n = BatchNormalization(copy, one, zero, zero, one)
        d = Relu(n)
        e = Relu(n)
        y = Add(d, e)
    }""",
    "output-is-input": """g (float[N,4] x, float[4] z) => (float[N,4] y, float[N,4] copy) {
        copy = Identity(x)
        a = Identity(copy)
        y = Identity(a)
    }""",
    "shared-weights": """g (float[N,2,4,4] x) => (float[N,2,4,4] y, float[N,2,4,4] z)
        <float[2,2,1,1] w = {1, 2, 3, 4}, float[2] b = {1, 2},
         float[2] g1 = {1, 3}, float[2] b1 = {0, 1}, float[2] m1 = {1, 2}, float[2] v1 = {2, 3},
         float[1,2,1,1] s = {0.5, 3}> {
        c = Conv(x, w, b)
        n = BatchNormalization(c, g1, b1, m1, v1)
        r = Relu(n)
        d = Conv(r, w, b)
        y = Mul(d, s)
        z = Conv(y, w, b)
    }""",
    "denormals": """g (float[N,3] x) => (float[N,3] y, float[N,3] l)
        <float[3,3] w = {1, 1e-40, 2, -1e-39, 3, 0, 4, 5, 1e-38}, float[3] tiny = {1e-40, 1e-40, 1e-40}> {
        turned = Transpose <perm = [1, 0]> (w)
        k = Constant <value = float[3] {2, 1e-42, 3}> ()
        p = MatMul(x, turned)
        y = Mul(p, k)
        z = Relu(x)
        a = Add(z, tiny)
        l = Log(a)
    }""",
    "grouped-transpose": """g (float[N,4,3,3] x) => (float[N,6,3,3] y)
        <float[4,3,1,1] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12},
         float[6] g1 = {1, 2, 3, 4, 5, 6}, float[6] b1 = {0, 1, 0, 1, 0, 1}, float[6] m1 = {1, 2, 3, 3, 2, 1},
         float[6] v1 = {1, 2, 3, 4, 5, 6}, float[6,1,1] t = {1, 2, 3, 4, 5, 6}> {
        c = ConvTranspose <group = 2> (x, w)
        n = BatchNormalization(c, g1, b1, m1, v1)
        y = Add(n, t)
    }""",
    "matrices": """g (float[N,3] x) => (float[N,2] y)
        <float[2,3] w = {1, 2, 3, 4, 5, 6}, float[1,2] b = {1, 2}, float[2] s = {3, 4}, float half = {0.5},
         float[2,2] m = {1, 2, 3, 4}> {
        a = Gemm <transB = 1, alpha = 0.5, beta = 3.0> (x, w, b)
        c = Mul(s, a)
        d = Add(c, half)
        e = MatMul(d, m)
        y = Mul(e, s)
    }""",
    "constants": """g (float[N,2,3] x) => (float[M,6] y) <int64 one = {1}, float[6] w = {1, 2, 3, 4, 5, 6}> {
        s = Shape(x)
        width = Gather(s, one)
        axes = Constant <value = int64[1] {0}> ()
        three = Constant <value_ints = [3]> ()
        n = Unsqueeze(width, axes)
        six = Mul(n, three)
        open = Constant <value_ints = [-1]> ()
        target = Concat <axis = 0> (open, six)
        flat = Reshape(x, target)
        q = Sqrt(w)
        half = Constant <value_float = 0.5> ()
        h = Mul(q, half)
        y = Mul(flat, h)
    }""",
    "products": """g (float[N,2,2,2] x, float[2,N] t) => (float[N,3] y, float[N,2,2,2] z)
        <float[2,2,3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float[3,3] m = {1, 2, 3, 4, 5, 6, 7, 8, 9},
         float[1,3] row = {1, 2, 3}> {
        z = Einsum <equation = "nqhd,nkhd->nhqk"> (x, x)
        e = Einsum <equation = "nqhd,hdm->nm"> (x, w)
        f = Gemm <alpha = 0.5, beta = 3.0> (e, m, row)
        s = Einsum <equation = "dn->n"> (t)
        k = Constant <value_ints = [-1, 1]> ()
        r = Reshape (s, k)
        y = Gemm <transB = 1> (f, m, r)
    }""",
    "equal-outputs": """g (float[N] x) => (float[N] y, float[N] z, float[N] u) {
        y = Relu(x)
        z = Relu(x)
        u = Relu(x)
    }""",
}
OLD = """<ir_version: 4, opset_import: ["" : 8]> g (float[N,2,4,4] x) => (float[N,2,4] y)
    <float[2,2,1,1] w = {1, 2, 3, 4}, float[2] one = {2, 1}, float[2] zero = {0, 1}> {
    [c] c = Conv(x, w)
    [n] n = BatchNormalization(c, one, zero, zero, one)
    [r] r = Clip <min = 0.0, max = 6.0> (n)
    [s] s = Slice <axes = [2], starts = [0], ends = [1]> (r)
    [y] y = Squeeze <axes = [2]> (s)
}"""
FUSED = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> g (float[N,2,4,4] x) => (float[N,3,4] y)
    <int64[1] one = {1}, float[1,2,1,1] w = {1, 2}, float[1] b = {1}, float[3,4] v = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> {
    c = com.microsoft.FusedConv <activation = "Relu"> (x, w, b)
    s = Squeeze (c, one)
    y = com.microsoft.FusedMatMul <transB = 1, alpha = 0.5> (v, s)
}"""
DYNAMIC = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> g (float[N,4] x) => (float[N,2] y, float[N,2] z)
    <int8[4,2] w = {1, -2, 3, 4, 5, 6, 7, 8}, int8 wz = {1}, float[2] ws = {0.5, 0.25}, float[2] b = {1, 2},
     uint8[1,1,2,2] k = {130, 120, 128, 0}, uint8 kz = {128}, float ks = {0.125}, int64[4] image = {-1, 1, 2, 2}> {
    q, s, p = DynamicQuantizeLinear (x)
    product = MatMulInteger (q, w, p, wz)
    cast = Cast <to = 1> (product)
    scales = Mul (s, ws)
    scaled = Mul (cast, scales)
    y = Add (scaled, b)
    u = com.microsoft.DynamicQuantizeMatMul (x, w, ws, , b)
    pixels = Reshape (q, image)
    sums = ConvInteger <kernel_shape = [2, 2]> (pixels, k, p, kz)
    real = Cast <to = 1> (sums)
    once = Mul (real, s)
    twice = Mul (once, ks)
    flat = Flatten (twice)
    z = Add (u, flat)
}"""
FUNCTIONS = """<ir_version: 8, opset_import: ["" : 17, "blocks" : 1]> g (float[N,4] x) => (float[N,4] y)
    <float[4,4] w = {1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 1, 2, 0, 0, 0, 1}, float[4] b = {1, 2, 3, 4}> {
    a = blocks.Dense (x, w, b)
    m = MatMul (a, w)
    y = blocks.Dense (m, w, b)
}
<domain: "blocks", opset_import: ["" : 17]>
Dense (x, w, b) => (y) { p = MatMul (x, w)  s = Add (p, b)  y = Relu (s) }"""
CONTROL = """<ir_version: 8, opset_import: ["" : 17, "blocks" : 1]>
g (float[2,4] x, bool c, int64 n) => (float[2,4] y, float[2,4] z, float[2,4] s)
    <float[4,4] w = {1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 1, 2, 0, 0, 0, 1}, float[4] b = {1, 2, 3, 4}> {
    turned = blocks.Turn <order = [1, 0]> (x)
    p = blocks.Dense (turned, w, b)
    y = If(c) <
        then_branch = then () => (float[2,4] t) {
            i = Identity(p)  k = Constant <value_float = 1.0> ()  j = Mul(i, k)  o = Max(j, k)  t = Relu(o)
        },
        else_branch = else () => (float[2,4] e) { a = MatMul(p, w)  d = Mul(a, b)  e = Add(d, b) }
    >
    z = Loop(n, c, y) <
        body = step (int64 i, bool go, float[2,4] h) => (bool on, float[2,4] r) {
            on = Identity(go)  m = MatMul(h, w)  q = Mul(m, b)  r = Tanh(q)
        }
    >
    last, s = Scan <num_scan_inputs = 1, body = each (float[4] total, float[4] row) => (float[4] sum, float[4] out) {
        sum = Add(total, row)  a = Relu(sum)  v = Relu(sum)  out = Add(a, v)
    }> (b, z)
}
<domain: "blocks", opset_import: ["" : 17]>
Dense (x, w, b) => (y) { p = MatMul (x, w)  f = Dropout (p)  s = Add (f, b)  y = Relu (s) }
<domain: "blocks", opset_import: ["" : 17]>
Turn <order> (x) => (y) {
    a = Transpose <perm: ints = @order> (x)  b = Transpose <perm: ints = @order> (a)  y = Identity (b)
}"""
LARGE = {"digits_mobile", "digits_transformer"}
ALIKE = {
    *("attention-23", "hard-swish-22", "imports-two-names", "listed-ir8"),
    *("output-without-type", "paddle-hard-swish", "resize-10", "resize-11"),
}
"""Exports that differ little from others, which stand for them in a run without slow tests."""
FOLDER = Path(__file__).parents[2] / "sample_models"
sys.path.insert(0, str(FOLDER))
exports = importlib.import_module("exports")
sys.path.remove(str(FOLDER))
SAMPLES = sorted(FOLDER.glob("*.onnx"))


def exported(name: str) -> ir.Model:
    """Return a model of `sample_models/exports.py`, as `load_model` reads it."""
    proto = exports.EXPORTS[name].build()
    mend(proto)
    model: ir.Model = ir.from_proto(proto)
    NameFixPass()(model)
    return model


MODELS: dict[str, Callable[[], ir.Model]] = {path.stem: partial(ir.load, path) for path in SAMPLES}
MODELS |= {name: partial(ir.from_onnx_text, HEADER + text) for name, text in SMALL.items()}

MODELS["old-opset"] = partial(ir.from_onnx_text, OLD)
MODELS["fused"] = partial(ir.from_onnx_text, FUSED)
MODELS["dynamic"] = partial(ir.from_onnx_text, DYNAMIC)
MODELS["functions"] = partial(ir.from_onnx_text, FUNCTIONS)
MODELS["control-flow"] = partial(ir.from_onnx_text, CONTROL)

# a pipeline raises IR version 3 before its first step, which no transform counts
MODELS |= {name: partial(exported, name) for name in exports.EXPORTS if name != "listed-ir3"}

# `my.domain` has no kernel; the runtime refuses a Resize whose empty scales are an input
RUNNABLE = sorted(MODELS.keys() - {"unknown-domain", "resize-13-listed"})

# Models without a product of constant weights have no range to freeze, and nothing to fuse afterwards.
RANGELESS = {
    "constants",
    "control-flow",
    "denormals",
    "dynamic",
    "equal-outputs",
    "fused",
    "grouped-transpose",
    "old-opset",
    "output-is-input",
    "products",
    *("functions-18", "listed-ir6", "listed-ir8", "output-without-type", "paddle-hard-swish"),
    *("resize-10", "resize-11", "resize-11-listed", "resize-13-listed"),
}


# Other names of a transform, parts of one, and those that do nothing: small models show that they are.
OTHER_NAMES = {
    *("backport_concatv2", "backport_tensor_array_v3", "remove_control_dependencies", "remove_device", "set_device"),
    *("fuse_convolutions", "fuse_resize_and_conv", "fuse_resize_pad_and_conv", "mkl_fuse_pad_and_conv"),
    *("fold_convolutionwithbias_mul", "fold_old_batch_norms", "fold_subdivmul_batch_norms", "sparsify_gather"),
}


def pairs() -> list[tuple[str, str]]:
    """Return all transforms and models but the models that never reach a transform's stage.

    Model by model, so that one worker reads a model and brings it to a stage once.
    """
    made = [(n, m) for m in sorted(MODELS) for n in sorted(REGISTRY) if m not in RANGELESS or not wants_log(n)]
    return [(name, model) for name, model in made if not (name in OTHER_NAMES and model in LARGE)]


def wants_log(name: str) -> bool:
    return any("{log}" in text for text in (OPTIONS.get(name, ""), *PREPARE.get(name, [])))


def keeps_values(name: str) -> bool:
    """Whether outputs of the same names have the same values afterwards."""
    return not REGISTRY[name].changes_values and name != "rename_node"


each_pair = pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param(name, model, id=f"{name}-{model}", marks=[pytest.mark.slow] if model in LARGE | ALIKE else [])
        for name, model in pairs()
    ],
)


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the logs be written to a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("logs"))
        yield


def applied(pipeline: str, model: ir.Model, log: Path, *, check: bool = True) -> tuple[ir.Model, int]:
    """Run a pipeline; return the model without the record of it, and the rewrites of the first step."""
    if "{log}" in pipeline and not log.exists():
        log.write_text("\n".join(records(model)))
    if "{ranges}" in pipeline and not log.exists():
        log.write_text("\n".join(f";{name}__print__;__requant_min_max:[-3][4]" for name in float_tensors(model)))
    result = run(pipeline.replace("{log}", str(log)).replace("{ranges}", str(log)), model, check=check)
    del result.model.metadata_props[METADATA_KEY]
    return result.model, result.applied[0].change.applied


def records(model: ir.Model) -> list[str]:
    """Return a line of a log for each node that finds a range."""
    lines = [
        f";{node.name}__print__;{RECORDS[node.op_type]}"
        for node in model.graph
        if node.op_type in RECORDS and any(reader.domain == "requant" for reader in node.outputs[0].consumers())
    ]
    assert all(any(line.endswith(record) for line in lines) for record in RECORDS.values()), "nothing to freeze"
    return lines


def float_tensors(model: ir.Model) -> list[str]:
    """Return the names of the tensors of the graph that are or may be floats, and are computed."""
    nodes = [node for node in model.graph if node.op_type != "Constant"]
    values = [*model.graph.inputs, *(value for node in nodes for value in node.outputs)]
    return [str(value.name) for value in values if value.dtype in (None, ir.DataType.FLOAT)]


@cache
def step(name: str, model: str) -> str:
    graph = at_stage((), model).graph
    options = OPTIONS.get(name, "").replace("{outputs}", ",".join(str(value.name) for value in graph.outputs))
    options = options.replace("{node}", node_name(graph.node(0)))
    return f"{name}({options})" if options else name


def prepared(name: str, model: str) -> ir.Model:
    """Load a model and bring it to the stage at which a transform works; nobody may change it."""
    return at_stage(tuple(PREPARE.get(name, ())), model)


@cache
def at_stage(pipelines: tuple[str, ...], model: str) -> ir.Model:
    """Return a model after some pipelines, verified."""
    if not pipelines:
        loaded = MODELS[model]()
        verify(loaded)
        return loaded
    log = Path(f"stage-{len(pipelines)}-{model}.log")
    return applied(pipelines[-1], at_stage(pipelines[:-1], model), log)[0]


def log_of(name: str, model: str) -> Path:
    return Path(f"{name}-{model}.log")


@dataclass(frozen=True)
class Done:
    """A transform and a model before and after it, and how many rewrites that were."""

    name: str
    model: str
    before: ir.Model
    after: ir.Model
    count: int


def written(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


@cache
def written_at_stage(pipelines: tuple[str, ...], model: str) -> bytes:
    return written(at_stage(pipelines, model))


@each_pair
def test_a_transform_keeps_its_contract(name: str, model: str) -> None:
    """All that is promised of a transform, on one model."""
    before = prepared(name, model)
    done = Done(name, model, before, *applied(step(name, model), before, log_of(name, model), check=False))
    check_bytes(done)
    if done.count:
        verify(done.after)
    if not REGISTRY[name].changes_io:
        assert signature(done.after) == signature(before)
    if model == "unknown-domain":
        check_operators_of_other_domains_stay(done)
    if model in ("control-flow", "if-body"):
        check_control_flow_keeps_its_bodies(done)
    if model in ("control-flow", "functions") and name not in ("convert_opset", "inline_functions"):
        check_functions_stay(done)
    if done.count and model in RUNNABLE and keeps_values(name):
        check_outputs_stay_within_rounding(done)


def check_bytes(done: Done) -> None:
    """Check that a second run applies nothing, that nothing applied is nothing changed, and that runs are the same.

    Where nothing was applied, a second run would be the first one again: the same transform on the same bytes.
    """
    once = written(done.after)
    assert (done.count == 0) == (written_at_stage(tuple(PREPARE.get(done.name, ())), done.model) == once)
    if not done.count:
        return
    pipeline, log = step(done.name, done.model), log_of(done.name, done.model)
    again, _ = applied(pipeline, done.before, log, check=False)
    assert written(again) == once
    twice, count = applied(pipeline, done.after, log, check=False)
    assert count == 0
    assert written(twice) == once


def check_operators_of_other_domains_stay(done: Done) -> None:
    def told(attribute: ir.Attr) -> object:
        """Return what an attribute holds; of a body, which operators."""
        graph = attribute.as_graph() if attribute.type is ir.AttributeType.GRAPH else None
        return attribute.value if graph is None else [node.op_type for node in graph]

    def foreign(model: ir.Model) -> list[tuple[str, list[tuple[str, object]], list[str | None]]]:
        return [
            (
                node.op_type,
                [(key, told(each)) for key, each in node.attributes.items()],
                [] if done.name in RENAMING else [value.name for value in node.outputs],
            )
            for node in model.graph
            if node.domain == "my.domain"
        ]

    assert foreign(done.after) == foreign(done.before)


def check_control_flow_keeps_its_bodies(done: Done) -> None:
    def bodies(model: ir.Model) -> list[tuple[str, int, int]]:
        return [
            (node.op_type, len(attribute.as_graph().inputs), len(attribute.as_graph().outputs))
            for node in model.graph
            for attribute in node.attributes.values()
            if attribute.type is ir.AttributeType.GRAPH
        ]

    assert bodies(done.after) == bodies(done.before)
    assert len(bodies(done.after)) >= 2


def check_functions_stay(done: Done) -> None:
    assert {key for key in done.before.functions if key[0] == "blocks"} <= done.after.functions.keys()
    assert [node.op_type for node in done.after.graph if node.domain == "blocks"] == [
        node.op_type for node in done.before.graph if node.domain == "blocks"
    ]


def check_outputs_stay_within_rounding(done: Done) -> None:
    results = outputs(done.after, inputs(done.before))  # a transform may add outputs
    for output, expected in expected_outputs(done).items():
        found = results[output]
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        largest = float(np.max(np.abs(expected), initial=0))
        assert np.max(np.abs(found - expected), initial=0) <= rounding(done.before) * largest


def expected_outputs(done: Done) -> dict[str, np.ndarray]:
    """Return the outputs of a model at the stage of a transform, computed once for all of that stage."""
    key = (done.model, tuple(PREPARE.get(done.name, ())))
    if key not in EXPECTED:
        EXPECTED[key] = outputs(done.before, inputs(done.before))
    return EXPECTED[key]


EXPECTED: dict[tuple[str, tuple[str, ...]], dict[str, np.ndarray]] = {}


def is_runnable(path: Path) -> bool:
    """Whether a golden case is of transforms that keep values, and holds nothing that the runtime does not know."""
    header, _, text = path.read_text(encoding="utf-8").partition("\n")
    steps = parse(header.removeprefix("# transforms: ")).steps
    model = ir.from_onnx_text(text.partition("# output\n")[0])
    defined = {"", "com.microsoft", *(domain for domain, *_ in model.functions)}
    known = all(node.domain in defined for node in every_node(model))
    return known and all(keeps_values(each.name) and not REGISTRY[each.name].changes_io for each in steps)


FILES = [path for path in sorted((Path(__file__).parent / "cases").glob("*.txt")) if "left_alone" not in path.stem]
CASES = {path.stem: path for path in FILES if is_runnable(path)}


@pytest.mark.parametrize("path", CASES.values(), ids=CASES.keys())
def test_golden_cases_compute_the_same(path: Path) -> None:
    header, _, text = path.read_text(encoding="utf-8").partition("\n")
    before = ir.from_onnx_text(text.partition("# output\n")[0])
    after = run(header.removeprefix("# transforms: "), before, check=False).model
    feeds = inputs(before)
    expected, found = outputs(before, feeds), outputs(after, feeds)
    for output in expected:
        largest = float(np.max(np.abs(expected[output]), initial=0))
        assert found[output].shape == expected[output].shape
        assert np.max(np.abs(found[output] - expected[output]), initial=0) <= rounding(before) * largest


def test_bound_on_rounding_would_show_a_wrong_weight() -> None:
    for model in RUNNABLE:
        assert rounding(MODELS[model]()) < 1e-3  # a tenth of a step of int8


def rounding(model: ir.Model) -> float:
    """Bound the error of a network that computes the same in another order, relative to its largest output.

    A dot product of length n in another order differs by at most ``6 sqrt(n) eps`` with a probability of
    ``1 - 2 n exp(-18)`` (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019, theorem
    2.4 with lambda 6); any other operator by eps. The errors of all nodes are added up.
    """
    lengths = []
    for node in model.graph:
        product = node.op_type in ("Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul") and len(node.inputs) > 1
        weight = node.inputs[1] if product else None
        if weight is not None and weight.const_value is not None:
            shape = weight.const_value.shape.numpy()
            rows = node.op_type == "Conv" or node.attributes.get_int("transB", 0) == 1
            lengths.append(prod(shape) / shape[0 if rows else 1])
    products = sum(6 * sqrt(length) for length in lengths)
    return float(np.finfo(np.float32).eps) * (products + len(model.graph))


def inputs(model: ir.Model) -> dict[str, np.ndarray]:
    """Return random input for a model, without inputs that have a value; lengths that are not fixed are 3."""
    random = np.random.default_rng(7)
    feeds = {}
    for value in (value for value in model.graph.inputs if not value.is_initializer()):
        assert value.shape is not None
        assert value.dtype is not None
        shape = [length if isinstance(length, int) else 3 for length in value.shape]
        feeds[str(value.name)] = random.uniform(0, 2, shape).astype(value.dtype.numpy())
    return feeds


def outputs(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a model as it is written, with no optimisation by the runtime."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(written(model), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return {name: np.asarray(result) for name, result in zip(names, session.run(names, feeds), strict=True)}
