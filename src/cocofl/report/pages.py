"""What pages have in common: one file each, with escaped texts, that requests nothing."""

from __future__ import annotations

import json
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup


def template(name: str) -> Template:
    """A template of ours; what it is given is text, unless it says otherwise."""
    environment = Environment(
        loader=PackageLoader("cocofl.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def as_json(value: Any) -> Markup:
    """JSON that can stand in a script element, whatever it holds."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)
