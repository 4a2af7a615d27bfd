"""sft.py: what is learned and what is not, batches, held-out prompts, exact resume, bad input."""
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import string
import subprocess
from types import SimpleNamespace

import attack
import numpy as np
import pytest
from cases import once_a_module, parametrize, put, refusal, rows, value_error, write
import runs
from runs import assert_refused, read_log, settings, shell_words, steps_of, succeeded, training_of
from test_tokenizer import made as made_tokenizer

import chat
import checkpoint
import model_cpu
import model_gpu
import sft
import train
from tokenizer import CHAT_TEMPLATE, CHATML_PARTS, SPECIAL_TOKENS, Tokenizer, known_template

QUICK = "--batch-tokens 256 --epochs 2 --eval-every 10 --save-every 1 --threads 2 --lr 0.01".split()
CHATML = "".join(CHATML_PARTS)
# a tokenizer whose tokens are bytes; the special ones come behind
BYTES, (PAD, USER, ASSISTANT, END) = made_tokenizer([], SPECIAL_TOKENS), range(256, 260)
TALKER = made_tokenizer([], [*SPECIAL_TOKENS, "<|im_start|>", "<|im_end|>"])
NAME_SOME = "name instructions with --data (./fetch_data.sh instructions brings some)."

run = functools.partial(runs.run, script="sft.py")


def run_anew(folder, *arguments):
    """In a process of its own, where BLAS takes one thread whatever it does in this one: the same numbers, bit for bit."""
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_THREADS")}       # as in a terminal
    return subprocess.run(attack.command("sft.py", *shell_words(arguments)), cwd=folder, text=True, capture_output=True,
                          env={**clean, "PYTHONWARNINGS": "error"})


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def example(question, answer):
    return sft.make_example(BYTES, [(question, answer)], 1 << 20)[:2]


def invented_words(rng, count):
    return ["".join(rng.choices("abcdefghijklmnoprstuvw", k=rng.randint(1, 7))) for _ in range(count)]


@once_a_module
def records():
    """Invented ones, of all lengths."""
    rng = random.Random(0)
    words = [*invented_words(rng, 500), *"é 猫 🙂 <|end|> <|assistant|>".split(), "\n", "\n\n", "  "]

    def text(most):
        return " ".join(rng.choices(words, k=rng.randint(1, most)))
    return [{"instruction": text(30), "input": text(300) * (i % 3 == 0), "output": "x" + text(600)} for i in range(1000)]


@once_a_module
def tokenizer(records):
    made = Tokenizer.train([record["output"] for record in records], 1500)
    made.encode = functools.cache(made.encode)      # the same texts are asked for at every context
    return made


@once_a_module
def examples(records, tokenizer):
    """dict of T -> the examples of all records."""
    turns = [sft.make_turns(record) for record in records]
    return {T: [sft.make_example(tokenizer, turn, T) for turn in turns] for T in (128, 512)}


# ---------------------------------------------------------------------------------------------------------------------
# The mask
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("T", [16, 31])
def test_an_example_to_the_token(T):
    """Of a prompt that is too long its last tokens, three quarters of the window, and as much of the response as fits; chat.py
    reads the same.  And an example that just fits, or is one too long."""
    fits, room = T + 1, math.ceil(T * 3 / 4)                            # tokens of an example; those of a cut prompt
    letters = string.ascii_letters
    for size in 0, room - 4, room - 3, room - 2, 40:
        kept = min(size + 3, room)
        question, learned = letters[size + 3 - kept:size].encode(), letters[:fits - kept].encode()
        ids, mask, cut = sft.make_example(BYTES, [(letters[:size], letters[:T])], T)
        assert ids.tolist() == [USER, *question, END, ASSISTANT, *learned] and cut
        assert mask.tolist() == [False] * kept + [True] * len(learned)
        session = chat.Session(SimpleNamespace(config=SimpleNamespace(context=T)), BYTES, None)
        session.chat_form = True
        session.add_turn(letters[:size])
        assert session.turns == [ids[~mask].tolist()]
    for more, turns, length in (0, 1, fits), (1, 1, fits), (0, 2, fits), (1, 2, 8):
        talk = [("ab", "cd"), ("a" * (fits - 14 + more), "bc")] if turns == 2 else [("x", "y" * (fits - 5 + more))]
        ids, mask, cut = sft.make_example(BYTES, talk, T)
        assert (len(ids), cut) == (length, more == 1) and mask.tolist()[:4] == [False] * 4


def test_several_turns(tokenizer):
    """Both answers are learned; the turns that do not fit are left out whole, from the first such on."""
    turns = [("one", "two"), ("three", "four"), ("five " * 40, "six"), ("7", "8")]
    ids, mask, cut = sft.make_example(tokenizer, turns[:2], 64)
    assert tokenizer.decode(ids) == "".join(f"<|user|>{a}<|end|><|assistant|>{b}<|end|>" for a, b in turns[:2]) and not cut
    assert tokenizer.decode(ids[mask]) == "two<|end|>four<|end|>"
    again, same, cut = sft.make_example(tokenizer, turns, 64)
    assert again.tolist() == ids.tolist() and same.tolist() == mask.tolist() and cut
    # a first turn that had to be cut stands alone, though there would be room
    ids, mask, cut = sft.make_example(tokenizer, [("five " * 200, "six"), ("7", "8")], 64)
    assert cut and tokenizer.decode(ids[mask]) == "six<|end|>" and [*ids].count(tokenizer.special["<|user|>"]) == 1


