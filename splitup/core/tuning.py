"""Bounds and times that each party may choose for itself, each with its reason.

What all parties must agree on is in ``splitup.core.limits``.
"""

from __future__ import annotations

from typing import Final

from splitup.core.limits import KIB, MIB

# ---- data plane --------------------------------------------------------------------------------

DIRECT_BYTES: Final = 32 * MIB  # of chunks that wait for one peer, or are ahead of the store
DIRECT_HEAD_START_S: Final = 0.05  # that chunks get before the same bytes go to the store
DIRECT_CONNECT_S: Final = 0.5  # a first large input waits for its readers; the store is no faster
# of tensors that a node receives at once; further ones come from the store
TENSOR_CHUNKS_BYTES: Final = 256 * MIB
SEGMENT_PAUSE_S: Final = 0.004  # after 256 KiB of a segment: 64 MB/s while the log is not behind
SEGMENT_AGE_S: Final = 1.0  # steps older than this are written although the segment is not full
FLUSH_PERIOD_S: Final = 0.5  # how often that is checked: a step is stored after 1.5 s and a PUT
LOG_MEMORY_BYTES: Final = 256 * MIB  # of one execution, not stored yet; more: the store is too slow
LOG_PREFIXES: Final = 16_384  # logs whose use of the store the gateway remembers, ≈ 1 KB each
LOG_READ_AHEAD: Final = 8  # segments that a reader requests grants for at once
LOG_LATE_S: Final = 5.0  # who recomputes an execution waits this long for its last segments
LOG_POLL_S: Final = 0.5  # longest pause between two polls for a segment
EARLY_STREAMS: Final = 64  # pairs of a peer and an execution whose plan has not arrived yet
MAX_EARLY_FRAMES: Final = 256  # kept of each early stream
MAX_EARLY_BYTES: Final = 2 * MIB  # kept of all early streams together
EARLY_S: Final = 30.0  # how long they are kept; a plan that is later than this has been replaced

# ---- failover: when the client replaces a node ---

CONNECT_S: Final = 3.0  # for opening a connection
RECONNECT_S: Final = 0.5  # a broken connection that is not back by then counts as lost
TAKEOVER_LATE_S: Final = 2.0  # from a gateway's refusal to the client's takeover that explains it
TAKEOVER_POLL_S: Final = 0.05
STALL_FIRST_S: Final = 5.0  # until the first step comes back, and for a node's first answer
ASK_S: Final = 0.2  # a later step that takes longer, and ASK_STEPS usual ones: the nodes are asked
ASK_STEPS: Final = 2  # asking costs them a frame each way
MEASURE_S: Final = 1.0  # and so often while steps flow, to know how long their answers take
# The least time for an answer, or a connection's sign of life: TCP has sent a lost packet again.
ANSWER_S: Final = 0.4
PROBE_PAUSES: Final = 10.0  # times as long as an answer to a probe took: the next one comes later
ANSWER_FACTOR: Final = 4.0  # a node has so many times its slowest answer so far, when that is more
LOADING_SHARE: Final = 0.5  # of the time until the deadline is for nodes that say that they load
HOLDERS_QUIET_S: Final = 60.0  # no node loads a task of a model that a client wants for so long
HOLDERS_POLL_S: Final = 1.0  # nodes tell members once a second
HOLDERS_AGE_S: Final = 60.0  # a model that was held so lately is not asked about again
PLAN_ANSWER_S: Final = 1.0  # a node that has to load for a plan answers after so long, and goes on
HANG_RUN_S: Final = 10.0  # a run that takes longer than this, and HANG_STEPS times the usual step
HANG_STEPS: Final = 8  # steps differ by their rows
# A task without inputs while its producers are ahead has lost them. Silent connections have been
# opened anew by then, and a large tensor may be on its way.
HANG_LOST_S: Final = 5.0
# A node that cannot connect to its reader for this long fails its own part. Later than CONNECT_S:
# a reader that is down has been replaced by then. Sooner than the reader is blamed for missing
# inputs (HANG_LOST_S after a stall).
UNREACHED_S: Final = 4.0

# ---- messages ----------------------------------------------------------------------------------

