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


class CannotLower(CocoflError):
    """A block whose operations cannot be told apart for quantization."""


class KernelMissing(CocoflError):
    """A kernel that is unknown, or that this machine cannot run."""


class InvalidState(CocoflError):
    """A state whose tensors do not fit the chain."""


class InvalidSetting(CocoflError):
    """An argument with a value that is not one of those it can take."""


class DataNotFound(CocoflError):
    """A data set that is neither in the given folder, nor on the Hub, nor among the names known."""


class InvalidData(CocoflError):
    """Data that was found but cannot be what it claims: columns, labels, shapes, sizes."""


class InvalidPartition(CocoflError):
    """Samples cannot be dealt to devices as asked: alpha, device count, groups."""


class InvalidBudget(CocoflError):
    """A budget that is negative, not a number, or not complete."""


class InvalidTable(CocoflError):
    """A profile table that cannot be read, or whose numbers cannot be measurements."""


class TableMismatch(CocoflError):
    """A profile table that does not belong to this model or cannot answer this question."""


class NoFeasibleSpan(CocoflError):
    """A budget too small for even the cheapest configuration."""


class InvalidDevices(CocoflError):
    """Device groups or a trace from which no budget can be made."""


class InvalidExperiment(CocoflError):
    """An experiment file with an unknown key, or a value that cannot be."""


class RunFolderProblem(CocoflError):
    """A run folder that is in the way, is not one, or cannot be written."""


class RejectedUpdate(CocoflError):
    """What a device sent is not an update of this network, or not a reasonable one."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """One word: size, format, request, span, layout, samples, values, scales or change."""


class ProfilingFailed(CocoflError):
    """A configuration that could not be measured."""


class Untrusted(CocoflError):
    """A folder or a message names code, and nobody said that it may run."""


class OtherHardware(UserWarning):
    """A profile table that was measured on another machine than this one."""
