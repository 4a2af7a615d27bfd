"""gradcheck.py --exercise: the file, the verdicts and their words.

No solution stands here: a right answer is the body of the model's own function, by inspect, and a wrong one
is the same with one thing changed."""
import inspect
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import exercises
import gradcheck

ROOT = os.path.dirname(os.path.abspath(gradcheck.__file__))
OWN = [name for name in exercises.EXERCISES if name not in exercises.MARKS]
BEGUN = "    # Your lines here.\n"


@pytest.fixture(scope="module")
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
    if name == "learn_merges":
        text = "from array import array\nfrom collections import *\nfrom functools import *\nfrom heapq import *\nfrom itertools import *\n" + text
    with open(f"exercises/{name}.py", "w") as file:
        file.write(text.replace(BEGUN, lines))


def verdict(name, calls, lines, there="", instead=""):
    """What is said of these lines, with one thing changed."""
    assert there in lines
    write(name, lines.replace(there, instead) if there else lines)
    return exercises.grade(name, calls[name])


# ------------------------------------------------------------------------------------------------------------
# The file
# ------------------------------------------------------------------------------------------------------------
def run(*arguments):
    command = [sys.executable, os.path.join(ROOT, "gradcheck.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "Traceback" not in result.stderr
    return result.returncode, result.stdout, result.stderr


def test_from_the_first_run_to_the_verdict():
    code, out, _ = run("--exercise", "linear")
    assert code == 0
    assert out == "Wrote exercises/linear.py: write the body of linear_backward there, then run this again.\n"
    with open("exercises/linear.py") as file:
        text = file.read()
    assert text == exercises.exercise_text("linear") and "def linear_forward(out, x, w):" in text
    code, out, _ = run("--exercise", "linear")
    assert code == 1 and "Nothing was written: `dx = ...` names a new array" in out
    with open("exercises/linear.py") as file:
        assert file.read() == text                                  # what is written is never written over
    code, out, _ = run("--exercise", "linear", "--hint")
    assert code == 0 and "dx_ni = sum_o dout_no w_oi        dx = dout @ w\n" in out and "#" not in out
    write("linear", body("linear"))
    assert run("--exercise", "linear") == (0, "linear         right in 36 calls\n", "")
    code, out, _ = run("--exercise", "all")
    assert code == 1
    assert out.splitlines()[:2] == ["linear         right in 36 calls", "embedding      not begun"]
    assert len(out.splitlines()) == len(exercises.EXERCISES)
    for arguments in (["--exercise", "nosuch"], ["--hint"], ["--exercise", "all", "--hint"]):
        code, out, error = run(*arguments)
        assert code == 2 and out == "" and error.count("\n") == 1


@pytest.mark.parametrize("name", exercises.EXERCISES)
def test_a_file_runs_by_itself_and_holds_no_solution(name):
    text = exercises.exercise_text(name)
    names = {}
    exec(compile(text, name, "exec"), names)
    function = exercises.EXERCISES[name]
    assert inspect.signature(names[function.__name__]) == inspect.signature(function)
    assert names[function.__name__].__doc__ == function.__doc__
    assert "import math\n" in text and "import numpy as np\n" in text
    for other in exercises.EXERCISES.values():                      # one def alone, and that one is empty
        assert text.count(f"def {other.__name__}(") == (other is function)
    assert max(map(len, text.splitlines())) <= 110
    if name == "block":
        assert "from model_cpu import attention_backward\n" in text and "def rotated_part(" in text
    if name == "attention":
        assert "def split_heads(" in text and "def attention_forward(" in text


def test_hints(capsys):
    for name in exercises.EXERCISES:
        assert exercises.run_exercise(name, hint=True) is True
        out = capsys.readouterr().out
        none = name in exercises.MARKS or name in ("head_targets", "learn_merges")
        assert (out == "There is no derivation: the docstrings say all.\n") == none and "---" not in out
    assert os.listdir("exercises") == []


# ------------------------------------------------------------------------------------------------------------
# The verdicts
# ------------------------------------------------------------------------------------------------------------
def test_what_is_recorded(calls):
    assert list(calls) == list(exercises.EXERCISES) and all(calls.values())
    assert len(calls["linear"]) == 2 * 2 * (1 + 4 * gradcheck.TINY.layers)
    assert {call["step"] for call in calls["adamw"]} == {1, 2}
    assert {call["decay"] for call in calls["adamw"]} == {0, 0.1}
    assert any(call["dw"].any() for call in calls["linear"])
    assert (calls["cross_entropy"][0]["targets"] < 0).any()
    assert {call["temperature"] for call in calls["sample"]} == {0, 1, 0.7, 1.5}
    assert exercises.MARKS and all(len(calls[name]) == 2 for name in exercises.MARKS)


@pytest.mark.parametrize("name", OWN)
def test_the_original_is_right(name, calls):
    assert verdict(name, calls, body(name)) == []


def test_exit_code_of_all(calls, monkeypatch, capsys):
    monkeypatch.setattr(exercises, "record", lambda: calls)
    two = ("linear", "rope")
    monkeypatch.setattr(exercises, "EXERCISES", {name: exercises.EXERCISES[name] for name in two})
    for name in two:
        write(name, body(name))
    assert gradcheck.main(["--exercise", "all"]) == 0
    write("rope", "    rope_forward(dx, cos, sin)\n")
    assert gradcheck.main(["--exercise", "all"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("rope           dx: 144 of 168 entries are off, in [")


ALL_BUGS = {**gradcheck.BUGS, **exercises.EXERCISE_BUGS}
NAMED = {bug: name for bug, edits in ALL_BUGS.items() for name, function in exercises.EXERCISES.items()
         if any(edit.startswith(f"{function.__name__}: ") for edit in edits)}
del NAMED["no_scale"]                   # in the backward it is backward_scale


def test_which_bugs_have_an_exercise():
    assert len([bug for bug in NAMED if bug in gradcheck.BUGS]) == 15
    assert [bug for bug, name in NAMED.items() if name == "adamw"] == list(exercises.EXERCISE_BUGS)


@pytest.mark.parametrize("bug, name", NAMED.items())
def test_every_planted_bug_is_named(bug, name, calls):
    lines = body(name)
    for edit in ALL_BUGS[bug][:-1]:
        function, there, instead = re.fullmatch("(.*?): (.*) -> (.*)", edit, re.DOTALL).groups()
        if function == exercises.EXERCISES[name].__name__:
            assert there in lines
            lines = lines.replace(there, instead)
    said = verdict(name, calls, lines)
    assert said[-1].startswith(f"Just so behaves the bug {bug}: ") and len(said) >= 2


@pytest.mark.parametrize("name, there, instead, sentences", [
    ("linear", "dw += dout.T @ x", "dw -= dout.T @ x", ["dw: 768 of 768 entries are off (36 of 36 calls); at",
                                                       "Each of these is -1 times what it should be."]),
    ("linear", "np.matmul(dout, w, out=dx)", "dx[...] = 3 * dout @ w",
     ["Each of these is 3 times what it should be."]),
    ("linear", "dw += ", "dw[...] = ",
     ["dw: 768 of 768 entries are off (18 of 36 calls)", "`+=` is the contract, and"]),
    ("linear", "np.matmul(dout, w, out=dx)", "dx += dout @ w",
     ["`=` is the contract, and this looks like `+=`"]),
    ("linear", "np.matmul(dout, w, out=dx)", "dx = dout @ w",
     ["Nothing was written: `dx = ...` names a new array"]),
    ("linear", "dw +=", "x *= 2; dw +=",
     ["x: 112 of 112 entries are off", "It should be as it was before the call."]),
    ("linear", "np.matmul(dout, w, out=dx)\n    dw += dout.T @ x", "return dout @ w, dout.T @ x",
     ["Nothing was written", "Something is returned, and nobody takes it"]),
    ("rmsnorm", "dgain += ", "dgain += 2 * ", ["dgain: 16 of 16 entries are off (20 of 20 calls)"]),
    ("attention", "math.sqrt(q.shape[-1])", "q.shape[-1]",
     ["dqkv: 152 of 224 entries are off, in [0:1, 0:7, 0:24]",
                                                          "Each of these is 0.5 times what it should be."]),
    ("block", 'dx += back', 'dx += 0', ['dx: ', 'dw["qkv"]: ']),
    ("block", 'dw["down"]', '1 * dw["down"]', ['Nothing was written: `dw["down"] = ...` names']),
    ("adamw", "param -= lr", "param += lr", ["param: "]),
    ("head_targets", "return np", "result = np",
     ["the result is nothing, where int64 of the shape (14, 3) belongs."]),
    ("head_targets", ".reshape(-1, K)", "",
     ["the result is int64 of the shape (2, 7, 3), where int64 of the shape"]),
    ("sample", "return order[np", "return 'id', order[np",
     ["the result is object of the shape (), where"]),
    ("sample", "return order[np", "result = order[np",
     ["the result is nothing, where int64 of the shape (1,) belongs."]),
    ("sample", ">= top_p * ", "> 0 * ", ["the result: 1 of 1 entries are off"]),
    ("learn_merges", "-heap[0][0] > 1", "-heap[0][0] > 0",
     ["the result is int64 of the shape (40, 2), where"])])
def test_words_for_a_mistake(name, there, instead, sentences, calls):
    said = verdict(name, calls, body(name), there, instead)
    for sentence in sentences:
        assert any(line.startswith(sentence) for line in said), said


def test_a_single_entry_has_no_factor(calls):
    """One number is always some factor times another."""
    said = verdict("sample", calls, body("sample"), ">= top_p * ", "> 0 * ")
    assert said[0].startswith("the result: 1 of 1 entries are off") and not any("Each of these" in line for line in said)


def test_the_worst_of_what_is_off_is_shown():
    """Not of what is right, however small the error is."""
    got, want = np.array([2.0, 0.25, 3.0]), np.array([2.0, 0.125, 3.0])
    assert exercises.complaint("dx", [(None, got, want)], 1)[0].startswith(
        "dx: 1 of 3 entries are off, in [1:2] (1 of 1 calls); at [1] stands 0.25, where 0.125 belongs.")


def test_two_entries_have_one():
    want, got = np.array([[1.0, 2.0], [5.0, 6.0]]), np.array([[3.0, 6.0], [5.0, 6.0]])
    assert exercises.complaint("dx", [(None, got, want)], 4) == [
        "dx: 2 of 4 entries are off, in [0:1, 0:2] (1 of 4 calls); at [0, 1] stands 6, where 2 belongs.",
        "Each of these is 3 times what it should be."]


@pytest.mark.parametrize("factor", [-1.0, 0.5, 3.0])
def test_a_factor_of_what_is_added(factor):
    before, added = np.array([10.0, -20.0, 7.0]), np.array([1.0, 3.0, 0.0])
    assert exercises.complaint("dw", [(before, before + factor * added, before + added)], 2)[1:] == [
        f"Each of these is {factor:.6g} times what should be added."]


def test_draws_of_all_kinds_are_recorded(calls):
    """The largest; and drawn from all, from the k largest, from those that reach p, and from what both leave."""
    assert {(call["top_k"] > 0, call["top_p"] < 1) for call in calls["sample"] if call["temperature"]} == {
        (False, False), (True, False), (False, True), (True, True)}
    assert any(call["temperature"] == 0 for call in calls["sample"])


def test_working_arrays_are_free(calls):
    lines = re.sub(r"    grad\[\.\.\.\] = 0\.0\n", "", body("adamw"))
    assert lines != body("adamw") and verdict("adamw", calls, lines) == []
    lines = body("attention") + "    work[...] = 7\n"
    assert verdict("attention", calls, lines) == []
    assert verdict("linear", calls, body("linear") + "    return dx, dw\n") == []      # what is returned as well, too


@pytest.mark.parametrize("lines, said", [
    ("    dx[...] = dout @ w.T\n", r"exercises/linear.py, line (\d+): ValueError: matmul: .*"),
    ("    dx[...] = dout @\n", r"exercises/linear.py, line (\d+): SyntaxError: invalid syntax"),
    ("    dx[...] = nothing\n", r"exercises/linear.py, line (\d+): NameError: name 'nothing' is not defined"),
    ("    raise SystemExit(3)\n", r"exercises/linear.py, line (\d+): SystemExit: 3"),
    ("    mine()\n\n\ndef mine():\n    raise ValueError('no')\n", r"exercises/linear.py, line (\d+): ValueError: no"),
    ("    pass\n\nimport no_such\n", r"exercises/linear.py, line (\d+): ModuleNotFoundError: .*"),
    ("    pass\n\ndel linear_backward\n", r"exercises/linear.py has no function linear_backward\.")])
def test_what_raises_is_told_with_its_line(lines, said, calls):
    first, *more = verdict("linear", calls, lines)
    match = re.fullmatch(said, first)
    assert match, first
    with open("exercises/linear.py") as file:
        number = next((i for i, line in enumerate(file, 1) if line == lines.splitlines(True)[-1]), None)
    assert match.groups() in ((str(number),), ())
    assert more in ([], ["The arrays: dx (7, 16), dw (48, 16), dout (7, 48), x (7, 16), w (48, 16)"])


# ------------------------------------------------------------------------------------------------------------
# For marks: the judge is the slope
# ------------------------------------------------------------------------------------------------------------
def test_marks_are_judged_by_the_slope(calls):
    softcap = "    dx[...] = dout * (1 - np.tanh(x / cap) ** 2)\n"
    assert verdict("softcap", calls, softcap) == []
    said = verdict("softcap", calls, softcap, "(1 -", "-(1 -")
    assert said[1] == "Each of these is -1 times what it should be."
    for name in ("layernorm", "geglu"):
        assert verdict(name, calls, BEGUN)[1].startswith("Nothing was written")


def test_forwards_for_marks_are_what_they_say():
    x, gain, bias = np.array([[-3.0, 0.0, 0.5, 3.5], [1e-3, 3e-3, 2e-3, 2e-3]]), np.arange(1, 5), np.arange(4) / 8
    out = np.empty_like(x)
    exercises.layernorm_forward(out, x, gain, bias)
    variance = np.array([[21.5 / 4 - 0.25 ** 2], [0.5e-6]])
    np.testing.assert_allclose(out, (x - [[0.25], [2e-3]]) / np.sqrt(variance + 1e-5) * gain + bias, rtol=1e-12)

    gate, out = np.linspace(-4, 4, 81)[:, None], np.empty((81, 1))
    exercises.geglu_forward(out, np.hstack([gate, np.full_like(gate, 2.0)]))
    phi = [[(1 + math.erf(g / math.sqrt(2))) / 2] for g in gate.flat]       # the tanh stands for it
    assert np.abs(out / 2 - gate * phi).max() < 5e-4
    assert out[50, 0] / 2 == pytest.approx(0.84119199, abs=1e-8)            # of g = 1, as in other libraries

    x, out = np.array([[-1e4, -2.0, 0.0, 1e-4, 1.5, 1e4]]), np.empty((1, 6))
    exercises.softcap_forward(out, x, 3.0)
    e = np.exp(2 * x[0, [1, 4]] / 3)
    np.testing.assert_allclose(out[0, [1, 4]], 3 * (e - 1) / (e + 1), rtol=1e-12)
    np.testing.assert_allclose(out[0, [0, 2, 3, 5]], [-3, 0, 1e-4, 3], rtol=1e-8)


def test_the_measured_gradient_adds_to_vectors_alone(calls):
    call = calls["layernorm"][0]
    got = exercises.outcome(lambda *given: exercises.measured(exercises.layernorm_backward, *given), call)

    np.testing.assert_allclose(got["dbias"] - call["dbias"], call["dout"].sum(axis=0), rtol=1e-9)
    np.testing.assert_allclose(got["dx"].sum(axis=1), 0, atol=1e-9)    # a constant added to x changes nothing
