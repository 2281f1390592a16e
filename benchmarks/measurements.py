"""The measurements of the benchmarks: models with their feeds, how accurate they are, and how fast they run in turn.

`benchmarks.contenders` runs these functions in processes of their own. The top of this file imports only the standard
library, because the file also runs in an interpreter with other packages.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

SAMPLES = Path(__file__).parents[1] / "sample_models"
CALIBRATION = 8
"""The number of calibration feeds of a generated architecture."""
NOISE = 0.02
"""The relative difference between two minimum times of the same model."""
OPENVINO: Mapping[str, Mapping[str, str]] = {
    "openvino": {"PERFORMANCE_HINT": "LATENCY"},
    "openvino-f32": {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"},
}
"""OpenVINO as a runtime. It computes float operators in bfloat16 if the processor can, unless told otherwise."""


def one_line(error: BaseException) -> str:
    """Return the text of an exception as one line of at most 400 characters."""
    return " ".join(str(error).split())[:400]


# ----------------------------------------------------------------------------------------------- models and feeds


def save_feeds(path: str, feeds: Sequence[Mapping[str, Any]]) -> None:
    """Write feeds into one .npz file."""
    import numpy as np

    arrays = {f"{index}/{name}": array for index, feed in enumerate(feeds) for name, array in feed.items()}
    np.savez(path, **arrays)


def load_feeds(path: str) -> list[dict[str, Any]]:
    """Read the feeds that `save_feeds` wrote."""
    import numpy as np

    feeds: dict[int, dict[str, Any]] = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            index, _, name = key.partition("/")
            feeds.setdefault(int(index), {})[name] = arrays[key]
    return [feeds[index] for index in sorted(feeds)]


def network(name: str, model: str, feeds: str) -> dict[str, Any]:
    """Write a generated architecture and its calibration feeds."""
    import onnx

    architectures = _architectures()
    onnx.save(architectures.build(name), model)
    save_feeds(feeds, architectures.feeds(name, count=CALIBRATION))
    return {"operators": operators_of(model)}


def batch(name: str, size: int, feeds: str) -> dict[str, Any]:
    """Write one feed of `size` items for a generated architecture. The feed is not used for calibration."""
    save_feeds(feeds, _architectures().feeds(name, batch=size, seed=1, count=1))
    return {}


def task(kit: str, name: str, model: str, feeds: str, samples: int | None = None) -> dict[str, Any]:
    """Copy the model of a task of a kit of real models, and write its first `samples` calibration feeds, or all."""
    import shutil

    row = _tasks(kit)[name]
    shutil.copy(row.model, model)
    save_feeds(feeds, list(row.calib(samples)))
    return {"operators": operators_of(model)}


def tasks(kit: str) -> dict[str, Any]:
    """Return the names of the tasks of a kit of real models."""
    return {"tasks": list(_tasks(kit))}


def calibration(script: str, name: str, feeds: str) -> dict[str, Any]:
    """Write the calibration feeds of a task of a kit, those of its function ``NAME_calib``."""
    save_feeds(feeds, list(getattr(_kit(script), f"{name}_calib")()))
    return {}


def described(script: str) -> dict[str, Any]:
    """Return the tasks of a kit: for each the path of the float model, and whether a lower metric is better."""
    rows = _kit(script).TASKS.items()
    return {
        name: {"model": str(row.model), "lower": bool(getattr(row, "lower_is_better", False))} for name, row in rows
    }


def _tasks(kit: str) -> Mapping[str, Any]:
    """Import the kit of real models in a folder; return its tasks by name. Its sessions register native operators."""
    return _kit(f"{kit}/realkit.py").TASKS  # type: ignore[no-any-return]


def _kit(script: str) -> Any:
    """Import the script of a kit of real models. The sessions of the kit register native operators."""
    from requant.calibration.model.session import native_library

    os.environ.setdefault("KIT_LIBRARY", native_library() or "")
    sys.path.insert(0, str(Path(script).parent))
    return importlib.import_module(Path(script).stem)


def _architectures() -> Any:
    """Import `sample_models/architectures.py`."""
    sys.path.insert(0, str(SAMPLES))
    return importlib.import_module("architectures")


def operators_of(model: str) -> list[str]:
    """Return the operators of a model."""
    import onnx

    return sorted({node.op_type for node in onnx.load(model, load_external_data=False).graph.node})


# ------------------------------------------------------------------------------------------------------- accuracy


def evaluated(kit: str, name: str, model: str, items: int | None, reference: str) -> dict[str, Any]:
    """Evaluate a model on a task of a kit of real models, and compare it with the float model.

    Args:
        kit: The folder of the kit.
        name: The task.
        model: The path of the model.
        items: The number of evaluation items; None for all.
        reference: The file with the result of the float model. If it does not exist, `model` must be the float model,
            and the file is written.

    Returns:
        ``metric``, ``lower``, ``value``, ``items``; compared with float ``drop``, ``agreement`` and ``sqnr_db`` of the
        worst output (None if equal); ``broken``, ``fixed``, ``p_value`` and ``interval`` if the task has results for
        single items; ``invalid``, the error of the onnx checker, or empty.
    """
    import pickle

    row = _tasks(kit)[name]  # this also makes kitlib importable
    from kitlib.compare import output_sqnr  # type: ignore[import-not-found]
    from kitlib.task import open_session  # type: ignore[import-not-found]

    after = row.evaluate(model, items)
    if not os.path.exists(reference):
        with open(reference, "wb") as file:
            pickle.dump((model, after), file)
    with open(reference, "rb") as file:
        float_model, before = pickle.load(file)  # written above
    feeds = list(row.eval_feeds(min(16, after["n"])))
    noise = output_sqnr(open_session(float_model), open_session(model), feeds)
    worst = min((-math.inf if math.isnan(value) else value for value in noise.values()), default=math.inf)
    one, two = before[row.metric], after[row.metric]
    return {
        "metric": row.metric,
        "lower": row.lower_is_better,
        "value": two,
        "items": after["n"],
        "drop": two - one if row.lower_is_better else one - two,
        "agreement": row.agreement(before, after),
        "sqnr_db": None if worst == math.inf else worst,
        "invalid": checker_error(model),
        **_paired(row.metric, before, after),
    }


def _paired(metric: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two results of a kit item by item."""
    import numpy as np

    from requant.quantize.accuracy.metrics import METRICS
    from requant.quantize.accuracy.metrics.intervals import bootstrap
    from requant.quantize.accuracy.shares import binomial_p, paired_interval

    if "quality" in before:
        ones = np.ones(len(before["quality"]))
        one, two = (np.stack([result["quality"], ones], axis=1) for result in (before, after))
        return {"interval": bootstrap(METRICS["psnr"], one, two)}
    if "correct" not in before:
        return {}
    broken = int((before["correct"] & ~after["correct"]).sum())
    fixed = int((after["correct"] & ~before["correct"]).sum())
    counts = {"broken": broken, "fixed": fixed, "p_value": binomial_p(broken, fixed)}
    share = metric == "top1"  # other metrics are not the share of these items
    return {**counts, "interval": paired_interval(broken, fixed, len(before["correct"])) if share else None}


