"""A pytest plugin: the fixture ``requant_check``, and ``--requant-update``, which writes baselines."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .run import Check

UPDATE = "--requant-update"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option."""
    group = parser.getgroup("requant", "INT8 models against their baselines")
    group.addoption(UPDATE, action="store_true", help="write the baselines that requant_check judges by")


@pytest.fixture(scope="session")
def requant_check(request: pytest.FixtureRequest) -> Callable[..., Check]:
    """Return what checks a pair of models, or a requant.toml, and fails the test with the reasons.

    It is called with the path of a ``requant.toml``, or with the arguments of `requant.quantize.check`: the float
    model, the INT8 model, the data, the baseline and, by name, the attributes of `requant.quantize.CheckOptions`.
    It returns the `requant.quantize.Check`. With ``fail=False`` the test decides itself what to make of it.
    """
    update = bool(request.config.getoption(UPDATE))

    def checked(*arguments: Any, fail: bool = True, **options: Any) -> Check:
        __tracebackhide__ = True
        if len(arguments) == 1:
            from .project import asked_project, check_project

            found = check_project(asked_project(os.fspath(arguments[0]), options), update=update)
        else:
            from .run import CheckOptions, check

            own = {"baseline": options.pop("baseline")} if "baseline" in options else {}
            found = check(*arguments, **own, update=update, options=CheckOptions(**options))
        if fail and not found.ok:
            pytest.fail(str(found), pytrace=False)
        return found

    return checked
