"""The README's numbers, each by one command, with the peer measured beside it in the same run where it is installed.

    python tests/bench.py               all that this machine has what it takes for, or one by name:
    python tests/bench.py tokenizer
    python tests/bench.py cpu
    python tests/bench.py decode --peer # generation, on a GPU too where there is one; --model DIR: of a trained model
    python tests/bench.py drafts        # what speculation brings: of the model in out/small, or those of --model DIR ...
    python tests/bench.py euler         # of the model in out/small
    python tests/bench.py counts FILE   # what counting reaches on a text, beside the model in out/small
    python tests/bench.py train --peer  # on a GPU, as are all below
    python tests/bench.py scale --gpus 2 --peer
    python tests/bench.py attention
    python tests/bench.py curves --tokens data/train-KEY.bin --val data/val-*-KEY-*.bin
    python tests/bench.py finetune --base out/smollm2 --data FILE --peer

A row is the best of some rounds, and a round mostly runs all rows once, so that a busy machine slows ours and the peers
alike; in scale, attention, curves, and of --steps in a row, one row runs after the other.
"""
import argparse
import functools
import glob
import lzma
import math
import os
import re
import shutil
import sys
import tempfile
import time
import unittest.mock
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

DATA = ROOT.parent / "shared" / "data"


def best_times(functions, rounds):
    """{name: function} -> {name: seconds}, the best of `rounds`."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


# ----------------------------------------------------------------------------------------------------------------------
# tokenizer: training against `tokenizers`, encoding against tiktoken

def bench_tokenizer(arguments):
    """Train 4096 tokens on a text file and encode it with GPT-2's tokenizer, from an empty cache each time."""
    from script import available_cores
    from tokenizer import Tokenizer

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        unpack = lzma.open if arguments.text.suffix == ".xz" else open
        with unpack(arguments.text, "rb") as file, open(path, "wb") as out:
            shutil.copyfileobj(file, out)
        size = path.stat().st_size / 1e6
        text = path.read_bytes().decode("utf-8", "replace")
        gpt2_files = DATA / "gpt2" / "vocab.bpe", DATA / "gpt2" / "encoder.json"
        ours = Tokenizer.from_gpt2(*gpt2_files)
        cores = available_cores()
        print(f"{arguments.text.name}, {size:.1f} MB, {cores} cores, best of {arguments.rounds}")

        def encode_file(processes):
            ours.encoder.clear()
            ours.encode_file(path, Path(folder) / "ids.bin", processes=processes)

        def encode():
            ours.encoder.clear()
            return ours.encode(text)

        train = {f"ours, {cores} processes": lambda: Tokenizer.train_files([path], 4096),
                 "ours, 1 process": lambda: Tokenizer.train_files([path], 4096, processes=1)}
        encoding = {f"ours, file to file, {cores} processes": lambda: encode_file(cores),
                    "ours, file to file, 1 process": lambda: encode_file(1),
                    "ours, str to list": encode}
        os.environ["RAYON_NUM_THREADS"] = "1"       # read by tokenizers when it first works
        try:
            import tokenizers
            train["peer: tokenizers, 1 thread"] = lambda: train_peer(tokenizers, path)
        except ImportError:
            print("tokenizers is not installed, so it is not measured")
        try:
            import tiktoken
            judge = tiktoken_gpt2(tiktoken, *gpt2_files)
            encoding["peer: tiktoken, str to list"] = lambda: judge.encode_ordinary(text)
            print("ids equal tiktoken's:", encode() == judge.encode_ordinary(text))
        except ImportError:
            print("tiktoken is not installed, so it is not measured")

        times = best_times({**train, **encoding}, arguments.rounds)
        for title, rows in ("train 4096 tokens", train), ("encode with GPT-2's 50,257", encoding):
            *_, last = rows
            print(f"\n{title}")
            for name in rows:
                ratio = f"{times[last] / times[name]:6.2f} x the peer's speed" if last.startswith("peer") else ""
                print(f"  {name:38s} {times[name]:6.2f} s  {size / times[name]:6.1f} MB/s  {ratio}")


def train_peer(tokenizers, path):
    peer = tokenizers.Tokenizer(tokenizers.models.BPE())
    peer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, show_progress=False)
    peer.train([str(path)], trainer)


def tiktoken_gpt2(tiktoken, vocab_bpe, encoder_json):
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    ranks = data_gym_to_mergeable_bpe_ranks(str(vocab_bpe), str(encoder_json))
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    return tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})


# ----------------------------------------------------------------------------------------------------------------------
# cpu: a training step of the small model against PyTorch, eager and compiled

def bench_cpu(arguments):
    """Forward, backward, clip and AdamW of the small model at B x T in float32, on all cores."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"        # as train.py has it; read when NumPy loads
    import numpy as np

    import model_cpu
    from script import available_cores

    config, (B, T), cores = model_cpu.CONFIGS["small"], (arguments.batch, 128), available_cores()
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, config.vocab, (B, T)), rng.integers(0, config.vocab, (B, T + config.predict - 1))
    model = model_cpu.Model(config, 0, np.float32, threads=min(cores, B))

    def ours():
        model.forward(tokens, targets)
        model.backward()
        model.update(3e-4)

    steps = {"ours": ours}
    try:
        import torch
        sys.path.insert(0, str(ROOT / "tests" / "peers"))
        import torch_twin
        torch.set_num_threads(cores)
        for name, compiled in ("peer: PyTorch eager", False), ("peer: PyTorch compiled", True):
            step = torch_twin.make_step(torch_twin.Twin(config, model.params), compiled)
            steps[name] = functools.partial(step, torch.from_numpy(tokens), torch.from_numpy(targets))
    except ImportError:
        print("PyTorch is not installed, so it is not measured")
    for step in steps.values():                     # the first calls compile and allocate
        step()
        step()
    # five in a row: PyTorch's threads spin for a while after its last step, and would slow the first of ours
    times = dict.fromkeys(steps, float("inf"))
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            times[name] = min(times[name], *best_times({name: step}, 5).values())
    print(f"training step, small, B {B} x T {T}, float32, {cores} cores, best of {arguments.rounds} x 5, "
          f"OPENBLAS_CORETYPE {os.environ.get('OPENBLAS_CORETYPE') or 'not set'}")
    for name, seconds in times.items():
        ratio = f"  ours is {seconds / times['ours']:.2f} x as fast" if name != "ours" else ""
        print(f"  {name:24s} {1e3 * seconds:7.1f} ms  {B * T / seconds:9,.0f} tokens/s{ratio}")


# ----------------------------------------------------------------------------------------------------------------------
# decode: generation, a token at a time and speculative, against PyTorch with a CUDA graph, or eager on the CPU

SAMPLED = {"temperature": 0.8, "top_k": 50}


def seconds_a_token(tokens, count):
    """Of the `count` tokens after the first: the prompt's reading does not count."""
    next(tokens)
    started = time.perf_counter()
    for _ in range(count):
        next(tokens)
    return (time.perf_counter() - started) / count


def first_token(model, prompt):
    """Seconds to the first token of a prompt, all of which has to be read."""
    import model_cpu
    model.decoder.forget()
    started = time.perf_counter()
    next(model_cpu.generate(model, prompt, temperature=0, seed=0))
    return time.perf_counter() - started


def own_text(model, tokenizer, size):
    """A prompt of a trained model: what it writes itself.  Of an untrained one, whose tokenizer is None: any ids."""
    import numpy as np

    import model_cpu
    if tokenizer is None:
        return np.random.default_rng(0).integers(0, model.config.vocab, size).tolist()
    start = [tokenizer.special["<|endoftext|>"]]
    return start + list(model_cpu.generate(model, start, seed=0, vocab=tokenizer.vocab_size, most=size - 1, **SAMPLED))


