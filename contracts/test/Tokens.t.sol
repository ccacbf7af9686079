// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {ERC20} from "@openzeppelin/contracts/token/ERC20/ERC20.sol";
import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {MarketBase} from "./MarketBase.sol";
import {Market} from "../src/Market.sol";
import {NodeRegistry} from "../src/NodeRegistry.sol";
import {TestUSDC} from "../src/TestUSDC.sol";
import {IMarket, Settlement} from "../src/interfaces/IMarket.sol";
import {INodeRegistry} from "../src/interfaces/INodeRegistry.sol";
import {pack} from "../src/libraries/AccountAmount.sol";

/// @dev A token that can misbehave: charge a fee on transfers, return false, or call back.
contract FaultyToken is ERC20("Faulty", "FAULTY") {
    uint256 public fee;
    bool public returnsFalse;
    address public target; // called back before a transfer ends
    bytes public callback;
    bytes public failure; // what the callback reverted with

    function mint(address to, uint256 amount) external {
        _mint(to, amount);
    }

    function setFee(uint256 fee_) external {
        fee = fee_;
    }

    function setReturnsFalse(bool returnsFalse_) external {
        returnsFalse = returnsFalse_;
    }

    function setCallback(address target_, bytes calldata callback_) external {
        (target, callback) = (target_, callback_);
    }

    function transfer(address to, uint256 amount) public override returns (bool) {
        return _move(msg.sender, to, amount);
    }

    function transferFrom(address from, address to, uint256 amount) public override returns (bool) {
        if (from != address(this)) _spendAllowance(from, msg.sender, amount);
        return _move(from, to, amount);
    }

    function _move(address from, address to, uint256 amount) internal returns (bool) {
        if (returnsFalse) return false;
        _transfer(from, to, amount - fee);
        if (target != address(0)) {
            address once = target;
            target = address(0);
            (bool success, bytes memory result) = once.call(callback);
            if (!success) failure = result;
        }
        return true;
    }
}

/// @dev Attack A23 of docs/security.md: reentrancy, misbehaving tokens, forced ether.
contract TokensTest is MarketBase {
    FaultyToken internal token;

    function setUp() public override {
        super.setUp();
        token = new FaultyToken();
        nodes = deployNodes(address(token), UNBONDING);
        market = deployMarket(address(token), address(committee), address(nodes), address(models));
        nodes.setMarket(address(market));
        usdc = TestUSDC(address(token)); // for assertConserved
        token.mint(client, 1000e6);
        vm.prank(client);
        token.approve(address(market), type(uint256).max);
        token.mint(address(token), 1000e6); // the token itself is an account in its callbacks
        token.mint(node[0], NODE_STAKE);
        vm.prank(node[0]);
        token.approve(address(nodes), type(uint256).max);
    }

    function depositAs(address account, uint256 amount) internal {
        vm.prank(account);
        market.deposit(amount);
    }

    function test_a23_a_token_that_charges_a_fee_is_refused() public {
        token.setFee(1);
        refuse(abi.encodeWithSelector(IMarket.TransferShort.selector, 99, 100));
        depositAs(client, 100);
        refuse(abi.encodeWithSelector(INodeRegistry.TransferShort.selector, NODE_STAKE - 1, NODE_STAKE));
        vm.prank(node[0]);
        nodes.register(bytes32(uint256(1)), 12, "");
        assertConserved();
    }

    function test_a23_a_token_that_returns_false_is_refused() public {
        depositAs(client, 100);
        token.setReturnsFalse(true);
        bytes memory reason = abi.encodeWithSelector(SafeERC20.SafeERC20FailedOperation.selector, address(token));
        refuse(reason);
        depositAs(client, 100);
        refuse(reason);
        vm.prank(client);
        market.withdraw(100);
        assertEq(market.balanceOf(client), 100);
        assertConserved();
    }

    function test_a23_reentering_a_deposit_takes_nothing() public {
        token.setCallback(address(market), abi.encodeCall(market.deposit, (50)));
        refuse(abi.encodeWithSelector(IMarket.TransferShort.selector, 150, 100));
        depositAs(client, 100); // otherwise one transfer would be credited as two deposits
        assertConserved();
        assertEq(market.totalBalances(), 0);
    }

    function test_a23_reentering_a_withdrawal_takes_nothing_twice() public {
        depositAs(client, 100);
        depositAs(address(token), 100);
        token.setCallback(address(market), abi.encodeCall(market.withdraw, (101)));
        vm.prank(client);
        market.withdraw(100);
        require(bytes4(token.failure()) == IMarket.BalanceTooSmall.selector);
        token.setCallback(address(market), abi.encodeCall(market.withdraw, (100)));
        vm.expectRevert(); // the callback takes tokens out, so less arrives than was sent: the deposit reverts
        depositAs(client, 7);
        assertEq(market.balanceOf(address(token)), 100);
        assertConserved();
    }

    function test_a23_reentering_a_settlement_settles_once() public {
        vm.prank(node[0]);
        nodes.register(bytes32(uint256(1)), 12, "");
        depositAs(client, 10e6);
        bytes32 id = request(1);
        submitPlan(id, 1);
        commitAll(id, 1);
        Settlement memory s = makeSettlement(1e6, 5e6, 1e6);
        s.slashes[0] = pack(node[0], 5e6);
        bytes memory signatures = certify(3, settlementHash(id, s));
        token.setCallback(address(market), abi.encodeCall(market.settle, (id, s, recorded[id], signatures)));
        market.settle(id, s, recorded[id], signatures); // the token calls back when the registry sends the stake
        require(bytes4(token.failure()) == IMarket.StatusInvalid.selector);
        assertEq(nodes.nodeOf(node[0]).stake, NODE_STAKE - 5e6);
        assertConserved();
    }

    function test_a23_forced_ether_and_stray_tokens_change_nothing() public {
        depositAs(client, 100);
        vm.deal(address(market), 1 ether); // as a block reward or a self-destructing contract can
        token.mint(address(market), 55);
        assertEq(address(market).balance, 1 ether);
        assertEq(market.totalBalances(), 100);
        require(market.conserved());
        vm.prank(client);
        market.withdraw(100);
        (bool success,) = address(market).call{value: 1}("");
        require(!success, "the market accepts ether");
    }
}
