"""The manifest: a model as a DAG of tasks, in one canonical document whose hash is the model's id.

Each task reads only from tasks before it in the list, so the DAG has no cycle by its form. The
registered name and the prices on the chain are not part of the manifest.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field

from splitup.core import limits
from splitup.core.codec import MAX_SAFE_INTEGER, compute_digest, encode_canonical
from splitup.core.errors import InvalidInput
from splitup.core.records import Record
from splitup.core.tensors import ITEM_BYTES, TensorSpec
from splitup.graph.dtypes import FLOATS
from splitup.graph.tolerances import Tolerance, find_tolerance

VERSION: Final = 1

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[!-~]+$", max_length=limits.MAX_NAME_CHARS)]
Label = Annotated[str, Field(pattern=r"^[ -~]+$", max_length=limits.MAX_NAME_CHARS)]
Size = Annotated[int, Field(ge=0, le=MAX_SAFE_INTEGER)]
Rows = Annotated[str, Field(pattern=r"^[A-Z]{0,8}$")]
Length = Annotated[int, Field(ge=1, le=limits.MAX_DIMENSION)]
# "text-embedding" and "text-ranking" take steps of whole texts (``splitup.decode.texts``)
ModelKind = Literal["text-generation", "text-embedding", "text-ranking", "function"]
_MODEL_ID = re.compile(r"0x[0-9a-f]{64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Port(Record):
    """A tensor that goes into or comes out of a task or a model; ``shape`` is the largest one."""

    name: Name
    dtype: Literal[tuple(ITEM_BYTES)]  # type: ignore[valid-type]
    shape: Annotated[tuple[Length, ...], Field(max_length=limits.MAX_RANK)]
    rows: Rows = ""  # the symbol that the leading dimension is, or ""

    @property
    def spec(self) -> TensorSpec:
        """Return name, dtype, shape and rows."""
        return TensorSpec(self.name, self.dtype, self.shape, self.rows)

    @property
    def nbytes(self) -> int:
        """Size in bytes, the largest one where rows vary."""
        return self.spec.nbytes


class InputSource(Record):
    """The value is the model's input of this name."""

    input: Name


class TaskSource(Record):
    """The value is an output of an earlier task; ``port`` counts that task's outputs."""

    task: Size
    port: Size


class NetworkSource(Record):
    """The value is what nodes compute: the manifest's output of this name."""

    output: Name


class TaskInput(Port):
    """An input port of a task and where its value comes from."""

    source: InputSource | TaskSource


class ClientInput(Port):
    """An input port of a task of the client; tasks are counted among the client's own."""

    source: InputSource | TaskSource | NetworkSource


class OutputPort(Port):
    """An output of the model: which task's output it is."""

    task: Size
    port: Size


class _Program(Record):
    """What a party has to know of a task to run it."""

    task_id: Digest
    label: Label
    outputs: Annotated[tuple[Port, ...], Field(min_length=1, max_length=limits.MAX_PORTS)]
    graph_bytes: Annotated[int, Field(ge=1, le=limits.MAX_GRAPH_BYTES)]
    weights_digest: Digest | Literal[""]  # of the safetensors file; "" without weights
    weights_bytes: Size
    state_bytes: Size
    vram_bytes: Size
    flops: Size


class ClientTask(_Program):
    """A task that the client runs itself; nobody is paid for it."""

    inputs: Annotated[tuple[ClientInput, ...], Field(max_length=limits.MAX_PORTS)]


Share = Annotated[int, Field(ge=0, le=10_000)]  # in basis points


class PrivacyMeasure(Record):
    """Which share of a text's tokens attacks recovered, as the model's developer measured it.

    ``with_weights_bps``: from what is sent, by a node that knows all weights, of ``tested`` tokens.
    ``pairs``: likewise without the weights, after learning from so many pairs of a token and what
    is sent for it, (pairs, share), ascending. ``returned_bps``: from what nodes send back, without
    the weights. ``next_token_bps``: how often the next token of the text is the likeliest one
    behind what nodes send back, which somebody with the weights of the last tasks computes.
    """

    tested: Length
    with_weights_bps: Share
    pairs: Annotated[tuple[tuple[Length, Share], ...], Field(max_length=limits.MAX_PORTS)]
    returned_bps: Share
    next_token_bps: Share


