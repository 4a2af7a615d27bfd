"""train.py function by function, in this process: corpus, tokens, evaluation, plans, settings, and every sentence."""
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import test_shelf as shelf
from cases import parametrize, put, refusal, rows, value_error, write
from runs import read_log, settings, shell_words, training_of

import checkpoint
import model_cpu
import model_gpu
import script
import train
from model_cpu import CONFIGS, Config
from tokenizer import Tokenizer
from train import Ranks

NO_GPU = "The GPU needs CuPy: run `make gpu` (or `pip install cupy-cuda12x`)."
SMALL = CONFIGS["small"]
MINI = Config(dim=8, heads=2, kv_heads=1, layers=1, context=10, vocab=264, predict=3)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(model_gpu, "cupy", None)


def given(*options):
    return train.given_options(train.parse_arguments(shell_words(options)))


# -- corpus ------------------------------------------------------------------------------------------------------------
def test_which_files_are_the_corpus(tmp_path, monkeypatch, out_text):
    monkeypatch.chdir(tmp_path)
    python = "data/python-{}.{}.txt".format(*sys.version_info)
    monkeypatch.setattr(script, "write_python_corpus", lambda path, separator: os.mkdir("data") or open(path, "w").close())
    assert script.find_corpus("big", "\n") == [python]
    assert out_text() == "No corpus in data/ (./fetch_data.sh brings one): taking the English of Python.\n"
    assert script.find_corpus("small", "\n") == [python] and not out_text()       # it is there already
    large = "data/books.txt data/web_a.txt data/web_b.txt".split()
    for path in [*large[::-1], "data/webs.md", "data/my_books.txt", "data/tiny.txt"]:
        assert script.find_corpus("small", "\n") == [python]
        open(path, "w").close()
    assert script.find_corpus("big", "\n") == script.find_corpus("medium", "\n") == large
    for path in large:
        os.remove(path)
    assert script.find_corpus("big", "\n") == script.find_corpus("small", "\n") == ["data/tiny.txt"]


def test_docstrings_of_the_library(tmp_path, monkeypatch):
    """In the order of their names, whatever that of the file system."""
    files = {"a.py": '"""Module a."""\nclass C:\n  """Class C."""\n  def f(self):\n    """Method f."""\n    def g(): "inner"\n'
                     "def h(): pass\nasync def k(): 'async k'\n",
             "pkg/__init__.py": '"""Package."""', "pkg/b.py": "x = 1", "c/d.py": "'d'", "bad.py": "def", "latin.py": "#\xe9", "c.txt": '"""no"""',
             **{f"{name}/x.py": '"""skipped"""' for name in "test tests idle_test site-packages pkg/tests".split()}}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        write(tmp_path / name, text.encode("latin-1"))
    monkeypatch.setattr(os, "__file__", f"{tmp_path}/os.py")
    expected = [[("a", "Module a."), ("a.C", "Class C."), ("a.C.f", "Method f."), ("a.C.f.g", "inner"), ("a.k", "async k")],
                [("c.d", "d")], [("pkg", "Package.")], []]
    walk = os.walk
    for back in False, True:
        def other(top):
            for folder, folders, names in walk(top):
                folders.sort(reverse=back)
                yield folder, folders, sorted(names, reverse=back)
        monkeypatch.setattr(os, "walk", other)
        assert list(script.python_docstrings()) == expected


def test_prose_of_the_python_corpus(tmp_path, monkeypatch):
    import pydoc_data.topics
    prose = ["Forty characters of words, exactly so ok", "A second paragraph which is long enough to be kept here",
             "A third one,   with\n  lines that are joined and spaces squeezed: fine", "x" * 46 + "1" * 5]
    others = [prose[0][:-1], "x" * 45 + "1" * 5, f">>> {prose[1]}"]         # too short; just 0.9 of it are letters; an example
    monkeypatch.setattr(pydoc_data.topics, "topics", {"b": "\n \n".join([prose[1], *others]), "a": prose[0]})
    monkeypatch.setattr(script, "python_docstrings", lambda: [[("m", prose[2]), ("m.f", prose[0])], [("n", "short")], [("o", prose[3])]])
    script.write_python_corpus(f"{tmp_path}/new/text.txt", "<|endoftext|>")
    prose[2] = "A third one, with lines that are joined and spaces squeezed: fine"
    assert (tmp_path / "new/text.txt").read_text() == "\n\n<|endoftext|>\n\n".join(prose)


@parametrize("size, held_out", [(500, 50), (1_100_000, 100_000), (10_100_000, 101_000), (401_000_000, 4_000_000)])
def test_how_much_is_held_out(tmp_path, size, held_out):
    """Of a file with holes, which reads as zeros."""
    with open(tmp_path / "zeros", "wb") as file:
        file.truncate(size)
    assert train.split_point(tmp_path / "zeros") == size - held_out


