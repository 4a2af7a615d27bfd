r"""Byte-level BPE: how text becomes the integers that the model reads, and back.

Read before it: nothing; this is the first file.  It needs the standard library alone.  Options, error
messages and plain files are in script.py; look there only if one of its names puzzles you.

A language model needs a finite alphabet. Single characters make sequences long and words make an endless
vocabulary; byte pair encoding (Sennrich, Haddow and Birch 2016, "Neural Machine Translation of Rare Words
with Subword Units") lies between: start from single symbols and, again and again, glue the most frequent
neighbouring pair into a new symbol. GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners") took the 256 bytes as the first symbols, so that every text in every script, and every damaged
file, has an encoding and no "unknown" token exists.

    "low lower"  --words-->   "low", " lower"
    " lower"     --bytes-->   32 108 111 119 101 114      a space, l, o, w, e, r
                 --merges-->  32 256 119 101 114          merge 0 is (108, 111): it makes 256, "lo"
                              32 257 101 114              merge 1 is (256, 119): it makes 257, "low"

Words. Merges stay inside a word. Otherwise "dog." and "dog!" would become tokens of their own. A word is a
    contraction, or letters, digits or signs with the one space before them, or white space: GPT-2's pattern
    is kept to the letter (`word_pattern`).
Bytes. A word is its UTF-8 bytes. Bytes that are not UTF-8 are no error: each stands for itself.
Merges. `learn_merges` finds them, in order; `merge` replays them on a word, in that order.

HOW A TIE IS BROKEN. Training takes the pair with the highest count; among equal counts it takes the smallest
pair of ids, first by the left id, then by the right. So the merges depend on the counts of words alone, never
on their order, the hash seed or the number of processes. Encoding takes the merge that was learned first; if
it fits at several places, the leftmost.

Ids: first the 256 bytes, then the merges in the order learned, then the special tokens. Text can never
produce a special token: "<|end|>" typed by a user is seven ordinary characters. The one exception is a
corpus on disk, where a line that holds only <|endoftext|> separates documents (`read_documents`).

Sections: 1 learning, plainly; 2 words; 3 learning, fast; 4 encoding; 5 large files; 6 the Tokenizer, and its
file; 7 conversations; 8 the command line. Sections 1 to 4 are the subject.

What it does not do: other patterns than GPT-2's and that with digits apart, other models than BPE, more than
65,536 tokens (an id takes 16 bits), normalization, padding, truncation, offsets.
"""
import json
import os
import re
import sys
import unicodedata
from array import array
from collections import Counter, defaultdict
from functools import cache, partial
from heapq import heappop, heappush
from itertools import chain, count, pairwise, repeat

from script import (Parser, find_chunks, newest_checkpoint, read_chunk, read_json, refusing, replace_file, require,
                    run_chunks, run_script, write_file)

SPECIAL_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")
END_OF_TEXT, USER, ASSISTANT, END_OF_TURN = SPECIAL_TOKENS
# <|endoftext|>, and what stands in its place in the tokenizers of other people: the first of these that there is
TEXT_ENDS = END_OF_TEXT, "<|end_of_text|>", "</s>", "<|im_end|>"


# ------------------------------------------------------------------------------------------------------------
# 1. Learning the merges, plainly

