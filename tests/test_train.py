"""train.py: rows, steps and measures by loops over tokens; what is held out; runs, as a user starts them."""
import json
import math
import os
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
from cases import once_a_module, parametrize, put, read, write
from runs import TEXT, TINY, read_log, run

import script
import train
from gradcheck import slope
from model_cpu import Config, Model
from tokenizer import Tokenizer

T = 16
TOKENIZER = Tokenizer.train([TEXT], 272)
CONFIG = Config(dim=8, heads=2, kv_heads=1, layers=1, context=T, vocab=272, predict=3, mtp_weight=0.4)


def make_training(**settings):
    """A run of a model in float64, whose weights are so large that no two of its numbers are alike."""
    model = Model(CONFIG)
    model.flat_params += 0.3 * np.random.default_rng(1).standard_normal(model.flat_params.size)
    settings = train.Settings("small", 23, 2 * T, 1e-3, 0, 15, 15, "gpu", "fp32", 1, 2, **settings)
    return train.Training(model, TOKENIZER, settings, {"tokens": 0, "seconds": 0}, "out", script.Ranks())


def random_rows(number, most):
    """Rows of 2 to `most` ids, of which some are learned."""
    rng = np.random.default_rng(most)
    return [(rng.integers(272, size=n), rng.random(n) < 0.6) for n in rng.integers(2, most + 1, number)]


def nats(model, row, k=0):
    """-log p of head k, summed token by token over what a row learns; and how many tokens these are."""
    ids, mask = row
    logits = model.logits(ids[None, :model.config.context])[0, :, k]
    losses = [np.logaddexp.reduce(z) - z[i] for z, i, learned in zip(logits, ids[1 + k:], mask[1 + k:]) if learned]
    return np.array([sum(losses), len(losses)])


def mean_nats(model, rows, k=0):
    """Of all that these rows learn."""
    return np.divide(*sum(nats(model, row, k) for row in rows))


