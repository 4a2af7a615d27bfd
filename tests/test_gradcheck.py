"""gradcheck.py: the check passes as it stands, sees every planted bug, and says so by its exit code."""
import dataclasses
import os
import re
import runpy
import sys
import unittest.mock
from types import SimpleNamespace

import numpy as np
from numpy.testing import assert_allclose
import pytest
from cases import parametrize, put, rows, value_error

import cuda_helpers
import exercises
import gpu_gradients
import gradcheck
import model_cpu
import model_gpu
import test_model_gpu
import test_on_gpu
from gradcheck import TINY, TINY_STEP

HEADS_FIRST = """heads norm
    layers.1.down layers.1.gate_up layers.1.norm2 layers.1.out layers.1.qkv layers.1.norm1
    layers.0.down layers.0.gate_up layers.0.norm2 layers.0.out layers.0.qkv layers.0.norm1 embed""".split()


def replaced(functions):
    """Inside `with replaced(...)`, these stand in model_cpu."""
    return unittest.mock.patch.dict(vars(model_cpu), functions)


# ------------------------------------------------------------------------------------------------------------
# The problems
# ------------------------------------------------------------------------------------------------------------
def test_the_tiny_problem_has_every_feature():
    model, tokens, targets = gradcheck.make_tiny(TINY)
    assert 1 < TINY.kv_heads < TINY.heads and TINY.predict > 2 and TINY.layers >= 2 and TINY.mtp_weight == 0.7
    assert TINY.head_dim // 2 > 1                                   # several RoPE frequencies
    assert tokens.shape == (2, 7) and targets.shape == (2, 9)       # 7 is not a power of two
    assert tokens[0, 5] == tokens[0, 1]                             # a token repeats
    masked = [[int(target < 0) for target in row] for row in targets]
    assert masked == [[0, 0, 0, 1, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1]]
    gains = np.concatenate([weight for weight in model.params.values() if weight.ndim == 1])
    wide = np.concatenate([weight.ravel() for weight in model.params.values() if weight.ndim == 2])
    assert 0.7 <= gains.min() < 0.74 and 1.26 < gains.max() <= 1.3
    assert abs(wide.std() / 0.3 - 1) < 0.05


@parametrize("std, deviation", [(None, 0.02), (0.5, 0.5)])
def test_problems_of_any_size(std, deviation):
    model, tokens, targets = gradcheck.make_problem(WIDE, std)
    assert tokens.shape == (2, 256) and targets.shape == (2, 257)
    assert (targets[0] == -1).nonzero()[0].tolist() == list(range(0, 257, 7)) and (targets[1] >= 0).all()
    assert np.array_equal(tokens[:, 5], tokens[:, 1])
    assert set(tokens.flat) == set(range(16)) and set(targets.flat) == set(range(-1, 16))
    matrix = model.params["layers.0.gate_up"]
    assert abs(np.std(matrix) / deviation - 1) < 0.1
    assert abs(np.mean(model.params["norm"]) - 1) < 0.4
    assert all(np.array_equal(weight, weight.astype(np.float32)) for weight in model.params.values())


# ------------------------------------------------------------------------------------------------------------
# Slopes and loops
# ------------------------------------------------------------------------------------------------------------
@parametrize("change", [
    dict(), dict(heads=2, kv_heads=2, predict=1), dict(kv_heads=1, hidden=48),
    dict(norm_eps=0.5, rope_theta=3.0), dict(predict=1, tied=True)])
def test_losses_and_slopes_agree(change):
    model, *batch = gradcheck.make_tiny(dataclasses.replace(TINY, **change))
    assert gradcheck.loss_error(model, *batch) < 1e-13
    rows = list(gradcheck.check_entries(model, *batch, TINY_STEP, limit=6))
    assert [(name, count) for name, _, count, _, _ in rows] == [
        (name, 6) for name, _ in model_cpu.param_table(model.config)]
    assert max(error for _, _, _, error, _ in rows) < 1e-9