MAX_KEPT_EVIDENCE: Final = 256  # closed executions whose evidence a member keeps for clients
MEASURED_BYTES: Final = 64 * KIB  # a smaller download measures the round trip
DEMAND_AGE_S: Final = 0.25  # cache of heartbeat answers, which are computed from all nodes
HEARTBEAT_REFUSALS: Final = 5  # by all members, until heartbeats become less frequent
HEARTBEAT_REFUSED_S: Final = 30.0  # the longest pause; a stake that is filled up is seen then
MAX_HEADS: Final = 64  # replaced blocks that are remembered: members poll four times a second

# ---- keys, tokens, storage, journal ------------------------------------------------------------

MAX_SECRET_FILE_BYTES: Final = 64 * KIB  # a keystore is 600 bytes, a passphrase a line
MAX_REPLAY_ENTRIES: Final = 100_000  # ≈ 30 MB; 1,000 requests a second for the life of a token
OBJECT_FETCHES: Final = 3  # tries: after three wrong digests the object itself counts as wrong
OBJECT_RETRY_S: Final = 2.0  # longest pause between two tries against an overloaded server
MAX_JOURNAL_VALUE_BYTES: Final = 16 * MIB  # four messages of the largest size

# ---- images in prompts -------------------------------------------------------------------------

MAX_IMAGE_BYTES: Final = 32 * MIB  # of a file
MAX_IMAGE_PIXELS: Final = 50_000_000  # 150 MB as RGB; cameras make up to about so many
MAX_IMAGE_SCANS: Final = 16  # of a JPEG of so many pixels, or more of fewer; encoders make 10
IMAGE_READ_S: Final = 20.0  # the largest take three
IMAGE_READER_MEMORY_BYTES: Final = 2 * 1024 * MIB  # of address space; the largest take 1 GiB
MAX_TOWER_PIXELS: Final = 4_194_304  # that a model reads: 50 MB; models read up to 896 * 896

# ---- graphs, weights, manifests ----------------------------------------------------------------

MAX_CONFIG_BYTES: Final = 1 * MIB  # a model's config.json or tokenizer_config.json
MIN_ROPE_THETA: Final = 10.0  # models use 10,000 to 10^7; exact powers of tiny bases take minutes
MAX_ROPE_THETA: Final = 1e12
MAX_LAYERS: Final = 512  # of a language model; the largest have 126, and 350 fill MAX_GRAPH_NODES
MAX_EXPERTS: Final = 4_096  # of a layer; models have up to 512, and each is several weights
MAX_ROPE_DIMS: Final = 4_096  # rotary elements of a head; models use 64 to 512
KERNEL_CACHE_BYTES: Final = 1024 * MIB  # compiled tasks have 50 to 500 KB: thousands of them
COMPILE_POLL_S: Final = 0.05  # between looks whether another daemon has compiled
COMPILER_IDLE_S: Final = 60.0  # without a task a node's compiler ends: 150 MB, more with a GPU
# Of CPU, to check and compile a task, on a machine as fast as the one where that was predicted;
# the measured speed scales it. It bounds hostile tasks: of legal ones the slowest took 2.5 times
# what is predicted, and 5 times for CUDA, with kernels of several tokens.
COMPILE_S: Final = 10.0
COMPILE_FACTOR: Final = 7.0  # a large task gets this many times its predicted CPU time instead
COMPILE_WAIT_S: Final = 600.0  # for either, by the clock, on a machine that is busy otherwise
SLOW_TRIES: Final = 4  # of one task, each with twice the time of the last: then it is given up here
SLOW_TASKS: Final = 1_024  # whose tries are remembered, 100 B each
COMPILE_BYTES: Final = 64 * MIB  # to check and compile a task, beyond what the process has
COMPILE_BYTES_PER_S: Final = 16 * MIB  # for each predicted second of a large task; models take 5 MB
MAX_DEVICES: Final = 64  # of one node; the largest machines have 16 GPUs
MAX_KERNEL_THREADS: Final = 256  # of one worker; more cores than this are several sockets

# ---- exported models ---------------------------------------------------------------------------

EDGE_CALL_S: Final = 600.0  # to load a file, or one step: a small device may be slow
EDGE_FACTOR: Final = 4  # of a file's bytes: its process holds it, packs weights, and has a cache
EDGE_BYTES: Final = 2 * 1024 * MIB  # and so much besides, for libraries, threads and activations

