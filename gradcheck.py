"""gradcheck.py: is every gradient of model_cpu.py right?  Finite differences say, and planted bugs test the check.

Read model_cpu.py before this.  Four runs:

    python gradcheck.py               every entry of every tensor of a tiny model that has all features
    python gradcheck.py --small       sampled entries of the real small model
    python gradcheck.py --break all   plant known bugs, one by one: is each of them caught?
    python gradcheck.py --gpu         the GPU engine against model_cpu in float64, in every precision

The idea.  A gradient is a slope: move one weight w by h and see by how much the loss f moves.  That needs the forward
alone, so it is a judge of the backward.  Expand f(w + sh) about w for s = -2, -1, 1, 2 and choose the four factors so
that the terms in h^0, h^2, h^3 and h^4 cancel:

    f'(w) = (f(w-2h) - 8 f(w-h) + 8 f(w+h) - f(w+2h)) / 12h  +  h^4 f^(5)(w) / 30 + ...

Why five points (the fifth, f(w), has the factor 0).  Two errors pull on h.  The formula's own error falls with h: as
h^4 here, as h^2 for the usual (f(w+h) - f(w-h)) / 2h.  The rounding of f, about 1e-16 of it, is divided by h and so
grows as h falls.  Measured on the tiny model, worst of all 7,248 entries:

    h               5e-6      1e-5      1e-4      2e-4      1e-3
    five points     2.5e-09   1.2e-09   1.1e-10   5.4e-11   8.8e-09
    three points    1.3e-09   3.3e-09   3.3e-07   1.3e-06   3.3e-05

Why float64.  float32 rounds f at 1e-7, and the best h (0.01) then gives 1e-4 on this model: a wrong term of that size,
such as an eps in the wrong place, would pass.  The formulas are the same in either precision, so what is proven in
float64 holds for the float32 of training, up to its rounding.

Why the error of an entry is |by hand - numeric| / max|by hand| OF ITS TENSOR.  The rounding error of the difference
quotient is about the same number for every entry, so an entry that is by chance near 0 has a large error relative to
itself and means nothing.  Over the whole model's maximum, on the other hand, a tensor of small gradients could be all
wrong and pass.

How to read a planted bug.  A wrong derivative spoils the gradient of all that lies BEFORE it in the forward, and of
nothing after it: the first tensor of the backward that is wrong says where to look.

Why wide weights (normal(0, 0.3), gains between 0.7 and 1.3).  At the usual 0.02 the scores of attention are all but 0,
its softmax all but uniform, and the gradients of q and k a hundred times below that of v, with which they share a
tensor: an error in them would weigh a hundred times less.

What finite differences cannot see: a forward that computes another model, with a backward that is right for it.  RoPE
on v in both passes, a forgotten 1/sqrt(D) in both, a target shifted by one: f is a different function then, and its
slopes agree.  So plain_losses below computes the loss once more, token by token, in loops that share no code with
model_cpu, and the losses must agree too.  What a misunderstanding common to both would hide, only judges that others
wrote can find: PyTorch and Hugging Face's Llama, in tests/peers.  Nor does the check of
the CPU look at the optimizer, at cached decoding, or at float32: see tests/test_model_cpu.py.
"""
import contextlib
import math
import sys

import model_cpu            # first: it says what to do where NumPy is missing
import model_gpu
import numpy as np
from tokenizer import Parser, run_script

STENCIL = ((-2, 1 / 12), (-1, -8 / 12), (1, 8 / 12), (2, -1 / 12))      # (shift in units of h, factor)
TINY = model_cpu.Config(dim=16, heads=4, kv_heads=2, layers=2, context=8, vocab=16, predict=3, mtp_weight=0.7)
TINY_STEP, TINY_BAR = 2e-4, 1e-8
SMALL_STEP, SMALL_BAR = 1e-3, 1e-7
LOSS_BAR = 1e-12         # of a loss against plain_losses, relative


@contextlib.contextmanager
def replaced(replacements):
    """Inside the with block, the names in model_cpu stand for these functions; after it, for their own again."""
    originals = {name: getattr(model_cpu, name) for name in replacements}
    vars(model_cpu).update(replacements)
    try:
        yield
    finally:
        vars(model_cpu).update(originals)