class ClientPart(Record):
    """The tasks that the client computes itself, so that nodes never see their inputs and weights.

    ``inputs`` and ``outputs`` are the model's; those of the manifest are what crosses the network.
    ``sends`` says for each input of the manifest where its value comes from: one of the client's
    tasks, by its position among them, or an input of the model. ``privacy`` says what that hides.
    """

    inputs: Annotated[tuple[Port, ...], Field(min_length=1, max_length=limits.MAX_PORTS)]
    outputs: Annotated[tuple[OutputPort, ...], Field(min_length=1, max_length=limits.MAX_PORTS)]
    tasks: Annotated[tuple[ClientTask, ...], Field(min_length=1, max_length=limits.MAX_TASKS)]
    sends: Annotated[tuple[InputSource | TaskSource, ...], Field(max_length=limits.MAX_PORTS)]
    privacy: Annotated[PrivacyMeasure | None, Field(exclude_if=operator.not_)] = None

    def find_early(self) -> tuple[int, ...]:
        """Return the tasks that need nothing from nodes, in order; they run before the nodes."""
        early: dict[int, None] = {}
        for index, task in enumerate(self.tasks):
            sources = [port.source for port in task.inputs]
            if all(
                isinstance(source, InputSource)
                or (isinstance(source, TaskSource) and source.task in early)
                for source in sources
            ):
                early[index] = None
        return tuple(early)


class Task(_Program):
    """One task; ``flops`` and ``price_nano_usdc`` are per step, ``vram_bytes`` with one state.

    ``tolerances`` say how far honest outputs of another determinism class may be, at most one per
    dtype, ascending; for a dtype without one, and within a class, bytes have to be equal.
    ``reference_digest`` names the task's reference vectors (``splitup.graph.self_test_vectors``).
    In a step whose input ``gate`` is zero the task is not run (``splitup.graph.gates``).
    """

    inputs: Annotated[tuple[TaskInput, ...], Field(max_length=limits.MAX_PORTS)]
    price_nano_usdc: Annotated[int, Field(ge=1, le=MAX_SAFE_INTEGER)]
    tolerances: Annotated[tuple[Tolerance, ...], Field(max_length=len(FLOATS))] = ()
    reference_digest: Digest | Literal[""] = ""  # "" without reference vectors
    reference_bytes: Annotated[int, Field(ge=0, le=limits.MAX_VECTORS_BYTES)] = 0
    gate: Size | None = None

    @property
    def crosses_classes(self) -> bool:
        """Return whether every output has a tolerance, so that another class can verify it."""
        found = [find_tolerance(self.tolerances, port.dtype) for port in self.outputs]
        return bool(found) and None not in found

    def pay_micro_usdc(self, steps: int) -> int:
        """Return what this many steps of one execution earn, rounded down."""
        return self.price_nano_usdc * steps // limits.NANO_PER_MICRO


class ChatInfo(Record):
    """How a conversation becomes a text: a Jinja template, and the two tokens that it may name.

    The form is that of Hugging Face's ``chat_template``.
    """

    template: Annotated[str, Field(min_length=1, max_length=limits.MAX_CHAT_TEMPLATE_CHARS)]
    bos_token: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)]
    eos_token: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)]


class DiffusionInfo(Record):
    """How a model that writes blocks of tokens was trained (``splitup.decode.block_diffusion``).

    A row attends to its whole block and to the blocks before it; a text's first block begins at
    position 0. ``mask_id`` stands for a token that is not written yet. The logits of a row are of
    its own token; where they ``are_shifted``, of the next one.
    """

    block_size: Length
    mask_id: Size
    are_shifted: Annotated[bool, Field(exclude_if=operator.not_)] = False


class ImageInfo(Record):
    """How a text model's prompt holds images: as ``rows`` times the token ``token`` for each.

    Before and after them stand the tokens ``begin`` and ``end``. ``tower`` is the id of the model
    that makes an image's rows from its pixels. Steps take rows in the input "images", float32
    [T, width]; a row whose token is another one is not read.
    """

    tower: Annotated[str, Field(pattern=r"^0x[0-9a-f]{64}$")]
    token: Size
    begin: Size
    end: Size
    rows: Length
    width: Length


class TextInfo(Record):
    """What text generation needs: the tokenizer.json and the tokens that end a text.

    ``is_recurrent``: its steps must follow paths (``splitup.decode.step.check_path``).
    ``steps_back``: a step may start at 0, or at most this many positions before the furthest start
    of the steps since one that started at 0. Earlier rows of layers that see a window are gone.
    ``diffusion``: it writes blocks of tokens instead of one token after the other.
    ``images``: its prompts may hold images.
    """

    tokenizer_digest: Digest
    tokenizer_bytes: Annotated[int, Field(ge=1, le=limits.MAX_TOKENIZER_BYTES)]
    eos_ids: Annotated[tuple[Size, ...], Field(max_length=limits.MAX_PORTS)]
    vocab: Length
    context: Annotated[int, Field(ge=1, le=limits.MAX_CONTEXT)]
    is_recurrent: Annotated[bool, Field(exclude_if=operator.not_)] = False
    steps_back: Annotated[Length | None, Field(exclude_if=operator.not_)] = None
    chat: Annotated[ChatInfo | None, Field(exclude_if=operator.not_)] = None
    diffusion: Annotated[DiffusionInfo | None, Field(exclude_if=operator.not_)] = None
    images: Annotated[ImageInfo | None, Field(exclude_if=operator.not_)] = None

    @property
    def takes_turns(self) -> bool:
        """Whether it converses: a template that never says who speaks only joins messages."""
        return self.chat is not None and "role" in self.chat.template


