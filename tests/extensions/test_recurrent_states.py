"""States: models whose layers hand a state from token to token, beside paged K and V or without any."""

import types
import weakref
from functools import cache, partial

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.backends.device import Attention
from nanoengine.backends.step_inputs import BIN_SLOT, NUM_RESERVED_SLOTS, ZERO_SLOT
from nanoengine.extensions.recurrent_states import StatefulBlockManager, StatefulRunner, StatefulScheduler
from nanoengine.models.recurrent import _scan_of_mamba
from tests import helpers
from tests.helpers import VARIED_SETTINGS, ask, batch_of, check_greedy, make_sequence, random_prompts
from tests.laws import check_laws
from tests.model_table import small_config, small_model
from tests.sampling.test_sampler import LiveBytes

# A gated delta rule, convolutions alone, Mamba2, Mamba beside attention, and Mamba2 that limits time steps.
ZAMBA2, MAMBA2 = helpers.slow("zamba2", "mamba2")
KINDS = ["qwen3_5_text", "lfm2", "mamba2", "jamba", ZAMBA2]
RARELY = helpers.slow("lfm2", "jamba", "zamba2")
TWO_KINDS = ["qwen3_5_text", "mamba2", *RARELY]
# Only the settings that stress states most run by default: preemption, and small chunks of one kind.
DEFAULT = [(kind, "with preemption") for kind in KINDS[:4]] + [("qwen3_5_text", "in chunks")]
PAIRS = [(kind, name) for kind in [*KINDS[:4], "zamba2"] for name in VARIED_SETTINGS]
KINDS_AND_SETTINGS = [*DEFAULT, *helpers.slow(*(pair for pair in PAIRS if pair not in DEFAULT))]
LENGTHS = [1, 2, 13, 40, 75, 20]
NUM_NEW = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Return a checkpoint of a kind, prompts, and what compares answers with those of transformers."""

    @cache
    def checkpoint_of(kind):
        path, model = str(tmp_path_factory.mktemp(kind)), small_model(small_config(kind))
        model.save_pretrained(path)
        model.answers = {}  # `greedy` keeps answers here, because the model does not change
        return path, model

    def make(kind, max_tokens=None):
        path, model = checkpoint_of(kind)
        prompts = [prompt[:max_tokens] for prompt in random_prompts(LENGTHS)]
        return path, prompts, partial(check_greedy, model, prompts, NUM_NEW)

    return make


def answers(llm, prompts, max_tokens=NUM_NEW):
    return helpers.tokens_of(ask(llm, prompts, max_tokens=max_tokens))


# ---- Tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), KINDS_AND_SETTINGS)
def test_greedy_tokens_equal_transformers_for_all_settings(kind, name, served):
    path, prompts, check = served(kind, max_tokens=30)
    with LLM(path, **VARIED_SETTINGS[name]) as llm:
        check(answers(llm, prompts))
        check(answers(llm, prompts))  # from the prefix cache, where there is one


def test_a_state_that_a_layer_returns_is_not_taken_for_its_output(served):
    """MiniMax returns its states: the 4 heads of two sequences are as many rows as a step of 8 tokens has."""
    path, prompts, check = served("minimax")
    with LLM(path, num_kv_blocks=200, block_size=4, max_num_batched_tokens=8) as llm:
        check(answers(llm, prompts))


@pytest.mark.parametrize("kind", TWO_KINDS)
def test_contents_of_free_slots_change_nothing(kind, served):
    """Free slots hold NaNs, and an aborted neighbor leaves no state."""
    path, prompts, check = served(kind)
    with LLM(path, num_kv_blocks=24, block_size=8, num_state_slots=6, max_num_batched_tokens=30) as llm:
        engine = llm.llm_engine
        states, blocks = engine.runner.model.states, engine.scheduler.block_manager
        engine.add_request("neighbour", prompts[3][::-1], GREEDY)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, GREEDY)
        tokens, num_steps = {}, 0
        while engine.has_unfinished_requests():
            for memory in states.memory:
                for x in memory.values():
                    assert not x[ZERO_SLOT].any()
                    x[[*blocks.free_slots]] = torch.nan
            for out in engine.step():
                tokens[out.request_id] = out.outputs[0].token_ids
            num_steps += 1
            if num_steps == 4:
                engine.abort_request("neighbour")
        check([tokens[str(i)] for i in range(len(prompts))])


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["qwen3_5_text", MAMBA2, *RARELY, "mamba"])
def test_in_half_precision_chunks_and_neighbours_change_little(kind, dtype, served):
    path, prompts, _ = served(kind)
    logprobs = []
    for settings in ({}, {"max_num_batched_tokens": 16}, {"enforce_eager": True}):
        with LLM(path, num_kv_blocks=60, block_size=8, dtype=dtype, **settings) as llm:
            output, *_ = ask(llm, prompts[2:], max_tokens=1, prompt_logprobs=0)
        logprobs.append(torch.tensor(helpers.prompt_logprobs(output)))
    assert all((other - logprobs[0]).abs().mean() < 0.2 for other in logprobs[1:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", TWO_KINDS)
def test_the_gpu_path_gives_the_same_tokens(kind, served, in_float32, caplog):
    """PyTorch in place of kernels, steps in flight, and the arrays of states in the copy with the others."""
    path, prompts, check = served(kind)
    settings = {"num_kv_blocks": 8, "block_size": 256, "max_num_seqs": 4, "max_num_batched_tokens": 30}
    for is_eager in (True, False):
        with LLM(path, attn_backend="flash", enforce_eager=is_eager, **settings) as llm:
            assert llm.llm_engine.runner.model.states.kernels is None
            check(answers(llm, prompts))
    assert "no graphs (its layers have recurrent states)" in caplog.messages[-1]


@pytest.mark.parametrize("has_state", [False, True])
def test_the_scan_of_many_tokens_holds_the_states_of_few(has_state):
    torch.manual_seed(0)
    num_tokens, (x, dt), (b, c) = 150, torch.randn(2, 2, 12, 150), torch.randn(2, 2, 5, 150)
    A, D, z = -torch.rand(12, 5) * 9, torch.rand(12), torch.ones(2, 12, 150)
    state = torch.randn(2, 12, 5) if has_state else None
    states = types.SimpleNamespace(kernels=None, initial=iter([state] if has_state else []))
    with LiveBytes() as mode:
        out, new = _scan_of_mamba(states, None, x, dt, A, b, c, D=D, z=z, delta_bias=None)
    assert mode.peak < 2 * 12 * num_tokens * 5 * 4 * 3
    h, steps = torch.zeros(2, 12, 5) if state is None else state, torch.nn.functional.softplus(dt)
    expected = []
    for t in range(num_tokens):
        h = torch.exp(A * steps[:, :, t, None]) * h + (steps * x)[:, :, t, None] * b[:, None, :, t]
        expected.append((h * c[:, None, :, t]).sum(-1))
    assert torch.allclose(new, h, atol=1e-5)
    expected = (torch.stack(expected, -1) + x * D[:, None]) * torch.nn.functional.silu(z)
    assert torch.allclose(out, expected, atol=1e-4)


# ---- The prefix cache ----------------------------------------------------------------------------


def test_states_are_not_kept_without_the_prefix_cache():
    manager = manager_of(enable_prefix_caching=False)
    assert [*spans_of(manager, sequence(0, range(10)))] == [[(0, 10, 0, 2)]]
    assert not manager.kept_slots


# ---- Slots, by hand ------------------------------------------------------------------------------


def manager_of(num_state_slots=9, num_blocks=20, block_size=4, **settings):
    settings = {"windows": (None,), "max_chunk_tokens": 64, "num_state_slots": num_state_slots} | settings
    return StatefulBlockManager(num_blocks, block_size, **settings)


def spans_of(manager, seq, budget=64):
    """Run a sequence alone. Returns each step's spans."""
    spans = {}
    scheduler = StatefulScheduler(manager, spans=spans, max_num_batched_tokens=budget)
    return ([tuple(span) for span in spans[seq]] for _ in helpers.run_alone(scheduler, seq))


