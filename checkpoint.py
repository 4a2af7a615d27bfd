"""checkpoint.py: a model on disk, in a folder that Hugging Face's Llama loads as it is; and the Llama folders
of other people.

    python checkpoint.py out/small      what a folder holds: step, sizes, tensors, checksums

Read before it: tokenizer.py; Config and param_table in model_cpu.py.  From top to bottom:

    1. safetensors              arrays in a file: a header, raw bytes and a checksum
    2. Llama's names            Hugging Face's tensors are rows of our matrices; config.json
    3. save                     atomic: killed at any moment, it leaves a whole checkpoint of one step
    4. load                     what does not fit, or is damaged, is refused by its name
    5. a run's folder           one run at a time; an older run is renamed; the log
    6. read_tokenizer           what the tokenizers of other people may hold, and chat templates
    7. main                     the printer

A folder holds

    config.json                 the sizes of the model
    tokenizer.json              the tokens and merges
    tokenizer_config.json       has a chat template only if the model was fine-tuned to answer (for chat.py)
    model.safetensors           the weights
    train_state.safetensors     the optimizer's moments, and what a run needs to go on
    log.jsonl                   a record for each step

The Llama folders of other people are read in the same way.  They lack what only ours have: checksums, a
training state, and further heads.  What would change the mathematics, and is not computed here, is refused by
its name.

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
import zlib
from contextlib import suppress
from os.path import exists

import model_cpu            # first: it says what to do where NumPy is missing
import numpy as np
from script import (Parser, printable, read_chunk, read_json, refusing, replace_file, require, run_script,
                    write_file)
from tokenizer import BYTE_LEVEL, CHAT_TEMPLATE, END_OF_TEXT, SPECIAL, TEXT_ENDS, Tokenizer, known_template

try:
    import fcntl
except ImportError:         # Windows has none
    fcntl = None

WEIGHTS = "model.safetensors"
STATE = "train_state.safetensors"
# all that a run writes into its folder
RUN_FILES = {"config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS, STATE, "log.jsonl"}


# ------------------------------------------------------------------------------------------------------------
# 1. Arrays in a file
# ------------------------------------------------------------------------------------------------------------
# A .safetensors file is 8 bytes (the length of the header, little-endian), a JSON header
# {name: {dtype, shape, data_offsets}}, and the raw bytes of the tensors.  The headers that we write have one
# more entry, "__metadata__", with the step and a CRC32 of the whole file.  The CRC32 stands inside the file
# that it covers, so it is computed with eight zeros in its place.
NO_CRC = b'"crc32":"00000000"'
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}      # NumPy has no bf16


def checksum(path):
    """CRC32 of a file, as eight hex digits."""
    return f"{zlib.crc32(read_chunk(path)):08x}"


def write_safetensors(path, tensors, metadata):
    """Replace the file at `path` by {name: contiguous array} and the metadata, a dict of strings.  -> the file's
    checksum.  Returns when the disk has it all."""
    header = {"__metadata__": {**metadata, "crc32": "00000000"}}
    end = 0
    for name, array in tensors.items():
        start = end
        end += array.nbytes
        header[name] = {"dtype": f"F{8 * array.itemsize}", "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"))
    text += " " * (-len(text) % 8)                      # so that the tensors start at a multiple of 8
    top = len(text).to_bytes(8, "little") + text.encode()
    crc = zlib.crc32(top)
    for array in tensors.values():
        crc = zlib.crc32(array, crc)
    with replace_file(path) as file:
        file.write(top.replace(NO_CRC, b'"crc32":"%08x"' % crc, 1))
        file.writelines(tensors.values())
    return f"{crc:08x}"


def read_safetensors(path, verify=True):
    """-> ({name: array}, metadata) of a safetensors file.  bf16 comes as uint16.  The metadata of a file that we
    did not write are {}, as nothing is known of their meaning.  The arrays are memory-mapped, which is safe:
    save() replaces a file and never writes into one.

    ValueError, naming the file, unless the tensors are together as large as what it holds; and, if we wrote it,
    unless every byte is as it was written.  verify: False where only the header is of interest."""
    check_file(path)
    damaged = f"{path} is damaged (truncated or altered) and not read"
    with refusing(damaged):
        data = np.memmap(path, mode="r")
        begin = 8 + int.from_bytes(data[:8], "little")
        top = bytes(data[:begin])
        body = data[begin:]                                     # the tensors
        header = json.loads(top[8:])
        metadata = header.pop("__metadata__", {})
        if "crc32" not in metadata:
            metadata = {}
        elif verify:
            blank = re.sub(rb'"crc32":"\w{8}"', NO_CRC, top)
            crc = zlib.crc32(body, zlib.crc32(blank))
            require(metadata["crc32"] == f"{crc:08x}", "its checksum is wrong")
        types = {name: str(entry["dtype"]) for name, entry in header.items()}
    for name, dtype in types.items():
        require(dtype in DTYPES, f"{path}: the tensor {name} is of {dtype:.40}; read are {', '.join(DTYPES)}.")
    tensors = {}
    with refusing(damaged):
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            # an error if the bytes do not fit the shape
            tensors[name] = body[start:end].view(DTYPES[types[name]]).reshape(entry["shape"])
        size = sum(tensor.nbytes for tensor in tensors.values())
        require(size == len(body), f"it holds {len(body):,} bytes, and its tensors {size:,}")
    return tensors, metadata


def check_file(path):
    """ValueError unless this is a plain file, and the very file: Git LFS leaves a few lines of text in the place of
    a large file that was not fetched."""
    require(read_chunk(path, 0, 23) != b"version https://git-lfs",
            f"{path} is a pointer of Git LFS, and not the file: run `git lfs pull` in its folder.")


def safetensors_metadata(path):
    """The metadata of a file whose tensors are not read: {} of one that we did not write."""
    return read_safetensors(path, verify=False)[1]


def fill(model, path, tensors, views):
    """Copy the tensors of a file, by name, into views of the model's buffers.  ValueError unless they have just
    these names and shapes, and numbers that are finite."""
    for name in {**views, **tensors}:
        found = tensors[name].shape if name in tensors else "missing"
        wanted = views[name].shape if name in views else "none of that name"
        require(found == wanted, f"{path}: the tensor {name} is {found}, config.json asks for {wanted}.")
        values = tensors[name]
        if values.dtype == np.uint16:                   # a bf16 is the upper half of a float32
            values = (values.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)          # a number too large for float32 becomes infinite
        require(np.isfinite(single).all(), f"{path}: the tensor {name} holds numbers that are not finite in float32.")
        model.write(views[name], values)


# ------------------------------------------------------------------------------------------------------------
# 2. Llama's names
# ------------------------------------------------------------------------------------------------------------
def llama_names(config):
    """Yields (Hugging Face's name, our name, rows): which rows of our matrix each tensor of a Llama is."""
    q = config.heads * config.head_dim      # qkv has q rows of queries, then as many of keys as of values
    k = q + config.kv_heads * config.head_dim
    every = slice(None)                     # row
    layer = [("self_attn.q_proj", "qkv", slice(q)),
             ("self_attn.k_proj", "qkv", slice(q, k)),
             ("self_attn.v_proj", "qkv", slice(k, None)),
             ("self_attn.o_proj", "out", every),
             ("mlp.gate_proj", "gate_up", slice(config.hidden)),
             ("mlp.up_proj", "gate_up", slice(config.hidden, None)),
             ("mlp.down_proj", "down", every),
             ("input_layernorm", "norm1", every),
             ("post_attention_layernorm", "norm2", every)]
    yield "model.embed_tokens.weight", "embed", every
    for i in range(config.layers):
        for theirs, ours, rows in layer:
            yield f"model.layers.{i}.{theirs}.weight", f"layers.{i}.{ours}", rows
    yield "model.norm.weight", "norm", every
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
# LlamaConfig's values of what an old config.json does not say
LLAMA_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
                  "tie_word_embeddings": False}


