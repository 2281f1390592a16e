"""The result of `measure_sensitivity`: what every unit and every tensor in integers does to the outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRow:
    """The effect of a unit on the outputs.

    Noise is the power of the change at an output over the power of the output, at the output where this is most: 0 for
    no change, infinite where the outputs cannot be compared.

    Attributes:
        name: The unit, named after its first operator.
        operator: This operator, or ``gate``.
        implementation: Its integer form, as plans name it.
        inputs: The tensors that it reads.
        noise: Noise with only this unit in integers: its inputs in uint8, its weights in int8.
        output: The output with this noise.
        weights_noise: Noise with only its weights in int8; None without weights, or if `noise` is negligible.
        rest_noise: Noise with everything but this unit in integers; None if `noise` is negligible.
        verdict: The cause of its noise, as far as it is known.
    """

    name: str
    operator: str
    implementation: str
    inputs: tuple[str, ...]
    noise: float
    output: str
    weights_noise: float | None
    rest_noise: float | None
    verdict: str = ""

    @property
    def sqnr_db(self) -> float:
        """The SQNR of the worst output with only this unit in integers."""
        return to_db(self.noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """The effect of a tensor on the outputs, and a summary of its values.

    Attributes:
        name: The tensor.
        operator: The operator that produces it; ``input`` for an input of the model.
        noise: Noise, as in `UnitRow`, with only this tensor in uint8.
        output: The output with this noise.
        rounding: Power of the tensor's own error in uint8 over the power of its values; None without a histogram.
        lo: Lower end of its range in uint8.
        hi: Upper end.
        least: The least observed value.
        most: The greatest observed value.
        clipped: Share of the values outside the range by more than a step, 0..1.
        growth: Share of its width that the range gained in the last doubling of the samples, 0..1.
        verdict: The conspicuous properties of its values.
    """

    name: str
    operator: str
    noise: float
    output: str
    rounding: float | None
    lo: float
    hi: float
    least: float
    most: float
    clipped: float
    growth: float
    verdict: str = ""

    @property
    def sqnr_db(self) -> float:
        """The SQNR of the worst output with only this tensor in uint8."""
        return to_db(self.noise)

    @property
    def own_sqnr_db(self) -> float | None:
        """The SQNR of the tensor itself in uint8."""
        return None if self.rounding is None else to_db(self.rounding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """The result of `measure_sensitivity`.

    Attributes:
        model: Path of the float model.
        data: Description of the data.
        calibration: The range rule.
        calibrated: Number of samples that gave the ranges.
        samples: Number of samples of each trial.
        runtime: Version of the runtime.
        outputs: The outputs that were compared.
        noise: Noise, as in `UnitRow`, with everything in integers.
        units: Units, worst first; empty if only tensors were tried.
        tensors: Tensors, worst first; empty if only units were tried.
        trials: Number of trials.
        recalled: Number of trials that came from the cache.
        seconds: Duration.
        notes: Warnings, a sentence each.
    """

    model: str
    data: str
    calibration: str
    calibrated: int
    samples: int
    runtime: str
    outputs: tuple[str, ...]
    noise: float
    units: tuple[UnitRow, ...]
    tensors: tuple[TensorRow, ...]
    trials: int
    recalled: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def sqnr_db(self) -> float:
        """The SQNR of the worst output with everything in integers."""
        return to_db(self.noise)

    def gain_db(self, unit: UnitRow) -> float | None:
        """Return the gain in SQNR of the worst output if only this unit is left in float; None if not tried."""
        if unit.rest_noise is None:
            return None
        return 0.0 if unit.rest_noise == self.noise else to_db(unit.rest_noise) - self.sqnr_db

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values; infinite or undefined numbers become null."""
        values = asdict(self)
        values["units"] = [
            {**_finite(asdict(row)), "sqnr_db": _or_none(row.sqnr_db), "gain_db": _or_none(self.gain_db(row))}
            for row in self.units
        ]
        values["tensors"] = [
            {**_finite(asdict(row)), "sqnr_db": _or_none(row.sqnr_db), "own_sqnr_db": _or_none(row.own_sqnr_db)}
            for row in self.tensors
        ]
        return {"schema": SCHEMA, **_finite(values), "sqnr_db": _or_none(self.sqnr_db)}


def to_db(noise: float) -> float:
    """Return the SQNR, in dB, of noise over signal."""
    return math.inf if noise == 0 else -math.inf if math.isinf(noise) else -10 * math.log10(noise)


def _or_none(value: float | None) -> float | None:
    """Return a finite number, or None."""
    return value if value is not None and math.isfinite(value) else None


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with None for numbers that are not finite."""
    return {name: _or_none(value) if isinstance(value, float) else value for name, value in row.items()}