def test_a_cut_moves_by_a_tenth_or_32_megabytes_at_most(tmp_path):
    with open(tmp_path / "holes", "wb") as file:
        for place in 360_000_000, 367_900_000, 368_100_000:          # separators, in 400 MB
            file.seek(place)
            file.write(b"\n<|endoftext|>\n")
        file.truncate(400_000_000)
    assert train.split_point(tmp_path / "holes") == 368_100_000 + len("\n<|endoftext|>")


# -- tokens ------------------------------------------------------------------------------------------------------------
def test_tokens_are_made_once_and_named_by_what_they_are_made_of(tmp_path, monkeypatch, out_text):
    monkeypatch.chdir(tmp_path)
    write("books.txt", "\n\n<|endoftext|>\n\n".join(f"document {i} of some words and more " * 800 for i in range(50)))
    _, tokens, _, key = train.prepare(["books.txt"], 300)
    said = out_text()
    assert "Training a tokenizer of 300 tokens.\nwords counted: 1 MB" in said and "\ntrain tokens: 1 MB" in said
    again = train.prepare(["books.txt"], 300)
    assert not out_text() and again[3] == key and np.array_equal(again[1], tokens)
    os.truncate("books.txt", 40_000)
    keys = {key, train.prepare(["books.txt"], 300)[3], train.prepare(["books.txt"], 304)[3]}
    os.rename("books.txt", "7[*].txt")              # whose kind is "7[*]"
    for _ in range(2):
        *_, val, key = train.prepare(["7[*].txt"], 300)
        assert len(val["7[*]"]) > 100
    assert len({*keys, key}) == 4 and len([name for name in os.listdir("data") if name.startswith("val-7")]) == 1


