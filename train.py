"""train.py: pretraining.  Text in, a checkpoint folder out.

    python train.py                          the small model on data/tiny.txt, or on the English inside Python
    python train.py small --data play.txt    on your own text
    python train.py --resume                 go on with an interrupted run: the same bits as if never stopped
    python train.py --resume --steps 2000    give a run more steps
    python train.py --dim 192 --layers 6     your own sizes; the preset gives the others
    python train.py --base out/theirs        go on from the weights of a model, ours or another Llama (README.md)
    python train.py --evaluate out/small --data data/blimp.jsonl    measure a model: BLiMP, or bits a byte of a text
    mpiexec -n 4 python train.py big         on several GPUs; or under srun

Read before it: tokenizer.py, model_cpu.py.  This file, sft.py and rl.py rest on two ideas, rows and runs.

A row is a pair (ids, mask).  ids are tokens, and mask says which of them the model learns to predict from those before.
A row can be a window of a text, a conversation, an answer that the model has drawn, or a sentence.  A step learns from
some rows; each may have a weight.  make_batch turns rows into arrays, and row_losses measures rows.

A run is a folder.  A new run first writes its checkpoint of step 0, into a hidden folder beside it.  After the first
steps the hidden folder gets the run's name.  So a run that fails at once takes no older run's place.  Every run, new or
old, is opened from its folder and goes on from the checkpoint that is there.

    1. rows         windows of a text; rows -> inputs and targets
    2. the loop     batch, forward, backward, update, report; the schedule
    3. measuring    the loss of rows in nats a token and bits a byte; samples; pairs of sentences
    4. settings     what a run is; most are options, too
    5. the folder   begin a run, open it, save it
    6. the corpus   files -> a tokenizer -> data/*.bin, uint16, memory-mapped; the last part of each file is held out
    7. the script   pretraining, in terms of all this

Why a resumed run is exact, bit for bit:
  * A save holds the weights, the optimizer's running means m and v, and the step number, all of the same step.
  * The batch is a pure function of the seed and the step.  So nothing else need be saved, such as the state of a random
    generator or a place in a file.
  * Sums are added in the same order.  On the CPU that order follows from the threads and the micro-batch, which are
    settings of the run.  The GPU's kernels use a fixed order (no atomic additions).
  * Lines of the log after the saved step are cut off, because these steps are done again.
  * rl.py adds to this: its batch depends on the weights, too, which are saved anyway.  And DPO saves the
    log-probabilities of its reference, the base, whose weights are not saved.
The code, the libraries, the files and the kind of machine must not have changed.  With another number of processes the
losses differ by rounding.

What it does not do: it does not shuffle documents; it does not stop attention at the end of a document (the model has
to learn from the end-of-text token that a new one begins); it does not fine-tune.  With --base the sizes and the
tokenizer are the base's.  The moments of the base's optimizer are not read, so such a run begins at step 0, with a
warmup.  Its usual rate is half that of a new run: so it forgets less of the base.
"""
# Errors, options, progress lines, processes.  You can read this file without knowing them.
from script import (Parser, Ranks, Stop, available_cores, bounded, check_names, file_hash, find_corpus, hash_files,
                    holds_records, option_of, print_record, print_step, printable, read_fields, read_records,
                    refusing, require, run_ranks, run_script, set_threads, short_hash, show_progress,
                    tokenizer_sample, whole_number, with_plain_lines)

import collections
import dataclasses
import functools
import math
import re
import shlex
import signal
import sys
import tempfile
import time
from os.path import basename, exists, getsize, normpath, realpath

if __name__ == "__main__":
    set_threads()           # before NumPy loads

import model_cpu            # before NumPy: if NumPy is missing, this import prints what to do
import checkpoint
import model_gpu
import numpy as np
from model_cpu import CONFIGS, OPTIMIZERS, Sampling, count_targets, generate_batch
from tokenizer import TEXT_ENDS, Tokenizer, split_point


# ------------------------------------------------------------------------------------------------------------
# 1. Rows
# ------------------------------------------------------------------------------------------------------------
# A row is (ids (n,), mask (n,)).  mask[i] says whether ids[i] is learned.  For example, where only the answer "Yo" and
# its end are learned, with K = 2 heads:
#
#     t                    0      1      2           3          4        5
#     ids              <|user|>   Hi  <|end|>  <|assistant|>    Yo    <|end|>
#     mask                 0      0      0           0          1        1
#     inputs           <|user|>   Hi  <|end|>  <|assistant|>    Yo                (without padding)
#     targets             -1     -1     -1          Yo       <|end|>    -1
#     target of head 0    -1     -1     -1          Yo       <|end|>              = targets[t]
#     target of head 1    -1     -1     Yo        <|end|>      -1                 = targets[t + 1]
#
# A target of -1 means that nothing is learned there.  (A window of pretraining has K - 1 ids more than other rows.
# They are no inputs, but targets, so that the further heads have one at each position, too.)
#
# The loss of head k is the mean of -log p over its targets in the whole step.  So every learned token weighs the same:
#
#     loss_k = -1/n_k  (the sum of  log p_k(ids[t+1+k] | ids[0..t])  over all rows, and all t with mask[t+1+k] = 1)
#     total  = loss_0 + mtp_weight * mean of loss_1 .. loss_(K-1)
#
# p_k is the softmax of head k's logits, and n_k the number of its targets.
def make_batch(rows, T, K):
    """Rows -> inputs (B,W) and targets (B,W+K-1); head k reads targets[:, k:k+W].

    W is the number of inputs of the longest row, rounded up to a multiple of 8, but at most T.  (So there are few
    different shapes, whose arrays a GPU keeps.)  Shorter rows are padded on the right, with targets of -1: attention is
    causal, so no earlier position sees the padding.  A window of pretraining has T + K ids, another row at most T + 1;
    the model reads T of them at most."""
    W = max(padded_lengths(rows, T))
    inputs = np.zeros((len(rows), W), np.int64)
    targets = np.full((len(rows), W + K - 1), -1)
    for b, (ids, mask) in enumerate(rows):
        read = ids[:-1][:W]
        inputs[b, :len(read)] = read
        learned = np.flatnonzero(mask[1:])      # the targets are ids[1:]: which of them are learned?
        targets[b, learned] = ids[1:][learned]
    return inputs, targets


