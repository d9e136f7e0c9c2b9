"""Fetch a vLLM's Python with pip and unpack it: its files alone, without what they import.

    python unpack.py FOLDER VERSION

Leaves FOLDER/VERSION/vllm, and does nothing where that is. Several hundred megabytes are fetched
and a few kept.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def main(folder: str, version: str) -> None:
    home = Path(folder, version)
    if (home / "vllm" / "_version.py").exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", scratch, f"vllm=={version}"], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py")]
            archive.extractall(home, names)


if __name__ == "__main__":
    main(*sys.argv[1:])
