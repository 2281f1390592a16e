"""The networks of sample_models/architectures.py: published shapes, activations that vary, inputs that fit."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from onnx import helper

from requant import RequantError
from requant.calibration import input_specs, open_source

SCRIPT = Path(__file__).parent.parent / "sample_models" / "architectures.py"
sys.path.insert(0, str(SCRIPT.parent))
architectures = importlib.import_module("architectures")
builder = importlib.import_module("graph_builder")
sys.path.remove(str(SCRIPT.parent))

SMALL = {name: 64 for name, row in architectures.ARCHITECTURES.items() if row.step == 32} | {"unet": 32}
LARGE = {"vit_b_16", "bert_base", "resnet50", "unet"}  # a hundred megabytes and more

PARAMETERS = {
    "resnet50": 25_557_032,
    "mobilenet_v2": 3_504_872,
    "mobilenet_v3_large": 5_483_032,
    "efficientnet_b0": 5_288_548,
    "squeezenet1_1": 1_235_496,
    "vit_b_16": 86_567_656,
    "cct_7": 3_760_139,
    "bert_base": 109_482_240,
    "yolo": 3_157_200,
    "yolo_nms": 3_157_200,
    "llama": 32000 * 288 + 6 * (4 * 288**2 + 3 * 288 * 768 + 2 * 288) + 288,
    "lstm_tagger": 20000 * 100 + 2 * 4 * (200 * (100 + 200) + 2 * 200) + 400 * 9 + 9,
    "unet": 31_037_698,
    "if_branches": 32 * 27 + 2 * 32 + 32 * 32 * 9 + 32 + 32 * 25 + 32 + 32 * 32 + 32 + 32 * 10 + 10,
    "loop_rnn": 2 * (192 * 128 + 128) + 128 * 32 + 32,
}

# Published multiply-accumulates of one image of the default size, in units of 1e9: torchvision's GFLOPS, and half of
# Ultralytics' 8.7 GFLOPs, which count a multiplication and an addition as two operations.
MACS = {
    "resnet50": 4.09,
    "mobilenet_v2": 0.30,
    "mobilenet_v3_large": 0.22,
    "efficientnet_b0": 0.39,
    "squeezenet1_1": 0.35,
    "vit_b_16": 17.56,
    "yolo": 4.37,
}


@dataclass
class Built:
    """A network, built with a small size if possible, and its feeds."""

    name: str
    model: onnx.ModelProto
    size: int | None

    @cached_property
    def session(self) -> ort.InferenceSession:
        return session(self.model)

    def feeds(self, batch: int = 1) -> list[dict[str, NDArray[Any]]]:
        return list(architectures.feeds(self.name, batch=batch, count=2, size=self.size))


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in architectures.NAMES],
)
def built(request: pytest.FixtureRequest) -> Built:
    name, size = request.param, SMALL.get(request.param)
    return Built(name, architectures.build(name, size=size), size)


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from all_nodes(attribute.g)


def multiply_accumulates(model: onnx.ModelProto) -> int:
    """Count the multiply-accumulates of convolutions and matrix products for batch 1, from inferred shapes."""
    for end in model.graph.input:
        end.type.tensor_type.shape.dim[0].dim_value = 1
    for end in model.graph.output:
        end.type.tensor_type.ClearField("shape")
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    ends = [*graph.value_info, *graph.input, *graph.output]
    shapes = {end.name: [dim.dim_value for dim in end.type.tensor_type.shape.dim] for end in ends}
    shapes |= {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    total = 0
    for node in graph.node:
        if node.op_type == "Conv":
            total += math.prod(shapes[node.output[0]]) * math.prod(shapes[node.input[1]][1:])
        elif node.op_type in ("MatMul", "Gemm"):
            total += math.prod(shapes[node.output[0]]) * shapes[node.input[0]][-1]
    return total


def test_the_table_has_the_counts_that_are_published() -> None:
    assert {name: row.parameters for name, row in architectures.ARCHITECTURES.items()} == PARAMETERS
    assert tuple(PARAMETERS) == architectures.NAMES


@pytest.fixture
def weightless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give initializers shapes but no values, so that the largest network is built quickly."""

    def parameter(graph: Any, name: str, values: NDArray[Any]) -> str:
        owner = graph if graph.keeps or graph.parent is None else graph.parent
        owner.proto.initializer.add(name=name, data_type=onnx.TensorProto.FLOAT, dims=values.shape)
        return name

    monkeypatch.setattr(builder.Graph, "parameter", parameter)
    monkeypatch.setattr(builder.Graph, "normal", lambda graph, name, shape, std: np.zeros(shape, np.float32))
    monkeypatch.setattr(architectures, "normalise", lambda graph, draw: None)


