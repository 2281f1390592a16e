"""Folders of images: pixels, settings, labels, refusals."""

from __future__ import annotations

import builtins
import json
import pickle
import re
import shutil
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from requant import RequantError
from requant.calibration import DataError, DataSpec, InputSpec, open_source
from requant.calibration.data import audio, images, text
from requant.calibration.model.session import Array
from requant.cli import main

F2, F4, U1, I8 = (np.dtype(name) for name in ("float16", "float32", "uint8", "int64"))
SAMPLES = Path(__file__).parents[3] / "sample_models"


def spec(*shape: int | str | None, dtype: np.dtype[Any] = F4) -> InputSpec:
    return InputSpec("x", dtype, shape)


def noise(height: int, width: int, channels: int = 3) -> Array:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(height * 1000 + width).integers(0, 256, shape).astype(np.uint8)


def folder(path: Path, *images: Array | Image.Image) -> Path:
    path.mkdir(exist_ok=True)
    for index, image in enumerate(images):
        shown = image if isinstance(image, Image.Image) else Image.fromarray(image)
        shown.save(path / f"{index}.png")
    return path


def read(path: Path, preprocess: str, wanted: InputSpec, labels: Path | None = None) -> list[Array]:
    source = open_source(DataSpec(str(path), preprocess, labels=None if labels is None else str(labels)), [wanted])
    return [sample.feed["x"] for sample in source]


# ---------------------------------------------------------------------------------------------------- pixels


@pytest.mark.parametrize(("height", "width"), [(300, 400), (401, 300), (256, 256)], ids=["wide", "tall", "square"])
def test_the_usual_recipe_is_what_is_trained_with(tmp_path: Path, height: int, width: int) -> None:
    """The short side to 256 (the other rounded down), the middle, 0 to 1, mean and deviation per channel, in float32."""
    pixels = noise(height, width)
    text = "resize=256 crop=224 mean=0.485,0.456,0.406 std=0.229,0.224,0.225 layout=nchw scale=255 order=rgb"
    (got,) = read(folder(tmp_path / "d", pixels), text, spec("N", 3, 224, 224))
    size = (256, int(256 * width / height)) if height <= width else (int(256 * height / width), 256)
    image = Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BILINEAR)
    top, left = round((size[0] - 224) / 2), round((size[1] - 224) / 2)
    kept = np.asarray(image)[top : top + 224, left : left + 224].astype(np.float32) / np.float32(255)
    mean, std = np.array([0.485, 0.456, 0.406], F4), np.array([0.229, 0.224, 0.225], F4)
    assert got.dtype == F4
    assert got[0].tolist() == ((kept - mean) / std).transpose(2, 0, 1).tolist()


