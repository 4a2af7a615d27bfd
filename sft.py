"""sft.py: supervised fine-tuning.  A model that continues texts becomes one that answers.

    python sft.py                          out/small -> out/small-sft, on conversations made from its text
    python sft.py big --data FILE.json     on instructions: instruction, input, output, or messages
    python sft.py --base DIR --data FILE   ours, or a plain Llama with ChatML's tokens (--context N: read N at most)
    python sft.py --show 3                 three examples, with what is learned in colour
    python sft.py --resume                 go on with an interrupted run

The mask is the one idea of this file.  A conversation is written in a template of special tokens.  The model reads
all of it, but learns only what is underlined.  Everything else has the target -1, which counts for nothing in the
loss:

    <|user|>What is a cat?<|end|><|assistant|>An animal.<|end|>
                                              ~~~~~~~~~~~~~~~~~

So the model learns to answer and not to ask.  It also learns to stop, because the end of an answer is one of its
tokens (Ouyang et al. 2022, "Training language models to follow instructions with human feedback": this is the first
of its three steps).  The prompt still takes part, because the answer attends to it.  The gradient flows back through
the prompt's keys and values, so the weights also learn how to read a prompt.

Read before it: train.py.  Its rows, its loop and its folders of runs are used here unchanged.  Model, loss and
optimizers are the same, too.  From top to bottom:

    1. rows            conversations -> ids, and the mask that says what is learned
    2. batches         rows of about one length together; the seed decides which batch comes at which step
    3. the job         what the loop of train.py asks for
    4. the data        files -> conversations, of which some are held out
    5. the script      begin a run; show examples

What it does not do: no rewards or preferences (rl.py); no adapters (LoRA), all weights are trained; no packing of
several conversations into one row.
"""
from script import (Parser, find_records, hash_files, make_turns, printable, read_records, refusing, require,
                    run_script, set_threads, whole_number)

import glob
import os
import sys

if __name__ == "__main__":
    set_threads()           # before NumPy loads

import train                # before NumPy: if NumPy is missing, this import prints what to do
import checkpoint
import numpy as np
from tokenizer import CHAT_TEMPLATE, CHATML, END_OF_TURN


# ------------------------------------------------------------------------------------------------------------
# 1. Rows: (ids, mask) of a conversation
# ------------------------------------------------------------------------------------------------------------
# A conversation is (system text or None, turns), and turns are a list of (user text, response).  For example
#
#     ("Be kind", [("Hi", "Yo"), ("Who are you?", "A model.")])
#
# becomes, in our template, a row of these ids; "learned" marks those with mask True:
#
#     <|user|>Be kind\n\nHi<|end|><|assistant|>Yo<|end|><|user|>Who are you?<|end|><|assistant|>A model.<|end|>
#                                              |learned|                                        |---learned---|
def make_row(tokenizer, conversation, T):
    """A conversation -> (ids (n,), mask (n,)), n <= T + 1: T inputs, and the target of the last one.  A longer
    conversation loses its end, because a turn makes sense only after those before it.  The mask is True for the
    responses with their end tokens: these are learned."""
    system, turns = conversation
    ids = []
    mask = []
    for text, response in turns:
        prompt = make_prompt(tokenizer, system, text, T, first=not ids)
        answer = [*tokenizer.encode(response), tokenizer.end_of_turn]
        ids += prompt + answer
        mask += [False] * len(prompt) + [True] * len(answer)
    return np.array(ids[:T + 1]), np.array(mask[:T + 1])


