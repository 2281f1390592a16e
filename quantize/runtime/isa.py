"""How the CPU adds integer products: exactly in 32 bits, or in pairs in 16 bits, which can saturate."""

from __future__ import annotations

from enum import StrEnum
from functools import cache

import numpy as np
import onnx_ir as ir

from ... import UnknownNameError
from ...calibration.model.session import open_session

AUTO = "auto"


PROBE = """<ir_version: 8, opset_import: ["" : 13]>
probe (uint8[1,2] a) => (int32[1,1] y) <int8[2,1] b = {127, 127}> { y = MatMulInteger(a, b) }"""


class Isa(StrEnum):
    """How the runtime's kernels add products of uint8 activations and int8 weights.

    Attributes:
        VNNI: In 32 bits: x86 with VNNI or AMX, ARM with dot products, and all other exact kernels.
        AVX2: In pairs in 16 bits, with saturation: x86 with AVX2 or AVX-512, without VNNI
            (`requant.transforms.int8.saturation`).
    """

    VNNI = "vnni"
    AVX2 = "avx2"

    @property
    def exact(self) -> bool:
        """Whether every sum of products is exact."""
        return self is Isa.VNNI


@cache
def detect() -> Isa:
    """Return how the installed runtime adds products on this machine, found by a test multiplication.

    CPU flags do not suffice: the runtime, its build and the operating system also decide which kernel runs.
    """
    return Isa.VNNI if probe() == 2 * 255 * 127 else Isa.AVX2


def probe() -> int:
    """Return the runtime's ``255 * 127 + 255 * 127``: 64770, or 32767 if a pair saturates."""
    session = open_session(bytes(ir.to_proto(ir.from_onnx_text(PROBE)).SerializeToString()), threads=1)
    return int(session.run(None, {"a": np.full((1, 2), 255, np.uint8)})[0][0, 0])


def resolve(name: str) -> Isa:
    """Return the `Isa` of an option: ``vnni``, ``avx2``, or this machine's for ``auto``.

    Raises:
        RequantError: The name is none of these.
    """
    if name == AUTO:
        return detect()
    if name not in {*Isa}:
        raise UnknownNameError("instruction set", name, [AUTO, *Isa])
    return Isa(name)
