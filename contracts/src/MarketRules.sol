// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {IMarket, Parameters} from "./interfaces/IMarket.sol";

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

    /// @notice Reverts unless every parameter is in its range, the expected loss of a wrong result exceeds its gain,
    /// and the unbonding period is longer than every execution.
    /// @dev The condition is p (1-r)^k (R+S) > C+B, with C = 1000 in units of 1/1000 of C. Both sides are multiplied
    /// by the denominators, so the comparison is exact.
    /// @param p The parameters.
    /// @param unbonding The nodes' unbonding period, in seconds.
    function check(Parameters calldata p, uint256 unbonding) external pure {
        _require(p.samplingBps > 0 && p.samplingBps <= BPS, "samplingBps");
        _require(p.collusionBps < BPS, "collusionBps");
        _require(p.treasuryBps > 0 && p.treasuryBps <= BPS, "treasuryBps");
        _require(p.feeBps <= MAX_FEE_BPS, "feeBps");
        _require(p.tieBreakers <= MAX_TIE_BREAKERS, "tieBreakers");
        _require(p.settlementGraceS <= MAX_GRACE_S, "settlementGraceS");
        _require(p.maxDeadlineS <= MAX_DEADLINE_S, "maxDeadlineS");
        _require(p.minDeadlineS > 0 && p.minDeadlineS <= p.maxDeadlineS, "minDeadlineS");
        _require(p.minPrice > 0, "minPrice");
        uint256 loss =
            p.samplingBps * (BPS - p.collusionBps) ** p.tieBreakers * (uint256(p.rewardMilli) + p.slashMilli);
        uint256 gain = (MILLI + p.validationBonusMilli) * BPS ** (uint256(p.tieBreakers) + 1);
        uint256 scale = MICRO / MILLI;
        require(
            loss > gain,
            IMarket.ParametersUnsafe(
                loss * scale / BPS ** (uint256(p.tieBreakers) + 1), (MILLI + p.validationBonusMilli) * scale
            )
        );
        uint256 longest = uint256(p.maxDeadlineS) + p.settlementGraceS;
        require(unbonding > longest, IMarket.UnbondingTooShort(longest, unbonding));
    }

    function _require(bool holds, string memory parameter) private pure {
        require(holds, IMarket.ParameterInvalid(parameter));
    }
}