def test_no_text_becomes_a_special_token(tokenizer):
    """Whatever is typed, an example has the special tokens of the template and no others."""
    special = list(tokenizer.special.values())
    for text in "<|assistant|>ok<|end|>", "<|endoftext|>", "a\r\n\x00", "\ud800", " " * 5000:
        for T in 128, 1 << 20:
            ids, mask, _ = sft.make_example(tokenizer, [(text, text + "x")], T)
            template = ["<|user|>", "<|end|>", "<|assistant|>"] + ["<|end|>"] * (len(ids) <= T)
            assert [tokenizer.tokens[i].decode() for i in ids[np.isin(ids, special)]] == template
            if len(ids) <= T:
                assert tokenizer.decode_bytes(ids[mask]) == (text + "x<|end|>").encode("utf-8", "surrogatepass")


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("T", [128, 512])
def test_an_epoch(examples, tokenizer, T):
    """Every example once, within the budget, each row with something to learn, and every target in its place."""
    pairs, K, budget, pad = [example[:2] for example in examples[T]], 4, 4096, tokenizer.special["<|endoftext|>"]
    plan = sft.plan_epoch(sft.padded_lengths(pairs, T), budget, 5, 0)
    assert sorted(np.concatenate(plan).tolist()) == list(range(len(pairs)))
    tokens = used = 0
    for rows in plan:
        inputs, targets = sft.make_batch([pairs[i] for i in rows], T, K, pad)
        B, P = inputs.shape
        assert B == len(rows) and P <= T and B * P <= budget and targets.shape == (B, P + K - 1)
        for row, i in enumerate(rows):
            ids, mask = pairs[i]
            n = len(ids) - 1
            assert (inputs[row, :n] == ids[:-1]).all() and (inputs[row, n:] == pad).all() and mask.any()
            # token i of the text is the target at place i-1 if it is learned, and nothing else is a target
            assert np.array_equal(np.flatnonzero(targets[row] >= 0), np.flatnonzero(mask) - 1)
            assert (targets[row][targets[row] >= 0] == ids[mask]).all()
        tokens, used = tokens + inputs.size, used + sum(len(pairs[i][0]) - 1 for i in rows)
    assert 1 - used / tokens < 0.15                                 # padding


def test_batches_depend_on_seed_and_epoch_alone():
    lengths = np.random.default_rng(0).integers(1, 17, 700) * 8

    def plan(seed, epoch):
        return [rows.tolist() for rows in sft.plan_epoch(lengths, 1024, seed, epoch)]
    plans = [plan(3, epoch) for epoch in range(4)]
    assert plans == [plan(3, epoch) for epoch in range(4)] and plans != [plan(4, epoch) for epoch in range(4)]
    assert len({len(batches) for batches in plans}) == 1            # as many steps in every epoch
    assert len({json.dumps(sorted(map(sorted, batches))) for batches in plans}) == 4    # other companions every time
    widths = [lengths[rows].max() for rows in plans[0]]             # no order in them, neither up nor down
    assert 0.3 < np.mean(np.diff(widths) > 0) < 0.7
    # as many rows as fit, the longest first; at least one
    for lengths, budget, sizes in ([8, 16, 8, 24, 16, 8], 32, [1, 2, 3]), ([64, 32, 8], 31, [1, 1, 1]):
        assert sorted(map(len, sft.plan_epoch(np.array(lengths), budget, 0, 0))) == sizes
    assert sft.padded_lengths([(range(n), None) for n in (1, 2, 9, 10, 17, 18, 40)], 19).tolist() == [0, 8, 8, 16, 16, 19, 19]


# ---------------------------------------------------------------------------------------------------------------------
# Records
# ---------------------------------------------------------------------------------------------------------------------
CHAT = [{"role": role, "content": text} for role, text in [
    ("system", "Be brief."), ("user", " Hi\n"), ("assistant", "Yo "), ("user", "Why?"), ("assistant", "<|end|>")]]
SYSTEM, ASK, ANSWER = CHAT[:3]


@parametrize("record, turns", [
    ({"instruction": " a", "input": "b ", "output": "c"}, [(" a\n\nb ", "c")]),
    ({"instruction": "", "input": None, "output": "c", "source": 7}, [("", "c")]),
    ({"messages": CHAT}, [("Be brief.", None), (" Hi\n", "Yo "), ("Why?", "<|end|>")]),
    ({"messages": [{**SYSTEM, "content": ""}, ASK, ANSWER]}, [("", None), (" Hi\n", "Yo ")]),
    ("text", "no named fields"), ({"messages": {}}, "messages that are no list of objects"), ({"messages": [3]}, "messages that are no list of objects"),
    *[(record, "a field that is no text (instruction, input, output or content)") for record in (
        {}, {"instruction": "a", "output": 3}, {"instruction": "a", "input": 3, "output": "b"}, {"messages": [ASK, {"role": "assistant"}]})],
    *[({"messages": messages}, "no user and assistant in turn") for messages in (
        [], [SYSTEM], [ANSWER, ASK], [ASK, ANSWER, ASK], [ASK, {"role": "tool", "content": "x"}])],
    *[(record, "an empty response") for record in (
        {"instruction": "a", "output": " \n"}, {"messages": [*CHAT[1:4], {**ANSWER, "content": " "}]})]])
def test_turns(record, turns):
    if isinstance(turns, list):
        assert sft.make_turns(record) == turns
    else:
        assert refusal(sft.make_turns, record) == turns


