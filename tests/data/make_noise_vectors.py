"""Write noise_vllm_0_33.json with vLLM's own sampling kernels.

The numbers come from ``v1/worker/gpu/sample/gumbel.py`` of an unpacked vLLM 0.33, run as it
stands under Triton's interpreter on a CPU. Only that one file is loaded; a stub takes the place
of ``vllm.triton_utils``. Usage::

    python make_noise_vectors.py PATH_OF_VLLM_PACKAGE [OUTPUT]
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import argparse
import importlib.util
import json
import platform
import struct
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 2**40 + 5]
STEPS = list(range(7))
POSITIONS = [0, 1, 2**30 - 1, 2**30, 100000]
TOKENS = [0, 1, 63, 129279, 262143]

DRAW_VOCABS = [64, 1000, 2500]
DRAW_TEMPERATURES = [0.0, 0.6, 1.0]
DRAW_SEEDS = [0, -1, 2**40 + 5]
DRAW_STEPS = 4
DRAW_POSITIONS = [1, 2, 77, 4095, 100000]
LOGITS_FORMULA = "((v*104729 + row*7919 + step*31) % 251) / 32 - 4"


def load_gumbel(package: Path) -> Any:
    """Load gumbel.py alone, with triton and tl under the name it imports them from."""
    for name in ("vllm", "vllm.triton_utils"):
        sys.modules[name] = types.ModuleType(name)
    stub: Any = sys.modules["vllm.triton_utils"]
    stub.triton, stub.tl = triton, tl
    file = package / "v1" / "worker" / "gpu" / "sample" / "gumbel.py"
    spec = importlib.util.spec_from_file_location("vllm_gumbel", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


package_argument = argparse.ArgumentParser()
package_argument.add_argument("package", type=Path, help="the unpacked vllm package directory")
package_argument.add_argument(
    "output", type=Path, nargs="?", default=Path(__file__).with_name("noise_vllm_0_33.json")
)
arguments = package_argument.parse_args()
gumbel = load_gumbel(arguments.package)

spec_step_seed = gumbel.spec_step_seed
murmur3_hash32 = gumbel.murmur3_hash32
murmur3_uniform32 = gumbel.murmur3_uniform32
murmur3_uniform64 = gumbel.murmur3_uniform64
log1p_neg_stable = gumbel._log1p_neg_stable


@triton.jit
def table_kernel(
    seed_ptr, step_ptr, pos_ptr, token_ptr, hash_ptr, u32_ptr, u64_ptr, g32_ptr, g64_ptr, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    mask = i < count
    # One seed, step and position a launch, as in vLLM; a vector of token ids.
    seed = spec_step_seed(tl.load(seed_ptr), tl.load(step_ptr))
    pos = tl.load(pos_ptr)
    token = tl.load(token_ptr + i, mask=mask, other=0)
    tl.store(hash_ptr + i, murmur3_hash32(seed, pos, token).to(tl.int64), mask=mask)
    u32 = murmur3_uniform32(seed, pos, token)
    u64 = murmur3_uniform64(seed, pos, token)
    tl.store(u32_ptr + i, u32, mask=mask)
    tl.store(u64_ptr + i, u64, mask=mask)
    tl.store(g32_ptr + i, -tl.log(-log1p_neg_stable(u32)), mask=mask)
    tl.store(g64_ptr + i, -tl.log(-tl.log(u64)), mask=mask)


def bits32(values: torch.Tensor) -> str:
    """The bit patterns of fp32 values, 8 hex digits each."""
    return "".join(struct.pack(">f", float(value)).hex() for value in values)


def bits64(values: torch.Tensor) -> str:
    """The bit patterns of fp64 values, 16 hex digits each."""
    return "".join(struct.pack(">d", float(value)).hex() for value in values)


def table() -> dict[str, Any]:
    """Hash, uniforms and noise; one string per (seed, step, position), the tokens inside it."""
    count = len(TOKENS)
    tokens = torch.tensor(TOKENS)
    columns: dict[str, list[str]] = {
        name: [] for name in ("hash32", "uniform32", "uniform64", "gumbel32", "gumbel64")
    }
    for seed in SEEDS:
        for step in STEPS:
            for position in POSITIONS:
                hashes = torch.empty(count, dtype=torch.int64)
                u32, g32 = torch.empty(2, count)
                u64, g64 = torch.empty(2, count, dtype=torch.float64)
                table_kernel[(1,)](
                    torch.tensor([seed]), torch.tensor([step], dtype=torch.int32),
                    torch.tensor([position]), tokens, hashes, u32, u64, g32, g64, count,
                    BLOCK=triton.next_power_of_2(count),
                )  # fmt: skip
                columns["hash32"].append("".join(f"{int(h):08x}" for h in hashes))
                columns["uniform32"].append(bits32(u32))
                columns["uniform64"].append(bits64(u64))
                columns["gumbel32"].append(bits32(g32))
                columns["gumbel64"].append(bits64(g64))
    return {
        "order": "seed, step, hashed_position; the tokens of one triple in one string",
        "seeds": SEEDS,
        "steps": STEPS,
        "hashed_positions": POSITIONS,
        "tokens": TOKENS,
        **columns,
    }


def make_logits(vocab: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits by LOGITS_FORMULA, [3, vocab]; every value is exact in bf16."""
    v = torch.arange(vocab)
    row = torch.arange(3)[:, None]
    return (((v * 104729 + row * 7919 + step * 31) % 251) / 32 - 4).to(dtype)


