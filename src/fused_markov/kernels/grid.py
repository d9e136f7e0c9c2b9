"""A barrier over the whole grid, for NVIDIA GPUs."""

import triton
import triton.language as tl


@triton.jit
def _load_acquire(pointer):
    asm: tl.constexpr = "ld.acquire.gpu.global.u64 $0, [$1];"
    return tl.inline_asm_elementwise(
        asm, "=l,l", [pointer.to(tl.int64, bitcast=True)], tl.int64, False, 1
    )


@triton.jit
def grid_barrier(arrivals):
    """Wait until every program of a cooperative launch has come here.

    ``arrivals`` is one int64 that only grows, from 0 at the launch: a program's ticket tells which
    round it is in. Release on arrival and acquire on leaving make plain stores visible.
    """
    tl.debug_barrier()
    size = tl.num_programs(0).to(tl.int64)
    ticket = tl.atomic_add(arrivals, tl.full([], 1, tl.int64), sem="acq_rel", scope="gpu")
    target = (ticket // size + 1) * size
    while _load_acquire(arrivals) < target:
        pass
    tl.debug_barrier()
