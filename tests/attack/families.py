"""All tables of attacks."""

from __future__ import annotations

from .case import Family
from .data import DATA
from .files import FILES
from .models import MODELS
from .places import FAMILY as PLACES

FAMILIES: dict[str, Family] = {"models": MODELS, "data": DATA, "files": FILES, "places": PLACES}
