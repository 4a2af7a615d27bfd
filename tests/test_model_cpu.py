"""model_cpu.py: sizes, layers, loss, threads, cached decoding, sampling, checkpoints, the tour.

That every gradient is right is gradcheck.py's part; that the model is the one the world calls Llama, tests/peers'."""
import dataclasses
import itertools
import json
import math
import os
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest

import model_cpu
from model_cpu import CONFIGS, Config, Model, generate, load, load_state, sample, save, window_start
from tokenizer import Tokenizer

TINY = Config(dim=16, heads=4, kv_heads=2, layers=2, context=16, vocab=264, predict=3, mtp_weight=0.5)


def wide_model(config=TINY, seed=0, **options):
    """A model whose weights are wide enough that every part of it matters."""
    model = Model(config, seed, **options)
    rng = np.random.default_rng(seed)
    model.flat_params[...] = 0.3 * rng.standard_normal(model.flat_params.shape)
    for weight in model.params.values():
        if weight.ndim == 1:
            weight += 1.0
    return model


def make_batch(config=TINY, B=4, T=7, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, config.vocab, (B, T)), rng.integers(0, config.vocab, (B, T + config.predict - 1))


def step_gradient(model, tokens, targets, counted=None):
    """-> (losses, a copy of the flat gradient) of one micro-batch."""
    model.flat_grads[...] = 0.0
    losses = model.forward(tokens, targets, counted)
    model.backward()
    return losses, model.flat_grads.copy()


# ---------------------------------------------------------------------------------------------------------------------
# Sizes
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, count, sizes", [
    ("small", 1_053_824, (128, 4, 2, 4, 128, 512)), ("medium", 10_017_024, (256, 8, 4, 12, 256, 1024)),
    ("big", 116_417_280, (768, 12, 4, 16, 512, 4096))])
def test_parameter_counts(name, count, sizes):
    assert model_cpu.param_count(CONFIGS[name]) == count
    assert dataclasses.astuple(CONFIGS[name]) == (*sizes, 4, 0.3)


def test_table_of_parameters_by_hand():
    config = Config(dim=24, heads=3, kv_heads=1, layers=2, context=5, vocab=48, predict=2)         # D = 8, F = 64
    layer = [("qkv", (40, 24)), ("out", (24, 24)), ("gate_up", (128, 24)), ("down", (24, 64))]
    assert model_cpu.param_table(config) == [
        ("embed", (48, 24)), *((f"layers.{i}.{name}", shape) for i in range(2) for name, shape in layer),
        ("heads", (96, 24)), *((f"layers.{i}.norm{j}", (24,)) for i in range(2) for j in (1, 2)), ("norm", (24,))]
    assert (config.head_dim, config.hidden, config.qkv_width) == (8, 64, 40)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dim = 48
    assert dataclasses.replace(config, context=1 << 20).context == 1 << 20


def test_hidden_is_eight_thirds_of_dim_rounded_up():
    for dim in range(8, 800, 8):
        F = Config(dim=dim, heads=1, kv_heads=1, layers=1, context=1, vocab=8, predict=1).hidden
        assert F % 8 == 0 and 8 * dim <= 3 * F < 8 * dim + 24


def test_weights_of_the_heads():
    for predict, weights in [(1, [1.0]), (2, [1.0, 0.6]), (3, [1.0, 0.3, 0.3]), (5, [1.0, 0.15, 0.15, 0.15, 0.15])]:
        assert dataclasses.replace(TINY, predict=predict, mtp_weight=0.6).head_weights.tolist() == weights
    assert dataclasses.replace(TINY, mtp_weight=0).head_weights.tolist() == [1.0, 0.0, 0.0]
    assert dataclasses.replace(TINY, mtp_weight=2).head_weights.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("change, words", [
    (dict(dim=0), "dim must be a whole number of at least 1, not 0."),
    (dict(layers=-1), "layers must be"), (dict(vocab=264.0), "vocab must be a whole number of at least 1, not 264.0."),
    (dict(predict=True), "predict must be"), (dict(context="8"), "context must be"),
    (dict(dim=12, heads=3, kv_heads=3), "dim (12) and vocab (264) must be multiples of 8."),
    (dict(vocab=260), "dim (16) and vocab (260) must be multiples of 8."),
    (dict(heads=16), "dim (16) must be a multiple of 2 x heads (2 x 16)"),
    (dict(kv_heads=3), "heads (4) must be a multiple of kv_heads (3)."),
    (dict(mtp_weight=-0.1), "mtp_weight must be a finite number of at least 0, not -0.1."),
    (dict(mtp_weight=math.nan), "mtp_weight"), (dict(mtp_weight=math.inf), "mtp_weight"),
    (dict(mtp_weight="1"), "mtp_weight"), (dict(mtp_weight=None), "mtp_weight"),
    (dict(mtp_weight=float("inf")), "mtp_weight"), (dict(context=(1 << 20) + 1), "context must be at most 1,048,576")])
def test_sizes_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(TINY, **change)
    assert words in str(error.value)


@pytest.mark.parametrize("name", ["dim", "heads", "kv_heads", "layers", "context", "vocab", "predict"])
def test_every_size_is_a_whole_number(name):
    for value in (0, -8, True, 8.0, "8", None):
        with pytest.raises(ValueError, match=f"^{name} must be a whole number of at least 1, not {value!r}.$"):
            dataclasses.replace(TINY, **{name: value})


def test_parameters_are_views_of_one_buffer_with_the_gains_last():
    model = Model(TINY)
    start = 0
    for name, shape in model_cpu.param_table(TINY):
        view = model.params[name]
        assert view.shape == shape and np.shares_memory(view, model.flat_params)
        assert view.ctypes.data == model.flat_params[start:].ctypes.data
        start += view.size
    decayed = model_cpu.param_count(TINY, decayed_only=True)
    assert start == model_cpu.param_count(TINY) == model.flat_params.size
    assert np.all(model.flat_params[decayed:] == 1.0)
    assert start - decayed == (2 * TINY.layers + 1) * TINY.dim


def test_one_seed_gives_one_model_in_every_precision():
    single, double = Model(CONFIGS["small"], seed=5, dtype=np.float32), Model(CONFIGS["small"], seed=5)
    assert np.array_equal(single.flat_params, double.flat_params)   # drawn as float32, so equal to the last bit
    assert not np.array_equal(single.flat_params, Model(CONFIGS["small"], seed=6, dtype=np.float32).flat_params)
    assert np.std(double.params["heads"]) == pytest.approx(0.02, rel=0.01)
    assert np.std(double.params["layers.3.down"]) == pytest.approx(0.02 / math.sqrt(8), rel=0.02)


def test_initial_values_by_hand():
    """Drawn in table order; the projections into the residual stream 1/sqrt(2L) as wide, here 1/2."""
    model, rng = Model(TINY, seed=3), np.random.default_rng(3)
    for name, shape in model_cpu.param_table(TINY):
        std = np.float32(0.01 if name.endswith((".out", ".down")) else 0.02)
        expected = rng.standard_normal(shape, np.float32) * std if len(shape) == 2 else np.ones(shape)
        assert np.array_equal(model.params[name], expected), name
    model = Model(TINY)
    assert model.dtype == np.float64 and model.threads == 1 and model.step == model.position == 0
    assert np.array_equal(model.flat_params, Model(TINY, seed=0).flat_params)
    assert not np.any(model.flat_grads) and not np.any(model.m) and not np.any(model.v)


def test_buffers_are_read_and_written():
    model = Model(TINY, dtype=np.float32)
    for i, (what, flat) in enumerate([("params", model.flat_params), ("m", model.m), ("v", model.v)]):
        model.write(what, np.full(flat.shape, i + 0.1))
        assert np.all(flat == np.float32(i + 0.1)) and flat.dtype == np.float32
        assert np.array_equal(model.read(what), flat)


