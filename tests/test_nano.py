"""nano.py against transformers, the full engine, the laws, published bugs and doubles of what a GPU has."""

import math
import random
import re
import runpy
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

import nanoengine
from nanoengine import nano
from nanoengine.engine import BlockKey
from tests import doubles
from tests.backends.test_fake_cuda import cuda_guard  # noqa: F401  a fixture
from tests.helpers import DEMO, TINY, check_greedy, checkpoint, failing_calls, random_prompts, slow
from tests.laws import check_laws

SOURCE = Path(nano.__file__)
ROOT = SOURCE.parent.parent
PROMPTS = random_prompts([1, 3, 4, 5, 8, 9, 17, 30])
PROMPTS += [PROMPTS[-1], PROMPTS[-1][:16], [*PROMPTS[-1][:8], 5]]  # equal, a prefix, and another end
SETTINGS = {
    "roomy": {},
    "three tokens a step": {"max_num_batched_tokens": 3},
    "preemptions": {"num_kvcache_blocks": 12, "max_num_batched_tokens": 20},
    "two sequences at a time": {"max_num_seqs": 2},
    "no prefix cache": {"enable_prefix_caching": False, "num_kvcache_blocks": 15},
    "blocks of one token": {"kvcache_block_size": 1, "num_kvcache_blocks": 64},
}
MODELS = ["qwen3", "qwen3 tied, one kv head", "qwen3 with attention bias", "qwen2 tied", "llama without gqa"]
MODELS += ["llama with biases", "llama3 rope", "llama odd sizes"]


def load(path, **settings):
    defaults = {"dtype": "float32", "kvcache_block_size": 4, "num_kvcache_blocks": 100, "device": "cpu"}
    return nano.LLM(path, **{**defaults, **settings})


def answers(llm, prompts=PROMPTS, **params):
    params = nano.SamplingParams(**{"temperature": 0, "max_tokens": 12, **params})
    return [answer["token_ids"] for answer in llm.generate(prompts, params, use_tqdm=False)]


# ---- The tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name, tmp_path_factory):
    path, model = checkpoint(name, tmp_path_factory)
    llm = load(path)
    for _ in range(2):  # the second time from a warm cache
        check_greedy(model, PROMPTS, 12, answers(llm))


SEEDED = [
    nano.SamplingParams(temperature=1.5, seed=i // 2, top_k=i % 3 * 20, top_p=1 - i / 30, max_tokens=9)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def alone(qwen3):
    """Return seeded samples of requests that run alone."""
    llm = load(qwen3)
    pairs = zip(PROMPTS, SEEDED, strict=True)
    return [llm.generate([prompt], params, use_tqdm=False)[0] for prompt, params in pairs]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_no_setting_changes_greedy_tokens_or_seeded_samples(settings, alone, tmp_path_factory):
    path, model = checkpoint("qwen3", tmp_path_factory)
    llm = load(path, **settings)
    check_greedy(model, PROMPTS, 12, answers(llm))
    assert (llm.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in settings)
    for _ in range(2):
        assert llm.generate(PROMPTS, SEEDED, use_tqdm=False) == alone


def test_the_bundled_model_answers_like_transformers_and_the_full_engine():
    questions = ["What is 62 + 19?", "Spell the word paging backwards."]
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    chats = [[{"role": "user", "content": question}] for question in questions]
    how = {"add_generation_prompt": True, "tokenize": False}
    texts = [tokenizer.apply_chat_template(chat, **how) for chat in chats]
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO)
    found = nano.LLM(DEMO, device="cpu", num_kvcache_blocks=64).generate(
        texts, nano.SamplingParams(temperature=0, max_tokens=60), use_tqdm=False
    )
    told = [answer["token_ids"] for answer in found]
    check_greedy(model, [tokenizer.encode(text) for text in texts], 60, told)
    params = nanoengine.SamplingParams(temperature=0, max_tokens=60)
    with nanoengine.LLM(DEMO, num_kv_blocks=64, enforce_eager=True) as llm:
        outputs = [output.outputs[0] for output in llm.generate(texts, params, use_tqdm=False)]
    assert found == [{"text": output.text, "token_ids": output.token_ids} for output in outputs]


@pytest.mark.slow
def test_a_real_llama_answers_like_transformers(tmp_path):
    from tests.test_real_model import MODEL, PROMPTS

    if not MODEL.is_file():
        pytest.skip(f"needs {MODEL}: python tests/fetch_model.py")
    settings = {"gguf_file": MODEL.name, "dtype": torch.float32}
    settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL.parent, **settings).eval()
    model.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL.parent, gguf_file=MODEL.name)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS[:8]]
    llm = load(tmp_path, kvcache_block_size=16)
    check_greedy(model, prompts, 24, answers(llm, prompts, max_tokens=24))


