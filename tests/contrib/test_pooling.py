"""Pooling models give transformers' vectors and scores, for any batch, chunks and prefix hits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoengine import (
    LLM,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from nanoengine.contrib.pooling_model import Pooling, read_pooling
from tests.helpers import DEMO, HF_ARCHITECTURES, TINY, checkpoint, random_prompts

SMALL: dict[str, Any] = {"num_kv_blocks": 40, "block_size": 4}
QUIET = {"use_tqdm": False}
PROMPTS = random_prompts([1, 4, 5, 23, 17, 23], seed=3)
close = {"rtol": 1e-4, "atol": 1e-4}  # float32, of sums in another order; wide weights make large numbers


def hidden_states(model: Any, prompt: list[int]) -> Any:
    with torch.no_grad():
        return model.base_model(torch.tensor([prompt])).last_hidden_state[0]


def pooled(rows: torch.Tensor, kind: str) -> torch.Tensor:
    return {"LAST": rows[-1], "CLS": rows[0], "MEAN": rows.mean(0)}[kind]


def write_modules(path: Path, kind: str, normalize: bool) -> None:
    """Write modules.json and the settings as sentence-transformers saves them."""
    places = {"": "Transformer", "1_Pooling": "Pooling"} | ({"2_Normalize": "Normalize"} if normalize else {})
    parts = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{name}"}
        for i, (place, name) in enumerate(places.items())
    ]
    (path / "modules.json").write_text(json.dumps(parts))
    (path / "1_Pooling").mkdir()
    flags = {"LAST": "lasttoken", "MEAN": "mean_tokens", "CLS": "cls_token"}
    config = {f"pooling_mode_{flag}": flag == flags[kind] for flag in flags.values()}
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **config}))


def embedder(name: str, kind: str, normalize: bool, factory: pytest.TempPathFactory, path: Path) -> Any:
    """Return a checkpoint with modules.json at `path`, and its model in transformers."""
    saved, model = checkpoint(name, factory)
    for file in saved.iterdir():
        (path / file.name).symlink_to(file)
    write_modules(path, kind, normalize)
    return model


def classifier(family: str, labels: int, path: Path, **changes: Any) -> Any:
    """Return a classifier saved at `path`, and its model in transformers."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**TINY, "num_labels": labels, **changes})
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        model.score.weight.normal_(0, 0.5)
    model.save_pretrained(path)
    return model


@pytest.fixture(scope="module")
def demo():
    """Return the bundled model as an embedding model."""
    with LLM(DEMO, runner="pooling", **SMALL) as llm:
        yield llm


@pytest.mark.parametrize(
    ("name", "kind", "normalize"),
    [
        ("qwen3", "LAST", True),
        ("llama with biases", "MEAN", True),
        ("mistral sliding", "MEAN", False),
        ("qwen2 tied", "CLS", True),
        pytest.param("gemma3", "MEAN", True, marks=pytest.mark.slow),
        pytest.param("gpt2", "LAST", False, marks=pytest.mark.slow),
    ],
)
def test_embeddings_equal_those_of_transformers_pooled(name, kind, normalize, tmp_path, tmp_path_factory):
    model = embedder(name, kind, normalize, tmp_path_factory, tmp_path)
    expected = torch.stack([pooled(hidden_states(model, prompt), kind) for prompt in PROMPTS])
    if normalize:
        expected = torch.nn.functional.normalize(expected, dim=-1)
    for settings in (SMALL, {**SMALL, "max_num_batched_tokens": 7, "enforce_eager": True}):
        with LLM(tmp_path, **settings) as llm:
            outputs = llm.embed(PROMPTS, **QUIET)
            again = llm.encode(PROMPTS, **QUIET)
            code = llm.llm_engine.runner.model.code
    got = torch.tensor([output.outputs.embedding for output in outputs])
    torch.testing.assert_close(got, expected, **close)
    torch.testing.assert_close(torch.stack([one.outputs.data for one in again]), got, **close)
    assert code == ("transformers'" if name in HF_ARCHITECTURES else "nanoengine's")
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert {type(output) for output in outputs} == {EmbeddingRequestOutput}
    assert {type(output) for output in again} == {PoolingRequestOutput}