@parametrize("moment", ["make_tokenizer", "make_tokens"])
def test_a_corpus_that_changes_while_it_is_read_leaves_nothing(tmp_path, monkeypatch, moment):
    """Also one that keeps its size and time: its text would stand under another one's name."""
    monkeypatch.chdir(tmp_path)
    old, new = "some words and more of them\n" * 400, "other words, as many of them\n"[:28] * 400
    write("a.txt", old)
    real, before = getattr(train, moment), os.stat("a.txt")

    def changing(*arguments):
        write("a.txt", new)
        os.utime("a.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
        return real(*arguments)
    with monkeypatch.context() as patch:
        patch.setattr(train, moment, changing)
        with value_error("^a.txt: changed while it was read. Start again when it is complete.$"):
            train.prepare(["a.txt"], 280)
    assert os.listdir("data") == ["prepare.lock"]
    for text in old, new:
        write("a.txt", text)
        tokenizer, tokens, val, _ = train.prepare(["a.txt"], 280)
        assert tokenizer.decode([*tokens[:-1], *val["a"][:-1]]) == text


# -- evaluation --------------------------------------------------------------------------------------------------------
class Uniform:
    """A model that gives head 0 the loss `tokens[0, 0] / 100`: so the windows and their weights can be told."""
    config = MINI

    def __init__(self):
        self.rows = []

    def forward(self, tokens, targets):
        assert tokens.shape[1] + 2 == targets.shape[1] and (tokens[:, 1:] == targets[:, :tokens.shape[1] - 1]).all()
        self.rows.append(tokens[:, 0].tolist())
        return np.array([tokens[:, 0].mean() / 100, 9.0, 9.0])


def held_out(val, micro_batch, most, ranks=None):
    """-> (first tokens of the windows of each batch, [nats, tokens, bytes]); each token has two bytes."""
    training = training_of(Uniform(), SimpleNamespace(special={}, tokens=264 * [b"ab"]))
    windows = train.even_windows(val, 10, 3, micro_batch, most, ranks or Ranks())
    return training.model.rows, train.held_out_sums(training, windows).tolist()


def test_evaluation_is_a_weighted_mean_of_windows_spread_evenly():
    val = np.arange(100, dtype="<u2")
    for most, micro_batch, rows in (math.inf, 4, [[0, 10, 20, 30], [40, 50, 60, 70], [80]]), (59, 2, [[0, 19], [38, 57], [76]]), (3, 5, [[0]]):
        asked, (nats, counted, size) = held_out(val, micro_batch, most)
        starts = sum(rows, [])
        assert asked == rows and (counted, size) == (10 * len(starts), 20 * len(starts)) and abs(nats - sum(starts) / 10) < 1e-9
    for length, counted in (4, 1), (3, 0), (0, 0):                      # too short for a whole window
        assert held_out(val[:length], 4, math.inf) == ([[0]] * (counted > 0), [0, counted, 2 * counted])
    for rank, rows in enumerate([[[0, 10], [60, 70]], [[20, 30], [80]], [[40, 50]]]):           # shared out
        assert held_out(val, 2, math.inf, SimpleNamespace(rank=rank, size=3))[0] == rows


def test_validation_in_words(monkeypatch):
    """Each kind by itself, and all together by their tokens and bytes."""
    sums = {500: (30.0, 10, 20), 60: (20.0, 10, 40)}
    asked = []
    put(monkeypatch, train, even_windows=lambda tokens, *rest: asked.append((len(tokens), *rest[:-1])) or tokens,
        held_out_sums=lambda training, batches: np.array(sums[len(batches)]))
    training = training_of(SimpleNamespace(config=MINI), None, SimpleNamespace(micro_batch=7))
    result = train.validate(training, {"books": range(500), "web": range(60)}, 99)
    assert asked == [(size, 10, 3, 7, 99) for size in sums] and result["val_loss"] == 2.5
    assert train.in_words(result) == "2.5000, 1.2022 bits/byte (books 3.0000, 2.1640; web 2.0000, 0.7213)"
    assert train.in_words({**result, "val": {"web": [2.0, 1.0]}}) == "2.5000, 1.2022 bits/byte"
    assert [*map(train.kind_of, "data/books_00.txt web_wikipedia.txt data/python-3.11.txt 7.txt Play".split())] == "books web python 7 play".split()


def test_samples():
    """Each has a seed of its own."""
    tokenizer = Tokenizer.train(["abab"], 264)
    model = model_cpu.Model(replace(MINI, context=32), 0, np.float32)
    for ids in [*b"Hi"], [tokenizer.special["<|endoftext|>"]]:
        training = training_of(model, tokenizer, SimpleNamespace(seed=5))
        texts = train.draw_samples(training, [ids, ids], 80)
        drawn = model_cpu.generate(model, ids, 0.8, 50, seed=5, vocab=tokenizer.vocab_size, most=80, stop={*tokenizer.special.values()})
        assert texts[0] == tokenizer.decode([*drawn]) != texts[1]
    assert not train.token_bytes(tokenizer)[[*tokenizer.special.values()]].any()


def test_what_a_run_evaluates(monkeypatch, out_text):
    calls, found = [], {"val_loss": 2.0, "val_bpb": 1.0, "val": {"x": [2.0, 1.0]}}
    s = settings("--num-samples 4", config=MINI, batch_tokens=20, steps=40)
    put(monkeypatch, train, validate=lambda training, val, most: calls.append(most) or {**found},
        draw_samples=lambda training, prompts, most: [f"{ids[-1]}\n{most}\n" + "some words " * 9 for ids in prompts])
    training = training_of(SimpleNamespace(config=MINI), Tokenizer.train(["abab"], 264), s)
    for size, at_end in (65536 + 10, False), (65536 + 11, True):
        calls.clear()
        job = train.pretraining(training, np.zeros(99, "<u2"), {"a": np.zeros(5), "x": np.zeros(size)})
        result = job.evaluate(20)
        assert [text[:-99] for text in result.pop("samples")] == ["\n10\n80\n", "The101\n80\n", "What is115\n80\n", "\n10\n80\n"] and result == found
        # on the way a line of the first sample, which ends with a word
        assert out_text() == ("           validation loss 2.0000, 1.0000 bits/byte\n"
                                           "           \\n10\\n80\\nsome words some words some words some words some words some\n")
        assert ("all" in job.evaluate(40)) == at_end and calls == [65536, 65536, math.inf][:2 + at_end]
        said = out_text()
        assert ("\n           on all that is held out 2.0000, 1.0000 bits/byte\n" in said) == at_end
        assert "\n--- 'The'\nThe101\n80\n" in said


# -- plans -------------------------------------------------------------------------------------------------------------
def test_a_dry_run_prints_the_plan(out_text):
    """Of a GPU; there is none here: the limit counts."""
    plan = model_gpu.memory_plan(SMALL, 40, 128, "bf16", "muon", 3)
    s = replace(settings("--micro-batch 16"), device="gpu", precision="bf16", memory_limit=sum(plan.values()))
    train.dry_run(SMALL, s, SimpleNamespace(size=3))
    first, *rows, largest = out_text().splitlines()
    assert largest == "The largest micro-batch that fits: 40."
    assert first == ("1,053,824 parameters, 800 steps of 2,048 tokens in micro-batches of 16 x 128, 3 x gpu bf16, muon, learning rate 0.004, growth 0.0.  "
                     "A new run without --steps takes fewer where these would read the corpus more than 8 times.")
    names, sizes = zip(*[re.fullmatch(r" +(.*?) +([0-9.]+) MiB", row).groups() for row in rows])
    assert names == (*plan, "together") and sum(map(float, sizes[:-1])) == pytest.approx(float(sizes[-1]), abs=1)


def test_dry_runs_need_no_gpu(whole, out_text):
    """But heads that a GPU takes."""
    for options, device in ("big", "gpu bf16"), ("", "cpu fp32"), ("big --device cpu", "cpu fp32"):
        assert train.main(["--dry-run", *options.split()]) == 0 and whole == []
        assert f"1 x {device}" in out_text()
    with value_error("^the GPU engine takes heads 32, 64 or 128 wide, not 16: "):
        train.main("--device gpu --heads 8 --dry-run".split())


def test_devices(monkeypatch):
    """The CPU for small, a GPU for the others, and where there is none one sentence."""
    assert train.choose_device(None, "small", 0, False) == "cpu" == train.choose_device("cpu", "big", 0, False)
    for asked in None, "gpu":
        with value_error(f"^{re.escape(NO_GPU)} On a CPU, with --device cpu, small takes minutes, and the larger models many "):
            train.choose_device(asked, "medium", 0, False)
    taken = []
    put(monkeypatch, model_gpu, why_no_gpu=lambda: None, take_gpu=taken.append)
    assert [train.choose_device(None, name, 3, False) for name in CONFIGS] == ["cpu", "gpu", "gpu"]
    assert train.choose_device("gpu", "small", 0, False) == "gpu" and taken == [3, 3, 0]
    s = settings("--threads 3 --optimizer adamw")
    assert train.model_options(s) == dict(dtype=np.float32, threads=3, optimizer="adamw")
    other = dict(precision="tf32", memory_limit=7, matmul="ours", micro_batch=5)
    assert train.model_options(replace(s, device="gpu", **other)) == dict(optimizer="adamw", **other)


# -- settings ----------------------------------------------------------------------------------------------------------
def test_sizes_of_memory():
    for text, size in ("12GB", 12 * 10**9), ("1.5GiB", 3 << 29), ("7", 7), (" 1tb ", 10**12):
        assert train.memory_size(text) == size
    for bad in "", "12GBs", "0", "1.2.3", "9" * 400, "1000000000000000000":
        with pytest.raises(Exception, match="must be a size such as 12GB or 800MB, not"):
            train.memory_size(bad)


def test_the_micro_batch_is_what_the_memory_holds_up_to_where_more_is_no_faster(monkeypatch):
    for options, rows in ("--batch-tokens 12800", 32), ("--batch-tokens 1280", 10), ("--micro-batch 999", 16), ("--micro-batch 5", 5):
        assert settings(options).micro_batch == rows               # of 100, 10, 16 and 16 windows
    five = sum(model_gpu.memory_plan(CONFIGS["big"], 5, 512, "bf16", optimizer="muon").values())
    # ranks of other memory take what fits all of them, and NCCL takes some
    two = SimpleNamespace(rank=1, local=0, size=2, all_gather=lambda mine: [3, mine, 9])
    for ranks, limit, rows in [(None, 1 << 50, 64), (None, five, 5), (None, five - 1, 4), (None, 1, 1),
                               (two, five + model_gpu.NCCL_BYTES, 3), (two, five, 1)]:
        s = settings("--memory-limit", str(limit), preset="big", device="gpu", batch_tokens=512 * 1024, ranks=ranks)
        assert (s.micro_batch, s.memory_limit, s.threads, s.precision) == (rows, limit, 1, "bf16")
    some = sum(model_gpu.memory_plan(CONFIGS["big"], 46, 512, "bf16", optimizer="muon").values())
    assert settings("--memory-limit", str(some), preset="big", device="gpu").micro_batch == 32         # not 46 + 18
    monkeypatch.setattr(train, "available_cores", lambda: 6)
    seven = SimpleNamespace(rank=1, local=0, size=7, all_gather=lambda x: [x])         # more than cores
    assert [settings(options, ranks=ranks).threads for options, ranks in [
        ("", None), ("--micro-batch 4", None), ("--threads 5", None), ("", seven)]] == [6, 4, 5, 1]


def test_pairs_of_rows_stay_together():
    """In micro-batches of any size; and what weighs them comes along."""
    inputs, targets = np.arange(5 * 2 * 4).reshape(5, 2, 4), np.arange(5 * 2 * 6).reshape(5, 2, 6)
    for micro_batch, sizes in (1, [2] * 5), (2, [4, 4, 2]), (3, [6, 4]), (9, [10]):
        training = training_of(SimpleNamespace(config=SimpleNamespace(context=8)), None, SimpleNamespace(micro_batch=micro_batch))
        parts = list(train.micro_batches(training, inputs, targets, "counted", np.arange(10).reshape(5, 2), "weigh"))
        assert [last for _, last in parts] == [False] * (len(sizes) - 1) + [True] and {part[4] for part, _ in parts} == {"weigh"}
        assert [len(part[0]) for part, _ in parts] == sizes
        rows = [np.concatenate([part[i] for part, _ in parts]) for i in (0, 1, 3)]
        assert np.array_equal(rows[0], inputs.reshape(10, 4)) and np.array_equal(rows[1], targets.reshape(10, 6))
        assert rows[2].tolist() == list(range(10))


def test_sizes_in_place_of_the_presets():
    """And what follows from dim."""
    assert train.choose_sizes(given("--dim 256"), "small") == replace(SMALL, dim=256, hidden=688)
    with value_error(r"^dim \(128\) must be a multiple of 2 x heads \(2 x 5\): heads must divide 64."):
        train.choose_sizes(given("--heads 5"), "small")


def test_default_tokens_a_step_are_whole_windows():
    """Rounded down to them, but at least one; what was asked for is not rounded."""
    for context, tokens in (100, 2000), (2049, 2049):
        assert settings(config=replace(SMALL, context=context)).batch_tokens == tokens


def test_settings_that_do_not_fit():
    for options, words in [("--batch-tokens 129", "--batch-tokens 129 is not a multiple of the context, 128."),
                           ("--matmul ours --memory-limit 1GB", "--matmul --memory-limit is for the GPU engine; add --device gpu.")]:
        assert refusal(settings, options) == words


# -- what a run has recorded -------------------------------------------------------------------------------------------
def test_the_record_of_a_run(monkeypatch):
    s = settings("--data a.txt")
    recorded = dataclasses.asdict(s)
    good = {"script": "train.py", "tokens": 0, "seconds": 1.5, "settings": recorded, "more": None}
    monkeypatch.setattr(checkpoint, "load_state", lambda folder: state)
    for state in good, {**good, "seconds": 7}:
        assert train.read_run("f") == (s, state)
    # of the first version, which named the kind of attention, and had AdamW alone
    state = {**good, "settings": {**recorded, "attention": "naive"}}
    del state["settings"]["optimizer"]
    assert train.read_run("f") == (replace(s, optimizer="adamw"), state)
    for name, value, why in [
            ("settings", 7, "not a mapping"), ("settings", {"preset": "small"}, "missing"),
            ("settings", {**recorded, "speed": 1}, "unexpected keyword argument 'speed'")]:
        state = {**good, name: value}
        with value_error(f"^f was not written by train.py, sft.py or rl.py: how the run was made is not recorded .*{why}.*.$"):
            train.read_run("f")
    del state["settings"]
    with value_error(r"recorded \('settings'\)\.$"):
        train.read_run("f")


def test_what_a_resumed_run_refuses(tmp_path, monkeypatch):
    """Before its weights are read: no checkpoint, another script's; then: other settings."""
    s = settings("--data a.txt --steps 9 --threads 2 --num-samples 1")
    state = {"script": "train.py", "tokens": 0, "seconds": 1.5, "settings": dataclasses.asdict(s)}
    loaded, out = [], str(tmp_path)
    model = SimpleNamespace(config=SMALL, step=4)
    put(monkeypatch, checkpoint, lock_folder=loaded.append,
        load_state=lambda folder, model=None: {**state, "model": model},
        load=lambda *rest: loaded.append(rest) or (model, "tokenizer"))

    def resume(options, script="train.py"):
        return train.resume(given("--resume", options), out, script, Ranks())

    def refused(words, *arguments):
        assert refusal(resume, *arguments) == words
    refused(f"there is nothing to resume in {out}.", "")
    assert loaded == []
    write(tmp_path / "config.json", "")
    refused(f"the run in {out} is one of train.py: resume it with that.", "", "sft.py")
    assert loaded == [out]
    for options, words in rows("""
            big                      | the preset small, not big
            --data ./b.txt ../c.txt  | --data 'a.txt', not 'b.txt', '../c.txt'
            --memory-limit 5         | --memory-limit None, not 5
            --base out/x/            | --base None, not out/x"""):
        refused(f"the run in {out} has {words}: a resumed run keeps its settings. Leave the option out, or start a new run with --out.", options)
    same = resume("small --steps 9 --data ./a.txt --device auto --seed 0 --dim 128 --vocab 512")
    assert loaded[-1] == (out, model_cpu, {"dtype": np.float32, "threads": 2, "optimizer": "muon"})
    assert same == train.Training(model, "tokenizer", s, {**state, "model": model}, out, same.ranks)


def test_a_second_signal_leaves_at_once_and_an_ignored_one_never(monkeypatch, capfd):
    """SIGHUP is ignored under nohup, SIGINT in a background job of a script."""
    numbers, left = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), []
    before = [*map(signal.getsignal, numbers)]
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop = train.Stop()
        assert [*map(signal.getsignal, numbers)] == [stop.ask, stop.ask, signal.SIG_IGN] and stop.signal is None
        monkeypatch.setattr(os, "_exit", left.append)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.signal, left) == (signal.SIGTERM, [])
        assert capfd.readouterr().err == "\nFinishing the step, then saving; once more to leave at once.\n"
        stop.ask(signal.SIGINT, None)
        assert left == [130]
    finally:
        [*map(signal.signal, numbers, before)]