# An example: the words "hug" 10 times, "pug" 5 times, "hugs" 5 times (g 103, h 104, p 112, s 115, u 117).
#     (u, g) 20, (h, u) 15, (p, u) 5, (g, s) 5     merge 0 is (117, 103): it makes 256, "ug"
#     (h, 256) 15, (p, 256) 5, (256, s) 5          merge 1 is (104, 256): it makes 257, "hug"
#     (p, 256) 5, (257, s) 5                       a tie: merge 2 is the smaller, (112, 256): 258, "pug"
#     (257, s) 5                                   merge 3 is (257, 115): 259, "hugs"
# No pair is left, so the list ends.  Within a word a merge goes from left to right: (a, a) in "aaa" makes the
# new id and an "a".
def learn_merges_plain(words, wanted):
    """Byte pair encoding as one would tell it.  It gives what `learn_merges` gives, but it counts all pairs
    anew for each merge: its time grows as the text times the merges."""
    rows = {word: [*to_bytes(word)] for word in words}
    merges = []
    for new in range(256, 256 + wanted):
        counts = Counter()
        for word, ids in rows.items():
            for pair in pairwise(ids):
                counts[pair] += words[word]
        best = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if counts[best] < 2:
            break
        for ids in rows.values():
            for i in range(len(ids)):
                if ids[i:i + 2] == [*best]:
                    ids[i:i + 2] = [new]
        merges.append(best)
    return merges


# ------------------------------------------------------------------------------------------------------------
# 2. Text into words

# Unicode's White_Space, which is what \s means to GPT-2. Python's own \s also takes the separators \x1c to
# \x1f.
SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


@cache
def char_classes(limit):
    r"""The insides of two regular expression classes [...], letters \p{L} and numbers \p{N}, up to code point
    `limit`.

    `re` lacks \p{...}, so the ranges come from unicodedata.
    """
    categories = "".join(map(unicodedata.category, map(chr, range(limit + 1))))[::2]  # "Lu" -> "L", and so on

    def ranges(category):
        runs = re.finditer(f"{category}+", categories)
        return "".join(f"{chr(run.start())}-{chr(run.end() - 1)}" for run in runs)
    return ranges("L"), ranges("N")


@cache
def word_pattern(limit, digits):
    r"""GPT-2's pattern: 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+

    The last but one takes a run of white space without its last character.  If that is a space, it joins the
    word after it.

    digits: the pattern of SmolLM and others, where each \p{N} is a word by itself. It splits a text at its
    numbers first. So white space before a number is at the end of its part, and keeps its last character.
    """
    letter, number = char_classes(limit)
    numbers = f" ?[{number}]+"
    no_word = SPACE
    if digits:
        numbers = f"[{number}]"
        no_word += number
    return re.compile(f"'(?:[stmd]|re|ve|ll)| ?[{letter}]+|{numbers}| ?[^{SPACE}{letter}{number}]+"
                      f"|[{SPACE}]+(?![^{no_word}])|[{SPACE}]+")


# the last code point that a pattern knows
BMP = 0xFFFF
ALL = 0x10FFFF


def split_words(text, digits=False):
    """The words of a str, in order; joined they are the text. "I'd say 42!" -> ["I", "'d", " say", " 42",
    "!"], with digits [..., " say", " ", "4", "2", "!"].  Yields the list of part after part of the text.

    `re` looks characters up to U+FFFF up in a table but tries the ranges beyond one by one, four times as
    slow. So the full pattern is built (in 0.15 s) and used only where there are such characters, as emoji:
    each part has 4096 characters, or as many more as it takes to the next white space that follows something
    else. Such white space always begins a new word.
    """
    for part in re.findall(f"(?s).{{4096}}.*?[^{SPACE}](?=[{SPACE}])|.+", text):
        limit = BMP
        if not part.isascii() and re.search("[\U00010000-\U0010FFFF]", part):
            limit = ALL
        yield word_pattern(limit, digits).findall(part)


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


# ------------------------------------------------------------------------------------------------------------
# 3. Learning the merges, fast

# about how many distinct words training on files keeps; 10 MB of books have 55,000
MAX_WORDS = 1_000_000


def count_words(texts):
    """Iterable of str or bytes -> Counter of words."""
    return Counter(chain.from_iterable(part for text in texts for part in split_words(to_str(text))))


