"""The README's numbers, each by one command.  cpu, tokenizer and attention measure a peer, too; decode, train and scale
do with --peer.

    python tests/bench.py                   what this machine can measure, but scale and curves; or one by its name:
    python tests/bench.py cpu               a training step on the CPU, beside PyTorch's
    python tests/bench.py tokenizer         beside tokenizers and tiktoken; --text FILE, --gpt2 DIR
    python tests/bench.py euler             are the layers of the model in out/small steps of a solver?
    python tests/bench.py decode --peer     generation, on the GPU where there is one
    python tests/bench.py train --peer      a training step on a GPU, as are all below; --optimizer muon: with Muon on both sides
    python tests/bench.py train --peer --batch 16 --context 1024        the step that the C original prints: its time and its memory
    python tests/bench.py attention         beside PyTorch's cuDNN, its FlashAttention 2, and one that stores T x T
    python tests/bench.py scale --gpus 2 --peer
    python tests/bench.py curves --tokens data/train-KEY.bin --val data/val-*.bin
    HOPPER=0 python tests/bench.py ...      on a Hopper: what a GeForce RTX 30 or 40 runs

A figure is the best of several rounds.  A round runs each row once (in scale one row after the other), so that a busy
machine slows ours and the peer alike.  (The last rows of train, of fewer texts, are one mean of 30 steps.)  On a GPU the first peer of train and decode is the hardest that we can write, the
next the one that a user would write: tests/peers/torch_twin.py.
"""
import argparse
import importlib
import inspect
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = str(ROOT), str(ROOT / "tests/peers")
if sys.argv[1:2] in ([], ["cpu"]):
    os.environ["OPENBLAS_NUM_THREADS"] = "1"        # as train.py has it; NumPy reads it when it loads
import numpy as np
from numpy.random import default_rng

import checkpoint
import gradcheck
import model_cpu
import model_gpu
from model_cpu import CONFIGS
from script import available_cores, run_ranks
from tokenizer import Tokenizer, split_point

PEERS_HINT = "pip install -r tests/peers/requirements.txt"


# ----------------------------------------------------------------------------------------------------------------------
# What the commands share
# ----------------------------------------------------------------------------------------------------------------------
def seconds_a_call(function, calls=1, wait=None):
    """The mean of so many calls in a row; wait() returns when all that they have started is done."""
    started = time.perf_counter()
    for _ in range(calls):
        function()
    if wait:
        wait()
    return (time.perf_counter() - started) / calls


def best_times(rows, rounds):
    """{name: function() -> seconds} -> {name: the least seconds of `rounds`}."""
    runs = [{name: function() for name, function in rows.items()} for _ in range(rounds)]
    return {name: min(run[name] for run in runs) for name in rows}


def print_times(times, amount, unit, notes=None):
    """A row for each name: the time of so many units, and how many times as fast the first row is as a peer."""
    first, *_ = times
    for name, seconds in times.items():
        note = notes.get(name, "") if notes else ""
        if name.startswith("peer"):
            note += f"  {first} is {seconds / times[first]:.2f} x as fast"
        print(f"  {name:36s} {1e3 * seconds:10.3f} ms  {amount / seconds:12,.1f} {unit}/s{note}", flush=True)


def random_batch(config, B, T):
    """-> tokens (B,T), targets (B,T+K-1)."""
    rng = default_rng(0)
    return [rng.integers(0, config.vocab, (B, width)) for width in (T, T + config.predict - 1)]


def train_step(model, tokens, targets, lr=3e-4):
    """-> the losses of the heads."""
    losses = model.forward(tokens, targets)
    model.backward()
    model.update(lr)
    return losses


def import_peer(name):
    """The package; None where it is missing, which is printed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"{name} is not installed ({PEERS_HINT}), so it is not measured")
        return None


def twin_of(model, device="cpu", stream=None):
    """The model in PyTorch, with the same weights.  stream: the type of its residual stream."""
    import torch_twin
    params = model_cpu.param_views(model.read(model.flat_params), model.config)
    return torch_twin.Twin(model.config, params, stream, device)


def twin_step(twin, batch, precision="fp32", optimizer="adamw", compiled=True, graph=False):
    """-> step(), which trains PyTorch's model on this batch: forward, backward, clip and update.  graph: as one CUDA graph."""
    import torch
    import torch_twin
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    device = next(twin.parameters()).device.type
    rows = [torch.from_numpy(part).to(device) for part in batch]
    step = torch_twin.Step(twin, compiled, torch.bfloat16 if precision == "bf16" else None, optimizer)
    if graph:
        try:
            step.capture(*rows)
        except RuntimeError as error:               # too little memory, or a card that cannot
            print(f"PyTorch's step is no CUDA graph: {error}")
    return partial(step, *rows)


