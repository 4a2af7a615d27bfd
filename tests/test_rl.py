"""rl.py: the gradients of both methods by finite differences of their losses, rewards, pairs; runs, as a user starts them."""
import glob
import json
import os
import re
import unittest.mock

import numpy as np
import pytest
from cases import once_a_module, parametrize, rows, value_error, write
from runs import read_log, refused, run
from test_sft import OURS, parts, tune
from test_train import T, TOKENIZER, assert_gradient, make_training, mean_nats, nats, open_run, random_rows

import checkpoint
import model_cpu
import rl
import script
import sft
import train

PAIRS = [{"prompt": f"say {i % 30}", "chosen": f"It is {i}.", "rejected": "no " * (i % 5 + 1)} for i in range(60)]


def make_pair(record):
    """-> the pair of a record in which user "Q" stands for a message."""
    return script.make_pair(json.loads(re.sub('([a-z]+) (".*?")', r'{"role": "\1", "content": \2}', record)))


@parametrize("record", [
    '{"prompt": "Q", "chosen": "You.", "rejected": "No."}',
    '{"prompt": [user "Q"], "chosen": [assistant "You."], "rejected": [assistant "No."]}',
    '{"prompt": [user "Q"], "chosen": [user "Q", assistant "You."], "rejected": [user "Q", assistant "No."]}',
    '{"chosen": [system "S", user "Q", assistant "You."], "rejected": [system "S", user "Q", assistant "No."]}'])
def test_a_record_is_a_pair(record):
    """In each form of TRL that says exactly what the question is."""
    (_, turns), rejected = make_pair(record)
    assert (turns, rejected) == ([("Q", "You.")], "No.")


@parametrize("record", [
    '{"question": "Q", "chosen": "You.", "rejected": "No."}', '{"prompt": "Q", "chosen": "You.", "rejected": ""}',
    # several turns; another question than in the prompt; a turn behind the answer; a system text that the prompt has not
    '{"prompt": "Q", "chosen": [user "Q", assistant "You.", user "Which?", assistant "That."], "rejected": "No."}',
    '{"prompt": "Q", "chosen": [user "Else?", assistant "You."], "rejected": "No."}',
    '{"prompt": "Q", "chosen": [user "Q", assistant "You.", assistant "Both."], "rejected": "No."}',
    '{"prompt": "Q", "chosen": "You.", "rejected": [system "Be kind.", user "Q", assistant "No."]}'])
def test_another_pair_is_refused(record):
    with value_error("no prompt|no text|an answer must be one message|take turns"):
        make_pair(record)


def log_probs(model, rows):
    return -np.array([nats(model, row)[0] for row in rows])


def test_reinforce_climbs_the_rewards_above_the_mean_of_each_group():
    training = make_training()
    model = training.model
    rows = random_rows(2 * rl.GROUP, T + 1)
    rewards = np.random.default_rng(0).standard_normal((2, rl.GROUP))
    better = (rewards - rewards.mean(axis=1)[:, None]).ravel()
    train.forward_backward(training, rows, rl.reinforce_weights(rewards.ravel()))
    tokens = sum(nats(model, row)[1] for row in rows)
    assert_gradient(model, model.flat_grads, lambda: -better @ log_probs(model, rows) / tokens)


def test_dpo_prefers_what_was_chosen(tmp_path):
    """The gradient, and what an evaluation says, of a model that has moved away from its reference."""
    write(tmp_path / "pairs.jsonl", json.dumps(PAIRS))
    training = make_training(data=[f"{tmp_path}/pairs.jsonl"], beta=0.3)
    training.settings.batch_tokens = 8 * T
    model = training.model
    job = rl.dpo_job(training)
    batches, held_out, _ = rl.read_pairs(TOKENIZER, training.settings, T)
    steps = [job.batch(step)[0] for step in range(len(batches))]
    once, learned = [sorted(str(ids.tolist()) for rows in part for ids, _ in rows) for part in (batches, steps)]
    assert once == learned

    def ratios(rows):
        return log_probs(model, rows).reshape(-1, 2) @ [0.3, -0.3]
    sides = [job.batch(1)[0], held_out]
    learned, unseen = map(ratios, sides)
    model.flat_params *= 1.1
    z = ratios(sides[1]) - unseen
    record = job.evaluate(0)
    assert [record["dpo"], record["accuracy"], record["margin"]] == pytest.approx([np.log(1 + np.exp(-z)).mean(), (z > 0).mean(), z.mean()])
    train.forward_backward(training, *job.batch(1))
    assert_gradient(model, model.flat_grads, lambda: np.log(1 + np.exp(learned - ratios(sides[0]))).mean())


@parametrize("name, answer, tokens, ended, value", rows("""
    sentence | So so.  | 5  | yes | 1
    sentence | So so.  | 5  |     | 0
    sentence | So? So. | 5  | yes | 0
    sentence | So so.  | 4  | yes | 0
    short    | yes     | 10 | yes | 0.75
    short    | yes     | 10 |     | 0"""))
