// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Request} from "./IMarket.sol";
import {PlanHeader, PlanTask, SnapshotEntry, SnapshotHeader} from "../libraries/Roots.sol";

/// @notice A member's EIP-712 signature over `Snapshot(configuration, sequence, epoch, root)`.
/// @param configuration Number of the committee configuration.
/// @param sequence Sequence number of the snapshot.
/// @param epoch Number of the attempt to agree on the snapshot. An honest member signs one root for the same
/// configuration, sequence and epoch.
/// @param root Root of the snapshot.
/// @param signature 65 bytes (r, s, v).
struct SnapshotVote {
    uint64 configuration;
    uint64 sequence;
    uint64 epoch;
    bytes32 root;
    bytes signature;
}

/// @notice A member's EIP-712 signature over `Plan(configuration, executionId, requestHash, planRoot, seed, executors)`.
/// @param configuration Number of the committee configuration whose group key gives the plan's seed. The Market takes
/// the plan of no other one.
/// @param executionId Id of the execution.
/// @param requestHash Hash of all words of the request, as by `IMarket.requestHashOf`. An honest member signs one plan
/// for the same configuration, execution and request hash: a plan follows from these words. A client may word several
/// requests for one execution; the Market opens one of them.
/// @param planRoot Root of the plan.
/// @param tail abi.encode of the fields that follow `planRoot`.
/// @param signature 65 bytes (r, s, v).
struct PlanVote {
    uint64 configuration;
    bytes32 executionId;
    bytes32 requestHash;
    bytes32 planRoot;
    bytes tail;
    bytes signature;
}

/// @notice One task of a plan, with the proof that the plan's root contains it.
/// @param plan Header of the plan.
/// @param task The task.
/// @param proof Merkle proof of the task under `plan.tasksRoot`.
/// @param candidates The task's nodes in the plan's order: the executor first, then its fallbacks.
struct OpenedTask {
    PlanHeader plan;
    PlanTask task;
    bytes32[] proof;
    address[] candidates;
}

/// @notice The determinism classes in which enough operators have loaded a task, with the proof that the snapshot's
/// root contains them. A task that crosses classes may run in all of them, another one in the ruled ones only. Where no
/// such class exists, any class may run the task.
/// @param header Header of the snapshot.
/// @param ruledClasses Hashes of the names of the classes that members can recompute in.
/// @param unruledClasses Hashes of the names of the other classes.
/// @param heldIndex Position of the task among the snapshot's loaded tasks.
/// @param heldProof Merkle proof of the task's leaf under `header.heldRoot`.
struct OpenedSnapshot {
    SnapshotHeader header;
    bytes32[] ruledClasses;
    bytes32[] unruledClasses;
    uint64 heldIndex;
    bytes32[] heldProof;
}

/// @notice A node's entry in a snapshot, with the proof that the snapshot's root contains it.
/// @param entry The entry.
/// @param index Position of the entry in the snapshot.
/// @param proof Merkle proof of the entry under the header's `entriesRoot`.
/// @param resident Ids of the tasks that the node has loaded.
struct OpenedEntry {
    SnapshotEntry entry;
    uint64 index;
    bytes32[] proof;
    bytes32[] resident;
}

/// @title The committee members' bonds
/// @notice Members deposit USDC as a bond. Anybody can report a member that signed what an honest member never
/// signs. The member then loses its whole bond: a fifth goes to the reporter, the rest is kept for the treasury, so that no
/// report depends on whether the token takes transfers to it. The contract
/// checks reports by itself, from signatures and Merkle proofs, without any vote.
///
/// A pending report can be copied and front-run. The reporter then loses the reward, but the member loses its bond
/// all the same, so reports need no protection.
interface IBonds {
    // ------------------------------------------------------------------------------- errors

    /// @notice An address is zero.
    error AddressMissing();
    /// @notice The amount is zero.
    error AmountMissing();
    /// @notice `account` has no bond.
    error BondMissing(address account);
    /// @notice `account` is a member of the current or of the announced committee, and must keep its bond.
    error MemberBonded(address account);
    /// @notice `account` has not called `requestRelease`, or was a member of the committee since.
    error ReleaseNotRequested(address account);
    /// @notice The bond cannot be released before block time `releasableAt`.
    error StillBonded(address account, uint64 releasableAt);
    /// @notice The release period of `period` seconds exceeds `maximum`.
    error PeriodTooLong(uint64 period, uint64 maximum);
    /// @notice No signer can be recovered from the vote's signature.
    error VoteInvalid();
    /// @notice The two votes are signed by different accounts.
    error VotersDiffer(address first, address second);
    /// @notice The two votes are for different snapshots or requests, so they do not contradict each other.
    error SlotsDiffer();
    /// @notice The two votes say the same; or the plan agrees with the group's signature.
    error VotesAgree();
    /// @notice `account` has already been punished for this offence.
    error AlreadyPunished(address account);
    /// @notice The stated data does not match the root: 0 plan, 1 task, 2 candidates, 3 snapshot, 4 classes, 5 listed
    /// node, 6 better node, 7 request.
    error OpeningInvalid(uint8 part);
    /// @notice The entries do not prove that `node` is absent from the snapshot.
    error StrangerUnproven(address node);
    /// @notice The task has no candidate at this position.
    error PlaceInvalid(uint256 place);
    /// @notice `node` may not run the task, or the plan already lists it at or before the reported position.
    error NotACandidate(address node);
    /// @notice The plan's choice is right. `listed` is the clock of the listed node, `claimed` that of the node that
    /// the report calls better. The smaller clock wins, and the lower address if the clocks are equal.
    error ChoiceRight(uint256 listed, uint256 claimed);

