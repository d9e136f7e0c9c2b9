"""``fused-markov successors``: find a head's successors and keep them with its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from fused_markov.checkpoint import load_markov_head
from fused_markov.successors import COUNT, find_successors, save_successors


def successors(
    checkpoint: Annotated[Path, typer.Argument(help="Directory of a DSpark checkpoint.")],
    count: Annotated[int, typer.Option(help="Successors of each token.")] = COUNT,
) -> None:
    """Find the tokens that the head favours after each token; guesses are better with them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = load_markov_head(checkpoint, device=device)
    path = save_successors(find_successors(head, count), checkpoint)
    print(f"{count} successors of each of {head.vocab_size} tokens: {path}")
