// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// @notice What a snapshot's root binds. The four figures are those of the reference node.
struct SnapshotHeader {
    uint64 configuration;
    uint64 sequence;
    uint64 epoch;
    uint64 rttMs;
    uint64 queueMs;
    uint64 speedMflops;
    uint64 bandwidthKbps;
    uint64 entryCount;
    uint64 heldCount;
    bytes32 entriesRoot;
    bytes32 heldRoot;
}

/// @notice A live node in a snapshot; entries stand by ascending node.
struct SnapshotEntry {
    address node;
    address operator;
    bytes32 signingKey;
    bytes32 endpointHash;
    uint64 stakeMicroUsdc;
    uint64 rttMs;
    uint64 queueMs;
    uint64 speedMflops;
    uint64 bandwidthKbps;
    uint64 vramFreeBytes;
    int64 creditMilli;
    bytes32 classHash;
    bytes32 residentHash;
}

/// @notice What a plan's root binds.
struct PlanHeader {
    bytes32 requestDigest;
    bytes32 executionId;
    bytes32 modelId;
    bytes32 snapshotRoot;
    bytes32 seed;
    bytes32 directoryHash;
    uint64 taskCount;
    bytes32 tasksRoot;
}

/// @notice One task of a plan, with the figures that decide who runs it.
struct PlanTask {
    uint64 index;
    bytes32 taskId;
    uint64 flops;
    uint64 weightsBytes;
    uint64 inputBytes;
    uint64 readyMs;
    bool verifiable;
    bytes32 candidatesHash;
}

/// @title How snapshots and plans become roots
/// @notice Solidity's side of `splitup/messages/`: SHA-256 over abi.encode, a tag first.
library Roots {
    bytes32 private constant SNAPSHOT = keccak256("splitup/snapshot/v2");
    bytes32 private constant ENTRY = keccak256("splitup/snapshot-entry/v2");
    bytes32 private constant HELD = keccak256("splitup/snapshot-task/v2");
    bytes32 private constant PLAN = keccak256("splitup/plan/v2");
    bytes32 private constant TASK = keccak256("splitup/plan-task/v2");

    function snapshotRoot(SnapshotHeader calldata header) internal pure returns (bytes32) {
        return sha256(abi.encode(SNAPSHOT, header));
    }

    function entryLeaf(SnapshotEntry calldata entry) internal pure returns (bytes32) {
        return sha256(abi.encode(ENTRY, entry));
    }

    /// @param classes Hashes of the determinism classes that may run the task; none means any.
    function heldLeaf(bytes32 taskId, bytes32[] calldata classes) internal pure returns (bytes32) {
        return sha256(abi.encode(HELD, taskId, sha256(abi.encodePacked(classes))));
    }

    function planRoot(PlanHeader calldata header) internal pure returns (bytes32) {
        return sha256(abi.encode(PLAN, header));
    }

    function taskLeaf(PlanTask calldata task) internal pure returns (bytes32) {
        return sha256(abi.encode(TASK, task));
    }

    /// @dev abi.encodePacked pads the elements of an array to words.
    function residentHash(bytes32[] calldata resident) internal pure returns (bytes32) {
        return sha256(abi.encodePacked(resident));
    }

    function candidatesHash(address[] calldata candidates) internal pure returns (bytes32) {
        return sha256(abi.encodePacked(candidates));
    }
}
