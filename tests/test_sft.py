"""sft.py: what is learned and what is not, batches, held-out prompts, exact resume, bad input."""
import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
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
import tempfile
import time
import traceback
import types
import unicodedata
from unittest import mock

import attack
import numpy as np
import pytest

import chat
import checkpoint
import model_cpu
import model_gpu
import sft
import train
from script import printable, run_script
from tokenizer import CHAT_TEMPLATE, CHATML_PARTS, SPECIAL_TOKENS, Tokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DATA = os.path.join(os.path.dirname(ROOT), "shared", "data")
QUICK = ["--batch-tokens", "256", "--epochs", "2", "--eval-every", "10", "--save-every", "1", "--threads", "2", "--lr", "0.01"]
GREEN = re.compile(r"\x1b\[32m(.*?)\x1b\[0m", re.DOTALL)


def run(folder, *arguments, script="sft.py", **environment):
    """The script in a fork of this process, which spares the imports."""
    files = [tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2)]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.chdir(folder)
            os.environ.update(environment)
            for number, file in enumerate(files, 1):
                os.dup2(file.fileno(), number)
            sys.stdin, sys.stdout, sys.stderr = open(os.devnull), os.fdopen(1, "w"), os.fdopen(2, "w")
            sys.argv = [script, *arguments]
            run_script(__import__(script.removesuffix(".py")).main, to_the_end=script != "chat.py")
        except SystemExit as left:
            code = left.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    limit = time.monotonic() + attack.PATIENCE
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > limit:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    said = []
    for file in files:
        file.seek(0)
        said.append(file.read())
        file.close()
    return subprocess.CompletedProcess(arguments, os.waitstatus_to_exitcode(found[1]), *said)


def run_anew(folder, *arguments):
    """In a process of its own, where BLAS takes one thread whatever it does in this one: the same numbers, bit for bit."""
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_THREADS")}       # as in a terminal
    return subprocess.run(attack.command("sft.py", *arguments), cwd=folder, text=True, capture_output=True, env=clean)


def read_log(folder, out):
    """The log without the seconds, which no run repeats."""
    with open(os.path.join(folder, out, "log.jsonl"), encoding="utf-8") as file:
        return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in file]


def invented_words(rng, count):
    return ["".join(rng.choices("abcdefghijklmnoprstuvw", k=rng.randint(1, 7))) for _ in range(count)]


@pytest.fixture(scope="module")
def records():
    """Each eighth of shared/data's records, or as many invented ones as make a test."""
    found = []
    for name in ("alpaca_data.json.xz", "instructions_extra.json.xz"):
        if os.path.exists(os.path.join(DATA, name)):
            with lzma.open(os.path.join(DATA, name), "rt", encoding="utf-8") as file:
                found += json.load(file)[::8]
    if found:
        return found
    print("shared/data holds no instructions: these are invented")
    rng = random.Random(0)
    words = [*invented_words(rng, 500), "é", "猫", "🙂", "<|end|>", "<|assistant|>", "\n", "\n\n", "  "]

    def text(most):
        return " ".join(rng.choices(words, k=rng.randint(1, most)))
    return [{"instruction": text(30), "input": text(300) * (i % 3 == 0), "output": "x" + text(600)} for i in range(2000)]


@pytest.fixture(scope="module")
def tokenizer(records):
    made = Tokenizer.train([record["output"] for record in records[:2000]], 1500)
    made.encode = functools.cache(made.encode)      # the same texts are asked for at every context
    return made


@pytest.fixture(scope="module")
def examples(records, tokenizer):
    """dict of T -> the examples of all records; whole ones under None."""
    turns = [sft.make_turns(record) for record in records]
    return {T: [sft.make_example(tokenizer, turn, T or 1 << 30) for turn in turns] for T in (None, 128, 512)}


# ---------------------------------------------------------------------------------------------------------------------
# The mask
# ---------------------------------------------------------------------------------------------------------------------
def test_learned_is_the_response_with_its_end_in_every_record(records, tokenizer, examples):
    """Made anew from the text alone: the template as one string of bytes, in which each token has its place."""
    size = np.array([len(token) for token in tokenizer.tokens])
    special = np.isin(np.arange(tokenizer.vocab_size), list(tokenizer.special.values()))
    for record, (ids, mask, cut) in zip(records, examples[None], strict=True):
        question = record["instruction"] + ("\n\n" + record["input"] if record["input"] else "")
        before = b"<|user|>" + question.encode() + b"<|end|><|assistant|>"
        assert b"".join([tokenizer.tokens[i] for i in ids]) == before + record["output"].encode() + b"<|end|>"
        begins = np.cumsum(size[ids]) - size[ids]
        assert (mask == (begins >= len(before))).all() and not cut
        # four special tokens, where the template has them, and none in the texts
        places = [0, len(before) - len("<|end|><|assistant|>"), len(before) - len("<|assistant|>"), begins[-1]]
        assert begins[special[ids]].tolist() == places


@pytest.mark.parametrize("T", [128, 512])
def test_what_is_too_long_is_cut_and_still_learns(examples, T):
    """A whole example; or of the prompt its last tokens, three quarters of the window, and as much of the response as
    fits."""
    room = T - T // 4
    cuts = 0
    for (whole, all_learned, _), (ids, mask, cut) in zip(examples[None], examples[T], strict=True):
        assert cut == (len(whole) > T + 1) and len(ids) == len(mask) <= T + 1 and mask.any()
        if not cut:
            assert (ids == whole).all() and (mask == all_learned).all()
            continue
        cuts += 1
        size = len(whole) - all_learned.sum()                   # of the prompt
        kept = min(size, room)
        assert ids[0] == whole[0] and (ids[1:kept] == whole[size - kept + 1:size]).all()
        assert not mask[:kept].any() and mask[kept:].all()
        assert (ids[kept:] == whole[size:][:T + 1 - kept]).all()
        assert mask.sum() >= min(T // 4 + 1, all_learned.sum())
    assert cuts > 10


@pytest.mark.parametrize("T", [128, 512])
def test_an_epoch(examples, tokenizer, T):
    """Every example once, within the budget, each row with something to learn, and every target in its place."""
    pairs, K, budget, pad = [example[:2] for example in examples[T]], 4, 8192, tokenizer.special["<|endoftext|>"]
    plan = sft.plan_epoch(sft.padded_lengths(pairs, T), budget, 5, 0)
    assert sorted(np.concatenate(plan).tolist()) == list(range(len(pairs)))
    tokens = used = 0
    for rows in plan:
        inputs, targets = sft.make_batch([pairs[i] for i in rows], T, K, pad)
        B, P = inputs.shape
        assert B == len(rows) and P <= T and B * P <= budget and targets.shape == (B, P + K - 1)
        assert ((targets >= 0).sum(axis=1) >= 1).all()
        for row, i in enumerate(rows):
            ids, mask = pairs[i]
            n = len(ids) - 1
            assert (inputs[row, :n] == ids[:-1]).all() and (inputs[row, n:] == pad).all()
            # token i of the text is the target at place i-1 if it is learned, and nothing else is a target
            assert np.array_equal(np.flatnonzero(targets[row] >= 0), np.flatnonzero(mask) - 1)
            assert (targets[row][targets[row] >= 0] == ids[mask]).all()
        tokens, used = tokens + inputs.size, used + sum(len(pairs[i][0]) - 1 for i in rows)
    print(f"context {T}: {len(plan)} batches, {1 - used / tokens:.1%} padding")
    assert 1 - used / tokens < 0.1


def test_batches_depend_on_seed_and_epoch_alone():
    lengths = np.random.default_rng(0).integers(1, 17, 700) * 8

    def plan(seed, epoch):
        return [rows.tolist() for rows in sft.plan_epoch(lengths, 1024, seed, epoch)]
    plans = [plan(3, epoch) for epoch in range(4)]
    assert plans == [plan(3, epoch) for epoch in range(4)] and plans != [plan(4, epoch) for epoch in range(4)]
    assert len({len(batches) for batches in plans}) == 1            # as many steps in every epoch
    assert len({json.dumps(sorted(map(sorted, batches))) for batches in plans}) == 4    # other companions every time
    assert len({json.dumps(batches[0]) for batches in plans}) == 4          # in another order every time
    widths = [lengths[rows].max() for rows in plans[0]]             # no order in them, neither up nor down
    assert 0.3 < np.mean(np.diff(widths) > 0) < 0.7


def test_padding_changes_nothing(tokenizer):
    """The loss of two rows in one batch is that of each by itself, weighted with what is learned."""
    config = model_cpu.Config(dim=16, heads=4, kv_heads=2, layers=2, context=64, vocab=1504, predict=3)
    model = model_cpu.Model(config)
    pairs = [sft.make_example(tokenizer, turns, 64)[:2] for turns in ([("Why?", "No.")], [("a b c", "yes " * 12)])]
    losses, counts = [], []
    for batch in (pairs, pairs[:1], pairs[1:]):
        inputs, targets = sft.make_batch(batch, 64, 3, tokenizer.special["<|endoftext|>"])
        losses.append(model.forward(inputs, targets))
        counts.append(model_cpu.count_targets(targets, inputs.shape[1], 3))
    assert (counts[0] == counts[1] + counts[2]).all()
    assert np.allclose(losses[0] * counts[0], losses[1] * counts[1] + losses[2] * counts[2], rtol=1e-13)


# ---------------------------------------------------------------------------------------------------------------------
# Records
# ---------------------------------------------------------------------------------------------------------------------
CHAT = [{"role": role, "content": text} for role, text in [
    ("system", "Be brief."), ("user", " Hi\n"), ("assistant", "Yo "), ("user", "Why?"), ("assistant", "<|end|>")]]


def test_turns():
    assert sft.make_turns({"instruction": " a", "input": "b ", "output": "c"}) == [(" a\n\nb ", "c")]
    assert sft.make_turns({"instruction": "a", "input": "", "output": "c"}) == [("a", "c")]
    assert sft.make_turns({"instruction": "a", "output": "c", "source": 7}) == [("a", "c")]
    assert sft.make_turns({"messages": CHAT}) == [("Be brief.", None), (" Hi\n", "Yo "), ("Why?", "<|end|>")]
    assert sft.make_turns({"messages": CHAT[1:3]}) == [(" Hi\n", "Yo ")]
    assert sft.make_turns({"messages": [{"role": "system", "content": ""}, *CHAT[1:3]]}) == [(" Hi\n", "Yo ")]
    user, assistant = CHAT[1:3]
    for record, words in [("text", "named fields"), ({}, "no text"), ({"instruction": "a", "output": 3}, "no text"),
                          ({"instruction": "a", "output": " \n"}, "an empty"), ({"messages": "Hi"}, "no list"),
                          ({"messages": []}, "in turn"), ({"messages": [user]}, "in turn"),
                          ({"messages": [assistant, user]}, "in turn"),
                          ({"messages": [user, CHAT[0], assistant]}, "in turn"), ({"messages": [CHAT[0]]}, "in turn"),
                          ({"messages": [user, {"role": "tool", "content": "x"}]}, "in turn"),
                          ({"messages": [user, {"role": "assistant"}]}, "no text"), ({"messages": [user, 3]}, "no list"),
                          ({"messages": [user, {"role": "assistant", "content": ""}]}, "an empty response"),
                          ({"messages": CHAT[1:4] + [{"role": "assistant", "content": " "}]}, "an empty response"),
                          ({"messages": [{"role": "user", "content": [{"text": "x"}]}, assistant]}, "no text"),
                          ({"conversations": [{"from": "human", "value": "x"}]}, "no text")]:
        with pytest.raises(ValueError, match=words):
            sft.make_turns(record)


def as_words(talker, ids):
    return "".join(talker.decode(ids).replace("system", "").replace("user", "").split())


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, "".join(CHATML_PARTS)])
def test_a_system_text_stands_where_the_template_has_it(template):
    """Of a conversation, of its cut form, of what is held out and asked; other questions with it are other ones."""
    talker = Tokenizer(range(256), [], ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>", "<|im_start|>", "<|im_end|>"])
    talker.template = template
    turns = sft.make_turns({"messages": CHAT})
    ids, mask, cut = sft.make_example(talker, turns, 1 << 20)
    ours = ("<|user|>Be brief.\n\n Hi\n<|end|><|assistant|>", "Yo <|end|>", "<|user|>Why?<|end|><|assistant|>", "<|end|><|end|>")
    chatml = ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi\n<|im_end|>\n<|im_start|>assistant\n",
              "Yo <|im_end|>", "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n", "<|end|><|im_end|>")
    parts = ours if template == CHAT_TEMPLATE else chatml
    assert talker.decode(ids) == "".join(parts) and talker.decode(ids[mask]) == parts[1] + parts[3] and not cut
    first, answer = talker.prompt(" Hi\n", None, "Be brief."), [*b"Yo ", talker.end_of_turn]
    assert sft.make_example(talker, turns, len(first) + len(answer) - 1)[0].tolist() == first + answer
    long = [turns[0], ("x" * 300, "y" * 300)]
    ids, mask, cut = sft.make_example(talker, long, 400)
    assert cut and ids.tolist()[:300] == talker.prompt("x" * 300, 300, "Be brief.") and "Be brief." in talker.decode(ids)
    frame = len(talker.prompt("", None, ""))        # a system text that takes more than half of it does not push the question out
    for size in (75 - frame - 20, 75 - frame + 20, 120, 150, 170, 500):
        ids, mask, cut = sft.make_example(talker, [("s" * size, None), ("the question", "y" * 300)], 100)
        asked = talker.decode(ids[~mask])
        assert cut and "the question" in asked and mask.sum() >= 26, (size, asked)
    talks = [[(text, None)] * bool(text) + [(f"{i}", "z")] for i in range(10) for text in ("", "a", "b")]
    found = sft.make_examples(talker, talks, 64, 0)
    assert len(found.held_out) == len({*found.questions}) == 3 and {*found.questions} <= {
        (text, f"{i}") for i in range(10) for text in ("", "a", "b")}
    # two that read alike are both held out, or none
    alike = [[(f"{i}", None), ("x", "z")] for i in range(45)] + [[(f"{i}\n\nx", "z")] for i in range(45)]
    for seed in range(20):
        examples = sft.make_examples(talker, alike, 64, seed)
        assert len(examples.held_out) == 2 * 4 and len(examples.train) == 2 * 41 and len(examples.questions) == 4
        both = [[as_words(talker, ids) for ids, _ in part] for part in (examples.train, examples.held_out)]
        assert not {*both[0]} & {*both[1]}
    asked = [talker.decode(ids[~mask]) for ids, mask in found.held_out]
    assert sorted(asked) == sorted(talker.decode(talker.prompt(text, None, system)) for system, text in found.questions)


