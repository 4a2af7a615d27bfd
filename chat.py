"""chat.py: talk to a trained model.

    python chat.py                                    the newest checkpoint in out/
    python chat.py --model out/small --prompt "The"   one continuation, then the end
    python chat.py --lens "To be, or not to be"       what the layers do with a text, seen as steps of an ODE solver
    python chat.py < prompts.txt                      one continuation for each line

Read before it: tokenizer.py, and in model_cpu.py the sections 5 (generate, euler_table) and 6 (checkpoints).

A pretrained model continues a text: what you type is the beginning, and an empty line lets it write on.  A fine-tuned
model answers: its tokenizer_config.json has a chat template, and each line becomes a turn

    <|user|> what you typed <|end|> <|assistant|> the answer <|end|>

put together from ids.  Text can never become one of these special tokens: a typed "<|end|>" is seven characters.

What it does not do: no batches, no files written (the history of lines lives as long as the session), no filter on what
a model says.
"""
import argparse
import codecs
import contextlib
import os
import sys

import model_cpu
import model_gpu
import numpy as np
from tokenizer import (END_OF_TEXT, SPECIAL_TOKENS, Parser, newest_checkpoint, number_type, read_json, run_script, to_bytes,
                       visible)

# name: type, smallest and largest value, default, meaning.  Each is an option, and on a terminal also a command.
SETTINGS = {
    "max-tokens": (int, 1, 10**9, 200, "length of an answer, in tokens, at most"),
    "temperature": (float, 0, 100, 0.8, "0: always the likeliest token; 1: as the model learned; more: wilder"),
    "top-k": (int, 0, 10**9, 50, "draw among the k likeliest tokens; 0: among all"),
    "top-p": (float, 0.001, 1, 1.0, "draw among the likeliest tokens that reach this probability together; 1: all"),
    "seed": (int, 0, 2**63, None, "the same seed gives the same text; without one, another text every time"),
}
# What a terminal would obey instead of showing: all control characters but tab and line end.
CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


# ---------------------------------------------------------------------------------------------------------------------
# 1. The checkpoint
# ---------------------------------------------------------------------------------------------------------------------
def load_model(folder, device="auto"):
    """-> (model, tokenizer) on the engine that serves: on the CPU in float32, on a GPU in its best precision."""
    engine = model_gpu.pick(device)
    return model_cpu.load(folder, engine, {"dtype": np.float32} if engine is model_cpu else None)


def is_chat_model(folder, tokenizer):
    """Whether the checkpoint was fine-tuned to answer: then its tokenizer_config.json has a chat template."""
    missing = set(SPECIAL_TOKENS) - set(tokenizer.special)
    if missing:
        raise ValueError(f"{folder}: tokenizer.json lacks the special token {min(missing)}.")
    path = os.path.join(folder, "tokenizer_config.json")
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is damaged: it holds no settings.")
    return bool(settings.get("chat_template"))


# ---------------------------------------------------------------------------------------------------------------------
# 2. A conversation
# ---------------------------------------------------------------------------------------------------------------------
class Printer:
    """Bytes to the screen as they come.  A token may end inside a UTF-8 character: its bytes wait for the rest."""
    def __init__(self):
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data):
        text = self.decoder.decode(data)
        print(text.translate(CONTROL) if sys.stdout.isatty() else text, end="", flush=True)


