"""The README's numbers, each by one command.  The peer is measured in the same run, where it is installed.

    python tests/bench.py               all that this machine can measure, or one by name:
    python tests/bench.py tokenizer
    python tests/bench.py cpu
    python tests/bench.py decode --peer # generation, on a GPU too where there is one; --model DIR: of a trained model
    python tests/bench.py drafts        # what speculation brings: of the model in out/small, or those of --model DIR ...
    python tests/bench.py euler         # of the model in out/small
    python tests/bench.py counts FILE   # what counting reaches on a text, beside the model in out/small
    python tests/bench.py train --peer  # on a GPU, as are all below; its last line can be pasted into an issue
    python tests/bench.py dpo --peer
    python tests/bench.py scale --gpus 2 --peer
    python tests/bench.py attention     # --hopper 0, also of train and decode: as on a GeForce RTX 30 or 40
    python tests/bench.py curves --tokens data/train-KEY.bin --val data/val-*-KEY-*.bin
    python tests/bench.py finetune --base out/smollm2 --data FILE --peer

A row is the best of some rounds.  Mostly a round runs each row once, so that a busy machine slows ours and the peer
alike.  In scale, attention and curves, and with --steps, one row is measured after the other.

    1. shared by the commands
    2. on a CPU           tokenizer, cpu, euler, counts
    3. generation         decode, drafts
    4. on a GPU           train, dpo, scale, attention
    5. losses             curves, finetune
    6. the command line
"""
import argparse
import glob
import importlib
import inspect
import itertools
import json
import lzma
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "tests/peers"))  # torch_twin, which PyTorch's part of a command imports
if sys.argv[1:2] in ([], ["cpu"], ["counts"]):
    os.environ["OPENBLAS_NUM_THREADS"] = "1"        # as train.py has it; read when NumPy loads
import numpy as np
from numpy.random import default_rng

import checkpoint
import model_cpu
import model_gpu
import rl
import sft
import train
from model_cpu import CONFIGS, generate
from model_gpu import pick
from script import available_cores, find_corpus
from tokenizer import END_OF_TEXT, Tokenizer

DATA = ROOT.parent / "shared/data"          # texts beside the repository, where somebody has put them
PEERS_HINT = "pip install -r tests/peers/requirements.txt"
HOW = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.8, "top_k": 50}}


# ----------------------------------------------------------------------------------------------------------------------
# 1. Shared by the commands
# ----------------------------------------------------------------------------------------------------------------------
def gpu_name():
    return model_gpu.cupy.cuda.runtime.getDeviceProperties(model_gpu.cupy.cuda.Device().id)["name"].decode()


def seconds_a_call(function, calls=1, wait=lambda: None):
    """The mean of so many calls in a row; wait() returns when all that they have started is done."""
    started = time.perf_counter()
    for _ in range(calls):
        function()
    wait()
    return (time.perf_counter() - started) / calls


def measure_rows(rows, rounds):
    """{name: function() -> seconds} -> {name: seconds}, the best of `rounds`."""
    runs = [{name: function() for name, function in rows.items()} for _ in range(rounds)]
    return {name: min(run[name] for run in runs) for name in rows}


def best_times(functions, rounds, *how):
    """{name: function} -> {name: seconds a call}, the best of `rounds`; how: see seconds_a_call."""
    rows = {name: partial(seconds_a_call, function, *how) for name, function in functions.items()}
    return measure_rows(rows, rounds)


def as_fast(times, name):
    """What stands at the end of a peer's row."""
    return "" if name == "ours" else f"  ours is {times[name] / times['ours']:.2f} x as fast"


def print_steps(times, tokens, notes=None):
    """{name: seconds of a step of so many tokens}, a row for each; notes: {name: text}."""
    for name, seconds in times.items():
        note = notes[name] if notes else ""
        print(f"  {name:28s} {1e3 * seconds:8.2f} ms  {tokens / seconds:10,.0f} tokens/s{note}{as_fast(times, name)}")


def random_batch(config, B, T):
    """-> tokens (B,T), targets (B,T+K-1)."""
    rng = default_rng(0)
    return [rng.integers(0, config.vocab, (B, width)) for width in (T, T + config.predict - 1)]


def train_step(model, tokens, targets, lr=3e-4, momentum=0.95):
    """-> the losses of the heads."""
    losses = model.forward(tokens, targets)
    model.backward()
    model.update(lr, momentum=momentum)
    return losses


def import_peer(name):
    """The package, or None and a sentence."""
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"{name} is not installed ({PEERS_HINT}), so it is not measured")
        return None


def twin_of(model, device="cpu"):
    """The model in PyTorch, with the same weights."""
    import torch_twin
    return torch_twin.Twin(model.config, model_cpu.param_views(model.read(model.flat_params), model.config)).to(device)


def twin_step(twin, batch, compiled, autocast=None):
    """-> step() of it on this batch, forward, backward and AdamW."""
    import torch_twin
    device = next(twin.parameters()).device.type
    return partial(torch_twin.make_step(twin, compiled, autocast), *[to_torch(part, device) for part in batch])


def to_torch(array, device):
    """A tensor of it; on a GPU through pinned memory, as PyTorch's own loops do it, so that the host need not wait."""
    import torch
    tensor = torch.from_numpy(array)
    return tensor if device == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def takes_arrays(function, device):
    """function(inputs, targets, ...), which takes tensors -> one that takes NumPy's arrays."""
    return lambda inputs, targets, *rest: function(to_torch(inputs, device), to_torch(targets, device), *rest)


def wait_for_gpu():
    model_gpu.cupy.cuda.Device().synchronize()


def held_out_files(folder):
    """[(kind of text, ids)] of what the model in this folder has not learned from."""
    pattern = f"data/val-*-{checkpoint.load_state(folder)['settings']['tokens_key']}-*.bin"
    paths = sorted(glob.glob(pattern))
    if not paths:
        raise ValueError(f"the held-out tokens of {folder}, {pattern}, are not here.")
    return [(os.path.basename(path).split("-")[1], np.fromfile(path, "<u2").astype(int)) for path in paths]


