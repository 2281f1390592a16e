"""The wheel contains the files of the tree, imports are fast, and the locks agree with the project file."""

import ast
import dataclasses
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from datetime import date
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import requant
from requant.calibration import DataSpec, Execution
from requant.quantize import Options, Scheme, Selection, TransformOptions

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = ("calibration", "system", "quantize", "transforms")
PUBLIC = [f"requant.{folder}" for folder in FOLDERS if folder != "system"]
LOCKS = ("run", "dev", "docs", "release")

each_lock = pytest.mark.parametrize("lock", LOCKS)


def folders_with_source() -> list[Path]:
    """Return every folder of the import package with Python files; the root comes first."""
    found = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    return [ROOT, *sorted(found)]


def dotted(folder: Path) -> str:
    return ".".join(["requant", *folder.relative_to(ROOT).parts])


def run(*arguments: str, cwd: Path) -> str:
    """Run this interpreter in a new process outside of the checkout; return its standard output."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}  # pip uses what is deprecated
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False, env=own)
    assert done.returncode == 0, done.stderr
    return done.stdout


def libraries_loaded_by(code: str, cwd: Path) -> set[str]:
    """Return the top-level names of the third-party libraries that `code` imports."""
    report = "import json; print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    out = run("-c", f"import sys; before = set(sys.modules)\n{code}\n{report}", cwd=cwd)
    return set(json.loads(out.splitlines()[-1])) - sys.stdlib_module_names - {"requant"}


def locked(lock: str) -> dict[str, str]:
    """Return the pinned versions of a lock file, by canonical name."""
    text = (ROOT / "requirements" / f"{lock}.txt").read_text(encoding="utf-8")
    return {
        canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)
    }


def test_every_package_is_listed() -> None:
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(map(dotted, folders_with_source()))


def test_every_package_has_an_init_file() -> None:
    assert [folder for folder in folders_with_source() if not (folder / "__init__.py").is_file()] == []


def test_only_the_package_lives_at_the_root() -> None:
    # setuptools installs every module next to the root __init__.py, also a conftest.py or noxfile.py.
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "cli.py"}


def test_every_data_file_is_declared() -> None:
    declared = PROJECT["tool"]["setuptools"]["package-data"]
    data = [ROOT / "py.typed"]
    data += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    for path in data:
        if path.suffix not in {".py", ".pyc", ".so"}:  # a library is built for one machine
            package = next(folder for folder in path.parents if (folder / "__init__.py").is_file())
            name = path.relative_to(package).as_posix()
            assert any(fnmatch(name, pattern) for pattern in declared.get(dotted(package), [])), path


@pytest.mark.skipif((ROOT / "PKG-INFO").exists(), reason="a source distribution has no links for type checkers")
def test_type_checkers_see_the_whole_package() -> None:
    links = {path.name: path for path in (ROOT / ".import" / "requant").iterdir()}
    assert set(links) == {"__init__.py", "__main__.py", "cli.py", "py.typed", *FOLDERS}
    for name, link in links.items():
        # In a clone without symbolic links, the file contains the target as text.
        assert (os.readlink(link) if link.is_symlink() else link.read_text()) == f"../../{name}"


def test_importing_the_root_loads_no_library(tmp_path: Path) -> None:
    code = "import requant, requant.quantize; assert {'Options', 'quantize_model'} <= set(dir(requant))"
    assert libraries_loaded_by(code, tmp_path) == set()


def test_the_root_gives_the_names_of_its_packages() -> None:
    assert {name for names in requant.HOMES.values() for name in names} <= set(requant.__all__)
    for package, names in requant.HOMES.items():
        module = importlib.import_module(f"requant.{package}")
        assert [name for name in names if getattr(requant, name) is not getattr(module, name)] == []
    assert requant.__version__ == PROJECT["project"]["version"]
    with pytest.raises(AttributeError, match="no attribute 'quantise_model'"):
        requant.quantise_model  # noqa: B018


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_command_line_starts_with_click_alone(tmp_path: Path, option: str) -> None:
    code = f"sys.argv = ['requant', '{option}']\nfrom requant.cli import main\ntry: main()\nexcept SystemExit: pass"
    assert libraries_loaded_by(code, tmp_path) <= {"click", "colorama"}


def test_the_help_of_every_command_needs_click_alone(tmp_path: Path) -> None:
    code = """import click, io, contextlib
from requant.cli import main
names = main.list_commands(click.Context(main))
for name in names:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try: main([name, "--help"])
        except SystemExit: pass
    assert "Usage:" in out.getvalue()
