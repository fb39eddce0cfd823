"""Graphs cut at attention, with a tape in place of a capture, which repeats what it recorded."""

import itertools
import random

import pytest
import torch

from nanoengine import LLM
from nanoengine.backends.device import Forward
from nanoengine.backends.prompt_graphs import token_counts
from nanoengine.backends.step_inputs import send_inputs
from tests.helpers import batch_of, checkpoint, make_sequence

MAX_TOKENS, SIZES = 700, {"num_kv_blocks": 40, "max_num_seqs": 20, "max_num_batched_tokens": 700}


@pytest.mark.parametrize("largest", [1, 63, 64, 65, 512, 700, 8192, 16384])
def test_the_counts_end_with_the_largest_step_and_are_few(largest):
    counts = token_counts(largest)
    assert counts == sorted(set(counts))
    assert counts[-1] == largest
    assert len(counts) <= 28
    assert all(b - a <= max(64, a / 4) for a, b in itertools.pairwise(counts))


def random_batch(rng, num_blocks):
    """Return prompts, chunks, decodes and draft tokens of sequences in blocks of their own."""
    chunks, blocks, num_tokens = [], iter(range(1, num_blocks)), 0
    lengths = [500] if rng.random() < 0.1 else [rng.randint(1, 300) for _ in range(rng.randint(1, 8))]
    for i, total in enumerate(lengths):
        table = [next(blocks) for _ in range(-(-total // 256))]
        seq = make_sequence(i, [rng.randrange(100) for _ in range(total)], block_table=table)
        kind = rng.choice(["prompt", "chunk", "decode", "drafts"])
        start = {"prompt": 0, "chunk": rng.randrange(total), "decode": total - 1}.get(kind, max(0, total - 4))
        parts = [(n, n + 1) for n in range(start, total)] if kind == "drafts" else [(start, total)]
        for first, end in parts:
            if num_tokens + end - first <= MAX_TOKENS:
                chunks.append((seq, first, end))
                num_tokens += end - first
    return batch_of(*chunks)


@pytest.mark.parametrize("model", ["qwen3", "qwen2 sliding from layer 1"])
def test_random_batches_have_the_hidden_states_of_eager_steps(model, in_float32, tmp_path_factory):
    path, _ = checkpoint(model, tmp_path_factory)
    rng, kinds = random.Random(0), set()
    with LLM(path, **SIZES) as llm, torch.inference_mode():
        runner = llm.llm_engine.runner
        for _ in range(8):
            batch = random_batch(rng, 40)
            inputs, states = runner.build_inputs(batch), []
            memory = {id(x): x for cache in runner.caches for x in (cache.k, cache.v)}.values()
            before = [x.clone() for x in memory]
            for forward in (Forward(), runner.forward):
                for x, old in zip(memory, before, strict=True):
                    x.copy_(old)
                in_float32.clear()
                there = send_inputs(forward.pad(inputs), runner.device.send)
                hidden = forward(runner.compute, there)[: batch.num_tokens].clone()
                states.append((hidden, [x[1:].clone() for x in memory]))
            kinds.add("decodes" if in_float32["replay"] else "pieces" if in_float32["piece"] else "eager")
            (eager, kv), (replayed, kv_replayed) = states
            assert torch.allclose(replayed, eager, atol=1e-4)
            assert all(map(lambda a, b: torch.allclose(a, b, atol=1e-4), kv_replayed, kv))
    assert kinds == {"decodes", "pieces"}


def test_a_step_with_a_prompt_is_one_replay_and_one_call_of_attention_a_layer(in_float32, qwen3, monkeypatch):
    with LLM(qwen3, **SIZES) as llm:
        runner = llm.llm_engine.runner
        monkeypatch.setattr(runner.model, "forward", None)  # nothing of the model is called
        seq = make_sequence(0, [1, 2, 3] * 30, block_table=[1])
        in_float32.clear()
        runner.launch(batch_of((seq, 0, 90)))
        num_layers = len(runner.caches)
    assert in_float32 == {"piece": num_layers + 1, "varlen paged": num_layers}


def test_decodes_of_more_sequences_than_the_largest_graph_are_replayed_too(in_float32, qwen3, monkeypatch):
    monkeypatch.setattr("nanoengine.backends.cuda.graph_sizes", lambda largest: [1])
    with LLM(qwen3, **SIZES) as llm:
        seq = make_sequence(0, [1, 2, 3], block_table=[1])
        in_float32.clear()
        llm.llm_engine.runner.launch(batch_of(*[(seq, 2, 3)] * 9))
    assert in_float32["piece"] > 0
