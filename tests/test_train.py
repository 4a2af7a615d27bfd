"""train.py: batches as a pure function, the held-out part, exact resume after every kind of death, bad input."""
import contextlib
import dataclasses
import io
import json
import lzma
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

import checkpoint
import model_cpu
import train
from tokenizer import SEPARATOR, Tokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DATA = os.path.join(ROOT, "..", "shared", "data")
QUICK = ["--dim", "32", "--heads", "2", "--kv-heads", "1", "--layers", "2", "--batch-tokens", "256", "--steps", "30",
         "--eval-every", "15", "--save-every", "1", "--threads", "2"]


def run(folder, *arguments, **options):
    return subprocess.run([sys.executable, os.path.join(ROOT, "train.py"), *arguments], cwd=folder, text=True,
                          capture_output=True, timeout=600, **options)


def start(folder, *arguments):
    return subprocess.Popen([sys.executable, os.path.join(ROOT, "train.py"), *arguments], cwd=folder, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def read_log(folder, out="out/small"):
    """The log without the seconds, which no run repeats."""
    with open(os.path.join(folder, out, "log.jsonl"), encoding="utf-8") as file:
        return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in file]


TINY = ["--data", "tiny.txt", "--dim", "16", "--heads", "2", "--kv-heads", "1", "--layers", "1",
        "--context", "16", "--vocab", "272", "--batch-tokens", "64", "--threads", "1", "--steps", "12",
        "--eval-every", "5", "--save-every", "100"]


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """-> function (options, stop at this step) -> what train.py printed: tiny runs in this process."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.txt").write_text("the cat sat on the mat and the dog lay on the rug. " * 40)
    for module, name in ((train, "set_threads"), (checkpoint, "lock_folder")):     # a lock lasts as long as its process
        monkeypatch.setattr(module, name, lambda *rest: None)

    def go(*options, stop_at=None):
        micro_batches, stop = train.micro_batches, types.SimpleNamespace(signal=None)

        def stopping(training, inputs):
            stop.signal = signal.SIGTERM if training.model.step + 1 == stop_at else None
            return micro_batches(training, inputs)
        with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
            patch.setattr(train, "micro_batches", stopping)
            patch.setattr(train, "Stop", lambda: stop)
            assert (train.main(list(options)) or 0) == (128 + signal.SIGTERM if stop_at else 0)
        return out.getvalue()
    return go


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with an invented corpus and its tokens, and the log of a run that was never disturbed."""
    folder = tmp_path_factory.mktemp("train")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(1, 7))) for _ in range(300)]
    documents = [" ".join(rng.choices(words, k=rng.randint(20, 200))) + "." for _ in range(300)]
    (folder / "corpus.txt").write_text("\n\n<|endoftext|>\n\n".join(documents), encoding="utf-8")
    done = run(folder, "--data", "corpus.txt", "--out", "out/whole", *QUICK)
    assert done.returncode == 0, done.stderr
    return folder, read_log(folder, "out/whole")


# -- batches -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size, T, K", [(1000, 16, 4), (37, 16, 4), (20, 16, 4), (531, 32, 1)])
def test_every_window_once_an_epoch(size, T, K):
    count = train.window_count(size, T, K)
    starts = train.window_starts(7, 0, 3 * count, size, T, K)
    assert len(starts) == 3 * count
    for epoch in range(3):
        part = sorted(starts[epoch * count:(epoch + 1) * count])
        assert 0 <= part[0] < T and part[-1] + T + K <= size
        assert all(b - a == T for a, b in zip(part, part[1:]))


def test_batches_depend_on_seed_and_step_alone():
    def steps(seed, order):
        return {step: train.window_starts(seed, step, 5, 3000, 16, 4) for step in order}
    forward = steps(3, range(80))
    train.epoch_order.cache_clear()
    assert forward == steps(3, reversed(range(80)))
    assert forward != steps(4, range(80))
    flat = [start for step in range(80) for start in forward[step]]
    assert flat == train.window_starts(3, 0, 400, 3000, 16, 4)          # laid end to end, whatever the batch size


def test_targets_are_the_next_tokens():
    tokens = np.arange(100, dtype=np.uint16)
    inputs, targets = train.get_batch(tokens, [0, 17, 80], 16, 4)
    assert inputs.shape == (3, 16) and targets.shape == (3, 19)
    for k in range(4):
        assert (targets[:, k:k + 16] == inputs + 1 + k).all()


