"""model_cpu.py: a language model in NumPy, forward and backward by hand.

Read tokenizer.py before this.  Section 1 is the whole model: its sizes, its weights, and forward_plain, which
turns a text into predictions in 35 lines.  The rest does the same for many texts at once, faster, and with
gradients.

    1. Config, param_table, forward_plain     sizes, weights, the forward as formulas
    2. Arrays, work_table                     names and shapes of a step's arrays (skip it at first)
    3. NAME_forward / NAME_backward           every layer as a pair: what it computes, and its derivative
    4. cross-entropy, AdamW, Muon             the loss and the optimizers
    5. Model, Decoder                         the pairs in order: forward, backward, update; the KV cache
    6. sample, generate_plain                 how tokens are drawn, for one text and for many
    7. generate                               the same text in fewer steps: self-speculative decoding (optional)
    8. euler_table                            the layers as steps of an ODE solver (optional)
    9. CONFIGS, init_params                   small, medium, big; the weights before training
    10. Workspace, check_batch                memory; what is refused (optional)
    11. main                                  the guided tour: python model_cpu.py

Letters, here and in the CUDA code, and in the other files unless they say otherwise:

    B batch        T time (positions)    C model width (dim)       L layers             N = B*T tokens
    H query heads  G key/value heads     D = C/H head width        R = H/G              F feed-forward width
    V vocabulary   K prediction heads: head k predicts token t+1+k of the text from position t
    S scores of attention                P probabilities of attention
    J keys that T queries read: J = T in training; J > T if a KV cache holds earlier ones

model_gpu.py has the same layers and the same Model, and is checked against this file.  gradcheck.py checks this
file against finite differences.  Arithmetic is float64 by default, so that gradients can be checked to ten digits;
training passes dtype=np.float32.

Not in this file: dropout and biases (this model has neither), the learning-rate schedule (train.py), files
(checkpoint.py).
"""
from script import Parser, check_config, require, run_script, visible

import itertools
import math
import os
import secrets
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace as Arrays     # arrays by name, such as w.norm1 or saved.qkv

try:
    import numpy as np
except ImportError:
    print("NumPy is missing: run `make`, then `. .venv/bin/activate` (or `pip install -r requirements.txt`).",
          file=sys.stderr)
    sys.exit(2)

from tokenizer import Tokenizer


# ------------------------------------------------------------------------------------------------------------
# 1. The sizes, the weights, and the whole forward
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """The sizes of a model.  ValueError, in one sentence, if they do not fit together (check_config):
    dim, hidden and vocab must be multiples of 8, because a thread of a GPU takes 8 numbers at a time;
    dim must be a multiple of 2 * heads, because RoPE turns pairs; heads must be a multiple of kv_heads;
    a tied head needs predict 1."""
    dim: int                    # C
    heads: int                  # H
    kv_heads: int               # G: every R = H/G query heads share one key/value head (GQA, Ainslie et al. 2023)
    layers: int                 # L
    context: int                # the largest T
    vocab: int                  # V
    predict: int = 4            # K (multi-token prediction, Gloeckle et al. 2024)
    mtp_weight: float = 0.3     # total loss = loss of head 0 + this * mean loss of the others (docs/notes.md)
    hidden: int = None          # F; None: 8C/3 rounded up to a multiple of 8, so that SwiGLU's three matrices
                                # cost as much as the two of a plain 4C feed-forward layer (Shazeer 2020)
    norm_eps: float = 1e-5      # added to the mean square in RMSNorm
    rope_theta: float = 10000.0     # base of the rotary frequencies theta^(-2d/D): fast ones tell near positions apart,
                                    # slow ones far ones.  With D = 64 the slowest turns once in 47,000 tokens
    tied: bool = False          # whether the head and the embedding are one matrix (Press & Wolf 2017)
    positions: int = None       # the largest T that a loaded model was made for.  --context may make `context` smaller;
                                # this number goes back into config.json

    def __post_init__(self):
        if self.hidden is None:
            object.__setattr__(self, "hidden", 8 * math.ceil(self.dim / 3))     # a frozen dataclass has no other way
        object.__setattr__(self, "positions", max(self.context, self.positions or 0))
        check_config(self)

    @property
    def head_dim(self):         # D
        return self.dim // self.heads

    @property
    def kv_width(self):         # the keys, or the values, of all heads side by side: GD
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self):        # q, k and v side by side: (H+2G)D
        return self.dim + 2 * self.kv_width

    @property
    def head_weights(self):     # (K,) the weight of each head's loss: 1, then mtp_weight / (K - 1) each
        further = self.predict - 1
        return np.array([1.0] + [self.mtp_weight / max(1, further)] * further)


def param_table(config):
    """[(name, shape), ...] of all weights.  A matrix is (out, in), row by row: it maps x (T, in) to x @ W.T (T, out).
    (embed is (V,C), and its rows are looked up.)

    In memory all weights lie one after the other in this order.  The gains of the norms come last, because they alone
    do not decay (update_table)."""
    C = config.dim
    table = [("embed", (config.vocab, C))]
    gains = []
    for i in range(config.layers):
        table += [(f"layers.{i}.qkv", (config.qkv_width, C)),       # rows: D of each query head, each key head,
                                                                    # each value head, in this order
                  (f"layers.{i}.out", (C, C)),
                  (f"layers.{i}.gate_up", (2 * config.hidden, C)),  # rows: F of gate, then F of up
                  (f"layers.{i}.down", (C, config.hidden))]
        gains += [(f"layers.{i}.norm1", (C,)), (f"layers.{i}.norm2", (C,))]
    if not config.tied:
        table.append(("heads", (config.predict * config.vocab, C)))     # rows: V of head 0, V of head 1, ...
    return table + gains + [("norm", (C,))]


