"""`run_demo`: write a small trained model and its data into a folder, quantize the model, and write the report."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from ... import RequantError
from ...system.regular import reason_of
from ...system.writing import write_atomically
from ..model.files import check_output
from ..placement.plan_file import plan_path
from ..result import Result
from ..runtime.progress import Progress, silent
from .request import Request

STORED = Path(__file__).parent / "digits"
"""The model and the data; `sample_models/small.py` makes them."""
MODEL, DATA, INT8, REPORT = "digits.onnx", "digits.npz", "digits_int8.onnx", "report.html"


@dataclass(frozen=True, slots=True)
class Demo:
    """A demo in a folder.

    Attributes:
        folder: The folder.
        result: The result of the quantization.
    """

    folder: Path
    result: Result

    @property
    def report(self) -> Path:
        """The page of the run."""
        return self.folder / REPORT

    @property
    def commands(self) -> tuple[str, ...]:
        """Commands to try next: two on the files of the demo, and one for the user's own model."""
        model, data, int8 = (shlex.quote(str(self.folder / name)) for name in (MODEL, DATA, INT8))
        return (
            f"requant compare {model} {int8} --data {data}",
            f"requant explain {int8} --data {data}",
            "requant quantize YOUR_MODEL.onnx --data YOUR_DATA.npz -o YOUR_MODEL_int8.onnx",
        )


def run_demo(folder: str | os.PathLike[str], *, force: bool = False, progress: Progress = silent) -> Demo:
    """Write the model and the data into a folder, which is made if it does not exist; quantize, and write the report.

    Args:
        folder: The folder.
        force: Whether existing files of the same names may be overwritten.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).

    Raises:
        RequantError: The folder cannot be made, it has one of the files, or a file cannot be written.
    """
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequantError(f"{place}: cannot be made: {reason_of(error)}; give the name of a new folder") from error
    model, data, output = place / MODEL, place / DATA, place / INT8
    for path in (model, data, output, plan_path(output), place / REPORT):
        check_output(path, STORED / MODEL, force=force or _is_ours(path))
    for path in (model, data):
        write_atomically(path, (STORED / path.name).read_bytes())
    arguments = ["quantize", model, "--data", f"{data}:calib", "-o", output, "--report", place / REPORT, "--force"]
    request = Request(
        model=model,
        output=output,
        values={"data": f"{data}:calib", "report": (str(place / REPORT),), "force": True},
        command=shlex.join(["requant", *map(str, arguments)]),
    )
    return Demo(place, request.run(progress))


def _is_ours(path: Path) -> bool:
    """Whether a file is the model or the data as a demo that was interrupted wrote it."""
    stored = STORED / path.name
    try:
        return stored.is_file() and path.is_file() and path.read_bytes() == stored.read_bytes()
    except OSError:
        return False
