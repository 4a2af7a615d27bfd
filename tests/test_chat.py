"""chat.py: what it prints by pipe and on a terminal, what it keeps between lines, what it says of bad input."""
import argparse
import contextlib
import functools
import inspect
import io
import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import types
import unicodedata

import numpy as np
import pytest

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


# One thread: these models are tiny, and threads of BLAS that wait for each other would be most of the time.
ENVIRONMENT = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}


def save_random_model(folder):
    tokenizer = Tokenizer.train([MULTILINGUAL], 320)
    model = model_cpu.Model(model_cpu.Config(dim=32, heads=4, kv_heads=2, layers=2, context=32, vocab=320, predict=2),
                            seed=3, dtype=np.float32)
    checkpoint.save(folder, model, tokenizer, {})


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


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders: out/random; out/loop writes LOOP for ever after any of its bytes, and "ends." once after "e"; out/sft
    answers "Hi" in chat form."""
    folder = tmp_path_factory.mktemp("chat")
    save_random_model(str(folder / "out" / "random"))
    save_chain_model(str(folder / "out" / "loop"), [LOOP_IDS, [*b"ends.", SPECIAL["<|endoftext|>"], *b"ends"]])
    save_chain_model(str(folder / "out" / "sft"), [[ASSISTANT, *b"Hi", END]], chat_form=True)
    return folder


class Stream(io.TextIOWrapper):
    """A standard stream in memory, which may pretend to be a terminal.  seen: of an output what can be read there at the
    moment, since it was flushed; of an input, all that its `output` showed when a line was asked for."""
    def __init__(self, data=b"", on_terminal=False, output=None, encoding="utf-8"):
        super().__init__(io.BytesIO(data), encoding, newline="\n")      # as Python opens its own
        self.on_terminal, self.output, self.shown = on_terminal, output, []

    def isatty(self):
        return self.on_terminal

    def seen(self):
        return self.buffer.getvalue()

    def readline(self, *arguments):
        self.shown.append(self.output.seen())
        return super().readline(*arguments)


SIGNATURE = inspect.signature(model_cpu.generate)


def speaking(source):
    """What takes the place of model_cpu.generate: it says what the source does, up to `stop`, at most `most`.
    """
    def generate(*arguments, **options):
        asked = SIGNATURE.bind(*arguments, **options).arguments
        stop, most, *_ = [asked.pop(name) for name in ("stop", "most", "speculate", "trace")]
        said = itertools.islice(source(*asked.values()), most)
        return itertools.takewhile(lambda token: token not in stop, said)
    return generate


def run(models, *arguments, input=b"", terminals=(False, False), generate=None, encoding="utf-8"):
    """chat.py in the folder of the models, in this process -> (exit code, standard output as bytes, standard error as
    str).  terminals: whether input and output are one; generate: the source of what a model says; it is told
    standard output besides what model_cpu.generate is."""
    out, err = Stream(on_terminal=terminals[1], encoding=encoding), io.StringIO()
    stdin = Stream(input, terminals[0], out)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(models)
        patch.setattr(sys, "argv", ["chat.py", *map(os.fsdecode, arguments)])
        for name, stream in (("stdin", stdin), ("stdout", out), ("stderr", err)):
            patch.setattr(sys, name, stream)
        if generate:
            patch.setattr(model_cpu, "generate", speaking(functools.partial(generate, out)))
        with pytest.raises(SystemExit) as left:
            run_script(chat.main)
    if terminals == (True, True):
        run.shown = stdin.shown
    out.flush()                                 # as at the end of a process
    return left.value.code or 0, out.seen(), err.getvalue()


def start(models, *arguments):
    """The same, still running, with pipes."""
    return subprocess.Popen([sys.executable, os.path.join(ROOT, "chat.py"), *arguments], cwd=models, env=ENVIRONMENT,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


# ----------------------------------------------------------------------------------------------------------------------
# One answer

def test_streaming_never_cuts_a_character(models):
    """Each piece that arrives is whole UTF-8 by itself, though every token of this model is a piece of a character."""
    process = start(models, "--model", "out/loop", "--prompt", "é", "--temperature", "0", "--max-tokens", "150")
    pieces = []
    while piece := os.read(process.stdout.fileno(), 4096):
        pieces.append(piece.decode("utf-8", "strict"))
    assert (process.communicate()[1], process.returncode) == (b"", 0)
    assert len(pieces) > 10                     # it came as a stream, not all at the end
    assert "".join(pieces) == (LOOP * 20).encode()[:152].decode("utf-8", "ignore") + "\n"


@pytest.mark.parametrize("count", range(1, 12))
def test_an_answer_that_ends_inside_a_character_shows_no_broken_one(models, capsys, count):
    model, tokenizer = chat.load_model(str(models / "out" / "loop"))
    s = chat.Session(model, tokenizer, None)
    for token in tokenizer.encode(LOOP)[:count]:
        s.show(tokenizer.decode_bytes([token]))
    assert capsys.readouterr().out == LOOP.encode()[:count].decode("utf-8", "ignore")


def test_bytes_of_a_random_model_are_printed_as_valid_utf8(models):
    code, out, _ = run(models, "--model", "out/random", "--prompt", "国王", "--seed", "1", "--top-k", "0")
    assert code == 0
    assert out.decode("utf-8", "strict").startswith("国王")
    assert "\ufffd" in out.decode()             # it writes broken sequences, which were shown as such


def test_same_seed_same_text(models):
    first, again, other = [run(models, "--model", "out/random", "--prompt", "The", "--seed", n)[1] for n in "112"]
    assert first == again != other


def test_greedy_is_generate_at_temperature_0(models):
    model, tokenizer = checkpoint.load(str(models / "out" / "random"), model_cpu, {"dtype": np.float32})
    stream = model_cpu.generate(model, tokenizer.encode("The king"), temperature=0, vocab=tokenizer.vocab_size)
    ids = [next(stream) for _ in range(40)]
    stop = next((i for i, token in enumerate(ids) if token in tokenizer.special.values()), len(ids))
    code, out, _ = run(models, "--model", "out/random", "--prompt", "The king", "--temperature=0", "--max-tokens=40")
    assert code == 0
    assert out.decode() == "The king" + tokenizer.decode(ids[:stop]) + "\n"


def test_end_of_text_stops(models):
    assert run(models, "--model", "out/loop", "--prompt", "e", "--temperature", "0") == (0, b"ends.\n", "")


def test_a_prompt_longer_than_the_context_keeps_its_end_and_says_so(models):
    code, out, err = run(models, "--model", "out/loop", "--prompt", "x" * 100 + "en", "--temperature", "0")
    assert (code, out) == (0, b"x" * 100 + b"ends.\n")
    assert err == "note: the prompt has 102 tokens; the last 32 are used.\n"
    text = "The king and the queen " * 20       # and a model that looks further back reads just the kept end
    model, tokenizer = checkpoint.load(str(models / "out" / "random"), model_cpu, {"dtype": np.float32})
    stream = model_cpu.generate(model, tokenizer.encode(text)[-32:], temperature=0, vocab=tokenizer.vocab_size)
    out = run(models, "--model", "out/random", "--prompt", text, "--temperature", "0", "--max-tokens", "10")[1]
    assert out.decode() == text + tokenizer.decode([next(stream) for _ in range(10)]) + "\n"


def test_a_prompt_that_is_not_utf8_is_completed(models):
    """The first byte of "é" as the prompt: the model writes the second, and together they are printed."""
    code, out, _ = run(models, "--model", "out/loop", "--prompt", b"\xc3", "--temperature", "0", "--max-tokens", "4")
    assert (code, out.decode()) == (0, "é世\n")
    assert run(models, "--model", "out/loop", "--temperature=0", "--max-tokens=4", input=b"\xc3\n")[1].decode() == "é世\n"


def test_an_empty_prompt_begins_a_text(models):
    assert run(models, "--model", "out/loop", "--prompt", "", "--temperature", "0")[1] == b"ends.\n"


def test_a_reader_that_goes_away_is_no_error(models):
    process = start(models, "--model", "out/loop", "--prompt", "é", "--max-tokens", "1000000")
    assert len(process.stdout.read(50)) == 50
    process.stdout.close()
    assert (process.wait(timeout=120), process.stderr.read()) == (0, b"")
    process.stderr.close()
    process.stdin.close()


# ----------------------------------------------------------------------------------------------------------------------
# Lines from a pipe

def test_lines_from_a_pipe(models):
    """No prompts and no escape codes; an empty line writes on; a line that begins with a slash is text."""
    code, out, err = run(models, "--model", "out/loop", "--temperature", "0", "--max-tokens", "11",
                         input=f"{LOOP[0]}\n\n/e\r\nж".encode())
    assert (code, err) == (0, "")
    assert out.decode() == f"{LOOP}é\n世🙂жé\n/ends.\nж{LOOP}\n"


def test_an_answer_cut_inside_a_character_is_written_on_whole(models):
    code, out, _ = run(models, "--model", "out/loop", "--temperature=0", "--max-tokens=2", input="é\n\n\n".encode())
    assert (code, out.decode()) == (0, "é\n世\n\n")          # 世 has three bytes, 🙂 four: two, then the third and one


def test_half_a_character_is_forgotten_with_its_text(models):
    """It would otherwise be shown, broken, at the beginning of the next."""
    assert run(models, "--model", "out/loop", "--temperature=0", "--max-tokens=2", input="é\ne\n".encode())[1].decode() == "é\nend\n"
    assert run(models, "--model", "out/sft", "--max-tokens=1", input=b"A\nB\n", generate=lambda *_: iter([0xc3]))[1] == b"\n\n"


def test_a_text_that_has_ended_is_written_on_as_a_new_one(models):
    assert run(models, "--model", "out/loop", "--temperature", "0", input=b"e\n\n")[1] == b"ends.\nends.\n"


def test_each_answer_of_a_session_draws_anew(models):
    arguments = ("--model", "out/random", "--seed", "5", "--max-tokens", "30")
    one, two = run(models, *arguments, input=b"The\n" * 2)[1].split(b"\nThe")
    assert one != b"The" + two.removesuffix(b"\n")
    assert run(models, *arguments, "--prompt", "The")[1].startswith(one)


def test_ctrl_c_ends_what_reads_from_a_pipe(models):
    process = start(models, "--model", "out/loop", "--max-tokens", "1000000")
    process.stdin.write("é\n".encode() * 2)
    process.stdin.flush()
    os.read(process.stdout.fileno(), 100)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, b"Stopped.\n")


# ----------------------------------------------------------------------------------------------------------------------
# A terminal

class Terminal:
    """chat.py on a pseudo-terminal."""
    def __init__(self, folder, *arguments):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            environment = {**ENVIRONMENT, "TERM": "dumb", "INPUTRC": "/dev/null", "LC_ALL": "C.UTF-8"}
            os.execve(sys.executable, [sys.executable, os.path.join(ROOT, "chat.py"), *arguments], environment)
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
        """Send Ctrl-D, at a prompt -> (exit code, the rest of what it printed)."""
        self.send("\x04")
        rest = self.seen
        try:
            while True:
                assert select.select([self.fd], [], [], 120)[0], f"Ctrl-D did not end it: {rest!r}"
                piece = os.read(self.fd, 65536)
                if not piece:
                    break
                rest += piece
        except OSError:                         # Linux: the other side of the terminal is closed
            pass
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), rest


def test_terminal(models):
    """Ctrl-C stops an answer and the session goes on; an arrow brings the last line back; Ctrl-D leaves."""
    terminal = Terminal(models, "--model", "out/loop", "--temperature", "0", "--max-tokens", "1000000")
    count = model_cpu.param_count(chat.load_model(str(models / "out" / "loop"))[0].config)
    terminal.wait_for(f"out/loop: {count:,} parameters, step 0.".encode())
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
    code, rest = terminal.leave()
    assert code == 0 and b"Traceback" not in rest


def test_every_command_on_a_terminal(models):
    """What is typed goes through a real line editor: a paste of 10,000 characters, a line that goes on, Ctrl-C in the
    midst of an answer and a question after it, and what the last answer was like."""
    terminal = Terminal(models, "--model", "out/sft", "--temperature", "0", "--speculation")
    for line, answer in [("/stats", "/stats is about the last answer, and there is none."),
                         ("/tokens", "/tokens is about the last answer, and there is none."),
                         ("/system", "system is none"), ("/system Be brief.", "system is Be brief."),
                         ("Hello", "Hi"), ("/stats", " tokens/s, 1.00 tokens a verification"),
                         ("/tokens", "H\x1b[0m\x1b[32mi\x1b[0m\r\n\x1b[32mfrom 50%\x1b[0m  \x1b[36mfrom 10%\x1b[0m  "),
                         ("x" * 10_000, "note: the prompt has 10000 tokens; the last 10 are used."), ("one\\", "... "),
                         ("two", "Hi"), ("/system none", "system is none"), ("/temperature 2", "temperature is 2.0"),
                         ("/max-tokens 100000000", "max-tokens is 100000000"), ("/top-k 0", "top-k is 0"),
                         ("/seed 3", "seed is 3"), ("/help", "/system TEXT begins anew")]:
        terminal.wait_for(b"> " if line != "two" else b"")
        terminal.send(line + "\n")
        terminal.wait_for(b"\n" if len(line) < 9000 else b"x\r\n")
        terminal.wait_for(answer.encode())
    terminal.send("/reset\n/quit\n")
    assert b"Traceback" not in terminal.leave()[1]


def test_ctrl_c_and_a_follow_up(models):
    """What the cache holds after an answer was stopped is what was read: the next lines get the answers that a new
    session gets."""
    terminal = Terminal(models, "--model", "out/loop", "--temperature", "0", "--max-tokens", "1000000")
    for line in ("é", "", "世"):
        terminal.wait_for(b"> ")
        terminal.send(line + "\n")
        terminal.wait_for(LOOP.encode() * 9)
        terminal.send("\x03")
    terminal.wait_for(b"> ")
    terminal.send("e\n")
    terminal.wait_for(b"\r\nends.\r\n> ")
    assert b"Traceback" not in terminal.leave()[1]


def test_lines_that_go_on(models):
    """On a terminal; from a pipe a backslash is a backslash."""
    texts = []

    def generate(out, model, ids, *rest):
        texts.append(bytes(ids))
        return iter(())
    out = run(models, "--model", "out/loop", input=b"a\\\nb\\\n\nc\\\\\n/d\n", terminals=TERMINAL, generate=generate)[1]
    assert texts == [b"a\nb\n", b"c\\\n/d"] and out.count(b"... ") == 3
    assert out.partition(b"more.\n")[2] == b"> ... ... a\nb\n\n> ... c\\\n/d\n> \n"
    texts.clear()
    run(models, "--model", "out/loop", input=b"a\\\nb\n", generate=generate)
    assert texts == [b"a\\", b"b"]


def test_speculation_changes_no_answer(models):
    """Greedy or drawn; and what /stats says of it, of a model whose every draft is right."""
    for arguments in (["--temperature", "0"], ["--seed", "3"], ["--seed", "4", "--temperature", "2", "--top-k", "9"]):
        texts = [run(models, "--model", "out/random", *arguments, option, input=b"The king\n\nand\n")[1]
                 for option in ("--speculation", "--no-speculation")]
        assert texts[0] == texts[1]
    s = session(models)
    s.said, s.seconds, s.model = [1] * 7, 0.5, types.SimpleNamespace(config=types.SimpleNamespace(predict=4))
    s.trace = [(0, 0, 1.0), (0, 3, 1.0), (1, 3, 1.0), (2, 3, 1.0), (0, 3, 1.0), (1, 3, 1.0), (0, 3, 1.0), (0, 0, 1.0)]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        s.print_stats()
        s.trace = [(0, 0, 1.0)] * 7
        s.print_stats()
    none = "no drafts (--speculation)\n"
    assert out.getvalue() == (
        "7 tokens in 0.50 s, 14.0 tokens/s, 1.60 tokens a verification\n"
        "  head 1: 2 of 3 drafts right, 67%\n  head 2: 1 of 3 drafts right, 33%\n  head 3: 0 of 3 drafts right, 0%\n"
        "7 tokens in 0.50 s, 14.0 tokens/s, 1.00 tokens a verification\n"
        f"  head 1: {none}  head 2: {none}  head 3: {none}")


def test_tokens_have_the_colour_of_their_probability(models, monkeypatch, capsys):
    s = session(models)
    s.said, s.trace = [*b"ab\nc\xc3"], [(0, 0, p) for p in (0.5, 0.499, 0.1, 0.01, 0.009, 1.0)]
    legend = "  ".join(f"\x1b[{c}mfrom {p}%\x1b[0m" for p, c in ((50, 32), (10, 36), (1, 33), (0, 31)))
    monkeypatch.delenv("NO_COLOR", raising=False)
    s.print_tokens()
    assert capsys.readouterr().out == ("\x1b[32ma\x1b[0m\x1b[36mb\x1b[0m\x1b[36m\\n\x1b[0m\n\x1b[33mc\x1b[0m"
                                       "\x1b[31m\\xc3\x1b[0m\n" + legend + "\n")
    monkeypatch.setenv("NO_COLOR", "1")
    s.print_tokens()
    assert capsys.readouterr().out == "a[50%]b[50%]\\n[10%]\nc[1%]\\xc3[1%]\n"


def test_a_terminal_shows_control_characters_instead_of_obeying(tmp_path):
    save_chain_model(str(tmp_path / "m"), [[*b"a\x1b[2J\x07\x9b", SPECIAL["<|endoftext|>"]]])
    arguments = ("--model", "m", "--temperature", "0", "--prompt", "a")
    assert run(tmp_path, *arguments, terminals=(True, True))[1].decode() == "a\ufffd[2J\ufffd\ufffd\n"
    assert run(tmp_path, *arguments)[1].decode() == "a\x1b[2J\x07\ufffd\n"      # a file gets what was said
    cut = {char for char in map(chr, range(0x110000)) if printable(char) != char}
    assert cut == {char for char in map(chr, range(0x110000)) if unicodedata.category(char) == "Cc"} - {"\t", "\n"}


TERMINAL = (True, True)


def test_a_session_on_a_terminal(models):
    """To the letter, and each prompt is there before a line is waited for."""
    count = model_cpu.param_count(chat.load_model(str(models / "out" / "loop"))[0].config)
    first = f"out/loop: {count:,} parameters, step 0.\n"
    assert run(models, "--model", "out/loop", "--temperature=0", input=b"e\n/reset\n\n /e\n", terminals=TERMINAL) == (
        0, f"{first}Begin a text; Ctrl-C stops the model, /quit or Ctrl-D leaves, /help shows more.\n"
        "> ends.\n> > ends.\n>  /ends.\n> \n".encode(), "")
    assert len(run.shown) == 5 and run.shown[0].endswith(b"more.\n> ") and run.shown[1].endswith(b"\n> ends.\n> ")
    count = model_cpu.param_count(chat.load_model(str(models / "out" / "sft"))[0].config)
    assert run(models, "--model", "out/sft", "--temperature=0", input=b"\nHello\n\n", terminals=TERMINAL)[1] == (
        f"out/sft: {count:,} parameters, step 0.\n"
        "Ask; Ctrl-C stops the model, /quit or Ctrl-D leaves, /help shows more.\n> > Hi\n> > \n").encode()
    # not a terminal unless both are one
    for terminals in ((True, False), (False, True), (False, False)):
        assert run(models, "--model", "out/loop", "--temperature=0", input=b"e\n/e\n", terminals=terminals) == (
            0, b"ends.\n/ends.\n", "")


def test_commands(models):
    """Settings are shown, changed and confirmed; what cannot be is refused in the words of the options."""
    code, out, err = run(models, "--model", "out/loop", "--temperature", "0", terminals=TERMINAL, input=b"\n".join([
        b"/max-tokens 3", b"e", b"/temperature  hot ", b"/max-tokens", b"/nothing", b"/", b"/  max-tokens   2 ", b"/top-p 2", b"e",
        b"/help", b"/temperature 0.5", b"/temperature", b"/seed", b"/seed  7", b"/seed ", b"/seed none",
        b"/seed no", b"/top-k none", b"/top-k", b"/quit now", b"/quits", b""]))
    assert (code, err) == (0, "")
    assert out.decode().partition("more.\n")[2] == (
        "> max-tokens is 3\n> ends\n> /temperature must be a number from 0 to 100, not 'hot'.\n"
        "> max-tokens is 3\n"
        "> There is no command /nothing; /help lists them. A space in front makes it a prompt.\n"
        "> There is no command /; /help lists them. A space in front makes it a prompt.\n"
        "> max-tokens is 2\n> /top-p must be a number from 0.001 to 1, not '2'.\n"
        "> end\n"
        "> /reset forgets, /quit leaves, an empty line lets the model write on, \\ at its end continues a line.\n"
        "/stats: how fast the last answer came; /tokens: how likely each of its tokens was.\nThe settings now:\n"
        "  /max-tokens 2   length of an answer, in tokens, at most\n"
        "  /temperature 0.0   0: the likeliest token; 1: as the model learned; more: wilder\n"
        "  /top-k 50   draw among the k likeliest tokens; 0: among all\n"
        "  /top-p 1.0   draw among the likeliest tokens of this probability together; 1: all\n"
        "  /seed none   the same seed gives the same text; none: another text every time\n"
        "> temperature is 0.5\n> temperature is 0.5\n"
        "> seed is none\n> seed is 7\n> seed is 7\n> seed is none\n"
        "> /seed must be a whole number of at least 0 and at most 9,223,372,036,854,775,808, not 'no'.\n"
        "> /top-k must be a whole number of at least 0 and at most 1,000,000,000, not 'none'.\n> top-k is 50\n> ")


@pytest.mark.parametrize("line", [b"/quit", b"/exit", b"/ quit ", b"/quit now", b"/exit\r"])
def test_leaving(models, line):
    """What comes after it is not read any more; without a terminal it is a text as any other."""
    code, out, err = run(models, "--model", "out/loop", "--temperature=0", terminals=TERMINAL,
                         input=b"e\n" + line + b"\ne\n")
    assert (code, out.partition(b"more.\n")[2], err) == (0, b"> ends.\n> ", "")
    out = run(models, "--model", "out/loop", "--temperature=0", "--max-tokens=1", input=line + b"\ne\n")[1]
    assert out.startswith(line.strip(b"\r")) and out.endswith(b"\nen\n")


@pytest.mark.parametrize("name", ["quits", "exits", "Quit", "resets", "helpme", "top_k", "max-tokens2"])
def test_what_is_no_command(models, name):
    out = run(models, "--model", "out/loop", terminals=TERMINAL, input=f"/{name} 3 \n".encode())[1]
    assert out.partition(b"more.\n")[2].decode() == (
        f"> There is no command /{name} 3; /help lists them. A space in front makes it a prompt.\n> \n")


def test_a_shown_setting_is_not_changed(models):
    """Only a change sets the seeds of a session back to the first."""
    calls = []
    run(models, "--model", "out/loop", "--seed", "5", terminals=TERMINAL, generate=record_calls(calls),
        input=b"a\n/seed\nb\n/temperature x\nc\n/seed 5\nd\n/seed none\ne\n")
    assert [seed for *_, seed, _ in calls] == [5, 6, 7, 5, None]


def record_calls(calls):
    """A generate that says nothing and notes what it was asked: ids, temperature, top_k, top_p, seed, size of the
    vocabulary."""
    def generate(out, model, *rest):
        calls.append(rest)
        return iter([SPECIAL["<|endoftext|>"]])
    return generate


def test_what_is_asked_of_the_model(models, monkeypatch):
    """Every setting reaches it; each answer of a session has a seed of its own, which a command sets anew."""
    calls = []
    run(models, "--model", "out/loop", input=b"a\nb\n", generate=record_calls(calls))
    assert calls == [([ord(c)], 0.8, 50, 1.0, None, 260) for c in "ab"]
    calls.clear()
    run(models, "--model", "out/loop", "--seed", "5", "--temperature", "0.25", "--top-k", "7", "--top-p", "0.5",
        input=b"a\nb\n/reset\nc\n/top-k 8\nd\n/seed 20\ne\nf\n", terminals=TERMINAL, generate=record_calls(calls))
    assert calls == [([ord(c)], 0.25, k, 0.5, seed, 260) for c, k, seed in [
        ("a", 7, 5), ("b", 7, 6), ("c", 7, 7), ("d", 8, 5), ("e", 8, 20), ("f", 8, 21)]]
    calls.clear()
    run(models, "--model", "out/loop", "--prompt", "", "--seed", str(2**63), generate=record_calls(calls))
    assert calls == [([SPECIAL["<|endoftext|>"]], 0.8, 50, 1.0, 2**63, 260)]
    bounds = []

    def generate(*arguments, **options):
        bounds.append((set(options["stop"]), options["most"], options["speculate"]))
        return iter(())
    monkeypatch.setattr(model_cpu, "generate", generate)
    for name in ("loop", "sft"):
        for options, most in ([], 200), (["--max-tokens", "7"], 7):
            run(models, "--model", f"out/{name}", "--prompt", "x", *options)
            assert bounds.pop() == (set(SPECIAL.values()), most, None)
    for option, speculate in (("--speculation", True), ("--no-speculation", False)):
        run(models, "--model", "out/sft", "--prompt", "x", option)
        assert bounds.pop()[2] is speculate


def test_tokens_come_as_they_are_made(models):
    """Each is there to be read before the next is computed, and the line end before the next line is waited for."""
    seen = []

    def generate(out, *rest):
        for token in b"abc":
            seen.append(out.seen())
            yield token
    terminals = (True, True)
    run(models, "--model", "out/loop", "--max-tokens", "2", "--prompt", "x", generate=generate)
    assert seen == [b"x", b"xa"]                # nothing is computed that is not shown
    run(models, "--model", "out/loop", input=b"y\n", terminals=terminals, generate=generate)
    assert run.shown[-1].endswith(b"> yabc\n> ")
    out = Stream()
    with contextlib.redirect_stdout(out):
        s = session(models)
        s.settings.max_tokens = 2
        s.answer("A")
        assert out.seen() == b"Hi\n"


@pytest.mark.parametrize("terminals", [(True, True), (False, False)])
def test_ctrl_c_while_the_model_writes(models, terminals):
    """On a terminal the next line goes on; elsewhere it is the end."""
    texts = []

    def generate(out, model, ids, *rest):
        texts.append(bytes(ids))
        yield ord("1")
        if len(texts) == 1:
            raise KeyboardInterrupt
    code, out, _ = run(models, "--model", "out/loop", input=b"a\n\n", terminals=terminals, generate=generate)
    if terminals == TERMINAL:
        assert (code, out.partition(b"more.\n")[2], texts) == (0, b"> a1\n> 1\n> \n", [b"a", b"a1"])
    else:
        assert (code, out, texts) == (130, b"a1", [b"a"])


@pytest.mark.parametrize("special", list(SPECIAL))
def test_any_special_token_ends_an_answer(models, special):
    """In chat form the turn is closed as by <|end|>; in plain form the text is at its end."""
    def generate(*_):
        yield from [ord("a"), SPECIAL[special], ord("b")]
    for name, text in (("sft", b"a\n"), ("loop", b"xa\n")):
        assert run(models, "--model", f"out/{name}", "--prompt", "x", generate=generate)[1] == text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_cpu, "generate", speaking(generate))
        s = session(models)
        s.answer("x")
        assert s.turns == [[USER, ord("x"), END, ASSISTANT, ord("a"), END]] and s.turns[-1][-1] == s.stop
        model, tokenizer = chat.load_model(str(models / "out" / "loop"))
        s = chat.Session(model, tokenizer, chat.parse_arguments([]))
        s.answer("x")
        assert s.turns == [[*b"xa", SPECIAL["<|endoftext|>"]]]


# ----------------------------------------------------------------------------------------------------------------------
# Chat form

def session(models, **settings):
    model, tokenizer = chat.load_model(str(models / "out" / "sft"))
    return chat.Session(model, tokenizer, chat.parse_arguments([f"--{k}={v}" for k, v in settings.items()]))


@pytest.mark.parametrize("most", [1, 200, 300, 1000])
def test_an_answer_that_was_cut_short_is_not_at_its_end(models, monkeypatch, capsys, most):
    for length in (most - 1, most):
        s = session(models)
        s.settings.max_tokens = int(str(most))
        monkeypatch.setattr(chat.model_cpu, "generate", lambda *rest, length=length, **options: itertools.repeat(65, length))
        s.answer("q")
        assert (s.turns[-1][-1] == s.stop) == (length < most) and len(s.said) == length


def test_the_seconds_of_an_answer(models, monkeypatch, capsys):
    """From the question to the last token."""
    monkeypatch.setattr(chat.time, "perf_counter", itertools.count(0.25, 0.5).__next__)
    s = session(models, temperature=0)
    s.answer("Hello")
    assert len(s.said) == 2 and s.seconds == 1.0
    s.print_stats()
    assert "2 tokens in 1.00 s, 2.0 tokens/s, " in capsys.readouterr().out


def test_chat_form(models):
    """The answer alone is printed and stops at <|end|>; the template is made of ids; turns are kept."""
    assert run(models, "--model", "out/sft", "--prompt", "Hello", "--temperature", "0") == (0, b"Hi\n", "")
    s = session(models, temperature=0)
    for line in ("A", "", "<|end|>"):           # an empty line after a finished answer is nothing
        s.answer(line)
    assert s.turns == [[USER, *b"A", END, ASSISTANT, *b"Hi", END], [USER, *b"<|end|>", END, ASSISTANT, *b"Hi", END]]


def test_chat_form_closes_an_interrupted_answer(models):
    s = session(models, temperature=0)
    s.settings.max_tokens = 1
    s.answer("A")
    assert s.turns[0][-1] == ord("H")
    s.answer("B")
    assert s.turns[0][-2:] == [ord("H"), END]
    s.answer("")                                # writes on
    assert s.turns[1][-2:] == [*b"Hi"]


@pytest.mark.parametrize("most, said, closed", [(1, b"", True), (1, b"a", False), (2, b"a", True),
                                                (2, b"ab", False)])
def test_a_turn_is_closed_where_the_model_ended_it(models, monkeypatch, most, said, closed):
    """And left open where the number of tokens did, even if it would have ended there."""
    monkeypatch.setattr(model_cpu, "generate", speaking(lambda *rest: iter([*said, END])))
    s = session(models, **{"max-tokens": most})
    s.answer("x")
    assert s.turns == [[USER, ord("x"), END, ASSISTANT, *said, *[END] * closed]]


def test_chat_form_forgets_whole_turns(models, capsys):
    s = session(models, temperature=0)
    for i in range(6):
        s.answer(f"q{i}")
        assert sum(map(len, s.turns)) <= 32     # the context
    assert [bytes(turn[1:turn.index(END)]) for turn in s.turns] == [b"q3", b"q4", b"q5"]
    assert all(turn[0] == USER for turn in s.turns)
    assert capsys.readouterr().err == ""
    s.answer("x" * 50)
    assert s.turns == [[USER, *b"x" * 21, END, ASSISTANT, *b"Hi", END]]
    assert capsys.readouterr().err == "note: the prompt has 50 tokens; the last 21 are used.\n"


def test_a_system_text_stands_before_the_first_question(models, capsys):
    """And stays there while whole turns between are forgotten.  The template says the same."""
    s = session(models, temperature=0)
    assert chat.run_command("/system  Be  good. \n", s) and capsys.readouterr().out == "system is Be  good.\n"
    s.answer("a")
    assert s.turns == [turn(b"Be  good.\n\na", *b"Hi", END)]
    for i in range(3):
        s.answer(str(i))
        assert s.turns == [turn(b"Be  good.\n\na", *b"Hi", END), turn(b"%d" % i, *b"Hi", END)]
    s.answer("q" * 10)                                                  # too long to stay beside the first
    assert s.turns == [turn(b"Be  good.\n\n" + b"q" * 10, *b"Hi", END)]
    assert capsys.readouterr().err == ""
    s.answer("q" * 11)
    assert s.turns == [turn(b"Be  good.\n\n" + b"q" * 10, *b"Hi", END)]             # which stays whole
    assert capsys.readouterr().err == "note: the prompt has 11 tokens; the last 10 are used.\n"
    for command, said in (("/system", "Be  good."), ("/system none", "none"), ("/system", "none")):
        chat.run_command(command, s)
        assert capsys.readouterr().out == f"system is {said}\n"
    assert s.turns == []
    s.answer("a")
    assert s.turns == [turn(b"a", *b"Hi", END)]
    model, tokenizer = chat.load_model(str(models / "out" / "loop"))
    chat.run_command("/system x", chat.Session(model, tokenizer, chat.parse_arguments([])))
    assert "There is no command /system x; /help" in capsys.readouterr().out


def turn(text, *answer):
    return [USER, *text, END, ASSISTANT, *answer]


def test_chat_form_has_a_window_to_the_token(models, capsys):
    """Of a window of 32, 24 are for what was said, the turn's three special tokens included."""
    s = session(models)
    s.add_turn(b"y" + b"x" * 20)                # 21 + 3: all of it
    assert s.turns == [turn(b"y" + b"x" * 20)] and capsys.readouterr().err == ""
    s.add_turn(b"y" + b"x" * 21)                # one more than fits; the turn before is forgotten
    assert s.turns == [turn(b"x" * 21)]
    assert capsys.readouterr().err == "note: the prompt has 22 tokens; the last 21 are used.\n"
    for size, kept in ((6, 3), (7, 2)):         # 8 + 8 + 8 or 9: the oldest goes when they are more than 24, and it alone
        s.turns = [turn(b"1", *b"abc", END), turn(b"2", *b"abc", END)]
        s.add_turn(b"z" * (size - 1))
        assert s.turns == [turn(b"1", *b"abc", END), turn(b"2", *b"abc", END), turn(b"z" * (size - 1))][-kept:]
    s.turns = [turn(b"1", *b"a", END), turn(b"2", *b"b")]
    s.add_turn(b"3")                            # it is the last one that is closed
    assert s.turns == [turn(b"1", *b"a", END), turn(b"2", *b"b", END), turn(b"3")]
    for context, room in ((1, 1), (4, 1), (5, 1), (6, 2), (64, 45), (100, 72)):     # at least one token of what was typed
        s.model, s.turns = types.SimpleNamespace(config=types.SimpleNamespace(context=context)), []
        s.add_turn(bytes(range(100)))
        assert s.turns == [turn(bytes(range(100 - room, 100)))]
        assert capsys.readouterr().err == f"note: the prompt has 100 tokens; the last {room} are used.\n"


