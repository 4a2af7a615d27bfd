"""rl.py: preferences and rewards.  A model that answers becomes one whose answers are liked.

    python rl.py                                    out/small-sft -> out/small-sft-rl: REINFORCE, a reward by rule
    python rl.py --base out/big-sft --reward echo   another model, another rule; FILE.py:NAME is your own
    python rl.py --base out/big-sft --data pairs.jsonl      pairs, a better and a worse answer: DPO
    python rl.py --method dpo                       without pairs: the true answers against the model's own
    python rl.py --show 3                           three prompts or pairs, with their answers
    python rl.py --resume                           go on with an interrupted run

Read before it: sft.py.  train.py's schedule, loop and checkpoints serve here unchanged, and AdamW without decay.

The one line of mathematics.  With p the softmax and y the token that stands there, the gradient of every method at the
logits is

    d loss / d logits = w (p - onehot(y))           w: one number for a whole answer

Pretraining and fine-tuning have w = 1: make the text more probable.  REINFORCE and DPO only choose another w: an answer
with w > 0 becomes more probable, one with w < 0 less.  Section 1 derives both.

    1. the two weights    REINFORCE and DPO
    2. rewards            rules that say how good an answer is
    3. answers            drawn from the model, and scored
    4. REINFORCE          prompts -> answers -> rewards -> weights
    5. DPO                pairs -> log-probabilities -> weights
    6. the run

What it does not do: no value network, no ratio and no clipping (PPO), no division by the deviation of a group (GRPO),
no KL term in the loss (the distance to the base is measured, not bounded), no learned reward model.
"""
# first: with it Ctrl-C prints "Stopped." in place of a traceback, also while the imports below run
from script import (Parser, file_hash, positive, read_chunk, require, run_script, set_threads, short_hash,
                    whole_number)

import contextlib
import os
import re
import runpy

if __name__ == "__main__":
    set_threads()           # before NumPy loads

import train                # first: it says what to do where NumPy is missing
import checkpoint
import model_cpu
import numpy as np
import sft
from model_cpu import Sampling, generate_batch

GROUP = 16                  # answers to one prompt
ANSWER_TOKENS = 40          # of an answer that is drawn, at most; and at most a quarter of the context
AT_ONCE = 512               # answers that own_pairs draws together
HELD_OUT = 32               # held-out prompts that an evaluation answers, GROUP times each
OWN_ANSWERS = 8             # DPO without pairs: answers that the base draws to each prompt
FAR = 0.5                   # nats a token: a model so far from its base has mostly learned to please the rule
BY_DATA = 0                 # steps: until DPO has read all pairs once

# Steps, tokens a step, learning rate, steps from one evaluation and save to the next.  REINFORCE takes tokens /
# context answers a step.  Chosen by short runs; docs/rl.md says what else was tried.
DEFAULTS = {
    "reinforce": {
        "small": (12, 32768, 8e-5, 4),
        "medium": (30, 65536, 2e-5, 10),
        "big": (60, 262144, 5e-6, 10)},
    "dpo": {
        "small": (BY_DATA, 4096, 3e-4, 100),
        "medium": (BY_DATA, 8192, 4e-5, 20),
        "big": (BY_DATA, 8192, 2e-5, 20)}}


# ------------------------------------------------------------------------------------------------------------
# 1. The two weights
# ------------------------------------------------------------------------------------------------------------

