// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Ownable} from "@openzeppelin/contracts/access/Ownable.sol";
import {Ownable2Step} from "@openzeppelin/contracts/access/Ownable2Step.sol";
import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {IERC20Permit} from "@openzeppelin/contracts/token/ERC20/extensions/IERC20Permit.sol";
import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {ICommittee} from "./interfaces/ICommittee.sol";
import {
    Completion,
    Execution,
    IMarket,
    Parameters,
    Payment,
    Settlement,
    Slash,
    Status
} from "./interfaces/IMarket.sol";
import {IModelRegistry} from "./interfaces/IModelRegistry.sol";
import {INodeRegistry} from "./interfaces/INodeRegistry.sol";

/// @title The market
/// @notice See {IMarket}.
/// @dev The token is USDC: no fee on transfer, no callback. Committee, nodes and models are SplitUp's
/// own contracts, fixed at construction.
contract Market is IMarket, Ownable2Step {
    using SafeERC20 for IERC20;

    // ---------------------------------------------------------------------------- constants

    uint256 internal constant BPS = 10_000;
    uint256 internal constant MILLI = 1_000;
    uint256 internal constant MICRO = 1_000_000;
    uint256 internal constant MAX_STEPS = 65_536;
    uint256 internal constant MAX_TIE_BREAKERS = 8; // keeps the condition's powers within 256 bits
    uint256 internal constant MAX_COMPLETIONS = 64;
    uint256 internal constant MAX_PAYMENTS = 2_048; // one each for 1024 executors and 1024 validators
    uint256 internal constant MAX_SLASHES = 64;
    uint32 internal constant MAX_GRACE_S = 30 days; // an owner cannot keep a client's money for ever
    uint32 internal constant MAX_DEADLINE_S = 30 days;

    bytes32 internal constant PLAN_TYPEHASH =
        keccak256("Plan(bytes32 executionId,bytes32 planRoot,bytes32 seed,uint16 executorCount)");
    bytes32 internal constant SETTLEMENT_TYPEHASH =
        keccak256("Settlement(bytes32 executionId,bytes32 settlementHash)");

    // ------------------------------------------------------------------------------ storage

    IERC20 public immutable usdc;
    ICommittee public immutable committee;
    INodeRegistry public immutable nodes;
    IModelRegistry public immutable models;

    /// @inheritdoc IMarket
    address public treasury;
    /// @inheritdoc IMarket
    uint256 public totalBalances;
    /// @inheritdoc IMarket
    uint256 public totalLocked;
    /// @inheritdoc IMarket
    mapping(address account => uint256) public balanceOf;
    /// @inheritdoc IMarket
    mapping(bytes32 executionId => mapping(address node => bytes32)) public commitmentOf;
    Parameters internal _parameters;
    mapping(bytes32 executionId => Execution) internal _executions;

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
        // A permit that somebody has submitted already fails here and has left its allowance; a bad
        // one leaves none, and the transfer says so.
        try IERC20Permit(address(usdc)).permit(msg.sender, address(this), amount, permitDeadline, v, r, s) {} catch {}
        _deposit(amount);
    }

    /// @inheritdoc IMarket
    function withdraw(uint256 amount) external {
        require(amount > 0, AmountMissing());
        _debit(msg.sender, amount);
        emit Withdrawn(msg.sender, amount);
        usdc.safeTransfer(msg.sender, amount);
    }

    // --------------------------------------------------------------------------- executions

    /// @inheritdoc IMarket
    function requestExecution(
        bytes32 modelId,
        uint32 steps,
        bytes32 inputsDigest,
        bytes32 clientKey,
        uint128 maxPrice,
        uint64 deadline,
        uint64 nonce
    ) external returns (bytes32 executionId) {
        _checkRequest(modelId, steps, maxPrice, deadline);
        executionId = executionIdOf(msg.sender, nonce);
        Execution storage execution = _executions[executionId];
        require(execution.status == Status.Unknown, NonceUsed(msg.sender, nonce));
        (uint64 sequence, bytes32 root) = committee.latestSnapshot();

        _debit(msg.sender, maxPrice);
        totalLocked += maxPrice;
        execution.client = msg.sender;
        execution.steps = steps;
        execution.deadline = deadline;
        execution.maxPrice = maxPrice;
        execution.snapshotSequence = sequence;
        execution.status = Status.Requested;
        execution.modelId = modelId;
        execution.snapshotRoot = root;
        emit RequestNodeSelections(
            executionId, modelId, msg.sender, steps, inputsDigest, clientKey, maxPrice, deadline, sequence, root
        );
    }

    /// @inheritdoc IMarket
    function submitCompletePlan(
        bytes32 executionId,
        bytes32 planRoot,
        bytes32 seed,
        uint16 executorCount,
        bytes calldata signatures
    ) external {
        Execution storage execution = _executions[executionId];
        require(execution.status == Status.Requested, StatusInvalid(executionId, execution.status));
        require(block.timestamp < execution.deadline, DeadlinePassed(executionId, execution.deadline));
        require(planRoot != 0, RootMissing(executionId));
        require(executorCount > 0, ExecutorsMissing(executionId));
        committee.requireQuorum(
            keccak256(abi.encode(PLAN_TYPEHASH, executionId, planRoot, seed, executorCount)), signatures
        );

        execution.status = Status.Planned;
        execution.executorCount = executorCount;
        execution.planRoot = planRoot;
        execution.seed = seed;
        emit PlanAccepted(executionId, planRoot, seed, executorCount);
    }

    /// @inheritdoc IMarket
    /// @dev Whether the caller is in the plan is the committee's to know: the chain stores only the
    /// plan's root. A stranger's commitment earns nothing and can only lengthen the wait for a refund
    /// by the grace.
    function commitCompletions(Completion[] calldata completions) external {
        uint256 count = completions.length;
        require(count <= MAX_COMPLETIONS, TooMany(count, MAX_COMPLETIONS));
        require(nodes.isActive(msg.sender), NodeInactive(msg.sender));
        for (uint256 i; i < count; ++i) {
            Completion calldata completion = completions[i];
            bytes32 executionId = completion.executionId;
            Execution storage execution = _executions[executionId];
            require(execution.status == Status.Planned, StatusInvalid(executionId, execution.status));
            require(commitmentOf[executionId][msg.sender] == 0, CommitmentExists(executionId, msg.sender));
            require(
                completion.steps > 0 && completion.steps <= execution.steps,
                StepsInvalid(completion.steps, execution.steps)
            );
            require(completion.root != 0, RootMissing(executionId));

            ++execution.committed;
            commitmentOf[executionId][msg.sender] = keccak256(abi.encode(completion.steps, completion.root));
            emit CompletionCommitted(executionId, msg.sender, completion.steps, completion.root);
        }
    }

    /// @inheritdoc IMarket
    function settle(bytes32 executionId, Settlement calldata s, bytes calldata signatures) external {
        Execution storage execution = _executions[executionId];
        require(execution.status == Status.Planned, StatusInvalid(executionId, execution.status));
        require(s.payments.length <= MAX_PAYMENTS, TooMany(s.payments.length, MAX_PAYMENTS));
        require(s.slashes.length <= MAX_SLASHES, TooMany(s.slashes.length, MAX_SLASHES));
        require(s.steps <= execution.steps, StepsInvalid(s.steps, execution.steps));
        committee.requireQuorum(
            keccak256(abi.encode(SETTLEMENT_TYPEHASH, executionId, keccak256(abi.encode(s)))), signatures
        );

        execution.status = Status.Settled; // before any call to the registry or the token
        uint256 locked = execution.maxPrice;
        totalLocked -= locked;
        uint256 slashed = _slash(executionId, s.slashes);
        (uint256 paid, uint256 paidFromSlash) = _pay(executionId, s.payments);
        require(paid <= locked, Overpaid(executionId, paid, locked));
        require(paidFromSlash <= slashed, Overpaid(executionId, paidFromSlash, slashed));
        _credit(execution.client, locked - paid);
        _credit(treasury, slashed - paidFromSlash);
        emit Settled(executionId, s.steps, paid, locked - paid, slashed, s.evidenceRoot);
    }

    /// @inheritdoc IMarket
    function refund(bytes32 executionId) external {
        Execution storage execution = _executions[executionId];
        Status status = execution.status;
        require(status == Status.Requested || status == Status.Planned, StatusInvalid(executionId, status));
        uint256 earliest = refundableAt(executionId);
        require(block.timestamp >= earliest, NotRefundable(executionId, earliest));

        execution.status = Status.Refunded;
        uint256 amount = execution.maxPrice;
        totalLocked -= amount;
        _credit(execution.client, amount);
        emit Refunded(executionId, execution.client, amount);
    }

    // ------------------------------------------------------------------------ owner's verbs

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

    // ------------------------------------------------------------------------------- views

    /// @inheritdoc IMarket
    function quote(bytes32 modelId, uint32 steps) public view returns (uint256) {
        return 2 * models.pricePerStep(modelId) * steps;
    }

    /// @inheritdoc IMarket
    function executionIdOf(address client, uint64 nonce) public view returns (bytes32) {
        return keccak256(abi.encode(block.chainid, address(this), client, nonce));
    }

    /// @inheritdoc IMarket
    function executionOf(bytes32 executionId) external view returns (Execution memory) {
        return _executions[executionId];
    }

    /// @inheritdoc IMarket
    function refundableAt(bytes32 executionId) public view returns (uint256) {
        Execution storage execution = _executions[executionId];
        bool complete = execution.status == Status.Planned && execution.committed >= execution.executorCount;
        return execution.deadline + (complete ? _parameters.settlementGraceS : 0);
    }

    /// @inheritdoc IMarket
    function parameters() external view returns (Parameters memory) {
        return _parameters;
    }

    /// @inheritdoc IMarket
    /// @dev "At least", because anybody can send the contract tokens that nobody is owed.
    function conserved() external view returns (bool) {
        return usdc.balanceOf(address(this)) >= totalBalances + totalLocked;
    }

    // ----------------------------------------------------------------------------- internal

    function _deposit(uint256 amount) internal {
        require(amount > 0, AmountMissing());
        _credit(msg.sender, amount);
        emit Deposited(msg.sender, amount);
        usdc.safeTransferFrom(msg.sender, address(this), amount);
    }

    function _credit(address account, uint256 amount) internal {
        balanceOf[account] += amount;
        totalBalances += amount;
    }

    function _debit(address account, uint256 amount) internal {
        uint256 balance = balanceOf[account];
        require(balance >= amount, BalanceTooSmall(account, balance, amount));
        balanceOf[account] = balance - amount;
        totalBalances -= amount;
    }

    function _checkRequest(bytes32 modelId, uint32 steps, uint128 maxPrice, uint64 deadline) internal view {
        require(steps > 0 && steps <= MAX_STEPS, StepsInvalid(steps, MAX_STEPS));
        uint256 earliest = block.timestamp + _parameters.minDeadlineS;
        uint256 latest = block.timestamp + _parameters.maxDeadlineS;
        require(deadline >= earliest && deadline <= latest, DeadlineInvalid(deadline, earliest, latest));
        uint256 required = quote(modelId, steps);
        if (required < _parameters.minPrice) required = _parameters.minPrice;
        require(maxPrice >= required, PriceTooLow(maxPrice, required));
    }

    function _slash(bytes32 executionId, Slash[] calldata slashes) internal returns (uint256 slashed) {
        for (uint256 i; i < slashes.length; ++i) {
            uint256 taken = nodes.slash(slashes[i].node, slashes[i].amount);
            slashed += taken;
            emit Slashed(executionId, slashes[i].node, taken);
        }
    }

    function _pay(bytes32 executionId, Payment[] calldata payments)
        internal
        returns (uint256 paid, uint256 paidFromSlash)
    {
        for (uint256 i; i < payments.length; ++i) {
            Payment calldata payment = payments[i];
            require(payment.to != address(0), AddressMissing());
            if (payment.fromSlash) paidFromSlash += payment.amount;
            else paid += payment.amount;
            _credit(payment.to, payment.amount);
            emit Paid(executionId, payment.to, payment.amount, payment.fromSlash);
        }
    }

    /// @dev The condition is p > (C+B) / ((1-r)^k (R+S)); C = 1000 milli. Both sides are multiplied out,
    /// so that no division decides.
    function _setParameters(Parameters memory p) internal {
        require(p.samplingBps > 0 && p.samplingBps <= BPS, ParameterInvalid("samplingBps"));
        require(p.collusionBps < BPS, ParameterInvalid("collusionBps"));
        require(p.tieBreakers <= MAX_TIE_BREAKERS, ParameterInvalid("tieBreakers"));
        require(p.settlementGraceS <= MAX_GRACE_S, ParameterInvalid("settlementGraceS"));
        require(p.maxDeadlineS <= MAX_DEADLINE_S, ParameterInvalid("maxDeadlineS"));
        require(p.minDeadlineS > 0 && p.minDeadlineS <= p.maxDeadlineS, ParameterInvalid("minDeadlineS"));
        uint256 loss = p.samplingBps * (BPS - p.collusionBps) ** p.tieBreakers * (uint256(p.rewardMilli) + p.slashMilli);
        uint256 gain = (MILLI + p.validationBonusMilli) * BPS ** (uint256(p.tieBreakers) + 1);
        uint256 scale = MICRO / MILLI;
        require(
            loss > gain,
            ParametersUnsafe(
                loss * scale / BPS ** (uint256(p.tieBreakers) + 1), (MILLI + p.validationBonusMilli) * scale
            )
        );
        _parameters = p;
        emit ParametersSet(p);
    }
}
