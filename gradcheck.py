"""gradcheck.py: is every gradient of model_cpu.py right?  Finite differences give the answer, and planted bugs test
whether the answer can be trusted.

Read model_cpu.py before this.  Five runs:

    python gradcheck.py               every entry of every tensor of a tiny model that has all features
    python gradcheck.py --small       sampled entries of the real small model
    python gradcheck.py --break all   plant known bugs, one by one: is each of them caught?
    python gradcheck.py --gpu         the GPU engine's gradients against float64, in every precision
    python gradcheck.py --exercise linear      write this function yourself (graded by tests/exercises.py)

The idea.  A gradient is a slope: move one weight w by h and see by how much the loss f moves.  That needs the
forward alone, so it is a judge of the backward.  Expand f(w + sh) about w for s = -2, -1, 1, 2 and choose the
four factors so that the terms in h^0, h^2, h^3 and h^4 cancel:

    f'(w) = (f(w-2h) - 8 f(w-h) + 8 f(w+h) - f(w+2h)) / 12h  +  h^4 f^(5)(w) / 30 + ...

Why five points (the fifth, f(w), has the factor 0).  There are two errors.  The formula's own error falls with h:
as h^4 here, as h^2 for the usual three points (f(w+h) - f(w-h)) / 2h.  The rounding of f is about 1e-16 of f.  It
is divided by h, so it grows as h falls.  Measured on the tiny model, worst of all 4,944 entries:

    h               5e-6      1e-5      1e-4      2e-4      1e-3
    five points     2.2e-09   8.6e-10   7.8e-11   6.3e-11   1.5e-09
    three points    1.3e-09   1.6e-09   1.6e-07   6.5e-07   1.6e-05

Why float64.  float32 rounds f at 1e-7, and the best h (0.01) then gives 1e-4 on this model.  A wrong term of
that size, such as an eps in the wrong place, would pass.  The formulas are the same in either precision.  So
what is proven in float64 holds for the float32 of training, up to its rounding.

Why the error of an entry is |by hand - numeric| / max|by hand| OF ITS TENSOR.  The rounding error of the
difference quotient is about the same number for every entry.  So an entry that happens to be near 0 has a large
error relative to itself, which means nothing.  If all errors were divided by the maximum of the whole model, a
tensor of small gradients could be all wrong and pass.

How to read a planted bug.  A wrong derivative spoils the gradient of all that lies BEFORE it in the forward,
and of nothing after it: the first tensor of the backward that is wrong says where to look.  --break lists the
tensors in that order, each with its error, and then those that stay right.

Why wide weights (standard deviation 0.3, also of the gains, which are near 1).  At the usual 0.02 the scores of
attention are nearly 0 and its softmax is nearly uniform.  The gradients of q and k are then a hundred times smaller
than that of v, with which they share a tensor, and an error in them would weigh a hundred times less.

What finite differences cannot see: a forward that computes another model, with a backward that is right for it.
Examples are RoPE on v in both passes, a forgotten 1/sqrt(D) in both, a target shifted by one.  f is a different
function then, and its slopes agree.  So the forward is compared with two others that share no code with it:
forward_plain of model_cpu, and plain_losses below, which computes the loss token by token in loops.  If I have
misunderstood the model itself, all three agree and are wrong.  Only code of other people can show that: PyTorch and
Hugging Face's Llama, in tests/peers.

The check of the CPU does not look at the optimizer, at cached decoding, or at float32: see tests/test_model_cpu.py.
What --gpu leaves out is in tests/test_on_gpu.py.

The file stands alone.  Of tests/ it imports the grader of the exercises and, for --peer, PyTorch's model, each only
when it is asked for.
"""
import dataclasses
import inspect
import math
import os
import re
import sys
import unittest.mock

import model_cpu            # first: it says what to do where NumPy is missing
import model_gpu            # this import works without CuPy and without a GPU, too
import numpy as np
from model_cpu import CONFIGS
from script import Parser, require, run_script

