// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// @notice The market's economic parameters. C is the cost of computing one task, the unit of R, S and B.
/// @param reservationBps Price of the stake that a plan reserves, in basis points a year; see `quoteParts`. A settled
/// execution pays it as the least fee, one that is refunded after its plan to the treasury.
/// @param minDeadlineS Shortest time from a request to its deadline, in seconds.
/// @param maxDeadlineS Longest time from a request to its deadline, in seconds.
/// @param settlementGraceS Extra time after the deadline for settling an execution whose executors have all
/// committed to their outputs, in seconds.
/// @param feeBps The committee's fee, in basis points (1/10000) of what an execution pays its nodes; not less than
/// the reservation.
/// @param treasuryBps Least share of every slash that goes to the treasury, in basis points. It makes slashing
/// one's own node a loss, even when the same party is also the validator and the client. An execution keeps the share
/// that it was opened with.
/// @param rewardMilli R: reward for a task, in 1/1000 of C.
/// @param slashMilli S: stake lost for a wrong result, in 1/1000 of C.
/// @param samplingBps p: least share of tasks that are verified, in basis points. A request may ask for more.
/// @param validationBonusMilli B: the most that a wrong result can earn beyond the saved cost C, in 1/1000 of C.
/// Mostly this is the bonus that a validator gets.
/// @param outsideGain G: what one wrong result may earn outside the market, in micro-USDC, so that it still loses in
/// expectation. It is covered by the floor of exposures, see `INodeRegistry`.
/// @param collusionBps r: assumed share of colluding nodes, in basis points.
/// @param tieBreakers k: number of judges that must all be honest to convict a wrong result: the first validator
/// and the further ones that its accusation calls in. The probability of a conviction is (1-r)^k.
struct Parameters {
    uint16 reservationBps; // the fields up to validationBonusMilli fill one storage slot; requests read no other
    uint32 minDeadlineS;
    uint32 maxDeadlineS;
    uint32 settlementGraceS;
    uint16 feeBps;
    uint16 treasuryBps;
    uint32 rewardMilli;
    uint32 slashMilli;
    uint16 samplingBps;
    uint32 validationBonusMilli;
    uint64 outsideGain;
    uint16 collusionBps;
    uint8 tieBreakers;
}

/// @notice State of an execution: Requested, then Planned, then Settled. Requested and Planned executions can
/// become Refunded. Unknown is the state of an id that no request has used.
enum Status {
    Unknown,
    Requested,
    Planned,
    Settled,
    Refunded
}

/// @notice A client's request. Its EIP-712 hashStruct is the request hash, for a request that the client sends
/// itself and for one that it only signs.
/// @param client Account that asks and pays.
/// @param modelId Id of the model to execute.
/// @param steps Number of steps to execute.
/// @param inputsDigest Digest of the inputs, which travel off chain.
/// @param clientKey Ed25519 key that signs the client's off-chain messages of this execution.
/// @param maxPrice Amount to lock, in micro-USDC.
/// @param deadline Block time until which nodes compute, in Unix seconds; see `IMarket.refundableAt`.
/// @param nonce Any number that the client has not used before.
/// @param snapshotSequence Sequence number of the committee's snapshot that nodes are selected from.
/// @param snapshotRoot Root of that snapshot.
/// @param verifyBps Share of the tasks that are verified, in basis points: at least the parameter `samplingBps`.
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
    uint16 verifyBps;
}

/// @notice What the contract needs of a plan. The executors and their exposures are in the plan that the root
/// binds; the contract learns them with the commitments. Accepting a plan therefore costs the same for any number
/// of executors.
/// @param planRoot Merkle root of the plan.
/// @param seedSignature The group's signature (128 bytes, a G1 point in EIP-2537's encoding) over
/// abi.encode(keccak256("splitup/plan-seed/v1"), executionId, requestHash). Its
/// keccak256 is the seed of the plan's node selection.
/// @param executors Number of nodes that execute tasks of the plan.
struct PlanSubmission {
    bytes32 planRoot;
    bytes seedSignature;
    uint32 executors;
}

