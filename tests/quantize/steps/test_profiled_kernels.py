"""The times of the kernels of the written model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from requant.quantize.runtime.profile import KernelRun, Profile
from requant.quantize.steps.deliver import MORE_PROFILES, profiled_kernels


def profile(*milliseconds: float, cpu: float) -> Profile:
    """A profile of a model of kernels with these times, in a run with so much CPU time, each in milliseconds."""
    runs = [KernelRun(f"k{index}", "", "Conv", 1e3 * ms, 0, ()) for index, ms in enumerate(milliseconds)]
    return Profile(tuple(runs), 1e3 * sum(milliseconds), 1e3 * cpu)


def kernels_of(*profiles: Profile, milliseconds: float | None = 60.0) -> tuple[list[float], int]:
    """Return the milliseconds of each kernel from profiles that follow each other, and how many were made.

    Args:
        profiles: The profiles.
        milliseconds: The time of a run without the profiler.
    """
    made = iter(profiles)
    left = [*profiles]

    def take(*_: object, **__: object) -> Profile:
        left.pop()
        return next(made)

    job: Any = SimpleNamespace(runtime=SimpleNamespace(profile=take), options=SimpleNamespace(threads=1))
    found = profiled_kernels(job, b"", {}, milliseconds)
    return [run.microseconds / 1e3 for run in found], len(profiles) - len(left)


def test_kernels_without_waiting_are_profiled_once() -> None:
    assert kernels_of(profile(30.0, 28.0, cpu=60.0), profile(1.0, 1.0, cpu=60.0)) == ([30.0, 28.0], 1)


def test_kernels_that_waited_are_profiled_again() -> None:
    assert kernels_of(profile(30.0, 90.0, cpu=61.0), profile(31.0, 28.0, cpu=60.0)) == ([30.0, 28.0], 2)


def test_the_times_of_kernels_that_always_wait_add_up_to_the_cpu_time() -> None:
    """The float nodes of a model of 59 ms took 131 ms together, on a machine with other work."""
    busy = [profile(70.0, 110.0, cpu=60.0)] * (MORE_PROFILES + 1)
    found, count = kernels_of(*busy)
    assert count == MORE_PROFILES + 1
    assert found == pytest.approx([60.0 * 70 / 180, 60.0 * 110 / 180])


def test_what_the_profiler_takes_is_taken_off() -> None:
    """The 2,720 nodes of a model of 7.8 ms took 12.8 ms under the profiler."""
    profiles = profile(8.0, 4.0, cpu=13.0), profile(1.0, 1.0, cpu=13.0)
    assert kernels_of(*profiles, milliseconds=6.0) == ([4.0, 2.0], 1)
    assert kernels_of(*profiles, milliseconds=None) == ([8.0, 4.0], 1)
