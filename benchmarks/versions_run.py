"""Run models in the ONNX Runtime of the Python that runs this file, which needs NumPy and the runtime and nothing else.

    python versions_run.py MODELS INPUTS.npz OUTPUTS.npz [LIBRARY]

MODELS is a folder of models, INPUTS the arrays of one run. Each model runs at each optimization level; a model that
calls functions of native operators also with LIBRARY, the library of these operators. OUTPUTS has the first output of
each run under ``MODEL|LEVEL``, or the reason why the runtime refuses the model, as text. ``version|`` is the version of
the runtime.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

LEVELS = ("off", "basic", "extended", "layout", "all")
NAMES = {"off": "ORT_DISABLE_ALL"}
PROVIDERS = ["CPUExecutionProvider"]


def level_of(name: str) -> ort.GraphOptimizationLevel | None:
    """Return an optimization level; None if this runtime does not have it."""
    return getattr(ort.GraphOptimizationLevel, NAMES.get(name, f"ORT_ENABLE_{name.upper()}"), None)


def run(model: Path, level: ort.GraphOptimizationLevel, feed: dict[str, np.ndarray], library: str) -> np.ndarray:
    """Return the first output of a run, or the reason why there is none, as text."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = level
    try:
        if library:
            options.register_custom_ops_library(library)
        session = ort.InferenceSession(str(model), options, providers=PROVIDERS)
        return np.asarray(session.run(None, feed)[0])
    except Exception as error:  # noqa: BLE001 - the runtime's exceptions have no common base class
        return np.array(" ".join(str(error).split())[-300:])


def main() -> None:
    """Run every model of a folder at every level, and write the outputs."""
    models, inputs, outputs = map(Path, sys.argv[1:4])
    library = sys.argv[4] if len(sys.argv) > 4 else ""
    with np.load(inputs) as file:
        feed = dict(file)
    found = {"version|": np.array(ort.__version__)}
    for model in sorted(models.glob("*.onnx")):
        for name in LEVELS:
            level = level_of(name)
            if level is not None:
                found[f"{model.stem}|{name}"] = run(model, level, feed, "")
                if library and model.stem.endswith("native"):
                    found[f"{model.stem}+library|{name}"] = run(model, level, feed, library)
    with open(outputs, "wb") as file:
        np.savez(file, **found)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
