"""rl.py: preferences and rewards.  A model that answers becomes one whose answers are liked.

    python rl.py                                    out/small-sft -> out/small-sft-rl: REINFORCE, a reward by rule
    python rl.py --base out/big-sft --reward echo   another model, another rule; FILE.py:NAME is your own
    python rl.py --base out/big-sft --data pairs.jsonl      pairs, a better and a worse answer: DPO
    python rl.py --method dpo                       DPO on the pairs that go with small's text
    python rl.py --resume                           go on with an interrupted run

Read before it: sft.py.  train.py's rows, loop and folder serve here unchanged, and AdamW without decay.

The one line of mathematics.  With p the softmax and y the token that stands there, the gradient of every method at the
logits is

    d loss / d logits = w (p - onehot(y))           w: one number for a whole answer

Pretraining and fine-tuning have w = 1: make the text more probable.  REINFORCE and DPO only choose another w: an answer
with w > 0 becomes more probable, one with w < 0 less.  Section 1 derives both.

    1. the two weights    REINFORCE and DPO
    2. rewards            rules that say how good an answer is
    3. REINFORCE          prompts -> answers -> rewards -> weights
    4. DPO                pairs -> log-probabilities -> weights
    5. the run

What it does not do: no value network, no ratio and no clipping (PPO), no division by the deviation of a group (GRPO),
no KL term in the loss (the distance to the base is measured, not bounded), no learned reward model.
"""
from script import Parser, bounded, json_values, make_pair, read_records, refusing, require, run_script, set_threads

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
HELD_OUT = 32               # held-out prompts that an evaluation answers, GROUP times each

# Steps (0: until DPO has read all pairs once), tokens a step, learning rate, steps from one evaluation and save to the
# next.  REINFORCE takes tokens / context answers a step.  Chosen by short runs; docs/notes.md says what else was tried.
DEFAULTS = {
    "reinforce": {
        "small": (12, 32768, 8e-5, 4),
        "medium": (30, 65536, 2e-5, 10),
        "big": (60, 262144, 5e-6, 10)},
    "dpo": {
        "small": (0, 4096, 3e-4, 100),
        "medium": (0, 8192, 4e-5, 20),
        "big": (0, 8192, 2e-5, 20)}}


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
    """log_probs, reference (2n,), where chosen and rejected alternate -> (their weights (2n,), z (n,))."""
    ratio = (log_probs - reference).reshape(-1, 2)
    z = beta * (ratio[:, 0] - ratio[:, 1])
    push = beta / (1 + np.exp(z))                                           # beta sigmoid(-z)
    return np.stack([push, -push], axis=1).ravel(), z


def dpo_loss(z):
    """The mean of -log sigmoid(z)."""
    return np.logaddexp(0, -z).mean()


# ------------------------------------------------------------------------------------------------------------
# 2. Rewards: (prompt, answer: texts; tokens: how many the answer has; ended: whether the model ended it) -> a number
# ------------------------------------------------------------------------------------------------------------
def sentence(prompt, answer, tokens, ended):
    """1 for one whole sentence: it ended, has 5 to 24 tokens, and its only . ! or ? is its last character."""
    return float(ended and 5 <= tokens <= 24 and re.fullmatch(r"[^.!?]+[.!?]", answer) is not None)


def echo(prompt, answer, tokens, ended):
    """1 if the answer has a word of the question, of five letters or more."""
    words = re.findall(r"[^\W\d_]{5,}", prompt.lower())
    return float(any(word in answer.lower() for word in words))


def short(prompt, answer, tokens, ended):
    """The fewer tokens the better: from 1 down to 0.  0 for an empty answer, or one that did not end."""
    return 1 - tokens / ANSWER_TOKENS if tokens and ended else 0.0


REWARDS = {"sentence": sentence, "echo": echo, "short": short}


def find_reward(name):
    """-> the function for a name in REWARDS, or FILE.py:NAME."""
    if name in REWARDS:
        return REWARDS[name]
    path, _, function = name.rpartition(":")
    require(path.endswith(".py"), f"the reward must be {', '.join(REWARDS)} or FILE.py:NAME, not {name}.")
    with refusing(f"the reward {name} cannot be used"):
        own = runpy.run_path(path)[function]

    def reward(*arguments):
        with refusing(f"the reward {name} cannot be used"):
            return float(own(*arguments))
    return reward


# ------------------------------------------------------------------------------------------------------------
# 3. REINFORCE: prompts -> answers -> rewards -> weights
# ------------------------------------------------------------------------------------------------------------
def make_row(prompt, answer):
    """Two lists of ids -> a row, of which the answer is learned."""
    ids = np.array(prompt + answer)
    return ids, np.arange(len(ids)) >= len(prompt)


