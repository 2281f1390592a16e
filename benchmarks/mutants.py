"""Change one operator, constant or condition of the arithmetic at a time, and count how many changes the tests notice.

    python -m benchmarks.mutants [calibration/rules/ranges.py ...] [--sample 40] [--seed 0] [--jobs 2] [--survivors]

Constants of a module (upper-case names) are measured settings and no arithmetic, so they do not change.
Each mutant runs in a process of its own, against the tests of its file alone; no file is written. A mutant is killed if
a test fails or takes ten times as long. The exit code is 1 if fewer than 85 % are killed.
"""

from __future__ import annotations

import ast
import os
import random
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import click

ROOT = Path(__file__).parent.parent
LEAST = 0.85
PATIENCE, STARTED = 10, 20
"""A mutant may take this many times the CPU time of the tests, and as many more seconds."""

STATISTICS = "tests/calibration/statistics/test_statistics.py tests/calibration/range_files/test_records.py"
RULES = " ".join(f"tests/calibration/rules/test_{name}.py" for name in ("arithmetic", "expected_error", "rules"))
FINDINGS = "tests/calibration/checks/test_findings.py"
CORRECTIONS = "tests/quantize/corrections/test"
TARGETS = {
    "calibration/rules/ranges.py": f"{RULES} tests/calibration/rules/test_ranges.py {STATISTICS}",
    "calibration/rules/precision.py": f"tests/calibration/rules/test_precision.py {RULES}",
    "calibration/rules/aciq.py": RULES,
    "calibration/rules/entropy.py": RULES,
    "calibration/rules/error.py": RULES,
    "calibration/rules/excess.py": f"{RULES} {FINDINGS}",
    "calibration/rules/result.py": f"tests/calibration/rules/test_arithmetic.py {CORRECTIONS}_activation_ranges.py",
    "calibration/rules/search.py": f"tests/calibration/rules/test_search.py {RULES}",
    "calibration/statistics/histogram.py": f"tests/calibration/statistics/test_histogram.py {STATISTICS} {RULES}",
    "calibration/statistics/sums.py": f"tests/calibration/statistics/test_sums.py {STATISTICS} {FINDINGS} {RULES}",
    "calibration/statistics/exact.py": f"tests/calibration/statistics/test_exact.py {STATISTICS}",
    "calibration/statistics/extremes.py": f"{STATISTICS} {FINDINGS}",
    "calibration/statistics/observations.py": (
        f"{STATISTICS} {FINDINGS} tests/calibration/range_files/test_range_file.py"
    ),
    "transforms/int8/qparams.py": "tests/transforms/int8/test_qparams.py tests/transforms/int8/test_saturation.py",
    "transforms/round_weights.py": "tests/transforms/test_round_weights.py tests/transforms/test_golden.py",
    "transforms/int8/bias_correction.py": "tests/transforms/int8/test_insert_qdq.py",
    "transforms/int8/saturation.py": "tests/transforms/int8/test_saturation.py",
    "quantize/placement/min_cut.py": "tests/quantize/placement/test_min_cut.py",
}
"""Files of arithmetic, and the tests that concern each."""

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
CALLED = {"min": "max", "maximum": "minimum", "floor": "ceil", "rint": "floor", "any": "all", "argmin": "argmax"}
CALLED |= {other: name for name, other in CALLED.items() if name != "rint"}
"""Functions that are replaced by another one of the same arguments."""

Change = tuple[str, Callable[[], None]]


@dataclass(frozen=True)
class Mutant:
    """One change of a file: the how many-th, at which line, and what it does."""

    file: str
    index: int
    line: int
    change: str


def changes(node: ast.AST) -> Iterator[Change]:
    """Yield the changes of one node: what each does, and a function that makes it in place."""
    if isinstance(node, ast.Compare):
        for position, operator in enumerate(node.ops):
            if other := COMPARED.get(type(operator)):
                made = other()
                yield _named(operator, made), partial(node.ops.__setitem__, position, made)
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in COMPUTED:
        computed = COMPUTED[type(node.op)]()
        yield _named(node.op, computed), lambda: setattr(node, "op", computed)
    elif isinstance(node, ast.BoolOp):
        joined = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield _named(node.op, joined), lambda: setattr(node, "op", joined)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        kept = ast.UAdd() if isinstance(node.op, ast.USub) else None
        operand = node.operand if kept else ast.UnaryOp(ast.Not(), node.operand)
        yield f"no {type(node.op).__name__}", lambda: node.__dict__.update(op=kept or ast.Not(), operand=operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield f"{node.value} -> {value}", lambda: setattr(node, "value", value)
    elif isinstance(node, ast.If | ast.IfExp):
        yield "the other branch", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Attribute | ast.Name):
        field = "attr" if isinstance(node, ast.Attribute) else "id"
        if (name := getattr(node, field)) in CALLED:
            yield f"{name} -> {CALLED[name]}", lambda: setattr(node, field, CALLED[name])


def _named(before: ast.AST, after: ast.AST) -> str:
    return f"{type(before).__name__} -> {type(after).__name__}"


