"""Tensor parallelism: the same tokens for any number of ranks, and no rank outlives its engine.

Most ranks are threads of this process, with groups of their own; what concerns processes is tried with these.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from multiprocessing import Pipe
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file

import nanoengine
from nanoengine import LLM, EngineConfig, SamplingParams
from nanoengine.assembly_types import Opened
from nanoengine.backends.cpu.cpu_device import CPU
from nanoengine.backends.device import Device
from nanoengine.engine import build_inputs
from nanoengine.extensions.parallel import rank_processes
from nanoengine.extensions.parallel import tensor_parallel as parallel
from nanoengine.extensions.parallel.rank_processes import Workers
from nanoengine.extensions.parallel.weight_shards import Shard
from nanoengine.outputs import EngineDeadError
from tests import doubles, helpers
from tests.helpers import DEMO, TINY, ask, batch_of, checkpoint, make_sequence, random_prompts, tokens_of
from tests.laws import check_laws
from tests.planted import serve_after
from tests.serving import TIMEOUT, wait_until

SLOW = pytest.mark.slow
ROOT = Path(nanoengine.__file__).parents[1]
TINY_CACHE = {"num_kv_blocks": 60, "block_size": 8}
SIX = {"num_attention_heads": 6, "head_dim": 16}
# name -> changes to TINY of a Llama or Qwen3 whose sizes no number of ranks divides
UNEVEN = {
    "uneven": ("Llama", {"vocab_size": 127, "intermediate_size": 97, "mlp_bias": True}),
    "uneven, tied": ("Qwen3", {"vocab_size": 127, "intermediate_size": 97, "tie_word_embeddings": True}),
    "six heads, one kv head": ("Qwen3", {**SIX, "num_key_value_heads": 1, "vocab_size": 125}),
}


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    """Return the path of a tiny checkpoint by its name."""

    @cache
    def path_of(name):
        if name not in UNEVEN:
            return checkpoint(name, tmp_path_factory)[0]
        family, changes = UNEVEN[name]
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**TINY, **changes})
        path = tmp_path_factory.mktemp("uneven")
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
        return path

    return path_of


@pytest.fixture
def in_threads(monkeypatch):
    """Run ranks as threads; gives the runners of all but rank 0."""
    runners, threads, errors = [], [], []
    follow = parallel.follow

    def noted_follow(runner, ranks):
        runners.append(runner)
        follow(runner, ranks)

    class Threads(Workers):
        """Runs a function in threads, none of which is ever lost."""

        def __init__(self, function, num_threads, *arguments):
            self.cause, self.is_closing, self._is_lost = None, False, threading.Event()
            for rank in range(1, num_threads + 1):
                args = function, rank, *arguments
                thread = threading.Thread(target=self.run, args=args, name=f"rank {rank}", daemon=True)
                threads.append(thread)
                thread.start()

        def run(self, function, *arguments):
            try:
                function(*arguments)
            except BaseException as error:
                errors.append(error)

        def why(self):
            return None

        def stop(self, seconds=0.0):
            pass

    monkeypatch.setattr(parallel, "Workers", Threads)
    monkeypatch.setattr(parallel, "follow", noted_follow)
    monkeypatch.setattr(parallel, "COLLECTIVE", parallel.timedelta(seconds=TIMEOUT))
    yield runners
    runners.clear()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors


def everything(llm, num_rounds=2):
    """Return the tokens of prompts that share prefixes, sampled in many ways, and all log-probabilities.

    The second round hits the prefix cache.
    """
    prompts = random_prompts([40, 3, 17, 29, 1], vocab=llm.llm_engine.checkpoint.vocab_size)
    prompts += [[*prompts[0][:20], 5], prompts[0][:33]]
    params = [
        SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0.8, seed=3, max_tokens=14, n=2),
        SamplingParams(temperature=0, max_tokens=16),
        SamplingParams(temperature=1, seed=5, top_k=9, repetition_penalty=1.2, max_tokens=9, logprobs=1),
        SamplingParams(temperature=0, max_tokens=18),
        SamplingParams(temperature=0.5, seed=49, top_p=0.9, max_tokens=8, prompt_logprobs=0),
        SamplingParams(temperature=0, max_tokens=5),
    ]
    outputs = [out for _ in range(num_rounds) for out in llm.generate(prompts, params, use_tqdm=False)]
    samples = [sample for out in outputs for sample in out.outputs]
    tables = [*(out.prompt_logprobs for out in outputs), *(sample.logprobs for sample in samples)]
    entries = [entry for table in tables for entry in table or () if entry is not None]
    logprobs = [x.logprob for entry in entries for x in entry.values()]
    return [(x.token_ids, x.finish_reason) for x in samples], [[*entry] for entry in entries], logprobs


def check_ranks(path, size, num_rounds=2, **settings):
    """Compare `size` ranks with one, and return the metrics of the former."""
    settings = {**TINY_CACHE, **settings}
    with LLM(path, **settings) as llm:
        *expected, expected_logprobs = everything(llm, num_rounds)
    with LLM(path, tensor_parallel_size=size, **settings) as llm:
        *found, logprobs = everything(llm, num_rounds)
        metrics = llm.metrics()
        check_laws(llm.llm_engine.scheduler)
        assert metrics["num_free_blocks"] == settings["num_kv_blocks"]
    assert found == expected
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)  # sums in another order
    return metrics


# ---- What a rank has -----------------------------------------------------------------------------


def test_with_fewer_kv_heads_than_ranks_several_ranks_share_one(path_of):
    config = helpers.open_checkpoint(path_of("qwen3")).decoder_config
    shards = [Shard(config, rank, 4) for rank in range(4)]
    assert {shard.config.num_kv_heads for shard in shards} == {1}
    firsts = [shard.slices("model.layers.0.self_attn.k_proj.weight", 2)[0] for shard in shards]
    assert firsts == [slice(0, 32), slice(0, 32), slice(32, 64), slice(32, 64)]


INTO_3 = "attention heads and 2 key/value heads .* tensor_parallel_size=3"
SIX_HEADS = {"tensor_parallel_size": 3, "hf_overrides": {"num_attention_heads": 6}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_impl": "transformers"}, "runs on transformers' code"),
        *(({"tensor_parallel_size": 3}, f"4 {INTO_3}"), (SIX_HEADS, f"6 {INTO_3}")),
        ({"device": "cpu:0"}, "device must have no index"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_before_a_process_starts(settings, message, monkeypatch):
    monkeypatch.setattr(parallel, "Workers", lambda *arguments: pytest.fail("started"))
    with pytest.raises(ValueError, match=message):
        LLM(DEMO, **{"tensor_parallel_size": 2, **settings})


def test_more_ranks_than_gpus_are_refused_and_the_error_has_both_numbers(monkeypatch):
    monkeypatch.setattr(EngineConfig, "resolve_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    config = EngineConfig(model=DEMO, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 needs 2 GPUs, found 1"):
        parallel.start_ranks(pytest.fail, Opened(config, helpers.open_checkpoint(DEMO), 64), lambda: None)


def ranks_between(group, connections=()):
    ranks = object.__new__(parallel.Ranks)
    vars(ranks).update(_group=group, _connections=connections, _workers=None, lost=None, size=2)
    return ranks


def test_a_step_arrives_as_it_was_sent():
    seqs = [make_sequence(i, [*range(9)], block_table=[i + 1, 7, 8]) for i in range(3)]
    batch = batch_of((seqs[0], 2, 9), (seqs[1], 8, 9), (seqs[2], 9, 10))
    sent = build_inputs(batch, 4, batch_of((seqs[2], 0, 9)))
    ours, theirs = Pipe()
    with ours, theirs:
        ranks_between(None, [ours]).begin(sent)
        got = ranks_between(None, [theirs]).receive()
    assert len(got.pending_rows) == 1
    assert got.metadata.needed_rows is None  # ranks compute all rows
    metadata = got.metadata._replace(needed_rows=sent.metadata.needed_rows)
    pairs = [(got.input_ids, sent.input_ids), (got.positions, sent.positions)]
    for ours, theirs in (*pairs, *zip(metadata, sent.metadata, strict=True)):
        np.testing.assert_array_equal(ours, theirs, strict=isinstance(theirs, np.ndarray))


def test_a_rank_that_loses_the_connection_to_rank_0_says_so():
    ours, theirs = Pipe()
    ours.close()
    with pytest.raises(EngineDeadError, match="the ranks lost each other: a connection was closed"):
        ranks_between(None, [theirs]).receive()


def test_collectives_run_on_the_current_stream():
    """A group returns nothing to wait for then, as NCCL's."""
    names = "allreduce", "broadcast", "_allgather_base"
    group = Mock(spec=names, **{f"{name}.return_value": None for name in names})
    ranks, x = ranks_between(group), torch.ones(3, 2)
    ranks.all_reduce(x)
    ranks.broadcast(x)
    assert ranks.gather(x).shape == (3, 4)
    assert [name for name, *_ in group.method_calls] == [*names]
    options = [call.args[-1] for call in group.method_calls]
    assert not any(one.asyncOp for one in options)
    assert options[1].rootRank == options[1].rootTensor == 0