@pytest.mark.parametrize(
    ("family", "labels", "changes"),
    [
        ("Qwen3", 3, {"tie_word_embeddings": True, "head_dim": 32}),
        ("Llama", 1, {}),
        pytest.param("Qwen2", 2, {"problem_type": "multi_label_classification"}, marks=pytest.mark.slow),
        pytest.param("Gemma2", 2, {"head_dim": 16}, marks=pytest.mark.slow),
        pytest.param("GPT2", 4, {}, marks=pytest.mark.slow),
    ],
)
def test_class_probabilities_equal_transformers(family, labels, changes, tmp_path):
    model = classifier(family, labels, tmp_path, **changes)
    with torch.no_grad():
        logits = torch.cat([model(torch.tensor([prompt])).logits for prompt in PROMPTS])
    is_sigmoid = labels == 1 or "problem_type" in changes
    with LLM(tmp_path, **SMALL, max_num_batched_tokens=7) as llm:
        outputs = llm.classify(PROMPTS, **QUIET)
        raw = llm.encode(PROMPTS, PoolingParams(use_activation=False), **QUIET)
    torch.testing.assert_close(torch.stack([one.outputs.data for one in raw]), logits, **close)
    got = torch.tensor([output.outputs.probs for output in outputs])
    torch.testing.assert_close(got, logits.sigmoid() if is_sigmoid else logits.softmax(-1), **close)
    kinds = {(type(one), one.outputs.num_classes) for one in outputs}
    assert kinds == {(ClassificationRequestOutput, labels)}


@pytest.mark.parametrize(("kind", "num_hits"), [("LAST", 11), ("MEAN", 0), ("CLS", 0)])
def test_a_prefix_is_hit_only_where_its_hidden_states_are_not_needed(kind, num_hits):
    prompt = random_prompts([12], seed=5)[0]
    with LLM(DEMO, runner="pooling", pooler_config={"pooling_type": kind}, **SMALL) as llm:
        first, second = (llm.encode(prompt, **QUIET)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, num_hits)
    torch.testing.assert_close(first.outputs.data, second.outputs.data)


def test_a_failed_step_does_not_change_a_mean():
    prompt = random_prompts([40], seed=7)[0]
    settings = {"pooler_config": {"pooling_type": "MEAN"}, "max_num_batched_tokens": 9, **SMALL}
    with LLM(DEMO, runner="pooling", **settings) as llm:
        (expected,) = llm.encode(prompt, PoolingParams(use_activation=False), **QUIET)
        engine = llm.llm_engine
        engine.add_request("a", prompt, PoolingParams())
        engine.step()
        engine.step()
        forward, engine.runner.forward = engine.runner.forward, None
        with pytest.raises(AttributeError):
            engine.step()
        engine.runner.forward = forward
        outputs = [output for _ in range(9) for output in engine.step()]
    assert len(outputs) == 1
    torch.testing.assert_close(outputs[0].pooled, expected.outputs.data)


def test_a_prompt_may_be_as_long_as_the_model():
    prompt = random_prompts([16])[0]
    with LLM(DEMO, runner="pooling", max_model_len=16, **SMALL) as llm:
        assert llm.embed(prompt, **QUIET)[0].prompt_token_ids == prompt
        with pytest.raises(ValueError, match="prompt has 17 tokens but max_model_len is 16; shorten"):
            llm.embed([*prompt, 1], **QUIET)
        cut = llm.embed([1, *prompt], pooling_params=PoolingParams(truncate_prompt_tokens=-1), **QUIET)
        assert cut[0].prompt_token_ids == prompt


def test_texts_are_scored_by_the_cosine_of_their_embeddings(demo):
    texts = ["What is 1 + 2?", "What is 1 + 3?", "Who are you?"]
    vectors = [torch.tensor(one.outputs.embedding) for one in demo.embed(texts, **QUIET)]
    scores = demo.score(texts[0], texts, **QUIET)
    pairs = demo.score(texts[:2], texts[1:], **QUIET)
    with pytest.raises(ValueError, match="data_1 must be one text, or as many as data_2: got 2 for 3"):
        demo.score(texts[:2], texts, **QUIET)
    expected = [float(vectors[0] @ vector) for vector in vectors]
    assert [one.outputs.score for one in scores] == pytest.approx(expected, abs=1e-5)
    expected = [float(vectors[0] @ vectors[1]), float(vectors[1] @ vectors[2])]
    assert [one.outputs.score for one in pairs] == pytest.approx(expected, abs=1e-5)
    assert {type(one) for one in scores} == {ScoringRequestOutput}


def test_a_cross_encoder_reads_both_texts_of_a_pair(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    model = classifier("Qwen3", 1, tmp_path, vocab_size=len(tokenizer), head_dim=16)
    tokenizer.save_pretrained(tmp_path)
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}, {% endfor %}"
    texts = ["one text", "another"]
    ids_of = {
        None: [tokenizer("a query", text).input_ids for text in texts],
        template: [tokenizer(f"query: a query, document: {text}, ").input_ids for text in texts],
    }
    with LLM(tmp_path, **SMALL) as llm:
        for chat_template, ids in ids_of.items():
            with torch.no_grad():
                expected = [float(model(torch.tensor([one])).logits.sigmoid()) for one in ids]
            scores = llm.score("a query", texts, chat_template=chat_template, **QUIET)
            assert [one.outputs.score for one in scores] == pytest.approx(expected, abs=1e-4)
            assert [one.prompt_token_ids for one in scores] == ids


