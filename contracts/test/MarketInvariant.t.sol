// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {MarketBase} from "./MarketBase.sol";
import {
    Execution, ExecutionHistory, Parameters, PlanSubmission, Request, Settlement, Status
} from "../src/interfaces/IMarket.sol";
import {accountOf, amountOf, pack} from "../src/libraries/AccountAmount.sol";

/// @dev The calls that move money, change members, or are the owner's; forge chooses their order and arguments. The
/// handler owns the network. The quorum of an execution's own configuration certifies what it likes: any commitments,
/// and slashes of anybody in any amount.
contract MarketHandler is MarketBase {
    uint256 internal constant EXECUTIONS = 12;
    uint256 internal constant CONFIGURATIONS = 3;
    address internal constant OTHER_TREASURY = address(0x7EA5);

    struct Terms {
        uint40 deadline;
        uint24 durationS;
        uint32 configuration;
        uint24 settlementGraceS;
        uint16 feeBps;
        uint16 treasuryBps;
        uint32 reservation;
    }

    bytes32[] internal _ids;
    mapping(bytes32 executionId => Terms) internal _opened; // the terms when it was opened
    mapping(bytes32 executionId => uint32) internal _planned; // number of executors in the plan
    mapping(bytes32 executionId => Settlement) internal _settlements;
    mapping(bytes32 executionId => uint256) internal _distributions; // successful ones
    mapping(uint256 configuration => uint256[]) internal _keys;
    uint256 internal _earned; // by node 0, out of prices
    uint256 internal _withdrawn; // by node 0
    uint256[3] internal _added; // to stakes, by topUp
    uint256[3] internal _lost; // by slashes
    string internal _violation; // a failed requirement would only revert the call, and be ignored

    function setUp() public override {
        super.setUp();
        _keys[1] = memberKeys;
    }

    // -------------------------------------------------------------------------- accounts

    function deposit(uint64 amount) external {
        fund(client, uint256(amount) + 1);
    }

    function withdraw(uint256 who, uint128 amount) external {
        address account = who % 4 == 3 ? client : node[who % 4];
        uint256 part = amount % (market.balanceOf(account) + 1);
        vm.prank(account);
        market.withdraw(part);
        if (account == node[0]) _withdrawn += part;
    }

    function freeze(uint16 later) external {
        vm.prank(client);
        market.freeze(uint64(block.timestamp + later % 20));
    }

    function topUp(uint256 who, uint32 amount) external {
        address account = node[who % 3];
        usdc.mint(account, amount);
        vm.prank(account);
        usdc.approve(address(nodes), amount);
        vm.prank(account);
        nodes.topUp(amount);
        _added[who % 3] += amount;
    }

    function unstake(uint256 who) external {
        vm.prank(node[who % 3]);
        nodes.requestUnstake();
    }

    // ------------------------------------------------------------------------ executions

    function requestOne() external {
        if (_ids.length < EXECUTIONS) _open(request(uint64(_ids.length)));
    }

    function submit(uint256 which, uint16 executors) external {
        bytes32 id = _pick(which);
        submitPlan(id, executors % 3 + 1);
        _planned[id] = executors % 3 + 1;
    }

    function openSigned(uint16 executors) external {
        require(_ids.length < EXECUTIONS);
        _useKeys(committee.configuration());
        Request memory r = makeRequest(uint64(_ids.length));
        bytes32 id = market.executionIdOf(client, r.nonce);
        requests[id] = r;
        uint32 count = executors % 3 + 1;
        PlanSubmission memory plan = makePlan(r, count);
        market.openExecution(r, signRequest(CLIENT_KEY, r), plan, certify(3, planHash(id, plan)));
        recordPlan(id, plan);
        _open(id);
        _planned[id] = count;
    }

    function commitMany(uint256 which, uint96 exposure) external {
        bytes32 id = _pick(which);
        bytes32[] memory exposures = makeExposures(_planned[id]);
        exposures[exposure % exposures.length] = pack(node[exposure % exposures.length], FLOOR + exposure % 900e6);
        commitAll(id, exposures);
    }

    function decide(uint256 which, uint96 pay, uint256 who, uint96 slash, uint96 reward) external {
        bytes32 id = _pick(which);
        Settlement memory s = makeSettlement(pay % 3.1e6, 0, reward % 1000e6);
        s.slashes = new bytes32[](who % 4); // of the first nodes, exposed or not
        uint256[3] memory before;
        for (uint256 i; i < 3; ++i) {
            before[i] = nodes.nodeOf(node[i]).stake;
            if (i < s.slashes.length) s.slashes[i] = pack(node[i], slash);
        }
        uint256 fees = market.totalFees();
        uint256 balance = market.balanceOf(node[1]);
        uint256 slashed;
        settle(id, s);
        for (uint256 i; i < 3; ++i) {
            uint256 lost = before[i] - nodes.nodeOf(node[i]).stake;
            if (lost > (i < s.slashes.length ? slash : 0)) _violation = "a node lost more than the settlement says";
            if (lost > _exposureOf(id, node[i])) _violation = "a node lost more than its exposure";
            _lost[i] += lost;
            slashed += lost;
        }
        uint256 paid = amountOf(s.payouts[0]);
        if (market.totalFees() - fees != _feeOf(id, paid)) _violation = "another fee";
        uint256 given = market.balanceOf(node[1]) - balance;
        if (given > slashed * (10_000 - _opened[id].treasuryBps) / 10_000) _violation = "too little for the treasury";
        _settlements[id].payouts = s.payouts;
    }

    function distributeOne(uint256 which) external {
        _distribute(_pick(which));
    }

    function refund(uint256 which) external {
        bytes32 id = _pick(which);
        uint256 balance = market.balanceOf(client);
        market.refund(id);
        uint256 kept = _planned[id] > 0 ? _opened[id].reservation : 0;
        if (market.balanceOf(client) - balance != PRICE - kept) _violation = "another refund";
    }

    function wait(uint16 later) external {
        vm.warp(block.timestamp + (later % 8 == 0 ? 1 hours : later % 90));
    }

    function collect(uint64 configuration) external {
        market.collectFees(configuration % uint64(CONFIGURATIONS) + 1);
    }

    // ------------------------------------------------------------- the members and the owner

    /// @dev New members; executions that are open stay with the old ones.
    function rotate() external {
        uint64 next = committee.configuration() + 1;
        require(next <= CONFIGURATIONS);
        for (uint256 i; i < 4; ++i) {
            _keys[next].push(0xA1 + 16 * next + i);
        }
        _useKeys(next);
        committee.resetMembers(makeMembers());
        confirmKey(blsKey(GROUP_SECRET), 3);
    }

    function change(uint16 fee, uint16 treasury, uint32 grace, uint32 longest, bool paused) external {
        Parameters memory p = defaultParameters();
        p.reservationBps = uint16(uint256(longest) % 10_000 + 1);
        p.feeBps = fee % 1001;
        p.treasuryBps = treasury % 10_000 + 1;
        p.settlementGraceS = grace % 2 days;
        p.maxDeadlineS = p.minDeadlineS + longest % 2 days;
        market.setParameters(p);
        market.setTreasury(fee % 2 == 0 ? address(this) : OTHER_TREASURY);
        market.setPaused(paused && fee % 8 == 0);
    }

    function unbonding(uint64 period) external {
        nodes.setUnbondingPeriod(period % 30 days);
    }

    // ------------------------------------------------------------------------- invariants

    function check() external view {
        require(bytes(_violation).length == 0, _violation);
        assertConserved();
        uint256 open_;
        uint256[3] memory exposed;
        for (uint256 i; i < _ids.length; ++i) {
            bytes32 id = _ids[i];
            Execution memory execution = market.executionOf(id);
            bool isUnplanned = execution.status == Status.Refunded && _planned[id] == 0;
            if (isUnplanned) execution.reservation = _opened[id].reservation;
            require(keccak256(abi.encode(_termsOf(execution))) == keccak256(abi.encode(_opened[id])), "other terms");
            if (execution.status == Status.Requested || execution.status == Status.Planned) open_ += execution.maxPrice;
            if (execution.status == Status.Settled && !execution.released) open_ += _payout(id);
            require(_distributions[id] <= 1, "paid twice");
            for (uint256 n; n < 3 && !execution.released; ++n) {
                exposed[n] += _sumOf(recorded[id].exposures, node[n]);
            }
        }
        assertEq(market.totalLocked(), open_);
        uint256 owed = market.balanceOf(client) + market.balanceOf(address(this)) + market.balanceOf(OTHER_TREASURY);
        uint256 staked;
        for (uint256 i; i < node.length; ++i) {
            owed += market.balanceOf(node[i]);
            staked += nodes.nodeOf(node[i]).stake;
            assertEq(nodes.nodeOf(node[i]).locked, exposed[i]);
            assertEq(nodes.nodeOf(node[i]).stake + _lost[i], NODE_STAKE + _added[i]); // nothing else takes stake
        }
        for (uint256 c = 1; c <= CONFIGURATIONS; ++c) {
            for (uint256 i; i < _keys[c].length; ++i) {
                owed += market.balanceOf(vm.addr(_keys[c][i]));
            }
        }
        assertEq(market.totalBalances(), owed);
        assertEq(usdc.balanceOf(address(nodes)), staked);
        assertEq(market.balanceOf(node[0]) + _withdrawn, _earned); // each payout exactly once
    }

    /// @dev After any sequence of calls: every execution ends, every account can withdraw its balance, and every node
    /// its stake, without a member or the owner.
    function finish() external {
        for (uint256 i; i < _ids.length; ++i) {
            bytes32 id = _ids[i];
            Status status = market.executionOf(id).status;
            if (status == Status.Requested || status == Status.Planned) {
                uint256 refundable = market.refundableAt(id);
                if (block.timestamp < refundable) vm.warp(refundable);
                market.refund(id);
            }
            if (_planned[id] > 0 && !market.executionOf(id).released) _distribute(id);
        }
        assertEq(market.totalLocked(), 0);
        for (uint256 i; i < node.length; ++i) {
            uint256 due = usdc.balanceOf(node[i]) + nodes.nodeOf(node[i]).stake;
            assertEq(nodes.nodeOf(node[i]).locked, 0);
            if (nodes.nodeOf(node[i]).unbondingAt == 0) {
                vm.prank(node[i]);
                nodes.requestUnstake();
            }
            uint256 free = nodes.nodeOf(node[i]).unbondingAt;
            if (block.timestamp < free) vm.warp(free);
            vm.prank(node[i]);
            nodes.withdrawStake();
            assertEq(usdc.balanceOf(node[i]), due);
        }
        assertEq(usdc.balanceOf(address(nodes)), 0);
        uint256 until = market.frozenUntil(client);
        if (block.timestamp < until) vm.warp(until);
        for (uint64 c = 1; c <= committee.configuration(); ++c) {
            market.collectFees(c);
        }
        _drain(client);
        _drain(address(this));
        _drain(OTHER_TREASURY);
        for (uint256 i; i < 3; ++i) {
            _drain(node[i]);
        }
        for (uint256 c = 1; c <= CONFIGURATIONS; ++c) {
            for (uint256 i; i < _keys[c].length; ++i) {
                _drain(vm.addr(_keys[c][i]));
            }
        }
        assertEq(market.totalBalances(), 0);
        require(usdc.balanceOf(address(market)) < 4 * CONFIGURATIONS, "more than the remainder of a division is left");
    }

    // --------------------------------------------------------------------------- internal

    function _open(bytes32 id) internal {
        _ids.push(id);
        Parameters memory p = market.parameters();
        uint32 configuration = uint32(committee.configuration());
        uint40 deadline = uint40(requests[id].deadline);
        uint24 time = uint24(deadline - block.timestamp);
        (,,, uint256 reservation) = market.quoteParts(MODEL, 1, time);
        _opened[id] = Terms(
            deadline,
            time,
            configuration,
            uint24(p.settlementGraceS),
            p.feeBps,
            p.treasuryBps,
            uint32(reservation)
        );
    }

    function _termsOf(Execution memory execution) internal pure returns (Terms memory) {
        return Terms(
            execution.deadline,
            execution.durationS,
            execution.configuration,
            execution.settlementGraceS,
            execution.feeBps,
            execution.treasuryBps,
            execution.reservation
        );
    }

    /// @dev What a settlement takes as the fee: of what is paid, or for the time that stake was reserved.
    function _feeOf(bytes32 id, uint256 paid) internal view returns (uint256 fee) {
        Terms storage terms = _opened[id];
        fee = paid * terms.feeBps / 10_000;
        uint256 leftS = terms.deadline > block.timestamp ? terms.deadline - block.timestamp : 0;
        uint256 part = uint256(terms.reservation) * (terms.durationS - leftS);
        uint256 reserved = (part + terms.durationS - 1) / terms.durationS;
        if (fee < reserved) fee = reserved;
        if (fee > PRICE - paid) fee = PRICE - paid;
    }

    /// @dev The most that an execution may take from a node: what it locked, and as a validator the floor.
    function _exposureOf(bytes32 id, address account) internal view returns (uint256) {
        ExecutionHistory storage history = recorded[id];
        uint256 validating = history.exposures.length > 0 ? FLOOR : 0;
        return validating + _sumOf(history.exposures, account);
    }

    function _sumOf(bytes32[] storage words, address account) internal view returns (uint256 sum) {
        for (uint256 i; i < words.length; ++i) {
            if (accountOf(words[i]) == account) sum += amountOf(words[i]);
        }
    }

    function _drain(address account) internal {
        uint256 balance = market.balanceOf(account);
        if (balance == 0) return;
        vm.prank(account);
        market.withdraw(balance);
    }

    function _distribute(bytes32 id) internal {
        distributeAll(id, _settlements[id].payouts);
        ++_distributions[id];
        _earned += _payout(id);
    }

    function _payout(bytes32 id) internal view returns (uint256) {
        bytes32[] storage payouts = _settlements[id].payouts;
        return payouts.length == 0 ? 0 : amountOf(payouts[0]);
    }

    /// @dev The members that sign from now on are those of the execution's configuration.
    function _pick(uint256 which) internal returns (bytes32 id) {
        id = _ids[which % _ids.length];
        _useKeys(market.executionOf(id).configuration);
    }

    function _useKeys(uint256 configuration) internal {
        memberKeys = _keys[configuration];
        sortMemberKeys();
    }
}

