"""``fused-markov generate``: speculative decoding of the small real pair, as it happens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fused_markov.pair.generate import Pair, Report
from fused_markov.pair.generate import generate as run

# The target alone is timed on so many tokens: enough for a rate, not enough to bore.
BASELINE_TOKENS = 48


def generate(
    prompt: Annotated[str, typer.Option(help="What to ask.")],
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the drafts and the verification.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.", min=1)] = 128,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Target alone.")] = False,
    engine: Annotated[str, typer.Option(help="Engine of the draft sampler.")] = "auto",
    drafter: Annotated[Path | None, typer.Option(help="Folder of the drafter.")] = None,
    gguf: Annotated[Path | None, typer.Option(help="The target's GGUF file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Answer a prompt with SmolLM2-135M-Instruct and its DSpark drafter, on the CPU.

    Tokens appear as they are verified; at the end comes what speculation brought.
    """
    pair = Pair.load(drafter, gguf)

    def decode(tokens: int, *, draft: bool, shown: bool) -> Report:
        return run(
            pair,
            prompt,
            max_tokens=tokens,
            temperature=temperature,
            seed=seed,
            draft=draft,
            engine=engine,
            on_text=_show if shown else None,
        )

    report = decode(max_tokens, draft=not no_draft, shown=not as_json)
    if as_json:
        print(json.dumps(report.to_json()))
        return
    print("\n")
    alone = None if no_draft else decode(min(BASELINE_TOKENS, max_tokens), draft=False, shown=False)
    _summary(report, alone, greedy=temperature == 0)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _summary(report: Report, alone: Report | None, *, greedy: bool) -> None:
    console = Console(highlight=False)
    count = len(report.tokens)
    console.print(
        f"{count} tokens in {report.rounds} rounds, {report.tokens_per_second:.1f} tokens/s"
    )
    if alone is None:
        return
    by_position = " ".join(f"{share:.0%}" for share in report.accepted_by_position)
    console.print(f"accepted drafts a round: {report.accepted_per_round:.2f}")
    console.print(f"  by position:           {by_position}")
    console.print(
        f"passes over W2 a round:  {report.passes_per_round:.2f} (engine {report.engine}; "
        f"the loop makes {len(report.accepted_by_position)})"
    )
    if alone.tokens_per_second:
        gain = report.tokens_per_second / alone.tokens_per_second
        console.print(
            f"target alone:            {alone.tokens_per_second:.1f} tokens/s ({gain:.2f}x)"
        )
    if greedy:
        same = report.tokens[: len(alone.tokens)] == alone.tokens
        console.print(f"target's own tokens:     {'the same' if same else '[red]different[/red]'}")