@pytest.mark.parametrize(
    ("text", "wanted", "expected"),
    [
        ("order=rgb", spec("N", 3, 2, 5), lambda p: p.transpose(2, 0, 1)[None]),
        ("order=bgr", spec("N", 3, 2, 5), lambda p: p[..., ::-1].transpose(2, 0, 1)[None]),
        ("order=rgb", spec("N", 2, 5, 3), lambda p: p[None]),
        ("layout=nhwc order=rgb", spec(None, None, None, None), lambda p: p[None]),
        ("order=rgb", spec(3, "H", "W"), lambda p: p.transpose(2, 0, 1)),
        ("layout=nhwc", spec("H", "W", 3), lambda p: p),
        ("scale=127.5 mean=1", spec(1, 3, 2, 5), lambda p: (p.transpose(2, 0, 1)[None] / F4.type(127.5)) - F4.type(1)),
        ("std=2", spec(1, 3, 2, 5), lambda p: p.transpose(2, 0, 1)[None] / F4.type(2)),
        ("scale=1 mean=0.5", spec(1, 3, 2, 5), lambda p: p.transpose(2, 0, 1)[None] - F4.type(0.5)),
        ("mean=1,2,3 order=bgr", spec(1, 2, 5, 3), lambda p: p[None, ..., ::-1] - np.array([1, 2, 3], F4)),
        ("crop=2x3 layout=nchw", spec(1, 3, 2, 3), lambda p: p.transpose(2, 0, 1)[None, ..., 1:4]),
        ("crop=2x4 layout=nchw", spec(1, 3, 2, 4), lambda p: p.transpose(2, 0, 1)[None, ..., 0:4]),
        ("pad=6x5 fill=9,8,7 order=bgr", spec(1, 6, 5, 3), lambda p: framed(p[..., ::-1], 2, 2, (9, 8, 7))[None]),
        ("pad=6x5 place=corner", spec(1, 6, 5, 3), lambda p: framed(p, 0, 4, (0, 0, 0))[None]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings(tmp_path: Path, text: str, wanted: InputSpec, expected: Any) -> None:
    pixels = noise(2, 5)
    (got,) = read(folder(tmp_path / "d", pixels), text, wanted)
    assert (got.dtype, got.tolist()) == (F4, expected(pixels.astype(F4)).tolist())


def framed(pixels: Array, above: int, below: int, colour: tuple[int, ...]) -> Array:
    rows = np.broadcast_to(np.array(colour, pixels.dtype), (1, *pixels.shape[1:]))
    return np.concatenate([*[rows] * above, pixels, *[rows] * below])


@pytest.mark.parametrize("name", ["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"])
def test_filters_are_those_of_pillow(tmp_path: Path, name: str) -> None:
    pixels = noise(20, 30)
    (got,) = read(folder(tmp_path / "d", pixels), f"resize=8x7 filter={name}", spec(1, 8, 7, 3))
    assert (
        got[0].tolist() == np.asarray(Image.fromarray(pixels).resize((7, 8), Image.Resampling[name.upper()])).tolist()
    )


@pytest.mark.parametrize(
    ("text", "sizes", "height", "width"),
    [
        ("resize=10", [(20, 33)], 10, 16),
        ("resize=10", [(33, 20)], 16, 10),
        ("pad=12", [(100, 40), (40, 100), (3, 5), (1000, 1)], 12, 12),
        ("pad=12x20", [(100, 40), (40, 100)], 12, 20),
    ],
    ids=["short-height", "short-width", "pad", "pad-wide"],
)
def test_sizes(tmp_path: Path, text: str, sizes: Sequence[tuple[int, int]], height: int, width: int) -> None:
    path = folder(tmp_path / "d", *(noise(*size) for size in sizes))
    assert {got.shape for got in read(path, text, spec("N", 3, "H", "W"))} == {(1, 3, height, width)}


def test_pad_keeps_the_ratio(tmp_path: Path) -> None:
    """A white image of 10x25 in 20x20: one factor for both sides, 8x20 (height x width), 6 rows above and below."""
    (got,) = read(folder(tmp_path / "d", np.full((10, 25), 255, np.uint8)), "pad=20 fill=114", spec(1, 1, 20, 20))
    rows = [[114] * 20] * 6 + [[255] * 20] * 8 + [[114] * 20] * 6
    assert got[0, 0].tolist() == rows


SIZES = st.tuples(st.integers(8, 300), st.integers(8, 300))
PER_CHANNEL = st.lists(st.floats(0, 1), min_size=3, max_size=3).map(tuple)
SETTINGS = st.fixed_dictionaries(
    {"scale": st.floats(1, 255), "filter": st.sampled_from(images.FILTERS)},
    optional={
        "order": st.sampled_from(["rgb", "bgr"]),
        "mean": PER_CHANNEL,
        "std": st.lists(st.floats(0.001, 1000), min_size=3, max_size=3).map(tuple),
        "layout": st.just("nchw"),
    },
)
SCALED: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({}),
    st.fixed_dictionaries({"resize": st.one_of(st.integers(300, 900), SIZES)}),
    st.fixed_dictionaries({"resize": st.integers(300, 900), "crop": SIZES}),
    st.fixed_dictionaries(
        {"pad": SIZES}, optional={"place": st.sampled_from(images.PLACES), "fill": st.just((1, 2, 3))}
    ),
)


@given(SETTINGS, SCALED)
@example({"scale": 1.0, "filter": "nearest", "mean": (0.0, 0.0, 0.0)}, {})
def test_a_recipe_prints_as_what_it_is_read_from(values: dict[str, Any], sizes: dict[str, Any]) -> None:
    written = " ".join(f"{name}={images._written(value)}" for name, value in (values | sizes).items())
    recipe = images.image_recipe(written, spec("N", 3, "H", "W"))
    assert images.image_recipe(str(recipe), recipe.spec) == recipe
    assert {name: getattr(recipe, name) for name in values} == values


@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(1, 500), st.integers(1, 500))
def test_what_is_padded_fits_and_keeps_its_ratio(height: int, width: int, tall: int, wide: int) -> None:
    """Both sides are scaled by the one factor that makes the image fit: to the nearest whole number, but at least 1."""
    recipe = images.image_recipe(f"pad={tall}x{wide}", spec("N", 3, "H", "W"))
    got = images._resized(Image.new("L", (width, height)), recipe, "a.png")
    factor = min(Fraction(tall, height), Fraction(wide, width))
    assert got.height <= tall
    assert got.width <= wide
    for side, before in ((got.height, height), (got.width, width)):
        assert side == 1 or abs(side - before * factor) <= Fraction(1, 2)
    assert got.height == tall or got.width == wide


def test_size_and_layout_left_open_are_the_inputs(tmp_path: Path) -> None:
    path = folder(tmp_path / "d", noise(30, 40))
    assert read(path, "", spec(1, 3, 8, 9))[0].tolist() == read(path, "resize=8x9 layout=nchw order=rgb", spec(1, 3, 8, 9))[0].tolist()  # fmt: skip
    assert read(path, "resize=12", spec(1, 3, 8, 9))[0].tolist() == read(path, "resize=12 crop=8x9", spec(1, 3, 8, 9))[0].tolist()  # fmt: skip
    assert read(path, "", spec(1, 3, "H", "W"))[0].shape == (1, 3, 30, 40)  # free: as it is
    assert "resize=8x9 filter=bilinear order=rgb layout=nchw" in open_source(DataSpec(str(path), ""), [spec(1, 3, 8, 9)]).description  # fmt: skip


@pytest.mark.parametrize(("dtype", "scale"), [(U1, ""), (I8, ""), (F2, "scale=255")], ids=["uint8", "int64", "float16"])
def test_element_types(tmp_path: Path, dtype: np.dtype[Any], scale: str) -> None:
    pixels = noise(6, 5)
    (got,) = read(folder(tmp_path / "d", pixels), scale, spec(1, 6, 5, 3, dtype=dtype))
    expected = (pixels.astype(F4) / F4.type(255)).astype(F2) if scale else pixels.astype(dtype)
    assert (got.dtype, got[0].tolist()) == (dtype, expected.tolist())


GREY = np.array([[0, 1, 128, 255]], np.uint8)


def palette() -> Image.Image:
    image = Image.fromarray(noise(5, 6)).convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
    image.info["transparency"] = bytes([0, 100, 200, 255])
    return image


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.fromarray(GREY), GREY),
        (Image.fromarray(GREY.astype(np.uint16) * 257), GREY),
        (Image.fromarray(np.array([[128, 129, 65535 - 129, 65535 - 128]], np.uint16)), np.array([[0, 1, 254, 255]])),
        (Image.fromarray(GREY > 100), np.array([[0, 0, 255, 255]])),
        (Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(GREY[:, ::-1])]), GREY),
    ],
    ids=["grey", "16-bit", "16-bit-rounded", "1-bit", "grey-alpha"],
)
def test_grey_images_become_three_equal_channels(tmp_path: Path, image: Image.Image, expected: Array) -> None:
    path = folder(tmp_path / "d", image)
    assert read(path, "", spec(1, 3, "H", "W"))[0][0].tolist() == np.stack([expected] * 3).astype(F4).tolist()
    assert read(path, "", spec(1, 1, "H", "W"))[0][0, 0].tolist() == expected.astype(F4).tolist()