contract MarketInvariantTest {
    MarketHandler internal handler;

    function setUp() public {
        handler = new MarketHandler();
        handler.setUp();
    }

    function targetContracts() external view returns (address[] memory list) {
        list = new address[](1);
        list[0] = address(handler);
    }

    struct FuzzSelector {
        address addr;
        bytes4[] selectors;
    }

    function targetSelectors() external view returns (FuzzSelector[] memory list) {
        list = new FuzzSelector[](1);
        list[0].addr = address(handler);
        list[0].selectors = new bytes4[](17);
        list[0].selectors[0] = MarketHandler.deposit.selector;
        list[0].selectors[1] = MarketHandler.withdraw.selector;
        list[0].selectors[2] = MarketHandler.requestOne.selector;
        list[0].selectors[3] = MarketHandler.submit.selector;
        list[0].selectors[5] = MarketHandler.decide.selector;
        list[0].selectors[6] = MarketHandler.refund.selector;
        list[0].selectors[7] = MarketHandler.freeze.selector;
        list[0].selectors[8] = MarketHandler.openSigned.selector;
        list[0].selectors[9] = MarketHandler.commitMany.selector;
        list[0].selectors[10] = MarketHandler.distributeOne.selector;
        list[0].selectors[11] = MarketHandler.collect.selector;
        list[0].selectors[12] = MarketHandler.wait.selector;
        list[0].selectors[13] = MarketHandler.topUp.selector;
        list[0].selectors[14] = MarketHandler.unstake.selector;
        list[0].selectors[15] = MarketHandler.rotate.selector;
        list[0].selectors[16] = MarketHandler.change.selector;
        list[0].selectors[4] = MarketHandler.unbonding.selector;
    }

    function invariant_money_and_stake_are_conserved() external view {
        handler.check();
    }

    function afterInvariant() external {
        handler.finish();
    }
}
