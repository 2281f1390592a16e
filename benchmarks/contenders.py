"""The contenders of the benchmarks: how each of them quantizes, and how the models are timed in turn.

    python benchmarks/contenders.py FUNCTION ARGUMENTS

Other benchmarks start a new process for each call, so that the memory of a quantizer is released. FUNCTION is a key of
`FUNCTIONS`, ARGUMENTS are its keyword arguments as JSON. The last line on stdout is the result as JSON. The top of this
file imports only the standard library, because the file also runs in an interpreter with other packages.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

SAMPLES = Path(__file__).parents[1] / "sample_models"
CALIBRATION = 8
PRODUCTS = ("MatMul", "Gemm", "Conv")
OPENVINO: Mapping[str, Mapping[str, str]] = {
    "openvino": {"PERFORMANCE_HINT": "LATENCY"},
    "openvino-f32": {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"},
}
"""OpenVINO as a runtime. It computes float operators in bfloat16 if the processor can, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A column of the table.

    Attributes:
        label: The title of the column.
        forms: Keys of `FORMS`. All of these models are timed, and the fastest one counts.
        runtime: A key of `LOADERS`.
        needs: The package that quantizes, if it is not a dependency of this project.
    """

    label: str
    forms: tuple[str, ...]
    runtime: str = "onnxruntime"
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Form:
    """A way to quantize a model.

    Attributes:
        function: A key of `FUNCTIONS`.
        arguments: The arguments of the function, except model, feeds and output.
        wants: Skip models without this operator: the form does not help them.
        per_batch: Whether each batch size needs its own model.
        peer: Whether to quantize in the interpreter of `--peers-python`.
        suffix: The suffix of its file.
    """

    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    wants: str = ""
    per_batch: bool = False
    peer: bool = False
    suffix: str = ".onnx"


CONTENDERS: Mapping[str, Contender] = {
    "static": Contender("ORT static", ("static", "static-products", "static-fused")),
    "dynamic": Contender("ORT dynamic", ("dynamic", "dynamic-products", "dynamic-fused")),
    "nncf": Contender("NNCF", ("nncf",), needs="nncf"),
    "stock": Contender("ours, stock kernels", ("stock",)),
    "ours": Contender("ours", ("ours",)),
    "fallback": Contender("ours without the library", ("ours",), "onnxruntime-plain"),
    "openvino": Contender("float in OpenVINO", ("float",), "openvino"),
    "openvino-f32": Contender("float32 in OpenVINO", ("float",), "openvino-f32"),
    "nncf-openvino": Contender("NNCF in OpenVINO", ("nncf",), "openvino", "nncf"),
    "nncf-ir": Contender("NNCF's IR in OpenVINO", ("nncf-ir",), "openvino", "nncf"),
    "ours-openvino": Contender("ours in OpenVINO", ("portable",), "openvino"),
    "placed-openvino": Contender("ours placed in OpenVINO", ("placed",), "openvino"),
}
"""The contenders that are compared with the float model in ONNX Runtime."""

FORMS: Mapping[str, Form] = {
    "float": Form("network"),
    "static": Form("static"),
    "static-products": Form("static", {"operators": PRODUCTS}, wants="MatMul"),
    "static-fused": Form("static", {"operators": PRODUCTS, "fuse": True}, wants="LayerNormalization"),
    "dynamic": Form("dynamic"),
    "dynamic-products": Form("dynamic", {"operators": ("MatMul", "Gemm", "Attention")}, wants="MatMul"),
    "dynamic-fused": Form(
        "dynamic", {"operators": ("MatMul", "Gemm", "Attention"), "fuse": True}, wants="LayerNormalization"
    ),
    "nncf": Form("nncf", peer=True),
    "nncf-ir": Form("nncf_ir", peer=True, suffix=".xml"),
    "ours": Form("ours", per_batch=True),
    "stock": Form("ours", {"kernels": "stock"}, per_batch=True),
    "portable": Form("ours", {"portable": True}),
    "placed": Form("ours", {"runtime": "openvino"}),
    "guarded": Form("ours", {"force_int8": False}, per_batch=True),
    "placed-guarded": Form("ours", {"runtime": "openvino", "force_int8": False}),
}


def forms_for(contender: Contender, operators: Collection[str]) -> tuple[str, ...]:
    """Return the forms of a contender that fit a model with these operators."""
    return tuple(name for name in contender.forms if not FORMS[name].wants or FORMS[name].wants in operators)


# ------------------------------------------------------------------------------------------------- from outside


class ContenderError(Exception):
    """A contender failed; the text says why."""


def one_line(error: BaseException) -> str:
    """Return the text of an exception as one line of at most 400 characters."""
    return " ".join(str(error).split())[:400]


def call(function: str, *, python: str | None = None, **arguments: Any) -> dict[str, Any]:
    """Call a function of `FUNCTIONS` in a new process.

    Args:
        function: The function.
        python: The interpreter; None for this one.
        arguments: The arguments, as JSON values.

    Raises:
        ContenderError: The interpreter does not exist, or the function fails.
    """
    command = [python or sys.executable, __file__, function, json.dumps(arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ContenderError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise ContenderError(lines[-1][:300] if lines else f"exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def has(package: str, python: str | None = None) -> bool:
    """Whether an interpreter has a package; None is this interpreter."""
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python or sys.executable, "-c", probe], check=False).returncode == 0
    except OSError:
        return False


# ------------------------------------------------------------------------------------------ in the new process


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
    return _operators(model)


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
    return _operators(model)


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
    from requant.calibration.session import native_library

    os.environ.setdefault("KIT_LIBRARY", native_library() or "")
    sys.path.insert(0, str(Path(script).parent))
    return importlib.import_module(Path(script).stem)


def _architectures() -> Any:
    """Import `sample_models/architectures.py`."""
    sys.path.insert(0, str(SAMPLES))
    return importlib.import_module("architectures")


def _operators(model: str) -> dict[str, Any]:
    """Return the operators of a model."""
    import onnx

    return {"operators": sorted({node.op_type for node in onnx.load(model, load_external_data=False).graph.node})}


def static(
    model: str,
    feeds: str,
    output: str,
    operators: Sequence[str] | None = None,
    fuse: bool = False,
    percentile: float | None = None,
) -> dict[str, Any]:
    """Quantize with ONNX Runtime's `quantize_static`: QDQ, per channel, uint8 activations and int8 weights.

    Scales per channel need opset 13; an older model gets one scale per weight. The ranges are minimum and maximum, or
    a percentile.
    """
    import onnx
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.feeds = iter(load_feeds(feeds))

        def get_next(self) -> Any:
            return next(self.feeds, None)

    with tempfile.TemporaryDirectory() as folder:
        quantize_static(
            _preprocessed(model, folder, fuse),
            output,
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=operators and list(operators),
            per_channel=next(o.version for o in onnx.load(model).opset_import if not o.domain) >= 13,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax if percentile is None else CalibrationMethod.Percentile,
            extra_options=None if percentile is None else {"CalibPercentile": percentile},
        )
    return {}


def dynamic(
    model: str, feeds: str, output: str, operators: Sequence[str] | None = None, fuse: bool = False
) -> dict[str, Any]:
    """Quantize with ONNX Runtime's `quantize_dynamic`.

    If convolutions are quantized too, weights are uint8, because ConvInteger does not take int8 weights with uint8
    activations. Otherwise weights are int8 per channel.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        quantize_dynamic(
            _preprocessed(model, folder, fuse),
            output,
            op_types_to_quantize=operators and list(operators),
            per_channel=operators is not None,
            weight_type=QuantType.QUInt8 if operators is None else QuantType.QInt8,
        )
    return {}


