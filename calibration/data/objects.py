"""Python objects as data: iterables and callables, passed directly or by the name of a file or module."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import GeneratorType, ModuleType
from typing import Any, TypeGuard

import numpy as np

from ... import RequantError, UnknownNameError
from ...system.given import kind_of
from ...system.printable import printable
from ...system.regular import check_regular
from ..model.session import InputSpec, required
from .samples import SEQUENCE, DataError, Picked, Rows, Sample, as_array, as_label, check_names, with_batch_axis

LABELS = ("label", "labels")
"""Names of columns that hold labels, unless the model has an input of that name."""


REASON = 240
"""The most characters of an error of other code; it can quote whole files."""


@dataclass(frozen=True, slots=True)
class Named:
    """An object that the user names by a text.

    Attributes:
        value: The object.
        name: Its name in messages.
        folder: The folder that must be on ``sys.path`` while its code runs; None if there is none.
    """

    value: Any
    name: str
    folder: str | None = None


def named(text: str) -> Named | None:
    """Return the object that ``FILE.py:NAME`` or ``PACKAGE.MODULE:NAME`` names; None for other texts.

    The file ``FILE.py`` is executed.

    Raises:
        RequantError: The file or module is missing or fails, or has no such object.
    """
    if match := re.fullmatch(r"(.+\.py):(\w+)", text):
        return _of_file(match[1], match[2])
    if match := re.fullmatch(r"([A-Za-z_][\w.]*):(\w+)", text):
        return _of_module(match[1], match[2])
    return None


def load_named(text: str, what: str) -> Named:
    """Return the object that a text names.

    Args:
        text: ``FILE.py:NAME`` or ``PACKAGE.MODULE:NAME``.
        what: The role of the object, for the message.

    Raises:
        RequantError: The text has another form, or there is no such object.
    """
    result = named(text)
    if result is None:
        raise DataError(f"{text}: a {what} is named by FILE.py:NAME or PACKAGE.MODULE:NAME")
    return result


def _of_file(path: str, name: str) -> Named:
    """Execute a Python file and return one of its objects."""
    file = Path(path)
    check_regular(file)
    parent = str(file.resolve().parent)
    spec = importlib.util.spec_from_file_location(f"requant_source_{file.stem}", file)
    assert spec is not None  # every name that ends in .py has a spec with a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # for example, dataclasses look up their module
    with _importing(path, parent):
        spec.loader.exec_module(module)
    return Named(_attribute(module, name, path), f"{path}:{name}", parent)


def _of_module(module: str, name: str) -> Named:
    """Import an installed module, not one of the current folder, and return one of its objects."""
    with _importing(module, None):
        imported = importlib.import_module(module)
    return Named(_attribute(imported, name, module), f"{module}:{name}")


def python_object(
    data: object, description: str | None = None, folder: str | None = None, inputs: Sequence[InputSpec] = ()
) -> Rows:
    """Read the samples from a Python object.

    The object is an iterable of feeds or (feed, label) pairs, a callable that returns such an iterable, or a data set
    with ``__len__`` and ``__getitem__``. A feed is a dict of arrays. For a model with one input, a feed may also be a
    single array, alone or in a tuple ``(x, y)`` or ``(x,)``. For a model with state, an item may also be a list of
    feeds or pairs, which is a sequence; each of them is a sample. An array is anything that NumPy converts, or that has
    a method ``numpy``. A column ``label`` or ``labels`` that is no input is the label if it holds numbers; otherwise it
    is dropped.

    The entries of a data set have no batch axis, and single arrays may have none. They get a batch axis of 1 if the
    input has one axis more. The items of an iterator, which can be read only once, are kept. A callable is called for
    each pass.

    Args:
        data: The object.
        description: Its name in messages; None for its type.
        folder: The folder that must be on ``sys.path`` while the object's code runs.
        inputs: The model's inputs. Without them a feed is a dict, and no column is dropped.

    Raises:
        DataError: The object has none of these forms.
    """
    name = description or f"{kind_of(data)} of feeds"
    if isinstance(data, Mapping):
        if hasattr(data, "column_names"):
            raise DataError(f"{name}: holds the splits {', '.join(map(str, data))}; pass one of them")
        many = "for arrays of many samples one feed for each, or the path of a .npz file"
        raise DataError(f"{name}: a single feed; pass [feed], or {many}")
    if isinstance(data, Iterator):
        data = _Replay(data)
    if any(spec.name == SEQUENCE and spec.optional for spec in inputs):
        data = _steps_of(data)
    if not _is_iterable(data) and not callable(data):
        place = "" if description is None else f"{description}: "
        raise DataError(f"{place}{kind_of(data)} is neither an iterable of feeds nor a callable")

    def read(picked: Picked) -> Iterator[Sample]:
        if picked is not None and not picked:
            return
        for index, item, entry in _guarded(_walk(data, picked), name, folder):
            where = f"{name}, sample {index}"
            step = item if isinstance(item, _Step) else _Step(item)
            sample = _as_sample(step.item, where, inputs, unbatched=entry)
            if step.sequence is not None:
                sample.feed[SEQUENCE] = np.asarray(step.sequence)
            yield sample

    return Rows(name, _length(data) if _is_iterable(data) else None, read, random=_is_indexed(data), foreign=True)


@dataclass(frozen=True, slots=True)
class _Step:
    """An item of a sequence.

    Attributes:
        item: The feed or pair.
        sequence: The number of the sequence; None if the item is not in a list of its own.
    """

    item: object
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class _Steps:
    """The items of an iterable, with those of lists in it one by one."""

    items: Iterable[object]

    def __iter__(self) -> Iterator[_Step]:
        """Yield the steps."""
        for number, item in enumerate(_closed(self.items)):
            if _is_sequence(item):
                yield from (_Step(each, number) for each in item)
            else:
                yield _Step(item)


def _is_sequence(item: object) -> TypeGuard[list[object]]:
    """Return whether an item is a list of feeds or pairs; a list of torch tensors is a pair."""
    return isinstance(item, list) and bool(item) and isinstance(item[0], (Mapping, tuple, np.ndarray))


def _steps_of(data: object) -> object:
    """Return data for a model with state: the items of lists in them are samples.

    Other data sets and loaders with a length stay as they are: their items are samples.
    """
    if isinstance(data, list | tuple):
        return list(_Steps(data)) if any(map(_is_sequence, data)) else data
    if _is_indexed(data) or _is_stream(data) or _length(data) is not None:
        return data
    if _is_iterable(data):
        return _Steps(data)
    return (lambda: _Steps(_returned(data()))) if callable(data) else data


def _is_iterable(data: object) -> TypeGuard[Iterable[object]]:
    """Return whether an object can be iterated over, also if it only has ``__getitem__``."""
    return isinstance(data, Iterable) or hasattr(type(data), "__getitem__")


def _length(data: object) -> int | None:
    """Return the number of items; None if it is unknown before reading."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except (TypeError, NotImplementedError):  # a loader of a stream has __len__ but no length
        return None


