"""The GPU engine's gradients against model_cpu's in float64: what `python gradcheck.py --gpu` runs.

    python gradcheck.py --gpu                   in every precision that the GPU has
    HOPPER=0 python gradcheck.py --gpu --peer   on a Hopper: what a GeForce RTX 30 or 40 runs; PyTorch's error beside

Finite differences would drown in fp32's rounding.  But the reference's gradient is proven, so the GPU's is compared with
that, tensor by tensor, by relative L2: |gpu - reference| / |reference|.  What else the engine does, test_on_gpu.py measures so.
"""
import dataclasses
import math
import os
import sys
import unittest.mock

import model_cpu
import model_gpu
import numpy as np
from gradcheck import make_problem
from model_cpu import CONFIGS

GPU_CONFIG = dataclasses.replace(CONFIGS["big"], layers=4)
# of the whole gradient and of each head's loss
GPU_BARS = {"fp32": (2e-6, 1e-6), "tf32": (2e-3, 1e-4), "bf16": (2e-2, 1e-3)}


def distance(a, b):
    """Relative L2 of an array from b."""
    error = np.linalg.norm(a - b) / max(np.linalg.norm(b), sys.float_info.min)
    return error if math.isfinite(error) else math.inf


def whole_step(model, tokens, targets):
    """-> (losses, flat gradient) of either engine's model, on the host."""
    model.flat_grads[...] = 0.0                             # as after an update
    model.added = False
    losses = model.read(model.forward(tokens, targets))
    model.backward()
    return losses, model.read(model.flat_grads)


def run_gpu_gradients(config, precisions, std, peer):
    """A row per tensor, a column per precision; then the whole gradient, losses, and the same step twice.
    peer: and the whole gradient by PyTorch's autograd."""
    reference, tokens, targets = make_problem(config, std)
    losses, gradient = whole_step(reference, tokens, targets)
    columns = []
    good = True
    for precision in precisions:
        model = model_gpu.Model(config, precision=precision)
        model.write(model.flat_params, reference.flat_params)
        gpu_losses, flat = whole_step(model, tokens, targets)
        with unittest.mock.patch.object(model_gpu, "RECORD_AT", 2):         # now as a CUDA graph
            same = np.array_equal(flat, whole_step(model, tokens, targets)[1])
        views = model_cpu.param_views(flat, config)
        column = {name: distance(view, reference.grads[name]) for name, view in views.items()}
        worst = max(column.values())
        whole = distance(flat, gradient)
        losses_off = np.abs(gpu_losses / losses - 1).max()
        bar, loss_bar = GPU_BARS[precision]
        good &= same and (std is not None or worst <= 2 * bar and whole <= bar and losses_off <= loss_bar)
        column.update({"whole gradient": whole, "losses": losses_off, "twice the same bits": str(same)})
        if peer:
            import torch_twin           # here, since it needs PyTorch
            theirs = distance(torch_twin.gradient(reference, tokens, targets, precision), gradient)
            column.update({"PyTorch's whole": theirs, "ours / PyTorch's": whole / theirs})
            good &= std is None or whole <= 1.5 * theirs
        columns.append(column)
    bars = ", ".join(f"{precision} {GPU_BARS[precision][0]:.0e}" for precision in precisions)
    print(f"{'initial' if std is None else f'wide ({std})'} weights, {config.layers} layers of width "
          f"{config.dim}, B 2 x T 256; relative L2 from float64{f'; bars {bars}' if std is None else ''}")
    for row in column:
        cells = [column[row] for column in columns]
        print(f"  {row:20}" + "".join(f"{x:>12}" if isinstance(x, str) else f"{x:12.2e}" for x in cells))
    print()
    return good


def run_gpu(peer):
    """Initial weights and wide ones, in all precisions that this GPU has."""
    model_gpu.pick("gpu")                           # ValueError where there is none
    model_gpu.HOPPER = os.environ.get("HOPPER") != "0"
    precisions = tuple(GPU_BARS) if model_gpu.default_precision() == "bf16" else ("fp32",)
    results = [run_gpu_gradients(GPU_CONFIG, precisions, std, peer) for std in (None, 0.06)]
    print("all within the bars" if all(results) else "NOT all within the bars")
    print("Attention, decoding, generation and Muon are proven by: python -m pytest tests/test_on_gpu.py")
    return all(results)
