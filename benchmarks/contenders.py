"""The contenders of the speed table: how each makes its INT8 model, and how the models are timed against each other.

    python benchmarks/contenders.py FUNCTION ARGUMENTS

Every call from `benchmarks.speed` is a process of its own, so that what a quantizer holds is given back: FUNCTION is
a key of `FUNCTIONS`, ARGUMENTS its keyword arguments as JSON, and the last line on stdout the result as JSON. At the
top it imports the standard library alone, because it also runs in the interpreter of a library that is compared with.
"""

from __future__ import annotations

import contextlib
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
from typing import Any

SAMPLES = Path(__file__).parents[1] / "sample_models"
CALIBRATION = 8
PRODUCTS = ("MatMul", "Gemm", "Conv")
OPENVINO = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
"""Without the second OpenVINO computes what is float in bfloat16 where the processor can."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A column of the table.

    Attributes:
        label: Its title.
        forms: Keys of `FORMS`, the models that it may bring; the fastest counts.
        runtime: ``onnxruntime`` or ``openvino``.
        needs: The package that makes its models, where that is no dependency of this project.
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
        arguments: Its arguments beside the model, the feeds and the output.
        wants: The operator without which a model has nothing to gain by this form.
        per_batch: Whether the model is made for a size of batch.
        peer: Whether it is made in the interpreter of the libraries that this project does not depend on.
    """

    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    wants: str = ""
    per_batch: bool = False
    peer: bool = False


CONTENDERS: Mapping[str, Contender] = {
    "static": Contender("ORT static", ("static", "static-products", "static-fused")),
    "dynamic": Contender("ORT dynamic", ("dynamic", "dynamic-products", "dynamic-fused")),
    "nncf": Contender("NNCF", ("nncf",), needs="nncf"),
    "ours": Contender("ours", ("ours",)),
    "nncf-openvino": Contender("NNCF in OpenVINO", ("nncf",), "openvino", "nncf"),
    "ours-openvino": Contender("ours in OpenVINO", ("portable",), "openvino"),
}
"""Whoever is compared with the float model in ONNX Runtime."""

FORMS: Mapping[str, Form] = {
    "static": Form("static"),
    "static-products": Form("static", {"operators": PRODUCTS}, wants="MatMul"),
    "static-fused": Form("static", {"operators": PRODUCTS, "fuse": True}, wants="LayerNormalization"),
    "dynamic": Form("dynamic"),
    "dynamic-products": Form("dynamic", {"operators": ("MatMul", "Gemm", "Attention")}, wants="MatMul"),
    "dynamic-fused": Form(
        "dynamic", {"operators": ("MatMul", "Gemm", "Attention"), "fuse": True}, wants="LayerNormalization"
    ),
    "nncf": Form("nncf", peer=True),
    "ours": Form("ours", per_batch=True),
    "portable": Form("ours", {"portable": True}),
    "guarded": Form("ours", {"force_int8": False}, per_batch=True),
}


def forms_for(contender: Contender, operators: Collection[str]) -> tuple[str, ...]:
    """Return the forms of a contender that make sense for a model of these operators."""
    return tuple(name for name in contender.forms if not FORMS[name].wants or FORMS[name].wants in operators)


# ------------------------------------------------------------------------------------------------- from outside


class ContenderError(Exception):
    """A contender cannot do its part; the text says why."""


