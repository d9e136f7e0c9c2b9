"""The GPU engines on a GPU: against the reference, in any company, in graphs, past 2**31.

Most heads here have weights whose products add up exactly in fp32, in whatever order. The engines'
caches then equal those of a library's matrix product to the bit, and a difference is a fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import fused_markov as fm
from fused_markov import reference
from fused_markov.engines import Plan
from fused_markov.engines.configs import ONE_PASS
from fused_markov.engines.one_pass import OnePassEngine
from fused_markov.problems import Problem, make_problem
from fused_markov.successors import find_successors

pytestmark = pytest.mark.gpu

ENGINES = ("one_pass", "per_step")
MAX_VARIANTS = 12


def exact(*shape: int, **options: Any) -> Problem:
    return make_problem(*shape, exact_sums=True, device="cuda", **options)


def sampler_of(problem: Problem, engine: str, max_rows: int = 0, **options: Any) -> fm.DraftSampler:
    batch = problem.batch
    return fm.DraftSampler(
        problem.head,
        max_rows=max(1, max_rows, batch.rows),
        steps=batch.steps,
        engine=engine,
        **options,
    )


def assert_same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal to the bit, NaNs being all alike; reports the first difference."""
    different = (got != want) & ~((got != got) & (want != want))
    if bool(different.any()):
        at = tuple(different.nonzero()[0].tolist())
        count = int(different.sum())
        raise AssertionError(f"{what}{list(at)}: {got[at]} for {want[at]}, {count} differ")


def check(problem: Problem, sampler: fm.DraftSampler, cached: bool = True) -> fm.DraftResult:
    """All that an engine writes against all that the reference writes, into poisoned outputs."""
    caches = [problem.new_cache() if cached else None for _ in range(2)]
    noise_dtype = sampler.plan.noise_dtype
    want = reference.sample(problem.head, problem.batch, caches[0], noise_dtype=noise_dtype)
    got = sampler.sample(problem.batch, caches[1], problem.new_tokens())
    assert_same(got.tokens, want.tokens, "tokens")
    assert_same(got.nonfinite, want.nonfinite, "nonfinite")
    if caches[0] is not None and caches[1] is not None:
        assert_same(caches[1], caches[0], "cache")
    return got


@dataclass(frozen=True)
class Case:
    """A problem on the GPU, and how it is sampled."""

    name: str
    shape: tuple[int, int, int, int]  # R, S, V, r
    options: dict[str, Any] = field(default_factory=dict)
    cached: bool = True
    noise_dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64


SMALL = (3, 5, 2000, 64)
CAST = {"dtype": torch.float32, "cache_dtype": torch.bfloat16}
GREEDY = {"temperature": "greedy"}
CASES = (
    Case("T=1", SMALL),
    Case("T=1, no cache", SMALL, cached=False),
    Case("T=0.6", SMALL, {"temperature": 0.6}),
    Case("T=0", SMALL, {"temperature": 0.0}),
    Case("fp64 noise", SMALL, noise_dtype=torch.float64),
    Case("greedy", SMALL, GREEDY),
    Case("greedy, no cache", SMALL, GREEDY, cached=False),
    Case("mixed temperatures", (8, 5, 2000, 64), {"temperature": "mixed"}),
    Case("odd sizes", (5, 7, 1999, 24), {"temperature": "mixed"}),
    Case("one row, one step", (1, 1, 2000, 64)),
    Case("many rows", (150, 3, 500, 32), {"temperature": "mixed"}),
    Case("many steps", (2, 16, 500, 32)),
    Case("reduced, draft-wide", SMALL, {"draft_vocab": 700, "cache": "draft"}),
    Case("reduced, target-wide", SMALL, {"draft_vocab": 700}),
    Case("reduced, wide, greedy", SMALL, {"draft_vocab": 701, "cache": "wide", **GREEDY}),
    Case("cache wider than the vocabulary", SMALL, {"cache": "wide"}),
    Case("padding rows", (7, 5, 2000, 64), {"slots": "padded"}),
    Case(
        "padding steps, int32", (7, 5, 2000, 64), {"slots": "padded-steps"}, index_dtype=torch.int32
    ),
    Case("all padding", SMALL, {"slots": "none-live"}),
    Case("wide strides", SMALL, {"strides": "wide"}),
    Case("step-major", SMALL, {"strides": "step-major"}),
    Case("smaller than a tile", (2, 2, 40, 16)),
    Case("fp32", SMALL, {"dtype": torch.float32}),
    # In larger tiles a product could start from the base logits, which is another sum.
    Case("fp32, several rows", (5, 5, 2000, 64), {"dtype": torch.float32}),
    Case("fp32, many rows", (70, 3, 2000, 64), {"dtype": torch.float32}),
    Case("fp16", SMALL, {"dtype": torch.float16}),
    Case("bf16 head, fp32 base", SMALL, {"base_dtype": torch.float32}),
    Case("bf16 cache of fp32 logits", SMALL, CAST),
    Case("scale", SMALL, {"scale": 0.5}),
    Case("ties", SMALL, {"base_std": 0.0, "bias_std": 0.0, **GREEDY}),
    Case("strong head", SMALL, {"bias_std": 30.0, "base_std": 0.5}),
    Case("rank 192", (3, 5, 1000, 192)),
    Case("rank 512", (3, 5, 1000, 512)),
    Case("rank 1024", (2, 3, 1000, 1024)),
)


