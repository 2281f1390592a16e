"""The policy that decides which units become int8. It is computed once from the options."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .options import Options


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy that decides which units become int8.

    Attributes:
        how: ``plan``: a plan file. ``rules``: one rule per operator. ``estimated``: built-in costs, or costs from a
            file. ``measured``: costs and times measured now. ``all``: every unit with an integer kernel is int8.
        all_int8: Whether every unit that can be int8 is calibrated; False calibrates the units that are int8 by rules.
        zero_points: Whether int8 weights may have a zero point.
        portable: Whether the model has only what other runtimes know too.
        timed: Whether the speed in the runtime of the request decides.
        native: Whether units may be native operators; a plan file may name them where their library is not here.
        attention: Whether attention is one unit, which may be a native operator.
        plan: The plan file; None without one.
        costs: The file of costs; None without one.
    """

    how: str
    all_int8: bool
    zero_points: bool
    portable: bool
    timed: bool
    native: bool
    attention: bool
    plan: str | os.PathLike[str] | None
    costs: str | os.PathLike[str] | None

    @classmethod
    def of(cls, options: Options, *, exact: bool, native: bool, attention: bool) -> Policy:
        """Return the policy of the options.

        Args:
            options: The options.
            exact: Whether the target adds products of 8 bits exactly. Only then can uint8 activations multiply int8
                weights with a zero point without saturation.
            native: Whether the library of the native operators is here.
            attention: Whether the plan file, if there is one, has attention as one unit.
        """
        native = options.may_be_native and (native or options.plan is not None)
        how = options.place if options.costs is None else "estimated"
        how = "rules" if options.portable else how
        types, portable = (options.scheme.activation, options.scheme.weight), options.writes_portable
        return cls(
            how=how if options.plan is None else "plan",
            all_int8=options.place != "rules" or options.plan is not None,
            zero_points=exact and not portable and types == ("u8", "s8"),
            portable=portable,
            timed=not options.portable,
            native=native,
            attention=native and attention and options.kernels != "exact" and options.place != "all",
            plan=options.plan,
            costs=options.costs,
        )