def learn_merges(words, wanted):
    """Counter of words -> list of at most `wanted` merges (left id, right id); merge number i makes token
    256 + i.  Each is the pair that occurs most often, the smallest of several.  A pair that occurs once is no
    pattern, so it ends the list.

    `learn_merges_plain` does the same and counts all pairs anew for each merge.  Here three things change.
    All words stand in one long row of ids, each word once, with its count as a weight.  Each pair knows its
    positions in the row, so a merge touches only its own occurrences, and corrects the counts of the pairs
    beside them.  And a heap gives the most frequent pair.  Each occurrence takes one id out of the row for
    ever, so the whole of training costs about one step per byte of distinct words.
    """
    # id at each position; -1 between two words and where a merge took an id away
    token = array("i", [-1])
    weight = array("q", [0])      # how often the word of this position occurs
    for word, times in words.items():
        ids = [*to_bytes(word), -1]
        token.extend(ids)
        weight.extend([times] * len(ids))
    # the row is a linked list: a merge unlinks its right id
    before = array("q", range(-1, len(token) - 1))
    after = array("q", range(1, len(token) + 1))

    counts = Counter()
    where = defaultdict(partial(array, "q"))
    for position, pair in enumerate(pairwise(token)):
        if -1 not in pair:
            counts[pair] += weight[position]
            where[pair].append(position)

    # The tie rule is the order of this heap: highest count first, then smallest (left id, right id).
    heap = sorted((-times, pair) for pair, times in counts.items())
    merges = []
    while heap and -heap[0][0] > 1 and len(merges) < wanted:
        negative, pair = heappop(heap)
        if -negative != counts[pair]:
            # Lazy deletion: other merges took some of its occurrences since it was put there. Once both of
            # its tokens exist, the count of a pair only falls; so the true count goes back into the heap.
            heappush(heap, (-counts[pair], pair))
            continue
        left, right = pair
        new = 256 + len(merges)
        merges.append(pair)
        arisen = defaultdict(partial(array, "q"))
        for p in where.pop(pair):       # in the row: a, left, right, b at the positions o, p, q, r
            q = after[p]
            if token[p] != left or token[q] != right:
                continue                # taken by an earlier merge, or by the one just before it, as in "aaa"
            o = before[p]
            r = after[q]
            a = token[o]                # -1 where the word begins with left
            b = token[r]                # -1 where it ends with right
            times = weight[p]
            if a != -1:
                counts[a, left] -= times
                counts[a, new] += times
                arisen[a, new].append(o)
            if b != -1:
                counts[right, b] -= times
                counts[new, b] += times
                arisen[new, b].append(p)
            token[p] = new
            token[q] = -1
            after[p] = r
            before[r] = p
        del counts[pair]
        where.update(arisen)
        for young in arisen:
            heappush(heap, (-counts[young], young))
    return merges


# ------------------------------------------------------------------------------------------------------------
# 4. Words into tokens

# "hugs" with the merges of the example above: its bytes are 104 117 103 115.  (117, 103) has rank 0: this
# makes 104 256 115.  (104, 256) has rank 1: 257 115.  (257, 115) has rank 3: 259.  That is the end.
def merge(ids, ranks, made):
    """The ids of one word's bytes -> the ids of its tokens: the merge learned first, at its leftmost place,
    until none fits.

    ids: with -1 at both ends, which merges with nothing, so that each id has two neighbours; ranks: {(left id,
    right id): the place of their merge in the order of learning}; made: [the id that the merge of rank i makes].
    """
    get = ranks.get
    none = len(made)
    # at i: the rank of the merge of ids[i] and ids[i + 1]
    found = [*map(get, pairwise(ids), repeat(none))]
    rank = min(found)
    while rank != none:
        i = found.index(rank)
        new = made[rank]
        ids[i] = new
        del ids[i + 1], found[i]
        found[i - 1] = get((ids[i - 1], new), none)
        found[i] = get((new, ids[i + 1]), none)
        rank = min(found)
    return ids[1:-1]


