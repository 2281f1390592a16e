"""The metadata of an emitted model: how it was made, and what is needed to make it again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Literal, TypeAlias

import onnx_ir as ir

from ... import RequantError, __version__
from ...calibration.range_files.decoding import convert
from ...system.values import decode_json
from ...transforms import METADATA_KEY
from ...transforms.int8.existing import MADE_KEY, VERSION_KEY
from ...transforms.int8.plan import Plan
from ...transforms.int8.qparams import QParams
from ..runtime.machine import flags

OPTIONS_KEY, RANGES_KEY = "requant.options", "requant.ranges"
LIBRARIES = ("numpy", "onnx", "onnx-ir", "onnxruntime")
"""The libraries whose versions can change the bytes of a model."""
Written: TypeAlias = Literal["int8", "float", "given", "unsimplified"]
"""What was written: a model by the plan, the simplified float model, the simplified model with its own operators that
compute ranges at run time, or the given float model, whose simplified copy is slower."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The programs and the machine that made a model.

    Attributes:
        versions: Versions by name of a library.
        machine: Architecture, as the system names it: ``x86_64``, ``aarch64``.
        cpu: Which of `requant.quantize.runtime.machine.FLAGS` the CPU has.
    """

    versions: dict[str, str]
    machine: str
    cpu: tuple[str, ...]

    @classmethod
    def here(cls) -> Environment:
        """Return this environment."""
        return cls({name: version(name) for name in LIBRARIES}, platform.machine(), flags())


@dataclass(frozen=True, slots=True)
class Made:
    """What decides the bytes of a model, apart from the options.

    Attributes:
        source: File name of the float model, without its folder.
        model: The `fingerprint` of the float model.
        written: What was written.
        plan: `plan_digest` of the written plan.
        own_plan: Whether the user gave a plan.
        calibration: The range rule that the user gave; None without one.
        inputs: Which of ``data`` and ``ranges`` the user gave.
        data: A digest of the feeds that gave the ranges; empty without.
        exact: Whether the target adds products of 8 bits exactly.
        native: Whether units could become native operators.
        environment: The programs and the machine.
    """

    source: str
    model: str
    written: Written
    plan: str
    own_plan: bool
    calibration: str | None
    inputs: tuple[Literal["data", "ranges"], ...]
    data: str
    exact: bool
    native: bool
    environment: Environment


def describe_origin(
    model: ir.Model, steps: Sequence[str], qparams: Mapping[str, QParams], asked: Mapping[str, Any]
) -> None:
    """Record in ``metadata_props`` the version, the pipeline, the fingerprint of the ranges and the options.

    The keys are ``requant.version``, ``requant.pipeline``, ``requant.ranges`` (absent without ranges) and
    ``requant.options`` (JSON, without defaults). The model that is written also gets `MADE_KEY`.
    """
    props = model.metadata_props
    props[METADATA_KEY] = " ".join([props.get(METADATA_KEY, ""), *steps]).strip()
    props[VERSION_KEY] = __version__
    props[OPTIONS_KEY] = json.dumps(asked, sort_keys=True)
    props.pop(MADE_KEY, None)
    if qparams:
        props[RANGES_KEY] = ranges_fingerprint(qparams)


def describe_making(model: ir.Model, made: Made) -> None:
    """Record in ``metadata_props`` what is needed to make the model again, as JSON."""
    model.metadata_props[MADE_KEY] = json.dumps(asdict(made), sort_keys=True)


def making_of(path: str | os.PathLike[str], props: Mapping[str, str]) -> Made:
    """Return what the metadata of a model say of its making.

    Raises:
        RequantError: The entry is missing, or is not what `describe_making` writes.
    """
    if MADE_KEY not in props:
        raise RequantError(f"{os.fspath(path)}: no {MADE_KEY!r} in its metadata")
    return convert(decoded(path, props, MADE_KEY), Made, f"{os.fspath(path)}: damaged metadata {MADE_KEY!r}")


def decoded(path: str | os.PathLike[str], props: Mapping[str, str], key: str) -> Any:
    """Return the JSON values of an entry of a model's metadata; an empty object if it is missing.

    Raises:
        RequantError: The entry is not JSON.
    """
    try:
        return decode_json(props.get(key, "{}"))
    except ValueError as error:
        raise RequantError(f"{os.fspath(path)}: damaged metadata {key!r}: {error}") from error


def ranges_fingerprint(qparams: Mapping[str, QParams]) -> str:
    """Return the SHA-256, in hex, of the scale and zero point of every tensor."""
    rows = sorted((name, float(params.scale), int(params.zero_point)) for name, params in qparams.items())
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def plan_digest(plan: Plan | Mapping[str, str]) -> str:
    """Return the SHA-256, in hex, of the implementations of a plan by unit."""
    rows = {unit.name: plan.impl(unit).value for unit in plan.units} if isinstance(plan, Plan) else plan
    return hashlib.sha256(json.dumps(sorted(rows.items())).encode()).hexdigest()
