// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Base} from "./Base.sol";
import {Completion, Payment, Settlement, Slash} from "../src/interfaces/IMarket.sol";
import {Task} from "../src/interfaces/IModelRegistry.sol";

/// @dev What one execution of ten tasks on six nodes costs, call by call, as whole transactions. The
/// figures are in snapshots/Execution.json; a change of one fails this test.
contract GasTest is Base {
    function record(string memory name) internal {
        vm.snapshotGasLastCall("Execution", name);
    }

    function test_gas_of_an_execution() public {
        address[6] memory executors;
        for (uint160 i; i < 6; ++i) {
            executors[i] = address(0x3001 + i);
            joinNode(executors[i]);
        }
        record("0 register a node");
        Task[] memory tasks = makeTasks(10, 100_000);
        uint32[] memory edges = makeChain(10);
        models.register(keccak256("ten tasks"), "ten-tasks", tasks, edges);
        record("1 register a model of 10 tasks");
        bytes32 snap = keccak256("snapshot");
        bytes memory signatures = certify(3, snapshotHash(1, 1, snap));
        committee.submitSnapshot(1, 1, snap, signatures);
        record("2 submitSnapshot");

        bytes32 id = request(1);
        record("3 requestExecution");
        bytes32 root = keccak256("plan");
        signatures = certify(3, planHash(id, root, SEED, 6));
        market.submitCompletePlan(id, root, SEED, 6, signatures);
        record("4 submitCompletePlan");

        Completion[] memory list = new Completion[](1);
        list[0] = Completion(id, 1, keccak256("outputs"));
        for (uint256 i; i < 6; ++i) {
            vm.prank(executors[i]);
            market.commitCompletions(list);
        }
        record("5 commitCompletions of one node, six in all");

        Settlement memory s;
        s.steps = 1;
        s.evidenceRoot = keccak256("evidence");
        s.payments = new Payment[](7); // six executors, and one of them once more as the validator
        for (uint256 i; i < 7; ++i) {
            s.payments[i] = Payment(executors[i % 6], 150_000, false);
        }
        signatures = certify(3, settlementHash(id, s));
        market.settle(id, s, signatures);
        record("6 settle with 7 payments");

        id = request(2);
        submitPlan(id, 6);
        s.slashes = new Slash[](1);
        s.slashes[0] = Slash(node[0], 10e6);
        s.payments[6].fromSlash = true;
        signatures = certify(3, settlementHash(id, s));
        market.settle(id, s, signatures);
        record("7 settle with 7 payments, 1 slash");
    }
}
