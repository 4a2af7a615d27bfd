"""kernels.cu on the CPU: every kernel against the functions of model_cpu.py that it covers, launched by model_gpu.py where it
has a function for that, at odd shapes, in fp32 and bf16 storage, with threads and blocks in three orders, between guard zones;
and compiled for the GPUs that it is meant for.  AdamW, norm and clipping: test_model_gpu.py, whose whole updates have them."""
import pathlib
import re
import types

import numpy as np
import pytest
from cases import parametrize, rows
from numpy.testing import assert_allclose, assert_array_equal

import model_cpu
import model_gpu
from cuda_helpers import (
    ORDERS, Array, CpuModule, KernelError, check_guards, compile_for_gpu, from_bf16, guarded, skip_unless_known, to_bf16)
from model_cpu import Config

i32, f32 = np.int32, np.float32


class Bench:
    """The kernels in one storage type and one order; arrays in and out as float64."""

    def __init__(self, bf16, order):
        self.bf16, self.module, self.arrays = bf16, CpuModule("kernels.cu", [f"-DBF16={int(bf16)}"]), []
        self.module.order = order
        self.rng = np.random.default_rng(7)
        self.tolerance = 2 ** -8 if bf16 else 2e-6           # of one rounding to storage, or of a few sums in fp32
        self.gpu = types.SimpleNamespace(launch=self.launch, eps=1e-5, cublas=None)

    def put(self, array):
        self.arrays.append(guarded(array).view(Array))
        return self.arrays[-1]

    def real(self, *shape, scale=1.0):
        """Random numbers in storage type, and the same in float64."""
        return self.as_real(scale * self.rng.standard_normal(shape))

    def as_real(self, x):
        stored = to_bf16(x) if self.bf16 else x.astype(f32)
        return self.put(stored), self.value(stored)

    def single(self, *shape, scale=1.0):
        x = (scale * self.rng.standard_normal(shape)).astype(f32)
        return self.put(x), x.astype(np.float64)

    def ints(self, x):
        return self.put(np.ascontiguousarray(x, i32))

    def empty(self, *shape, single=False):
        """An output full of NaN: what a kernel leaves out shows."""
        return self.put(np.full(shape, 0xFFFF, np.uint16) if self.bf16 and not single else np.full(shape, np.nan, f32))

    def value(self, array):
        return (from_bf16(array) if array.dtype == np.uint16 else array).astype(np.float64)

    def launch(self, name, grid, threads, *args, shared=0):
        blocks = grid if isinstance(grid, tuple) else (grid,)
        self.module.get_function(name)(blocks, (threads,), tuple(map(model_gpu.as_argument, args)), shared_mem=shared)

    def close(self, array, expected, tolerance=None):
        """Largest error against the largest value expected."""
        error = np.abs(self.value(array) - expected).max()
        tolerance = tolerance or (self.tolerance if array.dtype == np.uint16 else 2e-6)
        assert error <= tolerance * max(np.abs(expected).max(), 1e-30), error

    def finish(self):
        check_guards(*self.arrays)


@pytest.fixture(params=[(False, ORDERS[0]), (False, ORDERS[1]), (True, ORDERS[0]), (True, ORDERS[2])],
                ids=lambda p: f"{'bf16' if p[0] else 'fp32'}-{p[1][0]}")
def bench(request):
    bench = Bench(*request.param)
    yield bench
    bench.finish()


def test_embedding(bench):
    for N, C, V in [(1, 8, 8), (50, 264, 24), (300, 520, 8)]:
        embed, embed64 = bench.real(V, C)
        tokens = bench.rng.integers(0, max(1, V - 3), N)                 # some ids occur often, some never
        out, expected = bench.empty(N, C), np.zeros((N, C))
        model_gpu.embedding_forward(bench.gpu, out, bench.ints(tokens), embed)
        model_cpu.embedding_forward(expected, tokens, embed64)
        assert_array_equal(bench.value(out), expected)

        dout, dout64 = bench.real(N, C)
        dembed, expected = bench.single(V, C)
        order = np.argsort(tokens, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(tokens, minlength=V))])
        model_gpu.embedding_backward(bench.gpu, dembed, dout, bench.ints(order), bench.ints(starts))
        model_cpu.embedding_backward(expected, dout64, tokens)
        bench.close(dembed, expected)


