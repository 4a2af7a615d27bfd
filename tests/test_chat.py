"""chat.py: what it prints by pipe and on a terminal, what it keeps between lines, what it says of bad input."""
import contextlib
import functools
import inspect
import io
import itertools
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
import unicodedata
import warnings

import numpy as np
import pytest
from cases import once_a_module, parametrize, put, rows, write
from test_tokenizer import made as made_tokenizer

import chat
import checkpoint
import model_cpu
import model_gpu
from script import printable, run_script
from tokenizer import CHATML_PARTS, SPECIAL_TOKENS, Tokenizer, known_template, visible

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LOOP = "é世🙂ж"                                 # its 11 bytes are 11 different tokens, so each can have one successor
MULTILINGUAL = ("The king and the queen. Der König und die Königin. Король и королева. 国王和王后。国王和王后。 "
                "Ο βασιλιάς και η βασίλισσα. 👑👑🙂 " * 3)


def save_chain_model(folder, chains, chat_form=False):
    """A model of bytes that knows one thing: which token comes after a token.  chains: lists of ids, each followed by
    the next.  The embedding is one-hot, the layers add nothing, and head 0 is the table of successors."""
    tokenizer = Tokenizer.train([""], 260)
    model = model_cpu.Model(model_cpu.Config(dim=264, heads=4, kv_heads=2, layers=1, context=32, vocab=264, predict=1),
                            dtype=np.float32)
    for view in model.params.values():
        view[...] = 1.0 if view.ndim == 1 else 0.0
    model.params["embed"][...] = np.eye(264)
    for chain in chains:
        for token, successor in zip(chain, chain[1:]):
            model.params["heads"][successor, token] = 10.0
    checkpoint.save(folder, model, tokenizer, {}, chat_form)


SPECIAL = Tokenizer.train([""], 260).special
USER, ASSISTANT, END = (SPECIAL[name] for name in ("<|user|>", "<|assistant|>", "<|end|>"))
LOOP_IDS = [*LOOP.encode(), LOOP.encode()[0]]


@once_a_module
def models(tmp_path_factory):
    """Folders: out/random; out/loop writes LOOP for ever after any of its bytes, and "ends." once after "e"; out/sft
    answers "Hi" in chat form, out/half the first byte of a character."""
    folder = tmp_path_factory.mktemp("chat")
    sizes = model_cpu.Config(dim=32, heads=4, kv_heads=2, layers=2, context=32, vocab=320, predict=2)
    model = model_cpu.Model(sizes, seed=3, dtype=np.float32)
    checkpoint.save(f"{folder}/out/random", model, Tokenizer.train([MULTILINGUAL], 320), {})
    save_chain_model(f"{folder}/out/loop", [LOOP_IDS, [*b"ends.", SPECIAL["<|endoftext|>"], *b"ends"]])
    save_chain_model(f"{folder}/out/sft", [[ASSISTANT, *b"Hi", END]], chat_form=True)
    save_chain_model(f"{folder}/out/half", [[ASSISTANT, 0xc3]], chat_form=True)
    shutil.copytree(folder / "out/loop", folder / "damaged")
    write(folder / "damaged/config.json", "{")
    return folder


class Stream(io.TextIOWrapper):
    """A standard stream in memory, which may pretend to be a terminal.  seen: of an output what can be read there at the
    moment, since it was flushed; of an input, all that its `output` showed when a line was asked for."""
    def __init__(self, data=b"", on_terminal=False, output=None):
        super().__init__(io.BytesIO(data), "utf-8", newline="\n", line_buffering=True)    # as run_script has it
        self.on_terminal, self.output, self.shown = on_terminal, output, []

    def isatty(self):
        return self.on_terminal

    def seen(self):
        return self.buffer.getvalue()

    def readline(self, *arguments):
        self.shown.append(self.output.seen())
        return super().readline(*arguments)


def speaking(source, original=model_cpu.generate):
    """What takes the place of model_cpu.generate: it says what the source does, up to `stop`, at most `most`.
    """
    signature = inspect.signature(original)

    def generate(*arguments, **options):
        asked = signature.bind(*arguments, **options).arguments
        stop, most, *_ = [asked.pop(name) for name in "stop most speculate trace".split()]
        said = itertools.islice(source(*asked.values()), most)
        return itertools.takewhile(lambda token: token not in stop, said)
    return generate


