"""The metadata of an emitted model: how it was made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import onnx_ir as ir

from ...transforms import METADATA_KEY
from ...transforms.existing import VERSION_KEY
from ...transforms.qparams import QParams


def describe_origin(
    model: ir.Model, steps: Sequence[str], qparams: Mapping[str, QParams], asked: Mapping[str, Any]
) -> None:
    """Record in ``metadata_props`` the version, the pipeline, the fingerprint of the ranges and the options.

    The keys are ``requant.version``, ``requant.pipeline``, ``requant.ranges`` (absent without ranges) and
    ``requant.options`` (JSON, without defaults).
    """
    props = model.metadata_props
    props[METADATA_KEY] = " ".join([props.get(METADATA_KEY, ""), *steps]).strip()
    props[VERSION_KEY] = version("requant")
    props["requant.options"] = json.dumps(asked, sort_keys=True)
    if qparams:
        props["requant.ranges"] = ranges_fingerprint(qparams)


def ranges_fingerprint(qparams: Mapping[str, QParams]) -> str:
    """Return the SHA-256, in hex, of the scale and zero point of every tensor."""
    rows = sorted((name, float(params.scale), int(params.zero_point)) for name, params in qparams.items())
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
