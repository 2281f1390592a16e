"""Folders of images as data. Pillow decodes them; size, type and layout become those of the model's input."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ... import RequantError
from ...system.regular import open_regular
from ..model.session import Array, InputSpec
from .media import Reading, media_labels, media_rows, only_input
from .samples import DataError, Rows
from .settings import Key, numbers, one_of, parse_settings, positive, positive_integer

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm", ".jp2", ".avif")
)
"""The suffixes of image files."""
ORDERS = {"rgb": 3, "bgr": 3, "gray": 1, "rgba": 4}
"""The orders of channels, with the number of channels."""
MODES = {"gray": "L", "rgba": "RGBA"}
"""Pillow's modes for orders other than RGB and BGR."""
USUAL = {3: "rgb", 1: "gray", 4: "rgba"}
"""The default order for each number of channels."""
FILTERS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
LAYOUTS = {"nchw": -3, "nhwc": -1}
"""The orders of axes, with the channel axis."""
PLACES = ("center", "corner")
BYTE = 255
DECODERS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "JPEG2000", "AVIF")
"""Pillow's names of these formats. It has others, which start programs (EPS), and takes a format from the content."""
PIXELS = 2**27
"""The most pixels of an image after it was scaled."""
PIXEL_BYTES = 8
"""The most bytes per pixel of an image while it is decoded: 4 of the image, and 4 of its copy in another mode."""

Size: TypeAlias = tuple[int, int]
"""Height and width."""


def _side_or_size(text: str) -> int | Size:
    """Read ``256`` or ``256x320``."""
    if not re.fullmatch(r"[0-9]+(x[0-9]+)?", text):
        raise ValueError
    sides = [positive_integer(side) for side in text.split("x")]
    if max(sides) * min(sides) > PIXELS or (len(sides) == 1 and sides[0] ** 2 > PIXELS):
        raise ValueError(f", and at most {PIXELS} pixels")
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def _size(text: str) -> Size:
    """Read ``224``, which is 224x224, or ``224x320``."""
    size = _side_or_size(text)
    return (size, size) if isinstance(size, int) else size


def _fill(text: str) -> tuple[int, ...]:
    """Read the values of a pixel, from 0 to 255."""
    values = numbers(text)
    if any(value != int(value) or not 0 <= value <= BYTE for value in values):
        raise ValueError
    return tuple(map(int, values))


def _deviations(text: str) -> tuple[float, ...]:
    """Read numbers above 0."""
    return tuple(positive(part) for part in text.split(","))


def _divisor(text: str) -> float:
    """Read the number that divides the pixels. The error for a factor, ``1/255`` or ``0.0039``, names the divisor."""
    above, _, below = text.partition("/")
    factor = positive(above) / positive(below or "1")
    if 1 <= factor < math.inf:
        return factor
    if not 0 < factor < 1:
        raise ValueError
    exact = 1 / factor
    usual = min((BYTE, BYTE / 2, round(exact)), key=lambda known: abs(exact - known))
    raise ValueError(f": write scale={usual if abs(exact - usual) < usual / 100 else exact:g}")


