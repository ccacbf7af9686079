"""``splitup-node service``: let systemd start the node at boot, and again when it fails."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from splitup_node.cli.command import DEFAULT_CONFIG, ConfigOption, JsonOption, run_and_print

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_SYSTEM_FOLDER: Final = Path("/etc/systemd/system")
_UNIT: Final = """\
# Written by: splitup-node service install
[Unit]
Description=SplitUp node ({config})
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
{user}ExecStart={command}
Restart=on-failure
RestartSec=15
# 2: a setting is wrong, and starting again does not mend it
RestartPreventExitStatus=2
# on SIGTERM the node finishes what runs, and hands the rest to other nodes
KillMode=mixed
TimeoutStopSec=180
LimitNOFILE=65536

[Install]
WantedBy={target}
"""

app = typer.Typer(no_args_is_help=True, help="Let systemd start the node, and start it again.")


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Which node, the unit's name, and whether it is the system's or the user's."""

    config: Path
    name: str
    is_system: bool


_NameOption = Annotated[
    str,
    typer.Option(metavar="NAME", help="Of the unit; a second node needs another one."),
]
_SystemOption = Annotated[
    bool,
    typer.Option("--system", help="For the whole system (as root), not only for your user."),
]


@app.command("install")
def install_command(
    config: ConfigOption = DEFAULT_CONFIG,
    name: _NameOption = "splitup-node",
    is_system: _SystemOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a unit for systemd, and say how to start it."""
    options = ServiceOptions(config, name, is_system)
    run_and_print(lambda: install(options), _show_installed, as_json)


@app.command("uninstall")
def uninstall_command(
    name: _NameOption = "splitup-node",
    is_system: _SystemOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete the unit; the node's files and stake stay."""
    options = ServiceOptions(DEFAULT_CONFIG, name, is_system)
    run_and_print(lambda: uninstall(options), _show_uninstalled, as_json)


def install(options: ServiceOptions) -> dict[str, Any]:
    """Write the unit, whole or not at all; return its path and the commands that start it."""
    from splitup.core.errors import ConfigurationError
    from splitup.devnet.processes import find_program
    from splitup_node.config import NodeConfig

    if sys.platform != "linux":
        raise ConfigurationError(
            "systemd is Linux's; let launchd or a terminal run: splitup-node run"
        )
    config = NodeConfig.load(options.config)
    config.load_identity()  # a node that cannot open its key would fail at every boot
    if not str(config.path.absolute()).isprintable():
        raise ConfigurationError(f"{str(config.path)!r} has characters that no unit can hold")
    path = _get_path(options)
    text = format_unit(
        [str(find_program("splitup-node")), "run", "--config", str(config.path.absolute())],
        config.path.absolute(),
        is_system=options.is_system,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.new")
        draft.write_text(text, "utf-8")
        draft.replace(path)
    except OSError as error:
        advice = "; use sudo" if options.is_system else ""
        raise ConfigurationError(f"cannot write {path} ({error.strerror}){advice}") from None
    return {"unit": str(path), "commands": _list_commands(options)}


def uninstall(options: ServiceOptions) -> dict[str, Any]:
    """Delete the unit's file; return its path and the commands that end what it started."""
    from splitup.core.errors import ConfigurationError

    path = _get_path(options)
    try:
        path.unlink()
        # what 'systemctl enable' made, and 'disable' finds no more
        (path.parent / f"{_get_target(options.is_system)}.wants" / path.name).unlink(
            missing_ok=True
        )
    except FileNotFoundError:
        raise ConfigurationError(f"there is no unit {path}; name another one with --name") from None
    except OSError as error:
        raise ConfigurationError(f"cannot delete {path} ({error.strerror})") from None
    control = _get_control(options)
    return {
        "unit": str(path),
        "commands": [f"{control} stop {options.name}", f"{control} daemon-reload"],
    }


def format_unit(command: list[str], config: Path, *, is_system: bool) -> str:
    """Return the text of a unit that runs a command, as the owner of ``config``."""
    return _UNIT.format(
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


def _get_path(options: ServiceOptions) -> Path:
    from splitup.core.errors import ConfigurationError

    if not _NAME.fullmatch(options.name):
        raise ConfigurationError(
            f"{options.name!r} is no name of a unit; use letters, digits, - and _"
        )
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    folder = _SYSTEM_FOLDER if options.is_system else home / "systemd" / "user"
    return folder / f"{options.name}.service"


def _get_control(options: ServiceOptions) -> str:
    return "sudo systemctl" if options.is_system else "systemctl --user"


def _list_commands(options: ServiceOptions) -> list[str]:
    control = _get_control(options)
    commands = [f"{control} daemon-reload", f"{control} enable --now {options.name}"]
    if not options.is_system:  # without it, a user's services end when the user logs out
        commands.append("sudo loginctl enable-linger $USER")
    return commands


def _show_installed(result: dict[str, Any], console: Console) -> None:
    console.print(f"Wrote {result['unit']}. Start it, now and at every boot, with:", soft_wrap=True)
    _print_commands(result, console)


def _show_uninstalled(result: dict[str, Any], console: Console) -> None:
    console.print(f"Deleted {result['unit']}. End what it started with:", soft_wrap=True)
    _print_commands(result, console)


def _print_commands(result: dict[str, Any], console: Console) -> None:
    for command in result["commands"]:
        console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)
