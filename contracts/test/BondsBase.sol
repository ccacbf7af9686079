// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Base} from "./Base.sol";
import {Bonds} from "../src/Bonds.sol";
import {PlanVote} from "../src/interfaces/IBonds.sol";

/// @dev The network of Base with the bonds contract; the first member has a bond.
abstract contract BondsBase is Base {
    uint256 internal constant BOND = 5000e6;
    bytes32 internal constant ID = keccak256("execution");
    bytes32 internal constant SEED = keccak256("seed");
    Bonds internal bonds;
    address internal reporter = address(0x7001);
    address internal outsider = address(0x7002);

    function setUp() public override {
        super.setUp();
        bonds = deployBonds(address(usdc), 14 days);
        bonds.setTreasury(address(0x7777));
        post(vm.addr(memberKeys[0]), BOND);
    }

    function deployBonds(address token, uint64 period) internal returns (Bonds) {
        return Bonds(deploy("Bonds", abi.encode(this, token, committee, period)));
    }

    function post(address account, uint256 amount) internal {
        usdc.mint(account, amount);
        vm.prank(account);
        usdc.approve(address(bonds), amount);
        vm.prank(account);
        bonds.post(amount);
    }

    function planVote(uint256 key, bytes32 id, bytes32 root) internal view returns (PlanVote memory) {
        return planVote(key, id, "request", root);
    }

    function planVote(uint256 key, bytes32 id, bytes32 requestHash, bytes32 root)
        internal
        view
        returns (PlanVote memory)
    {
        bytes32 typeHash = keccak256(
            "Plan(uint64 configuration,bytes32 executionId,bytes32 requestHash,bytes32 planRoot,bytes32 seed,uint32 executors)"
        );
        uint64 configuration = committee.configuration();
        bytes32 structHash = keccak256(abi.encode(typeHash, configuration, id, requestHash, root, SEED, 3));
        return PlanVote(configuration, id, requestHash, root, abi.encode(SEED, 3), sign(key, structHash));
    }
}
