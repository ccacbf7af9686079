"""Bounds and times that all parties must agree on, each with its reason.

What each party may choose for itself is in ``splitup.core.tuning``. A bound that is in neither file
does not exist.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# ---- execution and plan ------------------------------------------------------------------------

NANO_PER_MICRO: Final = 1_000  # prices are in nano-USDC per step, money is in micro-USDC
MAX_STEPS: Final = 65_536  # the Market contract's own bound; one step per generated token
# of NodeRegistry.sol: what every execution locks of each executor's stake, and what none ever locks
EXPOSURE_FLOOR_MICRO_USDC: Final = 5_000_000
VALIDATION_RESERVE_MICRO_USDC: Final = 20 * EXPOSURE_FLOOR_MICRO_USDC
MAX_TASKS: Final = 1_024  # the ModelRegistry's bound: validation of a DAG must fit one transaction
MAX_FALLBACKS: Final = 8  # nodes listed per task; the chance that all fail is negligible
MAX_PLAN_NODES: Final = MAX_TASKS * MAX_FALLBACKS
MIN_OPERATORS: Final = 3  # an executor, a validator, and a third that decides between them
MAX_CREDIT_MILLI: Final = 8_000  # rounds of work that a node can be behind or ahead: factors ¼ … 4
MAX_COMMITTEE: Final = 31  # n = 3f+1 with f = 10; signature checks on chain stay below 160 k gas

# ---- data plane --------------------------------------------------------------------------------

INLINE_TENSOR_BYTES: Final = 1 * MIB  # above this, hashing and copying cost more than an S3 GET
MAX_FRAME_BYTES: Final = INLINE_TENSOR_BYTES + 4 * KIB
TENSOR_CHUNK_BYTES: Final = 256 * KIB  # of a larger tensor: a small frame waits for one at most
BUNDLE_FRAMES: Final = 256  # tensors under one signature: a batch's, or all inputs of a step
# one step of one port, and of all inputs or all outputs of a task: a node has them at once
MAX_TENSOR_BYTES: Final = 1024 * MIB
SEGMENT_STEPS: Final = 256  # steps per log object: 1 MB of a 4 KB port; its header stays ≤ 24 KB
SEGMENT_BYTES: Final = 4 * MIB  # a log object stays one PUT of bounded memory
SEGMENT_HEADER_BYTES: Final = 24 * KIB  # 256 lengths, and 256 digests of tensors stored apart
LOG_STEP_BYTES: Final = 640  # headers per step, even if every step is an object of its own
LOG_OBJECTS: Final = 64  # log objects in one request to the gateway

# ---- messages ----------------------------------------------------------------------------------

# A plan of 1,024 tasks with 8 nodes each is 2 MB of JSON, with the longest endpoints 4.3 MB, and
# 4.7 MB in a request for logs.
MAX_MESSAGE_BYTES: Final = 5 * MIB
PLAN_TASK_BYTES: Final = MAX_MESSAGE_BYTES // MAX_TASKS  # of a plan, for each task
PLAN_BYTES: Final = 32 * KIB  # without tasks and nodes: the request and the signatures
MAX_ENDPOINT_CHARS: Final = 256  # the NodeRegistry's bound
MAX_SPEED_MFLOPS: Final = 10**10  # ten PFLOP/s: more than three times any device of today
MAX_BANDWIDTH_KBPS: Final = 10**9  # a terabyte a second
MAX_RESIDENT_TASKS: Final = 1_024  # task ids a heartbeat may list
HEARTBEAT_PERIOD_S: Final = 1.0  # the shortest; a member names its own in its answers
HEARTBEATS_PER_S: Final = 800  # to one member: with more nodes than this the period grows
MAX_TOLD_TAKEOVERS: Final = 64  # in the answer to a heartbeat, 0.4 KB each; the next has others
MAX_HEARTBEAT_PERIOD_S: Final = 21.0  # a member with MAX_NODES names 20.48 s
# Longer than a pause, below a restart. A longer period adds what exceeds the shortest one: a
# heartbeat that fails is repeated after a second whatever the period is.
HEARTBEAT_TIMEOUT_S: Final = 5.0
# A member rests when no execution is open and nothing has changed for so long. Whatever changes
# ends that, and a ping asks each node for a heartbeat, so what follows is as fast as ever.
REST_AFTER_S: Final = 30.0
REST_HEARTBEAT_S: Final = 15.0  # nodes' period while a member rests
# A block that a reorganisation replaced may be named for two heartbeat timeouts. A node that was
# away longer counted as dead, and learns the new head from the answer to its next heartbeat.
HEAD_MEMORY_S: Final = 10.0
CLOCK_SKEW_S: Final = 30  # tolerated between hosts in signed times; deadlines use block time

# ---- keys, tokens, storage, journal ------------------------------------------------------------

JWS_TTL_S: Final = 60  # a request is used at once; a longer life only helps a thief
MAX_JWS_BYTES: Final = MAX_MESSAGE_BYTES * 4 // 3 + KIB  # base64url of the largest message
PRESIGN_EXPIRY_S: Final = 3_600  # longer than any execution; a leaked URL dies within the hour
OBJECT_KEY_BYTES: Final = 512  # S3 allows 1,024; SeaweedFS keeps a path segment below 255

# ---- graphs, weights, manifests ----------------------------------------------------------------

MAX_JSON_DEPTH: Final = 64  # SplitUp's own objects nest 8 deep, tokenizers 10
# What a JSON text may become in memory, by the count of its brackets, keys and strings: ports and
# rows of tensors with the shortest names take 13 times their size, ordinary messages less.
JSON_GROWTH: Final = 14
# Of graphs, schedules and tokenizers, which hold pairs of short numbers or tokens: models' graphs
# take 13, random ones 17, a tokenizer that lists pairs 13. What takes 22 by this count takes 20.
DENSE_GROWTH: Final = 22
JSON_FREE_BYTES: Final = 64 * KIB  # of a text so short that it does not matter
# Of a message or a manifest: a plan of 1,024 tasks with 8 nodes each has 50,000, the manifest of so
# many tasks in a row 33,000
MAX_JSON_VALUES: Final = 2**18
MAX_DOCUMENT_VALUES: Final = 2**22  # of a file, or of the 64 MiB of a snapshot; seconds to parse
MAX_GRAPH_BYTES: Final = 4 * MIB  # 80 uncut Llama blocks are 1.5 MB; more would parse for seconds
MAX_GRAPH_NODES: Final = 65_536  # of a task; 80 Llama blocks have ≈ 15,000; every pass is linear
MAX_MODEL_NODES: Final = 8 * MAX_GRAPH_NODES  # before it is cut; DeepSeek-V3.2 has 76,000
MAX_GRAPH_DEPTH: Final = 32_768  # longest chain of operands: 80 blocks are ≈ 9,000 deep
MAX_GRAPH_PAIRS: Final = 4 * MAX_GRAPH_NODES  # of a task; models have 1.5 a node; a second to count
MAX_KERNEL_US: Final = 2_000_000  # to compile one kernel, predicted; models' own take up to 0.35 s
MAX_UNROLLED_US: Final = 5_000_000  # predicted, of unrolled code; models have up to 2.4 s
MAX_COMPILE_US: Final = 30_000_000  # of all kernels and nodes of a task: 50 blocks of a Llama
MAX_PORTS: Final = 256  # inputs, outputs or states of one task
MAX_WEIGHTS: Final = 65_536  # tensors of one task, or of one safetensors file
MAX_SYMBOLS: Final = 4  # of one task: rows that come in, rows that go out, and room for two more
MAX_RANK: Final = 16  # a KV cache of a multi-head model has 4; tinygrad's own views reach 8
MAX_DIMENSION: Final = 2**31 - 1  # index arithmetic of every renderer is safe in 32 bits
# of a value never written to memory: 64 rows looking up 8 of 384 experts are 2^42.4
MAX_ELEMENTS: Final = 2**43
MAX_VALUE_BYTES: Final = 64 * 1024 * MIB  # of a value in memory; no port or weight is larger
MAX_TASK_FLOPS: Final = 2**50  # one step of one task: an hour of a 300 GFLOP/s CPU
MAX_NAME_CHARS: Final = 256  # of ports and tensors; names of weights in the wild reach 120
MAX_MANIFEST_BYTES: Final = 4 * MIB  # 1,024 tasks of 1.5 KB, doubled
# 65,536 tensors of 200 bytes; the format allows 100 MB
MAX_SAFETENSORS_HEADER_BYTES: Final = 16 * MIB
MAX_TOKENIZER_BYTES: Final = 64 * MIB  # the largest tokenizer.json in the wild has 33 MB
MAX_CHAT_TEMPLATE_CHARS: Final = 65_536  # the longest in the wild have 20,000
MAX_CONTEXT: Final = 2**20  # rows of a KV cache
MIN_NODE_BYTES: Final = 1_000_000  # of a node's memory; less is a number that lacks its unit

# ---- comparison, reference ---------------------------------------------------------------------

MAX_TOLERANCE: Final = 10**12  # in 10^-9: 1,000 times the value bounds nothing
COMPARED_LARGEST: Final = 128  # elements of an output whose exponents and mantissas are compared
MAX_REFERENCE_ELEMENTS: Final = 2**26  # of one value in the interpreter: 0.5 GB in float64
MAX_DETERMINISM_CHARS: Final = 200  # of a class's name: a compiler's banner has 60
MAX_VECTOR_STEPS: Final = 16  # of a reference vector; a fault of a device shows in the first ones
VECTOR_STEPS: Final = 3  # with zero state, and with the states after one step and after two
VECTOR_ROWS: Final = 8  # of the first: whole tiles and an incomplete one of each matmul's kernel
VECTOR_ELEMENTS: Final = 1_024  # kept of every output port and step, evenly spread
PLAUSIBLE_L2_PPB: Final = 50_000_000  # 5 %: bfloat16 has 0.4 % per rounding; defects give more
MAX_VECTORS_BYTES: Final = 8 * MIB  # 256 ports, or 16 steps of few ports

# ---- HTTP --------------------------------------------------------------------------------------

HTTP_BODY_BYTES: Final = MAX_JWS_BYTES + KIB  # the largest signed request in its {"jws": …} wrapper
SHORT_REPLY_BYTES: Final = 16 * KIB  # a few fields, or an error
MAX_RPC_ANSWER_BYTES: Final = 32 * MIB  # logs of one block of 60 million gas are 15 MB of JSON

# ---- storage gateway ---------------------------------------------------------------------------

MAX_GATEWAYS: Final = 8  # behind one bucket; each is tried once, which bounds the wait
MAX_UPLOAD_OBJECTS: Final = 3 * MAX_TASKS  # graph and weights of every task, and some blobs
MAX_UPLOAD_BYTES: Final = 5 * 1024 * MIB  # what S3 takes in one PUT
MAX_GRANTS: Final = 4_096  # ≈ 4 MB of reply and 1 s of signing; one party, one execution
GRANT_GRACE_S: Final = 300  # after the deadline: the last logs are written
# And so long drawn tasks are read, computed and revealed, if the settlement's grace is not shorter.
VERIFICATION_GRACE_S: Final = 3_600
MAX_MODEL_NAME_BYTES: Final = 64  # the ModelRegistry's bound

# ---- data connections --------------------------------------------------------------------------

LINK_TOKEN_CHARS: Final = 2 * KIB  # a handshake token has about 600

# ---- relays ------------------------------------------------------------------------------------

RELAY_REPLY_BYTES: Final = 64 * KIB  # of a node; its routes answer {} or an error sentence

# ---- chain -------------------------------------------------------------------------------------

MAX_TRANSACTION_GAS: Final = 2**24  # EIP-7825, Osaka

# ---- committee ---------------------------------------------------------------------------------

MAX_FINISHED_PLANS: Final = 256  # certificates kept after settlement, for clients that ask later
MAX_SNAPSHOT_BYTES: Final = 64 * MIB  # of JSON: 16,384 nodes of 2 KB, doubled
# with more nodes, observations and proposals are sent in chunks, apart from gossip
CHUNKED_MESSAGE_NODES: Final = 1_000
# A larger message between members is sent in chunks, too: a settlement of 1,024 disputed tasks
# takes 46 MB. Commitments that members share are divided below it.
GOSSIP_BYTES: Final = 3 * MIB
MESSAGE_CHUNK_BYTES: Final = 2 * MIB
# a proposal of 21 observations (n = 31) of 10,000 nodes: 18 MB
MAX_CHUNKED_MESSAGE_BYTES: Final = 128 * MIB
MAX_NODES: Final = 16_384  # registered nodes a member follows, ≈ 2 KB each
MAX_NODES_DEPTH: Final = 14  # of the Merkle tree over MAX_NODES leaves
OPENED_ENTRIES: Final = 2  # of a snapshot, in a verification order: executor and validator
MAX_DEMAND_TASKS: Final = 4_096  # rows in a heartbeat's reply, ≈ 300 bytes each
HEARTBEAT_REPLY_BYTES: Final = 2 * MIB
MAX_SETTLEMENT_ROUNDS: Final = 16  # different proposals per proposer; a few suffice to converge
MAX_PLAN_WAIT_S: Final = 30.0  # longest long-poll for a plan
SNAPSHOT_REFRESH_S: Final = 30.0  # certify unchanged membership again, for current load figures
# A signed request may be so far behind. With unbonding that is six hours longer than executions
# (contracts/src/libraries/SnapshotAge.sol) no node has left of those that it may name.
SNAPSHOTS_BACK: Final = 8
REST_SNAPSHOT_S: Final = 1_800.0  # the same while a member rests: the load does not change either
OBSERVATION_GRACE_S: Final = 0.1  # with 2f+1 observations, the leader waits this for the others
OBSERVE_PERIOD_S: Final = 1.0  # between observations of all nodes; also bounds answers to a leader
EPOCH_TIMEOUT_S: Final = 5.0  # a leader with a quorum needs 0.5 s; a lost heartbeat costs 1 s
EPOCH_DOUBLINGS: Final = 4  # of EPOCH_TIMEOUT_S after failed epochs: 80 s at most
EPOCH_SNAPSHOTS: Final = 16  # of one leader; then the next member leads and chooses observations
MEDIAN_HYSTERESIS: Final = 4  # a median replaces the old figure when it differs by a quarter
MEMBER_HEARTBEAT_S: Final = 1.0  # members repeat their epoch timeout votes
REST_MEMBER_HEARTBEAT_S: Final = 15.0  # the same while they rest
MEMBER_SILENCE_S: Final = 2.5  # two heartbeats missed: such a member gets the last rank
VERIFICATION_SILENCE_S: Final = 10.0  # then another validator is asked, too
VERIFICATION_STEP_S: Final = 0.1  # more for every step, where the time until verdicts suffices
# A reveal needs no computing, but members may be busy, and a node may have to start again.
# Validators come first: who of them is silent belongs to the settlement of executors that withhold.
VALIDATOR_REVEAL_S: Final = 20.0
EXECUTOR_REVEAL_S: Final = 30.0
# Validators of a task who together hold less than this share of all stake may be one coalition:
# then a member recomputes some of what they confirm. Where they hold more, a coalition with 30 % of
# all stake leaves a quarter of them honest, and p / 4 (R + S) is twice what a lie saves.
SMALL_POOL_BPS: Final = 4_000
RULING_S: Final = 180.0  # in which members recompute a disputed task, twice with noise
RULING_STEP_S: Final = 0.5  # more for every step: a member's machine may be slow
RULING_BYTES_PER_S: Final = 2 * 10**9  # speed of reading the task's memory, if that takes longer
RULING_GRACE_BPS: Final = 7_500  # of the settlement's grace, in which verdicts are waited for
MAX_ASKED: Final = 8  # validators of one task; if none of them answers, members recompute it
MAX_ATTESTATION_BYTES: Final = 8 * MIB  # statements on 1,024 tasks, all of them disputed
DUE_NOTICE_BYTES: Final = KIB  # without what the member holds, which a node asks it for
HELD_BYTES: Final = 255  # more for each task that it asks for
MAX_DUE_NOTICE_BYTES: Final = 256 * KIB
MAX_STATEMENTS: Final = (MAX_ASKED + 1) * MAX_TASKS  # of one kind in an attestation: all parties
# Of one member that contradicts itself, kept and shown to others; an honest one restarts seldom.
MAX_CONFLICTING: Final = 8
# Members act on what is ``confirmations`` blocks deep (splitup.messages.network). Windows in blocks
# grow with that number, because what is to be answered in them is seen so much later
# (splitup.protocol.committee.key_generation).
MAX_CONFIRMATIONS: Final = 24  # well below the 64 of REORG_BLOCKS and of the Committee's snapshots
DKG_TIMEOUT_BLOCKS: Final = 30  # from the first dealing until missing dealings are given up
DKG_COMPLAINT_BLOCKS: Final = 2  # from when a dealing is seen until its complaints are in a block
MAX_SPANS: Final = 65_536  # of one execution on one node; nobody reads a longer trace
SPANS_PER_FRAME: Final = 4_000  # ≈ 0.7 MB of JSON, below MAX_FRAME_BYTES
INTERIM_STEPS: Final = 16  # between two interim ends of a client
UNPAID_STEPS: Final = 64  # the most that a node computes beyond its client's latest end
INTERIM_ENDS: Final = UNPAID_STEPS // INTERIM_STEPS + 1  # kept: nodes have one of them in common
# Of an executor's, as signed, since members pass it on: 1,024 takeovers, an end with 256 inputs and
# outputs, and an order.
MAX_COMMITMENT_BYTES: Final = 768 * KIB
MAX_SHARED: Final = 1_024  # commitments that a member passes on in one message
# Commitments of a node that members keep: for its client's ends (the final one, and five interim
# ones), and as many for steps that it counted (one for each set of tasks that it has taken over).
MAX_ENDS: Final = 8
EXECUTION_GRACE_S: Final = 60  # an ended execution stays this long for a client that reconnects
MAX_SLASHES: Final = 256  # nodes in one settlement, and accounts paid out of them; the Market's
MAX_DISTRIBUTED: Final = 64  # executions in one transaction; the Market takes as many
MAX_CREDITS: Final = 384  # payouts of one execution that the Market credits in one call
MAX_DISTRIBUTED_WORDS: Final = 512  # payouts and exposures in one transaction: 23 k gas each, 2^24
# beyond the chain's minimum: a signed request may wait for some blocks
SIGNED_REQUEST_MARGIN_S: Final = 10
SIGNED_REQUEST_MARGIN_BLOCKS: Final = 3  # and at least these: head, a full block, its own
