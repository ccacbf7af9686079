"""Every bound in the system, with its reason. A bound that is not here does not exist."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# ---- execution and plan ------------------------------------------------------------------------

MAX_STEPS: Final = 65_536  # the Market contract's own bound; one step per generated token
MAX_TASKS: Final = 1_024  # the ModelRegistry's bound: validation of a DAG must fit one transaction
MAX_FALLBACKS: Final = 8  # nodes listed per task; the chance that all fail is negligible
MAX_COMMITTEE: Final = 31  # n = 3f+1 with f = 10; signature checks on chain stay below 160 k gas

# ---- data plane --------------------------------------------------------------------------------

INLINE_TENSOR_BYTES: Final = 1 * MIB  # above this, hashing and copying cost more than an S3 GET
MAX_FRAME_BYTES: Final = INLINE_TENSOR_BYTES + 4 * KIB
MAX_TENSOR_BYTES: Final = (
    1024 * MIB
)  # one step of one port; larger values must be split by the compiler
SEGMENT_STEPS: Final = 64  # steps per log object: 64 tokens of a 4 KB port are one 256 KB PUT
SEGMENT_BYTES: Final = 8 * MIB  # a log object stays one PUT of bounded memory
MAX_EARLY_FRAMES: Final = 256  # frames kept for an execution whose plan has not arrived yet
MAX_EARLY_BYTES: Final = 8 * MIB

# ---- messages ----------------------------------------------------------------------------------

MAX_MESSAGE_BYTES: Final = 4 * MIB  # a plan of 1,024 tasks with 8 nodes each is ~0.5 MB of JSON
MAX_ENDPOINT_CHARS: Final = 256  # the NodeRegistry's bound
MAX_RESIDENT_TASKS: Final = 1_024  # task ids a heartbeat may list
HEARTBEAT_PERIOD_S: Final = 1.0
HEARTBEAT_TIMEOUT_S: Final = 5.0  # five missed beats: a restart takes longer, a hiccup does not
CLOCK_SKEW_S: Final = 30  # tolerated between hosts in signed times; deadlines use block time

# ---- keys, tokens, storage, journal ------------------------------------------------------------

MAX_SECRET_FILE_BYTES: Final = 64 * KIB  # a keystore is 600 bytes, a passphrase a line
JWS_TTL_S: Final = 60  # a request is used at once; a longer life only helps whoever steals it
MAX_JWS_BYTES: Final = MAX_MESSAGE_BYTES * 4 // 3 + KIB  # base64url of the largest message
MAX_REPLAY_ENTRIES: Final = 100_000  # ≈ 20 MB; 1,000 requests a second for the life of a token
PRESIGN_EXPIRY_S: Final = 3_600  # longer than any execution; a leaked URL dies within the hour
OBJECT_KEY_BYTES: Final = 512  # S3 allows 1,024; SeaweedFS keeps a path segment below 255
OBJECT_FETCHES: Final = 3  # a wrong digest twice over may be a bad copy, thrice is the object
OBJECT_RETRY_S: Final = 2.0  # longest pause between two tries against a struggling server
MAX_JOURNAL_VALUE_BYTES: Final = 16 * MIB  # four messages of the largest size

# ---- graphs, weights, manifests ----------------------------------------------------------------

MAX_GRAPH_BYTES: Final = 4 * MIB  # 80 uncut Llama blocks are 1.5 MB; more would parse for seconds
MAX_NODES: Final = 65_536  # the same graph has ≈ 15,000 nodes; tinygrad's passes are linear in it
MAX_DEPTH: Final = 32_768  # longest chain of operands: 80 blocks are ≈ 9,000 deep
MAX_PORTS: Final = 256  # inputs, outputs or states of one task
MAX_WEIGHTS: Final = 65_536  # tensors of one task, or of one safetensors file
MAX_RANK: Final = 16  # a KV cache of a multi-head model has 4; tinygrad's own views reach 8
MAX_DIMENSION: Final = 2**31 - 1  # index arithmetic of every renderer is safe in 32 bits
MAX_ELEMENTS: Final = 2**40  # of a value that is never written to memory (a one-hot product)
MAX_VALUE_BYTES: Final = 64 * 1024 * MIB  # of a value that is; no GPU port or weight is larger
MAX_TASK_FLOPS: Final = 2**50  # one step of one task: an hour of a 300 GFLOP/s CPU
MAX_NAME_CHARS: Final = 256  # of ports and tensors; names of weights in the wild reach 120
MAX_MANIFEST_BYTES: Final = 4 * MIB  # 1,024 tasks of 1.5 KB, doubled
MAX_SAFETENSORS_HEADER_BYTES: Final = (
    16 * MIB
)  # 65,536 tensors of 200 bytes; the format allows 100 MB
MAX_CONFIG_BYTES: Final = 1 * MIB  # a model's config.json or tokenizer_config.json
MAX_TOKENIZER_BYTES: Final = 64 * MIB  # the largest tokenizer.json in the wild has 33 MB
MAX_CONTEXT: Final = 2**20  # rows of a KV cache
