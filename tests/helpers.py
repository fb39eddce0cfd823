"""Builders with tiny defaults, shared by the tests."""

import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.normalizers
import tokenizers.pre_tokenizers
import tokenizers.processors
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.convert_slow_tokenizer import bytes_to_unicode

import nanoengine
from nanoengine import LLM
from nanoengine.backends.cpu.kernels import Kernels
from nanoengine.backends.device import Download
from nanoengine.checkpoints import checkpoint as checkpoint_module
from nanoengine.config import EngineConfig
from nanoengine.engine import BlockManager, Chunk, ScheduledBatch, Scheduler, Sequence
from nanoengine.sampling.drawing import draw_rows
from nanoengine.sampling.logprobs import read_tables, report_samples
from nanoengine.sampling.sampler import draw_tokens, read_tokens
from nanoengine.sampling_params import SamplingParams
from tests.laws import check_laws

DEMO = Path(nanoengine.__file__).parent / "demo"
VOCAB = 128
# Wide initial weights spread the logits, so that no test hangs on a tie between the top two.
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
MSCALE = {"mscale": 1.3, "mscale_all_dim": 0.6, "beta_fast": 20.0, "beta_slow": 0.5}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

ODD = {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 22}
ONE_KV_HEAD = {"num_key_value_heads": 1}
SLIDING = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
LAYERS = ["full_attention", "sliding_attention"]
# name -> (architecture, changes to TINY)
ARCHITECTURES: dict[str, tuple[str, dict]] = {
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3 tied, one kv head": ("Qwen3", {"head_dim": 16, **ONE_KV_HEAD, "tie_word_embeddings": True}),
    "qwen3 with attention bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 sliding from layer 1": ("Qwen2", SLIDING),
    "llama without gqa": ("Llama", {"num_key_value_heads": 4}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama linear rope": ("Llama", {"rope_parameters": LINEAR}),
    "llama yarn rope": ("Llama", {"rope_parameters": YARN}),
    "llama yarn rope with mscale": ("Llama", {"rope_parameters": {**YARN, **MSCALE}}),
    "llama odd sizes": ("Llama", ODD),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral sliding": ("Mistral", {"sliding_window": 24}),
    "ministral": ("Ministral", {"sliding_window": 24, "layer_types": LAYERS, "head_dim": 16}),
}

WINDOW = 24
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}
PER_LAYER: dict[str, Any] = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
GEMMA3N: dict[str, Any] = {
    **ALTERNATING,
    **PER_LAYER,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,  # the last two attend to the keys and values of the first two
}
GEMMA4: dict[str, Any] = {**GEMMA3N, "global_head_dim": 32}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0}
GRANITE |= {"residual_multiplier": 0.7, "attention_multiplier": 0.1}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
IN_GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}  # experts
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
DEEPSEEK = {**MOE, **IN_GROUPS, **LATENT, "num_key_value_heads": 4, "v_head_dim": 12}
LONG: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128}
LONG |= {"short_factor": [1.0 + i / 4 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
# The same for those that go through transformers' own code: name -> (config class, changes to TINY)
HF_ARCHITECTURES: dict[str, tuple[str, dict]] = {
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {**GEMMA, **ALTERNATING, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3Text", {**GEMMA, **ALTERNATING, "query_pre_attn_scalar": 8}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "olmo": ("Olmo", {"clip_qkv": 1.5}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", ALTERNATING),
    "granite": ("Granite", GRANITE),
    "cohere": ("Cohere", {"logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": ("Cohere2", ALTERNATING),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 0.25}),
    "gpt2": ("GPT2", {}),
    "gpt-bigcode": ("GPTBigCode", {"multi_query": True}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 32}),
    "falcon": ("Falcon", {"multi_query": True}),
    "falcon, many kv heads": ("Falcon", {"multi_query": False}),
    "falcon new": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, alibi": ("Falcon", {"alibi": True}),
    "bloom": ("Bloom", {"hidden_size": 96, "num_attention_heads": 6}),
    "mpt": ("Mpt", {}),
    "gpt-j": ("GPTJ", {"rotary_dim": 8}),
    "gpt-neo": ("GPTNeo", {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW}),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "qwen2-moe": ("Qwen2Moe", {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 48}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "num_experts": 4, "head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "gpt-oss": ("GptOss", {**ALTERNATING, "num_local_experts": 4, "head_dim": 16, "num_experts_per_tok": 2}),
    "glm": ("Glm", {"head_dim": 16}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granite-moe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK),
    "persimmon": ("Persimmon", {}),
    "exaone4": ("Exaone4", ALTERNATING),
    "phimoe": ("Phimoe", {"num_local_experts": 4}),
    "phi3 longrope": ("Phi3", {"original_max_position_embeddings": 128, "rope_parameters": LONG}),
    "llama, dynamic rope": ("Llama", {"rope_parameters": {**LINEAR, "rope_type": "dynamic"}}),
}


def hf_model(name: str) -> Any:
    """Return a transformers model with random float32 weights, the same at every call."""
    family, changes = {**ARCHITECTURES, **HF_ARCHITECTURES}[name]
    torch.manual_seed(0)
    settings = {**TINY, **changes}
    config = getattr(transformers, f"{family}Config")(**settings)
    # Eager, since it alone computes soft-capping and sinks. Falcon's adds ALiBi twice.
    attention = "sdpa" if family == "Falcon" else "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    return with_random_norms(model)


def with_random_norms(model: Any) -> Any:
    """Change a new model's norms and biases, which are all 1 or 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


_checkpoints: dict[str, tuple[Path, Any]] = {}


def checkpoint(name: str, factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a saved tiny model and its transformers twin, built once per test run."""
    if name not in _checkpoints:
        path, model = _checkpoints[name] = factory.mktemp("checkpoint"), hf_model(name)
        model.save_pretrained(path)
        model.answers = {}  # the cache of `greedy`: the model does not change any more
    return _checkpoints[name]


def open_checkpoint(model: Path | str, **settings: Any) -> checkpoint_module.Checkpoint:
    """Open a checkpoint as an engine with these settings does."""
    return checkpoint_module.open_checkpoint(EngineConfig(model=model, **settings))


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a checkpoint's one file. Those that become None are left out."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / "model.safetensors")


def edit_config(path: Path, **changes: Any) -> None:
    """Change fields of a checkpoint's config.json."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def refuse(path: Path | str, message: str, error: Any = ValueError, **settings: Any) -> None:
    """Check that loading fails with that message, and leaves torch's defaults as they were."""
    before = torch.get_default_dtype(), torch.get_default_device()
    with pytest.raises(error, match=message):
        LLM(str(path), num_kv_blocks=4, **settings)
    assert (torch.get_default_dtype(), torch.get_default_device()) == before


def composite_of(text_model: Any, config: Any, names: tuple[str, str], path: Path) -> None:
    """Save a language model as a part of a larger one, `names` replaced in those of its tensors."""
    config.save_pretrained(path)
    tensors = {re.sub(*names, name): x for name, x in text_model.state_dict().items()}
    save_file({**tensors, "model.vision_tower.weight": torch.ones(3)}, path / "model.safetensors")


def greedy(model: Any, prompt: list[int], num_tokens: int, guess: list[int] | None = None) -> list[int]:
    """Return the tokens that transformers generates, cached if the model has a cache for them.

    A guess is confirmed in one forward pass: each of its tokens has to follow from those before it.
    """
    answers, asked = getattr(model, "answers", {}), (*prompt, num_tokens)
    if guess and asked not in answers:
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        is_whole = not {*ends} & {*guess[:-1]} and (len(guess) == num_tokens or guess[-1] in ends)
        with torch.inference_mode(), suppress(TypeError):  # RoBERTa's positions need a pad token
            logits = model(torch.tensor([prompt + guess[:-1]])).logits[0, len(prompt) - 1 :]
            if is_whole and logits.argmax(-1).tolist() == guess:
                return list(answers.setdefault(asked, guess))
    if asked not in answers:
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        answers[asked] = out[0, len(prompt) :].tolist()
    return list(answers[asked])


def check_greedy(model: Any, prompts: list[list[int]], num_tokens: int, answers: list[list[int]]) -> None:
    """Assert that the answers to the prompts are the tokens that transformers generates."""
    both = zip(prompts, answers, strict=True)
    assert answers == [greedy(model, prompt, num_tokens, answer) for prompt, answer in both]


def ask(llm: LLM, prompts: Any, **fields: Any) -> list[Any]:
    """Return an engine's outputs, which are greedy unless these fields of SamplingParams say otherwise."""
    return llm.generate(prompts, SamplingParams(**{"temperature": 0, **fields}), use_tqdm=False)


def check_answers(llm: LLM, model: Any, prompts: list[list[int]], num_tokens: int) -> list[Any]:
    """Assert that an engine answers like transformers, greedily. Return its outputs."""
    outputs = ask(llm, prompts, max_tokens=num_tokens)
    check_greedy(model, prompts, num_tokens, tokens_of(outputs))
    return outputs


def prompt_logprobs(output: Any) -> list[float]:
    """Return the log-probabilities of a prompt's tokens, without the first."""
    pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    return [entry[token_id].logprob for entry, token_id in pairs]


@torch.no_grad()
def logprobs_of(model: Any, token_ids: list[int]) -> Any:
    """Return transformers' log-probabilities of what follows each token, (T, V) float32."""
    return model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def slow(*cases: Any) -> list[Any]:
    """Return values of parameters with which a test runs only with `-m slow`."""
    return [pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.slow) for x in cases]


def run_tests(*arguments: Any, selection: str = "", **environment: str) -> str:
    """Run tests in a process of its own, in this environment. Return what they print."""
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", " ".join(selection.split())]
    command = [sys.executable, "-m", "pytest", *options, *map(str, arguments)]
    env, root = os.environ | environment, Path(__file__).parent.parent
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    return done.stdout


def tokens_of(outputs: Iterable[Any]) -> list[list[int]]:
    """Return the token ids of each request's first sample."""
    return [output.outputs[0].token_ids for output in outputs]


def random_prompts(lengths: list[int], seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


# (field, value): what no SamplingParams may hold.
BAD_FIELDS = [
    *[("n", v) for v in (0, -1, 1.5, "2", True, None, 1025)],
    *[("temperature", v) for v in (10**400, 1e31, 1j, -0.1, math.nan, math.inf, -math.inf, "1", None, True)],
    *[("top_p", v) for v in (0, -0.5, 1.01, math.nan, math.inf, "0.9", None)],
    *[("top_k", v) for v in (-2, 1.0, "5", None, True, 2**31)],
    *[("min_p", v) for v in (-0.01, 1.01, math.nan, None)],
    *[("seed", v) for v in (1.5, "7", 2**64, -(2**63) - 1, True)],
    *[("presence_penalty", v) for v in (-2.1, 2.1, math.nan, None)],
    *[("frequency_penalty", v) for v in (-2.1, 2.1, math.nan, "0")],
    *[("repetition_penalty", v) for v in (0, -1, math.nan, math.inf, None, 1e-40, 1e5)],
    *[("logit_bias", v) for v in ([1], {"a": 1.0}, {-1: 1.0})],
    *[("logit_bias", {1: v}) for v in (math.nan, math.inf, "x", 1e39)],
    *[("allowed_token_ids", v) for v in ([], "12", 5, [1.0], ["a"], [-1], (i for i in [1]))],
    *[("forced_token_ids", v) for v in ({1}, "12", [1.0], [-1])],
    *[("max_tokens", v) for v in (0, -5, 2.0, "3", True)],
    *[("min_tokens", v) for v in (-1, 1.0, None, 17)],
    *[("ignore_eos", v) for v in (1, None, "yes")],
    *[("stop", v) for v in ("", ["a", ""], 5, [5], 0, False, (s for s in ["a"]))],
    *[("stop_token_ids", v) for v in (5, "5", [1.5], [None])],
    *[("include_stop_str_in_output", v) for v in (1, None)],
    *[("logprobs", v) for v in (-2, 1.5, "2", True)],
    *[("prompt_logprobs", v) for v in (-2, 1.5)],
    *[("bad_words", v) for v in ("word", [""], [" "], [5])],
    *[("output_kind", v) for v in (1, "delta", None)],
    *[("extra_args", v) for v in ("a", [1])],
    *[("detokenize", v) for v in (0, "no")],
    *[("skip_special_tokens", v) for v in (0, None)],
]

# Settings of an engine that must not change any answer.
VARIED_SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {"num_kv_blocks": 200, "block_size": 8},
    "with preemption": {"num_kv_blocks": 24, "block_size": 4, "max_num_seqs": 9},
    "in chunks": {"num_kv_blocks": 90, "block_size": 1, "max_num_batched_tokens": 5},
    "without cache": {"num_kv_blocks": 60, "block_size": 3, "max_num_seqs": 3},
    "by priority": {"num_kv_blocks": 30, "block_size": 4, "max_model_len": 50},
}
VARIED_SETTINGS["without cache"]["enable_prefix_caching"] = False
VARIED_SETTINGS["by priority"]["scheduling_policy"] = "priority"


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.5]),
        max_tokens=rng.randint(1, 40),
        seed=rng.randrange(1000),
        n=rng.choice([1, 1, 1, 3]),
        stop=rng.choice([None, "e", ["th", "日本"], "\ufffd", "abcdefghijkl"]),
        include_stop_str_in_output=rng.random() < 0.3,
        min_tokens=0,
        logprobs=rng.choice([None, None, 2]),
        skip_special_tokens=rng.random() < 0.8,
        ignore_eos=rng.random() < 0.5,
    )


