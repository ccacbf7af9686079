// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {SignedMath} from "@openzeppelin/contracts/utils/math/SignedMath.sol";
import {PlanTask, SnapshotEntry, SnapshotHeader} from "./Roots.sol";

/// @title Who runs a task, in integers
/// @notice Solidity's side of `splitup/protocol/clocks.py`, which says what the terms mean: an
/// exponential clock per node over capped stake, squared relative speed and fairness; the smallest
/// wins. Shared vectors hold the two to the same bits.
library Selection {
    // ---------------------------------------------------------------------------- constants

    uint8 internal constant EXECUTOR = 0;
    uint8 internal constant VALIDATOR = 1;

    uint256 private constant STAKE_UNIT = 1_000_000; // micro-USDC in a thousandth of weight
    uint256 private constant MAX_STAKE_MILLI = 4_000;
    uint256 private constant MIN_SPEED_MILLI = 500;
    uint256 private constant MAX_SPEED_MILLI = 2_000;
    uint256 private constant MAX_FAIRNESS = 4;
    uint256 private constant MAX_CREDIT_MILLI = 8_000;
    uint256 private constant MAX_ETA_MS = 1 << 40;

    // --------------------------------------------------------------------------------- clock

    /// @notice The node's clock for a task in a role; smaller is better.
    function clock(bytes32 seed, uint64 task, uint8 role, address node, uint256 weight_)
        internal
        pure
        returns (uint256)
    {
        bytes32 key = sha256(abi.encodePacked("splitup/select/v2", seed, role, SafeCast.toUint32(task)));
        return (neglog2Q32(uint64(bytes8(sha256(abi.encodePacked(key, node))))) << 64) / weight_;
    }

    /// @notice -log2((value + 1) / 2^64) in Q32, rounded up: the digit recurrence for logarithms.
    function neglog2Q32(uint64 value) internal pure returns (uint256) {
        uint256 x = uint256(value) + 1;
        uint256 whole;
        for (uint256 rest = x >> 1; rest != 0; rest >>= 1) {
            ++whole;
        }
        uint256 mantissa = (x << 63) >> whole; // 1.0 to 2.0 in Q63
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

    /// @notice A node's weight for a task in thousandths, at least 1.
    function weight(
        SnapshotEntry calldata entry,
        PlanTask calldata task,
        SnapshotHeader calldata header,
        bool isResident
    ) internal pure returns (uint256) {
        uint256 base = etaMs(
            task, header, header.rttMs, header.queueMs, header.speedMflops, header.bandwidthKbps, true
        );
        uint256 own =
            etaMs(task, header, entry.rttMs, entry.queueMs, entry.speedMflops, entry.bandwidthKbps, isResident);
        uint256 speed = base * 1000 / own;
        if (speed < MIN_SPEED_MILLI) speed = MIN_SPEED_MILLI;
        if (speed > MAX_SPEED_MILLI) speed = MAX_SPEED_MILLI;
        uint256 stake = entry.stakeMicroUsdc / STAKE_UNIT;
        if (stake > MAX_STAKE_MILLI) stake = MAX_STAKE_MILLI;
        uint256 product = stake * speed * speed * fairnessMilli(entry.creditMilli) / 1e9;
        return product == 0 ? 1 : product;
    }

    /// @notice When a node would be done, in ms after the task's inputs exist elsewhere.
    function etaMs(
        PlanTask calldata task,
        SnapshotHeader calldata header,
        uint256 rttMs,
        uint256 queueMs,
        uint256 speedMflops,
        uint256 bandwidthKbps,
        bool isResident
    ) internal pure returns (uint256 eta) {
        if (speedMflops == 0) speedMflops = header.speedMflops; // unmeasured
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

    /// @notice The factor of a node's credit: 4 for the highest, 1 for none, a quarter for the lowest.
    function fairnessMilli(int64 creditMilli) internal pure returns (uint256) {
        uint256 size = SignedMath.abs(creditMilli);
        uint256 stretch = (MAX_FAIRNESS - 1) * size;
        return creditMilli < 0
            ? 1000 * MAX_CREDIT_MILLI / (MAX_CREDIT_MILLI + stretch)
            : 1000 * (MAX_CREDIT_MILLI + stretch) / MAX_CREDIT_MILLI;
    }
}
