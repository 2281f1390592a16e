"""Folders of images as data: decoded by Pillow, brought to the size, type and layout of a model's input."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .. import RequantError
from .media import media_labels, the_input
from .samples import DataError, Picked, Rows, Sample, in_batches
from .session import Array, InputSpec
from .settings import Key, numbers, one_of, parse_settings, positive, whole

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm", ".jp2", ".avif")
)
"""How the names of images end."""
ORDERS = {"rgb": 3, "bgr": 3, "gray": 1, "rgba": 4}
"""Orders of channels, and how many there are."""
MODES = {"gray": "L", "rgba": "RGBA"}
"""Pillow's names of them, where these are not RGB."""
USUAL = {3: "rgb", 1: "gray", 4: "rgba"}
FILTERS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
LAYOUTS = {"nchw": -3, "nhwc": -1}
"""Orders of axes, and where the channels are."""
PLACES = ("center", "corner")
BYTE = 255

Size: TypeAlias = tuple[int, int]
"""Height and width."""


def _side_or_size(text: str) -> int | Size:
    """Read ``256`` or ``256x320``."""
    if not re.fullmatch(r"[0-9]+(x[0-9]+)?", text):
        raise ValueError
    sides = [whole(side) for side in text.split("x")]
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def _size(text: str) -> Size:
    """Read ``224``, which is 224x224, or ``224x320``."""
    found = _side_or_size(text)
    return (found, found) if isinstance(found, int) else found


def _fill(text: str) -> tuple[int, ...]:
    """Read one or more values of a pixel."""
    values = numbers(text)
    if any(value != int(value) or not 0 <= value <= BYTE for value in values):
        raise ValueError
    return tuple(map(int, values))


def _deviations(text: str) -> tuple[float, ...]:
    """Read numbers above 0."""
    return tuple(positive(part) for part in text.split(","))


KEYS: Mapping[str, Key] = {
    "resize": Key(_side_or_size, "the length of the short side, or HEIGHTxWIDTH"),
    "pad": Key(_size, "a length, or HEIGHTxWIDTH"),
    "fill": Key(_fill, "whole numbers from 0 to 255, one or one per channel"),
    "place": one_of(PLACES),
    "crop": Key(_size, "a length, or HEIGHTxWIDTH"),
    "filter": one_of(FILTERS),
    "order": one_of(tuple(ORDERS)),
    "scale": Key(positive, "a number above 0"),
    "mean": Key(numbers, "numbers, one or one per channel"),
    "std": Key(_deviations, "numbers above 0, one or one per channel"),
    "layout": one_of(tuple(LAYOUTS)),
}
"""What `image_folder` may be told, in the order in which it is done."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an image becomes a model's input; each step is left out where its value is None or empty.

    Attributes:
        spec: The input.
        order: The channels.
        layout: The axes: ``nchw`` or ``nhwc``, without the n where the input has no batch axis.
        resize: Length of the short side, or the size to stretch to.
        pad: The size to fit into, the rest of which is filled.
        fill: The pixel that fills; one value per channel.
        place: Where a padded image lies.
        crop: The size of the middle to keep.
        filter: How pixels are interpolated.
        scale: What values are divided by.
        mean: What is subtracted then, one value per channel.
        std: What is divided by then, one value per channel.
    """

    spec: InputSpec
    order: str
    layout: str
    resize: int | Size | None = None
    pad: Size | None = None
    fill: tuple[int, ...] = ()
    place: str = PLACES[0]
    crop: Size | None = None
    filter: str = "bilinear"
    scale: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __str__(self) -> str:
        """Return the settings that `image_recipe` reads."""
        left_out = {name for name in KEYS if getattr(self, name) in (None, ())}
        left_out |= set() if self.pad else {"fill", "place"}
        if self.scale == 1 and not self.mean and not self.std:  # else that pixels stay 0 to 255 must be said
            left_out.add("scale")
        return " ".join(f"{name}={_written(getattr(self, name))}" for name in KEYS if name not in left_out)


