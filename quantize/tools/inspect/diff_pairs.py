"""Pair the nodes of two graphs: by their names, or by what they compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import TypeAlias

import onnx_ir as ir

from ....transforms.graphs.queries import key
from .diff_hashes import GraphLike, Hash, Hashes

Pairs: TypeAlias = dict[ir.Node, ir.Node]
Key: TypeAlias = Callable[[ir.Node], Hash | str]


def pairs_by_name(one: GraphLike, other: GraphLike) -> Pairs:
    """Pair nodes with an output of the same name, then nodes of the same name; the same operator has priority."""
    found: Pairs = {}
    taken: set[ir.Node] = set()
    for by_node, same_operator in ((False, True), (True, True), (False, False)):
        theirs: dict[str | None, ir.Node] = {}
        for partner in other:
            if partner not in taken:
                theirs.update(dict.fromkeys(_names(partner, by_node=by_node), partner))
        for node in one:
            named = [theirs[name] for name in _names(node, by_node=by_node) if name in theirs]
            if node in found or not named or named[0] in taken:
                continue
            if not same_operator or key(node) == key(named[0]):
                found[node] = named[0]
                taken.add(named[0])
    return found


def _names(node: ir.Node, *, by_node: bool) -> list[str]:
    """Return the name of a node, or the names of its outputs."""
    if by_node:
        return [node.name] if node.name else []
    return [value.name for value in node.outputs if value.name]


def equal_pairs(one: GraphLike, other: GraphLike, hashes: Hashes) -> Pairs:
    """Pair nodes that compute the same. A node that computes what several others compute is paired once."""
    waiting = defaultdict[Hash, list[ir.Node]](list)
    for node in reversed(list(other)):
        waiting[hashes.nodes[node]].append(node)
    return {node: waiting[hashes.nodes[node]].pop() for node in one if waiting[hashes.nodes[node]]}


def changed_pairs(one: GraphLike, other: GraphLike, equal: Pairs, hashes: Hashes) -> Pairs:
    """Pair the nodes that have no equal node.

    The two graphs are aligned as sequences: first by operators with attributes and constants, and between these by
    operators alone. So one changed node is one difference, although it changes the hashes of all nodes after it.
    """
    partners = set(equal.values())
    left = [node for node in _walk(one) if node not in equal]
    right = [node for node in _walk(other) if node not in partners]
    keys = hashes.local, lambda node: f"{key(node)} {len(node.outputs)}"
    if (len(left), list(map(hashes.local, left))) <= (len(right), list(map(hashes.local, right))):
        return dict(_aligned(left, right, keys))
    return {node: partner for partner, node in _aligned(right, left, keys)}  # the result must not depend on the order


def _walk(graph: GraphLike) -> list[ir.Node]:
    """Return nodes as a walk from the outputs along the inputs leaves them, an order independent of names."""
    own, order = set(graph), dict[ir.Node, None]()
    ends = [*reversed(list(graph)), *(value.producer() for value in reversed(graph.outputs))]
    todo = [(node, False) for node in ends]
    while todo:
        node, inputs_done = todo.pop()
        if node is None or node not in own or node in order:
            continue
        if inputs_done:
            order[node] = None
            continue
        todo.append((node, True))
        todo += [(value.producer(), False) for value in reversed(node.inputs) if value is not None]
    return list(order)


def _aligned(left: Sequence[ir.Node], right: Sequence[ir.Node], keys: Sequence[Key]) -> list[tuple[ir.Node, ir.Node]]:
    """Align two sequences by the first key, and the gaps between the aligned nodes by the other keys."""
    if not keys or not left or not right:
        return []
    before, after = (list(map(keys[0], nodes)) for nodes in (left, right))
    pairs: list[tuple[ir.Node, ir.Node]] = []
    i = j = 0
    for block in SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks():
        pairs += _aligned(left[i : block.a], right[j : block.b], keys[1:])
        i, j = block.a + block.size, block.b + block.size
        pairs += zip(left[block.a : i], right[block.b : j], strict=True)
    return pairs
