"""Large models: external data in and out, contained in its folder, and never two copies of the weights in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from requant import RequantError
from requant.calibration import Sample, Serialized, fingerprint, observe, open_session
from requant.calibration.model import copies
from requant.calibration.model.session import Array
from requant.quantize.accuracy import pair
from requant.quantize.accuracy.outputs import measure
from requant.quantize.accuracy.pair import judge_pair, time_models, timing_note
from requant.quantize.model import files
from requant.quantize.model.files import (
    Weights,
    check_output,
    load_model,
    serialize,
    side_file,
    size_on_disk,
    staging,
)
from requant.quantize.model.writing import save_model
from requant.quantize.runtime import runtimes
from requant.quantize.runtime.profile import profiled
from requant.quantize.runtime.session import Runner
from requant.transforms.graphs.queries import release
from requant.transforms.merge_duplicate_nodes import merge_duplicate_nodes

# every place where a model may hold a tensor: the graph, a body, a node, a node and a body of a function
TEXT = """<ir_version: 8, opset_import: ["" : 17, "own" : 1]>
net (float[N,32] x, bool flag) => (float[N,32] y, string[1] told)
<float[32,32] w, string[1] words = {"told"}> {
    a = MatMul(x, w)
    k = Constant()
    b = MatMul(a, k)
    c = own.Shift(b)
    d = If (flag) <
        then_branch = yes () => (float[N,32] p) <float[32,32] v> { p = MatMul(c, v) },
        else_branch = no () => (float[N,32] q) { q = Identity(c) }
    >
    y = Relu(d)
    told = Identity(words)
}
<domain: "own", opset_import: ["" : 17]>
Shift (u) => (s) {
    t = Constant()
    s = MatMul(u, t)
}"""
PLACES = ("w", "v", "k", "t")  # in the graph, in a body, in a node, in a function's node


def matrix(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape or (32, 32)).astype(np.float32) / 6


def tensors(proto: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Return the four weights of `TEXT`."""
    branch = next(node for node in proto.graph.node if node.op_type == "If").attribute[0].g
    return {
        "w": next(t for t in proto.graph.initializer if t.name == "w"),
        "v": branch.initializer[0],
        "k": next(node for node in proto.graph.node if node.op_type == "Constant").attribute[0].t,
        "t": proto.functions[0].node[0].attribute[0].t,
    }


def whole() -> onnx.ModelProto:
    """Return the model of `TEXT` with all weights inside."""
    text = TEXT.replace("<float[32,32] w,", "<").replace(" <float[32,32] v>", "")
    proto = onnx.parser.parse_model(text)
    constants = [
        next(node for node in nodes if node.op_type == "Constant")
        for nodes in (proto.graph.node, proto.functions[0].node)
    ]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(matrix(0), "w"))
    branch = next(node for node in proto.graph.node if node.op_type == "If").attribute[0].g
    branch.initializer.append(onnx.numpy_helper.from_array(matrix(1), "v"))
    for seed, (node, name) in enumerate(zip(constants, "kt", strict=True), 2):
        node.attribute.append(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(matrix(seed), name)))
    return proto


def put_outside(
    proto: onnx.ModelProto, folder: Path, location: str = "weights.bin", names: tuple[str, ...] = PLACES
) -> Path:
    """Write `proto` to a folder with some of its weights in a file, and return where it is."""
    data = bytearray(b"#" * 5)  # so that nothing is where chance would put it
    for name, tensor in tensors(proto).items():
        if name in names:
            refer(tensor, location, len(data))
            data += matrix(PLACES.index(name)).tobytes()
    (folder / location).write_bytes(data)
    path = folder / "model.onnx"
    onnx.save(proto, path)
    return path


