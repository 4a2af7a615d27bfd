"""train.py: pretraining.  Text in, a checkpoint folder out.

    python train.py                          the small model on data/, or on the English inside Python
    python train.py small --data play.txt    on your own text
    python train.py --resume                 go on with an interrupted run: the same bits as if never stopped
    python train.py --resume --steps 2000    go on with a finished one
    python train.py --dim 192 --layers 6     sizes of your own: a preset is only where they start
    python train.py --base out/theirs        go on from the weights of a model, ours or any plain Llama
    python train.py --plot out/small         draw the loss curves
    python train.py big --gpus 4             on several GPUs; or the same under torchrun, mpirun, srun

Read before it: tokenizer.py, model_cpu.py.  The order of this file is the order of a run:

    0. settings    what a run is; most are options, and what an option takes is what a checkpoint may hold
    1. corpus      which files; the last part of each is held out for validation
    2. tokens      files -> tokenizer, a base's or one made of them -> data/*.bin, uint16, memory-mapped
    3. batches     a pure function of (seed, step): no reader state, so a resumed run sees the same data
    4. schedule    warmup and cosine
    5. evaluation  validation loss in nats a token and bits a byte; samples
    6. progress    one line a step on the terminal
    7. the run     accumulate, update, evaluate, save; signals; what stops it

Why a resumed run is exact: the checkpoint holds weights, moments and step of one moment; the batch is a pure
function of (seed, step), so no reader and no random generator has a state to restore; threads and
micro-batch, which fix the order of sums, are settings of the run and may not change; and the log is cut back
to the checkpoint's step.

What it does not do: no shuffling of documents, no masks at document boundaries (the end-of-text token is what
the model learns them from), no fine-tuning.  Of a --base, the sizes and the tokenizer are as they are, and
its optimizer's moments are not read: it begins with a warmup, at step 0, and half the rate.
"""
import argparse
import ast
import collections
import contextlib
import dataclasses
import datetime
import fcntl
import functools
import glob
import hashlib
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
import zlib

import model_cpu            # first: it says what to do where NumPy is missing
import checkpoint
import model_gpu
import numpy as np
from checkpoint import Ranks
from model_cpu import CONFIGS, OPTIMIZERS, generate
from script import (Parser, available_cores, check_plain, number_type, printable, read_chunk, refusing,
                    require, run_script, show_progress, whole_number, write_file)
from tokenizer import END_OF_TEXT, SEPARATOR, TEXT_ENDS, Tokenizer


# ------------------------------------------------------------------------------------------------------------
# 0. Settings
# ------------------------------------------------------------------------------------------------------------
MOST_BATCH = 1 << 24    # tokens a step; the largest batch that anybody has reported (Llama 3) is as large


def parse_size(text):
    """12GB, 800MB, 1.5GiB or a number of bytes -> bytes."""
    match = re.fullmatch(r"([0-9.]+)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))


memory_size = number_type(parse_size, lambda size: 1 <= size < 1e18, "a size such as 12GB or 800MB")


def setting(kind, meaning=None):
    """A field of Settings.  kind: the argparse type of its option, or a tuple of choices; meaning: the
    option's help, None for what is no option of both train.py and sft.py."""
    return dataclasses.field(metadata={"kind": kind, "meaning": meaning})


@dataclasses.dataclass
class Settings:
    """What a run is: with the same settings, files and code, every loss is the same, bit for bit."""
    preset: str = setting(tuple(CONFIGS))
    steps: int = setting(whole_number(1, 1 << 63))                  # updates
    batch_tokens: int = setting(whole_number(1, MOST_BATCH), "tokens a step, a multiple of the context")
    # a CUDA grid is no higher
    micro_batch: int = setting(whole_number(1, 65535), "windows a forward/backward (default: as many as pay)")
    optimizer: str = setting(OPTIMIZERS, "muon (the default) for the layers' matrices, or adamw for all")
    lr: float = setting(number_type(float, lambda x: 0 < x < math.inf, "a number above 0"), "peak rate")
    warmup: int = setting(whole_number(0), "steps of linear warmup")
    decay: float = setting(number_type(float, lambda x: 0 <= x < 1, "at least 0 and below 1"),
                           "weight decay, on matrices (default 0.1)")
    clip: float = setting(number_type(float, lambda x: x > 0, "a number above 0"),      # inf: none
                          "largest gradient norm for AdamW (default 1)")
    mtp_weight: float = setting(number_type(float, lambda x: 0 <= x < math.inf, "a number of at least 0"),
                                "weight of the further prediction heads in the loss")
    seed: int = setting(whole_number(0, 1 << 63), "of all that is drawn at random (default 0)")
    eval_every: int = setting(whole_number(1), "steps")
    save_every: int = setting(whole_number(1), "steps")
    # slices of a batch, a core each; another number sums in another order
    threads: int = setting(whole_number(1, 1024), "cores to use (default: all)")
    device: str = setting(("auto", "cpu", "gpu"), "auto (the default): the CPU for small, else the GPU")
    precision: str = setting(model_gpu.PRECISIONS, "on a GPU (default: the best that it has)")
    matmul: str = setting(("cublas", "ours"), "on a GPU (default cublas)")
    memory_limit: int = setting(memory_size, "of the GPU, such as 12GB: stay within it")    # bytes, or None
    data: list              # the corpus files
    tokens_key: str = ""    # fingerprint of corpus and tokenizer, filled in when the tokens are made

    def __post_init__(self):
        """ValueError for what no option gives, as in a checkpoint that was altered."""
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), field.metadata.get("kind")
            good = value is None and field.name in ("memory_limit", "data")
            with contextlib.suppress(argparse.ArgumentTypeError):
                good |= (value in kind if isinstance(kind, tuple) else kind(str(value)) == value if kind else
                         type(value) is field.type and all(type(part) is str for part in value))
            require(good, f"the setting {field.name} cannot be {value!r:.40}.")


