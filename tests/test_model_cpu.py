"""model_cpu.py: sizes, losses, threads, optimizers, decoding, sampling.  The judges are loops, formulas, LAPACK's SVD, and the
same computation done whole.

That every gradient is right is gradcheck.py's part, whose plain_losses is the judge of the forward here; that the model is the
one the world calls Llama, tests/peers'."""
import dataclasses
import itertools
import math

import numpy as np
import pytest
from cases import once_a_module, parametrize, value_error
from numpy.testing import assert_allclose, assert_array_equal

import gradcheck
import model_cpu
from model_cpu import Config, Decoder, Model, Sampling, generate, generate_batch, gumbel, sample, window_start

TINY = Config(dim=16, heads=4, kv_heads=2, layers=2, context=16, vocab=264, predict=3, mtp_weight=0.5)
TIED = dataclasses.replace(TINY, predict=1, tied=True)


def wide_model(config=TINY, **options):
    """A model whose weights are wide enough that every part of it matters."""
    model = Model(config, None, **options)
    rng = np.random.default_rng(0)
    for weight in model.params.values():
        weight[...] = 0.3 * rng.standard_normal(weight.shape) + (weight.ndim == 1)
    return model


def make_batch(config=TINY, B=4, T=16):
    """With masked targets, and a row that has none."""
    rng = np.random.default_rng(B)
    tokens, targets = rng.integers(0, config.vocab, (B, T)), rng.integers(0, config.vocab, (B, T + config.predict - 1))
    tokens[0, :2] = 0, config.vocab - 1
    targets[0, 2:5] = targets[-1] = -1
    return tokens, targets


# ---------------------------------------------------------------------------------------------------------------------
# Sizes and parameters
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("name, value", [
    ("dim", 12), ("dim", "16"), ("dim", 20), ("hidden", 12), ("vocab", 65544), ("heads", 16), ("kv_heads", 3), ("context", 0), ("layers", 1.0),
    ("norm_eps", math.nan), ("rope_theta", 0.5), ("mtp_weight", -1), ("positions", 8), ("tied", True)])
def test_sizes_that_do_not_fit_are_refused_by_name(name, value):
    with value_error(name):
        dataclasses.replace(TINY, **{name: value})


def test_the_outermost_sizes_are_taken():
    for change in (dict(context=1 << 20), dict(norm_eps=0, mtp_weight=0, rope_theta=1), dict(vocab=65536), dict(positions=16), dict(heads=8, kv_heads=8)):
        dataclasses.replace(TINY, **change)


def test_parameters():
    """Views of one buffer in the order of the table, the gains last; drawn in it as float32: one seed is one model in
    every precision."""
    config = Config(dim=24, heads=3, kv_heads=1, layers=2, context=5, vocab=48, predict=2)         # D = 8, F = 64
    layer = [("qkv", (40, 24)), ("out", (24, 24)), ("gate_up", (128, 24)), ("down", (24, 64))]
    table = [("embed", (48, 24)), *((f"layers.{i}.{name}", shape) for i in range(2) for name, shape in layer),
             ("heads", (96, 24)), *((f"layers.{i}.norm{j}", (24,)) for i in range(2) for j in (1, 2)), ("norm", (24,))]
    assert model_cpu.param_table(config) == table
    for dtype in np.float64, np.float32:
        model, rng, start = Model(config, 3, dtype), np.random.default_rng(3), 0
        for name, shape in table:
            std = np.float32(0.01 if name.endswith((".out", ".down")) else 0.02)            # 1 / sqrt(2L) = 1/2
            view, end = model.params[name], start + math.prod(shape)
            assert_array_equal(view, rng.standard_normal(shape, np.float32) * std if len(shape) == 2 else np.ones(shape))
            assert np.shares_memory(view, model.flat_params[start:end]) and view.dtype == dtype
            start = end
        assert start == model_cpu.param_count(config) == model.flat_params.size
    tied = Model(TIED)
    assert tied.params["heads"] is tied.params["embed"] and "heads" not in dict(model_cpu.param_table(TIED))


