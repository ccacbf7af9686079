// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {Base} from "./Base.sol";
import {Bls} from "../src/libraries/Bls.sol";
import {PlanTask, Roots, SnapshotEntry, SnapshotHeader} from "../src/libraries/Roots.sol";
import {Selection} from "../src/libraries/Selection.sol";

/// @dev One case of vectors/selection.json. tests/contracts/vectors.py writes the fields in this order.
struct SelectionCase {
    SnapshotHeader header;
    SnapshotEntry entry;
    PlanTask task;
    bool isResident;
    bytes32 seed;
    uint8 role;
    uint256 weight;
    uint256 clock;
    bytes32 snapshotRoot;
    bytes32 entryLeaf;
    bytes32 heldLeaf;
    bytes32[] ruledClasses;
    bytes32[] unruledClasses;
}

/// @dev Python and Solidity compute the same integers: Python writes the vectors, Solidity recomputes them.
contract VectorsTest is Base {
    function read(string memory name) internal view returns (bytes[] memory) {
        return vm.parseJsonBytesArray(vm.readFile(string.concat("test/vectors/", name)), ".cases");
    }

    function check(SelectionCase calldata c) external pure {
        uint256 weight = Selection.weight(c.entry, c.task, c.header, c.isResident);
        assertEq(weight, c.weight);
        assertEq(Selection.clock(c.seed, c.task.index, c.role, c.entry.node, weight), c.clock);
        require(Roots.snapshotRoot(c.header) == c.snapshotRoot, "another snapshot root");
        require(Roots.entryLeaf(c.entry) == c.entryLeaf, "another leaf");
        bytes32 held = Roots.heldLeaf(c.task.taskId, c.ruledClasses, c.unruledClasses);
        require(held == c.heldLeaf, "another leaf of a loaded task");
    }

    function test_selection_gives_the_same_integers() public view {
        bytes[] memory cases = read("selection.json");
        require(cases.length >= 200);
        for (uint256 i; i < cases.length; ++i) {
            this.check(abi.decode(cases[i], (SelectionCase)));
        }
    }

    function test_a17_python_and_solidity_agree_on_signatures() public view {
        bytes[] memory cases = read("bls.json");
        bytes memory previous = blsKey(1);
        for (uint256 i; i < cases.length; ++i) {
            (bytes memory key, bytes memory message, bytes memory signature, bytes32 seed) =
                abi.decode(cases[i], (bytes, bytes, bytes, bytes32));
            bytes memory signed = bytes.concat("\x15splitup/randomness/v1", message);
            require(Bls.isKey(key) && Bls.isSignature(key, signed, signature), "a good signature is refused");
            require(keccak256(signature) == seed, "another seed");
            require(!Bls.isSignature(previous, signed, signature), "another key's signature is accepted");
            previous = key;
        }
    }

    function clockOf(uint64 task) external pure returns (uint256) {
        return Selection.clock(0, task, Selection.EXECUTOR, address(1), 1);
    }

    /// @dev The hash has room for 32 bits of the task's index: a larger one reverts and is not truncated.
    function test_a_task_index_beyond_32_bits_reverts() public {
        uint64 tooLarge = 1 << 32;
        require(this.clockOf(tooLarge - 1) > 0);
        vm.expectRevert(abi.encodeWithSelector(SafeCast.SafeCastOverflowedUintDowncast.selector, 32, tooLarge));
        this.clockOf(tooLarge);
    }

    function test_logarithms_at_the_bounds() public pure {
        assertEq(Selection.neglog2Q32(0), 64 << 32);
        assertEq(Selection.neglog2Q32((1 << 63) - 1), 1 << 32);
        assertEq(Selection.neglog2Q32(type(uint64).max), 0);
    }
}
