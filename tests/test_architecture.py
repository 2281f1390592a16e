"""Rules for the source: which part may import which part, and the length of functions. No code is run."""

import ast
import itertools
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("system", "transforms", "calibration", "quantize")
SOURCES = sorted([*ROOT.glob("*.py"), *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))])

# The parts of the project that each part may import; "" is the root package with the errors. It imports others only for
# type checkers; `test_importing_the_root_loads_no_library` watches over the rest.
KNOWS = {
    "": {"", "calibration", "quantize"},
    "system": {"", "system"},
    "transforms": {"", "system", "transforms"},
    "calibration": {"", "system", "calibration"},
    "quantize": {"", "system", "quantize", "transforms", "calibration"},
    "cli": {"", "__main__", "quantize"},
    "__main__": {"", "system", "cli"},
}

# The rooms of each package, from the ground up: a file or a folder directly in it, and the folders of quantize/tools/. A
# room may import the rooms that its row names, and all that these may import. The transforms are one room, "*".
ROOMS = {
    "calibration": {
        "execution": "",
        "model": "",
        "data": "execution model",
        "statistics": "model",
        "rules": "statistics",
        "range_files": "rules",
        "runs": "data range_files",
        "checks": "runs",
        "calibrator": "checks",
    },
    "transforms": {
        "registry": "",
        "graphs": "registry",
        "patterns": "graphs",
        "int8": "patterns",
        "pipelines": "int8",
        "parts": "int8",
        "*": "parts pipelines",
    },
    "quantize": {
        "runtime": "",
        "options": "",
        "model": "runtime",
        "accuracy": "model",
        "job": "accuracy options",
        "result": "job",
        "gate": "accuracy options",
        "kernels": "",
        "placement": "job",
        "corrections": "placement",
        "sensitivity": "placement",
        "steps": "corrections sensitivity result kernels",
        "tools.bench": "accuracy kernels",
        "tools.explain": "model",
        "tools.inspect": "model",
        "tools": "steps tools.inspect",
        "report": "steps",
        "api": "steps",
        "console": "tools tools.bench tools.explain tools.inspect gate result placement",
        "project": "gate api report",
        "commands": "console project",
    },
}
MOST_ROOMS, MOST_FLOORS = 21, 10
# Two libraries that only one room may import.
HOMES = {"click": ("cli.py", "quantize/commands/"), "rich": ("quantize/console/",)}
# Libraries that a part must not import: transforms use no runtime, and only cli.py uses click.
FOREIGN = {
    "": {"click", "google", "numpy", "onnx", "onnx_ir", "onnxruntime", "rich"},
    "system": {"click", "google", "msgspec", "numpy", "onnx", "onnx_ir", "onnxruntime", "rich"},
    "transforms": {"onnxruntime"},
    "calibration": set[str](),
    "quantize": set[str](),
    "cli": set[str](),
    "__main__": {"click"},
}
IMPORT_NAMES = {"onnx-ir": "onnx_ir", "pillow": "PIL", "protobuf": "google"}

LINES_P95, MOST_LINES, FILE_LINES = 40, 80, 500
PARAMETERS = 7
DOOR_LINES = 100  # of cli.py


def part(path: Path) -> str:
    """Return the key of `KNOWS` for a source file: its package, ``"cli"``, or ``""`` for the root."""
    first = path.relative_to(ROOT).parts[0]
    return first if first in PACKAGES else first.removesuffix(".py").replace("__init__", "")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file."""
    return tuple(ast.walk(tree(path)))


@cache
def imports_of(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Return the import statements of a file."""
    return tuple(node for node in nodes_of(path) if isinstance(node, ast.Import | ast.ImportFrom))


def imported(node: ast.AST, path: Path) -> list[str]:
    """Return the absolute dotted names that an import statement imports; [] for any other node.

    ``from .graph import chains`` in ``transforms/fold_bn.py`` gives ``requant.transforms.graphs.queries.chains``.
    """
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    package = ["requant", *path.relative_to(ROOT).parent.parts]
    base = package[: len(package) + 1 - node.level] if node.level else []
    return [".".join([*base, *([node.module] if node.module else []), alias.name]) for alias in node.names]


def place(path: Path, line: int = 0) -> str:
    """Return where something is: ``"quantize/job.py"``, or ``"quantize/job.py:12"``."""
    return path.relative_to(ROOT).as_posix() + (f":{line}" if line else "")


@cache
def all_imports(path: Path) -> list[tuple[int, str]]:
    return [(node.lineno, name) for node in imports_of(path) for name in imported(node, path)]