def computing(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree that compute.

    Annotations, decorators, declarations of types, messages and constants of a module do not compute.
    """
    if isinstance(node, ast.Raise) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
        return
    if isinstance(node, ast.Module):
        node = ast.Module([statement for statement in node.body if not _constant(statement)], node.type_ignores)
    yield node
    for field, value in ast.iter_fields(node):
        declared = field == "value" and isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation)
        if field not in ("annotation", "returns", "decorator_list", "bases") and not declared:
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, ast.AST):
                    yield from computing(inner)


def _constant(statement: ast.stmt) -> bool:
    """Whether a statement assigns to upper-case names alone."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    names = [name for target in targets for name in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return all(isinstance(name, ast.Name) and name.id.isupper() for name in names)


def all_changes(tree: ast.Module) -> list[tuple[int, Change]]:
    """Return every change of a file with its line."""
    return [(getattr(node, "lineno", 0), change) for node in computing(tree) for change in changes(node)]


def mutants(file: str) -> list[Mutant]:
    """Return every mutant of a file."""
    found = all_changes(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    return [Mutant(file, index, line, change) for index, (line, (change, _)) in enumerate(found)]


def mutated(mutant: Mutant) -> CodeType:
    """Return the code of a file with one change."""
    tree = ast.parse((ROOT / mutant.file).read_text(encoding="utf-8"))
    all_changes(tree)[mutant.index][1][1]()
    return compile(ast.fix_missing_locations(tree), str(ROOT / mutant.file), "exec")


def substitute(mutant: Mutant) -> None:
    """Let every later import of the mutant's file in this process give the mutant."""
    path, code, original = str(ROOT / mutant.file), mutated(mutant), SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        return code if os.path.samefile(loader.path, path) else original(loader, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def run_tests(tests: str, mutant: Mutant | None = None, seconds: float = 600.0) -> tuple[bool, float]:
    """Run tests in a child process, with a mutant; return whether all pass, and the CPU time in seconds."""
    process = os.fork()
    if not process:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
            if mutant is not None:
                substitute(mutant)
            code = int(_pytest(tests.split()))
        finally:
            os._exit(code)
    _, status, usage = os.wait4(process, 0)
    return status == 0, usage.ru_utime + usage.ru_stime


def _pytest(tests: Sequence[str]) -> int:
    import pytest

    with tempfile.TemporaryDirectory() as folder:
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
        quick = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", "--hypothesis-seed", "0"]
        return pytest.main([*quick, *tests], plugins=[_Quick()])


class _Quick:
    """A plugin of pytest: hypothesis does not simplify failing examples, and a busy machine fails no test."""

    def pytest_configure(self) -> None:
        from hypothesis import HealthCheck, Phase, settings

        phases, slow = (Phase.explicit, Phase.generate), (HealthCheck.too_slow,)
        settings.register_profile("mutants", phases=phases, deadline=None, suppress_health_check=slow)
        settings.load_profile("mutants")


def survivors(file: str, sample: int, seed: int, jobs: int) -> tuple[list[Mutant], int, int]:
    """Run mutants of a file; return those that no test noticed, how many ran, and how many there are."""
    tests, found = TARGETS[file], mutants(file)
    passed, seconds = run_tests(tests)
    if not passed:
        raise click.ClickException(f"the tests of {file} fail without a mutant: {tests}")
    chosen = random.Random(seed).sample(found, min(sample, len(found))) if sample else found
    limit = PATIENCE * seconds + STARTED
    with ThreadPoolExecutor(jobs) as pool:
        alive = [passed for passed, _ in pool.map(lambda each: run_tests(tests, each, limit), chosen)]
    return [mutant for mutant, lives in zip(chosen, alive, strict=True) if lives], len(chosen), len(found)


@click.command()
@click.argument("files", nargs=-1)
@click.option("--sample", default=0, help="Mutants of each file, at random; 0 for all.")
@click.option("--seed", default=0, help="Seed of the sample.")
@click.option("--jobs", default=2, help="Mutants that run at the same time.")
@click.option("--survivors", "listed", is_flag=True, help="List the mutants that no test noticed.")
def main(files: Sequence[str], sample: int, seed: int, jobs: int, listed: bool) -> None:
    """Print how many mutants of each file the tests kill."""
    if unknown := [file for file in files if file not in TARGETS]:
        raise click.UsageError(f"no tests are known for {', '.join(unknown)}; there are: {', '.join(TARGETS)}")
    import onnx_ir
    import onnxruntime  # once: each child starts with them

    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    assert onnx_ir and onnxruntime
    killed = ran = 0
    for file in files or TARGETS:
        alive, tried, there = survivors(file, sample, seed, jobs)
        killed, ran = killed + tried - len(alive), ran + tried
        print(f"{file:32} {tried - len(alive):4} of {tried:4} killed, of {there:4} mutants", flush=True)
        for mutant in sorted(alive, key=lambda each: each.line) if listed else ():
            print(f"    {mutant.file}:{mutant.line}: {mutant.change}", flush=True)
    print(f"{'all':32} {killed:4} of {ran:4} killed: {killed / ran:.1%}")
    sys.exit(killed < LEAST * ran)


if __name__ == "__main__":
    main()
