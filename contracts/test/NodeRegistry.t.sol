// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {IERC20Errors} from "@openzeppelin/contracts/interfaces/draft-IERC6093.sol";
import {Base} from "./Base.sol";
import {NodeRegistry} from "../src/NodeRegistry.sol";
import {INodeRegistry, NodeView} from "../src/interfaces/INodeRegistry.sol";
import {amountOf, pack} from "../src/libraries/AccountAmount.sol";

contract NodeRegistryTest is Base {
    function test_register_takes_exactly_the_stake() public view {
        assertEq(usdc.balanceOf(address(nodes)), 3 * NODE_STAKE);
        assertEq(usdc.balanceOf(node[0]), 0);
        NodeView memory seen = nodes.nodeOf(node[0]);
        require(seen.account == node[0] && seen.vramGb == 12 && seen.stake == NODE_STAKE && seen.active);
        assertEq(nodes.minStake(12), 1000e6 + 12 * 100e6);
    }

    function test_register_with_permit_even_when_it_was_front_run() public {
        for (uint256 key = 0xC1; key < 0xC3; ++key) {
            address account = vm.addr(key);
            usdc.mint(account, NODE_STAKE);
            bytes32 structHash = keccak256(
                abi.encode(
                    keccak256("Permit(address owner,address spender,uint256 value,uint256 nonce,uint256 deadline)"),
                    account,
                    address(nodes),
                    NODE_STAKE,
                    0,
                    block.timestamp
                )
            );
            (uint8 v, bytes32 r, bytes32 s) =
                vm.sign(key, keccak256(abi.encodePacked("\x19\x01", usdc.DOMAIN_SEPARATOR(), structHash)));
            if (key == 0xC2) usdc.permit(account, address(nodes), NODE_STAKE, block.timestamp, v, r, s);
            vm.prank(account);
            nodes.registerWithPermit(bytes32(key), 12, "", block.timestamp, v, r, s);
            require(nodes.isActive(account));
        }
    }

    function test_register_without_money_changes_nothing() public {
        vm.expectRevert(
            abi.encodeWithSelector(
                IERC20Errors.ERC20InsufficientAllowance.selector, address(nodes), 0, NODE_STAKE
            )
        );
        vm.prank(client);
        nodes.register(bytes32(uint256(7)), 12, "");
        assertEq(nodes.nodeCount(), 3);
    }

    function test_register_checks_its_arguments() public {
        bytes32 taken = nodes.nodeOf(node[0]).signingKey;
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.NodeExists.selector, node[0]));
        vm.prank(node[0]);
        nodes.register(bytes32(uint256(7)), 12, "");
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.SigningKeyInvalid.selector, taken, node[0]));
        vm.prank(client);
        nodes.register(taken, 12, "");
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.SigningKeyInvalid.selector, bytes32(0), address(0)));
        vm.prank(client);
        nodes.register(0, 12, "");
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.VramMissing.selector));
        vm.prank(client);
        nodes.register(bytes32(uint256(7)), 0, "");
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.EndpointTooLong.selector, client, 257));
        vm.prank(client);
        nodes.register(bytes32(uint256(7)), 12, string(new bytes(257)));
    }

    function test_a_stake_is_withdrawn_after_the_unbonding_period() public {
        vm.prank(node[0]);
        nodes.requestUnstake();
        require(!nodes.isActive(node[0]));
        uint64 free = uint64(block.timestamp) + UNBONDING;
        assertEq(nodes.nodeOf(node[0]).unbondingAt, free);
        nodes.setUnbondingPeriod(2 days); // for later requests only
        vm.warp(free - 1);
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.StillUnbonding.selector, node[0], free));
        vm.prank(node[0]);
        nodes.withdrawStake();
        vm.warp(free);
        vm.prank(node[0]);
        nodes.withdrawStake();
        assertEq(usdc.balanceOf(node[0]), NODE_STAKE);
        assertEq(nodes.nodeCount(), 2);
        require(nodes.nodesPage(0, 10)[0].account == node[2]); // the last node takes its position
        vm.prank(node[0]);
        nodes.register(bytes32(uint256(uint160(node[0]))), 12, ""); // it can register again with the same key
        assertEq(nodes.nodeCount(), 3);
    }

    function test_all_nodes_can_leave_from_the_last_to_the_first() public {
        for (uint256 i; i < 3; ++i) {
            vm.prank(node[i]);
            nodes.requestUnstake();
        }
        vm.warp(block.timestamp + UNBONDING);
        for (uint256 left = 3; left > 0; --left) {
            vm.prank(node[left - 1]);
            nodes.withdrawStake();
            assertEq(nodes.nodeCount(), left - 1);
            require(nodes.nodeOf(node[left - 1]).account == address(0));
        }
        assertEq(usdc.balanceOf(address(nodes)), 0);
    }

    function test_a_node_that_was_moved_in_the_list_can_leave() public {
        for (uint256 i; i < 3; i += 2) {
            vm.prank(node[i]);
            nodes.requestUnstake();
        }
        vm.warp(block.timestamp + UNBONDING);
        vm.prank(node[0]);
        nodes.withdrawStake(); // node 2 takes position 0
        vm.prank(node[2]);
        nodes.withdrawStake();
        NodeView[] memory page = nodes.nodesPage(0, 10);
        require(page.length == 1 && page[0].account == node[1]);
    }

    function test_a_node_that_cancels_its_unbonding_stays_active() public {
        vm.prank(node[0]);
        nodes.requestUnstake();
        vm.prank(node[0]);
        nodes.cancelUnstake();
        require(nodes.isActive(node[0]));
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.NodeStaying.selector, node[0]));
        vm.prank(node[0]);
        nodes.withdrawStake();
    }

    function oneExposure(address account, uint96 amount) internal pure returns (bytes32[] memory list) {
        list = new bytes32[](1);
        list[0] = pack(account, amount);
    }

    /// @dev Takes up to `amount` from a node that is exposed with `exposure`.
    function slash(address account, uint96 amount, uint96 exposure) internal returns (uint256) {
        vm.prank(address(market));
        (bytes32[] memory taken, uint256 total) =
            nodes.slash(oneExposure(account, amount), oneExposure(account, exposure));
        assertEq(amountOf(taken[0]), total);
        return total;
    }

    function lock(address account, uint96 amount) internal returns (uint256) {
        uint256 before = nodes.nodeOf(account).locked;
        vm.prank(address(market));
        bytes32[] memory raised = nodes.lock(oneExposure(account, amount), false);
        uint256 locked = nodes.nodeOf(account).locked - before;
        assertEq(raised.length == 0 ? amount : amountOf(raised[0]), locked);
        return locked;
    }

    function topUp(address account, uint96 amount) internal {
        usdc.mint(account, amount);
        vm.prank(account);
        usdc.approve(address(nodes), amount);
        vm.prank(account);
        nodes.topUp(amount);
    }

    function test_a_node_slashed_below_its_least_stake_is_inactive_until_it_tops_up() public {
        assertEq(slash(node[0], 5e6, 5e6), 5e6);
        assertEq(usdc.balanceOf(address(market)), 1000e6 + 5e6);
        require(!nodes.isActive(node[0]));
        topUp(node[0], 5e6);
        require(nodes.isActive(node[0]));
    }

    function test_slash_takes_at_most_the_stake() public {
        assertEq(slash(node[0], type(uint96).max, type(uint96).max - FLOOR), NODE_STAKE);
        assertEq(slash(node[0], 1, 1), 0);
        assertEq(slash(client, 1, 1), 0);
        assertEq(usdc.balanceOf(address(nodes)), 2 * NODE_STAKE);
    }

    function test_s08_slash_takes_at_most_the_exposure() public {
        assertEq(slash(node[0], NODE_STAKE, 7e6), 7e6 + FLOOR); // as an executor, and as a validator of another task
        bytes32[] memory none = new bytes32[](0);
        vm.prank(address(market));
        (bytes32[] memory taken,) = nodes.slash(oneExposure(node[0], NODE_STAKE), none);
        assertEq(amountOf(taken[0]), 0); // before commitments nobody is drawn
        vm.prank(address(market));
        (taken,) = nodes.slash(oneExposure(node[1], NODE_STAKE), oneExposure(node[0], 7e6));
        assertEq(amountOf(taken[0]), FLOOR); // it can only have been a validator
    }

    function test_s08_nobody_is_listed_twice_in_one_settlement() public {
        bytes32[] memory twice = new bytes32[](2);
        (twice[0], twice[1]) = (pack(node[0], 1), pack(node[0], 1));
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.SlashesNotAscending.selector, node[0], node[0]));
        vm.prank(address(market));
        nodes.slash(twice, oneExposure(node[0], 7e6));
    }

    function test_s14_exposure_grows_with_every_offence() public {
        uint256 expected = FLOOR;
        for (uint256 k; k < 4; ++k) {
            assertEq(nodes.nodeOf(node[0]).offences, k);
            assertEq(lock(node[0], FLOOR), expected);
            assertEq(slash(node[0], type(uint96).max - FLOOR, uint96(expected)), expected + FLOOR);
            assertEq(slash(node[0], FLOOR, FLOOR), FLOOR); // of the same hour, so of the same incident
            vm.prank(address(market));
            nodes.release(oneExposure(node[0], uint96(expected)));
            topUp(node[0], uint96(expected) + 2 * FLOOR);
            vm.warp(block.timestamp + 1 hours);
            expected *= 4;
        }
        assertEq(nodes.nodeOf(node[0]).offences, 4); // 1280 USDC, but half of the free stake is less
        assertEq(lock(node[0], FLOOR), (NODE_STAKE - RESERVE) / 2);
        assertEq(lock(node[0], FLOOR), (NODE_STAKE - RESERVE) / 4); // others' executions are not blocked
        assertEq(lock(node[1], FLOOR), FLOOR);
        vm.warp(block.timestamp + 7 days);
        assertEq(nodes.nodeOf(node[0]).offences, 0);
        assertEq(lock(node[0], FLOOR), FLOOR);
    }

    function test_s14_the_silence_of_a_validator_is_no_offence() public {
        slash(node[0], FLOOR / 10 - 1, FLOOR);
        assertEq(nodes.nodeOf(node[0]).offences, 0);
        slash(node[0], FLOOR / 10, FLOOR);
        assertEq(nodes.nodeOf(node[0]).offences, 1);
    }

    function test_s14_hundreds_of_executions_fit_into_the_smallest_stake() public {
        uint96 stake = nodes.minStake(1);
        topUp(node[0], 100e6); // 2300 USDC
        for (uint256 i; i < (stake - RESERVE) / FLOOR; ++i) {
            lock(node[0], FLOOR);
        }
        assertEq(nodes.nodeOf(node[0]).locked, 1000e6); // 200 executions
    }

    function test_an_unbonding_node_can_be_slashed() public {
        vm.prank(node[0]);
        nodes.requestUnstake();
        assertEq(slash(node[0], 100, 100), 100);
    }

    function test_only_the_market_slashes_and_it_is_set_once() public {
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.NotMarket.selector, address(this)));
        nodes.slash(new bytes32[](0), new bytes32[](0));
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.MarketExists.selector, address(market)));
        nodes.setMarket(client);
    }

    function test_a_locked_stake_cannot_be_withdrawn() public {
        lock(node[0], EXPOSURE);
        assertEq(nodes.nodeOf(node[0]).locked, EXPOSURE);
        vm.prank(node[0]);
        nodes.requestUnstake();
        lock(node[0], FLOOR); // an unbonding node cannot block an execution
        vm.warp(block.timestamp + UNBONDING);
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.StakeExposed.selector, node[0], EXPOSURE + FLOOR));
        vm.prank(node[0]);
        nodes.withdrawStake();
        vm.prank(address(market));
        nodes.release(oneExposure(node[0], EXPOSURE + FLOOR));
        vm.prank(node[0]);
        nodes.withdrawStake();
        assertEq(usdc.balanceOf(node[0]), NODE_STAKE);
    }

    function refuseLock(address account, uint96 amount, uint256 free) internal {
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.ExposureTooHigh.selector, account, free, amount));
        vm.prank(address(market));
        nodes.lock(oneExposure(account, amount), false);
    }

    function test_no_more_is_locked_than_is_staked() public {
        lock(node[0], NODE_STAKE - RESERVE - FLOOR);
        refuseLock(node[0], FLOOR + 1, FLOOR); // the reserve is for what it does as a validator
        slash(node[0], NODE_STAKE / 2, NODE_STAKE); // less is left than is locked
        refuseLock(node[0], FLOOR, 0);
        refuseLock(client, FLOOR, 0); // not a node, so there is no stake
        vm.prank(address(market));
        nodes.release(oneExposure(node[0], NODE_STAKE - RESERVE - FLOOR));
        assertEq(nodes.nodeOf(node[0]).locked, 0);
    }

    function test_no_less_is_locked_than_the_floor() public {
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.ExposureTooLow.selector, node[0], FLOOR, FLOOR - 1));
        vm.prank(address(market));
        nodes.lock(oneExposure(node[0], FLOOR - 1), false);
    }

    function test_only_the_market_locks_and_releases() public {
        bytes32[] memory list = oneExposure(node[0], 1);
        bytes memory reason = abi.encodeWithSelector(INodeRegistry.NotMarket.selector, address(this));
        vm.expectRevert(reason);
        nodes.lock(list, false);
        vm.expectRevert(reason);
        nodes.release(list);
    }

    function test_an_operator_must_allow_the_nodes_that_name_it() public {
        require(nodes.nodeOf(node[0]).operator == node[0]);
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.OperatorUnwilling.selector, client, node[0]));
        vm.prank(node[0]);
        nodes.setOperator(client);
        vm.prank(client);
        nodes.allowNode(node[0], true);
        vm.prank(node[0]);
        nodes.setOperator(client);
        require(nodes.nodeOf(node[0]).operator == client && nodes.isAllowed(client, node[0]));
        vm.prank(client);
        nodes.allowNode(node[0], false);
        vm.prank(node[0]);
        nodes.setOperator(node[0]);
        require(nodes.nodeOf(node[0]).operator == node[0]);
    }

    function test_s86_an_operator_that_withdraws_its_permission_loses_the_node() public {
        vm.prank(client);
        nodes.allowNode(node[0], true);
        vm.prank(node[0]);
        nodes.setOperator(client);
        vm.prank(node[1]);
        nodes.allowNode(node[0], false); // of another one: nothing changes
        require(nodes.nodeOf(node[0]).operator == client);
        vm.prank(client);
        nodes.allowNode(node[0], false);
        require(nodes.nodeOf(node[0]).operator == node[0]);
    }

    function test_a24_registering_anothers_key_first_gains_nothing() public {
        bytes32 key = keccak256("the victim's key");
        usdc.mint(client, NODE_STAKE);
        vm.prank(client);
        usdc.approve(address(nodes), NODE_STAKE);
        vm.prank(client);
        nodes.register(key, 12, ""); // the attacker has staked in full and cannot sign a message
        address victim = address(0x4001);
        usdc.mint(victim, NODE_STAKE);
        vm.prank(victim);
        usdc.approve(address(nodes), NODE_STAKE);
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.SigningKeyInvalid.selector, key, client));
        vm.prank(victim);
        nodes.register(key, 12, "");
        vm.prank(victim);
        nodes.register(keccak256("a fresh key"), 12, "");
        require(nodes.isActive(victim));
    }

    function test_owner_functions_are_restricted_and_bounded() public {
        vm.expectRevert(
            abi.encodeWithSelector(
                INodeRegistry.PeriodInvalid.selector, 91 days, 1 days + 1 hours + SNAPSHOT_AGE + 1, 90 days
            )
        );
        nodes.setUnbondingPeriod(91 days);
        vm.expectRevert();
        vm.prank(client);
        nodes.setUnbondingPeriod(10 days);
        NodeRegistry fresh = deployNodes(address(usdc), 1);
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.AddressMissing.selector));
        fresh.setMarket(address(0));
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.AddressMissing.selector));
        deployNodes(address(0), 1);
    }

    function test_invalid_calls_of_nodes_are_refused() public {
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.AmountMissing.selector));
        vm.prank(node[0]);
        nodes.topUp(0);
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.NodeStaying.selector, node[0]));
        vm.prank(node[0]);
        nodes.cancelUnstake();
        vm.prank(node[0]);
        nodes.requestUnstake();
        uint256 unbondingAt = block.timestamp + UNBONDING;
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.NodeLeaving.selector, node[0], unbondingAt));
        vm.prank(node[0]);
        nodes.requestUnstake();
        vm.prank(node[1]);
        nodes.setEndpoint("http://moved");
        require(keccak256(bytes(nodes.nodeOf(node[1]).endpoint)) == keccak256("http://moved"));
    }

    function test_pages_of_the_node_list() public {
        assertEq(nodes.nodesPage(0, 2).length, 2);
        assertEq(nodes.nodesPage(2, 2).length, 1);
        assertEq(nodes.nodesPage(3, 2).length, 0);
        assertEq(nodes.nodesPage(type(uint256).max, 1).length, 0);
        vm.expectRevert(abi.encodeWithSelector(INodeRegistry.PageTooLong.selector, 257, 256));
        nodes.nodesPage(0, 257);
    }

    function test_calls_of_unregistered_accounts_are_refused() public {
        bytes memory unknown = abi.encodeWithSelector(INodeRegistry.UnknownNode.selector, address(this));
        vm.expectRevert(unknown);
        nodes.setEndpoint("");
        vm.expectRevert(unknown);
        nodes.topUp(1);
        vm.expectRevert(unknown);
        nodes.requestUnstake();
        vm.expectRevert(unknown);
        nodes.withdrawStake();
    }

    function testFuzz_stakes_add_up(uint32 vramGb, uint96 amount) public {
        vramGb = vramGb == 0 ? 1 : vramGb;
        uint96 stake = nodes.minStake(vramGb);
        usdc.mint(client, stake);
        vm.prank(client);
        usdc.approve(address(nodes), stake);
        vm.prank(client);
        nodes.register(bytes32(uint256(7)), vramGb, "");
        uint256 taken = slash(client, amount, amount / 2);
        assertEq(nodes.nodeOf(client).stake + taken, stake);
        assertEq(usdc.balanceOf(address(nodes)), 3 * NODE_STAKE + stake - taken);
    }
}
