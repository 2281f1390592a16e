"""Where int8 pays: costs per unit, and the cheapest assignment of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Placement:
    """How a plan was found.

    Attributes:
        how: ``rules``, ``estimated``, ``measured``, ``all`` or ``plan``.
        predicted_ms: The sum of the costs of the plan, in milliseconds; None where nothing was measured.
        tried: Milliseconds of each plan that was timed, by name.
    """

    how: str = "rules"
    predicted_ms: float | None = None
    tried: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {"how": self.how, "predicted_ms": self.predicted_ms, "tried_ms": dict(self.tried)}
