"""Exact sampling of DSpark drafts with one read of the Markov head per decode step."""

from fused_markov import reference
from fused_markov.batch import DraftBatch, DraftResult
from fused_markov.confidence import ConfidenceHead
from fused_markov.errors import (
    ArgumentError,
    CheckpointError,
    EngineUnavailableError,
    FusedMarkovError,
)
from fused_markov.head import MarkovHead
from fused_markov.quantize import quantize_head
from fused_markov.sampler import DraftSampler
from fused_markov.transforms import LogitTransform
from fused_markov.variants import GatedVariant, RnnVariant

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "ConfidenceHead",
    "DraftBatch",
    "DraftResult",
    "DraftSampler",
    "EngineUnavailableError",
    "FusedMarkovError",
    "GatedVariant",
    "LogitTransform",
    "MarkovHead",
    "RnnVariant",
    "quantize_head",
    "reference",
]