def _written(value: Any) -> str:
    """Write the value of a setting."""
    if isinstance(value, tuple):  # of two: no image has two channels
        return ("x" if len(value) == 2 else ",").join(map(_written, value))
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def image_folder(
    folder: str, files: Sequence[str], preprocess: str | None, labels: str | None, inputs: Sequence[InputSpec]
) -> Rows:
    """Read a folder of images, one sample each.

    Args:
        folder: The folder.
        files: Paths of the images.
        preprocess: Settings of `KEYS`.
        labels: Path of a table of files and labels; None takes the names of sub-folders.
        inputs: What the model wants: one image.

    Raises:
        RequantError: Pillow is missing, the settings do not give what the model wants, or a file has no label.
    """
    spec = the_input(folder, inputs, "an image")
    if len(spec.shape) not in (3, 4) or spec.dtype.kind not in "fiu":
        raise DataError(
            f"{folder}: input {spec.name!r} is {spec}; an image is numbers of rank 4, or of rank 3 without a batch axis"
        )
    if preprocess is None:
        raise DataError(
            f"{folder}: say how the images become input {spec.name!r}, {spec}, as they did in training: "
            f'for example --preprocess "{suggested(spec)}"'
        )
    try:
        recipe = image_recipe(preprocess, spec)
    except RequantError as error:
        raise DataError(f"{folder}: {error}") from error
    _pillow(folder)
    classes = media_labels(folder, files, labels)

    def read(picked: Picked) -> Iterator[Sample]:
        for index in range(len(files)) if picked is None else picked:
            where = f"{files[index]}, sample {index}"
            yield Sample({spec.name: _array(files[index], recipe, where)}, classes[index], where)

    rows = Rows(f"{folder}, images with {recipe}", len(files), read, random=True)
    return in_batches(rows, spec) if len(spec.shape) == 4 else rows