def refer(tensor: onnx.TensorProto, location: str, offset: int, length: int | None = None) -> None:
    """Let a tensor be data in a file."""
    length = len(tensor.raw_data) if length is None else length
    tensor.ClearField("raw_data")
    tensor.ClearField("external_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


def external_model(folder: Path, names: tuple[str, ...] = ("w", "v", "k")) -> Path:
    """Write the model with weights in a file; the runtime reads no external data of functions."""
    return put_outside(whole(), folder, names=names)


def answers(model: Path | bytes | Serialized) -> list[Any]:
    """Run a model on both branches, unoptimised, so that equal models give equal bits."""
    session = open_session(model, optimize=False)
    x = matrix(9, 3, 32)
    return [out for flag in (True, False) for out in session.run(None, {"x": x, "flag": np.asarray(flag)})]


def same(left: list[Any], right: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def expected() -> list[Any]:
    return answers(whole().SerializeToString())


# ------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("location", "offset", "length", "problem"),
    [
        ("../weights.bin", 0, 4096, "outside the model's folder, in '../weights.bin'"),
        ("sub/../../weights.bin", 0, 4096, "outside the model's folder"),
        ("/etc/passwd", 0, 4096, "outside the model's folder, in '/etc/passwd'"),
        ("link.bin", 0, 4096, "outside the model's folder, in 'link.bin'"),
        ("linked/weights.bin", 0, 4096, "outside the model's folder, in 'linked/weights.bin'"),
        ("hard.bin", 0, 4096, "'hard.bin', which has other hard links"),
        ("none.bin", 0, 4096, "missing: no file 'none.bin'"),
        ("", 0, 4096, "missing: no file ''"),
        ("a\0b", 0, 4096, "missing: no file"),
        ("weights.bin", 10**6, 4096, r"ends inside .*: 1004096 bytes are needed"),
        (
            "weights.bin",
            -1,
            4096,
            r"4096 bytes at -1 of 'weights.bin', but its type|not a valid ONNX model \(.*-1",
        ),
        ("weights.bin", 5, 400, "400 bytes at 5 of 'weights.bin', but its type and shape need 4096"),
    ],
    ids="up up-again absolute link linked-folder hard-link missing empty nul beyond-end negative short".split(),
)
def test_external_data_that_is_not_beside_the_model_is_refused(
    tmp_path: Path, place: str, location: str, offset: int, length: int, problem: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "sub").mkdir()
    (tmp_path / "weights.bin").write_bytes(bytes(10**5))
    (folder / "weights.bin").write_bytes(bytes(10**5))
    (folder / "link.bin").symlink_to(tmp_path / "weights.bin")
    (folder / "linked").symlink_to(tmp_path)
    (tmp_path / "original.bin").write_bytes(bytes(10**5))
    os.link(tmp_path / "original.bin", folder / "hard.bin")
    proto = whole()
    refer(tensors(proto)[place], location, offset, length)
    onnx.save(proto, folder / "model.onnx")
    with pytest.raises(RequantError, match=problem) as caught:
        load_model(folder / "model.onnx")
    assert str(caught.value).startswith(f"{folder / 'model.onnx'}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "text"), [("offset", "abc"), ("length", "4 kB")])
def test_a_place_of_external_data_that_is_no_number_is_named(tmp_path: Path, key: str, text: str) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(4096))
    proto = whole()
    refer(tensors(proto)["w"], "weights.bin", 0, 4096)
    for entry in tensors(proto)["w"].external_data:
        entry.value = text if entry.key == key else entry.value
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(RequantError, match=f"the offset or the length of external data is no number: '{text}'"):
        load_model(tmp_path / "model.onnx")


def test_external_data_inside_the_folder_is_read(
    tmp_path: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    path = put_outside(whole(), tmp_path, "sub/weights.bin", ("w", "k"))  # the runtime takes no link in a body
    (tmp_path / "sub" / "weights.bin").rename(tmp_path / "real.bin")
    (tmp_path / "sub" / "weights.bin").symlink_to("../real.bin")
    assert same(answers(serialize(load_model(path))), expected)
    monkeypatch.chdir(tmp_path)
    model = load_model("model.onnx")
    monkeypatch.chdir("/")
    assert same(answers(serialize(model)), expected)


# ------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("external", [False, True], ids=["whole", "pair"])
@pytest.mark.parametrize("source", ["inside", "outside", "mixed", "lazy"])
def test_a_written_model_is_the_model(tmp_path: Path, expected: list[Any], source: str, external: bool) -> None:
    (tmp_path / "in").mkdir()
    names = {"inside": (), "outside": PLACES, "mixed": ("v", "k"), "lazy": ("w",)}[source]
    model = load_model(put_outside(whole(), tmp_path / "in", names=names))
    if source == "lazy":
        value = model.graph.initializers["w"]
        tensor = value.const_value
        assert tensor is not None
        value.const_value = ir.LazyTensor(lambda: ir.Tensor(matrix(0)), tensor.dtype, ir.Shape([32, 32]), name="w")
    before = fingerprint(model)
    held = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    output = tmp_path / "out.onnx"
    size = save_model(model, output, external=external)
    assert [value.const_value for graph in model.graphs() for value in graph.initializers.values()] == held
    assert fingerprint(load_model(output)) == before
    assert same(answers(output), expected)
    onnx.checker.check_model(str(output), full_check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.onnx"] + ["out.onnx.data"] * external
    assert size == size_on_disk(output) == sum(path.stat().st_size for path in tmp_path.glob("out*"))
    assert output.stat().st_mode == (tmp_path / "in" / "weights.bin").stat().st_mode


@pytest.mark.parametrize("used", [True, False], ids=["its own", "of another"])
def test_the_side_file_of_a_replaced_model_goes_with_it(tmp_path: Path, used: bool) -> None:
    model, path, side = load_model(external_model(tmp_path)), tmp_path / "out.onnx", tmp_path / "out.onnx.data"
    if used:
        save_model(model, path, external=True)
    else:
        save_model(model, path)
        side.write_bytes(b"mine")
    assert side.is_file()
    save_model(model, path)
    assert side.exists() is not used
    assert fingerprint(load_model(path)) == fingerprint(model)


def test_a_whole_model_is_the_message_that_protobuf_writes(tmp_path: Path) -> None:
    proto = whole()
    for index, size in enumerate((127, 128, 16383, 16384, 2**21)):  # where lengths take another byte
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(size, dtype=np.uint8), f"bytes{index}"))
    proto.graph.initializer[-1].doc_string = "described"
    onnx.save(proto, tmp_path / "in.onnx")
    save_model(load_model(tmp_path / "in.onnx"), tmp_path / "out.onnx")
    written, wanted = (
        onnx.load_model_from_string(data)
        for data in (
            (tmp_path / "out.onnx").read_bytes(),
            ir.to_proto(load_model(tmp_path / "in.onnx")).SerializeToString(),
        )
    )
    for model in (written, wanted):  # their order says nothing
        ordered = sorted(model.graph.initializer, key=lambda tensor: tensor.name)
        del model.graph.initializer[:]
        model.graph.initializer.extend(ordered)
    assert written == wanted
    assert written.ByteSize() == (tmp_path / "out.onnx").stat().st_size


def test_offsets_are_aligned(tmp_path: Path) -> None:
    proto = whole()
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1025, np.int8), "odd"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(matrix(5), "next"))
    onnx.save(proto, tmp_path / "in.onnx")
    save_model(load_model(tmp_path / "in.onnx"), tmp_path / "out.onnx", external=True)
    model = ir.load(tmp_path / "out.onnx")
    offsets = [
        t.offset for t in (v.const_value for v in model.graph.initializers.values()) if isinstance(t, ir.ExternalTensor)
    ]
    assert len(offsets) == 3
    assert not any((offset or 0) % 64 for offset in offsets)


