"""gradcheck.py: the check passes as it stands, sees every planted bug, and says so by its exit code."""
import copy
import dataclasses
import re
import unittest.mock

import numpy as np
from cases import parametrize, put, value_error

import gradcheck
import model_cpu
import model_gpu
from gradcheck import TIED, TINY


def planted(bug):
    """Inside `with planted(...)`, model_cpu has this bug."""
    functions = gradcheck.altered_functions(gradcheck.BUGS[bug], vars(model_cpu))
    return unittest.mock.patch.dict(vars(model_cpu), functions)


# ------------------------------------------------------------------------------------------------------------
# What is checked, and by what
# ------------------------------------------------------------------------------------------------------------
@parametrize("change", [
    dict(), dict(heads=2, kv_heads=2, predict=1), dict(kv_heads=1, hidden=48),
    dict(norm_eps=0.5, rope_theta=3.0), dict(predict=1, tied=True)])
def test_losses_and_slopes_agree(change):
    model, *batch = gradcheck.make_problem(dataclasses.replace(TINY, **change), 7, 0.3)
    assert gradcheck.forward_error(model, *batch) < 1e-13
    rows = list(gradcheck.check_entries(model, *batch, every=60))
    assert [name for name, *_ in rows] == [name for name, _ in model_cpu.param_table(model.config)]
    assert np.max([error for _, _, _, error, _ in rows]) < 1e-9           # max() would skip a NaN


# ------------------------------------------------------------------------------------------------------------
# The verdict
# ------------------------------------------------------------------------------------------------------------
MINI = model_cpu.Config(dim=8, heads=1, kv_heads=1, layers=1, hidden=8, context=8, vocab=8, predict=1)


@parametrize("wrong, good", [(0.7, True), (1.5, False), (-1.5, False), (np.nan, False)])
def test_an_entry_that_is_off_by_the_bar_fails(wrong, good, out_text):
    """Any entry, by so much of the largest one of its tensor."""
    def gradients(*problem, right=gradcheck.gradients):
        by_hand = right(*problem)
        entry = by_hand["embed"].reshape(-1)
        largest = np.abs(entry).argmax()
        entry[5] += 1e-8 * wrong * abs(entry[largest])
        return by_hand
    with unittest.mock.patch.object(gradcheck, "gradients", gradients):
        assert gradcheck.run_check(*gradcheck.make_problem(MINI, 7, 0.3)) == good
    assert len(re.findall("embed .*above the bar\n", out_text())) == (not good)


def test_a_loss_that_the_loops_do_not_have_fails():
    with planted("no_scale"):
        assert not gradcheck.run_check(*gradcheck.make_problem(MINI, 7, 0.3))


@parametrize("verdicts, code", [([True, True], 0), ([True, False], 1), ([False, True], 1)])
def test_the_exit_code(monkeypatch, verdicts, code):
    """Of two models: TINY, and TIED with weights of its rows."""
    check = unittest.mock.Mock(side_effect=verdicts)
    monkeypatch.setattr(gradcheck, "run_check", check)
    assert gradcheck.main([]) == code
    problems = [(call.args[0].config, *call.args[3:]) for call in check.mock_calls]
    assert problems == [(TINY,), (TIED, gradcheck.ROW_WEIGHTS)]


# ------------------------------------------------------------------------------------------------------------
# The planted bugs
# ------------------------------------------------------------------------------------------------------------
# A wrong derivative spoils what the backward reaches after it: how many tensors it reaches before.  All 15: the slopes
# are right, and the losses are not those of the loops.
STAY_RIGHT = dict(rope_sign=6, group_not_summed=6, backward_scale=6, softmax_delta=6, residual_dropped=5,
                  norm_projection=2, swiglu_slope=3, embedding_repeat=14, micro_divisor=0, masked_pulled=0,
                  head_weight=0, row_weights=0, norm_eps=2)
