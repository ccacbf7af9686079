from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from splitup.chain.client import Chain
from splitup.chain.rpc import Rpc, RpcError
from splitup.core.errors import ChainRejected, ChainUnavailable, ConfigurationError, InvalidInput
from splitup.devnet.anvil import derive_key
from tests.builders import HANG_S, find_free_port
from tests.chain.conftest import MNEMONIC, MODEL, Network
from tests.chain.proxy import Proxy

# ---- connecting --------------------------------------------------------------------------------


async def test_connect_refuses_another_deployment(network: Network) -> None:
    deployment = network.deployment
    stale = {
        "it is chain 31337, not 5": deployment.model_copy(update={"chain_id": 5}),
        "first block is another one": deployment.model_copy(
            update={"genesis_hash": "0x" + "00" * 32}
        ),
        "no market contract at 0x00": deployment.model_copy(update={"market": "0x" + "00" * 20}),
    }
    for words, wrong in stale.items():
        with pytest.raises(ChainUnavailable, match=words) as caught:
            await Chain.connect(network.url, wrong)
        assert "outdated" in str(caught.value)
        assert "splitup up" in str(caught.value)


async def test_connect_without_a_chain_says_how_to_start_one(network: Network) -> None:
    url = f"http://127.0.0.1:{find_free_port()}"
    with pytest.raises(ChainUnavailable, match=r"answer \(Connection refused\); start your"):
        await Chain.connect(url, network.deployment)
    with pytest.raises(ConfigurationError, match="does not begin with http"):
        await Chain.connect("ftp://nowhere", network.deployment)


async def test_reader_cannot_sign(network: Network) -> None:
    async with await Chain.connect(network.url, network.deployment) as reader:
        assert await reader.call("models", "modelByName", "tiny") == MODEL
        with pytest.raises(ConfigurationError, match="has no key"):
            await reader.send("market", "refund", MODEL)


# ---- values ------------------------------------------------------------------------------------


async def test_results_are_plain_values(network: Network) -> None:
    owner = network.owner
    members = await owner.call("committee", "members")
    assert [m["account"] for m in members] == [m.address for m in network.members]
    assert members[0]["signingKey"] == network.members[0].signing_key_hex
    assert await owner.call("committee", "latestSnapshot") == {
        "sequence": 0,
        "root": "0x" + "00" * 32,
    }
    assert await owner.call("committee", "groupKey") == b""
    model = await owner.call("models", "modelOf", MODEL)
    assert (model["name"], model["pricePerStep"]) == ("tiny", 1_000_000_000)
    assert await owner.call("market", "quoteParts", MODEL, 3, 60) == {
        "executors": 3_000_000,
        "verification": 3_000_000,
        "fee": 60_000,  # 1 %
        "reservation": 115,  # 20 % a year of 300 USDC, for a minute
    }


async def test_arguments_are_checked_before_anything_is_sent(network: Network) -> None:
    for args, words in (
        ((), "takes 1 arguments, not 0"),
        (("0x1234zz",), "does not fit"),
        ((-1,), "does not fit"),
    ):
        with pytest.raises(InvalidInput, match=words):
            await network.owner.send("market", "refund", *args)
    with pytest.raises(InvalidInput, match="no function refundAll"):
        await network.owner.call("market", "refundAll")


async def test_f19_errors_of_every_contract_in_the_call_are_decoded(network: Network) -> None:
    with pytest.raises(ChainRejected, match="there is no model named 'none'; list") as caught:
        await network.client.call("models", "modelByName", "none")
    assert caught.value.error_name == "UnknownName"
    with pytest.raises(ChainRejected, match="does not own the contract") as caught:
        await network.client.send("nodes", "setUnbondingPeriod", 1)
    assert caught.value.error_name == "OwnableUnauthorizedAccount"
    with pytest.raises(ChainRejected, match=r"0x4d4d.* is unknown") as caught:
        await network.client.send("market", "refund", MODEL)
    assert caught.value.error_name == "StatusInvalid"


async def test_string_that_is_no_utf8_does_not_stop_readers(network: Network) -> None:
    node = network.nodes[0]
    await node.send("nodes", "setEndpoint", "12345")
    call = await network.rpc.request("eth_getTransactionByHash", await _last_hash(network))
    broken = call["input"].replace(b"12345".hex(), "ff" * 5)
    await network.rpc.request(
        "eth_sendTransaction",
        {"from": node.address, "to": network.deployment.nodes, "data": broken},
    )
    await network.rpc.request("evm_mine")  # automining answers before it has mined
    seen = await node.call("nodes", "nodeOf", node.address)
    assert seen["endpoint"] == "\ufffd" * 5
    events = await node.fetch_events("nodes")
    assert events[-1].args["endpoint"] == "\ufffd" * 5


async def _last_hash(network: Network) -> str:
    block = await network.rpc.request("eth_getBlockByNumber", "latest", False)
    return str(block["transactions"][-1])