def test_a_model_saved_without_a_head_can_pool(tmp_path, tmp_path_factory):
    saved, model = checkpoint("qwen3", tmp_path_factory)
    tensors = load_file(saved / "model.safetensors")
    body = {name.removeprefix("model."): x for name, x in tensors.items() if name != "lm_head.weight"}
    save_file(body, tmp_path / "model.safetensors")
    config = json.loads((saved / "config.json").read_text()) | {"architectures": ["Qwen3Model"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = torch.nn.functional.normalize(hidden_states(model, PROMPTS[3])[-1], dim=-1)
    for settings in ({}, {"model_impl": "transformers"}):
        with LLM(tmp_path, runner="pooling", **SMALL, **settings) as llm:
            (output,) = llm.embed(PROMPTS[3], **QUIET)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, **close)


def test_an_embedding_is_cut_only_if_the_checkpoint_allows_it():
    with LLM(DEMO, runner="pooling", hf_overrides={"matryoshka_dimensions": [8, 16]}, **SMALL) as llm:
        (whole,) = llm.encode("a", PoolingParams(use_activation=False), **QUIET)
        (part,) = llm.embed("a", pooling_params=PoolingParams(dimensions=8), **QUIET)
        expected = torch.nn.functional.normalize(whole.outputs.data[:8], dim=-1)
        torch.testing.assert_close(torch.tensor(part.outputs.embedding), expected)
        with pytest.raises(ValueError, match=re.escape("dimensions must be among the checkpoint's, (8, 16")):
            llm.embed("a", pooling_params=PoolingParams(dimensions=9), **QUIET)


def test_calls_that_the_model_does_not_support_are_refused(demo):
    for call, message in [
        (lambda: demo.generate("a", **QUIET), "this model embeds its prompts; set runner"),
        (lambda: demo.classify("a", **QUIET), "this model embeds its prompts; it cannot classify"),
        (lambda: demo.encode("a", [PoolingParams()] * 2, **QUIET), "must be one per prompt: got 2"),
        (lambda: demo.encode("a", PoolingParams(dimensions=9), **QUIET), "dimensions must be among"),
        (lambda: demo.score([], "a", **QUIET), "data_1 must contain at least one text"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="pooling_params must be PoolingParams, got 5"):
        demo.encode("a", 5, **QUIET)
    for call in demo.embed, demo.classify, demo.encode:
        with pytest.raises(ValueError, match="task='embed' is not supported"):
            call("a", task="embed", **QUIET)
    with LLM(DEMO, **SMALL) as llm, pytest.raises(ValueError, match="embed needs a model that pools"):
        llm.embed("a", **QUIET)
    for name, value in (
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}),
        ("logits_processors", [len]),
    ):
        with pytest.raises(ValueError, match=f"{name} does not work with a pooling model"):
            LLM(DEMO, runner="pooling", **{name: value})
    with pytest.raises(ValueError, match="task must be one of embed, classify, got 'rank'"):
        PoolingParams(task="rank")
    with pytest.raises(ValueError, match="pooling_type must be LAST, MEAN or CLS, got 'ALL'"):
        LLM(DEMO, runner="pooling", pooler_config={"pooling_type": "ALL"})


@pytest.mark.parametrize("family", ["Bert", "XLMRoberta", "ModernBert"])
def test_an_encoder_is_refused(family, tmp_path):
    config = getattr(transformers, f"{family}Config")(architectures=[f"{family}ForSequenceClassification"])
    config.save_pretrained(tmp_path)
    match = f"{family}ForSequenceClassification is not supported: it is not a causal decoder"
    with pytest.raises(ValueError, match=match):
        LLM(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, Pooling("LAST", "normalize")),
        ({"1_Pooling/config.json": {"pooling_mode": "mean"}}, Pooling("MEAN", "none")),
        ({"1_Pooling/config.json": {"pooling_mode": ["mean", "cls"]}}, "asks for mean, cls; supported"),
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, "asks for pooling_mode_max_tokens;"),
        ({"modules.json": [{"type": "a.Dense", "path": "2_Dense"}]}, "has a module Dense; supported"),
        ({"modules.json": {"a": 1}}, "must list modules with a type and a path"),
        ({"sentence_bert_config.json": {"do_lower_case": True}}, "sets do_lower_case"),
    ],
)
def test_pooling_modules_are_read_from_the_checkpoint_files(files, expected, tmp_path):
    if files:
        write_modules(tmp_path, "LAST", normalize=False)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    config = transformers.Qwen3Config(architectures=["Qwen3ForCausalLM"])
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            read_pooling(tmp_path, config, None)
    else:
        assert read_pooling(tmp_path, config, None) == expected
