"""Make a model again from its metadata and its plan, and compare the bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import chdir
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ... import RequantError
from ...calibration.data.sources import DataSource
from ...calibration.model.identity import fingerprint
from ...calibration.range_files.overrides import Overrides, overrides_from_json
from ...system.apart import PathLike
from ...transforms import METADATA_KEY, parse, run
from ...transforms.graphs.tensors import external_tensors
from ...transforms.int8.existing import MADE_KEY, VERSION_KEY
from ..model.files import about, check_output, load_model, side_file, staging
from ..model.metadata import (
    OPTIONS_KEY,
    Made,
    decoded,
    describe_making,
    making_of,
    plan_digest,
)
from ..model.writing import save_model
from ..options.build import ATTRIBUTES, build_options
from ..options.declared import QUANTIZE
from ..options.options import Options
from ..options.tables import check_values
from ..placement.plan_file import implementations, plan_path
from ..runtime.compiled_for import KEY as COMPILED_KEY
from ..runtime.progress import Progress, silent
from ..steps.remake import Recipe, remake
from .inspect.diff import Differences, diff_models

BLOCK = 1 << 20
SHAPING = {**Options().shaping(), **dict.fromkeys(ATTRIBUTES)}.keys()
RECORDED = tuple(row for row in QUANTIZE if row.name in SHAPING)
"""The options that metadata may hold: none names a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the user gives to make a model again.

    Attributes:
        source: The model that it was made from; None for the recorded file name, beside the model.
        data: The data that the model was made with.
        ranges: The range file or log that it was made with.
        plan: Its plan file; None for the file beside it.
    """

    source: PathLike | None = None
    data: DataSource | None = None
    ranges: PathLike | None = None
    plan: PathLike | None = None


@dataclass(frozen=True, slots=True)
class Reproduced:
    """The comparison of a model with the model that was made again.

    Attributes:
        model: Path of the model.
        source: Path of the model that both are made from.
        same: Whether the files have the same bytes.
        causes: What differs besides the model: versions, the machine, the data.
        differences: The differences of the models; None if the bytes are the same.
    """

    model: str
    source: str
    same: bool
    causes: tuple[str, ...] = ()
    differences: Differences | None = field(default=None)

    @property
    def verdict(self) -> str:
        """The result in one line."""
        if self.same:
            return f"same bytes: {self.model}"
        found = () if self.differences is None else self.differences.found
        kinds = dict.fromkeys(each.kind for each in found)
        counts = [f"{kind} {sum(each.kind == kind for each in found)}" for kind in kinds]
        what = f"{len(found)} differences ({', '.join(counts)})" if found else "only the encoding of the file"
        return f"different: {'; '.join((what, *self.causes))}"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "model": self.model,
            "source": self.source,
            "same": self.same,
            "verdict": self.verdict,
            "causes": list(self.causes),
            "differences": [] if self.differences is None else [each.to_json() for each in self.differences.found],
        }


def reproduce_model(
    model: PathLike,
    inputs: Inputs | None = None,
    *,
    output: PathLike | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Reproduced:
    """Make a model again that `quantize_model`, `search_model` or `requant transform` wrote, and compare the bytes.

    Options come from the model's metadata and the placement from its plan, so that nothing is timed. The remade model
    gets the recorded versions and machine, which are no part of the computation; if they differ here, a cause says so.

    Args:
        model: The model.
        inputs: What it was made from.
        output: Where to write the remade model; None to keep nothing.
        force: Whether to overwrite an existing output.
        progress: Called with each stage.

    Raises:
        RequantError: The metadata are missing or damaged, an input is missing or is not the one that the model was made
            from, or the model cannot be made.
    """
    inputs = inputs or Inputs()
    written = load_model(model, in_place=True)
    if output is not None:
        check_output(output, model, force=force)
    if COMPILED_KEY in written.metadata_props:
        raise RequantError(
            f"{os.fspath(model)}: compiled for one machine; reproduce the model that it was compiled from"
        )
    quantized = MADE_KEY in written.metadata_props
    again = _Quantized.of(model, written, inputs) if quantized else _Transformed.of(model, written, inputs)
    if output is not None:
        check_output(output, again.source, force=force)
    with staging(output) as folder:
        made, causes = again.make(folder, progress)
        # an empty side file has no tensors
        external = side_file(model).is_file() or any(True for _ in external_tensors(written))
        copy = folder / "again" / Path(model).name  # the name of external data is a part of the bytes
        copy.parent.mkdir()
        save_model(made, copy, external=external)
        same = same_bytes(Path(model), copy) and same_bytes(side_file(model), side_file(copy))
        differences = None if same else diff_models(model, copy)
        if output is not None:
            save_model(made, output, external=external)
    return Reproduced(os.fspath(model), os.fspath(again.source), same, () if same else causes, differences)


def same_bytes(one: Path, other: Path) -> bool:
    """Return whether two files have the same bytes, or neither exists."""
    if not (one.is_file() and other.is_file()):
        return not one.is_file() and not other.is_file()
    if one.stat().st_size != other.stat().st_size:
        return False
    with open(one, "rb") as first, open(other, "rb") as second:
        while block := first.read(BLOCK):
            if block != second.read(BLOCK):
                return False
    return True


# ------------------------------------------------------------------------------------------------ requant quantize


@dataclass(frozen=True, slots=True)
class _Quantized:
    """A model of `requant quantize`, with all that is needed to make it again."""

    version: str
    source: Path
    made: Made
    options: Options
    data: DataSource | None
    plan: Path

    @classmethod
    def of(cls, path: PathLike, model: ir.Model, inputs: Inputs) -> _Quantized:
        """Read the metadata, and check the inputs against them.

        Raises:
            RequantError: The metadata are damaged, or an input is missing or another one.
        """
        made = making_of(path, model.metadata_props)
        given = {"data": inputs.data, "ranges": inputs.ranges}
        for name, value in given.items():
            if (value is not None) != (name in made.inputs):
                wrong = f"was made with --{name}; give it" if value is None else f"was made without --{name}"
                raise RequantError(f"{os.fspath(path)}: {wrong}")
        source = _beside(path, made.source) if inputs.source is None else Path(inputs.source)
        if fingerprint(load_model(source)) != made.model:
            raise RequantError(f"{source}: another model than {os.fspath(path)} was made from; give --model FLOAT")
        plan = plan_path(path) if inputs.plan is None else Path(inputs.plan)
        if made.written == "int8" and plan_digest(implementations(plan)) != made.plan:
            raise RequantError(f"{plan}: {os.fspath(path)} was made with another plan; give --plan FILE")
        options = _options(path, model.metadata_props, made)
        options = replace(options, ranges=inputs.ranges, plan=plan if made.own_plan else None)
        return cls(model.metadata_props.get(VERSION_KEY, ""), source, made, options, inputs.data, plan)

    def make(self, folder: Path, progress: Progress) -> tuple[ir.Model, tuple[str, ...]]:
        """Return the remade model, and what differs besides the model."""
        made = self.made
        recipe = Recipe(self.plan, made.written, made.exact)
        model = remake(self.source, self.data, self.options, recipe, folder, progress)
        again = making_of("the remade model", model.metadata_props)
        causes = tuple(_causes(made, again, self.version, model.metadata_props[VERSION_KEY]))
        labelled = replace(again, source=made.source, native=made.native, environment=made.environment)
        describe_making(model, labelled)
        model.metadata_props[VERSION_KEY] = self.version
        return model, causes


def _causes(made: Made, again: Made, version: str, here: str) -> Iterator[str]:
    """Yield what differs between the two runs: versions, the machine, the data."""
    before, now = made.environment, again.environment
    versions = {"requant": (version, here)} | {
        name: (before.versions.get(name, "none"), now.versions[name]) for name in now.versions
    }
    for name, (one, two) in versions.items():
        if one != two:
            yield f"made with {name} {one}, here {two}"
    if (before.machine, before.cpu) != (now.machine, now.cpu):
        yield f"made on {before.machine} ({' '.join(before.cpu)}), here {now.machine} ({' '.join(now.cpu)})"
    if made.native != again.native:
        yield "native operators were " + ("here and are not" if made.native else "not here and are now")
    if made.data != again.data:
        yield "the data that give the ranges are others"


def _beside(path: PathLike, name: str) -> Path:
    """Return the path of a recorded file beside a model.

    Raises:
        RequantError: The recorded name is no bare file name, or there is no such file.
    """
    bare = bool(name) and name not in (os.curdir, os.pardir) and Path(name).name == name and "\0" not in name
    found = Path(path).parent / name if bare else None
    if found is None or not found.is_file():
        beside = f"no {name!r} beside it" if bare else "the recorded name is no file name"
        raise RequantError(f"{os.fspath(path)}: {beside}; give --model FLOAT")
    return found


def _options(path: PathLike, props: Mapping[str, str], made: Made) -> Options:
    """Return the recorded options, read like those of a ``requant.toml``.

    Raises:
        RequantError: An option is unknown, of a wrong type, or out of range.
    """
    place = f"{os.fspath(path)}: damaged metadata {OPTIONS_KEY!r}"
    asked = decoded(path, props, OPTIONS_KEY)
    if not isinstance(asked, dict):
        raise RequantError(f"{place}: an object is expected")
    try:
        overrides = overrides_from_json(_table(asked.pop("overrides", {})))
        values = check_values("", _values(asked), RECORDED)
        options = build_options({row.name: row.read(values[row.name]) for row in RECORDED if row.name in values})
        return replace(options, calibration=made.calibration, overrides=Overrides(overrides) if overrides else None)
    except RequantError as error:
        raise RequantError(f"{place}: {error}") from error


def _values(asked: dict[str, Any]) -> dict[str, Any]:
    """Return recorded options by the names of declared options."""
    names = {attribute: name for name, attribute in ATTRIBUTES.items()}
    overall, by_node = asked.pop("strategy", None), _table(asked.pop("strategies", {}))
    strategies = [*([] if overall is None else [overall]), *(f"{node}={form}" for node, form in by_node.items())]
    asked.pop("calibration", None)  # the rule of a range file, too
    if asked.get("samples", 1) is None:
        del asked["samples"]
    values = {names.get(name, name): value for name, value in asked.items()}
    return {**values, "strategy": strategies} if strategies else values


def _table(value: Any) -> dict[str, Any]:
    """Return an object.

    Raises:
        RequantError: The value is none.
    """
    if not isinstance(value, dict):
        raise RequantError("an object is expected")
    return value


# ----------------------------------------------------------------------------------------------- requant transform


_NOT_QUANTIZED = f"no {MADE_KEY!r} in its metadata, so only 'requant transform' can be repeated"


@dataclass(frozen=True, slots=True)
class _Transformed:
    """A model of `requant transform`, with the pipeline that made it."""

    source: Path
    folder: Path
    pipeline: str

    @classmethod
    def of(cls, path: PathLike, model: ir.Model, inputs: Inputs) -> _Transformed:
        """Read the pipeline, and check the inputs.

        Raises:
            RequantError: There is no pipeline or no source, or an input would not be used.
        """
        recorded = model.metadata_props.get(METADATA_KEY, "")
        if not recorded:
            raise RequantError(f"{os.fspath(path)}: no {MADE_KEY!r} in its metadata: requant did not write it")
        idle = [name for name in ("data", "ranges", "plan") if getattr(inputs, name) is not None]
        if idle:
            raise RequantError(f"{os.fspath(path)}: {_NOT_QUANTIZED}: --{idle[0]} would do nothing")
        if inputs.source is None:
            raise RequantError(f"{os.fspath(path)}: {_NOT_QUANTIZED}: give --model IN, its input")
        before = load_model(inputs.source, in_place=True).metadata_props.get(METADATA_KEY, "")
        if not recorded.startswith(before):
            raise RequantError(f"{os.fspath(inputs.source)}: not the input of {os.fspath(path)}: another pipeline")
        return cls(Path(inputs.source), Path(path).parent, recorded.removeprefix(before).strip())

    def make(self, folder: Path, progress: Progress) -> tuple[ir.Model, tuple[str, ...]]:
        """Return the remade model; files that the pipeline names are looked for beside the model."""
        steps = parse(self.pipeline)
        for step in steps.steps:
            for name, value in step.options:
                if name.endswith("_file"):
                    _beside(self.folder / "its pipeline", str(value))
        source = self.source.absolute()
        with chdir(self.folder), about(source):
            return run(steps, load_model(source, in_place=True)).model, ()
