"""model_cpu.py: sizes, layers, loss, threads, optimizers, cached decoding, sampling, the tour.

That every gradient is right is gradcheck.py's part, whose plain_losses is the judge of the forward here; that the model is the
one the world calls Llama, tests/peers'."""
import dataclasses
import functools
import itertools
import json
import math

import numpy as np
import pytest
from cases import once_a_module, parametrize, refusal, rows, value_error
from numpy.testing import assert_allclose

import gradcheck
import model_cpu
from model_cpu import CONFIGS, Config, Decoder, Model, Sampling, generate, gumbel, sample, window_start

TINY = Config(dim=16, heads=4, kv_heads=2, layers=2, context=16, vocab=264, predict=3, mtp_weight=0.5)
ALONE = "^backward needs a forward of its own, and between them neither logits nor update.$"


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


def same_step(found, expected):
    """Two results of step_gradient are equal but for rounding."""
    assert np.allclose(found[0], expected[0], rtol=1e-13)
    assert np.abs(found[1] - expected[1]).max() < 1e-13 * np.abs(expected[1]).max()


# ---------------------------------------------------------------------------------------------------------------------
# Sizes, and parameters
# ---------------------------------------------------------------------------------------------------------------------
def test_the_presets():
    for name, count, hidden, sizes in [("small", 1_053_824, 344, (128, 4, 2, 4, 128, 512)),
                                       ("medium", 10_017_024, 688, (256, 8, 4, 12, 256, 1024)),
                                       ("big", 116_417_280, 2048, (768, 12, 4, 16, 512, 4096))]:
        assert model_cpu.param_count(CONFIGS[name]) == count
        assert dataclasses.astuple(CONFIGS[name]) == (*sizes, 4, 0.3, hidden, 1e-5, 10000.0, False, None)
    for predict, weights in [(1, [1.0]), (2, [1.0, 0.6]), (5, [1.0, 0.15, 0.15, 0.15, 0.15])]:
        assert dataclasses.replace(TINY, predict=predict, mtp_weight=0.6).head_weights.tolist() == weights


WHOLE = "{} must be a whole number from 1 to 1,048,576, not {!r}."
FINITE = "{} must be a finite number of at least {}, not {!r}."


@parametrize("change, sentence", [
    *((({name: value}), WHOLE.format(name, value)) for name, value in [
        ("dim", 0), ("heads", -8), ("kv_heads", True), ("layers", 8.0), ("context", "8"), ("vocab", None), ("predict", 1 << 21),
        ("hidden", 0)]),
    *((({name: value}), FINITE.format(name, least, value)) for name, least in [("norm_eps", 0), ("rope_theta", 1), ("mtp_weight", 0)]
      for value in (least - 1e-9, math.nan, math.inf, True, None)),
    (dict(dim=12, heads=3, kv_heads=3), "dim (12) must be a multiple of 8."),
    (dict(hidden=12), "hidden (12) must be a multiple of 8."),
    (dict(vocab=65544), "vocab_size (65544) is more than 65,536: ids are uint16."),
    (dict(heads=16), "dim (16) must be a multiple of 2 x heads (2 x 16): heads must divide 8."),
    (dict(kv_heads=3), "heads (4) must be a multiple of kv_heads: 3 does not divide it."),
    (dict(context=9, positions=8), "the context (9) cannot be more than the model's positions (8)."),
    (dict(tied=2, predict=1), "tied must be true or false, and true needs predict 1: it is 2, and predict 1."),
    (dict(tied=True), "tied must be true or false, and true needs predict 1: it is True, and predict 3.")])
def test_sizes_that_do_not_fit_are_refused(change, sentence):
    assert refusal(functools.partial(dataclasses.replace, TINY, **change)) == sentence


def test_the_outermost_sizes_are_taken():
    for change in (dict(context=1 << 20), dict(norm_eps=0, mtp_weight=0, rope_theta=1), dict(rope_theta=1e30), dict(vocab=65536), dict(context=8, positions=8), dict(heads=8, kv_heads=8), dict(predict=1, tied=True)):
        assert {**vars(dataclasses.replace(TINY, **change)), **change} == vars(dataclasses.replace(TINY, **change))


def test_the_table_of_parameters_and_their_initial_values():
    """Views of one buffer in table order, the gains last; drawn as float32 in that order, so one seed is one model."""
    config = Config(dim=24, heads=3, kv_heads=1, layers=2, context=5, vocab=48, predict=2)         # D = 8, F = 64
    layer = [("qkv", (40, 24)), ("out", (24, 24)), ("gate_up", (128, 24)), ("down", (24, 64))]
    table = [("embed", (48, 24)), *((f"layers.{i}.{name}", shape) for i in range(2) for name, shape in layer),
             ("heads", (96, 24)), *((f"layers.{i}.norm{j}", (24,)) for i in range(2) for j in (1, 2)), ("norm", (24,))]
    assert model_cpu.param_table(config) == table and (config.head_dim, config.hidden, config.qkv_width) == (8, 64, 40)
    for seed, dtype in (0, np.float64), (3, np.float32):
        model, rng, start = Model(config, seed, dtype=dtype), np.random.default_rng(seed), 0
        for name, shape in table:
            std = np.float32(0.01 if name.endswith((".out", ".down")) else 0.02)            # 1 / sqrt(2L) = 1/2
            expected = rng.standard_normal(shape, np.float32) * std if len(shape) == 2 else np.ones(shape)
            view, flat = model.params[name], model.flat_params[start:start + math.prod(shape)]
            assert np.array_equal(view, expected) and np.shares_memory(view, flat) and view.dtype == dtype
            start += view.size
        assert start == model_cpu.param_count(config) == model.flat_params.size
    assert np.array_equal(Model(config).flat_params, Model(config, 0).flat_params)


