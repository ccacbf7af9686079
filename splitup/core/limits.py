"""Every bound in the system, with its reason. A bound that is not here does not exist."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# ---- execution and plan ------------------------------------------------------------------------

MAX_STEPS: Final = 65_536  # the Market contract's own bound; one step per generated token
MAX_TASKS: Final = 1_024  # the ModelRegistry's bound: validation of a DAG must fit one transaction
MAX_FALLBACKS: Final = 8  # nodes listed per task; the chance that all fail is negligible
MAX_PLAN_NODES: Final = MAX_TASKS * MAX_FALLBACKS
MIN_OPERATORS: Final = 3  # an executor, a validator and a third that breaks a tie
MAX_CREDIT_MILLI: Final = 8_000  # rounds of work that a node can be owed, or ahead: factors ¼ … 4
MAX_COMMITTEE: Final = 31  # n = 3f+1 with f = 10; signature checks on chain stay below 160 k gas

# ---- data plane --------------------------------------------------------------------------------

INLINE_TENSOR_BYTES: Final = 1 * MIB  # above this, hashing and copying cost more than an S3 GET
MAX_FRAME_BYTES: Final = INLINE_TENSOR_BYTES + 4 * KIB
TENSOR_CHUNK_BYTES: Final = 256 * KIB  # of a larger tensor: what a small frame may have to wait for
DIRECT_BYTES: Final = 32 * MIB  # of pieces that wait for one peer, or are ahead of the store
DIRECT_HEAD_START_S: Final = 0.05  # that pieces get before the same bytes go to the store
DIRECT_CONNECT_S: Final = 0.5  # a first large input waits for its readers; the store is no faster
TENSOR_CHUNKS_BYTES: Final = (
    256 * MIB
)  # of tensors that a node is being sent; beyond, from the store
BUNDLE_FRAMES: Final = 256  # tensors under one signature: a batch's, or all inputs of a step
MAX_TENSOR_BYTES: Final = (
    1024 * MIB
)  # one step of one port; larger values must be split by the compiler
SEGMENT_STEPS: Final = 256  # steps per log object: 1 MB of a 4 KB port; its header stays ≤ 24 KB
SEGMENT_BYTES: Final = 4 * MIB  # a log object stays one PUT of bounded memory
SEGMENT_HEADER_BYTES: Final = 24 * KIB  # 256 lengths, and 256 digests of tensors stored apart
LOG_STEP_BYTES: Final = 640  # a step's share of the headers, even if every step is an object
SEGMENT_PAUSE_S: Final = 0.004  # after 256 KiB of a segment: 64 MB/s while the log is not behind
SEGMENT_AGE_S: Final = 1.0  # older steps are written although the segment is not full …
FLUSH_PERIOD_S: Final = 0.5  # … and this is how often that is looked at: 1.5 s and a PUT at most
LOG_MEMORY_BYTES: Final = 256 * MIB  # of one execution, not stored yet: the store is too slow then
LOG_OBJECTS: Final = 64  # log objects in one request to the gateway
LOG_PREFIXES: Final = 16_384  # logs whose use of the store the gateway remembers, ≈ 1 KB each
LOG_READ_AHEAD: Final = 8  # segments a reader asks grants for at once
LOG_LATE_S: Final = 5.0  # a validator waits this long for a log's last segments: the client's
LOG_POLL_S: Final = 0.5  # longest pause between two looks for a segment that may be on its way
MAX_EARLY_FRAMES: Final = 256  # frames kept for an execution whose plan has not arrived yet
MAX_EARLY_BYTES: Final = 8 * MIB

# ---- failover: when the client replaces a node ---

CONNECT_S: Final = 3.0  # from opening a connection until it has to stand
RECONNECT_S: Final = 0.5  # a broken connection that is not back by then was no hiccup
STALL_FIRST_S: Final = 5.0  # until the first step comes back: nodes may still be loading
STALL_S: Final = 1.0  # and between later ones; far above any pause of a healthy network …
STALL_STEPS: Final = 8  # … or this many times the usual, for slow models
PROBE_S: Final = 1.0  # a node that runs answers within milliseconds
HANG_RUN_S: Final = 10.0  # a run that takes longer than this, and STALL_STEPS times the usual step
HANG_LOST_S: Final = 3.0  # a task whose producers are ahead and that has no inputs has lost them

# ---- messages ----------------------------------------------------------------------------------

MAX_KEPT_EVIDENCE: Final = 256  # closed executions a member tells about; clients ask at once
MAX_MESSAGE_BYTES: Final = 4 * MIB  # a plan of 1,024 tasks with 8 nodes each is ~0.5 MB of JSON
MAX_ENDPOINT_CHARS: Final = 256  # the NodeRegistry's bound
MAX_SPEED_MFLOPS: Final = 10**10  # ten PFLOP/s: no device of today has a third
MAX_BANDWIDTH_KBPS: Final = 10**9  # a terabyte a second
MEASURED_BYTES: Final = 64 * KIB  # a smaller download measures the round trip
MAX_RESIDENT_TASKS: Final = 1_024  # task ids a heartbeat may list
HEARTBEAT_PERIOD_S: Final = 1.0
DEMAND_AGE_S: Final = 0.25  # a heartbeat's answer may be this old: it takes a look at all nodes
HEARTBEAT_TIMEOUT_S: Final = 5.0  # five missed beats: a restart takes longer, a hiccup does not
HEAD_MEMORY_S: Final = 10.0  # a replaced block may be named so long: two heartbeat timeouts, for a
# node that was away longer was not alive, and learns the head by the answer to its next beat
MAX_HEADS: Final = 64  # replaced blocks remembered: members look four times a second
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
STORE_QUIET_S: Final = 5.0  # a client that waits longer for the store says so
MAX_JOURNAL_VALUE_BYTES: Final = 16 * MIB  # four messages of the largest size

# ---- graphs, weights, manifests ----------------------------------------------------------------

MAX_JSON_DEPTH: Final = 64  # our own objects nest 8 deep, tokenizers 10
MAX_GRAPH_BYTES: Final = 4 * MIB  # 80 uncut Llama blocks are 1.5 MB; more would parse for seconds
MAX_GRAPH_NODES: Final = 65_536  # the same graph has ≈ 15,000; every pass is linear
MAX_GRAPH_DEPTH: Final = 32_768  # longest chain of operands: 80 blocks are ≈ 9,000 deep
MAX_KERNEL_DEPTH: Final = (
    128  # arithmetic between two values in memory: 2 s to compile, 512 take 50
)
MAX_PORTS: Final = 256  # inputs, outputs or states of one task
MAX_WEIGHTS: Final = 65_536  # tensors of one task, or of one safetensors file
MAX_SYMBOLS: Final = 4  # of one task: rows that come in, rows that go out, and room for two more
MAX_RANK: Final = 16  # a KV cache of a multi-head model has 4; tinygrad's own views reach 8
MAX_DIMENSION: Final = 2**31 - 1  # index arithmetic of every renderer is safe in 32 bits
MAX_ELEMENTS: Final = (
    2**43  # of a value never written to memory: 64 rows looking up 8 of 384 experts are 2^42.4
)
MAX_VALUE_BYTES: Final = 64 * 1024 * MIB  # of a value that is; no GPU port or weight is larger
MAX_TASK_FLOPS: Final = 2**50  # one step of one task: an hour of a 300 GFLOP/s CPU
MAX_NAME_CHARS: Final = 256  # of ports and tensors; names of weights in the wild reach 120
MAX_MANIFEST_BYTES: Final = 4 * MIB  # 1,024 tasks of 1.5 KB, doubled
MAX_SAFETENSORS_HEADER_BYTES: Final = (
    16 * MIB
)  # 65,536 tensors of 200 bytes; the format allows 100 MB
MAX_CONFIG_BYTES: Final = 1 * MIB  # a model's config.json or tokenizer_config.json
MAX_TOKENIZER_BYTES: Final = 64 * MIB  # the largest tokenizer.json in the wild has 33 MB
MIN_ROPE_THETA: Final = 10.0  # models use 10,000 to 10^7; exact powers of tiny bases take minutes
MAX_ROPE_THETA: Final = 1e12
MAX_LAYERS: Final = 512  # of a language model; the largest have 126, and 350 fill MAX_GRAPH_NODES
MAX_EXPERTS: Final = 4_096  # of a layer; models have up to 512, and each is several weights
MAX_ROPE_DIMS: Final = 4_096  # rotary elements of a head; models use 64 to 512
MAX_CONTEXT: Final = 2**20  # rows of a KV cache
KERNEL_CACHE_BYTES: Final = 1024 * MIB  # compiled tasks have 50 to 500 KB: thousands of them
MIN_NODE_BYTES: Final = 1_000_000  # of a node's memory; less is a number that lacks its unit
MAX_DEVICES: Final = 64  # of one node; the largest machines have 16 GPUs
MAX_KERNEL_THREADS: Final = 256  # of one worker; more cores than this are several sockets

# ---- decoding ----------------------------------------------------------------------------------

MAX_STOP_STRINGS: Final = 16  # chat formats use two or three
MAX_STOP_CHARS: Final = 256  # so much text may have to wait before it is shown
# ---- comparison, reference, dispute ------------------------------------------------------------

MAX_TOLERANCE: Final = 10**12  # in 10^-9: a difference 1,000 times the value tells nobody anything
COMPARED_LARGEST: Final = 128  # elements of an output whose exponents and mantissas are compared
MAX_REFERENCE_ELEMENTS: Final = 2**26  # of one value in the interpreter: 0.5 GB in float64
MAX_TRACE_LEAVES: Final = 2**32  # 65,536 steps of 65,536 values
MAX_DISPUTE_PROOFS: Final = 512  # operands of one kernel; a join of 256 ports reads as many
MAX_DISPUTE_MOVES: Final = 128  # two per turn; 32 and 16 turns for the two trees, and a few
MAX_TRANSCRIPT_BYTES: Final = 8 * MIB  # four moves of 512 proofs with 32 siblings are 4.4 MB
DISPUTE_ROUND_S: Final = 60.0  # for one answer; a party may have to compute a window again
MAX_DETERMINISM_CHARS: Final = 200  # of a class's name: a compiler's banner has 60
MAX_VECTOR_STEPS: Final = 16  # of a reference vector; a fault of a device shows in the first ones
VECTOR_STEPS: Final = 3  # zero state, a state of one step, a state of two
VECTOR_ELEMENTS: Final = 1_024  # kept of every output port and step, evenly spread
PLAUSIBLE_L2_PPB: Final = 50_000_000  # 5 %: bfloat16 has 0.4 % per rounding; a defect is beyond
MAX_VECTORS_BYTES: Final = 8 * MIB  # 256 ports, or 16 steps of few ports

# ---- pickled state files -----------------------------------------------------------------------

MAX_PICKLE_OPCODES: Final = 4_000_000  # 65,536 tensors take 45 each; at 100 bytes each, 400 MB
MAX_PICKLE_STRING_BYTES: Final = 64 * KIB  # names; a whole model card in a field has less
MAX_ZIP_DIRECTORY_BYTES: Final = 8 * MIB  # the same tensors at 120 bytes

# ---- HTTP --------------------------------------------------------------------------------------

HTTP_BODY_BYTES: Final = MAX_JWS_BYTES + KIB  # the largest signed request in its {"jws": …} wrapper
HTTP_SMALL_BODY_BYTES: Final = 64 * KIB  # as much as the sockets' buffers hold anyway
HTTP_LARGE_BODIES: Final = 16  # larger bodies that a server reads at once: < 100 MB in a flood
HTTP_READ_S: Final = 10.0  # a body that is not here by then is dribbled on purpose
HTTP_IDLE_S: Final = 30.0  # between requests, and for a request's head; clients close after 15 s
HTTP_CONNECT_S: Final = 2.0  # a host that does not accept within this is down
HTTP_TIMEOUT_S: Final = 10.0  # one whole request; long polls name their own
HTTP_CONNECTIONS_PER_HOST: Final = 32  # keeps one peer from taking all our sockets
HTTP_SHUTDOWN_S: Final = 2.0  # what open requests get to finish when a server stops
MAX_ERROR_CHARS: Final = 1_000  # of a server's error sentence that we repeat

# ---- storage gateway ---------------------------------------------------------------------------

MAX_GATEWAYS: Final = 8  # behind one bucket; each is tried once, which bounds the wait
UPLOAD_BYTES_PER_DAY: Final = 1024 * 1024 * MIB  # of one key at one gateway: a few large models
UPLOAD_KEYS: Final = 16_384  # uploaders whose use of the store a gateway remembers
MAX_UPLOAD_OBJECTS: Final = 3 * MAX_TASKS  # graph and weights of every task, and some blobs
MAX_UPLOAD_BYTES: Final = 5 * 1024 * MIB  # what S3 takes in one PUT
UPLOAD_STALL_S: Final = 60.0  # an upload that moves nothing for this long is dead
TRANSFER_STALL_S: Final = 20.0  # a download that does: the connection may be half-open
DOWNLOAD_PATIENCE_S: Final = 60.0  # without a byte; longer outages are the caller's to wait out
DISK_LEAST_BYTES: Final = 16 * MIB  # a node with less takes no work: the journal comes first
DISK_RESERVE_BYTES: Final = 64 * MIB  # left free by downloads: journal, status, compiled kernels
MAX_GRANTS: Final = 4_096  # ≈ 4 MB of reply and 1 s of signing; one party, one execution
GRANT_GRACE_S: Final = 300  # after the deadline: the last logs are written, the drawn tasks checked
COMMITTEE_CACHE_S: Final = 10.0  # how stale the gateway's view of the committee may be
COMMITTEE_LOOKUPS: Final = 8  # executions asked of the chain at once: forged certificates name any
COMMITTEE_REFRESH_S: Final = 1.0  # a certificate that fails makes us look again, this often at most
MAX_CACHED_MANIFESTS: Final = 64
LOG_URL_S: Final = 120  # URLs of what is asked for when it is moved; two tries of 30 s fit
AUDIT_FILE_BYTES: Final = 64 * MIB  # ≈ 200,000 grants
AUDIT_FILES: Final = 4  # the current one and those before it
MAX_CACHED_STANDINGS: Final = 16_384  # what the chain says of nodes and executions, ≈ 200 B each
MAX_CACHED_CERTIFICATES: Final = 1_024  # digests of certificates that were already verified
MAX_MODEL_NAME_BYTES: Final = 64  # the ModelRegistry's bound

# ---- data connections --------------------------------------------------------------------------

MAX_LINKS: Final = 1_024  # open data connections in each direction; one per node of every live plan
MAX_LINKS_PER_PEER: Final = 64  # a client may run many executions at once, each on its own link
LINK_QUEUE_BYTES: Final = 64 * MIB  # a peer this far behind for its bandwidth will not catch up
LINK_RESEND_BYTES: Final = 2 * MIB  # what a broken connection can have swallowed: socket buffers
LINK_ENDPOINTS: Final = 4  # of one node that are tried in turn; it moves when it loses a relay
LINK_RETRY_MIN_S: Final = 0.05
LINK_RETRY_MAX_S: Final = 2.0
LINK_GIVE_UP_S: Final = 30.0  # without a connection for this long the peer is gone
LINK_PING_S: Final = 10.0  # finds half-open connections
LINK_TOKEN_CHARS: Final = 2 * KIB  # a handshake token has about 600

# ---- relays ------------------------------------------------------------------------------------

MAX_RELAYED: Final = 64  # nodes behind one relay: with a committee of four, 256 behind NAT
RELAY_PROVING: Final = 16  # connections that may be about to prove a key; each asks the chain once
RELAY_STREAMS: Final = 128  # data connections through one relay; two frames each, so < 300 MB
RELAY_NODE_STREAMS: Final = 32  # of them to one node: its neighbours in every live plan, clients
RELAY_REQUESTS: Final = 128  # a burst of requests or new streams to one node: many plans at once …
RELAY_REQUESTS_PER_S: Final = 64.0  # … and for long: 31 members' probes are 12
RELAY_BYTES_PER_S: Final = 16 * MIB  # of one node's streams: 2,000 tensors of 8 KB; waits beyond
RELAY_HELD_BYTES: Final = 64 * MIB  # bodies that wait for nodes' replies
RELAY_REPLY_BYTES: Final = 64 * KIB  # of a node; its routes answer {} or an error sentence
RELAY_IDLE_S: Final = 600.0  # a data connection silent in both directions, as SESSION_IDLE_S
RELAY_PATIENCE_S: Final = 3.0  # a relay that was lost is tried again this long; then the next
REACH_PERIOD_S: Final = 300.0  # how often a direct node has members try whether it still is
REACH_TIMEOUT_S: Final = 6.0  # for their answer: connecting, RTT_TIMEOUT_S, and a look at the chain
REACH_CHECKS: Final = 32  # of nodes at once, at one member

# ---- chain -------------------------------------------------------------------------------------

RPC_TIMEOUT_S: Final = 10.0  # a node that takes longer for one call is as good as down
RPC_TRIES: Final = 4  # with the pauses below ≈ 0.7 s: a restart of the node is longer, a hiccup not
RPC_BACKOFF_S: Final = 0.1  # first pause; doubles
RPC_BACKOFF_MAX_S: Final = 5.0  # longest pause of a subscriber that waits for the node to return
LOG_RANGE_BLOCKS: Final = (
    1_000  # per eth_getLogs; public providers cut off between 1,000 and 10,000
)
REORG_BLOCKS: Final = (
    64  # two epochs of Ethereum, after which it is final; a deeper one is an alarm
)
RECEIPT_POLL_S: Final = 0.05
RESEND_AFTER_BLOCKS: Final = 3  # not mined by then: dropped, or underpriced
GAP_CHECK_S: Final = 2.0  # how often a sender looks whether what it sent lately is still there
SENT_KEPT: Final = 256  # transactions that a reorganisation may undo: 64 blocks of four each
FEE_CEILING_WEI: Final = 500 * 10**9  # 100 times a busy day's fee; above it, people decide
BLOCK_DELAY_S: Final = 4.0  # from a block's timestamp until everybody has it, on Ethereum
CLOCK_PERIOD_S: Final = 12.0  # between a node's looks at the chain's time: a block of Ethereum's
MINE_TIMEOUT_S: Final = 180.0  # fifteen of Ethereum's blocks
MAX_TRANSACTION_GAS: Final = 2**24  # EIP-7825, Osaka

# ---- node --------------------------------------------------------------------------------------

QUEUE_EXECUTIONS: Final = 256  # at once on one node; each holds buffers, logs and device state
QUEUE_BYTES: Final = 1024 * MIB  # tensors that wait for a run, over all executions of a node
QUEUE_HEAD_START: Final = 64  # of the longest critical path; the others' are in proportion
MAX_EARLY_EXECUTIONS: Final = 32  # executions whose frames may precede their plan, 8 MiB each

# ---- committee ---------------------------------------------------------------------------------

MAX_OPEN_EXECUTIONS: Final = 4_096  # unsettled at once; ≈ 10 KB each. More are refunded, not served
MAX_REVERTED: Final = 256  # executions that a reorganisation took away and may bring back
MAX_FINISHED_PLANS: Final = 256  # certificates kept after settlement, for clients that ask late
MAX_EARLY_MESSAGES: Final = 1_024  # per member: gossip about requests this member has not seen yet
MAX_SNAPSHOTS: Final = 64  # contents kept by root; a request refers to one at most minutes old
SNAPSHOT_ENTRIES_KEPT: Final = 160_000  # in those contents: 16 of 10,000 nodes, ≈ 2 KB each
MAX_SNAPSHOT_BYTES: Final = 64 * MIB  # of JSON: 16,384 nodes of 2 KB, doubled
CHUNKED_MESSAGE_NODES: Final = (
    1_000  # above it what grows with the nodes travels apart from its gossip
)
MESSAGE_CHUNK_BYTES: Final = 2 * MIB
MESSAGE_CHUNK_TIMEOUT_S: Final = 10.0  # for one part
MAX_CHUNKED_MESSAGE_BYTES: Final = (
    128 * MIB
)  # a proposal of 21 observations (n = 31) of 10,000 nodes: 18 MB
MAX_CHUNKED_MESSAGES: Final = 4  # offered at once: an observation, a proposal, and those before
MAX_MANIFESTS: Final = 256  # models known at once to a committee member
MAX_NODES: Final = 16_384  # registered nodes a member follows, ≈ 2 KB each
MAX_NODES_DEPTH: Final = 14  # of the tree over so many
OPENED_ENTRIES: Final = 2  # of a snapshot, in an order to verify: executor and validator
MAX_DEMAND_TASKS: Final = 4_096  # rows in a heartbeat's reply, ≈ 300 bytes each
MAX_SETTLEMENT_ROUNDS: Final = 16  # different proposals per proposer; evidence converges in a few
MAX_PLAN_WAIT_S: Final = 30.0  # longest long-poll for a plan
SNAPSHOT_REFRESH_S: Final = 30.0  # unchanged membership is certified again, for fresh load figures
OBSERVATION_GRACE_S: Final = 0.1  # with 2f+1 observations, how long the leader waits for the rest
OBSERVE_PERIOD_S: Final = 1.0  # between two looks at all nodes; also bounds answers to a leader
EPOCH_TIMEOUT_S: Final = 5.0  # a leader with a quorum needs a tenth; a missed beat costs a second
EPOCH_DOUBLINGS: Final = 4  # back-off of that: at most 80 s between two tries in a storm
EPOCH_SNAPSHOTS: Final = 16  # of one leader; then the next member decides whom it asks
MEDIAN_HYSTERESIS: Final = 4  # a median replaces the old figure when it differs by a quarter
MEMBER_HEARTBEAT_S: Final = 1.0  # members repeat their epoch wishes
MEMBER_SILENCE_S: Final = 2.5  # two beats missed: such a member acts last in every order
SNAPSHOT_SUBMIT_STAGE_S: Final = 3.0  # per rank behind the leader: longer than a block
MAX_TRACKED_VOTES: Final = 16_384  # 4,096 open executions of four members; ≈ 500 bytes each
MAX_EVIDENCE: Final = 256  # conflicts kept; one is enough to slash a member
GOSSIP_RETRY_S: Final = 1.0  # lost messages are said again
PLAN_PUSH_STAGE_S: Final = 0.15  # per rank: a healthy member has pushed the plan by then
PLAN_PUSHES: Final = 5  # of one member to nodes that do not answer, over 15 s and their timeouts
PLAN_SUBMIT_STAGE_S: Final = 1.5  # per rank: longer than a block
COMMITMENTS_STAGE_S: Final = 1.5  # per rank: longer than a block
VERIFICATION_STAGE_S: Final = 1.0  # per rank: a small task has been recomputed by then
VERIFICATION_REPEAT_S: Final = 5.0  # an order is sent again: a restarted node was not there for it
VERIFICATION_SILENCE_S: Final = 10.0  # a validator that says nothing is passed over …
VERIFICATION_STEP_S: Final = 0.1  # … plus this for every step it has to recompute
VALIDATOR_REVEAL_S: Final = 10.0  # it needs no computing, only one of its tries to arrive
EXECUTOR_REVEAL_S: Final = 30.0  # a node restarted after its commitment has the reveal on disk
RULING_S: Final = 60.0  # members recompute a disputed task within this …
RULING_STEP_S: Final = 0.5  # … plus this for every step: a member's machine may be slow
MAX_ASKED: Final = 16  # validators of one task; if none of them could say anything, members do
MAX_CLASSES: Final = 64  # determinism classes a member tries; each costs it a second, once
RULING_RETRY_S: Final = 10.0  # before a member looks again for inputs that it did not find
REPLAY_OVERHEAD_BYTES: Final = 4 * 1024 * MIB  # address space of Python, tinygrad and a compiler
MAX_STATEMENTS: Final = 8 * MAX_TASKS  # of one kind in an attestation: every drawn task, all judges
SETTLEMENT_STAGE_S: Final = 2.0  # per rank: signatures and a block
RTT_PERIOD_S: Final = 5.0  # between two probes of a node
RTT_TIMEOUT_S: Final = 2.0  # a node that takes longer is as good as unreachable
MAX_CHANGES: Final = 64  # configurations that a replay of the chain may still meet
BOARD_RETRY_S: Final = 5.0  # a dealing that the chain does not hold is posted again
DKG_TIMEOUT_BLOCKS: Final = 30  # after the first dealing, how long the last ones are waited for
DKG_COMPLAINT_BLOCKS: Final = 2  # every member has seen and checked the dealings by then
MAX_SESSIONS: Final = 4_096  # states in one worker: 256 executions of 16 local tasks
RUN_TIMEOUT_S: Final = 60.0  # one step of one task; a kernel that takes longer hangs
LOAD_TIMEOUT_S: Final = 900.0  # reading, compiling and warming up one task of many GB
BATCH_RUNS: Final = 32  # steps in one pass over the weights; more gain nothing on a CPU
BATCH_OWN_BYTES: Final = 1 * MIB  # of a task, for what sessions in a pass have besides rows
SPARE_STATES: Final = 32  # of a task, kept for sessions to come; freed when memory is short
PREPARED_STEPS: Final = 256  # of a task: batches differ in rows; preparing anew takes 20 µs
WORKER_SOCKET_BYTES: Final = 1 * MIB  # a tensor fits the socket: one write, one wake-up
WORKER_STOP_S: Final = 5.0  # what a worker gets to finish its run when the daemon stops
REPLAY_AHEAD_STEPS: Final = 512  # a task that catches up reads at most this far ahead of itself
SESSION_IDLE_S: Final = 600.0  # without a step for this long the client has gone away
SESSION_SPARE_S: Final = 5.0  # a state used this lately is not dropped for another's
LEAVE_S: Final = 5.0  # what running executions get to end when a node leaves; then others go on
LEAVE_POLL_S: Final = 0.05
MAX_STANDBY: Final = 1_024  # plans that name this node as a fallback only; ≈ 50 KB each
OUTBOX_BYTES: Final = 4 * MIB  # outputs of one execution kept for a client that reconnects
MAX_SPANS: Final = 65_536  # of one execution on one node; a trace of more helps nobody
SPANS_PER_FRAME: Final = 4_000  # ≈ 0.7 MB of JSON, below MAX_FRAME_BYTES
MAX_FINISHED: Final = 4_096  # ids of ended executions whose late frames are ignored in silence
EXECUTION_GRACE_S: Final = 60  # an ended execution stays this long for a client that reconnects
MAX_DEMAND: Final = (
    65_536  # tasks in the answer to a heartbeat; bounds what a member can make us parse
)
DOWNLOAD_TIMEOUT_S: Final = 3_600.0  # weights of many GB over a home connection
COMMIT_WINDOW_S: Final = 0.05  # completions that share one transaction; far below a block's time
MAX_DISTRIBUTED: Final = 64  # executions in one transaction; the Market takes as many
SIGNED_REQUEST_MARGIN_S: Final = (
    10  # beyond the chain's least: a signed request may wait for some blocks
)
DISTRIBUTE_PERIOD_S: Final = 60.0  # how often a node looks whether too much of its stake is locked
DISTRIBUTE_LOCKED_SHARE: Final = 0.5  # above it, it pays for the transaction that releases stake
COMMIT_PATIENCE_BLOCKS: Final = 6  # for the members' one transaction, before a node sends its own …
COMMIT_MARGIN_S: Final = 8.0  # … or so long before the deadline; many executions have 30 s in all
MAX_COMMITS: Final = 64  # completions in one transaction: ≈ 50 k gas each
REPORT_RETRY_S: Final = 0.25  # between tries while the plan's own transaction is not mined yet
MEMBER_REPLY_S: Final = 2.0  # one that hangs must not hold up what is due within VALIDATOR_REVEAL_S
ATTESTATION_POLL_MAX_S: Final = 1.0  # longest pause of a node that waits for its time to reveal
SHOWN_VERIFICATIONS: Final = 5  # in a node's status: a screen has room for no more
MAX_ORDERS: Final = 64  # verifications that wait; a member with more asks the next validator
TRADE_PERIOD_S: Final = 60.0  # a node trades once in it at most: a task takes seconds to load
TRADE_NOTICE_S: Final = 10.0  # without being offered, before it is unloaded: plans on their way
TRADE_HOLD_S: Final = 600.0  # a traded task is not traded back: what a download costs pays off
SHOWN_TRADES: Final = 3  # in a node's status
LOAD_RETRY_S: Final = 60.0  # before a task that failed to load is tried again
NOISE_POSITIONS: Final = 16  # drawn ahead, of all sessions of a client; 1 MB each at 128 k tokens
