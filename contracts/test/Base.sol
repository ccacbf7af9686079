// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Committee} from "../src/Committee.sol";
import {Market} from "../src/Market.sol";
import {ModelRegistry} from "../src/ModelRegistry.sol";
import {NodeRegistry} from "../src/NodeRegistry.sol";
import {TestUSDC} from "../src/TestUSDC.sol";
import {Member} from "../src/interfaces/ICommittee.sol";
import {
    ExecutionHistory, Parameters, Payment, PlanSubmission, Request, Settlement
} from "../src/interfaces/IMarket.sol";
import {Task} from "../src/interfaces/IModelRegistry.sol";
import {pack} from "../src/libraries/AccountAmount.sol";
import {Bls} from "../src/libraries/Bls.sol";

/// @dev The cheat codes of forge that the tests use.
interface Vm {
    function addr(uint256 key) external pure returns (address);
    function deal(address account, uint256 amount) external;
    function expectRevert(bytes calldata data) external;
    function expectRevert() external;
    function getCode(string calldata path) external view returns (bytes memory);
    function parseJsonBytesArray(string calldata json, string calldata key) external pure returns (bytes[] memory);
    function prank(address sender) external;
    function readFile(string calldata path) external view returns (string memory);
    function revertToState(uint256 id) external returns (bool);
    function snapshotGasLastCall(string calldata group, string calldata name) external returns (uint256);
    function sign(uint256 key, bytes32 digest) external pure returns (uint8 v, bytes32 r, bytes32 s);
    function snapshotState() external returns (uint256);
    function snapshotValue(string calldata group, string calldata name, uint256 value) external;
    function warp(uint256 time) external;
}

