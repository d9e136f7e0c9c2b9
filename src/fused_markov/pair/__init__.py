"""A small real DSpark pair: SmolLM2-135M-Instruct and a drafter trained for it."""

from fused_markov.pair.drafter import Drafter, DrafterConfig
from fused_markov.pair.layers import KVCache
from fused_markov.pair.target import Target, TargetConfig, chat_prompt, load_tokenizer

__all__ = [
    "Drafter",
    "DrafterConfig",
    "KVCache",
    "Target",
    "TargetConfig",
    "chat_prompt",
    "load_tokenizer",
]
