"""The target: SmolLM2-135M-Instruct as a slim Llama forward over fused weights.

It exists beside transformers because one token of a 135M model on two CPU cores is bound by the
Python around it; ``tests/test_pair_models.py`` holds the two to the same logits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_markov.pair.gguf_file import GgufFile, find_gguf
from fused_markov.pair.layers import KVCache, attend, rms_norm, rope_table, rotate
from fused_markov.pair.linear import linear

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The chat template of the GGUF file, for one system turn and one user turn.
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
USER_TURN = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
ANSWER_TURN = "<|im_end|>\n<|im_start|>assistant\n"
END_OF_TURN = 2  # <|im_end|>, also the end of the sequence

# Residual streams the drafter reads, after these layers (an early, a middle, a late one).
TARGET_LAYERS = (4, 16, 28)


def chat_prompt(message: str) -> str:
    """The text that the target answers: its chat template around one user ``message``."""
    return USER_TURN + message + ANSWER_TURN


@dataclass(frozen=True)
class TargetConfig:
    """Sizes of a Llama-architecture target."""

    vocab_size: int = 49152
    width: int = 576
    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    intermediate: int = 1536
    rope_theta: float = 100000.0
    norm_eps: float = 1e-5
    max_positions: int = 8192
    taps: tuple[int, ...] = TARGET_LAYERS

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclass
class TargetOutput:
    """One forward of T tokens a row.

    Attributes:
        final: ``[R, T, width]`` normed last hidden state; ``Target.logits`` maps it to logits.
        hidden: ``[R, T, len(taps) * width]`` residual streams that the drafter reads.
    """

    final: Tensor
    hidden: Tensor


class TargetLayer(nn.Module):
    """One decoder layer; q, k, v and gate, up are one matrix each."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        width, dim = config.width, config.head_dim
        self.attn_norm = nn.Parameter(torch.ones(width))
        self.qkv = nn.Parameter(torch.empty((config.heads + 2 * config.kv_heads) * dim, width))
        self.out = nn.Parameter(torch.empty(width, width))
        self.mlp_norm = nn.Parameter(torch.ones(width))
        self.gate_up = nn.Parameter(torch.empty(2 * config.intermediate, width))
        self.down = nn.Parameter(torch.empty(width, config.intermediate))


