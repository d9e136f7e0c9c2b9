"""A head's successors: after each token, the candidates that its bias favours most.

An engine's guess starts from the base logits. Where a trained head's bias is strong, the winner may
not stand out in them; it then nearly always stands among its predecessor's successors. They belong
to the weights alone, so they are found once, and kept in a folder of their own within the
checkpoint's: loaders such as vLLM's take every safetensors file beside the weights for weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fused_markov.errors import ArgumentError, CheckpointError
from fused_markov.head import MarkovHead

FOLDER_NAME = "fused-markov"
FILE_NAME = "successors.safetensors"
TENSOR_NAME = "successors"
COUNT = 48

# Predecessors whose bias rows are held at a time.
ROWS_AT_ONCE = 64
# Predecessors and successors whose products are taken at a time.
PAIRS_AT_ONCE = 1 << 16


@torch.no_grad()
def find_successors(head: MarkovHead, count: int = COUNT) -> Tensor:
    """int32 ``[vocab_size, count]`` rows of w2 with the largest bias after each token.

    One product of all of W1 with all of W2, ``2 * vocab_size * V * r`` operations: some tens of
    milliseconds on a large GPU at 129280 x 256, a minute on a few CPU cores.

    Raises:
        ArgumentError: where ``count`` is not from 1 to the number of candidates.
    """
    if not 1 <= count <= head.draft_vocab:
        raise ArgumentError("count", f"1 to {head.draft_vocab}", str(count))
    found = torch.empty(head.vocab_size, count, dtype=torch.int32, device=head.device)
    for low in range(0, head.vocab_size, ROWS_AT_ONCE):
        rows = slice(low, min(low + ROWS_AT_ONCE, head.vocab_size))
        bias = head.bias(torch.arange(rows.start, rows.stop, device=head.device))
        found[rows] = bias.float().nan_to_num(-torch.inf).topk(count, dim=1).indices.int()
    return found


@torch.no_grad()
def successor_biases(head: MarkovHead) -> Tensor:
    """``[vocab_size, L]`` biases of a head's successors in w1's dtype, before cap and scale."""
    assert head.successors is not None
    found = torch.empty(head.successors.shape, dtype=head.dtype, device=head.device)
    at_once = PAIRS_AT_ONCE // head.successors.shape[1] + 1
    for low in range(0, head.vocab_size, at_once):
        rows = slice(low, low + at_once)
        known, embed = head.successors[rows], head.w1[rows].float()
        weights = head.weights.dequantized(known.flatten())
        found[rows] = (weights.view(*known.shape, -1) @ embed.unsqueeze(2)).squeeze(2)
    return found


def save_successors(successors: Tensor, folder: str | Path) -> Path:
    """Keep ``successors`` with the checkpoint in ``folder``; the file's path.

    A file that an earlier version left beside the weights is removed: it is out of date now.
    """
    from safetensors.torch import save_file

    path = Path(folder) / FOLDER_NAME / FILE_NAME
    path.parent.mkdir(exist_ok=True)
    # Half the bytes where the ids allow.
    small = int(successors.max()) < 1 << 16
    kept = successors.to(torch.uint16 if small else torch.int32)
    save_file({TENSOR_NAME: kept.contiguous().cpu()}, path)
    (Path(folder) / FILE_NAME).unlink(missing_ok=True)
    return path


def load_successors(folder: str | Path) -> Tensor | None:
    """int32 successors kept with a checkpoint, or None where there are none.

    Those that an earlier version left beside the weights are read too.

    Raises:
        CheckpointError: where the file is damaged.
    """
    places = (Path(folder) / FOLDER_NAME / FILE_NAME, Path(folder) / FILE_NAME)
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)[TENSOR_NAME].to(torch.int32)
    except (SafetensorError, KeyError) as error:
        raise CheckpointError(
            f"{path}: expected a tensor {TENSOR_NAME!r}, got: {error}; find the successors again "
            "(fused-markov successors)"
        ) from error
