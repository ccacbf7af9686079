// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {BondsBase} from "./BondsBase.sol";
import {IBonds, OpenedEntry, OpenedSnapshot, OpenedTask, PlanVote} from "../src/interfaces/IBonds.sol";
import {ICommittee} from "../src/interfaces/ICommittee.sol";
import {Request} from "../src/interfaces/IMarket.sol";
import {PlanHeader, PlanTask, SnapshotEntry, SnapshotHeader} from "../src/libraries/Roots.sol";

/// @dev Reports with Merkle proofs of one task of a plan. The plan has one task, which three nodes (0x2001, 0x2003,
/// 0x2005) have loaded; the first two are of the class that members can recompute in, the third is of another class
/// that enough operators have. tests/chain/test_bonds.py checks that Python
/// makes the same proofs.
contract BondsOpeningsTest is BondsBase {
    bytes32 internal constant TASK = keccak256("task");
    bytes32 internal constant CLASS = keccak256("class");
    bytes32 internal constant UNRULED_CLASS = keccak256("another class");
    uint64 internal constant NODES = 3;
    uint256 internal constant OUTSIDER_KEY = 0xB7;

    // ------------------------------------------------------------------- snapshot and plan

    function account(uint64 index) internal pure returns (address) {
        return address(uint160(0x2001 + 2 * index));
    }

    function makeResident() internal pure returns (bytes32[] memory resident) {
        resident = new bytes32[](2);
        resident[1] = TASK;
    }

    function makeEntry(uint64 index) internal pure returns (SnapshotEntry memory) {
        return SnapshotEntry({
            node: account(index),
            operator: account(index),
            signingKey: bytes32(uint256(index) + 1),
            endpointHash: keccak256("endpoint"),
            stakeMicroUsdc: 2200e6,
            rttMs: 10,
            queueMs: 0,
            speedMflops: 1000,
            bandwidthKbps: 1000,
            vramFreeBytes: 1 << 33,
            creditMilli: 0,
            classHash: index < 2 ? CLASS : UNRULED_CLASS,
            residentHash: sha256(abi.encodePacked(makeResident()))
        });
    }

    function leafOf(uint64 index) internal pure returns (bytes32) {
        if (index >= NODES) return 0;
        return sha256(abi.encode(keccak256("splitup/snapshot-entry/v2"), makeEntry(index)));
    }

    function pairOf(uint64 pair) internal pure returns (bytes32) {
        return sha256(bytes.concat(leafOf(2 * pair), leafOf(2 * pair + 1)));
    }

    function openEntry(uint64 index) internal pure returns (OpenedEntry memory) {
        bytes32[] memory proof = new bytes32[](2);
        proof[0] = leafOf(index ^ 1);
        proof[1] = pairOf((index >> 1) ^ 1);
        return OpenedEntry(makeEntry(index), index, proof, makeResident());
    }

    function makeHeader() internal pure returns (SnapshotHeader memory) {
        bytes32 ruled = sha256(abi.encodePacked(list(CLASS)));
        bytes32 unruled = sha256(abi.encodePacked(list(UNRULED_CLASS)));
        return SnapshotHeader({
            configuration: 1,
            sequence: 7,
            epoch: 1,
            rttMs: 10,
            queueMs: 0,
            speedMflops: 1000,
            bandwidthKbps: 1000,
            entryCount: NODES,
            heldCount: 1,
            entriesRoot: sha256(bytes.concat(pairOf(0), pairOf(1))),
            heldRoot: sha256(abi.encode(keccak256("splitup/snapshot-task/v3"), TASK, ruled, unruled))
        });
    }

    function list(bytes32 class) internal pure returns (bytes32[] memory classes) {
        classes = new bytes32[](1);
        classes[0] = class;
    }

    function openSnapshot() internal pure returns (OpenedSnapshot memory) {
        return OpenedSnapshot(makeHeader(), list(CLASS), list(UNRULED_CLASS), 0, new bytes32[](0));
    }

    function rootOf(SnapshotHeader memory header) internal pure returns (bytes32) {
        return sha256(abi.encode(keccak256("splitup/snapshot/v2"), header));
    }

    function rootOf(PlanHeader memory plan) internal pure returns (bytes32) {
        return sha256(abi.encode(keccak256("splitup/plan/v2"), plan));
    }

    /// @dev A plan of one task with these candidates, and a member's vote for it.
    function makePlan(address[] memory candidates)
        internal
        view
        returns (PlanVote memory vote, OpenedTask memory opened)
    {
        return makePlan(candidates, false);
    }

    function makePlan(address[] memory candidates, bool crossesClasses)
        internal
        view
        returns (PlanVote memory vote, OpenedTask memory opened)
    {
        opened.candidates = candidates;
        opened.task = PlanTask({
            index: 0,
            taskId: TASK,
            flops: 1e6,
            weightsBytes: 1 << 20,
            inputBytes: 1 << 10,
            readyMs: 0,
            crossesClasses: crossesClasses,
            verifiable: true,
            candidatesHash: sha256(abi.encodePacked(candidates))
        });
        opened.plan = PlanHeader({
            requestHash: "request",
            executionId: ID,
            modelId: MODEL,
            snapshotRoot: rootOf(makeHeader()),
            seed: SEED,
            directoryHash: keccak256("directory"),
            taskCount: 1,
            tasksRoot: sha256(abi.encode(keccak256("splitup/plan-task/v3"), opened.task))
        });
        vote = planVote(memberKeys[0], ID, rootOf(opened.plan));
    }

    function list(address first) internal pure returns (address[] memory candidates) {
        candidates = new address[](1);
        candidates[0] = first;
    }

    function list(address first, address second) internal pure returns (address[] memory candidates) {
        candidates = new address[](2);
        (candidates[0], candidates[1]) = (first, second);
    }

    function invalid(uint8 part) internal pure returns (bytes memory) {
        return abi.encodeWithSelector(IBonds.OpeningInvalid.selector, part);
    }

    function notACandidate(uint64 index) internal pure returns (bytes memory) {
        return abi.encodeWithSelector(IBonds.NotACandidate.selector, account(index));
    }

    /// @dev The arguments are made before vm.expectRevert, because SHA-256 is a call of a precompile, too.
    function refuseChoice(
        bytes memory reason,
        PlanVote memory vote,
        OpenedTask memory opened,
        OpenedSnapshot memory snapshot,
        uint256 place,
        OpenedEntry memory listed,
        OpenedEntry memory better
    ) internal {
        vm.expectRevert(reason);
        bonds.reportSelection(vote, opened, snapshot, place, listed, better);
    }

    function assertPunished() internal view {
        assertEq(bonds.bondOf(vm.addr(memberKeys[0])), 0);
    }

    // ----------------------------------------------------------------------------- choices

    /// @dev Of two plans that list one node each, one is wrong, so its signer loses the bond; the other is right.
    function test_a19_exactly_one_of_two_possible_choices_is_punished() public {
        uint256 wrong;
        for (uint64 first; first < 2; ++first) {
            (PlanVote memory vote, OpenedTask memory opened) = makePlan(list(account(first)));
            try bonds.reportSelection(vote, opened, openSnapshot(), 0, openEntry(first), openEntry(1 - first)) {
                ++wrong;
                assertPunished();
                post(vm.addr(memberKeys[0]), BOND);
            } catch (bytes memory reason) {
                require(bytes4(reason) == IBonds.ChoiceRight.selector, "refused for another reason");
            }
        }
        assertEq(wrong, 1);
    }

    function test_a19_listing_a_node_that_may_not_run_the_task_is_punished() public {
        (PlanVote memory vote, OpenedTask memory opened) = makePlan(list(account(2), account(0)));
        bonds.reportSelection(vote, opened, openSnapshot(), 0, openEntry(2), openEntry(0));
        assertPunished();
    }

    /// @dev A node of a class that members cannot recompute in competes for a task that crosses classes: of two plans
    /// that list it first and second, one is punished, and the other is right.
    function test_a19_leaving_out_a_better_node_of_an_unruled_class_is_punished() public {
        uint256 fresh = vm.snapshotState();
        for (uint64 other; other < 2; ++other) {
            uint256 wrong;
            for (uint64 i; i < 2; ++i) {
                (uint64 first, uint64 second) = i == 0 ? (uint64(2), other) : (other, uint64(2));
                (PlanVote memory vote, OpenedTask memory opened) = makePlan(list(account(first)), true);
                try bonds.reportSelection(vote, opened, openSnapshot(), 0, openEntry(first), openEntry(second)) {
                    ++wrong;
                    assertPunished();
                    post(vm.addr(memberKeys[0]), BOND);
                } catch (bytes memory reason) {
                    require(bytes4(reason) == IBonds.ChoiceRight.selector, "refused for another reason");
                }
            }
            assertEq(wrong, 1);
            vm.revertToState(fresh);
        }
    }

    function test_a_node_that_is_listed_before_or_may_not_run_the_task_proves_nothing() public {
        (PlanVote memory vote, OpenedTask memory opened) = makePlan(list(account(0), account(1)));
        OpenedSnapshot memory snapshot = openSnapshot();
        refuseChoice(notACandidate(0), vote, opened, snapshot, 1, openEntry(1), openEntry(0));
        refuseChoice(notACandidate(2), vote, opened, snapshot, 0, openEntry(0), openEntry(2));
        bytes memory reason = abi.encodeWithSelector(IBonds.PlaceInvalid.selector, 2);
        refuseChoice(reason, vote, opened, snapshot, 2, openEntry(0), openEntry(1));
    }

    function test_openings_that_do_not_match_the_roots_are_refused() public {
        (PlanVote memory vote, OpenedTask memory opened) = makePlan(list(account(2)));
        OpenedSnapshot memory snapshot = openSnapshot();
        OpenedEntry memory listed = openEntry(2);
        OpenedEntry memory better = openEntry(0);

        opened.plan.modelId = "another";
        refuseChoice(invalid(0), vote, opened, snapshot, 0, listed, better);
        opened.plan.modelId = MODEL;
        opened.plan.executionId = "another";
        refuseChoice(invalid(0), vote, opened, snapshot, 0, listed, better);
        opened.plan.executionId = ID;

        opened.task.index = 1;
        refuseChoice(invalid(1), vote, opened, snapshot, 0, listed, better);
        opened.task.index = 0;
        opened.proof = new bytes32[](1);
        refuseChoice(invalid(1), vote, opened, snapshot, 0, listed, better);
        opened.proof = new bytes32[](0);
        opened.candidates = list(account(1));
        refuseChoice(invalid(2), vote, opened, snapshot, 0, listed, better);
        opened.candidates = list(account(2));

        snapshot.header.sequence = 8;
        refuseChoice(invalid(3), vote, opened, snapshot, 0, listed, better);
        snapshot.header.sequence = 7;
        snapshot.ruledClasses[0] = UNRULED_CLASS;
        refuseChoice(invalid(4), vote, opened, snapshot, 0, listed, better);
        snapshot.ruledClasses[0] = CLASS;
        (snapshot.ruledClasses, snapshot.unruledClasses) = (list(UNRULED_CLASS), list(CLASS));
        refuseChoice(invalid(4), vote, opened, snapshot, 0, listed, better);
        snapshot = openSnapshot();
        opened.task.crossesClasses = true;
        refuseChoice(invalid(1), vote, opened, snapshot, 0, listed, better);
        opened.task.crossesClasses = false;

        listed.entry.stakeMicroUsdc = 1;
        refuseChoice(invalid(5), vote, opened, snapshot, 0, listed, better);
        refuseChoice(invalid(5), vote, opened, snapshot, 0, openEntry(1), better); // another node than the listed one
        better.resident[1] = 0;
        refuseChoice(invalid(6), vote, opened, snapshot, 0, openEntry(2), better);
        assertEq(bonds.bondOf(vm.addr(memberKeys[0])), BOND);
    }

    // ----------------------------------------------------------------------- absent nodes

    function neighbours(uint64 first) internal pure returns (OpenedEntry[] memory entries) {
        entries = new OpenedEntry[](1);
        entries[0] = openEntry(first);
    }

    function neighbours(uint64 first, uint64 second) internal pure returns (OpenedEntry[] memory entries) {
        entries = new OpenedEntry[](2);
        (entries[0], entries[1]) = (openEntry(first), openEntry(second));
    }

    function reportStranger(address absent, OpenedEntry[] memory entries) internal {
        (PlanVote memory vote, OpenedTask memory opened) = makePlan(list(absent));
        bonds.reportStranger(vote, opened, makeHeader(), 0, entries);
    }

    function test_a19_nodes_outside_the_snapshot_are_punished_once_per_execution() public {
        address member = vm.addr(memberKeys[0]);
        reportStranger(address(0x1fff), neighbours(0));
        assertPunished();
        bytes memory reason = abi.encodeWithSelector(IBonds.BondMissing.selector, member);
        refuseStrangerReport(reason, address(0x2fff), neighbours(NODES - 1));
        post(member, BOND);
        reason = abi.encodeWithSelector(IBonds.AlreadyPunished.selector, member);
        refuseStrangerReport(reason, address(0x2fff), neighbours(NODES - 1)); // one punishment per execution
    }

    function test_a19_a_node_absent_between_two_entries_is_punished() public {
        reportStranger(address(0x2002), neighbours(0, 1));
        assertPunished();
    }

    function test_a19_a_node_absent_after_the_last_entry_is_punished() public {
        reportStranger(address(0x2fff), neighbours(NODES - 1));
        assertPunished();
    }

    function test_nodes_of_the_snapshot_cannot_be_reported_as_absent() public {
        OpenedEntry[] memory altered = neighbours(0, 1);
        altered[1].entry.node = address(0x2fff);
        refuseAsPresent(account(1), new OpenedEntry[](0));
        refuseAsPresent(account(1), new OpenedEntry[](3));
        refuseAsPresent(account(1), neighbours(0));
        refuseAsPresent(account(1), neighbours(2));
        refuseAsPresent(account(1), neighbours(0, 2)); // not neighbours
        refuseAsPresent(account(1), neighbours(0, 1));
        refuseAsPresent(account(0), neighbours(0, 1));
        refuseAsPresent(account(1), altered);
        altered = neighbours(0);
        altered[0].entry.rttMs = 11;
        refuseAsPresent(address(0x1fff), altered);
        assertEq(bonds.bondOf(vm.addr(memberKeys[0])), BOND);
    }

    function refuseAsPresent(address node, OpenedEntry[] memory entries) internal {
        refuseStrangerReport(abi.encodeWithSelector(IBonds.StrangerUnproven.selector, node), node, entries);
    }

    function refuseStrangerReport(bytes memory reason, address node, OpenedEntry[] memory entries) internal {
        (PlanVote memory vote, OpenedTask memory opened) = makePlan(list(node));
        SnapshotHeader memory header = makeHeader();
        vm.expectRevert(reason);
        bonds.reportStranger(vote, opened, header, 0, entries);
    }

    function test_reports_of_absent_nodes_check_position_and_snapshot() public {
        (PlanVote memory vote, OpenedTask memory opened) = makePlan(list(address(0x1fff)));
        SnapshotHeader memory header = makeHeader();
        OpenedEntry[] memory entries = neighbours(0);
        vm.expectRevert(abi.encodeWithSelector(IBonds.PlaceInvalid.selector, 1));
        bonds.reportStranger(vote, opened, header, 1, entries);
        header.epoch = 2;
        vm.expectRevert(invalid(3));
        bonds.reportStranger(vote, opened, header, 0, entries);
    }

    // -------------------------------------------------------------------------------- seeds

    /// @dev A request of MODEL from the header's snapshot, and its hash.
    function makeWords() internal view returns (Request memory r, bytes32 requestHash) {
        r.modelId = MODEL;
        r.snapshotSequence = 7;
        r.snapshotRoot = rootOf(makeHeader());
        requestHash = market.requestHashOf(r);
    }

    function makeSeed(bytes32 requestHash) internal view returns (bytes memory) {
        return blsSign(GROUP_SECRET, abi.encode(keccak256("splitup/plan-seed/v1"), ID, requestHash));
    }

    /// @dev Reports a plan with this seed, model and snapshot. The group has signed `makeWords`.
    function reportSeed(bytes32 seed, bytes32 model, bytes32 snapshotRoot) internal {
        (Request memory r, bytes32 requestHash) = makeWords();
        (, OpenedTask memory opened) = makePlan(list(account(0)));
        PlanHeader memory plan = opened.plan;
        (plan.seed, plan.modelId, plan.snapshotRoot, plan.requestHash) = (seed, model, snapshotRoot, requestHash);
        PlanVote memory vote = planVote(memberKeys[0], ID, requestHash, rootOf(plan));
        bytes memory signature = makeSeed(requestHash);
        bonds.reportSeed(vote, plan, r, signature);
    }

    /// @dev The group signs a seed for every wording of a request; only that of the vote's own counts.
    function test_s03_the_seed_of_another_wording_is_no_evidence() public {
        confirmKey(blsKey(GROUP_SECRET), 3);
        (Request memory r, bytes32 requestHash) = makeWords();
        (, OpenedTask memory opened) = makePlan(list(account(0)));
        PlanHeader memory plan = opened.plan;
        (plan.seed, plan.requestHash) = (keccak256(makeSeed(requestHash)), requestHash);
        PlanVote memory vote = planVote(memberKeys[0], ID, requestHash, rootOf(plan));
        r.steps = 3;
        bytes memory signature = makeSeed(market.requestHashOf(r));
        vm.expectRevert(invalid(7));
        bonds.reportSeed(vote, plan, r, signature);
    }

    /// @dev A committee whose key was made anew gives another seed for the same words. A vote names the one it is for.
    function test_s25_the_seed_of_another_configuration_is_no_evidence() public {
        confirmKey(blsKey(GROUP_SECRET), 3);
        (Request memory r, bytes32 requestHash) = makeWords();
        (, OpenedTask memory opened) = makePlan(list(account(0)));
        PlanHeader memory plan = opened.plan;
        (plan.seed, plan.requestHash) = (keccak256(makeSeed(requestHash)), requestHash);
        (plan.modelId, plan.snapshotRoot) = (r.modelId, r.snapshotRoot);
        PlanVote memory vote = planVote(memberKeys[0], ID, requestHash, rootOf(plan));
        committee.resetMembers(makeMembers()); // the same people
        confirmKey(blsKey(GROUP_SECRET + 1), 3);
        bytes memory message = abi.encode(keccak256("splitup/plan-seed/v1"), ID, requestHash);
        bytes memory second = blsSign(GROUP_SECRET + 1, message);
        bytes memory first = makeSeed(requestHash);
        vm.expectRevert(abi.encodeWithSelector(ICommittee.RandomnessInvalid.selector, 1));
        bonds.reportSeed(vote, plan, r, second);
        vm.expectRevert(abi.encodeWithSelector(IBonds.VotesAgree.selector));
        bonds.reportSeed(vote, plan, r, first);
        vote.configuration = 2; // then it is nobody's signature that has a bond
        vm.expectRevert();
        bonds.reportSeed(vote, plan, r, second);
        PlanVote memory renewed = planVote(memberKeys[0], ID, requestHash, keccak256("the plan of the other seed"));
        vote.configuration = 1;
        vm.expectRevert(abi.encodeWithSelector(IBonds.SlotsDiffer.selector));
        bonds.reportPlans(vote, renewed);
        assertEq(bonds.bondOf(vm.addr(memberKeys[0])), BOND);
    }

    function test_a_vote_for_a_request_with_the_plan_of_another_is_punished() public {
        confirmKey(blsKey(GROUP_SECRET), 3);
        (Request memory r, bytes32 requestHash) = makeWords();
        (, OpenedTask memory opened) = makePlan(list(account(0)));
        PlanHeader memory plan = opened.plan;
        plan.seed = keccak256(makeSeed(requestHash));
        PlanVote memory vote = planVote(memberKeys[0], ID, requestHash, rootOf(plan));
        bonds.reportSeed(vote, plan, r, makeSeed(requestHash));
        assertPunished();
    }

    function test_a17_a_plan_that_contradicts_the_groups_signature_is_punished() public {
        confirmKey(blsKey(GROUP_SECRET), 3);
        bytes32 root = rootOf(makeHeader());
        (, bytes32 requestHash) = makeWords();
        bytes32 seed = keccak256(makeSeed(requestHash));
        vm.expectRevert(abi.encodeWithSelector(IBonds.VotesAgree.selector));
        this.reportSeedOf(seed, MODEL, root);
        uint256 state = vm.snapshotState();
        reportSeed(SEED, MODEL, root);
        assertPunished();
        vm.revertToState(state);
        reportSeed(seed, "another", root);
        assertPunished();
        vm.revertToState(state);
        reportSeed(seed, MODEL, "another");
        assertPunished();
    }

    function reportSeedOf(bytes32 seed, bytes32 model, bytes32 snapshotRoot) external {
        reportSeed(seed, model, snapshotRoot);
    }

    // --------------------------------------------------------------------------------- bond

    function test_a_forfeited_bond_cannot_be_released() public {
        outsider = vm.addr(OUTSIDER_KEY);
        post(outsider, BOND);
        vm.prank(outsider);
        bonds.requestRelease();
        bonds.reportPlans(planVote(OUTSIDER_KEY, ID, "a"), planVote(OUTSIDER_KEY, ID, "b"));
        vm.warp(block.timestamp + 14 days);
        vm.expectRevert(abi.encodeWithSelector(IBonds.BondMissing.selector, outsider));
        vm.prank(outsider);
        bonds.release();
    }
}
