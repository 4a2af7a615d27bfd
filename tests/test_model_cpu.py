"""model_cpu.py: sizes, layers, loss, threads, cached decoding, sampling, the tour.

That every gradient is right is gradcheck.py's part; that the model is the one the world calls Llama, tests/peers'."""
import dataclasses
import inspect
import itertools
import math
import subprocess
import sys
import unittest.mock

import numpy as np
import pytest

import gradcheck
import model_cpu
from model_cpu import CONFIGS, Config, Decoder, Model, generate, gumbel, sample, window_start

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


def decayed_count(config):
    """Numbers at the front of the flat buffers that are updated with decay."""
    return sum(part.stop - part.start for _, part, _, decayed in model_cpu.update_table(config, "adamw") if decayed)


def step_gradient(model, tokens, targets, counted=None):
    """-> (losses, a copy of the flat gradient) of one micro-batch."""
    model.flat_grads[...] = 0.0
    losses = model.forward(tokens, targets, counted)
    model.backward()
    return losses, model.flat_grads.copy()


def test_a_tied_head_is_the_embedding():
    """One matrix under two names, of which each part of the gradient is added; it has no row in the table, and an update's
    parts are those of its own."""
    config = Config(dim=16, heads=2, kv_heads=1, layers=2, context=8, vocab=24, predict=1, tied=True)
    model, apart = Model(config, 0), Model(dataclasses.replace(config, tied=False), 0)
    assert model.params["heads"] is model.params["embed"] and "heads" not in dict(model_cpu.param_table(config))
    assert model_cpu.param_count(config) == model_cpu.param_count(apart.config) - 24 * 16
    for name, view in apart.params.items():
        view[...] = model.params[name]
    tokens, targets = np.arange(16).reshape(2, 8), np.arange(1, 17).reshape(2, 8)
    losses, _ = step_gradient(model, tokens, targets)
    assert np.array_equal(losses, step_gradient(apart, tokens, targets)[0])
    for name, _ in model_cpu.param_table(config):
        expected = apart.grads["embed"] + apart.grads["heads"] if name == "embed" else apart.grads[name]
        np.testing.assert_allclose(model.grads[name], expected, rtol=1e-12, atol=1e-17)
    for optimizer in ("muon", "adamw"):
        table = model_cpu.update_table(config, optimizer)
        assert [rule for rule, *_ in table] == ["adamw", optimizer, "adamw"] and [decayed for *_, decayed in table] == [True, True, False]
        assert table[0][1] == slice(0, 24 * 16) and table[-1][1].stop == model_cpu.param_count(config)
    with pytest.raises(ValueError, match="^tied must be true or false, and true needs predict 1: it is True, and predict 2.$"):
        dataclasses.replace(config, predict=2)
    for context, positions in ((9, 8), (1, 0)):
        with pytest.raises(ValueError, match="positions"):
            dataclasses.replace(config, context=context, positions=positions)
    assert dataclasses.replace(config, context=3, positions=8).context == 3


# ---------------------------------------------------------------------------------------------------------------------
# Sizes
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, count, sizes", [
    ("small", 1_053_824, (128, 4, 2, 4, 128, 512)), ("medium", 10_017_024, (256, 8, 4, 12, 256, 1024)),
    ("big", 116_417_280, (768, 12, 4, 16, 512, 4096))])
def test_parameter_counts(name, count, sizes):
    assert model_cpu.param_count(CONFIGS[name]) == count
    hidden = {128: 344, 256: 688, 768: 2048}[sizes[0]]
    assert dataclasses.astuple(CONFIGS[name]) == (*sizes, 4, 0.3, hidden, 1e-5, 10000.0, False, None)


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
    (dict(dim=0), "dim must be a whole number from 1 to 1,048,576, not 0."),
    (dict(layers=-1), "layers must be"), (dict(vocab=264.0), "vocab must be a whole number from 1 to 1,048,576, not 264.0."),
    (dict(predict=True), "predict must be"), (dict(context="8"), "context must be"),
    (dict(dim=12, heads=3, kv_heads=3), "dim (12) must be a multiple of 8."),
    (dict(vocab=260), "vocab (260) must be a multiple of 8."),
    (dict(vocab=65544), "vocab_size (65544) is more than 65,536: ids are uint16."),
    (dict(heads=16), "dim (16) must be a multiple of 2 x heads (2 x 16): heads must divide 8."),
    (dict(kv_heads=3), "heads (4) must be a multiple of kv_heads: 3 does not divide it."),
    (dict(mtp_weight=-0.1), "mtp_weight must be a finite number of at least 0, not -0.1."),
    (dict(mtp_weight=math.nan), "mtp_weight"), (dict(mtp_weight=math.inf), "mtp_weight"),
    (dict(mtp_weight="1"), "mtp_weight"), (dict(mtp_weight=None), "mtp_weight"),
    (dict(mtp_weight=float("inf")), "mtp_weight"), (dict(context=(1 << 20) + 1), "context must be a whole number from 1 to 1,048,576, not 1048577")])
def test_sizes_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(TINY, **change)
    assert words in str(error.value)


@pytest.mark.parametrize("sizes, words", [
    (dict(dim=48, heads=5), "dim (48) must be a multiple of 2 x heads (2 x 5): heads must divide 24."),
    (dict(dim=16, heads=17), "dim (16) must be a multiple of 2 x heads (2 x 17): heads must divide 8."),
    (dict(heads=4, kv_heads=9), "heads (4) must be a multiple of kv_heads: 9 does not divide it."),
    (dict(dim=80, heads=5, kv_heads=2), "heads (5) must be a multiple of kv_heads: 2 does not divide it.")])
def test_head_counts_that_do_not_fit_are_refused(sizes, words):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(TINY, hidden=None, **sizes)
    assert str(error.value) == words


def test_the_numbers_of_norm_and_rope_have_bounds():
    for name, least in (("norm_eps", 0), ("rope_theta", 1), ("mtp_weight", 0)):
        for value in (least, least + 0.5, 1e30):
            assert getattr(dataclasses.replace(TINY, **{name: value}), name) == value
        for value in (least - 1e-9, math.nan, math.inf, True, "1", None, np.float64(5)):
            with pytest.raises(ValueError) as error:
                dataclasses.replace(TINY, **{name: value})
            assert str(error.value) == f"{name} must be a finite number of at least {least}, not {value!r}."
    for hidden, words in ((12, "hidden (12) must be a multiple of 8."), (0, "hidden must be a whole number"),
                          ((1 << 20) + 8, "hidden must be a whole number from 1 to 1,048,576, not 1048584.")):
        with pytest.raises(ValueError) as error:
            dataclasses.replace(TINY, hidden=hidden)
        assert words in str(error.value)
    assert dataclasses.replace(TINY, hidden=8).hidden == 8


@pytest.mark.parametrize("name", ["dim", "heads", "kv_heads", "layers", "context", "vocab", "predict",
                                  "hidden"])
def test_every_size_is_a_whole_number(name):
    for value in (0, -8, True, 8.0, "8", None)[:6 - (name == "hidden")]:
        with pytest.raises(ValueError, match=f"^{name} must be a whole number from 1 to 1,048,576, not {value!r:.20}.$"):
            dataclasses.replace(TINY, **{name: value})