# ---------------------------------------------------------------------------------------------------------------------
# What is checked
# ---------------------------------------------------------------------------------------------------------------------
def make_tiny():
    """-> (model, tokens (2,7), targets (2,9)): 4 query and 2 key/value heads, 2 RoPE frequencies, 3 prediction heads, a
    length that is no power of two, a token that repeats, masked targets; row 1 has no target at all for head 2."""
    rng = np.random.default_rng(1)
    model = model_cpu.Model(TINY)
    for weight in model.params.values():
        gain = weight.ndim == 1
        weight[...] = rng.uniform(0.7, 1.3, weight.shape) if gain else 0.3 * rng.standard_normal(weight.shape)
    tokens, targets = rng.integers(0, TINY.vocab, (2, 7)), rng.integers(0, TINY.vocab, (2, 9))
    tokens[0, 5] = tokens[0, 1]
    targets[0, 3] = -1
    targets[1, 2:] = -1
    return model, tokens, targets


def make_small():
    """-> (model, tokens (2,70), targets): the small configuration at its own initial weights."""
    config, T = model_cpu.CONFIGS["small"], 70
    rng = np.random.default_rng(1)
    tokens, targets = rng.integers(0, config.vocab, (2, T)), rng.integers(0, config.vocab, (2, T + config.predict - 1))
    tokens[:, 5] = tokens[:, 1]
    targets[0, ::9] = -1
    return model_cpu.Model(config), tokens, targets


def gradients(model, tokens, targets):
    """dict name -> gradient by hand.  Each row of the batch is a micro-batch of its own, so that accumulation and the
    divisor common to the whole step are checked as well; the finite differences take the whole batch at once."""
    counted = model_cpu.count_targets(targets, tokens.shape[1], model.config.predict)
    model.flat_grads[...] = 0.0
    for b in range(len(tokens)):
        model.forward(tokens[b:b + 1], targets[b:b + 1], counted)
        model.backward()
    return {name: gradient.copy() for name, gradient in model.grads.items()}


def slope(loss, weight, index, h):
    """d loss() / d weight[index] by the five-point stencil."""
    centre, total = weight[index], 0.0
    for shift, factor in STENCIL:
        weight[index] = centre + shift * h
        total += factor * loss()
    weight[index] = centre
    return total / h


def choose_entries(gradient, limit):
    """Indices to check: all of them, or the largest gradient and limit-1 others drawn at random."""
    if limit is None or limit >= gradient.size:
        return list(np.ndindex(gradient.shape))
    drawn = np.random.default_rng(0).choice(gradient.size, limit - 1, replace=False)
    return [np.unravel_index(i, gradient.shape) for i in (np.argmax(np.abs(gradient)), *drawn)]


def check_tensors(model, tokens, targets, h, limit=None):
    """Yields (name, shape, entries checked, worst relative error, index of the worst) for every tensor in turn."""
    def loss():
        return model.forward(tokens, targets) @ model.config.head_weights

    for name, gradient in gradients(model, tokens, targets).items():
        entries = choose_entries(gradient, limit)
        numeric = np.array([slope(loss, model.params[name], index, h) for index in entries])
        by_hand = np.array([gradient[index] for index in entries])
        # the tiny number: a gradient that is 0 throughout, where none should be, is an error, not a division by 0
        errors = np.abs(by_hand - numeric) / (np.abs(gradient).max() + np.finfo(float).tiny)
        errors[np.isnan(errors)] = np.inf
        worst = np.argmax(errors)
        yield name, gradient.shape, len(entries), errors[worst], tuple(map(int, entries[worst]))


# ---------------------------------------------------------------------------------------------------------------------
# The loss once more: the equations of the model in loops, sharing nothing with model_cpu but the weights
# ---------------------------------------------------------------------------------------------------------------------
def plain_norm(x, gain, eps):
    return x / math.sqrt(x @ x / len(x) + eps) * gain


def plain_rotation(x, t, theta):
    """RoPE with complex numbers: entries i and i + D/2 are one number, which position t turns by t * theta^(-2i/D)."""
    half = len(x) // 2
    turned = [complex(x[i], x[i + half]) * np.exp(1j * t * theta ** (-i / half)) for i in range(half)]
    return np.array([z.real for z in turned] + [z.imag for z in turned])