# -- pictures ----------------------------------------------------------------------------------------------------------
class Calls:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments, **options: self.calls.append((name, arguments, options))


def test_plot(tmp_path, monkeypatch, out_text):
    axes, figure = Calls(), Calls()
    pyplot = SimpleNamespace(subplots=lambda figsize: (figure, axes))
    monkeypatch.setattr(checkpoint, "load_pyplot", lambda: pyplot)
    log, folder = tmp_path / "log.jsonl", str(tmp_path)
    log.write_text("".join(f'{{"step": {i}, "loss": {6000 - i}}}\n' for i in range(1, 5050))
                   + '{"step": 1, "val_loss": 4, "val": {"a": [4, 1], "b": [5, 1]}}\n'
                   '{"step": 2, "val_loss": 3, "val": {"a": [3, 1], "b": [2, 1]}}\n{"step": 3, "val_loss": 1, "val": {"b": [1, 1]}}\n'
                   '{"step": 5050, "lo')
    assert train.main(["--plot", folder]) is None and out_text() == f"Wrote {folder}/loss.png.\n"
    assert figure.calls[0][:2] == ("savefig", (f"{folder}/loss.png",))
    plots = [(*arguments[:2], options["label"]) for name, arguments, options in axes.calls if name == "plot"]
    # the kinds are those of the last evaluation, each drawn through all
    assert plots == [([*range(1, 5050)], [6000.0 - i for i in range(1, 5050)], "training"), ([1, 2, 3], [5.0, 2.0, 1.0], "held out: b")]
    assert ("set_ylim", (), {"top": 6000 - 51}) in axes.calls             # the loss after a hundredth of the steps
    log.write_text('{"step": 0, "reward": 0.5, "greedy": 1, "kl": 0}\n{"step": 1, "loss": -3}\n{"step": 4, "reward": 0.75, "greedy": 2}\n')
    axes.calls.clear()
    checkpoint.plot(folder)                                              # a run of rl.py: its loss is not drawn
    assert [arguments[:2] for name, arguments, _ in axes.calls if name == "plot"] == [([0, 4], [0.5, 0.75]), ([0, 4], [1.0, 2.0])]
    assert "set_ylim" not in [name for name, *_ in axes.calls]
    for line in '{"step": 1, "loss": "x"}', '{"step": 1, "val_loss": 1, "val": {"a": []}}':
        log.write_text(line + "\n")
        with value_error("log.jsonl holds records that cannot be drawn"):
            checkpoint.plot(folder)
    with pytest.raises(FileNotFoundError, match="/no/log.jsonl"):
        checkpoint.plot(f"{folder}/no")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with value_error("^--plot needs matplotlib: pip install matplotlib.$"):
        script.load_pyplot()


