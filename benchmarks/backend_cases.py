"""The models of onnx's own backend test suite, in the forms in which `benchmarks.backend_suite` quantizes them.

The suite is what the installed onnx brings: a model for each feature of each operator, and small networks. Most models
of one operator get everything as an input, so that nothing could become int8; other forms of them have weights and
neighbours.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from requant.transforms.ops import OPS

Feed: TypeAlias = dict[str, Any]

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
AS_IS, CONSTANT, BETWEEN, DYNAMIC = FORMS = ("as it is", "constant weights", "between products", "dynamic")
COPIES = 3  # feeds beside the one of the suite
LONGEST = 64  # of the last axis of a tensor that is multiplied by an identity matrix
OPSET = 13  # of the products beside an operator of another domain
EVERY = 10  # so many tasks to one that goes through the command line


@dataclass(frozen=True)
class Task:
    """A model in one form.

    Attributes:
        name: The name of the case.
        kind: The part of the suite.
        operator: What it is about; with a star where the model is more than one node.
        form: One of `FORMS`.
        model: The bytes of the model.
        feeds: Inputs to calibrate and compare with.
        cli: Whether it goes through the command line instead of the function.
    """

    name: str
    kind: str
    operator: str
    form: str
    model: bytes
    feeds: tuple[Feed, ...]
    cli: bool = False


def tasks(form: str = "", only: str = "", sample: int | None = None) -> list[Task]:
    """Return what there is to do.

    Args:
        form: The one of `FORMS` that is wanted; all when empty.
        only: What the names of cases contain.
        sample: How many cases to choose, of all operators; all when None.
    """
    chosen = [case for case in cases() if only in case.name]
    if sample is not None:
        chosen = stratified(chosen, sample)
    found: list[Task] = []
    for case in chosen:
        older = lowered(case)
        if older is not None:  # of what is too new, a refusal is all there is to see
            found.append(case)
        usable = older or case
        fixed, between = constant_weights(usable), between_products(usable)
        forms = (usable, fixed, between, replace(fixed or usable, form=DYNAMIC))
        found += [task for task in forms if task is not None]
    wanted = [task for task in found if form in ("", task.form)]
    return [replace(task, cli=index % EVERY == 0 and bool(task.feeds[0])) for index, task in enumerate(wanted)]


def stratified(everything: Sequence[Task], count: int) -> list[Task]:
    """Return `count` cases: one of each operator in turn until there are enough, those first that can become int8.

    The large networks are left out.
    """
    groups: dict[str, list[Task]] = defaultdict(list)
    for case in everything:
        if case.kind != "light":
            groups[case.operator].append(case)
    random = np.random.default_rng(0)
    queues = [[group[place] for place in random.permutation(len(group))] for group in groups.values()]
    queues = [queues[place] for place in random.permutation(len(queues))]
    queues.sort(key=lambda queue: queue[0].operator not in OPS or OPS[queue[0].operator].kind == "float")
    turns = max(map(len, queues), default=0)
    return [queue[turn] for turn in range(turns) for queue in queues if turn < len(queue)][:count]


def cases() -> Iterator[Task]:
    """Yield the models of the suite as they are, with their data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some cases are about overflow
        from onnx.backend.test.loader import load_model_tests

        for case in (case for kind in KINDS for case in load_model_tests(kind=kind)):
            if case.model is not None and case.data_sets is not None:
                yield _task(case.name, case.kind, case.model, case.data_sets[0][0])
            elif case.model_dir is not None:
                model = onnx.load(Path(case.model_dir) / "model.onnx")
                yield _task(case.name, case.kind, model, _stored(Path(case.model_dir) / "test_data_set_0", model))
    for path in sorted(LIGHT.glob("*.onnx")):
        model = onnx.load(path)
        (image,) = _required(model)
        shape = [axis.dim_value or 1 for axis in image.type.tensor_type.shape.dim]
        yield _task(path.stem, "light", model, [np.random.default_rng(0).uniform(0, 1, shape).astype(np.float32)])