def test_losses_where_targets_are_few():
    model, tokens, _ = gradcheck.make_tiny(TINY)
    one = np.full((2, 3), -1)
    one[0, 0] = one[1, 1] = 1                               # one for head 0, one for head 1, none for head 2
    plain = gradcheck.plain_losses(model.params, TINY, tokens[:, :1], one)
    assert_allclose(plain, model.forward(tokens[:, :1], one), rtol=1e-13)
    assert plain[0] > 0 < plain[1] and plain[2] == 0


def test_five_points_are_exact_to_the_fourth_power():
    weight = np.array([0.7])
    slope = gradcheck.slope(lambda: float(weight[0] ** 4), weight, 0, 0.1)
    assert slope == pytest.approx(4 * 0.7 ** 3, rel=1e-13)
    assert weight[0] == 0.7                                         # put back exactly


def test_entries_are_all_or_the_largest_and_a_sample():
    gradient = np.array([[1.0, -7.0, 2.0], [3.0, 0.0, 5.0]])
    for limit in None, 6, 7:
        assert gradcheck.choose_entries(gradient, limit) == range(6)
    for limit in range(1, 6):
        largest, *others = gradcheck.choose_entries(gradient, limit)
        assert gradient.flat[largest] == -7.0 and len(set(others)) == limit - 1


def test_gradients_take_each_row_alone_with_the_count_of_all():
    model, tokens, targets = gradcheck.make_tiny(TINY)
    model.flat_grads[...] = 7.0                                     # of an earlier step
    rows = gradcheck.gradients(model, tokens, targets)
    model.flat_grads[...] = 0.0
    model.forward(tokens, targets)
    model.backward()
    for name, gradient in model.grads.items():
        assert_allclose(rows[name], gradient, atol=1e-13)


def test_a_tensors_error_is_relative_to_its_largest_entry(monkeypatch):
    by_hand = {"a": np.array([1.0, -4.0, 2.0]), "b": np.zeros(2), "c": np.array([3.0, 1.0])}
    numeric = {"a": np.array([1.0, -4.0, 2.5]), "b": np.array([0.0, 1e-6]), "c": np.array([np.nan, 1.0])}
    model = SimpleNamespace(params=numeric, config=TINY,
                                  forward=lambda *batch, weights: np.array([2.0, 8.0, 16.0]))

    def slope(loss, weight, index, h):
        assert h == 0.125 and loss() == pytest.approx(2.0 + 0.7 * 12.0)    # the further heads' mean, weighted
        return weight[index]
    put(monkeypatch, gradcheck, gradients=lambda *problem: by_hand, slope=slope)
    a, b, c = gradcheck.check_entries(model, None, None, 0.125)
    assert a == ("a", (3,), 3, 0.125, (2,))
    assert b[:3] == ("b", (2,), 2) and b[3] > 1e290 and b[4] == (1,)
    assert c == ("c", (2,), 2, np.inf, (0,))


@parametrize("plain, error", [
    ([2.0, 1.25, 4.0], 0.2), ([2.0, 1.0, 3.2], 0.25), ([2.0, np.nan, 4.0], np.inf)])
def test_the_loss_error_is_that_of_the_worst_head(monkeypatch, plain, error):
    model = SimpleNamespace(params=None, config=None, forward=lambda *batch: np.array([2.0, 1.0, 4.0]))
    monkeypatch.setattr(gradcheck, "plain_losses", lambda *arguments: np.array(plain))
    assert gradcheck.loss_error(model, None, None) == pytest.approx(error)


# ------------------------------------------------------------------------------------------------------------
# What it prints
# ------------------------------------------------------------------------------------------------------------
def stubbed(monkeypatch, error, rows):
    """The check with this error of the losses and these rows; -> what check_entries was called with."""
    called = []
    put(monkeypatch, gradcheck, loss_error=lambda *problem: error,
        check_entries=lambda *arguments: called.append(arguments) or iter(rows))
    return called


def test_the_table_of_a_check(monkeypatch, out_text):
    rows = [("embed", (16, 8), 12, 2.5e-9, (3, 1)), ("norm", (8,), 4, 3e-8, (7,))]
    called = stubbed(monkeypatch, 2e-13, rows)
    problem = gradcheck.make_tiny(TINY)
    assert gradcheck.run_check(*problem, 0.5, 1e-8, 12) is False
    assert called == [(*problem, 0.5, 12, None)]
    assert out_text() == """\
tensor                    shape  checked  worst error   at
embed                    16 x 8       12      2.5e-09   [3, 1]
norm                          8        4      3.0e-08   [7]   <-- above the bar
losses against the loops: worst relative error 2.0e-13 (bar 1e-12)
overall: 16 of 4944 entries, worst relative error 3.0e-08 (bar 1e-08)
FAILED
"""


