"""exercises.py: write a function of this project yourself, and see whether it is right or what is wrong.

Read before it: model_cpu.py and gradcheck.py.  To use it you need not read it:

    python gradcheck.py --exercise linear            write exercises/linear.py; the next time: is it right?
    python gradcheck.py --exercise linear --hint     how it is derived
    python gradcheck.py --exercise all               a table of all of them

How it works.  A small model trains, draws and learns a tokenizer, and every call of an exercise's function in
that run is recorded; some calls are made by hand.  The original, the reader's function and the planted bugs then run on
copies of the recorded arguments.  All arrays are compared but those that a function only computes in.

What it does not do: it does not read the reader's source, so any way that gives the right arrays is right.
And it does not ask whether the originals are right: that is gradcheck.py's part.
"""
import _thread
import contextlib
import copy
import dataclasses
import functools
import inspect
import math
import os
import pathlib
import re
import runpy
import sys
import threading
import time
import traceback

import model_cpu
import numpy as np
import rl
from gradcheck import BUGS, TINY, TINY_BAR, altered_functions, gradients, make_problem, slope
from script import require
from tokenizer import count_words, learn_merges_plain

# ------------------------------------------------------------------------------------------------------------
# 1. Exercises that have no solution here: their judge is the measured slope alone
# ------------------------------------------------------------------------------------------------------------
def layernorm_forward(out, x, gain, bias):
    """LayerNorm (Ba, Kiros & Hinton 2016), which GPT-2 has where we have RMSNorm.  out, x (N,C); gain, bias
    (C,).

        out_ni = (x_ni - mean_n) / sqrt(var_n + 1e-5) * gain_i + bias_i
        mean_n = mean_i x_ni        var_n = mean_i (x_ni - mean_n)^2
    """
    centred = x - x.mean(axis=1, keepdims=True)
    out[...] = centred / np.sqrt((centred ** 2).mean(axis=1, keepdims=True) + 1e-5) * gain + bias


# Derivation, for one row: rstd = 1 / sqrt(var + 1e-5), xhat = (x - mean) rstd, dxhat_i = dout_i gain_i.
#     d mean / dx_j = 1/C            d var / dx_j = 2/C (x_j - mean), since sum_i (x_i - mean) = 0
#     d rstd / dx_j = -rstd^3 / 2  d var / dx_j = -rstd^2 xhat_j / C
#     d xhat_i / dx_j = rstd ([i == j] - 1/C - xhat_i xhat_j / C)
#     dx_j = sum_i dxhat_i d xhat_i / dx_j = rstd (dxhat_j - mean_i(dxhat_i) - xhat_j mean_i(dxhat_i xhat_i))
#     dgain_i = sum_n dout_ni xhat_ni          dbias_i = sum_n dout_ni
def layernorm_backward(dx, dgain, dbias, dout, x, gain, bias):
    """Writes dx (N,C), adds to dgain (C,) and dbias (C,)."""


def geglu_forward(out, gate_up):
    """GEGLU (Shazeer 2020), which Gemma has where we have SwiGLU.  gate_up (N,2F) = [g | u]; out (N,F).

        out = gelu(g) * u,   gelu(g) = g/2 (1 + tanh(a)),   a = sqrt(2/pi) (g + 0.044715 g^3)
    """
    gate, up = np.split(gate_up, 2, axis=1)
    out[...] = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate ** 3))) * up


# Derivation.  With t = tanh(a), so that gelu(g) = g/2 (1 + t):
#     t' = (1 - t^2) a',    a' = sqrt(2/pi) (1 + 3 * 0.044715 g^2)
#     gelu'(g) = (1 + t) / 2 + g/2 (1 - t^2) a'
#     out = gelu(g) u     =>     dg = dout u gelu'(g),    du = dout gelu(g)
def geglu_backward(dgate_up, dout, gate_up):
    """Writes dgate_up (N,2F) = [dg | du]."""


def softcap_forward(out, x, cap):
    """Soft capping, as of Gemma 2's logits: nearly x where x is small, never beyond cap.  out, x (N,C).

        out = cap * tanh(x / cap)
    """
    out[...] = cap * np.tanh(x / cap)


