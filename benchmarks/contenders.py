"""The contenders of the benchmarks, and how each of them quantizes.

    python benchmarks/contenders.py FUNCTION ARGUMENTS

Other benchmarks start a new process for each call, so that the memory of a quantizer is released. FUNCTION is a key of
`FUNCTIONS`, ARGUMENTS are its keyword arguments as JSON. The last line on stdout is the result as JSON. The top of this
file imports only the standard library and `benchmarks.measurements`, whose top does the same, because both files also
run in an interpreter with other packages.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the path then has the folder of this file, and not the one of the package `benchmarks`
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import measurements
from benchmarks.measurements import load_feeds, openvino_package, operators_of

PRODUCTS = ("MatMul", "Gemm", "Conv")


@dataclass(frozen=True, slots=True)
class Contender:
    """A column of the table.

    Attributes:
        label: The title of the column.
        forms: Keys of `FORMS`. All of these models are timed, and the fastest one counts.
        runtime: A key of `measurements.LOADERS`.
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
        raise failure(done)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def failure(done: subprocess.CompletedProcess[str]) -> ContenderError:
    """Return the error of a process that failed: its last line on stderr, or its exit code."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return ContenderError(lines[-1][:300] if lines else f"exit code {done.returncode}")


def has(package: str, python: str | None = None) -> bool:
    """Whether an interpreter has a package; None is this interpreter."""
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python or sys.executable, "-c", probe], check=False).returncode == 0
    except OSError:
        return False


def skipped(label: str, package: str, python: str | None = None) -> str:
    """Return the note that a contender does not take part, because an interpreter does not have a package."""
    return f"{label}: skipped, {package} is not installed in {python or 'this venv'}"


def float_files(folder: Path) -> dict[str, Any]:
    """Return the paths of a float model and its calibration feeds in a folder, as arguments of `call`."""
    return {"model": str(folder / "float.onnx"), "feeds": str(folder / "feeds.npz")}


# ------------------------------------------------------------------------------------------ in the new process


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
    openvino = openvino_package()
    openvino.save_model(_quantized_by_nncf(openvino.Core().read_model(model), model, feeds), output)
    return {}


def _quantized_by_nncf(loaded: Any, model: str, feeds: str) -> Any:
    """Quantize a loaded model with NNCF; transformers get the model type for transformers."""
    os.environ["NNCF_CI"] = "1"  # no telemetry
    import nncf  # type: ignore[import-not-found]

    samples = load_feeds(feeds)
    transformer = FORMS["static-fused"].wants in operators_of(model)
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

    openvino = openvino_package()
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


FUNCTIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function
    for function in (
        *(measurements.network, measurements.batch),
        *(measurements.task, measurements.tasks, measurements.described, measurements.calibration),
        *(static, dynamic, nncf, nncf_ir, compressed, ours, configured, clocked),
        *(measurements.evaluated, measurements.timed),
    )
}


if __name__ == "__main__":
    print(json.dumps(FUNCTIONS[sys.argv[1]](**json.loads(sys.argv[2]))))
