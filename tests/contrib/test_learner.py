"""A learner beside the engine: log-probabilities to sample from, weights by HTTP, trl itself."""

import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import transformers

from nanoengine import LLM, AsyncLLM, SamplingParams
from nanoengine.contrib.transfer import LEARNER, WeightGroup
from tests.contrib.test_reload import SETTINGS, answers, other
from tests.helpers import DEMO, checkpoint, table_checkpoint
from tests.serving import command, free_port, held_steps, http, served, wait_until

# ---- Log-probabilities that tokens are sampled from ----


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Return a model whose next-token logits are those of a table, and the table."""
    logits = torch.randn(260, 260, generator=torch.Generator().manual_seed(0))
    return str(table_checkpoint(tmp_path_factory.mktemp("table"), logits, ("a", "b", "c"))), logits


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_processed_logprobs_are_those_that_tokens_are_sampled_from(enforce_eager, table):
    path, logits = table
    params = [
        {"temperature": 0.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 3},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 0.7, "top_p": 0.6, "repetition_penalty": 1.5, "presence_penalty": 1.0},
        {"temperature": 1.0, "allowed_token_ids": [5, 6, 7], "logit_bias": {6: 2.0}, "bad_words": ["\x07"]},
    ]
    settings = {"num_kv_blocks": 20, "max_logprobs": -1, "enforce_eager": enforce_eager}
    asked = [SamplingParams(**one, max_tokens=1, logprobs=-1, prompt_logprobs=1, seed=3) for one in params]
    with LLM(path, logprobs_mode="processed_logprobs", **settings) as llm:
        outputs = llm.generate([[1, 65]] * len(asked), asked, use_tqdm=False)
    with LLM(path, **settings) as llm:
        raw = llm.generate([[1, 65]] * len(asked), asked, use_tqdm=False)
    for one, of_model, output in zip(params, raw, outputs, strict=True):
        drawn, entry = output.outputs[0].token_ids[0], output.outputs[0].logprobs[0]
        assert [drawn] == of_model.outputs[0].token_ids  # the same token, reported otherwise
        assert output.prompt_logprobs == of_model.prompt_logprobs
        expected = processed(logits[65].clone(), [1, 65], SamplingParams(**one))
        found = torch.tensor([entry[token_id].logprob for token_id in range(260)])
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
        assert output.outputs[0].cumulative_logprob == entry[drawn].logprob > -math.inf
        assert entry[drawn].rank == 1 + int((expected > expected[drawn]).sum())


def processed(logits, prompt, params):
    """Return processed log-probabilities, in vLLM's documented order and without nanoengine's code.

    There is no output yet whose tokens a presence penalty could count.
    """
    for token_id, bias in (params.logit_bias or {}).items():
        logits[token_id] += bias
    for token_id in prompt:
        logits[token_id] *= params.repetition_penalty ** (1 if logits[token_id] < 0 else -1)
    if params.allowed_token_ids:
        logits[[i for i in range(len(logits)) if i not in params.allowed_token_ids]] = -math.inf
    for word in params.bad_words or ():
        logits[ord(word)] = -math.inf
    logits /= params.temperature or 1.0
    probs = logits.softmax(-1)
    if params.min_p:
        logits[probs < params.min_p * probs.max()] = -math.inf
    if params.top_k > 0:
        logits[logits < logits.topk(params.top_k).values[-1]] = -math.inf
    order = logits.argsort(descending=True)
    sums = logits[order].softmax(-1).cumsum(-1)
    logits[order[1:][sums[:-1] >= params.top_p]] = -math.inf
    return logits.log_softmax(-1)


# ---- The process that computes ----


def test_a_learner_reaches_the_model_as_in_vllm(tmp_path_factory, tmp_path):
    """The calls that trl's colocated mode makes, in its order."""
    model = other("qwen3")
    model.save_pretrained(tmp_path)
    with LLM(tmp_path, **SETTINGS) as llm:
        wanted = answers(llm)
    of_trl = {"enable_sleep_mode": True, "model_impl": "vllm"}
    of_trl["distributed_executor_backend"] = "external_launcher"
    with LLM(checkpoint("qwen3", tmp_path_factory)[0], **SETTINGS, **of_trl) as llm:
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        for name, parameter in model.named_parameters():
            driver = llm.llm_engine.model_executor.driver_worker
            driver.model_runner.model.load_weights([(name, parameter.data)])
        llm.reset_prefix_cache()
        llm.wake_up(tags=["kv_cache"])
        assert answers(llm) == wanted