@parametrize("template, parts", [
    (CHAT_TEMPLATE, ("<|user|>Be brief.\n\n Hi\n<|end|><|assistant|>", "Yo <|end|>", "<|user|>Why?<|end|><|assistant|>", "<|end|><|end|>")),
    (CHATML, ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi\n<|im_end|>\n<|im_start|>assistant\n",
              "Yo <|im_end|>", "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n", "<|end|><|im_end|>"))])
def test_a_system_text_stands_where_the_template_has_it(template, parts):
    """Of a conversation, of its cut form, of what is held out and asked."""
    TALKER.template = template
    turns = sft.make_turns({"messages": CHAT})
    ids, mask, cut = sft.make_example(TALKER, turns, 1 << 20)
    assert TALKER.decode(ids) == "".join(parts) and TALKER.decode(ids[mask]) == parts[1] + parts[3] and not cut
    ids, mask, cut = sft.make_example(TALKER, [turns[0], ("x" * 300, "y" * 300)], 400)
    assert cut and ids.tolist()[:300] == TALKER.prompt("x" * 300, 300, "Be brief.") and "Be brief." in TALKER.decode(ids)
    frame = len(TALKER.prompt(""))      # a system text that takes more than half of it does not push the question out
    for size in 75 - frame - 20, 75 - frame + 20, 500:
        ids, mask, cut = sft.make_example(TALKER, [("s" * size, None), ("the question", "y" * 300)], 100)
        assert cut and "the question" in TALKER.decode(ids[~mask]) and mask.sum() >= 26, size
    # two that read alike are both held out, or none
    alike = [[(f"{i}", None), ("x", "z")] for i in range(45)] + [[(f"{i}\n\nx", "z")] for i in range(45)]
    for seed in range(5):
        found = sft.make_examples(TALKER, alike, 64, seed)
        read = [{re.sub(r"system|user|\W", "", TALKER.decode(ids)) for ids, _ in part} for part in (found.train, found.held_out)]
        assert len(found.held_out) == 2 * 4 and len(found.questions) == 4 and not read[0] & read[1]
        asked = {TALKER.decode(ids[~mask]) for ids, mask in found.held_out}
        assert {TALKER.decode(TALKER.prompt(text, None, system)) for system, text in found.questions} <= asked


def test_an_empty_system_text_has_its_turn_in_chatml():
    """As transformers writes it, in place of the template's own (tests/peers compares)."""
    TALKER.template = known_template('{%if loop.first and messages[0]["role"]!="system"%}{{"<|im_start|>system\\nOwn<|im_end|>\\n"}}{%endif%}'
                                     .join(CHATML_PARTS))
    for system, written in ([], "Own"), ([{**SYSTEM, "content": ""}], ""):
        ids, *_ = sft.make_example(TALKER, sft.make_turns({"messages": [*system, ASK, ANSWER]}), 1 << 20)
        assert TALKER.decode(ids).startswith(f"<|im_start|>system\n{written}<|im_end|>\n<|im_start|>user\n Hi\n<|im_end|>")


def test_prompts_are_in_one_part_only():
    conversations = [[(f"q{i % 209}\ud800", "y" * (i % 19)), (f"later {i % 7}", "z")] for i in range(600)]
    found = sft.make_examples(BYTES, conversations, 24, 1)
    trained, held_out = ([BYTES.decode(ids).split("<|end|>")[0] for ids, _ in part] for part in (found.train, found.held_out))
    assert len(trained) + len(held_out) == 600 and not {*trained} & {*held_out} and len({*held_out}) == 20
    asked = {BYTES.decode(BYTES.prompt(text)).split("<|end|>")[0] for _, text in found.questions}
    assert len(found.questions) == len(asked) == 20 and asked <= {*held_out}
    assert found.cut == sum(sft.make_example(BYTES, turns, 24)[2] for turns in conversations) > 0
    keys = [sft.make_examples(BYTES, talks, 24, seed).key for talks, seed in (      # a fingerprint of all of it
        (conversations, 1), (conversations, 2), (conversations[:-1] + [[("q1", "?")]], 1))]
    assert keys[0] == found.key and len({*keys}) == 3
    for prompts, count in (2, 1), (19, 1), (10_020, 1000):
        found = sft.make_examples(BYTES, [[(str(i), "")] for i in range(prompts)], 64, 0)
        assert (len(found.held_out), len(found.train), found.cut) == (count, prompts - count, 0)
    with value_error("^the data has one prompt only; it needs two, to learn one and hold one out.$"):
        sft.make_examples(BYTES, [[("a", "b")]] * 5, 64, 0)


@parametrize("text, found", [
    (b' \n[[2]]\n', [[2]]), (b"\n \n", []),
    (b'\xef\xbb\xbf1\n\n 2 \n"\xe7\x8c\xab"\n', [1, 2, "猫"]), (b'{"a": 1}\r\n{}\n', [{"a": 1}, {}]),
    (b"[1]\n[2]", " (Extra data: line 2"), (b"[1,\n2,\nx]", " (Expecting value: line 3"),
    (b"1\n2\nx\n", ", line 3, (Expecting value"), (b"1\n\n" + b'{"a":' * 100_000, ", line 3, (maximum recursion"),
    (b'1\n2\n"\xe9"\n4', ", line 3, ('utf-8' codec can't decode byte 0xe9")])
def test_json(text, found):
    path = "./x.json"
    write(path, text)
    if isinstance(found, list):
        assert sft.json_values(path) == found
        return
    said = refusal(sft.json_values, path)
    assert said.replace(" is not JSON; the file must hold one list of records, or one record a line", "").startswith(f"{path}{found}")


