// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Ownable} from "@openzeppelin/contracts/access/Ownable.sol";
import {Ownable2Step} from "@openzeppelin/contracts/access/Ownable2Step.sol";
import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {IERC20Permit} from "@openzeppelin/contracts/token/ERC20/extensions/IERC20Permit.sol";
import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {INodeRegistry, NodeView} from "./interfaces/INodeRegistry.sol";

/// @title The node registry
/// @notice See {INodeRegistry}.
/// @dev The token is USDC: no fee on transfer, no callback. A signing key is not proven to belong to
/// its node here (the chain cannot check Ed25519 cheaply); messages under it are checked off chain.
contract NodeRegistry is INodeRegistry, Ownable2Step {
    using SafeERC20 for IERC20;

    // ---------------------------------------------------------------------------- constants

    uint128 internal constant BASE_STAKE = 1000e6;
    uint128 internal constant STAKE_PER_GB = 100e6;
    uint256 internal constant MAX_ENDPOINT_BYTES = 256;
    uint256 internal constant MAX_PAGE = 256; // keeps a call within every provider's gas allowance
    uint64 internal constant MAX_UNBONDING_PERIOD = 90 days; // an owner cannot lock stakes for ever

    // ------------------------------------------------------------------------------ storage

    struct Node {
        bytes32 signingKey;
        uint128 stake;
        uint64 unbondingAt;
        uint32 vramGb;
        uint32 position; // in _accounts, counted from 1; 0 means unknown
        string endpoint;
    }

    IERC20 public immutable usdc;
    /// @inheritdoc INodeRegistry
    address public market;
    /// @inheritdoc INodeRegistry
    uint64 public unbondingPeriod;
    address[] internal _accounts;
    mapping(address account => Node) internal _nodes;
    mapping(bytes32 signingKey => address account) internal _keyOwner;

    constructor(address owner_, IERC20 usdc_, uint64 unbondingPeriod_) Ownable(owner_) {
        require(address(usdc_) != address(0), AddressMissing());
        usdc = usdc_;
        _setUnbondingPeriod(unbondingPeriod_);
    }

    // -------------------------------------------------------------------------- nodes' verbs

    /// @inheritdoc INodeRegistry
    function register(bytes32 signingKey, uint32 vramGb, string calldata endpoint) external {
        _register(signingKey, vramGb, endpoint);
    }

    /// @inheritdoc INodeRegistry
    function registerWithPermit(
        bytes32 signingKey,
        uint32 vramGb,
        string calldata endpoint,
        uint256 permitDeadline,
        uint8 v,
        bytes32 r,
        bytes32 s
    ) external {
        // A permit that somebody has submitted already fails here and has left its allowance; a bad
        // one leaves none, and the transfer says so.
        try IERC20Permit(address(usdc)).permit(
            msg.sender, address(this), minStake(vramGb), permitDeadline, v, r, s
        ) {} catch {}
        _register(signingKey, vramGb, endpoint);
    }

    /// @inheritdoc INodeRegistry
    function setEndpoint(string calldata endpoint) external {
        Node storage node = _known(msg.sender);
        _checkEndpoint(endpoint);
        node.endpoint = endpoint;
        emit EndpointChanged(msg.sender, endpoint);
    }

    /// @inheritdoc INodeRegistry
    function topUp(uint128 amount) external {
        Node storage node = _known(msg.sender);
        require(amount > 0, AmountMissing());
        uint128 stake = node.stake + amount;
        node.stake = stake;
        emit StakeAdded(msg.sender, amount, stake);
        usdc.safeTransferFrom(msg.sender, address(this), amount);
    }

    /// @inheritdoc INodeRegistry
    function requestUnstake() external {
        Node storage node = _known(msg.sender);
        require(node.unbondingAt == 0, NodeLeaving(msg.sender, node.unbondingAt));
        uint64 unbondingAt = uint64(block.timestamp) + unbondingPeriod;
        node.unbondingAt = unbondingAt;
        emit UnstakeRequested(msg.sender, unbondingAt);
    }

    /// @inheritdoc INodeRegistry
    function cancelUnstake() external {
        Node storage node = _known(msg.sender);
        require(node.unbondingAt != 0, NodeStaying(msg.sender));
        node.unbondingAt = 0;
        emit UnstakeCancelled(msg.sender);
    }

    /// @inheritdoc INodeRegistry
    function withdrawStake() external {
        Node storage node = _known(msg.sender);
        uint64 unbondingAt = node.unbondingAt;
        require(unbondingAt != 0, NodeStaying(msg.sender));
        require(block.timestamp >= unbondingAt, StillUnbonding(msg.sender, unbondingAt));

        uint128 amount = node.stake;
        uint32 position = node.position;
        address last = _accounts[_accounts.length - 1];
        _accounts[position - 1] = last;
        _nodes[last].position = position;
        _accounts.pop();
        delete _keyOwner[node.signingKey];
        delete _nodes[msg.sender];
        emit StakeWithdrawn(msg.sender, amount);
        usdc.safeTransfer(msg.sender, amount);
    }

    // ------------------------------------------------------------------------- market's verb

    /// @inheritdoc INodeRegistry
    function slash(address account, uint256 amount) external returns (uint256 taken) {
        require(msg.sender == market, NotMarket(msg.sender));
        Node storage node = _nodes[account];
        uint128 stake = node.stake;
        taken = amount < stake ? amount : stake;
        if (taken == 0) return 0;
        stake -= uint128(taken); // taken <= stake, which is a uint128
        node.stake = stake;
        emit NodeSlashed(account, uint128(taken), stake);
        usdc.safeTransfer(msg.sender, taken);
    }

    // ------------------------------------------------------------------------ owner's verbs

    /// @inheritdoc INodeRegistry
    function setMarket(address market_) external onlyOwner {
        require(market == address(0), MarketExists(market));
        require(market_ != address(0), AddressMissing());
        market = market_;
        emit MarketSet(market_);
    }

    /// @inheritdoc INodeRegistry
    function setUnbondingPeriod(uint64 period) external onlyOwner {
        _setUnbondingPeriod(period);
    }

    // ------------------------------------------------------------------------------- views

    /// @inheritdoc INodeRegistry
    function minStake(uint32 vramGb) public pure returns (uint128) {
        return BASE_STAKE + STAKE_PER_GB * vramGb;
    }

    /// @inheritdoc INodeRegistry
    function nodeOf(address account) public view returns (NodeView memory) {
        Node storage node = _nodes[account];
        return NodeView({
            account: node.position == 0 ? address(0) : account,
            signingKey: node.signingKey,
            vramGb: node.vramGb,
            stake: node.stake,
            unbondingAt: node.unbondingAt,
            active: isActive(account),
            endpoint: node.endpoint
        });
    }

    /// @inheritdoc INodeRegistry
    function isActive(address account) public view returns (bool) {
        Node storage node = _nodes[account];
        return node.position != 0 && node.unbondingAt == 0 && node.stake >= minStake(node.vramGb);
    }

    /// @inheritdoc INodeRegistry
    function nodeCount() external view returns (uint256) {
        return _accounts.length;
    }

    /// @inheritdoc INodeRegistry
    function nodesPage(uint256 start, uint256 count) external view returns (NodeView[] memory page) {
        require(count <= MAX_PAGE, PageTooLong(count, MAX_PAGE));
        uint256 total = _accounts.length;
        uint256 left = start < total ? total - start : 0;
        page = new NodeView[](count < left ? count : left);
        for (uint256 i; i < page.length; ++i) {
            page[i] = nodeOf(_accounts[start + i]);
        }
    }

    // ----------------------------------------------------------------------------- internal

    function _register(bytes32 signingKey, uint32 vramGb, string calldata endpoint) internal {
        Node storage node = _nodes[msg.sender];
        require(node.position == 0, NodeExists(msg.sender));
        address keyOwner = _keyOwner[signingKey];
        require(signingKey != 0 && keyOwner == address(0), SigningKeyInvalid(signingKey, keyOwner));
        require(vramGb > 0, VramMissing());
        _checkEndpoint(endpoint);

        uint128 stake = minStake(vramGb);
        _accounts.push(msg.sender);
        _keyOwner[signingKey] = msg.sender;
        node.signingKey = signingKey;
        node.stake = stake;
        node.vramGb = vramGb;
        node.position = uint32(_accounts.length);
        node.endpoint = endpoint;
        emit NodeRegistered(msg.sender, signingKey, vramGb, stake, endpoint);
        usdc.safeTransferFrom(msg.sender, address(this), stake);
    }

    function _setUnbondingPeriod(uint64 period) internal {
        require(period <= MAX_UNBONDING_PERIOD, PeriodTooLong(period, MAX_UNBONDING_PERIOD));
        unbondingPeriod = period;
        emit UnbondingPeriodSet(period);
    }

    function _known(address account) internal view returns (Node storage node) {
        node = _nodes[account];
        require(node.position != 0, UnknownNode(account));
    }

    function _checkEndpoint(string calldata endpoint) internal view {
        uint256 length = bytes(endpoint).length;
        require(length <= MAX_ENDPOINT_BYTES, EndpointTooLong(msg.sender, length));
    }
}