# ---------------------------------------------------------------------------------------------------------------------
# The forward
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("change", [dict(), dict(heads=2, kv_heads=2, norm_eps=0.3), dict(kv_heads=1, rope_theta=5.0, hidden=40), vars(TIED)])
def test_losses_and_logits_by_plain_loops(change):
    """Token by token, head by head; of the whole batch, of rows by themselves, and of rows with weights."""
    config = dataclasses.replace(TINY, **change)
    model, (tokens, targets), K = wide_model(config), make_batch(config), config.predict
    losses, logits = model.forward(tokens, targets), model.logits(tokens)
    assert_allclose(losses, gradcheck.plain_losses(model.params, config, tokens, targets), rtol=1e-11)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))                             # (B,T,K,V)
    for k in range(K):
        picked = [log_p[b, t, k, targets[b, t + k]] for b, t in np.ndindex(tokens.shape) if targets[b, t + k] >= 0]
        assert losses[k] == pytest.approx(-np.mean(picked)) and model_cpu.count_targets(targets, 16, K)[k] == len(picked)
    rows = [gradcheck.plain_losses(model.params, config, *pair)[0] * np.sum(pair[1][:, :16] >= 0)
            for pair in zip(tokens[:, None], targets[:, None])]
    assert_allclose(model.log_probs(tokens, targets), np.negative(rows), rtol=1e-11)
    weights = [-2.0, 0.5, 0.0, 3.0]
    assert_allclose(model.forward(tokens, targets, [7] * K, weights), [np.dot(weights, rows) / 7] + [0] * (K - 1), rtol=1e-10)


def test_rope_far_from_the_beginning():
    """In float32 the angle itself would have lost three digits at position 511."""
    config = Config(dim=24, heads=4, kv_heads=1, layers=1, context=600, vocab=8, rope_theta=7)
    found = model_cpu.rope_table(config, np.float32)
    for t, i in itertools.product((0, 1, 599), range(6)):
        angle = t * 7 ** (-2 * (i % 3) / 6)
        assert_allclose(found[:, t, 0, i], [math.cos(angle), math.sin(angle) * (-1 if i < 3 else 1)], rtol=0, atol=1e-7)


def test_cross_entropy_by_hand():
    """Each row of logits has its own maximum: that of anything more would make all of exp underflow where they are low."""
    table, level = np.array([[0, 7], [3, -1], [5, 1]]), np.array([[-1e4, 1e3], [0.0, -1e4], [1e4, -2e3]])
    z, losses, total = np.random.default_rng(0).standard_normal((3, 2, 8)) + level[..., None], np.empty(2), np.empty((3, 2))
    found, weights, divisor = z.copy(), np.array([1.0, 0.25]), np.array([3, 2])
    with np.errstate(all="raise", under="ignore"):
        model_cpu.cross_entropy_forward(losses, total, found, table, divisor)
        model_cpu.cross_entropy_backward(found, total, table, divisor, weights)
    nll, gradient = np.zeros((3, 2)), np.zeros((3, 2, 8))
    for n, k in np.argwhere(table >= 0):
        p = np.exp(z[n, k] - z[n, k].max())
        p /= p.sum()
        nll[n, k] = -math.log(p[table[n, k]])
        gradient[n, k] = (p - np.eye(8)[table[n, k]]) * weights[k] / divisor[k]
    assert_allclose(losses, nll.sum(axis=0) / divisor, rtol=1e-11)
    assert_allclose(found, gradient, rtol=0, atol=1e-12)


def test_large_gates_do_not_overflow():
    out, sigmoid = np.empty((2, 1, 2))
    with np.errstate(all="raise", under="ignore"):
        model_cpu.swiglu_forward(out, sigmoid, np.array([[-2000.0, 2000.0, 1.0, 1.0]]))
    assert out.tolist() == [[0.0, 2000.0]]


@parametrize("tokens, targets, words", [
    ([[0, 264]], [[0] * 4], "^token id 264"), ([[0, -1]], [[0] * 4], "^token id -1"), ([[0] * 17], [[0] * 19], "17 tokens do not fit"),
    ([[0, 1]], [[0, 0, 0, 264]], "^target id 264"), ([[0, 1]], [[0, 0, 0, -2]], "^target id -2"), ([[0, 0.5]], [[0] * 4], "float64"),
    ([[0, 1]], [[0] * 5], r"\(1, 4\)"), ([[]], [[0] * 2], r"\(1, 0\)"), ([[0, 1]], [[-1, -1, 3, 3]], "no counted target")])
