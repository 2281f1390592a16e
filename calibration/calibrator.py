"""`Calibrator`: calibration of any model in a few lines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from .. import RequantError, UnknownNameError
from ..system.apart import check_apart
from ..system.given import check_kind, check_path, kind_of, names_of, or_default
from .data.objects import python_object
from .data.sources import DataSource, Source, guarded, named_files, open_source
from .execution import Execution
from .model.bodies import tensors_in_bodies
from .model.copies import activations, load_copy
from .model.identity import fingerprint, tensor_digests
from .model.session import InputSpec, ModelSource, input_specs, open_session, output_specs
from .model.state import recognised
from .range_files.range_file import Data, RangeFile, save_ranges, shard_text
from .rules.precision import Precision
from .rules.ranges import Range, Rule, parse_rule
from .runs.runner import Progress, axes_of, length_of, observe
from .statistics.histogram import Statistic
from .statistics.observations import Observations


@dataclass(slots=True)
class Calibrator:
    """Observe a model's tensors over data, and choose ranges. One thread at a time may use it.

    >>> import onnx
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     double (float[N, 2] x) => (float[N, 2] y) { y = Add(x, x) }''').SerializeToString()
    >>> feeds = [{"x": [[1.0, -2.0]]}, {"x": [[0.5, 3.0]]}]
    >>> Calibrator(model).observe(feeds).ranges()
    {'x': (-2.0, 3.0), 'y': (-4.0, 6.0)}

    Attributes:
        model: A file, or the bytes of a file.
        tensors: The tensors to observe; by default all float inputs and all float tensors that the model computes.
        histogram: Whether to build histograms, which all rules except ``minmax`` and ``mean_minmax`` need.
        channel_axis: The channel axis of each tensor to observe channel by channel too.
        execution: Batches, workers and memory.
        seen: The statistics so far.

    Raises:
        UnknownNameError: The model has no such tensor.
        RequantError: The model cannot be loaded, a tensor is not float, or a setting is of another type.
    """

    model: ModelSource
    tensors: Sequence[str] = ()
    histogram: bool = True
    channel_axis: Mapping[str, int] = field(default_factory=dict)
    execution: Execution = field(default_factory=Execution)
    seen: Observations = field(default_factory=Observations, init=False)
    _inputs: tuple[InputSpec, ...] = field(default=(), init=False)
    _stateful: bool = field(default=False, init=False)
    _described: list[str] = field(default_factory=list, init=False)
    _read: list[str | os.PathLike[str]] = field(default_factory=list, init=False)
    """The files of the data, which no range file may overwrite."""
    _shards: tuple[tuple[int, int], ...] = field(default=(), init=False)
    _position: int | None = field(default=0, init=False)
    """The position of the next sample in the whole data; None if unknown."""

    def __post_init__(self) -> None:
        self.tensors = names_of(self.tensors, "tensors")
        self.channel_axis = axes_of(self.channel_axis)
        check_kind(self.execution, Execution, "execution must be an Execution")
        check_kind(self.histogram, bool, "histogram must be True or False")
        session = open_session(self.model, lean=True)
        self._inputs = input_specs(session)
        self._stateful = bool(recognised(self._inputs, output_specs(session)))
        if self.tensors:
            tensors_in_bodies(load_copy(self.model)[0].graph, self.tensors)  # refuses those that the model lacks
        self.tensors = self.tensors or activations(self.model)

    def observe(self, data: DataSource, samples: int | None = None, progress: Progress | None = None) -> Calibrator:
        """Run the model over data, and add the statistics to the earlier ones.

        >>> import onnx
        >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
        ...     half (float[N] x) => (float[N] y) { h = Constant <value_float = 0.5> () y = Mul(x, h) }''')
        >>> calibrator = Calibrator(model.SerializeToString(), ["y"])
        >>> calibrator.observe([{"x": [1.0, 2.0]}]).seen.samples
        1
        >>> calibrator.observe([{"x": [8.0]}, {"x": [0.0]}]).seen.samples
        3
        >>> calibrator["y"].lo, calibrator["y"].hi
        (0.0, 4.0)

        Args:
            data: A file, a folder, feeds, or anything else that `open_source` accepts. An iterator is read once, and
                its items are not kept, unless the model has a state.
            samples: The number of samples, picked evenly; None for all.
            progress: Called with the number of finished samples and the number of all samples, or None if unknown.

        Returns:
            The calibrator itself.

        Raises:
            RequantError: The run fails as in `observe`, and adds nothing. Or a shard is observed after another shard
                or after data of unknown length.
        """
        position = self._next()
        source = self._opened(data).stretches(samples)
        kept: list[Path] = []
        execution = replace(
            self.execution, first=self.execution.first + position, kept=self.execution.kept or kept.append
        )
        seen = observe(
            self.model,
            self.tensors,
            iter(source) if isinstance(data, Iterator) else source,
            histogram=self.histogram,
            channel_axis=self.channel_axis,
            execution=execution,
            progress=progress,
        )
        self.seen |= seen
        whole = execution.shard == (1, 1)
        length = seen.samples if whole else length_of(source)
        self._position = None if length is None else position + length
        self._shards = () if whole else (execution.shard,)
        self._described.append(source.description)
        self._read += named_files(data)
        for path in kept:
            path.unlink(missing_ok=True)
        return self

    def _opened(self, data: DataSource) -> Source:
        """Open data; the items of an iterator are kept only for a model with state."""
        if not isinstance(data, Iterator) or self._stateful:
            return open_source(data, self._inputs, self.model, self.execution.memory_limit)
        rows = python_object(
            lambda: islice(data, None),  # which leaves the rest of a generator to the caller
            f"{kind_of(data)} of feeds",
            inputs=self._inputs,
        )
        return Source(self._inputs, guarded(rows))

    def _next(self) -> int:
        """Return the position of the next sample.

        Raises:
            RequantError: A shard cannot be observed after the earlier data.
        """
        shard = self.execution.shard
        if self._described and self._shards != (() if shard == (1, 1) else (shard,)):
            before = ", ".join(map(shard_text, self._shards)) or "1/1"
            raise RequantError(
                f"shard {shard_text(shard)} cannot be observed after {before}; use a calibrator per shard, then merge"
            )
        if self._position is None:
            raise RequantError(
                f"shard {shard_text(shard)} cannot be observed after data of unknown length, because the positions of "
                "its samples are unknown; give all data at once, or lists"
            )
        return self._position

    def ranges(self, rule: str = "minmax", precision: Precision | None = None) -> dict[str, Range]:
        """Choose a range for each tensor that had values.

        >>> import numpy as np, onnx
        >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
        ...     copy (float[N] x) => (float[N] y) { y = Identity(x) }''').SerializeToString()
        >>> calibrator = Calibrator(model, ["y"]).observe([{"x": np.append(np.linspace(0, 1, 10_000), 100)}])
        >>> calibrator.ranges()["y"]
        (0.0, 100.0)
        >>> calibrator.ranges("percentile(99.9)")["y"][1] < 1.1
        True

        Args:
            rule: A rule of `requant.calibration.RULES`, as `parse_rule` reads it.
            precision: The integers that the ranges are for; None for uint8 with any zero point.

        Raises:
            RequantError: There is no such rule, or it needs histograms.
        """
        chosen, wanted = self._rule(rule), or_default(precision, Precision, "precision")
        return {
            name: chosen(statistic, self.seen.runs.get(name), wanted) for name, statistic in self.seen.ranges.items()
        }

    def _rule(self, text: str) -> Rule:
        """Return a rule for which the statistics suffice."""
        rule = parse_rule(text)
        if rule.needs_histogram and not self.histogram:
            raise RequantError(f"the rule {rule} needs histograms, and this calibrator has histogram=False")
        return rule

    def merge(self, other: Calibrator) -> Calibrator:
        """Add the statistics of another calibrator of the same model. One run over all data would give the same ranges.

        How the ranges grew (`Observations.runs`) is known of each part alone, unless ``Execution(first=N)`` gives the
        position of its first sample in the whole data.

        >>> import onnx
        >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
        ...     copy (float[N] x) => (float[N] y) { y = Identity(x) }''').SerializeToString()
        >>> left = Calibrator(model).observe([{"x": [1.0]}])
        >>> right = Calibrator(model).observe([{"x": [-1.0]}])
        >>> left.merge(right).ranges()["y"]
        (-1.0, 1.0)

        Returns:
            This calibrator; the other one does not change.

        Raises:
            RequantError: The calibrators are of different models or tensors, have other kinds of statistics, or shards
                that cannot be merged.
        """
        check_kind(other, Calibrator, "a calibrator is merged with another one")
        if other is self:
            raise RequantError("a calibrator cannot be merged with itself: its samples would count twice")
        if (self._inputs, self.tensors) != (other._inputs, other.tensors) or not self._has_model_of(other):
            raise RequantError("calibrators of different models or tensors cannot be merged")
        if self.channel_axis != other.channel_axis:
            raise RequantError("calibrators with different channel axes cannot be merged")
        if self.histogram and other.histogram and self._values != other._values:
            mine, theirs = (seen._values or "all" for seen in (self, other))
            raise RequantError(f"histograms of {mine} and of {theirs} values per sample cannot be merged")
        shards = self._shards
        if not self._described:
            shards = other._shards
        elif other._described and (self._shards or other._shards):
            shards = self._joined(other)
        self.seen |= other.seen
        if self._position is None or other._position is None:
            self._position = None
        elif self._shards or other._shards:  # of the same data
            self._position = max(self._position, other._position)
        else:
            self._position += other._position
        self._shards = shards
        self._described += other._described
        self._read += other._read
        return self

    def _has_model_of(self, other: Calibrator) -> bool:
        """Whether another calibrator observes the same model, or a copy of it."""
        mine, theirs = self.model, other.model
        return mine == theirs or fingerprint(load_copy(mine)[0]) == fingerprint(load_copy(theirs)[0])

    @property
    def _values(self) -> int | None:
        """The most values of a tensor that histograms count per sample; None for all, or without histograms."""
        return self.execution.histogram_values if self.histogram else None

    def _joined(self, other: Calibrator) -> tuple[tuple[int, int], ...]:
        """Return the shards of both calibrators; an empty tuple if these are all shards."""
        if not self._shards or not other._shards or sorted(set(self._described)) != sorted(set(other._described)):
            raise RequantError("a shard can be merged only with other shards of the same data")
        try:
            return Data("", shards=self._shards + other._shards).shards
        except ValueError as error:
            shards = (", ".join(map(shard_text, seen._shards)) for seen in (self, other))
            raise RequantError(f"shards {' and '.join(shards)} cannot be merged: {error}") from error

    def save(self, path: str | os.PathLike[str], rule: str = "minmax", precision: Precision | None = None) -> RangeFile:
        """Write a range file for `requant quantize --ranges`, and return its content.

        >>> import onnx, tempfile
        >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
        ...     copy (float[N] x) => (float[N] y) { y = Identity(x) }''').SerializeToString()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = Calibrator(model).observe([{"x": [1.0]}]).save(folder + "/ranges.json")
        >>> saved.ranges["y"], saved.samples
        ((1.0, 1.0), 1)

        Raises:
            RequantError: There is no such rule, it needs histograms, nothing was observed, or the file cannot be
                written.
        """
        check_path(path, "a range file")
        check_apart({"the range file": path}, [*self._read, *named_files(self.model)])
        chosen = self._rule(rule)
        if not self.seen.samples:
            raise RequantError("nothing was observed: call observe with data before save")
        loaded, _ = load_copy(self.model)
        file = RangeFile.of(
            self.seen,
            chosen,
            model=fingerprint(loaded),
            data=Data(" + ".join(sorted(set(self._described))), self.execution.batch, self._shards, self._values),
            digests=tensor_digests(loaded, self.tensors),
            precision=precision,
        )
        save_ranges(Path(path), file)
        return file

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the tensors with values.

        >>> import onnx
        >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
        ...     copy (float[N] x) => (float[N] y) { y = Identity(x) }''').SerializeToString()
        >>> list(Calibrator(model).observe([{"x": [1.0]}]))
        ['x', 'y']
        """
        return iter(self.seen.ranges)

    def __len__(self) -> int:
        """Return the number of tensors with values."""
        return len(self.seen.ranges)

    def __getitem__(self, tensor: str) -> Statistic:
        """Return the statistic of a tensor.

        >>> import onnx
        >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
        ...     copy (float[N] x) => (float[N] y) { y = Identity(x) }''').SerializeToString()
        >>> Calibrator(model, histogram=False).observe([{"x": [1.0, 2.0]}])["y"]
        MinMax(lo=1.0, hi=2.0, count=2)

        Raises:
            UnknownNameError: The tensor was not observed, or it had no values.
            RequantError: The name is no text.
        """
        check_kind(tensor, str, "the name of a tensor must be a text")
        if tensor not in self.seen.ranges:
            raise UnknownNameError("observed tensor", tensor, self.seen.ranges)
        return self.seen.ranges[tensor]