def options_of(arguments):
    """An option and what follows it may stand in one text."""
    return [word for text in arguments for word in (text.split() if text.startswith("--") else [text])]


def run(models, *arguments, input=b"", terminals=(False, False), generate=None):
    """chat.py in the folder of the models, in this process -> (exit code, standard output as bytes, standard error as
    str).  terminals: whether input and output are one; generate: the source of what a model says; it is told
    standard output besides what model_cpu.generate is."""
    out, err = Stream(on_terminal=terminals[1]), io.StringIO()
    stdin = Stream(input, terminals[0], out)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(models)
        patch.setattr(sys, "argv", ["chat.py", *options_of(map(os.fsdecode, arguments))])
        put(patch, sys, stdin=stdin, stdout=out, stderr=err)
        if generate:
            patch.setattr(model_cpu, "generate", speaking(functools.partial(generate, out)))
        with pytest.raises(SystemExit) as left:
            run_script(chat.main)
    if terminals == (True, True):
        run.shown = stdin.shown
    out.flush()                                 # as at the end of a process
    return left.value.code or 0, out.seen(), err.getvalue()


# ----------------------------------------------------------------------------------------------------------------------
# One answer

def test_an_answer_that_ends_inside_a_character_shows_no_broken_one(models, out_text):
    """Each piece is whole UTF-8 by itself, though every token of this model is a piece of a character."""
    s = session(models, "loop")
    shown = ""
    for i, byte in enumerate(LOOP.encode(), 1):
        s.show(bytes([byte]))
        shown += out_text()
        assert shown == LOOP.encode()[:i].decode("utf-8", "ignore")


# ----------------------------------------------------------------------------------------------------------------------
# Lines from a pipe

@parametrize("name, most, lines, said", [
    ("loop", 200, b"e\n\n", "ends.\nends.\n"),            # the end of a text; an empty line begins a new one
    ("loop", 11, f"{LOOP[0]}\n\n/e\r\nж".encode(), f"{LOOP}é\n世🙂жé\n/ends.\nж{LOOP}\n"),      # or writes on
    ("loop", 4, b"\xc3\n", "é世\n"),                      # half a character is completed,
    ("loop", 2, "é\n\n\n".encode(), "é\n世\n\n"),         # 世 has three bytes, 🙂 four: two, then the third and one,
    ("loop", 2, "é\ne\n".encode(), "é\nend\n"),           # or is forgotten with its text
    ("half", 1, b"A\nB\n", "\n\n"), ("sft", 200, b"A\n\nB\n", "Hi\nHi\n")])
def test_lines_from_a_pipe(models, name, most, lines, said):
    """No prompts and no escape codes; a line that begins with a slash is text."""
    assert run(models, f"--model=out/{name} --temperature=0 --max-tokens={most}", input=lines) == (0, said.encode(), "")


def test_prompts(models):
    for prompt, note in ("", ""), ("x" * 100 + "en", "note: the prompt has 102 tokens; the last 32 are used.\n"):
        assert run(models, "--model out/loop --prompt", prompt, "--temperature 0") == (
            0, f"{prompt.removesuffix('en')}ends.\n".encode(), note)


def test_a_file_of_prompts(models, monkeypatch):
    """Each by itself, in the order of the lines, with the text of a run of its own; a long one leaves a quarter of the window."""
    write(models / "prompts.txt", "e\né\n\nxe\n")
    for name, said in ("loop", ["nds.", LOOP[1:] + LOOP[0], "ends.", "nds."]), ("sft", 4 * ["Hi"]):
        code, out, err = run(models, f"--model=out/{name} --prompts prompts.txt --temperature 0 --max-tokens 11")
        assert (code, err) == (0, "")
        titles, answers = zip(*[part.split("\n", 1) for part in out.decode().removeprefix("--- ").split("\n--- ")])
        assert titles == ("e", "é", "", "xe") and [answer.rstrip("\n") for answer in answers] == said
    one, again, other = [run(models, f"--model=out/random --prompts prompts.txt --seed {seed} --max-tokens 5")[1] for seed in (1, 1, "none")]
    assert one == again != other
    write(models / "prompts.txt", "")
    assert run(models, "--model=out/loop --prompts prompts.txt") == (2, b"", "error: prompts.txt is empty: there is no prompt in it.\n")
    write(models / "prompts.txt", 100 * "q")
    monkeypatch.chdir(models)
    read = []
    monkeypatch.setattr(model_cpu, "generate_texts", lambda model, tokenizer, prompts, *rest: read.extend(prompts) or "a")
    for name in "loop", "sft":
        chat.Session(*chat.load_model(f"out/{name}", "cpu", None), chat.parse_arguments([])).answer_file("prompts.txt")
    assert list(map(len, read)) == [24, 24]