def test_a_tied_head_is_the_embedding():
    """One matrix under two names, of which each part of the gradient is added; it has no row in the table."""
    config = Config(dim=16, heads=2, kv_heads=1, layers=2, context=8, vocab=24, predict=1, tied=True)
    model, apart = Model(config, 0), Model(dataclasses.replace(config, tied=False), 0)
    assert model.params["heads"] is model.params["embed"] and "heads" not in dict(model_cpu.param_table(config))
    for name, view in apart.params.items():
        view[...] = model.params[name]
    tokens, targets = np.arange(16).reshape(2, 8), np.arange(1, 17).reshape(2, 8)
    assert np.array_equal(step_gradient(model, tokens, targets)[0], step_gradient(apart, tokens, targets)[0])
    for name, _ in model_cpu.param_table(config):
        expected = apart.grads["embed"] + apart.grads["heads"] if name == "embed" else apart.grads[name]
        assert_allclose(model.grads[name], expected, rtol=1e-12, atol=1e-17)
    table = model_cpu.update_table(config, "muon")
    assert [(rule, decayed) for rule, _, _, decayed in table] == [("adamw", True), ("muon", True), ("adamw", False)]


# ---------------------------------------------------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("change", [dict(), dict(heads=2, kv_heads=2, norm_eps=0.3), dict(kv_heads=1, rope_theta=5.0, hidden=40),
                                    dict(predict=1, tied=True)])
def test_losses_and_logits_by_plain_loops(change):
    """Against token by token, head by head; a head that has no target in the whole step has the loss 0."""
    config = dataclasses.replace(TINY, **change)
    model, (tokens, targets) = wide_model(config), make_batch(config, T=16)
    tokens[0, :2] = 0, config.vocab - 1
    targets[0, 2:5] = targets[3, :] = -1
    losses = model.forward(tokens, targets)
    assert np.allclose(losses, gradcheck.plain_losses(model.params, config, tokens, targets), rtol=1e-11)
    logits = model.logits(tokens)
    kept, logp = logits.copy(), logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))         # (B,T,K,V)
    for k in range(config.predict):
        picked = [logp[b, t, k, targets[b, t + k]] for b, t in np.ndindex(tokens.shape) if targets[b, t + k] >= 0]
        assert losses[k] == pytest.approx(-np.mean(picked), rel=1e-12)
        assert model_cpu.count_targets(targets, 16, config.predict)[k] == len(picked)
    model.logits((tokens + 1) % config.vocab)
    assert np.array_equal(logits, kept) and logits.shape == (4, 16, config.predict, config.vocab)       # a new array


@parametrize("dtype, error", [(np.float32, 1e-7), (np.float64, 1e-12)])
def test_rope_table_by_hand(dtype, error):
    config = Config(dim=24, heads=4, kv_heads=1, layers=1, context=600, vocab=8, rope_theta=7)
    cos, sin = model_cpu.rope_table(config, dtype)
    assert cos.shape == sin.shape == (600, 1, 6) and cos.dtype == sin.dtype == dtype
    for t, i in itertools.product((0, 1, 599), range(6)):
        angle = t * 7 ** (-2 * (i % 3) / 6)
        assert abs(cos[t, 0, i] - math.cos(angle)) < error
        assert abs(sin[t, 0, i] - math.sin(angle) * (-1 if i < 3 else 1)) < error


def test_large_gates_do_not_overflow():
    gate_up, out, sigmoid = np.array([[-2000.0, 2000.0, 1.0, 1.0]]), np.empty((1, 2)), np.empty((1, 2))
    with np.errstate(all="raise", under="ignore"):
        model_cpu.swiglu_forward(out, sigmoid, gate_up)
    assert out.tolist() == [[0.0, 2000.0]]


# ---------------------------------------------------------------------------------------------------------------------
# The loss: masks and divisors
# ---------------------------------------------------------------------------------------------------------------------
def test_cross_entropy_by_hand():
    """Each row of logits has its own maximum: that of anything more would make all of exp underflow where they are low."""
    rng, divisor = np.random.default_rng(0), np.array([3, 2])
    table, level = np.array([[0, 7], [3, -1], [5, 1]]), np.array([[-1e4, 1e3], [0.0, -1e4], [1e4, -2e3]])
    logits = rng.standard_normal((3, 2, 8)) + level[..., None]
    z, losses, total, weights = logits.copy(), np.empty(2), np.empty((3, 2)), np.array([1.0, 0.25])
    with np.errstate(all="raise", under="ignore"):
        model_cpu.cross_entropy_forward(losses, total, logits, table, divisor)
        model_cpu.cross_entropy_backward(logits, total, table, divisor, weights)
    nll, gradient = np.zeros((3, 2)), np.zeros((3, 2, 8))
    for n, k in np.argwhere(table >= 0):
        p = np.exp(z[n, k] - z[n, k].max())
        p /= p.sum()
        nll[n, k] = -math.log(p[table[n, k]])
        gradient[n, k] = (p - np.eye(8)[table[n, k]]) * weights[k] / divisor[k]
    assert np.allclose(losses, nll.sum(axis=0) / divisor, rtol=1e-11, atol=0)
    assert np.allclose(logits, gradient, rtol=0, atol=1e-12)


