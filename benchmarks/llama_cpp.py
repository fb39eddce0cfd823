"""llama.cpp as an engine: writes a checkpoint as a GGUF file, and batches continuously through the C API.

nanoengine's Python writes the file, with the package `gguf`. The engine's own Python needs only
llama-cpp-python, so import only the standard library at the top of this file.
"""

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.runs import KV_CACHE_BYTES, MAX_NUM_SEQS, TEMPERATURE, Run, measurements, transformers_model

if TYPE_CHECKING:
    from nanoengine.checkpoints.checkpoint import Checkpoint

# ---- The file ------------------------------------------------------------------------------------

FAMILIES = {"Llama": "llama", "Mistral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3"}  # llama.cpp's names


def prepare(checkpoint: "Checkpoint", settings: dict[str, Any], directory: str) -> dict[str, Any]:
    """Write a GGUF file, and return the settings for `load`. ValueError: llama.cpp has no such model."""
    config = checkpoint.decoder_config
    if config is None:
        known = ", ".join(FAMILIES)
        raise ValueError(f"{checkpoint.architecture} is not written for llama.cpp, only {known}")
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2  # float16
    num_tokens = min(KV_CACHE_BYTES // token_bytes, MAX_NUM_SEQS * settings["max_model_len"])
    kind = settings.get("weight_type")
    path = Path(directory, f"{kind or 'model'}.gguf")
    write_gguf(checkpoint, settings, path, kind)
    return settings | {"model": str(path), "cache_tokens": num_tokens // 256 * 256}


def write_gguf(
    checkpoint: "Checkpoint", settings: dict[str, Any], path: Path, kind: str | None = None
) -> None:
    """Write a checkpoint without its tokenizer. With load_format "dummy", write random weights.

    Matrices have the run's dtype, or a quantized type like "q4_0", in which case embedding and head are Q8_0.
    Norms and biases are float32, as in llama.cpp's own files. Source: llama.cpp's convert_hf_to_gguf.py.
    """
    import gguf
    import torch

    from nanoengine.models.decoder import rope_frequencies

    config = checkpoint.decoder_config
    assert config is not None
    family = FAMILIES[checkpoint.architecture.removesuffix("ForCausalLM")]
    if any(config.windows):
        raise ValueError(f"{checkpoint.path}: llama.cpp has no sliding window in its {family} models")
    plain = config.rope | {"rope_type": "default"}
    frequencies, rope_scale = rope_frequencies(config.rope, config.head_dim)
    divisors = rope_frequencies(plain, config.head_dim)[0] / frequencies
    is_scaled = not torch.equal(divisors, torch.ones_like(divisors))
    if rope_scale != 1 or (is_scaled and family != "llama"):
        kind = config.rope["rope_type"]
        raise ValueError(f"{checkpoint.path}: llama.cpp's {family} models cannot have its {kind} rope")

    writer = gguf.GGUFWriter(path, family)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(checkpoint.hf_config.max_position_embeddings)
    writer.add_block_count(config.num_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if is_scaled:
        writer.add_tensor("rope_freqs.weight", divisors.numpy())

    model = transformers_model(settings | {"device": "cpu"})
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_layers)
    dtypes = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    weight_type = gguf.GGMLQuantizationType[(kind or dtypes[settings["dtype"]]).upper()]
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and weight.data_ptr() == model.get_input_embeddings().weight.data_ptr():
            continue
        if family == "llama" and (part := name.split(".")[-2]) in heads:
            # llama.cpp's rope rotates element 2i with 2i + 1, and transformers' rotates i with i + D / 2.
            halves = weight.view(heads[part], 2, config.head_dim // 2, *weight.shape[1:])
            weight = halves.transpose(1, 2).reshape(weight.shape)
        own_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if own_name is None:
            raise ValueError(f"{checkpoint.path}: llama.cpp's {family} models have no {name}")
        own_type = weight_type
        if weight.dim() == 1:
            own_type = gguf.GGMLQuantizationType.F32
        elif kind is not None and not own_name.startswith("blk."):
            own_type = gguf.GGMLQuantizationType.Q8_0
        rows = gguf.quants.quantize(weight.float().numpy(), own_type)
        writer.add_tensor(own_name, rows, raw_dtype=own_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- The engine ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Request:
    """Holds a request's tokens, and its progress."""

    tokens: list[int]  # the prompt, then the sampled tokens
    num_prompt: int
    num_total: int  # tokens, and cells of the cache, in the end
    sequence: int  # llama.cpp's sequence id
    num_computed: int = 0  # number of tokens in the cache
    stamps: list[float] = field(default_factory=list)  # when each token was sampled


CPU_FLAGS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""


class LlamaCpp:
    """Runs a model in llama.cpp with continuous batching, and one KV cache for all sequences.

    A step is one `llama_decode` of the running requests' uncomputed tokens, oldest request first, up to the
    batch limit. llama.cpp does not preempt, so a request waits until there is room for all its tokens.
    `exact` keeps K and V in float32. Otherwise llama.cpp uses its default, flash attention over float16. It
    has none over float32, and without it every sequence is multiplied with the keys of all others.
    """

    def __init__(
        self, path: str, threads: int, cache_tokens: int, device: str = "cpu", *, exact: bool = False
    ) -> None:
        import llama_cpp

        logging.getLogger("llama-cpp-python").setLevel(logging.WARNING)
        self.api = llama_cpp
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        if device == "cpu":
            model_params.n_gpu_layers = 0
        # Version 0.3.36 crashes when it copies quantized weights for AMX and the head is tied to the
        # embedding. `prepare` names the files of quantized weights after their type.
        model_params.use_extra_bufts = not ("amx_tile" in CPU_FLAGS and Path(path).stem in ("q4_0", "q8_0"))
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = cache_tokens, MAX_NUM_SEQS, True
        params.n_outputs_max = MAX_NUM_SEQS
        params.n_threads = params.n_threads_batch = threads
        if exact:
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        self.cache_tokens, self.max_tokens = cache_tokens, params.n_batch
        self.batch = llama_cpp.llama_batch_init(self.max_tokens, 0, 1)

    def close(self) -> None:
        """Free all memory."""
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)

    def serve(
        self, prompts: list[list[int]], output_lens: list[int], temperature: float = TEMPERATURE
    ) -> tuple[list[Request], dict[str, Any]]:
        """Serve prompts. Returns the requests in order, and the measurements."""
        api, memory = self.api, self.api.llama_get_memory(self.context)
        if (longest := max(map(sum, zip(map(len, prompts), output_lens, strict=True)))) > self.cache_tokens:
            raise ValueError(f"a request needs {longest} tokens, the cache has {self.cache_tokens}")
        sampler = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        api.llama_sampler_chain_add(sampler, api.llama_sampler_init_temp(temperature))
        api.llama_sampler_chain_add(sampler, api.llama_sampler_init_dist(0))
        api.llama_memory_clear(memory, False)
        requests: list[Request] = []
        running: list[Request] = []
        free_sequences = list(range(MAX_NUM_SEQS))
        num_steps, start = 0, time.perf_counter()
        while running or len(requests) < len(prompts):
            while len(requests) < len(prompts) and free_sequences:
                prompt = prompts[len(requests)]
                total = len(prompt) + output_lens[len(requests)]
                if sum(request.num_total for request in running) + total > self.cache_tokens:
                    break
                running.append(Request(list(prompt), len(prompt), total, free_sequences.pop()))
                requests.append(running[-1])
            due = self._decode(running)
            num_steps += 1
            for row, request in due:
                request.tokens.append(api.llama_sampler_sample(sampler, self.context, row))
            now = time.perf_counter() - start
            for _, request in due:
                request.stamps.append(now)
                if len(request.tokens) == request.num_total:
                    running.remove(request)
                    api.llama_memory_seq_rm(memory, request.sequence, -1, -1)
                    free_sequences.append(request.sequence)
        seconds = time.perf_counter() - start
        api.llama_sampler_free(sampler)
        stamps = [request.stamps for request in requests]
        return requests, {"steps": num_steps, **measurements(seconds, stamps)}

    def _decode(self, running: list[Request]) -> list[tuple[int, Request]]:
        """Compute uncomputed tokens, oldest request first. Returns (row, request) for those that sample."""
        batch, due, row = self.batch, [], 0
        for request in running:
            begin = request.num_computed
            end = min(len(request.tokens), begin + self.max_tokens - row)
            for position in range(begin, end):
                batch.token[row] = request.tokens[position]
                batch.pos[row] = position
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = request.sequence
                batch.logits[row] = position == len(request.tokens) - 1
                row += 1
            request.num_computed = end
            if begin < end == len(request.tokens):
                due.append((row - 1, request))
        batch.n_tokens = row
        if status := self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        return due


def load(settings: dict[str, Any]) -> Run:
    """Load llama.cpp with the settings from `prepare`."""
    engine = LlamaCpp(*(settings[name] for name in ("model", "threads", "cache_tokens", "device")))
    return lambda prompts, output_lens: engine.serve(prompts, output_lens)[1]