def add_run_options(parser, sizes, data):
    """The options that pretraining and fine-tuning share.  sizes: those of SIZES that are options, too; data:
    what the files of --data are."""
    parser.add_argument("preset", nargs="?", choices=CONFIGS, help="the model's size (default small)")
    parser.add_argument("--base", type=os.path.normpath, metavar="DIR",
                        help="the model to begin with, ours or any plain Llama (sft.py: default out/PRESET)")
    parser.add_argument("--data", nargs="+", type=os.path.normpath, metavar="FILE", help=data)
    parser.add_argument("--out", metavar="DIR", help="to write: default out/PRESET, BASE-more, BASE-sft")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    for name in sizes:
        parser.add_argument("--" + name.replace("_", "-"), type=whole_number(1, 1 << 20), metavar="N",
                            help="of the model, in place of the preset's (of a base: the context alone)")
    parser.add_argument("--gpus", type=whole_number(1, 1024), metavar="N", help="a process each (default 1)")
    parser.add_argument("--timeout", type=whole_number(1), default=300, help="seconds that ranks wait (300)")
    for field in dataclasses.fields(Settings):
        if meaning := field.metadata.get("meaning"):
            kind = field.metadata["kind"]
            how = {"choices": kind} if isinstance(kind, tuple) else {"type": kind, "metavar": "N"}
            parser.add_argument("--" + field.name.replace("_", "-"), help=meaning, **how)


# Chosen by short runs; docs/notes.md says what else was tried.  lr is Muon's; AdamW takes half of it.
DEFAULTS = {
    "small": dict(steps=800, batch_tokens=2048, lr=4e-3, warmup=40, eval_every=200, save_every=200),
    "medium": dict(steps=4000, batch_tokens=8192, lr=3e-3, warmup=200, eval_every=500, save_every=500),
    "big": dict(steps=48000, batch_tokens=32768, lr=2.4e-3, warmup=300, eval_every=500, save_every=2000),
}
SIZES = ("dim", "heads", "kv_heads", "layers", "context", "vocab")         # of Config, each an option
# readings of a text: big learned nothing of use from a fifth of 290 MB, nor small from a ninth of 0.3 MB
MOST_EPOCHS = {"small": 8, "medium": 4, "big": 4}
EVAL_TOKENS = 1 << 16    # an evaluation on the way reads at most this many tokens of each kind held out
SAMPLE_TOKENS = 80
PROMPTS = ("\n", "The", "What is")         # no space at an end: it belongs to the token of the next word
# dense bf16 rates by datasheet, TFLOP/s; TF32 has half
BF16_TFLOPS = (("H100 PCIe", 756), ("H100", 989), ("H200", 989), ("A100", 312), ("L40S", 362), ("L40", 181),
               ("L4", 121), ("A10", 125), ("RTX 4090", 165), ("RTX 3090", 71))


# ------------------------------------------------------------------------------------------------------------
# 1. The corpus
# ------------------------------------------------------------------------------------------------------------
def find_corpus(preset):
    """The files to train on when none are named: for the larger models data/books*.txt and data/web*.txt;
    else what `fetch_data.sh tiny` has brought; else the text inside Python."""
    large = sorted(glob.glob("data/books*.txt") + glob.glob("data/web*.txt"))
    if preset != "small" and large:
        return large
    if os.path.exists("data/tiny.txt"):
        return ["data/tiny.txt"]
    path = os.path.join("data", "python-{}.{}.txt".format(*sys.version_info))
    if not os.path.exists(path):
        print("No corpus in data/ (./fetch_data.sh brings one): taking the English of Python.", flush=True)
        write_python_corpus(path)
    return [path]


def python_docstrings():
    """Yield [(qualified name, docstring), ...] of each module of the standard library: the module's own
    first, then those of its classes and functions as they stand in the file."""
    library = os.path.dirname(os.__file__)
    for folder, folders, names in os.walk(library):
        folders[:] = sorted(set(folders) - {"test", "tests", "idle_test", "site-packages", "dist-packages",
                                            "lib2to3"})
        for name in sorted(name for name in names if name.endswith(".py")):
            path = os.path.join(folder, name)
            module = os.path.relpath(path, library)[:-3].replace(os.sep, ".").removesuffix(".__init__")
            with contextlib.suppress(SyntaxError, ValueError), open(path, encoding="utf-8") as file:
                yield list(docstrings_below(ast.parse(file.read()), module))


def docstrings_below(node, name):
    """Yield (name, docstring) of a syntax tree's node, which has that name, and of all definitions in it,
    depth first."""
    definition = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(node, (ast.Module, *definition)) and (docstring := ast.get_docstring(node)):
        yield name, docstring
    for child in ast.iter_child_nodes(node):
        yield from docstrings_below(child, f"{name}.{child.name}" if isinstance(child, definition) else name)


def is_prose(paragraph):
    """Whether a paragraph is long enough, almost all letters, and no example of code."""
    letters = sum(char.isalpha() or char in " ,.;:'-" for char in paragraph)
    return len(paragraph) >= 40 and letters > 0.9 * len(paragraph) and ">>>" not in paragraph


def write_python_corpus(path):
    """About 2 MB of English that every interpreter carries: the language reference (pydoc_data.topics) and
    the docstrings of the standard library.  Prose paragraphs only, each once; a document a topic or
    module."""
    import pydoc_data.topics
    documents, seen, kept = [text for _, text in sorted(pydoc_data.topics.topics.items())], set(), []
    documents += ["\n\n".join(text for _, text in docstrings) for docstrings in python_docstrings()]
    for document in documents:
        paragraphs = dict.fromkeys(" ".join(part.split()) for part in re.split(r"\n\s*\n", document))
        prose = [paragraph for paragraph in paragraphs if is_prose(paragraph) and paragraph not in seen]
        seen.update(prose)
        kept.append("\n\n".join(prose))
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    write_file(path, f"\n\n{END_OF_TEXT}\n\n".join(filter(None, kept)).encode())