def assert_gradient(model, gradient, loss):
    """The gradient is that of loss(), by finite differences in a direction drawn at random."""
    place = model.flat_params.copy()
    direction = np.random.default_rng(2).standard_normal(place.size)
    way = np.zeros(1)

    def loss_there():
        model.flat_params[:] = place + way * direction
        return loss()
    assert gradient @ direction == pytest.approx(slope(loss_there, way, 0, 1e-4), rel=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Rows, steps, measures
# ---------------------------------------------------------------------------------------------------------------------
def test_windows(monkeypatch):
    """Each once an epoch, in random order, on a grid at a random place, of which none is left out.  What a step reads is a
    function of the seed and its number."""
    put(monkeypatch, train, prepare=lambda *_: (np.arange(66), {}))
    batch, again, other = [train.pretraining(make_training(seed=seed, data=[])).batch for seed in (3, 3, 4)]
    windows = np.array([ids for step in range(90) for ids, _ in batch(step)[0]])
    starts = windows[:, 0].reshape(60, 3)
    assert np.array_equal(windows, windows[:, :1] + np.arange(T + 3))
    assert (np.diff(np.sort(starts)) == T).all() and {*starts.flat} == {*range(48)}
    assert len({tuple(epoch // T) for epoch in starts}) == 6
    assert again(8)[0][0][0][0] == windows[16, 0] != other(8)[0][0][0][0]


@parametrize("size, micro_batch", [(1, 1), (1, 3), (3, 1), (9, 2)])
def test_a_step_has_the_gradient_of_the_whole(size, micro_batch):
    """In micro-batches of so many windows, by so many ranks, of which some have no row; each sums its gradient once."""
    training = make_training()
    training.settings.micro_batch = micro_batch
    model = training.model
    some = random_rows(7, T + 3)
    sums = []
    model.communicator = SimpleNamespace(all_reduce=lambda array: sums.append(array.copy()))
    for rank in range(size):
        vars(training.ranks).update(rank=rank, size=size)
        train.forward_backward(training, some, None)
        assert len(model.nll) <= micro_batch * T
        model.flat_grads[...] = 0
    gradients = sums[::2]                           # in between the losses of several ranks
    assert len(gradients) == size

    def loss():
        first, second, third = [mean_nats(model, some, k) for k in range(3)]
        return first + 0.2 * (second + third)
    assert_gradient(model, sum(gradients), loss)


def test_what_is_measured_is_a_sum_over_tokens():
    """In bits a byte a special token, 270, has no bytes; and token 265 several."""
    training = make_training()
    some = [*random_rows(20, T + 1), (np.array([1, 270, 265]), np.ones(3, bool))]
    measured = train.measure(training, {"a": some[:5], "b": some[5:]})
    assert len(training.model.nll) <= 2 * T
    for part, units in (some, [measured["val_loss"], measured["val_bpb"]]), (some[5:], measured["val"]["b"]):
        total, count = sum(nats(training.model, row) for row in part)
        text = [i for ids, mask in part for i in ids[1:][mask[1:]] if i < 268]
        assert units == pytest.approx([total / count, total / math.log(2) / len(TOKENIZER.decode_bytes(text))])


@parametrize("size", [2, 40, 65, 66, 500])
def test_every_token_but_the_first_is_measured_once(size):
    """In windows side by side, of which the last one is moved back, so that it is full."""
    ids, masks = zip(*train.text_rows(np.arange(size), 64))
    assert np.concatenate(ids)[np.concatenate(masks)].tolist() == [*range(1, size)]
    assert len(ids) == math.ceil((size - 1) / 64) and {*map(len, ids)} == {min(size, 65)}


# ---------------------------------------------------------------------------------------------------------------------
# The corpus
# ---------------------------------------------------------------------------------------------------------------------
def test_the_held_out_part_begins_at_a_document_else_at_a_line(tmp_path):
    path = f"{tmp_path}/text"
    for seed in range(60):
        data = b"".join(random.Random(seed).choices([b"a ", b"\n", b"\n<|endoftext|>\n"], [9, seed % 3, seed % 2], k=999)) + b"a"
        write(path, data)
        low = len(data) - len(data) // 10
        cuts = [low]
        for boundary in rb"\n", rb"^<\|endoftext\|>$":
            cuts = [match.end() for match in re.finditer(boundary, data, re.MULTILINE) if match.start() >= low] or cuts
        assert train.split_point(path) == cuts[0]


def test_what_is_held_out_is_learned_by_nothing(tmp_path, monkeypatch):
    """The last documents of a file are held out, under its kind.  Windows' line ends and a byte order mark change nothing,
    and what was prepared is not prepared again."""
    monkeypatch.chdir(tmp_path)
    files = ["web.txt", "books_a.txt", "books_b.txt"]
    texts = [[f"{name} {i} is a house" + "qx" * (i > 96) for i in range(60, 100)] for name in files]
    for name, documents in zip(files, texts):
        write(name, "\n<|endoftext|>\n".join(documents))
    tokenizer = train.make_tokenizer(files, 300)
    tokens, val = train.prepare(files, tokenizer)
    learned, web, books = [tokenizer.decode(ids).replace("\n", "").split("<|endoftext|>")[:-1] for ids in (tokens, val["web"], val["books"])]
    assert learned == [text for part in texts for text in part[:-3]]
    assert [web, books] == [texts[0][-3:], texts[1][-3:] + texts[2][-3:]]
    assert not any(b"qx" in token for token in tokenizer.tokens)
    put(monkeypatch, tokenizer, encode_files=None)
    write("web.txt", b"\xef\xbb\xbf" + read("web.txt"))
    write("books_a.txt", read("books_a.txt").replace(b"\n", b"\r\n"))
    assert np.array_equal(train.prepare(files, tokenizer)[0], tokens)


def test_which_files_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("data")
    put(monkeypatch, script, make_english=list)
    found = []
    for name in "none", "tiny", "web_0", "books_1":
        write(f"data/{name}.txt", "x")
        found += script.find_corpus("small") + script.find_corpus("big")
    assert [path[5:-4] for path in found] == "english english tiny tiny tiny web_0 tiny books_1 web_0".split()


def test_english_and_its_questions(tmp_path, monkeypatch):
    """Of a library of one file: what is prose is text; what is too short for that answers a question."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("test")
    prose = "This is a paragraph that is long enough to be read."
    write("some.py", f'def f():\n  """Does  a\n  thing.\n\n  {prose}"""\nclass C:\n  """Is it.\n\n  {prose}\n\n  More: {prose}"""\n'
                     f'def g():\n  """f(x) -> y"""\ndef h():\n  """Word"""\ndef k():\n  """{prose}"""')
    write("test/x.py", 'def f():\n  """A test."""')
    put(monkeypatch, os, __file__=f"{tmp_path}/os.py")
    script.make_english()
    text = read("data/english.txt").decode()
    assert len(text) > 200_000 and text.endswith(f"\n\n<|endoftext|>\n\n{prose}\n\n<|endoftext|>\n\nMore: {prose}")
    pairs = [[*record.values()] for record in json.loads(read(script.find_records("data/english.txt")))]
    assert pairs == [["some/f", "Does a thing."] * 2 + ["thing. a Does"], ["some/C", "Is it."] * 2 + ["it. Is"],
                     ["some/g", "f(x) -> y"] * 2 + ["y -> f(x)"]]


@parametrize("word, name", [("so", "play.txt"), ("да", "play.md")])
def test_of_a_play_what_was_not_learned_is_asked(tmp_path, word, name):
    path = f"{tmp_path}/{name}"
    spoken = [f"{i}\nsays" + 400 * f" {word}" for i in range(1000)]
    write(path, "\n\n".join(f"THE KING:\n{speech}" for speech in spoken))
    asked = [[*record.values()] for record in json.loads(read(script.find_records(path)))]
    rest = spoken[int(asked[0][0][:3]):]
    assert train.split_point(path) < read(path).index(rest[0].encode())
    assert asked == [[a.replace("\n", " "), b] * 2 + [" ".join(b.split()[::-1])] for a, b in zip(rest, rest[1:])]


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------
def open_run(out, name="train.py"):
    return train.open_run(name, {}, out, script.Ranks())


def train_base():
    """A run on a short text, in the current folder."""
    write("text.txt", TEXT[:1500])
    run(f"train.py --data text.txt {TINY} --micro-batch 1 --lr 0.01 --eval-every 7 --final-lr 0.3 "
        "--mtp-weight 0.7 --decay 0.3 --momentum 0.8 --seed 5 --out base")
    return open_run("base")


@once_a_module
def base(new_folder):
    return train_base()


def test_a_run_is_this_loop(base):
    """A short text is read eight times; a tenth of the steps is warmup; the rate ends at a share of its peak.  At last all
    that is held out is measured."""
    model = Model(Config(16, 2, 1, 1, 32, 272, mtp_weight=0.7), 5, np.float32, optimizer="muon")
    job = train.pretraining(base)
    tokens, val = train.prepare(["text.txt"], base.tokenizer)
    steps = len(tokens) // 16
    warmup = steps // 10
    log = read_log("base")
    for step, record in enumerate(record for record in log if "lr" in record):
        losses = model.forward(*train.make_batch(job.batch(step)[0], 32, 4))
        model.backward()
        cosine = math.cos(math.pi * max(0, step - warmup) / (steps - 1 - warmup))
        lr = min(0.01 * (step + 1) / warmup, 0.0065 + 0.0035 * cosine)
        norm = model.update(lr, decay=0.3, momentum=0.8)
        numbers = [record[name] for name in ("loss", "lr", "grad_norm", "step", "tokens")]
        assert numbers == pytest.approx([losses[0], lr, norm, model.step, 128 * model.step], rel=1e-3)
    assert {record["step"] for record in log if "val" in record} == {*range(0, steps, 7), 16, steps}
    val_loss = mean_nats(base.model, train.text_rows(val["text"], 32))
    assert log[-1]["val_loss"] == pytest.approx(val_loss, rel=1e-4)


def test_a_text_is_measured_whole(base):
    """In the window that is asked for, without a token that ends it; Windows' line ends and a byte order mark change
    nothing."""
    rows = train.text_rows(np.array(base.tokenizer.encode(TEXT[:500])), 24)
    write("short", "\ufeff" + TEXT[:500].replace("\n", "\r\n"))
    printed = run("train.py --evaluate base --data short --context 24").stdout
    assert f"short: loss {mean_nats(base.model, rows):.4f}, " in printed


def test_pairs_of_sentences(base):
    """The share of pairs of which the good one is the more probable, by name; a tie counts a half."""
    pairs = [dict(name="ab"[i > 12], good=TEXT[i:][:30], bad=TEXT[9 * i:][:30]) for i in range(20)]
    right = []
    for _, *texts in map(dict.values, pairs):
        rows = [[268, *base.tokenizer.encode(text)] for text in texts]
        good, bad = [nats(base.model, (np.array(ids), ids))[0] for ids in rows]
        right.append(np.heaviside(bad - good, 0.5))
    a, b = np.mean(right[:13]), np.mean(right[13:])
    write("pairs.jsonl", "\n".join(map(json.dumps, pairs)))
    assert run("train.py --evaluate base --data pairs.jsonl").stdout == f"a {a:.3f}\nb {b:.3f}\naverage {(a + b) / 2:.3f}\n"


def test_a_base_goes_on(base):
    """With its sizes, tokenizer and weights, from step 0, at half the rate; AdamW halves that once more."""
    run("train.py --base base --data text.txt --optimizer adamw --batch-tokens 128 --steps 3 --warmup 0 --out more")
    more = open_run("more")
    start, first, *_ = read_log("more")
    assert start["val_loss"] == pytest.approx(read_log("base")[-1]["val_loss"], rel=1e-6) and more.model.config == base.model.config
    assert [first["step"], first["lr"]] == [1, train.DEFAULTS["small"]["lr"] / 4] and more.model.v.size > base.model.v.size


def test_on_another_device_only_what_changes_is_noted(out_text):
    training = make_training()
    train.apply_options({"device": "cpu", "threads": 1}, training.settings, CONFIG, None, "out", training.ranks)
    assert out_text().count("note: ") == 1


def test_each_rank_takes_its_share_and_a_gpu_of_its_own(monkeypatch):
    config = train.CONFIGS["small"]
    assert train.choose_machine({}, "small", config, 2048, SimpleNamespace(size=2, local=1))["micro_batch"] == 8
    taken = []
    put(monkeypatch, train.model_gpu, pick=lambda device: train.model_gpu, take_gpu=taken.append)
    train.take_engine("gpu", train.CONFIGS["big"], SimpleNamespace(local=1))
    assert taken == [1]


def test_a_tokenizer_reads_nothing_that_is_held_out():
    """Of large texts it reads pieces."""
    parts = script.tokenizer_sample([("a", 0, 150_400_000), ("b", 0, 600_000)])
    assert sum(end - start for _, start, end in parts) < 110_000_000
    assert all(end <= (150_400_000 if path == "a" else 600_000) for path, _, end in parts)
