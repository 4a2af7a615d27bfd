r"""Byte-level BPE: how text becomes the integers that the model reads, and back.

Read before it: nothing; this is the first file.  Section 1 is the whole idea, in three short functions.

A language model needs a finite alphabet.  Single characters make long sequences, and whole words make an endless
vocabulary.  Byte pair encoding (Sennrich, Haddow and Birch 2016, "Neural Machine Translation of Rare Words with
Subword Units") lies between: begin with single symbols, and again and again glue the most frequent pair of
neighbours into a new symbol.  GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners")
took the 256 bytes as the first symbols.  So every text in every script has an encoding, and so has a damaged file.

    "low lower"  --words-->   "low", " lower"
    " lower"     --bytes-->   32 108 111 119 101 114      a space, l, o, w, e, r
                 --merges-->  32 256 119 101 114          merge 0 is (l, o) = (108, 111): it makes 256, "lo"
                              32 257 101 114              merge 1 is (lo, w) = (256, 119): it makes 257, "low"

The pair (l, o) occurs twice, and so does (o, w).  Of two such pairs the one with the smaller left id goes first.  If
the left ids are equal, the smaller right id decides.  So nothing is left to chance.  Now no pair occurs twice, so the
merges end: " lower" is 4 tokens in place of 6 bytes.

Sections: 1 the idea; 2 words; 3 learning, fast; 4 encoding, fast; 5 the Tokenizer; 6 large files (optional);
7 conversations (optional); 8 tokenizer.json (optional); 9 the command line.

What it does not do: it splits a text into words only as GPT-2 and SmolLM do (section 2), and has at most 65,536 tokens
(an id takes 16 bits).  `encode` does not normalize, pad or truncate a text, and it gives no offsets.  (Only `prompt`
shortens a text: a question that is too long for the model.)
"""
import json
import os
import re
import unicodedata
from array import array
from collections import Counter, defaultdict
from functools import cache, partial
from heapq import heapify, heappop, heappush
from itertools import chain, count, islice, pairwise

# Plumbing: errors, files, processes.  script.py explains it, and it can wait.
from script import (Parser, find_chunks, newest_checkpoint, read_chunk, read_json, refusing, replace_file, require,
                    run_chunks, run_script, visible, write_file)


# ------------------------------------------------------------------------------------------------------------
# 1. The idea: learn merges, then replay them
# ------------------------------------------------------------------------------------------------------------

# An example: the words "hug" 10 times, "pug" 5 times, "hugs" 5 times.  The bytes: g 103, h 104, p 112, s 115, u 117.
# The pair (h, u) occurs 15 times: 10 times in "hug" and 5 times in "hugs".
#
#     (u, g) 20, (h, u) 15, (p, u) 5, (g, s) 5     merge 0 is (u, g) = (117, 103): it makes 256, "ug"
#     (h, ug) 15, (p, ug) 5, (ug, s) 5             merge 1 is (h, ug) = (104, 256): it makes 257, "hug"
#     (p, ug) 5, (hug, s) 5                        a tie: merge 2 is the smaller, (p, ug) = (112, 256): 258, "pug"
#     (hug, s) 5                                   merge 3 is (hug, s) = (257, 115): it makes 259, "hugs"
#
# Now no pair is left, and the list ends.
def learn_merges_plain(words, most_merges):
    """{word: how often it occurs} -> list of at most `most_merges` merges, pairs of ids.  Merge i makes the id 256 + i.

    Among pairs that occur equally often, the smallest is taken: first by its left id, then by its right id.  The
    list ends when no pair occurs more than once: what occurs once is no pattern.  All pairs are counted again for each
    merge.  `learn_merges` gives the same list faster."""
    ids_of = {word: [*to_bytes(word)] for word in words}
    merges = []
    for new_id in range(256, 256 + most_merges):
        counts = Counter()
        for word, ids in ids_of.items():
            for pair in pairwise(ids):
                counts[pair] += words[word]
        most = max(counts.values(), default=0)
        if most < 2:
            break
        best = min(pair for pair in counts if counts[pair] == most)
        merges.append(best)
        for word in words:
            ids_of[word] = replace_pair(ids_of[word], best, new_id)
    return merges


def replace_pair(ids, pair, new_id):
    """Glue each such pair of neighbours into one new id, from left to right: in "aaa" the first two are glued.
    In "aaaa" with the pair (a, a) and the new id X:  a a a a -> X a a -> X X.  (X and the next a are another pair.)"""
    replaced = []
    for token in ids:
        if replaced and (replaced[-1], token) == pair:
            replaced[-1] = new_id
        else:
            replaced.append(token)
    return replaced