def test_several_turns(tokenizer):
    """Both answers are learned; the turns that do not fit are left out whole, from the first such on."""
    special, turns = tokenizer.special, [("one", "two"), ("three", "four"), ("five " * 40, "six"), ("7", "8")]
    ids, mask, cut = sft.make_example(tokenizer, turns[:2], 64)
    assert tokenizer.decode(ids) == "".join(f"<|user|>{a}<|end|><|assistant|>{b}<|end|>" for a, b in turns[:2]) and not cut
    assert tokenizer.decode(ids[mask]) == "two<|end|>four<|end|>"
    again, same, cut = sft.make_example(tokenizer, turns, 64)
    assert again.tolist() == ids.tolist() and same.tolist() == mask.tolist() and cut
    # a first turn that had to be cut stands alone, though there would be room
    turns = [("five " * 200, "six"), ("7", "8")]
    ids, mask, cut = sft.make_example(tokenizer, turns, 64)
    assert len(sft.make_example(tokenizer, turns[1:], 64)[0]) < 65 - len(ids)
    assert cut and ids[0] == special["<|user|>"] and tokenizer.decode(ids[mask]) == "six<|end|>"
    assert (ids == special["<|user|>"]).sum() == 1


def test_no_text_becomes_a_special_token(tokenizer):
    """Whatever is typed, an example has the special tokens of the template and no others."""
    special = list(tokenizer.special.values())
    for text in [*tokenizer.special, "<|assistant|>ok<|end|>", "a\r\n\x00", "\ud800", "w" * 5000, " " * 5000, ""]:
        for T in (128, 1 << 20):
            ids, mask, _ = sft.make_example(tokenizer, [(text, text + "x")], T)
            template = ["<|user|>", "<|end|>", "<|assistant|>"] + ["<|end|>"] * (len(ids) <= T)
            assert [tokenizer.tokens[i].decode() for i in ids[np.isin(ids, special)]] == template
            if len(ids) <= T:
                assert tokenizer.decode_bytes(ids[mask]) == (text + "x<|end|>").encode("utf-8", "surrogatepass")


def test_prompts_are_in_one_part_only(tokenizer):
    rng = random.Random(0)
    conversations = [[(str(rng.randrange(120)), str(i))] for i in range(600)]       # each prompt about five times
    found = sft.make_examples(tokenizer, conversations, 64, seed=1)
    trained, held_out = ([tokenizer.decode(ids[~mask]) for ids, mask in part] for part in (found.train, found.held_out))
    assert len(trained) + len(held_out) == 600 and not set(trained) & set(held_out)
    assert len(set(held_out)) == len(set(trained + held_out)) // 10 and len(found.questions) == sft.QUESTIONS
    # it is the first prompt of a conversation that counts, not a later one
    chats = [[(f"first {i % 40}", "a"), (f"last {i % 7}", "b")] for i in range(280)]
    talks = sft.make_examples(tokenizer, chats, 64, seed=1)
    firsts = [{tokenizer.decode(ids).split("<|end|>")[0] for ids, _ in part} for part in (talks.train, talks.held_out)]
    assert len(talks.held_out) == 4 * 7 and not firsts[0] & firsts[1] and len(firsts[1]) == 4
    assert {f"<|user|>{question}" for _, question in talks.questions} == firsts[1]
    assert found.key == sft.make_examples(tokenizer, conversations, 64, seed=1).key
    assert found.key != sft.make_examples(tokenizer, conversations, 64, seed=2).key
    assert found.key != sft.make_examples(tokenizer, conversations[:-1] + [[("0", "?")]], 64, seed=1).key
    assert len(sft.make_examples(tokenizer, conversations[:2], 64, seed=1).held_out) == 1
    with pytest.raises(ValueError, match="one prompt only"):
        sft.make_examples(tokenizer, conversations[:1] * 5, 64, seed=1)


# ---------------------------------------------------------------------------------------------------------------------
# Pairs made from the text that the base has read
# ---------------------------------------------------------------------------------------------------------------------
def learned_part(path):
    with open(path, "rb") as file:
        return file.read()[:train.split_point(path)].decode()


def test_pairs_of_python_are_held_out(tmp_path, monkeypatch):
    """Of the library's first modules: to parse all takes seconds."""
    docstrings, path = list(itertools.islice(sft.python_docstrings(), 120)), str(tmp_path / "python-3.12.txt")
    monkeypatch.setattr(sft, "python_docstrings", lambda: docstrings)
    train.write_python_corpus(path, '<|endoftext|>')
    pairs, learned = [turns[0] for turns in sft.read_conversations([path])], learned_part(path)
    assert len(pairs) > 150 and len(pairs) == len({name for name, _ in pairs})
    assert not [response for _, response in pairs if response in learned]
    true = {}
    for name, docstring in itertools.chain.from_iterable(docstrings):
        true.setdefault(name, set()).add(" ".join(docstring.split()))
    for name, response in pairs:
        assert response == " ".join(response.split()) and any(whole.startswith(response) for whole in true[name])


def test_pairs_of_python_to_the_letter(tmp_path, monkeypatch):
    path = tmp_path / "python-3.9.txt"
    path.write_bytes(b"What is known. \xff And more. |Behind the cut.")
    monkeypatch.setattr(train, "split_point", lambda found: found == str(path) and path.read_bytes().index(b"|"))
    found = [[("m", "\n  A module\n of\tits own.\n  \t\nA second part."), ("m.f", "What is known."), ("m.g", "Oneword"),
              ("m.h", "Behind the cut.")],
             [("m.f", "Something else."), ("m", "The name again."), ("n.a", "is known"), ("n.b", "is knowN")]]
    monkeypatch.setattr(sft, "python_docstrings", lambda: iter(found))
    assert sft.read_conversations([str(path)]) == [[("m", "A module of its own.")], [("m.h", "Behind the cut.")],
                                                   [("m.f", "Something else.")], [("n.b", "is knowN")]]
    found[:] = [[("m.f", "What is known."), ("m.g", "Oneword")]]
    with pytest.raises(ValueError) as error:
        sft.python_pairs(str(path))
    assert str(error.value) == (f"{path} holds all of the library's documentation, so nothing is held out; name instructions "
                                "with --data (./fetch_data.sh instructions brings some).")


