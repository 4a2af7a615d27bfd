"""chat.py: talk to a trained model.

    python chat.py                                    the newest checkpoint in out/
    python chat.py --model out/small --prompt "The"   one continuation, then the end
    python chat.py --model DIR --context 1024         anybody's Llama, of whose window this much is used
    python chat.py --lens "To be, or not to be"       the layers, seen as steps of an ODE solver
    python chat.py --lens TEXT --plot lens.png        what each layer would say next, at each position
    python chat.py < prompts.txt                      one continuation for each line

Read before it: tokenizer.py, in model_cpu.py section 6 (generate, euler_table), and checkpoint.py.

A pretrained model continues a text: what you type is the beginning, and an empty line lets it write on.  A
fine-tuned model answers: it has a chat template (checkpoint.read_tokenizer), and each line becomes a turn

    <|user|> what you typed <|end|> <|assistant|> the answer <|end|>

or what that is in ChatML (Tokenizer.prompt), put together from ids.  Text can never become one of these
special tokens: a typed "<|end|>" is seven characters.  A system text stands where the template puts it, in
ours before the first user text, with an empty line between.

What it does not do: no batches, no files written (the history of lines lives as long as the session), no
filter on what a model says.
"""
import argparse
import codecs
import contextlib
import os
import sys
import time
import warnings

import model_cpu
import checkpoint
import model_gpu
import numpy as np
from script import (Parser, load_pyplot, newest_checkpoint, number_type, printable, require, run_script,
                    whole_number)
from tokenizer import CHAT_TEMPLATE, TEXT_ENDS, to_bytes, visible

# name: type, smallest and largest value, default, meaning.  Each is an option, on a terminal also a command.
SETTINGS = {
    "max-tokens": (int, 1, 10**9, 200, "length of an answer, in tokens, at most"),
    "temperature": (float, 0, 100, 0.8, "0: the likeliest token; 1: as the model learned; more: wilder"),
    "top-k": (int, 0, 10**9, 50, "draw among the k likeliest tokens; 0: among all"),
    "top-p": (float, 0.001, 1, 1.0, "draw among the likeliest tokens of this probability together; 1: all"),
    "seed": (int, 0, 2**63, None, "the same seed gives the same text; without one, another text every time"),
}
# from which probability on a token has which colour on a terminal: green, cyan, yellow, red
COLOURS = (0.5, 32), (0.1, 36), (0.01, 33), (0.0, 31)
PLOTTED = 64        # positions in a picture, at most


# ------------------------------------------------------------------------------------------------------------
# 1. The checkpoint
# ------------------------------------------------------------------------------------------------------------
def load_model(folder, device="auto", context=None):
    """-> (model, tokenizer) on the engine that serves: on the CPU in float32, on a GPU in its best
    precision."""
    engine = model_gpu.pick(device)
    options = {"dtype": np.float32} if engine is model_cpu else {}
    return checkpoint.load(folder, engine, {"training": False, **options}, context)


# ------------------------------------------------------------------------------------------------------------
# 2. A conversation
# ------------------------------------------------------------------------------------------------------------
def note_cut(what, length, room):
    """Say it where a text of so many ids is too long."""
    if length > room:
        print(f"note: the {what} has {length} tokens; the last {room} are used.", file=sys.stderr)


