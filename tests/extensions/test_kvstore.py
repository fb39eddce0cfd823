"""The KV store returns blocks that were computed before, and its failures cost no request."""

import errno
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from array import array
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from transformers import PretrainedConfig

from nanoengine import LLM, EngineConfig, SamplingParams
from nanoengine.backends.cpu.kernels import Kernels
from nanoengine.backends.device import Download
from nanoengine.backends.kv_cache import KVGroup, KVSpec
from nanoengine.engine import Sequence
from nanoengine.extensions.kvstore import connector as kvstore
from nanoengine.extensions.kvstore.connector import StoringBlockManager, StoringCore, decode, encode
from nanoengine.extensions.kvstore.stores import DirectoryStore, RedisStore
from tests.helpers import DEMO, ask, check_greedy, checkpoint, finish, random_prompts, slow, tokens_of
from tests.laws import check_blocks, check_laws
from tests.serving import free_port, wait_until
from tests.test_scheduling_machine import AT_LENGTH, BRIEFLY, ExtendedMachine
from tests.worlds import World

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SETTINGS = {"num_kv_blocks": 60, "block_size": 8, "max_num_batched_tokens": 30}


class MemoryStore:
    """Implements a store in the fewest lines."""

    def __init__(self):
        self.entries: dict[str, bytes] = {}

    def get(self, keys):
        for key in keys:
            if key not in self.entries:
                return
            yield self.entries[key]

    def put(self, key, data):
        assert key not in self.entries, "it is there already"
        self.entries[key] = data

    def touch(self, keys):
        return [key in self.entries for key in keys]

    def delete(self, key):
        del self.entries[key]


