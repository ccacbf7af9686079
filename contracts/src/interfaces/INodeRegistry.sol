// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// @notice A registered node.
/// @param account The node's Ethereum account; zero if no node is registered.
/// @param signingKey Ed25519 key that signs the node's off-chain messages.
/// @param vramGb Video memory that the node offers and stakes for, in gigabytes.
/// @param stake Stake in micro-USDC.
/// @param locked Sum of the exposures of running executions, in micro-USDC. After a slash it can exceed the stake.
/// @param offences Number of recent offences: hours in which the node was slashed for more than a validator's silence,
/// each less than 7 days after the one before; 0 if the latest is longer ago.
/// @param unbondingAt Block time from which the stake can be withdrawn, in Unix seconds; 0 unless the node is
/// unbonding.
/// @param active Whether the node may get work: it is not unbonding, and its stake is at least `minStake`.
/// @param operator Account of the party that runs the node. Nodes of one operator do not verify each other.
/// @param endpoint URL at which the node is reached.
struct NodeView {
    address account;
    bytes32 signingKey;
    uint32 vramGb;
    uint96 stake;
    uint96 locked;
    uint8 offences;
    uint64 unbondingAt;
    bool active;
    address operator;
    string endpoint;
}

/// @title The nodes and their stakes
/// @notice A node stakes 1000 USDC plus 100 USDC per gigabyte of video memory. For each running execution the market
/// locks the node's exposure: what the node would lose if its results in all its tasks were wrong, and never less than
/// a floor. It is raised after recent offences. Any node can be drawn as a validator; as such it is exposed with the
/// floor, out of a reserve that no execution locks. An execution takes no more than that from anybody. A stake cannot be
/// withdrawn while any part of it is locked. An unbonding node can be slashed until it has withdrawn. Only the
/// market can lock, release and slash stake.
interface INodeRegistry {
    // ------------------------------------------------------------------------------- errors

    /// @notice `account` is already registered.
    error NodeExists(address account);
    /// @notice `account` is not registered.
    error UnknownNode(address account);
    /// @notice The signing key is zero, or it belongs to the account `owner`.
    error SigningKeyInvalid(bytes32 signingKey, address owner);
    /// @notice The stated video memory is zero.
    error VramMissing();
    /// @notice An endpoint has at most 256 bytes; that of `account` has `length`.
    error EndpointTooLong(address account, uint256 length);
    /// @notice The node is already unbonding; its stake is free from block time `unbondingAt`.
    error NodeLeaving(address account, uint64 unbondingAt);
    /// @notice The node is not unbonding; call `requestUnstake` first.
    error NodeStaying(address account);
    /// @notice The stake cannot be withdrawn before block time `unbondingAt`.
    error StillUnbonding(address account, uint64 unbondingAt);
    /// @notice Executions have locked `locked` micro-USDC of the stake. The market's `distribute` releases them after
    /// the executions are settled or refunded.
    error StakeExposed(address account, uint256 locked);
    /// @notice The node's unlocked stake is `free` micro-USDC; the execution must lock `required`.
    error ExposureTooHigh(address account, uint256 free, uint256 required);
    /// @notice The exposure of `account` in an execution is at least `floor`; `amount` is less. All are in micro-USDC.
    error ExposureTooLow(address account, uint256 floor, uint256 amount);
    /// @notice Slashes must be listed by strictly ascending account; `account` follows `previous`.
    error SlashesNotAscending(address previous, address account);
    /// @notice Exposures must be listed by strictly ascending account; `account` follows `previous`.
    error ExposuresNotAscending(address previous, address account);
    /// @notice `operator` has not allowed the node `account` to name it as its operator.
    error OperatorUnwilling(address operator, address account);
    /// @notice The amount is zero.
    error AmountMissing();
    /// @notice Only the market may call this function.
    error NotMarket(address caller);
    /// @notice The market is already set and cannot be changed.
    error MarketExists(address market);
    /// @notice A page has at most `maximum` nodes; `count` were asked for.
    error PageTooLong(uint256 count, uint256 maximum);
    /// @notice The unbonding period must be within [`minimum`, `maximum`]; all are in seconds.
    error PeriodInvalid(uint64 period, uint64 minimum, uint64 maximum);
    /// @notice An address is zero.
    error AddressMissing();
    /// @notice A transfer of `expected` token units changed the contract's balance by `received`. The registry works
    /// only with a token that transfers exactly the stated amount.
    error TransferShort(uint256 received, uint256 expected);