def test_rewards(name, answer, tokens, ended, value):
    reward, _ = rl.find_reward(name)
    assert reward("", answer, int(tokens), bool(ended)) == float(value)


def test_rows_of_a_pair(tmp_path):
    """Only the last answers are learned.  Rows that fill the window are counted, and pairs that are equal in it are left
    out."""
    rows = rl.pair_rows(OURS, (("S", [("Q", "A"), ("R", "yes")]), "no"), 99)
    prompt = "<|user|>S\n\nQ<|end|><|assistant|>A<|end|><|user|>R<|end|><|assistant|>"
    assert [parts(OURS, row) for row in rows] == [[prompt, "yes<|end|>"], [prompt, "no<|end|>"]]
    answers = ("x" * 30, "no"), ("x" * 30, "x" * 29), ("yes", "no"), ("no", "no")
    pairs = [{"prompt": f"q{i}", "chosen": chosen, "rejected": rejected} for i, (chosen, rejected) in enumerate(answers)]
    write(tmp_path / "pairs.jsonl", json.dumps(pairs))
    settings = make_training(data=[f"{tmp_path}/pairs.jsonl"]).settings
    batches, held_out, words = rl.read_pairs(OURS, settings, T)
    assert len(sum(batches, [])) + len(held_out) == 4
    assert words.startswith("4 pairs, 1 to learn, 1 held out.") and "\n1 of their rows fill the window" in words


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------
@once_a_module
def tuned(new_folder):
    return tune()


def test_what_is_drawn(tuned, monkeypatch):
    """The same from the same seed.  A reward gets the texts, the number of tokens before a special one, and whether that is
    the end.  A terminal shows how many tokens are drawn."""
    asked = [("S", "say 3")] * 6
    heard = []
    progress = unittest.mock.Mock()
    monkeypatch.setattr(rl, "show_progress", lambda what: progress)

    def reward(prompt, answer, tokens, ended):
        heard.append((prompt, answer))
        return tokens + 99 * ended
    with unittest.mock.patch.object(model_cpu, "generate_batch", wraps=model_cpu.generate_batch) as generate:
        draws = [rl.draw_answers(tuned, reward, asked, seed) for seed in ([5, 1], [5, 1], [5, 2])]
    sampling = generate.call_args.args[2]
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1, 0, 1)          # from the model's own distribution
    for rows, rewards, texts in draws:
        answers = [ids[mask] for ids, mask in rows]
        assert rewards.tolist() == [(ids < 268).sum() + 99 * (ids[-1] == 271) for ids in answers]
        assert texts == [tuned.tokenizer.decode(ids[ids < 268]) for ids in answers]
        assert {parts(tuned.tokenizer, row)[0] for row in rows} == {"<|user|>S\n\nsay 3<|end|><|assistant|>"}
    assert [call.args for call in progress.mock_calls[-2:]] == [(sum(map(len, answers)), 768), (1, 1)]
    first, again, other = [texts for *_, texts in draws]
    assert heard == [("say 3", answer) for answer in first + again + other]
    assert first == again != other and len({*first}) > 50 and len(first) == 96


