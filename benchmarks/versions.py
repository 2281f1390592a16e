"""Run the models that requant writes in every supported ONNX Runtime, and a part of the tests with other dependencies.

    python -m benchmarks.versions models      # versions of the runtime x models: equal outputs?
    python -m benchmarks.versions tests       # the oldest and the newest dependencies, each on several Pythons
    python -m benchmarks.versions             # both; `make test-matrix`

The versions come from ``pyproject.toml`` and from the registry: of the runtime the oldest that is allowed, and the
newest of each minor version since. uv makes the environments, under ``build/matrix``, and keeps them. The exit code is
1 if a model does not load, if outputs differ by more than a form may (`limit`), or if tests fail. A Python that uv does
not find is skipped; a line says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from packaging.requirements import Requirement
from packaging.version import Version

from requant.calibration.model.session import Array, native_library
from requant.quantize import Options, quantize_model
from requant.quantize.options.declared import Strategy
from requant.quantize.options.selection import Selection

Outputs = Mapping[str, Array]

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "matrix"
SAMPLES = ROOT / "sample_models"
MODELS = ("digits", "digits_mobile", "digits_transformer")
RUNTIME = "onnxruntime"
IMAGES = 64
"""The number of images of a run, one batch."""

FAST: Mapping[str, Any] = {"effort": "low", "seconds": 0.01, "force_int8": True, "force": True}
FORMS: Mapping[str, tuple[Options, bool]] = {
    "static": (Options(**FAST, place="all", kernels="stock", selection=Selection(strategy=Strategy.STATIC)), True),
    "portable": (Options(**FAST, portable=True), True),
    "native": (Options(**FAST, place="all", kernels="native"), True),
    "dynamic": (Options(**FAST, place="all", kernels="stock", selection=Selection(strategy=Strategy.DYNAMIC)), False),
    "block": (Options(**FAST, place="all", kernels="stock", selection=Selection(strategy=Strategy.BLOCK)), True),
    "weight-only": (
        Options(**FAST, place="all", kernels="stock", selection=Selection(strategy=Strategy.WEIGHT)),
        False,
    ),
}
"""The options of each form, and whether it needs data."""

PART = (
    "tests/test_levels.py",
    "tests/test_sample_models.py",
    "tests/calibration/test_calibrator.py",
    "tests/calibration/model/test_newer.py",
    "tests/calibration/model/test_session.py",
    "tests/quantize/model",
    "tests/transforms/test_convert_opset.py",
    "tests/transforms/test_fold_constants.py",
    "tests/transforms/test_inline_functions.py",
    "tests/transforms/int8/test_insert_qdq.py",
    "tests/transforms/test_qdq_to_qoperator.py",
)
"""The tests of other dependencies: what touches the runtime, onnx, onnx-ir, NumPy and protobuf most, and five forms
from end to end. Golden cases are not among them: each version of onnx prints floats in its own way."""
KNOWN: Mapping[str, Mapping[str, str]] = {
    "oldest": {
        "tests/transforms/test_convert_opset.py::test_an_operator_without_a_conversion_is_named": (
            "the converter of onnx 1.18 names no operator"
        ),
        "tests/transforms/test_convert_opset.py::test_a_converted_model_can_be_quantized": (
            "ONNX Runtime 1.23 has no ConvInteger of these types"
        ),
        "tests/transforms/test_qdq_to_qoperator.py::test_the_integer_form_computes_the_same[SpaceToDepth]": (
            "ONNX Runtime 1.23 has no SpaceToDepth of uint8"
        ),
        "tests/quantize/model/test_loading.py::test_graphs_that_lie_too_deeply_in_each_other": (
            "protobuf 5 does not say that the recursion is why it cannot parse"
        ),
        "tests/quantize/model/test_loading.py::test_a_tensor_in_a_file_equals_the_mapped_one[UINT2]": (
            "the ExternalTensor of onnx-ir 1.0 cannot read UINT2"
        ),
    },
    "newest": {},
}
"""The tests that do not run with some dependencies, and why."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}
INDEPENDENT = 2**0.5
"""The difference of two INT8 models with independent rounding errors, as a share of one of these errors."""