@pytest.mark.parametrize("name", ["qwen3 with attention bias", "uneven", "qwen2 tied"])
def test_each_rank_reads_its_own_part_and_all_parts_are_the_whole(name, path_of, in_threads):
    path = path_of(name)
    with LLM(path, tensor_parallel_size=2, enforce_eager=True, **TINY_CACHE) as llm:
        ask(llm, [[1]], max_tokens=1)  # so that all are at work
        runners = [llm.llm_engine.runner, *in_threads]
        models = [runner.model for runner in runners]
        assert [runner.model.kv_specs[0].num_kv_heads for runner in runners] == [1, 1]
        files = load_file(path / "model.safetensors")
        whole = sum(tensor.numel() for tensor in files.values())
        for model in models:
            assert sum(p.numel() for p in {id(p): p for p in model.parameters()}.values()) < 0.55 * whole
        heads = torch.cat([model.lm_head.layer.weight for model in models])
        head = files.get("lm_head.weight", files["model.embed_tokens.weight"])
        down = torch.cat([model.layers[1].mlp.down_proj.layer.weight for model in models], dim=1).T
        for found, written in ((heads, head), (down, files["model.layers.1.mlp.down_proj.weight"].T)):
            assert torch.equal(found[: len(written)], written)
            assert not found[len(written) :].any()
        queries = files["model.layers.0.self_attn.q_proj.weight"]
        ours = [model.layers[0].self_attn.qkv_proj.weight[: len(queries) // 2] for model in models]
        assert torch.equal(torch.cat(ours), queries)


# ---- The same tokens -----------------------------------------------------------------------------


DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
SLIDING = "qwen2 sliding from layer 1", 2
SIZES = {"llama odd sizes": 3, "qwen3 tied, one kv head": 4, "six heads, one kv head": 3}
SIZES |= {"uneven": 2, "uneven, tied": 4}
SETTINGS: list[dict] = [{"max_num_batched_tokens": 7, "num_kv_blocks": 14}, {"async_scheduling": True}]
SETTINGS += [{"enforce_eager": True, "max_num_seqs": 2}]


@pytest.mark.parametrize(
    ("name", "size", "settings"),
    [
        *(("llama with biases", 2, {}), (*SLIDING, DRAFTS)),
        *(pytest.param(*one, {}, marks=SLOW) for one in SIZES.items()),
        *(pytest.param(*SLIDING, one, marks=SLOW) for one in ({}, *SETTINGS)),
    ],
)
def test_ranks_give_the_same_tokens_as_one(name, size, settings, path_of, in_threads):
    metrics = check_ranks(path_of(name), size, **settings)
    assert (metrics["num_preemptions"] > 0) == ("num_kv_blocks" in settings)
    assert metrics["prefix_cache_hits"] > 0
    assert (metrics["spec_decode_num_drafts"] > 0) == ("speculative_config" in settings)


@SLOW
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_ranks_give_the_same_tokens_on_the_gpu_path(async_scheduling, path_of, in_threads, in_float32):
    check_ranks(path_of("qwen3"), 2, 1, block_size=256, max_num_seqs=4, async_scheduling=async_scheduling)
    assert in_float32["replay"] > 0


@SLOW
def test_ranks_round_weights_at_load_on_the_gpu_path_as_on_a_cpu(path_of, in_threads, monkeypatch):
    found, held = [], []
    for install in (lambda _: None, doubles.install):
        install(monkeypatch)
        doubles.install_linear(monkeypatch)
        settings = {"num_kv_blocks": 40, "max_num_seqs": 4, "dtype": "float32", "quantization": "int4"}
        with LLM(path_of("uneven, tied"), tensor_parallel_size=2, **settings) as llm:
            found.append(everything(llm, 1))
            modules = dict(llm.llm_engine.runner.model.named_modules())
        held.append({name: x for name, x in modules.items() if hasattr(x, "form") and x.form.bits})
    assert found[0][:2] == found[1][:2]
    assert found[0][2] == pytest.approx(found[1][2], abs=1e-4)
    assert held[0].keys() == held[1].keys() > {"lm_head.layer", "layers.0.self_attn.o_proj.layer"}
    for name, layer in held[1].items():
        assert layer.form.bits == held[0][name].form.bits == (8 if "lm_head" in name else 4), name
        assert torch.equal(layer.weight, held[0][name].weight), name


def test_ranks_compute_in_bfloat16_with_packed_weights(path_of, in_threads):
    path = path_of("uneven, tied")
    logprobs = []
    for size in (1, 2):
        with LLM(path, tensor_parallel_size=size, dtype="bfloat16", **TINY_CACHE) as llm:
            out = ask(llm, [[1, 2, 3]], max_tokens=1, logprobs=3)[0].outputs[0]
            logprobs.append(out.logprobs[0][out.token_ids[0]].logprob)
    assert logprobs[0] == pytest.approx(logprobs[1], abs=0.3)


# ---- Together ------------------------------------------------------------------------------------


def test_every_rank_has_as_many_blocks_as_the_rank_with_the_least_memory(path_of, in_threads, monkeypatch):
    def free_bytes(device, trial):
        block_bytes = 2 * 2 * 8 * 1 * 32 * 4  # k and v, layers, tokens, a rank's kv heads, head_dim, float32
        return block_bytes * (9 if threading.current_thread().name == "rank 1" else 40)

    monkeypatch.setattr(CPU, "free_bytes", free_bytes)
    with LLM(path_of("qwen3"), tensor_parallel_size=2, block_size=8, load_format="dummy") as llm:
        assert llm.metrics()["num_blocks"] == 8
        ask(llm, [[1]], max_tokens=1)  # so that all are at work
        assert [len(runner.caches[0].k) - 1 for runner in (llm.llm_engine.runner, *in_threads)] == [8, 8]


def test_a_failure_outside_the_forward_pass_fails_only_its_step(path_of, in_threads, monkeypatch):
    with LLM(path_of("qwen3"), tensor_parallel_size=2, **TINY_CACHE) as llm:
        expected = tokens_of(ask(llm, [[1, 2]], max_tokens=6))
        with monkeypatch.context() as broken:
            broken.setattr(llm.llm_engine.runner, "sample", lambda *arguments: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ask(llm, [[1, 2]])
        assert tokens_of(ask(llm, [[1, 2]], max_tokens=6)) == expected


def test_a_rank_that_does_not_respond_is_an_error_after_a_timeout(path_of, in_threads, monkeypatch):
    monkeypatch.setattr(parallel, "COLLECTIVE", parallel.timedelta(seconds=1))
    released, follow = threading.Event(), parallel.follow

    def hang(runner, ranks):
        released.wait(TIMEOUT)
        with contextlib.suppress(EngineDeadError):
            follow(runner, ranks)

    monkeypatch.setattr(parallel, "follow", hang)
    with LLM(path_of("qwen3"), tensor_parallel_size=2, **TINY_CACHE) as llm:
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=r"failed, .*: the ranks lost each other: .*imed out"):
                ask(llm, [[1, 2]])
    released.set()


# ---- Processes -----------------------------------------------------------------------------------


def ranks_of(process=None):
    """Return the processes that serve as ranks of another process, by default of this one."""
    ranks = []
    for child in (process or psutil.Process()).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # one of another kind, just ended
            if "multiprocessing.spawn" in " ".join(child.cmdline()):
                ranks.append(child)
    return ranks


def wait_until_gone(processes):
    # psutil's own waiting would take the exit codes that the engine waits for
    wait_until(lambda: not any(process.is_running() for process in processes))


def answer(llm, num_tokens=12):
    return tokens_of(ask(llm, ["What is 27 + 58?"], max_tokens=num_tokens, ignore_eos=True))[0]


@pytest.fixture(scope="module")
def demo_answer():
    """Return the answer of an engine with one rank."""
    with LLM(DEMO, num_kv_blocks=50) as llm:
        return answer(llm)


def ranks_in_processes(**settings):
    return LLM(DEMO, **{"tensor_parallel_size": 2, "num_kv_blocks": 50, **settings})


def threads_of_gloo():
    """Return the ids of Gloo's threads, where Linux tells and PyTorch names them."""
    threads = set()
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has just ended
            if "gloo" in (task / "comm").read_text():
                threads.add(task.name)
    return threads


@SLOW
def test_processes_and_threads_end_with_close(demo_answer):
    num_threads, before = torch.get_num_threads(), threads_of_gloo()
    with ranks_in_processes(distributed_executor_backend="mp") as llm:
        ranks = ranks_of()
        assert len(ranks) == 1
        for process in (psutil.Process(), *ranks):
            sockets = [at for at in process.net_connections() if at.status == psutil.CONN_LISTEN]
            assert {at.laddr.ip for at in sockets} <= {"127.0.0.1"}  # not reachable from outside
        assert answer(llm) == demo_answer
        can_tell = sys.platform == "linux" and torch.__version__ >= "2.10"
        assert not can_tell or len(threads_of_gloo() - before) > 1
    assert not ranks_of()
    assert torch.get_num_threads() == num_threads
    wait_until(lambda: threads_of_gloo() <= before)  # a thread that was joined is listed a moment longer
    del llm  # the threads must end while it is still referenced


@SLOW
def test_engines_with_ranks_run_side_by_side_when_the_thread_that_started_one_has_ended(demo_answer):
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(ranks_in_processes).result()
    with started as one, ranks_in_processes(async_scheduling=True) as other:
        assert len(ranks_of()) == 2
        with ThreadPoolExecutor(2) as pool:
            answers = pool.map(lambda llm: [answer(llm) for _ in range(3)], (one, other))
            assert [*answers] == [[demo_answer] * 3] * 2
    assert not ranks_of()


def test_what_is_read_after_a_rank_was_lost_is_not_returned():
    ranks = ranks_between(None)
    ranks.lost = "rank 1 terminated"
    device = parallel.ParallelDevice(ranks, Device.__new__(Device))
    with pytest.raises(EngineDeadError, match="rank 1"), device.running():
        pass


KILL = "if arguments[0] == 1: parallel.ParallelForward.__call__ = lambda *_: os.kill(os.getpid(), 9)"
KILLED = r"the engine has failed, .*: rank \d \(process \d+\) terminated with signal SIGKILL"
ERROR = "rank 1 .* the following error:\nTraceback[^$]*"


@SLOW
@pytest.mark.parametrize(
    ("planted", "said", "size", "seconds"),
    [
        ("parallel._connect = lambda *_: os._exit(7)", "rank 1 .* terminated with exit code 7", 2, TIMEOUT),
        ("parallel.connect = None", f"{ERROR}TypeError: 'NoneType'", 2, TIMEOUT),
        ("parallel.ParallelForward.__call__ = lambda *_: [][5]", f"{ERROR}IndexError: list", 2, TIMEOUT),
        (KILL, KILLED, 4, TIMEOUT),
        ("time.sleep(300)", "not all ranks were ready after 1 s", 2, 1.0),
    ],
)
def test_a_failed_rank_is_an_error_that_states_the_cause(planted, said, size, seconds, monkeypatch):
    monkeypatch.setattr(parallel, "serve", partial(serve_after, planted))
    monkeypatch.setattr(rank_processes, "STARTING", seconds)
    fails = partial(pytest.raises, EngineDeadError, match=said)
    with fails(), ranks_in_processes(tensor_parallel_size=size) as llm:
        ranks = ranks_of()
        with fails():
            answer(llm)
        wait_until_gone(ranks)  # all of them, before `close` is called
        answer(llm)
    assert not ranks_of()


@SLOW
def test_a_forward_pass_that_fails_on_rank_0_ends_the_engine(monkeypatch):
    llm = ranks_in_processes()
    with monkeypatch.context() as broken:
        broken.setattr(llm.llm_engine.runner, "compute", lambda inputs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            answer(llm)
    with pytest.raises(EngineDeadError, match="create another one: rank 0 failed in a forward pass"):
        answer(llm)
    llm.close()
    assert not ranks_of()


@SLOW
def test_no_rank_outlives_a_constructor_that_raises():
    with pytest.raises(OSError, match="no-such-directory"):
        ranks_in_processes(trace="/no-such-directory/trace.jsonl")
    wait_until_gone(ranks_of())


BEGIN = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in background processes
from nanoengine import LLM, AsyncLLM, EngineConfig, SamplingParams
llm = LLM({str(DEMO)!r}, tensor_parallel_size=2, num_kv_blocks=50, dtype="float32")
def answer(num_tokens):
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return llm.generate(["What is 27 + 58?"], params, use_tqdm=False)[0].outputs[0].token_ids
print("ready", flush=True)
"""
RUNNING = """
launch, steps = llm.llm_engine.runner.launch, iter(range(10**9))
def announced(*args):
    if next(steps) == 10:
        print("running", flush=True)
    return launch(*args)
llm.llm_engine.runner.launch = announced
"""


@contextlib.contextmanager
def script(code, **settings):
    """Start a script without multiprocessing's guard, in a session of its own. Yields it and its ranks."""
    settings |= {"stdout": subprocess.PIPE, "text": True, "start_new_session": True, "cwd": ROOT}
    process = psutil.Popen([sys.executable, "-c", BEGIN + code], **settings)
    try:
        ranks = []
        while not ranks:
            assert process.poll() is None
            time.sleep(0.1)
            ranks = ranks_of(process)
        yield process, ranks
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        process.wait()


@SLOW
def test_ctrl_c_reaches_only_rank_0_and_a_fork_ends_without_stopping_the_ranks_or_leaks(demo_answer):
    code = """
import os
try:
    while True:
        answer(900)
except KeyboardInterrupt:
    print(answer(12))
child = os.fork()
if not child:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), answer(12))
"""
    with script(RUNNING + code, stderr=subprocess.PIPE) as (process, ranks):
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "running\n"]
        os.killpg(process.pid, signal.SIGINT)
        for rank in ranks:
            rank.send_signal(signal.SIGINT)  # as from a terminal that knows no sessions
        printed, warned = process.communicate(timeout=TIMEOUT)
        assert printed == f"{demo_answer}\n7 {demo_answer}\n"
        assert "leaked" not in warned
        assert process.returncode == 0
        wait_until_gone(ranks)


@SLOW
@pytest.mark.parametrize(("number", "is_stopped"), [(signal.SIGKILL, True), (signal.SIGTERM, False)])
def test_no_rank_outlives_rank_0(number, is_stopped):
    with script(RUNNING + "while True: answer(900)") as (process, ranks):
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "running\n"]
        for rank in ranks if is_stopped else ():
            rank.suspend()
        process.send_signal(number)
        wait_until_gone(ranks)


@SLOW
@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGINT, 0.2), (signal.SIGKILL, 3)])
def test_no_rank_outlives_rank_0_if_it_ends_during_startup(number, seconds):
    with script("signal.pause()") as (process, ranks):  # a standard input may be at its end
        time.sleep(seconds)
        process.send_signal(number)
        assert process.wait(TIMEOUT)
        wait_until_gone(ranks)  # one that is about to import PyTorch hears of it after that


@SLOW
@pytest.mark.parametrize("is_closed", [True, False])
def test_processes_of_torchrun_join_in_one_script(is_closed, demo_answer, tmp_path):
    again = f"""
llm.close()
try:
    LLM({str(DEMO)!r}, tensor_parallel_size=2)
except ValueError as error:
    print(error)
"""
    (tmp_path / "script.py").write_text(f"{BEGIN}print(answer(12)){again if is_closed else ''}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    settings = {"timeout": TIMEOUT, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    command = [*torchrun, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, **settings)
    assert done.returncode == 0, done.stderr
    ready, answered, *more = done.stdout.splitlines()  # of rank 0 alone
    assert (ready, answered) == ("ready", str(demo_answer))
    assert len(more) == is_closed
    assert "under torchrun a script may have one engine" in "".join(more) or not is_closed


def test_tensor_parallel_size_must_equal_the_number_of_torchrun_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="must be the number of torchrun's processes, 3, got 2"):
        ranks_in_processes()
