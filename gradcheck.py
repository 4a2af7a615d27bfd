"""gradcheck.py: is every gradient of model_cpu.py right?  Finite differences say, and planted bugs test the
check.

Read model_cpu.py before this.  Five runs:

    python gradcheck.py               every entry of every tensor of a tiny model that has all features
    python gradcheck.py --small       sampled entries of the real small model
    python gradcheck.py --break all   plant known bugs, one by one: is each of them caught?
    python gradcheck.py --gpu         the GPU engine's gradients against float64, in every precision
    python gradcheck.py --exercise linear      write this function yourself; it is compared with the original

The idea.  A gradient is a slope: move one weight w by h and see by how much the loss f moves.  That needs the
forward alone, so it is a judge of the backward.  Expand f(w + sh) about w for s = -2, -1, 1, 2 and choose the
four factors so that the terms in h^0, h^2, h^3 and h^4 cancel:

    f'(w) = (f(w-2h) - 8 f(w-h) + 8 f(w+h) - f(w+2h)) / 12h  +  h^4 f^(5)(w) / 30 + ...

Why five points (the fifth, f(w), has the factor 0).  Two errors pull on h.  The formula's own error falls
with h: as h^4 here, as h^2 for the usual (f(w+h) - f(w-h)) / 2h.  The rounding of f, about 1e-16 of it, is
divided by h and so grows as h falls.  Measured on the tiny model, worst of all 7,248 entries:

    h               5e-6      1e-5      1e-4      2e-4      1e-3
    five points     2.5e-09   1.2e-09   1.1e-10   5.4e-11   8.8e-09
    three points    1.3e-09   3.3e-09   3.3e-07   1.3e-06   3.3e-05

Why float64.  float32 rounds f at 1e-7, and the best h (0.01) then gives 1e-4 on this model: a wrong term of
that size, such as an eps in the wrong place, would pass.  The formulas are the same in either precision, so
what is proven in float64 holds for the float32 of training, up to its rounding.

Why the error of an entry is |by hand - numeric| / max|by hand| OF ITS TENSOR.  The rounding error of the
difference quotient is about the same number for every entry, so an entry that is by chance near 0 has a large
error relative to itself and means nothing.  Over the whole model's maximum, on the other hand, a tensor of
small gradients could be all wrong and pass.

How to read a planted bug.  A wrong derivative spoils the gradient of all that lies BEFORE it in the forward,
and of nothing after it: the first tensor of the backward that is wrong says where to look.

Why wide weights (normal(0, 0.3), gains between 0.7 and 1.3).  At the usual 0.02 the scores of attention are
all but 0, its softmax all but uniform, and the gradients of q and k a hundred times below that of v, with
which they share a tensor: an error in them would weigh a hundred times less.

What finite differences cannot see: a forward that computes another model, with a backward that is right for
it.  RoPE on v in both passes, a forgotten 1/sqrt(D) in both, a target shifted by one: f is a different
function then, and its slopes agree.  So plain_losses below computes the loss once more, token by token, in
loops that share no code with model_cpu, and the losses must agree too.  What a misunderstanding common to
both would hide, only judges that others wrote can find: PyTorch and Hugging Face's Llama, in tests/peers.
Nor does the check of the CPU look at the optimizer, at cached decoding, or at float32: see
tests/test_model_cpu.py; and tests/test_on_gpu.py for what --gpu leaves out.
"""
import copy
import dataclasses
import functools
import inspect
import math
import os
import re
import runpy
import sys
import traceback
import unittest.mock

import model_cpu            # first: it says what to do where NumPy is missing
import model_gpu
import numpy as np
from model_cpu import CONFIGS, slope
from script import Parser, run_script, write_file
from tokenizer import Tokenizer, learn_merges

TINY = model_cpu.Config(dim=16, heads=4, kv_heads=2, layers=2, context=8, vocab=16, predict=3, mtp_weight=0.7)
TIED = dataclasses.replace(TINY, layers=1, predict=1, hidden=24, tied=True)     # as other people's models are
TINY_STEP = 2e-4
TINY_BAR = 1e-8
SMALL_STEP = 1e-3
SMALL_BAR = 1e-7
LOSS_BAR = 1e-12         # of a loss against plain_losses, relative


# ------------------------------------------------------------------------------------------------------------
# What is checked
# ------------------------------------------------------------------------------------------------------------
def draw_batch(rng, config, T):
    """-> tokens (2,T), targets (2,T+K-1), drawn at random."""
    return [rng.integers(0, config.vocab, (2, width)) for width in (T, T + config.predict - 1)]


