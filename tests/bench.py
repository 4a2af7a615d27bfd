"""The README's numbers, each by one command, with the peer measured beside it in the same run where it is installed.

    python tests/bench.py tokenizer
    python tests/bench.py cpu
    python tests/bench.py euler         # of the model in out/small

Every row is the best of some rounds; a round runs all rows once, so that a busy machine slows ours and the peers alike.
"""
import argparse
import lzma
import os
import shutil
import sys
import tempfile
import time
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
    from tokenizer import Tokenizer, available_cores

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        with (lzma.open if arguments.text.suffix == ".xz" else open)(arguments.text, "rb") as file, open(path, "wb") as out:
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
    peer.train([str(path)], tokenizers.trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, show_progress=False))


def tiktoken_gpt2(tiktoken, vocab_bpe, encoder_json):
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    return tiktoken.Encoding("gpt2", mergeable_ranks=data_gym_to_mergeable_bpe_ranks(str(vocab_bpe), str(encoder_json)),
                             pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
                             special_tokens={"<|endoftext|>": 50256})


# ----------------------------------------------------------------------------------------------------------------------
# cpu: a training step of the small model against PyTorch, eager and compiled

def bench_cpu(arguments):
    """Forward, backward, clip and AdamW of the small model at B x T in float32, on all cores."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"        # as train.py has it; read when NumPy loads
    import numpy as np

    import model_cpu
    from tokenizer import available_cores

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
            steps[name] = torch_twin.make_step(torch_twin.Twin(config, model.params), torch.from_numpy(tokens),
                                               torch.from_numpy(targets), compiled)
    except ImportError:
        print("PyTorch is not installed, so it is not measured")
    for step in steps.values():                     # the first calls compile and allocate
        step()
        step()
    times = best_times(steps, arguments.rounds)
    print(f"training step, small, B {B} x T {T}, float32, {cores} cores, best of {arguments.rounds}, "
          f"OPENBLAS_CORETYPE {os.environ.get('OPENBLAS_CORETYPE') or 'not set'}")
    for name, seconds in times.items():
        ratio = f"  ours is {seconds / times['ours']:.2f} x as fast" if name != "ours" else ""
        print(f"  {name:24s} {1e3 * seconds:7.1f} ms  {B * T / seconds:9,.0f} tokens/s{ratio}")


# ----------------------------------------------------------------------------------------------------------------------
# euler: do the trained layers behave like steps of a solver?

def bench_euler(arguments):
    """The trained model's layers as steps of size 1, against other ways to integrate the same dx/dt = f(x, t)."""
    import numpy as np

    import model_cpu

    model, _ = model_cpu.load(arguments.model, model_cpu)
    key = model_cpu.load_state(arguments.model)["settings"]["tokens_key"]
    c, T = model.config, model.config.context
    windows = np.fromfile(f"data/val-{key}.bin", "<u2")[:64 * (T + 1)].reshape(-1, T + 1).astype(np.int64)
    print(f"{arguments.model} after {model.step} steps, {windows[:, 1:].size:,} held-out tokens, loss of head 0")
    for i, (loss, step, _) in enumerate(model_cpu.euler_table(model, windows)):
        print(f"  stopped after {'the embedding' if i == 0 else f'layer {i - 1}':14s} {loss:.4f}   |f(x)|/|x| {step:.3f}")

    def scaled(w, size):
        """Both substeps end in a product, so scaling that matrix scales the step."""
        return {**w, "out": size * w["out"], "down": size * w["down"]}

    def layer(x, i, size=1.0):
        """x after one step of that size by layer i."""
        x, work = x.copy(), model_cpu.Buffers(model.dtype)
        model_cpu.block_forward(x, scaled(model.layer(model.params, i), size), work, work, c, model.cos, model.sin)
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
        model_cpu.rmsnorm_forward(h, rstd, x.reshape(-1, c.dim), model.params["norm"])
        logits = (h @ model.params["heads"][:c.vocab].T)[:, None]
        table = windows[:, 1:].reshape(-1, 1)
        model_cpu.cross_entropy_forward(loss, np.empty(table.shape), logits, table, len(table))
        print(f"  {name:30s} {loss[0]:.4f}")


# ----------------------------------------------------------------------------------------------------------------------

def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("tokenizer", help="train against tokenizers, encode against tiktoken")
    command.add_argument("--text", type=Path, default=DATA / "books_00.txt.xz", help="a text file, or one packed by xz")
    command.add_argument("--rounds", type=int, default=3)
    command.set_defaults(run=bench_tokenizer)
    command = commands.add_parser("cpu", help="a training step of the small model against PyTorch")
    command.add_argument("--batch", type=int, default=16)
    command.add_argument("--rounds", type=int, default=15)
    command.set_defaults(run=bench_cpu)
    command = commands.add_parser("euler", help="half steps, Heun's method: is a trained layer a solver's step?")
    command.add_argument("--model", default="out/small")
    command.set_defaults(run=bench_euler)
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
