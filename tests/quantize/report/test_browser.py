"""The pages in a browser: what they show, what a click and a key do, and that nothing leaves the file."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx
import onnx.parser
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, ViewportSize, sync_playwright

from requant.quantize import Options, quantize_model
from requant.quantize.report import Record, Recorder, load_record, report_runs, view_model, write_reports
from requant.quantize.report.record import Point, Search

ROOT = Path(__file__).parents[3]
SAMPLES = ROOT / "sample_models"
KIT = ROOT.parent / "shared" / "realkit"
SECTIONS = "summary graph noise histogram weights time items pipeline data-findings environment".split()
WINDOW: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 360, "height": 740}
DESK: ViewportSize = {"width": 1280, "height": 800}
HANDY: ViewportSize = {"width": 390, "height": 844}
PRICES = (0.0, 0.05, 0.1)
MISSING = "no Chromium: 'make chromium' installs it, or put one on the PATH"


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = find_chromium()
    if found is None and os.environ.get("CI"):
        pytest.fail(MISSING)
    if found is None:
        pytest.skip(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, headless=True, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page with all that it said and asked for."""

    page: Page
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


Open = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    yield from opening(browser)


@pytest.fixture(scope="module")
def page(browser: Browser, digits: tuple[Path, Record]) -> Iterator[Page]:
    """Return the report of the digits network for all tests that only look and choose."""
    for open_page in opening(browser):
        yield open_page(digits[0])


def opening(browser: Browser) -> Iterator[Open]:
    """Yield what opens files; afterwards they must have said nothing, and asked for nothing but themselves."""
    opened: list[tuple[Path, Opened]] = []

    def make(path: Path, *, dark: bool = False, window: ViewportSize = WINDOW) -> Page:
        context = browser.new_context(
            viewport=window, color_scheme="dark" if dark else "light", reduced_motion="reduce"
        )
        page = context.new_page()
        seen = Opened(page)

        def answer(route: Route) -> None:
            seen.asked.append(route.request.url)
            if route.request.url == path.as_uri():
                route.continue_()
            else:
                route.abort()

        context.route("**/*", answer)
        page.on("console", lambda message: seen.said.append(message.text))
        page.on("pageerror", lambda error: seen.said.append(str(error)))
        page.on("dialog", lambda dialog: seen.said.append(dialog.message))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=yes]")
        opened.append((path, seen))
        return page

    yield make
    for path, seen in opened:
        assert seen.said == []
        assert seen.asked == [path.as_uri()]
        seen.page.context.close()


def quantized(name: str, folder: Path, place: str) -> Record:
    """Quantize a sample model and return the record of the run."""
    recorder = Recorder([folder / f"{name}.html"], f"requant quantize {name}.onnx")
    data = f"{SAMPLES / 'digits.npz'}:calib"
    asked = Options(effort="low", force_int8=True, seconds=0.1, samples=40, place=place)
    result = quantize_model(SAMPLES / f"{name}.onnx", data, folder / f"{name}_int8.onnx", asked, look=recorder.look)
    recorder.write(result)
    assert recorder.record is not None
    return recorder.record


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    """Return the page of a run with integers in it, and what it is made of."""
    folder = tmp_path_factory.mktemp("report")
    record = quantized("digits", folder, "rules")
    return folder / "digits.html", record


def draw_all(page: Page) -> None:
    """Bring every chart into sight, so that it is drawn."""
    for chart in page.query_selector_all(".chart"):
        chart.scroll_into_view_if_needed()
        page.wait_for_function("chart => chart.querySelector('svg.drawn')", arg=chart)


def faults(page: Page) -> list[str]:
    """Return the faults that axe-core finds."""
    found = Axe().run(page).response["violations"]
    return [f"{fault['id']}: {node['html'][:120]}" for fault in found for node in fault["nodes"]]


