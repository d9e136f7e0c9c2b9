"""The drafter: a Qwen3-style DSpark backbone with Markov and confidence heads, in plain PyTorch.

Tensor names, shapes and arithmetic are those of a checkpoint that vLLM loads as
``Qwen3DSparkModel``; ``state_dict()`` is the checkpoint. Embedding and LM head are the target's.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_markov.errors import CheckpointError
from fused_markov.pair.layers import KVCache, attend, rms_norm, rope_table, rotate
from fused_markov.pair.linear import linear
from fused_markov.pair.target import TARGET_LAYERS, Target


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of the drafter, under the names of the checkpoint's ``config.json``."""

    vocab_size: int = 49152
    hidden_size: int = 576
    num_hidden_layers: int = 2
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    head_dim: int = 64
    intermediate_size: int = 960
    rms_norm_eps: float = 1e-5
    rope_theta: float = 100000.0
    max_position_embeddings: int = 8192
    block_size: int = 7
    markov_rank: int = 64
    mask_token_id: int = 16  # <empty_output>: a control token that chat never uses
    target_layer_ids: tuple[int, ...] = TARGET_LAYERS

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DrafterConfig:
        """Out of a checkpoint's ``config.json``."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        known["rope_theta"] = values["rope_parameters"]["rope_theta"]
        known["target_layer_ids"] = tuple(values["target_layer_ids"])
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        """The checkpoint's ``config.json``, as vLLM reads it."""
        values = asdict(self)
        theta = values.pop("rope_theta")
        return {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            **values,
            "target_layer_ids": list(self.target_layer_ids),
            # vLLM 0.25 and 0.26 size `fc` by this list, or else by the number of draft layers.
            "dflash_config": {"target_layer_ids": list(self.target_layer_ids)},
            "num_target_layers": 30,
            "target_hidden_size": self.hidden_size,
            "draft_vocab_size": self.vocab_size,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "attention_bias": False,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "use_aux_hidden_state": True,
            "sample_from_anchor": True,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }


class Norm(nn.Module):
    """RMS norm over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Qwen3 attention: a norm on every query and key head before the rotation."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = Norm(c.head_dim, c.rms_norm_eps)
        self.k_norm = Norm(c.head_dim, c.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[R, Hq, T, d]``."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Two of ``[R, Hkv, T, d]``."""
        k = rotate(self.k_norm(self._heads(self.k_proj(x))), cos, sin)
        return k, self._heads(self.v_proj(x))


class Mlp(nn.Module):
    """Gated SiLU."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class DrafterLayer(nn.Module):
    """A pre-norm decoder layer whose context keys come from the target, not from below."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = Mlp(c)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """What follows attention: ``x`` is the residual stream, ``mixed`` attention's output."""
        x = x + self.self_attn.o_proj(mixed)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class MarkovWeights(nn.Module):
    """The head's two matrices: ``markov_w1`` embeds the previous token, ``markov_w2`` projects."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(c.vocab_size, c.markov_rank)
        self.markov_w2 = nn.Linear(c.markov_rank, c.vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """Acceptance probability of a draft position, from its hidden state and Markov embedding."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(c.hidden_size + c.markov_rank, 1)