# -- the whole script --------------------------------------------------------------------------------------------------
@pytest.fixture
def whole(tmp_path, monkeypatch):
    """main() with all that is slow taken away -> list of what happened."""
    monkeypatch.chdir(tmp_path)
    done, tokenizer = [], Tokenizer.train(["abab"], 264)
    tokens = np.zeros(200_000, "<u2")

    def prepare(data, vocab, base=None):
        done.append(("prepare", data, vocab))
        return tokenizer, tokens, {"text": tokens[:900]}, "key"
    put(monkeypatch, train, prepare=prepare, Stop=lambda: "stop", find_corpus=lambda preset, separator: [f"{preset}.txt"],
        save_run=lambda training: done.append(("save", training.out, dict(training.state))),
        train=lambda t, job, stop: done.append(("train", t.settings, t.out, t.model.config, stop)) or 7)
    put(monkeypatch, checkpoint, lock_folder=lambda out: done.append(("lock", out)), set_aside=lambda out: done.append(("aside", out)))
    return done


def test_a_new_run(whole, out_text):
    assert train.main("--data text.txt --threads 2 --seed 4".split()) == 7
    _, s, *rest = whole.pop()
    assert whole == [("prepare", ["text.txt"], 512), ("lock", "out/small"), ("aside", "out/small"),
                     ("save", "out/small", {"script": "train.py", "tokens": 0, "seconds": 0.0, "base": None})]
    assert (s.tokens_key, s.steps, s.seed, *rest) == ("key", 781, 4, "out/small", SMALL, "stop")
    assert out_text() == (
        "200,000 tokens are few for 800 steps: taking 781, which read them 8 times (--steps takes another number).\n"
        "small: 1,053,824 parameters, 781 steps of 2,048 tokens, 2 threads; corpus text.txt: 200,000 tokens to train on, 900 to validate.\n")


