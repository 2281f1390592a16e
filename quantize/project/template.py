"""Write a commented ``requant.toml`` for a model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ... import RequantError
from ...calibration.model.session import InputSpec, input_specs, open_session
from ...system.printable import CELL, is_utf8, one_line, printable, quoted
from ..gate.baseline import Tolerances
from ..model.files import load_model
from ..options.declared import CHECK, QUANTIZE
from ..options.option import Kind, Option
from .file import NAME

IMAGE_SIZE = re.compile(r"\[([1-9]\d{0,4}), ([1-9]\d{0,4})\]")
"""Height and width in the metadata of an export of Ultralytics."""


def template(model: str | os.PathLike[str], target: str | os.PathLike[str] = NAME) -> str:
    """Return the text of a project: every key with its meaning, and values that fit the model's inputs.

    Args:
        model: Path of the float model.
        target: Path of the project; the path of the model in it is relative to this file.

    Raises:
        RequantError: The model cannot be loaded, or its path is not UTF-8, as TOML must be.
    """
    path = Path(os.path.relpath(model, Path(target).absolute().parent))
    if not is_utf8(path.as_posix()):
        raise RequantError(f"{model}: the path is not UTF-8, so a TOML file cannot name it; rename the file or folder")
    load_model(model)
    session = open_session(Path(model), lean=True)
    inputs, name = input_specs(session), printable(Path(target).name)
    reading = _reading(inputs, session.get_modelmeta().custom_metadata_map)
    output = path.with_name(f"{path.stem}_int8.onnx")
    lines = [
        f"# 'requant check {name}' quantizes {printable(path.name)}, and compares the result with the baseline,",
        f"# which 'requant check {name} --update' writes. The keys are the options of 'requant quantize' and",
        "# 'requant check'. A line that is commented out shows a default or an example.",
        "#",
        "# Each check writes the output again. The plan file beside it decides what becomes int8. Without one, this is",
        "# measured, and the plan file is written: keep it under version control, like the baseline.",
        "#",
        *(one_line(f"# input {spec.name}: {spec}", CELL) for spec in inputs),
        one_line(f"# outputs: {', '.join(output.name for output in session.get_outputs())}", CELL),
        "",
        f"model = {quoted(path.as_posix())}",
        f"output = {quoted(output.as_posix())}",
        "",
        "[quantize]",
        *_lines(QUANTIZE, {**reading, "data": reading["data"].format("calib")}),
        "",
        "[check]",
        *_lines(CHECK, {**reading, "data": reading["data"].format("test")}),
        "",
        '# [check.tolerance]  # Allowed losses: 0.005 is half a point, "1%" is relative to the baseline.',
        *(f"# {key} = {value}" for key, value in (("top1", 0.005), ("agreement", 0.005), ("sqnr", 0.5))),
        *(f"# {key} = {value}" for key, value in Tolerances().to_json().items()),
        "# speedup = 1.0  # The least speed-up on any machine.",
    ]
    return "\n".join(lines) + "\n"


def _reading(inputs: Sequence[InputSpec], told: Mapping[str, str]) -> dict[str, str]:
    """Return the likely data of a model's inputs: arrays, images, or texts.

    Args:
        inputs: The inputs.
        told: The metadata of the model.
    """
    if len(inputs) == 1 and len(inputs[0].shape) == 4 and 3 in (inputs[0].shape[1], inputs[0].shape[3]):
        return {"data": '"{}_images/"', "preprocess": quoted(_preprocess(inputs[0].shape, told))}
    if all(spec.dtype.kind == "i" and len(spec.shape) == 2 for spec in inputs):
        return {"data": '"{}.jsonl"', "tokenizer": '"tokens.py:encode"'}
    return {"data": '"{}.npz"'}


def _preprocess(shape: tuple[int | str | None, ...], told: Mapping[str, str]) -> str:
    """Return the usual preprocessing of images for an input of this shape.

    An export of Ultralytics names the size of its images (``imgsz``) and its task in the metadata: a classifier crops
    images that were scaled to this size, and other models pad them with grey.

    Args:
        shape: The shape of the input, with three channels.
        told: The metadata of the model.
    """
    fixed = [axis for axis in shape[1:] if isinstance(axis, int) and axis != 3]
    named = IMAGE_SIZE.fullmatch(told.get("imgsz", ""))
    if named is not None and len(fixed) in (0, 2):
        height, width = fixed or map(int, named.groups())
        if told.get("task") != "classify":
            return f"pad={height}x{width} fill=114 scale=255"
        return f"resize={height} crop={height} scale=255" if height == width else f"resize={height}x{width} scale=255"
    if len(fixed) == 2 and fixed[0] != fixed[1]:
        return f"resize={fixed[0]}x{fixed[1]} scale=255"
    size = fixed[0] if fixed else 224
    return f"resize={round(size * 256 / 224)} crop={size} scale=255"


def _lines(keys: Iterable[Option], values: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each key; keys without a value are commented out."""
    for key in keys:
        if key.kind is Kind.TABLE:
            continue
        if key.name in values:
            yield f"{key.name} = {values[key.name]}  # {key.comment}"
        else:
            yield f"# {key.name} = {key.example}  # {key.comment}"
