"""gradcheck.py --exercise: the file, the verdicts and their words.

No solution stands here: a right answer is the body of the model's own function, by inspect, and a wrong one
is the same with one thing changed."""
import inspect
import os
import pathlib
import re

import numpy as np
from numpy.testing import assert_allclose
import pytest
from cases import once_a_module, parametrize, value_error

import exercises
import gradcheck

BEGUN = "    # Your lines here.\n"
# learn_merges_plain needs two of these, which a reader may import or not
LIBRARY = "from array import *\nfrom collections import *\nfrom functools import *\nfrom heapq import *\nfrom itertools import *\n"


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


def verdict(name, calls, lines):
    """What is said of these lines as the function's body."""
    text = exercises.exercise_text(name).replace(BEGUN, lines)
    pathlib.Path(f"exercises/{name}.py").write_text(LIBRARY + text)
    return exercises.grade(name, calls[name])


def test_from_the_first_run_to_the_verdict(out_text, monkeypatch, calls):
    """The file is written once, and judged from then on; of all exercises there is a table."""
    calls = {**calls, "linear": calls["linear"][:1]}
    monkeypatch.setattr(exercises, "record", lambda: calls)

    def run(*arguments):
        return gradcheck.main(["--exercise", *arguments]), out_text()
    assert run("linear") == (0, "Wrote exercises/linear.py: write the body of linear_backward there, then run this again.\n")
    empty = "Nothing is written in exercises/linear.py yet: the body of linear_backward is empty.\n"
    assert run("linear") == (1, f"linear         {empty}")
    verdict("linear", calls, body("linear"))
    assert run("linear") == (0, "linear         right in 1 call\n")
    verdict("embedding", calls, body("embedding"))
    code, said = run("all")
    assert code == 1 and said.startswith("linear         right in 1 call\nembedding      right in 6 calls\nswiglu         not begun\n")
    with value_error("there is no exercise lines; there are linear, embedding, "):
        run("lines")
    monkeypatch.setattr(gradcheck, "__file__", "alone/gradcheck.py")
    with value_error("there is no alone/tests, which this needs."):
        run("linear")


@parametrize("name", exercises.EXERCISES)
def test_a_file_holds_no_solution(name, out_text):
    text = exercises.exercise_text(name)
    function = exercises.EXERCISES[name]
    for other in exercises.EXERCISES.values():                      # one def alone, and that one is empty
        assert text.count(f"def {other.__name__}(") == (other is function)
    assert text.endswith(f'"""\n{BEGUN}')
    exercises.run_exercise(name, hint=True)
    assert out_text().count("\n") > 2                               # every one has a derivation


@parametrize("name", [name for name in exercises.EXERCISES if name not in exercises.MARKS])
def test_the_original_is_right(name, calls):
    assert verdict(name, calls, body(name)) == []


ALL_BUGS = gradcheck.BUGS | exercises.EXERCISE_BUGS
NAMED = {bug: name for bug, edits in ALL_BUGS.items() for name, function in exercises.EXERCISES.items()
         if any(edit.startswith(f"{function.__name__}: ") for edit in edits)}
del NAMED["no_scale"]                   # in the backward it is backward_scale


@parametrize("bug, name", NAMED.items())
def test_every_planted_bug_is_named(bug, name, calls):
    planted = gradcheck.altered_functions(ALL_BUGS[bug], vars(exercises.rl) | vars(exercises.model_cpu))
    function = planted[exercises.EXERCISES[name].__name__]
    said = exercises.compare(name, calls[name], [exercises.outcome(function, call) for call in calls[name]])
    assert said[-1] == f"Just so behaves the bug {bug}: {ALL_BUGS[bug][-1]}" and len(said) >= 2


@parametrize("name, there, instead, sentence", [
    ("linear", "dw += ", "dw[...] = ", "`+=` is the contract, and"),
    ("linear", "np.matmul(dout, w, out=dx)", "dx += dout @ w", "`=` is the contract, and this looks like `+=`"),
    ("linear", "np.matmul(dout, w, out=dx)", "dx = dout @ w", "Nothing was written to it: write `dx[...] = ...`;"),
    ("linear", "dw +=", "raise ValueError('no')\n    dw +=", "exercises/linear.py, line 24: ValueError: no"),
    ("attention", "math.sqrt(q.shape[-1])", "q.shape[-1]", "dqkv: 152 of 224 entries are off, in [0:1, 0:7, 0:24]"),
    ("head_targets", "return np", "result = np", "the result is nothing, where int64 of the shape (14, 3) belongs.")])
def test_words_for_a_mistake(name, there, instead, sentence, calls):
    assert there in body(name)
    said = verdict(name, calls, body(name).replace(there, instead))
    assert any(line.startswith(sentence) for line in said), said


@parametrize("name, there, instead", [
    ("reinforce", "(-1, GROUP)", "(2, GROUP)"), ("dpo", "reshape(-1, 2)", "reshape(4, 2)"), ("adamw", "beta1", "0.9"),
    ("muon", "decay", "0.1"), ("head_targets", "range(K)", "range(3)"), ("head_targets", "k + T", "k + 7"),
    ("learn_merges", "256 + most_merges", "300"), ("attention", "math.sqrt(q.shape[-1])", "2"), ("sample", "sampling.seed", "1")])
def test_a_number_of_the_run_in_place_of_an_argument_is_seen(name, there, instead, calls):
    assert there in body(name)
    assert verdict(name, calls, body(name).replace(there, instead)) != []


def test_an_endless_loop_ends_in_a_sentence(calls, monkeypatch):
    monkeypatch.setattr(exercises, "LIMIT", 0.2)
    line, _ = verdict("linear", calls, "    while True:\n        pass\n")
    assert re.match("exercises/linear.py, line 2[34]: ", line) and "It still ran after 0.2 seconds" in line


def test_exercises_without_a_solution_are_judged_by_the_slope(calls):
    lines = "    dx[...] = dout * (1 - np.tanh(x / cap) ** 2)\n"
    assert verdict("softcap", calls, lines) == []
    assert verdict("softcap", calls, lines.replace("(1 -", "-(1 -"))[1] == "Each of these is -1 times what it should be."


def test_forwards_without_a_solution_are_what_they_say():
    out = np.empty((1, 2))
    exercises.layernorm_forward(out, np.array([[1.0, 3.0]]), np.array([2, 4]), np.array([0.5, 7]))
    rstd = (1 + 1e-5) ** -0.5
    assert_allclose(out, [[0.5 - 2 * rstd, 7 + 4 * rstd]], rtol=1e-12)
    exercises.geglu_forward(out.T, np.array([[1.0, 2.0], [-2.0, 1.0]]))
    assert_allclose(out, [[2 * 0.84119199, -0.04540231]], rtol=1e-7)        # as in other libraries
