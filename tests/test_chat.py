"""chat.py: what it prints by pipe and on a terminal, what it keeps between lines, what it says of bad input."""
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import chat
import model_cpu
from tokenizer import Tokenizer

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
    model_cpu.save(folder, model, tokenizer, {})


def save_chain_model(folder, chains, chat_template=None):
    """A model of bytes that knows one thing: which token comes after a token.  chains: lists of ids, each followed by
    the next.  The embedding is one-hot, the layers add nothing, and head 0 is the table of successors."""
    tokenizer = Tokenizer.train([""], 260)
    model = model_cpu.Model(model_cpu.Config(dim=264, heads=4, kv_heads=2, layers=1, context=32, vocab=264, predict=1),
                            dtype=np.float32)
    for name, view in model.params.items():
        view[...] = 1.0 if view.ndim == 1 else 0.0
    model.params["embed"][...] = np.eye(264)
    for chain in chains:
        for token, successor in zip(chain, chain[1:]):
            model.params["heads"][successor, token] = 10.0
    model_cpu.save(folder, model, tokenizer, {}, chat_template)


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
    save_chain_model(str(folder / "out" / "sft"), [[ASSISTANT, *b"Hi", END]], "a template")
    return folder


def run(models, *arguments, **options):
    """chat.py in the folder of the models -> (exit code, standard output as bytes, standard error as str)."""
    done = subprocess.run([sys.executable, os.path.join(ROOT, "chat.py"), *arguments], cwd=models, capture_output=True,
                          timeout=60, env=ENVIRONMENT, **{"input": b"", **options})
    return done.returncode, done.stdout, done.stderr.decode()


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
    tokenizer = Tokenizer.load(models / "out" / "loop" / "tokenizer.json")
    printer = chat.Printer()
    for token in tokenizer.encode(LOOP)[:count]:
        printer.write(tokenizer.decode_bytes([token]))
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
    model, tokenizer = model_cpu.load(str(models / "out" / "random"), model_cpu, {"dtype": np.float32})
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
    assert err == "note: the prompt has 102 tokens; the model reads the last 32.\n"
    text = "The king and the queen " * 20       # and a model that looks further back reads just the kept end
    model, tokenizer = model_cpu.load(str(models / "out" / "random"), model_cpu, {"dtype": np.float32})
    stream = model_cpu.generate(model, tokenizer.encode(text)[-32:], temperature=0, vocab=tokenizer.vocab_size)
    out = run(models, "--model", "out/random", "--prompt", text, "--temperature", "0", "--max-tokens", "10")[1]
    assert out.decode() == text + tokenizer.decode([next(stream) for _ in range(10)]) + "\n"


def test_a_prompt_that_is_not_utf8_is_completed(models):
    """The first byte of "é" as the prompt: the model writes the second, and together they are printed."""
    code, out, _ = run(models, "--model", "out/loop", "--prompt", b"\xc3", "--temperature", "0", "--max-tokens", "4")
    assert (code, out.decode()) == (0, "é世\n")


def test_an_empty_prompt_begins_a_text(models):
    assert run(models, "--model", "out/loop", "--prompt", "", "--temperature", "0")[1] == b"ends.\n"


def test_a_reader_that_goes_away_is_no_error(models):
    process = start(models, "--model", "out/loop", "--prompt", "é", "--max-tokens", "1000000")
    assert len(process.stdout.read(50)) == 50
    process.stdout.close()
    assert (process.wait(timeout=30), process.stderr.read()) == (0, b"")
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


def test_a_text_that_has_ended_is_written_on_as_a_new_one(models):
    assert run(models, "--model", "out/loop", "--temperature", "0", input=b"e\n\n")[1] == b"ends.\nends.\n"


def test_each_answer_of_a_session_draws_anew(models):
    arguments = ("--model", "out/random", "--seed", "5", "--max-tokens", "30")
    one, two = run(models, *arguments, input="The\n".encode() * 2)[1].split(b"\nThe")
    assert one != b"The" + two.removesuffix(b"\n")
    assert run(models, *arguments, "--prompt", "The")[1].startswith(one)


def test_ctrl_c_ends_what_reads_from_a_pipe(models):
    process = start(models, "--model", "out/loop", "--max-tokens", "1000000")
    process.stdin.write("é\n".encode() * 2)
    process.stdin.flush()
    os.read(process.stdout.fileno(), 100)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"")


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

    def wait_for(self, text, seconds=30):
        """Read until `text` (bytes) comes; returns what came up to its end, and forgets it."""
        limit = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < limit, f"{text!r} did not come; {self.seen[-500:]!r} did."
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
                assert select.select([self.fd], [], [], 30)[0], f"Ctrl-D did not end it: {rest!r}"
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
    terminal.wait_for(f"out/loop: {count:,} parameters, trained for 0 steps.".encode())
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
    time.sleep(0.3)                             # Python overlooks a signal that comes just before it waits for a key
    terminal.send("\x03")
    terminal.wait_for(b"\r\n> ")
    terminal.send("e\n")
    terminal.wait_for(b"\r\nends.\r\n> ")
    code, rest = terminal.leave()
    assert code == 0 and b"Traceback" not in rest