# "hugs" with the merges of the example: its bytes are 104 117 103 115.  Merge 0, (117, 103), makes 104 256 115;
# merge 1, (104, 256), makes 257 115; merge 2 does not occur; merge 3, (257, 115), makes 259.
def encode_word_plain(word, merges):
    """The ids of a word: its bytes, on which the merges are replayed in the order in which they were learned.
    `encode_word` gives the same ids faster: it looks only for merges that fit."""
    ids = [*to_bytes(word)]
    for new_id, pair in enumerate(merges, 256):
        ids = replace_pair(ids, pair, new_id)
    return ids


# ------------------------------------------------------------------------------------------------------------
# 2. Text into words
# ------------------------------------------------------------------------------------------------------------
# Merges stay inside a word.  Otherwise "dog.", "dog!" and "dog?" would each take a token, three for one meaning.
# A word is one of these:
#
#     a contraction, such as 'll
#     letters, or digits, or other signs; one space before them belongs to the word
#     white space
#
# GPT-2's pattern says so:
#
#     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
#
#     "I'd say 42!"     ->  "I", "'d", " say", " 42", "!"
#     "a   b"           ->  "a", "  ", " b"
#     "a\n\nb"          ->  "a", "\n", "\n", "b"
#
# \s+(?!\S) is white space that no word follows.  In "a   b" `re` first tries the three spaces: b follows, so they do
# not match.  Then it tries two: a space follows, so they match, and one space is left over.  It goes to the word b.  If
# a tab or a line end is left over, as in the third example, it is a word by itself, which the last \s+ takes.
#
# For SmolLM (a small model of Hugging Face) and others each digit is a word, and GPT-2's pattern splits what lies
# between digits.  There the space before a number is the last of its piece, so it is a word of its own:
#
#     "I'd say 42!"     ->  "I", "'d", " say", " ", "4", "2", "!"

# White space, to stand inside the [...] of a pattern.  In GPT-2's pattern \s is Unicode's White_Space.  Python's own \s
# also takes the separators \x1c to \x1f.  (\t-\r is the range from tab to carriage return.)
SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


@cache
def char_classes(limit):
    r"""-> the insides of two classes [...] of `re`: letters, \p{L}, and numbers, \p{N}, up to the code point `limit`.

    `re` has no \p{...}, so the ranges come from unicodedata.  A character that is newer than this Python's
    Unicode is neither."""
    kinds = "".join([unicodedata.category(chr(code))[0] for code in range(limit + 1)])      # of "Lu" the first letter
    classes = []
    for kind in "LN":
        runs = re.finditer(f"{kind}+", kinds)
        classes.append("".join(f"{chr(run.start())}-{chr(run.end() - 1)}" for run in runs))
    return classes


@cache
def word_pattern(limit, digits):
    """GPT-2's pattern, above, as a pattern of `re`.  With digits=True it is SmolLM's."""
    letter, number = char_classes(limit)
    numbers = f" ?[{number}]+"
    # (?!\S) of GPT-2's pattern is (?![^ \t\n...]) here: white space follows, or the text ends.  In SmolLM's pattern a
    # digit may follow, too, because the space before a number is a word of its own there: may_follow then has the
    # digits as well.
    may_follow = SPACE
    if digits:
        numbers = f"[{number}]"
        may_follow += number
    return re.compile(f"'(?:[stmd]|re|ve|ll)| ?[{letter}]+|{numbers}| ?[^{SPACE}{letter}{number}]+"
                      f"|[{SPACE}]+(?![^{may_follow}])|[{SPACE}]+")


# You can skip this.  It changes nothing in the result, only the speed.  There are two patterns: one knows the letters
# and numbers up to U+FFFF, the other all of them, up to U+10FFFF.  The second is four times as slow, because `re` tries
# the ranges beyond U+FFFF one by one.  It is used only for parts of a text that have characters beyond U+FFFF (of rare
# scripts, mathematics, emoji).  A part has about 4,000 characters (any such size would do).  It ends between a
# character that is no white space and one that is, because a new word always begins there.
PART = re.compile(f"(?s).{{4096}}.*?[^{SPACE}](?=[{SPACE}])|.+")


def split_words(text, digits=False):
    """The words of a str, in order; joined they are the text.  Yields one list of words for each part of the text."""
    for part in PART.findall(text):
        rare = not part.isascii() and re.search("[\U00010000-\U0010FFFF]", part)
        yield word_pattern(0x10FFFF if rare else 0xFFFF, digits).findall(part)


