from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from requant import RequantError
from requant.quantize.runtime.random_inputs import generated_source


@pytest.mark.parametrize("shape", ["1099511627776,4", "2147483647,2147483647,2147483647"])
def test_an_input_too_large_for_memory_is_refused(shape: str, tmp_path: Path) -> None:
    text = f'<ir_version: 10, opset_import: ["" : 21]> wide (float[{shape}] x) => (float[{shape}] y) {{ y = Neg (x) }}'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    with pytest.raises(RequantError, match=r"input 'x' of shape .* is too large for random inputs; give data"):
        generated_source(tmp_path / "m.onnx")
