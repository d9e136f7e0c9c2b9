"""The typer application: which commands there are, and how their errors are shown."""

from __future__ import annotations

import sys

import typer

from fused_markov.cli.bench import bench
from fused_markov.cli.generate import generate
from fused_markov.cli.info import info
from fused_markov.cli.successors import successors
from fused_markov.cli.tune import tune
from fused_markov.cli.verify import verify
from fused_markov.errors import FusedMarkovError

app = typer.Typer(
    help="Exact sampling of DSpark drafts with one read of the Markov head per decode step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, verify, bench, tune, info, successors):
    app.command()(command)


def run() -> None:
    """Run the command line; the library's own errors are messages, not tracebacks."""
    try:
        app()
    except FusedMarkovError as e:
        print(f"fused-markov: {e}", file=sys.stderr)
        raise SystemExit(2) from None
