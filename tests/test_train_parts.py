"""train.py function by function, in this process: corpus, tokens, evaluation, plans, settings, and every sentence."""
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import sys
import types

import numpy as np
import pytest

import checkpoint
import model_cpu
import model_gpu
import script
import train
from model_cpu import CONFIGS, Config
from tokenizer import Tokenizer
from train import Ranks

NO_GPU = "The GPU needs CuPy: run `make gpu` (or `pip install cupy-cuda12x`)."


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(model_gpu, "cupy", None)


def settings(*options, preset="small", config=None, **changes):
    config = config or CONFIGS[preset]
    args = train.parse_arguments(["--device", "cpu", *options])
    return train.make_settings(train.given_options(args), preset, config, {**train.DEFAULTS[preset], **changes}, Ranks())


def training_of(model, tokenizer=None, settings=None, out="out/x", **state):
    """A Training in one process."""
    state = {"script": "train.py", "tokens": 0, "seconds": 0.0, **state}
    return train.Training(model, tokenizer, settings, state, str(out), Ranks())


# -- defaults ----------------------------------------------------------------------------------------------------------
def test_defaults():
    """What was measured to be good, and what README and DESIGN name."""
    assert train.DEFAULTS == {
        "small": dict(steps=800, batch_tokens=2048, lr=4e-3, warmup=40, eval_every=200, save_every=200),
        "medium": dict(steps=4000, batch_tokens=8192, lr=3e-3, warmup=200, eval_every=500, save_every=500),
        "big": dict(steps=48000, batch_tokens=32768, lr=2.4e-3, warmup=300, eval_every=500, save_every=2000)}
    assert train.MOST_EPOCHS == {"small": 8, "medium": 4, "big": 4}
    assert (train.MOST_BATCH, checkpoint.RISE) == (16_777_216, 0.02)
    assert (train.EVAL_TOKENS, train.SAMPLE_TOKENS, train.PROMPTS) == (65536, 80, ("\n", "The", "What is"))
    s = settings()
    assert dataclasses.asdict(s) == dict(
        preset="small", steps=800, batch_tokens=2048, micro_batch=16, optimizer="muon", lr=4e-3, warmup=40, decay=0.1, clip=1.0, mtp_weight=0.3,
        seed=0, eval_every=200, save_every=200, threads=min(16, train.available_cores()), device="cpu", precision="fp32",
        matmul="cublas", memory_limit=None, data=None, tokens_key="")


# -- corpus ------------------------------------------------------------------------------------------------------------
def test_which_files_are_the_corpus(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "write_python_corpus", lambda path, separator: print("written", path))
    python = os.path.join("data", "python-{}.{}.txt".format(*sys.version_info))
    for preset in CONFIGS:
        assert train.find_corpus(preset) == [python]
        said = capsys.readouterr().out
        assert said == ("No corpus in data/ (./fetch_data.sh brings one): taking the English of Python.\n"
                        f"written {python}\n")
    os.mkdir("data")
    open(python, "w").close()
    assert train.find_corpus("big") == [python] and not capsys.readouterr().out         # it is there already
    for name in ("tiny.txt", "web_b.txt", "books.txt", "web_a.txt", "webs.md", "my_books.txt"):
        open(os.path.join("data", name), "w").close()
    large = [os.path.join("data", name) for name in ("books.txt", "web_a.txt", "web_b.txt")]
    assert train.find_corpus("big") == train.find_corpus("medium") == large
    assert train.find_corpus("small") == [os.path.join("data", "tiny.txt")]
    for path in large:
        os.remove(path)
    assert train.find_corpus("big") == [os.path.join("data", "tiny.txt")]


def test_docstrings_of_the_library(tmp_path, monkeypatch):
    files = {"a.py": '"""Module a."""\nclass C:\n  """Class C."""\n  def f(self):\n    """Method f."""\n    def g(): "inner"\n'
                     "def h(): pass\nasync def k(): 'async k'\n",
             "pkg/__init__.py": '"""Package."""', "pkg/b.py": "x = 1", "bad.py": "def", "latin.py": "#\xe9", "c.txt": '"""no"""',
             **{f"{name}/x.py": '"""skipped"""' for name in ("test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3")},
             "pkg/tests/y.py": '"""skipped"""'}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    monkeypatch.setattr(os, "__file__", str(tmp_path / "os.py"))
    assert list(script.python_docstrings()) == [
        [("a", "Module a."), ("a.C", "Class C."), ("a.C.f", "Method f."), ("a.C.f.g", "inner"), ("a.k", "async k")],
        [("pkg", "Package.")], []]


def test_prose_of_the_python_corpus(tmp_path, monkeypatch):
    import pydoc_data.topics
    prose = ["Forty characters of words, exactly so ok", "A second paragraph which is long enough to be kept here",
             "A third one,   with\n  lines that are joined and spaces squeezed: fine"]
    assert len(prose[0]) == 40
    code = "def f(x): return {x[0]: (x[1] + 2) * 3 for x in [(1, 2), (3, 4)]}"
    assert sum(c.isalpha() or c in " ,.;:'-" for c in code) <= 0.9 * len(code)
    monkeypatch.setattr(pydoc_data.topics, "topics", {"b": f"{prose[1]}\n \n{prose[0][:-1]}\n\n{code}", "a": f"{prose[0]}\n\n>>> {prose[2]}"})
    monkeypatch.setattr(script, "python_docstrings", lambda: [[("m", prose[2]), ("m.f", prose[0])], [("n", "short")]])
    script.write_python_corpus(str(tmp_path / "new" / "text.txt"), "<|endoftext|>")
    joined = "A third one, with lines that are joined and spaces squeezed: fine"
    assert (tmp_path / "new" / "text.txt").read_text() == "\n\n<|endoftext|>\n\n".join([prose[0], prose[1], joined])
    ninety = "x" * 45 + "1" * 5                                         # just 0.9 of it are letters: too few
    monkeypatch.setattr(pydoc_data.topics, "topics", {"a": ninety + "\n\n" + "x" * 46 + "1" * 5})
    monkeypatch.setattr(script, "python_docstrings", list)
    script.write_python_corpus(str(tmp_path / "text.txt"), "<|endoftext|>")
    assert (tmp_path / "text.txt").read_text() == "x" * 46 + "1" * 5