# ---------------------------------------------------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------------------------------------------------
def test_embedding_collects_repeated_tokens():
    rng, tokens = np.random.default_rng(0), np.array([5, 2, 5, 0, 5, 2])
    embed, out, dout, dembed = rng.random((8, 4)), np.empty((6, 4)), rng.random((6, 4)), rng.random((8, 4))
    model_cpu.embedding_forward(out, tokens, embed)
    assert np.array_equal(out, embed[tokens])
    expected = dembed.copy()
    np.add.at(expected, tokens, dout)
    model_cpu.embedding_backward(dembed, dout, tokens)
    assert np.allclose(dembed, expected, rtol=1e-15, atol=0)


def test_rmsnorm_by_hand_where_eps_matters():
    rng = np.random.default_rng(0)
    x, gain, out, rstd = rng.standard_normal((6, 8)), rng.random(8), np.empty((6, 8)), np.empty(6)
    x *= np.array([0.0, 1e-9, 1e-3, 3e-3, 1.0, 1e6])[:, None]
    model_cpu.rmsnorm_forward(out, rstd, x, gain)
    for n in range(6):
        r = 1 / math.sqrt(math.fsum(x[n] ** 2) / 8 + 1e-5)
        assert rstd[n] == pytest.approx(r, rel=1e-14) and np.allclose(out[n], x[n] * r * gain, rtol=1e-14, atol=0)


def test_rmsnorm_throws_the_length_away():
    rng = np.random.default_rng(0)
    x, gain = 50 * rng.standard_normal((5, 16)), np.ones(16)
    out, scaled, rstd = np.empty_like(x), np.empty_like(x), np.empty(5)
    model_cpu.rmsnorm_forward(scaled, rstd, 3 * x, gain)
    model_cpu.rmsnorm_forward(out, rstd, x, gain)
    assert np.allclose((out ** 2).mean(axis=1), 1.0, atol=1e-6)
    assert np.allclose(out, scaled, atol=1e-6)
    dx, dout = np.empty_like(x), rng.standard_normal(x.shape)
    model_cpu.rmsnorm_backward(dx, np.zeros(16), dout, x, rstd, gain)
    along = np.abs((dx * x).sum(axis=1))                            # a change along x changes nothing
    assert np.all(along < 1e-6 * np.linalg.norm(dx, axis=1) * np.linalg.norm(x, axis=1))


@pytest.mark.parametrize("dtype, error", [(np.float32, 1e-7), (np.float64, 1e-12)])
def test_rope_table_by_hand(dtype, error):
    cos, sin = model_cpu.rope_table(600, 3, 6, dtype)
    assert cos.shape == sin.shape == (600, 3, 6) and cos.dtype == sin.dtype == dtype
    for t, h, i in itertools.product((0, 1, 2, 511, 599), range(3), range(6)):
        angle = t * 10000 ** (-2 * (i % 3) / 6)
        assert abs(cos[t, h, i] - math.cos(angle)) < error
        assert abs(sin[t, h, i] - math.sin(angle) * (-1 if i < 3 else 1)) < error


def test_rope_products_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    T, D = 40, 8
    q, k = rng.standard_normal((2, D))
    cos, sin = model_cpu.rope_table(T, 1, D, np.float64)
    turned = [np.tile(x, (1, T, 1, 1)) for x in (q, k)]
    for x in turned:
        model_cpu.rope_forward(x, cos, sin)
    products = turned[0][0, :, 0] @ turned[1][0, :, 0].T            # (T,T) by position of q, of k
    for distance in range(-T + 1, T):
        assert np.ptp(np.diagonal(products, distance)) < 1e-12
    assert products[0, 0] == pytest.approx(q @ k, rel=1e-14)
    assert abs(products[0, 3] - products[3, 0]) > 0.01              # and on its sign
    assert np.allclose(np.linalg.norm(turned[0], axis=-1), np.linalg.norm(q))
    model_cpu.rope_backward(turned[0], cos, sin)                    # the transpose of a rotation undoes it
    assert np.allclose(turned[0], q, atol=1e-14)


def test_grouped_heads_equal_full_heads_with_repeated_keys_and_values():
    grouped, D, R = wide_model(), TINY.head_dim, TINY.heads // TINY.kv_heads
    full = wide_model(dataclasses.replace(TINY, kv_heads=TINY.heads))
    for name, weight in grouped.params.items():
        if name.endswith("qkv"):
            q, k, v = np.split(weight.reshape(-1, D, TINY.dim), [TINY.heads, TINY.heads + TINY.kv_heads])
            weight = np.concatenate([q, np.repeat(k, R, axis=0), np.repeat(v, R, axis=0)])
        full.params[name][...] = weight.reshape(full.params[name].shape)
    tokens, _ = make_batch()
    assert np.allclose(full.logits(tokens), grouped.logits(tokens), rtol=0, atol=1e-12)


def test_attention_is_causal():
    model, (tokens, _) = wide_model(), make_batch(T=13)
    expected = model.logits(tokens)
    changed = tokens.copy()
    changed[:, 6] = (changed[:, 6] + 1) % TINY.vocab
    logits = model.logits(changed)
    assert np.array_equal(logits[:, :6], model.logits(tokens)[:, :6])
    assert np.abs(logits[:, 6:] - expected[:, 6:]).max(axis=(0, 2, 3)).min() > 1e-3


