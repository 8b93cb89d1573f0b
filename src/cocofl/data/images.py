"""The adapter to Pillow: encoded image files become uint8 arrays of one size."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cocofl.errors import InvalidData

MAX_PIXELS = 64 * 2**20
CHUNK_BYTES = 16 * 2**20


def decode(
    data: bytes, shape: tuple[int, int, int], where: str, *, resize: bool
) -> NDArray[np.uint8]:
    """One image as (height, width, channels); other sizes are scaled only where that is meant."""
    height, width, channels = shape
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise InvalidData(
                    f"{where} announces {image.width}x{image.height} pixels; "
                    f"at most {MAX_PIXELS} are read"
                )
            if not resize and image.size != (width, height):
                raise InvalidData(
                    f"{where} is {image.width}x{image.height} pixels, expected {width}x{height}. "
                    "Is this the right data set?"
                )
            pixels = image.convert("L" if channels == 1 else "RGB")
            if pixels.size != (width, height):
                pixels = pixels.resize((width, height), Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidData(f"{where} is no readable image: {error}") from error
    return np.asarray(pixels, np.uint8).reshape(shape)


def decode_all(
    encoded: Iterable[bytes], shape: tuple[int, int, int], where: str, *, resize: bool = False
) -> Iterator[NDArray[np.uint8]]:
    """Images in chunks of a few megabytes, so that a data set never has to fit in memory."""
    chunk_images = max(1, CHUNK_BYTES // int(np.prod(shape)))
    chunk: list[NDArray[np.uint8]] = []
    for row, data in enumerate(encoded):
        chunk.append(decode(data, shape, f"image {row} of {where}", resize=resize))
        if len(chunk) == chunk_images:
            yield np.stack(chunk)
            chunk = []
    if chunk:
        yield np.stack(chunk)


def resize_grey(images: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Grey images (n, h, w) scaled to (n, height, width, 1)."""
    scaled = [
        np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR))
        for image in images
    ]
    return np.stack(scaled)[..., None]
