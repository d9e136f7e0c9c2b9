"""benchmarks/vllm_engine: the converted target, the drafter's folder, the verdict on a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "models" / "smollm2-135m-instruct-dspark"
sys.path.insert(0, str(ROOT / "benchmarks" / "vllm_engine"))

import convert  # noqa: E402
import run  # noqa: E402

COMPILED = ["fused_markov.kernels.check.check"]
IDS = torch.tensor([[1, 9690, 198, 2683, 359, 253]])


@pytest.mark.slow
@torch.inference_mode()
def test_converted_target_has_our_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from fused_markov.pair.target import Target, chat_prompt, load_tokenizer

    folder = convert.convert(None, tmp_path, "float32")
    assert convert.convert(None, tmp_path, "float32") == folder
    model = AutoModelForCausalLM.from_pretrained(folder)
    target = Target.load()
    torch.testing.assert_close(
        model(IDS).logits, target.logits(target(IDS).final), rtol=0, atol=1e-3
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = chat_prompt("How are you?")
    assert tokenizer.encode(text) == load_tokenizer().encode(text, add_special_tokens=False).ids


def test_vllm_finds_only_the_model_in_the_drafters_folder() -> None:
    """vLLM loads every safetensors file beside a config, unless an index names them."""
    from safetensors import safe_open

    index = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {"model.safetensors"}
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(index)


def test_drafters_config_sizes_fc_for_old_vllm() -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == config["target_layer_ids"]


def results() -> dict[str, dict[str, Any]]:
    part = {"answers": [[1, 2], [3]], "accepted_per_round": 2.0, "tokens_per_second": 10.0}
    plugin = {"engine": "one_pass", "steps": 3, "left": {}, "passes": 3}
    return {
        name: {
            "greedy, together": dict(part),
            "compiled_after_warm_up": [],
            "plugin": plugin if name == "on" else None,
        }
        for name in ("off", "on")
    }


def test_equal_engines_are_green() -> None:
    both = results()
    found = run.compare(both["off"], both["on"])
    assert found["greedy, together"]["equal_answers"] == 2
    assert run.wrong(both, found) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda on: on["greedy, together"].update(answers=[[1, 2], [4]]), "1 answers differ"),
        (lambda on: on.update(plugin=None), "did not draft every step"),
        (lambda on: on["plugin"]["left"].update(why=1), "did not draft every step"),
        (
            lambda on: on.update(compiled_after_warm_up=COMPILED),
            "compiled after warm-up",
        ),
    ],
)
def test_what_makes_a_run_red(change: Any, reason: str) -> None:
    both = results()
    change(both["on"])
    (problem,) = run.wrong(both, run.compare(both["off"], both["on"]))
    assert reason in problem