class Target(nn.Module):
    """The target model, frozen. Device and dtype are those of its weights.

    target = Target.load()                           # fp32 on the CPU
    cache = target.new_cache(rows=1, max_length=512)
    out = target(ids, cache)                         # ids [R, T]; the cache grows by T
    logits = target.logits(out.final[:, -1])         # [R, V]
    cache.crop(cache.lengths - rejected)             # takes tokens back
    """

    rope: Tensor

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.width))
        self.norm = nn.Parameter(torch.ones(config.width))
        self.layers = nn.ModuleList(TargetLayer(config) for _ in range(config.layers))
        self.requires_grad_(False)
        table = rope_table(
            config.max_positions, config.head_dim, config.rope_theta, torch.device("cpu")
        )
        self.register_buffer("rope", table, persistent=False)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        file: GgufFile | None = None,
    ) -> Target:
        """Read and dequantize the GGUF file (``find_gguf(path)``, or an open ``file``).

        Raises:
            CheckpointError: the file or the package that reads it is missing.
        """
        file = file or GgufFile(find_gguf(path))
        with torch.device("meta"):
            target = cls(_config(file))
        target.to_empty(device="cpu")
        _fill(target, file)
        config = target.config
        target.rope = rope_table(
            config.max_positions, config.head_dim, config.rope_theta, torch.device("cpu")
        )
        # The rotary table stays fp32: a bf16 angle is wrong by whole turns far into a text.
        for parameter in target.parameters():
            parameter.data = parameter.data.to(device=device, dtype=dtype)
        target.rope = target.rope.to(device)
        return target.eval()

    @property
    def stack(self) -> list[TargetLayer]:
        """The decoder layers, typed."""
        return cast("list[TargetLayer]", self.layers)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def new_cache(self, rows: int, max_length: int) -> KVCache:
        """An empty cache for ``rows`` sequences of at most ``max_length`` tokens."""
        c = self.config
        return KVCache(c.layers, rows, c.kv_heads, max_length, c.head_dim, self.device, self.dtype)

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> TargetOutput:
        """Run ``ids`` ``[R, T]`` after what ``cache`` holds, and append them to it.

        Without a cache the T tokens are a whole sequence each. A row shorter than T is padded at
        the right by the caller, who then crops the cache: padding never reaches earlier tokens.
        """
        c, steps = self.config, ids.shape[1]
        where = cache.positions(steps) if cache else torch.arange(steps, device=ids.device)[None]
        cos, sin = self.rope[:, where].to(self.dtype).unsqueeze(2)
        mask = cache.mask(steps, causal=True) if cache else None
        x = F.embedding(ids, self.embedding)
        taps = []
        for index, layer in enumerate(self.stack):
            h = linear(rms_norm(x, layer.attn_norm, c.norm_eps), layer.qkv)
            h = h.view(*ids.shape, -1, c.head_dim).transpose(1, 2)
            turned = rotate(h[:, : c.heads + c.kv_heads], cos, sin)
            q, k, v = turned[:, : c.heads], turned[:, c.heads :], h[:, c.heads + c.kv_heads :]
            if cache:
                k, v = cache.write(index, k, v)
            mixed = attend(q, k, v, mask, causal=cache is None)
            x = x + linear(mixed, layer.out)
            gate, up = linear(rms_norm(x, layer.mlp_norm, c.norm_eps), layer.gate_up).chunk(2, -1)
            x = x + linear(F.silu(gate) * up, layer.down)
            if index in c.taps:
                taps.append(x)
        if cache:
            cache.advance(steps)
        return TargetOutput(rms_norm(x, self.norm, c.norm_eps), torch.cat(taps, -1))

    def logits(self, final: Tensor) -> Tensor:
        """Logits ``[..., V]`` of normed hidden states ``[..., width]`` (tied embedding)."""
        return linear(final, self.embedding)


def load_tokenizer(path: str | os.PathLike[str] | None = None) -> Tokenizer:
    """The target's tokenizer out of the same GGUF file."""
    return GgufFile(find_gguf(path)).tokenizer()


def _config(file: GgufFile) -> TargetConfig:
    return TargetConfig(
        vocab_size=file.field("llama.vocab_size"),
        width=file.field("llama.embedding_length"),
        layers=file.field("llama.block_count"),
        heads=file.field("llama.attention.head_count"),
        kv_heads=file.field("llama.attention.head_count_kv"),
        intermediate=file.field("llama.feed_forward_length"),
        rope_theta=file.field("llama.rope.freq_base"),
        norm_eps=file.field("llama.attention.layer_norm_rms_epsilon"),
        max_positions=file.field("llama.context_length"),
    )


def _fill(target: Target, file: GgufFile) -> None:
    c = target.config
    target.embedding.copy_(file.tensor("token_embd.weight"))
    target.norm.copy_(file.tensor("output_norm.weight"))
    for index, layer in enumerate(target.stack):
        at = f"blk.{index}."
        layer.attn_norm.copy_(file.tensor(at + "attn_norm.weight"))
        layer.mlp_norm.copy_(file.tensor(at + "ffn_norm.weight"))
        qkv = [
            file.rotary(at + "attn_q.weight", c.heads),
            file.rotary(at + "attn_k.weight", c.kv_heads),
            file.tensor(at + "attn_v.weight"),
        ]
        layer.qkv.copy_(torch.cat(qkv))
        layer.out.copy_(file.tensor(at + "attn_output.weight"))
        gate, up = file.tensor(at + "ffn_gate.weight"), file.tensor(at + "ffn_up.weight")
        layer.gate_up.copy_(torch.cat([gate, up]))
        layer.down.copy_(file.tensor(at + "ffn_down.weight"))