def plain_losses(w, config, tokens, targets):
    """(K,) losses.  Token by token, head by head: a token reads the lists of keys and values so far, so there is no
    mask and no batch to go wrong."""
    c, D, R = config, config.dim // config.heads, config.heads // config.kv_heads
    loss, count = [0.0] * c.predict, [0] * c.predict

    def norm(x, name):
        return plain_norm(x, w[name], c.norm_eps)

    def turned(x, t):
        return plain_rotation(x, t, c.rope_theta)

    for b in range(len(tokens)):
        keys, values = [[] for _ in range(c.layers)], [[] for _ in range(c.layers)]
        for t, token in enumerate(tokens[b]):
            x = w["embed"][token]
            for i in range(c.layers):
                parts = (w[f"layers.{i}.qkv"] @ norm(x, f"layers.{i}.norm1")).reshape(-1, D)             # (H+2G,D)
                keys[i].append([turned(parts[c.heads + g], t) for g in range(c.kv_heads)])
                values[i].append([parts[c.heads + c.kv_heads + g] for g in range(c.kv_heads)])
                y = []
                for h in range(c.heads):
                    q, g = turned(parts[h], t), h // R
                    p = [math.exp(q @ k[g] / math.sqrt(D)) for k in keys[i]]
                    y.append(sum(p_s * v[g] for p_s, v in zip(p, values[i])) / sum(p))
                x = x + w[f"layers.{i}.out"] @ np.concatenate(y)
                gate, up = (w[f"layers.{i}.gate_up"] @ norm(x, f"layers.{i}.norm2")).reshape(2, -1)
                x = x + w[f"layers.{i}.down"] @ (gate / (1 + np.exp(-gate)) * up)
            logits = (w["heads"] @ norm(x, "norm")).reshape(c.predict, c.vocab)
            for k, target in enumerate(targets[b][t:t + c.predict]):
                if target >= 0:
                    loss[k] += math.log(sum(np.exp(logits[k]))) - logits[k][target]
                    count[k] += 1
    return np.array([total / max(n, 1) for total, n in zip(loss, count)])


def loss_error(model, tokens, targets):
    """The largest relative difference of a head's loss from plain_losses."""
    plain = plain_losses(model.params, model.config, tokens, targets)
    error = np.abs(model.forward(tokens, targets) / plain - 1).max()
    return error if math.isfinite(error) else math.inf


# ---------------------------------------------------------------------------------------------------------------------
# Known bugs.  Each function tells its mistake in one line and returns the functions of model_cpu to replace, by name.
# First those that leave the forward as it is, which the slopes must show.
# ---------------------------------------------------------------------------------------------------------------------
def rope_sign():
    """The backward turns the gradient by the same angle again, instead of back."""
    return {"rope_backward": model_cpu.rope_forward}


def attention_twins(forward_power=-0.5, backward_power=-0.5, future=0, delta=1.0, group=None):
    """Attention with a knob for each mistake; right as the knobs stand.  forward_power, backward_power:
    scale = D^power; future: how many later keys a query sees; delta: factor of the softmax's second term; group: how
    the gradients (B,G,R,T,D) of the query heads of a group become that of their key or value head (B,G,1,T,D)."""
    group = group or (lambda gradient: gradient.sum(axis=2, keepdims=True))

    def forward(out, P, qkv, heads, kv_heads):
        q, k, v = model_cpu.split_heads(qkv, heads, kv_heads)
        S = q @ k.swapaxes(-1, -2) * q.shape[-1] ** forward_power
        e = np.exp(np.where(np.tri(*S.shape[-2:], k=future) > 0, S, -np.inf))
        P[...] = e / e.sum(axis=-1, keepdims=True)
        out[...] = (P @ v).transpose(0, 3, 1, 2, 4).reshape(out.shape)            # (B,G,R,T,D) -> (B,T,H*D)

    def backward(dqkv, dout, out, P, qkv, heads, kv_heads, work):
        q, k, v = model_cpu.split_heads(qkv, heads, kv_heads)
        dq, dk, dv = model_cpu.split_heads(dqkv, heads, kv_heads)
        B, G, R, T, D = q.shape
        dO = dout.reshape(B, T, G, R, D).transpose(0, 2, 3, 1, 4)
        dP = dO @ v.swapaxes(-1, -2)
        dS = P * (dP - delta * (P * dP).sum(axis=-1, keepdims=True)) * D ** backward_power
        dq[...] = dS @ k
        dk[...] = group(dS.swapaxes(-1, -2) @ q)
        dv[...] = group(P.swapaxes(-1, -2) @ dO)

    return {"attention_forward": forward, "attention_backward": backward}


