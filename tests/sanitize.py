"""Every CUDA kernel that a model launches, at odd shapes, for NVIDIA's compute-sanitizer (on a GPU; not a test of results):

    compute-sanitizer --tool memcheck python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py bf16-32 tf32-64     # these alone, each takes minutes

A training step of two micro-batches, cached decoding and our own products, in every precision and at every head width.
Without CuPy's memory pool each buffer is an allocation of its own, so that a step past its end is seen.  (Of arrays that
share a buffer tests/test_kernels.py and test_flash.py see it.)
"""
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import model_cpu
import model_gpu
import numpy as np


def main():
    reason = model_gpu.why_no_gpu()
    if reason:
        sys.exit(f"error: {reason}")
    import cupy
    cupy.cuda.set_allocator(None)
    rng = np.random.default_rng(0)
    shapes = (32, 2, 2), (64, 3, 1), (128, 2, 1)
    settings = {f"{precision}-{D}": (precision, D, *heads)
                for precision, (D, *heads) in itertools.product(model_gpu.PRECISIONS, shapes)}
    for name in sys.argv[1:] or settings:
        precision, D, heads, kv_heads = settings[name]
        config = model_cpu.Config(dim=heads * D, heads=heads, kv_heads=kv_heads, layers=1, context=152, vocab=72, predict=3)
        model = model_gpu.Model(config, precision=precision, matmul="ours", optimizer="muon")
        for B, T in (1, 1), (1, 137):
            model.forward(rng.integers(0, 72, (B, T)), rng.integers(0, 72, (B, T + 2)))
            model.backward()                                    # the second adds to the first
        model.update(1e-3)
        model.decoder.draw(rng.integers(0, 72, 20).tolist(), 1, 1, 0, model_cpu.Sampling())     # a prompt, then a few tokens
        model.decoder.extend([1, 2, 3])
        model.decoder.draw([1, 2, 3, 4, 5], 5, 3, 0, model_cpu.Sampling(0.8, 20, 0.9, seed=1))
        model_cpu.generate_batch(model, [[1], [2, 3, 4], [5, 6]], model_cpu.Sampling(seed=np.arange(3)), most=2)
        print(name, flush=True)


if __name__ == "__main__":
    main()