# ----------------------------------------------------------------------------------------------------------------------
# A terminal

class Terminal:
    """chat.py on a pseudo-terminal."""
    def __init__(self, folder, *arguments):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            environment = {**os.environ, "TERM": "dumb", "INPUTRC": "/dev/null", "LC_ALL": "C.UTF-8"}
            os.execve(sys.executable, [sys.executable, f"{ROOT}/chat.py", *arguments], environment)
        self.seen = b""

    def wait_for(self, text, seconds=120):
        """Read until `text` (bytes) comes; returns what came up to its end, and forgets it."""
        limit = time.monotonic() + seconds
        while text not in self.seen:
            if time.monotonic() > limit:
                raise TimeoutError(f"{text!r} did not come; {self.seen[-500:]!r} did.")
            if select.select([self.fd], [], [], 0.2)[0]:
                self.seen += os.read(self.fd, 65536)
        end = self.seen.index(text) + len(text)
        came, self.seen = self.seen[:end], self.seen[end:]
        return came

    def send(self, text):
        os.write(self.fd, text.encode())

    def leave(self):
        """Send Ctrl-D, at a prompt -> exit code."""
        self.send("\x04")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_terminal(models):
    """Ctrl-C stops an answer and the session goes on; an arrow brings the last line back; Ctrl-D leaves."""
    signal.alarm(600)                           # else a session that Ctrl-D does not end would be waited for
    terminal = Terminal(models, "--model", "out/loop", "--temperature", "0", "--max-tokens", "1000000")
    terminal.wait_for(b"> ")
    terminal.send("é\n")
    terminal.wait_for((LOOP * 20).encode())
    terminal.send("\x03")
    terminal.wait_for(b"\r\n> ")
    terminal.send("e\n")
    terminal.wait_for(b"\r\nends.\r\n> ")
    terminal.send("\x1b[A\n")                   # arrow up
    terminal.wait_for(b"\r\nends.\r\n> ")
    terminal.send("unfinished")                 # Ctrl-C drops a line that is being typed
    terminal.wait_for(b"unfinished")
    for patience in [1] * 120 + [120]:          # Python overlooks a signal that comes just before it waits for a key
        terminal.send("\x03")
        with contextlib.suppress(TimeoutError):
            terminal.wait_for(b"\r\n> ", patience)
            break
    terminal.send("e\n")
    terminal.wait_for(b"\r\nends.\r\n> ")
    assert terminal.leave() == 0
    signal.alarm(0)


def test_lines_that_go_on(models):
    """On a terminal; from a pipe a backslash is a backslash."""
    calls = []
    out = run(models, "--model out/loop", input=b"a\\\nb\\\n\nc\\\\\n/d\n", terminals=TERMINAL, generate=record_calls(calls))[1]
    assert out.partition(b"more.\n")[2] == b"> ... ... a\nb\n\n> ... c\\\n/d\n> \n"
    run(models, "--model out/loop", input=b"a\\\n", generate=record_calls(calls))
    assert [bytes(ids) for ids, *_ in calls] == [b"a\nb\n", b"c\\\n/d", b"a\\"]


def test_tokens_have_the_colour_of_their_probability(models, monkeypatch, out_text):
    s = session(models)
    s.said, s.trace = [*b"ab\nc\xc3"], [(0, 0, p) for p in (0.5, 0.499, 0.1, 0.01, 0.009)]
    monkeypatch.setenv("NO_COLOR", "1")
    s.print_tokens()
    assert out_text() == "a[50%]b[50%]\\n[10%]\nc[1%]\\xc3[1%]\n"
    monkeypatch.setenv("NO_COLOR", "")
    chat.run_command("/tokens", s)
    assert out_text().replace("\x1b[", "^").replace("^0m", "$") == (
        "^32ma$^36mb$^36m\\n$\n^33mc$^31m\\xc3$\n^32mfrom 50%$  ^36mfrom 10%$  ^33mfrom 1%$  ^31mfrom 0%$\n")


