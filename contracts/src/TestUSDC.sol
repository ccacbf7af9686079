// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {ERC20} from "@openzeppelin/contracts/token/ERC20/ERC20.sol";
import {ERC20Permit} from "@openzeppelin/contracts/token/ERC20/extensions/ERC20Permit.sol";

/// @title A test token in place of USDC, for development networks
/// @notice Anybody can mint any amount, so the token has no value. It must never be deployed where it could be
/// mistaken for money. On a real network the market uses the real USDC.
contract TestUSDC is ERC20, ERC20Permit {
    constructor() ERC20("Test USD Coin", "USDC") ERC20Permit("Test USD Coin") {}

    /// @notice Mints tokens. Anybody can call, on purpose.
    /// @param to Account that gets the tokens.
    /// @param amount Amount in micro-USDC.
    function mint(address to, uint256 amount) external {
        _mint(to, amount);
    }

    /// @inheritdoc ERC20
    function decimals() public pure override returns (uint8) {
        return 6;
    }
}