def test_parameters_are_views_of_one_buffer_with_the_gains_last():
    model = Model(TINY)
    start = 0
    for name, shape in model_cpu.param_table(TINY):
        view = model.params[name]
        assert view.shape == shape and np.shares_memory(view, model.flat_params)
        assert view.ctypes.data == model.flat_params[start:].ctypes.data
        start += view.size
    decayed = decayed_count(TINY)
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
    assert model.dtype == np.float64 and len(model.workspaces) == 1 and model.step == model.decoder.position == 0
    assert np.array_equal(model.flat_params, Model(TINY, seed=0).flat_params)
    assert not np.any(model.flat_grads) and not np.any(model.m) and not np.any(model.v)


def test_buffers_are_read_and_written():
    model = Model(TINY, dtype=np.float32)
    for i, array in enumerate([model.flat_params, model.m, model.v, model.params["layers.1.out"][2:4]]):
        model.write(array, np.full(array.shape, i + 0.1))
        assert np.all(array == np.float32(i + 0.1)) and array.dtype == np.float32
        assert np.array_equal(model.read(array), array)


def test_the_table_of_updates_by_hand():
    embed, layers, heads, gains = 264 * 16, 2 * (32 * 16 + 16 * 16 + 96 * 16 + 16 * 48), 3 * 264 * 16, 5 * 16
    ends = np.cumsum([0, embed, layers, heads, gains]).tolist()
    parts = [slice(*pair) for pair in itertools.pairwise(ends)]
    assert model_cpu.update_table(TINY, "adamw") == [
        ("adamw", part, part, decayed) for part, decayed in zip(parts, (True, True, True, False))]
    in_v = [slice(0, embed), slice(embed, embed), slice(embed, embed + heads), slice(embed + heads, embed + heads + gains)]
    assert model_cpu.update_table(TINY, "muon") == list(zip(
        ("adamw", "muon", "adamw", "adamw"), parts, in_v, (True, True, True, False)))
    assert model_cpu.muon_part(TINY, "muon") == parts[1] and model_cpu.muon_part(TINY, "adamw") == slice(ends[-1], ends[-1])
    assert model_cpu.moment_count(TINY, "adamw") == 2 * ends[-1] == model_cpu.moment_count(TINY, "muon") + layers
    with pytest.raises(ValueError, match=r"^optimizer must be one of muon, adamw, not 'sgd'\.$"):
        Model(TINY, optimizer="sgd")
    for training in (True, False):
        with pytest.raises(ValueError, match="^optimizer must be"):
            Model(TINY, optimizer="Muon", training=training)


def test_each_part_decays_or_not():
    """Without a gradient only the decay moves the weights: those of matrices, and no gain, under both optimizers."""
    for optimizer in model_cpu.OPTIMIZERS:
        model = wide_model(optimizer=optimizer)
        before = {name: weight.copy() for name, weight in model.params.items()}
        model.update(0.5, decay=0.25)
        for name, weight in model.params.items():
            factor = 1 - 0.5 * 0.25 if weight.ndim == 2 else 1.0
            assert np.allclose(weight, factor * before[name], rtol=1e-15, atol=0), name
        assert model.step == 1


def orthogonal(u):
    """What newton_schulz gives, by LAPACK's singular values, which the quintic moves."""
    U, s, Vt = np.linalg.svd(u, full_matrices=False)
    s = s / (np.linalg.norm(u) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s ** 3 + 2.0315 * s ** 5
    return (U * s) @ Vt


@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (16, 16), (1, 5), (64, 128), (344, 128), (128, 344)])
def test_newton_schulz_moves_singular_values_alone(shape):
    for scale in (1e-4, 1.0, 1e6):
        u = scale * np.random.default_rng(0).standard_normal(shape)
        kept = u.copy()
        assert np.abs(model_cpu.newton_schulz(u) - orthogonal(u)).max() < 1e-10 and np.array_equal(u, kept)
    assert not model_cpu.newton_schulz(np.zeros(shape)).any()
    assert model_cpu.newton_schulz(np.ones(shape, np.float32)).dtype == np.float32


def muon_distance(threads=1, steps=3):
    """Steps of Muon against the same from named tensors, q, k, v, gate and up cut by hand: the worst relative distance."""
    rng, model, worst = np.random.default_rng(0), wide_model(optimizer="muon", threads=threads), 0.0
    c, expected = model.config, {name: weight.copy() for name, weight in model.params.items()}
    D, hidden = c.head_dim, [name for name in expected if name.startswith("layers") and expected[name].ndim == 2]
    cuts = {"qkv": [c.heads * D, (c.heads + c.kv_heads) * D], "gate_up": [c.hidden], "out": [], "down": []}
    means = {name: (np.zeros_like(weight), np.zeros_like(weight)) for name, weight in expected.items()}
    for step in range(1, 1 + steps):
        grads = {name: 10.0 ** rng.integers(-3, 2) * rng.standard_normal(w.shape) for name, w in expected.items()}
        norm = math.sqrt(sum((grad ** 2).sum() for grad in grads.values()))
        of_adamw = math.sqrt(sum((grad ** 2).sum() for name, grad in grads.items() if name not in hidden))
        for name, grad in grads.items():
            model.grads[name][...] = grad
        assert model.update(0.02, decay=0.3, clip=0.7) == pytest.approx(norm, rel=1e-12) and model.step == step
        for name, grad in grads.items():
            mean, square = means[name]
            if name not in hidden:
                model_cpu.adamw_update(expected[name].reshape(-1), (grad * (0.7 / (of_adamw + 1e-6))).reshape(-1),
                                       mean.reshape(-1), square.reshape(-1), step, 0.02, 0.9, 0.95, 1e-8,
                                       0.3 if grad.ndim == 2 else 0.0)
                continue
            mean[...] = 0.95 * mean + 0.05 * grad
            parts = (np.split(array, cuts[name.rsplit(".", 1)[1]]) for array in (expected[name], 0.95 * mean + 0.05 * grad))
            for weight, u in zip(*parts):
                weight[...] = weight * (1 - 0.02 * 0.3) - 0.02 * 0.2 * math.sqrt(max(weight.shape)) * orthogonal(u)
        distances = [np.linalg.norm(model.params[name] - weight) / np.linalg.norm(weight) for name, weight in expected.items()]
        worst = max(worst, *distances)
    assert not model.flat_grads.any() and np.isfinite(model.flat_params).all()
    return worst


@pytest.mark.parametrize("threads", [1, 3])
def test_muon_by_named_tensors(threads):
    assert muon_distance(threads) < 1e-12


@pytest.mark.parametrize("name, there, instead", [
    ("newton_schulz", "X = M.T if", "X = M.reshape(M.shape[::-1]) if"), ("newton_schulz", "range(5)", "range(4)"),
    ("newton_schulz", "np.linalg.norm(X)", "np.linalg.norm(X, 2)"), ("newton_schulz", "A @ A", "A"),
    ("muon_update", "grad += momentum * m", "grad[...] = m"), ("muon_update", "math.sqrt(max(param.shape))", "1.0"),
    ("muon_update", "max(", "min("), ("muon_update", "param *= 1 - lr * decay", "param *= (1 - lr * decay) ** 2"),
    ("matrix_table", "[(C, C), (kv, C), (kv, C),", "[(C + 2 * kv, C),"),
    ("matrix_table", "(F, C), (F, C),", "(2 * F, C),"), ("muon_part", '== "muon"', '== "none"')])
def test_mistakes_in_muon_are_noticed(name, there, instead, monkeypatch):
    source, planted = inspect.getsource(getattr(model_cpu, name)), {}
    assert there in source
    exec(source.replace(there, instead), vars(model_cpu), planted)
    monkeypatch.setattr(model_cpu, name, planted[name])
    assert not muon_distance() < 1e-9


