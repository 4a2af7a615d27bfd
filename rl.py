"""rl.py: preferences and rewards.  A model that answers becomes one whose answers are liked.

    python rl.py                                    out/small-sft -> out/small-sft-rl: REINFORCE, a reward by rule
    python rl.py --base out/big-sft --reward short  another model and another rule
    python rl.py --reward mine.py:asks              a rule of your own: the function `asks` of mine.py (the file is run)
    python rl.py --base out/big-sft --data pairs.jsonl      pairs, a better and a worse answer: DPO
    python rl.py --method dpo                       DPO on the pairs that go with small's text
    python rl.py --resume                           go on with an interrupted run (name a rule of your own again)

Read before it: sft.py.  train.py's rows, loop and folders of runs are used here unchanged.  The optimizer is AdamW
without decay (with Muon DPO ranked fewer held-out pairs right: docs/notes.md).

One formula for all methods.  Let p be the softmax at one position, and y the token that the answer has there.  Then for
every method the gradient with respect to the logits is (derived beside cross_entropy_backward in model_cpu.py)

    d loss / d logits = w (p - onehot(y)) / N

    w           one number for a whole answer
    onehot(y)   1 at y, else 0
    N           the number of the step's learned tokens

Pretraining and fine-tuning have w = 1 for head 0: make the text more probable.  REINFORCE and DPO only choose another
w: an answer with w > 0 becomes more probable, one with w < 0 less.  Section 1 derives both.

    1. the two weights    REINFORCE and DPO
    2. rewards            rules that say how good an answer is
    3. REINFORCE          prompts -> answers -> rewards -> weights
    4. DPO                pairs -> log-probabilities -> weights
    5. the run            defaults, a reward of your own, options

Only head 0 has a loss, because it draws the answers: from it head 0 and all layers learn.  The matrices of the further
heads, which make drafts, get no gradient.  With weight decay they would only shrink, so the decay is 0.

What it does not do, for those who know other methods: no value network, no clipped ratio (PPO), no division by the
standard deviation of a group (GRPO), no KL term in the loss (the distance to the base is measured, not bounded), no
learned reward model.
"""
from script import (Parser, bounded, hash_files, make_pair, read_records, refusing, require, run_script, set_threads,
                    show_progress)

import os
import re
import runpy
from zlib import crc32

if __name__ == "__main__":
    set_threads()           # before NumPy loads

import train                # first: it says what to do where NumPy is missing
import checkpoint
import model_cpu
import numpy as np
import sft


# ------------------------------------------------------------------------------------------------------------
# 1. The two weights
# ------------------------------------------------------------------------------------------------------------
GROUP = 16                  # answers to one prompt


# REINFORCE (Williams 1992).  An answer a is drawn with the probability pi(a), a product over its tokens, and
# earns the reward r(a).  We want to increase the mean reward J = sum_a pi(a) r(a).  Let d be the derivative by any
# weight.  Since d log pi = d pi / pi,
#     dJ = sum_a d pi(a) r(a) = sum_a pi(a) r(a) d log pi(a)          (r does not depend on the weights)
# which is the expected value of r d log pi(a).  The mean over some drawn answers estimates it.
# A baseline b, any number that does not depend on the answer, may be subtracted from r, because
#     sum_a pi(a) b d log pi(a) = b sum_a d pi(a) = b d(sum_a pi(a)) = b d(1) = 0.
# We take for b the mean reward of the group, the g = GROUP answers to one prompt.  So an answer counts by how
# much better it is than the others, and the noise is far smaller.  Strictly, this b depends on the answer, because the
# answer's own r is a part of the mean.  That does no harm:
#     b     = r/g + (1 - 1/g) (the mean of the g - 1 others)
#     r - b = (1 - 1/g) (r - the mean of the others)
# The others are drawn independently, so their mean is a true baseline: it does not depend on this answer.  What is left
# is the factor 1 - 1/g, the same for all answers.  So the estimate of dJ keeps its direction, and only its length
# changes.  Altogether:
#     loss = -1/N sum over the answers of (r - b) log pi(a)
#     log pi(a) = sum over its tokens of log p[y]
#     d loss / d logits = 1/N (r - b) (p - onehot(y))
# A mean over answers divides by their number.  The loop of train.py divides by N, the number of their tokens, instead.
# In a step this, too, changes only the length.
def reinforce_weights(rewards):
    """rewards (n,) of groups of GROUP answers -> weights (n,): each reward minus the mean of its group."""
    by_group = np.reshape(rewards, (-1, GROUP))
    return (by_group - by_group.mean(axis=1, keepdims=True)).ravel()