sequence = partial(make_sequence, max_tokens=1)


def test_a_prompt_in_chunks_keeps_its_states_where_it_branches_and_at_its_last_block():
    manager = manager_of()
    list(spans_of(manager, sequence(0, range(10))))
    steps = spans_of(manager, sequence(1, [*range(4), *range(50, 56)]), budget=6)
    assert [[span[:2] for span in spans] for spans in steps] == [[(0, 4), (4, 6)], [(6, 8), (8, 10)]]


@pytest.mark.parametrize(("num_state_slots", "length", "num_kept"), [(4, 10, 2), (4, 8, 2), (2, 10, 1)])
def test_a_finished_request_keeps_its_last_state_and_that_of_the_prompt(num_state_slots, length, num_kept):
    manager = manager_of(num_state_slots)
    for _ in spans_of(manager, sequence(0, range(length), max_tokens=30)):
        assert len(manager.kept_slots) <= num_kept
    assert len(manager.kept_slots) == num_kept


def test_a_state_that_a_step_writes_is_not_evicted_in_that_step():
    spans = {}
    scheduler = StatefulScheduler(manager_of(num_state_slots=3), spans=spans)
    one, two = sequence(0, range(9)), sequence(1, range(50, 59))
    scheduler.add(one)
    scheduler.add(two)
    scheduler.schedule()
    assert spans == {one: [(0, 8, 0, 4), (8, 9, 4, 2)], two: [(0, 9, 0, 3)]}
    check_laws(scheduler)


