"""All that a codec of one's own is made of. ``docs/guides/extend-kernels.md`` shows an example."""

from cocofl.fl.codec import CODECS, Codec, Float16, Identity, Int8, TopK

__all__ = ["CODECS", "Codec", "Float16", "Identity", "Int8", "TopK"]
