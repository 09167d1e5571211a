"""Which version of this project is running."""

from __future__ import annotations

import importlib.metadata


def code_version() -> str:
    """Returns the installed version, or ``uninstalled`` when run from a working tree, as under ``ray job submit``."""
    try:
        return importlib.metadata.version("accelopt-ray")
    except importlib.metadata.PackageNotFoundError:
        return "uninstalled"
