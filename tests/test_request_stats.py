"""Histograms of requests: what is recorded of a request, and when."""

from nanoengine import EngineArgs, LLMEngine, SamplingParams
from nanoengine.metrics import Histogram
from tests.helpers import DEMO


def counts_of(engine):
    found = {metric.name.removeprefix("vllm:"): metric for metric in engine.get_metrics()}
    return {name: metric.count for name, metric in found.items() if isinstance(metric, Histogram)}


def test_the_time_to_the_first_token_is_recorded_when_it_arrives_and_an_abort_as_far_as_it_got():
    engine = LLMEngine(EngineArgs(model=str(DEMO), num_kv_blocks=20, max_num_seqs=1, async_scheduling=False))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for name in ("runs", "waits"):
        engine.add_request(name, "Hello", params)
    while not counts_of(engine)["time_to_first_token_seconds"]:
        engine.step()
    assert counts_of(engine)["request_prompt_tokens"] == 0, "it still runs"
    engine.step()
    engine.abort_request(["waits"])
    counts = counts_of(engine)
    seen = {name for name, count in counts.items() if count}
    assert seen == {
        *("time_to_first_token_seconds", "request_prompt_tokens", "request_generation_tokens"),
        *("request_params_n", "request_params_max_tokens", "e2e_request_latency_seconds"),
    }
    engine.abort_request("runs")
    counts = counts_of(engine)
    assert counts.pop("time_to_first_token_seconds") == 1
    times = "request_queue_time", "request_inference_time", "request_prefill_time", "request_decode_time"
    for name in (*times, "inter_token_latency", "request_time_per_output_token"):
        assert counts.pop(f"{name}_seconds") >= 1
    assert set(counts.values()) == {2}
    engine.close()