def test_muon_changes_nothing_where_the_norm_is_not_finite():
    for at in (0, 264 * 16 + 5, -1):
        model = wide_model(optimizer="muon")
        model.flat_grads[:] = 1.0
        model.flat_grads[at] = np.inf
        before = [array.copy() for array in (model.flat_params, model.flat_grads, model.m, model.v)]
        assert model.update(0.1) == math.inf and model.step == 0
        assert all(map(np.array_equal, before, (model.flat_params, model.flat_grads, model.m, model.v)))


def test_largest_micro_batch():
    asked = []

    def plan(rows):
        asked.append(rows)
        assert len(asked) < 200                                     # by halves
        return {"fixed": 1000, "rows": 10 * rows}
    for free, largest in ((0, 0), (1009, 0), (1010, 1), (1019, 1), (1020, 2), (1030, 3), (1079, 7), (1080, 8),
                          (2234, 123)):
        assert model_cpu.largest_micro_batch(plan, free) == largest
    assert min(asked) == 1


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
    for eps in (1e-5, 0.5):
        model_cpu.rmsnorm_forward(out, rstd, x, gain, eps)
        for n in range(6):
            r = 1 / math.sqrt(math.fsum(x[n] ** 2) / 8 + eps)
            assert rstd[n] == pytest.approx(r, rel=1e-14)
            assert np.allclose(out[n], x[n] * r * gain, rtol=1e-14, atol=0)


def test_rmsnorm_throws_the_length_away():
    rng = np.random.default_rng(0)
    x, gain = 50 * rng.standard_normal((5, 16)), np.ones(16)
    out, scaled, rstd = np.empty_like(x), np.empty_like(x), np.empty(5)
    model_cpu.rmsnorm_forward(scaled, rstd, 3 * x, gain, 1e-5)
    model_cpu.rmsnorm_forward(out, rstd, x, gain, 1e-5)
    assert np.allclose((out ** 2).mean(axis=1), 1.0, atol=1e-6)
    assert np.allclose(out, scaled, atol=1e-6)
    dx, dout = np.empty_like(x), rng.standard_normal(x.shape)
    model_cpu.rmsnorm_backward(dx, np.zeros(16), dout, x, rstd, gain)
    along = np.abs((dx * x).sum(axis=1))                            # a change along x changes nothing
    assert np.all(along < 1e-6 * np.linalg.norm(dx, axis=1) * np.linalg.norm(x, axis=1))


@pytest.mark.parametrize("dtype, error", [(np.float32, 1e-7), (np.float64, 1e-12)])
@pytest.mark.parametrize("theta", [10000.0, 7])
def test_rope_table_by_hand(dtype, error, theta):
    config = Config(dim=24, heads=4, kv_heads=1, layers=1, context=600, vocab=8, rope_theta=theta)
    cos, sin = model_cpu.rope_table(config, dtype)
    assert cos.shape == sin.shape == (600, 1, 6) and cos.dtype == sin.dtype == dtype
    for t, i in itertools.product((0, 1, 2, 511, 599), range(6)):
        angle = t * theta ** (-2 * (i % 3) / 6)
        assert abs(cos[t, 0, i] - math.cos(angle)) < error
        assert abs(sin[t, 0, i] - math.sin(angle) * (-1 if i < 3 else 1)) < error


def test_rope_products_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    T, D = 40, 8
    q, k = rng.standard_normal((2, D))
    config = Config(dim=D, heads=1, kv_heads=1, layers=1, context=T, vocab=8)
    cos, sin = model_cpu.rope_table(config, np.float64)
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
    B, T, D, rng = 2, 7, 8, np.random.default_rng(0)
    config = Config(8 * heads, heads, kv_heads, layers=1, context=T, vocab=8)
    qkv, signs = rng.standard_normal((B, T, heads + 2 * kv_heads, D)), rng.choice([-1.0, 1.0], (B, T, heads, 1))
    qkv[:, :, heads:] += 3.0
    qkv[:, :, :heads] = size * signs * rng.random((B, T, heads, 1)) + qkv[:, :, :heads]
    out, P = np.empty((B, T, heads * D)), np.full((B, kv_heads, heads // kv_heads, T, T), np.nan)
    with np.errstate(all="raise", under="ignore"):
        model_cpu.attention_forward(out, P, qkv.reshape(B, T, -1), config)
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
        whole = model.decoder.extend(tokens)
        model.decoder.position = 0
        one_by_one = np.concatenate([model.decoder.extend([token]) for token in tokens])
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


def test_a_head_with_one_target_divides_by_one():
    targets = np.full((2, 3 + TINY.predict - 1), -1)
    targets[0, :2] = 5                                              # heads 0, 1, 2: two targets, one, none
    tokens, same, divisor = model_cpu.check_batch(TINY, [[1, 2, 3]] * 2, targets.tolist())
    assert divisor.tolist() == [2, 1, 1] and np.array_equal(same, targets)
    assert tokens.tolist() == [[1, 2, 3]] * 2
    assert model_cpu.check_batch(TINY, tokens, targets, [7, 1, 0])[2].tolist() == [7, 1, 1]
    assert model_cpu.check_batch(TINY, tokens, targets, (1, 0, 2))[2].tolist() == [1, 1, 2]


@pytest.mark.parametrize("threads", [1, 2])
def test_without_training_there_are_no_gradients(threads):
    tokens, targets = make_batch()
    model, other = wide_model(threads=threads), Model(TINY, seed=None, threads=threads, training=False)
    other.write(other.flat_params, model.flat_params)
    assert np.array_equal(other.forward(tokens, targets), model.forward(tokens, targets))
    assert np.array_equal(other.logits(tokens), model.logits(tokens))
    assert np.array_equal(other.decoder.extend(tokens[0]), model.decoder.extend(tokens[0]))
    with pytest.raises(ValueError, match=r"^this model was made with training=False: it has no gradients\.$"):
        other.backward()
    assert other.flat_grads is other.m is other.v is None and other.grads == {}
    assert all(workspace.flat_grads is None and workspace.grads == {} for workspace in other.workspaces)
    assert len(other.workspaces) == threads and all(workspace.grads for workspace in model.workspaces)


def test_without_a_seed_no_numbers_are_drawn(monkeypatch):
    monkeypatch.setattr(np.random, "default_rng", None)
    assert not np.any(Model(TINY, seed=None).flat_params)


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
    ([[0, 1]], [[0] * 3], "integers (B, T+K-1) = (1, 4), not int64 of shape (1, 3)."),
    ([0, 1], [[0] * 4], "tokens must be a (B, T) array of integers, not empty"),
    ([[]], [[0] * 2], "tokens must be a (B, T) array of integers, not empty"),
    ([[0.0, 1.0]], [[0] * 4], "tokens must be a (B, T) array of integers, not empty, not float64 of (1, 2)."),
    ([[0, 1]], [[0.0] * 4], "integers (B, T+K-1) = (1, 4), not float64 of shape (1, 4)."),
    ([[5, 300], [-7, 0]], [[0] * 4] * 2, "token id 300 is out of range"),
    ([[0, 1]], [[0] * 4] * 2, "integers (B, T+K-1) = (1, 4), not int64 of shape (2, 4).")])
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