def test_a_terminal_shows_control_characters_instead_of_obeying(tmp_path):
    save_chain_model(f"{tmp_path}/m", [[*b"a\x1b[2J\x07\x9b", SPECIAL["<|endoftext|>"]]])
    arguments = "--model m --temperature 0 --prompt a"
    assert run(tmp_path, arguments, terminals=TERMINAL)[1].decode() == "a\ufffd[2J\ufffd\ufffd\n"
    assert run(tmp_path, arguments)[1].decode() == "a\x1b[2J\x07\ufffd\n"      # a file gets what was said
    for char in map(chr, range(0x300)):
        assert (printable(char) != char) == (unicodedata.category(char) == "Cc" and char not in "\t\n")


TERMINAL = True, True


def test_a_session_on_a_terminal(models):
    """To the letter, and each prompt is there before a line is waited for."""
    for name, begin, lines, said in [
            ("loop", "Begin a text", b"e\n/reset\n\n /e\n", "> ends.\n> > ends.\n>  /ends.\n> \n"),
            ("sft", "Ask", b"\nHello\n\n", "> > Hi\n> > \n")]:
        count = session(models, name).model.flat_params.size
        assert run(models, f"--model out/{name} --temperature=0", input=lines, terminals=TERMINAL) == (
            0, f"out/{name}: {count:,} parameters, step 0.\n"
            f"{begin}; Ctrl-C stops the model, /quit or Ctrl-D leaves, /help shows more.\n{said}".encode(), "")
        assert run.shown[0].endswith(b"more.\n> ") and run.shown[-1] == run.shown[0] + said[2:-1].encode()
    # not a terminal unless both are one
    for terminals in (True, False), (False, True):
        assert run(models, "--model out/loop --temperature=0", input=b"e\n/e\n", terminals=terminals) == (
            0, b"ends.\n/ends.\n", "")


def test_commands(models):
    """Settings are shown, changed and confirmed; what cannot be is refused in the words of the options."""
    code, out, err = run(models, "--model out/loop --temperature 0", terminals=TERMINAL, input=(
        b"/tokens\n/max-tokens 3\ne\n/temperature  hot \n/max-tokens\n/nothing\n/\n"
        b"/  max-tokens   2 \n/top-p 2\ne\n/help\n/temperature 0.5\n/temperature\n/seed\n/seed  7\n"
        b"/seed \n/seed none\n/seed no\n/top-k none\n/top-k\n/quit now\n/quits\n"))
    assert (code, err) == (0, "")
    assert out.decode().partition("more.\n")[2] == """\
> /tokens is about the last answer, and there is none.
> max-tokens is 3
> ends
> /temperature must be a number of at least 0, not 'hot'.
> max-tokens is 3
> There is no command /nothing; /help lists them. A space in front makes it a prompt.
> There is no command /; /help lists them. A space in front makes it a prompt.
> max-tokens is 2
> /top-p must be a number from 0.001 to 1, not '2'.
> end
> /reset forgets, /quit leaves. An empty line lets the model write on;
a line that ends with \\ is continued on the next.
/tokens: how likely each token of the last answer was.
The settings now:
  /max-tokens 2
      length of an answer, in tokens, at most
  /temperature 0.0
      0: the likeliest token; 1: as the model learned; more: wilder
  /top-k 50
      draw among the k likeliest tokens; 0: among all
  /top-p 1.0
      draw among the likeliest tokens of this probability together; 1: all
  /seed none
      the same seed gives the same text; none: another text every time
> temperature is 0.5
> temperature is 0.5
> seed is none
> seed is 7
> seed is 7
> seed is none
> /seed must be a whole number of at least 0 and at most 9,223,372,036,854,775,808, not 'no'.
> /top-k must be a whole number of at least 0 and at most 1,000,000,000, not 'none'.
> top-k is 50
> """


def test_help_fits_a_terminal(models):
    """Its lines end at words, however long the values are."""
    options = "--temperature=0.12345678901234568", "--top-p=0.12345678901234568", f"--seed={2**63}"
    out = run(models, "--model out/sft", *options, terminals=TERMINAL, input=b"/help\n")[1].decode()
    assert str(2**63) in out and "/system none" in out and max(map(len, out.splitlines())) < 80


