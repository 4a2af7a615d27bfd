"""chat.py: talk to a trained model.

    python chat.py                                    the newest checkpoint in out/
    python chat.py --model out/small --prompt "The"   one continuation, then the end
    python chat.py --model DIR --context 1024         a plain Llama of other people; it reads at most 1024 tokens
    python chat.py --lens "To be, or not to be"       the layers, seen as steps of an ODE solver
    python chat.py < prompts.txt                      each line is a text, or the next question of one conversation

Read before it: tokenizer.py; generate and euler_table in model_cpu.py; checkpoint.py.

A pretrained model continues a text.  What you type is its beginning, and an empty line lets the model write on.  Any
other line begins a new text (on a terminal a line such as /help is a command).  A fine-tuned model answers.  It has a
chat template (checkpoint.read_tokenizer), and each line becomes a turn

    <|user|>what you typed<|end|><|assistant|>the answer<|end|>

or the same in ChatML, the form of many other models (Tokenizer.prompt).  A turn is put together from ids, so
that text can never become a special token: a typed "<|end|>" is seven characters.  A system text stands where
the template puts it; in our template it stands before the first user text, and an empty line follows it.

It holds one conversation at a time.  What this file does not do: it writes no files (the history of lines is
gone when the session ends), and it does not filter what a model says.
"""
import argparse
import codecs
import contextlib
import sys

import model_cpu
import checkpoint
import model_gpu
import numpy as np
from script import Parser, bounded, newest_checkpoint, printable, require, run_script, visible, whole_number
from tokenizer import TEXT_ENDS, to_bytes


# ------------------------------------------------------------------------------------------------------------
# 1. A conversation
# ------------------------------------------------------------------------------------------------------------
class Session:
    """A conversation with a model.  turns: a list of (text, answer), the oldest first: the bytes that were typed, and
    the ids that the model has added.  An answer that the model has ended ends with the id `stop`.  A pretrained model
    has one turn, the text that it continues."""
    def __init__(self, model, tokenizer, settings):
        context = model.config.context
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings
        self.chat_form = bool(tokenizer.template)
        # what ends an answer; for a pretrained model what ends a text
        self.stop = tokenizer.end_of_turn if self.chat_form else tokenizer.special_id(*TEXT_ENDS)
        # how many tokens of the window the turns may fill: in chat form a quarter is left to the answer
        self.room = context - context // 4 if self.chat_form else context
        self.system = None          # or bytes
        self.turns = []

    def ids(self):
        """The ids that the model reads.  In chat form these are the last turns, as many as there is room for.  The
        system text is put before the first of them, so it stays when old turns are dropped.  (A system text that is too
        long for this room loses its beginning.  An answer that outgrows the window pushes out what stands before it.)
        """
        if not self.chat_form:
            text, answer = self.turns[0]                    # an empty text: the model begins after an end-of-text token
            return (self.tokenizer.encode(text) or [self.stop]) + answer
        while True:
            ids = []
            for text, answer in self.turns:
                if ids and ids[-1] != self.stop:
                    ids.append(self.stop)                   # the answer before was interrupted
                ids += self.tokenizer.prompt(text, self.room, self.system, first=not ids) + answer
            if len(ids) <= self.room or len(self.turns) == 1:
                return ids
            del self.turns[0]

    def speak(self):
        """Add the model's next tokens to the last answer, and yield each (bytes) at once.

        Ctrl-C may come at any point.  The tokens that were yielded are then in turns, and the next call goes on from
        there."""
        text, answer = self.turns[-1]
        ids = self.ids()
        self.asked = ids[:len(ids) - len(answer)]       # what the model reads before the answer; print_tokens needs it
        if not answer:
            if len(ids) >= self.room:
                print(f"note: the model reads {self.room} tokens at most here; of a longer text it reads the end.",
                      file=sys.stderr)
            if not self.chat_form:
                yield text              # so that prompt and continuation read as one text
        settings = self.settings
        before = len(answer)
        # Any special token ends the answer: a poor model may draw a wrong one.
        stream = model_cpu.generate(
            self.model, ids, settings.temperature, settings.top_k, settings.top_p, settings.seed,
            self.tokenizer.vocab_size, stop=self.tokenizer.special.values(), most=settings.max_tokens,
            speculate=settings.speculation)
        for token in stream:
            answer.append(token)
            yield self.tokenizer.tokens[token]
        # It stopped before max_tokens: the model has drawn a special token, which generate does not yield
        if len(answer) - before < settings.max_tokens:
            answer.append(self.stop)

    def answer(self, line):
        """Print the model's answer to a line, token by token."""
        text = to_bytes(line)
        # does the answer of the last turn lack its end?
        unfinished = self.turns and self.turns[-1][1][-1:] != [self.stop]
        if self.chat_form and not text and not unfinished:
            return                      # an empty line, and no answer to continue
        if not self.chat_form and text:
            self.turns = []
        if text or not self.turns:
            self.turns.append((text, []))
        # a token may end inside a character of UTF-8: its bytes wait until the character is complete
        for shown in codecs.iterdecode(self.speak(), "utf-8", "replace"):
            print(printable(shown) if sys.stdout.isatty() else shown, end="", flush=True)
        print()


