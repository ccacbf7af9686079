"""``splitup generate``: a text whose tokens are printed as they come.

The first Ctrl-C ends the execution: the nodes finish the steps they were sent and are paid for
them, and the rest of the money comes back. The second one leaves without waiting for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitup.cli.command import AdapterFlags, JsonOutput, as_command
from splitup.cli.console import Output
from splitup.cli.cost import PATIENCE_S, Cost, wait_for_cost
from splitup.cli.options import ConfigFlag, PaymentOptions, read_text
from splitup.client import defaults

if TYPE_CHECKING:
    from splitup.client.connection import SplitUp
    from splitup.client.execution.session import Session
    from splitup.client.outcome import Result
    from splitup.client.private.final_states import StateAdapter
    from splitup.client.text.generation import Token
    from splitup.decode.block_diffusion import DiffusionOptions
    from splitup.decode.sampler import Sampler
    from splitup.decode.speculation.lookahead import LookaheadOptions


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What to generate: the prompt, and where the text ends."""

    prompt: Annotated[
        str, typer.Option(metavar="TEXT", help="Text to continue; - reads it from standard input.")
    ]
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most tokens to generate.")
    ] = defaults.MAX_TOKENS
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text. Repeatable.")
    ] = None
    image: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="JPEG, PNG or WebP image for a model that takes images. Repeatable.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How a token is drawn from the model's probabilities."""

    temperature: Annotated[
        float, typer.Option(metavar="T", min=0.0, help="0 takes the likeliest token.")
    ] = 0.0
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Equal seeds give equal text.")] = 0
    top_k: Annotated[
        int, typer.Option(metavar="K", min=0, help="Draw from the likeliest K tokens; 0: from all.")
    ] = 0
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="Draw from the fewest tokens of this probability, above 0 and at most 1.",
        ),
    ] = 1.0

    def read(self) -> Sampler:
        """Return the sampler; raise InvalidInput for impossible numbers."""
        from splitup.decode.sampler import Sampler

        return Sampler(self.temperature, self.seed, self.top_k, self.top_p)


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """Which decoder generates the text; the text does not depend on it, the speed does."""

    decoder: Annotated[
        str | None,
        typer.Option(
            metavar="[sequential|lookahead|speculative|diffusion]",
            help="lookahead and speculative take fewer steps for the text of sequential, the "
            "default; diffusion is for models that write blocks of tokens, and their default.",
        ),
    ] = None
    window: Annotated[
        int | None,
        typer.Option(
            "--lookahead-window", metavar="W", min=0, help="Columns guessed at once; by default 7."
        ),
    ] = None
    ngram: Annotated[
        int | None,
        typer.Option(
            "--lookahead-ngram", metavar="N", min=2, help="Tokens of an n-gram; by default 4."
        ),
    ] = None
    guesses: Annotated[
        int | None,
        typer.Option(
            "--lookahead-guesses", metavar="G", min=1, help="Guesses behind a token; by default 7."
        ),
    ] = None

    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Small registered model that this machine runs to draft for speculative.",
        ),
    ] = None

    def read_lookahead(self) -> LookaheadOptions | None:
        """Return the lookahead options that were typed, the others as by default; None without any.

        Raises InvalidInput for impossible ones, and for an unknown or another decoder.
        """
        from splitup.client.text.generation import check_decoder
        from splitup.decode.speculation.lookahead import LookaheadOptions

        typed = {"columns": self.window, "length": self.ngram, "guesses": self.guesses}
        given = {name: value for name, value in typed.items() if value is not None}
        options = LookaheadOptions(**given) if given else None
        check_decoder(self.decoder, options, self.draft)
        return options


