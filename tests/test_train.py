"""train.py: batches as a pure function, the loop, the held-out part, exact resume after every kind of death, bad input."""
import contextlib
import dataclasses
import io
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import attack
import numpy as np
from numpy.random import default_rng
import pytest
from cases import parametrize, put, rows, value_error, write
from runs import assert_refused, read_log, run, settings, shell_words, steps_of, training_of

import checkpoint
import model_cpu
import train
from tokenizer import SEPARATOR, Tokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TINY = ("--data tiny.txt --dim 16 --heads 2 --kv-heads 1 --layers 1 --context 16 --vocab 272 --batch-tokens 64 --threads 1 --steps 12 "
        "--eval-every 5 --save-every 100").split()
CONFIG = model_cpu.Config(dim=16, heads=2, kv_heads=1, layers=1, context=8, vocab=264, predict=2)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tiny.txt", "the cat sat on the mat and the dog lay on the rug. " * 40)
    return tmp_path


@pytest.fixture
def tiny(folder, monkeypatch):
    """-> function (options, stop at this step) -> what train.py printed: tiny runs in this process."""
    monkeypatch.setattr(checkpoint, "lock_folder", lambda out: None)        # a lock lasts as long as its process
    monkeypatch.setattr(train, "PROMPTS", ("The",))

    def go(*options, stop_at=None):
        micro_batches, stop = train.micro_batches, SimpleNamespace(signal=None)

        def stopping(training, *batch):
            stop.signal = signal.SIGTERM if training.model.step + 1 == stop_at else None
            return micro_batches(training, *batch)
        with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
            put(patch, train, micro_batches=stopping, Stop=lambda: stop)
            assert (train.main(shell_words(options)) or 0) == (128 + signal.SIGTERM if stop_at else 0)
        return out.getvalue()
    return go


# -- batches -----------------------------------------------------------------------------------------------------------
@parametrize("size, T, K", [(1000, 16, 4), (51, 16, 4), (20, 16, 4), (531, 32, 1)])
def test_every_window_once_an_epoch(size, T, K):
    count = train.window_count(size, T, K)
    starts = train.window_starts(7, 0, 3 * count, size, T, K)
    assert len(starts) == 3 * count and size < T - 1 + (count + 1) * T + K      # no more fit at every shift
    for epoch in range(3):
        part = sorted(starts[epoch * count:(epoch + 1) * count])
        assert 0 <= part[0] < T and part[-1] + T + K <= size
        assert all(b - a == T for a, b in zip(part, part[1:]))


def test_batches_depend_on_seed_and_step_alone():
    def steps(seed, order):
        return {step: train.window_starts(seed, 5 * step, 5, 3000, 16, 4) for step in order}
    forward = steps(3, range(80))
    train.epoch_order.cache_clear()
    assert forward == steps(3, reversed(range(80))) != steps(4, range(80))
    flat = [start for step in range(80) for start in forward[step]]
    assert flat == train.window_starts(3, 0, 400, 3000, 16, 4)          # laid end to end, whatever the batch size


def test_targets_are_the_next_tokens():
    inputs, targets = train.get_batch(np.arange(100, dtype="<u2"), [0, 17, 80], 16, 4)
    assert inputs.shape == (3, 16) and targets.shape == (3, 19) and inputs.dtype == targets.dtype == np.int64
    for k in range(4):
        assert (targets[:, k:k + 16] == inputs + 1 + k).all()