@pytest.mark.slow
def test_every_section_is_there_and_is_led_to(page: Page) -> None:
    assert [section.get_attribute("id") for section in page.query_selector_all("main section")] == SECTIONS
    links = [link.get_attribute("href") for link in page.query_selector_all("nav a")]
    assert links == [f"#{name}" for name in SECTIONS]
    for name in ("header", "nav", "main", "footer"):
        assert page.locator(name).count() == 1


def test_the_headline_says_what_the_record_holds(digits: tuple[Path, Record], page: Page) -> None:
    _, record = digits
    text = page.inner_text("#summary")
    head = record.headline
    assert head.speedup is not None
    assert f"{head.speedup:.2f}" in text
    assert f"{head.float_bytes / head.int8_bytes:.2f}" in text
    assert "drop by labels" in text
    assert "predicted drop, without labels" in text


def in_first_screen(page: Page, selectors: Sequence[str]) -> None:
    """Assert that elements are within the window, before anything is scrolled."""
    width, height = page.evaluate("[innerWidth, innerHeight]")
    for selector in selectors:
        for found in page.locator(selector).all():
            box = found.bounding_box()
            assert box is not None
            assert min(box["x"], box["y"]) >= 0, selector
            assert box["x"] + box["width"] <= width, selector
            assert box["y"] + box["height"] <= height, selector


BROKEN_WORDS = """roots => roots.flatMap(root => {
    const found = [], walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    for (let text = walk.nextNode(); text; text = walk.nextNode())
        for (const word of text.data.matchAll(/[^ ]+/g)) {
            const range = new Range();
            range.setStart(text, word.index);
            range.setEnd(text, word.index + word[0].length);
            if (new Set([...range.getClientRects()].map(rect => rect.top)).size > 1) found.push(word[0]);
        }
    return found;
})"""


@pytest.mark.parametrize("window", [DESK, pytest.param(HANDY, marks=pytest.mark.slow)], ids=["wide", "phone"])
def test_the_first_screen_answers(
    digits: tuple[Path, Record], open_page: Open, window: ViewportSize, tmp_path: Path
) -> None:
    """Is it faster, is it as accurate, why not more: a sentence, four cards, three costs with their reasons."""
    _, record = digits
    page = open_page(digits[0], window=window)
    in_first_screen(page, [".verdict", ".cards .card", ".costs", ".costs li"])
    head, found = record.headline, record.judged and record.judged.labelled
    assert head.speedup is not None
    assert found
    assert page.inner_text(".verdict") == head.verdict
    assert re.match(rf"{re.escape(f'{head.speedup:.1f}')}x faster(, | \(machine busy, )", head.verdict)
    assert f"{100 * found.float_correct / found.items:.2f} % → " in page.inner_text(".cards").replace("\n", " ")
    told = page.locator(".costs li").all_inner_texts()
    assert 1 <= len(told) <= 3
    assert "25 products per output are too few for the integer kernel" in told[0]
    assert all("µs" in text for text in told)
    assert page.eval_on_selector_all(".verdict, .card, th", BROKEN_WORDS) == []
    tops = page.eval_on_selector_all(".cards .card", "cards => cards.map(card => card.getBoundingClientRect().top)")
    assert len(set(tops)) == (1 if window is DESK else 2)

    why = "int8 gains too little here: 1.01x the speed of float, 1.01x the speed of simplified float"
    why_not = f"{why}: the output is the simplified float model"
    kept = replace(head, verdict=f"NOT INT8: {why_not}", why_not=why_not, rejected_speedup=1.01)
    write_reports(replace(record, headline=kept), [tmp_path / "kept.html"])
    float_ = open_page(tmp_path / "kept.html", window=window)
    in_first_screen(float_, [".verdict", ".cards .card", ".costs", ".costs li"])
    assert float_.inner_text(".verdict").startswith(f"NOT INT8: {why}")

    view_model(SAMPLES / "digits_mobile.onnx", tmp_path / "view.html")
    viewed = open_page(tmp_path / "view.html", window=window)
    in_first_screen(viewed, [".cards .card", "#graph-svg .box.on"])
    assert viewed.eval_on_selector_all(".card", BROKEN_WORDS) == []
    assert viewed.inner_text("#node-panel h3") == "Conv"