def test_bad_batches_are_refused(tokens, targets, words):
    with value_error(words):
        Model(TINY).forward(np.array(tokens), np.array(targets))


# ---------------------------------------------------------------------------------------------------------------------
# Micro-batches, threads, memory
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("threads", [1, 2, 3])
def test_neither_threads_nor_micro_batches_change_a_step(threads):
    """Whatever the work arrays have held, and whatever shape a step had before."""
    one, many = wide_model(), wide_model(threads=threads)
    tokens, targets = make_batch(B=5, T=9)
    expected = one.forward(tokens, targets)
    one.backward()
    counted = model_cpu.count_targets(targets, 9, TINY.predict)
    for cuts in [], [1, 3], [4], []:
        losses, many.flat_grads[...] = 0.0, 0.0
        for part in np.split(np.arange(5), cuts):
            for workspace in many.workspaces:
                workspace.memory[...] = np.nan
            losses = losses + many.forward(tokens[part], targets[part], counted)
            many.backward()
        assert_allclose(losses, expected, rtol=1e-13)
        assert_allclose(many.flat_grads, one.flat_grads, rtol=0, atol=1e-13 * np.abs(one.flat_grads).max())


def test_backward_needs_a_forward_of_its_own():
    """Whatever overwrites what forward has left makes backward a sentence, and not a wrong gradient."""
    model, batch = wide_model(threads=2), make_batch()
    for between in (model.backward, lambda: model.logits(batch[0]), lambda: list(model_cpu.euler_table(model, batch[0])),
                    lambda: model.log_probs(*batch), lambda: model.update(0.0), model.refresh):
        model.forward(*batch)
        between()
        with value_error("backward needs a forward of its own"):
            model.backward()


def test_a_model_without_training_has_the_losses_alone():
    model = Model(TINY, 5, training=False, threads=2)
    assert_array_equal(model.forward(*make_batch()), Model(TINY, 5, threads=2).forward(*make_batch()))
    assert model.flat_grads is model.m is model.v is None and model.workspaces[1].flat_grads is None


