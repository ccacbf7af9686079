"""A dispute between two parties about a task: find the first operation whose result differs.

Both have committed to a value trace (``splitup.graph.value_trace``). In every turn both open the
node of their tree that contains the first difference. After log2 of the number of leaves they reach
one value, about whose operands they agree:

    turn    what a party shows                    what follows
    SPLIT   the two children of the node          the left one if they differ there, else the right
    LEAF    the value's digest, and that of every operand with its proof
    OPEN    the root of the operation trace       unless both are of one determinism class; equal
                                                  roots end it, others are split like the first tree

``Dispute`` only finds the place; it does no I/O: moves and time in, questions out.
``splitup.protocol.disputes.judging`` decides who lied there. A party that is silent at a deadline,
or whose signed move contradicts its own commitment, has lost. Moves are signed over the dispute's
digest and the turn, so they cannot be replayed elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Final, Literal

from pydantic import Field

from splitup.core import limits
from splitup.core.errors import InvalidInput, PeerFault
from splitup.crypto.keys import Identity, verify
from splitup.graph.ir import compute_task_id
from splitup.graph.reference import is_computable, list_operands, list_region
from splitup.graph.rules import CheckedGraph
from splitup.graph.value_trace import (
    MerkleTree,
    ValueLayout,
    hash_children,
    hash_leaf,
    is_leaf,
    split_range,
)
from splitup.messages.base import Bytes32Field, Count, DigestField, Message
from splitup.protocol.snapshots.observations import Ed25519SignatureField

DISPUTE_DOMAIN: Final = "splitup/dispute/v1"
MOVE_DOMAIN: Final = b"splitup/dispute-move/v1"
_MAX_SIBLINGS: Final = limits.MAX_TRACE_LEAVES.bit_length()

Party = Literal[0, 1]
PARTIES: Final[tuple[Party, Party]] = (0, 1)


# ---- messages ----------------------------------------------------------------------------------


class DisputeContext(Message):
    """The disputed task; party 0 executed it, party 1 recomputed it. Roots as committed."""

    execution_id: Bytes32Field
    index: Count  # of the task in its model
    task_id: DigestField
    # per step, the number of rows of each of the task's symbols in the committed inputs
    rows: tuple[
        Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(max_length=limits.MAX_SYMBOLS)],
        ...,
    ] = Field(min_length=1, max_length=limits.MAX_STEPS)
    signing_keys: tuple[Bytes32Field, Bytes32Field]
    roots: tuple[DigestField, DigestField]
    one_class: bool  # both parties are of one determinism class


class LeafProof(Message):
    """Proof that a party's tree holds ``value`` at ``leaf``."""

    leaf: Count
    value: DigestField
    siblings: tuple[DigestField, ...] = Field(max_length=_MAX_SIBLINGS)


class Move(Message):
    """A party's answer to one question; ``hashes`` as in the table of turns above."""

    dispute: Bytes32Field
    party: Party
    turn: Count
    hashes: tuple[DigestField, ...] = Field(min_length=1, max_length=2)
    proofs: tuple[LeafProof, ...] = Field(max_length=limits.MAX_DISPUTE_PROOFS)


class SignedMove(Message):
    """A move and its party's Ed25519 signature."""

    move: Move
    signature: Ed25519SignatureField


class Transcript(Message):
    """All moves of a dispute, in the order in which they were accepted."""

    context: DisputeContext
    moves: tuple[SignedMove, ...] = Field(max_length=limits.MAX_DISPUTE_MOVES)


# ---- output of the machine ---------------------------------------------------------------------


class Turn(Enum):
    SPLIT = "split"
    LEAF = "leaf"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Question:
    """A question to both parties, due at ``deadline_s``, about the leaves start … end - 1.

    ``is_operation`` says which of the two trees; ``proofs`` are the leaves to prove; ``step`` and
    ``root`` name the value once it is found.
    """

    number: int
    turn: Turn
    is_operation: bool
    start: int
    end: int
    proofs: tuple[int, ...]
    step: int
    root: int
    deadline_s: float


class Place(Enum):
    INPUT = "input"  # the parties used different inputs: compare both with the committed ones
    KERNEL = "kernel"  # same class: ``node`` is the value that one kernel writes
    OPERATION = "operation"  # the reference results for ``node`` differ
    VALUE = "value"  # the kernel's outputs differ; the reference results do not
    TOO_LARGE = "too large"  # for the reference; the parties are of different classes
    BROKEN = "broken"  # a move contradicts what its party committed to
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Finding:
    """The first difference: ``claims`` are the parties' digests, ``operands`` the agreed digests.

    ``root`` is the value in memory; ``node`` the operation within its region, else the same.
    ``operands`` are those of ``node``. BROKEN and SILENT name ``liars`` at once.
    """

    place: Place
    step: int = 0
    root: int = 0
    node: int = 0
    claims: tuple[str, str] = ("", "")
    operands: Mapping[int, str] = field(default_factory=dict)
    liars: tuple[Party, ...] = ()