/// @notice An execution as it is stored. All further data is in events; `record` binds it.
/// @param client Account that asked and pays.
/// @param maxPrice Amount that the request locked, in micro-USDC.
/// @param steps Number of steps requested.
/// @param deadline Block time until which nodes compute, in Unix seconds; see `refundableAt`.
/// @param durationS Time from the opening to the deadline, in seconds.
/// @param configuration Number of the committee configuration that was in force at the request. All quorums of
/// the execution are quorums of that configuration.
/// @param settlementGraceS Settlement grace when the execution was opened, in seconds.
/// @param feeBps Committee's fee when the execution was opened, in basis points.
/// @param treasuryBps Treasury's least share of slashes when the execution was opened, in basis points.
/// @param reservation Price of the stake that its plan reserves to the deadline, in micro-USDC; 0 after a refund
/// without a plan. A settlement takes the part for the time that has passed.
/// @param status State of the execution.
/// @param certified Whether `commitExecution` has recorded the commitments of all executors.
/// @param released Whether `distribute` has released the exposures.
/// @param distributed Number of payouts that `distribute` has credited.
/// @param record Hash chain over the execution's data. It starts as the request hash. Each step replaces it by:
///   1. the plan: keccak256(abi.encode(type hash of Plan, record, planRoot, seed));
///   2. `commitExecution`: keccak256(abi.encode(record, root, keccak256 of the concatenated exposures)), with the
///      exposures that were locked;
///   3. `settle`: keccak256(abi.encode(record, keccak256 of the concatenated payouts)).
/// The encodings of the steps differ in length, so that none can be passed off as another.
struct Execution {
    address client;
    uint96 maxPrice;
    uint32 steps;
    uint40 deadline; // with what the later calls need, in one storage slot
    uint24 durationS;
    uint32 configuration;
    uint24 settlementGraceS;
    uint16 feeBps;
    uint16 treasuryBps;
    uint32 reservation;
    Status status;
    bool certified;
    bool released;
    uint16 distributed;
    bytes32 record;
}

/// @notice A payment out of slashed stake.
/// @param to Account whose balance is credited.
/// @param amount Amount in micro-USDC.
struct Payment {
    address to;
    uint96 amount;
}

/// @notice The committee's decision about an execution.
/// @param steps Number of steps that were delivered.
/// @param evidenceRoot Root over the verification results: which tasks were drawn, and the outcome of each.
/// @param payouts What nodes earn out of the locked price, by strictly ascending account. Each entry packs an
/// account and micro-USDC as account << 96 | amount.
/// @param rewards Payments out of what `slashes` takes.
/// @param slashes The most stake to take from nodes, by strictly ascending account; packed like payouts. Less is taken
/// where exposure or stake is smaller.
struct Settlement {
    uint32 steps;
    bytes32 evidenceRoot;
    bytes32[] payouts;
    Payment[] rewards;
    bytes32[] slashes;
}

/// @notice The data of an execution, which the caller collects from the events. The contract checks it against the
/// stored `record`. Packed entries are account << 96 | micro-USDC.
/// @param executionId Id of the execution.
/// @param requestHash EIP-712 hashStruct of its request.
/// @param planRoot Root of its plan.
/// @param seed Seed of its plan.
/// @param commitments Root of `commitExecution`; 0 when there was no such call.
/// @param exposures Packed entries (node, exposure) of `commitExecution`; empty when there was no such call.
/// @param payouts Packed entries (account, payout) of the settlement; ignored after a refund.
struct ExecutionHistory {
    bytes32 executionId;
    bytes32 requestHash;
    bytes32 planRoot;
    bytes32 seed;
    bytes32 commitments;
    bytes32[] exposures;
    bytes32[] payouts;
}

