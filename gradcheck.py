"""gradcheck.py: is every gradient of model_cpu.py right?  Finite differences tell.  Planted bugs then show that the
check would notice a mistake.

Read model_cpu.py before this.  The runs:

    python gradcheck.py               every entry of every tensor of two tiny models, which together have all features
    python gradcheck.py --break all   plant known bugs, one by one: is each of them caught?
    python gradcheck.py --gpu         the GPU engine's gradients against float64, in every precision
    python gradcheck.py --exercise linear      write this function yourself (graded by tests/exercises.py)

The idea.  A gradient is a slope: move one weight w by h and see by how much the loss f moves.  Only the forward runs
for that.  So the backward is judged by something that does not use it.  The usual quotient is (f(w+h) - f(w-h)) / 2h.
A better one takes four values (f^(5) is the fifth derivative):

    f'(w) = (f(w-2h) - 8 f(w-h) + 8 f(w+h) - f(w+2h)) / 12h  +  h^4 f^(5)(w) / 30 + ...

To see it, write the four as Taylor series about w.  With the factors 1, -8, 8 and -1 the terms in h^0, h^2, h^3 and h^4
cancel.

It is called the five-point formula (the fifth point is w, with the factor 0); the usual quotient has three points.
Why five?  There are two errors:

    the formula's own       about h^4 with five points, h^2 with three
    the rounding of f       about 1e-16 f / h

The best h is near where the two are equal.  Measured on the first tiny model, worst of all 4,944 entries:

    h               5e-6      1e-5      1e-4      2e-4      1e-3
    five points     2.2e-09   8.6e-10   7.8e-11   6.3e-11   1.5e-09
    three points    1.3e-09   1.6e-09   1.6e-07   6.5e-07   1.6e-05

Why float64?  float32 rounds f at 1e-7.  The best h, about 0.013 when tried, then gives about 1e-4 on this model.  A
wrong term below that, such as RMSNorm's eps in the wrong place (1.2e-5), would pass.  The formulas are the same in
either precision.  So what is proven in float64 holds in float32, where training runs, up to rounding.

The error |by hand - numeric| of an entry is divided by the largest gradient of its tensor.  Why is it not divided by
the entry?  The difference quotient has about the same rounding error for every entry.  So an entry that happens to be
near 0 would have a large error, which means nothing.  And why not by the largest gradient of the model?  A tensor of
small gradients could then be all wrong and pass.

How to read a planted bug.  --break prints two lists, the wrong tensors, each with its error, and the right ones.  Each
is in the order in which the backward reaches them.  If the gradient of a function's input x is wrong, so is all that
the backward computes from it (rope_sign).  If the gradient of a weight is wrong, only the weights of this kind are
(norm_gain: the five gains).  Either way, the first wrong tensor says where to look.

What finite differences cannot see: a forward that computes another model, with a backward that is right for it.
Examples are RoPE on v in both passes, a forgotten 1/sqrt(D) in both, a target shifted by one.  f is a different
function then, and its slopes agree.  So the forward is compared with two others, which share no layer with it:
forward_plain of model_cpu, and plain_losses below, which computes the loss token by token in loops.
(tests/test_train.py checks what each head weighs in the total loss.)  If the author has misunderstood the model itself,
all three agree and are wrong.  Only code of other people can show that: PyTorch and Hugging Face's Llama, in
tests/peers.

The check of the CPU does not look at the optimizer, at cached decoding, or at float32: see tests/test_model_cpu.py.
What --gpu leaves out is in tests/test_on_gpu.py.

This file imports model_cpu, model_gpu and script.  Only --exercise loads a file of tests/ as well.
"""
import inspect
import math
import os
import re
import sys
from dataclasses import replace
from unittest.mock import patch

import model_cpu            # first: it says what to do where NumPy is missing
import model_gpu            # this import works without CuPy and without a GPU, too
import numpy as np
from model_cpu import CONFIGS
from script import Parser, require, run_script

TINY = model_cpu.Config(dim=16, heads=4, kv_heads=2, layers=2, hidden=24, context=8, vocab=16, predict=3,
                        mtp_weight=0.7)
TIED = replace(TINY, layers=1, predict=1, tied=True)        # as other people's models are
ROW_WEIGHTS = [1.5, -0.5]    # a weight for each row in the loss: one text becomes more probable, the other less (rl.py)
TINY_STEP = 2e-4         # h: the best of the table above
# A bar is the largest error that passes.  The right code has 6.3e-11.  A planted bug that spoils slopes at all spoils
# them by 1.2e-5 (norm_eps) or more.
TINY_BAR = 1e-8
FORWARD_BAR = 1e-12      # of the forward's distance from forward_plain and plain_losses: it is 2.4e-15


