"""For mkdocstrings: a docstring's doctests are code, not quotations."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from griffe import Docstring, Extension, Object


class Doctests(Extension):
    """Puts a fence around every doctest."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change what is shown of an object, not the object."""
        if obj.docstring is not None:
            obj.docstring = Docstring(fenced(obj.docstring.value), parent=obj)


def fenced(text: str) -> str:
    """The paragraphs of a docstring; those that begin with a prompt as blocks of code."""
    shown = []
    for is_blank, lines in groupby(text.splitlines(), lambda line: not line.strip()):
        paragraph = list(lines)
        is_doctest = not is_blank and paragraph[0].startswith(">>>")
        shown += ["```pycon", *paragraph, "```"] if is_doctest else paragraph
    return "\n".join(shown)