/// @title The market: deposits, executions and settlement
/// @notice A client deposits USDC and requests an execution, which locks its maximum price. The committee submits
/// one plan, one root over the executors' signed commitments and one settlement, each with a quorum of signatures.
/// A settlement decides the payouts; `distribute` credits the payouts of many executions in one call. Anybody can
/// call it. An execution that is not settled in time can be refunded by anybody's call. All credits are balances
/// that their owners withdraw.
///
/// Invariant: the token balance covers the sum of all balances, all locked prices and all undistributed payouts
/// and fees (see `conserved`). All token amounts are in micro-USDC (1e-6 USDC), all times in Unix seconds.
///
/// The exposure of a node in an execution is the part of its stake that the execution locks: what the node would
/// lose if its results in all its tasks were wrong.
///
/// The draw of the verified tasks and the validators' commitments and reveals are not on chain, on purpose. The
/// draw's randomness is the group's unique signature over commitments that are on chain. A validator's salted
/// commitment goes to all members before any member publishes a reveal. Two quorums share at least one honest
/// member, so the order that 2f+1 members attest in a settlement's evidence root is the order that an honest
/// member saw. A transaction per validator would add cost and no security.
interface IMarket {
    // ------------------------------------------------------------------------------- errors

    /// @notice The amount is zero.
    error AmountMissing();
    /// @notice An address is zero.
    error AddressMissing();
    /// @notice `account` has `balance` micro-USDC in the market; `required` are needed.
    error BalanceTooSmall(address account, uint256 balance, uint256 required);
    /// @notice The balance of `account` is reserved for signed requests until block time `until`.
    error Frozen(address account, uint256 until);
    /// @notice A freeze must end within [`earliest`, `latest`] (block times): after the freeze in force and at most
    /// 30 days from now. `until` does not.
    error FreezeInvalid(uint64 until, uint256 earliest, uint256 latest);
    /// @notice New requests are paused. Open executions can go on.
    error RequestsPaused();
    /// @notice The parameter with the name `parameter` is out of its range.
    error ParameterInvalid(string parameter);
    /// @notice A wrong result would be profitable with these parameters: the expected loss p (1-r)^k (R+S) must
    /// exceed the gain C+B. Both are stated in 1e-6 of C.
    error ParametersUnsafe(uint256 expectedLossMicro, uint256 gainMicro);
    /// @notice A wrong result that earns `outsideGain` micro-USDC outside would be profitable: its expected loss
    /// p (1-r)^k times the floor of exposures is `expectedLoss` micro-USDC.
    error OutsideGainTooHigh(uint256 expectedLoss, uint256 outsideGain);
    /// @notice The nodes' `unbondingPeriod` must be longer than `least`: the longest execution and the age of the
    /// snapshot that it names. Both are in seconds.
    error UnbondingTooShort(uint256 least, uint256 unbondingPeriod);
    /// @notice The number of steps must be from 1 to `maximum`; a settlement may also state 0.
    error StepsInvalid(uint256 steps, uint256 maximum);
    /// @notice `maxPrice` is below `required`, the sum of `quoteParts` without its last, in micro-USDC.
    error PriceTooLow(uint256 maxPrice, uint256 required);
    /// @notice The share of tasks to verify must be from `minimum`, the network's, to 10,000 basis points.
    error ShareInvalid(uint256 verifyBps, uint256 minimum);
    /// @notice The deadline must be within [`earliest`, `latest`] (block times).
    error DeadlineInvalid(uint64 deadline, uint256 earliest, uint256 latest);
    /// @notice `client` has already used this nonce.
    error NonceUsed(address client, uint64 nonce);
    /// @notice The request is not signed by `client`.
    error ClientSignatureInvalid(address client);
    /// @notice The request's snapshot is not among the recent ones that the committee contract stores.
    error SnapshotUnknown(uint64 sequence, bytes32 root);
    /// @notice The stated data of the execution does not hash to its stored record.
    error RecordMismatch(bytes32 executionId);
    /// @notice The call is not allowed in the execution's present `status`.
    error StatusInvalid(bytes32 executionId, Status status);
    /// @notice The execution's `deadline` (block time) has passed.
    error DeadlinePassed(bytes32 executionId, uint64 deadline);
    /// @notice A root is zero.
    error RootMissing(bytes32 executionId);
    /// @notice A plan and its commitments must have at least one executor.
    error ExecutorsMissing(bytes32 executionId);
    /// @notice A list has `count` items; at most `maximum` are allowed.
    error TooMany(uint256 count, uint256 maximum);
    /// @notice The executors are committed already.
    error CommitmentExists(bytes32 executionId);
    /// @notice Payouts must be listed by strictly ascending account; `account` follows `previous`.
    error PayoutsNotAscending(address previous, address account);
    /// @notice The payouts sum to `paid` micro-USDC; the execution has locked `available`.
    error Overpaid(bytes32 executionId, uint256 paid, uint256 available);
    /// @notice All payouts are credited and all exposures are released.
    error AlreadyDistributed(bytes32 executionId);
    /// @notice The execution can be refunded from block time `refundableAt`.
    error NotRefundable(bytes32 executionId, uint256 refundableAt);
    /// @notice A transfer of `expected` token units changed the contract's balance by `received`. The market works
    /// only with a token that transfers exactly the stated amount.
    error TransferShort(uint256 received, uint256 expected);