KEYS: Mapping[str, Key] = {
    "resize": Key(_side_or_size, "the length of the short side, or HEIGHTxWIDTH"),
    "pad": Key(_size, "a length, or HEIGHTxWIDTH"),
    "fill": Key(_fill, "whole numbers from 0 to 255, one or one per channel"),
    "place": one_of(PLACES),
    "crop": Key(_size, "a length, or HEIGHTxWIDTH"),
    "filter": one_of(FILTERS),
    "order": one_of(tuple(ORDERS)),
    "scale": Key(_divisor, "what divides the pixels, at least 1"),
    "mean": Key(numbers, "numbers, one or one per channel"),
    "std": Key(_deviations, "numbers above 0, one or one per channel"),
    "layout": one_of(tuple(LAYOUTS)),
}
"""The settings of `image_folder`, in the order of the steps."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an image becomes a model's input. A step whose value is None or empty is skipped.

    Attributes:
        spec: The input.
        order: The order of the channels.
        layout: The order of the axes: ``nchw`` or ``nhwc``. An input of rank 3 has no n.
        resize: The new length of the short side, or the new size.
        pad: The size to scale into and to fill up to.
        fill: The pixel of the padding, one value per channel.
        place: The position of the image in the padding.
        crop: The size of the kept centre.
        filter: The interpolation of `resize` and `pad`.
        scale: The divisor of the pixels.
        mean: The values to subtract after `scale`, one per channel.
        std: The divisors after `mean`, one per channel.
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
        """Return the settings as text; `image_recipe` reads it back."""
        omitted = {name for name in KEYS if getattr(self, name) in (None, ())}
        omitted |= set() if self.pad else {"fill", "place"}
        if self.scale == 1 and not self.mean and not self.std:  # with a mean, image_recipe needs scale=1
            omitted.add("scale")
        return " ".join(f"{name}={_written(getattr(self, name))}" for name in KEYS if name not in omitted)


def _written(value: Any) -> str:
    """Return the value of a setting as text."""
    if isinstance(value, tuple):  # a pair is a size: no image has two channels
        return ("x" if len(value) == 2 else ",").join(map(_written, value))
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def image_folder(folder: str, files: Sequence[str], reading: Reading, inputs: Sequence[InputSpec]) -> Rows:
    """Read a folder of images; each image is one sample.

    Args:
        folder: The folder.
        files: Paths of the images.
        reading: The settings, see `KEYS`, the labels, and the memory of an image.
        inputs: The model's inputs: one image.

    Raises:
        RequantError: Pillow is missing, the settings do not fit the model's input, or a file has no label.
    """
    spec = only_input(folder, inputs, "an image")
    if len(spec.shape) not in (3, 4) or spec.dtype.kind not in "fiu":
        raise DataError(
            f"{folder}: input {spec.name!r} is {spec}; an image needs a numeric input of rank 4, "
            "or of rank 3 without a batch axis"
        )
    if reading.preprocess is None:
        raise DataError(
            f"{folder}: images need the preprocessing of the training for input {spec.name!r}, {spec}: "
            f'for example --preprocess "{suggested(spec)}" (in Python: DataSpec(preprocess=...))'
        )
    try:
        recipe = image_recipe(reading.preprocess, spec)
    except RequantError as error:
        raise DataError(f"{folder}: {error}") from error
    _pillow(folder)
    classes = media_labels(folder, files, reading.labels)

    def decode(file: str, where: str) -> Array:
        return _array(file, recipe, reading.limit, where)

    return media_rows(f"{folder}, images with {recipe}", files, classes, spec, decode, batched=len(spec.shape) == 4)


def _pillow(folder: str) -> None:
    """Check that Pillow is installed. Its warning about an image of very many pixels becomes an error."""
    try:
        from PIL import Image
    except ImportError as error:
        raise RequantError(f"{folder}: images need Pillow: pip install requant[images]") from error
    warnings.simplefilter("error", Image.DecompressionBombWarning)


def suggested(spec: InputSpec) -> str:
    """Return the most usual settings for an input of this shape."""
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
    """Read the settings, and take missing ones from the input's shape.

    Raises:
        DataError: A setting contradicts the input or another setting, or a missing setting is ambiguous.
        UnknownNameError: There is no such setting.
    """
    settings = parse_settings(text, KEYS)
    layout = _layout(settings.get("layout"), spec)
    channels, height, width = _axes(spec, layout)
    order = _order(settings.get("order"), channels, spec)
    sizes = _sizes(settings, (height, width))
    recipe = Recipe(spec, order, layout, filter=settings.get("filter", "bilinear"), **sizes)
    return replace(recipe, **_padding(settings, ORDERS[order]), **_values(settings, ORDERS[order], spec))


def _layouts(spec: InputSpec) -> list[str]:
    """Return the layouts whose channel axis has length 1, 3 or 4."""
    return [layout for layout, axis in LAYOUTS.items() if spec.shape[axis] in USUAL]


def _layout(setting: str | None, spec: InputSpec) -> str:
    """Return the layout from the setting or the input's shape."""
    fits = _layouts(spec)
    if setting is None:
        if len(fits) != 1:
            why = "two axes can be the channels" if fits else "no axis has length 1, 3 or 4"
            raise DataError(f"preprocess: set layout=nchw or layout=nhwc: in input {spec.name!r}, {spec}, {why}")
        return fits[0]
    length = spec.shape[LAYOUTS[setting]]
    if isinstance(length, int) and setting not in fits:
        other = f"; did you mean layout={fits[0]}?" if fits else ""
        raise DataError(
            f"preprocess: layout={setting} gives input {spec.name!r}, {spec}, {length} channels; "
            f"an image has 1, 3 or 4{other}"
        )
    return setting