@parametrize("line", [b"/quit", b"/exit", b"/ quit ", b"/quit now", b"/exit\r"])
def test_leaving(models, line):
    """What comes after it is not read any more."""
    out = run(models, "--model out/loop --temperature=0", terminals=TERMINAL, input=b"e\n" + line + b"\ne\n")[1]
    assert out.partition(b"more.\n")[2] == b"> ends.\n> "


def record_calls(calls):
    """A generate that says nothing and notes what it was asked: ids, temperature, top_k, top_p, seed, size of the
    vocabulary."""
    def generate(out, model, *rest):
        calls.append(rest)
        return iter([SPECIAL["<|endoftext|>"]])
    return generate


def test_what_is_asked_of_the_model(models, monkeypatch):
    """Every setting reaches it; each answer of a session has a seed of its own, which only a command sets anew."""
    calls = []
    run(models, "--model out/loop", input=b"a\n", generate=record_calls(calls))
    run(models, "--model out/loop --seed 5 --temperature 0.25 --top-k 7 --top-p 0.5",
        input=b"b\n/seed\nc\n/reset\n/seed x\nd\n/top-k 8\ne\n/seed 20\nf\n/seed none\ng\n", terminals=TERMINAL,
        generate=record_calls(calls))
    assert calls == [([ord("a")], 0.8, 50, 1.0, None, 260), *[([ord(c)], 0.25, k, 0.5, seed, 260) for c, k, seed in [
        ("b", 7, 5), ("c", 7, 6), ("d", 7, 7), ("e", 8, 5), ("f", 8, 20), ("g", 8, None)]]]
    asked = []
    monkeypatch.setattr(model_cpu, "generate", lambda *_, **options: asked.append(options) or iter(()))
    for name, options, most, speculate in [("loop", [], 200, None), ("sft", ["--max-tokens=7", "--speculation"], 7, True),
                                           ("sft", ["--no-speculation"], 200, False)]:
        run(models, f"--model out/{name} --prompt x", *options)
        found = asked.pop()
        assert (set(found["stop"]), found["most"], found["speculate"]) == (set(SPECIAL.values()), most, speculate)


def test_tokens_come_as_they_are_made(models):
    """Each is there to be read before the next is computed, and the line end before the next line is waited for."""
    seen = []

    def generate(out, *rest):
        for token in b"abc":
            seen.append(out.seen())
            yield token
    run(models, "--model out/loop --max-tokens 2 --prompt x", generate=generate)
    assert seen == [b"x", b"xa"]                # nothing is computed that is not shown
    run(models, "--model out/loop", input=b"y\n", terminals=TERMINAL, generate=generate)
    assert run.shown[-1].endswith(b"> yabc\n> ")
    with contextlib.redirect_stdout(Stream()) as out:
        session(models, **{"max-tokens": 2}).answer("A")
        assert out.seen() == b"Hi\n"            # flushed


@parametrize("terminals, code, said, calls", [
    ((True, True), 0, b"> a1\n> 1\n> \n", [(b"a", 5), (b"a1", 6)]), ((False, False), 130, b"a1", [(b"a", 5)])])
def test_ctrl_c_while_the_model_writes(models, terminals, code, said, calls):
    """On a terminal the next line goes on, with a seed of its own; elsewhere it is the end."""
    asked = []

    def generate(out, model, ids, temperature, top_k, top_p, seed, vocab):
        asked.append((bytes(ids), seed))
        yield ord("1")
        if len(asked) == 1:
            raise KeyboardInterrupt
    found = run(models, "--model out/loop --seed 5", input=b"a\n\n", terminals=terminals, generate=generate)
    assert (found[0], found[1].rpartition(b"more.\n")[2], asked) == (code, said, calls)


@parametrize("special", SPECIAL.values())
def test_any_special_token_ends_an_answer(models, monkeypatch, special):
    """In chat form the turn is closed as by <|end|>; in plain form the text is at its end."""
    monkeypatch.setattr(model_cpu, "generate", speaking(lambda *_: iter([ord("a"), special, ord("b")])))
    for name, ids in ("sft", turn(b"x", ord("a"), END)), ("loop", [*b"xa", SPECIAL["<|endoftext|>"]]):
        s = session(models, name)
        s.answer("x")
        assert s.turns == [ids] and ids[-1] == s.stop


# ----------------------------------------------------------------------------------------------------------------------
# Chat form

