"""Average checkpoints of one drafter, and scale what its two heads say.

python examples/train_pair/average.py second=0.5 third=0.5 --out models/mine
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def average(states: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    """The weighted sum, in fp32, of checkpoints with the same tensors."""
    return {
        name: sum(w * s[name].float() for w, s in zip(weights, states, strict=True))
        for name in states[0]
    }  # type: ignore[return-value]


def scale(state: dict[str, Tensor], base: float = 1.0, bias: float = 1.0) -> dict[str, Tensor]:
    """Multiply the base logits by ``base`` and the Markov bias by ``bias``.

    The confidence head reads the hidden states and the Markov embeddings; its weights on the
    former are divided by ``base``, so that it says what it said.
    """
    state = dict(state)
    state["norm.weight"] = state["norm.weight"] * base
    state["markov_head.markov_w2.weight"] = state["markov_head.markov_w2.weight"] * bias
    name = "confidence_head.proj.weight"
    width = len(state["norm.weight"])
    state[name] = torch.cat([state[name][:, :width] / base, state[name][:, width:]], 1)
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="+", help="FOLDER=WEIGHT")
    parser.add_argument("--base", type=float, default=1.0, help="factor on the base logits")
    parser.add_argument("--bias", type=float, default=1.0, help="factor on the Markov bias")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    folders, weights = zip(*(c.rsplit("=", 1) for c in args.checkpoint), strict=True)
    states = [load_file(Path(folder) / "model.safetensors") for folder in folders]
    state = scale(average(states, [float(w) for w in weights]), args.base, args.bias)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    state = {name: t.to(torch.bfloat16).contiguous() for name, t in state.items()}
    assert all(bool(t.isfinite().all()) for t in state.values())
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    if not (out / "config.json").exists():
        shutil.copy(Path(folders[0]) / "config.json", out / "config.json")


if __name__ == "__main__":
    main()