# ----------------------------------------------------------------------------------------------------------------------
# 2. On a CPU
# ----------------------------------------------------------------------------------------------------------------------
def bench_tokenizer(text="", gpt2=DATA / "gpt2", rounds=3):
    """Training and encoding against tokenizers and tiktoken: 4,096 tokens are trained on a text, which is then encoded,
    from an empty cache each time.  --text FILE: a text, or one packed by xz; else books that ./fetch_data.sh has brought, or a
    short text.  --gpt2 DIR: encode with GPT-2's tokens, by OpenAI's files vocab.bpe and encoder.json; else with those that were
    just trained."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.txt")
        source = find_text(text)
        unpack = lzma.open if source.suffix == ".xz" else open
        with unpack(source, "rb") as file:
            data = file.read()
        path.write_bytes(data)
        text, size, cores = data.decode("utf-8", "replace"), len(data) / 1e6, available_cores()
        print(f"{source.name}, {size:.1f} MB, {cores} cores, best of {rounds}")
        if (gpt2 / "vocab.bpe").exists():
            ours = Tokenizer.from_gpt2(gpt2 / "vocab.bpe", gpt2 / "encoder.json")
            whose = "GPT-2's 50,257"
        else:
            ours = Tokenizer.train_files([path], 4096)
            whose = f"the {ours.vocab_size:,} just trained (--gpt2 DIR: with GPT-2's)"

        def encode_file(processes):
            ours.encoder.clear()
            ours.encode_file(path, Path(folder, "ids.bin"), processes=processes)

        def encode():
            ours.encoder.clear()
            return ours.encode(text)

        training, encoding = {}, {}
        for n in cores, 1:
            training[f"ours, processes: {n}"] = partial(Tokenizer.train_files, [path], 4096, processes=n)
            encoding[f"ours, file to file, processes: {n}"] = partial(encode_file, n)
        encoding["ours, str to list"] = encode
        os.environ["RAYON_NUM_THREADS"] = "1"       # read by tokenizers when it first works
        tokenizers = import_peer("tokenizers")
        if tokenizers:
            training["peer: tokenizers, 1 thread"] = lambda: train_peer(tokenizers, path)
        tiktoken = import_peer("tiktoken")
        if tiktoken:
            judge = tiktoken_judge(tiktoken, ours)
            encoding["peer: tiktoken, str to list"] = lambda: judge.encode_ordinary(text)
            print("ids equal tiktoken's:", encode() == judge.encode_ordinary(text))

        times = best_times({**training, **encoding}, rounds)
        for title, rows in ("train 4,096 tokens", training), (f"encode with {whose}", encoding):
            *_, last = rows
            print(f"\n{title}")
            for name in rows:
                ratio = f"{times[last] / times[name]:6.2f} x the peer's speed" if last.startswith("peer") else ""
                print(f"  {name:38s} {times[name]:6.2f} s  {size / times[name]:6.1f} MB/s  {ratio}".rstrip())


def find_text(asked):
    """The text that was asked for; else books, where there are some; else what `train.py small` learns from."""
    if asked:
        return Path(asked)
    for path in Path("data", "books.txt"), DATA / "books_00.txt.xz":
        if path.exists():
            return path
    path, = find_corpus("small", END_OF_TEXT)
    print(f"{path} is a short text; ./fetch_data.sh books brings 110 MB, on which a time means more.")
    return Path(path)


def train_peer(tokenizers, path):
    peer = tokenizers.Tokenizer(tokenizers.models.BPE())
    peer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, show_progress=False)
    peer.train([str(path)], trainer)


def tiktoken_judge(tiktoken, tokenizer):
    """tiktoken with the tokens of a tokenizer of ours.  Its rank of a token is the order in which we learned it."""
    special = set(tokenizer.special.values())
    ranks = {token: i for i, token in enumerate(tokenizer.tokens) if token and i not in special}
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    return tiktoken.Encoding("ours", pat_str=pattern, mergeable_ranks=ranks, special_tokens=tokenizer.special)


def bench_cpu(batch=16, rounds=5):
    """A training step of the small model against PyTorch's: forward, backward, clip and AdamW at B x T in float32, on all
    cores."""
    T, cores = 128, available_cores()
    rows = random_batch(CONFIGS["small"], batch, T)
    model = model_cpu.Model(CONFIGS["small"], 0, np.float32, threads=min(cores, batch))
    steps = {"ours": partial(train_step, model, *rows)}
    torch = import_peer("torch")
    if torch:
        torch.set_num_threads(cores)
        for name in "eager", "compiled":
            steps[f"peer: PyTorch {name}"] = twin_step(twin_of(model), rows, name == "compiled")
    for step in steps.values():                     # the first calls compile and allocate
        step()
        step()

    def best_of_five(step):     # PyTorch's threads spin for a while after its last step, and would slow the first of ours
        return min(seconds_a_call(step) for _ in range(5))
    visits = {name: partial(best_of_five, step) for name, step in steps.items()}
    print(f"training step, small, B {batch} x T {T}, float32, {cores} cores, best of {rounds} x 5, "
          f"OPENBLAS_CORETYPE {os.environ.get('OPENBLAS_CORETYPE') or 'not set'}")
    print_steps(measure_rows(visits, rounds), batch * T)


def bench_euler(model="out/small"):
    """Is a trained layer a solver's step?: the layers of --model DIR as steps of size 1, and other ways to integrate the
    same dx/dt = f(x, t)."""
    folder = model
    model, _ = checkpoint.load(folder, model_cpu)
    c, T = model.config, model.config.context
    (_, ids), *_ = held_out_files(folder)
    windows = ids[:min(64, len(ids) // (T + 1)) * (T + 1)].reshape(-1, T + 1)
    targets = windows[:, 1:].reshape(-1)
    print(f"{folder} after {model.step} steps, {targets.size:,} held-out tokens, loss of head 0")
    for i, (loss, step, _) in enumerate(model_cpu.euler_table(model, windows)):
        print(f"  stopped after {'the embedding' if i == 0 else f'layer {i - 1}':14s} {loss:.4f}   |f(x)|/|x| {step:.3f}")

    def layer(i, x, size):
        """x after one step of that size by layer i.  Both substeps end in a matmul, so scaling that matrix scales the
        step."""
        w = model_cpu.layer_views(model.params, i)
        w.out = size * w.out
        w.down = size * w.down
        layers, shared = model.workspaces[0].buffers(*x.shape[:2])
        x = x.copy()
        model_cpu.block_forward(x, w, layers[i], shared, c, model.rope, 0)
        return x

    solvers = {"one step a layer, as trained": lambda step, x: step(x, 1),
               "two half steps": lambda step, x: step(step(x, 1 / 2), 1 / 2),
               "four quarter steps": lambda step, x: reduce(step, [1 / 4] * 4, x),
               "Heun's method": lambda step, x: (x + step(step(x, 1), 1)) / 2,      # x + (f(x) + f(x + f(x))) / 2
               "every step 10% longer": lambda step, x: step(x, 1.1),
               "every step 10% shorter": lambda step, x: step(x, 0.9)}
    for name, solve in solvers.items():
        x = model.params["embed"][windows[:, :-1]]                                  # (B,T,C)
        for i in range(c.layers):
            x = solve(partial(layer, i), x)
        x = x.reshape(-1, c.dim)
        x *= model.params["norm"] / np.sqrt((x ** 2).mean(axis=1, keepdims=True) + c.norm_eps)
        logits = x @ model.params["heads"][:c.vocab].T                              # (N,V)
        losses = np.log(np.exp(logits).sum(axis=1)) - logits[range(len(x)), targets]
        print(f"  {name:30s} {losses.mean():.4f}")


def count_losses(learned, held_out, vocab):
    """-> {name: nats a token} of held-out ids, from the third on, by counts of the learned ids.

    The chances after n-1 tokens are interpolated with those after n-2, by Witten and Bell's rule (1991).  It
    has nothing to tune: after `before`, which occurred c times with t different next tokens,

        P(token | before) = (times(before, token) + t * P(token | before without its first)) / (c + t)

    so that what was never seen has a chance, too; below the unigrams stand the uniform chances, 1 / vocab."""
    learned, held_out = [np.asarray(ids).tolist() for ids in (learned, held_out)]
    if len(learned) < 3 or len(held_out) < 3:
        raise ValueError("the text is too short to count in: its parts need at least 3 tokens each.")
    chances = [1 / vocab] * (len(held_out) - 2)
    losses = {"uniform": math.log(vocab)}
    for n, name in enumerate(("unigram", "bigram", "trigram"), 1):
        times = Counter(zip(*[learned[i:] for i in range(n)]))          # of each run of n tokens
        occurred, different = Counter(), Counter()                      # c and t of the n-1 before its last
        for run, count in times.items():
            occurred[run[:-1]] += count
            different[run[:-1]] += 1
        for i, run in enumerate(zip(*[held_out[3 - n + k:] for k in range(n)])):
            c, t = occurred[run[:-1]], different[run[:-1]]
            if c:
                chances[i] = (times[run] + t * chances[i]) / (c + t)
        losses[name] = -sum(map(math.log, chances)) / len(chances)
    return losses


def bench_counts(file, vocab=512):
    """The loss of counted n-grams on a text: nats a token of its held-out part by counts in its training part, interpolated as
    count_losses says.  Parts and tokens are those that train.py makes of the text with so large a --vocab; so the loss that a
    model of it prints at its end stands beside these, though its windows see less at their beginning."""
    _, learned, val, _ = train.prepare([file], vocab)
    held_out, = val.values()
    print(f"{file}: {len(learned):,} tokens of a vocabulary of {vocab} to learn from, "
          f"{len(held_out):,} held out; nats a token")
    for name, loss in count_losses(learned, held_out, vocab).items():
        print(f"  {name:10s} {loss:.4f}")


# ----------------------------------------------------------------------------------------------------------------------
# 3. Generation
# ----------------------------------------------------------------------------------------------------------------------
def seconds_a_token(tokens, count):
    """Of the `count` tokens after the first: the prompt's reading does not count."""
    next(tokens)
    return seconds_a_call(lambda: next(tokens), count)