def _pillow(folder: str) -> None:
    """Check that Pillow is there."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise RequantError(f"{folder}: images are decoded by Pillow: pip install requant[images]") from error


def suggested(spec: InputSpec) -> str:
    """Return the settings that an input of this shape most often wants."""
    layout = next(iter(_layouts(spec)), "nchw")
    channels, height, width = _axes(spec, layout)
    if not isinstance(height, int) or not isinstance(width, int):
        size = ""
    elif height == width and height >= 64:
        size = f"resize={height * 8 // 7} crop={height} "
    else:
        size = f"resize={height}x{width} "
    order = USUAL.get(channels, "rgb") if isinstance(channels, int) else "rgb"
    values = " scale=255" if spec.dtype.kind == "f" else ""
    if values and order == "rgb":
        values += " mean=0.485,0.456,0.406 std=0.229,0.224,0.225"
    return f"{size}order={order}{values} layout={layout}"


# ---------------------------------------------------------------------------------------------------- settings


def image_recipe(text: str, spec: InputSpec) -> Recipe:
    """Read the settings, and take what they leave open from the input's shape.

    Raises:
        DataError: A setting contradicts the input or another one, or what is left open is not certain.
        UnknownNameError: There is no such setting.
    """
    given = parse_settings(text, KEYS)
    layout = _layout(given.get("layout"), spec)
    channels, height, width = _axes(spec, layout)
    order = _order(given.get("order"), channels, spec)
    recipe = Recipe(spec, order, layout, filter=given.get("filter", "bilinear"), **_sizes(given, (height, width)))
    return replace(recipe, **_padding(given, ORDERS[order]), **_values(given, ORDERS[order], spec))


def _layouts(spec: InputSpec) -> list[str]:
    """Return the layouts that put the channels on an axis of 1, 3 or 4."""
    return [layout for layout, axis in LAYOUTS.items() if spec.shape[axis] in USUAL]


def _layout(given: str | None, spec: InputSpec) -> str:
    """Return the layout."""
    fits = _layouts(spec)
    if given is None:
        if len(fits) != 1:
            why = "two axes may be the channels" if fits else "no axis is 1, 3 or 4 long"
            raise DataError(f"preprocess: say layout=nchw or layout=nhwc: of input {spec.name!r}, {spec}, {why}")
        return fits[0]
    length = spec.shape[LAYOUTS[given]]
    if isinstance(length, int) and given not in fits:
        other = f"; did you mean layout={fits[0]}?" if fits else ""
        raise DataError(
            f"preprocess: layout={given} makes {length} channels of input {spec.name!r}, {spec}; "
            f"an image has 1, 3 or 4{other}"
        )
    return given


def _axes(spec: InputSpec, layout: str) -> tuple[int | str | None, int | str | None, int | str | None]:
    """Return the lengths of the axes of channels, height and width."""
    first, second, third = spec.shape[-3:]
    return (first, second, third) if layout == "nchw" else (third, first, second)


def _order(given: str | None, channels: int | str | None, spec: InputSpec) -> str:
    """Return the order of the channels."""
    if not isinstance(channels, int):
        if given is None:
            raise DataError(
                f"preprocess: say order=rgb, bgr, gray or rgba: the channels of input {spec.name!r}, {spec}, are free"
            )
        return given
    if given is not None and ORDERS[given] != channels:
        raise DataError(
            f"preprocess: order={given} gives {ORDERS[given]} channels; input {spec.name!r}, {spec}, takes {channels}"
        )
    return given or USUAL[channels]


def _sizes(given: Mapping[str, Any], wanted: Sequence[int | str | None]) -> dict[str, Any]:
    """Return how an image comes to its size: ``resize``, ``pad`` and ``crop``."""
    resize, pad, crop = (given.get(name) for name in ("resize", "pad", "crop"))
    height, width = wanted
    fixed = (height, width) if isinstance(height, int) and isinstance(width, int) else None
    if pad is not None and (resize is not None or crop is not None):
        raise DataError("preprocess: pad scales the image to fit and fills the rest; leave out resize and crop")
    if fixed is not None and crop is None and pad is None:
        if resize is None:
            resize = fixed
        elif isinstance(resize, int):
            crop = fixed
    size = pad or crop or (resize if isinstance(resize, tuple) else None)
    if size and any(isinstance(want, int) and want != got for want, got in zip(wanted, size, strict=True)):
        want = "x".join("?" if side is None else str(side) for side in wanted)
        raise DataError(
            f"preprocess: images of {size[0]}x{size[1]} come out, and the model takes {want} (height x width)"
        )
    least = (resize, resize) if isinstance(resize, int) else resize
    if crop and least:
        short = (
            min(crop) > least[0] if isinstance(resize, int) else any(a > b for a, b in zip(crop, least, strict=True))
        )
        if short:
            raise DataError(
                f"preprocess: resize={_written(resize)} leaves less than crop={_written(crop)} keeps; "
                "make resize larger"
            )
    return {"resize": resize, "pad": pad, "crop": crop}


def _padding(given: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """Return what fills, and where the image lies."""
    for name in ("fill", "place"):
        if name in given and "pad" not in given:
            raise DataError(f"preprocess: {name} says nothing without pad")
    return {"fill": _each(given.get("fill", (0,)), channels, "fill"), "place": given.get("place", PLACES[0])}


def _values(given: Mapping[str, Any], channels: int, spec: InputSpec) -> dict[str, Any]:
    """Return what becomes of the values: ``scale``, ``mean`` and ``std``."""
    if spec.dtype.kind != "f":
        for name in ("scale", "mean", "std"):
            if given.get(name, 1) != 1:
                raise DataError(
                    f"preprocess: input {spec.name!r}, {spec}, takes pixels as they are, 0 to 255; leave out {name}"
                )
        return {}
    mean, std = (given.get(name) for name in ("mean", "std"))
    if mean is not None and "scale" not in given and max(map(abs, mean)) <= 1:
        raise DataError(
            f"preprocess: mean={_written(mean)} is of pixels from 0 to 1: say scale=255 (or scale=1 to keep 0 to 255)"
        )
    scale = given.get("scale", 1.0)
    if mean is not None and not all(0 <= value <= BYTE / scale for value in mean):
        raise DataError(
            f"preprocess: mean={_written(mean)} lies outside the pixels, which go from 0 to {BYTE / scale:g} "
            f"after scale={scale:g}"
        )
    found = {"scale": scale}
    return found | {name: _each(value, channels, name) for name, value in (("mean", mean), ("std", std)) if value}


def _each(values: tuple[Any, ...], channels: int, name: str) -> tuple[Any, ...]:
    """Return one value per channel."""
    if len(values) not in (1, channels):
        raise DataError(
            f"preprocess: {name} has {len(values)} values, and an image {channels} channels; give 1 or {channels}"
        )
    return values * channels if len(values) == 1 else values


# ---------------------------------------------------------------------------------------------------- pixels


def _array(file: str, recipe: Recipe, where: str) -> Array:
    """Decode an image and bring it into the form of the input."""
    image = _decoded(file, recipe.order, where)
    image = _padded(_resized(image, recipe), recipe)
    pixels = np.asarray(_cropped(image, recipe, where))
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if recipe.order == "bgr":
        pixels = pixels[..., ::-1]
    if recipe.layout == "nchw":
        pixels = np.moveaxis(pixels, -1, 0)
    values = _normalized(pixels, recipe)
    return np.ascontiguousarray(values[None] if len(recipe.spec.shape) == 4 else values)


def _decoded(file: str, order: str, where: str) -> Image:
    """Decode the first frame of an image, upright, as 8-bit channels; what is transparent shows its colour."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            image = ImageOps.exif_transpose(opened)
            image.load()
            return _converted(image, MODES.get(order, "RGB"), opened.format)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except Exception as error:  # decoders of damaged files raise whatever they stumble over
        reason = " ".join(str(error).split()).replace(f" {file!r}", "")
        raise DataError(f"{where}: cannot be read as an image: {reason or type(error).__name__}") from error


