// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Ownable} from "@openzeppelin/contracts/access/Ownable.sol";
import {Ownable2Step} from "@openzeppelin/contracts/access/Ownable2Step.sol";
import {ECDSA} from "@openzeppelin/contracts/utils/cryptography/ECDSA.sol";
import {EIP712} from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";
import {ICommittee, Member} from "./interfaces/ICommittee.sol";

/// @title The committee
/// @notice See {ICommittee}.
contract Committee is ICommittee, Ownable2Step, EIP712 {
    // ---------------------------------------------------------------------------- constants

    uint256 internal constant MIN_MEMBERS = 4; // three members tolerate nobody
    uint256 internal constant MAX_MEMBERS = 31; // a quorum check then stays near 150 k gas
    uint256 internal constant MAX_ENDPOINT_BYTES = 256;
    uint256 internal constant MAX_BLOB_BYTES = 65536; // a dealing for 31 members is below 8 KiB
    uint256 internal constant MAX_GROUP_KEY_BYTES = 256; // a BLS12-381 point, compressed or not
    uint256 internal constant SIGNATURE_BYTES = 65;

    bytes32 internal constant SNAPSHOT_TYPEHASH =
        keccak256("Snapshot(uint64 configuration,uint64 sequence,bytes32 root)");

    // ------------------------------------------------------------------------------ storage

    /// @inheritdoc ICommittee
    uint64 public configuration;
    uint64 internal _sequence;
    bytes32 internal _root;
    bytes internal _groupKey;
    Member[] internal _members;

    // Keyed by configuration, so that a new one starts empty without a loop that clears the old.
    mapping(uint64 configuration => mapping(address account => bool)) internal _isMember;
    mapping(uint64 configuration => mapping(address dealer => bool)) internal _hasDealt;
    mapping(uint64 configuration => mapping(address member => bool)) internal _hasVoted;
    mapping(uint64 configuration => mapping(bytes32 groupKeyHash => uint256)) internal _votes;

    constructor(address owner_) Ownable(owner_) EIP712("SplitUp", "1") {}

    modifier onlyMember() {
        require(_isMember[configuration][msg.sender], NotMember(msg.sender));
        _;
    }

    // ------------------------------------------------------------------------- owner's verb

    /// @inheritdoc ICommittee
    function setMembers(Member[] calldata members_) external onlyOwner {
        uint256 count = members_.length;
        require(count >= MIN_MEMBERS && count <= MAX_MEMBERS && count % 3 == 1, MemberCountInvalid(count));

        uint64 current = ++configuration;
        delete _members;
        delete _groupKey;
        address previous;
        for (uint256 i; i < count; ++i) {
            Member calldata member = members_[i];
            require(member.account > previous, MembersNotAscending(previous, member.account));
            require(member.signingKey != 0, MemberKeyMissing(member.account));
            uint256 length = bytes(member.endpoint).length;
            require(length <= MAX_ENDPOINT_BYTES, EndpointTooLong(member.account, length));
            previous = member.account;
            _isMember[current][previous] = true;
            _members.push(member);
        }
        emit MembersSet(current, members_);
    }

    // ----------------------------------------------------------------------- members' verbs

    /// @inheritdoc ICommittee
    function postDealing(bytes calldata dealing) external onlyMember {
        _checkLength(dealing.length, MAX_BLOB_BYTES);
        uint64 current = configuration;
        require(_groupKey.length == 0, GroupKeyExists(current));
        require(!_hasDealt[current][msg.sender], DealingExists(current, msg.sender));
        _hasDealt[current][msg.sender] = true;
        emit DealingPosted(current, msg.sender, dealing);
    }

    /// @inheritdoc ICommittee
    function postComplaint(address dealer, bytes calldata evidence) external onlyMember {
        _checkLength(evidence.length, MAX_BLOB_BYTES);
        uint64 current = configuration;
        require(_isMember[current][dealer], NotMember(dealer));
        require(_groupKey.length == 0, GroupKeyExists(current));
        emit ComplaintPosted(current, dealer, msg.sender, evidence);
    }

    /// @inheritdoc ICommittee
    function confirmGroupKey(bytes32 groupKeyHash, bytes calldata groupKey_) external onlyMember {
        _checkLength(groupKey_.length, MAX_GROUP_KEY_BYTES);
        bytes32 actual = keccak256(groupKey_);
        require(actual == groupKeyHash, GroupKeyHashMismatch(groupKeyHash, actual));
        uint64 current = configuration;
        require(_groupKey.length == 0, GroupKeyExists(current));
        require(!_hasVoted[current][msg.sender], VoteExists(current, msg.sender));

        _hasVoted[current][msg.sender] = true;
        uint256 votes = ++_votes[current][groupKeyHash];
        emit GroupKeyVoted(current, msg.sender, groupKeyHash);
        if (votes >= quorum()) {
            _groupKey = groupKey_;
            emit GroupKeySet(current, groupKey_);
        }
    }

    // --------------------------------------------------------------------- anybody's verbs

    /// @inheritdoc ICommittee
    function submitSnapshot(uint64 sequence, bytes32 root, bytes calldata signatures) external {
        require(sequence == _sequence + 1, SequenceInvalid(sequence, _sequence + 1));
        require(root != 0, RootMissing());
        uint64 current = configuration;
        _requireQuorum(keccak256(abi.encode(SNAPSHOT_TYPEHASH, current, sequence, root)), signatures);

        _sequence = sequence;
        _root = root;
        emit SnapshotAccepted(current, sequence, root);
    }

    // ------------------------------------------------------------------------------- views

    /// @inheritdoc ICommittee
    function requireQuorum(bytes32 structHash, bytes calldata signatures) external view {
        _requireQuorum(structHash, signatures);
    }

    /// @inheritdoc ICommittee
    function members() external view returns (Member[] memory) {
        return _members;
    }

    /// @inheritdoc ICommittee
    function quorum() public view returns (uint256) {
        return 2 * (_members.length / 3) + 1; // n = 3f+1, hence n / 3 = f
    }

    /// @inheritdoc ICommittee
    function isMember(address account) external view returns (bool) {
        return _isMember[configuration][account];
    }

    /// @inheritdoc ICommittee
    function groupKey() external view returns (bytes memory) {
        return _groupKey;
    }

    /// @inheritdoc ICommittee
    function latestSnapshot() external view returns (uint64 sequence, bytes32 root) {
        return (_sequence, _root);
    }

    // ----------------------------------------------------------------------------- internal

    function _checkLength(uint256 length, uint256 maximum) internal pure {
        require(length > 0 && length <= maximum, BlobLengthInvalid(length, maximum));
    }

    /// @dev Length, number and order come before recovery: the cheap checks bound the dear ones.
    /// Ascending signers make "distinct" a comparison with the one before.
    function _requireQuorum(bytes32 structHash, bytes calldata signatures) internal view {
        uint256 count = signatures.length / SIGNATURE_BYTES;
        require(
            signatures.length % SIGNATURE_BYTES == 0 && count <= MAX_MEMBERS, SignaturesMalformed(signatures.length)
        );
        // Before the first members are set, quorum() is 1, and NotMember refuses whoever signs.
        uint256 required = quorum();
        require(count >= required, QuorumTooSmall(count, required));

        bytes32 digest = _hashTypedDataV4(structHash);
        uint64 current = configuration;
        address previous;
        for (uint256 i; i < count; ++i) {
            bytes calldata signature = signatures[i * SIGNATURE_BYTES:(i + 1) * SIGNATURE_BYTES];
            (address signer, ECDSA.RecoverError failure,) = ECDSA.tryRecover(
                digest, uint8(signature[64]), bytes32(signature[:32]), bytes32(signature[32:64])
            );
            require(failure == ECDSA.RecoverError.NoError, SignatureInvalid(i));
            require(signer > previous, SignersNotAscending(previous, signer));
            require(_isMember[current][signer], NotMember(signer));
            previous = signer;
        }
    }
}