def gpu_name():
    """Of the GPU, in words; ValueError where there is none."""
    model_gpu.pick("gpu")
    return model_gpu.cupy.cuda.runtime.getDeviceProperties(model_gpu.cupy.cuda.Device().id)["name"].decode()


def wait_for_gpu():
    model_gpu.cupy.cuda.Device().synchronize()


# ----------------------------------------------------------------------------------------------------------------------
# On a CPU
# ----------------------------------------------------------------------------------------------------------------------
def bench_cpu(batch=16, rounds=5):
    """A training step of the small model: forward, backward, clip and AdamW, in float32, on all cores."""
    config = CONFIGS["small"]
    cores = available_cores()
    rows = random_batch(config, batch, config.context)
    model = model_cpu.Model(config, 0, np.float32, threads=min(cores, batch))
    steps = {"ours": partial(train_step, model, *rows)}
    torch = import_peer("torch")
    if torch:
        torch.set_num_threads(cores)
        for name in "eager", "compiled":
            steps[f"peer: PyTorch {name}"] = twin_step(twin_of(model), rows, compiled=name == "compiled")

    def best_of_five(step):     # PyTorch's threads spin for a while after its last step, and would slow the first of ours
        return min(seconds_a_call(step) for _ in range(5))
    for step in steps.values():                     # the first calls compile and allocate
        best_of_five(step)
    print(f"training step, small, B {batch} x T {config.context}, float32, {cores} cores, best of {rounds} x 5, "
          f"OPENBLAS_CORETYPE {os.environ.get('OPENBLAS_CORETYPE') or 'not set'}")
    print_times(best_times({name: partial(best_of_five, step) for name, step in steps.items()}, rounds),
                batch * config.context, "tokens")


def bench_tokenizer(text="", gpt2="", rounds=3):
    """4,096 tokens are trained on a text, which is then encoded, from an empty cache each time.  --text FILE: by default
    the longest text in data/.  --gpt2 DIR: encode with GPT-2's tokens, by OpenAI's files vocab.bpe and encoder.json."""
    path = Path(text) if text else max(Path("data").glob("*.txt"), key=os.path.getsize, default=None)
    if path is None:
        raise ValueError("there is no text in data/: --text FILE names one, ./fetch_data.sh books brings some.")
    text = path.read_text(encoding="utf-8", errors="replace")
    size = path.stat().st_size / 1e6
    cores = available_cores()
    print(f"{path}, {size:.1f} MB, {cores} cores, best of {rounds}")
    if gpt2:
        ours = Tokenizer.from_gpt2(f"{gpt2}/vocab.bpe", f"{gpt2}/encoder.json")
    else:
        ours = Tokenizer.train_files([path], 4096)

    with tempfile.TemporaryDirectory() as folder:
        def encode_file():
            ours.encoder.clear()
            ours.encode_file(path, f"{folder}/ids.bin")

        def encode():
            ours.encoder.clear()
            return ours.encode(text)
        training = {"ours, all cores": partial(Tokenizer.train_files, [path], 4096)}
        encoding = {"ours, file to file, all cores": encode_file, "ours, str to list, 1 core": encode}
        tokenizers = import_peer("tokenizers")
        if tokenizers:
            training["peer: tokenizers, all cores"] = partial(train_peer, tokenizers, path)
        tiktoken = import_peer("tiktoken")
        if tiktoken:
            judge = tiktoken_judge(tiktoken, ours)
            pieces = re.findall("(?s).{1,1000000}", text)
            encoding["peer: tiktoken, all cores"] = partial(judge.encode_ordinary_batch, pieces, num_threads=cores)
            print("ids equal tiktoken's:", list(encode()) == judge.encode_ordinary(text))
        whose = "GPT-2's" if gpt2 else "the tokens just trained"
        for title, functions in ("train 4,096 tokens", training), (f"encode with {whose}", encoding):
            print(title)
            rows = {name: partial(seconds_a_call, function) for name, function in functions.items()}
            print_times(best_times(rows, rounds), size, "MB")


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