TINY = model_cpu.Config(dim=16, heads=4, kv_heads=2, layers=2, hidden=24, context=8, vocab=16, predict=3,
                        mtp_weight=0.7)
TIED = dataclasses.replace(TINY, layers=1, predict=1, tied=True)        # as other people's models are
WEIGHTS = [1.5, -0.5]    # of the two rows, as DPO has them: one text becomes more probable, the other less
TINY_STEP = 2e-4         # h: the best of the table above
TINY_BAR = 1e-8
SMALL_STEP = 1e-3        # the weights are narrower (0.02), so the loss bends less, and a larger h rounds less
SMALL_BAR = 1e-7
FORWARD_BAR = 1e-12      # of the forward against the two plain ones


def slope(loss, weight, index, h):
    """d loss() / d weight[index], by the formula above."""
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
    """-> (model, tokens (2,T), targets (2,T+K-1)), drawn at random.  std: that of wide weights; None: the weights are
    the initial ones.

    With TINY and T = 7 it has every feature: 4 query and 2 key/value heads, 2 RoPE frequencies, 3 prediction heads, a
    length that is no power of two, a token that occurs twice, masked targets.  Row 1 has no target at all for head 2,
    which reads its targets 2 to 8."""
    rng = np.random.default_rng(1)
    model = model_cpu.Model(config)
    if std:
        for weight in model.params.values():
            weight[...] = std * rng.standard_normal(weight.shape)
            if weight.ndim == 1:
                weight += 1.0                       # a gain
    # the GPU stores float32: the reference starts from the same numbers
    model.write(model.flat_params, model.flat_params.astype(np.float32))
    tokens, targets = [rng.integers(0, config.vocab, (2, width)) for width in (T, T + config.predict - 1)]
    tokens[:, 5] = tokens[:, 1]
    targets[0, ::7] = -1
    targets[1, 2:9] = -1
    return model, tokens, targets


def gradients(model, tokens, targets, weights=None):
    """dict name -> gradient by hand.  Each row of the batch is a micro-batch of its own, so that accumulation
    and the divisor common to the whole step are checked as well; the finite differences take the whole batch
    at once.  weights (2,): of the rows, as rl.py has them."""
    counted = model_cpu.count_targets(targets, tokens.shape[1], model.config.predict)
    model.flat_grads[...] = 0.0
    for b in range(len(tokens)):
        row = slice(b, b + 1)
        model.forward(tokens[row], targets[row], counted, None if weights is None else weights[row])
        model.backward()
    return model_cpu.table_views(model.flat_grads.copy(), model_cpu.param_table(model.config))


def check_entries(model, tokens, targets, h, every=1, weights=None):
    """Check every entry of each tensor, or every 2nd, 3rd ..., and the largest.  Yields for each tensor (name, shape,
    entries checked, worst relative error, index of the worst)."""
    def loss():
        return model.forward(tokens, targets, weights=weights) @ model.config.head_weights

    for name, gradient in gradients(model, tokens, targets, weights).items():
        largest = np.abs(gradient).argmax()
        entries = sorted({largest, *range(0, gradient.size, every)})
        weight = model.params[name].reshape(-1)                 # a view
        numeric = [slope(loss, weight, i, h) for i in entries]
        by_hand = gradient.reshape(-1)
        # Plus the smallest number: where a whole tensor is 0 by mistake, the error is then huge, and not 0 / 0
        errors = np.abs(by_hand[entries] - numeric) / (abs(by_hand[largest]) + sys.float_info.min)
        errors[np.isnan(errors)] = np.inf
        worst = np.argmax(errors)
        index = np.unravel_index(entries[worst], gradient.shape)
        yield name, gradient.shape, len(entries), errors[worst], index