def test_losses_are_summed_in_float64():
    """In float32, the running sum of 100,000 losses has lost its last three digits."""
    rng, N, losses = np.random.default_rng(0), 100_000, np.empty((2, 2))
    logits, table = rng.standard_normal((N, 2, 8), np.float32), rng.integers(0, 8, (N, 2))
    for loss, dtype in zip(losses, (np.float64, np.float32)):
        model_cpu.cross_entropy_forward(loss, np.empty((N, 2), dtype), logits.astype(dtype), table, N)
    assert np.allclose(*losses, rtol=1e-7, atol=0)


def test_targets_and_divisors_by_hand():
    targets = np.full((2, 3 + TINY.predict - 1), -1)
    targets[0, :2] = 5, 0                                           # heads 0, 1, 2: two targets, one, none
    tokens, same, divisor, weights = model_cpu.check_batch(TINY, [[1, 2, 3]] * 2, targets.tolist(), None, None)
    assert divisor.tolist() == [2, 1, 1] and np.array_equal(same, targets) and tokens.tolist() == [[1, 2, 3]] * 2
    assert weights.tolist() == [1, 1]
    assert model_cpu.check_batch(TINY, tokens, targets, [7, 0, 3], None)[2].tolist() == [7, 1, 3]
    _, _, divisor, weights = model_cpu.check_batch(TINY, tokens, targets, [7, 0, 3], [2, -1])
    assert divisor.tolist() == [7, np.inf, np.inf] and weights.tolist() == [2, -1]
    for wrong in ([1], [[1, 2]], [1, np.nan]):
        with value_error("weights must be 2 finite numbers, one a row"):
            model_cpu.check_batch(TINY, tokens, targets, None, wrong)


@parametrize("threads", [1, 2])
def test_micro_batches_sum_to_the_whole_batch(threads):
    model, (tokens, targets) = wide_model(threads=threads), make_batch(B=5)
    targets[1, 3:] = -1
    targets[4, :] = -1                                              # a micro-batch without any target is no error
    expected = step_gradient(model, tokens, targets)
    counted = model_cpu.count_targets(targets, tokens.shape[1], TINY.predict)
    model.flat_grads[...], total = 0.0, 0.0
    for rows in (slice(0, 2), slice(2, 4), slice(4, 5)):
        total = total + model.forward(tokens[rows], targets[rows], counted)
        model.backward()
    same_step((total, model.flat_grads), expected)
    assert model.forward(tokens[4:], targets[4:], counted).tolist() == [0.0] * TINY.predict
    with value_error("^head 0 has no counted target in the whole step: all targets are -1.$"):
        model.forward(tokens[4:], targets[4:])


@parametrize("threads", [1, 2])
def test_without_training_there_are_no_gradients(threads):
    tokens, targets = make_batch()
    model, other = wide_model(threads=threads), Model(TINY, seed=None, threads=threads, training=False)
    other.write(other.flat_params, model.flat_params)
    assert np.array_equal(other.forward(tokens, targets), model.forward(tokens, targets))
    with value_error(r"^this model was made with training=False: it has no gradients\.$"):
        other.backward()
    assert other.flat_grads is other.m is other.v is None and other.grads == {}
    assert [workspace.flat_grads for workspace in other.workspaces] == [None] * threads


@parametrize("tokens, targets, words", rows("""
    [[0, 264]] | [[0, 0, 0, 0]]  | token id 264 is out of range: the vocabulary has 264 ids, 0 to 263.
    [[0, -1]]  | [[0, 0, 0, 0]]  | token id -1 is out of range
    [[0, 1]]   | [[0, 0, 0, 264]] | target id 264 is out of range
    [[0, 1]]   | [[0, 0, 0, -2]] | target id -2 is out of range
    [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6]] | [[0, 0]] | 17 tokens do not fit the context of 16.
    [0, 1]     | [[0, 0, 0, 0]]  | tokens must be a (B, T) array of integers, not empty, not int64 of (2,).
    [[]]       | [[0, 0]]        | tokens must be a (B, T) array of integers, not empty, not float64 of (1, 0).
    [[0, 0.5]] | [[0, 0, 0, 0]]  | tokens must be a (B, T) array of integers, not empty, not float64 of (1, 2).
    [[0, 1]]   | [[0, 0, 0, 0.5]] | integers (B, T+K-1) = (1, 4), not float64 of shape (1, 4).
    [[0, 1]]   | [[0, 0, 0, 0], [0, 0, 0, 0]] | integers (B, T+K-1) = (1, 4), not int64 of shape (2, 4)."""))
def test_bad_batches_are_refused(tokens, targets, words):
    model = Model(TINY)
    tokens, targets = map(np.array, map(json.loads, (tokens, targets)))
    assert words in refusal(model.forward, tokens, targets)
    if "token" in words:
        assert words in refusal(model.logits, tokens)