def _is_indexed(data: object) -> TypeGuard[Sequence[object]]:
    """Return whether an object has a length, and any item can be read by its index."""
    if isinstance(data, Sequence):
        return True
    return hasattr(type(data), "__getitem__") and not _is_stream(data) and _length(data) is not None


def _is_stream(data: object) -> bool:
    """Return whether an object is a data set that can only be iterated over, even if it inherits other methods."""
    return any(kind.__name__ == "IterableDataset" for kind in type(data).__mro__)


class _Replay:
    """The items of an iterator. They are kept, so that they can be read again."""

    def __init__(self, items: Iterator[object]) -> None:
        self._coming = items
        self._kept: list[object] = []

    def __iter__(self) -> Iterator[object]:
        """Yield the kept items, then the remaining items of the iterator."""
        index = 0
        while True:
            if index == len(self._kept):
                try:
                    self._kept.append(next(self._coming))
                except StopIteration:
                    return
            yield self._kept[index]
            index += 1


def _walk(data: Any, picked: Picked) -> Iterator[tuple[int, object, bool]]:
    """Yield the picked items with their positions, and whether they are entries of a data set.

    An indexed object is read only at the picked positions. Positions behind its end are left out: the length of what a
    callable returns is not known when positions are picked.
    """
    if not _is_iterable(data):
        yield from _walk(_returned(data()), picked)
        return
    entries = _is_stream(data) or hasattr(data, "column_names")
    if _is_indexed(data):
        entries = entries or not isinstance(data, Sequence)
        positions = range(len(data)) if picked is None else takewhile(range(len(data)).__contains__, picked)
        yield from ((index, data[index], entries) for index in positions)
        return
    chosen: Collection[int] | None = picked if picked is None or isinstance(picked, range) else frozenset(picked)
    for index, item in enumerate(_closed(data)):
        if chosen is None or index in chosen:
            yield index, item, entries
        if picked and index == picked[-1]:
            return


def _closed(items: Iterable[object]) -> Iterator[object]:
    """Yield items. A generator that is not read to its end is closed, and what its cleanup raises is dropped.

    Python would print such an error with a traceback when it frees the generator.
    """
    iterator = iter(items)
    try:
        for item in iterator:  # noqa: UP028 - "yield from" would pass on the errors of closing
            yield item
    finally:
        if isinstance(iterator, GeneratorType):
            with suppress(BaseException):  # of the user's code, while Python frees the generator
                iterator.close()