def _axes(spec: InputSpec, layout: str) -> tuple[int | str | None, int | str | None, int | str | None]:
    """Return the lengths of the channel, height and width axes."""
    first, second, third = spec.shape[-3:]
    return (first, second, third) if layout == "nchw" else (third, first, second)


def _order(setting: str | None, channels: int | str | None, spec: InputSpec) -> str:
    """Return the order of the channels from the setting or the input's shape."""
    if not isinstance(channels, int):
        if setting is None:
            raise DataError(
                f"preprocess: set order=rgb, bgr, gray or rgba: input {spec.name!r}, {spec}, does not fix the channels"
            )
        return setting
    if setting is not None and ORDERS[setting] != channels:
        raise DataError(
            f"preprocess: order={setting} gives {ORDERS[setting]} channels, "
            f"but input {spec.name!r}, {spec}, has {channels}"
        )
    return setting or USUAL[channels]


def _sizes(settings: Mapping[str, Any], lengths: Sequence[int | str | None]) -> dict[str, Any]:
    """Return ``resize``, ``pad`` and ``crop`` from the settings and the input's height and width."""
    resize, pad, crop = (settings.get(name) for name in ("resize", "pad", "crop"))
    if pad is not None and (resize is not None or crop is not None):
        raise DataError("preprocess: pad already scales the image; remove resize and crop")
    if pad is None and crop is None and all(isinstance(length, int) for length in lengths):
        crop = tuple(lengths) if isinstance(resize, int) else None
        resize = resize or tuple(lengths)
    _check_size(pad or crop or resize, lengths)
    _check_crop(crop, resize)
    return {"resize": resize, "pad": pad, "crop": crop}


def _check_size(size: int | Size | None, lengths: Sequence[int | str | None]) -> None:
    """Refuse images of another size than the model's; a side alone, or None, leaves the size open."""
    if not isinstance(size, tuple):
        return
    if any(isinstance(length, int) and length != side for length, side in zip(lengths, size, strict=True)):
        needed = "x".join("?" if length is None else str(length) for length in lengths)
        raise DataError(
            f"preprocess: the settings give images of {size[0]}x{size[1]}, but the model needs {needed} "
            "(height x width)"
        )


def _check_crop(crop: Size | None, resize: int | Size | None) -> None:
    """Refuse a crop that is larger than the image after `resize`, whose short side may be all that is known."""
    if crop is None or resize is None:
        return
    if min(crop) > resize if isinstance(resize, int) else any(a > b for a, b in zip(crop, resize, strict=True)):
        raise DataError(
            f"preprocess: crop={_written(crop)} is larger than the image after resize={_written(resize)}; "
            "make resize larger"
        )