# ---- transactions ------------------------------------------------------------------------------


async def test_concurrent_sends_each_get_their_nonce(network: Network) -> None:
    owner = network.owner
    receipts = await asyncio.gather(
        *(owner.send("usdc", "mint", owner.address, 10**index) for index in range(12))
    )
    assert len({receipt.transaction for receipt in receipts}) == 12
    assert await owner.call("usdc", "balanceOf", owner.address) == int("1" * 12)


async def test_two_programs_with_one_key_do_not_lose_transactions(network: Network) -> None:
    key = derive_key(MNEMONIC, 0)
    async with await Chain.connect(network.url, network.deployment, private_key=key) as other:
        for amount in (1, 10, 100):
            await network.owner.send("usdc", "mint", MODEL[:42], amount)
            await other.send("usdc", "mint", MODEL[:42], 3 * amount)
    assert await network.owner.call("usdc", "balanceOf", MODEL[:42]) == 444


async def test_send_without_waiting_is_mined_all_the_same(network: Network) -> None:
    receipt = await network.owner.send("usdc", "mint", MODEL[:42], 7, wait=False)
    assert receipt.block_number is None
    await network.owner.send("usdc", "mint", MODEL[:42], 1)
    assert await network.owner.call("usdc", "balanceOf", MODEL[:42]) == 8


async def test_f16_dropped_transaction_is_sent_again_with_the_same_nonce(network: Network) -> None:
    rpc, owner = network.rpc, network.owner
    async with _blocks_by_hand(network):
        before = int(await rpc.request("eth_getTransactionCount", owner.address, "latest"), 16)
        sending = asyncio.create_task(owner.send("usdc", "mint", MODEL[:42], 5))
        dropped = await _wait_for_pending(network)
        await rpc.request("anvil_dropTransaction", dropped)
        await _mine_until_sent(network, sending)
    receipt = await sending
    assert receipt.transaction != dropped  # the fee was raised
    mined = await rpc.request("eth_getTransactionByHash", receipt.transaction)
    assert int(mined["nonce"], 16) == before
    assert await owner.call("usdc", "balanceOf", MODEL[:42]) == 5


async def test_f18_intent_whose_nonce_was_used_elsewhere_gets_a_new_one(network: Network) -> None:
    rpc, owner = network.rpc, network.owner
    async with _blocks_by_hand(network):
        sending = asyncio.create_task(owner.send("usdc", "mint", MODEL[:42], 5))
        await rpc.request("anvil_dropTransaction", await _wait_for_pending(network))
        await rpc.request("eth_sendTransaction", {"from": owner.address, "to": MODEL[:42]})
        await _mine_until_sent(network, sending)
    await sending
    assert await owner.call("usdc", "balanceOf", MODEL[:42]) == 5


async def test_f12_send_outlives_an_endpoint_that_is_down_while_it_waits(network: Network) -> None:
    target, port = int(network.url.rpartition(":")[2]), find_free_port()
    proxy = await Proxy.open(port, target)
    key = derive_key(MNEMONIC, 0)
    async with await Chain.connect(
        f"http://127.0.0.1:{port}", network.deployment, private_key=key
    ) as chain:
        async with _blocks_by_hand(network):
            sending = asyncio.create_task(chain.send("usdc", "mint", MODEL[:42], 5))
            await _wait_for_pending(network)
            await proxy.close()
            await network.rpc.request("anvil_mine", "0x1")
            done, _ = await asyncio.wait([sending], timeout=0.2)
            assert not done
            proxy = await Proxy.open(port, target)
            receipt = await asyncio.wait_for(sending, HANG_S)
    await proxy.close()
    assert receipt.events[0].args["value"] == 5
    assert await network.owner.call("usdc", "balanceOf", MODEL[:42]) == 5


@contextlib.asynccontextmanager
async def _blocks_by_hand(network: Network) -> AsyncIterator[None]:
    await network.rpc.request("evm_setAutomine", False)
    try:
        yield
    finally:
        await network.rpc.request("evm_setAutomine", True)


async def _mine_until_sent(network: Network, *sending: asyncio.Task[Any]) -> None:
    while not all(task.done() for task in sending):
        await network.rpc.request("anvil_mine", "0x1")
        await asyncio.sleep(0.05)


async def _wait_for_pending(network: Network) -> str:
    async with asyncio.timeout(HANG_S):
        while True:
            pool = (await network.rpc.request("txpool_content"))["pending"]
            for account, by_nonce in pool.items():
                if account.lower() == network.owner.address:
                    return str(next(iter(by_nonce.values()))["hash"])
            await asyncio.sleep(0.01)


