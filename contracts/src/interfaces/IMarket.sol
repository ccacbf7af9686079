// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// @notice The market's parameters. C is the cost of computing one task.
/// @param minPrice The smallest price that a request locks, in micro-USDC.
/// @param minDeadlineS The soonest deadline of a request, in seconds from now.
/// @param maxDeadlineS The latest deadline of a request, in seconds from now.
/// @param settlementGraceS Seconds after the deadline in which a complete execution may still settle.
/// @param feeBps The committee's fee, in 1/10000 of what an execution pays its nodes.
/// @param treasuryBps Least share of a slash that is the treasury's, in 1/10000; what makes slashing
/// oneself a loss, whoever the validator and the client are.
/// @param rewardMilli R: reward of a task, in 1/1000 of C.
/// @param slashMilli S: stake lost for a wrong result, in 1/1000 of C.
/// @param validationBonusMilli B: what a lie can gain beyond the saved cost, a validator's bonus above
/// all, in 1/1000 of C.
/// @param samplingBps p: share of tasks that are verified, in 1/10000.
/// @param collusionBps r: assumed share of colluding nodes, in 1/10000.
/// @param tieBreakers k: judges that must all be honest to convict a lie, the first validator and those
/// that its accusation calls up. A lie is convicted with probability (1-r)^k.
struct Parameters {
    uint96 minPrice; // requests and settlements read the first slot only
    uint32 minDeadlineS;
    uint32 maxDeadlineS;
    uint32 settlementGraceS;
    uint16 feeBps;
    uint16 treasuryBps;
    uint32 rewardMilli;
    uint32 slashMilli;
    uint32 validationBonusMilli;
    uint16 samplingBps;
    uint16 collusionBps;
    uint8 tieBreakers;
}

/// @notice Life of an execution: Requested, then Planned, then Settled; or Refunded from either.
enum Status {
    Unknown,
    Requested,
    Planned,
    Settled,
    Refunded
}

/// @notice What a client asks for. Its EIP-712 hashStruct is the request hash, whether the client sent
/// it or signed it.
/// @param client Who asks and pays.
/// @param modelId What is executed.
/// @param steps Steps asked for.
/// @param inputsDigest Digest of the inputs; they travel off chain.
/// @param clientKey Ed25519 key that the client's messages of this execution carry.
/// @param maxPrice Micro-USDC to lock.
/// @param deadline When the client may have its money back.
/// @param nonce Any number that the client has not used.
/// @param snapshotSequence The committee's snapshot to choose nodes from.
/// @param snapshotRoot Root of that snapshot.
struct Request {
    address client;
    bytes32 modelId;
    uint32 steps;
    bytes32 inputsDigest;
    bytes32 clientKey;
    uint96 maxPrice;
    uint64 deadline;
    uint64 nonce;
    uint64 snapshotSequence;
    bytes32 snapshotRoot;
}

/// @notice A plan as the chain takes it.
/// @param planRoot Root of the plan.
/// @param seedSignature The group's signature, 128 bytes of EIP-2537, over
/// abi.encode(keccak256("splitup/plan-seed/v1"), executionId, modelId, snapshotSequence, snapshotRoot); its
/// keccak256 is the seed that the plan follows from.
/// @param executors Nodes that the plan gives work to. Who they are and what each stands to lose is in the
/// plan that the root binds; the chain learns it with their commitments, so that accepting a plan costs
/// the same for any number.
struct Terms {
    bytes32 planRoot;
    bytes seedSignature;
    uint32 executors;
}