def llama_config(config, eos):
    """What config.json holds: the keys of Hugging Face's LlamaConfig, then two or three of our own."""
    sizes = {theirs: getattr(config, ours) for theirs, ours in LLAMA_SIZES.items()}
    sizes["max_position_embeddings"] = config.positions or config.context
    found = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes, "head_dim": config.head_dim,
             "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "torch_dtype": "float32",
             "bos_token_id": None, "eos_token_id": eos,
             "mtp_heads": config.predict - 1, "mtp_weight": config.mtp_weight}
    if config.positions:
        found["context"] = config.context
    return found


def read_config(folder, context=None):
    """-> Config from the config.json of any Llama.  context: takes the place of the one that stands there.
    ValueError, with the key and its value, for a model that computes otherwise than model_cpu.py."""
    path = f"{folder}/config.json"
    found = read_json(path)
    with refusing(f"{path} cannot be used"):
        found = {**LLAMA_DEFAULTS, **{key: value for key, value in found.items() if value is not None}}
        found.setdefault("num_key_value_heads", found["num_attention_heads"])
        # rope_theta stands at the top, in rope_scaling, or in rope_parameters; as in transformers the last of
        # these is read only where rope_scaling is missing
        found.update(found.get("rope_scaling") or found.get("rope_parameters", {}))
        found.setdefault("rope_type", found.get("type", "default"))
        sizes = {ours: found[theirs] for theirs, ours in LLAMA_SIZES.items()}
        context = context or found.get("context", sizes["positions"])
        if context == sizes["positions"]:
            sizes["positions"] = None
        config = model_cpu.Config(**sizes, context=context, predict=found.get("mtp_heads", 0) + 1,
                                  mtp_weight=found.get("mtp_weight", 0.0))
    # keys that would change the mathematics, each with the one value that is computed here
    fixed = {"model_type": "llama", "head_dim": config.head_dim, "hidden_act": "silu",
             "mlp_bias": False, "attention_bias": False, "use_qk_norm": False, "sliding_window": 0,
             "is_causal": True, "partial_rotary_factor": 1.0, "rope_type": "default"}
    for key, ours in fixed.items():
        value = found.get(key, ours)
        require(value == ours, f"{path}: {key} is {value!r:.200}, and only {ours!r} is computed here.")
    # transformers saves a model of ours without it
    if config.predict > 1 and "mtp_heads.weight" not in read_weights(folder, verify=False)[0]:
        print(f"note: {folder} has no mtp_heads.weight, so its model has one head.", file=sys.stderr)
        return dataclasses.replace(config, predict=1)
    return config