def test_colours_of_every_kind(tmp_path: Path) -> None:
    rgb, alpha = noise(5, 6), noise(5, 6, 1)
    with_alpha = Image.fromarray(np.dstack([rgb, alpha]))
    indexed = palette()
    path = folder(tmp_path / "d", with_alpha, indexed)
    first, second = read(path, "", spec(1, 5, 6, 3, dtype=U1))
    assert first[0].tolist() == rgb.tolist()  # alpha is dropped, not blended
    assert second[0].tolist() == np.asarray(indexed.convert("RGBA"))[..., :3].tolist()
    first, second = read(path, "", spec(1, 5, 6, 4, dtype=U1))
    assert first[0].tolist() == np.dstack([rgb, alpha]).tolist()
    luma = read(folder(tmp_path / "e", rgb), "order=gray", spec(1, 1, 5, 6, dtype=U1))[0]
    assert luma[0, 0].tolist() == np.asarray(Image.fromarray(rgb).convert("L")).tolist()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(tmp_path: Path, orientation: int) -> None:
    """https://www.cipa.jp/std/documents/e/DC-008-2012_E.pdf, tag 274: what the row 0 and the column 0 of the file show."""
    upright = noise(3, 5, 1)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: upright.T[::-1],
        7: upright[::-1, ::-1].T,
        8: upright.T[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[274] = orientation
    (tmp_path / "d").mkdir()
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / "d" / "a.png", exif=exif)
    assert read(tmp_path / "d", "", spec(1, 1, 3, 5, dtype=U1))[0][0, 0].tolist() == upright.tolist()