def write_play(path, speeches=1200):
    """Each reply begins with the word that the speech ends with: something that can be learned."""
    rng = random.Random(0)
    words, last, paragraphs = invented_words(rng, 60), "so", []
    for i in range(speeches):
        said = [last, *rng.choices(words, k=rng.randint(3, 12)), str(i)]
        said[rng.randrange(1, len(said))] += "\n"
        last = rng.choice(words)
        paragraphs.append(f"{rng.choice(['ANNA', 'First Boy', 'A. B.'])}:\n{' '.join(said)} {last}")
    paragraphs[-3] = "They go."                                     # a stage direction is no speech
    path.write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")


def test_pairs_of_a_play_are_held_out(tmp_path):
    write_play(tmp_path / "play.txt")
    path = str(tmp_path / "play.txt")
    pairs, learned = [turns[0] for turns in sft.read_conversations([path])], learned_part(path)
    assert len(pairs) > 60 and not [response for _, response in pairs if response in learned]
    whole = (tmp_path / "play.txt").read_text(encoding="utf-8")
    for speech, reply in pairs:
        assert "\n" not in speech and "\n" in reply and reply.split()[0] == speech.split()[-1]
        before, found, _ = whole.partition(":\n" + reply + "\n")
        assert found and " ".join(before.split("\n\n")[-2].split(":")[1].split()) == speech
    assert "They go." not in str(pairs)
    (tmp_path / "prose.txt").write_text("A sentence of prose.\n\nAnd one more: this.\n\n" * 200, encoding="utf-8")
    with pytest.raises(ValueError, match="fetch_data.sh instructions"):
        sft.read_conversations([str(tmp_path / "prose.txt")])


def pairs_of(tmp_path, monkeypatch, text, before=""):
    """What play_pairs makes of a play whose validation part is this text."""
    path = tmp_path / "some.txt"
    path.write_bytes((before + text).encode("utf-8", "surrogateescape"))
    monkeypatch.setattr(train, "split_point", lambda found: found == str(path) and len(before.encode()))
    return sft.play_pairs(str(path))


def test_pairs_of_a_play_to_the_letter(tmp_path, monkeypatch):
    pairs = functools.partial(pairs_of, tmp_path, monkeypatch)
    assert pairs("A:\nHow\n are  you?\n\nB b:\nWell:\n fine. \n\n\n\nC:\nYes.\n\n", "É:\nOf what is learned.\n\n") == [
        [("How are you?", "Well:\n fine. ")], [("Well: fine.", "Yes.")]]
    assert pairs("A:\r\nHow\r\nare?\r\n\r\nB:\r\nYes\r\nno.\r\n\r\nC:\r\nSo.") == [[("How are?", "Yes\nno.")], [("Yes no.", "So.")]]
    assert pairs("A:\nHow\udcff?\n\nB:\n\udcc3.\n\nC:\nSo.") == [[("How\ufffd?", "\ufffd.")], [("\ufffd.", "So.")]]
    for name, good in (("x" * 40, True), ("x" * 41, False), ("", False), ("a:b", False), ("a\nb", False), ("é 1.", True)):
        text = "\n\n".join(["A:\none", f"{name}:\ntwo", "B:\nthree", "C:\nfour", "D:\nfive", "E:\nsix"])
        chain = [[("three", "four")], [("four", "five")], [("five", "six")]]
        if good:
            assert pairs(text) == [[("one", "two")], [("two", "three")], *chain]
        else:                                                       # three pairs of six paragraphs are not more than half
            with pytest.raises(ValueError):
                pairs(text)
            assert pairs(text + "\n\nF:\nseven") == [*chain, [("six", "seven")]]
    for speeches, others, good in ((1, 0, False), (2, 0, False), (3, 0, True), (3, 1, False), (4, 1, True), (5, 2, True),
                                   (5, 3, False), (6, 3, True), (6, 4, False), (2, 7, False), (0, 3, False), (0, 4, False)):
        text = "\n\n".join([f"A:\nsay {i}" for i in range(speeches)] + ["A stage direction."] * others)
        if good:
            assert len(pairs(text)) == speeches - 1
        else:
            with pytest.raises(ValueError) as error:
                pairs(text)
            assert str(error.value) == (f"{tmp_path}/some.txt is neither a play nor the text inside Python, so it gives no "
                                        "questions; name instructions with --data (./fetch_data.sh instructions brings some).")


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------
CONFIG = model_cpu.Config(dim=32, heads=2, kv_heads=1, layers=1, context=128, vocab=520, predict=4)