def group_not_summed():
    """The query heads of a group write their gradient of k and v one over the other; only the last one's stays."""
    return attention_twins(group=lambda gradient: gradient[:, :, -1:])


def backward_scale():
    """The backward of attention forgets the factor 1/sqrt(D)."""
    return attention_twins(backward_power=0.0)


def softmax_delta():
    """The derivative of the softmax taken as P dP: its second term, which makes each row sum to 0, is forgotten."""
    return attention_twins(delta=0.0)


def residual_dropped():
    """x + f(x) differentiated as f(x): the gradient that passes straight through is lost."""
    original = model_cpu.block_backward

    def block_backward(dx, *arguments):
        straight = dx.copy()
        original(dx, *arguments)
        dx -= straight
    return {"block_backward": block_backward}


def norm_projection():
    """RMSNorm differentiated as if 1/rms were a constant: the projection term is missing."""
    original = model_cpu.rmsnorm_backward

    def rmsnorm_backward(dx, dgain, dout, x, rstd, gain):
        original(dx, dgain, dout, x, rstd, gain)
        dx[...] = dout * gain * rstd[:, None]
    return {"rmsnorm_backward": rmsnorm_backward}


def norm_gain():
    """The gradient of RMSNorm's gain computed from x, where the normalised x belongs."""
    original = model_cpu.rmsnorm_backward

    def rmsnorm_backward(dx, dgain, dout, x, rstd, gain):
        original(dx, np.zeros_like(dgain), dout, x, rstd, gain)
        dgain += (dout * x).sum(axis=0)
    return {"rmsnorm_backward": rmsnorm_backward}


def swiglu_slope():
    """The derivative of g * sigmoid(g) taken as sigmoid(g): the product rule's other half is forgotten."""
    def swiglu_backward(dgate_up, dout, sigmoid, gate_up, work):
        gate, up = np.split(gate_up, 2, axis=1)
        dgate_up[...] = np.concatenate([dout * up * sigmoid, dout * gate * sigmoid], axis=1)
    return {"swiglu_backward": swiglu_backward}


def embedding_repeat():
    """dembed[tokens] += dout: where a token occurs twice, NumPy adds only the last of its rows."""
    def embedding_backward(dembed, dout, tokens):
        dembed[tokens] += dout
    return {"embedding_backward": embedding_backward}


def gradient_overwritten():
    """A weight's gradient is written, not added to: the second micro-batch wipes out the first."""
    def linear_backward(dx, dw, dout, x, w):
        np.matmul(dout, w, out=dx)
        dw[...] = dout.T @ x
    return {"linear_backward": linear_backward}


def micro_divisor():
    """A micro-batch divides its loss by the count of its own targets, not of the whole step's."""
    forward, backward = model_cpu.cross_entropy_forward, model_cpu.cross_entropy_backward

    def own(head_targets):
        return np.maximum((head_targets >= 0).sum(axis=0), 1)

    def cross_entropy_forward(losses, exp_sum, logits, head_targets, divisor):
        forward(losses, exp_sum, logits, head_targets, own(head_targets))

    def cross_entropy_backward(e, exp_sum, head_targets, divisor, head_weights):
        backward(e, exp_sum, head_targets, own(head_targets), head_weights)
    return {"cross_entropy_forward": cross_entropy_forward, "cross_entropy_backward": cross_entropy_backward}


def masked_pulled():
    """A masked target is left in the backward, where index -1 silently means the last token of the vocabulary."""
    original = model_cpu.cross_entropy_backward

    def cross_entropy_backward(e, exp_sum, head_targets, divisor, head_weights):
        original(e, exp_sum, head_targets % e.shape[-1], divisor, head_weights)
    return {"cross_entropy_backward": cross_entropy_backward}


def head_weight():
    """The backward forgets that the extra heads count for less than head 0."""
    original = model_cpu.cross_entropy_backward

    def cross_entropy_backward(e, exp_sum, head_targets, divisor, head_weights):
        original(e, exp_sum, head_targets, divisor, np.ones_like(head_weights))
    return {"cross_entropy_backward": cross_entropy_backward}


# Now those that change the forward.  Where the backward fits it, the slopes agree, and only plain_losses can tell.
def rope_on_v():
    """RoPE turns v as well as q and k."""
    def rotated_part(qkv, config):
        return qkv.reshape(*qkv.shape[:2], -1, config.head_dim)
    return {"rotated_part": rotated_part}