# ---- Stopping, refusals and loading --------------------------------------------------------------


def test_an_answer_ends_at_max_tokens_at_a_stop_token_at_max_model_len_or_when_it_fills_the_cache(qwen3):
    llm = load(qwen3, num_kvcache_blocks=5, max_model_len=30)
    prompt, params = PROMPTS[4], {"max_tokens": 100}
    whole = answers(llm, [prompt], **params)[0]
    assert len(whole) == 5 * 4 + 1 - len(prompt)
    assert answers(load(qwen3, max_model_len=19), [prompt], **params)[0] == whole[: 19 - len(prompt)]
    llm.stop_ids = frozenset([whole[5], 127])
    end = whole.index(whole[5]) + 1
    assert answers(llm, [prompt], **params)[0] == whole[:end]
    assert answers(llm, [prompt], ignore_eos=True, **params)[0] == whole


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 9]}, 5, {7, 9}),
        ({"eos_token_id": 7}, 5, {7}),
        ({}, 5, {5}),
        (None, 5, {5}),
        (None, [5, 6], {5, 6}),
        (None, None, {None}),
    ],
)
def test_stop_tokens_come_from_the_generation_config_or_the_config(generation, config, expected, tmp_path):
    transformers.Qwen3Config(**{**TINY, "eos_token_id": config, "head_dim": 8}).save_pretrained(tmp_path)
    settings = transformers.AutoConfig.from_pretrained(tmp_path)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        transformers.GenerationConfig(**generation).save_pretrained(tmp_path)
    assert load(tmp_path).stop_ids == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], r"needs 1 to 20 token ids in \[0, 128\), not 0: \[\]"),
        ([[1], [1] * 21], "not 21: "),
        ([[1], [1, 128]], r"not 2: \[1, 128\]"),
        ([[1], [-1, 5]], "not 2: "),
        ([[1], [1, 1.5]], r"not 2: \[1, 1.5\]"),
        ([[1], [1, "3"]], "not 2: "),
        ([[1], [None]], "not 1: "),
        ([[1], [[1]]], "not 1: "),
        ([[1], [True]], "not 1: "),
        ([[1], [2**70]], "not 1: "),
        ([1, 2], "not 1: 1"),
        ([[1], b"text"], "not 1: "),
        ([[1], "text"], "no tokenizer"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_refused_before_any_runs(prompts, message, qwen3):
    llm = load(qwen3, num_kvcache_blocks=5)
    with pytest.raises(ValueError, match=message):
        answers(llm, prompts)
    assert not llm.scheduler.waiting
    with pytest.raises(ValueError, match="2 prompts need as many SamplingParams"):
        llm.generate([[1], [2]], [nano.SamplingParams()], use_tqdm=False)


def test_prompts_are_texts_lists_and_arrays_and_a_bare_text_is_one_prompt():
    llm = nano.LLM(DEMO, device="cpu", num_kvcache_blocks=50)
    ids = llm.tokenizer.encode("Hi")
    forms = [["Hi"], "Hi", ("Hi",), [ids], iter([np.array(ids)]), np.array([ids])]
    assert all(answers(llm, form) == answers(llm, [ids]) for form in forms)
    assert answers(llm, []) == []


def test_parameters_out_of_range_are_refused():
    wrong: dict = {"temperature": [-1, math.nan], "top_k": [-1, 1.5], "top_p": [0, 1.5, math.nan]}
    wrong |= {"max_tokens": [0, -1, 2.5], "seed": [0.5]}
    for name, value in [(name, value) for name, values in wrong.items() for value in values]:
        with pytest.raises(ValueError, match=f"needs temperature,.*{name}={value}"):
            nano.SamplingParams(**{name: value})


def test_what_the_file_does_not_compute_is_refused_by_name(tmp_path_factory):
    for name in "mistral", "llama yarn rope", "qwen2 sliding from layer 1":
        with pytest.raises(ValueError, match="is not supported"):
            load(checkpoint(name, tmp_path_factory)[0])
    for other in "gpt2", "gemma3_text", "mamba":  # their configs lack fields that the file reads
        transformers.AutoConfig.for_model(other).save_pretrained(path := tmp_path_factory.mktemp(other))
        with pytest.raises(ValueError, match=f"model_type '{other}' is not supported"):
            load(path)
    for settings in {"tensor_parallel_size": 2}, {"max_num_seqs": 0}, {"max_num_batched_tokens": 0}:
        with pytest.raises(ValueError, match="tensor_parallel_size must be 1, max_num_seqs and"):
            load("no matter", **settings)
    with pytest.raises(ValueError, match="no memory is left"):
        load(checkpoint("qwen3", tmp_path_factory)[0], num_kvcache_blocks=0)


def test_a_checkpoint_in_several_files_is_loaded_and_a_missing_tensor_is_named(tmp_path_factory, tmp_path):
    path, model = checkpoint("qwen3", tmp_path_factory)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert answers(load(tmp_path), PROMPTS[:3]) == answers(load(path), PROMPTS[:3])
    for file in files:
        data = file.read_bytes()
        file.unlink()
        with pytest.raises(ValueError, match=r"lacks '(model|lm_head)"):
            load(tmp_path)
        file.write_bytes(data)


@pytest.mark.parametrize(("part", "name", "call"), [("model_runner", "run", 0), ("scheduler", "add", 2)])
def test_after_an_interruption_no_request_is_left_and_no_block_of_its_step_is_hit(part, name, call, qwen3):
    llm = load(qwen3)
    interrupted = failing_calls(getattr(llm, part), name, {call}, KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        answers(llm)
    assert not llm.scheduler.waiting
    assert answers(llm) == answers(load(qwen3))


# ---- Sampling ------------------------------------------------------------------------------------


def settings_of(*rows):
    """Return the arrays that `sample` takes, of (temperature, top_k, top_p, u)."""
    return torch.tensor(rows, dtype=torch.float64).numpy().T


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((1.0, 0, 1.0), [0.1, 0.5, 0.15, 0.25]),
        ((0.5, 0, 1.0), [0.029, 0.725, 0.065, 0.181]),
        ((1.0, 2, 1.0), [0, 0.667, 0, 0.333]),
        ((1.0, 9, 0.75), [0, 0.667, 0, 0.333]),
        ((1.0, 3, 0.8), [0, 0.667, 0, 0.333]),
        ((1.0, 0, 0.1), [0, 1, 0, 0]),
        ((1e-5, 0, 1.0), [0, 1, 0, 0]),
        ((1e-50, 0, 1.0), [0, 1, 0, 0]),
        ((0.0, 0, 1.0), [0, 1, 0, 0]),
    ],
)
def test_samples_are_distributed_as_temperature_top_k_and_top_p_say(settings, expected):
    count = 4000
    u = [(i + 0.5) / count for i in range(count - 2)] + [0.0, 1 - 2**-53]
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log().repeat(count, 1)
    tokens = nano.sample(logits, *settings_of(*((*settings, number) for number in u)))
    shares = tokens.bincount(minlength=4) / count
    assert shares.tolist() == pytest.approx(expected, abs=0.002)
    assert not any(share and not wanted for share, wanted in zip(shares.tolist(), expected, strict=True))