@pytest.mark.filterwarnings("error")
def test_overflow_in_a_thread_is_silent():
    model = wide_model(dtype=np.float32, threads=2)
    model.params["heads"][...] = 1e38
    assert not np.isfinite(model.forward(*make_batch())).all()


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------------------------------------------
def orthogonal(u):
    """What newton_schulz gives, by LAPACK's singular values, which the quintic moves."""
    U, s, Vt = np.linalg.svd(u, full_matrices=False)
    s = s / (np.linalg.norm(u) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s ** 3 + 2.0315 * s ** 5
    return (U * s) @ Vt


@parametrize("shape", [(3, 8), (8, 3), (16, 16), (1, 5)])
def test_newton_schulz(shape):
    """It moves singular values alone: those from 0.005 of the norm on to between 0.68 and 1.16."""
    for scale in (1e-4, 1e6):
        u = scale * np.random.default_rng(0).standard_normal(shape)
        found, s = model_cpu.newton_schulz(u), np.linalg.svd(u, compute_uv=False)
        assert_allclose(found, orthogonal(u), rtol=0, atol=1e-10)
        moved = np.linalg.svd(found, compute_uv=False)[s > 0.005 * np.linalg.norm(u)]
        assert 0.68 < moved.min() and moved.max() < 1.16
    assert not model_cpu.newton_schulz(np.zeros(shape)).any()


@parametrize("optimizer, threads, config", [("adamw", 2, TINY), ("muon", 1, TIED), ("muon", 3, TINY)])
def test_updates_by_named_tensors(optimizer, threads, config):
    """Steps against the same from named tensors, q, k, v, gate and up cut by hand.  More parameters than two pieces of an
    update; gradients below, about and above eps; norms above the limit and below it."""
    rng, c = np.random.default_rng(0), dataclasses.replace(config, vocab=4096)
    model, D = wide_model(c, optimizer=optimizer, threads=threads), c.head_dim
    names = dict(model_cpu.param_table(c))
    expected = {name: model.params[name].copy() for name in names}
    m, v = [{name: 0.0 * weight for name, weight in expected.items()} for _ in range(2)]
    cuts = {"qkv": [c.heads * D, (c.heads + c.kv_heads) * D], "gate_up": [c.hidden]}
    matrices = [name for name in names if "layers" in name and "norm" not in name and optimizer == "muon"]
    for step, size in enumerate([1.0, 1e-6, 1e-3], start=1):
        squares = dict.fromkeys(names, 0.0)
        for name, shape in names.items():
            g = model.grads[name][...] = size * rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 0, shape)
            squares[name] = np.sum(g ** 2)
        grads = {name: model.grads[name].copy() for name in names}
        clip = min(1.0, 1.0 / (math.sqrt(sum(squares[name] for name in names if name not in matrices)) + 1e-6))
        assert model.update(0.02) == pytest.approx(math.sqrt(sum(squares.values())), rel=1e-12) and model.step == step
        for name, g in grads.items():
            w = expected[name]
            if name in matrices:
                m[name] = 0.95 * m[name] + 0.05 * g
                w *= 1 - 0.02 * 0.1
                cut = cuts.get(name.split(".")[-1], [])
                for part, u in zip(np.split(w, cut), np.split(0.95 * m[name] + 0.05 * g, cut)):
                    part -= 0.02 * 0.2 * math.sqrt(max(u.shape)) * orthogonal(u)
            else:
                g = g * clip
                m[name], v[name] = 0.9 * m[name] + 0.1 * g, 0.95 * v[name] + 0.05 * g * g
                decay = 0.1 if w.ndim == 2 else 0.0
                w -= 0.02 * (decay * w + m[name] / (1 - 0.9 ** step) / (np.sqrt(v[name] / (1 - 0.95 ** step)) + 1e-8))
            assert_allclose(model.params[name], w, rtol=1e-11, atol=1e-13)
        assert not model.flat_grads.any()
    assert model.v.size == sum(v[name].size for name in names if name not in matrices)


@parametrize("optimizer", ["adamw", "muon"])
@parametrize("at", [0, 264 * 16 + 5, -1])
def test_a_gradient_that_is_not_finite_changes_nothing(optimizer, at):
    model = wide_model(optimizer=optimizer)
    model.flat_grads[at] = np.nan
    kept = model.flat_params, model.flat_grads, model.m, model.v    # the gradient is left to look at
    before = [array.copy() for array in kept]
    assert not math.isfinite(model.update(0.1)) and model.step == 0
    assert all(np.array_equal(*pair, equal_nan=True) for pair in zip(before, kept))


