"""sft.py and train.py against judges that others wrote: a twin in PyTorch on the same batches, and transformers' apply_chat_template."""
import os

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"     # read by transformers when it is imported

import random

import numpy as np
from cases import once_a_module
import test_model_peers as peers
import torch
import torch_twin
import transformers

import checkpoint
import model_cpu
import script
import sft
import train
from tokenizer import Tokenizer

STEPS, T = 300, 128
TEXTS = [*peers.TEXTS.values(), "What is a cat?", "An animal.", " leading", "trailing ", "\nlines\n\n", "{{ x }} {% if %}"]


# ---------------------------------------------------------------------------------------------------------------------
# The chat template
# ---------------------------------------------------------------------------------------------------------------------
@once_a_module
def folder(tmp_path_factory):
    """A fine-tuned checkpoint, as far as its files go."""
    path = str(tmp_path_factory.mktemp("checkpoint"))
    model = model_cpu.Model(model_cpu.CONFIGS["small"], dtype=np.float32)
    checkpoint.save(path, model, Tokenizer.train(TEXTS * 3, 400), {}, chat=True)
    return path


def test_apply_chat_template_gives_our_ids(folder):
    ours, theirs = Tokenizer.load(f"{folder}/tokenizer.json"), transformers.AutoTokenizer.from_pretrained(folder)
    rng, several = random.Random(0), 0
    for _ in range(500):
        messages = [{"role": "system", "content": rng.choice(TEXTS)}] * (rng.random() < 0.3)
        for _ in range(rng.randint(1, 4)):
            question, said = rng.choice(TEXTS), rng.choice(TEXTS[:4])
            messages = [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": said}]
        turns = sft.make_turns({"messages": messages})
        ids, _, cut = sft.make_example(ours, turns, 1 << 20)
        assert theirs.apply_chat_template(messages, return_dict=False) == ids.tolist() and not cut, messages
        several += len(turns) > 2
    assert several > 100


def test_a_typed_special_token_is_text_here_alone(folder):
    """The one difference, which sft.py tells of: transformers looks for special tokens in the finished text."""
    ours, theirs = Tokenizer.load(f"{folder}/tokenizer.json"), transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "say <|end|>"}, {"role": "assistant", "content": "no"}]
    ids, _, _ = sft.make_example(ours, sft.make_turns({"messages": messages}), 1 << 20)
    told = theirs.apply_chat_template(messages, return_dict=False)
    assert [list(some).count(ours.special["<|end|>"]) for some in (ids, told)] == [2, 3]
    assert ours.decode(ids) == ours.decode(told)


# ---------------------------------------------------------------------------------------------------------------------
# A twin in PyTorch, trained on the same batches from the same weights
# ---------------------------------------------------------------------------------------------------------------------
def settings(lr):
    return train.Settings("small", STEPS, 512, lr, warmup=50, mtp_weight=0.3, eval_every=1, save_every=1, precision="fp32",
                          optimizer="adamw", micro_batch=8, threads=2)


def train_both(model, s, batch):
    """Train `model` and its twin, which begins with the same weights -> the twin's losses(inputs, targets)."""
    twin = torch_twin.Twin(model.config, model.params)
    step, forward = torch_twin.make_step(twin, compiled=False), torch_twin.make_losses(twin, compiled=False)
    for i in range(s.steps):
        inputs, targets, *_ = batch(i)
        lr = train.learning_rate(i, s)
        model.forward(inputs, targets)
        model.backward()
        model.update(lr, decay=s.decay, clip=s.clip)
        step(torch.from_numpy(inputs), torch.from_numpy(targets), lr)

    def losses(inputs, targets):
        with torch.no_grad():
            return forward(torch.from_numpy(inputs), torch.from_numpy(targets))[0]
    return losses


def mean_loss(losses, batches):
    """Of head 0, over all counted targets."""
    nats, counted = 0.0, 0
    for inputs, targets in batches:
        count = int((targets[:, :inputs.shape[1]] >= 0).sum())
        nats, counted = nats + float(losses(inputs, targets)[0]) * count, counted + count
    return nats / counted


@once_a_module
def trained(tmp_path_factory):
    """The small model after 300 steps of pretraining on the English inside Python, in float32, with its tokenizer and the
    file."""
    threads, here = torch.get_num_threads(), os.getcwd()
    torch.set_num_threads(2)
    os.chdir(tmp_path_factory.mktemp("trained"))
    try:
        path = os.path.abspath("python-3.0.txt")
        script.write_python_corpus(path, '<|endoftext|>')
        tokenizer, tokens, *_ = train.prepare([path], 512)
        model = model_cpu.Model(model_cpu.CONFIGS["small"], dtype=np.float32, threads=2)
        for step in range(STEPS):
            model.forward(*train.get_batch(tokens, train.window_starts(0, 8 * step, 8, len(tokens), T, 4), T, 4))
            model.backward()
            model.update(train.learning_rate(step, settings(2e-3)))
        yield model, tokenizer, path
    finally:
        os.chdir(here)
        torch.set_num_threads(threads)


def test_a_twin_fine_tuned_on_the_same_batches_is_as_good(trained):
    model, tokenizer, path = trained
    examples = sft.make_examples(tokenizer, sft.read_conversations([path]), T, seed=0)
    s, pad = settings(7e-4), tokenizer.special["<|endoftext|>"]
    training = train.Training(model, tokenizer, s, {}, "out", train.Ranks())
    job = sft.fine_tuning(training, examples)
    model.step, model.m[...], model.v[...] = 0, 0, 0                # what loading a base does
    batches = [sft.make_batch(examples.held_out[i:i + 32], T, 4, pad) for i in range(0, len(examples.held_out), 32)]
    before = mean_loss(model.forward, batches)
    twin = train_both(model, s, job.batch)
    ours, theirs = mean_loss(model.forward, batches), mean_loss(twin, batches)
    print(f"held-out loss {before:.4f}; after {STEPS} steps ours {ours:.5f}, PyTorch's {theirs:.5f}")
    assert abs(ours - sft.evaluate(training, examples.held_out)[0]) < 1e-5
    assert ours < before - 1 and abs(ours - theirs) < 0.01
