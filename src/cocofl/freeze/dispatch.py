"""Looking at what PyTorch executes, operation by operation, without its compiler."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class OperationWatch(TorchDispatchMode):
    """Sees every operation that runs inside; a subclass has ``__torch_dispatch__``.

    PyTorch guards such modes against its compiler, and loads that to do so: 90 MB and a second
    that a device, which compiles nothing, does without.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