@pytest.mark.parametrize("threads", [1, 2])
def test_backward_needs_a_forward_of_its_own(threads):
    """Whatever overwrites what forward has left makes backward a sentence, and not a wrong gradient."""
    model, (tokens, targets) = wide_model(threads=threads), make_batch()
    _, expected = step_gradient(model, tokens, targets)
    between = [model.backward, lambda: model.logits(tokens), lambda: list(model_cpu.euler_table(model, tokens)),
               lambda: model.update(0.0), model.refresh]
    for used in (lambda: wide_model(threads=threads), *[lambda change=change: (model.forward(tokens, targets), change(), model)[-1]
                                                       for change in between]):
        with pytest.raises(ValueError, match="^backward needs a forward of its own, and between them neither logits nor update.$"):
            used().backward()
    model.flat_grads[...] = 0.0
    model.forward(tokens, targets)
    model.decoder.extend([1, 2, 3])                                 # it has arrays of its own
    with pytest.raises(ValueError):
        model.forward(tokens, targets + TINY.vocab)                 # refused before anything is overwritten
    model.backward()
    assert np.array_equal(model.flat_grads, expected)


@pytest.mark.filterwarnings("error")
def test_overflow_in_a_thread_is_silent():
    model, (tokens, targets) = wide_model(dtype=np.float32, threads=2), make_batch()
    model.params["heads"][...] = 1e38
    losses, _ = step_gradient(model, tokens, targets)
    assert not np.all(np.isfinite(losses))


def test_work_arrays_of_a_step_by_hand():
    """B=2, T=3, and 2 layers of dim 16, 4 + 2 heads 4 wide, F 48, K 3, V 264."""
    N, scores = 6, (2, 2, 2, 3, 3)
    layer, shared = model_cpu.work_tables(TINY, 2, 3, np.float64)
    assert layer == [(name, shape, np.float64) for name, shape in [
        ("x_in", (N, 16)), ("n1", (N, 16)), ("rstd1", (N,)), ("qkv", (N, 32)), ("P", scores), ("y", (N, 16)),
        ("x_mid", (N, 16)), ("n2", (N, 16)), ("rstd2", (N,)), ("gate_up", (N, 96)), ("sigmoid", (N, 48)),
        ("h", (N, 48))]]
    assert shared == [(name, shape, np.float64) for name, shape in [
        ("x", (N, 16)), ("increment", (N, 16)), ("final", (N, 16)), ("rstd", (N,)), ("logits", (N, 3, 264)),
        ("exp_sum", (N, 3)), ("dx", (N, 16)), ("dn", (N, 16)), ("dh", (N, 48)), ("dgate_up", (N, 96)),
        ("dy", (N, 16)), ("dS", scores), ("dqkv", (N, 32))]]
    assert {dtype for _, _, dtype in model_cpu.work_tables(TINY, 1, 1, np.float32)[0]} == {np.float32}


def test_a_table_is_cut_out_of_memory():
    """Arrays start at multiples of 256 bytes, one after the other, and none lies in another."""
    table = [("a", (63,), np.float32), ("b", (2, 32), np.float32), ("c", (65,), np.float32),
             ("d", (1,), np.float64)]
    assert model_cpu.table_bytes(table) == 256 + 256 + 512 + 256 and model_cpu.table_bytes([]) == 0
    memory = np.zeros(64 + 1280, np.uint8)
    arrays = model_cpu.carve(memory, table, 64)
    starts = [array.ctypes.data - memory.ctypes.data for array in arrays.values()]
    assert list(arrays) == ["a", "b", "c", "d"] and starts == [64, 320, 576, 1088]
    assert all(arrays[name].shape == shape and arrays[name].dtype == dtype for name, shape, dtype in table)
    assert next(iter(model_cpu.carve(memory, table).values())).ctypes.data == memory.ctypes.data


def test_buffers_are_kept_and_grow():
    workspace = model_cpu.Workspace(TINY, np.dtype(np.float32), training=False)
    assert workspace.grads == {} and not workspace.memory.size
    layers, shared = workspace.buffers(2, 7)
    each, others = map(model_cpu.table_bytes, model_cpu.work_tables(TINY, 2, 7, np.float32))
    assert len(workspace.memory) == 2 * each + others and len(layers) == 2
    arrays = [array for buffers in (*layers, shared) for array in buffers.values()]
    places = [array.ctypes.data - workspace.memory.ctypes.data for array in arrays]
    assert places[0] == 0 and list(layers[1].values())[0].ctypes.data - workspace.memory.ctypes.data == each
    assert list(shared.values())[0].ctypes.data - workspace.memory.ctypes.data == 2 * each
    assert all(a + array.nbytes <= b for a, b, array in zip(places, places[1:], arrays))
    assert places[-1] + arrays[-1].nbytes <= len(workspace.memory)
    memory = workspace.memory
    # what fits takes the front
    assert workspace.buffers(1, 7)[1]["x"].shape == (7, 16) and workspace.memory is memory
    assert workspace.buffers(2, 7)[1] is shared
    larger = workspace.buffers(3, 7)[1]
    assert workspace.memory is not memory and not np.shares_memory(larger["x"], memory)
    # nothing of before is handed out
    assert np.shares_memory(workspace.buffers(2, 7)[1]["x"], workspace.memory)


def work_arrays(model):
    return [array for workspace in model.workspaces for layers, shared in workspace.buffers_by_shape.values()
            for buffers in (*layers, shared) for array in buffers.values()]


def test_a_step_makes_no_new_buffers():
    model, (tokens, targets) = wide_model(threads=2), make_batch()
    step_gradient(model, tokens, targets)
    before = [array.ctypes.data for array in work_arrays(model)]
    step_gradient(model, tokens, targets)
    assert [array.ctypes.data for array in work_arrays(model)] == before and len(before) == 2 * (2 * 12 + 13)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_left_in_the_work_arrays_changes_nothing(threads):
    """NaN in all of them before each forward, and before each backward in those that no forward writes."""
    model, batches = wide_model(threads=threads), [make_batch(B=3, T=16), make_batch(B=4, T=5)]
    expected = [step_gradient(model, *batch) for batch in batches]
    # of the shared ones the backward reads these
    kept = {"x", "rstd", "final", "logits", "exp_sum"}
    for turn in range(4):
        for workspace in model.workspaces:
            workspace.memory.view(np.float64)[...] = np.nan
        model.flat_grads[...] = 0.0
        for workspace in model.workspaces[1:]:
            workspace.flat_grads[...] = np.nan
        losses = model.forward(*batches[turn % 2])
        for workspace in model.workspaces:
            _, _, _, shared = workspace.saved
            for name in set(shared) - kept:
                shared[name][...] = np.nan
        model.backward()
        assert np.array_equal(losses, expected[turn % 2][0])
        assert np.array_equal(model.flat_grads, expected[turn % 2][1])


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
    before, decayed = model.flat_params.copy(), decayed_count(TINY)
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
    model, decayed = wide_model(config, threads=threads), decayed_count(config)
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
        model.decoder.position = 0
        logits = np.concatenate([model.decoder.extend(part) for part in np.split(tokens, cut)])
        assert logits.shape == (16, TINY.predict, TINY.vocab) and model.decoder.position == 16
        assert np.abs(logits - expected).max() < 1e-12 * np.abs(expected).max()


def test_the_position_is_where_the_tokens_end():
    decoder = wide_model().decoder
    decoder.extend([5, 6, 7])
    for position, held in ((3, [5, 6, 7]), (1, [5]), (0, [])):
        decoder.position = position
        assert decoder.tokens == held and decoder.position == position
    decoder.extend([5])
    for position in (-1, 2):
        with pytest.raises(ValueError, match=f"^the position must be from 0 to 1, .*, not {position}.$"):
            decoder.position = position
    assert decoder.tokens == [5]
    decoder.forget()
    assert decoder.position == 0


def test_the_last_rows_alone():
    decoder, tokens = wide_model().decoder, list(range(9))
    whole = decoder.extend(tokens)
    for last in (1, 2, 9):
        decoder.forget()
        found = decoder.extend(tokens, last)
        assert found.shape == (last, TINY.predict, TINY.vocab)
        assert np.allclose(found, whole[-last:], rtol=0, atol=1e-12)


