// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Ownable} from "@openzeppelin/contracts/access/Ownable.sol";
import {Ownable2Step} from "@openzeppelin/contracts/access/Ownable2Step.sol";
import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {IERC20Permit} from "@openzeppelin/contracts/token/ERC20/extensions/IERC20Permit.sol";
import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {ECDSA} from "@openzeppelin/contracts/utils/cryptography/ECDSA.sol";
import {Math} from "@openzeppelin/contracts/utils/math/Math.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {MarketRules} from "./MarketRules.sol";
import {ICommittee, Member} from "./interfaces/ICommittee.sol";
import {
    Execution,
    ExecutionHistory,
    IMarket,
    Parameters,
    Payment,
    PlanSubmission,
    Request,
    Settlement,
    Status
} from "./interfaces/IMarket.sol";
import {IModelRegistry} from "./interfaces/IModelRegistry.sol";
import {INodeRegistry} from "./interfaces/INodeRegistry.sol";
import {accountOf, amountOf, hashList, sumPayouts} from "./libraries/AccountAmount.sol";
import {digestToSign, hashRequest} from "./libraries/Requests.sol";

/// @title The market
/// @notice See {IMarket}.
/// @dev The token is USDC; a token that charges a fee on transfers is refused. Committee, nodes and models are
/// SplitUp's own contracts and cannot be replaced.
contract Market is IMarket, Ownable2Step {
    using SafeERC20 for IERC20;

    // ---------------------------------------------------------------------------- constants

    uint256 internal constant BPS = 10_000;
    uint256 internal constant NANO_PER_MICRO = 1_000; // prices are in nano-USDC, money in micro-USDC
    uint256 internal constant MAX_STEPS = 65_536;
    uint256 internal constant MAX_EXECUTORS = 1_024; // a model has at most as many tasks
    uint256 internal constant MAX_PAYOUTS = 2_048; // for 1024 executors and 1024 validators
    uint256 internal constant MAX_SLASHES = 256; // bounds the rewards, too
    uint256 internal constant MAX_DISTRIBUTED = 64; // executions per call
    uint256 internal constant MAX_CREDITS = 384; // payouts per execution and call; a new account costs 22 k gas
    uint256 internal constant MAX_FREEZE_S = 30 days; // bounds the damage of a mistyped time
    uint256 internal constant COMMIT_GRACE_S = 30; // after a deadline, for what was agreed on before it: slow blocks
    uint256 internal constant LAST_CALL_S = 30; // before a deadline; from then on nobody waits for an executor's stake
    uint256 internal constant LEAST_RESERVED = 100e6; // what the place among the members' 4,096 executions counts as

    bytes32 internal constant SEED_TAG = keccak256("splitup/plan-seed/v1");
    bytes32 internal constant PLAN_TYPEHASH = keccak256(
        "Plan(uint64 configuration,bytes32 executionId,bytes32 requestHash,bytes32 planRoot,bytes32 seed,uint32 executors)"
    );
    bytes32 internal constant COMMITMENTS_TYPEHASH =
        keccak256("Commitments(bytes32 executionId,bytes32 root,bytes32[] exposures)");
    bytes32 internal constant SETTLEMENT_TYPEHASH =
        keccak256("Settlement(bytes32 executionId,bytes32 settlementHash)");

    // ------------------------------------------------------------------------------ storage

    struct Account {
        uint128 balance;
        uint64 frozenUntil;
    }

    /// @dev Sums in micro-USDC. They share one storage slot, which every call that moves money writes.
    struct Totals {
        uint96 balances; // of all accounts
        uint96 locked; // prices of open executions, and undistributed payouts
        uint56 fees; // at most 72 billion USDC
        bool paused; // not a sum; it is here because every request reads this slot anyway
    }

    /// @notice The token: USDC.
    IERC20 public immutable usdc;
    /// @notice The committee whose quorums this contract accepts.
    ICommittee public immutable committee;
    /// @notice The registry whose stakes this contract locks and slashes.
    INodeRegistry public immutable nodes;
    /// @notice The registry that states the models' prices.
    IModelRegistry public immutable models;
    /// @notice The contract that checks parameters.
    MarketRules public immutable rules;
    uint256 internal immutable _exposureFloor;

    /// @inheritdoc IMarket
    address public treasury;
    uint64 internal _lastEnd; // the latest time until which an execution opened so far can be settled
    Totals internal _totals;
    Parameters internal _parameters;
    mapping(address account => Account) internal _accounts;
    mapping(bytes32 executionId => Execution) internal _executions;
    /// @inheritdoc IMarket
    mapping(uint64 configuration => uint256) public feesOf;

    /// @param owner_ Owner of the contract, and its first treasury.
    /// @param usdc_ The token.
    /// @param committee_ The committee.
    /// @param nodes_ The node registry, whose owner must make this contract its market.
    /// @param models_ The model registry.
    /// @param parameters_ The first parameters.
    constructor(
        address owner_,
        IERC20 usdc_,
        ICommittee committee_,
        INodeRegistry nodes_,
        IModelRegistry models_,
        Parameters memory parameters_
    ) Ownable(owner_) {
        require(
            address(usdc_) != address(0) && address(committee_) != address(0) && address(nodes_) != address(0)
                && address(models_) != address(0),
            AddressMissing()
        );
        usdc = usdc_;
        committee = committee_;
        nodes = nodes_;
        models = models_;
        rules = new MarketRules(nodes_);
        _exposureFloor = nodes_.EXPOSURE_FLOOR();
        treasury = owner_;
        emit TreasurySet(owner_);
        _setParameters(parameters_);
    }

    // ------------------------------------------------------------------------------- money

    /// @inheritdoc IMarket
    function deposit(uint256 amount) external {
        _deposit(amount);
    }

    /// @inheritdoc IMarket
    function depositWithPermit(uint256 amount, uint256 permitDeadline, uint8 v, bytes32 r, bytes32 s) external {
        // If somebody has already submitted the permit, this call fails but the allowance exists. If the permit is
        // invalid, there is no allowance and the transfer below reverts.
        try IERC20Permit(address(usdc)).permit(msg.sender, address(this), amount, permitDeadline, v, r, s) {} catch {}
        _deposit(amount);
    }

    /// @inheritdoc IMarket
    function withdraw(uint256 amount) external {
        require(amount > 0, AmountMissing());
        _requireNotFrozen(msg.sender);
        _debit(msg.sender, amount);
        _totals.balances -= SafeCast.toUint96(amount);
        emit Withdrawn(msg.sender, amount);
        usdc.safeTransfer(msg.sender, amount);
    }

    /// @inheritdoc IMarket
    function freeze(uint64 until) external {
        Account storage account = _accounts[msg.sender];
        uint256 earliest = (account.frozenUntil > block.timestamp ? account.frozenUntil : block.timestamp) + 1;
        uint256 latest = block.timestamp + MAX_FREEZE_S;
        require(until >= earliest && until <= latest, FreezeInvalid(until, earliest, latest));
        account.frozenUntil = until;
        emit BalanceFrozen(msg.sender, until);
    }

    // --------------------------------------------------------------------------- executions

    /// @inheritdoc IMarket
    function requestExecution(
        bytes32 modelId,
        uint32 steps,
        bytes32 inputsDigest,
        bytes32 clientKey,
        uint96 maxPrice,
        uint64 deadline,
        uint64 nonce,
        uint16 verifyBps
    ) external returns (bytes32 executionId) {
        _requireNotFrozen(msg.sender);
        (uint64 sequence, bytes32 root) = committee.latestSnapshot();
        Request memory request = Request({
            client: msg.sender,
            modelId: modelId,
            steps: steps,
            inputsDigest: inputsDigest,
            clientKey: clientKey,
            maxPrice: maxPrice,
            deadline: deadline,
            nonce: nonce,
            snapshotSequence: sequence,
            snapshotRoot: root,
            verifyBps: verifyBps
        });
        executionId = _open(request);
        Execution storage execution = _executions[executionId];
        execution.status = Status.Requested;
        execution.record = hashRequest(request);
    }

    /// @inheritdoc IMarket
    function submitCompletePlan(Request calldata request, PlanSubmission calldata plan, bytes calldata signatures)
        external
    {
        bytes32 executionId = executionIdOf(request.client, request.nonce);
        Execution storage execution = _executions[executionId];
        _requireStatus(executionId, execution.status, Status.Requested);
        bytes32 requestHash = hashRequest(request);
        require(execution.record == requestHash, RecordMismatch(executionId));
        _acceptPlan(executionId, execution.configuration, requestHash, plan, signatures);
    }

    /// @inheritdoc IMarket
    function openExecution(
        Request calldata request,
        bytes calldata clientSignature,
        PlanSubmission calldata plan,
        bytes calldata signatures
    ) external returns (bytes32 executionId) {
        require(
            request.snapshotRoot != 0 && request.snapshotRoot == committee.snapshotRootOf(request.snapshotSequence),
            SnapshotUnknown(request.snapshotSequence, request.snapshotRoot)
        );
        bytes32 requestHash = hashRequest(request);
        bytes32 digest = digestToSign(requestHash, address(this));
        (address signer, ECDSA.RecoverError failure,) = ECDSA.tryRecoverCalldata(digest, clientSignature);
        require(
            failure == ECDSA.RecoverError.NoError && signer == request.client, ClientSignatureInvalid(request.client)
        );
        executionId = _open(request);
        _acceptPlan(executionId, committee.configuration(), requestHash, plan, signatures);
    }

    /// @inheritdoc IMarket
    /// @dev The registry is SplitUp's own and calls nobody when it locks.
    function commitExecution(
        bytes32 executionId,
        bytes32 root,
        bytes32[] calldata exposures,
        bytes calldata signatures
    ) external {
        Execution storage execution = _executions[executionId];
        _requireStatus(executionId, execution.status, Status.Planned);
        require(!execution.certified, CommitmentExists(executionId));
        require(root != 0, RootMissing(executionId));
        require(exposures.length > 0, ExecutorsMissing(executionId));
        _requireAtMost(exposures.length, MAX_EXECUTORS);
        bytes32 digest = hashList(exposures);
        committee.requireQuorumOf(
            execution.configuration, keccak256(abi.encode(COMMITMENTS_TYPEHASH, executionId, root, digest)), signatures
        );

        execution.certified = true;
        bool isLate = block.timestamp + LAST_CALL_S >= execution.deadline;
        bytes32[] memory changed = nodes.lock(exposures, isLate);
        if (changed.length > 0) {
            digest = keccak256(abi.encodePacked(changed));
            emit ExecutionCommitted(executionId, root, changed);
        } else {
            emit ExecutionCommitted(executionId, root, exposures);
        }
        execution.record = keccak256(abi.encode(execution.record, root, digest));
    }

    /// @inheritdoc IMarket
    function settle(
        bytes32 executionId,
        Settlement calldata s,
        ExecutionHistory calldata history,
        bytes calldata signatures
    ) external {
        Execution storage execution = _executions[executionId];
        _requireStatus(executionId, execution.status, Status.Planned);
        uint64 end = _endOf(execution);
        require(block.timestamp < end, DeadlinePassed(executionId, end));
        _requireAtMost(s.payouts.length, MAX_PAYOUTS);
        _requireAtMost(s.rewards.length, MAX_SLASHES);
        _requireAtMost(s.slashes.length, MAX_SLASHES);
        require(s.steps <= execution.steps, StepsInvalid(s.steps, execution.steps));
        committee.requireQuorumOf(
            execution.configuration,
            keccak256(abi.encode(SETTLEMENT_TYPEHASH, executionId, keccak256(abi.encode(s)))),
            signatures
        );

        require(s.slashes.length == 0 || execution.record == recordOf(history, false), RecordMismatch(executionId));
        execution.status = Status.Settled; // before any call to the registry or the token, against reentrancy
        execution.record = keccak256(abi.encode(execution.record, hashList(s.payouts)));
        _applySettlement(executionId, execution, s, history);
    }

    /// @inheritdoc IMarket
    function distribute(ExecutionHistory[] calldata histories) external {
        uint256 count = histories.length;
        _requireAtMost(count, MAX_DISTRIBUTED);
        uint256 total;
        for (uint256 i; i < count; ++i) {
            total += _distribute(histories[i]);
        }
        uint96 paid = SafeCast.toUint96(total);
        Totals memory totals = _totals;
        totals.balances += paid;
        totals.locked -= paid;
        _totals = totals;
    }

    /// @inheritdoc IMarket
    function refund(bytes32 executionId) external {
        Execution storage execution = _executions[executionId];
        Status status = execution.status;
        require(status == Status.Requested || status == Status.Planned, StatusInvalid(executionId, status));
        uint256 earliest = refundableAt(executionId);
        require(block.timestamp >= earliest, NotRefundable(executionId, earliest));

        execution.status = Status.Refunded;
        if (status == Status.Requested) execution.reservation = 0; // without a plan no stake was reserved
        uint32 reservation = execution.reservation;
        uint96 amount = execution.maxPrice;
        _credit(execution.client, amount - reservation);
        _credit(treasury, reservation); // not to the members, who would gain by settling nothing
        Totals memory totals = _totals;
        totals.balances += amount;
        totals.locked -= amount;
        _totals = totals;
        emit Refunded(executionId, execution.client, amount - reservation, reservation);
    }

    /// @inheritdoc IMarket
    function collectFees(uint64 configuration) external {
        Member[] memory members = committee.membersOf(configuration);
        require(members.length > 0, ICommittee.ConfigurationUnknown(configuration));
        uint96 share = SafeCast.toUint96(feesOf[configuration] / members.length);
        uint56 amount = SafeCast.toUint56(share * members.length);
        for (uint256 i; i < members.length; ++i) {
            _credit(members[i].account, share);
        }
        feesOf[configuration] -= amount;
        Totals memory totals = _totals;
        totals.fees -= amount;
        totals.balances += amount;
        _totals = totals;
        emit FeesCollected(configuration, amount, members.length);
    }

    // ---------------------------------------------------------------------- owner functions

    /// @inheritdoc IMarket
    function setParameters(Parameters calldata parameters_) external onlyOwner {
        _setParameters(parameters_);
    }

    /// @inheritdoc IMarket
    function setTreasury(address treasury_) external onlyOwner {
        require(treasury_ != address(0), AddressMissing());
        treasury = treasury_;
        emit TreasurySet(treasury_);
    }

    /// @inheritdoc IMarket
    function setPaused(bool paused_) external onlyOwner {
        _totals.paused = paused_;
        emit PausedSet(paused_);
    }

    // ------------------------------------------------------------------------------- views

    /// @inheritdoc IMarket
    function balanceOf(address account) external view returns (uint256) {
        return _accounts[account].balance;
    }

    /// @inheritdoc IMarket
    function frozenUntil(address account) external view returns (uint64) {
        return _accounts[account].frozenUntil;
    }

    /// @inheritdoc IMarket
    function quoteParts(bytes32 modelId, uint32 steps, uint32 durationS)
        public
        view
        returns (uint256 executors, uint256 verification, uint256 fee, uint256 reservation)
    {
        (uint256 pricePerStep, uint256 tasks) = models.termsOf(modelId);
        Parameters storage p = _parameters;
        executors = Math.ceilDiv(pricePerStep * steps, NANO_PER_MICRO);
        verification = executors;
        uint256 stake = tasks * _exposureFloor + executors * p.slashMilli / p.rewardMilli;
        reservation = Math.ceilDiv(Math.max(stake, LEAST_RESERVED) * durationS * p.reservationBps, BPS * 365 days);
        reservation = Math.min(reservation, type(uint32).max);
        fee = Math.max((executors + verification) * p.feeBps / BPS, reservation);
    }

    /// @inheritdoc IMarket
    function executionIdOf(address client, uint64 nonce) public view returns (bytes32) {
        return keccak256(abi.encode(block.chainid, address(this), client, nonce));
    }

    /// @inheritdoc IMarket
    function requestHashOf(Request calldata request) external pure returns (bytes32) {
        return hashRequest(request);
    }

    /// @inheritdoc IMarket
    function recordOf(ExecutionHistory calldata history, bool settled) public pure returns (bytes32 record) {
        record = _planRecord(history.requestHash, history.planRoot, history.seed);
        if (history.commitments != 0) {
            record = keccak256(abi.encode(record, history.commitments, hashList(history.exposures)));
        } else {
            require(history.exposures.length == 0, RecordMismatch(history.executionId)); // the record binds none
        }
        if (settled) record = keccak256(abi.encode(record, hashList(history.payouts)));
    }

    /// @inheritdoc IMarket
    function executionOf(bytes32 executionId) external view returns (Execution memory) {
        return _executions[executionId];
    }

    /// @inheritdoc IMarket
    function refundableAt(bytes32 executionId) public view returns (uint256) {
        Execution storage execution = _executions[executionId];
        return execution.certified ? _endOf(execution) : execution.deadline + COMMIT_GRACE_S;
    }

    /// @inheritdoc IMarket
    function parameters() external view returns (Parameters memory) {
        return _parameters;
    }

    /// @inheritdoc IMarket
    function longestExecutionS() external view returns (uint64) {
        uint64 open = _lastEnd > block.timestamp ? _lastEnd - SafeCast.toUint64(block.timestamp) : 0;
        uint64 next = uint64(_parameters.maxDeadlineS) + _parameters.settlementGraceS;
        return open > next ? open : next;
    }

    /// @inheritdoc IMarket
    function paused() external view returns (bool) {
        return _totals.paused;
    }

    /// @inheritdoc IMarket
    function totalBalances() external view returns (uint256) {
        return _totals.balances;
    }

    /// @inheritdoc IMarket
    function totalLocked() external view returns (uint256) {
        return _totals.locked;
    }

    /// @inheritdoc IMarket
    function totalFees() external view returns (uint256) {
        return _totals.fees;
    }

    /// @inheritdoc IMarket
    /// @dev The token balance may be larger, because anybody can send tokens to the contract.
    function conserved() external view returns (bool) {
        Totals memory totals = _totals;
        return usdc.balanceOf(address(this)) >= uint256(totals.balances) + totals.locked + totals.fees;
    }

    // ----------------------------------------------------------------------- internal: money

    /// @dev Comparing the balances detects a token that charges a fee, and one that calls back into a second deposit.
    function _deposit(uint256 amount) internal {
        require(amount > 0, AmountMissing());
        uint256 before = usdc.balanceOf(address(this));
        usdc.safeTransferFrom(msg.sender, address(this), amount);
        uint256 received = usdc.balanceOf(address(this)) - before;
        require(received == amount, TransferShort(received, amount));
        uint96 added = SafeCast.toUint96(amount);
        _credit(msg.sender, added);
        _totals.balances += added;
        emit Deposited(msg.sender, amount);
    }

    /// @dev The caller updates the totals.
    function _credit(address account, uint96 amount) internal {
        if (amount > 0) _accounts[account].balance += amount;
    }

    /// @dev The caller updates the totals.
    function _debit(address account, uint256 amount) internal {
        uint256 balance = _accounts[account].balance;
        require(balance >= amount, BalanceTooSmall(account, balance, amount));
        // The difference is at most the balance, which is a uint128.
        _accounts[account].balance = uint128(balance - amount); // forge-lint: disable-line(unsafe-typecast)
    }

    function _requireNotFrozen(address account) internal view {
        uint64 until = _accounts[account].frozenUntil;
        require(block.timestamp >= until, Frozen(account, until));
    }

    /// @dev Releases the exposures at the first call for an execution, and credits the next payouts at each call.
    /// The caller updates the totals.
    function _distribute(ExecutionHistory calldata history) internal returns (uint256 paid) {
        bytes32 executionId = history.executionId;
        Execution storage execution = _executions[executionId];
        Status status = execution.status;
        require(status == Status.Settled || status == Status.Refunded, StatusInvalid(executionId, status));
        bool settled = status == Status.Settled;
        require(execution.record == recordOf(history, settled), RecordMismatch(executionId));
        uint256 end = settled ? history.payouts.length : 0;
        uint256 start = execution.distributed;
        require(!execution.released || start < end, AlreadyDistributed(executionId));

        bool releasing = !execution.released;
        uint16 stop = SafeCast.toUint16(end - start > MAX_CREDITS ? start + MAX_CREDITS : end);
        execution.released = true;
        execution.distributed = stop;
        for (uint256 i = start; i < stop; ++i) {
            bytes32 payout = history.payouts[i];
            _credit(accountOf(payout), amountOf(payout));
            paid += amountOf(payout);
        }
        emit Distributed(executionId, stop - start, end - stop);
        if (!releasing) return paid;
        if (history.exposures.length > 0) nodes.release(history.exposures);
    }

    function _applySettlement(
        bytes32 executionId,
        Execution storage execution,
        Settlement calldata s,
        ExecutionHistory calldata history
    ) internal {
        uint256 paid = sumPayouts(s.payouts);
        uint256 left = execution.maxPrice;
        require(paid <= left, Overpaid(executionId, paid, left));
        left -= paid;
        uint256 fee = Math.min(left, Math.max(paid * execution.feeBps / BPS, _reservedUntilNow(execution)));
        left -= fee;
        uint256 slashed;
        if (s.slashes.length > 0) {
            bytes32[] memory taken;
            (taken, slashed) = nodes.slash(s.slashes, history.exposures);
            emit Slashed(executionId, taken);
            _reward(executionId, s.rewards, slashed, slashed * (BPS - execution.treasuryBps) / BPS);
        }
        _credit(execution.client, SafeCast.toUint96(left));
        Totals memory totals = _totals;
        totals.balances += SafeCast.toUint96(left + slashed);
        totals.locked -= SafeCast.toUint96(left + fee);
        totals.fees += SafeCast.toUint56(fee);
        _totals = totals;
        feesOf[execution.configuration] += fee;
        emit Settled(executionId, s.steps, paid, fee, left, slashed, s.evidenceRoot, s.payouts);
    }

    /// @dev Scales the rewards down instead of reverting: if another settlement has already taken the stake, honest
    /// nodes must still get their payouts.
    function _reward(bytes32 executionId, Payment[] calldata rewards, uint256 slashed, uint256 available) internal {
        uint256 wanted;
        for (uint256 i; i < rewards.length; ++i) {
            require(rewards[i].to != address(0), AddressMissing());
            wanted += rewards[i].amount;
        }
        uint256 given;
        for (uint256 i; i < rewards.length; ++i) {
            uint256 amount = rewards[i].amount;
            if (wanted > available) amount = amount * available / wanted;
            _credit(rewards[i].to, SafeCast.toUint96(amount));
            given += amount;
            emit Rewarded(executionId, rewards[i].to, amount);
        }
        _credit(treasury, SafeCast.toUint96(slashed - given));
    }

    // ------------------------------------------------------------------ internal: executions

    /// @dev Until when the execution can be settled, in Unix seconds.
    function _endOf(Execution storage execution) internal view returns (uint64) {
        return execution.deadline + execution.settlementGraceS;
    }

    /// @dev The part of the reservation for the time that has passed, rounded up.
    function _reservedUntilNow(Execution storage execution) internal view returns (uint256) {
        uint256 leftS = execution.deadline > block.timestamp ? execution.deadline - block.timestamp : 0;
        return Math.ceilDiv(execution.reservation * (execution.durationS - leftS), execution.durationS);
    }

    function _requireAtMost(uint256 count, uint256 maximum) internal pure {
        require(count <= maximum, TooMany(count, maximum));
    }

    function _requireStatus(bytes32 executionId, Status status, Status required) internal pure {
        require(status == required, StatusInvalid(executionId, status));
    }

    function _planRecord(bytes32 requestHash, bytes32 planRoot, bytes32 seed) internal pure returns (bytes32) {
        return keccak256(abi.encode(PLAN_TYPEHASH, requestHash, planRoot, seed));
    }

    /// @dev Checks a request, locks its price and stores the execution. The caller sets status and record.
    function _open(Request memory request) internal returns (bytes32 executionId) {
        Totals memory totals = _totals;
        require(!totals.paused, RequestsPaused());
        uint256 reservation = _checkRequest(request);
        executionId = executionIdOf(request.client, request.nonce);
        Execution storage execution = _executions[executionId];
        require(execution.status == Status.Unknown, NonceUsed(request.client, request.nonce));

        _debit(request.client, request.maxPrice);
        totals.balances -= request.maxPrice;
        totals.locked += request.maxPrice;
        _totals = totals;
        execution.client = request.client;
        execution.steps = request.steps;
        execution.deadline = SafeCast.toUint40(request.deadline);
        execution.durationS = SafeCast.toUint24(request.deadline - block.timestamp); // at most 30 days
        execution.reservation = SafeCast.toUint32(reservation);
        execution.maxPrice = request.maxPrice;
        execution.configuration = SafeCast.toUint32(committee.configuration());
        execution.settlementGraceS = uint24(_parameters.settlementGraceS); // at most 30 days
        execution.feeBps = _parameters.feeBps;
        execution.treasuryBps = _parameters.treasuryBps;
        uint64 end = _endOf(execution);
        if (end > _lastEnd) _lastEnd = end;
        _emitRequest(executionId, request);
    }

    /// @dev A function of its own, because the stack has no room for the fields beside other variables.
    function _emitRequest(bytes32 executionId, Request memory request) internal {
        emit RequestNodeSelections(
            executionId,
            request.modelId,
            request.client,
            request.steps,
            request.inputsDigest,
            request.clientKey,
            request.maxPrice,
            request.deadline,
            request.nonce,
            request.snapshotSequence,
            request.snapshotRoot,
            request.verifyBps
        );
    }

    /// @return What the committee gets at least if the execution gets a plan and lasts to its deadline.
    function _checkRequest(Request memory request) internal view returns (uint256) {
        Parameters storage p = _parameters;
        require(request.steps > 0 && request.steps <= MAX_STEPS, StepsInvalid(request.steps, MAX_STEPS));
        uint256 earliest = block.timestamp + p.minDeadlineS;
        uint256 latest = block.timestamp + p.maxDeadlineS;
        require(
            request.deadline >= earliest && request.deadline <= latest,
            DeadlineInvalid(request.deadline, earliest, latest)
        );
        uint32 durationS = SafeCast.toUint32(request.deadline - block.timestamp);
        (uint256 executors, uint256 verification, uint256 fee, uint256 reserved) =
            quoteParts(request.modelId, request.steps, durationS);
        uint256 required = executors + verification + fee;
        require(request.maxPrice >= required, PriceTooLow(request.maxPrice, required));
        require(
            request.verifyBps >= p.samplingBps && request.verifyBps <= BPS,
            ShareInvalid(request.verifyBps, p.samplingBps)
        );
        return reserved;
    }

    function _acceptPlan(
        bytes32 executionId,
        uint64 configuration,
        bytes32 requestHash,
        PlanSubmission calldata plan,
        bytes calldata signatures
    ) internal {
        uint32 executors = plan.executors;
        _requireAtMost(executors, MAX_EXECUTORS);
        require(executors > 0, ExecutorsMissing(executionId));
        require(plan.planRoot != 0, RootMissing(executionId));
        bytes32 seed = keccak256(plan.seedSignature);
        committee.requireQuorumOf(
            configuration,
            keccak256(
                abi.encode(PLAN_TYPEHASH, configuration, executionId, requestHash, plan.planRoot, seed, executors)
            ),
            signatures
        );
        // last: it costs the most gas
        committee.verifyRandomnessOf(
            configuration, abi.encode(SEED_TAG, executionId, requestHash), plan.seedSignature
        );

        Execution storage execution = _executions[executionId];
        execution.status = Status.Planned;
        execution.record = _planRecord(requestHash, plan.planRoot, seed);
        emit PlanAccepted(executionId, plan.planRoot, seed, executors);
    }

    // ------------------------------------------------------------------ internal: parameters

    function _setParameters(Parameters memory p) internal {
        rules.check(p);
        _parameters = p;
        emit ParametersSet(p);
    }
}
