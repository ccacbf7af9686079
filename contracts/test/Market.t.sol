// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {IERC20Errors} from "@openzeppelin/contracts/interfaces/draft-IERC6093.sol";
import {Base} from "./Base.sol";
import {ICommittee} from "../src/interfaces/ICommittee.sol";
import {
    Completion, Execution, IMarket, Parameters, Payment, Settlement, Slash, Status
} from "../src/interfaces/IMarket.sol";
import {IModelRegistry} from "../src/interfaces/IModelRegistry.sol";

contract MarketTest is Base {
    function refuse(bytes memory reason) internal {
        vm.expectRevert(reason);
    }

    function commit(address account, bytes32 id) internal {
        Completion[] memory list = new Completion[](1);
        list[0] = Completion(id, 1, keccak256("outputs"));
        vm.prank(account);
        market.commitCompletions(list);
    }

    // ------------------------------------------------------------------------------- money

    function test_deposit_and_withdraw() public {
        assertEq(market.balanceOf(client), 1000e6);
        vm.prank(client);
        market.withdraw(400e6);
        assertEq(usdc.balanceOf(client), 400e6);
        refuse(abi.encodeWithSelector(IMarket.BalanceTooSmall.selector, client, 600e6, 600e6 + 1));
        vm.prank(client);
        market.withdraw(600e6 + 1);
        refuse(abi.encodeWithSelector(IMarket.AmountMissing.selector));
        market.deposit(0);
        assertConserved();
    }

    function test_deposit_needs_allowance_and_money() public {
        refuse(abi.encodeWithSelector(IERC20Errors.ERC20InsufficientAllowance.selector, address(market), 0, 5));
        market.deposit(5);
        usdc.approve(address(market), 5);
        refuse(abi.encodeWithSelector(IERC20Errors.ERC20InsufficientBalance.selector, address(this), 0, 5));
        market.deposit(5);
        assertConserved();
    }

    function test_deposit_with_permit_even_when_it_was_front_run() public {
        uint256 key = 0xC1;
        address account = vm.addr(key);
        usdc.mint(account, 20e6);
        for (uint256 nonce; nonce < 2; ++nonce) {
            bytes32 structHash = keccak256(
                abi.encode(
                    keccak256("Permit(address owner,address spender,uint256 value,uint256 nonce,uint256 deadline)"),
                    account,
                    address(market),
                    10e6,
                    nonce,
                    block.timestamp
                )
            );
            (uint8 v, bytes32 r, bytes32 s) =
                vm.sign(key, keccak256(abi.encodePacked("\x19\x01", usdc.DOMAIN_SEPARATOR(), structHash)));
            if (nonce == 1) usdc.permit(account, address(market), 10e6, block.timestamp, v, r, s);
            vm.prank(account);
            market.depositWithPermit(10e6, block.timestamp, v, r, s);
        }
        assertEq(market.balanceOf(account), 20e6);
    }

    // ---------------------------------------------------------------------------- requests

    function test_request_locks_the_price_and_records_the_snapshot() public {
        committee.submitSnapshot(1, 1, keccak256("snap"), certify(3, snapshotHash(1, 1, keccak256("snap"))));
        bytes32 id = request(1);
        require(id == market.executionIdOf(client, 1));
        require(id == keccak256(abi.encode(block.chainid, address(market), client, uint64(1))));
        Execution memory execution = market.executionOf(id);
        require(execution.client == client && execution.modelId == MODEL && execution.status == Status.Requested);
        require(execution.snapshotSequence == 1 && execution.snapshotRoot == keccak256("snap"));
        assertEq(market.balanceOf(client), 997e6);
        assertEq(market.totalLocked(), 3e6);
        assertConserved();
    }

    function tryRequest(bytes32 model, uint32 steps, uint128 price, uint256 deadline, uint64 nonce) internal {
        vm.prank(client);
        market.requestExecution(model, steps, 0, 0, price, uint64(deadline), nonce);
    }

    function test_request_refuses_what_cannot_be_served() public {
        uint256 time = block.timestamp;
        refuse(abi.encodeWithSelector(IModelRegistry.UnknownModel.selector, bytes32(uint256(1))));
        tryRequest(bytes32(uint256(1)), 1, 3e6, time + 60, 1);
        refuse(abi.encodeWithSelector(IMarket.StepsInvalid.selector, 0, 65536));
        tryRequest(MODEL, 0, 3e6, time + 60, 1);
        refuse(abi.encodeWithSelector(IMarket.StepsInvalid.selector, 65537, 65536));
        tryRequest(MODEL, 65537, 3e6, time + 60, 1);
        refuse(abi.encodeWithSelector(IMarket.PriceTooLow.selector, 2e6 - 1, 2e6));
        tryRequest(MODEL, 1, 2e6 - 1, time + 60, 1);
        refuse(abi.encodeWithSelector(IMarket.DeadlineInvalid.selector, time + 4, time + 5, time + 1 days));
        tryRequest(MODEL, 1, 2e6, time + 4, 1);
        refuse(abi.encodeWithSelector(IMarket.DeadlineInvalid.selector, time + 1 days + 1, time + 5, time + 1 days));
        tryRequest(MODEL, 1, 2e6, time + 1 days + 1, 1);
        refuse(abi.encodeWithSelector(IMarket.BalanceTooSmall.selector, client, 1000e6, 1000e6 + 1));
        tryRequest(MODEL, 1, 1000e6 + 1, time + 60, 1);
        tryRequest(MODEL, 1, 2e6, time + 60, 1);
        refuse(abi.encodeWithSelector(IMarket.NonceUsed.selector, client, 1));
        tryRequest(MODEL, 1, 2e6, time + 60, 1);
    }

    function test_dust_requests_are_refused() public {
        models.register(keccak256("free"), "free", makeTasks(1, 0), makeChain(1));
        refuse(abi.encodeWithSelector(IMarket.PriceTooLow.selector, 999, 1000));
        tryRequest(keccak256("free"), 1, 999, block.timestamp + 60, 1);
    }

    // ------------------------------------------------------------------------------- plans

    function test_plan_is_accepted_once_with_a_quorum() public {
        bytes32 id = request(1);
        bytes32 root = keccak256("plan");
        bytes memory few = certify(2, planHash(id, root, SEED, 3));
        refuse(abi.encodeWithSelector(ICommittee.QuorumTooSmall.selector, 2, 3));
        market.submitCompletePlan(id, root, SEED, 3, few);
        submitPlan(id, 3);
        Execution memory execution = market.executionOf(id);
        require(execution.planRoot == root && execution.seed == SEED && execution.executorCount == 3);
        bytes memory again = certify(3, planHash(id, root, SEED, 3));
        refuse(abi.encodeWithSelector(IMarket.StatusInvalid.selector, id, Status.Planned));
        market.submitCompletePlan(id, root, SEED, 3, again);
    }

    function test_plan_of_another_execution_is_refused() public {
        bytes32 first = request(1);
        bytes32 second = request(2);
        bytes memory signatures = certify(3, planHash(first, keccak256("plan"), SEED, 3));
        vm.expectRevert(); // recovers to strangers
        market.submitCompletePlan(second, keccak256("plan"), SEED, 3, signatures);
    }

    function test_plan_after_the_deadline_is_refused() public {
        bytes32 id = request(1);
        uint64 deadline = uint64(block.timestamp + 60);
        bytes memory signatures = certify(3, planHash(id, keccak256("plan"), SEED, 3));
        vm.warp(deadline);
        refuse(abi.encodeWithSelector(IMarket.DeadlinePassed.selector, id, deadline));
        market.submitCompletePlan(id, keccak256("plan"), SEED, 3, signatures);
    }

    // ------------------------------------------------------------------------- commitments

    function test_commitments_are_written_once_by_active_nodes() public {
        bytes32 id = request(1);
        Completion[] memory list = new Completion[](1);
        list[0] = Completion(id, 1, keccak256("outputs"));
        refuse(abi.encodeWithSelector(IMarket.StatusInvalid.selector, id, Status.Requested));
        vm.prank(node[0]);
        market.commitCompletions(list);
        submitPlan(id, 2);
        commit(node[0], id);
        require(market.commitmentOf(id, node[0]) == keccak256(abi.encode(uint32(1), keccak256("outputs"))));
        refuse(abi.encodeWithSelector(IMarket.CommitmentExists.selector, id, node[0]));
        vm.prank(node[0]);
        market.commitCompletions(list);
        refuse(abi.encodeWithSelector(IMarket.NodeInactive.selector, client));
        vm.prank(client);
        market.commitCompletions(list);
        list[0].steps = 2;
        refuse(abi.encodeWithSelector(IMarket.StepsInvalid.selector, 2, 1));
        vm.prank(node[1]);
        market.commitCompletions(list);
        refuse(abi.encodeWithSelector(IMarket.TooMany.selector, 65, 64));
        market.commitCompletions(new Completion[](65));
    }

    function test_one_call_commits_many_executions() public {
        Completion[] memory list = new Completion[](64);
        for (uint64 i; i < 64; ++i) {
            bytes32 id = request(i);
            submitPlan(id, 1);
            list[i] = Completion(id, 1, keccak256("outputs"));
        }
        vm.prank(node[0]);
        market.commitCompletions(list);
        assertEq(market.executionOf(list[63].executionId).committed, 1);
    }

    // -------------------------------------------------------------------------- settlement

    function test_settle_pays_slashes_and_returns_the_rest() public {
        bytes32 id = request(1);
        submitPlan(id, 1);
        settle(id, makeSettlement(1e6, 100e6, 30e6));
        assertEq(market.balanceOf(node[0]), 1e6);
        assertEq(market.balanceOf(node[1]), 30e6);
        assertEq(market.balanceOf(client), 999e6);
        assertEq(market.balanceOf(address(this)), 70e6); // the treasury
        assertEq(nodes.nodeOf(node[2]).stake, NODE_STAKE - 100e6);
        assertEq(market.totalLocked(), 0);
        assertConserved();
        vm.prank(node[1]);
        market.withdraw(30e6);
        assertEq(usdc.balanceOf(node[1]), 30e6);
        Settlement memory s = makeSettlement(1e6, 0, 0);
        bytes memory signatures = certify(3, settlementHash(id, s));
        refuse(abi.encodeWithSelector(IMarket.StatusInvalid.selector, id, Status.Settled));
        market.settle(id, s, signatures);
    }

    function test_settle_cannot_pay_more_than_there_is() public {
        bytes32 id = request(1);
        submitPlan(id, 1);
        Settlement memory s = makeSettlement(3e6 + 1, 0, 0);
        bytes memory signatures = certify(3, settlementHash(id, s));
        refuse(abi.encodeWithSelector(IMarket.Overpaid.selector, id, 3e6 + 1, 3e6));
        market.settle(id, s, signatures);
        s = makeSettlement(3e6, 10, 11); // from the slash, more than was slashed
        signatures = certify(3, settlementHash(id, s));
        refuse(abi.encodeWithSelector(IMarket.Overpaid.selector, id, 11, 10));
        market.settle(id, s, signatures);
        assertEq(nodes.nodeOf(node[2]).stake, NODE_STAKE);
        assertConserved();
    }

    function test_settle_takes_what_is_left_of_a_stake() public {
        bytes32 id = request(1);
        submitPlan(id, 1);
        settle(id, makeSettlement(1e6, type(uint128).max, 0));
        assertEq(nodes.nodeOf(node[2]).stake, 0);
        assertEq(market.balanceOf(address(this)), NODE_STAKE);
        assertConserved();
    }

    function test_settle_needs_a_plan_a_quorum_and_its_own_words() public {
        bytes32 id = request(1);
        Settlement memory s = makeSettlement(1e6, 0, 0);
        bytes memory signatures = certify(3, settlementHash(id, s));
        refuse(abi.encodeWithSelector(IMarket.StatusInvalid.selector, id, Status.Requested));
        market.settle(id, s, signatures);
        submitPlan(id, 1);
        s.payments[0].to = client; // another text than the one that was signed
        vm.expectRevert();
        market.settle(id, s, signatures);
        s = makeSettlement(1e6, 0, 0);
        s.steps = 2;
        signatures = certify(3, settlementHash(id, s));
        refuse(abi.encodeWithSelector(IMarket.StepsInvalid.selector, 2, 1));
        market.settle(id, s, signatures);
    }

    function test_settle_is_bounded() public {
        bytes32 id = request(1);
        submitPlan(id, 1);
        Settlement memory s;
        s.payments = new Payment[](2049);
        refuse(abi.encodeWithSelector(IMarket.TooMany.selector, 2049, 2048));
        market.settle(id, s, "");
        s.payments = new Payment[](0);
        s.slashes = new Slash[](65);
        refuse(abi.encodeWithSelector(IMarket.TooMany.selector, 65, 64));
        market.settle(id, s, "");
    }

    // ------------------------------------------------------------------------------ refund

    function test_refund_by_anybody_after_the_deadline() public {
        bytes32 id = request(1);
        uint256 deadline = block.timestamp + 60;
        assertEq(market.refundableAt(id), deadline);
        vm.warp(deadline - 1);
        refuse(abi.encodeWithSelector(IMarket.NotRefundable.selector, id, deadline));
        market.refund(id);
        vm.warp(deadline);
        vm.prank(node[0]);
        market.refund(id);
        assertEq(market.balanceOf(client), 1000e6);
        assertConserved();
        refuse(abi.encodeWithSelector(IMarket.StatusInvalid.selector, id, Status.Refunded));
        market.refund(id);
    }

    function test_refund_waits_the_grace_when_every_executor_has_committed() public {
        bytes32 id = request(1);
        uint256 deadline = block.timestamp + 60;
        submitPlan(id, 2);
        commit(node[0], id);
        assertEq(market.refundableAt(id), deadline);
        commit(node[1], id);
        assertEq(market.refundableAt(id), deadline + 1 hours);
        vm.warp(deadline + 1 hours);
        market.refund(id);
        Settlement memory s = makeSettlement(1e6, 0, 0);
        bytes memory signatures = certify(3, settlementHash(id, s));
        refuse(abi.encodeWithSelector(IMarket.StatusInvalid.selector, id, Status.Refunded));
        market.settle(id, s, signatures);
        assertConserved();
    }

    function test_unknown_executions_have_no_verbs() public {
        bytes memory reason = abi.encodeWithSelector(IMarket.StatusInvalid.selector, bytes32(0), Status.Unknown);
        refuse(reason);
        market.refund(0);
        refuse(reason);
        market.submitCompletePlan(0, SEED, SEED, 1, "");
        Settlement memory s;
        refuse(reason);
        market.settle(0, s, "");
    }

    // -------------------------------------------------------------------------- parameters

    function test_the_published_parameters_are_refused() public {
        Parameters memory p = defaultParameters();
        p.slashMilli = 10_000; // 0.08 * 0.9^2 * 11.2 = 0.7258 of the cost
        refuse(abi.encodeWithSelector(IMarket.ParametersUnsafe.selector, 725_760, 1_000_000));
        market.setParameters(p);
    }

    function test_the_threshold_is_exact() public {
        Parameters memory p = defaultParameters();
        p.slashMilli = 14_233; // 0.0648 * (1.2 + 14.233) = 1.0000584
        market.setParameters(p);
        p.slashMilli = 14_232; // 0.9999936
        refuse(abi.encodeWithSelector(IMarket.ParametersUnsafe.selector, 999_993, 1_000_000));
        market.setParameters(p);
    }

    function test_parameters_are_the_owners_and_in_range() public {
        Parameters memory p = defaultParameters();
        vm.expectRevert();
        vm.prank(client);
        market.setParameters(p);
        p.samplingBps = 10_001;
        refuse(abi.encodeWithSelector(IMarket.ParameterInvalid.selector, "samplingBps"));
        market.setParameters(p);
        p = defaultParameters();
        p.minDeadlineS = p.maxDeadlineS + 1;
        refuse(abi.encodeWithSelector(IMarket.ParameterInvalid.selector, "minDeadlineS"));
        market.setParameters(p);
    }

    function testFuzz_parameters_never_overflow(Parameters memory p) public {
        try market.setParameters(p) {
            Parameters memory now_ = market.parameters();
            uint256 loss = uint256(now_.samplingBps) * (10_000 - now_.collusionBps) ** now_.tieBreakers
                * (uint256(now_.rewardMilli) + now_.slashMilli);
            require(loss > (1000 + uint256(now_.validationBonusMilli)) * 10_000 ** (uint256(now_.tieBreakers) + 1));
        } catch (bytes memory reason) {
            bytes4 kind = bytes4(reason);
            require(kind == IMarket.ParameterInvalid.selector || kind == IMarket.ParametersUnsafe.selector);
        }
    }

    function testFuzz_settlement_conserves(uint128 pay, uint128 slash, uint128 fromSlash) public {
        bytes32 id = request(1);
        submitPlan(id, 1);
        Settlement memory s = makeSettlement(pay % 4e6, slash % 3000e6, fromSlash % 3000e6);
        try market.settle(id, s, certify(3, settlementHash(id, s))) {
            assertEq(market.totalLocked(), 0);
        } catch {
            assertEq(market.totalLocked(), 3e6);
        }
        assertConserved();
    }
}