def test_setting_position_back_forgets_what_came_after():
    model = wide_model()
    a, b = make_batch(B=2, T=12)[0]
    model.decoder.extend(a)
    model.decoder.position = 5
    logits = model.decoder.extend(b[5:])
    expected = model.logits(np.concatenate([a[:5], b[5:]])[None])[0, 5:]
    assert np.abs(logits - expected).max() < 1e-12 * np.abs(expected).max()


def test_generate_does_not_take_what_extend_has_read_for_its_text():
    model, text = wide_model(), [1, 2, 3]
    text += generate(model, text, seed=5, most=5)
    model.decoder.position = 0
    model.decoder.extend([9] * 12)
    assert [*generate(model, text, seed=5, most=6)] == [*generate(wide_model(), text, seed=5, most=6)]


def test_extend_refuses_what_does_not_fit():
    model = wide_model()
    model.decoder.extend([1] * 10)
    with pytest.raises(ValueError, match="7 tokens at 10 do not fit the context of 16."):
        model.decoder.extend([1] * 7)
    with pytest.raises(ValueError, match="token id 264 is out of range"):
        model.decoder.extend([264])
    assert model.decoder.position == 10
    assert len(model.decoder.extend([1] * 6)) == 6


def test_extend_keeps_the_precision():
    model, tokens = wide_model(dtype=np.float32), make_batch(B=1)[0][0]
    logits = model.decoder.extend(tokens)
    assert logits.dtype == model.decoder.cache.dtype == model.logits(tokens[None]).dtype == np.float32
    assert np.allclose(logits, wide_model().decoder.extend(tokens), rtol=0, atol=1e-4)


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


def splitmix64(state):
    """The generator as its authors wrote it, in Python's integers: yields its outputs."""
    while True:
        state = (state + 0x9e3779b97f4a7c15) % 2**64
        z = (state ^ state >> 30) * 0xbf58476d1ce4e5b9 % 2**64
        z = (z ^ z >> 27) * 0x94d049bb133111eb % 2**64
        yield z ^ z >> 31


def output(seed, n):
    return next(itertools.islice(splitmix64(seed), n, None))


def test_noise_is_splitmix64():
    # what is published for this seed
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert list(itertools.islice(splitmix64(1234567), 3)) == published
    ids, ts, seeds = np.array([[0, 5, 2], [7, 1, 0]]), np.array([0, 9]), [3, 2**64 - 1]
    with np.errstate(all="raise"):
        for seed in (0, 1, 2**63 + 5, 2**64 - 1, seeds):
            noise = gumbel(seed, ts, ids)
            for (i, j), found in np.ndenumerate(noise):
                first = seed[i] if isinstance(seed, list) else seed
                bits = output(output(first, int(ts[i])), int(ids[i, j])) >> 12
                assert found == pytest.approx(-math.log(-math.log((bits + 0.5) / 2**52)), rel=1e-12)


def seed_of(value):
    """The seed with which the noise of id 0 at position 0 is made of these 64 bits: splitmix64 backwards."""
    for _ in range(2):
        for shift, factor in ((31, 0x94d049bb133111eb), (27, 0xbf58476d1ce4e5b9), (30, 1)):
            value ^= value >> shift ^ value >> 2 * shift
            value = value * pow(factor, -1, 2**64) % 2**64
        value = (value - 0x9e3779b97f4a7c15) % 2**64
    return value


def test_noise_of_the_first_and_the_last_u_is_finite():
    """u is never 0 or 1: in 52 bits with a half behind them, -log u is between 2^-53 and 53 log 2."""
    for bits, expected in (0, -math.log(53 * math.log(2))), (2**64 - 1, 53 * math.log(2)):
        seed = seed_of(bits)
        assert output(output(seed, 0), 0) == bits
        with np.errstate(all="raise"):
            assert gumbel(seed, np.array([0]), np.array([[0]])).item() == pytest.approx(expected, rel=1e-12)


def test_noise_is_gumbel_distributed_and_independent():
    noise = gumbel(5, np.arange(300), np.tile(np.arange(400), (300, 1)))
    u = np.exp(-np.exp(-noise))
    counts = np.bincount((u * 64).astype(int).ravel(), minlength=64)
    assert np.sum((counts - u.size / 64) ** 2) / (u.size / 64) < 103.4      # 0.1% point for 63 degrees of freedom
    others = [u[1:, :-1], u[1:, 1:], u[:-1, 1:], gumbel(6, np.arange(299), np.tile(np.arange(399), (299, 1)))]
    for other in others:                                            # neighbours in id, in position, in both, in seed
        assert abs(np.corrcoef(u[:-1, :-1].ravel(), other.ravel())[0, 1]) < 3.3 / math.sqrt(299 * 399)


def draws(logits, n, **options):
    """The set of ids drawn from logits (V,) in n draws."""
    return set(sample(np.tile(logits, (n, 1)), 3, np.arange(n), **options).tolist())


def test_sample_filters():
    logits = np.array([1.0, 3.0, 2.0, 3.0, -1.0])
    assert draws(logits, 5, temperature=0) == {1}                   # of equals, the first
    assert draws(logits, 50, top_k=1) == {1}
    assert draws(logits, 300, top_k=3) == {1, 2, 3}
    assert draws(logits, 2000, top_k=99) == {0, 1, 2, 3, 4}
    p = np.exp(logits) / np.exp(logits).sum()                       # sorted: 0.40 0.40 0.15 0.05 0.01
    assert draws(logits, 50, top_p=p[1] / 2) == {1}
    assert draws(logits, 300, top_p=p[1] + 0.01) == {1, 3}
    assert draws(logits, 500, top_p=p[1] + p[3] + 0.01) == {1, 2, 3}
    assert draws(logits, 300, top_k=2, top_p=0.9) == {1, 3}
    assert draws(logits, 100, temperature=1e-3) == {1, 3}
    assert sample(np.empty((0, 5)), 3, np.arange(0)).shape == (0,)


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
    """The probabilities of ids 2, 4, 1, 0, 3: four to four to two to one to one; and which of what is kept is drawn,
    with the noise of its id, one by one."""
    logits, order, n = np.log(np.array([1.0, 2.0, 4.0, 1.0, 4.0], np.float32)), [2, 4, 1, 0, 3], 500
    t = np.arange(40, 40 + n)
    drawn = sample(np.tile(logits, (n, 1)), 9, t, **options)
    noise = gumbel(9, t, np.tile(np.arange(5), (n, 1)))
    kept = order[:len(expected)]
    assert drawn.tolist() == [max(kept, key=lambda i: math.log(expected[order.index(i)]) + row[i]) for row in noise]
    assert set(drawn.tolist()) == set(kept)


def test_of_equals_the_first_ids_are_kept():
    logits = np.tile([0.0, 1.0], 150)
    for k in (1, 7, 150):
        assert draws(logits, 5000, top_k=k) == set(range(1, 2 * k, 2))
    model, (tokens, _) = wide_model(), make_batch()
    model.params["heads"][::2], model.params["heads"][1::2] = 0.0, 0.1
    assert all(best in ([0, 2, 4], [1, 3, 5]) for _, _, best in model_cpu.euler_table(model, tokens))