@contextmanager
def failing_calls(
    owner: Any, name: str, numbers: Container[int], error: Any = None, at_end: bool = False
) -> Iterator[None]:
    """Make the calls of a method with these numbers fail, at their end or instead of them."""
    method, counter = getattr(owner, name), itertools.count()

    def call(*arguments: Any) -> Any:
        fails = next(counter) in numbers
        result = None if fails and not at_end else method(*arguments)
        if fails:
            raise error or RuntimeError("flaky")
        return result

    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)


def finish(llm: LLM) -> dict[str, Any]:
    """Step until no request is left. Returns the last outputs by request_id."""
    finished: dict[str, Any] = {}
    while llm.has_unfinished_requests():
        finished |= {output.request_id: output for output in llm.step() if output.finished}
    return finished


def make_sequence(seq_id: int, token_ids: list[int], priority: int = 0, block_table=(), **params) -> Sequence:
    params.setdefault("max_tokens", 100)
    seq = Sequence(seq_id, token_ids, SamplingParams(**params), priority=priority)
    seq.block_table = [*block_table]
    return seq


def make_scheduler(
    num_blocks: int = 8, block_size: int = 4, caching: bool = True, scheduler: Any = Scheduler, **settings
) -> Any:
    return scheduler(BlockManager(num_blocks, block_size, enable_prefix_caching=caching), **settings)