def test_a_clicked_node_shows_its_numbers(digits: tuple[Path, Record], page: Page) -> None:
    _, record = digits
    unit = next(unit for unit in record.units if unit.implementation == "u8->u8" and unit.op == "Conv")
    tensor = next(row for row in record.tensors if row.name in unit.outputs)
    page.click(f"#graph-svg [data-name='{unit.name}']")
    text = page.inner_text("#node-panel")
    assert unit.op in text
    assert unit.int8_kernels[0] in text
    assert unit.float_us is not None
    assert f"{unit.float_us:.3g} µs" in text
    assert tensor.sqnr_db is not None
    assert f"{tensor.sqnr_db:.1f} dB" in text
    assert page.get_attribute(f"#graph-svg [data-name='{unit.name}']", "aria-pressed") == "true"


def test_a_float_node_says_why(digits: tuple[Path, Record], page: Page) -> None:
    _, record = digits
    unit = next(unit for unit in record.units if unit.implementation == "float" and unit.reason)
    page.fill("#node", unit.name)
    page.press("#node", "Enter")
    assert f"Why it is float: {unit.reason}" in page.inner_text("#node-panel")


def test_a_chosen_tensor_is_drawn(digits: tuple[Path, Record], page: Page) -> None:
    _, record = digits
    for row in [row for row in record.tensors if row.bins is not None][:3]:
        assert row.bins is not None
        page.fill("#tensor", row.name)
        page.press("#tensor", "Enter")
        page.wait_for_function(
            "told => document.querySelector('#tensor-told').textContent.startsWith(told)", arg=f"{row.name}: "
        )
        bars = page.eval_on_selector_all(
            "#chart-histogram .bar", "bars => bars.map(bar => [bar.getBBox().height, bar.getAttribute('fill')])"
        )
        heights = [height for height, _ in bars]
        assert max(heights) > 100
        logarithms = [math.log(max(count, 0.5) / 0.5) for count in row.bins.counts]
        scale = max(heights) / max(logarithms)
        assert heights == pytest.approx([scale * each for each in logarithms], abs=0.01)
        assert page.locator("#chart-histogram .mark").count() == (0 if row.lo is None else 2)
        assert row.clipped == 0
        assert {paint for _, paint in bars} == {"var(--after)"}  # no bin is marked where nothing is clipped
        assert page.inner_text("#tensor-told").startswith(f"{row.name}: observed")
        assert page.locator("#tensor-table tr").count() == len(row.bins.counts)
        assert str(max(row.bins.counts)) in str(page.text_content("#tensor-table")).replace(",", "")


def test_a_part_of_a_name_finds_a_tensor_and_nonsense_is_told(digits: tuple[Path, Record], page: Page) -> None:
    _, record = digits
    row = next(row for row in record.tensors if row.bins is not None)
    page.fill("#tensor", row.name[:-1].upper())
    page.press("#tensor", "Enter")
    assert page.input_value("#tensor") == row.name
    page.fill("#tensor", "no such tensor")
    page.press("#tensor", "Enter")
    assert "No tensor" in page.inner_text("#tensor-told")


def test_the_weights_of_a_chosen_node_are_drawn(digits: tuple[Path, Record], page: Page) -> None:
    _, record = digits
    draw_all(page)
    for row in record.weights[:2]:
        page.select_option("#layer", row.node)
        assert page.locator("#chart-weights .bar").count() == len(row.lo)
        assert f"{row.channels} output channels" in page.inner_text("#layer-told")


