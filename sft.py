"""sft.py: supervised fine-tuning.  A model that continues texts becomes one that answers.

    python sft.py                          out/small -> out/small-sft, on pairs from text of the kind it knows
    python sft.py big --data FILE.json     on instructions: instruction, input, output, or messages
    python sft.py --base DIR --data FILE   another model, ours or any plain Llama (--context N: of its window)
    python sft.py --show 3                 three examples, with what is learned in colour
    python sft.py --resume                 go on with an interrupted run

Read before it: train.py, whose schedule, log, checkpoints and signals serve here as they are (train.train).
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

What it does not do: no rewards or preferences (the other steps: RLHF, DPO); no adapters (LoRA), all weights
are trained; no packing of several conversations into one row.
"""
import collections
import functools
import glob
import hashlib
import itertools
import json
import os
import re

import train                # first: it says what to do where NumPy is missing
import checkpoint
import numpy as np
from script import Parser, printable, read_chunk, require, run_script, whole_number
from tokenizer import CHAT_TEMPLATE, CHATML_PARTS, END_OF_TEXT, END_OF_TURN

# Chosen by short runs; docs/notes.md says what else was tried.
DEFAULTS = {        # the steps are set once the batches are counted
    "small": dict(steps=1, batch_tokens=1024, lr=7e-4, warmup=20, eval_every=100, save_every=100),
    "medium": dict(steps=1, batch_tokens=8192, lr=5e-4, warmup=50, eval_every=200, save_every=200),
    "big": dict(steps=1, batch_tokens=32768, lr=2e-4, warmup=50, eval_every=200, save_every=200),
}
EPOCHS = {"small": 4, "medium": 3, "big": 3}
MOST_HELD_OUT = 1000            # prompts
PAD_TO = 8                      # lengths are rounded up to a multiple of this
QUESTIONS = 10    # held-out prompts that are answered at the end; before and on the way 3 of them
ANSWER_TOKENS = 150
NAME_SOME = "name instructions with --data (./fetch_data.sh instructions brings some)."

# ------------------------------------------------------------------------------------------------------------
# 1. Conversations: lists of turns, each (user text, response); a system text comes first, as (text, None)
# ------------------------------------------------------------------------------------------------------------
def find_data(preset, corpus):
    """The files to learn from when none are named: for the larger models what `fetch_data.sh instructions`
    has brought; else the files that the model was pretrained on."""
    found = sorted(glob.glob("data/instructions*.json") + glob.glob("data/instructions*.jsonl"))
    found = found if found and preset != "small" else corpus
    require(found, f"there are no instructions in data/: {NAME_SOME}")
    return found


def read_conversations(paths):
    """The conversations in these files: the records of .json and .jsonl; of a corpus, pairs whose responses
    train.py held out from pretraining.  ValueError for a file that has none."""
    conversations = []
    for path in paths:
        require(os.path.isfile(path), f"{path} is not a file; --data takes .json, .jsonl, and texts.")
        read = (read_records if path.lower().endswith((".json", ".jsonl")) else
                python_pairs if re.fullmatch(r"python-\d+\.\d+\.txt", os.path.basename(path)) else play_pairs)
        conversations += read(path)
    return conversations


def read_json(path):
    """-> list of the values in a file that holds one list, or one value a line.  ValueError names the line
    that is no JSON."""
    text = read_chunk(path).decode("utf-8-sig", "surrogateescape")
    one_list, values = text.lstrip().startswith("["), []
    for number, piece in enumerate([text] if one_list else text.split("\n")):
        try:
            if piece.strip():
                values.append(json.loads(piece))
        except (ValueError, RecursionError) as error:
            line = number + getattr(error, "lineno", 1)
            raise ValueError(f"{path}, line {line}, is not JSON ({getattr(error, 'msg', error)}); the file "
                             "must hold one list of records, or one record a line.") from None
    return values[0] if one_list else values


def read_records(path):
    """The conversations in a file of JSON.  Records that cannot be used are left out, which is said."""
    records, conversations, wrong = read_json(path), [], {}
    for number, record in enumerate(records, 1):
        try:
            conversations.append(make_turns(record))
        except ValueError as error:
            wrong.setdefault(str(error), []).append(number)
    said = f"{path}: {len(conversations):,} of {len(records):,} records can be used" + "".join(
        f"; {len(numbers):,} with {what} (first: record {numbers[0]:,})" for what, numbers in wrong.items())
    require(conversations, f"{said}.")
    if wrong:
        print(f"{said}.")
    return conversations


