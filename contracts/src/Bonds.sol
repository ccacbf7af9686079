// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Ownable} from "@openzeppelin/contracts/access/Ownable.sol";
import {Ownable2Step} from "@openzeppelin/contracts/access/Ownable2Step.sol";
import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {ECDSA} from "@openzeppelin/contracts/utils/cryptography/ECDSA.sol";
import {MessageHashUtils} from "@openzeppelin/contracts/utils/cryptography/MessageHashUtils.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {
    IBonds,
    OpenedEntry,
    OpenedSnapshot,
    OpenedTask,
    PlanVote,
    SnapshotVote
} from "./interfaces/IBonds.sol";
import {ICommittee} from "./interfaces/ICommittee.sol";
import {Request} from "./interfaces/IMarket.sol";
import {Merkle} from "./libraries/Merkle.sol";
import {PlanHeader, Roots, SnapshotHeader} from "./libraries/Roots.sol";
import {Selection} from "./libraries/Selection.sol";

/// @title The committee members' bonds
/// @notice See {IBonds}.
contract Bonds is IBonds, Ownable2Step {
    using SafeERC20 for IERC20;

    // ---------------------------------------------------------------------------- constants

    uint256 internal constant REWARD_BPS = 2_000; // a member that reports itself loses the rest
    uint256 internal constant BPS = 10_000;
    uint64 internal constant MAX_PERIOD = 90 days; // bounds how long a bond can be locked

    bytes32 internal constant SNAPSHOT_TYPEHASH =
        keccak256("Snapshot(uint64 configuration,uint64 sequence,uint64 epoch,bytes32 root)");
    bytes32 internal constant PLAN_TYPEHASH = keccak256(
        "Plan(uint64 configuration,bytes32 executionId,bytes32 requestHash,bytes32 planRoot,bytes32 seed,uint32 executors)"
    );
    bytes32 internal constant REQUEST_TYPEHASH = keccak256(
        "Request(address client,bytes32 modelId,uint32 steps,bytes32 inputsDigest,bytes32 clientKey,uint96 maxPrice,uint64 deadline,uint64 nonce,uint64 snapshotSequence,bytes32 snapshotRoot,uint16 verifyBps)"
    );
    bytes32 internal constant PLAN_SEED_TAG = keccak256("splitup/plan-seed/v1");

    // ------------------------------------------------------------------------------ storage

    /// @dev A requested release: from when on, and the latest committee configuration when it was requested. It is
    /// void once its account is a member of a later one, whose votes can be reported for as long as of others.
    struct Release {
        uint64 time;
        uint64 configuration;
    }

    /// @notice The token: USDC.
    IERC20 public immutable usdc;
    /// @notice The committee whose members' signatures can be reported.
    ICommittee public immutable committee;
    /// @notice Time from `requestRelease` to `release`, in seconds.
    uint64 public immutable releasePeriod;
    /// @notice The account that receives forfeited bonds, less the reporters' rewards.
    address public treasury;
    /// @inheritdoc IBonds
    uint256 public forfeited;
    /// @inheritdoc IBonds
    mapping(address account => uint256) public bondOf;
    mapping(address account => Release) internal _releases;
    /// @dev Each offence is punished once per account, so a bond posted afterwards is safe from the same report.
    mapping(address account => mapping(bytes32 offence => bool)) internal _isPunished;

    /// @param owner_ Owner of the contract, and its first treasury.
    /// @param usdc_ The token.
    /// @param committee_ The committee whose members' signatures can be reported.
    /// @param releasePeriod_ Time from `requestRelease` to `release`, in seconds, at most 90 days.
    constructor(address owner_, IERC20 usdc_, ICommittee committee_, uint64 releasePeriod_) Ownable(owner_) {
        require(address(usdc_) != address(0) && address(committee_) != address(0), AddressMissing());
        require(releasePeriod_ <= MAX_PERIOD, PeriodTooLong(releasePeriod_, MAX_PERIOD));
        usdc = usdc_;
        committee = committee_;
        releasePeriod = releasePeriod_;
        _setTreasury(owner_);
    }

    /// @inheritdoc IBonds
    function setTreasury(address treasury_) external onlyOwner {
        _setTreasury(treasury_);
    }

    /// @inheritdoc IBonds
    function collectForfeited() external {
        uint256 amount = forfeited;
        forfeited = 0;
        usdc.safeTransfer(treasury, amount);
    }

    // ----------------------------------------------------------------------------- the bond

    /// @inheritdoc IBonds
    function post(uint256 amount) external {
        require(amount > 0, AmountMissing());
        uint256 bond = bondOf[msg.sender] + amount;
        bondOf[msg.sender] = bond;
        delete _releases[msg.sender];
        emit BondPosted(msg.sender, amount, bond);
        usdc.safeTransferFrom(msg.sender, address(this), amount);
    }

    /// @inheritdoc IBonds
    function requestRelease() external {
        require(bondOf[msg.sender] > 0, BondMissing(msg.sender));
        _requireNotMember(msg.sender);
        uint64 time = SafeCast.toUint64(block.timestamp) + releasePeriod;
        _releases[msg.sender] = Release(time, _latestConfiguration());
        emit ReleaseRequested(msg.sender, time);
    }

    /// @inheritdoc IBonds
    function release() external {
        _requireNotMember(msg.sender);
        uint64 time = releasableAt(msg.sender);
        require(time != 0, ReleaseNotRequested(msg.sender));
        require(block.timestamp >= time, StillBonded(msg.sender, time));
        uint256 bond = bondOf[msg.sender];
        require(bond > 0, BondMissing(msg.sender));
        bondOf[msg.sender] = 0;
        delete _releases[msg.sender];
        emit BondReleased(msg.sender, bond);
        usdc.safeTransfer(msg.sender, bond);
    }

    /// @inheritdoc IBonds
    /// @dev One call for each set of members since the request, which its account can make anew.
    function releasableAt(address account) public view returns (uint64) {
        Release storage requested = _releases[account];
        if (requested.time == 0) return 0;
        uint64 latest = _latestConfiguration();
        for (uint64 later = requested.configuration + 1; later <= latest; ++later) {
            if (committee.isMemberOf(later, account)) return 0;
        }
        return requested.time;
    }

    // ------------------------------------------------------------------------------ reports

    /// @inheritdoc IBonds
    function reportSnapshots(SnapshotVote calldata first, SnapshotVote calldata second) external {
        require(
            first.configuration == second.configuration && first.sequence == second.sequence
                && first.epoch == second.epoch,
            SlotsDiffer()
        );
        require(first.root != second.root, VotesAgree());
        address member = _recoverSnapshot(first);
        address other = _recoverSnapshot(second);
        require(member == other, VotersDiffer(member, other));
        _punish(member, keccak256(abi.encode("snapshot", first.configuration, first.sequence, first.epoch)));
    }

    /// @inheritdoc IBonds
    function reportPlans(PlanVote calldata first, PlanVote calldata second) external {
        require(
            first.configuration == second.configuration && first.executionId == second.executionId
                && first.requestHash == second.requestHash,
            SlotsDiffer()
        );
        require(
            first.planRoot != second.planRoot || keccak256(first.tail) != keccak256(second.tail), VotesAgree()
        );
        address member = _recoverPlan(first);
        address other = _recoverPlan(second);
        require(member == other, VotersDiffer(member, other));
        _punish(member, keccak256(abi.encode("plans", first.configuration, first.executionId, first.requestHash)));
    }

    /// @inheritdoc IBonds
    function reportSelection(
        PlanVote calldata vote,
        OpenedTask calldata opened,
        OpenedSnapshot calldata snapshot,
        uint256 place,
        OpenedEntry calldata listed,
        OpenedEntry calldata better
    ) external {
        _checkTask(vote, opened);
        _checkSnapshot(opened, snapshot);
        require(_isInSnapshot(snapshot, listed), OpeningInvalid(5));
        require(_isInSnapshot(snapshot, better), OpeningInvalid(6));
        require(place < opened.candidates.length, PlaceInvalid(place));
        require(listed.entry.node == opened.candidates[place], OpeningInvalid(5));

        address node = better.entry.node;
        for (uint256 i; i <= place; ++i) {
            require(opened.candidates[i] != node, NotACandidate(node));
        }
        require(_isCandidate(opened, snapshot, better), NotACandidate(node));
        if (_isCandidate(opened, snapshot, listed)) {
            uint256 listedClock = _clock(opened, snapshot, listed);
            uint256 betterClock = _clock(opened, snapshot, better);
            require(
                betterClock < listedClock || (betterClock == listedClock && node < listed.entry.node),
                ChoiceRight(listedClock, betterClock)
            );
        }
        _punish(_recoverPlan(vote), keccak256(abi.encode("selection", vote.configuration, vote.executionId)));
    }

    /// @inheritdoc IBonds
    function reportStranger(
        PlanVote calldata vote,
        OpenedTask calldata opened,
        SnapshotHeader calldata header,
        uint256 place,
        OpenedEntry[] calldata neighbours
    ) external {
        _checkTask(vote, opened);
        require(Roots.snapshotRoot(header) == opened.plan.snapshotRoot, OpeningInvalid(3));
        require(place < opened.candidates.length, PlaceInvalid(place));
        address node = opened.candidates[place];
        require(_isAbsent(header, node, neighbours), StrangerUnproven(node));
        _punish(_recoverPlan(vote), keccak256(abi.encode("selection", vote.configuration, vote.executionId)));
    }

    /// @inheritdoc IBonds
    function reportSeed(
        PlanVote calldata vote,
        PlanHeader calldata plan,
        Request calldata request,
        bytes calldata signature
    ) external {
        _checkPlan(vote, plan);
        bytes32 requestHash = keccak256(abi.encode(REQUEST_TYPEHASH, request));
        require(vote.requestHash == requestHash, OpeningInvalid(7));
        bytes memory message = abi.encode(PLAN_SEED_TAG, vote.executionId, requestHash);
        bytes32 seed = committee.verifyRandomnessOf(vote.configuration, message, signature);
        require(
            plan.requestHash != requestHash || plan.modelId != request.modelId
                || plan.snapshotRoot != request.snapshotRoot || plan.seed != seed,
            VotesAgree()
        );
        _punish(_recoverPlan(vote), keccak256(abi.encode("seed", vote.configuration, vote.executionId, requestHash)));
    }

    // --------------------------------------------------------------------- votes, internal

    function _recoverSnapshot(SnapshotVote calldata vote) internal view returns (address) {
        bytes32 structHash =
            keccak256(abi.encode(SNAPSHOT_TYPEHASH, vote.configuration, vote.sequence, vote.epoch, vote.root));
        return _recover(structHash, vote.signature);
    }

    function _recoverPlan(PlanVote calldata vote) internal view returns (address) {
        bytes32 structHash = keccak256(
            bytes.concat(
                PLAN_TYPEHASH,
                bytes32(uint256(vote.configuration)),
                vote.executionId,
                vote.requestHash,
                vote.planRoot,
                vote.tail
            )
        );
        return _recover(structHash, vote.signature);
    }

    function _recover(bytes32 structHash, bytes calldata signature) internal view returns (address member) {
        ECDSA.RecoverError failure;
        bytes32 digest = MessageHashUtils.toTypedDataHash(committee.domainSeparator(), structHash);
        (member, failure,) = ECDSA.tryRecover(digest, signature);
        require(failure == ECDSA.RecoverError.NoError, VoteInvalid());
    }

    function _punish(address member, bytes32 offence) internal {
        uint256 bond = bondOf[member];
        require(bond > 0, BondMissing(member));
        require(!_isPunished[member][offence], AlreadyPunished(member));
        _isPunished[member][offence] = true;
        bondOf[member] = 0;
        emit MemberPunished(member, msg.sender, offence, bond);
        uint256 reward = bond * REWARD_BPS / BPS;
        forfeited += bond - reward;
        usdc.safeTransfer(msg.sender, reward);
    }

    // ------------------------------------------------------------------ openings, internal

    function _checkPlan(PlanVote calldata vote, PlanHeader calldata plan) internal pure {
        require(
            plan.executionId == vote.executionId && Roots.planRoot(plan) == vote.planRoot, OpeningInvalid(0)
        );
    }

    function _checkTask(PlanVote calldata vote, OpenedTask calldata opened) internal pure {
        _checkPlan(vote, opened.plan);
        bytes32 leaf = Roots.taskLeaf(opened.task);
        require(
            Merkle.isLeaf(opened.plan.tasksRoot, opened.plan.taskCount, opened.task.index, leaf, opened.proof),
            OpeningInvalid(1)
        );
        require(Roots.candidatesHash(opened.candidates) == opened.task.candidatesHash, OpeningInvalid(2));
    }

    function _checkSnapshot(OpenedTask calldata opened, OpenedSnapshot calldata snapshot) internal pure {
        require(Roots.snapshotRoot(snapshot.header) == opened.plan.snapshotRoot, OpeningInvalid(3));
        bytes32 leaf = Roots.heldLeaf(opened.task.taskId, snapshot.ruledClasses, snapshot.unruledClasses);
        require(
            Merkle.isLeaf(
                snapshot.header.heldRoot, snapshot.header.heldCount, snapshot.heldIndex, leaf, snapshot.heldProof
            ),
            OpeningInvalid(4)
        );
    }

    /// @dev The entry is in the snapshot and has the stated resident tasks.
    function _isInSnapshot(OpenedSnapshot calldata snapshot, OpenedEntry calldata opened)
        internal
        pure
        returns (bool)
    {
        return Roots.residentHash(opened.resident) == opened.entry.residentHash && _isEntry(snapshot.header, opened);
    }

    /// @dev The entry is in the snapshot; its resident tasks are not checked.
    function _isEntry(SnapshotHeader calldata header, OpenedEntry calldata opened) internal pure returns (bool) {
        return Merkle.isLeaf(
            header.entriesRoot, header.entryCount, opened.index, Roots.entryLeaf(opened.entry), opened.proof
        );
    }

    /// @dev Entries are sorted by node: a node between two neighbouring entries, or beyond the first or last entry, is
    /// not in the snapshot.
    function _isAbsent(SnapshotHeader calldata header, address node, OpenedEntry[] calldata neighbours)
        internal
        pure
        returns (bool)
    {
        if (neighbours.length == 0 || neighbours.length > 2) return false;
        OpenedEntry calldata first = neighbours[0];
        if (!_isEntry(header, first)) return false;
        if (neighbours.length == 2) {
            OpenedEntry calldata second = neighbours[1];
            return _isEntry(header, second) && first.index + 1 == second.index && first.entry.node < node
                && node < second.entry.node;
        }
        return (first.index == 0 && node < first.entry.node)
            || (first.index + 1 == header.entryCount && first.entry.node < node);
    }

    /// @dev The snapshot has a leaf for the task, so at least one node has loaded it; then only such nodes may run it.
    function _isCandidate(OpenedTask calldata opened, OpenedSnapshot calldata snapshot, OpenedEntry calldata node)
        internal
        pure
        returns (bool)
    {
        if (!_contains(node.resident, opened.task.taskId)) return false;
        bool crosses = opened.task.crossesClasses;
        bytes32 class = node.entry.classHash;
        if (_contains(snapshot.ruledClasses, class)) return true;
        if (crosses && _contains(snapshot.unruledClasses, class)) return true;
        return snapshot.ruledClasses.length == 0 && !(crosses && snapshot.unruledClasses.length > 0);
    }

    function _clock(OpenedTask calldata opened, OpenedSnapshot calldata snapshot, OpenedEntry calldata node)
        internal
        pure
        returns (uint256)
    {
        uint256 weight = Selection.weight(node.entry, opened.task, snapshot.header, true);
        return
            Selection.clock(opened.plan.seed, opened.task.index, Selection.EXECUTOR, node.entry.node, weight);
    }

    function _contains(bytes32[] calldata list, bytes32 wanted) internal pure returns (bool) {
        for (uint256 i; i < list.length; ++i) {
            if (list[i] == wanted) return true;
        }
        return false;
    }

    // ------------------------------------------------------------------------------ internal

    /// @dev The announced configuration, or the current one if there is none.
    function _latestConfiguration() internal view returns (uint64) {
        uint64 next = committee.nextConfiguration();
        return next == 0 ? committee.configuration() : next;
    }

    function _requireNotMember(address account) internal view {
        bool announced = committee.isMemberOf(committee.nextConfiguration(), account);
        require(!committee.isMember(account) && !announced, MemberBonded(account));
    }

    function _setTreasury(address treasury_) internal {
        require(treasury_ != address(0), AddressMissing());
        treasury = treasury_;
        emit TreasurySet(treasury_);
    }
}
