"""gradcheck.py: the check passes as it stands, sees every planted bug, and says so by its exit code."""
import dataclasses
import inspect
import itertools
import math
import os
import re
import runpy
import sys
import types
import unittest.mock

import numpy as np
import pytest

import cuda_helpers
import exercises
import gradcheck
import model_cpu
import model_gpu
import test_model_gpu
import test_on_gpu


def replaced(functions):
    """Inside `with replaced(...)`, these stand in model_cpu."""
    return unittest.mock.patch.dict(vars(model_cpu), functions)


def test_tiny_problem_has_every_feature():
    model, tokens, targets = gradcheck.make_tiny(gradcheck.TINY)
    c, T = model.config, tokens.shape[1]
    assert 1 < c.kv_heads < c.heads and c.predict > 2 and c.layers >= 2
    assert c.head_dim // 2 > 1                                      # several RoPE frequencies
    assert T & (T - 1)                                              # not a power of two
    assert len(set(tokens[0])) < T                                  # a token repeats
    counted = model_cpu.count_targets(targets, T, c.predict)
    assert counted[0] > counted[1] > counted[2] > 0
    assert model_cpu.count_targets(targets[1:], T, c.predict)[2] == 0
    assert all(np.any(gain != 1.0) for gain in model.params.values() if gain.ndim == 1)


def test_check_passes_on_sampled_entries():
    rows = list(gradcheck.check_entries(*gradcheck.make_tiny(gradcheck.TINY), gradcheck.TINY_STEP, limit=12))
    assert [row[0] for row in rows] == [name for name, _ in model_cpu.param_table(gradcheck.TINY)]
    assert all(row[2] == 12 for row in rows)
    assert max(row[3] for row in rows) < 1e-9


def test_five_points_are_exact_to_the_fourth_power():
    weight = np.array([0.7])
    assert gradcheck.slope(lambda: float(weight[0] ** 4), weight, 0, 0.1) == pytest.approx(4 * 0.7 ** 3, rel=1e-13)
    assert abs(gradcheck.slope(lambda: float(weight[0] ** 5), weight, 0, 0.1) - 5 * 0.7 ** 4) > 1e-4
    assert weight[0] == 0.7                                         # put back exactly


def test_entries_are_all_or_the_largest_and_a_sample():
    gradient = np.array([[1.0, -7.0, 2.0], [3.0, 0.0, 5.0]])
    assert gradcheck.choose_entries(gradient, None) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    sample = gradcheck.choose_entries(gradient, 3)
    assert len(sample) == 3 and gradient[sample[0]] == -7.0


@pytest.mark.parametrize("heads, kv_heads, predict, T", [(2, 2, 1, 1), (4, 1, 2, 5), (4, 2, 3, 6)])
def test_plain_losses_agree_with_the_model(heads, kv_heads, predict, T):
    config = model_cpu.Config(dim=16, heads=heads, kv_heads=kv_heads, layers=1, context=8, vocab=8, predict=predict)
    rng = np.random.default_rng(3)
    model = model_cpu.Model(config)
    model.flat_params[...] = 0.5 * rng.standard_normal(model.flat_params.shape)
    tokens, targets = rng.integers(0, 8, (2, T)), rng.integers(-1, 8, (2, T + predict - 1))
    targets[0, 0] = 1
    assert gradcheck.loss_error(model, tokens, targets) < 1e-13


@pytest.mark.parametrize("change", [dict(hidden=24), dict(norm_eps=0.5), dict(rope_theta=3.0),
                                    dict(hidden=72, norm_eps=0.1, rope_theta=50, predict=1)])
def test_other_numbers_than_the_usual(change):
    """Width of the feed-forward, eps of the norm and base of the rotation: losses and gradients follow
    Config, and are not those of the usual numbers."""
    usual, tokens, targets = gradcheck.make_tiny(gradcheck.TINY)
    model, rng = model_cpu.Model(dataclasses.replace(gradcheck.TINY, **change)), np.random.default_rng(2)
    targets = targets[:, :tokens.shape[1] + model.config.predict - 1]
    for name, weight in model.params.items():
        weight[...] = (usual.params[name] if usual.params[name].shape == weight.shape else
                       0.3 * rng.standard_normal(weight.shape))
    assert gradcheck.loss_error(model, tokens, targets) < 1e-13
    rows = gradcheck.check_entries(model, tokens, targets, gradcheck.TINY_STEP, 6)
    assert max(row[3] for row in rows) < 1e-9
    if "hidden" not in change:
        assert np.abs(model.forward(tokens, targets) / usual.forward(tokens, targets) - 1).min() > 1e-4
    else:
        assert model.params["layers.1.down"].shape == (16, change["hidden"])


FORWARD_ONLY = {"rope_on_v", "rope_layout", "no_scale", "mask_off_by_one", "gate_up_swapped", "target_shift",
                "masked_counted"}


@pytest.mark.parametrize("name", gradcheck.BUGS)
def test_every_planted_bug_is_caught(name, capsys):
    before = dict(vars(model_cpu))
    assert gradcheck.is_caught(gradcheck.plant(gradcheck.BUGS[name]), limit=12)
    assert vars(model_cpu) == before                                # and is gone afterwards
    lines = capsys.readouterr().out
    # what finite differences cannot see, the loops must, and the other way round
    assert ("the losses:" in lines) == (name in FORWARD_ONLY | {"norm_eps"})
    assert ("tensors of" in lines) == (name not in FORWARD_ONLY)
    if name == "embedding_repeat":
        assert "    1 tensors of 15: embed" in lines


def test_there_are_ten_bugs_and_each_tells_its_story_in_one_line():
    assert len(gradcheck.BUGS) >= 10
    for *edits, story in [*gradcheck.BUGS.values(), *exercises.EXERCISE_BUGS.values()]:
        assert story.endswith(".") and "\n" not in story
        for edit in edits:                                          # the line that it changes still stands there
            function, there = re.fullmatch("(.*?): (.*) -> .*", edit, re.DOTALL).groups()
            assert there in inspect.getsource(getattr(model_cpu, function)), edit


