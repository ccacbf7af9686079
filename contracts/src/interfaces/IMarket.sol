// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// @notice The market's economic parameters. C is the cost of computing one task.
/// @param samplingBps p: share of tasks that are verified, in 1/10000.
/// @param collusionBps r: assumed share of colluding nodes, in 1/10000.
/// @param rewardMilli R: reward of a task, in 1/1000 of C.
/// @param slashMilli S: stake lost for a wrong result, in 1/1000 of C.
/// @param validationBonusMilli B: bonus of a validator, in 1/1000 of C.
/// @param tieBreakers k: nodes that must all collude for a wrong result to pass verification.
/// @param settlementGraceS Seconds after the deadline in which a complete execution may still settle.
/// @param minDeadlineS The soonest deadline of a request, in seconds from now.
/// @param maxDeadlineS The latest deadline of a request, in seconds from now.
/// @param minPrice The smallest price that a request locks, in micro-USDC.
struct Parameters {
    uint16 samplingBps;
    uint16 collusionBps;
    uint32 rewardMilli;
    uint32 slashMilli;
    uint32 validationBonusMilli;
    uint8 tieBreakers;
    uint32 settlementGraceS;
    uint32 minDeadlineS;
    uint32 maxDeadlineS;
    uint128 minPrice;
}

/// @notice Life of an execution: Requested, then Planned, then Settled; or Refunded from either.
enum Status {
    Unknown,
    Requested,
    Planned,
    Settled,
    Refunded
}

/// @notice An execution as stored.
/// @param client Who asked and pays.
/// @param steps Steps asked for.
/// @param deadline When the client may have its money back.
/// @param maxPrice Locked micro-USDC.
/// @param snapshotSequence The committee's snapshot at the request.
/// @param executorCount Nodes that the plan gives work to.
/// @param committed Nodes that have committed.
/// @param status Where it stands.
/// @param modelId What is executed.
/// @param snapshotRoot Root of that snapshot.
/// @param planRoot Root of the accepted plan.
/// @param seed Randomness of the accepted plan.
struct Execution {
    address client;
    uint32 steps;
    uint64 deadline;
    uint128 maxPrice;
    uint64 snapshotSequence;
    uint16 executorCount;
    uint32 committed;
    Status status;
    bytes32 modelId;
    bytes32 snapshotRoot;
    bytes32 planRoot;
    bytes32 seed;
}

/// @notice A node's commitment to its outputs of one execution.
struct Completion {
    bytes32 executionId;
    uint32 steps;
    bytes32 root;
}

/// @notice Credits `amount` micro-USDC to `to`, out of the slashed stake or out of the locked price.
struct Payment {
    address to;
    uint128 amount;
    bool fromSlash;
}

/// @notice Takes up to `amount` micro-USDC of a node's stake.
struct Slash {
    address node;
    uint128 amount;
}

/// @notice What the committee decided about an execution.
struct Settlement {
    uint32 steps;
    bytes32 evidenceRoot;
    Payment[] payments;
    Slash[] slashes;
}

/// @title The market: escrow, executions, settlement
/// @notice A client deposits USDC and asks for an execution, which locks its maximum price. The
/// committee submits one plan and later one settlement, both with a quorum. What is not delivered by
/// the deadline is refunded by anybody's call. All credits are balances that their owners withdraw.
/// Every path conserves: token balance = sum of balances + sum of locked prices.
interface IMarket {
    // ------------------------------------------------------------------------------- errors

    /// @notice An amount must not be zero.
    error AmountMissing();
    /// @notice An address must not be zero.
    error AddressMissing();
    /// @notice The account's balance in the market is too small.
    error BalanceTooSmall(address account, uint256 balance, uint256 required);
    /// @notice A parameter is out of its range.
    error ParameterInvalid(string parameter);
    /// @notice Cheating would pay: p (1-r)^k (R+S) must exceed C+B; both sides in 1e-6 of C.
    error ParametersUnsafe(uint256 expectedLossMicro, uint256 gainMicro);
    /// @notice Executions have 1 to 65536 steps.
    error StepsInvalid(uint256 steps, uint256 maximum);
    /// @notice The offered price is below the quote or the minimum.
    error PriceTooLow(uint256 maxPrice, uint256 required);
    /// @notice The deadline is outside this window.
    error DeadlineInvalid(uint64 deadline, uint256 earliest, uint256 latest);
    /// @notice The client has used this nonce.
    error NonceUsed(address client, uint64 nonce);
    /// @notice The execution is not in a state that allows this.
    error StatusInvalid(bytes32 executionId, Status status);
    /// @notice The deadline of the execution has passed.
    error DeadlinePassed(bytes32 executionId, uint64 deadline);
    /// @notice A root must not be zero.
    error RootMissing(bytes32 executionId);
    /// @notice A plan gives work to at least one node.
    error ExecutorsMissing(bytes32 executionId);
    /// @notice The caller is not an active node.
    error NodeInactive(address node);
    /// @notice Too many items for one call.
    error TooMany(uint256 count, uint256 maximum);
    /// @notice The node has committed to this execution already.
    error CommitmentExists(bytes32 executionId, address node);
    /// @notice Payments exceed what is locked, or what was slashed.
    error Overpaid(bytes32 executionId, uint256 paid, uint256 available);
    /// @notice Not refundable before this time.
    error NotRefundable(bytes32 executionId, uint256 refundableAt);

    // ------------------------------------------------------------------------------- events

