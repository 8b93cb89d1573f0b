"""All that a codec of one's own is made of. ``docs/extend.md`` shows an example."""

from cocofl.fl.codec import CODECS, Codec, Identity

__all__ = ["CODECS", "Codec", "Identity"]
