"""A prompt as a user's message, by the chat template of the model's tokenizer."""

from __future__ import annotations

from typing import Any

__all__ = ["chat_prompt", "turn_ends"]

# A word that no template contains.
ANSWER = "xanswerx"


def chat_prompt(tokenizer: Any, message: str, system: str | None = None) -> list[int]:
    """Returns the ids of a conversation that waits for the model's answer, special tokens included.

    message: the user's; trailing line breaks are stripped. system: None: the template's default, if any. Raises
    ValueError for a tokenizer without a template, and for one that fails or drops a message.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat: expected a tokenizer with a chat template, got one without")
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": message.rstrip("\r\n")})
    text = _rendered(tokenizer, messages, add_generation_prompt=True, tokenize=False)
    for i, entry in enumerate(messages):
        # Detected by replacing the message: a template may trim, shorten or quote it.
        others = [*messages[:i], {**entry, "content": ANSWER + entry["content"]}, *messages[i + 1 :]]
        if _rendered(tokenizer, others, add_generation_prompt=True, tokenize=False) == text:
            raise ValueError(f"chat: expected a template that has the {entry['role']}'s message, got one without")
    ids: list[int] = _rendered(tokenizer, messages, add_generation_prompt=True, return_dict=False)
    return ids


def turn_ends(tokenizer: Any) -> list[int]:
    """Returns the special token after an answer, if the template writes one; some generation configs lack it."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ANSWER}]
    _, answer, behind = _rendered(tokenizer, messages, tokenize=False).rpartition(ANSWER)
    ids = tokenizer(behind.lstrip(), add_special_tokens=False)["input_ids"] if answer else []
    special = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    return [token for token in ids[:1] if token in special]


def _rendered(tokenizer: Any, messages: list[dict[str, str]], **how: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **how)
    except Exception as error:  # a template is a program
        roles, what = " and ".join(message["role"] for message in messages), " ".join(str(error).split())
        raise ValueError(f"chat: the tokenizer's template refuses messages of {roles}: {what}") from None