def test_what_a_new_run_refuses_and_notes(whole, monkeypatch, out_text):
    train.main("medium --device cpu --layers 1 --out ./x/../y".split())
    _, s, *rest = whole[-1]
    assert rest == ["y", replace(CONFIGS["medium"], layers=1), "stop"] and s.data == ["medium.txt"]
    whole.clear()
    with value_error(f"^{re.escape(NO_GPU)} On a CPU"):
        train.main(["medium"])
    assert whole == []
    tokenizer = Tokenizer.train(["abab"], 264)
    monkeypatch.setattr(train, "prepare", lambda data, vocab, base=None: (tokenizer, np.zeros(size, "<u2"), {"a": np.zeros(held_out)}, "key"))
    size, held_out = 132, 5
    train.main(["--layers", "1"])
    held_out = 4
    with value_error("^small.txt: the end of a text, which is held out for validation, is too short: it needs more than 4 tokens.$"):
        train.main(["--layers", "1"])
    size = 131
    with value_error("too short: 131 tokens to train on, and a window has 132"):
        train.main([])


def test_a_short_text_is_read_so_many_times_at_most(out_text):
    for options, preset, tokens, steps, warmup in [
            ("", "small", 8 * 2048 * 125, 800, 40), ("", "small", 200_000, 781, 40), ("", "small", 200, 1, 0), ("--warmup 99", "small", 40 * 2048, 320, 99),
            ("", "medium", 100_000, 48, 4), ("", "big", 1_000_000, 122, 12), ("--steps 4000", "big", 1_000_000, 4000, 300)]:
        s = settings(options, preset=preset)
        before = s.steps
        train.cap_steps(given(options), s, tokens)
        assert (s.steps, s.warmup) == (steps, warmup)
        assert (f"{tokens:,} tokens are few" in out_text()) == (steps < before)