def our_rows(model, tokenizer, prompt, count):
    """-> ({name: function() -> seconds a token}, {name: tokens a verification}, which a run of the function sets)."""
    import model_cpu
    vocab, rates = tokenizer and tokenizer.vocab_size, {}

    def run(name, settings, speculate):
        trace = []
        tokens = model_cpu.generate(model, prompt, seed=0, vocab=vocab, speculate=speculate, trace=trace, **settings)
        seconds = seconds_a_token(tokens, count)
        heads = [head for head, _, _ in trace[1:]]  # without the first token, which has no drafts
        if speculate:
            rates[name] = len(heads) / heads.count(0)
        return seconds

    rows = {}
    for how, settings in ("greedy", {"temperature": 0}), ("sampled", SAMPLED):
        for speculate in False, True:
            name = f"ours, {how}{', speculative' if speculate else ''}"
            rows[name] = functools.partial(run, name, settings, speculate)
    return rows, rates


def measure_rows(rows, rounds):
    """{name: function() -> seconds} -> {name: seconds}, the best of `rounds`."""
    runs = [{name: function() for name, function in rows.items()} for _ in range(rounds)]
    return {name: min(run[name] for run in runs) for name in rows}


def print_rows(length, times, rates, limit=None):
    """limit: seconds that it takes to read the weights once, which each token costs without speculation."""
    for name, seconds in times.items():
        notes = [f"{rates[name]:.2f} tokens a verification"] if name in rates else []
        if limit and name.startswith("ours") and name not in rates:
            notes.append(f"{limit / seconds:.0%} of the memory's limit")
        if name.startswith("peer"):
            notes.append(f"ours, greedy, is {seconds / times['ours, greedy']:.2f} x as fast")
        print(f"  after {length:3d}  {name:34s} {1e3 * seconds:8.3f} ms a token  {'; '.join(notes)}".rstrip(), flush=True)


def to_torch(array, device):
    """A tensor of it; on a GPU through pinned memory, as PyTorch's own loops do it, so that the host need not wait."""
    import torch
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device == "cuda" else tensor


def import_twin():
    """torch and tests/peers/torch_twin.py."""
    try:
        import torch
    except ImportError:
        raise ValueError("--peer needs PyTorch: pip install -r tests/peers/requirements.txt.") from None
    sys.path.insert(0, str(ROOT / "tests" / "peers"))
    import torch_twin
    return torch, torch_twin


def bench_decode(arguments):
    """Milliseconds a token, batch 1: on the GPU of big, or the model of --model, in bf16; on the CPU of small and medium."""
    import model_gpu

    reason = model_gpu.why_no_gpu()
    if arguments.device == "gpu" and reason:
        raise ValueError(reason)
    if arguments.device != "cpu" and not reason:
        decode_on_gpu(arguments)
    if arguments.device != "gpu":
        decode_on_cpu(arguments, arguments.model if arguments.device == "cpu" or reason else None)