class FailedError(Exception):
    """A program failed; the message is the end of what it printed."""


def call(*words: str | Path, **env: str) -> str:
    """Run a program, and return what it prints.

    Raises:
        FailedError: Its exit code is not 0.
    """
    given = [str(word) for word in words]
    done = subprocess.run(given, capture_output=True, text=True, check=False, env={**os.environ, **env}, cwd=ROOT)
    if done.returncode:
        raise FailedError(" ".join((done.stderr or done.stdout).split())[-300:])
    return done.stdout


def uv(*words: str | Path) -> str:
    """Run uv; the variable UV may name another program.

    Raises:
        FailedError: uv fails.
    """
    return call(os.environ.get("UV", "uv"), "--quiet", *words)


def project() -> dict[str, Any]:
    """Return the table ``project`` of ``pyproject.toml``."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def supported(available: Sequence[str], requirement: Requirement) -> list[Version]:
    """Return the oldest version that a requirement allows, and the newest of each later minor version, oldest first."""
    allowed = sorted(map(Version, requirement.specifier.filter(available, prereleases=False)))
    newest = {version.release[:2]: version for version in allowed}
    return [allowed[0], *list(newest.values())[1:]]


def runtimes() -> list[Version]:
    """Return the versions of the runtime that the registry has and ``pyproject.toml`` allows, by `supported`."""
    (requirement,) = [one for one in map(Requirement, project()["dependencies"]) if one.name == RUNTIME]
    listed = call(sys.executable, "-m", "pip", "index", "versions", RUNTIME)
    found = re.search(r"Available versions: (.*)", listed)
    if found is None:
        raise FailedError(f"pip index versions {RUNTIME}: no versions in its output")
    return supported(found[1].split(", "), requirement)


def environment(name: str, python: str, *packages: str) -> Path:
    """Return the Python of an environment with these packages; one that was made before is kept.

    Args:
        name: The folder of the environment.
        python: The version of Python, or the path of one.
        packages: Arguments of ``uv pip install``.

    Raises:
        FailedError: There is no such Python, or uv cannot install the packages.
    """
    folder = FOLDER / "environments" / name
    stamp, wanted = folder / "made-of", "\n".join([python, *packages])
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        uv("venv", "--clear", "--no-python-downloads", "--python", python, folder)
        uv("pip", "install", "--python", folder / "bin" / "python", "--only-binary", ":all:", *packages)
        stamp.write_text(wanted, encoding="utf-8")
    return folder / "bin" / "python"


def emit(folder: Path) -> None:
    """Write each sample model, and each of its forms, to a folder."""
    data = f"{SAMPLES / 'digits.npz'}:calib"
    for model in MODELS:
        source = SAMPLES / f"{model}.onnx"
        shutil.copy(source, folder / f"{model}-float.onnx")
        for form, (options, needs_data) in FORMS.items():
            if form != "native" or native_library():
                quantize_model(source, data if needs_data else None, folder / f"{model}-{form}.onnx", options)
                click.echo(f"wrote {model}-{form}", err=True)


def outputs_of(python: Path | str, models: Path, images: Path) -> dict[str, Array]:
    """Return what `versions_run` writes when this Python runs it.

    Raises:
        FailedError: The program fails.
    """
    library = [path] if (path := native_library()) else []
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "outputs.npz")
        script = Path(__file__).with_name("versions_run.py")
        call(python, script, models, images, target, *library, ORT_DISABLE_TELEMETRY="1")
        with np.load(target) as file:
            return dict(file)


@dataclass(frozen=True, slots=True)
class Found:
    """The outputs of one model in one version of the runtime, against those in the locked version.

    Attributes:
        refused: The reason why the runtime does not run the model; empty if it does.
        difference: The largest difference of an output at any optimization level, as a share of `limit`; 0 if all
            are equal bit for bit.
        levels: The levels whose outputs differ.
    """

    refused: str = ""
    difference: float = 0.0
    levels: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether the model runs, and gives outputs that it may give."""
        return not self.refused and self.difference <= 1

    def __str__(self) -> str:
        """Return ``"equal"``, ``"0.02"`` or ``"refused"``."""
        if self.refused:
            return "refused"
        return f"{self.difference:.2g}" if self.levels else "equal"