# Derivation.  tanh'(s) = 1 - tanh(s)^2, with s = x / cap and so ds/dx = 1 / cap:
#     dx_ni = dout_ni cap (1 - tanh(s_ni)^2) / cap = dout_ni (1 - tanh(x_ni / cap)^2)
# The slope is 1 at x = 0 and all but 0 far out: what is capped gets no gradient.
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
        if f"d{name}" in values:
            gradient = values[f"d{name}"]
            if f"d{name}" not in ADDED:
                gradient[...] = 0.0
            for index in np.ndindex(gradient.shape):
                gradient[index] += slope(loss, values[name], index, 1e-3)


# ------------------------------------------------------------------------------------------------------------
# 2. The exercises, and mistakes of their own
# ------------------------------------------------------------------------------------------------------------
EXERCISES = {re.sub("_backward|_update|_weights|_plain", "", function.__name__): function for function in (
    model_cpu.linear_backward, model_cpu.embedding_backward, model_cpu.swiglu_backward,
    model_cpu.cross_entropy_backward, model_cpu.rmsnorm_backward, model_cpu.rope_backward,
    model_cpu.attention_backward, model_cpu.block_backward, model_cpu.adamw_update, model_cpu.muon_update,
    model_cpu.newton_schulz, model_cpu.head_targets, model_cpu.sample, learn_merges_plain,
    rl.reinforce_weights, rl.dpo_weights, layernorm_backward, geglu_backward, softcap_backward)}
LIMIT = 20            # seconds that all calls of the reader's function may take
MARKS = "layernorm", "geglu", "softcap"       # without a solution here: section 1
FREE = "dS", "shared", "grad"         # arguments to compute in: what is left in them is not compared
ADDED = "dw", "dembed", "dgain", "dbias"      # gradients of weights, which every micro-batch adds to

# An optimizer has no slope to measure, and model_cpu does not know what a weight is for: --break could not see
# these; they are planted in the exercises alone.
EXERCISE_BUGS = {
    "no_correction": ("adamw_update: / (1 - beta2 ** step) -> ", "adamw_update: / (1 - beta1 ** step) -> ",
        "No bias correction: m and v start at 0 and are too small in the first steps, v more than m."),
    "decay_coupled": (
        "adamw_update: m *= beta1 -> grad += decay * param\n    m *= beta1", "adamw_update: lr * decay -> 0",
        "Decay added to the gradient, as in Adam with L2: it enters m and v, and is divided by the root."),
    "eps_under_root": ("adamw_update: (1 - beta2 ** step)) + eps -> (1 - beta2 ** step) + eps)",
        "eps added under the root, as in RMSNorm, where it weighs as much as its root does outside."),
    "no_nesterov": ("muon_update: newton_schulz(ahead) -> newton_schulz(m)",
        "The step is taken along the running mean itself: it does not look ahead by one more gradient."),
    "shorter_side": ("muon_update: max(param.shape) -> min(param.shape)",
        "The root of the shorter side: where a matrix is not square, its step is too short."),
    "spectral_start": ("newton_schulz: np.linalg.norm(X) -> np.linalg.norm(X, 2)",
        "M divided by its largest singular value, where the Frobenius norm belongs."),
    "no_baseline": ("reinforce_weights: - by_group.mean(axis=1, keepdims=True) -> ",
        "The baseline left out: the direction is right, and the noise many times as large."),
    "one_baseline": ("reinforce_weights: axis=1, keepdims=True -> ",
        "The mean of all groups as baseline: an answer counts for the luck of having an easy prompt."),
    "rejected_pulled": ("dpo_weights: -push -> push",
        "The sign of the rejected answer: both become more probable."),
    "no_reference": ("dpo_weights: log_probs - reference -> log_probs",
        "No reference: the model is compared with nothing, and z is not 0 when it is still the base."),
    "no_beta": ("dpo_weights: beta / -> 1 /",
        "beta left out of the weights, as if the loss did not contain it."),
}