def admit(manager: BlockManager, seq: Sequence) -> list[int]:
    """Allocate blocks, which must succeed. Returns the block table."""
    assert manager.allocate(seq)
    return seq.block_table


class Lines:
    """Counts the package's lines that run inside `with`, and strikes at one of them."""

    where = str(Path(nanoengine.__file__).parent)

    def __init__(self, at: int = 0, strike: Callable[[], object] = int) -> None:
        self.at, self.strike = at, strike
        self.count = 0

    def __enter__(self) -> "Lines":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: Any, event: str, argument: object) -> Any:
        if self.where not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                self.strike()
        return self._trace


def is_busy(scheduler: Scheduler) -> bool:
    """Return whether any sequence waits or runs."""
    return bool(scheduler.waiting or scheduler.running)


def run_step(scheduler: Scheduler, token: int = 1):
    """Run a step in which every sequence that samples gets `token`."""
    batch = scheduler.schedule()
    scheduler.update(batch, [token] * len(batch.sampled_seqs))
    check_laws(scheduler)
    return batch


def run_alone(scheduler: Scheduler, seq: Sequence) -> Iterator[ScheduledBatch]:
    """Run a sequence alone. Yields each step's batch, before its tokens, which are all 7."""
    scheduler.add(seq)
    while not seq.is_finished:
        batch = scheduler.schedule()
        yield batch
        scheduler.update(batch, [7] * len(batch.sampled_seqs))
        check_laws(scheduler)


