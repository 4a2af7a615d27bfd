r"""Byte-level BPE: how text becomes the integers that the model reads, and back.

Read before it: nothing; this is the first file. It needs the standard library alone.

A language model needs a finite alphabet. Single characters make sequences long and words make an endless
vocabulary; byte pair encoding (Sennrich, Haddow and Birch 2016, "Neural Machine Translation of Rare Words
with Subword Units") lies between: start from single symbols and, again and again, glue the most frequent
neighbouring pair into a new symbol. GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners") took the 256 bytes as the first symbols, so that every text in every script, and every damaged
file, has an encoding and no "unknown" token exists.

    text --(1)--> words --(2)--> bytes --(3)--> tokens      "low lower" -> "low", " lower" -> ... -> 300, 301

(1) Words. Merges never cross a word, or "dog." and "dog!" would become tokens of their own. GPT-2's pattern
    is kept to the letter (`word_pattern`): a contraction, letters, digits or signs with the one space before
    them, or white space.
(2) Bytes. A word is its UTF-8 bytes. Bytes that are not UTF-8 are no error: each is a sign that stands for
    itself.
(3) Tokens. `learn_merges` finds the merges, in order; `Encoder.merge` replays them on a word, in that order.

HOW A TIE IS BROKEN. Training takes the pair with the highest count; among equal counts the smallest pair of
ids, first the left id, then the right (ids 0 to 255 are the bytes, 256 is the first merge and so on). So a
result depends on the counts of words alone, never on their order, the hash seed or the number of processes.
Encoding takes the merge learned first; if it fits at several places, the leftmost.

Ids: 256 bytes, the merges in the order learned, then the special tokens, last. `Tokenizer.load` also reads
other people's tokenizers, whose ids have any order (`Tokenizer.from_vocab`), and which may take each digit
for a word; `known_template` says whether the form of their conversations is known. Text can never produce a
special token: "<|end|>" typed by a user is seven ordinary characters. The one exception is a corpus on disk,
where a line that holds only <|endoftext|> separates documents (`read_documents`).

What it does not do: other patterns than GPT-2's and that with digits apart, other models than BPE,
normalization, padding, truncation, offsets.
"""
import array
import concurrent.futures
import contextlib
import functools
import heapq
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import unicodedata
from collections import Counter, defaultdict, deque

from script import (Parser, available_cores, naming, newest_checkpoint, read_chunk, read_json, refusing, replace_file,
                    require, run_script, show_progress, whole_number, write_file)

SPECIAL_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")
END_OF_TEXT, USER, ASSISTANT, END_OF_TURN = SPECIAL_TOKENS
TEXT_ENDS = END_OF_TEXT, "<|end_of_text|>", "</s>", "<|im_end|>"     # in other people's files one of these

# How a conversation becomes one text (Tokenizer.prompt), for other tools, in Jinja: transformers'
# apply_chat_template gives the same ids. But for one case: such a tool puts a conversation together as text,
# so a "<|end|>" that somebody typed becomes the special token there. Here it stays seven characters.
CHAT_TEMPLATE = r"""{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) -%}
    {%- if message.role != ('assistant' if loop.index0 % 2 else 'user') -%}
        {{- raise_exception('after one system text at most, the roles must be user and assistant in turn') -}}
    {%- endif -%}
    {{- '<|' + message.role + '|>' + (system + '\n\n' if loop.first and system else '') -}}
    {{- message.content + '<|end|>' -}}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt else '' -}}"""

# The other form that is known: ChatML, of SmolLM, Qwen and others, as `tidied` writes it, in two parts.
# Between them may stand the system text of a conversation that brings none, the group.
CHATML_PARTS = ('{%for message in messages%}',
                r'{{"<|im_start|>"+message["role"]+"\n"+message["content"]+"<|im_end|>"+"\n"}}{%endfor%}'
                r'{%if add_generation_prompt%}{{"<|im_start|>assistant\n"}}{%endif%}')
CHATML = re.compile((r'(?:{%if loop\.first and messages\[0\]\["role"\]!="system"%}{{"<\|im_start\|>system\\n'
                     r'((?:[^"\\]|\\.)+)<\|im_end\|>\\n"}}{%endif%})?').join(map(re.escape, CHATML_PARTS)))