def rope_layout():
    """RoPE turns the neighbours 2i and 2i+1 (the paper's layout, GPT-J's) in a model whose pairs are i and i + D/2."""
    def rope_forward(x, cos, sin):
        half = x.shape[-1] // 2
        cos, sin = cos[..., half:], sin[..., half:]         # (T,1,D/2)
        even, odd = x[..., 0::2].copy(), x[..., 1::2].copy()
        x[..., 0::2] = even * cos - odd * sin
        x[..., 1::2] = odd * cos + even * sin
    return {"rope_forward": rope_forward}                   # rope_backward calls it, with -sin


def no_scale():
    """1/sqrt(D) forgotten in both passes."""
    return attention_twins(forward_power=0.0, backward_power=0.0)


def mask_off_by_one():
    """A query sees one key of the future: the token it is to predict."""
    return attention_twins(future=1)


def gate_up_swapped():
    """silu(up) * gate in place of silu(gate) * up: the two halves of one matrix, taken in the wrong order."""
    originals = {name: getattr(model_cpu, name) for name in ("swiglu_forward", "swiglu_apply", "swiglu_backward")}

    def swap(halves):
        return np.roll(halves, halves.shape[1] // 2, axis=1)

    def swiglu_forward(out, sigmoid, gate_up):
        originals["swiglu_forward"](out, sigmoid, swap(gate_up))

    def swiglu_apply(out, sigmoid, gate_up):
        originals["swiglu_apply"](out, sigmoid, swap(gate_up))

    def swiglu_backward(dgate_up, dout, sigmoid, gate_up, work):
        originals["swiglu_backward"](dgate_up, dout, sigmoid, swap(gate_up), work)
        dgate_up[...] = swap(dgate_up)
    return {"swiglu_forward": swiglu_forward, "swiglu_apply": swiglu_apply, "swiglu_backward": swiglu_backward}


def norm_eps():
    """RMSNorm's eps added to the root, as Adam has it, not to the mean square under the root."""
    def rmsnorm_forward(out, rstd, x, gain, eps):
        rstd[...] = 1 / (np.sqrt((x * x).mean(axis=1)) + eps)
        model_cpu.rmsnorm_apply(out, x, rstd, gain)
    return {"rmsnorm_forward": rmsnorm_forward}


def target_shift():
    """The extra heads all learn the next token but one: head k reads the targets from 1, not from k."""
    def head_targets(targets, T, K):
        return np.stack([targets[:, min(k, 1):min(k, 1) + T] for k in range(K)], axis=-1).reshape(-1, K)
    return {"head_targets": head_targets}


def masked_counted():
    """The divisor counts the masked targets too, so the loss of a masked batch looks better than it is."""
    def count_targets(targets, T, K):
        return np.full(K, len(targets) * T)
    return {"count_targets": count_targets}


BUGS = {bug.__name__: bug for bug in (
    rope_sign, group_not_summed, backward_scale, softmax_delta, residual_dropped, norm_projection, norm_gain,
    swiglu_slope, embedding_repeat, gradient_overwritten, micro_divisor, masked_pulled, head_weight,
    rope_on_v, rope_layout, no_scale, mask_off_by_one, gate_up_swapped, norm_eps, target_shift, masked_counted)}


# ---------------------------------------------------------------------------------------------------------------------
# The runs on the CPU, each -> True if all is well
# ---------------------------------------------------------------------------------------------------------------------
def run_check(model, tokens, targets, h, bar, limit=None):
    """Print a row per tensor, then the overall figures."""
    error = loss_error(model, tokens, targets)
    print(f"{'tensor':18} {'shape':>12} {'checked':>8} {'worst error':>12}   at")
    worst, checked = 0.0, 0
    for name, shape, count, tensor_error, index in check_tensors(model, tokens, targets, h, limit):
        size = " x ".join(map(str, shape))
        print(f"{name:18} {size:>12} {count:8d} {tensor_error:12.1e}   {list(index)}"
              + ("   <-- above the bar" if tensor_error > bar else ""), flush=True)
        worst, checked = max(worst, tensor_error), checked + count
    print(f"losses against the loops: worst relative error {error:.1e} (bar {LOSS_BAR:.0e})")
    total = model_cpu.param_count(model.config)
    print(f"overall: {checked} of {total} entries, worst relative error {worst:.1e} (bar {bar:.0e})")
    good = bool(error <= LOSS_BAR and worst <= bar)
    print("all within the bars" if good else "FAILED")
    return good


def is_caught(replacements, limit=40):
    """Plant the replacements in the tiny model and print what shows it."""
    with replaced(replacements):
        problem = make_tiny()
        error = loss_error(*problem)
        shown = [(tensor_error, name) for name, _, _, tensor_error, _ in check_tensors(*problem, TINY_STEP, limit)
                 if tensor_error > TINY_BAR]
    if error > LOSS_BAR:
        print(f"    the losses: {error:.1e} from the loops'")
    if shown:
        print(f"    {len(shown)} tensors of {len(problem[0].grads)}: "
              + ", ".join(f"{name} {tensor_error:.1e}" for tensor_error, name in sorted(shown, reverse=True)))
    return bool(shown) or error > LOSS_BAR


def run_breaks(names):
    """Plant each bug.  First none at all, or "caught" would mean nothing."""
    if is_caught({}):
        print("the check fails with no bug planted; run python gradcheck.py")
        return False
    caught = 0
    for name in names:
        print(f"{name}: {BUGS[name].__doc__}", flush=True)
        if is_caught(BUGS[name]()):
            caught += 1
        else:
            print("    NOT CAUGHT")
    print(f"caught {caught} of {len(names)}")
    return caught == len(names)


# ---------------------------------------------------------------------------------------------------------------------
# The GPU engine against model_cpu in float64.  Finite differences would drown in fp32's rounding; but the reference's
# gradient is proven, so it is compared with that, tensor by tensor, by relative L2: |gpu - reference| / |reference|.
# ---------------------------------------------------------------------------------------------------------------------
GPU_BARS = {"fp32": (2e-6, 1e-6), "tf32": (2e-3, 1e-4), "bf16": (2e-2, 1e-3)}    # whole gradient; loss of each head
LADDER_T = (1, 2, 63, 64, 65, 127, 137, 512, 1000, 2048)
LADDER_BARS = {"fp32": 2e-6, "tf32": 2e-3, "bf16": 1e-2}          # of the attention output and of its gradient


def distance(a, b):
    """Relative L2 of a, an array of any library, from the NumPy array b."""
    a = np.asarray(a.get() if hasattr(a, "get") else a, np.float64)
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), np.finfo(float).tiny)


