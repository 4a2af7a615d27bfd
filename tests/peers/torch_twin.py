"""The same model in PyTorch: the yardstick for speed (tests/bench.py).

The plain twin is what a PyTorch user writes: fused qkv and gate_up products, scaled_dot_product_attention, one product for
all heads, fused AdamW, torch.compile, and autocast to bf16.  Under autocast its residual stream stays float32.

The hardest twin adds what an expert adds: a residual stream, gains and RoPE's tables in bf16 (stream=torch.bfloat16),
cuDNN's attention, and the whole step in one CUDA graph (Step.capture).  Muon is batched by shape, compiled, and in bf16.

Parameters have the names and shapes of model_cpu.param_table, so weights can be copied over.
"""
import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from model_cpu import NEWTON_SCHULZ


class Twin(torch.nn.Module):
    def __init__(self, config, params, stream=None, device="cpu"):
        """params: dict name -> array, as model.params of either engine (on the host).  stream: the type of the residual
        stream, by default that of the weights."""
        super().__init__()
        self.config = config
        self.stream = stream
        self.cudnn = bool(stream) and has_cudnn_attention(device)
        self.weights = torch.nn.ParameterDict({name.replace(".", "_"): torch.nn.Parameter(torch.tensor(array).float())
                                               for name, array in params.items()})
        self.to(device)

    def rope(self, x, cos, sin):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def trunk(self, tokens, cos, sin, attend):
        """tokens (B,T), tables (T,D), attend(i, q, k, v) -> y (B,H,T,D), the attention of layer i -> (B,T,C)."""
        c, w, (B, T) = self.config, self.weights, tokens.shape
        x = F.embedding(tokens, w["embed"])
        x = x.to(self.stream or x.dtype)

        def norm(name):
            return F.rms_norm(x, (c.dim,), w[name].to(x.dtype), 1e-5)
        for i in range(c.layers):
            q, k, v = F.linear(norm(f"layers_{i}_norm1"), w[f"layers_{i}_qkv"]).view(
                B, T, -1, c.head_dim).transpose(1, 2).split([c.heads, c.kv_heads, c.kv_heads], dim=1)
            q, k = self.rope(q, cos, sin), self.rope(k, cos, sin)
            y = attend(i, q.to(v.dtype), k.to(v.dtype), v)
            x = x + F.linear(y.transpose(1, 2).reshape(B, T, c.dim), w[f"layers_{i}_out"])
            gate, up = F.linear(norm(f"layers_{i}_norm2"), w[f"layers_{i}_gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w[f"layers_{i}_down"])
        return norm("norm")

    def logits(self, tokens, cos, sin):
        """tokens (B,T) -> (B,T,K*V)."""
        def attend(i, q, k, v):
            if self.cudnn:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(self.trunk(tokens, cos, sin, attend), self.weights["heads"])

    def forward(self, tokens, targets, cos, sin):
        """tokens (B,T), targets (B,T,K), -1 = not counted, tables (T,D) -> (K,) losses of the heads."""
        c = self.config
        nll = F.cross_entropy(self.logits(tokens, cos, sin).view(-1, c.vocab), targets.reshape(-1), ignore_index=-1,
                              reduction="none")
        return nll.view(-1, c.predict).sum(dim=0) / (targets >= 0).sum(dim=(0, 1))

    def empty_cache(self):
        """[[keys, values] of each layer], each (1,G,context,D).  In one tensor torch.compile would make it slower."""
        c = self.config
        shape = 1, c.kv_heads, c.context, c.head_dim
        return [[self.weights["embed"].new_zeros(shape) for _ in range(2)] for _ in range(c.layers)]

    def decode(self, tokens, positions, cos, sin, cache, seen=None):
        """tokens (1,n) at positions (n,), tables (context,D) -> the logits (1,n,V) of head 0; keys and values go into the
        cache.  Attention reads the first `seen` places of it, or all, masked: then no shape depends on the positions."""
        mask = torch.arange(self.config.context, device=positions.device)[:seen] <= positions[:, None]  # (n, seen or context)
        if len(positions) == 1 and seen:            # the last token sees all of them
            mask = None

        def attend(i, q, k, v):
            k, v = [part.index_copy_(2, positions, new)[:, :, :seen] for part, new in zip(cache[i], (k, v))]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = self.trunk(tokens, cos[positions], sin[positions], attend)
        return F.linear(x, self.weights["heads"][:self.config.vocab])


@functools.cache
def has_cudnn_attention(device):
    """It is PyTorch's fastest on an H100 at T 512 to 4,096."""
    if device == "cpu":
        return False
    q = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    k = q[:, :1]
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            y = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
            y.backward(torch.ones_like(y))
    except RuntimeError:                            # not for this card
        return False
    return True


@torch.no_grad()
def greedy(twin, prompt):
    """Continue the prompt, a list of ids: yields ids without end, a token at a time, eagerly; as model_cpu.generate does."""
    cache = twin.empty_cache()
    tokens = torch.tensor([prompt])
    positions = torch.arange(len(prompt))
    while True:
        logits = twin.decode(tokens, positions, *tables(twin.config, twin.config.context), cache, positions[-1] + 1)
        tokens = logits[:, -1:].argmax(-1)          # (1,1)
        positions = positions[-1:] + 1
        yield tokens.item()


@torch.no_grad()
def capture_greedy(twin, tuned):
    """gpt-fast's recipe for one token at a time on a GPU: the step compiled, and captured in a CUDA graph together with the
    choice of the next token.  tuned: gpt-fast's setting, too, by which a product with one row is a kernel of the compiler's
    own, with RoPE's tables in bf16.  -> (token (1,1), position (1,), replay), tensors on the GPU: replay() reads the token at the
    position, leaves there the next token, and moves on by one."""
    cache = twin.empty_cache()
    cos, sin = tables(twin.config, twin.config.context, "cuda", torch.bfloat16 if tuned else torch.float32)
    token = torch.zeros((1, 1), dtype=torch.int64, device="cuda")
    position = token[0].clone()
    decode = torch.compile(twin.decode, fullgraph=True, options={"coordinate_descent_tuning": tuned})

    def step():
        token.copy_(decode(token, position, cos, sin, cache).argmax(-1))
        position.add_(1)
    for _ in range(3):                              # the first calls compile and allocate
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(kept=(cache, cos, sin)):             # a graph reads them, but does not keep them alive
        graph.replay()
    return token, position, replay


@functools.cache
def tables(config, T, device="cpu", dtype=torch.float32):
    """cos and sin (T,D), rotate-half layout."""
    frequency = 10000.0 ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    angle = torch.arange(T, dtype=torch.float64)[:, None] * frequency
    return [torch.cat([table, table], -1).to(device, dtype) for table in (angle.cos(), angle.sin())]


def make_losses(twin, compiled, autocast=None):
    """-> losses(tokens (B,T), targets (B,T+K-1)), tensors on the twin's device, which returns the losses of the heads (K,)
    and the total loss.  autocast: torch.bfloat16 or None."""
    c = twin.config
    forward = torch.compile(twin, dynamic=False) if compiled else twin
    device = next(twin.parameters()).device
    weights = torch.tensor(c.head_weights, dtype=torch.float32, device=device)

    def losses(tokens, targets):
        T = tokens.shape[1]
        stacked = torch.stack([targets[:, k:k + T] for k in range(c.predict)], dim=-1)              # (B,T,K)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            heads = forward(tokens, stacked, *tables(c, T, device, twin.stream or torch.float32))
        return heads, heads @ weights.to(heads.dtype)
    return losses


def gradient(reference, tokens, targets, precision, device="cuda", hardest=True):
    """The gradient of the total loss by autograd in this precision ("fp32", "tf32" or "bf16"), float64 and flat, in the
    order of reference.grads.  reference: a model of model_cpu, whose weights are taken.  hardest: in bf16 the residual
    stream is bf16, too."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    autocast = torch.bfloat16 if precision == "bf16" else None
    twin = Twin(reference.config, reference.params, autocast if hardest else None, device)
    losses = make_losses(twin, False, autocast)
    losses(torch.from_numpy(tokens).to(device), torch.from_numpy(targets).to(device))[1].backward()
    return np.concatenate([twin.weights[name.replace(".", "_")].grad.double().cpu().numpy().reshape(-1)
                           for name in reference.grads])


def newton_schulz(matrices, dtype):
    """model_cpu.newton_schulz of a batch (n, rows, columns), with products in this type."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    X = (matrices.mT if tall else matrices).to(dtype)
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return (X.mT if tall else X).to(matrices.dtype)


class Muon:
    """model_cpu.muon_update of the layers' matrices: q, k, v, gate and up each by itself.  Matrices of one shape are one
    batch."""

    def __init__(self, twin, rate, compiled, dtype):
        c = twin.config
        kv = c.kv_heads * c.head_dim
        rows = {"qkv": [c.dim, kv, kv], "out": [c.dim], "gate_up": [c.hidden, c.hidden], "down": [c.dim]}
        names = [f"layers_{i}_{name}" for i in range(c.layers) for name in rows]
        self.params = [twin.weights[name] for name in names]
        self.rows = c.layers * list(rows.values())
        self.m = [torch.zeros_like(param) for param in self.params]
        self.rate = rate
        self.dtype = dtype
        self.orthogonal = torch.compile(newton_schulz, dynamic=False) if compiled else newton_schulz

    @torch.no_grad()
    def step(self, decay=0.1, momentum=0.95):
        grads = [param.grad for param in self.params]
        torch._foreach_lerp_(self.m, grads, 1 - momentum)
        ahead = torch._foreach_lerp(grads, self.m, momentum)
        torch._foreach_mul_(self.params, 1 - self.rate * decay)
        batches = {}
        for param, look, rows in zip(self.params, ahead, self.rows):
            for part, matrix in zip(param.split(rows), look.split(rows)):
                batches.setdefault(part.shape, []).append((part, matrix))
        for shape, pairs in batches.items():
            parts, matrices = zip(*pairs)
            steps = self.orthogonal(torch.stack(matrices), self.dtype or self.rate.dtype)
            torch._foreach_sub_(parts, (steps * (self.rate * 0.2 * math.sqrt(max(shape)))).unbind())


class Step:
    """step(tokens, targets, lr): forward, backward, clip and update as model.update does it (no decay on gains, no clipping
    of Muon's gradients); returns the losses of the heads (K,)."""

    def __init__(self, twin, compiled, autocast=None, optimizer="adamw"):
        self.twin = twin
        self.losses = make_losses(twin, compiled, autocast)
        first = next(twin.parameters())
        self.rate = torch.zeros((), dtype=first.dtype, device=first.device)     # a tensor: a CUDA graph reads it anew
        self.muon = Muon(twin, self.rate, compiled, autocast) if optimizer == "muon" else None
        taken = {id(param) for param in self.muon.params} if self.muon else ()
        self.others = [param for param in twin.parameters() if id(param) not in taken]
        groups = [{"params": [param for param in self.others if param.ndim == 2], "weight_decay": 0.1},
                  {"params": [param for param in self.others if param.ndim == 1], "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.95), eps=1e-8, fused=True,
                                       capturable=first.is_cuda)
        for group in self.adamw.param_groups:
            group["lr"] = self.rate                 # this tensor, and no copy of it
        self.inputs = None                          # of the CUDA graph

    def update(self, tokens, targets):
        losses, total = self.losses(tokens, targets)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        self.adamw.step()
        if self.muon:
            self.muon.step()
        self.twin.zero_grad(set_to_none=True)
        return losses.detach()

    def __call__(self, tokens, targets, lr=3e-4):
        self.rate.fill_(lr)
        if not self.inputs:
            return self.update(tokens, targets)
        for place, rows in zip(self.inputs, (tokens, targets)):
            place.copy_(rows)
        self.graph.replay()
        return self.result.clone()

    def warm_up(self, tokens, targets):
        """Compile and allocate.  The weights stay, as the rate is 0; the moments are as at the start."""
        for _ in range(3):
            self(tokens, targets, 0.0)
        for state in self.adamw.state.values():
            for moment in state.values():
                moment.zero_()
        if self.muon:
            torch._foreach_zero_(self.muon.m)

    def capture(self, tokens, targets):
        """From now on a step of this shape is one CUDA graph: the host launches no kernels."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.warm_up(tokens, targets)
        torch.cuda.current_stream().wait_stream(side)
        inputs = tokens.clone(), targets.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):          # records, and computes nothing
            self.result = self.update(*inputs)
        self.inputs = inputs
