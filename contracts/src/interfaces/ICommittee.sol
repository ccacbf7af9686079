// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// @notice One member of the committee.
/// @param account Ethereum account, whose ECDSA signatures count towards quorums.
/// @param signingKey Ed25519 key that signs the member's off-chain messages.
/// @param endpoint URL at which nodes and clients reach the member.
struct Member {
    address account;
    bytes32 signingKey;
    string endpoint;
}

/// @title The committee: members, group key, snapshots, and checks of quorums and randomness
/// @notice n = 3f+1 members tolerate f faulty ones; 2f+1 members are a quorum. A configuration is one set of members
/// with its number. The contract is also the bulletin board of the distributed key generation: it orders the
/// members' messages and counts their votes. It does not check the cryptography of the messages; the members do.
///
/// Members change by a handover: the owner announces the next configuration, the current members deal shares of the
/// same group key to the next members, and the next members take over when a quorum of them has confirmed that key.
/// The current members stay until then. Signatures of old configurations can be checked at any later time.
interface ICommittee {
    // ------------------------------------------------------------------------------- errors

    /// @notice The number of members, `count`, is not 3f+1 between 4 and 31.
    error MemberCountInvalid(uint256 count);
    /// @notice Members must be listed by strictly ascending account; `account` follows `previous`.
    error MembersNotAscending(address previous, address account);
    /// @notice The member `account` has no signing key.
    error MemberKeyMissing(address account);
    /// @notice An endpoint has at most 256 bytes; that of `account` has `length`.
    error EndpointTooLong(address account, uint256 length);
    /// @notice `account` is not a member of the configuration that the call concerns.
    error NotMember(address account);
    /// @notice `dealer` has already posted its dealing for this configuration.
    error DealingExists(uint64 configuration, address dealer);
    /// @notice A dealing or a complaint has 1 to `maximum` bytes; this one has `length`.
    error BlobLengthInvalid(uint256 length, uint256 maximum);
    /// @notice This configuration already has its group key.
    error GroupKeyExists(uint64 configuration);
    /// @notice The stated hash is not the keccak256 of the key, `actual`.
    error GroupKeyHashMismatch(bytes32 stated, bytes32 actual);
    /// @notice `member` has already voted for a group key of this configuration.
    error VoteExists(uint64 configuration, address member);
    /// @notice The key is not a point of the prime-order subgroup of G2 in EIP-2537's 256-byte encoding.
    error GroupKeyInvalid();
    /// @notice A handover to this configuration must keep the group key; this is another key.
    error GroupKeyChanged(uint64 configuration);
    /// @notice This configuration has no group key.
    error GroupKeyMissing(uint64 configuration);
    /// @notice The signature over this message is not valid under the group key of this configuration.
    error RandomnessInvalid(uint64 configuration);
    /// @notice This configuration is not in force and never had a group key.
    error ConfigurationUnknown(uint64 configuration);
    /// @notice The next snapshot must have the sequence number `expected`.
    error SequenceInvalid(uint64 sequence, uint64 expected);
    /// @notice The root is zero.
    error RootMissing();
    /// @notice The length of the signatures, in bytes, is not a multiple of 65, or is more than 31 signatures.
    error SignaturesMalformed(uint256 length);
    /// @notice There are `count` signatures; a quorum needs `required`.
    error QuorumTooSmall(uint256 count, uint256 required);
    /// @notice No signer can be recovered from the signature at position `index`, or its s is in the upper half.
    error SignatureInvalid(uint256 index);
    /// @notice Signatures must be listed by strictly ascending signer; `signer` follows `previous`.
    error SignersNotAscending(address previous, address signer);

    // ------------------------------------------------------------------------------- events

    /// @notice The configuration with this number and these members is in force.
    event MembersSet(uint64 indexed configuration, Member[] members);
    /// @notice A handover started: the current members are to deal shares of the group key to these next members.
    event HandoverBegun(uint64 indexed configuration, Member[] members);
    /// @notice `dealer` posted its dealing for the key generation or handover of this configuration.
    event DealingPosted(uint64 indexed configuration, address indexed dealer, bytes dealing);
    /// @notice `complainer` posted evidence, which the other members check, that the dealing of `dealer` is invalid.
    event ComplaintPosted(
        uint64 indexed configuration, address indexed dealer, address indexed complainer, bytes evidence
    );
    /// @notice `member` voted for the group key with this keccak256.
    event GroupKeyVoted(uint64 indexed configuration, address indexed member, bytes32 groupKeyHash);
    /// @notice A quorum agreed on the group key of this configuration: 256 bytes, a G2 point in EIP-2537's encoding.
    event GroupKeySet(uint64 indexed configuration, bytes groupKey);
    /// @notice The snapshot with this sequence number and root was accepted.
    event SnapshotAccepted(uint64 indexed configuration, uint64 indexed sequence, bytes32 root);

    // ----------------------------------------------------------------------- owner functions

    /// @notice Appoints members. While there is no group key, the new members are in force at once and generate one.
    /// Otherwise they are announced and a handover to them starts, which replaces a handover under way.
    /// @param members_ 3f+1 members, 4 to 31, by strictly ascending account.
    function setMembers(Member[] calldata members_) external;

    /// @notice Appoints members at once, without a group key. For the case that the current members cannot hand over
    /// because less than a quorum of them is left.
    /// @param members_ 3f+1 members, 4 to 31, by strictly ascending account.
    function resetMembers(Member[] calldata members_) external;

