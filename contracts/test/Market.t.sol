// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Ownable} from "@openzeppelin/contracts/access/Ownable.sol";
import {IERC20Errors} from "@openzeppelin/contracts/interfaces/draft-IERC6093.sol";
import {MarketBase} from "./MarketBase.sol";
import {ICommittee} from "../src/interfaces/ICommittee.sol";
import {
    Execution,
    ExecutionHistory,
    IMarket,
    Parameters,
    PlanSubmission,
    Request,
    Settlement,
    Status
} from "../src/interfaces/IMarket.sol";
import {IModelRegistry, Task} from "../src/interfaces/IModelRegistry.sol";
import {INodeRegistry} from "../src/interfaces/INodeRegistry.sol";
import {pack} from "../src/libraries/AccountAmount.sol";

contract MarketTest is MarketBase {
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

    function test_request_locks_the_price_and_stores_the_request_hash() public {
        bytes32 id = request(1);
        require(id == market.executionIdOf(client, 1));
        require(id == keccak256(abi.encode(block.chainid, address(market), client, uint64(1))));
        Execution memory execution = market.executionOf(id);
        require(execution.client == client && execution.status == Status.Requested);
        require(execution.record == market.requestHashOf(requests[id]));
        assertEq(execution.configuration, 1);
        assertEq(execution.maxPrice, PRICE);
        assertEq(market.balanceOf(client), 997e6);
        assertEq(market.totalLocked(), 3e6);
        assertConserved();
    }

    function test_request_hash_is_the_eip712_hash() public view {
        Request memory r = makeRequest(7);
        bytes32 kind = keccak256(
            "Request(address client,bytes32 modelId,uint32 steps,bytes32 inputsDigest,bytes32 clientKey,uint96 maxPrice,uint64 deadline,uint64 nonce,uint64 snapshotSequence,bytes32 snapshotRoot,uint16 verifyBps)"
        );
        require(market.requestHashOf(r) == keccak256(abi.encode(kind, r)));
    }

    function tryRequest(bytes32 model, uint32 steps, uint96 price, uint256 deadline, uint64 nonce) internal {
        vm.prank(client);
        market.requestExecution(model, steps, 0, 0, price, uint64(deadline), nonce, 800);
    }

    function tryShare(uint16 verifyBps) internal {
        refuse(abi.encodeWithSelector(IMarket.ShareInvalid.selector, verifyBps, 800));
        vm.prank(client);
        market.requestExecution(MODEL, 1, 0, 0, PRICE, uint64(block.timestamp + 60), 1, verifyBps);
    }

    function test_requests_outside_the_bounds_are_refused() public {
        uint256 time = block.timestamp;
        refuse(abi.encodeWithSelector(IModelRegistry.UnknownModel.selector, bytes32(uint256(1))));
        tryRequest(bytes32(uint256(1)), 1, 3e6, time + 60, 1);
        refuse(abi.encodeWithSelector(IMarket.StepsInvalid.selector, 0, 65536));
        tryRequest(MODEL, 0, 3e6, time + 60, 1);
        refuse(abi.encodeWithSelector(IMarket.StepsInvalid.selector, 65537, 65536));
        tryRequest(MODEL, 65537, 3e6, time + 60, 1);
        refuse(abi.encodeWithSelector(IMarket.PriceTooLow.selector, 2.02e6 - 1, 2.02e6));
        tryRequest(MODEL, 1, 2.02e6 - 1, time + 60, 1);
        refuse(abi.encodeWithSelector(IMarket.DeadlineInvalid.selector, time + 4, time + 5, time + 1 days));
        tryRequest(MODEL, 1, 2.02e6, time + 4, 1);
        refuse(abi.encodeWithSelector(IMarket.DeadlineInvalid.selector, time + 1 days + 1, time + 5, time + 1 days));
        tryRequest(MODEL, 1, 2.02e6, time + 1 days + 1, 1);
        refuse(abi.encodeWithSelector(IMarket.BalanceTooSmall.selector, client, 1000e6, 1000e6 + 1));
        tryRequest(MODEL, 1, 1000e6 + 1, time + 60, 1);
        tryShare(799);
        tryShare(10_001);
        tryRequest(MODEL, 1, 2.02e6, time + 60, 1);
        refuse(abi.encodeWithSelector(IMarket.NonceUsed.selector, client, 1));
        tryRequest(MODEL, 1, 2.02e6, time + 60, 1);
    }

    function test_a24_dust_requests_are_refused() public {
        models.register(keccak256("free"), "free", makeTasks(1, 0), makeChain(1));
        refuse(abi.encodeWithSelector(IMarket.PriceTooLow.selector, 38, 39)); // 20 % of 100 USDC for a minute
        tryRequest(keccak256("free"), 1, 38, block.timestamp + 60, 1);
        refuse(abi.encodeWithSelector(IMarket.PriceTooLow.selector, 0, 4));
        tryRequest(keccak256("free"), 1, 0, block.timestamp + 5, 1);
    }

    function test_the_parts_of_the_quote() public view {
        (uint256 executors, uint256 verification, uint256 fee, uint256 reservation) = market.quoteParts(MODEL, 3, 60);
        assertEq(executors, 3e6);
        assertEq(verification, 3e6);
        assertEq(fee, 0.06e6);
        assertEq(reservation, 115); // 20 % of ten floors and 250 USDC, rounded up
        (,, fee, reservation) = market.quoteParts(MODEL, 3, 1 days);
        assertEq(fee, reservation); // more than 1 % of what is paid
        assertEq(reservation, 164_384);
    }

    /// @dev For all models and times: not less than for what a plan exposes, and it fits its storage.
    function testFuzz_the_reservation_is_for_the_stake(uint16 count, uint64 price, uint16 asked, uint32 time) public {
        uint256 tasks = uint256(count) % 32 + 1;
        uint32 steps = uint32(asked) + 1;
        bytes32 model = keccak256("any");
        models.register(model, "any", makeTasks(tasks, price), new uint32[](0));
        uint256 penalty = uint256(price) * steps * 100_000 / (1200 * 1000); // `compute_penalty` in exposure.py
        uint256 stake = tasks * (FLOOR + penalty);
        time %= 30 days;
        (,,, uint256 reservation) = market.quoteParts(model, steps, time);
        uint256 least = (stake > 100e6 ? stake : 100e6) * time / 365 days / 5;
        require(reservation >= (least < type(uint32).max ? least : type(uint32).max), "too little");
        require(reservation <= type(uint32).max, "it does not fit");
    }

    function test_a24_a_quote_below_a_micro_usdc_is_rounded_up() public {
        bytes32 model = keccak256("small");
        models.register(model, "small", makeTasks(1, 40), makeChain(1));
        uint32[4] memory steps = [uint32(1), 25, 26, 65536]; // 0.04, 1, 1.04 and 2621.44 micro-USDC
        uint16[4] memory whole = [1, 1, 2, 2622];
        for (uint256 i; i < steps.length; ++i) {
            (uint256 executors, uint256 verification,,) = market.quoteParts(model, steps[i], 60);
            assertEq(executors, whole[i]);
            assertEq(verification, whole[i]);
        }
    }

    /// @dev Each task earns its price for the steps that ran, rounded down to micro-USDC, and so does its validator.
    function testFuzz_a24_the_quote_covers_what_all_tasks_earn(uint256 seed, uint16 asked, uint16 ran, bool large) public {
        Task[] memory tasks = makeTasks(1 + seed % 16, 0);
        uint32 steps = uint32(asked) + 1;
        uint256 earned;
        for (uint256 i; i < tasks.length; ++i) {
            uint256 drawn = uint256(keccak256(abi.encode(seed, i)));
            tasks[i].priceNanoUsdc = large ? type(uint64).max - uint8(drawn) : uint64(drawn % 5000);
            earned += uint256(tasks[i].priceNanoUsdc) * (uint256(ran) % (steps + 1)) / 1000;
        }
        bytes32 model = keccak256("any");
        models.register(model, "any", tasks, new uint32[](0));
        (uint256 executors, uint256 verification, uint256 fee,) = market.quoteParts(model, steps, 60);
        require(executors >= earned && verification >= earned && fee >= 2 * earned / 100, "not covered");
        require(executors + verification + fee <= type(uint96).max, "no request could lock this much");
    }

    function test_the_dearest_model_can_be_requested() public {
        bytes32 model = keccak256("dearest");
        models.register(model, "dearest", makeTasks(1024, type(uint64).max), makeChain(1024));
        (uint256 executors, uint256 verification, uint256 fee, uint256 reservation) =
            market.quoteParts(model, 65536, 30 days);
        assertEq(executors, (uint256(type(uint64).max) * 1024 * 65536 + 999) / 1000);
        require(executors + verification + fee <= type(uint96).max);
        assertEq(reservation, type(uint32).max);
    }

    function test_pausing_only_stops_new_requests() public {
        bytes32 id = request(1);
        bytes32 other = request(2);
        market.setPaused(true);
        require(market.paused());
        refuse(abi.encodeWithSelector(IMarket.RequestsPaused.selector));
        tryRequest(MODEL, 1, PRICE, block.timestamp + 60, 3);
        submitPlan(id, 1);
        commitAll(id, 1);
        settle(id, makeSettlement(1e6, 0, 0));
        distributeAll(id, makeSettlement(1e6, 0, 0).payouts);
        vm.warp(block.timestamp + 60 + COMMIT_GRACE);
        market.refund(other);
        vm.prank(node[0]);
        market.withdraw(1e6);
        market.collectFees(1);
        vm.prank(client);
        market.withdraw(1);
        assertConserved();
        market.setPaused(false);
        request(4);
        refuse(abi.encodeWithSelector(Ownable.OwnableUnauthorizedAccount.selector, client));
        vm.prank(client);
        market.setPaused(true);
    }

    // ------------------------------------------------------------------------------- plans

    function test_plan_is_accepted_once_with_a_quorum() public {
        bytes32 id = request(1);
        Request memory r = requests[id];
        PlanSubmission memory plan = makePlan(r, 3);
        bytes memory few = certify(2, planHash(id, plan));
        refuse(abi.encodeWithSelector(ICommittee.QuorumTooSmall.selector, 2, 3));
        market.submitCompletePlan(r, plan, few);
        submitPlan(id, 3);
        Execution memory execution = market.executionOf(id);
        require(execution.status == Status.Planned);
        require(execution.record == market.recordOf(makeHistory(id, plan, 0, new bytes32[](0)), false));
        assertEq(nodes.nodeOf(node[0]).locked, 0); // locked only by the commitments
        bytes memory again = certify(3, planHash(id, plan));
        refuse(abi.encodeWithSelector(IMarket.StatusInvalid.selector, id, Status.Planned));
        market.submitCompletePlan(r, plan, again);
    }

    function test_a15_plan_of_another_execution_is_refused() public {
        bytes32 first = request(1);
        bytes32 second = request(2);
        PlanSubmission memory plan = makePlan(requests[first], 3);
        Request memory r = requests[second];
        bytes memory signatures = certify(3, planHash(first, plan));
        vm.expectRevert(); // the recovered signers are no members
        market.submitCompletePlan(r, plan, signatures);
        signatures = certify(3, planHash(second, plan));
        vm.expectRevert(); // the seed signature is for the first execution
        market.submitCompletePlan(r, plan, signatures);
        r = requests[first];
        r.inputsDigest = 0; // not what the client asked for
        signatures = certify(3, planHash(first, plan));
        refuse(abi.encodeWithSelector(IMarket.RecordMismatch.selector, first));
        market.submitCompletePlan(r, plan, signatures);
    }

    function test_a17_plan_needs_the_groups_signature_under_its_seed() public {
        bytes32 id = request(1);
        Request memory r = requests[id];
        PlanSubmission memory plan = makePlan(r, 1);
        plan.seedSignature = blsSign(GROUP_SECRET + 1, seedMessage(r));
        bytes memory signatures = certify(3, planHash(id, plan));
        vm.expectRevert();
        market.submitCompletePlan(r, plan, signatures);
        plan.seedSignature = "";
        signatures = certify(3, planHash(id, plan));
        vm.expectRevert();
        market.submitCompletePlan(r, plan, signatures);
    }

    function test_plans_outside_the_bounds_are_refused() public {
        bytes32 id = request(1);
        Request memory r = requests[id];
        PlanSubmission memory plan = makePlan(r, 0);
        refuse(abi.encodeWithSelector(IMarket.ExecutorsMissing.selector, id));
        market.submitCompletePlan(r, plan, "");
        plan.executors = 1025;
        refuse(abi.encodeWithSelector(IMarket.TooMany.selector, 1025, 1024));
        market.submitCompletePlan(r, plan, "");
        plan = makePlan(r, 1);
        plan.planRoot = 0;
        refuse(abi.encodeWithSelector(IMarket.RootMissing.selector, id));
        market.submitCompletePlan(r, plan, "");
    }

    function test_open_executions_keep_their_committee_configuration() public {
        bytes32 id = request(1);
        committee.resetMembers(makeMembers()); // configuration 2
        submitPlan(id, 1);
        settle(id, makeSettlement(1e6, 0, 0));
        assertEq(market.executionOf(id).configuration, 1);
        assertEq(market.executionOf(request(2)).configuration, 2);
    }

    // ------------------------------------------------------------------------- commitments

    function test_the_committee_commits_all_executors_in_one_call() public {
        bytes32 id = request(1);
        bytes32[] memory exposures = makeExposures(2);
        refuse(abi.encodeWithSelector(IMarket.StatusInvalid.selector, id, Status.Requested));
        market.commitExecution(id, SALT, exposures, "");
        submitPlan(id, 3);
        refuse(abi.encodeWithSelector(IMarket.RootMissing.selector, id));
        market.commitExecution(id, 0, exposures, "");
        refuse(abi.encodeWithSelector(IMarket.ExecutorsMissing.selector, id));
        market.commitExecution(id, SALT, new bytes32[](0), "");
        refuse(abi.encodeWithSelector(IMarket.TooMany.selector, 1025, 1024));
        market.commitExecution(id, SALT, new bytes32[](1025), "");
        bytes memory few = certify(2, commitmentsHash(id, SALT, exposures));
        refuse(abi.encodeWithSelector(ICommittee.QuorumTooSmall.selector, 2, 3));
        market.commitExecution(id, SALT, exposures, few);
        bytes memory other = certify(3, commitmentsHash(id, SALT, makeExposures(3)));
        vm.expectRevert();
        market.commitExecution(id, SALT, exposures, other);
        assertEq(market.refundableAt(id), block.timestamp + 60 + COMMIT_GRACE);
        commitAll(id, 2); // one of the two executes the third's tasks, too
        assertEq(market.refundableAt(id), block.timestamp + 60 + 1 hours);
        for (uint256 i; i < 3; ++i) {
            assertEq(nodes.nodeOf(node[i]).locked, i < 2 ? EXPOSURE : 0);
        }
        refuse(abi.encodeWithSelector(IMarket.CommitmentExists.selector, id));
        market.commitExecution(id, SALT, exposures, "");
        settle(id, makeSettlement(1e6, 0, 0));
        bytes32[] memory payouts = makeSettlement(1e6, 0, 0).payouts;
        bytes32 root = keccak256("commitments");
        ExecutionHistory memory history = makeHistory(id, makePlan(requests[id], 2), root, payouts);
        market.distribute(toList(history));
        assertEq(market.balanceOf(node[0]), 1e6);
        assertEq(nodes.nodeOf(node[0]).locked, 0);
    }

    function test_commitments_revert_until_enough_stake_is_unlocked() public {
        bytes32 first = request(1);
        bytes32 second = request(2);
        submitPlan(first, 2);
        submitPlan(second, 2); // plans lock no stake
        bytes32[] memory exposures = makeExposures(2);
        exposures[1] = pack(node[1], NODE_STAKE - RESERVE);
        commitAll(first, exposures);
        bytes memory signatures = certify(3, commitmentsHash(second, SALT, makeExposures(2)));
        refuse(abi.encodeWithSelector(INodeRegistry.ExposureTooHigh.selector, node[1], 0, EXPOSURE));
        market.commitExecution(second, SALT, makeExposures(2), signatures);
        assertEq(nodes.nodeOf(node[0]).locked, EXPOSURE); // all or nothing
        bytes32[] memory twice = makeExposures(2);
        twice[1] = twice[0]; // a node must not be listed twice
        bytes memory other = certify(3, commitmentsHash(second, SALT, twice));
        refuse(abi.encodeWithSelector(INodeRegistry.ExposuresNotAscending.selector, node[0], node[0]));
        market.commitExecution(second, SALT, twice, other);
        settle(first, makeSettlement(1e6, 0, 0));
        bytes32[] memory payouts = makeSettlement(1e6, 0, 0).payouts;
        bytes32 root = keccak256("commitments");
        ExecutionHistory memory history = makeHistory(first, makePlan(requests[first], 2), root, payouts);
        history.exposures = exposures;
        market.distribute(toList(history));
        // The same call succeeds, now that the stake is unlocked.
        market.commitExecution(second, SALT, makeExposures(2), signatures);
        assertEq(nodes.nodeOf(node[1]).locked, EXPOSURE);
    }

    /// @dev A node can empty its stake by executions of its own. The others wait for it, but not beyond the last call.
    function test_s19_a_node_without_free_stake_costs_nobody_else_the_pay() public {
        bytes32 other = request(1);
        bytes32 id = request(2);
        expose(other, NODE_STAKE - RESERVE); // all of the third node's
        submitPlan(id, 3);
        bytes32[] memory exposures = makeExposures(3);
        bytes memory signatures = certify(3, commitmentsHash(id, SALT, exposures));
        vm.warp(market.executionOf(id).deadline - LAST_CALL - 1);
        refuse(abi.encodeWithSelector(INodeRegistry.ExposureTooHigh.selector, node[2], 0, EXPOSURE));
        market.commitExecution(id, SALT, exposures, signatures);
        vm.warp(block.timestamp + 1);
        market.commitExecution(id, SALT, exposures, signatures);
        assertEq(nodes.nodeOf(node[0]).locked, 2 * EXPOSURE);
        assertEq(nodes.nodeOf(node[1]).locked, 2 * EXPOSURE);
        assertEq(nodes.nodeOf(node[2]).locked, NODE_STAKE - RESERVE);
        ExecutionHistory storage history = recorded[id];
        exposures[2] = pack(node[2], 0); // the record says so: members do not count its commitment
        (history.commitments, history.exposures) = (SALT, exposures);
        Settlement memory s = makeSettlement(1e6, NODE_STAKE, 0);
        settle(id, s);
        assertEq(nodes.nodeOf(node[2]).stake, NODE_STAKE - FLOOR); // as a validator: it was not bound as an executor
        distributeAll(id, s.payouts);
        assertEq(market.balanceOf(node[0]), 1e6);
        assertEq(nodes.nodeOf(node[0]).locked, EXPOSURE);
        assertEq(nodes.nodeOf(node[2]).locked, NODE_STAKE - RESERVE);
        assertConserved();
    }

    function test_s19_what_was_agreed_at_the_deadline_is_taken_until_it_can_be_refunded() public {
        bytes32 id = request(1);
        vm.warp(market.executionOf(id).deadline + COMMIT_GRACE - 1); // blocks are slow
        refuse(abi.encodeWithSelector(IMarket.NotRefundable.selector, id, market.refundableAt(id)));
        market.refund(id);
        submitPlan(id, 2);
        commitAll(id, 2);
        settle(id, makeSettlement(1e6, 0, 0));
        assertConserved();
    }

    function test_an_execution_without_commitments_is_refunded() public {
        bytes32 id = request(1);
        submitPlan(id, 1);
        bytes32[] memory exposures = new bytes32[](1);
        exposures[0] = pack(node[0], NODE_STAKE + 1);
        bytes memory signatures = certify(3, commitmentsHash(id, SALT, exposures));
        refuse(
            abi.encodeWithSelector(
                INodeRegistry.ExposureTooHigh.selector, node[0], NODE_STAKE - RESERVE, NODE_STAKE + 1
            )
        );
        market.commitExecution(id, SALT, exposures, signatures);
        vm.warp(block.timestamp + 60 + COMMIT_GRACE); // no settlement grace, because there are no commitments
        market.refund(id);
        assertEq(market.balanceOf(client), 1000e6 - RESERVATION);
        assertEq(nodes.nodeOf(node[0]).locked, 0);
        assertConserved();
    }

    /// @dev Otherwise the execution could be marked as distributed while the stake stays locked.
    function test_commitments_cannot_be_passed_off_as_a_plan() public {
        bytes32 id = request(1);
        submitPlan(id, 2);
        ExecutionHistory memory history = makeHistory(id, makePlan(requests[id], 2), 0, new bytes32[](0));
        bytes32 planned = market.recordOf(history, false);
        commitAll(id, 2);
        vm.warp(block.timestamp + 60 + 1 hours);
        market.refund(id);
        history.requestHash = planned;
        history.planRoot = keccak256("commitments");
        history.seed = keccak256(abi.encodePacked(makeExposures(2)));
        refuseDistribute(abi.encodeWithSelector(IMarket.RecordMismatch.selector, id), history);
        history = makeHistory(id, makePlan(requests[id], 2), 0, new bytes32[](0));
        history.exposures = makeExposures(2); // exposures without a root of commitments
        refuseDistribute(abi.encodeWithSelector(IMarket.RecordMismatch.selector, id), history);
        history.commitments = keccak256("commitments");
        market.distribute(toList(history));
        assertEq(nodes.nodeOf(node[1]).locked, 0);
    }

    // ------------------------------------------------------------------------------ refund

    function test_refund_by_anybody_after_the_deadline() public {
        bytes32 id = request(1);
        uint256 deadline = block.timestamp + 60 + COMMIT_GRACE;
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

    function test_refund_waits_the_grace_when_the_executors_are_committed() public {
        bytes32 id = request(1);
        uint256 deadline = block.timestamp + 60;
        submitPlan(id, 2);
        assertEq(market.refundableAt(id), deadline + COMMIT_GRACE);
        commitAll(id, 2);
        assertEq(market.refundableAt(id), deadline + 1 hours);
        vm.warp(deadline + 1 hours);
        market.refund(id);
        Settlement memory s = makeSettlement(1e6, 0, 0);
        bytes memory signatures = certify(3, settlementHash(id, s));
        refuse(abi.encodeWithSelector(IMarket.StatusInvalid.selector, id, Status.Refunded));
        market.settle(id, s, recorded[id], signatures);
        assertConserved();
    }

    function test_s96_an_execution_that_nobody_uses_pays_the_stake_that_its_plan_reserved() public {
        bytes32 id = request(1);
        submitPlan(id, 2);
        vm.warp(market.refundableAt(id));
        market.refund(id);
        assertEq(market.balanceOf(client), 1000e6 - RESERVATION);
        assertEq(market.balanceOf(address(this)), RESERVATION); // the treasury: members gain nothing by settling nothing
        assertEq(market.totalFees(), 0);
        assertEq(market.executionOf(id).reservation, RESERVATION);
        assertConserved();
    }

    function test_a_request_without_a_plan_pays_nothing() public {
        bytes32 id = request(1);
        assertEq(market.executionOf(id).reservation, RESERVATION);
        vm.warp(market.refundableAt(id));
        market.refund(id);
        assertEq(market.balanceOf(client), 1000e6);
        assertEq(market.executionOf(id).reservation, 0);
    }

    /// @dev Who opens an execution, uses nothing of it and ends it pays for the time until the settlement.
    function test_s96_an_execution_that_is_settled_unused_pays_for_its_time() public {
        uint64[4] memory waits = [uint64(0), 1, 30, 600]; // of 60 s to the deadline
        uint32[4] memory fees = [0, 1, 26, RESERVATION]; // rounded up
        for (uint256 i; i < waits.length; ++i) {
            bytes32 id = request(uint64(i + 1));
            submitPlan(id, 2);
            commitAll(id, 2);
            vm.warp(block.timestamp + waits[i]);
            uint256 before = market.totalFees();
            settle(id, makeSettlement(0, 0, 0));
            assertEq(market.totalFees() - before, fees[i]);
        }
        assertConserved();
    }

    function test_the_fee_of_what_is_paid_covers_the_reservation() public {
        bytes32 id = request(1);
        submitPlan(id, 1);
        vm.warp(block.timestamp + 60);
        settle(id, makeSettlement(1e6, 0, 0));
        assertEq(market.totalFees(), 10_000);
        assertConserved();
    }

    function test_calls_for_unknown_executions_are_refused() public {
        bytes memory reason = abi.encodeWithSelector(IMarket.StatusInvalid.selector, bytes32(0), Status.Unknown);
        refuse(reason);
        market.refund(0);
        Request memory r = makeRequest(99);
        PlanSubmission memory plan = makePlan(r, 1);
        refuse(
            abi.encodeWithSelector(
                IMarket.StatusInvalid.selector, market.executionIdOf(client, 99), Status.Unknown
            )
        );
        market.submitCompletePlan(r, plan, "");
        Settlement memory s;
        refuse(reason);
        market.settle(0, s, recorded[0], "");
        refuseDistribute(reason, makeHistory(0, plan, 0, s.payouts));
    }

    // -------------------------------------------------------------------------- parameters

    function test_a_slash_of_ten_times_the_cost_is_refused() public {
        Parameters memory p = defaultParameters();
        p.slashMilli = 10_000; // 0.08 * 0.9^2 * 11.2 = 0.7258 of the cost
        refuse(abi.encodeWithSelector(IMarket.ParametersUnsafe.selector, 725_760, 1_000_000));
        market.setParameters(p);
    }

    function test_the_condition_on_parameters_is_exact() public {
        Parameters memory p = defaultParameters();
        p.slashMilli = 14_233; // 0.0648 * (1.2 + 14.233) = 1.0000584
        market.setParameters(p);
        p.slashMilli = 14_232; // 0.9999936
        refuse(abi.encodeWithSelector(IMarket.ParametersUnsafe.selector, 999_993, 1_000_000));
        market.setParameters(p);
    }

    function test_s14_the_condition_includes_the_gain_outside() public {
        Parameters memory p = defaultParameters();
        p.outsideGain = 324_000; // 0.0648 of the floor of 5 USDC
        market.setParameters(p);
        p.outsideGain = 324_001;
        refuse(abi.encodeWithSelector(IMarket.OutsideGainTooHigh.selector, 324_000, 324_001));
        market.setParameters(p);
        p.samplingBps = 10_000; // who verifies everything deters more
        p.outsideGain = 4_050_000;
        market.setParameters(p);
    }

    function test_the_owner_sets_parameters_within_their_ranges() public {
        Parameters memory p = defaultParameters();
        vm.expectRevert();
        vm.prank(client);
        market.setParameters(p);
        p.samplingBps = 10_001;
        refuseParameters(p, "samplingBps");
        p.samplingBps = 0;
        refuseParameters(p, "samplingBps");
        p = defaultParameters();
        p.minDeadlineS = p.maxDeadlineS + 1;
        refuseParameters(p, "minDeadlineS");
        p.minDeadlineS = 0;
        refuseParameters(p, "minDeadlineS");
        p = defaultParameters();
        p.collusionBps = 10_000;
        refuseParameters(p, "collusionBps");
        p = defaultParameters();
        p.treasuryBps = 0; // slashing one's own node would cost nothing
        refuseParameters(p, "treasuryBps");
        p.treasuryBps = 10_001;
        refuseParameters(p, "treasuryBps");
        p = defaultParameters();
        p.feeBps = 1_001;
        refuseParameters(p, "feeBps");
        p = defaultParameters();
        p.tieBreakers = 9;
        refuseParameters(p, "tieBreakers");
        p = defaultParameters();
        p.settlementGraceS = 30 days + 1;
        refuseParameters(p, "settlementGraceS");
        p = defaultParameters();
        p.maxDeadlineS = 30 days + 1;
        refuseParameters(p, "maxDeadlineS");
        p = defaultParameters();
        p.reservationBps = 0; // stake could be reserved for nothing
        refuseParameters(p, "reservationBps");
        p.reservationBps = 10_001;
        refuseParameters(p, "reservationBps");
        p = defaultParameters();
        p.rewardMilli = 0;
        refuseParameters(p, "rewardMilli");
    }

    function refuseParameters(Parameters memory p, string memory name) internal {
        refuse(abi.encodeWithSelector(IMarket.ParameterInvalid.selector, name));
        market.setParameters(p);
    }

    function test_s47_no_execution_with_its_snapshot_outlasts_the_unbonding_period() public {
        Parameters memory p = defaultParameters();
        p.maxDeadlineS = uint32(UNBONDING - 1 hours - SNAPSHOT_AGE);
        refuse(abi.encodeWithSelector(IMarket.UnbondingTooShort.selector, UNBONDING, UNBONDING));
        market.setParameters(p);
        p.maxDeadlineS -= 1;
        market.setParameters(p);
        assertEq(market.longestExecutionS() + SNAPSHOT_AGE, UNBONDING - 1);
        refuse(abi.encodeWithSelector(INodeRegistry.PeriodInvalid.selector, UNBONDING - 1, UNBONDING, 90 days));
        nodes.setUnbondingPeriod(UNBONDING - 1);
    }

    function test_only_the_owner_sets_the_treasury() public {
        refuse(abi.encodeWithSelector(IMarket.AddressMissing.selector));
        market.setTreasury(address(0));
        refuse(abi.encodeWithSelector(Ownable.OwnableUnauthorizedAccount.selector, client));
        vm.prank(client);
        market.setTreasury(client);
        market.setTreasury(client);
        require(market.treasury() == client);
    }

    function test_the_code_fits_eip170() public view {
        require(address(market).code.length <= 24_576, "the code is too large for a chain");
    }

    function test_the_constructor_refuses_zero_addresses() public {
        for (uint256 i; i < 4; ++i) {
            refuse(abi.encodeWithSelector(IMarket.AddressMissing.selector));
            deployMarket(
                i == 0 ? address(0) : address(usdc),
                i == 1 ? address(0) : address(committee),
                i == 2 ? address(0) : address(nodes),
                i == 3 ? address(0) : address(models)
            );
        }
    }

    function testFuzz_parameters_never_overflow(Parameters memory p) public {
        try market.setParameters(p) {
            Parameters memory now_ = market.parameters();
            uint256 loss = uint256(now_.samplingBps) * (10_000 - now_.collusionBps) ** now_.tieBreakers
                * (uint256(now_.rewardMilli) + now_.slashMilli);
            require(loss > (1000 + uint256(now_.validationBonusMilli)) * 10_000 ** (uint256(now_.tieBreakers) + 1));
        } catch (bytes memory reason) {
            bytes4 kind = bytes4(reason);
            require(
                kind == IMarket.ParameterInvalid.selector || kind == IMarket.ParametersUnsafe.selector
                    || kind == IMarket.OutsideGainTooHigh.selector || kind == IMarket.UnbondingTooShort.selector
            );
        }
    }

    function testFuzz_settlement_conserves_money(uint96 pay, uint96 slash, uint96 reward) public {
        bytes32 id = request(1);
        expose(id, 1000e6);
        Settlement memory s = makeSettlement(pay % 4e6, slash % 3000e6, reward % 3000e6);
        try market.settle(id, s, recorded[id], certify(3, settlementHash(id, s))) {
            assertEq(market.totalLocked(), pay % 4e6);
            distributeAll(id, s.payouts);
            assertEq(market.totalLocked(), 0);
        } catch {
            assertEq(market.totalLocked(), 3e6);
        }
        assertConserved();
    }
}