# A file may hold bytes that are not UTF-8.  Python can keep such a byte in a str, as one of the code points U+DC80 to
# U+DCFF, which no valid text has ("lone surrogates").  But somebody may pass us a str that already holds such a code
# point.  In both cases to_bytes gives the bytes that the text stands for:
#
#     to_str(b"\xff")    is "\udcff" (surrogateescape), and to_bytes makes b"\xff" of it
#     to_str("\udcff")   makes one such code point of each of its three bytes in UTF-8, ED B3 BF (surrogatepass), and
#                        to_bytes makes these three bytes of them
def to_str(text):
    """str or bytes -> a str from which `to_bytes` makes the same bytes, whatever they are."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return str(data, "utf-8", "surrogateescape")


def to_bytes(word):
    """The UTF-8 bytes of a str that `to_str` gave."""
    return word.encode("utf-8", "surrogateescape")


# ------------------------------------------------------------------------------------------------------------
# 3. Learning, fast
# ------------------------------------------------------------------------------------------------------------
def count_words(texts):
    """Iterable of str or bytes -> Counter of words, as our own tokenizers split them."""
    words = Counter()
    for text in texts:
        for part in split_words(to_str(text)):
            words.update(part)
    return words


def learn_merges(words, most_merges):
    """What `learn_merges_plain` does, faster.  All words stand in one long row of ids, each word once, with its count
    as a weight.  Each pair knows the positions where it has stood.  So a merge visits only these, and skips those where
    the pair is gone.  At each of the rest it corrects the counts of the pairs on both sides.  A heap gives the most
    frequent pair.  (Why this is fast: below.)"""
    # arrays ("i": 32 bits each, "q": 64), because lists take three to four times the memory
    id_at = array("i", [-1])      # the id at each position; -1 between two words, and where a merge took an id away
    weight = array("q", [0])      # how often the word of this position occurs
    for word, times in words.items():
        ids = [*to_bytes(word), -1]
        id_at.extend(ids)
        weight.extend([times] * len(ids))
    # The row is a linked list: after[p] is the next position that still has an id, before[p] the one before.  A merge
    # unlinks its right id.
    before = array("q", range(-1, len(id_at) - 1))
    after = array("q", range(1, len(id_at) + 1))

    counts = Counter()
    # {pair: an array of its positions, in ascending order}; partial(array, "q") makes the empty array of a new pair
    positions = defaultdict(partial(array, "q"))
    for position, pair in enumerate(pairwise(id_at)):
        if -1 not in pair:
            counts[pair] += weight[position]
            positions[pair].append(position)

    # The order of this heap breaks ties: the highest count first, then the smallest pair.  A sorted list is a heap.
    heap = sorted((-times, pair) for pair, times in counts.items())
    merges = []
    while heap and -heap[0][0] > 1 and len(merges) < most_merges:
        minus_count, pair = heappop(heap)
        if minus_count != -counts[pair]:
            # This entry is old, and too high: since it was pushed, merges took some occurrences of its pair.  (They
            # make only new pairs, so no older count grows.)  Push the true count
            heappush(heap, (-counts[pair], pair))
            continue
        left, right = pair
        new_id = 256 + len(merges)
        merges.append(pair)
        new_pairs = defaultdict(partial(array, "q"))        # {pair that contains the new id: its positions}
        # positions   p_before   p_left  p_right  p_after
        # ids         id_before  left    right    id_after     become     id_before  new_id  (taken away)  id_after
        for p_left in positions.pop(pair):
            p_right = after[p_left]
            if id_at[p_left] != left or id_at[p_right] != right:
                # An earlier merge took one of the two.  Or this one did: in "aaa" the pair (a, a) stands at 0 and at 1.
                # The merge at 0 takes the a at 1, so the visit at 1 is skipped
                continue
            p_before = before[p_left]
            p_after = after[p_right]
            id_before = id_at[p_before]         # -1 where the word begins with left
            id_after = id_at[p_after]           # -1 where it ends with right
            times = weight[p_left]
            if id_before != -1:
                counts[id_before, left] -= times
                counts[id_before, new_id] += times
                new_pairs[id_before, new_id].append(p_before)
            if id_after != -1:
                counts[right, id_after] -= times
                counts[new_id, id_after] += times
                new_pairs[new_id, id_after].append(p_left)
            id_at[p_left] = new_id
            id_at[p_right] = -1
            after[p_left] = p_after
            before[p_after] = p_left
        del counts[pair]
        positions.update(new_pairs)             # these pairs are new: they hold new_id
        for new_pair in new_pairs:
            heappush(heap, (-counts[new_pair], new_pair))
    return merges


# Why learn_merges is fast.  The row has n bytes, so `positions` has fewer than n entries at first.  Where two ids
# become one, the row loses an id, so that happens fewer than n times; and `positions` gets at most two more entries.
# So it gets fewer than n + 2n entries in all, and each is visited once.  A visit costs a few steps and at most four
# entries of the heap: for two new pairs, and for two older ones, whose entries are too high now and are pushed once
# more.


# ------------------------------------------------------------------------------------------------------------
# 4. Encoding, fast
# ------------------------------------------------------------------------------------------------------------
def encode_word(ids, rank_of, made_by):
    """The ids of one word's bytes -> the ids of its tokens.  As long as a merge fits, it takes the one that was learned
    first, at its leftmost place.

    Why this gives the ids of `encode_word_plain`: a merge makes only pairs that hold its new id, and only later merges
    can glue these.  So no earlier merge ever fits again, and the lowest rank that fits is the merge that
    `encode_word_plain` does next.

    ids: with -1 at both ends.  -1 merges with nothing, so each id that can merge has two neighbours;
    rank_of: {(left id, right id): the rank of their merge, 0 for the one that was learned first};
    made_by: made_by[rank] is the id that this merge makes.

    ranks[place] is the rank of the pair that begins at this place, None if no merge glues it.  The heap holds (rank,
    place) of the pairs that may merge.  A merge leaves its id at the left place, and None at the right one.  "hug" with
    the example's merges (117, 103), which makes 256, and (104, 256), which makes 257:

        ids     -1 104 117 103 -1        -1 104 256 None -1        -1 257 None None -1
        ranks   None None 0 None         None 1 None None          None None None None

    There are fewer than n merges, each pushes at most two entries, and a push takes log n steps.  So a word of n bytes
    takes about n log n steps, also one of a million bytes without a space.  (A run of None is the rest of one token.
    So a loop below skips at most the bytes of one token.)"""
    get = rank_of.get
    ranks = list(map(get, pairwise(ids)))
    heap = [(rank, place) for place, rank in enumerate(ranks) if rank is not None]
    heapify(heap)
    while heap:
        rank, left = heappop(heap)
        if ranks[left] != rank:
            continue                # this entry is old: another merge took one of the two ids
        right = left + 1
        while ids[right] is None:
            right += 1
        before = left - 1
        while ids[before] is None:
            before -= 1
        after = right + 1
        while ids[after] is None:
            after += 1
        merged = ids[left] = made_by[rank]
        ids[right] = ranks[right] = None
        # the two new pairs
        new_rank = ranks[before] = get((ids[before], merged))
        if new_rank is not None:
            heappush(heap, (new_rank, before))
        new_rank = ranks[left] = get((merged, ids[after]))
        if new_rank is not None:
            heappush(heap, (new_rank, left))
    return [token for token in ids[1:-1] if token is not None]


# about 40 MB; the cache is emptied when it is full
MAX_CACHED_WORDS = 250_000


class Encoder(dict):
    """A cache, {word: its ids}.  It encodes a word when it is first asked for: Python calls `__missing__` for
    a key that a dict lacks.  The ids are packed as uint16, as a file of tokens holds them.  So the ids of a text are
    one b"".join, which is fast because it runs in C."""

    def __init__(self, tokens, merges, digits):
        """tokens: the bytes of each id; merges: {(left id, right id): id}; digits: whether each digit is a word."""
        self.byte_ids = {token[0]: i for i, token in enumerate(tokens) if len(token) == 1}
        self.made_by = [*merges.values()]
        self.rank_of = dict(zip(merges, count()))
        self.digits = digits

    def __missing__(self, word):
        byte_ids = self.byte_ids
        # Other people's tokenizers may lack a byte.  It is left out, and its neighbours may merge.
        ids = [-1, *[byte_ids[byte] for byte in to_bytes(word) if byte in byte_ids], -1]
        packed = array("H", encode_word(ids, self.rank_of, self.made_by)).tobytes()
        if len(word) <= 64:                 # longer ones hardly come again; 60 or 70 would do as well
            if len(self) >= MAX_CACHED_WORDS:
                self.clear()
            self[word] = packed
        return packed

    def pack(self, text):
        """str or bytes -> its ids, packed in the machine's byte order (a big-endian machine was never tried)."""
        packed = bytearray()
        for words in split_words(to_str(text), self.digits):
            packed += b"".join(map(self.__getitem__, words))
        return packed