# ---- transition --------------------------------------------------------------------------------


class Dispute:
    """The referee's side. ``question`` is open until ``finding`` is there."""

    def __init__(self, context: DisputeContext, graph: CheckedGraph, now_s: float) -> None:
        """Begin; raise InvalidInput unless graph and rows are the task's and the roots differ."""
        if compute_task_id(graph) != context.task_id:
            raise InvalidInput(f"the graph is not that of task {context.task_id}")
        if context.roots[0] == context.roots[1]:
            raise InvalidInput("the parties committed to the same root; nothing is disputed")
        self.context = context
        self.layout = ValueLayout(graph, context.rows)
        self.moves: list[SignedMove] = []
        self.finding: Finding | None = None
        self._id = context.digest(DISPUTE_DOMAIN)
        self._answers: dict[Party, Move] = {}
        self._number = 0
        self._step = self._root = 0
        self._claims = ("", "")
        self._operands: dict[int, str] = {}
        self._region: list[int] = []
        self._enter(False, self.layout.count, context.roots, now_s)

    def _enter(self, is_operation: bool, count: int, roots: tuple[str, str], now_s: float) -> None:
        """Start at the root of one of the two trees."""
        self._is_operation, self._count = is_operation, count
        self._roots = self._hashes = (bytes.fromhex(roots[0]), bytes.fromhex(roots[1]))
        self._ask_range(0, count, now_s)

    def receive(self, signed: SignedMove, now_s: float) -> Question | None:
        """Take a move; return the next question when both parties have answered.

        A repeated move changes nothing. Raises PeerFault or BadSignature for a move that is not of
        this dispute. A signed move that contradicts its party's commitment ends the dispute.
        """
        move = signed.move
        if move.dispute != self._id:
            raise PeerFault(f"the move is for another dispute than {self._id}")
        if self.finding is not None or move.turn < self._number or move.party in self._answers:
            return None
        if move.turn > self._number:
            raise PeerFault(f"the move is for turn {move.turn}; the dispute is at {self._number}")
        key, signature = self.context.signing_keys[move.party], bytes.fromhex(signed.signature[2:])
        verify(key, MOVE_DOMAIN, move.canonical_bytes(), signature)
        self.moves.append(signed)
        if not self._is_consistent(move):
            self._end(Finding(Place.BROKEN, self._step, self._root, liars=(move.party,)))
            return None
        self._answers[move.party] = move
        if len(self._answers) < 2:
            return None
        first, second = self._answers[0], self._answers[1]
        self._answers = {}
        self._number += 1
        self._advance(first, second, now_s)
        return None if self.finding else self.question

    def tick(self, now_s: float) -> None:
        """After the deadline end the dispute against the parties that did not answer."""
        if self.finding is None and now_s >= self.question.deadline_s:
            silent = tuple(party for party in PARTIES if party not in self._answers)
            self._end(Finding(Place.SILENT, self._step, self._root, liars=silent))

    def list_missing(self) -> tuple[Party, ...]:
        """Return the parties that have to move."""
        if self.finding is not None:
            return ()
        return tuple(party for party in PARTIES if party not in self._answers)

    def make_transcript(self) -> Transcript:
        """Return the transcript for ``check_transcript``."""
        return Transcript(context=self.context, moves=tuple(self.moves))

    def _is_consistent(self, move: Move) -> bool:
        """Return whether a move is consistent with its party's commitment."""
        question, own = self.question, self._hashes[move.party]
        hashes = [bytes.fromhex(text) for text in move.hashes]
        if tuple(proof.leaf for proof in move.proofs) != question.proofs:
            return False
        if question.turn is Turn.SPLIT:
            return len(hashes) == 2 and hash_children(*hashes) == own
        if len(hashes) != 1:
            return False
        if question.turn is Turn.OPEN:
            return True
        return hash_leaf(hashes[0]) == own and all(
            is_leaf(
                self._roots[move.party],
                self._count,
                proof.leaf,
                bytes.fromhex(proof.value),
                [bytes.fromhex(text) for text in proof.siblings],
            )
            for proof in move.proofs
        )

    def _advance(self, first: Move, second: Move, now_s: float) -> None:
        question = self.question
        if question.turn is Turn.SPLIT:
            # the nodes differ, so one of their children does; all leaves left of it are equal
            side = 0 if first.hashes[0] != second.hashes[0] else 1
            self._hashes = (bytes.fromhex(first.hashes[side]), bytes.fromhex(second.hashes[side]))
            middle = split_range(question.start, question.end)
            bounds = (question.start, middle) if side == 0 else (middle, question.end)
            self._ask_range(*bounds, now_s)
        elif question.turn is Turn.OPEN:
            if first.hashes == second.hashes:
                self._end(self._find(Place.VALUE, self._root, self._claims))
            else:
                self._enter(True, len(self._region), (first.hashes[0], second.hashes[0]), now_s)
        else:
            self._take_leaf(first, second, now_s)

    def _take_leaf(self, first: Move, second: Move, now_s: float) -> None:
        claims = (first.hashes[0], second.hashes[0])
        digests = {proof.leaf: proof.value for proof in first.proofs}
        if self._is_operation:
            node = self._region[self.question.start]
            for src in self.layout.graph.nodes[node].srcs:
                if src in self._region:
                    self._operands[src] = digests[self._region.index(src)]
            self._end(self._find(Place.OPERATION, node, claims))
            return
        self._step, root = self.layout.locate(self.question.start)
        self._claims = claims
        if root is None:
            self._end(Finding(Place.INPUT, self._step, claims=claims))
            return
        self._root, self._region = root, list_region(self.layout.graph, root)
        for index in list_operands(self.layout.graph, self._region):
            found = self.layout.find_operand(self._step, index)
            self._operands[index] = digests[found] if isinstance(found, int) else found
        if self.context.one_class:
            self._end(self._find(Place.KERNEL, root, claims))
        elif not _is_computable(self.layout, self._step, self._region):
            self._end(self._find(Place.TOO_LARGE, root, claims))
        else:
            self._ask(Turn.OPEN, 0, len(self._region), (), now_s)

    def _ask_range(self, start: int, end: int, now_s: float) -> None:
        if end - start > 1:
            self._ask(Turn.SPLIT, start, end, (), now_s)
            return
        self._ask(Turn.LEAF, start, end, tuple(self._list_proofs(start)), now_s)

    def _list_proofs(self, leaf: int) -> list[int]:
        """Return the leaves that hold the operands of a leaf; all of them come before it."""
        graph = self.layout.graph
        if self._is_operation:
            sources = set(graph.nodes[self._region[leaf]].srcs)
            return [place for place, index in enumerate(self._region) if index in sources]
        step, root = self.layout.locate(leaf)
        if root is None:
            return []
        operands = list_operands(graph, list_region(graph, root))
        found = {self.layout.find_operand(step, index) for index in operands}
        return sorted(place for place in found if isinstance(place, int))

    def _ask(self, turn: Turn, start: int, end: int, proofs: tuple[int, ...], now_s: float) -> None:
        self.question = Question(
            number=self._number,
            turn=turn,
            is_operation=self._is_operation,
            start=start,
            end=end,
            proofs=proofs,
            step=self._step,
            root=self._root,
            deadline_s=now_s + limits.DISPUTE_ROUND_S,
        )

    def _find(self, place: Place, node: int, claims: tuple[str, str]) -> Finding:
        wanted = self._operands
        if place is Place.OPERATION:
            sources = self.layout.graph.nodes[node].srcs
            wanted = {src: self._operands[src] for src in sources}
        return Finding(place, self._step, self._root, node, claims, wanted)

    def _end(self, finding: Finding) -> None:
        self.finding = finding