def test_a_row_is_sampled_the_same_alone_and_between_others():
    logits = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    settings = settings_of((1.0, 0, 1.0, 0.3), (1.5, 40, 0.9, 0.7), (0.0, 0, 1.0, 0.1))
    together = nano.sample(logits, *settings)
    for i in range(3):
        assert nano.sample(logits[i : i + 1], *settings[:, i : i + 1]) == together[i]


def test_random_numbers_are_uniform_and_those_of_neighbours_are_unrelated():
    rows = torch.tensor(
        [[nano.uniform(seed, i) for i in range(200)] for seed in range(50)], dtype=torch.float64
    )
    assert float(rows.min()) >= 0
    assert float(rows.max()) < 1
    assert rows.unique().numel() == rows.numel()
    counts = torch.histc(rows, 10, 0, 1)
    assert float((counts - 1000).abs().max()) < 100
    for one, other in (rows[:, 1:], rows[:, :-1]), (rows[1:], rows[:-1]), (rows[1:, :-1], rows[:-1, 1:]):
        assert abs(float(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1])) < 0.05
    assert nano.uniform(2**64 - 1, 2**40) != nano.uniform(2**64 - 1, 2**40 + 1)


def test_without_a_seed_answers_differ_and_any_integer_is_a_seed(qwen3):
    llm = load(qwen3)
    assert len(set(map(tuple, answers(llm, [[1, 2, 3]] * 8, temperature=1.0)))) == 8
    for seed in -1, 2**64, 10**30, np.int64(-5):
        once, again = (answers(llm, [[1]], temperature=1.0, seed=seed) for _ in range(2))
        assert once == again


# ---- The laws, and a ledger of every slot --------------------------------------------------------


