"""checkpoint.py: a model on disk, in a folder that Hugging Face's Llama loads as it is; and the Llama folders
of other people.

Read before it: tokenizer.py; Config and param_table in model_cpu.py.  From top to bottom:

    1. safetensors              arrays in a file: a header, raw bytes and a checksum
    2. Llama's names            Hugging Face's tensors are rows of our matrices; config.json
    3. save                     atomic: killed at any moment, it leaves a whole checkpoint of one step
    4. load                     what does not fit, or is damaged, is refused by its name
    5. a run's folder           one run at a time; an older run is renamed; the log
    6. read_tokenizer           what the tokenizers of other people may hold, and chat templates

A folder holds

    config.json                 the sizes of the model
    tokenizer.json              the tokens and merges
    tokenizer_config.json       has a chat template only if the model was fine-tuned to answer (for chat.py)
    model.safetensors           the weights
    train_state.safetensors     the optimizer's moments, and what a run needs to go on
    log.jsonl                   a record for each step, and one for each evaluation

The Llama folders of other people are read in the same way.  They lack what only ours have: checksums, a
training state, and further heads.  Some of them need mathematics that model_cpu.py does not have.  Such a folder is
refused, with the name of the setting.

What this file does not do: it reads no pickle, no architecture but Llama's, and no adapters.
"""
import atexit
import dataclasses
import glob
import json
import os
import re
import shutil
import sys
from os.path import basename, exists, isfile, join, realpath, split
from zlib import crc32

import model_cpu            # first: it says what to do where NumPy is missing
import numpy as np
from script import read_chunk, read_json, refusing, replace_file, require, write_file
from tokenizer import BYTE_LEVEL, CHAT_TEMPLATE, SPECIAL, TEXT_ENDS, Tokenizer, known_template

try:
    import fcntl
except ImportError:         # Windows has none: see lock_folder
    fcntl = None

WEIGHTS = "model.safetensors"
STATE = "train_state.safetensors"


# ------------------------------------------------------------------------------------------------------------
# 1. Arrays in a file
# ------------------------------------------------------------------------------------------------------------
# A .safetensors file is 8 bytes (the length of the header, little-endian), a JSON header
# {name: {dtype, shape, data_offsets}}, and the raw bytes of the tensors.  The headers that we write have one
# more entry, "__metadata__", with the step and a CRC32 of the whole file, computed with "00000000" where the CRC32 will
# stand.
NO_CRC = b'"crc32":"00000000"'
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}      # NumPy has no bf16


def checksum(path):
    """CRC32 of a file, as eight hex digits."""
    return f"{crc32(read_chunk(path)):08x}"


def write_safetensors(path, tensors, metadata):
    """Replace the file at `path` by one with these arrays, {name: contiguous array}, and the metadata, a dict of
    strings -> its checksum.  The function returns when all bytes are on the disk."""
    header = {"__metadata__": metadata | {"crc32": "00000000"}}
    end = 0
    for name, array in tensors.items():
        start = end
        end += array.nbytes
        header[name] = {"dtype": f"F{8 * array.itemsize}", "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"))
    text += " " * (-len(text) % 8)                      # so that the tensors start at a multiple of 8
    top = len(text).to_bytes(8, "little") + text.encode()
    crc = crc32(top)
    for array in tensors.values():
        crc = crc32(array, crc)
    with replace_file(path) as file:
        file.write(top.replace(NO_CRC, b'"crc32":"%08x"' % crc, 1))
        file.writelines(tensors.values())
    return f"{crc:08x}"


