"""A pytest plugin: the fixture ``requant_check``, and the option ``--requant-update`` to write baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

from ... import RequantError, UnknownNameError
from ...system.printable import sentence

if TYPE_CHECKING:
    from .run import Check

UPDATE = "--requant-update"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option."""
    group = parser.getgroup("requant", "INT8 models and their baselines")
    group.addoption(UPDATE, action="store_true", help="write the baselines of requant_check")


@pytest.fixture(scope="session")
def requant_check(request: pytest.FixtureRequest) -> Callable[..., Check]:
    """Return a function that checks a pair of models, or a requant.toml, and fails the test with the reasons.

    Its arguments are the path of a ``requant.toml`` and, by name, keys of the table ``[check]``; or the arguments of
    `requant.quantize.check`: the float model, the INT8 model, the data, the baseline and, by name, the attributes of
    `requant.quantize.CheckOptions`. It returns the `requant.quantize.Check`. With ``fail=False`` the test does not
    fail.
    """
    update = bool(request.config.getoption(UPDATE))

    def checked(*arguments: Any, fail: bool = True, **options: Any) -> Check:
        __tracebackhide__ = True
        try:
            found = _checked(arguments, options, update)
        except RequantError as error:
            error.args = (sentence(str(error)),)
            raise error from None
        if fail and not found.ok:
            pytest.fail(str(found), pytrace=False)
        return found

    return checked


def _checked(arguments: tuple[Any, ...], options: dict[str, Any], update: bool) -> Check:
    """Check a project, or a pair of models.

    Raises:
        RequantError: There are other arguments than one path, or two models and their data, or an unknown option.
    """
    if len(arguments) == 1:
        from .. import check_project

        return check_project(*arguments, update=update, overrides=options)
    from .run import CheckOptions, check

    if len(arguments) not in (3, 4):
        models = "the float model, the INT8 model, the data and perhaps the baseline"
        raise RequantError(f"requant_check takes the path of a requant.toml, or {models}")
    own = {"baseline": options.pop("baseline")} if "baseline" in options else {}
    known = [field.name for field in fields(CheckOptions)]
    for name in options:
        if name not in known:
            raise UnknownNameError("option of requant_check", name, known)
    return check(*arguments, **own, update=update, options=CheckOptions(**options))
