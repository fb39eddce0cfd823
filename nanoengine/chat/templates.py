"""Renders chats to prompts, with the chat template of the model's tokenizer."""

import json
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from nanoengine.requests import check_unicode
from nanoengine.signals import uninterrupted

MAX_RENDERED = 2**26  # limit on the characters that a chat template may write


def render_chats(
    messages: Any,
    tokenizer: Any,
    encode: Callable[[str, bool], list[int]] | None = None,
    /,
    **template_settings: Any,
) -> list[dict[str, Any]]:
    """Render one conversation (a list of messages), or a list of them, with the chat template.

    A message's content is a string or a list of text parts. If the template expects strings, the parts are
    joined with newlines, as in vLLM. `encode` is `RequestChecker.encode`. Without it, any length is accepted.

    Raises:
        ValueError: the tokenizer has no template, or messages are malformed or contain anything but text.
    """
    if tokenizer is None or not (tokenizer.chat_template or template_settings.get("chat_template")):
        raise ValueError("the checkpoint has no chat template; give chat_template or use generate")
    if not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a list of messages or of conversations, got {messages!r}")
    conversations = [messages] if isinstance(messages[0], dict) else messages
    prompts = []
    for conversation in conversations:
        for message in conversation:
            if not isinstance(message, dict) or "role" not in message:
                raise ValueError(f"each of messages must have a role and a content, got {message!r}")
        template = template_settings.get("chat_template")
        conversation = with_known_roles(conversation, tokenizer, template)
        has_parts = any(isinstance(message.get("content"), list) for message in conversation)
        join = has_parts and not reads_parts(tokenizer, template)
        conversation = [normalize(message, join) for message in conversation]
        text = check_unicode("messages", apply_template(tokenizer, conversation, **template_settings))
        # The template writes the special tokens itself.
        token_ids = encode(text, False) if encode else tokenizer(text, add_special_tokens=False).input_ids
        prompts.append({"prompt": text, "prompt_token_ids": token_ids})
    return prompts


def apply_template(tokenizer: Any, conversation: Sequence[Any], **settings: Any) -> str:
    """Return the conversation as text. Raises ValueError if the template raises or writes too much."""
    with uninterrupted():
        try:
            text: str = tokenizer.apply_chat_template(conversation, tokenize=False, **settings)
        except Exception as error:
            raise ValueError(f"messages do not fit the model's chat template: {error!r}") from error
    if len(text) > MAX_RENDERED:
        raise ValueError(f"messages must render to at most {MAX_RENDERED} characters, got {len(text)}")
    return text


def with_known_roles(
    conversation: Sequence[dict[str, Any]], tokenizer: Any, chat_template: str | None
) -> list[dict[str, Any]]:
    """Return the messages with developers as systems, unless the template names developers."""
    knows_developers = "developer" in str(chat_template or tokenizer.chat_template)
    for role in dict.fromkeys(str(message["role"]) for message in conversation):
        if role in ("system", "user", "assistant") or (role == "developer" and not knows_developers):
            continue
        said = ("user", "a"), ("assistant", "b"), (role, "probe-of-role")
        text = probe(tokenizer, chat_template, *(said[:1] + said[2:] if role == "developer" else said))
        if text is not None and "probe-of-role" not in text:
            raise ValueError(f"messages: the model's chat template has no role {role!r:.80}")
    found: list[dict[str, Any]] = []
    for message in conversation:
        if message["role"] == "developer" and not knows_developers:
            message = message | {"role": "system"}
            if found and found[-1]["role"] == "system":  # many templates render only one
                before, text = found.pop().get("content"), message.get("content")
                parts = (one if isinstance(one, list) else [one or ""] for one in (before, text))
                message["content"] = [*chain(*parts)]
        found.append(message)
    return found


def normalize(message: dict[str, Any], join: bool) -> dict[str, Any]:
    """Return the message with its text parts, joined on request, and an object, such as a result, as JSON."""
    content = message.get("content", "")
    if not isinstance(content, list):
        if not isinstance(content, str | dict | None):
            raise ValueError(f"content must be text, a list of parts or an object, got {content!r:.80}")
        if isinstance(content, dict):
            content = json.dumps(content, ensure_ascii=False)
        elif content is None and not message.get("tool_calls"):
            content = ""  # as in vLLM; next to calls, None is for the template
        return message | {"content": content} if "content" in message else message
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    for i, part in enumerate(parts):
        if isinstance(part, dict) and part.get("type") == "refusal":  # as answers have it, for the history
            parts[i] = part = {"type": "text", "text": part.get("refusal")}
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"images and audio are not supported, got {part!r:.80}; "
                'content must hold only parts {"type": "text", "text": ...}'
            )
    return message | {"content": "\n".join(part["text"] for part in parts) if join else parts}


def reads_parts(tokenizer: Any, chat_template: str | None) -> bool:
    """Return whether a template renders content parts. One that expects strings fails or prints the list."""
    text = probe(tokenizer, chat_template, ("user", [{"type": "text", "text": "probe-of-parts"}]))
    return text is not None and "probe-of-parts" in text and "'type'" not in text


def probe(tokenizer: Any, chat_template: str | None, *said: tuple[str, Any]) -> str | None:
    """Return a conversation, given as roles and contents, as text. None: the template refuses it."""
    conversation = [{"role": role, "content": content} for role, content in said]
    try:
        return apply_template(tokenizer, conversation, chat_template=chat_template)
    except ValueError:
        return None