class Session:
    """turns: lists of ids, the oldest first.  A pretrained model has one turn, the text that it continues."""
    def __init__(self, model, tokenizer, settings):
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.chat_form = bool(tokenizer.template)
        self.turns, self.answers, self.system = [], 0, b""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.said, self.trace, self.seconds = [], [], 0.0       # the last answer: ids, generate's trace, time
        self.stop = tokenizer.end_of_turn if self.chat_form else tokenizer.special_id(*TEXT_ENDS)

    def add_text(self, text):
        """Plain form: a new text to continue."""
        ids, room = self.tokenizer.encode(text), self.model.config.context
        note_cut("prompt", len(ids), room)
        self.turns = [ids[-room:] or [self.stop]]
        self.decoder.reset()

    def add_turn(self, text):
        """Chat form: one more turn; the oldest are forgotten, to leave a quarter of the window free for the
        answer.  The system text stays: it is in the first turn that there is."""
        room = max(4, self.model.config.context - self.model.config.context // 4)
        # the first turn may hold a system text: ChatML has one by default
        has_system = self.system or self.tokenizer.template != CHAT_TEMPLATE
        if self.turns and self.turns[-1][-1] != self.stop:  # the last answer was cut short
            self.turns[-1].append(self.stop)
        self.turns.append(self.tokenizer.prompt(text, room, first=False))
        while len(self.turns) > 1 and sum(map(len, self.turns)) > room:
            del self.turns[1 if has_system and len(self.turns) > 2 else 0]
        if len(self.turns) == 1:                            # beside others a turn is whole
            self.turns = [self.tokenizer.prompt(text, room, self.system)]
            frame = len(self.tokenizer.prompt(b"", system=self.system))
            note_cut("prompt", len(self.tokenizer.encode(text)), room - frame)
        self.decoder.reset()

    def show(self, data):
        """Bytes to the screen as they come.  A token may end inside a UTF-8 character: its bytes wait for the
        rest."""
        text = self.decoder.decode(data)
        print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)

    def answer(self, line):
        """Print the model's continuation of `line` (str), token by token.

        Ctrl-C may come at any point: what was printed is then in turns, and the next line goes on from
        there."""
        settings, text = self.settings, to_bytes(line)
        if self.chat_form:
            if text:
                self.add_turn(text)
            elif not self.turns or self.turns[-1][-1] == self.stop:
                return                                      # an empty line, and no answer to go on with
        elif text or not self.turns:
            self.add_text(text)
            self.show(text)                                 # so that prompt and continuation read as one text
        # Each answer of a session draws from a seed of its own, or one question would get one answer twice.
        seed = None if settings.seed is None else settings.seed + self.answers
        self.answers += 1
        ids, begin = [token for turn in self.turns for token in turn], time.perf_counter()
        self.said, self.trace = [], []
        # a wrong special token, from a poor model, ends the answer as well
        more = model_cpu.generate(self.model, ids, settings.temperature, settings.top_k, settings.top_p, seed,
                                  self.tokenizer.vocab_size, stop=set(self.tokenizer.special.values()),
                                  most=settings.max_tokens, speculate=settings.speculation, trace=self.trace)
        for token in more:
            self.turns[-1].append(token)
            self.said.append(token)
            self.seconds = time.perf_counter() - begin
            self.show(self.tokenizer.decode_bytes([token]))
        if len(self.said) < settings.max_tokens:
            self.turns[-1].append(self.stop)
        print(flush=True)

    def print_stats(self):
        """How fast the last answer came, and how often each head was right."""
        heads, count = [head for head, _, _ in self.trace], len(self.said)
        print(f"{count} tokens in {self.seconds:.2f} s, {count / self.seconds:.1f} tokens/s, "
              f"{len(heads) / heads.count(0):.2f} tokens a verification")
        for k in range(1, self.model.config.predict):
            read = sum(head == 0 and drafts >= k for head, drafts, _ in self.trace)
            print(f"  head {k}: " + (f"{heads.count(k)} of {read} drafts right, {heads.count(k) / read:.0%}"
                                     if read else "no drafts (--speculation)"))

    def print_tokens(self):
        """The last answer token by token, in the colour of the probability that the model gave it; where the
        environment has NO_COLOR, with that in brackets."""
        plain = os.environ.get("NO_COLOR")

        def paint(text, p):
            colour = next(colour for least, colour in COLOURS if p >= least)
            return f"{text}[{p:.0%}]" if plain else f"\x1b[{colour}m{text}\x1b[0m"

        for token, (_, _, p) in zip(self.said, self.trace):
            token = self.tokenizer.tokens[token]
            print(paint(visible(token), p), end="\n" if token.endswith(b"\n") else "")
        print("" if plain else "\n" + "  ".join(paint(f"from {least:.0%}", least) for least, _ in COLOURS))


