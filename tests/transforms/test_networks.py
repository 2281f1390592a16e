"""What transforms from float to float do to whole networks: nothing but rounding.

The networks are those of `sample_models/architectures.py` and the models of the kit beside the repository, which is
skipped where it is not there.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from requant.calibration.model.session import Array
from requant.transforms import REGISTRY, TransformError, parse_groups, run
from requant.transforms.graphs.queries import every_node
from requant.transforms.registry import REQUIRED

Feeds = Mapping[str, Array]

SAMPLES = Path(__file__).parents[2] / "sample_models"
KIT = Path(__file__).parents[3] / "shared" / "realkit"
FEEDS = """
import sys, numpy
from realkit import TASKS
task = TASKS[sys.argv[1]]
numpy.savez(sys.argv[2], **next(iter(task.calib(1))))
print(task.model)
"""
# Side lengths of the images, where a network takes any.
SIZES = {"unet": 32, "yolo": 64, "yolo_nms": 64} | dict.fromkeys(
    ("efficientnet_b0", "mobilenet_v2", "mobilenet_v3_large", "resnet50", "squeezenet1_1"), 64
)
ARCHITECTURES = (
    *(
        "resnet50",
        "mobilenet_v2",
        "mobilenet_v3_large",
        "efficientnet_b0",
        "squeezenet1_1",
        "vit_b_16",
        "cct_7",
        "bert_base",
    ),
    *("yolo", "yolo_nms", "llama", "lstm_tagger", "unet", "if_branches", "loop_rnn"),
)
TASKS = (
    *("cifar_resnet20", "kwt1", "mbv1_075", "mnist_cntk", "road_segmentation_adas", "silero_vad", "stories260k"),
    *("superres", "ultraface_rfb_320", "yolox_nano"),
)
FAST = {"if_branches", "loop_rnn"}

# Every transform that promises the same values, and what all of them together come to.
EXACT = sorted(
    name
    for name, transform in REGISTRY.items()
    if not (transform.changes_values or transform.changes_io)
    and REQUIRED not in [option.default for option in transform.options.values()]
)
CLEAN = (
    f"{parse_groups('simplify')} remove_no_ops simplify_reshapes sink_transposes merge_transposes merge_clips fuse_hard_sigmoid fold_pad "
    "reduce_mean_to_pool fold_batch_norms strip_unused_nodes"
)


@dataclass(frozen=True)
class Network:
    """A network, an input for it, and its outputs as it is written."""

    model: ir.Model
    feeds: Feeds
    expected: Feeds


def outputs(model: ir.Model, feeds: Feeds) -> Feeds:
    """Run a model as it is written, with no optimisation by the runtime."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return {name: np.asarray(result) for name, result in zip(names, session.run(names, dict(feeds)), strict=True)}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in (*ARCHITECTURES, *TASKS)],
)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Network:
    name = request.param
    if name in ARCHITECTURES:
        sys.path.insert(0, str(SAMPLES))
        architectures = importlib.import_module("architectures")
        sys.path.remove(str(SAMPLES))
        model = ir.from_proto(architectures.build(name, size=SIZES.get(name)))
        feeds = next(iter(architectures.feeds(name, count=1, size=SIZES.get(name))))
    elif not (KIT / "realkit.py").is_file():
        pytest.skip("no kit of real models in ../shared/realkit")
    else:
        file = tmp_path_factory.mktemp("feeds") / "feeds.npz"
        command = [sys.executable, "-c", FEEDS, name, str(file)]
        done = subprocess.run(command, cwd=KIT, capture_output=True, text=True, check=True)
        model = ir.load(done.stdout.strip())
        with np.load(file) as arrays:
            feeds = dict(arrays)
    return Network(model, feeds, outputs(model, feeds))


def test_the_table_names_every_architecture() -> None:
    sys.path.insert(0, str(SAMPLES))
    architectures = importlib.import_module("architectures")
    sys.path.remove(str(SAMPLES))
    assert set(ARCHITECTURES) == set(architectures.NAMES)


def rounding(model: ir.Model) -> float:
    """Bound the error of a network that computes the same in another order, relative to its largest output.

    As in `test_transform_contract.py`, of all nodes, those of bodies and functions too.
    """
    nodes = every_node(model)
    lengths = []
    for node in nodes:
        product = node.op_type in ("Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul") and len(node.inputs) > 1
        weight = node.inputs[1] if product else None
        if weight is not None and weight.const_value is not None:
            shape = weight.const_value.shape.numpy()
            rows = node.op_type == "Conv" or node.attributes.get_int("transB", 0) == 1
            lengths.append(prod(shape) / shape[0 if rows else -1])
    return float(np.finfo(np.float32).eps) * (sum(6 * sqrt(length) for length in lengths) + len(nodes))


@pytest.mark.parametrize("pipeline", [*EXACT, pytest.param(CLEAN, id="all")])
def test_outputs_of_a_network_stay_within_rounding(network: Network, pipeline: str) -> None:
    try:
        result = run(pipeline, network.model)
    except TransformError:
        assert pipeline == "convert_opset"
        return
    if not any(step.change.applied for step in result.applied):
        return
    bound = rounding(network.model)
    found = outputs(result.model, network.feeds)
    for name, expected in network.expected.items():
        assert found[name].shape == expected.shape
        assert found[name].dtype == expected.dtype
        largest = float(np.max(np.abs(expected), initial=0))
        error = float(np.max(np.abs(found[name] - expected), initial=0))
        if __import__("os").environ.get("SHOW"):
            print(
                pipeline[:30],
                name,
                error,
                bound * largest,
                error / (bound * largest + 1e-30),
                [str(s.change) for s in result.applied] if len(result.applied) > 1 else str(result.applied[0].change),
            )
        assert error <= bound * largest