def batch_of(*chunks: tuple[Sequence, int, int]) -> ScheduledBatch:
    """Return a batch of (sequence, start, end), as the scheduler would make it."""
    made = [
        Chunk(seq, start, end, end == max(len(seq.token_ids), start + 1), seq.token_ids)
        for seq, start, end in chunks
    ]
    num_tokens = sum(end - start for _, start, end in chunks)
    return ScheduledBatch(made, [chunk.seq for chunk in made if chunk.samples], num_tokens)


def sample(logits: torch.Tensor, rows: list) -> tuple[list, list]:
    """Sample as the runner does. Returns the token id of each row, and the requested reports.

    The kernel must sample the same tokens.
    """
    tokens = draw_tokens(logits, rows, draw_rows)
    assert draw_tokens(logits, rows, Kernels().sample).tolist() == tokens.tolist()
    token_ids = read_tokens(tokens)
    asked = [row.params.logprobs for row in rows]
    entries = read_tables(report_samples(logits, asked, tokens, Download), token_ids)
    return token_ids, [entries.get(row) for row in range(len(rows))]


# The tokens that models add to their vocabularies, as far as they differ in kind: (special ones, others).
ADDED_TOKENS: dict[str, tuple[str, str]] = {
    "Qwen 3": (
        "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|vision_start|> <|image_pad|>",
        "<tool_call> </tool_call> <|fim_prefix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> "
        "</tool_response> <think> </think>",
    ),
    "Llama 3.1": (
        "<|begin_of_text|> <|end_of_text|> <|finetune_right_pad_id|> <|start_header_id|> <|end_header_id|> "
        "<|eom_id|> <|eot_id|> <|python_tag|> <|reserved_special_token_2|>",
        "",
    ),
    "Mistral": (
        "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [TOOL_CALLS] "
        "[SYSTEM_PROMPT] [TOOL_CONTENT] [ARGS] [CALL_ID] [THINK] [/THINK]",
        "",
    ),
    "Gemma 3": (
        "<pad> <bos> <start_of_turn> <end_of_turn> <start_of_image> <image_soft_token>",
        "<mask> [multimodal] <unused0> <table> <td> </td> <h1> </h1> <b> </b> <code>",
    ),
    "gpt-oss": (
        "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> "
        "<|call|> <|endofprompt|>",
        "",
    ),
    "DeepSeek R1": (
        "<\uff5cbegin\u2581of\u2581sentence\uff5c> <\uff5c\u2581pad\u2581\uff5c>",
        "<\uff5cfim\u2581hole\uff5c> <\uff5cUser\uff5c> <\uff5cAssistant\uff5c> <|EOT|> "
        "<\uff5ctool\u2581calls\u2581begin\uff5c> <\uff5ctool\u2581sep\uff5c> <think> </think>",
    ),
}


