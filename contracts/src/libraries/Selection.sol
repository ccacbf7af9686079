// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {SignedMath} from "@openzeppelin/contracts/utils/math/SignedMath.sol";
import {PlanTask, SnapshotEntry, SnapshotHeader} from "./Roots.sol";

/// @title The selection of the node that runs a task, in integer arithmetic
/// @notice The Solidity version of `splitup/protocol/planning/sampling_clocks.py`. Each node has an exponential clock per task, whose
/// rate is the node's weight: capped stake times squared relative speed times fairness. The node with the smallest
/// clock is selected (Efraimidis and Spirakis, 2006). Shared test vectors check that both versions compute the same
/// integers.
library Selection {
    // ---------------------------------------------------------------------------- constants

    uint8 internal constant EXECUTOR = 0;

    uint256 private constant STAKE_UNIT = 1_000_000; // micro-USDC per 1/1000 of weight: 1000 USDC have weight 1
    uint256 private constant MAX_STAKE_MILLI = 4_000;
    uint256 private constant MIN_SPEED_MILLI = 500; // relative to the reference node, in 1/1000
    uint256 private constant MAX_SPEED_MILLI = 2_000;
    uint256 private constant MAX_FAIRNESS = 4; // at the greatest credit; 1/4 at the lowest
    uint256 private constant MAX_CREDIT_MILLI = 8_000;
    uint256 private constant MAX_ETA_MS = 1 << 40;

    // --------------------------------------------------------------------------------- clock

    /// @notice Returns a node's clock for a task in a role: -log2((random + 1) / 2^64) in Q32 fixed point, times 2^64,
    /// divided by the weight. `random` is the first 64 bits of the hash of seed, role, task and node.
    /// @param seed The plan's seed.
    /// @param task Index of the task, below 2^32.
    /// @param role Role of the node in the task, `EXECUTOR` here.
    /// @param node Account of the node.
    /// @param weight_ The node's weight for the task, at least 1.
    function clock(bytes32 seed, uint64 task, uint8 role, address node, uint256 weight_)
        internal
        pure
        returns (uint256)
    {
        bytes32 key = sha256(abi.encodePacked("splitup/select/v2", seed, role, SafeCast.toUint32(task)));
        uint64 random = uint64(bytes8(sha256(abi.encodePacked(key, node)))); // the first 64 bits are wanted
        return (neglog2Q32(random) << 64) / weight_;
    }

    /// @notice Returns -log2((value + 1) / 2^64) in Q32 fixed point, rounded up. The bits of the fraction come from
    /// repeated squaring.
    function neglog2Q32(uint64 value) internal pure returns (uint256) {
        uint256 x = uint256(value) + 1;
        uint256 whole;
        for (uint256 rest = x >> 1; rest != 0; rest >>= 1) {
            ++whole;
        }
        uint256 mantissa = (x << 63) >> whole; // in [1, 2), in Q63 fixed point
        uint256 fraction;
        for (uint256 i; i < 32; ++i) {
            mantissa = (mantissa * mantissa) >> 63;
            fraction <<= 1;
            if (mantissa >= 1 << 64) {
                mantissa >>= 1;
                fraction |= 1;
            }
        }
        return (64 << 32) - ((whole << 32) | fraction);
    }

    // -------------------------------------------------------------------------------- weight

    /// @notice Returns a node's weight for a task in 1/1000, at least 1.
    /// @param entry The node's entry in the snapshot.
    /// @param task The task.
    /// @param header Header of the snapshot, with the figures of the reference node.
    /// @param isResident Whether the node has loaded the task.
    function weight(
        SnapshotEntry calldata entry,
        PlanTask calldata task,
        SnapshotHeader calldata header,
        bool isResident
    ) internal pure returns (uint256) {
        uint256 referenceMs = etaMs(
            task, header, header.rttMs, header.queueMs, header.speedMflops, header.bandwidthKbps, true
        );
        uint256 nodeMs =
            etaMs(task, header, entry.rttMs, entry.queueMs, entry.speedMflops, entry.bandwidthKbps, isResident);
        uint256 speed = referenceMs * 1000 / nodeMs;
        if (speed < MIN_SPEED_MILLI) speed = MIN_SPEED_MILLI;
        if (speed > MAX_SPEED_MILLI) speed = MAX_SPEED_MILLI;
        uint256 stake = entry.stakeMicroUsdc / STAKE_UNIT;
        if (stake > MAX_STAKE_MILLI) stake = MAX_STAKE_MILLI;
        uint256 product = stake * speed * speed * fairnessMilli(entry.creditMilli) / 1e9;
        return product == 0 ? 1 : product;
    }

    /// @notice Returns the estimated time until a node has run a task once, in ms from the time at which the task's
    /// inputs exist on another node.
    /// @param task The task.
    /// @param header Header of the snapshot, with the figures of the reference node.
    /// @param rttMs Round-trip time to the node.
    /// @param queueMs Time until the node has finished its present work.
    /// @param speedMflops The node's speed in 10^6 operations per second; 0 means unmeasured.
    /// @param bandwidthKbps The node's bandwidth in 10^3 bytes per second; 0 means unmeasured.
    /// @param isResident Whether the node has loaded the task; otherwise it must load the weights first.
    function etaMs(
        PlanTask calldata task,
        SnapshotHeader calldata header,
        uint256 rttMs,
        uint256 queueMs,
        uint256 speedMflops,
        uint256 bandwidthKbps,
        bool isResident
    ) internal pure returns (uint256 eta) {
        if (speedMflops == 0) speedMflops = header.speedMflops; // unmeasured: as the reference node
        if (bandwidthKbps == 0) bandwidthKbps = header.bandwidthKbps;
        eta = 1 + rttMs;
        uint256 waiting = queueMs;
        if (speedMflops != 0) eta += task.flops / (speedMflops * 1000);
        if (bandwidthKbps != 0) {
            eta += task.inputBytes / bandwidthKbps;
            if (!isResident) waiting += task.weightsBytes / bandwidthKbps;
        }
        if (waiting > task.readyMs) eta += waiting - task.readyMs;
        if (eta > MAX_ETA_MS) eta = MAX_ETA_MS;
    }

    /// @notice Returns the fairness factor of a node's credit in 1/1000: 4000 for the greatest credit, 1000 for none,
    /// 250 for the lowest.
    /// @param creditMilli The node's credit in 1/1000 of a share of work, from -8000 to 8000.
    function fairnessMilli(int64 creditMilli) internal pure returns (uint256) {
        uint256 change = (MAX_FAIRNESS - 1) * SignedMath.abs(creditMilli);
        return creditMilli < 0
            ? 1000 * MAX_CREDIT_MILLI / (MAX_CREDIT_MILLI + change)
            : 1000 * (MAX_CREDIT_MILLI + change) / MAX_CREDIT_MILLI;
    }
}