def save_base(folder, out, config=CONFIG, step=7, **settings):
    """A checkpoint as train.py leaves one, of a small model that has learned nothing yet."""
    tokenizer = Tokenizer.train([(folder / "play.txt").read_text(encoding="utf-8")], 520)
    args = train.parse_arguments(["--data", "play.txt", "--micro-batch", "4", "--threads", "1"])
    s = train.make_settings(train.given_options(args), "small", config, train.DEFAULTS["small"], train.Ranks())
    state = {"script": "train.py", "tokens": 0, "seconds": 0.0, "settings": {**dataclasses.asdict(s), **settings}}
    model = model_cpu.Model(config, 0, np.float32)
    model.step = step
    checkpoint.save(str(folder / out), model, tokenizer, state)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a play, a base, and a fine-tuned model: (folder, log, what was printed)."""
    folder = tmp_path_factory.mktemp("sft")
    write_play(folder / "play.txt")
    save_base(folder, "out/play")
    (folder / "out/play/log.jsonl").write_text("")
    done = run_anew(folder, "--base", "out/play", *QUICK)
    assert done.returncode == 0, done.stderr
    return folder, read_log(folder, "out/play-sft"), done.stdout


def training_of(model, tokenizer, settings=None, **given):
    """A Training in one process."""
    return train.Training(model, tokenizer, settings or types.SimpleNamespace(**given), {}, "out/x", train.Ranks())


def test_a_job_takes_the_batch_of_its_step(base, monkeypatch):
    """Epoch by epoch, each in an order of its own."""
    folder, _, _ = base
    model, tokenizer = checkpoint.load(str(folder / "out/play"), model_cpu)
    settings = train.Settings(**checkpoint.load_state(folder / "out/play-sft")["settings"])
    examples = sft.make_examples(tokenizer, [[(f"say {i}", "x" * (i % 50 + 1))] for i in range(300)], 128, 0)
    monkeypatch.setattr(train, "token_bytes", lambda tokenizer: np.arange(tokenizer.vocab_size) % 7)
    job = sft.fine_tuning(training_of(model, tokenizer, settings), examples)
    lengths = sft.padded_lengths(examples.train, 128)
    plans = [sft.plan_epoch(lengths, settings.batch_tokens, settings.seed, epoch) for epoch in range(3)]
    for step, rows in enumerate([rows for plan in plans for rows in plan]):
        expected = sft.make_batch([examples.train[i] for i in rows], 128, 4, tokenizer.special["<|endoftext|>"])
        assert all(np.array_equal(a, b) for a, b in zip(job.batch(step), expected))
    learned = np.concatenate([ids[mask] for ids, mask in examples.train])
    assert job.bytes_per_token == np.mean(learned % 7)


def test_the_held_out_loss_falls(base):
    folder, log, printed = base
    held_out = [record["val_loss"] for record in log if "val_loss" in record]
    assert log[0]["step"] == 0 and held_out[-1] < held_out[0] - 0.3
    assert f"Held-out loss {held_out[0]:.4f} before, {held_out[-1]:.4f} after." in printed
    losses = [record["loss"] for record in log if "loss" in record]
    assert len(losses) % 2 == 0 and len(losses) > 20 and np.mean(losses[-5:]) < np.mean(losses[:5])
    settings = json.loads((folder / "out/play-sft/tokenizer_config.json").read_text())
    assert settings["chat_template"] == CHAT_TEMPLATE and settings["eos_token"] == "<|end|>"
    done = run(folder, "--model", "out/play-sft", "--prompt", "so", "--max-tokens", "30", script="chat.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert checkpoint.read_tokenizer(folder / "out/play-sft").template


def test_killed_and_resumed_is_exact(base):
    folder, whole, _ = base
    attack.kill_again_and_again(folder, "sft.py", ["--base", "out/play", *QUICK], "out/killed", 3, seed=1)
    done = run_anew(folder, "--resume", "--out", "out/killed")
    assert done.returncode == 0, done.stderr
    assert read_log(folder, "out/killed") == whole


def test_ctrl_c_saves_and_resumes(base):
    folder, whole, _ = base
    arguments = ["--base", "out/play", *QUICK, "--save-every", "1000"]
    code, said = attack.interrupt(folder, "sft.py", arguments, "out/asked", 2, lambda process: process.send_signal(signal.SIGINT))
    assert code == 130 and "python sft.py small --resume --out out/asked" in said, said
    done = run_anew(folder, "small", "--resume", "--out", "out/asked")
    assert done.returncode == 0, done.stderr
    assert read_log(folder, "out/asked") == whole
    first, last = (next(record["val_loss"] for record in order if "val_loss" in record) for order in (whole, whole[::-1]))
    assert f"Held-out loss {first:.4f} before, {last:.4f} after." in done.stdout
    assert "finished" in run(folder, "--resume", "--out", "out/asked").stdout


def test_resume_refuses(base):
    folder, _, _ = base
    data = folder / "some.jsonl"
    data.write_text("".join(json.dumps({"instruction": str(i), "output": f"It is {i}."}) + "\n" for i in range(40)))
    arguments = ["--data", "some.jsonl", "--base", "out/play", "--out", "out/some", "--batch-tokens", "512",
                 "--epochs", "2"]
    assert run(folder, *arguments).returncode == 0
    # what is fine-tuned can be fine-tuned again, without --data on the same
    assert run(folder, "--base", "out/some", "--out", "out/again", "--batch-tokens", "512", "--epochs", "1").returncode == 0
    for script, arguments, words in [("sft.py", ["--epochs", "1"], "--epochs 2, not 1"),
                                     ("sft.py", ["--lr", "1"], "--lr"),
                                     ("sft.py", ["--base", "out/again"], "--base out/play, not out/again"),
                                     ("sft.py", ["--data", "play.txt"], "--data"), ("train.py", [], "sft.py")]:
        done = run(folder, "--resume", "--out", "out/some", *arguments, script=script)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    data.write_text(data.read_text().replace("It is 7.", "It is seven."))
    done = run(folder, "--resume", "--out", "out/some")
    assert done.returncode == 2 and "some.jsonl: not what out/some began with." in done.stderr
    done = run(folder, "--resume", "--out", "out/play")
    assert done.returncode == 2 and "train.py" in done.stderr


def test_a_finished_run_is_given_more_epochs(base):
    """Its steps are counted on, the schedule is that of a run of so many, and the log has each step once."""
    folder, whole, _ = base
    shutil.copytree(folder / "out/play-sft", folder / "out/longer")
    steps = whole[-1]["step"]
    done = run(folder, "--resume", "--out", "out/longer", "--epochs", "2")      # as many as it has
    assert done.returncode == 0 and done.stdout == (
        f"The run in out/longer is finished: {steps} steps (--epochs takes more).\n")
    done = run(folder, "--resume", "--out", "out/longer", "--epochs", "3")
    assert done.returncode == 0, done.stderr
    settings = train.Settings(**checkpoint.load_state(folder / "out/longer")["settings"])
    assert settings.steps == 3 * steps // 2
    assert f"was finished after {steps} steps; it goes on to {settings.steps}." in done.stdout
    log = read_log(folder, "out/longer")
    assert log[:len(whole)] == whole                    # with the answers that it had when it was finished
    losses = [record for record in log if "loss" in record]
    assert [record["step"] for record in losses] == list(range(1, settings.steps + 1))
    assert [record["lr"] for record in losses[steps:]] == [
        train.learning_rate(step, settings) for step in range(steps, settings.steps)]
    before, *_, after = [record["val_loss"] for record in log if "val_loss" in record]
    assert f"Held-out loss {before:.4f} before, {after:.4f} after." in done.stdout
    assert checkpoint.read_tokenizer(folder / "out/longer").template


def test_show_colours_what_is_learned(base):
    folder, _, _ = base
    records = [{"instruction": "Say\x1b[32m hi", "output": "<|end|> \x07hé"}, {"messages": CHAT},
               {"instruction": "long " * 200, "output": "longer " * 200}, {"instruction": "not shown", "output": "x"}]
    (folder / "show.json").write_text(json.dumps(records))
    tokenizer = Tokenizer.load(folder / "out/play/tokenizer.json")
    arguments = ["--base", "out/play", "--data", "show.json", "--show", "3"]
    shown = run(folder, *arguments, NO_COLOR="").stdout
    in_brackets = run(folder, *arguments, NO_COLOR="1").stdout
    pieces = re.split(r"--- example (\d+): (\d+) of (\d+) tokens are learned(, cut)?\n", shown)[1:]
    assert len(pieces) == 15
    for record, number, learned, count, cut, text in zip(records, *(pieces[i::5] for i in range(5))):
        ids, mask, was_cut = sft.make_example(tokenizer, sft.make_turns(record), 128)
        assert (int(learned), int(count), bool(cut)) == (mask.sum(), len(ids), was_cut)
        safe = str.maketrans("\x1b\x07", "\ufffd\ufffd")
        assert "".join(GREEN.findall(text)) == tokenizer.decode(ids[mask]).translate(safe)
        assert GREEN.sub("", text)[:-1] == tokenizer.decode(ids[~mask]).translate(safe)
        assert GREEN.sub(r"[\1]", text) in in_brackets
    assert "not shown" not in shown and "\x1b" not in in_brackets
    assert printable("\u3000\xa0\u200d\tcafé\n") == "\u3000\xa0\u200d\tcafé\n"      # harmless, and so shown


def test_a_reader_that_leaves(base):
    """Of --show it has seen enough; a run goes on to its end."""
    folder, whole, _ = base
    for arguments in ["--data", "play.txt", "--show", "100"], ["--out", "out/unread", *QUICK]:
        process = subprocess.Popen([sys.executable, os.path.join(ROOT, "sft.py"), "--base", "out/play", *arguments],
                                   cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.close()
        said = process.stderr.read()
        process.stderr.close()
        assert (process.wait(), said) == (0, "")
    assert read_log(folder, "out/unread") == whole
    done = subprocess.run(f"{sys.executable} {os.path.join(ROOT, 'sft.py')} --base out/play --show 1 >&-", shell=True,
                          cwd=folder, text=True, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_base_of_other_sizes_than_its_preset(base):
    """Everything is read from the checkpoint: its context, its vocabulary, the weight of its further heads."""
    folder, _, _ = base
    state = checkpoint.load_state(folder / "out/play")
    config = model_cpu.Config(dim=32, heads=2, kv_heads=1, layers=1, context=32, vocab=520, predict=2, mtp_weight=0.7)
    tokenizer = Tokenizer.load(folder / "out/play/tokenizer.json")
    checkpoint.save(str(folder / "out/other"), model_cpu.Model(config, 0, np.float32), tokenizer, state)
    done = run(folder, "--base", "out/other", "--batch-tokens", "512", "--epochs", "1", "--threads", "1")
    assert done.returncode == 0 and "cut to fit" in done.stdout, done.stderr
    assert checkpoint.read_config(str(folder / "out/other-sft")) == config
    shown = run(folder, "--base", "out/other", "--show", "30", NO_COLOR="1").stdout
    assert all(int(count) <= 33 for count in re.findall(r"of (\d+) tokens are learned", shown)) and "learned, cut" in shown
    state["settings"]["preset"] = "huge"
    checkpoint.save(str(folder / "out/huge"), model_cpu.Model(config, 0, np.float32), tokenizer, state)
    done = run(folder, "--base", "out/huge")
    assert done.returncode == 2 and "the setting preset cannot be 'huge'" in done.stderr


def test_a_base_of_others_takes_the_form_that_it_has_the_tokens_for(base):
    """Without a template, with <|im_start|> among its tokens: ChatML, which the model made from it keeps."""
    folder, _, _ = base
    ours = Tokenizer.load(folder / "out/play/tokenizer.json")
    theirs = Tokenizer(ours.tokens[:516], ours.merges, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    (folder / "theirs").mkdir()
    checkpoint.save(str(folder / "theirs"), model_cpu.Model(CONFIG, 0, np.float32), theirs, {})
    os.remove(folder / "theirs" / checkpoint.STATE)
    assert checkpoint.read_tokenizer(folder / "theirs").template == ""
    quick = ["--base", "theirs", "--data", "play.txt", "--context", "64"]
    shown = run(folder, *quick, "--show", "1", NO_COLOR="1").stdout.split("\n", 1)[1]
    assert re.match(r"<\|im_start\|>user\n.*<\|im_end\|>\n<\|im_start\|>assistant\n\[.*(<\|im_end\|>)?\]\n$", shown, re.DOTALL), shown
    done = run(folder, *quick, *QUICK[:2], "--epochs", "1", "--threads", "1")
    assert done.returncode == 0, done.stderr
    made = checkpoint.read_tokenizer(folder / "theirs-sft")
    assert made.template == "".join(CHATML_PARTS) and made.end_of_turn == theirs.special["<|im_end|>"]
    assert checkpoint.read_config(str(folder / "theirs-sft")) == dataclasses.replace(CONFIG, context=64, positions=128)
    done = run(folder, "--resume", "--out", "theirs-sft", "--context", "128")
    assert done.returncode == 2 and "has --context 64, not 128" in done.stderr


def test_the_base_is_safe(base):
    """No name of --out replaces the model that a run begins with, or moves it."""
    folder, _, _ = base
    names = ("config.json", "model.safetensors", "train_state.safetensors", "log.jsonl")
    before = [(folder / "out/play" / name).read_bytes() for name in names]
    (folder / "out/link").symlink_to("play")
    (folder / "out/file").write_text("keep")
    for out, words in [("out/play", "is the base itself"), ("./out/play/", "is the base itself"),
                       ("out/link", "is the base itself"), ("out/file", "File exists"),
                       ("out/file/x", "Not a directory")]:
        done = run(folder, "--base", "out/play", "--out", out, *QUICK)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert [(folder / "out/play" / name).read_bytes() for name in names] == before
    assert (folder / "out/file").read_text() == "keep" and not (folder / "out/play.1").exists()


def test_bad_input_is_one_sentence(base):
    folder, log, _ = base
    good = '{"instruction": "a", "output": "b"}\n'
    for name, text in [("empty.json", ""), ("no.json", "[]"), ("broken.jsonl", good + good + '{"instruction": "a",\n'),
                       ("broken.json", '[{"instruction": "a"},\n\n oops]'), ("deep.json", "[" * 100_000), ("number.json", "7"),
                       ("wrong.json", '[{"text": "a"}, {"instruction": "a", "output": ""}]'), ("one.jsonl", good * 9),
                       ("prose.txt", "Only prose.\n\n" * 99), ("binary.json", "\x00\x01")]:
        (folder / name).write_text(text)
    here = ["--base", "out/play"]
    cases = [([], "there is no model in out/small: `python train.py small` trains one"),
             (["medium"], "python train.py medium"), (["medium", *here], "of the size small, not medium"),
             ([*here, "--data", "missing.json"], "missing.json is not a file"), ([*here, "--data", "empty.json"], "of 0"),
             ([*here, "--data", "no.json"], "of 0"), ([*here, "--data", "broken.jsonl"], "broken.jsonl, line 3, is not JSON"),
             ([*here, "--data", "broken.json"], "broken.json, line 3, is not JSON"),
             ([*here, "--data", "deep.json"], "deep.json, line 1, is not JSON"),
             ([*here, "--data", "number.json"], "0 of 1 records can be used; 1 with no named fields (first: record 1)."),
             ([*here, "--data", "wrong.json"], "0 of 2 records can be used; 1 with a field that is no text"),
             ([*here, "--data", "one.jsonl"], "one prompt only"), ([*here, "--data", "prose.txt"], "--data"),
             ([*here, "--data", "binary.json"], "line 1"), ([*here, "--batch-tokens", "100"], "100"),
             ([*here, "--epochs", "0"], "at least 1"),
             (["--resume", "--out", "out/nowhere"], "nothing to resume"), (["--show", "0"], "at least 1")]
    for arguments, words in cases:
        done = run(folder, *arguments)
        assert done.returncode == 2 and "Traceback" not in done.stderr and words in done.stderr, (arguments, done.stderr)
        assert done.stderr.count("error: ") == 1, done.stderr
    assert read_log(folder, "out/play-sft") == log                  # nothing was touched


def test_records_left_out_are_counted(base, capsys):
    folder, _, _ = base
    lines = ['{"instruction": "a", "output": "b"}', "", '{"instruction": "a", "output": ""}', "[1]", "7", '{"messages": []}']
    (folder / "mixed.jsonl").write_text("\n".join(lines) + "\n")
    assert sft.read_records(str(folder / "mixed.jsonl")) == [[("a", "b")]]
    assert capsys.readouterr().out.endswith(
        "1 of 5 records can be used; 1 with an empty response (first: record 2); 2 with no named fields (first: record 3); "
        "1 with no user and assistant in turn (first: record 5).\n")


# ---------------------------------------------------------------------------------------------------------------------
# Line by line, with what stands around it replaced
# ---------------------------------------------------------------------------------------------------------------------
# a tokenizer whose tokens are bytes; the special ones come behind
BYTES, (PAD, USER, ASSISTANT, END) = Tokenizer(range(256), [], SPECIAL_TOKENS), range(256, 260)


class Stream(io.TextIOWrapper):
    """A standard output in memory; seen: what was flushed."""
    def __init__(self, encoding="utf-8"):
        super().__init__(io.BytesIO(), encoding)

    def seen(self):
        return self.buffer.getvalue().decode()


def flushed(function, *arguments):
    """-> (what it returns, what it printed and flushed, when it returned)."""
    with contextlib.redirect_stdout(Stream()) as out:
        result = function(*arguments)
        return result, out.seen()


def example(question, answer):
    return sft.make_example(BYTES, [(question, answer)], 1 << 20)[:2]


def test_find_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for preset in ("small", "medium", "big", "xl"):
        assert sft.find_data(preset, ["corpus.txt"]) == ["corpus.txt"]          # there is no data/
    (tmp_path / "data").mkdir()
    for name in ("instructions.txt", "instructions.jsonx", "my-instructions.json", "instructions"):
        (tmp_path / "data" / name).write_text("")
    assert sft.find_data("big", ["corpus.txt"]) == ["corpus.txt"]
    for name in ("instructions_b.json", "instructions.jsonl", "instructions_a.json"):
        (tmp_path / "data" / name).write_text("")
    for preset in ("medium", "big", "xl"):
        assert sft.find_data(preset, ["corpus.txt"]) == ["data/instructions.jsonl", "data/instructions_a.json",
                                                         "data/instructions_b.json"]
    assert sft.find_data("small", ["corpus.txt"]) == ["corpus.txt"]


def test_kinds_of_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in ("read_records", "python_pairs", "play_pairs"):
        monkeypatch.setattr(sft, kind, lambda path, kind=kind: [f"{kind} {path}", "and more"])
    kinds = {"a.json": "read_records", "b.JSONL": "read_records", "python-3.12.txt": "python_pairs", "a.json.txt": "play_pairs",
             "python-3.txt": "play_pairs", "python-3.12.txt.old": "play_pairs", "my-python-3.12.txt": "play_pairs"}
    for name in kinds:
        (tmp_path / name).write_text("")
    assert sft.read_conversations(list(kinds)) == [said for name, kind in kinds.items() for said in (f"{kind} {name}", "and more")]
    (tmp_path / "sub").mkdir()
    os.rename("python-3.12.txt", "sub/python-3.12.txt")
    assert sft.read_conversations(["sub/python-3.12.txt"])[0] == "python_pairs sub/python-3.12.txt"
    for path in ("sub", "none.json"):
        with pytest.raises(ValueError) as error:
            sft.read_conversations(["a.json", path])
        assert str(error.value) == f"{path} is not a file; --data takes .json, .jsonl, and texts."


@pytest.mark.parametrize("text, found", [
    (b'[1, {"a": "b"}]', [1, {"a": "b"}]), (b' \n[[2]]\n', [[2]]), (b"[]", []), (b"", []), (b"\n \n", []),
    (b'\xef\xbb\xbf[1]', [1]), (b'\xef\xbb\xbf1\n\n 2 \n"\xff"\n', [1, 2, "\udcff"]), (b'{"a": 1}\r\n{}\n', [{"a": 1}, {}]),
    (b"[1]\n[2]", "1 2 Extra data"), (b'[1,\n2,\nx]', "1 3 Expecting value"), (b"1\n2\nx\n", "3 Expecting value"),
    (b"x", "1 Expecting value"), (b"1\n" + b"1" * 5000, "2 Exceeds the limit"), (b"1\n\n" + b'{"a":' * 100_000, "3 maximum rec"),
    (b"[" * 100_000, "1 maximum recursion"), (b"[" + b"1" * 5000 + b"]", "1 Exceeds the limit")])
def test_json(tmp_path, text, found):
    (tmp_path / "x.json").write_bytes(text)
    if isinstance(found, list):
        assert sft.json_values(str(tmp_path / "x.json")) == found
        return
    *_, line, words = re.fullmatch(r"(1 )?(\d) (.*)", found).groups()
    with pytest.raises(ValueError) as error:
        sft.json_values(str(tmp_path / "x.json"))
    line, words = (2, "Extra data") if "Extra" in found else (line, words)
    if "Exceeds" in words and not hasattr(sys, "get_int_max_str_digits"):
        pytest.skip("this Python reads numbers of any length")
    assert str(error.value).startswith(f"{tmp_path}/x.json, line {line}, is not JSON ({words}")
    assert str(error.value).endswith("); the file must hold one list of records, or one record a line.")


def test_records(tmp_path, capsys):
    good, path = {"instruction": "a", "output": "b"}, str(tmp_path / "x.json")

    def read(records):
        (tmp_path / "x.json").write_text(json.dumps(records))
        return sft.read_records(path)
    assert read([good, {"instruction": "c", "output": "d"}]) == [[("a", "b")], [("c", "d")]]
    assert capsys.readouterr().out == ""
    assert len(read([good] * 2 + [7] + [{"instruction": "a", "output": " "}] * 1001)) == 2
    assert capsys.readouterr().out == (f"{path}: 2 of 1,004 records can be used; 1 with no named fields (first: record 3); 1,001 with "
                                       "an empty response (first: record 4).\n")
    assert len(read([7, 7, good])) == 1
    assert capsys.readouterr().out == f"{path}: 1 of 3 records can be used; 2 with no named fields (first: record 1).\n"
    for records, words in (([], "0 of 0 records can be used"), ([7, "x", {"messages": []}, 8], ("0 of 4 records can be used; 3 with "
                           "no named fields (first: record 1); 1 with no user and assistant in turn (first: record 3)"))):
        with pytest.raises(ValueError) as error:
            read(records)
        assert str(error.value) == f"{path}: {words}."


def test_turns_to_the_letter():
    user, assistant, empty = CHAT[1], CHAT[2], {"role": "user", "content": " "}
    assert sft.make_turns({"instruction": "", "output": "c"}) == [("", "c")]
    assert sft.make_turns({"instruction": "a", "input": None, "output": "c"}) == [("a", "c")]
    assert sft.make_turns({"messages": [empty, assistant] * 3}) == [(" ", "Yo ")] * 3
    assert sft.make_turns({"messages": CHAT + CHAT[1:3]}) == [("Be brief.", None), (" Hi\n", "Yo "), ("Why?", "<|end|>"),
                                                                (" Hi\n", "Yo ")]
    for record, words in (
            ([], "no named fields"), ({"messages": {}}, "messages that are no list of objects"),
            ({"messages": ""}, "messages that are no list of objects"), ({"messages": [3]}, "messages that are no list of objects"),
            ({"instruction": "a", "input": 3, "output": "b"}, "a field that is no text (instruction, input, output or content)"),
            ({"messages": [CHAT[0], user]}, "no user and assistant in turn"),
            ({"messages": [CHAT[0]]}, "no user and assistant in turn"),
            ({"messages": [user, assistant, user]}, "no user and assistant in turn"),
            ({"messages": [user, assistant, assistant, user]}, "no user and assistant in turn"),
            ({"messages": [{"role": "z", "content": ""}, assistant]}, "no user and assistant in turn"),
            ({"messages": [user, {"role": "assistant", "content": "\n"}]}, "an empty response")):
        with pytest.raises(ValueError) as error:
            sft.make_turns(record)
        assert str(error.value) == words


@pytest.mark.parametrize("T", [8, 13, 16, 100, 128])
def test_a_long_prompt_to_the_token(T, capsys):
    """Its beginning goes, so that a quarter of the window is left: what chat.py reads is what was learned."""
    room = math.ceil(T * 3 / 4)
    model = types.SimpleNamespace(config=types.SimpleNamespace(context=T))
    for size in (0, 1, room - 4, room - 3, room - 2, room + 5):
        text = bytes(range(size))
        cut = BYTES.prompt(text.decode(), T - T // 4)
        kept = text[-(room - 3):]
        assert BYTES.prompt(text.decode()) == [USER, *text, END, ASSISTANT]
        assert cut == [USER, *kept, END, ASSISTANT]
        session = chat.Session(model, BYTES, None)
        session.chat_form = True
        session.add_turn(text.decode())
        assert session.turns == [cut]


@pytest.mark.parametrize("T", [16, 17, 31])
def test_an_example_to_the_token(T):
    fits, room = T + 1, math.ceil(T * 3 / 4)                            # tokens of an example; those of a cut prompt
    for size in (3, fits - 6, fits - 5, fits - 4, fits - 3, 2 * fits):  # of the response, beside which there are five
        ids, mask, cut = sft.make_example(BYTES, [("x", "y" * size)], T)
        whole = [USER, ord("x"), END, ASSISTANT, *b"y" * size, END]
        assert ids.tolist() == whole[:fits] and mask.tolist() == ([False] * 4 + [True] * (size + 1))[:fits]
        assert cut == (size + 5 > fits)
    for size in (room - 4, room - 3, room - 2, 40):
        ids, mask, cut = sft.make_example(BYTES, [("x" * size, "y" * T)], T)
        kept = min(size + 3, room)
        assert ids.tolist() == [USER, *b"x" * (kept - 3), END, ASSISTANT, *b"y" * (fits - kept)] and cut
        assert mask.tolist() == [False] * kept + [True] * (fits - kept)
    for size in (fits - 14, fits - 13):                                 # 8 tokens and size + 6: it fits, or is one too long
        turns = [("ab", "cd"), ("a" * size, "bc"), ("", "")]
        ids, mask, cut = sft.make_example(BYTES, turns, T)
        assert len(ids) == (fits if size == fits - 14 else 8) and mask.tolist()[:8] == [False] * 5 + [True] * 3
        assert cut and sft.make_example(BYTES, turns[:2], T)[2] == (size == fits - 13)


def test_examples_to_the_letter():
    """Which prompts are held out, in which order they are asked, what was cut, and the fingerprint: made anew."""
    conversations = [[(f"q{i % 209}\ud800", "y" * (i % 19)), ("later", "z")] for i in range(600)]
    found = sft.make_examples(BYTES, conversations, 24, 5)
    order = sorted({turns[0][0] for turns in conversations},
                   key=lambda text: hashlib.sha256(b"5 " + text.encode("utf-8", "surrogatepass")).hexdigest())
    assert found.questions == [("", text) for text in order[:10]]
    digest, parts, cuts = hashlib.sha256(), ([], []), 0
    for turns in conversations:
        ids, mask, cut = sft.make_example(BYTES, turns, 24)
        held_out = turns[0][0] in order[:20]
        parts[held_out].append((ids.tolist(), mask.tolist()))
        cuts += cut
        digest.update(ids.tobytes() + mask.tobytes() + bytes([held_out]))
    assert tuple([(ids.tolist(), mask.tolist()) for ids, mask in part] for part in (found.train, found.held_out)) == parts
    assert found.cut == cuts > 0 and found.key == digest.hexdigest()[:12]
    for prompts, held_out in ((2, 1), (3, 1), (19, 1), (20, 2), (29, 2), (30, 3), (10_020, 1000)):
        found = sft.make_examples(BYTES, [[(str(i), "")] for i in range(prompts)], 64, 0)
        assert (len(found.held_out), len(found.train), found.cut) == (held_out, prompts - held_out, 0)
    with pytest.raises(ValueError) as error:
        sft.make_examples(BYTES, [[("a", "b")]], 64, 0)
    assert str(error.value) == "the data has one prompt only; it needs two, to learn one and hold one out."


def test_lengths_and_plan_to_the_letter():
    sizes = [1, 2, 8, 9, 10, 16, 17, 18, 20, 21, 40]
    lengths = sft.padded_lengths([(range(n), None) for n in sizes], 19)
    assert lengths.tolist() == [min(19, 8 * math.ceil((n - 1) / 8)) for n in sizes]
    for lengths, budget in (([8, 16, 8, 24, 16, 8], 32), ([8] * 9, 24), ([64, 32, 8], 31), ([8], 8), ([24, 24, 16, 8], 47),
                            ([8, 16] * 100, 64)):
        for seed, epoch in ((0, 0), (3, 1)):
            plan = [rows.tolist() for rows in sft.plan_epoch(np.array(lengths), budget, seed, epoch)]
            rng = np.random.default_rng([seed, epoch])
            order = sorted(rng.permutation(len(lengths)).tolist(), key=lambda i: -lengths[i])
            batches = []
            while order:
                rows = max(1, budget // lengths[order[0]])
                batches.append(order[:rows])
                order = order[rows:]
            assert plan == [batches[i] for i in rng.permutation(len(batches))]


def test_the_batch_of_the_comment():
    """That above make_batch, with a shorter one beside it."""
    ids, mask = example("Hi", "Yo")
    pad = 7
    inputs, targets = sft.make_batch([(ids, mask), example("", "")], 128, 3, pad)
    row = [USER, *b"Hi", END, ASSISTANT, *b"Yo"]
    assert inputs.tolist() == [row + [pad], [USER, END, ASSISTANT] + [pad] * 5]
    assert targets.tolist() == [[-1] * 4 + [*b"Yo", END] + [-1] * 3, [-1] * 2 + [END] + [-1] * 7]


def test_evaluation_to_the_letter(monkeypatch):
    """Its batches, and the two numbers from the losses of these."""
    examples = [example("q" * i, "\0y" * (i % 5)) for i in range(40)]
    seen = []

    def forward(inputs, targets):
        seen.append((inputs, targets))
        return [1.0 + inputs.size / 1000, 5.0]
    model = types.SimpleNamespace(config=types.SimpleNamespace(context=64, predict=2), forward=forward)
    loss, bpb = sft.evaluate(training_of(model, BYTES, micro_batch=3), examples)
    plan = sft.plan_epoch(sft.padded_lengths(examples, 64), 192, 0, 0)
    batches = [sft.make_batch([examples[i] for i in rows], 64, 2, PAD) for rows in plan]
    assert len(seen) == len(batches) > 3
    assert all(np.array_equal(a, b) for x, y in zip(seen, batches) for a, b in zip(x, y))
    nats = sum((1.0 + inputs.size / 1000) * (targets >= 0).sum() for inputs, targets in seen)
    tokens, size = sum(mask.sum() for _, mask in examples), sum(2 * (i % 5) for i in range(40))
    assert loss == pytest.approx(nats / tokens, rel=1e-12) and bpb == pytest.approx(nats / size / math.log(2), rel=1e-12)
    loss, bpb = sft.evaluate(training_of(model, BYTES, micro_batch=3), [example("q", "")])       # no byte of text, only an end
    assert loss == 1.008 and bpb == pytest.approx(1.008 / math.log(2), rel=1e-12)
    seen.clear()                                                        # a tokenizer of others may lack what fills up rows here
    sft.evaluate(training_of(model, types.SimpleNamespace(special={}, tokens=BYTES.tokens), micro_batch=3), examples)
    assert all(np.array_equal(x[0], np.where(y[0] == PAD, 0, y[0])) for x, y in zip(seen, batches)) and PAD != 0


def test_evaluation_of_a_model():
    """Against the probabilities of every single token."""
    model = model_cpu.Model(model_cpu.Config(dim=16, heads=2, kv_heads=1, layers=1, context=64, vocab=264, predict=2), seed=1)
    model.params["heads"][...] *= 20
    examples = [example("why " * (i % 4), "\0no" * (i % 3 + 1)) for i in range(9)]
    nats = tokens = 0
    for ids, mask in examples:
        targets = np.full((1, len(ids)), -1)
        for t in np.flatnonzero(mask[1:]):
            targets[0, :], targets[0, t] = -1, ids[t + 1]               # one target at a time
            nats, tokens = nats + model.forward(ids[None, :-1], targets)[0], tokens + 1
    size = sum(3 * (i % 3 + 1) for i in range(9))
    loss, bpb = sft.evaluate(training_of(model, BYTES, micro_batch=2), examples)
    assert loss == pytest.approx(nats / tokens, rel=1e-10) and bpb == pytest.approx(nats / size / math.log(2), rel=1e-10)


def test_an_answer_to_the_letter(monkeypatch):
    asked = []

    def generate(*arguments, **options):
        asked.append((arguments, options))
        return iter(b"No")
    monkeypatch.setattr(train, "generate", generate)
    model = types.SimpleNamespace(config=types.SimpleNamespace(context=16, predict=4))
    assert sft.answer(training_of(model, BYTES, seed=9), ("", "0123456789")) == "No"
    assert asked == [((model, [USER, *b"123456789", END, ASSISTANT]),
                      dict(temperature=0.8, top_k=50, seed=9, vocab=260, stop={PAD, USER, ASSISTANT, END}, most=150))]
    # a system text stays whole, if with what surrounds it it takes half of the room, which is 24, or less
    model.config.context = 32
    for size in (7, 8):
        assert sft.answer(training_of(model, BYTES, seed=9), ("b" * size, "0123456789abcdefghijkl")) == "No"
        assert asked[-1][0][1] == [USER, *(b"bbbbbbb\n\nabcdefghijkl" if size == 7 else b"123456789abcdefghijkl"), END, ASSISTANT]


@pytest.mark.parametrize("stop", [None, PAD, USER, ASSISTANT, END])
def test_any_special_token_ends_an_answer(stop):
    """Of a model that says what it is told to say."""
    said = itertools.cycle(b"a") if stop is None else iter([*b"No", stop, *b"more"])
    decoder = types.SimpleNamespace(tokens=[], position=0, draw=lambda *rest: (np.array([[next(said)]]), np.ones(1)))
    model = types.SimpleNamespace(config=types.SimpleNamespace(context=16, predict=4), draft_heads=0, decoder=decoder)
    assert sft.answer(training_of(model, BYTES, seed=9), ("", "why")) == ("No" if stop else "a" * 150)


def test_a_look_to_the_letter(monkeypatch):
    """What a run prints at its beginning, on the way and at its end, and what it notes."""
    asked = []
    numbers = iter([(3.0, 1.5), (2.5, 1.25), (2.0, 1.0)])
    monkeypatch.setattr(sft, "evaluate", lambda *arguments: asked.append(arguments) or next(numbers))
    monkeypatch.setattr(sft, "answer", lambda *rest: asked.append(rest) or f"to {rest[1][1]}\n\x07 '")
    questions = [("so" * (i == 1), f"q{i}\x1b") for i in range(5)]
    examples = sft.Examples([example("a", "")], np.array([8]), [example("b", "")], questions, 0, "key")
    model = types.SimpleNamespace(config=types.SimpleNamespace(context=64, predict=2))
    training = training_of(model, BYTES, steps=9, seed=4, batch_tokens=64, micro_batch=3)
    job = sft.fine_tuning(training, examples)
    assert job.bytes_per_token == 1e-9                                  # of what has no text at all
    for step, count, loss, bpb in ((0, 3, 3.0, 1.5), (4, 3, 2.5, 1.25), (9, 5, 2.0, 1.0)):
        asked.clear()
        result, said = flushed(job.evaluate, step)
        answers = [f"to q{i}\x1b\n\x07 '" for i in range(count)]
        assert result == {"val_loss": loss, "val_bpb": bpb, "val": {"responses": [loss, bpb]}, "samples": answers}
        assert asked == [(training, examples.held_out), *((training, question) for question in questions[:count])]
        assert said == f"           held-out loss {loss:.4f}, {bpb:.4f} bits/byte\n" + (
            "           to q0\\x1b\\n\\x07 '\n" if step == 4 else
            "".join(f"--- {title}\ufffd\nto q{i}\ufffd\n\ufffd '\n"
                    for i, title in enumerate(["q0", "so\n\nq1", "q2", "q3", "q4"][:count]))) + (
            "Held-out loss 3.0000 before, 2.0000 after.\n" if step == 9 else "")
        assert training.state == {"before": 3.0}


def test_each_line_is_there_when_it_is_printed(monkeypatch):
    """A run in the background is followed by what it writes to a file."""
    flushes = []
    monkeypatch.setattr("builtins.print", lambda *args, end="\n", flush=False, **options: flushes.append(flush))
    monkeypatch.setattr(sft, "evaluate", lambda *arguments: (1.0, 1.0))
    monkeypatch.setattr(sft, "answer", lambda *arguments: "a")
    examples = sft.Examples([example("a", "")], np.array([8]), [example("b", "")], [("", "q")], 0, "key")
    model = types.SimpleNamespace(config=types.SimpleNamespace(context=64, predict=2))
    job = sft.fine_tuning(training_of(model, BYTES, steps=9, seed=4, batch_tokens=64, micro_batch=3), examples)
    for step in (0, 4):
        job.evaluate(step)
    assert flushes == [True] * 4


def test_printable_shows_no_control_character():
    for char in map(chr, range(0x300)):
        obeyed = unicodedata.category(char) == "Cc" and char not in "\t\n"
        assert printable(f"a{char}{char}b") == ("a\ufffd\ufffdb" if obeyed else f"a{char}{char}b")


@pytest.mark.parametrize("no_color", [None, "", "1"])
def test_show_to_the_letter(monkeypatch, no_color):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    conversations = [[("Hi", "Yo\x1b"), ("Why", "So")], [("a" * 20, "b" * 20)], [("not", "shown")]]
    _, said = flushed(sft.show, BYTES, conversations, 20, 2)
    text = ("--- example 1: 7 of 18 tokens are learned\n"
            "<|user|>Hi<|end|><|assistant|>{Yo\ufffd<|end|>}<|user|>Why<|end|><|assistant|>{So<|end|>}\n"
            "--- example 2: 6 of 21 tokens are learned, cut\n"
            "<|user|>" + "a" * 12 + "<|end|><|assistant|>{bbbbbb}\n")
    start, stop = ("[", "]") if no_color else ("\x1b[32m", "\x1b[0m")
    assert said == text.replace("{", start).replace("}", stop)


def test_options(capsys, monkeypatch):
    assert sft.parse_arguments(["--show", "1", "--epochs", "1"]).__dict__.items() >= {
        "preset": None, "base": None, "data": None, "out": None, "show": 1, "resume": False, "epochs": 1, "lr": None}.items()
    for option in ("--show", "--epochs"):
        with pytest.raises(SystemExit):
            sft.parse_arguments([option, "0"])
        assert capsys.readouterr().err == (f"error: argument {option}: must be a whole number of at least 1 and at most "
                                           "1,000,000,000, not '0'; --help lists the options.\n")
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        sft.parse_arguments(["--help"])
    said = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).split())
    for words in ("Fine-tune a pretrained model to answer.", "the model's size (default small)",
                  "--base DIR the model to begin with, ours or any plain Llama (sft.py: default out/PRESET)",
                  (".json, .jsonl: records of instruction, input, output, or of messages (default: "
                  "data/instructions*.json; small: the base's held-out text)"), "--out DIR to write: default out/PRESET, BASE-more, BASE-sft",
                  "--show N print N examples, then stop", "--resume go on with the run in --out",
                  "--epochs EPOCHS how often to read the data", "--batch-tokens"):
        assert words in said


def test_a_base_to_the_letter(base, monkeypatch):
    folder, _, _ = base
    monkeypatch.chdir(folder)
    def read_base(preset):
        return sft.read_base({"base": "out/play", **({"preset": preset} if preset else {})})[1:]
    preset, corpus, config, tokenizer = read_base(None)
    real = checkpoint.load_state("out/play")
    assert (preset, corpus) == ("small", real["settings"]["data"])
    assert config == CONFIG and tokenizer.vocab_size == 520 and tokenizer.template == CHAT_TEMPLATE
    assert read_base("small")[2] == CONFIG
    found = {}
    monkeypatch.setattr(checkpoint, "load_state", lambda folder: found)
    not_ours = "out/play was not written by train.py or sft.py: how the run was made is not recorded ("
    for state, preset, words in (
            ({}, None, not_ours + "'settings')."),
            ({"settings": None}, None, not_ours + "'NoneType' object is not a mapping)."),
            ({"settings": {"preset": "small"}}, None, not_ours),
            ({**real, "settings": {**real["settings"], "steps": 0}}, None,
             not_ours + "the setting steps cannot be 0.)."),
            ({**real, "tokens": None}, None, not_ours + "its script, tokens or seconds cannot be)."),
            ({**real, "settings": {**real["settings"], "preset": "huge"}}, None,
             not_ours + "the setting preset cannot be 'huge'.)."),
            (real, "medium", "out/play holds a model of the size small, not medium."),
            (real, "big", "out/play holds a model of the size small, not big."), (real, "small", None), (real, None, None),
            # of an earlier version
            ({**real, "settings": {**real["settings"], "attention": "naive"}}, None, None)):
        found = state
        if words:
            with pytest.raises(ValueError) as error:
                read_base(preset)
            assert str(error.value) == words or words == not_ours and str(error.value).startswith(words)
        else:
            assert read_base(preset)[:2] == ("small", real["settings"]["data"])
    for preset in (None, "small", "big"):
        with pytest.raises(ValueError) as error:
            sft.read_base({"base": "out/none", **({"preset": preset} if preset else {})})
        assert str(error.value) == (f"there is no model in out/none: `python train.py {preset or 'small'}` trains one, "
                                    "--base names another.")


class Begun(Exception):
    """A run was begun, and would go on."""


def begin(args, base, out):
    """-> (model, tokenizer, settings, state, examples) with which sft.run begins, or goes on."""
    args.out, args.base = out, base
    with mock.patch.object(sft, "fine_tuning", side_effect=Begun) as asked, mock.patch.object(train, "connect") as connected, \
            mock.patch.object(train, "Stop"), pytest.raises(Begun):
        sft.run(args, train.Ranks())
    training, examples = asked.call_args.args
    connected.assert_called_once_with(training)
    assert training.out == os.path.normpath(out)
    return training.model, training.tokenizer, training.settings, training.state, examples


@pytest.mark.parametrize("preset, epochs, batch_tokens, lr, warmup, every", [
    ("small", 4, 1024, 7e-4, 20, 100), ("medium", 3, 8192, 5e-4, 50, 200), ("big", 3, 32768, 2e-4, 50, 200)])
def test_a_new_run_to_the_letter(tmp_path, monkeypatch, preset, epochs, batch_tokens, lr, warmup, every):
    """Its settings, its state, its first checkpoint, and all numbers of its first lines."""
    monkeypatch.chdir(tmp_path)
    write_play(tmp_path / "play.txt", 40)
    save_base(tmp_path, "out/base", preset=preset)
    with open("some.jsonl", "w") as file:
        for i in range(230):
            file.write(json.dumps({"instruction": f"say {i} " + "o" * (i % 300), "output": "yes " * (i % 60 + 1)}) + "\n")
    conversations = sft.read_conversations(["some.jsonl"])
    more = ["--threads", "1", "--device", "cpu"]
    for number, (options, changed) in enumerate([
            ([], {}), ([], {}), (["--epochs", "7", "--warmup", "3", "--mtp-weight", "0.3", "--batch-tokens", "256"],
                                {"epochs": 7, "warmup": 3, "mtp_weight": 0.3, "batch_tokens": 256}),
            (["--batch-tokens", "256", "--epochs", "1", "--seed", "3"], {"batch_tokens": 256, "epochs": 1, "seed": 3})]):
        args = sft.parse_arguments(["--base", "out/base", "--data", "./some.jsonl", *more, *options])
        out = f"out/new{number}" if number else "out/new1"
        (model, tokenizer, s, state, examples), said = flushed(begin, args, "out/base", out)
        chosen = {"epochs": epochs, "batch_tokens": batch_tokens, "mtp_weight": CONFIG.mtp_weight, "seed": 0, **changed}
        wanted = sft.make_examples(tokenizer, conversations, 128, chosen["seed"])
        lengths = sft.padded_lengths(wanted.train, 128)
        batches = sft.plan_epoch(lengths, chosen["batch_tokens"], chosen["seed"], 0)
        steps = chosen["epochs"] * len(batches)
        assert dataclasses.asdict(s) == {
            "preset": preset, "steps": steps, "batch_tokens": chosen["batch_tokens"], "micro_batch": s.micro_batch, "lr": lr,
            "warmup": changed.get("warmup", min(warmup, int(steps / 10))), "decay": 0.1, "clip": 1.0,
            "mtp_weight": chosen["mtp_weight"], "seed": chosen["seed"], "eval_every": every, "save_every": every, "threads": 1,
            "optimizer": "muon", "device": "cpu", "precision": "fp32", "matmul": "cublas", "memory_limit": None,
            "data": ["some.jsonl"], "tokens_key": wanted.key}
        assert state == {"script": "sft.py", "tokens": 0, "seconds": 0.0, "ranks": 1, "base": "out/base"} and model.step == 0
        assert model.config == dataclasses.replace(CONFIG, mtp_weight=chosen["mtp_weight"]) and model.dtype == np.float32
        assert examples.key == wanted.key and examples.questions == wanted.questions
        assert said.endswith(
            f"out/base is fine-tuned into {out} on some.jsonl: {len(wanted.train):,} conversations, {len(wanted.held_out):,} more "
            f"held out; {wanted.cut:,} cut to fit.\n{chosen['epochs']} epochs of {len(batches)} steps of at most "
            f"{chosen['batch_tokens']:,} tokens.\n")
        assert (len(wanted.train), len(wanted.held_out)) == (207, 23) and 50 < wanted.cut < 200
        loaded, _ = checkpoint.load(out, model_cpu, {"dtype": np.float32})
        assert loaded.step == 0 and loaded.config == model.config
        assert np.array_equal(loaded.flat_params, checkpoint.load("out/base", model_cpu, {"dtype": np.float32})[0].flat_params)
        assert checkpoint.load_state(out) == {**state, "settings": dataclasses.asdict(s)}
        assert json.load(open(f"{out}/tokenizer_config.json"))["chat_template"] == CHAT_TEMPLATE
        if number == 0:
            os.rename("out/new1", "out/old")                    # nobody else has the name
            os.rename("out/.new1.lock", "out/.old.lock")
            os.makedirs("out/new1")
            (tmp_path / "out/new1/log.jsonl").write_text("kept")
        if number == 1:
            assert (tmp_path / "out/new1.1/log.jsonl").read_text() == "kept"
            assert said.startswith("out/new1 held an earlier run: it is now out/new1.1.\n")
    with pytest.raises(ValueError, match="in use by another run"):      # all of them are taken by this process
        begin(sft.parse_arguments(["--data", "some.jsonl", *more]), "out/base", "out/new2")


def test_the_engine_of_a_new_run(base, monkeypatch):
    """--device decides; without it a GPU serves the larger models, and where there is none they are refused.
    """
    folder, _, _ = base
    monkeypatch.chdir(folder)
    save_base(folder, "bases/small")
    save_base(folder, "bases/medium", preset="medium")
    (folder / "some.json").write_text(json.dumps([{"instruction": str(i), "output": "x"} for i in range(20)]))
    monkeypatch.setattr(model_gpu, "cupy", None)

    def stop(*arguments):
        raise ValueError(f"pick {arguments}")

    def start(preset, *options):
        args = sft.parse_arguments(["--data", "some.json", "--micro-batch", "1", "--threads", "1", *options])
        with pytest.raises(ValueError) as error:
            begin(args, f"bases/{preset}", "out/never")
        return str(error.value)
    for options in [], ["--device", "auto"]:
        assert start("medium", *options).startswith("medium takes many hours or days on a CPU: train small, ")
    monkeypatch.setattr(model_gpu, "check_sizes", lambda config: None)
    for preset, asked, chosen in (
            ("small", None, "cpu"), ("small", "cpu", "cpu"), ("small", "gpu", "gpu"),
            ("medium", "cpu", "cpu"), ("medium", None, "gpu"), ("medium", "auto", "gpu"),
            ("medium", "gpu", "gpu")):
        wanted = []
        monkeypatch.setattr(train, "choose_device", lambda *arguments: wanted.append(arguments) or chosen)
        monkeypatch.setattr(model_gpu, "pick", stop)
        assert start(preset, *(["--device", asked] if asked else []),
                     *(["--precision", "fp32"] if chosen == "gpu" else [])) == f"pick ('{chosen}',)"
        assert wanted == [(None if asked == "auto" else asked, preset, 0)]
    assert not os.path.exists("out/never")


def test_data_of_a_new_run(base, monkeypatch):
    """Named, or found, or the base's own."""
    folder, _, _ = base
    monkeypatch.chdir(folder)
    read = []
    monkeypatch.setattr(sft, "read_conversations", lambda paths: read.append(paths) or exec("raise ValueError('read')"))
    for options, paths in ((["--data", "./a.json", "b//c.json"], ["a.json", "b/c.json"]), ([], ["play.txt"])):
        with pytest.raises(ValueError, match="^read$"):
            begin(sft.parse_arguments(options), "out/play", "out/never")
        assert read.pop() == paths
        with pytest.raises(ValueError, match="^read$"):
            sft.main(["--base", "out/play", "--show", "2", *options])
        assert [os.path.normpath(path) for path in read.pop()] == paths
    monkeypatch.setattr(sft, "read_conversations", lambda paths: [[(str(i), "x")] for i in range(40)])
    with pytest.raises(ValueError) as error:
        begin(sft.parse_arguments([]), "out/play", "./out/../out/play")
    assert str(error.value) == "--out out/play is the base itself; name another folder for the model made from it."


