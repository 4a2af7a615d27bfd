"""kernels.cu on the CPU: every kernel against the functions of model_cpu.py that it covers, at odd shapes, in fp32
and bf16 storage, with threads and blocks in three orders, between guard zones; and compiled for the GPUs that it is
meant for."""
import os
import sys

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]
import model_cpu
from cuda_helpers import (
    ORDERS, CpuModule, KernelError, check_guards, compile_for_gpu, from_bf16, guarded, skip_unless_known, to_bf16)

i32, i64, f32 = np.int32, np.int64, np.float32
NULL = np.uint64(0)


class Bench:
    """The kernels in one storage type and one order; arrays in and out as float64."""

    def __init__(self, bf16, order):
        self.bf16, self.module, self.arrays = bf16, CpuModule("kernels.cu", [f"-DBF16={int(bf16)}"]), []
        self.module.order = order
        self.rng = np.random.default_rng(7)
        self.tolerance = 2 ** -8 if bf16 else 2e-6           # of one rounding to storage, or of a few sums in fp32

    def put(self, array):
        self.arrays.append(guarded(array))
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
        self.module.get_function(name)(grid, (threads,), args, shared_mem=shared)

    def close(self, array, expected, tolerance=None):
        """Largest error against the largest value expected."""
        error = np.abs(self.value(array) - expected).max()
        tolerance = tolerance or (self.tolerance if array.dtype == np.uint16 else 2e-6)
        assert error <= tolerance * max(np.abs(expected).max(), 1e-30), error

    def finish(self):
        check_guards(*self.arrays)


@pytest.fixture(params=[(bf16, order) for bf16 in (False, True) for order in ORDERS],
                ids=lambda p: f"{'bf16' if p[0] else 'fp32'}-{p[1][0]}")
def bench(request):
    bench = Bench(*request.param)
    yield bench
    bench.finish()


