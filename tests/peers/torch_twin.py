"""The same model in PyTorch, written as a PyTorch user would: the yardstick for speed (tests/bench.py).

Fused qkv and gate_up products, scaled_dot_product_attention, one product for all heads, fused AdamW: what torch.compile
likes best.  Parameters have the names and shapes of model_cpu.param_table, so weights can be copied over.
"""
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
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin

    def forward(self, tokens, targets, cos, sin):
        """tokens (B,T), targets (B,T,K), tables (T,D) -> the total loss: head 0 plus mtp_weight times the mean of the rest."""
        c, w, (B, T) = self.config, self.weights, tokens.shape
        x = F.embedding(tokens, w["embed"])
        for i in range(c.layers):
            q, k, v = F.linear(F.rms_norm(x, (c.dim,), w[f"layers_{i}_norm1"], 1e-5), w[f"layers_{i}_qkv"]).view(
                B, T, -1, c.head_dim).transpose(1, 2).split([c.heads, c.kv_heads, c.kv_heads], dim=1)
            q, k = self.rope(q, cos, sin), self.rope(k, cos, sin)
            y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True)
            x = x + F.linear(y.transpose(1, 2).reshape(B, T, c.dim), w[f"layers_{i}_out"])
            gate, up = F.linear(F.rms_norm(x, (c.dim,), w[f"layers_{i}_norm2"], 1e-5), w[f"layers_{i}_gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w[f"layers_{i}_down"])
        logits = F.linear(F.rms_norm(x, (c.dim,), w["norm"], 1e-5), w["heads"]).view(B * T, c.predict, c.vocab)
        losses = [F.cross_entropy(logits[:, k].float(), targets[..., k].reshape(-1), ignore_index=-1) for k in range(c.predict)]
        return losses[0] + (c.mtp_weight * torch.stack(losses[1:]).mean() if c.predict > 1 else 0.0)


def tables(config, T, device="cpu"):
    """cos and sin (T,D), rotate-half layout."""
    frequency = 10000.0 ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    angle = torch.arange(T, dtype=torch.float64)[:, None] * frequency
    return [torch.cat([table, table], dim=-1).float().to(device) for table in (angle.cos(), angle.sin())]


def make_loss(twin, tokens, targets, compiled, autocast=None):
    """-> loss(), the total loss as a tensor.  tokens (B,T), targets (B,T+K-1): tensors on the twin's device.
    autocast: torch.bfloat16 or None."""
    c, T = twin.config, tokens.shape[1]
    stacked = torch.stack([targets[:, k:k + T] for k in range(c.predict)], dim=-1)                  # (B,T,K)
    cos, sin = tables(c, T, tokens.device)
    forward = torch.compile(twin) if compiled else twin

    def loss():
        with torch.autocast(tokens.device.type, dtype=autocast, enabled=autocast is not None):
            return forward(tokens, stacked, cos, sin)
    return loss


def make_step(twin, tokens, targets, compiled, autocast=None, lr=3e-4):
    """-> step(): forward, backward, clip, AdamW as model.update does it (no decay on gains), returning the loss."""
    groups = [{"params": [p for p in twin.parameters() if p.ndim == 2], "weight_decay": 0.1},
              {"params": [p for p in twin.parameters() if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    forward = make_loss(twin, tokens, targets, compiled, autocast)

    def step():
        loss = forward()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss
    return step