def test_an_epoch_is_shuffled_and_no_two_are_alike():
    size, T, K = 3000, 16, 4
    starts = np.reshape(train.window_starts(5, 0, 8 * train.window_count(size, T, K), size, T, K), (8, -1))
    orders = [*map(tuple, (starts // T).tolist())]
    assert len(set(orders)) == 8 and not any(list(order) in (sorted(order), sorted(order)[::-1]) for order in orders)
    # the grid is shifted in each, to anywhere that all windows still fit: 0, and T-1 or what room there is
    for size, most in (3000, T - 1), (T + K + 3, 3):
        shifts = {int(train.epoch_order(seed, 0, size, T, K).min()) for seed in range(400)}
        assert shifts == set(range(most + 1))


def test_a_job_takes_the_batch_of_its_step():
    tokens = default_rng(0).integers(0, 256, 5000).astype("<u2")
    tokenizer = Tokenizer.train(["some text"], 264)
    s = settings("--seed 7", config=CONFIG, batch_tokens=5 * 8)
    job = train.pretraining(training_of(SimpleNamespace(config=CONFIG), tokenizer, s), tokens, {})
    for step in 0, 1, 200:
        expected = train.get_batch(tokens, train.window_starts(7, 5 * step, 5, 5000, 8, 2), 8, 2)
        *batch, counted, weights = job.batch(step)
        assert all(map(np.array_equal, batch, expected)) and counted.tolist() == [40, 40] and weights is None
    assert job.note(1, math.log(2)) == "1.000 bits/byte"


def test_a_batch_that_grows():
    """An eighth, a quarter, a half and all of it, each window of the epochs once, laid end to end."""
    tokens = default_rng(0).integers(0, 256, 50000).astype("<u2")
    tokenizer = Tokenizer.train(["some text"], 264)
    for windows, sizes in (16, [2, 4, 8, 16]), (4, [1, 1, 2, 4]), (9, [1, 2, 4, 9]):
        s = settings("--steps 21", config=CONFIG, batch_tokens=windows * 8)
        s.growth = 0.24
        job = train.pretraining(training_of(SimpleNamespace(config=CONFIG), tokenizer, s), tokens, {})
        batches = [job.batch(step)[0] for step in range(21)]
        wanted = np.repeat(sizes, [5, 5, 5, 6])
        assert [len(batch) for batch in batches] == wanted.tolist()
        starts = train.window_starts(s.seed, 0, sum(wanted), 50000, 8, 2)
        assert np.array_equal(np.concatenate(batches), train.get_batch(tokens, starts, 8, 2)[0])
        assert np.array_equal(job.batch(7)[0], batches[7])
        # more steps: it goes on with the whole batch, where it had come
        train.add_steps(s, 50, "out")
        assert [len(job.batch(step)[0]) for step in (0, 5, 20, 21, 49)] == [sizes[0], sizes[1]] + 3 * sizes[-1:]
        assert np.array_equal(job.batch(20)[0], batches[20])


def test_schedule():
    s = settings("--steps 100 --lr 1 --warmup 10")
    rates = [train.learning_rate(step, s) for step in (0, 4, 9, 10, 32, 99)]
    # the cosine from step 10 to step 99, not a line
    assert rates == pytest.approx([0.1, 0.5, 1, 1, 0.1 + 0.45 * (1 + math.cos(math.pi * 22 / 89)), 0.1])
    for s.warmup, s.steps in (0, 100), (0, 1), (1, 1):
        assert train.learning_rate(0, s) == 1.0


# -- the loop ----------------------------------------------------------------------------------------------------------
class Recorder:
    """In a model's place: notes what it is called with."""
    config = CONFIG

    def __init__(self, norms=(), step=0):
        self.step, self.calls, self.norms, self.grads, self.params = step, [], list(norms), {}, {}
        self.flat_params, self.flat_grads = np.ones(3), np.ones(3)

    def forward(self, tokens, targets, counted, weights, weigh):
        self.calls.append(("forward", tokens.tolist(), targets.tolist(), counted.tolist(), weights and weights.tolist()))
        return np.array([len(tokens) / 4, 10.0])

    def backward(self, last):
        self.calls.append(("backward", last))

    def update(self, lr, decay, clip, momentum):
        self.step += 1
        self.calls.append(("update", lr, decay, clip, momentum))
        return self.norms.pop(0) if self.norms else 0.5

    later, read = model_cpu.Model.later, model_cpu.Model.read


def settings_of(options, device="cpu"):
    return dataclasses.replace(settings(options, config=CONFIG, batch_tokens=32), device=device)


@parametrize("micro_batch, cuts", [(1, [0, 2, 4, 6, 7]), (3, [0, 6, 7]), (4, [0, 7])])
def test_a_step_is_cut_into_micro_batches_and_loses_no_row(tmp_path, monkeypatch, micro_batch, cuts):
    """Seven rows, half as long as the context: twice as many go into a micro-batch."""
    rng, model = default_rng(0), Recorder()
    inputs, targets = rng.integers(0, 8, (7, 4)), rng.integers(-1, 8, (7, 5))
    s = settings_of(f"--micro-batch {micro_batch} --decay 0.3 --clip 2.5 --steps 1")
    monkeypatch.setattr(train, "learning_rate", lambda step, settings: 0.125)
    monkeypatch.setattr(train, "save_run", lambda training: None)
    counted = train.count_targets(targets, 4, 2)                                # of the whole step
    job = train.Job(lambda step: (inputs, targets, counted, None), lambda step: {}, lambda step, loss: "")
    assert train.train(training_of(model, None, s, tmp_path), job, SimpleNamespace(signal=None)) == 0
    expected = []
    for a, b in zip(cuts, cuts[1:]):
        expected += [("forward", inputs[a:b].tolist(), targets[a:b].tolist(), counted.tolist(), None), ("backward", b == 7)]
    assert model.calls == [*expected, ("update", 0.125, 0.3, 2.5, 0.95)]
    record = read_log(tmp_path)[0]
    assert record["grad_norm"] == 0.5 and record["losses"] == [7 / 4, 10.0 * (len(cuts) - 1)] and record["tokens"] == 28


@pytest.fixture
def loop(tmp_path, monkeypatch):
    """-> function: train.train with a Recorder -> (exit code, steps asked of job.batch, steps saved)."""
    def go(model, s, evaluate=lambda step: {}, stop=None, ask=lambda step: None):
        asked, saved = [], []

        def batch(step):
            ask(step)
            asked.append(step)
            return np.full((4, 8), step), np.zeros((4, 9), int), np.full(2, 32), None
        monkeypatch.setattr(train, "save_run", lambda training: saved.append(training.model.step))
        training = training_of(model, None, s, tmp_path, tokens=96 * model.step, seconds=50.0 * (model.step > 0))
        code = train.train(training, train.Job(batch, evaluate, lambda step, loss: f"note {step} {loss}"), stop or SimpleNamespace(signal=None))
        return code, asked, saved
    return go


def test_a_run_asks_for_each_batch_and_rate_and_saves_and_evaluates_in_time(tmp_path, loop, out_text):
    model, evaluated = Recorder(), []
    s = settings_of("--steps 70 --warmup 7 --lr 0.5 --eval-every 30 --save-every 25")
    assert loop(model, s, lambda step: evaluated.append(step) or {"x": step}) == (0, [*range(70)], [25, 50, 70])
    assert evaluated == [16, 30, 60, 70]            # at first at powers of two, at last in any case
    rates = [call[1] for call in model.calls if call[0] == "update"]
    assert rates == [train.learning_rate(step, s) for step in range(70)]
    log = read_log(tmp_path)
    assert steps_of(log) == [
        {"step": i, "loss": 1.0, "losses": [1.0, 10.0], "lr": rates[i - 1], "grad_norm": 0.5, "tokens": 32 * i} for i in range(1, 71)]
    assert [record for record in log if "x" in record] == [{"step": step, "x": step} for step in evaluated]
    printed = out_text()
    # the first step, every tenth, and those before an evaluation or a save
    assert [*map(int, re.findall("^step +([0-9]+)/70", printed, re.MULTILINE))] == [1, 10, 16, 20, 25, 30, 40, 50, 60, 70]
    assert re.search(rf"^step    10/70  loss  1\.0000  note 10 1.0  [0-9:]+ left +[0-9,]+ tokens/s"
                     rf"  norm   0\.50  lr {rates[9]:.2e}$", printed, re.MULTILINE)
    assert "Trained" in printed and "70 steps, 2,240 tokens" in printed


def test_a_run_goes_on_where_it_was(tmp_path, loop):
    write(tmp_path / "log.jsonl", "".join(f'{{"step": {i}, "loss": 1}}\n' for i in range(1, 9)))
    assert loop(Recorder(step=5), settings_of("--steps 8 --save-every 4")) == (0, [5, 6, 7], [8])
    log = steps_of(read_log(tmp_path))
    assert [(record["step"], record.get("tokens")) for record in log] == [(i, None) for i in range(1, 6)] + [(6, 512), (7, 544), (8, 576)]


@parametrize("device", ["cpu", "gpu"])
@parametrize("norms, step, save_every", [([np.nan], 1, 1), ([1, 1, np.inf], 3, 1), ([1, 1, np.inf, 1], 3, 9), ([1, 1, np.inf], 3, 3)])
def test_a_number_that_is_not_finite_ends_the_run(loop, err_text, norms, step, save_every, device):
    """Nothing is saved any more.  The bad step is computed again, to name the tensor: on a GPU the next one has been launched
    by then, and has overwritten its gradient."""
    class Overwriting(Recorder):
        def backward(self, last):
            self.grads = {"a": np.ones(3), "b": np.array([1, np.nan if self.calls[-1][1][0][0] == step - 1 else 1])}
    code, asked, saved = loop(Overwriting(norms), settings_of(f"--steps 9 --save-every {save_every}", device))
    assert asked[:step] == [*range(step)] and asked[-1] == step - 1 and len(asked) <= step + 1 + (device == "gpu")
    said = err_text()
    assert code == 1 and saved == [*range(save_every, step, save_every)]
    assert f"step {step} is not finite (loss 1.0, gradient norm {norms[step - 1]}): the first gradient that is not finite is b. " in said


def test_where_every_gradient_is_finite():
    training = training_of(Recorder(), None, settings_of(""))
    batch = np.zeros((4, 8), int), np.zeros((4, 9), int), np.full(2, 32), None
    assert train.first_bad_tensor(training, batch).startswith("every gradient is finite; ")
    assert not training.model.flat_grads.any()


@parametrize("stops", [False, True])
def test_weights_that_are_not_finite_are_not_saved(loop, err_text, stops):
    """The loss and the norm are of before the update that broke them; seen at each save, also at that of a signal."""
    stop, model = SimpleNamespace(signal=None), Recorder()
    model.params = {"a": model.flat_params[:1], "b": model.flat_params[1:]}

    def breaking(step):
        model.params["b"][...] = np.inf if step == 3 else 1
        stop.signal = 15 if stops and step == 3 else None
    s = settings_of(f"--save-every {9 if stops else 2} --steps 9")
    assert loop(model, s, ask=breaking, stop=stop) == (1, [0, 1, 2, 3, 3], [] if stops else [2])
    assert "step 4 is not finite (loss 1.0, gradient norm 0.5): the first parameter that is not finite is b. " in err_text()


def test_a_signal_ends_the_run_after_the_step_with_a_save(loop, err_text):
    stop = SimpleNamespace(signal=None)
    s = settings_of("--steps 9 --save-every 100 --eval-every 100")
    assert loop(Recorder(), s, stop=stop, ask=lambda step: setattr(stop, "signal", 15 if step == 3 else None)) == (128 + 15, [0, 1, 2, 3], [4])
    assert "at step 4. Go on with: python train.py small --resume --out" in err_text()


@parametrize("device", ["cpu", "gpu"])
def test_speed_and_time_left_without_pauses(monkeypatch, loop, device):
    """A second a step; an evaluation takes a hundred, and counts neither for the speed nor for what is left."""
    now, printed = [1000.0], []
    monkeypatch.setattr(train.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(train, "print_step", lambda step, parts, last: printed.append((step, parts[3:5], last)))

    def wait(seconds):
        now[0] += seconds
        return {}
    model = Recorder(step=10)
    assert loop(model, settings_of("--eval-every 7 --save-every 50 --steps 40", device), lambda step: wait(100.0), ask=lambda step: wait(1.0))[0] == 0
    assert [step for step, *_ in printed] == [*range(11, 41)]
    for step, parts, last in printed:
        # on a GPU a step's numbers are read when the next one has been launched, but before an evaluation
        began = step - 10 + (device == "gpu" and not last)
        assert parts == [f"00:{int(began / (step - 10) * (40 - step)):02d} left", f"{32 * (step - 10) / began:8,.0f} tokens/s"]
        assert last == (step in (14, 21, 28, 35, 40))


@parametrize("seconds, words", [(61.9, "01:01"), (3600, "1:00:00"), (216000, "2 days, 12:00:00")])
def test_time_left(tmp_path, monkeypatch, out_text, seconds, words):
    """After the first of two steps, which took so long."""
    clock = iter([0.0, seconds])
    monkeypatch.setattr(train.time, "monotonic", lambda: next(clock))
    training = training_of(Recorder(), None, settings_of("--steps 2"), tmp_path)
    train.Report(training, train.Job(None, None, lambda step, loss: ""))(1, 1e-3, np.ones(2), 0.5, pause=True)
    assert f"  {words} left  " in out_text()


@parametrize("device", ["cpu", "gpu"])
def test_gpu_numbers_wait_for_the_next_step(loop, device):
    """The host does not ask for a step's numbers before it has launched the next one, nor later than that; those of a CPU are
    there at once."""
    order = []

    class Late(Recorder):
        def update(self, *rest, **options):
            order.append(f"update {self.step + 1}")
            return super().update(*rest, **options)

        def later(self, *numbers):
            order.append(f"copy {self.step}")
            return lambda step=self.step: order.append(f"read {step}") or numbers
    loop(Late(), settings_of("--steps 3", device))
    if device == "cpu":
        assert order == [f"{what} {step}" for step in (1, 2, 3) for what in ("update", "copy", "read")]
    else:
        assert order == ["update 1", "copy 1", "update 2", "copy 2", "read 1", "update 3", "copy 3", "read 2", "read 3"]


def test_the_progress_line_fits_the_terminal(monkeypatch, out_text):
    """What matters less stands last, and is left out where it does not fit: whole, or not at all.  No line end sends it to
    the screen."""
    flushed, parts = [], ["step 12/48", "loss 10.1234", "4.564 bits/byte"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "flush", lambda: flushed.append(1), raising=False)
    for columns, fit, last in (5, 1, False), (24, 1, True), (25, 2, False), (41, 2, True), (42, 3, False), (140, 3, True):
        monkeypatch.setenv("COLUMNS", str(columns))
        train.print_step(12, [*parts], last)
        assert flushed.pop() and out_text() == "\r" + "  ".join(parts[:fit]) + "\x1b[K" + "\n" * last


# -- the log and the disk ----------------------------------------------------------------------------------------------
def write_log(folder, steps, tail=""):
    whole = "".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in steps)
    write(folder / "log.jsonl", whole + tail)
    return whole


def test_opening_a_log_cuts_it_and_writes_nothing_again(tmp_path, monkeypatch):
    """Killed at any moment the history is there: the file is never written anew."""
    kept, modes, real = write_log(tmp_path, range(1, 7)), set(), open
    write_log(tmp_path, range(1, 10))
    monkeypatch.setattr("builtins.open", lambda path, mode: modes.add(mode) or real(path, mode))
    log = checkpoint.Log(str(tmp_path), 6)
    assert modes == {"rb", "ab"} and (tmp_path / "log.jsonl").stat().st_size == len(kept)
    log.write(step=7, loss=2.0)
    with real(log.path) as file:
        assert file.read() == kept + '{"step": 7, "loss": 2.0}\n'


def test_the_last_line_of_a_killed_run_is_dropped_and_what_is_missing_is_said(tmp_path, out_text):
    whole = write_log(tmp_path, range(1, 5), tail='{"step": 5, "lo')
    checkpoint.Log(str(tmp_path), 4)
    assert (tmp_path / "log.jsonl").read_text() == whole and not out_text()
    checkpoint.Log(str(tmp_path), 9)
    assert "no record of the steps 5 to 9" in out_text()
    checkpoint.Log(str(tmp_path), 0)
    assert (tmp_path / "log.jsonl").read_text() == ""


@parametrize("line", ["5", "{}", "", '{"step": 1.5}', "[" * 100_000, '{"step": 1', "\0"])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    write_log(tmp_path, range(1, 4), tail=f'{line}\n{{"step": 4}}\n')
    before = (tmp_path / "log.jsonl").read_bytes()
    with value_error("log.jsonl, line 4, is no record of a run"):
        checkpoint.Log(str(tmp_path), 9)
    assert (tmp_path / "log.jsonl").read_bytes() == before


def test_the_log_is_on_the_disk_before_its_checkpoint(tiny, monkeypatch):
    """With all its lines: after a power cut a log that ends before its checkpoint could not be made whole again."""
    done, fsync, replace = [], os.fsync, os.replace

    def sync(fd):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        done.append((name, open("out/small/log.jsonl").read().count('"loss"') if name == "log.jsonl" else None))
        return fsync(fd)
    put(monkeypatch, os, fsync=sync,
        replace=lambda old, new: done.append(("rename", os.path.basename(new))) or replace(old, new))
    tiny(*TINY, "--save-every 7")
    saves = [i for i, (what, name) in enumerate(done) if (what, name) == ("rename", "model.safetensors")]
    logs = [i for i, (what, _) in enumerate(done) if what == "log.jsonl"]
    assert len(saves) == 3 and saves[0] < logs[0] < saves[1] < logs[1] < saves[2] and [done[i][1] for i in logs] == [7, 12]


# -- the held-out part -------------------------------------------------------------------------------------------------
def test_split_is_as_near_as_can_be_to_what_is_wanted(tmp_path):
    """By all cuts that there are, in small texts of all kinds."""
    path, rng = tmp_path / "text.txt", random.Random(0)
    for pieces in ["a", "\n", "bc d", "\n<|endoftext|>\n", "é"], ["a", "b ", "\n"], ["é", "猫", "a"], ["a", "\n", "\n \n"]:
        for _ in range(40):
            raw = "".join(rng.choices(pieces, weights=range(len(pieces), 0, -1), k=rng.randint(1, 3000))).encode()
            path.write_bytes(raw)
            wanted = len(raw) - len(raw) // 10
            separators = [wanted + match.end() for match in SEPARATOR.finditer(raw[wanted:])]
            for kind in separators, [i + 1 for i in range(len(raw)) if raw[i] == 10]:
                kind = [cut for cut in kind if cut > wanted and raw[cut:].strip()]
                if kind:
                    break
            assert train.split_point(path) == min(kind, default=wanted, key=lambda cut: cut - wanted), raw


def test_a_cut_leaves_something_behind_it(tmp_path):
    """Where what is wanted, the last 100 kB, is only the white space at the end, or begins with the last byte
    before it: the cut is then the last one that leaves a byte."""
    path, wanted = tmp_path / "text.txt", 1_100_000
    for line, sizes in (b"a", (-3, -1, 0, 1, 2)), (b"abc\n", (-8, -3, -2, -1, 0, 1, 2, 3, 7)):
        for more in sizes:
            text = (line * 1_200_000)[:wanted + more].rstrip()
            path.write_bytes(text.ljust(1_200_000))
            cuts = [cut for cut in range(wanted - 20, len(text)) if text[cut - 1:cut] == line[-1:]]
            assert train.split_point(path) == min(cuts, key=lambda cut: abs(cut - wanted)), (line, more)


def test_split_of_a_long_line_and_of_many_lines_takes_no_longer_than_reading_them(tmp_path):
    """Once these took hours and minutes; now a second.  The limit only ends a hang."""
    signal.alarm(600)
    for text in "x" * 50_000_000, "so many lines\n" * 5_000_000:
        write(tmp_path / "text.txt", text)
        assert abs(len(text) - train.split_point(tmp_path / "text.txt") - len(text) // 100) < 20
    signal.alarm(0)


def test_what_is_held_out_is_not_trained_on(tmp_path, monkeypatch):
    """Every document of two kinds is in one part, whole, once; of each kind its last ones are held out, under its name; and
    the tokenizer has learned from nothing that is held out."""
    monkeypatch.chdir(tmp_path)
    texts = {"books_a.txt": [f"book {i} " + "the old house " * 60 for i in range(60)],
             "books_b.txt": [f"tome {i} " + "a new garden " * 60 for i in range(40)],
             "web_x.txt": [f"page {i} " + "some other words " * 40 for i in range(50)]}
    for name in texts:
        texts[name][-3:] = [f"{text} qxqxqxqx" for text in texts[name][-3:]]
        write(tmp_path / name, "\n\n<|endoftext|>\n\n".join(texts[name]))
    tokenizer, tokens, val, _ = train.prepare(list(texts), 400)

    def documents(ids):
        return [text.strip("\n") for text in tokenizer.decode(ids.tolist()).split("<|endoftext|>") if text]
    books, web = documents(val["books"]), documents(val["web"])
    everything = [text for name in texts for text in texts[name]]
    assert sorted(documents(tokens) + books + web) == sorted(everything) and all(text.startswith("page") for text in web)
    for name in texts:
        last = [text for text in books + web if text in texts[name]]
        assert 3 <= len(last) <= 10 and last == texts[name][-len(last):]
    assert not any(b"qx" in token for token in tokenizer.tokens)


def test_a_tokenizer_reads_a_hundred_million_bytes_and_no_more():
    """All of just as many; of one more pieces of a megabyte, as far apart as makes so many of them."""
    whole = [("a", 0, 40_000_000), ("b", 0, 60_000_000)]
    assert train.tokenizer_sample(whole) is whole
    assert train.tokenizer_sample([*whole, ("c", 0, 1)]) == [
        *[("a", place, place + 1_000_000) for place in range(0, 40_000_000, 1_000_000)],
        *[("b", place, place + 1_000_000) for place in range(0, 60_000_000, 1_000_000)], ("c", 0, 1)]
    assert train.tokenizer_sample([("a", 0, 250_000_000)]) == [
        ("a", place, place + 1_000_000) for place in range(0, 250_000_000, 2_500_000)]


def test_two_preparations_at_once_make_the_same_files(folder):
    words = random.Random(0).choices("alpha beta gamma delta".split(), k=60_000)
    for name in "web_a.txt", "web_b.txt":
        write(folder / name, name + " ".join(words))
    program = ("import sys; sys.path.insert(0, sys.argv[1]); import train; _, tokens, val, key = train.prepare(sys.argv[2:], 300);"
               "print(key, int(tokens.sum()), {kind: len(part) for kind, part in val.items()})")
    both = [subprocess.Popen([sys.executable, "-c", program, ROOT, "web_a.txt", "web_b.txt"], text=True, stdout=subprocess.PIPE) for _ in range(2)]
    first, second = [process.communicate(timeout=600)[0].splitlines()[-1] for process in both]
    assert first == second and "'web'" in first
    os.rename("web_b.txt", "books_b.txt")                               # the same text, but of another kind
    _, tokens, val, key = train.prepare(["web_a.txt", "books_b.txt"], 300)
    assert first.split()[0] != key and first.split()[1] == str(int(tokens.sum())) and [*val] == ["web", "books"]


# -- resume (tests/test_attack.py has kills, signals and full disks) -----------------------------------------------------
def test_sizes_reach_the_model_and_the_checkpoint(tiny):
    """A context that does not divide the default batch, too: as many windows are taken as fit."""
    sizes = "--dim 64 --heads 8 --kv-heads 4 --layers 1 --context 100 --vocab 264 --steps 1 --threads 1".split()
    config = model_cpu.Config(dim=64, heads=8, kv_heads=4, layers=1, context=100, vocab=264)
    assert f"small: {model_cpu.param_count(config):,} parameters, 1 steps of 2,000 tokens" in tiny("--data tiny.txt", *sizes)
    model, tokenizer = checkpoint.load("out/small", model_cpu)
    assert model.config == config and model.step == 1 and tokenizer.vocab_size == 264
    with open("out/small/config.json") as file:
        found = json.load(file)
    assert [found[key] for key in """hidden_size intermediate_size vocab_size num_attention_heads
        num_key_value_heads num_hidden_layers max_position_embeddings""".split()] == [64, 176, 264, 8, 4, 1, 100]


def test_a_resumed_run_keeps_its_sizes(tiny):
    tiny(*TINY, "--out out/whole")
    tiny(*TINY, "--out out/half", stop_at=6)
    sizes = {"dim": 16, "heads": 2, "kv-heads": 1, "layers": 1, "context": 16, "vocab": 272}
    for name, value in sizes.items():
        with value_error(f"^the run in out/half has --{name} {value}, not {2 * value}: a resumed run keeps"):
            tiny(f"--resume --out out/half --{name}", str(2 * value))
    for steps in "11", "13":
        with value_error(f"^the run in out/half has --steps 12, not {steps}: a resumed "):
            tiny("--resume --out out/half --steps", steps)
    same = [f"--{name}={value}" for name, value in sizes.items()]
    assert tiny("--resume --out out/half --dry-run").count("\n") == 1 and read_log("out/half")[-1]["step"] == 6
    os.rename("tiny.txt", "kept.txt")
    write("tiny.txt", "another text " * 99)
    with value_error("^tiny.txt: not what out/half began with.$"):
        tiny("--resume --out out/half")
    os.rename("kept.txt", "tiny.txt")
    assert "Resuming out/half at step 6 of 12." in tiny("--resume --out out/half", *same)
    assert read_log("out/half") == read_log("out/whole")


def test_a_finished_run_is_given_more_steps(tiny):
    """They are counted on, the schedule is that of a run of so many from there on, and it is said aloud."""
    tiny(*TINY, "--lr 0.01 --warmup 3 --out out/run")
    done = read_log("out/run")
    for options in [], ["--steps", "12"], ["--dry-run"]:
        assert tiny("--resume --out out/run", *options) == "The run in out/run is finished: 12 steps (--steps takes more, in sft.py --epochs).\n"
    with value_error("^the run in out/run has --steps 12, not 11: a resumed run "):
        tiny("--resume --out out/run --steps 11")
    assert "40 steps" in tiny("--resume --out out/run --steps 40 --dry-run")
    shutil.copytree("out/run", "out/killed")
    said = tiny("--resume --out out/run --steps 40", stop_at=20)
    s = train.Settings(**checkpoint.load_state("out/run")["settings"])
    rates = [train.learning_rate(step, s) for step in range(40)]
    assert s.steps == 40 and rates[12] == 0.01 * (0.1 + 0.45 * (1 + math.cos(math.pi * 9 / 36)))
    assert said.startswith(
        "The run in out/run was finished after 12 steps; it goes on to 40.  The learning rate "
        f"rises to {rates[12]:.2e}, by a new schedule.\nResuming out/run at step 12 of 40.\n")
    # it is now an unfinished run of 40 steps: it goes on, but not to another number of them
    for steps in "12", "39", "41":
        with value_error(f"^the run in out/run has --steps 40, not {steps}: a resumed"):
            tiny("--resume --out out/run --steps", steps)
    assert tiny("--resume --out out/run --steps 40").startswith("Resuming out/run at step 20 of 40.\n")
    log = read_log("out/run")
    steps = steps_of(log)
    assert log[:len(done)] == done and [record["step"] for record in steps] == [*range(1, 41)]
    assert [record["lr"] for record in steps[12:]] == rates[12:] and [record["tokens"] for record in steps] == [*range(64, 41 * 64, 64)]
    assert [record["step"] for record in log if "val_loss" in record] == [5, 10, 12, 15, 20, 25, 30, 35, 40]
    # killed before its first save it is still the finished one
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(train, "save_run", lambda training: 1 / 0)
        tiny("--resume --out out/killed --steps 40")
    assert "finished: 12 steps" in tiny("--resume --out out/killed")
    tiny("--resume --out out/killed --steps 40")
    assert read_log("out/killed") == log


def test_a_run_that_grows_is_given_more_steps_by_its_own_command(tiny):
    growing = [*TINY, "--growth 0.25 --out out/run"]
    tiny(*growing)
    assert "goes on to 20" in tiny(*growing, "--resume --steps 20")


def test_the_last_evaluation_reads_all(tiny, monkeypatch):
    """On the way at most EVAL_TOKENS of each kind; at the end everything, where that is more.  By every window of all, side by
    side."""
    monkeypatch.setattr(train, "EVAL_TOKENS", 32)
    said = tiny(*TINY)
    assert re.search(r"\n           on all that is held out [0-9.]+, [0-9.]+ bits/byte\n", said)
    log = read_log("out/small")
    assert [record["step"] for record in log if "all" in record] == [12]
    model, tokenizer = checkpoint.load("out/small", model_cpu, {"dtype": np.float32})
    ids = train.prepare(["tiny.txt"], 272)[2]["tiny"]
    count = (len(ids) - 4) // 16
    starts = [i * ((len(ids) - 4) // count) for i in range(count)]
    losses = [model.forward(*train.get_batch(ids, [start], 16, 4))[0] for start in starts]
    text = sum(len(tokenizer.tokens[i]) for start in starts for i in ids[start + 1:start + 17])
    found = log[-1]["all"]
    assert count > 3 and found["val_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert found["val_bpb"] == pytest.approx(16 * sum(losses) / math.log(2) / text, rel=1e-5) and found["val_loss"] != log[-1]["val_loss"]
    monkeypatch.setattr(train, "EVAL_TOKENS", 1 << 16)
    assert "held out" not in tiny(*TINY)


def test_a_new_run_sets_the_old_one_aside_and_makes_the_same_bits(tiny, folder):
    for _ in range(2):
        tiny(*TINY)
    process = attack.command("train.py", *TINY)
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_THREADS")}       # as in a terminal
    done = subprocess.run(process, capture_output=True, text=True, env={**clean, "PYTHONWARNINGS": "error"})
    assert (done.returncode, done.stderr) == (0, "")                    # nor is a file left open
    assert read_log("out/small.1") == read_log("out/small.2")
    steps = [steps_of(read_log(out)) for out in ("out/small", "out/small.1")]
    assert steps[0] == steps[1]


# -- bad input ---------------------------------------------------------------------------------------------------------
FRENCH = "D\xe9j\xe0 vu, caf\xe9 cr\xe8me. "


def test_bad_input_is_one_sentence(folder):
    for name, data in {"empty": b"", "latin": FRENCH.encode("latin-1") * 99, "short": b"only a few words", "file": b"",
                       "deep": b"words " * 9999 + b"\xe9" * 61}.items():
        write(folder / name, data)
    cases = rows("""
        --data missing.txt | Cannot use missing.txt: No such file
        --data empty       | empty is empty
        --data short       | too short
        --data .           | not a plain file
        --data latin       | latin is no text in UTF-8: it seems to be Latin-1 or Windows-1252.
        --data deep        | Latin-1
        --nonsense         | nonsense
        --plot nowhere     | nowhere
        tine               | the preset must be one of small, medium, big, not 'tine'
        --stesp 3          | unrecognized arguments: --stesp;
        --vocab 100        | at least 264
        --base hub/x       | there is no model in hub/x""")
    cases.append((f"{' '.join(TINY)} --out file/out", "file/out"))
    for arguments, words in cases:
        assert_refused(run(folder, arguments), words)
    assert not (folder / "out").exists()


def test_numbers_that_are_not_finite_stop_a_run_in_a_sentence(folder):
    done = run(folder, *TINY, "--lr 1e30 --save-every 1")
    assert done.returncode == 1 and "first gradient that is not finite is embed" in done.stderr and "Warning" not in done.stderr
    losses = [record["loss"] for record in steps_of(read_log("out/small"))]
    assert len(losses) < 12 and np.isfinite(losses).all()


def test_clip_inf_clips_nothing_and_a_run_with_it_resumes(tiny, folder):
    tiny(*TINY, "--clip", "inf", "--steps", "2")
    assert train.read_run("out/small")[0].clip == np.inf
    tiny("--resume", "--steps", "3")
    for wrong in "nan", "-1":
        with pytest.raises(SystemExit):
            tiny(*TINY, "--clip", wrong)


def test_damaged_tokens_are_named(tiny, folder):
    """Ids are read by name, from a file that was made before: what was altered since must not be learned."""
    tiny(*TINY)
    made, = (folder / "data").glob("train-*.bin")
    raw = made.read_bytes()
    for altered in b"\xff\xff" + raw[2:], raw[:-2], raw + b"\0\0", raw[:-1], b"":
        made.write_bytes(altered)
        with value_error(f"^data/{made.name} is damaged: its checksum is wrong. Delete it, and it is made anew.$"):
            tiny(*TINY)


def test_a_folder_is_taken_once(folder):
    umask = os.umask(0)
    try:
        checkpoint.lock_folder("out/a")
    finally:
        os.umask(umask)
    assert os.stat("out/.a.lock").st_mode & 0o777 == 0o666          # who shares the folder takes turns by it, too
    os.symlink("a", "out/link")
    for name in "out/a", "./out/a/", "out/link":
        done = run(folder, *TINY, "--out", name)
        assert done.returncode == 2 and "is in use by another run" in done.stderr and not os.listdir("out/a")
    checkpoint.lock_folder("out/b")
    os.rename("out/a", "out/c")
    checkpoint.set_aside("out/a")                        # nothing there: nothing to do
    os.makedirs("out/a")
    checkpoint.set_aside("out/a")                        # empty: likewise
    open("out/a/log.jsonl", "w").close()
    os.makedirs("out/a.1")
    checkpoint.set_aside("out/a")
    assert sorted(os.listdir("out"))[2:] == "a.1 a.2 b c link".split() and os.listdir("out/a.2") == ["log.jsonl"]


# -- debuggers ---------------------------------------------------------------------------------------------------------
CLEAN = {name: value for name, value in os.environ.items() if not name.endswith("_THREADS")}


@parametrize("script", ["train", "sft", "rl"])
def test_a_script_leaves_the_cores_to_its_own_threads(script):
    code = f"""import os, runpy, sys
sys.argv[1:] = ["--help"]
try:
    runpy.run_path("{script}.py", run_name="__main__")
finally:
    print(os.environ["OPENBLAS_NUM_THREADS"])"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=CLEAN).stdout.endswith("\n1\n")


def test_a_debugger_keeps_the_script(folder):
    """A breakpoint that is set at the first prompt is hit, and the interpreter's options stay; and the bits are the same."""
    command = [sys.executable, "-X", "utf8=0", "-m", "pdb", *attack.command("train.py", *TINY)[1:]]
    done = subprocess.run(command, capture_output=True, text=True, env=CLEAN, timeout=600,
                          input="b learning_rate\nc\np step, __import__('os').environ['OPENBLAS_NUM_THREADS']\np __import__('sys')._xoptions\nq\n")
    assert "(Pdb) (0, '1')\n" in done.stdout and "{'utf8': '0'}" in done.stdout, done.stdout
