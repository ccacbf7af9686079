// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// @title BLS signatures on BLS12-381, verified with the precompiles of EIP-2537
/// @notice Signatures are points of G1 (128 bytes: x and y of 64 bytes each), keys are points of G2 (256 bytes: x.c0,
/// x.c1, y.c0, y.c1). The hash to the curve is RFC 9380's suite BLS12381G1_XMD:SHA-256_SSWU_RO_ with SplitUp's domain
/// separation tag, as in `splitup/crypto/bls.py`.
/// @dev The pairing precompile fails unless its points are in canonical encoding, on the curve and in the subgroup. It
/// accepts the identity, which this library refuses.
library Bls {
    // ---------------------------------------------------------------------------- constants

    uint256 internal constant SIGNATURE_BYTES = 128;
    uint256 internal constant KEY_BYTES = 256;

    /// @dev A failing precompile consumes all the gas that the call passes to it. A pairing check of two pairs needs
    /// 103 k gas.
    uint256 private constant PAIRING_GAS = 300_000;
    address private constant MODEXP = address(0x05);
    address private constant G1_ADD = address(0x0b);
    address private constant PAIRING = address(0x0f);
    address private constant MAP_TO_G1 = address(0x10);

    /// @dev Domain separation tag and its length, as RFC 9380 appends them (DST_prime).
    bytes private constant DST = "SPLITUP-V1-BLS12381G1_XMD:SHA-256_SSWU_RO_\x2a";
    /// @dev The modulus p of the base field, in 64 bytes.
    bytes32 private constant P_HIGH = 0x000000000000000000000000000000001a0111ea397fe69a4b1ba7b6434bacd7;
    bytes32 private constant P_LOW = 0x64774b84f38512bf6730d2a0f6b0f6241eabfffeb153ffffb9feffffffffaaab;
    /// @dev The negated generator of G2. A signature is valid if e(signature, -G2) · e(H(message), key) = 1.
    bytes private constant NEGATED_G2 = hex"00000000000000000000000000000000024aa2b2f08f0a91260805272dc51051"
        hex"c6e47ad4fa403b02b4510b647ae3d1770bac0326a805bbefd48056c8c121bdb8"
        hex"0000000000000000000000000000000013e02b6052719f607dacd3a088274f65"
        hex"596bd0d09920b61ab5da61bbdc7f5049334cf11213945d57e5ac7d055d042b7e"
        hex"000000000000000000000000000000000d1b3cc2c7027888be51d9ef691d77bc"
        hex"b679afda66c73f17f9ee3837a55024f78c71363275a75d75d86bab79f74782aa"
        hex"0000000000000000000000000000000013fa4d4a0ad8b1ce186ed5061789213d"
        hex"993923066dddaf1040bc3ff59f825c78df74f2d75467e25e0f55f8a00fa030ed";

    // ------------------------------------------------------------------------------- checks

    /// @notice Returns whether a signature over a message is valid under a key. There is one valid signature per
    /// message and key. Returns false for a malformed point.
    /// @dev The key must have been checked with {isKey}.
    function isSignature(bytes memory key, bytes memory message, bytes memory signature)
        internal
        view
        returns (bool)
    {
        if (key.length != KEY_BYTES || signature.length != SIGNATURE_BYTES || _isZero(signature)) return false;
        return _pair(bytes.concat(signature, NEGATED_G2, hashToCurve(message), key));
    }

    /// @notice Returns whether a key is a point of the prime-order subgroup of G2 and not the identity.
    function isKey(bytes memory key) internal view returns (bool) {
        if (key.length != KEY_BYTES || _isZero(key)) return false;
        return _pair(bytes.concat(new bytes(SIGNATURE_BYTES), key)); // e(identity, key) = 1 for any point
    }

    // ------------------------------------------------------------------------ hash to curve

    /// @notice Hashes a message to a point of G1: hash_to_curve of RFC 9380, section 3.
    /// @dev The precompile clears the cofactor of both points. The sum is the same as if the cofactor were cleared
    /// once, after the addition.
    function hashToCurve(bytes memory message) internal view returns (bytes memory point) {
        // expand_message_xmd (section 5.3.1) to 128 bytes: a block of zeros, the length, a zero byte
        bytes32 b0 = sha256(bytes.concat(bytes32(0), bytes32(0), message, hex"008000", DST));
        bytes32 b1 = sha256(bytes.concat(b0, hex"01", DST));
        bytes32 b2 = sha256(bytes.concat(b0 ^ b1, hex"02", DST));
        bytes32 b3 = sha256(bytes.concat(b0 ^ b2, hex"03", DST));
        bytes32 b4 = sha256(bytes.concat(b0 ^ b3, hex"04", DST));
        bytes memory first = _call(MAP_TO_G1, _reduce(b1, b2), 128);
        bytes memory second = _call(MAP_TO_G1, _reduce(b3, b4), 128);
        return _call(G1_ADD, bytes.concat(first, second), 128);
    }

    /// @dev Returns a 512-bit number modulo p in EIP-2537's encoding, computed as number^1 mod p.
    function _reduce(bytes32 high, bytes32 low) private view returns (bytes memory) {
        bytes memory input =
            abi.encodePacked(uint256(64), uint256(1), uint256(64), high, low, uint8(1), P_HIGH, P_LOW);
        return _call(MODEXP, input, 64);
    }

    // ----------------------------------------------------------------------------- internal

    function _pair(bytes memory input) private view returns (bool) {
        (bool success, bytes memory output) = PAIRING.staticcall{gas: PAIRING_GAS}(input);
        return success && output.length == 32 && abi.decode(output, (uint256)) == 1;
    }

    /// @dev The input of these calls is always valid. On a chain without EIP-2537 they return no bytes.
    function _call(address precompile, bytes memory input, uint256 length)
        private
        view
        returns (bytes memory output)
    {
        bool success;
        (success, output) = precompile.staticcall(input);
        require(success && output.length == length, PrecompileMissing(precompile));
    }

    function _isZero(bytes memory data) private pure returns (bool) {
        return keccak256(data) == keccak256(new bytes(data.length));
    }

    /// @notice The chain does not have the precompile of EIP-2537 at this address.
    error PrecompileMissing(address precompile);
}