# ------------------------------------------------------------------------------------------------------------
# 3. The Euler table of a text
# ------------------------------------------------------------------------------------------------------------
def print_lens(model, tokenizer, text, path=None):
    """One line a layer: x + f(x) is a step of Euler's method; what would head 0 say if the integration
    stopped here?  path: draw it as well, for each position."""
    ids, context = tokenizer.encode(to_bytes(text)), model.config.context
    require(len(ids) > 1, f"--lens needs a text of at least 2 tokens; {text!r} has {len(ids)}.")
    note_cut("text", len(ids), context + 1)     # the last one is predicted only
    model_cpu.print_euler_table(model, tokenizer, np.array([ids[-context - 1:]]))
    if path:
        plot_lens(model, tokenizer, ids[-context - 1:-1], path)


def plot_lens(model, tokenizer, ids, path):
    """Draw to `path` what head 0 would say after each layer (a row) and position (a column): the likeliest
    next token, on the colour of its probability."""
    pyplot, layers = load_pyplot(), model_cpu.layer_logits(model, np.array([ids]))
    logits = np.array([z[-PLOTTED:, :tokenizer.vocab_size] for _, z in layers])         # (L+1,T,V)
    best, p = logits.argmax(axis=2), 1 / np.exp(logits - logits.max(axis=2, keepdims=True)).sum(axis=2)
    ids, shown = ids[-PLOTTED:], [visible(token).replace(" ", "\u2423") for token in tokenizer.tokens]
    figure, axes = pyplot.subplots(figsize=(3 + 0.7 * len(ids), 1.5 + 0.4 * len(p)))
    figure.colorbar(axes.imshow(p, vmin=0, vmax=1, origin="lower", aspect="auto"), label="probability")
    for (row, column), token in np.ndenumerate(best):
        axes.text(column, row, shown[token], ha="center", va="center", fontsize=8,
                  color="black" if p[row, column] > 0.6 else "white", parse_math=False)
    axes.set_xticks(range(len(ids)), [shown[token] for token in ids], parse_math=False)
    axes.set_yticks(range(len(p)), ["embedding", *(f"layer {i}" for i in range(len(p) - 1))])
    axes.set(xlabel="token read", title="the likeliest next token if the integration stopped here")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")             # of characters that the font does not have
        figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"Wrote {path}.")


# ------------------------------------------------------------------------------------------------------------
# 4. The session
# ------------------------------------------------------------------------------------------------------------
def setting_type(kind, low, high):
    """An argparse type: a number of this kind from low to high."""
    what = "a whole number" if kind is int else "a number"
    return number_type(kind, lambda x: low <= x <= high, f"{what} from {low} to {high}")


def show_setting(settings, name):
    return str(getattr(settings, name.replace("-", "_"))).lower()       # "none" for None


def change_setting(settings, name, text):
    """ArgumentTypeError, in one sentence, for a value that it cannot have; "none" is one where it is the
    default."""
    kind, low, high, default, _ = SETTINGS[name]
    value = None if default is None and text == "none" else setting_type(kind, low, high)(text)
    setattr(settings, name.replace("-", "_"), value)


