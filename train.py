"""train.py: pretraining.  Text in, a checkpoint folder out.

    python train.py                          the small model on data/, or on the English inside Python
    python train.py small --data play.txt    on your own text
    python train.py --resume                 go on with an interrupted run: the same bits as if never stopped
    python train.py --resume --steps 2000    give a finished run more steps
    python train.py --dim 192 --layers 6     sizes of your own: a preset is only where they start
    python train.py --base out/theirs        go on from the weights of a model, ours or any plain Llama
    python train.py --plot out/small         draw the loss curves
    python train.py --evaluate out/small --data data/blimp.jsonl    how good is it, in numbers that others know
    mpiexec -n 4 python train.py big         on several GPUs; the same as --gpus 4, or under srun

Read before it: tokenizer.py, model_cpu.py.  The parts come in the order in which a run needs them:

    1. settings     what a run is; most are options, too
    2. corpus       which files; the last part of each is held out for validation
    3. tokens       files -> a tokenizer -> data/*.bin, uint16, memory-mapped
    4. batches      a pure function of (seed, step): no reader state, so a resumed run sees the same data
    5. schedule     warmup and cosine
    6. evaluation   validation loss in nats a token and bits a byte; samples; pairs of sentences
    7. a training   from options to something that can be trained: begun, or resumed
    8. the loop     batch, forward, backward, update, report
    9. processes    data parallel training by MPI, and NCCL between GPUs (optional reading)
    10. the script  begin or resume, then the loop: to follow a run call by call, begin here

In a hurry, read 4, 5 and 8.

Why a resumed run is exact: a save holds the weights, the optimizer's m and v and the step number, all of the
same step.  The batch is a pure function of (seed, step), so no reader and no random generator has a state to
restore.  Threads and micro-batch fix the order of sums, so they are settings of the run and may not change; no
kernel of the GPU adds in an order that chance decides.  Code, libraries and files must be those of before.
The log is cut back to the step of the save.  With another number of processes the losses differ by rounding.

What it does not do: no shuffling of documents; no masks at document boundaries (the end-of-text token is what
the model learns them from); no fine-tuning.  With --base the sizes and the tokenizer are the base's.  Its
optimizer's moments are not read: the run begins with a warmup, at step 0, and at half the learning rate.
"""
# first: with it Ctrl-C prints "Stopped." in place of a traceback, also while the imports below run
from script import (MPI_IS_MISSING, Parser, Stop, available_cores, below_1, check_text, explain, file_hash,
                    find_corpus, json_values, memory_size, not_negative, positive, positive_or_inf, print_step,
                    printable, read_chunk, refusing, require, run_script, set_threads, short_hash,
                    show_progress, start_under_mpiexec, up_to_a_third, whole_number)

import collections
import dataclasses
import datetime
import fcntl
import functools
import glob
import math
import os
import re
import shlex
import signal
import sys
import tempfile
import textwrap
import time
import traceback
import zlib
from os.path import basename, exists, getsize, normpath, realpath

if __name__ == "__main__":
    set_threads()           # before NumPy loads

import model_cpu            # first: it says what to do where NumPy is missing
import checkpoint
import model_gpu
import numpy as np
from model_cpu import CONFIGS, OPTIMIZERS, Sampling, count_targets, generate_texts, slices_of
from tokenizer import END_OF_TEXT, SEPARATOR, TEXT_ENDS, Tokenizer


# ------------------------------------------------------------------------------------------------------------
# 1. Settings
# ------------------------------------------------------------------------------------------------------------
SIZES = ("dim", "heads", "kv_heads", "layers", "context", "vocab")         # of Config, each an option

# Chosen by short runs; docs/notes.md says what else was tried.  lr is Muon's; AdamW takes half of it.
DEFAULTS = {
    "small": dict(steps=800, batch_tokens=2048, lr=4e-3, warmup=40, eval_every=200, save_every=200),
    "medium": dict(steps=4000, batch_tokens=8192, lr=3e-3, warmup=200, eval_every=500, save_every=500),
    "big": dict(steps=48000, batch_tokens=32768, lr=2.4e-3, warmup=300, eval_every=500, save_every=2000),
}
# A fifth epoch over 290 MB did not help big, nor a ninth epoch over 0.3 MB small.
MOST_EPOCHS = {"small": 8, "medium": 4, "big": 4}


def setting(kind, meaning, default=dataclasses.MISSING):
    """A field of Settings that is an option of train.py, sft.py and rl.py.  kind: the option's argparse type, or a
    tuple of choices; meaning: its help."""
    option = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
    return dataclasses.field(default=default, metadata={"help": meaning, **option})


@dataclasses.dataclass
class Settings:
    """What a run is: with the same settings, files, code, libraries and number of processes every loss is the
    same, bit for bit.

    An option that is not given is None, and make_settings chooses: "default" in the help means that.  The values
    that stand last here are for settings that it does not choose."""
    preset: str             # of CONFIGS
    steps: int              # updates
    # the largest batch that anybody has reported (Llama 3) has as many tokens
    batch_tokens: int = setting(whole_number(1, 1 << 24), "tokens a step, a multiple of the context")
    lr: float = setting(positive, "peak learning rate")
    warmup: int = setting(whole_number(0), "steps of linear warmup")
    mtp_weight: float = setting(not_negative, "weight of the further prediction heads in the loss")
    eval_every: int = setting(whole_number(1), "steps from one evaluation to the next")
    save_every: int = setting(whole_number(1), "steps from one save to the next")
    precision: str = setting(model_gpu.PRECISIONS, "number format on a GPU (default: bf16 where it has that)")
    optimizer: str = setting(OPTIMIZERS, "muon (the default) for the layers' matrices, or adamw for all", "muon")
    # a CUDA grid is no higher than 65,535
    micro_batch: int = setting(whole_number(1, 65535), "windows a forward/backward (default: as many as pay)", 1)
    # slices of a batch, a core each; another number of them sums in another order
    threads: int = setting(whole_number(1, 1024), "cores to use (default: all)", 1)
    decay: float = setting(below_1, "weight decay, on matrices (default 0.1)", 0.1)
    momentum: float = setting(below_1, "of Muon (default 0.95)", 0.95)
    clip: float = setting(positive_or_inf, "largest gradient norm for AdamW; inf: any (default 1)", 1.0)
    seed: int = setting(whole_number(0, 1 << 63), "random seed (default 0)", 0)
    device: str = setting(("auto", "cpu", "gpu"), "auto (the default): the CPU for small, else the GPU", "cpu")
    matmul: str = setting(("cublas", "ours"), "which matmul a GPU uses (default cublas)", "cublas")
    memory_limit: int = setting(memory_size, "of the GPU, such as 12GB: stay within it", None)      # bytes
    num_samples: int = setting(whole_number(1), "samples of an evaluation (default 3)", 3)
    growth: float = 0.0     # share of the steps at each smaller batch: windows_before
    method: str = ""        # of rl.py: reinforce or dpo
    beta: float = 0.1       # of DPO
    reward: str = ""        # the name of REINFORCE's reward
    data: list = None       # the corpus files
    tokens_key: str = ""    # fingerprint of what the run learns from, compared when it is resumed