class Session:
    """turns: lists of ids, the oldest first.  A pretrained model has one turn, the text that it continues."""
    def __init__(self, model, tokenizer, chat_form, settings):
        self.model, self.tokenizer, self.chat_form, self.settings = model, tokenizer, chat_form, settings
        self.turns, self.answers, self.printer = [], 0, None
        self.stop = tokenizer.special["<|end|>" if chat_form else END_OF_TEXT]

    def cut(self, ids, room):
        """The last `room` ids, said aloud where that is not all of them."""
        if len(ids) > room:
            print(f"note: the prompt has {len(ids)} tokens; the model reads the last {room}.", file=sys.stderr)
        return ids[-room:]

    def add_text(self, text):
        """Plain form: a new text to continue."""
        ids = self.tokenizer.encode(text) or [self.tokenizer.special[END_OF_TEXT]]
        self.turns, self.printer = [self.cut(ids, self.model.config.context)], Printer()

    def add_turn(self, text):
        """Chat form: one more turn; the oldest are forgotten, to leave a quarter of the window free for the answer."""
        special, context = self.tokenizer.special, self.model.config.context
        room = context - context // 4
        if self.turns and not self.is_finished():           # the last answer was cut short
            self.turns[-1].append(self.stop)
        text = self.cut(self.tokenizer.encode(text), max(1, room - 3))
        self.turns.append([special["<|user|>"], *text, special["<|end|>"], special["<|assistant|>"]])
        while len(self.turns) > 1 and sum(map(len, self.turns)) > room:
            del self.turns[0]
        self.printer = Printer()

    def is_finished(self):
        return self.turns[-1][-1] == self.stop

    def answer(self, line):
        """Print the model's continuation of `line` (str), token by token.

        Ctrl-C may come at any point: what was printed is then in turns, and the next line goes on from there."""
        s, text = self.settings, to_bytes(line)
        if self.chat_form:
            if text:
                self.add_turn(text)
            elif not self.turns or self.is_finished():
                return                                      # an empty line, and no answer to go on with
        elif text or not self.turns:
            self.add_text(text)
            self.printer.write(text)                        # so that prompt and continuation read as one text
        # Each answer of a session draws from a seed of its own, or one question would get one answer twice.
        seed = None if s.seed is None else s.seed + self.answers
        self.answers += 1
        ids = [token for turn in self.turns for token in turn]
        stream = model_cpu.generate(self.model, ids, s.temperature, s.top_k, s.top_p, seed, self.tokenizer.vocab_size)
        for _, token in zip(range(s.max_tokens), stream):
            if token in self.tokenizer.special.values():    # a wrong one, from a poor model, ends the answer as well
                self.turns[-1].append(self.stop)
                break
            self.turns[-1].append(token)
            self.printer.write(self.tokenizer.decode_bytes([token]))
        print(flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# 3. The Euler table of a text
# ---------------------------------------------------------------------------------------------------------------------
def print_lens(model, tokenizer, text):
    """One line a layer: x + f(x) is a step of Euler's method; what would head 0 say if the integration stopped here?"""
    ids, context = tokenizer.encode(to_bytes(text)), model.config.context
    if len(ids) < 2:
        raise ValueError(f"--lens needs a text of at least 2 tokens, one to read and one to predict; {text!r} has "
                         f"{len(ids)}.")
    if len(ids) > context + 1:
        print(f"note: the text has {len(ids)} tokens; the table is of the last {context + 1}.", file=sys.stderr)
        ids = ids[-context - 1:]
    print(f"{len(ids) - 1} tokens read, the next of each predicted; loss in nats a token")
    print(f"{'stop after':12}{'loss':>8}{'|f(x)|/|x|':>13}   most likely after the end of the text")
    for i, (loss, step, best) in enumerate(model_cpu.euler_table(model, np.array([ids]))):
        best = "  ".join(f'"{visible(tokenizer.tokens[token])}"' for token in best if token < tokenizer.vocab_size)
        print(f"{f'layer {i - 1}' if i else 'embedding':12}{loss:8.4f}{f'{step:.3f}' if i else '':>13}   {best}")


# ---------------------------------------------------------------------------------------------------------------------
# 4. The session
# ---------------------------------------------------------------------------------------------------------------------
def setting_type(kind, low, high):
    """An argparse type: a number of this kind from low to high."""
    what = "a whole number" if kind is int else "a number"
    return number_type(kind, lambda x: low <= x <= high, f"{what} from {low} to {high}")


def run_command(line, session):
    """/NAME VALUE on a terminal: change a setting."""
    name, _, value = line[1:].strip().partition(" ")
    if name == "reset":
        session.turns = []
    elif name in SETTINGS and value:
        try:
            setattr(session.settings, name.replace("-", "_"), setting_type(*SETTINGS[name][:3])(value.strip()))
            session.answers = 0                             # after /seed 1 the next answer is that of --seed 1
        except argparse.ArgumentTypeError as error:
            print(f"/{name} {error}.")
    elif name == "help":
        print("/reset forgets what was said.  An empty line lets the model write on.  Settings, with their values now:")
        for name, (*_, meaning) in SETTINGS.items():
            print(f"  /{name} {getattr(session.settings, name.replace('-', '_'))}   {meaning}")
    else:
        print(f"There is no command {line.strip()}; /help lists them. A space in front makes it a prompt.")


def run_session(session):
    """Line by line until the input ends.  Prompts, commands and Ctrl-C that only stops an answer are for a terminal."""
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if on_terminal:
        with contextlib.suppress(ImportError):
            import readline     # noqa: F401  (imported, it gives input() line editing and a history, kept in memory)
        begin = "Ask" if session.chat_form else "Begin a text"
        print(f"{begin}; Ctrl-C stops the model, Ctrl-D leaves, /help shows more.")
    while True:
        try:
            line = input("> " if on_terminal else "")
            if on_terminal and line.startswith("/"):
                run_command(line, session)
            else:
                session.answer(line)
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            print()
        except EOFError:
            if on_terminal:
                print()
            return


def parse_arguments(argv):
    parser = Parser(description="Talk to a trained model: type, and it continues (or answers, if it was fine-tuned to).")
    parser.add_argument("--model", metavar="DIR", help="the checkpoint folder (default: the newest in out/)")
    once = parser.add_mutually_exclusive_group()
    once.add_argument("--prompt", metavar="TEXT", help="continue this text, then stop")
    once.add_argument("--lens", metavar="TEXT", help="print the Euler table of this text, a line a layer, then stop")
    for name, (kind, low, high, default, meaning) in SETTINGS.items():
        parser.add_argument(f"--{name}", type=setting_type(kind, low, high), default=default, metavar="N",
                            help=meaning + ("" if default is None else f" (default {default})"))
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help="what computes (default auto: "
                        "the GPU if there is one)")
    return parser.parse_args(argv)


def main(argv):
    args = parse_arguments(argv)
    # Bytes that are not UTF-8 reach the tokenizer as they are; "\r\n" ends a line, too.
    sys.stdin.reconfigure(errors="surrogateescape", newline=None)
    sys.stdout.reconfigure(errors="replace")
    folder = args.model or newest_checkpoint("name the folder of one with --model DIR")
    model, tokenizer = load_model(folder, args.device if args.lens is None else "cpu")    # the lens looks into every layer
    if args.lens is not None:
        return print_lens(model, tokenizer, args.lens)
    session = Session(model, tokenizer, is_chat_model(folder, tokenizer), args)
    if args.prompt is not None:
        return session.answer(args.prompt)
    if sys.stdin.isatty() and sys.stdout.isatty():
        print(f"{folder}: {model_cpu.param_count(model.config):,} parameters, trained for {model.step} steps.")
    run_session(session)


if __name__ == "__main__":
    run_script(main)