def compare(found: Outputs, locked: Outputs, model: str) -> Found:
    """Compare the outputs of a model in two versions of the runtime, level by level."""
    worst, levels = 0.0, []
    for key, value in found.items():
        name, _, level = key.partition("|")
        if name != model or key not in locked:  # a level that the locked version does not have is not compared
            continue
        if value.dtype.kind == "U":
            return Found(f"{level}: {value}")
        if value.shape != locked[key].shape or not np.isfinite(value).all():
            return Found(f"{level}: outputs of another shape, or not finite")
        if not np.array_equal(value, locked[key]):
            levels.append(level)
            worst = max(worst, rms(value - locked[key]) / limit(locked, name, level))
    return Found("", worst, tuple(levels))


def rms(values: Array) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def limit(locked: Outputs, name: str, level: str) -> float:
    """Return the largest root mean square difference of the outputs of a model in two versions of the runtime.

    Integers are equal in all versions. Sums of floats may have another order, with a relative error of sqrt(n) eps for
    each of the sums in sequence (Higham and Mary, 2019), n their length. Where a float d away is then rounded to an
    integer, a share d / step of the values gets the next integer, with the root mean square sqrt(d step), which is more
    than d. So a small difference grows from layer to layer, until both models round independently, not further: then
    the difference is `INDEPENDENT` times the rounding error.
    """
    model = name.partition("-")[0]
    plain = locked[f"{model}-float|{level}"]
    reordered = float_limit(model) * float(np.abs(plain).max())
    return max(reordered, INDEPENDENT * rms(locked[f"{name}|{level}"] - plain))


def float_limit(model: str) -> float:
    """Return the relative error of the outputs of a sample model whose sums have another order."""
    graph = onnx.load(SAMPLES / f"{model}.onnx").graph
    depth = sum(node.op_type in ("Conv", "Gemm", "MatMul") for node in graph.node)
    longest = max(int(np.prod(each.dims[1:])) for each in graph.initializer if len(each.dims) > 1)
    return depth * float(np.sqrt(longest) * np.finfo(np.float32).eps)


def check_models() -> bool:
    """Print a table of models and versions, and one of models and optimization levels; return whether all is good."""
    with tempfile.TemporaryDirectory() as name:
        models, images = Path(name, "models"), Path(name, "images.npz")
        models.mkdir()
        emit(models)
        with np.load(SAMPLES / "digits.npz") as file:
            np.savez(images, image=file["image"][:IMAGES])
        locked = outputs_of(sys.executable, models, images)
        found = dict(_in_versions(models, images, locked))
    click.echo(f"Against ONNX Runtime {locked['version|']}, level by level; a number is a share of the limit:\n")
    click.echo(table(found))
    click.echo(f"\nIn ONNX Runtime {locked['version|']}, against the level 'off':\n")
    levels = levels_of(locked)
    click.echo(table(levels))
    bad = [
        f"{place} {model}: {each.refused or each}"
        for columns in (found, levels)
        for place, row in columns.items()
        for model, each in row.items()
        if not each.good
    ]
    click.echo("\n" + ("\n".join(bad) or "all models are good"))
    return not bad