# ------------------------------------------------------------------------------------------------------------
# 3. The reader's file, and the calls that judge it
# ------------------------------------------------------------------------------------------------------------
def exercise_text(name):
    """The reader's file at first: forward and helpers, then the signature and docstring of the function."""
    function = EXERCISES[name]
    head = re.match('(?s).*?""".*?"""', inspect.getsource(function))[0]
    own = function.__globals__
    forward = own[function.__name__.replace("_backward", "_forward")]   # itself, where there is no pair
    codes = [forward.__code__, function.__code__]
    # up to Python 3.11 a comprehension is a piece of code of its own
    codes += [part for code in codes for part in code.co_consts if inspect.iscode(part)]
    used = {forward.__name__, *(name for code in codes for name in code.co_names)}
    imports = ""
    sources = ""
    for key, f in own.items():
        if key not in used or f is function:
            continue
        # a helper stands in the file; constants, other forwards and what is an exercise itself are imported
        solution = inspect.isfunction(f) and (f in EXERCISES.values() or key.endswith("_forward"))
        if key.isupper() or solution and f is not forward:
            imports += f"from {function.__module__} import {key}\n"
        elif inspect.isfunction(f):
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
    """-> dict name of an exercise -> the calls of its function in a small run, each a dict of arguments.

    Each number that a solution could hold in place of an argument comes with two values: the sizes of the model,
    the length of a text, the rates of an optimizer, the number of groups and of pairs, the words and the merges."""
    model, tokens, targets = make_problem(TINY, 7, 0.3)
    gradients(model, tokens, targets)           # so that no buffer is empty when the recording begins
    other = make_problem(dataclasses.replace(TINY, heads=2, kv_heads=1, layers=1, hidden=16, predict=2), 6, 0.3)
    gradients(*other)
    names = {function.__code__: name for name, function in EXERCISES.items()}
    calls = {name: [] for name in EXERCISES}

    def watch(frame, event, _):
        if event == "call" and frame.f_code in names:
            calls[names[frame.f_code]].append(copy.deepcopy(dict(frame.f_locals)))

    with_muon = model_cpu.Model(TINY, optimizer="muon")
    sys.setprofile(watch)
    for rates in (0.1, 0.9, 0.95, 1e-3), (0.03, 0.8, 0.7, 1e-2):        # lr, beta1, beta2, eps
        gradients(model, tokens, targets)
        model.update(*rates)
        with_muon.flat_grads[...] = model.flat_params       # any numbers will do
        with_muon.update(*rates, decay=rates[0], momentum=rates[1])
    gradients(*other)
    for seed, how in enumerate([(0, 0, 1), (1, 0, 1), (0.7, 3, 1), (1.5, 0, 0.6), (1, 5, 0.8)]):    # temperature, k, p
        list(model_cpu.generate(model, [1, 2, 3], *how, seed=seed, most=30))
    # the first time the pairs run out
    for text, most_merges in (model_cpu.TEXT + " aaaaaaa banana hahaha \xe9\xe9", 240), (model_cpu.TEXT[::-1], 9):
        learn_merges_plain(count_words([text]), most_merges)
    sys.setprofile(None)
    rng = np.random.default_rng(2)
    shapes = {"gain": 8, "bias": 8, "gate_up": (5, 16), "cap": None}    # None: a number; all others (5, 8)
    for name in 2 * MARKS:
        calls[name].append({key: rng.standard_normal(shapes.get(key.removeprefix("d"), (5, 8)))
                            for key in inspect.signature(EXERCISES[name]).parameters})
    first = calls["cross_entropy"][0]
    calls["cross_entropy"].append({**first, "scale": -first["scale"]})        # as of what was rejected
    calls["reinforce"] = [{"rewards": rng.standard_normal(groups * rl.GROUP)} for groups in (2, 3)]
    calls["dpo"] = [{"log_probs": rng.standard_normal(n), "reference": rng.standard_normal(n), "beta": beta}
                    for n, beta in ((8, 0.3), (6, 0.2))]
    # so large that the tiny number beside its norm, which keeps a matrix of zeros from 0 / 0, does not show
    calls["newton_schulz"] = [{"M": 100 * rng.standard_normal(shape)} for shape in ((5, 8), (8, 5), (6, 6))]
    return calls


# ------------------------------------------------------------------------------------------------------------
# 4. The verdict
# ------------------------------------------------------------------------------------------------------------
def outcome(function, call):
    """dict label -> array after the function ran on a copy of a call, with its result (None: before it)."""
    arguments = copy.deepcopy(call)
    found = {}
    result = function and function(*arguments.values())
    if isinstance(result, tuple):
        result = np.concatenate([*map(np.ravel, result)])
    if result is not None:
        found["the result"] = np.array(result)
    for name, value in arguments.items():
        parts = vars(value) if isinstance(value, model_cpu.Arrays) else {None: value}
        for key, part in parts.items():
            if name not in FREE and isinstance(part, np.ndarray):
                found[f"{name}.{key}" if key else name] = part
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
    g = got[mask].astype(float)
    w = want[mask].astype(float)
    b = np.nan * w if before is None else before[mask]
    write = f"{label} += " if label.split(".")[0] in ADDED else f"{label}[...] = "
    ways = [(w, b, "It should be as it was before the call."),
            (g, b, f"Nothing was written to it: write `{write}...`; `{label} = ...` only names a new array."),
            (g, w - b, "`+=` is the contract, and this looks like `=`: what was there before is lost."),
            (g, w + b, "`=` is the contract, and this looks like `+=`: what was there before is in it.")]
    for x, y, what in (g, w, "what it should be"), (g - b, w - b, "what should be added"):
        if x.size > 1:
            ratio = x @ y / (y @ y or 1)
            ways.append((x, ratio * y, f"Each of these is {ratio:.6g} times {what}."))
    reasons = [sentence for x, y, sentence in ways if not off(x, y).any()]
    return [f"{label}: {which}; {entry}", *reasons[:1]]


