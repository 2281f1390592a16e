"""The sample of which a model loses most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from requant.calibration import Sample
from requant.calibration.model.session import Array
from requant.quantize.accuracy.outputs import Accuracy, accuracy_json, measure
from requant.quantize.accuracy.samples import APART_DB, EachSample, WorstSample
from requant.quantize.accuracy.sqnr import decibels, powers
from requant.quantize.accuracy.verdict import accuracy_rows, answers_lost

VALUES = 400
DRAWS = 400


def compared(signals: Sequence[float], noises: Sequence[float]) -> Accuracy:
    """Compare an identity with one that adds noise; the amplitudes are those of each sample."""
    generator = np.random.default_rng(7)
    draws = [generator.standard_normal((2, 1, VALUES)).astype(np.float32) for _ in signals]
    samples = [
        Sample({"x": signal * draw[0], "noise": noise * draw[1]}, None, f"clip {place}")
        for place, (signal, noise, draw) in enumerate(zip(signals, noises, draws, strict=True))
    ]

    def before(feed: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": feed["x"]}

    def after(feed: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": feed["x"] + feed["noise"]}

    return measure(before, after, iter(samples))


def test_the_worst_sample_is_named_with_its_own_signal_to_noise() -> None:
    found = compared([1.0] * 8, [0.01] * 5 + [0.3] + [0.01] * 2).worst_sample
    assert found is not None
    assert (found.where, found.output) == ("clip 5", "y")
    # 0.3 of the amplitude is 10.5 dB; the powers of two draws of 400 values differ by 10 % each (sqrt(2 / 400) x 1.4)
    assert found.sqnr_db == pytest.approx(-20 * math.log10(0.3), abs=1.0)


def test_noise_that_all_samples_share_names_none() -> None:
    assert compared([1.0] * 8, [0.1] * 8).worst_sample is None
    assert compared([1.0] * 8, [0.0] * 8).worst_sample is None
    assert compared([1.0], [0.1]).worst_sample is None


def test_a_silent_sample_is_compared_with_what_the_output_usually_holds() -> None:
    quiet = compared([1.0] * 7 + [0.001], [0.05] * 7 + [0.01])
    assert quiet.worst_sample is None  # its own SQNR is -20 dB
    loud = compared([1.0] * 7 + [0.001], [0.05] * 7 + [1.0]).worst_sample
    assert loud is not None
    assert loud.where == "clip 7"


rows = st.lists(
    st.tuples(st.integers(1, 50), st.floats(0, 1e3), st.floats(0, 1e3)),
    min_size=1,
    max_size=9,
)


@given(rows)
@example([(1, 5e-324, 2.0)])  # the ratio of both is 0
def test_the_sqnr_of_all_samples_is_that_of_their_sums(drawn: list[tuple[int, float, float]]) -> None:
    each = EachSample()
    for place, (values, signal, noise) in enumerate(drawn):
        each.add(str(place), "y", values, (signal, noise))
    together = decibels(sum(row[1] for row in drawn), sum(row[2] for row in drawn))
    assert each.sqnr_db() == {"y": together}
    worst = each.worst(["y"])
    if worst is not None:
        assert worst.sqnr_db <= together - APART_DB
        assert drawn[int(worst.where)][2] > 0


def test_states_do_not_name_a_sample() -> None:
    each = EachSample()
    for place, noise in enumerate((0.001, 0.001, 0.9)):
        for name in ("y", "state"):
            each.add(str(place), name, 1, (1.0, noise if name == "state" else 0.001))
    assert each.worst(["y"]) is None
    assert each.worst(["y", "state"]) == WorstSample("2", "state", decibels(1.0, 0.9))


@pytest.mark.parametrize(("noise", "named"), [(0.3, True), (0.003, False)])
def test_a_sample_of_a_better_output_is_not_the_worst(noise: float, named: bool) -> None:
    """The even noise of one output judges the model: a sample of another output counts if it is worse than that."""
    each = EachSample()
    for place in range(8):
        each.add(f"clip {place}", "coefs", 1, (1.0, 0.01))
        each.add(f"clip {place}", "gate", 1, (1.0, noise if place == 5 else 0.0001))
    assert each.worst(["gate"]) == WorstSample("clip 5", "gate", decibels(1.0, noise))
    assert (each.worst(["coefs", "gate"]) is not None) is named


def test_a_sample_of_the_output_that_classes_judge_does_not_hide_another() -> None:
    rng = np.random.default_rng(3)
    chosen = np.eye(10, dtype=np.float32)[rng.integers(0, 10, (16, 1))]
    boxes = rng.standard_normal((16, 1, 40)).astype(np.float32)
    samples = [Sample({"place": np.array(place)}, None, f"image {place}") for place in range(16)]

    def before(feed: Mapping[str, Array]) -> dict[str, Array]:
        return {"classes": chosen[feed["place"]] * 0.9 + 0.01, "boxes": boxes[feed["place"]]}

    def after(feed: Mapping[str, Array]) -> dict[str, Array]:
        found = before(feed)
        found["classes"] = found["classes"] * 0.9 - (0.3 if feed["place"] == 2 else 0.0)
        found["boxes"] = found["boxes"] * (0.9 if feed["place"] == 5 else 0.999)
        return found

    found = measure(before, after, iter(samples))
    assert (found.class_output, found.agreement, found.worst_sqnr_db < 21) == ("classes", 1.0, True)
    assert found.worst_sample is not None
    assert (found.worst_sample.output, found.worst_sample.where) == ("boxes", "image 5")
    assert any(row.startswith("worst sample: SQNR") and row.endswith("at boxes: image 5") for row in table(found))


def table(accuracy: Accuracy) -> Iterator[str]:
    return (f"{name}: {value}" for name, value in accuracy_rows(accuracy, "calibration data"))


def test_the_table_the_first_line_and_the_json_name_it() -> None:
    found = compared([1.0] * 60, [0.01] * 59 + [0.3])
    assert found.worst_sample is not None
    assert found.worst_sqnr_db > 20
    shown = f"{found.worst_sample.sqnr_db:.1f} dB"
    assert f"worst sample: SQNR {shown} at y: clip 59" in table(found)
    assert answers_lost(found, "data").endswith(f"at the output, {shown} at the worst sample (data)")
    assert accuracy_json(found)["worst_sample"] == {
        "where": "clip 59",
        "output": "y",
        "sqnr_db": found.worst_sample.sqnr_db,
    }
    better = replace(found, worst_sample=replace(found.worst_sample, sqnr_db=30.0))
    assert answers_lost(better, "data").endswith("at the output (data)")
    none = replace(found, worst_sample=None)
    assert not [row for row in table(none) if row.startswith("worst")]
    assert accuracy_json(none)["worst_sample"] is None


def test_a_sample_of_another_shape_is_the_worst() -> None:
    each = EachSample()
    for place, length in enumerate((5, 5, 4)):
        each.add(str(place), "y", 5, powers(np.ones(5, np.float32), np.ones(length, np.float32)))
    assert each.worst(["y"]) == WorstSample("2", "y", -math.inf)
    assert each.sqnr_db() == {"y": -math.inf}


def test_the_lower_end_covers_other_samples() -> None:
    """The SQNR of many samples is below the lower end of 16 of them in at most 5 % of the draws (one side: 2.5 %)."""
    random = np.random.default_rng(3)
    noises = random.gamma(4.0, 0.01 / 4, 4096)  # of gammas with shape 4 the standard deviation is half the mean
    truth = decibels(1.0, float(noises.mean()))
    below = 0
    for _ in range(DRAWS):
        each = EachSample()
        for noise in random.choice(noises, 16):
            each.add("here", "y", 1, (1.0, float(noise)))
        below += truth < each.low_db()["y"]
    # the mean of 16 gammas is skewed, and Z is no quantile of Student's t: 2.5 % become about 5 %
    assert 0.005 * DRAWS < below < 0.08 * DRAWS


def test_few_samples_and_equal_outputs_have_no_interval() -> None:
    three, same = compared([1.0] * 3, [0.1, 0.2, 0.3]), compared([1.0] * 8, [0.0] * 8)
    assert three.low_db == three.sqnr_db
    assert same.least_db("y") == math.inf
    lost = EachSample()
    for noise in (0.1, 0.1, math.nan, 0.1):
        lost.add("here", "y", 1, (1.0, noise))
    assert lost.low_db() == {"y": -math.inf}
    silent = EachSample()
    for _ in range(8):
        silent.add("here", "y", 1, (0.0, 0.1))
    assert silent.low_db() == silent.sqnr_db() == {"y": -math.inf}


@given(st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6)), min_size=1, max_size=3))
def test_fewer_than_four_samples_leave_the_sqnr_itself_to_the_last_bit(sums: list[tuple[float, float]]) -> None:
    each = EachSample()
    for pair in sums:
        each.add("here", "y", 1, pair)
    assert each.low_db() == each.sqnr_db()  # a smaller one is shown as the end of an interval


def test_the_signal_of_a_sample_may_differ_where_the_ratio_does_not() -> None:
    found = compared([1.0, 2.0, 4.0, 8.0], [0.1, 0.2, 0.4, 0.8])
    # the powers of two draws of 400 values differ by 10 %: the interval of four ratios is about 0.4 dB wide
    assert found.sqnr_db["y"] - 1.0 < found.least_db("y") < found.sqnr_db["y"]
    assert accuracy_json(found)["sqnr_low_db_by_output"] == {"y": found.least_db("y")}
