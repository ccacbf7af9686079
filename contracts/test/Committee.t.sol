// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Ownable} from "@openzeppelin/contracts/access/Ownable.sol";
import {Base} from "./Base.sol";
import {ICommittee, Member} from "../src/interfaces/ICommittee.sol";
import {Bls} from "../src/libraries/Bls.sol";

contract CommitteeTest is Base {
    bytes32 internal constant ROOT = keccak256("root");

    function member(uint256 i) internal view returns (address) {
        return vm.addr(memberKeys[i]);
    }

    // ----------------------------------------------------------------------------- members

    function test_members_are_stored() public view {
        Member[] memory list = committee.members();
        assertEq(list.length, 4);
        require(list[2].account == member(2) && committee.isMember(member(2)));
        require(!committee.isMember(client));
        assertEq(committee.quorum(), 3);
        assertEq(committee.configuration(), 1);
    }

    function test_only_the_owner_sets_members() public {
        Member[] memory list = makeMembers();
        vm.expectRevert(abi.encodeWithSelector(Ownable.OwnableUnauthorizedAccount.selector, client));
        vm.prank(client);
        committee.setMembers(list);
    }

    function test_ownership_moves_in_two_steps() public {
        committee.transferOwnership(client);
        require(committee.owner() == address(this));
        vm.prank(client);
        committee.acceptOwnership();
        require(committee.owner() == client);
    }

    function test_member_count_must_be_3f_plus_1_from_4_to_31() public {
        uint256[4] memory counts = [uint256(1), 3, 6, 34];
        for (uint256 c; c < counts.length; ++c) {
            Member[] memory list = new Member[](counts[c]);
            for (uint256 i; i < counts[c]; ++i) {
                list[i] = Member(address(uint160(i + 1)), bytes32(i + 1), "");
            }
            vm.expectRevert(abi.encodeWithSelector(ICommittee.MemberCountInvalid.selector, counts[c]));
            committee.setMembers(list);
        }
    }

    function test_members_must_ascend() public {
        Member[] memory list = makeMembers();
        list[2] = list[1];
        vm.expectRevert(
            abi.encodeWithSelector(ICommittee.MembersNotAscending.selector, list[1].account, list[1].account)
        );
        committee.setMembers(list);
    }

    function test_member_needs_key_and_short_endpoint() public {
        Member[] memory list = makeMembers();
        list[0].signingKey = 0;
        vm.expectRevert(abi.encodeWithSelector(ICommittee.MemberKeyMissing.selector, list[0].account));
        committee.setMembers(list);
        list = makeMembers();
        list[3].endpoint = string(new bytes(257));
        vm.expectRevert(abi.encodeWithSelector(ICommittee.EndpointTooLong.selector, list[3].account, 257));
        committee.setMembers(list);
    }

    // --------------------------------------------------------------------- bulletin board

    function test_dealing_once_per_member_and_configuration() public {
        vm.prank(member(0));
        committee.postDealing("dealing");
        vm.expectRevert(abi.encodeWithSelector(ICommittee.DealingExists.selector, 1, member(0)));
        vm.prank(member(0));
        committee.postDealing("another");
        committee.resetMembers(makeMembers());
        vm.prank(member(0));
        committee.postDealing("dealing of the next configuration");
    }

    function test_dealings_come_from_members_and_are_bounded() public {
        vm.expectRevert(abi.encodeWithSelector(ICommittee.NotMember.selector, client));
        vm.prank(client);
        committee.postDealing("dealing");
        vm.expectRevert(abi.encodeWithSelector(ICommittee.BlobLengthInvalid.selector, 65537, 65536));
        vm.prank(member(1));
        committee.postDealing(new bytes(65537));
        vm.expectRevert(abi.encodeWithSelector(ICommittee.BlobLengthInvalid.selector, 0, 65536));
        vm.prank(member(1));
        committee.postDealing("");
    }

    function test_complaint_names_a_member() public {
        vm.prank(member(0));
        committee.postComplaint(member(1), "evidence");
        vm.expectRevert(abi.encodeWithSelector(ICommittee.NotMember.selector, client));
        vm.prank(member(0));
        committee.postComplaint(client, "evidence");
    }

    function confirm(uint256 i, bytes memory key) internal {
        vm.prank(member(i));
        committee.confirmGroupKey(keccak256(key), key);
    }

    function test_group_key_needs_a_quorum_of_equal_votes() public {
        bytes memory key = blsKey(GROUP_SECRET);
        confirm(0, key);
        confirm(1, key);
        confirm(2, blsKey(1));
        assertEq(committee.groupKey().length, 0);
        confirm(3, key);
        require(keccak256(committee.groupKey()) == keccak256(key));
        require(keccak256(committee.groupKeyOf(1)) == keccak256(key));
    }

    function test_members_vote_once_and_only_until_the_group_key_is_set() public {
        bytes memory key = blsKey(GROUP_SECRET);
        confirm(0, key);
        vm.expectRevert(abi.encodeWithSelector(ICommittee.VoteExists.selector, 1, member(0)));
        confirm(0, key);
        confirm(1, key);
        confirm(2, key);
        vm.expectRevert(abi.encodeWithSelector(ICommittee.GroupKeyExists.selector, 1));
        confirm(3, key);
        vm.expectRevert(abi.encodeWithSelector(ICommittee.GroupKeyExists.selector, 1));
        vm.prank(member(3));
        committee.postDealing("late");
    }

    function test_group_key_hash_must_match() public {
        bytes memory key = blsKey(GROUP_SECRET);
        vm.expectRevert(
            abi.encodeWithSelector(ICommittee.GroupKeyHashMismatch.selector, bytes32(uint256(1)), keccak256(key))
        );
        vm.prank(member(0));
        committee.confirmGroupKey(bytes32(uint256(1)), key);
    }

    function test_a17_group_key_must_be_a_point_of_the_subgroup() public {
        vm.expectRevert(abi.encodeWithSelector(ICommittee.GroupKeyInvalid.selector));
        confirm(0, "no point");
        bytes[2] memory bad = [new bytes(256), abi.encodePacked(blsKey(1))];
        bad[1][255] ^= 0x01; // off the curve
        for (uint256 k; k < bad.length; ++k) {
            committee.resetMembers(makeMembers());
            confirm(0, bad[k]);
            confirm(1, bad[k]);
            vm.expectRevert(abi.encodeWithSelector(ICommittee.GroupKeyInvalid.selector));
            confirm(2, bad[k]);
        }
    }

    // ---------------------------------------------------------------------------- handover

    /// @dev Announces three of the four members and a new one. Afterwards memberKeys are the keys of the next members.
    function beginHandover() internal returns (uint256 leaver) {
        confirmKey(blsKey(GROUP_SECRET), 3);
        leaver = memberKeys[3];
        memberKeys[3] = 0xA5;
        sortMemberKeys();
        committee.setMembers(makeMembers());
    }

    function test_a_handover_keeps_the_members_until_the_next_confirm_the_key() public {
        uint256 leaver = beginHandover();
        bytes memory key = blsKey(GROUP_SECRET);
        assertEq(committee.configuration(), 1);
        assertEq(committee.nextConfiguration(), 2);
        require(committee.isMember(vm.addr(leaver)) && !committee.isMember(vm.addr(0xA5)));
        require(committee.isMemberOf(2, vm.addr(0xA5)));

        vm.prank(vm.addr(leaver));
        committee.postDealing("dealing of the leaving member");
        vm.expectRevert(abi.encodeWithSelector(ICommittee.NotMember.selector, vm.addr(0xA5)));
        vm.prank(vm.addr(0xA5));
        committee.postDealing("a member that has no share yet");
        vm.prank(vm.addr(0xA5));
        committee.postComplaint(vm.addr(leaver), "complaint of a receiver");
        vm.expectRevert(abi.encodeWithSelector(ICommittee.NotMember.selector, vm.addr(leaver)));
        vm.prank(vm.addr(leaver));
        committee.confirmGroupKey(keccak256(key), key);

        confirmKey(key, 3);
        assertEq(committee.configuration(), 2);
        assertEq(committee.nextConfiguration(), 0);
        require(keccak256(committee.groupKey()) == keccak256(key));
        require(!committee.isMember(vm.addr(leaver)) && committee.isMember(vm.addr(0xA5)));
        require(committee.verifyRandomness("alpha", blsSign(GROUP_SECRET, "alpha")) != 0);
    }

    function test_a_handover_cannot_change_the_key() public {
        beginHandover();
        bytes memory other = blsKey(1);
        vm.expectRevert(abi.encodeWithSelector(ICommittee.GroupKeyChanged.selector, 2));
        confirm(0, other);
    }

    function test_quorums_of_an_earlier_configuration_can_still_be_checked() public {
        uint256[] memory old = memberKeys;
        beginHandover();
        uint256[] memory next = memberKeys;
        bytes memory announced = certify(3, ROOT);
        vm.expectRevert(abi.encodeWithSelector(ICommittee.ConfigurationUnknown.selector, 2));
        committee.requireQuorumOf(2, ROOT, announced); // not in force yet
        confirmKey(blsKey(GROUP_SECRET), 3);
        committee.requireQuorum(ROOT, certify(3, ROOT));
        memberKeys = old;
        committee.requireQuorumOf(1, ROOT, certify(4, ROOT));
        bytes memory signatures = certify(4, ROOT);
        vm.expectRevert(); // the leaving member is no longer a member
        committee.requireQuorum(ROOT, signatures);
        memberKeys = next;
    }

    function test_a_stuck_handover_can_be_replaced_or_reset() public {
        beginHandover();
        committee.setMembers(makeMembers());
        assertEq(committee.configuration(), 1);
        assertEq(committee.nextConfiguration(), 3);
        confirmKey(blsKey(GROUP_SECRET), 3);
        assertEq(committee.configuration(), 3);
        committee.resetMembers(makeMembers());
        assertEq(committee.configuration(), 4);
        assertEq(committee.groupKey().length, 0);
        require(committee.verifyRandomnessOf(3, "alpha", blsSign(GROUP_SECRET, "alpha")) != 0);
        vm.expectRevert(abi.encodeWithSelector(ICommittee.ConfigurationUnknown.selector, 2));
        committee.requireQuorumOf(2, ROOT, "");
    }

    // -------------------------------------------------------------------------- randomness

    function test_randomness_is_the_hash_of_the_groups_signature() public {
        confirmKey(blsKey(GROUP_SECRET), 3);
        bytes memory signature = blsSign(GROUP_SECRET, "alpha");
        require(committee.verifyRandomness("alpha", signature) == keccak256(signature));
    }

    function test_randomness_needs_a_group_key() public {
        bytes memory signature = blsSign(GROUP_SECRET, "alpha");
        vm.expectRevert(abi.encodeWithSelector(ICommittee.GroupKeyMissing.selector, 1));
        committee.verifyRandomness("alpha", signature);
    }

    function refuse(bytes memory message, bytes memory signature) internal {
        vm.expectRevert(abi.encodeWithSelector(ICommittee.RandomnessInvalid.selector, 1));
        committee.verifyRandomness(message, signature);
    }

    function test_a17_forged_randomness_is_refused() public {
        confirmKey(blsKey(GROUP_SECRET), 3);
        bytes memory signature = blsSign(GROUP_SECRET, "alpha");
        refuse("another alpha", signature);
        refuse("alpha", blsSign(GROUP_SECRET + 1, "alpha"));
        refuse("alpha", new bytes(128)); // the identity
        refuse("alpha", "");
        refuse("alpha", bytes.concat(signature, hex"00"));
        refuse("alpha", Bls.hashToCurve("a point of the subgroup"));
        bytes memory off = bytes.concat(signature);
        off[127] ^= 0x01; // off the curve
        refuse("alpha", off);
        bytes memory padded = bytes.concat(signature);
        padded[0] = 0x01; // not below the modulus
        refuse("alpha", padded);
    }

    function testFuzz_a17_a_signature_with_one_changed_bit_is_refused(uint256 index, uint8 bit, bytes calldata message)
        public
    {
        confirmKey(blsKey(GROUP_SECRET), 3);
        bytes memory signature = blsSign(GROUP_SECRET, message);
        committee.verifyRandomness(message, signature);
        signature[index % 128] ^= bytes1(uint8(1) << (bit % 8));
        refuse(message, signature);
    }

    // --------------------------------------------------------------------------- snapshots

    function test_snapshots_are_accepted_in_sequence() public {
        committee.submitSnapshot(1, 1, ROOT, certify(3, snapshotHash(1, 1, ROOT)));
        (uint64 sequence, bytes32 root) = committee.latestSnapshot();
        require(sequence == 1 && root == ROOT);
        bytes memory again = certify(3, snapshotHash(1, 1, ROOT));
        vm.expectRevert(abi.encodeWithSelector(ICommittee.SequenceInvalid.selector, 1, 2));
        committee.submitSnapshot(1, 1, ROOT, again);
        committee.submitSnapshot(2, 1, ROOT, certify(4, snapshotHash(1, 2, ROOT)));
    }

    function test_only_the_latest_64_snapshots_are_kept() public {
        assertEq(uint256(committee.snapshotRootOf(0)), 0);
        for (uint64 sequence = 1; sequence <= 65; ++sequence) {
            bytes32 root = keccak256(abi.encode(sequence));
            committee.submitSnapshot(sequence, 1, root, certify(3, snapshotHash(1, sequence, root)));
        }
        assertEq(uint256(committee.snapshotRootOf(1)), 0);
        require(committee.snapshotRootOf(2) == keccak256(abi.encode(uint64(2))));
        require(committee.snapshotRootOf(65) == keccak256(abi.encode(uint64(65))));
        assertEq(uint256(committee.snapshotRootOf(66)), 0);
    }

    function test_snapshot_of_another_epoch_or_configuration_is_refused() public {
        bytes memory stale = certify(3, snapshotHash(1, 1, 2, ROOT));
        vm.expectRevert();
        committee.submitSnapshot(1, 1, ROOT, stale);
        committee.setMembers(makeMembers());
        bytes memory signatures = certify(3, snapshotHash(1, 1, ROOT));
        vm.expectRevert(); // the recovered signers are no members, or not in ascending order
        committee.submitSnapshot(1, 1, ROOT, signatures);
    }

    // ------------------------------------------------------------------------ quorum check

    function expectRefusal(bytes memory signatures, bytes memory reason) internal {
        vm.expectRevert(reason);
        committee.requireQuorum(ROOT, signatures);
    }

    function test_quorum_accepts_3_and_4_of_4() public view {
        committee.requireQuorum(ROOT, certify(3, ROOT));
        committee.requireQuorum(ROOT, certify(4, ROOT));
    }

    function test_quorum_refuses_too_few() public {
        expectRefusal(certify(2, ROOT), abi.encodeWithSelector(ICommittee.QuorumTooSmall.selector, 2, 3));
        expectRefusal("", abi.encodeWithSelector(ICommittee.QuorumTooSmall.selector, 0, 3));
    }

    function test_quorum_refuses_bad_lengths() public {
        expectRefusal(
            abi.encodePacked(certify(3, ROOT), uint8(0)),
            abi.encodeWithSelector(ICommittee.SignaturesMalformed.selector, 196)
        );
        expectRefusal(
            new bytes(65 * 32), abi.encodeWithSelector(ICommittee.SignaturesMalformed.selector, 65 * 32)
        );
    }

    function test_quorum_refuses_repeated_and_unsorted_signers() public {
        bytes memory first = sign(memberKeys[0], ROOT);
        bytes memory second = sign(memberKeys[1], ROOT);
        expectRefusal(
            abi.encodePacked(first, second, second),
            abi.encodeWithSelector(ICommittee.SignersNotAscending.selector, member(1), member(1))
        );
        expectRefusal(
            abi.encodePacked(second, first, sign(memberKeys[2], ROOT)),
            abi.encodeWithSelector(ICommittee.SignersNotAscending.selector, member(1), member(0))
        );
    }

    function test_quorum_refuses_other_accounts() public {
        uint256 outsider = 0xB0B;
        bytes memory signatures = vm.addr(outsider) < member(0)
            ? abi.encodePacked(sign(outsider, ROOT), certify(2, ROOT))
            : abi.encodePacked(sign(memberKeys[0], ROOT), sign(outsider, ROOT), sign(outsider, ROOT));
        expectRefusal(signatures, abi.encodeWithSelector(ICommittee.NotMember.selector, vm.addr(outsider)));
    }

    function test_quorum_refuses_high_s_and_bad_v() public {
        bytes memory good = certify(2, ROOT);
        bytes32 digest = keccak256(abi.encodePacked("\x19\x01", separator(), ROOT));
        (uint8 v, bytes32 r, bytes32 s) = vm.sign(memberKeys[2], digest);
        uint256 order = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141;
        bytes memory refusal = abi.encodeWithSelector(ICommittee.SignatureInvalid.selector, 2);
        expectRefusal(abi.encodePacked(good, r, order - uint256(s), v == 27 ? uint8(28) : 27), refusal);
        expectRefusal(abi.encodePacked(good, r, s, uint8(29)), refusal);
        expectRefusal(abi.encodePacked(good, r, s, v - 27), refusal);
    }

    function testFuzz_a_signature_is_valid_for_one_hash(bytes32 signed, bytes32 claimed) public {
        bytes memory signatures = certify(3, signed);
        if (signed != claimed) vm.expectRevert();
        committee.requireQuorum(claimed, signatures);
    }
}