# ---- decoding ----------------------------------------------------------------------------------

TOKENIZER_LOAD_S: Final = 60.0  # the largest take seconds
TOKENIZER_CALL_S: Final = 10.0  # a book's text takes a second
LONG_TEXT_CHARS: Final = 16 * KIB  # 20 to 40 ms; longer ones go to another process
TOKENIZER_MEMORY_BYTES: Final = 4 * 1024 * MIB  # of address space; a file of 33 MB takes 1 GB
PROMPT_CHARS: Final = 32  # of a token on average; a longer prompt is refused before it is encoded
TOKEN_CHARS: Final = KIB  # of text that a token becomes; runs of spaces in vocabularies have 128
TEMPLATE_MEMORY_BYTES: Final = 512 * MIB  # beside the tokenizer: ten copies of the largest request
MAX_GRAMMAR_BYTES: Final = 128 * KIB  # a schema of 5,000 properties
GRAMMAR_CALL_S: Final = 5.0  # its own bounds end a grammar within a tenth of that
GRAMMARS: Final = 64  # compiled ones that a process keeps
GRAMMAR_TEXTS: Final = 64  # texts under way that it keeps; one beyond them is read again
MAX_STOP_STRINGS: Final = 16  # chat formats use two or three
MAX_STOP_CHARS: Final = 256  # this much text may be held back

# ---- pickled state files -----------------------------------------------------------------------

MAX_PICKLE_OPCODES: Final = 4_000_000  # 65,536 tensors take 45 each; at 100 bytes each, 400 MB
MAX_PICKLE_STRING_BYTES: Final = 64 * KIB  # names; a whole model card in a field has less
MAX_ZIP_DIRECTORY_BYTES: Final = 8 * MIB  # the same tensors at 120 bytes

# ---- HTTP --------------------------------------------------------------------------------------

QUIET_S: Final = 5.0  # who waits so long for store or chain, without a byte, says for whom
HTTP_SMALL_BODY_BYTES: Final = 64 * KIB  # as much as the sockets' buffers hold
HTTP_LARGE_BODIES: Final = 8  # larger bodies of strangers that a server reads at once: < 48 MB
HTTP_BACKLOG: Final = 512  # connections that wait to be accepted; the kernel refuses more
HTTP_READ_S: Final = 10.0  # for a whole body; a slower sender is treated as an attack
HTTP_IDLE_S: Final = 30.0  # between requests, and for a request's head; clients close after 15 s
HTTP_CONNECT_S: Final = 2.0  # a host that does not accept within this is down
HTTP_TIMEOUT_S: Final = 10.0  # one whole request; long polls name their own
HTTP_CONNECTIONS_PER_HOST: Final = 32  # keeps one peer from taking all our sockets
HTTP_SHUTDOWN_S: Final = 2.0  # time for open requests to finish when a server stops
MAX_ERROR_CHARS: Final = 1_000  # of a server's error message that is shown
LOG_WARNINGS: Final = 20  # of one kind that a daemon's log takes per period; strangers cause them
LOG_PERIOD_S: Final = 60.0

# ---- streams of answers ----

# A request whose turn is expected later is told when to come back, unless its client said how long
# it waits: load balancers and many programs give up after 60 s without an answer.
QUEUE_WAIT_S: Final = 60.0
STREAM_HEAD_S: Final = 0.05  # that a stream waits for its first token, or for a reason to refuse
STREAM_QUIET_S: Final = 3.0  # then it says how far it is; the least patient clients wait for 10 s
STREAM_GRACE_S: Final = 10.0  # for a client to come back; the official ones do within 8 s
STREAM_KEEP_S: Final = 600.0  # after the end: a client that is started anew comes back
STREAM_BYTES: Final = 2 * MIB  # of one: 8,000 tokens; older events that were read are dropped
STREAM_FILE_BYTES: Final = 4 * STREAM_BYTES  # then it is written anew, without what was dropped
STREAM_REQUEST_BYTES: Final = MIB  # of one that is kept, for the server that goes on with it
STREAMS: Final = 4_096  # ended ones that are kept, in all
STREAMS_BYTES: Final = 128 * MIB
STREAMS_OF_ONE: Final = 256  # of one key
STREAMS_BYTES_OF_ONE: Final = 32 * MIB
STREAMS_RUNNING: Final = 512  # of one key: more than may wait for a lease
STREAMS_UNREAD: Final = 32  # of those, that nobody reads: each costs what it computes meanwhile
IDEMPOTENCY_KEY_CHARS: Final = 255

