"""flash_attn.cu on the CPU (tests/cuda_on_cpu.h), launched by model_gpu.py, against model_cpu.py in float64; and compiled for
its GPUs."""
import itertools

import numpy as np
import pytest
from cases import parametrize

import model_cpu
import model_gpu
from cuda_helpers import ORDERS, CpuModule, check_guards, compile_for_gpu, from_bf16, guarded, skip_unless_known, to_bf16

norm, f32 = np.linalg.norm, np.float32

# (version, D): what there is; hopper: bf16 by the products that only Hopper has; narrow: bf16 with PARTS 1
VERSIONS = [("fp32", 32), ("fp32", 64), ("fp32", 128), ("bf16", 32), ("bf16", 64), ("bf16", 128), ("tf32", 32), ("tf32", 64), ("hopper", 64),
            ("narrow", 32), ("narrow", 64)]
every_version = parametrize("version, D", VERSIONS)
BOUNDS = {"fp32": 2e-6, "tf32": 1.5e-3}         # on relative L2 errors: three to four times what was seen; bf16: 8e-3

# B, T, H, G.  Tiles have 32, 64 or 128 rows: shapes at, just below and just above, and several tiles
SHAPES = [(2, 1, 2, 1), (1, 2, 3, 1), (1, 17, 4, 1), (1, 63, 4, 2), (2, 64, 2, 1), (1, 65, 3, 3), (1, 127, 2, 2), (1, 137, 4, 2), (1, 200, 3, 1)]