def read_safetensors(path, verify=True):
    """-> ({name: array}, metadata) of a safetensors file.  A tensor of bf16 comes as uint16.  Of a file that others
    wrote the metadata are {}, because their meaning is unknown.  The arrays are memory-mapped.  This is safe, because
    save() replaces a file and never writes into one.

    ValueError, with the name of the file, if its tensors together are not as large as its data.  In a file that we
    wrote, every altered byte is an error, too.  verify: False if only the header is needed."""
    read_chunk(path, 0, 99)             # an error for a pointer of Git LFS, and for what is no plain file
    with refusing(f"{path} is damaged, or of a kind that is not read here"):
        data = np.memmap(path, mode="r")
        begin = 8 + int.from_bytes(data[:8], "little")
        top = bytes(data[:begin])
        body = data[begin:]                                     # the tensors
        header = json.loads(top[8:])
        metadata = header.pop("__metadata__", {})
        # A file of ours has both keys.  If a damaged byte has spoiled the name of one, the other shows that it is ours
        if not {"crc32", "step"} & set(metadata):
            metadata = {}
        elif verify:
            blank = re.sub(rb'"crc32":"\w{8}"', NO_CRC, top)
            crc = crc32(body, crc32(blank))
            require(metadata["crc32"] == f"{crc:08x}", "its checksum is wrong")
        tensors = {}
        for name, entry in header.items():
            dtype = entry["dtype"]
            require(dtype in DTYPES, f"the tensor {name} is of {dtype:.40}; read are {', '.join(DTYPES)}")
            start, end = entry["data_offsets"]
            # view and reshape raise an error if the bytes do not fit the shape
            tensors[name] = body[start:end].view(DTYPES[dtype]).reshape(entry["shape"])
        size = sum(tensor.nbytes for tensor in tensors.values())
        require(size == len(body), f"it holds {len(body):,} bytes, and its tensors {size:,}")
    return tensors, metadata


def safetensors_metadata(path):
    """The metadata alone: {} of a file that others wrote."""
    return read_safetensors(path, verify=False)[1]


def fill(model, path, tensors, views):
    """Copy the tensors of a file, {name: array}, into {name: view of the model's buffers}.  ValueError if the names or
    the shapes are not the same, or a number is not finite."""
    for name in views | tensors:
        shape = tensors[name].shape if name in tensors else "missing"
        expected = views[name].shape if name in views else "none of that name"
        require(shape == expected, f"{path}: the tensor {name} is {shape}, config.json asks for {expected}.")
        values = tensors[name]
        if values.dtype == np.uint16:                   # a bf16 is the upper half of a float32
            values = (values.astype(np.uint32) << 16).view(np.float32)
        require(np.abs(values).max() <= np.finfo(np.float32).max,       # a NaN fails every comparison
                f"{path}: the tensor {name} holds numbers that are not finite in float32.")
        model.write(views[name], values)


# ------------------------------------------------------------------------------------------------------------
# 2. Llama's names
# ------------------------------------------------------------------------------------------------------------
def llama_names(config):
    """Yields (Hugging Face's name, our name, rows): which rows of our matrix each tensor of a Llama is."""
    # our qkv has the rows of queries, then those of keys, then those of values
    q = config.dim
    k = q + config.kv_width
    all_rows = slice(None)
    layer = [("self_attn.q_proj", "qkv", slice(q)),
             ("self_attn.k_proj", "qkv", slice(q, k)),
             ("self_attn.v_proj", "qkv", slice(k, None)),
             ("self_attn.o_proj", "out", all_rows),
             ("mlp.gate_proj", "gate_up", slice(config.hidden)),
             ("mlp.up_proj", "gate_up", slice(config.hidden, None)),
             ("mlp.down_proj", "down", all_rows),
             ("input_layernorm", "norm1", all_rows),
             ("post_attention_layernorm", "norm2", all_rows)]
    yield "model.embed_tokens.weight", "embed", all_rows
    for i in range(config.layers):
        for theirs, ours, rows in layer:
            yield f"model.layers.{i}.{theirs}.weight", f"layers.{i}.{ours}", rows
    yield "model.norm.weight", "norm", all_rows
    if not config.tied:
        yield "lm_head.weight", "heads", slice(config.vocab)             # head 0 is Llama's head
    if config.predict > 1:
        yield "mtp_heads.weight", "heads", slice(config.vocab, None)


# {LlamaConfig's name of a size: our name}
LLAMA_SIZES = {
    "hidden_size": "dim",
    "intermediate_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "vocab_size": "vocab",
    "max_position_embeddings": "positions",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "tie_word_embeddings": "tied",
}