@parametrize("error, worst, good", [
    (1e-12, 1e-8, True), (1.01e-12, 1e-8, False), (1e-12, 1.01e-8, False)])
def test_the_bars_of_a_check_and_of_a_bug(monkeypatch, out_text, error, worst, good):
    rows = [(name, (8,), 4, worst if name == "norm" else 0.0, (7,)) for name in HEADS_FIRST]
    called = stubbed(monkeypatch, error, rows)
    assert gradcheck.run_check(*gradcheck.make_tiny(TINY), 2e-4, 1e-8) is good
    assert gradcheck.is_caught({}) is not good
    assert called[1][3:] == (2e-4, 16)
    assert ("    the losses: " in out_text()) == (error > 1e-12)


@pytest.fixture
def few_entries(monkeypatch):
    monkeypatch.setattr(gradcheck.is_caught, "__defaults__", (3,))


# A wrong derivative spoils what the backward reaches after it: how many tensors it reaches before.
STAY_RIGHT = dict(rope_sign=6, group_not_summed=6, backward_scale=6, softmax_delta=6, residual_dropped=5,
                  norm_projection=2, swiglu_slope=3, embedding_repeat=14, micro_divisor=0, masked_pulled=0,
                  head_weight=0, norm_eps=2)
ELSEWHERE = {"norm_gain": [name for name in HEADS_FIRST if "norm" not in name],
             "gradient_overwritten": [name for name in HEADS_FIRST if "norm" in name or name == "embed"],
             "row_weights": ["embed"]}


def test_every_planted_bug_is_caught_and_spoils_what_it_should(out_text, few_entries):
    before = dict(vars(model_cpu))
    assert gradcheck.main(["--break", "all"]) == 0
    assert vars(model_cpu) == before                                # all are gone afterwards
    out = out_text()
    assert max(map(len, out.splitlines())) < 80
    *bugs, last = re.split(r"^(?=\w)", out, flags=re.MULTILINE)[1:]
    assert last == "caught 22 of 22\n"
    for bug in bugs:
        name, _, said = " ".join(bug.split()).partition(": ")
        said, _, right = said.partition(" right: ")
        story, _, wrong = said.partition(" wrong, ")
        expected = ELSEWHERE.get(name, HEADS_FIRST[:STAY_RIGHT.get(name, 15)])
        assert right.split(", ") == (expected or ["none"])
        assert re.findall(r"([\w.]+)=\d", wrong) == [name for name in HEADS_FIRST if name not in expected]
        assert wrong.startswith(f"{15 - len(expected)} of 15 tensors: ") or wrong == ""
        # what finite differences cannot see, the loops must
        assert ("the losses: " in story) == (wrong == "" or name == "norm_eps")


def test_breaks_that_fail(out_text, monkeypatch, few_entries):
    monkeypatch.setitem(gradcheck.BUGS, "rope_sign", ("rope_backward: cos -> cos", "It changes nothing."))
    assert gradcheck.main(["--break", "rope_sign"]) == 1
    assert out_text() == "rope_sign: It changes nothing.\n    NOT CAUGHT\ncaught 0 of 1\n"
    assert not gradcheck.run_breaks(["norm_gain", "rope_sign"])
    assert out_text().endswith("    NOT CAUGHT\ncaught 1 of 2\n")
    with replaced(gradcheck.plant(gradcheck.BUGS["norm_gain"])):
        assert gradcheck.main(["--break", "all"]) == 1              # "caught" would mean nothing
    assert out_text().endswith("the check fails with no bug planted; run python gradcheck.py\n")


