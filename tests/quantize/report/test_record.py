"""Run records and what pages are made of: round trips, refusals, places in the picture, pictures, numbers."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from requant import RequantError
from requant.calibration.checks.findings import Finding
from requant.calibration.statistics.histogram import Histogram
from requant.quantize.accuracy.outputs import Labelled
from requant.quantize.model.files import load_model, size_text
from requant.quantize.report import Record, load_record, report_runs, view_model, write_reports
from requant.quantize.report.graph import graph_of
from requant.quantize.report.layout import HEIGHT, WIDTH, picture_of
from requant.quantize.report.losses import losses
from requant.quantize.report.numbers import decibels, microseconds, percent, points, times
from requant.quantize.report.record import (
    CONVERSION_ROW,
    KIND,
    LAYOUT_ROW,
    SCHEMA,
    Bins,
    Graph,
    Headline,
    Item,
    Judged,
    Node,
    OpTime,
    Point,
    Search,
    Step,
    Tensor,
    Unit,
    Weights,
)
from requant.quantize.report.render import KINDS, render_comparison, render_report
from requant.quantize.report.samples import picture, png
from requant.quantize.report.tensors import BINS, CHANNELS, bins_of, weights_of
from requant.quantize.report.words import run_rows, short_places
from requant.transforms.int8.plan import Impl

SAMPLES = Path(__file__).parents[3] / "sample_models"

GRAPH = Graph(
    inputs=("x",),
    outputs=("y",),
    nodes=(
        Node(name="one", op="Conv", inputs=("x",), outputs=("t",), constants={"w": "float32 (2, 1, 1, 1)"}),
        Node(name="two", op="Relu", inputs=("t",), outputs=("y",)),
    ),
    values={"t": "float32 (1, 2, 4, 4)"},
)
POINT = Point(price=0.1, value=0.9, speedup=2.0, int8_units=3, kept=True)
RECORD = Record(
    name="run",
    model="model.onnx",
    output="run.onnx",
    created="2030-01-02T03:04:05+00:00",
    command="requant quantize model.onnx -o run.onnx",
    headline=Headline(
        float_ms=2.0, int8_ms=1.0, float_bytes=4000, int8_bytes=1000, samples=8, sqnr_db_by_output={"y": 40.0}
    ),
    graph=GRAPH,
    units=(Unit(name="one", op="Conv", nodes=("one", "two"), outputs=("y",), implementation=Impl.U8, float_us=3.0),),
    tensors=(Tensor(name="y", uint8=True, lo=0.0, hi=6.0, bins=Bins(start=0.0, width=1.0, counts=(3, 0, 1))),),
    weights=(Weights(node="one", op="Conv", tensor="w", channels=2, group=1, lo=(-1.0, -2.0), hi=(1.0, 2.0)),),
    times=(OpTime(op="Conv", float_us=3.0, int8_us=1.0, units=1, int8=1),),
    judged=Judged(
        data="data.npz",
        samples=8,
        predictions=8,
        differing=1,
        predicted_drop=0.01,
        labelled=Labelled(items=8, float_correct=8, int8_correct=7, broken=1, fixed=0),
        items=(Item(where="data.npz, sample 3", label="3", before="3", after="5", broken=True, sqnr_db=12.0),),
    ),
    pipeline=(Step(step="fold_constants", applied=2, skipped={"too-large": 1}),),
    findings=(Finding(kind="few", name="", message="only 8 samples", severity="note"),),
    search=Search(metric="top1", before=0.95, bar=0.9, points=(POINT,), frontier=(POINT,), best=POINT, seconds=3.0),
    stages={"calibrate": 1.5},
    environment={"Python": "3.11"},
    remarks=("kernels: -",),
)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_reports(RECORD, [tmp_path / "run.json"])
    assert load_record(tmp_path / "run.json") == RECORD


def test_what_a_record_does_not_know_is_left_out() -> None:
    found = RECORD.to_json()
    found["later"] = 1
    found["headline"]["later"] = [1]
    assert Record.from_json(found) == RECORD


def change(*path: str | int, to: object) -> Callable[[dict[str, Any]], None]:
    """Return what sets an entry of a document."""

    def edit(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = to

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change("kind", to="costs"), "not a run record"),
        (change("schema", to=SCHEMA + 1), rf"version {SCHEMA + 1}; this program reads up to {SCHEMA}: update it"),
        (change("schema", to="1"), "schema '1'"),
        (change("schema", to=True), "schema True"),
        (change("schema", to=0), "schema 0"),
        (change("name", to=3), r"'name': expected str, got int"),
        (change("headline", "float_ms", to="fast"), r"'headline.float_ms': expected float \| null, got str"),
        (change("headline", "runs", to=1.5), r"'headline.runs': expected int, got float"),
        (change("headline", to=[]), r"'headline': expected object, got array"),
        (change("tensors", to={}), r"'tensors': expected array, got object"),
        (
            change("tensors", 0, "bins", "counts", 1, to=None),
            r"'tensors\[0\].bins.counts\[1\]': expected int, got null",
        ),
        (change("stages", to=[1]), r"'stages': expected object, got array"),
        (change("stages", "calibrate", to=float("inf")), r"'stages\[...\]': expected float <= 1.79"),
        (lambda document: document.pop("graph"), "missing required field 'graph'"),
    ],
)
def test_a_malformed_record_is_refused(edit: Callable[[dict[str, Any]], None], message: str) -> None:
    found = json.loads(json.dumps(RECORD.to_json()))
    edit(found)
    with pytest.raises(RequantError, match=message) as caught:
        Record.from_json(found, "run.json")
    assert str(caught.value).startswith("run.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("{", "not a run record: "),
        ("[1]", "not a run record"),
        ("\xff", "not a run record: "),
        ("[" * 9999, "nested too deeply"),
    ],
    ids=["missing", "cut", "list", "bytes", "deep"],
)
def test_what_is_no_record_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RequantError, match=message):
        report_runs([path], tmp_path / "run.html")
    assert not (tmp_path / "run.html").exists()


def test_a_page_holds_what_the_record_says_and_fetches_nothing() -> None:
    page = render_report(RECORD)
    for text in ("2.00", "4.00 kB → 1.00 kB", "broken by INT8", "fold_constants", "1 too-large", "only 8 samples"):
        assert text in page
    addresses = re.findall(r"\S*//\S+", page)
    assert addresses == ['"http://www.w3.org/2000/svg";']  # the name of SVG, which nothing fetches
    assert "default-src 'none'" in page


@pytest.mark.parametrize("impl", Impl)
def test_each_implementation_has_a_mark(impl: Impl) -> None:
    page = render_report(replace(RECORD, units=(replace(RECORD.units[0], implementation=impl),)))
    mark = KINDS[impl][1]
    assert len(re.findall(f'<text class="tag"[^>]*>{mark}</text>', page)) == 2  # at both nodes of the unit
    assert f"<strong>{mark}</strong>" in page


def test_markup_in_a_record_stays_text() -> None:
    evil = "</script><script>alert(1)</script>"
    node = replace(GRAPH.nodes[0], name=evil, op=evil, attributes={evil: evil})
    record = replace(
        RECORD,
        name=evil,
        command=evil,
        graph=replace(GRAPH, nodes=(node, GRAPH.nodes[1])),
        environment={evil: evil},
        remarks=(evil,),
    )
    for page in (render_report(record), render_comparison([record, record])):
        assert evil not in page


def test_runs_of_one_name_are_told_apart() -> None:
    page = render_comparison([RECORD, replace(RECORD, environment={"Python": "3.12"})])
    assert "run (1)" in page
    assert "run (2)" in page
    assert "Python (differs)" in page


# ---------------------------------------------------------------------------------------------------------------- words


def unit(op: str, before: float, after: float, reason: str = "", impl: Impl = Impl.FLOAT, **more: Any) -> Unit:
    """Return a unit with its times in the float model and in the output."""
    name = f"{op}_{before:g}_{after:g}"
    return Unit(
        name=name,
        op=op,
        nodes=(),
        outputs=(),
        implementation=impl,
        reason=reason,
        float_us=before,
        int8_us=after,
        **more,
    )


def test_the_greatest_losses_come_with_their_reasons() -> None:
    units = (
        unit("Conv", 90.0, 30.0, impl=Impl.U8),  # gains
        unit("Gemm", 4.0, 5.0, impl=Impl.U8),
        unit("Add", 8.0, 8.0, "its ranges differ 20-fold"),
        unit("Add", 9.0, 9.0, "its ranges differ 36-fold"),
        unit("Add", 1.0, 1.0, "its inputs come in float"),
        unit("Softmax", 7.0, 7.0, "slow"),
    )
    times_ = (
        OpTime(op="Conv", float_us=90.0, int8_us=30.0, units=1, int8=1),
        OpTime(op=CONVERSION_ROW, float_us=2.0, int8_us=15.0),
        OpTime(op=LAYOUT_ROW, float_us=9.0, int8_us=8.0),  # less than in float: no loss
    )
    found = losses(replace(RECORD, units=units, times=times_))
    assert [(row.what, row.nodes, row.microseconds) for row in found] == [
        ("Add", 3, 18.0),
        (CONVERSION_ROW, 0, 13.0),
        ("Softmax", 1, 7.0),
    ]
    assert found[0].why == "its ranges differ 36-fold (Add_9_9); 1 other reason"
    assert found[2].why == "slow"


def test_the_losses_of_a_rejected_model_are_its_own() -> None:
    units = (
        unit("Conv", 9.0, 9.0, "float takes 9 us here, int8 11 us", tried=Impl.U8, tried_us=11.0),
        unit("Conv", 8.0, 8.0, "float takes 8 us here, int8 9 us", tried=Impl.U8, tried_us=9.0),
        unit("Gemm", 8.0, 8.0, "int8 saves 6 us", tried=Impl.U8, tried_us=2.0),
    )
    (conv,) = losses(replace(RECORD, units=units, times=()))
    assert (conv.what, conv.microseconds, conv.why) == ("Conv", 20.0, "17 µs in float, 20 µs in integers")


def test_the_better_value_is_marked_where_one_is_better() -> None:
    heads = [replace(RECORD.headline, int8_ms=value, sqnr_db=40.0) for value in (1.0, 0.5, 0.505)]
    rows = {row.name: row for row in run_rows([replace(RECORD, headline=head) for head in heads])}
    assert rows["speed"].best == rows["INT8, one run"].best == {1, 2}
    assert rows["INT8 file"].best == rows["SQNR of the worst output"].best == set()
    assert rows["float, one run"].best == set()
    heads = [replace(RECORD.headline, sqnr_db=value) for value in (40.0, 40.1, None)]
    (row,) = (
        row for row in run_rows([replace(RECORD, headline=head) for head in heads]) if row.name.startswith("SQNR")
    )
    assert row.best == {1}


@pytest.mark.parametrize(
    ("places", "wanted"),
    [
        (["/data/c.npz, sample 8", "/data/c.npz, sample 84"], ["sample 8", "sample 84"]),
        (["/data/c.npz, sample 8"], ["sample 8"]),
        (["/i/cat/1.png", "/i/dog/1.png"], ["cat/1.png", "dog/1.png"]),
        (["a, sample 1", "a, sample 1"], ["sample 1", "sample 1"]),
        ([], []),
    ],
    ids=["samples", "one", "files", "equal", "none"],
)
def test_places_are_told_by_what_differs(places: list[str], wanted: list[str]) -> None:
    assert short_places(places) == wanted


# -------------------------------------------------------------------------------------------------------------- picture


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw a graph whose nodes read inputs and nodes before them."""
    count = draw(st.integers(0, 25))
    made = ["x", "z"]
    nodes = []
    for index in range(count):
        read = draw(st.lists(st.sampled_from(made), max_size=3))
        nodes.append(Node(name=f"n{index}", op="Op", inputs=tuple(dict.fromkeys(read)), outputs=(f"t{index}",)))
        made.append(f"t{index}")
    shuffled = draw(st.permutations(nodes))  # nodes of bodies come after those that read them
    return Graph(inputs=("x", "z"), outputs=(made[-1],), nodes=tuple(shuffled))


