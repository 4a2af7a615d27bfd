"""Plants small mistakes, one at a time, in a copy of the project, and lists those that no test notices.

    python tests/mutate.py                                # 300 mistakes, spread evenly over all files: `make mutate`
    python tests/mutate.py kernels.cu train.py --count 60 --seed 1
    python tests/mutate.py flash_attn.cu --barriers       # deletes every barrier, all of which a test has to notice

A mistake is an operator, a number, a condition, a call or a statement that becomes another one. In Python cosmic-ray
makes them (pip install cosmic-ray), in CUDA the regular expressions in CUDA_KINDS below. A place is a line and a kind of
mistake. Places are drawn evenly, then one of the mistakes that are possible there. What does not compile is replaced by
another draw. The files, --count and --seed decide the sample.

Each job has its own copy of the project, and judges a mistake by the tests of its file (SUITES). First come the tests
that enter the function with the mistake, the quick ones before the slow. A test that fails, crashes or hangs has
noticed the mistake. A line is printed for each,

    kernels.cu:117: for (int bit = 16; bit «> -> >=» 0; bit /= 2) x += ...                                 NOT NOTICED

and a table at the end. Some mistakes change nothing: the CPU's compiler makes the same program of them (CUDA only), or
tests/equivalent.txt lists them and no test notices. The exit code is 1 if tests noticed fewer than 95% of the others in
some file, and 2 if nothing could be judged. 60 mistakes of one file take 3 to 20 minutes.
"""
import argparse
import ast
import collections
import concurrent.futures
import contextlib
import functools
import itertools
import json
import os
import queue
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tests/equivalent.txt"
ENOUGH = 95                 # percent
NOT_COPIED = ".git", ".venv", "data", "out", "__pycache__", ".pytest_cache"
# What judges a file: arguments of Python.
SUITES = {file: judges for file, *judges in map(str.split, """\
script.py tests/test_scripts.py tests/test_tokenizer.py tests/test_train_parts.py tests/test_chat.py tests/test_model_cpu.py \
    tests/test_train.py::test_the_progress_line_fits_the_terminal tests/test_train.py::test_clip_inf_clips_nothing_and_a_run_with_it_resumes
tokenizer.py tests/test_tokenizer.py tests/test_scripts.py
model_cpu.py tests/test_model_cpu.py tests/test_scripts.py tests/test_gradcheck.py gradcheck.py
checkpoint.py tests/test_checkpoint.py tests/test_shelf.py tests/test_train_parts.py tests/test_train.py
model_gpu.py tests/test_model_gpu.py tests/test_kernels.py
train.py tests/test_train_parts.py tests/test_train.py tests/test_scripts.py tests/test_attack.py tests/test_ranks.py
sft.py tests/test_sft.py tests/test_ranks.py
rl.py tests/test_rl.py
chat.py tests/test_chat.py
gradcheck.py tests/test_gradcheck.py tests/test_exercises.py gradcheck.py
tests/exercises.py tests/test_exercises.py
kernels.cu tests/test_kernels.py tests/test_model_gpu.py
flash_attn.cu tests/test_flash.py""".splitlines())}
OPTIONS = {"kernels.cu": [f"-DBF16={bf16} -DROW_THREADS=96" for bf16 in (0, 1)],
           "flash_attn.cu": [f"-DHEAD_DIM={D} -DHOPPER={hopper}" for D, hopper in ((32, 0), (64, 0), (128, 0), (64, 1))]}
REFUSED = "the compiler"
SKIPPED_TESTS = "not compiles and not launches_them_so"     # of the compiler for GPUs, and of model_gpu.py's table

# Given to every copy: notes in the run without a mistake how long each test takes and which functions it enters, and in
# all others runs the tests first that enter the function with the mistake, the quick ones before those of more than a
# second, and otherwise by file, so that what the tests of a file share is made once.
CONFTEST = """
import json, os, pathlib, sys
import pytest
ROOT = pathlib.Path(__file__).parent
NOTES = ROOT / "notes.json"
known, noted = json.loads(NOTES.read_text()) if NOTES.exists() else {}, {}
function = os.environ.get("MUTATED_FUNCTION")

def pytest_collection_modifyitems(items):
    def order(item):
        seconds, entered = known.get(item.nodeid, (0, []))
        return function not in entered, seconds > 1, str(item.path), seconds
    items.sort(key=order)

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    codes = set()
    if not known:
        sys.settrace(lambda frame, event, argument: codes.add(frame.f_code))
    result = yield
    sys.settrace(None)
    noted.setdefault(item.nodeid, [0, []])[1] = [
        f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}" for code in codes
        if os.path.dirname(code.co_filename) == str(ROOT)]
    return result

def pytest_runtest_logreport(report):
    noted.setdefault(report.nodeid, [0, []])[0] += report.duration

def pytest_sessionfinish():
    if not known:
        NOTES.write_text(json.dumps(noted))
"""


