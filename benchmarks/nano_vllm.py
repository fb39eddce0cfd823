"""nano-vllm and nano.py as engines: writes a checkpoint that both load, and calls their `generate`.

nanoengine's Python writes the checkpoint. The engine's own Python needs only nano-vllm, so import only the
standard library at the top of this file. Source: https://github.com/GeeeekExplorer/nano-vllm
"""

import importlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.runs import LIMITS, TEMPERATURE, Run, write_weights

if TYPE_CHECKING:
    from nanoengine.checkpoints.checkpoint import Checkpoint


def prepare(checkpoint: "Checkpoint", settings: dict[str, Any], directory: str) -> dict[str, Any]:
    """Return the settings for `load`. A model that is only a config gets random weights and a tokenizer.

    Raises ValueError if nano-vllm would compute another model than the checkpoint describes: it silently
    treats every checkpoint as a Qwen3 with default rope and the dtype in the config.
    """
    config, own = checkpoint.decoder_config, checkpoint.hf_config.dtype
    if config is None or checkpoint.architecture != "Qwen3ForCausalLM":
        raise ValueError(f"nano-vllm supports only Qwen3ForCausalLM, got {checkpoint.architecture}")
    if any(config.windows) or config.rope["rope_type"] != "default":
        raise ValueError(f"{checkpoint.path}: nano-vllm has no sliding window and no scaled rope")
    if str(own).removeprefix("torch.") != settings["dtype"]:
        raise ValueError(f"{checkpoint.path}: nano-vllm computes in the checkpoint's own dtype, {own}")
    if settings["load_format"] != "dummy":
        return settings
    import tokenizers

    path = Path(directory, "nano-vllm")
    if path.exists():  # written for the other engine
        return settings | {"model": str(path)}
    write_weights(settings, path)
    word = "<eos>"
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: 0}, unk_token=word))
    tokenizer.save(str(path / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": word}
    (path / "tokenizer_config.json").write_text(json.dumps(about))
    return settings | {"model": str(path)}


def load(settings: dict[str, Any]) -> Run:
    """Load the engine with the settings from `prepare`. nano-vllm silently ignores unknown settings."""
    module = importlib.import_module("nanoengine.nano" if settings["engine"] == "nano.py" else "nanovllm")
    llm = module.LLM(settings["model"], max_model_len=settings["max_model_len"], **LIMITS)

    def run(prompts: list[list[int]], output_lens: list[int]) -> dict[str, Any]:
        params = [module.SamplingParams(TEMPERATURE, max_tokens=n, ignore_eos=True) for n in output_lens]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "output_tokens": sum(len(output["token_ids"]) for output in outputs)}

    return run
