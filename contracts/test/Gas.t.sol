// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Base} from "./Base.sol";
import {
    ExecutionHistory, Payment, PlanSubmission, Request, Settlement
} from "../src/interfaces/IMarket.sol";
import {Task} from "../src/interfaces/IModelRegistry.sol";
import {pack} from "../src/libraries/AccountAmount.sol";

/// @dev Gas of every call of an execution that runs each task on a different node, as whole transactions, with a
/// committee of four. The figures are in snapshots/; a changed figure fails the test.
contract GasTest is Base {
    uint256 internal constant MAX_GAS = 600_000;
    uint256 internal constant MAX_GAS_PER_TASK = 8_000;
    uint256 internal constant MAX_PLAN_GAS = 250_000; // for any number of tasks
    uint256 internal constant MAX_SNAPSHOT_GAS = 80_000;

    address[11] internal executors;

    /// @dev Runs one execution first, so that all accounts have had a balance, as in a network that has run for long.
    function setUp() public override {
        super.setUp();
        confirmKey(blsKey(GROUP_SECRET), 3);
        for (uint160 i; i < 11; ++i) {
            executors[i] = address(0x3001 + i);
            joinNode(executors[i]);
        }
        vm.snapshotGasLastCall("Functions", "register a node");
        bytes32 snap = keccak256("snapshot");
        committee.submitSnapshot(1, 1, snap, certify(3, snapshotHash(1, 1, snap)));
        require(vm.snapshotGasLastCall("Functions", "submitSnapshot") <= MAX_SNAPSHOT_GAS, "a snapshot costs too much");
        bytes32 id = request(100);
        PlanSubmission memory plan = makePlan(requests[id], 11);
        market.submitCompletePlan(requests[id], plan, certify(3, planHash(id, plan)));
        Settlement memory s = makePayouts(11);
        settle(id, s);
        market.distribute(makeHistories(id, plan, 0, s));
    }

    function makeExecutorExposures(uint256 count) internal view returns (bytes32[] memory exposures) {
        exposures = new bytes32[](count);
        for (uint256 i; i < count; ++i) {
            exposures[i] = pack(executors[i], 12_345_678);
        }
    }

    function makePayouts(uint256 count) internal view returns (Settlement memory s) {
        s.steps = 1;
        s.evidenceRoot = keccak256("evidence");
        s.payouts = new bytes32[](count);
        for (uint256 i; i < count; ++i) {
            s.payouts[i] = pack(executors[i], 123_456);
        }
    }

    function makeHistories(bytes32 id, PlanSubmission memory plan, bytes32 root, Settlement memory s)
        internal
        view
        returns (ExecutionHistory[] memory histories)
    {
        histories = new ExecutionHistory[](1);
        histories[0] = makeHistory(id, plan, 0, s.payouts);
        histories[0].commitments = root;
        if (root != 0) histories[0].exposures = makeExecutorExposures(plan.executors);
    }

    /// @dev From a signed request to its settlement.
    function runSigned(uint64 nonce, uint256 tasks, string memory group) internal returns (uint256 gas) {
        Request memory r = makeRequest(nonce);
        bytes32 id = market.executionIdOf(client, nonce);
        requests[id] = r;
        PlanSubmission memory plan = makePlan(requests[id], tasks);
        bytes memory clientSignature = signRequest(CLIENT_KEY, r);
        bytes memory signatures = certify(3, planHash(id, plan));
        market.openExecution(r, clientSignature, plan, signatures);
        gas = vm.snapshotGasLastCall(group, "1 openExecution");
        gas += finish(id, plan, tasks, group);
    }

    /// @dev From the client's own request to its settlement.
    function runOwn(uint64 nonce, uint256 tasks, string memory group) internal returns (uint256 gas) {
        bytes32 id = request(nonce);
        gas = vm.snapshotGasLastCall(group, "0 requestExecution");
        PlanSubmission memory plan = makePlan(requests[id], tasks);
        Request memory r = requests[id];
        bytes memory signatures = certify(3, planHash(id, plan));
        market.submitCompletePlan(r, plan, signatures);
        uint256 planGas = vm.snapshotGasLastCall(group, "1 submitCompletePlan");
        require(planGas <= MAX_PLAN_GAS, "a plan costs too much");
        gas += planGas;
        gas += finish(id, plan, tasks, group);
    }

    function finish(bytes32 id, PlanSubmission memory plan, uint256 tasks, string memory group)
        internal
        returns (uint256 gas)
    {
        bytes32 root = keccak256("commitments");
        bytes32[] memory exposures = makeExecutorExposures(tasks);
        bytes memory signatures = certify(3, commitmentsHash(id, root, exposures));
        market.commitExecution(id, root, exposures, signatures);
        gas = vm.snapshotGasLastCall(group, "2 commitExecution");
        Settlement memory s = makePayouts(tasks);
        signatures = certify(3, settlementHash(id, s));
        market.settle(id, s, recorded[id], signatures);
        gas += vm.snapshotGasLastCall(group, "3 settle");
        ExecutionHistory[] memory histories = makeHistories(id, plan, root, s);
        market.distribute(histories);
        vm.snapshotGasLastCall(group, "4 distribute, one execution");
    }

    function test_gas_of_an_execution() public {
        uint256 own10 = runOwn(1, 10, "Own 10 tasks");
        uint256 own11 = runOwn(2, 11, "Own 11 tasks");
        uint256 signed10 = runSigned(3, 10, "Signed 10 tasks");
        uint256 signed11 = runSigned(4, 11, "Signed 11 tasks");
        require(own10 <= MAX_GAS && signed10 <= MAX_GAS, "an execution costs too much");
        require(own11 - own10 <= MAX_GAS_PER_TASK, "another task costs too much");
        require(signed11 - signed10 <= MAX_GAS_PER_TASK, "another task of a signed request costs too much");
        vm.snapshotValue("Execution", "own request, 10 tasks", own10);
        vm.snapshotValue("Execution", "own request, one more task", own11 - own10);
        vm.snapshotValue("Execution", "signed request, 10 tasks", signed10);
        vm.snapshotValue("Execution", "signed request, one more task", signed11 - signed10);
    }

    /// @dev 32 executions on the same ten nodes: most storage slots are warm.
    function test_gas_of_distributing_many_at_once() public {
        ExecutionHistory[] memory histories = new ExecutionHistory[](32);
        for (uint64 i; i < 32; ++i) {
            bytes32 id = request(i + 1);
            PlanSubmission memory plan = makePlan(requests[id], 10);
            market.submitCompletePlan(requests[id], plan, certify(3, planHash(id, plan)));
            bytes32 root = keccak256("commitments");
            bytes32[] memory exposures = makeExecutorExposures(10);
            market.commitExecution(id, root, exposures, certify(3, commitmentsHash(id, root, exposures)));
            Settlement memory s = makePayouts(10);
            settle(id, s);
            histories[i] = makeHistories(id, plan, root, s)[0];
        }
        market.distribute(histories);
        vm.snapshotGasLastCall("Functions", "distribute 32 executions of 10 nodes");
    }

    function test_gas_of_the_other_functions() public {
        Task[] memory tasks = makeTasks(10, 100_000_000);
        uint32[] memory edges = makeChain(10);
        models.register(keccak256("ten tasks"), "ten-tasks", tasks, edges);
        vm.snapshotGasLastCall("Functions", "register a model of 10 tasks");
        fund(client, 1e6);
        vm.snapshotGasLastCall("Functions", "deposit");
        vm.prank(client);
        market.withdraw(1e6);
        vm.snapshotGasLastCall("Functions", "withdraw");
        bytes32 id = request(1);
        PlanSubmission memory plan = makePlan(requests[id], 10);
        market.submitCompletePlan(requests[id], plan, certify(3, planHash(id, plan)));
        bytes32 root = keccak256("commitments");
        bytes32[] memory exposures = makeExecutorExposures(10);
        market.commitExecution(id, root, exposures, certify(3, commitmentsHash(id, root, exposures)));
        Settlement memory s = makePayouts(10);
        s.slashes = new bytes32[](1);
        s.slashes[0] = pack(executors[0], 10e6);
        recordPlan(id, plan);
        (recorded[id].commitments, recorded[id].exposures) = (root, exposures);
        s.rewards = new Payment[](2);
        s.rewards[0] = Payment(executors[3], 1e6);
        s.rewards[1] = Payment(client, 1e6);
        bytes memory signatures = certify(3, settlementHash(id, s));
        market.settle(id, s, recorded[id], signatures);
        vm.snapshotGasLastCall("Functions", "settle 10 payouts, 1 slash, 2 rewards");
        market.collectFees(1);
        vm.snapshotGasLastCall("Functions", "collectFees, 4 members");
        id = request(2);
        vm.warp(market.refundableAt(id));
        market.refund(id);
        vm.snapshotGasLastCall("Functions", "refund");
    }

    /// @dev An execution of 1,024 executors, all of which are verified; its settlement pays as many validators, too, and
    /// slashes as many nodes, and pays as many out of slashes, as may be. All accounts are new.
    function makeLargest() internal returns (bytes32[] memory exposures, Settlement memory s) {
        exposures = new bytes32[](1_024);
        s.steps = 1;
        s.payouts = new bytes32[](2_048);
        s.rewards = new Payment[](256);
        s.slashes = new bytes32[](256);
        for (uint160 i; i < 1_024; ++i) {
            exposures[i] = pack(address(0x10000 + i), 10e6);
            joinNode(address(0x10000 + i));
            s.payouts[i] = pack(address(0x10000 + i), 1_000);
            s.payouts[1_024 + i] = pack(address(0x20000 + i), 1_000);
        }
        for (uint160 i; i < 256; ++i) {
            s.slashes[i] = pack(address(0x10000 + i), 10e6);
            s.rewards[i] = Payment(address(0x30000 + i), 1_000);
        }
    }

    function test_gas_of_the_largest_settlement() public {
        (bytes32[] memory exposures, Settlement memory s) = makeLargest();
        bytes32 id = request(1);
        PlanSubmission memory plan = makePlan(requests[id], 1_024);
        market.submitCompletePlan(requests[id], plan, certify(3, planHash(id, plan)));
        recordPlan(id, plan);
        bytes32 root = keccak256("commitments");
        market.commitExecution(id, root, exposures, certify(3, commitmentsHash(id, root, exposures)));
        (recorded[id].commitments, recorded[id].exposures) = (root, exposures);
        settle(id, s);
        uint256 gas = vm.snapshotGasLastCall("Functions", "settle 2048 payouts, 256 slashes, 256 rewards");
        require(gas <= 2 ** 24, "a transaction may take no more since Osaka");
    }
}