# ---------------------------------------------------------------------------------------------------------------------
# Threads, and memory
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("threads", [2, 3])
def test_threads_change_nothing_but_rounding(threads):
    """Neither an idle thread's gradient nor what a larger batch left in the buffers gets into the sum."""
    many, one = wide_model(threads=threads), wide_model()
    tokens, targets = make_batch(B=5, T=9)
    targets[0, 2:] = -1
    for rows, T in [(slice(0, 5), 9), (slice(0, 2), 4), (slice(3, 4), 7), (slice(1, 5), 9)]:
        batch = tokens[rows, :T], targets[rows, :T + TINY.predict - 1]
        same_step(step_gradient(many, *batch), step_gradient(one, *batch))


@parametrize("threads", [1, 2])
def test_backward_needs_a_forward_of_its_own(threads):
    """Whatever overwrites what forward has left makes backward a sentence, and not a wrong gradient."""
    model, (tokens, targets) = wide_model(threads=threads), make_batch()
    _, expected = step_gradient(model, tokens, targets)
    for between in (model.backward, lambda: model.logits(tokens), lambda: list(model_cpu.euler_table(model, tokens)),
                    lambda: model.log_probs(tokens, targets), lambda: model.update(0.0), model.refresh):
        model.forward(tokens, targets)
        between()
        with value_error(ALONE):
            model.backward()
    with value_error(ALONE):
        wide_model(threads=threads).backward()
    model.flat_grads[...] = 0.0
    model.forward(tokens, targets)
    model.decoder.extend([1, 2, 3])                                 # it has arrays of its own
    refusal(model.forward, tokens, targets + TINY.vocab)            # before anything is overwritten
    model.backward()
    assert np.array_equal(model.flat_grads, expected)


@pytest.mark.filterwarnings("error")
def test_overflow_in_a_thread_is_silent():
    model, (tokens, targets) = wide_model(dtype=np.float32, threads=2), make_batch()
    model.params["heads"][...] = 1e38
    assert not np.all(np.isfinite(step_gradient(model, tokens, targets)[0]))


@parametrize("threads", [1, 2])
def test_what_is_left_in_the_work_arrays_changes_nothing(threads):
    """NaN in all of them before each forward, and before each backward in those that no forward writes."""
    model, batches = wide_model(threads=threads), [make_batch(B=3, T=16), make_batch(B=4, T=5)]
    expected = [step_gradient(model, *batch) for batch in batches]
    memories = [workspace.memory for workspace in model.workspaces]
    kept = {"x", "rstd", "final", "logits", "exp_sum"}              # of the shared ones the backward reads these
    for batch, (losses, gradient) in 2 * list(zip(batches, expected)):
        for workspace in model.workspaces:
            workspace.memory.view(np.float64)[...] = np.nan
        model.flat_grads[...] = 0.0
        assert np.array_equal(model.forward(*batch), losses)
        for workspace in model.workspaces:
            *_, shared = workspace.saved
            for name, array in vars(shared).items():
                if name not in kept and not name.startswith("layers."):
                    array[...] = np.nan
        model.backward()
        assert np.array_equal(model.flat_grads, gradient)
    assert all(workspace.memory is memory for workspace, memory in zip(model.workspaces, memories))     # none made anew


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------------------------------------------
def test_moments_by_hand():
    size, layers = model_cpu.param_count(TINY), 2 * (32 * 16 + 16 * 16 + 96 * 16 + 16 * 48)
    assert model_cpu.moment_count(TINY, "adamw") == 2 * size == model_cpu.moment_count(TINY, "muon") + layers
    assert Model(TINY, optimizer="muon").v.size == size - layers
    with value_error(r"^optimizer must be one of muon, adamw, not 'sgd'\.$"):
        Model(TINY, optimizer="sgd")


class Counted(np.ndarray):
    """Notes the shape of each matrix product with it."""
    shapes = []

    def __matmul__(self, other):
        result = super().__matmul__(other)
        Counted.shapes.append(result.shape)
        return result