def make_tiny(config):
    """-> (model, tokens (2,7), targets (2,9)), a problem that has every feature.  With TINY: 4 query and 2
    key/value heads, 2 RoPE frequencies, 3 prediction heads, a length that is no power of two, a token that
    repeats, masked targets; row 1 has no target at all for head 2.  (TIED has one head.)"""
    rng = np.random.default_rng(1)
    model = model_cpu.Model(config)
    for weight in model.params.values():
        if weight.ndim == 1:
            weight[...] = rng.uniform(0.7, 1.3, weight.shape)
        else:
            weight[...] = 0.3 * rng.standard_normal(weight.shape)
    tokens, targets = draw_batch(rng, config, T=7)
    tokens[0, 5] = tokens[0, 1]
    targets[0, 3] = targets[1, 2:] = -1
    return model, tokens, targets


def make_problem(config, std=None, T=256):
    """-> (model in float64, tokens (2,T), targets), a problem of any size.  The weights are the initial ones,
    or with std wide ones, as after training."""
    rng = np.random.default_rng(1)
    model = model_cpu.Model(config)
    if std:
        for weight in model.params.values():
            weight[...] = std * rng.standard_normal(weight.shape) + (weight.ndim == 1)      # gains are near 1
    # the GPU stores float32: the reference starts from the same numbers
    model.write(model.flat_params, model.flat_params.astype(np.float32))
    tokens, targets = draw_batch(rng, config, T)
    tokens[:, 5] = tokens[:, 1]
    targets[0, ::7] = -1
    return model, tokens, targets


def gradients(model, tokens, targets):
    """dict name -> gradient by hand.  Each row of the batch is a micro-batch of its own, so that accumulation
    and the divisor common to the whole step are checked as well; the finite differences take the whole batch
    at once."""
    counted = model_cpu.count_targets(targets, tokens.shape[1], model.config.predict)
    model.flat_grads[...] = 0.0
    for b in range(len(tokens)):
        model.forward(tokens[b:b + 1], targets[b:b + 1], counted)
        model.backward()
    return {name: model.grads[name].copy() for name, _ in model_cpu.param_table(model.config)}


def choose_entries(gradient, limit):
    """Indices to check: all of them, or the largest gradient and limit-1 others drawn at random."""
    if limit is None or limit >= gradient.size:
        return list(np.ndindex(gradient.shape))
    drawn = np.random.default_rng(0).choice(gradient.size, limit - 1, replace=False)
    chosen = [np.argmax(np.abs(gradient)), *drawn]
    return [np.unravel_index(i, gradient.shape) for i in chosen]


def check_entries(model, tokens, targets, h, limit=None):
    """Yields (name, shape, entries checked, worst relative error, index of the worst) for every tensor in
    turn."""
    def loss():
        return model.forward(tokens, targets) @ model.config.head_weights

    for name, gradient in gradients(model, tokens, targets).items():
        entries = choose_entries(gradient, limit)
        numeric = np.array([slope(loss, model.params[name], index, h) for index in entries])
        by_hand = np.array([gradient[index] for index in entries])
        # the tiny number: a gradient that is 0 throughout, where none should be, is an error, and no 0 / 0
        errors = np.abs(by_hand - numeric) / (np.abs(gradient).max() + sys.float_info.min)
        errors[np.isnan(errors)] = np.inf
        worst = np.argmax(errors)
        yield name, gradient.shape, len(entries), errors[worst], tuple(map(int, entries[worst]))