class Mutant:
    """source[start:end], of a file, that becomes `new`."""

    def __init__(self, file, source, start, end, new):
        self.file, self.text, old = file, source[:start] + new + source[end:], source[start:end]
        self.line = source.count("\n", 0, start) + 1
        before, after = source[:start].rpartition("\n")[2], source[end:].partition("\n")[0]
        self.function = f"{file}:{first_line(source, self.line)}" if file.endswith(".py") else ""
        self.shown = " ".join(f"{before}«{old} -> {new}»{after}".split())


def first_line(source, line):
    """Of the function in which the line stands, as its code object has it; 0 outside of all."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)
                 and node.lineno <= line <= node.end_lineno]
    return max((min(part.lineno for part in [node, *node.decorator_list]) for node in functions), default=0)


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes in Python: {(line, kind): [function that returns (start, end, new), ...]}
# ----------------------------------------------------------------------------------------------------------------------
def python_places(source):
    try:
        import cosmic_ray.ast
        import cosmic_ray.mutating
        import cosmic_ray.plugins
    except ImportError:
        stop("cosmic-ray, which plants the mistakes in Python, is missing; `make mutate` installs it, so does pip")
    # == for `is`: the same thing for what is compared so
    synonyms = re.compile("_(Eq_Is|Is_Eq|NotEq_IsNot|IsNot_NotEq)$")
    kinds = {name: cosmic_ray.plugins.get_operator(name) for name in cosmic_ray.plugins.operator_names()}
    operators = [(name, kind()) for name, kind in kinds.items() if not kind.arguments() and not synonyms.search(name)]
    lines = source.splitlines(keepends=True)
    offsets = [0, *itertools.accumulate(map(len, lines))]
    watched = source[:source.rfind("\nif __name__")]         # only a script's start runs what follows the last
    places, occurrences = collections.defaultdict(list), collections.Counter()

    class Collector(cosmic_ray.ast.Visitor):
        def visit(self, node):
            for name, operator in operators:
                for (line, a), (last, b) in operator.mutation_positions(node):
                    start, end = offsets[line - 1] + a, offsets[last - 1] + b
                    if start < len(watched):
                        kind = re.sub("_.*", "", name.rpartition("/")[2])
                        places[line, kind].append(lambda args=(operator, occurrences[name], start, end): variant(*args))
                    occurrences[name] += 1
            return node

    def variant(operator, occurrence, start, end):
        mutated = cosmic_ray.mutating.mutate_code(source, operator, occurrence)
        # what changed without the white space and comments before it, which some operators take along
        same = next((i for i, (x, y) in enumerate(zip(source, mutated)) if x != y), start)
        return start, end, mutated[min(start, same):len(mutated) - (len(source) - end)].strip()

    Collector().walk(cosmic_ray.ast.get_ast(source))
    return places


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes in CUDA, the same
# ----------------------------------------------------------------------------------------------------------------------
BARRIER = re.compile(r"\b(?:__syncthreads\(\)|__syncwarp\([^()]*\)|cp_async_wait\(\)|wgmma_\w+\(\)|arrive\(\)|finish\([^()]*\));")
# Neither code nor seen by the CPU's compiler: comments, what CUDA_ON_CPU leaves out, directives, what says nothing of
# results (static_assert is itself a check).
NOT_CODE = re.compile(r"""//[^\n]* | /\*.*?\*/ | ^\#if[^\n]*CUDA_ON_CPU.*?^\#endif | ^[ ]*\#[^\n]* | "[^"\n]*"
                          | template[ ]<[^<>]*> | __launch_bounds__\([^()]*\) | static_assert\([^;]*;""",
                      re.DOTALL | re.MULTILINE | re.VERBOSE)
# An operator, and what may stand there instead; the same of names.
OPERATORS = dict(line.split(maxsplit=1) for line in """\
+  - *
-  +
*  + /
/  * %
%  / *
<  <= >
<= < >
>  >= <
>= > <
== != <= >=
!= ==
&& ||
|| &&
&  | ^
|  & ^
^  | & +
<< >>
>> <<
+= -= =
-= += =
*= /= += =
/= *= -=
|= &= =
^= |= &=""".splitlines())
NAMES = dict(line.split() for line in """\
fmaxf       fminf
fminf       fmaxf
min         max
max         min
true        false
false       true
expf        __expf
__expf      expf
blockIdx.x  blockIdx.y
blockIdx.y  blockIdx.x
threadIdx.x blockIdx.x""".splitlines())
DECLARED = re.compile(r"\b(?!return|else)[A-Za-z_]\w* +\(?&?\w+\)?\[[^;={}()]*")     # arrays, with their sizes
FACTOR = r"[\w.:]+(?:\[[^\[\]]*\]|\([^()]*\))*"


def other_numbers(text, suffix):
    if text.startswith("0x"):
        return [f"{value:#x}{suffix}" for value in (int(text, 16) >> 1, int(text, 16) - 1)]
    if text.isdigit():
        return [f"{value}{suffix}" for value in (int(text) + 1, int(text) - 1)]
    value = float(text)
    return [f"{other!r}{suffix}" for other in ([value + 1, value - 1] if abs(value) < 1e9 else [0.0])]


# (kind, what is found, what may stand there instead). Binary operators have white space on both sides, pointers,
# references and templates' brackets never.
CUDA_KINDS = [
    ("barrier", BARRIER, lambda m: [";"]),
    ("operator", r"(?<=\s)(?:<<|>>|[-+*/%<>=!|^]=|&&|\|\||[-+*/%<>&|^])(?=\s)",
     lambda m: OPERATORS[m[0]].split()),
    ("number", r"(?<![\w.])(0x[0-9A-Fa-f]+|\d+\.?\d*(?:e[-+]?\d+)?)([uLf]*)(?![\w.])",
     lambda m: other_numbers(m[1], m[2])),
    ("index", r"(?<=[\w\])])\[(?=[^\[\]&])(?!\d+\])[^\[\]]*\]",
     lambda m: [f"{m[0][:-1]} + 1]", f"{m[0][:-1]} - 1]"]),
    ("term", rf" [-+] {FACTOR}(?: [*/%] {FACTOR})*(?=[;,)\]]| [-+<>=!?:&|])", lambda m: [""]),
    ("condition", r"\bif \(((?:[^()]|\([^()]*\)|\((?:[^()]|\([^()]*\))*\))*)\)",
     lambda m: [f"if (!({m[1]}))"]),
    ("name", rf"\b(?:{'|'.join(map(re.escape, NAMES))})\b", lambda m: [NAMES[m[0]]]),
    ("call", r"\b(?!if\b|for\b|while\b|return\b|sizeof\b)[A-Za-z_][\w:]*(?=\()", lambda m: [""]),
    ("statement", r"(?m)(?<=[ )])(?!return [^;]|typedef|constexpr)[A-Za-z*(_][^;{}\n?]*;(?=\s*$)",
     lambda m: [";"])]


def cuda_places(source, barriers=False):
    code = NOT_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), source)     # positions stay
    sizes = [match.span() for match in DECLARED.finditer(code)]
    places = collections.defaultdict(list)
    for kind, pattern, others in CUDA_KINDS[:1] if barriers else CUDA_KINDS:
        for match in re.finditer(pattern, code):
            line = source.count("\n", 0, match.start()) + 1
            a_size = any(start <= match.start() < end for start, end in sizes)
            if kind == "statement" and BARRIER.match(match[0]) or kind == "index" and a_size:
                continue
            # an array may have more room than it needs
            variants = [new for new in others(match) if not (
                a_size and kind == "number" and code[match.start() - 1] == "[" and int(new) > int(match[0]))]
            key = (line, kind, match.start()) if barriers else (line, kind)
            start, end = match.span()
            places[key] += [functools.partial(tuple, (start, end, new)) for new in variants]
    return places


def draw(places, seed):
    """The variants in random order: one of each place, then a second one of each, and so on."""
    rng = random.Random(seed)
    shuffled = [rng.sample(places[key], len(places[key])) for key in rng.sample(sorted(places), len(places))]
    return [variant for round in itertools.zip_longest(*shuffled) for variant in round if variant is not None]


# ----------------------------------------------------------------------------------------------------------------------
# The copies and what runs in them
# ----------------------------------------------------------------------------------------------------------------------
class Copy:
    """A copy of the project, with the texts of ../shared beside it and a folder of its own for temporary files."""

    def __init__(self, folder, model=None):
        self.folder, self.root, self.temporary = folder, folder / "main", folder / "tmp"
        if model:
            shutil.copytree(model.folder, folder, symlinks=True)
        else:
            shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*NOT_COPIED))
            self.temporary.mkdir()
            (folder / "shared").symlink_to(ROOT.parent / "shared")
            (self.root / "conftest.py").write_text(CONFTEST)
        self.kept = set(self.temporary.rglob("*"))

    def run(self, arguments, timeout=None, function=""):
        """-> (exit code, None after a time-out; output) of Python; whatever it leaves running is killed."""
        environment = dict(os.environ, TMPDIR=str(self.temporary), PYTHONDONTWRITEBYTECODE="1",
                           MUTATED_COPY=str(self.folder), MUTATED_FUNCTION=function)
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen([sys.executable, *arguments], cwd=self.root, env=environment, stdout=output,
                                       stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                                       preexec_fn=limit_resources)
            RUNNING.add(process)
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                self.kill(process)
            output.seek(0)
            return code, output.read().decode(errors="replace")

    def kill(self, process):
        """Kill the process's group, and by the mark in their environment those who left it."""
        mark = f"MUTATED_COPY={self.folder}\0".encode()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        RUNNING.discard(process)
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:                                         # it has ended, or belongs to somebody else
                pass

    def clean(self):
        for path in set(self.temporary.rglob("*")) - self.kept:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def suite(self, file, timeout=None, function=""):
        """-> None if the file's tests pass, else what notices."""
        tests = [name for name in SUITES[file] if name.startswith("tests/")]
        code, output = self.run([*"-m pytest -x -q --no-header -p no:cacheprovider -m".split(), "not slow",
                                 "-k", SKIPPED_TESTS, *tests], timeout, function)
        if code is None:
            return "a hang"
        if code and re.search(r"^E +ValueError: g\+\+ .* fails:$", output, re.MULTILINE):
            return REFUSED
        if code:
            failed = re.findall(r"^(?:FAILED|ERROR) (?:\S*::)?(.*?)(?: - .*)?$", output, re.MULTILINE)
            return (failed or [f"pytest's exit code {code}"])[-1]
        scripts = (name for name in SUITES[file] if not name.startswith("tests/"))
        return next((script for script in scripts if self.run([script], timeout)[0] != 0), None)

    def programs(self, file):
        """-> the bytes of what the CPU's compiler makes of a .cu file for all options, or None if it refuses."""
        script = ("import sys; sys.path.insert(0, 'tests'); import cuda_helpers\n"
                  "for option in sys.argv[2:]:\n"
                  "    print(cuda_helpers.CpuModule(sys.argv[1], option.split()).library._name)")
        code, output = self.run(["-c", script, file, *OPTIONS[file]])
        return None if code else [Path(path).read_bytes() for path in output.split()]


RUNNING = set()


def limit_resources():
    """A mistake must not fill the memory or the disk: 6 GB of addresses, 1 GB a file."""
    for limit, most in (resource.RLIMIT_AS, 6 << 30), (resource.RLIMIT_FSIZE, 1 << 30):
        with contextlib.suppress(ValueError):                       # less than that is allowed anyway
            resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))