def _required(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs that have no value in the model."""
    have = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in have]


def _stored(folder: Path, model: onnx.ModelProto) -> list[Any]:
    """Read the inputs of a case that lies in a folder; None for one that is optional."""
    inputs: list[Any] = []
    for index, value in enumerate(_required(model)):
        content = (folder / f"input_{index}.pb").read_bytes()
        if value.type.HasField("tensor_type"):
            inputs.append(onnx.TensorProto.FromString(content))
        elif value.type.HasField("sequence_type"):
            inputs.append(numpy_helper.to_list(onnx.SequenceProto.FromString(content)))
        else:
            inputs.append(None)
    return inputs


def _task(name: str, kind: str, model: onnx.ModelProto, inputs: Sequence[Any]) -> Task:
    """Make a task of a case: its own data made finite, and a few copies near to them."""
    values = [numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value for value in inputs]
    feed = dict(zip((value.name for value in _required(model)), values, strict=False))
    random = np.random.default_rng(0)
    sources = (None, *[random] * COPIES)
    feeds = tuple({name: _near(value, source) for name, value in feed.items()} for source in sources)
    operator = model.graph.node[0].op_type if len(model.graph.node) == 1 else f"*{name.split('_')[1]}"
    return Task(name, kind, operator, AS_IS, model.SerializeToString(), feeds)


def _near(value: Any, random: np.random.Generator | None) -> Any:
    """Return finite floats, with `random` a little nearer to zero: in the domain of most functions; others as is."""
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind == "O":
        return np.asarray(value.tolist(), np.str_)
    if value.dtype.kind != "f":
        return value
    finite = np.asarray(np.nan_to_num(value, nan=0.0, posinf=1.0, neginf=-1.0))
    if random is None:
        return finite
    return np.asarray(finite * random.uniform(0.9, 1.0, value.shape)).astype(value.dtype)


def constant_weights(task: Task) -> Task | None:
    """Make all inputs but the first one of floats constants; None where there is no other."""
    floats = [
        name for name, value in task.feeds[0].items() if isinstance(value, np.ndarray) and value.dtype.kind == "f"
    ]
    if not floats or len(task.feeds[0]) == 1:
        return None
    return replace(_fixed(task, {floats[0]}), form=CONSTANT)


def _fixed(task: Task, free: set[str]) -> Task:
    """Make all inputs but the free ones constants, with their values in the first feed."""
    model, feed = onnx.load_model_from_string(task.model), task.feeds[0]
    fixed = {name: v for name, v in feed.items() if isinstance(v, np.ndarray) and v.size and name not in free}
    inputs = [value for value in model.graph.input if value.name not in fixed]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    for name, array in fixed.items():
        objects = array.astype(object) if array.dtype.kind == "U" else array
        model.graph.initializer.append(numpy_helper.from_array(objects, name))
    model.ir_version = max(model.ir_version, 4)  # before, constants had to be inputs too
    feeds = tuple({name: value for name, value in each.items() if name not in fixed} for each in task.feeds)
    return replace(task, model=model.SerializeToString(), feeds=feeds)


def between_products(task: Task) -> Task | None:
    """Put the operator of a case between products that become int8; None where it reads or writes no such tensors.

    The products leave the values as they are. They are convolutions where there can be any: what is no mere move of
    values stays in float behind a matrix product, which writes float as readily as uint8.
    """
    model, feed = onnx.load_model_from_string(task.model), task.feeds[0]
    nodes = model.graph.node
    outputs = _outputs(task) if len(nodes) == 1 else {}
    written = {name for name, value in outputs.items() if _is_matrix(value)}
    read = _activations(nodes[0], feed)
    if not written or not read or not all(_is_matrix(feed[name]) for name in read):
        return None
    node = onnx.NodeProto()
    node.CopyFrom(nodes[0])
    node.input[:] = [f"{name}/product" if name in read else name for name in node.input]
    node.output[:] = [f"{name}/factor" if name in written else name for name in node.output]
    before = [_product(model, name, f"{name}/product", feed[name].shape) for name in sorted(read)]
    after = [_product(model, f"{name}/factor", name, outputs[name].shape) for name in sorted(written)]
    del nodes[:]
    nodes.extend([*before, node, *after])
    return replace(_fixed(replace(task, model=model.SerializeToString()), read), form=BETWEEN)


def _activations(node: onnx.NodeProto, feed: Feed) -> set[str]:
    """Return the inputs that the operator table calls activations, or the first one of floats."""
    row = OPS.get(node.op_type)
    if row is not None and row.kind != "float":
        chosen = row.activations or range(len(node.input))
        return {node.input[index] for index in chosen if index < len(node.input) and node.input[index] in feed}
    floats = [name for name in node.input if isinstance(feed.get(name), np.ndarray) and feed[name].dtype.kind == "f"]
    return set(floats[:1])


def _outputs(task: Task) -> dict[str, Any]:
    """Return the outputs of the first feed; none where the runtime does not run the model."""
    try:
        session = ort.InferenceSession(task.model, _silent(), providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, task.feeds[0]), strict=True))
    except Exception:  # noqa: BLE001 - the runtime's exceptions share no base class of their own
        return {}


def _is_matrix(value: Any) -> bool:
    """Whether a value can be multiplied by an identity matrix."""
    fits = isinstance(value, np.ndarray) and value.dtype == np.float32 and value.ndim > 1
    return fits and math.prod(value.shape) > 0 and value.shape[-1] <= LONGEST


def _product(model: onnx.ModelProto, read: str, written: str, shape: tuple[int, ...]) -> onnx.NodeProto:
    """Return a node that multiplies by one: a convolution by channel, or a matrix product."""
    if not {"", "ai.onnx"}.intersection(entry.domain for entry in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid("", OPSET))
    by_channel = len(shape) in (3, 4, 5) and shape[1] > 1
    weights = np.ones((shape[1], *[1] * (len(shape) - 1))) if by_channel else np.eye(shape[-1])
    name = f"ones_{shape[1]}_{len(shape)}d" if by_channel else f"identity_{shape[-1]}"
    if all(tensor.name != name for tensor in model.graph.initializer):
        model.graph.initializer.append(numpy_helper.from_array(weights.astype(np.float32), name))
    kind = "Conv" if by_channel else "MatMul"
    group = shape[1] if by_channel else None
    return onnx.helper.make_node(kind, [read, name], [written], name=f"{read}/{kind}", group=group)


def lowered(task: Task) -> Task | None:
    """Spell a model that is too new for the runtime as the older one that means the same; None where it cannot be.

    It can be where no operator has changed since the newest version that the runtime knows.
    """
    model = onnx.load_model_from_string(task.model)
    ir_version, opset = newest()
    imports = {entry.domain: entry for entry in model.opset_import}
    if "" not in imports or (model.ir_version <= ir_version and imports[""].version <= opset):
        return None
    used = {node.op_type for graph in (model.graph, *model.functions) for node in _nodes(graph) if not node.domain}
    if any(onnx.defs.get_schema(name, imports[""].version).since_version > opset for name in used):
        return None
    model.ir_version = min(model.ir_version, ir_version)
    for entry in (imports[""], *(each for function in model.functions for each in function.opset_import)):
        entry.version = entry.version if entry.domain else min(entry.version, opset)
    return replace(task, name=f"{task.name} in opset {opset}", model=model.SerializeToString())


def _nodes(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph and of the bodies in it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _nodes(attribute.g)


@cache
def newest() -> tuple[int, int]:
    """Return the newest IR version and the newest opset that the installed runtime loads."""
    return (
        next(version for version in range(int(onnx.IR_VERSION), 0, -1) if _loads(version, 13)),
        next(version for version in range(onnx.defs.onnx_opset_version(), 0, -1) if _loads(8, version)),
    )


def _loads(ir_version: int, opset: int) -> bool:
    """Whether the runtime loads models of an IR version and an opset."""
    text = f'<ir_version: {ir_version}, opset_import: ["" : {opset}]> g (float[1] x) => (float[1] y) {{ y = Relu(x) }}'
    try:
        ort.InferenceSession(onnx.parser.parse_model(text).SerializeToString(), _silent())
    except Exception:  # noqa: BLE001 - as above
        return False
    return True


def _silent() -> ort.SessionOptions:
    """Return options with which the runtime does not print its errors beside raising them."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options
