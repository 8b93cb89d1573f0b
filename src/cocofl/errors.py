"""Every mistake a user can make raises a :class:`CocoflError` that says how to mend it."""


class CocoflError(Exception):
    """Base of all errors that are the caller's to mend; the message names what is expected."""


class InvalidSpan(CocoflError):
    """A span that is empty, reversed, or does not fit the chain."""


class InvalidModel(CocoflError):
    """A built-in network was asked for with a width or a number of classes it cannot have."""


class CannotSplit(CocoflError):
    """A model that cannot be traced, or not be cut into blocks as asked."""


class InvalidExample(CocoflError):
    """Example inputs that the model cannot run on."""