def as_engine(scheduler, seqs):
    """Return nano.py's scheduler in the form that check_laws reads, with sequences in order of arrival."""
    manager = scheduler.block_manager
    blocks = [
        SimpleNamespace(block_id=b.block_id, ref_count=b.ref_count, prefix=None) for b in manager.blocks
    ]
    for block, old in zip(blocks, manager.blocks, strict=True):
        if old.key is not None:
            block.prefix = SimpleNamespace(key=BlockKey(*old.key), parent=old.parent_id, blocks={})
            block.prefix.blocks[block.block_id] = block
    found = [blocks[block.block_id] for block in manager.registered_blocks.values()]
    assert [block.prefix.key.hash for block in found] == list(manager.registered_blocks)
    free = [*manager.empty_blocks, *manager.evictable_blocks.values()]

    def queue(old):
        names = "block_table num_computed_tokens num_hit_tokens num_registered_blocks is_finished"
        return [
            SimpleNamespace(
                capacity=len(seq.block_table) * manager.block_size,
                order=seqs.index(seq),
                prefix=seq.prefix_id or None,
                **{name: getattr(seq, name) for name in names.split()},
            )
            for seq in old
        ]

    return SimpleNamespace(
        waiting=queue(scheduler.waiting),
        running=queue(scheduler.running),
        max_num_seqs=scheduler.max_num_seqs,
        block_manager=SimpleNamespace(
            blocks=blocks,
            block_size=manager.block_size,
            free_blocks={block.block_id: blocks[block.block_id] for block in free},
            prefixes={(block.prefix.key, block.prefix.parent): block.prefix for block in found},
        ),
    )


def next_token(module, seed, known):
    """Return a sampled token as a function of the tokens before it, and of what uniform says."""
    return int(module.uniform(seed, len(known)) * 3) + sum(known) % 2


