"""The instruction sets with which tests of native operators run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from requant.quantize.kernels.library import Kernels

from ...native import FOUND

ISAS = FOUND.available if isinstance(FOUND, Kernels) else ()


@pytest.fixture(params=ISAS or [""], scope="module")
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute with one instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REQUANT_KERNELS_ISA", request.param)
        yield request.param
