"""Reasons: programs compare codes, users read texts."""

from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from requant.quantize.placement.plan_file import save_plan
from requant.transforms.int8 import reasons
from requant.transforms.int8.ops import OPS, float_reason
from requant.transforms.int8.plan import Choice, Impl, Plan, Unit
from requant.transforms.int8.reasons import NONE, Reason, other

TABLE = {name: value for name, value in vars(reasons).items() if isinstance(value, Reason) and value is not NONE}


@pytest.mark.parametrize("reason", TABLE.values(), ids=TABLE)
def test_a_reason_has_a_kebab_case_code_and_a_text(reason: Reason) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", reason.code)
    assert reason.text
    assert str(reason) == reason.text
    assert bool(reason)


def test_figures_are_filled_into_the_text_and_leave_the_code() -> None:
    reason = Reason("few-products", "{} products per {}").about(25, "output")
    assert (reason.code, reason.text) == ("few-products", "25 products per output")


def test_no_reason_is_false_and_empty() -> None:
    assert not NONE
    assert (NONE.code, str(NONE)) == ("", "")


def test_a_text_without_a_code_gets_the_code_other() -> None:
    assert other("the user wants it") == Reason("other", "the user wants it")
    assert other("") is NONE
    assert other(reasons.GELU) is reasons.GELU


def test_a_reason_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        reasons.GELU.text = "another"  # type: ignore[misc]


def test_every_reason_of_the_operator_table_is_filled_in() -> None:
    for op, row in OPS.items():
        for reason in (row.why, row.slow, float_reason(op)):
            assert "{" not in reason.text
            assert bool(reason.code) == bool(reason.text)


def test_a_plan_file_holds_the_text_of_a_reason(tmp_path: Path) -> None:
    unit = Unit(name="a", op="Gelu", nodes=("a",), inputs=("x",), outputs=("y",))
    plan = Plan((unit, replace(unit, name="b")), {"a": Choice(Impl.FLOAT, reasons.GELU), "b": Choice(Impl.U8)})
    with save_plan(plan, tmp_path / "plan.json"):
        pass
    rows = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["units"]
    assert rows["a"]["reason"] == reasons.GELU.text
    assert "reason" not in rows["b"]