def llama_config(config, eos):
    """What config.json holds: the sizes by the names of Hugging Face's LlamaConfig, and what else it needs; then our
    own keys: mtp_heads, mtp_weight, and context, which may be smaller than what a base could read."""
    sizes = {theirs: getattr(config, ours) for theirs, ours in LLAMA_SIZES.items()}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes,
            "bos_token_id": None, "eos_token_id": eos,
            "mtp_heads": config.predict - 1, "mtp_weight": config.mtp_weight, "context": config.context}


def read_config(folder, context=None):
    """-> Config from the config.json of a Llama, which must have all keys of LLAMA_SIZES: transformers has written them
    since the middle of 2023.  context: replaces the one in the file.  ValueError, with the key and its value, for a
    model that needs other mathematics than that of model_cpu.py."""
    path = f"{folder}/config.json"
    keys = read_json(path)
    with refusing(f"{path} cannot be used"):
        keys = {key: value for key, value in keys.items() if value is not None}
        # rope_theta may stand at the top of the file, or in rope_scaling, or in rope_parameters.  As in transformers,
        # rope_scaling counts first, then (without it) rope_parameters, then the top.
        keys.update(keys.get("rope_scaling") or keys.get("rope_parameters", {}))
        keys.setdefault("rope_type", keys.get("type", "default"))
        sizes = {ours: keys[theirs] for theirs, ours in LLAMA_SIZES.items()}
        positions = sizes["positions"]
        context = context or keys.get("context", positions)
        require(context <= positions, f"the context is {positions} at most, not {context}")
        config = model_cpu.Config(**sizes, context=context, predict=keys.get("mtp_heads", 0) + 1,
                                  mtp_weight=keys.get("mtp_weight", 0.0))
    # keys that change the mathematics, each with the only value that is computed here
    fixed = {"model_type": "llama", "head_dim": config.head_dim, "hidden_act": "silu",
             "mlp_bias": False, "attention_bias": False, "use_qk_norm": False, "sliding_window": 0,
             "is_causal": True, "partial_rotary_factor": 1.0, "rope_type": "default"}
    for key, ours in fixed.items():
        value = keys.get(key, ours)
        require(value == ours, f"{path}: {key} is {value!r:.200}, and only {ours!r} is computed here.")
    # If transformers saves a model of ours, it keeps mtp_heads in config.json, and drops the weights of these heads.
    if config.predict > 1 and "mtp_heads.weight" not in read_weights(folder, verify=False)[0]:
        print(f"note: {folder} has no mtp_heads.weight, so its model has one head.", file=sys.stderr)
        return dataclasses.replace(config, predict=1)
    return config


# ------------------------------------------------------------------------------------------------------------
# 3. Save
# ------------------------------------------------------------------------------------------------------------
# Two of the files of a save belong together.  The weights have a file of their own, because transformers and
# chat.py read only that.  The moments and the record of the run are in the other file, with the checksum of the
# weights that belong to them.  A save has three steps:
#
#     1. the weights are written as model.safetensors.saved
#     2. the new train_state.safetensors replaces the old one: from this moment on the save counts
#     3. `mend` renames the weights to model.safetensors
#
# If the process is killed before step 2, the folder holds the old save.  If it is killed after step 2, `mend` does
# step 3 when the run is resumed.  (chat.py does not mend: it reads the old weights.)
#
# What else may stand in or beside a folder OUT:
#
#     FILE.N.new                  process N is writing FILE
#     model.safetensors.saved     the weights of a save before its third step
#     .OUT.begun                  a new run, until the numbers of its first steps are known
#     .OUT.lock                   is held while a run works in OUT
#     OUT.1                       an older run
def save(folder, model, tokenizer, state, chat=False):
    """Write the checkpoint folder.  state: a dict, of values that JSON has, which read_state() returns; chat: whether
    the model was fine-tuned to answer, in the tokenizer's template or in ours.

    Atomic: if the process is killed at any moment, or the disk is full (OSError), the folder holds a whole checkpoint
    of one step, that of this save or that of the one before (none, if it was the first)."""
    tokenizer.save(f"{folder}/tokenizer.json")
    end = tokenizer.end_of_turn if chat else tokenizer.special_id(*TEXT_ENDS)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
                "model_max_length": model.config.context, "eos_token": tokenizer.tokens[end].decode()}
    if chat:
        settings["chat_template"] = tokenizer.template or CHAT_TEMPLATE
    write_file(f"{folder}/tokenizer_config.json", json.dumps(settings, indent=2).encode())

    config = json.dumps(llama_config(model.config, end), indent=2).encode()
    # load compares these checksums, and refuses another config.json or tokenizer.json.
    metadata = {"format": "pt", "step": str(model.step), "config": f"{crc32(config):08x}",
                "tokenizer": checksum(f"{folder}/tokenizer.json")}
    params = model_cpu.param_views(model.read(model.flat_params), model.config)
    weights = {name: params[ours][rows] for name, ours, rows in llama_names(model.config)}
    moments = {}
    if model.step:                                      # at step 0 they are zeros
        moments = {"m": model.read(model.m), "v": model.read(model.v)}
    new = f"{folder}/{WEIGHTS}.saved"
    try:
        crc = write_safetensors(new, weights, metadata)
        write_safetensors(f"{folder}/{STATE}", moments, metadata | {"weights": crc, "state": json.dumps(state)})
    except OSError:
        if exists(new):
            os.remove(new)                              # a full disk needs the space
        raise
    mend(folder)
    # config.json is written last: so if the first save is killed, the folder has none, and is no checkpoint.
    write_file(f"{folder}/config.json", config)