/// @notice An execution as stored; the rest is in its events, bound by hashes.
/// @param client Who asked and pays.
/// @param steps Steps asked for.
/// @param deadline When the client may have its money back.
/// @param maxPrice Locked micro-USDC.
/// @param configuration The committee's configuration at the request.
/// @param executorCount Nodes that the plan gives work to.
/// @param committed How many nodes committed by their own calls.
/// @param status Where it stands.
/// @param certified Whether the committee has certified the commitments of all executors.
/// @param released Whether the exposures are released.
/// @param distributed How many payouts are credited.
/// @param record Binds all that is said of the execution; what is said is in the events. It begins as the
/// request hash and becomes, in this order, keccak256(abi.encode(Plan's type hash, record, planRoot, seed)),
/// keccak256(abi.encode(record, word)) with every node's own commitment, word = node << 96 | exposure,
/// keccak256(abi.encode(record, commitments, keccak256 of the exposures one after another)) with
/// `commitExecution`, and keccak256(abi.encode(record, keccak256 of the payouts one after another)) with
/// `settle`. Plan and commitments differ in length, so that neither can be passed off as the other.
struct Execution {
    address client;
    uint32 steps;
    uint64 deadline;
    uint96 maxPrice;
    uint64 configuration;
    uint16 executorCount;
    uint32 committed;
    Status status;
    bool certified;
    bool released;
    uint16 distributed;
    bytes32 record;
}

/// @notice A node's own commitment to its outputs of one execution.
/// @param exposure Micro-USDC of its stake to lock: what lies in all its tasks would cost it. Members do
/// not count a commitment that locks less.
struct Completion {
    bytes32 executionId;
    uint32 steps;
    bytes32 root;
    uint96 exposure;
}

/// @notice Credits `amount` micro-USDC to `to`.
struct Payment {
    address to;
    uint96 amount;
}

/// @notice Takes up to `amount` micro-USDC of a node's stake.
struct Slash {
    address node;
    uint96 amount;
}

/// @notice What the committee decided about an execution.
/// @param steps Steps that were delivered.
/// @param evidenceRoot Root of draw and verdicts: the outcome of every drawn task.
/// @param payouts Words (account << 96 | micro-USDC), by strictly ascending account, out of the price.
/// @param rewards Payments out of what is slashed here.
/// @param slashes Stake to take.
struct Settlement {
    uint32 steps;
    bytes32 evidenceRoot;
    bytes32[] payouts;
    Payment[] rewards;
    Slash[] slashes;
}

/// @notice What was said of a closed execution; all of it is in its events.
/// @param own Words (node << 96 | exposure) of nodes' own commitments, in their order.
/// @param commitments Root of `commitExecution`; 0 when there was none.
/// @param exposures Words (node << 96 | exposure) of `commitExecution`.
/// @param payouts Of its settlement; none after a refund.
struct Due {
    bytes32 executionId;
    bytes32 requestHash;
    bytes32 planRoot;
    bytes32 seed;
    bytes32[] own;
    bytes32 commitments;
    bytes32[] exposures;
    bytes32[] payouts;
}

/// @title The market: escrow, executions, settlement
/// @notice A client deposits USDC and asks for an execution, which locks its maximum price. The
/// committee submits one plan, one root over the executors' signed commitments and one settlement, each
/// with a quorum. What is not delivered by the deadline is refunded by anybody's call. A settlement
/// decides the payouts; `distribute` credits those of many executions in one call, for anybody. All
/// credits are balances that their owners withdraw.
/// Every path conserves: token balance = sum of balances + what executions hold + fees.
///
/// What is deliberately not on chain: the draw, and the validators' commitments and reveals. A
/// validator's salted commitment goes to all members before any member hands out a reveal; the draw's
/// randomness is the group's unique signature over commitments that are on chain. Two quorums share an
/// honest member, so what 2f+1 members attest in a settlement's evidence root holds what at least one
/// honest member saw in that order; a transaction per validator would add cost and no trust.
interface IMarket {
    // ------------------------------------------------------------------------------- errors

