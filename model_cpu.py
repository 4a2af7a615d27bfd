"""model_cpu.py: the whole model in NumPy, forward and backward by hand.  The reference for everything else.

Read tokenizer.py before it.  This file is the specification: model_gpu.py has its layers in the same order, with the
same names, and is checked against this one; gradcheck.py checks this one against finite differences.  Top to bottom:

    1. Config, param_table        how large the model is, and the one list of its parameters
    2. x_forward / x_backward     every layer as a pair: what it computes, and its derivative with the derivation
    3. cross-entropy, AdamW       the loss and the optimizer
    4. Model                      strings the pairs together: forward, backward, update, cached decoding
    5. generate, euler_table      sampling, and what the layers do seen as steps of an ODE solver
    6. save, load                 checkpoints: folders that Hugging Face's Llama loads as they are
    7. main                       the guided tour: python model_cpu.py

Letters, used in every file and in the CUDA code too:

    B batch        T time (positions)    C model width (dim)       L layers             N = B*T tokens
    H query heads  G key/value heads     D = C/H head width        F feed-forward width
    V vocabulary   K prediction heads: head k predicts token t+1+k of the text from position t

The contract of a pair.  x_forward(out, ..., inputs) writes its results into arrays that the caller owns, outputs first.
x_backward(dinputs, dweights, dout, saved...) takes dout = d loss / d out; it WRITES the gradients of activations and
ADDS (+=) to the gradients of weights, because one weight serves many tokens and several micro-batches.  Activations are
matrices (N, width): one row a token.  Weights are (out, in), so y = x @ W.T, and the parts of a fused matrix (q, k, v;
gate, up; the K heads) are slices of its rows.

What this file does not do: no dropout, no biases, no learning-rate schedule (train.py), no batching of prompts.
Arithmetic is float64 by default, where gradients can be checked to ten digits; training passes dtype=np.float32.
"""
import concurrent.futures
import dataclasses
import functools
import glob
import json
import math
import os
import sys
import zlib

try:
    import numpy as np
except ImportError:
    print("NumPy is missing: run `make`, then `. .venv/bin/activate` (or `pip install -r requirements.txt`).", file=sys.stderr)
    sys.exit(2)

from tokenizer import Parser, Tokenizer, naming, read_json, read_plain, replace_file, run_script

NORM_EPS = 1e-5          # added to the mean square in RMSNorm
ROPE_THETA = 10000.0     # base of the rotary frequencies theta^(-2i/D)


# ---------------------------------------------------------------------------------------------------------------------
# 1. How large the model is, and the one list of its parameters
# ---------------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model.  Raises ValueError, in one sentence, for sizes that do not fit together."""
    dim: int                    # C
    heads: int                  # H
    kv_heads: int               # G: every H/G query heads share one key/value head (GQA, Ainslie et al. 2023)
    layers: int                 # L
    context: int                # the largest T
    vocab: int                  # V
    predict: int = 4            # K (multi-token prediction, Gloeckle et al. 2024)
    mtp_weight: float = 0.3     # weight in the loss of the mean of heads 1..K-1; chosen by measurement, see the README

    def __post_init__(self):
        for name in ("dim", "heads", "kv_heads", "layers", "context", "vocab", "predict"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}.")
            if value > 1 << 20:
                raise ValueError(f"{name} must be at most {1 << 20:,}, not {value!r:.20}.")
        if not isinstance(self.mtp_weight, (int, float)) or not 0 <= self.mtp_weight < math.inf:
            raise ValueError(f"mtp_weight must be a finite number of at least 0, not {self.mtp_weight!r}.")
        if self.dim % 8 or self.vocab % 8:
            raise ValueError(f"dim ({self.dim}) and vocab ({self.vocab}) must be multiples of 8.")
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim ({self.dim}) must be a multiple of 2 x heads (2 x {self.heads}): rotary embedding "
                             f"turns the entries of a head in pairs.")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads}).")

    @property
    def head_dim(self):         # D
        return self.dim // self.heads

    @property
    def hidden(self):           # F: 8C/3 rounded up to a multiple of 8, so that SwiGLU's three matrices cost as much
        return (8 * self.dim + 23) // 24 * 8        # as the two of a plain 4C feed-forward layer (Shazeer 2020)

    @property
    def qkv_width(self):        # q, k and v side by side: (H+2G)D
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def head_weights(self):     # (K,) the weight of each prediction head in the loss: head 0, plus mtp_weight x mean
        further = self.predict - 1
        return np.array([1.0] + [self.mtp_weight / max(1, further)] * further)


CONFIGS = {
    "small": Config(dim=128, heads=4, kv_heads=2, layers=4, context=128, vocab=512),
    "medium": Config(dim=256, heads=8, kv_heads=4, layers=12, context=256, vocab=1024),
    "big": Config(dim=768, heads=12, kv_heads=4, layers=16, context=512, vocab=4096),
}


def param_table(config):
    """The one list of (name, shape) that fixes the order of everything: the flat buffers of parameters, gradients and
    moments, and the tensors of a checkpoint.  Embedding, matrices layer by layer, heads, then all norm gains: the gains
    come last so that "not decayed" is one contiguous tail."""
    c = config
    table = [("embed", (c.vocab, c.dim))]
    for i in range(c.layers):
        table += [(f"layers.{i}.qkv", (c.qkv_width, c.dim)),        # rows: H*D of q, then G*D of k, then G*D of v
                  (f"layers.{i}.out", (c.dim, c.dim)),
                  (f"layers.{i}.gate_up", (2 * c.hidden, c.dim)),   # rows: F of gate, then F of up
                  (f"layers.{i}.down", (c.dim, c.hidden))]
    table.append(("heads", (c.predict * c.vocab, c.dim)))           # rows: V of head 0, then V of head 1, ...
    for i in range(c.layers):
        table += [(f"layers.{i}.norm1", (c.dim,)), (f"layers.{i}.norm2", (c.dim,))]
    table.append(("norm", (c.dim,)))
    return table


def param_count(config, decayed_only=False):
    """Number of scalars in the table; decayed_only leaves out the norm gains (the vectors)."""
    return sum(math.prod(shape) for _, shape in param_table(config) if len(shape) == 2 or not decayed_only)


def param_views(flat, config):
    """dict name -> view into the contiguous buffer `flat`, shaped as the table says."""
    views, start = {}, 0
    for name, shape in param_table(config):
        size = math.prod(shape)
        views[name] = flat[start:start + size].reshape(shape)
        start += size
    return views


def init_params(flat, config, seed):
    """Fill `flat` with initial values: normal(0, 0.02); the two projections into the residual stream scaled by
    1/sqrt(2L), so that the sum of 2L steps does not grow with depth (GPT-2); gains 1.  Always drawn as float32 from
    one generator in table order, so one seed gives one model on every engine and in every precision."""
    rng = np.random.default_rng(seed)
    for name, view in param_views(flat, config).items():
        if view.ndim == 1:
            view[...] = 1.0
        else:
            into_residual = name.endswith((".out", ".down"))
            std = 0.02 / math.sqrt(2 * config.layers) if into_residual else 0.02
            view[...] = rng.standard_normal(view.shape, dtype=np.float32) * np.float32(std)


# ---------------------------------------------------------------------------------------------------------------------
# 2. The layers, each as a pair forward/backward
# ---------------------------------------------------------------------------------------------------------------------
def embedding_forward(out, tokens, embed):
    """out (N,C) = rows `tokens` (N,) of embed (V,C)."""
    np.take(embed, tokens, axis=0, out=out)