def differing(before, got, want):
    """All three: what outcome gave for each call.  -> dict label -> [(before, got, want), ...] of those
    calls in which this array is not what it should be."""
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
    for bug, row in (BUGS | EXERCISE_BUGS).items():
        planted = altered_functions(row, vars(rl) | vars(model_cpu)).get(function.__name__)
        if planted and not differing(before, got, [outcome(planted, call) for call in calls]):
            return [*lines, f"Just so behaves the bug {bug}: {row[-1]}"]
    return lines


def is_empty(function):
    """Whether it has a docstring and nothing else."""
    code, empty = function.__code__, layernorm_backward.__code__
    return code.co_code == empty.co_code and code.co_consts[1:] == empty.co_consts[1:]


@contextlib.contextmanager
def stopped_after(seconds):
    """What runs inside is stopped after this time by a TimeoutError, as Ctrl-C would stop it."""
    timer = threading.Timer(seconds, _thread.interrupt_main)
    end = time.monotonic() + seconds
    timer.start()
    try:
        yield
    except KeyboardInterrupt as error:
        if time.monotonic() < end:                  # it was Ctrl-C
            raise
        raise TimeoutError(f"It still ran after {seconds} seconds and was stopped. Does a loop never end?") from error
    finally:
        timer.cancel()


def grade(name, calls):
    """The verdict on exercises/NAME.py in sentences; none: it is right."""
    path = f"exercises/{name}.py"
    function = EXERCISES[name].__name__
    call = {}
    got = []
    if not os.path.exists(path):
        return ["not begun"]
    try:
        with stopped_after(LIMIT):
            scope = runpy.run_path(path)
            if is_empty(scope[function]):
                return [f"Nothing is written in {path} yet: the body of {function} is empty."]
            for call in calls:
                got.append(outcome(scope[function], call))
    except (Exception, SystemExit) as error:            # whatever it is, it is the reader's
        text = "".join(traceback.format_exception(error))
        where = "".join(re.findall(rf'"{path}"(, line \d+)', text)[-1:])       # the innermost in their file
        lines = [f"{path}{where}: {text.splitlines()[-1]}"]
        if call:
            arguments = [f"{label} {getattr(value, 'shape', value)!s:.70}" for label, value in call.items()]
            lines.append(f"The call: {', '.join(arguments)}")
        return lines
    return compare(name, calls, got)


# ------------------------------------------------------------------------------------------------------------
# 5. The run
# ------------------------------------------------------------------------------------------------------------
def run_exercise(name, hint):
    """Print the derivation, or write the reader's file, or judge it (all: every one)."""
    path = f"exercises/{name}.py"
    require(name == "all" or name in EXERCISES, f"there is no exercise {name}; there are {', '.join(EXERCISES)}.")
    if hint:
        print(re.sub("(?m)^# ?", "", inspect.getcomments(EXERCISES[name]) or EXERCISES[name].__doc__))
        return True
    if name != "all" and not os.path.exists(path):
        os.makedirs("exercises", exist_ok=True)
        pathlib.Path(path).write_text(exercise_text(name))
        print(f"Wrote {path}: write the body of {EXERCISES[name].__name__} there, then run this again.")
        return True
    calls = record()
    good = True
    for each in EXERCISES if name == "all" else [name]:
        verdict = grade(each, calls[each])
        good &= not verdict
        lines = verdict or [f"right in {len(calls[each])} call{'s' * (len(calls[each]) > 1)}"]
        print(f"{each:15}" + f"\n{'':15}".join(lines[:1] if name == "all" else lines))
    return good


