// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// @notice Header of a snapshot, which the snapshot's root binds. The reference node has the medians of all entries;
/// speed and bandwidth are medians over the measured ones.
/// @param configuration Number of the committee configuration.
/// @param sequence Sequence number of the snapshot.
/// @param epoch Number of the attempt in which the members agreed on the snapshot.
/// @param rttMs Round-trip time of the reference node, in ms.
/// @param queueMs Time until the reference node has finished its present work, in ms.
/// @param speedMflops Speed of the reference node, in 10^6 operations per second; 0 means unmeasured.
/// @param bandwidthKbps Bandwidth of the reference node, in 10^3 bytes per second; 0 means unmeasured.
/// @param entryCount Number of entries.
/// @param heldCount Number of tasks that at least one node has loaded.
/// @param entriesRoot Merkle root over the entries, by ascending node.
/// @param heldRoot Merkle root over the loaded tasks and the classes of their nodes, by ascending task id.
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

/// @notice A live node in a snapshot. Entries are sorted by node.
/// @param node Account of the node.
/// @param operator Account of the party that runs the node.
/// @param signingKey Ed25519 key of the node's messages.
/// @param endpointHash SHA-256 of the entry's fields that no report needs: endpoint and locked stake.
/// @param stakeMicroUsdc Stake in micro-USDC.
/// @param rttMs Round-trip time to the node, in ms.
/// @param queueMs Time until the node has finished its present work, in ms.
/// @param speedMflops Measured speed in 10^6 operations per second; 0 means unmeasured.
/// @param bandwidthKbps Measured bandwidth in 10^3 bytes per second; 0 means unmeasured.
/// @param vramFreeBytes Free video memory in bytes.
/// @param creditMilli Fairness credit in 1/1000 of a share of work: positive if the node got less than its share.
/// @param classHash SHA-256 of the name of the node's determinism class. Nodes of one class compute identical bytes.
/// @param residentHash SHA-256 of the concatenated ids of the tasks that the node has loaded.
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

/// @notice Header of a plan, which the plan's root binds.
/// @param requestHash EIP-712 hash of the request.
/// @param executionId Id of the execution.
/// @param modelId Id of the model.
/// @param snapshotRoot Root of the snapshot that nodes are selected from.
/// @param seed Seed of the selection.
/// @param directoryHash SHA-256 over the nodes' keys, endpoints and exposures, and the executors' positions in their
/// lists. No report needs it.
/// @param taskCount Number of tasks.
/// @param tasksRoot Merkle root over the tasks, in the manifest's order.
struct PlanHeader {
    bytes32 requestHash;
    bytes32 executionId;
    bytes32 modelId;
    bytes32 snapshotRoot;
    bytes32 seed;
    bytes32 directoryHash;
    uint64 taskCount;
    bytes32 tasksRoot;
}

/// @notice One task of a plan, with the figures that the selection of its nodes depends on.
/// @param index Position in the manifest, from 0.
/// @param taskId Digest of the task's canonical encoding.
/// @param flops Floating-point operations of one step.
/// @param weightsBytes Size of the weights.
/// @param inputBytes Size of the inputs of one step.
/// @param readyMs Time until the first inputs exist if reference nodes run all tasks before this one, in ms.
/// @param crossesClasses Whether the model has a tolerance for every output of the task, so that members can verify it
/// in a class in which they cannot recompute.
/// @param verifiable Whether enough nodes have loaded the task for it to be verified.
/// @param candidatesHash SHA-256 of the list of nodes: the executor first, then its fallbacks.
struct PlanTask {
    uint64 index;
    bytes32 taskId;
    uint64 flops;
    uint64 weightsBytes;
    uint64 inputBytes;
    uint64 readyMs;
    bool crossesClasses;
    bool verifiable;
    bytes32 candidatesHash;
}

/// @title The hashes of snapshots and plans
/// @notice The Solidity version of `splitup/messages/snapshots.py` and `plans.py`. Every hash of a struct is SHA-256 over abi.encode of a tag and
/// the struct.
library Roots {
    bytes32 private constant SNAPSHOT = keccak256("splitup/snapshot/v2");
    bytes32 private constant ENTRY = keccak256("splitup/snapshot-entry/v2");
    bytes32 private constant HELD = keccak256("splitup/snapshot-task/v3");
    bytes32 private constant PLAN = keccak256("splitup/plan/v2");
    bytes32 private constant TASK = keccak256("splitup/plan-task/v3");

    /// @notice Returns the root of a snapshot.
    function snapshotRoot(SnapshotHeader calldata header) internal pure returns (bytes32) {
        return sha256(abi.encode(SNAPSHOT, header));
    }

    /// @notice Returns the leaf of an entry in the tree of a snapshot's entries.
    function entryLeaf(SnapshotEntry calldata entry) internal pure returns (bytes32) {
        return sha256(abi.encode(ENTRY, entry));
    }

    /// @notice Returns the leaf of a task in the tree of a snapshot's loaded tasks.
    /// @param taskId Id of the task.
    /// @param ruled Hashes of the determinism classes that enough operators have and members can recompute in.
    /// @param unruled Hashes of the other classes that enough operators have.
    function heldLeaf(bytes32 taskId, bytes32[] calldata ruled, bytes32[] calldata unruled)
        internal
        pure
        returns (bytes32)
    {
        return sha256(
            abi.encode(HELD, taskId, sha256(abi.encodePacked(ruled)), sha256(abi.encodePacked(unruled)))
        );
    }

    /// @notice Returns the root of a plan.
    function planRoot(PlanHeader calldata header) internal pure returns (bytes32) {
        return sha256(abi.encode(PLAN, header));
    }

    /// @notice Returns the leaf of a task in the tree of a plan's tasks.
    function taskLeaf(PlanTask calldata task) internal pure returns (bytes32) {
        return sha256(abi.encode(TASK, task));
    }

    /// @notice Returns the hash of a list of loaded tasks.
    function residentHash(bytes32[] calldata resident) internal pure returns (bytes32) {
        return sha256(abi.encodePacked(resident));
    }

    /// @notice Returns the hash of a task's list of nodes.
    /// @dev abi.encodePacked pads the elements of an array to 32 bytes.
    function candidatesHash(address[] calldata candidates) internal pure returns (bytes32) {
        return sha256(abi.encodePacked(candidates));
    }
}
