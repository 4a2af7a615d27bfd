"""rl.py: the two weights, rewards, pairs, runs from end to end, exact resume, bad input."""
import functools
import json
import math
import random
import shutil
from types import SimpleNamespace

import attack
import numpy as np
import pytest
import runs
from cases import once_a_module, parametrize, rows, write
from runs import assert_refused, read_log, succeeded
from test_sft import BYTES, QUICK, run_anew, save_base, write_play

import checkpoint
import model_cpu
import rl
import sft
import train

run = functools.partial(runs.run, script="rl.py")
FEW = "--batch-tokens 256 --steps 3 --eval-every 3 --save-every 1 --threads 1 --lr 0.001".split()
PAIRS = [{"prompt": f"say {i}", "chosen": f"It is {i}.", "rejected": f"no {i} " * (i % 40 + 1)} for i in range(30)]


@once_a_module
def folder(tmp_path_factory):
    """With a fine-tuned model, and a file of pairs."""
    folder = tmp_path_factory.mktemp("rl")
    write_play(folder / "play.txt", 700)
    save_base(folder, "out/play")
    write(folder / "out/play/log.jsonl", "")
    succeeded(run_anew(folder, "--base out/play", *QUICK))
    write(folder / "pairs.jsonl", "".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return folder


def test_the_weights_are_the_derivatives_of_the_losses():
    rng = np.random.default_rng(0)
    log_probs, reference = rng.standard_normal((2, 8))

    def loss(log_probs):
        return 4 * rl.dpo_loss(rl.dpo_margins(log_probs, reference, 0.3))           # of the four pairs together
    weights = rl.dpo_weights(log_probs, reference, 0.3)
    slopes = [(loss(log_probs + step) - loss(log_probs - step)) / 2e-5 for step in 1e-5 * np.eye(8)]
    np.testing.assert_allclose(-weights, slopes, atol=1e-9)
    z, weights = rl.dpo_margins(reference, reference, 0.3), rl.dpo_weights(reference, reference, 0.3)
    assert not z.any() and rl.dpo_loss(z) == math.log(2) and weights.tolist() == 4 * [0.15, -0.15]
    rewards = rng.standard_normal(2 * rl.GROUP)
    weights = rl.reinforce_weights(rewards)
    assert abs(weights.reshape(2, -1).sum(axis=1)).max() < 1e-12
    assert weights[-1] == rewards[-1] - rewards[rl.GROUP:].mean()


def weighted_problem():
    """-> (model in float64, tokens (4,7), targets (4,8)) of a tiny model; prompts are masked."""
    config = model_cpu.Config(dim=8, heads=2, kv_heads=1, layers=1, context=8, vocab=16, predict=2, hidden=16)
    rng = np.random.default_rng(0)
    model = model_cpu.Model(config, threads=2)
    model.write(model.flat_params, 0.3 * rng.standard_normal(model.flat_params.size) + (model.flat_params == 1))
    tokens, targets = rng.integers(0, 16, (4, 7)), rng.integers(0, 16, (4, 8))
    targets[:, :3] = targets[1, 5:] = -1
    return model, tokens, targets


def plain_log_probs(model, tokens, targets):
    """Of head 0's logits, once more."""
    z = model.logits(tokens)[:, :, 0]
    log_p = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    picked = np.take_along_axis(log_p, targets[:, :7, None], axis=-1)[..., 0]
    return np.where(targets[:, :7] >= 0, picked, 0.0).sum(axis=1)


def gradient_of(model, tokens, targets, counted, weights):
    """In two micro-batches."""
    model.flat_grads[...] = 0.0
    for rows in slice(3), slice(3, 4):
        model.forward(tokens[rows], targets[rows], np.full(2, counted), weights[rows])
        model.backward()
    return model.flat_grads.copy()


@parametrize("method", ["dpo", "reinforce"])
def test_every_entry_of_the_gradient_by_finite_differences(monkeypatch, method):
    """Of the true loss: DPO's -log sigmoid(z), REINFORCE's -(r - b) log pi."""
    monkeypatch.setattr(rl, "GROUP", 2)
    model, tokens, targets = weighted_problem()
    reference, rewards = np.array([-9.0, -8.5, -10.0, -9.5]), np.array([1.0, 0.0, 0.25, 0.75])
    counted, loss = {
        "dpo": (2, lambda: rl.dpo_loss(rl.dpo_margins(plain_log_probs(model, tokens, targets), reference, 0.5))),
        "reinforce": (15, lambda: -(np.array([0.5, -0.5, -0.25, 0.25]) @ plain_log_probs(model, tokens, targets)) / 15)}[method]
    np.testing.assert_allclose(model.log_probs(tokens, targets), plain_log_probs(model, tokens, targets), rtol=1e-12)
    weights = rl.reinforce_weights(rewards)
    if method == "dpo":
        weights = rl.dpo_weights(model.log_probs(tokens, targets), reference, 0.5)
    gradient = gradient_of(model, tokens, targets, counted, weights)
    if method == "dpo":                             # the same in one call, where the model's own log p gives the weights
        model.flat_grads[...] = 0.0
        model.forward(tokens, targets, np.full(2, counted), reference, lambda *now: rl.dpo_weights(*now, 0.5))
        model.backward()
        np.testing.assert_allclose(model.flat_grads, gradient, rtol=1e-9, atol=1e-14)
    numeric = [model_cpu.slope(loss, model.flat_params, i, 2e-4) for i in range(gradient.size)]
    parts = model_cpu.param_views(np.arange(gradient.size), model.config)
    for name, place in parts.items():
        error = np.abs(gradient - numeric)[place.ravel()].max() / np.abs(gradient[place.ravel()]).max()
        assert error < 1e-9, (name, error)
    for wrong in (np.ones(4), np.abs(weights), 2 * weights, weights[::-1]):         # as if a bug were there
        assert np.abs(gradient_of(model, tokens, targets, counted, wrong) - numeric).max() > 1e-4


@parametrize("name, prompt, answer, value", rows("""
    sentence |               | The cat sat here . END     | 1
    sentence |               | The cat sat here .         | 0
    sentence |               | The cat sat . END          | 0
    sentence |               | a a a a a a a a a a a a a a a a a a a a a a a a ! END                | 0
    sentence |               | a a a a a a a a a a a a a a a a a a a a a a a ? END                | 1
    sentence |               | The cat . sat here . END   | 0
    sentence |               | The cat sat here now END   | 0
    echo     | Which planet? | PLANETS do                 | 1
    echo     | Which one?    | one of them END            | 0
    short    |               | yes END                    | 0.975
    short    |               | yes                        | 0
    short    |               | END                        | 0"""))
def test_rewards(name, prompt, answer, value):
    words, end, _ = answer.partition("END")
    assert rl.REWARDS[name](prompt, words.split(), end != "") == float(value)


@parametrize("body, words", rows("""
    return None      | TypeError: float() argument must be
    return answer[99] | IndexError: list index out of range
    raise SystemExit | SystemExit:
    1 /              | SyntaxError: invalid syntax"""))
def test_what_a_reward_raises_is_one_sentence(folder, body, words):
    write(folder / "bad.py", f"def bad(prompt, answer, ended):\n    {body}\n")
    assert_refused(run(folder, "--base out/play-sft --show 1 --reward bad.py:bad"), f"the reward bad.py:bad: {words}")


def test_own_pairs_are_drawn_once_and_character_by_character(folder, monkeypatch):
    training = begun(folder, monkeypatch, method="dpo")
    answer = rl.make_row([1], [*training.tokenizer.encode("né"), training.tokenizer.end_of_turn])
    monkeypatch.setattr(rl, "draw_answers", lambda training, openings, seed: len(openings) * [answer])
    true = rl.read_pairs(training.settings.data)
    pairs = rl.own_pairs(training, true)
    monkeypatch.setattr(rl, "draw_answers", None)
    assert rl.own_pairs(training, true) == pairs == [(opening, [answer, "né"]) for opening, [answer] in rl.OWN_ANSWERS * true]


@parametrize("options, words", rows("""
    --data pairs.jsonl --reward echo         | --reward is not for --method dpo.
    --beta 0.3                               | --beta is not for --method reinforce.
    --data pairs.jsonl --method reinforce    | 0 of 30 records can be used
    --momentum 0.9                           | --momentum is Muon's
    --show 0                                 | --show: must be a whole number of at least 1
    --out out/play                           | out/play is the base"""))
def test_what_cannot_be_leaves_an_older_run_where_it_is(folder, options, words):
    base = "out/play" if "play" in options else "out/play-sft"
    assert_refused(run(folder, "--base", base, "--out out/play-sft", *FEW, options), words)
    assert not (folder / "out/play-sft.1").exists()


def test_the_prompt_of_a_pair_is_cut_once_for_the_longer_answer():
    pair = rl.make_pair({"prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x" * 200}],
                         "chosen": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}], "rejected": "n" * 90})
    chosen, rejected = rl.pair_rows(BYTES, pair, 64)
    length = int((~chosen[1]).sum())
    assert length == 48 and np.array_equal(chosen[0][:length], rejected[0][:length]) and len(rejected[0]) == 65
    read = [rl.reward_of(lambda *said: said, BYTES, ("a", "b"), row) for row in (chosen, rejected)]
    assert read == [("a\n\nb", [*"yes"], True), ("a\n\nb", [*"n" * 17], False)]
    for wrong, words in ((5, "no named fields"), ({"prompt": "a", "chosen": "b"}, "a field that is no text"),
                         *[({"prompt": [*[{"role": r, "content": "x"} for r in ("user", "assistant")], {"role": "user", "content": y}],
                             "chosen": "a", "rejected": "b"}, "more than one question") for y in "xy"]):
        with pytest.raises(ValueError, match=words):
            rl.make_pair(wrong)


