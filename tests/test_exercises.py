"""gradcheck.py --exercise: the file, the verdicts and their words.

No solution stands here: a right answer is the body of the model's own function, by inspect, and a wrong one
is the same with one thing changed."""
import inspect
import math
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
from numpy.testing import assert_allclose
import pytest
from cases import once_a_module, parametrize

import exercises
import gradcheck

ROOT = os.path.dirname(os.path.abspath(gradcheck.__file__))
OWN = [name for name in exercises.EXERCISES if name not in exercises.MARKS]
LIBRARY = "array", "collections", "functools", "heapq", "itertools"
BEGUN = "    # Your lines here.\n"


@once_a_module
def calls():
    return exercises.record()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("exercises")


def body(name):
    """The lines of the original below its docstring."""
    return re.sub('(?s)^.*?""".*?"""\n', "", inspect.getsource(exercises.EXERCISES[name]), count=1)


def write(name, lines):
    text = exercises.exercise_text(name)
    assert text.endswith(BEGUN)
    if name == "learn_merges":          # the original's own imports, which a reader need not have
        text = "".join(f"from {module} import *\n" for module in LIBRARY) + text
    pathlib.Path(f"exercises/{name}.py").write_text(text.replace(BEGUN, lines))


def verdict(name, calls, lines, there="", instead=""):
    """What is said of these lines, with one thing changed."""
    assert there in lines
    write(name, lines.replace(there, instead) if there else lines)
    return exercises.grade(name, calls[name])