@dataclasses.dataclass
class Training:
    """What a run works on.  state: a dict of the "tokens" and "seconds" spent so far, the "script" that this
    is and its "base"; of sft.py also the loss "before", of rl.py "reference" and "drawn".  out: the folder to
    write."""
    model: object               # Model of either engine
    tokenizer: Tokenizer
    settings: Settings
    state: dict
    out: str
    ranks: object               # Ranks, section 9


def option_of(name):
    """"batch_tokens" -> "--batch-tokens"."""
    return "--" + name.replace("_", "-")


def parse_run_options(parser, argv, sizes, data):
    """Parse a command line with the options that pretraining and fine-tuning share.  sizes: those of SIZES that
    are options, too; data: what the files of --data are."""
    add = parser.add_argument
    add("preset", nargs="?", help=f"the model's size: {', '.join(CONFIGS)} (default small)")
    add("--base", type=normpath, metavar="DIR",
        help="the model to begin with, ours or any plain Llama (sft.py: default out/PRESET; rl.py: "
        "out/PRESET-sft)")
    add("--data", nargs="+", type=normpath, metavar="FILE", help=data)
    add("--out", type=normpath, metavar="DIR", help="to write: default PRESET or BASE-more, -sft, -rl in out/")
    add("--resume", action="store_true", help="go on with the run in --out")
    group = parser.add_argument_group("sizes in place of the preset's; in place of a base's the context alone")
    for name in sizes:
        least = 264 if name == "vocab" else 1       # the tokenizer's bytes and special tokens, and the next 8
        group.add_argument(option_of(name), type=whole_number(least, 1 << 20))
    add("--gpus", type=whole_number(1, 1024), help="number of processes, a GPU each (default 1)")
    for field in dataclasses.fields(Settings):
        if field.metadata:
            add(option_of(field.name), **field.metadata)
    args = parser.parse_args(argv)
    # not as choices: these would be named first, and an option with a typing error never
    if args.preset not in (None, *CONFIGS):
        parser.error(f"the preset must be one of {', '.join(CONFIGS)}, not {args.preset!r:.40}")
    return args


def parse_arguments(argv):
    parser = Parser(description="Pretrain a model.  The defaults depend on the preset: --dry-run prints the main ones.")
    add = parser.add_argument
    add("--steps", type=whole_number(1), help="updates; with --resume a larger number extends a finished run")
    add("--growth", type=up_to_a_third,
        help="a batch that grows: this share of the steps takes an eighth, as many a quarter, as many half")
    add("--dry-run", action="store_true", help="print settings and memory, then stop")
    add("--plot", metavar="DIR", help="draw DIR/log.jsonl to DIR/loss.png, then stop")
    add("--evaluate", metavar="DIR", help="measure the model in DIR, ours or any plain Llama, on "
        "--data: a text's loss, or how often it prefers the good sentences of a .jsonl of pairs")
    return parse_run_options(parser, argv, SIZES, "texts; lines of <|endoftext|> can separate documents (default "
                             "data/tiny.txt or Python's English; medium, big: data/books*.txt, data/web*.txt)")


