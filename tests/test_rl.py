"""rl.py: the gradients of both methods by finite differences of their losses, rewards, pairs; runs, as a user starts them."""
import json

import numpy as np
import pytest
from cases import once_a_module, parametrize, rows, write
from runs import read_log, refused, run
from test_sft import OURS, parts, tune
from test_train import T, TOKENIZER, assert_gradient, make_training, mean_nats, nats, open_run, random_rows

import rl
import sft
import train

PAIRS = [{"prompt": f"say {i % 30}", "chosen": f"It is {i}.", "rejected": "no " * (i % 5 + 1)} for i in range(60)]


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
    job = rl.preferring(training)
    _, held_out, _ = rl.read_pairs(TOKENIZER, training.settings, T)

    def ratios(rows):
        return log_probs(model, rows).reshape(-1, 2) @ [0.3, -0.3]
    sides = [job.batch(2)[0], sum(held_out, [])]
    learned, unseen = map(ratios, sides)
    model.flat_params *= 1.1
    z = ratios(sides[1]) - unseen
    record = job.evaluate(0)
    assert [record["dpo"], record["accuracy"], record["margin"]] == pytest.approx([np.log(1 + np.exp(-z)).mean(), (z > 0).mean(), z.mean()])
    train.forward_backward(training, *job.batch(2))
    assert_gradient(model, model.flat_grads, lambda: np.log(1 + np.exp(learned - ratios(sides[0]))).mean())


@parametrize("name, question, answer, tokens, ended, value", rows("""
    sentence | -       | So so.    | 5  | yes | 1
    sentence | -       | So so.    | 5  |     | 0
    sentence | -       | So? So.   | 5  | yes | 0
    sentence | -       | So so.    | 4  | yes | 0
    echo     | PLANET? | A planet. | 2  |     | 1
    echo     | A moon? | A moon.   | 2  |     | 0
    short    | -       | yes       | 10 | yes | 0.75
    short    | -       | yes       | 10 |     | 0"""))
def test_rewards(name, question, answer, tokens, ended, value):
    assert rl.find_reward(name)(question, answer, int(tokens), bool(ended)) == float(value)


def test_rows_of_a_pair():
    """Only the last answers are learned.  What is cut is counted, and pairs that are equal in the window are left out."""
    rows, cut = rl.pair_rows(OURS, (("S", [("Q", "A"), ("R", "yes")]), "no"), 99)
    prompt = "<|user|>S\n\nQ<|end|><|assistant|>A<|end|><|user|>R<|end|><|assistant|>"
    assert [parts(OURS, row) for row in rows] == [[prompt, "yes<|end|>"], [prompt, "no<|end|>"]] and not cut
    answers = ("x" * 30, "no"), ("x" * 30, "x" * 29), ("no", "no")
    [batch], words = rl.pair_batches(OURS, [((None, [("q", chosen)]), rejected) for chosen, rejected in answers], make_training().settings, T)
    assert len(batch) == 2 and words.startswith("3 pairs, 2 of them cut to the window, 2 left out")


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------
@once_a_module
def tuned(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("rl"))
        yield tune()


def test_what_is_drawn(tuned):
    """The same from the same seed.  A reward gets the number of tokens before a special one, and whether that is the end."""
    asked = [("S", "say 3")] * 99
    draws = [rl.draw_answers(tuned, lambda prompt, answer, tokens, ended: tokens + 99 * ended, asked, seed) for seed in ([5, 1], [5, 1], [5, 2])]
    for rows, rewards, texts in draws:
        answers = [ids[mask] for ids, mask in rows]
        assert rewards.tolist() == [(ids < 268).sum() + 99 * (ids[-1] == 271) for ids in answers]
        assert {parts(tuned.tokenizer, row)[0] for row in rows} == {"<|user|>S\n\nsay 3<|end|><|assistant|>"}
    first, again, other = [texts for *_, texts in draws]
    assert first == again != other and len({*first}) > 50


def test_a_run_for_rewards(tuned):
    """Groups of answers to prompts that are not held out, by AdamW without decay; an evaluation answers those that are."""
    write("mine.py", "def mine(prompt, answer, tokens, ended):\n    return answer.count('i') + tokens / 8")
    run("rl.py --base tuned --reward mine.py:mine --steps 3 --batch-tokens 1024 --lr 0.01 --out climbed")
    training = open_run("climbed", "rl.py")
    model = training.model
    start, first, *_, last = read_log("climbed")
    learned, unseen = sft.read_conversations(training.settings)
    asked = [opening for opening in dict.fromkeys(map(sft.opening, unseen)) for _ in range(16)]
    rows, rewards, _ = rl.draw_answers(training, rl.find_reward("mine.py:mine"), asked, 0)
    kl = (log_probs(model, rows) - log_probs(tuned.model, rows)).sum() / train.learned(rows)
    forgotten = mean_nats(model, [sft.make_row(tuned.tokenizer, talk, 32) for talk in unseen])
    assert [last["reward"], last["kl"], last["forgotten"]] == pytest.approx([rewards.mean(), kl, forgotten], rel=1e-3)
    assert start["kl"] == 0 < kl and [model.optimizer, training.settings.decay, first["lr"]] == ["adamw", 0, 0.01]
    model.write(model.flat_params, tuned.model.flat_params)
    batch = rl.reinforcing(training).batch
    rows, weights = batch(0)
    assert first["loss"] == pytest.approx(-weights @ log_probs(model, rows) / train.learned(rows), rel=1e-3)
    prompts = [parts(tuned.tokenizer, row)[0] for step in range(3) for row in batch(step)[0]]
    assert prompts == np.repeat(prompts[::16], 16).tolist() and len({*prompts}) == 6
    assert {*prompts} <= {f"<|user|>{question}<|end|><|assistant|>" for _, [(question, _)] in learned}
    # of two prompts one is learned, and so asked in each step: with other answers
    training.settings.data = ["two.jsonl"]
    write("two.jsonl", '{"instruction": "a", "output": "b"}\n{"instruction": "c", "output": "d"}')
    batch = rl.reinforcing(training).batch
    drawn = [[ids.tolist() for ids, _ in batch(step)[0]] for step in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_run_on_pairs(tuned):
    """All pairs once.  The reference is the base, also in a run that is opened again."""
    write("pairs.jsonl", "\n".join(map(json.dumps, PAIRS)))
    run("rl.py --base tuned --data pairs.jsonl --batch-tokens 256 --lr 0.002 --out dpo")
    training = open_run("dpo", "rl.py")
    first, *_, last = [record for record in read_log("dpo") if "margin" in record]
    assert first["margin"] == 0 and last["dpo"] < 0.6
    assert rl.preferring(training).evaluate(0)["margin"] == pytest.approx(last["margin"], rel=1e-4)
    learned, held_out, _ = rl.read_pairs(training.tokenizer, training.settings, 32)
    assert max(train.make_batch(rows, 32, 1)[0].size for rows in learned) <= 256
    assert training.model.step == len(learned) and sum(map(len, learned + held_out)) == 120


def test_what_a_reward_raises_is_one_sentence(tuned):
    write("bad.py", "def bad(prompt, answer, tokens, ended):\n    return None")
    assert "bad.py:bad cannot be used (TypeError: " in refused("rl.py --base tuned --reward bad.py:bad")