def test_top_p_stops_exactly_where_it_is_reached():
    for top_p, kept in [(0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (0.75, 3), (0.76, 4), (1.0, 4)]:
        assert draws(np.zeros(4), 200, top_p=top_p) == set(range(kept))     # four quarters: their sums are exact


def test_sample_of_large_logits():
    with np.errstate(all="raise", under="ignore"):
        for shift in (-1e4, 1e4):
            logits = np.tile(np.array([0.0, 1.0, -1e4]) + shift, (5000, 1))
            found = sample(logits, 1, np.arange(5000), temperature=0.5)
            assert np.bincount(found) / 5000 == pytest.approx([1 / (1 + math.exp(2)), 1 / (1 + math.exp(-2))], abs=0.02)
        for temperature, ids in ((0.5, {1, 3}), (1e-3, {1}), (1e-30, {1})):
            assert draws(np.array([0.0, 1000.0, -1000.0, 999.0]), 300, temperature=temperature) == ids
    logits = np.random.default_rng(0).standard_normal((3, 4096), np.float32)
    assert sample(logits, 0, np.arange(3)).max() < 4096
    assert sample(logits, 0, np.arange(3), temperature=0).tolist() == logits.argmax(axis=1).tolist()


# What a text of three tokens has as its probability, by the tables of a model of eight tokens, and by 200,000 draws.
FILTERS = [dict(temperature=0.7), dict(temperature=1.4, top_k=3), dict(temperature=1.2, top_p=0.7)]
MISTAKES = {
    "temperature_late": ("sample: / temperature -> ",
        "sample: log_p + gumbel(seed, t, order) -> (log_p + gumbel(seed, t, order)) / temperature",
        "The noise divided by the temperature as well: the largest stays the largest, whatever it is."),
    "top_p_short": ("sample: reached[:, :-1] >= -> reached[:, 1:] >",
        "The token with which top_p is reached is cut off: what is kept sums to less than p."),
    "noise_repeated": ("sample: gumbel(seed, t, order) -> gumbel(seed, 0 * t, order)",
        "The same noise at every position: each token as likely as it should be, but not each text."),
}


@pytest.fixture(scope="module")
def tables():
    """tables[i] (8,) * i + (8,): the logits of head 0 after a prompt and i more tokens."""
    model, V = wide_model(Config(dim=16, heads=4, kv_heads=2, layers=2, context=16, vocab=8, predict=1)), 8
    return [0.3 * np.array([model.logits([[1, 5, 2, *more]])[0, -1, 0] for more in itertools.product(range(V), repeat=i)]
                           ).reshape((V,) * i + (V,)) for i in range(3)]


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Of one row of logits, by the words of sample's docstring, in loops."""
    weights = {i: math.exp(logit / temperature) for i, logit in enumerate(logits)}
    ids = sorted(weights, key=lambda i: (-weights[i], i))[:top_k or None]
    total, kept = sum(weights[i] for i in ids), []
    for i in ids:
        if sum(weights[j] for j in kept) < top_p * total:
            kept.append(i)
    return np.array([weights[i] * (i in kept) for i in range(len(logits))]) / sum(weights[i] for i in kept)


def chi_square(tables, draw, options, n=200_000):
    """-> p of the 200,000 texts of seeds 0, 1, ..., drawn at positions 3, 4, 5; 0 where one could not be drawn."""
    exact, seeds, texts = np.ones(()), np.arange(n), ()
    for i, table in enumerate(tables):
        steps = np.apply_along_axis(probabilities, -1, table, **options)
        exact = exact[..., None] * steps
        texts += (draw(table[texts] if i else np.tile(table, (n, 1)), seeds, np.full(n, 3 + i), **options),)
    counts, expected = np.bincount(np.ravel_multi_index(texts, exact.shape), minlength=exact.size), n * exact.ravel()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    cells = [(counts[i], expected[i]) for i in np.flatnonzero(~rare)] + [(counts[rare].sum(), expected[rare].sum())]
    cells = [(count, mean) for count, mean in cells if mean > 0]
    chi2, k = sum((count - mean) ** 2 / mean for count, mean in cells), len(cells) - 1
    assert k > 10
    # Wilson & Hilferty 1931: the cube root of chi2 / k is all but normal
    return math.erfc(((chi2 / k) ** (1 / 3) - 1 + 2 / (9 * k)) / math.sqrt(2 / (9 * k)) / math.sqrt(2)) / 2


@pytest.mark.parametrize("options", FILTERS)
def test_texts_have_their_probabilities(tables, options):
    assert chi_square(tables, sample, options) > 1e-3


@pytest.mark.parametrize("bug", MISTAKES)
def test_texts_drawn_with_a_planted_mistake_do_not(tables, bug):
    assert len(MISTAKES) == 3
    with unittest.mock.patch.dict(gradcheck.ALL_BUGS, MISTAKES):
        planted = gradcheck.plant(bug)["sample"]
    assert any(chi_square(tables, planted, options) < 1e-3 for options in FILTERS)


def test_generation_is_determined_by_its_seed():
    model = wide_model()
    first, again, other = (list(itertools.islice(generate(model, [1, 2], seed=seed), 40)) for seed in (3, 3, 4))
    assert first == again and first != other
    assert max(itertools.islice(generate(model, [1, 2], seed=3, vocab=8), 40)) < 8
    assert first == list(generate(model, [1, 2], seed=3 + 2**64, most=40))
    assert list(generate(model, [1, 2], most=40)) != list(generate(model, [1, 2], most=40))
    # in one piece or in two
    assert first == first[:17] + list(generate(model, [1, 2, *first[:17]], seed=3, most=23))


def scripted(drawn):
    """In the place of sample: ids from a list, of which those are taken that are drawn."""
    return lambda logits, *rest: np.array([drawn.pop(0) for _ in logits])


def test_generation_ends(monkeypatch):
    model = wide_model()

    def ids(drawn, text=(1, 2), **options):
        monkeypatch.setattr(model_cpu, "sample", scripted(drawn))
        return list(generate(model, list(text), **options)), drawn
    assert ids([7, 8, 9, 5], stop={9}) == ([7, 8], [5])             # what stops is not yielded
    assert ids([7, 8, 9, 5], stop=(5, 9)) == ([7, 8], [5]) == ids([7, 8, 5, 4], stop=[5, 9])[:1] + ([5],)
    assert ids([9, 8], stop={9}) == ([], [8])
    for most in (0, 1, 3):
        assert ids([7, 8, 9, 5], most=most) == ([7, 8, 9, 5][:most], [7, 8, 9, 5][most:])
    assert ids([7, 8, 9, 5], most=3, stop={8}) == ([7], [9, 5])
    assert ids([7, 8, 9], most=3, stop={9}) == ([7, 8], [])
    # through several windows
    assert ids([7] * 40 + [9], text=[3] * 20, most=50, stop={9}) == ([7] * 40, [])


def test_the_list_that_is_continued_may_grow_meanwhile(monkeypatch):
    """Whoever appends what is generated to the list given, or empties it, gets the same."""
    model = wide_model()
    expected = list(generate(model, [1, 2, 3], seed=5, most=9))
    assert len(expected) == 9
    for change in (lambda text, token: text.append(token), lambda text, token: text.clear()):
        text, found = [1, 2, 3], []
        for token in generate(model, text, seed=5, most=9):
            found.append(token)
            change(text, token)
        assert found == expected


def test_generate_passes_everything_on(monkeypatch):
    model, calls, text = wide_model(), [], [1, 2, 3]
    model.decoder.extend([9, 9])                                    # what another text has left in the cache

    def note(logits, seed, t, *rest):
        calls.append((logits.copy(), seed, t.tolist(), rest))
        return np.full(len(logits), 7)
    monkeypatch.setattr(model_cpu, "sample", note)
    for options, passed, V in [(dict(temperature=0.5, top_k=3, top_p=0.25, seed=5, vocab=260), (0.5, 3, 0.25), 260),
                               (dict(seed=5), (1.0, 0, 1.0), TINY.vocab)]:
        calls.clear()
        assert list(itertools.islice(generate(model, text, **options), 3)) == [7, 7, 7] and text == [1, 2, 3]
        for i, (logits, seed, t, found) in enumerate(calls):
            assert (seed, t, found) == (5, [3 + i], passed)
            assert np.allclose(logits, model.logits([text + [7] * i])[0, -1:, 0, :V], rtol=0, atol=1e-11)
        calls.clear()
        assert list(itertools.islice(generate(model, text, speculate=True, **options), 5)) == [7] * 5
        assert [t for _, _, t, _ in calls] == [[3, 4, 5], [4, 5, 6, 5, 6, 7, 6, 7, 8], [7, 8, 9, 8, 9, 10, 9, 10, 11]]
        for (logits, seed, t, found) in calls:                      # all heads after the last token and after each draft
            assert (seed, found) == (5, passed)
            rows = len(t) // 3
            expected = model.logits([text + [7] * (t[0] - 4 + rows)])[0, -rows:, :, :V].reshape(3 * rows, V)
            assert np.allclose(logits, expected, rtol=0, atol=1e-11)
    for _ in range(2):
        next(generate(model, text))
    assert calls[-1][1] != calls[-2][1]                             # without a seed no two are alike


def test_decoding_reads_each_token_once(monkeypatch):
    """One call a token, of that token alone; only a new window is read as a whole.  A later call reads what is new."""
    model, lengths, extend = wide_model(), [], Decoder.extend
    monkeypatch.setattr(Decoder, "extend", lambda self, tokens, last: lengths.append(len(tokens)) or extend(self, tokens, last))

    def read(tokens, **options):
        lengths.clear()
        return [*tokens, *generate(model, tokens, seed=0, **options)], lengths
    text, _ = read([1] * 5, most=30)
    assert lengths == [5] + [1] * 11 + [9] + [1] * 7 + [9] + [1] * 7 + [9, 1]
    text, _ = read([7, 8, 9], most=4)
    assert read(text, most=3)[1] == [1, 1, 1]                       # the last token yielded was not read yet
    assert read([*text, 3, 4, 5], most=1)[1] == [3]
    assert read([*text[:5], 3, 4], most=1)[1] == [2]                # from where they part
    assert read(text[:4], most=2)[1] == [1, 1] and read(text[:4], most=1)[1] == [1]
    for change in (model.refresh, lambda: model.write(model.flat_params, model.flat_params),
                   lambda: model.update(1e-9)):
        model.flat_grads[...] = 1.0
        change()                                                    # other weights: nothing of the cache holds
        assert read(text[:4], most=2)[1] == [4, 1] and model.decoder.position == len(model.decoder.tokens) == 5


def plain_text(model, tokens, most, stop=(), seed=None, **options):
    """What generate should yield, every token recomputed from scratch."""
    text = list(tokens)
    while len(text) < len(tokens) + most:
        logits = model.logits([text[window_start(len(text), model.config.context):]])[0, -1:, 0]
        token = int(sample(logits, seed, np.array([len(text)]), **options)[0])
        if token in stop:
            break
        text.append(token)
    return text[len(tokens):]


DECODING = [dict(temperature=0), dict(temperature=0.3), dict(temperature=1.0, top_k=4), dict(temperature=1.5, top_p=0.2)]


@pytest.fixture(scope="module")
def drafting_model():
    """Wide, and its further heads near enough to head 0 after some more tokens that each is right now and then: the
    layers say little, so that what comes next hangs on the last token, and head k is the k-fold step."""
    model, V = wide_model(dataclasses.replace(TINY, vocab=40, predict=4)), 40
    rng = np.random.default_rng(1)
    for name, weight in model.params.items():
        if name.startswith("layers") and weight.ndim == 2:
            weight *= 0.4
    steps = np.eye(V)[rng.permutation(V)]
    heads = model.params["heads"].reshape(4, V, -1)
    heads[...] = np.stack([np.linalg.matrix_power(steps, k + 1) @ model.params["embed"] for k in range(4)])
    return model


def test_speculation_changes_nothing(drafting_model):
    """From scratch, cached, speculative: one text; through full windows, over several calls, however they end; and
    the cache holds the text, to which speculation adds at most the drafts that were accepted and not asked for."""
    model, traces = drafting_model, []
    for prompt, size in enumerate([1, 3, 15, 16, 17, 5, 40, 2, 30, 9]):
        rng, options, count = np.random.default_rng(prompt), DECODING[prompt % len(DECODING)], 0
        text = rng.integers(0, 40, size).tolist()
        while count < 200:
            seed, most, stop = int(rng.integers(2**63)), int(rng.integers(1, 60)), set(rng.integers(0, 40, 1).tolist())
            close = int(rng.integers(1, 60)) if rng.random() < 0.4 else 60      # closed after so many, as by Ctrl-C
            expected = plain_text(model, text, min(most, close), stop, seed, **options)
            whole = text + expected
            longer = whole + plain_text(model, whole, 3, (), seed, **options)
            for speculate, part in ((False, 0), (True, 0), (rng.random() < 0.5, int(rng.integers(1, 17)))):
                model.refresh()
                if part:                                            # so much of it is in the cache already
                    window = text[window_start(len(text), 16):]
                    list(generate(model, window[:part], most=1))
                stream = generate(model, text, seed=seed, most=most, stop=stop, speculate=speculate,
                                  trace=traces if speculate else None, **options)
                assert list(itertools.islice(stream, close)) == expected
                stream.close()
                held = model.decoder.tokens
                ends = range(len(whole) - 1, len(whole) + (4 if speculate else 1))
                assert any(longer[end - len(held):end] == held for end in ends)
                assert len(held) == model.decoder.position <= 16
            text, count = whole + rng.integers(0, 40, rng.integers(1, 6)).tolist(), count + len(expected)
    heads = [sum(head == k for head, _, _ in traces) for k in range(4)]
    read = sum(head == 0 and drafts == 3 for head, drafts, _ in traces)
    assert heads[3] > 100 and read > heads[1] + 100 and heads[1] > heads[2] + 50    # each is right and wrong at times


def test_what_speculation_reads(drafting_model, monkeypatch):
    """Prompts and new windows in the same rows as without it; then K rows, but one by one where K do not fit."""
    model, calls, extend = drafting_model, [], Decoder.extend

    def note(self, tokens, last):
        calls.append((self.position, len(tokens)))
        return extend(self, tokens, last)
    monkeypatch.setattr(Decoder, "extend", note)
    reads = []
    for speculate in (False, True):
        model.refresh()
        calls.clear()
        text = [5, 6, 7, 8, 9]
        for turn in range(4):
            text += [*generate(model, text, temperature=1.5, seed=turn, most=20, speculate=speculate), 1, 2, 3, 4, 5]
        reads.append([call for call in calls if call[1] not in (1, 4)])
    assert reads[0] == reads[1] and (0, 9) in reads[0] and len(reads[0]) > 8
    steps = [call for call in calls if call[1] in (1, 4)]
    assert all((rows == 1) == (position + 4 > 16) for position, rows in steps) and (12, 4) in steps
    # a new window that begins as the one before: of its nine tokens two are unread, and read without the drafts at hand
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 9]
    for speculate in (False, True):
        model.refresh()
        calls.clear()
        assert len(list(generate(model, text, seed=1, most=2, speculate=speculate))) == 2
        assert calls == [(0, 16), (7, 2)]


