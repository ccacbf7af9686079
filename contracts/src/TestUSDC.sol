// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {ERC20} from "@openzeppelin/contracts/token/ERC20/ERC20.sol";
import {ERC20Permit} from "@openzeppelin/contracts/token/ERC20/extensions/ERC20Permit.sol";

/// @title A stand-in for USDC on development networks
/// @notice Anybody mints any amount. It has no value and must never be deployed where it could be
/// taken for money; on a real network the market uses the real USDC.
contract TestUSDC is ERC20, ERC20Permit {
    constructor() ERC20("Test USD Coin", "USDC") ERC20Permit("Test USD Coin") {}

    /// @notice Creates `amount` micro-USDC for `to`; open to everybody, on purpose.
    function mint(address to, uint256 amount) external {
        _mint(to, amount);
    }

    /// @inheritdoc ERC20
    function decimals() public pure override returns (uint8) {
        return 6;
    }
}
