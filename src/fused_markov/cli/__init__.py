"""The command ``fused-markov``: generate, verify, bench, tune, info, successors."""

from __future__ import annotations

import sys

INSTALL = "pip install 'fused-markov[pair]'"


def main() -> None:
    """Entry point; says what to install where the command line's packages are missing."""
    try:
        from fused_markov.cli.app import run
    except ModuleNotFoundError as e:
        if e.name is None or e.name.split(".")[0] not in ("typer", "rich", "click"):
            raise
        print(f"fused-markov: the command line needs {e.name}: {INSTALL}", file=sys.stderr)
        raise SystemExit(1) from None
    run()
