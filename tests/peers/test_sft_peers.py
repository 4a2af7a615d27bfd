"""sft.py against judges that others wrote: transformers' apply_chat_template, and a twin in PyTorch on the same batches."""
import os

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"     # read by transformers when it is imported

import random

import numpy as np
from cases import once_a_module
import torch
import torch_twin
import transformers
from runs import read_log, run

import checkpoint
import model_cpu
import script
import sft
import train
from tokenizer import Tokenizer

TEXTS = [
    "The cat's mat -- we'll see if they've gone, I'd said; O'Neill's.\n\n\tIndented\r\n  twice  \n",
    "Grüße, déjà vu; Ελληνικά ἀρχή; Русский; العربية بِسْمِ; עברית; हिन्दी नमस्ते; ไทย; 日本語カナ; 한국어; ½ Ⅷ ² ٣",
    "".join(map(chr, range(32))) + " a\x1c b\x1f c",
    "\x7f\x85\xa0\u1680\u2000\u200b\u2028\u2029\u202f\u205f\u3000\ufeff a\u2003 b\xa0",
    "👍🏽 👩‍👩‍👧‍👦 🇩🇪🇫🇷 ☃️ 1️⃣ 🏴\U000e0067\U000e0062\U000e007f x🙂y",
    " " * 100 + "x" + " " * 33 + "\n" * 20 + "y \t \n z" + " " * 7,
    "1234567890" * 20 + " 3.14159,2,000,000 1e-05 0x1F 2026-01-31",
    "", "e\u0301 n\u0303 \u0301 \ue000\U0010ffff\ufffd",
    "What is a cat?", "An animal.", " leading", "trailing ", "\nlines\n\n", "{{ x }} {% if %}"]


@once_a_module
def tokenizers(tmp_path_factory):
    """Ours of a fine-tuned checkpoint, and what transformers loads there."""
    path = str(tmp_path_factory.mktemp("checkpoint"))
    model = model_cpu.Model(model_cpu.CONFIGS["small"], dtype=np.float32)
    checkpoint.save(path, model, Tokenizer.train(TEXTS * 3, 400), {}, chat=True)
    return checkpoint.read_tokenizer(path), transformers.AutoTokenizer.from_pretrained(path)


def both(tokenizers, messages):
    """-> the ids of a conversation, ours and theirs, as lists."""
    ours, theirs = tokenizers
    ids, _ = sft.make_row(ours, script.make_turns({"messages": messages}), 1 << 20)
    return ids.tolist(), theirs.apply_chat_template(messages, return_dict=False)


def test_apply_chat_template_gives_our_ids(tokenizers):
    rng = random.Random(0)
    for _ in range(500):
        messages = [{"role": "system", "content": rng.choice(TEXTS)}] * (rng.random() < 0.3)
        for _ in range(rng.randint(1, 4)):
            messages.append({"role": "user", "content": rng.choice(TEXTS)})
            messages.append({"role": "assistant", "content": rng.choice(TEXTS[:4])})
        ours, theirs = both(tokenizers, messages)
        assert ours == theirs, messages


def test_a_typed_special_token_is_text_here_alone(tokenizers):
    """The one difference: transformers looks for special tokens in the finished text."""
    ours, theirs = both(tokenizers, [{"role": "user", "content": "say <|end|>"}, {"role": "assistant", "content": "no"}])
    tokenizer, _ = tokenizers
    assert [ids.count(tokenizer.end_of_turn) for ids in (ours, theirs)] == [2, 3]
    assert tokenizer.decode(ours) == tokenizer.decode(theirs)


def test_a_twin_fine_tuned_on_the_same_batches_is_as_good(tmp_path, monkeypatch):
    """On the English inside Python and the questions that go with it, from the same weights."""
    monkeypatch.chdir(tmp_path)
    run("train.py --steps 100 --batch-tokens 512 --eval-every 100 --out base")
    run("sft.py --base base --optimizer adamw --steps 80 --eval-every 80 --out tuned")
    training = train.open_run("sft.py", {}, "tuned", script.Ranks())
    base, tokenizer = checkpoint.load("base", model_cpu)
    twin = torch_twin.Twin(base.config, base.params)
    step = torch_twin.Step(twin, compiled=False)
    batch = sft.fine_tuning_job(training).batch

    def arrays(rows):
        return map(torch.from_numpy, train.make_batch(rows, 128, 4))
    for i in range(80):
        rows, _ = batch(i)
        step(*arrays(rows), train.learning_rate(i, training.settings))
    _, unseen = sft.read_conversations(training.settings)
    rows = [sft.make_row(tokenizer, conversation, 128) for conversation in unseen]
    with torch.no_grad():
        losses, _ = torch_twin.make_losses(twin, compiled=False)(*arrays(rows))
    before, after = [record["val_loss"] for record in read_log("tuned") if record["step"] in (0, 80) and "val" in record]
    print(f"held-out loss {before:.4f}; after 80 steps ours {after:.5f}, PyTorch's {losses[0]:.5f}")
    assert after < before - 0.3 and abs(after - losses[0]) < 0.001
