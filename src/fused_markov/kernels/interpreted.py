"""What Triton's interpreter lacks, in numpy."""

from typing import Any

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)


def numpy_log1p(x: Any) -> Any:
    """libdevice's log1p, of an interpreted tensor."""
    import numpy as np  # the interpreter needs it, GPUs do not
    from triton.runtime.interpreter import TensorHandle

    handle = x.handle
    return tl.tensor(TensorHandle(np.log1p(handle.data), handle.dtype), x.type)
