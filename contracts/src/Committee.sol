// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Ownable} from "@openzeppelin/contracts/access/Ownable.sol";
import {Ownable2Step} from "@openzeppelin/contracts/access/Ownable2Step.sol";
import {ECDSA} from "@openzeppelin/contracts/utils/cryptography/ECDSA.sol";
import {EIP712} from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";
import {ICommittee, Member} from "./interfaces/ICommittee.sol";
import {Bls} from "./libraries/Bls.sol";

/// @title The committee
/// @notice See {ICommittee}.
contract Committee is ICommittee, Ownable2Step, EIP712 {
    // ---------------------------------------------------------------------------- constants

    uint256 internal constant MIN_MEMBERS = 4; // fewer members tolerate no faulty one
    uint256 internal constant MAX_MEMBERS = 31; // a quorum check of 31 members costs about 150 k gas
    uint256 internal constant MAX_ENDPOINT_BYTES = 256;
    uint256 internal constant MAX_BLOB_BYTES = 65536; // a dealing for 31 members is below 8 KiB
    uint256 internal constant RECENT_SNAPSHOTS = 64; // about half an hour; a signed request must name one of them
    uint256 internal constant SIGNATURE_BYTES = 65;

    bytes32 internal constant SNAPSHOT_TYPEHASH =
        keccak256("Snapshot(uint64 configuration,uint64 sequence,uint64 epoch,bytes32 root)");
    /// @dev Prefix of every message that the group signs. It starts with its own length, so that no other prefix and
    /// message give the same bytes.
    bytes internal constant RANDOMNESS_DOMAIN = "\x15splitup/randomness/v1";

    // ------------------------------------------------------------------------------ storage

    /// @dev `keyContract` is a contract whose code is a zero byte and the group key. Reading the key from code costs
    /// 3 k gas; from storage it would cost 19 k.
    struct Configuration {
        address keyContract;
        uint16 memberCount;
    }

    /// @inheritdoc ICommittee
    uint64 public configuration;
    /// @inheritdoc ICommittee
    uint64 public nextConfiguration;
    uint64 internal _lastConfiguration; // the highest number so far
    uint64 internal _sequence; // of the latest snapshot
    mapping(uint256 slot => bytes32 root) internal _recentRoots; // slot = sequence % RECENT_SNAPSHOTS

    // Keyed by configuration: a new configuration starts empty without a loop that clears the previous one, and
    // signatures of earlier configurations can still be checked.
    mapping(uint64 configuration => Configuration) internal _configurations;
    mapping(uint64 configuration => Member[]) internal _members;
    mapping(uint64 configuration => mapping(address account => bool)) internal _isMember;
    mapping(uint64 configuration => mapping(address dealer => bool)) internal _hasDealt;
    mapping(uint64 configuration => mapping(address member => bool)) internal _hasVoted;
    mapping(uint64 configuration => mapping(bytes32 groupKeyHash => uint256)) internal _votes;

    /// @param owner_ Owner of the contract.
    constructor(address owner_) Ownable(owner_) EIP712("SplitUp", "1") {}

    // ----------------------------------------------------------------------- owner functions

    /// @inheritdoc ICommittee
    function setMembers(Member[] calldata members_) external onlyOwner {
        uint64 added = _addConfiguration(members_);
        if (_configurations[configuration].keyContract == address(0)) {
            _activate(added);
        } else {
            nextConfiguration = added;
            emit HandoverBegun(added, members_);
        }
    }

    /// @inheritdoc ICommittee
    function resetMembers(Member[] calldata members_) external onlyOwner {
        _activate(_addConfiguration(members_));
    }

    // ---------------------------------------------------------------------- member functions

    /// @inheritdoc ICommittee
    function postDealing(bytes calldata dealing) external {
        _checkMember(configuration, msg.sender);
        _checkLength(dealing.length, MAX_BLOB_BYTES);
        uint64 target = _keyTarget();
        require(!_hasDealt[target][msg.sender], DealingExists(target, msg.sender));
        _hasDealt[target][msg.sender] = true;
        emit DealingPosted(target, msg.sender, dealing);
    }

    /// @inheritdoc ICommittee
    function postComplaint(address dealer, bytes calldata evidence) external {
        _checkLength(evidence.length, MAX_BLOB_BYTES);
        uint64 target = _keyTarget();
        _checkMember(target, msg.sender);
        _checkMember(configuration, dealer);
        emit ComplaintPosted(target, dealer, msg.sender, evidence);
    }

    /// @inheritdoc ICommittee
    function confirmGroupKey(bytes32 groupKeyHash, bytes calldata groupKey_) external {
        require(groupKey_.length == Bls.KEY_BYTES, GroupKeyInvalid());
        bytes32 actual = keccak256(groupKey_);
        require(actual == groupKeyHash, GroupKeyHashMismatch(groupKeyHash, actual));
        uint64 target = _keyTarget();
        _checkMember(target, msg.sender);
        require(!_hasVoted[target][msg.sender], VoteExists(target, msg.sender));
        if (target != configuration) {
            require(actual == keccak256(groupKeyOf(configuration)), GroupKeyChanged(target));
        }

        _hasVoted[target][msg.sender] = true;
        uint256 votes = ++_votes[target][groupKeyHash];
        emit GroupKeyVoted(target, msg.sender, groupKeyHash);
        if (votes < quorumOf(target)) return;
        require(Bls.isKey(groupKey_), GroupKeyInvalid());
        _configurations[target].keyContract = _storeAsCode(groupKey_);
        if (target != configuration) _activate(target);
        emit GroupKeySet(target, groupKey_);
    }

    // ------------------------------------------------------------------ public functions

    /// @inheritdoc ICommittee
    function submitSnapshot(uint64 sequence, uint64 epoch, bytes32 root, bytes calldata signatures) external {
        require(sequence == _sequence + 1, SequenceInvalid(sequence, _sequence + 1));
        require(root != 0, RootMissing());
        uint64 current = configuration;
        _requireQuorum(current, keccak256(abi.encode(SNAPSHOT_TYPEHASH, current, sequence, epoch, root)), signatures);

        _sequence = sequence;
        _recentRoots[sequence % RECENT_SNAPSHOTS] = root;
        emit SnapshotAccepted(current, sequence, root);
    }

    // ------------------------------------------------------------------------------- checks

    /// @inheritdoc ICommittee
    function requireQuorum(bytes32 structHash, bytes calldata signatures) external view {
        _requireQuorum(configuration, structHash, signatures);
    }

    /// @inheritdoc ICommittee
    function requireQuorumOf(uint64 configuration_, bytes32 structHash, bytes calldata signatures) external view {
        _requireActivated(configuration_);
        _requireQuorum(configuration_, structHash, signatures);
    }

    /// @inheritdoc ICommittee
    function verifyRandomness(bytes calldata message, bytes calldata signature) external view returns (bytes32) {
        return verifyRandomnessOf(configuration, message, signature);
    }

    /// @inheritdoc ICommittee
    function verifyRandomnessOf(uint64 configuration_, bytes calldata message, bytes calldata signature)
        public
        view
        returns (bytes32 seed)
    {
        bytes memory key = groupKeyOf(configuration_);
        require(key.length != 0, GroupKeyMissing(configuration_));
        require(
            Bls.isSignature(key, bytes.concat(RANDOMNESS_DOMAIN, message), signature), RandomnessInvalid(configuration_)
        );
        return keccak256(signature);
    }

    // ------------------------------------------------------------------------------- views

    /// @inheritdoc ICommittee
    function members() external view returns (Member[] memory) {
        return _members[configuration];
    }

    /// @inheritdoc ICommittee
    function membersOf(uint64 configuration_) external view returns (Member[] memory) {
        return _members[configuration_];
    }

    /// @inheritdoc ICommittee
    function quorum() external view returns (uint256) {
        return quorumOf(configuration);
    }

    /// @inheritdoc ICommittee
    function quorumOf(uint64 configuration_) public view returns (uint256) {
        return 2 * (_configurations[configuration_].memberCount / 3) + 1; // n = 3f+1, hence n / 3 = f
    }

    /// @inheritdoc ICommittee
    function isMember(address account) external view returns (bool) {
        return _isMember[configuration][account];
    }

    /// @inheritdoc ICommittee
    function isMemberOf(uint64 configuration_, address account) external view returns (bool) {
        return _isMember[configuration_][account];
    }

    /// @inheritdoc ICommittee
    function groupKey() external view returns (bytes memory) {
        return groupKeyOf(configuration);
    }

    /// @inheritdoc ICommittee
    function groupKeyOf(uint64 configuration_) public view returns (bytes memory) {
        return _loadFromCode(_configurations[configuration_].keyContract);
    }

    /// @inheritdoc ICommittee
    function latestSnapshot() external view returns (uint64 sequence, bytes32 root) {
        return (_sequence, snapshotRootOf(_sequence));
    }

    /// @inheritdoc ICommittee
    function snapshotRootOf(uint64 sequence) public view returns (bytes32) {
        bool kept = sequence != 0 && sequence <= _sequence && _sequence - sequence < RECENT_SNAPSHOTS;
        return kept ? _recentRoots[sequence % RECENT_SNAPSHOTS] : bytes32(0);
    }

    /// @inheritdoc ICommittee
    function domainSeparator() external view returns (bytes32) {
        return _domainSeparatorV4();
    }

    // ------------------------------------------------------------------- members, internal

    function _addConfiguration(Member[] calldata members_) internal returns (uint64 added) {
        uint256 count = members_.length;
        require(count >= MIN_MEMBERS && count <= MAX_MEMBERS && count % 3 == 1, MemberCountInvalid(count));

        added = ++_lastConfiguration;
        // At most MAX_MEMBERS, by the check above.
        _configurations[added].memberCount = uint16(count); // forge-lint: disable-line(unsafe-typecast)
        address previous;
        for (uint256 i; i < count; ++i) {
            Member calldata member = members_[i];
            require(member.account > previous, MembersNotAscending(previous, member.account));
            require(member.signingKey != 0, MemberKeyMissing(member.account));
            uint256 length = bytes(member.endpoint).length;
            require(length <= MAX_ENDPOINT_BYTES, EndpointTooLong(member.account, length));
            previous = member.account;
            _isMember[added][previous] = true;
            _members[added].push(member);
        }
    }

    function _activate(uint64 configuration_) internal {
        configuration = configuration_;
        nextConfiguration = 0;
        emit MembersSet(configuration_, _members[configuration_]);
    }

    /// @dev Returns the configuration whose key is being generated: the announced one, or the current one if there is
    /// no announced one. Reverts if it has its key.
    function _keyTarget() internal view returns (uint64 target) {
        target = nextConfiguration == 0 ? configuration : nextConfiguration;
        require(_configurations[target].keyContract == address(0), GroupKeyExists(target));
    }

    function _checkMember(uint64 configuration_, address account) internal view {
        require(_isMember[configuration_][account], NotMember(account));
    }

    /// @dev A configuration with a key has been in force; the current one is in force even without a key.
    function _requireActivated(uint64 configuration_) internal view {
        require(
            configuration_ == configuration || _configurations[configuration_].keyContract != address(0),
            ConfigurationUnknown(configuration_)
        );
    }

    function _checkLength(uint256 length, uint256 maximum) internal pure {
        require(length > 0 && length <= maximum, BlobLengthInvalid(length, maximum));
    }

    // ------------------------------------------------------------------- quorum, internal

    /// @dev The cheap checks (length, number) come before the expensive one (signature recovery) and bound it. Because
    /// signers must ascend, comparing each with the previous one shows that all are distinct.
    function _requireQuorum(uint64 configuration_, bytes32 structHash, bytes calldata signatures) internal view {
        uint256 count = signatures.length / SIGNATURE_BYTES;
        require(
            signatures.length % SIGNATURE_BYTES == 0 && count <= MAX_MEMBERS, SignaturesMalformed(signatures.length)
        );
        // Before the first members are set, the quorum is 1, and every signer is refused with NotMember.
        uint256 required = quorumOf(configuration_);
        require(count >= required, QuorumTooSmall(count, required));

        bytes32 digest = _hashTypedDataV4(structHash);
        mapping(address => bool) storage isSigner = _isMember[configuration_];
        address previous;
        for (uint256 i; i < count; ++i) {
            bytes calldata signature = signatures[i * SIGNATURE_BYTES:(i + 1) * SIGNATURE_BYTES];
            (address signer, ECDSA.RecoverError failure,) = ECDSA.tryRecover(
                digest, uint8(signature[64]), bytes32(signature[:32]), bytes32(signature[32:64])
            );
            require(failure == ECDSA.RecoverError.NoError, SignatureInvalid(i));
            require(signer > previous, SignersNotAscending(previous, signer));
            require(isSigner[signer], NotMember(signer));
            previous = signer;
        }
    }

    // ------------------------------------------------------------- data as code, internal

    /// @dev Deploys a contract whose code is a zero byte (STOP) and the data. The first eleven bytes are init code,
    /// which returns the bytes that follow it.
    function _storeAsCode(bytes memory data) internal returns (address holder) {
        bytes memory code = bytes.concat(hex"600b5981380380925939f300", data);
        assembly ("memory-safe") {
            holder := create(0, add(code, 32), mload(code))
        }
        require(holder != address(0), GroupKeyInvalid());
    }

    function _loadFromCode(address holder) internal view returns (bytes memory data) {
        if (holder == address(0)) return data;
        uint256 length = holder.code.length - 1;
        data = new bytes(length);
        assembly ("memory-safe") {
            extcodecopy(holder, add(data, 32), 1, length)
        }
    }
}
