"""Every engine against the reference: tokens, cache bits and flags.

One file for all engines: a new one in `engine_types` is tested by being there. Those for a GPU are
skipped without one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_markov import ArgumentError, DraftBatch, DraftSampler, MarkovHead, reference
from fused_markov.engines import Plan, engine_types
from fused_markov.problems import Problem, make_problem

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = {"cpu": "cpu", "reference": "cpu"}  # the others run on a GPU
BITS = {2: torch.int16, 4: torch.int32}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def device_of(engine: str) -> str:
    return "cpu" if INTERPRETING else DEVICES.get(engine, "cuda")


def usable(engine: str) -> bool:
    head = make_problem(1, 1, 64, 16, dtype=torch.float32, device=device_of(engine)).head
    return engine_types()[engine].why_not(head, Plan(1, 1, torch.float32)) is None


def as_parameters(engines: Sequence[str]) -> list[Any]:
    """What a test is run with: in the interpreter's process the kernels' engines, else all.

    What a GPU would run is collected everywhere, so that its tests have the same names everywhere.
    """
    if INTERPRETING:
        return [name for name in engines if name not in DEVICES]
    parameters: list[Any] = [name for name in engines if name in DEVICES]
    for name in engines:
        on_gpu = name not in DEVICES
        if on_gpu and (not torch.cuda.is_available() or usable(name)):
            parameters.append(pytest.param(name, marks=pytest.mark.gpu))
    return parameters


ENGINES = as_parameters([name for name in engine_types() if name != "reference"])
every_engine = pytest.mark.parametrize("engine", ENGINES)


def problem_on(engine: str, *shape: int, **options: Any) -> Problem:
    """A problem on the engine's device, of the same bits as the reference's there.

    Elsewhere than on the CPU that is not said of a sum in any order, nor of a soft cap's tanh:
    gpu/test_gpu.py compares those to their last places.
    """
    if engine not in DEVICES:
        options = {**options, "exact_sums": True, "soft_cap": None}
    return make_problem(*shape, device=device_of(engine), **options)


def assert_same_bits(got: Tensor, expected: Tensor, name: str) -> None:
    """Equal to the bit, -0.0 included, though any NaN is equal to any other."""
    if got.is_floating_point():
        bits = BITS[got.element_size()]
        unequal = got.view(bits) != expected.view(bits)
        differ = (unequal & ~(got.isnan() & expected.isnan())).nonzero()
    else:
        differ = (got != expected).nonzero()
    if differ.shape[0]:
        at = tuple(differ[0].tolist())
        raise AssertionError(
            f"{name}: {differ.shape[0]} places differ, the first at {at}: "
            f"got {got[at].item()!r}, expected {expected[at].item()!r}"
        )


def check(
    engine: str,
    problem: Problem,
    *,
    noise_dtype: torch.dtype = torch.float32,
    with_cache: bool = True,
    fill: float = 12345.0,
) -> int:
    """Engine and reference give the same of everything; the engine's passes."""
    caches = [problem.new_cache(fill) if with_cache else None for _ in range(2)]
    expected = reference.sample(
        problem.head, problem.batch, caches[0], problem.new_tokens(), noise_dtype=noise_dtype
    )
    sampler = DraftSampler(
        problem.head,
        max_rows=problem.batch.rows,
        steps=problem.batch.steps,
        engine=engine,
        noise_dtype=noise_dtype,
    )
    tokens = problem.new_tokens(torch.int32)
    got = sampler.sample(problem.batch, caches[1], tokens)
    assert got.engine == engine
    assert got.tokens is tokens
    assert_same_bits(got.tokens.long(), expected.tokens, "tokens")
    assert_same_bits(got.nonfinite, expected.nonfinite, "nonfinite")
    if caches[0] is not None and caches[1] is not None:
        assert_same_bits(caches[1], caches[0], "logits_cache")
    assert 0 <= got.passes <= problem.batch.steps
    return got.passes