def test_records(out_text):
    good, path = {"instruction": "a", "output": "b"}, "./x.json"

    def read(records):
        write(path, json.dumps(records))
        return sft.read_conversations([path])
    assert read([good, {"instruction": "c", "output": "d"}]) == [[("a", "b")], [("c", "d")]] and out_text() == ""
    assert len(read([good] * 2 + [7] + [{"instruction": "a", "output": " "}] * 1001)) == 2
    assert out_text() == (f"{path}: 2 of 1,004 records can be used; 1 with no named fields (first: record 3); 1,001 with "
                                       "an empty response (first: record 4).\n")
    for records, words in ([], "0 of 0 records can be used"), ([7, {}], "0 of 2 records can be used; 1 with no named fields (first: record 1); 1 with a "):
        with value_error(re.escape(f"{path}: {words}")):
            read(records)


# ---------------------------------------------------------------------------------------------------------------------
# Pairs made from the text that the base has read
# ---------------------------------------------------------------------------------------------------------------------
def test_pairs_of_python(monkeypatch):
    path = "./python-3.9.txt"
    text = b"What is known. \xff And more. |Behind the cut." + b" " * 999
    write(path, text)
    monkeypatch.setattr(train, "split_point", lambda found: found == path and text.index(b"|"))
    found = [[("m", "\n  A module\n of\tits own.\n  \t\nA second part."), ("m.f", "What is known."), ("m.g", "Oneword"),
              ("m.h", "Behind the cut.")],
             [("m.f", "Something else."), ("m", "The name again."), ("n.a", "is known"), ("n.b", "is knowN")]]
    monkeypatch.setattr(sft, "python_docstrings", lambda: iter(found))
    assert sft.read_conversations([path]) == [[("m", "A module of its own.")], [("m.h", "Behind the cut.")],
                                                   [("m.f", "Something else.")], [("n.b", "is knowN")]]
    found[:] = [[("m.f", "What is known."), ("m.g", "Oneword")]]
    assert refusal(sft.python_pairs, path) == f"{path} holds all of the library's documentation, so nothing is held out; {NAME_SOME}"


def write_play(path, speeches=1200):
    """Each reply begins with the word that the speech ends with: something that can be learned."""
    rng = random.Random(0)
    words, last, paragraphs = invented_words(rng, 60), "so", []
    for i in range(speeches):
        said = [last, *rng.choices(words, k=rng.randint(3, 12)), str(i)]
        said[rng.randrange(1, len(said))] += "\n"
        last = rng.choice(words)
        paragraphs.append(f"{rng.choice(['ANNA', 'First Boy', 'A. B.'])}:\n{' '.join(said)} {last}")
    write(path, "\n\n".join(paragraphs) + "\n")


def test_pairs_of_a_play_to_the_letter(monkeypatch):
    def pairs(text, before=""):
        """Of a play whose validation part is this text."""
        write("./some.txt", (before + text).encode("utf-8", "surrogateescape"))
        monkeypatch.setattr(train, "split_point", lambda found: found == "./some.txt" and len(before.encode()))
        return sft.play_pairs("./some.txt")
    assert pairs("A:\nHow\n are  you?\n\nB b:\nWell:\n fine. \n\n\n\nC:\nYes.\n\n", "É:\nOf what is learned.\n\n") == [
        [("How are you?", "Well:\n fine. ")], [("Well: fine.", "Yes.")]]
    assert pairs("A:\r\nHow\r\nare?\r\n\r\nB:\r\nYes\r\nno.\r\n\r\nC:\r\nSo.") == [[("How are?", "Yes\nno.")], [("Yes no.", "So.")]]
    assert pairs("A:\nHow\udcff?\n\nB:\n\udcc3.\n\nC:\nSo.") == [[("How\ufffd?", "\ufffd.")], [("\ufffd.", "So.")]]
    for name, good in ("x" * 40, True), ("x" * 41, False), ("", False), ("a:b", False), ("a\nb", False), ("é 1.", True):
        found = pairs("\n\n".join(["A:\none", f"{name}:\ntwo", "B:\nthree", "C:\nfour", "D:\nfive", "E:\nsix", "F:\nseven"]))
        assert len(found) == (6 if good else 4)
    # more than half of the paragraphs must give one
    for speeches, others, good in (2, 0, False), (6, 3, True), (6, 4, False), (0, 3, False):
        text = "\n\n".join([f"A:\nsay {i}" for i in range(speeches)] + ["A stage direction."] * others)
        if good:
            assert len(pairs(text)) == speeches - 1
        else:
            assert refusal(pairs, text) == ("./some.txt is neither a play nor the text inside Python, so it gives no "
                                            f"questions; {NAME_SOME}")