@dataclass(frozen=True, slots=True)
class DiffusionFlags:
    """How a model that writes blocks of tokens chooses them; the text depends on it."""

    block_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens of a block; by default as it was trained."),
    ] = None
    threshold: Annotated[
        float | None,
        typer.Option(
            metavar="P", help="Choose the tokens above this confidence, 0 to 1; by default 0.9."
        ),
    ] = None
    confidence: Annotated[
        str | None,
        typer.Option(
            metavar="[probability|margin|entropy]",
            help="What confidence is; by default the token's probability.",
        ),
    ] = None
    iterations: Annotated[
        int | None,
        typer.Option(metavar="N", help="Write every block in so many steps; no threshold."),
    ] = None
    ahead: Annotated[
        int | None,
        typer.Option(
            "--blocks-ahead", metavar="N", help="Blocks that begin before the last one is done."
        ),
    ] = None

    def read(self) -> DiffusionOptions | None:
        """Return the options that were typed, None without any; raise InvalidInput."""
        from splitup.core.errors import InvalidInput
        from splitup.decode.block_diffusion import DiffusionOptions

        typed = {name: value for name, value in asdict(self).items() if value is not None}
        if self.threshold is not None and self.iterations is not None:
            raise InvalidInput("give --threshold or --iterations, not both")
        return DiffusionOptions(**typed) if typed else None


@as_command(hint="loading")
async def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Name or id of a registered text model.")
    ],
    text: TextOptions,
    sampling: SamplingOptions,
    decoder: DecoderOptions,
    diffusion: DiffusionFlags,
    adapter: AdapterFlags,
    payment: PaymentOptions,
    config: ConfigFlag = None,
    *,
    output: JsonOutput,
) -> None:
    """Continue a text and print its tokens as they come."""
    arguments = {
        "max_tokens": text.max_tokens,
        "stop": tuple(text.stop or ()),
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "decoder": decoder.decoder,
        "lookahead": decoder.read_lookahead(),
        "draft": decoder.draft,
        "diffusion": diffusion.read(),
        "adapter": adapter.read(),
        "images": tuple(text.image or ()),
        "max_price_usdc": payment.max_price,
        "deadline_s": payment.deadline,
        "verify": payment.verify,
    }
    done = await generate(output, config, model, read_text(text.prompt), arguments)
    if output.as_json:
        output.print_json(done.to_dict())
    if done.cost is not None:
        output.say(done.cost.text)
    if done.is_interrupted:
        raise typer.Exit(130)