def test_a_gradient_that_is_zero_or_not_a_number_fails(capsys):
    problem = gradcheck.make_tiny(gradcheck.TINY)
    for value in (0.0, np.nan):
        def linear_backward(dx, dw, dout, x, w):
            np.matmul(dout, w, out=dx)
            dw[...] = value
        with replaced({"linear_backward": linear_backward}):
            assert not gradcheck.run_check(*problem, gradcheck.TINY_STEP, gradcheck.TINY_BAR, limit=2)
    assert gradcheck.run_check(*problem, gradcheck.TINY_STEP, gradcheck.TINY_BAR, limit=2)


@pytest.fixture
def few_entries(monkeypatch):
    monkeypatch.setattr(gradcheck.is_caught, "__defaults__", (8,))


def test_exit_codes(capsys, monkeypatch, few_entries):
    for arguments in (["--break", "nonsense"], ["--small", "--list"], ["--unknown"]):
        with pytest.raises(SystemExit) as error:
            gradcheck.main(arguments)
        assert error.value.code == 2
    assert gradcheck.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in gradcheck.BUGS)
    assert gradcheck.main(["--break", "rope_sign"]) == 0
    assert "caught 1 of 1" in capsys.readouterr().out
    monkeypatch.setitem(gradcheck.BUGS, "rope_sign", ("rope_backward: cos -> cos", "A bug that changes nothing."))
    assert gradcheck.main(["--break", "rope_sign"]) == 1
    assert "NOT CAUGHT" in capsys.readouterr().out


def test_main_fails_with_one_where_the_model_is_wrong(capsys, few_entries):
    with replaced(gradcheck.plant(gradcheck.BUGS["rope_sign"])):
        assert gradcheck.main(["--break", "all"]) == 1              # "caught" would mean nothing
    assert "no bug planted" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# The runs on a GPU, where there is none
# ---------------------------------------------------------------------------------------------------------------------
class OnGpu(np.ndarray):
    get = np.ndarray.__array__


class Twin:
    """Stands for model_gpu.Model: model_cpu's own results, each off by what `off` says of its name, relatively."""
    off, options, calls = {}, [], 0

    def __init__(self, config, **options):
        self.model, self.decoder = model_cpu.Model(config), self
        self.flat_grads = np.zeros(model_cpu.param_count(config))
        self.grads = model_cpu.param_views(self.flat_grads, config)
        Twin.options.append(options)

    def write(self, array, values):
        self.model.write(array, values)

    def read(self, array):
        return array.copy()

    flat_params = property(lambda self: self.model.flat_params)

    def wrong(self, array, name):
        return array * (1 + self.off.get(name, self.off.get("all", 0.0)))

    def forward(self, tokens, targets):
        return self.wrong(self.model.forward(tokens, targets), "losses")

    def backward(self):
        self.model.flat_grads[...] = 0.0
        self.model.backward()
        assert model_gpu.RECORD_AT == 3 - Twin.calls % 2        # the second time its launches are recorded
        Twin.calls += 1
        for name, gradient in self.model.grads.items():
            self.grads[name] += self.wrong(gradient, name)
        if Twin.calls % 2 == 0:
            self.grads["norm"][0] *= 1 + self.off.get("second", 0.0)

    def forget(self):
        self.model.decoder.forget()

    def extend(self, tokens):
        return self.wrong(self.model.decoder.extend(tokens), f"extend {len(tokens)}")


WIDE = model_cpu.Config(dim=16, heads=2, kv_heads=1, layers=1, context=256, vocab=16, predict=2)
BARS = {"fp32": (2e-6, 1e-6), "tf32": (2e-3, 1e-4), "bf16": (2e-2, 1e-3)}


@pytest.fixture
def twin(monkeypatch):
    monkeypatch.setattr(model_gpu, "Model", Twin)
    for name, value in (("off", {}), ("options", []), ("calls", 0)):
        monkeypatch.setattr(Twin, name, value)
    return Twin


def test_wide_problem():
    for std, deviation, mean in ((None, 0.02, 1.0), (0.5, 0.5, 1.0)):
        model, tokens, targets = gradcheck.make_problem(WIDE, std)
        assert tokens.shape == (2, 256) and targets.shape == (2, 257)
        assert (targets[0] == -1).nonzero()[0].tolist() == list(range(0, 257, 7)) and (targets[1] >= 0).all()
        assert np.array_equal(tokens[:, 5], tokens[:, 1])
        assert {0, 15} <= set(tokens.flat) <= set(range(16)) and {0, 15} <= set(targets.flat) <= set(range(-1, 16))
        assert abs(np.std(model.params["layers.0.gate_up"]) / deviation - 1) < 0.1
        assert abs(np.mean(model.params["layers.0.gate_up"])) < deviation / 8
        assert abs(np.mean(model.params["norm"]) - mean) < 0.4
        assert all(np.array_equal(weight, weight.astype(np.float32)) for weight in model.params.values())


def test_gpu_gradients_are_printed_in_columns(twin, capsys):
    twin.off = {"norm": 1e-6, "all": 0.0}
    assert gradcheck.run_gpu_gradients(WIDE, ["fp32", "bf16"], None, False)
    assert twin.options == [{"precision": "fp32"}, {"precision": "bf16"}]
    first, *rows, end = capsys.readouterr().out.split("\n")[:-1]
    assert first == ("initial weights, 1 layers of width 16, B 2 x T 256; relative L2 from float64; bars fp32 2e-06, "
                     "bf16 2e-02")
    names = [name for name, _ in model_cpu.param_table(WIDE)] + ["whole gradient", "losses", "twice the same bits"]
    assert [row[2:22].strip() for row in rows] == names and end == ""
    assert rows[names.index("norm")][22:] == "    1.00e-06    1.00e-06"
    assert rows[names.index("embed")][22:] == "    0.00e+00    0.00e+00"
    assert rows[-1][22:] == "        True        True"


@pytest.mark.parametrize("precision", BARS)
@pytest.mark.parametrize("name, bar, times, std, good", [
    ("all", 0, 0.95, None, True), ("all", 0, 1.05, None, False), ("all", 0, 1.05, 0.1, True),
    ("norm", 0, 1.95, None, True), ("norm", 0, 2.05, None, False), ("norm", 0, 2.05, 0.1, True),
    ("losses", 1, 0.95, None, True), ("losses", 1, 1.05, None, False), ("losses", 1, -1.05, None, False),
    ("losses", 1, 1.05, 0.1, True), ("second", 1, 1.0, None, False), ("second", 1, 1.0, 0.1, False)])