@pytest.mark.parametrize("size", [500, 900_000, 1_100_000, 9_900_000, 10_100_000, 399_000_000, 401_000_000, 800_000_000])
def test_how_much_is_held_out(tmp_path, size):
    """1%, at least 100 kB, at most 10% and 4 MB; of a file with holes, which reads as zeros."""
    with open(tmp_path / "zeros", "wb") as file:
        file.truncate(size)
    wanted = min(max(size // 100, 100_000), size // 10, 4_000_000)
    assert train.split_point(tmp_path / "zeros") == size - wanted + (wanted == size // 10)      # after a character


def test_a_file_without_lines_is_cut_after_any_ascii_character(tmp_path):
    for code in range(128):
        if not chr(code).isspace():
            (tmp_path / "text").write_bytes("é".encode() * 2400 + bytes([code]) + "é".encode() * 100)
            assert train.split_point(tmp_path / "text") == 4801, code


def test_a_cut_moves_by_a_tenth_or_32_megabytes_at_most(tmp_path):
    with open(tmp_path / "holes", "wb") as file:
        for place in (360_000_000, 367_900_000, 368_100_000):          # separators, in 400 MB
            file.seek(place)
            file.write(b"\n<|endoftext|>\n")
        file.truncate(400_000_000)
    assert train.split_point(tmp_path / "holes") == 368_100_000 + len("\n<|endoftext|>")


def test_bad_corpora(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("folder")
    for name, data in ("empty", b""), ("nul", b"a" * 8191 + b"\0"), ("late", b"a" * 8192 + b"\0"):
        open(name, "wb").write(data)
    train.check_corpus(["late"])
    for name, words in [("folder", "folder is not a file; --data takes text files."), ("none", "none is not a file; --data takes text files."),
                        ("empty", "empty is empty; there is nothing to learn from it."),
                        ("nul", "nul is a binary file (it holds NUL bytes); --data takes text files.")]:
        with pytest.raises(ValueError) as error:
            train.check_corpus(["late", name])
        assert str(error.value) == words


# -- tokens ------------------------------------------------------------------------------------------------------------
def test_progress(monkeypatch, capsys):
    clock = iter([100.0, 102.0, 102.0, 110.0])
    monkeypatch.setattr(script.time, "monotonic", lambda: next(clock))
    progress = train.show_progress("words:")
    progress(1_000_000, 10_000_000)
    progress(9_999_999, 10_000_000)
    assert capsys.readouterr().out == ""
    progress(10_000_000, 10_000_000)
    assert capsys.readouterr().out == "words: 10 MB, 1.0 MB/s, 10.0 s\n"
    clock = iter([100.0, 102.0, 110.0])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    progress = train.show_progress("words:")
    progress(1_000_000, 10_000_000)
    assert capsys.readouterr().out == "\rwords: 1 MB, 0.5 MB/s, 10%, 18 s left \033[K"
    progress(10_000_000, 10_000_000)
    assert capsys.readouterr().out == "\rwords: 10 MB, 1.0 MB/s, 100%, 0 s left \033[K\n"
    clock = iter([100.0, 102.0, 102.0])
    progress = train.show_progress("held out:", "thousand tokens", 1e3)
    progress(3_000_000, 4_000_000)
    assert capsys.readouterr().out == (
        "\rheld out: 3,000 thousand tokens, 1,500.0 thousand tokens/s, 75%, 1 s left \033[K")


def test_tokens_are_made_once_and_named_by_what_they_are_made_of(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "\n\n<|endoftext|>\n\n".join(f"document {i} of some words and more " * 800 for i in range(50))
    open("books.txt", "w").write(text)
    _, tokens, val, key = train.prepare(["books.txt"], 300)
    assert "Training a tokenizer of 300 tokens on books.txt.\n" in (said := capsys.readouterr().out)
    assert all(f"\n{what}" in said for what in ("words counted: 1 MB", "train tokens: 1 MB"))
    assert "val-books" not in said                          # less than a megabyte: done before anybody waits
    assert re.fullmatch("[0-9a-f]{12}", key) and set(val) == {"books"} and tokens.dtype == np.dtype("<u2")
    made = sorted(os.listdir("data"))
    assert [re.sub("[0-9a-f]{8,}", "*", name) for name in made] == ["prepare.lock", "tokenizer-300-*.json", "train-*-*.bin", "val-books-*-*.bin"]
    times = [os.stat(os.path.join("data", name)).st_mtime_ns for name in made[1:]]
    again = train.prepare(["books.txt"], 300)
    assert not capsys.readouterr().out and again[3] == key and np.array_equal(again[1], tokens)
    assert times == [os.stat(os.path.join("data", name)).st_mtime_ns for name in made[1:]]
    keys = {key, train.prepare(["books.txt"], 304)[3]}
    os.rename("books.txt", "web.txt")
    keys.add(train.prepare(["web.txt"], 300)[3])
    open("web.txt", "a").write(" and a last word")
    keys.add(train.prepare(["web.txt"], 300)[3])
    assert len(keys) == 4
    open("7[*].txt", "w").write(text)               # whose kind is "7[*]"
    assert np.array_equal(train.prepare(["7[*].txt"], 300)[2]["7[*]"], train.prepare(["7[*].txt"], 300)[2]["7[*]"])
    assert len([name for name in os.listdir("data") if name.startswith("val-7")]) == 1
    open("tiny.txt", "w").write("ab" * 20)
    assert len(train.prepare(["tiny.txt"], 300)[2]["tiny"]) > 0


def test_progress_of_a_preparation(tmp_path, monkeypatch, capsys):
    """Each of its parts is told how far it is, under its name."""
    monkeypatch.chdir(tmp_path)
    open("books.txt", "w").write("some words and more of them here\n" * 40)
    told = {}
    monkeypatch.setattr(train, "show_progress", lambda what: lambda done, total: told.setdefault(what, total))
    train.prepare(["books.txt"], 260)
    cut, size = train.split_point("books.txt"), os.path.getsize("books.txt")
    assert told == {"words counted:": cut, "train tokens:": cut, "val-books tokens:": size - cut}


def test_batches_are_pairs_of_ints():
    inputs, targets = train.get_batch(np.arange(300, dtype="<u2"), [250], 8, 3)
    assert inputs.dtype == targets.dtype == np.int64 and targets.tolist() == [list(range(251, 261))]


# -- evaluation --------------------------------------------------------------------------------------------------------
class Uniform:
    """A model that gives head 0 the loss `tokens[0, 0] / 100`: so the windows and their weights can be told."""
    config = Config(dim=8, heads=2, kv_heads=1, layers=1, context=10, vocab=264, predict=3)

    def __init__(self):
        self.rows = []

    def forward(self, tokens, targets):
        assert tokens.shape[1] + 2 == targets.shape[1] and (tokens[:, 1:] == targets[:, :tokens.shape[1] - 1]).all()
        self.rows.append(tokens[:, 0].tolist())
        return np.array([tokens[:, 0].mean() / 100, 9.0, 9.0])


def test_evaluation_is_a_weighted_mean_of_windows_spread_evenly():
    val = np.arange(100, dtype="<u2")

    class Tokens:                                               # each of two bytes
        special, tokens = {}, 264 * [b"ab"]

    def sums(val, micro_batch, most):
        model = Uniform()
        windows = train.even_windows(val, 10, 3, micro_batch, most, Ranks())
        return model.rows, train.held_out_sums(training_of(model, Tokens), windows)
    for most, micro_batch, rows in [(1 << 20, 4, [[0, 10, 20, 30], [40, 50, 60, 70], [80]]), (50, 9, [[0, 19, 38, 57, 76]]),
                                    (59, 2, [[0, 19], [38, 57], [76]]), (3, 5, [[0]])]:
        asked, (nats, counted, size) = sums(val, micro_batch, most)
        assert asked == rows
        starts = [row for part in rows for row in part]
        assert counted == 10 * len(starts) and size == 2 * counted and abs(nats - sum(starts) / 10) < 1e-9
    asked, (_, *counts) = sums(val[:8], 4, 1 << 20)         # no context: one window of what there is
    assert counts == [5, 10] and asked == [[0]]
    assert sums(val[:4], 4, 1 << 20)[1][1] == 1
    for size in (3, 0):
        assert sums(val[:size], 4, 1 << 20)[1].tolist() == [0, 0, 0]
    for rank, rows in enumerate([[[0, 10], [60, 70]], [[20, 30], [80]], [[40, 50]]]):           # shared out
        windows = train.even_windows(val, 10, 3, 2, 1 << 20, Ranks(types.SimpleNamespace(rank=rank, size=3)))
        assert [inputs[:, 0].tolist() for inputs, _ in windows] == rows


def test_a_held_out_loss_counts_what_is_a_target():
    """Of head 0 alone, and what is not learned is left out."""
    model = types.SimpleNamespace(forward=lambda inputs, targets: [2.0 * len(inputs), 99.0])
    training = training_of(model, types.SimpleNamespace(special={}, tokens=[b"x" * i for i in range(20)]))
    first = np.zeros((1, 3), int), np.array([[-1, 4, 0, 7, 9]])     # 7 and 9 are targets of the further heads
    second = np.zeros((2, 2), int), np.array([[5, -1, 1, 1], [-1, -1, 1, 1]])
    assert train.held_out_sums(training, [first]).tolist() == [2.0 * 2, 2, 4]
    assert train.held_out_sums(training, [second]).tolist() == [4.0 * 1, 1, 5]
    assert train.held_out_sums(training, [first, second]).tolist() == [8.0, 3, 9]


def test_units():
    assert train.in_units((30.0, 10, 20)) == [3.0, pytest.approx(30 / math.log(2) / 20)]
    assert train.in_units((3.0, 4, 0)) == [0.75, pytest.approx(3 / math.log(2))]
    assert train.in_units(np.zeros(3)) == [0, 0]


def test_validation_in_words(monkeypatch):
    """Each kind by itself and all together."""
    sums = {"books": (30.0, 10, 20), "web": (20.0, 10, 40), "none": (0.0, 0, 0)}
    val, asked = {"books": range(500), "web": range(60), "none": range(3)}, []
    model = types.SimpleNamespace(config=Uniform.config)

    def even_windows(tokens, *rest):
        *rest, ranks = rest
        assert (ranks.rank, ranks.size) == (0, 1)
        asked.append((len(tokens), *rest))
        return tokens

    def held_out_sums(training_, batches):
        assert training_ is training
        return np.array(next(sums[name] for name in val if val[name] is batches))
    monkeypatch.setattr(train, "even_windows", even_windows)
    monkeypatch.setattr(train, "held_out_sums", held_out_sums)
    training = training_of(model, "tokenizer", types.SimpleNamespace(micro_batch=7))
    result = train.validate(training, val, 99)
    assert asked == [(500, 10, 3, 7, 99), (60, 10, 3, 7, 99), (3, 10, 3, 7, 99)]
    log2 = math.log(2)
    assert result == {"val_loss": 2.5, "val_bpb": pytest.approx(50 / log2 / 60), "val": {
        "books": [3.0, pytest.approx(30 / log2 / 20)], "web": [2.0, pytest.approx(20 / log2 / 40)]}}
    assert train.in_words(result) == "2.5000, 1.2022 bits/byte (books 3.0000, 2.1640; web 2.0000, 0.7213)"
    assert train.in_words({**result, "val": {"web": [2.0, 1.0]}}) == "2.5000, 1.2022 bits/byte"
    assert train.validate(training, {"none": val["none"]}, 99) == {}
    sums["books"] = (30.0, 10, 0)                                   # tokens without a byte count, too
    assert train.validate(training, {"books": val["books"]}, 99)["val_loss"] == 3.0


def test_validation_without_a_bound_reads_all():
    """Each token of each kind, but for what fills no window: here 130 and 30 of them, in windows of ten."""
    tokenizer = Tokenizer.train(["abab"], 264)
    for most, read in (math.inf, [130 - 10, 30 - 10]), (20, [20, 20]), (1 << 20, [120, 20]):
        model = Uniform()
        val = {"a": np.arange(130, dtype="<u2"), "b": np.arange(100, 130, dtype="<u2")}
        train.validate(training_of(model, tokenizer, types.SimpleNamespace(micro_batch=100)), val, most)
        assert [10 * len(rows) for rows in model.rows] == read


def test_bytes_of_tokens():
    tokenizer = Tokenizer.train(["abababab"], 262)
    sizes = train.token_bytes(tokenizer)
    assert sizes.tolist() == [1] * 256 + [len(token) for token in tokenizer.tokens[256:-4]] + [0] * 4 and sizes.max() > 1


def test_samples(monkeypatch):
    tokenizer, asked = Tokenizer.train(["abab"], 260), []

    def generate(model, ids, *rest, **options):
        asked.append((model, list(ids), *rest, options))
        yield from [65, 66, tokenizer.special["<|user|>"], 67]
    monkeypatch.setattr(train, "generate", generate)
    assert train.sample_text("model", tokenizer, [72, 105], 3) == "AB<|user|>C"
    assert train.sample_text("model", tokenizer, [], 4, 2) == "AB<|user|>C"
    options = dict(temperature=0.8, top_k=50, vocab=260, stop=set(tokenizer.special.values()))
    assert asked == [("model", [72, 105], {**options, "seed": 3, "most": 80}),
                     ("model", [256], {**options, "seed": 4, "most": 2})]     # of a text that the tokenizer has no bytes of


def test_a_sample_of_a_model_is_so_long_and_the_same_again():
    tokenizer = Tokenizer.train(["abab"], 260)
    model = model_cpu.Model(dataclasses.replace(Uniform.config, context=32), 0, np.float32)
    texts = [train.sample_text(model, tokenizer, [*b"Hi"], seed) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]
    ids = [*model_cpu.generate(model, tokenizer.encode("Hi"), 0.8, 50, seed=5, vocab=260, most=82,
                               stop=set(tokenizer.special.values()))]
    assert texts[0] == tokenizer.decode(ids[:80])


def test_what_a_run_evaluates(monkeypatch, capsys):
    tokenizer = Tokenizer.train(["abab"], 264)
    model, calls = types.SimpleNamespace(config=Uniform.config), []
    s = settings("--seed", "5", config=model.config, batch_tokens=20, steps=40)

    def validate(training, val, most):
        calls.append((training.settings.micro_batch, most))
        return {"val_loss": 2.0, "val_bpb": 1.0, "val": {"x": [2.0, 1.0]}}
    monkeypatch.setattr(train, "validate", validate)
    monkeypatch.setattr(train, "sample_text", lambda model, tokenizer, ids, seed: f"{ids[-1]}\n{seed}")
    for size, at_end in (65536 + 10, False), (65536 + 11, True):
        training = training_of(model, tokenizer, s)
        job = train.pretraining(training, np.zeros(99, "<u2"), {"a": np.zeros(5), "x": np.zeros(size)})
        result = job.evaluate(20)
        assert result == {"val_loss": 2.0, "val_bpb": 1.0, "val": {"x": [2.0, 1.0]}, "samples": ["\n10\n5", "The101\n6", "What is115\n7"]}
        assert capsys.readouterr().out == "           validation loss 2.0000, 1.0000 bits/byte\n           \\n10\\n5\n"
        assert calls == [(2, 65536)] and s.micro_batch == 2
        calls.clear()
        assert ("all" in job.evaluate(40)) == at_end
        said = capsys.readouterr().out
        line = r"\n {11}on all that is held out 2\.0000, 1\.0000 bits/byte\n"
        assert bool(re.search(line, said)) == at_end and said.endswith("\n--- '\\n'\n\n10\n5\n--- 'The'\nThe101\n6\n--- 'What is'\nWhat is115\n7\n")
        assert ("held out" in said) == at_end and calls == [(2, 65536), (2, math.inf)][:1 + at_end]
        calls.clear()
    monkeypatch.setattr(train, "validate", lambda *a, **options: {})
    assert list(job.evaluate(20)) == ["samples"] and "validation" not in capsys.readouterr().out


# -- plans -------------------------------------------------------------------------------------------------------------
def test_a_dry_run_prints_the_plan(capsys):
    """Of a GPU; there is none here: the limit counts.  On a CPU there is no plan."""
    s = settings("--threads", "2", "--micro-batch", "16")
    first = ("small: 1,053,824 parameters, 800 steps of 2,048 tokens in micro-batches of 16 x 128, 1 x cpu fp32, muon, "
             "learning rate 0.004\n")
    train.dry_run(CONFIGS["small"], s, Ranks())
    assert capsys.readouterr().out == first
    gpu = dataclasses.replace(s, device="gpu", precision="bf16", memory_limit=3 << 30)
    train.dry_run(CONFIGS["small"], gpu, Ranks())

    def plan(rows):
        return model_gpu.memory_plan(CONFIGS["small"], rows, 128, "bf16", optimizer="muon")
    rows = {**plan(16), "together": sum(plan(16).values())}
    largest = next(n for n in range(1, 1 << 20) if sum(plan(n + 1).values()) > 3 << 30)
    assert capsys.readouterr().out == (
        first.replace("cpu fp32", "gpu bf16") + "".join(f"{name:>20} {size / 1048576:10.1f} MiB\n" for name, size in rows.items())
        + f"The largest micro-batch that fits: {largest}.\n")


def test_devices(monkeypatch):
    """The CPU for small, a GPU for the others, and where there is none one sentence."""
    assert train.choose_device(None, "small", 0) == "cpu"
    assert [train.choose_device("cpu", name, 0) for name in CONFIGS] == ["cpu"] * 3
    for preset in ("medium", "big"):
        with pytest.raises(ValueError) as error:
            train.choose_device(None, preset, 0)
        assert str(error.value) == (
            f"{preset} takes many hours or days on a CPU: train small, or say --device cpu to do so. "
            f"On a GPU it takes minutes; but: {NO_GPU}")
    with pytest.raises(ValueError, match="^The GPU needs CuPy"):
        train.choose_device("gpu", "small", 0)
    taken = []
    monkeypatch.setattr(model_gpu, "why_no_gpu", lambda: None)
    monkeypatch.setattr(model_gpu, "take_gpu", taken.append)
    assert [train.choose_device(None, name, local=3) for name in CONFIGS] == ["cpu", "gpu", "gpu"]
    assert train.choose_device("gpu", "small", 0) == "gpu" and train.choose_device("cpu", "big", 0) == "cpu"
    assert taken == 2 * [3] + [0]
    s = settings("--threads", "3")
    for optimizer in "muon", "adamw":
        s.optimizer = optimizer
        assert train.model_options(s) == {"dtype": np.float32, "threads": 3, "optimizer": optimizer}
    s = dataclasses.replace(s, device="gpu", precision="tf32", memory_limit=7, matmul="ours", micro_batch=5, optimizer="adamw")
    assert train.model_options(s) == {"precision": "tf32", "micro_batch": 5, "memory_limit": 7, "matmul": "ours",
                                      "optimizer": "adamw"}


def test_blas_has_one_thread(monkeypatch):
    names = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    started = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(sys, "argv", ["train.py", "x"])
    for name in names:
        monkeypatch.setenv(name, "1")
    train.set_threads()
    assert started == []
    for name in names:
        for value in ("2", None):
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
            train.set_threads()
            program, line, environment = started.pop()
            assert (program, line) == (sys.executable, [sys.executable, "train.py", "x"])
            assert all(environment[each] == "1" for each in names) and environment["PATH"] == os.environ["PATH"]
        monkeypatch.setenv(name, "1")


# -- settings ----------------------------------------------------------------------------------------------------------
def test_options_become_settings():
    s = settings("--data", "./a//b.txt", "c.txt", "--steps", "7", "--batch-tokens", "512", "--micro-batch", "3", "--optimizer", "adamw", "--lr", "0.5", "--warmup", "2",
                 "--decay", "0.25", "--clip", "2", "--mtp-weight", "0.75", "--seed", "9", "--eval-every", "4", "--save-every", "5", "--threads", "2")
    assert dataclasses.asdict(s) == dict(
        preset="small", steps=7, batch_tokens=512, micro_batch=3, optimizer="adamw", lr=0.5, warmup=2, decay=0.25, clip=2.0, mtp_weight=0.75, seed=9,
        eval_every=4, save_every=5, threads=2, device="cpu", precision="fp32", matmul="cublas",
        memory_limit=None, data=["a/b.txt", "c.txt"], tokens_key="")
    assert settings("--seed", str((1 << 63) - 1)).seed == (1 << 63) - 1
    args = train.parse_arguments(["--device", "auto"])                  # what is no choice leaves the default
    assert train.make_settings(train.given_options(args), "small", CONFIGS["small"], train.DEFAULTS["small"], Ranks()) == settings()
    assert train.parse_arguments(["--memory-limit", "2GB"]).memory_limit == 2 * 10**9


@pytest.mark.parametrize("text, size", [("12GB", 12 * 10**9), ("800MB", 8 * 10**8), ("1.5GiB", 3 << 29), ("7", 7), ("3k", 3000), ("2KiB", 2048),
                                        (" 1tb ", 10**12), ("5B", 5), ("1MiB", 1 << 20), ("1", 1)])
def test_sizes_of_memory(text, size):
    assert train.memory_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1.2.3", "12 GBs", "1PB", "9" * 400, "1000000000000000000"])
def test_no_sizes_of_memory(text):
    with pytest.raises(Exception, match="must be a size such as 12GB or 800MB, not") as error:
        train.memory_size(text)
    assert len(str(error.value)) < 100


def test_the_micro_batch_is_what_the_memory_holds_up_to_where_more_is_no_faster(monkeypatch):
    small = CONFIGS["small"]
    assert settings("--batch-tokens", "12800").micro_batch == 32            # of 100 windows
    assert settings("--batch-tokens", "1280").micro_batch == 10             # no more than there are
    assert settings("--micro-batch", "999").micro_batch == 16 and settings("--micro-batch", "5").micro_batch == 5
    five = sum(model_gpu.memory_plan(CONFIGS["big"], 5, 512, "bf16", optimizer="muon").values())
    for limit, rows in (1 << 50, 64), (five, 5), (five - 1, 4), (1, 1):
        args = train.parse_arguments(["--device", "gpu", "--memory-limit", str(limit)])
        defaults = {**train.DEFAULTS["big"], "batch_tokens": 512 * 1000}
        s = train.make_settings(train.given_options(args), "big", CONFIGS["big"], defaults, Ranks())
        assert (s.micro_batch, s.memory_limit, s.threads) == (rows, limit, 1)
        assert (s.precision, s.device) == ("bf16", "gpu")
    assert settings("--threads", "5").threads == 5
    monkeypatch.setattr(train, "available_cores", lambda: 6)
    assert settings().threads == 6 and settings("--micro-batch", "4").threads == 4
    monkeypatch.setattr(train, "available_cores", lambda: 1)        # fewer than ranks
    ranks = types.SimpleNamespace(rank=1, size=3, all_gather=lambda x: [x])
    assert train.make_settings(train.given_options(train.parse_arguments([])), "small", small, train.DEFAULTS["small"], ranks).threads == 1


def test_sizes_in_place_of_the_presets():
    """Each option, and what follows from dim."""
    def sizes(preset, *options):
        return train.choose_sizes(train.given_options(train.parse_arguments(list(options))), preset)
    for preset in CONFIGS:
        assert sizes(preset) == CONFIGS[preset]
        for name, value in dict(dim=256, heads=16, kv_heads=1, layers=3, context=100, vocab=264).items():
            if (preset, name) in {("big", "dim"), ("big", "heads")}:
                value = {"dim": 384, "heads": 24}[name]
            hidden = {256: 688, 384: 1024}[value] if name == "dim" else CONFIGS[preset].hidden
            found = sizes(preset, "--" + name.replace("_", "-"), str(value))
            assert found == dataclasses.replace(CONFIGS[preset], **{name: value, "hidden": hidden})
    several = sizes("small", *"--dim 192 --heads 6 --kv-heads 3 --layers 1 --context 7 --vocab 1000".split())
    assert several == Config(dim=192, heads=6, kv_heads=3, layers=1, context=7, vocab=1000)
    assert several.hidden == 512
    for option in train.SIZES:
        for value in ("0", str((1 << 20) + 1), "x"):
            with pytest.raises(SystemExit):
                train.parse_arguments(["--" + option.replace("_", "-"), value])


def test_sizes_that_do_not_fit_are_refused():
    for options, words in [
            (["--heads", "5"], "dim (128) must be a multiple of 2 x heads (2 x 5): heads must divide 64."),
            (["--kv-heads", "3"], "heads (4) must be a multiple of kv_heads: 3 does not divide it."),
            (["--dim", "100"], "dim (100) must be a multiple of 8."),
            (["--vocab", "513"], "vocab (513) must be a multiple of 8.")]:
        with pytest.raises(ValueError) as error:
            train.choose_sizes(train.given_options(train.parse_arguments(options)), "small")
        assert str(error.value).startswith(words)


@pytest.mark.parametrize("options, words", [
    (["--heads", "8"], "not 16: "),
    (["--dim", "160", "--heads", "2"], "not 80: "),
    (["--dim", "192", "--heads", "4"], "not 48: "),
    (["--dim", "80", "--heads", "4"], "not 20: ")])
def test_heads_that_a_gpu_does_not_take(monkeypatch, options, words):
    """Said before a run is planned, and before one is begun; a CPU takes them."""
    for gpu, dry in (False, ["--dry-run"]), (True, []), (True, ["--dry-run"]):
        if gpu:
            monkeypatch.setattr(model_gpu, "why_no_gpu", lambda: None)
            monkeypatch.setattr(model_gpu, "take_gpu", lambda number: None)
        monkeypatch.setattr(train, "set_threads", lambda: None)
        with pytest.raises(ValueError) as error:
            train.main(["--device", "gpu", *options, *dry])
        assert str(error.value).startswith("the GPU engine takes heads 32, 64 or 128 wide, " + words)
    config = train.choose_sizes(train.given_options(train.parse_arguments(options)), "small")
    assert settings(config=config).device == "cpu"


def test_default_tokens_a_step_are_whole_windows():
    """Rounded down to them, but at least one; what was asked for is not rounded."""
    for context, tokens in ((100, 2000), (128, 2048), (2047, 2047), (2048, 2048), (2049, 2049), (3000, 3000),
                            (1, 2048)):
        config = dataclasses.replace(CONFIGS["small"], context=context)
        assert settings(config=config).batch_tokens == tokens
    with pytest.raises(ValueError, match="^--batch-tokens 2048 is not a multiple of the context, 100.$"):
        settings("--batch-tokens", "2048", config=dataclasses.replace(CONFIGS["small"], context=100))


def test_settings_that_do_not_fit():
    for options, words in [(["--batch-tokens", "100"], "--batch-tokens 100 is not a multiple of the context, 128."),
                           (["--batch-tokens", "129"], "--batch-tokens 129 is not a multiple of the context, 128."),
                           (["--precision", "bf16"], "--precision is for the GPU engine; add --device gpu."),
                           (["--memory-limit", "1GB"], "--memory-limit is for the GPU engine; add --device gpu."),
                           (["--matmul", "ours"], "--matmul is for the GPU engine; add --device gpu.")]:
        with pytest.raises(ValueError) as error:
            settings(*options)
        assert str(error.value) == words


# -- what a run has recorded ---------------------------------------------------------------------------------
def test_the_record_of_a_run(monkeypatch):
    s = settings("--data", "a.txt")
    recorded = dataclasses.asdict(s)
    good = {"script": "train.py", "tokens": 0, "seconds": 1.5, "settings": recorded, "more": None}
    state = good
    monkeypatch.setattr(checkpoint, "load_state", lambda folder: state if folder == "f" else None)
    assert train.read_run("f", "train.py") == (s, good)
    for state in ({**good, "seconds": 7}, {**good, "settings": {**good["settings"], "attention": "naive"}}):
        assert train.read_run("f", "sft.py") == (s, state)              # of an earlier version
        assert state["settings"].keys() - good["settings"].keys() <= {"attention"}
    cannot = "its script, tokens or seconds cannot be"
    few = {name: value for name, value in good["settings"].items() if name != "steps"}
    for changed, why in [
            ({"script": 3}, cannot), ({"script": None}, cannot), ({"tokens": None}, cannot),
            ({"tokens": 1.0}, cannot), ({"tokens": True}, cannot), ({"seconds": "1"}, cannot),
            ({"seconds": True}, cannot),
            ({"settings": 7}, "'int' object is not a mapping"),
            ({"settings": few}, "missing 1 required positional"),
            ({"settings": {**few, "steps": 0}}, "the setting steps cannot be 0."),
            ({"settings": {**good["settings"], "speed": 1}}, "unexpected keyword argument 'speed'")]:
        state = {**good, **changed}
        with pytest.raises(ValueError) as error:
            train.read_run("f", "train.py")
        said = str(error.value)
        assert said.startswith("f was not written by train.py: how the run was made is not recorded (")
        assert said.endswith(").") and why in said
    for name in ("script", "tokens", "seconds", "settings"):
        state = {key: value for key, value in good.items() if key != name}
        with pytest.raises(ValueError, match=rf"^f was not written by sft.py: .* recorded \('{name}'\)\.$"):
            train.read_run("f", "sft.py")


def test_what_a_resumed_run_refuses(tmp_path, monkeypatch):
    """Before its weights are read: no checkpoint, another script's; then: other settings."""
    s = settings("--data", "a.txt", "--steps", "9")
    state = {"script": "train.py", "tokens": 0, "seconds": 1.5, "settings": dataclasses.asdict(s)}
    loaded, taken, out = [], [], str(tmp_path)
    model = types.SimpleNamespace(config=CONFIGS["small"], step=4)
    monkeypatch.setattr(checkpoint, "lock_folder", taken.append)
    monkeypatch.setattr(checkpoint, "load_state", lambda folder, model=None: {**state, "model": model})
    monkeypatch.setattr(checkpoint, "load", lambda *rest: loaded.append(rest) or (model, "tokenizer"))

    def refusal(*options, script="train.py"):
        with pytest.raises(ValueError) as error:
            train.resume(train.given_options(train.parse_arguments(["--resume", *options])), out, script, Ranks())
        return str(error.value)
    assert refusal() == f"there is nothing to resume in {out}."
    assert taken == []
    (tmp_path / "config.json").write_text("")
    assert refusal(script="sft.py") == f"the run in {out} is one of train.py: resume it with that."
    assert taken == [out] and loaded == []
    end = ": a resumed run keeps its settings. Leave the option out, or start a new run with --out."
    for options, words in [
            (["big"], "the preset small, not big"), (["--steps", "8"], "--steps 9, not 8"),
            (["--data", "./b.txt"], "--data ['a.txt'], not ['b.txt']"), (["--seed", "1"], "--seed 0, not 1"),
            (["--save-every", "1"], "--save-every 200, not 1"), (["--optimizer", "adamw"], "--optimizer muon, not adamw"),
            (["--device", "gpu"], "--device cpu, not gpu"),
            (["--precision", "bf16"], "--precision fp32, not bf16"),
            (["--memory-limit", "5"], "--memory-limit None, not 5"),
            (["--layers", "2"], "--layers 4, not 2"), (["--kv-heads", "1"], "--kv-heads 2, not 1"),
            (["--base", "out/x/"], "--base None, not out/x")]:
        assert refusal(*options) == f"the run in {out} has {words}{end}"
        assert loaded.pop() == (out, model_cpu, {"dtype": np.float32, "threads": s.threads, "optimizer": "muon"})
    same = "small --steps 9 --data ./a.txt --device auto --seed 0 --dim 128 --vocab 512"
    args = train.parse_arguments(["--resume", *same.split()])
    ranks = Ranks()
    assert train.resume(train.given_options(args), out, "train.py", ranks) == train.Training(model, "tokenizer", s, {**state, "model": model}, out, ranks)


# -- the run -----------------------------------------------------------------------------------------------------------
def test_a_save_holds_the_settings(monkeypatch):
    saved, s = [], settings()
    monkeypatch.setattr(checkpoint, "save", lambda *arguments, **options: saved.append((arguments, options)))
    for script, chat in ("sft.py", True), ("train.py", False):
        train.save_run(train.Training("model", "tokenizer", s, {"script": script}, "out", Ranks()))
        state = {"script": script, "settings": dataclasses.asdict(s)}
        assert saved.pop() == (("out", "model", "tokenizer", state), {"chat": chat})


def test_a_second_signal_leaves_at_once(monkeypatch, capfd):
    before, left = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}, []
    try:
        for number in before:
            signal.signal(number, signal.SIG_DFL)
        stop = train.Stop()
        assert all(signal.getsignal(number) == stop.ask for number in before)
        monkeypatch.setattr(os, "_exit", left.append)
        stop.ask(signal.SIGTERM, None)
        assert (stop.signal, left) == (signal.SIGTERM, [])
        assert capfd.readouterr().err == "\nFinishing the step, then saving; once more to leave at once.\n"
        stop.ask(signal.SIGINT, None)
        assert left == [130]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Plain:
    """In a model's place, for the clock."""
    config, step, grads, params = Config(dim=16, heads=2, kv_heads=1, layers=1, context=8, vocab=8, predict=1), 10, {}, {}
    flat_params, flat_grads = np.ones(3), np.ones(3)

    def forward(self, tokens, targets, counted):
        return np.array([1.5])

    def backward(self, last):
        pass

    def update(self, lr, decay, clip):
        self.step += 1
        return 0.25

    later, read = model_cpu.Model.later, model_cpu.Model.read


def zeros(step):
    return np.zeros((4, 8), int), np.zeros((4, 8), int)


def go(model, s, out, batch=zeros, evaluate=lambda step: {}, stop=None, **state):
    """train.train -> (exit code, state)."""
    training = training_of(model, None, s, out, **state)
    stop = stop or types.SimpleNamespace(signal=None)
    return train.train(training, train.Job(batch, evaluate, 2.0), stop), training.state


@pytest.fixture
def saved(monkeypatch):
    """The steps that were saved."""
    steps = []
    monkeypatch.setattr(train, "save_run", lambda training: steps.append(training.model.step))
    return steps


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_speed_and_time_left_without_pauses(tmp_path, monkeypatch, saved, device):
    """A second a step; the evaluation after step 14 takes a hundred, and counts neither for the speed nor for what is left."""
    now, printed = [1000.0], []
    monkeypatch.setattr(train.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(train, "print_step", lambda step, parts, last: printed.append((step, parts, last)))
    s = settings("--eval-every", "7", "--save-every", "50", config=Plain.config, batch_tokens=32, steps=40)
    s.device = device

    def batch(step):
        now[0] += 1.0
        return zeros(step)

    def evaluate(step):
        now[0] += 100.0
        return {}
    (tmp_path / "log.jsonl").write_text('{"step": 10}\n')
    code, state = go(Plain(), s, tmp_path, batch, evaluate, tokens=5000, seconds=50.0)
    assert code == 0 and [step for step, *_ in printed] == list(range(11, 41))
    for step, parts, last in printed:
        # on a GPU a step's numbers are read when the next one has been launched, but before an evaluation
        began = step - 10 + (device == "gpu" and not last)
        rate, left = 32 * (step - 10) / began, int(began / (step - 10) * (40 - step))
        assert parts == [f"step {step:5d}/40", "loss  1.5000", "1.082 bits/byte", f"00:{left:02d} left", f"{rate:8,.0f} tokens/s",
                         "norm   0.25", f"lr {train.learning_rate(step - 1, s):.2e}"]
        assert last == (step in (14, 21, 28, 35, 40))
    assert state["tokens"] == 5000 + 960 and state["seconds"] == 50 + 30 + 400      # and then it evaluated


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_gpu_numbers_wait_for_the_next_step(tmp_path, saved, device):
    """The host does not ask for a step's numbers before it has launched the next one, nor later than that; those of a CPU are
    there at once."""
    order = []

    class Number:
        def __init__(self, step):
            self.step = step

        def __float__(self):
            order.append(f"read {self.step}")
            return 1.0

    class Late(Plain):
        step = 0

        def forward(self, tokens, targets, counted):
            order.append(f"forward {self.step + 1}")
            return np.array([1.0])

        def backward(self, last):
            order.append(f"backward {self.step + 1}")

        def update(self, lr, decay, clip):
            self.step += 1
            return Number(self.step)

        def later(self, *numbers):
            order.append(f"copy {self.step}")
            return super().later(*numbers)
    s = dataclasses.replace(settings(config=Plain.config, batch_tokens=32, steps=3), device=device)
    go(Late(), s, tmp_path)
    steps = [[f"{what} {step}" for what in ("forward", "backward", "copy", "read")] for step in (1, 2, 3)]
    if device == "gpu":
        steps = [steps[0][:3], [*steps[1][:3], "read 1"], [*steps[2][:3], "read 2"], ["read 3"]]
    assert order == sum(steps, [])


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_bad_gradient_is_computed_again_and_named(tmp_path, saved, capsys, device):
    """On a GPU the next step has been launched by then, and has overwritten it."""
    class Overwriting(Plain):
        step, grads = 0, {"v": np.ones(2), "w": np.ones(2)}

        def forward(self, tokens, targets, counted):
            self.bad = tokens[0, 0] == 1                    # the batch of step 2
            return super().forward(tokens, targets, counted)

        def backward(self, last):
            self.grads["w"][...] = np.inf if self.bad else 1.0

        def update(self, lr, decay, clip):
            self.step += 1
            return self.grads["w"].sum()
    s = dataclasses.replace(settings(config=Plain.config, batch_tokens=32, steps=9), device=device)
    code, _ = go(Overwriting(), s, tmp_path, batch=lambda step: (np.full((4, 8), step), np.zeros((4, 8), int)))
    said = capsys.readouterr().err
    assert code == 1 and "step 2 is not finite" in said and "the first gradient that is not finite is w" in said


def test_nothing_is_saved_after_a_number_that_is_not_finite(tmp_path, saved, capsys):
    """Also where it is seen at the moment of a save."""
    class Bad(Plain):
        step = 0

        def forward(self, tokens, targets, counted):
            return np.array([np.nan if self.step == 2 else 1.0])
    code, _ = go(Bad(), settings("--save-every", "3", config=Plain.config, batch_tokens=32, steps=9), tmp_path)
    assert code == 1 and saved == []
    assert capsys.readouterr().err == (
        "\nerror: step 3 is not finite (loss nan, gradient norm 0.25): every gradient is finite; the loss, or the sum of the "
        f"gradient's squares, overflowed. {tmp_path} keeps its last save. Try a lower --lr.\n")


@pytest.mark.parametrize("stops", [False, True])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, saved, capsys, stops):
    """The loss and the norm are of before the update that broke them; seen at each save, also at that of a signal."""
    stop = types.SimpleNamespace(signal=None)

    class Bad(Plain):
        step, flat_params, grads = 0, np.ones(2), {"b": np.ones(1)}
        params = {"a": flat_params[:1], "b": flat_params[1:]}

        def update(self, lr, decay, clip):
            self.params["b"][...] = np.inf if self.step == 3 else 1
            stop.signal = 15 if stops and self.step == 3 else None
            return super().update(lr, decay, clip)
    s = settings("--save-every", "9" if stops else "2", config=Plain.config, batch_tokens=32, steps=9)
    code, _ = go(Bad(), s, tmp_path, stop=stop)
    assert code == 1 and saved == ([] if stops else [2])
    assert "step 4 is not finite (loss 1.5, gradient norm 0.25): the first parameter that is not finite is b. " in capsys.readouterr().err


def test_any_byte_may_stand_beside_a_cut():
    assert train.cuts_beside(b"a\nb\xffc\nd", 4, b"\n") == train.cuts_beside(b"a\nb\x00c\nd", 4, b"\n") == (2, 6)


# -- pictures ----------------------------------------------------------------------------------------------------------
class Axes:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments, **options: self.calls.append((name, arguments, options))


def test_plot(tmp_path, monkeypatch, capsys):
    axes, figure = Axes(), Axes()
    pyplot = types.ModuleType("matplotlib.pyplot")
    pyplot.subplots = lambda figsize: (figure, axes)
    matplotlib = types.ModuleType("matplotlib")
    pyplot.switch_backend, matplotlib.pyplot = lambda name: None, pyplot
    monkeypatch.setitem(sys.modules, "matplotlib", matplotlib)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    log = tmp_path / "log.jsonl"
    records = "".join(f'{{"step": {i}, "loss": {6000 - i}}}\n' for i in range(1, 5050))
    log.write_text(records + '{"step": 5049, "val_loss": 3.0, "val": {"books": [3.5, 1.0], "web": [2.5, 1]}}\n{"step": 5050, "lo')
    checkpoint.plot(str(tmp_path))
    assert capsys.readouterr().out == f"Wrote {tmp_path / 'loss.png'}.\n"
    assert figure.calls == [("savefig", (str(tmp_path / "loss.png"),), {"dpi": 150, "bbox_inches": "tight"})]
    plots = [(arguments[0], arguments[1], options["label"]) for name, arguments, options in axes.calls if name == "plot"]
    assert plots == [(list(range(1, 5050)), [6000.0 - i for i in range(1, 5050)], "training"),
                     ([5049], [3.5], "held out: books"), ([5049], [2.5], "held out: web")]
    assert ("set_ylim", (), {"top": 6000 - 51}) in axes.calls             # the loss after a hundredth of the steps
    assert ("set", (), {"xlabel": "step", "ylabel": "loss, nats per token", "title": str(tmp_path)}) in axes.calls
    # the kinds are those of the last evaluation, each drawn through all
    axes.calls.clear()
    log.write_text('{"step": 1, "loss": 5}\n'
                   '{"step": 1, "val_loss": 4, "val": {"a": [4, 1], "b": [5, 1], "c": [6, 1]}}\n'
                   '{"step": 2, "val_loss": 3, "val": {"c": [2, 1], "a": [1, 1]}}\n')
    checkpoint.plot(str(tmp_path))
    plots = [(*arguments[:2], options["label"]) for name, arguments, options in axes.calls if name == "plot"]
    assert plots == [([1], [5.0], "training"), ([1, 2], [6.0, 2.0], "held out: c"),
                     ([1, 2], [4.0, 1.0], "held out: a")]
    log.write_text('{"step": 1}\n')
    checkpoint.plot(str(tmp_path))
    for line in ('{"step": 1, "loss": "x"}', '{"step": 1, "val_loss": 1}', '{"step": 1, "val_loss": 1, "val": {"a": []}}',
                 '{"step": 1, "loss": null}', '{"step": 1, "val_loss": 1, "val": 5}'):
        log.write_text(line + "\n")
        with pytest.raises(ValueError, match="log.jsonl holds records that cannot be drawn"):
            checkpoint.plot(str(tmp_path))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for folder, words in (tmp_path, "--plot needs matplotlib: pip install matplotlib."), (tmp_path / "no", "/log.jsonl to draw."):
        with pytest.raises(ValueError) as error:
            checkpoint.plot(str(folder))
        assert str(error.value).endswith(words)


# -- the whole script --------------------------------------------------------------------------------------------------
@pytest.fixture
def whole(tmp_path, monkeypatch):
    """main() with all that is slow taken away -> list of what happened."""
    monkeypatch.chdir(tmp_path)
    done, tokenizer = [], Tokenizer.train(["abab"], 264)
    tokens = np.zeros(200_000, "<u2")
    open("text.txt", "w").write("text")
    for name, value in [("prepare", lambda data, vocab, base=None: done.append(("prepare", data, vocab)) or (tokenizer, tokens, {"text": tokens[:900]}, "key")),
                        ("set_threads", lambda: done.append(("threads",))), ("lock_folder", lambda out: done.append(("take", out))),
                        ("set_aside", lambda out: done.append(("aside", out))), ("Stop", lambda: "stop"),
                        ("save_run", lambda training: done.append(("save", training.out, dict(training.state)))),
                        ("train", lambda t, job, stop: done.append(("train", t.settings, t.out, t.state, stop)) or 0),
                        ("sample_text", lambda model, tokenizer, ids, seed: f" sample {seed}"),
                        ("find_corpus", lambda preset: [f"{preset}.txt"])]:
        monkeypatch.setattr(checkpoint if name in ("lock_folder", "set_aside") else train, name, value)
    return done


def test_a_new_run(whole, capsys):
    assert train.main(["--data", "text.txt", "--threads", "2", "--seed", "4"]) == 0
    out = os.path.join("out", "small")
    threads, prepared, taken, aside, saved, (_, s, folder, state, stop) = whole
    assert (threads, prepared) == (("threads",), ("prepare", ["text.txt"], 512))
    assert (taken, aside, saved) == (("take", out), ("aside", out), ("save", out, {"script": "train.py", "tokens": 0, "seconds": 0.0, "ranks": 1, "base": None}))
    assert (s.tokens_key, s.steps, s.seed, folder, state["script"], stop) == ("key", 781, 4, out, "train.py", "stop")
    assert capsys.readouterr().out == (
        "200,000 tokens are few for 800 steps: taking 781, which read them 8 times (--steps takes another number).\n"
        "small: 1,053,824 parameters, 781 steps of 2,048 tokens, 2 threads; corpus text.txt: 200,000 tokens to train on, 900 to validate.\n")


def test_what_a_new_run_refuses_and_notes(whole, monkeypatch, capsys):
    monkeypatch.setattr(train, "train", lambda *arguments: 7)
    assert train.main(["--out", "./x/../y", "--steps", "3"]) == 7       # the exit code of the run; no samples then
    assert ("take", "y") in whole and ("prepare", ["small.txt"], 512) in whole and "sample" not in capsys.readouterr().out
    monkeypatch.setattr(train, "train", lambda training, *rest: whole.append(("model", training.model.config)) or 0)
    for options in ["medium", "--device", "cpu"], ["small"]:            # on a CPU, if one says so
        train.main([*options, "--layers", "1"])
        assert whole[-1] == ("model", dataclasses.replace(CONFIGS[options[0]], layers=1))
    before = len(whole)
    with pytest.raises(ValueError, match="^medium takes many hours or days on a CPU: train small, or say"):
        train.main(["medium"])
    assert [row[0] for row in whole[before:]] == ["threads"]
    with pytest.raises(ValueError, match="needs CuPy"):
        train.main(["--device", "gpu"])
    monkeypatch.setattr(train, "prepare", lambda data, vocab, base=None: (None, np.zeros(131, "<u2"), {}, "key"))
    with pytest.raises(ValueError, match="too short: 131 tokens to train on, and a window has 132"):
        train.main([])
    tokenizer = Tokenizer.train(["abab"], 264)
    for held_out, said in (5, False), (4, True):
        monkeypatch.setattr(train, "prepare", lambda data, vocab, base=None: (tokenizer, np.zeros(2048 * 500, "<u2"), {"a": np.zeros(held_out)}, "key"))
        train.main([])
        assert ("The corpus is too short for a validation part: there will be no validation loss.\n" in capsys.readouterr().out) == said


def test_dry_runs(whole, monkeypatch, capsys):
    planned = []
    monkeypatch.setattr(train, "dry_run", lambda config, s, ranks: planned.append((config, s.device, s.precision, s.memory_limit)))
    for options, device in [(["big", "--memory-limit", "12GB"], "gpu"), (["big"], "gpu"), (["medium"], "gpu"), ([], "cpu"), (["--device", "gpu"], "gpu"),
                            (["--memory-limit", "12GB"], "gpu"), (["big", "--device", "cpu"], "cpu"), (["--mtp-weight", "0.9"], "cpu")]:
        assert train.main(["--dry-run", *options]) == 0
        config, on, precision, limit = planned.pop()
        assert on == device and precision == ("bf16" if device == "gpu" else "fp32") and limit == (12 * 10**9 if "12GB" in options else None)
        preset = options[0] if options and options[0] in CONFIGS else "small"
        assert config == dataclasses.replace(CONFIGS[preset], mtp_weight=0.9 if "--mtp-weight" in options else 0.3)
    assert {row[0] for row in whole} == {"threads"}


def test_resumed_runs(whole, monkeypatch, capsys):
    s = settings("--data", "text.txt")
    s.tokens_key = "key"
    model = model_cpu.Model(dataclasses.replace(CONFIGS["small"], layers=1), 0, np.float32)
    asked = []
    monkeypatch.setattr(train, "resume", lambda args, out, script, ranks: asked.append((out, script)) or train.Training(model, Tokenizer.train(["ab"], 264), s, {"script": "x"}, out, ranks))
    model.step = 800
    assert train.main(["--resume", "--out", "o"]) == 0
    assert capsys.readouterr().out == "The run in o is finished: 800 steps (--steps takes more).\n"
    assert asked == [("o", "train.py")]
    model.step = 799
    assert train.main(["--resume", "--out", "o"]) == 0
    assert capsys.readouterr().out.startswith("Resuming o at step 799 of 800.\n") and whole[-1][0] == "train"
    assert {row[0] for row in whole} == {"threads", "prepare", "train"}
    s.tokens_key = "other"
    with pytest.raises(ValueError) as error:
        train.main(["--resume", "--out", "o"])
    assert str(error.value) == "text.txt: not what o began with."


def test_the_rate_of_each_optimizer(whole, tmp_path):
    """From a base it is half of that."""
    save_base(tmp_path / "theirs", CONFIGS["small"])
    base, adamw = ["--base", "theirs"], ["--optimizer", "adamw"]
    for options, optimizer, lr in [([], "muon", 4e-3), (["--optimizer", "muon"], "muon", 4e-3), (adamw, "adamw", 2e-3),
                                   ([*adamw, "--lr", "0.125"], "adamw", 0.125), (base, "muon", 2e-3),
                                   ([*base, *adamw], "adamw", 1e-3), ([*base, "--lr", "0.125"], "muon", 0.125)]:
        assert train.main(["--data", "text.txt", "--threads", "1", *options]) == 0
        assert (whole[-1][1].optimizer, whole[-1][1].lr) == (optimizer, lr)


def test_plots_need_no_run(whole, monkeypatch):
    monkeypatch.setattr(checkpoint, "plot", lambda folder: f"plotted {folder}")
    assert train.main(["--plot", "x"]) == "plotted x" and whole == []


# -- a base ------------------------------------------------------------------------------------------------------------
def save_base(folder, config, texts=("abab",), state=None):
    """A model that has learned nothing; without a state it is anybody's."""
    model, tokenizer = model_cpu.Model(config, 3, np.float32), Tokenizer.train(texts, config.vocab)
    model.step = 7
    checkpoint.save(str(folder), model, tokenizer, state or {})
    if state is None:
        os.remove(folder / checkpoint.STATE)
    return model, tokenizer


def test_what_a_base_is(tmp_path):
    """Ours says its preset and its files; of another's the preset is the widest that is no wider, or small."""
    s = settings("--data", "a.txt", "b.txt", preset="medium")
    state = {"script": "sft.py", "tokens": 0, "seconds": 0.0, "settings": dataclasses.asdict(s)}
    save_base(tmp_path, Uniform.config, state=state)
    assert train.describe(str(tmp_path)) == ("medium", ["a.txt", "b.txt"])
    os.remove(tmp_path / checkpoint.STATE)
    widths = sorted((config.dim, preset) for preset, config in CONFIGS.items())
    assert [preset for _, preset in widths] == ["small", "medium", "big"]
    for (dim, preset), wider in zip([(0, "small"), *widths], [*widths, (10_000, "")]):
        for dim in {max(32, dim), wider[0] - 32}:
            config = dataclasses.replace(CONFIGS["small"], dim=dim, hidden=None)
            (tmp_path / "config.json").write_text(json.dumps(checkpoint.llama_config(config, 0)))
            assert train.describe(str(tmp_path)) == (preset, None)
    for wanted, preset in ([], "small"), (["big"], "big"):
        with pytest.raises(ValueError) as error:
            train.describe("out/none", *wanted)
        assert str(error.value) == f"there is no model in out/none: `python train.py {preset}` trains one, --base names another."


def test_sizes_of_a_base(tmp_path):
    """They are its own, but for the context and the weight of its further heads."""
    config = Config(dim=32, heads=2, kv_heads=1, layers=1, context=32, vocab=272)
    save_base(tmp_path, config)
    base = str(tmp_path)

    def sizes(*options):
        return train.choose_sizes(train.given_options(train.parse_arguments(["--base", base, *options])), "big")
    assert sizes() == config
    assert sizes("--context", "16", "--mtp-weight", "0.9") == dataclasses.replace(config, context=16, positions=32, mtp_weight=0.9)
    for options, words in [(["--kv-heads", "1"], "--kv-heads"), (["--vocab", "272", "--dim", "64", "--context", "8"], "--dim --vocab"),
                           (["--layers", "2"], "--layers"), (["--heads", "2"], "--heads")]:
        with pytest.raises(ValueError) as error:
            sizes(*options)
        assert str(error.value) == f"the model in {base} has its sizes: leave out {words}."


def test_a_run_from_a_base(tmp_path, monkeypatch, capsys):
    """It begins with the base's weights and tokenizer; resumed, without base or data/, it makes the same bits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "Stop", lambda: types.SimpleNamespace(signal=None))
    monkeypatch.setattr(checkpoint, "lock_folder", lambda out: os.makedirs(out, exist_ok=True))     # this process has both runs
    real, saved = train.save_run, []

    def save_run(training):
        real(training)
        saved.append((training.model.step, training.model.flat_params.copy()))
        if training.model.step == 2:
            shutil.copytree(training.out, "half")
    monkeypatch.setattr(train, "save_run", save_run)
    base, tokenizer = save_base(tmp_path / "theirs", Config(dim=32, heads=2, kv_heads=1, layers=1, context=32, vocab=272, predict=2),
                                "other words than those of the text")
    open("text.txt", "w").write("".join(f"line {i} of {i * i}\n" for i in range(400)))

    def run(*options):
        return train.run(train.parse_arguments(list(options)), Ranks())
    quick = "--data text.txt --steps 4 --batch-tokens 128 --save-every 2 --eval-every 2 --threads 1 --lr 0.01".split()
    assert run("--base", "theirs/", *quick) == 0 and "Training a tokenizer" not in capsys.readouterr().out
    assert [step for step, _ in saved] == [0, 2, 4] and np.array_equal(saved[0][1], base.flat_params)
    assert not np.array_equal(saved[2][1], base.flat_params)
    out = "theirs-more"
    assert checkpoint.read_tokenizer(out).tokens == tokenizer.tokens and checkpoint.read_config(out) == base.config
    assert checkpoint.load_state(out)["base"] == "theirs"
    with pytest.raises(ValueError, match="^--out theirs is the base itself; "):
        run("--base", "theirs", "--out", "./theirs/", *quick)
    with pytest.raises(ValueError, match="^the run in half has --base theirs, not text.txt: a resumed run keeps"):
        run("--resume", "--base", "text.txt", "--out", "half")
    shutil.rmtree("theirs")
    shutil.rmtree("data")
    assert run("--resume", "--base", "theirs", "--out", "half") == 0
    assert saved[3][0] == 4 and np.array_equal(saved[3][1], saved[2][1])
    logs = [[{**record, "seconds": 0} for _, record in checkpoint.read_log(f"{folder}/log.jsonl")] for folder in (out, "half")]
    assert logs[0] == logs[1] and len(logs[0]) > 4
