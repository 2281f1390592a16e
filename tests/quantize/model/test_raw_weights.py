"""Weights of large models: read where they lie in the file, and written without a copy, byte for byte the same."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from requant import RequantError
from requant.cli import main
from requant.quantize import diff_models, inspect_model
from requant.quantize.model import files
from requant.quantize.model.files import load_model
from requant.quantize.model.raw_weights import Cut, MalformedError, fields, with_weights, without_weights
from requant.quantize.model.writing import save_model
from requant.transforms.graphs.tensors import external_tensors

SAMPLE_MODELS = Path(__file__).parents[3] / "sample_models"
MODELS = sorted(SAMPLE_MODELS.glob("*.onnx"))
each_model = pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every file and every tensor be a large one."""
    monkeypatch.setattr(files, "INSIDE", 0)
    monkeypatch.setattr(files, "APART", 8)


def named(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    tensor.name, tensor.doc_string = name, "said"
    return tensor


SIZES = st.lists(st.integers(0, 300), max_size=6)


def model(sizes: list[int], typed: bool) -> onnx.ModelProto:
    """Return a model with initializers of so many numbers, in the two ways in which they may be stored."""
    tensors = [named(numpy_helper.from_array(np.arange(n, dtype=np.float32)), f"w{i}") for i, n in enumerate(sizes)]
    if typed and tensors:
        tensors[0].float_data.extend(np.frombuffer(tensors[0].raw_data, np.float32).tolist())
        tensors[0].ClearField("raw_data")
    nodes = [helper.make_node("Identity", [tensor.name], [f"y{i}"]) for i, tensor in enumerate(tensors)]
    outputs = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, [n]) for i, n in enumerate(sizes)]
    made = helper.make_model(helper.make_graph(nodes, "g", [], outputs, tensors), producer_name="me")
    helper.set_model_props(made, {"key": "value"})
    return made


@given(SIZES, st.booleans(), st.integers(1, 1500))
def test_cut_out_and_put_back(sizes: list[int], typed: bool, least: int) -> None:
    whole = model(sizes, typed).SerializeToString()
    small, cuts = without_weights(whole, least)
    parsed = onnx.ModelProto.FromString(small)
    lengths: list[int | None] = [None] * len(sizes)
    for cut in cuts:
        lengths[cut.index] = cut.length
        assert not parsed.graph.initializer[cut.index].raw_data
    expected = {i for i, n in enumerate(sizes) if 4 * n >= least and not (typed and i == 0)}
    assert {cut.index for cut in cuts} == expected
    by_index = {cut.index: cut for cut in cuts}

    def bytes_of(part: bytes | int) -> bytes:
        return part if isinstance(part, bytes) else whole[by_index[part].offset :][: by_index[part].length]

    assert b"".join(map(bytes_of, with_weights(small, lengths))) == whole


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        found = list(fields(data, 0, len(data)))
    except MalformedError:
        return
    assert [field.start for field in found] == [0, *(field.end for field in found)][: len(found)]
    assert (found[-1].end if found else 0) == len(data)


def test_two_graphs_are_left_to_protobuf() -> None:
    whole = model([100], False).SerializeToString()
    with pytest.raises(MalformedError, match="2 graphs"):
        without_weights(whole + whole, 1)
    assert without_weights(whole, 10**6) == (whole, [])
    assert without_weights(whole, 1)[1] == [Cut(0, whole.index(np.arange(100, dtype=np.float32).tobytes()), 400)]


@pytest.mark.usefixtures("all_large")
@each_model
def test_a_model_is_the_same_read_in_place(path: Path, tmp_path: Path) -> None:
    found = load_model(path, in_place=True)
    assert any(external_tensors(found))
    expected = load_model(path)
    assert not any(external_tensors(expected))
    for name, value in expected.graph.initializers.items():
        held = found.graph.initializers[name].const_value
        assert value.const_value is not None
        assert held is not None
        assert held.tobytes() == value.const_value.tobytes()
    assert save_model(found, tmp_path / "in_place.onnx") == (tmp_path / "in_place.onnx").stat().st_size
    save_model(expected, tmp_path / "usual.onnx")
    assert (tmp_path / "in_place.onnx").read_bytes() == (tmp_path / "usual.onnx").read_bytes()


@pytest.mark.usefixtures("all_large")
@each_model
def test_a_model_is_written_as_protobuf_writes_it(path: Path, tmp_path: Path) -> None:
    loaded = ir.load(path)
    for value in loaded.graph.initializers.values():
        assert value.const_value is not None
        value.const_value = ir.Tensor(value.const_value.numpy(), name=value.name)
    save_model(loaded, tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").read_bytes() == ir.to_proto(loaded).SerializeToString()


@pytest.mark.usefixtures("all_large")
def test_commands_read_in_place(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(MODELS[0].read_bytes())
    found = inspect_model(path)
    assert (found.external, found.weights) == ({}, inspect_model(MODELS[0]).weights)
    assert diff_models(path, MODELS[0]).equal
    result = CliRunner().invoke(main, ["transform", str(path), str(tmp_path / "out.onnx"), "--group", "simplify"])
    assert result.exit_code == 0, result.stderr
    onnx.checker.check_model(tmp_path / "out.onnx", full_check=True)
    assert path.read_bytes() == MODELS[0].read_bytes()
    with pytest.raises(RequantError, match="the file holds weights of this model"):
        save_model(load_model(path, in_place=True), path)


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_links_are_read_as_usual(link: object, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "m.onnx").write_bytes(MODELS[0].read_bytes())
    link(tmp_path / "real" / "m.onnx", tmp_path / "m.onnx")  # type: ignore[operator]
    assert not any(external_tensors(load_model(tmp_path / "m.onnx", in_place=True)))


@pytest.mark.usefixtures("all_large")
def test_a_truncated_file_is_refused_as_usual(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(MODELS[0].read_bytes()[:-100])
    with pytest.raises(RequantError, match=r"m\.onnx: not an ONNX model, or a truncated one"):
        load_model(path, in_place=True)