# ---- strangers: who is not authorised yet, at an HTTP server ----

STRANGERS: Final = 1_024  # connections, ≈ 15 KB each; as many clients may wait for their plans
STRANGERS_PER_S: Final = 512.0  # turns, 0.2 to 0.5 ms each: a quarter of a processor at most
STRANGERS_BURST: Final = 256  # at once
STRANGER_EARLY_BYTES: Final = 32 * KIB  # that a connection may send before it has a turn
STRANGER_BYTES: Final = 4 * KIB  # of a body, that take as long as a request: 0.04 to 0.13 µs each
KNOWN_CONNECTIONS: Final = 32  # of one key beyond the strangers' bounds: HTTP_CONNECTIONS_PER_HOST

PLAN_WAITS: Final = 1_024  # clients that wait for a plan at one member
SIGNED_REQUESTS: Final = 64  # being checked at one member, with nine calls of the chain each

# ---- storage gateway ---------------------------------------------------------------------------

UPLOAD_BYTES_PER_DAY: Final = 1024 * 1024 * MIB  # of an account at a gateway: a few large models
UPLOAD_ACCOUNTS: Final = 16_384  # uploaders whose use of the store a gateway remembers
UPLOAD_STALL_S: Final = 60.0  # an upload without progress for this long is aborted
TRANSFER_STALL_S: Final = 20.0  # likewise other transfers: the connection may be half-open
DOWNLOAD_PATIENCE_S: Final = 60.0  # of retries without a byte; then the caller has to decide
# a node with less free space takes no work: the journal needs it
DISK_LEAST_BYTES: Final = 16 * MIB
DISK_RESERVE_BYTES: Final = 64 * MIB  # left free by downloads: journal, status, compiled kernels
COMMITTEE_CACHE_S: Final = 10.0  # how stale the gateway's view of the committee may be
COMMITTEE_LOOKUPS: Final = 8  # executions looked up on the chain at once; forgeries may name any
STRANGER_LOOKUPS: Final = 8  # accounts that a gateway looks up on the chain at once; keys are free
COMMITTEE_REFRESH_S: Final = 1.0  # an invalid certificate triggers a refresh, this often at most
MAX_CACHED_MANIFESTS: Final = 64
MAX_CACHED_MANIFEST_FILES: Final = 16  # of up to 4 MiB, which anybody may ask a gateway for
MAX_REFUSED_MANIFESTS: Final = 4_096  # ids and reasons: 1 MB
LOG_URL_S: Final = 120  # life of URLs for logs, which are used at once; two tries of 30 s fit
AUDIT_FILE_BYTES: Final = 64 * MIB  # ≈ 200,000 grants
AUDIT_FILES: Final = 4  # the current one and those before it
MAX_CACHED_STANDINGS: Final = 16_384  # on-chain state of nodes and executions, ≈ 200 B each
MAX_CACHED_CERTIFICATES: Final = 1_024  # digests of certificates and draws that were checked

# ---- data connections --------------------------------------------------------------------------

MAX_LINKS: Final = 1_024  # open data connections in each direction; one per node of every live plan
LINK_QUEUE_BYTES: Final = 64 * MIB  # a peer this far behind for its bandwidth will not catch up
LINK_RESEND_BYTES: Final = 2 * MIB  # that a broken connection can have lost: socket buffers
LINK_ENDPOINTS: Final = 4  # of one node, tried in turn; they change when it loses a relay
LINK_RETRY_MIN_S: Final = 0.05
LINK_RETRY_MAX_S: Final = 2.0
LINK_GIVE_UP_S: Final = 30.0  # without a connection for this long the peer counts as gone
LINK_PING_S: Final = 10.0  # detects half-open connections while nobody asks for progress

# ---- relays ------------------------------------------------------------------------------------