@parametrize("good", [True, False])
def test_runs_of_the_command_line(monkeypatch, capsys, good):
    called = []

    def run_check(model, tokens, targets, *rest, weights=None):
        called.append((model_cpu.param_count(model.config), tokens.shape[1], *rest, weights))
        return good or called[0] is not called[-1]                  # the first that fails is enough
    monkeypatch.setattr(gradcheck, "run_check", run_check)
    assert gradcheck.main([]) == (0 if good else 1)
    assert called == [(4944, 7, 2e-4, 1e-8, None), (2224, 7, 2e-4, 1e-8, gradcheck.WEIGHTS)]
    called.clear()
    assert gradcheck.main(["--small"]) == (0 if good else 1)
    assert called == [(1053824, 70, 1e-3, 1e-7, 4, None)]
    for arguments in (["--break", "nonsense"], ["--small", "--list"]):
        with pytest.raises(SystemExit) as error:
            gradcheck.main(arguments)
        assert error.value.code == 2
    for arguments in (["--peer"], ["--hint"], ["--exercise", "all", "--hint"]):
        with pytest.raises(ValueError, match=f"^{arguments[-1]} goes with --"):
            gradcheck.main(arguments)


def test_the_list_of_bugs(out_text):
    assert gradcheck.main(["--list"]) == 0
    lines = out_text().splitlines()
    assert [line.split()[0] for line in lines] == [*gradcheck.BUGS, *exercises.EXERCISE_BUGS]
    assert lines[1].startswith("group_not_summed     The query heads of a group write their gradient of ")
    assert [line.endswith("  (In the exercise alone.)") for line in lines] == 22 * [False] + 11 * [True]


# ------------------------------------------------------------------------------------------------------------
# Bugs of attention spoil the same tensors: each is the one that its story tells
# ------------------------------------------------------------------------------------------------------------
RNG = np.random.default_rng(5)


def attention_in_loops(qkv, dout, forward=2 ** -0.5, backward=2 ** -0.5, future=0, delta=1.0, last=False):
    """B 1, T 3, two query heads and one key/value head of D 2 -> (P, out, dqkv).  One number a mistake."""
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


@parametrize("name, numbers", [
    ("backward_scale", {"backward": 1.0}), ("softmax_delta", {"delta": 0.0}),
    ("no_scale", {"forward": 1.0, "backward": 1.0}), ("mask_off_by_one", {"future": 1}),
    ("group_not_summed", {"last": True})])
def test_bugs_of_attention(name, numbers):
    qkv, dout = RNG.standard_normal((1, 3, 8)), RNG.standard_normal((1, 3, 4))
    out, dqkv, P = np.zeros((1, 3, 4)), np.zeros((1, 3, 8)), np.zeros((1, 1, 2, 3, 3))
    config = SimpleNamespace(dim=4, head_dim=2, kv_heads=1)
    with replaced(gradcheck.plant(gradcheck.BUGS[name])):
        model_cpu.attention_forward(out, P, qkv, config)
        model_cpu.attention_backward(dqkv, dout, out, P, qkv, config, np.empty_like(P))
    for ours, plain in zip((P, out, dqkv), attention_in_loops(qkv, dout, **numbers)):
        assert_allclose(ours, plain, atol=1e-12)


# ------------------------------------------------------------------------------------------------------------
# The runs on a GPU, where there is none
# ------------------------------------------------------------------------------------------------------------
class Twin:
    """Stands for model_gpu.Model: model_cpu's results, each off by what `off` says of its name."""
    off, options, calls = {}, [], 0

    def __init__(self, config, **options):
        self.model = model_cpu.Model(config)
        self.flat_params = self.model.flat_params
        self.flat_grads = np.zeros(model_cpu.param_count(config))
        self.grads = model_cpu.param_views(self.flat_grads, config)
        Twin.options.append(options)

    def write(self, array, values):
        self.model.write(array, values)

    def read(self, array):
        return array.copy()

    def wrong(self, array, name):
        return array * (1 + self.off.get(name, self.off.get("all", 0.0)))

    def forward(self, tokens, targets):
        return self.wrong(self.model.forward(tokens, targets), "losses")

    def backward(self):
        self.model.flat_grads[...] = 0.0
        self.model.backward()
        assert not self.added
        assert model_gpu.RECORD_AT == 3 - Twin.calls % 2        # the second time its launches are recorded
        Twin.calls += 1
        for name, gradient in self.model.grads.items():
            self.grads[name] += self.wrong(gradient, name)
        if Twin.calls % 2 == 0:
            self.grads["norm"][0] *= 1 + self.off.get("second", 0.0)


