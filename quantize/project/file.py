"""Read ``requant.toml``. Its keys are the `declared` options of `requant quantize` and `requant check`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ... import RequantError
from ...calibration.range_files.decoding import load_toml
from ...system.given import check_path
from ..gate.lock import check_writable
from ..options.declared import BASELINE, CHECK, QUANTIZE
from ..options.option import Kind, Option
from ..options.tables import check_values

NAME = "requant.toml"
TOP: tuple[Option, ...] = (
    Option("model", Kind.TEXT, "The float model.", sample="model.onnx"),
    Option("output", Kind.TEXT, "The INT8 model.", sample="model_int8.onnx"),
    Option("quantize", Kind.TABLE, "How the model is quantized. Without this table the INT8 model exists already."),
    Option("check", Kind.TABLE, "How the INT8 model is checked."),
)
TABLES: Mapping[str, tuple[Option, ...]] = {"quantize": QUANTIZE, "check": CHECK}
PATHS = ("float", "model", "baseline", "junit", "markdown", "data", "labels", "tokenizer")
"""Options of `requant check` with a path."""
SOURCES = ("data", "tokenizer")
"""The options of `PATHS` with a value that may be ``FILE:PART``, or not a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A float model, the options to quantize it, and the options to check the result.

    Attributes:
        path: The file of the project; None if the command line gives everything.
        model: Path of the float model.
        output: Path of the INT8 model.
        quantize: The table ``[quantize]``; None if the INT8 model exists already.
        check: The table ``[check]``.
        beside: The keys of ``[check]`` whose values are not from the file, but from the command line.
    """

    path: Path | None
    model: str
    output: str
    quantize: Mapping[str, Any] | None = None
    check: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder that relative paths start from."""
        return Path() if self.path is None else self.path.parent

    @property
    def baseline(self) -> str:
        """Path of the lock file."""
        return str(self.check.get("baseline", BASELINE))

    def file(self, name: str) -> Path | None:
        """Return the path of an output from a key of ``[check]``; None without this key."""
        return self.folder / self.check[name] if name in self.check else None

    def overridden(self, values: Mapping[str, Any]) -> Project:
        """Return the project with values of the command line, which replace values of the file.

        Args:
            values: By key of ``[check]``; and ``float`` and ``model``, the paths of the two models. Paths are relative
                to the current folder.
        """
        own = {name: self._from_here(name, value) for name, value in values.items()}
        check = {**self.check, **{name: value for name, value in own.items() if name not in ("float", "model")}}
        if "tolerance" in values:
            check["tolerance"] = {**self.check.get("tolerance", {}), **values["tolerance"]}
        check_values("check", check, CHECK)
        paths = {"model": own.get("float", self.model), "output": own.get("model", self.output)}
        return replace(self, **paths, check=check, beside=tuple(sorted(values.keys() & check.keys())))

    @contextmanager
    def naming(self, table: str) -> Iterator[None]:
        """Name the file and a table of it in an error of the block; nothing, if there is no file."""
        try:
            yield
        except RequantError as error:
            if self.path is None:
                raise
            beside = f" (given beside it: {', '.join(self.beside)})" if self.beside and table == "check" else ""
            raise RequantError(f"{self.path}: [{table}]{beside}: {error}") from error

    def _from_here(self, name: str, value: Any) -> Any:
        """Return a value with its path changed from the current folder to the folder of the project."""
        if self.path is None or name not in PATHS:
            return value
        file = value if os.path.exists(value) or name not in SOURCES else value.rpartition(":")[0]
        is_path = name not in SOURCES or os.path.exists(file)
        return os.path.abspath(file) + value[len(file) :] if file and is_path else value


def load_project(path: str | os.PathLike[str]) -> Project:
    """Read a project.

    Raises:
        RequantError: The file is missing, is not TOML, lacks a key, or has a key that is unknown or of a wrong type.
    """
    name = os.fspath(path)
    if not os.path.lexists(path):
        raise RequantError(f"{name}: cannot be read: No such file or directory; 'requant init MODEL' writes one")
    document = load_toml(path)
    try:
        return parse_project(Path(path), document)
    except RequantError as error:
        raise RequantError(f"{name}: {error}") from error


def requested_project(path: str | os.PathLike[str] | None, values: Mapping[str, Any]) -> Project:
    """Return the project of a file and a command line.

    Args:
        path: The file; None without one.
        values: The values of the command line, see `Project.overridden`.

    Raises:
        RequantError: The file cannot be read, there is neither a file nor a pair of models, or an output cannot be
            written.
    """
    if path is None:
        missing = next((name for name in ("float", "model", "data") if name not in values), None)
        if missing is not None:
            raise RequantError(f"give a {NAME}, or --float FLOAT --model INT8 --data SRC: --{missing} is missing")
    if path is not None:
        check_path(path, "the project")
    if path is not None and Path(path).suffix == ".onnx":
        raise RequantError(f"{os.fspath(path)}: a model, and no {NAME}; check a pair with --float FLOAT --model INT8")
    project = Project(path=None, model="", output="") if path is None else load_project(path)
    lists = {name: [*value] if isinstance(value, tuple) else value for name, value in values.items()}
    project = project.overridden(lists)
    check_writable(project.file("junit"), project.file("markdown"))
    return project


def parse_project(path: Path, document: Mapping[str, Any]) -> Project:
    """Return the project of a TOML document.

    Raises:
        RequantError: A key is missing, unknown or of a wrong type.
    """
    check_values("", document, TOP)
    missing = next((key for key in TOP[:2] if key.name not in document), None)
    if missing is not None:
        raise RequantError(f"no {missing.name!r}; write for instance {missing.name} = {missing.example}")
    for table, keys in TABLES.items():
        check_values(table, document.get(table, {}), keys)
    return Project(
        path=path,
        model=document["model"],
        output=document["output"],
        quantize=document.get("quantize"),
        check=document.get("check", {}),
    )