def mend(folder):
    """Finish a save that was killed after its second step.  ValueError if the two files do not belong together."""
    path = f"{folder}/{WEIGHTS}"
    saved = f"{path}.saved"
    weights = safetensors_metadata(f"{folder}/{STATE}").get("weights")
    if exists(saved) and safetensors_metadata(saved).get("crc32") == weights:
        os.replace(saved, path)
    require(safetensors_metadata(path).get("crc32") == weights, f"{folder}: {STATE} belongs to other weights than "
            f"those in {WEIGHTS}, or was written by an earlier version of this program: begin a new run.")


# ------------------------------------------------------------------------------------------------------------
# 4. Load
# ------------------------------------------------------------------------------------------------------------
def read_weights(folder, verify=True):
    """-> ({name: array}, metadata) of model.safetensors.  A large model may be in several files instead; then an index
    says which tensor is in which file."""
    path = f"{folder}/{WEIGHTS}"
    index = f"{path}.index.json"
    if exists(path) or not exists(index):
        return read_safetensors(path, verify)
    with refusing(f"{index} cannot be used"):
        files = read_json(index)["weight_map"]
        for file in files.values():
            require(basename(file) == file, f"it names {file}")
        # Copies, because a memory-mapped file stays open, and a process may open only so many.
        return {name: np.array(read_safetensors(f"{folder}/{file}")[0][name]) for name, file in files.items()}, {}


def load(folder, engine, options=None, context=None):
    """-> (model, tokenizer) from the folder of a plain Llama.  Nothing in it is changed.

    engine: the module with the class Model, model_cpu or model_gpu; options: a dict of further arguments of that
    Model (dtype, threads, training, precision); context: replaces the folder's.  OSError for a file that is missing;
    ValueError, in one sentence, for one that is damaged, for a tensor that is missing, and for a model that is not
    computed here."""
    path = f"{folder}/{WEIGHTS}"
    config = read_config(folder, context)
    tokenizer = read_tokenizer(folder)
    require(tokenizer.vocab_size <= config.vocab, f"{folder}: tokenizer.json is not this model's: it has "
            f"{tokenizer.vocab_size} tokens, config.json says {config.vocab}.")
    tensors, metadata = read_weights(folder)
    for key in "tokenizer", "config":
        saved = f"{folder}/{key}.json"
        # None: others wrote the weights, without checksums of these two files
        require(metadata.get(key) in (None, checksum(saved)),
                f"{saved} is not as it was saved with this model.")
    model = engine.Model(config, seed=None, **(options or {}))
    fill(model, path, tensors, {name: model.params[ours][rows] for name, ours, rows in llama_names(config)})
    with refusing(f"{path}: its step is no number"):
        model.step = int(metadata.get("step", 0))
    return model, tokenizer


