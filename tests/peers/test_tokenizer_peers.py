"""tokenizer.py against independent judges: tiktoken's "gpt2", tokenizers and transformers on our tokenizer.json, and on
tokenizers and templates of other people.

Strings are drawn from the code points that this interpreter's unicodedata assigns: a peer's Unicode may be newer.
"""
import contextlib
import sys
import unicodedata
from pathlib import Path
from random import Random

import pytest
from cases import once_a_module, parametrize
from test_tokenizer import SMOLLM

ROOT = Path(__file__).resolve().parent.parent.parent

import checkpoint  # noqa: E402
import script  # noqa: E402
import sft  # noqa: E402
from tokenizer import CHAT_TEMPLATE, CHATML, SPECIAL_TOKENS, Tokenizer, known_template  # noqa: E402

tiktoken = pytest.importorskip("tiktoken")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
from tiktoken.load import data_gym_to_mergeable_bpe_ranks  # noqa: E402

GPT2 = ROOT.parent / "shared/data/gpt2"
needs_gpt2 = pytest.mark.skipif(not GPT2.is_dir(), reason="the real texts that this test reads are no part of the repository")

ASSIGNED = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) not in ("Cn", "Cs")]
CONTROLS = [char for char in ASSIGNED if unicodedata.category(char) in ("Cc", "Cf", "Zs", "Zl", "Zp")]
MIX = Random(0).choices(ASSIGNED, k=300) + CONTROLS[:40] * 3 + [*"aabcdestmrelv'''  \n\n\t0123.,!-"] * 12
SMOL_SPECIAL = "<|endoftext|> <|im_start|> <|im_end|> <repo_name>".split()

TEXTS = [
    "", "I'd say they've won; don't we'll 'S 're''s!'s I'M IT'S", "a" * 5000, " " * 5000, "9" * 5000, "\n" * 3000,
    " \n" * 2000 + "x", "\r\n\r\n  \t\tx  \r\n", "ab" * 3000, "x" + " " * 999 + "y",
    "Ŷŝ naïve café ČŽ ſ ß İi Ǆ ª º ʰ ﬁ Ελληνικά ΆΐΰΏ русский язык, Ѐѐ עברית מְנֻקָּד العربية ٠١٢٣ ۴۵۶ हिन्दी १२३ क्षत्रिय ไทยภาษา ๑๒๓",
    "한국어 한글 日本語の文章。カタカナ 漢字 〇一二三 中文，没有空格的句子。 Tiếng Việt ქართული ᲐᲑ አማርኛ ፩፪፫ தமிழ் ௧௨௩",
    "👍🏽 👨‍👩‍👧 🇩🇪 ❤️ ☃ ©®™ 𝐀𝐁𝒞 𝟙𝟚 𐍈𐎀 𠀀𠀁 🂡 1½²³Ⅷⅷ①⑳٣௰一", "\x00\x01\x1c\x1d\x1e\x1f\x7f\x80\x85\xa0\u180e\u200b\u2028\u2060\u3000\ufeff",
    " ".join("ab中文١é=-") * 9, Path(contextlib.__file__).read_text()]


def random_texts(alphabet, count):
    rng = Random(count)
    return ["".join(rng.choices(alphabet, k=rng.randrange(1, 40))) for _ in range(count)]


@once_a_module
def texts():
    """Fixed texts, long words, strings of any assigned code points, of controls and white space, of a mix."""
    long = ["".join(Random(1).choices(kind, k=2000)) for kind in ("ab", "abcdefghij", "中文字", "a١é", "=-")]
    return [*TEXTS, *long, *(text for kind in (ASSIGNED, CONTROLS, MIX) for text in random_texts(kind, 3000))]


def first_differences(ours, theirs, texts):
    return [ascii(text)[:200] for a, b, text in zip(ours, theirs, texts, strict=True) if a != b][:5]


