// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// @notice A node as everybody sees it.
/// @param account The node's Ethereum account.
/// @param signingKey Ed25519 key of the node's messages.
/// @param vramGb Video memory that the node offers and stakes for.
/// @param stake Stake in micro-USDC.
/// @param locked Part of the stake that running executions may still cost.
/// @param unbondingAt When the stake may be withdrawn; 0 while the node stays.
/// @param active Whether the node may be given work: staying, and staked in full.
/// @param operator Whose node it is; nodes of one operator do not check each other.
/// @param endpoint Where the node is reached.
struct NodeView {
    address account;
    bytes32 signingKey;
    uint32 vramGb;
    uint96 stake;
    uint96 locked;
    uint64 unbondingAt;
    bool active;
    address operator;
    string endpoint;
}

/// @title The nodes and their stake
/// @notice A node stakes 1000 USDC plus 100 USDC per gigabyte of video memory. The market locks, per
/// running execution, what a lie in it costs; while anything is locked the stake stays. A leaving
/// node can be slashed until it has withdrawn. Only the market locks, releases and slashes.
interface INodeRegistry {
    // ------------------------------------------------------------------------------- errors

    /// @notice The account has registered already.
    error NodeExists(address account);
    /// @notice The account is not registered.
    error UnknownNode(address account);
    /// @notice The signing key is zero, or belongs to this other account.
    error SigningKeyInvalid(bytes32 signingKey, address owner);
    /// @notice A node must offer video memory.
    error VramMissing();
    /// @notice The endpoint is longer than the bound.
    error EndpointTooLong(address account, uint256 length);
    /// @notice The node is leaving already.
    error NodeLeaving(address account, uint64 unbondingAt);
    /// @notice The node is not leaving; ask for it first.
    error NodeStaying(address account);
    /// @notice The stake is locked until this time.
    error StillUnbonding(address account, uint64 unbondingAt);
    /// @notice Executions of the node are not closed yet; the market's `distribute` releases them.
    error StakeExposed(address account, uint256 locked);
    /// @notice The node's free stake does not cover what a lie in this execution costs.
    error ExposureTooHigh(address account, uint256 free, uint256 required);
    /// @notice Exposures must be listed by strictly ascending account; this one is not.
    error ExposuresNotAscending(address previous, address account);
    /// @notice The operator has not allowed this node to name it.
    error OperatorUnwilling(address operator, address account);
    /// @notice Nothing to add.
    error AmountMissing();
    /// @notice Only the market may call this.
    error NotMarket(address caller);
    /// @notice The market is set once.
    error MarketExists(address market);
    /// @notice A page is at most this long.
    error PageTooLong(uint256 count, uint256 maximum);
    /// @notice The unbonding period is outside these bounds.
    error PeriodInvalid(uint64 period, uint64 minimum, uint64 maximum);
    /// @notice An address must not be zero.
    error AddressMissing();
    /// @notice The token did not deliver the amount; it is not the token that this contract is for.
    error TransferShort(uint256 received, uint256 expected);

    // ------------------------------------------------------------------------------- events

    /// @notice A node joined.
    event NodeRegistered(
        address indexed account, bytes32 indexed signingKey, uint32 vramGb, uint96 stake, string endpoint
    );
    /// @notice A node moved.
    event EndpointChanged(address indexed account, string endpoint);
    /// @notice An operator takes a node for its own, or no longer.
    event NodeAllowed(address indexed operator, address indexed account, bool allowed);
    /// @notice A node belongs to this operator from now on.
    event OperatorChanged(address indexed account, address indexed operator);
    /// @notice A node added stake.
    event StakeAdded(address indexed account, uint96 amount, uint96 stake);
    /// @notice A node leaves; its stake is free at `unbondingAt`.
    event UnstakeRequested(address indexed account, uint64 unbondingAt);
    /// @notice A node stays after all.
    event UnstakeCancelled(address indexed account);
    /// @notice A node has left and taken its stake.
    event StakeWithdrawn(address indexed account, uint96 amount);
    /// @notice A node lost stake.
    event NodeSlashed(address indexed account, uint96 amount, uint96 stake);
    /// @notice The market that may slash is set.
    event MarketSet(address indexed market);
    /// @notice The unbonding period of future requests changed.
    event UnbondingPeriodSet(uint64 period);

    // -------------------------------------------------------------------------- nodes' verbs

    /// @notice Joins with exactly `minStake(vramGb)`, taken from the caller by allowance.
    function register(bytes32 signingKey, uint32 vramGb, string calldata endpoint) external;

    /// @notice Joins with an EIP-2612 permit instead of an allowance.
    function registerWithPermit(
        bytes32 signingKey,
        uint32 vramGb,
        string calldata endpoint,
        uint256 permitDeadline,
        uint8 v,
        bytes32 r,
        bytes32 s
    ) external;

    /// @notice Changes where the caller is reached.
    function setEndpoint(string calldata endpoint) external;

    /// @notice Names the operator of the calling node, which has allowed it; a node begins as its own.
    function setOperator(address operator) external;

    /// @notice Allows a node to name the caller as its operator. Without this consent a node could hide
    /// behind an honest operator, whose nodes would then not check it.
    function allowNode(address account, bool allowed) external;

    /// @notice Adds to the caller's stake, for instance after a slash.
    function topUp(uint96 amount) external;

    /// @notice Begins to leave: no new work at once, the stake after the unbonding period.
    function requestUnstake() external;

    /// @notice Stays after all.
    function cancelUnstake() external;

    /// @notice Takes the stake and leaves, when the unbonding period is over and nothing is locked.
    function withdrawStake() external;

    // ------------------------------------------------------------------------ market's verbs

    /// @notice Locks stake for an execution; reverts unless every node's free stake covers it.
    /// @dev A leaving node is accepted: its stake stays while it is locked, and refusing it would let
    /// a node stop a plan by leaving.
    /// @param exposures Words (account << 96 | micro-USDC), by strictly ascending account.
    function lock(bytes32[] calldata exposures) external;

    /// @notice Releases what `lock` locked.
    function release(bytes32[] calldata exposures) external;

    /// @notice Takes up to `amount` of a node's stake, active or unbonding, and sends it to the market.
    /// @return taken What was really taken: never more than the stake, 0 for a node that has left.
    function slash(address account, uint256 amount) external returns (uint256 taken);

    // ------------------------------------------------------------------------ owner's verbs

    /// @notice Names the market; once.
    function setMarket(address market_) external;

    /// @notice Changes the unbonding period; stakes that are unbonding already keep their date. It must
    /// outlast every execution of the market.
    function setUnbondingPeriod(uint64 period) external;

    // ------------------------------------------------------------------------------- views

    /// @notice The stake that `vramGb` gigabytes need, in micro-USDC.
    function minStake(uint32 vramGb) external pure returns (uint96);

    /// @notice A node; all zero when unknown.
    function nodeOf(address account) external view returns (NodeView memory);

    /// @notice Whether the node may be given work.
    function isActive(address account) external view returns (bool);

    /// @notice Whether the operator has allowed the node to name it.
    function isAllowed(address operator, address account) external view returns (bool);

    /// @notice How many nodes are registered.
    function nodeCount() external view returns (uint256);

    /// @notice Up to `count` (at most 256) nodes from position `start`; fewer at the end.
    function nodesPage(uint256 start, uint256 count) external view returns (NodeView[] memory);

    /// @notice Seconds between leaving and withdrawing.
    function unbondingPeriod() external view returns (uint64);

    /// @notice The contract that may lock and slash.
    function market() external view returns (address);
}