def test_what_one_message_cannot_hold_goes_outside(
    tmp_path: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(whole(), tmp_path / "in.onnx")
    model = load_model(tmp_path / "in.onnx")
    monkeypatch.setattr(files, "PROTOBUF_LIMIT", 10_000)
    save_model(model, tmp_path / "out.onnx")
    assert side_file(tmp_path / "out.onnx").stat().st_size >= 8192
    assert same(answers(tmp_path / "out.onnx"), expected)
    monkeypatch.setattr(files, "PROTOBUF_LIMIT", 1000)
    with pytest.raises(RequantError, match=r"GB of weights are in memory; one ONNX model holds 2 GB"):
        serialize(model)


@pytest.mark.parametrize("failing", range(5))
@pytest.mark.parametrize(
    ("there", "external", "moves"),
    [(True, False, 1), (True, True, 4), (False, True, 2)],
    ids=["whole-over-pair", "pair-over-pair", "pair"],
)
def test_what_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, external: bool, moves: int, failing: int
) -> None:
    onnx.save(whole(), tmp_path / "in.onnx")
    output = tmp_path / "out.onnx"
    if there:
        save_model(load_model(tmp_path / "in.onnx"), output, external=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = load_model(tmp_path / "in.onnx")
    value = other.graph.initializers["w"]
    value.const_value = ir.Tensor(matrix(7), name="w")
    calls = 0
    actual = os.replace

    def replace(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == failing + 1:
            raise OSError(28, "No space left on device")
        actual(source, target)

    monkeypatch.setattr(os, "replace", replace)
    if failing < moves:
        with pytest.raises(RequantError, match=r"out\.onnx: cannot be written: No space left on device"):
            save_model(other, output, external=external)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    else:
        save_model(other, output, external=external)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "in.onnx",
            "out.onnx",
            *["out.onnx.data"] * external,
        ]
        assert not same(answers(output), answers(tmp_path / "in.onnx"))


def test_a_model_is_not_written_over_its_own_weights(tmp_path: Path, expected: list[Any]) -> None:
    path = external_model(tmp_path)
    (tmp_path / "weights.bin").rename(tmp_path / "out.onnx.data")
    proto = onnx.load(path, load_external_data=False)
    for name in ("w", "v", "k"):
        next(entry for entry in tensors(proto)[name].external_data if entry.key == "location").value = "out.onnx.data"
    onnx.save(proto, path)
    model = load_model(path)
    for output in ("out.onnx", "out.onnx.data"):
        with pytest.raises(RequantError, match="the file holds weights of this model; choose another path"):
            save_model(model, tmp_path / output, external=True)
        with pytest.raises(RequantError, match=r"out\.onnx\.data: holds the weights of the input '.*model\.onnx'"):
            check_output(tmp_path / output, path, force=True, external=True)
    assert same(answers(path), expected)


def test_check_output_knows_the_side_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output, side = external_model(tmp_path), tmp_path / "out.onnx", tmp_path / "out.onnx.data"
    check_output(output, source, force=False, external=True)
    side.write_bytes(b"somebody's")
    check_output(output, source, force=False)
    check_output(output, source, force=True, external=True)
    with pytest.raises(RequantError, match=r"out\.onnx\.data: exists already; --force overwrites it"):
        check_output(output, source, force=False, external=True)
    with monkeypatch.context() as patched:  # what may have to go outside is treated alike
        patched.setattr(files, "PROTOBUF_LIMIT", 10_000)
        with pytest.raises(RequantError, match="exists already"):
            check_output(output, source, force=False)
    side.unlink()
    side.mkdir()
    with pytest.raises(RequantError, match=r"out\.onnx\.data: is a folder"):
        check_output(output, source, force=True, external=True)
    side.rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "real.onnx").write_bytes(b"")
    output.symlink_to(tmp_path / "elsewhere" / "real.onnx")
    check_output(output, source, force=True)
    with pytest.raises(RequantError, match=r"out\.onnx: is a link to another folder"):
        check_output(output, source, force=True, external=True)


