"""From a request to the texts that it asks for: prompts in tokens, their length, their form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from splitup.client.images.image_prompts import expand_prompt, find_images, mark_images
from splitup.client.text.generation import TextModel, encode_prompt
from splitup.client.text.grammar import Grammar
from splitup.core import tuning
from splitup.decode.adjusted_sampler import Adjustments
from splitup.graph.manifest import ChatInfo
from splitup_gateway.apis.requests import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
)
from splitup_gateway.apis.thoughts import ThoughtMarks, find_marks
from splitup_gateway.apis.tools import Toolbox
from splitup_gateway.errors import ApiError, name_field
from splitup_gateway.generation import (
    DEFAULT_CHAT_TOKENS,
    GenerationOptions,
    check_options,
    count_steps,
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The texts that a request asks for, one for each choice."""

    texts: tuple[GenerationOptions, ...]
    toolbox: Toolbox | None = None
    marks: ThoughtMarks | None = None  # around what the model thinks

    @property
    def images(self) -> int:
        """How many images the texts have; they have the same ones."""
        return len(self.texts[0].images)

    def count_steps(self, model: TextModel) -> int:
        """Return the most steps that all of it may take."""
        return sum(count_steps(model, text) for text in self.texts)


async def prepare(
    model: TextModel, asked: ChatRequest | CompletionRequest, principal: str = ""
) -> Prepared:
    """Return what a request of ``principal`` asks for; raise ApiError that names a bad field.

    Raises InvalidInput, too.
    """
    if isinstance(asked, CompletionRequest):
        prepared = await _prepare_completion(model, asked, principal)
    else:
        prepared = await _prepare_chat(model, asked, principal)
    check_options(model, prepared.texts[0])  # which all have
    return prepared


async def _prepare_chat(model: TextModel, asked: ChatRequest, principal: str) -> Prepared:
    tokens, toolbox, marks = await _read_conversation(model, asked, principal)
    images, field, grammar = asked.list_images(), asked.format_field, asked.grammar
    if toolbox is not None and (constrained := toolbox.make_grammar(grammar)) is not None:
        field, grammar = "tools", constrained
    if grammar is not None and marks is not None:
        grammar = marks.allow(grammar)
    await _check_grammar(model, grammar, field, principal)
    with name_field("messages"):
        places = find_images(tokens, model.info.images, len(images))
    marked = mark_images(tokens, places, images) if images else ()
    limit, default = asked.limit, DEFAULT_CHAT_TOKENS
    if asked.caps_limit:
        limit, default = None, limit or default
    count = _check_room(model, tokens, limit, default)
    adjustments = asked.make_adjustments(asked.recorded_logprobs)
    _check_order(model, adjustments)
    stop = asked.stop_strings
    texts = tuple(
        GenerationOptions(tokens, count, stop, sampler, adjustments, grammar, images, marked)
        for sampler in asked.make_samplers()
    )
    return Prepared(texts, toolbox, marks)


async def count_prompt(model: TextModel, asked: ChatRequest, principal: str = "") -> int:
    """Return how many tokens a conversation has, also when they are too many."""
    return len((await _read_conversation(model, asked, principal))[0])


async def _read_conversation(
    model: TextModel, asked: ChatRequest, principal: str
) -> tuple[tuple[int, ...], Toolbox | None, ThoughtMarks | None]:
    """Return a conversation in tokens, its tools, and the marks around thoughts."""
    images = len(asked.list_images())
    chat = model.info.chat
    if chat is None:
        raise ApiError(
            f"the model '{model.name}' has no chat template; use /v1/completions", param="model"
        )
    if images and model.info.images is None:
        raise ApiError(f"the model '{model.name}' takes no images", param="image_url")
    toolbox = asked.make_toolbox(chat.template)
    text = await _render_chat(model, chat, asked, toolbox, principal)
    marks = await find_marks(chat.template, text, model.tokenizer)
    return await _encode_chat(model, text, images, principal), toolbox, marks