def make_prompt(tokenizer, system, text, T, first=True):
    """The ids of a turn, up to where the answer begins.  They are at most T - T // 4, about three quarters of the
    window, so that there is room for an answer.  A longer text of the user loses its beginning, because an answer
    depends most on the end of the question.  (If several turns together are too long, make_row cuts the end.)"""
    return tokenizer.prompt(text, T - T // 4, system, first)


def opening(conversation):
    """What a conversation begins with: (system text or None, first user text).  Two conversations with the same opening
    ask the same question."""
    system, turns = conversation
    return system, turns[0][0]


# ------------------------------------------------------------------------------------------------------------
# 2. Batches: a pure function of the rows, the seed and the step, so that a run can be resumed
# ------------------------------------------------------------------------------------------------------------
def plan_epoch(rows, T, batch_tokens, seed, epoch):
    """-> list of arrays of indices into `rows`, each index once: the batches of an epoch.  A batch has at most
    batch_tokens inputs, or one row.

    The rows of one batch have about the same length.  Which rows of one length share a batch, and in which order the
    batches come, is random.  How many rows a batch has depends on the lengths alone.  So every epoch has the same
    number of batches, and `begin` can count the steps."""
    rng = np.random.default_rng([seed, epoch])
    batches = train.batches_of_one_length(rows, rng.permutation(len(rows)), T, batch_tokens)
    return [batches[i] for i in rng.permutation(len(batches))]


# ------------------------------------------------------------------------------------------------------------
# 3. The job
# ------------------------------------------------------------------------------------------------------------
SHOWN_TOKENS = 150          # of an answer that an evaluation prints, at most


def fine_tuning_job(training):
    """-> the Job of a run on the records of its settings."""
    settings = training.settings
    tokenizer = training.tokenizer
    T, _ = training.sizes
    conversations, unseen = read_conversations(settings)
    rows = [make_row(tokenizer, conversation, T) for conversation in conversations]
    held_out = [make_row(tokenizer, conversation, T) for conversation in unseen]
    # at most three questions, which every evaluation answers
    asked = list(dict.fromkeys(map(opening, unseen)))[:3]
    prompts = {text: make_prompt(tokenizer, system, text, T) for system, text in asked}
    batches = []                                    # of the whole run: few enough to plan all at the start
    epochs = 0
    while len(batches) < settings.steps:
        batches += plan_epoch(rows, T, settings.batch_tokens, settings.seed, epochs)
        epochs += 1
    print(f"{training.out}: {len(rows):,} conversations, {len(held_out):,} more held out;\n"
          f"{epochs} epochs (the last may be cut).\n"
          f"{sum(len(ids) > T for ids, _ in rows):,} conversations fill the window, which cuts longer ones.\n"
          "val_loss: nats a token of the held-out answers; val_bpb: bits a byte.")

    def batch(step):
        return [rows[i] for i in batches[step]], None

    def evaluate(step):
        return {**train.measure(training, {"responses": held_out}),
                "samples": train.draw_samples(training, prompts, SHOWN_TOKENS)}

    return train.Job(batch, evaluate)


# ------------------------------------------------------------------------------------------------------------
# 4. The data
# ------------------------------------------------------------------------------------------------------------
MOST_HELD_OUT = 1000        # openings


def read_conversations(settings):
    """-> (the conversations to learn, those held out) of a run's files."""
    conversations = read_records(settings.data, make_turns)
    return hold_out(conversations, list(map(opening, conversations)))


def hold_out(items, openings):
    """Split items, each of which has an opening -> (the items to learn, the items held out).  A tenth of the different
    openings is drawn at random, but at least 1 and at most MOST_HELD_OUT.  All items with one of these openings are
    held out.  So no opening is learned and also asked in an evaluation.  The draw does not depend on --seed: so
    rl.py holds out the same questions of a file as sft.py."""
    different = list(dict.fromkeys(openings))
    require(len(different) > 1, "the data has one prompt only; it needs two, to learn one and hold one out.")
    number = max(1, min(MOST_HELD_OUT, len(different) // 10))
    order = np.random.default_rng(0).permutation(len(different))
    unseen = {different[i] for i in order[:number]}
    to_learn = [item for item, start in zip(items, openings) if start not in unseen]
    held_out = [item for item, start in zip(items, openings) if start in unseen]
    return to_learn, held_out


def find_data(preset, base):
    """The files to learn from when none are named:

        medium, big             data/instructions*.json, if `fetch_data.sh instructions` has brought them
        small, or without these:
            a base of train.py      the records that go with its text (of a play: a speech and the next one;
                                    script.find_records)
            a base of sft.py        the records that it was fine-tuned on

    The record of a base names its files.  A stranger's folder could name a private file of yours, which the model would
    learn and then tell.  So a file is learned only if the record has its fingerprint, too.  To make that, one must have
    the file."""
    instructions = sorted(glob.glob("data/instructions*.json"))
    if preset != "small" and instructions:
        return instructions
    with refusing(f"{base} names no files to go on with: name instructions with --data "
                  "(./fetch_data.sh instructions brings some)"):
        state, _ = checkpoint.read_state(base)
        learned = state["settings"]["data"]
        require(hash_files(learned) == state["settings"]["key"], f"{', '.join(learned)}: not what it learned from")
    return [find_records(path) for path in learned]


# ------------------------------------------------------------------------------------------------------------
# 5. The script
# ------------------------------------------------------------------------------------------------------------
# The arguments of train.defaults; steps 0: as many as the epochs take.  The rates were chosen by short runs, and serve
# Muon, the default, and AdamW alike: with either small ends at the same loss (docs/notes.md).
DEFAULTS = {
    #                      steps, batch_tokens, lr, warmup, every
    "small": train.defaults(0, 1024, 7e-4, 20, 100) | {"epochs": 4},
    "medium": train.defaults(0, 8192, 5e-4, 50, 200) | {"epochs": 3},
    "big": train.defaults(0, 32768, 2e-4, 50, 200) | {"epochs": 3}}


def base_of(options, suffix=""):
    """The folder of the base: by default out/PRESET and this suffix, which is "-sft" in rl.py."""
    return options.get("base", f"out/{options.get('preset', 'small')}{suffix}")


def read_base(options, suffix=""):
    """-> (folder of the base, its preset, Config, Tokenizer, the files to learn from).  A base that answers already
    keeps its template.  Any other base gets our template if it has our tokens, or ChatML if it has ChatML's."""
    folder = base_of(options, suffix)
    preset = options.get("preset", checkpoint.preset_of(folder))
    tokenizer = checkpoint.read_tokenizer(folder)
    if not tokenizer.template:
        is_ours = END_OF_TURN in tokenizer.special
        require(is_ours or "<|im_end|>" in tokenizer.special,
                f"{folder} cannot learn to answer: its tokenizer has no token that ends a turn, {END_OF_TURN} or "
                "<|im_end|>.  Take a base of train.py, or a model that has one (./fetch_data.sh smollm2).")
        tokenizer.template = CHAT_TEMPLATE if is_ours else CHATML
    data = options.get("data") or find_data(preset, folder)
    return folder, preset, checkpoint.read_config(folder, options.get("context")), tokenizer, data


def begin(options, out, ranks):
    """Make the folder of a new run."""
    base, preset, config, tokenizer, data = read_base(options)
    settings = train.make_settings(options, preset, config, DEFAULTS[preset], ranks)
    settings.data = data
    if settings.steps == 0:
        # rows are made here only to count the steps
        conversations, _ = read_conversations(settings)
        rows = [make_row(tokenizer, conversation, config.context) for conversation in conversations]
        settings.steps = settings.epochs * len(
            plan_epoch(rows, config.context, settings.batch_tokens, settings.seed, 0))
    if "warmup" not in options:                     # a short run warms up for a tenth of its steps at most
        settings.warmup = min(settings.warmup, settings.steps // 10)
    train.create_run("sft.py", out, settings, config, tokenizer, base)


def show(options):
    """Print the first conversations as rows.  What is learned is green, or in brackets if the output is no terminal."""
    start, stop = ("\x1b[32m", "\x1b[0m") if sys.stdout.isatty() else ("[", "]")
    _, _, config, tokenizer, data = read_base(options)
    for number, conversation in enumerate(read_records(data, make_turns)[:options["show"]], 1):
        ids, mask = make_row(tokenizer, conversation, config.context)
        print(f"--- example {number}: {mask.sum()} of {len(ids)} tokens are learned")
        edges = 1 + np.flatnonzero(np.diff(mask))   # where the mask changes
        for part, is_learned in zip(np.split(ids, edges), np.split(mask, edges)):
            text = printable(tokenizer.decode(part))
            print(f"{start}{text}{stop}" if is_learned[0] else text, end="")
        print()


def main(argv):
    parser = Parser(description="Fine-tune a pretrained model to answer.")
    parser.add_argument("--show", type=whole_number(1), help="print this number of examples, then stop")
    parser.add_argument("--epochs", type=whole_number(1), help="how often to read the data, without --steps")
    options = train.parse_run_options(
        parser, argv, ["context"], ".json, .jsonl: records of instruction and output, of prompt and completion, "
        "or of messages (default: small: those that go with the base's text; else data/instructions*.json)")
    if "show" in options:
        return show(options)
    out = options.get("out", f"out/{os.path.basename(base_of(options))}-sft")
    return train.go("sft.py", options, out, begin, fine_tuning_job)


if __name__ == "__main__":
    run_script(main, to_the_end=True)
