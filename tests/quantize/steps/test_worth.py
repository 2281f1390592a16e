"""Why an INT8 model is not worth writing: code asks the fields, users read the text."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from requant.quantize import Options
from requant.quantize.job import Job
from requant.quantize.report.gather import _rejected
from requant.quantize.report.record import Unit
from requant.quantize.steps.notes import advice
from requant.quantize.steps.worth import LOSES, SLOW, WhyNot
from requant.transforms.int8.plan import Impl

JUDGED = f"SQNR: 9.0 dB, {SLOW}: no"  # a judgement that quotes another cause decides nothing
ANSWERS: dict[str, tuple[WhyNot, str, str, bool]] = {
    "worth it": (WhyNot(), "", "", False),
    "loses": (WhyNot(loses=JUDGED), f"{LOSES}, judged by {JUDGED}", LOSES, True),
    "slow": (WhyNot(slow=f"{SLOW}: 1.00x"), f"{SLOW}: 1.00x", SLOW, False),
    "both": (WhyNot(JUDGED, f"{SLOW}: 1.00x"), f"{LOSES}, judged by {JUDGED}; {SLOW}: 1.00x", LOSES, False),
    "nothing": (WhyNot(nothing="it fails: a, b"), "it fails: a, b", "it fails: a, b", False),
}


@pytest.mark.parametrize(("found", "text", "cause", "advised"), ANSWERS.values(), ids=ANSWERS)
def test_the_causes_are_fields_and_the_text_is_made_of_them(
    found: WhyNot, text: str, cause: str, advised: bool
) -> None:
    assert (bool(found), str(found), found.cause) == (bool(text), text, cause)
    job = cast("Job", SimpleNamespace(options=Options(effort="low")))
    assert bool(advice(job, found)) is advised


UNIT = Unit(name="conv", op="Conv", nodes=("conv",), outputs=("y",), implementation=Impl.FLOAT, reason="")
TIMES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({}, "the INT8 model was rejected as a whole: a cause: whole, with figures"),
    "slower": ({"float_us": 3.0, "tried_us": 4.0}, "float takes 3 us here, int8 4 us"),
    "faster": (
        {"float_us": 3.0, "tried_us": 1.0},
        "int8 saves 2 us, but the whole model was rejected: a cause: whole, with figures",
    ),
}


@pytest.mark.parametrize(("times", "text"), TIMES.values(), ids=TIMES)
def test_the_report_takes_the_cause_as_it_is(times: dict[str, Any], text: str) -> None:
    assert _rejected(replace(UNIT, **times), "a cause: whole, with figures") == text
