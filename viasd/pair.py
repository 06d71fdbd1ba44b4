"""A loaded pair: the target driven layer by layer, its drafter, and what both share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from viasd.errors import ContextLengthError, DrafterError, OptionError
from viasd.feature import FeatureDrafterFile
from viasd.featuremodel import FeatureModel
from viasd.layered import LayeredModel
from viasd.probe import load_layered
from viasd.quantized import GroupCodes

Prompt = str | Sequence[int] | Sequence[dict[str, str]] | Any


@dataclass(frozen=True)
class Pair:
    """A drafter and a target that share a tokenizer.

    Attributes:
        name: ``FAMILY-DRAFTER:TARGET``, or the two ids where no registry name was used.
        target: The target.
        tokenizer: The target's tokenizer.
        drafter: The drafter model, or None for a drafter that needs none.
        drafter_kind: ``model``, ``feature`` (a layer over the target's hidden states), ``lookup`` (n-grams of the text so
            far) or ``self`` (the target with more layers skipped).
        target_id: Hub id or path of the target.
        eos_ids: Tokens that end an answer, from the generation config and the tokenizer.
        source: Where the weights came from, in a word.
        feature: The feature drafter on its target, for that kind.
        shortlist: Token ids ``[m]`` that the drafter model may propose; None for all.
        lookup_first: Whether lookup is asked before the drafter (of any kind but ``lookup``).
        measured: Room for what is measured once per loaded pair (costs of the tiers).
    """

    name: str
    target: LayeredModel
    tokenizer: PreTrainedTokenizerBase
    drafter: LayeredModel | None
    drafter_kind: str
    target_id: str
    eos_ids: frozenset[int]
    source: str = "given"
    feature: FeatureModel | None = None
    shortlist: Tensor | None = None
    lookup_first: bool = False
    measured: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_chat(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def dtype(self) -> str:
        """Data type of the target, by name."""
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """Device of the target."""
        return str(self.target.device)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, of chat messages (``[{"role", "content"}, ...]``), or of ids as they are.

        A text is encoded as the tokenizer does it, but never with two beginning-of-sequence tokens.

        Raises:
            OptionError: If the prompt is empty, has half characters or ids outside the vocabulary, or is a chat and
                there is no template.
            ContextLengthError: If it leaves no room for a single token.
        """
        ids = self._encode(prompt)
        if not ids:
            raise OptionError("the prompt is empty; give at least one token of text")
        bad = next((i for i in ids if not 0 <= i < self.target.vocabulary), None)
        if bad is not None:
            raise OptionError(f"prompt ids must be in 0..{self.target.vocabulary - 1}, but one is {bad}")
        if len(ids) >= self.target.context_length:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens, but {self.target_id} takes {self.target.context_length} in all, "
                "answer included; shorten it"
            )
        return ids

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            _check_text(prompt)
            ids = [int(i) for i in self.tokenizer(prompt)["input_ids"]]
            bos = self.tokenizer.bos_token_id
            return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
            prompt = prompt[0] if prompt and isinstance(prompt[0], list) and len(prompt) == 1 else prompt
        items = list(prompt)
        if items and isinstance(items[0], dict):
            if not self.is_chat:
                raise OptionError(f"{self.target_id} has no chat template; give the prompt as text (--no-chat)")
            try:
                text = self.tokenizer.apply_chat_template(items, tokenize=False, add_generation_prompt=True)
            except TemplateError as error:  # a template may refuse a role (Gemma 2 knows no system message)
                raise OptionError(f"the chat template of {self.target_id} refuses these messages: {error}") from error
            _check_text(text)
            # The template writes its own special tokens.
            return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]
        if not all(isinstance(i, int) for i in items):
            raise OptionError("a prompt must be text, chat messages, or one sequence of token ids")
        return items


def _check_text(text: str) -> None:
    # JSON can spell half of a surrogate pair, which tokenizers refuse by a TypeError that names nothing.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(
            f"the prompt must be Unicode text, but it has {text[error.start]!r}, half of a pair of surrogates; "
            "take it out or write the whole character"
        ) from error


