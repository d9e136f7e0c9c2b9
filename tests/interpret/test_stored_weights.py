"""W2 in fewer bits under Triton's interpreter: every format, against the reference loop."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from test_kernels import ENGINES, Case, check, engine_of, problem_of, run

import fused_markov as fm
from fused_markov.engines.chips import INTERPRETER
from fused_markov.engines.launch import per_word
from fused_markov.kernels import decode as decoding
from fused_markov.problem_heads import with_heads
from fused_markov.quantize import BLOCKS
from fused_markov.successors import find_successors
from fused_markov.weights import StoredWeights, stored_weights

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

DTYPES = (torch.float16, torch.float32)
# Ranks from 128 on, in fp16, are read in words of 32 bits, as on NVIDIA's GPUs; others in bytes.
CASES = (
    Case("T=1, odd vocabulary", (1, 2, 301, 128), {"dtype": torch.float16}),
    Case("greedy, no cache", (2, 2, 130, 64), {"temperature": "greedy"}, cached=False),
    Case("rank 48, mixed, scale", (3, 2, 131, 48), {"temperature": "mixed", "scale": 0.5}),
    Case("reduced, padded", (3, 2, 300, 16), {"draft_vocab": 101, "slots": "padded"}),
)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("weights", BLOCKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(name: str, weights: str, case: Case) -> None:
    check(name, problem_of(replace(case, options={**case.options, "weights": weights})), case)


# Blocks of other sizes than make_problem's; the last of (1, 64) and (300, 128) go in words.
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("block", "rank"),
    [((128, 32), 96), ((7, 16), 48), ((1, 64), 128), ((128, 64), 96), ((300, 128), 128)],
    ids=str,
)
def test_blocks(name: str, block: tuple[int, int], rank: int) -> None:
    case = Case("", (1, 2, 300, rank), {"dtype": torch.float16, "temperature": "mixed"})
    problem = problem_of(case)
    gen = torch.Generator().manual_seed(1)
    codes = torch.randint(-15, 16, (300, rank), generator=gen).float()
    shape = [-(-n // size) for n, size in zip((300, rank), block, strict=True)]
    scale = 2.0 ** torch.randint(-5, 0, shape, generator=gen)
    dtype = torch.int8 if block[0] == 1 else torch.float8_e4m3fn
    head = fm.MarkovHead(problem.head.w1, codes.to(dtype), w2_scale=scale, w2_block=block)
    check(name, replace(problem, head=head), case)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("rank", [96, 256], ids=["bytes", "words"])
def test_infinite_embeddings_and_scales(name: str, rank: int) -> None:
    """What is infinite in one part of the rank stays so beside the others."""
    case = Case("", (4, 1, 130, rank), {"dtype": torch.float16, "temperature": "greedy"})
    problem = problem_of(case)
    w1 = problem.head.w1.clone()
    anchors = problem.batch.anchors
    w1[anchors[0], 1], w1[anchors[1], rank - 1] = torch.inf, -torch.inf
    w1[anchors[2]] = torch.nan
    codes = torch.ones(130, rank, dtype=torch.int8)
    width = 32 if rank == 96 else 128
    scale = torch.ones(130, rank // width)
    scale[7, 0], scale[9, 1] = torch.nan, torch.inf
    head = fm.MarkovHead(w1, codes, w2_scale=scale, w2_block=(1, width))
    check(name, replace(problem, head=head), case)


def test_which_go_in_words() -> None:
    """Else the tests above show nothing of them."""
    for weights, rank, count in (("fp8", 128, 4), ("int8", 64, 4), ("nvfp4", 128, 8)):
        head = problem_of(
            Case("", (1, 1, 40, rank), {"dtype": torch.float16, "weights": weights})
        ).head
        assert per_word(head, INTERPRETER, 16, rank) == count
        assert per_word(head, INTERPRETER, 64, rank) == 0
    blocks = problem_of(Case("", (1, 1, 40, 256), {"dtype": torch.float16, "weights": "fp8-block"}))
    assert per_word(blocks.head, INTERPRETER, 16, 256) == 4
    assert blocks.head.weights.parts == 2


@pytest.mark.parametrize("weights", ["fp8-block", "nvfp4"])
def test_chains(weights: str) -> None:
    options = {"bias_std": 30.0, "base_std": 0.5, "weights": weights, "temperature": "mixed"}
    case = Case("", (2, 3, 300, 32), options)
    problem = problem_of(case)
    problem.head.successors = find_successors(problem.head, 20)
    assert check("one_pass", problem, case).passes == 1


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("weights", BLOCKS)
def test_configurations_agree(name: str, weights: str) -> None:
    """Tiles of 16 rows multiply words, the other way round; tiles of 64 bytes."""
    options = {"temperature": "mixed", "weights": weights, "dtype": torch.float16}
    problem = problem_of(Case("", (1, 2, 130, 128), options))
    (a, a_cache), (b, b_cache) = (
        run(engine_of(name, problem.head, 1, 2, config=i), problem, True) for i in range(2)
    )
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a_cache, b_cache)


@triton.jit
def decode_all(codes, groups, out, kind: tl.constexpr, cfg: tl.constexpr):
    i = tl.arange(0, 256)
    x = tl.load(codes + i)
    if kind == "fp8":
        tl.store(out + i, decoding.e4m3(x, cfg.WEIGHT, cfg.PTX))
    elif kind == "int8":
        tl.store(out + i, decoding.int8(x, cfg.WEIGHT, cfg.PTX))
    else:
        j = tl.arange(0, 32)
        low, high = decoding.nvfp4(
            tl.reshape(x, [1, 256]),
            tl.reshape(tl.load(groups + j), [1, 32]),
            cfg.WEIGHT,
            cfg.PTX,
        )
        tl.store(out + 2 * i, tl.reshape(low, [256]))
        tl.store(out + 2 * i + 1, tl.reshape(high, [256]))


@pytest.mark.parametrize("kind", ["fp8", "int8", "nvfp4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code(kind: str, dtype: torch.dtype) -> None:
    """All 256 codes, subnormal ones among them, are what PyTorch says; NVFP4 under all scales."""
    cfg: Any = SimpleNamespace(WEIGHT={torch.float16: tl.float16}.get(dtype, tl.float32), PTX=False)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8)
    for first in range(0, 0x7F, 32) if kind == "nvfp4" else [0]:
        groups = torch.arange(first, first + 32, dtype=torch.uint8).clamp(max=0x7E)
        out = torch.full((512 if kind == "nvfp4" else 256,), torch.nan, dtype=dtype)
        decode_all[(1,)](codes, groups.view(torch.int8), out, kind, cfg)
        want = expected(kind, codes, groups)
        number = ~want.isnan()  # e4m3's two not-a-numbers never get this far
        assert torch.equal(out[number], want[number].to(dtype))
        assert torch.equal(want[number].to(dtype).float(), want[number])


def expected(kind: str, codes: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    if kind == "int8":
        return codes.float()
    if kind == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    packed = codes.view(torch.uint8).view(1, 256)
    scales = groups.view(torch.float8_e4m3fn).view(1, 32)
    stored: StoredWeights = stored_weights(packed, scales, global_scale=1.0)
    return stored.values(slice(0, 1)).flatten()


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(("weights", "variant"), [("nvfp4", "gated"), ("fp8", "rnn")])
def test_variants(name: str, weights: str, variant: str) -> None:
    case = Case("", (1, 2, 130, 32), {"weights": weights})
    check(name, with_heads(problem_of(case), variant=variant, exact=True), case)
