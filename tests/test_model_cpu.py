"""model_cpu.py: losses, threads, optimizers, sampling, decoding.  The judges are loops, formulas, LAPACK's SVD, and the
same computation done whole.

That every gradient is right is gradcheck.py's part, whose plain_losses is the judge of the forward here; that the model is the
one the world calls Llama, tests/peers'."""
import dataclasses
import itertools
import math
import types
import unittest.mock

import numpy as np
import pytest
from cases import parametrize, value_error
from numpy.testing import assert_allclose, assert_array_equal

import gradcheck
import model_cpu
from model_cpu import (Config, Decoder, Model, Sampling, generate, generate_batch, generate_plain, gumbel, sample,
                       window_start)

TINY = Config(dim=16, heads=4, kv_heads=2, layers=2, context=16, vocab=264, predict=3, mtp_weight=0.5)


def wide_model(config=TINY, **options):
    """A model whose weights are wide enough that every part of it matters."""
    model = Model(config, None, **options)
    rng = np.random.default_rng(0)
    for weight in model.params.values():
        weight[...] = 0.3 * rng.standard_normal(weight.shape) + (weight.ndim == 1)
    return model


def make_batch(B=4, T=16):
    """With masked targets, and a row that has none."""
    rng = np.random.default_rng(B)
    tokens, targets = [rng.integers(0, 264, (B, width)) for width in (T, T + 2)]
    targets[0, 2:5] = targets[-1] = -1
    targets[0, 7:9] = 0, 263
    return tokens, targets


# ---------------------------------------------------------------------------------------------------------------------
# Parameters
# ---------------------------------------------------------------------------------------------------------------------
def test_initial_parameters():
    """Drawn as float32, in the order of the table and of the one buffer: one seed is one model in every precision."""
    rng, drawn = np.random.default_rng(3), []
    for name, shape in model_cpu.param_table(TINY):
        std = np.float32(0.01 if name.endswith((".out", ".down")) else 0.02)            # 1 / sqrt(2L) = 1/2
        drawn += [rng.standard_normal(shape, np.float32) * std if len(shape) == 2 else np.ones(shape)]
    for dtype in np.float64, np.float32:
        assert_array_equal(Model(TINY, 3, dtype).flat_params, np.concatenate(drawn, axis=None))


# ---------------------------------------------------------------------------------------------------------------------
# The forward
# ---------------------------------------------------------------------------------------------------------------------
def test_losses_of_texts_with_and_without_weights():
    """By plain loops, token by token, head by head; then the log-probability of each row, and the loss of rows with
    weights."""
    model, (tokens, targets) = wide_model(training=False, threads=3), make_batch()
    assert gradcheck.forward_error(model, tokens, targets) < 1e-11
    losses, counted = model.forward(tokens, targets), model_cpu.count_targets(targets, 16, 3)
    rows = model.log_probs(tokens, targets)
    assert_allclose([rows[0], sum(rows)], [-13 * model.forward(tokens[:1], targets[:1])[0], -counted[0] * losses[0]])
    weights = [-2.0, 0.5, 0.0, 3.0]
    assert_allclose(model.forward(tokens, targets, [7] * 3, weights), [-rows @ weights / 7, 0, 0])


@parametrize("tokens, targets, words", [
    ([264], [0] * 3, "ids must be from 0 to 263"), ([0] * 17, [0] * 19, "17 tokens do not fit"), ([0], [0, 0, -2], "ids must be from -1 to 263"),
    ([0], [-1, 3, 3], "no counted target")])
def test_bad_batches_are_refused(tokens, targets, words):
    with value_error(words):
        Model(TINY).forward([tokens], [targets])


# ---------------------------------------------------------------------------------------------------------------------
# Micro-batches, threads, memory
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("threads", [1, 2, 3])
def test_neither_threads_nor_micro_batches_change_a_step(threads):
    """Whatever the work arrays have held, and whatever shape a step had before; and the same cut gives the same bits."""
    one, many, bits = wide_model(), wide_model(threads=threads), []
    tokens, targets = make_batch(B=5, T=9)
    expected = one.forward(tokens, targets)
    one.backward()
    counted = model_cpu.count_targets(targets, 9, TINY.predict)
    for cuts in [], [1, 3], []:
        losses, many.flat_grads[...] = 0.0, 0.0
        for part in np.split(np.arange(5), cuts):
            for workspace in many.workspaces:
                workspace.memory[...] = np.nan
            losses = losses + many.forward(tokens[part], targets[part], counted)
            many.backward()
        assert_allclose(losses, expected, rtol=1e-13)
        assert_allclose(many.flat_grads, one.flat_grads, rtol=0, atol=1e-13 * np.abs(one.flat_grads).max())
        bits.append(many.flat_grads.tobytes())
    assert bits[0] == bits[-1]