    // ---------------------------------------------------------------------- member functions

    /// @notice Posts the caller's dealing, once per configuration. Dealers are the current members. The dealing is
    /// for the announced configuration during a handover, and otherwise for the current one.
    /// @param dealing 1 byte to 64 KiB, in the members' off-chain format.
    function postDealing(bytes calldata dealing) external;

    /// @notice Posts evidence that the dealing of a current member is invalid. The caller must be a receiver: a
    /// member of the configuration whose key is being generated.
    /// @param dealer The current member that posted the dealing.
    /// @param evidence 1 byte to 64 KiB, in the members' off-chain format.
    function postComplaint(address dealer, bytes calldata evidence) external;

    /// @notice Votes for the group key of the configuration whose key is being generated, once per member. When a
    /// quorum of its members has voted for the same key, the key is set and a handover ends.
    /// @param groupKeyHash keccak256 of `groupKey`.
    /// @param groupKey 256 bytes, a G2 point in EIP-2537's encoding; in a handover the current group key.
    function confirmGroupKey(bytes32 groupKeyHash, bytes calldata groupKey) external;

    // ---------------------------------------------------------------------- public functions

    /// @notice Accepts the next snapshot. Anybody can call.
    /// @dev A member signs one root per epoch. If agreement fails in an epoch, another epoch tries again.
    /// @param sequence Sequence number: that of the latest snapshot plus 1.
    /// @param epoch Number of the attempt in which the members agreed on the snapshot.
    /// @param root Root of the snapshot; not zero.
    /// @param signatures A quorum over `Snapshot(uint64 configuration,uint64 sequence,uint64 epoch,bytes32 root)`, in
    /// the format of `requireQuorum`.
    function submitSnapshot(uint64 sequence, uint64 epoch, bytes32 root, bytes calldata signatures) external;

    // ------------------------------------------------------------------------------- checks

    /// @notice Reverts unless a quorum of the current members has signed an EIP-712 struct.
    /// @param structHash hashStruct of the struct; the domain is {name "SplitUp", version "1", chain id, this
    /// contract}.
    /// @param signatures Concatenated 65-byte signatures (r, s, v), by strictly ascending signer.
    function requireQuorum(bytes32 structHash, bytes calldata signatures) external view;

    /// @notice Reverts unless a quorum of the members of a given configuration has signed an EIP-712 struct.
    /// @param configuration Number of a configuration that is in force or had a group key.
    /// @param structHash As for `requireQuorum`.
    /// @param signatures As for `requireQuorum`.
    function requireQuorumOf(uint64 configuration, bytes32 structHash, bytes calldata signatures) external view;

    /// @notice Returns the random value of a message. Reverts unless the signature is the group's signature over it.
    /// @param message The message.
    /// @param signature 128 bytes, a G1 point in EIP-2537's encoding. There is one valid signature per message.
    /// @return seed keccak256 of the signature.
    function verifyRandomness(bytes calldata message, bytes calldata signature) external view returns (bytes32 seed);

    /// @notice Returns the random value of a message under the group key of a given configuration.
    /// @param configuration Number of the configuration.
    /// @param message As for `verifyRandomness`.
    /// @param signature As for `verifyRandomness`.
    /// @return seed As for `verifyRandomness`.
    function verifyRandomnessOf(uint64 configuration, bytes calldata message, bytes calldata signature)
        external
        view
        returns (bytes32 seed);

    // ------------------------------------------------------------------------------- views

    /// @notice Returns the number of the current configuration; 0 before the first members are set.
    function configuration() external view returns (uint64);

    /// @notice Returns the number of the announced configuration; 0 if there is no handover.
    function nextConfiguration() external view returns (uint64);

    /// @notice Returns the current members, by ascending account.
    function members() external view returns (Member[] memory);

    /// @notice Returns the members of a configuration, by ascending account.
    /// @param configuration Number of the configuration.
    function membersOf(uint64 configuration) external view returns (Member[] memory);

    /// @notice Returns how many of the current members are a quorum: 2f+1.
    function quorum() external view returns (uint256);

    /// @notice Returns how many members of a configuration are a quorum.
    /// @param configuration Number of the configuration.
    function quorumOf(uint64 configuration) external view returns (uint256);

    /// @notice Returns whether an account is a current member.
    /// @param account Any account.
    function isMember(address account) external view returns (bool);

    /// @notice Returns whether an account is a member of a configuration.
    /// @param configuration Number of the configuration.
    /// @param account Any account.
    function isMemberOf(uint64 configuration, address account) external view returns (bool);

    /// @notice Returns the group key of the current configuration in EIP-2537's encoding; empty if it has none.
    function groupKey() external view returns (bytes memory);

    /// @notice Returns the group key of a configuration in EIP-2537's encoding; empty if it has none.
    /// @param configuration Number of the configuration.
    function groupKeyOf(uint64 configuration) external view returns (bytes memory);

    /// @notice Returns the sequence number and root of the latest snapshot; both are 0 before the first.
    function latestSnapshot() external view returns (uint64 sequence, bytes32 root);

    /// @notice Returns the root of one of the 64 latest snapshots; 0 for any other.
    /// @param sequence Sequence number of the snapshot.
    function snapshotRootOf(uint64 sequence) external view returns (bytes32);

    /// @notice Returns the EIP-712 domain separator of everything that members sign.
    function domainSeparator() external view returns (bytes32);
}
