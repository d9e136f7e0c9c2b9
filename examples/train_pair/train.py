"""Train the DSpark drafter of SmolLM2-135M-Instruct on chats that the target writes itself.

    pip install 'fused-markov[pair]'
    python examples/train_pair/train.py --minutes 8 --out models/mine

Everything is bounded by the clock: a share of the minutes goes into writing chats, most of the
rest into training, and the checkpoint is saved before it is evaluated.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from evaluate import HELD_OUT_SEED, held_out_prompts, report
from loss import CHUNK, Passes, block_loss, compare, gradient
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
    max_chats: int = 60_000  # 1 MB of device memory each, at 224 tokens
    length: int = 224
    greedy: float = 0.4  # share of greedy answers; the others' temperatures lie between:
    coolest: float = 0.6
    hottest: float = 0.9
    batch: int = 64  # sequences a step
    anchors: int = 48  # blocks a sequence
    lr: float = 2e-3  # of the matrices (Muon) and of norms and confidence head (AdamW)
    markov_lr: float = 3e-3  # of the Markov head (AdamW)
    warmup: int = 100
    ramp: float = 0.5  # share of training over which accepted tokens take over
    decay: float = 0.85  # cross-entropy of a position relative to the one before it
    cool: float = 0.5  # the two models are compared at this temperature in greedy answers
    warm: float = 0.8  # and at this one in the others
    surprise: float = 0.5  # share of the anchors drawn where the target was unsure of the token
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
        torch.set_float32_matmul_precision("high")
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
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        chats = Chats.concat(parts)
        chats = chats.select(chats.ends.argsort())
        self.answer_tokens = int((chats.ends - chats.starts).sum())
        self.chats = chats
        self.log(f"{len(chats)} chats, {self.answer_tokens} answer tokens, seeds {s.seed}..{seed}")
        for row in range(0, len(chats), max(1, len(chats) // 4)):
            text = self.tokenizer.decode(chats.ids[row, : chats.ends[row]].tolist(), False)
            print(text[90:600].replace("\n", "\\n"), flush=True)

    @torch.no_grad()
    def read(self) -> None:
        """Run the target over all chats once: training then only looks its hidden states up."""
        s, (n, length) = self.s, self.chats.ids.shape
        ids, starts, ends, greedy = (t.to(self.device) for t in vars(self.chats).values())
        c = self.target.config
        self.ids, self.ends, self.greedy = ids.long(), ends, greedy
        self.final = torch.empty(n, length, c.width, dtype=self.low, device=self.device)
        shape = (n, length, len(c.taps) * c.width)
        self.hidden = torch.empty(shape, dtype=self.low, device=self.device)
        # Where anchors are drawn: cumulated over each row.
        self.chance = torch.empty(n, length, device=self.device)
        where = torch.arange(length, device=self.device)
        first = self.target(self.ids[torch.randperm(n, device=self.device)[: s.batch]]).hidden
        # The first token's activations are far outside all others'.
        self.scale = first[:, 1:].float().flatten(0, 1).std(0).clamp_min(1e-4)
        for at in range(0, n, s.batch):
            part = slice(at, at + s.batch)
            out = self.target(self.ids[part])
            self.final[part] = out.final
            self.hidden[part] = out.hidden / self.scale
            # Rounds begin where a draft was refused, which is where the target was unsure.
            unsure = torch.ones(out.final.shape[:2], device=self.device)
            for row, sure in enumerate(out.final.split(16)):
                logits = self.target.logits(sure[:, :-1])
                token = self.ids[part][16 * row : 16 * row + 16, 1:, None]
                log_p = logits.gather(-1, token)[..., 0].float() - logits.logsumexp(-1).float()
                unsure[16 * row : 16 * row + 16, 1:] -= log_p.exp().clamp_max(1)
            inside = (where >= starts[part, None]) & (where <= ends[part, None] - 2)
            unsure = unsure.clamp_min(1e-3) * inside
            share = s.surprise * unsure / unsure.sum(1, keepdim=True)
            even = (1 - s.surprise) * inside / inside.sum(1, keepdim=True)
            self.chance[part] = (share + even).cumsum(1)
        self.log(f"{n * length} tokens read")

    def batch(self) -> tuple[slice, int, Tensor]:
        """Which chats of like length, their common length, and anchors ``[B, A]`` in them."""
        s, n = self.s, len(self.chats)
        first = int(torch.randint(max(1, n - s.batch + 1), ()))
        rows = slice(first, first + s.batch)
        # Rounded up so that few shapes occur.
        length = min(self.ids.shape[1], -(-int(self.chats.ends[rows].max()) // 32) * 32)
        chance = self.chance[rows, :length].contiguous()
        spots = torch.rand(len(chance), s.anchors, device=self.device) * chance[:, -1:]
        anchors = torch.searchsorted(chance, spots, right=True)
        return rows, length, torch.minimum(anchors, self.ends[rows, None] - 2)

    # Training -----------------------------------------------------------------------------------

    def build(self) -> None:
        """Make the drafter and its optimizers."""
        s = self.s
        config = DrafterConfig(num_key_value_heads=s.kv_heads, intermediate_size=s.intermediate)
        self.drafter = Drafter(config, self.target.embedding).to(self.device)
        self._initialise()
        if self.s.resume:
            state = load_file(Path(self.s.resume) / "model.safetensors")
            self.drafter.load_state_dict(_fit({k: v.float() for k, v in state.items()}, config))
            self.drafter.fc.weight.data.mul_(self.scale)
        named = dict(self.drafter.named_parameters())
        markov = [p for name, p in named.items() if "markov_head" in name]
        matrices = [p for name, p in named.items() if name.endswith("proj.weight")]
        matrices = [p for p in [*matrices, self.drafter.fc.weight] if min(p.shape) > 1]
        apart = {id(p) for p in [*markov, *matrices]}
        rest = [p for p in named.values() if id(p) not in apart]
        fused = self.device.type == "cuda"
        groups = [{"params": rest, "lr": s.lr}, {"params": markov, "lr": s.markov_lr}]
        self.optimizers = [
            torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=fused),
            # Updates as large as AdamW's would be, so that one rate serves both.
            torch.optim.Muon(matrices, lr=s.lr, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        ]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["full"] = group["lr"]
        self.passes = self._compiled() if s.compile and fused else Passes()

    def _compiled(self) -> Passes:
        """Both sweeps over the logits as fused kernels, if the compiler can."""
        c = self.drafter.config
        n = CHUNK * c.block_size
        logits = torch.zeros(n, c.vocab_size, dtype=self.low, device=self.device)
        one = torch.ones(n, 1, device=self.device)
        passes = Passes(
            torch.compile(compare, dynamic=False), torch.compile(gradient, dynamic=False)
        )
        try:
            passes.compare(logits, logits.clone(), one)
            passes.gradient(logits, logits.clone(), *[one.clone() for _ in range(6)])
        except Exception as error:  # any compiler trouble: slower is better than nothing
            self.log(f"loss not compiled: {type(error).__name__}: {error}")
            return Passes()
        self.log("loss compiled")
        return passes

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
        """One optimizer step; fp32 stats ``[5, S]`` by position, the last two without position."""
        s, d = self.s, self.drafter
        rows, length, anchors = self.batch()
        ids, steps = self.ids[rows, :length], d.config.block_size
        where = (anchors[..., None] + torch.arange(steps, device=self.device)).flatten(1)
        valid = (where <= self.ends[rows, None] - 2).float().view(-1, steps)
        where = where.clamp_max(length - 1)
        prev = ids.gather(1, where)
        final = self.final[rows]
        final = final.gather(1, where[..., None].expand(-1, -1, final.shape[-1]))
        with torch.autocast(self.device.type, torch.bfloat16, self.low == torch.bfloat16):
            hidden = d(self.hidden[rows, :length], ids, anchors)
        hidden = hidden.flatten(0, 2).to(self.low)
        markov = d.markov_head.markov_w1(prev.flatten()).to(self.low)

        by_step = s.decay ** torch.arange(steps, device=self.device)
        weight = valid * by_step
        weight = (weight / weight.sum()).view(-1, 1)
        inverse = torch.where(self.greedy[rows, None], 1 / s.cool, 1 / s.warm)
        inverse = inverse.expand(where.shape).reshape(-1, 1)
        # Cross-entropy finds the way; accepted tokens are what counts in the end.
        late = min(1.0, progress / s.ramp)
        loss, stats, accepted = block_loss(
            hidden, markov, d.markov_head.markov_w2.weight.to(self.low),
            final.flatten(0, 1), self.target.embedding, inverse,
            weight * (1.0 - 0.85 * late), valid, 0.45 * late / len(valid), self.passes,
        )  # fmt: skip
        # The confidence head learns beside the rest and moves nothing but itself.
        x = torch.cat([hidden.detach(), markov.detach()], -1).float()
        guess = torch.nn.functional.linear(x, *d.confidence_head.proj.parameters())[:, 0]
        unsure = torch.nn.functional.binary_cross_entropy_with_logits(
            guess, stats[1].clamp(0, 1), weight=weight[:, 0], reduction="sum"
        )
        self._update(loss + unsure, progress)
        grouped = (stats * valid.flatten()).view(3, -1, steps).sum(1)
        grouped = grouped / valid.sum(0).clamp_min(1)
        overall = torch.stack([accepted.mean(), unsure.detach()])
        return torch.cat([grouped, overall[:, None].expand(2, steps)])

    def _update(self, loss: Tensor, progress: float) -> None:
        warm = min(1.0, (self.count + 1) / self.s.warmup)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full"] * warm * max(0.0, 1 - progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def train(self) -> None:
        """Step until the evaluation's time begins, saving on the way."""
        self.read()
        self.build()
        begin, end = time.monotonic(), self.until(1.0)
        self.count, saved, sums, seen = 0, begin, 0, 0
        while self.count == 0 or time.monotonic() < end:
            now = time.monotonic()
            try:
                stats = self.step((now - begin) / max(end - begin, 1e-9))
            except torch.OutOfMemoryError:
                if self.s.anchors == 1:
                    raise
                self.s.anchors //= 2
                self.log(f"out of memory, going on with {self.s.anchors} anchors")
                for optimizer in self.optimizers:
                    optimizer.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
                continue
            sums, seen, self.count = sums + stats, seen + 1, self.count + 1
            if self.count in (1, 5, 20) or self.count % 100 == 0:
                mean = (sums / seen).cpu()  # the only wait for the device
                sums, seen = 0, 0
                names = ("cross", "accept", "agree")
                text = "  ".join(
                    f"{n} {' '.join(f'{x:.3f}' for x in row)}"
                    for n, row in zip(names, mean.tolist(), strict=False)
                )
                self.log(
                    f"step {self.count}  {text}  accepted {mean[3, 0]:.3f}  conf {mean[4, 0]:.3f}"
                )
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
        figures = report(
            self.target,
            Drafter.load(s.out, self.target),
            prompts,
            s.eval_tokens,
            self.begin + 60 * s.minutes,
        )
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