    /// @notice An account added funds.
    event Deposited(address indexed account, uint256 amount);
    /// @notice An account took funds out.
    event Withdrawn(address indexed account, uint256 amount);
    /// @notice New parameters hold for later requests.
    event ParametersSet(Parameters parameters);
    /// @notice The account that receives undistributed slashes changed.
    event TreasurySet(address treasury);
    /// @notice The committee is asked to choose nodes.
    event RequestNodeSelections(
        bytes32 indexed executionId,
        bytes32 indexed modelId,
        address indexed client,
        uint32 steps,
        bytes32 inputsDigest,
        bytes32 clientKey,
        uint128 maxPrice,
        uint64 deadline,
        uint64 snapshotSequence,
        bytes32 snapshotRoot
    );
    /// @notice The plan of an execution is fixed.
    event PlanAccepted(bytes32 indexed executionId, bytes32 planRoot, bytes32 seed, uint16 executorCount);
    /// @notice A node is bound to its outputs.
    event CompletionCommitted(bytes32 indexed executionId, address indexed node, uint32 steps, bytes32 root);
    /// @notice A settlement credited somebody.
    event Paid(bytes32 indexed executionId, address indexed to, uint256 amount, bool fromSlash);
    /// @notice A settlement took stake; `amount` is what was really taken.
    event Slashed(bytes32 indexed executionId, address indexed node, uint256 amount);
    /// @notice An execution is settled: `paid` out of its price, `refunded` to the client, `slashed` in all.
    event Settled(
        bytes32 indexed executionId,
        uint32 steps,
        uint256 paid,
        uint256 refunded,
        uint256 slashed,
        bytes32 evidenceRoot
    );
    /// @notice The client has its price back.
    event Refunded(bytes32 indexed executionId, address indexed client, uint256 amount);

    // ------------------------------------------------------------------------------- money

    /// @notice Adds to the caller's balance, by allowance.
    function deposit(uint256 amount) external;

    /// @notice Adds to the caller's balance with an EIP-2612 permit. A permit that somebody else has
    /// already submitted does no harm.
    function depositWithPermit(uint256 amount, uint256 permitDeadline, uint8 v, bytes32 r, bytes32 s) external;

    /// @notice Takes from the caller's balance.
    function withdraw(uint256 amount) external;

    // --------------------------------------------------------------------------- executions

    /// @notice Asks for an execution and locks its maximum price.
    /// @param inputsDigest Digest of the inputs; they travel off chain.
    /// @param clientKey Ed25519 key that the client's messages of this execution carry.
    /// @param maxPrice At least `quote(modelId, steps)` and the minimum price.
    /// @param deadline Block time after which an undelivered execution is refundable.
    /// @param nonce Any number that the client has not used.
    /// @return executionId keccak256(abi.encode(chain id, this contract, client, nonce)).
    function requestExecution(
        bytes32 modelId,
        uint32 steps,
        bytes32 inputsDigest,
        bytes32 clientKey,
        uint128 maxPrice,
        uint64 deadline,
        uint64 nonce
    ) external returns (bytes32 executionId);

    /// @notice Fixes the plan, once, with a quorum over
    /// `Plan(bytes32 executionId,bytes32 planRoot,bytes32 seed,uint16 executorCount)`.
    function submitCompletePlan(
        bytes32 executionId,
        bytes32 planRoot,
        bytes32 seed,
        uint16 executorCount,
        bytes calldata signatures
    ) external;

    /// @notice Binds the calling node to its outputs of up to 64 executions, once each.
    function commitCompletions(Completion[] calldata completions) external;

    /// @notice Pays and slashes, once, with a quorum over
    /// `Settlement(bytes32 executionId,bytes32 settlementHash)`, settlementHash = keccak256(abi.encode(s)).
    /// What the payments leave of the price returns to the client, what they leave of the slashes goes
    /// to the treasury.
    /// @param s At most 2048 payments and 64 slashes.
    function settle(bytes32 executionId, Settlement calldata s, bytes calldata signatures) external;

    /// @notice Gives the client its price back after `refundableAt`; anybody may call.
    function refund(bytes32 executionId) external;

    // ------------------------------------------------------------------------ owner's verbs

    /// @notice Sets the parameters; reverts unless lying costs more than it brings.
    function setParameters(Parameters calldata parameters_) external;

    /// @notice Names the account that receives undistributed slashes.
    function setTreasury(address treasury_) external;

    // ------------------------------------------------------------------------------- views

    /// @notice The account's balance in micro-USDC.
    function balanceOf(address account) external view returns (uint256);

    /// @notice The least price of a request: every task paid twice, as if each were verified once.
    function quote(bytes32 modelId, uint32 steps) external view returns (uint256);

    /// @notice The id that a request of this client and nonce has.
    function executionIdOf(address client, uint64 nonce) external view returns (bytes32);

    /// @notice The execution; all zero when unknown.
    function executionOf(bytes32 executionId) external view returns (Execution memory);

    /// @notice keccak256(abi.encode(steps, root)) of the node's commitment; 0 when there is none.
    function commitmentOf(bytes32 executionId, address node) external view returns (bytes32);

    /// @notice First block time at which `refund` works: the deadline, plus the grace when every
    /// executor has committed.
    function refundableAt(bytes32 executionId) external view returns (uint256);

    /// @notice The parameters in force.
    function parameters() external view returns (Parameters memory);

    /// @notice The account that receives undistributed slashes.
    function treasury() external view returns (address);

    /// @notice Sum of all balances.
    function totalBalances() external view returns (uint256);

    /// @notice Sum of all locked prices.
    function totalLocked() external view returns (uint256);

    /// @notice Whether the contract holds what it owes.
    function conserved() external view returns (bool);
}