    /// @notice An amount must not be zero.
    error AmountMissing();
    /// @notice An address must not be zero.
    error AddressMissing();
    /// @notice The account's balance in the market is too small.
    error BalanceTooSmall(address account, uint256 balance, uint256 required);
    /// @notice The account's balance is kept for signed requests until this time.
    error Frozen(address account, uint256 until);
    /// @notice A freeze lengthens the one before and ends within 30 days.
    error FreezeInvalid(uint64 until, uint256 earliest, uint256 latest);
    /// @notice New requests are paused; everything else works on.
    error RequestsPaused();
    /// @notice A parameter is out of its range.
    error ParameterInvalid(string parameter);
    /// @notice Cheating would pay: p (1-r)^k (R+S) must exceed C+B; both sides in 1e-6 of C.
    error ParametersUnsafe(uint256 expectedLossMicro, uint256 gainMicro);
    /// @notice An execution could outlast the nodes' unbonding period.
    error UnbondingTooShort(uint256 longestExecutionS, uint256 unbondingPeriod);
    /// @notice Executions have 1 to 65536 steps.
    error StepsInvalid(uint256 steps, uint256 maximum);
    /// @notice The offered price is below the quote or the minimum.
    error PriceTooLow(uint256 maxPrice, uint256 required);
    /// @notice The deadline is outside this window.
    error DeadlineInvalid(uint64 deadline, uint256 earliest, uint256 latest);
    /// @notice The client has used this nonce.
    error NonceUsed(address client, uint64 nonce);
    /// @notice The request is not signed by its client.
    error ClientSignatureInvalid(address client);
    /// @notice The request does not name one of the snapshots that the committee contract remembers.
    error SnapshotUnknown(uint64 sequence, bytes32 root);
    /// @notice What is stated of the execution is not what its record binds.
    error RecordMismatch(bytes32 executionId);
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
    /// @notice The node, or the committee for all nodes, has committed to this execution already.
    error CommitmentExists(bytes32 executionId, address node);
    /// @notice Payouts must be listed by strictly ascending account; this one is not.
    error PayoutsNotAscending(address previous, address account);
    /// @notice Payouts exceed what is locked.
    error Overpaid(bytes32 executionId, uint256 paid, uint256 available);
    /// @notice Payouts are credited and exposures released already.
    error AlreadyDistributed(bytes32 executionId);
    /// @notice Not refundable before this time.
    error NotRefundable(bytes32 executionId, uint256 refundableAt);
    /// @notice The token did not deliver the amount; it is not the token that this contract is for.
    error TransferShort(uint256 received, uint256 expected);

    // ------------------------------------------------------------------------------- events

    /// @notice An account added funds.
    event Deposited(address indexed account, uint256 amount);
    /// @notice An account took funds out.
    event Withdrawn(address indexed account, uint256 amount);
    /// @notice An account keeps its balance for signed requests until this time.
    event BalanceFrozen(address indexed account, uint64 until);
    /// @notice New parameters hold for later requests.
    event ParametersSet(Parameters parameters);
    /// @notice The account that receives undistributed slashes changed.
    event TreasurySet(address indexed treasury);
    /// @notice New requests are refused, or accepted again.
    event PausedSet(bool paused);
    /// @notice The committee's members shared the fees.
    event FeesCollected(uint256 amount, uint256 members);
    /// @notice The committee is asked to choose nodes.
    event RequestNodeSelections(
        bytes32 indexed executionId,
        bytes32 indexed modelId,
        address indexed client,
        uint32 steps,
        bytes32 inputsDigest,
        bytes32 clientKey,
        uint96 maxPrice,
        uint64 deadline,
        uint64 nonce,
        uint64 snapshotSequence,
        bytes32 snapshotRoot
    );
    /// @notice The plan of an execution is fixed.
    event PlanAccepted(bytes32 indexed executionId, bytes32 planRoot, bytes32 seed, uint32 executors);
    /// @notice A node is bound to its outputs, by its own call; `exposure` of its stake is locked.
    event CompletionCommitted(
        bytes32 indexed executionId, address indexed node, uint32 steps, bytes32 root, uint96 exposure
    );
    /// @notice All executors are bound to their outputs, by the commitments they signed; their exposures are
    /// locked.
    event ExecutionCommitted(bytes32 indexed executionId, bytes32 root, bytes32[] exposures);
    /// @notice A settlement paid somebody out of slashed stake.
    event Rewarded(bytes32 indexed executionId, address indexed to, uint256 amount);
    /// @notice A settlement took stake; `amount` is what was really taken.
    event Slashed(bytes32 indexed executionId, address indexed node, uint256 amount);
    /// @notice An execution is settled: `paid` to `payouts` and `fee` to the committee out of its price,
    /// `refunded` to the client, `slashed` in all.
    event Settled(
        bytes32 indexed executionId,
        uint32 steps,
        uint256 paid,
        uint256 fee,
        uint256 refunded,
        uint256 slashed,
        bytes32 evidenceRoot,
        bytes32[] payouts
    );
    /// @notice Exposures of an execution are released and the next payouts credited; `remaining` are left.
    event Distributed(bytes32 indexed executionId, uint256 credited, uint256 remaining);
    /// @notice The client has its price back.
    event Refunded(bytes32 indexed executionId, address indexed client, uint256 amount);