@given(graphs())
def test_boxes_stand_apart_and_below_what_they_read(graph: Graph) -> None:
    found = picture_of(graph)
    assert len(found.boxes) == len(graph.nodes) + 3
    for edge in found.edges:
        assert found.boxes[edge.source].y + HEIGHT < found.boxes[edge.target].y
    for index, box in enumerate(found.boxes):
        assert WIDTH / 2 <= box.x <= found.width - WIDTH / 2
        assert HEIGHT / 2 <= box.y <= found.height - HEIGHT / 2
        for other in found.boxes[:index]:
            assert abs(box.x - other.x) >= WIDTH or abs(box.y - other.y) >= HEIGHT, (box, other)


def test_a_graph_too_large_for_crossings_is_placed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("requant.quantize.report.layout.MOST", 1)
    graph = graph_of(load_model(SAMPLES / "digits_mobile.onnx"))
    found = picture_of(graph)
    assert len({(box.x, box.y) for box in found.boxes}) == len(found.boxes)
    most = max(Counter(box.layer for box in found.boxes).values())
    assert found.width <= most * 2 * WIDTH


BODY = """
<ir_version: 8, opset_import: ["" : 17]>
net (bool c, float[4] x) => (float[4] y)
{
  [first] a = Relu(x)
  [choice] y = If (c) <
    then_branch = then_graph () => (float[4] p) { [inner] p = Exp(a) },
    else_branch = else_graph () => (float[4] q) { [inner] q = Neg(a) }
  >
}
"""