def at_import_time(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when the module is imported: not function bodies, not TYPE_CHECKING blocks."""
    for node in nodes:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from at_import_time(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from at_import_time(getattr(node, field, []))


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function of the project with its place, ``"cli.py:12 main"``."""
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def has_options(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the parameters are options of users: of a click command or of a registered transform."""

    def name(call: ast.expr) -> str:
        function = call.func if isinstance(call, ast.Call) else call
        return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")

    return any(name(decorator) in ("command", "transform") for decorator in node.decorator_list)


def test_every_package_has_sources() -> None:
    assert {part(path) for path in SOURCES} == set(KNOWS)
    for package in PACKAGES:
        assert len(list((ROOT / package).glob("*.py"))) > 1, f"{package} has no modules: the rules below check nothing"


def test_imports_go_one_way() -> None:
    wrong = []
    for path, (line, name) in every_import():
        top, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if top == "requant" and (target if target in KNOWS else "") not in KNOWS[part(path)]:
            wrong.append(f"{place(path, line)}: {part(path) or 'the root'} may not import requant.{target}")
    assert wrong == []


def every_import() -> Iterator[tuple[Path, tuple[int, str]]]:
    """Yield every file with each line and dotted name that it imports."""
    for path in SOURCES:
        for found in all_imports(path):
            yield path, found


def test_libraries_stay_where_they_belong() -> None:
    wrong = []
    for path, (line, name) in every_import():
        library = name.split(".")[0]
        if library in FOREIGN[part(path)] or (library in HOMES and not place(path).startswith(HOMES[library])):
            wrong.append(f"{place(path, line)}: {library}")
    assert wrong == []


def test_every_imported_library_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    names = [entry.split(">=")[0] for entry in declared]
    known = {IMPORT_NAMES.get(name, name) for name in names} | {"requant"} | sys.stdlib_module_names
    assert [
        f"{place(path, line)}: {name}" for path, (line, name) in every_import() if name.split(".")[0] not in known
    ] == []


def test_packages_import_relatively_and_the_command_line_absolutely() -> None:
    # A relative import works with any name of the checkout folder; cli.py also runs as a script.
    wrong = []
    for path, node in ((source, node) for source in SOURCES for node in imports_of(source)):
        relative = isinstance(node, ast.ImportFrom) and node.level > 0
        ours = any(name.split(".")[0] == "requant" for name in imported(node, path))
        packaged = part(path) in PACKAGES
        if relative != packaged and (relative or ours):
            wrong.append(f"{place(path, node.lineno)}: import {'relatively' if packaged else 'absolutely'}")
    assert wrong == []


def test_the_command_line_imports_heavy_modules_only_inside_functions() -> None:
    path = ROOT / "cli.py"
    found = {name for node in at_import_time(tree(path).body) for name in imported(node, path)}
    ours = {name for name in found if name.split(".")[0] == "requant"}
    assert ours == {"requant.quantize.commands.app.Commands", "requant.__main__.run"}
    assert {name.split(".")[0] for name in found - ours} <= sys.stdlib_module_names | {"click"}


def test_the_root_imports_packages_only_for_type_checkers() -> None:
    path = ROOT / "__init__.py"
    assert {name.split(".")[0] for node in at_import_time(tree(path).body) for name in imported(node, path)} <= {
        *sys.stdlib_module_names
    }


def test_modules_of_transforms_import_each_other_without_circles() -> None:
    folder = ROOT / "transforms"
    paths = (path for path in folder.rglob("*.py") if path.stem != "__init__")
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    graph = {
        name: {other for _, seen in all_imports(path) for other in modules if seen.startswith(f"requant.{other}.")}
        for name, path in modules.items()
    }
    assert any(graph.values())
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError


def test_functions_are_short() -> None:
    lengths = sorted((node.end_lineno - node.lineno + 1, place) for place, node in functions() if node.end_lineno)
    length, _ = lengths[int(0.95 * len(lengths))]
    assert length <= LINES_P95, "\n".join(f"{n:4} {place}" for n, place in lengths[-len(lengths) // 20 - 1 :])
    assert [row for row in lengths if row[0] > MOST_LINES] == []


def test_files_are_short() -> None:
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name: n for name, n in lines.items() if n > FILE_LINES} == {}
    assert lines["cli.py"] < DOOR_LINES


def test_signatures_are_short() -> None:
    def count(arguments: ast.arguments) -> int:
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return len([*named, *filter(None, [arguments.vararg, arguments.kwarg])])

    counts = {place: count(node.args) for place, node in functions() if not has_options(node)}
    assert {place: n for place, n in counts.items() if n > PARAMETERS} == {}


# ------------------------------------------------------------------------------------------------------------- rooms


def room(package: str, module: str) -> str:
    """Return the room of a dotted name in a package: ``tools.bench.bench`` of quantize is in ``tools.bench``."""
    first, _, rest = module.partition(".")
    inner = rest.partition(".")[0]
    if first == "tools" and inner and (ROOT / package / first / inner).is_dir():
        return f"{first}.{inner}"
    return first if first in ROOMS[package] or "*" not in ROOMS[package] else "*"


@cache
def modules_of(package: str) -> dict[Path, str]:
    """Return the dotted name in a package of each of its files, without the names that the package exports again."""
    paths = (path for path in (ROOT / package).rglob("*.py") if path != ROOT / package / "__init__.py")
    return {
        path: ".".join(path.relative_to(ROOT / package).with_suffix("").parts).removesuffix(".__init__")
        for path in paths
    }


@cache
def arrows(package: str) -> set[tuple[str, str]]:
    """Return the imports between rooms, including imports inside functions and for type checkers."""
    names = {module.partition(".")[0] for module in modules_of(package).values()}
    found = set()
    for path, module in modules_of(package).items():
        for _, name in all_imports(path):
            parts = name.split(".")
            if parts[:2] == ["requant", package] and parts[2] in names:
                found.add((room(package, module), room(package, ".".join(parts[2:]))))
    return {(one, other) for one, other in found if one != other}


def below(package: str, name: str) -> set[str]:
    """Return the rooms that a room may import."""
    return {inner for each in ROOMS[package][name].split() for inner in (each, *below(package, each))}


@pytest.mark.parametrize("package", ROOMS)
def test_the_rooms_are_those_of_the_table(package: str) -> None:
    assert {room(package, module) for module in modules_of(package).values()} == set(ROOMS[package])
    assert len(ROOMS[package]) <= MOST_ROOMS


@pytest.mark.parametrize("package", ROOMS)
def test_the_picture_in_contributing_shows_every_room(package: str) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    picture = text.partition(f"### The rooms of {package}/")[2].split("```")[1].split()
    assert [name for name in ROOMS[package] if name.replace(".", "/") not in picture] == []


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_imports_only_what_stands_below_it(package: str) -> None:
    assert arrows(package)
    assert {(one, other) for one, other in arrows(package) if other not in below(package, one)} == set()


@pytest.mark.parametrize("package", ROOMS)
def test_the_house_has_few_floors_and_no_circle(package: str) -> None:
    under = {name: {other for one, other in arrows(package) if one == name} for name in ROOMS[package]}

    def floor(name: str, above: tuple[str, ...] = ()) -> int:
        assert name not in above, f"a circle: {' -> '.join((*above, name))}"
        return 1 + max((floor(other, (*above, name)) for other in under[name]), default=0)

    assert max(floor(name) for name in ROOMS[package]) <= MOST_FLOORS


MODULES = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES}


def modules_imported(path: Path, names: set[str]) -> set[str]:
    """Return the modules of the project that a file imports when it is imported."""
    nodes = at_import_time(tree(path).body)
    asked = {name.removeprefix("requant.") for node in nodes for name in imported(node, path)}
    return {name if name in names else name.rpartition(".")[0] for name in asked} & names


@pytest.mark.parametrize("package", PACKAGES)
def test_no_files_import_each_other_in_a_circle(package: str) -> None:
    names = {MODULES[path] for path in SOURCES if MODULES[path].startswith(f"{package}.")}
    under = {MODULES[path]: modules_imported(path, names) for path in SOURCES if MODULES[path] in names}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"a circle: {' -> '.join((*above, name))}"
        if name not in done:
            for other in under[name] - {name}:
                visit(other, (*above, name))
            done.add(name)

    for name in names:
        visit(name, ())


# ---------------------------------------------------------------------------------------------------------- what prints

PRINTERS = {
    "click.echo": "quantize/commands/printing.py",
    "click.secho": "",
    "print": "system/supervisor.py",
    "traceback.print_exc": "",
    "traceback.print_exception": "",
    "sys.stdout.write": "",
    "sys.stderr.write": "",
    "Console": "",
    "Text": "quantize/console/terminal.py",
    "Text.from_markup": "",
    "Text.from_ansi": "",
    "Text.assemble": "quantize/console/terminal.py",
    "Progress": "quantize/console/progress.py",
    "escape": "",
}
"""Calls that write text to a terminal as it is, and the one file that may make them: it makes foreign text printable."""


def test_foreign_text_goes_through_the_one_place_that_makes_it_printable() -> None:
    wrong = []
    for path, node in ((source, node) for source in SOURCES for node in nodes_of(source)):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name in PRINTERS and place(path) != PRINTERS[name]:
            wrong.append(f"{place(path, node.lineno)}: {name}")  # type: ignore[attr-defined]
    assert wrong == []


FLAGS_ALONE = (
    "cli.py",
    "quantize/commands",
    "quantize/project",
    "quantize/options/build.py",
    "quantize/kernels/build.py",
)
"""Modules whose errors only the command line and requant.toml can raise."""


def test_errors_of_the_python_api_name_options_as_python_does() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        if not str(path.relative_to(ROOT)).startswith((*FLAGS_ALONE, "quantize/tools/reproduce.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
        and re.search(r"[\s'\"]--[a-z]", ast.unparse(node))
        and "requant quantize" not in ast.unparse(node)
        and "in Python" not in ast.unparse(node)
    ]
    assert found == []


def test_rich_prints_by_the_console_of_the_project_alone() -> None:
    names = {(place(path), name) for path, (_, name) in every_import() if name.startswith("rich.")}
    free = ("rich.table.", "rich.progress.")  # the terminal prints them
    assert {path for path, name in names if not name.startswith(free)} == {"quantize/console/terminal.py"}