def problem_of(case: Case) -> Problem:
    problem = exact(*case.shape, seed=5, **case.options)
    batch, index = problem.batch, case.index_dtype
    slots = None if batch.slots is None else batch.slots.to(index)
    batch = replace(
        batch, anchors=batch.anchors.to(index), positions=batch.positions.to(index), slots=slots
    )
    return replace(problem, batch=batch)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(engine: str, case: Case) -> None:
    problem = problem_of(case)
    check(problem, sampler_of(problem, engine, noise_dtype=case.noise_dtype), case.cached)


@pytest.mark.parametrize("temperature", ["greedy", "mixed"])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_successors_spare_passes(rows: int, temperature: str) -> None:
    """A bias so strong that the base says nothing of the chain."""
    options = {"bias_std": 30.0, "base_std": 0.5, "temperature": temperature, "slots": "padded"}
    problem = exact(rows + 2, 5, 3000, 64, **options)
    without = check(problem, sampler_of(problem, "one_pass"))
    problem.head.successors = find_successors(problem.head)
    got = check(problem, sampler_of(problem, "one_pass"))
    assert without.passes > 1
    assert got.passes == 1


@pytest.mark.parametrize("rows", [1, 3, 8, 33, 64])
@pytest.mark.parametrize("vocab", [1, 2047, 2048, 2049, 129280, 151936])
def test_sizes(vocab: int, rows: int) -> None:
    problem = exact(rows, 5, vocab, 256, temperature="mixed")
    for engine in ENGINES:
        check(problem, sampler_of(problem, engine))


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("options", [{}, {"scale": 0.5, "soft_cap": 8.0}], ids=["plain", "capped"])
@pytest.mark.parametrize("temperature", ["mixed", "greedy"])
def test_any_weights(rows: int, temperature: str, options: dict[str, float]) -> None:
    """Weights as they come: a last place of the bias may differ from a library's."""
    kind: dict[str, Any] = {"temperature": temperature, **options}
    problem = make_problem(rows, 5, 129280, 256, device="cuda", **kind)
    want_cache, base = problem.new_cache(), problem.batch.base_logits.float()
    want = reference.sample(problem.head, problem.batch, want_cache)
    for engine in ENGINES:
        cache = problem.new_cache()
        got = sampler_of(problem, engine).sample(problem.batch, cache)
        assert_same(got.tokens, want.tokens, "tokens")
        difference = (cache.float() - want_cache.float()).abs()
        bias = (want_cache.float() - base).abs()
        eps = torch.finfo(torch.bfloat16).eps
        assert bool((difference <= 4 * eps * torch.maximum(bias, want_cache.float().abs())).all())
        count, places = int((difference > 0).sum()), difference.numel()
        print(f"{engine}, {rows} rows, {temperature}: {count} of {places} cached logits differ")
        assert count < places // 100
        if temperature == "greedy":
            best = reference.pick(cache.flatten(0, 1), torch.arange(129280, device="cuda"))[0]
            assert_same(got.tokens.flatten(), best, "argmax of the cache")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("temperature", ["greedy", "mixed"])