def _preprocessed(model: str, folder: str, fuse: bool) -> str:
    """Preprocess a model as the documentation of ONNX Runtime's quantizers advises; return the new path.

    `fuse` adds the optimizer for transformers.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process

    if fuse:
        from onnxruntime.transformers.optimizer import optimize_model

        fused = f"{folder}/fused.onnx"
        optimize_model(model, model_type="bert", num_heads=0, hidden_size=0, opt_level=1).save_model_to_file(fused)
        model = fused
    model, prepared = os.path.abspath(model), os.path.abspath(f"{folder}/prepared.onnx")
    with contextlib.chdir(folder):  # symbolic shape inference leaves files behind if it fails
        try:
            quant_pre_process(model, prepared)
        except Exception:  # noqa: BLE001 - its exceptions vary; its message advises to skip symbolic inference
            quant_pre_process(model, prepared, skip_symbolic_shape=True)
    return prepared


def nncf(model: str, feeds: str, output: str) -> dict[str, Any]:
    """Quantize with NNCF's post-training quantization for ONNX."""
    import onnx

    onnx.save(_quantized_by_nncf(onnx.load(model), model, feeds), output)
    return {}


def nncf_ir(model: str, feeds: str, output: str) -> dict[str, Any]:
    """Quantize with NNCF's post-training quantization of the model that OpenVINO reads, and write that."""
    openvino = _openvino_package()
    openvino.save_model(_quantized_by_nncf(openvino.Core().read_model(model), model, feeds), output)
    return {}


