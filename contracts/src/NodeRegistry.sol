// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Ownable} from "@openzeppelin/contracts/access/Ownable.sol";
import {Ownable2Step} from "@openzeppelin/contracts/access/Ownable2Step.sol";
import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {IERC20Permit} from "@openzeppelin/contracts/token/ERC20/extensions/IERC20Permit.sol";
import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {IMarket} from "./interfaces/IMarket.sol";
import {INodeRegistry, NodeView} from "./interfaces/INodeRegistry.sol";
import {accountOf, amountOf, pack} from "./libraries/AccountAmount.sol";
import {SNAPSHOT_AGE_S} from "./libraries/SnapshotAge.sol";

/// @title The node registry
/// @notice See {INodeRegistry}.
/// @dev The token is USDC; a token that charges a fee on transfers is refused. The contract does not check that a
/// node owns its signing key, because Ed25519 is expensive to verify on chain; messages are verified off chain. An
/// attacker that registers the key of another node first has staked for a node that cannot sign anything, and the
/// other node registers with a new key.
contract NodeRegistry is INodeRegistry, Ownable2Step {
    using SafeERC20 for IERC20;

    // ---------------------------------------------------------------------------- constants

    uint96 internal constant BASE_STAKE = 1000e6;
    uint96 internal constant STAKE_PER_GB = 100e6;
    uint256 internal constant MAX_ENDPOINT_BYTES = 256;
    uint256 internal constant MAX_PAGE = 256; // keeps the call below the gas limits of RPC providers
    uint64 internal constant MAX_UNBONDING_PERIOD = 90 days; // bounds how long the owner can lock stakes
    /// @inheritdoc INodeRegistry
    uint96 public constant EXPOSURE_FLOOR = 5e6;
    /// @inheritdoc INodeRegistry
    uint96 public constant VALIDATION_RESERVE = 20 * EXPOSURE_FLOOR; // for 20 verifications at once
    uint96 internal constant LEAST_OFFENCE = EXPOSURE_FLOOR / 10; // a validator's silence costs less, a lie more
    uint256 internal constant OFFENCE_WINDOW = 7 days; // whoever leaves and registers anew has to wait as long
    uint256 internal constant INCIDENT = 1 hours; // one cause, such as a broken device, can convict many times at once
    uint256 internal constant MAX_OFFENCES = 8; // 4^8 times the floor exceeds every stake

    // ------------------------------------------------------------------------------ storage

    struct Node {
        bytes32 signingKey;
        uint80 stake; // shares a storage slot with the next four fields, so that locking reads and writes one slot
        uint80 locked;
        uint40 unbondingAt;
        uint40 offenderUntil; // OFFENCE_WINDOW after the latest offence that was counted
        uint8 offences; // counted ones, each within OFFENCE_WINDOW of the one before
        uint32 vramGb;
        uint32 position; // in _accounts, counted from 1; 0 if the node is not registered
        address operator;
        string endpoint;
    }

    /// @notice The token: USDC.
    IERC20 public immutable usdc;
    /// @inheritdoc INodeRegistry
    address public market;
    /// @inheritdoc INodeRegistry
    uint64 public unbondingPeriod;
    address[] internal _accounts;
    mapping(address account => Node) internal _nodes;
    mapping(bytes32 signingKey => address account) internal _keyOwner;
    /// @inheritdoc INodeRegistry
    mapping(address operator => mapping(address account => bool)) public isAllowed;

    /// @param owner_ Owner of the contract.
    /// @param usdc_ The token.
    /// @param unbondingPeriod_ Time from `requestUnstake` to `withdrawStake`, in seconds, at most 90 days.
    constructor(address owner_, IERC20 usdc_, uint64 unbondingPeriod_) Ownable(owner_) {
        require(address(usdc_) != address(0), AddressMissing());
        usdc = usdc_;
        _setUnbondingPeriod(unbondingPeriod_);
    }

    modifier onlyMarket() {
        require(msg.sender == market, NotMarket(msg.sender));
        _;
    }

    // ------------------------------------------------------------------------- node functions

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
        // If somebody has already submitted the permit, this call fails but the allowance exists. If the permit is
        // invalid, there is no allowance and the transfer below reverts.
        try IERC20Permit(address(usdc)).permit(
            msg.sender, address(this), minStake(vramGb), permitDeadline, v, r, s
        ) {} catch {}
        _register(signingKey, vramGb, endpoint);
    }

    /// @inheritdoc INodeRegistry
    function setEndpoint(string calldata endpoint) external {
        Node storage node = _registered(msg.sender);
        _checkEndpoint(endpoint);
        node.endpoint = endpoint;
        emit EndpointChanged(msg.sender, endpoint);
    }

    /// @inheritdoc INodeRegistry
    function setOperator(address operator) external {
        Node storage node = _registered(msg.sender);
        require(operator == msg.sender || isAllowed[operator][msg.sender], OperatorUnwilling(operator, msg.sender));
        node.operator = operator;
        emit OperatorChanged(msg.sender, operator);
    }

    /// @inheritdoc INodeRegistry
    function allowNode(address account, bool allowed) external {
        isAllowed[msg.sender][account] = allowed;
        emit NodeAllowed(msg.sender, account, allowed);
        Node storage node = _nodes[account];
        if (allowed || node.operator != msg.sender) return;
        node.operator = account;
        emit OperatorChanged(account, account);
    }

    /// @inheritdoc INodeRegistry
    function topUp(uint96 amount) external {
        Node storage node = _registered(msg.sender);
        require(amount > 0, AmountMissing());
        uint80 stake = SafeCast.toUint80(node.stake + uint256(amount));
        node.stake = stake;
        emit StakeAdded(msg.sender, amount, stake);
        _take(amount);
    }

    /// @inheritdoc INodeRegistry
    function requestUnstake() external {
        Node storage node = _registered(msg.sender);
        require(node.unbondingAt == 0, NodeLeaving(msg.sender, node.unbondingAt));
        uint40 unbondingAt = SafeCast.toUint40(block.timestamp + unbondingPeriod);
        node.unbondingAt = unbondingAt;
        emit UnstakeRequested(msg.sender, unbondingAt);
    }

    /// @inheritdoc INodeRegistry
    function cancelUnstake() external {
        Node storage node = _registered(msg.sender);
        require(node.unbondingAt != 0, NodeStaying(msg.sender));
        node.unbondingAt = 0;
        emit UnstakeCancelled(msg.sender);
    }

    /// @inheritdoc INodeRegistry
    function withdrawStake() external {
        Node storage node = _registered(msg.sender);
        uint64 unbondingAt = node.unbondingAt;
        require(unbondingAt != 0, NodeStaying(msg.sender));
        require(block.timestamp >= unbondingAt, StillUnbonding(msg.sender, unbondingAt));
        require(node.locked == 0, StakeExposed(msg.sender, node.locked));

        uint96 amount = node.stake;
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

    // ---------------------------------------------------------------------- market functions

    /// @inheritdoc INodeRegistry
    function lock(bytes32[] calldata exposures, bool isLate)
        external
        onlyMarket
        returns (bytes32[] memory changed)
    {
        address previous;
        for (uint256 i; i < exposures.length; ++i) {
            bytes32 exposure = exposures[i];
            (address account, uint256 amount) = (accountOf(exposure), amountOf(exposure));
            require(account > previous, ExposuresNotAscending(previous, account));
            previous = account;
            uint256 locked = _lock(account, amount, isLate);
            if (locked == amount) continue;
            if (changed.length == 0) changed = exposures;
            changed[i] = pack(account, uint96(locked)); // forge-lint: disable-line(unsafe-typecast) part of a stake
        }
    }

    /// @inheritdoc INodeRegistry
    function release(bytes32[] calldata exposures) external onlyMarket {
        for (uint256 i; i < exposures.length; ++i) {
            bytes32 exposure = exposures[i];
            // No more is released than was locked, which was a uint80.
            uint80 amount = uint80(amountOf(exposure)); // forge-lint: disable-line(unsafe-typecast)
            _nodes[accountOf(exposure)].locked -= amount;
        }
    }

    /// @inheritdoc INodeRegistry
    function slash(bytes32[] calldata slashes, bytes32[] calldata exposures)
        external
        onlyMarket
        returns (bytes32[] memory taken, uint256 total)
    {
        taken = new bytes32[](slashes.length);
        uint256 next; // in the exposures, which ascend, too
        address previous;
        for (uint256 i; i < slashes.length; ++i) {
            address account = accountOf(slashes[i]);
            require(account > previous, SlashesNotAscending(previous, account));
            previous = account;
            uint256 most = exposures.length > 0 ? EXPOSURE_FLOOR : 0; // as a validator
            while (next < exposures.length && accountOf(exposures[next]) < account) ++next;
            if (next < exposures.length && accountOf(exposures[next]) == account) most += amountOf(exposures[next]);
            uint256 amount = amountOf(slashes[i]);
            uint96 loss = _slash(account, amount < most ? amount : most);
            taken[i] = pack(account, loss);
            total += loss;
        }
        if (total > 0) usdc.safeTransfer(msg.sender, total);
    }

    // ----------------------------------------------------------------------- owner functions

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
    function minStake(uint32 vramGb) public pure returns (uint96) {
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
            locked: node.locked,
            offences: uint8(_offencesOf(node)), // forge-lint: disable-line(unsafe-typecast) at most MAX_OFFENCES
            unbondingAt: node.unbondingAt,
            active: isActive(account),
            operator: node.operator,
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

        uint96 stake = minStake(vramGb);
        _accounts.push(msg.sender);
        _keyOwner[signingKey] = msg.sender;
        node.signingKey = signingKey;
        node.stake = SafeCast.toUint80(stake);
        node.vramGb = vramGb;
        node.position = SafeCast.toUint32(_accounts.length);
        node.operator = msg.sender;
        node.endpoint = endpoint;
        emit NodeRegistered(msg.sender, signingKey, vramGb, stake, endpoint);
        _take(stake);
    }

    /// @dev After k offences the exposure is 4^k times as large, as far as half of the free stake covers it: whoever
    /// lied repeatedly risks its stake, and cannot block the other executions that it takes part in. Nothing is locked of
    /// a node without enough free stake if it is late: the others do not wait for it any more.
    /// @return exposure What is locked.
    function _lock(address account, uint256 amount, bool isLate) internal returns (uint256 exposure) {
        Node storage node = _nodes[account];
        (uint256 stake, uint256 locked) = (node.stake, node.locked);
        uint256 free; // 0 after a slash that left less than is locked
        unchecked {
            uint256 taken = locked + VALIDATION_RESERVE; // locked is a uint80
            if (stake > taken) free = stake - taken;
        }
        require(amount >= EXPOSURE_FLOOR, ExposureTooLow(account, EXPOSURE_FLOOR, amount));
        if (amount > free) {
            require(isLate, ExposureTooHigh(account, free, amount));
            return 0;
        }
        exposure = amount;
        if (block.timestamp < node.offenderUntil) {
            uint256 raised = amount << 2 * node.offences;
            if (raised > free / 2) raised = free / 2;
            if (raised > amount) exposure = raised;
        }
        unchecked {
            // The sum is at most the stake, which is a uint80.
            node.locked = uint80(locked + exposure); // forge-lint: disable-line(unsafe-typecast)
        }
    }

    /// @return loss What is taken: the amount, or what is left of the stake.
    function _slash(address account, uint256 amount) internal returns (uint96 loss) {
        Node storage node = _nodes[account];
        uint80 stake = node.stake;
        // The cast amount is below the stake, which is a uint80.
        loss = amount < stake ? uint80(amount) : stake; // forge-lint: disable-line(unsafe-typecast)
        if (loss == 0) return 0;
        stake -= uint80(loss); // forge-lint: disable-line(unsafe-typecast)
        node.stake = stake;
        if (loss >= LEAST_OFFENCE) _countOffence(node);
        emit NodeSlashed(account, loss, stake);
    }

    function _countOffence(Node storage node) internal {
        uint256 offences = _offencesOf(node);
        if (offences > 0 && block.timestamp + OFFENCE_WINDOW < node.offenderUntil + INCIDENT) return;
        node.offenderUntil = SafeCast.toUint40(block.timestamp + OFFENCE_WINDOW);
        if (offences < MAX_OFFENCES) ++offences;
        node.offences = uint8(offences); // forge-lint: disable-line(unsafe-typecast) at most MAX_OFFENCES
    }

    function _offencesOf(Node storage node) internal view returns (uint256) {
        return block.timestamp < node.offenderUntil ? node.offences : 0;
    }

    /// @dev Called last. Comparing the balances detects a token that charges a fee, and one that calls back into a
    /// second call of this function.
    function _take(uint256 amount) internal {
        uint256 before = usdc.balanceOf(address(this));
        usdc.safeTransferFrom(msg.sender, address(this), amount);
        uint256 received = usdc.balanceOf(address(this)) - before;
        require(received == amount, TransferShort(received, amount));
    }

    function _setUnbondingPeriod(uint64 period) internal {
        uint64 minimum = market == address(0) ? 0 : IMarket(market).longestExecutionS() + SNAPSHOT_AGE_S + 1;
        require(
            period >= minimum && period <= MAX_UNBONDING_PERIOD, PeriodInvalid(period, minimum, MAX_UNBONDING_PERIOD)
        );
        unbondingPeriod = period;
        emit UnbondingPeriodSet(period);
    }

    function _registered(address account) internal view returns (Node storage node) {
        node = _nodes[account];
        require(node.position != 0, UnknownNode(account));
    }

    function _checkEndpoint(string calldata endpoint) internal view {
        uint256 length = bytes(endpoint).length;
        require(length <= MAX_ENDPOINT_BYTES, EndpointTooLong(msg.sender, length));
    }
}
