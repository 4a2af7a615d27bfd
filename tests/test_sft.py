"""sft.py: what is learned and what is not, batches, held-out prompts, exact resume, bad input."""
import functools
import json
import lzma
import os
import random
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

import attack
import model_cpu
import sft
import train
from tokenizer import Tokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DATA = os.path.join(os.path.dirname(ROOT), "shared", "data")
QUICK = ["--batch-tokens", "512", "--epochs", "2", "--eval-every", "10", "--save-every", "1", "--threads", "2"]
GREEN = re.compile(r"\x1b\[32m(.*?)\x1b\[0m", re.DOTALL)


def run(folder, *arguments, script="sft.py", **options):
    return subprocess.run([sys.executable, os.path.join(ROOT, script), *arguments], cwd=folder, text=True,
                          capture_output=True, timeout=120, **options)


def read_log(folder, out):
    """The log without the seconds, which no run repeats."""
    with open(os.path.join(folder, out, "log.jsonl"), encoding="utf-8") as file:
        return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in file]


def invented_words(rng, count):
    return ["".join(rng.choices("abcdefghijklmnoprstuvw", k=rng.randint(1, 7))) for _ in range(count)]


@pytest.fixture(scope="module")
def records():
    """All records of shared/data, or as many invented ones as make a test."""
    found = []
    for name in ("alpaca_data.json.xz", "instructions_extra.json.xz"):
        if os.path.exists(os.path.join(DATA, name)):
            with lzma.open(os.path.join(DATA, name), "rt", encoding="utf-8") as file:
                found += json.load(file)
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
    assert cuts > 50


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
    assert 1 - used / tokens < 0.05


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
    assert sft.make_turns({"messages": CHAT}) == [("Be brief.\n\n Hi\n", "Yo "), ("Why?", "<|end|>")]
    assert sft.make_turns({"messages": CHAT[1:3]}) == [(" Hi\n", "Yo ")]
    assert sft.make_turns({"messages": [{"role": "system", "content": ""}, *CHAT[1:3]]}) == [(" Hi\n", "Yo ")]
    user, assistant = CHAT[1:3]
    for record, words in [("text", "named fields"), ({}, "no text"), ({"instruction": "a", "output": 3}, "no text"),
                          ({"instruction": "a", "output": " \n"}, "an empty"), ({"messages": "Hi"}, "no list"),
                          ({"messages": []}, "roles"), ({"messages": [user]}, "roles"),
                          ({"messages": [assistant, user]}, "roles"),
                          ({"messages": [user, CHAT[0], assistant]}, "roles"), ({"messages": [CHAT[0]]}, "roles"),
                          ({"messages": [user, {"role": "tool", "content": "x"}]}, "roles"),
                          ({"messages": [user, {"role": "assistant"}]}, "no text"), ({"messages": [user, 3]}, "no list"),
                          ({"messages": [user, {"role": "assistant", "content": ""}]}, "an empty response"),
                          ({"messages": CHAT[1:4] + [{"role": "assistant", "content": " "}]}, "an empty response"),
                          ({"messages": [{"role": "user", "content": [{"text": "x"}]}, assistant]}, "no text"),
                          ({"conversations": [{"from": "human", "value": "x"}]}, "no text")]:
        with pytest.raises(ValueError, match=words):
            sft.make_turns(record)


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
    assert {f"<|user|>{question}" for question in talks.questions} == firsts[1]
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")            # of a module, for being looked at
def test_pairs_of_python_are_held_out(tmp_path, monkeypatch):
    docstrings, path = list(train.python_docstrings()), str(tmp_path / "python-3.12.txt")
    monkeypatch.setattr(train, "python_docstrings", lambda: docstrings)         # the walk takes seconds
    train.write_python_corpus(path)
    pairs, learned = [turns[0] for turns in sft.read_conversations([path])], learned_part(path)
    assert len(pairs) > 1500 and len(pairs) == len({name for name, _ in pairs})
    assert not [response for _, response in pairs if response in learned]
    assert all(response == " ".join(response.split()) for _, response in pairs)
    modules = [(response, sys.modules[name].__doc__) for name, response in pairs if name in sys.modules]
    true = [" ".join((docstring or "").split()).startswith(response) for response, docstring in modules]
    assert len(true) > 5 and sum(true) > 0.8 * len(true)            # a module in C may have taken the place of the file read


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


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a play, a base that was trained on it, and a fine-tuned model: (folder, log, what was printed)."""
    folder = tmp_path_factory.mktemp("sft")
    write_play(folder / "play.txt")
    done = run(folder, "--data", "play.txt", "--out", "out/play", "--steps", "30", "--batch-tokens", "512",
               script="train.py")
    assert done.returncode == 0, done.stderr
    done = run(folder, "--base", "out/play", *QUICK)
    assert done.returncode == 0, done.stderr
    return folder, read_log(folder, "out/play-sft"), done.stdout


def test_a_job_takes_the_batch_of_its_step(base, monkeypatch):
    """Epoch by epoch, each in an order of its own."""
    folder, _, _ = base
    model, tokenizer = model_cpu.load(str(folder / "out/play"), model_cpu)
    settings = train.Settings(**model_cpu.load_state(folder / "out/play-sft")["settings"])
    examples = sft.make_examples(tokenizer, [[(f"say {i}", "x" * (i % 50 + 1))] for i in range(300)], 128, 0)
    monkeypatch.setattr(train, "token_bytes", lambda tokenizer: np.arange(tokenizer.vocab_size) % 7)
    job = sft.fine_tuning(model, tokenizer, examples, settings, {})
    lengths = sft.padded_lengths(examples.train, 128)
    plans = [sft.plan_epoch(lengths, settings.batch_tokens, settings.seed, epoch) for epoch in range(3)]
    for step, rows in enumerate([rows for plan in plans for rows in plan]):
        expected = sft.make_batch([examples.train[i] for i in rows], 128, 4, tokenizer.special["<|endoftext|>"])
        assert all(np.array_equal(a, b) for a, b in zip(job.batch(step), expected))
    learned = np.concatenate([ids[mask] for ids, mask in examples.train])
    assert job.bytes_per_token == np.mean(learned % 7) and job.chat_template == sft.CHAT_TEMPLATE


def test_the_held_out_loss_falls(base):
    folder, log, printed = base
    held_out = [record["val_loss"] for record in log if "val_loss" in record]
    assert log[0]["step"] == 0 and held_out[-1] < held_out[0] - 0.3
    assert f"Held-out loss {held_out[0]:.4f} before, {held_out[-1]:.4f} after." in printed
    losses = [record["loss"] for record in log if "loss" in record]
    assert len(losses) % 2 == 0 and np.mean(losses[-5:]) < np.mean(losses[:5])
    settings = json.loads((folder / "out/play-sft/tokenizer_config.json").read_text())
    assert settings["chat_template"] == sft.CHAT_TEMPLATE and settings["eos_token"] == "<|end|>"
    done = run(folder, "--prompt", "so", "--max-tokens", "30", script="chat.py")    # the newest model is the fine-tuned
    assert done.returncode == 0 and done.stdout.strip() and not done.stdout.startswith("so")


def test_killed_and_resumed_is_exact(base):
    folder, whole, _ = base
    attack.kill_again_and_again(folder, "sft.py", ["--base", "out/play", *QUICK], "out/killed", 3, seed=1)
    done = run(folder, "--resume", "--out", "out/killed")
    assert done.returncode == 0, done.stderr
    assert read_log(folder, "out/killed") == whole


def test_ctrl_c_saves_and_resumes(base):
    folder, whole, _ = base
    arguments = ["--base", "out/play", "--out", "out/asked", *QUICK, "--save-every", "1000"]
    code, said = attack.interrupt(folder, attack.command("sft.py", *arguments), "out/asked", 3,
                                  lambda process: process.send_signal(signal.SIGINT))
    assert code == 130 and "python sft.py small --resume --out out/asked" in said, said
    done = run(folder, "small", "--resume", "--out", "out/asked")
    assert done.returncode == 0, done.stderr
    assert read_log(folder, "out/asked") == whole
    first, last = (next(record["val_loss"] for record in order if "val_loss" in record) for order in (whole, whole[::-1]))
    assert f"Held-out loss {first:.4f} before, {last:.4f} after." in done.stdout
    assert "finished" in run(folder, "--resume", "--out", "out/asked").stdout


def test_resume_refuses(base):
    folder, _, _ = base
    data = folder / "some.jsonl"
    data.write_text("".join(json.dumps({"instruction": str(i), "output": f"It is {i}."}) + "\n" for i in range(40)))
    arguments = ["--data", "some.jsonl", "--base", "out/play", "--out", "out/some", "--batch-tokens", "512", "--epochs", "1"]
    assert run(folder, *arguments).returncode == 0
    # what is fine-tuned can be fine-tuned again, without --data on the same
    assert run(folder, "--base", "out/some", "--out", "out/again", "--batch-tokens", "512", "--epochs", "1").returncode == 0
    for script, arguments, words in [("sft.py", ["--epochs", "2"], "--epochs 1, not 2"), ("sft.py", ["--lr", "1"], "--lr"),
                                     ("sft.py", ["--base", "out/again"], "out/play, not with out/again"),
                                     ("sft.py", ["--data", "play.txt"], "--data"), ("train.py", [], "sft.py")]:
        done = run(folder, "--resume", "--out", "out/some", *arguments, script=script)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    data.write_text(data.read_text().replace("It is 7.", "It is seven."))
    done = run(folder, "--resume", "--out", "out/some")
    assert done.returncode == 2 and "is not what the run in out/some began with" in done.stderr
    done = run(folder, "--resume", "--out", "out/play")
    assert done.returncode == 2 and "train.py" in done.stderr


def test_show_colours_what_is_learned(base):
    folder, _, _ = base
    records = [{"instruction": "Say\x1b[32m hi", "output": "<|end|> \x07hé"}, {"messages": CHAT},
               {"instruction": "long " * 200, "output": "longer " * 200}, {"instruction": "not shown", "output": "x"}]
    (folder / "show.json").write_text(json.dumps(records))
    tokenizer = Tokenizer.load(folder / "out/play/tokenizer.json")
    arguments = ["--base", "out/play", "--data", "show.json", "--show", "3"]
    clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    shown = run(folder, *arguments, env=clean).stdout
    in_brackets = run(folder, *arguments, env={**clean, "NO_COLOR": "1"}).stdout
    pieces = re.split(r"--- example (\d+): (\d+) of (\d+) tokens are learned(, the rest did not fit)?\n", shown)[1:]
    assert len(pieces) == 15
    for record, number, learned, count, cut, text in zip(records, *(pieces[i::5] for i in range(5))):
        ids, mask, was_cut = sft.make_example(tokenizer, sft.make_turns(record), 128)
        assert (int(learned), int(count), bool(cut)) == (mask.sum(), len(ids), was_cut)
        safe = str.maketrans("\x1b\x07", "\ufffd\ufffd")
        assert "".join(GREEN.findall(text)) == tokenizer.decode(ids[mask]).translate(safe)
        assert GREEN.sub("", text)[:-1] == tokenizer.decode(ids[~mask]).translate(safe)
        assert GREEN.sub(r"[\1]", text) in in_brackets
    assert "not shown" not in shown and "\x1b" not in in_brackets
    assert sft.printable("\u3000\xa0\u200d\tcafé\n") == "\u3000\xa0\u200d\tcafé\n"      # harmless, and so shown


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
    state = model_cpu.load_state(folder / "out/play")
    config = model_cpu.Config(dim=32, heads=2, kv_heads=1, layers=1, context=32, vocab=520, predict=2, mtp_weight=0.7)
    tokenizer = Tokenizer.load(folder / "out/play/tokenizer.json")
    model_cpu.save(str(folder / "out/other"), model_cpu.Model(config, 0, np.float32), tokenizer, state)
    done = run(folder, "--base", "out/other", "--batch-tokens", "512", "--epochs", "1", "--threads", "1")
    assert done.returncode == 0 and "longer than the context of 32 and are cut" in done.stdout, done.stderr
    assert model_cpu.read_config(str(folder / "out/other-sft"))[0] == config
    shown = run(folder, "--base", "out/other", "--show", "30", env={**os.environ, "NO_COLOR": "1"}).stdout
    assert all(int(count) <= 33 for count in re.findall(r"of (\d+) tokens are learned", shown)) and "did not fit" in shown
    state["settings"]["preset"] = "huge"
    model_cpu.save(str(folder / "out/huge"), model_cpu.Model(config, 0, np.float32), tokenizer, state)
    done = run(folder, "--base", "out/huge")
    assert done.returncode == 2 and "holds a model of the size huge, which is none of small, medium, big" in done.stderr


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
    cases = [([], "there is no trained model in out/small: train it with `python train.py small`"),
             (["medium"], "python train.py medium"), (["medium", *here], "of the size small, not medium"),
             ([*here, "--data", "missing.json"], "missing.json is not a file"), ([*here, "--data", "empty.json"], "of 0"),
             ([*here, "--data", "no.json"], "of 0"), ([*here, "--data", "broken.jsonl"], "broken.jsonl, line 3, is not JSON"),
             ([*here, "--data", "broken.json"], "broken.json, line 3, is not JSON"),
             ([*here, "--data", "deep.json"], "deep.json, line 1, is not JSON"),
             ([*here, "--data", "number.json"], "record 1 has no named fields"),
             ([*here, "--data", "wrong.json"], "record 1 has no text as instruction and output"),
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
        "of 5 records 4 are left out: 1 with an empty response (record 2); 2 with no named fields (record 3 is the first); "
        "1 with roles that are not user and assistant in turn (record 5).\n")
