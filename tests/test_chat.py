"""chat.py: what the model reads of a conversation; what is printed, on a terminal and elsewhere.

The models are of bytes and know by heart which one comes after which."""
import os
import pty
import select
import sys
from unittest.mock import Mock

import numpy as np
from cases import once_a_module, parametrize, write
from runs import become, run

import chat
import checkpoint
import model_cpu
from tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, Tokenizer, known_template

SPECIAL = {name: 256 + i for i, name in enumerate([*SPECIAL_TOKENS, "<|im_start|>", "<|im_end|>"])}
END_OF_TEXT, USER, ASSISTANT, END = range(256, 260)
CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
LOOP = "é世🙂ж"             # its 11 bytes are 11 different ones, so each has one successor


def save_model(folder, chains, template=""):
    """A folder.  The id of a byte is the byte.  chains: ids, each followed by the next, and the last one by any.  The
    embedding is one-hot, the layers add nothing, and the two heads are tables of what comes next, and then."""
    tokenizer = Tokenizer([*map(bytes, zip(range(256))), *map(str.encode, SPECIAL)], {}, SPECIAL)
    tokenizer.template = template
    model = model_cpu.Model(model_cpu.Config(264, 4, 2, 1, 140, 264, predict=2))
    model.flat_params[:] = 0
    model.params["norm"][:] = 1
    model.params["embed"][:] = np.eye(264)
    for chain in chains:
        for i, token in enumerate(chain):
            for k, successor in enumerate(chain[i + 1:i + 3]):
                model.params["heads"][264 * k + successor, token] = 10
    checkpoint.save(folder, model, tokenizer, {}, bool(template))


@once_a_module
def models(tmp_path_factory):
    """Folders: loop writes LOOP for ever after any of its bytes, "ends." after "e", and nothing after a digit; sft
    answers "Hi"."""
    folder = tmp_path_factory.mktemp("chat")
    ends = [*b"ends.", END_OF_TEXT, *b"!", END_OF_TEXT], [*b"c\x1b[J", END_OF_TEXT]
    save_model(folder / "out/loop", [LOOP.encode() * 2, *ends, *zip(b"012345", SPECIAL.values())])
    save_model(folder / "out/sft", [[ASSISTANT, *b"Hi", END]], CHAT_TEMPLATE)
    return folder


def load_session(models, options="", template=""):
    model, tokenizer = checkpoint.load(models / "out/loop", model_cpu)
    tokenizer.template = template
    return chat.Session(model, tokenizer, chat.parse_arguments(options.split()))


@parametrize("template, second", [
    (CHAT_TEMPLATE, "<|user|>Be brief.\n\none<|end|><|assistant|>ab<|end|><|user|>two<|end|><|assistant|>"),
    (known_template(CHATML), ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nab<|im_end|>"
                            "\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"))])
def test_the_newest_turns_are_read_with_the_system_text_before_them(models, monkeypatch, err_text, template, second):
    """As many as leave a quarter of the window free.  An answer of three tokens is cut short, which is closed.  Each token
    is shown before the next is computed."""
    read = []
    sys.stdout.reconfigure(write_through=False)

    def generate(model, ids, *_, **options):
        read.append(ids)
        for byte in answer.encode():
            yield byte
            assert sys.stdout.buffer.getvalue()[-1] == byte

    monkeypatch.setattr(model_cpu, "generate", generate)
    session = load_session(models, "--max-tokens 3", template)
    chat.run_command("/system Be brief.", session)
    turns = []
    for text, answer in [("one", "ab"), ("two", "abc"), ("<|end|>", "a"), ("4", "abc"), ("5" * 71, "a"), ("6", "ab"), ("7" * 200, "a"), ("8", "a")]:
        session.answer(text)
        turns.append((text, answer))
        for first in range(len(turns)):
            ids = []
            for question, said in turns[first:]:
                ids += [*session.tokenizer.prompt(question, 105, "Be brief.", first=not ids), *said.encode(), session.stop]
            del ids[-len(answer) - 1:]
            if len(ids) <= 105:
                break
        assert read[-1] == ids and ("note: the model reads 105 tokens at most here" in err_text()) == (len(ids) == 105)
    assert session.tokenizer.decode(read[1]) == second
    for command, system in ("/reset", "Be brief."), ("/system", None):
        chat.run_command(command, session)
        session.answer("x")
        assert read[-1] == session.tokenizer.prompt("x", None, system)


@parametrize("most", [60, 64])
def test_tokens_are_coloured_after_what_the_model_had_read(models, monkeypatch, most):
    """Also where the answer has filled the room of the older turn, and the whole window."""
    session = load_session(models, f"--max-tokens {most} --temperature 0", CHAT_TEMPLATE)
    session.answer("one")
    session.answer("two")
    read = []
    extend = session.model.decoder.extend
    monkeypatch.setattr(session.model.decoder, "extend", lambda ids: read.extend(ids) or extend(ids))
    chat.print_tokens(session)
    answer = [0] * most
    assert read == [USER, *b"one", END, ASSISTANT, *answer, END, USER, *b"two", END, ASSISTANT, *answer[1:]]


