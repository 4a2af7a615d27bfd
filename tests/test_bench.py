"""tests/bench.py where there is no GPU: the solvers of the Euler table, the curves, and what is missing."""
import re
import sys
from functools import partial

import bench
import numpy as np
import pytest
from cases import put
from pytest import approx

import model_cpu

CONFIG = model_cpu.Config(dim=16, heads=2, kv_heads=1, layers=2, context=16, vocab=32, predict=2)


def test_solvers_of_dx_dt_equal_to_minus_x():
    found = [solve(1.0) for solve in bench.solvers(lambda x, h: x - h * x).values()]
    assert found == approx([0, 0.5 ** 2, 0.75 ** 4, 1 / 2, -0.1, 0.1])


def test_a_layer_as_trained_is_one_step(out_text, monkeypatch):
    """What is read after the last layer, and after one step a layer, is the model's loss."""
    model = model_cpu.Model(CONFIG)
    windows = np.random.default_rng(0).integers(0, 32, (5, 17))
    monkeypatch.setattr(bench.checkpoint, "load", lambda *_: (model, None))
    monkeypatch.setattr(bench, "held_out_windows", lambda *_: windows)
    bench.bench_euler()
    losses = re.findall(r" (\d\.\d{4})", out_text())
    targets = np.pad(windows[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    assert losses[2:4] == 2 * [f"{model.forward(windows[:, :-1], targets)[0]:.4f}"]


def test_curves(out_text, monkeypatch, tmp_path):
    """On the CPU.  A text that repeats is learned, and a run as long as the first one ends where that does."""
    def trainer(name, config, seed, batch):
        model = model_cpu.Model(config, seed, optimizer=name)
        return partial(bench.train_step, model), model.forward
    put(monkeypatch, bench, trainer=trainer, gpu_name=lambda: "none", wait_for_gpu=lambda: None)
    monkeypatch.setitem(model_cpu.CONFIGS, "small", CONFIG)
    path = tmp_path / "ids"
    np.tile(np.arange(32, dtype="<u2"), 40).tofile(path)
    bench.bench_curves(path, [str(path)], "small", ["adamw", "muon:5", "adamw"], 40, 0.02, 4)
    said = out_text()
    losses = [float(loss) for loss in re.findall(r"\[(.*)\]", said)]
    assert losses[0] > 2 and losses[-1] < 0.5 and "muon:5 reaches" not in said
    assert said.count("adamw reaches adamw's losses with 1.00 of the tokens") == 2


def test_what_is_missing_is_said(err_text, monkeypatch):
    put(monkeypatch, sys, argv=["bench.py", "train"])
    monkeypatch.setattr(bench.model_gpu, "why_no_gpu", lambda: "There is none.")
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert err_text() == "train: not measured: There is none.\n"