def run(*arguments):
    command = [sys.executable, f"{ROOT}/gradcheck.py", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "Traceback" not in result.stderr
    return result.returncode, result.stdout, result.stderr


# ------------------------------------------------------------------------------------------------------------
# The file
# ------------------------------------------------------------------------------------------------------------
def test_from_the_first_run_to_the_verdict():
    """From a folder that is not the repository's."""
    wrote = "Wrote exercises/linear.py: write the body of linear_backward there, then run this again.\n"
    assert run("--exercise", "linear") == (0, wrote, "")
    file = pathlib.Path("exercises/linear.py")
    text = file.read_text()
    assert text == exercises.exercise_text("linear") and "def linear_forward(out, x, w):" in text
    empty = "Nothing is written in exercises/linear.py yet: the body of linear_backward is empty.\n"
    assert run("--exercise", "linear") == (1, f"linear         {empty}", "")
    assert file.read_text() == text                                 # what is written is never written over
    code, out, _ = run("--exercise", "linear", "--hint")
    assert code == 0 and "dx_ni = sum_o dout_no w_oi        dx = dout @ w\n" in out
    write("linear", body("linear"))
    code, out, _ = run("--exercise", "all")
    assert code == 1 and out.startswith("linear         right in 36 calls\nembedding      not begun\n")
    assert out.count("\n") == len(exercises.EXERCISES)
    run("--exercise", "adamw")
    assert run("--exercise", "adamw")[1].count("\n") == 1            # it alone
    assert ", ".join(exercises.EXERCISES) in " ".join(run("--help")[1].split())


@parametrize("name", exercises.EXERCISES)
def test_a_file_runs_by_itself_and_holds_no_solution(name, out_text):
    text = exercises.exercise_text(name)
    assert name != "attention" or "def split_heads" in text
    names = {}
    exec(compile(text, name, "exec"), names)
    function = exercises.EXERCISES[name]
    assert inspect.signature(names[function.__name__]) == inspect.signature(function)
    assert names[function.__name__].__doc__ == function.__doc__
    for other in exercises.EXERCISES.values():                      # one def alone, and that one is empty
        assert text.count(f"def {other.__name__}(") == (other is function)
    assert max(map(len, text.splitlines())) <= 110
    assert exercises.run_exercise(name, hint=True)                  # every one has a derivation
    hint = out_text()
    assert hint.count("\n") >= 2 and "---" not in hint and "#" not in hint
    assert os.listdir("exercises") == []


# ------------------------------------------------------------------------------------------------------------
# The verdicts
# ------------------------------------------------------------------------------------------------------------
def test_what_is_recorded(calls):
    assert list(calls) == list(exercises.EXERCISES) and all(calls.values())
    assert {call["step"] for call in calls["adamw"]} == {1, 2}
    assert [np.argmin(call["M"].shape) for call in calls["newton_schulz"]] == [0, 1, 0]     # wide and tall
    # the largest; and drawn from all, from the k largest, from those that reach p, and from what both leave
    assert len({str(exercises.settings(call)) for call in calls["sample"]}) == 5


@parametrize("name", OWN)
def test_the_original_is_right_and_adds_where_the_table_says(name, calls):
    """What was larger by 1 before the call, and is so after it, is added to."""
    assert verdict(name, calls, body(name)) == []
    call = calls[name][0]
    function = exercises.EXERCISES[name]
    want = exercises.outcome(function, call)
    for argument in want.keys() & call.keys():
        if not np.array_equal(want[argument], call[argument]):
            raised = exercises.outcome(function, {**call, argument: call[argument] + 1})[argument]
            assert np.allclose(raised - want[argument], 1) == (argument in exercises.ADDED)


def test_all_are_right_if_each_is(calls, monkeypatch, out_text):
    monkeypatch.setattr(exercises, "record", lambda: calls)
    two = {name: exercises.EXERCISES[name] for name in ("rope", "linear")}
    monkeypatch.setattr(exercises, "EXERCISES", two)
    write("linear", body("linear"))
    write("rope", "    rope_forward(dx, cos, sin)\n")
    assert exercises.run_exercise("all", False) is exercises.run_exercise("rope", False) is False
    assert [line[15:30] for line in out_text().splitlines()] == [
        "dx: 144 of 168 ", "right in 36 cal", "dx: 144 of 168 ", "Just so behaves"]
    write("rope", body("rope"))
    assert exercises.run_exercise("all", False) is True


ALL_BUGS = gradcheck.BUGS | exercises.EXERCISE_BUGS
NAMED = {bug: name for bug, edits in ALL_BUGS.items() for name, function in exercises.EXERCISES.items()
         if any(edit.startswith(f"{function.__name__}: ") for edit in edits)}
del NAMED["no_scale"]                   # in the backward it is backward_scale


@parametrize("bug, name", NAMED.items())
def test_every_planted_bug_is_named(bug, name, calls):
    assert len(NAMED) == 15 + len(exercises.EXERCISE_BUGS)
    lines = body(name)
    for edit in ALL_BUGS[bug][:-1]:
        function, there, instead = re.fullmatch("(.*?): (.*) -> (.*)", edit, re.DOTALL).groups()
        if function == exercises.EXERCISES[name].__name__:
            assert there in lines
            lines = lines.replace(there, instead)
    said = verdict(name, calls, lines)
    assert said[-1] == f"Just so behaves the bug {bug}: {ALL_BUGS[bug][-1]}" and len(said) >= 2


@parametrize("name, there, instead, sentences", [
    ("linear", "dw += dout.T @ x", "dw -= dout.T @ x",
     ["dw: 768 of 768 entries are off (36 of 36 calls); at", "Each of these is -1 times what it should be."]),
    ("linear", "dw += ", "dw[...] = ",
     ["dw: 768 of 768 entries are off (18 of 36 calls)", "`+=` is the contract, and"]),
    ("linear", "np.matmul(dout, w, out=dx)", "dx += dout @ w",
     ["`=` is the contract, and this looks like `+=`"]),
    ("linear", "np.matmul(dout, w, out=dx)\n    dw +=", "dx = dout @ w\n    dw =",
     ["Nothing was written to it: write `dx[...] = ...`; `dx = ...` only names a new array.",
      "Nothing was written to it: write `dw += ...`; `dw = ...` only names a new array."]),
    ("linear", "dw +=", "x *= 2; dw +=",
     ["x: 112 of 112 entries are off", "It should be as it was before the call."]),
    ("linear", "np.matmul(dout, w, out=dx)\n    dw += dout.T @ x", "return dout @ w, dout.T @ x",
     ["Nothing was written", "Something is returned, and nobody takes it"]),
    ("attention", "math.sqrt(q.shape[-1])", "q.shape[-1]",
     ["dqkv: 152 of 224 entries are off, in [0:1, 0:7, 0:24]",
      "Each of these is 0.5 times what it should be."]),
    ("block", "dw.down", "1 * dw.down", ["Nothing was written to it: write `dw.down += ...`;"]),
    ("head_targets", "return np", "result = np",
     ["the result is nothing, where int64 of the shape (14, 3) belongs."]),
    ("sample", "return order[np", "return 'id', order[np", ["the result is object of the shape (), where"]),
    ("sample", "if sampling.temperature == 0", "if 1 / sampling.temperature == 0",
     ["exercises/sample.py, line ",
      "The call: logits (1, 16), t (1,), temperature 0, top_k 0, top_p 1, seed 1"]),
    ("learn_merges", "-heap[0][0] > 1", "-heap[0][0] > 0",
     ["the result is int64 of the shape (40, 2), where"])])
def test_words_for_a_mistake(name, there, instead, sentences, calls):
    said = verdict(name, calls, body(name), there, instead)
    for sentence in sentences:
        assert any(line.startswith(sentence) for line in said), said
    assert "Each of these is 0 times what should be added." not in said     # one reason is enough


def test_the_settings_that_fail_are_named(calls):
    first, *more = verdict("sample", calls, body("sample"), "sampling.top_p * ", "1 * ")
    assert first.startswith("the result: 1 of 1 entries are off")       # and no factor, of one number
    assert [line.partition(" (")[0] for line in more] == [
        "Wrong with temperature 1.5, top_k 0, top_p 0.6, seed 1",
        "Wrong with temperature 1, top_k 5, top_p 0.8, seed 1"]


@parametrize("before, got, want, said", [
    # the worst of what is off is shown, not of what is right, however small the error is
    (None, [2.0, 0.25, 3.0], [2.0, 0.125, 3.0],
     ["1 of 3 entries are off, in [1:2] (1 of 4 calls); at [1] stands 0.25, where 0.125 belongs."]),
    ([10.0, -20.0, 7.0], [10.5, -18.5, 7.0], [11.0, -17.0, 7.0],
     ["2 of 3 entries are off, in [0:2] (1 of 4 calls); at [1] stands -18.5, where -17 belongs.",
      "Each of these is 0.5 times what should be added."])])
def test_complaint(before, got, want, said):
    case = [array and np.array(array) for array in (before, got, want)]
    first, *more = said
    assert exercises.complaint("dx", [case], 4) == [f"dx: {first}", *more]


def test_working_arrays_are_free(calls):
    assert verdict("adamw", calls, body("adamw"), "    grad[...] = 0.0\n", "") == []
    assert verdict("attention", calls, body("attention") + "    work[...] = 7\n") == []
    assert verdict("linear", calls, "    pass\n")[0].startswith("Nothing is written in exercises/linear.py")


@parametrize("lines, said", [
    ("    dx[...] = dout @ w.T\n", r"exercises/linear.py, line (\d+): ValueError: matmul: .*"),
    ("    dx[...] = dout @\n", r"exercises/linear.py, line (\d+): SyntaxError: invalid syntax"),
    ("    raise SystemExit(3)\n", r"exercises/linear.py, line (\d+): SystemExit: 3"),
    ("    mine()\n\n\ndef mine():\n    raise ValueError('no')\n",
     r"exercises/linear.py, line (\d+): ValueError: no"),
    ("    pass\n\ndel linear_backward\n", r"exercises/linear.py has no function linear_backward\.")])
def test_what_raises_is_told_with_its_line(lines, said, calls):
    first, *more = verdict("linear", calls, lines)
    match = re.fullmatch(said, first)
    assert match, first
    file = pathlib.Path("exercises/linear.py").read_text().splitlines()
    assert all(file[int(number) - 1] == lines.splitlines()[-1] for number in match.groups())
    assert more in ([], ["The call: dx (7, 16), dw (48, 16), dout (7, 48), x (7, 16), w (48, 16)"])


# ------------------------------------------------------------------------------------------------------------
# For marks: the judge is the slope
# ------------------------------------------------------------------------------------------------------------
def test_marks_are_judged_by_the_slope(calls):
    softcap = "    dx[...] = dout * (1 - np.tanh(x / cap) ** 2)\n"
    assert verdict("softcap", calls, softcap) == []
    said = verdict("softcap", calls, softcap, "(1 -", "-(1 -")
    assert said[1] == "Each of these is -1 times what it should be."
    call = calls["layernorm"][0]
    got = exercises.outcome(lambda *given: exercises.measured(exercises.layernorm_backward, *given), call)
    assert_allclose(got["dbias"] - call["dbias"], call["dout"].sum(axis=0), rtol=1e-9)
    assert_allclose(got["dx"].sum(axis=1), 0, atol=1e-9)    # a constant added to x changes nothing


def test_forwards_for_marks_are_what_they_say():
    out = np.empty((2, 2))
    gain, bias = np.array([[2.0, 4.0], [0.5, 7.0]])
    exercises.layernorm_forward(out, np.array([[1.0, 3.0], [0.0, 2e-3]]), gain, bias)
    rstd = np.array([[1 / math.sqrt(1 + 1e-5)], [1e-3 / math.sqrt(1e-6 + 1e-5)]])
    assert_allclose(out, np.hstack([0.5 - 2 * rstd, 7 + 4 * rstd]), rtol=1e-12)
    out = np.empty((2, 1))
    exercises.geglu_forward(out, np.array([[1.0, 2.0], [-2.0, 1.0]]))
    assert_allclose(out, [[2 * 0.84119199], [-0.04540231]], rtol=1e-7)      # as in other libraries

    out = np.empty(4)
    exercises.softcap_forward(out, np.array([-1e4, 1e-4, 1.5, 1e4]), 3.0)
    assert_allclose(out, [-3, 1e-4, 3 * (math.e - 1) / (math.e + 1), 3], rtol=1e-8)
