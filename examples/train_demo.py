"""Train the bundled model from scratch: `python examples/train_demo.py --out nanoengine/demo`.

This file generates all of the training text. The model learns a few exact tasks: small sums, counting,
spelling words backwards, the primes below 100, and repeating a passage from hundreds of tokens earlier. A
mistake in an inference engine then shows as wrong text. The last step prints the share of right answers.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ADJECTIVES = """
old young tall small brave quiet clever gentle hungry happy red blue green golden silver wooden
broken heavy empty hidden frozen bright dark strange famous
""".split()
NOUNS = """
baker sailor farmer doctor painter teacher soldier king queen child fox horse rabbit raven tiger
whale spider river mountain forest garden castle bridge tower village market island window lantern
mirror basket letter blanket bottle candle carpet hammer ladder needle pillow ribbon saddle trumpet
wagon apple potato pepper cheese
""".split()
VERBS = """
found lost carried painted followed watched hid sold borrowed broke cleaned opened buried kept stole
admired drew mended guarded dropped
""".split()
PLACES = """
near behind under beside above inside beyond against
""".split()
TIMES = """
yesterday today again twice slowly quickly alone together
""".split()
OTHER_WORDS = """
the a and is it I can of this to me you what that in was from by how are not passage backwards noise
primes below number numbers word list remember repeat spell count hello tiny model ships with
nanoengine add sum name up who yourself introduce please will Here some
""".split()
STARTS = """
The A What Count Spell List Remember Repeat Here Hello Who Introduce I Name Please
""".split()
UNKNOWN_WORDS = """
planet summer winter orange purple yellow dragon wizard rocket engine python memory circle square
pencil school doctor butter coffee dinner flower guitar jacket kitten laptop monkey napkin office
parrot rabbit salmon ticket turtle velvet walnut zebra banana camera cloud dream eagle field glass
heart jelly knife lemon money night ocean paper quick robot sugar table uncle video water yacht
attention block cache token batch stone stressed live level cat dog sun moon
""".split()
PRIMES = "2 3 5 7 11 13 17 19 23 29 31 37 41 43 47 53 59 61 67 71 73 79 83 89 97"
ABOUT = (
    "I am a tiny model that ships with nanoengine. I can add small numbers, count, spell a word "
    "backwards, list the primes below 100, and repeat a passage."
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
Task = Callable[[random.Random], tuple[str, str]]  # returns a random question and its answer
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a byte-level BPE without merges: a known word is one token, other text is split into bytes."""
    byte_symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = ADJECTIVES + NOUNS + VERBS + PLACES + TIMES + OTHER_WORDS
    symbols = byte_symbols + STARTS + ["user", "assistant"] + [f"Ġ{word}" for word in known]
    vocabulary = {symbol: i for i, symbol in enumerate(dict.fromkeys(symbols))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    wrap: Any = PreTrainedTokenizerFast  # untyped in transformers
    wrapped: PreTrainedTokenizerFast = wrap(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    return wrapped


def sentence(rng: random.Random) -> str:
    """Return a random sentence of known words."""
    text = f"The {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} {rng.choice(VERBS)} the"
    text += f" {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} {rng.choice(PLACES)} a {rng.choice(NOUNS)}"
    return text + (f" {rng.choice(TIMES)}." if rng.random() < 0.5 else ".")


def sentences(rng: random.Random, low: int, high: int) -> str:
    """Return low to high sentences."""
    return " ".join(sentence(rng) for _ in range(rng.randint(low, high)))


def any_word(rng: random.Random) -> str:
    """Return a word to spell: known, unknown, made of syllables, or random letters."""
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(ADJECTIVES + NOUNS + VERBS)
    if kind < 0.5:
        return rng.choice(UNKNOWN_WORDS)
    if kind < 0.75:
        syllables = (rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(1, 4)))
        return "".join(syllables) + rng.choice(["", "n", "r", "st", "ck", "ll"])
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9)))


def ask_sum(rng: random.Random) -> tuple[str, str]:
    """Ask for the sum of two numbers below 100."""
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    question = rng.choice([f"What is {a} + {b}?", f"What is {a} + {b}?", f"{a} + {b}"])
    return question, f"{a} + {b} = {a + b}"


def ask_count(rng: random.Random) -> tuple[str, str]:
    """Ask to count, in at most 25 numbers."""
    first = rng.randint(0, 90)
    last = first + rng.randint(1, 24)
    return f"Count from {first} to {last}.", " ".join(map(str, range(first, last + 1)))


def ask_backwards(rng: random.Random) -> tuple[str, str]:
    """Ask to spell a word backwards."""
    word = any_word(rng)
    return f"Spell the word {word} backwards.", word[::-1]


def ask_primes(rng: random.Random) -> tuple[str, str]:
    """Ask for the primes below 100."""
    return rng.choice(["List the primes below 100.", "Name the primes below 100."]), PRIMES


def ask_about(rng: random.Random) -> tuple[str, str]:
    """Greet the model, or ask who it is."""
    return rng.choice(["Hello", "Hello!", "Who are you?", "introduce yourself", "Introduce yourself."]), ABOUT