def preset_of(base):
    """-> the preset whose defaults fit a model: the largest one that is not wider than the model, or small."""
    require(exists(f"{base}/config.json"), f"there is no model in {base}: `python train.py` trains one, and sft.py "
            "then makes one that answers; --base names another.")
    dim = read_config(base).dim
    return [preset for preset, config in model_cpu.CONFIGS.items() if preset == "small" or config.dim <= dim][-1]


def read_state(folder):
    """-> (the state that save() wrote, the moments by name) of a run's folder."""
    path = f"{folder}/{STATE}"
    moments, metadata = read_safetensors(path)
    with refusing(f"{path} is not the state of a run"):
        return dict(json.loads(metadata["state"])), moments


# ------------------------------------------------------------------------------------------------------------
# 5. A run's folder: one run at a time; no run overwrites another; the log
# ------------------------------------------------------------------------------------------------------------
def lock_folder(out):
    """Until this process ends, nobody else may train in the folder `out`.  ValueError if somebody does.  The lock is a
    file beside the folder, because the folder itself may be renamed meanwhile."""
    folder = realpath(out)
    require(not f"{os.getcwd()}/".startswith(f"{folder}/"),
            f"--out {out} is the current folder, or one around it: name another.")
    require(not isfile(folder), f"--out {out} is a file: name a folder.")
    parent, name = split(folder)
    path = f"{parent}/.{name}.lock"
    os.makedirs(parent, exist_ok=True)
    try:
        if fcntl:
            # The system takes this lock back, however the process ends.  Until then the file stays open: that is the
            # lock
            fcntl.flock(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            # The file is the lock: "x" asks for a new one.  A process that is killed leaves it: then delete it.
            open(path, "x").close()
            atexit.register(os.remove, path)
    except (BlockingIOError, FileExistsError):
        raise ValueError(f"{out} is in use by another run, which holds {path}: choose another folder with --out."
                         ) from None
    # what a run that was killed while it saved has left
    for new in glob.glob(f"{glob.escape(out)}/*.[0-9]*.new"):
        os.remove(new)


def set_aside(out):
    """Make room for a new run: whatever is there keeps its folder, under another name."""
    if exists(out) and os.listdir(out):
        number = 1
        while exists(f"{out}.{number}"):
            number += 1
        os.rename(out, f"{out}.{number}")
        print(f"{out} was there already: it is now {out}.{number}.")


def begun_folder(out):
    """-> the path of the hidden folder, beside `out`, in which a new run is written.  It has this name until the
    numbers of its first steps are known."""
    parent, name = split(out)
    return join(parent, f".{name}.begun")


def clear_begun(out):
    """Remove what a run has left that was killed before its first steps."""
    shutil.rmtree(begun_folder(out), ignore_errors=True)


def run_folder(out):
    """-> the path of the folder in which the run `out` is now.  (A run that was killed while it began has no
    config.json, which `save` writes last: it does not count.)"""
    begun = begun_folder(out)
    return begun if exists(f"{begun}/config.json") else out


def take_name(out):
    """Give the folder of a new run its name.  If the run fails before, as by a reward that raises an error, an older
    run of this name stays where it is."""
    folder = run_folder(out)
    if folder != out:
        set_aside(out)
        os.rename(folder, out)


class Log:
    """log.jsonl: one JSON object for each step and one for each evaluation, written as they happen.

    A log is opened at the step from which a run goes on.  Records of later steps are cut off, so that the log of a
    resumed run has each step once.  If the run was evaluated once more at this step, the older evaluation is cut off,
    too.  The kept records are not rewritten.  So a kill at any moment loses none of them.  ValueError for a line that
    is no record."""
    def __init__(self, out, step, evaluated):
        self.out = out
        path = self.path()
        kept = 0
        with open(path, "ab+") as file:
            read_chunk(path, 0, 0)                          # an error if this is no plain file
            file.seek(0)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):                # the last line of a killed run may be cut
                    break
                with refusing(f"{path}, line {number}, is no record of a run: "
                              "move the file away to begin another"):
                    record = json.loads(line)
                    if record["step"] > step or evaluated and record["step"] == step and "loss" not in record:
                        break
                kept += len(line)
            file.truncate(kept)

    def path(self):
        """A new run's folder is renamed once."""
        return f"{run_folder(self.out)}/log.jsonl"

    def write(self, **record):
        with open(self.path(), "a") as file:             # closed at once, so that nothing waits to be written
            print(json.dumps(record), file=file)