MAX_RELAYED: Final = 64  # nodes behind one relay: with a committee of four, 256 behind NAT
RELAY_PROVING: Final = 16  # connections that may be about to prove a key; each asks the chain once
RELAY_STREAMS: Final = 128  # data connections through one relay; two frames each, so < 300 MB
RELAY_NODE_STREAMS: Final = 32  # of them to one node: its neighbours in every live plan, clients
RELAY_REQUESTS: Final = 128  # requests or new streams to one node at once: many plans
RELAY_REQUESTS_PER_S: Final = 64.0  # on average; 31 members' probes are 12
RELAY_SHARE: Final = 16  # half of a burst is kept for addresses that use at most this part each
RELAY_ADDRESSES: Final = 256  # whose use is remembered, of each node
RELAY_BYTES_PER_S: Final = 16 * MIB  # of one node's streams: 2,000 tensors of 8 KB; waits beyond
RELAY_HELD_BYTES: Final = 64 * MIB  # bodies that wait for nodes' replies
RELAY_IDLE_S: Final = 600.0  # a data connection silent in both directions, as SESSION_IDLE_S
RELAY_PATIENCE_S: Final = 3.0  # a lost relay is retried this long; then the next one is used
REACH_PERIOD_S: Final = 300.0  # how often a node asks members whether they still reach it directly
REACH_TIMEOUT_S: Final = 6.0  # for their answer: connecting, RTT_TIMEOUT_S, reading the chain
REACH_CHECKS: Final = 32  # of nodes at once, at one member

# ---- chain -------------------------------------------------------------------------------------

RPC_TIMEOUT_S: Final = 10.0  # for one call; a slower RPC node counts as down
RPC_TRIES: Final = 4  # with the pauses below ≈ 0.7 s: bridges a short failure, not a restart
RPC_SILENCES: Final = 2  # calls without an answer: the second goes over another connection
RPC_BACKOFF_S: Final = 0.1  # first pause; doubles
RPC_BACKOFF_MAX_S: Final = 5.0  # longest pause of a subscriber that waits for the node to return
# per eth_getLogs; public providers cut off between 1,000 and 10,000
LOG_RANGE_BLOCKS: Final = 1_000
LOG_RANGE_MAX_BLOCKS: Final = 65_536  # where larger ranges are answered
LOG_RANGE_MEMORY: Final = 64  # answers after which twice the refused range is tried again
# two epochs of Ethereum, after which it is final; a deeper one is an alarm
REORG_BLOCKS: Final = 64
RECEIPT_POLL_S: Final = 0.05
BLOCK_EARLY: Final = 0.15  # a block is asked for often from this share of a period before it is due
BLOCK_EARLY_S: Final = 0.5  # and at least this long before
BLOCK_POLL_MAX_S: Final = 1.0  # longest pause until then
BLOCK_LATE_POLL_S: Final = 0.25  # longest pause while a block is late
RESEND_AFTER_BLOCKS: Final = 3  # not mined by then: dropped, or underpriced
GAP_CHECK_S: Final = 2.0  # how often a sender checks that its last transactions are still known
SENT_KEPT: Final = 256  # transactions that a reorganisation may undo: 64 blocks of four each
FEE_CEILING_WEI: Final = 500 * 10**9  # 100 times a busy day's fee; above it, the operator decides
BLOCK_DELAY_S: Final = 4.0  # from a block's timestamp until everybody has it, on Ethereum
CLOCK_PERIOD_S: Final = 12.0  # how often a node reads the chain's time: a block of Ethereum's
MINE_TIMEOUT_S: Final = 180.0  # fifteen of Ethereum's blocks

# ---- node --------------------------------------------------------------------------------------

MONEY_AGE_S: Final = 30.0  # of what its owner is told is settled: it takes all events of the market
QUEUE_EXECUTIONS: Final = 256  # at once on one node; each holds buffers, logs and device state
QUEUE_BYTES: Final = 1024 * MIB  # tensors that wait for a run, over all executions of a node
QUEUE_HEAD_START: Final = 64  # priority of the longest critical path; others in proportion

# ---- committee ---------------------------------------------------------------------------------