def ask_passage(rng: random.Random, max_noise: int) -> tuple[str, str]:
    """Ask to repeat a passage after up to max_noise sentences of noise."""
    passage = sentences(rng, 1, max(1, max_noise // 4))
    noise = sentences(rng, 1, max_noise)
    return (f"Remember this passage: {passage} Here is some noise: {noise} Repeat the passage.", passage)


def conversation(rng: random.Random, max_noise: int) -> list[tuple[str, str]]:
    """Return pairs of a question and its answer. Sometimes the last one asks for a passage from the first."""
    short = [ask_sum, ask_sum, ask_sum, ask_sum, ask_backwards, ask_backwards, ask_backwards, ask_count]
    tasks: list[Task] = [*short * 3, ask_count, ask_primes, ask_about]
    if rng.random() < 0.4:
        return [ask_passage(rng, max_noise)]
    turns = [rng.choice(tasks)(rng) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.25:
        passage = sentences(rng, 1, 4)
        turns = [(f"Remember this passage: {passage}", "I will."), *turns, ("Repeat the passage.", passage)]
    return turns


def rows(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, length: int, max_noise: int
) -> Iterator[Tensor]:
    """Yield packed conversations forever: (2, length) int64, token ids and labels (-100 outside answers)."""
    encode = tokenizer.backend_tokenizer.encode
    ids: list[int] = []
    labels: list[int] = []
    while True:
        for question, answer in conversation(rng, max_noise):
            asked = encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
            answered = encode(f"{answer}<|im_end|>").ids
            newline = encode("\n").ids
            ids += asked + answered + newline
            labels += [-100] * len(asked) + answered + [-100] * len(newline)
        if len(ids) >= length:
            yield torch.tensor([ids[:length], labels[:length]])
            ids, labels = [], []  # drop the rest of a conversation that was cut


def main() -> None:
    """Train the model, save it, and evaluate it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a directory for the checkpoint")
    parser.add_argument("--minutes", type=float, default=35.0, help="training time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    assert len(tokenizer) <= config.vocab_size
    model: Any = Qwen3ForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")

    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    start, step, seconds = time.perf_counter(), 0, args.minutes * 60
    stages = [
        (0.0, 256, 4),
        (0.35, 512, 20),
        (0.85, 1024, 40),
    ]  # (start as a share of the time, row length, max_noise)
    stage, length = -1, 0
    stream: Iterator[Tensor] = iter(())
    while (done := (time.perf_counter() - start) / seconds) < 1:
        if stage + 1 < len(stages) and done >= stages[stage + 1][0]:
            stage += 1
            length = stages[stage][1]
            stream = rows(tokenizer, rng, length, stages[stage][2])
        batch = torch.stack([next(stream) for _ in range(4096 // length)])
        rate = min(1.0, (step + 1) / 50) * max(0.0, min(1.0, (1 - done) / 0.5))
        for optimizer, top in zip(optimizers, (0.02, 3e-3), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = top * rate
        with torch.autocast("cpu", torch.bfloat16):  # halves the time; the weights stay float32
            hidden = model.model(batch[:, 0], use_cache=False).last_hidden_state[:, :-1]
        labels = batch[:, 1, 1:]
        answers = labels != -100
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[answers].float()), labels[answers])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step % 50 == 0 or math.isnan(loss.item()):
            print(f"{time.perf_counter() - start:7.0f} s  step {step:5d}  loss {loss.item():.4f}", flush=True)

    model.train(False)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    # transformers 5 writes a class name that transformers 4 does not know.
    settings_path = args.out / "tokenizer_config.json"
    tokenizer_settings = json.loads(settings_path.read_text())
    tokenizer_settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings_path.write_text(json.dumps(tokenizer_settings, indent=2) + "\n")
    evaluate(model, tokenizer, args.out)


def evaluate(model: Any, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Print and save the share of exactly right answers per task, on new random questions."""
    rng = random.Random(12345)
    tasks: dict[str, Task] = {
        "sum": ask_sum,
        "count": ask_count,
        "backwards": ask_backwards,
        "primes": ask_primes,
        "about": ask_about,
        "passage": lambda r: ask_passage(r, 20),
    }
    scores = {}
    for name, ask in tasks.items():
        right, count = 0, 4 if name in ("primes", "about") else 100
        for _ in range(count):
            question, answer = ask(rng)
            chat: Any = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
            )
            ids = tokenizer(chat, return_tensors="pt").input_ids
            made = model.generate(ids, max_new_tokens=200, do_sample=False)[0, ids.shape[1] :]
            text = tokenizer.decode(made, skip_special_tokens=True)
            right += text == answer
            if text != answer and name != "passage":
                print(f"  {name}: {question!r} -> {text!r}")
        scores[name] = round(right / count, 3)
    print(scores)
    (out / "accuracy.json").write_text(json.dumps(scores, indent=2) + "\n")


if __name__ == "__main__":
    main()
