"""The runtimes that run models here: their names, how they load a model, and what they tell of a run.

ONNX Runtime runs the float model for calibration, corrections, evidence and the outputs that INT8 is compared with.
The runtime of a request (`--runtime`) runs what is compared and timed, and decides by its times what becomes int8.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ... import RequantError, UnknownNameError
from ...calibration.model.session import Array, ModelSource, describe, open_without_library
from ...system.given import normalise_fields
from .machine import ONNX_RUNTIME, Machine
from .profile import Profile, profiled
from .session import Runner

ONNXRUNTIME, OPENVINO, DEFAULT = "onnxruntime", "openvino", "default"


class LoadedModel(Protocol):
    """A model in a runtime: called with a feed, it returns its outputs by name."""

    outputs: tuple[str, ...]

    def __call__(self, feed: Mapping[str, Array]) -> dict[str, Any]:
        """Run one feed.

        Raises:
            RequantError: The runtime refuses the feed.
        """


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells a runtime from others: results and times of one say nothing of another.

    Attributes:
        title: Its name.
        version: Its version.
        precision: The type in which it computes float operators, if that is not always float32: ``bf16``.
    """

    title: str
    version: str
    precision: str = ""

    def __str__(self) -> str:
        """Return ``"OpenVINO 2026.4.1 (bf16)"``."""
        return f"{self.title} {self.version}{f' ({self.precision})' if self.precision else ''}"


class Runtime(ABC):
    """A program that runs models on the CPU.

    Attributes:
        fuses: Whether a kernel of a product, in float or in integers, may compute the float operators behind it.
    """

    fuses = False

    @property
    @abstractmethod
    def identity(self) -> Identity:
        """Its name, version and precision."""

    @abstractmethod
    def open(self, model: ModelSource, *, threads: int = 0, lean: bool = False) -> LoadedModel:
        """Load a model.

        Args:
            model: The model.
            threads: Threads inside one operator; 0 leaves the choice to the runtime.
            lean: Whether the model is for a few runs, so that weights need not be packed.

        Raises:
            RequantError: The runtime cannot load it.
        """

    @abstractmethod
    def profile(self, model: ModelSource, feed: Mapping[str, Array], *, threads: int, times: int) -> Profile:
        """Run a model some times, and return what ran and how long it took.

        Raises:
            RequantError: The model cannot be loaded or run.
        """

    def machine(self, threads: int) -> Machine:
        """Return this machine with this runtime, to which measured costs belong."""
        return Machine.here(threads)


class OnnxRuntime(Runtime):
    """ONNX Runtime's CPU provider, with the native operators where their library is."""

    @property
    def identity(self) -> Identity:
        """Its name and version."""
        import onnxruntime

        return Identity(ONNX_RUNTIME, onnxruntime.__version__)

    def open(self, model: ModelSource, *, threads: int = 0, lean: bool = False) -> Runner:
        """Load a model; see `Runtime.open`."""
        return Runner(model, threads=threads, lean=lean)

    def profile(self, model: ModelSource, feed: Mapping[str, Array], *, threads: int, times: int) -> Profile:
        """Run a model under the profiler; see `Runtime.profile`."""
        return profiled(model, feed, threads=threads, times=times)


class WithoutLibrary(OnnxRuntime):
    """ONNX Runtime in a program that does not register the library of the native operators: their bodies run."""

    def open(self, model: ModelSource, *, threads: int = 0, lean: bool = False) -> Runner:
        """Load a model; see `Runtime.open`."""
        return Runner.over(open_without_library(model, threads=threads), describe(model))


STOCK = OnnxRuntime()
BODIES = WithoutLibrary()


@dataclass(frozen=True, slots=True)
class Setting:
    """How models run.

    Attributes:
        threads: Threads inside one operator while they are timed; 0 leaves the choice to the runtime.
        runtime: ``onnxruntime`` or ``openvino``.
        precision: In which type OpenVINO computes float operators: ``f32``, or its ``default``.
    """

    threads: int = 1
    runtime: str = ONNXRUNTIME
    precision: str = DEFAULT

    def __str__(self) -> str:
        """Return ``"openvino (f32)"``."""
        return self.runtime if self.precision == DEFAULT else f"{self.runtime} ({self.precision})"

    def __post_init__(self) -> None:
        """Refuse values of another type, and a number of threads below 0.

        Raises:
            RequantError: There is one.
        """
        normalise_fields(self)
        if self.threads < 0:
            raise RequantError(f"threads must be 0 (the runtime chooses) or more, not {self.threads}")

    def opened(self) -> Runtime:
        """Return the runtime.

        Raises:
            RequantError: It is not installed, or ONNX Runtime is to compute in another type.
        """
        if self.runtime == ONNXRUNTIME and self.precision != DEFAULT:
            raise RequantError(f"the precision {self.precision} needs the runtime openvino")
        return runtime_named(self.runtime, self.precision)


PLAIN = Setting()
"""One thread in ONNX Runtime."""


def runtime_named(name: str, precision: str = DEFAULT) -> Runtime:
    """Return a runtime.

    Args:
        name: ``onnxruntime`` or ``openvino``.
        precision: In which type OpenVINO computes float operators: ``f32``, or its ``default``.

    Raises:
        UnknownNameError: There is none of this name.
        RequantError: It is not installed.
    """
    if name == ONNXRUNTIME:
        return STOCK
    if name != OPENVINO:
        raise UnknownNameError("runtime", name, (ONNXRUNTIME, OPENVINO))
    from .openvino import OpenVino

    return OpenVino(precision)


class Sessions:
    """A model with its open sessions: one for each number of threads, opened at the first use.

    Attributes:
        source: The model.
        runtime: What runs it.
        keeps: Whether sessions stay open.
    """

    def __init__(self, source: ModelSource, *, keep: bool = True, runtime: Runtime = STOCK) -> None:
        """Open nothing yet; without `keep` each use opens a session, so that no memory is held between two uses."""
        self.source, self.keeps, self.runtime = source, keep, runtime
        self._loaded: dict[int, LoadedModel] = {}

    def runner(self, threads: int) -> LoadedModel:
        """Return the model in a session with so many threads; 0 leaves the choice to the runtime.

        Raises:
            RequantError: The runtime cannot load it.
        """
        loaded = self._loaded.get(threads) or self.fresh(threads=threads)
        if self.keeps:
            self._loaded[threads] = loaded
        return loaded

    def fresh(self, *, threads: int = 0, lean: bool = False) -> LoadedModel:
        """Return the model in a session of its own, which is closed when nothing refers to it.

        Raises:
            RequantError: The runtime cannot load it.
        """
        return self.runtime.open(self.source, threads=threads, lean=lean)
