"""Heads out of every published checkpoint layout, and out of damaged ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import save_file

import fused_markov as fm
from fused_markov import checkpoint_files
from fused_markov.checkpoint import load_confidence_head, load_markov_head
from fused_markov.quantize import quantize

V, R, HIDDEN = 40, 8, 16
W1, W2 = torch.randn(V, R).bfloat16(), torch.randn(V, R).bfloat16()
BACKBONE = torch.zeros(512, 512)
NAMES = {
    "deepspec": ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
    "prefixed": ("model.markov_head.markov_w1.weight", "model.markov_head.markov_w2.weight"),
    "deepseek_v4": ("mtp.2.markov_head.markov_w1.weight", "mtp.2.markov_head.markov_w2.weight"),
    "deepseek_v41": ("mtp.2.markov_head.embed.weight", "mtp.2.markov_head.head.weight"),
}


def write(path: Path, tensors: dict[str, torch.Tensor], config: dict | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def write_shards(path: Path, shards: dict[str, dict[str, torch.Tensor]]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for file, tensors in shards.items():
        save_file(tensors, path / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors whose data was read."""
    names: list[str] = []

    class Spy:
        def __init__(self, file, framework):
            self._f = safetensors_open(file, framework=framework)

        def get_tensor(self, name):
            names.append(name)
            return self._f.get_tensor(name)

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            return None

        def __getattr__(self, attribute):
            return getattr(self._f, attribute)

    safetensors_open = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", Spy)
    return names


@pytest.mark.parametrize("layout", NAMES)
def test_layouts(tmp_path: Path, reads: list[str], layout: str) -> None:
    w1, w2 = NAMES[layout]
    tensors = {w1: W1, w2: W2, "layers.0.mlp.w1.weight": BACKBONE}
    path = write(tmp_path, tensors, {"vocab_size": V, "markov_rank": R})
    for given in (path, path / "model.safetensors"):
        reads.clear()
        head = load_markov_head(given)
        assert torch.equal(head.w1, W1)
        assert torch.equal(head.w2, W2)
        assert (head.vocab_size, head.draft_vocab, head.scale) == (V, V, 1.0)
        assert sorted(reads) == sorted(NAMES[layout])  # never the backbone


def test_sharded_opens_only_the_shards_of_the_head(tmp_path: Path, reads: list[str]) -> None:
    w1, w2 = NAMES["deepseek_v41"]
    path = write_shards(
        tmp_path,
        {"a.safetensors": {w1: W1}, "b.safetensors": {w2: W2}, "c.safetensors": {"x": BACKBONE}},
    )
    (path / "c.safetensors").unlink()  # the backbone need not even be there
    assert torch.equal(load_markov_head(path).w2, W2)
    assert sorted(reads) == [w1, w2]


def test_several_files_without_an_index(tmp_path: Path) -> None:
    w1, w2 = NAMES["deepspec"]
    save_file({w1: W1}, tmp_path / "one.safetensors")
    save_file({w2: W2}, tmp_path / "two.safetensors")
    assert torch.equal(load_markov_head(tmp_path).w1, W1)


def test_the_last_stage_wins(tmp_path: Path) -> None:
    tensors = {f"mtp.{n}.markov_head.embed.weight": W1 + n for n in (2, 10)}
    tensors |= {f"mtp.{n}.markov_head.head.weight": W2 + n for n in (2, 10)}
    assert torch.equal(load_markov_head(write(tmp_path, tensors)).w1, W1 + 10)