def first_token(model, prompt):
    """Seconds to the first token of a prompt, all of which has to be read."""
    model.decoder.forget()
    return seconds_a_call(lambda: next(generate(model, prompt, temperature=0, seed=0)))


def own_text(model, tokenizer, size):
    """A prompt of a trained model: what it writes itself.  Of an untrained one, whose tokenizer is None: any ids."""
    if tokenizer is None:
        return default_rng(0).integers(0, model.config.vocab, size).tolist()
    start = [tokenizer.special["<|endoftext|>"]]
    return start + list(generate(model, start, seed=0, vocab=tokenizer.vocab_size, most=size - 1, **HOW["sampled"]))


def print_generation(model, tokenizer, lengths, tokens, rounds, peers):
    """Rows of generation after so many tokens of a text.  peers: {name: function(prompt, steps) -> seconds a token}.
    An untrained model, whose tokenizer is None, has no rows with drafts, which would never be right."""
    context, rates = model.config.context, {}
    text = own_text(model, tokenizer, min(lengths[-1], context * 4 // 5))

    def run(name, prompt, steps, settings, speculate):
        trace = []
        ids = generate(model, prompt, seed=0, vocab=tokenizer and tokenizer.vocab_size, speculate=speculate,
                                 trace=trace, **settings)
        seconds = seconds_a_token(ids, steps)
        heads = [head for head, _, _ in trace[1:]]  # without the first token, which has no drafts
        if speculate:
            rates[name] = f"{len(heads) / heads.count(0):.2f} tokens a verification"
        return seconds

    for length in sorted({min(length, len(text)) for length in lengths}):
        prompt = text[:length]
        steps = min(tokens, context - length - 1)   # all in one window
        rows = {}
        for how, settings in HOW.items():
            for speculate in (False, True) if tokenizer else (False,):
                name = f"ours, {how}{', speculative' if speculate else ''}"
                rows[name] = partial(run, name, prompt, steps, settings, speculate)
        rows.update({name: partial(peer, prompt, steps) for name, peer in peers.items()})
        for function in rows.values():              # the first calls load what they need
            function()
        times = measure_rows(rows, rounds)
        for name, seconds in times.items():
            note = rates.get(name, "")
            if name.startswith("peer"):
                note = f"ours, greedy, is {seconds / times['ours, greedy']:.2f} x as fast"
            print(f"  after {length:3d}  {name:34s} {1e3 * seconds:8.3f} ms a token  {note}".rstrip(), flush=True)
    return text


def bench_decode(model="", device="auto", tokens=64, peer=False, rounds=5):
    """Generation against PyTorch's: milliseconds a token, batch 1, on the GPU of big in bf16, on the CPU of small and medium.
    --model DIR: of a trained model, on the GPU in place of big, on the CPU beside the others (by default out/small, if it is
    there), with drafts.  --device auto: all that there is.  --tokens: in a round."""
    engine = pick(device)
    if engine is model_gpu:
        decode_on_gpu(model, tokens, peer, rounds)
    if device != "gpu":
        decode_on_cpu(model if engine is model_cpu else "", tokens, peer, rounds)


def decode_on_gpu(folder, tokens, peer, rounds):
    """The host's time, which waits for each token.  The peer computes head 0 alone; its tokens are read one by one, as ours
    are."""
    options, tokenizer = {"precision": "bf16", "training": False}, None
    if folder:
        model, tokenizer = checkpoint.load(folder, model_gpu, options)
    else:
        model = model_gpu.Model(CONFIGS["big"], **options)
    c = model.config
    _, bandwidth = ceilings(model.gpu)
    model_gpu.cupy.get_default_memory_pool().free_all_blocks()
    read = 2 * (model_cpu.param_count(c) - c.vocab * c.dim)             # bytes; of the embedding only a row
    print(f"generation, {folder or 'big, untrained'}, bf16, {gpu_name()}: up to {tokens} tokens a round, best of "
          f"{rounds}; {read / 1e6:.0f} MB of weights a token, copy {bandwidth / 1e12:.2f} TB/s: "
          f"{1e3 * read / bandwidth:.3f} ms")
    peers = {}
    if peer:
        import torch_twin
        token, position, _, replay = torch_twin.capture_greedy(twin_of(model, "cuda").bfloat16())

        def step():
            replay()
            token.item()

        def peers_seconds(prompt, steps):
            position.fill_(len(prompt))
            step()
            return seconds_a_call(step, steps)
        peers["peer: PyTorch, CUDA graph"] = peers_seconds
    text = print_generation(model, tokenizer, (1, 128, 400), tokens, rounds, peers)
    seconds = []
    for record_at in math.inf, 1:                       # launched one by one; from a CUDA graph
        with patch.object(model_gpu, "RECORD_AT", record_at):
            model.decoder.replays.clear()
            first_token(model, text)
            seconds.append(min(first_token(model, text) for _ in range(rounds)))
    print(f"  the first token of a prompt of {len(text)}: {1e3 * seconds[1]:.2f} ms, and {1e3 * seconds[0]:.2f} ms the first "
          f"{model_gpu.RECORD_AT - 1} times, before its launches are a CUDA graph")


def decode_on_cpu(folder, tokens, peer, rounds):
    """float32, NumPy's threads as the environment has them.  The peer, with a KV cache of its own, runs on all cores and on
    one: the products of a single token are so small that its threads often cost more than they bring."""
    folder = folder or "out/small"                  # if `make` has trained one
    options, models = {"dtype": "float32", "training": False}, {}
    if os.path.exists(folder):
        models[folder] = checkpoint.load(folder, model_cpu, options)
    for name in "small", "medium":
        models[f"{name}, untrained"] = model_cpu.Model(CONFIGS[name], **options), None
    for name, (model, tokenizer) in models.items():
        c = model.config
        print(f"generation, {name}, dim {c.dim}, {c.layers} layers, float32, {available_cores()} cores: up to "
              f"{tokens} tokens a round, best of {rounds}, OPENBLAS_NUM_THREADS "
              f"{os.environ.get('OPENBLAS_NUM_THREADS') or 'not set'}")
        peers = {}
        if peer:
            import torch
            import torch_twin
            twin = twin_of(model)

            def peers_seconds(threads, prompt, steps):
                time.sleep(0.1)             # idle threads spin for a while: ours would slow PyTorch's, and
                torch.set_num_threads(threads)
                seconds = seconds_a_token(torch_twin.greedy(twin, prompt), steps)
                time.sleep(0.1)             # PyTorch's the next of ours
                return seconds
            for threads in sorted({1, available_cores()}):
                peers[f"peer: PyTorch eager, threads: {threads}"] = partial(peers_seconds, threads)
        print_generation(model, tokenizer, (1, 100), tokens, rounds, peers)


def held_out_prompts(folder, tokenizer, config, count):
    """{kind of text: prompts}: of a pretrained model a quarter of a window from even places of what it held out, of a
    fine-tuned one prompts whose answers it has not seen."""
    state = checkpoint.load_state(folder)
    settings, size = state["settings"], config.context // 4
    if state["script"] == "sft.py":
        examples = sft.make_examples(tokenizer, sft.read_conversations(settings["data"]), config.context, settings["seed"])
        prompts = [ids[:mask.argmax()].tolist() for ids, mask in examples.held_out]
        return {"answers": [prompt for prompt in prompts if len(prompt) <= size][:count]}
    return {kind: [ids[start:start + size].tolist() for start in np.linspace(0, len(ids) - size, count, dtype=int)]
            for kind, ids in held_out_files(folder)}


def bench_drafts(model=("out/small",), device="auto", prompts=32):
    """What the further heads' drafts bring: how often they are right on text that the models of --model DIR ... have not
    seen.  Texts go on for half a window, answers to their end.  The same tokens with every number of drafts."""
    engine = pick(device)
    options = {"precision": "bf16"} if engine is model_gpu else {"dtype": "float32"}
    for folder in model:
        model, tokenizer = checkpoint.load(folder, engine, {**options, "training": False})
        c, stop = model.config, set(tokenizer.special.values())
        if c.predict == 1:
            raise ValueError(f"{folder} has one prediction head: nobody drafts.")
        some = sorted({1, c.predict - 1})
        print(f"{folder}: drafts of {' or '.join(map(str, some))} further heads, against none")

        def write(starts, settings):
            """-> the tokens of all texts, what the heads did."""
            tokens, trace = [], []
            for seed, start in enumerate(starts):
                model.decoder.forget()
                tokens += generate(model, start, seed=seed, vocab=tokenizer.vocab_size, stop=stop,
                                             most=c.context // 2, trace=trace, **settings)
            return tokens, trace

        for kind, starts in held_out_prompts(folder, tokenizer, c, prompts).items():
            for how, settings in HOW.items():
                texts, times, traces = {}, {}, {}
                for drafts in 0, *some:
                    model.draft_heads = drafts
                    texts[drafts], traces[drafts] = write(starts, settings)      # loads what is needed
                    times[drafts] = seconds_a_call(lambda: write(starts, settings))
                    if engine is model_gpu and texts[drafts] != texts[0]:
                        raise ValueError("drafts have changed a text.")
                count = max(1, len(texts[0]))
                print(f"  {kind}, {how}: {count:,} tokens from {len(starts)} prompts, {1e3 * times[0] / count:.3f} ms a token")
                for drafts in some:
                    right = Counter(head for head, _, _ in traces[drafts])
                    tried = [sum(head == 0 and read > k for head, read, _ in traces[drafts]) for k in range(drafts)]
                    rates = ", ".join(f"{right[k + 1] / max(1, tries):.1%}" for k, tries in enumerate(tried))
                    print(f"    drafts {drafts}: {right.total() / right[0]:.2f} tokens a verification (right: {rates}), "
                          f"{1e3 * times[drafts] / count:.3f} ms a token, {times[0] / times[drafts]:.2f} x", flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# 4. On a GPU
# ----------------------------------------------------------------------------------------------------------------------
# How many times a kernel moves each of its array arguments through memory, a digit for each (0: small, or in cache).
TRAFFIC = {
    "embedding_forward": "210", "embedding_backward": "2111", "rmsnorm_forward": "111110", "rmsnorm_backward": "211110",
    "column_sum": "01", "rope": "200", "swiglu_forward": "11", "swiglu_backward": "21", "cross_entropy": "2110",
    "cross_entropy_sum": "010", "sum_of_squares": "01", "gradient_norm": "01", "adamw": "212220", "muon_polynomial": "21"}


def gpu_seconds(function, calls, rounds):
    """GPU time of one of `calls` calls that follow each other, the best of `rounds`."""
    cupy, times = model_gpu.cupy, []
    function()
    for _ in range(rounds):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) / 1e3 / calls)
    return min(times)


def flops_per_token(config):
    """Of training, as usually counted: 6 for each parameter that is in a matmul (2 forward, 4 backward),
    which is all but gains and an embedding that is not the head, too, and 6 L C T for causal attention."""
    outside = (2 * config.layers + 1) * config.dim
    if not config.tied:
        outside += config.vocab * config.dim
    return 6 * (model_cpu.param_count(config) - outside + config.layers * config.dim * config.context)


def ceilings(gpu):
    """(FLOP/s of an 8192-cube product in the model's precision, bytes/s of a copy), the best of three rounds."""
    cupy, size = model_gpu.cupy, 8192
    random = default_rng(0).standard_normal((size, size), np.float32)     # zeros would run faster
    a, b, out = [on_gpu(random, gpu.precision) for _ in range(3)]
    product = gpu_seconds(lambda: model_gpu.gemm(gpu, out, a, b, transpose_b=True), 10, 3)
    x = cupy.zeros(1 << 28, np.float32)
    y = cupy.empty(1 << 28, np.float32)
    copy = gpu_seconds(lambda: cupy.copyto(y, x), 20, 3)
    return 2 * size ** 3 / product, 2 * x.nbytes / copy


def on_gpu(array, precision):
    """float32 numbers as the engine keeps them there; in bf16 their upper halves."""
    array = model_gpu.cupy.asarray(array)
    return (array.view(np.uint32) >> 16).astype(np.uint16) if precision == "bf16" else array


def record_launches(cupy, model_gpu, model, step):
    """Run one step with an event before and after every launch: [(name, seconds, bytes, FLOPs)]."""
    c, launch, product, transposed = model.config, model.gpu.launch, model_gpu.gemm, model_gpu.transposed
    records = []
    model.buffers_by_shape.clear()                                  # and with them the CUDA graphs that there are

    def record(function, name, moved, flops):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        result = function()
        end.record()
        records.append((name, start, end, moved, flops))
        return result

    def timed_launch(name, grid, threads, *args, shared=0):
        arrays = [arg for arg in args if isinstance(arg, cupy.ndarray)]
        moved = sum(int(count) * array.nbytes for count, array in zip(TRAFFIC.get(name, ""), arrays))
        if name == "adamw" and arrays[0].data.ptr == arrays[1].data.ptr:       # no copy in bf16
            moved -= arrays[1].nbytes
        if name == "rope":
            moved = moved * (c.heads + c.kv_heads) // (c.heads + 2 * c.kv_heads)    # v does not turn
        flops = 0
        if name.startswith("flash"):
            B, T = grid[1], int(args[-3])
            products = 2 if "forward" in name else 3 if "dq" in name else 4
            flops = products * B * c.heads * T * T * c.head_dim                     # half of T x T, 2 a product
        record(lambda: launch(name, grid, threads, *args, shared=shared), name, moved, flops)

    def timed_product(gpu, out, a, b, transpose_a=False, transpose_b=False, add=False):
        K = a.shape[-2 if transpose_a else -1]
        name = f"product {'x'.join(map(str, (*out.shape, K)))}"         # (matrices)xMxNxK
        record(lambda: product(gpu, out, a, b, transpose_a, transpose_b, add), name, 0, 2 * out.size * K)

    def timed_transposed(gpu, x, space):
        return record(lambda: transposed(gpu, x, space), "transposed", 2 * x.nbytes, 0)

    with (patch.multiple(model.gpu, launch=timed_launch),
          patch.multiple(model_gpu, gemm=timed_product, transposed=timed_transposed, RECORD_AT=0)):      # 0: no CUDA graph
        step()
    cupy.cuda.Device().synchronize()
    return [(name, cupy.cuda.get_elapsed_time(start, end) / 1e3, *cost) for name, start, end, *cost in records]


def print_breakdown(records, peak, bandwidth):
    """A row for each kernel: calls, time, and what it computed or moved beside the card's limit (0%: not known)."""
    rows = {}
    for name, *values in records:
        rows[name] = np.add(rows.get(name, 0), [1, *values])
    total = sum(row[1] for row in rows.values())
    print(f"\n  {'kernel':34s} {'calls':>5s} {'ms':>8s} {'share':>6s} {'of limit':>8s}")
    for name, (calls, seconds, moved, flops) in sorted(rows.items(), key=lambda item: -item[1][1]):
        limit = max(flops / peak, moved / bandwidth) / seconds
        print(f"  {name:34s} {calls:5.0f} {1e3 * seconds:8.3f} {seconds / total:6.1%} {limit:8.0%}")
    print(f"  {'sum':34s} {len(records):5d} {1e3 * total:8.3f}")


def bench_train(model="big", batch=64, context=512, precision="bf16", matmul="cublas", optimizer="adamw", peer=False,
                rounds=5, steps=0):
    """A training step on the GPU: milliseconds, tokens/s, TFLOP/s, memory, launches; by kernel; with --peer compiled
    PyTorch's, which always has AdamW.  --steps: then so many of each in a row, as a run has them."""
    pick("gpu")                           # ValueError where there is none
    preset, tokens = model, batch * context
    config = replace(CONFIGS[preset], context=context)
    rows = random_batch(config, batch, context)
    pool = model_gpu.cupy.get_default_memory_pool()
    model = model_gpu.Model(config, precision=precision, matmul=matmul, micro_batch=batch, optimizer=optimizer)
    ours = partial(train_step, model, *rows)
    functions = {"ours": ours}
    seconds_a_call(ours, 3, wait_for_gpu)
    memory = {"ours": pool.used_bytes()}
    flops, peaks = tokens * flops_per_token(config), ceilings(model.gpu)
    pool.free_all_blocks()
    if peer:
        import torch
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        before, name = torch.cuda.memory_allocated(), "peer: PyTorch compiled"
        torch.cuda.reset_peak_memory_stats()
        functions[name] = twin_step(twin_of(model, "cuda"), rows, True, torch.bfloat16 if precision == "bf16" else None)
        seconds_a_call(functions[name], 4, torch.cuda.synchronize)
        memory[name] = torch.cuda.max_memory_allocated() - before

    times = best_times(functions, rounds, 10, wait_for_gpu)
    print(f"training step, {preset}, B {batch} x T {context}, {precision}, {gpu_name()}: ten steps a round, best of "
          f"{rounds}; 8192-cube product {peaks[0] / 1e12:.0f} TFLOP/s, copy {peaks[1] / 1e12:.2f} TB/s")
    print_steps(times, tokens, {name: f"  {flops / seconds / 1e12:5.0f} TFLOP/s ({flops / seconds / peaks[0]:.0%})  "
                               f"{memory[name] / 2 ** 30:6.2f} GiB" for name, seconds in times.items()})
    if steps:                   # by then the card is warm, and its power is what limits it, as in a real run
        in_a_row = best_times(functions, 1, steps, wait_for_gpu)
        for name, seconds in in_a_row.items():
            print(f"  {name + ',':28s} {1e3 * seconds:8.2f} ms, {steps} steps in a row{as_fast(in_a_row, name)}")
    print_breakdown(record_launches(model_gpu.cupy, model_gpu, model, ours), *peaks)
    print(f"\n{gpu_name()}, {preset}, {precision}, B {batch} x T {context}, {optimizer}: {1e3 * times['ours']:.2f} ms, "
          f"{tokens / times['ours']:,.0f} tokens/s, {memory['ours'] / 2 ** 30:.2f} GiB; {versions()}")


def bench_dpo(batch=512, length=64, peer=False, rounds=5):
    """A step of DPO on the GPU, of big in bf16: pairs of random tokens, of which three quarters are answers, and AdamW; with
    --peer PyTorch's, eager and compiled.  --batch: rows; --length: their tokens."""
    pick("gpu")
    config = CONFIGS["big"]
    tokens, targets = random_batch(config, batch, length)
    targets[:, :length // 4] = targets[:, length:] = -1
    model = model_gpu.Model(config, precision="bf16")
    reference = model.log_probs(tokens, targets)

    def ours():
        model.forward(tokens, targets, [batch // 2] * config.predict, reference, lambda *now: rl.dpo_weights(*now, 0.1))
        model.backward()
        model.update(1e-6, decay=0.0)
    functions = {"ours": ours}
    if peer:
        data = [tokens, targets[:, :length].copy(), reference.astype(np.float32)]
        for name in "eager", "compiled":
            functions[f"peer: PyTorch {name}"] = twin_dpo(model, name == "compiled", *data)
    for function in functions.values():
        seconds_a_call(function, 4, wait_for_gpu)
    times = best_times(functions, rounds, 10, wait_for_gpu)
    print(f"a step of DPO, big, {batch} rows of {length} tokens, bf16, {gpu_name()}: ten steps a round, best of {rounds}")
    print_steps(times, batch * length)


def twin_dpo(model, compiled, *data, device="cuda"):
    """-> step() of the twin on these tokens, targets and log-probabilities of the reference."""
    import torch
    import torch_twin
    torch.set_float32_matmul_precision("high")
    tokens, targets, reference = [torch.from_numpy(array).to(device) for array in data]
    twin = twin_of(model, device)
    tables = torch_twin.tables(model.config, tokens.shape[1], device)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def loss():
        return torch_twin.dpo_loss(twin.log_probs(tokens, targets, *tables), reference, 0.1)
    forward = torch.compile(loss) if compiled else loss

    def step():
        with torch.autocast(device, torch.bfloat16):
            total = forward()
        total.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.detach()
    return step


def versions():
    """Of what computes, in words; and whether what Hopper alone has was left out."""
    runtime = model_gpu.cupy.cuda.runtime
    cuda, driver = [f"{number // 1000}.{number % 1000 // 10}" for number in (runtime.runtimeGetVersion(),
                                                                             runtime.driverGetVersion())]
    return (f"Python {platform.python_version()}, NumPy {np.__version__}, CuPy {model_gpu.cupy.__version__}, CUDA {cuda}, "
            f"driver for {driver}" + ("" if model_gpu.HOPPER else ", --hopper 0"))


def distributed_twin(ranks, model, B):
    """-> step() of the twin, compiled, its gradients averaged over the ranks."""
    import torch.distributed
    torch.set_float32_matmul_precision("high")
    torch.cuda.set_device(ranks.local)
    if not torch.distributed.is_initialized():
        address = f"file://{tempfile.mktemp()}"     # a name that nobody else has: where the ranks meet
        torch.distributed.init_process_group("nccl", init_method=ranks.all_gather(address)[0], rank=ranks.rank,
                                             world_size=ranks.size)
    twin, config = twin_of(model, "cuda"), model.config
    if ranks.size > 1:
        twin = torch.nn.parallel.DistributedDataParallel(twin, device_ids=[ranks.local])
        twin.config = config
    return twin_step(twin, random_batch(config, B, config.context), True, torch.bfloat16)


def bench_scale(gpus=0, batch=64, optimizer="adamw", peer=False, rounds=5):
    """A training step on several GPUs: of big in bf16, milliseconds and tokens/s, with as many rows on each GPU, and with
    these shared out.  "alone": no sum of the gradients, so each GPU works for itself; the difference is what communication
    costs, with Muon less what sharing its products out saves.  --peer: PyTorch's DDP.  --gpus: processes to start, a GPU each
    (else as a launcher says, or 1)."""
    pick("gpu")                           # ValueError where there is none

    def of_rank(_, ranks):
        model_gpu.take_gpu(ranks.local)
        config = CONFIGS["big"]
        T = config.context
        model = model_gpu.Model(config, precision="bf16", micro_batch=batch, optimizer=optimizer)
        nccl = train.Nccl(ranks)

        def slowest(step):
            """Seconds of ten steps a round, the best, on the slowest rank."""
            times = []
            for _ in range(rounds + 1):             # one to warm up
                wait_for_gpu()
                ranks.all_gather(None)
                times.append(max(ranks.all_gather(seconds_a_call(step, 10, wait_for_gpu))))
            return min(times[1:])

        for B in dict.fromkeys((batch, batch // ranks.size)):
            tokens, targets = random_batch(config, B, T)

            def step():
                losses = model.forward(tokens, targets, [B * T * ranks.size] * config.predict)
                model.backward()
                if model.communicator:
                    model.communicator.all_reduce(losses)
                model.update(3e-4)
            times = {}
            for name, model.communicator in ("ours, alone", None), ("ours", nccl):
                times[name] = slowest(step)
            if peer:
                times["peer: PyTorch compiled, DDP"] = slowest(distributed_twin(ranks, model, B))
            print(f"{ranks.size} GPUs, B {B} x T {T} each, bf16, {optimizer}, {gpu_name()}: ten steps a round, best of {rounds}")
            print_steps(times, ranks.size * B * T)
        # NCCL takes leave of all GPUs at once, so before its processes wait for each other
        model.communicator = nccl = None
        if peer:
            import torch.distributed
            torch.distributed.destroy_process_group()
    return train.run_ranks(of_rank, argparse.Namespace(gpus=gpus or None))


def bench_attention(precision="bf16", lengths=(512, 1024, 4096), rounds=5):
    """Attention on the GPU: our kernels, forward and backward, causal, D 64, 12 query and 4 key/value heads, 32,768 tokens, at
    several T; beside PyTorch's, of which "math" is attention without flash, with all T x T probabilities in memory."""
    pick("gpu")                           # ValueError where there is none
    cupy = model_gpu.cupy
    torch = import_peer("torch")

    best = partial(gpu_seconds, calls=20, rounds=rounds)
    print(f"attention, 32,768 tokens, D 64, 12/4 heads, causal, {precision}, {gpu_name()}: ms, best of "
          f"{rounds} x 20")
    for T in lengths:
        B, config = 32768 // T, replace(CONFIGS["big"], context=T)
        gpu, rng = model_gpu.Gpu(config, precision, "cublas"), default_rng(0)
        qkv, dout = [on_gpu(rng.standard_normal((B * T, width), np.float32), precision)
                     for width in (config.qkv_width, config.dim)]
        out, dqkv = cupy.empty_like(dout), cupy.empty_like(qkv)
        lse, delta = [cupy.empty((B, config.heads, T), np.float32) for _ in range(2)]
        rows = {"ours": (best(lambda: model_gpu.attention_forward(gpu, out, lse, qkv, B, T)),
                         best(lambda: model_gpu.attention_backward(gpu, dqkv, dout, out, lse, qkv, delta)))}
        for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "MATH") if torch else ():
            try:
                rows[f"PyTorch {name.split('_')[0].lower()}"] = torch_attention(torch, best, name, B, T, config, precision)
            except RuntimeError as error:           # not for this card or precision, or too little memory
                print(f"  T {T:5d} PyTorch {name}: {str(error).splitlines()[0]}")
        together = {name: sum(row) for name, row in rows.items()}
        for name, (forward, backward) in rows.items():
            print(f"  T {T:5d} {name:14s} forward {1e3 * forward:7.3f}  backward {1e3 * backward:7.3f}  together "
                  f"{1e3 * together[name]:7.3f}{as_fast(together, name)}", flush=True)


def torch_attention(torch, best, backend, B, T, config, precision):
    """(seconds forward, seconds backward)"""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    inputs = [torch.randn(B, heads, T, config.head_dim, device="cuda", dtype=kind, requires_grad=True)
              for heads in (config.heads, config.kv_heads, config.kv_heads)]

    def forward():                                  # on the default stream, as ours
        return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        y = forward()
        dy = torch.randn_like(y)
        return best(forward), best(lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True))


# ----------------------------------------------------------------------------------------------------------------------
# 5. Losses
# ----------------------------------------------------------------------------------------------------------------------
RUN = re.compile(r"(muon|adamw|twin)(?:/(fp32|tf32|bf16))?(?::(\d+))?(?:@([0-9.e-]+))?(?:\+([0-9.]+))?")


def curve(step, losses, wait, tokens, val, settings, config, B, seed):
    """Train for settings.steps by step(inputs, targets, lr) -> [[tokens, seconds, {kind: nats a token}], ...]; evaluating
    takes no seconds.  losses(inputs, targets) -> those of the heads, without a gradient."""
    T, K, points, seconds = config.context, config.predict, [], 0.0
    wait()
    started = time.perf_counter()
    for i in range(settings.steps):
        first, end = (train.windows_before(at, settings, T) for at in (i, i + 1))
        starts = train.window_starts(seed, first, end - first, len(tokens), T, K)
        step(*train.get_batch(tokens, starts, T, K), train.learning_rate(i, settings))
        if (i + 1) % max(1, settings.steps // 16) and i + 1 < settings.steps:
            continue
        wait()
        seconds += time.perf_counter() - started
        held_out = {}
        for kind, ids in val.items():
            sums = [(len(inputs), float(losses(inputs, targets)[0]))
                    for inputs, targets in train.even_windows(ids, T, K, B, 1 << 17, train.Ranks())]
            held_out[kind] = sum(n * loss for n, loss in sums) / sum(n for n, _ in sums)
        points.append([end * T, seconds, held_out])
        started = time.perf_counter()
    return points


def run_of_ours(optimizer, precision, *rest):
    """rest: curve's arguments from `tokens` on -> its points, on our engine."""
    *_, settings, config, B, seed = rest
    model = model_gpu.Model(config, seed, precision=precision, micro_batch=B, optimizer=optimizer)
    return curve(partial(train_step, model, momentum=settings.momentum), model.forward, wait_for_gpu, *rest)


def run_of_the_twin(_, precision, *rest):
    """The same on compiled PyTorch with AdamW, from the same weights; compiling takes no seconds."""
    import torch
    import torch_twin
    *_, config, B, seed = rest
    model_gpu.cupy.get_default_memory_pool().free_all_blocks()          # of the run before
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    twin = twin_of(model_cpu.Model(config, seed, dtype=np.float32, training=False), "cuda")
    autocast = torch.bfloat16 if precision == "bf16" else None
    train_twin = torch_twin.make_step(twin, True, autocast)
    losses = torch_twin.make_losses(twin, False, autocast)
    for _ in range(3):                              # compiles, without an update
        takes_arrays(train_twin.warm_up, "cuda")(*random_batch(config, B, config.context))
    held_out_losses = torch.no_grad()(takes_arrays(lambda *batch: losses(*batch)[0], "cuda"))
    points = curve(takes_arrays(train_twin, "cuda"), held_out_losses, torch.cuda.synchronize, *rest)
    torch.cuda.empty_cache()
    return points


def bench_curves(tokens, val, model="big", runs=("muon", "adamw", "twin"), steps=1024, lr=1.2e-3, momentum=0.95, seeds=(0,),
                 batch=64, results="", plot=""):
    """Held-out losses on the GPU by tokens and by seconds: runs from one start on the same batches, each with a schedule of its
    own length, NAME[/PRECISION][:STEPS][@LR][+GROWTH], NAME an optimizer of ours or "twin", PyTorch compiled, with AdamW, and
    GROWTH as in train.windows_before; --momentum: of Muon.  --tokens: a data/train-*.bin of the model's vocabulary; --val: its
    data/val-*.bin.  Results gather in the file --results, a line a run, and all of them are compared; --plot FILE draws them."""
    config, made = CONFIGS[model], []
    ids = np.fromfile(tokens, "<u2")
    held_out = {re.sub(r"val-(.*)-\w+-\w+\.bin", r"\1", os.path.basename(path)): np.fromfile(path, "<u2") for path in val}
    for seed in seeds:
        for text in runs:
            name, precision, own_steps, own_lr, growth = RUN.fullmatch(text).groups()
            precision, count = precision or "bf16", int(own_steps or steps)
            run = argparse.Namespace(steps=count, warmup=count // 10, lr=float(own_lr or lr), growth=float(growth or 0),
                                     momentum=momentum, batch_tokens=batch * config.context)
            train_it = run_of_the_twin if name == "twin" else run_of_ours
            points = train_it(name, precision, ids, held_out, run, config, batch, seed)
            read, seconds, losses = points[-1]
            made.append({"run": text, "name": name, "lr": run.lr, "momentum": momentum, "seed": seed, "batch": run.batch_tokens,
                         "points": points})
            print(f"{text:20} seed {seed}  lr {run.lr:.1e}  {read / 1e6:6.1f}M tokens  "
                  f"{seconds:7.1f} s  {1e3 * seconds / count:6.2f} ms a step  "
                  + "  ".join(f"{kind} {loss:.4f}" for kind, loss in losses.items()), flush=True)
            if results:
                with open(results, "a", encoding="utf-8") as file:
                    file.write(json.dumps(made[-1]) + "\n")
    if results:
        made = [json.loads(line) for line in open(results, encoding="utf-8")]
    compare_curves(made)
    if plot:
        plot_curves(made, plot)


def compare_curves(results):
    """What share of the twin's tokens and seconds our runs take to its final losses, all of them: means over the seeds that
    both have, at least one."""
    runs = {}
    for result in results:
        # what else tells runs apart that are called alike
        same = [result.get(name) for name in ("batch", "lr", "momentum")] + [result["points"][-1][0]]
        runs.setdefault((result["name"] == "twin", result["run"], *same), {})[result["seed"]] = result["points"]

    def mean(points):
        """[[tokens, seconds, {kind: loss}] of each seed] -> the same once."""
        return (*np.mean([point[:2] for point in points], axis=0),
                {kind: np.mean([losses[kind] for *_, losses in points]) for kind in points[0][2]})

    for (is_twin, name, *_), twins in runs.items():
        for (of_twin, run, *_), ours in runs.items():
            seeds = sorted(twins.keys() & ours.keys())
            if of_twin or not is_twin or not seeds:
                continue
            tokens, seconds, losses = mean([twins[seed][-1] for seed in seeds])
            points = map(mean, zip(*[ours[seed] for seed in seeds]))
            reached = [point for point in points if all(point[2][kind] <= losses[kind] for kind in losses)]
            if reached:
                print(f"{run:24} reaches {name}'s losses after {tokens / 1e6:.1f}M tokens, seeds {', '.join(map(str, seeds))}, "
                      f"with {reached[0][0] / tokens:.2f} of the tokens and {reached[0][1] / seconds:.2f} of the seconds")


def plot_curves(results, path):
    """The mean of the held-out losses against tokens and against seconds."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for result in results:
        tokens, seconds, losses = zip(*result["points"])
        loss = [np.mean(list(kinds.values())) for kinds in losses]
        colour = {"muon": "C0", "adamw": "C1", "twin": "C2"}[result["name"]]
        left.plot(np.divide(tokens, 1e6), loss, colour, label=result["run"])
        right.plot(seconds, loss, colour)
    left.set(xlabel="million tokens", ylabel="held-out loss, nats a token", ylim=(None, 4.5))
    right.set(xlabel="seconds")
    left.legend()
    figure.savefig(path)


def bench_finetune(base, data, context=512, tokens=32768, steps=300, lr=2e-4, seed=0, precision="bf16", peer=False, rounds=3):
    """Somebody else's model fine-tuned: by ours and with --peer by transformers' own under PyTorch's AdamW, on the same batches;
    the losses, then a step of full windows, timed, where that model is compiled (--rounds 0: not).  --data: instructions;
    --tokens: a step; --seed: of what is held out, and of the order of the rest."""
    _, _, config, tokenizer, data = sft.read_base({"base": base, "context": context, "data": data})
    examples = sft.make_examples(tokenizer, sft.read_conversations(data), context, seed)
    settings = argparse.Namespace(steps=steps, warmup=steps // 10, lr=lr)

    def batches():
        plan = itertools.chain.from_iterable(sft.plan_epoch(examples.lengths, tokens, seed, epoch)
                                             for epoch in itertools.count())
        for step, chosen in zip(range(steps), plan):
            inputs, targets = sft.make_batch([examples.train[i] for i in chosen], context, 1, tokenizer.end_of_turn)
            yield inputs, targets, train.learning_rate(step, settings)

    engine = pick("auto")
    gpu = engine is model_gpu
    options = {"precision": precision, "micro_batch": tokens // context} if gpu else {"dtype": np.float32}
    model, _ = checkpoint.load(base, engine, {**options, "optimizer": "adamw"}, context)
    ours = partial(train_step, model)
    losses = {"ours": [float(read()[0][0]) for read in [model.later(ours(*batch)) for batch in batches()]]}
    functions, memory, wait = {"ours": ours}, Counter(), lambda: None
    if gpu:
        wait = wait_for_gpu
        memory["ours"] = model_gpu.cupy.get_default_memory_pool().total_bytes()
    if peer:
        import torch
        step, compiled = llama_steps(base, config, gpu, precision)
        losses["transformers"] = [float(loss) for loss in [step(*batch) for batch in batches()]]
        functions["transformers compiled"] = compiled
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    print(f"{base} fine-tuned on {', '.join(data)}: {steps} steps of at most {tokens:,} tokens, context {context}, AdamW {lr}; mean "
          "loss, nats a learned token")
    last = max(1, steps // 6)
    for name, row in losses.items():
        print(f"  {name:24s} steps 1 to {last}: {np.mean(row[:last]):.4f}   the last {last}: {np.mean(row[-last:]):.4f}")

    if not rounds:
        return
    batch = random_batch(config, tokens // context, context)                        # full windows, all of which count
    functions = {name: partial(function, *batch, 1e-5) for name, function in functions.items()}
    for name, function in functions.items():
        seconds_a_call(function, 4, wait)
        if gpu and name != "ours":
            memory[name] = torch.cuda.max_memory_allocated()
    times = best_times(functions, rounds, 5, wait)
    print_steps(times, tokens, {name: f"  {memory[name] / 2 ** 30:6.2f} GiB" for name in times})


def llama_steps(base, config, gpu, precision):
    """Of transformers' model in this folder, eager and compiled: step(inputs, targets, lr) -> loss, as torch_twin has it."""
    import torch
    import torch_twin
    import transformers

    class Llama(torch.nn.Module):
        """With the face of torch_twin.Twin."""
        def __init__(self):
            super().__init__()
            self.config = config
            self.model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

        def forward(self, tokens, targets, cos, sin):
            logits = self.model(tokens, use_cache=False).logits.float()
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)[None]

    torch.set_float32_matmul_precision("high")
    device = "cuda" if gpu else "cpu"
    llama = Llama().to(device)
    if precision != "bf16":                         # in fp32 a whole step does not fit the memory
        llama.train()
        llama.model.gradient_checkpointing_enable()

    def step_of(compiled):
        autocast = torch.bfloat16 if gpu and precision == "bf16" else None
        return takes_arrays(torch_twin.make_step(llama, compiled, autocast), device)
    return step_of(False), step_of(gpu)


# The record of docs/race.md: a commit, and the options of train.py.
RECORD = "45c2de4", "--steps 780 --momentum 0.9"


def welch(a, b):
    """The chance of means that differ so much, a's below b's, if both came from one mean: Welch's test, one-sided."""
    parts = [np.var(x, ddof=1) / len(x) for x in (a, b)]
    freedom = sum(parts) ** 2 / sum(part ** 2 / (len(x) - 1) for part, x in zip(parts, (a, b)))
    t = (np.mean(b) - np.mean(a)) / math.sqrt(sum(parts))
    # the area of Student's distribution beyond t, with x = tan(angle) sqrt(freedom)
    least = math.atan(t / math.sqrt(freedom))
    angles = np.linspace(least, math.pi / 2, 100_001)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return scale * (math.pi / 2 - least) * np.mean(np.cos(angles) ** (freedom - 1))


def bench_race(options="", record=RECORD[0], seeds=(0, 1, 2, 3)):
    """The race of docs/race.md: small on Python's English, the record and this folder's code by turns, on this machine.  --record:
    a commit or a folder with its code; --options: of this folder's train.py, where they are other than the record's."""
    with tempfile.TemporaryDirectory() as folder:
        if not os.path.isdir(record):
            code = subprocess.run(["git", "-C", ROOT, "archive", record], capture_output=True, check=True).stdout
            record = f"{folder}/record"
            os.mkdir(record)
            subprocess.run(["tar", "-x", "-C", record], input=code, check=True)
        results = {"record": [], "candidate": []}
        for seed in seeds:
            for name, code, how in ("record", record, RECORD[1]), ("candidate", ROOT, options or RECORD[1]):
                out = f"out/{name}-{seed}"
                done = subprocess.run([sys.executable, f"{code}/train.py", "small", "--seed", str(seed), "--out", out, *how.split()],
                                      cwd=folder, capture_output=True, text=True)
                if done.returncode:
                    raise ValueError(f"{name}: {done.stderr.strip()}")
                log = [json.loads(line) for line in open(f"{folder}/{out}/log.jsonl")]
                results[name].append([log[-1]["val_bpb"], max(line.get("seconds", 0) for line in log)])
                print(f"{name:10} seed {seed}  {results[name][-1][0]:.4f} bits/byte  {results[name][-1][1]:6.1f} s", flush=True)
    theirs, ours = (np.array(results[name]).T for name in results)
    chance = welch(ours[0], theirs[0])
    won = chance < 0.01 and ours[1].mean() <= 1.01 * theirs[1].mean()
    print(f"| {options or 'this code'} | {ours[0].mean():.4f} | {theirs[0].mean():.4f} | {ours[1].mean() / theirs[1].mean():.2f} of its "
          f"seconds | p = {chance:.2g} | {'a new record' if won else 'no record'} |")


# ----------------------------------------------------------------------------------------------------------------------
# 6. The command line
# ----------------------------------------------------------------------------------------------------------------------
COMMANDS = {run.__name__[len("bench_"):]: run for run in (
    bench_tokenizer, bench_cpu, bench_decode, bench_drafts, bench_euler, bench_counts, bench_train, bench_dpo, bench_scale,
    bench_attention, bench_curves, bench_finetune, bench_race)}

# What argparse has to know of an option, where that is more than its default says.
OPTIONS = {"data": {"nargs": "+"}, "device": {"choices": ("auto", "gpu", "cpu")}, "matmul": {"choices": ("cublas", "ours")},
           "optimizer": {"choices": ("muon", "adamw")}, "precision": {"choices": model_gpu.PRECISIONS}, "val": {"nargs": "+"}}


def add_command(commands, name, run):
    """The parameters of `run` are the command's options."""
    text = " ".join(run.__doc__.split())
    command = commands.add_parser(name, help=text.split(": ")[0], description=text)
    command.add_argument("--hopper", type=int, default=1, choices=(0, 1), help="0: without what Hopper has, as an RTX 30 or 40")
    for name, parameter in inspect.signature(run).parameters.items():
        default = parameter.default
        how = {"default": default, "type": type(default)}
        if default is parameter.empty:
            how = {} if name == "file" else {"required": True}
        elif default is False:
            how = {"action": "store_true"}
        elif isinstance(default, tuple):
            how.update(nargs="+", type=type(default[0]))
        command.add_argument("file" if name == "file" else f"--{name}", **{**how, **OPTIONS.get(name, {})})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    for name, run in COMMANDS.items():
        add_command(commands, name, run)
    options = vars(parser.parse_args())
    asked = options.pop("command")
    model_gpu.HOPPER = options.pop("hopper", 1) == 1
    # without a name: all that need no choice, each as far as this machine has what it takes
    for name in [asked] if asked else ("cpu", "decode", "tokenizer", "train", "attention", "euler"):
        try:
            COMMANDS[name](**options)
        except (ImportError, OSError, ValueError) as error:
            reason = f"{error.name} is missing: {PEERS_HINT}." if isinstance(error, ImportError) else error
            print(f"error: {reason}" if asked else f"{name}: not measured: {reason}", file=sys.stderr)
            if asked:
                sys.exit(2)
        print()


if __name__ == "__main__":
    main()
