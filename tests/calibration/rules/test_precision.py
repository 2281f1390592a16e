"""The scale and zero point of a range are those that the quantizer writes."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from requant import RequantError
from requant.calibration.rules.precision import Precision
from requant.system.numbers import FLOAT_MAX
from requant.transforms.int8.qparams import Scheme

finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
finite = st.floats(-FLOAT_MAX, FLOAT_MAX)


@given(ends=st.tuples(finite32, finite32) | st.tuples(finite, finite), symmetric=st.booleans())
@example(ends=(-1.0, 1.0), symmetric=False)
@example(ends=(-FLOAT_MAX, FLOAT_MAX), symmetric=False)
@example(ends=(-FLOAT_MAX, FLOAT_MAX), symmetric=True)
@example(ends=(-1e-40, 1e-42), symmetric=True)
@example(ends=(0.0, 255 * float(np.finfo(np.float32).tiny)), symmetric=False)
@example(ends=(-3.0, -1.0), symmetric=True)
def test_a_range_has_the_parameters_of_the_scheme(ends: tuple[float, float], symmetric: bool) -> None:
    lo, hi = sorted(ends)
    scale, zero = Precision(symmetric=symmetric).params(lo, hi)
    unsigned = Scheme(activation="u8", symmetric=symmetric).activation_params(lo, hi)
    signed = Scheme(activation="s8", symmetric=symmetric).activation_params(lo, hi)
    assert (scale, zero) == (float(unsigned.scale), int(unsigned.zero_point))
    assert (scale, zero - 128) == (float(signed.scale), int(signed.zero_point))


@given(ends=st.tuples(finite32, finite32), bits=st.integers(2, 16), symmetric=st.booleans())
def test_zero_is_an_integer_of_the_type(ends: tuple[float, float], bits: int, symmetric: bool) -> None:
    precision = Precision(bits, symmetric)
    scale, zero = precision.params(*sorted(ends))
    assert 0 <= zero <= precision.top
    assert 0 < scale < math.inf


@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
def test_beyond_float32_a_range_is_cut(symmetric: bool) -> None:
    precision = Precision(symmetric=symmetric)
    most = sys.float_info.max
    assert precision.params(-most, most) == precision.params(-FLOAT_MAX, FLOAT_MAX)


def test_ranges_together_have_the_parameters_of_each_alone() -> None:
    random = np.random.default_rng(0)
    lo, hi = -random.exponential(size=50), random.exponential(size=50)
    for symmetric in (False, True):
        precision = Precision(4, symmetric)
        scales, zeros = precision.grids(lo, hi)
        assert [precision.params(*ends) for ends in zip(lo, hi, strict=True)] == [
            (float(scale), int(zero)) for scale, zero in zip(scales, zeros, strict=True)
        ]


@pytest.mark.parametrize("bits", [-8, 0, 1, 17])
def test_widths_that_no_tensor_has_are_refused(bits: int) -> None:
    with pytest.raises(RequantError, match=f"{bits} bits; a quantized tensor has 2 to 16"):
        Precision(bits)