@pytest.mark.usefixtures("weightless")
@pytest.mark.parametrize("name", architectures.NAMES)
def test_a_network_has_as_many_parameters_as_published(name: str) -> None:
    assert architectures.parameters(architectures.build(name)) == PARAMETERS[name]


@pytest.mark.usefixtures("weightless")
@pytest.mark.parametrize("name", MACS)
def test_a_network_does_as_many_multiply_accumulates_as_published(name: str) -> None:
    # Strides and pads; the number of parameters does not depend on them.
    assert round(multiply_accumulates(architectures.build(name)) / 1e9, 2) == MACS[name]


def test_a_network_is_valid(built: Built) -> None:
    onnx.checker.check_model(built.model, full_check=True)
    assert architectures.parameters(built.model) == PARAMETERS[built.name]
    assert [(opset.domain, opset.version) for opset in built.model.opset_import] == [("", 17)]


def test_nodes_have_names_of_their_own_and_batches_any_length(built: Built) -> None:
    names = Counter(node.name for node in all_nodes(built.model.graph))
    assert "" not in names
    assert max(names.values()) == 1
    assert {end.type.tensor_type.shape.dim[0].dim_param for end in built.model.graph.input} == {"N"}


def test_outputs_are_finite_of_sane_size_and_differ_from_input_to_input(built: Built) -> None:
    first, second = (built.session.run(None, feed) for feed in built.feeds())
    for one, other in zip(first, second, strict=True):
        assert np.isfinite(one).all()
        assert one.size
        if built.name.startswith("yolo"):  # the output contains boxes in pixels and scores
            assert one.shape != other.shape or (one != other).mean() > 0.5
            continue
        assert 0.1 < one.std() < 100
        assert 0.05 < (one - other).std() / one.std() < 10  # a dead network gives nearly equal outputs for all inputs


def test_a_batch_gives_an_output_for_each_entry(built: Built) -> None:
    (feed, _) = built.feeds(batch=3)
    outputs = built.session.run(None, feed)
    if built.name == "yolo_nms":
        assert set(outputs[0][:, 0]) <= {0, 1, 2}
    else:
        assert {len(output) for output in outputs} == {3}


def test_no_layer_lets_its_signal_die_explode_or_saturate(built: Built) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(built.model)
    layers = {"BatchNormalization", "Conv", "ConvTranspose", "Gemm", "LSTM", "LayerNormalization", "MatMul", "Sigmoid"}
    made = {node.output[0]: node for node in model.graph.node if node.op_type in layers | {"Softmax"}}
    have = [end.name for end in model.graph.output]
    added = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in made if name not in have]
    model.graph.output.extend(added)
    run = session(model)
    names = [end.name for end in run.get_outputs()]
    (feed, _) = built.feeds(batch=2)
    for name, value in zip(names, run.run(None, feed), strict=True):
        op = made[name].op_type if name in made else None
        if op == "Softmax":
            assert value.max(axis=helper.get_node_attr_value(made[name], "axis")).mean() < 0.7, name
        elif op == "Sigmoid" and not name.startswith("/model.22/"):  # nearly all scores of a detector are near 0
            assert ((value < 0.01) | (value > 0.99)).mean() < 0.1, name
        elif op in layers - {"Sigmoid"}:
            assert 1e-2 < value.std() < 1e2, name