# ------------------------------------------------------------------------------------------------------------
# 2. A look inside: how likely each token was; the Euler table of a text
# ------------------------------------------------------------------------------------------------------------
# (least probability, colour of a token on a terminal): green, cyan, yellow, red; HELP says it, too
COLOURS = (0.5, 32), (0.1, 36), (0.01, 33), (0.0, 31)


def print_tokens(session):
    """Print the last answer, each token in the colour of the probability that the model gave it, at temperature 1 and
    among all tokens.  The text is read once more for that.  Of a text longer than the window only the last window is
    read and printed.  (Its first tokens were drawn with more text before them, so their colours are only about right.)
    """
    if not session.turns or not session.turns[-1][1]:
        return                      # there is no answer yet
    _, answer = session.turns[-1]
    ids = session.asked + answer
    # T ids that are read, and the last one
    ids = ids[model_cpu.window_start(len(ids) - 1, session.model.config.context):]
    session.model.decoder.forget()
    logits = session.model.decoder.extend(ids[:-1])[:, 0, :session.tokenizer.vocab_size]        # (T,V) of head 0
    p = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))                     # softmax
    for token, chances in list(zip(ids[1:], p))[-len(answer):]:         # the answer's tokens alone
        text = visible(session.tokenizer.tokens[token])
        colour = next(colour for least, colour in COLOURS if chances[token] >= least)
        print(f"\x1b[{colour}m{text}\x1b[0m", end="")
    print()


def print_lens(model, tokenizer, text):
    """Print one line for the embedding and for each layer.  A layer computes x + f(x), which is a step of Euler's
    method.  What would head 0 predict if the layers after this one were left out?"""
    ids = tokenizer.encode(to_bytes(text))
    require(len(ids) > 1, f"--lens needs a text of at least 2 tokens; {text!r} has {len(ids)}.")
    # a text that is longer than the window loses its beginning; the last token is only predicted
    model_cpu.print_euler_table(model, tokenizer, np.array([ids[-model.config.context - 1:]]))


# ------------------------------------------------------------------------------------------------------------
# 3. A session on a terminal
# ------------------------------------------------------------------------------------------------------------
# These options are commands, too, during a session: /seed 1
NUMBERS = {"seed": whole_number(0, 2**63), "temperature": bounded(float, 0, 100)}
HELP = ("An empty line lets the model write on (a fine-tuned one only if its answer was cut).\n"
        "Put a space before a text that begins with a slash.\n"
        "/reset          forget the conversation\n"
        "/system TEXT    forget the conversation; a fine-tuned model reads this text before the next question\n"
        "/seed N         the same seed gives the same text (rounding can change it)\n"
        "/temperature X  0: the likeliest token; 1: as the model learned; more: wilder\n"
        "/tokens         how likely each token of the last answer was: green from 50%, cyan 10%, yellow 1%, red\n"
        "/quit           leave, as do quit and exit")