def test_resume_to_the_letter(monkeypatch):
    """The data and the epochs of a run that is resumed; the base is train.resume's to check."""
    conversations = [[(str(i), "x" * i)] for i in range(40)]
    examples = sft.make_examples(BYTES, conversations, 64, 2)
    batches = len(sft.plan_epoch(sft.padded_lengths(examples.train, 64), 128, 2, 0))
    s = types.SimpleNamespace(data=["a.json", "b.json"], seed=2, steps=3 * batches, batch_tokens=128, tokens_key=examples.key)
    model, state, taken = types.SimpleNamespace(config=types.SimpleNamespace(context=64)), {"base": "out/m"}, []
    model.step, extended = 0, []
    training = train.Training(model, BYTES, s, state, "out/x", train.Ranks())
    monkeypatch.setattr(train, "resume", lambda *arguments: taken.append(arguments) or training)
    monkeypatch.setattr(sft, "read_conversations", lambda paths: conversations if paths == s.data else None)

    def extend(settings, steps, out):
        extended.append((settings, steps, out))
        settings.steps = steps
    monkeypatch.setattr(train, "add_steps", extend)

    def resume(*options, finished=False):
        args = sft.parse_arguments(["--resume", *options])
        args.out = "out/x"
        try:
            if finished:
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    code = sft.run(args, train.Ranks())
                assert (code, out.getvalue()) == (0, f"The run in out/x is finished: {model.step} steps (--epochs takes more).\n")
            else:
                result, said = flushed(begin, args, "out/m", "out/x")
                assert result[:4] == (model, BYTES, s, state) and result[4].key == examples.key
                assert said == f"Resuming out/x at step {model.step} of {s.steps}.\n"
        finally:
            assert taken.pop()[:3] == (train.given_options(args), "out/x", "sft.py")

    def refused(words, *options):
        with pytest.raises(ValueError) as error:
            resume(*options)
        assert str(error.value) == words
    resume()
    resume("--base", "out/m", "--epochs", "3")
    model.step = 3 * batches - 1
    for epochs in ("1", "2", "4", str(3 * batches)):
        refused(f"the run in out/x has --epochs 3, not {epochs}: a resumed run keeps its settings. Leave the option out, or start "
                "a new run with --out.", "--epochs", epochs)
    for model.step in (3 * batches, 3 * batches + 1):   # of a finished run, fewer are refused, more are made
        s.steps = 3 * batches
        refused("the run in out/x has --epochs 3, not 2: a resumed run keeps its settings. Leave the option out, or start a new "
                "run with --out.", "--epochs", "2")
        resume("--epochs", "3", finished=True)
        assert extended == [] and s.steps == 3 * batches
        resume("--epochs", "5")
        assert extended.pop() == (s, 5 * batches, "out/x")
    for key in ("", "z"):
        s.tokens_key = key
        refused("a.json, b.json: not what out/x began with.")