def test_turns_with_the_cache_of_the_turn_before(drafting_model):
    """The same without emptying the cache in between, speculation in turns on and off."""
    model, rng, text = drafting_model, np.random.default_rng(0), [3]
    for turn in range(60):
        most, close = int(rng.integers(1, 12)), int(rng.integers(1, 12))
        options = DECODING[turn % len(DECODING)]
        stream = generate(model, text, seed=turn, most=most, speculate=turn % 3 > 0, **options)
        found = list(itertools.islice(stream, close))
        stream.close()
        assert found == plain_text(model, text, min(most, close), seed=turn, **options)
        text += found + rng.integers(0, 40, rng.integers(0, 5)).tolist()
        if turn % 7 == 6:
            del text[rng.integers(1, len(text)):]                   # a part of it is forgotten
    assert len(text) > 16


def test_a_cache_that_was_written_by_hand_is_not_believed(drafting_model):
    model, text = drafting_model, [3, 1, 4, 1, 5, 9]
    expected = list(generate(model, text, seed=1, most=6))
    for position in (0, 3):
        model.decoder.position = position
        model.decoder.extend([7] * 5)
        assert list(generate(model, text, seed=1, most=6)) == expected == list(generate(model, text, seed=1, most=6))


def test_an_interruption_within_a_call_leaves_the_cache_right(drafting_model, monkeypatch):
    """KeyboardInterrupt may come at any moment: in the midst of extend, or just after it."""
    model, extend, sampled, calls = drafting_model, Decoder.extend, model_cpu.sample, []
    rng = np.random.default_rng(0)

    def interrupted(function):
        def call(*arguments):
            calls.append(function)
            stop_at = rng.random()
            if stop_at < 0.1:
                raise KeyboardInterrupt
            result = function(*arguments)
            if stop_at < 0.2:
                raise KeyboardInterrupt
            return result
        return call
    text, interruptions = [3], 0
    for turn in range(100):
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "extend", interrupted(extend))
            patch.setattr(model_cpu, "sample", interrupted(sampled))
            try:
                for token in generate(model, text, seed=5, most=9, speculate=turn % 2 > 0):
                    text.append(token)
            except KeyboardInterrupt:
                interruptions += 1
        if turn % 5 == 4:
            text = text[:rng.integers(1, len(text))] + [turn % 40]
        found = list(generate(model, text, seed=turn, most=3, speculate=turn % 3 > 0))
        assert found == plain_text(model, text, 3, seed=turn)
    assert interruptions > 30