def walk(module, seed, num_steps=80):
    """Serve random requests without a model, and check the laws, each slot that is read, and the answers."""
    rng = random.Random(seed)
    num_blocks, block_size = rng.choice([5, 8, 40]), rng.choice([1, 2, 4])
    manager = module.BlockManager(num_blocks, block_size, enable_prefix_caching=rng.random() < 0.8)
    budget, max_num_seqs = rng.choice([1, 3, 7, 100]), rng.choice([1, 3, 8])
    model_len = rng.choice([12, 1 << 30])
    scheduler = module.Scheduler(manager, max_num_seqs, budget, model_len)
    longest = min(14, scheduler.max_num_tokens - 1)
    seqs, slots = [], {}
    for step in range(num_steps):
        for _ in range(rng.choice([0, 0, 1, 3]) if step < num_steps // 2 else 0):
            start = rng.choice(seqs).token_ids if seqs and rng.random() < 0.6 else []
            prompt = [*start, *rng.choices([1, 2], k=rng.randint(1, longest))][:longest]
            params = module.SamplingParams(max_tokens=rng.randint(1, 9))
            stop_ids = frozenset(rng.choice([[], [4]]))
            seqs.append(module.Sequence(prompt, params, len(prompt), rng.randrange(5), stop_ids))
            scheduler.add(seqs[-1])
        running = list(scheduler.running)
        num_preemptions = scheduler.num_preemptions
        chunks = scheduler.schedule()
        check_laws(as_engine(scheduler, seqs))
        if not scheduler.running and not scheduler.waiting:
            continue
        assert chunks, "sequences are left, and nothing is scheduled"
        assert sum(chunk.end - chunk.start for chunk in chunks) <= budget
        ran = [chunk.seq for chunk in chunks]
        assert len(set(map(id, ran))) == len(ran)
        if num_preemptions == scheduler.num_preemptions and budget >= len(running):
            assert ran[: len(running)] == running, "running sequences come first"
        inputs = module.build_inputs(chunks, block_size)
        assert inputs.input_ids.tolist() == [
            t for seq, start, end, _ in chunks for t in seq.token_ids[start:end]
        ]
        row = 0
        for seq, start, end, _ in chunks:
            assert start < end <= len(seq.token_ids)
            for position in range(start, end):
                slot = int(inputs.slot_mapping[row])
                assert int(inputs.positions[row]) == position
                if position < seq.num_hit_tokens:
                    assert slot < block_size, "a hit is written again"
                else:
                    assert slot >= block_size, "K and V are lost in the null block"
                    slots[slot] = seq.token_ids[: position + 1]
                row += 1
        for i, (seq, _, end, samples) in enumerate(chunks):
            assert samples == (end == len(seq.token_ids))
            for position in range(end):
                block = int(inputs.block_tables[i, position // block_size])
                slot = block * block_size + position % block_size
                assert slots.get(slot) == seq.token_ids[: position + 1], "K and V of other tokens, or of none"
        tokens = [next_token(module, seq.seed, seq.token_ids) for seq, _, _, samples in chunks if samples]
        finished = scheduler.update(chunks, tokens)
        assert all(seq.is_finished for seq in finished)
        check_laws(as_engine(scheduler, seqs))
    while scheduler.waiting or scheduler.running:
        chunks = scheduler.schedule()
        tokens = [next_token(module, c.seq.seed, c.seq.token_ids) for c in chunks if c.samples]
        scheduler.update(chunks, tokens)
    assert manager.num_free_blocks == num_blocks
    for seq in seqs:
        known = seq.token_ids[: seq.num_prompt_tokens]
        limit = min(seq.num_prompt_tokens + seq.params.max_tokens, model_len, num_blocks * block_size + 1)
        while len(known) < limit:
            known.append(next_token(module, seq.seed, known))
            if known[-1] in seq.stop_ids:
                break
        assert seq.token_ids == known
        assert seq.is_finished


@pytest.mark.parametrize("seed", range(50, 66))
def test_the_laws_hold_after_every_step_and_every_slot_that_is_read_holds_the_right_token(seed):
    walk(nano, seed)


@pytest.mark.slow
def test_the_laws_hold_in_longer_walks():
    for seed in range(40):  # each bug below fails within seven
        walk(nano, seed, 400)


def colliding(module, monkeypatch, hash_function=lambda content, seed: 7):
    """Let the prefix cache hash with another function, and keep the random numbers."""
    digest = module.xxh3_64_intdigest
    monkeypatch.setattr(module, "uniform", lambda seed, at: digest(at.to_bytes(8, "little"), seed) / 2**64)
    monkeypatch.setattr(module, "xxh3_64_intdigest", hash_function)


@pytest.mark.parametrize(
    "hash_function", [lambda content, seed: 7, lambda content, seed: content[0] + seed % 2]
)
def test_a_collision_of_hashes_changes_no_token(hash_function, qwen3, monkeypatch):
    expected = answers(load(qwen3))
    colliding(nano, monkeypatch, hash_function)
    assert answers(load(qwen3, num_kvcache_blocks=12)) == expected
    for seed in range(5):
        walk(nano, seed)


# ---- The published bugs of docs/bugs.md ----------------------------------------------------------

BUGS = {
    "1. a length that was computed before the hit": [
        (
            "            if not self.block_manager.allocate(self.waiting[0]):",
            "            num_new = len(self.waiting[0].token_ids) - self.waiting[0].num_computed_tokens\n"
            "            if not self.block_manager.allocate(self.waiting[0]):",
        ),
        (
            "            chunks.append(self._schedule_chunk(self.running[-1], budget))",
            "            chunk = self._schedule_chunk(self.running[-1], budget)\n"
            "            chunks.append(chunk._replace(end=chunk.start + min(num_new, budget)))",
        ),
    ],
    "2. a prompt that is in the cache to its last token": [
        ("= min(seq.num_hit_tokens, len(seq.token_ids) - 1)", "= seq.num_hit_tokens")
    ],
    "3. blocks that a refused allocation keeps": [
        (
            "        if num_new + num_revived > self.num_free_blocks:\n            return False\n"
            "        for block in hits:",
            "        for block in hits:",
        ),
        (
            "        seq.block_table = [b.block_id for b in hits]",
            "        if num_new > self.num_free_blocks:\n            return False\n"
            "        seq.block_table = [b.block_id for b in hits]",
        ),
    ],
    "4. blocks that are counted twice": [("if num_new + num_revived >", "if num_new >")],
    "5. twins, and a map with one entry per hash": [
        ("if (twin := self._find(key, seq.prefix_id)) is None:", "twin = None\n            if True:"),
        ("if key[0] not in self.registered_blocks:", "if True:"),
    ],
    "6. a hash that is not verified": [("and block.key == key and", "and")],
    "7. a comparison of tokens but not of the prefix": [("and block.parent_id == parent_id", "")],
    "8. a limit on this step instead of all sequences": [
        ("        may_admit =", "        num_running = len(self.running)\n        may_admit ="),
        ("len(self.running) < self.max_num_seqs:", "len(self.running) - num_running < self.max_num_seqs:"),
    ],
    "9. new prompts first": [
        (
            "while len(chunks) < len(self.running) and",
            "while not self.waiting and len(chunks) < len(self.running) and",
        )
    ],
    "10. a sequence that outgrows the pool": [
        ("min(max_model_len, block_manager.num_blocks * block_manager.block_size + 1)", "max_model_len")
    ],
    "18. blocks that are found before they are computed": [
        ("num_full_blocks = seq.num_computed_tokens //", "num_full_blocks = len(seq.token_ids) //")
    ],
    "19. a seed that depends on the neighbours": [("uniform(seed, end))", "uniform(sampling[0][1], end))")],
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_published_bug_is_caught(bug, qwen3, monkeypatch):
    assert f"\n## {bug.partition('.')[0]}." in (ROOT / "docs" / "bugs.md").read_text()
    module = patched(*BUGS[bug])
    if bug.startswith("19"):
        llm, params = module.LLM(qwen3, num_kvcache_blocks=20), module.SamplingParams(seed=1)
        others = [module.SamplingParams(seed=2), params]
        alone = llm.generate([[5]], params, use_tqdm=False)[0]
        assert llm.generate([[5], [5]], others, use_tqdm=False)[1] != alone
        return
    if bug.startswith(("6", "7")):
        colliding(module, monkeypatch)
    with pytest.raises((AssertionError, LookupError, ValueError)):
        walks(module)


def walks(module):
    for seed in (56, *range(60)):  # 56 preempts a prompt between two of its chunks
        walk(module, seed)


def patched(*changes):
    """Return nano.py as a module, with lines replaced."""
    text = SOURCE.read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{text.count(old)} places match {old!r}"
        text = text.replace(old, new)
    module = types.ModuleType("patched")
    module.__dict__["__file__"] = str(SOURCE)
    sys.modules["patched"] = module  # dataclasses look there
    exec(compile(text, str(SOURCE), "exec"), module.__dict__)
    return module


# ---- The GPU's path ------------------------------------------------------------------------------


@pytest.fixture
def flash(monkeypatch):
    """Install strict doubles of flash-attn and of CUDA graphs. Returns the count of calls by path."""
    monkeypatch.setattr(doubles.FlashKernels, "dtypes", (torch.float32,))
    for name in "flash_attn_varlen_func", "flash_attn_with_kvcache":
        monkeypatch.setattr(nano, name, getattr(doubles, name), raising=False)
    monkeypatch.setattr(nano.Model, "use_flash", property(lambda _: True, lambda *_: None), raising=False)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: None)

    def capture(compute, pool):
        compute()
        out = compute()

        def replay():
            doubles.calls["replay"] += 1
            out.copy_(compute())

        return out, replay

    monkeypatch.setattr(nano, "capture", capture)
    doubles.calls.clear()
    return doubles.calls


FLASH = [({}, False), ({"max_num_batched_tokens": 3}, True), ({"num_kvcache_blocks": 3}, False)]
FLASH += slow(*((settings, not enforce_eager) for settings, enforce_eager in FLASH))


@pytest.mark.parametrize(("settings", "enforce_eager"), FLASH, ids=str)
def test_flash_attn_and_graphs_compute_the_same_tokens(settings, enforce_eager, flash, qwen3, monkeypatch):
    long = [] if "max_num_batched_tokens" in settings else random_prompts([250, 256, 300])
    prompts = [*PROMPTS, *long]
    prompts.append(prompts[-1])
    llm = load(qwen3, enforce_eager=enforce_eager, max_num_seqs=20, kvcache_block_size=None, **settings)
    assert llm.scheduler.block_manager.block_size == 256
    sizes = [3, 2, 1] if "max_num_batched_tokens" in settings else [20, 16, 8, 4, 2, 1]
    assert list(llm.model_runner.graphs) == ([] if enforce_eager else sizes)
    flash.clear()
    found = answers(llm, prompts)
    assert flash["varlen paged"] > 0
    assert flash["with_kvcache"] > 0
    assert (flash["replay"] > 0) == (not enforce_eager)
    assert (llm.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in settings)
    monkeypatch.undo()
    assert found == answers(load(qwen3), prompts)


def test_more_decodes_than_the_largest_graph_run_without_one(flash, qwen3, monkeypatch):
    llm = load(qwen3, kvcache_block_size=256, max_num_seqs=20)
    assert llm.model_runner.graphs.pop(20) is not None  # as if max_num_seqs were above 512
    prompts = random_prompts([3] * 20)
    found = answers(llm, prompts)
    assert flash["replay"] == 0
    monkeypatch.undo()
    assert found == answers(load(qwen3), prompts)


def test_nothing_in_a_step_waits_for_the_gpu_but_the_reading_of_tokens(flash, qwen3, monkeypatch, request):
    fake = pytest.importorskip("tests.backends.test_fake_cuda", reason="PyTorch 2.9")
    request.getfixturevalue("cuda_guard")
    runner = load(qwen3, dtype="float32", enforce_eager=True, kvcache_block_size=256).model_runner
    monkeypatch.setattr(
        nano, "flash_attn_with_kvcache", lambda q, *_, cache_seqlens, **__: fake.attend(q, cache_seqlens)
    )
    monkeypatch.setattr(nano, "flash_attn_varlen_func", lambda q, k, v, *lens, **_: fake.attend(q, *lens[:2]))
    model, device = runner.model, torch.device("cuda", 0)
    params = [nano.SamplingParams(**one) for one in ({"temperature": 0}, {"top_k": 5}, {"top_p": 0.5})]
    seqs = [nano.Sequence([1] * 9, one, 9, block_table=[i]) for i, one in enumerate(params)]
    read = []
    with fake.FakeTensorMode(allow_non_fake_inputs=True):
        model.dtype = torch.bfloat16
        model.weights = {
            name: torch.empty_like(x, dtype=model.dtype, device=device) for name, x in model.weights.items()
        }
        model.embedding = model.lm_head = model.weights["model.embed_tokens.weight"]
        model.frequencies = torch.empty_like(model.frequencies, device=device)
        model.device = runner.device = device
        runner.allocate_kv_cache(4)
        monkeypatch.setattr(
            "torch._subclasses.FakeTensor.tolist", lambda tokens: read.append(tokens) or [0] * len(tokens)
        )
        for lens in ([9, 9, 9], [1, 9, 2], [1, 1, 1]):  # prompts, a mixed batch, decodes
            with fake.Watch():
                chunks = [nano.Chunk(seq, 9 - n, 9, True) for seq, n in zip(seqs, lens, strict=True)]
                assert runner.run(chunks) == [0, 0, 0]
    assert len(read) == 3
    assert {tokens.device for tokens in read} == {device}


def test_padding_of_a_graph_reads_and_writes_only_the_null_block(qwen3):
    seqs = [
        nano.Sequence([1] * n, nano.SamplingParams(), n, block_table=[3, 5][: n // 4 + 1]) for n in (3, 6)
    ]
    inputs = nano.build_inputs(
        [nano.Chunk(s, s.num_prompt_tokens - 1, s.num_prompt_tokens, True) for s in seqs], 4
    )
    null = nano.Sequence([0], nano.SamplingParams(), 1, block_table=[0, 0, 0])
    padded = nano.pad_decodes(inputs, nano.build_inputs([nano.Chunk(null, 0, 1, True)] * 4, 4))
    assert padded.input_ids.tolist() == [1, 1, 0, 0]
    assert padded.slot_mapping.tolist() == [14, 21, 0, 0]
    assert padded.seq_lens.tolist() == [3, 6, 1, 1]
    assert padded.block_tables.tolist() == [[3, 0, 0], [3, 5, 0], [0, 0, 0], [0, 0, 0]]
    assert padded.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    assert padded.query_lens == [1] * 4
    assert all(array.dtype == "int32" for array in padded[:7])


def test_the_cache_takes_the_share_of_a_gpu_that_weights_and_the_largest_step_leave(qwen3, monkeypatch):
    runner, steps = load(qwen3).model_runner, []
    assert runner.count_blocks(0.9, 8, 64) == (1 << 30) // (2 * 2 * 4 * 2 * 32 * 4) - 1
    figures = {
        "reset_peak_memory_stats": None,
        "max_memory_allocated": 130 << 20,
        "memory_allocated": 30 << 20,
        "empty_cache": None,
        "mem_get_info": (960 << 20, 1 << 30),
    }
    for name, value in figures.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda value=value: value)
    monkeypatch.setattr(runner, "run", steps.append)
    monkeypatch.setattr(runner, "device", torch.device("cuda", 0))
    usable = int((1 << 30) * 0.5) - (64 << 20) - (100 << 20)
    assert runner.count_blocks(0.5, 8, 66) == usable // (2 * 2 * 4 * 2 * 32 * 4) - 1
    assert [(chunk.start, chunk.end, chunk.samples) for chunk in steps[0]] == [(0, 8, True)] * 8
    assert {block for chunk in steps[0] for block in chunk.seq.block_table} == {0}


# ---- nano-vllm's scripts, and the command --------------------------------------------------------

EXAMPLE = """
import os
from {module} import LLM, SamplingParams
from transformers import AutoTokenizer

path = os.path.expanduser("~/huggingface/Qwen3-0.6B/")
tokenizer = AutoTokenizer.from_pretrained(path)
llm = LLM(path, enforce_eager=True, tensor_parallel_size=1)
questions = ["introduce yourself", "list all prime numbers within 100"]
prompts = [
    tokenizer.apply_chat_template(
        [{{"role": "user", "content": question}}], tokenize=False, add_generation_prompt=True
    )
    for question in questions
]
for prompt, output in zip(prompts, llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=60))):
    print("Prompt:", repr(prompt))
    print("Completion:", repr(output["text"]))
"""
BENCH = """
import os
import time
from random import randint, seed
from {module} import LLM, SamplingParams

seed(0)
llm = LLM(os.path.expanduser("~/huggingface/Qwen3-0.6B/"), enforce_eager=False, max_model_len=4096)
prompts = [[randint(0, {last_id}) for _ in range(randint(10, {longest}))] for _ in range({num_seqs})]
params = [
    SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=randint(10, {longest}))
    for _ in range({num_seqs})
]
llm.generate(["Benchmark: "], SamplingParams())
start = time.time()
llm.generate(prompts, params, use_tqdm=False)
seconds, total = time.time() - start, sum(one.max_tokens for one in params)
print(f"Total: {{total}}tok, Time: {{seconds:.2f}}s, Throughput: {{total / seconds:.2f}}tok/s")
"""


@pytest.fixture
def sparse(monkeypatch):
    """Let zeros take memory only where they are written: a script's cache has 1 GiB."""
    monkeypatch.setattr(torch, "zeros", lambda shape, **_: torch.from_numpy(np.zeros(shape, np.float32)))


@pytest.mark.parametrize("script", [EXAMPLE, BENCH], ids=["example", "bench"])
def test_a_script_for_nano_vllm_runs_with_another_import(script, tmp_path, monkeypatch, capsys, sparse):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "Qwen3-0.6B").symlink_to(DEMO)
    text = script.format(module="nanoengine.nano", last_id=500, longest=40, num_seqs=8)
    exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    if script is EXAMPLE:
        assert printed.count("Prompt: '<|im_start|>user") == printed.count("Completion: ") == 2
    else:
        assert re.fullmatch(r"Total: \d+tok, Time: [\d.]+s, Throughput: [\d.]+tok/s\n", printed)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["nano.py", *map(str, arguments)])
    runpy.run_path(str(SOURCE), run_name="__main__")


def test_the_command_answers_questions_as_one_batch(monkeypatch, capsys, sparse):
    run(monkeypatch, "What is 27 + 58?", "Count from 3 to 6.")
    said = "Q: What is 27 + 58?\nA: 27 + 58 = 85\n\nQ: Count from 3 to 6.\nA: 3 4 5 6\n\n"
    assert capsys.readouterr().out == said


def test_the_command_says_that_a_checkpoint_has_no_tokenizer(monkeypatch, qwen3, sparse):
    with pytest.raises(ValueError, match="no tokenizer"):
        run(monkeypatch, "Hi", "--model", qwen3)


def test_the_benchmark_is_nano_vllm_s_and_says_where_it_is_clipped(monkeypatch, capsys, tmp_path, sparse):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**TINY, "max_position_embeddings": 4, "hidden_size": 32})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    run(monkeypatch, "--bench", "--model", tmp_path)
    clipped, result = capsys.readouterr().out.splitlines()
    assert clipped == "clipped to the model: prompts and answers have at most 2 tokens, ids up to 127"
    assert re.fullmatch(r"512 output tokens in [\d.]+ s: \d+ tokens/s", result)
    asked = []
    llm = SimpleNamespace(
        model_runner=SimpleNamespace(
            model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=4096, vocab_size=151936))
        ),
        generate=lambda prompts, params, use_tqdm: asked.append((prompts, params)) or [{"token_ids": []}],
    )
    nano.bench(llm)
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    assert asked[1][0] == prompts
    lens = [random.randint(100, 1024) for _ in range(256)]
    assert asked[1][1] == [nano.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in lens]
    assert sum(lens) == 133_966  # the number that nano-vllm's README shows
    assert "clipped" not in capsys.readouterr().out