def test_collective_rpc_calls_a_method_of_the_worker_or_a_function(tmp_path_factory):
    path, model = checkpoint("qwen3", tmp_path_factory)
    with LLM(path, **SETTINGS) as llm:
        shapes = {name: tuple(x.shape) for name, x in model.named_parameters()}
        assert llm.collective_rpc("tensor_shapes") == [shapes]
        assert llm.collective_rpc(lambda it, x, y: (it.rank, x + y), args=(1,), kwargs={"y": 2}) == [(0, 3)]
        assert llm.collective_rpc("sleep", kwargs={"level": 1}) == [None]
        assert llm.is_sleeping()
        llm.collective_rpc("wake_up", args=(["weights", "kv_cache"],))
        for method in ("init_device", "call", "engine"):
            with pytest.raises(ValueError, match="method must be a function or one of"):
                llm.collective_rpc(method)


# ---- By HTTP ----

PATHS = {
    "GET": ["/is_sleeping", "/get_world_size"],
    "POST": ["/sleep", "/wake_up", "/reset_prefix_cache", "/init_weight_transfer_engine",
             "/start_weight_update", "/update_weights", "/finish_weight_update"],
}  # fmt: skip


@pytest.mark.slow
def test_routes_for_learners_need_dev_mode_and_the_key(tmp_path_factory):
    path_of_model = str(checkpoint("qwen3", tmp_path_factory)[0])
    for dev_mode, status in ((False, 404), (True, 401)):
        key = {"api_key": "k"} if dev_mode else {}
        with served(AsyncLLM(path_of_model, num_kv_blocks=8), dev_mode=dev_mode, **key) as (url, _):
            for method, paths in PATHS.items():
                for path in paths:
                    assert http.request(method, url + path).status_code == status
            info = http.get(f"{url}/server_info", headers={"Authorization": "Bearer k"}).json()
            assert ("vllm_config" in info) == dev_mode


@pytest.fixture(scope="module")
def learned(qwen3):
    """Yield the address and the service of a server with a small model, for a learner."""
    with served(AsyncLLM(str(qwen3), **SETTINGS), dev_mode=True) as (url, service):
        yield url, service


