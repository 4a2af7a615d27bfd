"""sft.py: supervised fine-tuning.  A model that continues texts becomes one that answers.

    python sft.py                          out/small -> out/small-sft, on conversations of the kind of text it knows
    python sft.py big --data FILE.json     on instructions: instruction, input, output, or messages
    python sft.py --base DIR --data FILE   another model, ours or any plain Llama (--context N: of its window)
    python sft.py --show 3                 three examples, with what is learned in colour
    python sft.py --resume                 go on with an interrupted run

Read before it: train.py.  Its rows, its loop and its folder serve here unchanged.  Model, loss and optimizers stay
the same, too: Muon, whatever the base was trained with, unless --optimizer says AdamW.  What is new stands in the
order of a run:

    1. conversations   records of a file -> (system text, turns)
    2. rows            conversations -> ids, and the mask that says what is learned
    3. batches         rows of about one length together; a pure function of (seed, step)
    4. the run

The mask is the one idea of this file.  A conversation stands in a template of special tokens.  All of it is
read, but only what is underlined is learned; anything else has the target -1, which counts for nothing in the
loss:

    <|user|>What is a cat?<|end|><|assistant|>An animal.<|end|>
                                              ~~~~~~~~~~~~~~~~~

That is our template.  A base that answers already keeps its own, ours or ChatML (tokenizer.py,
Tokenizer.prompt); one that does not takes that for which it has the tokens.

So the model learns to answer and not to ask, and it learns to stop, because the end of an answer is one of
its tokens (Ouyang et al. 2022, "Training language models to follow instructions with human feedback", the
first of their steps).  The prompt still takes part: the answer attends to it, and so the gradient reaches the
prompt's positions through their keys and values.

What it does not do: no rewards or preferences (rl.py); no adapters (LoRA), all weights are trained; no packing of
several conversations into one row.
"""
from script import (Parser, find_records, make_turns, printable, read_records, refusing, require, run_script,
                    set_threads, whole_number)

import functools
import glob
import itertools
import os
import sys

if __name__ == "__main__":
    set_threads()           # before NumPy loads

import train                # first: it says what to do where NumPy is missing
import checkpoint
import numpy as np
from tokenizer import CHAT_TEMPLATE, CHATML, END_OF_TURN


# The steps are set once the batches are counted.  Chosen by short runs; docs/notes.md says what else was tried.
DEFAULTS = {
    "small": train.defaults(0, 1024, 7e-4, 20, 100),
    "medium": train.defaults(0, 8192, 5e-4, 50, 200),
    "big": train.defaults(0, 32768, 2e-4, 50, 200)}
EPOCHS = {"small": 4, "medium": 3, "big": 3}
MOST_HELD_OUT = 1000            # conversations
ANSWER_TOKENS = 150


# ------------------------------------------------------------------------------------------------------------
# 1. Conversations: (system text or None, turns); turns: a list of (user text, response)
# ------------------------------------------------------------------------------------------------------------
def find_data(preset, base):
    """The files to learn from when none are named: for small the records that go with the text that the base has
    learned, or those that it has learned itself; for the larger models what `fetch_data.sh instructions` has
    brought."""
    instructions = sorted(glob.glob("data/instructions*.json"))
    if preset != "small" and instructions:
        return instructions
    with refusing(f"{base} does not say what it has learned: name instructions with --data "
                  "(./fetch_data.sh instructions brings some)"):
        state, _ = checkpoint.read_state(base)
        learned = state["settings"]["data"]
    return [find_records(path) for path in learned]


def opening(conversation):
    """What a conversation begins with: (system text or None, first user text)."""
    system, turns = conversation
    return system, turns[0][0]


