"""flash_attn.cu on the CPU (tests/cuda_on_cpu.h) against the definition in float64, and compiled for its GPUs.

Read flash_attn.cu first. geometry() repeats what it says of launching its kernels; so does model_gpu.flash_kernels.
"""

import functools
import itertools

import numpy as np
from numpy.testing import assert_allclose
from numpy.random import default_rng
import pytest
from cases import parametrize

import model_cpu
import model_gpu
from cuda_helpers import ORDERS, CpuModule, check_guards, compile_for_gpu, from_bf16, guarded, skip_unless_known, to_bf16

norm = np.linalg.norm

# (version, D): what there is; hopper: bf16 by the products that only Hopper has; narrow: bf16 with PARTS 1. The bounds on relative L2 errors are three to
# four times what was seen.
VERSIONS = [("fp32", 32), ("fp32", 64), ("fp32", 128), ("bf16", 32), ("bf16", 64), ("bf16", 128), ("tf32", 32),
            ("tf32", 64), ("hopper", 64), ("narrow", 32), ("narrow", 64)]
every_version = parametrize("version,D", VERSIONS)
BOUNDS = {"fp32": 2e-6, "tf32": 1.5e-3, "bf16": 8e-3, "hopper": 8e-3, "narrow": 8e-3}
HALF = "bf16", "hopper", "narrow"

# B, T, H, G. Tiles have 32, 64 or 128 rows: shapes at, just below and just above, and several tiles.
SHAPES = [(2, 1, 2, 1), (1, 2, 3, 1), (1, 17, 4, 1), (1, 63, 4, 2), (2, 64, 2, 1), (1, 65, 3, 3), (1, 127, 2, 2),
          (1, 137, 4, 2), (1, 200, 3, 1)]