def test_times_come_in_pairs_and_charts_have_tables(digits: tuple[Path, Record], page: Page) -> None:
    _, record = digits
    draw_all(page)
    assert page.locator("#chart-time .bar").count() == 2 * len(record.times)
    for chart in page.query_selector_all(".chart"):
        assert chart.evaluate("chart => chart.closest('section').querySelectorAll('details table').length") == 1
        assert chart.get_attribute("aria-label")


def test_worst_samples_have_their_pictures(digits: tuple[Path, Record], page: Page) -> None:
    _, record = digits
    assert record.judged is not None
    sizes = page.eval_on_selector_all(
        "#items img", "images => images.map(image => [image.naturalWidth, image.naturalHeight])"
    )
    assert sizes == [[28, 28]] * len(record.judged.items)


def test_arrow_keys_go_along_the_tensors(digits: tuple[Path, Record], page: Page) -> None:
    _, record = digits
    page.focus("#node")
    page.keyboard.press("Tab")
    page.keyboard.press("Home")
    focused = "document.activeElement.dataset.name"
    assert page.evaluate(focused) == record.graph.inputs[0]
    for node in record.graph.nodes[:3]:
        page.keyboard.press("ArrowDown")
        assert page.evaluate(focused) == node.name
        assert page.inner_text("#node-panel h3") == node.op
    page.keyboard.press("ArrowUp")
    assert page.evaluate(focused) == record.graph.nodes[1].name
    page.keyboard.press("End")
    assert page.evaluate(focused) == record.graph.outputs[-1]
    assert page.evaluate("document.querySelectorAll('#graph-svg [tabindex=\"0\"]').length") == 1


@pytest.mark.slow
def test_the_picture_is_moved_and_zoomed(digits: tuple[Path, Record], open_page: Open) -> None:
    page = open_page(digits[0])

    def view() -> list[float]:
        return [float(part) for part in str(page.get_attribute("#graph-svg", "viewBox")).split()]

    before = view()
    page.click("#zoom-in")
    assert view()[2] < before[2]
    page.click("#zoom-fit")
    whole = view()
    assert whole[3] >= float(str(page.get_attribute("#graph-svg", "data-height")))
    box = page.locator("#graph-svg").bounding_box()
    assert box is not None
    across, down = box["x"] + 20, box["y"] + box["height"] / 2
    page.mouse.move(across, down)
    page.mouse.down()
    page.mouse.move(across + 40, down + 30, steps=4)
    page.mouse.up()
    scale = whole[2] / box["width"]
    assert view()[:2] == pytest.approx([whole[0] - 40 * scale, whole[1] - 30 * scale], abs=2 * scale)  # whole pixels


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["light", "dark"])
def test_axe_finds_no_serious_fault(digits: tuple[Path, Record], open_page: Open, dark: bool) -> None:
    path, record = digits
    page = open_page(path, dark=dark, window=WINDOW if dark else PHONE)
    draw_all(page)
    page.click(f"#graph-svg [data-name='{record.units[0].name}']")
    for summary in page.query_selector_all("summary"):
        summary.click()
    assert page.evaluate("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    page.evaluate("for (const p of document.querySelectorAll('main p')) p.append(' ', 'path/'.repeat(40))")
    assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("innerWidth")
    assert faults(page) == []


@pytest.mark.slow
def test_the_switch_turns_the_page_and_its_charts_dark(digits: tuple[Path, Record], open_page: Open) -> None:
    page = open_page(digits[0])
    draw_all(page)
    painted = "getComputedStyle(document.querySelector('#chart-sqnr .bar')).fill"
    before = page.evaluate("getComputedStyle(document.body).backgroundColor"), page.evaluate(painted)
    page.click("#theme")
    after = page.evaluate("getComputedStyle(document.body).backgroundColor"), page.evaluate(painted)
    assert before[0] != after[0]
    assert before[1] != after[1]


@pytest.mark.slow
def test_it_prints_with_all_charts_and_without_controls(digits: tuple[Path, Record], open_page: Open) -> None:
    page = open_page(digits[0])
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("[...document.querySelectorAll('.chart')].every(chart => chart.querySelector('svg.drawn'))")
    for hidden in ("nav", "#theme", ".zoom", ".controls"):
        assert not page.locator(hidden).first.is_visible()
    assert page.pdf()[:5] == b"%PDF-"


@pytest.mark.slow
def test_several_runs_stand_side_by_side(digits: tuple[Path, Record], open_page: Open, tmp_path: Path) -> None:
    _, record = digits
    head = replace(record.headline, verdict="NOT INT8: int8 gains too little here", why_not="too little", sqnr_db=20.0)
    other = replace(record, name="other <run>", headline=head)
    for name, each in (("one", record), ("two", other)):
        write_reports(each, [tmp_path / f"{name}.json"])
    report_runs([tmp_path / "one.json", tmp_path / "two.json"], tmp_path / "both.html")
    page = open_page(tmp_path / "both.html")
    draw_all(page)
    names = ["digits_int8", "other <run>"]
    assert page.locator("#summary thead th").all_inner_texts()[1:] == names
    assert page.locator(".verdicts dt").all_inner_texts() == names
    assert page.locator(".verdicts dd").all_inner_texts()[1] == "NOT INT8: int8 gains too little here"
    assert "20.0 dB" in page.inner_text("#summary")
    best = page.locator("#summary tr", has=page.locator(".best"))
    assert [text.split()[0] for text in best.all_inner_texts()] == ["SQNR"]  # all other values are equal
    assert best.locator("td").nth(0).locator(".best").count() == 1  # the one with less noise
    assert page.locator("#chart-runs-sqnr .key").all_text_contents() == names
    tensors = sum(row.sqnr_db is not None for row in record.tensors)
    assert page.locator("#chart-runs-sqnr .bar").count() == 2 * tensors
    assert page.locator("#chart-runs-time .key").count() == 3  # float is of one model, and drawn once
    assert faults(page) == []


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def evil_model() -> onnx.ModelProto:
    """Return a model whose names are markup."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        net (float[1,4] x) => (float[1,4] y) { [first] a = Relu(x) [second] y = Sigmoid(a) }
    """)
    model.graph.node[0].name = EVIL
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = f"{EVIL}'\"&{{{{ 7 * 7 }}}}"
    return model