def serve(path, store, prompts, params=GREEDY, **more):
    """Return a new engine's answers, how many tokens of each prompt it had cached, and its counts."""
    with LLM(str(path), kv_store=store, **{**SETTINGS, **more}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        check_laws(llm.scheduler)
        counts = llm.metrics()
    return tokens_of(outputs), [out.num_cached_tokens for out in outputs], counts


@contextmanager
def redis_server(path):
    if shutil.which("redis-server") is None:
        pytest.skip("needs Debian's package redis-server")
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(path)]
    server = subprocess.Popen([*command, "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: is_up(port))
        yield f"redis://127.0.0.1:{port}/0?socket_timeout=300&socket_connect_timeout=300", server
    finally:
        server.kill()
        server.wait()


def is_up(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


# ---- Stores --------------------------------------------------------------------------------------


@pytest.fixture(params=["directory", "redis"])
def store(request, tmp_path):
    if request.param == "directory":
        yield DirectoryStore(tmp_path / "kv")
    else:
        with redis_server(tmp_path) as (url, _):
            yield RedisStore(url)


def test_get_returns_entries_up_to_the_first_missing_one(store):
    keys = [f"{i:064x}" for i in range(20)]
    for i, key in enumerate(keys):
        store.put(key, bytes([i]) * 1000)
    store.delete(keys[12])
    assert list(store.get(keys)) == [bytes([i]) * 1000 for i in range(12)]
    assert list(store.get(["f" * 64, *keys])) == []
    assert store.touch([keys[11], keys[12], keys[13], "f" * 64]) == [True, False, True, False]
    store.delete(keys[12])
    store.put(keys[12], b"again")
    store.put(keys[12], b"and again")
    assert next(iter(store.get(keys[12:]))) == b"and again"


def test_a_directory_is_private_and_holds_a_file_per_entry(tmp_path):
    store = DirectoryStore(tmp_path / "a" / "kv")
    store.put("abcd", b"data")
    assert (tmp_path / "a" / "kv").stat().st_mode & 0o777 == 0o700
    files = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert files == [tmp_path / "a" / "kv" / "ab" / "abcd.kv"]
    assert str(store) == str(tmp_path / "a" / "kv")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_a_folder_and_a_huge_file_in_the_place_of_an_entry_are_no_entries(tmp_path):
    store = DirectoryStore(tmp_path)
    store.max_entry_bytes = 100
    others = [store._file(f"{i:02}" * 32) for i in range(3)]
    for file in others:
        file.parent.mkdir()
    os.mkfifo(others[0])  # without a writer: to open it may wait forever
    others[1].mkdir()
    others[2].write_bytes(bytes(101))
    for file in others:
        assert list(store.get([file.stem])) == []


def size_of(path):
    return sum(file.stat().st_size for file in path.rglob("*.kv"))


def test_eviction_removes_the_least_recently_used_and_the_ends_of_prefixes(tmp_path):
    store = DirectoryStore(tmp_path, max_bytes=1000)
    keys = [f"{i:02}" * 32 for i in range(10)]
    for key in keys:
        store.put(key, bytes(100))
        os.utime(store._file(key), (1, 1))
    store.touch(keys[:6])  # a prefix; the other four were not used since
    store.put("a" * 64, bytes(100))
    store.put("b" * 64, bytes(100))
    assert size_of(tmp_path) <= 1000
    assert store.touch(keys[:6]) == [True] * 6
    assert sum(store.touch(keys[6:])) < 4
    for i in range(5):
        store.put(f"c{i}" * 32, bytes(100))
    assert size_of(tmp_path) <= 1000
    is_there = store.touch(keys[:6])
    assert is_there == sorted(is_there, reverse=True), "an end outlived its beginning"
    assert 0 < sum(is_there) < 6


def test_the_files_of_a_killed_writer_are_removed_after_an_hour(tmp_path):
    (tmp_path / "ab").mkdir()
    old, new = tmp_path / "ab" / "old.tmp", tmp_path / "ab" / "new.tmp"
    for file, age in (old, 3700), (new, 3500):
        file.write_bytes(b"half")
        os.utime(file, (time.time() - age,) * 2)
    (tmp_path / "notes.txt").write_text("somebody's own file")
    DirectoryStore(tmp_path, max_bytes=1000).put("ab" * 32, b"data")
    assert not old.exists()
    assert new.exists()
    assert (tmp_path / "notes.txt").exists()


WRITER = """
import random, sys
from nanoengine.extensions.kvstore.stores import DirectoryStore
store, rng = DirectoryStore(sys.argv[1], max_bytes=2_000_000), random.Random(sys.argv[2])
print("ready", flush=True)
for _ in range(int(sys.argv[3])):
    number = rng.randrange(200)
    key = f"{number:064x}"
    found = list(store.get([key]))
    assert found in ([], [bytes([number]) * 50_000]), "half of an entry was found"
    store.touch([key])
    if not found:
        store.put(key, bytes([number]) * 50_000)
"""


def start_writer(path, seed, count):
    command = [sys.executable, "-c", WRITER, str(path), str(seed), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_writers_share_a_directory_and_may_be_killed_at_any_time(tmp_path):
    for round_ in range(4):
        writer = start_writer(tmp_path, f"killed {round_}", 10**9)
        assert writer.stdout.readline() == "ready\n"
        wait_until(lambda: any(tmp_path.rglob("*.kv")))
        time.sleep(0.05 * round_)  # any moment will do
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
    writers = [start_writer(tmp_path, seed, 1000) for seed in range(3)]
    for writer in writers:
        assert writer.communicate()[1] == ""
        assert writer.returncode == 0
    DirectoryStore(tmp_path, max_bytes=2_000_000).put("f" * 64, b"looks")
    assert 1_000_000 < size_of(tmp_path) <= 2_000_000


# ---- Entries -------------------------------------------------------------------------------------

KEY, SIZES = f"{1:064x}", [64, 32]
GROUPS = [np.arange(size, dtype=np.uint8) for size in SIZES]


def test_an_entry_is_a_miss_under_another_key_with_other_sizes_or_with_any_byte_damaged():
    data = encode(KEY, [group.data for group in GROUPS])
    assert [group.tolist() for group in decode(data, KEY, SIZES)] == [group.tolist() for group in GROUPS]
    assert decode(data, f"{2:064x}", SIZES) is None
    for sizes in [64], [96, 32], [64, 64]:
        assert decode(data, KEY, sizes) is None
    damaged = [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(len(data))]
    for entry in [*damaged, *(data[:i] for i in range(len(data))), data + b"!"]:
        assert decode(entry, KEY, SIZES) is None


# ---- Engines -------------------------------------------------------------------------------------


NAMES = "qwen3", "mistral sliding", "gemma3"
VANISHED = ("qwen3", 11, 88), ("gemma3", 11, 88), ("mistral sliding", 0, 96)


@pytest.mark.parametrize(("name", "dtype"), [("qwen3", "bfloat16"), *((name, "float32") for name in NAMES)])
def test_a_store_changes_no_answer_and_only_the_tail_is_computed(name, dtype, tmp_path_factory, tmp_path):
    path, reference = checkpoint(name, tmp_path_factory)
    prompts = random_prompts([100, 33, 64, 7])
    prompts.append(prompts[0][:70] + prompts[1])  # begins as another
    plain, _, _ = serve(path, None, prompts, dtype=dtype)
    if dtype == "float32":
        check_greedy(reference, prompts, 12, plain)
    for is_async in (False, True):  # the first fills the store
        answers, cached, counts = serve(path, tmp_path, prompts, dtype=dtype, async_scheduling=is_async)
        assert answers == plain
    assert cached == [96, 32, 63, 0, 96]
    assert counts["external_prefix_cache_hits"] + counts["prefix_cache_hits"] == sum(cached)
    assert counts["external_prefix_cache_hits"] > 200
    # One whose prefix is longer than what the store had: beyond, its own blocks.
    longer = prompts[0] + answers[0] + prompts[1]
    without, _, _ = serve(path, None, [longer], dtype=dtype)
    answers, cached, _ = serve(path, tmp_path, [longer], dtype=dtype)
    assert (answers, cached) == (without, [104])  # 111 tokens of the 112 were computed: 13 whole blocks


def test_blocks_in_the_prefix_cache_are_not_looked_up_in_the_store(qwen3):
    store, prompts = MemoryStore(), random_prompts([40, 40])
    serve(qwen3, store, prompts)
    with LLM(str(qwen3), kv_store=store, **SETTINGS) as llm:
        for num_more in (0, 0, 8):
            output = llm.generate([prompts[0] + prompts[1][:num_more]], GREEDY, use_tqdm=False)[0]
            assert output.num_cached_tokens >= 32
        counts = llm.metrics()
        of_vllm = {metric.name: metric for metric in llm.get_metrics()}
    # First the store has 39 of 40 tokens, the last one being computed again; then the prefix cache has them.
    assert counts["external_prefix_cache_hits"] == 39
    assert counts["prefix_cache_hits"] == 39 + 40
    assert counts["external_prefix_cache_queries"] == 40 + 1 + 8
    assert of_vllm["vllm:external_prefix_cache_hits"].value == 39
    assert of_vllm["vllm:external_prefix_cache_queries"].value == 40 + 1 + 8
    assert counts["prefix_cache_queries"] == 40 + 40 + 48


def test_prompt_logprobs_are_computed_and_not_loaded(qwen3):
    store, prompts = MemoryStore(), random_prompts([40])
    serve(qwen3, store, prompts)
    with LLM(str(qwen3), kv_store=store, **SETTINGS) as llm:
        (output,) = ask(llm, prompts, max_tokens=3, prompt_logprobs=1)
        assert output.num_cached_tokens == 0
        assert len(output.prompt_logprobs) == 40
        assert llm.metrics()["external_prefix_cache_queries"] == 0
    fresh = MemoryStore()  # but others may load what it computed
    serve(qwen3, fresh, prompts, SamplingParams(prompt_logprobs=1))
    assert serve(qwen3, fresh, prompts)[1] == [39]


OTHERS = {"seed": 1, "dtype": "bfloat16", "kv_cache_dtype": "int8", "block_size": 16}
OTHERS |= {"model_impl": "transformers", "rope_theta": 500.0}


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_dtype_or_block_size_finds_nothing(name, qwen3, tmp_path):
    """Only what is the same in all that K and V depend on."""
    other = {name: OTHERS[name]}
    copied = shutil.copytree(qwen3, tmp_path / "elsewhere")
    settings = {"load_format": "dummy", "seed": 0, "dtype": "float32", "max_model_len": 64}
    store, prompts = MemoryStore(), random_prompts([40])
    serve(qwen3, store, prompts, **settings)
    num_entries = len(store.entries)
    assert serve(copied, store, prompts, **settings, enforce_eager=True)[1] == [39]
    assert len(store.entries) == num_entries
    if "rope_theta" in other:
        config = json.loads((copied / "config.json").read_text())
        (config.get("rope_parameters") or config)["rope_theta"] = other.pop("rope_theta")
        (copied / "config.json").write_text(json.dumps(config))
    plain, _, _ = serve(copied, None, prompts, **{**settings, **other})
    answers, cached, _ = serve(copied, store, prompts, **{**settings, **other})
    assert (answers, cached) == (plain, [0])
    assert len(store.entries) > num_entries


def test_processors_that_round_activations_do_not_share_blocks_with_those_that_do_not(qwen3, monkeypatch):
    store, prompts = MemoryStore(), random_prompts([40])
    chosen = {"quantization": "int8", "dtype": "bfloat16"}
    cases = (False, "auto", 0), (True, "float", 39), (True, "auto", 0), (False, "int8", 39)
    for is_fast, activations, num_cached in cases:
        monkeypatch.setattr(Kernels, "are_integers_fast", is_fast)
        assert serve(qwen3, store, prompts, **chosen, activations=activations)[1] == [num_cached]


def test_a_damaged_file_is_a_miss_and_is_written_again(qwen3, tmp_path, caplog):
    prompts = random_prompts([40])
    plain, _, _ = serve(qwen3, tmp_path, prompts)
    keys = stored_keys(qwen3, prompts[0])
    damaged = DirectoryStore(tmp_path)._file(keys[2])
    for damage in (lambda data: data[:-100] + b"!" + data[-99:], lambda data: data[:50], lambda data: b""):
        sound = damaged.read_bytes()
        damaged.write_bytes(damage(sound))
        answers, cached, _ = serve(qwen3, tmp_path, prompts)
        assert (answers, cached) == (plain, [16])
        assert damaged.read_bytes() == sound
        assert "damaged" in caplog.text
    assert serve(qwen3, tmp_path, prompts)[1] == [39]


def stored_keys(path, token_ids):
    """Return the keys under which the blocks of a sequence are stored."""
    with LLM(str(path), kv_store=MemoryStore(), **SETTINGS) as llm:
        fingerprint = connector_of(llm).fingerprint
    data = np.array(token_ids, np.int32).tobytes()
    return kvstore.chain_keys(fingerprint, [data[i : i + 32] for i in range(0, len(data) // 32 * 32, 32)])


def test_a_full_disk_stops_saving_but_no_request_fails(qwen3, tmp_path, monkeypatch, caplog):
    caplog.set_level("WARNING", "nanoengine")
    prompts = random_prompts([40, 40, 40])
    plain, _, _ = serve(qwen3, None, prompts)
    monkeypatch.setattr(kvstore, "RETRY_SECONDS", math.inf)
    with monkeypatch.context() as patch, LLM(str(qwen3), kv_store=tmp_path, **SETTINGS) as llm:
        patch.setattr(os, "replace", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        for i in (0, 1):
            connector_of(llm)._writing._resume_at = i * time.monotonic()  # 0: it has not failed
            output = llm.generate([prompts[i]], GREEDY, use_tqdm=False)[0]
            assert output.outputs[0].token_ids == plain[i]
            wait_for_writer(llm)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "No space left" in caplog.text
        assert [file for file in tmp_path.rglob("*") if file.is_file()] == []
        patch.undo()
        llm.generate([prompts[1][:16]], GREEDY, use_tqdm=False)
        wait_for_writer(llm)
        assert [*tmp_path.rglob("*.kv")] == [], "it is left alone for a while"
        connector_of(llm)._writing._resume_at = time.monotonic()
        llm.generate([prompts[2]], GREEDY, use_tqdm=False)
    assert serve(qwen3, tmp_path, prompts)[:2] == (plain, [0, 0, 39])
    assert len(caplog.records) == 1


def connector_of(llm):
    return llm.scheduler.block_manager.connector


def wait_for_writer(llm):
    connector_of(llm)._writer.submit(lambda: None).result()


def test_a_read_only_directory_is_still_read(qwen3, tmp_path, monkeypatch):
    prompts = random_prompts([40, 40])
    plain, _, _ = serve(qwen3, tmp_path, prompts[:1])
    for name in ("utime", "replace"):
        monkeypatch.setattr(os, name, Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
    answers, cached, _ = serve(qwen3, tmp_path, prompts)
    assert (answers[:1], cached) == (plain, [39, 0])


@pytest.mark.parametrize(("name", "method"), [("qwen3", "touch"), ("gemma3", "get")])
def test_no_request_fails_if_the_store_cannot_be_read(name, method, tmp_path_factory, caplog):
    caplog.set_level("WARNING", "nanoengine")
    path, _ = checkpoint(name, tmp_path_factory)
    store, prompts = MemoryStore(), random_prompts([100, 60])
    plain, _, _ = serve(path, store, prompts)
    get, gone = store.get, Mock(side_effect=ConnectionError("gone"))

    def fail_at_the_third(keys):
        yield from itertools.islice(get(keys), 3)
        gone()

    setattr(store, method, gone if method == "touch" else fail_at_the_third)
    answers, cached, _ = serve(path, store, prompts)
    assert (answers, cached) == (plain, [0, 0])
    assert all("gone" in record.message for record in caplog.records)
    assert 1 <= len(caplog.records) <= 2  # one for reading, and one for writing where that fails too


@pytest.mark.parametrize(("name", "gone", "hits"), VANISHED)
def test_an_entry_that_vanishes_ends_the_hits_unless_no_window_sees_it(name, gone, hits, tmp_path_factory):
    path, _ = checkpoint(name, tmp_path_factory)
    store, prompts = MemoryStore(), random_prompts([100])
    plain, _, _ = serve(path, store, prompts)
    del store.entries[stored_keys(path, prompts[0])[gone]]
    if gone:  # while it is read
        store.touch = lambda keys: [True] * len(keys)
    assert serve(path, store, prompts)[:2] == (plain, [hits])


@pytest.mark.parametrize(
    ("num_blocks", "reads", "counts"), [(6, [], (6, 0, 6, None)), (7, [(5, 7), (4, 6)], (15, 0, 15, 6))]
)
def test_a_load_that_fails_may_have_evicted_the_start_of_its_hits(num_blocks, reads, counts):
    connector = Mock(fingerprint=b"", find=Mock(return_value=[]), read=Mock(side_effect=[6, None]))
    blocks = StoringBlockManager(num_blocks, 1, windows=(3,), max_chunk_tokens=2, connector=connector)
    first, second = (Sequence(i, [*range(n)], SamplingParams()) for i, n in enumerate((6, 9)))
    assert blocks.allocate(first)
    for num_computed in (2, 4, 5):  # the window leaves the blocks of tokens 0, 1 and 2: they are free
        blocks.register_full_blocks(first, num_computed)
        first.num_computed_tokens = num_computed
        assert blocks.may_append(first, 6)
    connector.find.return_value = [True] * 7
    assert blocks.allocate(second) == (num_blocks > 6)  # without hits it needs four blocks
    assert [call.args[2:] for call in connector.read.call_args_list] == reads
    check_blocks(blocks, [*blocks.more_tables])
    found = blocks.num_query_tokens, blocks.num_query_hits, blocks.num_external_query_tokens
    assert (*found, second.num_cached_tokens) == counts


def test_a_step_that_failed_is_not_saved(qwen3, monkeypatch):
    store, prompts = MemoryStore(), random_prompts([80])
    plain, _, _ = serve(qwen3, None, prompts)
    with LLM(str(qwen3), kv_store=store, **SETTINGS) as llm:
        engine = llm.llm_engine
        engine.add_request("a", {"prompt_token_ids": prompts[0]}, GREEDY)
        engine.step()  # 30 tokens: 3 blocks
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "collect", lambda launch: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        wait_for_writer(llm)
        assert set(store.entries) == set(stored_keys(qwen3, prompts[0][:24]))
        assert finish(llm)["a"].outputs[0].token_ids == plain[0]
        assert engine.metrics()["external_prefix_cache_hits"] == 0  # it counts what new requests had
        assert not engine.core.snapshots  # the failed step's would be saved as another's


def test_the_last_blocks_of_a_failed_request_are_not_saved(qwen3):
    """NaN would spread to every engine that loads it. What was computed before is sound."""
    store, prompts = MemoryStore(), random_prompts([60, 40])
    with LLM(str(qwen3), kv_store=store, **SETTINGS) as llm:
        engine = llm.llm_engine
        engine.add_request("a", {"prompt_token_ids": prompts[0]}, GREEDY)
        engine.step()
        compute = engine.runner.model.compute_logits
        engine.runner.model.compute_logits = lambda hidden: compute(hidden) * torch.nan
        outputs = engine.step()
        assert outputs[0].outputs[0].finish_reason == "error"
        engine.runner.model.compute_logits = compute
        wait_for_writer(llm)
        assert set(store.entries) == set(stored_keys(qwen3, prompts[0][:24]))
        connector = connector_of(llm)
        snapshot = connector.snapshot

        def poisoned(filled):  # NaN in the blocks themselves, though tokens came out
            engine.runner.caches[0].v[:] = torch.nan
            return snapshot(filled)

        connector.snapshot = poisoned
        ask(llm, [prompts[1]], max_tokens=1)
        wait_for_writer(llm)
    assert len(store.entries) == 3


def test_a_store_works_on_the_gpu_path_with_graphs_and_pages(in_float32, tmp_path_factory, tmp_path):
    path, reference = checkpoint("qwen3", tmp_path_factory)
    prompts = random_prompts([20, 300])
    settings = {"num_kv_blocks": 8, "block_size": 256, "max_num_seqs": 5, "max_num_batched_tokens": 100}
    for expected in ([0, 0], [0, 256]):
        answers, cached, _ = serve(path, tmp_path, prompts, attn_backend="flash", **settings)
        check_greedy(reference, prompts, 12, answers)
        assert cached == expected
    assert in_float32["replay"] > 0


def test_blocks_that_found_no_room_in_the_queue_are_saved_later(qwen3, monkeypatch):
    store, prompts = MemoryStore(), random_prompts([100])
    with LLM(str(qwen3), kv_store=store, **SETTINGS) as llm:
        connector = connector_of(llm)
        monkeypatch.setattr(kvstore, "MAX_QUEUED_BYTES", 2 * sum(connector.sizes))
        queued = []
        save = connector.save
        monkeypatch.setattr(connector, "save", lambda one: (save(one), queued.append(one)))
        llm.llm_engine.add_request("a", prompts[0], GREEDY)
        while llm.has_unfinished_requests():
            llm.step()
            wait_for_writer(llm)
        assert max(one.num_bytes for one in queued if one) <= kvstore.MAX_QUEUED_BYTES
        wait_for_writer(llm)
        assert connector._num_queued_bytes == 0
    saved = [key in store.entries for key in stored_keys(qwen3, prompts[0])]
    assert saved == sorted(saved, reverse=True), "a beginning is missing"
    assert sum(saved) >= 8


def test_incompatible_settings_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        EngineConfig(model=DEMO, kv_store=tmp_path, enable_prefix_caching=False)
    for wrong in ("", 5, object(), {}):
        with pytest.raises(TypeError, match="kv_store must be"):
            EngineConfig(model=DEMO, kv_store=wrong)
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        LLM(str(DEMO), kv_store=str(tmp_path), tensor_parallel_size=2)
    with pytest.raises(ValueError, match="cannot be used as a directory"):
        LLM(DEMO, kv_store=tmp_path / "file", num_kv_blocks=10)
    with pytest.raises(ValueError, match="scheme"):
        LLM(DEMO, kv_store="http://localhost", num_kv_blocks=10)
    for max_bytes in (-1, 0, 1.5, True, "1"):
        with pytest.raises((TypeError, ValueError), match="max_bytes must be an integer"):
            DirectoryStore(tmp_path, max_bytes=max_bytes)


def test_the_first_line_names_the_store_and_no_password(tmp_path, caplog):
    LLM(DEMO, kv_store=tmp_path, num_kv_blocks=10).shutdown()
    assert caplog.messages[-1].endswith(f"KV store {tmp_path}")
    for address in ("user:secret@somewhere:1/2", "somewhere:1/2?username=user&password=sec@ret"):
        assert str(RedisStore(f"redis://{address}")) == "somewhere:1/2"
    assert str(RedisStore("redis://somewhere")) == "somewhere:6379/0"


PREFILL = """
import sys
from nanoengine import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_store=sys.argv[2], num_kv_blocks=60, block_size=8)
llm.generate([[int(token) for token in sys.argv[3].split()]], SamplingParams(max_tokens=1), use_tqdm=False)
"""  # ends without a word to the engine: what is queued is written all the same


@pytest.mark.slow
def test_one_process_prefills_and_another_decodes(tmp_path_factory, tmp_path):
    path, reference = checkpoint("gemma3", tmp_path_factory)
    prompt = random_prompts([100])[0]
    command = [sys.executable, "-c", PREFILL, str(path), str(tmp_path), " ".join(map(str, prompt))]
    subprocess.run(command, check=True, capture_output=True)
    answers, cached, counts = serve(path, tmp_path, [prompt])
    check_greedy(reference, [prompt], 12, answers)
    assert cached == [96]
    assert counts["num_steps"] == 12  # the tail of 4 tokens and the first token took one


def test_a_redis_store_works_and_its_end_fails_no_request(qwen3, tmp_path, caplog, monkeypatch):
    caplog.set_level("WARNING", "nanoengine")
    monkeypatch.setattr(kvstore, "RETRY_SECONDS", math.inf)
    prompts = random_prompts([100, 40, 50])
    plain, _, _ = serve(qwen3, None, prompts)
    with redis_server(tmp_path) as (url, server):
        assert serve(qwen3, url, prompts[:2])[:2] == (plain[:2], [0, 0])
        with LLM(str(qwen3), kv_store=url, **SETTINGS) as llm:
            first = llm.generate(prompts[:1], GREEDY, use_tqdm=False)[0]
            assert (first.outputs[0].token_ids, first.num_cached_tokens) == (plain[0], 96)
            os.kill(server.pid, signal.SIGKILL)
            server.wait()
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert tokens_of(outputs) == plain
            assert [output.num_cached_tokens for output in outputs] == [96, 0, 0]
    assert 1 <= len(caplog.records) <= 2


# ---- The scheduler with a store, at random -------------------------------------------------------


class LedgerConnector(kvstore.KVConnector):
    """Copies between the store and a world's ledger, in which a number stands for what a slot holds."""

    def __init__(self, store, world, windows, block_size):
        specs = [KVSpec(1, 1, 1, torch.float32, window) for window in windows]
        groups = [KVGroup([layer], spec.window) for layer, spec in enumerate(specs)]
        device = SimpleNamespace(running=nullcontext, device=torch.device("cpu"))
        runner = SimpleNamespace(block_size=block_size, device=device, model=torch.nn.Identity())
        opened = EngineConfig(model=DEMO, kv_store=store), SimpleNamespace(hf_config=PretrainedConfig()), 0
        loaded = SimpleNamespace(kv_specs=specs, kv_groups=groups, weights_digest=b"")
        super().__init__((opened, runner, loaded))
        self.world = world
        self.contents: list[tuple] = []  # number -> what a slot holds

    def _copy_out(self, filled):
        size = self.runner.block_size
        parts = []
        for tables in zip(*(one.tables for one in filled), strict=True):
            ids = list(itertools.chain(*tables))
            slots = [[self.world.cache[i * size + j] for j in range(size)] for i in ids]
            numbers = [[len(self.contents) + i * size + j for j in range(size)] for i in range(len(ids))]
            self.contents += [held for row in slots for held in row]
            rows = torch.tensor(numbers, dtype=torch.float32).view(torch.uint8)
            parts += [Download(rows), Download(rows)]
        return kvstore.Snapshot(filled, parts, Download(torch.ones(len(ids), dtype=torch.bool)), 0)

    def _write_block(self, layers, block_id, data):
        numbers = data.view(torch.float32).tolist()
        size = self.runner.block_size
        assert numbers[:size] == numbers[size:]
        for offset, number in enumerate(numbers[:size]):
            self.world.cache[block_id * size + offset] = self.contents[int(number)]

    def _submit(self, function, *arguments):
        function(*arguments)


class WatchedBlockManager(StoringBlockManager):
    """Checks what each admission loads."""

    def allocate(self, seq):
        admitted = super().allocate(seq)
        if admitted:
            assert seq.num_hit_tokens - seq.num_computed_tokens in (0, 1)
            assert seq.num_hit_tokens == seq.num_registered_blocks * self.block_size
            assert self.num_saved_blocks[seq] == seq.num_registered_blocks
            assert seq.num_computed_tokens < seq.num_tokens
            check_blocks(self, [*self.more_tables])
            assert self.num_saved_blocks.keys() == self.more_tables.keys()
        return admitted

    def _load(self, seq, stored):
        before = seq.num_computed_tokens
        is_loaded = super()._load(seq, stored)
        assert before <= seq.num_computed_tokens or not is_loaded
        return is_loaded


class StoreWorld(World):
    make_core = StoringCore

    def make_blocks(self, kind, *sizes, **settings):
        self.store = MemoryStore()
        self.connector = LedgerConnector(self.store, self, settings["windows"], self.block_size)
        return WatchedBlockManager(*sizes, connector=self.connector, **settings)


class StoreMachine(ExtendedMachine):
    """The same random walk, with a store from which entries vanish."""

    make_world = StoreWorld

    def begin(self, size):
        super().begin(size._replace(caching=True))

    @precondition(lambda self: self.world.store.entries)
    @rule(data=st.data())
    def lose(self, data):
        for key in data.draw(st.sets(st.sampled_from(sorted(self.world.store.entries)), max_size=3)):
            del self.world.store.entries[key]

    @rule(is_full=st.booleans())
    def fill_the_queue(self, is_full):
        self.world.connector._num_queued_bytes = 1 << 60 if is_full else 0

    def teardown(self):
        """Check that the same sequences, without a prefix cache, hit all of their blocks in the store."""
        if not hasattr(self, "world"):
            return
        self.run_to_the_end()
        blocks, connector, size = self.world.blocks, self.world.connector, self.world.block_size
        for said in [seq for seq in self.seqs if len(seq.token_ids) < self.world.scheduler.max_num_tokens]:
            data = array("i", said.token_ids).tobytes()
            contents = [data[i : i + 4 * size] for i in range(0, len(data) - 4 * size + 1, 4 * size)]
            if self.world.store.entries.keys() >= {*kvstore.chain_keys(connector.fingerprint, contents)}:
                assert blocks.reset_prefix_cache()
                again = Sequence(0, said.token_ids, SamplingParams(max_tokens=1))
                assert blocks.allocate(again)
                assert again.num_hit_tokens == len(contents) * size
                blocks.free(again)
        super().teardown()
        connector.close()


@pytest.mark.parametrize("how", [settings(BRIEFLY, max_examples=15), *slow(AT_LENGTH)])
def test_scheduler_invariants_hold_with_a_store(how):
    run_state_machine_as_test(StoreMachine, settings=how)