def test_speculators_reduced_vocabulary(tmp_path: Path) -> None:
    ids = torch.arange(0, V, 2)
    tensors = {
        NAMES["deepspec"][0]: W1,
        NAMES["deepspec"][1]: W2[: len(ids)].clone(),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(V, dtype=torch.bool),
    }
    config = {
        "speculators_model_type": "dspark",
        "draft_vocab_size": len(ids),
        "markov_rank": R,
        "transformer_layer_config": {"vocab_size": V, "hidden_size": HIDDEN, "logit_scale": 0.5},
    }
    head = load_markov_head(write(tmp_path, tensors, config))
    assert head.id_map is not None
    assert torch.equal(head.id_map, ids)
    assert (head.vocab_size, head.draft_vocab, head.scale) == (V, len(ids), 0.5)
    del tensors["d2t"]
    with pytest.raises(fm.CheckpointError, match="'d2t'"):
        load_markov_head(write(tmp_path / "no_map", tensors, config))
    tensors["d2t"] = ids  # target ids where offsets belong
    with pytest.raises(fm.CheckpointError, match=r"'d2t'.*target ids in \[0, 40\)"):
        load_markov_head(write(tmp_path / "not_offsets", tensors, config))
    tensors["d2t"] = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(fm.CheckpointError, match=r"'d2t'.*shape \[20\].*\[3\]"):
        load_markov_head(write(tmp_path / "short_map", tensors, config))


def test_padded_rows_dtype_and_gemma_cap(tmp_path: Path) -> None:
    w1, w2 = NAMES["deepspec"]
    config = {"vocab_size": V - 3, "final_logit_softcapping": 30.0}
    path = write(tmp_path / "qwen", {w1: W1, w2: W2}, config)
    head = load_markov_head(path, dtype=torch.float32, device="cpu")
    assert (head.vocab_size, head.draft_vocab, head.dtype) == (V - 3, V - 3, torch.float32)
    assert head.soft_cap is None
    config |= {"architectures": ["Gemma4DSparkForCausalLM"]}
    assert load_markov_head(write(tmp_path / "g", {w1: W1, w2: W2}, config)).soft_cap == 30.0