def test_names_are_text_and_nothing_else(open_page: Open, tmp_path: Path) -> None:
    onnx.save(evil_model(), tmp_path / "evil.onnx")
    view_model(tmp_path / "evil.onnx", tmp_path / "evil.html")
    page = open_page(tmp_path / "evil.html")
    page.fill("#node", EVIL)
    page.press("#node", "Enter")
    assert EVIL in page.inner_text("#node-panel")
    assert "{{ 7 * 7 }}" in page.inner_text("#node-panel")
    assert page.locator("img").count() == 0


@pytest.mark.slow
def test_a_model_is_viewed(open_page: Open, tmp_path: Path) -> None:
    view_model(SAMPLES / "digits.onnx", tmp_path / "view.html")
    page = open_page(tmp_path / "view.html", dark=True)
    model = onnx.load(SAMPLES / "digits.onnx")
    assert page.locator("#graph-svg .box").count() == len(model.graph.node) + 2
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    page.click(f"#graph-svg [data-name='{conv.name}']")
    text = page.inner_text("#node-panel")
    assert conv.input[1] in text
    assert "kernel_shape" in text
    assert "float32 (N, 1, 28, 28)" in page.inner_text("#ends")
    assert faults(page) == []


@pytest.mark.slow
def test_a_search_is_drawn_against_its_bar(digits: tuple[Path, Record], open_page: Open, tmp_path: Path) -> None:
    points = [
        Point(price=price, value=0.9 + price, speedup=3 - price, int8_units=4, kept=price > 0.02) for price in PRICES
    ]
    found = Search(
        metric="top1", before=0.99, bar=0.93, points=tuple(points), frontier=tuple(points), best=points[1], seconds=9.0
    )
    write_reports(replace(digits[1], search=found), [tmp_path / "search.html"])
    page = open_page(tmp_path / "search.html")
    draw_all(page)
    assert page.locator("#chart-search .point").count() == len(points) + 1  # and float
    assert page.locator("#chart-search .mark").count() == 1
    assert page.locator("#search tbody tr").count() == len(points)
    assert "the fastest model that keeps it is 2.95" in page.inner_text("#search")