def make_turns(record):
    """{"instruction", "input" (may lack), "output"} or {"messages": [{"role", "content"}, ...]} -> turns,
    every text as it stands; an empty system text is none.  ValueError says in a few words what the record has
    that is wrong."""
    require(isinstance(record, dict), "no named fields")
    messages, system = record.get("messages"), ""
    if messages is None:        # an instruction and its input are one text
        names = ["instruction", "input", "output"] if record.get("input") else ["instruction", "output"]
        roles, texts = ["user", "assistant"], [record.get(name) for name in names]
    else:
        require(isinstance(messages, list) and all(isinstance(message, dict) for message in messages),
                "messages that are no list of objects")
        roles, texts = ([message.get(name) for message in messages] for name in ("role", "content"))
    require(all(isinstance(text, str) for text in texts), "no text as instruction and output, or as content")
    if messages is None:
        texts = [as_text(texts[:-1]), texts[-1]]
    elif roles[:1] == ["system"]:
        system, roles, texts = texts[0], roles[1:], texts[1:]
    require(roles and roles == ["user", "assistant"] * (len(roles) // 2), "no user and assistant in turn")
    # from an empty one a model would learn to be silent
    require(all(response.strip() for response in texts[1::2]), "an empty response")
    return [(system, None)] * bool(system) + list(zip(texts[::2], texts[1::2]))


def as_text(parts):
    """Texts -> one, with an empty line between them; empty ones are left out."""
    return "\n\n".join(filter(None, parts))


def opening(turns):
    """What a conversation begins with: (system text or "", first user text)."""
    (text, response), *others = turns
    return ("", text) if response is not None else (text, others[0][0])


def cut_prompt(tokenizer, beginning, T):
    """The ids of what `opening` gives, up to where the answer begins, of which a quarter of the window T is
    left.  The system text stays and the user's is cut; but if that would leave this one less than half of the
    room, both are one text, of which the end is kept."""
    (system, text), room = beginning, T - T // 4
    if len(tokenizer.prompt("", None, system)) > room // 2:
        system, text = "", as_text(beginning)
    return tokenizer.prompt(text, room, system)


def python_pairs(path):
    """Pairs (name, first paragraph of its documentation) from the standard library, for a model that was
    trained on the file `path` that train.write_python_corpus wrote.  Held out: only those whose response
    occurs nowhere in what the model read.  These are mostly the short ones, since the corpus takes paragraphs
    from 40 characters up."""
    learned = read_chunk(path, 0, train.split_point(path)).decode("utf-8", "replace")
    pairs = {}
    for name, docstring in itertools.chain.from_iterable(train.python_docstrings()):
        first = " ".join(re.split(r"\n\s*\n", docstring.strip())[0].split())
        if " " in first and first not in learned:
            pairs.setdefault(name, first)                   # a name may be defined twice
    require(pairs, f"{path} holds all of the library's documentation, so nothing is held out; {NAME_SOME}")
    return [[pair] for pair in pairs.items()]


def play_pairs(path):
    """Pairs (speech, the reply to it) from the validation part of a play whose paragraphs are
    "NAME:\\nspeech". Without the names, which are the user and the assistant here; and the speech on one
    line, as one types it in chat.py.

    A reply is the speech of the next pair, too, which may be on the other side of the split: read there, but
    thanks to the mask not learned."""
    held_out = read_chunk(path, train.split_point(path))
    held_out = held_out.decode("utf-8", "replace").replace("\r\n", "\n")
    paragraphs = re.split(r"\n\n+", held_out.strip())
    speeches = [re.fullmatch(r"[^\n:]{1,40}:\n(.+)", paragraph, re.DOTALL) for paragraph in paragraphs]
    pairs = [[(" ".join(speech[1].split()), reply[1])]
             for speech, reply in itertools.pairwise(speeches) if speech and reply]
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
    ids, mask, end, (system, _) = [], [], tokenizer.end_of_turn, opening(turns)
    for text, response in turns[bool(system):]:
        prompt = tokenizer.prompt(text, None, system, first=not ids)
        answer = [*tokenizer.encode(response), end]
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
# that begin otherwise than those in train; questions: some of these beginnings, as `opening` gives them; cut:
# how many examples were too long; key: a fingerprint of all this
Examples = collections.namedtuple("Examples", "train lengths held_out questions cut key")


def make_examples(tokenizer, conversations, T, seed):
    """Conversations -> Examples.  The texts that they begin with decide what is held out: a tenth of the
    different ones, in the order of their hashes."""
    def order(prompt):
        return hashlib.sha256(f"{seed} {prompt}".encode("utf-8", "surrogatepass")).digest()

    beginnings = {as_text(opening(turns)): opening(turns) for turns in conversations}
    prompts = sorted(beginnings, key=order)
    require(len(prompts) > 1, "the data has one prompt only; it needs two, to learn one and hold one out.")
    unseen = {*prompts[:max(1, min(MOST_HELD_OUT, len(prompts) // 10))]}
    to_train, held_out, cuts, digest = [], [], 0, hashlib.sha256()
    for turns in conversations:
        ids, mask, cut = make_example(tokenizer, turns, T)
        is_held_out = as_text(opening(turns)) in unseen
        (held_out if is_held_out else to_train).append((ids, mask))
        cuts += cut
        digest.update(ids.tobytes() + mask.tobytes() + bytes([is_held_out]))
    questions = [beginnings[prompt] for prompt in prompts[:QUESTIONS] if prompt in unseen]
    return Examples(to_train, padded_lengths(to_train, T), held_out, questions, cuts, digest.hexdigest()[:12])


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
    batches, start = [], 0
    while start < len(order):
        rows = max(1, batch_tokens // lengths[order[start]])            # the longest row comes first
        batches.append(order[start:start + rows])
        start += rows
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
    inputs, targets = np.full((len(examples), P), pad), np.full((len(examples), P + K - 1), -1)
    for row, (ids, mask) in enumerate(examples):
        inputs[row, :len(ids) - 1] = ids[:-1]
        targets[row, :len(ids) - 1] = np.where(mask[1:], ids[1:], -1)
    return inputs, targets


# ------------------------------------------------------------------------------------------------------------
# 4. Evaluation
# ------------------------------------------------------------------------------------------------------------
def evaluate(model, tokenizer, examples, micro_batch, ranks=checkpoint.Ranks()):
    """-> [nats a learned token, bits a byte of response] of head 0 on all these examples, shared out."""
    T, K, pad = model.config.context, model.config.predict, tokenizer.special.get(END_OF_TEXT, 0)
    plan, sizes = plan_epoch(padded_lengths(examples, T), micro_batch * T, 0, 0), train.token_bytes(tokenizer)
    batches = (make_batch([examples[i] for i in rows], T, K, pad) for rows in plan[ranks.rank::ranks.size])
    sums = sum((train.held_out_loss(model, sizes, *batch) for batch in batches), np.zeros(3))
    ranks.all_reduce(sums)
    return train.in_units(sums)


def answer(model, tokenizer, question, seed):
    """What the model answers to a (system text, user text), as text."""
    prompt = cut_prompt(tokenizer, question, model.config.context)
    return train.sample_text(model, tokenizer, prompt, seed, ANSWER_TOKENS)


def fine_tuning(model, tokenizer, examples, settings, state, ranks=checkpoint.Ranks()):
    """-> the Job of a run on these examples.  state keeps the held-out loss before the first step."""
    T, K, pad = model.config.context, model.config.predict, tokenizer.special.get(END_OF_TEXT, 0)

    @functools.lru_cache(maxsize=2)                 # each step of an epoch asks for it
    def plan(epoch):
        return plan_epoch(examples.lengths, settings.batch_tokens, settings.seed, epoch)

    batches = len(plan(0))

    def batch(step):
        return make_batch([examples.train[i] for i in plan(step // batches)[step % batches]], T, K, pad)

    def look(step):
        loss, bpb = evaluate(model, tokenizer, examples.held_out, settings.micro_batch, ranks)
        state.setdefault("before", loss)
        questions = examples.questions[:None if step == settings.steps else 3]
        answers = [answer(model, tokenizer, question, settings.seed) for question in questions]
        print(f"           held-out loss {loss:.4f}, {bpb:.4f} bits/byte", flush=True)
        train.print_samples(map(as_text, questions), answers, step in (0, settings.steps))
        if step == settings.steps:
            print(f"Held-out loss {state['before']:.4f} before, {loss:.4f} after.", flush=True)
        return {"val_loss": loss, "val_bpb": bpb, "val": {"responses": [loss, bpb]}, "samples": answers}

    learned = np.concatenate([ids[mask] for ids, mask in examples.train])
    return train.Job(batch, look, max(train.token_bytes(tokenizer)[learned].mean(), 1e-9), ranks)


# ------------------------------------------------------------------------------------------------------------
# 5. Looking at it
# ------------------------------------------------------------------------------------------------------------
def show(tokenizer, conversations, T, count):
    """Print the first `count` examples as the model reads them, what is learned in green, or in brackets
    where the environment has NO_COLOR."""
    start, stop = ("[", "]") if os.environ.get("NO_COLOR") else ("\x1b[32m", "\x1b[0m")
    for number, turns in enumerate(conversations[:count], 1):
        ids, mask, cut = make_example(tokenizer, turns, T)
        print(f"--- example {number}: {mask.sum()} of {len(ids)} tokens are learned{', cut' * cut}")
        for learned, run in itertools.groupby(zip(ids, mask), key=lambda pair: pair[1]):
            text = printable(tokenizer.decode([token for token, _ in run]))
            print(f"{start}{text}{stop}" if learned else text, end="")
        print(flush=True)


# ------------------------------------------------------------------------------------------------------------
# 6. The run
# ------------------------------------------------------------------------------------------------------------
def parse_arguments(argv):
    parser = Parser(description="Fine-tune a pretrained model to answer.")
    parser.add_argument("--show", type=whole_number(1), metavar="N", help="print N examples, then stop")
    parser.add_argument("--epochs", type=whole_number(1), help="how often to read the data")
    train.add_run_options(parser, ["context"], ".json, .jsonl: records of instruction, input, output, or of "
                          "messages (default: data/instructions*.json; small: the base's held-out text)")
    return parser.parse_args(argv)


def read_base(folder, args):
    """-> (preset, corpus, Config, Tokenizer) of the base: see train.describe."""
    preset, corpus = train.describe(folder, args.preset or "small")
    require(args.preset in (None, preset), f"{folder} holds a model of the size {preset}, not {args.preset}.")
    tokenizer = checkpoint.read_tokenizer(folder)
    if not tokenizer.template:                      # it takes that for which it has the tokens
        tokenizer.template = CHAT_TEMPLATE if END_OF_TURN in tokenizer.special else "".join(CHATML_PARTS)
    return preset, corpus, checkpoint.read_config(folder, args.context), tokenizer


def read_examples(tokenizer, settings, T):
    """-> (the Examples of a run's files, how many batches an epoch of them has)."""
    examples = make_examples(tokenizer, read_conversations(settings.data), T, settings.seed)
    return examples, len(plan_epoch(examples.lengths, settings.batch_tokens, settings.seed, 0))


def main(argv):
    args = parse_arguments(argv)
    base = os.path.normpath(args.base or os.path.join("out", args.preset or "small"))
    if args.show:
        preset, corpus, config, tokenizer = read_base(base, args)
        conversations = read_conversations(args.data or find_data(preset, corpus))
        return show(tokenizer, conversations, config.context, args.show)
    train.set_threads(argv)
    with checkpoint.find_ranks(args.gpus, args.timeout) as ranks:
        return run(args, base, ranks)


def run(args, base, ranks):
    """-> exit code."""
    out = os.path.normpath(args.out or base + "-sft")
    if args.resume:
        model, tokenizer, settings, state = train.resume(args, out, "sft.py", ranks)
        examples, batches = read_examples(tokenizer, settings, model.config.context)
        require(examples.key == settings.tokens_key,
                f"{', '.join(settings.data)}: not what {out} began with.")
        epochs = settings.steps // batches
        if args.epochs and args.epochs > epochs and model.step >= settings.steps:
            train.extend(settings, args.epochs * batches, out)
        elif args.epochs not in (None, epochs):
            raise ValueError(f"the run in {out} has --epochs {epochs}, not {args.epochs}: a resumed run "
                             "keeps its settings. Leave the option out, or start a new run with --out.")
        if model.step >= settings.steps:
            print(f"The run in {out} is finished: {model.step} steps (--epochs takes more).")
            return 0
        print(f"Resuming {out} at step {model.step} of {settings.steps}.", flush=True)
    else:
        preset, corpus, config, tokenizer = read_base(base, args)
        args.device = train.choose_device(args.device, preset, local=ranks.local)
        settings = train.make_settings(args, preset, config, DEFAULTS[preset], ranks)
        settings.data = settings.data or find_data(preset, corpus)
        examples, batches = read_examples(tokenizer, settings, config.context)
        epochs = args.epochs or EPOCHS[preset]
        settings.steps, settings.tokens_key = epochs * batches, examples.key
        if args.warmup is None:
            settings.warmup = min(settings.warmup, settings.steps // 10)
        model, state = train.new_run("sft.py", out, config, tokenizer, settings, ranks, base)
        print(f"{base} is fine-tuned into {out} on {', '.join(settings.data)}: {len(examples.train):,} "
              f"conversations, {len(examples.held_out):,} more held out; {examples.cut:,} cut to fit.")
        print(f"{epochs} epochs of {batches} steps of at most {settings.batch_tokens:,} tokens.", flush=True)
    train.connect(ranks, model, settings)
    stop, job = train.Stop(), fine_tuning(model, tokenizer, examples, settings, state, ranks)
    if "before" not in state:
        record = job.evaluate(0)
        if ranks.rank == 0:
            checkpoint.Log(out, -1).write(step=0, **record)
    return train.train(model, tokenizer, settings, out, state, stop, job)


if __name__ == "__main__":
    run_script(main, to_the_end=True)