@pytest.mark.parametrize("field", ["weight_scale", "weight_scale_inv", "scale"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_codes_with_row_scales(tmp_path: Path, field: str, dtype: torch.dtype) -> None:
    """They stay as stored; ``dtype`` is of the others."""
    w1, w2 = NAMES["deepspec"]
    scales = torch.rand(V, 1) + 0.5
    codes = W2.to(dtype)
    write(tmp_path, {w1: W1, w2: codes, w2.replace("weight", field): scales})
    head = load_markov_head(tmp_path, dtype=torch.float32)
    assert head.w2.dtype == dtype
    assert head.dtype == torch.float32
    assert torch.equal(head.weights.dequantized(slice(0, V)), codes.float() * scales)


def test_fp8_with_one_scale_and_an_input_scale(tmp_path: Path) -> None:
    """ModelOpt's fp8; activations are not quantized here."""
    w1, w2 = NAMES["deepspec"]
    tensors = {w1: W1, w2: W2.to(torch.float8_e4m3fn), "other.input_scale": torch.ones(())}
    tensors |= {w2.replace("weight", "weight_scale"): torch.tensor(0.25)}
    tensors |= {w2.replace("weight", "input_scale"): torch.tensor(3.0)}
    head = load_markov_head(write(tmp_path, tensors))
    want = W2.to(torch.float8_e4m3fn).float() / 4
    assert torch.equal(head.weights.dequantized(slice(0, V)), want)


@pytest.mark.parametrize("sizes", [None, [16, 32]], ids=["128 x 128", "as config.json says"])
def test_fp8_in_blocks(tmp_path: Path, sizes: list[int] | None) -> None:
    w1, w2 = NAMES["deepseek_v4"]
    rows, rank = (256, 256) if sizes is None else (40, 64)
    wide, block = torch.randn(rows, rank), sizes or [128, 128]
    scales = torch.rand(-(-rows // block[0]), -(-rank // block[1]))
    codes = wide.to(torch.float8_e4m3fn)
    tensors = {w1: wide.bfloat16(), w2: codes, w2.replace("weight", "weight_scale_inv"): scales}
    config = {} if sizes is None else {"quantization_config": {"weight_block_size": sizes}}
    head = load_markov_head(write(tmp_path, tensors, config))
    spread = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)
    assert head.weights.block == tuple(block)
    assert torch.equal(head.weights.dequantized(slice(0, rows)), codes.float() * spread)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_nvfp4(tmp_path: Path, layout: str) -> None:
    w1, w2 = NAMES["prefixed"]
    stored = quantize(torch.randn(V, 32), "nvfp4")
    assert stored.scale is not None
    assert stored.groups is not None
    tensors = {
        w1: torch.randn(V, 32).bfloat16(),
        w2.replace("weight", "weight_scale"): stored.groups,
    }
    if layout == "modelopt":
        tensors |= {w2: stored.data, w2.replace("weight", "weight_scale_2"): stored.scale[0, 0]}
    else:
        divisor = torch.tensor([1024.0])
        tensors |= {w2.replace("weight", "weight_packed"): stored.data}
        tensors |= {w2.replace("weight", "weight_global_scale"): divisor}
        stored = dataclasses.replace(stored, scale=torch.full((1, 1), 2.0**-10))
    head = load_markov_head(write(tmp_path, tensors, {"vocab_size": V, "markov_rank": 32}))
    assert head.weights.format == "nvfp4"
    rows = slice(0, V)
    assert torch.equal(head.weights.dequantized(rows), stored.dequantized(rows))


def test_nvfp4_without_its_scale_on_top(tmp_path: Path) -> None:
    w1, w2 = NAMES["deepspec"]
    groups = torch.ones(V, 1).to(torch.float8_e4m3fn)
    tensors = {w1: torch.zeros(V, 16), w2: torch.zeros(V, 16, dtype=torch.uint8)}
    tensors |= {w2.replace("weight", "weight_scale"): groups}
    with pytest.raises(
        fm.CheckpointError, match=r"markov_w2\.weight.*uint8 without w2_global_scale"
    ):
        load_markov_head(write(tmp_path, tensors))


def test_confidence_head(tmp_path: Path) -> None:
    w1, w2 = NAMES["deepspec"]
    weight, bias = torch.randn(1, HIDDEN + R).bfloat16(), torch.randn(1)
    tensors = {
        w1: W1,
        w2: W2,
        "confidence_head.proj.weight": weight,
        "confidence_head.proj.bias": bias,
    }
    config = {"hidden_size": HIDDEN, "confidence_head_with_markov": True}
    head = load_confidence_head(write(tmp_path / "both", tensors, config))
    assert head is not None
    assert head.with_markov
    hidden, embed = torch.randn(3, HIDDEN), torch.randn(3, R)
    x = torch.cat([hidden, embed], -1)
    expected = torch.sigmoid(x @ weight[0].float() + bias)
    torch.testing.assert_close(head.probability(hidden, embed), expected)
    assert load_confidence_head(write(tmp_path / "none", {w1: W1, w2: W2})) is None
    off = config | {"enable_confidence_head": False}
    assert load_confidence_head(write(tmp_path / "off", tensors, off)) is None
    config["confidence_head_with_markov"] = False
    with pytest.raises(fm.CheckpointError, match=r"confidence_head\.proj\.weight.*16"):
        load_confidence_head(write(tmp_path / "wide", tensors, config))


def test_confidence_head_of_deepseek_v4_reads_the_markov_embedding(tmp_path: Path) -> None:
    w1, w2 = NAMES["deepseek_v4"]
    tensors = {w1: W1, w2: W2, "mtp.2.confidence_head.proj.weight": torch.randn(1, HIDDEN + R)}
    head = load_confidence_head(write(tmp_path, tensors, {"hidden_size": HIDDEN}))
    assert head is not None
    assert head.with_markov
    assert head.bias == 0


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated(tmp_path: Path, keep: int) -> None:
    w1, w2 = NAMES["deepspec"]
    file = write(tmp_path, {w1: W1, w2: W2}) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    with pytest.raises(fm.CheckpointError, match=r"model\.safetensors: damaged or truncated"):
        load_markov_head(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(fm.CheckpointError, match="no such file"):
        load_markov_head(tmp_path / "nowhere")
    with pytest.raises(fm.CheckpointError, match="found none"):
        load_markov_head(tmp_path)
    w1, w2 = NAMES["deepspec"]
    path = write_shards(tmp_path / "s", {"a.safetensors": {w1: W1}, "b.safetensors": {w2: W2}})
    (path / "b.safetensors").unlink()
    with pytest.raises(fm.CheckpointError, match=r"b\.safetensors: no such file"):
        load_markov_head(path)


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"x": W1}, {}, r"no Markov head.*found 1 tensors"),
        ({"markov_head.markov_w1.weight": W1}, {}, r"no w2.*markov_w1\.weight"),
        ({"markov_head.markov_w2.weight": W2}, {}, r"no w1.*markov_w2\.weight"),
        ({"w1": W1[:, :4], "w2": W2}, {}, r"markov_w2\.weight'.*rank 4.*\[40, 8\]"),
        ({"w1": W1[0], "w2": W2}, {}, r"markov_w1\.weight'.*shape \[rows, rank\].*\[8\]"),
        ({"w1": W1, "w2": W2}, {"markov_rank": 9}, r"markov_w1\.weight'.*rank 9.*\[40, 8\]"),
        ({"w1": W1, "w2": W2}, {"vocab_size": 50}, r"markov_w1\.weight'.*50 rows.*\[40, 8\]"),
        ({"w1": W1, "w2": W2}, {"draft_vocab_size": 50}, r"markov_w2\.weight'.*50 rows"),
        ({"w1": W1, "w2": W2.float()}, {}, r"markov_w2\.weight'.*bfloat16.*float32"),
        ({"w1": W1, "w2": W2.to(torch.int8)}, {}, r"markov_w2\.weight'.*fp32, bf16 or fp16"),
        ({"w1": W1, "w2": W2}, {"vocab_size": "x"}, r"config\.json: vocab_size.*'x'"),
        ({"w1": W1, "w2": W2}, {"logit_scale": "x"}, r"config\.json: logit_scale.*'x'"),
    ],
)
def test_wrong_contents(tmp_path: Path, tensors: dict, config: dict, message: str) -> None:
    full = {f"markov_head.markov_{k}.weight" if k in ("w1", "w2") else k: t.contiguous()
            for k, t in tensors.items()}  # fmt: skip
    with pytest.raises(fm.CheckpointError, match=message):
        load_markov_head(write(tmp_path, full, config))