ELSEWHERE = {"norm_gain": [name for name in gradcheck.BACKWARD if "norm" not in name],
             "gradient_overwritten": [name for name in gradcheck.BACKWARD if "norm" in name or name == "embed"]}


def test_every_planted_bug_is_caught_and_spoils_what_it_should(out_text, monkeypatch):
    monkeypatch.setattr(gradcheck.report_damage, "__defaults__", (97,))       # fewer entries: faster
    before = dict(vars(model_cpu))
    assert gradcheck.main(["--break", "all"]) == 0
    assert vars(model_cpu) == before                                # all are gone afterwards
    *bugs, last = re.split(r"^(?=\w)", out_text(), flags=re.MULTILINE)[1:]
    assert last == f"caught {len(bugs)} of {len(gradcheck.BUGS)}\n" and len(bugs) == 22
    for bug in bugs:
        name, _, story = " ".join(bug.split()).partition(": ")
        story, _, right = story.partition(" right: ")
        expected = ELSEWHERE.get(name, gradcheck.BACKWARD[:STAY_RIGHT.get(name, 15)])
        assert right.split(", ") == (expected or ["none"])
        assert re.findall(r"([\w.]+)=\d", story) == [name for name in gradcheck.BACKWARD if name not in expected]
        assert ("the forward: " in story) == (len(expected) == 15 or name == "norm_eps")


def test_breaks_that_fail(out_text, monkeypatch):
    monkeypatch.setitem(gradcheck.BUGS, "rope_sign", ("rope_backward: cos -> cos", "It changes nothing."))
    assert gradcheck.main(["--break", "rope_sign"]) == 1
    assert out_text().endswith("    NOT CAUGHT\ncaught 0 of 1\n")
    with planted("norm_gain"):
        assert gradcheck.main(["--break", "rope_sign"]) == 1        # "caught" would mean nothing
    assert out_text().endswith("the check fails with no bug planted; run python gradcheck.py\n")


# ------------------------------------------------------------------------------------------------------------
# The GPU's comparison, where there is none
# ------------------------------------------------------------------------------------------------------------
class Twin(model_cpu.Model):
    """Stands for model_gpu.Model."""
    def __init__(self, config, precision):
        super().__init__(config)
        self.precision = precision


@parametrize("name, bar, times", [
    ("whole gradient", 0, 1), ("norm", 0, 2), ("logits", 0, 1), ("losses", 1, 1), ("losses", 1, -1)])
def test_the_bars_of_a_gpu(monkeypatch, out_text, name, bar, times):
    """An array of a step is off by nearly so much, or by a little more, in one precision."""
    def whole_step(model, *batch, right=gradcheck.whole_step):
        step = copy.deepcopy(right(model, *batch))
        step[name] *= 1 + off.get(vars(model).get("precision"), 0)
        step["whole gradient"][0] += off.get(model_gpu.RECORD_AT, 0)
        return step
    put(monkeypatch, model_gpu, Model=Twin, why_no_gpu=lambda: None, default_precision=lambda: "bf16")
    narrow = model_cpu.Config(dim=16, heads=2, kv_heads=1, layers=1, context=256, vocab=16, predict=2)
    put(monkeypatch, gradcheck, whole_step=whole_step, GPU_CONFIG=narrow)
    for precision, bars in gradcheck.GPU_BARS.items():
        for share, code in (0.95, 0), (1.05, 1):
            off = {precision: share * times * bars[bar]}
            assert gradcheck.main(["--gpu"]) == code
            assert out_text().endswith("all within the bars\n" if code == 0 else "FAILED\n")
    off = {2: 1e-9}                                 # recorded as a CUDA graph, it runs once more
    assert gradcheck.main(["--gpu"]) == 1
    monkeypatch.setattr(model_gpu, "why_no_gpu", lambda: "There is none.")
    with value_error("There is none."):
        gradcheck.main(["--gpu"])