def geometry(version, D):
    """[(name, rows of queries or keys per block, threads, bytes of dynamic shared memory)] of the three kernels."""
    names = ["flash_forward", "flash_backward_dq", "flash_backward_dkdv"]
    if version == "fp32":
        return [(name, 4096 // D, 128, 0) for name in names]
    half = version in HALF
    rows = 128 if half and D <= 64 and version != "narrow" else 64
    own, stages = [n * D * (2 if half else 4) for n in (rows, 4 * 64)]
    suffix = "bf16" if half else version
    return [(f"{names[0]}_{suffix}", rows, 128, own + stages), (f"{names[1]}_{suffix}", rows, 128, 2 * own + stages),
            (f"{names[2]}_{suffix}", rows, 128, 2 * own + stages + 16 * 64)]


@functools.cache
def module(D, version):
    options = [f"-DHEAD_DIM={D}", f"-DHOPPER={int(version == 'hopper')}", f"-DPARTS={1 if version == 'narrow' else 2}"]
    return CpuModule("flash_attn.cu", options, bounds=D == 32)         # the same lines for every D


@functools.cache
def problem(version, B, T, H, G, D, spread=1.0):
    """qkv and dout as the kernels get them, and out, lse and dqkv (of q and k before RoPE) by the definition in
    float64."""
    rng = default_rng(T)
    qkv = (spread * rng.standard_normal((B, T, H + 2 * G, D))).astype(np.float32)
    dout = rng.standard_normal((B, T, H, D)).astype(np.float32)
    if version in HALF:
        qkv, dout = from_bf16(to_bf16(qkv)), from_bf16(to_bf16(dout))
    out, lse, dqkv = attention(qkv.astype(np.float64), dout.astype(np.float64), H, G)
    turn_back(dqkv[:, :, :H + G])
    return qkv, dout, out, lse, dqkv


@functools.cache
def rope_tables(T, D):
    """cos and sin (T,D/2) of RoPE's angles, in float64: of position 1 on, not 0, so that each row turns."""
    config = model_cpu.Config(dim=D, heads=1, kv_heads=1, layers=1, context=T + 1, vocab=8)
    return [np.ascontiguousarray(table[1:, 0, D // 2:]) for table in model_cpu.rope_table(config, np.float64)]


def turn_back(dx):
    """RoPE's backward, in place on the last axes (T, heads, D)."""
    T, _, D = dx.shape[-3:]
    cos, sin = (table[:, None] for table in rope_tables(T, D))
    d1, d2 = dx[..., :D // 2].copy(), dx[..., D // 2:].copy()
    dx[..., :D // 2], dx[..., D // 2:] = d1 * cos + d2 * sin, d2 * cos - d1 * sin


def attention(qkv, dout, H, G):
    """Causal grouped-query attention and its gradient, as they are defined. qkv (B,T,H+2G,D), dout (B,T,H,D)."""
    B, T, _, D = qkv.shape
    heads, dO = qkv.swapaxes(1, 2), dout.swapaxes(1, 2)                                     # (B,H+2G,T,D), (B,H,T,D)
    Q, K, V = heads[:, :H], heads[:, H:H + G].repeat(H // G, 1), heads[:, H + G:].repeat(H // G, 1)
    S = np.where(np.tri(T, dtype=bool), Q @ K.swapaxes(2, 3) / np.sqrt(D), -np.inf)         # (B,H,T,T)
    top = S.max(3, keepdims=True)
    lse = np.log(np.exp(S - top).sum(3, keepdims=True)) + top
    P = np.exp(S - lse)
    dP = dO @ V.swapaxes(2, 3)
    dS = P * (dP - (P * dP).sum(3, keepdims=True)) / np.sqrt(D)
    # the query heads of a group add up
    dK, dV = [(x.swapaxes(2, 3) @ y).reshape(B, G, -1, T, D).sum(2) for x, y in ((dS, Q), (P, dO))]
    dqkv = np.concatenate([dS @ K, dK, dV], axis=1)
    return (P @ V).swapaxes(1, 2), lse[..., 0], dqkv.swapaxes(1, 2)


def run(version, qkv, dout, H, G, order):
    """Forward and backward by the kernels: out, lse, dqkv as float32."""
    (B, T, _, D), i32 = qkv.shape, np.int32
    pack, unpack = (to_bf16, from_bf16) if version in HALF else (np.asarray, np.asarray)
    kernels = module(D, version)
    kernels.order = order
    qkv, dout = guarded(pack(qkv)), guarded(pack(dout))
    empty = np.full(qkv.shape, np.nan, np.float32)         # an entry that is not written stays NaN
    out, dqkv = guarded(pack(empty[:, :, :H])), guarded(pack(empty))
    lse, delta = [guarded(np.full((B, H, T), np.nan, np.float32)) for _ in range(2)]
    sizes, rope = (i32(T), i32(H), i32(G)), [guarded(table.astype(np.float32)) for table in rope_tables(T, D)]
    launches = [(H, (out, lse, qkv)), (H, (dqkv, delta, dout, out, lse, qkv, *rope)),
                (G, (dqkv, delta, dout, lse, qkv, *rope))]
    for (name, rows, threads, shared), (heads, arrays) in zip(geometry(version, D), launches):
        kernels.get_function(name)((heads, B, -(-T // rows)), (threads,), (*arrays, *sizes), shared_mem=shared)
    check_guards(qkv, dout, out, dqkv, lse, delta, *rope)
    return unpack(out), lse, unpack(dqkv)


def check(version, D, shape, order, spread=1.0, loose=1.0):
    B, T, H, G = shape
    qkv, dout, out, lse, dqkv = problem(version, B, T, H, G, D, spread)
    got_out, got_lse, got_dqkv = run(version, qkv, dout, H, G, order)
    errors = {"out": norm(got_out - out) / norm(out), "lse": norm(got_lse - lse) / norm(lse)}
    for name, heads in ("dq", slice(0, H)), ("dk", slice(H, H + G)), ("dv", slice(H + G, None)):
        # relative to the whole gradient: that of q is 0 at T = 1, and small where T is
        errors[name] = norm((got_dqkv - dqkv)[:, :, heads]) / norm(dqkv)
    assert max(errors.values()) < loose * BOUNDS[version], errors      # NaN fails too: it is not smaller


@every_version
def test_flash_attention(version, D):
    for shape, order in zip(SHAPES, itertools.cycle(ORDERS)):           # that the order changes no bit: below
        check(version, D, shape, order)


@every_version
def test_wide_scores(version, D):
    """Scores of some +-100: exp of them overflows fp32 unless the maximum is subtracted, also when it grows late."""
    check(version, D, (1, 150, 2, 1), ("forward", 0), spread=5.0, loose=4.0)


def to_tf32(x):
    """To 10 bits of mantissa, to nearest, ties away from zero."""
    return ((np.ascontiguousarray(x, np.float32).view(np.uint32) + 0x1000) & ~np.uint32(0x1FFF)).view(np.float32)


@parametrize("version,D", [pair for pair in VERSIONS if pair[0] != "fp32"])
def test_rounds_where_it_should_and_nowhere_else(version, D):
    """The fast version against float64 that rounds the operands of its products as it does. Only where the rounding of
    a number hangs on its last bit do they differ, and so little that an operand cut off would show. T = 64: one step of
    the forward's inner loop, so that m is the row's maximum."""
    B, T, H, G = 1, 64, 2, 1
    rounded = to_tf32 if version == "tf32" else lambda x: from_bf16(to_bf16(x))

    def wide(x):
        return rounded(x).astype(np.float64)

    qkv, dout, *_ = problem(version, B, T, H, G, D)
    out, lse, dqkv = run(version, qkv, dout, H, G, ("forward", 0))
    expected, expected_lse = np.zeros((T, H, D)), np.zeros((H, T))
    expected_d = np.zeros((T, H + 2, D))
    K, V = wide(qkv[0, :, H]), wide(qkv[0, :, H + 1])
    for h in range(H):
        Q, dO = wide(qkv[0, :, h]), wide(dout[0, :, h])
        S = np.where(np.tri(T, dtype=bool), Q @ K.T / np.sqrt(D), -np.inf)
        top = S.max(1, keepdims=True)
        P = np.exp(S - top)
        expected[:, h] = wide(P) @ V / P.sum(1, keepdims=True)
        expected_lse[h] = np.log(P.sum(1)) + top[:, 0]
        P = np.exp(S - lse[0, h][:, None])
        delta = (dout[0, :, h].astype(np.float64) * out[0, :, h]).sum(1, keepdims=True)
        dS = P * (dO @ V.T - delta)
        expected_d[:, h] = wide(dS) @ K / np.sqrt(D)
        expected_d[:, H] += wide(dS).T @ Q / np.sqrt(D)
        expected_d[:, H + 1] += wide(P).T @ dO
    turn_back(expected_d[:, :H + 1])
    if version != "tf32":                                   # rounded once, after the rotation
        expected, expected_d = wide(expected), wide(expected_d)
    errors = [norm(out[0] - expected) / norm(expected), norm(lse[0] - expected_lse) / norm(expected_lse)]
    errors += [norm((dqkv[0] - expected_d)[:, i]) / norm(expected_d[:, i]) for i in range(H + 2)]
    assert max(errors) < 2e-5, errors


@every_version
def test_scores_of_any_size(version, D):
    """Scores down to -50,000, in no order: each query takes the value of the one key that beats the others, and nothing
    but finite numbers comes out."""
    T, H, G = 150, 2, 1
    rng = default_rng(0)
    qkv, dout = np.zeros((1, T, H + 2 * G, D), np.float32), rng.integers(-8, 8, (1, T, H, D)).astype(np.float32)
    qkv[..., 2, 0] = 2 * (rng.permutation(T) - T + 5)           # almost all below 0
    qkv[..., 3, :] = rng.integers(-8, 8, (1, T, D))
    qkv[..., :H, 0] = 1024
    best = [max(range(i + 1), key=lambda j: qkv[0, j, 2, 0]) for i in range(T)]
    out, lse, dqkv = run(version, qkv, dout, H, G, ("forward", 0))
    assert np.array_equal(out, qkv[:, best, 3:].repeat(H, axis=2))
    assert_allclose(lse[0, 0], qkv[0, best, 2, 0] * 1024 / np.sqrt(D), rtol=1e-6)
    dv = np.zeros((T, D), np.float32)
    np.add.at(dv, best, dout[0].sum(axis=1))
    assert_allclose(dqkv[0, :, 3], dv, rtol=1e-6 if version == "fp32" else 8e-3)
    assert not dqkv[0, :, :3].any()


@every_version
def test_order_of_threads_changes_no_bit(version, D):
    qkv, dout, *_ = problem(version, 1, 137, 2, 1, D)
    first, *others = [run(version, qkv, dout, 2, 1, order) for order in ORDERS]
    for other in others:
        assert all(np.array_equal(x, y) for x, y in zip(first, other))


@parametrize("precision", ["fp32", "tf32", "bf16"])
@parametrize("D", [32, 64, 128])
def test_model_gpu_launches_them_so(precision, D):
    version = precision if (precision, D) in VERSIONS else "fp32"      # tf32 with D = 128: the readable version
    assert model_gpu.flash_kernels(precision, D, 2) == geometry(version, D)
    if precision == "bf16" and D < 128:
        assert model_gpu.flash_kernels(precision, D, 1) == geometry("narrow", D)


# for the big model's D one architecture of each code: readable, fast, Hopper's; the others, and the other D once each for the
# readable and the fast kernels, in `make check-peers`
@parametrize("arch,D", [
    ("sm_70", 64), ("sm_80", 64), ("sm_90a", 64), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("sm_75", 64), ("sm_89", 64), ("sm_100", 64), ("sm_120", 64), ("sm_70", 32), ("sm_80", 32), ("sm_70", 128), ("sm_80", 128)))])
def test_compiles_for_gpu(arch, D, capsys):
    skip_unless_known(arch)
    parts = 1 if arch in ("sm_89", "sm_120") else 2
    kernels = compile_for_gpu("flash_attn.cu", arch, [f"-DHEAD_DIM={D}", f"-DHOPPER={int(arch == 'sm_90a')}", f"-DPARTS={parts}"])
    with capsys.disabled():
        for name, use in kernels.items():
            print(f"\n  {arch} D {D:3d} {name:28s} {use.registers:3d} registers, {use.spill_bytes} bytes spilled",
                  end="")
    fast = arch not in ("sm_70", "sm_75")
    versions = [version for version, d in VERSIONS if d == D and (fast or version == "fp32")]
    expected = {name for version in versions for name, *_ in geometry(version, D)}
    assert set(kernels) == expected
    assert all(use.spill_bytes == 0 for use in kernels.values()), kernels
    assert all(use.shared_bytes <= 48 << 10 for use in kernels.values()), kernels