def checker_error(model: str | Path) -> str:
    """Return the error of the onnx checker for a model; empty if the model is valid."""
    import onnx

    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # noqa: BLE001 - the checker raises several kinds of exceptions
        return one_line(error)
    return ""


# ----------------------------------------------------------------------------------------------------------- time


def timed(
    cases: Sequence[Mapping[str, str]], feeds: str, threads: int, seconds: float, count: int = 1, cpu: bool = False
) -> dict[str, Any]:
    """Time models on the first feeds in turn, in this process.

    Args:
        cases: ``name``, ``model`` and ``runtime`` of each model; the first is the float model. ``feeds`` is a file of
            its own feeds for a model with other inputs.
        feeds: A file of feeds.
        threads: Threads inside one operator.
        seconds: The total time of the measurement.
        count: The number of feeds. The times are means over feeds.
        cpu: Whether to count CPU seconds; needs one thread.

    Returns:
        For each name ``ms`` (minimum), ``median_ms``, ``runs`` and ``sqnr_db`` (of the worst output for the first feed,
        compared with the first model; None if equal), or ``error``. Of a model with feeds of its own, the first output
        counts.
    """
    from requant.quantize.runtime.clock import interleave

    given = load_feeds(feeds)[:count]
    results: dict[str, Any] = {case["name"]: {} for case in cases}
    for index, feed in enumerate(given):
        good = [case for case in cases if "error" not in results[case["name"]]]
        runs = _loaded(good, index, feed, threads, results)
        found = interleave(list(runs.values()), seconds=seconds / len(given), threads=1 if cpu else 0)
        for name, times in zip(runs, found, strict=True):
            more = {"ms": 1e3 * times.least, "median_ms": 1e3 * times.median, "runs": len(times.seconds)}
            for key, value in more.items():
                results[name][key] = results[name].get(key, 0) + value / (1 if key == "runs" else len(given))
    return {name: {"error": row["error"]} if "error" in row else row for name, row in results.items()}


