// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {toWord} from "../src/Words.sol";
import {Base} from "./Base.sol";
import {Completion, Due, Payment, Request, Settlement, Slash, Terms} from "../src/interfaces/IMarket.sol";
import {Task} from "../src/interfaces/IModelRegistry.sol";

/// @dev What an execution costs in which every task is on a node of its own, call by call, as whole
/// transactions, at n = 4. The figures are in snapshots/; a change of one fails this test.
contract GasTest is Base {
    uint256 internal constant BAR = 600_000;
    uint256 internal constant BAR_PER_TASK = 8_000;
    uint256 internal constant PLAN_BAR = 250_000; // for any number of tasks
    uint256 internal constant SNAPSHOT_BAR = 80_000;

    address[11] internal executors;

    /// @dev Nodes, client and treasury have had money before: a lasting network is what matters.
    function setUp() public override {
        super.setUp();
        confirmKey(blsKey(GROUP_SECRET), 3);
        for (uint160 i; i < 11; ++i) {
            executors[i] = address(0x3001 + i);
            joinNode(executors[i]);
        }
        vm.snapshotGasLastCall("Verbs", "register a node");
        bytes32 snap = keccak256("snapshot");
        committee.submitSnapshot(1, 1, snap, certify(3, snapshotHash(1, 1, snap)));
        require(vm.snapshotGasLastCall("Verbs", "submitSnapshot") <= SNAPSHOT_BAR, "a snapshot is above its bar");
        bytes32 id = request(100);
        Terms memory terms = makeWork(requests[id], 11);
        market.submitCompletePlan(requests[id], terms, certify(3, planHash(id, terms)));
        Settlement memory s = makePayouts(11);
        settle(id, s);
        market.distribute(makeDues(id, terms, 0, s));
    }

    function makeWork(Request memory r, uint256 count) internal view returns (Terms memory terms) {
        terms = makeTerms(r, count);
    }

    function makeWords(uint256 count) internal view returns (bytes32[] memory exposures) {
        exposures = new bytes32[](count);
        for (uint256 i; i < count; ++i) {
            exposures[i] = toWord(executors[i], 12_345_678);
        }
    }

    function makePayouts(uint256 count) internal view returns (Settlement memory s) {
        s.steps = 1;
        s.evidenceRoot = keccak256("evidence");
        s.payouts = new bytes32[](count);
        for (uint256 i; i < count; ++i) {
            s.payouts[i] = toWord(executors[i], 123_456);
        }
    }

    function makeDues(bytes32 id, Terms memory terms, bytes32 root, Settlement memory s)
        internal
        view
        returns (Due[] memory dues)
    {
        dues = new Due[](1);
        dues[0] = makeDue(id, terms, 0, s.payouts);
        dues[0].commitments = root;
        if (root != 0) dues[0].exposures = makeWords(terms.executors);
    }

    /// @dev From a signed request to its settlement.
    function runSigned(uint64 nonce, uint256 tasks, string memory group) internal returns (uint256 gas) {
        Request memory r = makeRequest(nonce);
        bytes32 id = market.executionIdOf(client, nonce);
        requests[id] = r;
        Terms memory terms = makeWork(requests[id], tasks);
        bytes memory own = signRequest(CLIENT_KEY, r);
        bytes memory signatures = certify(3, planHash(id, terms));
        market.openExecution(r, own, terms, signatures);
        gas = vm.snapshotGasLastCall(group, "1 openExecution");
        gas += finish(id, terms, tasks, group);
    }

    /// @dev From the client's own request to its settlement.
    function runOwn(uint64 nonce, uint256 tasks, string memory group) internal returns (uint256 gas) {
        bytes32 id = request(nonce);
        gas = vm.snapshotGasLastCall(group, "0 requestExecution");
        Terms memory terms = makeWork(requests[id], tasks);
        Request memory r = requests[id];
        bytes memory signatures = certify(3, planHash(id, terms));
        market.submitCompletePlan(r, terms, signatures);
        uint256 plan = vm.snapshotGasLastCall(group, "1 submitCompletePlan");
        require(plan <= PLAN_BAR, "a plan is above its bar");
        gas += plan;
        gas += finish(id, terms, tasks, group);
    }

    function finish(bytes32 id, Terms memory terms, uint256 tasks, string memory group)
        internal
        returns (uint256 gas)
    {
        bytes32 root = keccak256("commitments");
        bytes32[] memory exposures = makeWords(tasks);
        bytes memory signatures = certify(3, commitmentsHash(id, root, exposures));
        market.commitExecution(id, root, exposures, signatures);
        gas = vm.snapshotGasLastCall(group, "2 commitExecution");
        Settlement memory s = makePayouts(tasks);
        signatures = certify(3, settlementHash(id, s));
        market.settle(id, s, signatures);
        gas += vm.snapshotGasLastCall(group, "3 settle");
        Due[] memory dues = makeDues(id, terms, root, s);
        market.distribute(dues);
        vm.snapshotGasLastCall(group, "4 distribute, by whoever wants the money, alone");
    }

    function test_gas_of_an_execution() public {
        uint256 own10 = runOwn(1, 10, "Own 10 tasks");
        uint256 own11 = runOwn(2, 11, "Own 11 tasks");
        uint256 signed10 = runSigned(3, 10, "Signed 10 tasks");
        uint256 signed11 = runSigned(4, 11, "Signed 11 tasks");
        require(own10 <= BAR && signed10 <= BAR, "above the bar");
        require(own11 - own10 <= BAR_PER_TASK && signed11 - signed10 <= BAR_PER_TASK, "grows too fast");
        vm.snapshotValue("Execution", "own request, 10 tasks", own10);
        vm.snapshotValue("Execution", "own request, one more task", own11 - own10);
        vm.snapshotValue("Execution", "signed request, 10 tasks", signed10);
        vm.snapshotValue("Execution", "signed request, one more task", signed11 - signed10);
    }

    /// @dev Thirty-two executions on the same ten nodes: most slots are warm.
    function test_gas_of_distributing_many_at_once() public {
        Due[] memory dues = new Due[](32);
        for (uint64 i; i < 32; ++i) {
            bytes32 id = request(i + 1);
            Terms memory terms = makeWork(requests[id], 10);
            market.submitCompletePlan(requests[id], terms, certify(3, planHash(id, terms)));
            bytes32 root = keccak256("commitments");
            market.commitExecution(id, root, makeWords(10), certify(3, commitmentsHash(id, root, makeWords(10))));
            Settlement memory s = makePayouts(10);
            settle(id, s);
            dues[i] = makeDues(id, terms, root, s)[0];
        }
        market.distribute(dues);
        vm.snapshotGasLastCall("Verbs", "distribute 32 executions of 10 nodes");
    }

    function test_gas_of_the_other_verbs() public {
        Task[] memory tasks = makeTasks(10, 100_000);
        uint32[] memory edges = makeChain(10);
        models.register(keccak256("ten tasks"), "ten-tasks", tasks, edges);
        vm.snapshotGasLastCall("Verbs", "register a model of 10 tasks");
        fund(client, 1e6);
        vm.snapshotGasLastCall("Verbs", "deposit");
        vm.prank(client);
        market.withdraw(1e6);
        vm.snapshotGasLastCall("Verbs", "withdraw");
        bytes32 id = request(1);
        Terms memory terms = makeWork(requests[id], 10);
        market.submitCompletePlan(requests[id], terms, certify(3, planHash(id, terms)));
        Completion[] memory list = new Completion[](1);
        list[0] = Completion(id, 1, keccak256("outputs"), 12_345_678);
        vm.prank(executors[0]);
        market.commitCompletions(list);
        vm.snapshotGasLastCall("Verbs", "commitCompletions of one node");
        Settlement memory s = makePayouts(10);
        s.slashes = new Slash[](1);
        s.slashes[0] = Slash(node[0], 10e6);
        s.rewards = new Payment[](2);
        s.rewards[0] = Payment(executors[3], 1e6);
        s.rewards[1] = Payment(client, 1e6);
        bytes memory signatures = certify(3, settlementHash(id, s));
        market.settle(id, s, signatures);
        vm.snapshotGasLastCall("Verbs", "settle 10 payouts, 1 slash, 2 rewards");
        market.collectFees();
        vm.snapshotGasLastCall("Verbs", "collectFees, 4 members");
        id = request(2);
        vm.warp(block.timestamp + 60);
        market.refund(id);
        vm.snapshotGasLastCall("Verbs", "refund");
    }
}