def _quantized_by_nncf(loaded: Any, model: str, feeds: str) -> Any:
    """Quantize a loaded model with NNCF; transformers get the model type for transformers."""
    os.environ["NNCF_CI"] = "1"  # no telemetry
    import nncf  # type: ignore[import-not-found]

    samples = load_feeds(feeds)
    transformer = FORMS["static-fused"].wants in _operators(model)["operators"]
    return nncf.quantize(
        loaded,
        nncf.Dataset(samples),
        subset_size=len(samples),
        model_type=nncf.ModelType.TRANSFORMER if transformer else None,
    )


def compressed(model: str, output: str, bits: int, size: int) -> dict[str, Any]:
    """Compress the weights of the model that OpenVINO reads with NNCF, and write that.

    Args:
        model: The float model.
        output: The .xml file to write.
        bits: Bits of a weight, 8 or 4; 8 bits have a scale for each channel.
        size: Weights in a block with a scale of its own; 0 with 8 bits.
    """
    os.environ["NNCF_CI"] = "1"  # no telemetry
    import nncf

    openvino = _openvino_package()
    mode = nncf.CompressWeightsMode.INT8_SYM if bits == 8 else nncf.CompressWeightsMode.INT4_SYM
    more = {"group_size": size, "all_layers": True} if bits == 4 else {}
    openvino.save_model(nncf.compress_weights(openvino.Core().read_model(model), mode=mode, **more), output)
    return {}


def ours(model: str, feeds: str, output: str, force_int8: bool = True, **more: Any) -> dict[str, Any]:
    """Quantize with this project's defaults and more options; return the predicted and the measured times, in ms."""
    from requant.quantize import Options, quantize_model

    options = Options(force=True, force_int8=force_int8, **more)
    result = quantize_model(model, load_feeds(feeds), output, options)
    report = result.to_json()
    kept = {name: report[name] for name in ("latency", "mac_share_int8")}
    return {"predicted_ms": getattr(result, "predicted_ms", None), "verdict": report["why_not"], **kept}