def _converted(image: Image, mode: str, format_: str | None) -> Image:
    """Return an image of a file format with the channels of a mode of Pillow."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and format_ in ("PNG", "PPM")):
        # Pillow would cut off what is above 255
        values = np.asarray(image).astype(np.int64)
        image = Image.fromarray(((values + 128) // 257).clip(0, BYTE).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError("pixels of 32 bits have no known range; store 8 or 16 bits")
    if image.mode == "P":
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    return image if image.mode == mode else image.convert(mode)


def _resized(image: Image, recipe: Recipe) -> Image:
    """Scale an image: the short side to a length, the whole to a size, or so far that it fits into a size."""
    from PIL import Image

    width, height = image.size
    if isinstance(recipe.resize, int):
        short = recipe.resize
        size = (short, short * width // height) if height <= width else (short * height // width, short)
    elif recipe.resize is not None:
        size = recipe.resize
    elif recipe.pad is not None:
        tall, wide = recipe.pad
        if tall * width <= wide * height:
            size = (tall, max(1, (2 * tall * width + height) // (2 * height)))
        else:
            size = (max(1, (2 * wide * height + width) // (2 * width)), wide)
    else:
        return image
    if size == (height, width):
        return image
    return image.resize(size[::-1], Image.Resampling[recipe.filter.upper()])


def _padded(image: Image, recipe: Recipe) -> Image:
    """Fill an image up to a size."""
    from PIL import Image

    if recipe.pad is None:
        return image
    height, width = recipe.pad
    left, top = ((width - image.width) // 2, (height - image.height) // 2) if recipe.place == "center" else (0, 0)
    colour = recipe.fill[::-1] if recipe.order == "bgr" else recipe.fill
    whole = Image.new(image.mode, (width, height), colour if len(colour) > 1 else colour[0])
    whole.paste(image, (left, top))
    return whole


def _cropped(image: Image, recipe: Recipe, where: str) -> Image:
    """Keep the middle of an image."""
    if recipe.crop is None:
        return image
    height, width = recipe.crop
    if height > image.height or width > image.width:
        raise DataError(
            f"{where}: is {image.height}x{image.width} (height x width) and cannot be cropped to {height}x{width}; "
            "give resize or pad"
        )
    top, left = round((image.height - height) / 2), round((image.width - width) / 2)
    return image.crop((left, top, left + width, top + height))


def _normalized(pixels: Array, recipe: Recipe) -> Array:
    """Scale values: ``(pixel / scale - mean) / std`` in float32."""
    dtype = recipe.spec.dtype
    if dtype.kind != "f":
        return pixels
    values = pixels.astype(np.float32)
    if recipe.scale != 1:
        values /= np.float32(recipe.scale)
    shape = (-1, 1, 1) if recipe.layout == "nchw" else (-1,)
    if recipe.mean:
        values -= np.array(recipe.mean, np.float32).reshape(shape)
    if recipe.std:
        values /= np.array(recipe.std, np.float32).reshape(shape)
    return values.astype(dtype)