# -- a base ------------------------------------------------------------------------------------------------------------
def save_base(folder, config, texts=("abab",), state=None):
    """A model that has learned nothing; without a state it is anybody's."""
    model, tokenizer = model_cpu.Model(config, 3, np.float32), Tokenizer.train(texts, config.vocab)
    model.step = 7
    checkpoint.save(str(folder), model, tokenizer, state or {})
    if state is None:
        os.remove(folder / checkpoint.STATE)
    return model, tokenizer


# -- evaluation of a folder --------------------------------------------------------------------------------------------
def evaluate(folder, name, *records):
    path = folder / name
    path.write_text("\n".join(text if isinstance(text, str) else json.dumps(dict(zip(("good", "bad", "name"), text)))
                              for text in records))
    return train.main(["--evaluate", str(folder), "--data", str(path)])


def test_pairs_of_sentences(tmp_path, capsys):
    """All ids are as probable: of two sentences it is the one with fewer, however often it was read before."""
    model, tokenizer = save_base(tmp_path, MINI)
    model.params["heads"][...] = 0.0
    checkpoint.save(str(tmp_path), model, tokenizer, {})
    assert evaluate(tmp_path, "x.jsonl", ("x", "xyz", "b"), "", ("xyz", "x", "a"), ("qr", "rq", "b"), ("x" * 9, "x" * 10, "b"),
                    ("x", "x", "c\x1b")) is None
    assert capsys.readouterr().out == "b 0.833\na 0.000\nc\ufffd 0.500\naverage 0.444\n"


def test_the_score_of_a_sentence(monkeypatch):
    """Whatever stands beside it in a batch: the log-probability of each id after those before it.  A batch has as many tokens as
    a micro-batch."""
    model, sizes = model_cpu.Model(MINI, 1), []
    log_probs = model.log_probs
    monkeypatch.setattr(model, "log_probs", lambda tokens, targets: sizes.append(tokens.size) or log_probs(tokens, targets))
    rng = np.random.default_rng(0)
    sentences = {str(n): rng.integers(0, 264, n).tolist() for n in (4, 2, 11, 3, 5, 2)}
    scores = train.sentence_scores(training_of(model, settings=SimpleNamespace(micro_batch=1)), sentences)
    for text, ids in sentences.items():
        logits = model.logits([ids[:-1]])[0, :, 0]
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        assert abs(scores[text] - sum(log_p[t, y] for t, y in enumerate(ids[1:]))) < 1e-12
    assert len(sizes) > 1 and max(sizes) <= MINI.context


def test_the_loss_of_a_text_is_that_of_validation(tmp_path, capsys):
    model, tokenizer = save_base(tmp_path, MINI)
    text = "To be, abab\n\n<|endoftext|>\n\nor not to be. " * 9
    evaluate(tmp_path, "x.txt", text)
    ids = [tokenizer.special_id("<|endoftext|>") if i % 2 else tokenizer.encode(part)
           for i, part in enumerate(re.split("\n\n(<.*>)\n\n", text))]
    tokens = np.array([*np.hstack(ids), ids[1]])
    training = training_of(model, tokenizer, SimpleNamespace(micro_batch=3))
    result = train.validate(training, {"x": tokens}, math.inf)
    assert capsys.readouterr().out == f"{tmp_path}/x.txt: loss {train.in_words(result)}\n"


@pytest.mark.parametrize("changes, start", [({"bos_token_id": 1}, 1), ({}, 2), ({"mtp_heads": 3, "bos_token_id": None}, 0),
                                            ({"bos_token_id": 17}, None), ({"eos_token_id": [2]}, None)])
def test_what_begins_a_sentence(tmp_path, changes, start):
    shelf.write_folder(tmp_path, **changes)
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    if start is None:
        with pytest.raises(ValueError, match="config.json names no special token as bos or eos.$"):
            checkpoint.text_start(tmp_path, tokenizer)
    else:
        assert checkpoint.text_start(tmp_path, tokenizer) == start


