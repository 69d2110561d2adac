"""Griffe extension: a section ``Example:`` of a docstring is code with its output, as ``Examples:`` is to Griffe."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Rename the section while the documentation is built."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename the section in the docstring of a function, class or module."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
