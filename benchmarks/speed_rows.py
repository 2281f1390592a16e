"""The rows of `benchmarks.speed`: the speed-ups over float, the goals that a row misses, and the table.

A goal of an architecture is a speed-up that depends on the processor. This project's models must also be as fast as
float and as the models of other quantizers, and their times must be as predicted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import click
from rich.table import Table

from benchmarks.contenders import CONTENDERS
from benchmarks.measurements import NOISE, OPENVINO
from benchmarks.tables import plain_table
from requant.quantize.runtime.machine import flags

GOALS: Mapping[str, Mapping[str, float]] = {
    "resnet50": {"amx_int8": 8.5, "avx512_vnni": 3.8},
    "mobilenet_v2": {"amx_int8": 3.2, "avx512_vnni": 2.4},
    "mobilenet_v3_large": {"amx_int8": 2.8, "avx512_vnni": 2.2},
    "efficientnet_b0": {"amx_int8": 4.0, "avx512_vnni": 2.9},
    "squeezenet1_1": {"amx_int8": 4.5, "avx512_vnni": 2.6},
    "vit_b_16": {"amx_int8": 6.0, "avx512_vnni": 3.2},
    "bert_base": {"amx_int8": 6.5, "avx512_vnni": 3.5},
    "cct_7": {"amx_int8": 2.0, "avx512_vnni": 2.0},
}
"""The architectures, and the goal of the speed-up of this project's models over float, by the best instructions of the
processor. A processor with neither has no goal."""
GUARDED = {"ours": "guarded", "placed-openvino": "placed-guarded"}
"""The forms of this project's contenders that may be float."""
VALID_DB = 8.0
"""The SQNR of a usable real model is at least this. Random weights have no such limit."""
PREDICTED = 0.15  # the largest relative error of a predicted time


@dataclass(frozen=True, slots=True)
class Row:
    """The measurements of one model.

    Attributes:
        model: The name of the model.
        float_ms: The minimum time of the float model in ONNX Runtime.
        times: The minimum time of the fastest form of each contender, in ms.
        forms: The fastest form of each contender.
        sqnr_db: The SQNR of the worst output of each contender on the timed feed; None if all outputs are equal.
        errors: Why a contender has no time.
        goal: The goal of the speed-up of this project's model; 0 without a goal.
        predicted: The sum of the costs of this project's plan, over the time that the same run measured.
        verdict: Why this project wrote the float model; empty for an INT8 model.
    """

    model: str
    float_ms: float
    times: Mapping[str, float]
    forms: Mapping[str, str]
    sqnr_db: Mapping[str, float | None] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    goal: float = 0.0
    predicted: float | None = None
    verdict: str = ""

    def ratio(self, contender: str) -> float | None:
        """Return the speed-up of a contender over float; None if it was not timed."""
        return self.float_ms / self.times[contender] if contender in self.times else None


def build_row(
    model: str,
    timed: Mapping[str, Mapping[str, Any]],
    made: Mapping[str, Mapping[str, Any]],
    offered: Mapping[str, Sequence[str]],
    goal: float = 0.0,
) -> Row:
    """Choose the fastest form of each contender.

    Args:
        model: The name of the model.
        timed: The result of `measurements.timed`; the keys are ``float`` and ``CONTENDER FORM``.
        made: The result of quantizing each form, or ``error``.
        offered: The forms that each contender tried.
        goal: The goal of the speed-up of this project's model.

    Raises:
        click.ClickException: The float model does not run.
    """
    if "error" in timed["float"]:
        raise click.ClickException(f"{model}: the float model does not run: {timed['float']['error']}")
    times, forms, noise, errors = {}, {}, {}, {}
    for contender, names in offered.items():
        runs = {form: timed[key(contender, form)] for form in names if key(contender, form) in timed}
        valid = {form: run for form, run in runs.items() if "error" not in run}
        if valid:
            best = min(valid, key=lambda form: valid[form]["ms"])
            times[contender], forms[contender] = valid[best]["ms"], best
            noise[contender] = valid[best]["sqnr_db"]
        else:
            errors[contender] = "; ".join({**made.get(form, {}), **runs.get(form, {})}["error"] for form in names)
    own = made.get(offered["ours"][0], {}) if "ours" in offered else {}
    return Row(
        model,
        timed["float"]["ms"],
        times,
        forms,
        noise,
        errors,
        goal,
        predicted_ratio(own),
        own.get("verdict", ""),
    )


def key(contender: str, form: str) -> str:
    """Return the key of a model in the result of `measurements.timed`."""
    return f"{contender} {form}"


def predicted_ratio(made: Mapping[str, Any]) -> float | None:
    """Return the predicted over the measured time of this project's model; None if one of them is missing."""
    if not made.get("predicted_ms") or not made.get("latency"):
        return None
    return float(made["predicted_ms"]) / float(made["latency"]["int8_ms"])