def stop(sentence):
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def read_equivalent(sources):
    """[(file, pattern)] of tests/equivalent.txt, whose head says what stands there; notes what is out of date."""
    def pattern(text):
        return re.compile(".*".join(map(re.escape, text.split("..."))))
    entries, reason = [], None
    for number, line in enumerate(EQUIVALENT.read_text(encoding="utf-8").splitlines(), 1):
        file, _, text = line.strip().partition(": ")
        if not line.startswith(" "):
            reason = line.strip("# ")
        elif not reason or file not in SUITES or not re.search("«.* -> .*»", text):
            stop(f"{EQUIVALENT.name}, line {number}: not `FILE: code «old -> new» code` below a reason: {line}")
        elif file in sources:
            entries.append((file, pattern(text)))
            there = pattern(re.sub(r"«(.*) -> .*»", r"\1", text))
            if not any(there.fullmatch(" ".join(x.split())) for x in sources[file].splitlines()):
                print(f"note: {EQUIVALENT.name}, line {number}: there is no such line any more: {line.strip()}")
    return entries


# ----------------------------------------------------------------------------------------------------------------------
# The judgement
# ----------------------------------------------------------------------------------------------------------------------
class Judge:
    def __init__(self, files, args, folder):
        self.files, self.lock = files, threading.Lock()
        self.copies, first = queue.Queue(), Copy(folder / "0")
        self.sources = {file: (first.root / file).read_text(encoding="utf-8") for file in files}
        self.entries = read_equivalent(self.sources)
        self.candidates = {}
        for file in files:
            source = self.sources[file]
            places = python_places(source) if file.endswith(".py") else cuda_places(source, args.barriers)
            self.candidates[file] = iter(draw(places, f"{args.seed} {file}"))
        self.programs = {file: first.programs(file) for file in files if file.endswith(".cu")}
        self.measure(first)
        first.kept = set(first.temporary.rglob("*"))
        for number in range(1, args.jobs):
            self.copies.put(Copy(folder / str(number), first))
        self.copies.put(first)

    def measure(self, copy):
        """Judge the files without a mistake; the times that their tests take become the time-outs."""
        self.timeout, notes = {}, {}
        for file in self.files:
            failed = copy.suite(file)
            if failed:
                stop(f"the tests of {file} fail without any mistake ({failed}); mend that first")
            noted = json.loads((copy.root / "notes.json").read_text())
            (copy.root / "notes.json").unlink()
            notes.update(noted)
            seconds = sum(test[0] for test in noted.values())
            self.timeout[file] = 30 + 5 * seconds
            print(f"{file} without a mistake: {len(noted)} tests, {seconds:.0f} s", flush=True)
        (copy.root / "notes.json").write_text(json.dumps(notes))

    def next_mutant(self, copy, file):
        """Writes the file's next mistake that is Python, or may be CUDA, to the copy; None if there are no more."""
        while True:
            with self.lock:
                variant = next(self.candidates[file], None)
            if variant is None:
                return None
            mutant = Mutant(file, self.sources[file], *variant())
            if file.endswith(".py"):
                try:
                    compile(mutant.text, file, "exec")
                except (SyntaxError, ValueError):
                    continue
                if ast.dump(ast.parse(mutant.text)) == ast.dump(ast.parse(self.sources[file])):
                    continue
            (copy.root / file).write_text(mutant.text, encoding="utf-8")
            return mutant

    def judge(self, file):
        """-> (mutant, verdict), printed; None if the file has no more of them."""
        copy = self.copies.get()
        try:
            by = REFUSED
            while by == REFUSED:
                copy.clean()
                mutant = self.next_mutant(copy, file)
                if mutant is None:
                    return None
                by = copy.suite(file, self.timeout[file], mutant.function)
            if by:
                verdict = "noticed"
            elif file.endswith(".cu") and copy.programs(file) == self.programs[file]:
                verdict, by = "equivalent", "the same program"
            elif any(file == name and pattern.fullmatch(mutant.shown) for name, pattern in self.entries):
                verdict, by = "equivalent", EQUIVALENT.name
            else:
                verdict = "NOT NOTICED"
            print(f"{file}:{mutant.line}: {mutant.shown}   {verdict}" + (f" ({by})" if by else ""), flush=True)
            return mutant, verdict
        finally:
            (copy.root / file).write_text(self.sources[file], encoding="utf-8")
            copy.clean()
            self.copies.put(copy)


