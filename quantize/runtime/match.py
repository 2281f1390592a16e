"""Match the nodes of a model to executed kernels: by names, by tensors, and by position in the graph."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from ...calibration.model.bodies import bodies_of
from ...transforms.graphs.queries import MS, QDQ, producer_of

NCHWC = f"{MS}.nchwc"
REORDERS = frozenset({"ReorderInput", "ReorderOutput"})
QUANTIZERS = QDQ | {"DynamicQuantizeLinear"}
"""The operators that convert between floats and integers, also by a scale that they find at run time."""
PRODUCTS = frozenset(
    "Conv ConvTranspose Gemm MatMul FusedConv FusedGemm FusedMatMul QLinearConv QLinearMatMul QGemm ConvInteger "
    "MatMulInteger MatMulIntegerToFloat DynamicQuantizeMatMul MatMulNBits LSTM GRU RNN Attention "
    "MultiHeadAttention QAttention".split()
)
BLOCKED = re.compile(r"(_bn)?_nchwc$")
"""What ends the names of nodes in the blocked layout, behind that of the tensor; a BatchNormalization became a Conv."""
IR_INPUTS = 4  # from this IR version, an initializer that is also an input may be overridden


@dataclass(frozen=True, slots=True)
class Match:
    """Nodes of a model and the kernels that ran.

    Attributes:
        kernels: By name of a node, the name of the executed node that computes it; None if nothing computes it.
        folded: Nodes that were computed once, while the model was loaded.
        principals: By name of an executed node, the node of the model under which it is reported; absent for nodes that
            the runtime inserted.
        parts: By name of an executed node, the node of the model that the runtime split into several kernels.
        constants: Tensors of the model that are the same in every run.
    """

    kernels: Mapping[str, str | None]
    folded: frozenset[str]
    principals: Mapping[str, str]
    parts: Mapping[str, str]
    constants: frozenset[str]


@dataclass(slots=True)
class _Search:
    """The state of the matching.

    Attributes:
        nodes: The nodes of the model by name.
        made: The executed node that computes each tensor, looked up behind layout changes.
        known: Tensors of the executed graph.
        constants: Tensors of the model that are the same in every run.
        order: The position of each executed node.
        home: The executed node of each matched node of the model.
    """

    nodes: Mapping[str, ir.Node]
    made: Mapping[str, str]
    known: frozenset[str]
    constants: frozenset[str]
    order: Mapping[str, int]
    home: dict[str, str] = field(default_factory=dict)


def match(model: ir.Model, graph: ir.Graph, ran: Iterable[str]) -> Match:
    """Find for each node of `model` the node of the optimized `graph` that computes it.

    An eliminated node belongs to the kernel that makes its output. If the graph still holds the input of the node, it
    belongs to a kernel that reads this input. A DequantizeLinear belongs to its reader, any other node to the kernel
    whose result it reads.

    Args:
        model: The original model; its nodes have names.
        graph: The optimized graph.
        ran: The names of the nodes of `graph` that were executed, in order.
    """
    names = {name: place for place, name in enumerate(ran)}
    nodes = {node.name: node for node in model.graph.all_nodes() if node.name}
    executed = [node for node in graph.all_nodes() if node.name in names]
    search = _Search(nodes, *_tensors(executed, nodes), constants_of(model), names)
    _by_name(search, executed)
    producers = {value.name: name for name, node in nodes.items() for value in node.outputs if value.name}
    _moved_conversions(search, [node for node in executed if producers.keys().isdisjoint(v.name for v in node.outputs)])
    for value, maker in search.made.items():
        if value in producers:
            search.home.setdefault(producers[value], maker)
    _by_reader(search, executed)
    folded = set()
    for name in reversed([name for name in nodes if name not in search.home]):
        node = nodes[name]
        if _is_folded(search, node):
            folded.add(name)
        elif (kernel := _absorbed_by(search, node)) is not None:
            search.home[name] = kernel
    kernels = {name: search.home.get(name) for name in nodes}
    principals = _principals(search, executed)
    return Match(kernels, frozenset(folded), principals, _parts(search, executed, principals), search.constants)


def members_of(kernels: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Return the nodes that each executed node computes, in the order of the model.

    Args:
        kernels: By name of a node, the executed node that computes it; see `Match`.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for name, kernel in kernels.items():
        if kernel is not None:
            found[kernel].append(name)
    return found


def inserted_layout(node: ir.Node, nodes: Mapping[str, ir.Node]) -> bool:
    """Return whether an executed node is a layout change that the runtime inserted."""
    return (node.op_type in REORDERS and node.domain == NCHWC) or (
        node.op_type == "Transpose" and (node.name or "") not in nodes
    )


def _tensors(executed: Iterable[ir.Node], nodes: Mapping[str, ir.Node]) -> tuple[dict[str, str], frozenset[str]]:
    """Return the executed node that computes each tensor, and the names of all tensors."""
    made: dict[str, str] = {}
    known: set[str] = set()
    for node in executed:
        known.update(value.name for value in (*node.inputs, *node.outputs) if value is not None and value.name)
        name, source = node.name or "", node
        if node.domain == NCHWC and BLOCKED.search(name):  # named after the tensor that it computes
            made[BLOCKED.sub("", name)] = name
        while inserted_layout(source, nodes) and (before := _data_producer(source)) is not None:
            source = before
        if not inserted_layout(source, nodes):
            for value in node.outputs:
                made.setdefault(value.name or "", source.name or "")
    return made, frozenset(known)


def _data_producer(node: ir.Node) -> ir.Node | None:
    return producer_of(node.inputs[0]) if node.inputs else None


def constants_of(model: ir.Model) -> frozenset[str]:
    """Return the tensors that depend on initializers and constants only."""
    found = {name for graph in model.graphs() for name in graph.initializers}
    if model.ir_version >= IR_INPUTS:
        found.difference_update(value.name for value in model.graph.inputs if value.name)
    for node in model.graph.all_nodes():
        given = [value.name for value in node.inputs if value is not None]
        if (given or node.op_type == "Constant") and found.issuperset(given) and not bodies_of(node):
            found.update(value.name for value in node.outputs if value.name)
    return frozenset(found)


def _by_name(search: _Search, executed: Iterable[ir.Node]) -> None:
    """Match a node to the kernel of the same name, also with a number or the word "fused" added by the runtime."""
    for node in executed:
        if inserted_layout(node, search.nodes):
            continue
        name = node.name or ""
        fused = re.sub(r"/\w+Fusion/?$", "", name)  # the last of the nodes that were fused
        for candidate in (name, re.sub(r"_token_\d+$", "", name), name.removeprefix("fused "), fused):
            if candidate in search.nodes and candidate not in search.home:
                search.home[candidate] = name
                break


def _by_reader(search: _Search, executed: Iterable[ir.Node]) -> None:
    """Match an eliminated node to an unclaimed kernel if the readers of both are the same unchanged operator."""
    kernels, taken = {node.name: node for node in executed}, set(search.home.values())
    todo = [name for name, kernel in search.home.items() if kernel in kernels]
    while todo:
        name = todo.pop()
        kernel = kernels[search.home[name]]
        if kernel.op_type != search.nodes[name].op_type:
            continue
        for value, read in zip(search.nodes[name].inputs, kernel.inputs, strict=False):
            before, source = map(producer_of, (value, read))
            while source is not None and inserted_layout(source, search.nodes):
                source = _data_producer(source)
            if before is None or source is None or before.name in search.home or source.name in taken:
                continue
            if source.name in kernels and source.op_type not in QUANTIZERS and before.op_type not in QUANTIZERS:
                search.home[before.name or ""] = source.name or ""
                taken.add(source.name or "")
                todo.append(before.name or "")


def _moved_conversions(search: _Search, executed: Iterable[ir.Node]) -> None:
    """Match a QuantizeLinear or DequantizeLinear that the runtime moved over other nodes, by its scale."""
    taken = set(search.home.values())
    free = [node for node in executed if node.op_type in QUANTIZERS and node.name not in taken]
    alike: dict[tuple[str, str | None], deque[str]] = defaultdict(deque)
    for name, other in search.nodes.items():
        if name not in search.home and other.op_type in QUANTIZERS:
            alike[other.op_type, _scale(other)].append(name)
    for node in free:
        scale = _scale(node)
        if scale is not None and (names := alike[node.op_type, scale]):
            search.home[names.popleft()] = node.name or ""


def _scale(node: ir.Node) -> str | None:
    return node.inputs[1].name if len(node.inputs) > 1 and node.inputs[1] is not None else None


def _is_folded(search: _Search, node: ir.Node) -> bool:
    """Return whether an eliminated node was computed at load time: nothing reads its input any more."""
    outputs = {value.name for value in node.outputs}
    given = {value.name for value in node.inputs[:1] if value is not None}
    return bool(outputs) and search.constants >= outputs and not (given & search.known)


def _absorbed_by(search: _Search, node: ir.Node) -> str | None:
    """Return the kernel into which an eliminated node was fused; None if its result is not needed.

    It is the kernel that writes the result of the node. Without one, it is a kernel that reads the result of a
    DequantizeLinear or of a product, and the kernel before any other node.
    """
    for value in node.outputs:
        if (maker := search.made.get(value.name or "")) is not None:
            return maker
    forwards = node.op_type == "DequantizeLinear" or node.op_type in PRODUCTS
    backwards = None if forwards else _kernel_before(search, node)
    return backwards or next(_reading_kernels(search, node), None) or _kernel_before(search, node, past_known=True)


def _reading_kernels(search: _Search, node: ir.Node) -> Iterator[str]:
    """Yield the kernels of the nodes that read the outputs of a node."""
    users = [use.node.name or "" for value in node.outputs for use in value.uses()]
    yield from (search.home[name] for name in users if name in search.home)


def _kernel_before(search: _Search, node: ir.Node, *, past_known: bool = False) -> str | None:
    """Return the kernel that the runtime runs last of those before a node; None without one.

    Between the kernel and the node may be eliminated nodes, but no product. A kernel does not count if another kernel
    reads its result too: then nothing behind the result is part of it.

    Args:
        search: The state of the matching.
        node: The eliminated node.
        past_known: Whether to look also before tensors that the executed graph holds.
    """
    found, seen, todo = [], set(), [node]
    while todo:
        for value in todo.pop().inputs:
            if value is None or value.name in search.constants or value in seen:
                continue
            seen.add(value)
            producer = value.producer()
            if producer is None or (value.name in search.known and not past_known):
                continue
            readers = {search.home.get(use.node.name or "") for use in value.uses()} - {None}
            if (kernel := search.home.get(producer.name or "")) is not None:
                if readers <= {kernel}:  # otherwise the tensor has other readers, and the kernel ends in it
                    found.append(kernel)
            elif producer.op_type not in PRODUCTS:  # a kernel computes at most one product
                todo.append(producer)
    return max(found, key=lambda kernel: search.order[kernel], default=None)


def _principals(search: _Search, executed: Iterable[ir.Node]) -> dict[str, str]:
    """Choose the node under which a kernel is reported: a product, else its namesake, else the last node in it."""
    members = members_of(search.home)
    found = {}
    for node in executed:
        kernel, outputs = node.name or "", {value.name for value in node.outputs}
        candidates = members.get(kernel, [])
        if not candidates:
            continue

        def rank(name: str, kernel: str = kernel, outputs: set[str | None] = outputs) -> tuple[bool, ...]:
            original = search.nodes[name]
            ends = not outputs.isdisjoint(value.name for value in original.outputs)
            return (original.op_type in PRODUCTS, name == kernel, ends, original.op_type not in QUANTIZERS)

        found[kernel] = max(candidates, key=rank)
    return found


def _parts(search: _Search, executed: Iterable[ir.Node], principals: Mapping[str, str]) -> dict[str, str]:
    """Find the nodes that the runtime split into several kernels; return the node by the name of each further kernel.

    A kernel that computes no node of the model is a part of a node if all kernels that read it compute this node.
    """
    found: dict[str, str] = {}
    for node in reversed([*executed]):
        if node.name in principals or node.op_type in QUANTIZERS or inserted_layout(node, search.nodes):
            continue
        readers = {use.node.name or "" for value in node.outputs for use in value.uses()}
        owners = {found.get(name) or principals.get(name, "") for name in readers}
        if len(owners) == 1 and (owner := owners.pop()) and owner not in search.order:
            found[node.name or ""] = owner
    return found