def make_pair(
    target: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    drafter: nn.Module | FeatureDrafterFile | str = "lookup",
    drafter_tokenizer: PreTrainedTokenizerBase | None = None,
    name: str | None = None,
    target_id: str | None = None,
    kernel: str = "auto",
    source: str = "given",
    layers: str = "auto",
    quantization: str | None = None,
    codes: Mapping[str, GroupCodes] | None = None,
    compile: bool = False,
    lookup_first: bool = False,
    shortlist: Tensor | None = None,
) -> Pair:
    """A pair from models that are already loaded. Nothing of them is changed unless `layers` or `quantization` asks for it.

    Args:
        target: Hugging Face causal LM in eval mode.
        tokenizer: Its tokenizer.
        drafter: A smaller causal LM, a feature drafter that was fitted to this target, ``"lookup"`` or ``"self"``.
        drafter_tokenizer: The drafter's tokenizer; None where it is the target's own object.
        name: Name for people.
        target_id: Name of the target for messages and mask identity.
        kernel: Attention kernel, see `LayeredModel`.
        source: Where the weights came from.
        layers: See `LayeredModel`. ``fused`` lays weights together in memory; values and `state_dict` stay as they are.
        quantization: ``int8`` or ``int4`` for the target, whose own weights are then taken away; see `viasd.quantized`.
        codes: 4-bit codes that the target's weights are known by, see `viasd.quantized.quantize`.
        compile: Run passes of few tokens as compiled graphs; see `LayeredModel.compile`.
        lookup_first: Ask lookup before the drafter.
        shortlist: Token ids ``[m]`` that a drafter model may propose, ascending; None for all.

    Raises:
        DrafterError: If a feature drafter was fitted to another target.
        TokenizerMismatchError: If the tokenizers disagree.
        UnsupportedModelError: If a model can't be driven layer by layer.
        OptionError: If `drafter` is a word that is not known, or options contradict each other.
    """
    from viasd.vocab import common_vocabulary, vocabulary_size

    if lookup_first and drafter == "lookup":
        raise OptionError(
            "lookup first and then lookup is lookup alone; name another drafter, or leave lookup_first out"
        )
    identity = target_id or getattr(getattr(target, "config", None), "name_or_path", "") or type(target).__name__
    target_rows = _logit_rows(target)
    small, usable = None, vocabulary_size(tokenizer, target_rows)
    if isinstance(drafter, FeatureDrafterFile):
        kind = "feature"
    elif isinstance(drafter, str):
        if drafter not in ("lookup", "self"):
            raise OptionError(f"drafter must be a model, 'lookup' or 'self', but got '{drafter}'")
        kind = drafter
    else:
        usable = common_vocabulary(drafter_tokenizer or tokenizer, tokenizer, _logit_rows(drafter), target_rows)
        small = load_layered(drafter, kernel=kernel, vocabulary=usable, layers=layers, compile=compile)
        kind = "model"
    layered = load_layered(
        target,
        kernel=kernel,
        vocabulary=usable,
        layers=layers,
        quantization=quantization,
        codes=codes,
        compile=compile,
    )
    feature = None
    if isinstance(drafter, FeatureDrafterFile):
        drafter.check(layered, identity)
        feature = FeatureModel(drafter, layered)
    first = "lookup+" if lookup_first else ""
    return Pair(
        name=name or f"{first}{kind if small is None else type(drafter).__name__} -> {identity}",
        target=layered,
        tokenizer=tokenizer,
        drafter=small,
        drafter_kind=kind,
        target_id=identity,
        eos_ids=_eos_ids(target, tokenizer),
        source=source,
        feature=feature,
        shortlist=_known_words(shortlist, small),
        lookup_first=lookup_first,
    )


def _known_words(shortlist: Tensor | None, small: LayeredModel | None) -> Tensor | None:
    if shortlist is None:
        return None
    if small is None:
        raise OptionError("a shortlist is of a drafter model, and this drafter is none; leave it out")
    if shortlist.dim() != 1 or not len(shortlist) or int(shortlist[0]) < 0 or not bool((shortlist.diff() > 0).all()):
        # Of a word that is listed twice the law that is tested would not be the one it was drawn from.
        raise OptionError("a shortlist must be ascending token ids, each once, one or more; sort it (`ids.unique()`)")
    if int(shortlist[-1]) >= small.vocabulary:
        raise DrafterError(
            f"the drafter's shortlist has token id {int(shortlist[-1])}, but drafter and target share ids below "
            f"{small.vocabulary}; fit the drafter anew"
        )
    return shortlist


def _logit_rows(model: Any) -> int:
    head = model.get_output_embeddings()
    return int(head.weight.shape[0] if hasattr(head, "weight") else model.config.get_text_config().vocab_size)


def _eos_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, list | tuple) else [configured]
    return frozenset(int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None)