def configured(model: str, feeds: str, output: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Quantize with this project and these options; return a part of the result."""
    from requant.quantize import Options, quantize_model

    values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in options.items()}
    report = quantize_model(model, load_feeds(feeds), output, Options(force=True, **values)).to_json()
    return {"verdict": report["why_not"], **{name: report[name] for name in ("mac_share_int8", "float_nodes")}}


def clocked(what: str, **arguments: Any) -> dict[str, Any]:
    """Call another function, and add its time as ``seconds``."""
    import time

    start = time.perf_counter()
    result = FUNCTIONS[what](**arguments)
    return {**result, "seconds": time.perf_counter() - start}


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
    from requant.quantize.accuracy.outputs import binomial_p, paired_interval

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


def timed(
    cases: Sequence[Mapping[str, str]], feeds: str, threads: int, seconds: float, count: int = 1, cpu: bool = False
) -> dict[str, Any]:
    """Time models on the first feeds in turn, in this process.

    Args:
        cases: ``name``, ``model`` and ``runtime`` of each model; the first is the float model.
        feeds: A file of feeds.
        threads: Threads inside one operator.
        seconds: The total time of the measurement.
        count: The number of feeds. The times are means over feeds.
        cpu: Whether to count CPU seconds; needs one thread.

    Returns:
        For each name ``ms`` (minimum), ``median_ms``, ``runs`` and ``sqnr_db`` (of the worst output for the first feed,
        compared with the first model; None if equal), or ``error``.
    """
    from requant.quantize.runtime.clock import interleave

    given = load_feeds(feeds)[:count]
    results: dict[str, Any] = {case["name"]: {} for case in cases}
    for feed in given:
        good = [case for case in cases if "error" not in results[case["name"]]]
        runs = _loaded(good, feed, threads, results)
        found = interleave(list(runs.values()), seconds=seconds / len(given), threads=1 if cpu else 0)
        for name, times in zip(runs, found, strict=True):
            more = {"ms": 1e3 * times.least, "median_ms": 1e3 * times.median, "runs": len(times.seconds)}
            for key, value in more.items():
                results[name][key] = results[name].get(key, 0) + value / (1 if key == "runs" else len(given))
    return {name: {"error": row["error"]} if "error" in row else row for name, row in results.items()}


def _loaded(
    cases: Sequence[Mapping[str, str]], feed: dict[str, Any], threads: int, results: dict[str, Any]
) -> dict[str, Callable[[], list[Any]]]:
    """Return a function that runs each model; `results` gets the SQNR at the first feed, or the error."""
    runs: dict[str, Callable[[], list[Any]]] = {}
    expected: list[Any] | None = None
    for case in cases:
        try:
            run = LOADERS[case["runtime"]](case["model"], feed, threads)
            outputs = run()
            expected = outputs if expected is None else expected
            results[case["name"]].setdefault("sqnr_db", worst_sqnr(expected, outputs))
        except Exception as error:  # noqa: BLE001 - the error is a result of the measurement
            results[case["name"]]["error"] = one_line(error)
            continue
        runs[case["name"]] = run
    return runs


def worst_sqnr(expected: Sequence[Any], outputs: Sequence[Any]) -> float | None:
    """Return the lowest SQNR of the float outputs, in dB; None if all outputs are equal.

    Raises:
        ContenderError: An output is not finite, or has another shape.
    """
    import numpy as np

    worst = math.inf
    for first, second in zip(expected, outputs, strict=True):
        if first.dtype.kind != "f":
            continue
        if first.shape != second.shape or not np.isfinite(second).all():
            raise ContenderError("an output is not finite, or its shape differs from the float model")
        signal, noise = (float(np.square(x, dtype=np.float64).sum()) for x in (first, second - first))
        if noise and signal:
            worst = min(worst, 10 * math.log10(signal / noise))
    return None if worst == math.inf else worst


def _onnxruntime(model: str, feed: dict[str, Any], threads: int) -> Callable[[], list[Any]]:
    """Return a function that runs a model in ONNX Runtime with default options and the native operators."""
    from requant.calibration.session import open_session

    return partial(open_session(model, threads=threads).run, None, feed)


def _plain_onnxruntime(model: str, feed: dict[str, Any], threads: int) -> Callable[[], list[Any]]:
    """Return a function that runs a model in ONNX Runtime as it is installed, without the native operators."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return partial(ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run, None, feed)


def _openvino_package() -> Any:
    """Import the package ``openvino`` without its telemetry: None keeps Python from importing that module."""
    sys.modules.setdefault("openvino_telemetry", cast("Any", None))
    return importlib.import_module("openvino")


def _openvino(model: str, feed: dict[str, Any], threads: int, settings: Mapping[str, str]) -> Callable[[], list[Any]]:
    """Return a function that runs a model in OpenVINO, compiled for the shapes of the feed."""
    core = _openvino_package().Core()
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

FUNCTIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function
    for function in (
        *(network, batch, task, tasks, evaluated, described, calibration),
        *(static, dynamic, nncf, nncf_ir, compressed, ours, configured),
        *(clocked, timed),
    )
}


if __name__ == "__main__":
    print(json.dumps(FUNCTIONS[sys.argv[1]](**json.loads(sys.argv[2]))))
