"""Train the DSpark drafter of SmolLM2-135M-Instruct on chats that the target writes itself.

    pip install 'fused-markov[pair]'
    python examples/train_pair/train.py --minutes 8 --out models/mine

Everything is bounded by the clock: a share of the minutes goes into writing chats, most of the
rest into training, and the checkpoint is saved before it is evaluated.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from evaluate import HELD_OUT_SEED, held_out_prompts, report
from loss import CHUNK, block_loss, row_losses
from safetensors.torch import load_file, save_file
from torch import Tensor

from data import Chats, write_chats
from fused_markov.pair import Drafter, DrafterConfig, Target
from fused_markov.pair.gguf_file import GgufFile, find_gguf


@dataclass
class Settings:
    """What one run does; every field is a command-line option."""

    out: str = "models/smollm2-135m-instruct-dspark"
    minutes: float = 8.0
    gguf: str = ""
    resume: str = ""  # a checkpoint to go on from; its sizes may differ, see _fit
    kv_heads: int = 3
    intermediate: int = 960
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    seed: int = 1
    generate_share: float = 0.28  # of the minutes, for writing chats
    evaluate_minutes: float = 0.8  # kept free at the end
    rows: int = 4096  # chats written at once
    max_chats: int = 400_000
    length: int = 384
    greedy: float = 0.3  # share of greedy answers; the others' temperatures lie between:
    coolest: float = 0.6
    hottest: float = 1.0
    batch: int = 64  # sequences a step
    anchors: int = 64  # blocks a sequence
    lr: float = 2e-3
    warmup: int = 100
    ramp: float = 0.5  # share of training over which total variation takes over
    decay: float = 0.85  # weight of a position relative to the one before it
    cool: float = 0.6  # the two models are compared at this temperature in half of the blocks
    warm: float = 1.0  # and at this one in the others
    save_every: float = 60.0  # seconds
    eval_prompts: int = 128
    eval_tokens: int = 128
    compile: bool = True


class Trainer:
    """Target, drafter, optimizer and data of one run."""

    def __init__(self, s: Settings) -> None:
        self.s, self.begin = s, time.monotonic()
        self.device = torch.device(s.device)
        self.low = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        torch.manual_seed(s.seed)
        # cuDNN's attention plans anew for every key length, and decoding meets hundreds.
        torch.backends.cuda.enable_cudnn_sdp(False)
        file = GgufFile(find_gguf(s.gguf or None))
        self.tokenizer = file.tokenizer()
        self.target = Target.load(file=file, device=self.device, dtype=self.low)
        self.log(f"target loaded on {self.device}, {self.low}")

    def log(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:6.1f} s] {text}", flush=True)

    def until(self, share: float) -> float:
        """The monotonic time at ``share`` of what lies before the evaluation."""
        return self.begin + 60 * share * (self.s.minutes - self.s.evaluate_minutes)

    # Data ---------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write chats until their share of the time is over; sort them by length."""
        s, parts, count, seed = self.s, [], 0, self.s.seed
        deadline = self.until(s.generate_share)
        while count < s.max_chats and (not parts or time.monotonic() < deadline):
            chats = write_chats(
                self.target,
                self.tokenizer,
                s.rows,
                s.length,
                seed,
                greedy=s.greedy,
                temperatures=(s.coolest, s.hottest),
            )
            parts.append(chats)
            count, seed = count + len(chats), seed + 1
        chats = Chats.concat(parts)
        chats = chats.select(chats.ends.argsort())
        self.answer_tokens = int((chats.ends - chats.starts).sum())
        self.chats = Chats(*(t.to(self.device) for t in vars(chats).values()))
        self.log(f"{len(chats)} chats, {self.answer_tokens} answer tokens, seeds {s.seed}..{seed}")
        for row in range(0, len(chats), max(1, len(chats) // 4)):
            text = self.tokenizer.decode(chats.ids[row, : chats.ends[row]].tolist(), False)
            print(text[90:600].replace("\n", "\\n"), flush=True)

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens ``[B, L]``, anchors ``[B, A]`` and int64 ends ``[B]`` of chats of like length."""
        s, n = self.s, len(self.chats)
        first = int(torch.randint(max(1, n - s.batch + 1), ()))
        part = self.chats.select(slice(first, first + s.batch))  # type: ignore[arg-type]
        # Rounded up so that few shapes occur.
        longest = min(self.s.length, -(-int(part.ends.max()) // 32) * 32)
        ids = part.ids[:, :longest].long()
        room = (part.ends - 1 - part.starts)[:, None]
        spots = torch.rand(len(ids), s.anchors, device=self.device)
        return ids, part.starts[:, None] + (spots * room).long(), part.ends

    # Training -----------------------------------------------------------------------------------

    def build(self) -> None:
        """Make the drafter and scale its input: ``fc`` sees residual streams of unit deviation."""
        ids, _, ends = self.batch()
        hidden = self.target(ids[:64]).hidden.float()
        inside = torch.arange(ids.shape[1], device=self.device) < ends[:64, None]
        inside[:, 0] = False  # the first token's activations are far outside all others'
        self.scale = hidden[inside].std(0).clamp_min(1e-4)
        s = self.s
        config = DrafterConfig(num_key_value_heads=s.kv_heads, intermediate_size=s.intermediate)
        self.drafter = Drafter(config, self.target.embedding).to(self.device)
        self._initialise()
        if self.s.resume:
            state = load_file(Path(self.s.resume) / "model.safetensors")
            self.drafter.load_state_dict(_fit({k: v.float() for k, v in state.items()}, config))
            self.drafter.fc.weight.data.mul_(self.scale)
        wide = [p for p in self.drafter.parameters() if p.dim() > 1]
        thin = [p for p in self.drafter.parameters() if p.dim() == 1]
        groups = [{"params": wide, "weight_decay": 0.02}, {"params": thin, "weight_decay": 0.0}]
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=self.s.lr, betas=(0.9, 0.95), fused=fused)
        self.rows = self._compiled() if self.s.compile and fused else row_losses

    def _compiled(self) -> Callable[..., tuple[Tensor, ...]]:
        """``row_losses`` in fused kernels (some ten passes over the logits less), if it can."""
        n, v = CHUNK, self.drafter.config.vocab_size
        logits = torch.zeros(n, v, dtype=self.low, device=self.device)
        one = torch.ones(n, 1, device=self.device)
        try:
            compiled = torch.compile(row_losses, dynamic=False)
            compiled(logits, logits.clone(), one, one.clone(), one.clone())
        except Exception as error:  # any compiler trouble: slower is better than nothing
            self.log(f"loss not compiled: {type(error).__name__}: {error}")
            return row_losses
        self.log("loss compiled")
        return compiled

    def _initialise(self) -> None:
        d, width = self.drafter, self.drafter.config.hidden_size
        for name, p in d.named_parameters():
            if p.dim() > 1:
                small = "o_proj" in name or "down_proj" in name
                torch.nn.init.normal_(p, std=0.01 if small else 0.03)
        torch.nn.init.normal_(d.markov_head.markov_w1.weight, std=0.1)
        torch.nn.init.normal_(d.fc.weight, std=width**-0.5)
        d.fc.weight.data[:, -width:] += 2 * torch.eye(width, device=self.device)
        # The shared LM head expects hidden states as the target's last norm scales them.
        d.norm.weight.data.copy_(self.target.norm)
        torch.nn.init.zeros_(d.confidence_head.proj.weight)
        torch.nn.init.zeros_(d.confidence_head.proj.bias)

    def step(self, progress: float) -> Tensor:
        """One optimizer step; fp32 stats ``[5, S]`` by position, and the confidence loss last."""
        s, d = self.s, self.drafter
        ids, anchors, ends = self.batch()
        with torch.no_grad():
            out = self.target(ids)
        steps = d.config.block_size
        where = (anchors[..., None] + torch.arange(steps, device=self.device)).flatten(1)
        valid = where <= (ends - 2)[:, None]
        where = where.clamp_max(ids.shape[1] - 1)
        prev = ids.gather(1, where)
        final = out.final.gather(1, where[..., None].expand(-1, -1, out.final.shape[-1]))
        with torch.autocast(self.device.type, torch.bfloat16, self.low == torch.bfloat16):
            hidden = d((out.hidden / self.scale).to(self.low), ids, anchors)
        hidden = hidden.flatten(0, 2).to(self.low)
        markov = d.markov_head.markov_w1(prev.flatten()).to(self.low)

        by_step = s.decay ** torch.arange(steps, device=self.device)
        weight = valid * by_step.repeat(anchors.shape[1])
        weight = (weight / weight.sum()).view(-1, 1)
        cool = torch.rand(*anchors.shape, 1, device=self.device) < 0.5
        inverse = torch.where(cool, 1 / s.cool, 1 / s.warm).expand(-1, -1, steps).reshape(-1, 1)
        # Cross-entropy finds the way; acceptance itself is what counts in the end.
        late = min(1.0, progress / s.ramp)
        loss, stats = block_loss(
            hidden, markov, d.markov_head.markov_w2.weight.to(self.low),
            final.flatten(0, 1), self.target.embedding, inverse,
            weight * (1.0 - 0.8 * late), weight * (2.0 * late), self.rows,
        )  # fmt: skip
        # The confidence head learns beside the rest and moves nothing but itself.
        x = torch.cat([hidden.detach(), markov.detach()], -1).float()
        guess = torch.nn.functional.linear(x, *d.confidence_head.proj.parameters())[:, 0]
        unsure = torch.nn.functional.binary_cross_entropy_with_logits(
            guess, stats[1].clamp(0, 1), weight=weight[:, 0], reduction="sum"
        )
        self._update(loss + unsure, progress)
        grouped = (stats * valid.flatten()).view(4, -1, steps).sum(1)
        grouped = grouped / valid.view(-1, steps).sum(0).clamp_min(1)
        return torch.cat([grouped, unsure.detach().expand(1, steps)])

    def _update(self, loss: Tensor, progress: float) -> None:
        warm = min(1.0, (self.count + 1) / self.s.warmup)
        lr = self.s.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def train(self) -> None:
        """Step until the evaluation's time begins, saving on the way."""
        self.build()
        begin, end = time.monotonic(), self.until(1.0)
        self.count, saved, sums, seen = 0, begin, 0, 0
        while self.count == 0 or time.monotonic() < end:
            now = time.monotonic()
            stats = self.step((now - begin) / max(end - begin, 1e-9))
            sums, seen, self.count = sums + stats, seen + 1, self.count + 1
            if self.count in (1, 5, 20) or self.count % 100 == 0:
                mean = (sums / seen).cpu()  # the only wait for the device
                sums, seen = 0, 0
                names = ("cross", "accept", "agree", "p_best")
                text = "  ".join(
                    f"{n} {' '.join(f'{x:.3f}' for x in row)}"
                    for n, row in zip(names, mean.tolist(), strict=False)
                )
                self.log(f"step {self.count}  {text}  conf {mean[4, 0]:.3f}")
                self.last = dict(zip(names, mean.tolist(), strict=False))
            if time.monotonic() - saved > self.s.save_every:
                self.save()
                saved = time.monotonic()
        self.save()
        self.log(f"trained {self.count} steps")

    def save(self) -> None:
        """Write the checkpoint in bf16, with the input scale folded into ``fc``."""
        state = {k: v.detach().float() for k, v in self.drafter.state_dict().items()}
        state["fc.weight"] = state["fc.weight"] / self.scale
        state = {k: v.to(torch.bfloat16).cpu().contiguous() for k, v in state.items()}
        out = Path(self.s.out)
        out.mkdir(parents=True, exist_ok=True)
        save_file(state, out / "model.safetensors.part", metadata={"format": "pt"})
        (out / "model.safetensors.part").replace(out / "model.safetensors")
        text = json.dumps(self.drafter.config.to_json(), indent=2) + "\n"
        (out / "config.json").write_text(text)

    # Evaluation ---------------------------------------------------------------------------------

    def evaluate(self) -> None:
        """Decode answers to held-out prompts with the saved checkpoint; write figures.json."""
        s = self.s
        prompts = held_out_prompts(self.target, self.tokenizer, s.eval_prompts)
        torch.manual_seed(HELD_OUT_SEED)
        figures = report(self.target, Drafter.load(s.out, self.target), prompts, s.eval_tokens)
        for name, figure in figures.items():
            self.log(f"{name}: {figure}")
        everything = {
            "settings": asdict(s),
            "prompts": len(prompts),
            "chats": len(self.chats),
            "answer_tokens": self.answer_tokens,
            "steps": self.count,
            "last_training_means_by_position": self.last,
            "figures": figures,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
        }
        (Path(s.out) / "figures.json").write_text(json.dumps(everything, indent=2) + "\n")
        self.log("done")


def _fit(state: dict[str, Tensor], c: DrafterConfig) -> dict[str, Tensor]:
    """A checkpoint's tensors in the sizes of ``c``.

    Key and value heads are repeated, which changes no output and lets them part in training. Of
    the MLP's neurons those with the largest weights are kept.
    """
    for at in range(c.num_hidden_layers):
        for name in ("k_proj", "v_proj"):
            key = f"layers.{at}.self_attn.{name}.weight"
            heads = state[key].view(-1, c.head_dim, c.hidden_size)
            more = c.num_key_value_heads // len(heads)
            state[key] = heads.repeat_interleave(more, 0).flatten(0, 1)
        gate, up, down = (f"layers.{at}.mlp.{n}_proj.weight" for n in ("gate", "up", "down"))
        size = state[gate].norm(dim=1) * state[up].norm(dim=1) * state[down].norm(dim=0)
        keep = size.topk(min(c.intermediate_size, len(size))).indices.sort().values
        state[gate], state[up] = state[gate][keep], state[up][keep]
        state[down] = state[down][:, keep]
    return state


def parse() -> Settings:
    """Settings from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in asdict(Settings()).items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=value)
        else:
            parser.add_argument(option, type=type(value), default=value)
    return Settings(**vars(parser.parse_args()))


def main() -> None:
    trainer = Trainer(parse())
    trainer.write()
    trainer.train()
    trainer.evaluate()


if __name__ == "__main__":
    main()