def test_which_files_are_read(monkeypatch):
    assert sft.find_data("big", ["corpus.txt"]) == ["corpus.txt"]               # there is no data/
    os.mkdir("data")
    for name in "instructions_b.json instructions.json instructions_a.json instructions.jsonl instructions.txt my-instructions.json".split():
        write(f"data/{name}", "")
    assert sft.find_data("medium", ["corpus.txt"]) == ["data/instructions.json", "data/instructions_a.json", "data/instructions_b.json"]
    for own in ("small", ["corpus.txt"]), ("big", ["a.json"]):
        assert sft.find_data(*own) == own[1]
    with value_error(f"^there are no instructions in data/: {re.escape(NAME_SOME)}$"):
        sft.find_data("small", None)
    for kind in "read_records", "python_pairs", "play_pairs":
        monkeypatch.setattr(sft, kind, lambda path, make=None, kind=kind: [f"{kind} {path}"])
    kinds = dict(rows("""
        a.json                 | read_records
        b.jsonl                | read_records
        data/python-3.12.txt   | python_pairs
        a.json.txt             | play_pairs
        python-3.txt           | play_pairs
        python-3.12.txt.old    | play_pairs
        my-python-3.12.txt     | play_pairs"""))
    for name in kinds:
        write(name, "text")
    assert sft.read_conversations(list(kinds)) == [f"{kind} {name}" for name, kind in kinds.items()]
    write("latin.txt", b"caf\xe9 " * 99)
    for name, words in ("data", "data is not a plain file"), ("none.json", "none.json"), ("latin.txt", "it seems to be Latin-1"):
        with pytest.raises((ValueError, OSError), match=words):
            sft.read_conversations(["a.json", name])


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation, and looking at it
# ---------------------------------------------------------------------------------------------------------------------
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
    training = training_of(model, BYTES, SimpleNamespace(micro_batch=1))
    loss, bpb = sft.evaluate(training, examples)
    assert loss == pytest.approx(nats / tokens, rel=1e-10) and bpb == pytest.approx(nats / size / math.log(2), rel=1e-10)
    seen = []
    for rank in range(3):                                               # the ranks share the batches
        ranks = SimpleNamespace(rank=rank, size=3, all_reduce=seen.append)
        sft.evaluate(dataclasses.replace(training, ranks=ranks), examples)
    assert sum(seen).tolist() == pytest.approx([nats, tokens, size]) and all(part[1] for part in seen)


@parametrize("stop", [None, PAD, END])
def test_an_answer(stop):
    """Any special token ends it; of a model that says what it is told to say.  A system text stays whole, if with what
    surrounds it it takes half of the room, which is 24, or less."""
    for system, question, read in ((None, "0123456789abcdefghijklm", b"23456789abcdefghijklm"),
                                   ("b" * 7, "0123456789abcdefghijkl", b"bbbbbbb\n\nabcdefghijkl"),
                                   ("b" * 8, "0123456789abcdefghijkl", b"123456789abcdefghijkl")):
        said, asked = itertools.cycle(b"a") if stop is None else iter([*b"No", stop, *b"more"]), []
        decoder = SimpleNamespace(draw_rows=lambda windows, *rest: asked.append(windows) or np.full(2, next(said)))
        model = SimpleNamespace(config=SimpleNamespace(context=32, predict=4), new_decoder=lambda *sizes: decoder)
        training = training_of(model, BYTES, SimpleNamespace(seed=9, num_samples=2))
        assert sft.answer(training, 3 * [(system, question)], False) == 2 * ["No" if stop else "a" * 150]
        assert asked[0] == 2 * [[USER, *read, END, ASSISTANT]]


class Stream(io.TextIOWrapper):
    """A standard output in memory; seen: what was flushed, as a reader of a file sees it."""
    def __init__(self):
        super().__init__(io.BytesIO(), "utf-8", line_buffering=True)

    def seen(self):
        return self.buffer.getvalue().decode()


def flushed(function, *arguments):
    """-> (what it returns, what it printed and flushed, when it returned)."""
    with contextlib.redirect_stdout(Stream()) as out:
        result = function(*arguments)
        return result, out.seen()


def test_what_a_run_prints(monkeypatch):
    """At its beginning, on the way and at its end, and what it notes."""
    put(monkeypatch, sft, evaluate=lambda *arguments: (loss, 1.5),
        cut_prompt=lambda tokenizer, question, T: question)
    monkeypatch.setattr(sft.train, "draw_samples", lambda training, prompts, most: [f"to {prompt[1]}\n\x07 '" for prompt in prompts])
    questions = [("so" if i == 1 else None, f"q{i}\x1b") for i in range(5)]
    examples = sft.Examples([example("a", "")], np.array([8]), [example("b", "")], questions, 0, "key")
    training = training_of(SimpleNamespace(config=CONFIG), BYTES, SimpleNamespace(steps=9, seed=4, batch_tokens=64, num_samples=4))
    job = sft.fine_tuning(training, examples)
    assert job.note(1, math.log(2)) == "1000000000.000 bits/byte"       # of what has no text at all
    asked = [f"--- {title}\ufffd\nto q{i}\ufffd\n\ufffd '\n" for i, title in enumerate(["q0", "so\n\nq1", "q2", "q3", "q4"])]
    for step, loss, count, shown in ((0, 3.0, 4, asked[:4]), (4, 2.5, 4, ["           to q0\\x1b\\n\\x07 '\n"]),
                                     (9, 2.0, 4, [*asked[:4], "Held-out loss 3.0000 before, 2.0000 after.\n"])):
        result, said = flushed(job.evaluate, step)
        assert result == {"val_loss": loss, "val_bpb": 1.5, "val": {"responses": [loss, 1.5]}, "samples": [f"to q{i}\x1b\n\x07 '" for i in range(count)]}
        assert said == f"           held-out loss {loss:.4f}, 1.5000 bits/byte\n" + "".join(shown) and training.state["before"] == 3.0