def _loaded(
    cases: Sequence[Mapping[str, str]], index: int, feed: dict[str, Any], threads: int, results: dict[str, Any]
) -> dict[str, Callable[[], list[Any]]]:
    """Return a function that runs each model on the feed with an index; `results` gets the SQNR, or the error."""
    runs: dict[str, Callable[[], list[Any]]] = {}
    expected: list[Any] | None = None
    for case in cases:
        try:
            own = load_feeds(case["feeds"])[index] if "feeds" in case else feed
            run = LOADERS[case["runtime"]](case["model"], own, threads)
            outputs = run()
            expected = outputs if expected is None else expected
            count = 1 if "feeds" in case else None
            results[case["name"]].setdefault("sqnr_db", worst_sqnr(expected[:count], outputs[:count]))
        except Exception as error:  # noqa: BLE001 - the error is a result of the measurement
            results[case["name"]]["error"] = one_line(error)
            continue
        runs[case["name"]] = run
    return runs


def worst_sqnr(expected: Sequence[Any], outputs: Sequence[Any]) -> float | None:
    """Return the lowest SQNR of the float outputs, in dB; None if all outputs are equal.

    Raises:
        ValueError: An output is not finite, or has another shape.
    """
    import numpy as np

    worst = math.inf
    for first, second in zip(expected, outputs, strict=True):
        if first.dtype.kind != "f":
            continue
        if first.shape != second.shape or not np.isfinite(second).all():
            raise ValueError("an output is not finite, or its shape differs from the float model")
        signal, noise = (float(np.square(x, dtype=np.float64).sum()) for x in (first, second - first))
        if noise and signal:
            worst = min(worst, 10 * math.log10(signal / noise))
    return None if worst == math.inf else worst


def _onnxruntime(model: str, feed: dict[str, Any], threads: int) -> Callable[[], list[Any]]:
    """Return a function that runs a model in ONNX Runtime with default options and the native operators."""
    from requant.calibration.model.session import open_session

    return partial(open_session(model, threads=threads).run, None, feed)


def _plain_onnxruntime(model: str, feed: dict[str, Any], threads: int) -> Callable[[], list[Any]]:
    """Return a function that runs a model in ONNX Runtime as it is installed, without the native operators."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return partial(ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run, None, feed)


def openvino_package() -> Any:
    """Import the package ``openvino`` without its telemetry: None keeps Python from importing that module."""
    sys.modules.setdefault("openvino_telemetry", cast("Any", None))
    return importlib.import_module("openvino")


def _openvino(model: str, feed: dict[str, Any], threads: int, settings: Mapping[str, str]) -> Callable[[], list[Any]]:
    """Return a function that runs a model in OpenVINO, compiled for the shapes of the feed."""
    core = openvino_package().Core()
    read = core.read_model(model)
    if read.is_dynamic():  # free axes cost time
        read.reshape({name: list(array.shape) for name, array in feed.items()})
    compiled = core.compile_model(read, "CPU", {**settings, "INFERENCE_NUM_THREADS": threads})
    request = compiled.create_infer_request()

    def run() -> list[Any]:
        outputs = request.infer(feed, share_inputs=True, share_outputs=True)
        return [outputs[output] for output in compiled.outputs]

    return run


LOADERS: Mapping[str, Callable[[str, dict[str, Any], int], Callable[[], list[Any]]]] = {
    "onnxruntime": _onnxruntime,
    "onnxruntime-plain": _plain_onnxruntime,
    **{name: partial(_openvino, settings=settings) for name, settings in OPENVINO.items()},
}