    // ------------------------------------------------------------------------------- events

    /// @notice A node registered with `vramGb` gigabytes of video memory and a stake in micro-USDC.
    event NodeRegistered(
        address indexed account, bytes32 indexed signingKey, uint32 vramGb, uint96 stake, string endpoint
    );
    /// @notice A node is now reached at another URL.
    event EndpointChanged(address indexed account, string endpoint);
    /// @notice `operator` allows the node `account` to name it as its operator, or no longer does.
    event NodeAllowed(address indexed operator, address indexed account, bool allowed);
    /// @notice The node's operator is now `operator`.
    event OperatorChanged(address indexed account, address indexed operator);
    /// @notice A node added `amount` micro-USDC to its stake, which is now `stake`.
    event StakeAdded(address indexed account, uint96 amount, uint96 stake);
    /// @notice A node started unbonding; it can withdraw its stake from block time `unbondingAt`.
    event UnstakeRequested(address indexed account, uint64 unbondingAt);
    /// @notice A node cancelled its unbonding.
    event UnstakeCancelled(address indexed account);
    /// @notice A node withdrew its stake, `amount` micro-USDC, and is no longer registered.
    event StakeWithdrawn(address indexed account, uint96 amount);
    /// @notice A node lost `amount` micro-USDC of its stake; `stake` is left.
    event NodeSlashed(address indexed account, uint96 amount, uint96 stake);
    /// @notice The market was set.
    event MarketSet(address indexed market);
    /// @notice The unbonding period of later requests is now `period` seconds.
    event UnbondingPeriodSet(uint64 period);

    // ------------------------------------------------------------------------ node functions

    /// @notice Registers the caller as a node and takes exactly `minStake(vramGb)` as its stake. The caller must have
    /// approved that amount for this contract.
    /// @param signingKey Ed25519 key that signs the node's off-chain messages; no other node may have it.
    /// @param vramGb Video memory that the node offers, in gigabytes.
    /// @param endpoint URL at which the node is reached, at most 256 bytes.
    function register(bytes32 signingKey, uint32 vramGb, string calldata endpoint) external;

    /// @notice Registers the caller with an EIP-2612 permit over `minStake(vramGb)` instead of a previous approval.
    /// If somebody else has already submitted the permit, the registration still works.
    /// @param signingKey As for `register`.
    /// @param vramGb As for `register`.
    /// @param endpoint As for `register`.
    /// @param permitDeadline Block time until which the permit is valid.
    /// @param v Recovery id of the permit's signature.
    /// @param r First half of the permit's signature.
    /// @param s Second half of the permit's signature.
    function registerWithPermit(
        bytes32 signingKey,
        uint32 vramGb,
        string calldata endpoint,
        uint256 permitDeadline,
        uint8 v,
        bytes32 r,
        bytes32 s
    ) external;

    /// @notice Changes the calling node's URL.
    /// @param endpoint The new URL, at most 256 bytes.
    function setEndpoint(string calldata endpoint) external;

    /// @notice Sets the operator of the calling node. After registration a node is its own operator.
    /// @param operator The node's own account, or an operator that has allowed the node with `allowNode`.
    function setOperator(address operator) external;

    /// @notice Allows a node to name the caller as its operator, or withdraws that permission. Without it a node
    /// could name an honest operator, whose nodes would then not verify it. A node that named the caller becomes its
    /// own operator again.
    /// @param account The node's account.
    /// @param allowed Whether the node may name the caller.
    function allowNode(address account, bool allowed) external;

    /// @notice Adds to the calling node's stake, for instance after a slash.
    /// @param amount Amount in micro-USDC, which the caller must have approved for this contract.
    function topUp(uint96 amount) external;

    /// @notice Starts the calling node's unbonding. It gets no new work from now on and can withdraw its stake after
    /// the unbonding period.
    function requestUnstake() external;

    /// @notice Cancels the calling node's unbonding.
    function cancelUnstake() external;

