"""Which Python and Ray a node's set-up leads to, as far as its commands say."""

from __future__ import annotations

import re
from collections.abc import Iterable

# python3.10, python=3.10, python==3.10.14, --python 3.10
_PYTHON = re.compile(r"\bpython[= ]{0,2}(3\.\d+)")
# ray==2.60.0, ray[default]==2.60.0, "ray[default,serve]==2.60.0"
_RAY = re.compile(r"\bray(?:\[[\w,\s-]*\])?==(\d+(?:\.\d+)*)")


def python_versions(commands: Iterable[str]) -> set[str]:
    """Minor versions of Python that commands name, like ``3.10``."""
    return {version for command in commands for version in _PYTHON.findall(command)}


def ray_versions(commands: Iterable[str]) -> set[str]:
    """Exact versions of Ray that commands install."""
    return {version for command in commands for version in _RAY.findall(command)}