def test_main_to_the_letter(monkeypatch):
    """What is called with what, what is said, and the exit code."""
    config_ = types.SimpleNamespace(context=64)
    model = types.SimpleNamespace(step=0, config=config_)
    s = types.SimpleNamespace(steps=5, warmup=0, data=["a", "b"], batch_tokens=2048, tokens_key="key")
    calls, state, code = [], {}, 0

    examples = types.SimpleNamespace(train=[0] * 1234, held_out=[0] * 5, cut=6, key="key")

    def whole(folder, ranks):
        return train.Training(model, "tokenizer", s, state, folder, ranks)

    def resume(args, folder, script, ranks):
        calls.append(("resume", folder))
        return whole(folder, ranks)

    def new_training(script, folder, config, tokenizer, settings, ranks, base):
        assert (script, config, tokenizer, settings) == ("sft.py", config_, "tokenizer", s)
        calls.append(("start", base, folder))
        return whole(folder, ranks)

    def fine_tuning(training, read):
        assert (training.model, training.settings, training.state, read) == (model, s, state, examples) and training.ranks.size == 1

        def evaluate(step):
            state.update(before=2.0)
            return {"val_loss": step}
        return types.SimpleNamespace(evaluate=evaluate)

    def trained(training, job, stop):
        assert (training.model, training.out, stop) == (model, out, "stop") and job.evaluate
        calls.append("train")
        return code

    class Log:
        def __init__(self, *arguments):
            self.where = arguments

        def write(self, **record):
            calls.append((*self.where, record))
    for where, name, value in ((train, "resume", resume), (train, "new_training", new_training), (sft, "fine_tuning", fine_tuning),
                               (sft, "read_base", lambda given: (sft.base_of(given), given.get("preset", "small"), None, config_, "tokenizer")),
                               (sft, "read_examples", lambda *arguments: (examples, 1) if arguments == ("tokenizer", s, 64) else None),
                               (train, "choose_device", lambda device, preset, local: "cpu"),
                               (train, "make_settings", lambda *arguments: s), (train, "train", trained), (train, "connect", lambda training: None), (checkpoint, "Log", Log),
                               (train, "Stop", lambda: "stop"),
                               (train, "set_threads", lambda: calls.append("threads"))):
        monkeypatch.setattr(where, name, value)
    for argv, base, out in (([], "out/small", "out/small-sft"), (["big"], "out/big", "out/big-sft"),
                            (["--base", "a/./b"], "a/b", "a/b-sft"),
                            (["--base", "x/", "--out", "y//z"], "x", "y/z"), (["medium", "--out", "y"], "out/medium", "y")):
        for code in (0, 7):
            calls.clear(), state.clear()
            returned, said = flushed(sft.main, argv)
            assert (returned, calls) == (code, ["threads", ("start", base, out), (out, -1, {"step": 0, "val_loss": 0}), "train"])
            epochs = sft.EPOCHS[(argv or ["small"])[0]] if argv[:1] != ["--base"] else 4
            start = (f"{base} is fine-tuned into {out} on a, b: 1,234 conversations, 5 more held out; 6 cut to fit.\n"
                     f"{epochs} epochs of 1 steps of at most 2,048 tokens.\n")
            with contextlib.redirect_stdout(Stream()) as stream:
                state.clear()
                sft.main(argv)
                stream.flush()
                assert stream.seen() == start
    s.steps = 5
    out, code, argv = "out/small-sft", 0, ["--resume"]
    for step in (1, 4):
        state.update(before=3.0)
        model.step = step
        calls.clear()
        with contextlib.redirect_stdout(Stream()) as stream:
            assert sft.main(argv) == 0 and calls == ["threads", ("resume", out), "train"]
            assert stream.seen() == f"Resuming {out} at step {step} of 5.\n"
    for step in (5, 6):
        model.step = step
        calls.clear()
        with contextlib.redirect_stdout(Stream("ascii")) as stream:
            assert sft.main(argv) == 0 and calls == ["threads", ("resume", out)]
            stream.flush()
            assert stream.seen() == (
                f"The run in {out} is finished: {step} steps (--epochs takes more).\n")