WIDE = model_cpu.Config(dim=16, heads=2, kv_heads=1, layers=1, context=256, vocab=16, predict=2)
BARS = {"fp32": (2e-6, 1e-6), "tf32": (2e-3, 1e-4), "bf16": (2e-2, 1e-3)}


@pytest.fixture
def twin(monkeypatch):
    monkeypatch.setattr(model_gpu, "Model", Twin)
    put(monkeypatch, Twin, off={}, options=[], calls=0)
    return Twin


def test_gpu_gradients_are_printed_in_columns(twin, out_text):
    twin.off = {"norm": 1e-6}
    assert gpu_gradients.run_gpu_gradients(WIDE, ["fp32", "bf16"], None, False)
    assert twin.options == [{"precision": "fp32"}, {"precision": "bf16"}]
    first, *rows, end = out_text().split("\n")[:-1]
    assert first == ("initial weights, 1 layers of width 16, B 2 x T 256; relative L2 from float64; "
                     "bars fp32 2e-06, bf16 2e-02")
    names = [name for name, _ in model_cpu.param_table(WIDE)]
    names += ["whole gradient", "losses", "twice the same bits"]
    assert [row[2:22].strip() for row in rows] == names and end == ""
    assert rows[names.index("norm")][22:] == "    1.00e-06    1.00e-06"
    assert rows[-1][22:] == "        True        True"


@parametrize("precision", BARS)
@parametrize("name, bar, times, weights, verdict", rows("""
    all    | 0 | 0.95  | initial    | good
    all    | 0 | 1.05  | initial    | bad
    all    | 0 | 1.05  | wide (0.1) | good
    norm   | 0 | 1.95  | initial    | good
    norm   | 0 | 2.05  | initial    | bad
    losses | 1 | 0.95  | initial    | good
    losses | 1 | 1.05  | initial    | bad
    losses | 1 | -1.05 | initial    | bad
    losses | 1 | 1.05  | wide (0.1) | good
    second | 1 | 1.0   | wide (0.1) | bad"""))
def test_gpu_gradients_have_their_bars(twin, out_text, precision, name, bar, times, weights, verdict):
    twin.off = {"losses": 0.0, name: float(times) * BARS[precision][int(bar)]}
    std = None if weights == "initial" else 0.1
    assert bool(gpu_gradients.run_gpu_gradients(WIDE, [precision], std, False)) == (verdict == "good")
    assert out_text().startswith(f"{weights} weights")


@parametrize("std, ours, good", [(0.1, 1.45, True), (0.1, 1.55, False), (None, 1.55, True)])
def test_gpu_gradients_beside_those_of_pytorch(twin, out_text, monkeypatch, std, ours, good):
    """PyTorch's is off by 1/1024 here."""
    def gradient(reference, tokens, targets, precision):
        assert precision == "bf16" and tokens.shape == (2, 256) and targets.shape == (2, 257)
        return (1 + 1 / 1024) * reference.flat_grads
    monkeypatch.setitem(sys.modules, "torch_twin", SimpleNamespace(gradient=gradient))
    twin.off = {"all": ours / 1024, "losses": 0.0}
    assert bool(gpu_gradients.run_gpu_gradients(WIDE, ["bf16"], std, True)) == good
    assert f"{1 / 1024:.2e}\n  {'ours / PyTorch' + chr(39) + 's':20}{ours:12.2e}\n" in out_text()


@parametrize("best, precisions", [("bf16", ("fp32", "tf32", "bf16")), ("fp32", ("fp32",))])
def test_a_gpu_is_checked_in_all_that_it_can(monkeypatch, out_text, best, precisions):
    monkeypatch.setattr(model_gpu, "why_no_gpu", lambda: None)
    monkeypatch.setattr(model_gpu, "default_precision", lambda: best)
    monkeypatch.setattr(sys, "path", list(sys.path))
    called = []
    monkeypatch.setattr(gpu_gradients, "run_gpu_gradients",
                        lambda *arguments: called.append(arguments) or len(called) != bad)
    for bad in None, 1, 2:
        called.clear()
        assert gradcheck.main(["--gpu", "--peer"] if bad else ["--gpu"]) == (1 if bad else 0)
        assert os.path.exists(f"{sys.path[1]}/torch_twin.py")
        assert [rest for _, *rest in called] == [[precisions, None, bool(bad)], [precisions, 0.06, bool(bad)]]
        assert called[0][0] == called[1][0] == dataclasses.replace(model_cpu.CONFIGS["big"], layers=4)
        verdict = "NOT all within the bars\n" if bad else "all within the bars\n"
        assert out_text().startswith(verdict)
    monkeypatch.setattr(model_gpu, "why_no_gpu", lambda: "There is none.")
    with value_error("There is none."):
        gradcheck.main(["--gpu"])