def merge_long(ids, ranks, made):
    """The same for a word of any length in n log n steps, where the loop above takes n squared: a heap of
    (rank, the places of its two ids).  A merge leaves its id at the left place and None at the right."""
    heap = sorted((ranks[pair], p, p + 1) for p, pair in enumerate(pairwise(ids)) if pair in ranks)
    while heap:
        rank, p, q = heappop(heap)
        if ranks.get((ids[p], ids[q])) != rank:
            continue                # another merge took one of the two since the pair was put there
        ids[p] = made[rank]
        ids[q] = None
        before = p - 1
        while ids[before] is None:
            before -= 1
        after = q + 1
        while ids[after] is None:
            after += 1
        for left, right in (before, p), (p, after):
            pair = ids[left], ids[right]
            if pair in ranks:
                heappush(heap, (ranks[pair], left, right))
    return [token for token in ids[1:-1] if token is not None]


# words in the cache, about 50 MB; it is emptied when full
MAX_ENTRIES = 250_000


class Encoder(dict):
    """A cache: word (str) -> its ids packed as uint16, ready for a file, which `__missing__` finds when the
    word first comes.

    So the packed ids of a text are one b"".join(map(encoder.__getitem__, words)), a loop that runs in C.
    """

    def __init__(self, tokens, merges, digits):
        """See Tokenizer.  Other people's tokenizers may lack some of the 256 bytes."""
        self.byte_ids = {token[0]: i for i, token in enumerate(tokens) if len(token) == 1}
        self.made = [*merges.values()]
        self.ranks = dict(zip(merges, count()))
        self.digits = digits

    def __missing__(self, word):
        known = self.byte_ids
        # a byte without a token is left out, and its neighbours may merge
        ids = [-1, *[known[byte] for byte in to_bytes(word) if byte in known], -1]
        replay = merge_long if len(ids) > 200 else merge    # about where it becomes the faster one
        packed = array("H", replay(ids, self.ranks, self.made)).tobytes()
        if len(word) <= 64:                 # longer ones hardly come again
            if len(self) >= MAX_ENTRIES:
                self.clear()
            self[word] = packed
        return packed

    def pack(self, text):
        """str or bytes -> ids packed in the machine's byte order, little-endian on all that this runs on."""
        packed = bytearray()
        for words in split_words(to_str(text), self.digits):
            packed += b"".join(map(self.__getitem__, words))
        return packed


# ------------------------------------------------------------------------------------------------------------
# 5. Large files: documents, chunks

# ^<\|endoftext\|>\r?$ but it looks for the start of the line last: a pattern that begins with plain bytes
# is found much faster
SEPARATOR = re.compile(rb"<\|endoftext\|>(?<=^<\|endoftext\|>)\r?$", re.MULTILINE)
# one separator or several, and the line ends behind each
SEPARATORS = re.compile(SEPARATOR.pattern + rb"[\r\n]*(?:^<\|endoftext\|>\r?$[\r\n]*)*", re.MULTILINE)


def read_documents(path, start, end):
    """The documents in a part of a corpus: the texts between lines that hold only <|endoftext|>, without the
    line ends next to these. If a separator comes first, the first document is empty; likewise the last. No
    other is empty."""
    *texts, last = SEPARATORS.split(read_chunk(path, start, end))
    return [*(text.rstrip(b"\r\n") for text in texts), last]


# bytes of a file encoded at a time
CHUNK = 1 << 20


def find_cut(window):
    """Where a file may be cut: an offset into these bytes, so that both sides give the ids that they give
    together.

    A cut must not divide a word, or a separator line and the line ends that belong to it. So it is at the
    first place before white space that follows something else (but not ">", which may end a separator), or
    after a run of letters or of digits (but not before "<" or "|", which may be in a separator), or after a
    separator and its line ends. 64 KiB without such a place, as of one letter, are cut in the middle, between
    two characters: memory stays bounded.
    """
    text = to_str(re.sub(rb"^[\x80-\xbf]{1,3}", b"", window))   # begin at a character
    letter, number = char_classes(BMP)
    # never before: what may begin a separator; half a character at the window's end; a character beyond U+FFFF
    other = "<|\udc80-\udcff\U00010000-\U0010FFFF"
    cut = re.search(f"[^{SPACE}>](?=[{SPACE}])"
                    f"|[{letter}](?=[^{letter}{other}])|[{number}](?=[^{number}{other}])"
                    r"|\n<\|endoftext\|>(\r?\n)+(?=[^\r\n])", text)
    place = cut.end() if cut else len(text) // 2
    return len(window) - len(to_bytes(text[place:]))