def hold_out(items, openings, seed):
    """-> (the items to learn, those held out).  Held out are those of a tenth of the different openings, which are
    drawn at random; each item has one."""
    different = list(dict.fromkeys(openings))
    require(len(different) > 1, "the data has one prompt only; it needs two, to learn one and hold one out.")
    number = max(1, min(MOST_HELD_OUT, len(different) // 10))
    order = np.random.default_rng(seed).permutation(len(different))
    unseen = {different[i] for i in order[:number]}
    parts = []
    for is_held_out in (False, True):
        parts.append([item for item, opening in zip(items, openings) if (opening in unseen) == is_held_out])
    return parts


# ------------------------------------------------------------------------------------------------------------
# 2. Rows
# ------------------------------------------------------------------------------------------------------------
def cut_prompt(tokenizer, beginning, T):
    """The ids of an opening, up to where the answer begins; at most three quarters of the window T.  If they are too
    long, the user's text loses its beginning."""
    system, text = beginning
    return tokenizer.prompt(text, T - T // 4, system)


def make_row(tokenizer, conversation, T):
    """A conversation -> (ids (n,), mask (n,)), n <= T + 1: T inputs and the target of the last one.  What is longer is
    cut; at most three quarters of the window are the first prompt's.

    mask: True at what is learned, the responses with their end tokens."""
    system, turns = conversation
    ids = []
    mask = []
    for text, response in turns:
        prompt = tokenizer.prompt(text, T - T // 4, system, first=not ids)
        answer = [*tokenizer.encode(response), tokenizer.end_of_turn]
        ids += prompt + answer
        mask += [False] * len(prompt) + [True] * len(answer)
    return np.array(ids[:T + 1]), np.array(mask[:T + 1])


# ------------------------------------------------------------------------------------------------------------
# 3. Batches: a pure function of (seed, step)
# ------------------------------------------------------------------------------------------------------------
def padded_lengths(rows, T):
    """(n,) train.padded_length of each row."""
    return np.array([train.padded_length(row, T) for row in rows])


def plan_epoch(lengths, batch_tokens, seed, epoch):
    """-> list of arrays of indices into `lengths`, each index once: the batches of an epoch, of at most
    batch_tokens inputs each (or one row).

    Rows of one batch are about as long, since sorted by length, so little is padding.  Chance decides which
    rows of one length meet, and the order of the batches.  The sizes of the batches depend on the lengths
    alone, so every epoch has as many, and the batch of a step follows from its number."""
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    batches = []
    while len(order):
        rows = max(1, batch_tokens // lengths[order[0]])                # the longest row comes first
        batches.append(order[:rows])
        order = order[rows:]
    return [batches[i] for i in rng.permutation(len(batches))]


# ------------------------------------------------------------------------------------------------------------
# 4. The run
# ------------------------------------------------------------------------------------------------------------
def read_conversations(settings):
    """-> (the conversations to learn, those held out) of a run's files."""
    conversations = read_records(settings.data, make_turns)
    return hold_out(conversations, list(map(opening, conversations)), settings.seed)


def fine_tuning(training):
    """-> the Job of a run on the records of its settings."""
    settings = training.settings
    T, _ = training.sizes
    to_learn, unseen = read_conversations(settings)
    rows = [make_row(training.tokenizer, conversation, T) for conversation in to_learn]
    held_out = [make_row(training.tokenizer, conversation, T) for conversation in unseen]
    lengths = padded_lengths(rows, T)
    prompts = {text: cut_prompt(training.tokenizer, (system, text), T) for system, text in map(opening, unseen[:3])}

    @functools.lru_cache(maxsize=2)                 # each step of an epoch asks for it
    def plan(epoch):
        return plan_epoch(lengths, settings.batch_tokens, settings.seed, epoch)

    batches = len(plan(0))                          # of an epoch
    print(f"{training.out}: {len(rows):,} conversations, {len(held_out):,} more held out; {batches} steps an epoch.")

    def batch(step):
        return [rows[i] for i in plan(step // batches)[step % batches]], None

    def evaluate(step):
        result = train.measure(training, {"responses": held_out})
        return {**result, "samples": train.draw_samples(training, prompts, ANSWER_TOKENS)}

    return train.Job(batch, evaluate, lambda step: "")


def base_of(options, kind=""):
    """The folder of the base; kind: how its name ends where none is given."""
    return options.get("base", f"out/{options.get('preset', 'small')}{kind}")


def read_base(options):
    """-> (folder, preset, Config, Tokenizer) of the base, and the files to learn from."""
    folder = base_of(options)
    preset = checkpoint.preset_of(folder)
    tokenizer = checkpoint.read_tokenizer(folder)
    if not tokenizer.template:                      # it takes that for which it has the tokens
        tokenizer.template = CHAT_TEMPLATE if END_OF_TURN in tokenizer.special else CHATML
    data = options.get("data") or find_data(preset, folder)
    return folder, preset, checkpoint.read_config(folder, options.get("context")), tokenizer, data


def begin(options, out, ranks):
    """Make the folder of a new run."""
    base, preset, config, tokenizer, data = read_base(options)
    settings = train.make_settings(options, preset, config, DEFAULTS[preset], ranks)
    settings.data = data
    settings.epochs = options.get("epochs", EPOCHS[preset])
    to_learn, _ = read_conversations(settings)
    rows = [make_row(tokenizer, conversation, config.context) for conversation in to_learn]
    lengths = padded_lengths(rows, config.context)
    batches = plan_epoch(lengths, settings.batch_tokens, settings.seed, 0)
    settings.steps = options.get("steps", settings.epochs * len(batches))
    if "warmup" not in options:
        settings.warmup = min(settings.warmup, settings.steps // 10)
    train.create_run("sft.py", out, settings, config, tokenizer, base)


def show(options):
    """Print a few conversations as rows: what is learned in green, or in brackets where the output is no
    terminal."""
    start, stop = ("\x1b[32m", "\x1b[0m") if sys.stdout.isatty() else ("[", "]")
    _, _, config, tokenizer, data = read_base(options)
    for number, conversation in enumerate(read_records(data, make_turns)[:options["show"]], 1):
        ids, mask = make_row(tokenizer, conversation, config.context)
        print(f"--- example {number}: {mask.sum()} of {len(ids)} tokens are learned")
        for learned, run in itertools.groupby(zip(ids, mask), key=lambda pair: pair[1]):
            text = printable(tokenizer.decode([token for token, _ in run]))
            print(f"{start}{text}{stop}" if learned else text, end="")
        print()


def main(argv):
    parser = Parser(description="Fine-tune a pretrained model to answer.")
    parser.add_argument("--show", type=whole_number(1), help="print so many examples, then stop")
    parser.add_argument("--epochs", type=whole_number(1), help="how often to read the data")
    options = train.parse_run_options(
        parser, argv, ["context"], ".json, .jsonl: records of instruction, input, output, or of messages "
        "(default: small: those that go with the base's text; else data/instructions*.json)")
    if "show" in options:
        return show(options)
    out = options.get("out", f"out/{os.path.basename(base_of(options))}-sft")
    return train.go("sft.py", options, out, begin, fine_tuning)


if __name__ == "__main__":
    run_script(main, to_the_end=True)