/// @dev A deployed network: four committee members, three nodes of 12 GB, one client with a deposit of 1000 USDC.
/// In test names, a15 to a24 are the numbers of attacks in docs/security.md; a19 is a committee member that signs
/// contradictory votes or wrong plans.
abstract contract Base {
    Vm internal constant vm = Vm(address(uint160(uint256(keccak256("hevm cheat code")))));
    uint96 internal constant NODE_STAKE = 2200e6;
    uint96 internal constant EXPOSURE = 10e6;
    uint96 internal constant FLOOR = 5e6; // NodeRegistry.EXPOSURE_FLOOR
    uint96 internal constant RESERVE = 100e6; // NodeRegistry.VALIDATION_RESERVE
    uint96 internal constant PRICE = 3e6;
    uint32 internal constant RESERVATION = 51; // of a request of Base: 20 % a year of 133 USDC, for 60 s
    uint64 internal constant COMMIT_GRACE = 30; // Market.COMMIT_GRACE_S
    uint64 internal constant LAST_CALL = 30; // Market.LAST_CALL_S
    uint64 internal constant UNBONDING = 7 days;
    uint64 internal constant SNAPSHOT_AGE = 6 hours; // SnapshotAge.sol
    bytes32 internal constant MODEL = keccak256("model");

    TestUSDC internal usdc;
    Committee internal committee;
    NodeRegistry internal nodes;
    ModelRegistry internal models;
    Market internal market;
    uint256[] internal memberKeys; // by ascending address
    address[3] internal node = [address(0x1001), address(0x1002), address(0x1003)];
    uint256 internal constant CLIENT_KEY = 0xC11E;
    address internal client = vm.addr(CLIENT_KEY);
    mapping(bytes32 executionId => Request) internal requests;
    mapping(bytes32 executionId => ExecutionHistory) internal recorded; // what events tell of an execution

    function setUp() public virtual {
        vm.warp(1_800_000_000);
        usdc = TestUSDC(deploy("TestUSDC", ""));
        committee = Committee(deploy("Committee", abi.encode(this)));
        nodes = deployNodes(address(usdc), UNBONDING);
        models = ModelRegistry(deploy("ModelRegistry", ""));
        market = deployMarket(address(usdc), address(committee), address(nodes), address(models));
        nodes.setMarket(address(market));
        makeMemberKeys(4);
        committee.setMembers(makeMembers());
        for (uint256 i; i < node.length; ++i) {
            joinNode(node[i]);
        }
        models.register(MODEL, "tiny", makeTasks(10, 100_000_000), makeChain(10));
        fund(client, 1000e6);
    }

    // -------------------------------------------------------------------------- deployment

    /// @dev Creates a shipped contract with the given constructor arguments; its revert is the test's.
    function deploy(string memory name, bytes memory arguments) internal returns (address created) {
        string memory path = string.concat("../splitup/chain/artifacts/", name, ".json");
        bytes memory code = bytes.concat(vm.getCode(path), arguments);
        assembly ("memory-safe") {
            created := create(0, add(code, 32), mload(code))
            if iszero(created) {
                returndatacopy(0, 0, returndatasize())
                revert(0, returndatasize())
            }
        }
    }

    function deployNodes(address token, uint64 period) internal returns (NodeRegistry) {
        return NodeRegistry(deploy("NodeRegistry", abi.encode(this, token, period)));
    }

    function deployMarket(address token, address committee_, address nodes_, address models_)
        internal
        returns (Market)
    {
        bytes memory arguments = abi.encode(this, token, committee_, nodes_, models_, defaultParameters());
        return Market(deploy("Market", arguments));
    }

    // ---------------------------------------------------------------------------- fixtures

    function defaultParameters() internal pure returns (Parameters memory) {
        return Parameters({
            samplingBps: 800,
            collusionBps: 1000,
            treasuryBps: 2000,
            feeBps: 100,
            rewardMilli: 1200,
            slashMilli: 100_000,
            validationBonusMilli: 0,
            outsideGain: 300_000,
            tieBreakers: 2,
            settlementGraceS: 1 hours,
            minDeadlineS: 5,
            maxDeadlineS: 1 days,
            reservationBps: 2000
        });
    }

    function makeMemberKeys(uint256 count) internal {
        for (uint256 i = memberKeys.length; i < count; ++i) {
            memberKeys.push(0xA1 + i);
        }
        sortMemberKeys();
    }

    function sortMemberKeys() internal {
        for (uint256 i = 1; i < memberKeys.length; ++i) {
            for (uint256 j = i; j > 0 && vm.addr(memberKeys[j - 1]) > vm.addr(memberKeys[j]); --j) {
                (memberKeys[j - 1], memberKeys[j]) = (memberKeys[j], memberKeys[j - 1]);
            }
        }
    }

    function makeMembers() internal view returns (Member[] memory list) {
        list = new Member[](memberKeys.length);
        for (uint256 i; i < list.length; ++i) {
            list[i] = Member(vm.addr(memberKeys[i]), bytes32(i + 1), "http://member");
        }
    }

    function makeTasks(uint256 count, uint64 price) internal pure returns (Task[] memory tasks) {
        tasks = new Task[](count);
        for (uint256 i; i < count; ++i) {
            tasks[i] = Task(keccak256(abi.encode("task", i)), 1 << 30, 1e9, price);
        }
    }

    function makeChain(uint32 count) internal pure returns (uint32[] memory edges) {
        edges = new uint32[](count - 1);
        for (uint32 i; i + 1 < count; ++i) {
            edges[i] = i << 16 | (i + 1);
        }
    }

    function joinNode(address account) internal {
        usdc.mint(account, NODE_STAKE);
        vm.prank(account);
        usdc.approve(address(nodes), type(uint256).max);
        vm.prank(account);
        nodes.register(bytes32(uint256(uint160(account))), 12, "http://node");
    }

    function fund(address account, uint256 amount) internal {
        usdc.mint(account, amount);
        vm.prank(account);
        usdc.approve(address(market), type(uint256).max);
        vm.prank(account);
        market.deposit(amount);
    }

    // --------------------------------------------------------------------------- signatures

    function separator() internal view returns (bytes32) {
        return keccak256(
            abi.encode(
                keccak256("EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"),
                keccak256("SplitUp"),
                keccak256("1"),
                block.chainid,
                address(committee)
            )
        );
    }

    function sign(uint256 key, bytes32 structHash) internal view returns (bytes memory) {
        (uint8 v, bytes32 r, bytes32 s) =
            vm.sign(key, keccak256(abi.encodePacked("\x19\x01", separator(), structHash)));
        return abi.encodePacked(r, s, v);
    }

    /// @dev The first `count` members' signatures, by ascending address.
    function certify(uint256 count, bytes32 structHash) internal view returns (bytes memory signatures) {
        for (uint256 i; i < count; ++i) {
            signatures = abi.encodePacked(signatures, sign(memberKeys[i], structHash));
        }
    }

    function snapshotHash(uint64 configuration, uint64 sequence, bytes32 root) internal pure returns (bytes32) {
        return snapshotHash(configuration, sequence, 1, root);
    }

    function snapshotHash(uint64 configuration, uint64 sequence, uint64 epoch, bytes32 root)
        internal
        pure
        returns (bytes32)
    {
        bytes32 kind = keccak256("Snapshot(uint64 configuration,uint64 sequence,uint64 epoch,bytes32 root)");
        return keccak256(abi.encode(kind, configuration, sequence, epoch, root));
    }

    function planHash(bytes32 id, PlanSubmission memory plan) internal view returns (bytes32) {
        bytes32 kind = keccak256(
            "Plan(uint64 configuration,bytes32 executionId,bytes32 requestHash,bytes32 planRoot,bytes32 seed,uint32 executors)"
        );
        bytes32 requestHash = market.requestHashOf(requests[id]);
        bool isOpen = market.executionOf(id).client != address(0);
        uint64 configuration = isOpen ? market.executionOf(id).configuration : committee.configuration();
        bytes32 seed = keccak256(plan.seedSignature);
        return keccak256(abi.encode(kind, configuration, id, requestHash, plan.planRoot, seed, plan.executors));
    }

    function commitmentsHash(bytes32 id, bytes32 root, bytes32[] memory exposures) internal pure returns (bytes32) {
        bytes32 kind = keccak256("Commitments(bytes32 executionId,bytes32 root,bytes32[] exposures)");
        return keccak256(abi.encode(kind, id, root, keccak256(abi.encodePacked(exposures))));
    }

    function settlementHash(bytes32 id, Settlement memory s) internal pure returns (bytes32) {
        bytes32 kind = keccak256("Settlement(bytes32 executionId,bytes32 settlementHash)");
        return keccak256(abi.encode(kind, id, keccak256(abi.encode(s))));
    }

    /// @dev The client's signature of a request, in the market's domain.
    function signRequest(uint256 key, Request memory r) internal view returns (bytes memory) {
        bytes32 domain = keccak256(
            abi.encode(
                keccak256("EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"),
                keccak256("SplitUp"),
                keccak256("1"),
                block.chainid,
                address(market)
            )
        );
        bytes32 digest = keccak256(abi.encodePacked("\x19\x01", domain, market.requestHashOf(r)));
        (uint8 v, bytes32 rr, bytes32 ss) = vm.sign(key, digest);
        return abi.encodePacked(rr, ss, v);
    }

    // --------------------------------------------------------------------------- randomness

    /// @dev The group's secret key. Sharing it among the members happens, and is tested, off chain.
    uint256 internal constant GROUP_SECRET = 0x5317;

    function blsKey(uint256 secret) internal view returns (bytes memory) {
        bytes memory generator = hex"00000000000000000000000000000000024aa2b2f08f0a91260805272dc51051"
            hex"c6e47ad4fa403b02b4510b647ae3d1770bac0326a805bbefd48056c8c121bdb8"
            hex"0000000000000000000000000000000013e02b6052719f607dacd3a088274f65"
            hex"596bd0d09920b61ab5da61bbdc7f5049334cf11213945d57e5ac7d055d042b7e"
            hex"000000000000000000000000000000000ce5d527727d6e118cc9cdc6da2e351a"
            hex"adfd9baa8cbdd3a76d429a695160d12c923ac9cc3baca289e193548608b82801"
            hex"000000000000000000000000000000000606c4a02ea734cc32acd2b02bc28b99"
            hex"cb3e287e85a763af267492ab572e99ab3f370d275cec1da1aaa9075ff05f79be";
        return multiply(address(0x0e), bytes.concat(generator, bytes32(secret)));
    }

    function blsSign(uint256 secret, bytes memory message) internal view returns (bytes memory) {
        bytes memory point = Bls.hashToCurve(bytes.concat("\x15splitup/randomness/v1", message));
        return multiply(address(0x0c), bytes.concat(point, bytes32(secret)));
    }

    function multiply(address precompile, bytes memory input) private view returns (bytes memory) {
        (bool success, bytes memory output) = precompile.staticcall(input);
        require(success, "a multiplication of EIP-2537 failed");
        return output;
    }

    function confirmKey(bytes memory key, uint256 votes) internal {
        for (uint256 i; i < votes; ++i) {
            vm.prank(vm.addr(memberKeys[i]));
            committee.confirmGroupKey(keccak256(key), key);
        }
    }

    // --------------------------------------------------------------------------- executions

    function makeRequest(uint64 nonce) internal view returns (Request memory r) {
        (uint64 sequence, bytes32 root) = committee.latestSnapshot();
        r = Request({
            client: client,
            modelId: MODEL,
            steps: 1,
            inputsDigest: keccak256("inputs"),
            clientKey: keccak256("key"),
            maxPrice: PRICE,
            deadline: uint64(block.timestamp + 60),
            nonce: nonce,
            snapshotSequence: sequence,
            snapshotRoot: root,
            verifyBps: 800
        });
    }

    function request(uint64 nonce) internal returns (bytes32 id) {
        Request memory r = makeRequest(nonce);
        vm.prank(client);
        id = market.requestExecution(
            r.modelId, r.steps, r.inputsDigest, r.clientKey, r.maxPrice, r.deadline, nonce, r.verifyBps
        );
        requests[id] = r;
    }

    /// @dev The message whose group signature gives the seed of a request's plan.
    function seedMessage(Request memory r) internal view returns (bytes memory) {
        bytes32 id = market.executionIdOf(r.client, r.nonce);
        return abi.encode(keccak256("splitup/plan-seed/v1"), id, market.requestHashOf(r));
    }

    function makePlan(Request memory r, uint256 executors) internal view returns (PlanSubmission memory plan) {
        plan = PlanSubmission(keccak256("plan"), blsSign(GROUP_SECRET, seedMessage(r)), uint32(executors));
    }

    /// @dev Exposures of the first nodes.
    function makeExposures(uint256 executors) internal view returns (bytes32[] memory exposures) {
        exposures = new bytes32[](executors);
        for (uint256 i; i < executors; ++i) {
            exposures[i] = pack(node[i], EXPOSURE);
        }
    }

    function submitPlan(bytes32 id, uint256 executors) internal {
        PlanSubmission memory plan = makePlan(requests[id], executors);
        market.submitCompletePlan(requests[id], plan, certify(3, planHash(id, plan)));
        recordPlan(id, plan);
    }

    function recordPlan(bytes32 id, PlanSubmission memory plan) internal {
        ExecutionHistory storage history = recorded[id];
        history.executionId = id;
        history.requestHash = market.requestHashOf(requests[id]);
        history.planRoot = plan.planRoot;
        history.seed = keccak256(plan.seedSignature);
    }

    function settle(bytes32 id, Settlement memory s) internal {
        market.settle(id, s, recorded[id], certify(3, settlementHash(id, s)));
    }

    function makeSettlement(uint96 pay, uint96 slash, uint96 reward) internal view returns (Settlement memory s) {
        s.steps = 1;
        s.evidenceRoot = keccak256("evidence");
        s.payouts = new bytes32[](1);
        s.payouts[0] = pack(node[0], pay);
        s.rewards = new Payment[](reward > 0 ? 1 : 0);
        if (reward > 0) s.rewards[0] = Payment(node[1], reward);
        s.slashes = new bytes32[](slash > 0 ? 1 : 0);
        if (slash > 0) s.slashes[0] = pack(node[2], slash);
    }

    function makeHistory(bytes32 id, PlanSubmission memory plan, bytes32 commitments, bytes32[] memory payouts)
        internal
        view
        returns (ExecutionHistory memory)
    {
        return ExecutionHistory({
            executionId: id,
            requestHash: market.requestHashOf(requests[id]),
            planRoot: plan.planRoot,
            seed: keccak256(plan.seedSignature),
            commitments: commitments,
            exposures: makeExposures(commitments == 0 ? 0 : plan.executors),
            payouts: payouts
        });
    }

    function distribute(bytes32 id, uint256 executors, bytes32[] memory payouts) internal {
        ExecutionHistory[] memory histories = new ExecutionHistory[](1);
        histories[0] = makeHistory(id, makePlan(requests[id], executors), 0, payouts);
        market.distribute(histories);
    }

    // -------------------------------------------------------------------------- assertions

    error NotEqual(uint256 actual, uint256 expected);

    function assertEq(uint256 actual, uint256 expected) internal pure {
        require(actual == expected, NotEqual(actual, expected));
    }

    /// @dev No money is created or lost. For tests that send no tokens directly to the market, so the sums are exact.
    function assertConserved() internal view {
        assertEq(
            usdc.balanceOf(address(market)), market.totalBalances() + market.totalLocked() + market.totalFees()
        );
        require(market.conserved(), "conserved() disagrees");
    }
}