    /// @notice Pays the stake to the calling node and removes the node. Reverts before the end of the unbonding
    /// period and while any stake is locked.
    function withdrawStake() external;

    // ---------------------------------------------------------------------- market functions

    /// @notice Locks stake for an execution. Reverts unless every exposure is at least the floor, and, while `isLate` is
    /// false, the free stake of its node covers it: what neither other executions nor the validators' reserve take. After
    /// k recent offences the node's exposure is raised to 4^k times the stated one, but by the raise to no more than half
    /// of its free stake.
    /// @dev Unbonding nodes are accepted: their stake stays while it is locked, and refusing them would let a node
    /// block an execution by unbonding.
    /// @param exposures Packed entries, account << 96 | micro-USDC, by strictly ascending account.
    /// @param isLate Whether to lock nothing of a node whose free stake is too small, instead of reverting: so no node
    /// can hold up the others by a stake that it has emptied.
    /// @return changed What was locked, in the same form, if it is not what was asked for; otherwise empty.
    function lock(bytes32[] calldata exposures, bool isLate) external returns (bytes32[] memory changed);

    /// @notice Releases stake that `lock` locked.
    /// @param exposures Packed entries, account << 96 | micro-USDC.
    function release(bytes32[] calldata exposures) external;

    /// @notice Takes stake from the nodes of one execution and sends it to the market. From each node at most its
    /// exposure is taken, and the floor besides, with which it is exposed as a validator; nothing before there are
    /// exposures, because nobody is drawn before. Unbonding nodes can be slashed, too.
    /// @param slashes Packed entries, account << 96 | micro-USDC, by strictly ascending account: the most to take.
    /// @param exposures What the execution locked for all executors, by strictly ascending account.
    /// @return taken What was taken, in the form of `slashes`: at most the stake, and 0 for a node that has withdrawn.
    /// @return total The sum of it, in micro-USDC.
    function slash(bytes32[] calldata slashes, bytes32[] calldata exposures)
        external
        returns (bytes32[] memory taken, uint256 total);

    // ----------------------------------------------------------------------- owner functions

    /// @notice Sets the market, once.
    /// @param market_ The contract that may lock, release and slash stake.
    function setMarket(address market_) external;

    /// @notice Sets the unbonding period. Nodes that are already unbonding keep their date.
    /// @param period Period in seconds: longer than every execution of the market and the age of its snapshot together, at
    /// most 90 days.
    function setUnbondingPeriod(uint64 period) external;

    // ------------------------------------------------------------------------------- views

    /// @notice Returns the stake that a node needs, in micro-USDC.
    /// @param vramGb The node's video memory in gigabytes.
    function minStake(uint32 vramGb) external pure returns (uint96);

    /// @notice Returns the least exposure of a node in an execution, in micro-USDC.
    function EXPOSURE_FLOOR() external view returns (uint96);

    /// @notice Returns the part of every stake that no execution locks, in micro-USDC: a validator's lies cost it.
    function VALIDATION_RESERVE() external view returns (uint96);

    /// @notice Returns a node; all fields are zero if it is unknown.
    /// @param account The node's account.
    function nodeOf(address account) external view returns (NodeView memory);

    /// @notice Returns whether a node may get work; see `NodeView.active`.
    /// @param account The node's account.
    function isActive(address account) external view returns (bool);

    /// @notice Returns whether an operator has allowed a node to name it as its operator.
    /// @param operator The operator's account.
    /// @param account The node's account.
    function isAllowed(address operator, address account) external view returns (bool);

    /// @notice Returns the number of registered nodes.
    function nodeCount() external view returns (uint256);

    /// @notice Returns a page of the list of nodes. The order of the list changes when a node leaves.
    /// @param start Position of the first node in the list, from 0.
    /// @param count Most nodes to return, up to 256; the last page can be shorter.
    function nodesPage(uint256 start, uint256 count) external view returns (NodeView[] memory);

    /// @notice Returns the time from `requestUnstake` to `withdrawStake`, in seconds.
    function unbondingPeriod() external view returns (uint64);

    /// @notice Returns the contract that may lock, release and slash stake; zero before it is set.
    function market() external view returns (address);
}