def orthogonal(u):
    """What newton_schulz gives, by LAPACK's singular values, which the quintic moves."""
    U, s, Vt = np.linalg.svd(u, full_matrices=False)
    s = s / (np.linalg.norm(u) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s ** 3 + 2.0315 * s ** 5
    return (U * s) @ Vt


@parametrize("shape", [(3, 8), (8, 3), (16, 16), (1, 5), (344, 128)])
def test_newton_schulz_moves_singular_values_alone(shape):
    """And makes 15 products, of which the squares are of the shorter side: of the longer one they take several times as long."""
    for scale in (1e-4, 1e6):
        u = scale * np.random.default_rng(0).standard_normal(shape)
        kept, Counted.shapes = u.copy(), []
        assert np.abs(model_cpu.newton_schulz(u.view(Counted)) - orthogonal(u)).max() < 1e-10 and np.array_equal(u, kept)
        short = 2 * (min(shape),)
        assert Counted.shapes == 5 * [short, short, (min(shape), max(shape))]
    assert not model_cpu.newton_schulz(np.zeros(shape)).any()


@parametrize("optimizer, threads", [("adamw", 2), ("muon", 1), ("muon", 3)])
def test_updates_by_named_tensors(optimizer, threads):
    """Steps against the same from named tensors, q, k, v, gate and up cut by hand.  More parameters than two pieces of an
    update; gradients below, about and above eps; norms above the limit and below it."""
    rng, c = np.random.default_rng(0), dataclasses.replace(TINY, vocab=2048)
    model, D = wide_model(c, optimizer=optimizer, threads=threads), c.head_dim
    expected = {name: weight.copy() for name, weight in model.params.items()}
    m, v = [{name: 0.0 * weight for name, weight in expected.items()} for _ in range(2)]
    cuts = {"qkv": [c.heads * D, (c.heads + c.kv_heads) * D], "gate_up": [c.hidden]}
    matrices = [name for name in expected if "layers" in name and "norm" not in name and optimizer == "muon"]
    for step, size in enumerate([1.0, 1e-6, 1e-3], start=1):
        grads = {name: size * rng.standard_normal(w.shape) * 10.0 ** rng.uniform(-6, 0, w.shape) for name, w in expected.items()}
        for name, grad in grads.items():
            model.grads[name][...] = grad
        norm, of_adamw = [math.sqrt(sum((grad ** 2).sum() for name, grad in grads.items() if name not in hidden))
                          for hidden in ([], matrices)]
        assert model.update(0.02) == pytest.approx(norm, rel=1e-12) and model.step == step
        for name, g in grads.items():
            w = expected[name]
            if name in matrices:
                m[name] = 0.95 * m[name] + 0.05 * g
                w *= 1 - 0.02 * 0.1
                cut = cuts.get(name.split(".")[-1], [])
                for part, u in zip(np.split(w, cut), np.split(0.95 * m[name] + 0.05 * g, cut)):
                    part -= 0.02 * 0.2 * math.sqrt(max(u.shape)) * orthogonal(u)
            else:
                g = g * min(1.0, 1.0 / (of_adamw + 1e-6))
                m[name], v[name] = 0.9 * m[name] + 0.1 * g, 0.95 * v[name] + 0.05 * g * g
                decay = 0.1 if w.ndim == 2 else 0.0
                w -= 0.02 * (decay * w + m[name] / (1 - 0.9 ** step) / (np.sqrt(v[name] / (1 - 0.95 ** step)) + 1e-8))
            assert np.allclose(model.params[name], w, rtol=1e-11, atol=1e-13), name
        assert not model.flat_grads.any()


@parametrize("optimizer", ["adamw", "muon"])
@parametrize("at, value", [(0, np.inf), (264 * 16 + 5, np.nan), (-1, np.inf)])
def test_a_gradient_that_is_not_finite_changes_nothing(optimizer, at, value):
    model = wide_model(optimizer=optimizer)
    model.flat_grads[:] = 1.0
    model.update(0.1)
    model.flat_grads[:] = 1.0
    model.flat_grads[at] = value
    before = [array.copy() for array in (model.flat_params, model.flat_grads, model.m, model.v)]
    assert not math.isfinite(model.update(0.1)) and model.step == 1
    after = model.flat_params, model.flat_grads, model.m, model.v   # the gradient is left to look at
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, after))


@parametrize("threads", [1, 2, 3])
def test_training_is_bit_identical_from_run_to_run(threads):
    runs = []
    for _ in range(2):
        model, kept = wide_model(dtype=np.float32, threads=threads), []
        for step in range(3):
            kept.append(model.forward(*make_batch(B=5, seed=step)))
            model.backward()
            kept.append(model.update(lr=1e-2))
        runs.append([*kept, model.flat_params])
    assert all(map(np.array_equal, *runs))


# ---------------------------------------------------------------------------------------------------------------------
# Cached decoding, the window
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("heads, kv_heads, size", [(4, 2, 1.0), (4, 4, 1.0), (2, 1, 100.0)])
def test_extend_in_any_cut_equals_logits(heads, kv_heads, size):
    """Also where the scores are in the thousands; and of what is asked for, the last rows alone."""
    model, rng = wide_model(dataclasses.replace(TINY, heads=heads, kv_heads=kv_heads)), np.random.default_rng(0)
    model.params["layers.0.qkv"][:20] *= size
    decoder, tokens = model.decoder, make_batch(B=1, T=16)[0][0]
    with np.errstate(all="raise", under="ignore"):
        expected = model.logits(tokens[None])[0]
        for cut in [[], list(range(1, 16))] + [sorted(rng.choice(np.arange(1, 16), n, replace=False)) for n in (1, 2, 4, 8)]:
            decoder.position = 0
            logits = np.concatenate([decoder.extend(part) for part in np.split(tokens, cut)])
            assert logits.shape == (16, TINY.predict, TINY.vocab) and decoder.position == 16
            assert np.abs(logits - expected).max() < 1e-10 * np.abs(expected).max()
    for position, last in (5, 1), (3, 2), (0, 16):                  # set back: what came after is forgotten
        decoder.position = position
        assert decoder.tokens == tokens[:position].tolist()
        found = decoder.extend(tokens[position:], last)
        assert found.shape[0] == last and np.allclose(found, expected[-last:], rtol=0, atol=1e-9 * size)