def test_nodes_of_bodies_are_shown_with_names_of_their_own(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(BODY), tmp_path / "body.onnx")
    graph = graph_of(load_model(tmp_path / "body.onnx"))
    assert [node.name for node in graph.nodes] == ["first", "choice", "inner", "inner (2)"]
    assert [node.body for node in graph.nodes] == ["", "", "choice", "choice"]
    assert set(graph.nodes[1].inputs) == {"c", "a", "p", "q"}
    assert graph.nodes[1].attributes == {"then_branch": "a body of 1 node", "else_branch": "a body of 1 node"}
    picture_of(graph)


def test_constants_are_shown_with_those_that_read_them() -> None:
    graph = graph_of(load_model(SAMPLES / "digits.onnx"))
    model = onnx.load(SAMPLES / "digits.onnx")
    assert sum(node.parameters for node in graph.nodes) == sum(
        np.prod(t.dims, dtype=int) for t in model.graph.initializer
    )
    conv = next(node for node in graph.nodes if node.op == "Conv")
    assert conv.inputs == ("image",)
    assert next(iter(conv.constants.values())) == "float32 (32, 1, 5, 5)"


# -------------------------------------------------------------------------------------------------- tensors and samples


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=300))
def test_joined_bins_keep_all_values(values: list[float]) -> None:
    histogram = Histogram.of(np.array(values, np.float32))
    found = bins_of(histogram)
    assert len(found.counts) <= BINS
    assert sum(found.counts) == len(values)
    assert found.start <= min(values)
    assert max(values) <= found.start + found.width * len(found.counts)
    if histogram.counts.size <= BINS:
        assert list(found.counts) == histogram.counts.tolist()