@parametrize("threads", [1, 3])
def test_training_is_bit_identical_from_run_to_run(threads):
    models = [wide_model(dtype=np.float32, threads=threads) for _ in range(2)]
    for _, model in itertools.product(range(3), models):
        model.forward(*make_batch(B=5))
        model.backward()
        model.update(1e-2)
    assert models[0].flat_params.tobytes() == models[1].flat_params.tobytes()


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
    """With its published outputs; u has 52 bits and a half, so that it is never 0 or 1."""
    assert [splitmix64(1234567, n) for n in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    ids, ts, seeds = np.array([[0, 5, 2], [7, 1, 0]]), [0, 9], [3, 2**64 - 1]
    for (i, j), found in np.ndenumerate(gumbel(seeds, np.array(ts), ids)):
        bits = splitmix64(splitmix64(seeds[i], ts[i]), int(ids[i, j])) >> 12
        assert found == pytest.approx(-math.log(-math.log((bits + 0.5) / 2**52)), rel=1e-12)


@parametrize("options, kept", [
    (dict(), [4, 4, 2, 1, 1]), (dict(temperature=0.5), [16, 16, 4, 1, 1]), (dict(top_k=3), [4, 4, 2]), (dict(top_k=99, top_p=0.9), [4, 4, 2, 1]),
    (dict(top_p=0.4), [1, 1]), (dict(top_k=3, top_p=0.7), [1, 1]),  # top_p of what top_k has left: 0.4 0.4 0.2
    (dict(temperature=0.5, top_p=0.42), [1]), (dict(temperature=0), [1]), (dict(top_k=1), [1])])
def test_sample_by_hand(options, kept):
    """Ids 2, 4, 1, 0, 3 are to each other as four to four to two to one to one.  What is kept of them is drawn as often as it
    should be; and one by one, with the noise of its id."""
    logits, n = np.log(np.array([1.0, 2.0, 4.0, 1.0, 4.0], np.float32)), 4000
    t, weights = np.arange(40, 40 + n), dict(zip([2, 4, 1, 0, 3], kept))
    drawn = sample(np.tile(logits, (n, 1)), t, Sampling(seed=9, **options)).tolist()
    noise = gumbel(9, t, np.tile(np.arange(5), (n, 1)))
    assert drawn == [max(weights, key=lambda i: math.log(weights[i]) + row[i]) for row in noise]
    for i, weight in weights.items():
        assert abs(drawn.count(i) / n - weight / sum(kept)) < 4 * 0.5 / math.sqrt(n)


def test_which_of_equals_are_kept_and_large_logits():
    def draws(logits, **options):
        return set(sample(np.tile(logits, (2000, 1)), np.arange(2000), Sampling(seed=3, **options)).tolist())
    assert draws(np.tile([0.0, 1.0], 150), top_k=7) == set(range(1, 14, 2))
    for top_p, kept in [(0.25, 1), (0.26, 2), (0.5, 2), (0.76, 4)]:
        assert draws(np.zeros(4), top_p=top_p) == set(range(kept))          # four quarters: their sums are exact
    with np.errstate(all="raise", under="ignore"):
        for temperature, ids in ((0.5, {1, 3}), (1e-30, {1})):
            assert draws(np.array([0.0, 1000.0, -1000.0, 999.0]), temperature=temperature) == ids


# ---------------------------------------------------------------------------------------------------------------------
# Decoding
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("heads, kv_heads, size", [(4, 2, 1.0), (4, 4, 1.0), (2, 1, 100.0)])
def test_extend_in_any_cut_equals_logits(heads, kv_heads, size):
    """Also where the scores are in the thousands, and after the position was set back."""
    model, tokens = wide_model(dataclasses.replace(TINY, heads=heads, kv_heads=kv_heads)), make_batch(B=1)[0][0]
    model.params["layers.0.qkv"][:20] *= size
    with np.errstate(all="raise", under="ignore"):
        expected = model.logits(tokens[None])[0]
        for cut in [], range(1, 16), [1], [5, 6, 11]:
            model.decoder.position = 0
            found = np.concatenate([model.decoder.extend(part) for part in np.split(tokens, cut)])
            assert_allclose(found, expected, rtol=0, atol=1e-10 * np.abs(expected).max())
    model.decoder.position = 3
    assert model.decoder.tokens == tokens[:3].tolist()
    assert_allclose(model.decoder.extend(tokens[3:], 2), expected[-2:], rtol=0, atol=1e-9 * size)
    with value_error("1 tokens at 16 do not fit the context of 16"):
        model.decoder.extend([1])


@parametrize("context", [1, 2, 3, 7, 8])
def test_window_rule(context):
    """While the text fits: from its beginning.  Only a full window moves, and it keeps its last half."""
    before = 0
    for n in range(1, 10 * context + 10):
        full = n - 1 - before == context
        start = window_start(n, context)
        assert start == (n - 1 - context // 2 if full else before)
        before = start


def plain_text(model, tokens, most, stop=(), seed=None, **options):
    """What generate should yield, every token recomputed from scratch, and the probability of each."""
    text, probabilities = list(tokens), []
    while len(text) < len(tokens) + most:
        logits = model.logits([text[window_start(len(text), model.config.context):]])[0, -1:, 0, :39]
        token = int(sample(logits, np.array([len(text)]), Sampling(seed=seed, **options))[0])
        probabilities.append(np.exp(logits[0, token]) / np.exp(logits).sum())
        if token in stop:
            break
        text.append(token)
    return text[len(tokens):], probabilities


DECODING = [dict(temperature=0), dict(temperature=0.3), dict(temperature=1.0, top_k=4), dict(temperature=1.5, top_p=0.2)]


@once_a_module
def drafting_model():
    """Wide, and its further heads near enough to head 0 after some more tokens that each is right now and then: the
    layers say little, so that what comes next hangs on the last token, and head k is the k-fold step."""
    model, V = wide_model(dataclasses.replace(TINY, vocab=40, predict=4)), 40
    for name, weight in model.params.items():
        if name.startswith("layers") and weight.ndim == 2:
            weight *= 0.4
    steps = np.eye(V)[np.random.default_rng(1).permutation(V)]
    model.params["heads"][...] = np.concatenate([np.linalg.matrix_power(steps, k + 1) @ model.params["embed"] for k in range(4)])
    return model


@parametrize("size", [1, 3, 15, 16, 17, 5, 40, 2])
def test_speculation_changes_nothing(drafting_model, size):
    """From scratch, cached, speculative: one text; through full windows, whatever the cache holds from before.  Where drafts
    are read, each is right and wrong at times, and a call goes on as far as they are right."""
    model, rng, traces = drafting_model, np.random.default_rng(size), []
    text = rng.integers(0, 40, size).tolist()
    for options in 2 * DECODING:
        seed, most, stop = int(rng.integers(2**63)), int(rng.integers(1, 60)), {int(rng.integers(40))}
        expected, probabilities = plain_text(model, text, most, stop, seed, **options)
        for speculate in False, True, None:
            list(generate(model, text[:rng.integers(1, len(text) + 1)] + [7], most=int(rng.integers(1, 5))))
            trace = []
            assert list(generate(model, text, seed=seed, vocab=39, most=most, stop=stop, speculate=speculate, trace=trace, **options)) == expected
            places, drafts, found = zip(*trace)
            assert_allclose(found, probabilities, rtol=1e-9)
            assert set(drafts) <= {0, 3} if speculate else not any(places + drafts)
            assert all(place in (0, before + 1) for before, place in itertools.pairwise((-1, *places)))
        traces += places if speculate else ()
        text += [*expected, 3, int(rng.integers(40))]


def test_each_head_drafts(drafting_model):
    trace = []
    list(generate(drafting_model, [5], 0.3, seed=1, most=400, speculate=True, trace=trace))
    counts = [sum(place == k for place, _, _ in trace) for k in range(4)]
    assert counts[0] > counts[1] + 20 and counts[1] > counts[2] > counts[3] > 10


def test_decoding_reads_each_token_once(monkeypatch):
    """One call a token, of that token alone; only a new window is read as a whole.  A later call reads what is new, or all
    after other weights."""
    model, lengths, extend = wide_model(), [], Decoder.extend
    monkeypatch.setattr(Decoder, "extend", lambda self, tokens, last: lengths.append(len(tokens)) or extend(self, tokens, last))
    text = [1] * 5 + list(generate(model, [1] * 5, seed=0, most=30))
    assert lengths == [5] + [1] * 11 + [9] + [1] * 7 + [9] + [1] * 7 + [9, 1]
    for changes, start, expected in [(0, text[:9], [9]), (0, text[:9], [1]), (0, [*text[:5], 300 - 40, 4], [2]), (1, text[:9], [9])]:
        lengths.clear()
        if changes:
            model.update(1e-9)
        list(generate(model, start, seed=0, most=1))
        assert lengths == expected


def test_an_interruption_leaves_the_cache_right(drafting_model, monkeypatch):
    """Ctrl-C may come at any moment: between two layers, or after the last."""
    model, rng, text, interruptions = drafting_model, np.random.default_rng(0), [3], 0

    def interrupted(function):
        def call(*arguments):
            if rng.random() < 0.06:
                raise KeyboardInterrupt
            return function(*arguments)
        return call
    for turn in range(50):
        with monkeypatch.context() as patch:
            for name in "block_forward", "sample":
                patch.setattr(model_cpu, name, interrupted(getattr(model_cpu, name)))
            try:
                for token in generate(model, text, seed=5, vocab=39, most=9, speculate=turn % 2 > 0):
                    text.append(token)                              # the list that was given may grow meanwhile
            except KeyboardInterrupt:
                interruptions += 1
        found = list(generate(model, text, seed=turn, vocab=39, most=3, speculate=turn % 3 > 0))
        assert found == plain_text(model, text, 3, seed=turn)[0]
    assert interruptions > 15


def test_seeds():
    model = wide_model()
    first, again, same, other = (list(generate(model, [1, 2], seed=seed, most=40)) for seed in (3, 3, 3 + 2**64, 4))
    assert first == again == same != other
    assert list(generate(model, [1, 2], most=40)) != list(generate(model, [1, 2], most=40))
    with value_error("at least one token"):
        next(generate(model, []))


@parametrize("room", [5, 2, 1, 0])
def test_many_answers_at_once_are_those_of_one_by_one(monkeypatch, room):
    """Prompts of several lengths, up to beyond the window, and through full windows; where the memory holds so many alone."""
    model, rng = wide_model(), np.random.default_rng(5)

    def new_decoder(rows, length):
        if rows > room:
            raise MemoryError
        return Decoder(model, rows)
    monkeypatch.setattr(model, "new_decoder", new_decoder)
    prompts = [rng.integers(0, TINY.vocab, n).tolist() for n in (1, 8, 3, TINY.context + 5, 12)]
    seeds = rng.integers(0, 1 << 63, len(prompts))
    for how in (0.7, 0, 1.0), (1.1, 9, 0.95), (0.0, 0, 1.0):
        sampling = Sampling(*how, seeds, 260)
        if not room:
            with pytest.raises(MemoryError):
                generate_batch(model, prompts, sampling)
            continue
        answers = generate_batch(model, prompts, sampling, {7, 9, 50}, 30)
        for prompt, seed, answer in zip(prompts, seeds.tolist(), answers):
            alone = list(generate(model, prompt, *how, seed, 260, {7, 9, 50}, 30))
            assert answer[:len(alone)] == alone and answer[len(alone):] in ([[7], [9], [50]] if len(alone) < 30 else [[]])


# ---------------------------------------------------------------------------------------------------------------------
# The Euler table, and the tour
# ---------------------------------------------------------------------------------------------------------------------
def test_euler_table():
    """Stopping after layer i is a model of i + 1 layers, whose loss the plain loops know."""
    model, (tokens, _) = wide_model(), make_batch(B=2, T=10)
    inputs, targets = tokens[:, :9], tokens[:, 1:]
    states = [model.params["embed"][inputs.ravel()], *(x.copy() for x, _ in model_cpu.layer_logits(model, inputs))]
    w = {**model.params, "heads": model.params["heads"][:TINY.vocab]}
    stopped = {**w, "layers.0.out": 0 * w["layers.0.out"], "layers.0.down": 0 * w["layers.0.down"]}     # a layer that adds nothing
    for i, (loss, length, best) in enumerate(model_cpu.euler_table(model, tokens)):
        one = dataclasses.replace(TINY, layers=max(i, 1), predict=1)
        assert loss == pytest.approx(gradcheck.plain_losses(w if i else stopped, one, inputs, targets)[0], rel=1e-11)
        steps = [math.dist(*pair) / math.hypot(*pair[0]) for pair in zip(*states[i:i + 2])]
        assert length == pytest.approx(np.mean(steps), rel=1e-12)
    assert i == TINY.layers and best == np.argsort(-model.logits(inputs)[-1, -1, 0])[:3].tolist()


def test_the_tour(capsys):
    """What it shows by hand and by finite differences is equal, and the Euler table ends with the model's loss."""
    model_cpu.main([])
    out = capsys.readouterr().out
    by_hand, numeric = [float(line.split()[-1]) for part in ("by hand", "by finite difference") for line in out.split("\n")
                        for line in line.split(",") if part in line]
    assert by_hand == pytest.approx(numeric, rel=1e-6)
    updated, (*_, last) = out.split("-> ")[-1].split()[0], out.rstrip().split("\n")
    assert last.split()[2] == updated