# ------------------------------------------------------------------------------------------------------------
# 5. The Tokenizer
# ------------------------------------------------------------------------------------------------------------
# Special tokens.  `encode` never makes one from a text: "<|end|>" typed by a user is seven ordinary characters.
# Otherwise a user could end his own turn and write the answer himself.  The one exception is a corpus on disk, where a
# line that holds only <|endoftext|> separates documents (section 6).
SPECIAL_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")
END_OF_TEXT, USER, ASSISTANT, END_OF_TURN = SPECIAL_TOKENS
# Other tokenizers have other names for <|endoftext|>.  The first of these that a tokenizer has is taken.  The last one,
# <|im_end|>, ends a turn: some tokenizers have no token for the end of a text, and then it serves for that, too.
TEXT_ENDS = END_OF_TEXT, "<|end_of_text|>", "</s>", "<|im_end|>"


class Tokenizer:
    """tokens    a list of bytes: tokens[id] is what the id stands for, b"" where it is unused
    merges    {(left id, right id): the id that they make}, in the order learned (learn_merges gives the pairs alone)
    special   {name: id}
    digits    whether each digit is a word

    A Tokenizer also has vocab_size V, and template: the form of conversations (section 7), "" until somebody sets it.
    In our tokenizers the ids are: the 256 bytes, the merges in the order learned, the special tokens."""

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
        """Learn from an iterable of str or bytes, each a document.  vocab_size V counts the 256 bytes and the 4
        special tokens, too.  A text without enough repeated pairs gives fewer tokens."""
        return cls.from_words(count_words(texts), vocab_size)

    @classmethod
    def from_words(cls, words, vocab_size):
        """Learn from the counts of words, a Counter as `count_words` gives.  The merges depend on these alone: not
        on the order of the words, nor on the number of processes that counted them."""
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
        """str or bytes -> list of ids, never a special one.  `decode_bytes` gives the same bytes back, whatever
        they are.  (Other people's tokenizers may lack a byte, which is left out then.)"""
        return array("H", self.encoder.pack(text)).tolist()

    def decode_bytes(self, ids):
        """Iterable of ids -> bytes; a special token gives its name."""
        return b"".join(self.tokens[token] for token in ids)

    def decode(self, ids):
        """Iterable of ids -> str.  Bytes that are not UTF-8, as when a token ends inside a character, become
        U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_plain(self, ids):
        """Iterable of ids -> str, without the special tokens."""
        return self.decode(token for token in ids if token not in self.special.values())

    def special_id(self, *names):
        """The id of the first of these names that this tokenizer has as a special token."""
        for name in names:
            if name in self.special:
                return self.special[name]
        raise ValueError(f"The tokenizer has no special token {names[0]}.")

    # Files.  These methods use section 6, and can wait.

    @classmethod
    def train_files(cls, files, vocab_size, progress=None):
        """Learn from files, on several cores if they are large enough.  The memory holds each different word once:
        about 300,000 for 100 MB.  files, progress: as for `encode_files`, with chunks of 4 MiB.  Lines that hold only
        <|endoftext|> separate documents and are not learned from."""
        chunks = [chunk for file in files for chunk in find_chunks(file, 4 * CHUNK, find_cut)]
        words = Counter()
        for counts in run_chunks(count_chunk, chunks, progress):
            words.update(counts)
        return cls.from_words(words, vocab_size)

    def encode_file(self, path, out):
        """Encode a file into a file: see `encode_files`."""
        return self.encode_files([path], out)

    def encode_files(self, files, out, progress=None):
        """Encode files, one after the other, on several cores if they are large enough, into the file `out` of
        little-endian uint16 ids.  Returns the number of ids.  `out` is replaced when all is written.

            a file              what becomes of it
            one                 the ids of "one", <|endoftext|>, the ids of "two", <|endoftext|>
            <|endoftext|>
            two

        A line that holds only <|endoftext|> becomes its id, and the line ends beside it go.  (In other people's
        tokenizers it is the id of the first name in TEXT_ENDS.)  The last document of each file ends with that id, too.
        There are no empty documents.

        files: paths, or (path, start, end) for a part in bytes; progress(done bytes, all bytes) is called after each
        chunk.  A chunk has 1 MiB, so memory is bounded."""
        boundary = array("H", [self.special_id(*TEXT_ENDS)]).tobytes()
        encode = partial(encode_chunk, self.encoder, boundary)
        parts = [find_chunks(file, CHUNK, find_cut) for file in files]
        results = run_chunks(encode, [*chain(*parts)], progress)
        with replace_file(out) as file:
            for part in parts:
                last_packed = boundary                  # at the start as if a document had just ended
                for ids in islice(results, len(part)):  # of this file; the next results are those of the next file
                    if last_packed == boundary:         # no document is empty
                        ids = ids.removeprefix(boundary)
                    file.write(ids)
                    last_packed = ids[-2:] or last_packed       # the last id: two bytes
                if last_packed != boundary:
                    file.write(boundary)
            return file.tell() // 2

    # Conversations.  These methods use section 7, and can wait.

    def prompt(self, text, room=None, system=None, first=True):
        r"""The ids of a user's turn, up to where the answer begins, in the form of `template`:

            ours    <|user|>[SYSTEM\n\n]TEXT<|end|><|assistant|>
            ChatML  [<|im_start|>system\nSYSTEM<|im_end|>\n]<|im_start|>user\nTEXT<|im_end|>\n<|im_start|>assistant\n

        What is in brackets stands only in the first turn; `system` says when.

            text     str or bytes
            room     the most ids that there may be.  If the turn is longer, the text loses its beginning.  If there is
                     no room for what surrounds the text, only the first id and the last room - 1 ids are kept.
            system   str or bytes.  None: the template's own, if it has one.  Empty: ours leaves it out, and ChatML has
                     a system turn with an empty text.
            first    False for a later turn.  In ChatML it begins with the "\n" that ends the answer before it."""
        text = to_bytes(to_str(text))
        system = CHATML_SYSTEMS.get(self.template) if system is None else to_bytes(to_str(system))
        if self.template in CHATML_SYSTEMS:
            before = [CHATML_START]
            if not first:
                before = [b"\n", CHATML_START]
            elif system is not None:
                before = [CHATML_START, b"system\n" + system, CHATML_END, b"\n", CHATML_START]
            head = b"user\n"
            after = [CHATML_END, b"\n", CHATML_START, b"assistant\n"]
        else:
            before = [USER]
            head = system + b"\n\n" if system and first else b""
            after = [END_OF_TURN, ASSISTANT]
        # Head and text are one piece: the ids of "a" + "b" are not always those of "a" and those of "b".  Other tools,
        # too, encode together what stands between two special tokens.
        ids = self.join(*before, head + text, *after)
        if room is None or len(ids) <= room:
            return ids
        # The text loses its beginning:
        #
        #     <|user|> and the system text | beginning of the text | its rest, <|end|><|assistant|>
        #     |---------- front ----------||----- left out -------|
        #
        # (Head and text are encoded together, so an id may belong to both.  Then one id more or less stays: no harm.)
        front = len(self.join(*before, head))
        if front + len(self.join(*after)) > room:        # no room for all that: the first id alone is kept
            front = 1
        surplus = len(ids) - room
        return ids[:front] + ids[front + surplus:]

    def join(self, *pieces):
        """The ids of pieces, one after the other.  A str is the name of a special token, and bytes are text.  So no
        text can become a special token."""
        ids = []
        for piece in pieces:
            ids += [self.special_id(piece)] if isinstance(piece, str) else self.encode(piece)
        return ids

    @property
    def end_of_turn(self):
        """The id that ends an answer."""
        return self.special_id(CHATML_END if self.template in CHATML_SYSTEMS else END_OF_TURN)

    # On disk.  These methods use section 8, and can wait.

    def save(self, path):
        """Write a Hugging Face tokenizer.json, which `tokenizers` and `transformers` load with the same ids.  With one
        difference: those libraries also turn "<|end|>" inside a text into the special token."""
        chars = byte_chars()
        # byte i becomes the character chars[i].  For example b" " is " " in latin-1, with the code point 32, and
        # translate makes chars[32] of it, which is U+0120
        names = [token.decode("latin-1").translate(chars) for token in self.tokens]
        added = []
        for name, i in self.special.items():
            names[i] = name
            added.append({"id": i, "content": name, **SPECIAL})
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]} if self.digits else BYTE_LEVEL
        content = {"version": "1.0", "added_tokens": added, "pre_tokenizer": pre_tokenizer, "decoder": BYTE_LEVEL,
                   "model": {"type": "BPE", "vocab": {name: i for i, name in enumerate(names) if name},
                             "merges": [f"{names[left]} {names[right]}" for left, right in self.merges]}}
        write_file(path, json.dumps(content, ensure_ascii=False, indent=1).encode())

    @classmethod
    def load(cls, path):
        """Read a tokenizer.json, ours or that of another byte-level BPE, whose ids may have any order.  ValueError if
        the file is damaged, or divides text into other words.  What else may stand in the files of other people is
        checked by `read_tokenizer` in checkpoint.py."""
        content = read_json(path)
        with refusing(f"{path} is not a tokenizer that tokenizer.py reads"):
            model = content["model"]
            pre_tokenizer = content["pre_tokenizer"]
            *first, byte_level = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
            # our values where theirs has none; trim_offsets makes no difference to ids
            byte_level = BYTE_LEVEL | byte_level | {"trim_offsets": True}
            require(first in ([], [DIGITS]) and byte_level == BYTE_LEVEL and not content.get("normalizer"),
                    "it divides text into other words than GPT-2's and SmolLM's do")
            special = {token["content"]: token["id"] for token in content["added_tokens"]}
            # where a name stands in added_tokens and in the vocabulary, the vocabulary's id counts, as in `tokenizers`
            return cls.from_vocab(special | model["vocab"], model["merges"], special, bool(first))

    @classmethod
    def from_gpt2(cls, vocab_bpe, encoder_json):
        """GPT-2's own tokenizer from its two files; its only special token is <|endoftext|>."""
        merges = read_chunk(vocab_bpe).decode("utf-8-sig").splitlines()
        if merges[0].startswith("#version"):
            del merges[0]
        return cls.from_vocab(read_json(encoder_json), merges, [END_OF_TEXT])

    @classmethod
    def from_vocab(cls, vocab, merges, special, digits=False):
        """vocab: {token as `byte_chars` writes it, or name of a special token: id}; merges: "left right" or [left,
        right] each; special: names.  Raises some error (KeyError, ValueError, ...) if they do not fit together.  `load`
        turns it into one sentence."""
        require({*vocab.values()} <= {*range(65_536)}, "its ids are not all in 0 to 65,535")
        byte_of = dict(zip(byte_chars(), count()))
        tokens = [b""] * (max(vocab.values()) + 1)
        for name, i in vocab.items():
            tokens[i] = name.encode() if name in special else bytes(byte_of[char] for char in name)
        merged = {}
        for parts in merges:
            left, right = parts.split(" ") if isinstance(parts, str) else parts
            merged[vocab[left], vocab[right]] = vocab[left + right]
        return cls(tokens, merged, {name: vocab[name] for name in special}, digits)


