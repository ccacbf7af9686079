// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {NodeRegistry} from "../src/NodeRegistry.sol";
import {TestUSDC} from "../src/TestUSDC.sol";
import {accountOf, amountOf, pack} from "../src/libraries/AccountAmount.sol";

/// @dev Properties for all values at once, which `make symbolic` checks with halmos; forge runs none of them.
/// The divisions in `Selection.weight` are beyond the solver: nothing was decided in four minutes.
contract SymbolicTest {
    TestUSDC internal usdc;
    NodeRegistry internal nodes;

    function setUp() public {
        usdc = new TestUSDC();
        nodes = new NodeRegistry(address(this), IERC20(address(usdc)), 7 days);
        nodes.setMarket(address(this)); // this contract locks and slashes
        usdc.mint(address(this), 2200e6);
        usdc.approve(address(nodes), 2200e6);
        nodes.register(bytes32(uint256(1)), 12, "");
    }

    function one(uint96 amount) internal view returns (bytes32[] memory list) {
        list = new bytes32[](1);
        list[0] = pack(address(this), amount);
    }

    /// @dev A packed entry holds account and amount, and sorts by account.
    function check_packing(address a, uint96 x, address b, uint96 y) external pure {
        bytes32 packed = pack(a, x);
        assert(accountOf(packed) == a && amountOf(packed) == x);
        if (a < b) assert(packed < pack(b, y));
    }

    /// @dev No lock touches the reserve or exceeds the stake, and none is below the floor or what was stated.
    function check_lock(uint96 first, uint96 second) external {
        nodes.lock(one(first), false);
        nodes.lock(one(second), false);
        uint256 locked = nodes.nodeOf(address(this)).locked;
        assert(first >= nodes.EXPOSURE_FLOOR() && second >= nodes.EXPOSURE_FLOOR());
        assert(locked == uint256(first) + second); // there are no offences
        assert(locked + nodes.VALIDATION_RESERVE() <= 2200e6);
    }

    /// @dev A lock that is late never reverts for lack of stake: it is whole or nothing.
    function check_late_lock(uint96 first, uint96 second) external {
        nodes.lock(one(first), true);
        uint256 locked = nodes.nodeOf(address(this)).locked;
        assert(locked == 0 || locked == first);
        nodes.lock(one(second), true);
        uint256 both = nodes.nodeOf(address(this)).locked;
        assert(both == locked || both == locked + second);
        assert(both + nodes.VALIDATION_RESERVE() <= 2200e6);
    }

    /// @dev An offender's exposure grows, to at most half of what is free.
    function check_raise(uint96 slashed, uint96 amount) external {
        nodes.slash(one(slashed), one(100e6));
        uint256 stake = nodes.nodeOf(address(this)).stake;
        uint256 offences = nodes.nodeOf(address(this)).offences;
        nodes.lock(one(amount), false);
        uint256 locked = nodes.nodeOf(address(this)).locked;
        assert(offences == (slashed >= nodes.EXPOSURE_FLOOR() / 10 ? 1 : 0));
        assert(locked >= amount && locked <= uint256(amount) * (offences == 0 ? 1 : 4));
        assert(locked + nodes.VALIDATION_RESERVE() <= stake);
    }

    /// @dev A slash takes the smallest of what is asked for, what is exposed and what is staked, and all money stays.
    function check_slash(uint96 amount, uint96 exposure) external {
        (bytes32[] memory taken, uint256 total) = nodes.slash(one(amount), one(exposure));
        assert(amountOf(taken[0]) == total);
        assert(total <= amount && total <= uint256(exposure) + nodes.EXPOSURE_FLOOR());
        assert(total + nodes.nodeOf(address(this)).stake == 2200e6);
        assert(usdc.balanceOf(address(this)) == total);
    }

    function check_nobody_is_slashed_before_commitments(uint96 amount) external {
        bytes32[] memory none = new bytes32[](0);
        (, uint256 total) = nodes.slash(one(amount), none);
        assert(total == 0);
    }
}