def test_plain_form_has_a_window_to_the_token(models, capsys):
    model, tokenizer = chat.load_model(str(models / "out" / "loop"))
    s = chat.Session(model, tokenizer, chat.parse_arguments([]))
    assert (s.turns, s.answers, s.stop) == ([], 0, SPECIAL["<|endoftext|>"])
    assert session(models).stop == END
    for size in (31, 32, 33, 34):
        text = bytes(range(97, 97 + size))
        s.add_text(text)
        assert s.turns == [list(text[-32:])]
        note = f"note: the prompt has {size} tokens; the last 32 are used.\n"
        assert capsys.readouterr().err == (note if size > 32 else "")


# ----------------------------------------------------------------------------------------------------------------------
# The Euler table; which checkpoint; bad input

HEAD = "stop after      loss   |f(x)|/|x|   most likely after the end of the text\n"


def test_lens(models, tmp_path):
    """The whole table, of a model that looks further back; and of one whose numbers are known."""
    text = "The king and the queen"
    model, tokenizer = checkpoint.load(str(models / "out" / "random"), model_cpu, {"dtype": np.float32})
    ids = tokenizer.encode(text)
    (first, _, best), *rows = model_cpu.euler_table(model, np.array([ids]))
    words = ["  ".join('"{}"'.format(visible(tokenizer.tokens[i])) for i in row)
             for row in (best, *(ids for *_, ids in rows))]
    expected = "%d tokens read, the next of each predicted; loss in nats a token\n" % (len(ids) - 1) + HEAD
    expected += "embedding   %8.4f%16s%s\n" % (first, "", words[0])
    for i, (loss, step, _) in enumerate(rows):
        expected += "layer %d     %8.4f%13.3f   %s\n" % (i, loss, step, words[i + 1])
    assert len(rows) == 2 and run(models, "--model", "out/random", "--lens", text) == (0, expected.encode(), "")
    # ids that the tokenizer does not have are left out: the model has four more
    save_chain_model(str(tmp_path / "m"), [b"ab", b"bA", [ord("b"), 260], [ord("b"), 261]])
    assert run(tmp_path, "--model", "m", "--lens", "abA") == (
        0, b"2 tokens read, the next of each predicted; loss in nats a token\n" + HEAD.encode() +
        b'embedding     0.5493                "A"\nlayer 0       0.5493        0.000   "A"\n', "")


