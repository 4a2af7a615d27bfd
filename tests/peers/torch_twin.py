"""The same model in PyTorch, written as a PyTorch user would: the yardstick for speed (tests/bench.py).

Fused qkv and gate_up products, scaled_dot_product_attention, one product for all heads, fused AdamW: what torch.compile
likes best.  Parameters have the names and shapes of model_cpu.param_table, so weights can be copied over.
"""
import functools

import numpy as np
import torch
import torch.nn.functional as F


class Twin(torch.nn.Module):
    def __init__(self, config, params):
        """params: dict name -> array, as model.params of either engine (on the host)."""
        super().__init__()
        self.config = config
        self.weights = torch.nn.ParameterDict({name.replace(".", "_"): torch.nn.Parameter(torch.tensor(array).float())
                                               for name, array in params.items()})

    def rope(self, x, cos, sin):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def trunk(self, tokens, cos, sin, attend):
        """tokens (B,T), tables (T,D), attend(i, q, k, v) -> y (B,H,T,D), the attention of layer i -> (B,T,C)."""
        c, w, (B, T) = self.config, self.weights, tokens.shape
        x = F.embedding(tokens, w["embed"])
        for i in range(c.layers):
            q, k, v = F.linear(F.rms_norm(x, (c.dim,), w[f"layers_{i}_norm1"], 1e-5), w[f"layers_{i}_qkv"]).view(
                B, T, -1, c.head_dim).transpose(1, 2).split([c.heads, c.kv_heads, c.kv_heads], dim=1)
            q, k = self.rope(q, cos, sin), self.rope(k, cos, sin)
            y = attend(i, q.to(v.dtype), k.to(v.dtype), v)
            x = x + F.linear(y.transpose(1, 2).reshape(B, T, c.dim), w[f"layers_{i}_out"])
            gate, up = F.linear(F.rms_norm(x, (c.dim,), w[f"layers_{i}_norm2"], 1e-5), w[f"layers_{i}_gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w[f"layers_{i}_down"])
        return F.rms_norm(x, (c.dim,), w["norm"], 1e-5)

    def logits(self, tokens, cos, sin):
        """tokens (B,T) -> (B,T,K*V)."""
        def attend(i, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(self.trunk(tokens, cos, sin, attend), self.weights["heads"])

    def forward(self, tokens, targets, cos, sin):
        """tokens (B,T), targets (B,T,K), -1 = not counted, tables (T,D) -> (K,) losses of the heads."""
        c = self.config
        nll = F.cross_entropy(self.logits(tokens, cos, sin).view(-1, c.vocab), targets.reshape(-1), ignore_index=-1,
                              reduction="none")
        return nll.view(-1, c.predict).sum(dim=0) / (targets >= 0).sum(dim=(0, 1))

    def log_probs(self, tokens, targets, cos, sin):
        """tokens, targets (B,T), -1 = not counted, tables (T,D) -> (B,): of each row the log-probability of its targets."""
        logits = self.logits(tokens, cos, sin)[..., :self.config.vocab]
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
        return -nll.view(tokens.shape).sum(1)

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
def capture_greedy(twin):
    """gpt-fast's recipe for one token at a time on a GPU: the step compiled, and captured in a CUDA graph together with the
    choice of the next token.  -> (token (1,1), position (1,), replay), tensors on the GPU: replay() reads the token at the
    position, leaves there the next token, and moves on by one."""
    cache = twin.empty_cache()
    cos, sin = tables(twin.config, twin.config.context, "cuda")
    token = torch.zeros((1, 1), dtype=torch.int64, device="cuda")
    position = token[0].clone()
    decode = torch.compile(twin.decode, fullgraph=True)

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
def tables(config, T, device="cpu"):
    """cos and sin (T,D), rotate-half layout."""
    frequency = 10000.0 ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    angle = torch.arange(T, dtype=torch.float64)[:, None] * frequency
    return [torch.cat([table, table], -1).float().to(device) for table in (angle.cos(), angle.sin())]


def make_losses(twin, compiled, autocast=None):
    """-> losses(tokens (B,T), targets (B,T+K-1)), tensors on the twin's device, which returns the losses of the heads (K,)
    and the total loss.  autocast: torch.bfloat16 or None."""
    c = twin.config
    forward = torch.compile(twin) if compiled else twin
    device = next(twin.parameters()).device
    weights = torch.tensor(c.head_weights, dtype=torch.float32, device=device)

    def losses(tokens, targets):
        T = tokens.shape[1]
        stacked = torch.stack([targets[:, k:k + T] for k in range(c.predict)], dim=-1)              # (B,T,K)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            heads = forward(tokens, stacked, *tables(c, T, device))
        return heads, heads @ weights
    return losses


def gradient(reference, tokens, targets, precision, device="cuda"):
    """The gradient of the total loss by autograd in this precision ("fp32", "tf32" or "bf16"), float64 and flat, in the
    order of reference.grads.  reference: a model of model_cpu, whose weights are taken."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    twin = Twin(reference.config, reference.params).to(device)
    losses = make_losses(twin, False, torch.bfloat16 if precision == "bf16" else None)
    losses(torch.from_numpy(tokens).to(device), torch.from_numpy(targets).to(device))[1].backward()
    return np.concatenate([twin.weights[name.replace(".", "_")].grad.double().cpu().numpy().reshape(-1)
                           for name in reference.grads])


def dpo_loss(log_probs, reference, beta):
    """Of rows that are chosen and rejected by turns."""
    ratio = (log_probs - reference).view(-1, 2)
    return -F.logsigmoid(beta * (ratio[:, 0] - ratio[:, 1])).mean()


def make_step(twin, compiled, autocast=None):
    """-> step(tokens, targets, lr): forward, backward, clip, AdamW as model.update does it (no decay on gains); returns the
    losses of the heads (K,).  step.warm_up(tokens, targets): what compiles, without an update."""
    groups = [{"params": [p for p in twin.parameters() if p.ndim == 2], "weight_decay": 0.1},
              {"params": [p for p in twin.parameters() if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    forward = make_losses(twin, compiled, autocast)

    def step(tokens, targets, lr=3e-4):
        losses, total = forward(tokens, targets)
        total.backward()
        for group in optimizer.param_groups:
            group["lr"] = lr
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return losses.detach()

    def warm_up(tokens, targets):
        forward(tokens, targets)[1].backward()
        optimizer.zero_grad(set_to_none=True)
    step.warm_up = warm_up
    return step