def test_what_the_decoder_refuses():
    model = wide_model(dtype=np.float32)
    decoder = model.decoder
    assert decoder.extend([1] * 10).dtype == decoder.cache.dtype == np.float32
    assert decoder.workspace.flat_grads is None                     # no memory for gradients that it never has
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.config.context = 32
    for tokens, words in (([1] * 7, "7 tokens at 10 do not fit the context of 16."), ([264], "token id 264 is out of range")):
        with value_error(words):
            decoder.extend(tokens)
    for position in (-1, 11):
        with value_error(f"^the position must be from 0 to 10, .*, not {position}.$"):
            decoder.position = position
    assert decoder.position == 10 and len(decoder.extend([1] * 6)) == 6
    decoder.forget()
    assert decoder.tokens == []


@parametrize("context", [1, 2, 3, 7, 8])
def test_window_rule(context):
    starts = [window_start(n, context) for n in range(1, 10 * context + 10)]
    assert not any(starts[:context])                                # while the text fits: from the beginning
    for n, start in enumerate(starts, start=1):
        assert 1 <= n - start <= context
    for n, (before, after) in enumerate(itertools.pairwise(starts), start=1):
        if after != before:                                         # only a full window moves, and keeps its last half
            assert n - before == context and n - after == context // 2


# ---------------------------------------------------------------------------------------------------------------------
# Noise, and sampling
# ---------------------------------------------------------------------------------------------------------------------
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
    """With its published outputs; u has 52 bits and a half, so that it is never 0 or 1."""
    assert list(itertools.islice(splitmix64(1234567), 3)) == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    ids, ts, seeds = np.array([[0, 5, 2], [7, 1, 0]]), [0, 9], [3, 2**64 - 1]
    with np.errstate(all="raise"):
        for (i, j), found in np.ndenumerate(gumbel(seeds, np.array(ts), ids)):
            bits = output(output(seeds[i], ts[i]), int(ids[i, j])) >> 12
            assert found == pytest.approx(-math.log(-math.log((bits + 0.5) / 2**52)), rel=1e-12)


@parametrize("options, expected", [
    (dict(), [4 / 12, 4 / 12, 2 / 12, 1 / 12, 1 / 12]), (dict(temperature=0.5), [16 / 38, 16 / 38, 4 / 38, 1 / 38, 1 / 38]),
    (dict(top_k=3), [0.4, 0.4, 0.2]), (dict(top_k=99, top_p=0.9), [4 / 11, 4 / 11, 2 / 11, 1 / 11]),
    (dict(top_p=0.4), [0.5, 0.5]),
    (dict(top_k=3, top_p=0.7), [0.5, 0.5]),                         # top_p of what top_k has left: 0.4 0.4 0.2
    (dict(temperature=0.5, top_p=0.42), [1.0]), (dict(temperature=0), [1.0])])
def test_sample_by_hand(options, expected):
    """The probabilities of ids 2, 4, 1, 0, 3: four to four to two to one to one; and which of what is kept is drawn,
    with the noise of its id, one by one."""
    logits, order, n = np.log(np.array([1.0, 2.0, 4.0, 1.0, 4.0], np.float32)), [2, 4, 1, 0, 3], 300
    t = np.arange(40, 40 + n)
    drawn = sample(np.tile(logits, (n, 1)), t, Sampling(seed=9, **options))
    noise = gumbel(9, t, np.tile(np.arange(5), (n, 1)))
    kept = order[:len(expected)]
    assert drawn.tolist() == [max(kept, key=lambda i: math.log(expected[order.index(i)]) + row[i]) for row in noise]
    assert set(drawn.tolist()) == set(kept) and sample(np.empty((0, 5)), np.arange(0), Sampling(seed=3, **options)).shape == (0,)


def test_which_of_equals_are_kept_and_large_logits():
    def draws(logits, n, **options):
        return set(sample(np.tile(logits, (n, 1)), np.arange(n), Sampling(seed=3, **options)).tolist())
    for k in (1, 7, 150):
        assert draws(np.tile([0.0, 1.0], 150), 5000, top_k=k) == set(range(1, 2 * k, 2))
    for top_p, kept in [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)]:
        assert draws(np.zeros(4), 200, top_p=top_p) == set(range(kept))     # four quarters: their sums are exact
    with np.errstate(all="raise", under="ignore"):
        for temperature, ids in ((0.5, {1, 3}), (1e-30, {1})):
            assert draws(np.array([0.0, 1000.0, -1000.0, 999.0]), 300, temperature=temperature) == ids


# ---------------------------------------------------------------------------------------------------------------------
# Generation
# ---------------------------------------------------------------------------------------------------------------------
def plain_text(model, tokens, most, stop=(), seed=None, **options):
    """What generate should yield, every token recomputed from scratch."""
    text = list(tokens)
    while len(text) < len(tokens) + most:
        logits = model.logits([text[window_start(len(text), model.config.context):]])[0, -1:, 0]
        token = int(sample(logits, np.array([len(text)]), Sampling(seed=seed, **options))[0])
        if token in stop:
            break
        text.append(token)
    return text[len(tokens):]


DECODING = [dict(temperature=0), dict(temperature=0.3), dict(temperature=1.0, top_k=4), dict(temperature=1.5, top_p=0.2)]


