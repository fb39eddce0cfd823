"""Prompts, in every form a user may write them, to token ids."""

from collections.abc import Sequence
from typing import Any

Prompt = str | Sequence[int] | dict[str, Any]


def split_prompts(prompts: Any) -> list[Any]:
    """One or several prompts as a list; a list of integers is one prompt."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise TypeError(f"prompts must be a string, token ids, a dict or a list of these, got {prompts!r}")
    if not prompts:
        raise ValueError("prompt is empty; at least one token is needed, got []")
    return [prompts] if isinstance(prompts[0], int) else list(prompts)


def read_prompt(prompt: Any, tokenizer: Any, vocab_size: int) -> tuple[str | None, list[int]]:
    """A prompt's text, where it is known, and its token ids, each in the vocabulary."""
    fields = prompt
    if isinstance(prompt, str):
        fields = {"prompt": prompt}
    elif not isinstance(prompt, dict):
        fields = {"prompt_token_ids": prompt}
    if not fields or not fields.keys() <= {"prompt", "prompt_token_ids"}:
        raise ValueError(
            f'a prompt dict must hold "prompt" or "prompt_token_ids" and nothing else, got {sorted(fields)}'
        )
    text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"prompt must be a string, got {text!r}")
    if token_ids is None:
        if tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer; give the prompt as token ids")
        token_ids = tokenizer(text).input_ids
    if isinstance(token_ids, str) or not isinstance(token_ids, Sequence):
        raise TypeError(f"prompt must be a string, token ids or a dict, got {token_ids!r}")
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise TypeError(f"prompt must hold integer token ids only, got {token_id!r}")
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"prompt must hold token ids in [0, {vocab_size}), got {token_id}")
    return text, list(token_ids)


def render_chats(messages: Any, tokenizer: Any, **template_settings: Any) -> list[dict[str, Any]]:
    """One conversation or a list of them, each a list of messages, through the chat template.

    Raises:
        ValueError: the tokenizer has no template, or a conversation is not a list of messages.
    """
    if tokenizer is None or not (tokenizer.chat_template or template_settings.get("chat_template")):
        raise ValueError(
            "the checkpoint's tokenizer has no chat template; give chat_template or use generate"
        )
    if not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a list of messages or of conversations, got {messages!r}")
    conversations = [messages] if isinstance(messages[0], dict) else messages
    prompts = []
    for conversation in conversations:
        for message in conversation:
            if not isinstance(message, dict) or "role" not in message:
                raise ValueError(
                    f'each of messages must be a dict with "role" and "content", got {message!r}'
                )
        text = tokenizer.apply_chat_template(conversation, tokenize=False, **template_settings)
        # The template writes the special tokens itself.
        token_ids = tokenizer(text, add_special_tokens=False).input_ids
        prompts.append({"prompt": text, "prompt_token_ids": token_ids})
    return prompts