def test_a_fixed_batch_is_filled(tmp_path: Path) -> None:
    images = [noise(2, 2) + index for index in range(6)]
    path = folder(tmp_path / "d", *images)
    source = open_source(DataSpec(str(path), ""), [spec(2, 2, 2, 3, dtype=U1)])
    assert source.length == 3
    assert [sample.feed["x"].tolist() for sample in source.read([0, 2])] == [
        np.stack(images[:2]).tolist(), np.stack(images[4:]).tolist(),
    ]  # fmt: skip
    assert [sample.where for sample in source][1] == f"{path / '2.png'}, sample 2 to {path / '3.png'}, sample 3"
    with pytest.raises(DataError, match=r"batches of 4, and 6 samples are no multiple: drop 2 or add 2"):
        open_source(DataSpec(str(path), ""), [spec(4, 2, 2, 3)])


# ---------------------------------------------------------------------------------------------------- samples


def test_only_what_is_picked_is_read(tmp_path: Path) -> None:
    path = folder(tmp_path / "d", *(noise(2, 2) for _ in range(4)))
    (path / "1.png").write_bytes(b"broken")
    source = open_source(DataSpec(str(path), ""), [spec(1, 3, 2, 2)])
    assert (source.length, source.rows.random) == (4, True)
    where = [str(path / f"{index}.png") + f", sample {index}" for index in range(4)]
    assert [sample.where for sample in source.samples(2)] == [where[0], where[2]]
    assert [sample.where for sample in source.read([2, 3])] == where[2:]
    assert [sample.where for sample in source.samples(2).read([1])] == [where[2]]


def test_a_reference_opens_the_same_samples_elsewhere(tmp_path: Path) -> None:
    path = folder(tmp_path / "d", *(noise(2, 2) + index for index in range(5)))
    here = open_source(DataSpec(str(path), "order=bgr"), [spec(1, 3, 2, 2)]).samples(3)
    reference, inputs = pickle.loads(pickle.dumps((here.reference, here.inputs)))
    there = open_source(reference, inputs).samples(3)
    assert [sample.feed["x"].tolist() for sample in there] == [sample.feed["x"].tolist() for sample in here]
    assert [sample.where for sample in there] == [sample.where for sample in here]


def test_a_wide_photograph_of_a_tall_one(tmp_path: Path) -> None:
    path = folder(tmp_path / "d", noise(300, 400), noise(400, 300))
    assert {got.shape for got in read(path, "resize=64 crop=64", spec("N", 3, "H", "W"))} == {(1, 3, 64, 64)}


# ---------------------------------------------------------------------------------------------------- refusals

NCHW = spec("N", 3, 224, 224)


