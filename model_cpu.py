"""model_cpu.py: the whole model in NumPy, forward and backward by hand.  The reference for everything else.

Read tokenizer.py before it.  This file is the specification: model_gpu.py has its layers in the same order,
with the same names, and is checked against this one; gradcheck.py checks this one against finite differences.
Top to bottom:

    1. Config, param_table        how large the model is, and the one list of its parameters
    2. work_tables, memory_plan   the one list of what a step computes in, and what that takes
    3. x_forward / x_backward     every layer as a pair: what it computes; its derivative, with the derivation
    4. cross-entropy, AdamW, Muon  the loss and the optimizers
    5. Model                      strings the pairs together: forward, backward, update, cached decoding
    6. generate, euler_table      drawing tokens, speculation; what the layers do, as steps of an ODE solver
    7. main                       the guided tour: python model_cpu.py

Letters, used in every file and in the CUDA code too:

    B batch        T time (positions)    C model width (dim)       L layers             N = B*T tokens
    H query heads  G key/value heads     D = C/H head width        F feed-forward width
    V vocabulary   K prediction heads: head k predicts token t+1+k of the text from position t

The contract of a pair.  x_forward(out, ..., inputs) writes its results into arrays that the caller owns,
outputs first.  x_backward(dinputs, dweights, dout, saved...) takes dout = d loss / d out; it WRITES the
gradients of activations and ADDS (+=) to the gradients of weights, because one weight serves many tokens and
several micro-batches.  Activations are matrices (N, width): one row a token.  Weights are (out, in), so y = x
@ W.T, and the parts of a fused matrix (q, k, v; gate, up; the K heads) are slices of its rows.

What this file does not do: no dropout, no biases, no learning-rate schedule (train.py), no batching of
prompts, no files (checkpoint.py).  Arithmetic is float64 by default, where gradients can be checked to ten
digits; training passes dtype=np.float32.
"""
import bisect
import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import os
import sys

try:
    import numpy as np
except ImportError:
    print("NumPy is missing: run `make`, then `. .venv/bin/activate` (or `pip install -r requirements.txt`).",
          file=sys.stderr)
    sys.exit(2)

from script import Parser, require, run_script
from tokenizer import Tokenizer, visible