@parametrize("with_step", [True, False])
def test_rmsnorm_forward(bench, with_step):
    for N, C, scale in [(1, 8, 3.0), (3, 256, 3.0), (7, 264, 3.0), (2, 2056, 1e-3)]:    # eps shows there
        before, x64 = bench.real(N, C, scale=scale)
        step, step64 = bench.real(N, C, scale=scale)
        gain, gain64 = bench.single(C)
        x, out, rstd = bench.empty(N, C) if with_step else before, bench.empty(N, C), bench.empty(N, single=True)
        model_gpu.rmsnorm_forward(bench.gpu, out, rstd, x, gain, before, step if with_step else None)
        if with_step:
            bench.close(x, x64 + step64)
            x64 = bench.value(x)                                         # as stored
        expected, expected_rstd = np.zeros((N, C)), np.zeros(N)
        model_cpu.rmsnorm_forward(expected, expected_rstd, x64, gain64, 1e-5)
        assert_array_equal(bench.value(x), x64)
        bench.close(out, expected)
        bench.close(rstd, expected_rstd)


@parametrize("add", [False, True])
def test_rmsnorm_backward(bench, monkeypatch, add):
    for N, C, blocks in [(1, 8, 4), (9, 264, 4), (70, 72, 33)]:
        monkeypatch.setattr(model_gpu, "NORM_BLOCKS", blocks)
        x, x64 = bench.real(N, C, scale=2.0)
        dout, dout64 = bench.real(N, C)
        dx, dx64 = bench.real(N, C)
        gain, gain64 = bench.single(C)
        dgain, dgain64 = bench.single(C)
        rstd64 = np.zeros(N)
        model_cpu.rmsnorm_forward(np.zeros((N, C)), rstd64, x64, gain64, 1e-5)
        model_gpu.rmsnorm_backward(bench.gpu, dx, dgain, dout, x, bench.put(rstd64.astype(f32)), gain,
                                   bench.empty(blocks, C, single=True), add)
        expected = np.zeros((N, C))
        model_cpu.rmsnorm_backward(expected, dgain64, dout64, x64, rstd64, gain64)
        bench.close(dx, expected + add * dx64)
        assert_array_equal(bench.value(dout), dout64)
        bench.close(dgain, dgain64, 4e-6)


def config_of(heads, kv_heads, D, context):
    return Config(dim=heads * D, heads=heads, kv_heads=kv_heads, layers=1, context=context, vocab=8)