# ------------------------------------------------------------------------------------------ opening without a copy


def test_references_stay_references(tmp_path: Path, expected: list[Any]) -> None:
    source = serialize(load_model(external_model(tmp_path)))
    assert source.folder == tmp_path
    assert len(source.data) < 8192  # one of the four weights, which the runtime would not read from a file
    assert same(answers(source), expected)
    assert serialize(load_model(put_outside(whole(), tmp_path, names=()))).folder is None


@pytest.mark.parametrize("moved", ["memory", "folder"])
def test_what_is_too_much_for_the_bytes_is_staged(
    tmp_path: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch, moved: str
) -> None:
    (tmp_path / "other").mkdir()
    model = load_model(external_model(tmp_path, ("v", "k")))
    value = model.graph.initializers["w"]
    if moved == "folder":
        array = matrix(0)
        (tmp_path / "other" / "w.bin").write_bytes(array.tobytes())
        tensor = value.const_value
        assert tensor is not None
        value.const_value = ir.ExternalTensor(
            "w.bin", 0, 4096, ir.DataType.FLOAT, shape=ir.Shape([32, 32]), name="w", base_dir=tmp_path / "other"
        )
    assert same(answers(serialize(model)), expected)
    monkeypatch.setattr(files, "INSIDE", 2000)
    with staging(tmp_path / "out.onnx") as folder:
        assert folder.parent == tmp_path
        assert folder.name.startswith(".")
        source = serialize(model, folder)
        assert source.folder == folder
        assert isinstance(value.const_value, ir.ExternalTensor)
        assert same(answers(source), expected)
        count = len(list(folder.iterdir()))
        assert same(answers(serialize(model.clone(), folder)), expected)
        assert len(list(folder.iterdir())) == count  # what is there already is not moved again
        save_model(model, tmp_path / "out.onnx")
    assert not folder.exists()
    assert same(answers(tmp_path / "out.onnx"), expected)