@needs_gpt2
def test_gpt2_ids_equal_tiktoken(texts):
    """Every code point, too, is of the kind that the judge takes it for."""
    files = [str(GPT2 / name) for name in ("vocab.bpe", "encoder.json")]
    gpt2 = Tokenizer.from_gpt2(*files)
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    judge = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=data_gym_to_mergeable_bpe_ranks(*files),
                              special_tokens={"<|endoftext|>": 50256})
    texts = [*texts, "".join(f"a{char}1{char} {char}" for char in ASSIGNED)]
    theirs = map(judge.encode_ordinary, texts)
    assert gpt2.vocab_size == judge.n_vocab and first_differences(map(gpt2.encode, texts), theirs, texts) == []


def foreign(digits, alphabet, special, texts):
    """A tokenizer that the library trains.  Its special tokens have the first ids; where there is no initial alphabet,
    the bytes are those that were seen, in any order."""
    pre = tokenizers.pre_tokenizers
    peer = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = pre.ByteLevel(add_prefix_space=False)
    peer.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), level]) if digits else level
    peer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1500, special_tokens=special, show_progress=False,
                                             initial_alphabet=pre.ByteLevel.alphabet() if alphabet else [])
    peer.train_from_iterator(texts, trainer)
    return peer


@parametrize("kind", [None, (False, True, SMOL_SPECIAL), (True, True, []), (False, False, SMOL_SPECIAL)])
def test_each_reads_the_files_of_the_other(kind, texts, tmp_path):
    """Ours; and what others trained; as they write it, as we write it, and as transformers does."""
    path = f"{tmp_path}/tokenizer.json"
    if kind:
        foreign(*kind, TEXTS if kind[1] else TEXTS[-2:]).save(path)
    else:
        Tokenizer.train(TEXTS, 3000).save(path)
    for _ in range(3):
        ours, peer = checkpoint.read_tokenizer(str(tmp_path)), tokenizers.Tokenizer.from_file(path)
        theirs = [encoding.ids for encoding in peer.encode_batch(texts, add_special_tokens=False)]
        assert first_differences(map(ours.encode, texts), theirs, texts) == []
        assert first_differences(map(ours.decode, theirs), peer.decode_batch(theirs, skip_special_tokens=False), texts) == []
        # the one difference: they look for special tokens in a text, which we never do
        names, auto = "".join(ours.special), transformers.PreTrainedTokenizerFast(tokenizer_file=path)
        assert auto.encode(names) == [*ours.special.values()] and not {*ours.encode(names)} & {*ours.special.values()}
        assert len(ours.tokens) == len(auto)
        auto.save_pretrained(tmp_path)
        ours.save(path)


# Conversations

TURNS = [("Hi", "Hello!"), ("  two spaces", "yes"), ("\n\nlines\n", "no "), ("", "empty"), ("1 2\t3", "\u4e2d\u6587"), ("'s \n x ", "ok")]


@parametrize("template", [CHATML, CHATML.replace("\n", "\\n"), SMOLLM, CHAT_TEMPLATE])
def test_conversations_equal_apply_chat_template(template, tmp_path):
    foreign(True, True, [*SPECIAL_TOKENS, "<|im_start|>", "<|im_end|>"], TEXTS).save(f"{tmp_path}/tokenizer.json")
    ours = Tokenizer.load(tmp_path / "tokenizer.json")
    auto = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{tmp_path}/tokenizer.json")
    ours.template = known_template(template)
    rng = Random(11)
    for system in [None, "Be brief.", " \n x\n", ""] * 5:
        messages = [] if system is None else [{"role": "system", "content": system}]
        ids = []
        for text, answer in rng.choices(TURNS, k=rng.randrange(1, 5)):
            messages += [{"role": "user", "content": text}]
            ids += ours.prompt(text, system=system, first=not ids)
            # the known form is a template, too, and says the same
            for form in template, ours.template:
                assert ids == auto.apply_chat_template(messages, chat_template=form, add_generation_prompt=True, return_dict=False)
            messages += [{"role": "assistant", "content": answer}]
            ids += [*ours.encode(answer), ours.end_of_turn]
        row, _ = sft.make_row(ours, script.make_turns(messages), 999)
        assert row.tolist() == ids
    if template == CHAT_TEMPLATE:
        with pytest.raises(Exception, match="the roles must be user and assistant in turn"):
            auto.apply_chat_template([*messages, *messages[-1:]], chat_template=template)
