"""The mutants of the arithmetic: which nodes change, and how. These tests run no mutant."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
mutants = importlib.import_module("benchmarks.mutants")
sys.path.remove(str(ROOT))


def changes(source: str) -> list[str]:
    return [change for _, (change, _) in mutants.all_changes(ast.parse(source))]


@pytest.mark.parametrize(
    "source",
    [
        "FEW = 16",
        "LAST: float = 2 * 8",
        "LOW, HIGH = 1, -2",
        "(LOW, HIGH) = NEAR = (1, 2)",
        "import numpy",
        "def f(x: Literal[3]) -> Literal[4]: pass",
        "@cache(2)\ndef f(): pass",
        "if TYPE_CHECKING:\n    x = 1",
        "raise ValueError(1 + 1)",
        "Name: TypeAlias = Tuple[3]",
    ],
)
def test_declarations_and_settings_do_not_change(source: str) -> None:
    assert changes(source) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("few = 16", ["16 -> 17"]),
        ("LOW, high = 1, 2", ["1 -> 2", "2 -> 3"]),
        ("TABLE[0] = x", ["0 -> 1"]),
        ("def f():\n    FEW = 16", ["16 -> 17"]),
        ("class A:\n    SIZE = 3", ["3 -> 4"]),
        ("a + b", ["Add -> Sub"]),
        ("a += b", ["Add -> Sub"]),
        ("a < b <= c", ["Lt -> LtE", "LtE -> Lt"]),
        ("a and not b", ["And -> Or", "no Not"]),
        ("-a", ["no USub"]),
        ("x if True else y", ["the other branch", "True -> False"]),
        ("np.floor(min(a))", ["floor -> ceil", "min -> max"]),
        ("'text'", []),
    ],
)
def test_arithmetic_changes(source: str, expected: list[str]) -> None:
    assert changes(source) == expected


def test_every_file_and_its_tests_exist() -> None:
    for file, tests in mutants.TARGETS.items():
        assert all((ROOT / path).is_file() for path in (file, *tests.split())), file
        assert mutants.mutants(file)


def test_a_mutant_is_the_file_with_one_change() -> None:
    mutant = next(each for each in mutants.mutants("transforms/round_weights.py") if each.change == "2 -> 3")
    original = compile((ROOT / mutant.file).read_text(encoding="utf-8"), str(ROOT / mutant.file), "exec")
    assert mutants.mutated(mutant) != original
    assert mutants.mutated(mutant) == mutants.mutated(mutant)