class Attention:
    """The kernels of a version, at one shape: for model_gpu's functions the `gpu`."""

    def __init__(self, version, D, B, T, H, G):
        self.half = version not in BOUNDS
        parts, self.flash_rows, self.shared = model_gpu.flash_sizes("bf16" if self.half else version, D, version != "narrow")
        options = [f"-DBF16={int(self.half)}", f"-DHEAD_DIM={D}", f"-DHOPPER={int(version == 'hopper')}", f"-DPARTS={parts}"]
        self.module = CpuModule("flash_attn.cu", options, bounds=D == 32)                   # the same lines for every D
        self.config = model_cpu.Config(dim=H * D, heads=H, kv_heads=G, layers=1, context=T, vocab=8)
        self.rope, rng = model_cpu.rope_table(self.config, float), np.random.default_rng(T)
        self.angles = guarded(np.ascontiguousarray(f32(self.rope[:, :, 0, D // 2:].swapaxes(0, 1))))
        self.qkv, self.dout = [self.rounded(rng.standard_normal((B, T, heads * D))) for heads in (H + 2 * G, H)]

    def rounded(self, x):
        """As it is stored, in float64."""
        return (from_bf16(to_bf16(x)) if self.half else f32(x)).astype(float)

    def launch(self, name, grid, threads, *args):
        self.module.get_function(name)(grid, (threads,), tuple(map(model_gpu.as_argument, args)), shared_mem=self.shared.get(name, 0))

    def run(self, order=ORDERS[0]):
        """-> out, lse, dqkv by the kernels; an entry that is not written stays NaN."""
        B, T, _ = self.qkv.shape
        self.module.order = order
        pack, unpack = (to_bf16, from_bf16) if self.half else (f32, f32)
        qkv, dout, out, dqkv = [guarded(pack(x)) for x in (self.qkv, self.dout, np.nan * self.dout, np.nan * self.qkv)]
        lse, delta = [guarded(np.full((B, self.config.heads, T), np.nan, f32)) for _ in range(2)]
        model_gpu.attention_forward(self, out, lse, qkv, B, T)
        model_gpu.attention_backward(self, dqkv, dout, out, lse, qkv, delta)
        check_guards(qkv, dout, out, dqkv, lse, delta, self.angles)
        return unpack(out), lse, unpack(dqkv)

    def errors(self, order):
        """Of out, and of the gradients of q, k and v; relative to the whole gradient: that of q is 0 at T = 1."""
        c, (B, T, _) = self.config, self.qkv.shape
        P, out, dqkv = np.empty((B, c.kv_heads, c.heads // c.kv_heads, T, T)), 0 * self.dout, 0 * self.qkv
        model_cpu.attention_forward(out, P, self.qkv, c)
        model_cpu.attention_backward(dqkv, self.dout, out, P, self.qkv, c, 0 * P)
        model_cpu.rope_backward(model_cpu.rotated_part(dqkv, c), *self.rope)
        found, _, found_d = self.run(order)
        return [norm(found - out) / norm(out), *(norm(part) / norm(dqkv) for part in model_cpu.split_heads(found_d - dqkv, c))]


@every_version
def test_flash_attention(version, D):
    for shape, order in zip(SHAPES, itertools.cycle(ORDERS)):
        assert max(Attention(version, D, *shape).errors(order)) < BOUNDS.get(version, 8e-3), shape


@parametrize("D", [32, 64, 128])
def test_one_thread_a_query(D):
    """The first rung of the ladder gives what the readable version gives."""
    for shape, order in zip(SHAPES, itertools.cycle(ORDERS)):
        attention, (B, T, H, G) = Attention("fp32", D, *shape), shape
        found, lse = guarded(np.full((B, T, H * D), np.nan, f32)), guarded(np.full((B, H, T), np.nan, f32))
        attention.module.order = order
        attention.launch("flash_forward_plain", (H, B, -(-T // 128)), 128, found, lse, guarded(f32(attention.qkv)), T, H, G)
        out, lse_of_tiles, _ = attention.run()
        assert norm(found - out) < 2e-6 * norm(out) and norm(lse - lse_of_tiles) < 2e-6 * norm(lse)


@every_version
def test_wide_scores(version, D):
    """Scores of some +-100: exp of them overflows fp32 unless the maximum is subtracted, also when it grows late."""
    attention = Attention(version, D, 1, 150, 2, 1)
    attention.qkv = attention.rounded(5 * attention.qkv)
    assert max(attention.errors(ORDERS[0])) < 4 * BOUNDS.get(version, 8e-3)


@every_version
def test_order_of_threads_changes_no_bit(version, D):
    attention = Attention(version, D, 1, 137, 2, 1)
    first = attention.run()
    for order in ORDERS[1:]:
        assert all(map(np.array_equal, first, attention.run(order)))


@parametrize("version, D", [pair for pair in VERSIONS if pair[0] != "fp32"])
def test_rounds_where_it_should_and_nowhere_else(version, D):
    """The fast version against float64 that rounds the operands of its products as it does.  Only where the rounding of
    a number hangs on its last bit do they differ, and so little that an operand cut off would show.  T = 64: one step of
    the forward's inner loop, so that m is the row's maximum."""
    attention = Attention(version, D, 1, 64, 1, 1)
    (out,), lse, (dqkv,) = attention.run()

    def rounded(x):
        """tf32: to 10 bits of mantissa, to nearest, ties away from zero."""
        return attention.rounded(x) if attention.half else (f32(x).view(np.uint32) + 0x1000 & 0xFFFFE000).view(f32).astype(float)
    (Q, K, V), dO = np.split(rounded(attention.qkv[0]), 3, axis=1), rounded(attention.dout[0])
    S = np.where(np.tri(64, dtype=bool), Q @ K.T / np.sqrt(D), -np.inf)
    P = np.exp(S - S.max(1, keepdims=True))
    expected = rounded(P) @ V / P.sum(1, keepdims=True)
    assert norm(lse[0, 0] - np.log(P.sum(1)) - S.max(1)) < 2e-5 * norm(lse)
    P = np.exp(S - lse[0, 0][:, None])
    dS = P * (dO @ V.T - (attention.dout[0] * out).sum(1, keepdims=True))
    expected_d = np.hstack([rounded(dS) @ K / np.sqrt(D), rounded(dS).T @ Q / np.sqrt(D), rounded(P).T @ dO])
    model_cpu.rope_backward(model_cpu.rotated_part(expected_d[None], attention.config), *attention.rope)
    # stored once, after the rotation
    for found, exact in zip([out, *np.split(dqkv, 3, axis=1)], [expected, *np.split(expected_d, 3, axis=1)]):
        assert norm(found - attention.rounded(exact)) < 2e-5 * norm(exact)


# for the big model's D one architecture of each code: readable, fast, Hopper's; the others, and the other D once each for the
# readable and the fast kernels, in `make check-peers`
@parametrize("arch, D", [
    ("sm_70", 64), ("sm_80", 64), ("sm_90a", 64), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("sm_75", 64), ("sm_86", 64), ("sm_89", 64), ("sm_100", 64), ("sm_120", 64), ("sm_70", 32), ("sm_80", 32), ("sm_70", 128), ("sm_80", 128)))])
def test_compiles_for_gpu(arch, D):
    skip_unless_known(arch)
    for precision in ["fp32"] if arch in ("sm_70", "sm_75") else ["fp32", "tf32", "bf16"]:
        parts, _, shared = model_gpu.flash_sizes(precision, D, arch not in ("sm_86", "sm_89", "sm_120"))
        kernels = compile_for_gpu("flash_attn.cu", arch, [f"-DBF16={int(precision == 'bf16')}", f"-DHEAD_DIM={D}", f"-DPARTS={parts}",
                                                          f"-DHOPPER={int(arch == 'sm_90a')}", "-DROW_THREADS=96"])
        names = {"flash_forward", "flash_backward_dq", "flash_backward_dkdv"}
        assert set(kernels) == (names if parts else {*names, "flash_forward_plain"}) and set(shared) == (names if parts else set())
        for use in kernels.values():
            assert use.spill_bytes == 0 and use.shared_bytes <= 48 << 10, kernels