# Forward: out[n] = embed[tokens[n]].  So d loss / d embed[v] = sum of dout[n] over all n with tokens[n] == v.
#
# A token that occurs twice must collect both rows: dembed[tokens] += dout would keep only the last one.  The sum is
# a product with the one-hot matrix; here done by sorting, so that equal tokens lie side by side and are summed as
# one run (np.add.at does the same, ten times slower).
def embedding_backward(dembed, dout, tokens):
    """Adds to dembed (V,C); dout (N,C), tokens (N,)."""
    order = np.argsort(tokens, kind="stable")
    ids, starts = np.unique(tokens[order], return_index=True)
    dembed[ids] += np.add.reduceat(dout[order], starts, axis=0)


def rmsnorm_forward(out, rstd, x, gain):
    """RMSNorm (Zhang & Sennrich 2019).  x, out (N,C), rstd (N,), gain (C,).

        rstd_n = 1 / sqrt(mean_i x_ni^2 + eps)        out_ni = x_ni * rstd_n * gain_i
    """
    np.einsum("nc,nc->n", x, x, out=rstd)
    rstd /= x.shape[1]
    rstd += NORM_EPS
    np.sqrt(rstd, out=rstd)
    np.reciprocal(rstd, out=rstd)
    rmsnorm_apply(out, x, rstd, gain)


def rmsnorm_apply(out, x, rstd, gain):
    """out = x * rstd * gain: cheap enough for the backward to do again, instead of keeping every norm's output."""
    np.multiply(x, rstd[:, None], out=out)
    out *= gain


# Derivation, for one row (n dropped), with xhat = x * rstd and r = rstd:
#     out_i = xhat_i gain_i                        =>  dgain_i += dout_i xhat_i  (summed over rows)
#                                                      dxhat_i  = dout_i gain_i
#     xhat_i = x_i r, and r depends on every x_j:      @r/@x_j  = -r^3 x_j / C = -r^2 xhat_j / C      (@: partial derivative)
#     dx_j = sum_i dxhat_i @xhat_i/@x_j,  @xhat_i/@x_j = [i == j] r + x_i @r/@x_j
#          = dxhat_j r + sum_i dxhat_i x_i (-r^2 xhat_j / C)
#          = r (dxhat_j - xhat_j * mean_i(dxhat_i xhat_i))
# The second term is the projection: RMSNorm throws the length of x away, so a gradient along x itself can change
# nothing, and it is removed.  (mean(xhat^2) = 1, exactly so for eps = 0, so this is the projection of dxhat on xhat.)
def rmsnorm_backward(dx, dgain, dout, x, rstd, gain):
    """Writes dx (N,C), adds to dgain (C,)."""
    xhat = x * rstd[:, None]
    along = dout * xhat
    dgain += np.ones(len(x), x.dtype) @ along       # out = xhat * gain: the sum over rows, as a product
    mean = along @ gain                             # (N,) sum_i dxhat_i xhat_i
    mean /= x.shape[1]
    np.multiply(dout, gain, out=dx)                 # dxhat
    xhat *= mean[:, None]
    dx -= xhat
    dx *= rstd[:, None]


def linear_forward(out, x, w):
    """out (N,O) = x (N,I) @ w.T, w (O,I)."""
    np.matmul(x, w.T, out=out)


# Forward: out_no = sum_i x_ni w_oi.
#     dx_ni = sum_o dout_no w_oi        dx = dout @ w
#     dw_oi = sum_n dout_no x_ni        dw += dout.T @ x
def linear_backward(dx, dw, dout, x, w):
    """Writes dx (N,I), adds to dw (O,I)."""
    np.matmul(dout, w, out=dx)
    dw += dout.T @ x


def rope_table(context, heads, head_dim, dtype):
    """cos and signed sin, each (context, heads, D), of the angles t * theta^(-2i/D) (RoFormer, Su et al. 2021): pair i
    is the entries i and i + D/2 of a head, so both halves hold the same angles; the sine of the first half is negated.
    Computed in float64, since in float32 an angle of 511 radians has lost three digits before its cosine is taken."""
    freq = ROPE_THETA ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angle = np.arange(context, dtype=np.float64)[:, None] * freq                     # (context, D/2)
    cos, sin = np.cos(angle), np.sin(angle)
    tables = np.concatenate([cos, cos], axis=1), np.concatenate([-sin, sin], axis=1)
    return [np.repeat(table[:, None].astype(dtype), heads, axis=1) for table in tables]