@parametrize("arguments, keys, start", [
    ([], "reward greedy kl length alike forgotten", {"kl": 0}),
    (["--data pairs.jsonl"], "dpo accuracy margin chosen rejected", {"dpo": math.log(2), "accuracy": 0.5, "margin": 0}),
    (["--method dpo"], "dpo accuracy margin chosen rejected", {"accuracy": 0.5})])
def test_a_run_killed_at_random_moments_has_the_bits_of_one_never_touched(folder, arguments, keys, start):
    words = [*["--base", "out/play-sft"], *" ".join(arguments).split(), *FEW]
    for out in "out/whole", "out/killed":
        shutil.rmtree(folder / out, ignore_errors=True)
    done = succeeded(run(folder, *words, "--out out/whole"))
    assert done.stdout.count("\n--- ") == 2 * len(read_log(folder, "out/whole")[0]["samples"])     # at first and at last
    log = read_log(folder, "out/whole")
    told = {record["step"]: record for record in log if "loss" not in record}
    assert set(told) == {0, 3} and all(set(record) == {"step", "samples", *keys.split()} for record in told.values())
    assert all(told[0][name] == value for name, value in start.items())
    assert checkpoint.read_tokenizer(f"{folder}/out/whole").template         # chat.py talks to it
    attack.kill_again_and_again(folder, "rl.py", words, "out/killed", 2, seed=3)
    succeeded(run(folder, "--resume --out out/killed"))
    assert read_log(folder, "out/killed") == log
    assert (folder / "out/killed/model.safetensors").read_bytes() == (folder / "out/whole/model.safetensors").read_bytes()


