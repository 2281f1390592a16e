"""The sample models and their data agree with sample_models/README.md."""

import math
import re
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

SAMPLE_MODELS = Path(__file__).parent.parent / "sample_models"
MODELS = ["digits", "digits_mobile", "digits_transformer"]
MAX_MODEL_BYTES = 2_000_000
MAX_DATA_BYTES = 1_500_000


@cache
def load(name: str) -> onnx.ModelProto:
    return onnx.load(SAMPLE_MODELS / f"{name}.onnx")


@cache
def data() -> dict[str, NDArray[np.float32] | NDArray[np.int64]]:
    with np.load(SAMPLE_MODELS / "digits.npz") as file:
        return dict(file)


def logits(name: str, images: NDArray[np.generic]) -> NDArray[np.float32]:
    session = ort.InferenceSession(SAMPLE_MODELS / f"{name}.onnx", providers=["CPUExecutionProvider"])
    (result,) = session.run(["logits"], {"image": images})
    return np.asarray(result)


def documented(name: str) -> tuple[int, int]:
    """Return the bytes and the number of correctly classified test images from the table of the README."""
    text = (SAMPLE_MODELS / "README.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{name}\.onnx` .*\| ([\d,]+) bytes \| (\d+) of 797 ", text, re.MULTILINE)
    assert row, f"README.md has no row for {name}.onnx"
    return int(row[1].replace(",", "")), int(row[2])


def initializers(name: str) -> dict[str, NDArray[np.generic]]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in load(name).graph.initializer}


def operators(name: str) -> Counter[str]:
    return Counter(node.op_type for node in load(name).graph.node)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_valid_small_and_of_the_default_domain(name: str) -> None:
    onnx.checker.check_model(load(name), full_check=True)
    size = (SAMPLE_MODELS / f"{name}.onnx").stat().st_size
    assert size < MAX_MODEL_BYTES
    assert size == documented(name)[0]
    assert [(opset.domain, opset.version) for opset in load(name).opset_import] == [("", 17)]


@pytest.mark.parametrize("name", MODELS)
def test_the_model_has_the_documented_input_and_output(name: str) -> None:
    session = ort.InferenceSession(SAMPLE_MODELS / f"{name}.onnx", providers=["CPUExecutionProvider"])
    ends = [(end.name, end.type, end.shape) for end in (*session.get_inputs(), *session.get_outputs())]
    assert ends == [("image", "tensor(float)", ["N", 1, 28, 28]), ("logits", "tensor(float)", ["N", 10])]


@pytest.mark.parametrize("name", MODELS)
def test_every_node_has_a_name_of_its_own(name: str) -> None:
    names = Counter(node.name for node in load(name).graph.node)
    assert "" not in names
    assert max(names.values()) == 1


def rounding_bound(name: str, result: NDArray[np.float32]) -> float:
    """Bound the difference between logits whose sums have another order.

    A float32 sum of k products has a relative error of about sqrt(k) eps (Higham and Mary, 2019, A New Approach to
    Probabilistic Rounding Error Analysis). The errors of a chain of `depth` sums add up. k is the length of the longest
    sum.
    """
    depth = sum(operators(name)[op] for op in ("Conv", "Gemm", "MatMul"))
    weights = [value for key, value in initializers(name).items() if key.endswith(".weight")]
    longest = max(math.prod(weight.shape[1:]) if weight.ndim == 4 else max(weight.shape) for weight in weights)
    return depth * math.sqrt(longest) * float(np.finfo(np.float32).eps) * float(np.abs(result).max())


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_gives_what_single_images_give(name: str) -> None:
    images = data()["image"][:5]
    batch = logits(name, images)
    singles = np.concatenate([logits(name, images[i : i + 1]) for i in range(5)])
    assert batch.shape == singles.shape == (5, 10)
    np.testing.assert_allclose(batch, singles, rtol=0, atol=rounding_bound(name, batch))


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_as_accurate_as_documented(name: str) -> None:
    correct = int((logits(name, data()["image"]).argmax(axis=1) == data()["labels"]).sum())
    assert correct >= documented(name)[1] >= 0.98 * 797


