"""No program loads at its start what it does not need; modules are counted, time is not."""

from __future__ import annotations

import subprocess
import sys

from bench.measure.starts import PROGRAMS

# Each costs a tenth of a second of CPU time or more, or brings something that does.
NEVER = {
    *("web3", "ens", "eth_account", "eth_keyfile", "py_ecc", "boto3", "sqlalchemy", "tinygrad"),
    *("tokenizers", "llguidance", "langchain_core", "openai", "grpc", "tenseal", "websockets"),
    "eth_keys",
}
# A command that asks opens no key while it is imported, and computes and serves nothing.
_ASKS = {"Crypto.Cipher", "numpy", "aiohttp.web", "prometheus_client", "splitup.client.network"}
MORE = {
    "splitup --help": {"aiohttp", "numpy", "pydantic", "eth_abi", "cryptography"},
    "splitup status": _ASKS,
    "splitup-node status": _ASKS,
    "splitup receipt": _ASKS,
    "a node's daemon": {"numpy"},
}


def test_a_program_loads_what_it_needs() -> None:
    """One process imports one program after the other, those that may load the least first."""
    alone = "a node's daemon"  # it opens a key and serves
    programs = [*MORE, *PROGRAMS.keys() - MORE.keys()]
    programs.remove(alone)
    for chain in (programs, [alone]):
        for program, loaded in zip(chain, list_loaded(*map(PROGRAMS.get, chain)), strict=True):
            loaded |= {name.partition(".")[0] for name in loaded}
            assert not (NEVER | MORE.get(program, set())) & loaded, f"{program}, or one before it"


def test_the_compiler_loads_nothing_of_the_chain() -> None:
    """A target that no cut fits is refused seconds after the start, most of which are imports."""
    [loaded] = list_loaded("splitup_deploy.cutting.build splitup_deploy.showing.progress")
    assert not {"eth_abi", "web3", "aiohttp", "cryptography", "asyncio"} & loaded
    front_ends = "splitup_deploy.frontends"  # each is loaded for its own sources
    others = ("gguf", "onnx", "huggingface", "tinygrad_function")
    assert not {f"{front_ends}.{other}" for other in others} & loaded


def list_loaded(*programs: str) -> list[set[str]]:
    """Return what is loaded when the modules of each program have been imported, in this order."""
    code = "".join(f"import {', '.join(p.split())}, sys; print(*sys.modules)\n" for p in programs)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]