def count_chunk(*chunk):
    """The words of a part of a corpus, (path, start, end) -> Counter."""
    return count_words(read_documents(*chunk))


def encode_chunk(encoder, separator, *chunk):
    """A part of a corpus -> packed ids, with those of `separator` between the documents."""
    return separator.join(map(encoder.pack, read_documents(*chunk)))


def split_point(path):
    """Byte at which the validation part of a file starts: the last 1%, but at least 100 kB, and at most 10%
    and 4 MB (about 1M tokens).  The cut moves to the nearest document boundary, else to the nearest line.  A
    text without lines is cut where that is, also within a character: tokens are made of bytes.  Text before
    the cut is for training.  Where separators stand near it, no document is in both parts."""
    size = os.path.getsize(path)
    wanted = min(max(size // 100, 100_000), 4_000_000)
    low = size - min(size // 10, 32_000_000)        # the cut is no earlier
    tail = read_chunk(path, low, size)
    end = len(tail.rstrip())                        # something must be left behind the cut
    target = max(0, min(len(tail) - wanted, end - 1))
    for boundary in SEPARATOR, b"\n":
        cuts = [match.end() for match in re.finditer(boundary, tail) if match.end() < end]
        if cuts:
            return low + min(cuts, key=lambda cut: abs(target - cut))
    return low + target


def tokenizer_sample(parts):
    """Of parts of files, (path, 0, end), what a tokenizer is trained on: everything, or of more than 100 MB about
    a hundred pieces of 1 MB, evenly spread.  Which pairs are frequent is known long before gigabytes are read."""
    total = sum(end for *_, end in parts)
    if total <= 100_000_000:
        return parts
    return [(path, place, min(place + 1_000_000, end))
            for path, start, end in parts
            for place in range(start, end, total // 100)]


# ------------------------------------------------------------------------------------------------------------
# 6. The Tokenizer

class Tokenizer:
    """tokens: [bytes of token id] (b"": no token has this id); merges: {(left id, right id): id made}, in the
    order learned; special: {name: id}; digits: whether each digit is a word (`word_pattern`).

    It also has vocab_size V, and template: the form of conversations, "" or what `known_template` gives.
    """

    def __init__(self, tokens, merges, special, digits=False):
        self.vocab_size = len(tokens)
        self.tokens = tokens
        self.merges = merges
        self.special = special
        self.digits = digits
        self.template = ""
        self.encoder = Encoder(tokens, merges, digits)

    @classmethod
    def train(cls, texts, vocab_size):
        """Learn from an iterable of str or bytes, each a document.

        vocab_size V counts the 256 bytes and the 4 special tokens; a text without enough repeated pairs gives
        fewer.
        """
        return cls.from_words(count_words(texts), vocab_size)

    @classmethod
    def train_files(cls, files, vocab_size, processes=None, progress=None):
        """The same from files, on all cores in bounded memory. files, progress: as for `encode_files`.

        Lines that hold only <|endoftext|> separate documents and are not learned from.
        """
        chunks = [chunk for file in files for chunk in find_chunks(file, 4 * CHUNK, find_cut)]
        words = Counter()
        for counts in run_chunks(count_chunk, chunks, processes, progress):
            words.update(counts)
            if len(words) > MAX_WORDS:                      # a rare word makes no pair frequent
                words = Counter(dict(words.most_common(MAX_WORDS // 2)))
        return cls.from_words(words, vocab_size)

    @classmethod
    def from_words(cls, words, vocab_size):
        """Learn from the counts of words, a Counter as `count_words` gives."""
        least = 256 + len(SPECIAL_TOKENS)
        require(least <= vocab_size <= 65_536, f"A vocabulary has {least} to 65,536 tokens, not {vocab_size}.")
        tokens = [bytes([byte]) for byte in range(256)]
        merges = {}
        for left, right in learn_merges(words, vocab_size - least):
            merges[left, right] = len(tokens)
            tokens.append(tokens[left] + tokens[right])
        special = dict(zip(SPECIAL_TOKENS, count(len(tokens))))
        tokens += map(str.encode, special)
        return cls(tokens, merges, special)

    def encode(self, text):
        """str or bytes -> list of ids, never a special one; decode_bytes gives the same bytes back, whatever
        they are.
        """
        return array("H", self.encoder.pack(text)).tolist()

    def decode_bytes(self, ids):
        """Iterable of ids -> bytes; a special token gives its name."""
        return b"".join(self.tokens[token] for token in ids)

    def decode(self, ids):
        """Iterable of ids -> str; bytes that are not UTF-8, as when a token ends inside a character, become
        U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def special_id(self, *names):
        """The id of the first of these special tokens that there is."""
        for name in names:
            if name in self.special:
                return self.special[name]
        raise ValueError(f"The tokenizer has no special token {names[0]}.")

    def encode_file(self, path, out, processes=None, progress=None):
        """Encode a file into a file: see `encode_files`."""
        return self.encode_files([path], out, processes, progress)

    def encode_files(self, files, out, processes=None, progress=None):
        """Encode files, one after the other, into little-endian uint16 ids in the file `out`, which is
        replaced when all is written; returns how many they are.  files: paths, or (path, start, end) for a
        part in bytes.

        Lines that hold only <|endoftext|>, with the empty lines around them, become the one id of
        <|endoftext|> (or what stands in its place: TEXT_ENDS). The last document of each file ends with it,
        too. There are no empty documents. Memory is bounded: chunks of 1 MiB (`find_cut` says where), on all
        cores or in `processes`. progress(done bytes, all bytes) is called for each chunk.
        """
        boundary = array("H", [self.special_id(*TEXT_ENDS)]).tobytes()
        encode = partial(encode_chunk, self.encoder, boundary)
        parts = [find_chunks(file, CHUNK, find_cut) for file in files]
        results = run_chunks(encode, [*chain(*parts)], processes, progress)
        with replace_file(out) as file:
            for part in parts:
                last = boundary
                for _, ids in zip(part, results):       # part first: zip then takes no result too many
                    if last == boundary:                # no document is empty
                        ids = ids.removeprefix(boundary)
                    file.write(ids)
                    last = ids[-2:] or last
                if last != boundary:
                    file.write(boundary)
            return file.tell() // 2

    def prompt(self, text, room=None, system=None, first=True):
        r"""The ids of a turn up to where the answer begins, in the form of `template`; put together from
        ids, since text can never become a special token:

            ours    <|user|>[SYSTEM\n\n]TEXT<|end|><|assistant|>
            ChatML  [<|im_start|>system\nSYSTEM<|im_end|>\n]<|im_start|>user\nTEXT<|im_end|>\n
                    <|im_start|>assistant\n  (in one line)

        text, system: str or bytes.  What is in brackets stands in the first turn alone, if there is a system
        text: this one, or with None the template's.  In ChatML an empty one has its turn, too, and a turn
        that is not the first begins with the line end that follows the end of the answer before it.

        room: at most so many ids.  Of a longer text the end is kept.  What surrounds the text stays whole,
        unless it is too long by itself: then its beginning goes, too, all but the first id.
        """
        text = to_bytes(to_str(text))
        system = CHATML_SYSTEMS.get(self.template) if system is None else to_bytes(to_str(system))
        if self.template not in CHATML_SYSTEMS:
            before = [self.special_id(USER)]
            head = system + b"\n\n" if system and first else b""
            after = [self.end_of_turn, self.special_id(ASSISTANT)]
        else:
            start = self.special_id("<|im_start|>")
            end = [self.end_of_turn, *self.encode("\n")]
            before = [start]
            if not first:
                before = [*end[1:], start]
            elif system is not None:
                before = [start, *self.encode(b"system\n" + system), *end, start]
            head = b"user\n"
            after = [*end, start, *self.encode("assistant\n")]
        # one piece: other tools, too, encode together what stands between two special tokens
        ids = [*before, *self.encode(head + text), *after]
        if room is None or len(ids) <= room:
            return ids
        frame = len(before) + len(self.encode(head))
        if frame + len(after) > room:
            frame = 1
        return ids[:frame] + ids[frame + len(ids) - room:]

    @property
    def end_of_turn(self):
        """The id that ends an answer."""
        return self.special_id("<|im_end|>" if self.template in CHATML_SYSTEMS else END_OF_TURN)

    def save(self, path):
        """Write a Hugging Face tokenizer.json, which `tokenizers` and `transformers` load with the same ids.

        Their ByteLevel pre-tokenizer holds GPT-2's pattern. It is theirs that would find special tokens in a
        text.
        """
        chars = byte_chars()
        names = [token.decode("latin-1").translate(chars) for token in self.tokens]
        added = []
        for name, i in self.special.items():
            names[i] = name
            added.append({"id": i, "content": name, **SPECIAL})
        words = {"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]} if self.digits else BYTE_LEVEL
        content = {"version": "1.0", "added_tokens": added, "pre_tokenizer": words, "decoder": BYTE_LEVEL,
                   "model": {"type": "BPE", "vocab": {name: i for i, name in enumerate(names) if name},
                             "merges": [f"{names[left]} {names[right]}" for left, right in self.merges]}}
        write_file(path, json.dumps(content, ensure_ascii=False, indent=1).encode())

    @classmethod
    def load(cls, path):
        """Read a tokenizer.json, ours or another byte-level BPE, whose ids have any order.  ValueError if the
        file is damaged, or divides text into other words.  checkpoint.py looks at what else may stand in the
        files of other people (`read_tokenizer`).
        """
        content = read_json(path)
        with refusing(f"{path} is not a tokenizer that tokenizer.py reads"):
            model = content["model"]
            words = content["pre_tokenizer"]
            *first, level = words.get("pretokenizers", [words])
            # trim_offsets makes no difference to ids, and use_regex may be left out
            level = {**BYTE_LEVEL, **level, "trim_offsets": True}
            require(first in ([], [DIGITS]) and level == BYTE_LEVEL and not content.get("normalizer"),
                    "it divides text into other words than GPT-2's and SmolLM's do")
            special = {token["content"]: token["id"] for token in content["added_tokens"]}
            # where both have an id, the vocabulary's counts, as for `tokenizers`
            return cls.from_vocab({**special, **model["vocab"]}, model["merges"], special, bool(first))

    @classmethod
    def from_gpt2(cls, vocab_bpe, encoder_json):
        """GPT-2's own tokenizer from its two files; its only special token is <|endoftext|>."""
        merges = read_chunk(vocab_bpe).decode().splitlines()
        if merges[0].startswith("#version"):
            del merges[0]
        return cls.from_vocab(read_json(encoder_json), merges, [END_OF_TEXT])

    @classmethod
    def from_vocab(cls, vocab, merges, special, digits=False):
        """vocab: {token in printable stand-ins, or name: id}; merges: "left right" or [left, right] each;
        special: names.  An error of any kind for what does not fit together."""
        byte_of = dict(zip(byte_chars(), count()))
        tokens = [b""] * (max(vocab.values()) + 1)
        for name, i in vocab.items():
            tokens[i] = name.encode() if name in special else bytes(byte_of[char] for char in name)
        made = {}
        for parts in merges:
            left, right = parts.split(" ") if isinstance(parts, str) else parts
            made[vocab[left], vocab[right]] = vocab[left + right]
        return cls(tokens, made, {name: vocab[name] for name in special}, digits)


# What stands in a tokenizer.json: GPT-2's words, each digit a word, and how a special token is found in a text.
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}

def byte_chars():
    """What GPT-2's vocabulary files write for each of the 256 bytes: its character in Latin-1 if that can be
    seen, else the next of U+0100, U+0101, ... (so a space is written as U+0120)."""
    others = map(chr, count(0x100))
    return [char if char.isprintable() and char != " " else next(others) for char in map(chr, range(256))]


# ------------------------------------------------------------------------------------------------------------
# 7. Conversations: chat templates

# How a conversation becomes one text (Tokenizer.prompt), for other tools, in Jinja: transformers'
# apply_chat_template gives the same ids. But for one case: such a tool puts a conversation together as text,
# so a "<|end|>" that somebody typed becomes the special token there. Here it stays seven characters.
CHAT_TEMPLATE = """{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) -%}
    {%- if message.role != ('assistant' if loop.index0 % 2 else 'user') -%}
        {{- raise_exception('after one system text at most, the roles must be user and assistant in turn') -}}
    {%- endif -%}
    {{- '<|' + message.role + '|>' + (system + '\n\n' if loop.first and system else '') -}}
    {{- message.content + '<|end|>' -}}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt else '' -}}"""

# The other form that is known: ChatML, as it is written in the folders of SmolLM and others.
CHATML = ("{% for message in messages %}"
          "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
# {template: the system text that it has for a conversation that brings none}; the second template is SmolLM2's.
CHATML_SYSTEMS = {
    CHATML: None,
    CHATML.replace("%}", "%}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a "
                   "helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}", 1):
    b"You are a helpful AI assistant named SmolLM, trained by Hugging Face"}


def known_template(text):
    """Any chat template -> the same as `Tokenizer.template` wants it: "" (none), ours or ChatML.  None if it is
    another one."""
    # Jinja drops a line end at the end, and reads \n in a string as a line end
    tidy = str(text).removesuffix("\n").replace(r"\n", "\n")
    return tidy if tidy in ("", CHAT_TEMPLATE, *CHATML_SYSTEMS) else None


# ------------------------------------------------------------------------------------------------------------
# 8. Looking at it: the command line

def visible(token):
    r"""The bytes of a token as printable text: what cannot be seen as \xNN for each byte, a line end as \n."""
    text = token.replace(b"\\", rb"\\").decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else repr(char.encode())[2:-1] for char in text)


def main(argv):
    parser = Parser(description="Byte-level BPE: how text becomes integers.")
    parser.add_argument("command", choices=["show"], help="print a text with its token boundaries")
    parser.add_argument("text", help="the text, or - for standard input; put -- before a text that begins with -")
    parser.add_argument("--ids", action="store_true", help="print the ids of its tokens")
    parser.add_argument("--tokenizer", help="a tokenizer.json (default: the newest model's)")
    args = parser.parse_args(argv)
    instead = "give --tokenizer a file tokenizer.json"
    tokenizer = Tokenizer.load(args.tokenizer or f"{newest_checkpoint(instead)}/tokenizer.json")
    text = sys.stdin.buffer.read() if args.text == "-" else os.fsencode(args.text)
    ids = tokenizer.encode(text)
    if args.ids:
        print(*ids)
        return
    # a bar between two tokens; after a line end, which is shown as \n, a new line begins
    shown = "|".join(visible(tokenizer.tokens[token]) for token in ids).replace(r"\n|", "\\n|\n")
    print(f"{shown}\n{len(ids)} tokens for {len(text)} bytes, {len(text) / max(len(ids), 1):.2f} bytes a token")


if __name__ == "__main__":
    run_script(main)