class Manifest(Record):
    """A registered model. ``tinygrad`` is the version that the task graphs are made for.

    With a ``client`` part, ``inputs``, ``outputs`` and ``tasks`` are those of the nodes alone.
    """

    version: Annotated[int, Field(ge=VERSION, le=VERSION)]  # not Literal, which takes true for 1
    kind: ModelKind
    tinygrad: Name
    inputs: Annotated[tuple[Port, ...], Field(min_length=1, max_length=limits.MAX_PORTS)]
    outputs: Annotated[tuple[OutputPort, ...], Field(min_length=1, max_length=limits.MAX_PORTS)]
    tasks: Annotated[tuple[Task, ...], Field(min_length=1, max_length=limits.MAX_TASKS)]
    text: TextInfo | None
    client: ClientPart | None = None

    @property
    def is_encoder(self) -> bool:
        """Return whether a step takes whole texts, and gives a vector or a score of each."""
        return self.kind in ("text-embedding", "text-ranking")

    @property
    def user_inputs(self) -> tuple[Port, ...]:
        """Return the inputs that a user gives in every step."""
        return self.inputs if self.client is None else self.client.inputs

    @property
    def user_outputs(self) -> tuple[OutputPort, ...]:
        """Return the outputs that a user gets in every step."""
        return self.outputs if self.client is None else self.client.outputs

    @cached_property
    def model_id(self) -> str:
        """Return "0x" and the SHA-256 of the canonical bytes."""
        return "0x" + compute_digest(self.to_bytes())

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy, which has an id and edges of its own."""
        copied = super().model_copy(update=update, deep=deep)
        for name in ("model_id", "readers", "neighbours"):
            copied.__dict__.pop(name, None)
        return copied

    def to_bytes(self) -> bytes:
        """Return the canonical bytes."""
        return encode_canonical(self.model_dump(mode="json"))

    def edges(self) -> list[tuple[int, int]]:
        """Return the distinct (from, to) pairs of tasks, sorted."""
        return sorted({(source.task, index) for source, index, _ in self._reads()})

    @cached_property
    def neighbours(self) -> dict[int, set[int]]:
        """The tasks that each task reads from, or that read from it."""
        found: dict[int, set[int]] = {}
        for source, target in self.edges():
            found.setdefault(source, set()).add(target)
            found.setdefault(target, set()).add(source)
        return found

    def consumers(self, task: int, port: int) -> list[tuple[int, int]]:
        """Return (task, position among its inputs) of everything that reads this output."""
        return self.readers.get((task, port), [])

    @cached_property
    def readers(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """What ``consumers`` returns for each output that is read."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for source, index, position in self._reads():
            found.setdefault((source.task, source.port), []).append((index, position))
        return found

    @property
    def price_nano_usdc(self) -> int:
        """Return the price of one step."""
        return sum(task.price_nano_usdc for task in self.tasks)

    def cost_micro_usdc(self, steps: int) -> int:
        """Return what an execution of this many steps costs at most: all tasks' pay, rounded up.

        ``Market.quoteParts`` rounds likewise, so that what is locked covers every task's pay.
        """
        return -(-self.price_nano_usdc * steps // limits.NANO_PER_MICRO)

    def _reads(self) -> Iterator[tuple[TaskSource, int, int]]:
        for index, task in enumerate(self.tasks):
            for position, port in enumerate(task.inputs):
                if isinstance(port.source, TaskSource):
                    yield port.source, index, position


def get_manifest_key(model_id: str) -> str:
    """Return where a model's manifest is stored."""
    return f"models/{_expect(_MODEL_ID, model_id)}/manifest.json"


def get_task_key(task_id: str) -> str:
    """Return where a task's graph is stored."""
    return f"tasks/{_expect(_DIGEST, task_id)}.json"


def get_weights_key(digest: str) -> str:
    """Return where a task's weights are stored."""
    return f"weights/{_expect(_DIGEST, digest)}.safetensors"


def get_blob_key(digest: str) -> str:
    """Return where another object, such as a tokenizer, is stored."""
    return f"blobs/{_expect(_DIGEST, digest)}"


def _expect(pattern: re.Pattern[str], text: str) -> str:
    if not pattern.fullmatch(text):
        raise InvalidInput(f"{text!r:.80} is no digest")
    return text