def rope_forward(x, cos, sin):
    """Rotate, in place, each pair (x1_i, x2_i) = (x_i, x_{i+D/2}) of every head by its position's angle.
    x (B,T,heads,D); cos, sin (T,heads,D).  Rotate-half layout, as in Hugging Face's Llama:

        y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin        with [x2, x1] = roll(x, D/2), sin = [-sin, sin]

    Two vectors rotated at positions t and s have the product q.R(s-t)k: attention sees only the distance."""
    swapped = np.roll(x, x.shape[-1] // 2, axis=-1)
    swapped *= sin
    x *= cos
    x += swapped


# Forward: y = R x for each pair, R = [[cos, -sin], [sin, cos]].  So dx = R^T dy.  R is a rotation: its transpose
# is its inverse, the rotation by the negative angle, which is the forward with -sin.
def rope_backward(dx, cos, sin):
    """In place on dx (B,T,heads,D)."""
    rope_forward(dx, cos, -sin)


def split_heads(qkv, heads, kv_heads):
    """Views q (B,G,R,T,D), k and v (B,G,1,T,D) into qkv (B,T,(H+2G)D), R = H/G.  Query head h reads key/value head
    h // R = g, so the H query heads are G groups of R, and broadcasting over R is all that GQA needs."""
    B, T, width = qkv.shape
    D = width // (heads + 2 * kv_heads)
    q, k, v = np.split(qkv, [heads * D, (heads + kv_heads) * D], axis=-1)
    return [x.reshape(B, T, kv_heads, -1, D).transpose(0, 2, 3, 1, 4) for x in (q, k, v)]


def rotated_part(qkv, config):
    """View (B,T,H+G,D) of the heads in qkv (B,T,(H+2G)D) that rotary embedding turns: q and k, not v."""
    n = config.heads + config.kv_heads
    return qkv[..., :n * config.head_dim].reshape(*qkv.shape[:2], n, config.head_dim)


def attention_forward(out, P, qkv, heads, kv_heads):
    """Causal grouped-query attention (Vaswani et al. 2017; Ainslie et al. 2023).  qkv (B,T,(H+2G)D), already rotated;
    out (B,T,H*D); P (B,G,R,T,T) keeps the probabilities for the backward.  Per head, with scale = 1/sqrt(D):

        S_ij = scale q_i . k_j  for j <= i       P_ij = exp(S_ij) / sum_j' exp(S_ij')       out_i = sum_j P_ij v_j
    """
    q, k, v = split_heads(qkv, heads, kv_heads)
    out = out.reshape(*out.shape[:2], kv_heads, -1, q.shape[-1]).transpose(0, 2, 3, 1, 4)     # view (B,G,R,T,D)
    future = np.triu(np.full(P.shape[-2:], -np.inf, P.dtype), 1)        # a query never sees a later key
    np.matmul(q, k.swapaxes(-1, -2), out=P)                             # (B,G,R,T,D) @ (B,G,1,D,T) -> S (B,G,R,T,T)
    P *= 1.0 / math.sqrt(q.shape[-1])
    P += future
    P -= P.max(axis=-1, keepdims=True)              # the same softmax, but exp cannot overflow
    np.exp(P, out=P)
    P /= P.sum(axis=-1, keepdims=True)
    np.matmul(P, v, out=out)


# Derivation, for one head (O = out, dO = dout):
#     O_i = sum_j P_ij v_j           =>  dv_j  = sum_i P_ij dO_i              dV = P^T dO
#                                        dP_ij = dO_i . v_j                   dP = dO V^T
#     P_i = softmax(S_i): the derivative of P_ij by S_il is P_ij ([j == l] - P_il), so
#                                        dS_il = P_il (dP_il - sum_j P_ij dP_ij)
#                                              = P_il (dP_il - delta_i)
#                                        delta_i = sum_j P_ij dP_ij = dO_i . sum_j P_ij v_j = dO_i . O_i
#     S_ij = scale q_i . k_j         =>  dq_i  = scale sum_j dS_ij k_j        dQ = scale dS K
#                                        dk_j  = scale sum_i dS_ij q_i        dK = scale dS^T Q
# GQA: the R query heads of a group read one k and one v, so dk and dv are summed over the group.
def attention_backward(dqkv, dout, out, P, qkv, heads, kv_heads, work):
    """Writes dqkv (B,T,(H+2G)D), the gradient of v and of the rotated q and k.  dout, out: (B,T,H*D).  work: an array like
    P to compute in."""
    q, k, v = split_heads(qkv, heads, kv_heads)
    dq, dk, dv = split_heads(dqkv, heads, kv_heads)
    shape = (*out.shape[:2], kv_heads, -1, q.shape[-1])
    out, dout = [x.reshape(shape).transpose(0, 2, 3, 1, 4) for x in (out, dout)]              # views (B,G,R,T,D)
    # out = P @ v
    dv[...] = (P.swapaxes(-1, -2) @ dout).sum(axis=2, keepdims=True)      # summed over the group
    dS = np.matmul(dout, v.swapaxes(-1, -2), out=work)                                        # dP: (B,G,R,T,T)
    # P = softmax(S)
    dS -= np.einsum("...d,...d->...", dout, out)[..., None]                                   # delta
    dS *= P
    # S = scale * q @ k.T
    dS *= 1.0 / math.sqrt(q.shape[-1])
    np.matmul(dS, k, out=dq)
    dk[...] = (dS.swapaxes(-1, -2) @ q).sum(axis=2, keepdims=True)        # summed over the group


def swiglu_forward(out, sigmoid, gate_up):
    """SwiGLU (Shazeer 2020).  gate_up (N,2F) = [g | u]; out, sigmoid (N,F).

        out = silu(g) * u,   silu(g) = g * sigmoid(g),   sigmoid(g) = 1 / (1 + exp(-g)) = (1 + tanh(g/2)) / 2
    """
    gate, up = np.split(gate_up, 2, axis=1)
    np.multiply(gate, 0.5, out=sigmoid)             # through tanh, which saturates where exp would overflow
    np.tanh(sigmoid, out=sigmoid)
    sigmoid *= 0.5
    sigmoid += 0.5
    swiglu_apply(out, sigmoid, gate_up)


def swiglu_apply(out, sigmoid, gate_up):
    """out = g * sigmoid * u, for the forward and again in the backward, which so need not keep it."""
    gate, up = np.split(gate_up, 2, axis=1)
    np.multiply(gate, sigmoid, out=out)
    out *= up


# Derivation, with s = sigmoid(g), s' = s (1 - s), silu = g s:
#     out = silu u         =>  du = dout silu
#     silu' = s + g s (1 - s) = s (1 + g - silu)
#                          =>  dg = dout u silu'
def swiglu_backward(dgate_up, dout, sigmoid, gate_up, work):
    """Writes dgate_up (N,2F).  work (N,F): an array to compute in."""
    gate, up = np.split(gate_up, 2, axis=1)
    dgate, dup = np.split(dgate_up, 2, axis=1)
    silu = np.multiply(gate, sigmoid, out=work)
    np.multiply(dout, silu, out=dup)
    slope = np.subtract(gate, silu, out=work)       # silu': first g - silu, then + 1, then times s
    slope += 1.0
    slope *= sigmoid
    slope *= up
    np.multiply(dout, slope, out=dgate)


def block_forward(x, w, a, scratch, config, cos, sin):
    """One layer, one unit of time, in two forward-Euler substeps of dx/dt = f(x,t) (operator splitting: attention, then
    the feed-forward network), in place on x (B,T,C):

        x = x + attention(rmsnorm(x)) @ out.T          x = x + down(silu(gate(n)) * up(n)),  n = rmsnorm(x)

    w: this layer's weights by name; a(name, *shape): this layer's buffers, which keep what the backward reads;
    scratch: buffers that all layers share."""
    (B, T, C), c = x.shape, config
    N, x = B * T, x.reshape(B * T, C)
    n, step = scratch("n", N, C), scratch("step", N, C)

    a("x_in", N, C)[...] = x
    rmsnorm_forward(n, a("rstd1", N), x, w["norm1"])
    qkv = a("qkv", N, c.qkv_width)
    linear_forward(qkv, n, w["qkv"])
    qkv = qkv.reshape(B, T, c.qkv_width)
    rope_forward(rotated_part(qkv, c), cos[:T], sin[:T])
    y = a("y", B, T, C)
    attention_forward(y, a("P", B, c.kv_heads, c.heads // c.kv_heads, T, T), qkv, c.heads, c.kv_heads)
    linear_forward(step, y.reshape(N, C), w["out"])
    x += step                                                                     # Euler substep 1

    a("x_mid", N, C)[...] = x
    rmsnorm_forward(n, a("rstd2", N), x, w["norm2"])
    gate_up, h = a("gate_up", N, 2 * c.hidden), scratch("h", N, c.hidden)
    linear_forward(gate_up, n, w["gate_up"])
    swiglu_forward(h, a("sigmoid", N, c.hidden), gate_up)
    linear_forward(step, h, w["down"])
    x += step                                                                     # Euler substep 2


# Backward of block_forward, in place on dx (B,T,C): on entry d loss / d (output), on exit d loss / d (input).
#
# x + f(x) has the derivative 1 + f': dx passes through unchanged, and what comes back through f is ADDED to it.
# This is why a deep residual network trains: the 1 carries the gradient to the first layer.
def block_backward(dx, w, dw, a, scratch, config, cos, sin):
    """w, dw: this layer's weights and their gradients by name; a, scratch: buffers as in the forward."""
    (B, T, C), c = dx.shape, config
    N, dx = B * T, dx.reshape(B * T, C)
    n, dn, dstep = scratch("n", N, C), scratch("dn", N, C), scratch("step", N, C)
    x_in, rstd1, qkv, y = a("x_in", N, C), a("rstd1", N), a("qkv", N, c.qkv_width), a("y", B, T, C)
    x_mid, rstd2, gate_up = a("x_mid", N, C), a("rstd2", N), a("gate_up", N, 2 * c.hidden)

    # x = x + h @ down.T
    h, dh, sigmoid = scratch("h", N, c.hidden), scratch("dh", N, c.hidden), a("sigmoid", N, c.hidden)
    swiglu_apply(h, sigmoid, gate_up)
    linear_backward(dh, dw["down"], dx, h, w["down"])
    # h = silu(gate) * up
    dgate_up = scratch("dgate_up", N, 2 * c.hidden)
    swiglu_backward(dgate_up, dh, sigmoid, gate_up, work=h)
    # gate_up = n @ gate_up.T
    rmsnorm_apply(n, x_mid, rstd2, w["norm2"])
    linear_backward(dn, dw["gate_up"], dgate_up, n, w["gate_up"])
    # n = rmsnorm(x_mid)
    rmsnorm_backward(dstep, dw["norm2"], dn, x_mid, rstd2, w["norm2"])
    dx += dstep

    # x = x + y @ out.T
    dy = scratch("dy", B, T, C)
    linear_backward(dy.reshape(N, C), dw["out"], dx, y.reshape(N, C), w["out"])
    # y = attention(qkv)
    qkv, dqkv = qkv.reshape(B, T, -1), scratch("dqkv", B, T, c.qkv_width)
    P = a("P", B, c.kv_heads, c.heads // c.kv_heads, T, T)
    attention_backward(dqkv, dy, y, P, qkv, c.heads, c.kv_heads, scratch("dS", *P.shape))
    # q, k = rope(q, k)
    rope_backward(rotated_part(dqkv, c), cos[:T], sin[:T])
    # qkv = n @ qkv.T
    rmsnorm_apply(n, x_in, rstd1, w["norm1"])
    linear_backward(dn, dw["qkv"], dqkv.reshape(N, -1), n, w["qkv"])
    # n = rmsnorm(x_in)
    rmsnorm_backward(dstep, dw["norm1"], dn, x_in, rstd1, w["norm1"])
    dx += dstep


# ---------------------------------------------------------------------------------------------------------------------
# 3. The loss and the optimizer
# ---------------------------------------------------------------------------------------------------------------------
def target_table(targets, T, K):
    """(B, T+K-1) targets -> (N,K): head k at position t is to predict targets[:, t+k].  -1 counts for nothing."""
    return np.stack([targets[:, k:k + T] for k in range(K)], axis=-1).reshape(-1, K)


def count_targets(targets, T, K):
    """(K,) ints: how many targets each head has.  Summed over all micro-batches of a step (and all GPUs) this is the
    divisor of the loss, so that how a step is cut into pieces changes nothing but rounding."""
    return (target_table(targets, T, K) >= 0).sum(axis=0)


def cross_entropy_forward(losses, total, logits, table, counted):
    """Softmax cross-entropy.  logits (N,K,V) are REPLACED by e = exp(logit - max); total (N,K) = sum_v e; losses (K,).

        loss_k = sum over n with table_nk >= 0 of  -log softmax(logits_nk)[table_nk]  / counted_k

    A head that has no target in the whole step (counted 0) contributes 0."""
    logits -= logits.max(axis=-1, keepdims=True)
    n, k = np.nonzero(table >= 0)
    picked = np.zeros(table.shape, logits.dtype)
    picked[n, k] = logits[n, k, table[n, k]]
    np.exp(logits, out=logits)
    logits.sum(axis=-1, out=total)
    nll = np.where(table >= 0, np.log(total) - picked, 0.0)
    np.divide(nll.sum(axis=0, dtype=np.float64), np.maximum(counted, 1), out=losses)


# Derivation, for one row with target y, p = softmax(z) = e / total:
#     loss = log sum_v exp(z_v) - z_y       =>  dz_v = p_v - [v == y]
# times w = head_weight_k / counted_k; a masked row has gradient 0.
def cross_entropy_backward(e, total, table, counted, head_weights):
    """In place: e (N,K,V), the exponentials left by the forward, becomes d loss / d logits."""
    weight = np.where(table >= 0, head_weights / np.maximum(counted, 1), 0.0).astype(e.dtype)     # (N,K)
    e *= (weight / total)[..., None]                # w * p
    n, k = np.nonzero(table >= 0)
    e[n, k, table[n, k]] -= weight[n, k]            # - w * [v == y]


# AdamW (Loshchilov & Hutter 2019).
#
#     m = beta1 m + (1 - beta1) g           running mean of the gradient
#     v = beta2 v + (1 - beta2) g^2         running mean of its square
#     param -= lr (decay param + mhat / (sqrt(vhat) + eps)),   mhat = m / (1 - beta1^step), vhat = v / (1 - beta2^step)
#
# Why the correction: from m = 0, after t steps of a constant g, m = (1 - beta1)(1 + beta1 + ... + beta1^(t-1)) g
# = (1 - beta1^t) g.  Dividing by 1 - beta1^t gives g back.  Decay is decoupled: it never enters m and v.
def adamw_update(param, grad, m, v, step, lr, beta1, beta2, eps, decay):
    """In place, on flat arrays of one length; step counts from 1."""
    m *= beta1
    m += (1 - beta1) * grad
    v *= beta2
    grad *= grad                                    # the gradient is spent after this
    grad *= 1 - beta2
    v += grad
    root = np.sqrt(v / (1 - beta2 ** step))
    root += eps
    np.divide(m, root, out=root)
    root *= lr / (1 - beta1 ** step)
    param *= 1 - lr * decay
    param -= root


# ---------------------------------------------------------------------------------------------------------------------
# 4. The model
# ---------------------------------------------------------------------------------------------------------------------
class Buffers:
    """Named work arrays, made at first use and kept: a step that allocates its tens of megabytes anew spends its time
    in page faults.  A smaller shape takes the front of the array, a larger one replaces it."""
    def __init__(self, dtype):
        self.dtype, self.arrays = dtype, {}

    def __call__(self, name, *shape):
        size = math.prod(shape)
        if name not in self.arrays or self.arrays[name].size < size:
            self.arrays[name] = np.zeros(size, self.dtype)
        return self.arrays[name][:size].reshape(shape)


class Slice:
    """What one thread needs for its share of the batch: buffers of every layer, scratch, a gradient of its own."""
    def __init__(self, model, index):
        self.layers = [Buffers(model.dtype) for _ in range(model.config.layers)]
        self.work = Buffers(model.dtype)
        self.flat_grads = model.flat_grads if index == 0 else np.zeros_like(model.flat_grads)
        self.grads = param_views(self.flat_grads, model.config)


class Model:
    """The model on the CPU.

    Model(config, seed=0, dtype=np.float64, threads=1).  params and grads: dict name -> view of the flat buffers.

    threads > 1 is data parallelism in miniature: each thread takes a slice of the batch through the whole forward and
    backward with a gradient buffer of its own, and the buffers are added in order.  NumPy releases Python's global lock
    inside its loops, so this uses the cores for everything, where a threaded BLAS alone leaves the element-wise work on
    one.  Set OPENBLAS_NUM_THREADS=1 then (train.py does).  The sum over slices is exact because the loss is divided by
    the count of targets in the whole step, not in the slice."""

    def __init__(self, config, seed=0, dtype=np.float64, threads=1):
        self.config, self.dtype, self.threads = config, np.dtype(dtype), threads
        size = param_count(config)
        self.flat_params, self.flat_grads, self.m, self.v = (np.zeros(size, self.dtype) for _ in range(4))
        self.params, self.grads = param_views(self.flat_params, config), param_views(self.flat_grads, config)
        init_params(self.flat_params, config, seed)
        self.cos, self.sin = rope_table(config.context, config.heads + config.kv_heads, config.head_dim, self.dtype)
        self.step = 0                               # updates made so far
        self.slices = [Slice(self, i) for i in range(threads)]
        # NumPy's warnings are set per thread: silent in the pool; the caller sets its own, and looks at the loss
        quiet = functools.partial(np.seterr, all="ignore")
        self.pool = concurrent.futures.ThreadPoolExecutor(threads, initializer=quiet) if threads > 1 else None
        self.cache, self.position = None, 0         # KV cache: keys and values of the tokens decoded so far

    def refresh(self):
        """After writing params: nothing to do here (on the GPU the bf16 copy follows the master weights)."""

    def read(self, what):
        """The flat buffer "params", "m" or "v" as a NumPy array on the host, for a checkpoint."""
        return {"params": self.flat_params, "m": self.m, "v": self.v}[what]

    def write(self, what, flat):
        """Set that buffer from a NumPy array of any float type."""
        self.read(what)[...] = flat
        self.refresh()

    def layer(self, views, i):
        """The entries "layers.i.NAME" of a dict of views, as a dict by NAME."""
        return {name: views[f"layers.{i}.{name}"] for name in ("qkv", "out", "gate_up", "down", "norm1", "norm2")}

    def each_slice(self, function, *arguments):
        """Run function(slice, *its arguments) for all slices, on threads if there are several; the results in order."""
        if len(arguments[0]) == 1:
            return [function(self.slices[0], *(argument[0] for argument in arguments))]
        return list(self.pool.map(function, self.slices, *arguments))

    def check_tokens(self, tokens, what="token", low=0):
        if tokens.size and (tokens.min() < low or tokens.max() >= self.config.vocab):
            bad = tokens[(tokens < low) | (tokens >= self.config.vocab)].flat[0]
            raise ValueError(f"{what} id {bad} is out of range: the vocabulary has {self.config.vocab} ids, "
                             f"0 to {self.config.vocab - 1}.")

    def trunk(self, s, tokens):
        """tokens (B,T) -> h (N,C) = rmsnorm(x) after the last layer; what the backward needs stays in the slice s."""
        (B, T), c = tokens.shape, self.config
        x = s.work("x", B * T, c.dim)
        embedding_forward(x, tokens.reshape(-1), self.params["embed"])
        for i, a in enumerate(s.layers):
            block_forward(x.reshape(B, T, -1), self.layer(self.params, i), a, s.work, c, self.cos, self.sin)
        h = s.work("h_final", B * T, c.dim)
        rmsnorm_forward(h, s.work("rstd", B * T), x, self.params["norm"])
        return h

    def head_logits(self, s, h):
        """h (N,C) -> logits (N,K,V): all heads in one product."""
        logits = s.work("logits", len(h), self.config.predict * self.config.vocab)
        linear_forward(logits, h, self.params["heads"])
        return logits.reshape(len(h), self.config.predict, self.config.vocab)

    def logits(self, tokens):
        """(B,T) ints -> (B,T,K,V), a new array."""
        tokens = self.as_batch(tokens)
        s = self.slices[0]
        return self.head_logits(s, self.trunk(s, tokens)).reshape(*tokens.shape, self.config.predict, -1).copy()

    def as_batch(self, tokens):
        tokens = np.asarray(tokens)
        if tokens.ndim != 2 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"tokens must be a non-empty (B, T) array of integers, not {tokens.dtype} of shape "
                             f"{tokens.shape}.")
        if tokens.shape[1] > self.config.context:
            raise ValueError(f"{tokens.shape[1]} tokens do not fit the context of {self.config.context}.")
        self.check_tokens(tokens)
        return tokens

    def check_batch(self, tokens, targets, counted):
        """The arguments of forward as arrays, counted (K,) filled in; ValueError for what cannot be computed."""
        tokens, targets, K = self.as_batch(tokens), np.asarray(targets), self.config.predict
        B, T = tokens.shape
        if targets.shape != (B, T + K - 1) or not np.issubdtype(targets.dtype, np.integer):
            raise ValueError(f"targets must be integers of the shape (B, T+K-1) = {(B, T + K - 1)}, not {targets.dtype} of "
                             f"shape {targets.shape}.")
        self.check_tokens(targets, "target", low=-1)
        counted = count_targets(targets, T, K) if counted is None else np.asarray(counted)
        if counted[0] == 0:
            raise ValueError("head 0 has no counted target in the whole step: all targets are -1.")
        return tokens, targets, counted

    def forward(self, tokens, targets, counted=None):
        """tokens (B,T), targets (B,T+K-1), -1 = not counted -> (K,) losses in nats, head k's sum / counted[k].

        counted (K,): the number of counted targets of each head in the whole step; by default, in this call.  Raises
        ValueError where head 0 has none at all: there would be nothing to learn."""
        tokens, targets, counted = self.check_batch(tokens, targets, counted)
        (B, T), K = tokens.shape, self.config.predict

        def forward_slice(s, tokens, targets):
            table, losses = target_table(targets, T, K), np.zeros(K)
            logits = self.head_logits(s, self.trunk(s, tokens))
            total = s.work("total", len(table), K)
            cross_entropy_forward(losses, total, logits, table, counted)
            s.saved = tokens, table, logits, total
            return losses

        pieces = min(self.threads, B)
        self.pieces, self.counted = pieces, counted
        losses = self.each_slice(forward_slice, np.array_split(tokens, pieces), np.array_split(targets, pieces))
        return sum(losses[1:], losses[0])

    def backward(self, last=True):
        """Add d(total loss)/d(param) of the last forward to grads; total = losses @ config.head_weights.  Call it once a
        forward (the logits are used up).  last is for the GPUs: the step's last micro-batch."""
        self.each_slice(self.backward_slice, range(self.pieces))
        for s in self.slices[1:self.pieces]:        # in order, so that the sum is the same in every run
            self.flat_grads += s.flat_grads

    def backward_slice(self, s, index):
        c, (tokens, table, logits, total) = self.config, s.saved
        (B, T), N = tokens.shape, tokens.size
        if index > 0:
            s.flat_grads[...] = 0.0
        cross_entropy_backward(logits, total, table, self.counted, c.head_weights)
        # logits = h @ heads.T
        dh, dx = s.work("dn", N, c.dim), s.work("dx", N, c.dim)
        linear_backward(dh, s.grads["heads"], logits.reshape(N, -1), s.work("h_final", N, c.dim), self.params["heads"])
        # h = rmsnorm(x)
        rmsnorm_backward(dx, s.grads["norm"], dh, s.work("x", N, c.dim), s.work("rstd", N), self.params["norm"])
        for i in reversed(range(c.layers)):
            block_backward(dx.reshape(B, T, -1), self.layer(self.params, i), self.layer(s.grads, i), s.layers[i],
                           s.work, c, self.cos, self.sin)
        # x = embed[tokens]
        embedding_backward(s.grads["embed"], dx, tokens.reshape(-1))

    def update(self, lr, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1, clip=1.0):
        """Clip the gradient's global norm to `clip`, one AdamW step (no decay on the norm gains), zero the gradient.
        Returns the norm before clipping.  A norm that is not finite changes nothing and leaves the gradient to look
        at: the caller must stop."""
        norm = math.sqrt(np.dot(self.flat_grads, self.flat_grads))
        if not math.isfinite(norm):
            return norm
        self.step += 1
        scale, decayed = min(1.0, clip / (norm + 1e-6)), param_count(self.config, decayed_only=True)

        def update_part(start, end, decay):
            g, piece = self.flat_grads[start:end], np.s_[start:end]
            g *= scale
            adamw_update(self.flat_params[piece], g, self.m[piece], self.v[piece], self.step, lr, beta1, beta2, eps, decay)
            g[...] = 0.0

        # pieces of 64k numbers stay in the cache through the dozen passes of an update
        size, piece = len(self.flat_grads), 1 << 16
        parts = [(i, min(i + piece, decayed), decay) for i in range(0, decayed, piece)] + [(decayed, size, 0.0)]
        list((self.pool.map if self.pool else map)(update_part, *zip(*parts)))
        return norm

    def extend(self, tokens):
        """Append n tokens at self.position and return their logits (n,K,V), reading keys and values of all earlier
        tokens from the KV cache.  Setting position back to an earlier value forgets what came after it.

        One token at a time needs no mask: everything in the cache is its past (`future` below is all False).  With n > 1
        the new tokens must not see each other's future, so the mask has one diagonal, shifted by position."""
        tokens, c, p = np.asarray(tokens, np.int64), self.config, self.position
        n, R = len(tokens), c.heads // c.kv_heads
        if p + n > c.context:
            raise ValueError(f"{n} tokens at position {p} do not fit the context of {c.context}.")
        self.check_tokens(tokens)
        if self.cache is None:                      # (L, k or v, G, context, D)
            self.cache = np.zeros((c.layers, 2, c.kv_heads, c.context, c.head_dim), self.dtype)
        x, normed, rstd = np.empty((n, c.dim), self.dtype), np.empty((n, c.dim), self.dtype), np.empty(n, self.dtype)
        h, sigmoid = np.empty((n, c.hidden), self.dtype), np.empty((n, c.hidden), self.dtype)
        embedding_forward(x, tokens, self.params["embed"])
        future = np.arange(p + n) > np.arange(p, p + n)[:, None]                    # (n, p+n)
        for i, (keys, values) in enumerate(self.cache):
            w = self.layer(self.params, i)
            rmsnorm_forward(normed, rstd, x, w["norm1"])
            qkv = (normed @ w["qkv"].T).reshape(1, n, -1)
            rope_forward(rotated_part(qkv, c), self.cos[p:p + n], self.sin[p:p + n])
            q, k, v = (part[0] for part in split_heads(qkv, c.heads, c.kv_heads))   # q (G,R,n,D); k, v (G,1,n,D)
            keys[:, p:p + n], values[:, p:p + n] = k[:, 0], v[:, 0]
            S = q.reshape(c.kv_heads, R * n, -1) @ keys[:, :p + n].swapaxes(1, 2) / math.sqrt(c.head_dim)
            S = np.where(future, -np.inf, S.reshape(c.kv_heads, R, n, p + n))
            P = np.exp(S - S.max(axis=-1, keepdims=True))
            P /= P.sum(axis=-1, keepdims=True)
            y = P @ values[:, None, :p + n]                                         # (G,R,n,D)
            x += y.transpose(2, 0, 1, 3).reshape(n, c.dim) @ w["out"].T
            rmsnorm_forward(normed, rstd, x, w["norm2"])
            swiglu_forward(h, sigmoid, normed @ w["gate_up"].T)
            x += h @ w["down"].T
        rmsnorm_forward(normed, rstd, x, self.params["norm"])
        self.position = p + n
        return (normed @ self.params["heads"].T).reshape(n, c.predict, c.vocab)


# ---------------------------------------------------------------------------------------------------------------------
# 5. Generation, and the Euler table
# ---------------------------------------------------------------------------------------------------------------------
def window_start(n, context):
    """Where the window of a text of n tokens starts.  While the text fits, at 0; each time the window is full, its last
    half is kept and read anew from position 0.  A pure function of n, so cached decoding and recomputation from scratch
    see the same window."""
    step = context - context // 2
    return 0 if n <= context else (n - context + step - 1) // step * step


def sample(logits, rng, temperature=1.0, top_k=0, top_p=1.0):
    """Draw an id from logits (V,).  temperature 0: the largest.  top_k keeps the k largest (0: all), top_p then the
    smallest set of largest probabilities that reaches p (nucleus sampling, Holtzman et al. 2020; 1: all)."""
    if temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")
    z = logits[order].astype(np.float64)
    p = np.exp((z - z[0]) / temperature)
    if top_k:
        p[top_k:] = 0.0
    p /= p.sum()
    p[1:][np.cumsum(p)[:-1] >= top_p] = 0.0         # stop once the ids before have reached top_p; the first one stays
    p /= p.sum()
    return int(order[rng.choice(len(p), p=p)])


def generate(model, tokens, temperature=1.0, top_k=0, top_p=1.0, seed=None, vocab=None):
    """Continue `tokens` (a non-empty list of ids) without end: yields ids one by one; the caller stops.  vocab: draw only
    ids below it (a tokenizer may have fewer tokens than the model has rows)."""
    if not tokens:
        raise ValueError("generate needs at least one token to continue.")
    if not (temperature >= 0 and top_k >= 0 and 0 < top_p <= 1):
        raise ValueError(f"sampling needs temperature >= 0, top_k >= 0 and 0 < top_p <= 1, not temperature "
                         f"{temperature}, top_k {top_k}, top_p {top_p}.")
    rng, text, seen, start = np.random.default_rng(seed), list(tokens), 0, None
    while True:
        if start != window_start(len(text), model.config.context):              # a new window: read it from its start
            start = seen = window_start(len(text), model.config.context)
            model.position = 0
        logits = model.extend(text[seen:])
        seen = len(text)
        text.append(sample(np.asarray(logits[-1, 0, :vocab]), rng, temperature, top_k, top_p))
        yield text[-1]


def euler_table(model, tokens):
    """The "logit lens" (nostalgebraist 2020), with the layers seen as steps of an ODE solver.  tokens (B,T+1) ids: T inputs
    and their T targets a row.

    Returns L+1 rows (loss, step, ids), for the embedding and after each layer: the loss of head 0 if the integration
    stopped there; the mean over positions of |f(x)|/|x| of that layer's step (0 for the embedding); the three best next
    tokens at the end of the last row."""
    tokens = np.asarray(tokens)
    inputs, table = model.as_batch(tokens[:, :-1]), tokens[:, 1:].reshape(-1, 1)
    s, c, N = model.slices[0], model.config, inputs.size
    model.trunk(s, inputs)
    states = [a("x_in", N, c.dim) for a in s.layers] + [s.work("x", N, c.dim)]
    rows, before = [], states[0]
    for x in states:
        h, rstd, loss = np.empty_like(x), np.empty(N, x.dtype), np.zeros(1)
        rmsnorm_forward(h, rstd, x, model.params["norm"])
        logits = (h @ model.params["heads"][:c.vocab].T)[:, None]                   # (N,1,V)
        best = np.argsort(-logits[-1, 0], kind="stable")[:3].tolist()
        cross_entropy_forward(loss, np.empty(table.shape, x.dtype), logits, table, N)
        step = np.linalg.norm(x - before, axis=1) / np.linalg.norm(before, axis=1)
        rows.append((float(loss[0]), float(step.mean()), best))
        before = x
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# 6. Checkpoints: a folder that Hugging Face's Llama loads as it is
# ---------------------------------------------------------------------------------------------------------------------
# A .safetensors file is 8 bytes (little-endian length of the header), a JSON header {name: {dtype, shape, data_offsets}},
# and the raw bytes of the tensors.  Our headers carry, under "__metadata__", the step and a CRC32 of the whole file,
# header included, computed with the eight hex digits of the checksum itself set to 0.
NO_CRC = '"crc32":"00000000"'
DTYPES = {"F32": np.float32, "F64": np.float64}


def write_safetensors(path, tensors, metadata):
    """Write dict name -> array to path, with dict metadata of strings, and wait until the disk has it."""
    header, end = {"__metadata__": {**metadata, "crc32": "00000000"}}, 0
    arrays = [np.ascontiguousarray(array) for array in tensors.values()]
    for name, array in zip(tensors, arrays):
        kind = {"float32": "F32", "float64": "F64"}[array.dtype.name]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":"))
    text += " " * (-len(text) % 8)                                # so that the tensors start aligned
    length = len(text).to_bytes(8, "little")
    crc = zlib.crc32(length + text.encode())
    for array in arrays:
        crc = zlib.crc32(array.view(np.uint8).reshape(-1), crc)
    with open(path, "wb") as file:
        file.write(length + text.replace(NO_CRC, f'"crc32":"{crc:08x}"', 1).encode())
        for array in arrays:
            file.write(array.view(np.uint8).reshape(-1))
        file.flush()
        os.fsync(file.fileno())


def read_safetensors(path):
    """-> dict name -> array, dict of metadata.  ValueError, naming the file, unless every byte is as written."""
    raw = read_plain(path)
    damaged = ValueError(f"{path} is damaged (truncated or altered): its checksum or its header is wrong.")
    size = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or size > len(raw) - 8:
        raise damaged
    try:
        header = json.loads(raw[8:8 + size])
        metadata = header.pop("__metadata__")
        crc = metadata["crc32"]
        text = raw[8:8 + size].replace(f'"crc32":"{crc}"'.encode(), NO_CRC.encode(), 1)
        if f"{zlib.crc32(memoryview(raw)[8 + size:], zlib.crc32(raw[:8] + text)):08x}" != crc:
            raise damaged
        tensors, end = {}, 0
        for name, entry in header.items():              # one after the other, without gap or overlap, to the file's end
            (start, stop), shape, dtype = entry["data_offsets"], entry["shape"], np.dtype(DTYPES[entry["dtype"]])
            if start != end or stop - start != math.prod(shape) * dtype.itemsize or any(side < 0 for side in shape):
                raise damaged
            tensors[name] = np.frombuffer(raw[8 + size + start:8 + size + stop], dtype).reshape(shape)
            end = stop
        if end != len(raw) - 8 - size:
            raise damaged
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise damaged from error
    return tensors, metadata


def llama_names(config):
    """Yields (Hugging Face's name, our name, rows): which rows of our fused matrices each Llama tensor is."""
    c, D = config, config.head_dim
    q, k = c.heads * D, (c.heads + c.kv_heads) * D
    yield "model.embed_tokens.weight", "embed", np.s_[:]
    for i in range(c.layers):
        hf, ours = f"model.layers.{i}", f"layers.{i}"
        yield f"{hf}.self_attn.q_proj.weight", f"{ours}.qkv", np.s_[:q]
        yield f"{hf}.self_attn.k_proj.weight", f"{ours}.qkv", np.s_[q:k]
        yield f"{hf}.self_attn.v_proj.weight", f"{ours}.qkv", np.s_[k:]
        yield f"{hf}.self_attn.o_proj.weight", f"{ours}.out", np.s_[:]
        yield f"{hf}.mlp.gate_proj.weight", f"{ours}.gate_up", np.s_[:c.hidden]
        yield f"{hf}.mlp.up_proj.weight", f"{ours}.gate_up", np.s_[c.hidden:]
        yield f"{hf}.mlp.down_proj.weight", f"{ours}.down", np.s_[:]
        yield f"{hf}.input_layernorm.weight", f"{ours}.norm1", np.s_[:]
        yield f"{hf}.post_attention_layernorm.weight", f"{ours}.norm2", np.s_[:]
    yield "model.norm.weight", "norm", np.s_[:]
    yield "lm_head.weight", "heads", np.s_[:c.vocab]                # head 0 is Llama's head
    if c.predict > 1:
        yield "mtp_heads.weight", "heads", np.s_[c.vocab:]


def llama_config(config, eos):
    """config.json: the keys of Hugging Face's LlamaConfig, and our two."""
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": config.dim,
            "intermediate_size": config.hidden, "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim,
            "vocab_size": config.vocab, "max_position_embeddings": config.context, "rms_norm_eps": NORM_EPS,
            "rope_theta": ROPE_THETA, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
            "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": None, "eos_token_id": eos,
            "mtp_heads": config.predict - 1, "mtp_weight": config.mtp_weight}