def _padding(settings: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """Return ``fill`` and ``place``."""
    for name in ("fill", "place"):
        if name in settings and "pad" not in settings:
            raise DataError(f"preprocess: {name} has no effect without pad")
    return {"fill": _each(settings.get("fill", (0,)), channels, "fill"), "place": settings.get("place", PLACES[0])}


def _values(settings: Mapping[str, Any], channels: int, spec: InputSpec) -> dict[str, Any]:
    """Return ``scale``, ``mean`` and ``std``."""
    if spec.dtype.kind != "f":
        for name in ("scale", "mean", "std"):
            if settings.get(name, 1) != 1:
                raise DataError(
                    f"preprocess: input {spec.name!r}, {spec}, takes pixels from 0 to 255 unchanged; remove {name}"
                )
        return {}
    mean, std = (settings.get(name) for name in ("mean", "std"))
    if mean is not None and "scale" not in settings and max(map(abs, mean)) <= 1:
        raise DataError(
            f"preprocess: mean={_written(mean)} fits pixels from 0 to 1: add scale=255 (or scale=1 to keep 0 to 255)"
        )
    scale = settings.get("scale", 1.0)
    if mean is not None and not all(0 <= value <= BYTE / scale for value in mean):
        raise DataError(
            f"preprocess: mean={_written(mean)} is outside the range of the pixels, 0 to {BYTE / scale:g} "
            f"after scale={scale:g}"
        )
    channel_values = {name: _each(value, channels, name) for name, value in (("mean", mean), ("std", std)) if value}
    return {"scale": scale, **channel_values}


def _each(values: tuple[Any, ...], channels: int, name: str) -> tuple[Any, ...]:
    """Return one value per channel."""
    if len(values) not in (1, channels):
        raise DataError(
            f"preprocess: {name} has {len(values)} values, but an image has {channels} channels; give 1 or {channels}"
        )
    return values * channels if len(values) == 1 else values


# ---------------------------------------------------------------------------------------------------- pixels


def _array(file: str, recipe: Recipe, limit: int, where: str) -> Array:
    """Decode an image and convert it to the size, layout and type of the input."""
    image = _decoded(file, recipe.order, limit, where)
    image = _padded(_resized(image, recipe, where), recipe)
    pixels = np.asarray(_cropped(image, recipe, where))
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if recipe.order == "bgr":
        pixels = pixels[..., ::-1]
    if recipe.layout == "nchw":
        pixels = np.moveaxis(pixels, -1, 0)
    values = _normalized(pixels, recipe)
    return np.ascontiguousarray(values[None] if len(recipe.spec.shape) == 4 else values)


def _decoded(file: str, order: str, limit: int, where: str) -> Image:
    """Decode the first frame of an image, upright, to 8-bit channels. Without an alpha channel, alpha is dropped."""
    from PIL import Image, ImageOps

    try:
        with open_regular(file) as stream, Image.open(stream, formats=DECODERS) as image:
            width, height = image.size
            if width * height * PIXEL_BYTES > limit:
                raise DataError(f"{height}x{width} pixels need {width * height * PIXEL_BYTES} bytes, more than {limit}")
            format_ = image.format
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return _converted(image, MODES.get(order, "RGB"), format_)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except Exception as error:  # decoders raise errors of any type for damaged files
        reason = " ".join(str(error).split()).replace(f" {file!r}", "")
        raise DataError(f"{where}: cannot be read as an image: {reason or type(error).__name__}") from error


def _converted(image: Image, mode: str, format_: str | None) -> Image:
    """Convert an image to a mode of Pillow.

    Args:
        image: The decoded image.
        mode: The mode of the result.
        format_: Pillow's name of the file format.

    Raises:
        DataError: The pixels have 32 bits.
    """
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and format_ in ("PNG", "PPM")):
        image = Image.fromarray(_bytes_of(image))  # Pillow's own conversion clips to 255
    if image.mode in ("I", "F"):
        raise DataError("the range of 32-bit pixels is unknown; store 8 or 16 bits")
    if image.mode == "P":
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    return image if image.mode == mode else image.convert(mode)


def _bytes_of(image: Image) -> Array:
    """Return the pixels of an image of 16 bits in 8 bits, (H, W) uint8."""
    values = np.asarray(image)
    pixels = np.empty(values.shape, np.uint8)
    for row, line in enumerate(values):  # one at a time: the whole image would need five times its memory
        pixels[row] = (line.astype(np.int32).clip(0, 2**16 - 1) + 128) // 257
    return pixels


def _resized(image: Image, recipe: Recipe, where: str) -> Image:
    """Scale an image: the short side to a length, both sides to a size, or with a fixed ratio to fit into a size.

    Raises:
        DataError: The image would have too many pixels.
    """
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
    if math.prod(size) > PIXELS:
        raise DataError(f"{where}: is {height}x{width}, and would be scaled to {size[0]}x{size[1]} pixels")
    return image.resize(size[::-1], Image.Resampling[recipe.filter.upper()])


def _padded(image: Image, recipe: Recipe) -> Image:
    """Pad an image to a size."""
    from PIL import Image

    if recipe.pad is None:
        return image
    height, width = recipe.pad
    left, top = ((width - image.width) // 2, (height - image.height) // 2) if recipe.place == "center" else (0, 0)
    colour = recipe.fill[::-1] if recipe.order == "bgr" else recipe.fill
    padded = Image.new(image.mode, (width, height), colour if len(colour) > 1 else colour[0])
    padded.paste(image, (left, top))
    return padded


def _cropped(image: Image, recipe: Recipe, where: str) -> Image:
    """Keep the centre of an image."""
    if recipe.crop is None:
        return image
    height, width = recipe.crop
    if height > image.height or width > image.width:
        raise DataError(
            f"{where}: is {image.height}x{image.width} (height x width), too small to crop to {height}x{width}; "
            "use resize or pad"
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