def test_an_epoch_is_shuffled_and_no_two_are_alike():
    size, T, K = 3000, 16, 4
    count = train.window_count(size, T, K)
    epochs = np.reshape(train.window_starts(5, 0, 8 * count, size, T, K), (8, count))
    orders = [tuple((epoch // T).tolist()) for epoch in epochs]
    assert len(set(orders)) == 8 and not any(list(order) in (sorted(order), sorted(order)[::-1]) for order in orders)
    assert len({int(epoch[0] % T) for epoch in epochs}) > 3                     # the grid is shifted in each
    ahead = [np.mean(np.diff(epoch) > 0) for epoch in epochs]                   # nor is it sorted in part
    assert 0.4 < np.mean(ahead) < 0.6, ahead
    # the shift is anywhere that all windows still fit: 0, and T-1 or what room there is
    for size, most in (3000, T - 1), (T + K + 3, 3):
        shifts = {int(train.epoch_order(seed, 0, size, T, K).min()) for seed in range(400)}
        assert shifts == set(range(most + 1))


def test_a_job_takes_the_batch_of_its_step():
    tokens = np.random.default_rng(0).integers(0, 256, 5000).astype("<u2")
    tokenizer = Tokenizer.train(["some text"], 512)
    model = model_cpu.Model(model_cpu.Config(dim=16, heads=2, kv_heads=1, layers=1, context=16, vocab=512, predict=3), 0)
    args = train.parse_arguments(["--seed", "7", "--device", "cpu"])
    s = train.make_settings(train.given_options(args), "small", model.config, {**train.DEFAULTS["small"], "batch_tokens": 5 * 16}, train.Ranks())
    job = train.pretraining(training_of(model, tokenizer, s), tokens, {})
    for step in (0, 1, 69, 300):
        starts = train.window_starts(7, step, 5, 5000, 16, 3)
        expected = train.get_batch(tokens, starts, 16, 3)
        assert all(np.array_equal(a, b) for a, b in zip(job.batch(step), expected))
    assert abs(job.bytes_per_token - np.mean([len(tokenizer.tokens[i]) for i in tokens])) < 1e-12


def training_of(model, tokenizer=None, settings=None, out="out/x", state=None):
    """A Training in one process."""
    return train.Training(model, tokenizer, settings, state or {}, out, train.Ranks())


class Recorder:
    """In a model's place: notes what it is called with."""
    config = model_cpu.Config(dim=16, heads=2, kv_heads=1, layers=1, context=8, vocab=8, predict=2)

    def __init__(self, norms=()):
        self.step, self.calls, self.norms, self.grads, self.params = 0, [], list(norms), {}, {}
        self.flat_params, self.flat_grads = np.ones(3), np.ones(3)

    def forward(self, tokens, targets, counted):
        self.calls.append(("forward", tokens.tolist(), targets.tolist(), counted.tolist()))
        return np.array([len(tokens) / 4, 10.0])

    def backward(self, last):
        self.calls.append(("backward", last))

    def update(self, lr, decay, clip):
        self.step += 1
        self.calls.append(("update", lr, decay, clip))
        return self.norms.pop(0) if self.norms else 0.5

    later, read = model_cpu.Model.later, model_cpu.Model.read


def recorder_settings(*options, **changes):
    args = train.parse_arguments(["--device", "cpu", *options])
    return train.make_settings(train.given_options(args), "small", Recorder.config, {**train.DEFAULTS["small"], "batch_tokens": 32, **changes}, train.Ranks())


@pytest.mark.parametrize("micro_batch, cuts", [(1, [0, 2, 4, 6, 7]), (2, [0, 4, 7]), (3, [0, 6, 7]), (4, [0, 7])])
def test_a_step_is_cut_into_micro_batches_and_loses_no_row(tmp_path, monkeypatch, micro_batch, cuts):
    """Seven rows, half as long as the context: twice as many go into a micro-batch."""
    rng, model = np.random.default_rng(0), Recorder()
    inputs, targets = rng.integers(0, 8, (7, 4)), rng.integers(-1, 8, (7, 5))
    s = recorder_settings("--micro-batch", str(micro_batch), "--decay", "0.3", "--clip", "2.5", "--steps", "1")
    monkeypatch.setattr(train, "learning_rate", lambda step, settings: 0.125)
    monkeypatch.setattr(train, "save_run", lambda training: None)
    job = train.Job(lambda step: (inputs, targets), lambda step: {}, 1.0)
    training = training_of(model, None, s, str(tmp_path), {"script": "train.py", "tokens": 0, "seconds": 0.0})
    assert train.train(training, job, types.SimpleNamespace(signal=None)) == 0
    counted = [int((targets[:, k:k + 4] >= 0).sum()) for k in range(2)]         # of the whole step
    expected = []
    for a, b in zip(cuts, cuts[1:]):
        expected += [("forward", inputs[a:b].tolist(), targets[a:b].tolist(), counted), ("backward", b == 7)]
    assert model.calls == [*expected, ("update", 0.125, 0.3, 2.5)]
    record = read_log(tmp_path, ".")[0]
    assert record["grad_norm"] == 0.5 and record["losses"] == [7 / 4, 10.0 * (len(cuts) - 1)] and record["tokens"] == 28


def run_recorder(tmp_path, monkeypatch, model, s, evaluate=lambda step: {}, stop=None, before=("tokens", 0)):
    """train.train with a Recorder -> (exit code, steps asked of job.batch, steps saved)."""
    asked, saved = [], []

    def batch(step):
        asked.append(step)
        return np.zeros((4, 8), int), np.zeros((4, 9), int)
    monkeypatch.setattr(train, "save_run", lambda training: saved.append(training.model.step))
    state = {"script": "train.py", "tokens": 96 * model.step, "seconds": 1.0}
    stop = stop or types.SimpleNamespace(signal=None)
    training = training_of(model, None, s, str(tmp_path), state)
    code = train.train(training, train.Job(batch, evaluate, 2.0), stop)
    return code, asked, saved


def test_a_run_asks_for_each_batch_and_rate_and_saves_and_evaluates_in_time(tmp_path, monkeypatch, capsys):
    model, evaluated = Recorder(), []
    s = recorder_settings("--steps", "70", "--warmup", "7", "--lr", "0.5", "--eval-every", "30", "--save-every", "25")
    code, asked, saved = run_recorder(tmp_path, monkeypatch, model, s, lambda step: evaluated.append(step) or {"x": step})
    assert (code, asked, saved) == (0, list(range(70)), [25, 50, 70])
    assert evaluated == [16, 30, 60, 70]            # at first at powers of two, at last in any case
    rates = [call[1] for call in model.calls if call[0] == "update"]
    assert rates == [train.learning_rate(step, s) for step in range(70)]
    log = read_log(tmp_path, ".")
    assert [record["step"] for record in log if "loss" in record] == list(range(1, 71))
    assert [record for record in log if "x" in record] == [{"step": step, "x": step} for step in evaluated]
    first = next(record for record in log if record["step"] == 3)
    assert first == {"step": 3, "loss": 1.0, "losses": [1.0, 10.0], "lr": rates[2], "grad_norm": 0.5, "tokens": 96}
    printed = capsys.readouterr().out
    assert f"{rates[9]:.2e}" != "5.00e-01" == f"{rates[6]:.2e}"             # which is reached at step 7
    bits = f"{1 / np.log(2) / 2:.3f} bits/byte"
    assert re.search(rf"^step    10/70  loss  1\.0000  {bits}  [0-9:]+ left +[0-9,]+ tokens/s"
                     rf"  norm   0\.50  lr {rates[9]:.2e}$", printed, re.MULTILINE)
    assert "Trained" in printed and "70 steps, 2,240 tokens" in printed


def test_a_run_goes_on_where_it_was(tmp_path, monkeypatch):
    model = Recorder()
    model.step = 5
    (tmp_path / "log.jsonl").write_text("".join(f'{{"step": {i}, "loss": 1}}\n' for i in range(1, 9)))
    code, asked, saved = run_recorder(tmp_path, monkeypatch, model, recorder_settings("--steps", "8", "--save-every", "4"))
    assert (code, asked, saved) == (0, [5, 6, 7], [8])
    log = [record for record in read_log(tmp_path, ".") if "loss" in record]
    assert [record["step"] for record in log] == list(range(1, 9)) and [record["loss"] for record in log] == 8 * [1]
    assert [record.get("tokens") for record in log] == 5 * [None] + [5 * 96 + 32 * i for i in (1, 2, 3)]


@pytest.mark.parametrize("norms, step, save_every", [([np.nan], 1, 1), ([1, 1, np.inf], 3, 1),
                                                     ([1, 1, np.inf, 1], 3, 9)])
def test_a_number_that_is_not_finite_ends_the_run(tmp_path, monkeypatch, capsys, norms, step, save_every):
    model = Recorder(norms)
    model.grads = {"a": np.ones(3), "b": np.array([1, np.nan]), "c": np.array([np.inf])}
    s = recorder_settings("--steps", "9", "--save-every", str(save_every))
    code, asked, saved = run_recorder(tmp_path, monkeypatch, model, s)
    assert asked == [*range(step), step - 1]            # the bad step is computed again, to name the tensor
    said = capsys.readouterr().err
    assert code == 1 and saved == list(range(save_every, step, save_every)) and f"step {step} is not finite" in said
    assert "the first gradient that is not finite is b" in said
    model.grads, model.params = {"a": np.ones(3)}, {"w": np.array([np.inf])}
    bad = lambda: train.first_bad_tensor(training_of(model, None, s), np.zeros((4, 8), int), np.zeros((4, 9), int))     # noqa: E731
    assert bad() == "the first parameter that is not finite is w"
    model.params = {}
    assert bad().startswith("every gradient is finite")


def test_a_signal_ends_the_run_after_the_step_with_a_save(tmp_path, monkeypatch, capsys):
    model, stop = Recorder(), types.SimpleNamespace(signal=None)
    update = model.update

    def interrupted(*arguments, **options):
        stop.signal = 15 if model.step == 3 else None
        return update(*arguments, **options)
    model.update = interrupted
    s = recorder_settings("--steps", "9", "--save-every", "100", "--eval-every", "100")
    assert run_recorder(tmp_path, monkeypatch, model, s, stop=stop) == (128 + 15, [0, 1, 2, 3], [4])
    assert "at step 4. Go on with: python train.py small --resume --out" in capsys.readouterr().err


def test_too_short_for_one_window():
    with pytest.raises(ValueError, match="19 tokens to train on, and a window has 20"):
        train.window_count(19, 16, 4)


def test_schedule():
    args = train.parse_arguments(["--steps", "100", "--lr", "1", "--warmup", "10", "--device", "cpu"])
    s = train.make_settings(train.given_options(args), "small", train.CONFIGS["small"], train.DEFAULTS["small"], train.Ranks())
    rates = [train.learning_rate(step, s) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and abs(rates[-1] - 0.1) < 1e-12
    assert all(a > b for a, b in zip(rates[10:], rates[11:]))
    # the cosine from step 10 to step 99, not a line
    assert abs(rates[10 + 44] - (0.1 + 0.45 * (1 + math.cos(math.pi * 44 / 89)))) < 1e-12
    assert abs(rates[10 + 22] - (0.1 + 0.45 * (1 + math.cos(math.pi * 22 / 89)))) < 1e-12
    s.warmup = 0
    assert train.learning_rate(0, s) == 1.0
    s.steps = s.warmup = 1
    assert train.learning_rate(0, s) == 1.0


# -- the held-out part -------------------------------------------------------------------------------------------------
def test_split_at_a_document(tmp_path):
    separator = "\n\n<|endoftext|>\n\n"
    documents = [f"document {i} " + "word " * 2000 for i in range(300)]
    path = tmp_path / "books.txt"
    path.write_text(separator.join(documents), encoding="utf-8")
    cut, raw = train.split_point(path), path.read_bytes()
    first, second = ([part.strip() for part in half.decode().split("<|endoftext|>") if part.strip()]
                     for half in (raw[:cut], raw[cut:]))
    assert [part.strip() for part in documents] == first + second and not set(first) & set(second)
    assert 90_000 < len(raw) - cut < 110_000


def test_split_at_a_line_or_anywhere(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"line {i}\n" for i in range(50_000)), encoding="utf-8")
    cut, raw = train.split_point(path), path.read_bytes()
    assert raw[cut - 1:cut] == b"\n" and abs(len(raw) - cut - len(raw) // 10) < 100
    path.write_text("x" * 5000, encoding="utf-8")
    assert train.split_point(path) in (4500, 4501)


def test_split_is_as_near_as_can_be_to_what_is_wanted(tmp_path):
    """By all cuts that there are, in small texts of all kinds."""
    path, rng = tmp_path / "text.txt", random.Random(0)
    for pieces in (["a", "\n", "bc d", "\n<|endoftext|>\n", "é"], ["a", "b ", "\n"], ["é", "猫", "a"], ["é"],
                   ["a", "\n", "\n \n"], ["\u2010", "À", "a"]):     # the byte 128 in two places
        for _ in range(40):
            raw = "".join(rng.choices(pieces, weights=range(len(pieces), 0, -1), k=rng.randint(1, 3000))).encode()
            path.write_bytes(raw)
            wanted, low = len(raw) - len(raw) // 10, len(raw) - len(raw) // 10
            separators = [low + match.end() for match in SEPARATOR.finditer(raw[low:])]
            for kind in (separators, [i + 1 for i in range(len(raw)) if raw[i] == 10], [i + 1 for i in range(len(raw)) if raw[i] < 128]):
                kind = [cut for cut in kind if cut > low and raw[cut:].strip()]
                if kind:
                    break
            found = train.split_point(path)
            assert abs(found - wanted) == min((abs(cut - wanted) for cut in kind), default=0), raw


def test_a_cut_leaves_something_behind_it(tmp_path):
    """Where what is wanted, the last 100 kB, is only the white space at the end, or begins with the last byte
    before it: the cut is then the last one that leaves a byte."""
    path, wanted = tmp_path / "text.txt", 1_100_000
    for line, sizes in (b"a", (-3, -1, 0, 1, 2)), (b"abc\n", (-8, -3, -2, -1, 0, 1, 2, 3, 7)):
        for more in sizes:
            text = (line * 300_000 if line == b"abc\n" else line * 1_200_000)[:wanted + more].rstrip()
            raw = text.ljust(1_200_000)
            path.write_bytes(raw)
            cuts = [cut for cut in range(wanted - 20, len(text)) if raw[cut - 1:cut] == line[-1:]]
            assert train.split_point(path) == min(cuts, key=lambda cut: abs(cut - wanted)), (line, more)


def test_split_of_a_long_line_and_of_many_lines_takes_no_longer_than_reading_them(tmp_path):
    """Once these took hours and minutes; now a second.  The limit only ends a hang."""
    program = "import sys; sys.path.insert(0, sys.argv[1]); import train; print(train.split_point('text.txt'))"
    for text in "x" * 50_000_000, "so many lines\n" * 5_000_000:
        (tmp_path / "text.txt").write_text(text)
        done = subprocess.run([sys.executable, "-c", program, ROOT], cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert abs(len(text) - int(done.stdout) - len(text) // 100) < 20, done.stderr


def tokens_of(paths, folder, monkeypatch, vocab=400):
    """prepare -> (tokenizer, documents to train on, {kind: documents held out}), the texts decoded."""
    monkeypatch.chdir(folder)
    tokenizer, tokens, val, _ = train.prepare(paths, vocab)

    def documents(ids):
        return [text.strip("\n") for text in tokenizer.decode(ids.tolist()).split("<|endoftext|>") if text]
    return tokenizer, documents(tokens), {name: documents(ids) for name, ids in val.items()}


def test_what_is_held_out_is_not_trained_on(tmp_path, monkeypatch):
    """Every document of two kinds is in one part, whole, once; of each kind its last ones are held out, under its name; and
    the tokenizer has learned from nothing that is held out."""
    texts = {"books_a.txt": [f"book {i} " + "the old house " * 60 for i in range(60)],
             "books_b.txt": [f"tome {i} " + "a new garden " * 60 for i in range(40)],
             "web_x.txt": [f"page {i} " + "some other words " * 40 for i in range(50)]}
    for name in texts:
        texts[name][-3:] = [f"{text} qxqxqxqx" for text in texts[name][-3:]]
        (tmp_path / name).write_text("\n\n<|endoftext|>\n\n".join(texts[name]))
    tokenizer, trained, held_out = tokens_of(list(texts), tmp_path, monkeypatch)
    everything = [text for name in texts for text in texts[name]]
    unseen = [*held_out["books"], *held_out["web"]]
    assert sorted(trained + unseen) == sorted(everything) and len(set(everything)) == len(everything)
    assert set(held_out) == {"books", "web"} and all(text.startswith("page") for text in held_out["web"])
    for name in texts:
        last = [text for text in unseen if text in texts[name]]
        assert 3 <= len(last) <= 10 and last == texts[name][-len(last):]
    assert not any(b"qx" in token for token in tokenizer.tokens)


@pytest.mark.skipif(not os.path.isdir(DATA), reason="the real texts that this test reads are no part of the repository")
def test_no_real_document_is_in_both_parts(tmp_path):
    path = tmp_path / "web.txt"
    path.write_bytes(lzma.open(os.path.join(DATA, "web_techdocs.txt.xz")).read())
    cut, raw = train.split_point(path), path.read_bytes()
    parts = [[text.strip() for text in half.split(b"\n<|endoftext|>\n") if text.strip(b"\n")] for half in (raw[:cut], raw[cut:])]
    whole = [text.strip() for text in raw.split(b"\n\n<|endoftext|>\n\n")]
    assert set(parts[0]).isdisjoint(parts[1]) and sum(map(len, parts)) == len(whole)
    assert 0.005 < 1 - cut / len(raw) < 0.02


def test_a_tokenizer_sample_is_spread_over_all_parts():
    parts = [("a", 0, 300_000_000), ("b", 5_000_000, 6_500_000), ("c", 0, 900_000_000)]
    pieces = train.tokenizer_sample(parts)
    assert abs(sum(end - start for _, start, end in pieces) / 100_000_000 - 1) < 0.03
    for name, start, end in parts:
        inside = [piece for piece in pieces if piece[0] == name]
        assert all(start <= a < b <= end for _, a, b in inside)
        assert inside[0][1] == start and end - inside[-1][1] < 13_000_000
    assert train.tokenizer_sample(parts[1:2]) == parts[1:2]


def test_parts_of_a_tokenizer_sample_need_not_begin_at_a_power_of_two():
    """Their lengths are differences."""
    assert train.tokenizer_sample([("a", 3_000_000, 5_000_000)], 2_000_000) == [("a", 3_000_000, 5_000_000)]
    assert train.tokenizer_sample([("a", 2_999_999, 5_000_000)], 2_000_000) != [("a", 2_999_999, 5_000_000)]


def test_a_tokenizer_reads_a_hundred_million_bytes_and_no_more():
    """All of just as many; of one more pieces of a megabyte, as far apart as makes so many of them."""
    whole = [("a", 0, 40_000_000), ("b", 5, 60_000_005)]
    assert train.tokenizer_sample(whole) is whole
    assert train.tokenizer_sample([*whole, ("c", 0, 1)]) == [
        *[("a", place, place + 1_000_000) for place in range(0, 40_000_000, 1_000_000)],
        *[("b", place, place + 1_000_000) for place in range(5, 60_000_005, 1_000_000)], ("c", 0, 1)]
    assert train.tokenizer_sample([("a", 0, 250_000_000)]) == [
        ("a", place, place + 1_000_000) for place in range(0, 250_000_000, 2_500_000)]
    assert train.tokenizer_sample([("a", 0, 5_000_000)], 2_500_000) == [
        ("a", 0, 1_000_000), ("a", 2_000_000, 3_000_000), ("a", 4_000_000, 5_000_000)]


def test_validation_by_kind():
    assert [train.kind_of(path) for path in ("data/books_00.txt", "web_wikipedia.txt", "data/python-3.11.txt", "7.txt", "Play")] == [
        "books", "web", "python", "7", "play"]
    model = model_cpu.Model(model_cpu.CONFIGS["small"], 0, np.float32)
    rng, tokenizer = np.random.default_rng(0), Tokenizer.train(["some text"], 512)
    val = {"books": rng.integers(0, 256, 5000).astype("<u2"), "web": rng.integers(0, 256, 3000).astype("<u2"),
           "none": np.zeros(3, "<u2")}
    training = training_of(model, tokenizer, types.SimpleNamespace(micro_batch=4))
    whole, some = (train.validate(training, val, most) for most in (1 << 20, 1024))
    assert set(whole["val"]) == {"books", "web"}
    expected, T = {}, 128
    for name in whole["val"]:               # every window side by side, each token a byte
        n = (len(val[name]) - 4) // T
        starts = [i * ((len(val[name]) - 4) // n) for i in range(n)]
        expected[name] = n, np.mean([model.forward(*train.get_batch(val[name], [start], T, 4))[0] for start in starts])
        assert abs(whole["val"][name][0] - expected[name][1]) < 1e-5
        assert abs(whole["val"][name][1] - expected[name][1] / np.log(2)) < 1e-5
    mean = sum(n * loss for n, loss in expected.values()) / sum(n for n, _ in expected.values())
    assert abs(whole["val_loss"] - mean) < 1e-5
    # bits a byte are those of the targets: an input of four bytes before a target of one, and so on
    tokenizer = Tokenizer.train(["abab" * 99], 512)
    pair, = [i for i, token in enumerate(tokenizer.tokens) if token == b"abab"]
    ids = np.full(133, pair, "<u2")
    ids[1:] = 65
    window, = train.even_windows(ids, 128, 4, 4, 1 << 20, train.Ranks())
    _, counted, size = train.held_out_sums(training_of(model, tokenizer), [window])
    assert (counted, size) == (128, 128) and len(tokenizer.tokens[pair]) == 4
    assert some["val"] != whole["val"] and abs(some["val_loss"] - whole["val_loss"]) < 0.1
    assert train.validate(training, {"none": val["none"]}, 1 << 20) == {}


def test_two_preparations_at_once_make_the_same_files(tmp_path):
    words = random.Random(0).choices(["alpha", "beta", "gamma", "delta"], k=300_000)
    for name in "web_a", "web_b":
        (tmp_path / f"{name}.txt").write_text(name + " ".join(words))
    program = ("import sys; sys.path.insert(0, sys.argv[1]); import train; _, tokens, val, key = train.prepare(sys.argv[2:], 300);"
               "print(key, len(tokens), int(tokens.astype(int).sum()), {kind: len(part) for kind, part in val.items()})")
    both = [subprocess.Popen([sys.executable, "-c", program, ROOT, "web_a.txt", "web_b.txt"], cwd=tmp_path, text=True,
                             stdout=subprocess.PIPE) for _ in range(2)]
    first, second = [process.communicate(timeout=600)[0].splitlines()[-1] for process in both]
    assert first == second and "'web'" in first
    os.rename(tmp_path / "web_b.txt", tmp_path / "books_b.txt")         # the same text, but of another kind
    again = subprocess.run([sys.executable, "-c", program, ROOT, "web_a.txt", "books_b.txt"], cwd=tmp_path, text=True,
                           capture_output=True, timeout=600).stdout.splitlines()[-1]
    assert again.split()[0] != first.split()[0] and again.split()[1:3] == first.split()[1:3] and "'books'" in again


def test_a_small_corpus_caps_the_steps_of_the_large_models(capsys):
    args = train.parse_arguments(["big", "--device", "cpu"])
    s = train.make_settings(train.given_options(args), "big", model_cpu.CONFIGS["big"], train.DEFAULTS["big"], train.Ranks())
    steps, warmup = s.steps, s.warmup
    train.cap_steps(train.given_options(args), s, 10**12)
    assert (s.steps, s.warmup) == (steps, warmup) and not capsys.readouterr().out
    train.cap_steps(train.given_options(args), s, 1_000_000)
    assert s.steps == 4 * 1_000_000 // s.batch_tokens and s.warmup == s.steps // 10
    assert "1,000,000 tokens are few" in capsys.readouterr().out
    args = train.parse_arguments(["big", "--device", "cpu", "--steps", "4000"])
    s = train.make_settings(train.given_options(args), "big", model_cpu.CONFIGS["big"], train.DEFAULTS["big"], train.Ranks())
    train.cap_steps(train.given_options(args), s, 1_000_000)
    assert s.steps == 4000


def test_python_corpus(tmp_path):
    path = str(tmp_path / "python.txt")
    train.write_python_corpus(path, "<|endoftext|>")
    with open(path, encoding="utf-8") as file:
        paragraphs = [text for text in file.read().split("\n\n") if text != "<|endoftext|>"]
    assert os.path.getsize(path) > 1_000_000
    assert len(paragraphs) == len(set(paragraphs)) > 5000


# -- resume (tests/test_attack.py has kills, signals and full disks) -----------------------------------------------------
def test_resume_refuses(corpus):
    folder, _ = corpus
    for arguments, words in ([["--out", "out/nowhere"], "nothing to resume"], [["--out", "out/whole", "--lr", "1"], "--lr"],
                             [["--out", "out/whole", "--threads", "1"], "--threads"],
                             [["medium", "--out", "out/whole"], "the preset"],
                             [["--out", "out/whole", "--data", "other.txt"], "--data"]):
        done = run(folder, "--resume", *arguments)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    done = run(folder, "--resume", "--out", "out/whole")
    assert done.returncode == 0 and "finished" in done.stdout


def test_a_checkpoint_of_the_first_version_goes_on_with_the_same_losses(tiny, tmp_path):
    """Its settings name the kind of attention and no optimizer, which was AdamW; and its files do not say which
    config.json is theirs."""
    tiny(*TINY, "--out", "out/whole", "--optimizer", "adamw")
    tiny(*TINY, "--out", "out/first", "--optimizer", "adamw", stop_at=7)
    with open("out/first/config.json", "rb") as file:
        assert json.load(file)["hidden_size"] == 16
    for name in ("model.safetensors", "train_state.safetensors"):
        path = os.path.join("out/first", name)
        tensors, metadata = checkpoint.read_safetensors(path)
        tensors = {name: tensor.copy() for name, tensor in tensors.items()}
        del metadata["config"], metadata["crc32"]
        if "state" in metadata:
            state = json.loads(metadata["state"])
            state["settings"]["attention"] = "flash"
            assert state["settings"].pop("optimizer") == "adamw"
            metadata["state"] = json.dumps(state)
        checkpoint.write_safetensors(path, tensors, metadata)
    assert "Resuming out/first at step 7 of 12." in tiny("--resume", "--out", "out/first")
    assert read_log(tmp_path, "out/first") == read_log(tmp_path, "out/whole")
    state = checkpoint.load_state("out/first")
    assert "attention" not in state["settings"] and state["settings"]["optimizer"] == "adamw"
    assert state["tokens"] == 12 * 64
    assert "config" in checkpoint.read_safetensors("out/first/model.safetensors")[1]


def test_sizes_reach_the_model_and_the_checkpoint(tiny):
    """Each option by itself, in place of the preset's; with --dim alone what follows from it follows."""
    few = ["--data", "tiny.txt", "--steps", "1", "--micro-batch", "1", "--threads", "1"]
    small = model_cpu.CONFIGS["small"]
    for number, (options, changed) in enumerate([
            (["--vocab", "264"], {"vocab": 264}),
            (["--vocab", "264", "--dim", "64"], {"vocab": 264, "dim": 64, "hidden": 176}),
            (["--vocab", "264", "--heads", "8"], {"vocab": 264, "heads": 8}),
            (["--vocab", "264", "--kv-heads", "4"], {"vocab": 264, "kv_heads": 4}),
            (["--vocab", "264", "--layers", "1"], {"vocab": 264, "layers": 1}),
            (["--vocab", "264", "--context", "100"], {"vocab": 264, "context": 100})]):
        config = dataclasses.replace(small, **changed)
        said = tiny(*few, *options, "--out", f"out/{number}", "--batch-tokens", str(config.context))
        assert f"small: {model_cpu.param_count(config):,} parameters, 1 steps" in said
        model, tokenizer = checkpoint.load(f"out/{number}", model_cpu)
        assert model.config == config and model.step == 1 and tokenizer.vocab_size == 264
        found = json.loads(open(f"out/{number}/config.json").read())
        for key, name in (("hidden_size", "dim"), ("intermediate_size", "hidden"), ("vocab_size", "vocab"),
                          ("num_attention_heads", "heads"), ("num_key_value_heads", "kv_heads"),
                          ("num_hidden_layers", "layers"), ("max_position_embeddings", "context")):
            assert found[key] == getattr(config, name)


def test_a_context_that_does_not_divide_the_tokens_of_a_step(tiny):
    """Of a default batch as many windows are taken as fit; one that was asked for is refused."""
    few = [*TINY[:12], "--context", "100", "--vocab", "272", "--steps", "1", "--threads", "1"]
    assert "1 steps of 2,000 tokens" in tiny(*few)
    assert checkpoint.load_state("out/small")["settings"]["batch_tokens"] == 2000
    with pytest.raises(ValueError, match="^--batch-tokens 2048 is not a multiple of the context, 100.$"):
        tiny(*few, "--batch-tokens", "2048")


def test_a_resumed_run_keeps_its_sizes(tiny, tmp_path):
    tiny(*TINY, "--out", "out/whole")
    tiny(*TINY, "--out", "out/half", stop_at=6)
    sizes = {"dim": 16, "heads": 2, "kv-heads": 1, "layers": 1, "context": 16, "vocab": 272}
    for name, value in sizes.items():
        with pytest.raises(ValueError) as error:
            tiny("--resume", "--out", "out/half", f"--{name}", str(2 * value))
        assert str(error.value) == (
            f"the run in out/half has --{name} {value}, not {2 * value}: a resumed run keeps its settings. "
            "Leave the option out, or start a new run with --out.")
    same = [f"--{name}={value}" for name, value in sizes.items()]
    assert "Resuming out/half at step 6 of 12." in tiny("--resume", "--out", "out/half", *same)
    assert read_log(tmp_path, "out/half") == read_log(tmp_path, "out/whole")


def test_a_finished_run_is_given_more_steps(tiny, tmp_path):
    """They are counted on, the schedule is that of a run of so many from there on, and it is said aloud."""
    tiny(*TINY, "--lr", "0.01", "--warmup", "3", "--out", "out/run")
    done = read_log(tmp_path, "out/run")
    for options in [], ["--steps", "12"]:
        assert tiny("--resume", "--out", "out/run", *options) == (
            "The run in out/run is finished: 12 steps (--steps takes more).\n")
    with pytest.raises(ValueError, match="^the run in out/run has --steps 12, not 11: a resumed run "):
        tiny("--resume", "--out", "out/run", "--steps", "11")
    said = tiny("--resume", "--out", "out/run", "--steps", "40", stop_at=20)
    settings = train.Settings(**checkpoint.load_state("out/run")["settings"])
    rates = [train.learning_rate(step, settings) for step in range(40)]
    assert settings.steps == 40 and rates[12] == 0.01 * (0.1 + 0.45 * (1 + math.cos(math.pi * 9 / 36)))
    assert said.startswith(
        "The run in out/run was finished after 12 steps; it goes on to 40.  The learning rate "
        f"rises from 1.00e-03 to {rates[12]:.2e}, by a new schedule.\n"
        "Resuming out/run at step 12 of 40.\n")
    # it is now an unfinished run of 40 steps: it goes on, but not to another number of them
    for steps in ("12", "20", "39", "41"):
        with pytest.raises(ValueError, match=f"^the run in out/run has --steps 40, not {steps}: a resumed"):
            tiny("--resume", "--out", "out/run", "--steps", steps)
    said = tiny("--resume", "--out", "out/run", "--steps", "40")
    assert said.startswith("Resuming out/run at step 20 of 40.\n")
    log = read_log(tmp_path, "out/run")
    assert log[:len(done)] == done
    steps = [record for record in log if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 41))
    assert [record["lr"] for record in steps[12:]] == rates[12:] and steps[11]["lr"] == pytest.approx(0.001)
    assert all(a > b for a, b in zip(rates[12:], rates[13:])) and rates[-1] == pytest.approx(0.001)
    assert [record["step"] for record in log if "val_loss" in record] == [5, 10, 12, 15, 20, 25, 30, 35, 40]
    assert [record["tokens"] for record in steps] == [64 * step for step in range(1, 41)]
    assert checkpoint.load_state("out/run")["tokens"] == 40 * 64
    assert (tmp_path / "out/run/log.jsonl").read_text().count("\n") == len(log)


def test_a_run_that_is_not_finished_gets_no_other_steps(tiny, tmp_path):
    tiny(*TINY, "--out", "out/half", stop_at=11)
    for steps in ("11", "13", "100"):
        with pytest.raises(ValueError, match=f"^the run in out/half has --steps 12, not {steps}: a resumed "):
            tiny("--resume", "--out", "out/half", "--steps", steps)
    assert "12 steps, 768 tokens" in tiny("--resume", "--out", "out/half", "--steps", "12")


def test_an_extended_run_killed_before_its_first_save_is_the_finished_one(tiny, tmp_path):
    """And given as many steps again, it is the same as one that nobody killed."""
    tiny(*TINY, "--out", "out/run")
    shutil.copytree("out/run", "out/whole")
    tiny("--resume", "--out", "out/whole", "--steps", "15")
    with pytest.MonkeyPatch.context() as patch:
        def die(*rest):
            raise KeyboardInterrupt
        patch.setattr(train, "save_run", die)
        with pytest.raises(KeyboardInterrupt):
            tiny("--resume", "--out", "out/run", "--steps", "15")
    assert "finished: 12 steps" in tiny("--resume", "--out", "out/run")
    tiny("--resume", "--out", "out/run", "--steps", "15")
    assert read_log(tmp_path, "out/run") == read_log(tmp_path, "out/whole")


def test_the_last_evaluation_reads_all(tiny, monkeypatch):
    """On the way at most EVAL_TOKENS of each kind; at the end everything, where that is more."""
    with open("tiny.txt", "a") as file:
        file.write("the dog sat on the rug and the cat lay on the mat. " * 500)
    monkeypatch.setattr(train, "EVAL_TOKENS", 32)
    said = tiny(*TINY)
    held_out = int(re.search(r"to train on, ([0-9,]+) to validate", said)[1].replace(",", ""))
    assert held_out > 1000 and re.search(r"\n           on all that is held out [0-9.]+, [0-9.]+ bits/byte\n", said)
    log = [json.loads(line) for line in open("out/small/log.jsonl")]
    assert [record["step"] for record in log if "all" in record] == [12]
    model, tokenizer = checkpoint.load("out/small", model_cpu, {"dtype": np.float32})
    val = train.prepare(["tiny.txt"], 272)[2]
    loss = train.validate(training_of(model, tokenizer, types.SimpleNamespace(micro_batch=4)), val, math.inf)["val_loss"]
    assert log[-1]["all"]["val_loss"] == pytest.approx(loss, rel=1e-5)
    monkeypatch.setattr(train, "EVAL_TOKENS", 1 << 16)
    assert "held out" not in tiny(*TINY)


def test_the_first_step_is_said_where_there_is_no_terminal(tiny):
    """So that one knows at once that it runs, and how fast; then every tenth, and the last."""
    said = re.findall(r"^step +([0-9]+)/12  loss", tiny(*TINY), re.MULTILINE)
    assert list(map(int, said)) == [1, 5, 10, 12]           # 5 and 12 because of the evaluation


def test_a_new_run_sets_the_old_one_aside(corpus):
    folder, whole = corpus
    for _ in range(2):
        assert run(folder, "--data", "corpus.txt", "--out", "out/twice", *QUICK).returncode == 0
    assert read_log(folder, "out/twice") == read_log(folder, "out/twice.1") == whole


# -- bad input ---------------------------------------------------------------------------------------------------------
def test_bad_input_is_one_sentence(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "binary.txt").write_bytes(b"\x7fELF\0\0\0" * 99)
    (tmp_path / "short.txt").write_text("only a few words")
    (tmp_path / "file").write_text("")
    (tmp_path / "good.txt").write_text("words and more words, again and again. " * 500)
    cases = [(["--data", "missing.txt"], "missing.txt"), (["--data", "empty.txt"], "empty.txt is empty"),
             (["--data", "binary.txt"], "binary"), (["--data", "short.txt"], "too short"),
             (["--data", "good.txt", "--out", "file/out"], "file/out"), (["--data", "good.txt", "--batch-tokens", "100"], "100"),
             (["--steps", "0"], "at least 1"), (["--lr", "nan"], "above 0"), (["--nonsense"], "nonsense"),
             (["tiny"], "tiny"), (["--plot", "nowhere"], "nowhere")]
    for arguments, words in cases:
        done = run(tmp_path, *arguments)
        assert done.returncode == 2 and "Traceback" not in done.stderr and words in done.stderr, (arguments, done.stderr)
    assert not (tmp_path / "out").exists()


def test_not_finite_stops_and_names_the_tensor(tmp_path):
    (tmp_path / "good.txt").write_text("words and more words, again and again. " * 500)
    done = run(tmp_path, "--data", "good.txt", "--lr", "1e30", *QUICK)
    assert done.returncode == 1 and "first gradient that is not finite is embed" in done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    losses = [record["loss"] for record in read_log(tmp_path) if "loss" in record]
    assert len(losses) < 30 and np.isfinite(losses).all()


def test_invalid_utf8_is_no_error(tmp_path):
    raw = random.Random(0).randbytes(3000).replace(b"\0", b"") + b"words and more words, again and again. " * 500
    (tmp_path / "bytes.txt").write_bytes(b"words \xff\xfe " * 1000 + raw)
    assert run(tmp_path, "--data", "bytes.txt", *QUICK, "--steps", "2").returncode == 0


def test_a_dry_run_needs_no_gpu_and_writes_nothing(tmp_path):
    done = run(tmp_path, "big", "--dry-run")
    assert done.returncode == 0 and "116,417,280" in done.stdout and not (tmp_path / "out").exists()


def test_a_separator_at_the_end_is_no_boundary(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"line {i}\n" for i in range(5000)) + "<|endoftext|>\n", encoding="utf-8")
    raw, cut = path.read_bytes(), train.split_point(path)
    assert raw[cut - 1:cut] == b"\n" and 0.08 < 1 - cut / len(raw) < 0.12


def test_a_folder_in_use_is_left_alone(corpus):
    folder, _ = corpus
    first = start(folder, "--data", "corpus.txt", "--out", "out/busy", *QUICK, "--steps", "100000")
    while not (folder / "out/busy/log.jsonl").exists() and first.poll() is None:
        time.sleep(0.01)
    second = run(folder, "--data", "corpus.txt", "--out", "out/busy", *QUICK)
    first.kill()
    first.communicate()
    assert second.returncode == 2 and "in use" in second.stderr and not (folder / "out/busy.1").exists()


# -- the log -----------------------------------------------------------------------------------------------------------
def write_log(folder, steps, tail=""):
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in steps]
    (folder / "log.jsonl").write_text("".join(lines) + tail)
    return "".join(lines)


def test_opening_a_log_cuts_it_and_writes_nothing_again(tmp_path, monkeypatch):
    """Killed at any moment the history is there: the file is never shorter than what is kept."""
    whole, real, sizes = write_log(tmp_path, range(1, 10)), open, []
    monkeypatch.setattr("builtins.open", lambda *a, **k: Spy(real(*a, **k)))

    class Spy:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            if name in ("write", "truncate", "writelines"):
                sizes.append((tmp_path / "log.jsonl").stat().st_size)
            return getattr(self.file, name)

        def __iter__(self):
            return iter(self.file)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()
    log = checkpoint.Log(str(tmp_path), 6)
    kept = "".join(whole.splitlines(keepends=True)[:6])
    assert len(sizes) == 1 and (tmp_path / "log.jsonl").read_text() == kept     # one truncation, and no write
    log.write(step=7, loss=2.0)
    assert (tmp_path / "log.jsonl").read_text() == kept + '{"step": 7, "loss": 2.0}\n'


def test_the_last_line_of_a_killed_run_is_dropped_and_what_is_missing_is_said(tmp_path, capsys):
    whole = write_log(tmp_path, range(1, 5), tail='{"step": 5, "lo')
    checkpoint.Log(str(tmp_path), 4)
    assert (tmp_path / "log.jsonl").read_text() == whole and not capsys.readouterr().out
    checkpoint.Log(str(tmp_path), 9)
    assert "no record of the steps 5 to 9" in capsys.readouterr().out
    checkpoint.Log(str(tmp_path), 0)
    assert (tmp_path / "log.jsonl").read_text() == ""


@pytest.mark.parametrize("line", ["5", "{}", "null", "", '{"step": "1"}', '{"step": 1.5}', "[" * 100_000, '{"step": 1', "\0"])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    write_log(tmp_path, range(1, 4))
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write(f'{line}\n{{"step": 4}}\n')
    before = (tmp_path / "log.jsonl").read_bytes()
    with pytest.raises(ValueError, match="log.jsonl, line 4, is no record of a run"):
        checkpoint.Log(str(tmp_path), 9)
    assert (tmp_path / "log.jsonl").read_bytes() == before


def test_a_held_out_loss_that_has_risen_is_said_once_with_the_best_step(tmp_path, monkeypatch, capsys):
    losses = {16: 3.5, 20: 3.0, 40: 2.9, 60: 2.9 + checkpoint.RISE - 1e-3, 80: 3.1, 100: 2.95, 120: 4.0}
    s = recorder_settings("--steps", "90", "--eval-every", "20", "--save-every", "1000")
    run_recorder(tmp_path, monkeypatch, Recorder(), s, lambda step: {"val_loss": losses.get(step, 3.2)})
    printed = capsys.readouterr().out
    assert printed.count("the held-out loss was best at step 40, 2.9000, and rises") == 1
    s.steps, model = 120, Recorder()
    model.step = 90                                 # and a resumed run does not say it again
    run_recorder(tmp_path, monkeypatch, model, s, lambda step: {"val_loss": losses[step]})
    assert "and rises" not in capsys.readouterr().out


def test_a_loss_has_risen_by_more_than_what_means_something(tmp_path):
    """Not by just so much; once; and the best is the first of equal ones."""
    log = checkpoint.Log(str(tmp_path), 0)
    said = [log.write(step=step, val_loss=loss) for step, loss in enumerate(
        [1.5, 1.0, 1.0, 1.0 + checkpoint.RISE, 1.0 + checkpoint.RISE + 1e-9, 2.0, 0.5, 1.0], 1)]
    assert said == [False] * 4 + [True] + [False] * 3 and log.best == (0.5, 7)
    again = checkpoint.Log(str(tmp_path), 3)
    assert again.best == (1.0, 2) and again.write(step=4, val_loss=1.5)
    assert not again.write(step=5, loss=9.0) and not again.write(step=6, val_loss=None)


def test_small_reads_a_short_text_eight_times_at_most(capsys):
    args = train.parse_arguments([])
    s = train.make_settings(train.given_options(args), "small", model_cpu.CONFIGS["small"], train.DEFAULTS["small"], train.Ranks())
    train.cap_steps(train.given_options(args), s, 8 * 2048 * 125)
    assert s.steps == 800 and s.warmup == 40 and not capsys.readouterr().out
    train.cap_steps(train.given_options(args), s, 40 * 2048)
    assert s.steps == 320 and s.warmup == 32 and "read them 8 times" in capsys.readouterr().out
    train.cap_steps(train.given_options(args), s, 200)                   # not even one step has so few: one is made all the same
    assert s.steps == 1


# -- the progress line -------------------------------------------------------------------------------------------------
WHOLE = ["step 12000/48000", "loss 10.1234", "4.564 bits/byte", "1:02:03 left", " 620,123 tokens/s", "norm 100.12", "lr 1.25e-03"]


def test_the_progress_line_fits_the_terminal(monkeypatch, capsys):
    """What matters less stands last, and is left out where it does not fit: whole, or not at all."""
    flushed = []
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for columns in range(10, 140):
        monkeypatch.setenv("COLUMNS", str(columns))
        for last in (False, True):
            with monkeypatch.context() as patch:                # no line end sends it to the screen
                patch.setattr(sys.stdout, "flush", lambda: flushed.append(columns), raising=False)
                train.print_step(12000, [*WHOLE], last)
            assert flushed.pop() == columns
            fit = max(n for n in range(1, len(WHOLE) + 1) if n == 1 or len("  ".join(WHOLE[:n])) < columns)
            assert capsys.readouterr().out == "\r" + "  ".join(WHOLE[:fit]) + "\x1b[K" + "\n" * last
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    train.print_step(12000, [*WHOLE], True)
    assert capsys.readouterr().out == "  ".join(WHOLE) + "\n"


def test_which_steps_are_said_where_there_is_no_terminal(monkeypatch, capsys):
    """At once: who reads a pipe or a file sees them as they come."""
    said, flushed = [], []
    for step in (1, 2, 9, 10, 11, 20, 101, 110):
        with monkeypatch.context() as patch:
            patch.setattr(sys.stdout, "flush", lambda: flushed.append(step), raising=False)
            train.print_step(step, WHOLE, False)
        said += [step] * capsys.readouterr().out.count("\n")
    assert said == flushed == [1, 10, 20, 110]


@pytest.mark.parametrize("seconds, words", [(0, "00:00"), (61.9, "01:01"), (3599, "59:59"), (3600, "1:00:00"), (86399, "23:59:59"),
                                            (86400, "1 day, 0:00:00"), (86400 * 2.5, "2 days, 12:00:00")])
def test_time_left(tmp_path, monkeypatch, capsys, seconds, words):
    """After the first of two steps, which took so long."""
    s = recorder_settings("--steps", "2", "--save-every", "9")
    clock = iter([0.0, seconds or 1e-9])
    monkeypatch.setattr(train.time, "monotonic", lambda: next(clock))
    training = training_of(Recorder(), None, s, str(tmp_path), {"tokens": 0, "seconds": 0.0})
    train.Report(training, train.Job(None, None, 1.0))(1, 1e-3, np.ones(2), 0.5, pause=True)
    assert f"  {words} left  " in capsys.readouterr().out


# -- signals, and folders in use ---------------------------------------------------------------------------------------
def test_stop_leaves_alone_what_is_ignored(monkeypatch):
    """SIGHUP under nohup, SIGINT in a background job of a script."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop = train.Stop()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and stop.signal is None
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_folder_is_taken_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    umask = os.umask(0)
    try:
        checkpoint.lock_folder("out/a")
    finally:
        os.umask(umask)
    assert os.stat("out/.a.lock").st_mode & 0o777 == 0o666          # who shares the folder takes turns by it, too
    program = "import sys; sys.path.insert(0, sys.argv[1]); import checkpoint; checkpoint.lock_folder(sys.argv[2])"
    os.symlink("a", "out/link")
    for name, free in ("out/a", False), ("./out/a/", False), ("out/link", False), ("out/b", True):
        done = subprocess.run([sys.executable, "-c", program, ROOT, name], capture_output=True, text=True)
        assert (done.returncode == 0) == free and ("is in use by another run" in done.stderr) != free
    os.rename("out/a", "out/c")
    checkpoint.set_aside("out/a")                        # nothing there: nothing to do
    os.makedirs("out/a")
    checkpoint.set_aside("out/a")                        # empty: likewise
    assert sorted(os.listdir("out")) == [".a.lock", ".b.lock", "a", "b", "c", "link"]
    open("out/a/log.jsonl", "w").close()
    os.makedirs("out/a.1")
    checkpoint.set_aside("out/a")
    assert sorted(os.listdir("out"))[2:] == ["a.1", "a.2", "b", "c", "link"] and os.listdir("out/a.2") == ["log.jsonl"]


def test_damaged_tokens_are_named(corpus):
    """Ids are read by name, from a file that was made before: what was altered since must not be learned."""
    folder, whole = corpus
    made, = [name for name in os.listdir(folder / "data") if name.startswith("train-") and name.endswith(".bin")]
    raw = (folder / "data" / made).read_bytes()
    try:
        for altered in (b"\xff\xff" + raw[2:], raw[:-2], raw + b"\0\0", raw[:-1], b""):
            (folder / "data" / made).write_bytes(altered)
            done = run(folder, "--data", "corpus.txt", "--out", "out/damaged", *QUICK)
            assert done.returncode == 2 and f"data/{made} is damaged: its checksum is wrong" in done.stderr, done.stderr
            assert done.stderr.count("\n") == 1
    finally:
        (folder / "data" / made).write_bytes(raw)


@pytest.mark.parametrize("name, value", [("steps", 0), ("steps", "3"), ("steps", True), ("lr", "x"), ("lr", float("nan")), ("lr", -1.0),
                                         ("seed", -1), ("preset", None), ("data", "x"), ("data", [1]), ("threads", 1.5),
                                         ("memory_limit", -5), ("eval_every", 0)])
def test_settings_that_cannot_be(name, value):
    with pytest.raises(ValueError, match=f"the setting {name} cannot be"):
        dataclasses.replace(recorder_settings(), **{name: value})