def held_out_windows(folder, model, tokenizer, most=64):
    """(B,T+1) ids of the end of a run's first file, which train.py holds out."""
    path = checkpoint.read_state(folder)[0]["settings"]["data"][0]
    with open(path, "rb") as file:
        file.seek(split_point(path))
        ids = np.array(tokenizer.encode(file.read().decode("utf-8", "replace")))
    width = model.config.context + 1
    return ids[:min(most, len(ids) // width) * width].reshape(-1, width)


def solvers(layer):
    """Ways to integrate dx/dt = f(x, t) over one layer: {name: function(x) -> x}.  layer(x, h) is one Euler step of size h."""
    def steps_of(count):
        def solve(x):
            for _ in range(count):
                x = layer(x, 1 / count)
            return x
        return solve
    return {"one step a layer, as trained": steps_of(1),
            "two half steps": steps_of(2),
            "four quarter steps": steps_of(4),
            "Heun's method": lambda x: (x + layer(layer(x, 1), 1)) / 2,         # x + (f(x) + f(x + f(x))) / 2
            "every step 10% longer": lambda x: layer(x, 1.1),
            "every step 10% shorter": lambda x: layer(x, 0.9)}


def bench_euler(model="out/small"):
    """Is a layer of a trained model a solver's step?  The layers of --model DIR as Euler steps of size 1, and other ways to
    integrate the same dx/dt = f(x, t)."""
    folder = model
    model, tokenizer = checkpoint.load(folder, model_cpu)
    c = model.config
    windows = held_out_windows(folder, model, tokenizer)
    targets = windows[:, 1:].reshape(-1)
    print(f"{folder} after {model.step} steps, {targets.size:,} held-out tokens, loss of head 0")
    for i, (loss, length, _) in enumerate(model_cpu.euler_table(model, windows)):
        name = f"layer {i - 1}" if i else "the embedding"
        print(f"  stopped after {name:14s} {loss:.4f}   |f(x)|/|x| {length:.3f}")
    layers, shared = model.workspaces[0].buffers(*windows[:, 1:].shape)

    def step(i, x, size):
        """x after a step of that size by layer i.  Both substeps end in a matmul: scaling its matrix scales the step."""
        w = model_cpu.layer_views(model.params, i)
        w.out = size * w.out
        w.down = size * w.down
        x = x.copy()
        rope = model.rope[:, :windows.shape[1] - 1]
        model_cpu.block_forward(x, w, layers[i], shared, c, rope, model_cpu.attention_forward)
        return x
    for name in solvers(None):
        x = model.params["embed"][windows[:, :-1].ravel()]                          # (N,C)
        for i in range(c.layers):
            x = solvers(partial(step, i))[name](x)
        x *= model.params["norm"] / np.sqrt((x ** 2).mean(axis=1, keepdims=True) + c.norm_eps)
        logits = x @ model.params["heads"][:c.vocab].T                              # (N,V)
        losses = np.log(np.exp(logits).sum(axis=1)) - logits[range(len(x)), targets]
        print(f"  {name:30s} {losses.mean():.4f}")


# ----------------------------------------------------------------------------------------------------------------------
# Generation
# ----------------------------------------------------------------------------------------------------------------------
def seconds_a_token(tokens, count):
    """Of the `count` tokens after the first: reading the prompt does not count."""
    next(tokens)
    return seconds_a_call(partial(next, tokens), count)


def bench_decode(model="", device="auto", tokens=64, peer=False, rounds=5):
    """Milliseconds a token, one text at a time: of big in bf16 on the GPU, of small in float32 on a CPU.  --model DIR: of a
    trained model, also speculative, since its drafts are often right.  --tokens: in a round."""
    engine = model_gpu.pick(device)
    gpu = engine is model_gpu
    options = {"precision": "bf16"} if gpu else {"dtype": np.float32}
    folder = model
    if folder:
        model, tokenizer = checkpoint.load(folder, engine, {**options, "training": False})
        generate = partial(model_cpu.generate, model, seed=0, vocab=tokenizer.vocab_size)
        start = [tokenizer.special["<|endoftext|>"]]
        text = start + list(generate(start, 0.8, 50, most=400))
    else:
        model = engine.Model(CONFIGS["big" if gpu else "small"], **options, training=False)
        generate = partial(model_cpu.generate, model, seed=0)
        text = default_rng(0).integers(0, model.config.vocab, 401).tolist()

    def ours(temperature, top_k, speculate, prompt, steps):
        return seconds_a_token(generate(prompt, temperature, top_k, speculate=speculate), steps)
    functions = {"ours, greedy": partial(ours, 0, 0, False),
                 "ours, sampled": partial(ours, 0.8, 50, False)}
    if folder:
        functions |= {"ours, greedy, speculative": partial(ours, 0, 0, True),
                      "ours, sampled, speculative": partial(ours, 0.8, 50, True)}
    if peer:
        functions |= peers_on_gpu(model) if gpu else peers_on_cpu(model)
    where = f"bf16, {gpu_name()}" if gpu else f"float32, {available_cores()} cores"
    print(f"generation, {folder or 'untrained'}, dim {model.config.dim}, {where}: up to {tokens} tokens a round, best of {rounds}, "
          f"OPENBLAS_NUM_THREADS {os.environ.get('OPENBLAS_NUM_THREADS') or 'not set'}")
    for length in 1, 100, 128, 400:
        steps = min(tokens, model.config.context - length - 1)          # all in one window
        if steps > 0:
            rows = {name: partial(function, text[:length], steps) for name, function in functions.items()}
            best_times(rows, 1)                     # the first calls load what they need
            print(f"after {length} tokens")
            print_times(best_times(rows, rounds), 1, "tokens")


def peers_on_cpu(model):
    """PyTorch with a KV cache on all cores, and on one: the products of a single token are so small that its threads often
    cost more than they bring."""
    import torch
    import torch_twin
    twin = twin_of(model)

    def eager(threads, prompt, steps):
        time.sleep(0.1)                             # our idle threads spin for a while, and would slow PyTorch's
        torch.set_num_threads(threads)
        seconds = seconds_a_token(torch_twin.greedy(twin, prompt), steps)
        time.sleep(0.1)                             # and the other way round
        return seconds
    return {f"peer: PyTorch, threads: {n}": partial(eager, n) for n in sorted({1, available_cores()})}


def peers_on_gpu(model):
    """PyTorch's step, compiled and in a CUDA graph; "tuned" is the harder peer.  Its tokens are read one by one, as ours are.  The graph is
    one of fixed shapes: its attention reads all places of the cache, masked, so its time does not depend on the position."""
    import torch_twin
    twin = twin_of(model, "cuda").bfloat16()

    def graph(captured, prompt, steps):
        token, position, replay = captured

        def step():
            replay()
            token.item()
        position.fill_(len(prompt))
        step()
        return seconds_a_call(step, steps)
    return {f"peer: PyTorch, {name}CUDA graph": partial(graph, torch_twin.capture_greedy(twin, bool(name)))
            for name in ("tuned, ", "")}


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU
# ----------------------------------------------------------------------------------------------------------------------
def bench_train(model="big", batch=64, context=512, precision="bf16", optimizer="adamw", peer=False, rounds=5):
    """A training step: milliseconds, tokens/s, memory; then a block to paste into an issue.  --peer: beside PyTorch's, with
    the same optimizer, the hardest and the plain one.  --rounds 30: by then the card is warm, and its power limits it."""
    where = f"{model}, {precision}, B {batch} x T {context}, {optimizer}, {gpu_name()}"
    cupy = model_gpu.cupy
    config = replace(CONFIGS[model], context=context)
    rows = random_batch(config, batch, context)
    ours = model_gpu.Model(config, precision=precision, micro_batch=batch, optimizer=optimizer)
    functions = {"ours": partial(train_step, ours, *rows)}
    seconds_a_call(functions["ours"], 3, wait_for_gpu)
    gib = {"ours": cupy.get_default_memory_pool().used_bytes() / 2 ** 30}
    for kind in ("hardest", "plain") if peer else ():
        import torch
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        hardest = kind == "hardest"
        twin = twin_of(ours, "cuda", torch.bfloat16 if hardest and precision == "bf16" else None)
        name = f"peer: PyTorch, {kind}"
        functions[name] = twin_step(twin, rows, precision, optimizer, graph=hardest)
        seconds_a_call(functions[name], 4, wait_for_gpu)
        gib[name] = (torch.cuda.max_memory_allocated() - before) / 2 ** 30
    notes = {name: f"  {size:6.2f} GiB" for name, size in gib.items()}
    print(f"training step, {where}: best of {rounds} x 10")
    times = best_times({name: partial(seconds_a_call, function, 10, wait_for_gpu)
                        for name, function in functions.items()}, rounds)
    print_times(times, batch * context, "tokens", notes)
    print("\nto paste into an issue, with what is printed above:")
    B = 1
    while B < batch:
        step = partial(train_step, ours, *[part[:B] for part in rows])
        seconds_a_call(step, 4, wait_for_gpu)       # the first calls record a CUDA graph
        print_times({f"ours, B {B}": seconds_a_call(step, 30, wait_for_gpu)}, B * context, "tokens")
        B *= 2
    for name, error in gradient_errors(precision, peer).items():
        print(f"  {name}: the gradient's relative distance from float64 {error:.2e}")
    print(f"  {where}, compute capability {cupy.cuda.Device().compute_capability}, CUDA of the driver "
          f"{cupy.cuda.runtime.driverGetVersion()}, CUDA {cupy.cuda.runtime.runtimeGetVersion()}, CuPy {cupy.__version__}, "
          f"NumPy {np.__version__}, Python {platform.python_version()}, {platform.platform()}")


def gradient_errors(precision, peer):
    """{name: relative L2 distance of the gradient from that of the CPU in float64}, on the problem of gradcheck.py --gpu."""
    reference, tokens, targets = gradcheck.make_problem(gradcheck.GPU_CONFIG, T=256)
    ours = model_gpu.Model(gradcheck.GPU_CONFIG, precision=precision)
    ours.write(ours.flat_params, reference.flat_params)
    exact, gradient = [gradcheck.whole_step(model, tokens, targets)["whole gradient"] for model in (reference, ours)]
    gradients = {"ours": gradient}
    for kind in ("hardest", "plain") if peer else ():
        import torch_twin
        gradients[f"PyTorch, {kind}"] = torch_twin.gradient(reference, tokens, targets, precision, hardest=kind == "hardest")
    return {name: gradcheck.distance(gradient, exact) for name, gradient in gradients.items()}


def bench_attention(precision="bf16", lengths=(512, 1024, 4096), rounds=5):
    """Our attention, forward and backward: causal, D 64, 12 query and 4 key/value heads, 32,768 tokens, at several T.  Beside
    it PyTorch's cuDNN, its FlashAttention 2, and the plain one, which stores the T x T probabilities."""
    cupy = model_gpu.cupy
    torch = import_peer("torch")
    for T in lengths:
        B = 32768 // T
        print(f"attention, B {B} x T {T}, D 64, 12/4 heads, causal, {precision}, {gpu_name()}: best of {rounds} x 50")
        config = replace(CONFIGS["big"], context=T)
        gpu = model_gpu.Gpu(config, precision, "cublas")
        qkv, dout = [cupy.asarray(default_rng(0).standard_normal((B * T, width), np.float32))
                     for width in (config.qkv_width, config.dim)]
        if precision == "bf16":                     # the upper halves
            qkv, dout = [(array.view(np.uint32) >> 16).astype(np.uint16) for array in (qkv, dout)]
        out = cupy.empty_like(dout)
        dqkv = cupy.empty_like(qkv)
        lse, delta = [cupy.empty((B, config.heads, T), np.float32) for _ in range(2)]

        def ours():
            model_gpu.attention_forward(gpu, out, lse, qkv, B, T)
            model_gpu.attention_backward(gpu, dqkv, dout, out, lse, qkv, delta)
        functions = {"ours": ours}
        for name in ("cuDNN", "FlashAttention 2", "T x T stored") if torch else ():
            function = torch_attention(torch, name, B, T, config, precision)
            try:
                function()
                functions[f"peer: PyTorch, {name}"] = function
            except RuntimeError as error:           # not for this card or precision, or too little memory
                print(f"  {name}: {str(error).splitlines()[0]}")
        times = best_times({name: partial(seconds_a_call, function, 50, wait_for_gpu)
                            for name, function in functions.items()}, rounds)
        print_times(times, B * T, "tokens")


def torch_attention(torch, name, B, T, config, precision):
    """-> function(): forward and backward"""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    q, k, v = [torch.randn(B, heads, T, config.head_dim, device="cuda", dtype=dtype, requires_grad=True)
               for heads in (config.heads, config.kv_heads, config.kv_heads)]
    dy = torch.randn_like(q)
    future = torch.ones(T, T, dtype=torch.bool, device="cuda").triu(1)
    R = config.heads // config.kv_heads

    def plain():                                    # as one writes it down; P is (B,H,T,T)
        S = q @ k.repeat_interleave(R, 1).mT / math.sqrt(config.head_dim)
        P = S.masked_fill(future, -math.inf).softmax(-1)
        return P @ v.repeat_interleave(R, 1)

    def fused():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if name == "cuDNN" else SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    forward = plain if name == "T x T stored" else fused
    return lambda: torch.autograd.grad(forward(), (q, k, v), dy)


def bench_scale(gpus=0, batch=64, optimizer="adamw", peer=False, rounds=5):
    """A training step of big in bf16 on several GPUs, each with --batch rows.  "alone": without the sum of the gradients;
    the difference is what communication costs.  --gpus: processes to start by mpiexec, a GPU each."""
    model_gpu.pick("gpu")                           # ValueError where there is none
    if gpus:
        mpiexec = shutil.which("mpiexec", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
        if not mpiexec:
            raise ValueError("mpiexec is missing: make gpu installs one where there are several GPUs.")
        # the last of two --gpus counts: the processes start no others
        sys.exit(subprocess.call([mpiexec, "-n", str(gpus), sys.executable, *sys.argv, "--gpus", "0"]))

    def run(ranks):
        model_gpu.take_gpu(ranks.local)
        config = CONFIGS["big"]
        tokens, targets = random_batch(config, batch, config.context)
        model = model_gpu.Model(config, precision="bf16", micro_batch=batch, optimizer=optimizer)

        def step():
            model.forward(tokens, targets, [tokens.size * ranks.size] * config.predict)
            model.backward()
            model.update(3e-4)

        def slowest(function):
            """Seconds on the slowest rank."""
            wait_for_gpu()
            ranks.meet()
            return max(ranks.all_gather(seconds_a_call(function, 10, wait_for_gpu)))
        times = {}
        for name, model.communicator in ("ours", model_gpu.Nccl(ranks)), ("ours, alone", None):
            slowest(step)
            times |= best_times({name: partial(slowest, step)}, rounds)
        if peer:
            function = distributed_twin(ranks, model, batch)
            slowest(function)
            times |= best_times({"peer: PyTorch compiled, DDP": partial(slowest, function)}, rounds)
        print(f"{ranks.size} GPUs, B {batch} x T {config.context} each, bf16, {optimizer}, {gpu_name()}: best of {rounds} x 10")
        print_times(times, ranks.size * batch * config.context, "tokens")
    run_ranks(run)


def distributed_twin(ranks, model, batch):
    """-> step() of PyTorch's model, compiled, its gradients averaged over the ranks."""
    import torch.distributed
    torch.cuda.set_device(ranks.local)
    address = f"file://{tempfile.mktemp()}"         # a name that nobody else has: where the ranks meet
    torch.distributed.init_process_group("nccl", init_method=ranks.all_gather(address)[0], rank=ranks.rank, world_size=ranks.size)
    twin = torch.nn.parallel.DistributedDataParallel(twin_of(model, "cuda", torch.bfloat16), device_ids=[ranks.local])
    twin.config = model.config
    twin.stream = torch.bfloat16
    return twin_step(twin, random_batch(model.config, batch, model.config.context), "bf16")


# ----------------------------------------------------------------------------------------------------------------------
# Losses
# ----------------------------------------------------------------------------------------------------------------------
def windows_at(ids, starts, config):
    """-> inputs (B,T), targets (B,T+K-1)."""
    rows = np.stack([ids[start:start + config.context + config.predict] for start in starts]).astype(np.int64)
    return rows[:, :config.context], rows[:, 1:]


def curve(step, losses, ids, held_out, config, steps, lr, batch, seed):
    """Train with warmup and a cosine by step(inputs, targets, lr) -> [(tokens, seconds, nats a held-out token by kind of text)],
    about sixteen times in the run; the time of the evaluations is not counted.  losses(inputs, targets) -> those of the heads."""
    T = config.context
    starts = default_rng(seed).permutation(len(ids) // T - 1) * T
    points = []
    seconds = 0.0
    warmup = max(1, steps // 10)
    started = time.perf_counter()
    for i in range(steps):
        chosen = np.take(starts, range(i * batch, (i + 1) * batch), mode="wrap")
        decay = 0.55 + 0.45 * math.cos(math.pi * (i - warmup) / steps)      # from 1 to about a tenth
        step(*windows_at(ids, chosen, config), lr * min((i + 1) / warmup, decay))
        if (i + 1) % max(1, steps // 16) and i + 1 < steps:
            continue
        wait_for_gpu()
        seconds += time.perf_counter() - started
        means = []
        for text in held_out:
            places = np.linspace(0, len(text) - T - config.predict, 256, dtype=int).reshape(-1, 16)
            means.append(np.mean([float(losses(*windows_at(text, some, config))[0]) for some in places]))
        points.append(((i + 1) * batch * T, seconds, np.array(means)))
        started = time.perf_counter()
    return points


def bench_curves(tokens, val=("",), model="big", runs=("adamw", "muon"), steps=1024, lr=1.2e-3, batch=64, seed=0):
    """Held-out losses by tokens and by seconds: runs from one start on the same batches, each with a schedule of its own
    length.  A run is NAME[:STEPS], NAME an optimizer: what is Muon worth?
    --tokens: a data/train-*.bin of the model's vocabulary; --val: its data/val-*.bin."""
    config = CONFIGS[model]
    print(f"{model}, {gpu_name()}, lr {lr}, seed {seed}, held out: {', '.join(val)}")
    ids, *held_out = [np.fromfile(path, "<u2") for path in (tokens, *val)]
    bar = None
    for run in runs:
        name, _, own_steps = run.partition(":")
        trained = model_gpu.Model(config, seed, precision="bf16", micro_batch=batch, optimizer=name)
        points = curve(partial(train_step, trained), trained.forward, ids, held_out, config, int(own_steps or steps), lr,
                       batch, seed)
        for read, seconds, losses in points:
            print(f"  {run:12} {read / 1e6:7.1f}M tokens  {seconds:7.1f} s  {losses.round(4)}", flush=True)
        bar = bar or points[-1]                     # of the first run
        for read, seconds, losses in points:
            if (losses <= bar[2]).all():
                print(f"  {run} reaches {runs[0]}'s losses with {read / bar[0]:.2f} of the tokens, {seconds / bar[1]:.2f} of the time")
                break


# ----------------------------------------------------------------------------------------------------------------------
# The command line
# ----------------------------------------------------------------------------------------------------------------------
COMMANDS = {function.__name__.removeprefix("bench_"): function for function in (
    bench_cpu, bench_tokenizer, bench_euler, bench_decode, bench_train, bench_attention, bench_scale, bench_curves)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    for name, function in COMMANDS.items():         # a function's parameters are the command's options
        command = commands.add_parser(name, description=function.__doc__)
        for option, parameter in inspect.signature(function).parameters.items():
            default = parameter.default
            how = {"default": default, "type": type(default)}
            if default is parameter.empty:
                how = {"required": True}
            elif default is False:
                how = {"action": "store_true"}
            elif isinstance(default, tuple):
                how = {"default": default, "type": type(default[0]), "nargs": "+"}
            command.add_argument(f"--{option}", **how)
    options = vars(parser.parse_args())
    asked = options.pop("command")
    model_gpu.HOPPER = os.environ.get("HOPPER") != "0"
    for name in [asked] if asked else [name for name in COMMANDS if name not in ("scale", "curves")]:
        try:
            COMMANDS[name](**options)
        except (ImportError, OSError, ValueError) as error:
            hint = f" ({PEERS_HINT})" if isinstance(error, ImportError) else ""
            print(f"{name}: not measured: {error}{hint}", file=sys.stderr)
            if asked:
                sys.exit(2)


if __name__ == "__main__":
    main()
