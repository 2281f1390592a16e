"""Real trained models with real data: the INT8 models are valid, load, and are as accurate as expected.

The kit is in a folder next to the repository. Without the kit these tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest

from requant.quantize import Options, Result, quantize_model

KIT = Path(__file__).parents[1].parent / "shared" / "realkit"
REASON = "" if (KIT / "realkit.py").is_file() else "no kit of real models in ../shared/realkit"
if not REASON and importlib.util.find_spec("PIL") is None:
    REASON = "the kit of real models needs Pillow"

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

FIGURES = """
import json, sys
sys.path.insert(0, sys.argv[1])
from realkit import TASKS
task, paths, n = TASKS[sys.argv[2]], sys.argv[3:-1], int(sys.argv[-1]) or None
print(json.dumps([task.evaluate(path, n=n)[task.metric] for path in paths]))
"""


def path_of(task: str) -> Path:
    """Return the float model of a task."""
    done = subprocess.run(
        [sys.executable, "-c", f"from realkit import TASKS; print(TASKS[{task!r}].model)"],
        cwd=KIT,
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(done.stdout.strip())


def evaluate(task: str, *models: Path, items: int = 0) -> list[float]:
    """Return the main metric of each model; the kit runs in a new process. 0 means all items."""
    arguments = [str(KIT), task, *map(str, models), str(items)]
    done = subprocess.run([sys.executable, "-c", FIGURES, *arguments], capture_output=True, text=True, check=True)
    return [float(figure) for figure in json.loads(done.stdout)]


def quantize(task: str, output: Path, options: Options) -> Result:
    """Quantize the model of a task with its calibration data, and assert that the model is valid and loads."""
    float_model = path_of(task)
    result = quantize_model(float_model, f"{KIT / 'realkit.py'}:{task}_calib", output, options)
    onnx.checker.check_model(output, full_check=True)
    before, after = (ort.InferenceSession(path, providers=["CPUExecutionProvider"]) for path in (float_model, output))
    for ends in ("get_inputs", "get_outputs"):
        assert [(e.name, e.type, e.shape) for e in getattr(before, ends)()] == [
            (e.name, e.type, e.shape) for e in getattr(after, ends)()
        ]
    return result


@dataclass(frozen=True)
class Bound:
    """The goal of the INT8 model of a task.

    Attributes:
        least: The lowest value of the main metric; None for no absolute bound.
        loss: The largest loss compared with float; None for no relative bound.
        speedup: The lowest speed-up; 0 if the result may be float.
        lower: Whether a smaller value is better; then `loss` is a share of the float value.
    """

    least: float | None = None
    loss: float | None = None
    speedup: float = 0.0
    lower: bool = False


@pytest.mark.parametrize(
    ("task", "samples", "items", "loss"),
    [
        pytest.param("mnist_cntk", 20, 100, 0.0, id="mnist_cntk"),
        pytest.param("superres", 4, 8, 1.0, id="superres"),
        pytest.param("kwt1", 8, 30, 0.05, id="kwt1"),
        pytest.param("silero_vad", 6, 8, 0.05, id="silero_vad"),  # bodies, and branches that are never taken
    ],
)
def test_a_small_model_comes_out_valid_and_works(
    task: str, samples: int, items: int, loss: float, tmp_path: Path, int8_wins: None
) -> None:
    """With few samples and items the bounds are loose, but a collapsed model is far below them."""
    output = tmp_path / "int8.onnx"
    result = quantize(
        task, output, Options(samples=samples, place="rules", effort="low", force_int8=True, seconds=0.01)
    )
    assert result.int8_nodes > 0
    assert result.mac_share_int8 > 0.5
    before, after = evaluate(task, path_of(task), output, items=items)
    assert after >= before - loss


BOUNDS = {
    "mbv1_075": Bound(loss=0.015, speedup=1.9),
    "cifar_resnet20": Bound(loss=0.003, speedup=1.9),
    "kwt1": Bound(loss=0.015),
    "yolox_nano": Bound(least=0.20),
    "stories260k": Bound(loss=0.03, lower=True),
    "silero_vad": Bound(least=0.995),
    "superres": Bound(loss=1.0),  # dB
    "ultraface_rfb_320": Bound(least=1.0),
    "road_segmentation_adas": Bound(least=1.0),
    "mnist_cntk": Bound(least=1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(("task", "bound"), BOUNDS.items(), ids=BOUNDS)
def test_a_model_with_default_settings_is_as_accurate_and_fast_as_promised(
    task: str, bound: Bound, tmp_path: Path
) -> None:
    output = tmp_path / "int8.onnx"
    result = quantize(task, output, Options())
    before, after = evaluate(task, path_of(task), output)
    print(f"{task}: {before:.4f} -> {after:.4f}, {result.speedup:.2f}x {result.why_not}")
    if bound.least is not None:
        assert after >= bound.least
    if bound.loss is not None:
        assert after <= before * (1 + bound.loss) if bound.lower else after >= before - bound.loss
    # if int8 is not faster, the result is float with a verdict
    assert result.why_not or result.speedup > 1.0
    assert result.speedup >= bound.speedup
