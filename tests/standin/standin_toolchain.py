"""Installs a stand-in Neuron toolchain into a folder: importable modules, executables, and a script of behaviours.

The modules and programs have the documented interfaces and file forms; behind them stands the simulator (generation A)
or NumPy (generation B). Each source names the document it follows.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent
_TOOLS = {"neuron-profile": "neuron_profile.py", "neuron-ls": "neuron_ls.py"}


@dataclass
class StandinToolchain:
    """An installed stand-in.

    Attributes:
        folder: Where it lies.
        script: What its parts do; change it with :meth:`behave`.
    """

    folder: Path
    script: dict[str, Any] = field(
        default_factory=lambda: {"toolchain": "", "profiler": "", "neuron_ls": "", "factors": [1.0]}
    )

    def behave(self, **behaviour: Any) -> None:
        """Changes the script, for instance ``toolchain="core_busy"`` or ``factors=[1.0, 1.2]``."""
        self.script |= behaviour
        # In one step: a toolchain at work reads the script again and again.
        unfinished = self.folder / "behaviour.unfinished"
        unfinished.write_text(json.dumps(self.script))
        unfinished.replace(self.folder / "behaviour.json")
        (self.folder / "profiler_calls").unlink(missing_ok=True)

    @property
    def profiler_calls(self) -> int:
        """Times the profiler was called since the last change of the script."""
        calls = self.folder / "profiler_calls"
        return len(calls.read_text()) if calls.exists() else 0


def lay_out(generation: str, folder: Path) -> StandinToolchain:
    """Puts the stand-in of a generation into a new folder, which belongs in PATH and PYTHONPATH."""
    shutil.copytree(_HERE / f"generation_{generation}", folder)
    for name, source in _TOOLS.items():
        shutil.copy(_HERE / "tools" / source, folder / source)
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{folder / source}" "$@"\n')
        program.chmod(0o755)
    toolchain = StandinToolchain(folder)
    toolchain.behave()
    return toolchain


def install(generation: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> StandinToolchain:
    """Installs the stand-in of a generation and makes it this process's toolchain, with core 3."""
    toolchain = lay_out(generation, folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "3")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    return toolchain