# ---- The file ------------------------------------------------------------------------------------


def test_the_file_has_at_most_750_lines_and_imports_nothing_of_ours():
    text = SOURCE.read_text()
    assert len(text.splitlines()) <= 750
    imported = re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE)
    others = "torch numpy xxhash safetensors transformers tqdm huggingface_hub flash_attn"
    assert set(imported) <= {*others.split()} | set(sys.stdlib_module_names)


def test_a_copy_of_the_file_without_the_bundled_model_asks_for_one(tmp_path, monkeypatch, capsys, sparse):
    copy = tmp_path / "copied.py"
    copy.write_text(SOURCE.read_text())
    monkeypatch.setattr(sys, "argv", ["copied.py", "Hi"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(copy), run_name="__main__")
    assert "--model" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["copied.py", "Who are you?", "--model", str(DEMO)])
    runpy.run_path(str(copy), run_name="__main__")
    assert "I am a tiny model" in capsys.readouterr().out


def test_the_guide_shows_a_step_as_the_file_does():
    shown = re.search(
        r"^```\n(chunks =.*?)^```$", (ROOT / "docs" / "guide" / "how-it-works.md").read_text(), re.M | re.S
    )
    assert shown
    assert all(f"    {line}" in SOURCE.read_text() for line in shown[1].splitlines())
