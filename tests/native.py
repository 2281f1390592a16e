"""The mark of tests that need the library of native operators."""

from __future__ import annotations

import os

import pytest

from requant.quantize.kernels.library import kernels

FOUND = kernels()
needs_library = pytest.mark.skipif(isinstance(FOUND, str) and not os.environ.get("CI"), reason=str(FOUND))
"""Skips a test where there is no library, and never in CI, which builds it."""
