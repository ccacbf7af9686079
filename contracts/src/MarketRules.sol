// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {IMarket, Parameters} from "./interfaces/IMarket.sol";
import {INodeRegistry} from "./interfaces/INodeRegistry.sol";
import {SNAPSHOT_AGE_S} from "./libraries/SnapshotAge.sol";

/// @title Checks of the market's parameters
/// @notice The market deploys this contract in its constructor and calls it whenever parameters are set. The check is
/// a contract of its own because the market's code is close to the limit of 24,576 bytes.
contract MarketRules {
    uint256 internal constant BPS = 10_000;
    uint256 internal constant MILLI = 1_000;
    uint256 internal constant MICRO = 1_000_000;
    uint256 internal constant MAX_TIE_BREAKERS = 8; // keeps the powers below within 256 bits
    uint256 internal constant MAX_FEE_BPS = 1_000;
    uint32 internal constant MAX_GRACE_S = 30 days; // bounds how long a client's money can be locked
    uint32 internal constant MAX_DEADLINE_S = 30 days; // likewise

    INodeRegistry internal immutable nodes;

    /// @param nodes_ The registry that states the floor of exposures and the unbonding period.
    constructor(INodeRegistry nodes_) {
        nodes = nodes_;
    }

    /// @notice Reverts unless every parameter is in its range, the expected loss of a wrong result exceeds its gain,
    /// and the unbonding period is longer than every execution and the age of its snapshot.
    /// @dev The condition is p (1-r)^k (R+S+F) > C+B+G with the floor of exposures F and the gain outside the market G,
    /// both in micro-USDC; everything else is in units of C. It holds for every C if and only if p (1-r)^k (R+S) > C+B,
    /// with C = 1000 in units of 1/1000 of C, and p (1-r)^k F >= G. All sides are multiplied by the denominators, so
    /// the comparisons are exact.
    /// @param p The parameters.
    function check(Parameters calldata p) external view {
        _require(p.samplingBps > 0 && p.samplingBps <= BPS, "samplingBps");
        _require(p.collusionBps < BPS, "collusionBps");
        _require(p.treasuryBps > 0 && p.treasuryBps <= BPS, "treasuryBps");
        _require(p.feeBps <= MAX_FEE_BPS, "feeBps");
        _require(p.tieBreakers <= MAX_TIE_BREAKERS, "tieBreakers");
        _require(p.settlementGraceS <= MAX_GRACE_S, "settlementGraceS");
        _require(p.maxDeadlineS <= MAX_DEADLINE_S, "maxDeadlineS");
        _require(p.minDeadlineS > 0 && p.minDeadlineS <= p.maxDeadlineS, "minDeadlineS");
        _require(p.reservationBps > 0 && p.reservationBps <= BPS, "reservationBps");
        _require(p.rewardMilli > 0, "rewardMilli"); // prices are divided by it
        uint256 found = p.samplingBps * (BPS - p.collusionBps) ** p.tieBreakers; // p (1-r)^k
        uint256 one = BPS ** (uint256(p.tieBreakers) + 1); // the unit of `found`
        uint256 loss = found * (uint256(p.rewardMilli) + p.slashMilli);
        uint256 gain = (MILLI + p.validationBonusMilli) * one;
        uint256 scale = MICRO / MILLI;
        require(
            loss > gain,
            IMarket.ParametersUnsafe(
                loss * scale / one, (MILLI + p.validationBonusMilli) * scale
            )
        );
        uint256 floor = found * nodes.EXPOSURE_FLOOR();
        require(floor >= p.outsideGain * one, IMarket.OutsideGainTooHigh(floor / one, p.outsideGain));
        uint256 longest = uint256(p.maxDeadlineS) + p.settlementGraceS + SNAPSHOT_AGE_S;
        uint256 unbonding = nodes.unbondingPeriod();
        require(unbonding > longest, IMarket.UnbondingTooShort(longest, unbonding));
    }

    function _require(bool holds, string memory parameter) private pure {
        require(holds, IMarket.ParameterInvalid(parameter));
    }
}
