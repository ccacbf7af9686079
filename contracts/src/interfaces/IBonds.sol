// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {PlanHeader, PlanTask, SnapshotEntry, SnapshotHeader} from "../libraries/Roots.sol";

/// @notice A member's signature over `Snapshot(configuration, sequence, epoch, root)`.
struct SnapshotVote {
    uint64 configuration;
    uint64 sequence;
    uint64 epoch;
    bytes32 root;
    bytes signature;
}

/// @notice A member's signature over a `Plan(executionId, planRoot, …)`.
/// @param tail The struct's further words, as abi.encode lays them out.
struct PlanVote {
    bytes32 executionId;
    bytes32 planRoot;
    bytes tail;
    bytes signature;
}

/// @notice One task of a plan, opened out of the plan's root.
/// @param candidates The executor and its fallbacks.
struct OpenedTask {
    PlanHeader plan;
    PlanTask task;
    bytes32[] proof;
    address[] candidates;
}

/// @notice Who could run that task, opened out of the snapshot's root.
/// @param classes Hashes of the determinism classes that may run it; none means any.
struct OpenedSnapshot {
    SnapshotHeader header;
    bytes32[] classes;
    uint64 heldIndex;
    bytes32[] heldProof;
}

/// @notice One node, opened out of the same snapshot.
struct OpenedEntry {
    SnapshotEntry entry;
    uint64 index;
    bytes32[] proof;
    bytes32[] resident;
}

/// @title The members' bonds, and what takes them
/// @notice Members put USDC at stake. Anybody who shows that a member signed what no honest member
/// signs takes the whole bond: a fifth goes to him, the rest to the treasury. Everything is checked
/// here, from signatures and roots alone; no vote is asked.
///
/// A report can be copied out of the pool by whoever is quicker. That costs the reporter his reward
/// and the liar nothing less, so reports are not hidden.
interface IBonds {
    // ------------------------------------------------------------------------------- errors

    /// @notice An address is zero.
    error AddressMissing();
    /// @notice The amount is zero.
    error AmountMissing();
    /// @notice The account has no bond.
    error BondMissing(address account);
    /// @notice A member's bond stays; so does that of a member to be.
    error MemberBonded(address account);
    /// @notice The release was not requested.
    error ReleaseNotRequested(address account);
    /// @notice The bond is locked until the given time.
    error StillBonded(address account, uint64 releasableAt);
    /// @notice The period is longer than the bound.
    error PeriodTooLong(uint64 period, uint64 maximum);
    /// @notice The signature does not recover.
    error VoteInvalid();
    /// @notice The two votes are by different accounts.
    error VotersDiffer(address first, address second);
    /// @notice The two votes are for different slots.
    error SlotsDiffer();
    /// @notice The two votes say the same.
    error VotesAgree();
    /// @notice The account was punished for this already.
    error AlreadyPunished(address account);
    /// @notice What was opened is not what the root binds: 0 plan, 1 task, 2 candidates, 3 snapshot,
    /// 4 classes, 5 listed node, 6 better node.
    error OpeningInvalid(uint8 part);
    /// @notice The entries do not show that the node is absent.
    error StrangerUnproven(address node);
    /// @notice No node is listed at this place.
    error PlaceInvalid(uint256 place);
    /// @notice The node may not run the task, or stands before the place.
    error NotACandidate(address node);
    /// @notice The plan's choice is right: its clock is the smaller one.
    error ChoiceRight(uint256 listed, uint256 claimed);

    // ------------------------------------------------------------------------------- events

    /// @notice A bond was posted or added to.
    event BondPosted(address indexed account, uint256 amount, uint256 bond);
    /// @notice A bond may be taken out from then on.
    event ReleaseRequested(address indexed account, uint64 releasableAt);
    /// @notice A bond was taken out.
    event BondReleased(address indexed account, uint256 amount);
    /// @notice A member signed what it must not, and lost its bond.
    event MemberPunished(address indexed member, address indexed reporter, bytes32 offence, uint256 amount);
    /// @notice Where forfeited bonds go.
    event TreasurySet(address indexed treasury);

    // ----------------------------------------------------------------------------- the bond

    /// @notice Adds to the caller's bond.
    function post(uint256 amount) external;

    /// @notice Starts the period after which the caller may take its bond; not for members.
    function requestRelease() external;

    /// @notice Pays the caller's bond out.
    function release() external;

    /// @notice What an account has at stake.
    function bondOf(address account) external view returns (uint256);

    /// @notice From when on an account may take its bond; 0 before it asked.
    function releasableAt(address account) external view returns (uint64);

    // ------------------------------------------------------------------------------ reports

    /// @notice A member signed two roots for one snapshot slot: configuration, sequence and epoch.
    function reportSnapshots(SnapshotVote calldata first, SnapshotVote calldata second) external;

    /// @notice A member signed two plans for one execution: another root, or other words beside it.
    function reportPlans(PlanVote calldata first, PlanVote calldata second) external;

    /// @notice A member signed a plan for another seed, snapshot or model than the group's signature is
    /// for, of which there is one per execution.
    /// @param signature The group's, over the message of the execution's seed.
    function reportSeed(
        PlanVote calldata vote,
        PlanHeader calldata plan,
        uint64 configuration,
        bytes32 modelId,
        uint64 snapshotSequence,
        bytes32 snapshotRoot,
        bytes calldata signature
    ) external;

    /// @notice A member signed a plan that lists, at `place`, a node although a better one that may
    /// run the task stands later in the list or not at all; or a node that may not run it while
    /// another may. Both are weighed here.
    /// @dev The figures of the task and the snapshot's reference are taken as signed.
    function reportSelection(
        PlanVote calldata vote,
        OpenedTask calldata opened,
        OpenedSnapshot calldata snapshot,
        uint256 place,
        OpenedEntry calldata listed,
        OpenedEntry calldata better
    ) external;

    /// @notice A member signed a plan that lists, at `place`, a node that is not in the snapshot: of two
    /// neighbouring entries one is below it and one above, or it is beyond the first or the last.
    /// @param around Two neighbours, or the first entry, or the last; their resident tasks are not read.
    function reportStranger(
        PlanVote calldata vote,
        OpenedTask calldata opened,
        SnapshotHeader calldata header,
        uint256 place,
        OpenedEntry[] calldata around
    ) external;
}
