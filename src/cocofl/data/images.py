"""Image files as pixels, one or many."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from itertools import count

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from cocofl.errors import InvalidData

MAX_PIXELS = 64 * 2**20
CHUNK_BYTES = 16 * 2**20
# Not all that Pillow knows: to decode some it starts other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
OTHER_SET = "Is this the right data set?"

Shape = tuple[int, int, int]
Pixels = NDArray[np.uint8]


def decode(
    data: bytes, shape: Shape, where: str, *, resize: bool, otherwise: str = OTHER_SET
) -> Pixels:
    """One image as (height, width, channels); other sizes are scaled only where that is meant."""
    height, width, channels = shape
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.mode.startswith(("I", "F")):
                raise InvalidData(
                    f"{where} has more than 8 bits a pixel, which would be cut off; give such "
                    "images as arrays of floats"
                )
            if image.width * image.height > MAX_PIXELS:
                raise InvalidData(
                    f"{where} announces {image.width}x{image.height} pixels; "
                    f"at most {MAX_PIXELS} are read"
                )
            if not resize and image.size != (width, height):
                raise InvalidData(
                    f"{where} is {image.width}x{image.height} pixels, expected {width}x{height}. "
                    f"{otherwise}"
                )
            pixels = image.convert("L" if channels == 1 else "RGB")
            if pixels.size != (width, height):
                pixels = resized(pixels, width, height)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidData(f"{where} is no readable image: {_why(error)}") from error
    return np.asarray(pixels, np.uint8).reshape(shape)


def decode_all(
    encoded: Iterable[bytes],
    shape: Shape,
    where: str,
    *,
    resize: bool,
    otherwise: str = OTHER_SET,
    files: Iterable[str] | None = None,
) -> Iterator[Pixels]:
    """Images in chunks of a few megabytes, so that a data set never has to fit in memory.

    Errors name the ``files``, if that is what they are.
    """
    chunk_images = max(1, CHUNK_BYTES // int(np.prod(shape)))
    chunk: list[Pixels] = []
    named = (f"image {row} of {where}" for row in count()) if files is None else files
    for data, own in zip(encoded, named, strict=False):
        chunk.append(decode(data, shape, own, resize=resize, otherwise=otherwise))
        if len(chunk) == chunk_images:
            yield np.stack(chunk)
            chunk = []
    if chunk:
        yield np.stack(chunk)


def resized(image: Image.Image, width: int, height: int) -> Image.Image:
    """Scaled, whatever its sides were to each other."""
    return image.resize((width, height), Image.Resampling.BILINEAR)


def size_of(data: bytes, where: str) -> tuple[int, int]:
    """Height and width of an image file, of which nothing is decoded."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.height, image.width
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidData(f"{where} is no readable image: {_why(error)}") from error


def _why(error: Exception) -> str:
    """Pillow names a buffer of ours where it knows no format."""
    known = ", ".join(FORMATS)
    return f"expected {known}" if isinstance(error, UnidentifiedImageError) else str(error)
