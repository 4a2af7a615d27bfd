"""sft.py: supervised fine-tuning.  A model that continues texts becomes one that answers.

    python sft.py                          out/small -> out/small-sft, on pairs from text of the kind it knows
    python sft.py big --data FILE.json     on instructions: instruction, input, output, or messages
    python sft.py --base DIR --data FILE   another model, ours or any plain Llama (--context N: of its window)
    python sft.py --show 3                 three examples, with what is learned in colour
    python sft.py --resume                 go on with an interrupted run

Read before it: train.py.  Its schedule and its loop (train.train) serve here unchanged.
Model, loss and optimizers stay the same, too: Muon, whatever the base was trained with, unless --optimizer
says AdamW.  What is new stands in the order of a run:

    1. conversations   records of a file, or pairs made from a text -> turns: what is said, what is answered
    2. examples        turns -> ids, and the mask that says what is learned
    3. batches         examples of about one length together; a pure function of (seed, step)
    4. evaluation      held-out loss, and answers to held-out questions
    5. looking at it   --show
    6. the run

The mask is the one idea of this file.  A conversation stands in a template of special tokens.  All of it is
read, but only what is underlined is learned; anything else has the target -1, which counts for nothing in the
loss:

    <|user|>What is a cat?<|end|><|assistant|>An animal.<|end|>
                                              ~~~~~~~~~~~~~~~~~

That is our template.  A base that answers already keeps its own, ours or ChatML (tokenizer.py,
Tokenizer.prompt); one that does not takes that for which it has the tokens.

So the model learns to answer and not to ask, and it learns to stop, because the end of an answer is one of
its tokens (Ouyang et al. 2022, "Training language models to follow instructions with human feedback", the
first of their steps).

What it does not do: no rewards or preferences (rl.py); no adapters (LoRA), all weights
are trained; no packing of several conversations into one row.
"""
# first: with it Ctrl-C prints "Stopped." in place of a traceback, also while the imports below run
from script import (Parser, check_text, json_values, printable, python_docstrings, read_chunk, require, run_script,
                    set_threads, whole_number)

import collections
import functools
import glob
import hashlib
import itertools
import os
import re

if __name__ == "__main__":
    set_threads()           # before NumPy loads

import train                # first: it says what to do where NumPy is missing
import checkpoint
import numpy as np
from model_cpu import count_targets
from tokenizer import CHAT_TEMPLATE, CHATML_PARTS, END_OF_TURN


def defaults(batch_tokens, lr, warmup, every):
    """The defaults of a run; evaluation and save come every so many steps.  Its own steps are set once the batches
    are counted."""
    return dict(steps=1, batch_tokens=batch_tokens, lr=lr, warmup=warmup, eval_every=every, save_every=every)


# Chosen by short runs; docs/notes.md says what else was tried.
DEFAULTS = {
    "small": defaults(1024, 7e-4, 20, 100),
    "medium": defaults(8192, 5e-4, 50, 200),
    "big": defaults(32768, 2e-4, 50, 200)}
EPOCHS = {"small": 4, "medium": 3, "big": 3}
MOST_HELD_OUT = 1000            # prompts
PAD_TO = 8                      # lengths are rounded up to a multiple of this
ANSWER_TOKENS = 150
NAME_SOME = "name instructions with --data (./fetch_data.sh instructions brings some)."

# ------------------------------------------------------------------------------------------------------------
# 1. Conversations: lists of turns, each (user text, response); a system text comes first, as (text, None)
# ------------------------------------------------------------------------------------------------------------
def find_data(preset, corpus):
    """The files to learn from when none are named.  corpus: those of the base.  Where these are no records, the
    larger models take what `fetch_data.sh instructions` has brought."""
    if preset != "small" and not is_of_records((corpus or [""])[0]):
        corpus = sorted(glob.glob("data/instructions*.json")) or corpus
    require(corpus, f"there are no instructions in data/: {NAME_SOME}")
    return corpus


def is_of_records(path):
    return path.endswith((".json", ".jsonl"))


def read_conversations(paths):
    """The conversations in these files: the records of .json and .jsonl; of a corpus, pairs whose responses
    train.py held out from pretraining.  ValueError for a file that has none."""
    conversations = []
    for path in paths:
        check_text(path)
        if is_of_records(path):
            conversations += read_records(path, make_turns)
        elif re.fullmatch(r"python-\d+\.\d+\.txt", os.path.basename(path)):
            conversations += python_pairs(path)
        else:
            conversations += play_pairs(path)
    return conversations