# ------------------------------------------------------------------------------------------------------------
# 3. Save
# ------------------------------------------------------------------------------------------------------------
# A save writes two files that belong together.  The weights have a file of their own, because that is the one
# that transformers and chat.py read; the moments and the record of the run have another, which names the
# checksum of its weights.  First the weights are written as model.safetensors.saved.  Then the new
# train_state.safetensors replaces the old one: from this moment on the save counts.  At last `mend` gives the
# weights their name.  Killed before the second step, the folder holds the old save; killed after it, `mend` makes
# the third step when the run is opened.
def save(folder, model, tokenizer, state, chat=False):
    """Write the checkpoint folder.  state: a dict, of what JSON can hold, that read_state() gives back; chat:
    the model answers, in the tokenizer's template or in ours.

    Atomic: killed at any moment, or on a full disk (OSError), the folder holds a whole checkpoint of one
    step."""
    tokenizer.save(f"{folder}/tokenizer.json")
    end = tokenizer.end_of_turn if chat else tokenizer.special_id(*TEXT_ENDS)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
                "model_max_length": model.config.context, "eos_token": tokenizer.tokens[end].decode()}
    if chat:
        settings["chat_template"] = tokenizer.template or CHAT_TEMPLATE
    write_file(f"{folder}/tokenizer_config.json", json.dumps(settings, indent=2).encode())

    config = json.dumps(llama_config(model.config, end), indent=2).encode()
    # the checksum of the weights also covers these, and with them all that a resumed run reads
    metadata = {"format": "pt", "step": str(model.step), "config": f"{zlib.crc32(config):08x}",
                "tokenizer": checksum(f"{folder}/tokenizer.json")}
    params = model_cpu.param_views(model.read(model.flat_params), model.config)
    weights = {name: params[ours][rows] for name, ours, rows in llama_names(model.config)}
    moments = {}
    if model.step:                                      # at step 0 they are zeros
        moments = {"m": model.read(model.m), "v": model.read(model.v)}
    new = f"{folder}/{WEIGHTS}.saved"
    try:
        crc = write_safetensors(new, weights, metadata)
        write_safetensors(f"{folder}/{STATE}", moments, {**metadata, "weights": crc, "state": json.dumps(state)})
    except OSError:
        if exists(new):
            os.remove(new)                              # which gives the space back
        raise
    mend(folder)
    # Last: where there is a config.json there is a checkpoint, even if the first save of a run was killed.
    write_file(f"{folder}/config.json", config)