def _is_computable(layout: ValueLayout, step: int, region: list[int]) -> bool:
    return is_computable(layout.bind(step), region)


@dataclass(slots=True)
class Prover:
    """A party's side: answers questions from its own trees.

    ``trace`` gives the digests of the operation trace of the value at (step, root); it is asked
    once.
    """

    context: DisputeContext
    party: Party
    identity: Identity
    tree: MerkleTree
    trace: Callable[[int, int], list[bytes]]
    _operations: MerkleTree | None = None

    def answer(self, question: Question) -> SignedMove:
        """Return the signed move."""
        tree = self.tree
        if question.is_operation or question.turn is Turn.OPEN:
            if self._operations is None:
                self._operations = MerkleTree(self.trace(question.step, question.root))
            tree = self._operations
        if question.turn is Turn.OPEN:
            hashes = [tree.root]
        elif question.turn is Turn.LEAF:
            hashes = [tree.digests[question.start]]
        else:
            middle = split_range(question.start, question.end)
            hashes = [
                tree.hash_range(question.start, middle),
                tree.hash_range(middle, question.end),
            ]
        move = Move(
            dispute=self.context.digest(DISPUTE_DOMAIN),
            party=self.party,
            turn=question.number,
            hashes=tuple(item.hex() for item in hashes),
            proofs=tuple(
                LeafProof(
                    leaf=leaf,
                    value=tree.digests[leaf].hex(),
                    siblings=tuple(item.hex() for item in tree.prove(leaf)),
                )
                for leaf in question.proofs
            ),
        )
        signature = self.identity.sign(MOVE_DOMAIN, move.canonical_bytes())
        return SignedMove(move=move, signature="0x" + signature.hex())