def test_a_serialized_model_is_observed_and_profiled(tmp_path: Path) -> None:
    source = serialize(load_model(external_model(tmp_path)))
    feed = {"x": matrix(9, 3, 32), "flag": np.asarray(True)}
    seen = observe(source, ["a"], [Sample(feed, None, "one")], histogram=False)
    assert seen == observe(whole().SerializeToString(), ["a"], [Sample(feed, None, "one")], histogram=False)
    runs = profiled(source, feed).runs
    again = profiled(serialize(load_model(tmp_path / "model.onnx")), feed).runs
    assert sum(run.macs for run in runs) == sum(run.macs for run in again) > 0


@pytest.mark.parametrize(
    ("large", "outside", "samples", "lean"),
    [(1000, True, 8, True), (1000, True, 9, False), (1000, False, 8, False), (10**6, True, 8, False)],
    ids=["few", "many", "inside", "small"],
)
def test_a_few_runs_of_a_large_model_pack_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int, outside: bool, samples: int, lean: bool
) -> None:
    opened = []

    def spy(*arguments: Any, **options: Any) -> Any:
        opened.append(options["lean"])
        return open_session(*arguments, **options)

    monkeypatch.setattr(copies, "LARGE", large)
    monkeypatch.setattr(copies, "open_session", spy)
    source = serialize(load_model(external_model(tmp_path, ("w",) if outside else ())))
    seen = observe(source, ["x"], some_samples(samples), histogram=False)
    assert seen.samples == samples
    assert opened == [lean]


def test_arrays_outlive_the_release_of_their_tensor(tmp_path: Path) -> None:
    model = load_model(external_model(tmp_path))
    tensor = model.graph.initializers["w"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    array = tensor.numpy()
    release(tensor)
    assert tensor.raw is None
    assert np.array_equal(array, matrix(0))
    assert np.array_equal(tensor.numpy(), array)
    del array
    release(tensor)
    release(ir.Tensor(matrix(0)))
    release(None)
    assert "weights.bin" not in Path("/proc/self/maps").read_text()


def test_large_duplicates_are_merged_and_others_not_read(tmp_path: Path) -> None:
    model = load_model(external_model(tmp_path, ()))
    for name, array in (("same", matrix(0, 64, 80)), ("again", matrix(0, 64, 80)), ("other", matrix(1, 80, 80))):
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.FLOAT))
        value.const_value = ir.Tensor(array, name=name)
        model.graph.register_initializer(value)
        node = ir.node("Identity", [value], name=f"{name}_out")
        node.outputs[0].name = f"{name}_out"
        model.graph.append(node)
        model.graph.outputs.append(node.outputs[0])
    assert merge_duplicate_nodes(model).applied
    assert {"same", "other"} <= set(model.graph.initializers)
    assert "again" not in model.graph.initializers


# --------------------------------------------------------------------------------------------- one after the other