# ------------------------------------------------------------------------------------------------------------
# 6. Other people's tokenizers
# ------------------------------------------------------------------------------------------------------------
# The keys of a tokenizer.json that Tokenizer.load reads, or that do not change the ids of a text.
KNOWN_KEYS = """version type model vocab merges fuse_unk added_tokens pre_tokenizer post_processor decoder
    truncation padding""".split()


def read_settings(path):
    """The JSON in a file; {} where there is no such file."""
    return read_json(path) if exists(path) else {}


def check_settings(folder, settings, tokenizer):
    """ValueError for a tokenizer.json, tokenizer_config.json, added_tokens.json or special_tokens_map.json
    with which transformers would give a text other ids than our Tokenizer.

    settings: what stands in tokenizer_config.json."""
    with refusing(f"{folder}: the tokenizer's settings cannot be used"):
        content = read_json(f"{folder}/tokenizer.json")
        keys = content | content["model"]
        others = {key: value for key, value in keys.items() if value and key not in KNOWN_KEYS}
        if len(tokenizer.encoder.byte_ids) == 256:
            others.pop("unk_token", None)           # no byte is unknown, so it is never used
        require(not others, f"tokenizer.json: {others!r:.200} is not known here")
        # a post-processor may add special tokens to every text
        post = content.get("post_processor") or BYTE_LEVEL
        require(post["type"] == "ByteLevel" or post.get("special_tokens") == {}, f"{post!r:.200} is not known here")
        # Other classes have word patterns of their own.  (So has GPT2Tokenizer in transformers 5, which does not keep
        # SmolLM's digits apart.  We go by tokenizer.json.)
        classes = None, "GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend"
        name = settings.get("tokenizer_class")
        require(name in classes, f"tokenizer_class {name!r:.80} is not known here")
        require(not settings.get("add_prefix_space"), "add_prefix_space is true")
        # Every token that the files name must be a special token of tokenizer.json: transformers adds any other.
        tokens = content["added_tokens"] + [*read_settings(f"{folder}/added_tokens.json")]
        for file in settings, read_settings(f"{folder}/special_tokens_map.json"):
            for key, value in file.items():
                if key.endswith(("_token", "_tokens", "_decoder")):
                    tokens += tokens_in(value)
        names = [tokenizer.decode([i]) for i in tokenizer.special.values()]
        for token in tokens:
            entry = token if isinstance(token, dict) else {"content": token}
            # transformers must find the token as it is written, without the spaces beside it: each flag that the entry
            # gives must be that of SPECIAL.  No text is normalized, so the flag "normalized" may have any value.
            flags = SPECIAL | entry | {"normalized": False}
            require(entry["content"] in names and flags == entry | SPECIAL,
                    f"tokenizer.json has no special token {token!r:.200}")


def tokens_in(value):
    """-> list of what stands for a token in a setting: texts, and dicts with the key "content"."""
    if isinstance(value, dict) and "content" not in value:
        value = [*value.values()]
    if isinstance(value, list):
        return [token for part in value for token in tokens_in(part)]
    # a setting such as add_bos_token is true or false, and one without a token is null or ""
    return [value] if value and value is not True else []


def read_tokenizer(folder):
    """-> the Tokenizer of a folder.  It has a template if the model was fine-tuned to answer, and the template is known
    here."""
    tokenizer = Tokenizer.load(f"{folder}/tokenizer.json")
    settings = read_settings(f"{folder}/tokenizer_config.json")
    check_settings(folder, settings, tokenizer)
    template = settings.get("chat_template") or ""
    jinja = f"{folder}/chat_template.jinja"
    if exists(jinja):                                           # as in transformers, this one is taken
        template = read_chunk(jinja).decode("utf-8", "replace")
    form = known_template(template)
    if form is None:
        print(f"note: {folder} has an unknown chat template, which is not used.", file=sys.stderr)
    tokenizer.template = form or ""
    return tokenizer
