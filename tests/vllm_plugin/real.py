"""The tiny draft of `tiny` as the installed vLLM's own Qwen3 DSpark model class, head and all.

The Markov head, the confidence head, the lm_head and the logits processor are vLLM's; only the
transformer in front of them is missing.
"""

from __future__ import annotations

import socket
from typing import Any

import tiny
import torch
from torch import nn

_config: Any = None


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def config(rank: int = 0, world: int = 1, port: int = 0) -> Any:
    """A vLLM configuration for a CPU, and this process's place in its world; made once."""
    global _config
    if _config is None:
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        _config = VllmConfig(device_config=DeviceConfig(device="cpu"))
        with set_current_vllm_config(_config):
            address = f"tcp://127.0.0.1:{port or free_port()}"
            init_distributed_environment(world, rank, address, rank, "gloo")
            initialize_model_parallel(world)
    return _config


def make_model(case: tiny.Case, seed: int) -> Any:
    """`tiny.make_model`'s weights in vLLM's classes; None where vLLM's cannot hold the case."""
    if case.base_dtype is not None or case.transform or case.muse or case.topk:
        return None
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.models import qwen3_dspark as dspark

    source = tiny.make_model(case, seed)
    width = source.logits_processor.org_vocab_size
    model: Any = dspark.Qwen3DSparkForCausalLM.__new__(dspark.Qwen3DSparkForCausalLM)
    nn.Module.__init__(model)
    default = torch.get_default_dtype()
    with set_current_vllm_config(config()), torch.inference_mode(False):
        torch.set_default_dtype(case.dtype)
        try:
            model.model = nn.Module()
            model.model.markov_head = dspark.DSparkMarkovHead(
                tiny.TARGET_VOCAB, width, tiny.RANK, prefix="markov_head"
            )
            model.lm_head = ParallelLMHead(width, tiny.HIDDEN, prefix="lm_head")
        finally:
            torch.set_default_dtype(default)
        model.logits_processor = LogitsProcessor(width, scale=case.scale, soft_cap=case.soft_cap)
        model.model.confidence_head = None
        if case.confidence:
            head = dspark.DSparkConfidenceHead(
                tiny.HIDDEN + tiny.RANK, prefix="confidence_head", bias=False
            )
            head.proj.weight.data.copy_(source.confidence_weight)
            model.model.confidence_head = head
    markov = model.model.markov_head
    ours = source.model.markov_head
    markov.markov_w1.weight.data.copy_(ours.markov_w1.weight)
    markov.markov_w2.weight.data[:width].copy_(ours.markov_w2.weight[:width])
    # Sharded over the tensor parallel ranks; the Markov head is not.
    model.lm_head.weight_loader(model.lm_head.weight, source.lm_head.weight.data[:width])
    model.draft_id_to_target_id = source.draft_id_to_target_id
    return model.requires_grad_(False)