def make_wide(config, std=None):
    """-> (model in float64, tokens (2,256), targets): the initial weights, or with std wide ones, as after training."""
    rng = np.random.default_rng(1)
    model = model_cpu.Model(config)
    if std is not None:
        for weight in model.params.values():
            weight[...] = std * rng.standard_normal(weight.shape) + (weight.ndim == 1)
    # the GPU stores float32: the reference starts from the same numbers
    model.write(model.flat_params, model.flat_params.astype(np.float32))
    tokens, targets = rng.integers(0, config.vocab, (2, 256)), rng.integers(0, config.vocab, (2, 256 + config.predict - 1))
    targets[0, ::7] = -1
    return model, tokens, targets


def gpu_step(model, tokens, targets):
    """-> (losses, dict of gradients), on the host."""
    losses = model.forward(tokens, targets).get()
    model.backward()
    return losses, {name: gradient.get() for name, gradient in model.grads.items()}


def peer_errors(reference, tokens, targets, precision):
    """The same gradient by PyTorch's autograd in this precision: its relative L2 from the reference, whole."""
    import os
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "tests", "peers"))
    import torch
    import torch_twin
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
    twin = torch_twin.Twin(reference.config, reference.params).to("cuda")
    losses = torch_twin.make_losses(twin, compiled=False, autocast=torch.bfloat16 if precision == "bf16" else None)
    losses(torch.from_numpy(tokens).to("cuda"), torch.from_numpy(targets).to("cuda"))[1].backward()
    grads = {name: twin.weights[name.replace(".", "_")].grad.double().cpu().numpy() for name in reference.grads}
    return distance(np.concatenate([g.reshape(-1) for g in grads.values()]), reference.flat_grads)