def test_digits_is_the_plain_network_with_its_batch_normalizations_unfolded() -> None:
    assert [(node.name, node.op_type) for node in load("digits").graph.node] == [
        ("conv1", "Conv"),
        ("bn1", "BatchNormalization"),
        ("relu1", "Relu"),
        ("pool1", "MaxPool"),
        ("conv2", "Conv"),
        ("bn2", "BatchNormalization"),
        ("relu2", "Relu"),
        ("pool2", "MaxPool"),
        ("flatten", "Flatten"),
        ("fc1", "Gemm"),
        ("relu3", "Relu"),
        ("fc2", "Gemm"),
    ]
    shapes = {key: value.shape for key, value in initializers("digits").items() if key.endswith(".weight")}
    assert shapes == {
        "conv1.weight": (32, 1, 5, 5),
        "conv2.weight": (64, 32, 5, 5),
        "fc1.weight": (128, 3136),
        "fc2.weight": (10, 128),
    }


@pytest.mark.parametrize("name", ["digits", "digits_mobile"])
def test_batch_normalizations_follow_convolutions_and_change_what_a_fold_must_carry_over(name: str) -> None:
    values = initializers(name)
    maker = {node.output[0]: node.op_type for node in load(name).graph.node}
    norms = [node for node in load(name).graph.node if node.op_type == "BatchNormalization"]
    assert norms
    for node in norms:
        assert maker[node.input[0]] == "Conv"
        scale, bias, mean, var = (np.asarray(values[key], np.float64) for key in node.input[1:])
        assert (var > 0).all()
        assert np.abs(var - 1).max() > 0.1  # 1 is the value before training
        # Mean and bias are checked together: before a 1x1 convolution with its own batch normalization, a bias has no
        # effect on the loss. So it stays near its initial 0, and so does the mean after it.
        gain = scale / np.sqrt(var + onnx.helper.get_node_attr_value(node, "epsilon"))
        assert np.abs(gain - 1).max() > 0.1
        assert np.abs(bias - mean * gain).max() > 0.1


def test_digits_mobile_is_depthwise_with_hard_swish_and_squeeze_excite() -> None:
    convolutions = [value for value in initializers("digits_mobile").values() if value.ndim == 4]
    depthwise = [weight.shape[2:] for weight in convolutions if weight.shape[1] == 1 and weight.shape[0] > 32]
    assert set(depthwise) == {(3, 3), (5, 5)}
    assert {"HardSwish", "HardSigmoid", "GlobalAveragePool", "Mul", "Add"} <= operators("digits_mobile").keys()
    gates = [node for node in load("digits_mobile").graph.node if node.op_type == "HardSigmoid"]
    assert {
        round(6 * attribute.f, 6) for gate in gates for attribute in gate.attribute if attribute.name == "alpha"
    } == {1}


def test_digits_transformer_has_four_layers_of_softmax_attention_and_erf_gelu() -> None:
    counts = operators("digits_transformer")
    assert (counts["Softmax"], counts["Erf"], counts["LayerNormalization"]) == (4, 4, 9)
    assert counts["MatMul"] == 4 * (4 + 2 + 2)  # projections, attention products, perceptron


def test_the_data_is_small_and_has_both_splits() -> None:
    assert (SAMPLE_MODELS / "digits.npz").stat().st_size < MAX_DATA_BYTES
    assert {key: (value.shape, str(value.dtype)) for key, value in data().items()} == {
        "image": ((797, 1, 28, 28), "float32"),
        "labels": ((797,), "int64"),
        "calib/image": ((200, 1, 28, 28), "float32"),
        "calib/labels": ((200,), "int64"),
    }


@pytest.mark.parametrize("split", ["", "calib/"], ids=["test", "calib"])
def test_pixels_are_bytes_over_255_and_every_class_is_there(split: str) -> None:
    levels = np.rint(data()[f"{split}image"] * 255)
    assert (levels.min(), levels.max()) == (0, 255)
    assert np.array_equal(data()[f"{split}image"], levels.astype(np.float32) / np.float32(255))
    assert set(data()[f"{split}labels"].tolist()) == set(range(10))


def test_no_calibration_image_is_a_test_image() -> None:
    test, calibration = ({image.tobytes() for image in data()[key]} for key in ("image", "calib/image"))
    assert len(test) == 797
    assert len(calibration) == 200
    assert not test & calibration
