"""gradcheck.py: the check passes as it stands, sees every planted bug, and says so by its exit code."""
import numpy as np
import pytest

import gradcheck
import model_cpu


@pytest.fixture
def small_blocks():
    with gradcheck.replaced({"BLOCK": 3}):
        yield


def test_tiny_problem_has_every_feature():
    model, tokens, targets = gradcheck.make_tiny()
    c, T = model.config, tokens.shape[1]
    assert 1 < c.kv_heads < c.heads and c.predict > 2 and c.layers >= 2
    assert c.head_dim // 2 > 1                                      # several RoPE frequencies
    assert T & (T - 1)                                              # not a power of two
    assert len(set(tokens[0])) < T                                  # a token repeats
    counted = model_cpu.count_targets(targets, T, c.predict)
    assert counted[0] > counted[1] > counted[2] > 0
    assert model_cpu.count_targets(targets[1:], T, c.predict)[2] == 0
    assert all(np.any(gain != 1.0) for gain in model.params.values() if gain.ndim == 1)


def test_check_passes_on_sampled_entries(small_blocks):
    rows = list(gradcheck.check_tensors(*gradcheck.make_tiny(), gradcheck.TINY_STEP, limit=12))
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


def test_attention_twins_are_right_as_the_knobs_stand(small_blocks, capsys):
    assert not gradcheck.is_caught(gradcheck.attention_twins(), limit=8)
    assert capsys.readouterr().out == ""


FORWARD_ONLY = {"rope_on_v", "rope_layout", "no_scale", "mask_off_by_one", "gate_up_swapped", "target_shift",
                "masked_counted"}


@pytest.mark.parametrize("name", gradcheck.BUGS)
def test_every_planted_bug_is_caught(name, small_blocks, capsys):
    before = dict(vars(model_cpu))
    assert gradcheck.is_caught(gradcheck.BUGS[name](), limit=12)
    assert vars(model_cpu) == before                                # and is gone afterwards
    lines = capsys.readouterr().out
    # what finite differences cannot see, the loops must, and the other way round
    assert ("the losses:" in lines) == (name in FORWARD_ONLY | {"norm_eps"})
    assert ("tensors of" in lines) == (name not in FORWARD_ONLY)
    if name == "embedding_repeat":
        assert "    1 tensors of 15: embed" in lines


def test_there_are_ten_bugs_and_each_tells_its_story_in_one_line():
    assert len(gradcheck.BUGS) >= 10
    assert all(bug.__doc__.endswith(".") and "\n" not in bug.__doc__ for bug in gradcheck.BUGS.values())


def test_a_gradient_that_is_zero_or_not_a_number_fails(small_blocks, capsys):
    problem = gradcheck.make_tiny()
    for value in (0.0, np.nan):
        def linear_backward(dx, dw, dout, x, w):
            np.matmul(dout, w, out=dx)
            dw[...] = value
        with gradcheck.replaced({"linear_backward": linear_backward}):
            assert not gradcheck.run_check(*problem, gradcheck.TINY_STEP, gradcheck.TINY_BAR, limit=2)
    assert gradcheck.run_check(*problem, gradcheck.TINY_STEP, gradcheck.TINY_BAR, limit=2)


def test_exit_codes(capsys, monkeypatch):
    for arguments in (["--break", "nonsense"], ["--small", "--list"], ["--unknown"]):
        with pytest.raises(SystemExit) as error:
            gradcheck.main(arguments)
        assert error.value.code == 2
    assert gradcheck.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in gradcheck.BUGS)
    assert gradcheck.main(["--break", "rope_sign"]) == 0
    assert "caught 1 of 1" in capsys.readouterr().out
    monkeypatch.setitem(gradcheck.BUGS, "rope_sign", gradcheck.attention_twins)     # a "bug" that changes nothing
    monkeypatch.setattr(gradcheck.attention_twins, "__doc__", "None.")
    assert gradcheck.main(["--break", "rope_sign"]) == 1
    assert "NOT CAUGHT" in capsys.readouterr().out


def test_main_fails_with_one_where_the_model_is_wrong(capsys):
    with gradcheck.replaced(gradcheck.rope_sign()):
        assert gradcheck.main(["--break", "all"]) == 1              # "caught" would mean nothing
    assert "no bug planted" in capsys.readouterr().out