def test_commands(models):
    terminal = Terminal(models, "--model", "out/loop", "--temperature", "0")
    terminal.wait_for(b"> ")
    for line, answer in (("/max-tokens 3", b"> "), ("e", b"\r\nends\r\n> "),
                         ("/temperature hot", b"from 0 to 100, not 'hot'.\r\n> "),
                         ("/nothing", b"There is no command /nothing;"), ("/help", b"/max-tokens 3 "),
                         ("/reset", b"\r\n> "), (" /e", b"\r\n /ends\r\n> ")):
        terminal.send(line + "\n")
        terminal.wait_for(line.encode())        # the terminal's echo
        terminal.wait_for(answer)
    assert terminal.leave()[0] == 0


def test_a_terminal_shows_control_characters_instead_of_obeying(tmp_path):
    save_chain_model(str(tmp_path / "m"), [[*b"a\x1b[2J\x07\x9b", SPECIAL["<|endoftext|>"]]])
    terminal = Terminal(tmp_path, "--model", "m", "--temperature", "0")
    terminal.wait_for(b"> ")
    terminal.send("a\n")
    terminal.wait_for("a\ufffd[2J\ufffd".encode())
    terminal.wait_for(b"> ")
    assert terminal.leave()[0] == 0


# ----------------------------------------------------------------------------------------------------------------------
# Chat form

def session(models, **settings):
    model, tokenizer = chat.load_model(str(models / "out" / "sft"))
    return chat.Session(model, tokenizer, True, chat.parse_arguments([f"--{k}={v}" for k, v in settings.items()]))


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


def test_chat_form_forgets_whole_turns(models, capsys):
    s = session(models, temperature=0)
    for i in range(12):
        s.answer(f"q{i}")
        assert sum(map(len, s.turns)) <= 32     # the context
    assert [bytes(turn[1:turn.index(END)]) for turn in s.turns] == [b"q9", b"q10", b"q11"]
    assert all(turn[0] == USER for turn in s.turns)
    s.answer("x" * 50)
    assert s.turns == [[USER, *b"x" * 21, END, ASSISTANT, *b"Hi", END]]
    assert "the model reads the last 21" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------------
# The Euler table; which checkpoint; bad input

def test_lens(models):
    text = "The king and the queen"
    code, out, err = run(models, "--model", "out/random", "--lens", text)
    model, tokenizer = model_cpu.load(str(models / "out" / "random"), model_cpu, {"dtype": np.float32})
    rows = model_cpu.euler_table(model, np.array([tokenizer.encode(text)]))
    printed = re.findall(r"^(embedding|layer \d+) +(\d+\.\d{4}) *(\d+\.\d{3})? +(\".+)$", out.decode(), re.MULTILINE)
    assert (code, err) == (0, "")
    assert [name for name, *_ in printed] == ["embedding", "layer 0", "layer 1"]
    for (_, loss, step, best), (true_loss, true_step, ids) in zip(printed, rows):
        assert float(loss) == pytest.approx(true_loss, abs=2e-4)
        assert float(step or 0) == pytest.approx(true_step, abs=2e-3)
        assert best.count('"') >= 2 * len(ids)
    assert "the table is of the last 33." in run(models, "--model", "out/random", "--lens", text * 20)[2]


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


@pytest.mark.parametrize("arguments, message", [
    (["--temperature", "-1"], "argument --temperature: must be a number from 0 to 100, not '-1'"),
    (["--temperature", "nan"], "argument --temperature: must be a number"),
    (["--top-p", "0"], "argument --top-p: must be a number from 0.001 to 1, not '0'"),
    (["--top-k", "1.5"], "argument --top-k: must be a whole number from 0"),
    (["--max-tokens", "0"], "argument --max-tokens: must be a whole number from 1"),
    (["--seed", "x"], "argument --seed: must be a whole number"),
    (["--device", "tpu"], "argument --device: invalid choice"),
    (["--unknown"], "unrecognized arguments: --unknown"),
    (["--prompt", "a", "--lens", "a"], "not allowed with argument"),
    (["--model", "nowhere"], "nowhere holds no checkpoint"),
    (["--model", "out/loop", "--lens", "a"], "--lens needs a text of at least 2 tokens"),
])
def test_bad_options(models, arguments, message):
    code, out, err = run(models, *arguments)
    assert (code, out, err.count("\n")) == (2, b"", 1), err
    assert err.startswith("error: ") and message in err


def test_no_checkpoint_at_all(tmp_path):
    code, out, err = run(tmp_path, "--prompt", "a")
    assert (code, out, err.count("\n")) == (2, b"", 1) and "there is no trained model in out/" in err


@pytest.mark.parametrize("name, damage, message", [
    ("model.safetensors", lambda data: data[:-1], "model.safetensors is damaged"),
    ("model.safetensors", lambda data: None, "model.safetensors"),
    ("config.json", lambda data: b"{", "config.json is damaged"),
    ("tokenizer.json", lambda data: b"[]", "tokenizer.json is not a tokenizer"),
    ("tokenizer.json", lambda data: data.replace(b"<|user|>", b"<|usor|>"), "is not the one that this model was trained with"),
    ("tokenizer_config.json", lambda data: b"[]", "tokenizer_config.json is damaged"),
    ("tokenizer_config.json", lambda data: None, "tokenizer_config.json: No such file"),
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
    assert not chat.is_chat_model(str(models / "out" / "loop"), Tokenizer.train([""], 260))
    assert chat.is_chat_model(str(models / "out" / "sft"), Tokenizer.train([""], 260))