@pytest.mark.parametrize(
    ("text", "wanted", "problem"),
    [
        ("rezise=256", NCHW, r"no key of preprocess named 'rezise'; did you mean 'resize'\?"),
        ("resize=256 resize=224", NCHW, r"'resize' is given twice"),
        ("resize", NCHW, r"'resize' has no value; write resize= and the length of the short side, or HEIGHTxWIDTH"),
        ("resize=big", NCHW, r"resize=big: expected the length of the short side, or HEIGHTxWIDTH"),
        ("resize=0", NCHW, r"resize=0: expected"),
        ("resize=-5", NCHW, r"resize=-5: expected"),
        ("crop=224x224x3", NCHW, r"crop=224x224x3: expected a length, or HEIGHTxWIDTH"),
        ("mean=a", NCHW, r"mean=a: expected numbers, one or one per channel"),
        ("mean=nan", NCHW, r"mean=nan: expected numbers"),
        ("std=1,0,1", NCHW, r"std=1,0,1: expected numbers above 0"),
        ("scale=0", NCHW, r"scale=0: expected what divides the pixels, at least 1"),
        ("scale=1/0", NCHW, r"scale=1/0: expected what divides the pixels, at least 1"),
        ("scale=1e-300/1e300", NCHW, r"expected what divides the pixels, at least 1"),
        ("scale=1/255", NCHW, r"scale=1/255: expected what divides the pixels, at least 1: write scale=255"),
        ("scale=0.0039", NCHW, r"scale=0.0039: expected what divides the pixels, at least 1: write scale=256"),
        ("scale=1/127.5", NCHW, r"at least 1: write scale=127.5"),
        ("layout=nchv", NCHW, r"layout=nchv: expected nchw or nhwc; did you mean 'nchw'"),
        ("order=brg", NCHW, r"order=brg: expected rgb or bgr or gray or rgba; did you mean"),
        ("filter=cubic", NCHW, r"filter=cubic: expected nearest or .*did you mean 'bicubic'"),
        ("place=left", NCHW, r"place=left: expected center or corner"),
        ("pad=224 fill=300", NCHW, r"fill=300: expected whole numbers from 0 to 255"),
        ("resize='256", NCHW, r"No closing quotation"),
        ("fill=114", NCHW, r"fill has no effect without pad"),
        ("place=corner", NCHW, r"place has no effect without pad"),
        ("pad=224 crop=224", NCHW, r"pad already scales the image; remove resize and crop"),
        ("crop=200", NCHW, r"images of 200x200, but the model needs 224x224 \(height x width\)"),
        ("resize=224x200", NCHW, r"images of 224x200, but the model needs 224x224"),
        ("crop=200 order=rgb", spec("N", 3, 224, "W"), r"images of 200x200, but the model needs 224xW"),
        ("resize=200", NCHW, r"crop=224x224 is larger than the image after resize=200"),
        ("resize=300x200 crop=224", NCHW, r"crop=224x224 is larger than the image after resize=300x200"),
        ("order=gray", NCHW, r"order=gray gives 1 channels, but input 'x', float32 \(N, 3, 224, 224\), has 3"),
        ("layout=nhwc", NCHW, r"layout=nhwc gives .* 224 channels; .* did you mean layout=nchw\?"),
        ("scale=255", spec(None, None, None, None), r"set layout=nchw or layout=nhwc: .* no axis has length 1, 3 or 4"),
        ("scale=255", spec("N", 3, 5, 3), r"set layout=nchw or layout=nhwc: .* two axes can be the channels"),
        ("layout=nchw", spec("N", None, 5, 3), r"set order=rgb, bgr, gray or rgba: input 'x', .* does not fix the channels"),
        ("mean=1,2", NCHW, r"mean has 2 values, but an image has 3 channels; give 1 or 3"),
        ("pad=224 fill=1,2,3,4", NCHW, r"fill has 4 values, but an image has 3 channels"),
        ("mean=0.485,0.456,0.406", NCHW, r"mean=0.485,0.456,0.406 fits pixels from 0 to 1: add scale=255"),
        ("scale=255 mean=123.7", NCHW, r"mean=123.7 is outside the range of the pixels, 0 to 1 after scale=255"),
        ("scale=255", spec(1, 224, 224, 3, dtype=U1), r"takes pixels from 0 to 255 unchanged; remove scale"),
        ("mean=127", spec(1, 224, 224, 3, dtype=U1), r"takes pixels from 0 to 255 unchanged; remove mean"),
        ("scale=255", spec("N", 784), r"input 'x' is float32 \(N, 784\); an image needs a numeric input of rank 4"),
        ("scale=255", spec(1, 3, 4, 4, dtype=np.dtype(np.bool_)), r"an image needs a numeric input of rank 4"),
    ],
)  # fmt: skip
def test_settings_are_refused_before_an_image_is_read(
    tmp_path: Path, text: str, wanted: InputSpec, problem: str
) -> None:
    (tmp_path / "a.jpg").write_bytes(b"not an image")
    with pytest.raises(DataError, match=problem) as caught:
        open_source(DataSpec(str(tmp_path), text), [wanted])
    assert str(caught.value).startswith(f"{tmp_path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        (NCHW, "resize=256 crop=224 order=rgb scale=255 mean=0.485,0.456,0.406 std=0.229,0.224,0.225 layout=nchw"),
        (spec(1, 240, 320, 3), "resize=240x320 order=rgb scale=255 mean=0.485,0.456,0.406 std=0.229,0.224,0.225 layout=nhwc"),
        (spec("N", 28, 28, 1), "resize=28x28 order=gray scale=255 layout=nhwc"),
        (spec(1, 64, 48, 3, dtype=U1), "resize=64x48 order=rgb layout=nhwc"),
        (spec(1, 1, "H", "W"), "order=gray scale=255 layout=nchw"),
    ],
    ids=str,
)  # fmt: skip
def test_without_preprocess_the_line_to_write_is_shown(tmp_path: Path, wanted: InputSpec, line: str) -> None:
    path = folder(tmp_path / "d", noise(300, 300))
    with pytest.raises(DataError, match=rf'for example --preprocess "{line}" \(in Python') as caught:
        open_source(str(path), [wanted])
    assert str(wanted) in str(caught.value)
    assert len(read(path, line, wanted)) == 1  # and it works


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", r"cannot be read as an image: cannot identify image file"),
        (b"text", r"cannot be read as an image: cannot identify image file"),
        ("truncated", r"cannot be read as an image: .*truncated"),
        ("float", r"the range of 32-bit pixels is unknown; store 8 or 16 bits"),
        ("small", r"is 3x9 \(height x width\), too small to crop to 5x5; use resize or pad"),
    ],
    ids=["empty", "text", "truncated", "float", "small"],
)
def test_bad_images_name_file_and_sample(tmp_path: Path, content: bytes | str, problem: str) -> None:
    path = folder(tmp_path / "d", noise(64, 64))
    bad = path / "9.png"
    if isinstance(content, bytes):
        bad.write_bytes(content)
    elif content == "truncated":
        bad.write_bytes((path / "0.png").read_bytes()[:5000])
    elif content == "float":
        bad = path / "9.tif"
        Image.fromarray(noise(8, 8, 1).astype(np.float32)).save(bad)
    else:
        Image.fromarray(noise(3, 9)).save(bad)
    with pytest.raises(DataError, match=problem) as caught:
        read(path, "crop=5", spec("N", 3, 5, 5))
    assert str(caught.value).startswith(f"{bad}, sample 1: ")
    assert "\n" not in str(caught.value)