def draw_answers(training, reward, openings, seed):
    """The model answers each of these (sft.opening) -> (rows, their rewards (n,), the answers as texts).  seed: of the
    noise, a number or several."""
    tokenizer = training.tokenizer
    T, _ = training.sizes
    special = tokenizer.special.values()
    prompts = [sft.cut_prompt(tokenizer, opening, T) for opening in openings]
    seeds = np.random.default_rng(seed).integers(0, 1 << 63, len(prompts))
    sampling = Sampling(seed=seeds, vocab=tokenizer.vocab_size)
    most = min(ANSWER_TOKENS, (T + 3) // 4)
    answers = generate_batch(training.model, prompts, sampling, special, most)
    texts = []
    rewards = []
    for (_, question), answer in zip(openings, answers):
        said = [token for token in answer if token not in special]
        texts.append(tokenizer.decode(said))
        ended = answer[-1] == tokenizer.end_of_turn
        rewards.append(reward(question, texts[-1], len(said), ended))
    return list(map(make_row, prompts, answers)), np.array(rewards), texts


def reinforcing(training):
    """-> the Job of a run on the prompts of conversations."""
    settings = training.settings
    model = training.model
    T, _ = training.sizes
    reward = find_reward(settings.reward)
    base_options = {"dtype": np.float32, "training": False}
    base, _ = checkpoint.load(training.state["base"], model_cpu, base_options, T)
    conversations, unseen = sft.read_conversations(settings)
    true_rows = [sft.make_row(training.tokenizer, conversation, T) for conversation in unseen]
    to_learn = list(dict.fromkeys(map(sft.opening, conversations)))
    held_out = list(dict.fromkeys(map(sft.opening, unseen)))[:HELD_OUT]
    means = {}                                      # of the rewards of each step

    def batch(step):
        prompts = max(1, settings.batch_tokens // T // GROUP)
        chosen = train.in_turn(len(to_learn), settings.seed, step * prompts, prompts)
        asked = [to_learn[i] for i in np.repeat(chosen, GROUP)]
        rows, rewards, _ = draw_answers(training, reward, asked, [settings.seed, step])
        means[step + 1] = rewards.mean()
        return rows, reinforce_weights(rewards)

    def evaluate(step):
        asked = [opening for opening in held_out for _ in range(GROUP)]
        rows, rewards, texts = draw_answers(training, reward, asked, settings.seed)
        losses = train.row_losses(training, rows)
        weights = model.read(model.flat_params).copy()
        model.write(model.flat_params, base.flat_params)        # the base takes the model's place for a moment
        kl = (train.row_losses(training, rows) - losses).sum() / train.learned(rows)
        model.write(model.flat_params, weights)
        return {
            "reward": rewards.mean(),                                           # of the answers
            "kl": kl,                                                           # from the base, nats a token
            "forgotten": train.measure(training, {"true": true_rows})["val_loss"],      # of the true answers
            "samples": [(f"{rewards[i]:.2f} {asked[i][1]}", texts[i]) for i in range(0, len(asked), GROUP)[:2]]}

    return train.Job(batch, evaluate, lambda step: f"reward {means[step]:.3f}")


# ------------------------------------------------------------------------------------------------------------
# 4. DPO: pairs -> log-probabilities -> weights
# ------------------------------------------------------------------------------------------------------------
def pair_rows(tokenizer, pair, T):
    """-> (the rows of chosen and rejected, of which the last answer is learned; whether one had to be cut)."""
    (system, turns), rejected = pair
    question, chosen = turns[-1]
    rows = []
    cut = False
    for answer in (chosen, rejected):
        conversation = system, [*turns[:-1], (question, answer)]
        ids, mask = sft.make_row(tokenizer, conversation, T)
        whole, _ = sft.make_row(tokenizer, conversation, 1 << 20)
        cut = cut or len(ids) < len(whole)
        start = 1 + np.flatnonzero(~mask)[-1]
        rows.append((ids, np.arange(len(ids)) >= start))
    return rows, cut


def pair_batches(tokenizer, pairs, settings, T):
    """Pairs -> (batches: lists of rows, in which chosen and rejected alternate; a sentence about them).  They are the
    same in every epoch, so that the reference fits them to the bit.  Pairs whose answers are equal, as far as the
    window goes, are left out."""
    both = [pair_rows(tokenizer, pair, T) for pair in pairs]
    rows = []
    for (chosen, rejected), _ in both:
        if not np.array_equal(chosen[0], rejected[0]):
            rows.append((chosen, rejected))
    cuts = sum(cut for _, cut in both)
    require(rows, "each pair needs two answers that differ within the context.")
    sides = [sft.padded_lengths(side, T) for side in zip(*rows)]        # of all that is chosen, of all that is rejected
    lengths = 2 * np.max(sides, axis=0)
    plan = sft.plan_epoch(lengths, settings.batch_tokens, settings.seed, 0)
    batches = [[row for i in batch for row in rows[i]] for batch in plan]
    return batches, (f"{len(both):,} pairs, {cuts:,} of them cut to the window, {len(both) - len(rows):,} left out, "
                     "because their answers are equal within it")


def read_pairs(tokenizer, settings, T):
    """-> (batches to learn, batches held out, a sentence about both) of a run's files."""
    pairs = read_records(settings.data, make_pair)
    openings = [sft.opening(conversation) for conversation, _ in pairs]
    parts = sft.hold_out(pairs, openings, settings.seed)
    (batches, words), (held_out, more) = [pair_batches(tokenizer, part, settings, T) for part in parts]
    return batches, held_out, f"{words}; held out: {more}."


def preferring(training):
    """-> the Job of a run on pairs."""
    settings = training.settings
    T, _ = training.sizes
    batches, held_out, words = read_pairs(training.tokenizer, settings, T)
    print(f"{training.out}: {words}")
    if "reference" not in training.state:           # the model is still the base
        training.state["reference"] = []
        for rows in batches + held_out:
            log_probs = -train.row_losses(training, rows)
            training.state["reference"].append(log_probs.tolist())
    reference = list(map(np.array, training.state["reference"]))
    margins = {}                                    # z of the pairs of each step

    def batch(step):
        [number] = train.in_turn(len(batches), settings.seed, step, 1)
        rows = batches[number]
        log_probs = -train.row_losses(training, rows)
        weights, margins[step + 1] = dpo_weights(log_probs, reference[number], settings.beta)
        # the loop divides by the number of learned tokens, and this loss by that of pairs
        tokens_a_pair = train.learned(rows) / len(margins[step + 1])
        return rows, np.nan_to_num(weights) * tokens_a_pair

    def evaluate(step):
        log_probs = -np.concatenate([train.row_losses(training, rows) for rows in held_out])
        _, z = dpo_weights(log_probs, np.concatenate(reference[len(batches):]), settings.beta)
        texts = [training.tokenizer.decode(ids[mask]) for ids, mask in held_out[0][:2]]
        return {
            "dpo": dpo_loss(z),
            "accuracy": np.heaviside(z, 0.5).mean(),
            "margin": z.mean(),
            "chosen": log_probs[::2].mean(),        # both may fall, which the margin does not tell
            "rejected": log_probs[1::2].mean(),
            "samples": list(zip([f"margin {z[0]:.2f} of", "over"], texts))}

    return train.Job(batch, evaluate, lambda step: f"dpo {dpo_loss(margins[step]):.4f}")


# ------------------------------------------------------------------------------------------------------------
# 5. The run
# ------------------------------------------------------------------------------------------------------------
JOBS = {"reinforce": reinforcing, "dpo": preferring}


def begin(options, out, ranks):
    """Make the folder of a new run."""
    base, preset, config, tokenizer, data = sft.read_base(options)
    first = json_values(data[0])[0]
    method = options.get("method", "dpo" if "chosen" in first and "output" not in first else "reinforce")
    unused = "reward" if method == "dpo" else "beta"
    require(unused not in options, f"--{unused} is not for --method {method}.")
    steps, batch_tokens, lr, every = DEFAULTS[method][preset]
    usual = train.defaults(steps, batch_tokens, lr, 0, every)
    usual |= {"optimizer": "adamw", "decay": 0.0, "method": method, "reward": "sentence"}
    settings = train.make_settings(options, preset, config, usual, ranks)
    settings.data = data
    find_reward(settings.reward)
    if settings.steps == 0:
        settings.steps = len(read_pairs(tokenizer, settings, config.context)[0])
    train.create_run("rl.py", out, settings, config, tokenizer, base)


def main(argv):
    parser = Parser(description="Train a model that answers by rewards (REINFORCE) or preferences (DPO).")
    add = parser.add_argument
    add("--method", choices=tuple(DEFAULTS), help="default: dpo for pairs, else reinforce")
    add("--reward", metavar="NAME", help=f"{', '.join(REWARDS)} or FILE.py:NAME, which is run (default sentence)")
    add("--beta", type=bounded(float, 1e-6, 1000), help="of DPO: how far from the base (default 0.1)")
    options = train.parse_run_options(
        parser, argv, ["context"], "pairs, records of prompt, chosen and rejected; or prompts, in records as of "
        "sft.py (default: what the base was fine-tuned on)")
    base = sft.base_of(options, "-sft")
    out = options.get("out", f"out/{os.path.basename(base)}-rl")
    if not options["resume"]:
        options["base"] = base
    return train.go("rl.py", options, out, begin, lambda training: JOBS[training.settings.method](training))


if __name__ == "__main__":
    run_script(main, to_the_end=True)
