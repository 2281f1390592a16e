"""The models of onnx's backend test suite, in the forms that `benchmarks.backend_suite` quantizes.

The installed onnx package contains the suite: a model for each feature of each operator, and small networks. Most
models have one operator and no weights, so nothing could become int8. The other forms add weights or neighbours.
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

from requant.transforms.int8.ops import OPS

Feed: TypeAlias = dict[str, Any]

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
UNCHANGED, CONSTANT, BETWEEN, DYNAMIC = FORMS = ("unchanged", "constant weights", "between products", "dynamic")
COPIES = 3  # the number of feeds in addition to the feed of the suite
LONGEST = 64  # the largest last axis of a tensor that is multiplied by an identity matrix
OPSET = 13  # the opset of the products next to an operator of another domain
EVERY = 10  # every 10th task uses the command line


@dataclass(frozen=True)
class Task:
    """A model in one form.

    Attributes:
        name: The name of the case.
        kind: The part of the suite.
        operator: The tested operator; ``*`` and a name if the model has several nodes.
        form: One of `FORMS`.
        model: The bytes of the model.
        feeds: The feeds for calibration and comparison.
        cli: Whether to quantize with the command line instead of the function.
    """

    name: str
    kind: str
    operator: str
    form: str
    model: bytes
    feeds: tuple[Feed, ...]
    cli: bool = False


def tasks(form: str = "", only: str = "", sample: int | None = None) -> list[Task]:
    """Return the tasks.

    Args:
        form: One of `FORMS`; empty for all.
        only: Only cases whose name contains this text.
        sample: The number of cases, spread over all operators; None for all.
    """
    chosen = [case for case in cases() if only in case.name]
    if sample is not None:
        chosen = stratified(chosen, sample)
    found: list[Task] = []
    for case in chosen:
        older = lowered(case)
        if older is not None:  # the runtime can only reject a model that is too new
            found.append(case)
        usable = older or case
        fixed, between = constant_weights(usable), between_products(usable)
        forms = (usable, fixed, between, replace(fixed or usable, form=DYNAMIC))
        found += [task for task in forms if task is not None]
    selected = [task for task in found if form in ("", task.form)]
    return [replace(task, cli=index % EVERY == 0 and bool(task.feeds[0])) for index, task in enumerate(selected)]


def stratified(everything: Sequence[Task], count: int) -> list[Task]:
    """Return `count` cases: one case of each operator in turn. Operators that can become int8 come first.

    The large networks are skipped.
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
    """Yield the unchanged models of the suite, with their data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some cases test overflow
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
    """Return the inputs without an initializer."""
    initializers = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in initializers]


def _stored(folder: Path, model: onnx.ModelProto) -> list[Any]:
    """Read the inputs of a case from its folder; an optional input is None."""
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
    """Return the task of a case. The feeds are the data of the case, made finite, and a few slightly smaller copies."""
    values = [numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value for value in inputs]
    feed = dict(zip((value.name for value in _required(model)), values, strict=False))
    random = np.random.default_rng(0)
    sources = (None, *[random] * COPIES)
    feeds = tuple({name: _near(value, source) for name, value in feed.items()} for source in sources)
    operator = model.graph.node[0].op_type if len(model.graph.node) == 1 else f"*{name.split('_')[1]}"
    return Task(name, kind, operator, UNCHANGED, model.SerializeToString(), feeds)


def _near(value: Any, random: np.random.Generator | None) -> Any:
    """Return floats made finite; other values do not change.

    With `random` the floats are scaled by 0.9 to 1, which keeps them in the domain of most functions.
    """
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
    """Make all inputs but the first float input constant; None if there is no other input."""
    floats = [
        name for name, value in task.feeds[0].items() if isinstance(value, np.ndarray) and value.dtype.kind == "f"
    ]
    if not floats or len(task.feeds[0]) == 1:
        return None
    return replace(_fixed(task, {floats[0]}), form=CONSTANT)


def _fixed(task: Task, free: set[str]) -> Task:
    """Make all inputs except `free` constant, with the values of the first feed."""
    model, feed = onnx.load_model_from_string(task.model), task.feeds[0]
    fixed = {name: v for name, v in feed.items() if isinstance(v, np.ndarray) and v.size and name not in free}
    inputs = [value for value in model.graph.input if value.name not in fixed]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    for name, array in fixed.items():
        objects = array.astype(object) if array.dtype.kind == "U" else array
        model.graph.initializer.append(numpy_helper.from_array(objects, name))
    model.ir_version = max(model.ir_version, 4)  # before IR version 4, initializers had to be inputs too
    feeds = tuple({name: value for name, value in each.items() if name not in fixed} for each in task.feeds)
    return replace(task, model=model.SerializeToString(), feeds=feeds)


def between_products(task: Task) -> Task | None:
    """Put the operator of a case between products that become int8; None if its tensors do not fit a product.

    The products do not change the values. They are convolutions if the shape allows it, because after a matrix product
    only operators that move values become int8: a matrix product can also write float.
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
    """Return the inputs that are activations in the operator table, or else the first float input."""
    row = OPS.get(node.op_type)
    if row is not None and row.kind != "float":
        chosen = row.activations or range(len(node.input))
        return {node.input[index] for index in chosen if index < len(node.input) and node.input[index] in feed}
    floats = [name for name in node.input if isinstance(feed.get(name), np.ndarray) and feed[name].dtype.kind == "f"]
    return set(floats[:1])


def _outputs(task: Task) -> dict[str, Any]:
    """Return the outputs for the first feed; nothing if the runtime cannot run the model."""
    try:
        session = ort.InferenceSession(task.model, _silent(), providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, task.feeds[0]), strict=True))
    except Exception:  # noqa: BLE001 - exceptions of the runtime have no common base class
        return {}


def _is_matrix(value: Any) -> bool:
    """Whether a value can be multiplied by an identity matrix."""
    fits = isinstance(value, np.ndarray) and value.dtype == np.float32 and value.ndim > 1
    return fits and math.prod(value.shape) > 0 and value.shape[-1] <= LONGEST


def _product(model: onnx.ModelProto, read: str, written: str, shape: tuple[int, ...]) -> onnx.NodeProto:
    """Return a node that multiplies by one: a depthwise convolution or a matrix product."""
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
    """Return a model that is too new for the runtime with an older opset; None if this is not possible or not needed.

    It is possible if no operator of the model has changed since the newest opset of the runtime.
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
    """Yield the nodes of a graph and of its bodies."""
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
    """Whether the runtime loads a model with this IR version and opset."""
    text = f'<ir_version: {ir_version}, opset_import: ["" : {opset}]> g (float[1] x) => (float[1] y) {{ y = Relu(x) }}'
    try:
        ort.InferenceSession(onnx.parser.parse_model(text).SerializeToString(), _silent())
    except Exception:  # noqa: BLE001 - as above
        return False
    return True


def _silent() -> ort.SessionOptions:
    """Return options that stop the runtime from printing the errors that it raises."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options
