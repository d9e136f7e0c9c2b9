"""The instructions that make numbers of codes on NVIDIA's GPUs, carried out here one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from fused_markov.kernels import decode  # noqa: E402
from test_weights import E2M1, e4m3  # noqa: E402

Words = np.ndarray  # uint32
ORDER = {"BF16": torch.bfloat16, "FP16": torch.float16}


class Machine:
    """The few instructions of PTX that are used, on many lanes side by side.

    Products and sums of two halves are carried out in fp64 and rounded once, as the manual says of
    ``fma.rn``, ``mul`` and ``sub``; subnormal numbers count.
    """

    def __init__(self, inputs: list[Words], results: int) -> None:
        self.registers: dict[str, Words] = {f"${results + i}": x for i, x in enumerate(inputs)}
        self.results = results

    def run(self, asm: str) -> list[Words]:
        body = re.sub(r"\.reg[^;]*;", "", asm.strip().strip("{}"))
        for line in filter(None, (line.strip() for line in body.split(";"))):
            name, operands = line.split(None, 1)
            target, *sources = (x.strip() for x in operands.split(","))
            self.registers[target] = self.step(name, [self.value(x) for x in sources])
        return [self.registers[f"${i}"] for i in range(self.results)]

    def value(self, operand: str) -> Words:
        if operand in self.registers:
            return self.registers[operand]
        return np.uint32(int(operand, 0))

    def step(self, name: str, x: list[Words]) -> Words:
        operation, _, kind = name.partition(".")
        if name == "mov.b32":
            return x[0]
        if name == "shl.b32":
            return (x[0] << x[1]).astype(np.uint32)
        if name == "and.b32":
            return x[0] & x[1]
        if name == "prmt.b32":
            return permute(x[0], x[1], int(x[2]))
        if name == "lop3.b32":
            return lookup(x[0], x[1], x[2], int(x[3]))
        assert operation in ("fma", "mul", "sub"), name
        dtype = torch.bfloat16 if kind.endswith("bf16x2") else torch.float16
        a, b, *c = (halves(word, dtype) for word in x)
        if operation == "fma":
            return words(a * b + c[0], dtype)
        return words(a * b if operation == "mul" else a - b, dtype)


def permute(a: Words, b: Words, selector: int) -> Words:
    pool = np.stack(
        [(source >> np.uint32(8 * i)) & 0xFF for source in (a, b + 0 * a) for i in range(4)]
    )
    result = np.zeros_like(a)
    for i in range(4):
        pick = selector >> 4 * i & 15
        byte = pool[pick & 7]
        if pick & 8:
            byte = np.where(byte & 0x80, 0xFF, 0)
        result |= (byte.astype(np.uint32)) << np.uint32(8 * i)
    return result


def lookup(a: Words, b: Words, c: Words, table: int) -> Words:
    result = np.zeros_like(a)
    for bit in range(32):
        shift = np.uint32(bit)
        index = (a >> shift & 1) * 4 + (b >> shift & 1) * 2 + (c >> shift & 1)
        result |= ((table >> index.astype(np.uint32)) & 1).astype(np.uint32) << shift
    return result


def halves(word: Words, dtype: torch.dtype) -> Tensor:
    word = np.atleast_1d(word)
    pair = np.stack([word & 0xFFFF, word >> np.uint32(16)], axis=-1).astype(np.uint16)
    return torch.from_numpy(pair.view(np.int16)).view(dtype).double()


def words(pair: Tensor, dtype: torch.dtype) -> Words:
    exact = pair.to(dtype)
    assert torch.equal(exact.double(), pair), "rounded: what is computed ought to be exact"
    bits = exact.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return bits[..., 0] | bits[..., 1] << np.uint32(16)


def every_byte() -> Words:
    """Words in whose every place every byte stands once."""
    byte = np.arange(256, dtype=np.uint32)
    return byte | (byte * 7 + 3) % 256 << 8 | (byte * 11 + 5) % 256 << 16 | (255 - byte) << 24


def bytes_of(word: Words) -> Words:
    """``[lanes, 4]``"""
    return np.stack([word >> np.uint32(8 * i) & 0xFF for i in range(4)], axis=-1)


def table(value: Callable[[int], float]) -> np.ndarray:
    return np.array([value(code) for code in range(256)])


VALUES = {
    "E4M3": table(
        lambda code: e4m3(code) if code & 0x7F != 0x7F else (-480 if code & 128 else 480)
    ),
    "INT8": table(lambda code: code - 256 if code & 128 else code),
}
SHORT = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-14}


def cases(kind: str) -> Iterator[pytest.param]:
    for name in ("E4M3", "INT8", "E2M1"):
        for half, dtype in ORDER.items():
            asm = getattr(decode, f"{name}_{kind}_{half}").value
            yield pytest.param(name, dtype, asm, id=f"{name}-{half}")


@pytest.mark.parametrize(("name", "dtype", "asm"), list(cases("BYTES")))
def test_bytes(name: str, dtype: torch.dtype, asm: str) -> None:
    word = every_byte()
    count = 4 if name == "E2M1" else 2
    got = [halves(x, dtype).numpy() for x in Machine([word], count).run(asm)]
    codes = bytes_of(word)
    if name == "E2M1":
        low, high = np.array(E2M1)[codes & 15], np.array(E2M1)[codes >> 4]
        want = np.concatenate([low, high], axis=1) * SHORT[dtype]
    else:
        want = VALUES[name][codes]
    np.testing.assert_array_equal(np.concatenate(got, axis=1), want)


@pytest.mark.parametrize(("name", "dtype", "asm"), list(cases("WORDS")))
def test_words(name: str, dtype: torch.dtype, asm: str) -> None:
    first, second = every_byte(), every_byte()[::-1].copy()
    count = 8 if name == "E2M1" else 4
    got = [halves(x, dtype).numpy() for x in Machine([first, second], count).run(asm)]
    for i, result in enumerate(got):
        byte = [bytes_of(word)[:, i // 2 if name == "E2M1" else i] for word in (first, second)]
        if name == "E2M1":
            nibble = [x >> 4 if i % 2 else x & 15 for x in byte]
            want = np.stack([np.array(E2M1)[x] for x in nibble], axis=1) * SHORT[dtype]
        else:
            want = np.stack([VALUES[name][x] for x in byte], axis=1)
        np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize("dtype", ORDER.values(), ids=str)
def test_short_products_are_exact(dtype: torch.dtype) -> None:
    """e2m1 short, times its scale as `_short_scale` has it: SHORT too small, and nothing lost."""
    up = 2.0**118 if dtype == torch.bfloat16 else 64.0
    scales = torch.tensor([e4m3(code) for code in range(256) if code & 0x7F != 0x7F]).double() * up
    short = torch.tensor(E2M1).double() * SHORT[dtype]
    assert torch.equal(scales.to(dtype).double(), scales)
    assert torch.equal(short.to(dtype).double(), short)
    product = torch.outer(short, scales)
    assert torch.equal(product.to(dtype).double(), product)
    assert torch.equal(product * decode.SHORT.value, torch.outer(short / SHORT[dtype], scales / up))