assert len(names) > 10"""
    assert libraries_loaded_by(code, tmp_path) <= {"click", "colorama"}


def test_the_version_is_one(tmp_path: Path) -> None:
    version = PROJECT["project"]["version"]
    assert metadata.version("requant") == version
    assert version in run("-m", "requant.cli", "--version", cwd=tmp_path).split()


def test_the_changelog_dates_the_version() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    versions = [re.fullmatch(r"([\d.]+) - (\d{4}-\d\d-\d\d)", heading) for heading in headings[1:]]
    assert all(versions)
    dated = {found[1]: date.fromisoformat(found[2]) for found in versions if found is not None}
    assert next(iter(dated)) == PROJECT["project"]["version"]
    assert sorted(dated.values(), reverse=True) == [*dated.values()]


def test_the_script_is_installed() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="requant")
    assert callable(script.load())


@pytest.mark.parametrize("name", PUBLIC)
def test_all_is_complete_and_importable(name: str) -> None:
    package = importlib.import_module(name)
    exported = package.__all__
    assert len(exported) == len(set(exported))
    assert [entry for entry in exported if not hasattr(package, entry)] == []
    source = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    bound = {
        alias.asname or alias.name
        for node in source.body
        if isinstance(node, ast.ImportFrom) and node.level and node.module
        for alias in node.names
    }
    assert {entry for entry in bound if not entry.startswith("_")} <= set(exported)


@pytest.mark.parametrize("options", [Options, Selection, Scheme, Execution, DataSpec, TransformOptions])
def test_the_docstring_of_options_describes_each(options: Any) -> None:
    _, _, attributes = (options.__doc__ or "").partition("Attributes:")
    described = re.findall(r"^\s+(\w+): \S", attributes, flags=re.MULTILINE)
    assert [field.name for field in dataclasses.fields(options) if field.name not in described] == []


def test_importing_the_package_registers_every_transform(tmp_path: Path) -> None:
    written = {
        str(decorator.args[0].value)
        for path in (ROOT / "transforms").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "transform"
        if isinstance(decorator.args[0], ast.Constant)
    }
    code = (
        "import json; import requant.transforms; from requant.transforms.registry import REGISTRY\n"
        "from requant.transforms.tensorflow_names import NAMES; print(json.dumps([list(REGISTRY), list(NAMES)]))"
    )
    registered, rows = json.loads(run("-c", code, cwd=tmp_path))
    assert written
    assert rows
    assert set(registered) == written | set(rows)


@each_lock
def test_a_lock_names_no_place_and_hashes_everything(lock: str) -> None:
    text = (ROOT / "requirements" / f"{lock}.txt").read_text(encoding="utf-8")
    assert not re.search(r"://|index-url|find-links|trusted-host", text)
    entries = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(locked(lock)) > 0
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_the_development_lock_extends_the_run_time_lock() -> None:
    assert locked("run").items() <= locked("dev").items()


@pytest.mark.parametrize(
    ("lock", "requirements"),
    [
        ("run", PROJECT["project"]["dependencies"]),
        ("run", PROJECT["build-system"]["requires"]),
        ("dev", PROJECT["dependency-groups"]["dev"]),
        ("docs", PROJECT["dependency-groups"]["docs"]),
        ("release", PROJECT["dependency-groups"]["release"]),
    ],
    ids=["dependencies", "build", "dev", "docs", "release"],
)
def test_what_the_project_asks_for_is_locked(lock: str, requirements: list[str]) -> None:
    versions = locked(lock)
    for requirement in map(Requirement, requirements):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)])


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    # Build in a copy: setuptools leaves build/ and *.egg-info in the folder.
    copy = tmp_path / "odd name.v2"
    skip = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=skip)
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(tmp_path)]
    run("-m", "pip", "wheel", *options, str(copy), cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = [path for folder in folders_with_source() for path in folder.glob("*.py")]
    data = [path for path in map(Path, _declared_data()) if path.is_file()]
    assert held == {f"requant/{path.relative_to(ROOT).as_posix()}" for path in [*sources, *data]}


@pytest.mark.slow
def test_the_source_distribution_holds_every_file(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    own = {".venv", ".git", ".import", "build", "dist"}  # the links are for checkers in a clone
    skip = shutil.ignore_patterns(*own, "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", ".coverage*", "*.so")
    shutil.copytree(ROOT, copy, ignore=skip)
    run("-c", f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})", cwd=copy)
    (archive,) = tmp_path.glob("requant-*.tar.gz")
    with tarfile.open(archive) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    ours = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    ours = {name for name in ours if "requant.egg-info/" not in name}
    assert ours - held == set()


def _declared_data() -> list[str]:
    """Return the paths of the files that the project file declares as package data."""
    declared = PROJECT["tool"]["setuptools"]["package-data"]
    folders = {package: ROOT.joinpath(*package.split(".")[1:]) for package in declared}
    return [str(path) for package, patterns in declared.items() for p in patterns for path in folders[package].glob(p)]