def forward_plain(w, config, tokens):
    """The whole model for one text: tokens, T ids -> logits (T,K,V).  The softmax of logits[t, k] says how probable
    each id is as token t+1+k.  w: the weights by name (param_table); with a tied head w["heads"] is w["embed"]."""
    T = len(tokens)
    H = config.heads
    G = config.kv_heads
    D = config.head_dim
    angle = np.outer(np.arange(T), config.rope_theta ** (-2 * np.arange(D // 2) / D))       # (T,D/2): t theta^(-2d/D)
    cos = np.cos(angle)
    sin = np.sin(angle)

    def rmsnorm(x, gain):                                                           # (T,C) -> (T,C)
        return x / np.sqrt(np.mean(x ** 2, axis=1, keepdims=True) + config.norm_eps) * gain

    def rope(x):    # (T,D) -> (T,D): rotates the pair (x_d, x_{d+D/2}) at position t by angle[t, d] (why: rope_forward)
        x1, x2 = np.split(x, 2, axis=1)
        return np.hstack([x1 * cos - x2 * sin, x2 * cos + x1 * sin])

    x = w["embed"][tokens]                                                          # (T,C)
    for i in range(config.layers):
        n = rmsnorm(x, w[f"layers.{i}.norm1"])
        qkv = np.split(n @ w[f"layers.{i}.qkv"].T, H + 2 * G, axis=1)   # H queries, G keys, G values: (T,D) each
        y = []
        for head in range(H):
            group = head // (H // G)                        # this query head reads the group's key and value head
            S = rope(qkv[head]) @ rope(qkv[H + group]).T / np.sqrt(D)               # (T,T): S[i, j]: query i, key j
            e = np.tril(np.exp(S))              # the mask: 0 where j > i.  (See attend, for scores that overflow)
            P = e / e.sum(axis=1, keepdims=True)                                    # (T,T): softmax of each row
            y.append(P @ qkv[H + G + group])                                        # (T,D)
        x = x + np.hstack(y) @ w[f"layers.{i}.out"].T                               # (T,C)
        n = rmsnorm(x, w[f"layers.{i}.norm2"])
        gate, up = np.split(n @ w[f"layers.{i}.gate_up"].T, 2, axis=1)              # (T,F) each
        h = gate / (1 + np.exp(-gate)) * up                                         # (T,F): silu(gate) * up
        x = x + h @ w[f"layers.{i}.down"].T                                         # (T,F) -> (T,C)
    return (rmsnorm(x, w["norm"]) @ w["heads"].T).reshape(T, -1, config.vocab)      # (T,K*V) -> (T,K,V)


# ------------------------------------------------------------------------------------------------------------
# 2. Arrays by name
# ------------------------------------------------------------------------------------------------------------
# All weights lie in one flat array, and what a step computes lies in another.  This section gives the parts of such an
# array their names and shapes.  A reader may skip it at first: the layers below have the same names.  The weights of
# small, as param_table lists them:
#
#     | embed  | qkv, out, gate_up, down of layer 0 | of layers 1 to 3 | heads   | norm1, norm2 of each layer; norm |
#     | 65,536 | 181,248                            | 543,744          | 262,144 | 1,152                            |

def table_size(table):
    """Number of scalars in a table of (name, shape)."""
    return sum(math.prod(shape) for _, shape in table)


def param_count(config):
    """Number of parameters."""
    return table_size(param_table(config))


def consecutive_slices(sizes):
    """The slices of a flat buffer in which parts of these sizes lie one after the other: 3, 2 -> 0:3, 3:5."""
    ends = itertools.accumulate(sizes, initial=0)
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def slices_of(count, size):
    """Slices of this size that cover 0 to count; the last may reach beyond it."""
    return [slice(start, start + size) for start in range(0, count, size)]


def table_views(flat, table):
    """dict name -> view into the contiguous buffer `flat`, shaped as the table of (name, shape) says."""
    parts = consecutive_slices(math.prod(shape) for _, shape in table)
    return {name: flat[part].reshape(shape) for (name, shape), part in zip(table, parts)}


def param_views(flat, config):
    """table_views of the parameters, or of a buffer like theirs.  With a tied head both names lead to one
    matrix: the embedding and the head each add their part of its gradient."""
    views = table_views(flat, param_table(config))
    if config.tied:
        views["heads"] = views["embed"]
    return views


def layer_views(views, i):
    """The entries "layers.i.NAME" of a dict of views, as Arrays by NAME."""
    return Arrays(**{name.removeprefix(f"layers.{i}."): view
                     for name, view in views.items() if name.startswith(f"layers.{i}.")})


def work_table(config, B, T):
    """[(name, shape), ...] of the arrays of a forward and backward at (B,T): first what is saved of each layer for its
    backward, then what all layers share."""
    N = B * T
    C = config.dim
    F = config.hidden
    scores_shape = B, config.kv_heads, config.heads // config.kv_heads, T, T        # (B,G,R,T,T)

    def tall(**widths):
        """{name: (N, width), ...}"""
        return {name: (N, width) for name, width in widths.items()}

    saved = tall(x_in=C,                        # x before the layer
                 n1=C,                          # the output of the first norm
                 qkv=config.qkv_width,          # queries, keys and values; q and k are rotated
                 y=C,                           # the output of attention, all heads side by side
                 x_mid=C,                       # x between the two substeps
                 n2=C,                          # the output of the second norm
                 gate_up=2 * F,                 # gate and up, the input of SwiGLU
                 sigmoid=F,                     # sigmoid(gate)
                 h=F)                           # silu(gate) * up
    saved |= {"P": scores_shape,                # the probabilities of attention
              "rstd1": (N,),                    # 1 / sqrt(mean of squares + eps) of each row of x_in
              "rstd2": (N,)}                    # the same of x_mid
    shared = tall(x=C,                          # the residual stream
                  increment=C,                  # what a substep adds to x; in the backward, to dx
                  final=C,                      # the output of the last norm
                  exp_sum=config.predict,       # sum over the vocabulary of exp(logit - max), for each head
                  dx=C,                         # d loss / d x
                  dn=C,                         # d loss / d (a norm's output): of final, then of each n2 and n1
                  dh=F,                         # d loss / d h
                  dgate_up=2 * F,               # d loss / d gate_up
                  dy=C,                         # d loss / d y
                  dqkv=config.qkv_width)        # d loss / d qkv
    shared |= {"dS": scores_shape,              # d loss / d S, the scores before the softmax
               "rstd": (N,),                    # 1 / sqrt(mean of squares + eps) of each row of x
               # cross_entropy_forward turns the logits into exp(logit - max), cross_entropy_backward into the gradient
               "logits": (N, config.predict, config.vocab)}
    layers = [(f"layers.{i}.{name}", shape) for i in range(config.layers) for name, shape in saved.items()]
    return [*layers, *shared.items()]


# ------------------------------------------------------------------------------------------------------------
# 3. The layers, each as a pair forward/backward
# ------------------------------------------------------------------------------------------------------------
# The contract of a pair.
#
#     NAME_forward(out, ..., inputs)                   writes its results into arrays of the caller, its first arguments
#     NAME_backward(dinputs, dweights, dout, ...)      takes dout = d loss / d out and what the forward has saved
#
# A backward WRITES the gradients of activations.  It ADDS (+=) to the gradients of weights, because a step may have
# several micro-batches (the pieces of a batch that is too large for the memory), and a tied matrix is used twice.
#
# In code dNAME is d loss / d NAME.  A backward is the chain rule.  It gets the slope of the loss for each output, dout,
# and computes that for each input:
#
#     dx_i = sum over the outputs o of  dout_o ∂out_o/∂x_i
#
# For example out_0 = x_0 x_1 and out_1 = x_0 + x_1.  Then ∂out_0/∂x_0 = x_1 and ∂out_1/∂x_0 = 1, so
# dx_0 = dout_0 x_1 + dout_1, and likewise dx_1 = dout_0 x_0 + dout_1.
#
# Most activations are matrices (N, width): one row for each token.  (RoPE and attention see the same memory as
# (B,T,...).  work_table has the shapes of the others.)
# Some functions work in place: rope_forward and block_forward on x, rope_backward and block_backward on dx, and both
# functions of cross-entropy on the logits, the largest array.

def embedding_forward(out, tokens, embed):
    """out (N,C) = rows `tokens` (N,) of embed (V,C)."""
    np.take(embed, tokens, axis=0, out=out)


# Forward: out[n] = embed[tokens[n]].  So d loss / d embed[v] = sum of dout[n] over all n with tokens[n] == v.
#
# A token that occurs twice must get the sum of both rows.  (dembed[tokens] += dout would keep only the last one.)  In
# one line this is np.add.at(dembed, tokens, dout).  The code below is faster.  It sorts the tokens, so that equal ones
# lie side by side: `starts` says where each run of equal tokens begins, and np.add.reduceat sums each run.  For example
# tokens 5 7 5: order is 0 2 1, ids are 5 7, starts are 0 2, and dembed gets dout[0] + dout[2] for 5, and dout[1] for 7.
def embedding_backward(dembed, dout, tokens):
    """Adds to dembed (V,C); dout (N,C), tokens (N,)."""
    order = np.argsort(tokens, kind="stable")
    ids, starts = np.unique(tokens[order], return_index=True)
    dembed[ids] += np.add.reduceat(dout[order], starts, axis=0)


def rmsnorm_forward(out, rstd, x, gain, eps):
    """RMSNorm (Zhang & Sennrich 2019).  x grows from layer to layer; the norm gives each layer numbers of about 1.
    x, out (N,C), rstd (N,), gain (C,).

        rstd_n = 1 / sqrt(mean_i x_ni^2 + eps)        out_ni = x_ni * rstd_n * gain_i
    """
    squares = np.einsum("nc,nc->n", x, x)           # (N,) the sum of x_ni^2
    rstd[...] = 1 / np.sqrt(squares / x.shape[1] + eps)
    np.multiply(x, rstd[:, None], out=out)
    out *= gain


# Derivation, for one row (n dropped), with xhat = x * rstd and r = rstd:
#     out_i = xhat_i gain_i                  =>  dgain_i += dout_i xhat_i  (summed over rows)
#                                                dxhat_i  = dout_i gain_i
#     xhat_i = x_i r, and r = (mean_j x_j^2 + eps)^(-1/2) depends on every x_j:
#                                                ∂r/∂x_j  = -1/2 (mean_j x_j^2 + eps)^(-3/2) (2 x_j / C)
#                                                         = -r^3 x_j / C = -r^2 xhat_j / C
#                                                ∂xhat_i/∂x_j = [i == j] r + x_i ∂r/∂x_j
#                                                               ([i == j]: 1 if i = j, else 0)
#     dx_j = sum_i dxhat_i ∂xhat_i/∂x_j
#          = dxhat_j r + sum_i dxhat_i x_i (-r^2 xhat_j / C)         and x_i = xhat_i / r, so
#          = r dxhat_j - r xhat_j (1/C) sum_i dxhat_i xhat_i
#          = r (dxhat_j - xhat_j * mean_i(dxhat_i xhat_i))
# What the second term does: RMSNorm discards the length of x, so moving x along itself does not change the output.  So
# dx must have no part along x, and this term takes it away.  (The part of a vector d along xhat is
# xhat (d . xhat) / |xhat|^2, and |xhat|^2 = C.  That is exact if eps is 0: then the mean square of xhat is 1.)
def rmsnorm_backward(dx, dgain, dout, x, rstd, gain):
    """Writes dx (N,C), adds to dgain (C,)."""
    xhat = x * rstd[:, None]
    dout_xhat = dout * xhat
    dgain += np.ones(len(x), x.dtype) @ dout_xhat   # dout_xhat.sum(axis=0), as a product: it is faster
    mean = dout_xhat @ gain / x.shape[1]            # (N,) mean_i dxhat_i xhat_i
    projection = np.multiply(xhat, mean[:, None], out=xhat)     # in xhat's memory
    np.multiply(dout, gain, out=dx)                 # dxhat
    dx -= projection
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


# RoPE (RoFormer, Su et al. 2021) rotates each pair (x1, x2) = (x_d, x_{d+D/2}) of a head by the angle t theta^(-2d/D),
# where t is the position:
#
#     y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin
#
# Let M_t be this rotation.  Its transpose is its inverse, the rotation back: M_t^T = M_(-t).  So the score of a query
# at position i and a key at position j is  (M_i q).(M_j k) = q.(M_i^T M_j k) = q.(M_(j-i) k):  it depends on the
# positions only through their distance.  The layout, first half and second half of the head, is that of Hugging Face's
# Llama.
def rope_forward(x, cos, sin):
    """Rotate, in place, every head of x (B,T,heads,D).  cos, sin (T,1,D): see rope_table.

    The formula for both halves at once: y = x * cos + [x2, x1] * [-sin, sin].  np.roll by D/2 turns [x1, x2] into
    [x2, x1], and the table holds [-sin, sin]."""
    swapped = np.roll(x, x.shape[-1] // 2, axis=-1) * sin
    x *= cos
    x += swapped


# Forward: y = M x for each pair, M = [[cos, -sin], [sin, cos]].  So dx = M^T dy.  M^T is the rotation by the negative
# angle (see above), which is the forward with -sin.
def rope_backward(dx, cos, sin):
    """In place on dx (B,T,heads,D)."""
    rope_forward(dx, cos, -sin)


def rope_table(config, dtype):
    """(2, context, 1, D): the cosines of all angles, and their sines, negative in the first half of D.  Computed in
    float64: a float32 has 7 digits, so an angle of some hundred radians is off by 1e-5 before its cosine is taken."""
    D = config.head_dim
    freq = config.rope_theta ** (-np.arange(0, D, 2) / D)
    angle = np.outer(np.arange(config.context), np.tile(freq, 2))[:, None]          # (context, 1, D)
    sin = np.sin(angle)
    sin[..., :D // 2] *= -1
    return np.stack([np.cos(angle), sin]).astype(dtype)


# How the heads lie in a row of qkv, for H = 4, G = 2 and so R = 2; each of these is D numbers:
#
#     q0 q1 q2 q3 | k0 k1 | v0 v1           q0 and q1 read k0 and v0; q2 and q3 read k1 and v1
#
# So the H query heads are G groups of R.  All functions of attention see q as (B,G,R,T,D), k and v as (B,G,1,T,D), and
# broadcasting over R is all that the forward of grouped-query attention needs.  (The backward sums dk and dv over R.)
def by_group(x, config):
    """View (B,G,R,T,D) of x (B,T,heads*D), R = heads / G: the heads group by group."""
    # (B,T,G*R*D) -> (B,T,G,R,D).  Its axes 0 2 3 1 4 are (B,G,R,T,D)
    return x.reshape(*x.shape[:2], config.kv_heads, -1, config.head_dim).transpose(0, 2, 3, 1, 4)


def split_heads(qkv, config):
    """Views q (B,G,R,T,D), k and v (B,G,1,T,D) into qkv (B,T,(H+2G)D)."""
    parts = np.split(qkv, [config.dim, -config.kv_width], axis=-1)                  # the last GD columns are v
    return [by_group(part, config) for part in parts]


def rotated_part(qkv, config):
    """View (B,T,H+G,D) of the heads in qkv (B,T,(H+2G)D) that RoPE rotates: q and k, not v."""
    heads = qkv.reshape(*qkv.shape[:2], -1, config.head_dim)                        # (B,T,H+2G,D)
    return heads[:, :, :-config.kv_heads]


def causal_mask(T, J, dtype):
    """(T,J), added to the scores: -inf where a key is later than its query, else 0.  The queries are the last T of J
    tokens.  So query i is token i + J - T, and key j is too late if j > i + J - T.  For example T = 2, J = 4:
    [0 0 0 -inf], [0 0 0 0].

    Where is the mask on each path?
        attention_forward; Decoder._attention       this function
        forward_plain                               np.tril
        flash_attn.cu, section 0                    a loop that ends at the query
        flash_attn.cu, sections 1 and 2             positions are compared (in section 2 by mask_future)
        decoding a few tokens on a GPU; gradcheck.plain_losses      none: only the keys up to the token are read"""
    return np.triu(np.full((T, J), -np.inf, dtype), J - T + 1)


def attend(out, P, q, k, v, mask):
    """Attention (Vaswani et al. 2017) of T queries i to J keys j.  Per head, with scale = 1/sqrt(D):

        S_ij = scale q_i . k_j + mask_ij       P_ij = exp(S_ij) / sum_l exp(S_il)       out_i = sum_j P_ij v_j

    So token i takes the share P_ij of the value of token j, a large one where its query fits the key of j.

    Why the scale?  q_i . k_j is a sum of D products, so with random signs its size is about sqrt(D).  With such large
    scores a token would take one value alone.

    q, out (B,G,R,T,D); k, v (B,G,1,J,D); P (B,G,R,T,J); mask (T,J), or from a Decoder (B,1,1,T,J): one for each
    text."""
    # P holds the scores S until the softmax
    np.matmul(q, k.swapaxes(-1, -2), out=P)         # (B,G,R,T,D) @ (B,G,1,D,J)
    P *= 1.0 / math.sqrt(q.shape[-1])
    P += mask
    P -= P.max(axis=-1, keepdims=True)              # the same softmax, but exp cannot overflow
    np.exp(P, out=P)
    P /= P.sum(axis=-1, keepdims=True)
    np.matmul(P, v, out=out)


def attention_forward(out, P, qkv, config):
    """Causal grouped-query attention (Ainslie et al. 2023).  qkv (B,T,(H+2G)D), already rotated; out (B,T,H*D);
    P (B,G,R,T,T) keeps the probabilities for the backward."""
    q, k, v = split_heads(qkv, config)
    mask = causal_mask(*P.shape[-2:], P.dtype)
    attend(by_group(out, config), P, q, k, v, mask)


# Derivation, for one head.  Here the letters Q, K, V mean its queries, keys and values as matrices, O out and dO dout.
# For the softmax it uses ∂P = P ∂(log P), since ∂(log P) = ∂P / P: log P is simpler than P.
#     O_i = sum_j P_ij v_j           =>  dv_j  = sum_i P_ij dO_i              dV = P^T dO
#                                        dP_ij = dO_i . v_j                   dP = dO V^T
#     P_i = softmax(S_i):                log P_ij = S_ij - log sum_l exp(S_il), so
#                                        ∂(log P_ij)/∂S_il = [j == l] - exp(S_il) / sum_m exp(S_im)
#                                                          = [j == l] - P_il, so
#                                        ∂P_ij/∂S_il = P_ij ∂(log P_ij)/∂S_il = P_ij ([j == l] - P_il), so
#                                        dS_il = sum_j dP_ij ∂P_ij/∂S_il
#                                              = sum_j dP_ij P_ij [j == l] - sum_j dP_ij P_ij P_il
#                                              = P_il (dP_il - delta_i),  delta_i = sum_j P_ij dP_ij
#                                        delta can be had without dP, by D products in place of J:
#                                        delta_i = sum_j P_ij (dO_i . v_j) = dO_i . (sum_j P_ij v_j) = dO_i . O_i
#     S_ij = scale q_i . k_j         =>  dq_i  = scale sum_j dS_ij k_j        dQ = scale dS K
#                                        dk_j  = scale sum_i dS_ij q_i        dK = scale dS^T Q
# The mask needs no line here: where it is -inf, P is 0, and so is dS.
# GQA: the R query heads of a group read one k and one v, so dk and dv are summed over the group.
def attention_backward(dqkv, dout, out, P, qkv, config, dS):
    """Writes dqkv (B,T,(H+2G)D), the gradient of v and of the rotated q and k.  dout, out: (B,T,H*D).  dS: an array
    like P to compute in; it holds dP first, then dS (a second array of this size would cost memory and time)."""
    q, k, v = split_heads(qkv, config)
    dq, dk, dv = split_heads(dqkv, config)
    out = by_group(out, config)                                                     # (B,G,R,T,D)
    dout = by_group(dout, config)
    # out = P @ v
    dv[...] = (P.swapaxes(-1, -2) @ dout).sum(axis=2, keepdims=True)                # summed over the group
    dP = np.matmul(dout, v.swapaxes(-1, -2), out=dS)                                # (B,G,R,T,T)
    # P = softmax(S)
    delta = np.einsum("...d,...d->...", dout, out)[..., None]                       # (B,G,R,T,1): dO_i . O_i
    np.subtract(dP, delta, out=dS)
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
    np.multiply(gate, sigmoid, out=out)
    out *= up


# Derivation, with s = sigmoid(g), s' = s (1 - s), silu = g s:
#     out = silu u         =>  du = dout silu
#     silu' = s + g s (1 - s) = s (1 + g - g s) = s (1 + g - silu)
#                          =>  dg = dout u silu'
def swiglu_backward(dgate_up, dout, sigmoid, gate_up):
    """Writes dgate_up (N,2F)."""
    gate, up = np.split(gate_up, 2, axis=1)
    dgate, dup = np.split(dgate_up, 2, axis=1)
    silu = np.multiply(gate, sigmoid, out=dup)      # dup is its memory until the last line: a new array takes time
    np.multiply(dout, (gate - silu + 1.0) * sigmoid * up, out=dgate)
    dup *= dout


def block_forward(x, w, saved, shared, config, rope, attention):
    """One layer, in place on x (N,C).  It is one Euler step (README.md, "Why Euler"), made of two substeps, attention
    and the feed-forward network:

        n = rmsnorm(x)        x = x + attention(rope(n @ qkv.T)) @ out.T          (rope: of q and k)
        n = rmsnorm(x)        x = x + (silu(n @ gate.T) * (n @ up.T)) @ down.T

    w: this layer's weights.  saved: this layer's arrays of work_table; shared: the arrays that all layers use in turn.
    (All three are Arrays: w.qkv is the weight of that name.)  rope: the T rows of rope_table for the positions.
    attention: attention_forward, or a Decoder's."""
    T = rope.shape[1]                                                             # it has one entry for each position
    shape = len(x) // T, T, -1                                                    # (B,T,width)
    increment = shared.increment                                                  # (N,C)

    saved.x_in[...] = x                                                           # (N,C)
    rmsnorm_forward(saved.n1, saved.rstd1, x, w.norm1, config.norm_eps)           # (N,C), (N,)
    linear_forward(saved.qkv, saved.n1, w.qkv)                                    # (N,C) -> (N,(H+2G)D)
    qkv = saved.qkv.reshape(shape)                                                # (B,T,(H+2G)D)
    rope_forward(rotated_part(qkv, config), *rope)
    attention(saved.y.reshape(shape), saved.P, qkv, config)                       # (B,T,(H+2G)D) -> (B,T,C)
    linear_forward(increment, saved.y, w.out)                                     # (N,C) -> (N,C)
    x += increment                                                                # Euler substep 1

    saved.x_mid[...] = x                                                          # (N,C)
    rmsnorm_forward(saved.n2, saved.rstd2, x, w.norm2, config.norm_eps)           # (N,C), (N,)
    linear_forward(saved.gate_up, saved.n2, w.gate_up)                            # (N,C) -> (N,2F)
    swiglu_forward(saved.h, saved.sigmoid, saved.gate_up)                         # (N,2F) -> (N,F)
    linear_forward(increment, saved.h, w.down)                                    # (N,F) -> (N,C)
    x += increment                                                                # Euler substep 2


# Backward of block_forward, in place on dx (N,C): on entry d loss / d (output), on exit d loss / d (input).
#
# x + f(x) has the derivative 1 + f': dx passes through unchanged, and what comes back through f is ADDED to
# it.  This is why a deep residual network trains: the 1 carries the gradient to the first layer.
def block_backward(dx, w, dw, saved, shared, config, rope):
    """w, dw: this layer's weights and their gradients; saved, shared: arrays as in the forward."""
    T = rope.shape[1]
    shape = len(dx) // T, T, -1                                                   # (B,T,width)
    dn = shared.dn
    back = shared.increment                                                       # what comes back through f

    # x = x + h @ down.T
    linear_backward(shared.dh, dw.down, dx, saved.h, w.down)                      # (N,C) -> (N,F)
    # h = silu(gate) * up
    swiglu_backward(shared.dgate_up, shared.dh, saved.sigmoid, saved.gate_up)                   # -> (N,2F)
    # gate_up = n2 @ gate_up.T
    linear_backward(dn, dw.gate_up, shared.dgate_up, saved.n2, w.gate_up)                       # -> (N,C)
    # n2 = rmsnorm(x_mid)
    rmsnorm_backward(back, dw.norm2, dn, saved.x_mid, saved.rstd2, w.norm2)
    dx += back

    # x = x + y @ out.T
    linear_backward(shared.dy, dw.out, dx, saved.y, w.out)                        # (N,C) -> (N,C)
    # y = attention(qkv)
    dqkv = shared.dqkv.reshape(shape)
    attention_backward(dqkv, shared.dy.reshape(shape), saved.y.reshape(shape), saved.P, saved.qkv.reshape(shape),
                       config, shared.dS)
    # q, k = rope(q, k)
    rope_backward(rotated_part(dqkv, config), *rope)
    # qkv = n1 @ qkv.T
    linear_backward(dn, dw.qkv, shared.dqkv, saved.n1, w.qkv)                     # (N,(H+2G)D) -> (N,C)
    # n1 = rmsnorm(x_in)
    rmsnorm_backward(back, dw.norm1, dn, saved.x_in, saved.rstd1, w.norm1)
    dx += back


# ------------------------------------------------------------------------------------------------------------
# 4. The loss and the optimizers
# ------------------------------------------------------------------------------------------------------------

# An example: T = 4, K = 3.  A row of targets has T + K - 1 = 6 entries y0 ... y5.  Head k reads entries k to
# k + T - 1; the heads stand side by side, as columns:
#                    head 0   head 1   head 2
#     position 0     y0       y1       y2
#     position 1     y1       y2       y3
#     position 2     y2       y3       y4
#     position 3     y3       y4       y5
# The next sequence of the batch follows below: row n = b T + t, as in the logits (N,K,V).
def head_targets(targets, T, K):
    """(B, T+K-1) targets -> (N,K): head k at position t is to predict targets[:, t+k].  A target of -1 is masked:
    it is not learned and not counted."""
    return np.stack([targets[:, k:k + T] for k in range(K)], axis=-1).reshape(-1, K)


def count_targets(targets, T, K):
    """(K,) ints: how many targets each head has.  The sum over all micro-batches of a step (and all GPUs) is the
    divisor of the loss.  So a step may be cut into micro-batches: only the rounding changes."""
    return (head_targets(targets, T, K) >= 0).sum(axis=0)


def cross_entropy_forward(losses, exp_sum, logits, targets, divisor, weights=1.0):
    """Softmax cross-entropy:

        nll_nk = -log softmax(logits_nk)[y],  y = targets_nk;  0 where y is -1      (negative log-likelihood)
        loss_k = 1/divisor_k  sum_n w_n nll_nk

    losses    (K,)
    exp_sum   (N,K)    sum over v of exp(logit - max)
    logits    (N,K,V)  in place: they become e = exp(logit - max)
    targets   (N,K)
    divisor   (K,)     the number of the head's targets in the whole step, at least 1.  inf: the head has no loss, since
                       x / inf = 0 (in rl.py the heads 1 to K-1)
    weights   (N,1)    w: of each token the weight of its text (rl.py); or 1 (pretraining and fine-tuning)

    Returns nll (N,K)."""
    logits -= logits.max(axis=-1, keepdims=True)
    # the target's logit.  A target of -1 picks the last logit, which np.where drops below
    picked = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    np.exp(logits, out=logits)
    logits.sum(axis=-1, out=exp_sum)
    nll = np.where(targets >= 0, np.log(exp_sum) - picked, 0.0)
    np.divide((weights * nll).sum(axis=0, dtype=np.float64), divisor, out=losses)
    return nll


# Derivation, for one row with target y, p = softmax(z) = e / exp_sum:
#     nll = log sum_v exp(z_v) - z_y        =>  ∂nll/∂z_v = exp(z_v) / sum_u exp(z_u) - [v == y] = p_v - [v == y]
#     total loss = sum over n, k of  head_weight_k w_n nll_nk / divisor_k
#                                           =>  dz_v = (head_weight_k w_n / divisor_k) (p_v - [v == y])
# A masked row has the gradient 0.
def cross_entropy_backward(e, exp_sum, targets, divisor, scale):
    """In place: e (N,K,V), the exponentials left by the forward, becomes d loss / d logits.
    scale: the weights of the heads in the loss (K,), or these times the weights of the rows (N,K)."""
    weight = np.where(targets >= 0, scale / divisor, 0.0).astype(e.dtype)               # (N,K)
    e *= (weight / exp_sum)[..., None]              # weight * p
    n, k = np.nonzero(targets >= 0)
    e[n, k, targets[n, k]] -= weight[n, k]          # - weight * [v == y]


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
    """In place, on flat arrays of one length; step counts from 1.  The gradient is set to 0, because the next backward
    adds to it."""
    m *= beta1
    m += (1 - beta1) * grad
    v *= beta2
    v += (1 - beta2) * grad ** 2
    param *= 1 - lr * decay
    param -= lr / (1 - beta1 ** step) * (m / (np.sqrt(v / (1 - beta2 ** step)) + eps))
    grad[...] = 0.0


# What decay does (this may be skipped).  It makes the weights forget old steps: they become an average over about the
# last tau = 1 / (lr decay) steps.  Let u_t be the direction of step t (for AdamW mhat / (sqrt(vhat) + eps)), and a = lr
# decay.  Then
#     param_1 = (1 - a) param_0 - lr u_1
#     param_2 = (1 - a)^2 param_0 - lr (1 - a) u_1 - lr u_2
#     param_3 = (1 - a)^3 param_0 - lr (1 - a)^2 u_1 - lr (1 - a) u_2 - lr u_3
# and so on.  Since lr = a / decay, param_t is an average: of param_0 with the share (1 - a)^t, and of -u_s / decay with
# the share a (1 - a)^(t-s) for each step s.  (The shares add up to 1.)  A step's share shrinks by the factor 1 - a in
# each later step, and in tau = 1 / a steps to about 1/e of what it was (Wang & Aitchison 2025; docs/notes.md has what
# was measured).  In a run the rate changes, and with it a.  The share of the initial weights at the end is the product
# of all 1 - a: 2% in big (four epochs), 59% in small.  All this holds for Muon, too.


NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315         # a, b, c


# Muon (Jordan et al. 2024): momentum, orthogonalised.
#
# The gradient of a weight matrix, and usually its running mean M, is nearly of low rank: a few singular values are
# large, and a step along M moves the weights in these few directions alone.  Muon steps along U V^T instead, where
# M = U S V^T is the singular value decomposition.  (The columns of U, and those of V, are unit vectors at right angles
# to each other; S is diagonal, with the singular values s >= 0.)  So every direction that the gradient knows gets a
# step of the same length.
#
# Why this direction?  (This may be skipped.)  Suppose that M were the gradient itself.  Of all steps with
# |step @ x| <= |x| for every x, -U V^T lowers the loss fastest.  To first order, with the columns u_i, v_i:
#     change of the loss = sum of (gradient * step) = sum over i of  s_i u_i . (step @ v_i)
# Each u_i . (step @ v_i) is at least -1, because u_i and v_i are unit vectors and |step @ v_i| <= |v_i| = 1.  With the
# step -U V^T each is -1.
#
# No singular values need be computed.  (S and V mean those of the decomposition here, not scores and vocabulary.)
# Take X = U S V^T, so X X^T = U S^2 U^T.  An odd polynomial in X,
#     a X + b (X X^T) X + c (X X^T)^2 X  =  U (a S + b S^3 + c S^5) V^T,
# acts on each singular value s by itself: s -> a s + b s^3 + c s^5.  The start X = M / |M| (Frobenius) has s <= 1.
# (a, b, c) = NEWTON_SCHULZ was found by a search for a large slope at 0, with which small s grow fast (Jordan et al.
# 2024).  What five rounds do:
#     s before        0.0001   0.0005   0.0016   0.01    0.1     0.5     1
#     s after         0.05     0.24     0.72     0.70    0.71    0.77    0.70
# All s from 0.0016 to 1 end in [0.68, 1.21].  (Smaller ones end lower: near 0 each round multiplies s by a = 3.4.)  So
# U V^T is reached only roughly, which trains as well (Jordan et al. 2024).
def newton_schulz(M):
    """M (rows, columns) -> U V^T, nearly: the singular vectors of M stay; each singular value begins as s / |M| and
    goes five times through the polynomial."""
    a, b, c = NEWTON_SCHULZ
    tall = M.shape[0] > M.shape[1]
    X = M.T if tall else M                          # X X^T on the shorter side: the same, with less work
    X = X / (np.linalg.norm(X) + 1e-7)              # 1e-7: no division by 0
    for _ in range(5):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if tall else X


# The step, with Nesterov's look ahead by one more gradient:
#
#     m_new = momentum m + (1 - momentum) g       running mean of the gradient
#     u = momentum m_new + (1 - momentum) g       `ahead`: what the next m would be if the same g came once more
#     param -= lr (decay param + 0.2 sqrt(max(rows, columns)) newton_schulz(u))
#
# Why 0.2 sqrt(max(rows, columns)).  U V^T has min(rows, columns) singular values of about 1, so the root mean square
# of its entries is 1 / sqrt(max(rows, columns)).  AdamW's steps have about 0.2 in training, whatever the shape.  (The
# gradient's sign often changes, so its running mean m is small beside sqrt(v).)  With this factor Muon's have the same.
# So one learning rate and one decay serve both parts of a run, Muon's matrices and what AdamW updates (Liu et al.
# 2025).  The step is as long for a long u as for a short one, so the gradient is not clipped.  (But one very long
# gradient sets the direction of many steps after it.)
def muon_update(param, grad, m, lr, decay, momentum=0.95):
    """In place, on matrices (rows, columns).  The gradient is set to 0, because the next backward adds to it."""
    share = (1 - momentum) * grad
    m[...] = momentum * m + share
    ahead = momentum * m + share
    param *= 1 - lr * decay
    param -= lr * 0.2 * math.sqrt(max(param.shape)) * newton_schulz(ahead)
    grad[...] = 0.0


# The rule of a new optimizer stands above, and its name in this list.  docs/notes.md, "Where does a new optimizer go?",
# has all the other places.
OPTIMIZERS = ("muon", "adamw")          # muon: for the matrices of the layers; AdamW for all else

# AdamW goes over four arrays (param, grad, m, v) a dozen times.  In pieces of this many numbers all four stay in the
# processor's cache.
PIECE = 65536


def matrix_table(config):
    """[(shape, place), ...] of the matrices of one layer as Muon takes them.  place: where a matrix lies, a slice of
    the layer's numbers.  q, k, v, gate and up are separate matrices, though they are stored together, so each is
    orthogonalised by itself."""
    C = config.dim
    F = config.hidden
    kv = config.kv_width
    shapes = [(C, C),                               # q
              (kv, C),                              # k
              (kv, C),                              # v
              (C, C),                               # out
              (F, C),                               # gate
              (F, C),                               # up
              (C, F)]                               # down
    return list(zip(shapes, consecutive_slices(map(math.prod, shapes))))


def layer_matrices(part, config):
    """-> list of these matrices of all layers, views into the layers' part of a flat buffer."""
    return [layer[place].reshape(shape)
            for layer in part.reshape(config.layers, -1) for shape, place in matrix_table(config)]


def update_table(config, optimizer):
    """Which rule updates which part of the flat buffers: [(rule, part, part of v, decayed), ...], a row for each of

        the embedding | the matrices of the layers | the heads | the gains of the norms

    rule: "adamw" or "muon".  part: a slice of the buffers.  part of v: the slice of v that holds its second moments,
    which is empty for Muon.  decayed: whether its weights decay: those of matrices do, the gains of norms do not.

    With Muon the second row of small is ("muon", 65536:790528, 65536:65536, True): the embedding has 65,536 numbers,
    the matrices of the layers have 724,992, and none of these in v."""
    embedding = config.vocab * config.dim
    heads = 0 if config.tied else config.predict * embedding
    gains = (2 * config.layers + 1) * config.dim
    matrices = param_count(config) - embedding - heads - gains      # those of the layers
    sizes = [embedding, matrices, heads, gains]
    sizes_of_v = [embedding, matrices if optimizer == "adamw" else 0, heads, gains]
    table = zip(["adamw", optimizer, "adamw", "adamw"],
                consecutive_slices(sizes),
                consecutive_slices(sizes_of_v),
                [True, True, True, False])
    return [row for row, size in zip(table, sizes) if size]


def muon_part(config, optimizer):
    """The slice of the flat buffers that Muon updates, a row of update_table.  Model.update clips what lies before and
    behind this slice.  Without Muon it is empty and lies at the end: so all is clipped."""
    for rule, part, _, _ in update_table(config, optimizer):
        if rule == "muon":
            return part
    end = param_count(config)
    return slice(end, end)


def moment_count(config, optimizer):
    """How many numbers the optimizer keeps: m of every parameter, and v of those that Muon does not update."""
    muon = muon_part(config, optimizer)
    return 2 * param_count(config) - (muon.stop - muon.start)


# ------------------------------------------------------------------------------------------------------------
# 5. The model
# ------------------------------------------------------------------------------------------------------------
class Model:
    """The model on the CPU.

    params and grads: dict name -> view of the flat buffers.  seed=None leaves the parameters at 0, for a caller who
    writes them.  training: only model_gpu.py uses it; False leaves out gradients and moments there.

    threads > 1 is data parallelism in miniature: each thread takes a share of the batch through the whole
    forward and backward with a gradient buffer of its own, and the buffers are added in order.  NumPy
    releases Python's global lock inside its loops, so the threads use all cores for everything.  (A BLAS with threads
    of its own uses them for products alone; the element-wise work stays on one core.  Set OPENBLAS_NUM_THREADS=1,
    as train.py does.)  The shares' gradients add up to that of the whole batch, but for rounding, because the loss is
    divided by the count of targets in the whole step, not in the share."""
    draft_heads = 0     # see generate (section 7): on a CPU drafts cost more than they save

    def __init__(self, config, seed=0, dtype=np.float64, threads=1, training=True, optimizer="adamw"):
        self.config = config
        self.dtype = dtype
        self.optimizer = optimizer
        self.step = 0                               # updates made so far
        self.communicator = None                    # sums gradients over several processes: train.py
        size = param_count(config)
        self.flat_params = np.zeros(size, dtype)
        self.params = param_views(self.flat_params, config)
        self.layers = [layer_views(self.params, i) for i in range(config.layers)]
        if seed is not None:
            init_params(self.flat_params, config, seed)
        self.workspaces = [Workspace(config, dtype) for _ in range(threads)]
        self.pending = []                           # workspaces with a forward whose backward has not run
        self.flat_grads = self.workspaces[0].flat_grads
        self.grads = self.workspaces[0].grads
        # one array: m of all parameters, then v of those that AdamW updates; cut behind m
        self.m, self.v = np.split(np.zeros(moment_count(config, optimizer), dtype), [size])
        self.rope = rope_table(config, dtype)
        # NumPy's warnings are set per thread.  The pool's threads are silent; the caller checks the loss.
        pool = ThreadPoolExecutor(threads, initializer=np.seterr, initargs=("ignore",))
        # map(function, jobs), on threads if there are several.  Both give the results in order; list() waits for all
        self.map = pool.map if threads > 1 else map
        self.decoder = self.new_decoder(1, config.context)

    def refresh(self):
        """Call this after writing params.  It forgets what was computed with other weights: the KV cache, and what
        forward has left for backward."""
        self.decoder.forget()
        self.pending = []

    def new_decoder(self, rows, length):
        """A Decoder of so many texts (rows) at once, each of at most `length` tokens."""
        return Decoder(self, rows, length)

    def _trunk(self, tokens, layers, shared, attention_functions=None, first_position=0):
        """The trunk: embedding, all layers, last norm.  tokens (B,T), of which the first stands at `first_position` of
        its text -> shared.final (N,C).  layers, shared: the arrays of work_table, which then hold what the backward
        needs.  attention_functions: what each layer calls for attention; None: attention_forward."""
        x = shared.x
        attention_functions = attention_functions or [attention_forward] * self.config.layers
        rope = self.rope[:, first_position:first_position + tokens.shape[1]]
        embedding_forward(x, tokens.ravel(), self.params["embed"])
        for w, saved, attention in zip(self.layers, layers, attention_functions):
            block_forward(x, w, saved, shared, self.config, rope, attention)
        rmsnorm_forward(shared.final, shared.rstd, x, self.params["norm"], self.config.norm_eps)
        return shared.final

    def _head_logits(self, final, heads):
        """final (N,C) -> the logits (N,heads,V) of the first heads, in one product."""
        V = self.config.vocab
        return (final @ self.params["heads"][:heads * V].T).reshape(-1, heads, V)

    def logits(self, tokens):
        """(B,T) ints -> (B,T,K,V), a new array."""
        tokens = as_batch(self.config, tokens)
        self.pending = []                           # their arrays are overwritten now
        final = self._trunk(tokens, *self.workspaces[0].buffers(*tokens.shape))     # Workspace: see section 10
        K = self.config.predict
        return self._head_logits(final, K).reshape(*tokens.shape, K, -1)

    def forward(self, tokens, targets, counted=None, weights=None):
        """tokens (B,T), targets (B,T+K-1), of which -1 is masked -> (K,) losses in nats: the sum of head k's losses,
        divided by counted[k].

        counted (K,): the number of targets that are not masked, of each head, in the whole step.  None: in this call.
        ValueError where head 0 has none at all.

        weights (B,), one for each text; None: as in pretraining.  With weights only head 0 has a loss: the sum of
        w_b (-log p) / counted[0].  (rl.py has such weights, and counted[0] is the number of learned tokens there.)"""
        tokens, targets, self.divisor, weights = check_batch(self.config, tokens, targets, counted, weights)
        self.pending = self.workspaces[:len(tokens)]        # no more shares than texts: a text is never divided
        # with one thread there is one share, the whole batch
        shares = [np.array_split(array, len(self.pending)) for array in (tokens, targets, weights)]
        losses = sum(self.map(self._forward_share, self.pending, *shares))
        self.nll = np.concatenate([workspace.nll for workspace in self.pending])
        return losses

    def _forward_share(self, workspace, tokens, targets, weights):
        """One thread's part of forward.  The workspace keeps what the backward needs."""
        T = tokens.shape[1]
        K = self.config.predict
        layers, shared = workspace.buffers(*tokens.shape)
        targets = head_targets(targets, T, K)                                           # (N,K)
        weights = np.repeat(weights, T)[:, None]                                        # (N,1)
        final = self._trunk(tokens, layers, shared)                                     # (N,C)
        logits = shared.logits                                                          # (N,K,V)
        linear_forward(logits.reshape(len(logits), -1), final, self.params["heads"])
        losses = np.zeros(K)
        workspace.nll = cross_entropy_forward(losses, shared.exp_sum, logits, targets, self.divisor, weights)
        workspace.share = tokens, targets, self.config.head_weights * weights
        return losses

    def log_probs(self, tokens, targets):
        """tokens, targets as in forward -> (B,): for each row the sum of head 0's log p of its targets."""
        # Only the nll that forward leaves is used, and not the losses: so any divisors serve
        self.forward(tokens, targets, [1] * self.config.predict)
        self.pending = []                           # with this divisor backward would make no sense
        nll = self.read(self.nll)                   # (N,K)
        return -nll[:, 0].reshape(len(tokens), -1).sum(axis=1, dtype=np.float64)

    def backward(self, last=True):
        """Add d(total loss)/d(param) of the last forward to grads; total = losses @ config.head_weights.  Call it once
        after a forward: it overwrites what the forward has kept.  last: this is the step's last micro-batch, after
        which the gradients of several processes are added up (Ranks.all_reduce; script.py, section 5, says why)."""
        require(self.pending, "call forward before each backward; logits and update throw away what backward needs.")
        list(self.map(self._backward_share, self.pending))
        for workspace in self.pending[1:]:          # in order, so that the sum is the same in every run
            self.flat_grads += workspace.flat_grads
            workspace.flat_grads[...] = 0.0
        self.pending = []
        if last and self.communicator:
            self.communicator.all_reduce(self.flat_grads)

    def _backward_share(self, workspace):
        """One thread's part of backward."""
        tokens, targets, scale = workspace.share        # scale (N,K): head weights times weights of the texts
        layers, shared = workspace.arrays
        grads = workspace.grads
        dx = shared.dx
        rope = self.rope[:, :tokens.shape[1]]
        dlogits = shared.logits                                                         # (N,K,V)
        cross_entropy_backward(dlogits, shared.exp_sum, targets, self.divisor, scale)
        # logits = final @ heads.T
        dlogits = dlogits.reshape(len(dlogits), -1)                                     # (N,K*V)
        linear_backward(shared.dn, grads["heads"], dlogits, shared.final, self.params["heads"])
        # final = rmsnorm(x)
        rmsnorm_backward(dx, grads["norm"], shared.dn, shared.x, shared.rstd, self.params["norm"])
        for i in reversed(range(self.config.layers)):
            block_backward(dx, self.layers[i], layer_views(grads, i), layers[i], shared, self.config, rope)
        # x = embed[tokens]
        embedding_backward(grads["embed"], dx, tokens.ravel())

    def update(self, lr, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1, clip=1.0, momentum=0.95):
        """One step of the optimizer.  First it clips: the gradient of all parameters that Muon does not take is scaled
        so that its norm is at most `clip`.  Then each part of the parameters is updated by its rule in update_table,
        and the gradient is set to 0.  train.py passes its own decay and momentum.

        Returns the norm of the whole gradient before clipping.  If that is not finite, nothing is changed: the caller
        must stop, and can look at the gradient."""
        c = self.config
        muon = muon_part(c, self.optimizer)
        # three views.  Muon's part is not clipped, because its step has one length anyway; the other two are, below
        before, of_muon, after = np.split(self.flat_grads, [muon.start, muon.stop])
        squares = before @ before + after @ after
        norm = math.sqrt(squares + of_muon @ of_muon)
        if not math.isfinite(norm):
            return norm
        self.step += 1
        self.refresh()
        factor = min(1.0, clip / (math.sqrt(squares) + 1e-6))       # 1e-6: no division by 0
        before *= factor
        after *= factor
        jobs = []                                   # calls, which the threads share
        for rule, part, part_of_v, decayed in update_table(c, self.optimizer):
            arrays = [self.flat_params[part], self.flat_grads[part], self.m[part]]
            if rule == "muon":
                for param, grad, m in zip(*[layer_matrices(array, c) for array in arrays]):
                    jobs.append(partial(muon_update, param, grad, m, lr, decay, momentum))
            elif rule == "adamw":
                numbers = self.step, lr, beta1, beta2, eps, decay if decayed else 0.0
                arrays.append(self.v[part_of_v])
                for piece in slices_of(len(arrays[0]), PIECE):
                    jobs.append(partial(adamw_update, *[array[piece] for array in arrays], *numbers))
            else:
                raise ValueError(f"Model.update does not know the rule {rule}.")
        list(self.map(lambda job: job(), jobs))
        return norm

    # These three do little here.  On the GPU they copy between its memory and the host's.
    def read(self, array):
        """An array of this model's, flat_params say, as a NumPy array on the host."""
        return array

    def write(self, array, values):
        """Set an array of this model's, or a view of one, from a NumPy array of any float type."""
        array[...] = values
        self.refresh()

    def later(self, *arrays):
        """-> a function that returns these arrays.  On the GPU they are not computed yet, and that function waits for
        them.  So train.py can start the next steps before it calls it."""
        return lambda: arrays


class Decoder:
    """Continues a text with a KV cache: the keys and values of the tokens before are kept, and not computed again.

    texts, length: the number of texts, each with a cache of its own for `length` tokens.

    For one text: extend, draw and truncate.  tokens is the list of ids whose keys and values the cache holds.
    (`generate` shortens it by truncate.  Model.refresh empties it, because other weights give other keys and values.
    chat.print_tokens empties it, too.)

    For many texts: draw_rows, which empties the cache when the windows move.  With many texts tokens holds the ids of
    the first text: only their number is used, which is the same for all."""

    def __init__(self, model, texts, length):
        c = self.config = model.config
        self.model = model
        self.tokens = []
        # (L, 2, B, G, 1, length, D): the 2 are keys and values; the 1 stands where q has its R heads, so that they
        # broadcast.  The keys of one head are contiguous, as attention reads them.  np.zeros takes memory only where it
        # is written.
        self.cache = np.zeros((c.layers, 2, texts, c.kv_heads, 1, length, c.head_dim), model.dtype)
        self.pads = np.zeros((texts, 1, 1, 1, length), model.dtype)      # added to the scores: see draw_rows
        # without a backward all layers compute in the arrays of one
        self.workspace = Workspace(replace(c, layers=1), model.dtype)

    @property
    def position(self):
        """The number of tokens in the cache."""
        return len(self.tokens)

    def truncate(self, n):
        """Forget all tokens but the first n."""
        del self.tokens[n:]

    def forget(self):
        """Empty the cache."""
        self.truncate(0)

    def checked(self, tokens):
        """tokens (B,n) as an array.  They must fit the context behind those in the cache."""
        tokens = as_batch(self.config, tokens)
        assert self.position + tokens.shape[1] <= self.config.context
        return tokens

    def extend(self, tokens):
        """Append n tokens; return the logits (n,K,V) after each of them."""
        return self._read([tokens], len(tokens), self.config.predict)

    def _read(self, tokens, last, heads):
        """Append tokens (B,n) -> the logits (B*last,heads,V) after each of the last `last` tokens of each text.  It is
        the forward of training with another attention: _trunk calls block_forward for each layer, which calls
        _attention with this layer's part of the cache."""
        tokens = self.checked(tokens)
        (saved,), shared = self.workspace.buffers(*tokens.shape)        # the arrays of one layer, for all layers
        functions = [partial(self._attention, cache) for cache in self.cache]
        layers = itertools.repeat(saved)            # for each layer the same arrays
        final = self.model._trunk(tokens, layers, shared, functions, self.position)                     # (B*n,C)
        # only now: if Ctrl-C stops the line above, the cache stays as it was
        self.tokens += tokens[0].tolist()
        final = final.reshape(len(tokens), -1, self.config.dim)[:, -last:]                              # (B,last,C)
        return self.model._head_logits(final.reshape(-1, self.config.dim), heads)

    def _attention(self, cache, out, unused_P, qkv, config):
        """attention_forward of new tokens: their keys and values go to the layer's cache (2,B,G,1,length,D), and all
        keys and values so far come from it.  unused_P: the P of training; it has no column for the tokens before."""
        q, k, v = split_heads(qkv, config)
        n = q.shape[-2]
        end = self.position + n
        cache[..., self.position:end, :] = k, v         # its first axis is keys and values
        keys, values = cache[..., :end, :]
        P = np.empty((*q.shape[:-1], end), q.dtype)     # a row for each new token, a column for each token so far
        attend(by_group(out, config), P, q, keys, values, causal_mask(n, end, q.dtype) + self.pads[..., :end])

    def draw(self, tokens, last, heads, t, sampling):
        """Append tokens, and draw after each of the last ones -> ids (last, heads).  t: the position in the text for
        which head 0 draws first.  For last = 2 and heads = 3 the ids are for these positions:

                                            head 0   head 1   head 2
            after the last token but one        t        t + 1    t + 2
            after the last token                t + 1    t + 2    t + 3"""
        logits = self._read([tokens], last, heads)
        positions = np.arange(t, t + last)[:, None] + np.arange(heads)                  # (last, heads)
        return sample(logits.reshape(positions.size, -1), positions.ravel(), sampling).reshape(last, heads)

    def draw_rows(self, windows, grown, t, sampling):
        """Draw the next token of each of B texts, all at once -> ids (B,), for positions t (B,) of the texts.
        windows: B lists of ids, of each text its last ids, as many as fit the context.  grown: True if each
        window is that of the last call and one id more: then only this id is read.  Else all are read from their start.

        All texts end at the same place of the cache, so the shorter ones have pads before them.  The score of a pad is
        -1e30, which exp turns into 0.  (Not -inf: a pad is itself a query, and before it stand only pads.  All its
        scores would be -inf, and their softmax NaN.)  The positions of a text behind pads are too high, which is
        harmless: RoPE sees only distances."""
        tokens = [window[-1:] for window in windows]
        if not grown:
            self.forget()
            self.pads[...] = 0.0
            tokens = []
            longest = max(map(len, windows))
            for pads, window in zip(self.pads, windows):
                missing = longest - len(window)
                pads[..., :missing] = -1e30
                tokens.append([0] * missing + window)
        return sample(self._read(tokens, 1, 1)[:, 0], t, sampling)


# ------------------------------------------------------------------------------------------------------------
# 6. How tokens are drawn, for one text and for many
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: see sample."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0               # of the noise
    vocab: int = None           # only ids below it are drawn; None: all


def window_start(n, context):
    """Where the window of a text of n tokens starts: at 0 while the text fits.  When the text is one token too long for
    the window, the first half of the window is left out, and the rest is read anew from position 0.  For a context of
    128: n = 128 -> 0, 129 -> 64, 192 -> 64, 193 -> 128.  It is a pure function of n.  So cached decoding and
    recomputation from scratch see the same window."""
    stride = context - context // 2                 # tokens by which a full window moves on
    # n - context tokens are too many: these, rounded up to whole strides
    return max(0, math.ceil((n - context) / stride)) * stride


def gumbel(seed, t, ids):
    """The noise that draws a token (see below), for tokens `ids` (n,V) at positions t (n,) -> (n,V): a pure function of
    (seed, position, id), so it can be computed in any order, by every head, and by a GPU.  seed: an integer below 2^64,
    or one for each row.

    It takes two hashes of 64 bits, one for each round of the loop: z = hash(seed, t), then z = hash(z, id).  hash(z, n)
    is output n of the generator splitmix64 (Steele, Lea & Flood 2014) with the seed z: it is z + (n+1) gamma, whose
    bits are then mixed by two multiplications.  The upper 52 bits of the second make u, uniform in (0,1): u = (bits +
    1/2) / 2^52 is exact in float64, and never 0 or 1.  -log(-log u) has the Gumbel distribution."""
    z = np.array(seed, np.uint64).reshape(-1, 1)
    for n in (np.reshape(t, (-1, 1)), ids):
        z = z + (n.astype(np.uint64) + 1) * 0x9e3779b97f4a7c15          # gamma; all of this is modulo 2^64
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb
        z = z ^ (z >> 31)
    u = ((z >> 12) + 0.5) / 2**52
    return -np.log(-np.log(u))


# Why argmax(log p + G) draws from p (the "Gumbel-max trick"; G is the noise here).  Let E_i = -log u_i.  Then
#     log p_i + G_i = log p_i - log E_i = -log(E_i / p_i): the largest of these has the smallest E_i / p_i;
#     P(E_i > x) = P(u_i < e^-x) = e^-x, so P(E_i / p_i > x) = e^(-p_i x), with the density p_i e^(-p_i x);
#     P(i is the smallest) = integral of p_i e^(-p_i x) prod_(j != i) e^(-p_j x) dx = p_i / sum_j p_j.
# A factor common to all p cancels.  So the p that top_k and top_p leave need not add up to 1.
#
# An example of top_p = 0.7 with p = 0.5, 0.3, 0.2: the sums are 0.5, 0.8, 1.0.  An id is dropped if the sum of those
# before it has reached 0.7.  So the third is dropped, and the first two are kept.
def sample(logits, t, sampling):
    """Draw ids (n,) from logits (n,V), for positions t (n,) of the text: argmax(log p + gumbel).  temperature
    0: the largest logit, the first of equals.  top_k keeps the k largest (0: all).  Of these top_p keeps the
    likeliest ids, as many as are needed until their probabilities add up to top_p (nucleus sampling, Holtzman et al.
    2020; 1: all)."""
    z = logits[:, :sampling.vocab]
    if sampling.temperature == 0:
        return z.argmax(axis=1)
    ids = np.arange(z.shape[1])[None]           # (1,V), for all rows; with top_k or top_p each row has its own
    if sampling.top_k or sampling.top_p < 1:
        ids = np.argsort(-z, axis=1, kind="stable")[:, :sampling.top_k or None]         # (n,V or top_k)
        z = np.take_along_axis(z, ids, axis=1)                                          # (n,V or top_k), falling
    z = z.astype(np.float64)
    log_p = (z - z.max(axis=1, keepdims=True)) / sampling.temperature                   # up to a constant
    if sampling.top_p < 1:
        sums = np.cumsum(np.exp(log_p), axis=1)
        # an id is dropped if the sum of those before it has reached top_p; so the first one always stays
        dropped = sums[:, :-1] >= sampling.top_p * sums[:, -1:]
        log_p[:, 1:][dropped] = -np.inf
    best = np.argmax(log_p + gumbel(sampling.seed, t, ids), axis=1)                     # (n,)
    return np.broadcast_to(ids, log_p.shape)[np.arange(len(best)), best]


def generate_plain(model, tokens, sampling, most):
    """Continue `tokens`, a list of at least one id: yields `most` ids, one by one.  The whole window is read anew for
    each of them.  Section 7 reads only what is new."""
    text = list(tokens)
    for _ in range(most):
        window = text[window_start(len(text), model.config.context):]
        logits = model.logits([window])[:, -1, 0]                   # (1,V): of head 0, after the last token
        token = sample(logits, [len(text)], sampling).item()
        text.append(token)
        yield token


def generate_batch(model, prompts, sampling, stop=(), most=80, progress=None):
    """Continue many prompts at once: lists of at least one id each -> list of lists of ids.  Each answer has the
    tokens that generate draws for its prompt, at most `most`.  (Matrix products of another shape round differently, so
    in rare cases another token is drawn.)  generate leaves out the id in `stop` that ends a text, and this keeps it.
    sampling.seed: (B,), one for each prompt.
    progress: None, or called as progress(tokens so far, at most so many) after each step, in which each text that has
    not ended gets one.

    A text that will outgrow the context is drawn alone, because each time that a window moves its whole batch must be
    read again.  Where the memory does not hold the caches of a batch, its halves are drawn one after the other.  A
    single text that does not fit is a MemoryError."""
    context = model.config.context
    # {key: the rows of a batch}.  All rows whose window never moves have the key None.  Each other row has its own key
    batches = {}
    for row, prompt in enumerate(prompts):
        alone = row if window_start(len(prompt) + most - 1, context) else None
        batches.setdefault(alone, []).append(row)
    waiting = list(batches.values())
    answers = [[] for _ in prompts]
    while waiting:
        rows = waiting.pop()
        texts = [list(prompts[row]) for row in rows]
        own = replace(sampling, seed=np.array(sampling.seed)[rows])
        decoder = None                              # the last batch's caches are given back before new ones are made
        try:
            decoder = model.new_decoder(len(rows), min(context, max(map(len, texts)) + most))
        except MemoryError:                         # CuPy's OutOfMemoryError is one, too
            if len(rows) == 1:
                raise
            half = len(rows) // 2
            waiting += [rows[half:], rows[:half]]
            continue
        # texts of this batch whose answers have not ended.  The others go on, too, but what is drawn is thrown away
        going = range(len(rows))
        start = None
        for _ in range(most):
            lengths = list(map(len, texts))
            before = start
            start = window_start(max(lengths), context)         # 0, unless the batch is one text alone
            windows = [text[start:] for text in texts]
            drawn = decoder.draw_rows(windows, start == before, lengths, own).tolist()
            for text, token in zip(texts, drawn):
                text.append(token)
            for i in going:
                answers[rows[i]].append(drawn[i])
            going = [i for i in going if drawn[i] not in stop]
            if progress:
                progress(sum(map(len, answers)), most * len(answers))
            if not going:
                break
    return answers


# ------------------------------------------------------------------------------------------------------------
# 7. The same text in fewer steps: self-speculative decoding
# ------------------------------------------------------------------------------------------------------------

# The heads 1 to K-1 draft the tokens after the next one, and one call of decoder.draw reads all drafts.  A draft is
# accepted if it is the very token that head 0 draws there (Stern et al. 2018).  So the text is that of single steps.
# An example, with K = 4:
#
#     the window ends in               ... the
#     one call draws                   cat    and the drafts    sat   on    a
#     the next call reads              cat                      sat   on    a
#     after each of them head 0 draws  sat                      on    the   ...
#     so accepted are                                           sat   on
#
# The draft "a" is not accepted, because head 0 drew "the" in its place.  So this call gives "sat", "on" and "the".
#
# A draft is drawn with the noise that head 0 will use at its position.  The more alike the probabilities of the
# two heads are, the more often both draw the same token.
def generate(model, tokens, temperature=1.0, top_k=0, top_p=1.0, seed=None, vocab=None, stop=(), most=sys.maxsize,
             speculate=None):
    """Continue `tokens`, a list of at least one id: yields ids one by one.  It ends before the first id that is in
    `stop`, or after `most` ids.  The text is a function of the model and the arguments (seed None: a new seed), up to
    rounding (see below).  vocab: only ids below it are drawn (a tokenizer may have fewer tokens than the model has
    rows).

    model.decoder keeps what it has read.  Of a text that begins like the last one, only the rest is read.

    speculate: True: with all K heads; False: with head 0 alone; None: with model.draft_heads drafts.

    Rounding: on the CPU a product of fewer rows rounds differently.  So in rare cases another token is drawn, with
    drafts or where a part of the text was read before."""
    seed = secrets.randbits(64) if seed is None else seed % 2**64
    sampling = Sampling(temperature, top_k, top_p, seed, vocab)
    decoder = model.decoder
    context = model.config.context
    as_batch(model.config, [tokens[-context:]])     # ids out of range; a GPU's draw checks only long prompts
    K = model.config.predict
    heads = min(1 + model.draft_heads, K)
    if speculate is not None:
        heads = K if speculate else 1
    text = list(tokens)
    end = len(text) + most
    drafts = []
    while len(text) < end:
        window = text[window_start(len(text), context):]
        if decoder.tokens != window[:-1]:           # another text, or a new window: keep what both begin with
            decoder.truncate(common_length(decoder.tokens, window[:-1]))
        unread = window[decoder.position:]
        if len(unread) > 1 or len(window) + len(drafts) > context:
            # There are two reasons to drop the drafts.  They must fit the context.  And where several tokens are
            # unread, at the beginning and when the window moves, they are read alone: so the bits of this product are
            # those of a run without speculation.
            drafts = []
        ids = decoder.draw(unread + drafts, 1 + len(drafts), heads, len(text), sampling)
        drawn = ids[:, 0].tolist()                  # by head 0, after the window and after each draft
        # The drafts that head 0 drew as well are accepted, but at most `room`: the token that head 0 draws after them
        # takes a place, too.
        room = end - len(text) - 1
        accepted = common_length(drafts[:room], drawn)
        decoder.truncate(len(window) + accepted)    # the drafts that were not accepted are forgotten
        for token in drawn[:accepted + 1]:
            if token in stop:
                return
            text.append(token)
            yield token
        drafts = ids[accepted, 1:].tolist()


def common_length(a, b):
    """The number of items with which both lists begin."""
    return len(os.path.commonprefix([a, b]))        # made for paths, but it compares any two lists


# ------------------------------------------------------------------------------------------------------------
# 8. The Euler table: the layers as steps of an ODE solver
# ------------------------------------------------------------------------------------------------------------
def layer_logits(model, inputs):
    """The "logit lens" (nostalgebraist 2020) of inputs (B,T).  Yields, after the embedding and each layer, the
    residual stream x (N,C) and the logits (N,V) that head 0 gives if the layers after this one are left out."""
    model.logits(inputs)
    layers, shared = model.workspaces[0].arrays        # what this forward has left
    final = shared.final
    for x in [saved.x_in for saved in layers] + [shared.x]:
        rmsnorm_forward(final, shared.rstd, x, model.params["norm"], model.config.norm_eps)
        yield x, model._head_logits(final, 1)[:, 0]


def euler_table(model, tokens):
    """The lens, with the layers seen as steps of an ODE solver.  tokens (B,T+1) ids: in each row T inputs and their T
    targets.

    Yields L+1 rows (loss, length, ids), for the embedding and after each layer: the loss of head 0 if the
    forward stopped there; the mean over positions of |f(x)|/|x| of that layer, both substeps together (0 for the
    embedding); the three ids that it finds likeliest in the place of the last target."""
    targets = tokens[:, 1:].ravel()                 # (N,)
    before = None
    for x, logits in layer_logits(model, tokens[:, :-1]):
        if before is None:
            before = x
        best = np.argsort(-logits[-1], kind="stable")[:3].tolist()
        nll = np.logaddexp.reduce(logits, axis=1) - logits[range(len(x)), targets]      # -log softmax(logits)[target]
        length = np.linalg.norm(x - before, axis=1) / np.linalg.norm(before, axis=1)
        yield nll.mean(), length.mean(), best
        before = x


def print_euler_table(model, tokenizer, tokens):
    """A line for the embedding and for each layer; tokens (1,T+1)."""
    print(f"{tokens.size - 1} tokens read, the next of each predicted; loss in nats a token")
    print(f"{'stop after':12}{'loss':>8}{'|f(x)|/|x|':>13}   likeliest in the place of the last token")
    for i, (loss, length, best) in enumerate(euler_table(model, tokens)):
        name = f"layer {i - 1}" if i else "embedding"
        length = f"{length:.3f}" if i else ""
        best = [f'"{visible(tokenizer.tokens[token])}"' for token in best if token < tokenizer.vocab_size]
        print(f"{name:12}{loss:8.4f}{length:>13}   {'  '.join(best)}")


# ------------------------------------------------------------------------------------------------------------
# 9. The sizes small, medium and big, and the weights before training
# ------------------------------------------------------------------------------------------------------------
CONFIGS = {
    #                 dim  heads  kv_heads  layers  context  vocab
    "small":  Config(128,      4,        2,      4,     128,   512),
    "medium": Config(256,      8,        4,     12,     256,  1024),
    "big":    Config(768,     12,        4,     16,     512,  4096)}


def init_params(flat, config, seed):
    """Fill `flat` with initial values: normal(0, 0.02); the two projections into the residual stream scaled
    by 1/sqrt(2L), so that the sum of 2L increments does not grow with depth (GPT-2); gains 1.  Always drawn
    as float32 from one generator in the order of param_views, so one seed gives one model on every engine and in every
    precision.  (A tied matrix has two names there: it is drawn twice, and the second time counts.)"""
    rng = np.random.default_rng(seed)
    flat[...] = 1.0                                 # the gains; the matrices are drawn
    for name, view in param_views(flat, config).items():
        if view.ndim == 2:
            std = 0.02
            if name.endswith((".out", ".down")):
                std /= math.sqrt(2 * config.layers)
            view[...] = rng.standard_normal(view.shape, np.float32) * std


# ------------------------------------------------------------------------------------------------------------
# 10. Memory, and checks
# ------------------------------------------------------------------------------------------------------------
class Workspace:
    """The memory of one thread: the arrays of work_table for its share of the batch, and a gradient of its own."""

    def __init__(self, config, dtype):
        self.config = config
        self.flat_grads = np.zeros(param_count(config), dtype)
        self.grads = param_views(self.flat_grads, config)
        self.memory = np.empty(0, dtype)
        self.shape = None

    def buffers(self, B, T):
        """-> (for each layer its Arrays, the Arrays that all share).  The memory is kept from step to step: new memory
        of tens of megabytes costs time, because the operating system prepares each page of it at its first use."""
        if self.shape != (B, T):
            table = work_table(self.config, B, T)
            size = table_size(table)
            if size > len(self.memory):
                self.memory = np.empty(size, self.memory.dtype)
            views = table_views(self.memory, table)
            self.arrays = [layer_views(views, i) for i in range(self.config.layers)], Arrays(**views)
            self.shape = B, T
        return self.arrays


def check_tokens(config, ids, low=0):
    """ValueError for an id (or with low=-1 a target) out of range."""
    require(low <= ids.min() and ids.max() < config.vocab, f"ids must be from {low} to {config.vocab - 1}.")


def as_batch(config, tokens):
    """tokens, B lists of T ids, as an array (B,T).  ValueError for too long a text or an id out of range."""
    tokens = np.asarray(tokens)
    require(tokens.shape[1] <= config.context,
            f"{tokens.shape[1]} tokens do not fit the context of {config.context}.")
    check_tokens(config, tokens)
    return tokens


def check_batch(config, tokens, targets, counted, weights):
    """The arguments of forward -> (tokens, targets, divisor (K,), weights (B,)), as arrays.  ValueError for ids out of
    range, for too long a text, and if head 0 has no target."""
    tokens = as_batch(config, tokens)
    targets = np.asarray(targets)
    B, T = tokens.shape
    assert targets.shape == (B, T + config.predict - 1)
    check_tokens(config, targets, low=-1)
    if counted is None:
        counted = count_targets(targets, T, config.predict)
    require(counted[0], "head 0 has no counted target in the whole step: its targets are all -1.")
    divisor = np.maximum(counted, 1.0)              # a head without a target has the loss 0 / 1
    if weights is None:
        weights = np.ones(B)
    else:
        divisor[1:] = np.inf                        # x / inf = 0: the further heads have no loss and no gradient
    return tokens, targets, divisor, np.asarray(weights)


# ------------------------------------------------------------------------------------------------------------
# 11. The guided tour
# ------------------------------------------------------------------------------------------------------------
TEXT = ("It was a bright cold morning, and the old man walked down to the harbour to see whether the boats "
        "had come in. The wind had turned in the night. He counted the sails, as he had done every day for "
        "forty years.")


def main(argv):
    """A short text through the small model: tokens, shapes, the first loss, a gradient, an update, the layers."""
    Parser(description="A guided tour: a short text goes through the small model.").parse_args(argv)
    tokenizer = Tokenizer.train([TEXT], 300)
    config = replace(CONFIGS["small"], vocab=304)           # a multiple of 8, for at most 300 tokens
    ids = np.array([tokenizer.encode(TEXT)])
    T = 64
    tokens = ids[:, :T]
    targets = ids[:, 1:T + config.predict]
    print(f"1. Text to tokens: {len(TEXT.encode())} bytes -> {ids.size} tokens "
          f"of a vocabulary of {tokenizer.vocab_size}\n"
          f"   {'|'.join(tokenizer.decode([i]) for i in ids[0, :23])}|...")

    model = Model(config)
    losses = model.forward(tokens, targets)
    model.backward()
    layers, _ = model.workspaces[0].arrays
    print(f"\n2. Shapes: B=1 T={T} C={config.dim} H={config.heads} G={config.kv_heads} D={config.head_dim} "
          f"F={config.hidden} K={config.predict} V={config.vocab} L={config.layers} N=B*T={T}")
    for name, array in dict(vars(layers[0]), logits=model.logits(tokens)).items():
        print(f"   {name:12} {str(array.shape):20} root mean square {np.sqrt(np.mean(array ** 2)):.4f}")
    print("   (n1 and n2 are not quite 1: norm_eps, 1e-5, is not small beside the mean square of x, 4e-4.)\n\n"
          f"3. The first loss of head 0: {losses[0]:.4f}.  A guess that gives every token the same probability has "
          f"ln V = {math.log(config.vocab):.4f}")

    weight = model.params["layers.0.qkv"]
    entry = 255, 38                                 # of a row of v; any other would do
    totals = []
    for move in -1e-4, 1e-4:
        weight[entry] += move
        totals.append(model.forward(tokens, targets) @ config.head_weights)
        weight[entry] -= move
    print(f"4. One gradient entry, d loss / d layers.0.qkv[255, 38]:\n"
          f"   by hand {model.grads['layers.0.qkv'][entry]:.12f}, "
          f"by finite difference {(totals[1] - totals[0]) / 2e-4:.12f}")
    norm = model.update(1e-3)
    print(f"5. One AdamW step: gradient norm {norm:.4f}, loss of head 0 {losses[0]:.4f} -> "
          f"{model.forward(tokens, targets)[0]:.4f}")
    print("\n6. The Euler table: the loss if the integration stopped after each layer, and the length of its "
          "step.\n   This model has had one update, on this text; a trained model's: python chat.py --lens TEXT")
    print_euler_table(model, tokenizer, ids[:, :T + 1])


if __name__ == "__main__":
    run_script(main)