def run_command(line, session):
    """/NAME VALUE on a terminal: change a setting.  -> whether to go on."""
    name, _, value = line[1:].strip().partition(" ")
    if name in ("quit", "exit"):
        return False
    if name == "reset":
        session.turns = []
    elif name in ("stats", "tokens") and not session.said:
        print(f"/{name} is about the last answer, and there is none.")
    elif name == "stats":
        session.print_stats()
    elif name == "tokens":
        session.print_tokens()
    elif name == "system" and session.chat_form:
        if value.strip():
            session.system = b"" if value.strip() == "none" else to_bytes(value.strip())
            session.turns = []
        print(f"system is {session.system.decode('utf-8', 'replace') or 'none'}")
    elif name in SETTINGS:
        try:
            if value.strip():
                change_setting(session.settings, name, value.strip())
                session.answers = 0    # after /seed 1 the next answer is that of --seed 1
            print(f"{name} is {show_setting(session.settings, name)}")
        except argparse.ArgumentTypeError as error:
            print(f"/{name} {error}.")
    elif name == "help":
        print("/reset forgets, /quit leaves, an empty line lets the model write on, \\ at its end continues "
              "a line.\n/stats: how fast the last answer came; /tokens: how likely each of its tokens was.")
        if session.chat_form:
            print("/system TEXT begins anew, with this before the first question; /system none: without.")
        print("The settings now:")
        for name, (*_, meaning) in SETTINGS.items():
            print(f"  /{name} {show_setting(session.settings, name)}   {meaning}")
    else:
        print(f"There is no command {line.strip()}; /help lists them. A space in front makes it a prompt.")
    return True


def run_session(session, folder):
    """Line by line until the input ends.  Prompts, commands and Ctrl-C that only stops an answer are for a
    terminal."""
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if on_terminal:
        with contextlib.suppress(ImportError):
            # imported, it gives input() line editing and a history, kept in memory
            import readline     # noqa: F401
        print(f"{folder}: {session.model.flat_params.size:,} parameters, step {session.model.step}.")
        begin = "Ask" if session.chat_form else "Begin a text"
        print(f"{begin}; Ctrl-C stops the model, /quit or Ctrl-D leaves, /help shows more.")
    while True:
        try:
            line = input("> " if on_terminal else "")
            while on_terminal and line.endswith("\\"):
                line = line[:-1] + "\n" + input("... ")
            if not (on_terminal and line.startswith("/")):
                session.answer(line)
            elif not run_command(line, session):
                return
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            print()
        except EOFError:
            print(end="\n" if on_terminal else "")
            return


def parse_arguments(argv):
    parser = Parser(description="Type, and a trained model continues (or answers, if it was fine-tuned to).")
    parser.add_argument("--model", metavar="DIR", help="the checkpoint folder (default: the newest in out/)")
    once = parser.add_mutually_exclusive_group()
    once.add_argument("--prompt", metavar="TEXT", help="continue this text, then stop")
    once.add_argument("--lens", metavar="TEXT", help="print the Euler table of this text, then stop")
    for name, (kind, low, high, default, meaning) in SETTINGS.items():
        parser.add_argument(f"--{name}", type=setting_type(kind, low, high), default=default, metavar="N",
                            help=meaning + ("" if default is None else f" (default {default})"))
    parser.add_argument("--plot", metavar="FILE", help=f"with --lens: draw it, last {PLOTTED} ids")
    parser.add_argument("--speculation", action=argparse.BooleanOptionalAction,
                        help="let all heads draft, or none (default: as many as pay, 1 on a GPU, 0 on a CPU)")
    parser.add_argument("--context", type=whole_number(1, 1 << 20), metavar="N",
                        help="the longest text that it remembers, in tokens (default: what the model can)")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: GPU, if any")
    args = parser.parse_args(argv)
    if args.plot and args.lens is None:
        parser.error("--plot goes with --lens TEXT")
    return args


def main(argv):
    args = parse_arguments(argv)
    # Bytes that are not UTF-8 reach the tokenizer as they are; "\r\n" ends a line, too.
    sys.stdin.reconfigure(errors="surrogateescape", newline=None)
    folder = args.model or newest_checkpoint("name the folder of one with --model DIR")
    # the lens looks into every layer
    model, tokenizer = load_model(folder, args.device if args.lens is None else "cpu", args.context)
    if args.lens is not None:
        return print_lens(model, tokenizer, args.lens, args.plot)
    if args.speculation and model.config.predict == 1:
        print("note: this model has one head, none to draft: --speculation changes nothing.", file=sys.stderr)
    session = Session(model, tokenizer, args)
    if args.prompt is not None:
        return session.answer(args.prompt)
    run_session(session, folder)


if __name__ == "__main__":
    run_script(main)
