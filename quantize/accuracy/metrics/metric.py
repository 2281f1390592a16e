"""What a metric is: a row of the table of metrics, with the functions that compute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .... import RequantError
from ....calibration.data.objects import failing_at, on_path
from ....calibration.data.samples import Sample
from ....calibration.model.session import Array
from ..classes import Outputs
from .items import Items

UNFIT = "the labels or outputs do not fit"
"""The cause of any other error of a metric: labels come from outside, and outputs from any model."""


@dataclass(frozen=True, slots=True)
class Own:
    """A user's function.

    Attributes:
        call: The function.
        takes_model: Whether it takes the path of a model; else it takes the outputs and the labels of all samples.
        folder: The folder that must be on ``sys.path`` while it runs.
    """

    call: Callable[..., Any]
    takes_model: bool
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A user's function from the outputs for one sample to what a metric reads.

    Attributes:
        call: The function.
        name: Its name in messages.
        takes_feed: Whether it also takes the inputs.
        folder: The folder that must be on ``sys.path`` while it runs.
    """

    call: Callable[..., Any]
    name: str
    takes_feed: bool
    folder: str | None = None

    def __call__(self, outputs: Outputs, sample: Sample) -> Outputs:
        """Return what the function returns, by name; a single array is called ``decoded``.

        Raises:
            RequantError: The function fails, or returns something else than arrays.
        """
        place = f"{sample.where}: {self.name}"
        with failing_at(place), on_path(self.folder):
            returned = self.call(dict(outputs), dict(sample.feed)) if self.takes_feed else self.call(dict(outputs))
        named = returned if isinstance(returned, Mapping) else {"decoded": returned}
        with failing_at(f"{place}: must return an array, a list of arrays, or a dict of them"):
            arrays = {str(name): _array(value) for name, value in named.items()}
        odd = next((name for name, value in arrays.items() if value.dtype.kind not in "biufU"), None)
        if odd is not None:
            raise RequantError(f"{place}: must return an array, a list of arrays, or a dict of them")
        return arrays


def _array(value: Any) -> Array:
    """Return an array; tables of different lengths, one per entry, get rows of zeros at the end."""
    if isinstance(value, Sequence) and not isinstance(value, str) and all(np.ndim(each) == 2 for each in value):
        longest = max((len(each) for each in value), default=0)
        value = [np.pad(np.asarray(each), ((0, longest - len(each)), (0, 0))) for each in value]
    return np.asarray(value)


def _all_of_it(outputs: Outputs, sample: Sample) -> Outputs:
    """Return the outputs."""
    return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number that says how good a model is on data.

    Attributes:
        name: The name.
        about: A description, in one line.
        higher_is_better: Whether a higher number is better.
        unit: ``share`` of 1, ``dB``, or nothing.
        labels: Whether the data must have labels: ``needed``, ``used`` if there are any, or ``none``.
        mean: Whether the metric is the mean of one number per item.
        items: Returns the contributions of a sample's items, from the outputs, the sample, and the reference's outputs.
        value: Returns the metric from contributions: from their sum over items, (..., c) to (...); or, if `sums` is
            False, from all of them, (k, c).
        sums: Whether `value` takes the sum.
        settle: Returns contributions that can be summed, with weights in the second column, from all contributions, if
            those of one item depend on other items; rows of weight 0 do not count.
        uneven: Whether two models may have different numbers of items for one entry of the data.
        keep: Returns the part of the reference's outputs that `items` needs.
        perfect: Returns the contributions of the float model itself, from those of another model, if outputs are
            compared with the float model's.
        heads: Whether it judges one output with scores per class: of several, the first one that the labels fit.
        unlabelled: The metric for data without labels, if it differs.
        decode: The user's function from outputs to what `items` and `keep` read.
        own: The user's function, which replaces `items`.
        probabilities: The outputs that are compared as probabilities, see `of_probabilities`.
    """

    name: str
    about: str = ""
    higher_is_better: bool = True
    unit: str = ""
    labels: str = "needed"
    mean: bool = False
    items: Callable[[Outputs, Sample, Outputs], Items] | None = None
    value: Callable[[Array], Any]
    sums: bool = True
    settle: Callable[[Array], Array] | None = None
    uneven: bool = False
    keep: Callable[[Outputs, Sample], Outputs] = _all_of_it
    perfect: Callable[[Array], Array] | None = None
    heads: bool = False
    unlabelled: Metric | None = None
    decode: Decoder | None = None
    own: Own | None = None
    probabilities: frozenset[str] = frozenset()

    @property
    def runs_models(self) -> bool:
        """Whether it is a function that runs the models itself."""
        return self.own is not None and self.own.takes_model

    @property
    def reference(self) -> bool:
        """Whether outputs are compared with the float model's."""
        return self.perfect is not None

    def contributions(self, outputs: Outputs, sample: Sample, reference: Outputs) -> Items:
        """Return the contributions of a sample's items; `reference` is the result of `kept` for the float model.

        Raises:
            RequantError: The labels or outputs do not fit the metric, or the user's function fails.
        """
        assert self.items is not None
        decoded = self._decoded(outputs, sample)
        with failing_at(f"{sample.where}: {self.name}: {UNFIT}"):
            return self.items(decoded, sample, reference)

    def kept(self, outputs: Outputs, sample: Sample) -> Outputs:
        """Return the part of the float model's outputs that `contributions` needs.

        Raises:
            RequantError: The outputs do not fit the metric, or the user's function fails.
        """
        decoded = self._decoded(outputs, sample)
        with failing_at(f"{sample.where}: {self.name}: {UNFIT}"):
            return self.keep(decoded, sample)

    def _decoded(self, outputs: Outputs, sample: Sample) -> Outputs:
        """Return what `items` and `keep` read."""
        return outputs if self.decode is None else self.decode(outputs, sample)

    def of(self, parts: Array) -> float:
        """Return the metric of contributions (k, c)."""
        return float(self.value(parts.sum(axis=0) if self.sums else parts))

    def worse(self, before: float, after: float) -> float:
        """Return the loss from `before` to `after`; negative if `after` is better."""
        if before == after:  # both may be infinite
            return 0.0
        return before - after if self.higher_is_better else after - before

    def needs_labels(self) -> bool:
        """Whether data without labels are refused."""
        return self.labels == "needed"

    def decoded_by(self, decode: Decoder, name: str) -> Metric:
        """Return a copy with a user's function and another name."""
        other = None if self.unlabelled is None else self.unlabelled.decoded_by(decode, name)
        return replace(self, name=name, decode=decode, unlabelled=other, heads=False)

    def for_sample(self, sample: Sample) -> Metric:
        """Return the metric for data whose first sample is given: with labels or without."""
        if self.unlabelled is None:
            return self
        return self.unlabelled if sample.label is None else replace(self, labels="needed", unlabelled=None)