def test_weights_are_told_by_output_channel() -> None:
    rows = {row.node: row for row in weights_of(load_model(SAMPLES / "digits.onnx"))}
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(SAMPLES / "digits.onnx").graph.initializer}
    conv = next(row for row in rows.values() if row.op == "Conv")
    array = weights[conv.tensor].reshape(conv.channels, -1)
    assert conv.lo == pytest.approx(array.min(axis=1), rel=1e-4)  # 5 digits
    assert conv.hi == pytest.approx(array.max(axis=1), rel=1e-4)


def test_many_channels_share_a_column(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((8, 3 * CHANNELS + 1)).astype(np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
        "net",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 8])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, weight.shape[1]])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    onnx.save(onnx.helper.make_model(graph), tmp_path / "wide.onnx")
    (row,) = weights_of(load_model(tmp_path / "wide.onnx"))
    assert (row.channels, row.group) == (weight.shape[1], 4)
    assert len(row.lo) == len(row.hi) == -(-weight.shape[1] // 4)
    assert row.lo[0] == pytest.approx(weight[:, :4].min(), rel=1e-4)
    assert row.hi[-1] == pytest.approx(weight[:, -1].max(), rel=1e-4)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_is_read_as_it_was_written(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), np.uint8)
    read = np.asarray(Image.open(BytesIO(png(pixels))))
    assert np.array_equal(read.reshape(pixels.shape), pixels)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((1, 1, 8, 9), (9, 8)),
        ((2, 3, 200, 100), (34, 67)),
        ((1, 8, 9, 3), (9, 8)),
        ((1, 7, 8, 9), None),
        ((1, 9), None),
    ],
    ids=["grey", "large", "channels-last", "no-image", "vector"],
)
def test_the_first_image_of_a_feed_is_pictured(shape: tuple[int, ...], size: tuple[int, int] | None) -> None:
    array = np.linspace(-2, 3, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    found = picture({"ids": np.zeros((1, 4), np.int64), "x": array})
    if size is None:
        assert found == ""
        return
    kind, _, text = found.partition(",")
    assert kind == "data:image/png;base64"
    image = Image.open(BytesIO(base64.b64decode(text)))
    assert image.size == size
    pixels = np.asarray(image)
    assert pixels.min() == 0
    assert pixels.max() >= 253  # of rows and columns that are left out, the last may hold the greatest


def test_a_picture_of_nan_or_of_one_value_is_no_error() -> None:
    flat = np.ones((1, 1, 4, 4), np.float32)
    assert picture({"x": flat}).startswith("data:")
    assert picture({"x": flat * np.nan}) == ""
    assert zlib.crc32(png(np.zeros((4, 4, 1), np.uint8))) != 0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (decibels(-3.25), "\u22123.2 dB"),
        (decibels(None), "\u2013"),
        (percent(0.98765), "98.77 %"),
        (percent(1, 0), "100 %"),
        (points(-0.005), "\u22120.50 points"),
        (points(-0.000001), "0.00 points"),
        (times(2.414), "2.41\u00d7"),
        (times(1234.5), "1234\u00d7"),
        (microseconds(12.34), "12.3 µs"),
        (microseconds(1234.0), "1.23 ms"),
        (microseconds(2.5e6), "2500 ms"),
        (size_text(999), "999 B"),
        (size_text(1_820_840), "1.82 MB"),
    ],
)
def test_numbers_are_written_as_people_read_them(text: str, wanted: str) -> None:
    assert text == wanted


def test_a_record_names_its_kind() -> None:
    assert RECORD.to_json()["kind"] == KIND


def test_a_view_refuses_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "no.onnx").write_bytes(b"nothing of the sort")
    with pytest.raises(RequantError, match=r"no\.onnx"):
        view_model(tmp_path / "no.onnx", tmp_path / "view.html")
    assert not (tmp_path / "view.html").exists()
