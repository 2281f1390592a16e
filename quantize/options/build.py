"""Convert values of `declared` options into the objects of the Python API."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from ... import RequantError, UnknownNameError
from ...calibration import DataSpec, executor_named
from ...calibration.execution import Execution
from ...transforms.int8.qparams import Scheme
from .declared import READING, Strategy
from .options import Options
from .selection import Selection

SELECTED = ("exclude_nodes", "exclude_ops", "include_ops")
INTEGERS = ("activation", "weight", "symmetric", "block_bits", "block_size")
ATTRIBUTES: Mapping[str, str] = {"lambda": "noise_weight"}
"""The attribute of `Options` by name of the option, if the names differ."""


def build_options(values: Mapping[str, Any]) -> Options:
    """Return the `Options` for the values of the command line or of a project.

    Args:
        values: By name of an option, the values as `Option.read` returns them; options that `Options` lacks are
            ignored.

    Raises:
        RequantError: A value is unknown or out of range, or two options contradict each other.
    """
    named = (*values.get("strategy", ()), *([Strategy.DYNAMIC] if values.get("dynamic") else []))
    overall, by_node = split_strategies(named)
    plain = {ATTRIBUTES.get(name, name): value for name, value in values.items()}
    if plain.get("costs") is not None:
        plain.setdefault("place", "estimated")
    return Options(
        selection=Selection(
            strategy=overall,
            strategies=by_node,
            **{name: frozenset(values[name]) for name in SELECTED if name in values},
        ),
        scheme=Scheme(**{name: values[name] for name in INTEGERS if name in values}),
        **{field.name: plain[field.name] for field in fields(Options) if field.name in plain},
    )


def split_strategies(texts: Iterable[str]) -> tuple[Strategy, dict[str, Strategy]]:
    """Return the strategy for all nodes, and strategies of single nodes, from ``STRATEGY`` and ``NODE=STRATEGY``.

    Raises:
        RequantError: A strategy is unknown, or there are several for all nodes.
    """
    known = [strategy.value for strategy in Strategy]
    overall, by_node = set(), {}
    for text in texts:
        node, equals, name = text.rpartition("=")  # the name of a node may contain "="
        if name not in known:
            raise UnknownNameError("strategy", name, known)
        if equals:
            by_node[node] = Strategy(name)
        else:
            overall.add(Strategy(name))
    if len(overall) > 1:
        raise RequantError(f"one strategy for all, not {len(overall)}: {', '.join(sorted(overall))}")
    return (overall.pop() if overall else Strategy.AUTO), by_node


def build_data(values: Mapping[str, Any]) -> str | DataSpec | None:
    """Return the data source of the options ``data`` and `READING`; None without data.

    Raises:
        RequantError: There is an option of `READING`, but no data.
    """
    data: str | None = values.get("data")
    reading = {each.name: each.read(values[each.name]) for each in READING if values.get(each.name) is not None}
    if not reading:
        return data
    if data is None:
        raise RequantError(f"--{next(iter(reading))} needs --data SRC")
    return DataSpec(data, **reading)


@contextmanager
def open_execution(values: Mapping[str, Any], output: str | os.PathLike[str], **settings: Any) -> Iterator[Execution]:
    """Start the workers of the options `WORKERS`, and stop them at the end.

    Args:
        values: The given options.
        output: The file that the run writes. A model that exists only in memory is written beside this file,
            because workers on other machines can probably read that folder.
        settings: Further arguments of `Execution`.

    Raises:
        RequantError: The executor is unknown, does not start, or does not use the scheduler.
    """
    scheduler, workers = values.get("scheduler"), values.get("workers")
    name = values.get("executor", "threads" if scheduler is None else "dask")
    if scheduler is not None and name != "dask":
        raise RequantError(f"--scheduler needs --executor dask, not {name}")
    with executor_named(name, workers, scheduler) as executor:
        yield Execution(
            executor=executor,
            workers=workers,
            memory_limit=values.get("memory_limit"),
            scratch=Path(output).absolute().parent,
            **settings,
        )