# ------------------------------------------------------------------------------------------------------------
# 2. The corpus
# ------------------------------------------------------------------------------------------------------------
def split_point(path):
    """Byte at which the validation part of a file starts: the last 1%, but at least 100 kB, and at most 10%
    and 4 MB (about 1M tokens).  The cut moves to the nearest document boundary, else to the nearest line.  A
    text without lines is cut where that is, also within a character: tokens are made of bytes.  Text before
    the cut is for training.  Where separators stand near it, no document is in both parts."""
    size = getsize(path)
    wanted = min(max(size // 100, 100_000), 4_000_000)
    low = size - min(size // 10, 32_000_000)        # the cut is no earlier
    tail = read_chunk(path, low, size)
    end = len(tail.rstrip())                        # something must be left behind the cut
    target = max(0, min(len(tail) - wanted, end - 1))
    documents = [match.end() for match in SEPARATOR.finditer(tail)]
    lines = [tail.rfind(b"\n", 0, target) + 1, tail.find(b"\n", target) + 1]       # 0 where there is none
    for cuts in (documents, lines):
        possible = [cut for cut in cuts if 0 < cut < end]
        if possible:
            return low + min(possible, key=lambda cut: abs(target - cut))
    return low + target


# ------------------------------------------------------------------------------------------------------------
# 3. Tokens
# ------------------------------------------------------------------------------------------------------------
def kind_of(path):
    """What validation is reported by: the letters that a file's name begins with.  So books_00.txt and
    books_01.txt are one kind, and web_wikipedia.txt another."""
    stem = os.path.splitext(basename(path))[0]
    return re.match("[a-z]*", stem.lower())[0] or stem


def tokenizer_sample(parts):
    """Of parts of files, (path, 0, end), what a tokenizer is trained on: everything, or of more than 100 MB about
    a hundred pieces of 1 MB, evenly spread.  Which pairs are frequent is known long before gigabytes are read."""
    total = sum(end for *_, end in parts)
    if total <= 100_000_000:
        return parts
    return [(path, place, min(place + 1_000_000, end))
            for path, start, end in parts
            for place in range(start, end, total // 100)]


def prepare(paths, vocab, base=None):
    """Corpus -> (tokenizer, train, val, key).  train: uint16 token ids, memory-mapped; val: dict of kind ->
    such ids, held out.  base: the folder of a model whose tokenizer to take; else one is trained.  ValueError
    for a file that is no text, or is written to meanwhile.

    What is made is kept in data/, named by a fingerprint of the contents, and made only once."""
    kinds = [kind_of(path) for path in paths]
    for path in paths:
        check_text(path)

    def fingerprint():
        return short_hash("".join(map(file_hash, paths)), str(vocab))
    os.makedirs("data", exist_ok=True)
    with open("data/prepare.lock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)       # a second run waits here, and then finds everything made
        corpus_key = fingerprint()
        cuts = [(path, split_point(path), getsize(path)) for path in paths]
        to_train = [(path, 0, cut) for path, cut, _ in cuts]
        tokenizer_path = make_tokenizer(to_train, vocab, corpus_key, base)
        tokenizer = Tokenizer.load(tokenizer_path)
        key = short_hash(corpus_key, file_hash(tokenizer_path), *kinds)
        tokens = make_tokens(tokenizer, f"train-{key}", to_train)
        val = {}
        for name in dict.fromkeys(kinds):
            held_out = [part for part, kind in zip(cuts, kinds) if kind == name]
            val[name] = make_tokens(tokenizer, f"val-{name}-{key}", held_out)
        if fingerprint() != corpus_key:
            for path in glob.glob(f"data/*-{corpus_key}*") + glob.glob(f"data/*-{key}-*"):
                os.remove(path)
            raise ValueError(f"{', '.join(paths)}: changed while it was read. Start again when it is complete.")
    return tokenizer, tokens, val, key


def make_tokenizer(parts, vocab, corpus_key, base):
    """-> the path of the tokenizer in data/: a copy of the base's, or one trained on these parts of files."""
    if base:
        path = f"data/tokenizer-{vocab}-{corpus_key}-base.json"
        Tokenizer.load(f"{base}/tokenizer.json").save(path)
        return path
    path = f"data/tokenizer-{vocab}-{corpus_key}.json"
    if not exists(path):
        print(f"Training a tokenizer of {vocab} tokens.")
        sample = tokenizer_sample(parts)
        Tokenizer.train_files(sample, vocab, progress=show_progress("words counted:")).save(path)
    return path


def make_tokens(tokenizer, name, parts):
    """The ids of these parts of files, from data/NAME-CHECKSUM.bin, which is made where it is missing."""
    made = f"data/{glob.escape(name)}-*.bin"
    if not glob.glob(made):
        new = f"data/{name}.new"
        tokenizer.encode_files(parts, new, progress=show_progress(f"{name.rpartition('-')[0]} tokens:"))
        os.replace(new, f"data/{name}-{zlib.crc32(map_tokens(new)):08x}.bin")
    path = glob.glob(made)[0]
    ids = map_tokens(path)
    require(path.endswith(f"-{zlib.crc32(ids):08x}.bin"),
            f"{path} is damaged: its checksum is wrong. Delete it, and it is made anew.")
    return ids


def map_tokens(path):
    """A file of uint16 ids, memory-mapped; an empty one cannot be."""
    count = getsize(path) // 2
    return np.memmap(path, "<u2", "r", shape=(count,)) if count else np.zeros(0, "<u2")


# ------------------------------------------------------------------------------------------------------------
# 4. Batches: a pure function of (seed, step)
# ------------------------------------------------------------------------------------------------------------
def window_count(size, T, K):
    """Windows an epoch.  A window is T inputs and T+K-1 targets, T+K tokens; windows stand at stride T, on a
    grid that may be shifted by up to T-1 tokens."""
    if size < T + K:
        raise ValueError(f"the corpus is too short: {size} tokens to train on, and a window has {T + K}.")
    return max(1, (size - K - T + 1) // T)


@functools.lru_cache(maxsize=4)
def epoch_order(seed, epoch, size, T, K):
    """-> (count,) where in the tokens each window starts, in the epoch's random order."""
    rng = np.random.default_rng([seed, epoch])
    count = window_count(size, T, K)
    shift = rng.integers(min(T, size - K - count * T + 1))
    return shift + T * rng.permutation(count)


def window_starts(seed, first, windows, size, T, K):
    """Where so many windows start, from number `first` on, of the epochs' orders laid end to end."""
    count = window_count(size, T, K)
    return [epoch_order(seed, i // count, size, T, K)[i % count] for i in range(first, first + windows)]


# A batch that grows.  Early in a run all batches say much the same: the gradient is large beside its noise, and a
# small batch shows the way as well as a large one, for fewer tokens.  Later the noise is what remains, and a large
# batch averages it away (McCandlish et al. 2018; Smith et al. 2018).  With settings.growth = 0.25:
#
#     steps                  first quarter   second   third   last
#     batch, in windows           W/8          W/4     W/2      W
def windows_before(step, settings, T):
    """How many windows the steps before this one take: step s takes windows_before(s) to windows_before(s + 1) - 1.
    With T = 1 a window is a token."""
    windows = np.maximum(1, settings.batch_tokens // T // np.array([8, 4, 2, 1]))       # of a step in each stage
    long = round(settings.growth * settings.steps)                          # steps of each stage but the last
    steps = np.clip(step - long * np.arange(4), 0, [long, long, long, step])
    return int(steps @ windows)


def get_batch(tokens, starts, T, K):
    """-> inputs (W,T) and targets (W,T+K-1): the target of head k at position t is the token at t+1+k."""
    windows = np.stack([tokens[start:start + T + K] for start in starts]).astype(np.int64)      # (W,T+K)
    return windows[:, :T], windows[:, 1:]


# ------------------------------------------------------------------------------------------------------------
# 5. The schedule
# ------------------------------------------------------------------------------------------------------------
def learning_rate(step, settings):
    """Linear warmup to settings.lr, then a cosine down to a tenth of it (Loshchilov & Hutter 2017).  step
    counts from 0.  A batch of which only a share is taken as yet is noisier; the square root of the share makes up
    for that (Malladi et al. 2022)."""
    tokens = windows_before(step + 1, settings, 1) - windows_before(step, settings, 1)      # windows of one token
    peak = settings.lr * math.sqrt(tokens / settings.batch_tokens)
    if step < settings.warmup:
        return peak * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - 1 - settings.warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


# ------------------------------------------------------------------------------------------------------------
# 6. Evaluation and samples
# ------------------------------------------------------------------------------------------------------------
EVAL_TOKENS = 1 << 16    # an evaluation on the way reads at most this many tokens of each kind held out
SAMPLE_TOKENS = 80
PROMPTS = ("\n", "The", "What is")         # no space at an end: it belongs to the token of the next word


def token_bytes(tokenizer):
    """(V,) how many bytes of text each id stands for; a special token is no text, 0."""
    sizes = np.array(list(map(len, tokenizer.tokens)))
    sizes[list(tokenizer.special.values())] = 0
    return sizes


def bits_a_byte(tokenizer, learned):
    """-> the note of a Job whose tokens are like the ids learned: their loss in bits a byte."""
    size = max(token_bytes(tokenizer)[learned].mean(), 1e-9)
    return lambda step, loss: f"{loss / math.log(2) / size:.3f} bits/byte"


def held_out_sums(training, batches):
    """Head 0 on this rank's batches, inputs (B,T) and targets (B,T+K-1) -> [nats, tokens counted, bytes of these],
    sums over all ranks."""
    sizes = token_bytes(training.tokenizer)
    sums = np.zeros(3)
    for inputs, targets in batches:
        wanted = targets[:, :inputs.shape[1]]
        wanted = wanted[wanted >= 0]
        loss = float(training.model.forward(inputs, targets)[0])
        sums += loss * len(wanted), len(wanted), sizes[wanted].sum()
    training.ranks.all_reduce(sums)
    return sums


def in_units(sums):
    """Sums as of held_out_sums -> [nats a token, bits a byte].  Bits a byte do not depend on the
    tokenizer: models can be compared by them."""
    nats, counted, size = sums
    return [nats / counted, nats / math.log(2) / size]


def even_windows(val, T, K, micro_batch, most, ranks):
    """Yield batches of windows spread evenly over val, of together at most `most` tokens; none if val has not
    even K+1 tokens.  The ranks take turns: each yields its own batches."""
    T = min(T, len(val) - K)
    if T <= 0:
        return
    windows = max(1, min(most, len(val) - K) // T)
    stride = (len(val) - K) // windows
    starts = range(0, windows * stride, stride)
    for i in range(micro_batch * ranks.rank, windows, micro_batch * ranks.size):
        yield get_batch(val, starts[i:i + micro_batch], T, K)


def validate(training, val, most):
    """-> {"val_loss": nats a token, "val_bpb": bits a byte, "val": {kind: [both]}} on what is held out, at
    most `most` tokens of each kind.  The ranks share the work."""
    c = training.model.config
    sums = {}
    for kind, tokens in val.items():
        batches = even_windows(tokens, c.context, c.predict, training.settings.micro_batch, most, training.ranks)
        sums[kind] = held_out_sums(training, batches)
    loss, bpb = in_units(sum(sums.values()))
    return {"val_loss": loss, "val_bpb": bpb, "val": {kind: in_units(part) for kind, part in sums.items()}}


def in_words(result):
    """validate's dict as text."""
    words = f"{result['val_loss']:.4f}, {result['val_bpb']:.4f} bits/byte"
    if len(result["val"]) == 1:
        return words
    kinds = "; ".join(f"{name} {loss:.4f}, {bpb:.4f}" for name, (loss, bpb) in result["val"].items())
    return f"{words} ({kinds})"


def draw_samples(training, prompts, most):
    """How the model goes on after each of these prompts, lists of ids, up to a special token -> list of texts."""
    seed = training.settings.seed
    seeds = range(seed, seed + len(prompts))
    sampling = Sampling(temperature=0.8, top_k=50, seed=seeds, vocab=training.tokenizer.vocab_size)
    return generate_texts(training.model, training.tokenizer, prompts, sampling, most)


def print_samples(titles, samples, whole):
    """What an evaluation has drawn, each below its title; unless whole, a line of the first alone."""
    if not whole:
        print("          ", textwrap.shorten(repr(samples[0])[1:-1], 69, placeholder=""))
        return
    for title, sample in zip(titles, samples):
        print(f"--- {printable(title)}\n{printable(sample)}")


# Pairs of sentences, of which one is good English and the other is not, though they hardly differ:
#
#     {"good": "The cats annoy Tim.", "bad": "The cats annoys Tim.", "name": "agreement"}
#
# A model that knows the rule finds the good one more probable.  BLiMP (Warstadt et al. 2020) asks this about
# 67 rules of English grammar, 1,000 times each.  A sentence is read as the beginning of a text:
#
#     log p(sentence) = sum over t of  log p(id_t | the token that begins a text, id_1 .. id_(t-1))
#
# Longer sentences are less probable, but the two of a pair are about as long, so nothing is divided by a length.
def evaluate_pairs(training, path):
    """Print how often the good sentence is the more probable one: for each name, and the mean over the names.
    ValueError for a record that is no such pair, or has a sentence that the context cannot take."""
    T = training.model.config.context
    start = checkpoint.text_start(training.out, training.tokenizer)
    sentences = {}                              # text -> ids; each once, so equal ones are a tie to the last bit
    pairs = collections.defaultdict(list)
    for number, pair in enumerate(json_values(path), 1):
        with refusing(f"{path}, record {number}, cannot be used"):
            both = pair["good"], pair["bad"]
            pairs[printable(pair["name"])].append(both)
            for text in both:
                sentences[text] = [start, *training.tokenizer.encode(text)]
                require(1 < len(sentences[text]) <= T + 1, f"a sentence must have 1 to {T} tokens, the context")
    require(pairs, f"{path} is empty: there are no pairs in it.")
    scores = sentence_scores(training, sentences)
    means = {name: np.mean([np.heaviside(scores[good] - scores[bad], 0.5) for good, bad in found])
             for name, found in pairs.items()}
    means["average"] = np.mean([*means.values()])
    for name, mean in means.items():
        print(f"{name} {mean:.3f}")


def sentence_scores(training, sentences):
    """{sentence: ids} -> {sentence: log p of all its ids but the first}.  The sentences of a batch are about as
    long, so little of it is padding.  The longest come first, so memory is allocated once."""
    model = training.model
    c = model.config
    progress = show_progress("scored:", "thousand sentences", 1000)
    scores = {}
    left = sorted(sentences, key=lambda text: len(sentences[text]))
    while left:
        T = len(sentences[left[-1]]) - 1
        width = T + c.predict
        batch = left[-(training.settings.micro_batch * c.context // T):]
        del left[-len(batch):]
        windows = np.array([(sentences[text] + [-1] * width)[:width] for text in batch])    # (B,T+K)
        scores.update(zip(batch, model.log_probs(windows[:, :T].clip(0), windows[:, 1:])))
        progress(len(scores), len(sentences))
    return scores


def evaluate_text(training, path):
    """Print the loss on a text, read whole, as validate reads what is held out."""
    check_text(path)
    with tempfile.TemporaryDirectory() as folder:
        training.tokenizer.encode_files([path], f"{folder}/ids")
        ids = map_tokens(f"{folder}/ids")
        require(len(ids) > training.model.config.predict,
                f"{path} is too short: it has no more tokens than the model has heads.")
        print(f"{path}: loss {in_words(validate(training, {path: ids}, math.inf))}")


# ------------------------------------------------------------------------------------------------------------
# 7. A training: begun, or resumed
# ------------------------------------------------------------------------------------------------------------
def choose_device(asked, preset, local, planning=False):
    """-> cpu or gpu.  Unless asked: the CPU for small, for the others the GPU of this local rank.  Where a run
    is only planned, there need be no GPU."""
    device = asked or ("cpu" if preset == "small" else "gpu")
    if device == "gpu":
        missing = model_gpu.why_no_gpu()
        require(planning or not missing, f"{missing} On a CPU, with --device cpu, small takes minutes, and the larger "
                "models many hours or days.")
        if not missing:
            model_gpu.take_gpu(local)
    return device


def given_options(args):
    """dict of the options that have a value: without None and auto; flags are always in it."""
    return {name: value for name, value in vars(args).items() if value not in (None, "auto")}


def choose_sizes(given, preset):
    """-> the Config of the base, or of the preset, with the sizes given; hidden is computed from dim."""
    sizes = {name: given[name] for name in SIZES if name in given}
    if "base" in given:
        wrong = [option_of(name) for name in sizes if name != "context"]
        if wrong:
            raise ValueError(f"the model in {given['base']} has its sizes: leave out {' '.join(wrong)}.")
        return checkpoint.read_config(given["base"], given.get("context"))
    return dataclasses.replace(CONFIGS[preset], hidden=None, **sizes)


def make_settings(given, preset, config, defaults, ranks):
    """Settings from these defaults, of the preset, and the options given."""
    T = config.context
    given["device"] = choose_device(given.get("device"), preset, ranks.local, given.get("dry_run"))
    on_gpu = given["device"] == "gpu"
    if on_gpu:
        model_gpu.check_sizes(config)
    else:
        wrong = [option_of(name) for name in ("precision", "matmul", "memory_limit") if name in given]
        require(not wrong, f"{' '.join(wrong)} is for the GPU engine; add --device gpu.")
    usual = {**defaults, "preset": preset, "mtp_weight": config.mtp_weight,
             "batch_tokens": max(1, defaults["batch_tokens"] // T) * T,
             "precision": model_gpu.default_precision() if on_gpu else "fp32"}
    usual |= {name: given[name] for name in given.keys() & Settings.__annotations__}
    settings = Settings(**usual)
    if "momentum" in given and settings.optimizer == "adamw":
        raise ValueError("--momentum is Muon's; here AdamW updates all.")
    require(settings.batch_tokens % T == 0,
            f"--batch-tokens {settings.batch_tokens} is not a multiple of the context, {T}.")
    windows = model_gpu.ceil_div(settings.batch_tokens // T, ranks.size)
    if "micro_batch" not in given:      # as large as memory allows, up to where a larger one is no faster
        rows = 4096 // T
        if on_gpu:
            most = model_gpu.largest_micro_batch(config, settings.precision, settings.optimizer, ranks.size,
                                                 settings.memory_limit)
            passes = model_gpu.ceil_div(windows, max(1, min(32768 // T, most)))
            rows = model_gpu.ceil_div(windows, passes)      # 64 windows with room for 46: 32 + 32, not 46 + 18
        settings.micro_batch = max(1, rows)
    settings.micro_batch = min(ranks.all_gather(min(settings.micro_batch, windows)))    # the smallest of all ranks
    if "threads" not in given and not on_gpu:
        cores = max(1, available_cores() // ranks.size)
        settings.threads = min(cores, settings.micro_batch)
    return settings


def model_options(settings):
    """The arguments of the engine's Model, other than config and seed."""
    if settings.device == "cpu":
        return dict(dtype=np.float32, threads=settings.threads, optimizer=settings.optimizer)
    return dict(precision=settings.precision, micro_batch=settings.micro_batch, matmul=settings.matmul,
                memory_limit=settings.memory_limit, optimizer=settings.optimizer)


def dry_run(config, settings, ranks):
    """Print what a run would take."""
    print(f"{model_cpu.param_count(config):,} parameters, {settings.steps} steps of {settings.batch_tokens:,} tokens "
          f"in micro-batches of {settings.micro_batch} x {config.context}, {ranks.size} x "
          f"{settings.device} {settings.precision}, {settings.optimizer}, learning rate {settings.lr}, growth "
          f"{settings.growth}.  A new run without --steps takes fewer where these would read the corpus more than "
          f"{MOST_EPOCHS[settings.preset]} times.")
    if settings.device == "gpu":
        how = settings.precision, settings.optimizer, ranks.size
        plan = model_gpu.memory_plan(config, settings.micro_batch, config.context, *how)
        plan["together"] = sum(plan.values())
        for name, size in plan.items():
            print(f"{name:>20} {size / 2**20:10.1f} MiB")
        largest = model_gpu.largest_micro_batch(config, *how, settings.memory_limit)
        print(f"The largest micro-batch that fits: {largest}.")


def cap_steps(given, settings, tokens):
    """Unless --steps was given: read the corpus at most MOST_EPOCHS times."""
    epochs = MOST_EPOCHS[settings.preset]
    planned = windows_before(settings.steps, settings, 1)       # windows of one token
    most = max(1, epochs * tokens * settings.steps // planned)
    if "steps" not in given and most < settings.steps:
        print(f"{tokens:,} tokens are few for {settings.steps} steps: taking {most}, which read them "
              f"{epochs} times (--steps takes another number).")
        settings.steps = most
        if "warmup" not in given:
            settings.warmup = min(settings.warmup, most // 10)


def save_run(training):
    """The checkpoint, with all that a resumed run needs to know."""
    state = {**training.state, "settings": dataclasses.asdict(training.settings)}
    checkpoint.save(training.out, training.model, training.tokenizer, state,
                    chat=state["script"] != "train.py")


def new_training(script, out, config, tokenizer, settings, ranks, base=None):
    """-> the Training of a run that begins, with a base's weights or random ones.  It is saved as step 0, so
    that there is something to resume from the start."""
    options = model_options(settings)
    engine = model_gpu.pick(settings.device)
    config = dataclasses.replace(config, mtp_weight=settings.mtp_weight)
    if base:
        model, _ = checkpoint.load(base, engine, options, config.context)
        model.config = config
        model.step = 0
    else:
        model = engine.Model(config, settings.seed, **options)
    state = {"script": script, "tokens": 0, "seconds": 0.0, "base": base}
    training = Training(model, tokenizer, settings, state, out, ranks)
    if ranks.rank == 0:
        if base and realpath(base) == realpath(out):
            raise ValueError(f"--out {out} is the base itself; name another folder for the model made from it.")
        checkpoint.lock_folder(out)
        checkpoint.set_aside(out)
        save_run(training)
    return training


def read_run(folder):
    """-> (Settings, state) of the run that wrote a checkpoint; ValueError if none did."""
    state = checkpoint.load_state(folder)
    with refusing(f"{folder} was not written by train.py, sft.py or rl.py: how the run was made is not recorded"):
        recorded = {"optimizer": "adamw", **state["settings"]}      # old checkpoints name none: AdamW it was
        recorded.pop("attention", None)                             # old checkpoints name a kind that is gone
        return Settings(**recorded), state


def describe(base, wanted="small"):
    """-> (preset, corpus) of a base; corpus: the files that it learned from.  One of ours says how it was made.
    For other people's model preset is the largest one that is not wider, else small, and corpus is None.
    wanted: the preset that was asked for."""
    require(exists(f"{base}/config.json"), f"there is no model in {base}: `python train.py {wanted}` trains one, "
            "then sft.py one that answers; --base names another.")
    if exists(checkpoint.paths_of(base)[1]):
        made, _ = read_run(base)
        return made.preset, made.data
    dim = checkpoint.read_config(base).dim
    no_wider = [preset for preset, config in CONFIGS.items() if preset == "small" or config.dim <= dim]
    return no_wider[-1], None


def resume(given, out, script, ranks):
    """-> the Training of this script in `out`, from its own weights: a base need not be there any more.
    Options that differ from the run's are an error, but for more --steps than a finished run has made."""
    require(exists(f"{out}/config.json"), f"there is nothing to resume in {out}.")
    if ranks.rank == 0:
        checkpoint.lock_folder(out)
    settings, state = read_run(out)
    require(state["script"] == script, f"the run in {out} is one of {state['script']}: resume it with that.")
    choose_device(settings.device, settings.preset, ranks.local)
    model, tokenizer = checkpoint.load(out, model_gpu.pick(settings.device), model_options(settings))
    steps = given.get("steps", 0)
    recorded = {**vars(model.config), **vars(settings), "base": state.get("base")}
    if steps > settings.steps and model.step >= settings.steps:
        recorded["steps"] = steps
        add_steps(settings, steps, out)
    for name, value in given.items():
        was = recorded.get(name, value)                 # what is no setting, such as --dry-run, is as given
        option = "the preset" if name == "preset" else option_of(name)
        if value != was:
            raise ValueError(
                f"the run in {out} has {option} {str(was).strip('[]')}, not {str(value).strip('[]')}: a resumed run "
                "keeps its settings. Leave the option out, or start a new run with --out.")
    state = checkpoint.load_state(out, model)           # this time with the optimizer's m and v, into the model
    return Training(model, tokenizer, settings, state, out, ranks)


def add_steps(settings, steps, out):
    """Give a finished run more steps."""
    before = settings.steps
    settings.growth *= before / steps                   # the batch does not shrink again
    settings.steps = steps
    print(f"The run in {out} was finished after {before} steps; it goes on to {steps}.  The learning rate rises "
          f"to {learning_rate(before, settings):.2e}, by a new schedule.")


def is_finished(training):
    """Whether a run has made all its steps, which is said."""
    steps = training.settings.steps
    if training.model.step < steps:
        return False
    print(f"The run in {training.out} is finished: {steps} steps (--steps takes more, in sft.py --epochs).")
    return True


# ------------------------------------------------------------------------------------------------------------
# 8. The loop
# ------------------------------------------------------------------------------------------------------------
# What pretraining, fine-tuning and rl.py do not share; train() is the rest.
#   batch: step, from 0 -> what Model.forward takes: inputs (B,T), targets (B,T+K-1), counted (K,), weights (B,) or
#       None.  In DPO a pair of rows stays in one micro-batch: there these are (B,2,T), (B,2,T+K-1), (K,), (B,2), and
#       weigh follows.  A pure function of the step and the model's weights, so that a run can be resumed.
#   evaluate: step, from 1 -> dict for log.jsonl; prints what it found.
#   note: (step, from 1, its loss) -> what the progress line says beside the loss.
Job = collections.namedtuple("Job", "batch evaluate note")


def train(training, job, stop):
    """Run from model.step to settings.steps -> exit code, 0 when the run is finished."""
    np.seterr(all="ignore")    # Report looks for numbers that are not finite, and names them
    model = training.model
    settings = training.settings
    report = Report(training, job)
    if model.step:
        print(f"Resuming {training.out} at step {model.step} of {settings.steps}.")
    for step in range(model.step + 1, settings.steps + 1):
        # One step: batch, forward, backward, update, report.
        batch = job.batch(step - 1)                         # inputs (B,T), targets (B,T+K-1), counted (K,), weights
        training.state["tokens"] += batch[0].size
        losses = 0.0
        for part, last in micro_batches(training, *batch):
            losses = losses + model.forward(*part)                                      # (K,)
            model.backward(last)
        losses = sum_over_ranks(training, losses, stop)
        lr = learning_rate(step - 1, settings)
        norm = model.update(lr, decay=settings.decay, clip=settings.clip, momentum=settings.momentum)
        evaluating = evaluation_is_due(step, settings)
        # of several ranks: what travelled with the losses of the last step reported.  It is the same on all, so
        # that all stop after the same step
        stopping = report.asked if training.ranks.size > 1 else stop.signal
        saving = stopping or step % settings.save_every == 0 or step == settings.steps
        if not report(step, lr, losses, norm, pause=evaluating or saving):
            return 1                                        # a number is not finite, which was said

        paused = time.monotonic()
        if evaluating:
            record = job.evaluate(step)
            if report.log:                                  # rank 0 has one
                report.log.write(step=step, **record)
        if saving:
            save_in_agreement(training, report.log)
        if stopping and step < settings.steps:
            print(f"Saved {training.out} at step {step}. Go on with: python {training.state['script']} "
                  f"{settings.preset} --resume --out {shlex.quote(training.out)}", file=sys.stderr)
            return 128 + (stop.signal or signal.SIGTERM)        # or: another rank has the signal
        report.pauses += time.monotonic() - paused
    print(f"\nTrained {training.out}: {settings.steps} steps, {training.state['tokens']:,} tokens, "
          f"{training.state['seconds']:,.0f} seconds.\n\n"
          f"Talk to it: python chat.py --model {shlex.quote(training.out)}")
    return 0


def micro_batches(training, inputs, targets, counted, weights, weigh=None):
    """Yield this rank's rows of a step in micro-batches: (what Model.forward takes, whether it is the last).  A
    micro-batch is bounded by its tokens, so of shorter windows it takes more."""
    inputs, targets, weights = training.ranks.share(inputs, targets, weights)
    for rows in row_slices(training, inputs):
        rows_of = [array[rows].reshape(-1, array.shape[-1]) for array in (inputs, targets)]
        part = None if weights is None else weights[rows].ravel()
        yield (*rows_of, counted, part, weigh), rows.stop == len(inputs)


def row_slices(training, inputs):
    """The rows of inputs (B,T), or the pairs of rows of (B,2,T), in slices of a micro-batch's tokens."""
    tokens = training.settings.micro_batch * training.model.config.context
    return slices_of(len(inputs), max(1, tokens // inputs[0].size))


def sum_over_ranks(training, losses, stop):
    """losses (K,) of one rank -> those of the step.  Of several ranks (K+1,): with them travels how many
    ranks were asked to stop, so that all stop after the same step."""
    if training.ranks.size == 1:
        return losses
    asked = np.full_like(losses[:1], stop.signal is not None)
    losses = np.concatenate([losses, asked])
    training.model.communicator.all_reduce(losses)
    return losses


def evaluation_is_due(step, settings):
    """At first, when the loss falls fastest, at powers of two; then every settings.eval_every steps."""
    if 16 <= step < settings.eval_every and step & (step - 1) == 0:
        return True
    return step % settings.eval_every == 0 or step == settings.steps


def save_in_agreement(training, log):
    """Rank 0 saves, after all ranks have shown that they have the same weights; the others sleep meanwhile."""
    if training.ranks.size > 1:
        training.ranks.agree(weights=weights_checksum(training.model))
    if log:
        os.fsync(log.file.fileno())
        save_run(training)
    training.ranks.meet()


class Report:
    """Waits for the numbers of each step, logs them and prints a line.  A GPU must not wait for the host
    meanwhile: there a step is reported when the next one has been launched."""
    def __init__(self, training, job):
        self.training = training
        self.job = job
        self.first = training.model.step
        self.tokens_before = training.state["tokens"]
        self.began = time.monotonic() - training.state["seconds"]
        self.pauses = training.state["seconds"]     # what does not count for the throughput
        self.waiting = []                           # steps that are not reported yet
        self.asked = 0                              # how many ranks have been asked to stop
        self.log = checkpoint.Log(training.out, self.first) if training.ranks.rank == 0 else None

    def __call__(self, step, lr, losses, norm, pause):
        """Report this step, or on a GPU the one before; both before a pause.  -> whether all numbers are
        finite."""
        tokens = self.training.state["tokens"]
        self.waiting.append((step, tokens, lr, self.training.model.later(losses, norm)))
        may_wait = int(self.training.settings.device == "gpu" and not pause)     # steps
        while len(self.waiting) > may_wait:
            if not self.write(*self.waiting.pop(0), pause and not self.waiting):
                return False
        return True

    def write(self, step, tokens, lr, read, pause):
        """-> whether loss and norm of this step are finite, and before a pause, in which they may be saved, the
        weights, too.  read: waits for the numbers."""
        model = self.training.model
        losses, norm = read()
        losses = losses.tolist()
        norm = float(norm)
        if self.training.ranks.size > 1:
            self.asked = losses.pop()
        weights = model.read(model.flat_params) if pause else 0.0
        if not (np.isfinite([*losses, norm]).all() and np.isfinite(weights).all()):
            bad = first_bad_tensor(self.training, self.job.batch(step - 1))
            print(f"\nerror: step {step} is not finite (loss {losses[0]}, gradient norm {norm}): {bad}. "
                  f"{self.training.out} keeps its last save. Try a lower --lr.", file=sys.stderr)
            return False
        seconds = time.monotonic() - self.began
        self.training.state["seconds"] = seconds
        if self.log:
            self.log.write(step=step, loss=losses[0], losses=losses, lr=lr, grad_norm=norm, tokens=tokens,
                           seconds=round(seconds, 3))
        steps = self.training.settings.steps
        working = seconds - self.pauses
        throughput = (tokens - self.tokens_before) / working
        # tokens of a run up to here, as windows of one token
        first, now, end = [windows_before(at, self.training.settings, 1) for at in (self.first, step, steps)]
        seconds_left = int(working * (end - now) / (now - first))
        left = str(datetime.timedelta(seconds=seconds_left)).removeprefix("0:")        # 02:14, or 1:02:14
        parts = [f"step {step:5d}/{steps}", f"loss {losses[0]:7.4f}",
                 self.job.note(step, losses[0]), f"{left} left",
                 f"{throughput:8,.0f} tokens/s", f"norm {norm:6.2f}", f"lr {lr:.2e}"]
        print_step(step, parts, pause)
        return True


def first_bad_tensor(training, batch):
    """Names the first tensor that is not finite, in the order of the parameter table.  A bad norm changed no
    weight, so the gradient of that step can be computed again.  Parameters come first: a bad one makes all
    gradients bad.  np.isfinite serves NumPy's arrays and CuPy's."""
    model = training.model
    model.flat_grads[...] = 0.0
    for part, last in micro_batches(training, *batch):
        model.forward(*part)
        model.backward(last)
    for what, views in (("parameter", model.params), ("gradient", model.grads)):
        for name, view in views.items():
            if not np.isfinite(view).all():
                return f"the first {what} that is not finite is {name}"
    return "every gradient is finite; the loss, or the sum of the gradient's squares, overflowed"


# ------------------------------------------------------------------------------------------------------------
# 9. Several processes: data parallel training
# ------------------------------------------------------------------------------------------------------------
# Each process, a rank, has all the weights and takes its slice of a step's windows.  The loss is a sum over
# all targets, divided by their count in the whole step.  So its gradient is the sum of the slices' gradients.
# The ranks add theirs up (an all-reduce) and make the same update: the weights stay the same everywhere, and
# rank 0 alone prints, logs and saves.
#
# MPI starts the ranks, carries what they say, and ends them all when one dies.  Between GPUs NVIDIA's NCCL
# sums the gradient.

# The variables by which a launcher says how many ranks there are: MPICH and Intel MPI, Open MPI, srun.
LAUNCHERS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


class Ranks:
    """The processes of a run.  world: mpi4py's communicator, or None where there is one process."""
    def __init__(self, world=None, local=0):
        self.world = world
        self.rank = world.rank if world else 0
        self.size = world.size if world else 1
        self.local = local                          # the rank's number on its host

    def meet(self):
        """Wait for all ranks.  MPI waits by asking without a pause, which takes a core from those that work;
        so this asks, and sleeps in between."""
        if self.world:
            request = self.world.Ibarrier()
            while not request.Test():
                time.sleep(0.0005)

    def all_gather(self, value):
        """-> [what rank 0 says, what rank 1 says, ...], on each of them."""
        if not self.world:
            return [value]
        self.meet()
        return self.world.allgather(value)

    def all_reduce(self, array):
        """A NumPy array becomes its sum over all ranks."""
        if self.world:
            from mpi4py import MPI
            self.meet()
            self.world.Allreduce(MPI.IN_PLACE, array)

    def agree(self, **facts):
        """ValueError, on all ranks, where these are not the same on all."""
        said = self.all_gather(facts)
        for rank, other in enumerate(said):
            wrong = [name for name, fact in other.items() if fact != said[0][name]]
            if wrong:
                raise ValueError(f"rank {rank} has other {' and '.join(wrong)} than rank 0.")

    def in_turn(self, function):
        """-> function() of each rank.  Rank 0 calls it first; the others wait, and then find its files."""
        if self.rank:
            self.meet()
        result = function()
        if self.rank == 0:
            self.meet()
        return result

    def part(self, count, rank=None):
        """What a rank, by default this one, takes of so many pieces of work: a slice; it may be empty."""
        rank = self.rank if rank is None else rank
        return slice(count * rank // self.size, count * (rank + 1) // self.size)

    def share(self, inputs, targets, weights):
        """This rank's rows of a step.  A rank without rows takes row 0 with all targets -1, which adds nothing."""
        rows = self.part(len(inputs))
        if rows.start == rows.stop:
            rows = slice(1)
            targets = np.full_like(targets, -1)
        return inputs[rows], targets[rows], None if weights is None else weights[rows]


class Nccl:
    """Sums and gathers arrays over the GPUs of a run by NVIDIA's NCCL, while other kernels work on.  It has a
    stream of its own.  Events make it wait for our kernels' stream, and that for it."""
    def __init__(self, ranks):
        try:
            from cupy import cuda                   # here, and not above: who has one GPU needs no NCCL
            from cupy.cuda import nccl
        except ImportError as error:
            raise ValueError(f"Several GPUs need NVIDIA's NCCL: run `make gpu` ({error}).") from None
        self.cuda = cuda
        self.nccl = nccl
        self.part = ranks.part
        self.size = ranks.size
        address = ranks.all_gather(nccl.get_unique_id())[0]
        try:
            self.communicator = nccl.NcclCommunicator(self.size, address, ranks.rank)
        except nccl.NcclError as error:             # "invalid usage", where two processes have one GPU
            raise ValueError(f"NCCL cannot connect the processes: each needs a GPU of its own ({error}).") from None
        self.stream = cuda.Stream(non_blocking=True)
        self.event = cuda.Event(disable_timing=True)

    def follow(self):
        """Queue: what comes next here waits for all that our kernels' stream has so far."""
        self.event.record()
        self.stream.wait_event(self.event)

    def all_reduce(self, array):
        """Queue: array, of float32, becomes its sum over all GPUs."""
        self.follow()
        self.communicator.allReduce(array.data.ptr, array.data.ptr, array.size, self.nccl.NCCL_FLOAT32,
                                    self.nccl.NCCL_SUM, self.stream.ptr)

    def wait(self):
        """Queue: what comes next in our kernels' stream waits for all that was queued here."""
        self.event.record(self.stream)
        self.cuda.get_current_stream().wait_event(self.event)

    def all_gather(self, array):
        """Queue: of array's first axis each GPU's part reaches all others."""
        self.follow()
        self.nccl.groupStart()
        for rank in range(self.size):
            part = array[self.part(len(array), rank)]
            self.communicator.bcast(part.data.ptr, part.nbytes, self.nccl.NCCL_CHAR, rank,
                                    self.stream.ptr)
        self.nccl.groupEnd()


def find_ranks(gpus):
    """-> the Ranks of this run: those that a launcher has started, or as many as --gpus says (None: one)."""
    launched = [int(os.environ[name]) for name in LAUNCHERS if os.environ.get(name, "").isdecimal()]
    if not launched and gpus and gpus > 1:
        start_under_mpiexec(gpus)
    size = launched[0] if launched else 1
    require(gpus in (None, size), f"--gpus {gpus} does not fit the {size} processes of the launcher.")
    if size == 1:
        return Ranks()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"{MPI_IS_MISSING} ({error}).") from None
    world = MPI.COMM_WORLD
    require(world.size == size, f"the launcher started {size} processes and mpi4py finds {world.size}: they are "
            "of different MPIs.")
    return Ranks(world, world.Split_type(MPI.COMM_TYPE_SHARED).rank)


def run_ranks(run, args):
    """-> run(args, ranks) of this process.  A rank that fails prints its error and aborts all ranks.  If all
    fail with the same error, rank 0 is the first to print it."""
    ranks = find_ranks(args.gpus)
    if ranks.size == 1:
        return run(args, ranks)
    stderr = sys.stderr
    if ranks.rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")             # rank 0 alone prints
    try:
        return run(args, ranks)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        code = 130
    except BaseException as error:
        time.sleep(min(ranks.rank, 1))
        sentence = explain(error) or "".join(traceback.format_exception(error))
        print(f"error: rank {ranks.rank}: {sentence}", file=stderr)
        code = 2
    time.sleep(0.3)                                 # until mpiexec has passed the word on
    ranks.world.Abort(code)


def connect(training):
    """From here on the model's gradient is the sum over all ranks; ValueError where they are not alike."""
    ranks = training.ranks
    if ranks.size > 1:
        code = list(map(checkpoint.checksum, sorted(glob.glob(f"{os.path.dirname(__file__)}/*.[pc][yu]"))))
        ranks.agree(code=code, versions=(sys.version, np.__version__), **vars(training.settings),
                    weights=weights_checksum(training.model))
        training.model.communicator = Nccl(ranks) if training.settings.device == "gpu" else ranks


def weights_checksum(model):
    return zlib.crc32(model.read(model.flat_params))


# ------------------------------------------------------------------------------------------------------------
# 10. The script
# ------------------------------------------------------------------------------------------------------------
def pretraining(training, tokens, val):
    """-> the Job of a run on these tokens."""
    settings = training.settings
    tokenizer = training.tokenizer
    T = training.model.config.context
    K = training.model.config.predict

    def batch(step):
        first = windows_before(step, settings, T)
        windows = windows_before(step + 1, settings, T) - first
        starts = window_starts(settings.seed, first, windows, len(tokens), T, K)
        inputs, targets = get_batch(tokens, starts, T, K)
        return inputs, targets, count_targets(targets, T, K), None

    def evaluate(step):
        result = validate(training, val, EVAL_TOKENS)
        print(f"           validation loss {in_words(result)}")
        last = step == settings.steps
        if last and max(map(len, val.values())) > EVAL_TOKENS + T:
            result["all"] = validate(training, val, math.inf)
            print(f"           on all that is held out {in_words(result['all'])}")
        if training.ranks.rank == 0:
            texts = [PROMPTS[i % len(PROMPTS)] for i in range(settings.num_samples)]
            # a tokenizer may lack all bytes of a text
            prompts = [tokenizer.encode(text) or [tokenizer.special_id(*TEXT_ENDS)] for text in texts]
            drawn = draw_samples(training, prompts, SAMPLE_TOKENS)
            result["samples"] = [text + sample for text, sample in zip(texts, drawn)]
            print_samples(map(repr, texts), result["samples"], last)
        return result

    return Job(batch, evaluate, bits_a_byte(tokenizer, tokens[:1 << 20]))


def run(args, ranks):
    """-> exit code."""
    given = given_options(args)
    name = f"{basename(args.base)}-more" if args.base else args.preset or "small"
    out = args.out or f"out/{name}"
    begun = continue_run(given, out, ranks) if args.resume else begin_run(given, out, ranks)
    if begun is None:
        return 0
    training, tokens, val = begun
    connect(training)
    return train(training, pretraining(training, tokens, val), Stop())


def continue_run(given, out, ranks):
    """-> (Training, tokens, val), or None where there is nothing left to do, or a dry run."""
    training = resume(given, out, "train.py", ranks)
    settings = training.settings
    if is_finished(training):
        return None
    if given["dry_run"]:
        return dry_run(training.model.config, settings, ranks)
    base = out if training.state.get("base") else None      # the run's own copy of the base's tokenizer
    _, tokens, val, key = ranks.in_turn(lambda: prepare(settings.data, training.model.config.vocab, base))
    if key != settings.tokens_key:
        raise ValueError(f"{', '.join(settings.data)}: not what {out} began with.")
    return training, tokens, val


def begin_run(given, out, ranks):
    """-> (Training, tokens, val), or None after a dry run."""
    base = given.get("base")
    preset = given.get("preset") or (describe(base)[0] if base else "small")
    config = choose_sizes(given, preset)
    defaults = dict(DEFAULTS[preset])
    if given.get("optimizer") == "adamw":
        defaults["lr"] /= 2
    if base:                            # half the rate learns a new text as well, and forgets less of the base
        defaults["lr"] /= 2
    settings = make_settings(given, preset, config, defaults, ranks)
    if given["dry_run"]:
        return dry_run(config, settings, ranks)
    if not settings.data:
        settings.data = ranks.in_turn(lambda: find_corpus(preset, END_OF_TEXT))
    tokenizer, tokens, val, settings.tokens_key = ranks.in_turn(
        lambda: prepare(settings.data, config.vocab, base))
    window_count(len(tokens), config.context, config.predict)
    require(min(map(len, val.values())) > config.predict,
            f"{', '.join(settings.data)}: the end of a text, which is held out for validation, is too short: it needs "
            f"more than {config.predict} tokens.")
    cap_steps(given, settings, len(tokens))
    training = new_training("train.py", out, config, tokenizer, settings, ranks, base)
    engine = f"{settings.threads} threads" if settings.device == "cpu" else f"GPU {settings.precision}"
    if ranks.size > 1:
        engine = f"{ranks.size} x {engine}"
    print(f"{base or preset}: {model_cpu.param_count(config):,} parameters, {settings.steps} steps of "
          f"{settings.batch_tokens:,} tokens, {engine}; corpus {', '.join(settings.data)}: "
          f"{len(tokens):,} tokens to train on, {sum(map(len, val.values())):,} to validate.")
    return training, tokens, val


def evaluate_folder(given):
    """Print what the model in a folder reaches on the files of --data."""
    require("data" in given, "--evaluate needs --data: texts, or pairs of sentences (./fetch_data.sh blimp).")
    given.setdefault("device", "cpu" if model_gpu.why_no_gpu() else "gpu")
    out = given["evaluate"]
    config = checkpoint.read_config(out, given.get("context"))
    settings = make_settings(given, "big", config, DEFAULTS["big"], Ranks())    # the batch, threads, precision
    options = {**model_options(settings), "training": False}
    loaded = checkpoint.load(out, model_gpu.pick(settings.device), options, config.context)
    training = Training(*loaded, settings, {}, out, Ranks())
    for path in given["data"]:
        if path.endswith(".jsonl"):
            evaluate_pairs(training, path)
        else:
            evaluate_text(training, path)


def main(argv):
    args = parse_arguments(argv)
    if args.plot is not None:
        return checkpoint.plot(args.plot)
    if args.evaluate is not None:
        return evaluate_folder(given_options(args))
    return run_ranks(run, args)


if __name__ == "__main__":
    run_script(main, to_the_end=True)