def _returned(data: object) -> Iterable[object]:
    """Check the return value of a callable."""
    if not _is_iterable(data):
        raise TypeError(
            f"it returned {kind_of(data)}; feeds are wanted, such as a generator that yields dicts of arrays"
        )
    return data


def _guarded(
    items: Iterator[tuple[int, object, bool]], name: str, folder: str | None
) -> Iterator[tuple[int, object, bool]]:
    """Run the user's code item by item, with its folder on ``sys.path``. Its errors name the sample."""
    count = 0
    while True:
        with failing_at(f"{name}: failed at sample {count}"), on_path(folder):
            entry = next(items, None)
        if entry is None:
            return
        yield entry
        count += 1


def _as_sample(item: object, where: str, inputs: Sequence[InputSpec], *, unbatched: bool) -> Sample:
    """Convert a feed or a (feed, label) pair to a sample."""
    if isinstance(item, list) and any(callable(getattr(entry, "numpy", None)) for entry in item):
        item = tuple(item)  # torch's loader stacks tuples to lists of tensors
    feed, label = (*item, None)[:2] if isinstance(item, tuple) and len(item) in (1, 2) else (item, None)
    needed = required(inputs)
    if not isinstance(feed, Mapping) and len(needed) == 1 and (feed is not item or _is_tensor(feed)):
        feed, unbatched = {needed[0].name: feed}, True
    if not isinstance(feed, Mapping):
        got = f"a tuple of {len(item)}" if isinstance(item, tuple) else type(item).__name__
        hint = f"; the model has inputs {', '.join(spec.name for spec in needed)}" if len(needed) > 1 else ""
        if isinstance(item, list) and item and all(isinstance(each, Mapping) for each in item):
            option = "--state OUT=IN, in Python: DataSpec(state=['OUT=IN'])"
            hint = f"; a list of feeds is a sequence, for a model with a state ({option})"
        raise DataError(f"{where}: expected a dict of arrays or a (dict, label) pair, got {got}{hint}")
    feed = dict(feed)
    names = {spec.name for spec in inputs}
    for name in [name for name in LABELS if inputs and name in feed and name not in names]:
        column = feed.pop(name)
        label = column if label is None and _is_numeric(column) else label
    if inputs:
        check_names(feed, inputs, where)  # before any column is converted
    arrays = {str(name): as_array(value, f"{where}, input {name!r}") for name, value in feed.items()}
    sample = Sample(arrays, as_label(label, where), where)
    return with_batch_axis(sample, inputs) if unbatched else sample


def _is_tensor(value: object) -> bool:
    """Return whether a value is an array or tensor of any library."""
    return hasattr(value, "__array__") or callable(getattr(value, "numpy", None))


def _is_numeric(value: object) -> bool:
    """Return whether a value is a number or an array of numbers."""
    try:
        return as_array(value, "label").dtype.kind in "biuf"
    except DataError:
        return False


@contextmanager
def failing_at(place: str) -> Iterator[None]:
    """Convert any error of the user's code to one line that begins with `place`.

    Ctrl-C ends the process as everywhere else, so KeyboardInterrupt is passed on, whoever raised it.
    """
    try:
        yield
    except (RequantError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a reader that calls exit() would end the process without a message
        raise DataError(f"{place}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """Return an error of the user's code as one printable line; its text may fail too."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the text of an exception is code of its class
        text = ""
    line = printable(" ".join(f"{type(error).__name__}: {text[:REASON]}".split()).removesuffix(":"))
    return line if len(text) <= REASON else f"{line} ..."


@contextmanager
def on_path(folder: str | None) -> Iterator[None]:
    """Put a folder at the front of ``sys.path`` within the context."""
    if folder is None:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


@contextmanager
def _importing(what: str, folder: str | None) -> Iterator[None]:
    """Import with `folder` on ``sys.path``, and convert any error to one line."""
    try:
        with on_path(folder):
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # importing runs the user's code, which may raise anything, or call exit()
        hint = f"; a file of this folder is named {what}.py:NAME" if os.path.isfile(f"{what}.py") else ""
        raise RequantError(f"{what}: cannot be imported: {reason_of(error)}{hint}") from error


def _attribute(module: ModuleType, name: str, where: str) -> object:
    """Return an object of a module."""
    if not hasattr(module, name):
        raise UnknownNameError(f"object in {where}", name, (key for key in vars(module) if not key.startswith("_")))
    return getattr(module, name)
