// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {BondsBase} from "./BondsBase.sol";
import {IBonds, PlanVote, SnapshotVote} from "../src/interfaces/IBonds.sol";

contract BondsTest is BondsBase {
    function snapshotVote(uint256 key, uint64 epoch, bytes32 root) internal view returns (SnapshotVote memory) {
        return SnapshotVote(1, 7, epoch, root, sign(key, snapshotHash(1, 7, epoch, root)));
    }

    // ------------------------------------------------------------------------------ the bond

    function test_bonds_add_up_and_are_released_after_the_period() public {
        post(outsider, 10);
        post(outsider, 5);
        assertEq(bonds.bondOf(outsider), 15);
        vm.expectRevert(abi.encodeWithSelector(IBonds.ReleaseNotRequested.selector, outsider));
        vm.prank(outsider);
        bonds.release();
        vm.prank(outsider);
        bonds.requestRelease();
        uint64 time = uint64(block.timestamp + 14 days);
        assertEq(bonds.releasableAt(outsider), time);
        vm.expectRevert(abi.encodeWithSelector(IBonds.StillBonded.selector, outsider, time));
        vm.prank(outsider);
        bonds.release();
        vm.warp(time);
        vm.prank(outsider);
        bonds.release();
        assertEq(usdc.balanceOf(outsider), 15);
        assertEq(bonds.bondOf(outsider), 0);
    }

    function test_posting_again_cancels_a_requested_release() public {
        post(outsider, 10);
        vm.prank(outsider);
        bonds.requestRelease();
        post(outsider, 10);
        assertEq(bonds.releasableAt(outsider), 0);
    }

    function test_the_bond_of_a_current_or_announced_member_is_locked() public {
        address member = vm.addr(memberKeys[0]);
        vm.expectRevert(abi.encodeWithSelector(IBonds.MemberBonded.selector, member));
        vm.prank(member);
        bonds.requestRelease();

        confirmKey(blsKey(GROUP_SECRET), 3);
        post(vm.addr(0xA5), BOND);
        vm.prank(vm.addr(0xA5));
        bonds.requestRelease();
        memberKeys[3] = 0xA5;
        sortMemberKeys();
        committee.setMembers(makeMembers());
        vm.warp(block.timestamp + 15 days);
        vm.expectRevert(abi.encodeWithSelector(IBonds.MemberBonded.selector, vm.addr(0xA5)));
        vm.prank(vm.addr(0xA5));
        bonds.release();
    }

    function test_s85_a_release_that_was_requested_before_a_membership_is_void() public {
        confirmKey(blsKey(GROUP_SECRET), 3);
        address member = vm.addr(0xA5);
        uint256 former = memberKeys[3];
        post(member, BOND);
        vm.prank(member);
        bonds.requestRelease();
        memberKeys[3] = 0xA5;
        sortMemberKeys();
        committee.resetMembers(makeMembers());
        vm.warp(block.timestamp + 15 days);
        for (uint256 i; i < memberKeys.length; ++i) {
            if (memberKeys[i] == 0xA5) memberKeys[i] = former;
        }
        sortMemberKeys();
        committee.resetMembers(makeMembers());

        assertEq(bonds.releasableAt(member), 0);
        vm.expectRevert(abi.encodeWithSelector(IBonds.ReleaseNotRequested.selector, member));
        vm.prank(member);
        bonds.release(); // what it signed as a member can still be reported
        vm.prank(member);
        bonds.requestRelease();
        vm.warp(block.timestamp + 14 days);
        vm.prank(member);
        bonds.release();
        assertEq(usdc.balanceOf(member), BOND);
    }

    function test_zero_amounts_and_missing_bonds_are_refused() public {
        vm.expectRevert(abi.encodeWithSelector(IBonds.AmountMissing.selector));
        bonds.post(0);
        vm.expectRevert(abi.encodeWithSelector(IBonds.BondMissing.selector, outsider));
        vm.prank(outsider);
        bonds.requestRelease();
    }

    function test_constructor_and_owner_arguments_are_checked() public {
        vm.expectRevert(abi.encodeWithSelector(IBonds.PeriodTooLong.selector, 91 days, 90 days));
        deployBonds(address(usdc), 91 days);
        vm.expectRevert(abi.encodeWithSelector(IBonds.AddressMissing.selector));
        deployBonds(address(0), 1 days);
        vm.expectRevert(abi.encodeWithSelector(IBonds.AddressMissing.selector));
        bonds.setTreasury(address(0));
        vm.expectRevert();
        vm.prank(outsider);
        bonds.setTreasury(outsider);
    }

    // ------------------------------------------------------------------------------- reports

    function test_a19_two_roots_for_one_snapshot_cost_the_bond() public {
        uint256 key = memberKeys[0];
        vm.prank(reporter);
        bonds.reportSnapshots(snapshotVote(key, 1, "a"), snapshotVote(key, 1, "b"));
        assertEq(usdc.balanceOf(reporter), BOND / 5);
        assertEq(bonds.forfeited(), BOND - BOND / 5); // no transfer: the report does not depend on the treasury
        bonds.collectForfeited();
        assertEq(bonds.forfeited(), 0);
        assertEq(usdc.balanceOf(address(0x7777)), BOND - BOND / 5);
        assertEq(bonds.bondOf(vm.addr(key)), 0);

        post(vm.addr(key), BOND);
        SnapshotVote memory first = snapshotVote(key, 1, "c");
        SnapshotVote memory second = snapshotVote(key, 1, "b");
        vm.expectRevert(abi.encodeWithSelector(IBonds.AlreadyPunished.selector, vm.addr(key)));
        bonds.reportSnapshots(first, second);
    }

    function test_another_root_in_another_epoch_is_allowed() public {
        SnapshotVote memory first = snapshotVote(memberKeys[0], 1, "a");
        SnapshotVote memory second = snapshotVote(memberKeys[0], 2, "b");
        vm.expectRevert(abi.encodeWithSelector(IBonds.SlotsDiffer.selector));
        bonds.reportSnapshots(first, second);
        vm.expectRevert(abi.encodeWithSelector(IBonds.VotesAgree.selector));
        bonds.reportSnapshots(first, first);
    }

    function test_a19_two_plans_for_one_execution_cost_the_bond() public {
        uint256 key = memberKeys[0];
        bonds.reportPlans(planVote(key, ID, "a"), planVote(key, ID, "b"));
        assertEq(bonds.bondOf(vm.addr(key)), 0);
    }

    function test_s03_plans_for_two_wordings_of_a_request_cost_nothing() public {
        uint256 key = memberKeys[0];
        PlanVote memory first = planVote(key, ID, "3 steps", "a");
        PlanVote memory second = planVote(key, ID, "4 steps", "b");
        vm.expectRevert(abi.encodeWithSelector(IBonds.SlotsDiffer.selector));
        bonds.reportPlans(first, second);
        second.requestHash = "3 steps"; // not what the member signed
        vm.expectRevert();
        bonds.reportPlans(first, second);
        assertEq(bonds.bondOf(vm.addr(key)), BOND);
    }

    function test_votes_must_be_validly_signed_by_one_member() public {
        PlanVote memory first = planVote(memberKeys[0], ID, "a");
        PlanVote memory second = planVote(memberKeys[1], ID, "b");
        vm.expectRevert(
            abi.encodeWithSelector(IBonds.VotersDiffer.selector, vm.addr(memberKeys[0]), vm.addr(memberKeys[1]))
        );
        bonds.reportPlans(first, second);
        second.executionId = "other";
        vm.expectRevert(abi.encodeWithSelector(IBonds.SlotsDiffer.selector));
        bonds.reportPlans(first, second);
        second.executionId = ID;
        second.signature = new bytes(65);
        vm.expectRevert(abi.encodeWithSelector(IBonds.VoteInvalid.selector));
        bonds.reportPlans(first, second);
        PlanVote memory same = planVote(memberKeys[0], ID, "a");
        vm.expectRevert(abi.encodeWithSelector(IBonds.VotesAgree.selector));
        bonds.reportPlans(first, same);
    }

    function testFuzz_votes_of_other_accounts_cost_no_member_its_bond(uint256 key, bytes32 a, bytes32 b) public {
        key = key % 1000 + 0x1000; // of no member
        PlanVote memory first = planVote(key, ID, a);
        PlanVote memory second = planVote(key, ID, b);
        vm.expectRevert();
        bonds.reportPlans(first, second);
        assertEq(bonds.bondOf(vm.addr(memberKeys[0])), BOND);
        assertEq(usdc.balanceOf(address(bonds)), BOND);
    }
}