CHECKPOINT = ("model.safetensors", "train_state.safetensors")


def checksum(path):
    """CRC32 of a file, as eight hex digits."""
    return f"{zlib.crc32(read_plain(path)):08x}"


def repair(folder):
    """Finish or undo an interrupted save, so that both files are of one step.  save writes both as .new, then renames
    the model, then the state.  Killed before the first rename, the old pair is whole: the .new files are dropped.
    Killed between the two, the new state stands alone as .new: the second rename is made up for.  Only save may call
    this: a reader that did, chat.py say, would take the files from under the hands of a run that is saving."""
    model, state = (os.path.join(folder, name) for name in CHECKPOINT)
    if os.path.exists(state + ".new") and not os.path.exists(model + ".new"):
        os.replace(state + ".new", state)
    for path in (state, model):         # in this order: killed here, no half-written .new state is left to stand alone
        if os.path.exists(path + ".new"):
            os.remove(path + ".new")


def save(folder, model, tokenizer, state, chat_template=None):
    """Write the checkpoint folder.  state: a JSON-able dict that load_state gives back.  Atomic: killed at any moment,
    or on a full disk (OSError), the folder still holds a whole checkpoint of one step."""
    os.makedirs(folder, exist_ok=True)
    repair(folder)
    end = "<|endoftext|>" if chat_template is None else "<|end|>"
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.config.context,
                        "clean_up_tokenization_spaces": False, "eos_token": end}
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    config = json.dumps(llama_config(model.config, tokenizer.special[end]), indent=2).encode()
    with replace_file(os.path.join(folder, "tokenizer_config.json")) as file:
        file.write(json.dumps(tokenizer_config, indent=2).encode())
    params = param_views(model.read("params"), model.config)
    weights = {name: params[ours][rows] for name, ours, rows in llama_names(model.config)}
    moments = {"m": model.read("m"), "v": model.read("v")}
    paths = [os.path.join(folder, name) for name in CHECKPOINT]
    # what else a resumed run reads is covered by the weights' checksum
    metadata = {"format": "pt", "step": str(model.step), "config": f"{zlib.crc32(config):08x}",
                "tokenizer": checksum(os.path.join(folder, "tokenizer.json"))}
    try:
        with naming(folder):
            write_safetensors(paths[0] + ".new", weights, metadata)
            write_safetensors(paths[1] + ".new", moments, {**metadata, "state": json.dumps(state)})
    except OSError:
        for path in reversed(paths):    # in this order, for repair's sake
            if os.path.exists(path + ".new"):
                os.remove(path + ".new")
        raise
    for path in paths:
        os.replace(path + ".new", path)
    with replace_file(os.path.join(folder, "config.json")) as file:     # the same in every save of a run
        file.write(config)


