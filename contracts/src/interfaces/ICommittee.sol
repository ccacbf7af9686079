// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// @notice One member of the committee.
/// @param account Ethereum account; its ECDSA signatures count towards quorums.
/// @param signingKey Ed25519 key of the member's messages off chain.
/// @param endpoint Where nodes and clients reach the member.
struct Member {
    address account;
    bytes32 signingKey;
    string endpoint;
}

/// @title The committee: its members, its group key, its snapshots, its quorum and randomness checks
/// @notice n = 3f+1 members tolerate f faulty ones; a quorum is 2f+1 of them. The contract is also the
/// bulletin board of the distributed key generation: it orders what the members say and counts their
/// votes, and leaves the algebra to them.
///
/// Members change by handover: the next configuration is announced, the current members deal shares
/// of the same group key to the next, and those take over when a quorum of them confirms that key.
/// Until then the current ones stay. What a configuration certified stays checkable for ever.
interface ICommittee {
    // ------------------------------------------------------------------------------- errors

    /// @notice The number of members is not 3f+1 within [4, 31].
    error MemberCountInvalid(uint256 count);
    /// @notice Members must be listed by strictly ascending account; this one is not.
    error MembersNotAscending(address previous, address account);
    /// @notice A member has no signing key.
    error MemberKeyMissing(address account);
    /// @notice An endpoint is longer than the bound.
    error EndpointTooLong(address account, uint256 length);
    /// @notice The account is not a member of the current configuration.
    error NotMember(address account);
    /// @notice The dealer has already posted a dealing in this configuration.
    error DealingExists(uint64 configuration, address dealer);
    /// @notice Dealings, complaints and keys are bounded and not empty.
    error BlobLengthInvalid(uint256 length, uint256 maximum);
    /// @notice The group key of this configuration is already agreed.
    error GroupKeyExists(uint64 configuration);
    /// @notice The stated hash is not the hash of the key.
    error GroupKeyHashMismatch(bytes32 stated, bytes32 actual);
    /// @notice The member has already voted for a group key in this configuration.
    error VoteExists(uint64 configuration, address member);
    /// @notice The key is no point of the prime-order subgroup of G2 in EIP-2537's 256 bytes.
    error GroupKeyInvalid();
    /// @notice A handover keeps the group key; this is another one.
    error GroupKeyChanged(uint64 configuration);
    /// @notice The configuration has no group key.
    error GroupKeyMissing(uint64 configuration);
    /// @notice The signature is not the group's over this message.
    error RandomnessInvalid(uint64 configuration);
    /// @notice The configuration was never in force.
    error ConfigurationUnknown(uint64 configuration);
    /// @notice A snapshot must carry the next sequence number.
    error SequenceInvalid(uint64 sequence, uint64 expected);
    /// @notice A root must not be zero.
    error RootMissing();
    /// @notice The signatures are not a whole number of 65-byte signatures, or more than there are members.
    error SignaturesMalformed(uint256 length);
    /// @notice Fewer signatures than a quorum.
    error QuorumTooSmall(uint256 count, uint256 required);
    /// @notice The signature at this position does not recover, or its s is in the upper half.
    error SignatureInvalid(uint256 index);
    /// @notice Signers must be strictly ascending; this one is not.
    error SignersNotAscending(address previous, address signer);

    // ------------------------------------------------------------------------------- events

    /// @notice A configuration comes into force.
    event MembersSet(uint64 indexed configuration, Member[] members);
    /// @notice A next configuration is announced: the current members are to deal to it.
    event HandoverBegun(uint64 indexed configuration, Member[] members);
    /// @notice A dealer posted its dealing for the key generation.
    event DealingPosted(uint64 indexed configuration, address indexed dealer, bytes dealing);
    /// @notice A member complains about a dealer, with evidence that the others can check.
    event ComplaintPosted(
        uint64 indexed configuration, address indexed dealer, address indexed complainer, bytes evidence
    );
    /// @notice A member voted for a group key.
    event GroupKeyVoted(uint64 indexed configuration, address indexed member, bytes32 groupKeyHash);
    /// @notice 2f+1 members agree on the group key.
    event GroupKeySet(uint64 indexed configuration, bytes groupKey);
    /// @notice A snapshot of the network is accepted.
    event SnapshotAccepted(uint64 indexed configuration, uint64 indexed sequence, bytes32 root);

    // ------------------------------------------------------------------------ owner's verbs