@pytest.mark.parametrize("heads, kv_heads, size", [(4, 2, 1.0), (4, 2, 1e4), (6, 2, 1e4), (3, 3, 1e4)])
def test_attention_by_hand(heads, kv_heads, size):
    """With scores from -size to size, mostly of one sign in a row: only a maximum of each row by itself keeps exp from
    overflowing in one row and from underflowing, all of it, in another."""
    B, T, D, rng = 2, 7, 4, np.random.default_rng(0)
    qkv, signs = rng.standard_normal((B, T, heads + 2 * kv_heads, D)), rng.choice([-1.0, 1.0], (B, T, heads, 1))
    qkv[:, :, heads:] += 3.0
    qkv[:, :, :heads] = size * signs * rng.random((B, T, heads, 1)) + qkv[:, :, :heads]
    out, P = np.empty((B, T, heads * D)), np.full((B, kv_heads, heads // kv_heads, T, T), np.nan)
    with np.errstate(all="raise", under="ignore"):
        model_cpu.attention_forward(out, P, qkv.reshape(B, T, -1), heads, kv_heads)
    for b, i, h in np.ndindex(B, T, heads):
        g = h // (heads // kv_heads)
        S = [math.fsum(qkv[b, i, h] * qkv[b, j, heads + g]) / math.sqrt(D) for j in range(i + 1)]
        p = np.exp(np.array(S) - max(S))
        p /= p.sum()
        row = P[b, g, h % (heads // kv_heads), i]
        assert np.allclose(row[:i + 1], p, rtol=1e-10, atol=1e-300) and not row[i + 1:].any()
        assert np.allclose(out[b, i, h * D:(h + 1) * D], p @ qkv[b, :i + 1, heads + kv_heads + g], rtol=1e-10, atol=0)


def test_scores_in_the_thousands_stay_finite_in_the_cache_too():
    model, tokens = wide_model(), make_batch(B=1, T=16)[0][0]
    for i in range(TINY.layers):
        model.params[f"layers.{i}.qkv"][:(TINY.heads + TINY.kv_heads) * TINY.head_dim] *= 100.0
    with np.errstate(all="raise", under="ignore"):
        expected = model.logits(tokens[None])[0]
        whole = model.extend(tokens)
        model.position = 0
        one_by_one = np.concatenate([model.extend([token]) for token in tokens])
    for logits in (whole, one_by_one):
        assert np.abs(logits - expected).max() < 1e-9 * np.abs(expected).max()


def test_large_numbers_do_not_overflow():
    gate_up, out, sigmoid = np.array([[-2000.0, 2000.0, 1.0, 1.0]]), np.empty((1, 2)), np.empty((1, 2))
    with np.errstate(all="raise", under="ignore"):
        model_cpu.swiglu_forward(out, sigmoid, gate_up)
        logits, losses, total = np.array([[[1e4, -1e4, 0.0]]]), np.empty(1), np.empty((1, 1))
        model_cpu.cross_entropy_forward(losses, total, logits, np.array([[2]]), np.array([1]))
    assert out.tolist() == [[0.0, 2000.0]] and losses[0] == 1e4


def test_each_row_of_logits_has_its_own_maximum():
    """The maximum of anything more than the row would make all of exp underflow where the logits are low."""
    rng, counted = np.random.default_rng(0), np.array([3, 2])
    table, level = np.array([[0, 7], [3, -1], [5, 1]]), np.array([[-1e4, 1e3], [0.0, -1e4], [1e4, -2e3]])
    logits = rng.standard_normal((3, 2, 8)) + level[..., None]
    z, losses, total, weights = logits.copy(), np.empty(2), np.empty((3, 2)), np.array([1.0, 0.25])
    with np.errstate(all="raise", under="ignore"):
        model_cpu.cross_entropy_forward(losses, total, logits, table, counted)
        model_cpu.cross_entropy_backward(logits, total, table, counted, weights)
    nll, gradient = np.zeros((3, 2)), np.zeros((3, 2, 8))
    for n, k in np.argwhere(table >= 0):
        p = np.exp(z[n, k] - z[n, k].max())
        p /= p.sum()
        nll[n, k] = -math.log(p[table[n, k]])
        gradient[n, k] = (p - np.eye(8)[table[n, k]]) * weights[k] / counted[k]
    assert np.allclose(losses, nll.sum(axis=0) / counted, rtol=1e-11, atol=0)
    assert np.allclose(logits, gradient, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# The loss: masks and divisors
# ---------------------------------------------------------------------------------------------------------------------
def test_target_table_by_hand():
    targets = np.array([[1, 2, 3, 4, 5], [6, -1, 8, -1, -1]])
    table = model_cpu.head_targets(targets, 3, 3)
    assert table.tolist() == [[1, 2, 3], [2, 3, 4], [3, 4, 5], [6, -1, 8], [-1, 8, -1], [8, -1, -1]]
    assert model_cpu.count_targets(targets, 3, 3).tolist() == [5, 4, 4]
    assert model_cpu.count_targets(targets, 5, 1).tolist() == [7]
    assert model_cpu.count_targets(np.zeros((2, 3), int), 3, 1).tolist() == [6]                     # 0 is a token


def test_losses_are_summed_in_float64():
    """In float32, the running sum of 100,000 losses has lost its last three digits."""
    rng, N = np.random.default_rng(0), 100_000
    logits, table = rng.standard_normal((N, 1, 8), np.float32), rng.integers(0, 8, (N, 1))
    losses, total = np.empty(1), np.empty((N, 1), np.float32)
    picked = (logits - logits.max(axis=-1, keepdims=True))[np.arange(N), 0, table[:, 0]]
    model_cpu.cross_entropy_forward(losses, total, logits, table, np.array([N]))
    assert losses[0] == pytest.approx(math.fsum(np.log(total[:, 0]) - picked) / N, rel=1e-12)


def test_loss_is_the_mean_over_counted_targets():
    model, (tokens, targets) = wide_model(), make_batch()
    targets[0, 2:5] = -1
    targets[3, :] = -1
    logits = model.logits(tokens)
    logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))              # (B,T,K,V)
    T, losses = tokens.shape[1], model.forward(tokens, targets)
    for k in range(TINY.predict):
        picked = [logp[b, t, k, targets[b, t + k]] for b, t in np.ndindex(tokens.shape) if targets[b, t + k] >= 0]
        assert losses[k] == pytest.approx(-np.mean(picked), rel=1e-12)
        assert model_cpu.count_targets(targets, T, TINY.predict)[k] == len(picked)


@pytest.mark.parametrize("threads", [1, 2])
def test_micro_batches_sum_to_the_whole_batch(threads):
    model, (tokens, targets) = wide_model(threads=threads), make_batch(B=5)
    targets[1, 3:] = -1
    targets[4, :] = -1                                              # a micro-batch without any target is no error
    losses, gradient = step_gradient(model, tokens, targets)
    counted = model_cpu.count_targets(targets, tokens.shape[1], TINY.predict)
    model.flat_grads[...], total = 0.0, 0.0
    for rows in (slice(0, 2), slice(2, 4), slice(4, 5)):
        total = total + model.forward(tokens[rows], targets[rows], counted)
        model.backward()
    assert np.allclose(total, losses, rtol=1e-13)
    assert np.abs(model.flat_grads - gradient).max() < 1e-13 * np.abs(gradient).max()
    assert model.forward(tokens[4:], targets[4:], counted).tolist() == [0.0] * TINY.predict
    assert np.array_equal(model.forward(tokens[2:4], targets[2:4], counted.tolist()),
                          model.forward(tokens[2:4].tolist(), targets[2:4].tolist(), counted))


def test_a_head_without_targets_contributes_nothing():
    model, (tokens, targets) = wide_model(), make_batch(B=1)
    targets[0, 1:] = -1                                             # only head 0 at position 0 has a target
    losses, gradient = step_gradient(model, tokens, targets)
    assert losses[0] > 0 and losses[1:].tolist() == [0.0, 0.0]
    assert np.all(np.isfinite(gradient))
    assert np.all(model.grads["heads"][TINY.vocab:] == 0) and np.any(model.grads["heads"][:TINY.vocab] != 0)


def test_head_0_without_any_target_is_refused():
    model, (tokens, targets) = wide_model(), make_batch()
    targets[...] = -1
    targets[0, -1] = 1                                              # of head 2 alone
    with pytest.raises(ValueError, match="head 0 has no counted target"):
        model.forward(tokens, targets)
    with pytest.raises(ValueError, match="head 0 has no counted target"):
        model.forward(tokens, targets, [0, 1, 1])
    assert model.forward(tokens, targets, [1, 0, 1])[:2].tolist() == [0.0, 0.0]


def test_masked_positions_have_no_gradient():
    """A token that only positions without any target can see changes neither the losses nor a gradient."""
    model, (tokens, targets) = wide_model(), make_batch(B=1)
    targets[0, 4:] = -1                                             # so only positions 0..3 have a target of any head
    losses, gradient = step_gradient(model, tokens, targets)
    tokens[0, 5] = (tokens[0, 5] + 1) % TINY.vocab
    losses_after, gradient_after = step_gradient(model, tokens, targets)
    assert np.array_equal(losses, losses_after) and np.array_equal(gradient, gradient_after)


def test_float32_agrees_with_float64():
    tokens, targets = make_batch(T=16)
    double, single = wide_model(), wide_model(dtype=np.float32)
    losses, gradient = step_gradient(double, tokens, targets)
    losses32, gradient32 = step_gradient(single, tokens, targets)
    assert gradient32.dtype == np.float32
    assert np.allclose(losses32, losses, rtol=1e-5)
    assert np.linalg.norm(gradient32 - gradient) < 1e-5 * np.linalg.norm(gradient)


@pytest.mark.parametrize("tokens, targets, words", [
    ([[0, 264]], [[0] * 4], "token id 264 is out of range: the vocabulary has 264 ids, 0 to 263."),
    ([[0, -1]], [[0] * 4], "token id -1 is out of range"),
    ([[0, 1]], [[0, 0, 0, 264]], "target id 264 is out of range"),
    ([[0, 1]], [[0, 0, 0, -2]], "target id -2 is out of range"),
    ([[0] * 17], [[0] * 19], "17 tokens do not fit the context of 16."),
    ([[0, 1]], [[0] * 3], "of the shape (B, T+K-1) = (1, 4), not int64 of shape (1, 3)."),
    ([0, 1], [[0] * 4], "tokens must be a non-empty (B, T) array of integers"),
    ([[]], [[0] * 2], "tokens must be a non-empty (B, T) array of integers"),
    ([[0.0, 1.0]], [[0] * 4], "tokens must be a non-empty (B, T) array of integers, not float64 of shape (1, 2)."),
    ([[0, 1]], [[0.0] * 4], "of the shape (B, T+K-1) = (1, 4), not float64 of shape (1, 4)."),
    ([[5, 300], [-7, 0]], [[0] * 4] * 2, "token id 300 is out of range"),
    ([[0, 1]], [[0] * 4] * 2, "of the shape (B, T+K-1) = (1, 4), not int64 of shape (2, 4).")])
def test_bad_batches_are_refused(tokens, targets, words):
    with pytest.raises(ValueError) as error:
        Model(TINY).forward(np.array(tokens), np.array(targets))
    assert words in str(error.value)
    if "token" in words:
        with pytest.raises(ValueError) as error:
            Model(TINY).logits(tokens)
        assert words in str(error.value)


def test_the_outermost_batch_is_accepted():
    targets = [[0, 263, -1] * 6] * 3
    losses = Model(TINY).forward([[0, 263] * 8] * 3, targets)       # as long as the context; the first and the last id
    assert np.all(np.abs(losses - math.log(TINY.vocab)) < 0.2)


def test_logits_are_a_new_array():
    model, (tokens, _) = wide_model(), make_batch()
    logits = model.logits(tokens)
    kept = logits.copy()
    model.logits((tokens + 1) % TINY.vocab)
    assert np.array_equal(logits, kept) and logits.shape == (4, 7, TINY.predict, TINY.vocab)


# ---------------------------------------------------------------------------------------------------------------------
# Threads, and the optimizer
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads, B", [(2, 4), (2, 5), (2, 1), (3, 2)])
def test_threads_change_nothing_but_rounding(threads, B):
    tokens, targets = make_batch(B=B)
    targets[0, 2:] = -1
    one, many = wide_model(), wide_model(threads=threads)
    losses, gradient = step_gradient(one, tokens, targets)
    losses_many, gradient_many = step_gradient(many, tokens, targets)
    assert np.allclose(losses_many, losses, rtol=1e-13)
    assert np.abs(gradient_many - gradient).max() < 1e-13 * np.abs(gradient).max()


def test_a_smaller_batch_after_a_larger_one():
    """Neither an idle thread's gradient nor what a larger batch left in the buffers gets into the sum."""
    many, one = wide_model(threads=3), wide_model()
    tokens, targets = make_batch(B=5, T=9)
    step_gradient(many, tokens, targets)
    for rows, T in [(slice(0, 2), 4), (slice(3, 4), 7), (slice(0, 5), 9)]:
        batch = tokens[rows, :T], targets[rows, :T + TINY.predict - 1]
        losses, gradient = step_gradient(one, *batch)
        losses_many, gradient_many = step_gradient(many, *batch)
        assert np.allclose(losses_many, losses, rtol=1e-13)
        assert np.abs(gradient_many - gradient).max() < 1e-13 * np.abs(gradient).max()


@pytest.mark.parametrize("threads", [1, 2])
def test_backward_adds_to_the_gradient(threads):
    model, (tokens, targets) = wide_model(threads=threads), make_batch()
    _, gradient = step_gradient(model, tokens, targets)
    model.forward(tokens, targets)
    model.backward()
    assert np.abs(model.flat_grads - 2 * gradient).max() < 1e-13 * np.abs(gradient).max()


@pytest.mark.filterwarnings("error")
def test_overflow_in_a_thread_is_silent():
    model, (tokens, targets) = wide_model(dtype=np.float32, threads=2), make_batch()
    model.params["heads"][...] = 1e38
    losses, _ = step_gradient(model, tokens, targets)
    assert not np.all(np.isfinite(losses))


def test_buffers_are_kept_and_grow():
    buffers = model_cpu.Buffers(np.float32)
    first = buffers("a", 3, 4)
    assert first.shape == (3, 4) and first.dtype == np.float32 and not np.any(first)
    for shape in [(12,), (2, 5), (1,)]:                             # what fits takes the front of the same array
        again = buffers("a", *shape)
        assert again.shape == shape and again.ctypes.data == first.ctypes.data
    assert not np.shares_memory(buffers("b", 3, 4), first)
    larger = buffers("a", 13)
    assert larger.shape == (13,) and not np.shares_memory(larger, first) and np.shares_memory(buffers("a", 12), larger)


def test_a_step_makes_no_new_buffers():
    model, (tokens, targets) = wide_model(threads=2), make_batch()

    def addresses():
        return [(name, array.ctypes.data) for s in model.slices for b in (*s.layers, s.work) for name, array in b.arrays.items()]
    step_gradient(model, tokens, targets)
    before = addresses()
    step_gradient(model, tokens, targets)
    assert addresses() == before


def train_steps(model, steps=4, B=5):
    losses = []
    for step in range(steps):
        tokens, targets = make_batch(model.config, B=B, seed=step)
        losses.append(model.forward(tokens, targets))
        model.backward()
        losses.append(model.update(lr=1e-2))
    return losses


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_training_is_bit_identical_from_run_to_run(threads):
    first, second = (wide_model(dtype=np.float32, threads=threads) for _ in range(2))
    for a, b in zip(train_steps(first), train_steps(second)):
        assert np.array_equal(a, b)
    assert np.array_equal(first.flat_params, second.flat_params)
    assert first.step == 4 and not np.any(first.flat_grads)


def test_update_clips_the_norm_and_returns_it_unclipped():
    """With one step from m = v = 0 the scale of the gradient cancels in the update, but not in the moments."""
    model = wide_model()
    model.flat_grads[...] = np.random.default_rng(0).standard_normal(model.flat_grads.shape)
    gradient, norm = model.flat_grads.copy(), np.linalg.norm(model.flat_grads)
    assert model.update(lr=1e-3, clip=0.5) == pytest.approx(norm, rel=1e-12)
    assert np.linalg.norm(model.m / (1 - 0.9)) == pytest.approx(0.5 * norm / (norm + 1e-6), rel=1e-9)
    assert np.allclose(model.v / (1 - 0.95), (gradient * 0.5 / (norm + 1e-6)) ** 2, rtol=1e-9, atol=0)
    model.flat_grads[...] = 1e-3 * gradient / norm                  # below the limit: untouched
    model.update(lr=1e-3, beta1=0.0, clip=0.5)
    assert np.allclose(model.m, 1e-3 * gradient / norm, rtol=1e-12, atol=0)


def test_update_by_hand_and_decay_of_matrices_only():
    model = wide_model()
    before, decayed = model.flat_params.copy(), model_cpu.param_count(TINY, decayed_only=True)
    model.update(lr=0.1, decay=0.5)                                 # no gradient at all: decay alone
    assert np.allclose(model.flat_params[:decayed], before[:decayed] * (1 - 0.1 * 0.5), rtol=1e-15)
    assert np.array_equal(model.flat_params[decayed:], before[decayed:])
    param, m, v = 2.0, 0.0, 0.0
    flat, grad, flat_m, flat_v = np.array([2.0]), np.empty(1), np.zeros(1), np.zeros(1)
    for step, g in enumerate([0.3, -0.2, 0.05], start=1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        param -= 0.01 * (0.1 * param + (m / (1 - 0.9 ** step)) / (math.sqrt(v / (1 - 0.95 ** step)) + 1e-8))
        grad[0] = g
        model_cpu.adamw_update(flat, grad, flat_m, flat_v, step, 0.01, 0.9, 0.95, 1e-8, 0.1)
        assert flat[0] == pytest.approx(param, rel=1e-14)


@pytest.mark.parametrize("threads", [1, 2])
def test_updates_by_hand_with_the_defaults(threads):
    """More parameters than two of the pieces of an update; gradients below, about and above eps; a norm above the
    limit, then two below it."""
    config, rng = dataclasses.replace(TINY, vocab=2048), np.random.default_rng(0)
    model, decayed = wide_model(config, threads=threads), model_cpu.param_count(config, decayed_only=True)
    assert decayed > 1 << 17
    param, m, v = model.flat_params.copy(), 0.0, 0.0
    decay = np.where(np.arange(param.size) < decayed, 0.1, 0.0)
    for step, norm in enumerate([20.0, 0.01, 0.5], start=1):
        g = rng.standard_normal(param.size) * 10.0 ** rng.uniform(-10, 0, param.size)
        g *= norm / np.linalg.norm(g)
        model.flat_grads[...] = g
        assert model.update(0.01) == pytest.approx(norm, rel=1e-12)
        g *= min(1.0, 1.0 / (norm + 1e-6))
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        param -= 0.01 * (decay * param + m / (1 - 0.9 ** step) / (np.sqrt(v / (1 - 0.95 ** step)) + 1e-8))
        assert np.allclose(model.flat_params, param, rtol=1e-12, atol=1e-14)
        assert np.allclose(model.m, m, rtol=1e-9, atol=1e-25) and np.allclose(model.v, v, rtol=1e-9, atol=1e-40)
        assert model.step == step and not np.any(model.flat_grads)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(value):
    model = wide_model()
    train_steps(model, steps=1)
    before = model.flat_params.copy(), model.m.copy(), model.v.copy()
    model.flat_grads[:] = 1.0
    model.grads["layers.1.out"][2, 3] = value
    assert not math.isfinite(model.update(lr=1.0))
    assert model.step == 1 and not np.isfinite(model.grads["layers.1.out"][2, 3])    # left to look at
    assert all(np.array_equal(a, b) for a, b in zip(before, (model.flat_params, model.m, model.v)))


def test_it_learns():
    model, (tokens, targets) = Model(TINY, dtype=np.float32), make_batch(B=2)
    first = model.forward(tokens, targets)[0]
    assert first == pytest.approx(math.log(TINY.vocab), abs=0.1)
    for _ in range(60):
        model.forward(tokens, targets)
        model.backward()
        model.update(lr=1e-2)
    assert model.forward(tokens, targets)[0] < 0.1


# ---------------------------------------------------------------------------------------------------------------------
# Cached decoding, the window, sampling
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (4, 4), (2, 1)])
def test_extend_in_any_cut_equals_logits(heads, kv_heads):
    model = wide_model(dataclasses.replace(TINY, heads=heads, kv_heads=kv_heads))
    tokens = make_batch(B=1, T=16)[0][0]
    expected = model.logits(tokens[None])[0]
    rng = np.random.default_rng(0)
    cuts = [[], list(range(1, 16))] + [sorted(rng.choice(np.arange(1, 16), n, replace=False)) for n in (1, 2, 4, 8)]
    for cut in cuts:
        model.position = 0
        logits = np.concatenate([model.extend(part) for part in np.split(tokens, cut)])
        assert logits.shape == (16, TINY.predict, TINY.vocab) and model.position == 16
        assert np.abs(logits - expected).max() < 1e-12 * np.abs(expected).max()


def test_setting_position_back_forgets_what_came_after():
    model = wide_model()
    a, b = make_batch(B=2, T=12)[0]
    model.extend(a)
    model.position = 5
    logits = model.extend(b[5:])
    expected = model.logits(np.concatenate([a[:5], b[5:]])[None])[0, 5:]
    assert np.abs(logits - expected).max() < 1e-12 * np.abs(expected).max()


def test_extend_refuses_what_does_not_fit():
    model = wide_model()
    model.extend([1] * 10)
    with pytest.raises(ValueError, match="7 tokens at position 10 do not fit the context of 16."):
        model.extend([1] * 7)
    with pytest.raises(ValueError, match="token id 264 is out of range"):
        model.extend([264])
    assert model.position == 10
    assert len(model.extend([1] * 6)) == 6


def test_extend_keeps_the_precision():
    model, tokens = wide_model(dtype=np.float32), make_batch(B=1)[0][0]
    logits = model.extend(tokens)
    assert logits.dtype == model.cache.dtype == model.logits(tokens[None]).dtype == np.float32
    assert np.allclose(logits, wide_model().extend(tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("context", [1, 2, 3, 7, 8, 16])
def test_window_rule(context):
    starts = [window_start(n, context) for n in range(1, 10 * context + 10)]
    assert not any(starts[:context])                                # while the text fits: from the beginning
    for n, start in enumerate(starts, start=1):
        assert 1 <= n - start <= context
    for n, (before, after) in enumerate(itertools.pairwise(starts), start=1):
        if after != before:                                         # only a full window moves, and keeps its last half
            assert n - before == context and n - after == context // 2


@pytest.mark.parametrize("prompt", [1, 9, 16, 17, 40])
def test_greedy_generation_equals_recomputation_beyond_the_context(prompt):
    model = wide_model(seed=prompt)
    text = make_batch(B=1, T=prompt)[0][0].tolist()
    cached = list(itertools.islice(generate(model, text, temperature=0), 50))
    for token in cached:
        window = text[window_start(len(text), TINY.context):]
        assert token == model.logits([window])[0, -1, 0].argmax()
        text.append(token)
    assert len(set(cached)) > 3                                     # or the comparison would mean little


def test_sample_filters():
    logits, rng = np.array([1.0, 3.0, 2.0, 3.0, -1.0]), np.random.default_rng(0)
    assert sample(logits, rng, temperature=0) == 1                  # of equals, the first
    assert {sample(logits, rng, top_k=1) for _ in range(50)} == {1}
    assert {sample(logits, rng, top_k=3) for _ in range(300)} == {1, 2, 3}
    assert {sample(logits, rng, top_k=99) for _ in range(2000)} == {0, 1, 2, 3, 4}
    p = np.exp(logits) / np.exp(logits).sum()                       # sorted: 0.40 0.40 0.15 0.05 0.01
    assert {sample(logits, rng, top_p=p[1] / 2) for _ in range(50)} == {1}
    assert {sample(logits, rng, top_p=p[1] + 0.01) for _ in range(300)} == {1, 3}
    assert {sample(logits, rng, top_p=p[1] + p[3] + 0.01) for _ in range(500)} == {1, 2, 3}
    assert {sample(logits, rng, top_k=2, top_p=0.9) for _ in range(300)} == {1, 3}
    assert {sample(logits, rng, temperature=1e-3) for _ in range(100)} == {1, 3}


class Recorder:
    """A generator that notes the probabilities it is to draw from, and "draws" the last id that may come."""
    def choice(self, n, p):
        assert len(p) == n and p.dtype == np.float64
        self.p = p.tolist()
        return int(np.flatnonzero(p)[-1])


@pytest.mark.parametrize("options, expected", [
    (dict(), [4 / 12, 4 / 12, 2 / 12, 1 / 12, 1 / 12]),
    (dict(temperature=0.5), [16 / 38, 16 / 38, 4 / 38, 1 / 38, 1 / 38]),
    (dict(temperature=2.0), [2 / (6 + 2 ** 0.5)] * 2 + [2 ** 0.5 / (6 + 2 ** 0.5)] + [1 / (6 + 2 ** 0.5)] * 2),
    (dict(top_k=3), [0.4, 0.4, 0.2]), (dict(top_k=1), [1.0]), (dict(top_k=2), [0.5, 0.5]),
    (dict(top_k=5), [4 / 12, 4 / 12, 2 / 12, 1 / 12, 1 / 12]),
    (dict(top_p=0.3), [1.0]), (dict(top_p=0.4), [0.5, 0.5]), (dict(top_p=0.7), [0.4, 0.4, 0.2]),
    (dict(top_p=0.9), [4 / 11, 4 / 11, 2 / 11, 1 / 11]),
    (dict(top_k=3, top_p=0.7), [0.5, 0.5]),                         # top_p of what top_k has left: 0.4 0.4 0.2
    (dict(temperature=0.5, top_p=0.5), [0.5, 0.5]), (dict(temperature=0.5, top_p=0.42), [1.0])])
def test_sample_by_hand(options, expected):
    """The probabilities of ids 2, 4, 1, 0, 3: four to four to two to one to one."""
    logits, order, rng = np.log(np.array([1.0, 2.0, 4.0, 1.0, 4.0], np.float32)), [2, 4, 1, 0, 3], Recorder()
    drawn = sample(logits, rng, **options)
    assert rng.p == pytest.approx(expected + [0.0] * (5 - len(expected)), rel=1e-6)
    assert drawn == order[len(expected) - 1] and type(drawn) is int


def test_of_equals_the_first_ids_are_kept():
    rng = Recorder()
    for k in (1, 7, 150):
        assert sample(np.tile([0.0, 1.0], 150), rng, top_k=k) == 2 * k - 1      # the k-th of the odd ids
    model, (tokens, _) = wide_model(), make_batch()
    model.params["heads"][::2], model.params["heads"][1::2] = 0.0, 0.1
    assert all(best in ([0, 2, 4], [1, 3, 5]) for _, _, best in model_cpu.euler_table(model, tokens))


def test_top_p_stops_exactly_where_it_is_reached():
    rng = Recorder()
    for top_p, kept in [(0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (0.75, 3), (0.76, 4), (1.0, 4)]:
        sample(np.zeros(4), rng, top_p=top_p)                       # four quarters: their sums are exact
        assert rng.p == [1 / kept] * kept + [0.0] * (4 - kept)


def test_sample_of_large_logits():
    rng = Recorder()
    with np.errstate(all="raise", under="ignore"):
        for shift in (-1e4, 1e4):
            sample(np.array([0.0, 1.0, -1e4]) + shift, rng, temperature=0.5)
            assert rng.p == pytest.approx([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2)), 0.0], rel=1e-11)
    logits = np.random.default_rng(0).standard_normal(4096, np.float32)     # float32's rounding is none of choice's business
    assert 0 <= sample(logits, np.random.default_rng(0)) < 4096
    assert type(sample(logits, rng, temperature=0)) is int


@pytest.mark.parametrize("temperature, top_k, top_p", [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.8)])
def test_sample_has_the_right_distribution(temperature, top_k, top_p):
    logits, rng, n = np.array([0.3, -1.0, 1.2, 0.0, 0.7, -0.4]), np.random.default_rng(7), 6000
    p = np.exp(logits / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    keep = order[:top_k] if top_k else order[:1 + np.sum(np.cumsum(p[order]) < top_p)]
    expected = np.zeros(6)
    expected[keep] = p[keep] / p[keep].sum()
    counts = np.bincount([sample(logits, rng, temperature, top_k, top_p) for _ in range(n)], minlength=6)
    assert np.all(counts[expected == 0] == 0)
    chi2 = np.sum((counts - n * expected)[keep] ** 2 / (n * expected)[keep])
    assert chi2 < 20.5                                              # 0.1% point for 5 degrees of freedom


def test_generation_is_determined_by_its_seed():
    model = wide_model()
    first, again, other = (list(itertools.islice(generate(model, [1, 2], seed=seed), 40)) for seed in (3, 3, 4))
    assert first == again and first != other
    assert max(itertools.islice(generate(model, [1, 2], seed=3, vocab=8), 40)) < 8


def test_generate_passes_everything_on(monkeypatch):
    model, calls, text = wide_model(), [], [1, 2, 3]
    model.extend([9, 9])                                            # what another text has left in the cache

    def note(logits, rng, temperature, top_k, top_p):
        calls.append((logits.copy(), rng.bit_generator.state, temperature, top_k, top_p))
        return 7
    monkeypatch.setattr(model_cpu, "sample", note)
    for options, passed, V in [(dict(temperature=0.5, top_k=3, top_p=0.25, seed=5, vocab=260), (0.5, 3, 0.25), 260),
                               (dict(seed=5), (1.0, 0, 1.0), TINY.vocab)]:
        calls.clear()
        assert list(itertools.islice(generate(model, text, **options), 3)) == [7, 7, 7] and text == [1, 2, 3]
        for i, (logits, state, *found) in enumerate(calls):
            assert tuple(found) == passed and state == np.random.default_rng(5).bit_generator.state
            assert np.allclose(logits, model.logits([text + [7] * i])[0, -1, 0, :V], rtol=0, atol=1e-11)
    for _ in range(2):
        next(generate(model, text))
    assert calls[-1][1] != calls[-2][1]                             # without a seed no two are alike


def test_decoding_reads_each_token_once(monkeypatch):
    """One call a token, of that token alone; only a new window is read as a whole."""
    model, lengths, extend = wide_model(), [], Model.extend
    monkeypatch.setattr(Model, "extend", lambda self, tokens: lengths.append(len(tokens)) or extend(self, tokens))
    list(itertools.islice(generate(model, [1] * 5, seed=0), 30))
    assert lengths == [5] + [1] * 11 + [9] + [1] * 7 + [9] + [1] * 7 + [9, 1]


@pytest.mark.parametrize("options", [dict(temperature=-1), dict(temperature=math.nan), dict(top_k=-1), dict(top_p=0),
                                     dict(top_p=1.1)])
def test_generate_refuses(options):
    with pytest.raises(ValueError, match="sampling needs"):
        next(generate(wide_model(), [1], **options))
    with pytest.raises(ValueError, match="at least one token"):
        next(generate(wide_model(), []))


def test_euler_table():
    model, (tokens, _) = wide_model(), make_batch(B=2, T=10)
    targets = np.full((2, 9 + TINY.predict - 1), -1)
    targets[:, :9] = tokens[:, 1:]
    rows = model_cpu.euler_table(model, tokens)
    assert len(rows) == TINY.layers + 1 and rows[0][1] == 0.0 and all(step > 0 for _, step, _ in rows[1:])
    assert rows[-1][0] == pytest.approx(model.forward(tokens[:, :9], targets)[0], rel=1e-12)
    assert rows[-1][2] == np.argsort(-model.logits(tokens[:, :9])[-1, -1, 0])[:3].tolist()
    shallow = wide_model(dataclasses.replace(TINY, layers=1))       # stopping after layer 0 is a model of one layer
    for name in shallow.params:
        shallow.params[name][...] = model.params[name]
    assert rows[1][0] == pytest.approx(shallow.forward(tokens[:, :9], targets)[0], rel=1e-12)
    states = [model.params["embed"][tokens[:, :9]].reshape(18, -1)]
    for one in (shallow, model):
        one.logits(tokens[:, :9])
        states.append(one.slices[0].work("x", 18, TINY.dim).copy())
    for (loss, step, best), before, x in zip(rows, [states[0], *states], states):
        h = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * model.params["norm"]
        logits = h @ model.params["heads"][:TINY.vocab].T
        logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        assert loss == pytest.approx(-logp[np.arange(18), tokens[:, 1:].reshape(-1)].mean(), rel=1e-12)
        assert step == pytest.approx(np.mean([math.dist(a, b) / math.hypot(*b) for a, b in zip(x, before)]), rel=1e-12)
        assert best == np.argsort(-logits[-1])[:3].tolist() and type(loss) is type(step) is float


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------
TOKENIZER = Tokenizer.train(["the cat sat on the mat"], 262)
STATE = {"tokens": 123, "settings": {"tokens_key": "none", "name": 'quote " and é'}, "crc32": "00000000"}


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of step 1."""
    model = wide_model(dtype=np.float32)
    train_steps(model, steps=1)
    save(str(tmp_path / "run"), model, TOKENIZER, STATE)
    return str(tmp_path / "run")


def reload(folder):
    """-> (model with its moments, state)"""
    model, tokenizer = load(folder, model_cpu, {"dtype": np.float32})
    assert tokenizer.encode("the cat") == TOKENIZER.encode("the cat")
    return model, load_state(folder, model)


def refusal(folder, path):
    """The one sentence with which load or load_state refuses the folder; it names the file."""
    with pytest.raises(ValueError) as error:
        reload(folder)
    text = str(error.value)
    assert os.path.join(folder, path) in text and "\n" not in text and text.endswith(".")
    return text


def buffers(model):
    return [array.copy() for array in (model.flat_params, model.m, model.v)]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b))


def test_save_and_load_give_back_every_bit(folder):
    model = wide_model(dtype=np.float32)
    train_steps(model, steps=1)
    loaded, state = reload(folder)
    assert loaded.config == model.config and loaded.step == 1 and state == STATE
    assert same(buffers(loaded), buffers(model)) and np.any(loaded.m) and np.any(loaded.v)
    assert all(np.array_equal(a, b) for a, b in zip(train_steps(loaded), train_steps(model)))
    assert same(buffers(loaded), buffers(model))
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
                                          "train_state.safetensors"]


def test_float64_and_other_sizes_round_trip(tmp_path):
    for i, change in enumerate([dict(), dict(predict=1), dict(kv_heads=4), dict(layers=1, context=3, mtp_weight=0)]):
        model = wide_model(dataclasses.replace(TINY, **change))
        save(str(tmp_path / str(i)), model, TOKENIZER, {})
        loaded, _ = load(str(tmp_path / str(i)), model_cpu)
        assert loaded.config == model.config and np.array_equal(loaded.flat_params, model.flat_params)
        assert load_state(str(tmp_path / str(i)), loaded) == {}


@pytest.mark.parametrize("name", model_cpu.CHECKPOINT)
def test_a_file_cut_at_any_place_is_refused(folder, name):
    path = os.path.join(folder, name)
    raw = open(path, "rb").read()
    header = 8 + int.from_bytes(raw[:8], "little")
    for end in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, (header + len(raw)) // 2, len(raw) - 4,
                len(raw) - 1):
        with open(path, "wb") as file:
            file.write(raw[:end])
        assert "damaged" in refusal(folder, name)
    with open(path, "wb") as file:
        file.write(raw + b"\0")
    refusal(folder, name)


@pytest.mark.parametrize("name", model_cpu.CHECKPOINT)
def test_a_flipped_byte_is_refused(folder, name):
    path = os.path.join(folder, name)
    raw = open(path, "rb").read()
    size, rng = int.from_bytes(raw[:8], "little"), np.random.default_rng(0)
    places = [(i, x) for i in range(8) for x in range(1, 256)]      # the length of the header: every other value
    places += [(8 + i, x) for i in range(size) for x in (1 << int(rng.integers(8)), int(rng.integers(1, 256)))]
    places += [(int(i), 1 << int(rng.integers(8))) for i in rng.integers(8 + size, len(raw), 100)]
    accepted = []
    with open(path, "r+b", buffering=0) as file:
        for i, x in places:
            os.pwrite(file.fileno(), bytes([raw[i] ^ x]), i)
            try:
                model_cpu.read_safetensors(path)
                accepted.append((i, x))
            except ValueError as error:
                assert path in str(error)
            os.pwrite(file.fileno(), raw[i:i + 1], i)
        assert accepted == []
        os.pwrite(file.fileno(), b"!", 20)
    refusal(folder, name)


def test_missing_extra_and_misshapen_tensors_are_refused(folder):
    path = os.path.join(folder, "model.safetensors")
    tensors, metadata = model_cpu.read_safetensors(path)
    metadata.pop("crc32")
    name = "model.layers.1.self_attn.k_proj.weight"
    for change, words in [({name: None}, f"the tensor {name} is missing"),
                          ({"surplus": np.zeros(3, np.float32)}, "the tensor surplus is none of this model's"),
                          ({name: tensors[name].T}, f"{name} has the shape (16, 8), config.json asks for (8, 16)"),
                          ({name: tensors[name].ravel()}, f"the tensor {name} has the shape (128,)")]:
        changed = {key: value for key, value in {**tensors, **change}.items() if value is not None}
        checkpoint.write_safetensors(path, changed, metadata)
        assert words in refusal(folder, "model.safetensors")
    checkpoint.write_safetensors(path, {}, metadata)
    assert "missing" in refusal(folder, "model.safetensors")
    checkpoint.write_safetensors(path, tensors, metadata)
    reload(folder)


def test_foreign_training_states_are_refused(folder):
    path = os.path.join(folder, "train_state.safetensors")
    tensors, metadata = model_cpu.read_safetensors(path)
    for changed in ({"m": tensors["m"]}, {**tensors, "w": tensors["m"]}, {"m": tensors["m"], "v": tensors["v"][1:]}):
        checkpoint.write_safetensors(path, changed, {"step": "1", "state": "{}"})
        assert "should hold the tensors m and v" in refusal(folder, "train_state.safetensors")
    checkpoint.write_safetensors(path, tensors, {"step": "2", "state": "{}"})
    assert "is of step 2, model.safetensors of step 1" in refusal(folder, "train_state.safetensors")
    os.remove(path)
    assert "holds no training state" in refusal(folder, "train_state.safetensors")


@pytest.mark.parametrize("change, words", [
    (dict(hidden_act="gelu"), "hidden_act is 'gelu', this model has 'silu'"), (dict(rms_norm_eps=1e-6), "rms_norm_eps"),
    (dict(rope_theta=500000.0), "rope_theta"), (dict(tie_word_embeddings=True), "tie_word_embeddings"),
    (dict(model_type="mistral"), "model_type"), (dict(intermediate_size=40), "intermediate_size"),
    (dict(num_attention_heads="4"), "heads must be a whole number"), (dict(num_key_value_heads=3), "kv_heads"),
    (dict(mtp_heads=None), "damaged or not one of ours"), (dict(hidden_size=17), "multiples of 8")])
def test_foreign_configs_are_refused(folder, change, words):
    path = os.path.join(folder, "config.json")
    config = json.load(open(path))
    json.dump({**config, **change}, open(path, "w"))
    assert words in refusal(folder, "config.json")


def test_configs_that_are_no_config_are_refused(folder):
    path = os.path.join(folder, "config.json")
    whole = open(path, "rb").read()
    config = json.loads(whole)
    texts = [whole[:n] for n in (0, 1, len(whole) // 2, len(whole) - 1)] + [b"[]", b"1", b"null", b"\xff\xfe", b'"x"']
    texts += [json.dumps({k: v for k, v in config.items() if k != key}).encode()
              for key in config if config[key] is not None]
    for text in texts:
        with open(path, "wb") as file:
            file.write(text)
        refusal(folder, "config.json")


def test_another_tokenizer_is_refused(folder):
    path = os.path.join(folder, "tokenizer.json")
    Tokenizer.train(["the cat sat on the mat and the dog sat on the cat"], 266).save(path)
    with pytest.raises(ValueError, match="tokenizer.json is not this model's: it has 266 tokens, config.json says 264"):
        load(folder, model_cpu)
    open(path, "w").write("{}")
    refusal(folder, "tokenizer.json")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(folder, name):
    os.remove(os.path.join(folder, name))
    refusal(folder, name)


def test_no_folder_at_all(tmp_path):
    assert "holds no checkpoint" in refusal(str(tmp_path / "nothing"), "config.json")


class Killed(BaseException):
    """Stands for SIGKILL."""


def kill_at(monkeypatch, stage):
    """Let the process "die" at its stage-th call that changes the disk; a file about to be synced is cut in half, as if
    it had not been written to its end.  After its death nothing changes the disk, whatever handlers still run."""
    calls = itertools.count()

    def wrap(name, original):
        def call(*arguments, **options):
            number = next(calls)
            if number == stage and name == "fsync":
                os.ftruncate(arguments[0], os.fstat(arguments[0]).st_size // 2)
            if number >= stage:
                raise Killed
            return original(*arguments, **options)
        monkeypatch.setattr(os, name, call)
    for name in ("replace", "remove", "fsync"):
        wrap(name, getattr(os, name))


def test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint(folder, tmp_path, monkeypatch):
    old, _ = reload(folder)
    new, _ = reload(folder)
    train_steps(new, steps=1)
    expected = {1: buffers(old), 2: buffers(new)}
    found = []
    for stage in itertools.count():
        copy = str(tmp_path / f"killed{stage}")
        shutil.copytree(folder, copy)
        with monkeypatch.context() as patch:
            kill_at(patch, stage)
            try:
                save(copy, new, TOKENIZER, {"after": 2})
                finished = True
            except Killed:
                finished = False
        if stage % 2:
            save_twice = str(tmp_path / f"again{stage}")            # nor may the next save trip over the remains
            shutil.copytree(copy, save_twice)
            save(save_twice, new, TOKENIZER, {"after": 2})
            assert same(buffers(reload(save_twice)[0]), expected[2])
            assert not [name for name in os.listdir(save_twice) if name.endswith(".new")]
        files = {name: os.path.getmtime(os.path.join(copy, name)) for name in os.listdir(copy)}
        loaded, state = reload(copy)
        # a reader touches nothing: the files may be those of a run that is saving at this moment
        assert files == {name: os.path.getmtime(os.path.join(copy, name)) for name in os.listdir(copy)}
        found.append(loaded.step)
        assert same(buffers(loaded), expected[loaded.step]), stage
        assert state == (STATE if loaded.step == 1 else {"after": 2})
        if finished:
            break
    assert found == sorted(found) and found[0] == 1 and found[-1] == 2 and len(found) > 6
    assert found.count(2) >= 2                                      # one of them between the two renames


# What a killed save can leave: how much of the model's and of the state's .new file there is (None: no such file), and
# whether the new model has been renamed already.
@pytest.mark.parametrize("new_model, new_state, renamed", [
    (0, None, False), (0.5, None, False), (1, None, False), (1, 0, False), (1, 0.5, False), (1, 1, False),
    (None, 1, True)])
def test_the_repair_itself_may_be_killed(folder, tmp_path, monkeypatch, new_model, new_state, renamed):
    after = str(tmp_path / "after")
    new, _ = reload(folder)
    train_steps(new, steps=1)
    save(after, new, TOKENIZER, {"after": 2})
    for stage in range(4):
        copy = str(tmp_path / f"killed{stage}")
        shutil.copytree(folder, copy)
        for name, part in zip(model_cpu.CHECKPOINT, (new_model, new_state)):
            if part is not None:
                raw = open(os.path.join(after, name), "rb").read()
                with open(os.path.join(copy, name + ".new"), "wb") as file:
                    file.write(raw[:int(part * len(raw))])
        if renamed:
            shutil.copy(os.path.join(after, model_cpu.CHECKPOINT[0]), copy)
        with monkeypatch.context() as patch:
            kill_at(patch, stage)
            try:
                checkpoint.repair(copy)
            except Killed:
                pass
        assert reload(copy)[0].step == (2 if renamed else 1), stage


def test_a_full_disk_keeps_the_last_checkpoint(folder):
    """Writes fail at a limit on the size of a file: in tokenizer.json, in the model, in the training state."""
    old, _ = reload(folder)
    new, _ = reload(folder)
    train_steps(new, steps=1)
    sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (100, 5000, sizes["model.safetensors"] - 1000, sizes["train_state.safetensors"] - 1000):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            with pytest.raises(OSError):
                save(folder, new, TOKENIZER, {"after": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        loaded, state = reload(folder)
        assert loaded.step == 1 and state == STATE and same(buffers(loaded), buffers(old))
        assert not [name for name in os.listdir(folder) if name.endswith(".safetensors.new")]   # space is given back
    save(folder, new, TOKENIZER, {"after": 2})
    assert reload(folder)[0].step == 2


def test_chat_template_and_end_token(tmp_path):
    model = wide_model(dtype=np.float32)
    save(str(tmp_path), model, TOKENIZER, {}, chat_template="{{ messages }}")
    assert json.load(open(tmp_path / "tokenizer_config.json"))["chat_template"] == "{{ messages }}"
    assert json.load(open(tmp_path / "config.json"))["eos_token_id"] == TOKENIZER.special["<|end|>"]
    load(str(tmp_path), model_cpu)
    save(str(tmp_path), model, TOKENIZER, {})
    assert "chat_template" not in json.load(open(tmp_path / "tokenizer_config.json"))
    assert json.load(open(tmp_path / "config.json"))["eos_token_id"] == TOKENIZER.special["<|endoftext|>"]


# ---------------------------------------------------------------------------------------------------------------------
# The tour
# ---------------------------------------------------------------------------------------------------------------------
def run_tour(*arguments):
    command = [sys.executable, model_cpu.__file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)     # only so that a hang ends


def test_tour(tmp_path):
    result = run_tour("--model", str(tmp_path / "nothing"))
    assert result.returncode == 0 and result.stderr == ""
    for number in range(1, 7):
        assert f"\n{number}. " in "\n" + result.stdout
    line = next(line for line in result.stdout.splitlines() if line.startswith("   by hand "))
    by_hand, numeric = line.split("by hand ")[1].split(", by finite difference ")
    assert float(by_hand) == pytest.approx(float(numeric), rel=1e-7) and float(by_hand) != 0
    line = next(line for line in result.stdout.splitlines() if line.startswith("5. "))
    before, after = line.split("head 0 ")[1].split(" -> ")
    assert float(after) < float(before)


def test_tour_of_a_trained_model_and_of_a_damaged_one(folder):
    result = run_tour("--model", folder)
    assert result.returncode == 0 and "trained for 1 steps" in result.stdout and "layer 1" in result.stdout
    with open(os.path.join(folder, "model.safetensors"), "r+b") as file:
        file.truncate(1000)
    result = run_tour("--model", folder)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ") and "model.safetensors is damaged" in result.stderr
    assert run_tour("--nonsense").returncode == 2


def test_a_single_head_trains():
    """K = 1 is a plain language model: no further heads to weigh."""
    config = dataclasses.replace(TINY, predict=1)
    model, rng = Model(config), np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab, (2, 5))
    targets = rng.integers(0, config.vocab, (2, 5))
    assert config.head_weights.tolist() == [1.0]
    losses = [model.forward(tokens, targets)[0]]
    for _ in range(20):
        model.backward()
        model.update(1e-2)
        losses.append(model.forward(tokens, targets)[0])
    assert losses[-1] < 0.7 * losses[0]
