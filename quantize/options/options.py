"""What may be asked of `quantize_model`."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from ... import RequantError
from ...calibration.execution import Execution
from ...calibration.files import RangeFile
from ...calibration.overrides import Overrides
from ...calibration.ranges import parse_rule
from ...transforms.qparams import Scheme
from .efforts import EFFORTS, chosen
from .selection import Selection

FORMATS = ("qdq", "qoperator")
TARGETS = ("auto", "vnni", "avx2")
PLACES = ("measured", "estimated", "rules", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What may be asked of `quantize_model`.

    Attributes:
        samples: How many samples calibrate, picked evenly; None for all.
        batch: Items per run while the latency is measured.
        calibration: Range rule, a key of `RULES`, or ``percentile(99.99)``; None for that of the effort or,
            of a range file, for the ranges as they were chosen.
        ranges: A range file, or a min/max log, whose ranges are used; data then only measure.
        overrides: A file with the user's own ranges of single tensors, which win, or what it holds.
        execution: How the model is run over the data to calibrate.
        format: ``qdq``, or ``qoperator`` for the fused operators.
        selection: Which nodes and operators may become int8, and how.
        scheme: Integer types of activations and weights.
        isa: The target: ``vnni`` adds products of 8 bits exactly, ``avx2`` in 16 bits; ``auto`` is this machine.
        portable: The model is for other runtimes than ONNX Runtime too: placed by rules, in standard operators, with
            pairs only on what integer operators read; how fast it is in ONNX Runtime decides nothing.
        place: What decides where int8 pays: ``measured`` on this machine, ``estimated`` by built-in or given costs,
            ``rules`` per operator; or ``all`` for whatever has an integer kernel.
        costs: A file of costs, measured on the machine that the model is for; places by them.
        plan: A plan file; what it names is done as it says.
        noise_weight: Microseconds that a unit of noise as strong as its result is worth.
        effort: How much is done for accuracy: ``low``, ``medium`` or ``high``, see `CORRECTIONS`.
        corrections: Keys of `CORRECTIONS`, instead of those of the effort.
        external_data: Whether the weights go into one file beside the output; above 2 GB they do anyway.
        force_int8: Write the INT8 model even where it is not worth having.
        threads: Threads inside one operator for the latency; 0 leaves the choice to the runtime.
        force: Overwrite an existing output.
        seconds: How long the latency of the two models is measured.
    """

    samples: int | None = None
    batch: int = 1
    calibration: str | None = None
    ranges: str | os.PathLike[str] | RangeFile | None = None
    overrides: str | os.PathLike[str] | Overrides | None = None
    execution: Execution = field(default_factory=Execution)
    format: str = "qdq"
    selection: Selection = field(default_factory=Selection)
    scheme: Scheme = field(default_factory=Scheme)
    isa: str = "auto"
    portable: bool = False
    place: str = "measured"
    costs: str | os.PathLike[str] | None = None
    plan: str | os.PathLike[str] | None = None
    noise_weight: float = 0.0
    effort: str = "medium"
    corrections: tuple[str, ...] | None = None
    external_data: bool = False
    force_int8: bool = False
    threads: int = 1
    force: bool = False
    seconds: float = 3.0

    def __post_init__(self) -> None:
        """Refuse what cannot be done.

        Raises:
            RequantError: An unknown format, target or rule, or a number out of range.
        """
        named = (
            ("format", self.format, FORMATS),
            ("instruction set", self.isa, TARGETS),
            ("placement", self.place, PLACES),
            ("effort", self.effort, tuple(EFFORTS)),
        )
        for kind, name, known in named:
            if name not in known:
                raise RequantError(f"no {kind} {name!r}; there are: {', '.join(known)}")
        for name, number in (("samples", self.samples), ("batch", self.batch)):
            if number is not None and number < 1:
                raise RequantError(f"{name} must be at least 1, not {number}")
        if self.threads < 0:
            raise RequantError(f"threads must be 0 (the runtime's choice) or more, not {self.threads}")
        if (self.scheme.activation, self.scheme.weight) == ("s8", "u8"):
            raise RequantError("no kernel multiplies signed activations by unsigned weights; choose s8 weights")
        if not 0 <= self.noise_weight < float("inf"):
            raise RequantError(f"the weight of noise must be 0 or more, not {self.noise_weight}")
        if self.costs is not None and (self.place in ("rules", "all") or self.plan is not None):
            raise RequantError("costs decide nothing with the placements rules and all, or with a plan")
        if self.portable and (self.format != "qdq" or self.place in ("estimated", "all") or self.costs is not None):
            raise RequantError("a portable model has pairs, and is placed by rules: not by costs, and not all of it")
        chosen(self.effort, self.corrections)
        if self.calibration is not None:
            parse_rule(self.calibration)

    def to_json(self) -> dict[str, Any]:
        """Return what shapes the model, as plain JSON values, without what is at its default, or in other files."""
        asked, plain = self._shaping(), Options()._shaping()
        return {name: value for name, value in asked.items() if value != plain[name]}

    def _shaping(self) -> dict[str, Any]:
        """Return what shapes the model, as plain JSON values."""
        selection = {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in asdict(self.selection).items()
        }
        return {
            "calibration": str(parse_rule(self.calibration or EFFORTS[self.effort].rule)),
            "samples": self.samples,
            "format": self.format,
            "isa": self.isa,
            "portable": self.portable,
            "place": self.place,
            "noise_weight": self.noise_weight,
            "effort": self.effort,
            "corrections": sorted(chosen(self.effort, self.corrections)),
            **asdict(self.scheme),
            **selection,
        }
