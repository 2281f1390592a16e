from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from requant import RequantError
from requant.quantize.runtime.random_inputs import generated_source, refusal, source_of_shapes


@pytest.mark.parametrize("shape", ["1099511627776,4", "2147483647,2147483647,2147483647"])
def test_an_input_too_large_for_memory_is_refused(shape: str, tmp_path: Path) -> None:
    text = f'<ir_version: 10, opset_import: ["" : 21]> wide (float[{shape}] x) => (float[{shape}] y) {{ y = Neg (x) }}'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    with pytest.raises(RequantError, match=r"input 'x' of shape .* is too large for random inputs; give data"):
        generated_source(tmp_path / "m.onnx")


def test_a_refusal_has_the_reason_of_the_runtime(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[N, 3, 8, 8] x) => (float[N, 4, 6, 6] y)
        <float[4, 3, 3, 3] w = {0}> { y = Conv <group = 0> (x, w) }""".replace(
        "{0}", "{" + ", ".join(["1"] * 108) + "}"
    )
    path = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    assert generated_source(path) is None
    why = refusal(path)
    assert "kernel channels: 3 group: 0" in why
    assert str(path) not in why
    with pytest.raises(
        RequantError, match=r"no random inputs of these shapes; give data \(.*kernel channels: 3 group: 0"
    ):
        source_of_shapes(path, {"x": (1, 3, 8, 8)})


def test_a_model_that_runs_refuses_nothing(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[N, 4] x) => (float[N, 4] y) { y = Neg (x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    assert refusal(tmp_path / "m.onnx") == ""
    assert source_of_shapes(tmp_path / "m.onnx", {"x": (2, 4)}).description == "random inputs (x [2, 4])"