def mend(folder):
    """Finish a save that was killed after it counted.  ValueError where the two files do not belong together."""
    path = f"{folder}/{WEIGHTS}"
    saved = f"{path}.saved"
    weights = safetensors_metadata(f"{folder}/{STATE}").get("weights")
    if exists(saved) and safetensors_metadata(saved).get("crc32") == weights:
        os.replace(saved, path)
    require(safetensors_metadata(path).get("crc32") == weights, f"{folder}: {STATE} belongs to other weights than "
            f"those in {WEIGHTS}, or is of an earlier version: begin a new run.")


# ------------------------------------------------------------------------------------------------------------
# 4. Load
# ------------------------------------------------------------------------------------------------------------
def read_weights(folder, verify=True):
    """-> ({name: array}, metadata) of model.safetensors.  Where there is none, an index names the files that
    share the tensors."""
    path = f"{folder}/{WEIGHTS}"
    index = f"{path}.index.json"
    if exists(path) or not exists(index):
        return read_safetensors(path, verify)
    with refusing(f"{index} is damaged"):
        files = dict(read_json(index)["weight_map"])
        for file in files.values():
            require(os.path.basename(file) == file, f"it names {file}")
    tensors = {}
    for shard in set(files.values()):
        found, _ = read_safetensors(f"{folder}/{shard}")
        with refusing(f"{index} is damaged: what it says of {shard} is wrong"):
            # copies, because a file that is memory-mapped stays open, and a process may open only so many
            tensors.update((name, np.array(found[name])) for name, file in files.items() if file == shard)
    return tensors, {}


def load(folder, engine, options=None, context=None):
    """-> (model, tokenizer) from the folder of any Llama, in which nothing is changed.

    engine: the module whose Model to make, model_cpu or model_gpu; options: dict of further arguments of that
    Model (dtype, threads, training, precision); context: takes the place of the folder's.  ValueError, in one
    sentence, for what is missing, damaged, or not computed here."""
    path = f"{folder}/{WEIGHTS}"
    require(exists(f"{folder}/config.json"), f"{folder} holds no checkpoint: there is no {folder}/config.json.")
    config = read_config(folder, context)
    tokenizer = read_tokenizer(folder)
    require(tokenizer.vocab_size <= config.vocab, f"{folder}: tokenizer.json is not this model's: it has "
            f"{tokenizer.vocab_size} tokens, config.json says {config.vocab}.")
    tensors, metadata = read_weights(folder)
    for key in "tokenizer", "config":
        saved = f"{folder}/{key}.json"
        require(metadata.get(key) in (None, checksum(saved)),
                f"{saved} is not as it was saved with this model.")
    for name in list(tensors):
        if name.endswith("rotary_emb.inv_freq"):                # of an old Llama: these are computed here
            del tensors[name]
    if config.tied and "lm_head.weight" in tensors:             # the embedding once more, or the head alone
        head = tensors.pop("lm_head.weight")
        embed = tensors.setdefault("model.embed_tokens.weight", head)
        require(np.array_equal(head, embed),
                f"{path}: lm_head.weight is not the embedding, though tie_word_embeddings is true.")
    model = engine.Model(config, seed=None, **(options or {}))
    fill(model, path, tensors, {name: model.params[ours][rows] for name, ours, rows in llama_names(config)})
    with refusing(f"{path}: its step is no number"):
        model.step = int(metadata.get("step", 0))
    return model, tokenizer


def preset_of(base):
    """-> the preset whose defaults fit a model: the largest one that is not wider than the model."""
    require(exists(f"{base}/config.json"), f"there is no model in {base}: `python train.py` trains one, then sft.py "
            "one that answers; --base names another.")
    dim = read_config(base).dim
    return [preset for preset, config in model_cpu.CONFIGS.items() if preset == "small" or config.dim <= dim][-1]