def test_of_a_conversation_the_first_answer_counts(tmp_path):
    said = [{"role": role, "content": text} for role, text in zip(["system", *2 * ["user", "assistant"]], "sabcd")]
    write(tmp_path / "talks.jsonl", "".join(json.dumps({"messages": messages}) + "\n" for messages in (said, said[1:])))
    assert rl.read_pairs([str(tmp_path / "talks.jsonl")]) == [(("s", "a"), ["b"]), ((None, "a"), ["b"])]


def test_what_a_resumed_run_does_not_find_again(folder):
    """Another base, other pairs, another reward."""
    shutil.rmtree(folder / "out/half", ignore_errors=True)
    write(folder / "mine.py", "def even(prompt, answer, ended):\n    return len(answer) % 2\n")
    assert run(folder, "--base out/play-sft --reward mine.py:even --out out/half", *FEW).returncode == 0
    for words in "--reward short", "--beta 0.2", "--method dpo":
        assert_refused(run(folder, "--resume --steps 4 --out out/half", words), "a resumed run keeps its settings")
    write(folder / "mine.py", "def even(prompt, answer, ended):\n    return float('nan')\n")
    assert_refused(run(folder, "--resume --steps 4 --out out/half"), "not what out/half began with")
    shutil.rmtree(folder / "out/half")
    assert_refused(run(folder, "--base out/play-sft --reward mine.py:even --out out/half", *FEW), "gave a number that is not finite")
    for name, words in ("mine.py:odd", "the reward mine.py:odd: KeyError: 'odd'"), ("long", "the reward must be sentence, echo, short or FILE.py:NAME"):
        assert_refused(run(folder, "--base out/play-sft --reward", name), words)