    // ------------------------------------------------------------------------------- money

    /// @notice Adds to the caller's balance, by allowance.
    function deposit(uint256 amount) external;

    /// @notice Adds to the caller's balance with an EIP-2612 permit. A permit that somebody else has
    /// already submitted does no harm.
    function depositWithPermit(uint256 amount, uint256 permitDeadline, uint8 v, bytes32 r, bytes32 s) external;

    /// @notice Takes from the caller's balance, unless it is frozen.
    function withdraw(uint256 amount) external;

    /// @notice Keeps the caller's balance for signed requests: until then it can neither be withdrawn nor
    /// spent by `requestExecution`, so that a quorum may rely on it before a request is on chain.
    /// Members attest a signed request whose deadline the freeze outlasts, and of one client at most
    /// one at a time that is neither on chain nor past its deadline; as two quorums share an honest
    /// member, no two certified requests compete for one balance.
    /// @param until Later than the freeze in force, at most 30 days from now.
    function freeze(uint64 until) external;

    // --------------------------------------------------------------------------- executions

    /// @notice Asks for an execution on the latest snapshot and locks its maximum price. See `Request`.
    /// @param maxPrice At least `quote(modelId, steps)` and the minimum price.
    /// @return executionId keccak256(abi.encode(chain id, this contract, client, nonce)).
    function requestExecution(
        bytes32 modelId,
        uint32 steps,
        bytes32 inputsDigest,
        bytes32 clientKey,
        uint96 maxPrice,
        uint64 deadline,
        uint64 nonce
    ) external returns (bytes32 executionId);

    /// @notice Fixes the plan, once, with a quorum over
    /// `Plan(bytes32 executionId,bytes32 planRoot,bytes32 seed,uint32 executors)` and the group's signature
    /// under the seed.
    /// @dev All quorums of an execution are of the configuration that was in force at its request.
    function submitCompletePlan(Request calldata request, Terms calldata terms, bytes calldata signatures)
        external;

    /// @notice Opens an execution that its client only signed, and fixes its plan, in one call.
    /// @param request Of a client whose balance covers it; its snapshot may be older than the latest.
    /// @param clientSignature EIP-712 signature (r, s, v) of `Request` in the domain
    /// {SplitUp, 1, chain id, this contract}.
    function openExecution(
        Request calldata request,
        bytes calldata clientSignature,
        Terms calldata terms,
        bytes calldata signatures
    ) external returns (bytes32 executionId);

    /// @notice Binds all executors to their outputs and locks what each stands to lose, once, with a quorum
    /// over `Commitments(bytes32 executionId,bytes32 root,bytes32[] exposures)`. The draw of verifications
    /// comes after it: nobody is judged before the stake is locked. It reverts while somebody's free stake
    /// does not cover the exposure, and may come again when it does.
    /// @param root Root over the commitments that the executors signed.
    /// @param exposures Words (node << 96 | micro-USDC), by strictly ascending node.
    function commitExecution(
        bytes32 executionId,
        bytes32 root,
        bytes32[] calldata exposures,
        bytes calldata signatures
    ) external;

    /// @notice Binds the calling node to its outputs of up to 64 executions, once each, and locks its
    /// exposures: the way of a node that the committee leaves out. Refused once the committee has certified
    /// the commitments of all.
    function commitCompletions(Completion[] calldata completions) external;