# DPO (Rafailov et al. 2023).  Of two answers to a prompt one was chosen and one rejected.  The reference is the base,
# the model with which the run begins.  beta (log pi - log ref) says how much more probable an answer has become since
# then; DPO takes it as the model's own reward for the answer.  Why: let r be any reward, and look for the pi with the
# largest  sum_a pi(a) r(a) - beta KL,  where KL = sum_a pi(a) (log pi(a) - log ref(a)) measures how far pi is from ref.
# The pi(a) add up to 1, so pi can only change by moving probability from one answer to another.  At the best pi nothing
# is gained by that.  If the derivatives by two pi(a) differed, it would pay to move some from one answer to the other.
# So they are one number k (a Lagrange multiplier).  (The derivative of pi (log pi - log ref) by pi is log pi - log ref
# + 1.)
#     k    = r(a) - beta (log pi(a) - log ref(a) + 1)
#     r(a) = beta (log pi(a) - log ref(a)) + (k + beta)
# and k + beta is the same for both answers of a pair.  So it cancels in z = r(chosen) - r(rejected).
# The chance that the model agrees with the choice is taken to be sigmoid(z), as Bradley & Terry (1952) have it
# for the difference of two scores, and the loss is its -log:
#     z = beta ((log pi_c - log ref_c) - (log pi_r - log ref_r))              c: chosen, r: rejected
#     loss = 1/n sum of -log sigmoid(z)                                       over n pairs
#     d loss / dz = -sigmoid(-z) / n              because log sigmoid(z) = -log(1 + e^-z), whose slope is sigmoid(-z)
#     dz / d log pi_c = beta
#     dz / d log pi_r = -beta
# And d(-log pi) / d logits = p - onehot(y) at each token of the answer.  So, up to the factor 1/n,
#     w_c = beta sigmoid(-z)        w_r = -beta sigmoid(-z)
# (The loop of train.py divides by N, the number of tokens, and not by n.  So section 4 multiplies by N/n.)  A pair that
# the model already gets right (z large) hardly pushes any more.
def dpo_weights(log_probs, reference, beta):
    """log_probs, reference (2n,), where chosen and rejected alternate -> (their weights (2n,), z (n,))."""
    log_ratio = (log_probs - reference).reshape(-1, 2)
    z = beta * (log_ratio[:, 0] - log_ratio[:, 1])
    push = beta / (1 + np.exp(z))                                           # beta sigmoid(-z)
    return np.stack([push, -push], axis=1).ravel(), z


def dpo_loss(z):
    """The mean of -log sigmoid(z)."""
    return np.logaddexp(0, -z).mean()


# ------------------------------------------------------------------------------------------------------------
# 2. Rewards
# ------------------------------------------------------------------------------------------------------------
ANSWER_TOKENS = 40          # of an answer, at most.  REINFORCE: and at most a quarter of the context (small: 32)


# A reward is a function of four arguments, and gives a number:
#     prompt    the user's text
#     answer    the model's text
#     tokens    how many tokens the answer has, without its end token
#     ended     whether the model ended it; an answer that grows too long is cut
def sentence(prompt, answer, tokens, ended):
    """1 for an answer that is one whole sentence: the model ended it, it has 5 to 24 tokens, and its only . ! or ? is
    its last character.  0 for any other."""
    return float(ended and 5 <= tokens <= 24 and re.fullmatch(r"[^.!?]+[.!?]", answer) is not None)


def short(prompt, answer, tokens, ended):
    """The fewer tokens the better.  0 for an empty answer, or one that did not end."""
    return 1 - tokens / ANSWER_TOKENS if tokens and ended else 0.0


REWARDS = {"sentence": sentence, "short": short}


# ------------------------------------------------------------------------------------------------------------
# 3. REINFORCE: prompts -> answers -> rewards -> weights
# ------------------------------------------------------------------------------------------------------------
HELD_OUT = 32               # held-out prompts that an evaluation answers, GROUP times each