async def test_f17_fees_above_the_ceiling_are_not_paid(network: Network) -> None:
    key = derive_key(MNEMONIC, 8)
    async with await Chain.connect(
        network.url, network.deployment, private_key=key, fee_ceiling_wei=1
    ) as chain:
        with pytest.raises(ChainUnavailable, match=r"above the ceiling of 0\.0; wait"):
            await chain.send("market", "withdraw", 1)


async def test_f17_fee_spike_raises_both_caps_by_a_tenth_at_least(network: Network) -> None:
    rpc, owner = network.rpc, network.owner
    async with _blocks_by_hand(network):
        sending = asyncio.create_task(owner.send("usdc", "mint", MODEL[:42], 5))
        first = await rpc.request("eth_getTransactionByHash", await _wait_for_pending(network))
        spike = hex(2 * int(first["maxFeePerGas"], 16))
        await rpc.request("anvil_setNextBlockBaseFeePerGas", spike)
        await _mine_until_sent(network, sending)
    mined = await rpc.request("eth_getTransactionByHash", (await sending).transaction)
    assert mined["nonce"] == first["nonce"] and mined["hash"] != first["hash"]
    for cap in ("maxFeePerGas", "maxPriorityFeePerGas"):
        assert int(mined[cap], 16) * 10 >= int(first[cap], 16) * 11


async def test_f17_bumps_end_at_the_ceiling_with_an_alert(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    rpc, key = network.rpc, derive_key(MNEMONIC, 0)
    first = await network.owner.send("usdc", "mint", MODEL[:42], 1)
    paid = await rpc.request("eth_getTransactionByHash", first.transaction)
    async with await Chain.connect(
        network.url,
        network.deployment,
        private_key=key,
        fee_ceiling_wei=int(paid["maxFeePerGas"], 16),
    ) as chain:
        async with _blocks_by_hand(network):
            sending = asyncio.create_task(chain.send("usdc", "mint", MODEL[:42], 5))
            sent = await _wait_for_pending(network)
            await rpc.request("anvil_dropTransaction", sent)
            await _mine_until_sent(network, sending)
        assert (await sending).transaction == sent  # as it was
    assert "the fee ceiling is reached" in caplog.text


@pytest.mark.parametrize("has_base_fees", [False, True])
async def test_chains_without_base_fees_or_priority_fees_are_paid_too(
    network: Network, monkeypatch: pytest.MonkeyPatch, has_base_fees: bool
) -> None:
    request = Rpc.request

    async def answer(self: Rpc, method: str, *params: Any, **more: Any) -> Any:
        if method == "eth_maxPriorityFeePerGas":
            raise RpcError(self.place, method, "the method does not exist", None)
        result = await request(self, method, *params, **more)
        if method == "eth_getBlockByNumber" and not has_base_fees:
            del result["baseFeePerGas"]
        return result

    monkeypatch.setattr(Rpc, "request", answer)
    receipt = await network.owner.send("usdc", "mint", MODEL[:42], 1)
    mined = await network.rpc.request("eth_getTransactionByHash", receipt.transaction)
    assert int(mined["type"], 16) == (2 if has_base_fees else 0)


async def test_account_without_ether_is_told_so(network: Network) -> None:
    async with await Chain.connect(
        network.url, network.deployment, private_key=b"\x07" * 32
    ) as poor:
        assert await poor.fetch_ether_wei(poor.address) == 0
        with pytest.raises(ChainRejected, match="has too little ether for the gas") as caught:
            await poor.send("usdc", "mint", poor.address, 1)
    assert caught.value.error_name == "InsufficientFunds"


async def test_f19_transaction_that_reverts_when_mined_is_explained_and_not_repeated(
    network: Network,
) -> None:
    rpc, client = network.rpc, network.client
    before = int(await rpc.request("eth_getTransactionCount", client.address, "latest"), 16)
    async with _blocks_by_hand(network):
        # Each passes alone; both together take more than the 10 USDC deposited.
        sends = [
            asyncio.create_task(client.send("market", "withdraw", 6_000_000 + i)) for i in (0, 1)
        ]
        await _mine_until_sent(network, *sends)
    results = await asyncio.gather(*sends, return_exceptions=True)
    errors = [result for result in results if isinstance(result, ChainRejected)]
    assert [error.error_name for error in errors] == ["BalanceTooSmall"]
    after = int(await rpc.request("eth_getTransactionCount", client.address, "pending"), 16)
    assert after == before + 2
    assert await client.call("usdc", "balanceOf", client.address) in (46_000_000, 46_000_001)


async def test_a_block_is_found_by_its_time(network: Network) -> None:
    chain = network.owner
    before = await chain.fetch_head()
    await network.pass_time(3_600)
    after = await chain.fetch_head()
    assert await chain.find_block(0) == 0
    assert await chain.find_block(before.timestamp + 1) == before.number + 1 == after.number
    assert await chain.find_block(after.timestamp) == after.number
    assert await chain.find_block(after.timestamp + 1) == after.number + 1
