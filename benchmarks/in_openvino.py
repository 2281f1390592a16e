"""Run a script whose sessions of ONNX Runtime are models in OpenVINO.

    python benchmarks/in_openvino.py SCRIPT ARGUMENTS...

So a kit of real models (`benchmarks/models.py`) is judged there by its own metrics. Inputs and outputs are described by
ONNX Runtime, which reads the file for that alone. Models of another kind than files, and other options than the number
of threads, are not supported.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from requant.quantize.runtime.openvino import OpenVino

Described = ort.InferenceSession


class Session:
    """What a script needs of an ``onnxruntime.InferenceSession``."""

    def __init__(
        self, model: str | os.PathLike[str], options: ort.SessionOptions | None = None, providers: Sequence[str] = ()
    ) -> None:
        self._path, self._options, self._providers = os.fspath(model), options, list(providers)
        threads = 1 if options is None else options.intra_op_num_threads
        self._model = OpenVino().open(self._path, threads=threads)

    def run(self, names: Sequence[str] | None, feed: Mapping[str, Any]) -> list[Any]:
        """Run a feed and return the named outputs, or all."""
        found = self._model(feed)
        return [found[name] for name in names or self._model.outputs]

    def __getattr__(self, name: str) -> Any:
        """Return what ONNX Runtime says of the model."""
        return getattr(Described(self._path, self._options, providers=self._providers), name)


def main() -> None:
    """Run the script that the command line names."""
    script, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0] = script
    sys.path.insert(0, str(Path(script).parent))
    ort.InferenceSession = Session
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