def test_what_cannot_be_evaluated(tmp_path):
    save_base(tmp_path, MINI)
    for name, text, message in [
            ("a.jsonl", "", "a.jsonl is empty: there are no pairs in it."), ("a.txt", "", "a.txt is empty: there is"),
            ("a.txt", "a", "a.txt is too short: it has"), ("a.jsonl", '{"good": "a"', "line 1, is not JSON"),
            *(("a.jsonl", record, "a.jsonl, record 1, cannot be used (") for record in
              ["5", ("a", 5, "x"), ("a", "b"), ("a", "b", ["x"]), ("", "b", "x"), ("a", "x" * 11, "x")])]:
        with pytest.raises(ValueError, match=re.escape(message)):
            evaluate(tmp_path, name, text)
    with pytest.raises(ValueError, match="^--evaluate needs --data"):
        train.main(["--evaluate", str(tmp_path)])
    os.remove(tmp_path / "config.json")
    with pytest.raises(FileNotFoundError):
        evaluate(tmp_path, "a.txt", "a")


def test_the_rate_of_each_optimizer(whole, tmp_path):
    """From a base it is half of that."""
    save_base(tmp_path / "theirs", replace(SMALL, layers=1))
    for options, lr in ("", 4e-3), ("--optimizer adamw", 2e-3), ("--base theirs --optimizer adamw", 1e-3), ("--lr 0.125", 0.125):
        train.main(["--threads", "1", *options.split()])
        assert whole[-1][1].lr == lr and (whole[-1][1].optimizer == "adamw") == ("adamw" in options)


def test_what_a_base_is(tmp_path):
    """Ours says its preset and its files; of another's the preset is the widest that is no wider, or small."""
    s = settings("--data a.txt b.txt", preset="medium")
    save_base(tmp_path, MINI, state={"script": "sft.py", "tokens": 0, "seconds": 0.0, "settings": dataclasses.asdict(s)})
    assert train.describe(str(tmp_path)) == ("medium", ["a.txt", "b.txt"])
    os.remove(tmp_path / checkpoint.STATE)
    for dim, preset in (32, "small"), (256, "medium"), (736, "medium"), (768, "big"):
        write(tmp_path / "config.json", json.dumps(checkpoint.llama_config(replace(SMALL, dim=dim, hidden=None), 0)))
        assert train.describe(str(tmp_path)) == (preset, None)
    with value_error("^there is no model in out/none: `python train.py big` trains one, then sft.py one that answers; --base names another.$"):
        train.describe("out/none", "big")


def test_sizes_of_a_base(tmp_path):
    """They are its own, but for the context."""
    config = replace(MINI, context=32)
    save_base(tmp_path, config)

    def sizes(*options):
        return train.choose_sizes(given("--base", str(tmp_path), *options), "big")
    assert sizes() == config
    assert sizes("--context 16") == replace(config, context=16, positions=32)
    with value_error(f"^the model in {tmp_path} has its sizes: leave out --dim --vocab.$"):
        sizes("--vocab 272 --dim 64 --context 8")


def test_a_run_from_a_base(tmp_path, monkeypatch, out_text):
    """It begins with the base's weights and tokenizer, and is written into out/, not beside a base that lies elsewhere.
    Resumed, without base or data/, it makes the same bits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "Stop", lambda: SimpleNamespace(signal=None))
    monkeypatch.setattr(checkpoint, "lock_folder", lambda out: os.makedirs(out, exist_ok=True))     # this process has both runs
    real, saved = train.save_run, []

    def save_run(training):
        real(training)
        saved.append((training.model.step, training.model.flat_params.copy()))
        if training.model.step == 2:
            shutil.copytree(training.out, "half")
    monkeypatch.setattr(train, "save_run", save_run)
    base, tokenizer = save_base(tmp_path / "hub/theirs", Config(dim=32, heads=2, kv_heads=1, layers=1, context=32, vocab=272, predict=2),
                                "other words than those of the text")
    write("text.txt", "".join(f"line {i} of {i * i}\n" for i in range(400)))

    def run(*options):
        return train.run(train.parse_arguments(shell_words(options)), Ranks())
    quick = "--data text.txt --steps 4 --batch-tokens 128 --save-every 2 --eval-every 2 --threads 1 --lr 0.01".split()
    assert run("--base hub/theirs/", *quick) == 0
    said, out = out_text(), "out/theirs-more"
    assert said.startswith("hub/theirs: ") and "Training a tokenizer" not in said and os.listdir("hub") == ["theirs"]
    assert [step for step, _ in saved] == [0, 2, 4] and np.array_equal(saved[0][1], base.flat_params)
    assert checkpoint.read_tokenizer(out).tokens == tokenizer.tokens and checkpoint.read_config(out) == base.config
    shutil.rmtree("hub")
    shutil.rmtree("data")
    assert run("--resume --base hub/theirs --out half") == 0
    assert np.array_equal(saved[3][1], saved[2][1])
    assert read_log(out) == read_log("half") and len(read_log(out)) > 4
