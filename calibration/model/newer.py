"""Models that are newer than the installed runtime: an older IR version and opset, where these mean the same."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from ... import RequantError
from .messages import STANDARD, with_inner

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

NEWER_IR = re.compile(r"Unsupported model IR version: \d+, max supported IR version: (\d+)")
NEWER_OPSET = re.compile(r"official support for domain ai\.onnx is till opset (\d+)")
ANY = 2**31 - 1  # the runtime accepts any version
FIRST = 8, 13  # an IR version and an opset that every runtime loads
SHOWN = 3  # operators that a message names
REWORDED = {"QuantizeLinear": (23, 28), "Transpose": (23, 28)}
"""Operators whose texts differ between two opsets and say the same, except about types: a person has compared them."""

Operator: TypeAlias = tuple[str, str]
"""A domain and an operator type."""


@cache
def newest_ir_version() -> int:
    """Return the newest IR version that the installed runtime loads."""
    return _limit(NEWER_IR, ANY, FIRST[1])


@cache
def newest_opset() -> int:
    """Return the newest version of the standard operator set that the installed runtime loads."""
    return _limit(NEWER_OPSET, FIRST[0], ANY)


def _limit(pattern: re.Pattern[str], ir_version: int, opset: int) -> int:
    """Return the limit that the runtime names when it refuses an empty model; `ANY` if it does not refuse it."""
    import onnx
    import onnxruntime as ort

    imports = [onnx.helper.make_opsetid("", opset)]
    future = onnx.helper.make_model(onnx.GraphProto(), ir_version=ir_version, opset_imports=imports)
    try:
        ort.InferenceSession(future.SerializeToString(), providers=["CPUExecutionProvider"], enable_fallback=0)
    except Exception as error:  # noqa: BLE001 - the runtime's exceptions have no common base class
        newest = pattern.search(str(error))
        if newest is not None:
            return int(newest[1])
    return ANY


def is_newer(error: Exception) -> bool:
    """Return whether the runtime refused a model because its IR version or opset is newer than the runtime."""
    return any(pattern.search(str(error)) for pattern in (NEWER_IR, NEWER_OPSET))


def lower(model: ir.Model) -> None:
    """Lower the IR version and the opset of a model to those of the runtime, in place; older ones stay.

    New IR versions add types and fields; they change no meaning. The runtime still refuses a model that uses the new
    types or fields. The opset is lowered only if every operator has the same definition in both versions.

    Raises:
        RequantError: An operator has changed, or the installed onnx does not know the opset.
    """
    model.ir_version = min(model.ir_version, newest_ir_version())
    scopes: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for scope in scopes:
        used = ((node.domain, node.op_type) for node in scope.all_nodes())
        scope.opset_imports.update(_lowered(scope.opset_imports, used))


def lower_message(model: onnx.ModelProto) -> None:
    """Lower a protobuf message as `lower` does.

    Raises:
        RequantError: An operator has changed, or the installed onnx does not know the opset.
    """
    model.ir_version = min(model.ir_version, newest_ir_version())
    scopes = [(model.opset_import, model.graph.node)]
    scopes += [(function.opset_import, function.node) for function in model.functions]
    for imports, nodes in scopes:
        used = ((node.domain, node.op_type) for node in with_inner(nodes))
        lowered = _lowered({each.domain: each.version for each in imports}, used)
        for each in imports:
            each.version = lowered.get(each.domain, each.version)


def _lowered(imports: Mapping[str, int], operators: Iterable[Operator]) -> dict[str, int]:
    """Return the imports of the standard operator set that must change, with the version that the runtime loads.

    Raises:
        RequantError: An operator has changed, or the installed onnx does not know the opset.
    """
    newest = newest_opset()
    newer = {domain: version for domain, version in imports.items() if domain in ("", STANDARD) and version > newest}
    if newer:
        types = sorted({op_type for domain, op_type in operators if domain in ("", STANDARD)})
        _check_unchanged(types, max(newer.values()), newest)
    return dict.fromkeys(newer, newest)


def _check_unchanged(types: Collection[str], opset: int, newest: int) -> None:
    """Refuse operators of an opset that have another definition in an older one.

    Raises:
        RequantError: There are such operators, or the installed onnx does not know the opset.
    """
    import onnx
    import onnxruntime as ort

    runtime = f"the installed onnxruntime {ort.__version__} loads opset {newest}"
    known = onnx.defs.onnx_opset_version()
    if opset > known:  # onnx would give its newest definitions, which may be older than the model's
        raise RequantError(
            f"{runtime}, and the installed onnx {onnx.__version__} opset {known}: the model is of opset {opset}, which "
            "neither knows; install newer ones, or export the model with an older opset"
        )
    changed = [op for op in types if not same_definition(op, (opset, newest))]
    if changed:
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        raise RequantError(
            f"{runtime}, which lacks or defines otherwise what the model of opset {opset} has: "
            f"{', '.join(changed[:SHOWN])}{more}; install a newer onnxruntime, or export the model with opset {newest}"
        )


def same_definition(op_type: str, versions: tuple[int, int]) -> bool:
    """Return whether a standard operator has the same definition in two versions of its operator set.

    It is the same if no new version of the operator lies between the two, or if the new versions changed the list of
    types only: all parameters, attributes and texts are equal word for word, texts except in `REWORDED`. The runtime
    refuses a type that is not on the list of its version.
    """
    import onnx

    first, last = REWORDED.get(op_type, (ANY, 0))
    reworded = first <= min(versions) and max(versions) <= last
    try:
        one, other = (onnx.defs.get_schema(op_type, version) for version in versions)
    except onnx.defs.SchemaError:
        return False
    return one.since_version == other.since_version or _definition(one, reworded) == _definition(other, reworded)


def _definition(schema: onnx.defs.OpSchema, reworded: bool) -> str:
    """Return the parameters, the attributes and, unless `reworded`, the texts of an operator; no lists of types."""

    def words(text: str | None) -> list[str]:  # onnx may break a text into lines in another way
        return [] if reworded else (text or "").split()

    ports = [
        (port.name, port.type_str, port.option, port.is_homogeneous, port.min_arity, words(port.description))
        for port in (*schema.inputs, *schema.outputs)
    ]
    attributes = [
        (name, each.type, each.required, each.default_value.SerializeToString(), words(each.description))
        for name, each in sorted(schema.attributes.items())
    ]
    return repr((words(schema.doc), ports, len(schema.inputs), attributes, schema.deprecated))
