"""Asking L2 for rows of W1 and W2 that come next: costs no register, waits for nothing."""

import triton
import triton.language as tl

from fused_markov.kernels.rows import target_id

LINE = tl.constexpr(128)  # bytes


@triton.jit
def _prefetch(matrix, row, WIDTH: tl.constexpr, cfg: tl.constexpr):
    """Rows [n] of ``matrix``, WIDTH elements each; nothing where there is no such instruction."""
    if cfg.PTX:
        ELEMENTS: tl.constexpr = LINE * 8 // matrix.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = triton.next_power_of_2((WIDTH + ELEMENTS - 1) // ELEMENTS)
        first = tl.minimum(tl.arange(0, LINES) * ELEMENTS, WIDTH - 1)
        at = matrix + row.to(tl.int64)[:, None] * WIDTH + first[None, :]
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r,l", [at.to(tl.int64)], tl.int32, False, 1)


@triton.jit
def prefetch_candidates(io, v, cfg: tl.constexpr):
    """What links and chains read of candidates ``v`` [n]: W2's rows; of few rows' also what a next
    step reads after them, W1's and the successors.
    """
    _prefetch(io.w2, v, cfg.RANK // 2 if cfg.FORMAT == "nvfp4" else cfg.RANK, cfg)
    if cfg.PREDECESSORS > 0 and cfg.VARIANT == 0:
        token = target_id(io, v, v >= 0, cfg)
        _prefetch(io.w1, token, cfg.RANK, cfg)
        if cfg.SUCCESSORS > 0:
            _prefetch(io.successors, token, cfg.SUCCESSORS, cfg)