@parametrize("name, most, lines, shown", [
    ("loop", 209, f"{LOOP[0]}\n\n", f"{LOOP * 19}é\n{LOOP[1:]}{LOOP * 18}é\n"),         # an empty line writes on
    ("loop", 99, "\ne\n\n/e\r\n", "!\nends.\n!\n/ends.\n"),           # or begins a new text; a slash is text
    ("loop", 4, b"\xc3\n", "é世\n"), ("loop", 4, "é", "é世\ufffd\n"),     # half a character is completed, or shown
    ("loop", 99, "0\n1\n2\n3\n4\n5\n", "0\n1\n2\n3\n4\n5\n"),             # any special token ends it
    ("loop", 99, "\ufeffc", "c\x1b[J\n"), ("sft", 99, "A\n\nB\n", "Hi\nHi\n"), ("sft", 1, "A\n\nB\n", "H\ni\nH\n"),
    ("sft", 1, "A\n\n\n\n", "H\ni\n\n")])            # the third call ends the answer, so the fourth line does nothing
def test_lines_from_a_pipe(models, name, most, lines, shown):
    write(models / "lines", lines)
    done = run(f"chat.py --model out/{name} --temperature 0 --max-tokens {most}", models, trap=lambda: setattr(sys, "stdin", open(models / "lines", newline="\n")))
    assert (done.stdout, done.stderr) == (shown, "")


def talk(folder, command, steps):
    """chat.py on a terminal -> its exit code.  steps: (what it prints, the keys to press then)."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ |= {"TERM": "dumb", "INPUTRC": os.devnull}
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
        become(command)
    seen = ""
    for text, keys in steps:
        while text not in seen:
            assert select.select([terminal], [], [], 30)[0], (text, seen)
            seen += os.read(terminal, 65536).decode("utf-8", "ignore")
        seen = seen.partition(text)[2]
        os.write(terminal, keys.encode())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@parametrize("name, steps", [
    ("sft", [("\nAsk; ", ""), ("> ", "A\n"), ("\r\nHi\r\n> ", "\x04")]),
    ("loop", [("\nBegin a text; ", ""), ("> ", "é\n"), (LOOP * 20, "\x03"), ("\r\n> ", "e\n"), ("\r\nends.\r\n> ", "c\n"),
              ("\r\nc\ufffd[J\r\n> ", "/tokens\n"), ("\r\n\x1b[32m\\x1b\x1b[0m", ""), ("> ", "/temperature hot\n"), ("must be a number", ""),
              ("> ", "/help\n"), ("/system", ""), ("> ", "e\n"), ("\r\nends.\r\n> ", "/quit\n")])])
def test_a_session_on_a_terminal(models, name, steps):
    """Ctrl-C stops an answer, and the session goes on; control characters are not obeyed."""
    assert talk(models, f"chat.py --model out/{name} --temperature 0 --max-tokens 1000000", steps) == 0


@parametrize("word", ["exit", "/quit", "/exit", "quit "])
def test_who_says_quit_leaves(models, monkeypatch, word):
    lines = iter([word])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    chat.run_session(load_session(models), "out/loop")


def test_a_seed_gives_a_text(models, out_text):
    """One seed, one text; without a seed each answer is another one; /temperature 0 takes the likeliest."""
    def said(session, *commands):
        for command in commands:
            chat.run_command(command, session)
        session.answer("q")
        return out_text()
    options = "--temperature 1 --max-tokens 9"
    session = load_session(models, f"{options} --seed 5")
    first, again, second = said(session), said(session), said(session, "/seed 6")
    assert second != first == again == said(session, "/seed 5") == said(load_session(models, f"{options} --seed 5"))
    assert said(session, "/temperature 0") == "q" + 9 * "\0" + "\n"
    free = load_session(models, options)
    assert len({said(free), said(free), said(load_session(models, options))}) == 3


def test_speculation_drafts_and_gives_the_same_text(models, out_text):
    texts, calls = [], []
    for option in "--no-speculation", "--speculation":
        session = load_session(models, f"--temperature 25 --top-k 0 {option} --seed 5 --max-tokens 99")
        decoder = session.model.decoder
        decoder.draw = Mock(wraps=decoder.draw)
        session.answer("é")
        texts.append(out_text())
        calls.append(decoder.draw.call_count)
    assert texts[0] == texts[1] and calls[0] > calls[1]


def test_the_lens_is_the_euler_table(models):
    """Of a text that is longer than the window, of the end."""
    text = "q" * 99 + "ends." * 9
    shown = run(f"chat.py --model out/loop --lens {text}", models).stdout
    losses = [float(line[12:20]) for line in shown.splitlines()[2:]]
    table = model_cpu.euler_table(load_session(models).model, np.array([list(text.encode()[-141:])]))
    assert np.allclose(losses, [loss for loss, *_ in table], atol=1e-3)


def test_the_newest_model_and_an_unknown_template(models):
    os.utime(models / "out/sft/model.safetensors", (2e9, 2e9))
    write(models / "out/sft/chat_template.jinja", "{{ messages[0].content }}")
    done = run("chat.py --prompt Q --max-tokens 1 --temperature 0", models)
    assert (done.stdout, done.stderr) == ("Q\0\n", "note: out/sft has an unknown chat template, which is not used.\n")