# REINFORCE (Williams 1992).  An answer a is drawn with the probability pi(a), a product over its tokens, and
# earns the reward r(a).  We want more of the mean reward J = sum_a pi(a) r(a).  Since d pi = pi d log pi,
#     dJ = sum_a pi(a) r(a) d log pi(a) = the mean over drawn answers of r d log pi.
# A baseline b, any number that does not depend on the answer, may be taken off r:
#     sum_a pi(a) b d log pi(a) = b d sum_a pi(a) = b d 1 = 0.
# With b the mean reward of the group, which is the answers to one prompt, an answer counts by how much better it
# is than the others, and the noise is far smaller.  (That mean holds the answer's own r, too.  This scales dJ by
# 1 - 1/GROUP and changes nothing else.)
#     loss = -1/n sum (r - b) log pi(a),  log pi(a) = sum of log p[y]   =>  dlogits = (r - b) (p - onehot(y)) / n
# n counts the answers' tokens, as in fine-tuning.
def reinforce_weights(rewards):
    """rewards (n,) of groups of GROUP answers -> weights (n,): each reward minus the mean of its group."""
    by_group = np.reshape(rewards, (-1, GROUP))
    return (by_group - by_group.mean(axis=1, keepdims=True)).ravel()


# DPO (Rafailov et al. 2023).  Of two answers to a prompt one was chosen and one rejected.  The reference is the
# model before.  beta (log pi - log ref) says how much more probable an answer has become; take it as the model's
# own reward for it.  The chance that the model agrees with the choice is then sigmoid(z), and the loss its -log:
#     z = beta ((log pi_c - log ref_c) - (log pi_r - log ref_r))              c: chosen, r: rejected
#     loss = 1/n sum of -log sigmoid(z)                                       over n pairs
#     d loss / dz = -sigmoid(-z) / n,  dz / d log pi_c = beta,  dz / d log pi_r = -beta
# And d(-log pi) = p - onehot(y) at each token of the answer, so
#     w_c = beta sigmoid(-z)        w_r = -beta sigmoid(-z)
# A pair that the model already gets right (z large) hardly pushes any more.
def dpo_weights(log_probs, reference, beta):
    """log_probs, reference (2n,), of chosen and rejected by turns -> their weights (2n,)."""
    z = dpo_margins(log_probs, reference, beta)
    push = beta / (1 + np.exp(z))                                           # beta sigmoid(-z)
    return np.stack([push, -push], axis=1).ravel()


def dpo_margins(log_probs, reference, beta):
    """log_probs, reference (2n,), of chosen and rejected by turns -> z (n,)."""
    ratio = (log_probs - reference).reshape(-1, 2)
    return beta * (ratio[:, 0] - ratio[:, 1])


def dpo_loss(z):
    """The mean of -log sigmoid(z)."""
    return np.logaddexp(0, -z).mean()


# ------------------------------------------------------------------------------------------------------------
# 2. Rewards: (prompt, a text; answer, the list of its tokens' texts without the end; ended) -> a number
# ------------------------------------------------------------------------------------------------------------
def sentence(prompt, answer, ended):
    """1 for one whole sentence: it ended, has 5 to 24 tokens, and of these the last alone ends in . ! or ?."""
    ends = [token.endswith((".", "!", "?")) for token in answer]
    return float(ended and 5 <= len(answer) <= 24 and ends[-1] and sum(ends) == 1)


def echo(prompt, answer, ended):
    """1 if the answer has a word of the question, of five letters or more."""
    words = re.findall(r"[^\W\d_]{5,}", prompt.lower())
    text = "".join(answer).lower()
    return float(any(word in text for word in words))


def short(prompt, answer, ended):
    """The fewer tokens the better: from 1 down to 0.  0 for an empty answer, or one that did not end."""
    return 1 - len(answer) / ANSWER_TOKENS if answer and ended else 0.0


REWARDS = {"sentence": sentence, "echo": echo, "short": short}