async def _prepare_completion(
    model: TextModel, asked: CompletionRequest, principal: str
) -> Prepared:
    if len(asked.prompts) * asked.choices > MAX_CHOICES:
        raise ApiError(f"a request has at most {MAX_CHOICES} choices", param="n")
    grammar = asked.grammar
    await _check_grammar(model, grammar, "response_format", principal)
    adjustments = asked.make_adjustments(asked.logprobs)
    _check_order(model, adjustments)
    texts = []
    for prompt in asked.prompts:
        tokens = await _encode(model, prompt, principal)
        count = _check_room(model, tokens, asked.max_tokens, DEFAULT_COMPLETION_TOKENS)
        for sampler in asked.make_samplers():
            texts.append(
                GenerationOptions(tokens, count, asked.stop_strings, sampler, adjustments, grammar)
            )
    return Prepared(tuple(texts))


async def _check_grammar(
    model: TextModel, grammar: Grammar | None, field: str, principal: str
) -> None:
    if grammar is None:
        return
    if model.info.diffusion is not None:
        raise ApiError(
            f"the model '{model.name}' writes blocks of tokens in any order, so that no grammar "
            f"can be followed; leave out '{field}'",
            param=field,
        )
    with name_field(field, lead=f"'{field}' cannot be followed: "):
        await model.grammars.open(grammar, principal)


def _check_order(model: TextModel, adjustments: Adjustments) -> None:
    if model.info.diffusion is not None and not adjustments.is_empty:
        raise ApiError(
            f"the model '{model.name}' writes blocks of tokens in any order; penalties, "
            "'logit_bias' and 'logprobs' are for models that write one after the other"
        )


async def _encode(model: TextModel, prompt: str | list[int], principal: str) -> tuple[int, ...]:
    if isinstance(prompt, str):
        _check_chars(model, prompt)
    length = len(prompt) if isinstance(prompt, str) else 0
    encode = partial(encode_prompt, prompt=prompt)
    tokens = tuple(await model.tokenizer.read(length, encode, principal))
    if not tokens:
        raise ApiError("the prompt has no token; give at least one", param="prompt")
    if not all(0 <= token < model.info.vocab for token in tokens):
        raise ApiError(
            f"a token of the prompt is outside the vocabulary of {model.info.vocab}", param="prompt"
        )
    return tokens


async def _render_chat(
    model: TextModel,
    chat: ChatInfo,
    asked: ChatRequest,
    toolbox: Toolbox | None,
    principal: str,
) -> str:
    messages, variables = asked.template_messages, asked.make_variables()
    tools = None if toolbox is None else toolbox.list_for_template()
    tokenizer = model.tokenizer
    length = len(str(messages)) + len(str(tools)) + len(str(variables))
    context = model.info.context
    with name_field("messages", "context_length_exceeded"):
        return await tokenizer.read(
            length,
            lambda reader: reader.render_chat(chat, messages, tools, variables, context=context),
            principal,
        )


async def _encode_chat(model: TextModel, text: str, images: int, principal: str) -> tuple[int, ...]:
    tokenizer = model.tokenizer
    if images and (info := model.info.images) is not None:
        with name_field("messages"):
            text = await tokenizer.run(partial(expand_prompt, text, tokenizer, info, images))
    found = await tokenizer.read(
        len(text), lambda reader: reader.encode(text, add_special_tokens=False), principal
    )
    if not found:
        raise ApiError("the messages have no token; say something", param="messages")
    return tuple(found)


def _check_chars(model: TextModel, text: str) -> None:
    """Refuse a prompt that cannot fit, before others wait until it is encoded."""
    if len(text) > tuning.PROMPT_CHARS * model.info.context:
        raise ApiError(
            f"the context of model {model.name} is {model.info.context} tokens, and the prompt has "
            f"{len(text)} characters; shorten it",
            code="context_length_exceeded",
        )


def _check_room(model: TextModel, prompt: Sequence[int], asked: int | None, default: int) -> int:
    """Return the number of tokens to generate: without a wish ``default``, or what fits."""
    room = model.info.context - len(prompt)
    if model.info.diffusion is None:
        room += 1  # the last token takes no position
    if room < 1 or (asked or 1) > room:
        wish = f" and {asked} in the answer" if asked else ""
        raise ApiError(
            f"the context of model {model.name} is {model.info.context} tokens, and the request "
            f"has {len(prompt)} in the prompt{wish}; shorten the prompt or the answer",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return asked if asked is not None else min(default, room)