def read_records(path, make):
    """What `make`, such as make_turns, makes of each record in a file of JSON.  Records that cannot be used are
    left out, which is said."""
    records = json_values(path)
    conversations = []
    wrong = {}                                      # what is wrong -> the numbers of the records
    for number, record in enumerate(records, 1):
        try:
            conversations.append(make(record))
        except ValueError as error:
            wrong.setdefault(str(error), []).append(number)
    said = f"{path}: {len(conversations):,} of {len(records):,} records can be used"
    for what, numbers in wrong.items():
        said += f"; {len(numbers):,} with {what} (first: record {numbers[0]:,})"
    require(conversations, f"{said}.")
    if wrong:
        print(f"{said}.")
    return conversations


def make_turns(record):
    """{"instruction", "input" (may lack), "output"} or {"messages": [{"role", "content"}, ...]} -> turns,
    every text as it stands.  ValueError says in a few words what the record has that is wrong."""
    require(isinstance(record, dict), "no named fields")
    messages = record.get("messages")
    if messages is None:
        roles = ["user", "assistant"]
        texts = [record.get("instruction"), record.get("input") or "", record.get("output")]
    else:
        require(isinstance(messages, list) and all(isinstance(message, dict) for message in messages),
                "messages that are no list of objects")
        roles = [message.get("role") for message in messages]
        texts = [message.get("content") for message in messages]
    require(all(isinstance(text, str) for text in texts),
            "a field that is no text (instruction, input, output or content)")
    if messages is None:
        texts[:2] = [as_text(texts[:2])]            # the user says both
    system = []
    if roles[:1] == ["system"]:
        del roles[0]
        system = [(texts.pop(0), None)]
    require(roles and roles == ["user", "assistant"] * (len(roles) // 2), "no user and assistant in turn")
    # from an empty one a model would learn to be silent
    require(all(response.strip() for response in texts[1::2]), "an empty response")
    return system + list(zip(texts[::2], texts[1::2]))


def as_text(parts):
    """Texts -> one, with an empty line between them; empty ones are left out."""
    return "\n\n".join(filter(None, parts))


def opening(turns):
    """What a conversation begins with: (system text or None, first user text)."""
    text, response = turns[0]
    if response is None:
        return text, turns[1][0]
    return None, text


def cut_prompt(tokenizer, beginning, T):
    """The ids of what `opening` gives, up to where the answer begins.  They take at most three quarters of the
    window T.  If they are too long, the user's text loses its beginning.  If the system text alone takes more
    than half of this room, both texts are joined, and the beginning of the whole is dropped."""
    system, text = beginning
    room = T - T // 4
    if len(tokenizer.prompt("", None, system)) > room // 2:
        return tokenizer.prompt(as_text(beginning), room)
    return tokenizer.prompt(text, room, system)


def python_pairs(path):
    """Pairs (name, first paragraph of its documentation) from the standard library, for a model that was
    trained on the file `path` that script.write_python_corpus wrote.  Held out: only those whose response
    occurs nowhere in what the model read.  These are mostly the short ones, since the corpus takes paragraphs
    from 40 characters up."""
    learned = read_chunk(path, 0, train.split_point(path)).decode("utf-8", "replace")
    pairs = {}
    for name, docstring in itertools.chain.from_iterable(python_docstrings()):
        first = " ".join(re.split(r"\n\s*\n", docstring.strip())[0].split())
        if " " in first and first not in learned:
            pairs.setdefault(name, first)                   # a name may be defined twice
    require(pairs, f"{path} holds all of the library's documentation, so nothing is held out; {NAME_SOME}")
    return [[pair] for pair in pairs.items()]


def play_pairs(path):
    """Pairs (speech, the reply to it) from the validation part of a play whose paragraphs are
    "NAME:\\nspeech".  The names are left out: they are the user and the assistant here.  The speech is put on one
    line, as one types it in chat.py.  Each reply is also the question of the next pair, which may lie on the
    other side of the split; the mask keeps it from being learned there."""
    held_out = read_chunk(path, train.split_point(path)).decode("utf-8", "replace")
    paragraphs = re.split(r"\n\n+", held_out.replace("\r\n", "\n").strip())
    speeches = [re.fullmatch(r"[^\n:]{1,40}:\n(.+)", paragraph, re.DOTALL) for paragraph in paragraphs]
    pairs = []
    for speech, reply in itertools.pairwise(speeches):
        if speech and reply:
            question = " ".join(speech[1].split())
            pairs.append([(question, reply[1])])
    require(len(pairs) > len(paragraphs) // 2,
            f"{path} is neither a play nor the text inside Python, so it gives no questions; {NAME_SOME}")
    return pairs


# ------------------------------------------------------------------------------------------------------------
# 2. Examples: ids and mask
# ------------------------------------------------------------------------------------------------------------
def make_example(tokenizer, turns, T):
    """Turns -> (ids (n,), mask (n,), whether it had to be cut), n <= T + 1: T inputs and the target of the
    last one.

    mask: True at what is learned, the responses with their end tokens.  If it is too long, turns are left out
    from the end.  The first always stays: its prompt is cut first (cut_prompt), then its response, of which
    at least a quarter of the window is left.  So every example has something to learn."""
    system, _ = opening(turns)
    ids = []
    mask = []
    for text, response in turns if system is None else turns[1:]:
        prompt = tokenizer.prompt(text, None, system, first=not ids)
        answer = [*tokenizer.encode(response), tokenizer.end_of_turn]
        cut = len(ids) + len(prompt) + len(answer) > T + 1
        if cut and ids:
            break
        if cut:
            prompt = cut_prompt(tokenizer, opening(turns), T)
            answer = answer[:T + 1 - len(prompt)]
        ids += prompt + answer
        mask += [False] * len(prompt) + [True] * len(answer)
        if cut:
            break
    return np.array(ids), np.array(mask), cut


# train: a list of (ids, mask); lengths: their padded_lengths; held_out: a list like train, of conversations
# that begin otherwise than those in train; questions: these beginnings, as `opening` gives them; cut:
# how many examples were too long; key: a fingerprint of all this
Examples = collections.namedtuple("Examples", "train lengths held_out questions cut key")


def hold_out(beginnings, seed):
    """beginnings: as `opening` gives them -> a dict of those that are held out, by their texts: a tenth of the
    different texts, in the order of their hashes."""
    def order(prompt):
        return hashlib.sha256(f"{seed} {prompt}".encode("utf-8", "surrogatepass")).digest()

    by_text = {as_text(beginning): beginning for beginning in beginnings}
    prompts = sorted(by_text, key=order)
    require(len(prompts) > 1, "the data has one prompt only; it needs two, to learn one and hold one out.")
    return {prompt: by_text[prompt] for prompt in prompts[:max(1, min(MOST_HELD_OUT, len(prompts) // 10))]}


def make_examples(tokenizer, conversations, T, seed):
    """Conversations -> Examples."""
    unseen = hold_out(map(opening, conversations), seed)
    to_train = []
    held_out = []
    cuts = 0
    digest = hashlib.sha256()
    for turns in conversations:
        ids, mask, cut = make_example(tokenizer, turns, T)
        is_held_out = as_text(opening(turns)) in unseen
        examples = held_out if is_held_out else to_train
        examples.append((ids, mask))
        cuts += cut
        digest.update(ids.tobytes() + mask.tobytes() + bytes([is_held_out]))
    return Examples(to_train, padded_lengths(to_train, T), held_out, list(unseen.values()), cuts,
                    digest.hexdigest()[:12])


# ------------------------------------------------------------------------------------------------------------
# 3. Batches: a pure function of (seed, step)
# ------------------------------------------------------------------------------------------------------------
def padded_lengths(examples, T):
    """How many inputs each example takes in a batch that has no longer one.  Rounded up, so that more
    examples have the same length, and meet others in every epoch."""
    return np.array([min(T, -(-(len(ids) - 1) // PAD_TO) * PAD_TO) for ids, _ in examples])


def plan_epoch(lengths, batch_tokens, seed, epoch):
    """-> list of arrays of indices into `lengths`, each index once: the batches of an epoch, of at most
    batch_tokens inputs each (or one row).

    Rows of one batch are about as long, since sorted by length, so little is padding.  Chance decides which
    examples of one length meet, and the order of the batches.  The sizes of the batches depend on the lengths
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


# The loss of a batch.  Head k at position t has read the ids up to t and predicts the one at t+1+k, if that
# is learned:
#
#     t                    0      1      2           3          4        5
#     ids              <|user|>   Hi  <|end|>  <|assistant|>    Yo    <|end|>
#     mask                 0      0      0           0          1        1
#     target of head 0    -1     -1     -1          Yo       <|end|>
#     target of head 1    -1     -1     Yo        <|end|>      -1
#
#     loss_k = -1/n_k  sum over all rows and t with mask[t+1+k] = 1 of  log p_k(ids[t+1+k] | ids[0..t])
#     total  = loss_0 + mtp_weight * mean of loss_1 .. loss_(K-1)
#
# n_k counts the terms of this sum in the whole step, so every learned token weighs the same, and a long
# answer more than a short one.  Where the target is -1 there is no term: these logits have the gradient 0.
# The prompt still takes part.  The answer attends to it, and so the gradient reaches the prompt's positions
# through their keys and values.
def make_batch(examples, T, K, pad):
    """-> inputs (B,P) and targets (B,P+K-1), -1 where nothing is learned; head k reads targets[:, k:k+P].
    Rows are filled up on the right with `pad`, which no earlier position sees and which is no target."""
    P = int(padded_lengths(examples, T).max())
    inputs = np.full((len(examples), P), pad)
    targets = np.full((len(examples), P + K - 1), -1)
    for row, (ids, mask) in enumerate(examples):
        n = len(ids) - 1
        inputs[row, :n] = ids[:-1]
        targets[row, :n] = np.where(mask[1:], ids[1:], -1)
    return inputs, targets


# ------------------------------------------------------------------------------------------------------------
# 4. Evaluation
# ------------------------------------------------------------------------------------------------------------
def evaluate(training, examples):
    """-> [nats a learned token, bits a byte of response] of head 0 on all these examples, which the ranks
    share."""
    T, K, pad = batch_sizes(training)
    ranks = training.ranks
    plan = plan_epoch(padded_lengths(examples, T), training.settings.micro_batch * T, 0, 0)
    batches = (make_batch([examples[i] for i in rows], T, K, pad) for rows in plan[ranks.rank::ranks.size])
    return train.in_units(train.held_out_sums(training, batches))


def batch_sizes(training):
    """-> T, K and the id that fills rows up, which may be any."""
    config = training.model.config
    return config.context, config.predict, 0


def answer(training, questions, whole):
    """Print what the model answers to the first of these (system text, user text) -> list of texts.  whole: see
    train.print_samples.  Rank 0 alone answers."""
    if training.ranks.rank:
        return []
    questions = questions[:training.settings.num_samples]
    prompts = [cut_prompt(training.tokenizer, question, training.model.config.context) for question in questions]
    answers = train.draw_samples(training, prompts, ANSWER_TOKENS)
    train.print_samples(map(as_text, questions), answers, whole)
    return answers


def fine_tuning(training, examples):
    """-> the Job of a run on these examples.  training.state keeps the held-out loss before the first step."""
    settings = training.settings
    T, K, pad = batch_sizes(training)

    @functools.lru_cache(maxsize=2)                 # each step of an epoch asks for it
    def plan(epoch):
        return plan_epoch(examples.lengths, settings.batch_tokens, settings.seed, epoch)

    batches = len(plan(0))

    def batch(step):
        rows = plan(step // batches)[step % batches]
        inputs, targets = make_batch([examples.train[i] for i in rows], T, K, pad)
        return inputs, targets, count_targets(targets, inputs.shape[1], K), None

    def evaluate_step(step):
        loss, bpb = evaluate(training, examples.held_out)
        before = training.state.setdefault("before", loss)
        print(f"           held-out loss {loss:.4f}, {bpb:.4f} bits/byte")
        record = {"val_loss": loss, "val_bpb": bpb, "val": {"responses": [loss, bpb]}}
        last = step == settings.steps
        record["samples"] = answer(training, examples.questions, last or step == 0)
        if last:
            print(f"Held-out loss {before:.4f} before, {loss:.4f} after.")
        return record

    learned = np.concatenate([ids[mask] for ids, mask in examples.train])
    return train.Job(batch, evaluate_step, train.bits_a_byte(training.tokenizer, learned))


# ------------------------------------------------------------------------------------------------------------
# 5. Looking at it
# ------------------------------------------------------------------------------------------------------------
def print_row(tokenizer, title, ids, mask):
    """Print ids as text, what is learned in green, or in brackets where the environment has NO_COLOR."""
    start, stop = "\x1b[32m", "\x1b[0m"
    if os.environ.get("NO_COLOR"):
        start, stop = "[", "]"
    print(f"--- {title}")
    for learned, run in itertools.groupby(zip(ids, mask), key=lambda pair: pair[1]):
        text = printable(tokenizer.decode([token for token, _ in run]))
        print(f"{start}{text}{stop}" if learned else text, end="")
    print()


# ------------------------------------------------------------------------------------------------------------
# 6. The run
# ------------------------------------------------------------------------------------------------------------
def parse_arguments(argv):
    parser = Parser(description="Fine-tune a pretrained model to answer.")
    parser.add_argument("--show", type=whole_number(1), help="print so many examples, then stop")
    parser.add_argument("--epochs", type=whole_number(1), help="how often to read the data")
    return train.parse_run_options(
        parser, argv, ["context"], ".json, .jsonl: records of instruction, input, output, or of messages "
        "(default: records that the base learned from, else data/instructions*.json; small: its held-out text)")


def read_base(given):
    """-> (folder, preset, Config, Tokenizer) of the base, and the files to learn from."""
    folder = base_of(given)
    preset, corpus = train.describe(folder, given.get("preset", "small"))
    require(given.get("preset", preset) == preset,
            f"the model in {folder} goes by the defaults of {preset}: leave out {given.get('preset')}.")
    tokenizer = checkpoint.read_tokenizer(folder)
    if not tokenizer.template:                      # it takes that for which it has the tokens
        tokenizer.template = CHAT_TEMPLATE if END_OF_TURN in tokenizer.special else "".join(CHATML_PARTS)
    data = given.get("data") or find_data(preset, corpus)
    return folder, preset, checkpoint.read_config(folder, given.get("context")), tokenizer, data


def base_of(given, kind=""):
    """The folder of the base; kind: how its name ends where none is given."""
    return given.get("base", f"out/{given.get('preset', 'small')}{kind}")


def read_examples(tokenizer, settings, T):
    """-> (the Examples of a run's files, how many batches an epoch of them has)."""
    examples = make_examples(tokenizer, read_conversations(settings.data), T, settings.seed)
    return examples, len(plan_epoch(examples.lengths, settings.batch_tokens, settings.seed, 0))


def run(args, ranks):
    """-> exit code."""
    given = train.given_options(args)
    out = args.out or f"out/{os.path.basename(base_of(given))}-sft"
    begin = continue_run if args.resume else begin_run
    training, examples = begin(given, out, ranks)
    return start(training, fine_tuning(training, examples))


def start(training, job):
    """Evaluate before the first step; then the loop -> exit code."""
    if train.is_finished(training):
        return 0
    train.connect(training)
    stop = train.Stop()
    if training.model.step == 0:
        record = job.evaluate(0)
        if training.ranks.rank == 0:
            checkpoint.Log(training.out, -1).write(step=0, **record)
    return train.train(training, job, stop)


def continue_run(given, out, ranks):
    """-> (Training, Examples)."""
    training = train.resume(given, out, "sft.py", ranks)
    settings = training.settings
    examples, batches = read_examples(training.tokenizer, settings, training.model.config.context)
    require(examples.key == settings.tokens_key, f"{', '.join(settings.data)}: not what {out} began with.")
    before = settings.steps // batches
    epochs = given.get("epochs", before)
    if epochs > before and training.model.step >= settings.steps:
        train.add_steps(settings, epochs * batches, out)
    else:
        require(epochs == before, f"the run in {out} has --epochs {before}, not {epochs}: a resumed run keeps "
                "its settings. Leave the option out, or start a new run with --out.")
    return training, examples


def begin_run(given, out, ranks):
    """-> (Training, Examples)."""
    base, preset, config, tokenizer, data = read_base(given)
    settings = train.make_settings(given, preset, config, DEFAULTS[preset], ranks)
    settings.data = data
    examples, batches = read_examples(tokenizer, settings, config.context)
    epochs = given.get("epochs", EPOCHS[preset])
    settings.steps = epochs * batches
    settings.tokens_key = examples.key
    if "warmup" not in given:
        settings.warmup = min(settings.warmup, settings.steps // 10)
    training = train.new_training("sft.py", out, config, tokenizer, settings, ranks, base)
    print(f"{base} is fine-tuned into {out} on {', '.join(settings.data)}: {len(examples.train):,} "
          f"conversations, {len(examples.held_out):,} more held out; {examples.cut:,} cut to fit.")
    print(f"Epochs: {epochs}, each of {batches} steps of at most {settings.batch_tokens:,} tokens.")
    return training, examples


def main(argv):
    args = parse_arguments(argv)
    if args.show is None:
        return train.run_ranks(run, args)
    _, _, config, tokenizer, data = read_base(train.given_options(args))
    conversations = read_conversations(data)
    for number, turns in enumerate(conversations[:args.show], 1):
        ids, mask, cut = make_example(tokenizer, turns, config.context)
        note = ", cut" if cut else ""
        print_row(tokenizer, f"example {number}: {mask.sum()} of {len(ids)} tokens are learned{note}", ids, mask)


if __name__ == "__main__":
    run_script(main, to_the_end=True)
