"""The cases of `test_cases.py` that are small, with the kernels under Triton's interpreter.

The others are laws of thousands of draws, large vocabularies, many steps, or bf16, which the
interpreter computes wrongly; a GPU has them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_kernels import CONFIGS

from fused_markov.engines import chips
from test_cases import (  # noqa: F401
    test_case_03_padding_leaves_other_slots,
    test_case_04_padding_tokens_are_in_range,
    test_case_05_padding_anchor_out_of_range,
    test_case_07_padding_first_then_live,
    test_case_09_padding_by_step,
    test_case_10_error_names_both_shapes,
    test_case_12_base_wider_than_vocabulary,
    test_case_19_offsets_of_a_reduced_vocabulary,
    test_case_23_nan_base_row,
    test_case_23_nan_weights_row,
    test_case_40_masked_id,
    test_case_47_steps_do_not_mix,
)

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the samplers of the cases find for the interpreter."""
    tiles = {name: configs[:1] for name, configs in CONFIGS.items()}
    monkeypatch.setattr(chips, "INTERPRETER", replace(chips.INTERPRETER, **tiles))
