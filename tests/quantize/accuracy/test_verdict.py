"""The verdict in one sentence, and the rows below it: each number with its data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import Any
from xml.etree import ElementTree

import pytest

from requant.quantize import Comparison, FloatNode, Frontier, Latency, Point, Result
from requant.quantize.accuracy.class_scores import ClassScores
from requant.quantize.accuracy.drop import Versus
from requant.quantize.accuracy.metrics import metric_named
from requant.quantize.accuracy.outputs import Accuracy, Labelled
from requant.quantize.accuracy.promise import promise
from requant.quantize.accuracy.verdict import WEIGHTS, accuracy_rows, latency_rows
from requant.quantize.job import Placement, Served
from requant.quantize.placement.batches import NATIVE
from requant.quantize.result import Given, NativeUse, Rejected
from requant.quantize.runtime.timing import Regime, latency_json
from requant.transforms.int8.reasons import IN_BLOCKS

from ...accuracies import changed

CLASS_SCORES = ClassScores(
    output="logits",
    classes=10,
    predictions=64,
    agreement=63 / 64,
    predicted_drop=0.001,
    items=64,
    whole_drop=0.001,
    whole_interval=(0.0, 0.002),
    confidence=0.99,
)
CLASSES = Accuracy(64, CLASS_SCORES, {"logits": 45.5})
EMBEDDING = changed(CLASSES, confidence=0.11)
FAST = Latency(2.9, 1.0, 2.9, 1.0, runs=5)
RESULT = Result(
    output="out.onnx",
    format="qdq",
    calibration="auto",
    ranges="",
    data="calib.npz (64 samples)",
    int8_nodes=7,
    forms={"u8->u8": 4},
    mac_share_int8=0.943,
    kernels={"QGemm": 2},
    float_nodes=(FloatNode("conv1", "Conv", "too few products"), FloatNode("conv2", "Conv", "too few products")),
    relieved={},
    accuracy=CLASSES,
    latencies=(FAST,),
    float_bytes=3900,
    int8_bytes=1000,
    pipeline="",
    promise=promise(CLASSES, held_out=False),
)
POINT = Point(0.1, 0.95, 2.0, 3, True, "")
SEARCH = Frontier("top1", True, 0.96, 0.94, (POINT,), POINT)


def with_accuracy(accuracy: Accuracy, *, held_out: bool = False) -> dict[str, Any]:
    return {"accuracy": accuracy, "promise": promise(accuracy, held_out=held_out)}


VERDICTS: dict[str, tuple[dict[str, Any], str]] = {
    "mostly simplification": (
        {"latencies": (replace(FAST, simple_ms=1.45, uncertainty=0.08),)},
        "2.9x faster (simplified float alone 2.0x; machine busy, +-8 %), 3.9x smaller, 1 of 64 answers changed "
        + "(calibration data)",
    ),
    "all of it simplification": (
        {"latencies": (Latency(10.993, 8.664, 10.993, 8.664, runs=5, simple_ms=8.225, uncertainty=0.1),)},
        "1.3x faster (simplified float alone 1.3x: faster than INT8; machine busy, +-10 %), 3.9x smaller, 1 of 64 "
        + "answers changed (calibration data)",
    ),
    "nothing beside simplification": (
        {"latencies": (replace(FAST, float_ms=1.05, simple_ms=1.01),)},
        "1.05x faster (simplified float alone 1.04x: as fast as INT8), 3.9x smaller, 1 of 64 answers changed "
        + "(calibration data)",
    ),
    "slower than both": (
        {"latencies": (replace(FAST, float_ms=0.5, simple_ms=0.5),)},
        "2.0x slower, 3.9x smaller, 1 of 64 answers changed (calibration data)",
    ),
    "slow without the library": (
        {"native": NativeUse(4, 0, "lib.so", 3.5)},
        "2.9x faster, 3.9x smaller, 1 of 64 answers changed (calibration data); without the native library 1.2x "
        + "the time of float",
    ),
    "slow without the library, beside a dynamic model": (
        {"native": NativeUse(4, 0, "lib.so", 12.4), "opponent": "the dynamically quantized model"},
        "2.9x faster, 3.9x smaller, 1 of 64 answers changed (calibration data); without the native library 4.3x "
        + "the time of the dynamically quantized model",
    ),
    "beside a dynamic model": (
        {
            "given": Given(changed(CLASSES, agreement=60 / 64), changed(CLASSES, agreement=61 / 64)),
            "latencies": (replace(FAST, simple_ms=1.45),),
            "simple": WEIGHTS,
        },
        "2.9x faster (float weights of the given model alone 2.0x), 3.9x smaller, 1 of 64 answers changed (calibration "
        + "data) against its float weights, 4 of 64 answers changed (calibration data) against the given model",
    ),
    "fast without the library": (
        {"native": NativeUse(4, 0, "lib.so", 2.5)},
        "2.9x faster, 3.9x smaller, 1 of 64 answers changed (calibration data)",
    ),
    "as slow without the library": (
        {"native": NativeUse(4, 0, "lib.so", 2.95)},
        "2.9x faster, 3.9x smaller, 1 of 64 answers changed (calibration data); without the native library as slow as "
        + "float",
    ),
    "less accurate without the library": (
        {"native": NativeUse(4, 0, "lib.so", 2.5, promise(Accuracy(64, None, {"y": 17.8})))},
        "2.9x faster, 3.9x smaller, 1 of 64 answers changed (calibration data); without the native library less "
        + "accurate than promised",
    ),
    "worse without the library": (
        {"native": NativeUse(4, 0, "lib.so", 3.5, promise(Accuracy(64, None, {"y": 17.8})))},
        "2.9x faster, 3.9x smaller, 1 of 64 answers changed (calibration data); without the native library 1.2x "
        + "the time of float and less accurate than promised",
    ),
    "as good without the library": (
        {"native": NativeUse(4, 0, "lib.so", 2.5, promise(Accuracy(64, None, {"y": 22.8})))},
        "2.9x faster, 3.9x smaller, 1 of 64 answers changed (calibration data)",
    ),
    "little simplification": (
        {"latencies": (replace(FAST, simple_ms=2.6),)},
        "2.9x faster, 3.9x smaller, 1 of 64 answers changed (calibration data)",
    ),
    "classes": ({}, "2.9x faster, 3.9x smaller, 1 of 64 answers changed (calibration data)"),
    "held out": (
        with_accuracy(CLASSES, held_out=True),
        "2.9x faster, 3.9x smaller, 1 of 64 answers changed (held-out calibration data)",
    ),
    "given ranges": (
        {"ranges": "ranges.json"},
        "2.9x faster, 3.9x smaller, 1 of 64 answers changed (data that gave no ranges)",
    ),
    "labels": (
        with_accuracy(replace(CLASSES, labelled=Labelled(64, 63, 62, 1, 0))),
        "2.9x faster, 3.9x smaller, top-1 accuracy 98.44% -> 96.88% (calibration data)",
    ),
    "pixels": (
        with_accuracy(changed(CLASSES, predictions=6400, maps=True)),
        "2.9x faster, 3.9x smaller, 100 of 6400 predictions changed (calibration data)",
    ),
    "sequences": (
        with_accuracy(changed(CLASSES, predictions=640, items=64, whole_interval=(0.0, 0.01))),
        "2.9x faster, 3.9x smaller, 10 of 640 predictions in 64 items changed (calibration data)",
    ),
    "sequences with the same texts": (
        with_accuracy(changed(CLASSES, predictions=640, items=64, whole_interval=(0.0, 0.0))),
        "2.9x faster, 3.9x smaller, 0 of 64 whole items changed, 10 of 640 predictions in them (calibration data)",
    ),
    "no classes": (
        with_accuracy(EMBEDDING),
        "2.9x faster, 3.9x smaller, SQNR 45.5 dB at the output (calibration data)",
    ),
    "a state": (
        with_accuracy(replace(EMBEDDING, sqnr_db={"y": 25.5, "h": 17.6}, states=frozenset({"h"}))),
        "2.9x faster, 3.9x smaller, SQNR 25.5 dB at the output (calibration data)",
    ),
    "equal": (
        with_accuracy(replace(EMBEDDING, sqnr_db={"y": math.inf})),
        "2.9x faster, 3.9x smaller, the same outputs (calibration data)",
    ),
    "random inputs": ({"promise": None}, "2.9x faster, 3.9x smaller, accuracy not measured"),
    "not run": (
        {"promise": None, "accuracy": Accuracy(0, None, {}), "latencies": ()},
        "not timed, 3.9x smaller, accuracy not measured",
    ),
    "slower and larger": (
        {"latencies": (replace(FAST, float_ms=1.0, int8_ms=1.3),), "float_bytes": 1000, "int8_bytes": 1040},
        "1.3x slower, 1.04x larger, 1 of 64 answers changed (calibration data)",
    ),
    "as fast": (
        {"latencies": (replace(FAST, float_ms=1.004),), "float_bytes": 1000},
        "as fast as float, the same size, 1 of 64 answers changed (calibration data)",
    ),
    "batches": (
        {"latencies": (FAST, replace(FAST, float_ms=12.3, batch=16))},
        "2.9x faster at batch 1, 12x faster at batch 16, 3.9x smaller, 1 of 64 answers changed (calibration data)",
    ),
    "decoder": (
        {"latencies": (FAST, replace(FAST, float_ms=1.05, regime=Regime("step", 1, 8)))},
        "2.9x faster at batch 1, 1.05x faster at step after 8 tokens, 3.9x smaller, "
        + "1 of 64 answers changed (calibration data)",
    ),
    "searched": (
        {"search": replace(SEARCH, unit="share")},
        "2.9x faster, 3.9x smaller, top1 96.00% -> 95.00% (evaluation data)",
    ),
    "float": ({"why_not": "int8 gains too little"}, "NOT INT8: int8 gains too little"),
    "integers already": (
        {"why_not": "nothing more", "float_nodes": (FloatNode("m", "MatMulNBits", "any words", IN_BLOCKS.code),)},
        "NO MORE INT8: nothing more",
    ),
    "goal missed": (
        {"why_not": "no int8 model keeps top1", "search": replace(SEARCH, best=None)},
        "GOAL MISSED: no int8 model keeps top1",
    ),
}


@pytest.mark.parametrize(("changes", "sentence"), VERDICTS.values(), ids=VERDICTS)
def test_the_verdict_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    result = replace(RESULT, **changes)
    assert result.verdict == str(result).splitlines()[0] == result.to_json()["verdict"] == sentence


def test_a_comparison_names_its_data() -> None:
    found = Comparison(CLASSES, (FAST,), data="/home/test.npz", float_bytes=3900, int8_bytes=1000)
    assert found.verdict == "2.9x faster, 3.9x smaller, 1 of 64 answers changed (test.npz)"
    assert "measured on       64 samples of /home/test.npz" in str(found)
    top1 = Versus(metric_named("top1"), 1.0, 0.75, 0.25, 0.25, (0.1, 0.4), "paired", 40, 10, 0, 0.002)
    scored = replace(found, metric=top1, accuracy=replace(CLASSES, labelled=Labelled(40, 40, 30, 10, 0)))
    assert scored.verdict == "2.9x faster, 3.9x smaller, top1 100.00% -> 75.00% (test.npz)"
    assert [name for name, _ in scored.rows() if name in ("top1", "top-1", "items")] == ["top1", "items"]


ACCURACY = ("accuracy", "top-1", "drop", "items", "top-1 agreement", "predicted drop", "SQNR")


@pytest.mark.parametrize("labelled", [None, Labelled(64, 63, 62, 1, 0)], ids=["scores", "labels"])
def test_each_number_of_accuracy_says_on_which_data(labelled: Labelled | None) -> None:
    result = replace(RESULT, **with_accuracy(replace(CLASSES, labelled=labelled)))
    rows = [text for name, text in result.rows() if name in ACCURACY]
    assert len(rows) >= 3
    assert [text for text in rows if "(calibration data" not in text] == []
    random = replace(result, promise=None, data="random inputs (x [1, 4])")
    assert [row for row in random.rows() if row[0] in ACCURACY] == [("SQNR", "45.5 dB at logits (random inputs)")]


@pytest.mark.parametrize("labelled", [None, Labelled(64, 63, 62, 1, 0)], ids=["scores", "labels"])
@pytest.mark.parametrize("judge", [CLASSES, replace(CLASSES, scores=None, low_db={"logits": 44.0})])
def test_samples_that_gave_the_ranges_claim_no_interval(judge: Accuracy, labelled: Labelled | None) -> None:
    """Their loss is less than that of other data."""
    accuracy = replace(judge, labelled=labelled)
    made = [
        replace(RESULT, rejected=Rejected(accuracy, (FAST,)), **with_accuracy(accuracy, held_out=held_out))
        for held_out in (False, True)
    ]
    fitted, held = (each.rows() for each in made)
    assert [text for _, text in fitted if "95 %" in text] == []
    assert any("95 %" in text for _, text in held)
    assert " (calibration data, which gave the ranges too" in dict(fitted)["accuracy"]
    assert dict(held)["accuracy"].endswith(" (held-out calibration data)")
    dynamic = dict(replace(made[0], calibration="").rows())
    assert dynamic["accuracy"].endswith(" (calibration data)")
    for told in (made[0].to_json(), made[0].to_json()["rejected"]):
        assert told["drop_interval"] is told["agreement_interval"] is told["predicted_item_drop_interval"] is None
        assert told["sqnr_low_db_by_output"] == {"logits": None}
    assert made[1].to_json()["sqnr_low_db_by_output"] == {"logits": accuracy.least_db("logits")}


def test_a_float_output_is_not_called_qdq() -> None:
    rejected = Rejected(CLASSES, (FAST,))
    reason = "int8 gains too little"
    nodes = tuple(FloatNode(f"n{index}", "Conv", "any words", whole=True) for index in range(3))
    result = replace(
        RESULT, why_not=f"{reason}: the output", int8_nodes=0, float_nodes=nodes, rejected=rejected,
    )  # fmt: skip
    rows = dict(result.rows())
    assert rows["output"] == "out.onnx (float)"
    assert rows["rejected latency, batch 1"].startswith("2.900 -> 1.000 ms: 2.90x ")
    assert rows["float nodes"] == "3 nodes (such as n0): see the first line"
    assert dict(RESULT.rows())["output"] == "out.onnx (qdq)"
    assert dict(RESULT.rows())["float nodes"] == "2 Conv (such as conv1): too few products"


@pytest.mark.parametrize(
    "make", [lambda: RESULT, lambda: Comparison(CLASSES, (FAST,), data="d")], ids=["result", "comparison"]
)
def test_a_notebook_shows_verdict_table_and_plot(make: Callable[[], Any]) -> None:
    shown = make()
    page = ElementTree.fromstring(f"<div>{shown._repr_html_()}</div>")
    assert page.findtext("p/strong") == shown.verdict
    assert [row.findtext("th") for row in page.iter("tr")] == [name for name, _ in shown.rows()]
    float_bar, int8_bar = (float(bar.attrib["width"]) for bar in page.iter("rect"))
    assert float_bar / int8_bar == pytest.approx(2.9, rel=0.01)


def test_names_are_text_in_a_notebook_and_on_a_line() -> None:
    evil = replace(RESULT, output="<script>alert(1)</script>\x1b[31m\n", float_nodes=())
    assert "<script" not in evil._repr_html_()
    assert "\x1b" not in evil._repr_html_() + str(evil)
    assert len(str(evil).splitlines()) == 1 + len(evil.rows())


@pytest.mark.parametrize(
    ("samples", "held_out", "told"),
    [
        (24, False, "too: with 32 samples or more a part judges alone, or those that --samples leaves out)"),
        (64, False, "too)"),  # a part is held out of as many, unless their number was not known
        (24, True, "(held-out calibration data)"),
        (1, False, "too)"),
    ],
)
def test_how_samples_can_judge_alone_is_told_where_there_are_few(samples: int, held_out: bool, told: str) -> None:
    accuracy = replace(CLASSES, samples=samples)
    assert dict(replace(RESULT, **with_accuracy(accuracy, held_out=held_out)).rows())["accuracy"].endswith(told)


def test_a_latency_says_what_was_timed_where_sizes_are_open() -> None:
    rows = list(latency_rows(replace(FAST, shapes="ids 1x32")))
    assert rows[-1] == ("", "timed on ids 1x32")
    assert latency_json(replace(FAST, shapes="ids 1x32"))["shapes"] == "ids 1x32"
    assert len(list(latency_rows(FAST))) == len(rows) - 1
    assert "shapes" not in latency_json(FAST)


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Placement("rules"), "rules"),
        (Placement("rules", why="no data to time plans on"), "rules: no data to time plans on"),
        (
            Placement("measured", 1.2, {"rules": 2.0, "cut 1": 1.0}, chosen="cut 1"),
            "measured: 'cut 1', 1.000 ms, of 2 plans (next: 'rules' 2.000); sum of costs 1.200 ms",
        ),
        (
            Placement(
                "measured",
                None,
                {"rules": 2.0, "cut 1": 1.9},
                chosen="rules",
                missed="SQNR: 12.0 dB",
                passed={"cut 1": NATIVE},
            ),
            "measured, before more units became float: 'rules', 2.000 ms, of 2 plans; 'cut 1' 1.900: gains less than 2%, "
            + "too little for native operators; its model missed the promise (SQNR: 12.0 dB), so that more units are float, "
            + "and the written model takes 1.000 ms",
        ),
        (
            Placement("rules", missed="SQNR: 12.0 dB", served=(Served(1, None, {"rules": 2.0}, "rules", "rules"),)),
            "rules, before more units became float: rules, of 1 plan; its model missed the promise (SQNR: 12.0 dB), so "
            + "that more units are float, and the written model takes 1.000 ms",
        ),
        (
            Placement(
                "measured",
                tried={
                    "rules": 9.0,
                    "all": 2.0,
                    "cut 1": 5.0,
                    "cut 2": 4.0,
                    "cut 3": 6.0,
                    "a": 3.0,
                    "b": 3.5,
                    "c": 3.99,
                    "d": 4.04,
                },
                chosen="cut 2",
                passed={"all": NATIVE},
            ),
            "measured: 'cut 2', 4.000 ms, of 9 plans (as fast: 'c' 3.990, 'd' 4.040; next: 'cut 1' 5.000, 'cut 3' 6.000, "
            + "'rules' 9.000); 'all' 2.000: gains less than 2%, too little for native operators; 'a' 3.000, 'b' 3.500: timed in another race, and "
            + "a clock differs between them",
        ),
    ],
    ids=["not timed", "not to be timed", "fastest", "slower", "for a batch size", "among many"],
)
def test_the_row_of_the_placement_says_which_plan_was_taken(placement: Placement, text: str) -> None:
    assert dict(replace(RESULT, placement=placement).rows())["placement"] == text


def float_rows_of(*nodes: FloatNode) -> list[str]:
    rows = replace(RESULT, float_nodes=nodes).rows()
    first = [name for name, _ in rows].index("float nodes")
    kept = list(takewhile(lambda row: row[0] == "", rows[first + 1 :]))
    return [text for _, text in (rows[first], *kept)]


def test_float_nodes_of_one_kind_of_reason_are_a_row() -> None:
    nodes = (
        *(FloatNode(f"add{index}", "Add", "its own reason", us=0.1) for index in range(9)),
        FloatNode("mul", "Mul", "float takes 3 us here, int8 3 us", "float-faster", 3.0),
        FloatNode("cat", "Concat", "float takes 19 us here, int8 26 us", "float-faster", 19.0),
        FloatNode("mul2", "Mul", "float takes 3 us here, int8 3 us", "float-faster", 3.0),
        FloatNode("sin", "Sin", "no kernel for Sin", "no-kernel", 40.0),
        FloatNode("if", "If", "no times"),
    )
    assert float_rows_of(*nodes) == [
        "1 Sin (sin): no kernel for Sin; 40 us in a run",
        "3 Mul, Concat (such as cat): float takes 19 us here, int8 26 us, and alike; 25 us together",
        "9 Add (such as add0): its own reason",
        "1 If (if): no times",
    ]
    listed = replace(RESULT, float_nodes=nodes).to_json()["float_nodes"]
    assert listed[-1] == {"name": "if", "operator": "If", "reason": "no times", "us": None}
    assert len(listed) == 14


def test_what_tensors_alone_leave_is_a_reason_of_one_kind() -> None:
    texts = [
        f"in uint8 {name} alone leaves {value} dB at an output" for name, value in (("'a:0'", -3.8), ('"b\'s"', 17))
    ]
    rows = float_rows_of(*(FloatNode(f"n{i}", "Conv", text, us=1.0 + i) for i, text in enumerate(texts)))
    assert rows == [f"2 Conv (such as n1): {texts[1]}, and alike; 3 us together"]


def test_six_rows_tell_of_float_nodes_and_the_rest_is_counted() -> None:
    rows = float_rows_of(*(FloatNode(f"n{i}", f"Op{i}", f"reason {'abcdefghij'[i]}", us=float(i)) for i in range(10)))
    assert [row.split()[1] for row in rows[:-1]] == [f"Op{i}" for i in range(9, 3, -1)]
    assert rows[-1] == "4 for other reasons; 6 us together; --json lists all"
    (row,) = float_rows_of(*(FloatNode(f"n{i}", f"Op{i}", "why", "code") for i in range(6)))
    assert row == "6 Op0, Op1, Op2, Op3 and 2 more (such as n0): why"


def test_long_names_lose_their_middle_in_a_row() -> None:
    rows = dict(replace(RESULT, float_nodes=(FloatNode("net/" + 200 * "x" + "/add", "Add", "its reason"),)).rows())
    assert re.fullmatch(r"1 Add \(net/x+\.\.\.x+/add\): its reason", rows["float nodes"])
    assert len(rows["float nodes"]) < 120


@pytest.mark.parametrize(
    ("tried", "missed", "told"),
    [
        ({"cut 1": 2.0, "cut 1, stock": 4.0}, "", "; --kernels stock gives a model of 2.000 ms"),
        ({"cut 1": 2.0, "cut 1, stock": 4.6}, "", ""),
        ({"cut 1": 2.0, "cut 1, stock": 4.0}, "SQNR: 12 dB", ""),
        ({"cut 1": 2.0, "rules": 2.0}, "", ""),
    ],
    ids=["faster", "hardly faster", "changed since then", "not timed"],
)
def test_a_plan_of_stock_kernels_that_is_faster_than_the_bodies_is_named(
    tried: dict[str, float], missed: str, told: str
) -> None:
    """The INT8 model takes 1 ms now and took 2 ms when the plans were timed."""
    latency = replace(FAST, int8_ms=1.0)
    stock = frozenset(tried) & {"cut 1, stock"}
    placement = Placement("measured", tried=tried, stock=stock, chosen="cut 1", missed=missed)
    found = replace(RESULT, latencies=(latency,), native=NativeUse(4, 0, "lib.so", 2.5), placement=placement)
    (row,) = [value for _, value in found.rows() if value.startswith("without this library")]
    assert row == f"without this library 2.500 ms: {latency.float_ms / 2.5:.2f}x{told}"


def test_the_rows_tell_both_errors_of_a_dynamic_model() -> None:
    both = [changed(CLASSES, agreement=count / 64) for count in (60, 61)]
    result = replace(RESULT, given=Given(*both), latencies=(replace(FAST, simple_ms=4.5),), simple=WEIGHTS)
    rows = dict(result.rows())
    assert rows["given model"] == (
        "the output against it: 4 of 64 answers changed (calibration data); its own error, against its float weights: "
        "3 of 64 answers changed (calibration data)"
    )
    assert rows["accuracy"].endswith("; against the float weights of the given model)")
    assert "float weights of the given model 4.500 ms: 0.64x" in str(result)
    assert "simplified float" not in str(result)
    document = result.to_json()["given"]
    assert (document["output"]["agreement"], document["own"]["agreement"]) == (60 / 64, 61 / 64)
    assert RESULT.to_json()["given"] is None


def test_an_output_that_another_is_chosen_from_has_one_row() -> None:
    found = replace(EMBEDDING, sqnr_db={"map": 22.0, "map (into Equal)": 22.0, "boxes (into Gather)": 25.6})
    told = [text for name, text in accuracy_rows(found, "data") if name == "SQNR"]
    assert [text.partition(" (data)")[0] for text in told] == ["22.0 dB at map", "25.6 dB at boxes (into Gather)"]