    /// @notice Decides payouts and slashes, once, with a quorum over
    /// `Settlement(bytes32 executionId,bytes32 settlementHash)`, settlementHash = keccak256(abi.encode(s)).
    /// What payouts and fee leave of the price returns to the client at once. Rewards are scaled down
    /// together when less was slashed than they need or than the treasury's share leaves; the rest of
    /// the slashes is the treasury's.
    /// @param s At most 2048 payouts, 64 rewards and 64 slashes.
    function settle(bytes32 executionId, Settlement calldata s, bytes calldata signatures) external;

    /// @notice Credits the payouts of up to 64 closed executions and releases their exposures; anybody may
    /// call. Of one execution 384 payouts are credited in one call, the others by calling again. A
    /// refunded one has no payouts; one that never had a plan has nothing to distribute.
    function distribute(Due[] calldata dues) external;

    /// @notice Gives the client its price back after `refundableAt`; anybody may call.
    function refund(bytes32 executionId) external;

    /// @notice Credits the fees to the current members in equal parts; anybody may call.
    function collectFees() external;

    // ------------------------------------------------------------------------ owner's verbs

    /// @notice Sets the parameters; reverts unless lying costs more than it brings, and unless the nodes'
    /// unbonding period outlasts every execution.
    function setParameters(Parameters calldata parameters_) external;

    /// @notice Names the account that receives undistributed slashes.
    function setTreasury(address treasury_) external;

    /// @notice Refuses new requests, or accepts them again. Nothing else: what is open is planned, settled,
    /// refunded and withdrawn all the same.
    function setPaused(bool paused_) external;

    // ------------------------------------------------------------------------------- views

    /// @notice The account's balance in micro-USDC.
    function balanceOf(address account) external view returns (uint256);

    /// @notice Until when the account's balance is kept for signed requests; 0 for never.
    function frozenUntil(address account) external view returns (uint64);

    /// @notice The least price of a request: the sum of `quoteParts`. What is not used returns.
    function quote(bytes32 modelId, uint32 steps) external view returns (uint256);

    /// @notice What an execution costs at most: every task paid, every task verified once (the expected
    /// share is p), and the committee's fee on both.
    function quoteParts(bytes32 modelId, uint32 steps)
        external
        view
        returns (uint256 executors, uint256 verification, uint256 fee);

    /// @notice The id that a request of this client and nonce has.
    function executionIdOf(address client, uint64 nonce) external view returns (bytes32);

    /// @notice EIP-712 hashStruct of a request.
    function requestHashOf(Request calldata request) external pure returns (bytes32);

    /// @notice The record of an execution of which this is said; see `Execution`.
    /// @param settled Whether the payouts belong to it.
    function recordOf(Due calldata due, bool settled) external pure returns (bytes32);

    /// @notice The execution; all zero when unknown.
    function executionOf(bytes32 executionId) external view returns (Execution memory);

    /// @notice keccak256(abi.encode(steps, root)) of the node's own commitment; 0 when there is none.
    function commitmentOf(bytes32 executionId, address node) external view returns (bytes32);

    /// @notice First block time at which `refund` works: the deadline, plus the grace when the commitments of
    /// all are certified, or as many nodes have committed themselves as the plan has executors.
    function refundableAt(bytes32 executionId) external view returns (uint256);

    /// @notice The parameters in force.
    function parameters() external view returns (Parameters memory);

    /// @notice The most seconds from a request to its settlement; nodes unbond for longer.
    function longestExecutionS() external view returns (uint64);

    /// @notice The account that receives undistributed slashes.
    function treasury() external view returns (address);

    /// @notice Whether new requests are refused.
    function paused() external view returns (bool);

    /// @notice Sum of all balances.
    function totalBalances() external view returns (uint256);

    /// @notice Locked prices of open executions, and payouts that are not distributed yet.
    function totalLocked() external view returns (uint256);

    /// @notice Fees that `collectFees` shares.
    function totalFees() external view returns (uint256);

    /// @notice Whether the contract holds what it owes.
    function conserved() external view returns (bool);
}
