"""How the command line puts a prompt to a pair: through the chat template, or as text to be continued."""

from __future__ import annotations

from jinja2.exceptions import TemplateError

from viasd.errors import OptionError
from viasd.heads import LightHeads
from viasd.mask import LayerMask
from viasd.pair import Pair, Prompt
from viasd.runtime.api import Stream, stream
from viasd.runtime.config import GenerationConfig
from viasd.runtime.guard import Guard


def wants_chat(pair: Pair, chat: bool | None, system: str | None, *, base: bool) -> bool:
    """Whether prompts go through the chat template.

    Args:
        pair: The loaded pair.
        chat: What the user asked for, None to leave it to the model.
        system: The system message asked for, if any.
        base: Whether base checkpoints were asked for; some of them carry the template of their sibling.

    Raises:
        OptionError: If a chat is needed and there is none.
    """
    if chat is None:
        chat = pair.is_chat and not base
    if system is not None and not chat:
        raise OptionError(
            f"--system is a message of a chat, but {pair.target_id} is used for plain completion; add --chat"
        )
    if chat and not pair.is_chat:
        raise OptionError(f"{pair.target_id} has no chat template; use --no-chat")
    return chat


def start(
    pair: Pair,
    prompt: Prompt,
    *,
    mask: LayerMask | str | None,
    heads: LightHeads | str | None = "auto",
    config: GenerationConfig,
    guard: Guard | None = None,
) -> Stream:
    """Starts an answer; a chat template's own complaints become an error of ours.

    Raises:
        ViasdError: As `viasd.runtime.api.stream`.
    """
    try:
        return stream(pair, prompt, mask=mask, heads=heads, config=config, guard=guard)
    except TemplateError as error:
        raise OptionError(f"the chat template of {pair.target_id} refuses this conversation: {error}") from error
