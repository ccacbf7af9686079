"""Commands that let systemd start a program of ours at boot, and again when it fails."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import Console

from splitup.cli.command import JsonOutput, as_command

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_SYSTEM_FOLDER: Final = Path("/etc/systemd/system")
_UNIT: Final = """\
# Written by: {program} {group} install
[Unit]
Description=SplitUp {what} ({config})
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
{user}ExecStart={command}
Restart=on-failure
RestartSec=15
# 2: a setting is wrong, and starting again does not mend it
RestartPreventExitStatus=2
# on SIGTERM it finishes what runs, and hands over what it can
KillMode=mixed
TimeoutStopSec=180
LimitNOFILE=65536

[Install]
WantedBy={target}
"""


@dataclass(frozen=True, slots=True)
class Service:
    """What a unit runs: ``program verb --config FILE``. ``group`` is the name of its commands.

    ``check`` opens configuration and key: what cannot do so would fail at every boot.
    """

    program: str
    verb: str
    what: str
    default_config: Path
    check: Callable[[Path], None]
    group: str = "service"
    config_variable: str | None = None  # of the environment


def make_service_app(service: Service) -> typer.Typer:
    """Return the commands ``install`` and ``uninstall`` of a program."""
    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help=f"Let systemd start the {service.what}, and start it again.",
    )
    # as defaults, not annotations, which Typer evaluates where no local name is known
    config_flag = typer.Option(
        service.default_config,
        *("--config", "-c"),
        metavar="FILE",
        envvar=service.config_variable,
        help=f"Configuration of the {service.what}.",
    )
    name_flag = typer.Option(
        f"splitup-{service.what}",
        "--name",
        metavar="NAME",
        help="Of the unit; a second one needs another name.",
    )
    system_flag = typer.Option(
        False, "--system", help="For the whole system (as root), not only for your user."
    )

    @app.command("install")
    @as_command
    def install_command(
        config: Path = config_flag,
        name: str = name_flag,
        is_system: bool = system_flag,
        *,
        output: JsonOutput,
    ) -> None:
        """Write a unit for systemd, and say how to start it."""
        done = install(service, config, name, is_system)
        said = f"Wrote {done['unit']}. Start it, now and at every boot, with:"
        output.give(done, lambda: _show(said, done, output.out))

    @app.command("uninstall")
    @as_command
    def uninstall_command(
        name: str = name_flag, is_system: bool = system_flag, *, output: JsonOutput
    ) -> None:
        """Delete the unit; all other files stay."""
        done = uninstall(name, is_system)
        said = f"Deleted {done['unit']}. End what it started with:"
        output.give(done, lambda: _show(said, done, output.out))

    return app


def install(service: Service, config: Path, name: str, is_system: bool) -> dict[str, Any]:
    """Write the unit, whole or not at all; return its path and the commands that start it."""
    from splitup.core.errors import ConfigurationError
    from splitup.core.files import write_whole
    from splitup.devnet.processes import find_program

    if sys.platform != "linux":
        raise ConfigurationError(
            f"systemd is Linux's; let launchd or a terminal run: {service.program} {service.verb}"
        )
    service.check(config)
    config = config.absolute()
    if not str(config).isprintable():
        raise ConfigurationError(f"{str(config)!r} has characters that no unit can hold")
    path = _get_path(name, is_system)
    command = [str(find_program(service.program)), service.verb, "--config", str(config)]
    text = format_unit(service, command, config, is_system=is_system)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        advice = "; use sudo" if is_system else ""
        raise ConfigurationError(f"cannot write {path} ({error.strerror}){advice}") from None
    return {"unit": str(path), "commands": _list_commands(name, is_system)}


def uninstall(name: str, is_system: bool) -> dict[str, Any]:
    """Delete the unit's file; return its path and the commands that end what it started."""
    from splitup.core.errors import ConfigurationError

    path = _get_path(name, is_system)
    try:
        path.unlink()
        # what 'systemctl enable' made, and 'disable' finds no more
        (path.parent / f"{_get_target(is_system)}.wants" / path.name).unlink(missing_ok=True)
    except FileNotFoundError:
        raise ConfigurationError(f"there is no unit {path}; name another one with --name") from None
    except OSError as error:
        raise ConfigurationError(f"cannot delete {path} ({error.strerror})") from None
    control = _get_control(is_system)
    return {
        "unit": str(path),
        "commands": [f"{control} stop {name}", f"{control} daemon-reload"],
    }


def format_unit(service: Service, command: list[str], config: Path, *, is_system: bool) -> str:
    """Return the text of a unit that runs a command, as the owner of ``config``."""
    return _UNIT.format(
        program=service.program,
        group=service.group,
        what=service.what,
        config=str(config).replace("%", "%%"),
        user=f"User={config.stat().st_uid}\n" if is_system else "",
        command=" ".join(map(_quote, command)),
        target=_get_target(is_system),
    )


def _get_target(is_system: bool) -> str:
    return "multi-user.target" if is_system else "default.target"


def _quote(word: str) -> str:
    """Return a word of a command line in systemd's syntax (systemd.service, "Command lines")."""
    for character in '\\"':
        word = word.replace(character, "\\" + character)
    return '"' + word.replace("%", "%%").replace("$", "$$") + '"'


def _get_path(name: str, is_system: bool) -> Path:
    from splitup.core.errors import ConfigurationError

    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} is no name of a unit; use letters, digits, - and _")
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    folder = _SYSTEM_FOLDER if is_system else home / "systemd" / "user"
    return folder / f"{name}.service"


def _get_control(is_system: bool) -> str:
    return "sudo systemctl" if is_system else "systemctl --user"


def _list_commands(name: str, is_system: bool) -> list[str]:
    control = _get_control(is_system)
    commands = [f"{control} daemon-reload", f"{control} enable --now {name}"]
    if not is_system:  # without it, a user's services end when the user logs out
        commands.append("sudo loginctl enable-linger $USER")
    return commands


def _show(said: str, result: dict[str, Any], console: Console) -> None:
    for line in (said, *(f"  {command}" for command in result["commands"])):
        console.print(line)
