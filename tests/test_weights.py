"""W2 in fewer bits: what is stored, that nothing widens all of it, and that engines agree on it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fused_markov as fm
from fused_markov import ArgumentError, MarkovHead, reference
from fused_markov.bench.floor import floor_bytes
from fused_markov.problem_heads import with_heads
from fused_markov.problems import make_problem
from fused_markov.quantize import BLOCKS, quantize
from fused_markov.successors import find_successors
from fused_markov.weights import StoredWeights, stored_weights, unswizzled_scales
from test_engines import DTYPES, ENGINES, check, device_of

every_engine = pytest.mark.parametrize("engine", ENGINES)
every_format = pytest.mark.parametrize("weights", BLOCKS)

# Codes and scales, written down: what the bits mean, not what the library makes of them.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return sign * size


def random_nvfp4(rows: int, rank: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes and e4m3 scales, any of them but not-a-number, and what they stand for."""
    gen = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, rank // 2), generator=gen).to(torch.uint8)
    codes = torch.randint(0, 0x7F, (rows, rank // 16), generator=gen).to(torch.uint8)
    wide = torch.empty(rows, rank, dtype=torch.float64)
    for v in range(rows):
        for k in range(rank):
            byte = int(packed[v, k // 2])
            nibble = byte >> 4 if k % 2 else byte & 15
            wide[v, k] = E2M1[nibble] * e4m3(int(codes[v, k // 16]))
    return packed, codes.view(torch.float8_e4m3fn), wide


# Engines


@every_engine
@every_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_vocab": 301, "slots": "padded"},
        {"draft_vocab": 300, "cache": "draft", "strides": "wide"},
        {"scale": 0.5, "soft_cap": 3.0, "cache": "wide"},
        {"base_dtype": torch.float32, "bias_std": 8.0},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_equals_reference(
    engine: str, weights: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    for temperature in ("greedy", "mixed"):
        problem = make_problem(
            *(3, 4, 1001, 256),
            dtype=dtype,
            temperature=temperature,
            weights=weights,
            exact_sums=True,
            device=device_of(engine),
            **options,
        )
        check(engine, problem)


@every_engine
@pytest.mark.parametrize("block", [(1, 32), (128, 128), (100, 16), (1001, 64)], ids=str)
@pytest.mark.parametrize("rank", [200, 512])
def test_blocks_equal_reference(engine: str, block: tuple[int, int], rank: int) -> None:
    problem = make_problem(2, 3, 1001, rank, exact_sums=True, device=device_of(engine))
    gen = torch.Generator().manual_seed(5)
    codes = torch.randint(-15, 16, (1001, rank), generator=gen).float()
    shape = [-(-n // size) for n, size in zip((1001, rank), block, strict=True)]
    scale = (2.0 ** torch.randint(-7, -3, shape, generator=gen)).to(device_of(engine))
    w1 = problem.head.w1
    data = codes.to(torch.float8_e4m3fn).to(w1.device)
    problem = type(problem)(
        MarkovHead(w1, data, w2_scale=scale, w2_block=block),
        problem.batch,
        problem.num_slots,
        problem.cache_width,
        problem.cache_dtype,
    )
    check(engine, problem)


# The contract: an fp32 sum of exact values, scaled, rounded once.


@every_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_is_what_is_stored(weights: str, dtype: torch.dtype) -> None:
    head = make_problem(1, 1, 600, 256, dtype=dtype, weights=weights, exact_sums=True).head
    prev = torch.tensor([0, 17, 599])
    exact = head.w1[prev].double() @ head.weights.dequantized(slice(0, 600)).double().T
    assert torch.equal(exact.float().double(), exact)
    assert torch.equal(head.bias(prev), exact.float().to(dtype))


@every_format
def test_scales_are_applied_once_to_the_sum(weights: str) -> None:
    """Real scales: within fp32's last places of the exact sum, which rounded weights are not."""
    plain = make_problem(1, 1, 700, 256, dtype=torch.float32).head
    head = fm.quantize_head(plain, weights)
    wide = head.weights.dequantized(slice(0, 700)).double()
    exact = head.w1[:9].double() @ wide.T
    size = head.w1[:9].double().abs() @ wide.abs().T
    off = (head.bias(torch.arange(9)).double() - exact).abs() / size
    assert float(off.max()) < 2.0**-20
    rounded = head.w1[:9].double() @ wide.bfloat16().double().T
    assert float(((rounded - exact).abs() / size).max()) > 2.0**-14


def test_nvfp4_is_as_the_bits_say() -> None:
    packed, scales, wide = random_nvfp4(40, 48)
    head = MarkovHead(torch.eye(48).repeat(1, 1)[:40], packed, w2_scale=scales, w2_global_scale=0.5)
    assert torch.equal(head.weights.values(slice(0, 40)).double(), wide)
    picked = torch.tensor([3, 3, 39])
    assert torch.equal(head.weights.dequantized(picked).double(), wide[picked] / 2)
    # One embedding dimension each: a bias is a weight.
    assert torch.equal(head.bias(torch.arange(40)).double(), wide[:, :40].T / 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_exact_in_every_dtype(dtype: torch.dtype) -> None:
    """All products of a code and an NVFP4 scale; all fp8 and int8 codes."""
    number = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    fp8 = number.view(torch.float8_e4m3fn).float()
    for values in (torch.outer(torch.tensor(E2M1), fp8), fp8, torch.arange(-128.0, 128.0)):
        assert torch.equal(values.to(dtype).float(), values)


@every_format
def test_successors_of_a_quantized_head(weights: str) -> None:
    head = make_problem(1, 1, 300, 32, weights=weights, exact_sums=True).head
    found = find_successors(head, 5)
    bias = head.bias(torch.arange(300)).float()
    assert torch.equal(bias.gather(1, found.long()), bias.topk(5).values)


# What is held


class Largest(TorchDispatchMode):
    """The largest memory that anything inside made, views of ``known`` tensors aside."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self._known = {x.untyped_storage().data_ptr() for x in known}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self._known:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


BYTES = {"fp8": 1 + 4 / 256, "fp8-block": 1 + 8 / (128 * 256), "int8": 1 + 4 / 256, "nvfp4": 9 / 16}


@every_format
def test_no_full_copy(weights: str) -> None:
    rows, rank = 40_000, 256
    plain = make_problem(2, 2, rows, rank, temperature=1.0)
    head = fm.quantize_head(plain.head, weights)
    held = sum(t.untyped_storage().nbytes() for t in head.weights.tensors())
    assert held == pytest.approx(rows * rank * BYTES[weights], rel=1e-3)
    assert head.weights.nbytes() == held
    assert head.w2.data_ptr() == head.weights.data.data_ptr()
    assert held < 0.51 * plain.head.w2.untyped_storage().nbytes()
    cache = plain.new_cache()
    sampler = fm.DraftSampler(head, max_rows=2, steps=2, engine="cpu")
    with Largest(head.w1, *head.weights.tensors()) as largest:
        again = head.with_weights(head.w1, head.weights)
        sampler.sample(plain.batch, cache)
        reference.sample(again, plain.batch, cache)
    assert again.w2.data_ptr() == head.w2.data_ptr()
    # A widened copy would be four times what is held, or more.
    assert largest.bytes < held / 2, f"{largest.bytes} bytes beside {held}"


def test_scales_are_not_copied() -> None:
    codes, scale = torch.zeros(64, 32, dtype=torch.int8), torch.ones(64)
    head = MarkovHead(torch.zeros(64, 32), codes, w2_scale=scale)
    assert head.weights.scale is not None
    assert head.weights.scale.data_ptr() == scale.data_ptr()
    assert head.w2.data_ptr() == codes.data_ptr()


@every_format
def test_floor_counts_stored_bytes(weights: str) -> None:
    plain, quantized = (
        floor_bytes(make_problem(1, 1, 1024, 256, weights=w), cached=False)
        for w in ("plain", weights)
    )
    saved = 1024 * 256 * (2 - BYTES[weights])
    assert plain - quantized == pytest.approx(saved, abs=8)


# Quantizing


@every_format
def test_error_bounds(weights: str) -> None:
    """To nearest: half a step of the code, at the block's scale; a row of zeros stays so."""
    gen = torch.Generator().manual_seed(2)
    w2 = torch.randn(300, 64, generator=gen) * torch.logspace(-3, 2, 300).unsqueeze(1)
    w2[7] = 0.0
    head = fm.quantize_head(MarkovHead(torch.zeros(300, 64), w2), weights)
    got = head.weights.dequantized(slice(0, 300))
    error = (got - w2).abs()
    assert bool((got[7] == 0).all())
    if weights == "int8":
        limit = w2.abs().amax(1, keepdim=True) / 127 / 2
    elif weights == "nvfp4":
        # Of a group's largest: an eighth for 4 to 6, an e4m3 scale's sixteenth, its least step.
        groups = w2.view(300, 4, 16).abs().amax(2).repeat_interleave(16, 1)
        limit = groups * (1 / 6 + 1 / 16) + w2.abs().max() / 2688 * 2.0**-9 * 6
    else:
        rows = w2.abs().amax(1, keepdim=True)
        if weights == "fp8-block":
            rows = torch.cat([part.amax().expand(part.shape[0]) for part in rows.split(128)])
            rows = rows.unsqueeze(1)
        limit = torch.maximum(w2.abs() / 16, rows / 448 * 2.0**-10)
    assert bool((error <= limit * 1.0001).all())


def test_nearest_codes_of_nvfp4() -> None:
    """Ties go to the even code; the largest value of all has the largest code."""
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 6.0, 0.26, -0.3, -5.0])
    row = torch.cat([values, torch.zeros(4)])
    w2 = torch.stack([row, torch.full((16,), 2688.0)])  # so that the scale of all is 1
    stored = quantize(w2, "nvfp4")
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 0.5, -0.5, -4.0, 0.0, 0.0, 0.0, 0.0]
    assert stored.dequantized(slice(0, 1)).flatten().tolist() == wanted
    assert stored.dequantized(slice(1, 2)).unique().tolist() == [2688.0]


def test_quantize_head_refuses() -> None:
    head = make_problem(1, 1, 50, 24).head
    with pytest.raises(ArgumentError, match=r"format.*fp8.*nvfp4.*'fp4'"):
        fm.quantize_head(head, "fp4")
    with pytest.raises(ArgumentError, match=r"format.*rank of 24.*sixteens"):
        fm.quantize_head(head, "nvfp4")
    with pytest.raises(ArgumentError, match=r"head.*plain.*int8"):
        fm.quantize_head(fm.quantize_head(head, "int8"), "int8")
    head.w2[3, 3] = torch.nan
    with pytest.raises(ArgumentError, match="finite"):
        fm.quantize_head(head, "fp8")


@every_format
def test_what_else_a_head_has_stays(weights: str) -> None:
    problem = make_problem(1, 1, 90, 32, draft_vocab=40, scale=0.5, soft_cap=2.0)
    head = problem.head
    head.successors = find_successors(head, 3)
    got = fm.quantize_head(head, weights)
    assert (got.vocab_size, got.draft_vocab, got.scale, got.soft_cap) == (90, 40, 0.5, 2.0)
    assert got.id_map is not None
    assert head.id_map is not None
    assert torch.equal(got.id_map, head.id_map)
    assert got.successors is head.successors
    assert got.w1.data_ptr() == head.w1.data_ptr()
    assert f"w2 in {got.weights.format}" in repr(got)


# What is refused

W1 = torch.zeros(256, 64)
FP8 = torch.zeros(256, 64).to(torch.float8_e4m3fn)
PACKED = torch.zeros(256, 32, dtype=torch.uint8)
GROUPS = torch.ones(256, 4).to(torch.float8_e4m3fn)


def refused() -> Iterator[Any]:
    def case(name: str, match: str, w2: Tensor, **options: Any) -> Any:
        return pytest.param(w2, options, match, id=name)

    nan = GROUPS.clone()
    nan.view(torch.uint8)[255, 3] = 0x7F
    bad = FP8.clone()
    bad.view(torch.uint8)[255, 63] = 0xFF
    yield case("no scales", r"w2: .*e4m3.*float8_e4m3fn without w2_scale", FP8)
    yield case("scales of plain weights", r"w2: .*w2_scale.*float32", W1, w2_scale=torch.ones(256))
    yield case("too few", r"w2_scale.*\[2, 1\].*128, 64.*\[100\]", FP8, w2_scale=torch.ones(100))
    yield case("whole numbers", r"w2_scale.*float", FP8, w2_scale=torch.ones(256).int())
    yield case("three dims", r"w2_scale.*two", FP8, w2_scale=torch.ones(256, 1, 1))
    yield case("block", r"w2_block", FP8, w2_scale=torch.ones(2, 3), w2_block=(128, 24))
    yield case("no block", r"w2_scale", FP8, w2_scale=torch.ones(256), w2_block=(0, 64))
    yield case("other dtype", r"w2.*int32", torch.zeros(256, 64, dtype=torch.int32))
    yield case("not-a-number", r"w2: .*not-a-number", bad, w2_scale=torch.ones(256))
    yield case(
        "global scale of fp8", r"w2_global", FP8, w2_scale=torch.ones(256), w2_global_scale=1.0
    )
    nvfp4 = {"w2_scale": GROUPS, "w2_global_scale": 1.0}
    yield case("fp32 groups", r"w2_scale.*e4m3", PACKED, **{**nvfp4, "w2_scale": GROUPS.float()})
    yield case("swizzled", r"unswizzled", PACKED, **{**nvfp4, "w2_scale": GROUPS.view(128, 8)})
    yield case("two global", r"global", PACKED, **{**nvfp4, "w2_global_scale": torch.ones(2)})
    yield case("never loaded", r"w2_scale.*not-a-number", PACKED, **{**nvfp4, "w2_scale": nan})
    wide = torch.zeros(256, 64, dtype=torch.uint8)
    groups = torch.ones(256, 8).to(torch.float8_e4m3fn)
    yield case("rank", r"w2: .*rank 64.*rank 128", wide, **{**nvfp4, "w2_scale": groups})


@pytest.mark.parametrize(("w2", "options", "match"), list(refused()))
def test_refuses(w2: Tensor, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        MarkovHead(W1, w2, **options)


def test_padding_may_hold_anything() -> None:
    codes = FP8.clone()
    codes.view(torch.uint8)[200:] = 0x7F
    assert MarkovHead(W1, codes, w2_scale=torch.ones(256), vocab_size=200).draft_vocab == 200


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((), (256, 64)),
        ((1,), (256, 64)),
        ((256,), (1, 64)),
        ((256, 1), (1, 64)),
        ((256, 2), (1, 32)),
        ((2, 1), (128, 64)),
    ],
    ids=str,
)
def test_shapes_of_scales(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e8m0fnu):
        stored = stored_weights(FP8, torch.ones(shape).to(dtype))
        assert stored.block == block
        assert stored.scale is not None
        assert stored.scale.dtype == torch.float32


@pytest.mark.parametrize("shape", [(256, 4), (130, 6), (1, 1)], ids=str)
def test_unswizzled_scales(shape: tuple[int, int]) -> None:
    """Against the place that CUTLASS gives a scale, written down element by element."""
    rows, groups = shape
    padded = (-(-rows // 128) * 128, -(-groups // 4) * 4)
    codes = torch.arange(rows * groups).remainder(0x7F).to(torch.uint8).view(rows, groups)
    flat = torch.zeros(padded[0] * padded[1], dtype=torch.uint8)
    for v in range(rows):
        for g in range(groups):
            tile = v // 128 * (padded[1] // 4) + g // 4
            flat[tile * 512 + v % 32 * 16 + v % 128 // 32 * 4 + g % 4] = codes[v, g]
    swizzled = flat.view(padded).view(torch.float8_e4m3fn)
    plain = unswizzled_scales(swizzled, rows, groups)
    assert torch.equal(plain.view(torch.uint8), codes)
    with pytest.raises(ArgumentError, match="shape"):
        unswizzled_scales(swizzled, rows + 128, groups)


def test_stored_weights_bring_their_scales() -> None:
    stored: StoredWeights = quantize(torch.randn(256, 64), "fp8")
    assert MarkovHead(W1, stored).w2 is stored.data
    with pytest.raises(ArgumentError, match="StoredWeights"):
        MarkovHead(W1, stored, w2_scale=torch.ones(256))


# Where heads come from and go to


@every_format
def test_operator(weights: str) -> None:
    import fused_markov.ops  # noqa: F401

    problem = make_problem(2, 3, 301, 256, weights=weights, exact_sums=True, temperature="mixed")
    head, batch = problem.head, problem.batch
    stored, caches = head.weights, (problem.new_cache(), problem.new_cache())
    assert stored.scale is not None
    options: dict[str, Any] = {"w2_scale": stored.scale, "w2_block": list(stored.block)}
    if stored.groups is not None:
        options = {"w2_scale": stored.groups, "w2_global_scale": stored.scale[0, 0]}
    tokens, nonfinite, _ = torch.ops.fused_markov.sample(
        head.w1,
        head.w2,
        batch.base_logits,
        batch.anchors,
        batch.positions,
        batch.temperature,
        batch.seeds,
        logits_cache=caches[0],
        **options,
    )
    want = reference.sample(head, batch, caches[1])
    assert torch.equal(tokens, want.tokens)
    assert torch.equal(nonfinite, want.nonfinite)
    assert torch.equal(caches[0], caches[1])


def test_a_problem_in_memory_of_its_own() -> None:
    for weights in BLOCKS:
        problem = make_problem(1, 2, 80, 32, weights=weights, draft_vocab=40)
        twin = problem.clone()
        ours, theirs = problem.head.weights, twin.head.weights
        for a, b in zip(ours.tensors(), theirs.tensors(), strict=True):
            assert a.data_ptr() != b.data_ptr()
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_vllm_keeps_its_quantized_heads() -> None:
    from fused_markov.integrations import vllm_versions
    from fused_markov.integrations.vllm_step import why_not_model

    method = type("ModelOptLinearMethod", (), {})()
    w2 = SimpleNamespace(quant_method=method)
    markov = SimpleNamespace(markov_w1=SimpleNamespace(), markov_w2=w2)
    model = SimpleNamespace(
        model=SimpleNamespace(markov_head=markov), logits_processor=SimpleNamespace()
    )
    newest = vllm_versions.TABLE[-1]
    reason = why_not_model(model, newest)
    assert reason is not None
    assert "ModelOptLinearMethod" in reason
    assert "kernel's own layout" in reason


@every_engine
@every_format
@pytest.mark.parametrize("variant", ["gated", "rnn"])
def test_variants(engine: str, weights: str, variant: str) -> None:
    problem = make_problem(
        2, 3, 300, 64, weights=weights, exact_sums=True, device=device_of(engine)
    )
    problem = with_heads(problem, variant=variant, confidence="markov", exact=True)
    assert problem.head.weights.quantized
    check(engine, problem)


def test_limited_candidates_are_not_for_the_kernels() -> None:
    from fused_markov.engines import Plan
    from fused_markov.engines.per_step import PerStepEngine

    head = make_problem(1, 1, 40, 32, weights="int8").head
    reason = PerStepEngine.why_not(head, Plan(1, 1, torch.float32, draft_topk=4))
    assert reason is not None
    assert "draft_topk" in reason
