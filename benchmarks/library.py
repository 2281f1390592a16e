"""Measure how much longer a session of ONNX Runtime takes to make where it has the native library.

python -m benchmarks.library
"""

from __future__ import annotations

import time
from pathlib import Path

import onnx.parser
import onnxruntime as ort

from requant.quantize.kernels.library import Kernels, kernels

TIMES = 100
MODEL = """<ir_version: 8, opset_import: ["" : 17]>
g (float[1,4] x) => (float[1,4] y) { y = Relu(x) }"""


def spent(model: bytes, library: Path | None) -> float:
    """Return the CPU time of a session in seconds; with the library, unless it is None."""
    begin = time.process_time()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if library is not None:
        options.register_custom_ops_library(str(library))
    ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return time.process_time() - begin


def main() -> None:
    """Print the least CPU times of interleaved sessions."""
    found = kernels()
    if not isinstance(found, Kernels):
        raise SystemExit(found)
    model = onnx.parser.parse_model(MODEL).SerializeToString()
    times = [(spent(model, None), spent(model, found.library)) for _ in range(TIMES)]
    without, more = (1e3 * min(each) for each in zip(*times, strict=True))
    size = found.library.stat().st_size
    print(f"{found.library.name}: {size:,} bytes; a session takes {more - without:.2f} ms more than {without:.2f} ms")


if __name__ == "__main__":
    main()
