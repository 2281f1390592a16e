"""The instruction sets with which tests of native operators run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from requant.quantize.kernels.library import Kernels

from ...native import FOUND

ISAS = FOUND.available if isinstance(FOUND, Kernels) else ()
ENDS = (ISAS[0], ISAS[-1]) if ISAS else ()
"""The best and the portable one: the others run in `make test-all`."""


EACH = [pytest.param(isa, marks=() if isa in ENDS else pytest.mark.slow) for isa in ISAS or ("",)]


@pytest.fixture(params=EACH, scope="module")
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute with one instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REQUANT_KERNELS_ISA", request.param)
        yield request.param