def threads(C):
    return -(-C // 256) * 32


def test_embedding(bench):
    for N, C, V in [(1, 8, 8), (37, 72, 16), (50, 264, 24), (300, 520, 8)]:
        embed, embed64 = bench.real(V, C)
        tokens = bench.rng.integers(0, max(1, V - 3), N)                 # some ids occur often, some never
        out, expected = bench.empty(N, C), np.zeros((N, C))
        bench.launch("embedding_forward", (N,), threads(C), out, bench.ints(tokens), embed, i32(C))
        model_cpu.embedding_forward(expected, tokens, embed64)
        np.testing.assert_array_equal(bench.value(out), expected)

        dout, dout64 = bench.real(N, C)
        dembed, expected = bench.single(V, C)
        order = np.argsort(tokens, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(tokens, minlength=V))])
        bench.launch("embedding_backward", (V, -(-C // 256)), 256, dembed, dout, bench.ints(order), bench.ints(starts),
                     i32(C))
        model_cpu.embedding_backward(expected, dout64, tokens)
        bench.close(dembed, expected)


@pytest.mark.parametrize("with_step", [True, False])
def test_rmsnorm_forward(bench, with_step):
    for N, C, scale in [(1, 8, 3.0), (3, 256, 3.0), (7, 264, 3.0), (5, 776, 3.0), (2, 2056, 1e-3)]:    # eps shows there
        before, x64 = bench.real(N, C, scale=scale)
        step, step64 = bench.real(N, C, scale=scale)
        gain, gain64 = bench.single(C)
        x, out, rstd = bench.empty(N, C) if with_step else before, bench.empty(N, C), bench.empty(N, single=True)
        bench.launch("rmsnorm_forward", (N,), threads(C), out, rstd, x, before, step if with_step else NULL, gain,
                     i32(C), f32(1e-5))
        if with_step:
            bench.close(x, x64 + step64)
            x64 = bench.value(x)                                         # as stored
        expected, expected_rstd = np.zeros((N, C)), np.zeros(N)
        model_cpu.rmsnorm_forward(expected, expected_rstd, x64, gain64, 1e-5)
        np.testing.assert_array_equal(bench.value(x), x64)
        bench.close(out, expected)
        bench.close(rstd, expected_rstd)


@pytest.mark.parametrize("add", [0, 1])
def test_rmsnorm_backward(bench, add):
    for N, C, blocks in [(1, 8, 1), (9, 264, 4), (70, 72, 33), (5, 776, 7)]:
        x, x64 = bench.real(N, C, scale=2.0)
        dout, dout64 = bench.real(N, C)
        dx, dx64 = bench.real(N, C)
        gain, gain64 = bench.single(C)
        dgain, dgain64 = bench.single(C)
        rstd64 = np.zeros(N)
        model_cpu.rmsnorm_forward(np.zeros((N, C)), rstd64, x64, gain64, 1e-5)
        partial = bench.empty(blocks, C, single=True)
        bench.launch("rmsnorm_backward", (blocks,), threads(C), dx, dout, partial, x, bench.put(rstd64.astype(f32)),
                     gain, i32(N), i32(C), i32(add))
        bench.launch("column_sum", (-(-C // 32),), 1024, dgain, partial, i32(blocks), i32(C))
        expected = np.zeros((N, C))
        model_cpu.rmsnorm_backward(expected, dgain64, dout64, x64, rstd64, gain64)
        bench.close(dx, expected + add * dx64)
        np.testing.assert_array_equal(bench.value(dout), dout64)
        bench.close(dgain, dgain64, 4e-6)


def rope_tables(bench, T, D):
    config = model_cpu.Config(dim=D, heads=1, kv_heads=1, layers=1, context=T, vocab=8)
    cos, sin = model_cpu.rope_table(config, np.float64)
    return cos, sin, *(bench.put(np.ascontiguousarray(x[:, 0, D // 2:].astype(f32))) for x in (cos, sin))


def test_rope(bench):
    for B, T, H, G, D in [(1, 1, 1, 1, 16), (2, 5, 3, 1, 32), (2, 37, 4, 2, 64), (1, 9, 2, 2, 128), (1, 3, 2, 1, 256)]:
        cos, sin, cos32, sin32 = rope_tables(bench, 40, D)
        width = (H + 2 * G) * D
        qkv, expected = bench.real(B * T, width)
        bench.launch("rope", (-(-B * T * (H + G) * D // 16 // 256),), 256, qkv, cos32, sin32,
                     *map(i32, (B * T, T, H + G, D, width)))
        model_cpu.rope_forward(expected.reshape(B, T, -1, D)[:, :, :H + G], cos[:T], sin[:T])
        bench.close(qkv, expected)


def test_swiglu(bench):
    for N, F in [(1, 8), (5, 344), (3, 2056)]:
        gate_up, gate_up64 = bench.real(N, 2 * F, scale=3.0)
        gate_up[0, :8] = to_bf16(np.full(8, -200.0)) if bench.bf16 else -200.0              # exp(200) overflows fp32
        gate_up64 = bench.value(gate_up)
        out, expected, sigmoid = bench.empty(N, F), np.zeros((N, F)), np.zeros((N, F))
        bench.launch("swiglu_forward", (N, -(-F // 2048)), 256, out, gate_up, i32(F))
        model_cpu.swiglu_forward(expected, sigmoid, gate_up64)
        bench.close(out, expected)
        dout, dout64 = bench.real(N, F)
        dgate_up = np.zeros((N, 2 * F))
        bench.launch("swiglu_backward", (N, -(-F // 2048)), 256, gate_up, dout, i32(F))
        model_cpu.swiglu_backward(dgate_up, dout64, sigmoid, gate_up64)
        bench.close(gate_up, dgate_up)
        np.testing.assert_array_equal(bench.value(dout), dout64)


def test_cross_entropy(bench):
    for B, T, K, V, spread, shift in [(1, 1, 1, 8, 1.0, 0.0), (2, 7, 3, 40, 3.0, 0.0), (1, 5, 4, 2056, 30.0, 0.0),
                                      (2, 3, 2, 4104, 1e4, 0.0), (1, 2, 2, 24, 1.0, -200.0)]:
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
        bench.launch("cross_entropy", (N * K,), 128, logits, nll, bench.ints(targets),
                     bench.put((heads / divisor).astype(f32)), i32(T), i32(K), i32(V))
        bench.launch("cross_entropy_sum", (K,), 1024, losses, nll, bench.put(divisor.astype(f32)), i32(N), i32(K))
        expected, total = np.zeros(K), np.zeros((N, K))
        model_cpu.cross_entropy_forward(expected, total, logits64, table, divisor)
        model_cpu.cross_entropy_backward(logits64, total, table, divisor, heads)
        # bf16: the quick exponential
        np.testing.assert_allclose(losses, expected, rtol=2e-5 if bench.bf16 else 2e-6, atol=-1e-7 * shift)
        bench.close(logits, logits64, None if bench.bf16 else 2e-6 * max(spread, -shift))    # z - log total cancels
        assert not bench.value(logits)[table < 0].any()


def test_the_norm_of_a_part_clips_and_the_norm_of_all_is_said(bench):
    partial, state = bench.put(bench.rng.random(3000).astype(f32)), bench.put(np.zeros(3, f32))
    for clipped, blocks in ((5, 7), (0, 3), (1024, 3000), (1500, 1500), (2999, 3000)):
        bench.launch("gradient_norm", (1,), 1024, state, partial, i32(clipped), i32(blocks), f32(0.25))
        part, norm = np.sqrt(partial[:clipped].sum(dtype=np.float64)), np.sqrt(partial[:blocks].sum(dtype=np.float64))
        np.testing.assert_allclose(state, [norm, min(1.0, 0.25 / (part + 1e-6)), 0.0], rtol=1e-6)
    partial[1234] = np.inf
    bench.launch("gradient_norm", (1,), 1024, state, partial, i32(1000), i32(1500), f32(0.25))
    assert state[2] == 1.0 and state[1] > 0


def test_muon_between_the_products(bench):
    """Matrices of one kind in several layers, with other things between them that no kernel may touch."""
    for layers, rows, columns, stride, blocks in [(1, 8, 8, 64, 1), (3, 16, 24, 400, 2), (2, 40, 64, 2576, 3)]:
        size, whole = rows * columns, (layers - 1) * stride + rows * columns
        place = np.add.outer(np.arange(layers) * stride, np.arange(size)).reshape(layers, rows, columns)
        sizes, momentum = (i64(stride), i32(size)), f32(0.75)
        m, m64 = bench.single(whole, scale=0.1)
        grad, grad64 = bench.single(whole, scale=0.3)
        param, param64 = bench.single(whole)
        copy, X, squares = bench.empty(whole), bench.empty(layers, rows, columns), bench.empty(layers, blocks, single=True)
        state = bench.put(np.array([0.0, 0.0, 1.0], f32))               # a norm was not finite: nothing changes
        kept = [array.copy() for array in (m, grad, param, X)]
        bench.launch("muon_momentum", (blocks, layers), 256, squares, m, grad, state, *sizes, momentum)
        bench.launch("muon_input", (blocks, layers), 256, X, grad, m, squares, state, *sizes, momentum)
        bench.launch("muon_apply", (-(-size // 2048), layers), 256, param, copy, X, state, *sizes, f32(0.5), f32(0.5))
        assert all(np.array_equal(a, b, equal_nan=a.dtype == f32) for a, b in zip(kept, (m, grad, param, X)))

        state[2] = 0.0
        bench.launch("muon_momentum", (blocks, layers), 256, squares, m, grad, state, *sizes, momentum)
        bench.launch("muon_input", (blocks, layers), 256, X, grad, m, squares, state, *sizes, momentum)
        m64[place] = 0.75 * m64[place] + 0.25 * grad64[place]
        u = 0.75 * m64[place] + 0.25 * grad64[place]
        grad64[place] = 0.0
        bench.close(m, m64)
        np.testing.assert_array_equal(bench.value(grad), grad64)
        bench.close(squares.sum(axis=1), (u ** 2).sum(axis=(1, 2)))
        bench.close(X, u / (np.linalg.norm(u, axis=(1, 2))[:, None, None] + 1e-7))

        bench.launch("muon_apply", (-(-size // 2048), layers), 256, param, copy, X, state, *sizes, f32(0.875), f32(0.5))
        param64[place] = 0.875 * param64[place] - 0.5 * bench.value(X)
        bench.close(param, param64)
        if bench.bf16:
            np.testing.assert_array_equal(copy[place], to_bf16(param[place]))
        beside = np.delete(np.arange(whole), place)
        assert np.isnan(bench.value(copy)[beside]).all()


def test_muon_of_nothing_is_nothing(bench):
    """Where all gradients were 0 so far: no division by 0."""
    zeros, squares, state = [bench.put(np.zeros(64, f32)) for _ in range(2)], bench.empty(1, single=True), bench.put(np.zeros(3, f32))
    X = bench.empty(64)
    bench.launch("muon_momentum", (1, 1), 256, squares, *zeros, state, i64(64), i32(64), f32(0.95))
    bench.launch("muon_input", (1, 1), 256, X, zeros[1], zeros[0], squares, state, i64(64), i32(64), f32(0.95))
    assert not bench.value(X).any() and not squares.any()


def test_the_polynomial_of_muon(bench):
    for n, side in (1, 8), (3, 24), (2, 64):
        A, A64 = bench.real(n, side, side)
        B, B64 = bench.real(n, side, side)
        bench.launch("muon_polynomial", (-(-side * side // 2048), n), 256, B, A, i32(side), f32(3.5), f32(-4.75), f32(2.0))
        bench.close(B, 3.5 * np.eye(side) - 4.75 * A64 + 2.0 * B64)


def test_gradient_norm_and_adamw(bench):
    for n, decayed, clip in [(8, 8, 0.25), (1000, 800, 100.0), (40008, 40000, 0.25)]:
        param, param64 = bench.single(n)
        grad, grad64 = bench.single(n, scale=0.3)
        m, m64 = bench.single(n, scale=0.1)
        v64 = bench.rng.random(n).astype(f32).astype(np.float64)
        v, copy, state = bench.put(v64.astype(f32)), bench.empty(n), bench.put(np.zeros(3, f32))
        partial = bench.empty(5, single=True)
        setting = dict(step=3, lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8)
        scalars = [f32(setting[name]) for name in ("lr", "beta1", "beta2", "eps")] + [
            f32(0.1), f32(1 / (1 - 0.9 ** 3)), f32(1 / (1 - 0.95 ** 3))]

        def update():
            bench.launch("sum_of_squares", (5,), 256, partial, grad, i64(n))
            bench.launch("gradient_norm", (1,), 1024, state, partial, i32(5), i32(5), f32(clip))
            for part, decay in ((np.s_[:decayed], 0.1), (np.s_[decayed:], 0.0)):
                size = len(param[part])
                if size:
                    scalars[4] = f32(decay)
                    bench.launch("adamw", (-(-size // 2048),), 256, *(x[part] for x in (param, copy, grad, m, v)),
                                 state, i64(size), *scalars)

        update()
        norm = np.linalg.norm(grad64)
        np.testing.assert_allclose(state, [norm, min(1.0, clip / (norm + 1e-6)), 0.0], rtol=1e-6)
        grad64 *= min(1.0, clip / (norm + 1e-6))
        for part, decay in ((np.s_[:decayed], 0.1), (np.s_[decayed:], 0.0)):
            model_cpu.adamw_update(param64[part], grad64[part], m64[part], v64[part], decay=decay, **setting)
        bench.close(param, param64)
        bench.close(m, m64)
        bench.close(v, v64)
        np.testing.assert_array_equal(grad, 0)
        if bench.bf16:
            np.testing.assert_array_equal(copy, to_bf16(param))
        before = param.copy()
        for bad, steps in ((np.nan, 1), (np.inf, 1), (1.0, 2)):           # once not finite, never again
            grad[...] = bad
            state[2] = 0.0 if bad != 1.0 else state[2]
            for _ in range(steps):
                update()
            assert state[2] == 1.0
            np.testing.assert_array_equal(param, before)
            assert np.array_equal(grad, np.full(n, bad, f32), equal_nan=True)


def test_copy_weights(bench):
    for n in (8, 2048, 2056):
        param, param64 = bench.single(n)
        copy = bench.empty(n)
        bench.launch("copy_weights", (-(-n // 2048),), 256, copy, param, i64(n))
        np.testing.assert_array_equal(copy, to_bf16(param) if bench.bf16 else param)


@pytest.mark.parametrize("layout", ["forward", "input", "weight"])
def test_matmul(bench, layout):
    """The three products of linear_forward and linear_backward, written and added."""
    for N, I, O, add in [(1, 8, 8, 0), (65, 24, 72, 1), (70, 136, 8, 0), (37, 16, 40, 1)]:
        x, x64 = bench.real(N, I)
        w, w64 = bench.real(O, I)
        dout, dout64 = bench.real(N, O)
        a, b, expected, sizes, strides = {
            "forward": (x, w, x64 @ w64.T, (N, O, I), (I, 1, 1, I)),
            "input": (dout, w, dout64 @ w64, (N, I, O), (O, 1, I, 1)),
            "weight": (dout, x, dout64.T @ x64, (O, I, N), (1, O, I, 1))}[layout]
        for single in (1,) if add else (0, 1):                           # what is real is never added to
            out, old = (bench.single if single else bench.real)(*expected.shape)
            if not add:
                out[...] = np.full_like(out, 0xFFFF if out.dtype == np.uint16 else np.nan)
            M, K = sizes[0], sizes[1]
            bench.launch("matmul", (-(-K // 64), -(-M // 64)), 256, out, a, b,
                         *map(i32, (*sizes, *strides, sizes[1], add, single)))
            bench.close(out, expected + (old if add else 0))


def normed(x64, gain64, eps):
    out = np.zeros_like(x64)
    model_cpu.rmsnorm_forward(out, np.zeros(len(x64)), x64, gain64, eps)
    return out


def few_rows(bench, n, C):
    """n rows and a gain: x, gain, and the norm in float64, with an eps that shows."""
    x, x64 = bench.real(n, C)
    gain, gain64 = bench.single(C)
    return x, gain, normed(x64, gain64, 0.25)


WIDTHS = [(1, 8), (3, 264), (8, 776), (11, 1032), (5, 4104), (17, 16)]


def test_decode_qkv(bench):
    """The rotation of q and k, v as it is, each row in its place and no other written; rows at once and one by one."""
    shapes = (1, 1, 32), (3, 1, 16), (2, 2, 32), (1, 1, 64), (2, 1, 32), (1, 1, 128)
    for (n, C), (H, G, D), position in zip(WIDTHS, shapes, (0, 5, 1, 30, 100, 2)):
        context, width = position + n + 2, (H + 2 * G) * D
        cos, sin, cos32, sin32 = rope_tables(bench, context, D)
        x, gain, x64 = few_rows(bench, n, C)
        w, w64 = bench.real(width, C, scale=C ** -0.5)
        expected = x64 @ w64.T
        model_cpu.rope_forward(expected.reshape(1, n, -1, D)[:, :, :H + G], cos[position:position + n],
                               sin[position:position + n])
        qkv, again = bench.empty(context, width), bench.empty(context, width)

        def project(qkv, x, n, position):
            bench.launch("decode_qkv", (-(-width // 8), -(-n // 4)), 128, qkv, x, gain, w, cos32, sin32,
                         bench.ints([position, -1, -1, -1]), *map(i32, (n, C, H + 2 * G, H + G, D)), f32(0.25))
        project(qkv, x, n, position)
        bench.close(qkv[position:position + n], expected)
        assert np.isnan(np.delete(bench.value(qkv), np.s_[position:position + n], axis=0)).all()
        for row in range(n):
            project(again, x[row], 1, position + row)
        assert again.tobytes() == qkv.tobytes()


def test_decode_residual(bench):
    for (n, I), O in zip([*WIDTHS, (2, 72)], (8, 16, 24, 8, 8, 2, 6)):
        y, y64 = bench.real(n, I)
        w, w64 = bench.real(O, I, scale=I ** -0.5)
        x, x64 = bench.real(n, O)
        one = bench.put(x.copy())
        bench.launch("decode_residual", (O // 2, -(-n // 4)), 128, x, y, w, *map(i32, (n, I, O)))
        bench.close(x, x64 + y64 @ w64.T)
        for row in range(n):
            bench.launch("decode_residual", (O // 2, 1), 128, one[row], y[row], w, *map(i32, (1, I, O)))
        assert one.tobytes() == x.tobytes()


def test_decode_swiglu(bench):
    for (n, C), F in zip(WIDTHS, (8, 18, 24, 8, 13, 40)):
        x, gain, x64 = few_rows(bench, n, C)
        w, w64 = bench.real(2 * F, C, scale=3 * C ** -0.5)
        h, one = bench.empty(n, F), bench.empty(n, F)
        expected, gate_up = np.zeros((n, F)), x64 @ w64.T
        model_cpu.swiglu_forward(expected, np.zeros((n, F)), gate_up)

        def multiply(h, x, n):
            bench.launch("decode_swiglu", (-(-F // 4), -(-n // 4)), 128, h, x, gain, w, *map(i32, (n, C, F)), f32(0.25))
        multiply(h, x, n)
        bench.close(h, expected)
        for row in range(n):
            multiply(one[row], x[row], 1)
        assert one.tobytes() == h.tobytes()


def test_decode_logits(bench):
    for (n, C), O in zip(WIDTHS, (8, 24, 10, 16, 8, 48)):
        x, gain, x64 = few_rows(bench, n, C)
        w, w64 = bench.real(O, C, scale=C ** -0.5)
        logits, one = bench.empty(n, O, single=True), bench.empty(n, O, single=True)

        def look(logits, x, n):
            bench.launch("decode_logits", (-(-O // 8), -(-n // 4)), 128, logits, x, gain, w, *map(i32, (n, C, O)),
                         f32(0.25))
        look(logits, x, n)
        bench.close(logits, x64 @ w64.T)
        for row in range(n):
            look(one[row], x[row], 1)
        assert one.tobytes() == logits.tobytes()


def attend(bench, qkv, position, n, H, G, D):
    """-> y of decode_attention, for n rows from `position` on of qkv (context, (H+2G)D)."""
    y = bench.empty(n, H * D)
    bench.launch("decode_attention", (H, n), 512, y, qkv, bench.ints([position, -1, -1, -1]), *map(i32, (H, G, D)))
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
    """Against attention_forward as Decoder.extend calls it: n rows at once and one by one, one round of keys and
    several."""
    for n, position, H, G, D in [(1, 0, 1, 1, 32), (3, 5, 4, 2, 32), (2, 512 - 1, 3, 1, 64), (5, 2, 2, 2, 128),
                                 (1, 2 * 512 + 37, 2, 1, 128), (2, 2 * 512 - 2, 1, 1, 32)]:
        length, width = position + n, (H + 2 * G) * D
        qkv, again = bench.empty(length + 512 + 1, width), bench.empty(length + 512 + 1, width)     # of NaN
        qkv[:length], qkv64 = bench.real(length, width)
        y = attend(bench, qkv, position, n, H, G, D)
        q = qkv64[position:, :H * D].reshape(n, G, H // G, D).transpose(1, 2, 0, 3)         # (G,R,n,D)
        keys, values = qkv64[:, H * D:].reshape(length, 2, G, D).transpose(1, 2, 0, 3)
        S = q @ keys[:, None].swapaxes(-1, -2) * D ** -0.5
        S[..., np.arange(length) > np.arange(position, length)[:, None]] = -np.inf
        P = np.exp(S - S.max(axis=-1, keepdims=True))
        expected = P / P.sum(axis=-1, keepdims=True) @ values[:, None]
        bench.close(y, expected.transpose(2, 0, 1, 3).reshape(n, -1))
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
    bench.launch("draw", (n, heads), 1024, ids, p, bench.put(logits),
                 bench.ints([-1, t, 1 if greedy else top_k, vocab]), bench.put(np.array([temperature or 1.0, top_p])),
                 bench.put(np.array([seed], np.uint64)), i32(V))
    z = logits[..., :vocab].astype(np.float64)
    at = t + np.add.outer(np.arange(n), np.arange(heads)).reshape(-1)
    expected = model_cpu.sample(z.reshape(n * heads, -1), seed, at, temperature, top_k, top_p)
    np.testing.assert_array_equal(ids.reshape(-1), expected)
    first = np.exp(z[:, 0] - z[:, 0].max(axis=1, keepdims=True))
    np.testing.assert_allclose(p, first[np.arange(n), ids[:, 0]] / first.sum(axis=1), rtol=1e-5)
    return ids


def test_draw_equals_sample(bench):
    """In each way of sampling; ids at and above vocab, whose logits are the largest, are never drawn."""
    for n, heads, V, vocab, spread, options in [
            (1, 1, 8, 8, 1.0, dict(temperature=0)), (3, 2, 48, 41, 1.0, dict(temperature=0, top_p=0.5)),
            (3, 4, 48, 41, 2.0, dict()), (2, 3, 1100, 1031, 2.0, dict(temperature=1.5)),
            (5, 1, 48, 48, 3.0, dict(temperature=0.3)), (2, 2, 48, 41, 1.0, dict(temperature=8.0, top_k=5)),
            (1, 2, 1100, 1100, 4.0, dict(temperature=3.0, top_k=40)), (2, 2, 48, 40, 1.0, dict(top_k=47)),
            (1, 2, 48, 40, 1.0, dict(top_k=40)), (2, 1, 48, 40, 1.0, dict(top_k=1)),
            (2, 2, 48, 41, 1.0, dict(temperature=2.0, top_p=0.3)), (1, 3, 1100, 1031, 2.0, dict(top_p=0.9)),
            (3, 2, 48, 41, 1.0, dict(temperature=4.0, top_k=9, top_p=0.6)), (2, 1, 48, 41, 3.0, dict(top_p=1e-4)),
            (4, 3, 48, 40, 1.0, dict(temperature=3.0, top_k=3, top_p=1 - 1e-9)),       # 1 in fp32
            (1, 1, 8, 1, 3.0, dict(top_p=0.5)), (2, 2, 4104, 4100, 6.0, dict(temperature=0.8, top_k=50, top_p=0.95)),
            (3, 2, 4104, 4100, 1.0, dict(temperature=0)),                              # several of each thread stay
            (2, 2, 4104, 4100, 1.0, dict(temperature=4.0, top_k=2000)),
            (2, 2, 4104, 4100, 1.0, dict(temperature=2.0, top_p=0.4))]:
        logits = (spread * bench.rng.standard_normal((n, heads, V))).astype(f32)
        logits[..., vocab:] = 100.0
        seed, t = int(bench.rng.integers(2 ** 63)), int(bench.rng.integers(3000))
        assert (drawn(bench, logits, vocab, seed, t, **options) < vocab).all()


def test_draw_of_equal_logits(bench):
    """The smallest ids stay, and not only one of them is drawn."""
    same = np.full((4, 2, 40), -3.5, f32)
    for options, most in ((dict(top_k=3), 3), (dict(top_p=0.1), 4), (dict(temperature=0), 1)):
        seen = {*drawn(bench, same, 39, 12, 700, **options).flat}
        assert seen <= set(range(most)) and (len(seen) > 1) == (most > 1), options
    steps = np.repeat(np.arange(10, dtype=f32), 4)[None, None] * np.ones((2, 2, 1), f32)    # of four equals each
    assert {*drawn(bench, steps, 40, 3, 5, temperature=50.0, top_k=6).flat} <= {36, 37, 38, 39, 32, 33}


def test_draw_with_the_noise_of_each_position(bench):
    """Head k after row r has that of t + r + k: the same logits give the same id there; seeds of 64 bits."""
    logits = np.zeros((4, 3, 64), f32) + bench.rng.standard_normal(64).astype(f32)
    for seed in (0, 1, 2 ** 63, 2 ** 64 - 1, 2 ** 64 - 3):
        ids = drawn(bench, logits, 64, seed, 16000)
        assert all(len({ids[r, k] for r in range(4) for k in range(3) if r + k == s}) == 1 for s in range(6))
        assert len({*ids.flat}) > 1


def test_the_nucleus_to_a_thousandth_of_an_id(bench):
    """One id of weight 1 and 39 of 1/e: 30 of these reach top_p, or just not; the noise at t would draw the 31st."""
    logits, weight = np.full((1, 1, 40), -1.0, f32), np.exp(-1.0)
    logits[..., 0] = 0.0

    def top_p(ids):
        return (1 + ids * weight) / (1 + 39 * weight)
    t = next(t for t in range(1000) if model_cpu.sample(logits[0], 5, np.array([t]), top_p=top_p(30.5)) == 31)
    assert drawn(bench, logits, 40, 5, t, top_p=top_p(30.001)) == 31 != drawn(bench, logits, 40, 5, t, top_p=top_p(29.999))


def test_draw_of_the_largest_ids(bench):
    """All 16 bits of an id, also where one of them is the last that top_k keeps."""
    logits = np.zeros((1, 3, 65536), f32)
    logits[0, [0, 1, 2], [65535, 40000, 32768]] = 40.0
    for options in (dict(temperature=0), dict(), dict(top_k=2, temperature=8.0)):
        assert drawn(bench, logits, 65536, 5, 9, **options)[0, 0] == 65535


def test_what_is_impossible_is_not_drawn(bench):
    """Logits of minus infinity, and those far below the others."""
    logits = np.full((3, 2, 40), -np.inf, f32)
    logits[..., [3, 17, 31]] = bench.rng.standard_normal((3, 2, 3))
    for options in (dict(temperature=100.0), dict(top_k=7), dict(top_k=20, top_p=0.999), dict(temperature=0)):
        assert {*drawn(bench, logits, 40, 5, 9, **options).flat} <= {3, 17, 31}
    logits = (1e4 * bench.rng.standard_normal((3, 2, 40))).astype(f32)
    for options in (dict(temperature=0.01), dict(temperature=1e4, top_k=9), dict(temperature=1e4, top_p=0.7)):
        drawn(bench, logits, 40, 6, 9, **options)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_write_past_an_array_in_shared_memory_is_seen(tmp_path, rows):
    """Behind a pointer the compiler's own check does not see it."""
    (tmp_path / "try.cu").write_text(f"""
        template <class T> __device__ T fill(T* slots) {{ slots[threadIdx.x] = 1; return slots[0]; }}
        extern "C" __global__ void kernel(float* out) {{
            __shared__ float before[32], slots[{rows}][32], after[32];
            before[threadIdx.x % 32] = after[threadIdx.x % 32] = 0;
            *out = fill(slots[0]) + sizeof(slots) / 128;
        }}""")
    kernel, out = CpuModule(str(tmp_path / "try.cu")).get_function("kernel"), np.zeros(1, f32)
    kernel((1,), (32 * rows,), (out,))
    assert out == 1 + rows
    with pytest.raises(KernelError, match="a write past an array in shared memory"):
        kernel((1,), (32 * rows + 1,), (out,))


ROW_KERNELS = "embedding_forward", "rmsnorm_forward", "rmsnorm_backward"


@pytest.mark.parametrize("arch, bf16, threads", [
    ("sm_70", 0, 1024), ("sm_80", 0, 96), ("sm_80", 1, 1024), ("sm_90", 1, 96), ("sm_120", 1, 96),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("sm_75", 0, 1024), ("sm_89", 1, 96), ("sm_90", 0, 1024), ("sm_100", 1, 1024)))])
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