def test_a_run_for_rewards(tuned):
    """Groups of answers to prompts that are not held out, by AdamW without decay; an evaluation answers those that are."""
    write("mine.py", "def mine(prompt, answer, tokens, ended):\n    return answer.count('i') + tokens / 8")
    run("rl.py --base tuned --reward mine.py:mine --steps 3 --batch-tokens 1024 --lr 0.01 --out climbed")
    training = open_run("climbed", "rl.py")
    model = training.model
    start, first, *_, last = read_log("climbed")
    learned, unseen = sft.read_conversations(training.settings)
    asked = list(dict.fromkeys(map(sft.opening, unseen)))
    mine, _ = rl.find_reward("mine.py:mine")
    rows, rewards, _ = rl.draw_answers(training, mine, asked, 0)
    kl = (log_probs(model, rows) - log_probs(tuned.model, rows)).sum() / train.count_learned(rows)
    forgotten = mean_nats(model, [sft.make_row(tuned.tokenizer, talk, 32) for talk in unseen])
    assert [last["reward"], last["kl"], last["forgotten"]] == pytest.approx([rewards.mean(), kl, forgotten], rel=1e-3)
    assert start["kl"] == 0 < kl and [model.optimizer, training.settings.decay, first["lr"]] == ["adamw", 0, 0.01]
    model.write(model.flat_params, tuned.model.flat_params)
    batch = rl.reinforce_job(training, mine).batch
    rows, weights = batch(0)
    assert first["loss"] == pytest.approx(-weights @ log_probs(model, rows) / train.count_learned(rows), rel=1e-3)
    prompts = [parts(tuned.tokenizer, row)[0] for step in range(3) for row in batch(step)[0]]
    assert prompts == np.repeat(prompts[::16], 16).tolist() and len({*prompts}) == 6
    assert {*prompts} <= {f"<|user|>{question}<|end|><|assistant|>" for _, [(question, _)] in learned}
    # of two prompts one is learned, and so asked in each step: with other answers
    training.settings.data = ["two.jsonl"]
    write("two.jsonl", '{"instruction": "a", "output": "b"}\n{"instruction": "c", "output": "d"}')
    batch = rl.reinforce_job(training, mine).batch
    drawn = [[ids.tolist() for ids, _ in batch(step)[0]] for step in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_run_on_pairs(tuned):
    """All pairs once.  The reference is the base, also in a run that is opened again."""
    write("pairs.jsonl", "\n".join(map(json.dumps, PAIRS)))
    run("rl.py --base tuned --data pairs.jsonl --batch-tokens 256 --lr 0.002 --out dpo")
    training = open_run("dpo", "rl.py")
    first, *_, last = [record for record in read_log("dpo") if "margin" in record]
    assert first["margin"] == 0 and last["dpo"] < 0.6
    assert rl.dpo_job(training).evaluate(0)["margin"] == pytest.approx(last["margin"], rel=1e-4)
    learned, held_out, _ = rl.read_pairs(training.tokenizer, training.settings, 32)
    assert max(train.make_batch(rows, 32, 1)[0].size for rows in learned) <= 256
    assert training.model.step == len(learned) and sum(map(len, learned)) + len(held_out) == 120
    for forged in None, [], [["x"]], [[]] * 99:
        training.state["reference"] = forged
        with value_error("the record of the run in dpo cannot be used"):
            rl.dpo_job(training)


def test_dpo_says_when_chosen_answers_become_less_probable(tuned):
    """And which answer is chosen, and what the model says now."""
    write("pairs.jsonl", json.dumps(PAIRS))
    shown = run("rl.py --base tuned --data pairs.jsonl --batch-tokens 256 --lr 0.1 --steps 6 --out fallen").stdout
    before, after = [record["chosen"] for record in read_log("fallen") if "chosen" in record]
    assert f"less\nprobable than before, by {before - after:.1f} nats each" in shown and before > after
    titles = [line for line in shown.splitlines() if line.startswith("--- ")]
    assert titles == ["--- chosen", "--- rejected", "--- the model says"]


# ---------------------------------------------------------------------------------------------------------------------
# Rewards of one's own
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("name, words", [
    ("bad.py:bad", "bad.py:bad cannot be used (TypeError: float() argument"),
    ("exit.py:x", "exit.py:x cannot be used (SystemExit: 0)"), ("bad.py:nan", "bad.py:nan cannot be used (it is nan)"),
    ("bad.py:nothere", "cannot be used (bad.py has no function nothere)"), ("nothere.py:bad", "nothere.py: No such file"),
    ("nothere", "must be sentence, short or FILE.py:NAME, not nothere")])
def test_a_reward_that_cannot_be_used_is_one_sentence_and_nothing_is_lost(tuned, name, words):
    write("bad.py", "def bad(prompt, answer, tokens, ended):\n    return None\ndef nan(*_):\n    return 'nan'")
    write("exit.py", "raise SystemExit(0)")
    command = f"rl.py --base tuned --steps 1 --out {name.replace(':', '-')}"
    run(command)
    before = sorted(glob.glob("*"))
    assert words in refused(f"{command} --reward {name}")
    assert sorted(glob.glob("*")) == before


def test_equal_rewards_are_noted(tuned):
    write("same.py", "def same(*_):\n    return 0.5")
    shown = run("rl.py --base tuned --steps 1 --reward same.py:same --out same").stdout
    assert "note: for each held-out prompt all answers have the same reward" in shown


def test_a_resumed_run_runs_the_code_of_its_reward_only_where_it_is_named_again(tuned):
    """The folder may be somebody else's.  A reward that was mended since is taken, with a note."""
    command = "rl.py --base tuned --batch-tokens 512 --out resumed --reward own.py:own --steps"
    write("own.py", "def own(prompt, answer, tokens, ended):\n    return tokens")
    run(f"{command} 1")
    write("own.py", "open('ran', 'w')\ndef own(prompt, answer, tokens, ended):\n    return -tokens")
    assert "only if you name it again: --reward own.py:own" in refused("rl.py --resume --out resumed --steps 2")
    assert not os.path.exists("ran")
    assert "note: the file of own.py:own has changed" in run(f"{command} 2 --resume").stdout and os.path.exists("ran")
    assert "has changed" not in run(f"{command} 3 --resume").stdout
    model, tokenizer = checkpoint.load("tuned", model_cpu)
    model.flat_params += 1
    checkpoint.save("tuned", model, tokenizer, {})
    assert "tuned: changed since resumed began" in refused(f"{command} 4 --resume")
