"""A module that cannot be imported; its answer would be a lie."""

raise ImportError("a library is missing")