def test_the_trace(drafting_model):
    model, trace = drafting_model, []
    text = [5, 6]
    found = list(generate(model, text, seed=1, most=40, speculate=True, trace=trace, vocab=38))
    assert len(trace) == 40
    for i, (head, drafts, p) in enumerate(trace):
        before = text + found[:i]
        z = model.logits([before[window_start(len(before), 16):]])[0, -1, 0, :38]
        assert p == pytest.approx(np.exp(z[found[i]]) / np.exp(z).sum(), rel=1e-9)
        assert drafts in (0, 3) and (head == 0 or trace[i - 1][0] == head - 1 and drafts == 3)
    trace.clear()
    said = list(generate(model, text, seed=1, stop={found[4]}, trace=trace))
    assert len(trace) == len(said) + 1 and not any(head or drafts for head, drafts, _ in trace)
    assert model_cpu.Model.draft_heads == 0
    for most in 1, 2, 9:                                                # by default as many as pay
        trace.clear()
        model.draft_heads = most
        assert list(generate(model, text, seed=1, most=40, trace=trace, vocab=38)) == found
        assert {drafts for _, drafts, _ in trace} == {0, min(most, 3)}
    del model.draft_heads


@pytest.mark.parametrize("options", [dict(temperature=-1), dict(temperature=math.nan), dict(top_k=-1), dict(top_p=0),
                                     dict(top_p=1.1)])
def test_generate_refuses(options):
    with pytest.raises(ValueError, match="top_p .*: it must be >= 0, >= 0, in "):
        next(generate(wide_model(), [1], **options))
    with pytest.raises(ValueError, match="at least one token"):
        next(generate(wide_model(), []))


def test_euler_table():
    model, (tokens, _) = wide_model(), make_batch(B=2, T=10)
    targets = np.full((2, 9 + TINY.predict - 1), -1)
    targets[:, :9] = tokens[:, 1:]
    rows = list(model_cpu.euler_table(model, tokens))
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
        states.append(one.workspaces[0].buffers(2, 9)[1]["x"].copy())
    for (loss, step, best), before, x in zip(rows, [states[0], *states], states):
        h = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * model.params["norm"]
        logits = h @ model.params["heads"][:TINY.vocab].T
        logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        assert loss == pytest.approx(-logp[np.arange(18), tokens[:, 1:].reshape(-1)].mean(), rel=1e-12)
        assert step == pytest.approx(np.mean([math.dist(a, b) / math.hypot(*b) for a, b in zip(x, before)]), rel=1e-12)
        assert best == np.argsort(-logits[-1])[:3].tolist() and type(loss) is type(step) is float


class Words:
    """A tokenizer of three tokens."""
    tokens, vocab_size = [b"a", b"\n", b"\xff"], 3


def test_the_euler_table_is_printed(monkeypatch, capsys):
    rows = [(2.5, 0.0, [0, 1, 2]), (1.23456, 0.25, [3, 2, 0]), (10.0, 12.3456, [3, 4, 5])]
    monkeypatch.setattr(model_cpu, "euler_table", lambda model, tokens: rows if model == "model" else None)
    model_cpu.print_euler_table("model", Words, np.zeros((1, 8)))
    assert capsys.readouterr().out == """\
7 tokens read, the next of each predicted; loss in nats a token
stop after      loss   |f(x)|/|x|   most likely after the end of the text
embedding     2.5000                "a"  "\\n"  "\\xff"
layer 0       1.2346        0.250   "\\xff"  "a"
layer 1      10.0000       12.346   \n"""


# ---------------------------------------------------------------------------------------------------------------------
# The tour
# ---------------------------------------------------------------------------------------------------------------------
def run_tour(*arguments):
    command = [sys.executable, model_cpu.__file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)     # only so that a hang ends


def test_tour():
    result = run_tour()
    assert result.returncode == 0 and result.stderr == ""
    shown = result.stdout.splitlines()[1].strip().removesuffix("|...").replace("|", "")
    assert len(shown) > 40 and model_cpu.TEXT.startswith(shown + " ")       # it ends with a word
    for number in range(1, 7):
        assert f"\n{number}. " in "\n" + result.stdout
    line = next(line for line in result.stdout.splitlines() if line.startswith("   by hand "))
    by_hand, numeric = line.split("by hand ")[1].split(", by finite difference ")
    assert float(by_hand) == pytest.approx(float(numeric), rel=1e-7) and float(by_hand) != 0
    line = next(line for line in result.stdout.splitlines() if line.startswith("5. "))
    before, after = line.split("head 0 ")[1].split(" -> ")
    assert float(after) < float(before)
    lines = result.stdout.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("64 tokens read")) + 2:]
    assert [row[:12].strip() for row in table] == ["embedding"] + [f"layer {i}" for i in range(4)]
    # the same model, after its step
    assert float(table[-1][12:20]) == pytest.approx(float(after), abs=1e-4)


def test_tour_takes_no_options():
    for arguments in (["--model", "out/small"], ["--nonsense"], ["out/small"]):
        result = run_tour(*arguments)
        assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1


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