@contextlib.contextmanager
def blaming(name):
    """Whatever a reward of the user's own raises inside becomes one sentence."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"the reward {name}: {type(error).__name__}: {error}") from None


def find_reward(name):
    """-> (the function, a fingerprint of its file) for a name in REWARDS, or FILE.py:NAME."""
    if name in REWARDS:
        return REWARDS[name], ""
    path, _, function = name.rpartition(":")
    require(path.endswith(".py"), f"the reward must be {', '.join(REWARDS)} or FILE.py:NAME, not {name}.")
    with blaming(name):
        found = runpy.run_path(path)[function]

    def reward(*arguments):
        with blaming(name):
            return float(found(*arguments))
    return reward, file_hash(path)


# ------------------------------------------------------------------------------------------------------------
# 3. Answers.  A row is (ids, mask) as in sft.py: prompt and answer; mask: True at the answer and its end token
# ------------------------------------------------------------------------------------------------------------
def make_row(prompt, answer):
    """Two lists of ids -> a row."""
    ids = np.array(prompt + answer)
    return ids, np.arange(len(ids)) >= len(prompt)


def draw_answers(training, openings, seed, temperature=1.0):
    """The model answers each of these (sft.opening) -> rows.  seed: of the noise, a number or several."""
    tokenizer = training.tokenizer
    T = training.model.config.context
    prompts = [sft.cut_prompt(tokenizer, opening, T) for opening in openings]
    seeds = np.random.default_rng(seed).integers(0, 1 << 63, len(prompts))
    sampling = Sampling(temperature, seed=seeds, vocab=tokenizer.vocab_size)
    answers = generate_batch(training.model, prompts, sampling, tokenizer.special.values(),
                             min(ANSWER_TOKENS, (T + 3) // 4))
    return list(map(make_row, prompts, answers))


def answer_of(tokenizer, row):
    """-> (the ids of a row's answer without special tokens, whether it ended)."""
    ids, mask = row
    answer = ids[mask].tolist()
    special = tokenizer.special.values()
    return [i for i in answer if i not in special], answer[-1] == tokenizer.end_of_turn


def reward_of(reward, tokenizer, opening, row):
    """What the function `reward` gives to a row that answers this opening."""
    answer, ended = answer_of(tokenizer, row)
    return reward(sft.as_text(opening), [tokenizer.decode([i]) for i in answer], ended)


def log_probs_of(training, rows):
    """-> (n,) the log-probability of each row's answer."""
    inputs, targets = sft.make_batch(rows, *sft.batch_sizes(training))
    found = [training.model.log_probs(inputs[part], targets[part])
             for part in train.row_slices(training, inputs)]
    return np.concatenate(found)


def make_step(training, rows, divisor, weights, weigh=None):
    """-> the batch of a step, as train.Job asks for it.  weights: (n,), or (n,2) of pairs."""
    T, K, pad = sft.batch_sizes(training)
    batch = [array.reshape(*weights.shape, -1) for array in sft.make_batch(rows, T, K, pad)]
    return *batch, np.full(K, divisor), weights, weigh


def tell(training, step, record, questions):
    """Print what an evaluation has found, and answers to some questions -> the record for log.jsonl."""
    print("           " + ", ".join(f"{name} {value:.3f}" for name, value in record.items()))
    whole = step in (0, training.settings.steps)
    return {**record, "samples": sft.answer(training, questions, whole)}


def check_key(training, key):
    """ValueError if a resumed run does not find what it began with, of which key is a fingerprint."""
    settings = training.settings
    settings.tokens_key = settings.tokens_key or key
    require(settings.tokens_key == key, f"{', '.join(settings.data)}, the reward or the base: not what "
            f"{training.out} began with.")


# ------------------------------------------------------------------------------------------------------------
# 4. REINFORCE: prompts -> answers -> rewards -> weights
# ------------------------------------------------------------------------------------------------------------
def reinforcing(training):
    """-> the Job of a run on the prompts of conversations."""
    settings = training.settings
    model = training.model
    T = model.config.context
    reward, code = find_reward(settings.reward)
    conversations = sft.read_conversations(settings.data)
    examples = sft.make_examples(training.tokenizer, conversations, T, settings.seed)
    options = {"dtype": np.float32, "training": False}
    base, _ = checkpoint.load(training.state["base"], model_cpu, options, T)
    check_key(training, f"{examples.key} {code} {train.weights_checksum(base)}")
    unseen = set(map(sft.as_text, examples.questions))
    held_out = examples.questions[:HELD_OUT]
    openings = dict.fromkeys(map(sft.opening, conversations))
    to_learn = [opening for opening in openings if sft.as_text(opening) not in unseen]
    means = {}                                      # of the rewards of each step

    def answer(openings, seed, temperature=1.0):
        """-> (rows, rewards (n,)) of an answer to each."""
        rows = draw_answers(training, openings, seed, temperature)
        rewards = [reward_of(reward, training.tokenizer, *both) for both in zip(openings, rows)]
        require(np.isfinite(rewards).all(), f"the reward {settings.reward} gave a number that is not finite.")
        return rows, np.array(rewards)

    def batch(step):
        prompts = max(1, settings.batch_tokens // T // GROUP)
        # as windows of one: so many indices, from the epochs' random orders laid end to end
        chosen = train.window_starts(settings.seed, step * prompts, prompts, len(to_learn), 1, 0)
        asked = [to_learn[i] for i in np.repeat(chosen, GROUP)]
        rows, rewards = answer(asked, [settings.seed, step])
        means[step + 1] = rewards.mean()
        return make_step(training, rows, learned(rows), reinforce_weights(rewards))

    def evaluate(step):
        rows, rewards = answer([opening for opening in held_out for _ in range(GROUP)], settings.seed)
        _, greedy = answer(held_out, settings.seed, temperature=0)
        log_probs = log_probs_of(training, rows)
        spread = np.ptp(rewards.reshape(-1, GROUP), axis=1)     # of each group
        weights = model.read(model.flat_params).copy()
        model.write(model.flat_params, base.flat_params)        # the base takes the model's place for a moment
        kl = (log_probs - log_probs_of(training, rows)).sum() / learned(rows)
        model.write(model.flat_params, weights)
        record = tell(training, step, {
            "reward": rewards.mean(),                                           # of answers drawn
            "greedy": greedy.mean(),                                            # at temperature 0
            "kl": kl,                                                           # from the base, nats a token
            "length": learned(rows) / len(rows),                                # with the end token
            "alike": (spread == 0).mean(),                                      # groups that teach nothing
            "forgotten": sft.evaluate(training, examples.held_out)[0]},         # held-out loss, true answers
            held_out)
        if kl > FAR:
            print(f"note: {kl:.2f} nats a token from the base: look whether the text is still good.")
        return record

    return train.Job(batch, evaluate, lambda step, loss: f"reward {means[step]:.3f}")


def learned(rows):
    """How many tokens the masks of these rows count."""
    return sum(mask.sum() for _, mask in rows)


# ------------------------------------------------------------------------------------------------------------
# 5. DPO: pairs -> log-probabilities -> weights.  A pair is (opening, [text chosen, text rejected])
# ------------------------------------------------------------------------------------------------------------
def has_pairs(paths):
    """Whether these files hold pairs, by their first megabyte."""
    return all(b'"chosen"' in read_chunk(path, 0, 1 << 20) for path in paths)


def read_pairs(paths):
    """-> the pairs in these files; of a conversation the true answer to its first question alone."""
    if has_pairs(paths):
        return [pair for path in paths for pair in sft.read_records(path, make_pair)]
    pairs = []
    for turns in sft.read_conversations(paths):
        first = next(answer for _, answer in turns if answer)
        pairs.append((sft.opening(turns), [first]))
    return pairs


def make_pair(record):
    """{"prompt", "chosen", "rejected"}, texts or lists of messages -> a pair.  ValueError says in a few words
    what is wrong with it."""
    def messages(name, role):
        found = record.get(name)
        return found if isinstance(found, list) else [{"role": role, "content": found}]

    require(isinstance(record, dict), "no named fields")
    texts = []
    for name in ("chosen", "rejected"):
        answer = messages(name, "assistant")[-1:]
        turns = sft.make_turns({"messages": messages("prompt", "user") + answer})
        texts.append(turns[-1][1])
    require(sum(answer is not None for _, answer in turns) == 1, "more than one question")
    return sft.opening(turns), texts


def pair_rows(tokenizer, pair, T):
    """-> the rows of a pair, of at most T + 1 ids.  A prompt that is too long is cut once, for the longer answer:
    so both answer the same."""
    opening, texts = pair
    answers = [[*tokenizer.encode(text), tokenizer.end_of_turn] for text in texts]
    prompt = tokenizer.prompt(opening[1], None, opening[0])
    if len(prompt) + max(map(len, answers)) > T + 1:
        prompt = sft.cut_prompt(tokenizer, opening, T)
    return [make_row(prompt, answer[:T + 1 - len(prompt)]) for answer in answers]


def pair_batches(training, pairs):
    """Pairs -> batches: lists of rows, chosen and rejected by turns.  They are the same in every epoch, so that
    the reference fits them to the bit.  Pairs whose answers are equal, as far as the window goes, are left out."""
    T = training.model.config.context
    settings = training.settings
    rows = [pair_rows(training.tokenizer, pair, T) for pair in pairs]
    rows = [(chosen, rejected) for chosen, rejected in rows
            if not np.array_equal(chosen[0], rejected[0])]
    print(f"{len(rows):,} pairs; {len(pairs) - len(rows):,} more with equal answers are left out.")
    require(rows, "each pair needs two answers that differ within the context.")
    sides = [sft.padded_lengths(side, T) for side in zip(*rows)]
    lengths = 2 * np.max(sides, axis=0)
    plan = sft.plan_epoch(lengths, settings.batch_tokens, settings.seed, 0)
    return [[row for i in batch for row in rows[i]] for batch in plan]


def preferring(training):
    """-> the Job of a run on pairs."""
    settings = training.settings
    pairs = read_pairs(settings.data)
    if not has_pairs(settings.data):
        pairs = own_pairs(training, pairs)
    check_key(training, short_hash(str(pairs)))
    unseen = sft.hold_out([opening for opening, _ in pairs], settings.seed)
    held_out = pair_batches(training, [pair for pair in pairs if sft.as_text(pair[0]) in unseen])
    batches = pair_batches(training, [pair for pair in pairs if sft.as_text(pair[0]) not in unseen])
    if settings.steps == BY_DATA:
        settings.steps = len(batches)
    if "reference" not in training.state:           # the model is still the base
        training.state["reference"] = [log_probs_of(training, rows).tolist() for rows in batches + held_out]
    reference = list(map(np.array, training.state["reference"]))
    margins = {}                                    # z of the pairs of each step

    def batch(step):
        [number] = train.window_starts(settings.seed, step, 1, len(batches), 1, 0)
        rows = batches[number]
        margins[step + 1] = []
        # In place of weights the reference: Model.forward hands it to weigh, beside the model's own
        # log-probabilities, and weigh returns the weights.
        return make_step(training, rows, len(rows) // 2, reference[number].reshape(-1, 2), weigh)

    def weigh(*now):
        margins[max(margins)] += dpo_margins(*now, settings.beta).tolist()
        return np.nan_to_num(dpo_weights(*now, settings.beta))      # the loss itself says that it is not finite

    def evaluate(step):
        log_probs = np.concatenate([log_probs_of(training, rows) for rows in held_out])
        z = dpo_margins(log_probs, np.concatenate(reference[len(batches):]), settings.beta)
        return tell(training, step, {
            "dpo": dpo_loss(z),
            "accuracy": np.heaviside(z, 0.5).mean(),
            "margin": z.mean(),
            "chosen": log_probs[::2].mean(),        # both may fall, which the margin does not tell
            "rejected": log_probs[1::2].mean()},
            list(unseen.values()))

    return train.Job(batch, evaluate, lambda step, loss: f"dpo {dpo_loss(np.array(margins[step])):.4f}")


def own_pairs(training, true):
    """Pairs where there are none.  true: a list of (opening, [true answer]).  -> each of these OWN_ANSWERS times,
    with an answer that the base draws as the rejected one.  training.state keeps what was drawn, because after the
    first step the model is no longer the base."""
    true = OWN_ANSWERS * true
    if "drawn" not in training.state:
        rows = []
        for part in train.slices_of(len(true), AT_ONCE):
            openings = [opening for opening, _ in true[part]]
            rows += draw_answers(training, openings, [training.settings.seed, part.start])
        # decoded at once, because a character may have several tokens
        training.state["drawn"] = [training.tokenizer.decode(answer_of(training.tokenizer, row)[0]) for row in rows]
    return [(opening, [chosen, rejected])
            for (opening, [chosen]), rejected in zip(true, training.state["drawn"])]


# ------------------------------------------------------------------------------------------------------------
# 6. The run
# ------------------------------------------------------------------------------------------------------------
def parse_arguments(argv):
    parser = Parser(description="Train a model that answers by rewards (REINFORCE) or preferences (DPO).")
    add = parser.add_argument
    add("--steps", type=whole_number(1), help="updates")
    add("--show", type=whole_number(1), help="print so many prompts with answers, then stop")
    add("--method", choices=tuple(DEFAULTS), help="default: dpo for pairs, else reinforce")
    add("--reward", metavar="NAME", help=f"{', '.join(REWARDS)} or FILE.py:NAME (default sentence)")
    add("--beta", type=positive, help="of DPO: how far from the base (default 0.1)")
    return train.parse_run_options(
        parser, argv, ["context"], "pairs, records of prompt, chosen and rejected; or prompts, in records as of "
        "sft.py (default: what the base was fine-tuned on)")


def begin_run(given, out, ranks):
    """-> the Training of a new run."""
    base, preset, config, tokenizer, data = sft.read_base(given)
    method = given.setdefault("method", "dpo" if has_pairs(data) else "reinforce")
    other = "reward" if method == "dpo" else "beta"
    require(other not in given, f"--{other} is not for --method {method}.")
    find_reward(given.setdefault("reward", "sentence"))
    read = read_pairs if method == "dpo" else sft.read_conversations
    read(data)                                      # before an older run is set aside: what cannot be used is said
    steps, batch_tokens, lr, every = DEFAULTS[method][preset]
    usual = sft.defaults(batch_tokens, lr, 0, every) | {"steps": steps, "optimizer": "adamw", "decay": 0.0}
    settings = train.make_settings(given, preset, config, usual, ranks)
    settings.data = data
    print(f"{base} learns by {method} into {out}, from {', '.join(settings.data)}.")
    return train.new_training("rl.py", out, config, tokenizer, settings, ranks, base)


def show(given):
    """Print the rows of the first pairs, or what the data answers to the first prompts, and its reward."""
    _, _, config, tokenizer, data = sft.read_base(given)
    reward, _ = find_reward(given.get("reward", "sentence"))
    for pair in read_pairs(data)[:given["show"]]:
        for row in pair_rows(tokenizer, pair, config.context):
            value = reward_of(reward, tokenizer, pair[0], row)
            sft.print_row(tokenizer, f"reward {value:.3f}", *row)


def run(args, ranks):
    """-> exit code."""
    given = train.given_options(args)
    base = sft.base_of(given, "-sft")
    out = args.out or f"out/{os.path.basename(base)}-rl"
    from_base = {**given, "base": base}
    if args.show:
        return show(from_base)
    training = train.resume(given, out, "rl.py", ranks) if args.resume else begin_run(from_base, out, ranks)
    make = preferring if training.settings.method == "dpo" else reinforcing
    return sft.start(training, make(training))      # which may set the number of steps: as many as the pairs make


def main(argv):
    return train.run_ranks(run, parse_arguments(argv))


if __name__ == "__main__":
    run_script(main, to_the_end=True)