@parametrize("no_color", [None, "", "1"])
def test_show(monkeypatch, no_color):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    conversations = [[("Hi\x1b[32m", "Yo\x1b"), ("Why", "<|end|>")], [("a" * 20, "b" * 20)], [("not", "shown")]]
    put(monkeypatch, sft, read_conversations=lambda paths: conversations,
        read_base=lambda given: (None, "small", SimpleNamespace(context=30), BYTES, ["x"]))
    _, said = flushed(sft.main, ["--data", "x", "--show", "2"])
    text = ("--- example 1: 12 of 28 tokens are learned\n"
            "<|user|>Hi\ufffd[32m<|end|><|assistant|>{Yo\ufffd<|end|>}<|user|>Why<|end|><|assistant|>{<|end|><|end|>}\n"
            "--- example 2: 8 of 31 tokens are learned, cut\n"
            "<|user|>" + "a" * 20 + "<|end|><|assistant|>{bbbbbbbb}\n")
    start, stop = ("[", "]") if no_color else ("\x1b[32m", "\x1b[0m")
    assert said == text.replace("{", start).replace("}", stop)


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------
CONFIG = model_cpu.Config(dim=32, heads=2, kv_heads=1, layers=1, context=128, vocab=520, predict=4)


def save_base(folder, out, config=CONFIG, **changes):
    """A checkpoint as train.py leaves one, of a small model that has learned nothing yet."""
    tokenizer = Tokenizer.train([(folder / "play.txt").read_text()], 520)
    s = settings("--data play.txt --micro-batch 4 --threads 1", config=config)
    state = {"script": "train.py", "tokens": 0, "seconds": 0.0, "settings": {**dataclasses.asdict(s), **changes}}
    model = model_cpu.Model(config, 0, np.float32)
    model.step = 7
    checkpoint.save(f"{folder}/{out}", model, tokenizer, state)


@once_a_module
def base(tmp_path_factory):
    """A folder with a play, a base, and a fine-tuned model: (folder, log, what was printed)."""
    folder = tmp_path_factory.mktemp("sft")
    write_play(folder / "play.txt")
    save_base(folder, "out/play")
    write(folder / "out/play/log.jsonl", "")
    write(folder / "some.jsonl", "".join(json.dumps({"instruction": str(i), "output": f"It is {i}."}) + "\n" for i in range(40)))
    done = run_anew(folder, "--base out/play", *QUICK)
    assert (done.returncode, done.stderr) == (0, "")
    return folder, read_log(folder, "out/play-sft"), done.stdout


def test_a_job_takes_the_batch_of_its_step():
    """Epoch by epoch, each in an order of its own."""
    examples = sft.make_examples(BYTES, [[(f"say {i}", "x" * (i % 50 + 1))] for i in range(300)], 128, 0)
    s = settings("--batch-tokens 256 --seed 3")
    job = sft.fine_tuning(training_of(SimpleNamespace(config=CONFIG), BYTES, s), examples)
    plans = [sft.plan_epoch(examples.lengths, 256, 3, epoch) for epoch in range(3)]
    for step, rows in enumerate(itertools.chain(*plans)):
        expected = sft.make_batch([examples.train[i] for i in rows], 128, 4, 0)
        *batch, counted, weights = job.batch(step)
        assert all(map(np.array_equal, batch, expected)) and counted[0] == (expected[1] >= 0).sum() and weights is None
    sizes = [mask.sum() for _, mask in examples.train]                  # each with an end that is no text
    assert job.note(1, math.log(2)) == f"{1 / (1 - len(sizes) / sum(sizes)):.3f} bits/byte"


def test_the_held_out_loss_falls(base):
    folder, log, printed = base
    held_out = [record["val_loss"] for record in log if "val_loss" in record]
    assert log[0]["step"] == 0 and held_out[-1] < held_out[0] - 0.3
    assert f"Held-out loss {held_out[0]:.4f} before, {held_out[-1]:.4f} after." in printed
    found = json.loads((folder / "out/play-sft/tokenizer_config.json").read_text())
    assert found["chat_template"] == CHAT_TEMPLATE and found["eos_token"] == "<|end|>"
    done = run(folder, "--model out/play-sft --prompt so --max-tokens 30", script="chat.py")
    assert (done.returncode, done.stderr) == (0, "")


def test_killed_and_resumed_is_exact(base):
    folder, whole, _ = base
    attack.kill_again_and_again(folder, "sft.py", ["--base", "out/play", *QUICK], "out/killed", 3, seed=1)
    succeeded(run_anew(folder, "--resume --out out/killed"))
    assert read_log(folder, "out/killed") == whole


def test_ctrl_c_saves_and_resumes(base):
    """With the epochs that it has; it gets no others before it is finished."""
    folder, whole, printed = base
    arguments = ["--base", "out/play", *QUICK, "--save-every", "1000"]
    code, said = attack.interrupt(folder, "sft.py", arguments, "out/asked", 2, lambda process: process.send_signal(signal.SIGINT))
    assert code == 130 and "python sft.py small --resume --out out/asked" in said, said
    resume = functools.partial(run, folder, "small", "--resume", "--out", "out/asked")
    assert "has --epochs 2, not 3: a resumed run keeps" in resume("--epochs", "3").stderr
    done = succeeded(resume())
    assert read_log(folder, "out/asked") == whole
    assert re.search("Held-out loss .* before, .* after.", printed)[0] in done.stdout


