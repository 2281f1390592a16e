"""The options of `quantize_model`."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from ... import RequantError
from ...calibration.execution import Execution
from ...calibration.range_files.overrides import Overrides
from ...calibration.range_files.range_file import RangeFile
from ...calibration.rules.ranges import parse_rule
from ...system.given import names_of, normalise_fields
from ...transforms.int8.qparams import BlockForm, Scheme
from .declared import AUTO, FORMATS, KERNELS, PLACES, PRECISIONS, RUNTIMES, TARGETS, Strategy
from .efforts import EFFORTS, chosen
from .option import MOST_THREADS, check_batches
from .selection import Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `quantize_model`.

    Attributes:
        samples: Number of calibration samples, evenly spaced in the data; None for all.
        batch: Items per run while the latency is measured. With several numbers, for instance ``(1, 16)``, one plan
            serves all these batch sizes, and the models are timed at each.
        calibration: Range rule, a key of `RULES` or ``percentile(99.99)``. None: the rule of the effort; with a range
            file, the ranges as the file has them.
        ranges: A range file or a min/max log with the ranges to use; the data then only measure the result.
        overrides: The user's own ranges of single tensors, or a file of them; they replace all other ranges.
        execution: How the model is run over the calibration data.
        format: ``qdq``, or ``qoperator`` for fused operators.
        selection: Which nodes and operators may become int8, and in which form.
        scheme: Integer types of activations and weights.
        isa: The target CPU: ``vnni`` sums products of 8-bit integers exactly, ``avx2`` sums pairs in 16 bits, which can
            saturate; ``auto`` is this machine.
        portable: Write a model for other runtimes than ONNX Runtime too: standard operators, QDQ pairs only at inputs
            of integer operators, placed by rules. The latency in ONNX Runtime decides nothing.
        runtime: The runtime that the model is for, ``onnxruntime`` or ``openvino``. In it the models are compared and
            timed, and its times place the units. The ranges, corrections and evidence come from ONNX Runtime. ``auto``
            is for `quantize_fastest`.
        precision: In which type OpenVINO computes float operators: its ``default``, bfloat16 where the CPU has it, or
            ``f32``.
        place: What decides which operators become int8: ``measured`` on this machine, ``estimated`` by built-in or
            given costs, ``rules`` per operator, or ``all`` for every operator with an integer kernel.
        costs: A file of costs that were measured on the target machine; implies placement by these costs.
        kernels: Whether native operators compute units: ``auto`` where they are here and measured to be faster,
            ``native`` wherever there is one, ``stock`` nowhere. A convolution and the function or the sum behind it
            become one operator without a rounding between them, which is more accurate; with ``exact`` each operator
            computes what its body does. Without their library, ONNX Runtime runs the bodies.
        plan: A plan file that decides the units that it names.
        noise_weight: Microseconds of latency that one unit of noise costs; noise as strong as the signal is one unit.
        effort: The amount of work for accuracy, a key of `EFFORTS`.
        corrections: Keys of `CORRECTIONS`, instead of the corrections of the effort.
        external_data: Write the weights to one file beside the output; above 2 GB this always happens.
        force_int8: Write the INT8 model even if it is not worth having.
        threads: Threads inside one operator while the latency is measured; with 0 the runtime chooses.
        force: Overwrite an existing output.
        seconds: Duration of the latency measurement of the two models.
    """

    samples: int | None = None
    batch: int | tuple[int, ...] = 1
    calibration: str | None = None
    ranges: str | os.PathLike[str] | RangeFile | None = None
    overrides: str | os.PathLike[str] | Overrides | None = None
    execution: Execution = field(default_factory=Execution)
    format: str = "qdq"
    selection: Selection = field(default_factory=Selection)
    scheme: Scheme = field(default_factory=Scheme)
    isa: str = "auto"
    portable: bool = False
    runtime: str = "onnxruntime"
    precision: str = "default"
    place: str = "measured"
    costs: str | os.PathLike[str] | None = None
    kernels: str = "auto"
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
        """Refuse values that are unknown, out of range, or contradict each other.

        Raises:
            RequantError: A value is refused.
        """
        normalise_fields(self)
        self._check_values()
        if (self.scheme.activation, self.scheme.weight) == ("s8", "u8"):
            raise RequantError("no kernel multiplies signed activations by unsigned weights; choose s8 weights")
        if self.costs is not None and (self.place in ("rules", "all") or self.plan is not None):
            raise RequantError("costs have no effect with the placements rules and all, or with a plan")
        if self.noise_weight and (self.place in ("rules", "all") or self.plan is not None):
            raise RequantError("a price of noise has no effect with the placements rules and all, or with a plan")
        if self.portable and (against := self._against_portable()):
            raise RequantError(f"portable does not go with {' and '.join(against)}")
        self._check_runtime()
        in_blocks = Strategy.BLOCK in (self.selection.strategy, *self.selection.strategies.values())
        if self.writes_portable and in_blocks:
            asked = "portable" if self.portable else "the runtime openvino"
            raise RequantError(f"{asked} does not go with the strategy block: only ONNX Runtime has MatMulNBits")
        if not in_blocks and self.scheme.blocks != BlockForm():
            raise RequantError("block_bits and block_size would do nothing without the strategy block")
        if self.wants_native and self._without_native():
            raise RequantError(f"the kernels {self.kernels!r} do not go with {self._without_native()}")
        chosen(self.effort, self.corrections)
        if self.calibration is not None:
            parse_rule(self.calibration)

    def _against_portable(self) -> list[str]:
        """Return the options that a portable model contradicts, in words."""
        rows = {
            f"the format {self.format} (it needs qdq)": self.format != "qdq",
            f"the placement {self.place} (it needs measured or rules)": self.place in ("estimated", "all"),
            "given costs": self.costs is not None,
        }
        return [text for text, contradicts in rows.items() if contradicts]

    def _check_runtime(self) -> None:
        """Refuse what the runtime does not have."""
        if self.runtime == "onnxruntime":
            if self.precision != "default":
                raise RequantError(f"the precision {self.precision} needs the runtime openvino")
            return
        if self.runtime == AUTO and (self.portable or self.costs is not None or self.plan is not None):
            raise RequantError("the runtime auto does not go with portable, costs or a plan: they are for one form")
        if self.format != "qdq":
            raise RequantError(f"runtime {self.runtime} needs the format qdq: only ONNX Runtime has QLinear operators")
        if self.place == "estimated" and self.costs is None:
            raise RequantError(f"runtime {self.runtime} has no built-in costs for the placement estimated: give costs")

    def _without_native(self) -> str:
        """Return what makes a model without native operators; empty if nothing does."""
        if self.portable or self.format != "qdq":
            return "portable" if self.portable else f"the format {self.format}"
        if self.writes_portable:
            return f"the runtime {self.runtime}"
        types = (self.scheme.activation, self.scheme.weight)
        return "" if types == ("u8", "s8") else f"activations of {types[0]} and weights of {types[1]}"

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes; the first is the size for profiles."""
        return tuple(self.batch) if isinstance(self.batch, list | tuple) else (self.batch,)

    @property
    def writes_portable(self) -> bool:
        """Whether the model has only what other runtimes than ONNX Runtime know too."""
        return self.portable or self.runtime != "onnxruntime"

    @property
    def wants_native(self) -> bool:
        """Whether every unit that has a native operator is one."""
        return self.kernels in ("native", "exact")

    @property
    def may_be_native(self) -> bool:
        """Whether units may be native operators, if their library is here."""
        return self.kernels != "stock" and not self._without_native()

    def _check_values(self) -> None:
        """Refuse unknown names and numbers out of range."""
        names = (
            ("format", self.format, FORMATS),
            ("instruction set", self.isa, TARGETS),
            ("placement", self.place, PLACES),
            ("kernels", self.kernels, KERNELS),
            ("runtime", self.runtime, (*RUNTIMES, AUTO)),
            ("precision", self.precision, PRECISIONS),
            ("effort", self.effort, tuple(EFFORTS)),
        )
        for noun, name, known in names:
            if name not in known:
                raise RequantError(f"no {noun} {name!r}; there are: {', '.join(known)}")
        if self.samples is not None and self.samples < 1:
            raise RequantError(f"samples must be at least 1, not {self.samples}")
        check_batches(self.batches)
        if not 0 <= self.threads <= MOST_THREADS:
            raise RequantError(f"threads must be 0 (the runtime chooses) to {MOST_THREADS}, not {self.threads}")
        if not 0 <= self.seconds < float("inf"):
            raise RequantError(f"seconds must be 0 or more, not {self.seconds}")
        if self.corrections is not None:
            names_of(self.corrections, "corrections")
        if not 0 <= self.noise_weight < float("inf"):
            raise RequantError(f"the price of noise must be 0 or more, not {self.noise_weight}")

    def to_json(self) -> dict[str, Any]:
        """Return the options that shape the model and differ from their defaults, as plain JSON; without files."""
        values, defaults = self.shaping(), Options().shaping()
        return {name: value for name, value in values.items() if value != defaults[name]}

    def shaping(self) -> dict[str, Any]:
        """Return the options that shape the model, as plain JSON values."""
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
            "runtime": self.runtime,
            "precision": self.precision,
            "place": self.place,
            "kernels": self.kernels,
            "noise_weight": self.noise_weight,
            "effort": self.effort,
            "corrections": sorted(chosen(self.effort, self.corrections)),
            **asdict(self.scheme),
            **selection,
        }
