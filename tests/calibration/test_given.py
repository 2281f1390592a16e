"""Arguments of the Python API of another kind than they must be: one clear line, and no error from deep inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from requant import RequantError, transforms
from requant.calibration import Calibrator, Execution
from requant.quantize import Options, Selection, compare_models, merge_ranges, quantize_model
from requant.quantize.runtime.runtimes import Setting
from requant.transforms import transform

TEXT = '<ir_version: 8, opset_import: ["" : 17]> net (float[N,2] x) => (float[N,2] y) { [n] y = Neg(x) }'
OTHER = TEXT.replace("float[N,2] x", "float[N,2] z").replace("Neg(x)", "Neg(z)")
MODEL, ANOTHER = (onnx.parser.parse_model(text).SerializeToString() for text in (TEXT, OTHER))
FEEDS = [{"x": np.ones((1, 2), np.float32)}]


def some(value: object) -> Any:
    """Return a value of a type that the signature does not allow."""
    return value


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no files": (lambda: merge_ranges([]), "there are no range files to merge"),
    "an executor by name": (
        lambda: Execution(executor=some("threads")),
        "executor must be an Executor or a function or None",
    ),
    "a limit as text": (
        lambda: Execution(memory_limit=some("2GB")),
        "memory_limit must be an integer or None, not a str",
    ),
    "one tensor as text": (lambda: Calibrator(MODEL, "y"), "tensors must be a sequence of names, not 'y'"),
    "one correction": (lambda: Options(corrections=some("means")), "corrections must be a tuple or None, not"),
    "one node": (lambda: Selection(exclude_nodes=some("conv1")), "exclude_nodes must be a sequence of names, not"),
    "a strategy": (lambda: Selection(strategy=some("foo")), "no strategy named 'foo'"),
    "strategies": (lambda: Selection(strategies={"n": some("foo")}), "no strategy named 'foo'"),
    "negative seconds": (lambda: Options(seconds=-1), "seconds must be 0 or more, not -1"),
    "no seconds": (lambda: Options(seconds=float("nan")), "seconds must be 0 or more, not nan"),
    "threads": (lambda: Setting(threads=-3), "threads must be 0 .* or more, not -3"),
    "a message": (lambda: Calibrator(some(onnx.ModelProto())), "path of a file or its bytes, not a ModelProto"),
    "bytes": (
        lambda: quantize_model(some(MODEL), FEEDS, "q.onnx"),
        "the model must be the path of a file, not a bytes",
    ),
    "bytes twice": (lambda: compare_models(some(MODEL), "q.onnx", FEEDS), "the float model must be the path"),
    "a function": (
        lambda: compare_models("a", "b", FEEDS, metric=some(len)),
        "the metric must be a name, FILE.py:NAME",
    ),
    "a rule": (lambda: Calibrator(MODEL).ranges(some(None)), "a rule must be a text such as 'mse', not None"),
    "no histograms": (
        lambda: Calibrator(MODEL, histogram=False).observe(FEEDS).ranges("mse"),
        "the rule mse needs histograms, and this calibrator has histogram=False",
    ),
    "nothing seen": (lambda: Calibrator(MODEL).save("never.json"), "nothing was observed"),
    "another model": (lambda: Calibrator(MODEL).merge(Calibrator(ANOTHER)), "of different models or tensors"),
    "a model as bytes": (lambda: transforms.run("fold_constants", some(MODEL)), r"run takes an onnx_ir\.Model"),
}


@pytest.mark.parametrize(("call", "told"), REFUSED.values(), ids=REFUSED)
def test_an_argument_of_another_kind_is_refused(
    call: Callable[[], object], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequantError, match=told) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_collections_of_names_may_be_of_any_kind() -> None:
    assert Selection(exclude_nodes=some(["a", "b", "a"])) == Selection(exclude_nodes=frozenset("ab"))
    assert Calibrator(MODEL, ["y"]).tensors == ("y",)


@pytest.mark.parametrize("name", ["bad name", "", "9lives", "Upper"])
def test_a_transform_has_a_name_that_a_pipeline_can_write(name: str) -> None:
    def rewrite(model: Any) -> Any:
        """Do nothing."""

    with pytest.raises(TypeError, match="is no name of a transform"):
        transform(name)(rewrite)
    assert name not in transforms.REGISTRY


def test_two_modules_cannot_take_one_name() -> None:
    def rewrite(model: Any) -> Any:
        """Do nothing."""

    rewrite.__qualname__ = transforms.REGISTRY["fold_constants"].function.__qualname__
    with pytest.raises(TypeError, match="two transforms named 'fold_constants'"):
        transform("fold_constants")(rewrite)
