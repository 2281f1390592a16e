"""The text log as ranges of a float model: out and in, its variants, refusals; and one truth with the transforms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant import RequantError
from requant.calibration import MinMax
from requant.calibration.range_files.log import Log, check_names, is_log, load_log, log_text
from requant.system.log_records import MIN_MAX
from requant.transforms.parts import min_max_log

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
unfit = st.sampled_from([";", "\n", "\r", "a__print__b", "", "\x1b[31m", "\x9b", "a\u202eb", "a\u200bb", "\ud800"])
fit = st.text(st.characters(codec="utf-8", exclude_characters=";"), min_size=1).filter(
    lambda t: t.isprintable() and "__print__" not in t
)


def written(folder: Path, text: str) -> Path:
    path = folder / "min_max.log"
    path.write_text(text, encoding="utf-8")
    return path


@given(ends=st.dictionaries(fit, st.tuples(floats, floats), min_size=1))
def test_what_is_written_reads_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, ends: dict[str, tuple[float, float]]
) -> None:
    statistics = {name: MinMax(min(pair) + 0.0, max(pair) + 0.0, 1) for name, pair in ends.items()}
    path = written(tmp_path_factory.getbasetemp(), log_text(statistics))
    assert load_log(path).ranges == {name: (seen.lo, seen.hi) for name, seen in statistics.items()}
    assert load_log(path).rejected == 0


def test_the_line() -> None:
    assert log_text({"pool1_out": MinMax(-0.5, float(np.float32(0.1)), 3)}) == (
        ";pool1_out__print__;__requant_min_max:[-0.5][0.10000000149011612]\n"
    )


def test_the_order_of_the_statistics_does_not_change_the_log() -> None:
    one, other = MinMax(-1.0, 2.0, 1), MinMax(0.0, 3.0, 1)
    assert log_text({"b": one, "a": other}) == log_text({"a": other, "b": one})


def test_a_log_reads_in_the_same_way_as_by_the_transforms(tmp_path: Path) -> None:
    path = written(tmp_path, log_text({"a": MinMax(-1.0, 2.0, 1)}))
    assert min_max_log.read_log(path, MIN_MAX).values == {"a": ((-1.0, 2.0),)}


@given(name=unfit)
def test_names_that_a_log_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(RequantError, match="a log cannot contain the name of tensor"):
        check_names(["a", name])


ONE = ";a__print__;__requant_min_max:[-1.5][2]"
READ = {
    "one record": (f"{ONE}\n", {"a": (-1.5, 2.0)}),
    "several records": (f"{ONE}\n;a__print__;__requant_min_max:[-3][1]\n", {"a": (-3.0, 2.0)}),
    "min and max apart": (";a__print__;__min:[1]\n;a__print__;__max:[4]\n;a__print__;__min:[0.5]\n", {"a": (0.5, 4.0)}),
    "all kinds": (f"{ONE}\n;a__print__;__max:[9]\n", {"a": (-1.5, 9.0)}),
    "a time stamp before it": (f"I0108 21:45:42.261883 1972 logging_ops.cc:79] {ONE}\n", {"a": (-1.5, 2.0)}),
    "two on one line": (f"{ONE};b/c:0__print__;__requant_min_max:[0][1e-3]", {"a": (-1.5, 2.0), "b/c:0": (0.0, 0.001)}),
    "other lines": (
        f"hello\n{ONE}\n;a__print__;__KL:[5]\n;a__print__;[1][2]\n;;__print__\n\n;;;\n",
        {"a": (-1.5, 2.0)},
    ),
    "no line feed": (ONE, {"a": (-1.5, 2.0)}),
    "minus zero": (";a__print__;__requant_min_max:[-0.0][1]", {"a": (0.0, 1.0)}),
}


@pytest.mark.parametrize(("text", "ranges"), READ.values(), ids=READ)
def test_records_of_a_tensor_are_one_range(tmp_path: Path, text: str, ranges: dict[str, tuple[float, float]]) -> None:
    found = load_log(written(tmp_path, text))
    assert found == Log(str(tmp_path / "min_max.log"), ranges)
    assert str(found.ranges) == str(ranges)  # 0.0 is not -0.0


BAD = {
    "cut short": "[1.0",
    "one value": "[1.0]",
    "three values": "[1][2][3]",
    "no number": "[a][b]",
    "NaN": "[nan][1]",
    "infinity": "[0][inf]",
    "beyond float32": "[0][1e39]",
    "turned round": "[2][1]",
}


@pytest.mark.parametrize("values", BAD.values(), ids=BAD)
def test_records_that_cannot_be_read_are_counted(tmp_path: Path, values: str) -> None:
    found = load_log(written(tmp_path, f";b__print__;__requant_min_max:{values}\n{ONE}\n"))
    assert (found.ranges, found.rejected) == ({"a": (-1.5, 2.0)}, 1)


TORN_RECORDS = {
    "cut in the kind": f"{ONE}\n;b__print__;__requant_mi",
    "cut behind the name": f"{ONE}\n;b__print__\n",
    "cut in the name": f"{ONE}\n;conv2/b",
    "without a name": f"__print__;__requant_min_max:[1][2]\n{ONE}\n",
    "its beginning is lost": f"int__;__requant_min_max:[1][2]\n{ONE}\n",
    "another begins in it": f"{ONE};b__print__;__m{ONE}\n",
}


@pytest.mark.parametrize("text", TORN_RECORDS.values(), ids=TORN_RECORDS)
def test_parts_of_records_are_counted(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    found = load_log(path)
    assert (found.ranges, found.rejected) == ({"a": (-1.5, 2.0)}, 1)
    assert min_max_log.read_log(path, MIN_MAX).rejected == 1


REFUSED = {
    "empty": ("", "min_max.log: no range in this log"),
    "no record": ("hello\n", "min_max.log: no range in this log"),
    "none that can be read": (";a__print__;__requant_min_max:[2][1]\n", "(unreadable records: 1)"),
    "minima only": (";a__print__;__min:[1]\n", "min_max.log: tensor 'a' has only minima"),
    "maxima only": (f"{ONE}\n;b__print__;__max:[1]\n", "min_max.log: tensor 'b' has only maxima"),
    "apart and turned round": (
        ";a__print__;__min:[2]\n;a__print__;__max:[1]\n",
        "tensor 'a' has minima above its maxima",
    ),
}


@pytest.mark.parametrize(("text", "problem"), REFUSED.values(), ids=REFUSED)
def test_logs_without_ranges_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(RequantError) as caught:
        load_log(written(tmp_path, text))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_log_is_told_from_a_range_file(tmp_path: Path) -> None:
    assert is_log(written(tmp_path, ONE))
    assert is_log(written(tmp_path, ""))
    assert not is_log(written(tmp_path, ' \n{"schema": 2}'))
    with pytest.raises(RequantError, match=r"gone.log: no such file"):
        is_log(tmp_path / "gone.log")
    with pytest.raises(RequantError, match=r"gone.log: no such file"):
        load_log(tmp_path / "gone.log")


def test_unknown_tensors_are_refused_with_near_names() -> None:
    log = Log("min_max.log", {"conv1_out": (0.0, 1.0), "conv2_ot": (0.0, 1.0)})
    with pytest.raises(RequantError, match=r"min_max.log: no tensor named 'conv2_ot'; did you mean 'conv2_out'"):
        log.check(["conv1_out", "conv2_out"])
    log.check(["conv1_out", "conv2_ot", "x"])