class Drafter(nn.Module):
    """A DSpark drafter for one target.

        drafter = Drafter.load(folder, target)
        context = drafter.new_cache(rows=1, max_length=512)
        drafter.extend(context, out.hidden, counts)      # hidden states of tokens that stand
        base, head_hidden = drafter.base_logits(context, anchors)

    A context entry belongs to a token the target has run; the anchor is the newest token, which
    it has not. Block position i stands at ``lengths + i`` and predicts the token after it.
    """

    rope: Tensor
    embedding: Tensor

    def __init__(self, config: DrafterConfig, embedding: Tensor) -> None:
        super().__init__()
        self.config = c = config
        taps = len(c.target_layer_ids)
        self.fc = nn.Linear(taps * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(c) for _ in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.markov_head = MarkovWeights(c)
        self.confidence_head = ConfidenceHead(c)
        table = rope_table(c.max_position_embeddings, c.head_dim, c.rope_theta, embedding.device)
        self.register_buffer("rope", table, persistent=False)
        self.register_buffer("embedding", embedding.detach(), persistent=False)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        target: Target,
        *,
        dtype: torch.dtype | None = None,
    ) -> Drafter:
        """Read ``config.json`` and ``model.safetensors``; device and embedding are the target's.

        Args:
            dtype: of the weights and of all arithmetic; ``None``: the target's.

        Raises:
            CheckpointError: a file is missing, or its tensors or sizes do not fit.
        """
        from safetensors.torch import load_file

        folder = Path(folder)
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise CheckpointError(f"{folder}: expected a drafter checkpoint, found no {name}")
        config = DrafterConfig.from_json(json.loads((folder / "config.json").read_text()))
        shape = (config.vocab_size, config.hidden_size)
        if tuple(target.embedding.shape) != shape or config.target_layer_ids != target.config.taps:
            raise CheckpointError(
                f"{folder}: the drafter is for an embedding {shape} and target layers "
                f"{config.target_layer_ids}, the target has {tuple(target.embedding.shape)} and "
                f"{target.config.taps}"
            )
        dtype = dtype or target.dtype
        drafter = cls(config, target.embedding.to(dtype))
        try:
            drafter.load_state_dict(load_file(folder / "model.safetensors"))
        except RuntimeError as error:
            raise CheckpointError(f"{folder / 'model.safetensors'}: {error}") from error
        for parameter in drafter.parameters():
            parameter.data = parameter.data.to(device=target.device, dtype=dtype)
        return drafter.requires_grad_(False).eval()

    @property
    def stack(self) -> list[DrafterLayer]:
        """The decoder layers, typed."""
        return cast("list[DrafterLayer]", self.layers)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rope[:, positions].to(self.dtype).unsqueeze(2)
        return cos, sin

    def context_keys_values(self, hidden: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Every layer's context keys and values, two of ``[R, Hkv, T, d]``.

        Args:
            hidden: ``[R, T, taps * width]`` the target's residual streams.
            positions: int64 ``[R or 1, T]`` where those tokens stand.
        """
        fused = self.hidden_norm(self.fc(hidden.to(self.dtype)))
        cos, sin = self._angles(positions)
        return [layer.self_attn.keys_values(fused, cos, sin) for layer in self.stack]

    def block_ids(self, anchors: Tensor) -> Tensor:
        """Input ids ``[..., S]`` of blocks after ``anchors`` ``[...]``: the anchor, then masks."""
        ids = anchors.new_full((*anchors.shape, self.config.block_size), self.config.mask_token_id)
        ids[..., 0] = anchors
        return ids

    # Generation -------------------------------------------------------------------------------

    def new_cache(self, rows: int, max_length: int) -> KVCache:
        """An empty context cache, with room for a block after ``max_length`` tokens."""
        c = self.config
        return KVCache(
            c.num_hidden_layers,
            rows,
            c.num_key_value_heads,
            max_length + c.block_size,
            c.head_dim,
            self.embedding.device,
            self.dtype,
        )

    def extend(self, cache: KVCache, hidden: Tensor, counts: int | Tensor | None = None) -> None:
        """Append context: the target's residual streams ``hidden`` ``[R, T, taps * width]``.

        Args:
            counts: how many of a row's T entries stand (int, or int64 ``[R]``; ``None``: all T).
        """
        new = self.context_keys_values(hidden, cache.positions(hidden.shape[1]))
        for index, (k, v) in enumerate(new):
            cache.write(index, k, v)
        cache.advance(hidden.shape[1] if counts is None else counts)

    def base_logits(self, cache: KVCache, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """One block a row after its context: the logits before the Markov bias.

        Args:
            anchors: int64 ``[R]`` the newest token of each row, not in the context.

        Returns:
            ``[R, S, V]`` base logits and ``[R, S, width]`` hidden states (for ``confidence``).
            The context is left as it was.
        """
        steps = self.config.block_size
        cos, sin = self._angles(cache.positions(steps))
        mask = cache.mask(steps, causal=False)
        x = F.embedding(self.block_ids(anchors), self.embedding)
        for index, layer in enumerate(self.stack):
            h = layer.input_layernorm(x)
            # The block's own keys go behind the context, where the next context covers them.
            k, v = cache.write(index, *layer.self_attn.keys_values(h, cos, sin))
            x = layer.finish(x, attend(layer.self_attn.queries(h, cos, sin), k, v, mask))
        head_hidden: Tensor = self.norm(x)
        return linear(head_hidden, self.embedding), head_hidden

    def confidence(self, head_hidden: Tensor, prev: Tensor) -> Tensor:
        """Estimated acceptance probability fp32 ``[R, S]`` of the drafted tokens.

        Args:
            head_hidden: ``[R, S, width]`` from ``base_logits``.
            prev: int64 ``[R, S]`` the token before each position (the anchor, then the drafts).
        """
        proj = self.confidence_head.proj
        x = torch.cat([head_hidden, self.markov_head.markov_w1(prev)], -1).float()
        return torch.sigmoid(F.linear(x, proj.weight.float(), proj.bias.float())).squeeze(-1)

    # Training ---------------------------------------------------------------------------------

    def forward(self, hidden: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
        """Head hidden states ``[R, A, S, width]`` of A blocks in each whole sequence.

        Args:
            hidden: ``[R, T, taps * width]`` the target's residual streams of the whole sequences.
            ids: int64 ``[R, T]`` their tokens.
            anchors: int64 ``[R, A]`` positions of the anchors. A block sees what comes before its
                anchor and itself, never another block.
        """
        rows, length = ids.shape
        count, steps = anchors.shape[1], self.config.block_size
        context = self.context_keys_values(hidden, torch.arange(length, device=ids.device)[None])
        where = (anchors[..., None] + torch.arange(steps, device=ids.device)).flatten(1)
        cos, sin = self._angles(where)
        owner = torch.arange(count, device=ids.device).repeat_interleave(steps)
        before = torch.arange(length, device=ids.device) < anchors[:, owner, None]
        own = (owner[:, None] == owner).expand(rows, -1, -1)
        mask = torch.cat([before, own], -1)[:, None]
        x = F.embedding(self.block_ids(ids.gather(1, anchors)).flatten(1), self.embedding)
        for layer, (ck, cv) in zip(self.stack, context, strict=True):
            h = layer.input_layernorm(x)
            k, v = layer.self_attn.keys_values(h, cos, sin)
            k, v = torch.cat([ck, k], 2), torch.cat([cv, v], 2)
            x = layer.finish(x, attend(layer.self_attn.queries(h, cos, sin), k, v, mask))
        head_hidden: Tensor = self.norm(x)
        return head_hidden.view(rows, count, steps, -1)