def session(models, name="sft", **settings):
    model, tokenizer = chat.load_model(str(models / "out" / name), "auto", None)
    return chat.Session(model, tokenizer, chat.parse_arguments([f"--{k}={v}" for k, v in settings.items()]))


def test_chat_form(models):
    """The answer stops at <|end|>; the template is made of ids; turns are kept."""
    s = session(models, temperature=0)
    for line in "A", "", "<|end|>":           # an empty line after a finished answer is nothing
        s.answer(line)
    assert s.turns == [turn(b"A", *b"Hi", END), turn(b"<|end|>", *b"Hi", END)] and bytes(s.said) == b"Hi"
    assert chat.run_command("/reset", s) and s.turns == []


def test_chat_form_closes_an_interrupted_answer(models):
    s = session(models, temperature=0, **{"max-tokens": 1})
    s.stop = 9                                  # as in other people's models, not above the text's ids
    s.answer("A")
    s.answer("B")
    assert s.turns == [turn(b"A", *b"H", 9), turn(b"B", *b"H")]
    s.answer("")                                # writes on
    assert s.turns[1] == turn(b"B", *b"Hi")


@parametrize("most, said, closed", [(1, b"", [END]), (1, b"a", []), (2, b"a", [END]), (2, b"ab", [])])
def test_a_turn_is_closed_where_the_model_ended_it(models, monkeypatch, most, said, closed):
    """And left open where the number of tokens did, even if it would have ended there."""
    monkeypatch.setattr(model_cpu, "generate", speaking(lambda *rest: iter([*said, END])))
    s = session(models, **{"max-tokens": most})
    s.answer("x")
    assert s.turns == [turn(b"x", *said, *closed)]


def test_a_system_text_stands_before_the_first_question(models, capsys):
    """And stays there while whole turns between are forgotten.  The template says the same."""
    s = session(models, temperature=0)
    assert chat.run_command("/system  Be  good. \n", s)
    first = turn(b"Be  good.\n\na", *b"Hi", END)
    s.answer("a")
    for i in range(3):
        s.answer(str(i))
        assert s.turns == [first, turn(b"%d" % i, *b"Hi", END)]
    long = [turn(b"Be  good.\n\n" + b"q" * 10, *b"Hi", END)]
    s.answer("q" * 10)                                                  # too long to stay beside the first
    assert s.turns == long and capsys.readouterr().err == ""
    s.answer("q" * 11)
    assert s.turns == long and capsys.readouterr().err == "note: the prompt has 25 tokens; the last 24 are used.\n"
    for command in "/system", "/system zero", "/system none", "/system":
        chat.run_command(command, s)
    assert capsys.readouterr().out == "system is Be  good.\nsystem is zero\nsystem is none\nsystem is none\n" and s.turns == []
    s.answer("a")
    assert s.turns == [turn(b"a", *b"Hi", END)]
    chat.run_command("/system x", session(models, "loop"))
    assert "There is no command /system x; /help" in capsys.readouterr().out


def turn(text, *answer):
    return [USER, *text, END, ASSISTANT, *answer]


def test_chat_form_has_a_window_to_the_token(models, err_text):
    """Of a window of 32, 24 are for what was said, the turn's three special tokens included."""
    s = session(models)
    one, two = turn(b"1", *b"abc", END), turn(b"2", *b"abc", END)
    for text, kept in (b"z" * 5, [one, two]), (b"z" * 6, [two]):    # 8 + 8 + 8 or 9: the oldest goes, and it alone
        s.turns = [one, two[:-1]]                                   # it is the last one that is closed
        s.add_turn(text)
        assert s.turns == [*kept, turn(text)]
    text = bytes(range(100))
    for context, room in (1, 1), (5, 1), (6, 2), (32, 21):            # at least one token of what was typed
        s.model = SimpleNamespace(config=SimpleNamespace(context=context))
        for size, note in (room, ""), (room + 1, f"note: the prompt has {room + 4} tokens; the last {room + 3} are used.\n"):
            s.turns = []
            s.add_turn(text[:size])
            assert s.turns == [turn(text[:size][-room:])] and err_text() == note


def test_plain_form_has_a_window_to_the_token(models, err_text):
    s = session(models, "loop")
    for size, note in (32, ""), (33, "note: the prompt has 33 tokens; the last 32 are used.\n"):
        text = "".join(map(chr, range(80, 80 + size)))
        s.add_text(text)
        assert s.turns == [list(text.encode()[-32:])] and err_text() == note