def test_backward_needs_a_forward_of_its_own():
    """Whatever overwrites what forward has left makes backward a sentence, and not a wrong gradient."""
    model, batch = wide_model(threads=2), make_batch()
    for between in (model.backward, lambda: model.logits(batch[0]), lambda: list(model_cpu.euler_table(model, batch[0])),
                    lambda: model.log_probs(*batch)):
        model.forward(*batch)
        between()
        with value_error("call forward before each backward"):
            model.backward()


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("shape", [(6, 9), (9, 6)])
def test_newton_schulz_by_singular_values(shape):
    """It brings those from 0.005 of the norm on to between 0.68 and 1.16, and leaves their directions."""
    U, _, Vt = np.linalg.svd(np.random.default_rng(0).standard_normal(shape), full_matrices=False)
    moved = U.T @ model_cpu.newton_schulz(U * np.geomspace(75, 10000, len(Vt)) @ Vt) @ Vt.T
    s = np.diag(moved)
    assert_allclose(moved, np.diag(s), atol=1e-10)
    assert 0.68 < s.min() and s.max() < 1.16


@parametrize("optimizer, threads, change", [("adamw", 2, {}), ("muon", 1, dict(predict=1, tied=True)), ("muon", 3, {})])
def test_updates_by_named_tensors(optimizer, threads, change):
    """Steps against AdamW entry by entry, and Muon by named matrices, of which q, k, v, gate and up are cut by hand.  More
    parameters than two pieces of an update; gradients below, about and above eps; norms above the limit and below it."""
    rng, c, norm = np.random.default_rng(0), dataclasses.replace(TINY, vocab=4096, **change), np.linalg.norm
    model = wide_model(c, optimizer=optimizer, threads=threads)
    w = model.flat_params.copy()
    decay, u, m, v = np.zeros((4, len(w)))
    matrices = [part for name, view in model_cpu.param_views(u, c).items() if "layers" in name and view.ndim == 2
                for part in np.split(view, {32: [16, 24], 96: [48]}.get(len(view), []))]
    assert not c.tied or model.params["heads"] is model.params["embed"]
    decay[:-80] = 0.1                                               # all but five gains
    muon = np.zeros(len(w), bool)
    muon[4096 * 16:][:6144] = optimizer == "muon"                   # the matrices of the layers, after the embedding
    for step, scale in enumerate([1.0, 1e-6, 1e-3], start=1):
        g = scale * 10.0 ** rng.uniform(-6, 0, len(w)) * rng.standard_normal(len(w))
        model.flat_grads[...] = g
        assert model.update(0.02) == pytest.approx(norm(g)) and model.step == step
        g[~muon] *= min(1.0, 1.0 / (norm(g[~muon]) + 1e-6))
        m += np.where(muon, 0.05, 0.1) * (g - m)
        v += 0.05 * (g * g - v)
        u[...] = 0.95 * m + 0.05 * g
        for part in matrices:
            part[...] = 0.2 * math.sqrt(max(part.shape)) * model_cpu.newton_schulz(part)
        adamw = m / (1 - 0.9 ** step) / (np.sqrt(v / (1 - 0.95 ** step)) + 1e-8)
        w -= 0.02 * (decay * w + np.where(muon, u, adamw))
        assert_allclose(model.flat_params, w, rtol=1e-10, atol=1e-13)
        assert not model.flat_grads.any() and len(model.v) == len(w) - muon.sum()


@parametrize("at", [0, 264 * 16 + 5, -1])
def test_a_gradient_that_is_not_finite_changes_nothing(at):
    model, same = wide_model(optimizer="muon"), wide_model()
    model.flat_grads[at] = np.nan
    assert not math.isfinite(model.update(0.1)) and model.step == 0
    assert_array_equal(model.flat_params, same.flat_params)
    assert not model.m.any() and not model.v.any()