@pytest.mark.slow
def test_a_report_without_most_parts_is_whole(digits: tuple[Path, Record], open_page: Open, tmp_path: Path) -> None:
    _, record = digits
    bare = replace(
        record, tensors=(), weights=(), times=(), judged=None, pipeline=(), stages={}, remarks=("kernels: -",)
    )
    write_reports(bare, [tmp_path / "bare.html"])
    page = open_page(tmp_path / "bare.html")
    left = [name for name in SECTIONS if name not in ("noise", "histogram", "weights", "time", "items")]
    assert [section.get_attribute("id") for section in page.query_selector_all("main section")] == left
    page.click(f"#graph-svg [data-name='{record.units[0].name}']")
    assert "kernels: -" in page.inner_text("#summary")


# ------------------------------------------------------------------------------------------------------- other models


def look_through(page: Page, record: Record) -> None:
    """Assert what holds of any report."""
    draw_all(page)
    boxes = len(record.graph.nodes) + len(record.graph.inputs) + len(record.graph.outputs)
    assert page.locator("#graph-svg .box").count() == boxes
    timed = [unit for unit in record.units if unit.float_us is not None and unit.int8_us is not None]
    for unit in sorted(timed, key=lambda unit: -(unit.float_us or 0))[:3]:
        page.fill("#node", unit.name)
        page.press("#node", "Enter")
        text = page.inner_text("#node-panel")
        assert unit.int8_kernels[0] in text
    for row in [row for row in record.tensors if row.bins is not None][:3]:
        page.fill("#tensor", row.name)
        page.press("#tensor", "Enter")
        assert page.inner_text("#tensor-told").startswith(f"{row.name}: observed")
    assert faults(page) == []


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["digits_mobile", "digits_transformer"])
def test_the_other_sample_models(name: str, dark: bool, open_page: Open, tmp_path: Path) -> None:
    record = quantized(name, tmp_path, "all")
    assert record.remarks == ()
    page = open_page(tmp_path / f"{name}.html", dark=dark)
    assert [section.get_attribute("id") for section in page.query_selector_all("main section")] == SECTIONS
    look_through(page, record)
    phone = open_page(tmp_path / f"{name}.html", window=PHONE)
    draw_all(phone)
    assert phone.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.slow
@pytest.mark.skipif(not (KIT / "realkit.py").is_file(), reason="no kit of real models in ../shared/realkit")
@pytest.mark.parametrize("task", ["mbv1_075", "kwt1"])
def test_real_models(task: str, open_page: Open, tmp_path: Path) -> None:
    told = [sys.executable, "-c", f"from realkit import TASKS; print(TASKS[{task!r}].model)"]
    model = subprocess.run(told, cwd=KIT, capture_output=True, text=True, check=True).stdout.strip()
    recorder = Recorder([tmp_path / "page.html", tmp_path / "run.json"], "requant quantize")
    asked = Options(samples=16, effort="low", place="rules", force_int8=True, seconds=0.5)
    data = f"{KIT / 'realkit.py'}:{task}_calib"
    recorder.write(quantize_model(model, data, tmp_path / "int8.onnx", asked, look=recorder.look))
    record = load_record(tmp_path / "run.json")
    assert record.remarks == ()
    assert json.loads((tmp_path / "run.json").read_text())["schema"] == 1
    assert math.isfinite(record.headline.speedup or math.nan)
    look_through(open_page(tmp_path / "page.html"), record)
