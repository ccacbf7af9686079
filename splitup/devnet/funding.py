"""Sets up a devnet's chain: keys with ether, contracts, members, bonds, stakes, test USDC.

Each step sends only what is missing, so that an interrupted start can be repeated. Accounts come
from the devnet's own random mnemonic: 0 deploys, 1 is the user, then the committee's members, then
the nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from splitup.chain.bonds import post_bond
from splitup.chain.client import Chain
from splitup.chain.deployment import MarketParameters, Terms, deploy
from splitup.chain.rpc import Rpc
from splitup.core import limits
from splitup.core.errors import ChainUnavailable, ConfigurationError
from splitup.crypto.keys import Identity
from splitup.crypto.keystore import (
    DEVNET_WORK_FACTOR,
    create_identity,
    create_passphrase,
    load_identity,
    read_secret_file,
    write_secret_file,
)
from splitup.devnet.anvil import create_mnemonic, derive_key
from splitup.devnet.state import MAX_NODES, DevnetState, get_key_files, make_endpoint
from splitup.messages.network import Deployment
from splitup.protocol.planning.exposure import compute_spare

USER_USDC: Final = 10_000_000_000  # 10,000 test USDC, in micro-USDC
BOND_USDC: Final = 1_000_000_000  # 1,000 test USDC for every member, in micro-USDC
DEPLOYER: Final = "deployer"
GIFT_WEI: Final = 10**18  # one ether is enough for any number of a devnet's transactions
# Short, to be watched on one machine; a real network gives a settlement an hour.
DEVNET_PARAMETERS: Final = MarketParameters(max_deadline_s=1_800, settlement_grace_s=60)
DEVNET_UNBONDING_S: Final = 6 * 3600 + 1_900  # longer than snapshots and executions last


@dataclass(frozen=True, slots=True)
class Party:
    """One key holder of the devnet, with a directory of its own."""

    name: str
    directory: Path
    identity: Identity

    @property
    def keystore(self) -> Path:
        return self.directory / "keystore.json"

    @property
    def passphrase_file(self) -> Path:
        return self.directory / "passphrase"


@dataclass(frozen=True, slots=True)
class Parties:
    deployer: Party
    user: Party
    members: tuple[Party, ...]
    nodes: tuple[Party, ...]


def load_mnemonic(directory: Path) -> str:
    """Return the devnet's mnemonic, made at the first start."""
    path = directory / "mnemonic"
    if not path.exists():
        write_secret_file(path, create_mnemonic().encode() + b"\n", what="mnemonic")
    return read_secret_file(path, what="mnemonic", max_bytes=limits.KIB).decode().strip()


def count_accounts(state: DevnetState) -> int:
    """Return how many accounts need ether in the first block, nodes added later included."""
    return 2 + state.members + MAX_NODES


def load_parties(directory: Path, mnemonic: str, state: DevnetState) -> Parties:
    """Open every party's key file; make those that do not exist yet."""
    first_node = 2 + state.members
    members = [_load_party(directory, f"member-{i}", mnemonic, 2 + i) for i in range(state.members)]
    return Parties(
        deployer=_load_party(directory, DEPLOYER, mnemonic, 0),
        user=_load_party(directory, "user", mnemonic, 1),
        members=tuple(sorted(members, key=lambda party: party.identity.address)),
        nodes=tuple(
            _load_party(directory, f"node-{i}", mnemonic, first_node + i)
            for i in range(state.nodes)
        ),
    )


async def load_deployment(
    directory: Path, rpc_url: str, deployer: Party, parameters: MarketParameters
) -> Deployment:
    """Return the contracts; at the first start deploy them with these parameters.

    Raises ConfigurationError when the chain is not the one they were deployed on.
    """
    path = directory / "deployment.json"
    if not path.exists():
        deployment = await deploy(
            rpc_url,
            deployer.identity.private_key,
            Terms(unbonding_period_s=DEVNET_UNBONDING_S, parameters=parameters),
        )
        deployment.save(path)
        return deployment
    deployment = Deployment.load(path)
    try:
        chain = await Chain.connect(rpc_url, deployment)
    except ChainUnavailable as error:
        raise ConfigurationError(
            f"the chain in {directory} is not that of its deployed contracts ({error}); "
            "start a new network with another --dir"
        ) from None
    await chain.close()
    return deployment