def test_plot_of_the_lens(models, monkeypatch, tmp_path):
    """What is drawn, by a stand-in for matplotlib; the picture itself, where that is installed."""
    text, drawn = "The king and the queen " * 5, types.SimpleNamespace(cells={}, ticks={}, saved=[])
    axes = types.SimpleNamespace(
        imshow=lambda p, **options: vars(drawn).update(p=p, scale=options), set=lambda **options: None,
        text=lambda x, y, text, **options: drawn.cells.update({(y, x): (text, options["parse_math"])}),
        set_xticks=lambda at, labels, parse_math: drawn.ticks.update(x=(list(at), labels, parse_math)),
        set_yticks=lambda at, labels, **options: drawn.ticks.update(y=(list(at), labels)))
    figure = types.SimpleNamespace(colorbar=lambda image, **options: None,
                                   savefig=lambda path, **options: drawn.saved.append(path))
    pyplot = types.SimpleNamespace(subplots=lambda figsize: (figure, axes))
    model, tokenizer = checkpoint.load(str(models / "out" / "random"), model_cpu, {"dtype": np.float32})
    ids = tokenizer.encode(text)[-33:]
    expected = model.logits([ids[:-1]])[0, :, 0, :tokenizer.vocab_size]
    p = np.exp(expected) / np.exp(expected).sum(axis=1, keepdims=True)
    shown = [visible(token).replace(" ", "\u2423") for token in tokenizer.tokens]
    for most in (64, 7):
        drawn.cells.clear()
        with monkeypatch.context() as patch:
            patch.setattr(chat, "load_pyplot", lambda: pyplot)
            patch.setattr(chat, "PLOTTED", most)
            code, out, _ = run(models, "--model", "out/random", "--lens", text, "--plot", "lens.png")
        T = min(32, most)
        assert code == 0 and out.endswith(b"Wrote lens.png.\n") and drawn.saved.pop() == "lens.png"
        assert drawn.p.shape == (3, T) and np.allclose(drawn.p[-1], p.max(axis=1)[-T:], rtol=1e-4)
        assert drawn.ticks == {"x": (list(range(T)), [shown[i] for i in ids[:-1]][-T:], False),
                               "y": ([0, 1, 2], ["embedding", "layer 0", "layer 1"])}
        assert len(drawn.cells) == 3 * T
        assert [drawn.cells[2, t] for t in range(T)] == [
            (shown[i], False) for i in expected.argmax(axis=1)[-T:]]
    colours = []
    axes.text = lambda x, y, text, color, **options: colours.append(color)
    with monkeypatch.context() as patch:                    # dark letters on light colours, light ones on dark
        patch.setattr(chat, "load_pyplot", lambda: pyplot)
        certain = np.log([[0.58, 0.42, 1e-30], [0.62, 1e-30, 0.38], [1e-30, 1.0, 1e-30]])
        patch.setattr(model_cpu, "layer_logits", lambda model, inputs: [(None, certain)])
        chat.plot_lens(model, types.SimpleNamespace(vocab_size=3, tokens=[b"a", b"b", b"c"]), [0, 1, 2], "lens.png")
        assert drawn.ticks["y"] == ([0], ["embedding"])
        patch.setattr(model_cpu, "layer_logits", lambda model, inputs: [(None, certain)] * 4)
        chat.plot_lens(model, types.SimpleNamespace(vocab_size=3, tokens=[b"a", b"b", b"c"]), [0, 1, 2], "lens.png")
        assert drawn.ticks["y"] == ([0, 1, 2, 3], ["embedding", "layer 0", "layer 1", "layer 2"])
    assert colours == 5 * ["white", "black", "black"]
    # a probability has the same colour in every picture, and the embedding is the lowest row
    assert drawn.scale == {"vmin": 0, "vmax": 1, "origin": "lower", "aspect": "auto"}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        code, _, err = run(models, "--model", "out/random", "--lens", text, "--plot", "lens.png")
        assert (code, err.splitlines()[-1]) == (2, "error: --plot needs matplotlib: pip install matplotlib.")
    pytest.importorskip("matplotlib")
    path = tmp_path / "lens.png"
    assert run(models, "--model", "out/random", "--lens", text + "$x_1$ 国王", "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    code, _, err = run(models, "--model", "out/random", "--lens", text, "--plot", "nowhere/lens.png")
    assert code == 2 and err.splitlines()[-1].startswith("error: ")


def test_lens_of_a_long_text(models, monkeypatch, capsys):
    """Of a window of 32 the last 33 tokens, which make 32 predictions."""
    asked = []

    def euler_table(model, ids):
        asked.append(ids.tolist())
        return []
    monkeypatch.setattr(model_cpu, "euler_table", euler_table)
    tokenizer = chat.load_model(str(models / "out" / "loop"))[1]
    for context in (31, 32):
        model = types.SimpleNamespace(config=types.SimpleNamespace(context=context))
        for size in (2, 3, 31, 32, 33, 34, 35):
            text = "".join(map(chr, range(50, 50 + size)))
            chat.print_lens(model, tokenizer, text, None)
            out, err = capsys.readouterr()
            assert asked.pop() == [list(text.encode()[-context - 1:])]
            read = min(size - 1, context)
            assert out.startswith(f"{read} tokens read, the next of each predicted; loss in nats a token\n")
            note = f"note: the text has {size} tokens; the last {context + 1} are used.\n"
            assert err == (note if size > context + 1 else "")
    for text in ("", "a"):
        with pytest.raises(ValueError) as error:
            chat.print_lens(model, tokenizer, text, None)
        assert str(error.value) == f"--lens needs a text of at least 2 tokens; {text!r} has {len(text)}."


def test_engine(monkeypatch):
    """The CPU computes in float32, another engine in its own best; the lens looks into the layers on the CPU."""
    monkeypatch.setattr(checkpoint, "load", lambda *arguments: arguments)
    assert chat.load_model("m", "cpu") == ("m", model_cpu, {"training": False, "dtype": np.float32}, None)
    monkeypatch.setattr(model_gpu, "pick", lambda device: f"the engine for {device}")
    assert chat.load_model("m", context=7) == ("m", "the engine for auto", {"training": False}, 7)
    for arguments, device in (([], "auto"), (["--device", "gpu"], "gpu"), (["--device", "gpu", "--lens", "a"], "cpu"),
                              (["--lens", ""], "cpu"), (["--prompt", "", "--device", "cpu"], "cpu")):
        asked = []
        monkeypatch.setattr(chat, "load_model", lambda *rest, asked=asked: asked.append(rest) or exec("raise ValueError('enough')"))
        code, _, err = run(".", "--model", "m", *arguments)
        assert (code, asked, err) == (2, [("m", device, None)], "error: enough\n")


def test_the_newest_checkpoint_is_taken(models):
    for name, seconds in (("random", 1e9), ("loop", 2e9), ("sft", 1.5e9)):
        os.utime(models / "out" / name / "model.safetensors", (seconds, seconds))
    assert run(models, "--prompt", "e", "--temperature", "0")[1] == b"ends.\n"
    os.utime(models / "out" / "sft" / "model.safetensors", (3e9, 3e9))
    assert run(models, "--prompt", "e", "--temperature", "0")[1] == b"Hi\n"


def test_reading_a_checkpoint_changes_nothing_in_its_folder(models):
    """Even while train.py is saving there."""
    folder, new = models / "out" / "loop", models / "out" / "loop" / "train_state.safetensors.new"
    new.write_bytes(b"half written")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert run(models, "--model", "out/loop", "--prompt", "e", "--temperature", "0")[:2] == (0, b"ends.\n")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    new.unlink()


def test_options():
    """Defaults, and the bounds of each number, which it may reach."""
    assert vars(chat.parse_arguments([])) == {"model": None, "prompt": None, "lens": None, "max_tokens": 200, "top_k": 50,
                                              "temperature": 0.8, "top_p": 1.0, "seed": None, "device": "auto",
                                              "plot": None, "speculation": None, "context": None}
    for name, low, high, words in (("max-tokens", 1, 10**9, "a whole number of at least 1 and at most 1,000,000,000"),
                                   ("temperature", 0.0, 100.0, "a number from 0 to 100"),
                                   ("top-k", 0, 10**9, "a whole number of at least 0 and at most 1,000,000,000"),
                                   ("top-p", 0.001, 1.0, "a number from 0.001 to 1"),
                                   ("seed", 0, 2**63, "a whole number of at least 0 and at most 9,223,372,036,854,775,808")):
        parse = chat.SETTINGS[name][0]
        step = 1 if type(low) is int else 1e-9
        for value in (low, low + step, high - step, high):
            assert parse(repr(value)) == value and type(parse(repr(value))) is type(low)
        for value in (low - step, high + step, "x", "nan"):
            with pytest.raises(argparse.ArgumentTypeError) as error:
                parse(str(value))
            assert str(error.value) == f"must be {words}, not '{value}'"


def test_help(models, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = run(models, "--help")
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", out.decode()).split())
    assert (code, err) == (0, "")
    for words in ("Type, and a trained model continues (or answers, if it was fine-tuned to).",
                  "--model DIR the checkpoint folder (default: the newest in out/)", "--prompt TEXT continue (or answer) this text, then stop",
                  "--lens TEXT print the Euler table of this text, then stop",
                  "--max-tokens N length of an answer, in tokens, at most (default 200)",
                  "--temperature N 0: the likeliest token; 1: as the model learned; more: wilder (default 0.8)",
                  "--top-k N draw among the k likeliest tokens; 0: among all (default 50)",
                  "--top-p N draw among the likeliest tokens of this probability together; 1: all (default 1.0)",
                  "--seed N the same seed gives the same text; none: another text every time (default None) --plot FILE",
                  "--plot FILE with --lens: draw it, last 64 ids",
                  "--speculation, --no-speculation let all heads draft, or none (default: as many as pay, 1 on a GPU, 0 on a CPU)",
                  "{auto,cpu,gpu} auto: GPU, if any"):
        assert words in text


def test_what_a_narrow_stream_cannot_show(models):
    """Standard output may know fewer characters than the model."""
    assert run(models, "--model", "out/loop", "--prompt", "é", "--temperature=0", "--max-tokens=3", encoding="ascii")[:2] == (
        0, rb"\xe9\u4e16" + b"\n")


def test_the_system_text_of_a_template_stays(capsys):
    """While whole turns between are forgotten: ChatML, whose template brings one, or a plain one, whose turns begin with the
    end of the one before."""
    special = [*SPECIAL_TOKENS, "<|im_start|>", "<|im_end|>"]
    for default in ("", '{%if loop.first and messages[0]["role"]!="system"%}{{"<|im_start|>system\\nBe kind.<|im_end|>\\n"}}{%endif%}'):
        tokenizer = Tokenizer(range(256), [], special)
        tokenizer.template = known_template(default.join(CHATML_PARTS))
        session = chat.Session(types.SimpleNamespace(config=types.SimpleNamespace(context=200 if default else 160)), tokenizer, None)
        for text in (b"first", b"second", b"third", b"fourth", b"fifth"):
            session.add_turn(text)
            session.turns[-1] += [*b"Yes", session.stop]
        said = tokenizer.decode(itertools.chain(*session.turns))
        begin = "<|im_start|>system\nBe kind.<|im_end|>\n" if default else ""
        assert said.startswith(f"{begin}<|im_start|>user\nfirst<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>user\n")
        assert "fifth" in said and "second" not in said
        session.add_turn(b"x" * 90)                         # too long to stay beside the first: it is the first then
        assert tokenizer.decode(session.turns[0]).startswith(begin + "<|im_start|>user\nxxx") and len(session.turns) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments, message", [
    (["--temperature", "-1"], "argument --temperature: must be a number from 0 to 100, not '-1'"),
    (["--temperature", "nan"], "argument --temperature: must be a number"),
    (["--top-p", "0"], "argument --top-p: must be a number from 0.001 to 1, not '0'"),
    (["--top-k", "1.5"], "argument --top-k: must be a whole number of at least 0"),
    (["--max-tokens", "0"], "argument --max-tokens: must be a whole number of at least 1"),
    (["--seed", "x"], "argument --seed: must be a whole number"),
    (["--context", "0"], "argument --context: must be a whole number of at least 1"),
    (["--model", "out/loop", "--context", "1048577"], "context must be a whole number from 1 to 1,048,576, not 1048577"),
    (["--device", "tpu"], "argument --device: invalid choice"),
    (["--unknown"], "unrecognized arguments: --unknown"),
    (["--prompt", "a", "--lens", "a"], "not allowed with argument"),
    (["--plot", "a.png"], "--plot goes with --lens TEXT"),
    (["--model", "nowhere"], "nowhere holds no checkpoint"),
    (["--model", "out/loop", "--lens", "a"], "--lens needs a text of at least 2 tokens"),
    (["--model", "out/loop", "--lens", ""], "--lens needs a text of at least 2 tokens"),
])
def test_bad_options(models, arguments, message):
    code, out, err = run(models, *arguments)
    assert (code, out, err.count("\n")) == (2, b"", 1), err
    assert err.startswith("error: ") and message in err