def test_non_finite_logits(engine: str, temperature: str) -> None:
    problem = exact(6, 2, 4099, 64, temperature=temperature)
    base = problem.batch.base_logits
    base[0, 0] = torch.nan
    base[1, 1] = -torch.inf
    base[2, 0, 1500] = torch.nan
    base[3, 0, 77] = base[3, 0, 9] = torch.inf
    base[4, 0] = -torch.inf
    base[4, 0, 4098] = -2.0
    problem.head.w2[5] = torch.nan
    problem.head.w1[problem.batch.anchors[5]] = torch.nan
    got = check(problem, sampler_of(problem, engine))
    assert got.nonfinite[:, 0].tolist() == [True, False, False, True, False, True]
    assert got.tokens[3:5, 0].tolist() == [9, 4098]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_request_alone_and_in_any_batch(engine: str, dtype: torch.dtype) -> None:
    """Bitwise, with weights whose sums depend on their order."""
    options: dict[str, Any] = {"temperature": "mixed", "dtype": dtype, "device": "cuda"}
    problem = make_problem(64, 5, 10001, 256, **options)
    whole, batch = problem.new_cache(), problem.batch
    sampler = sampler_of(problem, engine)
    tokens = sampler.sample(batch, whole).tokens
    for some in ([17], [63, 2], list(range(40, 7, -3)), list(range(33))):
        rows = torch.tensor(some, device="cuda")
        part = replace(
            batch,
            base_logits=batch.base_logits[rows],
            anchors=batch.anchors[rows],
            positions=batch.positions[rows],
            slots=rows,
        )
        cache = problem.new_cache()
        assert_same(sampler.sample(part, cache).tokens, tokens[rows], "tokens")
        assert_same(cache[rows], whole[rows], "cache")


def kernels() -> list[Any]:
    from fused_markov.kernels import one_pass, per_step

    modules = (vars(one_pass), vars(per_step))
    return [k for module in modules for name, k in module.items() if name.endswith("_kernel")]


def variants() -> int:
    """Compiled kernels that are loaded on this device."""
    device = torch.cuda.current_device()
    return sum(len(kernel.device_caches[device][0]) for kernel in kernels())


@pytest.mark.parametrize("engine", ENGINES)
def test_few_variants_for_all_rows(engine: str) -> None:
    problem = make_problem(64, 5, 3008, 128, temperature="mixed", device="cuda")
    batch, cache, tokens = problem.batch, problem.new_cache(), problem.new_tokens()
    sampler = sampler_of(problem, engine)
    before = variants()
    sampler.warmup(batch, cache, tokens)
    warm = variants()
    assert 0 < warm - before <= MAX_VARIANTS
    for rows in range(1, 65):
        sampler.sample(first_rows(batch, rows), cache, tokens[:rows])
    assert variants() == warm


def first_rows(batch: fm.DraftBatch, rows: int) -> fm.DraftBatch:
    return replace(
        batch,
        base_logits=batch.base_logits[:rows],
        anchors=batch.anchors[:rows],
        positions=batch.positions[:rows],
        slots=None if batch.slots is None else batch.slots[:rows],
    )