    /// @notice Appoints members. Without a group key they are in force at once and generate one;
    /// otherwise they are announced, in place of any announced before, and a handover begins.
    /// @param members_ 3f+1 of them, 4 to 31, by strictly ascending account.
    function setMembers(Member[] calldata members_) external;

    /// @notice Appoints members at once, without group key: for when no quorum is left to hand over.
    function resetMembers(Member[] calldata members_) external;

    // ----------------------------------------------------------------------- members' verbs

    /// @notice Posts the caller's dealing for the configuration whose key is being made, which is the
    /// next one in a handover. Dealers are current members; once per configuration.
    /// @param dealing At most 64 KiB, in the form that the members agree on.
    function postDealing(bytes calldata dealing) external;

    /// @notice Posts a receiver's evidence that a current member's dealing is bad.
    function postComplaint(address dealer, bytes calldata evidence) external;

    /// @notice Votes for the group key of the configuration whose key is being made; the 2f+1st
    /// identical vote of its members sets it, and ends a handover. One vote per configuration.
    /// @param groupKeyHash keccak256 of `groupKey`.
    /// @param groupKey 256 bytes, EIP-2537; in a handover the current one.
    function confirmGroupKey(bytes32 groupKeyHash, bytes calldata groupKey) external;

    // --------------------------------------------------------------------- anybody's verbs

    /// @notice Accepts the next snapshot with a quorum over
    /// `Snapshot(uint64 configuration,uint64 sequence,uint64 epoch,bytes32 root)`.
    /// @dev A member signs one root per epoch; when a leader fails, another epoch tries again.
    function submitSnapshot(uint64 sequence, uint64 epoch, bytes32 root, bytes calldata signatures) external;

    // ------------------------------------------------------------------------------- checks

    /// @notice Reverts, naming the reason, unless `signatures` are a quorum over the EIP-712 struct.
    /// @param structHash EIP-712 hashStruct; the domain is {SplitUp, 1, chain id, this contract}.
    /// @param signatures 65-byte (r, s, v) one after another, by strictly ascending signer.
    function requireQuorum(bytes32 structHash, bytes calldata signatures) external view;

    /// @notice The same by the members of a configuration that was in force with a key, or is now.
    function requireQuorumOf(uint64 configuration, bytes32 structHash, bytes calldata signatures) external view;

    /// @notice Reverts unless `signature` is the group's over `message`; returns the random value.
    /// @param signature 128 bytes, a point of G1 as EIP-2537 writes it.
    /// @return seed keccak256 of the signature, which is unique.
    function verifyRandomness(bytes calldata message, bytes calldata signature) external view returns (bytes32 seed);

    /// @notice The same under a given configuration's key.
    function verifyRandomnessOf(uint64 configuration, bytes calldata message, bytes calldata signature)
        external
        view
        returns (bytes32 seed);

    // ------------------------------------------------------------------------------- views

    /// @notice Number of the current configuration; 0 before the first members are set.
    function configuration() external view returns (uint64);

    /// @notice Number of the announced configuration; 0 when there is no handover.
    function nextConfiguration() external view returns (uint64);

    /// @notice The current members, by ascending account.
    function members() external view returns (Member[] memory);

    /// @notice The members of any configuration.
    function membersOf(uint64 configuration) external view returns (Member[] memory);

    /// @notice How many members make a quorum: 2f+1.
    function quorum() external view returns (uint256);

    /// @notice The quorum of any configuration.
    function quorumOf(uint64 configuration) external view returns (uint256);

    /// @notice Whether the account is a member of the current configuration.
    function isMember(address account) external view returns (bool);

    /// @notice Whether the account is a member of a given configuration.
    function isMemberOf(uint64 configuration, address account) external view returns (bool);

    /// @notice The agreed group key of the current configuration; empty while there is none.
    function groupKey() external view returns (bytes memory);

    /// @notice The group key of any configuration; empty when it has none.
    function groupKeyOf(uint64 configuration) external view returns (bytes memory);

    /// @notice The latest accepted snapshot; (0, 0) before the first.
    function latestSnapshot() external view returns (uint64 sequence, bytes32 root);

    /// @notice The root of one of the 64 latest snapshots; 0 for any other.
    function snapshotRootOf(uint64 sequence) external view returns (bytes32);

    /// @notice The EIP-712 domain separator of everything that members sign.
    function domainSeparator() external view returns (bytes32);
}