def run_gpu_gradients(config, precisions, std, peer):
    """A row per tensor, a column per precision; then losses, the whole gradient, and the same step twice."""
    reference, tokens, targets = make_wide(config, std)
    losses = reference.forward(tokens, targets)
    reference.backward()
    columns, good = {}, True
    for precision in precisions:
        model = model_gpu.Model(config, precision=precision)
        model.write(model.flat_params, reference.flat_params)
        gpu_losses, gradients = gpu_step(model, tokens, targets)
        whole = distance(np.concatenate([g.reshape(-1) for g in gradients.values()]), reference.flat_grads)
        loss_error = np.abs(gpu_losses / losses - 1).max()
        model.flat_grads[...] = 0
        again = gpu_step(model, tokens, targets)
        same = all(np.array_equal(gradients[name], again[1][name]) for name in gradients)
        columns[precision] = {**{name: distance(g, reference.grads[name]) for name, g in gradients.items()},
                              "whole gradient": whole, "losses": loss_error, "twice the same bits": same}
        bar, loss_bar = GPU_BARS[precision]
        if std is None:
            good &= whole <= bar and loss_error <= loss_bar and all(
                columns[precision][name] <= 2 * bar for name in gradients)
        good &= same
        if peer:
            columns[precision]["PyTorch's whole"] = theirs = peer_errors(reference, tokens, targets, precision)
            columns[precision]["ours / PyTorch's"] = whole / theirs
            good &= std is None or whole <= 1.5 * theirs
        del model
    print(f"{'initial' if std is None else f'wide ({std})'} weights, {config.layers} layers of width {config.dim}, B 2 x T 256; "
          f"relative L2 from float64" + ("; bars " + ", ".join(f"{p} {GPU_BARS[p][0]:.0e}" for p in precisions)
                                         if std is None else ""))
    for row in next(iter(columns.values())):
        cells = [columns[p][row] for p in precisions]
        print(f"  {row:20}" + "".join(f"{str(bool(x)) if isinstance(x, (bool, np.bool_)) else f'{x:.2e}':>12}" for x in cells))
    print("", flush=True)
    return good


def run_gpu_ladder(precisions):
    """flash = attention as it is defined, at every length, head width and group that the kernels claim, both ways."""
    import cupy
    worst = {}
    for precision in precisions:
        for D in (32, 64, 128):
            for group in (1, 2, 3, 4):
                config = model_cpu.Config(dim=2 * group * D, heads=2 * group, kv_heads=2, layers=1, context=2048, vocab=8)
                gpu = model_gpu.Gpu(config, precision, "cublas")
                for T in LADDER_T:
                    errors = attention_errors(cupy, gpu, config, B=2 if T < 1000 else 1, T=T)
                    worst[precision, D] = max(worst.get((precision, D), (0,)), (*errors, T, group))
    good = True
    print("attention: flash against float64, worst of T in " + ", ".join(map(str, LADDER_T)) + " and H/G in 1, 2, 3, 4")
    for (precision, D), (error, forward, backward, T, group) in worst.items():
        good &= error <= LADDER_BARS[precision]
        print(f"  {precision} D {D:3d}   output {forward:.2e}   gradient {backward:.2e}   (T {T}, H/G {group}; bar "
              f"{LADDER_BARS[precision]:.0e})", flush=True)
    return good