def ask(url):
    asked = {"prompt": [1, 2, 3], "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    return http.post(f"{url}/v1/completions", json={**asked, "return_token_ids": True})


def ids(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


@contextmanager
def while_a_request_runs(url, service):
    """Keep a request running until the end of the block. Yields a function that posts between two steps."""
    asked = {"prompt": [1, 2], "max_tokens": 200, "ignore_eos": True, "stream": True}
    with (
        ThreadPoolExecutor(1) as pool,
        held_steps(service.engine) as steps,
        http.stream("POST", f"{url}/v1/completions", json=asked),
    ):

        def post(path, **settings):
            wait_until(lambda: steps.is_held)
            answer = pool.submit(http.post, url + path, **settings)
            wait_until(lambda: service.engine._commands.qsize() > 0)
            steps.permit(1)
            return answer.result()

        yield post
    wait_until(lambda: service.num_samples == 0)


def test_a_server_sleeps_and_wakes_up(learned):
    url, service = learned
    before = ids(ask(url))
    assert http.post(f"{url}/sleep?level=3").status_code == 400
    assert http.post(f"{url}/sleep?level=x").json()["error"]["param"] == "level"
    assert http.post(f"{url}/sleep").status_code == 200
    assert http.get(f"{url}/is_sleeping").json() == {"is_sleeping": True}
    refused = ask(url)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "the engine sleeps (kv_cache, weights)" in refused.json()["error"]["message"]
    assert http.post(f"{url}/wake_up?tags=weights").status_code == 200
    assert http.post(f"{url}/wake_up?tags=eyes").status_code == 400
    assert ask(url).status_code == 503
    assert http.post(f"{url}/wake_up?tags=weights&tags=kv_cache").status_code == 200
    assert http.get(f"{url}/is_sleeping").json() == {"is_sleeping": False}
    assert ids(ask(url)) == before
    assert http.post(f"{url}/reset_prefix_cache").json() == {"success": True}
    assert http.get(f"{url}/get_world_size").json() == {"world_size": 1}
    with while_a_request_runs(url, service) as post:
        assert post("/sleep").status_code == 503
        assert post("/reset_prefix_cache").json() == {"success": False}


def meet(url):
    """Form a process group with the server, in the role of a learner."""
    port = free_port()
    where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(http.post, f"{url}/init_weight_transfer_engine", json={"init_info": where})
        group = WeightGroup("127.0.0.1", port, LEARNER)
        assert asked.result().status_code == 200
    return group


def send(url, group, named, **changes):
    """Announce tensors and broadcast them. Returns the server's answer."""
    named = list(named)
    announced = {"names": [name for name, _ in named], "shapes": [list(x.shape) for _, x in named]}
    announced["dtype_names"] = [str(x.dtype).removeprefix("torch.") for _, x in named]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(http.post, f"{url}/update_weights", json={"update_info": announced | changes})
        try:
            for _, tensor in named:
                group.send(tensor)
        except RuntimeError:
            assert asked.result().status_code != 200
        return asked.result()


def test_weights_received_over_gloo_are_applied_at_the_end_or_not_at_all(learned, tmp_path_factory):
    url, service = learned
    before, named = ids(ask(url)), list(other("qwen3").named_parameters())
    group = meet(url)
    assert send(url, group, named[:1]).status_code == 400  # nothing was started, and the group is closed
    group = meet(url)
    assert http.post(f"{url}/finish_weight_update", json={}).status_code == 400
    assert http.post(f"{url}/start_weight_update", json={}).status_code == 200
    assert send(url, group, named[:5]).status_code == 200
    assert ids(ask(url)) == before
    assert send(url, group, named[5:]).status_code == 200
    with while_a_request_runs(url, service) as post:
        assert post("/finish_weight_update", json={}).status_code == 503
    assert http.post(f"{url}/finish_weight_update", json={}).status_code == 200
    path = checkpoint("qwen3", tmp_path_factory)[0]
    with LLM(path, **SETTINGS) as llm:
        llm.update_weights(named)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        after = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
    assert ids(ask(url)) == after != before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": ["lm_head.bias"]}, "tensor 'lm_head.bias' has shape"),
        ({"shapes": [[10**12, 10**12]]}, "the model needs (64,)"),
        ({"dtype_names": ["int8"]}, "must be one of float64, float32, bfloat16, float16, got 'int8'"),
        ({"dtype_names": []}, "must have the same length"),
    ],
)
def test_an_unknown_tensor_is_refused_and_the_learner_does_not_wait(changes, message, learned):
    url, _ = learned
    before, group = ids(ask(url)), meet(url)
    http.post(f"{url}/start_weight_update", json={})
    refused = send(url, group, [("model.norm.weight", torch.ones(64))], **changes)
    assert refused.status_code == 400
    assert message in refused.json()["error"]["message"]
    assert http.post(f"{url}/finish_weight_update", json={}).status_code == 400
    assert ids(ask(url)) == before


# ---- trl ----

TRL = ("trl==1.16.0", "datasets==4.8.4", "dill==0.4.1", "multiprocess==0.70.19")


