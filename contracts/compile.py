"""Compile the contracts into the ABI and bytecode that the Python package ships.

    python contracts/compile.py            writes splitup/chain/artifacts/<Name>.json
    python contracts/compile.py --check    fails when a committed artifact is stale

Forge's tests deploy these files: run it before them. Needs ``npm ci --ignore-scripts`` in this
folder; no native compiler. The bytecode carries no metadata hash, so the same sources give the same
bytes on every machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import solcx

ROOT = Path(__file__).resolve().parent
ARTIFACTS = ROOT.parent / "splitup" / "chain" / "artifacts"
CONTRACTS = ("Bonds", "Committee", "Market", "ModelRegistry", "NodeRegistry", "TestUSDC")
SETTINGS: dict[str, Any] = {
    # more runs would put the market above the 24,576 bytes that a contract may have
    "optimizer": {"enabled": True, "runs": 200},
    "evmVersion": "prague",
    "metadata": {"bytecodeHash": "none", "appendCBOR": False},
    "outputSelection": {
        f"src/{name}.sol": {name: ["abi", "evm.bytecode.object"]} for name in CONTRACTS
    },
}


def compile_contracts() -> dict[str, str]:
    """Return the JSON text of every artifact by contract name. Raises SolcError on bad sources."""
    sources = {f"src/{name}.sol": (ROOT / f"src/{name}.sol").read_text() for name in CONTRACTS}
    output = solcx.compile_standard(
        {
            "language": "Solidity",
            "sources": {unit: {"content": text} for unit, text in sources.items()},
            "settings": SETTINGS,
        },
        base_path=str(ROOT),
        solc_binary=str(ROOT / "solc.js"),
    )
    artifacts = {}
    for name in CONTRACTS:
        contract = output["contracts"][f"src/{name}.sol"][name]
        artifact = {
            "abi": contract["abi"],
            "bytecode": "0x" + contract["evm"]["bytecode"]["object"],
        }
        artifacts[name] = json.dumps(artifact, indent=1, sort_keys=True) + "\n"
    return artifacts


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the artifacts; exit code 1 when ``--check`` finds one stale."""
    parser = argparse.ArgumentParser(description="compile the contracts")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if stale")
    check = parser.parse_args(arguments).check
    if not (ROOT / "node_modules" / "solc").is_dir():
        print("the compiler is missing; run: npm ci --ignore-scripts", file=sys.stderr)
        return 2
    stale = []
    for name, text in compile_contracts().items():
        path = ARTIFACTS / f"{name}.json"
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if check and stale:
        print(f"stale artifacts: {', '.join(stale)}; run: python contracts/compile.py")
        return 1
    print(f"{len(CONTRACTS)} contracts, {len(stale)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
