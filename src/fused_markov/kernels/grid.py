"""A barrier over the whole grid, and prefetching into L2."""

import triton
import triton.language as tl


@triton.jit
def grid_barrier(arrivals):
    """Wait until every program of a cooperative launch has come here.

    ``arrivals`` is one int64 that only grows, so that it needs no reset: a program's ticket tells
    which round it is in. Release on arrival and acquire on leaving make plain stores visible.
    """
    tl.debug_barrier()
    size = tl.num_programs(0).to(tl.int64)
    ticket = tl.atomic_add(arrivals, tl.full([], 1, tl.int64), sem="acq_rel", scope="gpu")
    target = (ticket // size + 1) * size
    while tl.load(arrivals, volatile=True) < target:
        pass
    tl.atomic_add(arrivals, tl.full([], 0, tl.int64), sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def prefetch_l2(pointers):
    """Ask for the cache lines that ``pointers`` lie in; NVIDIA only."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