# ---------------------------------------------------------------------------------------------------------------------
# Noise, and sampling
# ---------------------------------------------------------------------------------------------------------------------
def splitmix64(state, n):
    """Output n of the generator, as its authors wrote it, in Python's integers."""
    z = (state + (n + 1) * 0x9e3779b97f4a7c15) % 2**64
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9 % 2**64
    z = (z ^ z >> 27) * 0x94d049bb133111eb % 2**64
    return z ^ z >> 31


def test_noise_is_splitmix64():
    """u has 52 bits and a half, so that it is never 0 or 1."""
    for seed, t, i in (3, 0, 5), (2**64 - 1, 9, 0):
        u = ((splitmix64(splitmix64(seed, t), i) >> 12) + 0.5) / 2**52
        assert gumbel(seed, np.array([t]), np.array([[i]])) == pytest.approx(-math.log(-math.log(u)), rel=1e-12)


@parametrize("options, weights", [
    (dict(temperature=0.5), [1, 4, 16, 1, 16]), (dict(temperature=0), [0, 0, 1, 0, 0]), (dict(temperature=0.5, top_k=4), [1, 4, 16, 0, 16]),
    (dict(top_k=3, top_p=0.7), [0, 0, 1, 0, 1])])       # of what top_k leaves: 0.4 0.4 0.2
def test_how_often_each_id_is_drawn(options, weights):
    """Of equals the smallest ids are kept; large logits do not overflow."""
    logits = 1000 + np.log([1, 2, 4, 1, 4])
    drawn = sample(np.tile(logits, (4000, 1)), np.arange(4000), Sampling(seed=9, **options))
    found, expected = np.bincount(drawn, minlength=5) / 4000, weights / np.sum(weights)
    assert_allclose(found, expected, rtol=0, atol=0.03)
    assert not found[expected == 0].any()