@once_a_module
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
    """From scratch, cached, speculative: one text; through full windows, over several calls, however they end, with what the
    cache holds from before; and the cache holds the text, to which speculation adds at most accepted drafts."""
    model, traces = drafting_model, []
    for prompt, size in enumerate([1, 3, 15, 16, 17, 5, 40, 2]):
        rng, options, count = np.random.default_rng(prompt), DECODING[prompt % len(DECODING)], 0
        text = rng.integers(0, 40, size).tolist()
        while count < 60:
            seed, most, stop = int(rng.integers(2**63)), int(rng.integers(1, 60)), set(rng.integers(0, 40, 1).tolist())
            close = int(rng.integers(1, 60)) if rng.random() < 0.4 else 60      # closed after so many, as by Ctrl-C
            expected = plain_text(model, text, min(most, close), stop, seed, **options)
            whole = text + expected
            longer = whole + plain_text(model, whole, 3, (), seed, **options)
            for speculate, forget in ((False, True), (True, True), (rng.random() < 0.5, False)):
                if forget:
                    model.refresh()
                else:                                               # another end is in the cache already
                    list(generate(model, text[:rng.integers(1, len(text) + 1)] + [7], most=int(rng.integers(1, 5))))
                stream = generate(model, text, seed=seed, most=most, stop=stop, speculate=speculate,
                                  trace=traces if speculate else None, **options)
                assert list(itertools.islice(stream, close)) == expected
                stream.close()
                held = model.decoder.tokens
                ends = range(len(whole) - 1, len(whole) + (4 if speculate else 1))
                assert any(longer[end - len(held):end] == held for end in ends) and len(held) <= 16
            text, count = whole + rng.integers(0, 40, rng.integers(1, 6)).tolist(), count + len(expected)
    heads = [sum(head == k for head, _, _ in traces) for k in range(4)]
    read = sum(head == 0 and drafts == 3 for head, drafts, _ in traces)
    assert heads[3] > 30 and read > heads[1] + 30 and heads[1] > heads[2] + 15      # each is right and wrong at times


def test_what_speculation_reads(drafting_model, monkeypatch):
    """A new window in the same rows as without it: on a GPU other rows would be other bits."""
    model, calls, extend = drafting_model, [], Decoder.extend

    def note(self, tokens, last):
        calls.append((self.position, len(tokens)))
        return extend(self, tokens, last)
    monkeypatch.setattr(Decoder, "extend", note)
    # it begins as the one before: of its nine tokens two are unread, and read without the drafts at hand
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 9]
    for speculate in (False, True):
        model.refresh()
        calls.clear()
        assert len(list(generate(model, text, seed=1, most=2, speculate=speculate))) == 2
        assert calls == [(0, 16), (7, 2)]


def test_drafts_are_those_of_the_last_row_that_counts(monkeypatch):
    model, read = wide_model(), []
    answers = [[[5, 6, 7]], [[6, 1, 1], [9, 8, 4], [3, 3, 3]], np.zeros((3, 3), int)]

    def draw(tokens, rows, *rest):
        read.append(tokens)
        model.decoder.tokens += tokens
        return np.array(answers.pop(0)), np.ones(rows)
    monkeypatch.setattr(model.decoder, "draw", draw)
    assert list(generate(model, [1, 2], seed=0, most=4, speculate=True)) == [5, 6, 9, 0]
    assert read == [[1, 2], [5, 6, 7], [9, 8, 4]]


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
    assert read(text, most=3)[1] == [1, 1, 1] and read([*text[:5], 3, 4], most=1)[1] == [2]     # from where they part
    for change in (lambda: model.write(model.m, 0.0), lambda: model.update(1e-9)):
        change()                                                    # other weights: nothing of the cache holds
        assert read(text[:4], most=2)[1] == [4, 1] and model.decoder.position == 5


def test_an_interruption_within_a_call_leaves_the_cache_right(drafting_model, monkeypatch):
    """KeyboardInterrupt may come at any moment: in the midst of extend, or just after it."""
    model, extend, sampled = drafting_model, Decoder.extend, model_cpu.sample
    rng = np.random.default_rng(0)

    def interrupted(function):
        def call(*arguments):
            stop_at = rng.random()
            if stop_at < 0.1:
                raise KeyboardInterrupt
            result = function(*arguments)
            if stop_at < 0.2:
                raise KeyboardInterrupt
            return result
        return call
    text, interruptions = [3], 0
    for turn in range(50):
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "extend", interrupted(extend))
            patch.setattr(model_cpu, "sample", interrupted(sampled))
            try:
                for token in generate(model, text, seed=5, most=9, speculate=turn % 2 > 0):
                    text.append(token)                              # the list that was given may grow meanwhile
            except KeyboardInterrupt:
                interruptions += 1
        if turn % 5 == 4:
            text = text[:rng.integers(1, len(text))] + [turn % 40]
        found = list(generate(model, text, seed=turn, most=3, speculate=turn % 3 > 0))
        assert found == plain_text(model, text, 3, seed=turn)
    assert interruptions > 15


def test_generation_is_determined_by_its_seed():
    model = wide_model()
    first, again, other = (list(itertools.islice(generate(model, [1, 2], seed=seed), 40)) for seed in (3, 3, 4))
    assert first == again and first != other
    assert max(generate(model, [1, 2], seed=3, vocab=8, most=40)) < 8
    assert first == list(generate(model, [1, 2], seed=3 + 2**64, most=40))
    assert list(generate(model, [1, 2], most=40)) != list(generate(model, [1, 2], most=40))
    model.decoder.forget()
    model.decoder.extend([9] * 12)                                  # a cache that was written by hand is not believed
    text = [1, 2, *first[:17]]
    found = []
    for token in generate(model, text, seed=3, most=23):            # in two pieces
        found.append(token)
        text.clear()                                                # whatever becomes of the list
    assert found == first[17:]


