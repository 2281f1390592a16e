"""Python objects as data: iterables and callables, given directly or by the name of a file or module."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from .. import RequantError, UnknownNameError
from .samples import DataError, Picked, Rows, Sample, as_array, as_label


def python_file(path: str, name: str) -> Rows:
    """Take the samples from an object of a Python file, which is run.

    Raises:
        RequantError: The file is missing or fails, or has no such object.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{path}: no such file")
    parent = str(file.resolve().parent)
    spec = importlib.util.spec_from_file_location(f"requant_source_{file.stem}", file)
    assert spec is not None  # there is one for every name that ends in .py, with a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses, among others, look their module up
    with _importing(path, parent):
        spec.loader.exec_module(module)
    return python_object(_attribute(module, name, path), f"{path}:{name}", parent)


def python_module(module: str, name: str) -> Rows:
    """Take the samples from an object of an importable module.

    Raises:
        RequantError: The module cannot be imported, or has no such object.
    """
    here = os.getcwd()  # a console script, unlike `python -m`, does not see the current folder
    with _importing(module, here):
        imported = importlib.import_module(module)
    return python_object(_attribute(imported, name, module), f"{module}:{name}", here)


def python_object(data: object, description: str | None = None, folder: str | None = None) -> Rows:
    """Take the samples from an iterable of feeds or (feed, label) pairs, or a callable that returns one.

    An iterator, which can be read once, is kept as it is read. A callable is called for each pass.

    Args:
        data: The object.
        description: How messages call it; its type if None.
        folder: What must be on ``sys.path`` while the object's code runs.

    Raises:
        DataError: It is neither.
    """
    name = description or f"a {type(data).__name__} of feeds"
    if isinstance(data, Mapping):
        raise DataError(f"{name}: a single feed; give an iterable of feeds, for one: [feed]")
    if isinstance(data, Iterator):
        data = _Replay(data)
    if not isinstance(data, Iterable) and not callable(data):
        raise DataError(f"{name}: a {type(data).__name__} is neither an iterable of feeds nor a callable")
    length = len(data) if isinstance(data, Sized) and isinstance(data, Iterable) else None

    def read(picked: Picked) -> Iterator[Sample]:
        for index, item in _guarded(_walk(data, picked), name, folder):
            yield _as_sample(item, f"{name}, sample {index}")

    return Rows(name, length, read)


class _Replay:
    """An iterator's items, kept as they come, so that they can be read again."""

    def __init__(self, items: Iterator[object]) -> None:
        self._coming = items
        self._kept: list[object] = []

    def __iter__(self) -> Iterator[object]:
        """Yield what was kept, then what still comes."""
        index = 0
        while True:
            if index == len(self._kept):
                try:
                    self._kept.append(next(self._coming))
                except StopIteration:
                    return
            yield self._kept[index]
            index += 1


def _walk(data: Iterable[object] | Callable[[], Iterable[object]], picked: Picked) -> Iterator[tuple[int, object]]:
    """Yield the picked items with their positions; a sequence is asked for no other."""
    if isinstance(data, Sequence):
        yield from ((index, data[index]) for index in (range(len(data)) if picked is None else picked))
        return
    items = data if isinstance(data, Iterable) else data()
    wanted: Collection[int] | None = picked if picked is None or isinstance(picked, range) else frozenset(picked)
    for index, item in enumerate(items):
        if wanted is None or index in wanted:
            yield index, item
        if picked and index == picked[-1]:
            return


def _guarded(items: Iterator[tuple[int, object]], name: str, folder: str | None) -> Iterator[tuple[int, object]]:
    """Run the user's code step by step, with its folder on the path; its errors say where they come from."""
    count = 0
    while True:
        try:
            with _on_path(folder):
                entry = next(items, None)
        except RequantError:
            raise
        except (Exception, SystemExit) as error:  # a reader that calls exit() would end us without a word
            message = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(f"{name}: failed at sample {count}: {message}") from error
        if entry is None:
            return
        yield entry
        count += 1


def _as_sample(item: object, where: str) -> Sample:
    """Read a feed or a (feed, label) pair."""
    feed, label = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
    if not isinstance(feed, Mapping):
        raise DataError(f"{where}: expected a dict of arrays or a (dict, label) pair, got {type(item).__name__}")
    arrays = {str(name): as_array(value, f"{where}, input {name!r}") for name, value in feed.items()}
    return Sample(arrays, as_label(label, where), where)


@contextmanager
def _on_path(folder: str | None) -> Iterator[None]:
    """Put a folder in front of ``sys.path`` for a while."""
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
def _importing(what: str, folder: str) -> Iterator[None]:
    """Turn whatever importing raises into one line."""
    try:
        with _on_path(folder):
            yield
    except (Exception, SystemExit) as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise RequantError(f"{what}: cannot be imported: {message}") from error


def _attribute(module: ModuleType, name: str, where: str) -> object:
    """Return an object of a module."""
    if not hasattr(module, name):
        raise UnknownNameError(f"object in {where}", name, (key for key in vars(module) if not key.startswith("_")))
    return getattr(module, name)
