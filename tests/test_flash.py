"""flash_attn.cu on the CPU (tests/cuda_on_cpu.h), launched by model_gpu.py, against model_cpu.py in float64; and compiled,
with kernels.cu, for the GPUs that they are meant for."""
import itertools

import numpy as np
import pytest
from cases import parametrize

import model_cpu
import model_gpu
from cuda_helpers import ORDERS, CpuModule, check_guards, compile_for_gpu, guarded, stored, value

norm, f32 = np.linalg.norm, np.float32

# precision, D; narrow: PARTS 1; hopper: by the products that only Hopper has
VERSIONS = ["fp32 32", "fp32 64", "fp32 128", "tf32 32", "tf32 64", "bf16 32", "bf16 64", "bf16 128",
            "bf16 32 narrow", "bf16 64 narrow", "bf16 64 hopper"]
every_version = parametrize("version", VERSIONS)
BOUNDS = {"fp32": 2e-6, "tf32": 1.5e-3, "bf16": 8e-3}       # on relative L2 errors: three to four times what was seen

# B, T, H, G.  Tiles have 32, 64 or 128 rows: shapes at, just below and just above, and several tiles
SHAPES = [(2, 1, 2, 1), (1, 2, 3, 1), (1, 17, 4, 1), (1, 63, 4, 2), (2, 64, 2, 1), (1, 65, 3, 3), (1, 127, 2, 2), (1, 137, 4, 2), (1, 200, 3, 1)]