@pytest.mark.parametrize("name", ["mobilenet_v2", "efficientnet_b0"])
def test_batch_normalizations_are_kept_and_normalise_what_reaches_them(name: str) -> None:
    model = architectures.build(name, size=SMALL[name])
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    assert len(norms) == {"mobilenet_v2": 52, "efficientnet_b0": 49}[name]
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    model.graph.output.extend(helper.make_tensor_value_info(norm.output[0], 1, None) for norm in norms)
    feed = {key: np.concatenate([feed[key] for feed in architectures.feeds(name, size=64)]) for key in ["input"]}
    _, *outputs = session(model).run(None, feed)
    for norm, output in zip(norms, outputs, strict=True):
        scale, shift = (values[key].reshape(1, -1, 1, 1) for key in norm.input[1:3])
        normed = (output - shift) / scale
        assert abs(normed.mean()) < 0.3, norm.name  # the statistics come from other images
        assert 0.5 < normed.std() < 2, norm.name


@pytest.mark.parametrize("name", ["mobilenet_v2", "lstm_tagger", "if_branches"])
def test_a_seed_gives_the_same_network_and_another_seed_another(name: str) -> None:
    size = 32 if name == "mobilenet_v2" else None
    first, again, other = (architectures.build(name, seed=seed, size=size) for seed in (3, 3, 4))
    assert first.SerializeToString(deterministic=True) == again.SerializeToString(deterministic=True)
    assert [tensor.name for tensor in first.graph.initializer] == [tensor.name for tensor in other.graph.initializer]
    assert not any(
        a.raw_data == b.raw_data for a, b in zip(first.graph.initializer, other.graph.initializer, strict=True)
    )


@pytest.mark.parametrize("opset", [13, 18, 26])
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mobilenet_v3_large", "yolo_nms")),
        *("lstm_tagger", "if_branches", "loop_rnn"),
    ],
)
def test_a_network_can_be_written_for_other_opsets(name: str, opset: int) -> None:
    size = 32 if name in SMALL else None
    model = architectures.build(name, opset=opset, size=size)
    assert model.opset_import[0].version == opset
    onnx.checker.check_model(model, full_check=True)
    assert architectures.parameters(model) == PARAMETERS[name]
    assert ("HardSwish" in {node.op_type for node in model.graph.node}) == (name[:12] == "mobilenet_v3" and opset > 13)
    (feed,) = architectures.feeds(name, count=1, size=size)
    assert all(np.isfinite(output).all() for output in session(model).run(None, feed))


