"""Nothing is silent: what is read is scored and learned whole, and what cannot be read is refused.

The scripts run as a user starts them, on a model of 24,000 parameters."""
import re
import shutil

import numpy as np
import pytest
from cases import once_a_module, parametrize, write
from runs import read_log, refused, run

import checkpoint
import model_cpu

LINES = "<|endoftext|>\n" + "".join(f"{i:03d} bottles of beer, {i * i:05d}.\n" for i in range(105))


@once_a_module
def pretrained(tmp_path_factory):
    """A folder with a text, and a model of it in base/."""
    folder = tmp_path_factory.mktemp("silent")
    write(folder / "text", LINES)
    run("train.py --data text --dim 16 --heads 2 --kv-heads 1 --layers 1 --context 64 --vocab 264 --batch-tokens 256 "
        "--steps 20 --device cpu --out base", folder)
    return folder


@pytest.fixture(autouse=True)
def folder(pretrained, tmp_path, monkeypatch):
    """The current folder is a copy of that one."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pretrained, tmp_path, dirs_exist_ok=True)


@parametrize("length", [500, 40])
@parametrize("context", [64, 48])
def test_every_token_but_the_first_is_scored_once(length, context):
    """In windows side by side, of which the last one is moved back, so that it is full; Windows' line ends change nothing.
    What is scored are the file's own tokens, without one that ends it."""
    write("short", LINES[-length:])
    model, tokenizer = checkpoint.load("base", model_cpu, {}, context)
    tokenizer.encode_file("short", "ids")
    ids = np.fromfile("ids", np.uint16)[:-1]
    losses = []
    for i in range(1, len(ids)):
        begin = min((i - 1) // context * context, max(0, len(ids) - 1 - context))
        logits = model.logits(ids[None, begin:i].astype(int))[0, -1, 0]
        losses.append(np.logaddexp.reduce(logits) - logits[ids[i]])
    write("short", "\ufeff" + LINES[-length:].replace("\n", "\r\n"))
    printed = run(f"train.py --evaluate base --data short --context {context} --device cpu").stdout
    assert float(re.search(r"loss ([\d.]+)", printed)[1]) == pytest.approx(np.mean(losses), abs=2e-4)


# A record of each form of TRL that says exactly what the question is.  U: what the user says, A: the assistant.
EXACT = ['{"prompt": "Q", "chosen": "You.", "rejected": "No."}',
         '{"prompt": [U"Q"}], "chosen": [A"You."}], "rejected": [A"No."}]}',
         '{"prompt": [U"Q"}], "chosen": [U"Q"}, A"You."}], "rejected": [U"Q"}, A"No."}]}',
         '{"chosen": [U"Q"}, A"You."}], "rejected": [U"Q"}, A"No."}]}']
# Several turns; another question than in the prompt; a turn behind the answer; a system text that the prompt has not.
INEXACT = ['{"prompt": "Q", "chosen": [U"Q"}, A"You."}, U"Which?"}, A"That."}], "rejected": [U"Q"}, A"No."}]}',
           '{"prompt": "Q", "chosen": [U"Else?"}, A"You."}], "rejected": [U"Q"}, A"No."}]}',
           '{"prompt": "Q", "chosen": [U"Q"}, A"You."}, A"Both."}], "rejected": [U"Q"}, A"No."}]}',
           '{"question": "Q", "chosen": "You.", "rejected": "No."}',
           '{"prompt": "Q", "chosen": [S"Be kind."}, U"Q"}, A"You."}], "rejected": [U"Q"}, A"No."}]}']


def write_pairs(record):
    """pairs.jsonl: the record with three questions."""
    for letter, role in ("U", "user"), ("A", "assistant"), ("S", "system"):
        record = record.replace(letter + '"', '{"role": "' + role + '", "content": "')
    write("pairs.jsonl", "\n".join(record.replace('"Q"', f'"{i} times?"') for i in range(3)))


def test_pairs_in_every_exact_form_are_the_same_pairs():
    logs = set()
    for record in EXACT:
        write_pairs(record)
        run("rl.py --base base --data pairs.jsonl --steps 2 --out rl --device cpu")
        logs.add(str(read_log("rl")))
    assert len(logs) == 1


@parametrize("record", INEXACT)
def test_pairs_of_other_forms_are_refused_by_number(record):
    write_pairs(record)
    assert "record 1" in refused("rl.py --base base --data pairs.jsonl --steps 2 --out rl --device cpu")