    // ------------------------------------------------------------------------------- events

    /// @notice `account` added `amount` micro-USDC to its bond, which is now `bond`.
    event BondPosted(address indexed account, uint256 amount, uint256 bond);
    /// @notice `account` can release its bond from block time `releasableAt`.
    event ReleaseRequested(address indexed account, uint64 releasableAt);
    /// @notice The bond of `account`, `amount` micro-USDC, was paid out.
    event BondReleased(address indexed account, uint256 amount);
    /// @notice `member` lost its bond of `amount` micro-USDC because of a report by `reporter`. `offence` identifies
    /// the kind of report and the snapshot or execution that it concerns.
    event MemberPunished(address indexed member, address indexed reporter, bytes32 offence, uint256 amount);
    /// @notice `treasury` now receives the forfeited bonds, less the reporters' rewards.
    event TreasurySet(address indexed treasury);

    // ----------------------------------------------------------------------------- the bond

    /// @notice Adds to the caller's bond, and cancels a requested release. The caller must have approved the amount
    /// for this contract.
    /// @param amount Amount in micro-USDC.
    function post(uint256 amount) external;

    /// @notice Starts the period after which the caller can release its bond. Reverts for members of the current and
    /// of the announced committee; who becomes one later has to request it again.
    function requestRelease() external;

    /// @notice Pays out the caller's bond after the release period. Reverts for members of the current and of the
    /// announced committee.
    function release() external;

    /// @notice Returns the bond of an account, in micro-USDC.
    /// @param account Any account.
    function bondOf(address account) external view returns (uint256);

    /// @notice Returns the block time from which an account can release its bond; 0 if no release is requested since
    /// it was last announced as a member of the committee.
    /// @param account Any account.
    function releasableAt(address account) external view returns (uint64);

    // ----------------------------------------------------------------------- owner functions

    /// @notice Sets the account that receives forfeited bonds, less the reporters' rewards.
    /// @param treasury_ The account; not zero.
    function setTreasury(address treasury_) external;

    /// @notice Sends the forfeited bonds, less the reporters' rewards, to the treasury. Anybody can call.
    function collectForfeited() external;

    /// @notice Returns what `collectForfeited` can send, in micro-USDC.
    function forfeited() external view returns (uint256);

    // ------------------------------------------------------------------------------ reports

    /// @notice Reports a member that signed two roots for the same configuration, sequence number and epoch.
    /// @param first One of the votes.
    /// @param second The other vote.
    function reportSnapshots(SnapshotVote calldata first, SnapshotVote calldata second) external;

    /// @notice Reports a member that signed two plans for one request, with different roots or different further
    /// fields.
    /// @param first One of the votes.
    /// @param second The other vote.
    function reportPlans(PlanVote calldata first, PlanVote calldata second) external;

    /// @notice Reports a member that signed a plan with another seed than the group signed for its request, or with
    /// another snapshot or model than the request names.
    /// @param vote The member's vote.
    /// @param plan Header of the plan.
    /// @param request The request whose hash is in the vote.
    /// @param signature The signature over the request's seed message by the group of the vote's configuration: 128 bytes, a G1 point in EIP-2537's
    /// encoding.
    function reportSeed(
        PlanVote calldata vote,
        PlanHeader calldata plan,
        Request calldata request,
        bytes calldata signature
    ) external;

    /// @notice Reports a member that signed a plan with a wrong node at a position of a task's list. Either the listed
    /// node may not run the task while another node may; or another node that may run it has the smaller clock, and
    /// comes later in the list or not at all. The contract computes both clocks.
    /// @dev The task's figures and the snapshot's reference node are taken as they were signed.
    /// @param vote The member's vote.
    /// @param opened The task and its list of candidates.
    /// @param snapshot The classes that may run the task.
    /// @param place Reported position in the list, from 0.
    /// @param listed Snapshot entry of the node at that position.
    /// @param better Snapshot entry of the node that should be there.
    function reportSelection(
        PlanVote calldata vote,
        OpenedTask calldata opened,
        OpenedSnapshot calldata snapshot,
        uint256 place,
        OpenedEntry calldata listed,
        OpenedEntry calldata better
    ) external;

    /// @notice Reports a member that signed a plan with a node that is not in the plan's snapshot. Entries are sorted
    /// by node, so two neighbouring entries around the node's address prove its absence; so does the first or the
    /// last entry if the address lies beyond it.
    /// @param vote The member's vote.
    /// @param opened The task and its list of candidates.
    /// @param header Header of the snapshot.
    /// @param place Reported position in the list, from 0.
    /// @param neighbours Two neighbouring entries, or the first entry, or the last. `resident` is not read.
    function reportStranger(
        PlanVote calldata vote,
        OpenedTask calldata opened,
        SnapshotHeader calldata header,
        uint256 place,
        OpenedEntry[] calldata neighbours
    ) external;
}