@pytest.fixture(scope="session")
def with_trl(tmp_path_factory):
    """Runs a script in which trl is there, and nanoengine in vLLM's place."""
    path = str(tmp_path_factory.mktemp("trl"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", path]
    if subprocess.run([*install, *TRL], capture_output=True, timeout=300).returncode:
        pytest.skip(f"{', '.join(TRL)} cannot be had")

    def run(script, *arguments):
        search = os.pathsep.join([*sys.path, path])
        installed = f"from nanoengine.contrib import vllm_module\nvllm_module.install()\n{script}"
        command = [sys.executable, "-c", installed, *arguments]
        settings = {"env": {**os.environ, "PYTHONPATH": search, "HF_HUB_OFFLINE": "1"}, "cwd": path}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, **settings)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


CLIENT = """
import json, sys, torch, transformers
from trl.generation.vllm_client import VLLMClient
client = VLLMClient(base_url=sys.argv[1], group_port=int(sys.argv[2]), connection_timeout=60)
question = [[{"role": "user", "content": "What is 27 + 58?"}]]
said = {"first": client.chat(question, temperature=0, max_tokens=20)}
prompt = said["first"]["prompt_ids"][0]
said["sampled"] = client.generate([prompt], n=3, temperature=0.5, max_tokens=5, logprobs=2)
said["scored"] = client.get_sequence_logprobs([prompt], [len(prompt) - 3], top_logprobs=5)
client.init_communicator(device="cuda")
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[3])
with torch.no_grad():
    model.model.norm.weight.neg_()
client.update_model_params(model)
client.reset_prefix_cache()
said["second"] = client.chat(question, temperature=0, max_tokens=20)
with torch.no_grad():
    model.model.norm.weight.neg_()
with client.weight_update():
    for name, parameter in model.named_parameters():
        client.update_named_param(name, parameter.data)
said["third"] = client.chat(question, temperature=0, max_tokens=20)
client.close_communicator()
print(json.dumps(said))
"""


@pytest.mark.slow
def test_trl_s_client_generates_scores_and_updates_weights(with_trl):
    flags = "--dev-mode --max-logprobs -1 --logprobs-mode processed_logprobs --dtype float32"
    port = free_port()
    with command(*flags.split(), stdout=subprocess.DEVNULL) as (_, url):
        said = with_trl(CLIENT, url, str(port), str(DEMO))
    params, question = SamplingParams(temperature=0, max_tokens=20), "What is 27 + 58?"
    with LLM(DEMO, dtype="float32") as llm:
        (first,) = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
        weights = transformers.AutoModelForCausalLM.from_pretrained(DEMO).model.norm.weight
        llm.update_weights([("model.norm.weight", -weights)])
        (second,) = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
    assert said["first"]["prompt_ids"] == [first.prompt_token_ids]
    assert said["first"]["completion_ids"] == said["third"]["completion_ids"] == [first.outputs[0].token_ids]
    assert said["second"]["completion_ids"] == [second.outputs[0].token_ids]
    assert said["second"]["completion_ids"] != said["first"]["completion_ids"]
    assert [len(one) for one in said["sampled"]["completion_ids"]] == [5, 5, 5]
    assert {len(entry) for one in said["sampled"]["logprobs"] for entry in one} <= {2, 3}
    assert len(said["scored"]["logprobs"][0]) == 3


COLOCATED = """
import json, sys, torch, transformers, datasets
from trl import GRPOConfig, GRPOTrainer
transformers.utils.logging.set_verbosity_error()
rows = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "What is 27 + 58?"}]}] * 4)
seen = []

def reward(completions, **_):
    seen.extend(one[0]["content"] for one in completions)
    return [float(len(one[0]["content"])) for one in completions]

config = GRPOConfig(
    sys.argv[2], use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=sys.argv[3] == "sleeps",
    per_device_train_batch_size=4, num_generations=4, max_completion_length=8, max_steps=2,
    learning_rate=1e-2, use_cpu=True, report_to=[], save_strategy="no", bf16=False,
)
path = sys.argv[2] + "/model"
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).save_pretrained(path)
model = transformers.AutoModelForCausalLM.from_pretrained(path)
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.save_pretrained(path)
trainer = GRPOTrainer(model, reward, config, rows, processing_class=tokenizer)
trainer.train()
trainer.vllm_generation.sync_weights()
engine = trainer.vllm_generation.llm
if config.vllm_enable_sleep_mode:
    engine.wake_up(["kv_cache"])
from nanoengine import SamplingParams
ids = tokenizer("What is 27 + 58?").input_ids
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
said = engine.generate([ids], params, use_tqdm=False)[0].outputs[0].token_ids
with torch.no_grad():
    logits = trainer.model.eval()(torch.tensor([ids + said])).logits[0, len(ids) - 1 : -1]
trained = logits.argmax(-1).tolist()
print(json.dumps([len(seen), said, trained]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sleeps", ["sleeps", "stays awake"])
def test_trl_s_trainer_updates_an_engine_while_it_trains(sleeps, with_trl, tmp_path):
    num_seen, said, trained = with_trl(COLOCATED, str(DEMO), str(tmp_path), sleeps)
    assert num_seen == 8
    assert said == trained
