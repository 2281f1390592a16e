"""The registry of named graph rewrites: the signature of a transform's function is its list of options."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from onnx_ir import Model

from .. import RequantError, UnknownNameError
from ..system.given import check_kind, kind_of


class TransformError(RequantError):
    """A transform cannot rewrite this model as requested."""


class PipelineError(RequantError):
    """A pipeline that cannot be run.

    Args:
        message: The error, in one line.
        text: The pipeline; when given, the message ends with the place of the error in its line.
        at: The place of the error, as an offset into `text`.
    """

    def __init__(self, message: str, text: str | None = None, at: int = 0) -> None:
        """Compose the message."""
        if text is not None:
            start = text.rfind("\n", 0, at) + 1
            line = text[start:].partition("\n")[0]
            message = f"{message} (at character {at - start + 1} of {line!r})"
        super().__init__(message)


class LeftAlone(Exception):  # noqa: N818 - not an error: it ends the check of one candidate
    """The transform leaves one candidate alone. A transform raises and catches this; the message is the skip code."""


@dataclass
class Change:
    """What one run of a transform did.

    Attributes:
        applied: The number of rewrites; 0 means that the model did not change.
        skipped: The number of candidates left alone, by reason in kebab-case (``"weight-shared"``).
    """

    applied: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def skip(self, reason: str) -> None:
        """Count one candidate that is left alone."""
        self.skipped[reason] += 1

    def __str__(self) -> str:
        """Return ``"3 applied, 1 weight-shared"``."""
        return ", ".join([f"{self.applied} applied", *(f"{n} {why}" for why, n in sorted(self.skipped.items()))])


@dataclass(frozen=True, slots=True)
class Option:
    """A keyword-only argument of a transform's function.

    Attributes:
        name: The argument's name.
        type: ``int``, ``float``, ``bool``, ``str``, or ``tuple`` for names that may be repeated.
        default: The default value; `REQUIRED` when there is none.
    """

    name: str
    type: type
    default: Any


REQUIRED: Any = inspect.Parameter.empty
OPTION_TYPES = (int, float, bool, str, tuple)
Function = Callable[..., Change]


@dataclass(frozen=True, slots=True)
class Transform:
    """A registered rewrite.

    Attributes:
        name: The name in a pipeline.
        function: ``function(model, **options) -> Change``; it edits its argument in place.
        options: The options by name.
        after: Transforms that must come before this one in a pipeline that has both.
        changes_io: Whether the transform may change the graph's inputs or outputs.
        changes_values: Whether the graph's outputs may change by more than float rounding.
        takes_unsorted: Whether the transform accepts a graph whose nodes are not in execution order.
    """

    name: str
    function: Function
    options: Mapping[str, Option]
    after: tuple[str, ...] = ()
    changes_io: bool = False
    changes_values: bool = False
    takes_unsorted: bool = False

    @property
    def doc(self) -> str:
        """The docstring of the function: summary, Before, After, Left alone."""
        return inspect.getdoc(self.function) or ""

    @property
    def own(self) -> bool:
        """Whether it belongs to this package, and not to a plug-in."""
        return self.function.__module__.startswith(f"{__package__}.")

    def __call__(self, model: Model, **options: Any) -> Change:
        """Apply the rewrite to `model`, in place.

        Raises:
            RequantError: It is no model, an option is unknown, missing or of another type, or it failed. Errors
                of a plug-in are no errors of this program.
        """
        check_kind(model, Model, f"{self.name} takes an onnx_ir.Model, as onnx_ir.load returns it")
        self._check_options(options)
        if self.own:
            return self.function(model, **options)
        try:
            change = self.function(model, **options)
        except RequantError:
            raise
        except (Exception, SystemExit) as error:  # the code of others may raise anything
            text = " ".join(str(error).split())
            raise RequantError(f"{self.function.__module__}: {type(error).__name__}: {text}") from error
        if not isinstance(change, Change):
            raise RequantError(f"{self.function.__module__}: returned {type(change).__name__}, not a Change")
        return change

    def _check_options(self, given: Mapping[str, Any]) -> None:
        """Refuse options that a caller from Python gets wrong; a pipeline has checked its own.

        Raises:
            RequantError: An option is unknown, missing or of another type.
        """
        for name, value in given.items():
            if name not in self.options:
                raise UnknownNameError(f"option of {self.name}", name, self.options)
            option = self.options[name]
            kinds = (option.type, *{float: (int,), tuple: (list,)}.get(option.type, ()))
            if value is not option.default:
                check_kind(value, kinds, f"{self.name}: {name} must be {kind_of(option.type())}")
        missing = [name for name, option in self.options.items() if option.default is REQUIRED and name not in given]
        if missing:
            raise TransformError(f"{self.name}: needs {', '.join(missing)}")


COMMON = "ignore_errors"
"""The name of the option that every step of a pipeline has."""

REGISTRY: dict[str, Transform] = {}


def transform(
    name: str,
    *,
    after: tuple[str, ...] = (),
    changes_io: bool = False,
    changes_values: bool = False,
    takes_unsorted: bool = False,
) -> Callable[[Function], Function]:
    """Register a function as the transform `name`.

    The function takes the model and keyword-only options with type annotations, and returns a `Change`. An option
    without a default is required. ``tuple[str, ...]`` options may be repeated: ``remove_nodes(op=A, op=B)``.

    Raises:
        TypeError: The name is taken, or no pipeline can have it,
            the docstring is missing, or an option has a type outside `OPTION_TYPES`.
    """

    def register(function: Function) -> Function:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise TypeError(f"{name!r} is no name of a transform: small letters, digits and underscores")
        if name in REGISTRY and _place(REGISTRY[name].function) != _place(function):
            raise TypeError(f"two transforms named {name!r}")
        if not inspect.getdoc(function):
            raise TypeError(f"transform {name!r} has no docstring")
        if isinstance(after, str):
            raise TypeError(f"transform {name!r}: after must be a tuple of names, not the text {after!r}")
        options = _options(name, function)
        REGISTRY[name] = Transform(name, function, options, after, changes_io, changes_values, takes_unsorted)
        return function

    return register


def _place(function: Function) -> tuple[str, str]:
    """Return where a function is defined; a module that is loaded again defines it again."""
    return function.__module__, function.__qualname__


def _options(name: str, function: Function) -> dict[str, Option]:
    """Read the options of a transform from its signature."""
    hints, parameters = get_type_hints(function), list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind in (parameters[0].KEYWORD_ONLY, parameters[0].VAR_KEYWORD):
        raise TypeError(f"transform {name!r}: the first parameter must be the model")
    options = {}
    for parameter in parameters[1:]:
        hint = _without_none(hints.get(parameter.name))
        kind = get_origin(hint) or hint
        if parameter.kind is not parameter.KEYWORD_ONLY:
            raise TypeError(f"transform {name!r}: option {parameter.name!r} must be keyword-only")
        if kind not in OPTION_TYPES or (kind is tuple and get_args(hint) != (str, ...)):
            raise TypeError(f"transform {name!r}: option {parameter.name!r} has no type that a pipeline can write")
        if parameter.name == COMMON:
            raise TypeError(f"transform {name!r}: {COMMON!r} is an option of every step")
        if parameter.default not in (parameter.empty, None) and not isinstance(parameter.default, kind):
            raise TypeError(f"transform {name!r}: the default of {parameter.name!r} is no {kind.__name__}")
        options[parameter.name] = Option(parameter.name, kind, parameter.default)
    return options


def _without_none(hint: Any) -> Any:
    """Return ``T`` for ``T | None``, the type of an optional argument; any other type is returned unchanged."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return kinds[0] if get_origin(hint) is UnionType and len(kinds) == 1 else hint
