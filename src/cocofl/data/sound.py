"""Sound files (WAV) as rows of floats, of one length."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cocofl.errors import InvalidData

MOST_SECONDS = 60.0
"""Of one sample: longer ones are cut, whatever is said."""
_BYTES: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<i2"), 4: np.dtype("<i4")}


def waves(files: Iterable[bytes], where: str, seconds: float = 0.0) -> NDArray[np.float32]:
    """Sounds (n, 1, time) between -1 and 1: the mean of the channels.

    Each has ``seconds``, longer ones are cut and shorter ones padded with silence; 0: as many as
    the longest.
    """
    sounds, rates = list[NDArray[np.float32]](), set[int]()
    for row, file in enumerate(files):
        rate, sound = read_wave(file, f"{where}, row {row}", seconds or MOST_SECONDS)
        sounds.append(sound)
        rates.add(rate)
    if len(rates) > 1:
        raise InvalidData(
            f"{where}: sounds have {' and '.join(map(str, sorted(rates)[:3]))} samples a second; "
            "bring all to one rate"
        )
    (rate,) = rates or {0}
    length = round(seconds * rate) if seconds else max(map(len, sounds), default=0)
    found = np.zeros((len(sounds), 1, length), np.float32)
    for row, sound in enumerate(sounds):
        found[row, 0, : len(sound)] = sound[:length]
    return found


def read_wave(file: bytes, where: str, most_seconds: float) -> tuple[int, NDArray[np.float32]]:
    """Samples a second, and the samples of the beginning."""
    try:
        with wave.open(io.BytesIO(file)) as sound:
            rate, channels, width = sound.getframerate(), sound.getnchannels(), sound.getsampwidth()
            if width not in _BYTES or rate < 1 or channels < 1:
                raise wave.Error(f"{width} bytes a sample, {channels} channels, {rate} a second")
            raw = sound.readframes(round(most_seconds * rate))
    except (wave.Error, EOFError, ValueError, ZeroDivisionError) as error:
        raise InvalidData(
            f"{where}: {error}; expected sound as WAV with whole numbers (PCM) of 8, 16 or 32 bits"
        ) from error
    values = np.frombuffer(raw[: len(raw) // (width * channels) * width * channels], _BYTES[width])
    middle, top = (128, 128) if width == 1 else (0, 2 ** (8 * width - 1))
    scaled = (values.astype(np.float32) - middle) / top
    return rate, scaled.reshape(-1, channels).mean(axis=1, dtype=np.float32)