def test_many_answers_at_once_are_those_of_one_by_one():
    """Prompts of several lengths, up to beyond the window, and through full windows."""
    model, _, _ = gradcheck.make_tiny(TINY)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, TINY.vocab, n).tolist() for n in (1, 8, 3, TINY.context + 5, 12)]
    seeds = rng.integers(0, 1 << 63, len(prompts))
    for how in (0.7, 0, 1.0), (1.1, 9, 0.95), (0.0, 0, 1.0):
        answers = model_cpu.generate_batch(model, prompts, model_cpu.Sampling(*how, seeds, 260), {7, 9, 50}, 30)
        for prompt, seed, answer in zip(prompts, seeds.tolist(), answers):
            alone = list(generate(model, prompt, *how, seed, 260, {7, 9, 50}, 30))
            assert answer[:len(alone)] == alone and answer[len(alone):] in ([[7], [9], [50]] if len(alone) < 30 else [[]])


def test_where_generation_begins_and_ends(monkeypatch):
    """After a token at least.  Before a token of `stop`, which is not yielded, and after `most`; no token more is drawn than that takes."""
    model = wide_model()

    def ids(drawn, **options):
        monkeypatch.setattr(model_cpu, "sample", lambda logits, *rest: np.array([drawn.pop(0) for _ in logits]))
        return list(generate(model, [1, 2], **options)), drawn
    assert ids([7, 8, 9, 5], stop=(5, 9)) == ([7, 8], [5]) and ids([9, 8], stop={9}) == ([], [8])
    for most in (0, 1, 3):
        assert ids([7, 8, 9, 5], most=most) == ([7, 8, 9, 5][:most], [7, 8, 9, 5][most:])
    assert ids([7, 8, 9, 5], most=3, stop={8}) == ([7], [9, 5]) and ids([7, 8, 9], most=3, stop={9}) == ([7, 8], [])
    with value_error("^generate needs at least one token to continue.$"):
        next(generate(model, []))


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
    assert Model.draft_heads == 0
    for most in 1, 9:                                               # by default as many as pay
        trace.clear()
        model.draft_heads = most
        assert list(generate(model, text, seed=1, most=40, trace=trace, vocab=38)) == found
        assert {drafts for _, drafts, _ in trace} == {0, min(most, 3)}
    del model.draft_heads


# ---------------------------------------------------------------------------------------------------------------------
# The Euler table, and the tour
# ---------------------------------------------------------------------------------------------------------------------
def test_euler_table():
    """Stopping after layer i is a model of i + 1 layers, whose loss the plain loops know."""
    model, (tokens, _) = wide_model(), make_batch(B=2, T=10)
    inputs, targets = tokens[:, :9], tokens[:, 1:]
    rows, states = list(model_cpu.euler_table(model, tokens)), [x.copy() for x, _ in model_cpu.layer_logits(model, inputs)]
    w = {**model.params, "heads": model.params["heads"][:TINY.vocab]}
    assert len(rows) == len(states) == TINY.layers + 1 and np.array_equal(states[0], w["embed"][inputs.ravel()])
    for i, (loss, length, best) in enumerate(rows):
        one = dataclasses.replace(TINY, layers=max(i, 1), predict=1)
        if i == 0:                                                  # a layer that adds nothing
            stopped = {**w, "layers.0.out": 0 * w["layers.0.out"], "layers.0.down": 0 * w["layers.0.down"]}
        assert loss == pytest.approx(gradcheck.plain_losses(w if i else stopped, one, inputs, targets)[0], rel=1e-11)
        steps = [math.dist(a, b) / math.hypot(*b) for a, b in zip(states[i], states[max(i - 1, 0)])]
        assert length == pytest.approx(np.mean(steps), rel=1e-12) and type(loss) is type(length) is float
    assert best == np.argsort(-model.logits(inputs)[-1, -1, 0])[:3].tolist()


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


def test_the_tour(capsys):
    """Its first text ends with a word, and what it shows of layer 0 is layer 0's.  The rest: test_scripts.py."""
    model_cpu.main([])
    lines = capsys.readouterr().out.splitlines()
    shown = lines[1].strip().removesuffix("|...").replace("|", "")
    assert len(shown) > 40 and model_cpu.TEXT.startswith(shown + " ")
    model = Model(dataclasses.replace(CONFIGS["small"], vocab=304))
    tokens = np.array([model_cpu.Tokenizer.train([model_cpu.TEXT], 300).encode(model_cpu.TEXT)])[:, :64]
    logits = model.logits(tokens)
    layers, shared = model.workspaces[0].buffers(1, 64)
    for name, array in [("layer 0: x_in", model.params["embed"][tokens]), *((f"layer 0: {name}", vars(layers[0])[name])
                        for name in ("n1", "qkv", "P", "h")), ("final = rmsnorm(x)", shared.final), ("logits (B,T,K,V)", logits)]:
        line = next(line for line in lines if line.startswith(f"   {name} "))
        assert line.endswith(f" root mean square {np.sqrt(np.mean(array ** 2)):.4f}"), line