def draw(vocab: int, dtype: torch.dtype, fp64: bool, drafting: bool) -> dict[str, Any]:
    """Whole draws, tokens[position][step][row]; a target's draw has no cache and one step."""
    slots = torch.tensor([2, 0, 1])
    rows = []
    for position in DRAW_POSITIONS:
        steps = []
        for step in range(DRAW_STEPS if drafting else 1):
            logits = make_logits(vocab, step, dtype)
            cache = torch.full((3, DRAW_STEPS, vocab), 12345.0).to(dtype) if drafting else None
            drawn = gumbel.gumbel_sample(
                logits, slots, torch.tensor(DRAW_TEMPERATURES), torch.tensor(DRAW_SEEDS),
                torch.full((3,), position - 1), apply_temperature=True, is_drafting=drafting,
                logits_cache=cache,
                logits_cache_col=torch.tensor(step, dtype=torch.int32) if drafting else None,
                use_fp64=fp64,
            )  # fmt: skip
            if cache is not None:
                assert torch.equal(cache[slots, step], logits)
                assert (cache[:, :step] > 1e4).all()
                assert (cache[:, step + 1 :] > 1e4).all()
            steps.append(drawn.tolist())
        rows.append(steps)
    return {
        "vocab": vocab,
        "dtype": str(dtype).removeprefix("torch."),
        "fp64": fp64,
        "drafting": drafting,
        "tokens": rows,
    }


def draws() -> dict[str, Any]:
    """Draws over vocabularies, dtypes and both noise widths.

    Triton's interpreter miscomputes bf16 arithmetic; these kernels load bf16 and compute in fp32.
    """
    cases = [
        draw(vocab, dtype, fp64, drafting)
        for vocab in DRAW_VOCABS
        for dtype in (torch.float32, torch.bfloat16)
        for fp64 in (False, True)
        for drafting in (True, False)
    ]
    return {
        "order": "tokens[position][step][row]",
        "logits": LOGITS_FORMULA,
        "cache": "equal to the logits before temperature, checked when written",
        "slots": [2, 0, 1],
        "temperature_by_slot": DRAW_TEMPERATURES,
        "seed_by_slot": DRAW_SEEDS,
        "positions": DRAW_POSITIONS,
        "cases": cases,
    }


def main() -> None:
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's wrapping products
    document = {
        "what": "vLLM 0.33.0's v1/worker/gpu/sample/gumbel.py under Triton's interpreter",
        "salt": 2**30,
        "made_with": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "table": table(),
        "draws": draws(),
    }
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