def test_altered_pairs_get_one_sentence_or_are_left_out(folder):
    raw = (folder / "pairs.jsonl").read_bytes()
    rng = random.Random(4)
    for _ in range(50):
        data = bytearray(raw)
        for _ in range(rng.choice([1, 400])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (folder / "altered.jsonl").write_bytes(data[:rng.choice([len(data), rng.randrange(len(data))])])
        done = run(folder, "--base out/play-sft --data altered.jsonl --method dpo --show 1")
        assert "Traceback" not in done.stderr and done.returncode in (0, 2), done.stderr
        assert done.stderr.count("\n") == (done.returncode == 2)


def test_held_out_prompts_are_not_learned_and_equal_answers_not_at_all(folder, capsys):
    training = SimpleNamespace(settings=SimpleNamespace(batch_tokens=512, seed=0), tokenizer=BYTES,
                               model=SimpleNamespace(config=SimpleNamespace(context=64)))
    pairs = [rl.make_pair(pair) for pair in PAIRS]
    same = ((None, "a"), ["b", "b"])
    batches = rl.pair_batches(training, [*pairs, same])
    assert "30 pairs; 1 more with equal answers" in capsys.readouterr().out
    assert sum(map(len, batches)) == 60 and all(len(rows) % 2 == 0 for rows in batches)
    unseen = sft.hold_out([opening for opening, _ in pairs], 0)
    assert len(unseen) == 3 and set(unseen) < {pair["prompt"] for pair in PAIRS}


def begun(folder, monkeypatch, **given):
    """-> the Training of a new run in this process."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(checkpoint, "lock_folder", lambda out: None)        # which this process would keep
    shutil.rmtree("out/here", ignore_errors=True)
    return rl.begin_run({"base": "out/play-sft", "device": "cpu", "batch_tokens": 6144, **given}, "out/here", train.Ranks())


def test_what_reinforce_draws(folder, monkeypatch, out_text):
    """A step: groups for as many answers as its tokens hold, at temperature 1, of prompts that no evaluation asks."""
    training, drawn = begun(folder, monkeypatch), []
    monkeypatch.setattr(rl, "HELD_OUT", 2)
    monkeypatch.setattr(rl, "generate_batch", lambda model, prompts, sampling, stop, most: drawn.append((prompts, sampling, most)) or [[97] for _ in prompts])
    job = rl.reinforcing(training)
    T = training.model.config.context
    inputs, _, counted, weights, _ = job.batch(0)
    prompts, sampling, most = drawn.pop()
    assert most == min(40, T // 4) and len(prompts) == len(inputs) == len(weights) == 6144 // T // rl.GROUP * rl.GROUP > 2 * rl.GROUP and sampling.temperature == 1
    assert not weights.any() and counted.tolist() == [len(prompts)] * len(counted) and len({*sampling.seed.tolist()}) == len(prompts)
    assert all(len({*map(tuple, prompts[i:i + rl.GROUP])}) == 1 for i in range(0, len(prompts), rl.GROUP))
    assert job.note(1, 0.0) == "reward 0.000"
    asked = {*map(tuple, prompts)}
    openings = {*map(sft.opening, sft.read_conversations(training.settings.data))}
    openings -= {*sft.hold_out(openings, 0).values()}
    for step in range(1, -(-len(openings) * rl.GROUP // len(prompts))):         # an epoch asks each prompt
        job.batch(step)
        asked |= {*map(tuple, drawn.pop()[0])}
    assert len(asked) == len(openings)
    # rewards that differ between groups and not within one
    monkeypatch.setitem(rl.REWARDS, "sentence", lambda prompt, answer, ended: len(prompt))
    monkeypatch.setattr(sft, "evaluate", lambda training, examples: (5.0, 1.5))
    record = rl.reinforcing(training).evaluate(1)
    (sampled, hot, _), (greedy, cold, _) = drawn
    assert len(greedy) == 2 and record["reward"] % 1
    assert (hot.temperature, cold.temperature) == (1, 0) and len(sampled) == rl.GROUP * len(greedy) and 1 <= len(greedy) <= 2
    assert asked.isdisjoint(map(tuple, sampled)) and record["length"] == 1 and record["alike"] == 1 and record["forgotten"] == 5 and abs(record["kl"]) < 1e-6
    assert "from the base: look" not in out_text()
    monkeypatch.setattr(rl, "FAR", -1.0)            # a model farther from its base than that is told so
    rl.reinforcing(training).evaluate(1)
    assert "\nnote: 0.00 nats a token from the base: look whether the text is still good.\n" in out_text().replace("-0.00", "0.00")


@parametrize("method", rl.DEFAULTS)
def test_larger_models_learn_at_smaller_rates(method):
    steps, tokens, rates, every = zip(*rl.DEFAULTS[method].values())
    assert 1e-3 > rates[0] > rates[1] > rates[2] > 1e-6 and rl.BY_DATA < 1         # no number of steps that somebody asks for
    assert max(every) <= 100 and not any([*np.remainder(steps, every), *np.remainder(tokens, 512)])


def test_the_pairs_of_a_run(folder, monkeypatch):
    """Those of a tenth of the prompts are held out, all others are learned, each once."""
    seen, pair_batches = [], rl.pair_batches
    monkeypatch.setattr(rl, "pair_batches", lambda training, pairs: seen.append(pairs) or pair_batches(training, pairs))
    training = begun(folder, monkeypatch, data=["pairs.jsonl"])
    assert (training.settings.optimizer, training.settings.decay) == ("adamw", 0)
    job = rl.preferring(training)
    _, _, counted, reference, _ = job.batch(0)
    assert counted[0] == len(reference)             # pairs
    record, scores = job.evaluate(1), rl.log_probs_of(training, *rl.pair_batches(training, seen[0]))
    assert np.allclose([record["chosen"], record["rejected"]], scores.reshape(-1, 2).mean(axis=0))
    held_out, learned = [{opening for opening, _ in pairs} for pairs in seen[:2]]
    assert len(held_out) == 3 and len(learned) == 27 and held_out.isdisjoint(learned)
    assert training.settings.steps == len(pair_batches(training, seen[1])) > 1
    write(folder / "own.py", "def prompt_is(prompt, answer, ended):\n    print('It is asked:', prompt)\n    return 0.0\n")
    done = run(folder, "--base out/play-sft --data pairs.jsonl --show 2 --reward own.py:prompt_is")
    assert done.returncode == 0 and done.stdout.count("--- reward ") == 4 and "It is 1." in done.stdout
    assert done.stdout.count(f"It is asked: {PAIRS[0]['prompt']}\n") == 2
    done = run(folder, "--base out/play-sft --show 1")                     # of what the base was fine-tuned on
    assert done.returncode == 0 and done.stdout.count("--- reward ") == 1


def test_without_steps_dpo_reads_all_pairs_once(folder):
    options = "--base out/play-sft --data pairs.jsonl --out out/whole --batch-tokens 256 --threads 2 --lr 0.001".split()
    succeeded(run(folder, *options))
    steps = [record for record in read_log(folder / "out/whole") if "loss" in record]
    assert len(steps) == checkpoint.load_state(folder / "out/whole")["settings"]["steps"] > 3
    done = run(folder, "--resume --out out/whole")
    assert done.returncode == 0 and f"is finished: {len(steps)} steps" in done.stdout
    done = run(folder, "--base out/whole --out out/again --lr 1e30", *options[6:-2])         # pairs are what this base learned from
    assert done.returncode == 1 and "dpo 0.693, accuracy 0.500" in done.stdout and "is not finite (loss nan" in done.stderr


def test_a_pair_that_fits_to_the_token_is_not_cut():
    for size, prompt in (11, 53), (12, 48):
        chosen, _ = rl.pair_rows(BYTES, ((None, "q" * 50), ["x" * size, "y"]), 64)
        assert int((~chosen[1]).sum()) == prompt