def test_a_model_with_more_inputs_is_refused(tmp_path: Path) -> None:
    inputs = [NCHW, InputSpec("scale", F4, (1,))]
    with pytest.raises(
        DataError, match=r"each file is an image, but the model has 2 inputs: 'x', 'scale'; give FILE.py"
    ):
        open_source(DataSpec(str(folder(tmp_path / "d", noise(4, 4))), "scale=255"), inputs)


def test_pillow_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **others: Any) -> Any:
        if name.split(".")[0] == "PIL":
            raise ImportError(name)
        return real(name, *arguments, **others)

    path = folder(tmp_path / "d", noise(4, 4))
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RequantError, match=r"d: images need Pillow: pip install requant\[images\]"):
        open_source(DataSpec(str(path), "scale=255"), [NCHW])


# ---------------------------------------------------------------------------------------------------- labels


def labelled(path: Path, names: Sequence[str]) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(2, 2)).save(path / name)
    return path


def labels(path: Path, table: Path | None = None) -> list[Any]:
    source = open_source(DataSpec(str(path), "", labels=None if table is None else str(table)), [spec(1, 3, 2, 2)])
    return [(Path(sample.where.rpartition(",")[0]).relative_to(path).as_posix(), sample.label) for sample in source]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["dog/b.png", "cat/z.png", "cat/a/deep.PNG"], [("cat/a/deep.PNG", 0), ("cat/z.png", 0), ("dog/b.png", 1)]),
        (["10/a.png", "2/a.png"], [("10/a.png", 10), ("2/a.png", 2)]),
        (["007/a.png"], [("007/a.png", 7)]),
        (["2/a.png", "cat/a.png"], [("2/a.png", 0), ("cat/a.png", 1)]),
        (["b.png", "a.png", ".hidden.png", ".thumbs/a.png", "notes.txt.png"], [("a.png", None), ("b.png", None), ("notes.txt.png", None)]),
        (["images/b.png", "images/a.png"], [("images/a.png", None), ("images/b.png", None)]),
    ],
    ids=["names", "numbers", "one-number", "mixed", "none", "one-folder"],
)  # fmt: skip
def test_labels_from_sub_folders(tmp_path: Path, names: Sequence[str], expected: list[Any]) -> None:
    assert labels(labelled(tmp_path, names)) == expected


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["cat/a.png", "dog/b.png", "c.png"], r"c.png: not in a sub-folder, but sub-folders are the classes"),
        (
            ["cat/a.png", "dog/b.png", "notes/.a.png"],
            r"notes: sub-folders are the classes, but this one has no such files",
        ),
    ],
    ids=["loose", "empty"],
)
def test_sub_folders_that_are_no_classes(tmp_path: Path, names: Sequence[str], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        labels(labelled(tmp_path, names))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("l.csv", "a.png,7\nb.png,3\n", [7, 3]),
        ("l.csv", "file,label\na.png,7\nb.png,3\n", [7, 3]),
        ("l.csv", "\ufefflabel,note,File\n7,x,a.png\n\n3,y,b.png\n", [7, 3]),
        ("l.csv", "b.png,dog\na.png,cat\nmore.png,bird\n", [1, 2]),
        ("l.tsv", "a.png\t7\nb.png\t3\n", [7, 3]),
        ("l.txt", "a.png 7\nb.png 3\n", [7, 3]),
        ("l.csv", "d/a.png,7\nd\\b.png,3\n", [7, 3]),
    ],
    ids=["two-columns", "header", "header-anywhere", "names", "tabs", "blanks", "with-the-folder"],
)
def test_labels_from_a_table(tmp_path: Path, name: str, text: str, expected: list[int]) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    path = labelled(tmp_path / "d", ["a.png", "b.png"])
    assert [label for _, label in labels(path, tmp_path / name)] == expected