def test_the_weight_of_further_heads_is_that_of_the_option(base):
    """0: they learn nothing, and their weights only decay."""
    folder, quick = base[0], "--base out/play --data some.jsonl --epochs 1 --batch-tokens 256 --threads 1"
    ours = checkpoint.load(f"{folder}/out/play", model_cpu)[0].params["heads"][520:]
    for weight, learned in ("0", False), ("2.5", True):
        succeeded(run(folder, quick, "--out out/mtp --mtp-weight", weight))
        model, _ = checkpoint.load(f"{folder}/out/mtp", model_cpu)
        assert model.config.mtp_weight == float(weight)
        ratio = model.params["heads"][520:] / ours
        assert (np.ptp(ratio) > 1e-3) == learned and ratio.mean() < 1


def test_resume_refuses(base):
    folder, data = base[0], base[0] / "other.jsonl"
    shutil.copy(folder / "some.jsonl", data)
    quick = "--data other.jsonl --base out/play --batch-tokens 512"
    succeeded(run(folder, quick, "--out out/some --epochs 2"))
    # what is fine-tuned can be fine-tuned again, without --data on the same
    done = run(folder, "--base out/some --out out/again --batch-tokens 512 --epochs 1")
    assert "out/some is fine-tuned into out/again on other.jsonl: " in done.stdout
    end = ": a resumed run keeps its settings. Leave the option out, or start a new run with --out.\n"
    for script, arguments, words in [("sft.py", ["--epochs", "1"], "has --epochs 2, not 1" + end), ("train.py", [], "is one of sft.py"),
                                     ("sft.py", ["--base", "out/again"], "--base out/play, not out/again")]:
        assert_refused(run(folder, "--resume --out out/some", *arguments, script=script), words)
    data.write_text(data.read_text().replace("It is 7.", "It is seven."))
    for out, words in ("out/some", "other.jsonl: not what out/some began with."), ("out/play", "train.py"):
        assert words in run(folder, "--resume --out", out).stderr


def test_a_finished_run_is_given_more_epochs(base):
    """Its steps are counted on, the schedule is that of a run of so many, and the log has each step once."""
    folder, whole, _ = base
    shutil.copytree(folder / "out/play-sft", folder / "out/longer")
    steps = whole[-1]["step"]
    assert run(folder, "--resume --out out/longer --epochs 2").stdout == (      # as many as it has
        f"The run in out/longer is finished: {steps} steps (--steps takes more, in sft.py --epochs).\n")
    done = succeeded(run(folder, "--resume --out out/longer --epochs 3"))
    s = train.Settings(**checkpoint.load_state(folder / "out/longer")["settings"])
    assert s.steps == 3 * steps // 2 and f"was finished after {steps} steps; it goes on to {s.steps}." in done.stdout
    log = read_log(folder, "out/longer")
    losses = steps_of(log)
    assert log[:len(whole)] == whole and [record["step"] for record in losses] == [*range(1, s.steps + 1)]
    assert [record["lr"] for record in losses[steps:]] == [train.learning_rate(step, s) for step in range(steps, s.steps)]
    assert f"Held-out loss {log[0]['val_loss']:.4f} before, {log[-1]['val_loss']:.4f} after." in done.stdout
    assert checkpoint.read_tokenizer(folder / "out/longer").template


