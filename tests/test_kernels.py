"""kernels.cu on the CPU: nearly every kernel against the functions of model_cpu.py that it covers, launched by model_gpu.py where it
has a function for that, at odd shapes, in fp32 and bf16 storage, with threads and blocks in three orders, between guard
zones.
test_model_gpu.py has the others in whole steps and texts: AdamW, Muon, norm and clipping, copy_weights, decode_logits."""
import re

import numpy as np
import pytest
from cases import parametrize
from numpy.testing import assert_allclose, assert_array_equal

import model_cpu
import model_gpu
from cuda_helpers import Array, CpuModule, check_guards, guarded, stored, text_of, value
from model_cpu import Arrays, Config

f32 = np.float32


class Bench:
    """The kernels in one storage type and one order; for model_gpu's functions the `gpu`."""
    eps, cublas = 0.25, None                                             # an eps that shows

    def __init__(self, bf16, order):
        self.module, self.arrays, self.rng = CpuModule("kernels.cu", [f"-DBF16={int(bf16)}"]), [], np.random.default_rng(7)
        self.module.order = order
        self.bf16 = bf16

    def random(self, *shape, scale=1.0):
        """Numbers that the storage type holds exactly."""
        return value(stored(scale * self.rng.standard_normal(shape), self.bf16))

    def store(self, array):
        """As the GPU has it: float64 in the storage type, float32 as it is, integers in 32 bits."""
        array = stored(array, self.bf16) if array.dtype == float else array.astype("i4" if array.dtype == int else "f4")
        self.arrays.append(guarded(array).view(Array))
        return self.arrays[-1]

    def __call__(self, name, *args):
        """model_gpu's function on stored copies of these arrays, which then have what it has written."""
        stored = [self.store(x) if isinstance(x, np.ndarray) else x for x in args]
        getattr(model_gpu, name)(self, *stored)
        for x, copy in zip(args, stored):
            if isinstance(x, np.ndarray):
                x[...] = value(copy)

    def launch(self, name, grid, threads, *args):
        self.module.get_function(name)(np.atleast_1d(grid), (threads,), tuple(map(model_gpu.as_argument, args)))

    launch_early = launch

    def close(self, found, expected, factor=1):
        """Within the error of one rounding to bf16, or of a few sums in fp32, of the largest value expected."""
        error = 2 ** -8 if self.bf16 and found.dtype == float else 2e-6
        assert_allclose(found, expected, rtol=0, atol=factor * error * np.abs(expected).max())

    def take(self, H, G, D, context, hidden=8):
        """Compute for these heads -> the table of rope."""
        self.config = Config(dim=H * D, heads=H, kv_heads=G, layers=1, context=context, vocab=8, hidden=hidden, norm_eps=self.eps)
        table = model_cpu.rope_table(self.config, float)
        self.angles = self.store(np.ascontiguousarray(f32(table[:, :, 0, D // 2:].swapaxes(0, 1))))
        return table


@pytest.fixture(params=[(False, 0), (False, 1), (True, 0), (True, 2)])
def bench(request):
    bench = Bench(*request.param)
    yield bench
    check_guards(*bench.arrays)


def nan(*shape):
    """An output: what a kernel leaves out shows."""
    return np.full(shape, np.nan)


def test_primer():
    """The kernel that the head of kernels.cu shows, launched as it says there."""
    [source] = re.findall(r"__global__ void rmsnorm.*?\n//     }\n", text_of("kernels.cu"), re.DOTALL)
    kernel = CpuModule("kernels.cu", source='extern "C" ' + source.replace("\n//", "\n")).get_function("rmsnorm")
    x, gain, out = *np.random.default_rng(0).standard_normal((2, 3, 64)).astype(f32), np.full((3, 64), np.nan, f32)
    kernel((3,), (64,), (out, x, gain[0].copy(), np.int32(64), f32(1e-5)))
    assert_allclose(out, x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * gain[0], rtol=1e-5)


def test_embedding(bench):
    for N, C, V in (1, 8, 8), (50, 264, 24), (300, 520, 8):
        tokens = bench.rng.integers(0, max(1, V - 3), N)                 # some ids occur often, some never
        embed, dout, out, dembed = bench.random(V, C), bench.random(N, C), nan(N, C), f32(bench.random(V, C))
        expected = dembed.astype(float)
        model_cpu.embedding_backward(expected, dout, tokens)
        bench("embedding_forward", out, tokens, embed)
        bench("embedding_backward", dembed, dout, np.argsort(tokens, kind="stable"), np.searchsorted(np.sort(tokens), np.arange(V + 1)))
        assert_array_equal(out, embed[tokens])
        bench.close(dembed, expected)


def test_rmsnorm(bench):
    """x alone, or the sum of two terms; its gradient written, or added."""
    for N, C, two in (1, 32, False), (9, 288, True), (300, 96, False), (300, 96, True), (2, 2080, True):
        (before, step, dout, dx), (gain, dgain), (out, expected) = bench.random(4, N, C), f32(bench.random(2, C)), nan(2, N, C)
        x, rstd, exact, summed = nan(N, C) if two else before.copy(), f32(nan(N)), nan(N), dgain.astype(float)
        bench("rmsnorm_forward", out, rstd, x, gain, before, step if two else None)
        bench.close(x, before + two * step)
        model_cpu.rmsnorm_forward(expected, exact, x, gain, bench.eps)
        bench.close(out, expected)
        model_cpu.rmsnorm_backward(expected, summed, dout, x, exact, gain)
        expected += two * dx
        bench("rmsnorm_backward", dx, dgain, dout, x, rstd, gain, f32(nan(model_gpu.NORM_BLOCKS, C)), two)
        bench.close(dx, expected)
        bench.close(dgain, summed, 2)


@parametrize("B, T, H, G, D", [(2, 37, 4, 2, 64), (1, 9, 2, 2, 128), (3, 1, 3, 1, 32)])
def test_rope(bench, B, T, H, G, D):
    """In training; and of one new token of each text, whose k and v go to their place in the KV cache and nowhere else."""
    cos, sin = bench.take(H, G, D, 40)
    qkv, at, cache = bench.random(B * T, (H + 2 * G) * D), np.arange(B) * 13 * (T == 1), nan(B, 40, 2 * G * D)
    expected = qkv.copy()
    for row, t in zip(expected.reshape(B, 1, T, -1), at):
        model_cpu.rope_forward(model_cpu.rotated_part(row, bench.config), cos[t:t + T], sin[t:t + T])
    bench("rope_forward", qkv, T, *[cache, at] * (T == 1))
    bench.close(qkv, expected)
    if T == 1:
        assert_array_equal(cache[range(B), at], qkv[:, H * D:])
        assert np.isnan(np.delete(cache, at, axis=1)).all()


def test_swiglu(bench):
    for N, F in (1, 8), (5, 344), (2, 2056):
        gate_up, dout, out, (expected, sigmoid) = bench.random(N, 2 * F, scale=3.0), bench.random(N, F), nan(N, F), np.zeros((2, N, F))
        gate_up[0, :8] = -200.0                                          # exp(200) overflows fp32
        bench("swiglu_forward", out, gate_up)
        model_cpu.swiglu_forward(expected, sigmoid, gate_up)
        bench.close(out, expected)
        dgate_up = np.zeros((N, 2 * F))
        model_cpu.swiglu_backward(dgate_up, dout, sigmoid, gate_up)
        bench("swiglu_backward", gate_up, dout)
        bench.close(gate_up, dgate_up)


def test_cross_entropy(bench):
    for B, T, K, V, spread in (1, 2, 1, 8, 1.0), (2, 7, 3, 40, 3.0), (2, 3, 2, 4104, 1e4):
        targets, bench.config = np.maximum(bench.rng.integers(-V // 2, V, (B, T + K - 1)), -1), Arrays(vocab=V)
        z, weights, heads = bench.random(B * T, K, V, scale=spread), f32(bench.random(B)), f32(0.5 ** np.arange(K))
        nll, losses, logits = bench.store(f32(nan(B * T, K))), bench.store(f32(nan(K))), bench.store(z)
        inputs = Arrays(targets=bench.store(targets), scales=bench.store(heads / 7), divisor=bench.store(7 + 0 * heads), weights=bench.store(weights))
        model_gpu.cross_entropy_forward(bench, losses, nll, logits, inputs, T)
        table, of_rows, expected, total = model_cpu.head_targets(targets, T, K), np.repeat(weights, T)[:, None], nan(K), nan(B * T, K)
        model_cpu.cross_entropy_forward(expected, total, z, table, 7, of_rows)
        model_cpu.cross_entropy_backward(z, total, table, 7, heads * of_rows)
        assert_allclose(losses, expected, rtol=5e-5 if bench.bf16 else 2e-6)                # bf16: the quick exponential
        bench.close(value(logits), z, 1 if bench.bf16 else spread)                    # z - log total cancels


def test_matmul(bench):
    """The three products of linear_forward and linear_backward."""
    for N, I, O in (1, 8, 8), (65, 24, 72), (70, 136, 8):
        x, w, dout, dw = bench.random(N, I), bench.random(O, I), bench.random(N, O), f32(bench.random(O, I))
        out, dx, expected = nan(N, O), nan(N, I), dw + dout.T @ x
        bench("linear_forward", out, x, w)
        bench("linear_backward", dx, dw, dout, x, w)
        bench.close(out, x @ w.T)
        bench.close(dx, dout @ w)
        bench.close(dw, expected)


@parametrize("H, G, D, hidden, first, n, wide", [(1, 1, 32, 8, 0, 1, 5), (2, 1, 32, 4104, 5, 8, 0.1), (7, 1, 128, 24, 1, 3, 0.03), (4, 2, 64, 40, 1061, 5, 0.1)])
def test_decode(bench, H, G, D, hidden, first, n, wide):
    """A layer of n tokens over the KV cache: as if all were read at once."""
    rope, c, w, stored = bench.take(H, G, D, first + n, hidden), bench.config, Arrays(), Arrays()
    for name, shape in model_cpu.param_table(c):
        weight = bench.random(*shape, scale=wide)
        vars(w)[name[9:]] = weight if len(shape) == 2 else f32(1 + weight)
        vars(stored)[name[9:]] = bench.store(vars(w)[name[9:]])
    (saved,), shared = model_cpu.Workspace(c, float).buffers(1, first + n)
    x, cache = bench.random(first + n, c.dim), nan(first + n, 2 * G * D)
    buffers = Arrays(x=bench.store(x[first:]), lengths=bench.store(first + np.arange(n)), qkv=bench.store(nan(n, c.qkv_width)),
                     y=bench.store(nan(n, c.dim)), h=bench.store(nan(n, hidden)))
    model_cpu.block_forward(x, w, saved, shared, c, rope, model_cpu.attention_forward)
    cache[:first] = saved.qkv[:first, c.dim:]
    model_gpu.decode_block(bench, stored, bench.store(cache), buffers, n)
    bench.close(value(buffers.x), x[first:], 4)


@parametrize("vocab, temperature, top_k, top_p", [
    (41, 8, 1, 1), (41, 8, 5, 1), (40, 2, 48, 1), (41, 2, 0, 0.3), (41, 0.01, 0, 1), (41, 4, 9, 0.6), (4100, 0.8, 50, 0.95), (65536, 8, 3, 1)])
def test_draw_equals_sample(bench, vocab, temperature, top_k, top_p):
    """In each way of sampling; of equal logits those of the smallest ids are kept; ids from vocab on, whose logits are the
    largest, are never drawn."""
    logits, ids, t = f32(np.round(bench.random(6, vocab + 7), 1)), bench.store(np.full(6, -1)), 700 + np.arange(3)
    logits[:, vocab:] = 1e5
    drawing, seeds = np.array([temperature, top_p, top_k, vocab], float), np.array([3, 2 ** 64 - 5, 0], np.uint64)
    bench.launch("draw", (3, 2), 1024, ids, bench.store(logits), bench.store(t), drawing, seeds, vocab + 7)
    sampling = model_cpu.Sampling(temperature, top_k, top_p, seeds.repeat(2))
    assert_array_equal(ids, model_cpu.sample(logits[:, :vocab].astype(float), np.add.outer(t, [0, 1]).ravel(), sampling))
