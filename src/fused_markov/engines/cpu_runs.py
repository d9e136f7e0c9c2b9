"""Runs: pieces of `RUN` neighbours of the vocabulary, looked at closer only where they matter."""

from __future__ import annotations

import torch
from torch import Tensor

# Tokens are gated in runs of this many neighbours, by the run's largest logit.
RUN = 128

# Runs looked at closer at a time: an int32 slice of 224 KiB and a copy of it stay near the core,
# and a single row's scratch below its cache.
RUNS_AT_ONCE = 448


def largest_of_runs(logits: Tensor) -> Tensor:
    """``[n, runs]`` the largest logit of each run of ``logits`` ``[n, width]``; NaN: -inf."""
    count = logits.shape[1] // RUN
    whole, rest = logits[:, : count * RUN], logits[:, count * RUN :]
    tops = _largest(whole.view(logits.shape[0], count, RUN))
    if rest.shape[1]:
        tops = torch.cat((tops, rest.amax(1, keepdim=True)), dim=1)
    nan = tops.isnan()
    if nan.any():
        for row, run in (x.unbind(1) for x in torch.split(nan.nonzero(), RUNS_AT_ONCE)):
            values = logits_of_runs(logits, row, run)
            tops[row, run] = torch.where(values.isnan(), -torch.inf, values).amax(1)
    return tops


def _largest(x: Tensor) -> Tensor:
    """``x.amax(2)``, or NaN where there is one, or the largest number beside it.

    The order of 16-bit floats is that of their bits as integers, the other way round below zero;
    integers are compared several times faster.
    """
    if x.element_size() != 2:
        return x.amax(2)
    bits = x.view(torch.int16)
    top = bits.amax(2)
    return torch.where(top >= 0, top, bits.amin(2)).view(x.dtype)


def logits_of_runs(logits: Tensor, row: Tensor, run: Tensor) -> Tensor:
    """``[m, RUN]`` runs of ``logits`` ``[n, width]``; its last column fills what is missing."""
    column = (run * RUN).unsqueeze(1) + torch.arange(RUN)
    return logits[row.unsqueeze(1), column.clamp_max_(logits.shape[1] - 1)]