def test_launches_of_different_sizes() -> None:
    """The grid barrier counts programs, and configurations have different numbers of them."""
    small = replace(ONE_PASS[0], block_v=32, stages=2, check_registers=128)
    configs = (
        replace(small, max_row_steps=5, programs_per_sm=2),
        replace(small, max_row_steps=1 << 30, programs_per_sm=3),
    )
    problem = exact(7, 5, 2000, 64)
    engine = OnePassEngine(problem.head, Plan(7, 5, torch.float32), configs)
    for rows in (1, 7, 1, 7, 7, 1):
        batch = first_rows(problem.batch, rows)
        want_cache, cache = problem.new_cache(), problem.new_cache()
        want = reference.sample(problem.head, batch, want_cache)
        got = engine.sample(batch, cache, None)
        assert_same(got.tokens, want.tokens, "tokens")
        assert_same(cache, want_cache, "cache")


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("temperature", ["mixed", "greedy"])
@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_allocated_compiled_or_waited_for(
    engine: str, temperature: str, cached: bool
) -> None:
    problem = make_problem(33, 5, 4096, 64, temperature=temperature, device="cuda")
    batch, tokens = problem.batch, problem.new_tokens()
    cache = problem.new_cache() if cached else None
    sampler = sampler_of(problem, engine, max_rows=64)
    sampler.warmup()
    batches = [(first_rows(batch, rows), tokens[:rows]) for rows in (1, 2, 16, 33)]
    torch.cuda.synchronize()
    compiled = variants()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for some, out in batches:
            sampler.sample(some, cache, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    assert variants() == compiled


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("temperature", ["mixed", "greedy"])
def test_graph_replay_with_new_contents(engine: str, temperature: str) -> None:
    """Captured while all rows are padding, replayed for live rows."""
    problem = exact(5, 4, 3000, 64, temperature=temperature)
    live = replace(problem.batch, slots=torch.tensor([3, -1, 0, 4, 1], device="cuda"))
    held = replace(
        live,
        base_logits=torch.zeros_like(live.base_logits),
        anchors=torch.zeros_like(live.anchors),
        positions=torch.zeros_like(live.positions),
        slots=torch.full((5,), -1, device="cuda"),
    )
    cache, tokens = problem.new_cache(), problem.new_tokens()
    sampler = sampler_of(problem, engine)
    sampler.warmup(held, cache, tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = sampler.sample(held, cache, tokens)
    graph.replay()
    assert_same(cache, problem.new_cache(), "cache of padding")
    assert_same(tokens, torch.zeros_like(tokens), "tokens of padding")
    want_cache = problem.new_cache()
    want = reference.sample(problem.head, live, want_cache)
    for name in ("base_logits", "anchors", "positions", "slots"):
        getattr(held, name).copy_(getattr(live, name))
    for _ in range(3):  # the scratch is left as a replay needs it
        cache.fill_(12345.0)
        tokens.fill_(-7)
        graph.replay()
        assert_same(cache, want_cache, "cache")
        assert_same(tokens, want.tokens, "tokens")
        assert_same(result.nonfinite, want.nonfinite, "nonfinite")
        assert 1 <= result.passes <= 4


@pytest.mark.parametrize("engine", ENGINES)
def test_samplers_at_the_same_time(engine: str) -> None:
    """Two on two streams, in graphs: scratch that they shared would show."""
    problems = [exact(24, 5, 30000, 128, temperature="mixed", seed=seed) for seed in range(2)]
    wants = [reference.sample(p.head, p.batch).tokens for p in problems]
    tokens = [p.new_tokens() for p in problems]
    graphs, kept = [], []
    for problem, out in zip(problems, tokens, strict=True):
        sampler = sampler_of(problem, engine)
        sampler.warmup(problem.batch, None, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept.append((sampler, sampler.sample(problem.batch, None, out)))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for out in tokens:
            out.fill_(-7)
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for out, want in zip(tokens, wants, strict=True):
            assert_same(out, want, "tokens")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cached", [False, True])
def test_offsets_past_2_to_the_31(engine: str, cached: bool) -> None:
    rows, steps, vocab = 964, 16, 151936
    need = (2 if cached else 1) * rows * steps * vocab * 2 + (2 << 30)
    if torch.cuda.mem_get_info()[0] < need:
        pytest.skip(f"needs {need >> 30} GiB of free GPU memory")
    assert rows * steps * vocab > 2**31
    weights = torch.zeros(vocab, 16, dtype=torch.bfloat16, device="cuda")
    base = torch.zeros(rows, steps, vocab, dtype=torch.bfloat16, device="cuda")
    base[-1, -1, 151000] = base[-1, 0, 77] = base[0, 0, 5] = 1.0
    anchors = torch.zeros(rows, dtype=torch.int64, device="cuda")
    batch = fm.DraftBatch(base, anchors, anchors.unsqueeze(1).expand(rows, steps))
    cache = torch.full_like(base, 12345.0) if cached else None
    sampler = fm.DraftSampler(
        fm.MarkovHead(weights, weights), max_rows=rows, steps=steps, engine=engine
    )
    tokens = sampler.sample(batch, cache).tokens
    want = torch.zeros_like(tokens)
    want[-1, -1], want[-1, 0], want[0, 0] = 151000, 77, 5
    assert_same(tokens, want, "tokens")
    if cache is not None:
        assert torch.equal(cache, base)


def test_the_fused_choice_is_an_engine_for_gpus() -> None:
    problem = make_problem(1, 2, 100, 16, device="cuda")
    sampler = fm.DraftSampler(problem.head, max_rows=1, steps=2)
    assert sampler.engine in ENGINES, sampler.explain()
