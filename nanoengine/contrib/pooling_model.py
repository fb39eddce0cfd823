"""Reads from a checkpoint how to pool: how hidden states become an embedding or a classifier's scores.

An embedding model has the files of sentence-transformers: `modules.json` lists the modules that follow the
transformer. A classifier's architecture is named `...ForSequenceClassification`. In place of lm_head it has a
head `score`, which is applied to the last token.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from nanoengine.models.decoder import architecture_of
from nanoengine.models.files import Files, UnsupportedModelError, read_json
from nanoengine.models.names import EMBEDDING, HEAD
from nanoengine.sampling_params import check_bool

CLASSIFIER_HEAD = "score.weight"  # takes the place of lm_head
# Names in sentence-transformers, in its older files, and in vLLM -> Pooling.kind
KINDS = {
    **{"lasttoken": "LAST", "mean": "MEAN", "cls": "CLS"},
    **{"pooling_mode_lasttoken": "LAST", "pooling_mode_mean_tokens": "MEAN", "pooling_mode_cls_token": "CLS"},
    **{"LAST": "LAST", "MEAN": "MEAN", "CLS": "CLS"},
}
ACTIVATIONS = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "none"}  # PyTorch's names -> ours
# A classifier's problem_type -> Pooling.activation
PROBLEMS = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """Describes how to pool a prompt's hidden states."""

    kind: str  # "LAST": the last token's hidden state, "CLS": the first token's, "MEAN": the mean of all
    activation: str  # applied afterwards: "normalize", "softmax", "sigmoid" or "none"
    labels: tuple[str, ...] = ()  # a classifier's labels, in the order of its scores; (): an embedding model
    dimensions: tuple[int, ...] = ()  # sizes to which an embedding may be truncated (Matryoshka)


def check_pooler_config(given: Any) -> None:
    """Raise TypeError or ValueError if `EngineConfig.pooler_config` is malformed."""
    if not isinstance(given, dict) or not given.keys() <= {"pooling_type", "use_activation"}:
        raise TypeError(f"pooler_config must be a dict of pooling_type and use_activation, got {given!r}")
    if given.get("pooling_type", "LAST") not in ("LAST", "MEAN", "CLS"):
        raise ValueError(f"pooling_type must be LAST, MEAN or CLS, got {given['pooling_type']!r}")
    if "use_activation" in given:
        check_bool("use_activation", given["use_activation"])


def read_pooling(path: Path, hf_config: Any, pooler_config: dict[str, Any] | None) -> Pooling:
    """Return the checkpoint's pooling settings. Settings in pooler_config override them.

    Changes a classifier's config to name the causal LM of its type, because that code computes it.

    Raises:
        UnsupportedModelError: the model is not causal, or this way to pool is not supported.
        ValueError: a file is malformed, or pooler_config is given for a classifier.
    """
    if (
        type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        or getattr(hf_config, "is_decoder", True) is False  # models that are encoders by default have it
        or getattr(hf_config, "is_causal", True) is False
        or getattr(hf_config, "use_bidirectional_attention", None)
    ):
        raise UnsupportedModelError(
            "it is not a causal decoder (an encoder's tokens attend to later ones); use an embedding model "
            "or a classifier based on a causal language model, such as Qwen3-Embedding"
        )
    if not architecture_of(hf_config).endswith("ForSequenceClassification"):
        return _embedding(path, hf_config, pooler_config or {})
    if pooler_config:
        raise ValueError("pooler_config is for embeddings; a classifier always scores the last token")
    causal_lm: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    hf_config.architectures = [causal_lm.__name__]
    return _classifier(hf_config)


def _classifier(hf_config: Any) -> Pooling:
    labels = tuple(str(hf_config.id2label[i]) for i in range(len(hf_config.id2label)))
    # Where sentence-transformers' CrossEncoder saves its activation, in new files and in old ones.
    named = getattr(hf_config, "sentence_transformers", None) or {}
    named = named.get("activation_fn") or getattr(hf_config, "sbert_ce_default_activation_function", None)
    if named is not None:
        activation = ACTIVATIONS.get(str(named).rpartition(".")[2])
        if activation is None:
            raise UnsupportedModelError(
                f"its activation is {named!r}; supported: PyTorch's {', '.join(ACTIVATIONS)}"
            )
    else:
        by_number = "sigmoid" if len(labels) == 1 else "softmax"
        activation = PROBLEMS.get(hf_config.problem_type, by_number)
    return Pooling("LAST", activation, labels)


def _embedding(path: Path, hf_config: Any, pooler_config: dict[str, Any]) -> Pooling:
    """Return the pooling of an embedding model. Without modules.json it is the normalized last token."""
    kind, activation = ("LAST", "normalize")
    file = path / "modules.json"
    if file.is_file():
        activation = "none"
        try:
            modules = [
                (part["type"].rpartition(".")[2], path / part["path"])
                for part in json.loads(file.read_bytes())
            ]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} must list modules with a type and a path: {error!r}") from error
        for name, folder in modules:
            if name == "Transformer":
                settings = path / "sentence_bert_config.json"
                if read_json(settings, default={}).get("do_lower_case"):
                    raise UnsupportedModelError(f"{settings} sets do_lower_case, which is not supported")
            elif name == "Pooling":
                kind = _kind(folder / "config.json")
            elif name == "Normalize":
                activation = "normalize"
            else:
                raise UnsupportedModelError(
                    f"{file} has a module {name}; supported: Transformer, Pooling, Normalize"
                )
    if (given := pooler_config.get("pooling_type")) is not None:
        kind = KINDS[given]
    if (given := pooler_config.get("use_activation")) is not None:
        activation = "normalize" if given else "none"
    dimensions = getattr(hf_config, "matryoshka_dimensions", None)
    if dimensions is None and getattr(hf_config, "is_matryoshka", False):
        dimensions = range(1, hf_config.get_text_config().hidden_size + 1)
    return Pooling(kind, activation, dimensions=tuple(dimensions or ()))


def _kind(file: Path) -> str:
    """Return the kind of pooling in the config.json of a Pooling module."""
    content = read_json(file)
    flags = [name for name, value in content.items() if name.startswith("pooling_mode_") and value is True]
    modes = content.get("pooling_mode") or flags
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or modes[0] not in KINDS:
        raise UnsupportedModelError(
            f"{file} asks for {', '.join(map(str, modes))}; supported: the last token, the first, the mean"
        )
    return KINDS[modes[0]]


def replace_head(files: Files, pooling: Pooling) -> None:
    """Drop lm_head from a checkpoint's tensors, and put a classifier's head in its place.

    If the body was saved without a head, its tensors get the `model.` prefix of a model with a head.
    """
    headers, body = files.headers, EMBEDDING.removeprefix("model.")
    if body in headers and not hasattr(files, "weight_format"):
        files.headers = headers = {f"model.{name}": header for name, header in headers.items()}
    if EMBEDDING in headers:
        headers.pop(HEAD, None)
    if pooling.labels:
        if CLASSIFIER_HEAD not in headers:
            raise ValueError(f"{files.path} lacks tensor {CLASSIFIER_HEAD!r}, the classifier's head")
        headers[HEAD] = headers.pop(CLASSIFIER_HEAD)