def valid(row: Row, contender: str) -> bool:
    """Whether the model of a contender is usable. A real model, which has no goal, needs an SQNR of `VALID_DB`."""
    decibels = row.sqnr_db.get(contender)
    return bool(row.goal) or decibels is None or decibels >= VALID_DB


def missed(row: Row) -> list[str]:
    """Return the goals that this project's models miss in a row."""
    ours = row.ratio("ours")
    if ours is None:
        return (["no model of ours"] if "ours" in row.errors else []) + missed_in_openvino(row)
    goals = [f"goal {row.goal:g}x"] if ours < row.goal else []
    if ours < 1 - NOISE * bool(row.verdict):  # with a verdict both models are float: only noise differs
        goals.append("slower than float")
    goals += [f"slower than {label}" for label in faster(row, "ours", set(CONTENDERS) - {"fallback"})]
    if row.predicted is not None and abs(row.predicted - 1) > PREDICTED:
        goals.append("predicted")
    return goals + missed_in_openvino(row)


def missed_in_openvino(row: Row) -> list[str]:
    """Return what runs faster in OpenVINO than the model that is made for it."""
    if "placed-openvino" in row.errors:
        return ["no model of ours placed in OpenVINO"]
    there = {name for name, contender in CONTENDERS.items() if contender.runtime in OPENVINO}
    return [f"in OpenVINO: slower than {label}" for label in faster(row, "placed-openvino", there)]


def faster(row: Row, name: str, rivals: Collection[str]) -> list[str]:
    """Return the labels of the usable rivals that are faster than a contender; empty if it was not timed."""
    limit = row.times.get(name, 0.0)
    found = ((rival, time) for rival, time in row.times.items() if rival in rivals and rival != name)
    return [CONTENDERS[rival].label for rival, time in found if valid(row, rival) and limit > time * (1 + NOISE)]


def goal_of(model: str) -> float:
    """Return the goal of the speed-up of an architecture on this processor; 0 without a goal."""
    features = flags()
    return next((goal for flag, goal in GOALS.get(model, {}).items() if flag in features), 0.0)


# ------------------------------------------------------------------------------------------------------- printing


def cell(row: Row, contender: str) -> str:
    """Return the cell of a contender: the speed-up over float, ``fails``, or ``-``. ``*`` marks another form."""
    ratio = row.ratio(contender)
    if ratio is None:
        return "fails" if contender in row.errors else "-"
    plain = CONTENDERS[contender].forms[0] == row.forms[contender] or row.forms[contender] in GUARDED.values()
    return f"{ratio:.2f}x" + ("" if plain else "*")


def footnotes(rows: Iterable[Row]) -> list[str]:
    """Return the notes below a table: fastest forms marked with ``*``, errors, and float models of this project."""
    notes = []
    for row in rows:
        notes += [
            f"* {row.model}, {CONTENDERS[name].label}: {form}"
            for name, form in row.forms.items()
            if cell(row, name).endswith("*")
        ]
        notes += [f"{row.model}, {CONTENDERS[name].label}: {error}" for name, error in row.errors.items()]
        notes += [f"{row.model}, ours: float: {row.verdict}"] if row.verdict else []
    return notes


def to_table(title: str, rows: Iterable[Row], contenders: Iterable[str], *, noise: bool = False) -> Table:
    """Return the rows as a table; with `noise` also the SQNR of each contender."""
    names = list(contenders)
    labels = [CONTENDERS[name].label for name in names]
    decibels = [f"{label}, dB" for label in labels] if noise else []
    columns = ("model", "FP32 ms", *labels, *decibels, *(() if noise else ("goal", "predicted")), "missed")
    table = plain_table(title, columns, left=("model", "missed"), no_wrap=("model",))
    for row in rows:
        right = [] if noise else [f"{row.goal:g}x" if row.goal else "", percent(row.predicted)]
        levels = [level(row, name) for name in names] if noise else []
        cells = [cell(row, name) for name in names]
        table.add_row(row.model, f"{row.float_ms:.2f}", *cells, *levels, *right, ", ".join(missed(row)))
    return table


def percent(ratio: float | None) -> str:
    """Return a ratio as its difference from one, in percent."""
    return "-" if ratio is None else f"{ratio - 1:+.0%}"


def level(row: Row, contender: str) -> str:
    """Return the SQNR of a contender as text."""
    if contender not in row.times:
        return "-"
    decibels = row.sqnr_db[contender]
    return "equal" if decibels is None else f"{decibels:.1f}"


def to_json(row: Row) -> dict[str, Any]:
    """Return a row as JSON values."""
    return {**asdict(row), "ratios": {name: row.ratio(name) for name in row.times}, "missed": missed(row)}