def read_state(folder):
    """-> (the dict that save() was given, the moments by name) of a run's folder."""
    path = f"{folder}/{STATE}"
    require(exists(path), f"{folder} holds no run: there is no {path}.")
    moments, metadata = read_safetensors(path)
    with refusing(f"{path} is not the state of a run"):
        return dict(json.loads(metadata["state"])), moments


def write_moments(model, folder, moments):
    """Fill m and v of a model that load() made from this folder; at step 0 they are zeros."""
    if model.step:
        fill(model, f"{folder}/{STATE}", moments, {"m": model.m, "v": model.v})


# ------------------------------------------------------------------------------------------------------------
# 5. A run's folder: one run at a time; no run overwrites another; the log
# ------------------------------------------------------------------------------------------------------------
def lock_folder(out):
    """Until this process ends, nobody else may train in the folder `out`; ValueError if somebody does.  The
    lock is a file beside the folder, because the folder may be renamed meanwhile."""
    folder = os.path.realpath(out)
    require(not f"{os.getcwd()}/".startswith(f"{folder}/"),
            f"--out {out} is the current folder, or one around it: name another.")
    parent, name = os.path.split(folder)
    path = f"{parent}/.{name}.lock"
    os.makedirs(parent, exist_ok=True)
    advice = "choose another folder with --out"
    try:
        if fcntl:
            # a lock that the system takes back however this process ends; the file is never closed
            fcntl.flock(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            # the file itself is the lock, and stays if this process is killed
            advice += f", or delete {path} if that run was killed"
            open(path, "x").close()
            atexit.register(os.remove, path)
    except (BlockingIOError, FileExistsError):
        raise ValueError(f"{out} is in use by another run; {advice}.") from None
    shutil.rmtree(begun(out), ignore_errors=True)                   # of a run that was killed while it began


def is_empty_run(out):
    """Whether a folder holds a run that has not finished a step, and nothing else."""
    state = f"{out}/{STATE}"
    log = f"{out}/log.jsonl"
    if not exists(state) or {*os.listdir(out)} - RUN_FILES:
        return False
    with suppress(ValueError):                                      # what is damaged is no such run
        if safetensors_metadata(state).get("step") == "0":
            return not exists(log) or b'"loss":' not in read_chunk(log)     # each step has one, an evaluation none
    return False


def set_aside(out):
    """Make room for a new run.  A run that has not finished a step is removed.  Whatever else is there keeps its
    folder, under another name."""
    if is_empty_run(out):
        shutil.rmtree(out)
    elif exists(out) and os.listdir(out):
        number = 1
        while exists(f"{out}.{number}"):
            number += 1
        os.rename(out, f"{out}.{number}")
        print(f"{out} held an earlier run: it is now {out}.{number}.")


def begun(out):
    """-> the path of the hidden folder, beside `out`, in which a new run is written."""
    parent, name = os.path.split(out)
    return os.path.join(parent, f".{name}.begun")


def open_log(out, step):
    """-> the Log of a run.  A new run takes the name of its folder only now, after its first evaluation: if it fails
    before, as by a reward that raises an error, an older run of this name stays where it is."""
    if exists(begun(out)):
        set_aside(out)
        os.rename(begun(out), out)
    return Log(out, step)


class Log:
    """log.jsonl: one JSON object for each step and one for each evaluation, written as they happen.

    A log is opened for a step: the records of later steps are dropped, so that the log of a resumed run has
    each step once.  The file is only cut there and never written anew: killed at any moment, no history is
    lost.  ValueError for a line that is no record."""
    def __init__(self, folder, step):
        self.path = f"{folder}/log.jsonl"
        kept = 0
        if exists(self.path):
            check_file(self.path)
        with open(self.path, "ab+") as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):                # the last line of a killed run may be cut
                    break
                with refusing(f"{self.path}, line {number}, is no record of a run: "
                              "move the file away to begin another"):
                    record = json.loads(line)
                    # the evaluation of the step that the run goes on from is made again
                    if record["step"] > step or record["step"] == step and "loss" not in record:
                        break
                kept += len(line)
            file.truncate(kept)

    def write(self, **record):
        with open(self.path, "a") as file:              # closed at once, so that nothing waits to be written
            print(json.dumps(record), file=file)


