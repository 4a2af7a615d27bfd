"""train.py: batches as a pure function, the held-out part, exact resume after every kind of death, bad input."""
import json
import lzma
import os
import random
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import model_cpu
import train
from tokenizer import Tokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DATA = os.path.join(ROOT, "..", "shared", "data")
QUICK = ["--batch-tokens", "256", "--steps", "30", "--eval-every", "15", "--save-every", "1", "--threads", "2"]


def run(folder, *arguments, **options):
    return subprocess.run([sys.executable, os.path.join(ROOT, "train.py"), *arguments], cwd=folder, text=True,
                          capture_output=True, timeout=120, **options)


def start(folder, *arguments):
    return subprocess.Popen([sys.executable, os.path.join(ROOT, "train.py"), *arguments], cwd=folder, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def read_log(folder, out="out/small"):
    """The log without the seconds, which no run repeats."""
    with open(os.path.join(folder, out, "log.jsonl"), encoding="utf-8") as file:
        return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in file]


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


def test_too_short_for_one_window():
    with pytest.raises(ValueError, match="19 tokens, fewer than the 20"):
        train.window_count(19, 16, 4)


def test_schedule():
    args = train.parse_arguments(["--steps", "100", "--lr", "1", "--warmup", "10", "--device", "cpu"])
    s = train.make_settings(args, "small", train.CONFIGS["small"], train.DEFAULTS["small"])
    rates = [train.learning_rate(step, s) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and abs(rates[-1] - 0.1) < 1e-12
    assert all(a > b for a, b in zip(rates[10:], rates[11:]))


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


@pytest.mark.skipif(not os.path.isdir(DATA), reason="../shared/data is not there")
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


def test_validation_by_kind():
    assert [train.kind(path) for path in ("data/books_00.txt", "web_wikipedia.txt", "data/python-3.11.txt", "7.txt", "Play")] == [
        "books", "web", "python", "7", "play"]
    model = model_cpu.Model(model_cpu.CONFIGS["small"], 0, np.float32)
    rng, tokenizer = np.random.default_rng(0), Tokenizer.train(["some text"], 512)
    val = {"books": rng.integers(0, 256, 5000).astype("<u2"), "web": rng.integers(0, 256, 3000).astype("<u2"),
           "none": np.zeros(3, "<u2")}
    whole, some = (train.validate(model, tokenizer, val, 4, most) for most in (1 << 20, 1024))
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
    assert some["val"] != whole["val"] and abs(some["val_loss"] - whole["val_loss"]) < 0.1
    assert train.validate(model, tokenizer, {"none": val["none"]}, 4) == {}


def test_two_preparations_at_once_make_the_same_files(tmp_path):
    words = random.Random(0).choices(["alpha", "beta", "gamma", "delta"], k=300_000)
    for name in "web_a", "web_b":
        (tmp_path / f"{name}.txt").write_text(name + " ".join(words))
    program = ("import sys; sys.path.insert(0, sys.argv[1]); import train; _, tokens, val, key = train.prepare(sys.argv[2:], 300);"
               "print(key, len(tokens), int(tokens.astype(int).sum()), {kind: len(part) for kind, part in val.items()})")
    both = [subprocess.Popen([sys.executable, "-c", program, ROOT, "web_a.txt", "web_b.txt"], cwd=tmp_path, text=True,
                             stdout=subprocess.PIPE) for _ in range(2)]
    first, second = [process.communicate(timeout=60)[0].splitlines()[-1] for process in both]
    assert first == second and "'web'" in first
    os.rename(tmp_path / "web_b.txt", tmp_path / "books_b.txt")         # the same text, but of another kind
    again = subprocess.run([sys.executable, "-c", program, ROOT, "web_a.txt", "books_b.txt"], cwd=tmp_path, text=True,
                           capture_output=True, timeout=60).stdout.splitlines()[-1]
    assert again.split()[0] != first.split()[0] and again.split()[1:3] == first.split()[1:3] and "'books'" in again


def test_a_small_corpus_caps_the_steps_of_the_large_models(capsys):
    args = train.parse_arguments(["big", "--device", "cpu"])
    s = train.make_settings(args, "big", model_cpu.CONFIGS["big"], train.DEFAULTS["big"])
    steps, warmup = s.steps, s.warmup
    train.cap_steps(args, s, 10**12)
    assert (s.steps, s.warmup) == (steps, warmup) and not capsys.readouterr().out
    train.cap_steps(args, s, 1_000_000)
    assert s.steps == train.MOST_EPOCHS * 1_000_000 // s.batch_tokens and s.warmup == s.steps // 10
    assert "1,000,000 tokens are few" in capsys.readouterr().out
    args = train.parse_arguments(["big", "--device", "cpu", "--steps", "4000"])
    s = train.make_settings(args, "big", model_cpu.CONFIGS["big"], train.DEFAULTS["big"])
    train.cap_steps(args, s, 1_000_000)
    assert s.steps == 4000


def test_python_corpus(tmp_path):
    path = str(tmp_path / "python.txt")
    train.write_python_corpus(path)
    with open(path, encoding="utf-8") as file:
        paragraphs = [text for text in file.read().split("\n\n") if text != "<|endoftext|>"]
    assert os.path.getsize(path) > 1_000_000
    assert len(paragraphs) == len(set(paragraphs)) > 5000


# -- resume ------------------------------------------------------------------------------------------------------------
def test_killed_at_ten_moments_and_resumed_is_exact(corpus):
    folder, whole = corpus
    rng = random.Random(1)
    log, killed = folder / "out/killed/log.jsonl", 0
    process = start(folder, "--data", "corpus.txt", "--out", "out/killed", *QUICK)
    while killed < 10:
        before = log.read_bytes() if log.exists() else b""
        while process.poll() is None and (log.read_bytes() if log.exists() else b"") in (before, b""):
            time.sleep(0.005)                       # until it works; with a save every step, many blows fall into a save
        time.sleep(rng.uniform(0, 0.1))
        if process.poll() is not None:
            break
        process.kill()
        process.communicate()
        killed += 1
        process = start(folder, "--resume", "--out", "out/killed")
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    assert killed >= 5 and read_log(folder, "out/killed") == whole


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_saves_and_resumes(corpus, number):
    folder, whole = corpus
    out = f"out/asked{int(number)}"
    process = start(folder, "--data", "corpus.txt", "--out", out, *QUICK, "--save-every", "1000")
    log = folder / out / "log.jsonl"
    while (not log.exists() or log.read_text().count("\n") < 2) and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number, output
    assert "--resume" in output
    done = run(folder, "--resume", "--out", out)
    assert done.returncode == 0, done.stderr
    assert read_log(folder, out) == whole


def test_full_disk_keeps_the_last_checkpoint(corpus):
    folder, whole = corpus
    first = start(folder, "--data", "corpus.txt", "--out", "out/limited", *QUICK)
    while not (folder / "out/limited/log.jsonl").exists() and first.poll() is None:
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    first.communicate()
    # the "disk" is full from here on: no file may grow beyond 1 MiB, a quarter of a checkpoint
    done = run(folder, "--resume", "--out", "out/limited",
               preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)))
    assert done.returncode == 2 and done.stderr.startswith("error: Cannot use out/limited") and done.stderr.count("\n") == 1
    assert run(folder, "--resume", "--out", "out/limited").returncode == 0
    assert read_log(folder, "out/limited") == whole


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
             (["tiny"], "tiny"), (["--plot", "nowhere"], "nowhere"), (["medium", "--data", "good.txt"], "--device cpu")]
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
    assert run(tmp_path, "--data", "bytes.txt", *QUICK[:-2], "--steps", "2").returncode == 0


def test_dry_run_counts_what_the_engine_allocates(tmp_path):
    config, B, T = model_cpu.CONFIGS["small"], 3, 128
    model = model_cpu.Model(config, 0, np.float32)
    tokens = np.zeros((B, T), np.int64)
    model.forward(tokens, np.zeros((B, T + config.predict - 1), np.int64))
    model.backward()
    kept = sum(a.nbytes for buffers in [*model.slices[0].layers, model.slices[0].work] for a in buffers.arrays.values())
    plan = train.memory_plan(config, B, T, threads=1)
    assert abs(plan["activations"] / kept - 1) < 0.02
    assert plan["parameters"] == model.flat_params.nbytes
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