def tidied(text):
    """A Jinja template without what makes no difference: strings are in double quotes, and white space is
    where it parts two words, in strings, and where it becomes a part of the conversation."""
    # "-" drops the white space on its side of a tag. transformers has Jinja drop, too, what stands before {%
    # in its line and the line end after %}.
    text = re.sub(r"(?m)\s*({[{%])-|-([%}]})\s*|^[ \t]+(?={%)|(?<=%})\n", r"\1\2", text)
    # strings; what stands between tags, or parts two words; the rest
    parts = r"""(?s)('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|((?:^|(?<=[%}]}))\s+|(?<=\w)\s+(?=\w))|\s+"""
    return re.sub(parts, lambda found: json.dumps(      # as Jinja decodes it
        found[1][1:-1].encode("ascii", "backslashreplace").decode("unicode-escape"),
        ensure_ascii=False) if found[1] else found[2] or "", text)


def known_template(text):
    """A chat template as `Tokenizer.template` wants it, if its form is known: "" (none), ours or ChatML,
    however they are written.  Else None."""
    with contextlib.suppress(TypeError, ValueError):    # no text, or a string that Jinja cannot read either
        tidy = tidied(text)
        return tidy if CHATML.fullmatch(tidy) else {"": "", tidied(CHAT_TEMPLATE): CHAT_TEMPLATE}.get(tidy)


# ------------------------------------------------------------------------------------------------------------
# 1. Text into words

# Unicode's White_Space, which is what \s means to GPT-2. Python's own \s also takes the separators \x1c to
# \x1f.
SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


@functools.lru_cache(maxsize=None)
def char_classes(limit):
    r"""The insides of two regular expression classes [...], letters \p{L} and numbers \p{N}, up to code point
    `limit`.

    `re` lacks \p{...}, so the ranges come from unicodedata.
    """
    categories = "".join(map(unicodedata.category, map(chr, range(limit + 1))))[::2]  # "Lu" -> "L", and so on
    runs = [re.finditer(f"{category}+", categories) for category in "LN"]
    return ["".join(f"{chr(run.start())}-{chr(run.end() - 1)}" for run in found) for found in runs]


@functools.lru_cache(maxsize=None)
def word_pattern(limit, digits):
    r"""GPT-2's pattern: 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+

    The last but one takes a run of white space without its last character, which then joins the word it
    precedes.

    digits: that of SmolLM and others, where each \p{N} is a word by itself and the pattern is for what stands
    between two of them. White space before a number is then at an end: it keeps its last character.
    """
    letter, number = char_classes(limit)
    numbers, no_word = (f"[{number}]", SPACE + number) if digits else (f" ?[{number}]+", SPACE)
    return re.compile(f"'(?:[stmd]|re|ve|ll)| ?[{letter}]+|{numbers}| ?[^{SPACE}{letter}{number}]+"
                      f"|[{SPACE}]+(?![^{no_word}])|[{SPACE}]+")


ASCII, BMP, ALL = 0x7F, 0xFFFF, 0x10FFFF


def split_words(text, digits=False):
    """The words of a str, in order; joined they are the text. "I'd say 42!" -> ["I", "'d", " say", " 42",
    "!"], with digits [..., " say", " ", "4", "2", "!"]

    `re` looks characters up to U+FFFF up in a table but tries the ranges beyond one by one, four times as
    slow. So the full pattern is built (in 0.15 s) and used only for a text that has such characters, as
    emoji; a long one comes here in small parts.
    """
    limit = ASCII if text.isascii() else ALL if re.search("[\U00010000-\U0010FFFF]", text) else BMP
    return word_pattern(limit, digits).findall(text)