# ------------------------------------------------------------------------------------------------------------
# 6. Large files: documents, chunks
# ------------------------------------------------------------------------------------------------------------
# A line that holds only <|endoftext|> is ^<\|endoftext\|>\r?$.  (With (?m) each line has a beginning ^ and an end $.)
# `re` is much faster if a pattern begins with plain bytes.  So this one finds the name first, and then checks by
# (?<=^...) that the name began a line.  In "see <|endoftext|>" it did not, so that is no separator.
SEPARATOR = re.compile(rb"(?m)<\|endoftext\|>(?<=^<\|endoftext\|>)\r?$")
# one separator or several, and the line ends behind each
SEPARATOR_RUN = re.compile(SEPARATOR.pattern + rb"[\r\n]*(?:^<\|endoftext\|>\r?$[\r\n]*)*")
# bytes of a file that are encoded at a time
CHUNK = 1 << 20


def read_documents(path, start, end):
    """The documents in a part of a corpus: the texts between its separators, without the line ends beside these.
    An empty first or last document says that the part begins or ends with a separator.  (So encode_chunk, which puts a
    boundary between all documents, begins or ends with one there.)  No other document is empty."""
    *texts, last = SEPARATOR_RUN.split(read_chunk(path, start, end))
    return [text.rstrip(b"\r\n") for text in texts] + [last]


