// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// @notice A node as everybody sees it.
/// @param account The node's Ethereum account.
/// @param signingKey Ed25519 key of the node's messages.
/// @param vramGb Video memory that the node offers and stakes for.
/// @param stake Stake in micro-USDC.
/// @param unbondingAt When the stake may be withdrawn; 0 while the node stays.
/// @param active Whether the node may be given work: staying, and staked in full.
/// @param endpoint Where the node is reached.
struct NodeView {
    address account;
    bytes32 signingKey;
    uint32 vramGb;
    uint128 stake;
    uint64 unbondingAt;
    bool active;
    string endpoint;
}

/// @title The nodes and their stake
/// @notice A node stakes 1000 USDC plus 100 USDC per gigabyte of video memory. A leaving node can be
/// slashed until it has withdrawn. Only the market slashes.
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
    /// @notice Nothing to add.
    error AmountMissing();
    /// @notice Only the market may call this.
    error NotMarket(address caller);
    /// @notice The market is set once.
    error MarketExists(address market);
    /// @notice A page is at most this long.
    error PageTooLong(uint256 count, uint256 maximum);
    /// @notice The unbonding period is longer than the bound.
    error PeriodTooLong(uint64 period, uint64 maximum);
    /// @notice An address must not be zero.
    error AddressMissing();

    // ------------------------------------------------------------------------------- events

    /// @notice A node joined.
    event NodeRegistered(
        address indexed account, bytes32 indexed signingKey, uint32 vramGb, uint128 stake, string endpoint
    );
    /// @notice A node moved.
    event EndpointChanged(address indexed account, string endpoint);
    /// @notice A node added stake.
    event StakeAdded(address indexed account, uint128 amount, uint128 stake);
    /// @notice A node leaves; its stake is free at `unbondingAt`.
    event UnstakeRequested(address indexed account, uint64 unbondingAt);
    /// @notice A node stays after all.
    event UnstakeCancelled(address indexed account);
    /// @notice A node has left and taken its stake.
    event StakeWithdrawn(address indexed account, uint128 amount);
    /// @notice A node lost stake.
    event NodeSlashed(address indexed account, uint128 amount, uint128 stake);
    /// @notice The market that may slash is set.
    event MarketSet(address market);
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

    /// @notice Says where the node is reached from now on.
    function setEndpoint(string calldata endpoint) external;

    /// @notice Adds stake, for instance after a slash.
    function topUp(uint128 amount) external;

    /// @notice Leaves: no new work from now on, the stake is free after the unbonding period.
    function requestUnstake() external;

    /// @notice Stays after all.
    function cancelUnstake() external;

    /// @notice Takes the stake back and forgets the node.
    function withdrawStake() external;

    // ------------------------------------------------------------------------- market's verb

    /// @notice Takes up to `amount` of a node's stake and sends it to the market.
    /// @return taken What was really taken: never more than the stake, 0 for a node that has left.
    function slash(address account, uint256 amount) external returns (uint256 taken);

    // ------------------------------------------------------------------------ owner's verbs

    /// @notice Names the market; once.
    function setMarket(address market_) external;

    /// @notice Changes the unbonding period; stakes that are unbonding already keep their date.
    function setUnbondingPeriod(uint64 period) external;

    // ------------------------------------------------------------------------------- views

    /// @notice The stake that `vramGb` gigabytes need, in micro-USDC.
    function minStake(uint32 vramGb) external pure returns (uint128);

    /// @notice A node; all zero when unknown.
    function nodeOf(address account) external view returns (NodeView memory);

    /// @notice Whether the node may be given work.
    function isActive(address account) external view returns (bool);

    /// @notice How many nodes are registered.
    function nodeCount() external view returns (uint256);

    /// @notice Up to `count` (at most 256) nodes from position `start`; fewer at the end.
    function nodesPage(uint256 start, uint256 count) external view returns (NodeView[] memory);

    /// @notice Seconds between leaving and withdrawing.
    function unbondingPeriod() external view returns (uint64);

    /// @notice The contract that may slash.
    function market() external view returns (address);
}