def to_str(text):
    """str or bytes -> a str in which a byte that is not UTF-8 is a lone surrogate, U+DC80 to U+DCFF
    (surrogateescape).

    A lone surrogate in a str is no UTF-8 either: it becomes the three bytes that UTF-8 would give it
    (surrogatepass).
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return str(data, "utf-8", "surrogateescape")


def to_bytes(word):
    """The inverse of `to_str`."""
    return word.encode("utf-8", "surrogateescape")


def cut_text(text, size=1 << 12):
    """Cut a str into parts of `size` characters or a little more: bounded memory.

    White space that follows something else always begins a new word, so a text can be cut there and each part
    split into words by itself.
    """
    return (part[0] for part in re.finditer(f"(?s).{{{size}}}.*?[^{SPACE}](?=[{SPACE}])|.+", text))


# ------------------------------------------------------------------------------------------------------------
# 2. Learning the merges

# about how much text in distinct words training on files keeps; 60 MB of books have 1 MB of it
MAX_WORD_BYTES = 1 << 23


def count_words(texts):
    """Iterable of str or bytes -> Counter of words."""
    parts = itertools.chain.from_iterable(cut_text(to_str(text)) for text in texts)
    return Counter(itertools.chain.from_iterable(map(split_words, parts)))


def prune_words(words):
    """Drop the rarest words, the last in code point order among equals, when all together outgrow
    MAX_WORD_BYTES."""
    if sum(map(len, words)) > MAX_WORD_BYTES:
        ranked = sorted(words, key=lambda word: (-words[word], word))
        for word, before in zip(ranked, itertools.accumulate(map(len, ranked), initial=0)):
            if before > MAX_WORD_BYTES // 2:            # what all words before it take
                del words[word]


def learn_merges(words, wanted):
    """Counter of words -> list of at most `wanted` merges (left id, right id); merge number i makes token
    256 + i.  Each is the pair that occurs most often, the smallest of several; one that occurs once ends the
    list.

    Recounting all pairs after each merge would be quadratic. Instead every word stands once, weighted by its
    count, in one long row of token ids, and each pair knows its positions in the row. A merge touches only
    its own occurrences, each removes one id from the row for ever, so the whole of training costs about one
    step per byte of distinct words.
    """
    # id at each position; -1 between two words and where a merge took an id away
    token = array.array("i", [-1])
    weight = array.array("q", [0])      # how often the word of this position occurs
    for word, count in words.items():
        token.extend([*to_bytes(word), -1])
        weight.extend(itertools.repeat(count, len(token) - len(weight)))
    # the row is a linked list: a merge unlinks its right id
    before = array.array("q", range(-1, len(token) - 1))
    after = array.array("q", range(1, len(token) + 1))

    counts, where = Counter(), defaultdict(functools.partial(array.array, "q"))
    for position, pair in enumerate(itertools.pairwise(token)):
        if -1 not in pair:
            counts[pair] += weight[position]
            where[pair].append(position)

    # The tie rule is the order of this heap: highest count first, then smallest (left id, right id).
    heap = sorted((-count, pair) for pair, count in counts.items())
    merges = []
    # what occurs once is no pattern: the vocabulary stays smaller than asked
    while heap and -heap[0][0] > 1 and len(merges) < wanted:
        negative, pair = heapq.heappop(heap)
        if -negative != counts[pair]:
            # Lazy deletion: other merges took some of its occurrences. A count only falls, since a pair can
            # only arise while its younger token is being made; so the true count goes back into the heap and
            # waits its turn.
            heapq.heappush(heap, (-counts[pair], pair))
            continue
        left, right = pair
        new = 256 + len(merges)
        merges.append(pair)
        arisen = defaultdict(functools.partial(array.array, "q"))
        for p in where.pop(pair):
            q = after[p]
            if token[p] != left or token[q] != right:
                continue                # taken by an earlier merge, or by the one just before it, as in "aaa"
            o, r, times = before[p], after[q], weight[p]
            a, b = token[o], token[r]           # the neighbours of both, or -1
            for gone, young, place in ((a, left), (a, new), o), ((right, b), (new, b), p):
                if -1 not in young:
                    counts[gone] -= times
                    counts[young] += times
                    arisen[young].append(place)
            token[p], token[q] = new, -1
            after[p], before[r] = r, p
        del counts[pair]
        where.update(arisen)
        for pair in arisen:
            heapq.heappush(heap, (-counts[pair], pair))
    return merges


# ------------------------------------------------------------------------------------------------------------
# 3. Words into tokens

class Encoder(dict):
    """A cache: word (str) -> its ids packed as bytes, worked out on first use by `__missing__`.

    Packed ids of a text are then one b"".join(map(encoder.__getitem__, words)): the loop over a text runs in
    C.
    """
    MAX_ENTRIES = 1 << 18       # about 50 MB; emptied when full

    def __init__(self, byte_ids, merges, typecode, digits=False):
        """byte_ids: {byte: its id}, in which bytes may be missing; merges {(left id, right id): made id}, in
        the order learned; typecode: of array.array, for an id."""
        self.byte_ids, self.typecode, self.digits = byte_ids, typecode, digits
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self.made = list(merges.values())

    def __missing__(self, word):
        packed = array.array(self.typecode, self.merge(to_bytes(word))).tobytes()
        if len(word) <= 64:                 # longer ones hardly come again
            if len(self) >= self.MAX_ENTRIES:
                self.clear()
            self[word] = packed
        return packed

    def pack(self, text):
        """str or bytes -> ids packed in the machine's byte order, little-endian on all that this runs on."""
        parts = (split_words(part, self.digits) for part in cut_text(to_str(text)))
        return b"".join([b"".join(map(self.__getitem__, words)) for words in parts])

    def merge(self, word):
        """The bytes of one word -> its list of ids: the merge learned first, at its leftmost place, until
        none fits.  Bytes without a token are left out, and their neighbours may merge.

        A merge's place in the order of learning is its rank. In our own tokenizers rank 0 makes token 256,
        but elsewhere ids need not follow ranks, and two merges may make one token.
        """
        ids = [self.byte_ids[byte] for byte in word if byte in self.byte_ids]
        if len(ids) > 200:
            return self.merge_long([-1, *ids, -1])
        get, made, none = self.ranks.get, self.made, len(self.made)
        # ranks[i]: of the merge of ids[i] and ids[i + 1]
        ranks = list(map(get, zip(ids, ids[1:]), itertools.repeat(none)))
        while ranks and (rank := min(ranks)) != none:
            i = ranks.index(rank)
            ids[i] = new = made[rank]
            del ids[i + 1], ranks[i]
            if i < len(ranks):
                ranks[i] = get((new, ids[i + 1]), none)
            if i > 0:
                ranks[i - 1] = get((ids[i - 1], new), none)
        return ids

    def merge_long(self, ids):
        """The same for a word of any length in n log n steps, where the loop above takes n squared: a heap of
        (rank, place).  ids: with a -1 at both ends, which merges with nothing: each id has two neighbours.
        """
        n, ranks = len(ids), self.ranks
        before, after = array.array("q", range(-1, n - 1)), array.array("q", range(1, n + 1))
        # (rank, place) as one number: a third of a tuple's memory
        heap = sorted(ranks[pair] * n + p for p, pair in enumerate(zip(ids, ids[1:])) if pair in ranks)
        while heap:
            rank, p = divmod(heapq.heappop(heap), n)
            q = after[p]
            if ranks.get((ids[p], ids[q])) == rank:         # else this pair is gone since it was put there
                ids[p], ids[q], after[p] = self.made[rank], -1, after[q]
                before[after[p]] = p
                for left, right in (before[p], p), (p, after[p]):
                    if (ids[left], ids[right]) in ranks:
                        heapq.heappush(heap, ranks[ids[left], ids[right]] * n + left)
        return [token for token in ids if token != -1]


