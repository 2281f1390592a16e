"""The integer kernels of the installed runtime, read from its kernel registry."""

from __future__ import annotations

from functools import cache

from ...transforms.int8.ops import Kernel

PROVIDER = "CPUExecutionProvider"


@cache
def uint8_kernels() -> frozenset[Kernel]:
    """Return (domain, operator) of every CPU kernel that takes uint8 activations."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

    found = set()
    for kernel in get_all_opkernel_def():
        types = (t for accepted in kernel.type_constraints.values() for t in accepted)
        if kernel.provider == PROVIDER and "tensor(uint8)" in types:
            found.add((kernel.domain, kernel.op_name))
        elif kernel.provider == PROVIDER and kernel.op_name.startswith("QLinear"):
            found.add((kernel.domain, kernel.op_name))  # some kernels state their element type only in code
    return frozenset(found)