def test_a_table_wins_over_sub_folders(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("x/a.png,5\nb.png,6\nx/c.png,1\nc.png,2\n")
    path = labelled(tmp_path / "d", ["x/a.png", "y/b.png", "x/c.png", "c.png"])
    assert dict(labels(path, tmp_path / "l.csv")) == {"x/a.png": 5, "y/b.png": 6, "x/c.png": 1, "c.png": 2}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a.png,1\n", r"l.csv: no label for x/b.png"),
        ("a.png,1\nx/b.pmg,2\n", r"no label for x/b.png; did you mean 'x/b.pmg'"),
        ("a.png,1\na.png,2\n", r"l.csv, line 2: a.png has label '1' above and '2' here"),
        ("a.png\n", r"l.csv, line 1: expected a file and its label, got 'a.png'"),
        ("a.png,\n", r"l.csv, line 1: expected a file and its label"),
        ("", r"l.csv: holds no labels"),
        ('a.png,"1\n', r"l.csv: cannot be read as a table"),
        ("a.png,1\nx/b.png,1\nc.png,1\n", r"'c.png' is the name of 2 files; write the path below"),
    ],
    ids=["missing", "near", "twice", "one-column", "empty-cell", "empty", "quote", "ambiguous"],
)
def test_tables_that_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "l.csv").write_text(text)
    path = labelled(tmp_path / "d", ["a.png", "x/b.png", "x/c.png", "y/c.png"][: 4 if "c.png" in text else 2])
    with pytest.raises(DataError, match=problem):
        labels(path, tmp_path / "l.csv")
    with pytest.raises(RequantError, match=r"gone.csv: no such file"):
        labels(path, tmp_path / "gone.csv")
    with pytest.raises(DataError, match=r"l.json: labels must be a .csv, .tsv, .txt table"):
        labels(path, tmp_path / "l.json")