# ------------------------------------------------------------------------------------------------------------
# 4. Files: documents, chunks, processes

# ^<\|endoftext\|>\r?$ with the line's start looked for last: what begins with plain bytes is found much
# faster.
SEPARATOR = re.compile(rb"<\|endoftext\|>(?<=^<\|endoftext\|>)\r?$", re.MULTILINE)


def read_documents(path, start, end):
    """The documents in a part of a corpus: what stands between lines that hold only <|endoftext|>, without
    the line ends next to them. The first and the last may be empty, if a separator comes first or last; no
    other is."""
    texts = SEPARATOR.split(read_chunk(path, start, end))
    for i in range(1, len(texts)):              # on both sides of each separator
        texts[i - 1], texts[i] = texts[i - 1].rstrip(b"\r\n"), texts[i].lstrip(b"\r\n")
    return [text for i, text in enumerate(texts) if text or i in (0, len(texts) - 1)]


# bytes of a file encoded at a time, and looked through for a place to cut it
CHUNK, CUT_WINDOW = 1 << 20, 1 << 16


def find_cut(window):
    """Where a file may be cut: an offset into these bytes, so that both sides give the ids that they give
    together.

    Words must not be cut, nor a separator line be parted from the line ends that belong to it. In order of
    preference: before white space that follows something else (but not ">", which may end a separator); after
    a run of letters or of digits (but not before "<" or "|"); after a separator and its line ends; in the
    middle. Only 64 KiB of a single kind of character get to the last, and there a word is cut between two
    characters: memory stays bounded.
    """
    # start at a character
    skipped = next((i for i in range(min(3, len(window))) if window[i] & 0xC0 != 0x80), 3)
    text = to_str(window[skipped:])
    cut = re.search(f"[^{SPACE}>](?=[{SPACE}])", text)
    if not cut:
        (letter, number), broken = char_classes(ALL), "\udc80-\udcff"      # the window may end in a character
        cut = (re.search(f"[{letter}](?=[^{letter}<|{broken}])|[{number}](?=[^{number}<|{broken}])", text)
               or re.search(r"\n<\|endoftext\|>(\r?\n)+(?=[^\r\n])", text))
    return skipped + len(to_bytes(text[:cut.end() if cut else len(text) // 2]))


def find_chunks(path, start=0, end=None, *, size):
    """Cut bytes [start, end) of a file into chunks of about `size` bytes -> list of (path, start, end).

    Where it is cut depends on the file alone, not on the number of processes, and each cut reads 64 KiB only.
    """
    length = os.path.getsize(path)
    end = length if end is None else end
    require(0 <= start <= end <= length, f"{path} has {length} bytes, so none from {start} to {end}.")
    cuts = [place + find_cut(read_chunk(path, place, place + CUT_WINDOW))
            for place in range(start + size, end - CUT_WINDOW, size)]
    return [(path, a, b) for a, b in itertools.pairwise([start, *cuts, end])]


def run_chunks(function, chunks, processes, progress):
    """Yield function(*chunk) of each chunk, in order, from this process or, if there is enough for each, from
    several.

    progress(done bytes, all bytes) is called after each. Whoever iterates must close the generator. Workers
    are forked, so the caller's script does not run again in them; two chunks each are under way, so memory
    stays bounded; Ctrl-C does not reach them, and they end with their parent, however it ends.
    """
    done, total = 0, sum(end - start for _, start, end in chunks)
    processes = min(processes or available_cores(), total // WORTH_A_PROCESS)
    with contextlib.ExitStack() as stack:
        if processes > 1:
            fork = multiprocessing.get_context("fork")
            pool = concurrent.futures.ProcessPoolExecutor(processes, fork, start_worker, (function,))
            stack.callback(pool.shutdown, cancel_futures=True)
            tasks = (pool.submit(work, *chunk).result for chunk in chunks)
        else:
            tasks = (functools.partial(function, *chunk) for chunk in chunks)
        with contextlib.ExitStack() as starting:        # no interrupt before the pool can be shut down
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            starting.callback(signal.pthread_sigmask, signal.SIG_SETMASK, blocked)
            under_way = deque(itertools.islice(tasks, 2 * processes or 1))      # the others begin one by one
        for chunk in chunks:
            yield under_way.popleft()()
            under_way.extend(itertools.islice(tasks, 1))
            done += chunk[2] - chunk[1]
            progress(done, total)


WORTH_A_PROCESS = 1 << 21    # bytes; a process starts in the time that it takes to encode about one megabyte


def start_worker(function):
    """Runs first in a worker. The function comes with the fork and need not be one that can be sent; the
    cache of an encoder in it is a copy, from then on the worker's own."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: parent.join() or os._exit(1), daemon=True).start()      # end with it
    work.function = function


def work(*chunk):
    """What can be sent to a worker: this name, and a chunk."""
    return work.function(*chunk)


# ------------------------------------------------------------------------------------------------------------
# 5. The tokenizer


def byte_chars():
    """GPT-2's printable stand-ins for the 256 bytes in vocabulary files: itself where Latin-1 can be printed,
    else the next of U+0100, U+0101, ... (so a space is written as U+0120)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


MODEL = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
         "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}


class Tokenizer:
    """tokens: in the order of their ids, the 256 bytes as ints or all tokens as bytes (b"": no token has this
    id); merges: list of (left id, right id), in the order learned; special: names of the special tokens.
    What a merge makes, or a special token, that is not among the tokens gets the next id.

    vocab_size V, tokens [bytes of token id], merges {(left id, right id): id made}, special {name: id},
    digits: whether each digit is a word (`word_pattern`), template: the form of conversations, "" or what
    `known_template` gives.
    """

    def __init__(self, tokens, merges, special, digits=False):
        self.tokens = [bytes([token]) if isinstance(token, int) else token for token in tokens]
        ids = {token: i for i, token in enumerate(self.tokens)}

        def find(token):
            i = ids.setdefault(token, len(self.tokens))
            self.tokens[i:i + 1] = [token]
            return i
        self.merges = {(left, right): find(self.tokens[left] + self.tokens[right]) for left, right in merges}
        byte_ids = {token[0]: i for token, i in ids.items() if len(token) == 1}
        self.special = {name: find(name.encode()) for name in special}
        self.vocab_size, self.digits, self.template = len(self.tokens), digits, ""
        self.encoder = Encoder(byte_ids, self.merges, "H" if self.vocab_size <= 1 << 16 else "I", digits)

    @classmethod
    def train(cls, texts, vocab_size):
        """Learn from an iterable of str or bytes, each a document (a text by itself counts as one document).

        vocab_size V counts the 256 bytes and the 4 special tokens; a text without enough repeated pairs gives
        fewer.
        """
        return cls.from_words(count_words([texts] if isinstance(texts, (str, bytes)) else texts), vocab_size)

    @classmethod
    def train_files(cls, files, vocab_size, processes=None, progress=lambda done, total: None):
        """The same from files, on all cores in bounded memory. files: paths, or (path, start, end) for a part
        in bytes.

        Lines that hold only <|endoftext|> separate documents and are not learned from. progress(done bytes,
        all bytes) is called now and then. ValueError if a file is binary or all are empty.
        """
        files = [(file,) if isinstance(file, (str, os.PathLike)) else file for file in files]
        parts = [find_chunks(*file, size=4 * CHUNK) for file in files]
        for (path, start, end), *_ in parts:
            require(b"\0" not in read_chunk(path, start, min(end, start + 8192)),
                    f"{path} holds NUL bytes, so it is not a text file; give text to train on.")
        words, chunks = Counter(), list(itertools.chain(*parts))
        work = run_chunks(lambda *chunk: count_words(read_documents(*chunk)), chunks, processes, progress)
        with contextlib.closing(work) as results:
            for counts in results:
                words.update(counts)
                prune_words(words)
        require(words, f"There is no text in {', '.join(str(part[0][0]) for part in parts)}.")
        return cls.from_words(words, vocab_size)

    @classmethod
    def from_words(cls, words, vocab_size):
        """Learn from the counts of words, a Counter as `count_words` gives."""
        # the 256 bytes and SPECIAL_TOKENS
        require(vocab_size >= 260, f"{vocab_size} tokens is too small a vocabulary; it takes at least 260.")
        return cls(range(256), learn_merges(words, vocab_size - 260), SPECIAL_TOKENS)

    @classmethod
    def from_gpt2(cls, vocab_bpe, encoder_json):
        """GPT-2's own tokenizer from its two files; its only special token is <|endoftext|>."""
        with refusing(f"{vocab_bpe}, {encoder_json}: not GPT-2's tokenizer files"):
            merges = read_chunk(vocab_bpe).decode("utf-8").split("\n")[1:]    # the first line is the version
            return cls.from_vocab(read_json(encoder_json), filter(None, merges), [END_OF_TEXT])

    @classmethod
    def from_vocab(cls, vocab, merges, special, digits=False):
        """vocab: {token in printable stand-ins, or name: id}; merges: "left right" or [left, right] each;
        special: names.  ValueError for what does not fit together."""
        ordinary, chars = vocab.keys() - {*special}, {char: byte for byte, char in enumerate(byte_chars())}
        wrong = [name for name in vocab if not ({*name} <= chars.keys() if name in ordinary else name[1:])]
        require(not wrong, f"its tokens {wrong[:3]} hold what stands for no byte, or are special and a byte")
        # ids beyond this limit, far from all that there are, would make a list that fills the memory
        tokens = {i: bytes(map(chars.get, name)) if name in ordinary else name.encode()
                  for name, i in vocab.items() if type(i) is int and 0 <= i < 1 << 20}
        require(len(vocab) == len(tokens) == len({*tokens.values()} - {b""}) > 0,
                f"its {len(vocab)} tokens do not all differ and have numbers below {1 << 20} of their own")
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
        wrong = [merge for merge, times in Counter(map(tuple, merges)).items()
                 if times > 1 or len(merge) != 2 or not {*merge, "".join(merge)} <= ordinary]
        require(not wrong, f"its merges {wrong[:3]} do not make tokens of two others, or are there twice")
        tokens = [tokens.get(i, b"") for i in range(max(tokens) + 1)]
        return cls(tokens, [(vocab[a], vocab[b]) for a, b in merges], sorted(special, key=vocab.get), digits)

    def encode(self, text):
        """str or bytes -> list of ids, never a special one; decode_bytes gives the same bytes back, whatever
        they are.
        """
        return array.array(self.encoder.typecode, self.encoder.pack(text)).tolist()

    def special_id(self, *names):
        """The id of the first of these special tokens that there is."""
        ids = [self.special[name] for name in names if name in self.special]
        require(ids, f"The tokenizer has no special token {names[0]}.")
        return ids[0]

    @property
    def end_of_turn(self):
        """The id that ends an answer."""
        return self.special_id(END_OF_TURN if self.template in ("", CHAT_TEMPLATE) else "<|im_end|>")

    def prompt(self, text, room=None, system=b"", first=True):
        r"""The ids of a turn up to where the answer begins, in the form of `template`; put together from
        ids, since text can never become a special token:

            ours    <|user|>[SYSTEM\n\n]TEXT<|end|><|assistant|>
            ChatML  [<|im_start|>system\nSYSTEM<|im_end|>\n]<|im_start|>user\nTEXT<|im_end|>\n
                    <|im_start|>assistant\n  (in one line)

        text, system: str or bytes.  What is in brackets stands in the first turn alone, if there is a system
        text: this one, or the template's.  In ChatML a turn that is not the first begins with the line end
        that follows the end of the answer before.  room: at most so many ids; of a longer text the end is
        kept, and the beginning of what surrounds it gives way only where that alone is too long.
        """
        text, system = to_bytes(to_str(text)), to_bytes(to_str(system))
        if self.template in ("", CHAT_TEMPLATE):
            head = system + b"\n\n" if system and first else b""
            before, after = [self.special_id(USER)], [self.end_of_turn, self.special_id(ASSISTANT)]
        else:
            start, end = self.special_id("<|im_start|>"), [self.end_of_turn, *self.encode("\n")]
            system = system or json.loads(f'"{CHATML.fullmatch(self.template)[1] or ""}"').encode()
            opening = [start, *self.encode(b"system\n" + system), *end] if system else []
            before, head = [*(opening if first else end[1:]), start], b"user\n"
            after = [*end, start, *self.encode("assistant\n")]
        # one piece: other tools, too, encode together what stands between two special tokens
        ids = [*before, *self.encode(head + text), *after]
        if room is None or len(ids) <= room:
            return ids
        before = [*before, *self.encode(head)]
        ids = [*before, *self.encode(text), *after]
        frame = len(before) if len(before) + len(after) <= room else 1
        return ids[:frame] + ids[max(frame, frame + len(ids) - room):]

    def decode_bytes(self, ids):
        """Iterable of ids -> bytes; a special token gives its name."""
        ids = list(ids)
        if bad := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise ValueError(f"Token id {bad[0]} is out of range: there are V = {self.vocab_size} tokens.")
        return b"".join([self.tokens[token] for token in ids])

    def decode(self, ids):
        """Iterable of ids -> str; bytes that are not UTF-8, as when a token ends inside a character, become
        U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def encode_file(self, path, out, start=0, end=None, processes=None, progress=lambda done, total: None):
        """Encode bytes [start, end) of a file into little-endian uint16 ids in the file `out`, which is
        replaced when all is written; returns how many they are.

        Lines that hold only <|endoftext|>, with the empty lines around them, become the one id of
        <|endoftext|> (or what stands in its place: TEXT_ENDS), and the last document ends with it too; there
        are no empty documents. Memory is bounded: chunks of 1 MiB (`find_cut` says where), on all cores or
        `processes`. progress(done bytes, all bytes) is called after each chunk.
        """
        return self.encode_files([(path, start, end)], out, processes, progress)

    def encode_files(self, files, out, processes=None, progress=lambda done, total: None):
        """The same of several files, one after the other. files: (path, start, end) each, a part in bytes."""
        require(self.vocab_size <= 1 << 16, f"{self.vocab_size} tokens are too many: at most 65536.")
        parts = [find_chunks(*file, size=CHUNK) for file in files]
        begins = [i == 0 for part in parts for i in range(len(part))]
        last = boundary = array.array("H", [self.special_id(*TEXT_ENDS)]).tobytes()
        work = run_chunks(lambda *chunk: boundary.join(map(self.encoder.pack, read_documents(*chunk))),
                          list(itertools.chain(*parts)), processes, progress)
        with replace_file(out) as file, contextlib.closing(work) as results:
            # zip in this order: results must run to its end; behind the last file as if an empty one began
            for ids, begin in itertools.chain(zip(results, begins), [(b"", True)]):
                if begin or last == boundary:   # the end of the file before, once; and no document is empty
                    ids = (b"" if last == boundary else boundary) + ids.removeprefix(boundary)
                file.write(ids)
                last = ids[-2:] or last
            return file.tell() // 2

    def save(self, path):
        """Write a Hugging Face tokenizer.json, which `tokenizers` and `transformers` load with the same ids.

        Their ByteLevel pre-tokenizer holds GPT-2's pattern. It is theirs that would find special tokens in a
        text.
        """
        chars = byte_chars()
        names = {i: token.decode("latin-1").translate(chars) for i, token in enumerate(self.tokens) if token}
        names.update((i, name) for name, i in self.special.items())
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        added = [{"id": i, "content": name, **plain} for name, i in self.special.items()]
        model = {**MODEL, "vocab": {name: i for i, name in names.items()},
                 "merges": [f"{names[left]} {names[right]}" for left, right in self.merges]}
        words = {"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]} if self.digits else BYTE_LEVEL
        tokenizer = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": words, "post_processor": None, "decoder": BYTE_LEVEL, "model": model}
        write_file(path, json.dumps(tokenizer, ensure_ascii=False, indent=1).encode())

    @classmethod
    def load(cls, path):
        """Read a tokenizer.json, ours or another byte-level BPE.  ValueError if the file is damaged, or would
        have text encoded in a way that is not known here."""
        content = read_json(path)
        with refusing(f"{path} is not a tokenizer that tokenizer.py reads"):
            model, added = content["model"], content.get("added_tokens", [])
            pre, post = [content.get(key) or {"type": None} for key in ("pre_tokenizer", "post_processor")]
            # trim_offsets makes no difference to ids, and use_regex may be left out
            steps = [{**BYTE_LEVEL, **step, "trim_offsets": True} for step in pre.get("pretokenizers", [pre])]
            found = {**content, **model, "added_tokens": [token for token in added if not token["special"]]}
            known = {key: not found.get(key) for key in ("normalizer", "added_tokens", *MODEL)} | {
                "type": model.get("type", "BPE") == "BPE", "fuse_unk": True,
                "unk_token": not model.get("unk_token") or model["vocab"].keys() >= {*byte_chars()},
                "pre_tokenizer": steps in ([BYTE_LEVEL], [{**BYTE_LEVEL, **DIGITS}, BYTE_LEVEL]),
                "post_processor": post["type"] in (None, "ByteLevel") or not post.get("special_tokens", True)}
            for key in known:
                require(known[key], f'"{key}": {json.dumps(found.get(key)):.200} is not known here')
            special = {token["content"]: token["id"] for token in added}
            # where both have an id, the vocabulary's counts, as for `tokenizers`
            return cls.from_vocab({**special, **model["vocab"]}, model["merges"], special, len(steps) > 1)


# ------------------------------------------------------------------------------------------------------------
# 6. Looking at it: the command line

def visible(token):
    r"""The bytes of a token as printable text: a byte that is no whole character as \xNN, a line end as \n,
    ..."""
    text = token.replace(b"\\", rb"\\").decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() if char.isascii()
                   else f"\\u{ord(char):04x}" for char in text)


def show(tokenizer, text):
    """A text with a bar between its tokens; after a line end, which is shown as \\n, a new line begins."""
    tokens = [tokenizer.tokens[token] for token in tokenizer.encode(text)]
    bars = ["|\n" if token.endswith(b"\n") else "|" for token in tokens]
    shown = "".join(visible(token) + bar for token, bar in zip(tokens, bars)).rstrip("\n")[:-1]
    size = sum(map(len, tokens))
    return f"{shown}\n{len(tokens)} tokens for {size} bytes, {size / max(len(tokens), 1):.2f} bytes a token"


def train_command(files, vocab_size, out):
    require(not os.path.isdir(out) and os.access(os.path.dirname(os.path.abspath(out)), os.W_OK),
            f"Cannot write {out}; give --out a file in a folder that exists and is yours.")
    started = time.monotonic()
    tokenizer = Tokenizer.train_files(files, vocab_size, progress=show_progress("words counted:"))
    tokenizer.save(out)
    print(f"{out}: {tokenizer.vocab_size} of {vocab_size} tokens learned from "
          f"{sum(map(os.path.getsize, files)):,} bytes in {time.monotonic() - started:.1f} s")


def main(argv):
    parser = Parser(description="Byte-level BPE: how text becomes integers.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    train = commands.add_parser("train", help="learn a tokenizer from text files")
    train.add_argument("files", nargs="+", metavar="FILE", help="text; <|endoftext|> separates documents")
    train.add_argument("--vocab", type=whole_number(260), default=4096, metavar="V", help="at most (4096)")
    train.add_argument("--out", metavar="FILE", default="tokenizer.json", help="(default: %(default)s)")
    show_ = commands.add_parser("show", help="print a text with its token boundaries")
    show_.add_argument("text", metavar="TEXT", help="the text, or - for standard input; -- goes before -TEXT")
    show_.add_argument("--ids", action="store_true", help="print the ids of its tokens")
    show_.add_argument("--tokenizer", metavar="FILE", help="(default: tokenizer.json, or the newest model's)")
    arguments = parser.parse_args(argv)
    if arguments.command == "train":
        return train_command(arguments.files, arguments.vocab, arguments.out)
    path = arguments.tokenizer or "tokenizer.json"
    if not arguments.tokenizer and not os.path.exists(path):
        path = os.path.join(newest_checkpoint("make a tokenizer: `python tokenizer.py train FILE`"), path)
    tokenizer = Tokenizer.load(path)
    text = sys.stdin.buffer.read() if arguments.text == "-" else os.fsencode(arguments.text)
    print(" ".join(map(str, tokenizer.encode(text))) if arguments.ids else show(tokenizer, text))


if __name__ == "__main__":
    run_script(main)
