"""Names that nobody knows: the nearest ones, or what there is."""

import pickle

import pytest

from requant import MOST_OF_NAMES, RequantError, UnknownNameError, near
from requant.transforms import TransformError, VerifyError

NAMES = [f"layer{number}/{'Conv' * 5}" for number in range(10, 20)]


def test_near_names_are_proposed() -> None:
    assert near("resnet", ["ResNet", "relu", "resnets"]) == "; did you mean 'ResNet' or 'resnets'?"


def test_what_there_is_is_listed_up_to_a_length() -> None:
    assert near("x", []) == "; there are none"
    assert near("x", ["b" * 300, "c"]) == f"; there are: {'b' * 300}, ... (2 in all)"
    shown = near("x", NAMES).removeprefix("; there are: ")
    listed, _, rest = shown.partition(", ... ")
    assert rest == "(10 in all)"
    assert listed.split(", ") == NAMES[:6]
    assert len(listed) <= MOST_OF_NAMES < len(listed) + len(f", {NAMES[6]}")


@pytest.mark.parametrize(
    "error",
    [RequantError("no"), UnknownNameError("node", "convv1", ["conv1"]), TransformError("no"), VerifyError("no")],
    ids=lambda error: type(error).__name__,
)
def test_processes_send_errors_to_each_other(error: RequantError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