def rope_tables(bench, T, D):
    cos, sin = model_cpu.rope_table(config_of(1, 1, D, T), np.float64)
    return cos, sin, *(bench.put(np.ascontiguousarray(x[:, 0, D // 2:].astype(f32))) for x in (cos, sin))


def test_rope(bench):
    """In place; and with a KV cache, to which k and v go: of the first tokens of texts, or of one behind so many."""
    for B, T, H, G, D, lengths in [(1, 1, 1, 1, 16, None), (2, 37, 4, 2, 64, None), (1, 9, 2, 2, 128, None), (3, 1, 2, 1, 32, [5, 0, 39])]:
        bench.gpu.config = c = config_of(H, G, D, 40)
        cos, sin, bench.gpu.cos, bench.gpu.sin = rope_tables(bench, 40, D)
        qkv, expected = bench.real(B * T, c.qkv_width)
        places = np.arange(B * T) % T if lengths is None else np.array(lengths)
        part = model_cpu.rotated_part(expected.reshape(1, B * T, -1), c)
        model_cpu.rope_forward(part, cos[places], sin[places])
        again, cache = bench.put(qkv), bench.empty(B + 1, 40, 2 * G * D)
        if lengths is None:
            model_gpu.rope_forward(bench.gpu, again, T)
            bench.close(again, expected)
        model_gpu.rope_forward(bench.gpu, qkv, T, cache, None if lengths is None else bench.ints(lengths))
        bench.close(qkv, expected)
        at = np.arange(B * T) // T * 40 + places
        rows = bench.value(cache).reshape(-1, 2 * G * D)
        assert np.array_equal(rows[at], bench.value(qkv)[:, H * D:]) and np.isnan(np.delete(rows, at, axis=0)).all()


def test_swiglu(bench):
    for N, F in [(1, 8), (5, 344), (3, 2056), (1, 16392)]:
        gate_up, gate_up64 = bench.real(N, 2 * F, scale=3.0)
        gate_up[0, :8] = to_bf16(np.full(8, -200.0)) if bench.bf16 else -200.0              # exp(200) overflows fp32
        gate_up64 = bench.value(gate_up)
        out, expected, sigmoid = bench.empty(N, F), np.zeros((N, F)), np.zeros((N, F))
        model_gpu.swiglu_forward(bench.gpu, out, gate_up)
        model_cpu.swiglu_forward(expected, sigmoid, gate_up64)
        bench.close(out, expected)
        dout, dout64 = bench.real(N, F)
        dgate_up = np.zeros((N, 2 * F))
        model_gpu.swiglu_backward(bench.gpu, gate_up, dout)
        model_cpu.swiglu_backward(dgate_up, dout64, sigmoid, gate_up64)
        bench.close(gate_up, dgate_up)
        assert_array_equal(bench.value(dout), dout64)


def test_cross_entropy(bench):
    for B, T, K, V, spread, shift in [(1, 1, 1, 8, 1.0, 0.0), (2, 7, 3, 40, 3.0, 0.0), (2, 3, 2, 4104, 1e4, 0.0),
                                      (1, 2, 2, 24, 1.0, -200.0)]:
        N = B * T
        logits, logits64 = bench.as_real(spread * bench.rng.standard_normal((N, K, V)) + shift)
        targets = bench.rng.integers(-1, V, (B, T + K - 1))
        targets[0, (T + K - 1) // 2] = 0
        targets[0, 0] = V - 1
        targets[-1, -1] = -1
        table, counted = model_cpu.head_targets(targets, T, K), model_cpu.count_targets(targets, T, K)
        heads = 1.0 / np.arange(1, K + 1)
        divisor = np.maximum(counted, 1)
        nll, losses = bench.empty(N, K, single=True), bench.empty(K, single=True)
        bench.gpu.config = types.SimpleNamespace(vocab=V)
        weights = bench.rng.standard_normal(B)
        inputs = model_cpu.Arrays(targets=bench.ints(targets), head_weights=bench.put((heads / divisor).astype(f32)),
                                  divisor=bench.put(divisor.astype(f32)), weights=bench.put(weights.astype(f32)))
        model_gpu.cross_entropy_forward(bench.gpu, losses, nll, logits, inputs, T)
        expected, total, of_rows = np.zeros(K), np.zeros((N, K)), np.repeat(weights, T)[:, None]
        model_cpu.cross_entropy_forward(expected, total, logits64, table, divisor, of_rows)
        model_cpu.cross_entropy_backward(logits64, total, table, divisor, heads * of_rows)
        # bf16: the quick exponential
        assert_allclose(losses, expected, rtol=2e-5 if bench.bf16 else 2e-6, atol=-1e-7 * shift)
        bench.close(logits, logits64, None if bench.bf16 else 2e-6 * max(spread, -shift))    # z - log total cancels
        assert not bench.value(logits)[table < 0].any()


def test_muon(bench, monkeypatch):
    """Two matrices of one shape in each of several layers, with other numbers behind them that no kernel may touch."""
    monkeypatch.setattr(model_gpu, "MATRIX_BLOCKS", 3)
    for L, rows, columns in (1, 8, 8), (3, 16, 24), (2, 64, 40):
        size, n = rows * columns, 2 * L
        stride = 2 * size + 8
        param, grad, m = [bench.single(L * stride, scale=scale)[0] for scale in (1.0, 0.3, 0.1)]
        grad.reshape(L, stride)[0, size:2 * size] = m.reshape(L, stride)[0, size:2 * size] = 0.0    # of nothing, nothing
        copy, state = bench.empty(L * stride), bench.put(np.array([0.0, 0.0, 1.0], f32))
        X, Y, A, B = [bench.empty(n, *shape) for shape in 2 * [(rows, columns)] + 2 * [2 * (min(rows, columns),)]]
        work = model_cpu.Arrays(X=X, Y=Y, A=A, B=B, squares=bench.empty(n, model_gpu.MATRIX_BLOCKS, single=True))

        def update():
            model_gpu.muon_update(bench.gpu, [param, copy, grad, m], (0, size), work, state, 0.5, 0.25, 0.95)
        kept = [array.copy() for array in (param, grad, m)]
        update()                                                        # a norm was not finite: nothing changes
        assert all(map(np.array_equal, kept, (param, grad, m)))
        state[2], expected = 0.0, [bench.value(array).reshape(L, stride) for array in kept]
        update()
        for layer in range(L):
            for i in range(2):
                model_cpu.muon_update(*(x[layer, i * size:][:size].reshape(rows, columns) for x in expected), 0.5, 0.25)
        bench.close(m, expected[2].ravel())
        assert_array_equal(grad, expected[1].ravel())
        bench.close(param, expected[0].ravel(), 0.05 if bench.bf16 else 1e-5)
        copy, param = copy.reshape(L, stride), param.reshape(L, stride)
        if bench.bf16:
            assert_array_equal(copy[:, :2 * size], to_bf16(param[:, :2 * size]))
        assert np.isnan(bench.value(copy[:, 2 * size:])).all()


def test_matmul(bench):
    """The three products of linear_forward and linear_backward, written and added."""
    for N, I, O, add in [(1, 8, 8, False), (65, 24, 72, True), (70, 136, 8, False)]:
        x, x64 = bench.real(N, I)
        w, w64 = bench.real(O, I)
        dout, dout64 = bench.real(N, O)
        out, dx, (dw, dw64) = bench.empty(N, O), bench.empty(N, I), bench.single(O, I)
        if not add:
            dw[...] = np.nan
        model_gpu.linear_forward(bench.gpu, out, x, w)
        model_gpu.linear_backward(bench.gpu, dx, dw, dout, x, w, add)
        bench.close(out, x64 @ w64.T)
        bench.close(dx, dout64 @ w64)
        bench.close(dw, dout64.T @ x64 + (dw64 if add else 0))


def normed(x64, gain64, eps):
    out = np.zeros_like(x64)
    model_cpu.rmsnorm_forward(out, np.zeros(len(x64)), x64, gain64, eps)
    return out


def few_rows(bench, n, C):
    """n rows and a gain: x, gain, and the norm in float64, with an eps that shows."""
    x, x64 = bench.real(n, C)
    gain, gain64 = bench.single(C)
    return x, gain, normed(x64, gain64, 0.25)


WIDTHS = [(1, 8), (3, 264), (8, 776), (5, 4104), (17, 16)]


def test_decode_qkv(bench):
    """The rotation of q and k, v as it is, each row in its place and no other written; rows at once and one by one."""
    shapes = (1, 1, 32), (3, 1, 16), (2, 2, 32), (1, 1, 64), (1, 1, 128)
    for (n, C), (H, G, D), position in zip(WIDTHS, shapes, (0, 5, 1, 100, 2)):
        context, width = position + n + 2, (H + 2 * G) * D
        cos, sin, cos32, sin32 = rope_tables(bench, context, D)
        x, gain, x64 = few_rows(bench, n, C)
        w, w64 = bench.real(width, C, scale=C ** -0.5)
        expected = x64 @ w64.T
        model_cpu.rope_forward(expected.reshape(1, n, -1, D)[:, :, :H + G], cos[position:position + n],
                               sin[position:position + n])
        cache, again = bench.empty(context, 2 * G * D), bench.empty(context, 2 * G * D)

        def project(cache, x, n, position):
            q = bench.empty(n, width)
            bench.launch("decode_qkv", (-(-width // 8), -(-n // 4)), 128, q, cache, x, gain, w, cos32, sin32,
                         bench.ints(position + np.arange(n)), *map(i32, (n, C, H, G, D)), f32(0.25))
            return q
        q = project(cache, x, n, position)
        bench.close(q[:, :H * D], expected[:, :H * D])
        bench.close(cache[position:position + n], expected[:, H * D:])
        assert np.isnan(bench.value(q[:, H * D:])).all()
        assert np.isnan(np.delete(bench.value(cache), np.s_[position:position + n], axis=0)).all()
        for row in range(n):
            assert project(again, x[row], 1, position + row).tobytes() == q[row].tobytes()
        assert again.tobytes() == cache.tobytes()


@parametrize("kernel", ["decode_residual", "decode_swiglu", "decode_logits"])
def test_decode_products(bench, kernel):
    """Of rows at once and one by one: the same bits."""
    for (n, C), O in zip(WIDTHS, (8, 18, 24, 8, 40)):
        x, gain, x64 = few_rows(bench, n, C)
        w, w64 = bench.real(2 * O, C, scale=3 * C ** -0.5)
        out, old = (bench.real if kernel == "decode_residual" else bench.single)(n, O)
        if kernel == "decode_swiglu":
            out, expected = bench.empty(n, O), np.zeros((n, O))
            model_cpu.swiglu_forward(expected, np.zeros((n, O)), x64 @ w64.T)
        elif kernel == "decode_logits":
            expected = x64 @ w64[:O].T
        else:
            expected = old + bench.value(x) @ w64[:O].T
        one = bench.put(out.copy())

        def run(out, x, n):
            groups, sizes = -(-n // 4), [i32(size) for size in (n, C, O)]
            if kernel == "decode_residual":
                bench.launch(kernel, (O // 2, groups), 128, out, x, w, *sizes)
            else:
                bench.launch(kernel, (-(-O // (4 if kernel == "decode_swiglu" else 8)), groups), 128, out, x, gain, w, *sizes, f32(0.25))
        run(out, x, n)
        bench.close(out, expected)
        for row in range(n):
            run(one[row], x[row], 1)
        assert one.tobytes() == out.tobytes()


def attend(bench, qkv, position, n, H, G, D):
    """-> y of decode_attention, for n rows from `position` on of qkv (context, (H+2G)D)."""
    y, q, cache = bench.empty(n, H * D), bench.empty(n, (H + 2 * G) * D), bench.put(qkv[:, H * D:])
    q[:, :H * D] = qkv[position:position + n, :H * D]
    bench.launch("decode_attention", (H, n), 512, y, q, cache, bench.ints(position + np.arange(n)), i32(0),
                 *map(i32, (H, G, D)))
    return y


def test_scores_of_any_size(bench):
    """Scores between -150,000 and 0, in no order, of several rounds of all warps: the query takes the value of the one
    that beats the others, whichever warp has it. Equal scores share."""
    T, D = 2 * 512 + 44, 32
    order = bench.rng.permutation(T)
    values, values64 = bench.real(T, D)

    def answer(column):
        qkv = bench.empty(T + 3, 3 * D)
        qkv[T - 1, :D] = bench.as_real(np.full(D, 600.0 * 44 / T))[0]
        qkv[:T, D:2 * D], qkv[:T, 2 * D:] = bench.as_real(np.repeat(column[:, None], D, axis=1))[0], values
        return attend(bench, qkv, T - 1, 1, 1, 1, D)
    for place in (3, 512 + 37, T - 2):                                   # of the best: in each of the rounds
        column = -np.roll(order, place - order.argmin()) / 8
        bench.close(answer(column)[0], values64[place])
    bench.close(answer(np.full(T, -50.0))[0], values64.mean(axis=0))


def test_decode_attention(bench):
    """Against the last rows of attention_forward: n rows at once and one by one, one round of keys and several."""
    for n, position, H, G, D in [(1, 0, 1, 1, 32), (3, 5, 4, 2, 32), (2, 512 - 1, 3, 1, 64), (1, 2 * 512 + 37, 2, 1, 128)]:
        length, width = position + n, (H + 2 * G) * D
        qkv, again = bench.empty(length + 512 + 1, width), bench.empty(length + 512 + 1, width)     # of NaN
        qkv[:length], qkv64 = bench.real(length, width)
        y = attend(bench, qkv, position, n, H, G, D)
        expected, P = np.empty((1, length, H * D)), np.empty((1, G, H // G, length, length))
        model_cpu.attention_forward(expected, P, qkv64[None], config_of(H, G, D, length))
        bench.close(y, expected[0, position:])
        full = bench.empty(length, width)                                # a cache that has no row more
        full[...] = qkv[:length]
        assert attend(bench, full, position, n, H, G, D).tobytes() == y.tobytes()
        again[:position] = qkv[:position]
        for row in range(n):                                             # what comes after is not there yet
            again[position + row] = qkv[position + row]
            assert attend(bench, again, position + row, 1, H, G, D).tobytes() == y[row].tobytes()


def drawn(bench, logits, vocab, seed, t, temperature=1.0, top_k=0, top_p=1.0):
    """ids (n,heads) and p (n,) by the kernel, the same by sample, both in one check; -> ids."""
    n, heads, V = logits.shape
    ids, p = bench.ints(np.full((n, heads), -1)), bench.empty(n, single=True)
    greedy = temperature == 0
    bench.launch("draw", (n, heads), 1024, ids, p, bench.put(logits), bench.ints(t + np.arange(n)),
                 bench.put(np.array([temperature or 1.0, top_p, 1 if greedy else top_k, vocab])),
                 bench.put(np.full(n, seed, np.uint64)), i32(V))
    z = logits[..., :vocab].astype(np.float64)
    at = t + np.add.outer(np.arange(n), np.arange(heads)).reshape(-1)
    expected = model_cpu.sample(z.reshape(n * heads, -1), at, model_cpu.Sampling(temperature, top_k, top_p, seed))
    assert_array_equal(ids.reshape(-1), expected)
    first = np.exp(z[:, 0] - z[:, 0].max(axis=1, keepdims=True))
    assert_allclose(p, first[np.arange(n), ids[:, 0]] / first.sum(axis=1), rtol=1e-5)
    return ids


def test_draw_equals_sample(bench):
    """In each way of sampling; ids at and above vocab, whose logits are the largest, are never drawn."""
    # n, heads, V, vocab, top_k | spread, temperature, top_p; with 4104 several logits of each thread stay
    for sizes, numbers in rows("""
            1 1    8    8    0 | 1  0   1
            3 2   48   41    0 | 1  0   0.5
            3 4   48   41    0 | 2  1   1
            2 3 1100 1031    0 | 2  1.5 1
            2 2   48   41    5 | 1  8   1
            1 2 1100 1100   40 | 4  3   1
            1 2   48   40   40 | 1  1   1
            2 2   48   41    0 | 1  2   0.3
            3 2   48   41    9 | 1  4   0.6
            2 1   48   41    0 | 3  1   0.0001
            4 3   48   40    3 | 1  3   0.999999999
            2 2 4104 4100   50 | 6  0.8 0.95
            3 2 4104 4100    0 | 1  0   1
            2 2 4104 4100 2000 | 1  4   1"""):
        n, heads, V, vocab, top_k = map(int, sizes.split())
        spread, *options = map(float, numbers.split())
        options.insert(1, top_k)
        logits = (spread * bench.rng.standard_normal((n, heads, V))).astype(f32)
        logits[..., vocab:] = 100.0
        seed, t = 2 ** 64 - int(bench.rng.integers(1, 2 ** 63)), int(bench.rng.integers(3000))
        assert (drawn(bench, logits, vocab, seed, t, *options) < vocab).all()


def test_draw_counts_each_logit_once(bench):
    """One id has half of all weight, and more than half is asked for."""
    logits = 0.1 * bench.rng.standard_normal((3, 8, 1104)).astype(f32)
    logits[..., 1023] = 7                                               # the logarithm of 1104
    assert len({*drawn(bench, logits, 1104, 5, 9, top_p=0.6).flat}) > 1


def test_draw_of_equal_logits(bench):
    """The smallest ids stay, and not only one of them is drawn."""
    same = np.full((4, 2, 40), -3.5, f32)
    for options, most in ((dict(top_k=2), 2), (dict(top_k=3), 3), (dict(top_p=0.1), 4)):
        assert 1 < len({*drawn(bench, same, 39, 12, 700, **options).flat}) <= most
    steps = np.repeat(np.arange(10, dtype=f32), 4)[None, None] * np.ones((2, 2, 1), f32)    # of four equals each
    assert {*drawn(bench, steps, 40, 3, 5, temperature=50.0, top_k=6).flat} <= {36, 37, 38, 39, 32, 33}


def test_the_nucleus_to_a_thousandth_of_an_id(bench):
    """One id of weight 1 and 39 of 1/e: 30 of these reach top_p, or just not; the noise at t would draw the 31st."""
    logits, weight = np.full((1, 1, 40), -1.0, f32), np.exp(-1.0)
    logits[..., 0] = 0.0

    def top_p(ids):
        return (1 + ids * weight) / (1 + 39 * weight)
    t = next(t for t in range(1000) if model_cpu.sample(logits[0], np.array([t]), model_cpu.Sampling(1.0, 0, top_p(30.5), 5)) == 31)
    assert drawn(bench, logits, 40, 5, t, top_p=top_p(30.001)) == 31 != drawn(bench, logits, 40, 5, t, top_p=top_p(29.999))


def test_draw_of_the_largest_ids(bench):
    """All 16 bits of an id, also where one of them is the last that top_k keeps."""
    logits = np.zeros((1, 3, 65536), f32)
    logits[0, [0, 1, 2], [65535, 40000, 32768]] = 40.0
    assert drawn(bench, logits, 65536, 5, 9, top_k=2, temperature=8.0)[0, 0] == 65535


def test_what_is_impossible_is_not_drawn(bench):
    """Logits of minus infinity, and those far below the others."""
    logits = np.full((3, 2, 40), -np.inf, f32)
    logits[..., [3, 17, 31]] = bench.rng.standard_normal((3, 2, 3))
    for options in (dict(temperature=100.0), dict(top_k=20, top_p=0.999), dict(temperature=0)):
        assert {*drawn(bench, logits, 40, 5, 9, **options).flat} <= {3, 17, 31}
    drawn(bench, (1e4 * bench.rng.standard_normal((3, 2, 40))).astype(f32), 40, 6, 9, temperature=0.01)


def test_a_write_past_an_array_in_shared_memory_is_seen(tmp_path):
    """Behind a pointer the compiler's own check does not see it."""
    (tmp_path / "try.cu").write_text("""
        template <class T> __device__ T fill(T* slots) { slots[threadIdx.x] = 1; return slots[0]; }
        extern "C" __global__ void kernel(float* out) {
            __shared__ float before[32], slots[2][32], after[32];
            before[threadIdx.x % 32] = after[threadIdx.x % 32] = 0;
            *out = fill(slots[0]) + sizeof(slots) / 128;
        }""")
    kernel, out = CpuModule(str(tmp_path / "try.cu")).get_function("kernel"), np.zeros(1, f32)
    kernel((1,), (64,), (out,))
    assert out == 3
    with pytest.raises(KernelError, match="a write past an array in shared memory"):
        kernel((1,), (65,), (out,))


def test_every_kernel_that_starts_early_waits_before_it_reads():
    """No CPU can tell: without await_last a kernel would read what the one before it has yet to write."""
    launches, kernels = [(pathlib.Path(model_gpu.__file__).parent / name).read_text() for name in ("model_gpu.py", "kernels.cu")]
    early = set(re.findall(r'launch_early\("(\w+)"', launches))
    reads = {**dict.fromkeys(early, "two_products("), "products_of_rows": "load8(of.x ", "decode_attention": "load_packed(", "draw": "order_key("}
    assert len(early) == 6
    for name, first in reads.items():
        before, found, _ = re.search(rf"\b{name}\([^;{{}}]*\) {{\n(.*?)\n}}\n", kernels, re.DOTALL)[1].partition(first)
        assert found and (first == "two_products(" or "await_last();" in before), name


ROW_KERNELS = "embedding_forward", "rmsnorm_forward", "rmsnorm_backward"


@parametrize("arch, bf16, threads", [
    ("sm_70", 0, 1024), ("sm_80", 1, 1024), ("sm_90", 1, 96), ("sm_120", 1, 96),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("sm_75", 0, 1024), ("sm_80", 0, 96), ("sm_89", 1, 96), ("sm_90", 0, 1024), ("sm_100", 1, 1024)))])
def test_compiles_for_gpus(arch, bf16, threads):
    """threads: of a block that owns a row, those of big and of the widest that there may be."""
    skip_unless_known(arch)
    kernels = compile_for_gpu("kernels.cu", arch, [f"-DBF16={bf16}", f"-DROW_THREADS={threads}"])
    for name, used in kernels.items():
        print(f"{arch} BF16={bf16} {name:20} {used.registers:4} registers, {used.shared_bytes:6} bytes shared, "
              f"{used.spill_bytes} spilled")
        # ptxas of CUDA 13 holds back for sm_80 a register that the readable product would like
        most = 8 if name == "matmul" else 128 if (name, threads) == ("rmsnorm_backward", 1024) else 0
        assert used.spill_bytes <= most and used.stack_bytes <= most, name
        # a multiprocessor has 65,536 registers and gives them out by eights
        assert name not in ROW_KERNELS or -(-used.registers // 8) * 8 * threads <= 1 << 16, name