# ---------------------------------------------------------------------------------------------------- command line


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first digits of the sample data as images in sub-folders named by their classes."""
    path = tmp_path_factory.mktemp("digits")
    with np.load(SAMPLES / "digits.npz") as held:
        images, classes = held["image"][:40], held["labels"][:40]
    for index, (image, label) in enumerate(zip(images, classes, strict=True)):
        (path / str(label)).mkdir(exist_ok=True)
        Image.fromarray(np.rint(image[0] / images.max() * 255).astype(np.uint8)).save(
            path / str(label) / f"{index}.png"
        )
    return path


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(main, [*map(str, arguments)])


def test_compare_over_labelled_images(tmp_path: Path, digits: Path) -> None:
    with np.load(SAMPLES / "digits.npz") as held:
        scale = 255 / held["image"][:40].max()
    model = SAMPLES / "digits.onnx"
    same = shutil.copy(model, tmp_path / "same.onnx")
    done = invoke("compare", model, same, "--data", digits, "--preprocess", f"scale={scale:.9g} order=gray", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["samples"], found["items"]) == (40, 40)
    assert found["float_accuracy"] > 0.9


def test_calibrate_over_images(tmp_path: Path, digits: Path) -> None:
    target = tmp_path / "r.json"
    arguments = ("calibrate", SAMPLES / "digits.onnx", "--data", digits, "--samples", 10, "-o", target)
    done = invoke(*arguments)
    assert (done.exit_code, target.exists()) == (2, False)
    assert '--preprocess "resize=' in done.stderr
    assert invoke(*arguments, "--preprocess", "scale=16").exit_code == 0
    assert target.exists()


@pytest.mark.parametrize(
    ("data", "options", "problem"),
    [
        (
            "digits.npz",
            ["--preprocess", "scale=255"],
            "a .npz file takes no preprocess; it is for folders of images",
        ),
        ("digits.npz", ["--labels", "l.csv"], "a .npz file takes no labels"),
        ("digits.npz", ["--tokenizer", "t.py:f"], "a .npz file takes no tokenizer; it is for .csv and .jsonl files"),
        ("images", ["--preprocess", "scale=255", "--tokenizer", "t.py:f"], "takes no tokenizer"),
        (None, ["--preprocess", "scale=255"], "--preprocess needs --data SRC"),
    ],
    ids=["preprocess", "labels", "tokenizer", "images", "no-data"],
)
def test_options_that_do_nothing_are_refused(
    tmp_path: Path, digits: Path, data: str | None, options: list[str], problem: str
) -> None:
    given = [] if data is None else ["--data", digits if data == "images" else SAMPLES / data]
    for command in (["calibrate", SAMPLES / "digits.onnx"], ["quantize", SAMPLES / "digits.onnx"]):
        done = invoke(*command, *given, *options, "-o", tmp_path / "out")
        assert done.exit_code == 2
        assert problem in done.stderr
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------- documentation


@pytest.mark.parametrize(("section", "keys"), [("Images", images.KEYS), ("Sounds", audio.KEYS), ("Texts", text.KEYS)])
def test_every_key_is_documented(section: str, keys: Mapping[str, Any]) -> None:
    page = (SAMPLES.parent / "docs" / "data.md").read_text(encoding="utf-8")
    (body,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^\| `(\w+)` \|", body, flags=re.MULTILINE) == [*keys]


def test_the_documented_recipes_can_be_read() -> None:
    page = (SAMPLES.parent / "docs" / "data.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| trained with .*?\n\n", page, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"`(.*?)`", table)
    assert len(found) == 5
    for line in found:
        side = re.findall(r"(?:crop|pad|resize)=(\d+)(?:x\d+)?", line)[-1]
        shape = (1, int(side), int(side), 3) if "nhwc" in line else (1, 3, int(side), int(side))
        assert images.image_recipe(line, spec(*shape)).spec.shape == shape