# The third request continues from a state, or writes it again.
@pytest.mark.parametrize(("length", "max_tokens"), [(6, 1), (8, 2)])
def test_the_state_that_was_used_last_is_evicted_last(length, max_tokens):
    manager = manager_of(num_state_slots=3)
    for seq_id, first in enumerate((0, 50, 0, 90)):
        list(spans_of(manager, sequence(seq_id, range(first, first + length), max_tokens=max_tokens)))
    seqs = [sequence(9, range(first, first + 12)) for first in (0, 50, 90)]
    assert [len(manager.find_groups(seq)[0]) for seq in seqs] == [length // 4, 0, length // 4]


def test_a_kept_state_without_the_blocks_of_a_window_is_no_hit():
    manager = manager_of(windows=(None, 3))
    list(spans_of(manager, sequence(0, range(9), max_tokens=8)))
    seq = sequence(1, range(10))
    assert [len(blocks) for blocks in manager.find_groups(seq)] == [2, 2]
    num_empty = sum(block.prefix is None for block in manager.free_blocks.values())
    for _ in range(num_empty + 2):  # then those before the window go first
        manager._take_free_block()
    assert manager.find_groups(seq) == [[], []]


def test_a_recomputed_output_is_a_span_of_its_own():
    seq = sequence(0, range(6), max_tokens=9)
    seq.token_ids += [7, 7, 7]
    first = next(spans_of(manager_of(enable_prefix_caching=False), seq))
    assert first == [(0, 6, 0, 2), (6, 9, 2, 2)]


def test_a_trial_batch_reads_zeros_and_discards_its_states():
    runner = StatefulRunner(2, None, None, Attention(None, None, []), None, 4)
    decode, chunk = make_sequence(0, [1], block_table=[0]), make_sequence(1, [1, 2], block_table=[0])
    inputs = runner.build_inputs(batch_of((decode, 0, 1), (chunk, 0, 2)))
    rows, sources, targets, parts = inputs.states
    assert (rows.tolist(), sources.tolist(), targets.tolist()) == ([0], [ZERO_SLOT], [BIN_SLOT])
    assert parts == [(1, 3, ZERO_SLOT, BIN_SLOT, False)]
    assert inputs.metadata.block_tables.tolist() == [[[0], [0]]] * 2  # all groups use the same
    assert runner.build_inputs(batch_of((chunk, 0, 2))).states.decode_rows.dtype == rows.dtype


# ---- Messages -------------------------------------------------------------------


def test_the_size_of_states_is_logged_at_the_start(served, caplog):
    path, _, _ = served("qwen3_5_text")
    with LLM(path, num_kv_blocks=9, block_size=8, num_state_slots=5) as llm:
        memory = [x for of_mixer in llm.llm_engine.runner.model.states.memory for x in of_mixer.values()]
    assert all(len(x) == 5 + NUM_RESERVED_SLOTS for x in memory)
    num_bytes = sum(x[0].nbytes for x in memory)
    assert f"KV cache of 9 blocks of 8 tokens, 5 states of {num_bytes:,} bytes" in caplog.messages[-1]


def test_a_model_with_states_only_has_no_kv_cache_and_takes_long_prompts(served, caplog):
    path, _, _ = served("mamba2")
    prompt = random_prompts([300])[0]
    with LLM(path, max_num_batched_tokens=128, block_size=8, num_kv_blocks=30) as llm:
        assert "no KV cache, 512 states of" in caplog.messages[-1]
        assert llm.llm_engine.runner.caches == []
        assert llm.llm_engine.max_model_len == 1 << 20
        in_chunks = answers(llm, [prompt], max_tokens=3)
    with LLM(path, max_num_batched_tokens=300, max_model_len=310) as llm:
        assert answers(llm, [prompt], max_tokens=3) == in_chunks


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, "rejected draft token"),
        ({"kv_store": "store"}, "kv_store .*only K and V"),
        ({"num_state_slots": 0}, "num_state_slots must be an integer"),
        ({"num_state_slots": 10**12}, "too little memory for 1000000000002 states .*lower num_state_slots"),
        ({"num_kv_blocks": None, "kv_cache_bytes": 9000}, "no room for 3 sequences' states: one takes"),
    ],
)
def test_settings_that_states_do_not_support_are_refused(settings, reason, served, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, _, _ = served("qwen3_5_text")
    with pytest.raises(ValueError, match=reason):
        LLM(path, **{"num_kv_blocks": 9, **settings})


@pytest.mark.parametrize("kind", ["qwen3_5_text", MAMBA2, *RARELY])
def test_memory_is_released_at_once(kind, served, no_gc):
    path, prompts, _ = served(kind)
    with LLM(path, num_kv_blocks=100, block_size=8) as llm:
        answers(llm, prompts[:2])
        model = llm.llm_engine.runner.model
        held = [weakref.ref(x) for x in (*model.parameters(), *model.states.memory[0].values())]
        del model
    assert [ref() for ref in held] == [None] * len(held)


def test_memory_is_shared_between_states_and_blocks(served):
    path, _, _ = served("qwen3_5_text")
    with LLM(path, kv_cache_bytes=1 << 20, block_size=8) as llm:
        started = llm.llm_engine.started
        kv = sum(cache.k.nbytes + cache.v.nbytes for cache in llm.llm_engine.runner.caches)
        states = started.loaded.state_bytes * (started.num_state_slots + NUM_RESERVED_SLOTS)
        assert (1 << 20) * 0.9 < kv + states <= 1 << 20
        assert states <= 1 << 19


def test_a_state_that_includes_the_whole_prompt_is_no_hit():
    """The last prompt token is computed again for its logits, and the state would then include it twice."""
    manager = manager_of(num_state_slots=6, num_blocks=8)
    for seq_id in (0, 1):
        steps = spans_of(manager, sequence(seq_id, range(8), max_tokens=2))
        assert [(spans[0][0], spans[-1][1]) for spans in steps] == [(0, 8), (8, 9)]