def report(files, results, enough):
    """The table; -> whether this percentage was noticed in every file."""
    good = True
    print(f"\n{'file':14} {'planted':>8} {'change nothing':>15} {'noticed':>8} {'share':>8}")
    for file in files:
        verdicts = collections.Counter(verdict for mutant, verdict in results if mutant.file == file)
        judged = verdicts.total() - verdicts["equivalent"]
        share = 100 * verdicts["noticed"] / max(judged, 1)
        good &= share >= enough or not judged
        print(f"{file:14} {verdicts.total():8d} {verdicts['equivalent']:15d} {verdicts['noticed']:8d} {share:7.1f}%")
    print("\nnot noticed:")
    for mutant, verdict in results:
        if verdict == "NOT NOTICED":
            print(f"  {mutant.file}:{mutant.line}: {mutant.shown}")
    return good


def end_all():
    for process in list(RUNNING):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.error = stop
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {', '.join(SUITES)} (default: all)")
    parser.add_argument("--count", type=int, default=300, metavar="N", help="mistakes, spread evenly (300)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another number draws another sample (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="J", help="so many at once (a core each)")
    parser.add_argument("--barriers", action="store_true", help="of the .cu files named, delete every barrier")
    args = parser.parse_args(argv)
    known = {os.path.basename(file): file for file in (OPTIONS if args.barriers else SUITES)}
    names = dict.fromkeys(map(os.path.basename, args.files or known))
    if not set(names) <= set(known) or min(args.count, args.jobs) < 1:
        stop(f"give files of {', '.join(known.values())}, and numbers above 0")
    files = [known[name] for name in names]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as folder:
        judge = Judge(files, args, Path(folder))
        tasks = list(itertools.islice(itertools.cycle(files), args.count))
        if args.barriers:
            tasks = [file for file in files for _ in cuda_places(judge.sources[file], True)]
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            try:
                results = [result for result in pool.map(judge.judge, tasks) if result]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                end_all()
                raise
    return 0 if report(files, results, 100 if args.barriers else ENOUGH) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
