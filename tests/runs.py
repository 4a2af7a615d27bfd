"""Runs of the scripts, for the tests of train.py and sft.py."""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import attack

import train


def shell_words(options):
    """As a shell has them: an option and its value may stand in one text."""
    return " ".join(options).split()


def run(folder, *arguments, script="train.py", **environment):
    """The script in a fork of this process, which spares the imports -> its CompletedProcess."""
    files = [tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2)]
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.update(environment)
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        sys.stdin, sys.stdout, sys.stderr = open(os.devnull), os.fdopen(1, "w"), os.fdopen(2, "w")
        attack.be(script, shell_words(arguments))
    limit = time.monotonic() + attack.PATIENCE
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > limit:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    said = []
    for file in files:
        file.seek(0)
        said.append(file.read())
        file.close()
    return subprocess.CompletedProcess(arguments, os.waitstatus_to_exitcode(found[1]), *said)


def succeeded(done):
    """-> the CompletedProcess of a script that has left with exit code 0"""
    assert done.returncode == 0, done.stderr
    return done


def assert_refused(done, words):
    """A script left with exit code 2 and one line, in which these words stand."""
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, (done.args, done.stderr)


def read_log(*folder):
    """The log without the seconds, which no run repeats."""
    with open(os.path.join(*folder, "log.jsonl"), encoding="utf-8") as file:
        return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in file]


def steps_of(log):
    return [record for record in log if "loss" in record]


def settings(*options, preset="small", config=None, ranks=None, device="cpu", **defaults):
    """The Settings of a new run of train.py."""
    given = train.given_options(train.parse_arguments(shell_words(["--device", device, "--dry-run", *options])))
    return train.make_settings(given, preset, config or train.CONFIGS[preset], {**train.DEFAULTS[preset], **defaults},
                               ranks or train.Ranks())


def training_of(model, tokenizer=None, settings=None, out="out/x", **state):
    """A Training in one process."""
    state = {"script": "train.py", "tokens": 0, "seconds": 0.0, **state}
    return train.Training(model, tokenizer, settings, state, str(out), train.Ranks())