def layer_at(opset: int, layer: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Run one layer on x (N, 16) without the optimizations of the runtime, which would fuse its nodes."""
    model = builder.empty_model("layer", opset)
    graph = builder.Graph(0, opset, model.graph)
    name = graph.input("x", onnx.TensorProto.FLOAT, ["N", 16])
    y = getattr(builder, layer)(graph, name, "/layer", *((16, 1e-5) if layer == "layer_norm" else ()))
    graph.output("y", y, onnx.TensorProto.FLOAT, ["N", 16])
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (result,) = ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})
    return np.asarray(result)


@pytest.mark.parametrize("layer", ["layer_norm", "hard_swish"])
def test_what_stands_for_an_operator_in_old_opsets_computes_the_same(layer: str) -> None:
    x = np.random.default_rng(0).normal(1, 2, (50, 16)).astype(np.float32)
    old, new = (layer_at(opset, layer, x) for opset in (13, 17))
    # Mean and variance are sums of 16 terms; the variance includes the error of the mean. Ten more roundings follow.
    bound = (3 * 16 + 10) * np.finfo(np.float32).eps * (np.abs(x).max() + np.abs(new).max())
    np.testing.assert_allclose(old, new, rtol=0, atol=bound)
    assert np.abs(new).max() > 1


def test_the_decoder_continues_from_its_cache() -> None:
    # All tokens in one run, or one token per run with the cache of the runs before: equal keys, values and positions.
    (feed,) = architectures.feeds("llama", count=1, size=4)
    run = session(architectures.build("llama"))
    names = [end.name for end in run.get_outputs()]
    whole = dict(zip(names, run.run(None, feed), strict=True))
    head = run.run(None, feed | {"input_ids": feed["input_ids"][:, :3]})
    past = {key.replace("present", "past_key_values"): value for key, value in zip(names[1:], head[1:], strict=True)}
    tail = dict(zip(names, run.run(None, past | {"input_ids": feed["input_ids"][:, 3:]}), strict=True))
    # 7 products in each of 6 layers and the last product: sums of at most 768 terms in another order; sums of k terms
    # have an error of about sqrt(k) eps (Higham and Mary, 2019).
    bound = (7 * 6 + 1) * math.sqrt(768) * np.finfo(np.float32).eps
    np.testing.assert_allclose(
        tail["logits"][:, 0], whole["logits"][:, 3], rtol=0, atol=bound * np.abs(whole["logits"]).max()
    )
    key = "present.5.key"
    np.testing.assert_allclose(tail[key], whole[key], rtol=0, atol=bound * np.abs(whole[key]).max())


def test_the_decoder_turns_keys_by_their_positions_and_keeps_their_lengths() -> None:
    (feed,) = architectures.feeds("llama", count=1, size=4)
    feed["input_ids"][:] = 5
    run = session(architectures.build("llama"))
    (keys,) = run.run(["present.0.key"], feed)
    new = keys[0, :, -4:]
    lengths = np.linalg.norm(new, axis=-1)
    # Two products and a sum per element, and their factors, each rounded to half an eps: 3 eps at most.
    bound = 3 * np.finfo(np.float32).eps * lengths.max() * math.sqrt(48)
    np.testing.assert_allclose(lengths, lengths[:, :1].repeat(4, axis=1), rtol=0, atol=bound)
    assert (np.abs(np.diff(new, axis=1)).max(axis=-1) > 0.01).all()


@pytest.mark.slow
def test_masked_tokens_do_not_reach_the_others() -> None:
    (feed,) = architectures.feeds("bert_base", count=1, size=16)
    run = session(architectures.build("bert_base"))
    kept = feed["attention_mask"][0] == 1
    assert 0 < kept.sum() < 16
    changed = feed | {"input_ids": np.where(kept, feed["input_ids"], 7)}
    first, second = (run.run(["last_hidden_state"], each)[0] for each in (feed, changed))
    assert np.array_equal(first[0][kept], second[0][kept])
    assert not np.array_equal(first, second)


def test_both_branches_are_taken() -> None:
    means = [float(feed["input"].mean()) for feed in architectures.feeds("if_branches")]
    assert min(means) < 0 < max(means)


def test_one_branch_has_its_weights_inside_and_the_other_outside() -> None:
    graph = architectures.build("if_branches").graph
    (choice,) = [node for node in graph.node if node.op_type == "If"]
    inside = {attribute.name: [tensor.name for tensor in attribute.g.initializer] for attribute in choice.attribute}
    assert inside["then_branch"] == []
    assert inside["else_branch"] == [
        f"separable.{part}" for part in ("depthwise.weight", "depthwise.bias", "pointwise.weight", "pointwise.bias")
    ]
    assert {"plain.conv.weight", "plain.conv.bias"} <= {tensor.name for tensor in graph.initializer}


def test_the_detector_finds_boxes_inside_and_around_its_images() -> None:
    run = session(architectures.build("yolo_nms", size=64))
    (found,) = run.run(None, architectures.feeds("yolo_nms", batch=2, count=1, size=64)[0])
    image, x1, y1, x2, y2, label, score = found.T
    assert len(found) > 2
    assert set(image) <= {0.0, 1.0}
    assert (x1 < x2).all()
    assert (y1 < y2).all()
    assert set(label) <= set(range(80))
    assert ((score > 0.25) & (score <= 1)).all()


def test_feeds_are_a_data_source_of_eight_samples_that_fit(built: Built) -> None:
    text = f"{SCRIPT}:{built.name}{f'_{built.size}' if built.size else ''}_feeds"
    samples = [sample.feed for sample in open_source(text, input_specs(built.session))]
    assert len(samples) == 8
    for key, value in samples[0].items():
        assert built.name == "bert_base" or not np.array_equal(value, samples[1][key])  # masks may be equal


def test_feeds_without_a_size_are_of_the_networks_own() -> None:
    assert [feed["input"].shape for feed in architectures.resnet50_feeds()] == [(1, 3, 224, 224)] * 8
    assert [feed["images"].shape for feed in architectures.yolo_64_feeds()] == [(1, 3, 64, 64)] * 8
    assert architectures.vit_b_16_feeds()[0]["input"].shape == (1, 3, 224, 224)
    for key, value in architectures.bert_base_feeds()[0].items():
        assert (key, value.shape, value.dtype) == (key, (1, 128), np.int64)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("resnet5", {}, "no network named 'resnet5'; did you mean 'resnet50'?"),
        ("resnet50", {"size": 100}, "resnet50: size 100: must be a multiple of 32"),
        ("unet", {"size": 0}, "unet: size 0: must be a multiple of 16"),
        ("vit_b_16", {"size": 256}, "vit_b_16: size 256: the network takes images of 224 x 224 alone"),
        ("bert_base", {"size": 64}, "bert_base: takes sequences of any length; a size is for its feeds alone"),
        ("unet", {"opset": 12}, "opset 12: the networks are written for opsets 13 to 26"),
    ],
    ids=["name", "size", "zero", "fixed", "sequence", "opset"],
)
def test_what_cannot_be_built_is_refused(name: str, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(RequantError) as caught:
        architectures.build(name, **arguments)
    assert str(caught.value) == message


def test_the_command_writes_a_model(tmp_path: Path) -> None:
    output = tmp_path / "loop.onnx"
    command = [sys.executable, str(SCRIPT), "loop_rnn", "-o", str(output), "--seed", "5", "--opset", "18"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert onnx.load(output) == architectures.build("loop_rnn", seed=5, opset=18)
    assert list(tmp_path.iterdir()) == [output]


def command(*arguments: str) -> tuple[int, str, str]:
    """Run the command; return its exit code, standard output and standard error."""
    result = CliRunner().invoke(architectures.main, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_the_command_does_not_overwrite_unless_forced(tmp_path: Path) -> None:
    output = tmp_path / "unet.onnx"
    output.write_bytes(b"mine")
    refused = command("if_branches", "-o", str(output), "--size", "8")
    assert refused == (2, "", f"architectures.py: {output}: exists already; --force overwrites it\n")
    assert output.read_bytes() == b"mine"
    assert command("if_branches", "-o", str(output), "--size", "8", "--force") == (0, "", "")
    assert onnx.load(output).graph.input[0].type.tensor_type.shape.dim[2].dim_value == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mobilnet_v2", "-o", "x.onnx"], "no network named 'mobilnet_v2'; did you mean 'mobilenet_v2'"),
        ([], "give a network and -o FILE; --list prints the networks"),
        (["unet"], "give a network and -o FILE; --list prints the networks"),
        (["unet", "-o", "missing/x.onnx"], "missing: no such folder"),
    ],
    ids=["name", "nothing", "output", "folder"],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"architectures.py: {message}")
    assert list(tmp_path.iterdir()) == []


def test_the_list_has_every_network_with_its_parameters_and_inputs() -> None:
    code, out, _ = command("--list")
    assert code == 0
    for name, count in PARAMETERS.items():
        assert f"{name} " in out
        assert f" {count:,} " in out
    assert "input_ids .. token_type_ids int64 (1, 128)" in out
