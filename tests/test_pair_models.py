"""The small real pair: the slim target against transformers, the drafter's cache and its blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fused_markov.errors import ArgumentError, CheckpointError
from fused_markov.pair import Drafter, DrafterConfig, KVCache, Target, TargetConfig, chat_prompt
from fused_markov.pair.gguf_file import GgufFile, find_gguf

CHECKPOINT = Path(__file__).parents[1] / "models" / "smollm2-135m-instruct-dspark"
TINY = TargetConfig(
    vocab_size=97, width=24, layers=3, heads=6, kv_heads=2, intermediate=40,
    max_positions=64, taps=(0, 1, 2),
)  # fmt: skip
TINY_DRAFT = DrafterConfig(
    vocab_size=97, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=6, intermediate_size=20, block_size=4, markov_rank=8,
    max_position_embeddings=64, target_layer_ids=(0, 1, 2),
)  # fmt: skip


@pytest.fixture
def target() -> Target:
    torch.manual_seed(3)
    model = Target(TINY)
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.3 if p.dim() > 1 else 1 + 0.1 * torch.randn_like(p)
    return model


@pytest.fixture
def drafter(target: Target) -> Drafter:
    torch.manual_seed(4)
    model = Drafter(TINY_DRAFT, target.embedding).requires_grad_(False)
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.3 if p.dim() > 1 else 1 + 0.1 * torch.randn_like(p)
    return model


def ids(rows: int, steps: int, seed: int = 0) -> Tensor:
    return torch.randint(17, 97, (rows, steps), generator=torch.Generator().manual_seed(seed))


def transformers_twin(target: Target) -> torch.nn.Module:
    """transformers' Llama with the same weights."""
    transformers = pytest.importorskip("transformers")
    c = target.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.width, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim,
        intermediate_size=c.intermediate, rms_norm_eps=c.norm_eps, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        max_position_embeddings=c.max_positions, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    state = {"model.embed_tokens.weight": target.embedding, "model.norm.weight": target.norm}
    for i, layer in enumerate(target.layers):
        sizes = [c.heads * c.head_dim, *[c.kv_heads * c.head_dim] * 2]
        q, k, v = layer.qkv.split(sizes)
        gate, up = layer.gate_up.chunk(2)
        for name, tensor in {
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": layer.out, "mlp.gate_proj": gate, "mlp.up_proj": up,
            "mlp.down_proj": layer.down, "input_layernorm": layer.attn_norm,
            "post_attention_layernorm": layer.mlp_norm,
        }.items():  # fmt: skip
            state[f"model.layers.{i}.{name}.weight"] = tensor
    state["lm_head.weight"] = target.embedding
    model.load_state_dict(state)
    return model