def run_command(line, session):
    """Carry out the command /NAME VALUE."""
    name, _, value = line[1:].strip().partition(" ")
    if name in ("reset", "system"):
        session.turns = []
    if name == "system":
        session.system = to_bytes(value) or None
    elif name == "tokens":
        print_tokens(session)
    elif name in NUMBERS:
        try:
            setattr(session.settings, name, NUMBERS[name](value))
        except argparse.ArgumentTypeError as error:
            print(f"/{name} {error}.")
    elif name != "reset":
        print(HELP)


def run_session(session, folder):
    """A session on a terminal, with commands; Ctrl-C stops an answer."""
    with contextlib.suppress(ImportError):
        # its import alone gives input() line editing, and a history in memory
        import readline     # noqa: F401
    print(f"{printable(folder)}: {session.model.flat_params.size:,} parameters, step {session.model.step}.")
    print(f"{'Ask' if session.chat_form else 'Begin a text'}; Ctrl-C stops the model, "
          "/quit or Ctrl-D leaves, /help shows more.")
    while True:
        try:
            line = input("> ")
            if line.strip("/ ") in ("quit", "exit"):
                return
            if line.startswith("/"):
                run_command(line, session)
            else:
                session.answer(line)
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


# ------------------------------------------------------------------------------------------------------------
# 4. The script
# ------------------------------------------------------------------------------------------------------------
def parse_arguments(argv):
    parser = Parser(description="Type, and a trained model continues (or answers, if it was fine-tuned to).")
    add = parser.add_argument
    add("--model", metavar="DIR", help="the checkpoint folder (default: the newest in out/)")
    once = parser.add_mutually_exclusive_group()
    once.add_argument("--prompt", metavar="TEXT", help="continue (or answer) this text, then stop")
    once.add_argument("--lens", metavar="TEXT", help="print the Euler table of this text, then stop")
    add("--max-tokens", type=whole_number(1), default=200,
        help="length of an answer, at most (default 200)")
    add("--temperature", type=NUMBERS["temperature"], default=0.8,
        help="0: the likeliest token; 1: as the model learned; more: wilder (default 0.8)")
    add("--top-k", type=whole_number(0), default=50,
        help="draw among the k likeliest tokens; 0: among all (default 50)")
    add("--top-p", type=bounded(float, 0.001, 1), default=1.0,
        help="draw among the likeliest tokens whose probabilities add up to this (default 1: all)")
    add("--seed", type=NUMBERS["seed"], help="the same seed gives the same text; default: another text every time")
    add("--speculation", action=argparse.BooleanOptionalAction,
        help="guess ahead with all further heads, or with none: the text is the same (on a CPU up to rounding), the "
        "speed differs (default: with one on a GPU)")
    add("--context", type=whole_number(1),
        help="how many tokens the model reads at most (default: its whole window)")
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: GPU, if any")
    return parser.parse_args(argv)


def main(argv):
    args = parse_arguments(argv)
    # a byte order mark is left out; bytes that are not UTF-8 reach the tokenizer as they are; "\r\n" ends a line, too
    sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape", newline=None)
    folder = args.model or newest_checkpoint()
    # the lens reads the output of every layer where model_cpu.py keeps it (layer_logits)
    engine = model_gpu.pick(args.device if args.lens is None else "cpu")
    options = {"training": False}
    if engine is model_cpu:
        options["dtype"] = np.float32
    model, tokenizer = checkpoint.load(folder, engine, options, args.context)
    if args.lens is not None:
        print_lens(model, tokenizer, args.lens)
        return
    session = Session(model, tokenizer, args)
    if args.prompt is not None:
        session.answer(args.prompt)
    elif sys.stdin.isatty() and sys.stdout.isatty():
        run_session(session, folder)
    else:
        for line in sys.stdin:
            session.answer(line.removesuffix("\n"))


if __name__ == "__main__":
    run_script(main)