def table(columns: Mapping[str, Mapping[str, Found]]) -> str:
    """Return a table in Markdown: a row for each model."""
    rows = [["model", *columns], ["---"] * (1 + len(columns))]
    models = list(next(iter(columns.values())))
    rows += [[model, *(str(column[model]) for column in columns.values())] for model in models]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def names_of(outputs: Outputs) -> list[str]:
    """Return the names of the models, sorted."""
    return sorted({key.partition("|")[0] for key in outputs} - {"version"})


def levels_of(locked: Outputs) -> dict[str, dict[str, Found]]:
    """Compare the outputs of each model at each optimization level with those at the level ``off``."""
    levels = dict.fromkeys(key.partition("|")[2] for key in locked if key.partition("|")[2] not in ("", "off"))
    return {
        level: {name: compare({f"{name}|off": locked[f"{name}|{level}"]}, locked, name) for name in names_of(locked)}
        for level in levels
    }


def _in_versions(models: Path, images: Path, locked: Outputs) -> Iterator[tuple[str, dict[str, Found]]]:
    """Yield each version of the runtime with what it makes of each model."""
    names = names_of(locked)
    for version in runtimes():
        click.echo(f"running {RUNTIME} {version}", err=True)
        try:
            python = environment(f"{RUNTIME}-{version}", sys.executable, f"{RUNTIME}=={version}")
            outputs: Outputs = outputs_of(python, models, images)
            row = {name: compare(outputs, locked, name) for name in names}
        except FailedError as error:
            row = dict.fromkeys(names, Found(str(error)))
        yield str(version), row


def check_tests(pythons: Sequence[str] = PYTHONS) -> bool:
    """Run a part of the tests with the oldest and the newest dependencies; return whether all pass."""
    good = True
    for python in pythons:
        for name, resolution in RESOLUTIONS.items():
            result = _tests_with(python, name, resolution)
            good = good and not result.startswith("failed")
            click.echo(f"Python {python}, {name} dependencies: {result}")
    return good


def _tests_with(python: str, name: str, resolution: str) -> str:
    """Return the result of `PART` in one environment: what pytest says, or why it was not run."""
    try:
        uv("python", "find", "--no-python-downloads", python)
    except FailedError:
        return f"skipped: uv finds no Python {python} here"
    wanted = ("--resolution", resolution, "-r", "pyproject.toml", "pytest>=8", "hypothesis>=6.100", "setuptools>=77")
    try:
        made = environment(f"{name}-{python}", python, *wanted)
    except FailedError as error:
        return f"skipped: no wheels of the {name} dependencies for Python {python} ({error})"
    try:
        uv("pip", "install", "--python", made, "--no-deps", "--no-build-isolation", "--editable", ".")
        known = [word for test in KNOWN[name] for word in ("--deselect", test)]
        # old packages use what a newer Python or NumPy deprecates
        known += ["-W", "ignore::DeprecationWarning"] if name == "oldest" else []
        printed = call(made, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *known, *PART)
    except FailedError as error:
        return f"failed: {error}"
    return f"{printed.splitlines()[-1]} with {versions_of(made)}"


def versions_of(python: Path) -> str:
    """Return the versions of the dependencies that an environment has."""
    names = [Requirement(one).name for one in project()["dependencies"]]
    lines = dict(line.split("==") for line in uv("pip", "freeze", "--python", python).splitlines() if "==" in line)
    return ", ".join(f"{name} {lines[name]}" for name in names if name in lines)


@click.command(help=__doc__)
@click.argument("what", type=click.Choice(["models", "tests", "all"]), default="all")
@click.option("--python", "pythons", multiple=True, default=PYTHONS, help="A Python of the tests; may be repeated.")
def main(what: str, pythons: tuple[str, ...]) -> None:
    """Run one matrix or both."""
    if shutil.which(os.environ.get("UV", "uv")) is None:
        raise click.UsageError("make test-matrix needs uv: put it on the PATH or set UV=")
    good = [check_models()] if what != "tests" else []
    good += [check_tests(pythons)] if what != "models" else []
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
