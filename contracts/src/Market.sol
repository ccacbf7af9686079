// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Ownable} from "@openzeppelin/contracts/access/Ownable.sol";
import {Ownable2Step} from "@openzeppelin/contracts/access/Ownable2Step.sol";
import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {IERC20Permit} from "@openzeppelin/contracts/token/ERC20/extensions/IERC20Permit.sol";
import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {ECDSA} from "@openzeppelin/contracts/utils/cryptography/ECDSA.sol";
import {MessageHashUtils} from "@openzeppelin/contracts/utils/cryptography/MessageHashUtils.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {MarketRules} from "./MarketRules.sol";
import {accountOf, amountOf, hashWords, toWord} from "./Words.sol";
import {ICommittee, Member} from "./interfaces/ICommittee.sol";
import {
    Completion,
    Due,
    Execution,
    IMarket,
    Parameters,
    Payment,
    Request,
    Settlement,
    Slash,
    Status,
    Terms
} from "./interfaces/IMarket.sol";
import {IModelRegistry} from "./interfaces/IModelRegistry.sol";
import {INodeRegistry} from "./interfaces/INodeRegistry.sol";

/// @title The market
/// @notice See {IMarket}.
/// @dev The token is USDC; one that keeps a fee is refused. Committee, nodes and models are SplitUp's
/// own contracts, fixed at construction.
contract Market is IMarket, Ownable2Step {
    using SafeERC20 for IERC20;

    // ---------------------------------------------------------------------------- constants

    uint256 internal constant BPS = 10_000;
    uint256 internal constant MAX_STEPS = 65_536;
    uint256 internal constant MAX_COMPLETIONS = 64;
    uint256 internal constant MAX_EXECUTORS = 1_024; // as many as a model has tasks
    uint256 internal constant MAX_PAYOUTS = 2_048; // one each for 1024 executors and 1024 validators
    uint256 internal constant MAX_SLASHES = 64; // and as many rewards
    uint256 internal constant MAX_DUES = 64;
    uint256 internal constant MAX_CREDITS = 384; // of one execution in one call: new accounts cost 22 k gas each
    uint256 internal constant MAX_FREEZE_S = 30 days; // a slip of the keyboard cannot keep money for ever

    bytes32 internal constant DOMAIN_TYPEHASH =
        keccak256("EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)");
    bytes32 internal constant REQUEST_TYPEHASH = keccak256(
        "Request(address client,bytes32 modelId,uint32 steps,bytes32 inputsDigest,bytes32 clientKey,uint96 maxPrice,uint64 deadline,uint64 nonce,uint64 snapshotSequence,bytes32 snapshotRoot)"
    );
    bytes32 internal constant SEED_TAG = keccak256("splitup/plan-seed/v1");
    bytes32 internal constant PLAN_TYPEHASH =
        keccak256("Plan(bytes32 executionId,bytes32 planRoot,bytes32 seed,uint32 executors)");
    bytes32 internal constant COMMITMENTS_TYPEHASH =
        keccak256("Commitments(bytes32 executionId,bytes32 root,bytes32[] exposures)");
    bytes32 internal constant SETTLEMENT_TYPEHASH =
        keccak256("Settlement(bytes32 executionId,bytes32 settlementHash)");

    // ------------------------------------------------------------------------------ storage

    struct Account {
        uint128 balance;
        uint64 frozenUntil;
    }

    /// @dev One slot, written by everything that moves money.
    struct Books {
        uint96 balances; // sum of all accounts
        uint96 locked; // open executions, and payouts that are not distributed
        uint56 fees; // 72 billion USDC
        bool paused; // here because requests read this slot anyway
    }

    IERC20 public immutable usdc;
    ICommittee public immutable committee;
    INodeRegistry public immutable nodes;
    IModelRegistry public immutable models;
    MarketRules public immutable rules;

    /// @inheritdoc IMarket
    address public treasury;
    Books internal _books;
    Parameters internal _parameters;
    mapping(address account => Account) internal _accounts;
    mapping(bytes32 executionId => Execution) internal _executions;
    /// @inheritdoc IMarket
    mapping(bytes32 executionId => mapping(address node => bytes32)) public commitmentOf;

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
        rules = new MarketRules();
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
        _requireThawed(msg.sender);
        _debit(msg.sender, amount);
        _books.balances -= SafeCast.toUint96(amount);
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
        uint64 nonce
    ) external returns (bytes32 executionId) {
        _requireThawed(msg.sender);
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
            snapshotRoot: root
        });
        executionId = _open(request);
        Execution storage execution = _executions[executionId];
        execution.status = Status.Requested;
        execution.record = _hashRequest(request);
    }

    /// @inheritdoc IMarket
    function submitCompletePlan(Request calldata request, Terms calldata terms, bytes calldata signatures)
        external
    {
        bytes32 executionId = executionIdOf(request.client, request.nonce);
        Execution storage execution = _executions[executionId];
        _requireStatus(executionId, execution.status, Status.Requested);
        require(block.timestamp < execution.deadline, DeadlinePassed(executionId, execution.deadline));
        bytes32 requestHash = _hashRequest(request);
        require(execution.record == requestHash, RecordMismatch(executionId));
        _acceptPlan(executionId, execution.configuration, request, requestHash, terms, signatures);
    }

    /// @inheritdoc IMarket
    function openExecution(
        Request calldata request,
        bytes calldata clientSignature,
        Terms calldata terms,
        bytes calldata signatures
    ) external returns (bytes32 executionId) {
        require(
            request.snapshotRoot != 0 && request.snapshotRoot == committee.snapshotRootOf(request.snapshotSequence),
            SnapshotUnknown(request.snapshotSequence, request.snapshotRoot)
        );
        bytes32 requestHash = _hashRequest(request);
        (address signer, ECDSA.RecoverError failure,) =
            ECDSA.tryRecoverCalldata(MessageHashUtils.toTypedDataHash(_domainSeparator(), requestHash), clientSignature);
        require(
            failure == ECDSA.RecoverError.NoError && signer == request.client, ClientSignatureInvalid(request.client)
        );
        executionId = _open(request);
        _acceptPlan(executionId, committee.configuration(), request, requestHash, terms, signatures);
    }

    /// @inheritdoc IMarket
    /// @dev The lock comes last: it is the dearest part, and the only call to another contract that writes.
    function commitExecution(
        bytes32 executionId,
        bytes32 root,
        bytes32[] calldata exposures,
        bytes calldata signatures
    ) external {
        Execution storage execution = _executions[executionId];
        _requireStatus(executionId, execution.status, Status.Planned);
        require(!execution.certified, CommitmentExists(executionId, address(0)));
        require(root != 0, RootMissing(executionId));
        require(exposures.length > 0, ExecutorsMissing(executionId));
        require(exposures.length <= MAX_EXECUTORS, TooMany(exposures.length, MAX_EXECUTORS));
        bytes32 digest = hashWords(exposures);
        committee.requireQuorumOf(
            execution.configuration, keccak256(abi.encode(COMMITMENTS_TYPEHASH, executionId, root, digest)), signatures
        );

        execution.certified = true;
        execution.record = keccak256(abi.encode(execution.record, root, digest));
        emit ExecutionCommitted(executionId, root, exposures);
        nodes.lock(exposures);
    }

    /// @inheritdoc IMarket
    /// @dev Whether the caller is in the plan, and what it stands to lose, is the committee's to know: the
    /// chain stores only a hash of the plan. A stranger's commitment earns nothing and can only lengthen the
    /// wait for a refund by the grace.
    function commitCompletions(Completion[] calldata completions) external {
        uint256 count = completions.length;
        require(count <= MAX_COMPLETIONS, TooMany(count, MAX_COMPLETIONS));
        require(nodes.isActive(msg.sender), NodeInactive(msg.sender));
        uint96 exposed;
        for (uint256 i; i < count; ++i) {
            _commitCompletion(completions[i]);
            exposed += completions[i].exposure;
        }
        bytes32[] memory words = new bytes32[](1);
        words[0] = toWord(msg.sender, exposed);
        nodes.lock(words);
    }

    /// @inheritdoc IMarket
    function settle(bytes32 executionId, Settlement calldata s, bytes calldata signatures) external {
        Execution storage execution = _executions[executionId];
        _requireStatus(executionId, execution.status, Status.Planned);
        require(s.payouts.length <= MAX_PAYOUTS, TooMany(s.payouts.length, MAX_PAYOUTS));
        require(s.rewards.length <= MAX_SLASHES, TooMany(s.rewards.length, MAX_SLASHES));
        require(s.slashes.length <= MAX_SLASHES, TooMany(s.slashes.length, MAX_SLASHES));
        require(s.steps <= execution.steps, StepsInvalid(s.steps, execution.steps));
        committee.requireQuorumOf(
            execution.configuration,
            keccak256(abi.encode(SETTLEMENT_TYPEHASH, executionId, keccak256(abi.encode(s)))),
            signatures
        );

        execution.status = Status.Settled; // before any call to the registry or the token
        execution.record = keccak256(abi.encode(execution.record, hashWords(s.payouts)));
        _applySettlement(executionId, execution, s);
    }

    /// @inheritdoc IMarket
    function distribute(Due[] calldata dues) external {
        uint256 count = dues.length;
        require(count <= MAX_DUES, TooMany(count, MAX_DUES));
        uint256 total;
        for (uint256 i; i < count; ++i) {
            total += _distribute(dues[i]);
        }
        uint96 paid = SafeCast.toUint96(total);
        Books memory books = _books;
        books.balances += paid;
        books.locked -= paid;
        _books = books;
    }

    /// @inheritdoc IMarket
    function refund(bytes32 executionId) external {
        Execution storage execution = _executions[executionId];
        Status status = execution.status;
        require(status == Status.Requested || status == Status.Planned, StatusInvalid(executionId, status));
        uint256 earliest = refundableAt(executionId);
        require(block.timestamp >= earliest, NotRefundable(executionId, earliest));

        execution.status = Status.Refunded;
        uint96 amount = execution.maxPrice;
        _credit(execution.client, amount);
        Books memory books = _books;
        books.balances += amount;
        books.locked -= amount;
        _books = books;
        emit Refunded(executionId, execution.client, amount);
    }

    /// @inheritdoc IMarket
    function collectFees() external {
        Member[] memory members = committee.members();
        Books memory books = _books;
        uint56 share = SafeCast.toUint56(books.fees / members.length);
        uint56 amount = SafeCast.toUint56(share * members.length);
        for (uint256 i; i < members.length; ++i) {
            _credit(members[i].account, share);
        }
        books.fees -= amount;
        books.balances += amount;
        _books = books;
        emit FeesCollected(amount, members.length);
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

    /// @inheritdoc IMarket
    function setPaused(bool paused_) external onlyOwner {
        _books.paused = paused_;
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
    function quote(bytes32 modelId, uint32 steps) public view returns (uint256) {
        (uint256 executors, uint256 verification, uint256 fee) = quoteParts(modelId, steps);
        return executors + verification + fee;
    }

    /// @inheritdoc IMarket
    function quoteParts(bytes32 modelId, uint32 steps)
        public
        view
        returns (uint256 executors, uint256 verification, uint256 fee)
    {
        executors = models.pricePerStep(modelId) * steps;
        verification = executors;
        fee = (executors + verification) * _parameters.feeBps / BPS;
    }

    /// @inheritdoc IMarket
    function executionIdOf(address client, uint64 nonce) public view returns (bytes32) {
        return keccak256(abi.encode(block.chainid, address(this), client, nonce));
    }

    /// @inheritdoc IMarket
    function requestHashOf(Request calldata request) external pure returns (bytes32) {
        return _hashRequest(request);
    }

    /// @inheritdoc IMarket
    function recordOf(Due calldata due, bool settled) public pure returns (bytes32 record) {
        record = _planRecord(due.requestHash, due.planRoot, due.seed);
        for (uint256 i; i < due.own.length; ++i) {
            record = keccak256(abi.encode(record, due.own[i]));
        }
        if (due.commitments != 0) {
            record = keccak256(abi.encode(record, due.commitments, hashWords(due.exposures)));
        } else {
            require(due.exposures.length == 0, RecordMismatch(due.executionId)); // nothing binds them
        }
        if (settled) record = keccak256(abi.encode(record, hashWords(due.payouts)));
    }

    /// @inheritdoc IMarket
    function executionOf(bytes32 executionId) external view returns (Execution memory) {
        return _executions[executionId];
    }

    /// @inheritdoc IMarket
    function refundableAt(bytes32 executionId) public view returns (uint256) {
        Execution storage execution = _executions[executionId];
        bool complete = execution.status == Status.Planned
            && (execution.certified || execution.committed >= execution.executorCount);
        return execution.deadline + (complete ? _parameters.settlementGraceS : 0);
    }

    /// @inheritdoc IMarket
    function parameters() external view returns (Parameters memory) {
        return _parameters;
    }

    /// @inheritdoc IMarket
    function longestExecutionS() external view returns (uint64) {
        return _longestExecutionS(_parameters);
    }

    /// @inheritdoc IMarket
    function paused() external view returns (bool) {
        return _books.paused;
    }

    /// @inheritdoc IMarket
    function totalBalances() external view returns (uint256) {
        return _books.balances;
    }

    /// @inheritdoc IMarket
    function totalLocked() external view returns (uint256) {
        return _books.locked;
    }

    /// @inheritdoc IMarket
    function totalFees() external view returns (uint256) {
        return _books.fees;
    }

    /// @inheritdoc IMarket
    /// @dev "At least", because anybody can send the contract tokens that nobody is owed.
    function conserved() external view returns (bool) {
        Books memory books = _books;
        return usdc.balanceOf(address(this)) >= uint256(books.balances) + books.locked + books.fees;
    }

    // ----------------------------------------------------------------------- internal: money

    /// @dev Comparing the balance catches a token that keeps a fee, and one that calls back into a second
    /// deposit.
    function _deposit(uint256 amount) internal {
        require(amount > 0, AmountMissing());
        uint256 before = usdc.balanceOf(address(this));
        usdc.safeTransferFrom(msg.sender, address(this), amount);
        uint256 received = usdc.balanceOf(address(this)) - before;
        require(received == amount, TransferShort(received, amount));
        uint96 added = SafeCast.toUint96(amount);
        _credit(msg.sender, added);
        _books.balances += added;
        emit Deposited(msg.sender, amount);
    }

    /// @dev The caller keeps the books.
    function _credit(address account, uint96 amount) internal {
        if (amount > 0) _accounts[account].balance += amount;
    }

    /// @dev The caller keeps the books.
    function _debit(address account, uint256 amount) internal {
        uint256 balance = _accounts[account].balance;
        require(balance >= amount, BalanceTooSmall(account, balance, amount));
        // The difference is at most the balance, which is a uint128.
        _accounts[account].balance = uint128(balance - amount); // forge-lint: disable-line(unsafe-typecast)
    }

    function _requireThawed(address account) internal view {
        uint64 until = _accounts[account].frozenUntil;
        require(block.timestamp >= until, Frozen(account, until));
    }

    function _sum(bytes32[] calldata payouts) internal pure returns (uint256 paid) {
        address previous;
        for (uint256 i; i < payouts.length; ++i) {
            address account = accountOf(payouts[i]);
            require(account > previous, PayoutsNotAscending(previous, account));
            previous = account;
            paid += amountOf(payouts[i]);
        }
    }

    /// @dev Releases the exposures at the first call, credits the next payouts at each. The caller keeps
    /// the books.
    function _distribute(Due calldata due) internal returns (uint256 paid) {
        bytes32 executionId = due.executionId;
        Execution storage execution = _executions[executionId];
        Status status = execution.status;
        require(status == Status.Settled || status == Status.Refunded, StatusInvalid(executionId, status));
        bool settled = status == Status.Settled;
        require(execution.record == recordOf(due, settled), RecordMismatch(executionId));
        uint256 end = settled ? due.payouts.length : 0;
        uint256 start = execution.distributed;
        require(!execution.released || start < end, AlreadyDistributed(executionId));

        bool releasing = !execution.released;
        uint16 stop = SafeCast.toUint16(end - start > MAX_CREDITS ? start + MAX_CREDITS : end);
        execution.released = true;
        execution.distributed = stop;
        for (uint256 i = start; i < stop; ++i) {
            bytes32 payout = due.payouts[i];
            _credit(accountOf(payout), amountOf(payout));
            paid += amountOf(payout);
        }
        emit Distributed(executionId, stop - start, end - stop);
        if (!releasing) return paid;
        if (due.exposures.length > 0) nodes.release(due.exposures);
        if (due.own.length > 0) nodes.release(due.own);
    }

    function _applySettlement(bytes32 executionId, Execution storage execution, Settlement calldata s) internal {
        uint256 paid = _sum(s.payouts);
        uint256 left = execution.maxPrice;
        require(paid <= left, Overpaid(executionId, paid, left));
        left -= paid;
        uint256 fee = paid * _parameters.feeBps / BPS;
        if (fee > left) fee = left;
        left -= fee;
        uint256 slashed;
        if (s.slashes.length > 0) {
            slashed = _slash(executionId, s.slashes);
            _reward(executionId, s.rewards, slashed);
        }
        _credit(execution.client, SafeCast.toUint96(left));
        Books memory books = _books;
        books.balances += SafeCast.toUint96(left + slashed);
        books.locked -= SafeCast.toUint96(left + fee);
        books.fees += SafeCast.toUint56(fee);
        _books = books;
        emit Settled(executionId, s.steps, paid, fee, left, slashed, s.evidenceRoot, s.payouts);
    }

    function _slash(bytes32 executionId, Slash[] calldata slashes) internal returns (uint256 slashed) {
        for (uint256 i; i < slashes.length; ++i) {
            uint256 taken = nodes.slash(slashes[i].node, slashes[i].amount);
            slashed += taken;
            emit Slashed(executionId, slashes[i].node, taken);
        }
    }

    /// @dev Scaling instead of refusing: a stake that another settlement emptied must not keep the honest
    /// from their payouts.
    function _reward(bytes32 executionId, Payment[] calldata rewards, uint256 slashed) internal {
        uint256 available = slashed * (BPS - _parameters.treasuryBps) / BPS;
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

    function _requireStatus(bytes32 executionId, Status status, Status required) internal pure {
        require(status == required, StatusInvalid(executionId, status));
    }

    /// @dev Computed anew: after a fork of the chain a signature counts on one side only.
    function _domainSeparator() internal view returns (bytes32) {
        return keccak256(
            abi.encode(DOMAIN_TYPEHASH, keccak256("SplitUp"), keccak256("1"), block.chainid, address(this))
        );
    }

    function _hashRequest(Request memory request) internal pure returns (bytes32) {
        return keccak256(abi.encode(REQUEST_TYPEHASH, request));
    }

    function _planRecord(bytes32 requestHash, bytes32 planRoot, bytes32 seed) internal pure returns (bytes32) {
        return keccak256(abi.encode(PLAN_TYPEHASH, requestHash, planRoot, seed));
    }

    /// @dev Checks a request, locks its price and opens it, save for status and record.
    function _open(Request memory request) internal returns (bytes32 executionId) {
        Books memory books = _books;
        require(!books.paused, RequestsPaused());
        _checkRequest(request);
        executionId = executionIdOf(request.client, request.nonce);
        Execution storage execution = _executions[executionId];
        require(execution.status == Status.Unknown, NonceUsed(request.client, request.nonce));

        _debit(request.client, request.maxPrice);
        books.balances -= request.maxPrice;
        books.locked += request.maxPrice;
        _books = books;
        execution.client = request.client;
        execution.steps = request.steps;
        execution.deadline = request.deadline;
        execution.maxPrice = request.maxPrice;
        execution.configuration = committee.configuration();
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
            request.snapshotRoot
        );
    }

    function _checkRequest(Request memory request) internal view {
        Parameters storage p = _parameters;
        require(request.steps > 0 && request.steps <= MAX_STEPS, StepsInvalid(request.steps, MAX_STEPS));
        uint256 earliest = block.timestamp + p.minDeadlineS;
        uint256 latest = block.timestamp + p.maxDeadlineS;
        require(
            request.deadline >= earliest && request.deadline <= latest,
            DeadlineInvalid(request.deadline, earliest, latest)
        );
        uint256 required = quote(request.modelId, request.steps);
        if (required < p.minPrice) required = p.minPrice;
        require(request.maxPrice >= required, PriceTooLow(request.maxPrice, required));
    }

    function _commitCompletion(Completion calldata completion) internal {
        bytes32 executionId = completion.executionId;
        Execution storage execution = _executions[executionId];
        _requireStatus(executionId, execution.status, Status.Planned);
        require(!execution.certified, CommitmentExists(executionId, address(0)));
        require(commitmentOf[executionId][msg.sender] == 0, CommitmentExists(executionId, msg.sender));
        require(
            completion.steps > 0 && completion.steps <= execution.steps,
            StepsInvalid(completion.steps, execution.steps)
        );
        require(completion.root != 0, RootMissing(executionId));
        require(execution.committed < MAX_EXECUTORS, TooMany(MAX_EXECUTORS + 1, MAX_EXECUTORS));

        ++execution.committed;
        execution.record = keccak256(abi.encode(execution.record, toWord(msg.sender, completion.exposure)));
        commitmentOf[executionId][msg.sender] = keccak256(abi.encode(completion.steps, completion.root));
        emit CompletionCommitted(executionId, msg.sender, completion.steps, completion.root, completion.exposure);
    }

    function _acceptPlan(
        bytes32 executionId,
        uint64 configuration,
        Request calldata request,
        bytes32 requestHash,
        Terms calldata terms,
        bytes calldata signatures
    ) internal {
        uint32 executors = terms.executors;
        require(executors <= MAX_EXECUTORS, TooMany(executors, MAX_EXECUTORS));
        require(executors > 0, ExecutorsMissing(executionId));
        require(terms.planRoot != 0, RootMissing(executionId));
        bytes32 seed = keccak256(terms.seedSignature);
        committee.requireQuorumOf(
            configuration,
            keccak256(abi.encode(PLAN_TYPEHASH, executionId, terms.planRoot, seed, executors)),
            signatures
        );
        _verifySeed(executionId, configuration, request, terms.seedSignature); // the dearest check is the last

        Execution storage execution = _executions[executionId];
        execution.status = Status.Planned;
        // At most MAX_EXECUTORS, by the first check.
        execution.executorCount = uint16(executors); // forge-lint: disable-line(unsafe-typecast)
        execution.record = _planRecord(requestHash, terms.planRoot, seed);
        emit PlanAccepted(executionId, terms.planRoot, seed, executors);
    }

    function _verifySeed(bytes32 executionId, uint64 configuration, Request calldata request, bytes calldata signature)
        internal
        view
    {
        committee.verifyRandomnessOf(
            configuration,
            abi.encode(SEED_TAG, executionId, request.modelId, request.snapshotSequence, request.snapshotRoot),
            signature
        );
    }

    // ------------------------------------------------------------------ internal: parameters

    function _longestExecutionS(Parameters memory p) internal pure returns (uint64) {
        return uint64(p.maxDeadlineS) + p.settlementGraceS;
    }

    function _setParameters(Parameters memory p) internal {
        rules.check(p, nodes.unbondingPeriod());
        _parameters = p;
        emit ParametersSet(p);
    }
}