def count_chunk(*chunk):
    """The words of a part of a corpus, (path, start, end) -> Counter."""
    return count_words(read_documents(*chunk))


def encode_chunk(encoder, boundary, *chunk):
    """A part of a corpus -> packed ids, with those of `boundary` between the documents."""
    return boundary.join(map(encoder.pack, read_documents(*chunk)))


def find_cut(window):
    """Where a file may be cut: an offset into these bytes of it.  The ids of the two sides, one after the other, are
    the ids of the whole (exceptions: below).  The cut is at the first place that is

        before white space, behind any character but white space and ">" (a separator may end with ">"; the line end
            behind it would then begin the next chunk's text),
        or behind a separator and its line ends.

    If there is no such place, as in a window of one letter alone, it is in the middle, between two characters.  (A
    window has 64 KiB: CUT_WINDOW in script.py.)

    Exceptions: a cut in the middle may divide a word.  And between two separators, with an empty document between them,
    both sides have an id of the boundary; encode_files leaves one out."""
    text = to_str(re.sub(rb"^[\x80-\xbf]{1,3}", b"", window))   # begin at a character
    cut = re.search(f"[^{SPACE}>](?=[{SPACE}])"
                    r"|\n<\|endoftext\|>(\r?\n)+(?=[^\r\n])", text)
    place = cut.end() if cut else len(text) // 2
    # counted from the end, because the beginning may have lost a part of a character
    return len(window) - len(to_bytes(text[place:]))