class Loaded:
    """Counts how many models are loaded at once, and how."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: set[int] = set()
        self.most = 0
        self.lean: list[bool] = []
        outer = self

        class Counted(Runner):
            def __init__(self, model: Any, *, threads: int = 0, lean: bool = False) -> None:
                super().__init__(model, threads=threads, lean=lean)
                outer.lean.append(lean)
                outer.now.add(id(self))
                outer.most = max(outer.most, len(outer.now))

            def __del__(self) -> None:
                outer.now.discard(id(self))

        monkeypatch.setattr(runtimes, "Runner", Counted)


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Two models that differ a little."""
    proto = whole()
    paths = tmp_path / "a.onnx", tmp_path / "b.onnx"
    onnx.save(proto, paths[0])
    tensors(proto)["w"].raw_data = (matrix(0) * np.float32(1.01)).tobytes()
    onnx.save(proto, paths[1])
    return paths


def some_samples(count: int) -> list[Sample]:
    return [
        Sample({"x": matrix(i, 3, 32), "flag": np.asarray(True)}, np.array([i, 1, 2]), f"sample {i}")
        for i in range(count)
    ]


LARGE = Weights(total=2**31, largest=2**20)
LUMPY = Weights(total=2**31, largest=2**30)


@pytest.mark.parametrize(
    ("weights", "count", "room", "lean"),
    [
        (Weights(1000, 1000), 3, 2**20, [False, False]),
        (LARGE, 3, 2**20, [True, False]),
        (LARGE, 9, 2**20, [False, False]),
        (LUMPY, 9, 2**20, [True, False]),
        (LARGE, 3, 0, [True, False] * 3),
        (LARGE, 3, 1000, [True, False] * 2),
        (LARGE, 0, 2**20, []),
    ],
    ids="small large many lumpy one-by-one two-by-two none".split(),
)
def test_large_models_are_judged_one_after_the_other(
    models: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    weights: Weights,
    count: int,
    room: int,
    lean: list[bool],
) -> None:
    monkeypatch.setattr(pair, "ROOM", room)
    loaded = Loaded(monkeypatch)
    done: list[int] = []
    found = judge_pair(*models, iter(some_samples(count)), done.append, weights=weights)
    wanted = measure(Runner(models[0]), Runner(models[1]), some_samples(count))
    assert found.samples == count
    assert found.agreement == wanted.agreement
    assert found.labelled == wanted.labelled
    if count and not any(lean):  # the same kernels: the same bits
        assert found == wanted
    assert done == list(range(1, count + 1))
    assert loaded.lean == lean
    assert loaded.most == (2 if not weights.large else min(count, 1))


@pytest.mark.parametrize(
    ("weights", "lean", "note"),
    [
        (Weights(1000, 1000), [False, False], None),
        (LARGE, [False, False], "one after the other"),
        (LUMPY, [True, False], "not packed"),
    ],
    ids=["small", "large", "lumpy"],
)
def test_large_models_are_timed_one_after_the_other(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, weights: Weights, lean: list[bool], note: str | None
) -> None:
    loaded = Loaded(monkeypatch)
    found = time_models(models, some_samples(1)[0].feed, weights=weights, threads=1, batch=3, seconds=0.01)
    assert loaded.lean == lean
    assert loaded.most == (1 if weights.large else 2)
    assert found.batch == 3
    assert found.runs >= 5
    assert 0 < found.float_ms <= found.float_median_ms
    told = timing_note(weights)
    assert told is None if note is None else told is not None and note in told


def test_weights_are_measured_without_being_read(tmp_path: Path) -> None:
    model = load_model(external_model(tmp_path))
    assert Weights.of(model).largest == 4096
    assert Weights.of(model).total == pytest.approx(4 * 4096, abs=100)  # and a string
    assert "weights.bin" not in Path("/proc/self/maps").read_text()


# ---------------------------------------------------------------------------------------------------- the real thing


@pytest.mark.slow
def test_a_large_model_takes_little_more_memory_than_its_file(tmp_path: Path) -> None:
    program, root = "benchmarks.size", Path(__file__).parents[3]
    arguments = ["--gigabytes", "1.6", "--folder", str(tmp_path), "--no-baseline", "--no-dynamic", "--json"]
    command = [sys.executable, "-m", program, *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    (row,) = json.loads(done.stdout)["rows"]
    assert row["peak_ratio"] <= 1.3