def test_as_a_script(models):
    """What the other tests do in their own process, once as a process."""
    done = subprocess.run([sys.executable, os.path.join(ROOT, "chat.py"), "--model", "out/loop", "--temperature", "0"],
                          cwd=models, capture_output=True, timeout=120, env=ENVIRONMENT, input=b"e\n\xc3")
    assert (done.returncode, done.stdout.split(b"\n")[0], done.stderr) == (0, b"ends.", b"")
    assert done.stdout.split(b"\n")[1].decode().startswith(LOOP * 3)


def test_no_checkpoint_at_all(tmp_path):
    assert run(tmp_path, "--prompt", "a") == (2, b"", ("error: there is no trained model in out/: run `make` or "
                                              "`python train.py`, or name the folder of one with --model DIR.\n"))


@pytest.mark.parametrize("name, damage, message", [
    ("model.safetensors", lambda data: data[:-1], "model.safetensors is damaged"),
    ("model.safetensors", lambda data: None, "model.safetensors"),
    ("config.json", lambda data: b"{", "config.json is damaged"),
    ("tokenizer.json", lambda data: b"[]", "tokenizer.json is not a tokenizer"),
    ("tokenizer.json", lambda data: data.replace(b"<|user|>", b"<|usor|>"), "tokenizer.json is not as it was saved with this model"),
    ("tokenizer_config.json", lambda data: b"[]", "error: m/tokenizer_config.json is damaged: it holds no settings.\n"),
])
def test_damaged_checkpoint(tmp_path, name, damage, message):
    save_chain_model(str(tmp_path / "m"), [])
    data = damage((tmp_path / "m" / name).read_bytes())
    (tmp_path / "m" / name).unlink()
    if data is not None:
        (tmp_path / "m" / name).write_bytes(data)
    code, out, err = run(tmp_path, "--model", "m", "--prompt", "a")
    assert (code, out, err.count("\n")) == (2, b"", 1), err
    assert err.startswith("error: ") and message in err