# ----------------------------------------------------------------------------------------------------------------------
# The Euler table; which checkpoint; bad input

HEAD = "stop after      loss   |f(x)|/|x|   most likely after the end of the text\n"


def test_lens(tmp_path):
    """Ids that the tokenizer does not have are left out: the model has four more."""
    save_chain_model(f"{tmp_path}/m", [b"ab", b"bA", [ord("b"), 260], [ord("b"), 261]])
    assert run(tmp_path, "--model m --lens abA") == (
        0, b"2 tokens read, the next of each predicted; loss in nats a token\n" + HEAD.encode() +
        b'embedding     0.5493                "A"\nlayer 0       0.5493        0.000   "A"\n', "")


def test_plot_of_the_lens(models, monkeypatch, tmp_path):
    from matplotlib import pyplot
    s = session(models, "random")
    shown = [visible(token).replace(" ", "\u2423") for token in s.tokenizer.tokens]
    ids = s.tokenizer.encode("The king $x_1$ " * 5)[-32:]
    logits = s.model.logits([ids])[0, :, 0, :s.tokenizer.vocab_size]
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for columns in 32, 7:
        monkeypatch.setattr(chat, "PLOTTED", columns)
        chat.plot_lens(s.model, s.tokenizer, ids, tmp_path / "lens.png")
        axes = pyplot.gcf().axes[0]
        image, = axes.images
        # a probability has the same colour in every picture, and the embedding is the lowest row
        assert image.get_clim() == (0, 1) and image.origin == "lower" and image.get_array().shape == (3, columns)
        assert np.allclose(image.get_array()[-1], p.max(axis=1)[-columns:], rtol=1e-4)
        tokens, layers = [[label.get_text() for label in labels] for labels in (axes.get_xticklabels(), axes.get_yticklabels())]
        assert tokens == [shown[i] for i in ids[-columns:]] and layers == ["embedding", "layer 0", "layer 1"]
        assert not any(label.get_parse_math() for label in [*axes.texts, *axes.get_xticklabels()])
        cells = {cell.get_position(): cell for cell in axes.texts}
        assert [cells[t, 2].get_text() for t in range(columns)] == [shown[i] for i in logits.argmax(axis=1)[-columns:]]
        for (t, layer), p_cell in np.ndenumerate(image.get_array().T):      # dark letters on light colours
            assert cells[t, layer].get_color() == ("black" if p_cell > 0.6 else "white")
    arguments = "--model", "out/random", "--lens", "The king", "--plot", "lens.png"
    code, out, _ = run(models, *arguments)
    assert code == 0 and out.endswith(b"Wrote lens.png.\n") and (models / "lens.png").read_bytes().startswith(b"\x89PNG")
    with warnings.catch_warnings():
        warnings.simplefilter("error")          # as PYTHONWARNINGS=error does
        monkeypatch.setattr(chat, "visible", lambda token: "\u4e00")           # which the font does not have
        chat.plot_lens(s.model, s.tokenizer, ids, tmp_path / "lens.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(models, *arguments)
    assert (code, err) == (2, "error: --plot needs matplotlib: pip install matplotlib.\n")


def test_lens_of_a_long_text(models, monkeypatch, err_text):
    """Of a window of 32 the last 33 tokens, which make 32 predictions."""
    s, asked = session(models, "loop"), []
    monkeypatch.setattr(model_cpu, "print_euler_table", lambda model, tokenizer, ids: asked.append(ids))
    monkeypatch.setattr(chat, "plot_lens", lambda model, tokenizer, ids, path: asked.append(ids))
    for size, note in (2, ""), (33, ""), (34, "note: the text has 34 tokens; the last 33 are used.\n"):
        text = "".join(map(chr, range(50, 50 + size)))
        chat.print_lens(s.model, s.tokenizer, text, "lens.png")
        assert bytes(asked.pop()) == text.encode()[-33:-1]              # each of these has something to predict
        assert bytes(*asked.pop().tolist()) == text.encode()[-33:] and err_text() == note


def test_engine(monkeypatch):
    """The CPU computes in float32, another engine in its own best; the lens looks into the layers on the CPU."""
    def load(*arguments):
        raise ValueError(str(arguments))
    monkeypatch.setattr(checkpoint, "load", load)
    monkeypatch.setattr(model_gpu, "pick", lambda device: model_cpu if device == "cpu" else device)
    for arguments, expected in [
            ([], ("m", "auto", {"training": False}, None)),
            (["--device=gpu", "--context=9"], ("m", "gpu", {"training": False}, 9)),
            (["--device=gpu", "--lens="], ("m", model_cpu, {"training": False, "dtype": np.float32}, None))]:
        assert run(".", "--model m", *arguments) == (2, b"", f"error: {expected}\n")


def test_the_newest_checkpoint_is_taken(models):
    for newest, said in ("loop", b"ends.\n"), ("sft", b"Hi\n"):
        for name in "random", "loop", "sft":
            seconds = 2e9 + (name == newest)
            os.utime(models / "out" / name / "model.safetensors", (seconds, seconds))
        assert run(models, "--prompt e --temperature 0")[1] == said


@parametrize("option, low, high, step", [
    ("max-tokens", 1, 10**9, 1), ("top-k", 0, 10**9, 1), ("top-p", 0.001, 1, 1e-9),
    ("seed", 0, 2**63, 1), ("context", 1, 10**9, 1)])
def test_the_bounds_of_a_number(option, low, high, step):
    """It may reach them."""
    for value in low, high:
        assert value in vars(chat.parse_arguments([f"--{option}={value}"])).values()
    for value in low - step, high + step, "nan":
        with pytest.raises(SystemExit):
            chat.parse_arguments([f"--{option}={value}"])


@parametrize("context, default", [
    (160, ""), (200, '{%if loop.first and messages[0]["role"]!="system"%}{{"<|im_start|>system\\nBe kind.<|im_end|>\\n"}}{%endif%}')])
def test_the_system_text_of_a_template_stays(err_text, context, default):
    """While whole turns between are forgotten: ChatML, whose template brings one, or a plain one, whose turns begin with the
    end of the one before."""
    tokenizer = made_tokenizer([], [*SPECIAL_TOKENS, "<|im_start|>", "<|im_end|>"])
    tokenizer.template = known_template(default.join(CHATML_PARTS))
    s = chat.Session(SimpleNamespace(config=SimpleNamespace(context=context)), tokenizer, None)
    for text in b"first", b"second", b"third", b"fourth", b"fifth":
        s.add_turn(text)
        s.turns[-1] += [*b"Yes", s.stop]
    said = tokenizer.decode(sum(s.turns, []))
    begin = ("<|im_start|>system\nBe kind.<|im_end|>\n" if default else "") + "<|im_start|>user\n"
    assert said.startswith(f"{begin}first<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>user\n")
    assert "fifth" in said and "second" not in said
    s.add_turn(b"x" * 90)                                   # too long to stay beside the first: it is the first then
    assert tokenizer.decode(*s.turns).startswith(begin + "xxx") and err_text() == ""


@parametrize("arguments, message", rows("""
    --temperature -1          | argument --temperature: must be a number of at least 0, not '-1'
    --prompt a --lens a       | not allowed with argument
    --plot a.png              | --plot goes with --lens TEXT
    --model nowhere           | nowhere holds no checkpoint
    --model out/loop --lens a | --lens needs a text of at least 2 tokens; 'a' has 1.
    --model damaged --prompt a | damaged/config.json is damaged"""))
def test_bad_options(models, arguments, message):
    code, out, err = run(models, arguments)
    assert (code, out, err.count("\n")) == (2, b"", 1) and err.startswith("error: ") and message in err


def test_as_a_script(models):
    """What the other tests do in their own process, once as a process, whose reader goes away."""
    line = f"set -o pipefail; {sys.executable} {ROOT}/chat.py --model out/loop --temperature 0 --max-tokens 99999 | head -c 50"
    done = subprocess.run(["bash", "-c", line], cwd=models, capture_output=True, input="e\né\n".encode())
    assert (done.returncode, done.stderr, done.stdout) == (0, b"", f"ends.\n{LOOP * 9}".encode()[:50])


def test_no_checkpoint_at_all(tmp_path):
    assert run(tmp_path, "--prompt a") == (2, b"", ("error: there is no trained model in out/: run `make` or "
                                              "`python train.py`, or name the folder of one with --model DIR.\n"))