# ---------------------------------------------------------------------------------------------------------------------
# Decoding
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("size", [1.0, 100.0])
def test_extend_in_any_cut_equals_logits(size):
    """Also where the scores are in the thousands."""
    model, tokens = wide_model(), make_batch(B=1)[0][0]
    model.params["layers.0.qkv"][:20] *= size
    with np.errstate(all="raise", under="ignore"):
        expected = model.logits(tokens[None])[0]
        for cut in [], range(1, 16), [5, 6, 11]:
            model.decoder.forget()
            found = np.concatenate([model.decoder.extend(part) for part in np.split(tokens, cut)])
            assert_allclose(found, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


@parametrize("context", [1, 7, 8])
def test_window_rule(context):
    """While the text fits: from its beginning.  Only a full window moves, and it keeps its last half."""
    before = 0
    for n in range(1, 10 * context):
        if n - 1 - before == context:
            before = n - 1 - context // 2
        assert window_start(n, context) == before


def drafting_model(spread):
    """With spread 0 all tokens and all heads are alike, so that each draft is what head 0 draws there, by the same noise."""
    model = wide_model(dataclasses.replace(TINY, vocab=40, predict=4))
    for rows in model.params["embed"], model.params["heads"].reshape(4, 40, -1):
        rows[...] = rows[0] + spread * rows
    return model


def test_right_drafts_are_all_taken():
    """The first call has none; each call then gives four tokens."""
    decoder = drafting_model(0).decoder
    with unittest.mock.patch.object(decoder, "draw", wraps=decoder.draw) as draw:
        assert len(list(generate(decoder.model, [5], most=13, speculate=True))) == 13
    assert draw.call_count == 4


def test_speculation_changes_nothing():
    """From scratch, cached, speculative: one text; through full windows, whatever the cache holds from before."""
    model, rng = drafting_model(0.3), np.random.default_rng(0)
    for size, how in zip((1, 3, 15, 16, 17, 5, 40, 2), itertools.cycle([(0,), (0.3,), (1.0, 4), (1.5, 0, 0.2)])):
        text = rng.integers(0, 40, size).tolist()
        for seed in range(4):
            most, stop = int(rng.integers(1, 60)), {int(rng.integers(40))}
            plain = generate_plain(model, text, Sampling(*how, seed=seed), most)
            expected = list(itertools.takewhile(lambda token: token not in stop, plain))
            for speculate in False, True:
                list(generate(model, text[:rng.integers(size)] + [7], most=3))
                text_again = generate(model, text, *how, seed=seed, most=most, stop=stop, speculate=speculate)
                assert list(text_again) == expected
            text += [*expected, 3]


@pytest.fixture
def read(monkeypatch):
    """-> the number of tokens that each call of a decoder reads."""
    sizes, usual = [], Decoder._read

    def read(self, tokens, *which):
        sizes.append(np.size(tokens))
        return usual(self, tokens, *which)
    monkeypatch.setattr(Decoder, "_read", read)
    return sizes


def test_decoding_reads_each_token_once(read):
    """One call a token, of that token alone; only a new window is read as a whole.  A later call reads what is new, or all
    after other weights."""
    model = wide_model()
    text = [1] * 5 + list(generate(model, [1] * 5, most=21))
    list(generate(model, text, most=2))
    for _ in range(2):
        list(generate(model, text[:7], most=1))
        model.update(1e-9)
    assert read == [5] + [1] * 11 + [9] + [1] * 7 + [9] + [1, 1] + [7, 7]


def test_an_interruption_leaves_the_cache_right(monkeypatch):
    """Ctrl-C may come at any moment, most likely within the layers."""
    model, rng, text, block_forward = drafting_model(0.3), np.random.default_rng(0), [3], model_cpu.block_forward

    def interrupted(*arguments):
        if rng.random() < 0.06:
            raise KeyboardInterrupt
        block_forward(*arguments)
    for turn in range(40):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(model_cpu, "block_forward", interrupted)
            for token in generate(model, text, speculate=turn % 2 > 0):
                text.append(token)
        assert list(generate(model, text, seed=turn, most=3)) == list(generate_plain(model, text, Sampling(seed=turn), 3))


def test_many_answers_read_little_more_than_one_by_one(read):
    """And their cache holds no more tokens than they need.  (Of most of these the window moves: each is drawn alone.)"""
    model = wide_model()
    prompts = [[1] * n for n in range(1, 17)]
    for prompt in prompts:
        list(generate(model, prompt, most=30))
    alone = sum(read)
    generate_batch(model, prompts, Sampling(seed=range(16)), most=30)
    assert sum(read) < 2.3 * alone
    assert model.new_decoder(9, 5).cache.size == 9 * 5 * 2 * 2 * 8             # layers, k and v, G D


@parametrize("room, most", [(5, 8), (2, 8), (1, 8), (5, 30)])
def test_many_answers_at_once_are_those_of_one_by_one(monkeypatch, room, most):
    """Prompts of several lengths, three of them in one batch if they have 8 tokens to come, up to beyond the window, and
    through full windows; where the memory holds so many texts alone."""
    model, rng, stop = wide_model(), np.random.default_rng(5), range(20)
    monkeypatch.setattr(model, "new_decoder", lambda rows, length: Decoder(model, rows if rows <= room else 1 << 40, length))
    prompts = [rng.integers(0, TINY.vocab, n).tolist() for n in (1, 8, 3, 21, 12)]
    for seed, answer in enumerate(generate_batch(model, prompts, Sampling(1.1, 9, 0.95, range(5), 260), stop, most)):
        alone = list(generate(model, prompts[seed], 1.1, 9, 0.95, seed, 260, stop, most))
        assert answer[:len(alone)] == alone and len(answer) == min(most, len(alone) + 1)
        assert max(answer[len(alone):], default=0) < 20
    room = 0
    with pytest.raises(MemoryError):
        generate_batch(model, prompts, Sampling(seed=range(5)))


# ---------------------------------------------------------------------------------------------------------------------
# The Euler table
# ---------------------------------------------------------------------------------------------------------------------
def test_euler_table():
    """Stopping after i layers is a model of i layers, whose loss the plain loops know."""
    model, (tokens, targets) = wide_model(), make_batch(B=2, T=10)
    targets[:, :9] = tokens[:, 1:]
    states = [x.copy() for x, _ in model_cpu.layer_logits(model, tokens[:, :9])]
    for i, (loss, length, best) in enumerate(model_cpu.euler_table(model, tokens)):
        fewer = types.SimpleNamespace(**{**vars(TINY), "layers": i})
        assert loss == pytest.approx(gradcheck.plain_losses(model.params, fewer, tokens[:, :9], targets)[0])
        steps = [math.dist(*pair) / math.hypot(*pair[0]) for pair in zip(*states[i - 1:i + 1])]
        assert length == pytest.approx(np.mean(steps or [0]))
    assert best == np.argsort(-model.logits(tokens[:, :9])[-1, -1, 0])[:3].tolist()
