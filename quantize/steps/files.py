"""Refuse the files of a request before any long work."""

from __future__ import annotations

import os

from ...calibration.data.sources import DataSource, named_files
from ...system.apart import PathLike, check_apart
from ...system.given import check_path
from ...system.scratch import check_room
from ..model.files import check_onnx_output, check_output
from ..options.options import Options
from ..placement.plan_file import plan_path


def check_files(model: PathLike, data: DataSource | None, output: PathLike, options: Options) -> None:
    """Refuse an output that cannot be written, or that would overwrite an input, and a full disk for temporary files.

    Args:
        model: Path of the float model.
        data: The data.
        output: Path of the model to write; its plan goes beside it.
        options: The options, of which some name files.

    Raises:
        RequantError: As for `check_output`, `check_apart` and `check_room`.
    """
    check_path(model, "the model")
    check_path(output, "the output")
    given = (model, options.ranges, options.overrides, options.costs)
    inputs = [*named_files(data), *(each for each in given if isinstance(each, (str, os.PathLike)))]
    check_apart({"the output": output, "the plan beside it": plan_path(output)}, inputs)
    check_onnx_output(output, model, force=options.force, external=options.external_data)
    check_output(plan_path(output), model, force=options.force)
    check_room()