# ------------------------------------------------------------------------------------------------------------
# 6. Other people's tokenizers
# ------------------------------------------------------------------------------------------------------------
# The keys of a tokenizer.json that Tokenizer.load reads, or that make no difference to the ids of a text.
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
        odd = {key: value for key, value in {**content, **content["model"]}.items() if value and key not in KNOWN_KEYS}
        if len(tokenizer.encoder.byte_ids) == 256:
            odd.pop("unk_token", None)              # no byte is unknown, so it is never used
        require(not odd, f"tokenizer.json: {odd!r:.200} is not known here")
        # a post-processor may add special tokens to every text
        post = content.get("post_processor") or BYTE_LEVEL
        require(post["type"] == "ByteLevel" or post.get("special_tokens") == {}, f"{post!r:.200} is not known here")
        # Other classes have word patterns of their own.  So has GPT2Tokenizer in transformers 5, which forgets
        # that SmolLM's digits stand apart; here tokenizer.json counts.
        known = None, "GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend"
        kind = settings.get("tokenizer_class")
        require(kind in known, f"tokenizer_class {kind!r:.80} is not known here")
        require(not settings.get("add_prefix_space"), "add_prefix_space is true")
        # Whatever stands for a token must be a special token of tokenizer.json: another one transformers would add.
        tokens = content["added_tokens"] + [*read_settings(f"{folder}/added_tokens.json")]
        for file in settings, read_settings(f"{folder}/special_tokens_map.json"):
            for key, value in file.items():
                if key.endswith(("_token", "_tokens", "_decoder")):
                    tokens += tokens_in(value)
        names = [tokenizer.decode([i]) for i in tokenizer.special.values()]
        for token in tokens:
            named = token if isinstance(token, dict) else {"content": token}
            # each must be found in a text just as it is written; where no text is normalized, "normalized" makes
            # no difference
            found = {**SPECIAL, **named, "normalized": False}
            require(named["content"] in names and {**found, **SPECIAL} == found,
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
    """-> the Tokenizer of a folder.  It has a chat template if the model was fine-tuned to answer, in a form
    that is known here."""
    check_file(f"{folder}/tokenizer.json")
    tokenizer = Tokenizer.load(f"{folder}/tokenizer.json")
    settings = read_settings(f"{folder}/tokenizer_config.json")
    check_settings(folder, settings, tokenizer)
    template = settings.get("chat_template") or ""
    jinja = f"{folder}/chat_template.jinja"
    if exists(jinja):                                           # as in transformers this one counts
        template = read_chunk(jinja).decode("utf-8", "replace")
    known = known_template(template)
    if known is None:
        print(f"note: {folder} has an unknown chat template, which is not used.", file=sys.stderr)
    tokenizer.template = known or ""
    return tokenizer


def text_start(folder, tokenizer):
    """The id of the token that begins a text: in our models <|endoftext|>, which stands between the documents
    that they learn from; in other people's the bos token of config.json, or else the eos token."""
    found = read_json(f"{folder}/config.json")
    start = found.get("bos_token_id")
    if start is None:
        start = found.get("eos_token_id")
    if "mtp_heads" in found:
        start = tokenizer.special_id(END_OF_TEXT)
    require(start in tokenizer.special.values(), f"{folder}/config.json: bos_token_id, or else eos_token_id, must be "
            f"the id of one special token, and it is {start!r:.80}.")
    return start


# ------------------------------------------------------------------------------------------------------------
# 7. What is in a folder
# ------------------------------------------------------------------------------------------------------------
def main(argv):
    parser = Parser(description="Print what a checkpoint folder holds.  Checksums are verified where there are any.")
    parser.add_argument("DIR", help="such as out/small")
    folder = parser.parse_args(argv).DIR
    model, _ = load(folder, model_cpu, {"dtype": np.float32, "training": False})
    print(f"{folder}: step {model.step:,}, {model.config}")
    for path in sorted(glob.glob(f"{folder}/*.safetensors")):
        tensors, metadata = read_safetensors(path)
        print(printable(f"{path}: {len(tensors)} tensors, CRC32 {metadata.get('crc32', 'none')}"))
        for name, tensor in tensors.items():
            print(printable(f"  {name:44} {tensor.shape!s:15} {tensor.dtype}"))       # of bf16: uint16


if __name__ == "__main__":
    run_script(main)
