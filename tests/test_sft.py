"""sft.py: conversations, what of them is learned, batches; runs, as a user starts them."""
import itertools
import json

import numpy as np
import pytest
from cases import once_a_module, parametrize, value_error, write
from runs import read_log, refused, run
from test_train import T, mean_nats, open_run, train_base

import checkpoint
import script
import sft
import train
from model_cpu import Model
from tokenizer import SPECIAL_TOKENS, Tokenizer


def bytes_and(*special):
    """A tokenizer of the 256 bytes and of special tokens."""
    tokens = [bytes([i]) for i in range(256)] + [name.encode() for name in special]
    return Tokenizer(tokens, {}, {name: 256 + i for i, name in enumerate(special)})


OURS = bytes_and(*SPECIAL_TOKENS)


def messages(*said):
    """"user Hi", "assistant Yo" -> a record."""
    return [dict(zip(["role", "content"], text.split(" ", 1))) for text in said]


TURNS = [("Hi", "Yo"), ("<|end|>?", "No.")]
TALK = messages("system Be kind", "user Hi", "assistant Yo", "user <|end|>?", "assistant No.")


@parametrize("record, conversation", [
    ({"instruction": "Q\n", "output": " A"}, (None, [("Q\n", " A")])),
    ({"instruction": "Q", "input": "I", "output": "A"}, (None, [("Q\n\nI", "A")])),
    (TALK, ("Be kind", TURNS)), ({"messages": TALK}, ("Be kind", TURNS)),
    ({"prompt": "Q", "completion": "A"}, (None, [("Q", "A")])),
    ({"prompt": TALK[:4], "completion": TALK[4:]}, ("Be kind", TURNS))])
def test_a_record_is_a_conversation(record, conversation):
    assert script.make_turns(record) == conversation


@parametrize("record, words", [
    (7, "it has no names, and needs instruction and output, or"), ("Q", "it has no names"), ({}, "it has no names"),
    ({"better": "Q"}, "it has better, and needs instruction .*or for rl.py prompt, chosen, rejected"), ([], "must take turns"),
    ({"instruction": "Q", "output": " \n"}, ""), (messages("system S"), ""), (messages("user Q", "user R"), "")])
def test_another_record_is_refused_by_its_number(tmp_path, record, words):
    write(tmp_path / "x.json", json.dumps([TALK, record]))
    with value_error(f"x.json, record 2, cannot be used .*{words}"):
        script.read_records([f"{tmp_path}/x.json"], script.make_turns)


def parts(tokenizer, row):
    """A row as texts, which are read and learned in turn."""
    return [tokenizer.decode([i for i, _ in group]) for _, group in itertools.groupby(zip(*row), lambda pair: pair[1])]


def test_answers_and_their_ends_are_learned():
    """By hand.  A text never becomes a special token."""
    row = sft.make_row(OURS, ("Be kind", TURNS), 999)
    assert parts(OURS, row) == ["<|user|>Be kind\n\nHi<|end|><|assistant|>", "Yo<|end|>", "<|user|><|end|>?<|end|><|assistant|>", "No.<|end|>"]
    assert (row[0] == OURS.end_of_turn).sum() == 4
    cut = sft.make_row(OURS, (None, [("x" * 99 + "yz", "abcdefgh")]), T)
    assert parts(OURS, cut) == ["<|user|>xxxxxxxyz<|end|><|assistant|>", "abcde"]


def test_no_opening_is_both_learned_and_held_out():
    openings = [i * i % 157 for i in range(400)]
    learned, held_out = sft.hold_out(range(400), openings)
    assert sorted(learned + held_out) == [*range(400)]
    unseen = {openings[i] for i in held_out}
    assert len(unseen) == 7 and not unseen.intersection(openings[i] for i in learned)


def test_an_epoch_has_each_row_once_in_batches_of_one_length():
    lengths = 8 * np.random.default_rng(0).integers(1, 30, 500)
    rows = [(range(n + 1), None) for n in lengths]
    plans = [sft.plan_epoch(rows, 240, 200, *numbers) for numbers in ((5, 0), (5, 0), (5, 1), (6, 0))]
    for plan in plans:
        assert sorted(np.concatenate(plan)) == [*range(500)] and len(plan) == len(plans[0])
        sizes = [lengths[batch].max() * len(batch) for batch in plan]
        assert max(sizes) < 240 and sum(sizes) < 1.1 * sum(lengths) and lengths[plan[0]].max() < lengths.max()
    first, again, *others = [np.concatenate(plan).tolist() for plan in plans]
    assert first == again and first not in others


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------
def tune():
    """A model that was trained and then fine-tuned on the records that go with its text."""
    records = [{"instruction": f"say {i % 30}", "output": f"It is {i} and {i}."[:7 + i % 9]} for i in range(60)]
    write("text-chat.json", json.dumps(records))
    train_base()
    run("sft.py --base base --batch-tokens 128 --epochs 2 --lr 0.01 --seed 5 --out tuned")
    return open_run("tuned", "sft.py")


@once_a_module
def tuned(new_folder):
    return tune()


def test_a_run(tuned):
    """Two epochs over all that is not held out, from the base's weights; the loss is that of what is held out."""
    learned, unseen = sft.read_conversations(tuned.settings)
    texts = [f"<|user|>{question}<|end|><|assistant|>{answer}<|end|>" for _, [(question, answer)] in learned]
    batch = sft.fine_tuning_job(tuned).batch
    read = ["".join(parts(tuned.tokenizer, row)) for step in range(tuned.model.step) for row in batch(step)[0]]
    halves = [read[:len(texts)], read[len(texts):]]
    assert [*map(sorted, halves)] == [sorted(texts)] * 2 and halves[0] != halves[1]
    assert tuned.settings.warmup == tuned.model.step // 10
    base, _ = checkpoint.load("base", train.model_cpu)
    rows = [sft.make_row(tuned.tokenizer, talk, 32) for talk in unseen]
    first, *_, last = [record["val_loss"] for record in read_log("tuned") if "val" in record]
    expected = [mean_nats(model, rows) for model in (base, tuned.model)]
    assert [first, last] == pytest.approx(expected, rel=1e-4)
    questions = [question for _, [(question, _)] in unseen]
    assert {title for title, _ in read_log("tuned")[-1]["samples"]} <= {*questions}


def test_what_is_learned_is_shown_in_the_form_that_the_base_has_the_tokens_for(tuned):
    tokenizers = {"theirs": bytes_and("</s>", "<|im_start|>", "<|im_end|>"), "none": bytes_and("</s>")}
    for name, tokenizer in tokenizers.items():
        checkpoint.save(name, Model(tuned.model.config), tokenizer, {})
    show = "sft.py --data text-chat.json --show 1 --base "
    assert run(show + "tuned").stdout == "--- example 1: 8 of 16 tokens are learned\n<|user|>say 0<|end|><|assistant|>[It is 0<|end|>]\n"
    assert run(show + "theirs").stdout.endswith("<|im_start|>user\nsay 0<|im_end|>\n<|im_start|>assistant\n[It is 0<|im_end|>]\n")
    assert "no token that ends a turn" in refused(show + "none")


def test_a_base_names_only_files_that_it_has_learned(tuned):
    """A folder of somebody else must not choose what is read here, so the file has to be the one that it was made of."""
    before = open("text-chat.json").read()
    write("text-chat.json", before.replace("say 7", "my secret"))
    for script in "sft.py", "rl.py":
        assert "text-chat.json: not what it learned from" in refused(f"{script} --base tuned --out other")
    write("text-chat.json", before)