def padded_lengths(rows, T):
    """-> an array: the number of inputs of each row, rounded up to a multiple of 8, at most T."""
    return np.array([min(T, 8 * model_gpu.ceil_div(len(ids) - 1, 8)) for ids, _ in rows])


def batches_of_one_length(rows, order, T, tokens):
    """Cut rows into batches of about one length, so that little is padding -> list of arrays of indices into `rows`.  A
    batch has at most `tokens` inputs with its padding, or one row.  The longest rows come first: the arrays
    of the first batch are then nearly always large enough for the others.  order: an array of the indices; among rows
    of one length it says which come first."""
    lengths = padded_lengths(rows, T)
    order = order[np.argsort(-lengths[order], kind="stable")]
    batches = []
    while len(order):
        size = max(1, tokens // lengths[order[0]])              # all are padded to the longest, the first
        batches.append(order[:size])
        order = order[size:]
    return batches


def count_learned(rows):
    """The number of tokens that head 0 learns from rows of at most T + 1 ids."""
    return sum(mask[1:].sum() for _, mask in rows)


def window_count(size, T, K):
    """The number of windows in an epoch.  Each epoch draws a shift, so that a token does not stand at the same place of
    its window every time.  The windows start at shift, shift + T, shift + 2T, ..., where shift is 0 to T - 1.
    The last of n windows starts at shift + (n-1) T and needs T + K tokens.  For the largest shift, T - 1, this is
        T - 1 + (n-1) T + T + K <= size,  so  n <= (size - K - T + 1) / T
    For example T = 4, K = 2, size = 20: n is 3, and with the shift 3 the windows are the tokens 3 to 8, 7 to 12 and 11
    to 16."""
    count = (size - K - T + 1) // T
    require(count > 0, f"the corpus is too short: {size} tokens to train on, and it needs {2 * T + K - 1}.")
    return count


def text_rows(tokens, T):
    """A text as rows of T + 1 ids.  Every token except the first is learned in exactly one row.  For example 10 tokens
    and T = 4: the rows are 0 to 4, 4 to 8, and 5 to 9, of which only token 9 is learned.  So a row begins with the
    token with which the row before it ends.  The last row begins earlier, so that it is full, too.  (A text shorter
    than that is one shorter row.)"""
    rows = []
    for start in range(0, len(tokens) - 1, T):
        first = max(0, min(start, len(tokens) - 1 - T))
        ids = tokens[first:first + T + 1]
        # the mask: position in the text > start
        rows.append((ids, first + np.arange(len(ids)) > start))
    return rows


@functools.lru_cache(maxsize=4)
def epoch_order(count, seed, epoch, stride):
    """-> (the shift of this epoch, 0 to stride - 1; the order of its windows, a permutation of 0 .. count - 1).  Both
    are drawn at random."""
    rng = np.random.default_rng([seed, epoch])
    return rng.integers(stride), rng.permutation(count)


def shuffled(count, seed, first, number, stride=1):
    """-> the terms first .. first + number - 1 of an endless shuffled sequence.  An epoch of it has `count` terms, each
    once: shift, shift + stride, shift + 2 stride, ... in random order.  (With stride 1 the shift is 0.)

        shuffled(windows, seed, step * n, n, T)     where the n windows of a step start in the text (pretraining)
        shuffled(len(items), seed, step * n, n)     indices of the n items of a step in a list (rl.py)"""
    terms = []
    for i in range(first, first + number):
        shift, order = epoch_order(count, seed, i // count, stride)
        terms.append(shift + stride * order[i % count])
    return terms


# ------------------------------------------------------------------------------------------------------------
# 2. The loop
# ------------------------------------------------------------------------------------------------------------
# train() is what pretraining, fine-tuning and rl.py share.  A Job is what they do not share, two functions:
#   batch: step, counted from 0 -> (rows, weights).  With weights None every learned token weighs the same, and all
#       heads learn.  With weights (n,), one for each row, only head 0 has a loss.  What batch returns depends only on
#       the step and on what a save holds, such as the model's weights: so a run can be resumed.
#   evaluate: the number of steps made -> dict for log.jsonl, with numbers and with "samples": [(title, text), ...],
#       what the model says (in DPO also the two answers of a pair).
Job = collections.namedtuple("Job", "batch evaluate")
REPORT_EVERY = 10           # steps.  To read a loss the host waits for the GPU, so it reads those of ten steps at once.
EARLY = 16, 64              # these steps are evaluated, too, because the loss falls fastest at the beginning


def train(training, job, stop):
    """Run from model.step to settings.steps -> exit code, 0 when the run is finished.

    The first pass of the loop only evaluates: at step 0 of a new run, and at the step of a resumed run if that is one
    to be evaluated.  Each other pass makes a step and, if it is time, evaluates.

    The rest of a pass is about three things.  The numbers of the steps are read and shown.  The run is saved: before an
    evaluation, every save_every steps, and before it stops.  And it stops after a signal (Ctrl-C, say).  To read a
    number from a GPU the host must wait for it: so a GPU's numbers are read less often.

                          numbers are read                              stopped, after a signal
        a CPU             after every step                              after this step
        a GPU             every tenth step, before a save or a stop     after this step
        several ranks     as on one CPU or GPU                          when they read numbers, and tell each other

    (Ranks are several processes that train one model: script.py, section 5.  Mostly there is one.)"""
    np.seterr(all="ignore")     # report looks for numbers that are not finite
    model = training.model
    settings = training.settings
    ranks = training.ranks
    first = model.step
    began = time.monotonic() - training.state["seconds"]
    waiting = []                # steps whose numbers the host has not read yet
    log = None                  # rank 0 opens it after the first pass.  That cuts off the records of later steps
    if first:
        print(f"Resuming {training.out} at step {first} of {settings.steps}.")
    for step in range(first, settings.steps + 1):       # the pass at `first` only evaluates
        evaluating = step % settings.eval_every == 0 or step in EARLY or step == settings.steps
        if step > first:
            # One step: batch, forward, backward, update.  batch and learning_rate count steps from 0.
            rows, weights = job.batch(step - 1)
            losses = forward_backward(training, rows, weights)                          # (K,)
            lr = learning_rate(step - 1, settings)
            norm = model.update(lr, decay=settings.decay, momentum=settings.momentum)
            # A GPU has not computed losses and norm yet: what `later` returns waits for them
            waiting.append((step, training.state["tokens"], lr, training.note, model.later(losses, norm)))

            # The step is done.  Now and then its numbers are read.  Then the run may also be saved, and stop
            saving = evaluating or step % settings.save_every == 0
            reading = saving or settings.device == "cpu" or step % REPORT_EVERY == 0
            # after a signal, too; but several ranks tell each other of it only when they read numbers anyway
            if reading or (stop.signal and ranks.size == 1):
                stopping = any(ranks.all_gather(stop.signal))   # the same on all ranks: all stop after the same step
                training.state["seconds"] = time.monotonic() - began
                report(training, log, waiting, saving or stopping)
                waiting = []
                if ranks.rank == 0:
                    # A new run has made a step: its folder gets its name.  (By now all ranks have read it.)
                    checkpoint.take_name(training.out)
                if saving or stopping:              # before the evaluation: if that fails, nothing is lost
                    save_run(training)
                if stopping and step < settings.steps:
                    # 128 + the signal, as shells have it.  A rank that had no signal itself reports SIGTERM
                    return 128 + (stop.signal or signal.SIGTERM)
        if evaluating:
            record = job.evaluate(step)
            print_record(record, step == settings.steps)
        if step == first and ranks.rank == 0:
            log = checkpoint.Log(training.out, first, evaluating)
        if evaluating and log:
            log.write(step=step, **record)
    print(f"\nTrained {training.out}: {settings.steps} steps, {training.state['tokens']:,} tokens, "
          f"{time.monotonic() - began:,.0f} seconds.\n\n"
          f"Talk to it: python chat.py --model {shlex.quote(training.out)}")
    return 0


def forward_backward(training, rows, weights):
    """Add up the gradient of a step, micro-batch by micro-batch -> the losses (K,).  A micro-batch has at most
    micro_batch * T tokens, so it takes more rows if they are shorter.  Where there are several ranks, each takes a part
    of the rows, and the last backward adds up the gradients of all ranks (script.py, section 5)."""
    T, K = training.sizes
    model = training.model
    ranks = training.ranks
    inputs, targets = make_batch(rows, T, K)                                            # (B,W), (B,W+K-1)
    W = inputs.shape[1]
    counted = count_targets(targets, W, K)
    training.state["tokens"] += inputs.size         # with the padding
    own = ranks.part(len(rows))
    if own.start == own.stop:
        # There are more ranks than rows.  This one takes a row without targets, because it has to take part in the sums
        # over all ranks.
        own = slice(0, 1)
        targets[...] = -1
    size = max(1, training.settings.micro_batch * T // W)           # rows of W inputs
    losses = 0.0
    for start in range(own.start, own.stop, size):
        part = slice(start, min(start + size, own.stop))
        part_weights = None if weights is None else weights[part]
        losses += model.forward(inputs[part], targets[part], counted, part_weights)
        model.backward(last=part.stop == own.stop)
    if ranks.size > 1:
        model.communicator.all_reduce(losses)
    return losses


def learning_rate(step, settings):
    """The learning rate of a step, counted from 0.  It rises linearly to settings.lr.  Then it falls along half a
    cosine (Loshchilov & Hutter 2017) to final_lr, a share of settings.lr, at the last step.  (In a run of
    at most warmup + 1 steps it does not fall.)"""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    # 0 at the first step after the warmup, 1 at the last step, which has the number steps - 1
    progress = (step - settings.warmup) / max(1, settings.steps - 1 - settings.warmup)
    share = settings.final_lr
    return settings.lr * (share + (1 - share) * 0.5 * (1 + math.cos(math.pi * progress)))


def report(training, log, waiting, before_save):
    """Wait for the numbers of these steps, log them, and show them (print_step).  All get the time of the last
    step.  FloatingPointError if a number is not finite.  before_save: a save follows, so the weights are checked,
    too."""
    model = training.model
    settings = training.settings
    seconds = training.state["seconds"]
    for step, tokens, lr, note, wait_for_numbers in waiting:
        losses, norm = [np.asarray(array).tolist() for array in wait_for_numbers()]
        last = before_save and step == model.step
        weights = model.read(model.flat_params) if last else 0.0
        if not (np.isfinite([*losses, norm]).all() and np.isfinite(weights).all()):
            raise FloatingPointError(f"step {step} is not finite (loss {losses[0]}, gradient norm {norm}).  "
                                     "What was saved before is kept.  Begin a new run with a lower --lr.")
        if log:
            log.write(step=step, loss=losses[0], losses=losses, lr=lr, grad_norm=norm, tokens=tokens,
                      seconds=seconds)
        minutes = seconds / step * (settings.steps - step) / 60
        speed = tokens / max(seconds, 1e-9)             # a coarse clock may show 0 seconds
        parts = [f"step {step:5d}/{settings.steps}", f"loss {losses[0]:7.4f}", note,
                 f"{minutes:.1f} min left", f"{speed:8,.0f} tokens/s", f"norm {norm:6.2f}", f"lr {lr:.2e}"]
        print_step(step, parts, last)


# ------------------------------------------------------------------------------------------------------------
# 3. Measuring
# ------------------------------------------------------------------------------------------------------------
PROMPTS = "\n", "The", "What is"         # without a space at the end: it belongs to the token of the next word


def row_losses(training, rows):
    """-> (n,) for each row the sum of head 0's -log p over the tokens of its mask.  The ranks share the work."""
    T, K = training.sizes
    ranks = training.ranks
    progress = show_progress("rows measured")
    losses = np.zeros(len(rows))
    own = np.arange(ranks.rank, len(rows), ranks.size)
    done = 0
    for batch in batches_of_one_length(rows, own, T, training.settings.micro_batch * T):
        losses[batch] = -training.model.log_probs(*make_batch([rows[i] for i in batch], T, K))
        done += len(batch)
        progress(done, len(own))
    ranks.all_reduce(losses)
    return losses


def measure(training, kinds):
    """kinds: {name: rows} -> {"val_loss": nats a token, "val_bpb": bits a byte, "val": {name: [nats, bits]}}, means
    over the tokens of the masks, and over their bytes.  Nats a token cannot be compared between tokenizers, bits a byte
    can."""
    byte_counts = np.array(list(map(len, training.tokenizer.tokens)))
    byte_counts[list(training.tokenizer.special.values())] = 0          # a special token is no text
    sums = {}
    for name, rows in kinds.items():
        ids = np.concatenate([ids[1:][mask[1:]] for ids, mask in rows])
        sums[name] = np.array([row_losses(training, rows).sum(), len(ids), byte_counts[ids].sum()])
    loss, bpb = nats_and_bits(sum(sums.values()))
    return {"val_loss": loss, "val_bpb": bpb, "val": {name: nats_and_bits(part) for name, part in sums.items()}}


def nats_and_bits(sums):
    """[nats, tokens, bytes] -> [nats a token, bits a byte]."""
    nats, tokens, count = sums.tolist()
    return [nats / tokens, nats / math.log(2) / max(count, 1)]          # a text of special tokens has no bytes


def draw_samples(training, prompts, most_ids):
    """prompts: {title: ids} -> [(title, how the model goes on after the prompt), ...], each up to a special token or
    `most_ids` ids.  Rank 0 draws; the others return []."""
    if training.ranks.rank:
        return []
    tokenizer = training.tokenizer
    seeds = training.settings.seed + np.arange(len(prompts))
    sampling = Sampling(temperature=0.8, top_k=50, seed=seeds, vocab=tokenizer.vocab_size)
    answers = generate_batch(training.model, [*prompts.values()], sampling, tokenizer.special.values(), most_ids)
    return list(zip(prompts, map(tokenizer.decode_plain, answers)))


# Pairs of sentences, of which one is good English and the other is not, though they hardly differ:
#
#     {"good": "The cats annoy Tim.", "bad": "The cats annoys Tim.", "name": "agreement"}
#
# A model that knows the rule finds the good one more probable.  BLiMP (Warstadt et al. 2020) tests 67 rules of English
# grammar in this way, with 1,000 pairs each.  A sentence is read as the beginning of a text:
#
#     log p(sentence) = sum over t of  log p(id_t | the token that begins a text, id_1 .. id_(t-1))
#
# A longer sentence is less probable.  But the two sentences of a pair have about the same length, so log p is not
# divided by it.
def evaluate_pairs(training, path):
    """Print how often the good sentence is the more probable one, for each name, and the mean over the names.
    ValueError for a record that is no such pair, or for a sentence that is longer than the context."""
    T, _ = training.sizes
    start = training.tokenizer.special_id(*TEXT_ENDS)           # one text ends there, and the next begins

    def make_rows(record):
        """-> (the name, a row of the good and one of the bad sentence)."""
        check_names(record, "good and bad and name")
        rows = []
        for text in (record["good"], record["bad"]):
            ids = np.array([start, *training.tokenizer.encode(text)])
            require(1 < len(ids) <= T + 1, f"a sentence must have 1 to {T} tokens")
            rows += text_rows(ids, T)               # which is one row
        return printable(record["name"]), *rows

    pairs = read_records([path], make_rows)
    losses = row_losses(training, [row for _, *rows in pairs for row in rows]).reshape(-1, 2)
    # columns: good, bad.  1 where the good sentence is the more probable one; for a tie 0.5
    right = np.heaviside(losses[:, 1] - losses[:, 0], 0.5)
    names = np.array([name for name, *_ in pairs])
    means = {name: right[names == name].mean() for name in dict.fromkeys(names.tolist())}
    means["average"] = np.mean([*means.values()])
    for name, mean in means.items():
        print(f"{name} {mean:.3f}")


# ------------------------------------------------------------------------------------------------------------
# 4. Settings
# ------------------------------------------------------------------------------------------------------------
SIZES = ("dim", "heads", "kv_heads", "layers", "context", "vocab")         # of Config, each an option
MACHINE = ("device", "precision", "threads", "micro_batch")                # settings that a resumed run may change


def defaults(steps, batch_tokens, lr, warmup, every):
    """-> dict of settings.  every: how many steps pass between two evaluations, and between two saves."""
    return dict(steps=steps, batch_tokens=batch_tokens, lr=lr, warmup=warmup, eval_every=every, save_every=every)


# Steps, tokens a step, learning rate (for Muon; begin() halves it for AdamW), steps of warmup, steps between two
# evaluations and saves.  Chosen by short runs; docs/notes.md says what else was tried.
DEFAULTS = {
    #                steps, batch_tokens, lr, warmup, every
    "small": defaults(800, 2048, 4e-3, 40, 200) | {"decay": 0.3, "momentum": 0.9},
    "medium": defaults(4000, 8192, 3e-3, 200, 500),
    "big": defaults(48000, 32768, 2.4e-3, 300, 1000) | {"decay": 0.3, "final_lr": 0.0}}
# A run without --steps ends after so many epochs at most.  Four of `big` take ten minutes on a GPU (more:
# docs/results.md).  Small gains nothing by more than eight (twelve were tried, with 0.3 MB of text).
MOST_EPOCHS = {"small": 8, "medium": 4, "big": 4}


def setting(kind, meaning, default=dataclasses.MISSING):
    """A field of Settings that is an option of train.py, sft.py and rl.py.  kind: the option's argparse type, or a
    tuple of choices; meaning: its help."""
    option = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
    return dataclasses.field(default=default, metadata={"help": meaning, **option})


@dataclasses.dataclass
class Settings:
    """What a run is, beside the sizes of its model (Config) and its base.

    Most settings are options.  An option that is missing gets the preset's value, or the best for this machine
    (make_settings), or the default at the end of its line.

    Two runs have the same losses, bit for bit, if their settings, sizes and bases are the same, and so are files, code,
    libraries, kind of machine and number of processes.  (--resume can change some settings on the way: see
    apply_options.  The losses then differ.)"""
    preset: str             # of CONFIGS
    steps: int = setting(whole_number(1), "updates; with --resume a larger number extends a run")
    # at most 1 << 24, 16M tokens: more is a typing error
    batch_tokens: int = setting(whole_number(1, 1 << 24), "tokens a step (sft.py, DPO: at most; REINFORCE: see rl.py)")
    lr: float = setting(bounded(float, 1e-9, 100), "peak learning rate")
    warmup: int = setting(whole_number(0), "steps of linear warmup")
    eval_every: int = setting(whole_number(1), "steps from one evaluation to the next")
    save_every: int = setting(whole_number(1), "steps from one save to the next")
    device: str = setting(("cpu", "gpu"), "default: the CPU for small, else the GPU; with --evaluate the GPU, if any")
    precision: str = setting(model_gpu.PRECISIONS, "number format on a GPU (default: bf16 where it has that)")
    # a micro-batch is cut into this many slices, and each has a core.  (With another number the order of sums differs)
    threads: int = setting(whole_number(1, 1024), "cores to use (default: all, at most one for each window)")
    # a CUDA grid has at most 65,535 rows
    micro_batch: int = setting(whole_number(1, 65535), "windows in a forward and backward (default: chosen for speed)")
    mtp_weight: float = setting(bounded(float, 0, 100), "weight of the further heads (default 0.3, or the base's)", 0.3)
    # Muon updates the matrices of the layers, and AdamW the rest
    optimizer: str = setting(OPTIMIZERS, "default: muon, for the layers' matrices; rl.py: adamw", "muon")
    decay: float = setting(bounded(float, 0, 10), "weight decay (default: 0.3, medium 0.1; sft.py 0.1; rl.py 0)", 0.1)
    momentum: float = setting(bounded(float, 0, 0.999), "of Muon (default 0.95; train.py small 0.9)", 0.95)
    final_lr: float = setting(bounded(float, 0, 1), "share of --lr at the end (default 0.1; train.py big 0)", 0.1)
    seed: int = setting(whole_number(0, 1 << 63), "random seed (default 0)", 0)
    matmul: str = setting(("cublas", "ours"), "which matmul a GPU uses (default cublas)", "cublas")
    epochs: int = 0         # of sft.py
    method: str = ""        # of rl.py: reinforce or dpo
    beta: float = 0.1       # of DPO
    reward: str = ""        # the name of REINFORCE's reward
    reward_key: str = ""    # fingerprint of the file of this reward, if it has one
    data: list = None       # the files to learn from
    key: str = ""           # fingerprint of these files; it is compared when the run is opened


@dataclasses.dataclass
class Training:
    """All that a run works with.  out: the folder of the run.  state: a dict of what a save records beside weights and
    moments:
        "tokens", "seconds"     spent so far
        "script"                train.py, sft.py or rl.py
        "base"                  the folder of the model that the run began with, or None
        "reference"             only in DPO: the reference's log-probabilities
        "base_key"              only in REINFORCE: a fingerprint of the base's weights"""
    model: object               # Model of either engine
    tokenizer: Tokenizer
    settings: Settings
    state: dict
    out: str
    ranks: Ranks                # of script.py
    note: str = ""              # what the progress line shows beside the loss; a batch may write it

    @property
    def sizes(self):
        """T, K"""
        return self.model.config.context, self.model.config.predict


def parse_run_options(parser, argv, sizes, data):
    """-> dict of the options that have a value.  sizes: which of SIZES are options of this script; data: the help of
    --data."""
    add = parser.add_argument
    add("preset", nargs="?", help=f"the model's size, or that of the base: {', '.join(CONFIGS)} (default "
        "small; with --base the largest that is not wider than the base)")
    add("--base", type=normpath, metavar="DIR",
        help="the model to begin with, ours or any plain Llama (sft.py: out/PRESET; rl.py: out/PRESET-sft)")
    add("--data", nargs="+", type=normpath, metavar="FILE", help=data)
    add("--out", type=normpath, metavar="DIR",
        help="the run's folder (default out/PRESET; of a base out/BASE-more, sft.py: -sft, rl.py: -rl)")
    add("--resume", action="store_true", help="go on with the run in --out")
    for name in sizes:
        add(option_of(name), type=whole_number(1, 1 << 20), help="default: the preset's, or the base's; of a base only "
            "--context may be less")
    for field in dataclasses.fields(Settings):
        if field.metadata:
            add(option_of(field.name), **field.metadata)
    options = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    preset = options.get("preset", "small")
    if preset not in CONFIGS:
        parser.error(f"{preset!r} is none of {', '.join(CONFIGS)}.  A text is named by --data, a model to begin with "
                     "by --base, the folder of a run by --out")
    return options


def choose_machine(options, preset, config, batch_tokens, ranks):
    """-> dict of the settings in MACHINE, from the options, or else the best that this machine has."""
    device = options.get("device", "cpu" if preset == "small" else "gpu")
    take_engine(device, config, ranks)
    on_gpu = device == "gpu"
    windows = model_gpu.ceil_div(batch_tokens // config.context, ranks.size)
    # with more than 32768 tokens in a micro-batch (a CPU: 4096) a step was not faster
    most_windows = max(1, (32768 if on_gpu else 4096) // config.context)
    rows = options.get("micro_batch", min(windows, most_windows))
    cores = min(rows, max(1, available_cores() // ranks.size))
    return {"device": device,
            "precision": options.get("precision", model_gpu.default_precision() if on_gpu else "fp32"),
            "threads": options.get("threads", 1 if on_gpu else cores),
            "micro_batch": rows}


def take_engine(device, config, ranks):
    """-> the module of the engine that this rank computes with, model_cpu or model_gpu."""
    engine = model_gpu.pick(device)
    if engine is model_gpu:
        model_gpu.check_sizes(config)
        model_gpu.take_gpu(ranks.local)
    return engine


def make_settings(options, preset, config, usual, ranks):
    """-> Settings: the options, and for those that are missing the usual values.  `usual` begins as the preset's row of
    DEFAULTS.  The options are put over that, and then what the machine needs."""
    T = config.context
    usual = {**usual, "preset": preset, "mtp_weight": float(config.mtp_weight),
             "batch_tokens": max(1, usual["batch_tokens"] // T) * T}
    usual |= {name: value for name, value in options.items() if name in Settings.__annotations__}
    require(usual["batch_tokens"] % T == 0,
            f"--batch-tokens {usual['batch_tokens']} is not a multiple of the context, {T}.")
    usual |= choose_machine(options, preset, config, usual["batch_tokens"], ranks)
    return Settings(**usual)


def load_model(folder, settings, config, ranks, training=True):
    """-> (model, tokenizer) of a folder, on the engine of the settings."""
    options = dict(optimizer=settings.optimizer, training=training)
    if settings.device == "cpu":
        options.update(dtype=np.float32, threads=settings.threads)
    else:
        options.update(precision=settings.precision, micro_batch=settings.micro_batch, matmul=settings.matmul)
    return checkpoint.load(folder, take_engine(settings.device, config, ranks), options, config.context)


# ------------------------------------------------------------------------------------------------------------
# 5. A run is a folder
# ------------------------------------------------------------------------------------------------------------
def go(script, options, out, begin, make_job):
    """Run a script on all ranks -> exit code.  begin(options, out, ranks) writes a new run, on rank 0;
    make_job(training) gives the Job of the run that was opened.  What is called, in this order:

        begin           make_settings (choose_machine), create_run (save_run)       not with --resume
        open_run        apply_options, load_model: here the model that trains is made
        make_job
        train           job.evaluate; then in each step job.batch, forward_backward, model.update, and now and then
                        report, save_run, job.evaluate"""
    def run(ranks):
        if ranks.rank == 0:
            checkpoint.lock_folder(out)
            if not options["resume"]:
                begin(options, out, ranks)
        ranks.meet()
        training = open_run(script, options, out, ranks)
        try:
            code = train(training, make_job(training), Stop())
        except FloatingPointError as error:
            print(f"\nerror: {error}", file=sys.stderr)
            return 1
        if code:                                    # a signal has stopped the run
            reward = training.settings.reward       # one from a file must be named again
            print(f"Saved {out} at step {training.model.step}. Go on with: python {script} --resume "
                  f"--out {shlex.quote(out)}{' --reward ' + reward if ':' in reward else ''}", file=sys.stderr)
        return code
    return run_ranks(run)


def create_run(script, out, settings, config, tokenizer, base=None):
    """Write a new run, at step 0: with a base's weights, or with random ones.  It is then opened from its folder, as a
    resumed run is."""
    # A folder that this run replaces is renamed.  So what the run reads must not lie in it: no such path may begin with
    # OUT/
    paths = [path for path in (base, *settings.data) if path]
    inside = [path for path in paths if f"{realpath(path)}/".startswith(f"{realpath(out)}/")]
    require(not inside, f"--out {out} holds what the run reads, {', '.join(inside)}: name another folder.")
    settings.key = hash_files(settings.data)
    checkpoint.clear_begun(out)
    config = dataclasses.replace(config, mtp_weight=settings.mtp_weight)
    if base:
        model, _ = checkpoint.load(base, model_cpu, {"dtype": np.float32}, config.context)
        model.config = config
        model.step = 0
    else:
        model = model_cpu.Model(config, settings.seed, np.float32)
    state = {"script": script, "tokens": 0, "seconds": 0.0, "base": base}
    save_run(Training(model, tokenizer, settings, state, checkpoint.begun_folder(out), Ranks()))


def save_run(training):
    """Rank 0 writes the checkpoint, with all that a resumed run needs to know; the others wait."""
    if training.ranks.rank == 0:
        state = {**training.state, "settings": dataclasses.asdict(training.settings)}
        checkpoint.save(training.out, training.model, training.tokenizer, state,
                        chat=state["script"] != "train.py")
    training.ranks.meet()


def open_run(script, options, out, ranks):
    """-> the Training of a folder, as the last save left it."""
    folder = checkpoint.run_folder(out)
    require(exists(f"{folder}/config.json"), f"there is nothing to resume in {out}.")
    if ranks.rank == 0:
        checkpoint.mend(folder)                     # finish a save that a kill interrupted
    ranks.meet()
    with refusing(f"the record of the run in {out} cannot be used"):
        state, moments = checkpoint.read_state(folder)
        settings = read_fields(Settings, state.pop("settings"))
        require(type(state["tokens"]) is int and type(state["seconds"]) is float, "tokens or seconds is no number")
        recorded_script = state["script"]
        base = state["base"]
        key = hash_files(settings.data)
    require(recorded_script == script, f"the run in {out} is one of {recorded_script}: resume it with that.")
    require(key == settings.key, f"{', '.join(settings.data)}: changed since {out} began.")
    config = checkpoint.read_config(folder)
    apply_options(options, settings, config, base, out, ranks)
    model, tokenizer = load_model(folder, settings, config, ranks)
    if settings.device == "gpu":
        rows = min(ranks.all_gather(model.rows))
        if rows < settings.micro_batch:
            print(f"The GPU has memory for a micro-batch of {rows} windows: taking that, not {settings.micro_batch}.  "
                  "The losses differ by rounding.")
            settings.micro_batch = rows
    if model.step:                                  # at step 0 the moments are zeros
        checkpoint.fill(model, f"{folder}/{checkpoint.STATE}", moments, {"m": model.m, "v": model.v})
    if ranks.size > 1:
        model.communicator = model_gpu.Nccl(ranks) if settings.device == "gpu" else ranks
    return Training(model, tokenizer, settings, state, out, ranks)


def apply_options(options, settings, config, base, out, ranks):
    """Compare the options beside --resume with what the run has recorded.  An option may differ if it belongs to the
    machine, or if it asks for more steps; then the settings change.  All else that differs is an error."""
    recorded = {**vars(config), **vars(settings), "base": base}
    if options.get("device", settings.device) != settings.device:
        # on another device other threads and another micro-batch are the fastest
        options = options | choose_machine(options, settings.preset, config, settings.batch_tokens, ranks)
    for name, value in options.items():
        before = recorded.get(name, value)          # an option that is not recorded, such as --out, is no setting
        if value == before:
            continue
        if name in MACHINE:
            print(f"note: {option_of(name)} was {before} and is {value}: the losses differ by rounding.")
        elif name == "steps" and value > before:
            print(f"The run in {out} had {before} steps; it goes on to {value}, by a new schedule.")
        else:
            raise ValueError(f"the run in {out} has {option_of(name)} {before}, not {value}: a run keeps its settings."
                             "  Leave the option out, or start a new run with --out.")
        setattr(settings, name, value)


# ------------------------------------------------------------------------------------------------------------
# 6. The corpus
# ------------------------------------------------------------------------------------------------------------
def make_tokenizer(paths, vocab):
    """-> a Tokenizer, trained on the parts of these files that are not held out."""
    print(f"Training a tokenizer of {vocab} tokens.")
    sample = tokenizer_sample([(path, 0, split_point(path)) for path in map(with_plain_lines, paths)])
    return Tokenizer.train_files(sample, vocab, progress=show_progress("bytes whose words are counted"))


def prepare(paths, tokenizer):
    """Corpus -> (tokens, val).  tokens: ids to train on; val: {kind: ids}, held out.

    Validation is reported for each kind of file.  A kind is the letters with which a file's name begins: books_00.txt
    and books_01.txt are one kind, and web_wikipedia.txt is another."""
    to_learn = []
    held_out = collections.defaultdict(list)
    for path in paths:
        plain = with_plain_lines(path)
        cut = split_point(plain)
        to_learn.append((plain, 0, cut))
        kind = re.match("[a-z]*", basename(path).lower())[0] or "text"
        held_out[kind].append((plain, cut, getsize(plain)))
    val = {kind: make_tokens(tokenizer, f"val-{kind}", parts) for kind, parts in held_out.items()}
    return make_tokens(tokenizer, "train", to_learn), val


def make_tokens(tokenizer, name, parts):
    """parts of files, [(path, start, end), ...] -> their uint16 ids, memory-mapped.  They are kept in data/, in a file
    that is named by a fingerprint of the parts and of the tokenizer, and made only once."""
    texts = [[file_hash(path), start, end] for path, start, end in parts]
    key = short_hash(str([texts, tokenizer.tokens, tokenizer.merges, tokenizer.digits]))
    path = f"data/{name}-{key}.bin"
    if not exists(path):
        tokenizer.encode_files(parts, path, progress=show_progress(f"bytes of {name} encoded"))
    return np.memmap(path, "<u2", "r")


# ------------------------------------------------------------------------------------------------------------
# 7. The script
# ------------------------------------------------------------------------------------------------------------
def begin(options, out, ranks):
    """Choose the settings of a new run, make its tokenizer and its tokens, and write it."""
    base = options.get("base")
    preset = options.get("preset", checkpoint.preset_of(base) if base else "small")
    sizes = {name: options[name] for name in SIZES if name in options}
    usual = dict(DEFAULTS[preset])
    if options.get("optimizer") == "adamw":
        usual["lr"] /= 2
    if base:
        usual["lr"] /= 2            # half the rate learns a new text equally well, and forgets less of the base
        require(sizes.keys() <= {"context"}, f"the model in {base} has its sizes: leave out all but --context.")
        config = checkpoint.read_config(base, options.get("context"))
    else:
        # None: these two are computed anew, from the width and the context
        config = dataclasses.replace(CONFIGS[preset], hidden=None, positions=None, **sizes)
    settings = make_settings(options, preset, config, usual, ranks)
    settings.data = settings.data or find_corpus(preset)
    tokenizer = checkpoint.read_tokenizer(base) if base else make_tokenizer(settings.data, config.vocab)
    tokens, _ = prepare(settings.data, tokenizer)
    window_count(len(tokens), config.context, config.predict)       # an error, if the text is too short
    most_steps = max(1, MOST_EPOCHS[preset] * len(tokens) // settings.batch_tokens)
    if "steps" not in options and most_steps < settings.steps:
        settings.steps = most_steps
        if "warmup" not in options:
            settings.warmup = min(settings.warmup, most_steps // 10)
    create_run("train.py", out, settings, config, tokenizer, base)


def pretraining(training):
    """-> the Job of a run on the files of its settings."""
    settings = training.settings
    tokenizer = training.tokenizer
    T, K = training.sizes
    tokens, val = prepare(settings.data, tokenizer)
    count = window_count(len(tokens), T, K)
    number = settings.batch_tokens // T             # of windows in a step
    held_out = {kind: text_rows(ids, T) for kind, ids in val.items() if len(ids) > 1}
    # A prompt may have no token, because another model's tokenizer may lack some bytes.
    prompts = {repr(text): tokenizer.encode(text) or [tokenizer.special_id(*TEXT_ENDS)] for text in PROMPTS}
    # tau = 1 / (lr * decay) steps, here in epochs (model_cpu.py, beside AdamW)
    decay_per_epoch = settings.lr * settings.decay * len(tokens) / settings.batch_tokens
    tau = 1 / decay_per_epoch if decay_per_epoch else math.inf
    print(f"{training.out}: {training.model.flat_params.size:,} parameters, {settings.steps} steps of "
          f"{settings.batch_tokens:,} tokens, {settings.device}; corpus {printable(', '.join(settings.data))}: "
          f"{len(tokens):,} tokens to train on; weight decay: an update's share of the weights "
          f"falls to 1/e in tau = {tau:,.3g} epochs (at the peak rate).\n"
          "val_loss: nats a token of the held-out text; val_bpb: bits a byte.")

    learned = np.ones(T + K, bool)                  # a window has T inputs and the targets of all K heads

    def batch(step):
        starts = shuffled(count, settings.seed, step * number, number, T)
        return [(tokens[start:start + T + K], learned) for start in starts], None

    def evaluate(step):
        return {**measure(training, held_out), "samples": draw_samples(training, prompts, 80)}

    return Job(batch, evaluate)


def evaluate_folder(options, ranks):
    """Print the loss of the model in a folder on each text of --data, or how often it prefers the good sentences."""
    require("data" in options, "--evaluate needs --data: texts, or pairs of sentences (./fetch_data.sh blimp).")
    useful = ("evaluate", "data", "context", "matmul", *MACHINE)
    others = [name for name, value in options.items() if value is not False and name not in useful]
    require(not others, f"--evaluate measures a model that is there: leave out {', '.join(others)}.")
    out = options["evaluate"]
    config = checkpoint.read_config(out, options.get("context"))
    options.setdefault("device", "cpu" if model_gpu.why_no_gpu() else "gpu")
    # make_settings wants a preset, but only what it chooses for the machine counts here: micro-batch, threads,
    # precision
    settings = make_settings(options, "big", config, DEFAULTS["big"], ranks)
    training = Training(*load_model(out, settings, config, ranks, training=False), settings, {}, out, ranks)
    for path in settings.data:
        if holds_records(path):
            evaluate_pairs(training, path)
            continue
        with tempfile.TemporaryDirectory() as folder:           # each rank has its own
            training.tokenizer.encode_file(with_plain_lines(path), f"{folder}/ids")
            # The ids end with the token that ends a text, which the file need not hold: it is not measured
            rows = text_rows(np.fromfile(f"{folder}/ids", "<u2")[:-1], config.context)
        require(rows, f"{path} is too short: it needs two tokens.")
        result = measure(training, {path: rows})
        print(f"{printable(path)}: loss {result['val_loss']:.4f}, {result['val_bpb']:.4f} bits/byte")


def main(argv):
    parser = Parser(description="Pretrain a model.  The defaults depend on the preset.")
    parser.add_argument("--evaluate", metavar="DIR", help="measure the model in DIR, ours or any plain Llama, on "
        "--data: a text's loss, or how often it prefers the good sentences of a .jsonl of pairs")
    options = parse_run_options(parser, argv, SIZES, "texts; lines of <|endoftext|> can separate documents (default "
                                "data/tiny.txt or Python's English; medium, big: data/books*.txt, data/web*.txt)")
    if "evaluate" in options:
        return run_ranks(lambda ranks: evaluate_folder(options, ranks))
    name = f"{basename(options['base'])}-more" if "base" in options else options.get("preset", "small")
    return go("train.py", options, options.get("out", f"out/{name}"), begin, pretraining)


if __name__ == "__main__":
    run_script(main, to_the_end=True)