    // ------------------------------------------------------------------------------- events

    /// @notice `account` deposited `amount` micro-USDC.
    event Deposited(address indexed account, uint256 amount);
    /// @notice `account` withdrew `amount` micro-USDC.
    event Withdrawn(address indexed account, uint256 amount);
    /// @notice The balance of `account` is reserved for signed requests until block time `until`.
    event BalanceFrozen(address indexed account, uint64 until);
    /// @notice New parameters are in force.
    event ParametersSet(Parameters parameters);
    /// @notice `treasury` receives the slashed stake that rewards leave over.
    event TreasurySet(address indexed treasury);
    /// @notice New requests are refused (`paused`) or accepted again.
    event PausedSet(bool paused);
    /// @notice Fees of `amount` micro-USDC were credited to the `members` (their number) of a committee configuration
    /// in equal shares.
    event FeesCollected(uint64 indexed configuration, uint256 amount, uint256 members);
    /// @notice An execution was requested: the committee is to select nodes for it. The arguments are the fields of
    /// `Request`.
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
        bytes32 snapshotRoot,
        uint16 verifyBps
    );
    /// @notice The plan with root `planRoot`, selection seed `seed` and a number of `executors` is final.
    event PlanAccepted(bytes32 indexed executionId, bytes32 planRoot, bytes32 seed, uint32 executors);
    /// @notice The committee certified the commitments that all executors signed, under `root`. These exposures
    /// (packed, node << 96 | micro-USDC) are locked: the certified ones, raised for nodes with recent offences, and 0 for
    /// nodes without enough free stake, which are not bound and earn nothing.
    event ExecutionCommitted(bytes32 indexed executionId, bytes32 root, bytes32[] exposures);
    /// @notice A settlement credited `amount` micro-USDC of slashed stake to `to`.
    event Rewarded(bytes32 indexed executionId, address indexed to, uint256 amount);
    /// @notice A settlement took stake: `taken` by node (packed, node << 96 | micro-USDC), which can be less than it
    /// asked for.
    event Slashed(bytes32 indexed executionId, bytes32[] taken);
    /// @notice An execution was settled after `steps` delivered steps. Of its locked price, `paid` micro-USDC go to
    /// `payouts` (packed, account << 96 | micro-USDC), `fee` to the committee, and `refunded` back to the client.
    /// `slashed` is the sum of all stake taken, `evidenceRoot` the root over the verification results.
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
    /// @notice The execution's exposures are released. This call credited `credited` payouts; `remaining` payouts
    /// are left for further calls.
    event Distributed(bytes32 indexed executionId, uint256 credited, uint256 remaining);
    /// @notice Of the locked price, `amount` micro-USDC were credited back to `client`, and `reservation` to the
    /// treasury: 0 if there was no plan.
    event Refunded(bytes32 indexed executionId, address indexed client, uint256 amount, uint256 reservation);

    // ------------------------------------------------------------------------------- money

    /// @notice Adds to the caller's balance. The caller must have approved the amount for this contract.
    /// @param amount Amount in micro-USDC.
    function deposit(uint256 amount) external;

    /// @notice Adds to the caller's balance with an EIP-2612 permit instead of a previous approval. If somebody else
    /// has already submitted the permit, the deposit still works.
    /// @param amount Amount in micro-USDC, which the permit must cover.
    /// @param permitDeadline Block time until which the permit is valid.
    /// @param v Recovery id of the permit's signature.
    /// @param r First half of the permit's signature.
    /// @param s Second half of the permit's signature.
    function depositWithPermit(uint256 amount, uint256 permitDeadline, uint8 v, bytes32 r, bytes32 s) external;

    /// @notice Sends a part of the caller's balance to the caller. Reverts while the balance is frozen.
    /// @param amount Amount in micro-USDC.
    function withdraw(uint256 amount) external;

    /// @notice Reserves the caller's balance for signed requests: until the stated time it can neither be withdrawn
    /// nor be spent by `requestExecution`. The committee can therefore rely on the balance before a request is on
    /// chain. Members attest a signed request only if the freeze outlasts its deadline. Of one client they attest at
    /// most one request at a time that is neither on chain nor past its deadline. Two quorums share an honest
    /// member, so no two certified requests compete for one balance.
    /// @param until Block time at which the freeze ends: later than the freeze in force, at most 30 days from now.
    function freeze(uint64 until) external;

    // --------------------------------------------------------------------------- executions

    /// @notice Requests an execution on the latest snapshot and locks its maximum price.
    /// @param modelId Id of the model to execute.
    /// @param steps Number of steps, 1 to 65536.
    /// @param inputsDigest Digest of the inputs, which travel off chain.
    /// @param clientKey Ed25519 key that signs the client's off-chain messages of this execution.
    /// @param maxPrice Amount to lock in micro-USDC: at least `quoteParts` for the time to the deadline.
    /// @param deadline Block time until which nodes compute.
    /// @param nonce Any number that the caller has not used before.
    /// @param verifyBps Share of the tasks that are verified, in basis points: at least the network's.
    /// @return executionId keccak256(abi.encode(chain id, this contract, client, nonce)).
    function requestExecution(
        bytes32 modelId,
        uint32 steps,
        bytes32 inputsDigest,
        bytes32 clientKey,
        uint96 maxPrice,
        uint64 deadline,
        uint64 nonce,
        uint16 verifyBps
    ) external returns (bytes32 executionId);

    /// @notice Sets the plan of a requested execution, once.
    /// @dev All quorums of an execution are quorums of the committee configuration at its request.
    /// @param request The request as `RequestNodeSelections` stated it.
    /// @param plan The plan's root, the group's signature that gives its seed, and the number of executors.
    /// @param signatures A quorum over `Plan(uint64 configuration,bytes32 executionId,bytes32 requestHash,bytes32
    /// planRoot,bytes32 seed,uint32 executors)`, in the format of `ICommittee.requireQuorum`.
    function submitCompletePlan(Request calldata request, PlanSubmission calldata plan, bytes calldata signatures)
        external;

    /// @notice Opens an execution that its client has only signed, and sets its plan, in one call. Anybody can call.
    /// @param request A request whose price the client's balance covers. Its snapshot may be older than the latest.
    /// @param clientSignature The client's 65-byte EIP-712 signature (r, s, v) of `Request` in the domain
    /// {name "SplitUp", version "1", chain id, this contract}.
    /// @param plan As for `submitCompletePlan`.
    /// @param signatures As for `submitCompletePlan`, of the current committee configuration.
    /// @return executionId As `requestExecution` returns it.
    function openExecution(
        Request calldata request,
        bytes calldata clientSignature,
        PlanSubmission calldata plan,
        bytes calldata signatures
    ) external returns (bytes32 executionId);

    /// @notice Commits all executors to their outputs and locks their exposures, once; see `INodeRegistry.lock`.
    /// Verified tasks are drawn only afterwards, so nobody is judged before the stake is locked. The call reverts while
    /// the free stake of a node does not cover its exposure, and can be repeated later. From 30 s before the deadline
    /// on nothing is locked of such a node instead, and the others are committed without it.
    /// @param executionId Id of a planned execution.
    /// @param root Root over the commitments that the executors signed.
    /// @param exposures 1 to 1024 packed entries, node << 96 | micro-USDC, by strictly ascending node.
    /// @param signatures A quorum over `Commitments(bytes32 executionId,bytes32 root,bytes32[] exposures)`.
    function commitExecution(
        bytes32 executionId,
        bytes32 root,
        bytes32[] calldata exposures,
        bytes calldata signatures
    ) external;

    /// @notice Decides payouts and slashes of a planned execution, once, and before the execution's deadline plus its
    /// settlement grace: after that, only a refund is left. The fee is at least the reservation for the
    /// time that has passed. The part of the price that payouts and fee
    /// leave over is credited to the client, and slashed stake to the rewards and the treasury, in this call. If
    /// less was slashed than the rewards need, or than the treasury's share leaves for them, all rewards are scaled
    /// down by the same factor. The treasury gets the rest of the slashed stake.
    /// @param executionId Id of a planned execution.
    /// @param s The decision: at most 2048 payouts, 64 rewards and 64 slashes.
    /// @param history Data of the execution, of which slashes need the exposures; ignored without slashes.
    /// @param signatures A quorum over `Settlement(bytes32 executionId,bytes32 settlementHash)` with
    /// settlementHash = keccak256(abi.encode(s)).
    function settle(
        bytes32 executionId,
        Settlement calldata s,
        ExecutionHistory calldata history,
        bytes calldata signatures
    ) external;

    /// @notice Releases the exposures of settled or refunded executions and credits the payouts of settled ones.
    /// Anybody can call. One call credits at most 384 payouts of an execution; further calls credit the others. An
    /// execution that was refunded before it had a plan has nothing to distribute.
    /// @param histories Data of at most 64 executions.
    function distribute(ExecutionHistory[] calldata histories) external;

    /// @notice Credits the locked price back to the client, from block time `refundableAt` on; of a planned execution
    /// without the reservation, which the treasury gets. Anybody can call.
    /// @param executionId Id of a requested or planned execution.
    function refund(bytes32 executionId) external;

    /// @notice Credits the fees of the executions of a committee configuration to its members in equal shares. Anybody
    /// can call. What the division leaves over stays for the next call.
    /// @param configuration Number of the configuration.
    function collectFees(uint64 configuration) external;

    // ------------------------------------------------------------------------ owner functions

    /// @notice Sets the parameters. Reverts unless a wrong result is expected to lose money, and unless the nodes'
    /// unbonding period is longer than every execution and the age of its snapshot.
    /// @param parameters_ The new parameters. An execution keeps the fee, the reservation, the deadline and the grace that
    /// it was opened with.
    function setParameters(Parameters calldata parameters_) external;

    /// @notice Sets the account that receives the slashed stake that rewards leave over, and reservations of refunded
    /// executions.
    /// @param treasury_ The account; not zero.
    function setTreasury(address treasury_) external;

    /// @notice Stops or resumes new requests. Open executions can still be planned, settled, distributed and
    /// refunded, and balances can still be withdrawn.
    /// @param paused_ Whether new requests are refused.
    function setPaused(bool paused_) external;

    // ------------------------------------------------------------------------------- views

    /// @notice Returns the balance of an account, in micro-USDC.
    /// @param account Any account.
    function balanceOf(address account) external view returns (uint256);

    /// @notice Returns the block time until which the balance of an account is reserved for signed requests; 0 if
    /// it was never frozen.
    /// @param account Any account.
    function frozenUntil(address account) external view returns (uint64);

    /// @notice Returns the parts of the least price that a request may lock: every task paid, every task verified once,
    /// and the fee. What the execution does not use returns to the client. (The expected share of verified tasks is p.)
    /// The first two are rounded up to micro-USDC, so that they cover the rewards of all tasks, each rounded down.
    ///
    /// A plan reserves at most the floor of exposures for each task, and S for all of them. The reservation is
    /// `reservationBps` a year of that until the deadline, and of 100 USDC at least, because executions take places
    /// of a limited number with the members. It is at most 2^32 - 1 micro-USDC.
    /// @param modelId Id of a registered model.
    /// @param steps Number of steps.
    /// @param durationS Time to the deadline, in seconds.
    /// @return executors Rewards of the executors, in micro-USDC.
    /// @return verification Rewards of the validators at most, in micro-USDC.
    /// @return fee The committee's fee at most, in micro-USDC: on both, or the reservation if that is more.
    /// @return reservation What an execution costs at least that is planned and lasts to its deadline, in micro-USDC.
    function quoteParts(bytes32 modelId, uint32 steps, uint32 durationS)
        external
        view
        returns (uint256 executors, uint256 verification, uint256 fee, uint256 reservation);

    /// @notice Returns the id of the execution that a client requests with a nonce.
    /// @param client Account of the client.
    /// @param nonce The request's nonce.
    function executionIdOf(address client, uint64 nonce) external view returns (bytes32);

    /// @notice Returns the EIP-712 hashStruct of a request.
    /// @param request The request.
    function requestHashOf(Request calldata request) external pure returns (bytes32);

    /// @notice Returns the record that an execution with this data has; see `Execution`. Reverts if the data states
    /// exposures but no root of their commitments.
    /// @param history Data of the execution.
    /// @param settled Whether the record includes the payouts.
    function recordOf(ExecutionHistory calldata history, bool settled) external pure returns (bytes32);

    /// @notice Returns an execution; all fields are zero if the id is unknown.
    /// @param executionId Id of the execution.
    function executionOf(bytes32 executionId) external view returns (Execution memory);

    /// @notice Returns the fees of the executions of a configuration that `collectFees` can credit, in micro-USDC.
    /// @param configuration Number of the configuration.
    function feesOf(uint64 configuration) external view returns (uint256);

    /// @notice Returns the first block time at which `refund` works: the deadline and the settlement grace once
    /// `commitExecution` has been called, before that 30 s after the deadline. What the committee agrees on at the
    /// deadline is on chain by then, however slow the blocks are.
    /// @param executionId Id of the execution.
    function refundableAt(bytes32 executionId) external view returns (uint256);

    /// @notice Returns the parameters in force.
    function parameters() external view returns (Parameters memory);

    /// @notice Returns for how long an execution can still be settled, in seconds: one that is requested now, or one
    /// that is open already and was requested under other parameters. The nodes' unbonding period is longer.
    function longestExecutionS() external view returns (uint64);

    /// @notice Returns the account that receives the slashed stake that rewards leave over, and reservations of
    /// refunded executions.
    function treasury() external view returns (address);

    /// @notice Returns whether new requests are refused.
    function paused() external view returns (bool);

    /// @notice Returns the sum of all balances, in micro-USDC.
    function totalBalances() external view returns (uint256);

    /// @notice Returns the sum of the locked prices of open executions and of the undistributed payouts, in
    /// micro-USDC.
    function totalLocked() external view returns (uint256);

    /// @notice Returns the fees that `collectFees` can credit, of all configurations, in micro-USDC.
    function totalFees() external view returns (uint256);

    /// @notice Returns whether the contract's token balance covers all balances, locked amounts and fees.
    function conserved() external view returns (bool);
}