class Attention:
    """The kernels of a version, at one shape: for model_gpu's functions the `gpu`."""

    def __init__(self, version, B, T, H, G, order=0):
        precision, D, *self.kind = version.split()
        self.D, self.bound, self.half = int(D), BOUNDS[precision], precision == "bf16"
        parts, self.flash_rows, self.shared = model_gpu.flash_sizes(precision, self.D, self.kind != ["narrow"])
        hopper = int(self.kind == ["hopper"])
        options = [f"-DBF16={int(self.half)}", f"-DHEAD_DIM={D}", f"-DHOPPER={hopper}", f"-DPARTS={parts}"]
        self.module = CpuModule("flash_attn.cu", options, bounds=D == "32")                 # the same lines for every D
        self.module.order = order
        self.config = model_cpu.Config(dim=H * self.D, heads=H, kv_heads=G, layers=1, context=T, vocab=8)
        self.rope, rng = model_cpu.rope_table(self.config, float), np.random.default_rng(T)
        self.angles = guarded(np.ascontiguousarray(f32(self.rope[:, :, 0, self.D // 2:].swapaxes(0, 1))))
        self.qkv, self.dout = [self.rounded(rng.standard_normal((B, T, heads * self.D))) for heads in (H + 2 * G, H)]

    def rounded(self, x):
        """As it is stored, in float64."""
        return value(stored(x, self.half))

    def launch(self, name, grid, threads, *args):
        self.module.get_function(name)(grid, (threads,), tuple(map(model_gpu.as_argument, args)), shared_mem=self.shared.get(name, 0))

    def run(self):
        """-> out, lse, dqkv by the kernels; an entry that is not written stays NaN."""
        B, T, _ = self.qkv.shape
        H, G = self.config.heads, self.config.kv_heads
        numbers = self.qkv, self.dout, np.nan * self.dout, np.nan * self.qkv
        qkv, dout, out, dqkv = [guarded(stored(x, self.half)) for x in numbers]
        lse, delta = [guarded(np.full((B, H, T), np.nan, f32)) for _ in range(2)]
        if self.kind == ["plain"]:
            self.launch("flash_forward_plain", (H, B, -(-T // 128)), 128, out, lse, qkv, T, H, G)
        else:
            model_gpu.attention_forward(self, out, lse, qkv, B, T)
        model_gpu.attention_backward(self, dqkv, dout, out, lse, qkv, delta)
        check_guards(qkv, dout, out, dqkv, lse, delta, self.angles)
        return value(out), lse, value(dqkv)

    def error(self):
        """The largest of those of out, and of the gradients of q, k and v; relative to the whole gradient: that of q is 0 at
        T = 1."""
        c, (B, T, _) = self.config, self.qkv.shape
        P, out, dqkv = np.empty((B, c.kv_heads, c.heads // c.kv_heads, T, T)), 0 * self.dout, 0 * self.qkv
        model_cpu.attention_forward(out, P, self.qkv, c)
        model_cpu.attention_backward(dqkv, self.dout, out, P, self.qkv, c, 0 * P)
        model_cpu.rope_backward(model_cpu.rotated_part(dqkv, c), *self.rope)
        found, _, found_d = self.run()
        parts = model_cpu.split_heads(found_d - dqkv, c)
        return np.max([norm(found - out) / norm(out), *(norm(part) / norm(dqkv) for part in parts)])       # NaN, if one is


@parametrize("version", [*VERSIONS, "fp32 32 plain", "fp32 64 plain", "fp32 128 plain"])
def test_flash_attention(version):
    """plain: the forward is the first rung of the ladder, one thread a query; the backward reads what that has written."""
    for shape, order in zip(SHAPES, itertools.cycle(ORDERS)):
        attention = Attention(version, *shape, order)
        assert attention.error() < attention.bound, shape


@every_version
def test_wide_scores(version):
    """Scores of some +-100: exp of them overflows fp32 unless the maximum is subtracted, also when it grows late: the first
    64 keys are short."""
    attention = Attention(version, 1, 150, 2, 1)
    attention.qkv *= 6
    attention.qkv[:, :64, 2 * attention.D:3 * attention.D] /= 16
    attention.qkv = attention.rounded(attention.qkv)
    assert attention.error() < 4 * attention.bound


@every_version
def test_order_of_threads_changes_no_bit(version):
    runs = [Attention(version, 1, 137, 2, 1, order).run() for order in ORDERS]
    assert all(map(np.array_equal, 2 * runs[0], runs[1] + runs[2]))


@parametrize("version", [version for version in VERSIONS if "fp32" not in version])
def test_rounds_where_it_should_and_nowhere_else(version):
    """The fast version against float64 that rounds the operands of its products as it does.  Only where the rounding of
    a number hangs on its last bit do they differ, and so little that an operand cut off would show.  T = 64: one step of
    the forward's inner loop, so that m is the row's maximum."""
    attention = Attention(version, 1, 64, 1, 1)
    (out,), lse, (dqkv,) = attention.run()

    def rounded(x):
        """tf32: to 10 bits of mantissa, to nearest, ties away from zero."""
        return attention.rounded(x) if attention.half else (f32(x).view(np.uint32) + 0x1000 & 0xFFFFE000).view(f32).astype(float)
    (Q, K, V), dO = np.split(rounded(attention.qkv[0]), 3, axis=1), rounded(attention.dout[0])
    S = np.where(np.tri(64, dtype=bool), Q @ K.T / np.sqrt(attention.D), -np.inf)
    P = np.exp(S - S.max(1, keepdims=True))
    expected = rounded(P) @ V / P.sum(1, keepdims=True)
    assert norm(lse[0, 0] - np.log(P.sum(1)) - S.max(1)) < 2e-5 * norm(lse)
    P = np.exp(S - lse[0, 0][:, None])
    dS = P * (dO @ V.T - (attention.dout[0] * out).sum(1, keepdims=True))
    dS = rounded(dS) / np.sqrt(attention.D)
    expected_d = np.hstack([dS @ K, dS.T @ Q, rounded(P).T @ dO])
    model_cpu.rope_backward(model_cpu.rotated_part(expected_d[None], attention.config), *attention.rope)
    # stored once, after the rotation
    for found, exact in zip([out, *np.split(dqkv, 3, axis=1)], [expected, *np.split(expected_d, 3, axis=1)]):
        assert norm(found - attention.rounded(exact)) < 2e-5 * norm(exact)


# for the big model's D and the widest model that check_sizes lets through one architecture of each code: readable, fast,
# Hopper's, the newest; the others, and the other D once each for the readable and the fast kernels, in `make check-peers`
@parametrize("arch, D", [
    ("sm_70", 64), ("sm_80", 64), ("sm_90a", 64), ("sm_120", 64), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("sm_75", 64), ("sm_86", 64), ("sm_89", 64), ("sm_100", 64),
        ("sm_70", 32), ("sm_80", 32), ("sm_70", 128), ("sm_80", 128)))])
def test_compiles_for_gpus(arch, D):
    """Two kernels spill registers of 8 bytes at most, the others none; and no static shared memory is more than every GPU gives."""
    for precision in ["fp32"] if arch in ("sm_70", "sm_75") else ["fp32", "tf32", "bf16"]:
        parts, _, _ = model_gpu.flash_sizes(precision, D, arch not in ("sm_86", "sm_89", "sm_120"))
        threads = model_gpu.row_threads(6144 if D == 64 else 768)
        options = [f"-DBF16={int(precision == 'bf16')}", f"-DHEAD_DIM={D}", f"-DHOPPER={int(arch == 'sm_90a')}",
                   f"-DPARTS={parts}", f"-DROW_THREADS={threads}"]
        kernels = compile_for_gpu(arch, options)
        assert {"adamw", "flash_forward"} <= kernels.keys()
        for name, used in kernels.items():
            # ptxas of CUDA 13 holds back for sm_80 a register that the readable product would like; that of 12.9 for sm_100
            # one that decode_swiglu would like
            most = 8 if name in ("matmul", "decode_swiglu") else 0
            assert max(used["spill stores"], used["stack frame"]) <= most, (name, used)
            assert used.get("smem", 0) <= 48 << 10, (name, used)