def draw_answers(training, reward, openings, seed):
    """Let the model answer each opening GROUP times -> (rows, their rewards (n,), the answers as texts).
    openings: a list of (system text or None, user text).  seed: of the noise, a number or a list of numbers."""
    tokenizer = training.tokenizer
    T, _ = training.sizes
    special = tokenizer.special.values()
    asked = [opening for opening in openings for _ in range(GROUP)]
    prompts = [sft.make_prompt(tokenizer, *opening, T) for opening in asked]
    seeds = np.random.default_rng(seed).integers(0, 1 << 63, len(prompts))      # another for each answer of a group
    # temperature 1, and every token may be drawn: section 1 needs answers with the probability pi
    sampling = model_cpu.Sampling(seed=seeds, vocab=tokenizer.vocab_size)
    most = min(ANSWER_TOKENS, (T + 3) // 4)         # a quarter of the context, rounded up
    progress = show_progress("tokens of answers")
    answers = model_cpu.generate_batch(training.model, prompts, sampling, special, most, progress)
    progress(1, 1)              # answers may end early; now the line disappears
    rows = []
    rewards = []
    texts = []
    for (_, question), prompt, answer in zip(asked, prompts, answers):
        ids = np.array(prompt + answer)
        rows.append((ids, np.arange(len(ids)) >= len(prompt)))
        text = tokenizer.decode_plain(answer)
        tokens = sum(token not in special for token in answer)
        ended = answer[-1] == tokenizer.end_of_turn
        texts.append(text)
        rewards.append(reward(question, text, tokens, ended))
    return rows, np.array(rewards), texts


def reinforce_job(training, reward):
    """-> the Job of a run on the prompts of conversations."""
    settings = training.settings
    model = training.model
    T, _ = training.sizes
    state = training.state
    base, _ = checkpoint.load(state["base"], model_cpu, {"dtype": np.float32}, T)
    key = crc32(base.flat_params)                   # kl is measured against the base: it must not have changed
    require(state.setdefault("base_key", key) == key, f"{state['base']}: changed since {training.out} began.")
    conversations, unseen = sft.read_conversations(settings)
    true_rows = [sft.make_row(training.tokenizer, conversation, T) for conversation in unseen]
    to_learn = list(dict.fromkeys(map(sft.opening, conversations)))
    held_out = list(dict.fromkeys(map(sft.opening, unseen)))[:HELD_OUT]
    print(f"{training.out}: {len(to_learn):,} prompts, and {len(held_out):,} of those that are held out; {GROUP} "
          "answers to each.\n"
          "loss: mean of weight x (-log p) in a step; it may rise, so look at reward\n"
          "reward: the mean reward of the answers to held-out prompts\n"
          "kl: how far the model is from the base on these answers, in nats a token\n"
          "forgotten: nats a token of the true answers; it rises as the model forgets them")

    def batch(step):
        prompts = max(1, settings.batch_tokens // T // GROUP)       # about batch_tokens // T answers, in whole groups
        places = train.shuffled(len(to_learn), settings.seed, step * prompts, prompts)
        rows, rewards, _ = draw_answers(training, reward, [to_learn[i] for i in places], [settings.seed, step])
        training.note = f"reward {rewards.mean():.3f}"
        return rows, reinforce_weights(rewards)

    def evaluate(step):
        rows, rewards, texts = draw_answers(training, reward, held_out, settings.seed)
        if not reinforce_weights(rewards).any():
            print("note: for each held-out prompt all answers have the same reward.\n"
                  "A step learns nothing if this is so for its prompts, too.")
        losses = train.row_losses(training, rows)
        # The mean of log pi - log base over answers drawn from pi estimates the KL divergence of pi from the base.  So
        # measure the same rows with the base's weights, too, then put the model's back.  (A second model on a GPU would
        # take as much of its memory again.)
        # copy: on a CPU `read` gives no copy, but the array that `write` changes
        weights = model.read(model.flat_params).copy()
        model.write(model.flat_params, base.flat_params)
        kl = (train.row_losses(training, rows) - losses).sum() / train.count_learned(rows)
        model.write(model.flat_params, weights)
        return {
            "reward": rewards.mean(),
            "kl": kl,
            "forgotten": train.measure(training, {"true": true_rows})["val_loss"],
            "samples": [(f"{rewards[i]:.2f} {held_out[i // GROUP][1]}", texts[i])
                        for i in range(0, len(rows), GROUP)[:2]]}

    return train.Job(batch, evaluate)


# ------------------------------------------------------------------------------------------------------------
# 4. DPO: pairs -> log-probabilities -> weights
# ------------------------------------------------------------------------------------------------------------
def pair_rows(tokenizer, pair, T):
    """-> [the row of the chosen answer, the row of the rejected one].  Of a conversation only the last answer is
    learned."""
    (system, turns), rejected = pair
    question, chosen = turns[-1]
    rows = []
    for answer in (chosen, rejected):
        conversation = system, [*turns[:-1], (question, answer)]
        ids, mask = sft.make_row(tokenizer, conversation, T)
        # the mask is True for the answers of all turns, for example 0 0 1 1 0 0 1 1 1.  The last answer stands behind
        # its last 0
        end_of_prompt = np.flatnonzero(~mask)[-1]
        rows.append((ids, np.arange(len(ids)) > end_of_prompt))
    return rows


def read_pairs(tokenizer, settings, T):
    """Read a run's files -> (the batches to learn, the rows held out, what to print: how many pairs there are).  A
    batch is a list of rows in which chosen and rejected answers alternate.  The rows held out are such a list, too.

    Every epoch has the same batches.  The reference's log-probabilities are computed in these batches, too, so they are
    rounded as the model's are.  Then z is exactly 0 at the start, as it must be for the same weights."""
    pairs = read_records(settings.data, make_pair)
    openings = [sft.opening(conversation) for conversation, _ in pairs]
    parts = []
    for part in sft.hold_out(pairs, openings):
        both = [pair_rows(tokenizer, pair, T) for pair in part]
        parts.append([rows for rows in both if not np.array_equal(rows[0][0], rows[1][0])])
    to_learn, held_out = parts
    require(to_learn and held_out, "each pair needs two answers that differ within the context.")
    # plan_epoch plans pairs here, each by its longer row: at most half of batch_tokens for these, so that both rows of
    # the pairs have at most batch_tokens
    longer = [max(rows, key=lambda row: len(row[0])) for rows in to_learn]
    plan = sft.plan_epoch(longer, T, settings.batch_tokens // 2, settings.seed, 0)
    batches = [[row for i in batch for row in to_learn[i]] for batch in plan]
    full = sum(len(ids) > T for rows in to_learn + held_out for ids, _ in rows)
    return batches, sum(held_out, []), (
        f"{len(pairs):,} pairs, {len(to_learn):,} to learn, {len(held_out):,} held out.\n"
        "(A pair whose answers are equal within the window is left out.)\n"
        f"{full:,} of their rows fill the window, which cuts longer ones.")


def dpo_job(training):
    """-> the Job of a run on pairs."""
    settings = training.settings
    tokenizer = training.tokenizer
    batches, held_out, counts = read_pairs(tokenizer, settings, training.model.config.context)
    parts = [*batches, held_out]
    state = training.state
    if not training.model.step:                     # the model is still the base
        log_probs = [-train.row_losses(training, rows) for rows in parts]
        state["reference"] = [part.tolist() for part in log_probs]
    with refusing(f"the record of the run in {training.out} cannot be used"):
        # a number for each row; reshape raises an error if the record does not fit the pairs
        *reference, held_out_reference = [
            np.reshape(np.float64(state["reference"][i]), len(rows)) for i, rows in enumerate(parts)]
    # the first held-out pair is shown by every evaluation
    (ids, mask), (other_ids, other_mask), *_ = held_out
    examples = [("chosen", tokenizer.decode(ids[mask])), ("rejected", tokenizer.decode(other_ids[other_mask]))]
    prompts = {"the model says": ids[~mask].tolist()}
    print(f"{training.out}: {counts}\n"
          "loss: mean of weight x (-log p) in a step; it may rise, so look at dpo\n"
          "dpo: the loss of the held-out pairs\n"
          "accuracy: the share of them with z > 0 (z = 0, as at first, counts half)\n"
          "margin: their mean z: beta times (the gain of the chosen - that of the rejected answer)\n"
          "chosen, rejected: the mean log-probability of such an answer; both may fall")

    def batch(step):
        [number] = train.shuffled(len(batches), settings.seed, step, 1)
        rows = batches[number]
        log_probs = -train.row_losses(training, rows)       # a forward to know z; the loop makes another
        weights, z = dpo_weights(log_probs, reference[number], settings.beta)
        training.note = f"dpo {dpo_loss(z):.4f}"
        # times N / n: see section 1
        return rows, weights * (train.count_learned(rows) / len(z))

    def evaluate(step):
        log_probs = -train.row_losses(training, held_out)
        _, z = dpo_weights(log_probs, held_out_reference, settings.beta)
        accuracy = np.heaviside(z, 0.5).mean()
        lost = (held_out_reference - log_probs)[::2].mean()         # of the chosen answers
        if accuracy == 1 and lost > 0.05:           # below 0.05 the note would say "by 0.0 nats"
            print("note: every chosen answer gained on its rejected one, and yet they are less\n"
                  f"probable than before, by {lost:.1f} nats each.  Do its texts get worse?\n"
                  "Then take fewer --steps, or a lower --lr.")
        return {
            "dpo": dpo_loss(z),
            "accuracy": accuracy,
            "margin": z.mean(),
            "chosen": log_probs[::2].mean(),
            "rejected": log_probs[1::2].mean(),
            "samples": examples + train.draw_samples(training, prompts, ANSWER_TOKENS)}

    return train.Job(batch, evaluate)


# ------------------------------------------------------------------------------------------------------------
# 5. The run
# ------------------------------------------------------------------------------------------------------------
# Steps (0: until DPO has read all pairs once), tokens a step, learning rate, steps of warmup, steps from one evaluation
# and save to the next.  REINFORCE draws batch_tokens / context answers in a step (small: 32768 / 128 = 256).  Chosen by
# short runs; docs/notes.md says what else was tried.
DEFAULTS = {
    "reinforce": {      # steps, batch_tokens, lr, warmup, every
        "small": (12, 32768, 8e-5, 0, 4),
        "medium": (30, 65536, 2e-5, 0, 10),
        "big": (60, 262144, 5e-6, 0, 10)},
    "dpo": {
        "small": (0, 4096, 3e-4, 0, 100),
        "medium": (0, 8192, 4e-5, 0, 20),
        "big": (0, 8192, 2e-5, 0, 20)}}


def find_reward(name):
    """-> (the function for a name in REWARDS, or FILE.py:NAME; a fingerprint of its file, "" where there is none).
    The code in the file is run."""
    if name in REWARDS:
        return REWARDS[name], ""
    path, _, function = name.rpartition(":")
    require(path.endswith(".py"), f"the reward must be {', '.join(REWARDS)} or FILE.py:NAME, not {name}.")
    with refusing(f"the reward {name} cannot be used"):
        names = runpy.run_path(path)
        require(function in names, f"{path} has no function {function}")

    def reward(*arguments):
        with refusing(f"the reward {name} cannot be used"):
            value = float(names[function](*arguments))
            require(np.isfinite(value), f"it is {value}")
            return value
    return reward, hash_files([path])


def begin(options, out, ranks):
    """Make the folder of a new run."""
    base, preset, config, tokenizer, data = sft.read_base(options, "-sft")
    # The names in the first record (list(record) lists its keys).  A file of pairs ("chosen", no "output") means DPO.
    # (Our own records have both names, and may be used for both: script.write_records.)
    names = read_records(data[:1], list)[0]
    method = options.get("method", "dpo" if "chosen" in names and "output" not in names else "reinforce")
    unused = "reward" if method == "dpo" else "beta"
    require(unused not in options, f"--{unused} is not for --method {method}.")
    usual = train.defaults(*DEFAULTS[method][preset])
    usual |= {"optimizer": "adamw", "decay": 0.0, "method": method, "reward": "sentence"}
    settings = train.make_settings(options, preset, config, usual, ranks)
    settings.data = data
    _, settings.reward_key = find_reward(settings.reward)
    if settings.steps == 0:
        settings.steps = len(read_pairs(tokenizer, settings, config.context)[0])
    train.create_run("rl.py", out, settings, config, tokenizer, base)


def main(argv):
    parser = Parser(description="Train a model that answers by rewards (REINFORCE) or preferences (DPO).")
    add = parser.add_argument
    add("--method", choices=tuple(DEFAULTS), help="default: dpo for pairs, else reinforce")
    add("--reward", metavar="NAME", help="sentence (default), short or FILE.py:NAME, a function in a file "
        "whose code is run")
    add("--beta", type=bounded(float, 1e-6, 1000), help="of DPO: the larger, the nearer to the base (default 0.1)")
    options = train.parse_run_options(
        parser, argv, ["context"], "pairs, records of prompt, chosen and rejected; or prompts, in records as of "
        "sft.py (default: small: what the base was fine-tuned on; else data/instructions*.json)")
    out = options.get("out", f"out/{os.path.basename(sft.base_of(options, '-sft'))}-rl")

    def make_job(training):
        settings = training.settings
        if settings.method == "dpo":
            return dpo_job(training)
        # A folder that is resumed may have been made by somebody else: it must not choose which code is run.
        require(settings.reward in REWARDS or "reward" in options, f"the reward of {training.out} is code in a "
                f"file, which is run only if you name it again: --reward {settings.reward}.")
        reward, key = find_reward(settings.reward)
        if key != settings.reward_key:
            print(f"note: the file of {settings.reward} has changed; the run goes on with what it holds now.")
            settings.reward_key = key
        return reinforce_job(training, reward)
    return train.go("rl.py", options, out, begin, make_job)


if __name__ == "__main__":
    run_script(main, to_the_end=True)
