"""Arguments of the Python API of another kind than they must be: one clear line, and no error from deep inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from requant import RequantError, transforms
from requant.calibration import (
    Calibrator,
    Execution,
    Histogram,
    MinMax,
    Moments,
    Precision,
    entropy,
    expected_error,
    fingerprint,
    input_specs,
    load_ranges,
    mean_minmax,
    merge,
    minmax,
    mse,
    observe,
    percentile,
    write_atomically,
)
from requant.quantize import (
    Options,
    Scheme,
    Selection,
    check_project,
    choose,
    compare_models,
    compile_model,
    inspect_model,
    log_model,
    measure_sensitivity,
    merge_ranges,
    quantize_model,
    search_model,
)
from requant.quantize.accuracy.drop import parse_drop
from requant.quantize.accuracy.metrics import metric_named
from requant.quantize.runtime.runtimes import Setting
from requant.transforms import transform

TEXT = '<ir_version: 8, opset_import: ["" : 17]> net (float[N,2] x) => (float[N,2] y) { [n] y = Neg(x) }'
OTHER = TEXT.replace("float[N,2] x", "float[N,2] z").replace("Neg(x)", "Neg(z)")
MODEL, ANOTHER = (onnx.parser.parse_model(text).SerializeToString() for text in (TEXT, OTHER))
NET = ir.from_proto(onnx.parser.parse_model(TEXT))
REMOVE = transforms.REGISTRY["remove_nodes"]
SEEN = Histogram.of(np.linspace(0, 1, 100))
FEEDS = [{"x": np.ones((1, 2), np.float32)}]


DIGITS = Path(__file__).parents[2] / "sample_models" / "digits.onnx"


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
    "another network": (
        lambda: Calibrator(MODEL).merge(Calibrator(MODEL.replace(b"Neg", b"Exp"))),
        "of different models or tensors",
    ),
    "other channels": (
        lambda: Calibrator(MODEL, channel_axis={"y": 0}).merge(Calibrator(MODEL, channel_axis={"y": 1})),
        "calibrators with different channel axes cannot be merged",
    ),
    "three shards": (lambda: Execution(shard=some((1, 2, 3))), "a shard has two numbers, its own and how many"),
    "half a shard": (lambda: Execution(shard=some((1.5, 2))), "a shard must be an integer, not a float"),
    "endless shards": (lambda: Execution(shard=(1, 10**18)), r"invalid shard 1/10+: write i/n with 1 <= i <= n < 10"),
    "no executor": (
        lambda: Calibrator(MODEL, execution=Execution(executor=some(lambda: 3))).observe(FEEDS),
        "must return a concurrent.futures.Executor, not an int",
    ),
    "an execution": (lambda: Calibrator(MODEL, execution=some({})), "execution must be an Execution, not a dict"),
    "a share of an axis": (
        lambda: Calibrator(MODEL, channel_axis={"y": some(1.5)}),
        "the channel axis of 'y' must be an integer, not a float",
    ),
    "axes": (lambda: Calibrator(MODEL, channel_axis=some(5)), "channel_axis must be a mapping from names"),
    "axes of numbers": (lambda: Calibrator(MODEL, channel_axis=some({1: 1})), "channel_axis must be a mapping from"),
    "histograms": (lambda: Calibrator(MODEL, histogram=some("a")), "histogram must be True or False, not a str"),
    "a precision to save": (
        lambda: Calibrator(MODEL).observe(FEEDS).save("r.json", precision=some(3)),
        "precision must be a Precision, not an int",
    ),
    "a precision": (
        lambda: Calibrator(MODEL).observe(FEEDS).ranges("mse", some("u8")),
        "precision must be a Precision, not a str",
    ),
    "bits": (lambda: Precision(bits=some(None)), "bits must be an integer, not None"),
    "a number of other digits": (lambda: Calibrator(MODEL).ranges("percentile(९९)"), "'९९' is not a number"),
    "underscores": (lambda: Calibrator(MODEL).ranges("percentile(9_9)"), "'9_9' is not a number"),
    "nowhere": (lambda: Calibrator(MODEL).observe(FEEDS).save(some(None)), "a range file must be the path of a file"),
    "a NUL": (lambda: Calibrator(MODEL).observe(FEEDS).save("a\0b"), r"'a\\x00b' is no path: it contains a NUL"),
    "no model": (lambda: inspect_model(some(None)), "a model must be the path of a file, not None"),
    "no ranges": (lambda: load_ranges(some(5)), "a range file must be the path of a file, not an int"),
    "range files": (lambda: merge_ranges(some(None)), "paths must be a sequence of range files, not None"),
    "a batch of nothing": (lambda: Options(batch=some([None])), "batch must be an integer or several, not None"),
    "a statistic by number": (
        lambda: Calibrator(MODEL).observe(FEEDS)[some(5)],
        "the name of a tensor must be a text, not an int",
    ),
    "a group by number": (lambda: transforms.join(some(5), 1, "fold_constants"), "the name of a group must be a text"),
    "a step by number": (lambda: transforms.join("mine", 1, some(5)), "a step must be a text, not an int"),
    "a model as bytes": (lambda: transforms.run("fold_constants", some(MODEL)), r"run takes an onnx_ir\.Model"),
    "a fingerprint of bytes": (
        lambda: fingerprint(some(MODEL)),
        r"fingerprint takes an onnx_ir\.Model, .* not a bytes",
    ),
    "a signature of a path": (lambda: transforms.signature(some("m.onnx")), r"signature takes an onnx_ir\.Model"),
    "a check of a path": (lambda: transforms.verify(some("m.onnx")), r"verify takes an onnx_ir\.Model"),
    "a signature as text": (lambda: transforms.verify(NET, like=some("x")), "like must be a Signature, .* not a str"),
    "a message as bytes": (lambda: transforms.verify(NET, message=some(MODEL)), "message must be a ModelProto, not"),
    "a plan of a path": (lambda: choose(some("m.onnx")), r"choose takes an onnx_ir\.Model"),
    "a plan by a name": (lambda: choose(NET, some("n")), "selection must be a Selection, not a str"),
    "a plan by a list": (lambda: choose(NET, ranges=some(["y"])), "ranges must be a mapping from names, not a list"),
    "a plan of u4": (lambda: choose(NET, activation="u4"), "no activation type named 'u4'"),
    "a type as a list": (lambda: Scheme(activation=some([])), "activation must be a text, not a list"),
    "merged paths": (lambda: merge(some("a.json"), {}), "merge takes two mappings .*, not a str"),
    "merged pairs": (lambda: merge({}, {"y": some((0, 1))}), "merge takes two mappings .* to statistics, not a tuple"),
    "merged kinds": (
        lambda: merge({"y": MinMax(0, 1, 1)}, {"y": some(Moments.of(np.ones(3)))}),
        "tensor 'y': min and max alone cannot be merged with moments",
    ),
    "a rule of an array": (
        lambda: mse(some(np.ones(3)), Precision()),
        "a range rule takes a Histogram, .* not a ndarray",
    ),
    "a rule by bits": (lambda: entropy(SEEN, some(8)), "precision must be a Precision, not an int"),
    "ends of a list": (lambda: minmax(some([1])), "a range rule takes a MinMax or a Histogram, not a list"),
    "means of a number": (lambda: mean_minmax(SEEN, some(3)), "runs must be Runs or None, not an int"),
    "a huge percentage": (lambda: percentile(SEEN, 1e30), r"p must be above 50 and at most 100, not 1e\+30"),
    "no percentage": (lambda: percentile(SEEN, some(None)), "p must be a number, not None"),
    "an error of a text": (lambda: expected_error(SEEN, some("0"), 1.0, Precision()), "lo must be a number, not a str"),
    "negative bits": (lambda: Precision(bits=-1), "-1 bits; a quantized tensor has 2 to 16 bits"),
    "no session": (
        lambda: input_specs(some(None)),
        "must be an InferenceSession, as open_session returns it, not None",
    ),
    "the name of data": (
        lambda: observe(MODEL, ["y"], some("d.npz"), histogram=True),
        "observe takes samples, as open_source returns them, not the name of data",
    ),
    "feeds": (lambda: observe(MODEL, ["y"], some(FEEDS), histogram=True), "observe takes samples, .*, not a dict"),
    "strategies as a list": (
        lambda: Selection(strategies=some([])),
        "strategies must be a mapping from names of nodes",
    ),
    "a strategy as an array": (lambda: Selection(strategy=some(np.ones(2))), "no strategy named"),
    "names in a model": (
        lambda: Selection(exclude_ops=some(NET)),
        "exclude_ops must be a sequence of names, not a Model",
    ),
    "a transform by number": (
        lambda: transforms.lookup(some([])),
        "the name of a transform must be a text, not a list",
    ),
    "a group by list": (lambda: transforms.members(some([])), "the name of a group must be a text, not a list"),
    "inputs as a text": (
        lambda: transforms.run("fold_constants", NET, inputs="x"),
        "inputs must be a sequence of names",
    ),
    "a call of a number": (lambda: transforms.run("fold_constants", NET, keep=some(3)), "keep must be a function"),
    "kinds": (lambda: measure_sensitivity(DIGITS, FEEDS, kinds=some(3)), "kinds must be a sequence of names, not 3"),
    "overrides": (lambda: check_project("requant.toml", overrides=some([])), "overrides must be a mapping from keys"),
    "no goal": (lambda: search_model(DIGITS, FEEDS, "q.onnx", some(None)), "the goal must be a Goal, not None"),
    "kernels": (lambda: compile_model(DIGITS, "q.onnx", kernels=some(3)), "kernels must be one of .*, not an int"),
    "a long name": (lambda: quantize_model(1000 * "m", FEEDS, "q.onnx"), "cannot be read: File name too long"),
    "a drop by number": (lambda: parse_drop(some(0.5)), "a drop must be a text such as '0.5%', not a float"),
    "a metric by number": (lambda: metric_named(some(5)), "a metric must be a name or FILE.py:NAME, not an int"),
    "a call on bytes": (lambda: REMOVE(some(MODEL), op=("Neg",)), r"remove_nodes takes an onnx_ir\.Model"),
    "a call without options": (lambda: REMOVE(NET), "remove_nodes: needs op"),
    "a call with another option": (lambda: REMOVE(NET, ops=("Neg",)), "no option of remove_nodes named 'ops'; did you"),
    "a call with a number": (lambda: REMOVE(NET, op=3), "remove_nodes: op must be a tuple, not an int"),
    "written text": (lambda: write_atomically("y.json", some("{}")), "the content of a file must be bytes, not a str"),
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


@pytest.mark.parametrize("name", ["m.onnx", "d.npz"])
def test_no_output_overwrites_an_input(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.onnx").write_bytes(MODEL)
    np.savez("d.npz", x=np.ones((2, 1, 2), np.float32))
    before = Path(name).read_bytes()
    calls: list[Callable[[], object]] = [
        lambda: log_model("m.onnx", "d.npz", name),
        lambda: compile_model("m.onnx", name, "d.npz", force=True),
        lambda: Calibrator("m.onnx").observe("d.npz").save(name),
    ]
    for call in calls:
        with pytest.raises(RequantError, match=f"^{name}: the .* would overwrite the input"):
            call()
    assert Path(name).read_bytes() == before


@pytest.mark.parametrize("damage", ["gone", "cut", "a folder", "linked twice"])
@pytest.mark.parametrize("call", [fingerprint, transforms.verify, choose, partial(transforms.run, "fold_constants")])
def test_external_data_of_a_model_in_memory_are_checked(
    call: Callable[[ir.Model], object], damage: str, tmp_path: Path
) -> None:
    path, data = tmp_path / "m.onnx", tmp_path / "m.data"
    ir.save(ir.load(DIGITS), path, external_data=data.name)
    model = ir.load(path)
    if damage == "linked twice":
        (tmp_path / "other").hardlink_to(data)
    else:
        data.unlink()
    if damage == "a folder":
        data.mkdir()
    elif damage == "cut":
        data.write_bytes(b"short")
    with pytest.raises(RequantError, match=r"^external data of '.*': .*m.data") as caught:
        call(model)
    assert "\n" not in str(caught.value)


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