def split_point(path):
    """The byte at which the validation part of a file begins, which is about

        10%        of a file up to 1 MB
        100 kB     up to 10 MB: with less the loss would have much noise
        1%         up to 400 MB
        4 MB       of a larger one: about 1M tokens, which take seconds

    Then the cut moves to the nearest separator in the last 10% of the file, or in its last 32 MB if that is less.  If
    there is none, it moves to the nearest line.  If there is no line, it stays, even within a character: tokens are
    made of bytes."""
    size = os.path.getsize(path)
    # (of a file below 1 MB this is more than a tenth: then the whole tail, a tenth, is held out)
    held_out = min(max(size // 100, 100_000), 4_000_000)
    low = size - min(size // 10, 32_000_000)        # the cut is not before this byte
    tail = read_chunk(path, low)
    end = len(tail.rstrip())                        # something must be left behind the cut
    target = max(0, min(len(tail) - held_out, end - 1))
    for boundary in SEPARATOR, b"\n":
        cuts = [match.end() for match in re.finditer(boundary, tail) if match.end() < end]
        if cuts:
            return low + min(cuts, key=lambda cut: abs(target - cut))
    return low + target


# ------------------------------------------------------------------------------------------------------------
# 7. Conversations: chat templates
# ------------------------------------------------------------------------------------------------------------
# Tokenizer.prompt puts a conversation together from ids.  A template says the same to other tools, in Jinja:
# transformers' apply_chat_template gives the same ids, with one exception.  Such a tool puts a conversation together
# as text, so a "<|end|>" that somebody typed becomes the special token there.  Here it stays seven characters.
CHAT_TEMPLATE = """{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) -%}
    {%- if message.role != ('assistant' if loop.index0 % 2 else 'user') -%}
        {{- raise_exception('after one system text at most, the roles must be user and assistant in turn') -}}
    {%- endif -%}
    {{- '<|' + message.role + '|>' + (system + '\n\n' if loop.first and system else '') -}}
    {{- message.content + '<|end|>' -}}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt else '' -}}"""

# The other form is ChatML, as it is written in the folders of SmolLM and others.
CHATML_START = "<|im_start|>"
CHATML_END = "<|im_end|>"
CHATML = ("{% for message in messages %}"
          "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
# {template: the system text of a conversation that brings none}.  The second template is SmolLM2's: CHATML with an
# {% if %} ... {% endif %} behind its {% for ... %}, which writes this system text.
CHATML_SYSTEMS = {
    CHATML: None,
    CHATML.replace("%}", "%}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a "
                   "helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}", 1):
    b"You are a helpful AI assistant named SmolLM, trained by Hugging Face"}


def known_template(text):
    """A chat template -> the same as `Tokenizer.template` has it: "" (none), ours or ChatML.  None if it is another
    one."""
    # Jinja drops a line end at the end, and reads \n in a string as a line end
    tidy = str(text).removesuffix("\n").replace(r"\n", "\n")
    return tidy if tidy in ("", CHAT_TEMPLATE, *CHATML_SYSTEMS) else None


# ------------------------------------------------------------------------------------------------------------
# 8. What stands in a tokenizer.json
# ------------------------------------------------------------------------------------------------------------
# GPT-2's words
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# each digit is a word
DIGITS = {"type": "Digits", "individual_digits": True}
# what tokenizer.json says of a special token: it is found exactly as it is written, and the spaces beside it stay
SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def byte_chars():
    """What GPT-2's vocabulary files write for each of the 256 bytes: its character in Latin-1 if that can be seen,
    else the next of U+0100, U+0101, ... (so a space is written as U+0120)."""
    others = map(chr, count(0x100))
    return [char if char.isprintable() and char != " " else next(others) for char in map(chr, range(256))]


# ------------------------------------------------------------------------------------------------------------
# 9. The command line: a text with the boundaries of its tokens
# ------------------------------------------------------------------------------------------------------------
def main(argv):
    parser = Parser(description="Byte-level BPE: how text becomes integers.")
    parser.add_argument("command", choices=["show"], help="print a text with its token boundaries")
    parser.add_argument("text", help="the text; put -- before one that begins with -")
    parser.add_argument("--tokenizer", help="a tokenizer.json (default: the newest model's)")
    args = parser.parse_args(argv)
    tokenizer = Tokenizer.load(args.tokenizer or f"{newest_checkpoint()}/tokenizer.json")
    text = os.fsencode(args.text)
    ids = tokenizer.encode(text)
    shown = "|".join(visible(tokenizer.tokens[token]) for token in ids)        # a line end is shown as \n
    print(f"{shown}\n{len(ids)} tokens for {len(text)} bytes, {len(text) / max(len(ids), 1):.2f} bytes a token")


if __name__ == "__main__":
    run_script(main)