# ------------------------------------------------------------------------------------------------------------
# The loss once more: the equations of the model in loops, sharing nothing with model_cpu but the weights
# ------------------------------------------------------------------------------------------------------------
def plain_losses(w, config, tokens, targets):
    """(K,) losses.  Token by token, head by head: a token reads the lists of keys and values so far, so there
    is no mask and no batch to go wrong."""
    D = config.dim // config.heads
    R = config.heads // config.kv_heads
    frequency = config.rope_theta ** (-2 / D * np.arange(D // 2))
    nlls = [[] for _ in range(config.predict)]           # -log p of each counted target, by head

    def norm(x, name):
        return x / math.sqrt(x @ x / len(x) + config.norm_eps) * w[name]

    for b in range(len(tokens)):
        keys = [[] for _ in range(config.layers)]
        values = [[] for _ in range(config.layers)]
        for t, token in enumerate(tokens[b]):
            x = w["embed"][token]
            turn = np.exp(1j * t * frequency)
            for i in range(config.layers):
                parts = (w[f"layers.{i}.qkv"] @ norm(x, f"layers.{i}.norm1")).reshape(-1, D)        # (H+2G,D)
                # RoPE: entries i and i + D/2 are one complex number, which position t turns by the angle
                # t theta^(-2i/D); q . k is then the real part of the sum of q conj(k)
                real, imaginary = np.split(parts[:-config.kv_heads], 2, axis=1)
                turned = (real + 1j * imaginary) * turn
                keys[i].append(turned[config.heads:])
                values[i].append(parts[-config.kv_heads:])
                y = []
                for h in range(config.heads):
                    p = [math.exp(np.vdot(k[h // R], turned[h]).real / math.sqrt(D)) for k in keys[i]]
                    y.append(sum(p_s * v[h // R] for p_s, v in zip(p, values[i])) / sum(p))
                x = x + w[f"layers.{i}.out"] @ np.concatenate(y)
                gate, up = (w[f"layers.{i}.gate_up"] @ norm(x, f"layers.{i}.norm2")).reshape(2, -1)
                x = x + w[f"layers.{i}.down"] @ (gate / (1 + np.exp(-gate)) * up)
            logits = (w["heads"] @ norm(x, "norm")).reshape(config.predict, config.vocab)
            for k, target in enumerate(targets[b][t:t + config.predict]):
                if target >= 0:
                    nlls[k].append(math.log(sum(np.exp(logits[k]))) - logits[k][target])
    return np.array([sum(nll) / max(len(nll), 1) for nll in nlls])


def loss_error(model, tokens, targets):
    """The largest relative difference of a head's loss from plain_losses."""
    plain = plain_losses(model.params, model.config, tokens, targets)
    error = np.abs(model.forward(tokens, targets) / plain - 1).max()
    return error if math.isfinite(error) else math.inf


# ------------------------------------------------------------------------------------------------------------
# Known bugs: name -> ("function: what stands there -> what to put there", ..., the mistake in one line).
# ------------------------------------------------------------------------------------------------------------
BUGS = {
    # First those that leave the forward as it is, which the slopes must show.
    "rope_sign": ("rope_backward: -sin -> sin",
        "The backward turns the gradient by the same angle again, instead of back."),
    "group_not_summed": ("attention_backward: .sum(axis=2, keepdims=True) -> [:, :, -1:]",
        "The query heads of a group write their gradient of k and v one over the other: the last stays."),
    "backward_scale": ("attention_backward: 1.0 / math.sqrt(q.shape[-1]) -> 1.0",
        "The backward of attention forgets the factor 1/sqrt(D)."),
    "softmax_delta": ("attention_backward: dS -=  -> dS -= 0 *",
        "The softmax's derivative taken as P dP: the second term, which makes each row sum to 0, is lost."),
    "residual_dropped": ("block_backward: dx += back -> dx[...] = back",
        "x + f(x) differentiated as f(x): the gradient that passes straight through is lost."),
    "norm_projection": ("rmsnorm_backward: dx -= xhat -> pass",
        "RMSNorm differentiated as if 1/rms were a constant: the projection term is missing."),
    "norm_gain": ("rmsnorm_backward: @ along -> @ (dout * x)",
        "The gradient of RMSNorm's gain computed from x, where the normalised x belongs."),
    "swiglu_slope": ("swiglu_backward: (gate - silu -> (gate - gate",
        "The derivative of g * sigmoid(g) taken as sigmoid(g): the product rule's other half is forgotten."),
    "embedding_repeat": ("embedding_backward: order = -> dembed[tokens] += dout; return;",
        "dembed[tokens] += dout: where a token occurs twice, NumPy adds only the last of its rows."),
    "gradient_overwritten": ("linear_backward: dw += -> dw[...] =",
        "A weight's gradient is written, not added to: the second micro-batch wipes out the first."),
    "micro_divisor": (
        "cross_entropy_forward: , divisor,  -> , np.maximum((targets >= 0).sum(axis=0), 1), ",
        "cross_entropy_backward: / divisor -> / np.maximum((targets >= 0).sum(axis=0), 1)",
        "A micro-batch divides its loss by the count of its own targets, not of the whole step's."),
    "masked_pulled": ("cross_entropy_backward: >= 0 -> >= -1",
        "A masked target is left in the backward, where index -1 silently is the vocabulary's last token."),
    "head_weight": ("cross_entropy_backward: head_weights / divisor -> 1 / divisor",
        "The backward forgets that the extra heads count for less than head 0."),
    # Now those that change the forward.  Where the backward fits it, the slopes agree, and only plain_losses
    # can tell.
    "rope_on_v": ("rotated_part: + config.kv_heads -> + 2 * config.kv_heads",
        "RoPE turns v as well as q and k."),
    "rope_layout": (
        "rope_forward: swapped = -> y, x = x, np.concatenate([x[..., ::2], x[..., 1::2]], -1)\n    swapped =",
        "rope_forward: x += swapped -> y[..., 0::2], y[..., 1::2] = np.split(x + swapped, 2, axis=-1)",
        "RoPE turns neighbours 2i, 2i+1 (the paper's layout, GPT-J's) where our pairs are i, i + D/2."),
    "no_scale": ("attention_forward: 1.0 / math.sqrt(q.shape[-1]) -> 1.0",
        "attention_backward: 1.0 / math.sqrt(q.shape[-1]) -> 1.0",
        "1/sqrt(D) forgotten in both passes."),
    "mask_off_by_one": ("attention_forward: first + 1) -> first + 2)",
        "A query sees one key of the future: the token it is to predict."),
    "gate_up_swapped": (
        "swiglu_forward: gate, up = -> up, gate =",
        "swiglu_backward: gate, up = -> up, gate =", "swiglu_backward: dgate, dup = -> dup, dgate =",
        "silu(up) * gate in place of silu(gate) * up: the halves of one matrix, taken in the wrong order."),
    "norm_eps": ("rmsnorm_forward: np.sqrt(rstd / x.shape[1] + eps) -> (np.sqrt(rstd / x.shape[1]) + eps)",
        "RMSNorm's eps added to the root, as Adam has it, not to the mean square under the root."),
    "target_shift": ("head_targets: k:k + T -> min(k, 1):min(k, 1) + T",
        "The extra heads all learn the next token but one: head k reads the targets from 1, not from k."),
    "masked_counted": ("count_targets: >= 0 -> >= -1",
        "The divisor counts the masked targets too, so a masked batch's loss looks better than it is."),
}

# The optimizer has no slope to measure: --break could not see these; they are planted in the exercise alone.
EXERCISE_BUGS = {
    "no_correction": ("adamw_update: / (1 - beta2 ** step) -> ", "adamw_update: / (1 - beta1 ** step) -> ",
        "No bias correction: m and v start at 0 and are too small in the first steps, v more than m."),
    "decay_coupled": (
        "adamw_update: m *= beta1 -> grad += decay * param\n    m *= beta1", "adamw_update: lr * decay -> 0",
        "Decay added to the gradient, as in Adam with L2: it enters m and v, and is divided by the root."),
    "eps_under_root": ("adamw_update: (1 - beta2 ** step)) + eps -> (1 - beta2 ** step) + eps)",
        "eps added under the root, as in RMSNorm, where it weighs as much as its root does outside."),
}


ALL_BUGS = BUGS | EXERCISE_BUGS


def plant(bug):
    """-> dict of the functions of model_cpu that a bug alters, by name: their source, edited and compiled."""
    sources = {}
    planted = {}
    for edit in ALL_BUGS[bug][:-1]:
        name, there, instead = re.fullmatch("(.*?): (.*) -> (.*)", edit, re.DOTALL).groups()
        source = sources.setdefault(name, inspect.getsource(getattr(model_cpu, name)))
        sources[name] = source.replace(there, instead)
        exec(sources[name], vars(model_cpu), planted)
    return planted


# ------------------------------------------------------------------------------------------------------------
# The runs on the CPU, each -> True if all is well
# ------------------------------------------------------------------------------------------------------------
def run_check(model, tokens, targets, h, bar, limit=None):
    """Print a row per tensor, then the overall figures."""
    from_loops = loss_error(model, tokens, targets)
    worst = 0.0
    checked = 0
    print(f"{'tensor':18} {'shape':>12} {'checked':>8} {'worst error':>12}   at")
    for name, shape, count, error, index in check_entries(model, tokens, targets, h, limit):
        size = " x ".join(map(str, shape))
        mark = "   <-- above the bar" if error > bar else ""
        print(f"{name:18} {size:>12} {count:8} {error:12.1e}   {list(index)}{mark}", flush=True)
        worst = max(worst, error)
        checked += count
    print(f"losses against the loops: worst relative error {from_loops:.1e} (bar {LOSS_BAR:.0e})")
    print(f"overall: {checked} of {model_cpu.param_count(model.config)} entries, "
          f"worst relative error {worst:.1e} (bar {bar:.0e})")
    good = bool(from_loops <= LOSS_BAR and worst <= bar)
    print("all within the bars" if good else "FAILED")
    return good


def is_caught(replacements, limit=40):
    """Plant the replacements in the tiny model and print what shows it."""
    with unittest.mock.patch.dict(vars(model_cpu), replacements):       # for as long as this lasts
        problem = make_tiny(TINY)
        error = loss_error(*problem)
        rows = check_entries(*problem, TINY_STEP, limit)
        shown = sorted([(worst, name) for name, _, _, worst, _ in rows if worst > TINY_BAR], reverse=True)
    if error > LOSS_BAR:
        print(f"    the losses: {error:.1e} from the loops'")
    if shown:
        print(f"    {len(shown)} tensors of {len(problem[0].grads)}: "
              f"{', '.join(f'{name} {worst:.1e}' for worst, name in shown)}")
    return bool(shown) or error > LOSS_BAR


def run_breaks(names):
    """Plant each bug.  First none at all, or "caught" would mean nothing."""
    if is_caught({}):
        print("the check fails with no bug planted; run python gradcheck.py")
        return False
    missed = 0
    for name in names:
        print(f"{name}: {BUGS[name][-1]}", flush=True)
        if not is_caught(plant(name)):
            print("    NOT CAUGHT")
            missed += 1
    print(f"caught {len(names) - missed} of {len(names)}")
    return missed == 0


# ------------------------------------------------------------------------------------------------------------
# Exercises.  The reader writes a function; the calls of it in a small run are recorded, the original, the
# reader's and the planted bugs run on copies of their arguments, and all arrays are compared.
#
# First those that have no solution here: their judge is the measured slope alone.
# ------------------------------------------------------------------------------------------------------------
def layernorm_forward(out, x, gain, bias):
    """LayerNorm (Ba, Kiros & Hinton 2016), which GPT-2 has where we have RMSNorm.  out, x (N,C); gain, bias
    (C,).

        out_ni = (x_ni - mean_n) / sqrt(var_n + 1e-5) * gain_i + bias_i
        mean_n = mean_i x_ni        var_n = mean_i (x_ni - mean_n)^2
    """
    centred = x - x.mean(axis=1, keepdims=True)
    out[...] = centred / np.sqrt((centred ** 2).mean(axis=1, keepdims=True) + 1e-5) * gain + bias


def layernorm_backward(dx, dgain, dbias, dout, x, gain, bias):
    """Writes dx (N,C), adds to dgain (C,) and dbias (C,)."""


def geglu_forward(out, gate_up):
    """GEGLU (Shazeer 2020), which Gemma has where we have SwiGLU.  gate_up (N,2F) = [g | u]; out (N,F).

        out = gelu(g) * u,   gelu(g) = g/2 (1 + tanh(a)),   a = sqrt(2/pi) (g + 0.044715 g^3)
    """
    gate, up = np.split(gate_up, 2, axis=1)
    out[...] = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate ** 3))) * up


def geglu_backward(dgate_up, dout, gate_up):
    """Writes dgate_up (N,2F) = [dg | du]."""


def softcap_forward(out, x, cap):
    """Soft capping, as of Gemma 2's logits: nearly x where x is small, never beyond cap.  out, x (N,C).

        out = cap * tanh(x / cap)
    """
    out[...] = cap * np.tanh(x / cap)


def softcap_backward(dx, dout, x, cap):
    """Writes dx (N,C)."""


def measured(backward, *arguments):
    """The judge of a backward without a solution: each entry is the slope of sum(dout * out): dout, drawn at
    random, projects the output on one number."""
    forward = globals()[backward.__name__.replace("backward", "forward")]
    _, *inputs = inspect.signature(forward).parameters
    values = dict(zip(inspect.signature(backward).parameters, arguments))
    out = np.empty_like(values["dout"])

    def loss():
        forward(out, *map(values.get, inputs))
        return np.sum(values["dout"] * out)
    for name in inputs:
        if "d" + name in values:
            gradient = values["d" + name]
            if gradient.ndim > 1:               # that of a vector, which is a weight, is added to
                gradient[...] = 0.0
            for index in np.ndindex(gradient.shape):
                gradient[index] += slope(loss, values[name], index, 1e-3)


EXERCISES = {re.sub("_backward|_update", "", function.__name__): function for function in (
    model_cpu.linear_backward, model_cpu.embedding_backward, model_cpu.swiglu_backward,
    model_cpu.cross_entropy_backward, model_cpu.rmsnorm_backward, model_cpu.rope_backward,
    model_cpu.attention_backward, model_cpu.block_backward, model_cpu.adamw_update, model_cpu.head_targets,
    model_cpu.sample, learn_merges, layernorm_backward, geglu_backward, softcap_backward)}
MARKS = ("layernorm", "geglu", "softcap")
FREE = ("work", "shared", "grad")       # arguments to compute in: what is left in them is not compared


def exercise_text(name):
    """The reader's file at first: forward and helpers, then the signature and docstring of the function."""
    function = EXERCISES[name]
    head = re.match('(?s).*?""".*?"""', inspect.getsource(function))[0]
    own = function.__globals__
    forward = own[function.__name__.replace("_backward", "_forward")]   # itself, where there is no pair
    used = {forward.__name__, *forward.__code__.co_names, *function.__code__.co_names}
    imports = ""
    sources = ""
    for key, f in own.items():
        if key not in used or f is function or not inspect.isfunction(f):
            continue
        if f is not forward and key.endswith(("_forward", "_backward")):
            imports += f"from model_cpu import {key}\n"
        else:
            sources += f"\n\n{inspect.getsource(f)}"
    return f'''"""Exercise {name}: write the body of {function.__name__}, at the end.

    python gradcheck.py --exercise {name}             is it right?
    python gradcheck.py --exercise {name} --hint      how it is derived
"""
import math

import numpy as np
{imports}{sources}

{head}
    # Your lines here.
'''


def record():
    """-> dict name of an exercise -> the calls of its function in a small run, each a dict of arguments."""
    model, tokens, targets = make_tiny(TINY)
    gradients(model, tokens, targets)           # so that no buffer is empty when the recording begins
    names = {function.__code__: name for name, function in EXERCISES.items()}
    calls = {name: [] for name in EXERCISES}

    def watch(frame, event, _):
        if event == "call" and frame.f_code in names:
            calls[names[frame.f_code]].append(copy.deepcopy(dict(frame.f_locals)))

    sys.setprofile(watch)
    for _ in range(2):
        gradients(model, tokens, targets)
        model.update(lr=0.1, eps=1e-3)
    for how in ((0, 0, 1), (1, 0, 1), (0.7, 3, 1), (1.5, 0, 0.6), (1, 5, 0.8)):         # temperature, k, p
        list(model_cpu.generate(model, [1, 2, 3], *how, seed=1, most=30))
    for vocab_size in (300, 500):               # the second time the pairs run out
        Tokenizer.train([model_cpu.TEXT + " aaaaaaa banana hahaha \xe9\xe9"], vocab_size)
    sys.setprofile(None)
    rng = np.random.default_rng(2)
    shapes = {"gain": 8, "bias": 8, "gate_up": (5, 16), "cap": None}    # None: a number; all others (5, 8)
    for name in 2 * MARKS:
        calls[name].append({key: rng.standard_normal(shapes.get(key.removeprefix("d"), (5, 8)))
                            for key in inspect.signature(EXERCISES[name]).parameters})
    return calls


def outcome(function, call):
    """dict label -> array after the function ran on a copy of a call, with its result (None: before it)."""
    arguments = copy.deepcopy(call)
    found = {}
    result = function and function(*arguments.values())
    if result is not None:
        found["the result"] = np.array(None if isinstance(result, tuple) else result)
    for name, value in arguments.items():
        parts = value if isinstance(value, dict) else {None: value}
        for key, part in parts.items():
            if name not in FREE and isinstance(part, np.ndarray):
                found[f'{name}["{key}"]' if key else name] = part
    return found


def off(got, want):
    """Mask of the entries of got that are not want's; where they cannot be compared, a single True, in a
    shape of its own."""
    if got is not None and got.shape == want.shape and got.dtype.kind in "biuf":
        return ~(np.abs(got - want) <= TINY_BAR * np.abs(want).max(initial=0))
    return np.ones((1,) * (want.ndim + 1), bool)


def complaint(label, cases, calls):
    """What is wrong with an array, in one or two sentences.  cases: for each call in which something is, the
    array before the call, as the reader left it, and as it should be."""
    before, got, want = cases[0]
    mask = off(got, want)
    if mask.shape != want.shape:
        found = "nothing" if got is None else f"{got.dtype} of the shape {got.shape}"
        return [f"{label} is {found}, where {want.dtype} of the shape {want.shape} belongs."]
    at = np.unravel_index(np.argmax(np.where(mask, np.abs(got - want), -1)), mask.shape)
    box = "" if mask.all() else f", in [{', '.join(f'{i.min()}:{i.max() + 1}' for i in np.nonzero(mask))}]"
    which = f"{mask.sum()} of {mask.size} entries are off{box} ({len(cases)} of {calls} calls)"
    entry = f"at {list(map(int, at))} stands {got[at]:.6g}, where {want[at]:.6g} belongs."
    lines = [f"{label}: {which}; {entry}"]
    g = got[mask].astype(float)
    w = want[mask].astype(float)
    b = np.nan * w if before is None else before[mask]
    ways = [(w, b, "It should be as it was before the call."),
            (g, b, f"Nothing was written: `{label} = ...` names a new array; write `{label}[...] = ...`."),
            (g, w - b, "`+=` is the contract, and this looks like `=`: what was there before is lost."),
            (g, w + b, "`=` is the contract, and this looks like `+=`: what was there before is in it.")]
    for x, y, what in ((g, w, "what it should be"), (g - b, w - b, "what should be added")):
        if x.size > 1:
            ratio = x @ y / max(y @ y, sys.float_info.min)
            ways.append((x, ratio * y, f"Each of these is {ratio:.6g} times {what}."))
    return lines + [sentence for x, y, sentence in ways if not off(x, y).any()][:1]


def differing(before, got, want):
    """All three: what outcome gave for each call.  -> dict label -> [(before, got, want), ...] of the calls in
    which this array is not what it should be."""
    found = {}
    for label in want[0]:
        cases = [(b.get(label), g.get(label), w[label]) for b, g, w in zip(before, got, want)]
        cases = [case for case in cases if off(*case[1:]).any()]
        if cases:
            found[label] = cases
    return found


def compare(name, calls, got):
    """got: what the reader's function made of each call -> what is wrong with it, in sentences."""
    function = EXERCISES[name]
    judge = functools.partial(measured, function) if name in MARKS else function
    before = [outcome(None, call) for call in calls]
    want = [outcome(judge, call) for call in calls]
    lines = []
    for label, cases in differing(before, got, want).items():
        lines += complaint(label, cases, len(calls))
    if not lines:
        return []
    if "the result" in got[0].keys() - want[0].keys():
        lines.append("Something is returned, and nobody takes it: results belong in the caller's arrays.")
    for bug, (*_, story) in ALL_BUGS.items():
        planted = plant(bug).get(function.__name__)
        if planted and not differing(before, got, [outcome(planted, call) for call in calls]):
            return [*lines, f"Just so behaves the bug {bug}: {story}"]
    return lines


def grade(name, calls):
    """The verdict on exercises/NAME.py in sentences; none: it is right."""
    path = f"exercises/{name}.py"
    function = EXERCISES[name].__name__
    call = {}
    got = []
    if not os.path.exists(path):
        return ["not begun"]
    try:
        scope = runpy.run_path(path)
        if function not in scope:
            return [f"{path} has no function {function}."]
        for call in calls:
            got.append(outcome(scope[function], call))
    except (Exception, SystemExit) as error:            # whatever it is, it is the reader's
        text = "".join(traceback.format_exception(error))
        where = "".join(re.findall(rf'"{path}"(, line \d+)', text)[-1:])       # the innermost in their file
        lines = [f"{path}{where}: {text.splitlines()[-1]}"]
        if call:
            arrays = outcome(None, call).items()
            lines.append(f"The arrays: {', '.join(f'{label} {array.shape}' for label, array in arrays)}")
        return lines
    return compare(name, calls, got)


def run_exercise(name, hint):
    """Print the derivation, or write the reader's file, or judge it (all: every one)."""
    path = f"exercises/{name}.py"
    if hint:
        derivation = inspect.getcomments(EXERCISES[name]) or "# ---"
        print("There is no derivation: the docstrings say all." if derivation.startswith("# ---")
              else re.sub("(?m)^# ?", "", derivation).rstrip())
        return True
    if name != "all" and not os.path.exists(path):
        os.makedirs("exercises", exist_ok=True)
        write_file(path, exercise_text(name).encode())
        print(f"Wrote {path}: write the body of {EXERCISES[name].__name__} there, then run this again.")
        return True
    calls = record()
    good = True
    for each in EXERCISES if name == "all" else [name]:
        verdict = grade(each, calls[each])
        good = good and not verdict
        lines = verdict or [f"right in {len(calls[each])} calls"]
        print(f"{each:15}" + f"\n{'':15}".join(lines[:1] if name == "all" else lines))
    return good


# ------------------------------------------------------------------------------------------------------------
# The GPU engine against model_cpu in float64.  Finite differences would drown in fp32's rounding; but the
# reference's gradient is proven, so it is compared with that, tensor by tensor, by relative L2:
# |gpu - reference| / |reference|.  What else the engine does, tests/test_on_gpu.py measures so.
# ------------------------------------------------------------------------------------------------------------
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


def peer_error(reference, tokens, targets, precision):
    """The same gradient by PyTorch's autograd in this precision: its relative L2 from the reference,
    whole."""
    sys.path.insert(0, f"{os.path.dirname(os.path.abspath(__file__))}/tests/peers")
    import torch_twin
    return distance(torch_twin.gradient(reference, tokens, targets, precision), reference.flat_grads)


def run_gpu_gradients(config, precisions, std, peer):
    """A row per tensor, a column per precision; then the whole gradient, losses, and the same step twice."""
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
            theirs = peer_error(reference, tokens, targets, precision)
            column.update({"PyTorch's whole": theirs, "ours / PyTorch's": whole / theirs})
            good &= std is None or whole <= 1.5 * theirs
        columns.append(column)
    bars = ", ".join(f"{precision} {GPU_BARS[precision][0]:.0e}" for precision in precisions)
    print(f"{'initial' if std is None else f'wide ({std})'} weights, {config.layers} layers of width "
          f"{config.dim}, B 2 x T 256; relative L2 from float64{f'; bars {bars}' if std is None else ''}")
    for row in column:
        cells = [column[row] for column in columns]
        print(f"  {row:20}" + "".join(f"{x:>12}" if isinstance(x, str) else f"{x:12.2e}" for x in cells))
    print("", flush=True)
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


def main(argv):
    parser = Parser(description="Check model_cpu.py's gradients against finite differences: every entry of a "
                    f"tiny model, to {TINY_BAR:.0e}. Exit code 1: an error above the bar, a bug not caught.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--small", action="store_true", help=f"entries of the small model, to {SMALL_BAR:.0e}")
    which.add_argument("--break", dest="bug", choices=["all", *BUGS], metavar="NAME",
                       help="plant this bug (all: one after the other) and see that it is caught")
    which.add_argument("--list", action="store_true", help="the names of the bugs, with their stories")
    which.add_argument("--exercise", choices=["all", *EXERCISES], metavar="NAME", help="write the file to"
                       f" complete; again: is it right? (all: a table)  NAME: {', '.join(EXERCISES)}")
    which.add_argument("--gpu", action="store_true", help="the GPU engine's gradients against model_cpu's")
    parser.add_argument("--peer", action="store_true", help="with --gpu: PyTorch's error beside ours")
    parser.add_argument("--hint", action="store_true", help="with --exercise NAME: the derivation")
    args = parser.parse_args(argv)
    if args.peer and not args.gpu:
        parser.error("--peer goes with --gpu")
    if args.hint and args.exercise in (None, "all"):
        parser.error("--hint goes with --exercise NAME")

    if args.list:
        for name, (*_, story) in ALL_BUGS.items():
            print(f"{name:20} {story}{'  (In the exercise alone.)' if name in EXERCISE_BUGS else ''}")
        return 0
    if args.exercise:
        good = run_exercise(args.exercise, args.hint)
    elif args.gpu:
        good = run_gpu(args.peer)
    elif args.bug:
        good = run_breaks(BUGS if args.bug == "all" else [args.bug])
    elif args.small:
        good = run_check(*make_problem(CONFIGS["small"], T=70), SMALL_STEP, SMALL_BAR, 4)
    else:
        results = [run_check(*make_tiny(config), TINY_STEP, TINY_BAR) for config in (TINY, TIED)]
        good = all(results)
    return 0 if good else 1


if __name__ == "__main__":
    run_script(main, to_the_end=True)