# ------------------------------------------------------------------------------------------------------------
# 1. How large the model is, and the one list of its parameters
# ------------------------------------------------------------------------------------------------------------
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
    mtp_weight: float = 0.3     # weight in the loss of the mean of heads 1..K-1; chosen by measurement
    hidden: int = None          # F; None: 8C/3 rounded up to a multiple of 8, so that SwiGLU's three matrices
                                # cost as much as the two of a plain 4C feed-forward layer (Shazeer 2020)
    norm_eps: float = 1e-5      # added to the mean square in RMSNorm
    rope_theta: float = 10000.0     # base of the rotary frequencies theta^(-2i/D)
    tied: bool = False          # whether the head is the embedding's matrix (Press & Wolf 2017)
    positions: int = None       # for which the model was made, of which context may be fewer; None: context

    def __post_init__(self):
        if self.hidden is None and isinstance(self.dim, int):
            object.__setattr__(self, "hidden", (8 * self.dim + 23) // 24 * 8)   # frozen for everybody else
        sizes = "dim", "heads", "kv_heads", "layers", "context", "vocab", "predict", "hidden"
        values = vars(self)
        for name in (*sizes, "positions") if self.positions is not None else sizes:
            require(type(values[name]) is int and 1 <= values[name] <= 1 << 20,
                    f"{name} must be a whole number from 1 to {1 << 20:,}, not {values[name]!r:.20}.")
        for name, least in (("mtp_weight", 0), ("norm_eps", 0), ("rope_theta", 1)):
            require(type(values[name]) in (int, float) and least <= values[name] <= sys.float_info.max,
                    f"{name} must be a finite number of at least {least}, not {values[name]!r:.20}.")
        for name in ("dim", "hidden", "vocab"):
            require(values[name] % 8 == 0, f"{name} ({values[name]}) must be a multiple of 8.")
        require(self.vocab <= 1 << 16, f"vocab_size ({self.vocab}) is more than {1 << 16:,}: ids are uint16.")
        require(self.dim % (2 * self.heads) == 0, f"dim ({self.dim}) must be a multiple of 2 x heads (2 x "
                f"{self.heads}), for RoPE; take {nearest_divisors(self.dim // 2, self.heads)} heads.")
        require(self.context <= (self.positions or self.context),
                f"the context ({self.context}) cannot be more than the model's positions ({self.positions}).")
        require(self.tied in (False, True) and not (self.tied and self.predict > 1), "tied, true or false, "
                f"says if the one head is the embedding: not {self.tied!r:.20} with heads: {self.predict}.")
        require(self.heads % self.kv_heads == 0, f"heads ({self.heads}) must be a multiple of kv_heads "
                f"({self.kv_heads}); take {nearest_divisors(self.heads, self.kv_heads)} kv_heads.")

    @property
    def head_dim(self):         # D
        return self.dim // self.heads

    @property
    def qkv_width(self):        # q, k and v side by side: (H+2G)D
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def head_weights(self):     # (K,) of each head in the loss: head 0, plus mtp_weight x mean of the others
        further = self.predict - 1
        return np.array([1.0] + [self.mtp_weight / max(1, further)] * further)


def nearest_divisors(number, wanted):
    """The divisors of a number nearest to the wanted one, below and above, in words: "4 or 6"."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    place = bisect.bisect(divisors, wanted)
    return " or ".join(map(str, divisors[max(0, place - 1):place + 1]))


CONFIGS = {
    "small": Config(dim=128, heads=4, kv_heads=2, layers=4, context=128, vocab=512),
    "medium": Config(dim=256, heads=8, kv_heads=4, layers=12, context=256, vocab=1024),
    "big": Config(dim=768, heads=12, kv_heads=4, layers=16, context=512, vocab=4096),
}


def param_table(config):
    """The one list of (name, shape) that fixes the order of everything: the flat buffers of parameters,
    gradients and moments.  Embedding, matrices layer by layer, heads, then all norm gains: the gains come
    last so that what is not decayed is one contiguous tail."""
    c = config
    table = [("embed", (c.vocab, c.dim))]
    for i in range(c.layers):
        table += [(f"layers.{i}.qkv", (c.qkv_width, c.dim)),        # rows: H*D of q, G*D of k, G*D of v
                  (f"layers.{i}.out", (c.dim, c.dim)),
                  (f"layers.{i}.gate_up", (2 * c.hidden, c.dim)),   # rows: F of gate, then F of up
                  (f"layers.{i}.down", (c.dim, c.hidden))]
    if not c.tied:
        table.append(("heads", (c.predict * c.vocab, c.dim)))       # rows: V of head 0, then V of head 1, ...
    gains = [f"layers.{i}.{name}" for i in range(c.layers) for name in ("norm1", "norm2")]
    return table + [(name, (c.dim,)) for name in [*gains, "norm"]]


def param_count(config):
    """Number of scalars in the table."""
    return sum(math.prod(shape) for _, shape in param_table(config))


def places(sizes):
    """Where parts of these sizes lie in a flat buffer, one after the other, as slices."""
    return [slice(*ends) for ends in itertools.pairwise(itertools.accumulate(sizes, initial=0))]


OPTIMIZERS = ("muon", "adamw")          # muon: for the matrices of the layers; AdamW for all else


def update_table(config, optimizer):
    """[(rule, part, part of v, decayed), ...]: by which rule each part of the flat buffers, a slice, is
    updated; where in v its second moments lie, of which Muon has none; and whether its weights decay:
    matrices do, norm gains do not."""
    require(optimizer in OPTIMIZERS, f"optimizer must be one of {', '.join(OPTIMIZERS)}, not {optimizer!r}.")
    c, matrices = config, config.layers * matrix_table(config)[-1][1].stop
    heads = 0 if c.tied else c.predict * c.vocab * c.dim
    sizes = [c.vocab * c.dim, matrices, heads, (2 * c.layers + 1) * c.dim]
    rules = ["adamw", optimizer, "adamw", "adamw"]          # of embedding, matrices, heads, norm gains
    parts_of_v = places(size if rule == "adamw" else 0 for rule, size in zip(rules, sizes))
    table = zip(rules, places(sizes), parts_of_v, [True, True, True, False])
    return [row for row, size in zip(table, sizes) if size]


def muon_part(config, optimizer):
    """The part of the flat buffers that Muon updates, a slice; an empty one, at their end, where there is
    none."""
    end = param_count(config)
    return update_table(config, optimizer)[1][1] if optimizer == "muon" else slice(end, end)


def matrix_table(config):
    """[(shape, place), ...] of the matrices of a layer, each that Muon takes by itself: q, k, v, out, gate,
    up, down; place: where in the layer's part of a flat buffer each lies, a slice."""
    C, kv, F = config.dim, config.kv_heads * config.head_dim, config.hidden
    shapes = [(C, C), (kv, C), (kv, C), (C, C), (F, C), (F, C), (C, F)]
    return list(zip(shapes, places(map(math.prod, shapes))))


def param_views(flat, config):
    """dict name -> view into the contiguous buffer `flat`, shaped as the table says.  Where the head is tied
    to the embedding, both names lead to one matrix: of a gradient each adds its part."""
    table = param_table(config)
    parts = places(math.prod(shape) for _, shape in table)
    views = {name: flat[part].reshape(shape) for (name, shape), part in zip(table, parts)}
    return {**views, "heads": views["embed"]} if config.tied else views


def layer_views(views, i):
    """The entries "layers.i.NAME" of a dict of views, as a dict by NAME."""
    return {name: views[f"layers.{i}.{name}"] for name in ("qkv", "out", "gate_up", "down", "norm1", "norm2")}


def init_params(flat, config, seed):
    """Fill `flat` with initial values: normal(0, 0.02); the two projections into the residual stream scaled
    by 1/sqrt(2L), so that the sum of 2L increments does not grow with depth (GPT-2); gains 1.  Always drawn
    as float32 from one generator in table order, so one seed gives one model on every engine and in every
    precision."""
    rng = np.random.default_rng(seed)
    flat[...] = 1.0                                 # the gains; the matrices are drawn
    for name, view in param_views(flat, config).items():
        if view.ndim == 2:
            std = 0.02 / math.sqrt(2 * config.layers) if name.endswith((".out", ".down")) else 0.02
            view[...] = rng.standard_normal(view.shape, dtype=np.float32) * np.float32(std)


# ------------------------------------------------------------------------------------------------------------
# 2. What a step computes in, and what that takes
# ------------------------------------------------------------------------------------------------------------
PROMPT_ROWS = 128           # tokens that decoding reads at once: of a long prompt it needs no more memory
MOST_LOGITS = 1 << 26       # numbers; of a large vocabulary they would be by far the largest array


def slices_of(count, size):
    """0 to count in slices of this size, of which the last may be smaller."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


pieces = slices_of          # until model_gpu.py imports the new name


def logit_parts(config, N):
    """The N rows of a batch in slices of at most MOST_LOGITS logits, or of one row."""
    return slices_of(N, max(1, MOST_LOGITS // (config.predict * config.vocab)))


def work_tables(config, B, T, dtype=np.float32):
    """The arrays of a forward and backward at (B,T), as two lists of (name, shape, dtype): what each layer
    keeps for its backward, and what all layers share.  A layer keeps what its backward cannot do without; the
    norms' outputs and the SwiGLU product cost little, and are computed again."""
    c, N, C, F = config, B * T, config.dim, config.hidden
    piece = logit_parts(c, N)[0].stop
    scores = B, c.kv_heads, c.heads // c.kv_heads, T, T
    layer = [("x_in", (N, C)), ("rstd1", (N,)), ("qkv", (N, c.qkv_width)), ("P", scores), ("y", (N, C)),
             ("x_mid", (N, C)), ("rstd2", (N,)), ("gate_up", (N, 2 * F)), ("sigmoid", (N, F))]
    shared = [("x", (N, C)), ("rstd", (N,)), ("n", (N, C)), ("increment", (N, C)), ("h", (N, F)),
              ("final", (N, C)), ("logits", (piece, c.predict, c.vocab)), ("exp_sum", (N, c.predict)),
              ("dx", (N, C)), ("dn", (N, C)), ("dh", (N, F)), ("dgate_up", (N, 2 * F)), ("dy", (N, C)),
              ("dS", scores), ("dqkv", (N, c.qkv_width))]
    return [[(name, shape, dtype) for name, shape in table] for table in (layer, shared)]


ALIGN = 256                 # arrays start at multiples of this many bytes


def table_bytes(table):
    """Bytes of a table's arrays, each rounded up to whole multiples of ALIGN."""
    return sum(-(-math.prod(shape) * np.dtype(dtype).itemsize // ALIGN) * ALIGN for _, shape, dtype in table)


def carve(memory, table, start=0):
    """dict name -> array for a table, cut out of an array of bytes from `start` on."""
    parts = places([start, *(table_bytes([row]) for row in table)])[1:]
    return {name: memory[part].view(dtype)[:math.prod(shape)].reshape(shape)
            for (name, shape, dtype), part in zip(table, parts)}


def moment_count(config, optimizer):
    """Numbers that the optimizer keeps: m of every parameter, v of those that AdamW updates."""
    return param_count(config) + update_table(config, optimizer)[-1][2].stop


def memory_plan(config, micro_batch, T, precision="fp32", threads=1, optimizer="adamw", gpus=0):
    """Bytes of memory by kind (a dict) that training with micro-batches (micro_batch, T) takes; precision,
    gpus: for model_gpu's plan, here it is always fp32."""
    size, shares = 4 * param_count(config), min(threads, micro_batch)
    layer, shared = map(table_bytes, work_tables(config, -(-micro_batch // shares), T))
    return {"parameters": size, "gradients": shares * size, "moments": 4 * moment_count(config, optimizer),
            "activations": shares * config.layers * layer, "logits and scratch": shares * shared}


def free_memory(limit=None):
    """Bytes of memory that can be had, at most `limit`; None where that cannot be known."""
    with contextlib.suppress(OSError, IndexError), open("/proc/meminfo", encoding="ascii") as file:  # Linux
        free = 1024 * int(file.read().split("MemAvailable:")[1].split()[0])         # "  7654321 kB"
        return min(free, limit or free)
    return limit


def largest_micro_batch(plan, free):
    """The largest micro-batch for which plan(micro_batch), a dict of bytes, fits these free bytes; 0 if none
    does."""
    return bisect.bisect_right(range(1, 1 << 20), free, key=lambda rows: sum(plan(rows).values()))


# ------------------------------------------------------------------------------------------------------------
# 3. The layers, each as a pair forward/backward
# ------------------------------------------------------------------------------------------------------------
def embedding_forward(out, tokens, embed):
    """out (N,C) = rows `tokens` (N,) of embed (V,C)."""
    np.take(embed, tokens, axis=0, out=out)


# Forward: out[n] = embed[tokens[n]].  So d loss / d embed[v] = sum of dout[n] over all n with tokens[n] == v.
#
# A token that occurs twice must collect both rows: dembed[tokens] += dout would keep only the last one.  The
# sum is a product with the one-hot matrix; here done by sorting, so that equal tokens lie side by side and
# are summed as one run (np.add.at does the same, ten times slower).
def embedding_backward(dembed, dout, tokens):
    """Adds to dembed (V,C); dout (N,C), tokens (N,)."""
    order = np.argsort(tokens, kind="stable")
    ids, starts = np.unique(tokens[order], return_index=True)
    dembed[ids] += np.add.reduceat(dout[order], starts, axis=0)


def rmsnorm_forward(out, rstd, x, gain, eps):
    """RMSNorm (Zhang & Sennrich 2019).  x, out (N,C), rstd (N,), gain (C,).

        rstd_n = 1 / sqrt(mean_i x_ni^2 + eps)        out_ni = x_ni * rstd_n * gain_i
    """
    np.einsum("nc,nc->n", x, x, out=rstd)
    rstd[...] = 1 / np.sqrt(rstd / x.shape[1] + eps)
    rmsnorm_apply(out, x, rstd, gain)


def rmsnorm_apply(out, x, rstd, gain):
    """out = x * rstd * gain: cheap enough for the backward to do again, instead of keeping every norm's
    output."""
    np.multiply(x, rstd[:, None], out=out)
    out *= gain


# Derivation, for one row (n dropped), with xhat = x * rstd and r = rstd:
#     out_i = xhat_i gain_i                     =>  dgain_i += dout_i xhat_i  (summed over rows)
#                                                   dxhat_i  = dout_i gain_i
#     xhat_i = x_i r, and r depends on every x_j (@: partial derivative):
#                                                   @r/@x_j  = -r^3 x_j / C = -r^2 xhat_j / C
#     dx_j = sum_i dxhat_i @xhat_i/@x_j,  @xhat_i/@x_j = [i == j] r + x_i @r/@x_j
#          = dxhat_j r + sum_i dxhat_i x_i (-r^2 xhat_j / C)
#          = r (dxhat_j - xhat_j * mean_i(dxhat_i xhat_i))
# The second term is the projection: RMSNorm throws the length of x away, so a gradient along x itself can
# change nothing, and it is removed.  (mean(xhat^2) = 1, exactly so for eps = 0: it projects on xhat.)
def rmsnorm_backward(dx, dgain, dout, x, rstd, gain):
    """Writes dx (N,C), adds to dgain (C,)."""
    xhat = x * rstd[:, None]
    along = dout * xhat
    dgain += np.ones(len(x), x.dtype) @ along       # out = xhat * gain: the sum over rows, as a product
    mean = along @ gain / x.shape[1]                # (N,) mean_i dxhat_i xhat_i
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


def rope_table(config, dtype):
    """cos and signed sin, each (context, 1, D), of the angles t * theta^(-2i/D) (RoFormer, Su et al. 2021):
    pair i is the entries i and i + D/2 of a head, so both halves hold the same angles; the sine of the first
    half is negated. Computed in float64: in float32 an angle of 511 radians has lost three digits before its
    cosine is taken."""
    D = config.head_dim
    freq = config.rope_theta ** (-np.arange(0, D, 2, dtype=np.float64) / D)
    angle = np.arange(config.context, dtype=np.float64)[:, None, None] * freq        # (context, 1, D/2)
    cos, sin = np.cos(angle), np.sin(angle)
    return [np.concatenate(halves, axis=-1).astype(dtype) for halves in ((cos, cos), (-sin, sin))]


def rope_forward(x, cos, sin):
    """Rotate, in place, each pair (x1_i, x2_i) = (x_i, x_{i+D/2}) of every head by its position's angle.
    x (B,T,heads,D); cos, sin (T,1,D).  Rotate-half layout, as in Hugging Face's Llama:

        y1 = x1 cos - x2 sin      y2 = x2 cos + x1 sin      with [x2, x1] = roll(x, D/2), sin = [-sin, sin]

    Two vectors rotated at positions t and s have the product q.R(s-t)k: attention sees only the distance."""
    swapped = np.roll(x, x.shape[-1] // 2, axis=-1) * sin
    x *= cos
    x += swapped


# Forward: y = R x for each pair, R = [[cos, -sin], [sin, cos]].  So dx = R^T dy.  R is a rotation: its
# transpose is its inverse, the rotation by the negative angle, which is the forward with -sin.
def rope_backward(dx, cos, sin):
    """In place on dx (B,T,heads,D)."""
    rope_forward(dx, cos, -sin)


def split_heads(qkv, heads, kv_heads):
    """Views q (B,G,R,T,D), k and v (B,G,1,T,D) into qkv (B,T,(H+2G)D), R = H/G.  Query head h reads key/value
    head h // R = g, so the H query heads are G groups of R, and broadcasting over R is all that GQA needs."""
    B, T, width = qkv.shape
    D = width // (heads + 2 * kv_heads)
    q, k, v = np.split(qkv, [heads * D, (heads + kv_heads) * D], axis=-1)
    return [x.reshape(B, T, kv_heads, -1, D).transpose(0, 2, 3, 1, 4) for x in (q, k, v)]


def rotated_part(qkv, config):
    """View (B,T,H+G,D) of the heads in qkv (B,T,(H+2G)D) that rotary embedding turns: q and k, not v."""
    n = config.heads + config.kv_heads
    return qkv[..., :n * config.head_dim].reshape(*qkv.shape[:2], n, config.head_dim)


def attention_forward(out, P, qkv, heads, kv_heads):
    """Causal grouped-query attention (Vaswani et al. 2017; Ainslie et al. 2023).  qkv (B,T,(H+2G)D), already
    rotated; out (B,T,H*D); P (B,G,R,T,T) keeps the probabilities for the backward.  Where out and P have
    fewer rows than qkv, they are the last: the rows before them are in qkv from earlier calls (extend).  Per
    head, with scale = 1/sqrt(D):

        S_ij = scale q_i . k_j  for j <= i     P_ij = exp(S_ij) / sum_j' exp(S_ij')     out_i = sum_j P_ij v_j
    """
    q, k, v = split_heads(qkv, heads, kv_heads)
    out = out.reshape(*out.shape[:2], kv_heads, -1, q.shape[-1]).transpose(0, 2, 3, 1, 4)   # (B,G,R,T,D)
    first = P.shape[-1] - P.shape[-2]               # of the rows asked for
    np.matmul(q[..., first:, :], k.swapaxes(-1, -2), out=P)     # (B,G,R,T,D) @ (B,G,1,D,T) -> S (B,G,R,T,T)
    P *= 1.0 / math.sqrt(q.shape[-1])
    P += np.triu(np.full(P.shape[-2:], -np.inf, P.dtype), first + 1)        # a query never sees a later key
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
    """Writes dqkv (B,T,(H+2G)D), the gradient of v and of the rotated q and k.  dout, out: (B,T,H*D).  work:
    an array like P to compute in."""
    q, k, v = split_heads(qkv, heads, kv_heads)
    dq, dk, dv = split_heads(dqkv, heads, kv_heads)
    shape = (*out.shape[:2], kv_heads, -1, q.shape[-1])
    out, dout = [x.reshape(shape).transpose(0, 2, 3, 1, 4) for x in (out, dout)]    # views (B,G,R,T,D)
    # out = P @ v
    dv[...] = (P.swapaxes(-1, -2) @ dout).sum(axis=2, keepdims=True)                # summed over the group
    dS = np.matmul(dout, v.swapaxes(-1, -2), out=work)                              # dP: (B,G,R,T,T)
    # P = softmax(S)
    dS -= np.einsum("...d,...d->...", dout, out)[..., None]                         # delta
    dS *= P
    # S = scale * q @ k.T
    dS *= 1.0 / math.sqrt(q.shape[-1])
    np.matmul(dS, k, out=dq)
    dk[...] = (dS.swapaxes(-1, -2) @ q).sum(axis=2, keepdims=True)                  # summed over the group


def swiglu_forward(out, sigmoid, gate_up):
    """SwiGLU (Shazeer 2020).  gate_up (N,2F) = [g | u]; out, sigmoid (N,F).

        out = silu(g) * u,   silu(g) = g * sigmoid(g),   sigmoid(g) = 1 / (1 + exp(-g)) = (1 + tanh(g/2)) / 2
    """
    gate, up = np.split(gate_up, 2, axis=1)
    np.tanh(0.5 * gate, out=sigmoid)                # through tanh, which saturates where exp would overflow
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
    np.multiply(dout, (gate - silu + 1.0) * sigmoid * up, out=dgate)


def block_forward(x, w, saved, shared, config, cos, sin, first=0):
    """One layer, one unit of time, in two forward-Euler substeps of dx/dt = f(x,t) (operator splitting:
    attention, then the feed-forward network), in place on x (B,T,C):

        x = x + attention(rmsnorm(x)) @ out.T          x = x + down(silu(gate(n)) * up(n)),  n = rmsnorm(x)

    w: this layer's weights by name; saved: this layer's arrays, which keep what the backward reads; shared:
    arrays that all layers share (work_tables); cos, sin: rope_table.  first: the position of the first token;
    where it is not 0, saved["qkv"] begins with the rows of those before it (extend)."""
    (B, T, C), c = x.shape, config
    x, n, increment, h = x.reshape(B * T, C), shared["n"], shared["increment"], shared["h"]

    saved["x_in"][...] = x
    rmsnorm_forward(n, saved["rstd1"], x, w["norm1"], c.norm_eps)
    linear_forward(saved["qkv"][first:], n, w["qkv"])
    qkv = saved["qkv"].reshape(B, first + T, -1)
    rope_forward(rotated_part(qkv[:, first:], c), cos[first:first + T], sin[first:first + T])
    attention_forward(saved["y"].reshape(B, T, C), saved["P"], qkv, c.heads, c.kv_heads)
    linear_forward(increment, saved["y"], w["out"])
    x += increment                                                                # Euler substep 1

    saved["x_mid"][...] = x
    rmsnorm_forward(n, saved["rstd2"], x, w["norm2"], c.norm_eps)
    linear_forward(saved["gate_up"], n, w["gate_up"])
    swiglu_forward(h, saved["sigmoid"], saved["gate_up"])
    linear_forward(increment, h, w["down"])
    x += increment                                                                # Euler substep 2


# Backward of block_forward, in place on dx (B,T,C): on entry d loss / d (output), on exit d loss / d (input).
#
# x + f(x) has the derivative 1 + f': dx passes through unchanged, and what comes back through f is ADDED to
# it. This is why a deep residual network trains: the 1 carries the gradient to the first layer.
def block_backward(dx, w, dw, saved, shared, config, cos, sin):
    """w, dw: this layer's weights and their gradients by name; saved, shared: arrays as in the forward."""
    (B, T, C), c = dx.shape, config
    dx, n, dn, back = dx.reshape(B * T, C), shared["n"], shared["dn"], shared["increment"]  # back: through f

    # x = x + h @ down.T
    h, dh = shared["h"], shared["dh"]
    swiglu_apply(h, saved["sigmoid"], saved["gate_up"])
    linear_backward(dh, dw["down"], dx, h, w["down"])
    # h = silu(gate) * up
    swiglu_backward(shared["dgate_up"], dh, saved["sigmoid"], saved["gate_up"], work=h)
    # gate_up = n @ gate_up.T
    rmsnorm_apply(n, saved["x_mid"], saved["rstd2"], w["norm2"])
    linear_backward(dn, dw["gate_up"], shared["dgate_up"], n, w["gate_up"])
    # n = rmsnorm(x_mid)
    rmsnorm_backward(back, dw["norm2"], dn, saved["x_mid"], saved["rstd2"], w["norm2"])
    dx += back

    # x = x + y @ out.T
    linear_backward(shared["dy"], dw["out"], dx, saved["y"], w["out"])
    # y = attention(qkv)
    dy, y = shared["dy"].reshape(B, T, C), saved["y"].reshape(B, T, C)
    dqkv, qkv = shared["dqkv"].reshape(B, T, -1), saved["qkv"].reshape(B, T, -1)
    attention_backward(dqkv, dy, y, saved["P"], qkv, c.heads, c.kv_heads, work=shared["dS"])
    # q, k = rope(q, k)
    rope_backward(rotated_part(dqkv, c), cos[:T], sin[:T])
    # qkv = n @ qkv.T
    rmsnorm_apply(n, saved["x_in"], saved["rstd1"], w["norm1"])
    linear_backward(dn, dw["qkv"], shared["dqkv"], n, w["qkv"])
    # n = rmsnorm(x_in)
    rmsnorm_backward(back, dw["norm1"], dn, saved["x_in"], saved["rstd1"], w["norm1"])
    dx += back


# ------------------------------------------------------------------------------------------------------------
# 4. The loss and the optimizer
# ------------------------------------------------------------------------------------------------------------
def head_targets(targets, T, K):
    """(B, T+K-1) targets -> (N,K): head k at position t is to predict targets[:, t+k].  -1 counts for
    nothing."""
    return np.stack([targets[:, k:k + T] for k in range(K)], axis=-1).reshape(-1, K)


def count_targets(targets, T, K):
    """(K,) ints: how many targets each head has.  Summed over all micro-batches of a step (and all GPUs) this
    is the divisor of the loss, so that how a step is cut into pieces changes nothing but rounding."""
    return (head_targets(targets, T, K) >= 0).sum(axis=0)


def cross_entropy_forward(losses, exp_sum, logits, head_targets, divisor):
    """Softmax cross-entropy.  logits (N,K,V) are REPLACED by e = exp(logit - max); exp_sum (N,K) = sum_v e;
    losses (K,); head_targets (N,K); divisor (K,): the head's targets in the whole step, at least 1.

        loss_k = 1/divisor_k  sum over n, where y = head_targets_nk >= 0, of  -log softmax(logits_nk)[y]
    """
    logits -= logits.max(axis=-1, keepdims=True)
    picked = np.take_along_axis(logits, head_targets[..., None], axis=-1)[..., 0]   # at -1 any: not counted
    np.exp(logits, out=logits)
    logits.sum(axis=-1, out=exp_sum)
    nll = np.where(head_targets >= 0, np.log(exp_sum) - picked, 0.0)
    np.divide(nll.sum(axis=0, dtype=np.float64), divisor, out=losses)


# Derivation, for one row with target y, p = softmax(z) = e / exp_sum:
#     loss = log sum_v exp(z_v) - z_y       =>  dz_v = p_v - [v == y]
# times w = head_weight_k / divisor_k; a masked row has gradient 0.
def cross_entropy_backward(e, exp_sum, head_targets, divisor, head_weights):
    """In place: e (N,K,V), the exponentials left by the forward, becomes d loss / d logits."""
    weight = np.where(head_targets >= 0, head_weights / divisor, 0.0).astype(e.dtype)       # (N,K)
    e *= (weight / exp_sum)[..., None]              # w * p
    n, k = np.nonzero(head_targets >= 0)
    e[n, k, head_targets[n, k]] -= weight[n, k]     # - w * [v == y]


# AdamW (Loshchilov & Hutter 2019).
#
#     m = beta1 m + (1 - beta1) g           running mean of the gradient
#     v = beta2 v + (1 - beta2) g^2         running mean of its square
#     param -= lr (decay param + mhat / (sqrt(vhat) + eps)),   mhat = m / (1 - beta1^step),
#                                                              vhat = v / (1 - beta2^step)
#
# Why the correction: from m = 0, after t steps of a constant g,
#     m = (1 - beta1)(1 + beta1 + ... + beta1^(t-1)) g = (1 - beta1^t) g.
# Dividing by 1 - beta1^t gives g back.  Decay is decoupled: it never enters m and v.
def adamw_update(param, grad, m, v, step, lr, beta1, beta2, eps, decay):
    """In place, on flat arrays of one length; step counts from 1.  The gradient is spent: 0 after this."""
    m *= beta1
    m += (1 - beta1) * grad
    v *= beta2
    v += (1 - beta2) * grad ** 2
    param *= 1 - lr * decay
    param -= lr / (1 - beta1 ** step) * (m / (np.sqrt(v / (1 - beta2 ** step)) + eps))
    grad[...] = 0.0


# Muon (Jordan et al. 2024): momentum, orthogonalised.
#
# The gradient of a weight matrix, and so its running mean M, is nearly of low rank: a few singular values are
# large, and a step along M moves the weights in these few directions alone.  Muon steps along U V^T instead,
# where M = U S V^T: every direction that the gradient knows gets a step of the same length.  (U V^T is the
# steepest descent if a step is measured by the most that it changes any output of the layer, that is by its
# spectral norm, where plain gradient descent measures it entry by entry.)
#
# No singular values need be computed.  Take X = U S V^T with X X^T = U S^2 U^T: an odd polynomial in X,
#     a X + b (X X^T) X + c (X X^T)^2 X  =  U (a S + b S^3 + c S^5) V^T,
# acts on each singular value s by itself: s -> a s + b s^3 + c s^5.  With (a, b, c) below five rounds bring
# all s from 0.005 to 1 into [0.68, 1.16]: near 0 each round multiplies s by a = 3.4, and what lies near 1
# swings about it, which the step does not mind.  The start X = M / |M| (Frobenius) has all s <= 1.
NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315


def newton_schulz(M):
    """M (rows, columns) -> U V^T, nearly: its singular values s / |M| after five rounds of the quintic."""
    a, b, c = NEWTON_SCHULZ
    X = M.T if M.shape[0] > M.shape[1] else M       # X X^T on the shorter side: the same, in fewer products
    X = X / (np.linalg.norm(X) + 1e-7)
    for _ in range(5):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if M.shape[0] > M.shape[1] else X


# The step.  U V^T (rows, columns) has min(rows, columns) singular values of about 1, so the root mean square
# of its entries is 1 / sqrt(max(rows, columns)).  AdamW's is about 0.2 in training, whatever the shape; times
# 0.2 sqrt(max(rows, columns)) Muon's is the same, and AdamW's learning rate and decay serve both (Liu et al.
# 2025).  Nesterov: the step looks ahead by one more gradient.  M's length is lost, so nothing is clipped.
def muon_update(param, grad, m, lr, decay, momentum=0.95):
    """In place, on matrices (rows, columns).  The gradient is spent: 0 after this."""
    grad *= 1 - momentum
    m[...] = momentum * m + grad
    grad += momentum * m
    param *= 1 - lr * decay
    param -= lr * 0.2 * math.sqrt(max(param.shape)) * newton_schulz(grad)
    grad[...] = 0.0


# ------------------------------------------------------------------------------------------------------------
# 5. The model
# ------------------------------------------------------------------------------------------------------------
def check_tokens(config, tokens, what="token", low=0):
    """ValueError for an id (or with low=-1 a target) out of range."""
    for bad in tokens[(tokens < low) | (tokens >= config.vocab)]:
        raise ValueError(f"{what} id {bad} is out of range: the vocabulary has {config.vocab} ids, 0 to "
                         f"{config.vocab - 1}.")


def as_batch(config, tokens):
    """tokens as a (B,T) array of ids; ValueError if they are none."""
    tokens = np.asarray(tokens)
    require(tokens.ndim == 2 and tokens.size and np.issubdtype(tokens.dtype, np.integer),
            f"tokens must be a (B, T) array of integers, not empty, not {tokens.dtype} of {tokens.shape}.")
    T = tokens.shape[1]
    require(T <= config.context, f"{T} tokens do not fit the context of {config.context}.")
    check_tokens(config, tokens)
    return tokens


def check_batch(config, tokens, targets, counted=None):
    """The arguments of forward as arrays -> (tokens, targets, divisor (K,), at least 1); ValueError for what
    cannot be computed.  counted: see forward."""
    tokens, targets, K = as_batch(config, tokens), np.asarray(targets), config.predict
    B, T = tokens.shape
    require(targets.shape == (B, T + K - 1) and np.issubdtype(targets.dtype, np.integer), "targets must be "
            f"integers (B, T+K-1) = {(B, T + K - 1)}, not {targets.dtype} of shape {targets.shape}.")
    check_tokens(config, targets, "target", low=-1)
    counted = count_targets(targets, T, K) if counted is None else np.asarray(counted)
    require(counted[0], "head 0 has no counted target in the whole step: all targets are -1.")
    return tokens, targets, np.maximum(counted, 1)    # a head without a target: the sum 0, and so the loss 0


class Workspace:
    """What one thread needs for its share of the batch: the arrays of work_tables, and a gradient of its
    own."""
    def __init__(self, config, dtype, flat_grads):
        self.config, self.dtype, self.flat_grads = config, dtype, flat_grads
        self.grads = {} if flat_grads is None else param_views(flat_grads, config)
        self.memory, self.buffers_by_shape = np.empty(0, np.uint8), {}

    def buffers(self, B, T):
        """-> (for each layer a dict of its arrays, dict of those that all share).  The memory is kept: a step
        that allocates its tens of megabytes anew spends its time in page faults."""
        if (B, T) not in self.buffers_by_shape:
            layer, shared = work_tables(self.config, B, T, self.dtype)
            tables = [layer] * self.config.layers + [shared]
            parts = places(map(table_bytes, tables))
            if parts[-1].stop > len(self.memory):
                self.memory, self.buffers_by_shape = np.empty(parts[-1].stop, np.uint8), {}
            *layers, shared = [carve(self.memory[part], table) for part, table in zip(parts, tables)]
            self.buffers_by_shape[B, T] = layers, shared
        return self.buffers_by_shape[B, T]


class Model:
    """The model on the CPU.

    params and grads: dict name -> view of the flat buffers.  seed None leaves the parameters to whoever
    writes them. training=False: no gradients and no moments; forward gives the loss all the same.

    threads > 1 is data parallelism in miniature: each thread takes a share of the batch through the whole
    forward and backward with a gradient buffer of its own, and the buffers are added in order.  NumPy
    releases Python's global lock inside its loops, so this uses the cores for everything, where a threaded
    BLAS alone leaves the element-wise work on one.  Set OPENBLAS_NUM_THREADS=1 then (train.py does).  The sum
    over shares is exact because the loss is divided by the count of targets in the whole step, not in the
    share."""
    draft_heads = 0     # heads whose drafts pay: four rows take twice as long as one, and give half a token more

    def __init__(self, config, seed=0, dtype=np.float64, threads=1, training=True, optimizer="adamw"):
        self.config, self.dtype, self.threads, self.training = config, np.dtype(dtype), threads, training
        self.optimizer, size, moments = optimizer, param_count(config), moment_count(config, optimizer)
        self.flat_params = np.zeros(size, self.dtype)
        self.params = param_views(self.flat_params, config)
        gradients = [np.zeros(size, self.dtype) if training else None for _ in range(threads)]
        self.workspaces = [Workspace(config, self.dtype, flat_grads) for flat_grads in gradients]
        self.flat_grads, self.grads = gradients[0], self.workspaces[0].grads
        self.m, self.v = [np.zeros(n, self.dtype) if training else None for n in (size, moments - size)]
        if seed is not None:
            init_params(self.flat_params, config, seed)
        self.cos, self.sin = rope_table(config, self.dtype)
        self.step, self.communicator = 0, None      # updates made so far; who adds up several processes (train.py)
        # NumPy's warnings are set per thread: silent in the pool; the caller sets its own, and sees the loss
        pool = concurrent.futures.ThreadPoolExecutor(threads, initializer=np.seterr, initargs=("ignore",))
        self.map = pool.map if threads > 1 else map     # either takes the results in order
        self.decoder = Decoder(self)

    def refresh(self):
        """Call this after writing params: what other weights have left in the KV cache is forgotten."""
        self.decoder.forget()

    def read(self, array):
        """An array of this model's, flat_params say, as a NumPy array on the host."""
        return array

    def write(self, array, values):
        """Set an array of this model's, or a view of one, from a NumPy array of any float type."""
        array[...] = values
        self.refresh()

    def later(self, *arrays):
        """-> a function that returns these; on the GPU it waits for them."""
        return lambda: arrays

    def _trunk(self, tokens, layers, shared, first=0):
        """tokens (B,T) -> shared, where "final" (N,C) is rmsnorm(x) after the last layer.  layers, shared:
        the buffers to compute in, which then hold what the backward needs; first: see block_forward."""
        x = shared["x"]
        embedding_forward(x, tokens.reshape(-1), self.params["embed"])
        for i, saved in enumerate(layers):
            block_forward(x.reshape(*tokens.shape, -1), layer_views(self.params, i), saved, shared,
                          self.config, self.cos, self.sin, first)
        rmsnorm_forward(shared["final"], shared["rstd"], x, self.params["norm"], self.config.norm_eps)
        return shared

    def _head_logits(self, final, out=None):
        """final (n,C) -> the logits (n,K,V), all heads in one product, in the front of `out` or a new
        array."""
        c, n = self.config, len(final)
        out = np.empty((n, c.predict, c.vocab), self.dtype) if out is None else out[:n]
        linear_forward(out.reshape(n, -1), final, self.params["heads"])
        return out

    def logits(self, tokens):
        """(B,T) ints -> (B,T,K,V), a new array."""
        tokens = as_batch(self.config, tokens)
        shared = self._trunk(tokens, *self.workspaces[0].buffers(*tokens.shape))
        return self._head_logits(shared["final"]).reshape(*tokens.shape, self.config.predict, -1)

    def forward(self, tokens, targets, counted=None):
        """tokens (B,T), targets (B,T+K-1), -1 = not counted -> (K,) losses in nats, head k's sum /
        counted[k].

        counted (K,): the number of counted targets of each head in the whole step; by default, in this call.
        Raises ValueError where head 0 has none at all: there would be nothing to learn."""
        tokens, targets, self.divisor = check_batch(self.config, tokens, targets, counted)
        self.shares = min(self.threads, len(tokens))
        return sum(self.map(self._forward_share, self.workspaces, np.array_split(tokens, self.shares),
                            np.array_split(targets, self.shares)))

    def _forward_share(self, worker, tokens, targets):
        targets = head_targets(targets, tokens.shape[1], self.config.predict)
        layers, shared = worker.buffers(*tokens.shape)
        self._trunk(tokens, layers, shared)
        worker.saved = tokens, targets, layers, shared
        return sum(self._head_loss(shared, targets, rows) for rows in logit_parts(self.config, tokens.size))

    def _head_loss(self, shared, targets, rows):
        """-> what these rows, a slice, add to the losses (K,); shared["logits"] keeps e of them."""
        losses, targets = np.zeros(self.config.predict), targets[rows]
        e = self._head_logits(shared["final"][rows], shared["logits"])
        cross_entropy_forward(losses, shared["exp_sum"][rows], e, targets, self.divisor)
        return losses

    def backward(self, last=True):
        """Add d(total loss)/d(param) of the last forward to grads; total = losses @ config.head_weights.
        Call it once a forward (the logits are used up).  last: this is the step's last micro-batch, after
        which the gradients of several processes are added up."""
        require(self.training, "this model was made with training=False: it has no gradients.")
        list(self.map(self._backward_share, self.workspaces, range(self.shares)))
        for worker in self.workspaces[1:self.shares]:      # in order, so that the sum is the same in every run
            self.flat_grads += worker.flat_grads
        if last and self.communicator:
            self.communicator.all_reduce(self.flat_grads)

    def _backward_share(self, worker, number):
        c, (tokens, targets, layers, shared) = self.config, worker.saved
        dx, dn, final, exp_sum = (shared[name] for name in ("dx", "dn", "final", "exp_sum"))
        parts = logit_parts(c, tokens.size)
        if number > 0:
            worker.flat_grads[...] = 0.0
        for rows in parts:
            if len(parts) > 1:                      # the next piece has taken the place of what this one left
                self._head_loss(shared, targets, rows)
            dlogits = shared["logits"][:len(final[rows])]
            cross_entropy_backward(dlogits, exp_sum[rows], targets[rows], self.divisor, c.head_weights)
            # logits = final @ heads.T
            linear_backward(dn[rows], worker.grads["heads"], dlogits.reshape(len(dlogits), -1), final[rows],
                            self.params["heads"])
        # final = rmsnorm(x)
        rmsnorm_backward(dx, worker.grads["norm"], dn, shared["x"], shared["rstd"], self.params["norm"])
        for i in reversed(range(c.layers)):
            block_backward(dx.reshape(*tokens.shape, -1), layer_views(self.params, i),
                           layer_views(worker.grads, i), layers[i], shared, c, self.cos, self.sin)
        # x = embed[tokens]
        embedding_backward(worker.grads["embed"], dx, tokens.reshape(-1))

    def update(self, lr, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1, clip=1.0):
        """One step of the optimizer by update_table, for which the norm of all gradients that AdamW takes is
        clipped to `clip`; zero the gradient.  Returns the norm of the whole before clipping.  A norm that is
        not finite changes nothing and leaves the gradient to look at: the caller must stop."""
        c, grads, hidden = self.config, self.flat_grads, muon_part(self.config, self.optimizer)
        squares = sum(np.dot(part, part) for part in (grads[:hidden.start], grads[hidden.stop:]))
        norm = math.sqrt(squares + np.dot(grads[hidden], grads[hidden]))
        if not math.isfinite(norm):
            return norm
        self.step += 1
        self.decoder.forget()
        jobs, piece = [], 1 << 16           # numbers that stay in the cache through AdamW's dozen passes
        for rule, part, in_v, decayed in update_table(c, self.optimizer):
            flats = [flat[part] for flat in (self.flat_params, grads, self.m)]
            if rule == "muon":
                flats = [flat.reshape(c.layers, -1) for flat in flats]
                jobs += [(muon_update, *(flat[i, place].reshape(shape) for flat in flats), lr, decay)
                         for i in range(c.layers) for shape, place in matrix_table(c)]
            else:
                grads[part] *= min(1.0, clip / (math.sqrt(squares) + 1e-6))
                flats, numbers = [*flats, self.v[in_v]], (self.step, lr, beta1, beta2, eps, decay * decayed)
                jobs += [(adamw_update, *(flat[i:i + piece] for flat in flats), *numbers)
                         for i in range(0, len(flats[0]), piece)]
        list(self.map(lambda job: job[0](*job[1:]), jobs))
        return norm


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: see sample."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0               # of the noise
    vocab: int = None           # only ids below it are drawn (None: all)


class Decoder:
    """Continues one text, token by token, with a KV cache: keys and values of earlier tokens are kept.

    tokens: the list of ids whose keys and values the cache holds."""
    def __init__(self, model):
        self.model = model
        self.tokens = []
        # q, k, v of each token in every layer; memory that no token has reached is not taken yet
        c = model.config
        self.cache = np.zeros((c.context, c.layers, c.qkv_width), model.dtype)
        # without a backward all layers compute in the arrays of one
        self.workspace = Workspace(dataclasses.replace(c, layers=1), model.dtype, None)

    @property
    def position(self):
        """The number of tokens in the cache.  Setting it to a smaller one forgets the last tokens."""
        return len(self.tokens)

    @position.setter
    def position(self, position):
        require(0 <= position <= len(self.tokens),
                f"the position must be from 0 to {len(self.tokens)}, the tokens in the cache, not {position}.")
        del self.tokens[position:]

    def forget(self):
        """Empty the cache: the weights have changed, say."""
        self.tokens = []

    def extend(self, tokens, last=None):
        """Append n tokens; return the logits (n,K,V) after each of them, or after the `last` ones alone.

        This is the forward of training, but the rows of q, k and v go to their place in the cache, and P has
        a row for each new token and a column for each token so far."""
        model, c = self.model, self.model.config
        tokens = np.asarray(tokens, np.int64)
        n = len(tokens)
        require(self.position + n <= c.context,
                f"{n} tokens at {self.position} do not fit the context of {c.context}.")
        check_tokens(c, tokens)
        finals = []
        for rows in slices_of(n, PROMPT_ROWS):
            part = tokens[rows]
            first = self.position
            end = first + len(part)
            (layer,), shared = self.workspace.buffers(1, len(part))
            P = np.empty((1, c.kv_heads, c.heads // c.kv_heads, len(part), end), model.dtype)
            layers = [{**layer, "qkv": self.cache[:end, i], "P": P} for i in range(c.layers)]
            model._trunk(part[None], layers, shared, first)
            finals.append(shared["final"].copy())
            self.tokens += part.tolist()
        final = np.concatenate(finals)
        return model._head_logits(final if last is None else final[n - last:])

    def draw(self, tokens, rows, heads, t, sampling):
        """Append tokens, and draw after each of the last `rows` of them.  Returns ids (rows, heads), that of
        head k after row r for position t + r + k of the text, and the probabilities p (rows,) that head 0 gave
        its ids."""
        s = sampling
        logits = self.extend(tokens, rows)[:, :heads, :s.vocab].astype(np.float64)
        positions = t + np.add.outer(np.arange(rows), np.arange(heads))
        flat = logits.reshape(rows * heads, -1)
        ids = sample(flat, s.seed, positions.reshape(-1), s.temperature, s.top_k, s.top_p).reshape(rows, heads)
        drawn = np.take_along_axis(logits[:, 0], ids[:, :1], axis=1)
        return ids, 1 / np.exp(logits[:, 0] - drawn).sum(axis=1)


# ------------------------------------------------------------------------------------------------------------
# 6. Generation, and the Euler table
# ------------------------------------------------------------------------------------------------------------
def window_start(n, context):
    """Where the window of a text of n tokens starts.  While the text fits, at 0; each time the window is
    full, its last half is kept and read anew from position 0.  A pure function of n, so cached decoding and
    recomputation from scratch see the same window."""
    stride = context - context // 2
    return 0 if n <= context else (n - context + stride - 1) // stride * stride


def gumbel(seed, t, ids):
    """Noise for tokens `ids` (n,V) at positions t (n,), (n,V): a pure function of (seed, position, id), so
    it can be had in any order, by every head, and by a GPU.  seed: an integer below 2^64, or one a row.

    Output n of the generator splitmix64 (Steele, Lea & Flood 2014) started at z is mix(z + (n+1) gamma): a
    counter, then a hash of two multiplications.  Output t of the one started at `seed` starts another; its
    output `id` has 52 bits for u, uniform in (0,1); then -log(-log u) is Gumbel-distributed."""
    z = np.array(seed, np.uint64).reshape(-1, 1)
    for n in (np.reshape(t, (-1, 1)), ids):
        z = z + (n.astype(np.uint64) + 1) * 0x9e3779b97f4a7c15          # modulo 2^64, as all of it
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb
        z = z ^ (z >> 31)
    u = ((z >> 12) + 0.5) / 2**52
    return -np.log(-np.log(u))


# Why argmax(log p + G) draws from p (the "Gumbel-max trick").  Let E_i = -log u_i.  Then
#     log p_i + G_i = -log(E_i / p_i): the largest of the one is the smallest of E_i / p_i;
#     P(E_i > x) = P(u_i < e^-x) = e^-x, so P(E_i / p_i > x) = e^(-p_i x), with the density p_i e^(-p_i x);
#     P(i is the smallest) = integral of p_i e^(-p_i x) prod_(j != i) e^(-p_j x) dx = p_i / sum_j p_j.
# A factor common to all p cancels: what is kept of p need not be normalised.
def sample(logits, seed, t, temperature=1.0, top_k=0, top_p=1.0):
    """Draw ids (n,) from logits (n,V), for positions t (n,) of the text: argmax(log p + gumbel).  temperature
    0: the largest logit, the first of equals.  top_k keeps the k largest (0: all), top_p then the smallest
    set of largest probabilities that reaches p (nucleus sampling, Holtzman et al. 2020; 1: all)."""
    if temperature == 0:
        return np.argmax(logits, axis=1)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :top_k or None]           # (n,V or top_k)
    z = np.take_along_axis(logits, order, axis=1).astype(np.float64)
    log_p = (z - z[:, :1]) / temperature            # up to a constant
    reached = np.cumsum(np.exp(log_p), axis=1)
    # an id goes if those before it have reached top_p; the first stays
    log_p[:, 1:][reached[:, :-1] >= top_p * reached[:, -1:]] = -np.inf
    best = np.argmax(log_p + gumbel(seed, t, order), axis=1)
    return order[np.arange(len(order)), best]


def generate(model, tokens, temperature=1.0, top_k=0, top_p=1.0, seed=None, vocab=None, stop=(), most=None,
             speculate=None, trace=None):
    """Continue `tokens` (a non-empty list of ids): yields ids one by one, up to the first that is in `stop`,
    which is not yielded, and at most `most` (None: without end).  The text is a function of the model, the
    tokens and the seed (None: a fresh one).  vocab: draw only ids below it (a tokenizer may have fewer tokens
    than the model has rows).

    model.decoder keeps what it has read: of a text that begins like the last one only the rest is read anew.

    speculate (None: with as many heads as pay, model.draft_heads) is self-speculative decoding: heads 1..K-1
    draft the tokens after the next, and one call of decoder.draw reads them all.  A draft is accepted if it is
    the very token that head 0 draws there (Stern et al. 2018).  So the text is that of single steps; here up
    to the rounding of NumPy's matmuls, whose sums depend on the number of rows.  A draft is drawn with the
    noise that head 0 will use at its position: the nearer the two heads' p, the more often they draw the same
    token.

    trace: a list to which each token drawn adds (head, drafts, p): the head whose draft it was, 0 for none;
    how many drafts were read along with it; the probability that the model gave it."""
    require(tokens, "generate needs at least one token to continue.")
    require(temperature >= 0 and top_k >= 0 and 0 < top_p <= 1,
            f"temperature {temperature}, top_k {top_k}, top_p {top_p}: it must be >= 0, >= 0, in (0, 1].")
    seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed % 2**64
    sampling = Sampling(temperature, top_k, top_p, seed, vocab)
    decoder, context = model.decoder, model.config.context
    if speculate is None:
        heads = 1 + model.draft_heads
    else:
        heads = model.config.predict if speculate else 1
    heads = min(heads, model.config.predict)
    text = list(tokens)
    end = math.inf if most is None else len(text) + most
    drafts = []
    while len(text) < end:
        window = text[window_start(len(text), context):]
        if decoder.tokens != window[:-1]:           # another text, or a new window
            decoder.position = len(os.path.commonprefix([decoder.tokens, window[:-1]]))         # of lists
        unread = window[decoder.position:]
        if len(unread) > 1 or len(window) + len(drafts) > context:
            drafts = []             # what has to be read is read alike with and without speculation
        ids, p = decoder.draw(unread + drafts, 1 + len(drafts), heads, len(text), sampling)
        drawn = ids[:, 0].tolist()                  # by head 0, after the window and after each draft
        most_accepted = min(len(drafts), end - len(text) - 1)
        accepted = 0
        while accepted < most_accepted and drafts[accepted] == drawn[accepted] not in stop:
            accepted += 1
        decoder.position = len(window) + accepted   # the drafts that were not accepted are forgotten
        for head in range(accepted + 1):
            if trace is not None:
                trace.append((head, len(drafts), float(p[head])))   # drafted by the head of this number
            if drawn[head] in stop:
                return
            text.append(drawn[head])
            yield drawn[head]
        drafts = ids[accepted, 1:].tolist()


def layer_logits(model, inputs):
    """The "logit lens" (nostalgebraist 2020): inputs (B,T) -> for the embedding and after each layer the
    residual stream x (N,C) and the logits (N,V) of head 0 if the integration stopped there."""
    layers, shared = model.workspaces[0].buffers(*inputs.shape)
    model._trunk(inputs, layers, shared)
    for x in [*(saved["x_in"] for saved in layers), shared["x"]]:
        rmsnorm_forward(shared["n"], shared["rstd"], x, model.params["norm"], model.config.norm_eps)
        yield x, shared["n"] @ model.params["heads"][:model.config.vocab].T


def euler_table(model, tokens):
    """The lens, with the layers seen as steps of an ODE solver.  tokens (B,T+1) ids: T inputs and their T
    targets a row.

    Yields L+1 rows (loss, length, ids), for the embedding and after each layer: the loss of head 0 if the
    integration stopped there; the mean over positions of |f(x)|/|x| of that layer's step (0 for the
    embedding); the three best next tokens at the end of the last row."""
    inputs, targets = as_batch(model.config, tokens[:, :-1]), tokens[:, 1:].reshape(-1, 1)
    before = None
    for x, logits in layer_logits(model, inputs):
        loss, before = np.zeros(1), x if before is None else before
        best = np.argsort(-logits[-1], kind="stable")[:3].tolist()
        cross_entropy_forward(loss, np.empty(targets.shape, x.dtype), logits[:, None], targets, inputs.size)
        length = np.linalg.norm(x - before, axis=1) / np.linalg.norm(before, axis=1)
        yield float(loss[0]), float(length.mean()), best
        before = x


def print_euler_table(model, tokenizer, tokens):
    """A line for the embedding and for each layer; tokens (1,T+1)."""
    print(f"{tokens.size - 1} tokens read, the next of each predicted; loss in nats a token")
    print(f"{'stop after':12}{'loss':>8}{'|f(x)|/|x|':>13}   most likely after the end of the text")
    for i, (loss, length, best) in enumerate(euler_table(model, tokens)):
        name, length = (f"layer {i - 1}", f"{length:.3f}") if i else ("embedding", "")
        best = [f'"{visible(tokenizer.tokens[token])}"' for token in best if token < tokenizer.vocab_size]
        print(f"{name:12}{loss:8.4f}{length:>13}   {'  '.join(best)}")


# ------------------------------------------------------------------------------------------------------------
# 7. The guided tour
# ------------------------------------------------------------------------------------------------------------
TEXT = ("It was a bright cold morning, and the old man walked down to the harbour to see whether the boats "
        "had come in. The wind had turned in the night. He counted the sails, as he had done every day for "
        "forty years.")


def slope(loss, weight, index, h):
    """d loss() / d weight[index] by finite differences at five points, error O(h^4); the middle one has the
    factor 0.  gradcheck.py, which does this for every weight there is, says why five."""
    centre, total = weight[index], 0.0
    for shift, factor in ((-2, 1 / 12), (-1, -8 / 12), (1, 8 / 12), (2, -1 / 12)):
        weight[index] = centre + shift * h
        total += factor * loss()
    weight[index] = centre
    return total / h


def main(argv):
    """One sentence through the small model: tokens, shapes, the first loss, a gradient, an update, the
    layers."""
    Parser(description="A guided tour: one sentence goes through the small model.").parse_args(argv)
    tokenizer = Tokenizer.train([TEXT], 300)
    config = dataclasses.replace(CONFIGS["small"], vocab=304)
    ids, K = tokenizer.encode(TEXT), config.predict
    T = min(64, len(ids) - K)
    tokens, targets = np.array([ids[:T]]), np.array([ids[1:T + K]])
    print(f"1. Text to tokens: {len(TEXT.encode())} bytes -> {len(ids)} tokens, vocabulary {config.vocab}")
    print("   " + "|".join(tokenizer.decode([i]) for i in ids[:24]) + "|...")

    model = Model(config, seed=0)
    logits, losses = model.logits(tokens), model.forward(tokens, targets)
    layers, shared = model.workspaces[0].buffers(1, T)
    print(f"\n2. Shapes: B=1 T={T} C={config.dim} H={config.heads} G={config.kv_heads} D={config.head_dim} "
          f"F={config.hidden} K={K} V={config.vocab} L={config.layers} N=B*T={T}")
    arrays = [(f"layer 0: {name}", array) for name, array in layers[0].items()]
    for name, array in [*arrays, ("final = rmsnorm(x)", shared["final"]), ("logits (B,T,K,V)", logits)]:
        print(f"   {name:22} {str(array.shape):20} root mean square {np.sqrt(np.mean(array ** 2)):.4f}")
    print(f"\n3. The first loss of head 0: {losses[0]:.4f}.  An untrained model guesses: ln V = "
          f"{math.log(config.vocab):.4f}")

    model.backward()
    weight, gradient = model.params["layers.0.qkv"], model.grads["layers.0.qkv"]
    at = np.unravel_index(np.abs(gradient).argmax(), weight.shape)
    numeric = slope(lambda: model.forward(tokens, targets) @ config.head_weights, weight, at, h=1e-3)
    print(f"4. One gradient entry, d loss / d layers.0.qkv{list(map(int, at))}:\n"
          f"   by hand {gradient[at]:.12f}, by finite difference {numeric:.12f}")
    norm = model.update(lr=1e-3)
    print(f"5. One AdamW step: gradient norm {norm:.4f}, loss of head 0 {losses[0]:.4f} -> "
          f"{model.forward(tokens, targets)[0]:.4f}")
    print("\n6. The Euler table: the loss if the integration stopped after each layer, and the length of its "
          "step.\n   These layers have learned nothing yet; a trained model's: python chat.py --lens TEXT")
    print_euler_table(model, tokenizer, np.array([ids[:T + 1]]))


if __name__ == "__main__":
    run_script(main)