async def set_up_chain(
    rpc_url: str, deployment: Deployment, parties: Parties, state: DevnetState
) -> list[str]:
    """Appoint the committee, mint test USDC, and bond and stake what is not bonded and staked.

    Returns the names of nodes that were told to leave (``splitup-node unstake``), which do not run.
    """
    key = parties.deployer.identity.private_key
    async with await Chain.connect(rpc_url, deployment, private_key=key) as chain:
        await asyncio.gather(
            _appoint(chain, parties.members, state), _mint(chain, parties.user, USER_USDC)
        )
        least = await chain.call("nodes", "minStake", get_vram_gb(state))
        needed = least + compute_spare(least)
        entries = [
            await chain.call("nodes", "nodeOf", party.identity.address) for party in parties.nodes
        ]
        # a slashed node may not serve before its stake is complete again
        missing = [0 if e["unbondingAt"] else max(0, needed - e["stake"]) for e in entries]
        poor = [i for i, amount in enumerate(missing) if amount]
        bonds = [await chain.call("bonds", "bondOf", m.identity.address) for m in parties.members]
        free = [m for m, bond in zip(parties.members, bonds, strict=True) if not bond]
        await asyncio.gather(
            *(chain.send("usdc", "mint", m.identity.address, BOND_USDC) for m in free),
            *(
                chain.send("usdc", "mint", parties.nodes[i].identity.address, missing[i])
                for i in poor
            ),
        )
    await asyncio.gather(
        *(_bond(rpc_url, deployment, member) for member in free),
        *(
            _stake(
                *(rpc_url, deployment, parties.nodes[i], state, missing[i]),
                registering=0 if entries[i]["stake"] else least,
            )
            for i in poor
        ),
    )
    return [p.name for p, e in zip(parties.nodes, entries, strict=True) if e["unbondingAt"]]


async def give_money(
    rpc_url: str, deployment: Deployment, deployer: Identity, account: str, micro_usdc: int
) -> None:
    """Give an account test USDC, and ether for gas if it has none.

    Only Anvil makes ether: any other chain refuses, and ChainUnavailable says so.
    """
    async with (
        await Chain.connect(rpc_url, deployment, private_key=deployer.private_key) as chain,
        Rpc(rpc_url) as rpc,
    ):
        if not await chain.fetch_ether_wei(account):
            await rpc.request("anvil_setBalance", account, hex(GIFT_WEI))
        await chain.send("usdc", "mint", account, micro_usdc)


def get_vram_gb(state: DevnetState) -> int:
    """Return the gigabytes that a node's stake has to cover."""
    return max(1, -(-state.vram_bytes // 10**9))


def _load_party(directory: Path, name: str, mnemonic: str, index: int) -> Party:
    folder = directory / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    keystore, passphrase = get_key_files(directory, name)
    if keystore.exists():
        return Party(name, folder, load_identity(keystore, passphrase))
    if not passphrase.exists():
        create_passphrase(passphrase)
    identity = create_identity(
        keystore,
        passphrase,
        work_factor=DEVNET_WORK_FACTOR,
        private_key=derive_key(mnemonic, index),
    )
    return Party(name, folder, identity)


async def _appoint(chain: Chain, members: Sequence[Party], state: DevnetState) -> None:
    if await chain.call("committee", "members"):
        return
    await chain.send(
        "committee",
        "setMembers",
        [
            (
                party.identity.address,
                party.identity.signing_key_hex,
                make_endpoint(get_member_port(party, state)),
            )
            for party in members
        ],
    )


def get_member_port(party: Party, state: DevnetState) -> int:
    return state.member_ports[int(party.name.removeprefix("member-"))]


async def _mint(chain: Chain, party: Party, amount: int) -> None:
    address = party.identity.address
    wallet = await chain.call("usdc", "balanceOf", address)
    deposited = await chain.call("market", "balanceOf", address)
    if not wallet + deposited:
        await chain.send("usdc", "mint", address, amount)


async def _bond(rpc_url: str, deployment: Deployment, party: Party) -> None:
    key = party.identity.private_key
    async with await Chain.connect(rpc_url, deployment, private_key=key) as chain:
        await post_bond(chain, BOND_USDC)


async def _stake(
    rpc_url: str,
    deployment: Deployment,
    party: Party,
    state: DevnetState,
    amount: int,
    *,
    registering: int,
) -> None:
    """Put down an amount, of which registering takes its part if the node is new."""
    key = party.identity.private_key
    port = state.node_ports[int(party.name.removeprefix("node-"))]
    async with await Chain.connect(rpc_url, deployment, private_key=key) as chain:
        # they fit one block: the later ones are simulated on the pending state
        await chain.send("usdc", "approve", deployment.nodes, amount, wait=False)
        if registering:
            await chain.send(
                "nodes",
                "register",
                party.identity.signing_key_hex,
                get_vram_gb(state),
                make_endpoint(port),
                wait=False,
            )
        await chain.send("nodes", "topUp", amount - registering)