def split_point(path):
    """Byte at which the validation part of a file starts: the last 1%, but at least 100 kB, and at most 10%
    and 4 MB (about 1M tokens), cut at the document boundary nearest to that, else at the nearest line, else
    after an ASCII character. Everything before is for training, so no document is in both parts."""
    size = os.path.getsize(path)
    wanted = min(max(size // 100, 100_000), size // 10, 4_000_000)
    low = size - min(size // 10, 32_000_000)        # the cut may move from here on
    tail = read_chunk(path, low, size)
    end = len(tail.rstrip())                        # something must be left behind the cut
    target = min(len(tail) - wanted, end - 1)
    for cuts in ((match.end() for match in SEPARATOR.finditer(tail)), cuts_beside(tail, target, b"\n"),
                 cuts_beside(tail, target, bytes(range(128)))):
        if cuts := [cut for cut in cuts if 0 < cut < end]:
            return low + min(cuts, key=lambda cut: abs(len(tail) - wanted - cut))
    return size - wanted


def cuts_beside(text, target, characters):
    """Offsets after the last of these single-byte characters before `target`, and after the first from there
    on; 0, or an offset beyond the text, where there is none."""
    others = bytes(set(range(256)) - set(characters))
    return len(text[:target].rstrip(others)), len(text) - len(text[target:].lstrip(others)) + 1


def check_corpus(paths):
    """ValueError, in one sentence, for files that cannot be a corpus."""
    for path in paths:
        require(os.path.isfile(path), f"{path} is not a file; --data takes text files.")
        start = read_chunk(path, 0, 8192)
        require(start, f"{path} is empty; there is nothing to learn from it.")
        require(b"\0" not in start, f"{path} is a binary file (it holds NUL bytes); --data takes text files.")


# ------------------------------------------------------------------------------------------------------------
# 2. Tokens
# ------------------------------------------------------------------------------------------------------------
def file_hash(path):
    return hashlib.sha256(np.memmap(path, mode="r")).hexdigest()


def kind(path):
    """What validation is reported by: the letters that a file's name begins with, so that books_00.txt and
    books_01.txt are one kind, and web_wikipedia.txt another."""
    stem = os.path.splitext(os.path.basename(path))[0]
    return re.match(r"[A-Za-z]*", stem)[0].lower() or stem


def tokenizer_sample(parts, most=100_000_000):
    """Of (path, start, end) parts of files, what a tokenizer is trained on: everything, or pieces of 1 MB
    evenly spread that make up `most` bytes. Which pairs are frequent is known long before gigabytes are
    read."""
    total, piece = sum(end - start for _, start, end in parts), 1_000_000
    if total <= most:
        return parts
    stride = piece * total // most
    return [(path, place, min(place + piece, end)) for path, start, end in parts
            for place in range(start, end, stride)]


def prepare(paths, vocab, base=None):
    """Corpus -> (tokenizer, train, val, key).  train: uint16 token ids, memory-mapped; val: dict of kind ->
    such ids, held out.  base: the folder of a model whose tokenizer to take; else one is trained.  ValueError
    for a file that is no text.

    What is made is kept in data/, named by a fingerprint of the contents, and made only once."""
    check_corpus(paths)
    os.makedirs("data", exist_ok=True)
    with open(os.path.join("data", "prepare.lock"), "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)       # a second run waits here, and then finds everything made
        return make_tokens(paths, vocab, base)


def map_tokens(path):
    """A file of uint16 ids, memory-mapped; an empty one cannot be."""
    check_plain(path)
    count = os.path.getsize(path) // 2
    return np.memmap(path, np.dtype("<u2"), mode="r", shape=(count,)) if count else np.zeros(0, "<u2")


def make_tokens(paths, vocab, base):
    """The work of prepare, for one run at a time: two would write to the same files."""
    content = "".join(file_hash(path) for path in paths)
    corpus_key = hashlib.sha256(f"{content} {vocab}".encode()).hexdigest()[:12]
    cuts = [(path, split_point(path), os.path.getsize(path)) for path in paths]
    tokenizer_path = os.path.join("data", f"tokenizer-{vocab}-{corpus_key}{'-base' * bool(base)}.json")
    if base:
        Tokenizer.load(os.path.join(base, "tokenizer.json")).save(tokenizer_path)
    elif not os.path.exists(tokenizer_path):
        print(f"Training a tokenizer of {vocab} tokens on {', '.join(paths)}.", flush=True)
        sample = tokenizer_sample([(path, 0, cut) for path, cut, _ in cuts])
        Tokenizer.train_files(sample, vocab, progress=show_progress("words counted:")).save(tokenizer_path)
    tokenizer = Tokenizer.load(tokenizer_path)
    made_of = corpus_key, file_hash(tokenizer_path), *map(kind, paths)
    key = hashlib.sha256(os.fsencode(" ".join(made_of))).hexdigest()[:12]

    def tokens(part, ranges):
        """The ids of these ranges, from a file whose name ends in its checksum."""
        name = os.path.join("data", f"{part}-{key}")
        if not glob.glob(f"{glob.escape(name)}-*.bin"):
            tokenizer.encode_files(ranges, f"{name}.new", progress=show_progress(f"{part} tokens:"))
            os.replace(f"{name}.new", f"{name}-{zlib.crc32(map_tokens(f'{name}.new')):08x}.bin")
        path = glob.glob(f"{glob.escape(name)}-*.bin")[0]
        ids = map_tokens(path)
        require(path.endswith(f"-{zlib.crc32(ids):08x}.bin"),
                f"{path} is damaged: its checksum is wrong. Delete it, and it is made anew.")
        return ids

    train = tokens("train", [(path, 0, cut) for path, cut, _ in cuts])
    val = {name: tokens(f"val-{name}", [(path, cut, size) for path, cut, size in cuts if kind(path) == name])
           for name in dict.fromkeys(map(kind, paths))}
    return tokenizer, train, val, key


# ------------------------------------------------------------------------------------------------------------
# 3. Batches: a pure function of (seed, step)
# ------------------------------------------------------------------------------------------------------------
def window_count(size, T, K):
    """Windows an epoch.  A window is T inputs and T+K-1 targets, T+K tokens; windows stand at stride T, on a
    grid that may be shifted by up to T-1 tokens."""
    require(size >= T + K, f"the corpus is too short: {size} tokens to train on, and a window has {T + K}.")
    return max(1, (size - K - T + 1) // T)


@functools.lru_cache(maxsize=4)
def epoch_order(seed, epoch, size, T, K):
    """-> (count,) where in the tokens each window starts, in the epoch's random order."""
    rng, count = np.random.default_rng([seed, epoch]), window_count(size, T, K)
    shift = rng.integers(0, min(T, size - K - count * T + 1))
    return shift + T * rng.permutation(count)


def window_starts(seed, step, windows, size, T, K):
    """Step s (from 0) takes windows s*W to (s+1)*W-1 of the epochs' orders laid end to end."""
    count = window_count(size, T, K)
    numbers = range(step * windows, (step + 1) * windows)
    return [int(epoch_order(seed, i // count, size, T, K)[i % count]) for i in numbers]


def get_batch(tokens, starts, T, K):
    """-> inputs (W,T) and targets (W,T+K-1): the target of head k at position t is the token at t+1+k."""
    windows = np.stack([tokens[start:start + T + K] for start in starts]).astype(np.int64)
    return windows[:, :T], windows[:, 1:]


# ------------------------------------------------------------------------------------------------------------
# 4. The schedule
# ------------------------------------------------------------------------------------------------------------
def learning_rate(step, settings):
    """Linear warmup to settings.lr, then a cosine down to a tenth of it (Loshchilov & Hutter 2017).  step
    counts from 0."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - 1 - settings.warmup)
    return settings.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


# ------------------------------------------------------------------------------------------------------------
# 5. Evaluation and samples
# ------------------------------------------------------------------------------------------------------------
def token_bytes(tokenizer):
    """(V,) how many bytes of text each id stands for; a special token is no text, 0."""
    special = set(tokenizer.special.values())
    return np.array([0 if i in special else len(token) for i, token in enumerate(tokenizer.tokens)])


def held_out_loss(model, sizes, inputs, targets):
    """Head 0 on inputs (B,T), targets (B,T+K-1) -> [nats, tokens counted, bytes of these], sums.
    sizes: token_bytes of the tokenizer."""
    wanted = targets[:, :inputs.shape[1]]
    wanted = wanted[wanted >= 0]
    loss = float(model.forward(inputs, targets)[0])
    return np.array([loss * len(wanted), len(wanted), sizes[wanted].sum()])


def in_units(sums):
    """Sums of what held_out_loss returns -> [nats a token, bits a byte].  Bits a byte do not depend on the
    tokenizer: models can be compared by them."""
    nats, counted, size = sums
    return [nats / max(counted, 1), nats / math.log(2) / max(size, 1)]


def even_windows(val, T, K, micro_batch, most, ranks=Ranks()):
    """Yield batches of windows spread evenly over val, of together at most `most` tokens; none if val has not
    even K+1 tokens.  The ranks take turns: each yields its own batches."""
    T = min(T, len(val) - K)
    windows = max(1, min(most, len(val) - K) // T) if T > 0 else 0
    starts = [i * ((len(val) - K) // windows) for i in range(windows)]
    for i in range(micro_batch * ranks.rank, len(starts), micro_batch * ranks.size):
        yield get_batch(val, starts[i:i + micro_batch], T, K)


def validate(model, tokenizer, val, micro_batch, most=math.inf, progress=lambda *done: None, ranks=Ranks()):
    """-> {"val_loss": nats a token, "val_bpb": bits a byte, "val": {kind: [both]}} on what is held out, at
    most `most` tokens of each kind; {} if there is nothing.  progress(done, total) is called as tokens are
    done.  ranks: share the work out."""
    sizes, c, sums, done = token_bytes(tokenizer), model.config, {}, 0
    total = sum(min(most, len(tokens)) for tokens in val.values())
    for name, tokens in val.items():
        part = sums[name] = np.zeros(3)
        for inputs, targets in even_windows(tokens, c.context, c.predict, micro_batch, most, ranks):
            part += held_out_loss(model, sizes, inputs, targets)
            done += inputs.size * ranks.size
            progress(min(done, total), total)
        ranks.all_reduce(part)
    progress(total, total)                      # what fills no window is left out
    found = {name: in_units(part) for name, part in sums.items() if part[1]}
    loss, bpb = in_units(sum(sums.values(), np.zeros(3)))
    return {"val_loss": loss, "val_bpb": bpb, "val": found} if found else {}


def in_words(result):
    """validate's dict as text."""
    kinds = "; ".join(f"{name} {loss:.4f}, {bpb:.4f}" for name, (loss, bpb) in result["val"].items())
    both = f"{result['val_loss']:.4f}, {result['val_bpb']:.4f} bits/byte"
    return both + (f" ({kinds})" if len(result["val"]) > 1 else "")


def sample_text(model, tokenizer, ids, seed, most=SAMPLE_TOKENS):
    """How the model goes on after these ids, up to a special token, as text."""
    ids = ids or [tokenizer.special_id(*TEXT_ENDS)]        # a tokenizer may lack the bytes of a text
    return tokenizer.decode([*generate(model, ids, 0.8, top_k=50, seed=seed, vocab=tokenizer.vocab_size,
                                       stop=set(tokenizer.special.values()), most=most)])


def print_samples(titles, samples, whole):
    """What an evaluation has drawn, each below its title; unless whole, the first alone and on one line."""
    if whole:
        for title, sample in zip(titles, samples):
            print(f"--- {printable(title)}\n{printable(sample)}", flush=True)
    else:
        print("           " + repr(samples[0])[1:-1], flush=True)


# ------------------------------------------------------------------------------------------------------------
# 6. Progress
# ------------------------------------------------------------------------------------------------------------
def peak_flops(name, precision):
    """The dense matrix rate of the GPU of this name by its vendor's datasheet, FLOP/s; None where it is not
    known."""
    rate = next((rate for part, rate in BF16_TFLOPS if part in name), 0)
    return rate * {"bf16": 1e12, "tf32": 0.5e12}.get(precision, 0) or None


def flops_per_token(config):
    """Of training, as usually counted: 6 for each parameter that is in a product (2 forward, 4 backward),
    which is all but gains and an embedding that is not the head, too, and 6 L C T for causal attention."""
    matrices = sum(math.prod(shape) for name, shape in model_cpu.param_table(config)
                   if len(shape) == 2 and (config.tied or name != "embed"))
    return 6 * matrices + 6 * config.layers * config.dim * config.context


def print_step(settings, step, loss, bytes_per_token, lr, norm, tokens_per_second, peak, left, last=False):
    """The progress line: on a terminal rewritten in place, and without its last parts where they do not fit,
    or every step would leave a line; elsewhere the first step and every tenth on lines of their own.  peak:
    the share of the GPU's, or None."""
    left = str(datetime.timedelta(seconds=int(left))).removeprefix("0:")        # 02:14, or 1:02:14
    parts = [f"step {step:5d}/{settings.steps}", f"loss {loss:7.4f}",
             f"{loss / math.log(2) / bytes_per_token:.3f} bits/byte", f"{left} left",
             f"{tokens_per_second:8,.0f} tokens/s", f"norm {norm:6.2f}", f"lr {lr:.2e}"]
    if peak is not None:
        parts.append(f"{peak:.0%} of peak")
    if sys.stdout.isatty():
        while len("  ".join(parts)) >= shutil.get_terminal_size().columns and len(parts) > 1:
            parts.pop()
        print("\r" + "  ".join(parts) + "\033[K", end="\n" if last else "", flush=True)
    elif last or step == 1 or step % 10 == 0:
        print("  ".join(parts), flush=True)


# ------------------------------------------------------------------------------------------------------------
# 7. The run
# ------------------------------------------------------------------------------------------------------------
class Stop:
    """Ctrl-C, SIGTERM, or SIGHUP of a terminal that is closed ask for an end after the step under way; a
    second one leaves at once.  What is ignored when the script starts, as SIGHUP under nohup, stays
    ignored."""
    def __init__(self):
        self.signal, self.agreed = None, 0              # agreed: how many ranks have been asked
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.ask)

    def ask(self, number, frame):
        if self.signal:
            os._exit(128 + number)
        self.signal = number
        # not print, which may be under way; and nobody may be there to read
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), b"\nFinishing the step, then saving; once more to leave at once.\n")


# What pretraining and fine-tuning do not share; train() below is the rest.  batch: step, from 0 -> inputs
# (B,T), targets (B,T+K-1), a pure function, so that a run can be resumed; evaluate: step, from 1 -> dict for
# log.jsonl, and prints what it found; bytes_per_token: of the text learned from, for the progress line
Job = collections.namedtuple("Job", "batch evaluate bytes_per_token ranks", defaults=[Ranks()])


def training_step(model, settings, inputs, targets, lr, ranks=Ranks(), stop=None, look=lambda: True):
    """One update -> a function that waits for its (losses (K,), norm of the gradient): on a GPU the host runs
    ahead.  Of several ranks: losses (K+1,), in the end the number of those that were asked to stop.  look():
    at the step before, while the first forward is under way and before its gradient is overwritten; where
    that says no, this step ends here, with None."""
    T = inputs.shape[1]
    # a micro-batch is bounded by its tokens
    rows = max(1, settings.micro_batch * model.config.context // T)
    # the targets of the whole step, so that rows and ranks change only rounding
    counted = model_cpu.count_targets(targets, T, model.config.predict)
    inputs, targets = ranks.share(inputs, targets)
    B, losses = len(inputs), 0.0
    for i in range(0, B, rows):
        losses = losses + model.forward(inputs[i:i + rows], targets[i:i + rows], counted)
        if i == 0 and not look():
            return None
        model.backward(last=i + rows >= B)
    if ranks.size > 1:
        losses = np.concatenate([losses, np.full_like(losses[:1], bool(stop and stop.signal))])
        model.sums.all_reduce(losses)
    return model.later(losses, model.update(lr, decay=settings.decay, clip=settings.clip))


def connect(ranks, model, settings):
    """From here on the model's gradient is the sum over all ranks; ValueError where they are not alike."""
    if ranks.size > 1:
        here = os.path.dirname(os.path.abspath(__file__))
        ranks.agree(code=[file_hash(path) for path in sorted(glob.glob(os.path.join(here, "*.[pc][yu]")))],
                    **dataclasses.asdict(settings), weights=zlib.crc32(model.read(model.flat_params)))
        model.sums = checkpoint.Nccl(ranks) if settings.device == "gpu" else ranks


def first_bad_tensor(model):
    """Names it, in the order of the parameter table; np.isfinite serves NumPy's arrays and CuPy's.
    Parameters come first: a bad one makes all gradients bad."""
    for what, views in (("parameter", model.params), ("gradient", model.grads)):
        for name, view in views.items():
            if not bool(np.isfinite(view).all()):
                return f"the first {what} that is not finite is {name}"
    return "every gradient is finite; the loss, or the sum of the gradient's squares, overflowed"


def save(out, model, tokenizer, settings, state):
    """The checkpoint, with all that a resumed run needs to know."""
    everything = {**state, "settings": dataclasses.asdict(settings)}
    checkpoint.save(out, model, tokenizer, everything, chat=state["script"] == "sft.py")


def new_run(script, out, config, tokenizer, settings, ranks, base=None):
    """-> (model, state) of a run that begins, with a base's weights or random ones, after its first save:
    from then on there is something to resume."""
    engine, options = model_gpu.pick(settings.device), model_options(settings)
    config = dataclasses.replace(config, mtp_weight=settings.mtp_weight)
    if base:
        model, _ = checkpoint.load(base, engine, options, config.context)
        model.config, model.step = config, 0
    else:
        model = engine.Model(config, settings.seed, **options)
    state = {"script": script, "tokens": 0, "seconds": 0.0, "ranks": ranks.size, "base": base}
    if ranks.rank == 0:
        require(not (base and os.path.exists(out) and os.path.samefile(base, out)),
                f"--out {out} is the base itself; name another folder for the model made from it.")
        checkpoint.take(out)
        checkpoint.set_aside(out)
        save(out, model, tokenizer, settings, state)
    return model, state


def train(model, tokenizer, settings, out, state, stop, job):
    """Run from model.step to settings.steps -> exit code, 0 when the run is finished.  state: a dict of the
    "tokens" and "seconds" spent so far and the "script" that this is."""
    np.seterr(all="ignore")    # a number that is not finite is looked for below, and named
    ranks, began, first, before = job.ranks, time.monotonic(), model.step, dict(state)
    log = checkpoint.Log(out, model.step) if ranks.rank == 0 else None
    pauses = 0.0                                        # seconds spent on evaluating and saving
    peak = peak_flops(model_gpu.gpu_name(), settings.precision) if settings.device == "gpu" else None

    def report(step, tokens, numbers, lr, last=False, saving=False):
        """Wait for a step's numbers, log and print them -> whether they are finite; saving: the weights, too.
        last: before a pause."""
        with ranks.waiting():
            losses, norm = numbers()
            losses, norm = [float(loss) for loss in losses], float(norm)
        seconds = time.monotonic() - began
        if ranks.size > 1:
            stop.agreed = losses.pop()
        weights = model.read(model.flat_params) if saving else 0.0
        if not all(np.isfinite(each).all() for each in (losses, norm, weights)):
            print(f"\nerror: step {step} is not finite (loss {losses[0]}, gradient norm {norm}): "
                  f"{first_bad_tensor(model)}. {out} keeps its last save. Try a lower --lr.", file=sys.stderr)
            return False
        state.update(tokens=tokens, seconds=before["seconds"] + seconds)
        if log:
            log.write(step=step, loss=losses[0], losses=losses, lr=lr, grad_norm=norm, tokens=tokens,
                      seconds=round(state["seconds"], 3))
        rate = (tokens - before["tokens"]) / (seconds - pauses)
        print_step(settings, step, losses[0], job.bytes_per_token, lr, norm, rate,
                   rate * flops_per_token(model.config) / (peak * ranks.size) if peak else None,
                   (seconds - pauses) / (step - first) * (settings.steps - step), last)
        return True

    waiting, tokens = None, state["tokens"]    # waiting: the step whose numbers have not been read yet
    for step in range(first + 1, settings.steps + 1):
        (inputs, targets), lr = job.batch(step - 1), learning_rate(step - 1, settings)
        tokens += inputs.size
        look = functools.partial(report, *waiting) if waiting else lambda: True
        numbers = training_step(model, settings, inputs, targets, lr, ranks, stop, look)
        if not numbers:
            return 1
        # at first, when the loss falls fastest, evaluations stand at powers of two
        evaluating = (step % settings.eval_every == 0 or step == settings.steps
                      or 16 <= step < settings.eval_every and step & (step - 1) == 0)
        # several ranks all stop after the step by which all know
        stopping = stop.signal if ranks.size == 1 else stop.agreed
        saving = stopping or step % settings.save_every == 0 or step == settings.steps
        waiting = step, tokens, numbers, lr
        if settings.device == "gpu" and not (evaluating or saving):     # it works on this step still
            continue
        if not report(*waiting, last=evaluating or saving, saving=saving):
            return 1
        waiting, paused = None, time.monotonic()
        record = job.evaluate(step) if evaluating else None
        if evaluating and log and log.write(step=step, **record):
            print(f"note: the held-out loss was best at step {log.best[1]}, {log.best[0]:.4f}, and rises: "
                  "the model learns this text by heart. More text or fewer --steps would help.", flush=True)
        if saving:
            ranks.agree(weights=ranks.size > 1 and zlib.crc32(model.read(model.flat_params)))
            if log:
                os.fsync(log.file.fileno())
                save(out, model, tokenizer, settings, state)
        if stopping and step < settings.steps:
            print(f"Saved {out} at step {step}. Go on with: python {state['script']} {settings.preset} "
                  f"--resume --out {shlex.quote(out)}", file=sys.stderr)
            return 128 + (stop.signal or signal.SIGTERM)
        pauses += time.monotonic() - paused
    print(f"\nTrained {out}: {step} steps, {state['tokens']:,} tokens, {state['seconds']:,.0f} seconds.\n\n"
          f"Talk to it: python chat.py --model {shlex.quote(out)}")
    return 0


def planner(config, settings, ranks):
    """-> (function of the micro-batch: bytes by kind that the run takes on its device; bytes that are free
    there, or None; the largest micro-batch that fits); a run can be planned where there is no GPU."""
    engine = model_gpu if settings.device == "gpu" else model_cpu
    plan = functools.partial(engine.memory_plan, config, T=config.context, precision=settings.precision,
                             threads=settings.threads, optimizer=settings.optimizer, gpus=ranks.size)
    free = engine.free_memory(settings.memory_limit)
    return plan, free, math.inf if free is None else model_cpu.largest_micro_batch(plan, free)


def dry_run(config, settings, ranks):
    """Print what a run would take: memory and, where there is a GPU, time, of three steps on random ids."""
    plan, free, largest = planner(config, settings, ranks)
    print(f"{settings.preset}: {model_cpu.param_count(config):,} parameters, {settings.steps} steps of "
          f"{settings.batch_tokens:,} tokens in micro-batches of {settings.micro_batch} x {config.context}, "
          f"{ranks.size} x {settings.device} {settings.precision}, {settings.optimizer}, rate {settings.lr}")
    kinds = plan(settings.micro_batch)
    for name, size in [*kinds.items(), ("together", sum(kinds.values()))]:
        print(f"{name:>20} {size / 2**20:10.1f} MiB")
    if free is not None:
        print(f"Free memory is {free / 2**20:,.0f} MiB: the largest micro-batch is {largest}.")
    if settings.device == "cpu" or model_gpu.why_no_gpu():
        return
    model = model_gpu.Model(config, settings.seed, **model_options(settings))
    connect(ranks, model, settings)
    T, windows = config.context, settings.batch_tokens // config.context
    ids = np.random.default_rng(0).integers(0, config.vocab, (windows, T + config.predict))
    for _ in range(2):                      # the first time nothing is in place yet
        began = time.monotonic()
        for _ in range(3):
            training_step(model, settings, ids[:, :T], ids[:, 1:], settings.lr, ranks)()
    seconds = (time.monotonic() - began) / 3
    run = datetime.timedelta(seconds=round(seconds * settings.steps))
    start = shlex.join(word for word in sys.argv[1:] if word != "--dry-run")
    print(f"A step takes {1e3 * seconds:.1f} ms, {settings.batch_tokens / seconds:,.0f} tokens/s: the run "
          f"would take at most {run}.  Start it: python train.py {start}")


def choose_device(asked, preset, planning=False, local=0):
    """-> cpu or gpu.  Unless told: the CPU for small, a GPU for the others, that of this local rank.  To plan
    a run needs none."""
    device = asked if asked in ("cpu", "gpu") else "cpu" if preset == "small" else "gpu"
    if device == "gpu" and not planning and (reason := model_gpu.why_no_gpu()):
        raise ValueError(reason if asked == "gpu" else f"{preset} takes many hours or days on a CPU: train "
                         f"small, or say --device cpu to do so. On a GPU it takes minutes; but: {reason}")
    if device == "gpu" and not model_gpu.why_no_gpu():
        model_gpu.take_gpu(local)
    return device


def choose_sizes(args, preset):
    """-> the base's Config, or the preset's, with what of it was given; what follows from dim follows."""
    given = {name: getattr(args, name) for name in (*SIZES, "mtp_weight") if getattr(args, name) is not None}
    if args.base:
        wrong = ["--" + name.replace("_", "-") for name in given if name not in ("context", "mtp_weight")]
        require(not wrong, f"the model in {args.base} has its sizes: leave out {' '.join(wrong)}.")
        return dataclasses.replace(checkpoint.read_config(args.base, args.context), **given)
    return dataclasses.replace(CONFIGS[preset], **given, **({"hidden": None} if "dim" in given else {}))


def model_options(settings):
    """The arguments of the engine's Model, other than config and seed."""
    if settings.device == "gpu":
        names = "precision", "micro_batch", "memory_limit", "matmul", "optimizer"
        return {name: getattr(settings, name) for name in names}
    return {"dtype": np.float32, "threads": settings.threads, "optimizer": settings.optimizer}


def set_threads(argv):
    """The threads here are slices of the batch, a core each, so BLAS must not start its own: its number of
    threads is read when NumPy loads, hence the script starts itself anew with it set."""
    names = "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"
    wanted = {**os.environ, **dict.fromkeys(names, "1")}
    if wanted != os.environ:
        os.execve(sys.executable, [sys.executable, os.path.abspath(sys.argv[0]), *argv], wanted)


def parse_arguments(argv):
    parser = Parser(description="Pretrain a model.  Defaults depend on the preset: --dry-run tells.")
    parser.add_argument("--steps", type=whole_number(1), metavar="N", help="updates; --resume takes more")
    add_run_options(parser, SIZES, "texts; lines of <|endoftext|> can separate documents (default "
                    "data/tiny.txt or Python's English; medium, big: data/books*.txt, data/web*.txt)")
    parser.add_argument("--dry-run", action="store_true", help="settings, memory, a GPU's speed; then stop")
    parser.add_argument("--plot", metavar="DIR", help="draw DIR/log.jsonl to DIR/loss.png, then stop")
    return parser.parse_args(argv)


def make_settings(args, preset, config, defaults, ranks=Ranks()):
    """Settings from these defaults, of the preset, and the options given."""
    given = {name: value for name, value in vars(args).items()
             if name in Settings.__annotations__ and value not in (None, "auto")}
    T, on_gpu = config.context, given.get("device") == "gpu"
    if not on_gpu and (wrong := [name for name in ("precision", "matmul", "memory_limit") if name in given]):
        raise ValueError(f"--{wrong[0].replace('_', '-')} is for the GPU engine; add --device gpu.")
    if on_gpu:
        model_gpu.check_sizes(config)
    settings = Settings(**{
        **defaults, "batch_tokens": max(1, defaults["batch_tokens"] // T) * T, "preset": preset, "data": None,
        "mtp_weight": config.mtp_weight, "decay": 0.1, "clip": 1.0, "seed": 0, "micro_batch": 1, "threads": 1,
        "optimizer": "muon", "device": "cpu", "matmul": "cublas", "memory_limit": None,
        "precision": model_gpu.default_precision() if on_gpu else "fp32", **given})
    windows, rest = divmod(settings.batch_tokens, T)
    require(not rest, f"--batch-tokens {settings.batch_tokens} is not a multiple of the context, {T}.")
    windows = -(-windows // ranks.size)
    if "micro_batch" not in given:      # as large as memory allows, up to where a larger one is no faster
        _, _, largest = planner(config, settings, ranks)
        settings.micro_batch = min((32768 if on_gpu else 4096) // T, largest)
    settings.micro_batch = min(ranks.all_gather(min(max(1, settings.micro_batch), windows)))
    if args.threads is None and not on_gpu:
        settings.threads = min(max(1, available_cores() // ranks.size), settings.micro_batch)
    return settings


def read_run(folder, script):
    """-> (Settings, state) of the run of this script that wrote a checkpoint; ValueError if none did."""
    state = checkpoint.load_state(folder)
    with refusing(f"{folder} was not written by {script}: how the run was made is not recorded"):
        recorded = {"optimizer": "adamw", **state["settings"]}      # earlier versions had no other,
        recorded.pop("attention", None)                             # and two kinds of attention
        settings = Settings(**recorded)
        require(type(state["script"]) is str and type(state["tokens"]) is int
                and type(state["seconds"]) in (int, float), "its script, tokens or seconds cannot be")
    return settings, state


def describe(base, wanted="small"):
    """-> (preset, corpus) of a base: one of ours says how it was made; of another's model the preset is the
    widest that is no wider, or small, and corpus, the files that it learned from, None.  wanted: the preset
    that was asked for."""
    require(os.path.exists(os.path.join(base, "config.json")),
            f"there is no model in {base}: `python train.py {wanted}` trains one, --base names another.")
    if os.path.exists(checkpoint.paths_of(base)[1]):
        made, _ = read_run(base, "train.py or sft.py")
        return made.preset, made.data
    dim = max(checkpoint.read_config(base).dim, CONFIGS["small"].dim)
    return max((c.dim, name) for name, c in CONFIGS.items() if c.dim <= dim)[1], None


def resume(args, out, script, ranks=Ranks()):
    """-> (model, tokenizer, settings, state) of the run of this script in `out`, from its own weights: a base
    need not be there any more.  Options that differ from the run's are an error, but for more --steps than a
    finished run has made."""
    require(os.path.exists(os.path.join(out, "config.json")), f"there is nothing to resume in {out}.")
    if ranks.rank == 0:
        checkpoint.take(out)
    settings, state = read_run(out, script)
    require(state["script"] == script, f"the run in {out} is one of {state['script']}: resume it with that.")
    require(state["settings"].get("attention", "flash") == "flash",
            f"the run in {out} has --attention naive, which is no more: start a new run.")
    choose_device(settings.device, settings.preset, local=ranks.local)
    model, tokenizer = checkpoint.load(out, model_gpu.pick(settings.device), model_options(settings))
    recorded = {**dataclasses.asdict(settings), **dataclasses.asdict(model.config), "base": state.get("base")}
    given = {name: getattr(args, name, None) for name in (*Settings.__annotations__, *SIZES, "base")}
    more = (given["steps"] or 0) > settings.steps <= model.step
    for name, value in given.items():
        if value not in (None, "auto", recorded[name]) and not (name == "steps" and more):
            option = "the preset" if name == "preset" else "--" + name.replace("_", "-")
            raise ValueError(f"the run in {out} has {option} {recorded[name]}, not {value}: a resumed run "
                             "keeps its settings. Leave the option out, or start a new run with --out.")
    if more:
        extend(settings, given["steps"], out)
    state = checkpoint.load_state(out, model)
    if (before := state.get("ranks", 1)) != ranks.size:
        print(f"The run in {out} was one of {before} processes and goes on with {ranks.size}: the same "
              "batches, and the same losses but for rounding.", flush=True)
        state["ranks"] = ranks.size
    return model, tokenizer, settings, state


def extend(settings, steps, out):
    """Give a finished run more steps."""
    before, rate = settings.steps, learning_rate(settings.steps - 1, settings)
    settings.steps = steps
    print(f"The run in {out} was finished after {before} steps; it goes on to {steps}.  The learning rate "
          f"rises from {rate:.2e} to {learning_rate(before, settings):.2e}, by a new schedule.", flush=True)


def cap_steps(args, settings, tokens):
    """Unless told: no more steps than the corpus has new things to say."""
    epochs = MOST_EPOCHS[settings.preset]
    most = max(1, epochs * tokens // settings.batch_tokens)
    if args.steps is None and most < settings.steps:
        print(f"{tokens:,} tokens are few for {settings.steps} steps: taking {most}, which read them "
              f"{epochs} times (--steps takes another number).")
        settings.steps = most
        if args.warmup is None:
            settings.warmup = min(settings.warmup, most // 10)


def pretraining(model, tokenizer, tokens, val, settings, ranks=Ranks()):
    """-> the Job of a run on these tokens."""
    T, K, windows = model.config.context, model.config.predict, settings.batch_tokens // model.config.context

    def batch(step):
        return get_batch(tokens, window_starts(settings.seed, step, windows, len(tokens), T, K), T, K)

    def look(step):
        if result := validate(model, tokenizer, val, settings.micro_batch, EVAL_TOKENS, ranks=ranks):
            print(f"           validation loss {in_words(result)}")
        if step == settings.steps and any(len(tokens) > EVAL_TOKENS + T for tokens in val.values()):
            progress = show_progress("           held out:", "thousand tokens", 1e3)
            result["all"] = validate(model, tokenizer, val, settings.micro_batch, math.inf, progress, ranks)
            print(f"           on all that is held out {in_words(result['all'])}")
        samples = [text + sample_text(model, tokenizer, tokenizer.encode(text), settings.seed + i)
                   for i, text in enumerate(PROMPTS)]
        print_samples(map(repr, PROMPTS), samples, step == settings.steps)
        return {**result, "samples": samples}

    return Job(batch, look, max(token_bytes(tokenizer)[tokens[:1 << 20]].mean(), 1e-9), ranks)


def main(argv):
    args = parse_arguments(argv)
    if args.plot:
        return checkpoint.plot(args.plot)
    set_threads(argv)
    with checkpoint.find_ranks(args.gpus, args.timeout) as ranks:
        return run(args, ranks)


def run(args, ranks):
    """-> exit code."""
    preset = args.preset or (describe(args.base)[0] if args.base and not args.resume else "small")
    out = os.path.normpath(args.out or (f"{args.base}-more" if args.base else os.path.join("out", preset)))
    if args.resume:
        model, tokenizer, settings, state = resume(args, out, "train.py", ranks)
        if model.step >= settings.steps:
            print(f"The run in {out} is finished: {model.step} steps (--steps takes more).")
            return 0
        _, tokens, val, key = prepare(settings.data, model.config.vocab, state.get("base") and out)
        require(key == settings.tokens_key, f"{', '.join(settings.data)}: not what {out} began with.")
        print(f"Resuming {out} at step {model.step} of {settings.steps}.")
    else:
        config = choose_sizes(args, preset)
        asked = args.device or ("gpu" if args.dry_run and args.memory_limit else None)
        args.device = choose_device(asked, preset, args.dry_run, ranks.local)
        # half of it for AdamW, and to go on from a base, which then learns as well and forgets less
        lr = DEFAULTS[preset]["lr"] / (2 if args.optimizer == "adamw" else 1) / (2 if args.base else 1)
        settings = make_settings(args, preset, config, {**DEFAULTS[preset], "lr": lr}, ranks)
        if args.dry_run:
            return dry_run(config, settings, ranks)
        found = ranks.all_gather(ranks.rank or settings.data or find_corpus(preset))[0]     # 0 alone makes it
        settings.data = settings.data or found
        tokenizer, tokens, val, settings.tokens_key = prepare(settings.data, config.vocab, args.base)
        window_count(len(tokens), config.context, config.predict)
        cap_steps(args, settings, len(tokens))
        if sum(map(len, val.values())) <= config.predict:
            print("The corpus is too short for a validation part: there will be no validation loss.")
        model, state = new_run("train.py", out, config, tokenizer, settings, ranks, args.base)
        engine = f"{settings.threads} threads" if settings.device == "cpu" else f"GPU {settings.precision}"
        engine = f"{ranks.size} x {engine}" if ranks.size > 1 else engine
        print(f"{preset}: {model_cpu.param_count(config):,} parameters, {settings.steps} steps of "
              f"{settings.batch_tokens:,} tokens, {engine}; corpus {', '.join(settings.data)}: "
              f"{len(tokens):,} tokens to train on, {sum(map(len, val.values())):,} to validate.", flush=True)
    job = pretraining(model, tokenizer, tokens, val, settings, ranks)
    connect(ranks, model, settings)
    return train(model, tokenizer, settings, out, state, Stop(), job)


if __name__ == "__main__":
    run_script(main, to_the_end=True)
