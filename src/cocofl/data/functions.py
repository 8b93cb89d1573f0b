"""Functions by name: ``package.module:function``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from cocofl.errors import DataNotFound


def import_function(name: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names.

    >>> import_function("math:sqrt")(9.0)
    3.0
    """
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        ours = module_name.startswith("cocofl.")
        raise DataNotFound(
            f"{name} needs the library {library}: pip install 'cocofl[data]'"
            if ours
            else f"cannot import {name}: {error}. Expected package.module:function, importable "
            "from here (the current folder counts)"
        ) from error
    except (ImportError, AttributeError, ValueError) as error:
        raise DataNotFound(f"cannot import {name}: {error}") from error
    if not callable(function):
        raise DataNotFound(f"{name} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]