@dataclass(slots=True)
class Generated:
    """The generated text; times are in seconds since the execution was open."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    execution_id: str = ""
    image_execution_id: str = ""  # of the tower for images
    locked_micro_usdc: int = 0  # the most it can cost
    opened_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    is_interrupted: bool = False
    cost: Cost | None = None
    adapter: str = ""  # its digest, and what it took

    @property
    def tokens_per_s(self) -> float:
        """Return the rate after the first token, 0.0 while there is none."""
        span_s = self.last_s - self.first_s
        return (len(self.tokens) - 1) / span_s if span_s > 0 else 0.0

    def note(self, token: Token, now_s: float) -> None:
        """Add a token that came at ``now_s``."""
        self.last_s = now_s - self.opened_s
        if not self.tokens:
            self.first_s = self.last_s
        self.tokens.append(token.id)
        self.text += token.text

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "execution_id": self.execution_id,
            "first_token_s": round(self.first_s, 3),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "interrupted": self.is_interrupted,
            **({} if self.cost is None else self.cost.to_dict()),
            **({"image_execution_id": self.image_execution_id} if self.image_execution_id else {}),
            **({"adapter": self.adapter} if self.adapter else {}),
        }

    def describe(self) -> str:
        """Return how many tokens came, and how fast."""
        if self.is_interrupted and not self.execution_id:
            if images := self.image_execution_id:
                return f"interrupted before the text began; its images were paid: {images}"
            return (
                "interrupted before the execution began; nothing was paid, and what was locked "
                "comes back with: splitup withdraw"
            )
        count = len(self.tokens)
        words = f"{count} token{'s' * (count != 1)}"
        if not self.tokens and not self.is_interrupted:
            words += ": the model ended the text at once; ask a chat model with: splitup chat MODEL"
        if self.tokens:
            words += f", the first after {self.first_s:.2f} s"
        if self.tokens_per_s:
            words += f", then {self.tokens_per_s:.1f} tokens/s"
        return words


async def generate(
    output: Output, config: ConfigFlag, model: str, prompt: str, arguments: dict[str, Any]
) -> Generated:
    """Generate; write the prompt and the tokens to ``output`` unless it wants JSON.

    The prompt is written once the execution is open, so that an earlier failure leaves no text.
    Raises what ``SplitUp.generate`` raises, KeyboardInterrupt for a second Ctrl-C.
    """
    from splitup.client.connection import SplitUp
    from splitup.client.inputs import format_usdc
    from splitup.client.private.privacy import describe_privacy

    done = Generated()
    adapters: list[StateAdapter] = []
    interrupted = asyncio.Event()

    def write(text: str) -> None:
        if not output.as_json:
            output.write_text(text)

    def on_images(result: Result) -> None:
        done.image_execution_id = result.execution_id

    def on_session(session: Session) -> None:
        done.execution_id = session.execution_id
        done.locked_micro_usdc = session.plan.request.max_price_micro_usdc
        done.opened_s = time.monotonic()
        if (adapter := getattr(session, "adapter", None)) is not None:
            adapters.append(adapter)
        write(prompt)

    with _catch_interrupts(interrupted):
        async with SplitUp.connect(config) as net:
            if (part := (await net.fetch_model(model)).manifest.client) is not None:
                for sentence in describe_privacy(part):
                    output.say(sentence)
            count, is_speculative = len(arguments["images"]), arguments["decoder"] == "speculative"
            if count or is_speculative:
                quote = await net.quote_generation(
                    *(model, prompt),
                    max_tokens=arguments["max_tokens"],
                    decoder="speculative" if is_speculative else None,
                    images=count,
                    verify=arguments["verify"],
                )
                why = ", with an execution for the images"
                if is_speculative:
                    why = ": as without drafts; a step costs the same, whatever its rows"
                output.say(f"at most {format_usdc(quote.locked_micro_usdc)}{why}")
            output.hint("requesting a plan")
            tokens = net.generate(
                *(model, prompt), **arguments, on_images=on_images, on_session=on_session
            )
            while (token := await _next(tokens, interrupted)) is not None:
                done.note(token, time.monotonic())
                write(token.text)
            done.is_interrupted = interrupted.is_set()
            interrupted.set()  # only waiting is left: the next Ctrl-C leaves
            await tokens.aclose()
            done.adapter = " ".join(adapter.describe() for adapter in adapters)
            if done.execution_id and arguments["adapter"] is not None and not adapters:
                done.adapter = "no adapter: the host has none for the words of this prompt"
            await _finish(output, net, done)
    return done


async def _finish(output: Output, net: SplitUp, done: Generated) -> None:
    """Say how fast the text came, and find out what it cost."""
    output.end_text()
    output.say(done.describe())
    if done.adapter:
        output.say(done.adapter)
    if not done.execution_id:
        return
    patience_s = PATIENCE_S
    if done.is_interrupted:
        patience_s = defaults.RECEIPT_TIMEOUT_S
        output.say(
            "interrupted; waiting for the settlement of the steps that ran (Ctrl-C: do not wait)"
        )
    done.cost = await wait_for_cost(
        output, net, done.execution_id, done.locked_micro_usdc, patience_s=patience_s
    )
    if images := done.image_execution_id:
        output.say(f"what its images cost: splitup receipt {images}")


async def _next(tokens: AsyncGenerator[Token, None], interrupted: asyncio.Event) -> Token | None:
    """Return the next token, None at the end and after Ctrl-C."""
    coming = asyncio.ensure_future(anext(tokens, None))
    stopping = asyncio.ensure_future(interrupted.wait())
    try:
        await asyncio.wait({coming, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not interrupted.is_set():
            return await coming
        coming.cancel()  # it waits inside the session, which the cancellation ends
        with contextlib.suppress(asyncio.CancelledError):
            await coming
        return None
    finally:
        stopping.cancel()
        if not coming.done():
            coming.cancel()


@contextlib.contextmanager
def _catch_interrupts(interrupted: asyncio.Event) -> Iterator[None]:
    """Set ``interrupted`` at the first Ctrl-C; cancel the task at the second."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    twice = False

    def on_interrupt() -> None:
        nonlocal twice
        if interrupted.is_set() and task is not None:
            twice = True
            task.cancel()
        interrupted.set()

    try:
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
    except NotImplementedError:  # Windows: the first Ctrl-C raises KeyboardInterrupt
        yield
        return
    try:
        yield
    except asyncio.CancelledError:
        if twice:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
