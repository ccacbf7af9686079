"""Print the progress and the results of splitup-deploy: progress on stderr, results on stdout."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from splitup.cli.console import Output
from splitup.client.inputs import format_price
from splitup.core.errors import InvalidInput
from splitup_deploy.showing.profile import Profile
from splitup_deploy.showing.report import describe_model, render_model

if TYPE_CHECKING:  # a dry run needs no chain
    from splitup_deploy.publishing.registration import Registration


def show_model(output: Output, profile: Profile, name: str | None, is_complete: bool) -> None:
    """Print a cut model, as text or as JSON."""
    if output.as_json:
        output.print_json(describe_model(profile, name, is_complete=is_complete))
    else:
        output.out.print(render_model(profile, name, is_complete=is_complete))


def show_registration(output: Output, profile: Profile, done: Registration) -> None:
    """Print a registered model and how its registration ended, as text or as JSON."""
    if output.as_json:
        output.print_json({**describe_model(profile, done.name), **asdict(done)})
        return
    output.out.print(render_model(profile, done.name))
    if done.already_registered:
        output.out.print(f"already registered as {done.name!r}; nothing was uploaded")
        return
    output.out.print(
        f"registered as {done.name!r} in block {done.block_number} for "
        f"{format_price(profile.manifest.price_nano_usdc)}; "
        f"{done.uploaded_objects} objects were stored",
    )
    count = len({task.task_id for task in profile.manifest.tasks})
    tasks = f"{count} tasks" if count > 1 else "task"
    output.say(f"nodes load its {tasks} now; whoever runs it waits for them and is told how far")


def write_file(file: Path, text: str) -> None:
    """Write a file the user has named, whole or not at all; raises InvalidInput."""
    with write_whole(file) as stream:
        stream.write(text.encode())


@contextmanager
def write_whole(file: Path) -> Iterator[BinaryIO]:
    """Open a file the user has named, which appears when all is written; raises InvalidInput."""
    is_device = file.exists() and not file.is_file()  # /dev/stdout, which nothing can replace
    part = file if is_device else file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with part.open("wb" if is_device else "xb") as stream:  # "x" follows no link
            yield stream
        if not is_device:
            part.replace(file)
    except OSError as error:
        raise InvalidInput(f"cannot write '{file}': {error.strerror}") from None
    finally:
        if not is_device:
            part.unlink(missing_ok=True)


@contextmanager
def show_status(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner with a text; give the function that changes it. One line off a terminal."""
    if not console.is_terminal:
        _print_phase(console, text)
        yield lambda _: None
        return
    with console.status(text) as status:
        yield status.update


def _print_phase(console: Console, text: str) -> None:
    """Say what begins, where no bar can show it."""
    if not console.is_terminal:
        console.print(text)


class _Bar:
    """Bytes, rate and time left on stderr; a transient bar vanishes."""

    def __init__(self, console: Console, *, transient: bool) -> None:
        self._console = console
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=transient,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _begin(self, text: str, total_bytes: int) -> None:
        self._progress.start()
        if self._task is not None:  # the next round takes the place of the one before
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(text, total=total_bytes)

    def advance(self, count: int) -> None:
        if self._task is not None:
            self._progress.advance(self._task, count)


class HashBar(_Bar):
    """The compiler's progress: a spinner, and a bar while it hashes, which then vanishes.

    Without a terminal each phase is a line.
    """

    def __init__(self, console: Console, model: str) -> None:
        super().__init__(console, transient=True)
        self._text, self._status = f"compiling {model}", ExitStack()

    def __enter__(self) -> Self:
        self._status.enter_context(show_status(self._console, self._text))
        return self

    def __exit__(self, *_: object) -> None:
        self._status.close()
        super().__exit__()

    def start(self, what: str, total_bytes: int) -> None:
        _print_phase(self._console, f"hashing {what}")
        self._status.close()
        self._begin(f"hashing {what}", total_bytes)


class UploadBar(_Bar):
    """The upload's progress bar on stderr: bytes, rate, time left. A line off a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, transient=False)
        self._total_bytes = 0

    def start(self, total_bytes: int) -> None:
        _print_phase(self._console, f"storing {decimal(total_bytes)}")
        self._total_bytes = total_bytes
        self._begin("storing", total_bytes)

    def skip(self, present_bytes: int) -> None:
        self._total_bytes -= present_bytes
        if self._task is not None:
            self._progress.update(self._task, total=self._total_bytes)