def slope(loss, weight, index, h):
    """d loss() / d weight[index], by the formula above.  weight: a view of the weights that loss() reads."""
    centre = weight[index]
    total = 0.0
    for shift, factor in (-2, 1), (-1, -8), (1, 8), (2, -1):
        weight[index] = centre + shift * h
        total += factor * loss()
    weight[index] = centre
    return total / (12 * h)


# ------------------------------------------------------------------------------------------------------------
# What is checked
# ------------------------------------------------------------------------------------------------------------
def make_problem(config, T, std=None):
    """-> (model, tokens (2,T), targets (2,T+K-1)), drawn at random.  std: draw large weights with this standard
    deviation, the gains around 1; None: keep the initial weights.

    Why are the weights of the tiny models large (std 0.3)?  At the usual 0.02 the scores of attention are nearly 0, and
    its softmax is nearly uniform.  The gradients of q and k are then far smaller than that of v, in TINY 240 to 440
    times.  The three share a tensor, and its largest gradient is one of v.  So an error in q or k would hide behind it.
    (--gpu has the usual weights.  On a GPU tests/test_on_gpu.py checks attention's gradients by themselves.)

    TINY and T = 7 have 4 query and 2 key/value heads, 2 RoPE frequencies, 3 prediction heads, and a length that is no
    power of two.  TIED and ROW_WEIGHTS have the rest: a tied head, and rows with weights."""
    rng = np.random.default_rng(1)
    model = model_cpu.Model(config)
    if std:
        for weight in model.params.values():
            weight[...] = std * rng.standard_normal(weight.shape)
            if weight.ndim == 1:
                weight += 1.0                       # a gain
    # Round the weights to float32, so that a model on the GPU can have exactly the same
    model.flat_params[...] = model.flat_params.astype(np.float32)
    tokens = rng.integers(0, config.vocab, (2, T))
    targets = rng.integers(0, config.vocab, (2, T + config.predict - 1))
    tokens[:, 5] = tokens[:, 1]         # a token that occurs twice
    targets[0, ::7] = -1                # a few masked targets
    targets[1, 2:9] = -1                # with T = 7 head 2 reads targets 2 to 8: a row in which a head learns nothing
    return model, tokens, targets


def gradients(model, tokens, targets, row_weights=None):
    """dict name -> gradient by hand, a view.  Each row is run as a micro-batch of its own, but the finite differences
    take the whole batch at once.  So the check also covers that gradients are added up, and that each micro-batch
    divides by the number of targets of the whole step.  row_weights: None, or a list of 2, as in rl.py."""
    counted = model_cpu.count_targets(targets, tokens.shape[1], model.config.predict)
    model.flat_grads[...] = 0.0
    for row in model_cpu.slices_of(len(tokens), 1):
        model.forward(tokens[row], targets[row], counted, row_weights and row_weights[row])
        model.backward()
    return model_cpu.table_views(model.flat_grads, model_cpu.param_table(model.config))


def check_entries(model, tokens, targets, every=1, row_weights=None):
    """Check the entries 0, every, 2 every, ... of each tensor, and always the one with the largest gradient.  Yields
    for each tensor (name, shape, entries checked, worst relative error, index of the worst)."""
    def loss():
        return model.forward(tokens, targets, weights=row_weights) @ model.config.head_weights

    for name, gradient in gradients(model, tokens, targets, row_weights).items():
        largest = np.abs(gradient).argmax()
        entries = sorted({largest, *range(0, gradient.size, every)})
        weight = model.params[name].flat                        # a view of one axis
        numeric = [slope(loss, weight, i, TINY_STEP) for i in entries]
        by_hand = gradient.flat
        # float_info.min is tiny.  So a gradient that is 0 by mistake in a whole tensor has huge errors, and nothing is
        # divided by 0
        errors = np.abs(by_hand[entries] - numeric) / (abs(by_hand[largest]) + sys.float_info.min)
        errors[np.isnan(errors)] = np.inf                       # NaN > bar is False: it would pass
        worst = np.argmax(errors)
        index = np.unravel_index(entries[worst], gradient.shape)
        yield name, gradient.shape, len(entries), errors[worst], index


