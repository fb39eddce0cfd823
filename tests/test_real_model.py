"""A real model, SmolLM2-135M-Instruct as a GGUF file, compared with transformers and used end to end.

`python tests/fetch_model.py` fetches the file.
"""

import pydoc_data.topics

import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from nanoengine import LLM, SamplingParams
from tests.fetch_model import place

MODEL = place()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_file(), reason=f"needs {MODEL}: python tests/fetch_model.py"),
]
# Real English, which every Python has: the beginnings of pages of its documentation.
TOPICS = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
PROMPTS = [" ".join(topic.split()[8:40]) for topic in TOPICS if len(topic) > 400][:30]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, dtype="float32", max_model_len=1024) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference():
    """The same weights on transformers' code, dequantized."""
    from transformers import GgufConfig

    settings = {"gguf_file": MODEL.name, "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM
    return model.from_pretrained(
        MODEL.parent, quantization_config=GgufConfig(dequantize=True), **settings
    ).eval()


@torch.no_grad()
def test_greedy_tokens_and_log_probabilities_are_those_of_transformers(llm, reference):
    assert len(PROMPTS) == 30
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        prompt, (completion,) = output.prompt_token_ids, output.outputs
        logits = reference(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        # Each token is the likeliest after the ones before it, so by induction the answers are equal.
        assert logits.argmax(-1).tolist() == completion.token_ids
        theirs = logits.log_softmax(-1).amax(-1).tolist()
        ours = [row[i].logprob for row, i in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_tokens_and_the_template_are_those_of_transformers(llm):
    ours = llm.get_tokenizer()
    theirs = transformers.AutoTokenizer.from_pretrained(MODEL.parent, gguf_file=MODEL.name)
    # transformers ignores that the file names "smollm": SmolLM2's tokenizer.json splits digits first.
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    texts = "12345 naïve café 日本語 🙂\n\n\tdef f(x):\n    return x", "<|im_start|>user\nHi<|im_end|>"
    for text in (*TOPICS[:60], *texts):
        ids = ours(text).input_ids
        assert ids == theirs(text).input_ids
        assert ours.decode(ids) == theirs.decode(ids)
    chat = [{"role": "system", "content": "Be brief."}, *QUESTION]
    rendered = ours.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered.endswith("What is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