def call(function: str, *, python: str | None = None, **arguments: Any) -> dict[str, Any]:
    """Call a function of `FUNCTIONS` in a process of its own.

    Args:
        function: The function.
        python: The interpreter; None for this one.
        arguments: Its arguments, plain JSON values.

    Raises:
        ContenderError: The interpreter is not there, or the function fails.
    """
    command = [python or sys.executable, __file__, function, json.dumps(arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ContenderError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise ContenderError(lines[-1][:300] if lines else f"exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def has(package: str, python: str | None = None) -> bool:
    """Tell whether an interpreter, this one by default, has a package."""
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python or sys.executable, "-c", probe], check=False).returncode == 0
    except OSError:
        return False


# ------------------------------------------------------------------------------------ in a process of its own


def save_feeds(path: str, feeds: Sequence[Mapping[str, Any]]) -> None:
    """Write feeds into one file."""
    import numpy as np

    arrays = {f"{index}/{name}": array for index, feed in enumerate(feeds) for name, array in feed.items()}
    np.savez(path, **arrays)


def load_feeds(path: str) -> list[dict[str, Any]]:
    """Read feeds."""
    import numpy as np

    feeds: dict[int, dict[str, Any]] = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            index, _, name = key.partition("/")
            feeds.setdefault(int(index), {})[name] = arrays[key]
    return [feeds[index] for index in sorted(feeds)]


def network(name: str, model: str, feeds: str) -> dict[str, Any]:
    """Write a generated architecture and the feeds that calibrate it."""
    sys.path.insert(0, str(SAMPLES))
    import architectures
    import onnx

    onnx.save(architectures.build(name), model)
    save_feeds(feeds, architectures.feeds(name, count=CALIBRATION))
    return _operators(model)


def batch(name: str, size: int, feeds: str) -> dict[str, Any]:
    """Write one feed of a generated architecture, of `size` items, that it is not calibrated on."""
    sys.path.insert(0, str(SAMPLES))
    import architectures

    save_feeds(feeds, architectures.feeds(name, batch=size, seed=1, count=1))
    return {}


def task(kit: str, name: str, model: str, feeds: str, samples: int | None = None) -> dict[str, Any]:
    """Copy the model of a task of a kit of real models, and write the first of its calibration feeds, or all."""
    import shutil

    sys.path.insert(0, kit)
    from realkit import TASKS  # type: ignore[import-not-found]

    shutil.copy(TASKS[name].model, model)
    save_feeds(feeds, list(TASKS[name].calib(samples)))
    return _operators(model)


def tasks(kit: str) -> dict[str, Any]:
    """Return the names of the tasks of a kit of real models."""
    sys.path.insert(0, kit)
    from realkit import TASKS

    return {"tasks": list(TASKS)}


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

    Scales per channel are of opset 13; an older model gets one scale per weight. Ranges are those of minima and maxima,
    or of a percentile.
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

    Weights are uint8 where convolutions are quantized too, because ConvInteger takes no int8 weights beside uint8
    activations, else int8 per channel.
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
    """Write what ONNX Runtime's quantizers want to be given, and return where.

    `fuse` adds its optimizer for transformers, which the documentation advises for them.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process

    if fuse:
        from onnxruntime.transformers.optimizer import optimize_model

        fused = f"{folder}/fused.onnx"
        optimize_model(model, model_type="bert", num_heads=0, hidden_size=0, opt_level=1).save_model_to_file(fused)
        model = fused
    model, prepared = os.path.abspath(model), os.path.abspath(f"{folder}/prepared.onnx")
    with contextlib.chdir(folder):  # symbolic inference leaves files where it fails
        try:
            quant_pre_process(model, prepared)
        except Exception:  # noqa: BLE001 - it does in ways of its own; without it is what users are told
            quant_pre_process(model, prepared, skip_symbolic_shape=True)
    return prepared


def nncf(model: str, feeds: str, output: str) -> dict[str, Any]:
    """Quantize with NNCF's post-training quantization for ONNX, told whether the model is a transformer."""
    os.environ["NNCF_CI"] = "1"  # no telemetry
    import nncf  # type: ignore[import-not-found]
    import onnx

    loaded = onnx.load(model)
    transformer = FORMS["static-fused"].wants in {node.op_type for node in loaded.graph.node}
    samples = load_feeds(feeds)
    quantized = nncf.quantize(
        loaded,
        nncf.Dataset(samples),
        subset_size=len(samples),
        model_type=nncf.ModelType.TRANSFORMER if transformer else None,
    )
    onnx.save(quantized, output)
    return {}


def ours(
    model: str,
    feeds: str,
    output: str,
    batch: int = 1,
    threads: int = 1,
    force_int8: bool = True,
    portable: bool = False,
) -> dict[str, Any]:
    """Quantize with this project's defaults; return what it predicted and measured, in ms."""
    from requant.quantize import Options, quantize_model

    options = Options(force=True, force_int8=force_int8, batch=batch, threads=threads, portable=portable)
    result = quantize_model(model, load_feeds(feeds), output, options)
    told = result.to_json()
    return {
        "predicted_ms": getattr(result, "predicted_ms", None),
        "latency": told["latency"],
        "verdict": told["verdict"],
        "mac_share_int8": told["mac_share_int8"],
    }


def configured(model: str, feeds: str, output: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Quantize with this project, with options; return what it says of the result."""
    from requant.quantize import Options, quantize_model

    given: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in options.items()}
    told = quantize_model(model, load_feeds(feeds), output, Options(force=True, **given)).to_json()
    return {name: told[name] for name in ("verdict", "mac_share_int8", "float_nodes")}


def clocked(what: str, **arguments: Any) -> dict[str, Any]:
    """Call another function, and add the ``seconds`` that it took."""
    import time

    start = time.perf_counter()
    found = FUNCTIONS[what](**arguments)
    return {**found, "seconds": time.perf_counter() - start}


def evaluated(kit: str, name: str, model: str, items: int | None, reference: str) -> dict[str, Any]:
    """Measure a model on the evaluation data of a task of a kit of real models, against the float model.

    Args:
        kit: The kit.
        name: The task.
        model: The model.
        items: How many items; None for all.
        reference: Where the float model's result is kept, which is written when it is not there: then `model` is it.

    Returns:
        ``metric``, ``lower``, ``value``, ``items``; against the float model ``drop``, ``agreement`` and ``sqnr_db`` of
        the worst output (None where they are equal); ``broken``, ``fixed``, ``p_value`` and ``interval`` where the task
        tells of single items; and ``invalid``, why the model is none, or nothing.
    """
    import pickle

    sys.path.insert(0, kit)
    from kitlib.compare import output_sqnr  # type: ignore[import-not-found]
    from kitlib.task import open_session  # type: ignore[import-not-found]
    from realkit import TASKS

    row = TASKS[name]
    found = row.evaluate(model, items)
    if not os.path.exists(reference):
        with open(reference, "wb") as file:
            pickle.dump((model, found), file)
    with open(reference, "rb") as file:
        float_model, before = pickle.load(file)  # written above
    feeds = list(row.eval_feeds(min(16, found["n"])))
    noise = output_sqnr(open_session(float_model), open_session(model), feeds)
    worst = min((-math.inf if math.isnan(value) else value for value in noise.values()), default=math.inf)
    one, two = before[row.metric], found[row.metric]
    return {
        "metric": row.metric,
        "lower": row.lower_is_better,
        "value": found[row.metric],
        "items": found["n"],
        "drop": two - one if row.lower_is_better else one - two,
        "agreement": row.agreement(before, found),
        "sqnr_db": None if worst == math.inf else worst,
        "invalid": _invalid(model),
        **_paired(row.metric, before, found),
    }


def _paired(metric: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return what single items tell of two results of a kit."""
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
    found = {"broken": broken, "fixed": fixed, "p_value": binomial_p(broken, fixed)}
    share = metric == "top1"  # of other metrics the items are not those that are judged
    return {**found, "interval": paired_interval(broken, fixed, len(before["correct"])) if share else None}


def _invalid(model: str) -> str:
    """Return what is wrong with a model by the checker of onnx; nothing where it is valid."""
    import onnx

    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # noqa: BLE001 - the checker has several kinds
        return " ".join(str(error).split())[:200]
    return ""


def timed(cases: Sequence[Mapping[str, str]], feeds: str, threads: int, seconds: float) -> dict[str, Any]:
    """Time models on the first feed, in turns, in this process.

    Args:
        cases: ``name``, ``model``, ``runtime`` of each; the first is the float model.
        feeds: A file of feeds.
        threads: Threads inside one operator.
        seconds: How long all of them are timed together.

    Returns:
        By name ``ms`` (minimum), ``median_ms``, ``runs`` and ``sqnr_db`` (the worst output against the first model's,
        None where they are equal), or ``error``.
    """
    import statistics

    from requant.quantize.runtime.timing import interleave

    feed = load_feeds(feeds)[0]
    runs: dict[str, Callable[[], list[Any]]] = {}
    found: dict[str, Any] = {}
    expected: list[Any] | None = None
    for case in cases:
        try:
            run = LOADERS[case["runtime"]](case["model"], feed, threads)
            outputs = run()
        except Exception as error:  # noqa: BLE001 - a model that does not run is a finding
            found[case["name"]] = {"error": " ".join(str(error).split())[:300]}
            continue
        expected = outputs if expected is None else expected
        runs[case["name"]] = run
        found[case["name"]] = {"sqnr_db": worst_sqnr(expected, outputs)}
    for name, times in zip(runs, interleave(list(runs.values()), seconds=seconds), strict=True):
        found[name] |= {"ms": 1e3 * min(times), "median_ms": 1e3 * statistics.median(times), "runs": len(times)}
    return found


def worst_sqnr(expected: Sequence[Any], outputs: Sequence[Any]) -> float | None:
    """Return the least ratio of signal to noise in dB over the float outputs, None where all are equal.

    Raises:
        ContenderError: An output is not finite, or has another shape.
    """
    import numpy as np

    worst = math.inf
    for first, second in zip(expected, outputs, strict=True):
        if first.dtype.kind != "f":
            continue
        if first.shape != second.shape or not np.isfinite(second).all():
            raise ContenderError("an output is not finite, or has another shape than the float model's")
        signal, noise = (float(np.square(x, dtype=np.float64).sum()) for x in (first, second - first))
        if noise and signal:
            worst = min(worst, 10 * math.log10(signal / noise))
    return None if worst == math.inf else worst


def _onnxruntime(model: str, feed: dict[str, Any], threads: int) -> Callable[[], list[Any]]:
    """Return a run in ONNX Runtime with its defaults."""
    from requant.calibration.session import open_session

    return partial(open_session(model, threads=threads).run, None, feed)


def _openvino(model: str, feed: dict[str, Any], threads: int) -> Callable[[], list[Any]]:
    """Return a run in OpenVINO."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # no telemetry
    import openvino

    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model), "CPU", {**OPENVINO, "INFERENCE_NUM_THREADS": threads})
    request = compiled.create_infer_request()

    def run() -> list[Any]:
        found = request.infer(feed, share_inputs=True, share_outputs=True)
        return [found[output] for output in compiled.outputs]

    return run


LOADERS: Mapping[str, Callable[[str, dict[str, Any], int], Callable[[], list[Any]]]] = {
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}

FUNCTIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function
    for function in (
        *(network, batch, task, tasks, evaluated),
        *(static, dynamic, nncf, ours, configured),
        *(clocked, timed),
    )
}


if __name__ == "__main__":
    print(json.dumps(FUNCTIONS[sys.argv[1]](**json.loads(sys.argv[2]))))