# ------------------------------------------------------------------------------------------------------------
# The loss once more: the equations of the model in loops.  Only the weights are those of model_cpu
# ------------------------------------------------------------------------------------------------------------
def plain_losses(w, config, tokens, targets):
    """(K,) losses.  Token by token, head by head: a token reads the list of the keys and values before it and its own.
    There is no mask and no batch, so neither can be wrong.

    RoPE by complex numbers, for q and k alone: entries j and j + D/2 of a head are one complex number.  Position t
    turns it by the angle t theta^(-2j/D).  Let a + ib be such a number of q, and c + id the one of k beside it.  They
    add ac + bd to q . k, which is the real part of conj(c + id) (a + ib).  So q . k is the real part of np.vdot(k, q),
    which takes the conjugates of its first argument, and adds up."""
    H = config.heads
    G = config.kv_heads
    D = config.dim // H
    frequency = config.rope_theta ** (-2 / D * np.arange(D // 2))
    nlls = [[] for _ in range(config.predict)]           # -log p of each counted target, by head

    def norm(x, name):
        return x / math.sqrt(x @ x / len(x) + config.norm_eps) * w[name]

    for row, row_targets in zip(tokens, targets):
        layers = [[] for _ in range(config.layers)]     # for each: (keys (G,D/2), values (G,D)) of each token so far
        for t, token in enumerate(row):
            x = w["embed"][token]
            for i, past in enumerate(layers):
                parts = (w[f"layers.{i}.qkv"] @ norm(x, f"layers.{i}.norm1")).reshape(-1, D)        # (H+2G,D)
                a, b = np.split(parts[:-G], 2, axis=1)
                turned = (a + 1j * b) * np.exp(1j * t * frequency)          # (H+G,D/2)
                past.append((turned[H:], parts[-G:]))
                y = []
                for h in range(H):
                    g = h * G // H                          # the key/value head of query head h
                    p = [math.exp(np.vdot(k[g], turned[h]).real / math.sqrt(D)) for k, _ in past]
                    y.append(sum(p_s * v[g] for p_s, (_, v) in zip(p, past)) / sum(p))
                x = x + w[f"layers.{i}.out"] @ np.concatenate(y)
                gate, up = (w[f"layers.{i}.gate_up"] @ norm(x, f"layers.{i}.norm2")).reshape(2, -1)
                x = x + w[f"layers.{i}.down"] @ (gate / (1 + np.exp(-gate)) * up)
            logits = (w["heads"] @ norm(x, "norm")).reshape(config.predict, config.vocab)
            for nll, z, target in zip(nlls, logits, row_targets[t:]):       # head k reads targets[t + k]
                if target >= 0:
                    nll.append(math.log(sum(np.exp(z))) - z[target])
    return np.array([sum(nll) / max(len(nll), 1) for nll in nlls])


def forward_error(model, tokens, targets):
    """The largest relative difference of a head's loss from plain_losses, or difference of a logit from forward_plain.
    If one of them is NaN, the result is NaN, and NaN <= bar is False."""
    plain = plain_losses(model.params, model.config, tokens, targets)
    of_losses = np.abs(model.forward(tokens, targets) / plain - 1)
    logits = [model_cpu.forward_plain(model.params, model.config, row) for row in tokens]
    return np.max([of_losses.max(), np.abs(model.logits(tokens) - logits).max()])


# ------------------------------------------------------------------------------------------------------------
# Known bugs: name -> (one edit or several, and last the mistake in one sentence).  An edit is "FUNCTION: OLD -> NEW".
# For example "rope_backward: -sin -> sin" makes of the line rope_forward(dx, cos, -sin) in the function rope_backward
# the line rope_forward(dx, cos, sin).
# ------------------------------------------------------------------------------------------------------------
BUGS = {
    # First the bugs that leave the forward as it is.  Only the slopes can show them.
    "rope_sign": ("rope_backward: -sin -> sin",
        "The backward turns the gradient by the same angle again, instead of back."),
    "group_not_summed": ("attention_backward: .sum(axis=2, keepdims=True) -> [:, :, -1:]",
        "Each query head of a group overwrites the gradient of k and v of the one before: only the last stays."),
    "backward_scale": ("attention_backward: 1.0 / math.sqrt(q.shape[-1]) -> 1.0",
        "The backward of attention forgets the factor 1/sqrt(D)."),
    "softmax_delta": ("attention_backward: (dP, delta -> (dP, 0 * delta",
        "The softmax's derivative taken as P dP: the second term, which makes each row sum to 0, is lost."),
    "residual_dropped": ("block_backward: dx += back -> dx[...] = back",
        "x + f(x) differentiated as f(x): the gradient that passes straight through is lost."),
    "norm_projection": ("rmsnorm_backward: dx -= projection -> pass",
        "RMSNorm differentiated as if 1/rms were a constant: the projection term is missing."),
    "norm_gain": ("rmsnorm_backward: @ dout_xhat -> @ (dout * x)",
        "The gradient of RMSNorm's gain computed from x, where the normalised x belongs."),
    "swiglu_slope": ("swiglu_backward: (gate - silu -> (gate - gate",
        "The derivative of g * sigmoid(g) taken as sigmoid(g): the product rule's other half is forgotten."),
    # `return;`: the rest of the function is not run
    "embedding_repeat": ("embedding_backward: order = -> dembed[tokens] += dout; return;",
        "dembed[tokens] += dout: where a token occurs twice, NumPy adds only the last of its rows."),
    "gradient_overwritten": ("linear_backward: dw += -> dw[...] =",
        "A weight's gradient is written, not added to: the second micro-batch wipes out the first."),
    # it changes the forward, too, but only of micro-batches and with weights of rows, which the plain forwards lack
    "micro_divisor": (
        "cross_entropy_forward: , divisor, out -> , np.maximum((targets >= 0).sum(axis=0), 1), out",
        "cross_entropy_backward: / divisor -> / np.maximum((targets >= 0).sum(axis=0), 1)",
        "A micro-batch divides its loss by the count of its own targets, not of the whole step's."),
    "masked_pulled": ("cross_entropy_backward: >= 0 -> >= -1",
        "A masked target is left in the backward, where index -1 silently is the vocabulary's last token."),
    "row_weights": ("cross_entropy_backward: scale / divisor -> abs(scale) / divisor",
        "The sign of a row's weight is lost: what was rejected is imitated like what was chosen."),
    "head_weight": ("cross_entropy_backward: scale / divisor -> 1 / divisor",
        "The backward forgets that the extra heads count for less than head 0."),
    # Now the bugs that change the forward.  Where the backward fits the changed forward, the slopes agree, and only the
    # plain forwards can show the bug.
    "rope_on_v": ("rotated_part: :-config.kv_heads -> :",
        "RoPE turns v as well as q and k."),
    "rope_layout": (
        # sort the neighbours into two halves, let the rest of the function turn these, and sort them back
        "rope_forward: swapped = -> y, x = x, np.concatenate([x[..., ::2], x[..., 1::2]], -1)\n    swapped =",
        "rope_forward: x += swapped -> y[..., 0::2], y[..., 1::2] = np.split(x + swapped, 2, axis=-1)",
        "RoPE turns neighbours 2i, 2i+1 (the paper's layout, GPT-J's) where our pairs are i, i + D/2."),
    "no_scale": ("attend: 1.0 / math.sqrt(q.shape[-1]) -> 1.0",
        "attention_backward: 1.0 / math.sqrt(q.shape[-1]) -> 1.0",
        "1/sqrt(D) forgotten in both passes."),
    "mask_off_by_one": ("causal_mask: + 1) -> + 2)",
        "A query sees one key of the future: the token it is to predict."),
    "gate_up_swapped": (
        "swiglu_forward: gate, up = -> up, gate =",
        "swiglu_backward: gate, up = -> up, gate =", "swiglu_backward: dgate, dup = -> dup, dgate =",
        "silu(up) * gate in place of silu(gate) * up: the halves of one matrix, taken in the wrong order."),
    "norm_eps": ("rmsnorm_forward: np.sqrt(squares / x.shape[1] + eps) -> (np.sqrt(squares / x.shape[1]) + eps)",
        "RMSNorm's eps added to the root, as Adam has it, not to the mean square under the root."),
    "target_shift": ("head_targets: k:k + T -> min(k, 1):min(k, 1) + T",
        "Every extra head learns what head 1 should: head k reads the targets from 1, not from k."),
    "masked_counted": ("count_targets: >= 0 -> >= -1",
        "The divisor counts the masked targets too, so a masked batch's loss looks better than it is."),
}


def altered_functions(bug, scope):
    """bug: a row of BUGS -> dict of the functions that it alters, by name, compiled from their edited source.  scope:
    dict where the originals are, such as model_cpu's.  Nothing is replaced there: see report_damage."""
    sources = {}
    altered = {}
    for edit in bug[:-1]:
        name, old, new = re.fullmatch("(?s)(.*?): (.*) -> (.*)", edit).groups()
        source = sources.get(name, inspect.getsource(scope[name]))
        sources[name] = source.replace(old, new)        # where `old` is missing nothing changes: NOT CAUGHT
        # This runs "def rope_backward(...): ..." as edited: then altered["rope_backward"] is the new function.  The
        # names that it uses are looked up in scope
        exec(sources[name], scope, altered)
    return altered


# ------------------------------------------------------------------------------------------------------------
# The runs on the CPU, each -> True if all is well
# ------------------------------------------------------------------------------------------------------------
def run_check(model, tokens, targets, row_weights=None):
    """Check every entry: print a row per tensor, then the overall figures."""
    of_forward = forward_error(model, tokens, targets)
    worst = 0.0
    checked = 0
    print(f"{'tensor':18} {'shape':>12} {'checked':>8} {'worst error':>12}   at")
    for name, shape, count, error, index in check_entries(model, tokens, targets, 1, row_weights):
        mark = "   <-- above the bar" if error > TINY_BAR else ""
        print(f"{name:18} {shape!s:>12} {count:8} {error:12.1e}   {list(map(int, index))}{mark}")
        worst = max(worst, error)
        checked += count
    print(f"the forward against the plain ones: worst error {of_forward:.1e} (bar {FORWARD_BAR:.0e})")
    print(f"overall: {checked} of {model_cpu.param_count(model.config)} entries, "
          f"worst relative error {worst:.1e} (bar {TINY_BAR:.0e})")
    good = of_forward <= FORWARD_BAR and worst <= TINY_BAR
    print("all within the bars" if good else "FAILED")
    return good


# TINY's tensors as the backward reaches them: the heads first, the embedding last
LAYER_BACKWARD = ["down", "gate_up", "norm2", "out", "qkv", "norm1"]
BACKWARD = ["heads", "norm", *(f"layers.{i}.{name}" for i in (1, 0) for name in LAYER_BACKWARD), "embed"]


def report_damage(replacements, every=17):
    """Put these functions into model_cpu for a moment, check TINY, and print which tensors are wrong -> whether
    anything is.  (A function looks up the functions that it calls in its module, at each call.  So it finds those that
    were put there.)

    For speed only every 17th entry is checked: in the embedding (16, 16) that is the diagonal, an entry of each token.
    With ROW_WEIGHTS every 200th is enough, because a wrong sign of a weight spoils whole tensors."""
    with patch.dict(vars(model_cpu), replacements):       # only inside this block
        problem = make_problem(TINY, 7, 0.3)
        error = forward_error(*problem)
        rows = [*check_entries(*problem, every), *check_entries(*problem, 200, ROW_WEIGHTS)]
    # by error: of a tensor's two rows the worse one comes later, and a dict keeps what comes last
    rows.sort(key=lambda row: row[3])
    wrong = {name: worst for name, _, _, worst, _ in rows if worst > TINY_BAR}
    same_forward = error <= FORWARD_BAR             # not so for a NaN
    if same_forward and not wrong:
        return False
    if not same_forward:
        print(f"    the forward: {error:.1e} from the plain ones")
    errors = [f"{name}={wrong[name]:.1e}" for name in BACKWARD if name in wrong]
    print(f"    wrong, {len(wrong)} of {len(BACKWARD)} tensors: "
          f"{', '.join(errors) or 'the backward fits the changed forward'}")
    print(f"    right: {', '.join(name for name in BACKWARD if name not in wrong) or 'none'}")
    return True


def run_breaks(names):
    """Plant each bug.  First check without any bug: if that failed, "caught" would mean nothing."""
    if report_damage({}):
        print("the check fails with no bug planted; run python gradcheck.py")
        return False
    missed = 0
    for name in names:
        print(f"{name}: {BUGS[name][-1]}")
        if not report_damage(altered_functions(BUGS[name], vars(model_cpu))):
            print("    NOT CAUGHT")
            missed += 1
    print(f"caught {len(names) - missed} of {len(names)}")
    return missed == 0


# ------------------------------------------------------------------------------------------------------------
# The GPU engine against model_cpu in float64; it can wait until model_gpu.py.  With fp32's rounding finite differences
# see no error below 1e-4.  But the reference's gradients are proven by now, so the GPU's are compared with them, tensor
# by tensor.
# ------------------------------------------------------------------------------------------------------------
GPU_CONFIG = replace(CONFIGS["big"], layers=4)
# precision -> (bar of the logits and of the whole gradient, bar of the losses).  The gradient of a single tensor may be
# off by twice the first bar
GPU_BARS = {"fp32": (2e-6, 1e-6), "tf32": (2e-3, 1e-4), "bf16": (2e-2, 1e-3)}


def distance(a, b):
    """Relative L2 of an array from b: |a - b| / |b|.  With a NaN in it the result is NaN, and NaN <= bar is False."""
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def whole_step(model, tokens, targets):
    """A step of either engine -> dict name -> array on the host: the gradient of each tensor and of all, the logits,
    the losses."""
    logits = model.logits(tokens)
    model.flat_grads[...] = 0.0
    losses = model.read(model.forward(tokens, targets))
    model.backward()
    flat = model.read(model.flat_grads)
    return model_cpu.param_views(flat, model.config) | {
        "whole gradient": flat, "logits": logits, "losses": losses}


def run_gpu():
    """Print a row per tensor and a column per precision that this GPU has; then the whole gradient, the logits, the
    losses, and in how many entries the same step differs when it is done again -> True if all is well."""
    model_gpu.pick("gpu")                           # ValueError where there is none
    # with HOPPER=0 a Hopper runs what a GeForce RTX 30 or 40 runs
    model_gpu.HOPPER = os.environ.get("HOPPER") != "0"
    precisions = GPU_BARS if model_gpu.default_precision() == "bf16" else ["fp32"]
    reference, tokens, targets = make_problem(GPU_CONFIG, 256)
    exact = whole_step(reference, tokens, targets)
    good = True
    columns = []
    for precision in precisions:
        model = model_gpu.Model(GPU_CONFIG, precision=precision)
        model.write(model.flat_params, reference.flat_params)
        step = whole_step(model, tokens, targets)
        # The second use of this shape is now recorded as a CUDA graph and replayed (class Replay of model_gpu.py).  It
        # must give the same bits
        with patch.object(model_gpu, "RECORD_AT", 2):
            again = whole_step(model, tokens, targets)
        column = {name: distance(step[name], exact[name]) for name in exact}
        bar, loss_bar = GPU_BARS[precision]
        bars = {"whole gradient": bar, "logits": bar, "losses": loss_bar}
        differ = np.count_nonzero(step["whole gradient"] != again["whole gradient"])
        good &= differ == 0 and all(error <= bars.get(name, 2 * bar) for name, error in column.items())
        columns.append(column | {"bar of the whole": bar, "differ when repeated": differ})
    print(f"{GPU_CONFIG.layers} layers of width {GPU_CONFIG.dim}, B 2 x T 256; relative L2 from float64: "
          f"{', '.join(precisions)}")
    for row in columns[0]:
        print(f"  {row:20}" + "".join(f"{column[row]:12.2e}" for column in columns))
    print("all within the bars" if good else "FAILED")
    return good


# ------------------------------------------------------------------------------------------------------------
# The script
# ------------------------------------------------------------------------------------------------------------
def main(argv):
    tests = f"{os.path.dirname(__file__)}/tests"
    parser = Parser(description="Check model_cpu.py's gradients against finite differences: every entry of two "
                    f"tiny models, to {TINY_BAR:.0e}. Exit code 1: an error above the bar, a bug not caught.")
    which = parser.add_mutually_exclusive_group()
    add = which.add_argument
    add("--break", dest="bug", choices=["all", *BUGS], metavar="NAME",
        help=f"plant this bug and see that it is caught; all: one after the other; {', '.join(BUGS)}")
    add("--exercise", metavar="NAME",
        help="first time: write the file to complete; next time: grade it. all: a table of all exercises")
    add("--gpu", action="store_true", help="the GPU engine against model_cpu, in every precision")
    parser.add_argument("--hint", action="store_true", help="with --exercise NAME: the derivation, or an example")
    args = parser.parse_args(argv)
    require(args.exercise not in (None, "all") or not args.hint, "--hint goes with --exercise NAME.")

    if args.exercise:
        require(os.path.exists(tests), f"there is no {tests}, which this needs.")
        sys.path.append(tests)
        import exercises
        good = exercises.run_exercise(args.exercise, args.hint)
    elif args.gpu:
        good = run_gpu()
    elif args.bug:
        good = run_breaks(BUGS if args.bug == "all" else [args.bug])
    else:
        good = run_check(*make_problem(TINY, 7, 0.3))
        good &= run_check(*make_problem(TIED, 7, 0.3), ROW_WEIGHTS)
    return 0 if good else 1


if __name__ == "__main__":
    run_script(main, to_the_end=True)