# ------------------------------------------------------------------------------------------------------------
# tests/test_on_gpu.py, where there is no GPU
# ------------------------------------------------------------------------------------------------------------
@parametrize("reason", [None, "There is none."])
def test_where_the_tests_on_a_gpu_run(monkeypatch, reason):
    put(monkeypatch, model_gpu, why_no_gpu=lambda: reason, default_precision=lambda: "bf16")
    assert runpy.run_path(test_on_gpu.__file__)["pytestmark"][0].args == (bool(reason),)


@parametrize("error", [1.01e-6, np.nan])
def test_what_is_above_its_bar_fails(error):
    test_on_gpu.within(0.99e-6, 1e-6, "an error")
    with pytest.raises(AssertionError):
        test_on_gpu.within(error, 1e-6, "an error")


def test_the_tests_on_a_gpu_pass_with_its_kernels_on_the_cpu(monkeypatch):
    """On a small model, without cuBLAS."""
    fake, made = test_model_gpu.fake_cupy()
    own = model_gpu.Gpu
    put(monkeypatch, model_gpu, cupy=fake, Gpu=lambda config, precision, matmul: own(config, precision, "ours"))
    monkeypatch.setattr(test_model_gpu.Array, "get", np.ndarray.copy, raising=False)
    config = model_cpu.Config(dim=64, heads=2, kv_heads=1, layers=1, context=256, vocab=16, predict=2)
    monkeypatch.setattr(test_on_gpu, "GPU_CONFIG", config)
    test_on_gpu.test_widest_norm("fp32")
    test_on_gpu.test_our_products()
    test_on_gpu.test_cached_logits([100, 4, 4, 148])
    test_on_gpu.test_muon("fp32")
    test_on_gpu.test_rows_read_together("bf16")
    test_on_gpu.test_weights_of_rows_and_log_probs("fp32")
    test_on_gpu.test_many_answers_at_once("bf16", 3, 2)
    monkeypatch.setattr(test_on_gpu, "LENGTHS", (1, 6))
    test_on_gpu.test_attention("bf16", 32, 2)
    # no less than bf16's rounding, as where something is compared with itself
    assert min(test_on_gpu.attention_errors(own(config, "bf16", "ours"), 2, 17)) > 1e-3
    cuda_helpers.check_guards(*made)


class RowByRow(model_cpu.Decoder):
    """NumPy's bits depend on how many rows are read at once, a GPU's may not: here each row is read alone."""
    replays = {}
    wrong = None                # the number of heads with which it draws another id

    def extend(self, tokens, last=None):
        rows = [super(RowByRow, self).extend([token]) for token in tokens]
        return np.concatenate(rows)[-(last or len(tokens)):]

    def draw(self, tokens, rows, heads, *rest):
        ids, p = super().draw(tokens, rows, heads, *rest)
        return (ids + (heads == self.wrong)) % 16, p


def test_generation_is_compared_to_the_bit(monkeypatch):
    def engine(config, **options):
        model = model_cpu.Model(config)
        model.decoder = RowByRow(model)
        return model
    monkeypatch.setattr(model_gpu, "Model", engine)
    monkeypatch.setattr(test_on_gpu, "GPU_CONFIG", dataclasses.replace(WIDE, context=24))
    test_on_gpu.test_generation("fp32", {"top_p": 0.9})
    monkeypatch.setattr(RowByRow, "wrong", 2)
    with pytest.raises(AssertionError, match="1 drafts"):
        test_on_gpu.test_generation("fp32", {"top_p": 0.9})