@pytest.mark.parametrize("script", ["chat.py", "train.py"])
def test_without_numpy_one_sentence(script, tmp_path):
    (tmp_path / "numpy.py").write_text("raise ImportError('not here')")
    done = subprocess.run([sys.executable, os.path.join(ROOT, script), "--help"], capture_output=True, text=True,
                          cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.startswith("NumPy is missing") and done.stderr.count("\n") == 1
    assert ". .venv/bin/activate" in done.stderr


def test_history_of_lines_stays_in_memory(models, tmp_path):
    terminal = Terminal(models, "--model", "out/loop", "--temperature", "0")
    before = sorted(os.listdir(models)), sorted(os.listdir(os.path.expanduser("~")))
    terminal.wait_for(b"> ")
    terminal.send("e\n")
    terminal.wait_for(b"ends.\r\n> ")
    assert terminal.leave()[0] == 0
    assert (sorted(os.listdir(models)), sorted(os.listdir(os.path.expanduser("~")))) == before


def test_tokenizer_config_written_by_save_has_no_template(models):
    config = json.loads((models / "out" / "loop" / "tokenizer_config.json").read_text())
    assert "chat_template" not in config        # what tells a pretrained model from a fine-tuned one
    assert not checkpoint.read_tokenizer(str(models / "out" / "loop")).template
    assert checkpoint.read_tokenizer(str(models / "out" / "sft")).template