MAX_SIGNED: Final = 262_144  # slots that a member signed for, ≈ 250 B each; then it signs no more
SIGNED_MARGIN_S: Final = 1_800  # a closed slot is kept this long: REORG_BLOCKS of Ethereum, doubled
# A lease that does not open for so long is asked for again, and who waits for the first of a model
# is told to come back, while no node is seen to load: official clients repeat a 503 by themselves.
LEASE_WAIT_S: Final = 30.0
MAX_OPEN_EXECUTIONS: Final = 4_096  # unsettled at once; ≈ 10 KB each. More are refunded, not served
MAX_REVERTED: Final = 256  # executions that a reorganisation took away and may bring back
MAX_EARLY_MESSAGES: Final = 1_024  # per member: gossip about requests this member has not seen yet
MAX_SNAPSHOTS: Final = 64  # contents kept by root; a request refers to one at most minutes old
SNAPSHOT_ENTRIES_KEPT: Final = 160_000  # in those contents: 16 of 10,000 nodes, ≈ 2 KB each
MESSAGE_CHUNK_TIMEOUT_S: Final = 10.0  # for one chunk
# Offered at once: an observation, a snapshot, those before, and some settlements, which come again.
MAX_CHUNKED_MESSAGES: Final = 16
LARGE_MESSAGE_REST: Final = 3.0  # times what reading one took, until its sender's next one
AUDIT_TASKS: Final = 64  # that a new node tries at most, each of which may take minutes
MAX_MANIFESTS: Final = 256  # models known at once to a committee member; half are those in use
FEES_HALVE_S: Final = 86_400.0  # a model counts as used for days after its users have left
SNAPSHOT_SUBMIT_STAGE_S: Final = 3.0  # per rank behind the leader: longer than a block
MAX_TRACKED_VOTES: Final = 16_384  # 4,096 open executions of four members; ≈ 500 bytes each
MAX_EVIDENCE: Final = 256  # conflicts kept; one is enough to slash a member
GOSSIP_RETRY_S: Final = 1.0  # lost messages are sent again
ATTESTATION_GATHER_S: Final = 0.5  # while commitments are missing, for which nodes wait anyway
PLAN_PUSH_STAGE_S: Final = 0.15  # per rank: a healthy member has pushed the plan by then
PLAN_PUSHES: Final = 5  # tries of one member for a node that does not answer, over 15 s
PLAN_SUBMIT_STAGE_S: Final = 1.5  # per rank: longer than a block
COMMITMENTS_STAGE_S: Final = 1.5  # per rank: longer than a block
VERIFICATION_STAGE_S: Final = 1.0  # per rank, at least: a small task has been recomputed by then
VERIFICATION_REPEAT_S: Final = 5.0  # an order is sent again: a node may have been restarting
MAX_CLASSES: Final = 64  # determinism classes whose computation here a member remembers
MAX_DEFINED: Final = 64  # disputed tasks of which a member remembers that noise changes little
RULING_RETRY_S: Final = 10.0  # before a member tries again to fetch inputs that were missing
REPLAY_OVERHEAD_BYTES: Final = 4 * 1024 * MIB  # address space of Python, tinygrad and a compiler
SETTLEMENT_LOOK_S: Final = 0.25  # between looks at an execution without news; its stages are longer
SETTLEMENT_STAGE_S: Final = 2.0  # per rank: signatures and a block
RTT_PERIOD_S: Final = 5.0  # between two probes of a node
REST_RTT_PERIOD_S: Final = 300.0  # the same while the member rests; all are probed when that ends
REST_POLL_S: Final = 4.0  # between looks at the chain of a member that rests
REST_READ_S: Final = 60.0  # between its readings of the registry and of the board
PLAN_ASKED_S: Final = 2.0  # who asks for an unknown plan ends the rest of looks for so long
RTT_TIMEOUT_S: Final = 2.0  # a slower node counts as unreachable
MAX_CHANGES: Final = 64  # configurations that a replay of the chain may still meet
BOARD_RETRY_S: Final = 5.0  # a dealing that is not on the chain is posted again
MAX_SESSIONS: Final = 4_096  # states in one worker: 256 executions of 16 local tasks
RUN_TIMEOUT_S: Final = 60.0  # a worker that does not answer is not given up sooner than this
RUN_FACTOR: Final = 20.0  # nor before this many times its longest step: the machine may be busy
LOAD_QUIET_S: Final = 900.0  # a load without progress (a weight, a kernel, a row) for this long
LOAD_TIMEOUT_S: Final = 900.0  # for a process that compiles or loads a task and tells no progress
BATCH_RUNS: Final = 32  # steps in one batch; more gain nothing on a CPU
BATCH_OWN_BYTES: Final = 1 * MIB  # of a task, for buffers that each execution of a batch has
MERGE_STEPS: Final = 64  # consecutive steps in one pass; more gain nothing on a CPU
MERGE_INPUT_BYTES: Final = 256 * MIB  # of these steps, some of which have inputs without rows
MERGE_STEPS_BUSY: Final = 8  # while a node has executions: a token waits for a pass that has begun
MERGE_BYTES: Final = 64 * MIB  # of a process, for values that consecutive steps in one pass save
SPARE_STATES: Final = 32  # of a task, kept for later executions; freed when memory is short
PREPARED_STEPS: Final = 256  # cached per task, by numbers of rows; preparing one takes 20 µs
WORKER_SOCKET_BYTES: Final = 1 * MIB  # a tensor fits the socket: one write, one wake-up
MAX_WORKER_LOG_BYTES: Final = 1 * MIB  # of a worker's log, when it begins anew at a start
WORKER_STOP_S: Final = 5.0  # time for a worker to finish its run when the daemon stops
REPLAY_AHEAD_STEPS: Final = 512  # a task that replays logs reads at most this far ahead
SESSION_IDLE_S: Final = 600.0  # without a step for this long the client counts as gone
SESSION_SPARE_S: Final = 5.0  # a state that was used this recently is not evicted
LEAVE_S: Final = 5.0  # time for running executions to end when a node leaves; then others take over
LEAVE_POLL_S: Final = 0.05
MAX_STANDBY: Final = 1_024  # plans that name this node as a fallback only; ≈ 50 KB each
OUTBOX_BYTES: Final = 4 * MIB  # outputs of one execution, kept for a client that reconnects
MAX_FINISHED: Final = 4_096  # ids of ended executions, whose late frames are ignored
DOWNLOAD_TIMEOUT_S: Final = 3_600.0  # weights of many GB over a home connection
DISTRIBUTE_PERIOD_S: Final = 60.0  # how often a node looks at its stake: locked too much, too small
# Below the least stake a node gets no work. Of 1,100 USDC this is two floors of an honest mistake.
STAKE_SPARE_PERCENT: Final = 1.0
DISTRIBUTE_LOCKED_SHARE: Final = 0.5  # above it, it pays for the transaction that releases stake
STOP_MARGIN_S: Final = 7.0  # before the deadline a node stops what has not ended, for its pay
MAX_VOTED: Final = 16  # contents of a member's own votes for commitments of one execution
REPLACED_ANSWER_S: Final = 2.0  # for a node that was replaced to answer; and a heartbeat's period
TAKEOVERS_GATHER_S: Final = 0.2  # between messages about up to 1,024 takeovers to each member
AGREE_MARGIN_S: Final = 5.0  # before it members settle what executors committed to
REPORT_RETRY_S: Final = 0.25  # first pause between looks at members and chain for a report
MEMBER_REPLY_S: Final = 2.0  # one that hangs must not delay a reveal beyond VALIDATOR_REVEAL_S
ATTESTATION_POLL_MAX_S: Final = 1.0  # longest pause of a node that waits for its time to reveal
SHOWN_VERIFICATIONS: Final = 5  # in a node's status: a screen has room for no more
MAX_ORDERS: Final = 64  # verifications that wait; with more, members ask the next validator
TRADE_PERIOD_S: Final = 60.0  # a node swaps one task in it at most: loading takes seconds
TRADE_NOTICE_S: Final = 10.0  # between withdrawing a task and unloading it: plans may be under way
# a swapped task is not swapped back for this long, to repay its download
TRADE_HOLD_S: Final = 600.0
SHOWN_TRADES: Final = 3  # in a node's status
LOAD_RETRY_DOUBLINGS: Final = 6  # of the next two, for a task that fails again
LOAD_RETRY_S: Final = 60.0  # before a task that failed to load is tried again: an hour at most
LOAD_FETCH_RETRY_S: Final = 2.0  # the same, of a model whose files could not be fetched: 2 minutes
NOISE_POSITIONS: Final = 16  # cached, of all sessions of a client; 1 MB each at 128 k tokens
