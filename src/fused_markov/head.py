"""The DSpark Markov head: bias = W2 · W1[previous token], and the token each row of W2 means."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_markov.confidence import ConfidenceHead
from fused_markov.errors import ArgumentError
from fused_markov.transforms import LogitTransform
from fused_markov.variants import Variant
from fused_markov.weights import PLAIN_DTYPES, StoredWeights, check_values, stored_weights

# On the CPU every bias product has one shape, [CPU_CANDIDATES, r] x [r, CPU_ROWS]: the libraries
# behind it choose their code, and with it the order of the sum, by the shape of the whole product.
# (MKL's fp32 sums differ between 1, 2 and up to 15 rows, oneDNN's bf16 sums at rank 512 between 16
# and 48.) Sixteen rows cost about what five do, the product being bound by reading w2.
CPU_ROWS = 16
CPU_CANDIDATES = 16384

# Candidates whose rows of w2 are made fp32 at a time where the CPU cannot multiply their dtype: a
# product of its own takes five times as long there. 512 KiB at rank 256 stay near the core.
CPU_WIDENED = 512


class MarkovHead:
    """A low-rank Markov head (DSpark, arXiv 2607.05147; vLLM's ``DSparkMarkovHead``).

    Args:
        w1: ``[w1_rows, r]`` embedding of the previous token, by target id; fp32, bf16 or fp16,
            contiguous. Rows past the target vocabulary are padding.
        w2: ``[w2_rows, r]`` bias projection, one row a candidate; same dtype and device as ``w1``,
            contiguous. Or in fewer bits: fp8 e4m3 or int8 ``[w2_rows, r]``, or NVFP4, uint8
            ``[w2_rows, r / 2]``, with the scales below; engines dequantize what they are about to
            multiply, and no full copy is made. Or `fused_markov.weights.StoredWeights`, which is
            all of that in one.
        id_map: ``[draft_vocab]`` distinct target ids of the candidates, for a reduced draft
            vocabulary. ``None``: candidate ``i`` is target id ``i``.
        d2t: the same map as checkpoints hold it, as offsets: target id = row + ``d2t[row]``.
            Give ``id_map`` or ``d2t``, not both.
        scale: factor on the bias, where vLLM's ``LogitsProcessor`` applies it (after the cap).
        soft_cap: ``tanh`` cap on the bias, as ``LogitsProcessor`` applies it; ``None``: no cap.
        vocab_size: true size of the target vocabulary when ``w1`` and ``w2`` are padded beyond it;
            ids at or past it are never drafted. ``None``: ``w1``'s rows.
        successors: ``[vocab_size, L]`` int32 rows of w2 with the largest bias after each token, as
            `fused_markov.successors.find_successors` gives them; ``None``: not known. They make
            better guesses where the bias is strong, and decide nothing else.
        w2_scale: fp8, int8: a scale a row, ``[w2_rows]`` or ``[w2_rows, 1]``; one for all; or
            ``[ceil(w2_rows / rows), ceil(r / part)]`` of blocks. NVFP4: e4m3 ``[w2_rows, r / 16]``
            in plain order (`fused_markov.weights.unswizzled_scales` makes it of CUTLASS's).
        w2_block: rows and part of the rank that a scale is for; ``None``: as the scales' shape
            says, blocks being 128 x 128.
        w2_global_scale: NVFP4's one fp32 scale on top; it multiplies.
        variant: a `fused_markov.GatedVariant` or `fused_markov.RnnVariant`, in ``w1``'s dtype;
            ``None``: the vanilla head. See docs/heads.md.
        confidence: a `fused_markov.ConfidenceHead` to be computed with every draft; or ``None``.
        logit_transform: elementwise transform of base plus bias; ``None``: none.

    Attributes:
        vocab_size: the target vocabulary V_t: previous tokens and drafted ids lie in ``[0, V_t)``.
        draft_vocab: number of candidates V: ``w2[:V]`` and ``base_logits[..., :V]`` are used.
        weights: W2 as it is stored, and ``w2`` its codes or numbers.
        id_map: int64 ``[V]`` on the head's device, or ``None``.
        lowest_id: the lowest target id of a candidate: the token where nothing is above -inf.
        ascending: whether the target ids rise with the candidates.
        hidden_size: H of the hidden states that variant and confidence head read, or ``None``.

    Raises:
        ArgumentError: for any wrong shape, dtype, device, stride or id.
    """

    def __init__(
        self,
        w1: Tensor,
        w2: Tensor | StoredWeights,
        *,
        id_map: Tensor | None = None,
        d2t: Tensor | None = None,
        scale: float = 1.0,
        soft_cap: float | None = None,
        vocab_size: int | None = None,
        successors: Tensor | None = None,
        w2_scale: Tensor | None = None,
        variant: Variant | None = None,
        confidence: ConfidenceHead | None = None,
        logit_transform: LogitTransform | None = None,
        w2_block: tuple[int, int] | None = None,
        w2_global_scale: Tensor | float | None = None,
    ) -> None:
        _check_w1(w1)
        if isinstance(w2, Tensor):
            w2 = stored_weights(w2, w2_scale, w2_block, w2_global_scale)
        elif (w2_scale, w2_block, w2_global_scale) != (None, None, None):
            raise ArgumentError("w2_scale", "None beside StoredWeights, which has them", "another")
        _check_fit(w1, w2)
        if soft_cap is not None and not soft_cap > 0:
            raise ArgumentError("soft_cap", "a number above 0 or None", repr(soft_cap))
        if vocab_size is None:
            vocab_size = w1.shape[0]
        if not 1 <= vocab_size <= w1.shape[0]:
            raise ArgumentError(
                "vocab_size", f"1 to {w1.shape[0]} (the rows of w1)", str(vocab_size)
            )
        self.w1, self.weights, self.w2 = w1.detach(), w2, w2.data
        self.scale, self.soft_cap = float(scale), soft_cap
        self.logit_transform = logit_transform
        self.vocab_size = vocab_size
        self.id_map = _target_ids(id_map, d2t, w2.data, vocab_size)
        if self.id_map is not None:
            self.draft_vocab = self.id_map.shape[0]
        elif w2.rows < vocab_size:
            raise ArgumentError(
                "w2",
                f"at least {vocab_size} rows (the target vocabulary) where there is no id map",
                f"{w2.rows} rows",
                "give id_map (target ids) or d2t (offsets) for a reduced draft vocabulary, "
                "or vocab_size if w1 is padded",
            )
        else:
            self.draft_vocab = vocab_size
        ids = self.id_map
        self.lowest_id = 0 if ids is None else int(ids.min())
        self.ascending = ids is None or bool((ids[1:] > ids[:-1]).all())
        check_values(w2, self.draft_vocab)
        self._multiplied = not w2.quantized and _cpu_multiplies(w2.data.dtype)
        self.successors = _checked_successors(successors, self)
        self.variant, self.confidence = variant, confidence
        self.hidden_size = _hidden_size(self)

    @property
    def rank(self) -> int:
        return self.w1.shape[1]

    @property
    def device(self) -> torch.device:
        return self.w1.device

    @property
    def dtype(self) -> torch.dtype:
        """Of w1 and of the bias, whatever w2 is stored in."""
        return self.w1.dtype

    def with_weights(self, w1: Tensor, w2: Tensor | StoredWeights) -> MarkovHead:
        """A head that differs in its weights alone: other memory, or another format."""

        def near(x: Tensor | None) -> Tensor | None:
            return x if x is None else x.to(w1.device)

        return MarkovHead(
            w1,
            w2,
            id_map=near(self.id_map),
            scale=self.scale,
            soft_cap=self.soft_cap,
            vocab_size=self.vocab_size,
            successors=near(self.successors),
            variant=self.variant,
            confidence=self.confidence,
            logit_transform=self.logit_transform,
        )

    def bias(self, prev: Tensor) -> Tensor:
        """`bias_of` the embeddings of previous tokens ``prev`` ``[M]``: a vanilla head's bias."""
        return self.bias_of(self.w1[prev])

    def bias_of(self, embed: Tensor) -> Tensor:
        """The bias rows ``[M, V]``, in w1's dtype, of ``embed`` ``[M, r]``.

        An fp32 sum rounded once, then capped and scaled with vLLM's roundings. On the CPU a row's
        bits do not depend on its company or its place.
        """
        if embed.device.type != "cpu" and not self.weights.quantized:
            return self.transform(F.linear(embed, self.w2[: self.draft_vocab]))
        if embed.device.type != "cpu":
            parts = [self.weights.products(slice(*b), [embed.float().T]) for b in self.cpu_blocks()]
            return self.transform(torch.cat([part for (part,) in parts]).T.to(self.dtype))
        bias = embed.new_empty(embed.shape[0], self.draft_vocab)
        tiles = self.cpu_tiles(embed)
        for low, high in self.cpu_blocks():
            self.cpu_bias_block(tiles, low, high, bias[:, low:high])
        return bias

    def cpu_blocks(self) -> list[tuple[int, int]]:
        """The ranges of candidates whose bias `cpu_bias_block` computes in one product."""
        starts = range(0, self.draft_vocab, CPU_CANDIDATES)
        return [(low, min(low + CPU_CANDIDATES, self.draft_vocab)) for low in starts]

    def cpu_tiles(self, embed: Tensor) -> list[Tensor]:
        """``embed`` ``[M, r]``, transposed, in the pieces that `cpu_bias_block` multiplies."""
        embed = embed if self._multiplied else embed.float()
        padded = F.pad(embed, (0, 0, 0, -embed.shape[0] % CPU_ROWS))
        return [tile.T for tile in torch.split(padded, CPU_ROWS)]

    def cpu_bias_block(self, tiles: list[Tensor], low: int, high: int, out: Tensor) -> None:
        """Write columns ``low:high`` (one of `cpu_blocks`) of the bias rows of `cpu_tiles`.

        ``out`` ``[M, high-low]`` is of w1's dtype.
        """
        size = high - low if self._multiplied else CPU_WIDENED
        outs = torch.split(out, CPU_ROWS)
        for first in range(low, high, size):
            end = min(first + size, high)
            # W2 on the left: the libraries then read it in half the time.
            if self._multiplied:
                products = [torch.mm(self.w2[first:end], tile) for tile in tiles]
            else:
                products = self.weights.products(slice(first, end), tiles)
            for product, rows in zip(products, outs, strict=True):
                bias = product.T[: rows.shape[0]].to(self.dtype)
                rows[:, first - low : end - low] = self.transform(bias)

    def transform(self, bias: Tensor) -> Tensor:
        """Soft cap, then scale, each operation rounded to ``bias``'s dtype (LogitsProcessor)."""
        if self.soft_cap is not None:
            bias = torch.tanh(bias / self.soft_cap) * self.soft_cap
        return bias * self.scale if self.scale != 1.0 else bias

    def finish(self, logits: Tensor) -> Tensor:
        """Base plus bias through the logit transform, where there is one."""
        return logits if self.logit_transform is None else self.logit_transform(logits)

    def target_ids(self, candidates: Tensor) -> Tensor:
        """Target ids (int64) of candidate rows."""
        return candidates if self.id_map is None else self.id_map[candidates]

    def __repr__(self) -> str:
        mapped = "" if self.id_map is None else ", reduced"
        mapped += "" if self.variant is None else f", {self.variant.kind}"
        mapped += "" if self.confidence is None else ", with confidence"
        stored = f", w2 in {self.weights.format}" if self.weights.quantized else ""
        return (
            f"MarkovHead(vocab_size={self.vocab_size}, draft_vocab={self.draft_vocab}{mapped}, "
            f"rank={self.rank}, dtype={self.dtype}{stored}, device={self.device})"
        )


def _cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether matrices of ``dtype`` are multiplied by more than a loop over scalars on this CPU."""
    if dtype == torch.float32:
        return True
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _check_w1(w1: Tensor) -> None:
    if w1.dtype not in PLAIN_DTYPES:
        raise ArgumentError(
            "w1", "fp32, bf16 or fp16", str(w1.dtype), "dequantize it: its rows are looked up"
        )
    if w1.dim() != 2 or 0 in w1.shape:
        raise ArgumentError("w1", "two dimensions [rows, rank], none empty", str(list(w1.shape)))
    if not w1.is_contiguous():
        raise ArgumentError(
            "w1", "contiguous rows", f"strides {w1.stride()}", "call .contiguous() once at load"
        )


def _check_fit(w1: Tensor, w2: StoredWeights) -> None:
    if w1.shape[1] != w2.rank:
        raise ArgumentError("w2", f"rank {w1.shape[1]} as w1", f"rank {w2.rank}")
    if not w2.quantized and w1.dtype != w2.data.dtype:
        expected = f"w1's dtype {w1.dtype}"
        raise ArgumentError("w2", expected, str(w2.data.dtype), "convert one of them")
    for tensor in w2.tensors():
        if tensor.device != w1.device:
            raise ArgumentError("w2", f"w1's device {w1.device}", str(tensor.device))


def _hidden_size(head: MarkovHead) -> int | None:
    """H of a head's variant and confidence head, which must go with it and each other."""
    variant, confidence, size = head.variant, head.confidence, None
    if variant is not None:
        if reason := variant.why_not(head.w1):
            raise ArgumentError("variant", "the rank, dtype and device of w1", reason)
        size = variant.hidden_size
    if confidence is None:
        return size
    if confidence.weight.device != head.device:
        raise ArgumentError(
            "confidence", f"weights on {head.device}", f"weights on {confidence.weight.device}"
        )
    reads = confidence.hidden_size(head.rank)
    if reads < 1 or size not in (None, reads):
        raise ArgumentError(
            "confidence", f"a hidden size above 0, {size or 'any'} as the variant's", str(reads)
        )
    return reads


def _checked_successors(successors: Tensor | None, head: MarkovHead) -> Tensor | None:
    if successors is None:
        return None
    if successors.dim() != 2 or successors.shape[0] != head.vocab_size or not successors.shape[1]:
        raise ArgumentError(
            "successors", f"shape [{head.vocab_size}, L]", str(list(successors.shape))
        )
    if successors.dtype != torch.int32:
        raise ArgumentError("successors", "int32", str(successors.dtype))
    low, high = int(successors.min()), int(successors.max())
    if low < 0 or high >= head.draft_vocab:
        raise ArgumentError(
            "successors",
            f"rows of w2 in [0, {head.draft_vocab})",
            f"rows from {low} to {high}",
            "find them again for this head",
        )
    return successors.to(head.device)


def _target_ids(
    id_map: Tensor | None, d2t: Tensor | None, w2: Tensor, vocab_size: int
) -> Tensor | None:
    if id_map is not None and d2t is not None:
        raise ArgumentError("d2t", "None where id_map is given", "both", "give one of the two")
    name, given = ("d2t", d2t) if id_map is None else ("id_map", id_map)
    if given is None:
        return None
    if given.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(name, "int32 or int64", str(given.dtype))
    if given.dim() != 1 or not 1 <= given.shape[0] <= w2.shape[0]:
        raise ArgumentError(
            name, f"shape [n], 1 <= n <= {w2.shape[0]} (the rows of w2)", str(list(given.shape))
        )
    ids = given.to(device=w2.device, dtype=torch.int64)
    if id_map is None:
        ids = ids + torch.arange(ids.shape[0], device=ids.device)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ArgumentError(
            name,
            f"target ids in [0, {vocab_size})",
            f"ids from {low} to {high}",
            "d2t holds offsets, id_map target ids: check which one this is",
        )
    if bool((ids.bincount() > 1).any()):
        raise ArgumentError(
            name,
            "distinct target ids",
            "repeated ids",
            "d2t holds offsets, id_map target ids: check which one this is",
        )
    return ids
