"""Every mistake a user can make raises a :class:`CocoflError` that says how to mend it."""


class CocoflError(Exception):
    """Base of all errors that are the caller's to mend; the message names what is expected."""


class InvalidSpan(CocoflError):
    """A span that is empty, reversed, or does not fit the chain."""


class DataNotFound(CocoflError):
    """A data set that is neither in the given folder, nor on the Hub, nor among the names known."""


class InvalidData(CocoflError):
    """Data that was found but cannot be what it claims: columns, labels, shapes, sizes."""


class InvalidPartition(CocoflError):
    """Samples cannot be dealt to devices as asked: alpha, device count, groups."""