SHAPES = [(1, 1, 1, 1), (2, 3, 7, 3), (5, 4, 64, 16), (9, 7, 1000, 256), (3, 5, 8193, 64)]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced": {"draft_vocab": 3, "slots": "shuffled", "strides": "wide"},
    "reduced-narrow": {"draft_vocab": 3, "cache": "draft", "slots": "padded"},
    "wide": {"cache": "wide", "slots": "padded-steps", "strides": "step-major"},
    "transformed": {"scale": 0.5, "soft_cap": 3.0, "slots": "padded"},
    "base-fp32": {"base_dtype": torch.float32, "cache_dtype": torch.bfloat16},
    "cache-fp32": {"cache_dtype": torch.float32, "strides": "wide"},
    "no-bias": {"bias_std": 0.0},
    "ties": {"bias_std": 0.0, "base_std": 0.0},
    "hard": {"bias_std": 10.0},
    "nothing-live": {"slots": "none-live"},
}


@every_engine
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_reference(
    engine: str, shape: tuple[int, int, int, int], dtype: torch.dtype, variant: str
) -> None:
    kwargs = dict(VARIANTS[variant])
    if "draft_vocab" in kwargs:
        kwargs["draft_vocab"] = max(1, shape[2] // kwargs["draft_vocab"])
    for temperature in ("greedy", "mixed"):
        problem = problem_on(engine, *shape, dtype=dtype, temperature=temperature, **kwargs)
        check(engine, problem)


@every_engine
@pytest.mark.parametrize("temperature", [0.0, 0.05, 1.0, 3.0, "mixed"])
def test_fp64_noise(engine: str, temperature: float | str) -> None:
    problem = problem_on(engine, 4, 5, 3000, 32, temperature=temperature)
    check(engine, problem, noise_dtype=torch.float64)


@every_engine
@pytest.mark.parametrize("temperature", ["greedy", 1e-30, 1e-4, 100.0, "mixed"])
def test_without_cache(engine: str, temperature: float | str) -> None:
    problem = problem_on(engine, 4, 5, 3000, 32, temperature=temperature)
    check(engine, problem, with_cache=False)


@every_engine
@pytest.mark.parametrize("temperature", ["greedy", "mixed"])
def test_several_blocks_of_vocabulary(engine: str, temperature: str) -> None:
    """More candidates than one product has, and more pairs than are computed together."""
    check(engine, problem_on(engine, 15, 5, 33000, 16, temperature=temperature))
    options = {"temperature": temperature, "slots": "padded-steps"}
    padded = problem_on(engine, 15, 5, 33000, 16, **options)
    check(engine, padded, fill=float("nan"))


@every_engine
def test_id_map_in_any_order(engine: str) -> None:
    """Ties go to the lowest target id, which need not be the first candidate."""
    device = device_of(engine)
    for base_std in (0.0, 2.0):
        for temperature in ("greedy", "mixed"):
            kwargs: dict[str, Any] = {"temperature": temperature, "bias_std": 0.0}
            p = problem_on(engine, 4, 5, 900, 8, base_std=base_std, **kwargs)
            order = torch.randperm(900, generator=torch.Generator().manual_seed(1))[:400]
            head = MarkovHead(p.head.w1, p.head.w2, id_map=order.to(device))
            check(engine, replace(p, head=head))


@every_engine
def test_padded_weights(engine: str) -> None:
    """`vocab_size` below the weights' rows: ids past it are never drafted."""
    p = problem_on(engine, 3, 4, 64, 8, temperature="mixed")
    p.batch.base_logits[:, :, 62] = 1e4
    head = MarkovHead(p.head.w1, p.head.w2, vocab_size=60)
    batch = replace(p.batch, anchors=p.batch.anchors.clamp_max(59))
    check(engine, replace(p, head=head, batch=batch))


POISONS: dict[str, Callable[[Tensor], object]] = {
    "a NaN": lambda x: x[:, :, 5].fill_(torch.nan),
    "all NaN": lambda x: x.fill_(torch.nan),
    "all -inf": lambda x: x.fill_(-torch.inf),
    "one finite": lambda x: x.fill_(-torch.inf)[:, :, 700].fill_(-3.0),
    "one of the last finite": lambda x: x.fill_(-torch.inf)[:, :, -10].fill_(-3.0),
    "inf twice": lambda x: x[:, :, [300, 200]].fill_(1).add_(torch.inf),
    "one +inf": lambda x: x[:, 1:3, 500].fill_(torch.inf),
    "NaN and -inf": lambda x: x.fill_(-torch.inf)[:, :, 300].fill_(torch.nan),
    "a NaN row": lambda x: x[1].fill_(torch.nan),
    "huge": lambda x: x.mul_(1e36),
}


@every_engine
@pytest.mark.parametrize("poison", POISONS)
def test_nonfinite_base(engine: str, poison: str) -> None:
    # Whole tiles and runs of the vocabulary, and a last one that is mostly padding.
    for temperature, vocab in (("greedy", 1000), ("mixed", 1000), ("greedy", 3000)):
        p = problem_on(engine, 4, 5, vocab, 16, temperature=temperature)
        POISONS[poison](p.batch.base_logits)
        check(engine, p)


@every_engine
@pytest.mark.parametrize("temperature", ["greedy", 1.0])
@pytest.mark.parametrize("finite", [0, 1, 100])
def test_little_above_minus_infinity(engine: str, finite: int, temperature: str | float) -> None:
    """Fewer finite logits than an engine keeps candidates, and a vocabulary of odd size."""
    for vocab in (257, 1000, 3000):
        p = problem_on(engine, 2, 3, vocab, 16, temperature=temperature)
        logits = p.batch.base_logits
        keep = torch.arange(vocab - 1, -1, -vocab // max(1, finite))[:finite]
        kept = logits[:, :, keep].clone()
        logits.fill_(-torch.inf)[:, :, keep] = kept
        check(engine, p)


@every_engine
def test_nonfinite_weights(engine: str) -> None:
    p = problem_on(engine, 4, 5, 1000, 16, temperature="mixed")
    p.head.w2[17] = torch.nan
    p.head.w2[400:405] = torch.inf
    p.head.w1[p.batch.anchors[0]] = torch.nan
    check(engine, p)


@every_engine
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", ["greedy", "mixed"])
def test_rows_do_not_depend_on_company(engine: str, temperature: str, dtype: torch.dtype) -> None:
    """One request alone and among others: the same tokens, the same cache bits."""
    p = make_problem(
        70, 3, 1500, 64, temperature=temperature, dtype=dtype, device=device_of(engine)
    )
    sampler = DraftSampler(p.head, max_rows=70, steps=3, engine=engine)
    cache = p.new_cache()
    together = sampler.sample(p.batch, cache)
    b = p.batch
    for rows in ([0], [69], [3, 40], list(range(5, 22))):
        slots = torch.tensor(rows, device=p.head.device)
        some = DraftBatch(
            b.base_logits[rows],
            b.anchors[rows],
            b.positions[rows],
            b.temperature,
            b.seeds,
            slots,
        )
        own = p.new_cache()
        alone = sampler.sample(some, own)
        assert_same_bits(alone.tokens, together.tokens[rows], f"tokens of {rows}")
        assert_same_bits(own[slots], cache[slots], f"cache of {rows}")
        others = [r for r in range(70) if r not in rows]
        assert bool((own[others] == p.new_cache()[others]).all())


@every_engine
def test_padding_is_left_alone(engine: str) -> None:
    """Cases 3, 4, 5, 9: slots -1 write nothing, and their tokens are 0."""
    p = problem_on(engine, 8, 4, 500, 16, temperature="mixed")
    slots = torch.full((8, 4), -1)
    slots[0], slots[1, :2] = 2, 0
    anchors = p.batch.anchors.clone()
    anchors[2:] = -1
    batch = replace(p.batch, slots=slots.to(p.head.device), anchors=anchors)
    batch.base_logits[2:] = torch.nan
    problem = replace(p, batch=batch)
    check(engine, problem)
    cache = problem.new_cache()
    sampler = DraftSampler(p.head, steps=4, engine=engine)
    result = sampler.sample(batch, cache, problem.new_tokens())
    assert bool((cache[[1, 3, 4, 5, 6, 7]] == 12345.0).all())
    assert bool((cache[0, 2:] == 12345.0).all())
    assert bool((result.tokens[2:] == 0).all())
    assert bool((result.tokens[1, 2:] == 0).all())


@every_engine
@pytest.mark.parametrize("temperature", ["greedy", 1.0])
def test_passes(engine: str, temperature: float | str) -> None:
    """One pass where the base decides, several where the head overrules it, never more than S."""
    kwargs: dict[str, Any] = {"temperature": temperature}
    easy = [check(engine, problem_on(engine, 2, 5, 5000, 32, seed=s, **kwargs)) for s in range(10)]
    kwargs["bias_std"] = 12.0
    hard = [check(engine, problem_on(engine, 2, 5, 5000, 32, seed=s, **kwargs)) for s in range(4)]
    if engine == "per_step":
        assert {*easy, *hard} == {5}  # it reads W2 at every step, whatever is drafted
        return
    assert sum(easy) <= 12
    assert max(hard) > 1


@every_engine
def test_same_inputs_same_bits(engine: str) -> None:
    """Case 37: no global generator has a say, and the inputs are not written to."""
    p = problem_on(engine, 3, 4, 2000, 32, temperature=1.0)
    before = p.batch.base_logits.clone()
    sampler = DraftSampler(p.head, steps=4, engine=engine)
    first = sampler.sample(p.batch).tokens.clone()
    torch.manual_seed(99)
    torch.rand(1000)
    assert torch.equal(sampler.sample(p.batch).tokens, first)
    assert_same_bits(p.batch.base_logits, before, "base_logits")


@every_engine
def test_weights_and_logits_that_require_grad(engine: str) -> None:
    p = problem_on(engine, 2, 3, 200, 8, temperature="mixed")
    w1, w2 = p.head.w1.clone().requires_grad_(), p.head.w2.clone().requires_grad_()
    batch = replace(p.batch, base_logits=p.batch.base_logits.clone().requires_grad_())
    expected = DraftSampler(p.head, steps=3, engine=engine).sample(p.batch)
    cache = p.new_cache()
    got = DraftSampler(MarkovHead(w1, w2), steps=3, engine=engine).sample(batch, cache)
    assert torch.equal(got.tokens, expected.tokens)
    assert not cache.requires_grad


@every_engine
def test_errors_name_the_argument(engine: str) -> None:
    p = problem_on(engine, 2, 3, 64, 8)
    sampler = DraftSampler(p.head, max_rows=2, steps=3, engine=engine)
    device = p.head.device
    bad = {
        "positions": replace(p.batch, positions=p.batch.positions[:, :2]),
        "anchors": replace(p.batch, anchors=p.batch.anchors.float()),
        "base_logits": replace(p.batch, base_logits=p.batch.base_logits[..., ::2]),
        "slots": replace(p.batch, slots=torch.zeros(3, dtype=torch.int64, device=device)),
        "seeds": replace(p.batch, seeds=None),
    }
    for name, batch in bad.items():
        with pytest.raises(ArgumentError, match=name):
            sampler.sample(batch)
    with pytest.raises(ArgumentError, match="logits_cache"):
        sampler.sample(p.batch, p.new_cache()[..., :60])
    with pytest.raises(ArgumentError, match="tokens"):
        sampler.sample(p.batch, None, p.new_tokens()[:1])


@every_engine
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_small_problems(engine: str, data: st.DataObject) -> None:
    draw = data.draw
    vocab = draw(st.integers(1, 300), "vocab")
    reduced = draw(st.booleans(), "reduced")
    problem = problem_on(
        engine,
        draw(st.integers(1, 6), "rows"),
        draw(st.integers(1, 5), "steps"),
        vocab,
        draw(st.integers(1, 40), "rank"),
        dtype=draw(st.sampled_from(DTYPES), "dtype"),
        base_dtype=draw(st.sampled_from((None, *DTYPES)), "base_dtype"),
        cache_dtype=draw(st.sampled_from((None, *DTYPES)), "cache_dtype"),
        temperature=draw(st.sampled_from(["greedy", "mixed", 0.01, 1.0, 5.0]), "temperature"),
        draft_vocab=draw(st.integers(1, vocab), "draft_vocab") if reduced else None,
        cache=draw(st.sampled_from(["target", "draft", "wide"]), "cache"),
        slots=draw(st.sampled_from(["all", "shuffled", "padded", "padded-steps"]), "slots"),
        strides=draw(st.sampled_from(["contiguous", "wide", "step-major"]), "strides"),
        bias_std=draw(st.sampled_from([0.0, 0.3, 1.0, 20.0]), "bias_std"),
        base_std=draw(st.sampled_from([0.0, 0.1, 2.0]), "base_std"),
        scale=draw(st.sampled_from([1.0, 0.25]), "scale"),
        soft_cap=draw(st.sampled_from([None, 2.0]), "soft_cap"),
        seed=draw(st.integers(0, 2**16), "seed"),
    )
    noise_dtype = draw(st.sampled_from([torch.float32, torch.float64]), "noise_dtype")
    check(engine, problem, noise_dtype=noise_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "rank"), [(1, 256), (7, 3), (1000, 64), (20000, 512)])
def test_bias_rows_are_independent(dtype: torch.dtype, vocab: int, rank: int) -> None:
    """A bias row's bits, alone and in any company, where the sum's order shows.

    The products cancel in pairs, so that what is left is the rounding of the order itself.
    """
    gen = torch.Generator().manual_seed(0)
    pairs, rest = (rank - 1) // 2, rank - 2 * ((rank - 1) // 2)
    x, y = torch.randn(128, pairs, generator=gen), torch.randn(vocab, pairs, generator=gen)
    place = torch.randperm(rank, generator=gen)
    w1 = torch.cat([x, -x, torch.full((128, rest), 1e-4)], 1)[:, place].to(dtype)
    w2 = torch.cat([y, y, torch.full((vocab, rest), 1e-3)], 1)[:, place].to(dtype)
    padded = torch.zeros(max(vocab, 128), rank, dtype=dtype)
    padded[:128] = w1
    head = MarkovHead(padded, w2.contiguous(), id_map=torch.arange(vocab))
    full = head.bias(torch.arange(128))
    for rows in ([0], [127], [4, 9], [1, 2, 3], [7] * 5, list(range(40, 47)), list(range(64))):
        assert_same_bits(head.bias(torch.tensor(rows)), full[rows], f"bias rows {rows}")


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that torch's CPU allocator held at once beyond what it held before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    assert changes
    live = peak = 0
    for _, change in sorted(changes, key=lambda c: c[0]):
        live += change
        peak = max(peak, live)
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("temperature", ["greedy", 1.0, "mixed"])
def test_cpu_memory_is_below_the_cache(rows: int, temperature: float | str) -> None:
    """Scratch of a call and what the engine keeps, together, at DeepSeek's size."""
    p = make_problem(rows, 5, 129280, 256, temperature=temperature)
    cache = p.new_cache()
    DraftSampler(p.head, steps=5, engine="cpu").sample(p.batch, cache)

    def build_and_run() -> None:
        DraftSampler(p.head, steps=5, engine="cpu").sample(p.batch, cache)

    assert peak_bytes(build_and_run) < cache.nbytes