@torch.inference_mode()
def test_slim_target_equals_transformers(target: Target) -> None:
    theirs = transformers_twin(target)(ids(2, 11), output_hidden_states=True)
    ours = target(ids(2, 11))
    logits = target.logits(ours.final)
    assert (logits - theirs.logits).abs().max() < 1e-4
    # Their last entry is normed, so only the first taps compare directly.
    wide = TINY.width
    for tap in (0, 1):
        part = ours.hidden[..., tap * wide : (tap + 1) * wide]
        torch.testing.assert_close(part, theirs.hidden_states[tap + 1], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("steps", [(5, 1, 1, 4), (1, 10), (11,)])
def test_target_cache_equals_whole_sequence(target: Target, steps: tuple[int, ...]) -> None:
    tokens = ids(3, sum(steps))
    cache, at, parts = target.new_cache(3, 16), 0, []
    for n in steps:
        parts.append(target(tokens[:, at : at + n], cache).final)
        at += n
    torch.testing.assert_close(torch.cat(parts, 1), target(tokens).final, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_target_rows_of_different_lengths(target: Target) -> None:
    tokens, lengths = ids(3, 9), torch.tensor([9, 4, 6])
    cache = target.new_cache(3, 20)
    target(tokens, cache)
    cache.crop(lengths)
    more = ids(3, 5, seed=1)
    out = target(more, cache)
    assert cache.lengths.tolist() == [14, 9, 11]
    for row, n in enumerate(lengths.tolist()):
        whole = torch.cat([tokens[row, :n], more[row]])[None]
        torch.testing.assert_close(out.final[row], target(whole).final[0, n:], rtol=1e-4, atol=1e-5)


def test_cache_refuses_what_does_not_fit(target: Target) -> None:
    cache = target.new_cache(1, 4)
    with pytest.raises(ArgumentError, match="max_length 4"):
        target(ids(1, 5), cache)


def test_crop_never_lengthens() -> None:
    cache = KVCache(1, 2, 1, 8, 4, torch.device("cpu"), torch.float32)
    cache.advance(torch.tensor([3, 5]))
    cache.crop(4)
    assert cache.lengths.tolist() == [3, 4]


@torch.inference_mode()
def test_context_in_pieces_equals_context_at_once(target: Target, drafter: Drafter) -> None:
    hidden, anchors = target(ids(2, 9)).hidden, torch.tensor([20, 30])
    whole, pieces = drafter.new_cache(2, 16), drafter.new_cache(2, 16)
    drafter.extend(whole, hidden)
    # As generation does: 4 entries of which 2 and 4 stand, with a draft in between.
    drafter.extend(pieces, hidden[:, :3])
    drafter.base_logits(pieces, anchors)
    drafter.extend(pieces, hidden[:, 3:7], torch.tensor([2, 4]))
    drafter.base_logits(pieces, anchors)
    rest = torch.stack([hidden[0, 5:9], torch.cat([hidden[1, 7:9], hidden[1, :2] * float("nan")])])
    drafter.extend(pieces, rest.nan_to_num(99.0), torch.tensor([4, 2]))
    assert pieces.lengths.tolist() == [9, 9]
    for a, b in zip(
        drafter.base_logits(whole, anchors), drafter.base_logits(pieces, anchors), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_ragged_blocks_equal_single_rows(target: Target, drafter: Drafter) -> None:
    hidden, anchors = target(ids(3, 8)).hidden, torch.tensor([20, 30, 40])
    ragged, lengths = drafter.new_cache(3, 16), torch.tensor([8, 3, 5])
    drafter.extend(ragged, hidden, lengths)
    base, head_hidden = drafter.base_logits(ragged, anchors)
    assert base.shape == (3, 4, 97)
    assert head_hidden.shape == (3, 4, 24)
    for row, n in enumerate(lengths.tolist()):
        alone = drafter.new_cache(1, 16)
        drafter.extend(alone, hidden[row : row + 1, :n])
        one, _ = drafter.base_logits(alone, anchors[row : row + 1])
        torch.testing.assert_close(base[row], one[0], rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_training_forward_equals_generation(target: Target, drafter: Drafter) -> None:
    tokens, anchors = ids(2, 14), torch.tensor([[4, 9, 5], [2, 7, 9]])
    hidden = target(tokens).hidden
    trained = drafter(hidden, tokens, anchors)
    for row in range(2):
        for block, at in enumerate(anchors[row].tolist()):
            cache = drafter.new_cache(1, 16)
            drafter.extend(cache, hidden[row : row + 1, :at])
            _, alone = drafter.base_logits(cache, tokens[row : row + 1, at])
            torch.testing.assert_close(trained[row, block], alone[0], rtol=1e-4, atol=1e-5)


def test_a_block_sees_itself_whole_and_no_other(target: Target, drafter: Drafter) -> None:
    """Gradients tell who sees whom: a block's first position sees its last one (non-causal)."""
    tokens = ids(1, 12)
    hidden = target(tokens).hidden.detach().requires_grad_(True)
    seen: list[Tensor] = []
    embedding = drafter.embedding.clone().requires_grad_(True)
    drafter.embedding = embedding
    first = drafter(hidden, tokens, torch.tensor([[4, 8]]))[0, 0, 0].sum()
    seen = list(torch.autograd.grad(first, [hidden, embedding]))
    assert seen[0][0, :4].abs().sum(-1).min() > 0, "context before the anchor is seen"
    assert seen[0][0, 4:].abs().max() == 0, "the anchor and what follows it is no context"
    assert seen[1][TINY_DRAFT.mask_token_id].abs().max() > 0, "later positions are seen"
    assert seen[1][tokens[0, 8]].abs().max() == 0 or tokens[0, 8] == tokens[0, 4]


@torch.inference_mode()
def test_confidence_is_a_probability(target: Target, drafter: Drafter) -> None:
    cache = drafter.new_cache(2, 8)
    drafter.extend(cache, target(ids(2, 3)).hidden)
    _, head_hidden = drafter.base_logits(cache, torch.tensor([20, 30]))
    sure = drafter.confidence(head_hidden, ids(2, 4))
    assert sure.shape == (2, 4)
    assert sure.dtype == torch.float32
    assert ((sure > 0) & (sure < 1)).all()


def test_checkpoint_round_trip(target: Target, drafter: Drafter, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text(json.dumps(drafter.config.to_json()))
    save_file(drafter.state_dict(), tmp_path / "model.safetensors")
    again = Drafter.load(tmp_path, target)
    assert again.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        Drafter.load(tmp_path, target)


def test_checkpoint_for_another_target_is_refused(target: Target) -> None:
    with pytest.raises(CheckpointError, match="the target has"):
        Drafter.load(CHECKPOINT, target)


def test_missing_gguf_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"fused-markov\[pair\]"):
        find_gguf(tmp_path / "none.gguf")


def test_shipped_checkpoint() -> None:
    """Names, shapes, dtypes and size of the drafter in ``models/``."""
    from safetensors import safe_open

    path = CHECKPOINT / "model.safetensors"
    config = DrafterConfig.from_json(json.loads((CHECKPOINT / "config.json").read_text()))
    with torch.device("meta"):
        state = Drafter(config, torch.empty(config.vocab_size, config.hidden_size)).state_dict()
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(state)
        for name in state:
            assert tuple(file.get_slice(name).get_shape()) == tuple(state[name].shape), name
            assert file.get_slice(name).get_dtype() == "BF16", name
    assert path.stat().st_size <= 24 * 2**20


@pytest.fixture(scope="module")
def gguf() -> GgufFile:
    try:
        return GgufFile(find_gguf())
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@torch.inference_mode()
def test_real_target(gguf: GgufFile) -> None:
    target, tokenizer = Target.load(file=gguf), gguf.tokenizer()
    text = chat_prompt("What is 12 + 34?") + "The sun rises in the east and sets in the west."
    tokens = torch.tensor([tokenizer.encode(text).ids])
    assert tokenizer.decode(tokens[0].tolist(), skip_special_tokens=False) == text
    logits = target.logits(target(tokens).final)
    theirs = transformers_twin(target)(tokens).logits
    assert (logits - theirs).abs().max() < 1e-3
    assert torch.equal(logits.argmax(-1), theirs.argmax(-1))
    # Weights read in a wrong order (rotary halves, say) would make English improbable.
    loss = torch.nn.functional.cross_entropy(logits[0, -12:-1], tokens[0, -11:])
    assert loss < 2.5
    drafter = Drafter.load(CHECKPOINT, target)
    cache = drafter.new_cache(1, 64)
    drafter.extend(cache, target(tokens).hidden)
    base, _ = drafter.base_logits(cache, tokens[:, -1])
    assert base.shape == (1, drafter.config.block_size, target.config.vocab_size)
    assert base.isfinite().all()