def test_gpu_gradients_have_their_bars(twin, capsys, precision, name, bar, times, std, good):
    twin.off = {"losses": 0.0, name: times * BARS[precision][bar]}
    assert bool(gradcheck.run_gpu_gradients(WIDE, [precision], std, False)) == good
    out = capsys.readouterr().out
    assert ("wide (0.1) weights" in out) == (std is not None) != ("bars" in out)


@pytest.mark.parametrize("std, ours, good", [(0.1, 1.45, True), (0.1, 1.55, False), (None, 1.55, True)])
def test_gpu_gradients_beside_those_of_pytorch(twin, capsys, monkeypatch, std, ours, good):
    monkeypatch.setattr(gradcheck, "peer_error", lambda *arguments: {"bf16": 1e-3}[arguments[3]])
    twin.off = {"all": ours * 1e-3, "losses": 0.0}
    assert bool(gradcheck.run_gpu_gradients(WIDE, ["bf16"], std, True)) == good
    assert f"{1e-3:.2e}\n  {'ours / PyTorch' + chr(39) + 's':20}{ours:12.2e}\n" in capsys.readouterr().out


@pytest.mark.parametrize("precision", BARS)
def test_the_error_of_pytorch_is_that_of_its_whole_gradient(monkeypatch, precision):
    reference, tokens, targets = gradcheck.make_problem(WIDE)
    reference.forward(tokens, targets)
    reference.backward()
    asked = []

    def gradient(*arguments):
        asked.append(arguments)
        return 1.125 * reference.flat_grads

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "torch_twin", types.SimpleNamespace(gradient=gradient))
    assert gradcheck.peer_error(reference, tokens, targets, precision) == pytest.approx(0.125)
    assert asked == [(reference, tokens, targets, precision)]
    assert os.path.exists(os.path.join(sys.path[0], "torch_twin.py"))


def fails(check, *arguments):
    try:
        check(*arguments)
    except AssertionError:
        return True
    return False


def tried(check):
    """dict of what a test is parametrized by -> the values"""
    return {mark.args[0]: mark.args[1] for mark in check.pytestmark}


@pytest.mark.parametrize("reason", [None, "There is none."])
@pytest.mark.parametrize("best, precisions", [("bf16", tuple(BARS)), ("fp32", ("fp32",))])
def test_where_the_tests_on_a_gpu_run_and_in_which_precisions(monkeypatch, reason, best, precisions):
    monkeypatch.setattr(model_gpu, "why_no_gpu", lambda: reason)
    monkeypatch.setattr(model_gpu, "default_precision", lambda: best)
    names = runpy.run_path(test_on_gpu.__file__)
    skip = names["pytestmark"][0]
    assert skip.name == "skipif" and skip.args == (bool(reason),) and skip.kwargs == {"reason": str(reason)}
    for name in ("test_attention", "test_widest_norm", "test_muon", "test_generation", "test_rows_read_together"):
        assert tried(names[name])["precision"] == precisions


def test_the_tests_on_a_gpu_pass_with_its_kernels_on_the_cpu(monkeypatch):
    """On a small model, without cuBLAS."""
    fake, made = test_model_gpu.fake_cupy()
    own = model_gpu.Gpu
    monkeypatch.setattr(model_gpu, "cupy", fake)
    monkeypatch.setattr(model_gpu, "Gpu", lambda config, precision, matmul: own(config, precision, "ours"))
    config = model_cpu.Config(dim=64, heads=2, kv_heads=1, layers=1, context=256, vocab=16, predict=2)
    monkeypatch.setattr(test_on_gpu, "GPU_CONFIG", config)
    monkeypatch.setattr(test_model_gpu.Array, "get", np.ndarray.copy, raising=False)
    test_on_gpu.test_widest_norm("fp32")
    test_on_gpu.test_widest_norm("bf16")
    test_on_gpu.test_our_products()
    test_on_gpu.test_cached_logits([100, 4, 4, 148])
    test_on_gpu.test_muon("fp32")
    test_on_gpu.test_rows_read_together("bf16")
    cuda_helpers.check_guards(*made)