def byte_tokenizer(words: tuple[str, ...] = (), model: str = "") -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer: ids 0 to 255 are the bytes, 256 is <eos>, then each of `words` is a token.

    The tokens that a model of `ADDED_TOKENS` adds come last.
    """
    symbols = bytes_to_unicode()  # GPT-2's printable stand-ins for bytes
    vocabulary = {symbols[byte]: byte for byte in range(256)} | {"<eos>": 256}
    for word in words:
        vocabulary["".join(symbols[byte] for byte in word.encode(errors="surrogateescape"))] = len(vocabulary)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    special, others = ADDED_TOKENS.get(model, ("", ""))
    backend.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in special.split()])
    backend.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in others.split()])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def metaspace_tokenizer(words: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's: a visible space before words, a byte fallback, and a BOS."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocabulary |= {word: 257 + i for i, word in enumerate(words)}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    backend, normalizers, decoders = tokenizers.Tokenizer(model), tokenizers.normalizers, tokenizers.decoders
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(content=" ", left=1, right=0)])
    backend.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in ("<s>", "</s>")])
    bos = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def table_checkpoint(
    path: Path, logits: torch.Tensor, words: tuple[str, ...] = (), model_of_tokens: str = ""
) -> Path:
    """Return a checkpoint whose next-token logits are exactly `logits[last token]`, (V, V) float32.

    Attention and MLP add nothing, the embedding is the identity, so the head reads off the table.
    """
    size = len(logits)
    config = transformers.Qwen3Config(
        **{**TINY, "vocab_size": size, "hidden_size": size, "num_hidden_layers": 1, "eos_token_id": 256},
        head_dim=16,
        rms_norm_eps=0.0,
    )
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(logits.T / size**0.5)  # the norm scales a unit vector by sqrt(size)
    model.save_pretrained(path)
    byte_tokenizer(words, model_of_tokens).save_pretrained(path)
    return path


def chain_checkpoint(path: Path, text: str, words: tuple[str, ...] = ()) -> Path:
    """Return a checkpoint that greedily repeats `text` after its first token."""
    ids = byte_tokenizer(words)(text).input_ids
    assert len(set(ids)) == len(ids), "each token decides the next, so none may occur twice"
    logits = torch.zeros(257 + len(words), 257 + len(words))
    for this, following in zip(ids, [*ids[1:], ids[0]], strict=True):
        logits[this, following] = 20.0
    return table_checkpoint(path, logits, words)


def thinking_checkpoint(path: Path) -> Path:
    """A checkpoint that, greedily, says "<think>hm</think>So" after the letter o, over and over."""
    logits = torch.zeros(259, 259)
    for this, following in itertools.pairwise([*b"o", 257, *b"hm", 258, *b"So"]):
        logits[this, following] = 20.0
    return table_checkpoint(path, logits, ("<think>", "</think>"))


THINKING_TEMPLATE = "{# <think> #}{{ messages[-1]['content'] }}"


def check_served(path: Path, reference: Any, lengths: list[int], num_new: int) -> str:
    """Assert that greedy tokens are the reference's: in chunks, with preemptions, and from the prefix cache.

    Returns:
        The implementation that computed them.
    """
    prompts = random_prompts(lengths)
    reference.answers = getattr(reference, "answers", {})  # the cache of `greedy`
    counts: Counter[str] = Counter()
    for num_kv_blocks in (24, 16, 96):  # how many are tight depends on the windows
        settings: Any = {"num_kv_blocks": num_kv_blocks, "block_size": 8, "max_num_batched_tokens": 30}
        with LLM(str(path), **settings) as llm:
            model: Any = llm.llm_engine.runner.model
            code: str = model.code
            if llm.scheduler.block_manager.max_computable_tokens < max(lengths) + num_new:
                continue
            for _ in range(2):
                check_answers(llm, reference, prompts, num_new)
            counts.update(llm.metrics())
            holds_blocks = bool(llm.llm_engine.started.loaded.kv_specs)
            if llm.llm_engine.started.loaded.kv_groups[-1].window is None:
                break
    assert bool(counts["num_preemptions"]) == holds_blocks  # without a KV cache, no preemption
    assert counts["prefix_cache_hits"] > 0
    return code
