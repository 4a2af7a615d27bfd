"""tests/bench.py where there is no GPU: the solvers of the Euler table, a curve; and docs/plot.py."""
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import bench
import numpy as np
import pytest
from pytest import approx

import checkpoint
import model_cpu
from tokenizer import Tokenizer

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


def test_a_curve(monkeypatch):
    """A text that repeats is learned, and what is held out is measured."""
    monkeypatch.setattr(bench, "wait_for_gpu", lambda: None)
    model = model_cpu.Model(CONFIG)
    ids = np.tile(np.arange(32), 40)
    points = bench.curve(partial(bench.train_step, model), model.forward, ids, [ids], CONFIG, 40, 0.02, 4, 0)
    assert points[-1][0] == 40 * 4 * 16 and points[0][2] > 2 and points[-1][2] < 0.5


def test_pictures(tmp_path):
    """docs/plot.py, where there is matplotlib."""
    pytest.importorskip("matplotlib")
    checkpoint.save(str(tmp_path), model_cpu.Model(replace(CONFIG, vocab=264)), Tokenizer.train(["a cat"], 264), {})
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.5}\n')

    def plot(arguments):
        command = [sys.executable, f"{bench.ROOT}/docs/plot.py", *arguments.split()]
        return subprocess.run(command, cwd=tmp_path, capture_output=True).stderr
    for picture in "losses .", "lens . cat", "attention . cat":
        plot(picture)
        assert (tmp_path / f"{picture.split()[0]}.png").exists()
    assert plot("heads .").startswith(b"error: name a picture")