def read_config(folder):
    """-> (Config, id of the token that ends a text) from config.json; ValueError for a model that is not one of ours."""
    path = os.path.join(folder, "config.json")
    found = read_json(path)
    try:
        config = Config(dim=found["hidden_size"], heads=found["num_attention_heads"], kv_heads=found["num_key_value_heads"],
                        layers=found["num_hidden_layers"], context=found["max_position_embeddings"],
                        vocab=found["vocab_size"], predict=found["mtp_heads"] + 1, mtp_weight=found["mtp_weight"])
        end = found["eos_token_id"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged or not one of ours ({error}).") from error
    for key, value in llama_config(config, end).items():
        if found.get(key) != value:
            raise ValueError(f"{path} is not one of ours: {key} is {found.get(key)!r}, this model has {value!r}.")
    return config, end


def read_weights(path, config):
    """-> (flat array of the parameters, metadata) of a model.safetensors."""
    tensors, metadata = read_safetensors(path)
    if config.layers > len(tensors):                    # before anything of the size that config.json asks for is made
        raise ValueError(f"{path}: tensors are missing: config.json asks for {config.layers} layers, the file holds "
                         f"{len(tensors)} tensors.")
    shapes = dict(param_table(config))
    for name, ours, rows in llama_names(config):
        if name not in tensors:
            raise ValueError(f"{path}: the tensor {name} is missing.")
        shape = len(range(*rows.indices(shapes[ours][0]))), *shapes[ours][1:]
        if tensors[name].shape != shape:
            raise ValueError(f"{path}: the tensor {name} has the shape {tensors[name].shape}, config.json asks for {shape}.")
        if not np.isfinite(tensors[name]).all():
            raise ValueError(f"{path}: the tensor {name} holds numbers that are not finite: the model is broken.")
    flat = np.empty(param_count(config), next(iter(tensors.values())).dtype)
    params = param_views(flat, config)
    for name, ours, rows in llama_names(config):
        params[ours][rows] = tensors.pop(name)
    if tensors:
        raise ValueError(f"{path}: the tensor {next(iter(tensors))} is none of this model's.")
    return flat, metadata


def load(folder, engine, options=None):
    """-> (model, tokenizer) from a checkpoint folder, of which nothing is changed.  engine: the module whose Model to make
    (model_cpu or model_gpu); options: dict of further arguments of that Model (dtype, threads, precision).  ValueError, in
    one sentence, for what is missing, damaged or foreign."""
    paths = [os.path.join(folder, name) for name in ("config.json", "tokenizer.json", CHECKPOINT[0])]
    for path in paths:
        if not os.path.exists(path):
            raise ValueError(f"{folder} holds no checkpoint: there is no {path}.")
    config, end = read_config(folder)
    tokenizer = Tokenizer.load(paths[1])
    if tokenizer.vocab_size > config.vocab or end not in tokenizer.special.values():
        raise ValueError(f"{folder}: tokenizer.json is not this model's: it has {tokenizer.vocab_size} tokens, config.json "
                         f"says {config.vocab}, with the end of a text at {end}.")
    flat, metadata = read_weights(paths[2], config)
    if metadata.get("tokenizer") != checksum(paths[1]):
        raise ValueError(f"{folder}: tokenizer.json is not the one that this model was trained with.")
    if metadata.get("config", checksum(paths[0])) != checksum(paths[0]):        # the first version recorded none
        raise ValueError(f"{paths[0]} is not as it was saved: something in it was altered.")
    if not str(metadata.get("step")).isdecimal():
        raise ValueError(f"{paths[2]} does not say of which step it is.")
    model = engine.Model(config, **(options or {}))
    model.write("params", flat)
    model.step = int(metadata["step"])
    return model, tokenizer


def load_state(folder, model=None):
    """The dict that save() was given; with a model that load() made, fill the optimizer's moments too."""
    model_path, path = (os.path.join(folder, name) for name in CHECKPOINT)
    if os.path.exists(path + ".new") and not os.path.exists(model_path + ".new"):
        path += ".new"                              # killed between the two renames; the next save makes up for it
    if not os.path.exists(path):
        raise ValueError(f"{folder} holds no training state: there is no {path}.")
    tensors, metadata = read_safetensors(path)
    try:
        state = json.loads(metadata["state"])
        if not isinstance(state, dict):
            raise ValueError(f"it is {state!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} holds no record of a run: its state is damaged or missing ({error}).") from None
    if model is None:
        return state
    size = param_count(model.config)
    if set(tensors) != {"m", "v"} or any(tensor.shape != (size,) for tensor in tensors.values()):
        raise ValueError(f"{path}: it should hold the tensors m and v of {size} numbers each.")
    if metadata.get("step") != str(model.step):
        raise ValueError(f"{path} is of step {metadata.get('step')}, {CHECKPOINT[0]} of step {model.step}.")
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise ValueError(f"{path}: the tensor {name} holds numbers that are not finite: the run is broken.")
        model.write(name, tensor)
    return state


# ---------------------------------------------------------------------------------------------------------------------
# 7. The guided tour
# ---------------------------------------------------------------------------------------------------------------------
TEXT = ("It was a bright cold morning, and the old man walked down to the harbour to see whether the boats had come in. "
        "The wind had turned in the night. He counted the sails, as he had done every day for forty years.")


def print_first_step():
    """One sentence through the small model: tokens, shapes, the first loss, a gradient, an update."""
    tokenizer = Tokenizer.train([TEXT], 300)
    config = dataclasses.replace(CONFIGS["small"], vocab=304)
    ids, K = tokenizer.encode(TEXT), config.predict
    T = min(64, len(ids) - K)
    tokens, targets = np.array([ids[:T]]), np.array([ids[1:T + K]])
    print(f"1. Text to tokens: {len(TEXT.encode())} bytes -> {len(ids)} tokens of a vocabulary of {config.vocab}")
    print("   " + "|".join(tokenizer.decode([i]) for i in ids[:24]) + "|...")

    model = Model(config, seed=0)
    logits, losses = model.logits(tokens), model.forward(tokens, targets)
    print(f"\n2. Shapes: B=1 T={T} C={config.dim} H={config.heads} G={config.kv_heads} D={config.head_dim} "
          f"F={config.hidden} K={K} V={config.vocab} L={config.layers}")
    first, work = model.slices[0].layers[0].arrays, model.slices[0].work.arrays     # flat
    for name, letters, array, shape in [
            ("x = embed[tokens]", "B,T,C", first["x_in"], (1, T, config.dim)),
            ("layer 0: q, k, v", "B,T,(H+2G)D", first["qkv"], (1, T, config.qkv_width)),
            ("layer 0: P", "B,H,T,T", first["P"], (1, config.heads, T, T)),
            ("layer 0: y = P v", "B,T,H*D", first["y"], (1, T, config.dim)),
            ("x after attention", "B,T,C", first["x_mid"], (1, T, config.dim)),
            ("layer 0: gate, up", "B,T,2F", first["gate_up"], (1, T, 2 * config.hidden)),
            ("rmsnorm(x) at the end", "B,T,C", work["h_final"], (1, T, config.dim)),
            ("logits", "B,T,K,V", logits, (1, T, K, config.vocab))]:
        array = array.reshape(shape)
        print(f"   {name:22} {f'({letters})':13} = {str(array.shape):17} root mean square {np.sqrt(np.mean(array ** 2)):.4f}")
    print(f"\n3. The first loss of head 0: {losses[0]:.4f}.  An untrained model guesses: ln V = {math.log(config.vocab):.4f}")

    model.backward()
    weight, h, total = model.params["layers.0.qkv"], 1e-3, {}
    at = np.unravel_index(np.abs(model.grads["layers.0.qkv"]).argmax(), weight.shape)
    analytic, value = model.grads["layers.0.qkv"][at], weight[at]
    for i in (-2, -1, 1, 2):                        # five-point stencil, error O(h^4); its middle weight is 0
        weight[at] = value + i * h
        total[i] = model.forward(tokens, targets) @ config.head_weights
    weight[at] = value
    numeric = (total[-2] - 8 * total[-1] + 8 * total[1] - total[2]) / (12 * h)
    print(f"4. One gradient entry, d loss / d layers.0.qkv{list(map(int, at))}:\n"
          f"   by hand {analytic:.12f}, by finite difference {numeric:.12f}")
    norm = model.update(lr=1e-3)
    print(f"5. One AdamW step: gradient norm {norm:.4f}, loss of head 0 {losses[0]:.4f} -> "
          f"{model.forward(tokens, targets)[0]:.4f}")


def print_euler_table(folder):
    """The Euler table of the trained model in folder, on its validation tokens where they are at hand, else on TEXT."""
    model, tokenizer = load(folder, sys.modules[__name__])
    T, windows, held_out = model.config.context, None, []
    if os.path.exists(os.path.join(folder, CHECKPOINT[1])):
        held_out = sorted(glob.glob(f"data/val-*-{load_state(folder).get('settings', {}).get('tokens_key')}-*.bin"))
    if held_out:
        windows = np.fromfile(held_out[0], "<u2")[:8 * (T + 1)].astype(np.int64)
        windows = windows[:len(windows) // (T + 1) * (T + 1)].reshape(-1, T + 1)
    if windows is None or not len(windows):
        windows = np.array([tokenizer.encode(TEXT)[:T + 1]])
    print(f"   {folder}, trained for {model.step} steps, on {windows[:, 1:].size} tokens that it has not seen")
    for i, (loss, step, best) in enumerate(euler_table(model, windows)):
        print(f"   {'embedding' if i == 0 else f'layer {i - 1}':10} loss {loss:7.4f}   |f(x)|/|x| {step:6.3f}   best "
              f"next: {', '.join(repr(tokenizer.decode([b])) for b in best if b < tokenizer.vocab_size)}")


def main(argv):
    parser = Parser(description="A guided tour: one sentence goes through the small model.")
    parser.add_argument("--model", default="out/small", metavar="DIR", help="for the Euler table (default out/small)")
    args = parser.parse_args(argv)
    print_first_step()
    print("\n6. The Euler table: the loss if the integration stopped after each layer, and the length of each step")
    if os.path.exists(os.path.join(args.model, "config.json")):
        print_euler_table(args.model)
    else:
        print(f"   There is no trained model in {args.model}; `make` trains one.")


if __name__ == "__main__":
    run_script(main)
