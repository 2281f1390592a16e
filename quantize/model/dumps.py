"""The models between the steps of a pipeline, each in a file: ``03_fold_batch_norms.onnx``."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import onnx_ir as ir

from ... import RequantError
from ...system.apart import PathLike
from ...system.notes import note_written
from ...system.regular import reason_of
from ...transforms import REGISTRY, Pipeline, StepResult
from .files import check_output
from .writing import save_model

DUMP = re.compile(r"[0-9]{2,}_(\w+)\.onnx(\.data)?")


def begin_dumps(
    folder: PathLike, pipeline: Pipeline, source: PathLike, target: PathLike, *, force: bool
) -> Callable[[StepResult, ir.Model], None]:
    """Return a function that writes the model after each step to a folder; `transforms.run` calls it.

    A step with an ignored error keeps its number and writes nothing. Weights that exceed one ONNX message go to a file
    beside each model. The message of a later error names the folder: the last dump is what the failing step was given.

    Args:
        folder: The folder; it is created if its parent exists.
        pipeline: The steps.
        source: The file of the first model.
        target: The file of the last model.
        force: Whether existing dumps may be removed.

    Raises:
        RequantError: The folder cannot be written to; it holds dumps and `force` is not set; or a dump would
            overwrite the input or the output.
    """
    place = Path(folder)
    made = _make(place)
    paths = [place / f"{number:02}_{step.name}.onnx" for number, step in enumerate(pipeline.steps, 1)]
    for path in paths:
        if path.absolute() == Path(target).absolute():
            raise RequantError(f"{target}: a dump of the same name would overwrite it; choose another path")
        check_output(path, source, force=True)
    old = [path for path in sorted(place.iterdir()) if _is_dump(path)]
    if old and not force:
        raise RequantError(
            f"{folder}: holds {len(old)} dumps already, such as {old[0].name!r}; --force removes them (in Python: "
            "force=True)"
        )
    if any(path.exists() and path.samefile(source) for path in old if os.path.exists(source)):
        raise RequantError(f"{folder}: holds the input {os.fspath(source)!r} among its dumps; choose another folder")
    for path in old:
        path.unlink()
    rest = iter(paths)

    def write(result: StepResult, model: ir.Model) -> None:
        path = next(rest)
        if result.error is not None:
            return
        try:
            save_model(model, path)
        except RequantError:
            if made:
                with suppress(OSError):  # it holds other dumps
                    place.rmdir()
            raise
        note_written(folder)

    return write


def _make(folder: Path) -> bool:
    """Create a folder if it does not exist, and check that files can be written to it; return whether it is new."""
    try:
        new = not os.path.isdir(folder)
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return new
    except FileExistsError as error:
        raise RequantError(f"{folder}: is a file; give a folder for the dumps") from error
    except OSError as error:
        raise RequantError(f"{folder}: dumps cannot be written there: {reason_of(error)}") from error


def _is_dump(path: Path) -> bool:
    """Return whether a file has the name of a dump."""
    match = DUMP.fullmatch(path.name)
    return match is not None and match[1] in REGISTRY and path.is_file()