# ------------------------------------------------------------------------------------------------------------
# The loss once more: the equations of the model in loops.  Only the weights are those of model_cpu
# ------------------------------------------------------------------------------------------------------------
def plain_losses(w, config, tokens, targets):
    """(K,) losses.  Token by token, head by head: a token reads the list of the keys and values before it and its own.
    So no mask and no batch can be wrong."""
    D = config.dim // config.heads
    R = config.heads // config.kv_heads
    frequency = config.rope_theta ** (-2 / D * np.arange(D // 2))
    nlls = [[] for _ in range(config.predict)]           # -log p of each counted target, by head

    def norm(x, name):
        return x / math.sqrt(x @ x / len(x) + config.norm_eps) * w[name]

    for row, row_targets in zip(tokens, targets):
        layers = [[] for _ in range(config.layers)]     # of each the list of (keys (G,D/2), values (G,D)) of the tokens
        for t, token in enumerate(row):
            x = w["embed"][token]
            for i, past in enumerate(layers):
                parts = (w[f"layers.{i}.qkv"] @ norm(x, f"layers.{i}.norm1")).reshape(-1, D)        # (H+2G,D)
                # RoPE: entries i and i + D/2 are one complex number, which position t turns by the angle
                # t theta^(-2i/D).  q . k is then the real part of vdot(k, q) = sum conj(k) q
                turned = (parts[:, :D // 2] + 1j * parts[:, D // 2:]) * np.exp(1j * t * frequency)
                past.append((turned[config.heads:], parts[-config.kv_heads:]))
                y = []
                for h in range(config.heads):
                    p = [math.exp(np.vdot(k[h // R], turned[h]).real / math.sqrt(D)) for k, _ in past]
                    y.append(sum(p_s * v[h // R] for p_s, (_, v) in zip(p, past)) / sum(p))
                x = x + w[f"layers.{i}.out"] @ np.concatenate(y)
                gate, up = (w[f"layers.{i}.gate_up"] @ norm(x, f"layers.{i}.norm2")).reshape(2, -1)
                x = x + w[f"layers.{i}.down"] @ (gate / (1 + np.exp(-gate)) * up)
            logits = (w["heads"] @ norm(x, "norm")).reshape(config.predict, config.vocab)
            for k, target in enumerate(row_targets[t:t + config.predict]):
                if target >= 0:
                    nlls[k].append(math.log(sum(np.exp(logits[k]))) - logits[k][target])
    return np.array([sum(nll) / max(len(nll), 1) for nll in nlls])


def forward_error(model, tokens, targets):
    """The largest relative difference of a head's loss from plain_losses, or difference of a logit from forward_plain.
    A NaN is within no bar."""
    plain = plain_losses(model.params, model.config, tokens, targets)
    of_losses = np.abs(model.forward(tokens, targets) / plain - 1)
    logits = [model_cpu.forward_plain(model.params, model.config, row) for row in tokens]
    return np.max([of_losses.max(), np.abs(model.logits(tokens) - logits).max()])


# ------------------------------------------------------------------------------------------------------------
# Known bugs: name -> (one or several edits, the mistake in one line).  The edit "rope_backward: -sin -> sin" puts sin
# in place of -sin in the source of the function rope_backward.
# ------------------------------------------------------------------------------------------------------------
BUGS = {
    # First the bugs that leave the forward as it is.  The slopes must show them.
    "rope_sign": ("rope_backward: -sin -> sin",
        "The backward turns the gradient by the same angle again, instead of back."),
    "group_not_summed": ("attention_backward: .sum(axis=2, keepdims=True) -> [:, :, -1:]",
        "The query heads of a group write their gradient of k and v one over the other: the last stays."),
    "backward_scale": ("attention_backward: 1.0 / math.sqrt(q.shape[-1]) -> 1.0",
        "The backward of attention forgets the factor 1/sqrt(D)."),
    "softmax_delta": ("attention_backward: (dP, delta -> (dP, 0 * delta",
        "The softmax's derivative taken as P dP: the second term, which makes each row sum to 0, is lost."),
    "residual_dropped": ("block_backward: dx += back -> dx[...] = back",
        "x + f(x) differentiated as f(x): the gradient that passes straight through is lost."),
    "norm_projection": ("rmsnorm_backward: dx -= projection -> pass",
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
        "cross_entropy_forward: , divisor, out -> , np.maximum((targets >= 0).sum(axis=0), 1), out",
        "cross_entropy_backward: / divisor -> / np.maximum((targets >= 0).sum(axis=0), 1)",
        "A micro-batch divides its loss by the count of its own targets, not of the whole step's."),
    "masked_pulled": ("cross_entropy_backward: >= 0 -> >= -1",
        "A masked target is left in the backward, where index -1 silently is the vocabulary's last token."),
    "row_weights": ("cross_entropy_backward: head_weights / divisor -> abs(head_weights) / divisor",
        "The sign of a row's weight is lost: what was rejected is imitated like what was chosen."),
    "head_weight": ("cross_entropy_backward: head_weights / divisor -> 1 / divisor",
        "The backward forgets that the extra heads count for less than head 0."),
    # Now the bugs that change the forward.  Where the backward fits the changed forward, the slopes agree, and only the
    # plain forwards can show the bug.
    "rope_on_v": ("rotated_part: + config.kv_heads -> + 2 * config.kv_heads",
        "RoPE turns v as well as q and k."),
    "rope_layout": (
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
        "The extra heads all learn the next token but one: head k reads the targets from 1, not from k."),
    "masked_counted": ("count_targets: >= 0 -> >= -1",
        "The divisor counts the masked targets too, so a masked batch's loss looks better than it is."),
}


def plant(bug, scope=None):
    """bug: a row of BUGS -> dict of the functions that it alters, by name, compiled from their edited source.  scope:
    where they are, by default in model_cpu."""
    scope = scope or vars(model_cpu)
    sources = {}
    planted = {}
    for edit in bug[:-1]:
        name, there, instead = re.fullmatch("(.*?): (.*) -> (.*)", edit, re.DOTALL).groups()
        source = sources.setdefault(name, inspect.getsource(scope[name]))
        sources[name] = source.replace(there, instead)
        exec(sources[name], scope, planted)
    return planted


# ------------------------------------------------------------------------------------------------------------
# The runs on the CPU, each -> True if all is well
# ------------------------------------------------------------------------------------------------------------
def run_check(model, tokens, targets, h, bar, every=1, weights=None):
    """Print a row per tensor, then the overall figures."""
    of_forward = forward_error(model, tokens, targets)
    worst = 0.0
    checked = 0
    print(f"{'tensor':18} {'shape':>12} {'checked':>8} {'worst error':>12}   at")
    for name, shape, count, error, index in check_entries(model, tokens, targets, h, every, weights):
        mark = "   <-- above the bar" if error > bar else ""
        print(f"{name:18} {shape!s:>12} {count:8} {error:12.1e}   {list(map(int, index))}{mark}")
        worst = max(worst, error)
        checked += count
    print(f"the forward against the plain ones: worst error {of_forward:.1e} (bar {FORWARD_BAR:.0e})")
    print(f"overall: {checked} of {model_cpu.param_count(model.config)} entries, "
          f"worst relative error {worst:.1e} (bar {bar:.0e})")
    good = of_forward <= FORWARD_BAR and worst <= bar
    print("all within the bars" if good else "FAILED")
    return good


# TINY's tensors as the backward reaches them: the heads first, the embedding last
LAYER_BACKWARD = ["down", "gate_up", "norm2", "out", "qkv", "norm1"]
BACKWARD = ["heads", "norm", *(f"layers.{i}.{name}" for i in (1, 0) for name in LAYER_BACKWARD), "embed"]


def report_damage(replacements, every=17):
    """Plant the replacements in the tiny model, and print what is wrong then -> whether anything is.  Every 17th entry
    of the embedding (V, 16) is one of each row, so that also the token that occurs twice is checked."""
    with unittest.mock.patch.dict(vars(model_cpu), replacements):       # for as long as this lasts
        problem = make_problem(TINY, 7, 0.3)
        error = forward_error(*problem)
        rows = [*check_entries(*problem, TINY_STEP, every), *check_entries(*problem, TINY_STEP, 200, WEIGHTS)]
    rows.sort(key=lambda row: row[3])               # of a tensor's two errors the larger one stays
    wrong = {name: worst for name, _, _, worst, _ in rows if worst > TINY_BAR}
    same_forward = error <= FORWARD_BAR             # not so for a NaN
    if same_forward and not wrong:
        return False
    if not same_forward:
        print(f"    the forward: {error:.1e} from the plain ones")
    errors = [f"{name}={wrong[name]:.1e}" for name in BACKWARD if name in wrong]
    print(f"    wrong, {len(wrong)} of {len(BACKWARD)} tensors: {', '.join(errors)}")
    print(f"    right: {', '.join(name for name in BACKWARD if name not in wrong) or 'none'}")
    return True


def run_breaks(names):
    """Plant each bug.  First none at all, or "caught" would mean nothing."""
    if report_damage({}):
        print("the check fails with no bug planted; run python gradcheck.py")
        return False
    missed = 0
    for name in names:
        print(f"{name}: {BUGS[name][-1]}")
        if not report_damage(plant(BUGS[name])):
            print("    NOT CAUGHT")
            missed += 1
    print(f"caught {len(names) - missed} of {len(names)}")
    return missed == 0


# ------------------------------------------------------------------------------------------------------------
# The GPU engine against model_cpu in float64.  Finite differences would drown in fp32's rounding; but the
# reference's gradients are proven by now, so the GPU's are compared with them, tensor by tensor.
# ------------------------------------------------------------------------------------------------------------
GPU_CONFIG = dataclasses.replace(CONFIGS["big"], layers=4)
# precision -> bar of the logits and of the whole gradient (a tensor's may be twice as far off), bar of a loss
GPU_BARS = {"fp32": (2e-6, 1e-6), "tf32": (2e-3, 1e-4), "bf16": (2e-2, 1e-3)}


def distance(a, b):
    """Relative L2 of an array from b: |a - b| / |b|.  NaN, where there is one, is within no bar."""
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def whole_step(model, tokens, targets):
    """A step of either engine -> dict name -> array on the host: the gradient of each tensor and of all, the logits,
    the losses."""
    logits = model.logits(tokens)
    model.flat_grads[...] = 0.0                             # as after an update
    model.added = False
    losses = model.read(model.forward(tokens, targets))
    model.backward()
    flat = model.read(model.flat_grads)
    return {**model_cpu.param_views(flat, model.config), "whole gradient": flat, "logits": logits, "losses": losses}


def compare_engines(precisions, std, peer):
    """Print a row per tensor and a column per precision; then the whole gradient, the logits, the losses, and
    in how many entries the same step differs when it is done again -> True if all is well.  std: see
    make_problem; wide weights have no bars.  peer: PyTorch's error stands beside ours, and ours may be 1.5 as large."""
    reference, tokens, targets = make_problem(GPU_CONFIG, 256, std)
    exact = whole_step(reference, tokens, targets)
    good = True
    columns = []
    for precision in precisions:
        model = model_gpu.Model(GPU_CONFIG, precision=precision)
        model.write(model.flat_params, reference.flat_params)
        step = whole_step(model, tokens, targets)
        with unittest.mock.patch.object(model_gpu, "RECORD_AT", 2):         # now as a CUDA graph
            again = whole_step(model, tokens, targets)
        column = {name: distance(step[name], exact[name]) for name in exact}
        differ = np.count_nonzero(step["whole gradient"] != again["whole gradient"])
        bar, loss_bar = GPU_BARS[precision]
        bars = {"whole gradient": bar, "logits": bar, "losses": loss_bar}
        within = std or all(error <= bars.get(name, 2 * bar) for name, error in column.items())
        good = good and within and differ == 0
        column |= {"bar of the whole": bar, "differ when repeated": differ}
        if peer:
            import torch_twin           # here, since it needs PyTorch
            gradient = torch_twin.gradient(reference, tokens, targets, precision)
            peers = distance(gradient, exact["whole gradient"])
            ratio = column["whole gradient"] / peers
            column |= {"PyTorch's whole": peers, "ours / PyTorch's": ratio}
            good = good and ratio <= 1.5
        columns.append(column)
    print(f"weights {std or 'as at the start'}, {GPU_CONFIG.layers} layers of width {GPU_CONFIG.dim}, B 2 x T 256; "
          f"relative L2 from float64: {', '.join(precisions)}")
    for row in column:
        print(f"  {row:20}" + "".join(f"{column[row]:12.2e}" for column in columns))
    print("all within the bars" if good else "FAILED")
    return good


def run_gpu(peer):
    """The initial weights and wide ones, in all precisions that this GPU has.  peer: PyTorch's error beside ours."""
    model_gpu.pick("gpu")                           # ValueError where there is none
    model_gpu.HOPPER = os.environ.get("HOPPER") != "0"      # 0: what a GeForce RTX 30 or 40 runs
    precisions = tuple(GPU_BARS) if model_gpu.default_precision() == "bf16" else ("fp32",)
    good = compare_engines(precisions, None, peer)
    return compare_engines(precisions, 0.06, peer) and good


# ------------------------------------------------------------------------------------------------------------
# The script
# ------------------------------------------------------------------------------------------------------------
def main(argv):
    tests = f"{os.path.dirname(__file__)}/tests"
    sys.path[:0] = tests, f"{tests}/peers"      # first: there may be a folder exercises here
    parser = Parser(description="Check model_cpu.py's gradients against finite differences: every entry of a "
                    f"tiny model, to {TINY_BAR:.0e}. Exit code 1: an error above the bar, a bug not caught.")
    which = parser.add_mutually_exclusive_group()
    add = which.add_argument
    add("--small", action="store_true", help=f"entries of the small model, to {SMALL_BAR:.0e}")
    add("--break", dest="bug", choices=["all", *BUGS], metavar="NAME",
        help="plant this bug (all: one after the other) and see that it is caught")
    add("--list", action="store_true", help="the names of the bugs, with their stories")
    add("--exercise", metavar="NAME", help="write the file to complete; again: is it right?  all: a table of all names")
    add("--gpu", action="store_true", help="the GPU engine against model_cpu, in every precision")
    parser.add_argument("--peer", action="store_true", help="--gpu, with PyTorch's error beside ours")
    parser.add_argument("--hint", action="store_true", help="with --exercise NAME: the derivation")
    args = parser.parse_args(argv)
    require(args.exercise not in (None, "all") or not args.hint, "--hint goes with --exercise NAME.")
    require(os.path.exists(tests) or not args.exercise and not args.peer, f"there is no {tests}, which this needs.")

    if args.list:
        for name, (*_, story) in BUGS.items():
            print(f"{name:20} {story}")
        return 0
    if args.exercise:
        import exercises
        good = exercises.run_exercise(args.exercise, args.hint)
    elif args.gpu or args.peer:
        good = run_gpu(args.peer)
    elif args.bug:
        good = run_breaks(BUGS if args.bug == "all" else [args.bug])
    elif args.small:
        good = run_check(*make_problem(CONFIGS["small"], T=70), SMALL_STEP, SMALL_BAR, every=20000)
    else:
        good = run_check(*make_problem(TINY, 7, 0.3), TINY_STEP, TINY_BAR)
        good &= run_check(*make_problem(TIED, 7, 0.3), TINY_STEP, TINY_BAR, weights=WEIGHTS)
    return 0 if good else 1


if __name__ == "__main__":
    run_script(main, to_the_end=True)