def test_attention_is_tried_at_every_length(monkeypatch, capsys):
    monkeypatch.setattr(model_gpu, "Gpu", lambda *arguments: arguments)
    seen, off = [], {}

    def attention_errors(gpu, B, T):
        config, precision, matmul = gpu
        assert matmul == "cublas" and config.context >= T and config.kv_heads == 2
        seen.append((precision, config.head_dim, config.heads // config.kv_heads, B, T))
        return off.get(("output", T), 1e-7), off.get(("gradient", T), 5e-8)

    monkeypatch.setattr(test_on_gpu, "attention_errors", attention_errors)
    lengths = {1: 2, 2: 2, 63: 2, 64: 2, 65: 2, 127: 2, 137: 2, 512: 2, 1000: 1, 2048: 1}
    shapes = tried(test_on_gpu.test_attention)
    assert shapes["group"] == [1, 2, 3, 4] and shapes["D"] == [32, 64, 128]
    for precision, bar in (("fp32", 2e-6), ("tf32", 2e-3), ("bf16", 1e-2)):
        seen.clear()
        assert not fails(test_on_gpu.test_attention, precision, 64, 3)
        assert seen == [(precision, 64, 3, B, T) for T, B in lengths.items()]
        assert capsys.readouterr().out == "".join(
            f"  {f'{precision} D 64 H/G 3 {name}, worst at T 2048':36} {error:.2e}   bar {bar:.0e}\n"
            for name, error in (("output", 1e-7), ("gradient", 5e-8)))
        for name, times in itertools.product(("output", "gradient"), (0.95, 1.05)):
            off[name, 65] = times * bar
            assert fails(test_on_gpu.test_attention, precision, 64, 3) == (times > 1)
            assert f" {name}, worst at T 65 {times * bar:.2e}   bar {bar:.0e}\n" in capsys.readouterr().out
            del off[name, 65]
    off["output", 65] = gradcheck.distance(np.full(2, np.nan), np.ones(2))                  # not a number, in one of many
    assert fails(test_on_gpu.test_attention, "fp32", 32, 1) and " inf   bar 2e-06" in capsys.readouterr().out


def test_attention_errors_of_the_kernels(monkeypatch):
    fake, made = test_model_gpu.fake_cupy()
    monkeypatch.setattr(test_model_gpu.Array, "get", np.ndarray.copy, raising=False)
    monkeypatch.setattr(model_gpu, "cupy", fake)
    config = model_cpu.Config(dim=128, heads=4, kv_heads=2, layers=1, context=24, vocab=8)
    for precision, low, high in (("fp32", 1e-8, 1e-6), ("tf32", 1e-5, 1e-3), ("bf16", 1e-3, 6e-3)):
        gpu = model_gpu.Gpu(config, precision, "ours")
        errors = test_on_gpu.attention_errors(gpu, B=2, T=17)
        assert low < min(errors) <= max(errors) < high
    cuda_helpers.check_guards(*made)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attention_errors_are_measured_against_float64(monkeypatch, precision):
    """With kernels that are off by a quarter and by a half: in bf16 exactly so, but for the rounding."""
    B, T, c = 2, 5, model_cpu.Config(dim=16, heads=4, kv_heads=2, layers=1, context=8, vocab=8)
    kept = np.zeros((B, 2, 2, T, T))
    pack, unpack = (cuda_helpers.to_bf16, cuda_helpers.from_bf16) if precision == "bf16" else (np.float32, np.float64)

    class Coarse:
        """Numbers of which many lie in the middle between two of bf16."""
        def __init__(self, seed, numbers=np.random.default_rng):
            self.rng = numbers(seed)

        def standard_normal(self, shape):
            return np.round(256 * self.rng.standard_normal(shape)) / 256

    monkeypatch.setattr(np.random, "default_rng", Coarse)
    rng = Coarse(T)
    first = [rng.standard_normal((B, T, width)).reshape(B * T, width).astype(np.float32) for width in (c.qkv_width, 16)]
    if precision == "bf16":                         # of each number the upper half
        first = [(array.view(np.uint32) >> 16).astype(np.uint16) for array in first]

    def forward(gpu, out, lse, qkv, B, T):
        assert np.array_equal(qkv, first[0]) and lse.shape == (B, 4, T) and lse.dtype == np.float32
        exact = np.zeros((B, T, 16))
        model_cpu.attention_forward(exact, kept, unpack(qkv).reshape(B, T, -1).astype(float), c)
        out[...] = pack(1.25 * exact.reshape(out.shape))

    def backward(gpu, dqkv, dout, out, lse, qkv, delta):
        assert np.array_equal(dout, first[1]) and lse.shape == delta.shape == (B, 4, T) and delta.dtype == np.float32
        assert out.shape == (B * T, 16) and out.any()
        exact, ours = np.zeros((B, T, c.qkv_width)), unpack(qkv).reshape(B, T, -1).astype(float)
        dout, out = (unpack(array).reshape(B, T, -1).astype(float) for array in (dout, out))
        model_cpu.attention_backward(exact, dout, out / 1.25, kept, ours, c, np.empty_like(kept))
        model_cpu.rope_backward(model_cpu.rotated_part(exact, c), *(x[:T] for x in model_cpu.rope_table(c, float)))
        dqkv[...] = pack(1.5 * exact.reshape(dqkv.shape))

    monkeypatch.setattr(model_gpu, "attention_forward", forward)
    monkeypatch.setattr(model_gpu, "attention_backward", backward)
    on_host = types.SimpleNamespace(asarray=lambda x: x.view(OnGpu), empty=lambda *a: np.zeros(*a).view(OnGpu))
    monkeypatch.setattr(model_gpu, "cupy", on_host)
    gpu = types.SimpleNamespace(config=c, precision=precision)
    forward_error, backward_error = test_on_gpu.attention_errors(gpu, B, T)
    assert forward_error == pytest.approx(0.25, rel=0.01 if precision == "bf16" else 1e-5)
    assert backward_error == pytest.approx(0.5, rel=0.02 if precision == "bf16" else 1e-5)


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setattr(test_on_gpu, "GPU_CONFIG", WIDE)


@pytest.mark.parametrize("name, size, good", [
    ("all", 5.9e-6, True), ("all", 6.1e-6, False), ("all", np.nan, False), ("losses", 0.95e-6, True),
    ("losses", 1.05e-6, False), ("losses", -1.05e-6, False), ("losses", np.nan, False)])
def test_our_products_have_their_bars(twin, wide, capsys, name, size, good):
    twin.off = {"losses": 0.0, name: size}
    assert fails(test_on_gpu.test_our_products) != good
    assert twin.options == [{"precision": "fp32", "matmul": "ours"}]
    lines = capsys.readouterr().out.splitlines()
    bars = [(f"  {'our products, losses':36} ", "1e-06"), (f"  {'our products, gradient':36} ", "6e-06")]
    seen = bars if good or name == "all" else bars[:1]              # what fails comes last
    assert [(line[:39], line.rpartition("   bar ")[2]) for line in lines] == seen


@pytest.mark.parametrize("piece, size, sizes, good", [
    (256, 1.95e-6, [256], True), (256, 2.05e-6, [256], False), (1, 2.05e-6, [1] * 256, False),
    (100, 1e-4, [100, 4, 4, 148], False), (148, 1e-4, [100, 4, 4, 148], False), (4, 1e-4, [100, 4, 4, 148], False)])
def test_the_cache_has_its_bar(twin, wide, capsys, piece, size, sizes, good):
    twin.off = {f"extend {piece}": size}
    assert fails(test_on_gpu.test_cached_logits, sizes) != good
    assert twin.options == [{"precision": "fp32", "matmul": "ours"}]
    name, _, rest = capsys.readouterr().out.rpartition("   bar ")
    assert name.startswith(f"  {f'cache, {len(sizes):3d} calls':36} ") and rest == "2e-06\n"
    assert sizes in tried(test_on_gpu.test_cached_logits)["sizes"]


@pytest.mark.parametrize("precision, bar, factor", [("fp32", "1e-04", 0.99), ("tf32", "8e-02", 0.99), ("bf16", "8e-02", 1.01)])
def test_a_step_of_muon_has_its_bars(monkeypatch, wide, capsys, precision, bar, factor):
    """An engine that moves one matrix too far."""
    asked = []

    class Engine(model_cpu.Model):
        def __init__(self, config, precision, optimizer):
            asked.append((config, precision, optimizer))
            super().__init__(config, optimizer=optimizer)

        def update(self, lr):
            super().update(lr)
            self.params["layers.0.out"] *= 1 + factor * float(bar)

    monkeypatch.setattr(model_gpu, "Model", Engine)
    assert fails(test_on_gpu.test_muon, precision) == (factor > 1) and asked == [(WIDE, precision, "muon")]
    name, _, rest = capsys.readouterr().out.rpartition("   bar ")
    assert name.startswith(f"  Muon, {precision}, layers.0.out ") and rest == f"{bar}\n"
    assert float(name.split()[-1]) == pytest.approx(factor * float(bar), rel=0.01)


@pytest.mark.parametrize("wrong", ["", "one draft", "all drafts", "launched", "p", "rows"])
def test_generation_is_compared_to_the_bit(monkeypatch, wrong):
    """An engine that reads row by row, as float64 NumPy does not, and is wrong in one way."""
    asked = []

    class RowByRow(model_cpu.Decoder):
        drawing = False

        def extend(self, tokens, last=None):
            rows = np.concatenate([super(RowByRow, self).extend([token]) for token in tokens])[-(last or len(tokens)):]
            return rows * (1 + (wrong == "rows" and len(tokens) == 3 and not self.drawing) / 8)

        def draw(self, tokens, rows, heads, *rest):
            assert self.replays == {}
            self.drawing = True
            ids, p = super().draw(tokens, rows, heads, *rest)
            self.drawing = False
            if self.position > 105 and (wrong == {1: None, 2: "one draft", 3: "all drafts"}[heads]
                                        or wrong == "launched" and model_gpu.RECORD_AT == math.inf):
                ids = (ids + 1) % 16
            return ids, np.round(p, 9) + (wrong == "p" and heads == 2 and self.position > 105)

    class Engine(model_cpu.Model):
        def __init__(self, config, precision, training):
            asked.append((config, precision, training))
            super().__init__(config, training=False)
            self.decoder = RowByRow(self)
            self.decoder.replays = {"a graph": "of another run"}

    monkeypatch.setattr(model_gpu, "Model", Engine)
    config = dataclasses.replace(WIDE, context=120, predict=3)
    monkeypatch.setattr(test_on_gpu, "GPU_CONFIG", config)
    hows = tried(test_on_gpu.test_generation)["how"]
    assert hows == [{"temperature": 0}, {"temperature": 0.8, "top_k": 50}, {"top_p": 0.9}]
    for how in hows:
        assert fails(test_on_gpu.test_generation, "fp32", how) == (wrong not in ("", "rows"))
    assert fails(test_on_gpu.test_rows_read_together, "fp32") == (wrong == "rows")
    assert asked == 4 * [(config, "fp32", False)] and model_gpu.RECORD_AT == 3


@pytest.mark.parametrize("best, precisions", [("bf16", ("fp32", "tf32", "bf16")), ("fp32", ("fp32",))])
def test_a_gpu_is_checked_in_all_that_it_can(monkeypatch, capsys, best, precisions):
    monkeypatch.setattr(model_gpu, "why_no_gpu", lambda: None)
    monkeypatch.setattr(model_gpu, "default_precision", lambda: best)
    called, bad = [], None
    monkeypatch.setattr(gradcheck, "run_gpu_gradients",
                        lambda *arguments: called.append(arguments) or len(called) != bad)
    big = dataclasses.replace(model_cpu.CONFIGS["big"], layers=4)
    for bad in (None, 1, 2):
        called.clear()
        assert gradcheck.main(["--gpu", *(["--peer"] if bad else [])]) == (1 if bad else 0)
        assert called == [(big, precisions, None, bool(bad)), (big, precisions, 0.06, bool(bad))]
        verdict, last = capsys.readouterr().out.splitlines()
        assert verdict == ("NOT all within the bars" if bad else "all within the bars")
        assert last.endswith(": python -m pytest tests/test_on_gpu.py")


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(model_gpu, "why_no_gpu", lambda: "There is none.")
    with pytest.raises(ValueError, match="There is none."):
        gradcheck.main(["--gpu"])


# ---------------------------------------------------------------------------------------------------------------------
# Each bug is the one that its story tells
# ---------------------------------------------------------------------------------------------------------------------
RNG = np.random.default_rng(5)


def rotation():
    """cos and sin as the model hands them out: (T,1,D) with T = 3, D = 4."""
    config = model_cpu.Config(dim=8, heads=2, kv_heads=1, layers=1, context=3, vocab=8)
    return model_cpu.rope_table(config, np.float64)


def attention_in_loops(qkv, dout, forward=2 ** -0.5, backward=2 ** -0.5, future=0, delta=1.0, last=False):
    """B 1, T 3, two query heads and one key/value head of D 2 -> (P, out, dqkv), with a number for each mistake."""
    k, v, dq = qkv[0, :, 4:6], qkv[0, :, 6:], []
    P, out, dk, dv = [], [], np.zeros((3, 2)), np.zeros((3, 2))
    for h in range(2):
        q, dO = qkv[0, :, 2 * h:2 * h + 2], dout[0, :, 2 * h:2 * h + 2]
        e = np.exp(q @ k.T * forward) * np.tri(3, k=future)
        p = e / e.sum(axis=1)[:, None]
        dp = dO @ v.T
        ds = p * (dp - delta * (p * dp).sum(axis=1)[:, None]) * backward
        P, out, dq = [*P, p], [*out, p @ v], [*dq, ds @ k]
        dk, dv = (ds.T @ q, p.T @ dO) if last else (dk + ds.T @ q, dv + p.T @ dO)
    return np.array(P)[None, None], np.hstack(out)[None], np.hstack([*dq, dk, dv])[None]


@pytest.mark.parametrize("name, numbers", [
    ("backward_scale", {"backward": 1.0}), ("softmax_delta", {"delta": 0.0}),
    ("no_scale", {"forward": 1.0, "backward": 1.0}), ("mask_off_by_one", {"future": 1}),
    ("group_not_summed", {"last": True})])
def test_bugs_of_attention(name, numbers):
    qkv, dout = RNG.standard_normal((1, 3, 8)), RNG.standard_normal((1, 3, 4))
    out, dqkv, P = np.zeros((1, 3, 4)), np.zeros((1, 3, 8)), np.zeros((1, 1, 2, 3, 3))
    config = types.SimpleNamespace(dim=4, head_dim=2, kv_heads=1)
    with replaced(gradcheck.plant(gradcheck.BUGS[name])):
        model_cpu.attention_forward(out, P, qkv, config)
        model_cpu.attention_backward(dqkv, dout, out, P, qkv, config, np.empty_like(P))
    for ours, plain in zip((P, out, dqkv), attention_in_loops(qkv, dout, **numbers)):
        np.testing.assert_allclose(ours, plain, atol=1e-12)


def test_bugs_of_the_norm():
    x, dout, gain = RNG.standard_normal((3, 8)), RNG.standard_normal((3, 8)), RNG.standard_normal(8)
    rstd, out, new, right = np.ones(3), np.zeros((3, 8)), np.zeros((3, 8)), np.zeros((3, 8))
    gradcheck.plant(gradcheck.BUGS["norm_eps"])["rmsnorm_forward"](out, rstd, x, gain, 0.25)
    np.testing.assert_allclose(rstd, 1 / (np.sqrt((x ** 2).mean(axis=1)) + 0.25))
    np.testing.assert_allclose(out, x * rstd[:, None] * gain)
    dgain, right_dgain = np.ones(8), np.ones(8)
    model_cpu.rmsnorm_backward(right, right_dgain, dout, x, rstd, gain)
    gradcheck.plant(gradcheck.BUGS["norm_projection"])["rmsnorm_backward"](new, dgain, dout, x, rstd, gain)
    np.testing.assert_allclose(new, dout * gain * rstd[:, None])
    np.testing.assert_allclose(dgain, right_dgain)
    dgain[...] = 1
    gradcheck.plant(gradcheck.BUGS["norm_gain"])["rmsnorm_backward"](new, dgain, dout, x, rstd, gain)
    np.testing.assert_allclose(new, right)
    np.testing.assert_allclose(dgain, 1 + (dout * x).sum(axis=0))


def test_bugs_of_swiglu():
    gate_up, dout = RNG.standard_normal((2, 6)), RNG.standard_normal((2, 3))
    (gate, up), out, sigmoid, dgate_up = np.split(gate_up, 2, axis=1), *np.zeros((2, 2, 3)), np.zeros((2, 6))
    model_cpu.swiglu_forward(out, sigmoid, gate_up)
    gradcheck.plant(gradcheck.BUGS["swiglu_slope"])["swiglu_backward"](dgate_up, dout, sigmoid, gate_up)
    np.testing.assert_allclose(dgate_up, np.hstack([dout * up * sigmoid, dout * gate * sigmoid]))
    bug, swapped = gradcheck.plant(gradcheck.BUGS["gate_up_swapped"]), np.hstack([up, gate])
    right, right_sigmoid, right_d = np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((2, 6))
    model_cpu.swiglu_forward(right, right_sigmoid, swapped)
    with replaced(bug):
        model_cpu.swiglu_forward(out, sigmoid, gate_up)
    assert np.array_equal(out, right) and np.array_equal(sigmoid, right_sigmoid)
    model_cpu.swiglu_backward(right_d, dout, sigmoid, swapped)
    bug["swiglu_backward"](dgate_up, dout, sigmoid, gate_up)
    np.testing.assert_allclose(dgate_up, np.roll(right_d, 3, axis=1))


def test_bugs_of_rope():
    x, cos, sin = RNG.standard_normal((2, 3, 16)), *rotation()
    config = types.SimpleNamespace(head_dim=4, heads=2, kv_heads=1)
    assert np.array_equal(gradcheck.plant(gradcheck.BUGS["rope_on_v"])["rotated_part"](x, config), x.reshape(2, 3, 4, 4))
    x = RNG.standard_normal((2, 3, 2, 4))
    turned, again = x.copy(), x.copy()
    gradcheck.plant(gradcheck.BUGS["rope_sign"])["rope_backward"](turned, cos, sin)
    model_cpu.rope_forward(again, cos, sin)
    assert np.array_equal(turned, again)
    turned = x.copy()
    gradcheck.plant(gradcheck.BUGS["rope_layout"])["rope_forward"](turned, cos, sin)
    for t in range(3):
        for i in range(2):
            z = (x[:, t, :, 2 * i] + 1j * x[:, t, :, 2 * i + 1]) * np.exp(1j * t * 10000 ** (-i / 2))
            np.testing.assert_allclose(turned[:, t, :, 2 * i] + 1j * turned[:, t, :, 2 * i + 1], z)


def test_bugs_of_embedding_and_products():
    dembed, dout = np.ones((4, 2)), RNG.standard_normal((3, 2))
    gradcheck.plant(gradcheck.BUGS["embedding_repeat"])["embedding_backward"](dembed, dout, np.array([2, 0, 2]))
    assert np.array_equal(dembed, [1 + dout[1], [1, 1], 1 + dout[2], [1, 1]])
    dx, dw, x, w = np.ones((3, 5)), np.ones((2, 5)), RNG.standard_normal((3, 5)), RNG.standard_normal((2, 5))
    gradcheck.plant(gradcheck.BUGS["gradient_overwritten"])["linear_backward"](dx, dw, dout, x, w)
    np.testing.assert_allclose(dx, dout @ w)
    np.testing.assert_allclose(dw, dout.T @ x)


def test_bugs_of_the_loss():
    table, weights = np.array([[1, -1], [0, -1], [-1, 2]]), np.array([1.0, 0.5])
    e = RNG.uniform(0.1, 1.0, (3, 2, 4))

    def backward(functions, table=table, divisor=5, weights=weights):
        gradient = e.copy()
        functions["cross_entropy_backward"](gradient, e.sum(axis=-1), table, divisor, weights)
        return gradient

    right, own = vars(model_cpu), np.array([2, 1])
    for bug, expected in (("micro_divisor", {"divisor": own}), ("masked_pulled", {"table": table % 4}),
                          ("head_weight", {"weights": np.ones(2)})):
        np.testing.assert_allclose(backward(gradcheck.plant(gradcheck.BUGS[bug])), backward(right, **expected))
    losses = np.zeros((2, 2))
    gradcheck.plant(gradcheck.BUGS["micro_divisor"])["cross_entropy_forward"](losses[0], np.zeros((3, 2)), e.copy(), table, 5)
    model_cpu.cross_entropy_forward(losses[1], np.zeros((3, 2)), e.copy(), table, own)
    np.testing.assert_allclose(losses[0], losses[1])

    targets = np.arange(14).reshape(2, 7)
    shifted = gradcheck.plant(gradcheck.BUGS["target_shift"])["head_targets"](targets, 4, 4)
    assert shifted.tolist() == [[t, t + 1, t + 1, t + 1] for row in (0, 7) for t in range(row, row + 4)]
    assert gradcheck.plant(gradcheck.BUGS["masked_counted"])["count_targets"](np.full((2, 7), -1), 4, 3).tolist() == [8, 8, 8]


# ---------------------------------------------------------------------------------------------------------------------
# The check's own arithmetic and what it says
# ---------------------------------------------------------------------------------------------------------------------
def test_tiny_problem_in_numbers():
    model, tokens, targets = gradcheck.make_tiny(gradcheck.TINY)
    masked = np.zeros((2, 9), bool)
    masked[0, 3] = masked[1, 2:] = True
    assert tokens.shape == (2, 7) and targets.shape == (2, 9) and tokens[0, 5] == tokens[0, 1]
    assert np.array_equal(targets == -1, masked) and set(tokens.flat) | set(targets.flat) <= set(range(-1, 16))
    gains = np.concatenate([weight for weight in model.params.values() if weight.ndim == 1])
    wide = np.concatenate([weight.reshape(-1) for weight in model.params.values() if weight.ndim == 2])
    assert 0.7 <= gains.min() < 0.74 and 1.26 < gains.max() <= 1.3 and abs(wide.std() / 0.3 - 1) < 0.05
    assert abs(wide.mean()) < 0.02 and gradcheck.TINY.mtp_weight == 0.7


def test_small_problem_in_numbers():
    model, tokens, targets = gradcheck.make_problem(model_cpu.CONFIGS["small"], T=70)
    assert model.config == model_cpu.CONFIGS["small"] and tokens.shape == (2, 70)
    assert targets.shape == (2, 70 + model.config.predict - 1)
    assert np.array_equal(tokens[:, 5], tokens[:, 1]) and not np.array_equal(tokens[0], tokens[1])
    assert (targets[0] == -1).nonzero()[0].tolist() == list(range(0, targets.shape[1], 7)) and (targets[1] >= 0).all()
    assert np.array_equal(model.params["embed"], model_cpu.Model(model.config).params["embed"])
    assert 0.9 * model.config.vocab < tokens.max() < model.config.vocab > targets.max() > 0.9 * model.config.vocab


def test_gradients_take_each_row_alone_with_the_count_of_all():
    model, tokens, targets = gradcheck.make_tiny(gradcheck.TINY)
    model.flat_grads[...] = 7.0                                     # of an earlier step
    rows = gradcheck.gradients(model, tokens, targets)
    model.flat_grads[...] = 0.0
    model.forward(tokens, targets)
    model.backward()
    for name, gradient in model.grads.items():
        np.testing.assert_allclose(rows[name], gradient, atol=1e-13)
        assert rows[name] is not gradient


def test_a_tensors_error_is_relative_to_its_largest_entry(monkeypatch):
    by_hand = {"a": np.array([1.0, -4.0, 2.0]), "b": np.zeros(2), "c": np.array([3.0, 1.0])}
    numeric = {"a": np.array([1.0, -4.0, 2.5]), "b": np.array([0.0, 1e-6]), "c": np.array([np.nan, 1.0])}
    model = types.SimpleNamespace(params=numeric, config=types.SimpleNamespace(head_weights=None))
    monkeypatch.setattr(gradcheck, "gradients", lambda *problem: by_hand)
    monkeypatch.setattr(gradcheck, "slope", lambda loss, weight, index, h: weight[index])
    a, b, c = gradcheck.check_entries(model, None, None, 1e-4)
    assert a == ("a", (3,), 3, 0.125, (2,))
    assert b[:3] == ("b", (2,), 2) and b[3] > 1e290 and b[4] == (1,)
    assert c == ("c", (2,), 2, np.inf, (0,))


def test_slopes_are_those_of_the_weighted_losses(monkeypatch):
    model, tokens, targets = gradcheck.make_tiny(gradcheck.TINY)
    seen = []

    def slope(loss, weight, index, h):
        seen.append((loss(), h))
        return 0.0
    monkeypatch.setattr(gradcheck, "slope", slope)
    next(gradcheck.check_entries(model, tokens, targets, 0.125, limit=1))
    assert seen == [(model.forward(tokens, targets) @ model.config.head_weights, 0.125)]


def test_entries_near_the_limit():
    gradient = np.array([[1.0, -7.0, 2.0], [3.0, 0.0, 5.0]])
    assert gradcheck.choose_entries(gradient, 6) == gradcheck.choose_entries(gradient, 7) == list(np.ndindex(2, 3))
    for limit in range(1, 6):
        largest, *others = gradcheck.choose_entries(gradient, limit)
        assert gradient[largest] == -7.0 and len(set(others)) == limit - 1


def test_a_head_without_any_target_has_the_loss_0_and_one_target_counts_once():
    model, tokens, targets = gradcheck.make_tiny(gradcheck.TINY)
    targets[:, 2:] = -1
    plain = gradcheck.plain_losses(model.params, model.config, tokens[:, :2], targets[:, :4])
    np.testing.assert_allclose(plain, model.forward(tokens[:, :2], targets[:, :4]), rtol=1e-13)
    one = np.full((2, 3), -1)
    one[0, 0] = one[1, 1] = 1                                       # a single target for head 0, and one for head 1
    plain = gradcheck.plain_losses(model.params, model.config, tokens[:, :1], one)
    np.testing.assert_allclose(plain, model.forward(tokens[:, :1], one), rtol=1e-13)
    assert plain[0] > 0 < plain[1] and plain[2] == 0
    targets[...] = -1
    assert gradcheck.plain_losses(model.params, model.config, tokens, targets).tolist() == [0.0, 0.0, 0.0]


def test_the_loss_error_is_that_of_the_worst_head(monkeypatch):
    model = types.SimpleNamespace(params=None, config=None, forward=lambda *batch: np.array([2.0, 1.0, 4.0]))
    for plain, error in (([2.0, 1.25, 4.0], 0.2), ([2.0, 1.0, 3.2], 0.25), ([2.0, np.nan, 4.0], np.inf)):
        monkeypatch.setattr(gradcheck, "plain_losses", lambda *arguments: np.array(plain))
        assert gradcheck.loss_error(model, None, None) == pytest.approx(error)


def stubbed(monkeypatch, error, rows):
    """The check with this error of the losses and these rows; -> what check_entries was called with."""
    called = []
    monkeypatch.setattr(gradcheck, "loss_error", lambda *problem: error)
    monkeypatch.setattr(gradcheck, "check_entries", lambda *arguments: called.append(arguments) or iter(rows))
    return called


def test_the_table_of_a_check(monkeypatch, capsys):
    rows = [("embed", (16, 8), 12, 2.5e-9, (3, 1)), ("norm", (8,), 4, 3e-8, (7,))]
    called = stubbed(monkeypatch, 2e-13, rows)
    model, tokens, targets = gradcheck.make_tiny(gradcheck.TINY)
    assert gradcheck.run_check(model, tokens, targets, 0.5, 1e-8, 12) is False
    assert called == [(model, tokens, targets, 0.5, 12)]
    assert capsys.readouterr().out == """\
tensor                    shape  checked  worst error   at
embed                    16 x 8       12      2.5e-09   [3, 1]
norm                          8        4      3.0e-08   [7]   <-- above the bar
losses against the loops: worst relative error 2.0e-13 (bar 1e-12)
overall: 16 of 7248 entries, worst relative error 3.0e-08 (bar 1e-08)
FAILED
"""


@pytest.mark.parametrize("error, worst, good", [
    (1e-12, 1e-8, True), (1.01e-12, 1e-8, False), (1e-12, 1.01e-8, False), (np.inf, 1e-9, False), (0.0, np.inf, False)])
def test_the_bars_of_a_check_and_of_a_bug(monkeypatch, capsys, error, worst, good):
    rows = [("norm", (8,), 4, worst, (7,)), ("embed", (16, 8), 12, worst / 2, (3, 1))]
    called = stubbed(monkeypatch, error, rows)
    problem = gradcheck.make_tiny(gradcheck.TINY)
    assert gradcheck.run_check(*problem, 2e-4, 1e-8) is good
    capsys.readouterr()
    assert gradcheck.is_caught({}, limit=5) is not good
    assert called[1][3:] == (2e-4, 5)
    out = ""
    if error > 1e-12:
        out += f"    the losses: {error:.1e} from the loops'\n"
    if worst > 1e-8:
        shown = f"norm {worst:.1e}" + (f", embed {worst / 2:.1e}" if worst / 2 > 1e-8 else "")
        out += f"    {1 + (worst / 2 > 1e-8)} tensors of 15: {shown}\n"
    assert capsys.readouterr().out == out
    gradcheck.is_caught({})
    assert called[2][3:] == (2e-4, 40)


def test_bugs_are_planted_one_by_one(monkeypatch, capsys):
    planted = []
    monkeypatch.setattr(gradcheck, "BUGS", {name: ("an edit", "another", f"Story {name}.") for name in "ab"})
    monkeypatch.setattr(gradcheck, "plant", lambda row: row[-1])
    for caught, good in (({"Story a.", "Story b."}, True), ({"Story b."}, False), (set(), False)):
        monkeypatch.setattr(gradcheck, "is_caught", lambda bug: planted.append(bug) or bug in caught if bug else False)
        assert gradcheck.run_breaks(gradcheck.BUGS) is good
        lines = "".join(f"{name}: Story {name}.\n" + ("" if f"Story {name}." in caught else "    NOT CAUGHT\n")
                        for name in "ab")
        assert capsys.readouterr().out == f"{lines}caught {len(caught)} of 2\n"
    assert planted == ["Story a.", "Story b."] * 3
    monkeypatch.setattr(gradcheck, "is_caught", lambda bug: True)
    assert gradcheck.run_breaks("ab") is False
    assert capsys.readouterr().out == "the check fails with no bug planted; run python gradcheck.py\n"


@pytest.mark.parametrize("good", [True, False])
def test_runs_of_the_command_line(monkeypatch, capsys, good):
    called = []

    def run_check(model, tokens, targets, *rest, **options):
        called.append((model.config, *rest, options))
        return good
    monkeypatch.setattr(gradcheck, "run_check", run_check)
    monkeypatch.setattr(gradcheck, "run_breaks", lambda names: called.append(list(names)) or good)
    for arguments in ([], ["--small"], ["--break", "all"], ["--break", "rope_sign"]):
        assert gradcheck.main(arguments) == (0 if good else 1)
    assert called == [(gradcheck.TINY, 2e-4, 1e-8, {}), (gradcheck.TIED, 2e-4, 1e-8, {}), (model_cpu.CONFIGS["small"], 1e-3, 1e-7, 4, {}),
                      list(gradcheck.BUGS), ["rope_sign"]]


def test_the_list_of_bugs(capsys):
    assert gradcheck.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{name:20} {bug[-1]}" for name, bug in gradcheck.BUGS.items()] + [
        f"{name:20} {bug[-1]}  (In the exercise alone.)" for name, bug in exercises.EXERCISE_BUGS.items()]
    with pytest.raises(SystemExit) as error:
        gradcheck.main(["--peer"])
    assert error.value.code == 2 and "--peer goes with --gpu" in capsys.readouterr().err