def test_damaged_json(tmp_path: Path) -> None:
    w1, w2 = NAMES["deepspec"]
    path = write(tmp_path, {w1: W1, w2: W2})
    (path / "config.json").write_text("{")
    with pytest.raises(fm.CheckpointError, match=r"config\.json: not readable"):
        load_markov_head(path)
    (path / "config.json").write_text("[]")
    with pytest.raises(fm.CheckpointError, match=r"config\.json: expected a JSON object"):
        load_markov_head(path)
    (path / "config.json").unlink()
    (path / checkpoint_files.INDEX).write_text('{"weight_map": 3}')
    with pytest.raises(fm.CheckpointError, match="weight_map"):
        load_markov_head(path)
    index = {"weight_map": {w1: "model.safetensors", w2: "model.safetensors", "a": "x"}}
    (path / checkpoint_files.INDEX).write_text(json.dumps(index))
    assert load_markov_head(path).rank == R
    save_file({w1: W1}, path / "model.safetensors")
    with pytest.raises(fm.CheckpointError, match=r"markov_w2\.weight' is missing"):
        load_markov_head(path)


def test_a_bare_file_needs_no_config(tmp_path: Path) -> None:
    w1, w2 = NAMES["deepspec"]
    save_file({w1: W1, w2: W2}, tmp_path / "head.safetensors")
    assert load_markov_head(str(tmp_path / "head.safetensors")).vocab_size == V