def test_a_reader_that_leaves(base):
    """Of --show it has seen enough; a run goes on to its end."""
    folder, whole, _ = base
    for arguments in "--data play.txt --show 100".split(), ["--out", "out/unread", *QUICK]:
        process = subprocess.Popen(attack.command("sft.py", "--base", "out/play", *arguments), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.close()
        said = process.stderr.read()
        process.stderr.close()
        assert (process.wait(), said) == (0, b"")
    assert read_log(folder, "out/unread") == whole


def test_a_base_of_others_takes_the_form_that_it_has_the_tokens_for(base):
    """Without a template, with <|im_start|> among its tokens: ChatML, which the model made from it keeps.  It is written into
    out/, not beside a folder that lies elsewhere."""
    folder = base[0]
    ours = Tokenizer.load(folder / "out/play/tokenizer.json")
    theirs = made_tokenizer(ours.merges, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    checkpoint.save(f"{folder}/hub/theirs", model_cpu.Model(CONFIG, 0, np.float32), theirs, {})
    os.remove(folder / "hub/theirs" / checkpoint.STATE)
    quick = "--base hub/theirs --data play.txt --context 32"
    shown = run(folder, quick, "--show 9", NO_COLOR="1").stdout
    form = r"(--- example .*\n<\|im_start\|>user\n[^<]*<\|im_end\|>\n<\|im_start\|>assistant\n\[[^<]*(<\|im_end\|>)?\]\n){9}"
    assert re.fullmatch(form, shown) and "of 33 tokens are learned, cut\n" in shown, shown
    done = succeeded(run(folder, quick, *QUICK[:2], "--epochs 1 --threads 1"))
    assert "\nEpochs: 1, each of " in done.stdout and os.listdir(folder / "hub") == ["theirs"]
    made = checkpoint.read_tokenizer(folder / "out/theirs-sft")
    assert made.template == CHATML and made.end_of_turn == theirs.special["<|im_end|>"]
    assert checkpoint.read_config(f"{folder}/out/theirs-sft") == dataclasses.replace(CONFIG, context=32, positions=128)
    done = run(folder, "--resume --base hub/theirs --context 128")
    assert done.returncode == 2 and "the run in out/theirs-sft has --context 32, not 128" in done.stderr


def test_the_base_is_safe(base):
    """No name of --out replaces the model that a run begins with, or moves it."""
    folder = base[0]
    before = [(path, path.read_bytes()) for path in sorted((folder / "out/play").iterdir())]
    (folder / "out/link").symlink_to("play")
    write(folder / "out/file", "keep")
    for out, words in ("./out/play/", "--out out/play is the base itself"), ("out/link", "is the base itself"), ("out/file/x", "Not a directory"):
        assert_refused(run(folder, "--base out/play --out", out, *QUICK), words)
    assert [(path, path.read_bytes()) for path in sorted((folder / "out/play").iterdir())] == before


def test_bad_input_is_one_sentence(base):
    folder, log, _ = base
    good = b'{"instruction": "a", "output": "b"}\n'
    for name, text in ("empty.json", b""), ("broken.jsonl", 2 * good + b'{"instruction": "a",\n'), ("one.jsonl", 9 * good):
        write(folder / name, text)
    cases = [("", "there is no model in out/small: `python train.py small` trains one"), *rows("""
        medium                                | python train.py medium
        medium --base out/play                | the model in out/play goes by the defaults of small: leave out medium.
        --resume --out out/nowhere            | nothing to resume
        --epochs 0                            | --epochs: must be a whole number of at least 1
        --base out/play --data missing.json   | missing.json
        --base out/play --data empty.json     | empty.json is empty
        --base out/play --data broken.jsonl   | line 3, is not JSON
        --base out/play --data one.jsonl      | one prompt only""")]
    for arguments, words in cases:
        assert_refused(run(folder, arguments), words)
    assert read_log(folder, "out/play-sft") == log                  # nothing was touched


class Begun(Exception):
    """A run was begun, and would go on."""


def begin(monkeypatch, *arguments):
    """-> (Training, Examples) with which sft.py begins, and what it printed."""
    begun = []

    def stop(*found):
        begun.append(found)
        raise Begun
    with monkeypatch.context() as patch:
        patch.setattr(sft, "fine_tuning", stop)
        patch.setattr(checkpoint, "lock_folder", lambda out: begun.append(out))
        with contextlib.redirect_stdout(Stream()) as out, pytest.raises(Begun):
            sft.main(list(arguments))
    locked, (training, examples) = begun
    assert locked == training.out
    return training, examples, out.seen()


def test_a_new_run(tmp_path, monkeypatch):
    """Its settings, its state, its first checkpoint, and all numbers of its first lines."""
    write_play("play.txt", 40)
    config = dataclasses.replace(CONFIG, mtp_weight=0.7)
    write("some.jsonl", "\n".join(
        json.dumps({"instruction": f"say {i} " + "o" * (i % 300), "output": "yes " * (i % 60 + 1)}) for i in range(230)))
    for preset, options, changed in ("small", "", {}), ("big", "--warmup 3 --batch-tokens 256 --seed 3",
                                                                        dict(warmup=3, batch_tokens=256, seed=3)):
        save_base(tmp_path, "out/base", config, preset=preset)
        training, examples, said = begin(monkeypatch, *"--base out/base --data ./some.jsonl --threads 1 --device cpu".split(), *options.split())
        chosen = {**sft.DEFAULTS[preset], "epochs": sft.EPOCHS[preset], "seed": 0, **changed}
        batches = len(sft.plan_epoch(examples.lengths, chosen["batch_tokens"], chosen["seed"], 0))
        steps = chosen.pop("epochs") * batches
        if not changed:
            chosen["warmup"] = min(chosen["warmup"], steps // 10)
        found = dataclasses.asdict(training.settings)
        assert found == {**found, **chosen, "preset": preset, "steps": steps, "mtp_weight": 0.7, "tokens_key": examples.key,
                         "optimizer": "muon", "data": ["some.jsonl"]}
        assert training.state == {"script": "sft.py", "tokens": 0, "seconds": 0.0, "base": "out/base"} and training.model.step == 0
        assert said.endswith(
            f"out/base is fine-tuned into out/base-sft on some.jsonl: 207 conversations, 23 more held out; {examples.cut:,} cut to fit.\n"
            f"Epochs: {steps // batches}, each of {batches} steps of at most {chosen['batch_tokens']:,} tokens.\n") and 50 < examples.cut < 200
        begun, trained = [checkpoint.load(out, model_cpu, {"dtype": np.float32})[0] for out in ("out/base-sft", "out/base")]
        assert (begun.step, begun.config) == (0, config) and np.array_equal(begun.flat_params, trained.flat_params)
    assert said.startswith("out/base-sft held an earlier run: it is now out/base-sft.1.\n")


def test_the_engine_and_the_data_of_a_new_run(base, monkeypatch):
    """--device decides; without it a GPU serves the larger models, and where there is none they are refused.  Data is named, or
    found, or the base's own."""
    monkeypatch.chdir(base[0])
    save_base(base[0], "out/medium", preset="medium")
    monkeypatch.setattr(model_gpu, "cupy", None)
    with value_error("^The GPU needs CuPy.* On a CPU, with --device cpu, small takes minutes"):
        sft.main(["medium", "--device", "auto"])
    with value_error("^The GPU needs CuPy"):
        sft.main("--base out/play --device gpu".split())

    def stop(paths):
        raise ValueError(f"read {paths}")
    monkeypatch.setattr(sft, "read_conversations", stop)
    for data, paths in ("--data ./a.json b//c.json".split(), ["a.json", "b/c.json"]), ([], ["play.txt"]):
        for show in [], ["--show", "2"]:
            with value_error(f"^{re.escape(f'read {paths}')}$"):
                sft.main(["medium", "--device", "cpu", *show, *data])