def attention_errors(cupy, gpu, config, B, T):
    """-> (the larger, error of the output, error of dqkv) of the GPU's attention at (B,T)."""
    rng, c = np.random.default_rng(T), config
    qkv, dout = rng.standard_normal((B, T, c.qkv_width)), rng.standard_normal((B, T, c.dim))

    def to_gpu(array):
        bits = np.ascontiguousarray(array, np.float32)
        if gpu.precision == "bf16":                   # round to nearest even, as the kernels do
            word = bits.view(np.uint32)
            bits = ((word + 0x7FFF + (word >> 16 & 1)) >> 16).astype(np.uint16)
        return cupy.asarray(bits.reshape(B * T, -1))

    def to_host(array):
        array = array.get()
        return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array

    on_gpu = to_gpu(qkv), to_gpu(dout)
    qkv, dout = (to_host(array).astype(np.float64).reshape(B, T, -1) for array in on_gpu)
    out, dqkv = np.empty_like(dout), np.empty_like(qkv)
    P = np.zeros((B, c.kv_heads, c.heads // c.kv_heads, T, T))
    model_cpu.attention_forward(out, P, qkv, c.heads, c.kv_heads)
    model_cpu.attention_backward(dqkv, dout, out, P, qkv, c.heads, c.kv_heads, np.empty_like(P))
    gpu_out, lse = cupy.empty((B * T, c.dim), on_gpu[0].dtype), cupy.empty((B, c.heads, T), np.float32)
    gpu_dqkv, delta = cupy.empty((B * T, c.qkv_width), on_gpu[0].dtype), cupy.empty((B, c.heads, T), np.float32)
    model_gpu.attention_forward(gpu, gpu_out, lse, on_gpu[0], B, T)
    model_gpu.attention_backward(gpu, gpu_dqkv, on_gpu[1], gpu_out, lse, on_gpu[0], B, T, delta)
    forward = distance(to_host(gpu_out).reshape(out.shape), out)
    backward = distance(to_host(gpu_dqkv).reshape(dqkv.shape), dqkv)
    return max(forward, backward), forward, backward


def run_gpu_equivalence(config):
    """cached = whole, our products = cuBLAS's: one fp32 model computed in several ways."""
    reference, tokens, targets = make_wide(config)
    losses = reference.forward(tokens, targets)
    reference.backward()
    good = True
    print("the same model by other ways, fp32, relative L2 of the gradient (of the logits, for the cache) from float64")
    # our product adds K numbers one after the other, cuBLAS in blocks: two or three times the rounding
    for name, options, factor in [("cuBLAS's products", {}, 1), ("our products", {"matmul": "ours"}, 3)]:
        model = model_gpu.Model(config, precision="fp32", **options)
        model.write(model.flat_params, reference.flat_params)
        gpu_losses, gradients = gpu_step(model, tokens, targets)
        error = distance(np.concatenate([g.reshape(-1) for g in gradients.values()]), reference.flat_grads)
        good &= error <= factor * GPU_BARS["fp32"][0] and np.abs(gpu_losses / losses - 1).max() <= GPU_BARS["fp32"][1]
        print(f"  {name:20} {error:.2e}   bar {factor * GPU_BARS['fp32'][0]:.0e}", flush=True)
    expected = reference.logits(tokens[:1])[0]
    for cuts in ([256], [1] * 256, [100, 4, 4, 148]):
        model.position, rows = 0, []
        for n in cuts:
            rows.append(model.extend(tokens[0, model.position:model.position + n]))
        error = distance(np.concatenate(rows), expected)
        good &= error <= 2e-6
        print(f"  cache, {len(cuts):3d} calls     {error:.2e}   bar 2e-06", flush=True)
    return good


def run_gpu(peer):
    """All of the above, on four layers of the big model's width."""
    import dataclasses
    reason = model_gpu.why_no_gpu()
    if reason:
        raise ValueError(reason)
    precisions = ("fp32", "tf32", "bf16") if model_gpu.default_precision() == "bf16" else ("fp32",)
    config = dataclasses.replace(model_cpu.CONFIGS["big"], layers=4)
    results = [run_gpu_gradients(config, precisions, None, peer), run_gpu_gradients(config, precisions, 0.06, peer),
               run_gpu_ladder(precisions), run_gpu_equivalence(config)]
    print("all within the bars" if all(results) else "NOT all within the bars")
    return all(results)


def main(argv):
    parser = Parser(
        description="Check the gradients of model_cpu.py against finite differences. With no option: every entry of a "
                    f"tiny model, to {TINY_BAR:.0e}. Exit code 1: an error above the bar, or a planted bug not caught.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--small", action="store_true",
                       help=f"sampled entries of the small model at its initial weights, to {SMALL_BAR:.0e} (measured: "
                            "5e-9; its gradients are smaller, and so nearer to the rounding of the loss)")
    which.add_argument("--break", dest="bug", choices=["all", *BUGS], metavar="NAME",
                       help="plant this bug (all: one after the other) and see that it is caught")
    which.add_argument("--list", action="store_true", help="the names of the bugs, with their stories")
    which.add_argument("--gpu", action="store_true", help="the GPU engine against model_cpu in float64")
    parser.add_argument("--peer", action="store_true", help="with --gpu: PyTorch's error beside ours")
    args = parser.parse_args(argv)
    if args.peer and not args.gpu:
        parser.error("--peer goes with --gpu")

    if args.list:
        for name, bug in BUGS.items():
            print(f"{name:20} {bug.__doc__}")
        return 0
    if args.gpu:
        return 0 if run_gpu(args.peer) else 1
    if args.small:
        return 0 if run_check(*make_small(), SMALL_STEP, SMALL_BAR, limit=4) else 1
    if args.bug:
        return 0 if run_breaks(BUGS if args.bug == "all" else [args.bug]) else 1
    return 0 if run_check(*make_tiny(), TINY_STEP, TINY_BAR) else 1


if __name__ == "__main__":
    run_script(main, to_the_end=True)