def decode_on_gpu(arguments):
    """The host's time, which waits for each token.  The peer computes head 0 alone; its tokens are read one by one, as ours
    are, or all at the end."""
    import cupy
    import numpy as np

    import checkpoint
    import model_cpu
    import model_gpu

    name, tokenizer = arguments.model or "big, untrained", None
    if arguments.model:
        model, tokenizer = checkpoint.load(arguments.model, model_gpu, {"precision": "bf16", "training": False})
    else:
        model = model_gpu.Model(model_cpu.CONFIGS["big"], precision="bf16", training=False)
    c = model.config
    _, bandwidth = ceilings(cupy, model_gpu, model.gpu)
    cupy.get_default_memory_pool().free_all_blocks()
    read = 2 * (model_cpu.param_count(c) - c.vocab * c.dim)             # bytes; of the embedding only a row
    peer = None
    if arguments.peer:
        torch, torch_twin = import_twin()
        twin = torch_twin.Twin(c, {key: cupy.asnumpy(array) for key, array in model.params.items()})
        token, position, logits, replay = torch_twin.capture_greedy(twin.to("cuda", torch.bfloat16))

        def peer(length, steps, each):
            """Seconds a token after `length` tokens; each: the host reads them one by one."""
            position.fill_(length)
            replay()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(steps):
                replay()
                if each:
                    token.item()
            torch.cuda.synchronize()
            return (time.perf_counter() - started) / steps

    text = own_text(model, tokenizer, min(400, c.context * 4 // 5))
    card = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(f"generation, {name}, bf16, {card}: up to {arguments.tokens} tokens a round, best of {arguments.rounds}; "
          f"{read / 1e6:.0f} MB of weights a token, copy {bandwidth / 1e12:.2f} TB/s: {1e3 * read / bandwidth:.3f} ms")
    if peer:
        position.fill_(0)
        for token_id in text[:16]:
            token.fill_(token_id)
            replay()
        model.decoder.forget()
        ours, theirs = model.decoder.extend(text[:16])[-1, 0], logits.flatten().float().cpu().numpy()
        error = np.linalg.norm(theirs - ours) / np.linalg.norm(ours)
        print(f"  logits after 16 tokens: PyTorch's differ from ours by {error:.1e}, relative L2")
    for length in sorted({min(length, len(text)) for length in (1, 128, 400)}):
        steps = min(arguments.tokens, c.context - length - 1)           # all in one window
        rows, rates = our_rows(model, tokenizer, text[:length], steps)
        if peer:
            rows["peer: PyTorch, CUDA graph"] = functools.partial(peer, length, steps, True)
            rows["peer: the same, read at the end"] = functools.partial(peer, length, steps, False)
        for function in rows.values():              # the first calls load what they need
            function()
        print_rows(length, measure_rows(rows, arguments.rounds), rates, read / bandwidth)
    seconds = []
    for record_at in math.inf, 1:                       # launched one by one; from a CUDA graph
        with unittest.mock.patch.object(model_gpu, "RECORD_AT", record_at):
            model.decoder.replays.clear()
            first_token(model, text)
            seconds.append(min(first_token(model, text) for _ in range(arguments.rounds)))
    print(f"  the first token of a prompt of {len(text)}: {1e3 * seconds[1]:.2f} ms, and {1e3 * seconds[0]:.2f} ms the first "
          f"{model_gpu.RECORD_AT - 1} times, before its launches are a CUDA graph")


def decode_on_cpu(arguments, folder):
    """float32, NumPy's threads as the environment has them.  The peer, with a KV cache of its own, runs on all cores and on
    one: the products of a single token are so small that its threads often cost more than they bring."""
    import checkpoint
    import model_cpu
    from script import available_cores

    if folder is None and os.path.exists(os.path.join("out", "small", "config.json")):
        folder = os.path.join("out", "small")
    options, models = {"dtype": "float32", "training": False}, {}
    if folder:
        models[folder] = checkpoint.load(folder, model_cpu, options)
    for name in "small", "medium":
        models[f"{name}, untrained"] = model_cpu.Model(model_cpu.CONFIGS[name], **options), None
    if arguments.peer:
        torch, torch_twin = import_twin()
    for name, (model, tokenizer) in models.items():
        c = model.config
        print(f"generation, {name}, dim {c.dim}, {c.layers} layers, float32, {available_cores()} cores: up to "
              f"{arguments.tokens} tokens a round, best of {arguments.rounds}, OPENBLAS_NUM_THREADS {os.environ.get('OPENBLAS_NUM_THREADS') or 'not set'}")
        twin = torch_twin.Twin(c, model.params) if arguments.peer else None
        text = own_text(model, tokenizer, min(100, c.context * 4 // 5))
        for length in 1, len(text):
            steps = min(arguments.tokens, c.context - length - 1)       # all in one window
            rows, rates = our_rows(model, tokenizer, text[:length], steps)
            if tokenizer is None:                   # drafts of an untrained model are never right
                rows = {key: function for key, function in rows.items() if "speculative" not in key}
            if twin:
                def peer(threads, prompt=text[:length], steps=steps, twin=twin):
                    time.sleep(0.1)                 # idle threads spin for a while: ours would slow PyTorch's, and
                    torch.set_num_threads(threads)
                    seconds = seconds_a_token(torch_twin.greedy(twin, prompt), steps)
                    time.sleep(0.1)                 # PyTorch's the next of ours
                    return seconds
                for threads in sorted({1, available_cores()}):
                    rows[f"peer: PyTorch eager, threads: {threads}"] = functools.partial(peer, threads)
            for function in rows.values():
                function()
            print_rows(length, measure_rows(rows, arguments.rounds), rates)


# ----------------------------------------------------------------------------------------------------------------------
# drafts: how often the further heads are right on text that a model has not seen, and what that brings

def held_out_prompts(folder, tokenizer, config, count):
    """{kind of text: prompts}: of a pretrained model a quarter of a window from even places of what it held out, of a
    fine-tuned one prompts whose answers it has not seen."""
    import numpy as np

    import checkpoint
    import sft

    state = checkpoint.load_state(folder)
    settings, size = state["settings"], config.context // 4
    if state["script"] == "sft.py":
        examples = sft.make_examples(tokenizer, sft.read_conversations(settings["data"]), config.context, settings["seed"])
        prompts = [ids[:mask.argmax()].tolist() for ids, mask in examples.held_out]
        return {"answers": [prompt for prompt in prompts if len(prompt) <= size][:count]}
    kinds = {}
    for path in sorted(glob.glob(f"data/val-*-{settings['tokens_key']}-*.bin")):
        ids = np.fromfile(path, "<u2")
        kinds[os.path.basename(path).split("-")[1]] = [ids[start:start + size].tolist() for start in np.linspace(
            0, len(ids) - size, count, dtype=int)]
    if not kinds:
        raise ValueError(f"the held-out tokens of {folder}, data/val-*-{settings['tokens_key']}-*.bin, are not here.")
    return kinds


def bench_drafts(arguments):
    """Texts go on for half a window, answers to their end.  The same tokens with every number of drafts."""
    import checkpoint
    import model_cpu
    import model_gpu

    engine = model_gpu.pick(arguments.device)
    options = {"precision": "bf16"} if engine is model_gpu else {"dtype": "float32"}
    for folder in arguments.model:
        model, tokenizer = checkpoint.load(folder, engine, {**options, "training": False})
        c, stop = model.config, set(tokenizer.special.values())
        if c.predict == 1:
            raise ValueError(f"{folder} has one prediction head: nobody drafts.")
        print(f"{folder}: drafts of {' or '.join(map(str, sorted({1, c.predict - 1})))} further heads, against none")
        for kind, prompts in held_out_prompts(folder, tokenizer, c, arguments.prompts).items():
            for how, settings in ("greedy", {"temperature": 0}), ("sampled", SAMPLED):
                texts, times, heads = {}, {}, {}
                for drafts in (0, 1, c.predict - 1):
                    model.draft_heads, heads[drafts], texts[drafts] = drafts, [], []
                    for round in range(2):          # the first round loads what is needed
                        started = time.perf_counter()
                        for seed, prompt in enumerate(prompts):
                            trace = []
                            model.decoder.forget()
                            text = list(model_cpu.generate(model, prompt, seed=seed, vocab=tokenizer.vocab_size, stop=stop,
                                                           most=c.context // 2, trace=trace, **settings))
                            if round:
                                heads[drafts] += trace
                                texts[drafts].append(text)
                        times[drafts] = time.perf_counter() - started
                count = max(1, sum(map(len, texts[0])))
                if engine is model_gpu and not texts[0] == texts[1] == texts[c.predict - 1]:
                    raise ValueError("drafts have changed a text.")
                print(f"  {kind}, {how}: {count:,} tokens from {len(prompts)} prompts, {1e3 * times[0] / count:.3f} ms a token")
                for drafts in sorted({1, c.predict - 1}):
                    right = [head for head, _, _ in heads[drafts]]
                    rates = [f"{right.count(k) / max(1, sum(head == 0 and read >= k for head, read, _ in heads[drafts])):.1%}"
                             for k in range(1, drafts + 1)]
                    print(f"    drafts {drafts}: {len(right) / right.count(0):.2f} tokens a verification (right: {', '.join(rates)}), "
                          f"{1e3 * times[drafts] / count:.3f} ms a token, {times[0] / times[drafts]:.2f} x", flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# euler: do the trained layers behave like steps of a solver?

def bench_euler(arguments):
    """The trained model's layers as steps of size 1, against other ways to integrate the same dx/dt = f(x, t)."""
    import numpy as np

    import checkpoint
    import model_cpu

    model, _ = checkpoint.load(arguments.model, model_cpu)
    key = checkpoint.load_state(arguments.model)["settings"]["tokens_key"]
    c, T = model.config, model.config.context
    held_out = sorted(glob.glob(f"data/val-*-{key}-*.bin"))
    if not held_out:
        raise ValueError(f"the held-out tokens of {arguments.model}, data/val-*-{key}-*.bin, are not here.")
    ids = np.fromfile(held_out[0], "<u2").astype(np.int64)
    windows = ids[:min(64, len(ids) // (T + 1)) * (T + 1)].reshape(-1, T + 1)
    print(f"{arguments.model} after {model.step} steps, {windows[:, 1:].size:,} held-out tokens, loss of head 0")
    for i, (loss, step, _) in enumerate(model_cpu.euler_table(model, windows)):
        print(f"  stopped after {'the embedding' if i == 0 else f'layer {i - 1}':14s} {loss:.4f}   |f(x)|/|x| {step:.3f}")

    def scaled(w, size):
        """Both substeps end in a product, so scaling that matrix scales the step."""
        return {**w, "out": size * w["out"], "down": size * w["down"]}

    def layer(x, i, size=1.0):
        """x after one step of that size by layer i."""
        x, w = x.copy(), scaled(model_cpu.layer_views(model.params, i), size)
        layers, shared = model.workspaces[0].buffers(*x.shape[:2])
        model_cpu.block_forward(x, w, layers[i], shared, c, model.rope)
        return x

    def euler(parts):
        def solve(x, i):
            for _ in range(parts):
                x = layer(x, i, 1 / parts)
            return x
        return solve

    def heun(x, i):
        """x + (f(x) + f(x + f(x))) / 2: two evaluations, the trapezoidal rule."""
        return (x + layer(layer(x, i), i)) / 2

    solvers = {"one step a layer, as trained": euler(1), "two half steps": euler(2), "four quarter steps": euler(4),
               "Heun's method": heun, "every step 10% longer": lambda x, i: layer(x, i, 1.1),
               "every step 10% shorter": lambda x, i: layer(x, i, 0.9)}
    for name, solve in solvers.items():
        x = model.params["embed"][windows[:, :-1]]                                  # (B,T,C)
        for i in range(c.layers):
            x = solve(x, i)
        h, rstd, loss = np.empty((x.size // c.dim, c.dim)), np.empty(x.size // c.dim), np.zeros(1)
        model_cpu.rmsnorm_forward(h, rstd, x.reshape(-1, c.dim), model.params["norm"], c.norm_eps)
        logits = (h @ model.params["heads"][:c.vocab].T)[:, None]
        head_targets = windows[:, 1:].reshape(-1, 1)
        exp_sum = np.empty(head_targets.shape)
        model_cpu.cross_entropy_forward(loss, exp_sum, logits, head_targets, len(head_targets))
        print(f"  {name:30s} {loss[0]:.4f}")


# ------------------------------------------------------------------------------------------------------------
# counts: the first rungs of the ladder that a model climbs

def numbered(ids, n, vocab):
    """Every run of n ids as one number, in the order in which the runs end; vocab ** n must fit 63 bits."""
    import numpy as np
    numbers = np.zeros(len(ids) - n + 1, np.int64)
    for i in range(n):
        numbers = numbers * vocab + ids[i:len(numbers) + i]
    return numbers


def look_up(asked, known, values):
    """Of each number asked for, what stands beside it in `known`, which is sorted; 0 where it is not there.
    """
    import numpy as np
    places = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    return np.where(known[places] == asked, values[places], 0)


def count_losses(learned, held_out, vocab):
    """-> {name: nats a token} of held-out ids, from the third on, by counts of the learned ids.

    The chances after n-1 tokens are interpolated with those after n-2, by Witten and Bell's rule (1991).  It
    has nothing to tune: after `before`, which occurred c times with t different next tokens,

        P(token | before) = (times(before, token) + t * P(token | before without its first)) / (c + t)

    so that what was never seen has a chance, too; below the unigrams stand the uniform chances, 1 / vocab."""
    import numpy as np
    learned, held_out = (np.asarray(ids).astype(np.int64) for ids in (learned, held_out))
    if len(learned) < 3 or len(held_out) < 3:
        raise ValueError("the text is too short to count in: its parts need at least 3 tokens each.")
    chances = np.full(len(held_out) - 2, 1 / vocab)
    losses = {"uniform": float(-np.log(chances).mean())}
    for n, name in enumerate(("unigram", "bigram", "trigram"), 1):
        runs, times = np.unique(numbered(learned, n, vocab), return_counts=True)
        before, first = np.unique(runs // vocab, return_index=True)     # what begins alike lies side by side
        total, kinds = np.add.reduceat(times, first), np.diff([*first, len(runs)])
        asked = numbered(held_out, n, vocab)[-len(chances):]            # those that end with these tokens
        c, t = (look_up(asked // vocab, before, values) for values in (total, kinds))
        mixed = (look_up(asked, runs, times) + t * chances) / np.maximum(c + t, 1)
        chances = np.where(c > 0, mixed, chances)
        losses[name] = float(-np.log(chances).mean())
    return losses


def bench_counts(arguments):
    """Nats a token of a text's held-out part by counts in its training part, interpolated as count_losses
    says, beside the model's, whose windows see less at their beginning.  Parts and tokens are those that
    train.py makes of the text."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"        # as train.py has it; read when NumPy loads
    import checkpoint
    import model_cpu
    import train
    from script import available_cores

    folder = arguments.model or "out/small"
    model = None
    if arguments.model or os.path.exists(os.path.join(folder, "config.json")):
        options = {"dtype": "float32", "threads": available_cores(), "training": False}
        model, tokenizer = checkpoint.load(folder, model_cpu, options)
    _, learned, val, key = train.prepare([arguments.file], model.config.vocab if model else arguments.vocab)
    (held_out,), vocab = val.values(), model.config.vocab if model else arguments.vocab
    print(f"{arguments.file}: {len(learned):,} tokens of a vocabulary of {vocab} to learn from, "
          f"{len(held_out):,} held out; nats a token")
    for name, loss in count_losses(learned, held_out, vocab).items():
        print(f"  {name:10s} {loss:.4f}")
    if model and checkpoint.load_state(folder)["settings"]["tokens_key"] != key:
        print(f"  {folder} has not learned from this text, so it is not measured")
    elif model:
        loss = train.validate(model, tokenizer, val, 16)["val_loss"]
        print(f"  {folder:10s} {loss:.4f}   after {model.step} steps")


# ----------------------------------------------------------------------------------------------------------------------
# train: a training step of a model on the GPU, where its time goes, and PyTorch's beside it

# How many times a kernel moves each of its array arguments through memory, in their order (0: small, or in cache).
TRAFFIC = {
    "embedding_forward": (2, 1, 0), "embedding_backward": (2, 1, 1, 1), "rmsnorm_forward": (1, 1, 1, 1, 1, 0),
    "rmsnorm_backward": (2, 1, 1, 1, 1, 0), "column_sum": (0, 1), "rope": (2, 0, 0), "swiglu_forward": (1, 1),
    "swiglu_backward": (2, 1), "cross_entropy": (2, 1, 1, 0), "cross_entropy_sum": (0, 1, 0), "sum_of_squares": (0, 1),
    "gradient_norm": (0, 1), "adamw": (2, 1, 2, 2, 2, 0), "muon_polynomial": (2, 1)}


def seconds_of(cupy, function, calls):
    """Seconds of GPU time of one of `calls` calls that follow each other."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(start, end) / 1e3 / calls


def ceilings(cupy, model_gpu, gpu):
    """(FLOP/s of an 8192-cube product in the model's precision, bytes/s of a copy), the best of three rounds."""
    import numpy as np
    size = 8192
    random = np.random.default_rng(0).standard_normal((size, size), np.float32)     # zeros would run faster
    a, b, out = (cupy.asarray(random) for _ in range(3))
    if gpu.precision == "bf16":
        a, b, out = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b, out))
    product = min(seconds_of(cupy, lambda: model_gpu.gemm(gpu, out, a, b, transpose_b=True), 10) for _ in range(3))
    del a, b, out
    x, y = cupy.zeros(1 << 30, np.float32), cupy.empty(1 << 30, np.float32)
    copy = min(seconds_of(cupy, lambda: cupy.copyto(y, x), 5) for _ in range(3))
    return 2 * size ** 3 / product, 2 * x.nbytes / copy


def record_launches(cupy, model_gpu, model, step):
    """Run one step with an event before and after every launch: [(name, seconds, bytes, FLOPs)]."""
    c, launch, product, transposed, records, spaces = model.config, model.gpu.launch, model_gpu.gemm, model_gpu.transposed, [], set()
    record_at, model_gpu.RECORD_AT = model_gpu.RECORD_AT, 0         # never: a CUDA graph would hide its launches
    model.buffers_by_shape.clear()                                  # and with them the graphs that there are
    start = model.flat_grads.data.ptr
    gradients = range(start, start + model.flat_grads.nbytes)

    def record(function, name, moved, flops):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        function()
        end.record()
        records.append((name, start, end, moved, flops))

    def timed_launch(name, grid, threads, *args, shared=0):
        arrays = [arg for arg in args if isinstance(arg, cupy.ndarray)]
        moved = sum(count * array.nbytes for count, array in zip(TRAFFIC.get(name, ()), arrays))
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
        kind = "weight" if out.data.ptr in gradients else "forward" if transpose_b and b.data.ptr not in spaces else "input"
        (M, N), K = out.shape[-2:], a.shape[-2 if transpose_a else -1]
        name = f"product {kind} {N}x{M if kind == 'weight' else K}" if out.ndim == 2 else f"products of Muon {M}x{N}x{K}"
        record(lambda: product(gpu, out, a, b, transpose_a, transpose_b, add), name, 0, 2 * out.size * K)

    def timed_transposed(gpu, x, space):
        spaces.add(space.data.ptr)
        record(lambda: transposed(gpu, x, space), "transposed", 2 * x.nbytes, 0)
        return space.reshape(-1)[:x.size].reshape(x.shape[::-1])

    model.gpu.launch, model_gpu.gemm, model_gpu.transposed = timed_launch, timed_product, timed_transposed
    try:
        step()
    finally:
        model.gpu.launch, model_gpu.gemm, model_gpu.transposed, model_gpu.RECORD_AT = launch, product, transposed, record_at
    cupy.cuda.Device().synchronize()
    return [(name, cupy.cuda.get_elapsed_time(start, end) / 1e3, *cost) for name, start, end, *cost in records]


def print_breakdown(records, peak, bandwidth):
    """A row for each kernel: calls, time, what it moved or computed, and how much of the card's limit that is."""
    rows = {}
    for name, seconds, moved, flops in records:
        row = rows.setdefault(name, [0, 0.0, 0, 0])
        for i, value in enumerate((1, seconds, moved, flops)):
            row[i] += value
    total = sum(row[1] for row in rows.values())
    print(f"\n  {'kernel':34s} {'calls':>5s} {'ms':>8s} {'share':>6s}")
    for name, (calls, seconds, moved, flops) in sorted(rows.items(), key=lambda item: -item[1][1]):
        limit = (f"{flops / seconds / 1e12:6.0f} TFLOP/s {flops / seconds / peak:5.0%}" if flops else
                 f"{moved / seconds / 1e9:6.0f} GB/s    {moved / seconds / bandwidth:5.0%}" if moved else "")
        print(f"  {name:34s} {calls:5d} {1e3 * seconds:8.3f} {seconds / total:6.1%} {limit}")
    print(f"  {'sum':34s} {len(records):5d} {1e3 * total:8.3f}")


def bench_train(arguments):
    """One training step: milliseconds, tokens/s, TFLOP/s, memory, launches; by kernel; and the PyTorch twin's."""
    import dataclasses

    import numpy as np

    import model_gpu
    import train
    from model_cpu import CONFIGS

    reason = model_gpu.why_no_gpu()
    if reason:
        raise ValueError(reason)
    import cupy
    B, T = arguments.batch, arguments.context
    config = dataclasses.replace(CONFIGS[arguments.model], context=T)
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, config.vocab, (B, T)), rng.integers(0, config.vocab, (B, T + config.predict - 1))
    pool = cupy.get_default_memory_pool()
    model = model_gpu.Model(config, precision=arguments.precision, matmul=arguments.matmul, micro_batch=B,
                            optimizer=arguments.optimizer)

    def ours():
        model.forward(tokens, targets)
        model.backward()
        model.update(3e-4)

    steps = {"ours": ours}
    for _ in range(3):
        ours()
    cupy.cuda.Device().synchronize()
    memory = {"ours": pool.used_bytes()}
    flops, peaks = B * T * train.flops_per_token(config), ceilings(cupy, model_gpu, model.gpu)
    pool.free_all_blocks()
    if arguments.peer is not None:
        try:
            import torch
        except ImportError:
            raise ValueError("--peer needs PyTorch: pip install -r tests/peers/requirements.txt.")
        sys.path.insert(0, str(ROOT / "tests" / "peers"))
        import torch_twin
        torch.set_float32_matmul_precision("highest" if arguments.precision == "fp32" else "high")
        host = {name: cupy.asnumpy(array) for name, array in model.params.items()}
        for name in arguments.peer or ["compiled"]:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            twin = torch_twin.Twin(config, host).to("cuda")
            step = torch_twin.make_step(twin, name == "compiled", torch.bfloat16 if arguments.precision == "bf16" else None)
            step = functools.partial(step, torch.from_numpy(tokens).to("cuda"), torch.from_numpy(targets).to("cuda"))
            for _ in range(4):
                step()
            torch.cuda.synchronize()
            steps[f"peer: PyTorch {name}"] = step
            memory[f"peer: PyTorch {name}"] = torch.cuda.max_memory_allocated() - before

    def in_a_row(step, count=10):
        def run():
            for _ in range(count):
                step()
            cupy.cuda.Device().synchronize()
        return run

    times = best_times({name: in_a_row(step) for name, step in steps.items()}, arguments.rounds)
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(f"training step, {arguments.model}, B {B} x T {T}, {arguments.precision}, {name}: ten steps a round, best of "
          f"{arguments.rounds}; 8192-cube product {peaks[0] / 1e12:.0f} TFLOP/s, copy {peaks[1] / 1e12:.2f} TB/s")
    for name, seconds in times.items():
        seconds /= 10
        ratio = f"  ours is {10 * seconds / times['ours']:.2f} x as fast" if name != "ours" else ""
        print(f"  {name:24s} {1e3 * seconds:8.2f} ms  {B * T / seconds:10,.0f} tokens/s  "
              f"{flops / seconds / 1e12:5.0f} TFLOP/s ({flops / seconds / peaks[0]:.0%})  "
              f"{memory[name] / 2 ** 30:6.2f} GiB{ratio}")
    if arguments.steps:         # by then the card is warm, and its power is what limits it, as in a real run
        times = best_times({name: in_a_row(step, arguments.steps) for name, step in steps.items()}, 1)
        for name, seconds in times.items():
            ratio = f"  ours is {seconds / times['ours']:.2f} x as fast" if name != "ours" else ""
            print(f"  {name + ',':24s} {1e3 * seconds / arguments.steps:8.2f} ms, {arguments.steps} steps in a row{ratio}")
    print_breakdown(record_launches(cupy, model_gpu, model, ours), *peaks)


# ----------------------------------------------------------------------------------------------------------------------
# scale: a training step on several GPUs, against one and against PyTorch's DistributedDataParallel

def distributed_twin(ranks, config, params, B, T):
    """-> step() of the twin, compiled, its gradients averaged over the ranks."""
    import torch
    import torch.distributed
    sys.path.insert(0, str(ROOT / "tests" / "peers"))
    import torch_twin
    torch.set_float32_matmul_precision("high")
    torch.cuda.set_device(ranks.local)
    if not torch.distributed.is_initialized():
        address = tempfile.NamedTemporaryFile(delete=False).name if ranks.rank == 0 else None
        if address:
            os.remove(address)                      # a name that nobody else has: where the ranks meet
        torch.distributed.init_process_group("nccl", init_method=f"file://{ranks.all_gather(address)[0]}", rank=ranks.rank,
                                             world_size=ranks.size)
    twin = torch_twin.Twin(config, params).to("cuda")
    if ranks.size > 1:
        twin = torch.nn.parallel.DistributedDataParallel(twin, device_ids=[ranks.local])
        twin.config = config
    batch = [torch.randint(0, config.vocab, (B, width), device="cuda") for width in (T, T + config.predict - 1)]
    return functools.partial(torch_twin.make_step(twin, True, torch.bfloat16), *batch)


def bench_scale(arguments):
    """Milliseconds of a step and tokens/s of big in bf16: with as many rows on each GPU, and with these shared out.
    "alone": no sum of the gradients, so each GPU works for itself; the difference is what communication costs, with Muon
    less what sharing its products out saves."""
    import numpy as np

    import checkpoint
    import model_gpu
    from model_cpu import CONFIGS

    reason = model_gpu.why_no_gpu()
    if reason:
        raise ValueError(reason)
    with checkpoint.find_ranks(arguments.gpus, 600) as ranks:
        model_gpu.take_gpu(ranks.local)
        import cupy
        config, rng, T = CONFIGS["big"], np.random.default_rng(ranks.rank), CONFIGS["big"].context
        model = model_gpu.Model(config, precision="bf16", micro_batch=arguments.batch, optimizer=arguments.optimizer)
        nccl = checkpoint.Nccl(ranks)

        def seconds(step):
            """Of ten steps a round, the best, on the slowest rank."""
            times = []
            for i in range(arguments.rounds + 1):   # one to warm up
                cupy.cuda.Device().synchronize()
                ranks.all_gather(None)
                start = time.perf_counter()
                for _ in range(10):
                    step()
                cupy.cuda.Device().synchronize()
                times.append(max(ranks.all_gather(time.perf_counter() - start)) / 10)
            return min(times[1:])

        for B in dict.fromkeys((arguments.batch, arguments.batch // ranks.size)):
            tokens, targets = (rng.integers(0, config.vocab, (B, width)) for width in (T, T + config.predict - 1))

            def step(B=B, tokens=tokens, targets=targets):
                losses = model.forward(tokens, targets, [B * T * ranks.size] * config.predict)
                model.backward()
                if model.communicator:
                    model.communicator.all_reduce(losses)
                model.update(3e-4)
            rows = {}
            for name, model.communicator in (("ours, alone", None), ("ours", nccl)):
                rows[name] = seconds(step)
            if arguments.peer:
                params = {name: cupy.asnumpy(array) for name, array in model.params.items()}
                rows["peer: PyTorch compiled, DDP"] = seconds(distributed_twin(ranks, config, params, B, T))
            print(f"{ranks.size} GPUs, B {B} x T {T} each, bf16, {arguments.optimizer}, {model_gpu.gpu_name()}: ten steps a round, "
                  f"best of {arguments.rounds}")
            for name, each in rows.items():
                share = f"{rows['ours, alone'] / each:6.1%} of alone  " if name.startswith("ours") else ""
                print(f"  {name:28s} {1e3 * each:8.2f} ms  {ranks.size * B * T / each:12,.0f} tokens/s  {share}"
                      f"{each / rows['ours']:.2f} x ours", flush=True)
        # NCCL takes leave of all GPUs at once, so before its processes wait for each other
        model.communicator = nccl = None
        if arguments.peer:
            import torch.distributed
            torch.distributed.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------------------
# attention: our kernels alone, against PyTorch's flash and cuDNN backends, and against attention without flash

# The yardstick: attention as it is defined, by an array library (xp), with all T x T probabilities in memory. q, out
# (B,G,R*T,D): the R = H/G query heads that share a key/value head, one after the other; k, v (B,G,T,D); P (B,G,R*T,T).
def plain_attention_forward(xp, q, k, v):
    """-> out, P."""
    T, D = k.shape[-2:]
    P = q @ k.swapaxes(-1, -2)                                                      # S
    P *= D ** -0.5
    P.reshape(-1, T, T)[...] += xp.where(xp.tri(T, dtype=bool), 0, -xp.inf).astype(P.dtype)
    P -= P.max(axis=-1, keepdims=True)
    xp.exp(P, out=P)
    P /= P.sum(axis=-1, keepdims=True)
    return P @ v, P


def plain_attention_backward(dout, out, P, q, k, v):
    """-> dq, dk, dv; the derivation stands at the head of flash_attn.cu."""
    dv = P.swapaxes(-1, -2) @ dout
    dS = dout @ v.swapaxes(-1, -2)                                                  # dP
    dS -= (dout * out).sum(axis=-1, keepdims=True)
    dS *= P
    dS *= k.shape[-1] ** -0.5
    return dS @ k, dS.swapaxes(-1, -2) @ q, dv


def plain_times(cupy, best, B, T, config):
    """(ms forward, ms backward) of the yardstick, in fp32."""
    G, R = config.kv_heads, config.heads // config.kv_heads
    q, k, v, dout = (cupy.random.standard_normal((B, G, n * T, config.head_dim), cupy.float32) for n in (R, 1, 1, R))
    out, P = plain_attention_forward(cupy, q, k, v)
    return (best(lambda: plain_attention_forward(cupy, q, k, v)),
            best(lambda: plain_attention_backward(dout, out, P, q, k, v)))


def bench_attention(arguments):
    """Forward and backward of causal attention, D 64, 12 query and 4 key/value heads, 32,768 tokens, at several T."""
    import dataclasses

    import numpy as np

    import model_gpu
    from model_cpu import CONFIGS

    reason = model_gpu.why_no_gpu()
    if reason:
        raise ValueError(reason)
    import cupy
    peers = {}
    try:
        import torch
        import torch.nn.functional as F
        from torch.nn.attention import SDPBackend, sdpa_kernel
        if arguments.precision == "bf16":
            peers = {"PyTorch flash": SDPBackend.FLASH_ATTENTION, "PyTorch cuDNN": SDPBackend.CUDNN_ATTENTION}
    except ImportError:
        print("PyTorch is not installed, so it is not measured")

    def best(function):
        function()
        return 1e3 * min(seconds_of(cupy, function, 20) for _ in range(arguments.rounds))

    print(f"attention, 32,768 tokens, D 64, 12/4 heads, causal, {arguments.precision}: ms, best of {arguments.rounds} x 20")
    for T in arguments.lengths:
        B, config = 32768 // T, dataclasses.replace(CONFIGS["big"], context=T)
        gpu = model_gpu.Gpu(config, arguments.precision, "cublas")
        rng = np.random.default_rng(0)

        def random(*shape):
            array = cupy.asarray(rng.standard_normal(shape, np.float32))
            return (array.view(np.uint32) >> 16).astype(np.uint16) if gpu.precision == "bf16" else array

        N, width = B * T, config.qkv_width
        qkv, dout = random(N, width), random(N, config.dim)
        out, dqkv = cupy.empty_like(dout), cupy.empty_like(qkv)
        lse, delta = (cupy.empty((B, config.heads, T), np.float32) for _ in range(2))
        rows = {"ours": (best(lambda: model_gpu.attention_forward(gpu, out, lse, qkv, B, T)),
                         best(lambda: model_gpu.attention_backward(gpu, dqkv, dout, out, lse, qkv, delta)))}
        try:
            rows["plain, fp32"] = plain_times(cupy, best, B, T, config)
        except cupy.cuda.memory.OutOfMemoryError:
            print(f"  T {T:5d} plain, fp32    its probabilities do not fit the memory")
        cupy.get_default_memory_pool().free_all_blocks()
        for name, backend in peers.items():
            q, k, v = (torch.randn(B, heads, T, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                       for heads in (config.heads, config.kv_heads, config.kv_heads))
            with sdpa_kernel(backend):              # on the default stream, as ours
                def forward(q=q, k=k, v=v):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

                y = forward()
                dy = torch.randn_like(y)
                rows[name] = (best(forward),
                              best(lambda y=y, q=q, k=k, v=v, dy=dy: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)))
        for name, (forward_ms, backward_ms) in rows.items():
            ratio = sum(rows[name]) / sum(rows["ours"])
            print(f"  T {T:5d} {name:14s} forward {forward_ms:7.3f}  backward {backward_ms:7.3f}  together "
                  f"{forward_ms + backward_ms:7.3f}" + ("" if name == "ours" else f"  ours is {ratio:.2f} x as fast"), flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# curves: the held-out loss against tokens and seconds, by optimizer and precision, with PyTorch's beside

RUN = re.compile(r"(muon|adamw|twin)(?:/(fp32|tf32|bf16))?(?::(\d+))?(?:@([0-9.e-]+))?")


def curve(make_step, losses, sync, tokens, val, settings, config, B, seed):
    """Train for settings.steps -> [[step, seconds, {kind: nats a token}], ...]; evaluating takes no seconds.
    make_step() -> step(inputs, targets, lr); losses(inputs, targets) -> those of the heads, without a gradient."""
    import train
    T, K, points, seconds = config.context, config.predict, [], 0.0
    step = make_step()
    sync()
    started = time.perf_counter()
    for i in range(settings.steps):
        starts = train.window_starts(seed, i, B, len(tokens), T, K)
        step(*train.get_batch(tokens, starts, T, K), train.learning_rate(i, settings))
        if (i + 1) % max(1, settings.steps // 16) and i + 1 < settings.steps:
            continue
        sync()
        seconds += time.perf_counter() - started
        held_out = {}
        for kind, ids in val.items():
            sums = [(targets[:, :inputs.shape[1]].size, float(losses(inputs, targets)[0]))
                    for inputs, targets in train.even_windows(ids, T, K, B, 1 << 17)]
            held_out[kind] = sum(n * loss for n, loss in sums) / sum(n for n, _ in sums)
        points.append([i + 1, seconds, held_out])
        started = time.perf_counter()
    return points


def run_of_ours(config, optimizer, precision, B, seed, *rest):
    """curve's arguments and rest -> its points, on our engine."""
    import cupy

    import model_gpu
    model = model_gpu.Model(config, seed, precision=precision, micro_batch=B, optimizer=optimizer)

    def step(inputs, targets, lr):
        model.forward(inputs, targets)
        model.backward()
        model.update(lr)
    points = curve(lambda: step, model.forward, cupy.cuda.Device().synchronize, *rest, config, B, seed)
    del model, step
    cupy.get_default_memory_pool().free_all_blocks()
    return points


def run_of_the_twin(config, precision, B, seed, *rest):
    """The same on compiled PyTorch with AdamW, from the same weights; compiling takes no seconds."""
    import numpy as np
    import torch

    import model_cpu
    sys.path.insert(0, str(ROOT / "tests" / "peers"))
    import torch_twin
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    start = model_cpu.Model(config, seed, dtype=np.float32, training=False)
    twin = torch_twin.Twin(config, start.params).to("cuda")
    autocast = torch.bfloat16 if precision == "bf16" else None
    losses = torch_twin.make_losses(twin, False, autocast)

    def on_gpu(function):
        return lambda inputs, targets, *lr: function(to_torch(inputs, "cuda"), to_torch(targets, "cuda"), *lr)

    def make_step():
        step = torch_twin.make_step(twin, True, autocast)
        before = {name: weight.detach().clone() for name, weight in twin.named_parameters()}
        tokens = np.zeros((B, config.context), int)
        for _ in range(3):                          # compiles; then back to the start, with new moments
            step.warm_up(torch.from_numpy(tokens).to("cuda"),
                         torch.zeros((B, config.context + config.predict - 1), dtype=torch.int64, device="cuda"))
        assert all(torch.equal(before[name], weight) for name, weight in twin.named_parameters())
        return on_gpu(step)

    def without_gradient(*arguments):
        with torch.no_grad():
            return on_gpu(losses)(*arguments)[0]
    points = curve(make_step, without_gradient, torch.cuda.synchronize, *rest, config, B, seed)
    torch.cuda.empty_cache()
    return points


def bench_curves(arguments):
    """Runs from one start on the same batches, each with a schedule of its own length: NAME[/PRECISION][:STEPS][@LR],
    NAME an optimizer of ours or "twin", PyTorch compiled, with AdamW.  The held-out losses by tokens and by seconds.
    Results gather in --results, a line a run."""
    import dataclasses
    import json

    import numpy as np

    import train
    from model_cpu import CONFIGS

    config, B, results = CONFIGS[arguments.model], arguments.batch, []
    tokens = np.fromfile(arguments.tokens, "<u2")
    val = {re.sub(r"val-(.*)-\w+-\w+\.bin", r"\1", os.path.basename(path)): np.fromfile(path, "<u2")
           for path in arguments.val}
    settings = train.make_settings(train.parse_arguments(["--device", "cpu"]), arguments.model, config,
                                   train.DEFAULTS[arguments.model])
    for seed in arguments.seeds:
        for text in arguments.runs:
            name, precision, steps, lr = RUN.fullmatch(text).groups()
            precision, steps = precision or "bf16", int(steps or arguments.steps)
            run = dataclasses.replace(settings, steps=steps, warmup=steps // 10, lr=float(lr or arguments.lr))
            rest = tokens, val, run
            points = (run_of_the_twin(config, precision, B, seed, *rest) if name == "twin" else
                      run_of_ours(config, name, precision, B, seed, *rest))
            results.append({"run": text, "name": name, "precision": precision, "steps": steps, "lr": run.lr, "seed": seed,
                            "batch": B * config.context, "points": points})
            print(f"{text:20} seed {seed}  lr {run.lr:.1e}  {steps * B * config.context / 1e6:6.1f}M tokens  "
                  f"{points[-1][1]:7.1f} s  {1e3 * points[-1][1] / steps:6.2f} ms a step  "
                  + "  ".join(f"{kind} {loss:.4f}" for kind, loss in points[-1][2].items()), flush=True)
            if arguments.results:
                with open(arguments.results, "a", encoding="utf-8") as file:
                    file.write(json.dumps(results[-1]) + "\n")
    if arguments.results:
        results = [json.loads(line) for line in open(arguments.results, encoding="utf-8")]
    compare_curves(results)
    if arguments.plot:
        plot_curves(results, arguments.plot)


def compare_curves(results):
    """What share of the twin's tokens and seconds our runs of the same seed take to its final losses, all of them."""
    for twin in results:
        for ours in results if twin["name"] == "twin" else ():
            steps, seconds, losses = twin["points"][-1]
            if ours["name"] == "twin" or ours["seed"] != twin["seed"] or ours["batch"] != twin["batch"]:
                continue
            reached = [point for point in ours["points"] if all(point[2][kind] <= losses[kind] for kind in losses)]
            if reached:
                print(f"{ours['run']:16} reaches {twin['run']}'s losses after {steps} steps, seed {twin['seed']}, with "
                      f"{reached[0][0] / steps:.2f} of the tokens and {reached[0][1] / seconds:.2f} of the seconds")


def plot_curves(results, path):
    """The mean of the held-out losses against tokens and against seconds."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    colours = {"muon": "C0", "adamw": "C1", "twin": "C2"}
    names = {"muon": "ours, Muon", "adamw": "ours, AdamW", "twin": "PyTorch compiled, AdamW"}
    for result in results:
        steps, seconds, losses = zip(*result["points"])
        loss = [sum(kinds.values()) / len(kinds) for kinds in losses]
        for axes, x in (left, [step * result["batch"] / 1e6 for step in steps]), (right, seconds):
            axes.plot(x, loss, color=colours[result["name"]], linewidth=0.9, alpha=0.8, label=names.pop(result["name"], None))
            axes.plot(x[-1], loss[-1], ".", color=colours[result["name"]])
    left.set(xlabel="million tokens", ylabel="held-out loss, nats a token", ylim=(None, min(4.5, max(loss))))
    right.set(xlabel="seconds on one H200")
    left.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150, bbox_inches="tight")


# ----------------------------------------------------------------------------------------------------------------------
# finetune: somebody else's model, fine-tuned by ours and by transformers' own on the same batches

def bench_finetune(arguments):
    """The losses of a fine-tuning, ours beside transformers' model under PyTorch's AdamW; then a step of full windows, timed,
    where that model is compiled."""
    import numpy as np

    import checkpoint
    import model_cpu
    import model_gpu
    import sft
    import train
    base, T = arguments.base, arguments.context
    _, _, config, tokenizer = sft.read_base(base, argparse.Namespace(preset=None, context=T))
    examples = sft.make_examples(tokenizer, sft.read_conversations(arguments.data), T, arguments.seed)
    settings = argparse.Namespace(steps=arguments.steps, warmup=arguments.steps // 10, lr=arguments.lr, decay=0.1, clip=1.0,
                                  micro_batch=arguments.tokens // T)

    def batches():
        plans = (sft.plan_epoch(examples.lengths, arguments.tokens, arguments.seed, epoch) for epoch in range(1 << 20))
        plan = (rows for batches in plans for rows in batches)
        for step in range(arguments.steps):
            inputs, targets = sft.make_batch([examples.train[i] for i in next(plan)], T, 1, tokenizer.end_of_turn)
            yield inputs, targets, train.learning_rate(step, settings)

    engine = model_gpu.pick("auto")
    gpu = engine is model_gpu
    options = ({"precision": arguments.precision, "micro_batch": settings.micro_batch} if gpu else {"dtype": np.float32})
    model, _ = checkpoint.load(base, engine, {**options, "optimizer": "adamw"}, T)

    def ours(inputs, targets, lr):
        return train.training_step(model, settings, inputs, targets, lr)

    losses = {"ours": [float(read()[0][0]) for read in [ours(*batch) for batch in batches()]]}
    sync, memory = (lambda: None), {}
    if gpu:
        import cupy
        sync, memory["ours"] = cupy.cuda.Device().synchronize, cupy.get_default_memory_pool().total_bytes()
    steps = {"ours": ours}
    if arguments.peer:
        try:
            import torch
            import transformers
        except ImportError:
            raise ValueError("--peer needs PyTorch and transformers: pip install -r tests/peers/requirements.txt.")
        torch.set_float32_matmul_precision("high")
        device = "cuda" if gpu else "cpu"
        llama = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(device)
        groups = [{"params": [p for p in llama.parameters() if (p.ndim == 2) == matrix], "weight_decay": 0.1 * matrix}
                  for matrix in (True, False)]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)

        def loss_of(inputs, targets):
            with torch.autocast(device, torch.bfloat16, enabled=gpu and arguments.precision == "bf16"):
                logits = llama(inputs, use_cache=False).logits
            logits, targets = logits.float().flatten(0, 1), targets.flatten()
            return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")

        def theirs(loss_of, inputs, targets, lr):
            for group in optimizer.param_groups:
                group["lr"] = lr
            total = 0
            for rows in model_cpu.slices_of(len(inputs), max(1, len(inputs) // (1 if arguments.precision == "bf16" else 4))):
                batch = (to_torch(array[rows], device) for array in (inputs, targets))      # in fp32 all is too much
                loss = loss_of(*batch) / int((targets >= 0).sum())
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(llama.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return total

        eager = functools.partial(theirs, loss_of)
        losses["transformers"] = [float(loss) for loss in [eager(*batch) for batch in batches()]]
        steps["transformers compiled"] = functools.partial(theirs, torch.compile(loss_of) if gpu else loss_of)
    print(f"{base} fine-tuned on {', '.join(arguments.data)}: {arguments.steps} steps of at most {arguments.tokens:,} tokens, "
          f"context {T}, AdamW {arguments.lr}; mean loss, nats a learned token")
    last = max(1, arguments.steps // 6)
    for name, row in losses.items():
        print(f"  {name:24s} steps 1 to {last}: {np.mean(row[:last]):.4f}   the last {last}: {np.mean(row[-last:]):.4f}")

    if not arguments.rounds:
        return
    # full windows, all of which count
    ids = np.random.default_rng(0).integers(0, config.vocab, arguments.tokens + 1)
    batch = *train.get_batch(ids, range(0, arguments.tokens, T), T, 1), 1e-5
    for name, step in steps.items():
        if gpu and name != "ours":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            step(*batch)
        if gpu and name != "ours":
            torch.cuda.synchronize()
            memory[name] = torch.cuda.max_memory_allocated()

    def five(step):
        def run():
            for _ in range(5):
                step(*batch)
            sync()
        return run

    times = best_times({name: five(step) for name, step in steps.items()}, arguments.rounds)
    for name, seconds in times.items():
        ratio = f"  ours is {seconds / times['ours']:.2f} x as fast" if name != "ours" else ""
        print(f"  {name:24s} {200 * seconds:8.1f} ms a step  {5 * arguments.tokens / seconds:10,.0f} tokens/s  "
              f"{memory.get(name, 0) / 2 ** 30:6.2f} GiB{ratio}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("tokenizer", help="train against tokenizers, encode against tiktoken")
    command.add_argument("--text", type=Path, default=DATA / "books_00.txt.xz", help="a text file, or one packed by xz")
    command.add_argument("--rounds", type=int, default=3)
    command.set_defaults(run=bench_tokenizer)
    command = commands.add_parser("cpu", help="a training step of the small model against PyTorch")
    command.add_argument("--batch", type=int, default=16)
    command.add_argument("--rounds", type=int, default=5)
    command.set_defaults(run=bench_cpu)
    command = commands.add_parser("decode", help="generation, token by token and speculative, against PyTorch")
    command.add_argument("--model", metavar="DIR", help="a trained model, on the GPU in place of big (on the CPU: beside "
                         "small and medium, by default out/small, if it is there)")
    command.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto", help="auto: all that there is")
    command.add_argument("--tokens", type=int, default=64, help="generated in a round (default %(default)s)")
    command.add_argument("--peer", action="store_true", help="PyTorch beside")
    command.add_argument("--rounds", type=int, default=5)
    command.set_defaults(run=bench_decode)
    command = commands.add_parser("drafts", help="what the further heads' drafts bring on text that a model has not seen")
    command.add_argument("--model", nargs="+", metavar="DIR", default=["out/small"])
    command.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    command.add_argument("--prompts", type=int, default=32)
    command.set_defaults(run=bench_drafts)
    command = commands.add_parser("train", help="a training step on the GPU, by kernel, against PyTorch")
    command.add_argument("--model", choices=("small", "medium", "big"), default="big")
    command.add_argument("--batch", type=int, default=64)
    command.add_argument("--context", type=int, default=512)
    command.add_argument("--precision", choices=("bf16", "tf32", "fp32"), default="bf16")
    command.add_argument("--matmul", choices=("cublas", "ours"), default="cublas")
    command.add_argument("--optimizer", choices=("muon", "adamw"), default="adamw", help="of ours; PyTorch has AdamW")
    command.add_argument("--peer", nargs="*", choices=("eager", "compiled"), help="PyTorch beside (default compiled)")
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--steps", type=int, default=0, help="then so many of each in a row, as a run has them")
    command.set_defaults(run=bench_train)
    command = commands.add_parser("scale", help="a training step on several GPUs, against PyTorch's DDP")
    command.add_argument("--gpus", type=int, help="processes to start, a GPU each (default: as a launcher says, or 1)")
    command.add_argument("--batch", type=int, default=64)
    command.add_argument("--optimizer", choices=("muon", "adamw"), default="adamw", help="of ours; PyTorch has AdamW")
    command.add_argument("--peer", action="store_true", help="PyTorch beside")
    command.add_argument("--rounds", type=int, default=5)
    command.set_defaults(run=bench_scale)
    command = commands.add_parser("attention", help="on the GPU: our attention kernels against PyTorch's, and "
                                  "against attention without flash")
    command.add_argument("--precision", choices=("bf16", "tf32", "fp32"), default="bf16")
    command.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 4096])
    command.add_argument("--rounds", type=int, default=5)
    command.set_defaults(run=bench_attention)
    command = commands.add_parser("curves", help="on the GPU: held-out losses by tokens and seconds, and PyTorch's")
    command.add_argument("--tokens", required=True, help="a data/train-*.bin of the model's vocabulary")
    command.add_argument("--val", nargs="+", required=True, help="data/val-*.bin of the same vocabulary")
    command.add_argument("--model", choices=("small", "medium", "big"), default="big")
    command.add_argument("--runs", nargs="*", default=["muon", "adamw", "twin"], help="NAME[/PRECISION][:STEPS][@LR]")
    command.add_argument("--steps", type=int, default=1024)
    command.add_argument("--lr", type=float, default=1.2e-3)
    command.add_argument("--seeds", type=int, nargs="+", default=[0])
    command.add_argument("--batch", type=int, default=64)
    command.add_argument("--results", help="add the results to this file, and compare all that it holds")
    command.add_argument("--plot", help="draw them to this file")
    command.set_defaults(run=bench_curves)
    command = commands.add_parser("finetune", help="somebody else's model, fine-tuned by ours and by transformers' own")
    command.add_argument("--base", required=True, metavar="DIR")
    command.add_argument("--data", required=True, nargs="+", metavar="FILE", help="instructions")
    command.add_argument("--context", type=int, default=512)
    command.add_argument("--tokens", type=int, default=32768, help="a step (default %(default)s)")
    command.add_argument("--steps", type=int, default=300)
    command.add_argument("--lr", type=float, default=2e-4)
    command.add_argument("--seed", type=int, default=0, help="of what is held out and of the order of the rest")
    command.add_argument("--precision", choices=("bf16", "tf32"), default="bf16", help="on a GPU (default %(default)s)")
    command.add_argument("--peer", action="store_true", help="transformers beside")
    command.add_argument("--rounds", type=int, default=3, help="of the timing; 0: none (default %(default)s)")
    command.set_defaults(run=bench_finetune)
    command = commands.add_parser("euler", help="half steps, Heun's method: is a trained layer a solver's step?")
    command.add_argument("--model", default="out/small")
    command.set_defaults(run=bench_euler)
    command = commands.add_parser("counts", help="the loss of counted n-grams on a text, and a model's")
    command.add_argument("file", metavar="FILE", help="a text, such as a model was trained on")
    command.add_argument("--model", metavar="DIR", help="beside (default out/small, if it is there)")
    command.add_argument("--vocab", type=int, default=512,
                         help="where there is no model (default %(default)s)")
    command.set_defaults(run=bench_counts)
    arguments = parser.parse_args()
    # without a name: all that need no choice, each as far as this machine has what it takes
    chosen = [arguments] if arguments.command else [parser.parse_args([name]) for name in ("cpu", "decode", "tokenizer",
                                                                                          "train", "attention", "euler")]
    for arguments in chosen:
        try:
            arguments.run(arguments)
        except (OSError, ValueError) as error:
            print(f"error: {error}" if len(chosen) == 1 else f"{arguments.command}: not measured: {error}", file=sys.stderr)
            if len(chosen) == 1:
                sys.exit(2)
        print()


if __name__ == "__main__":
    main()
