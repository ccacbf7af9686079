"""Disputes between parties that compute one small task on a device, on the reference, or lie."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitup.backend.runtime import TaskProgram
from splitup.backend.trace_recording import record_trace, run_kernel
from splitup.core import limits
from splitup.core.errors import BadSignature, InvalidInput, PeerFault
from splitup.crypto.keys import Identity, generate_identity
from splitup.graph.arrays import decode_array, encode_array
from splitup.graph.ir import Graph, compute_task_id, encode_float
from splitup.graph.reference import compute_nodes, list_operands, list_region
from splitup.graph.rules import check_graph
from splitup.graph.value_trace import (
    MerkleTree,
    ValueLayout,
    cut_region,
    decode_operands,
    expose_values,
    hash_children,
    hash_leaf,
    is_leaf,
    trace_operations,
)
from splitup.protocol.disputes.bisection import (
    MOVE_DOMAIN,
    Dispute,
    DisputeContext,
    Place,
    Prover,
    SignedMove,
    Transcript,
    Turn,
)
from splitup.protocol.disputes.judging import Judgement, check_transcript, judge
from tests.graph.graphs import Builder, compute_graph

STEPS = 3


def make_task() -> Builder:
    """h = W x; s' = s + h; y = 2^(s'/8) / sum, over three steps: sums, a state, a division."""
    b = Builder()
    rng = np.random.default_rng(1)
    x = b.input("x", "float32", 24)
    w = b.weight("w", rng.standard_normal((24, 16)).astype(np.float32))
    s = b.state("s", "float32", 16)
    column = b.add("RESHAPE", "float32", x, arg=(24, 1))
    h = b.store(
        "float32",
        b.add("REDUCE", "float32", b.add("MUL", "float32", w, column), arg=("ADD", 1)),
    )
    total = b.store("float32", b.add("ADD", "float32", s, h))
    eighth = b.const("float32", encode_float(0.125))
    power = b.add("EXP2", "float32", b.add("MUL", "float32", total, eighth))
    fold = b.add("REDUCE", "float32", power, arg=("ADD", 1))
    b.store("float32", b.add("FDIV", "float32", power, fold))
    return b


BUILDER = make_task()
STORED = [i for i, node in enumerate(BUILDER.nodes) if node.op == "CONTIGUOUS"]
GRAPH = check_graph(BUILDER.graph({"y": STORED[2]}, [STORED[1]]))
ROWS = ((),) * STEPS  # no symbols
LAYOUT = ValueLayout(GRAPH, ROWS)
INPUTS = [
    [np.random.default_rng(step).standard_normal(24).astype(np.float32).tobytes()]
    for step in range(STEPS)
]
KEYS: tuple[Identity, Identity] = (generate_identity(), generate_identity())


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass
class World:
    """Every value that somebody has shown, by digest."""

    blobs: dict[str, bytes] = field(default_factory=dict)

    def keep(self, data: bytes) -> None:
        self.blobs[sha(data).hex()] = data

    def get(self, digest: str) -> bytes | None:
        return self.blobs.get(digest)


def make_world() -> World:
    world = World()
    for data in BUILDER.weight_bytes.values():
        world.keep(data)
    world.keep(bytes(64))  # the state at first
    return world


def compute_on_device(world: World) -> list[bytes]:
    """Return the values of all leaves as this process's device gives them."""
    values: list[bytes] = []

    def keep(data: bytes) -> None:
        world.keep(data)
        values.append(data)

    record_trace(GRAPH, lambda name: memoryview(BUILDER.weight_bytes[name]), INPUTS, keep)
    return values


def compute_on_reference(
    world: World, tamper: Callable[[int, int, np.ndarray], np.ndarray]
) -> list[bytes]:
    """Return the values of all leaves of another class: sums in the reference's order."""
    state = np.zeros(16, np.float32)
    weight = np.frombuffer(BUILDER.weight_bytes["w"], np.float32).reshape(24, 16)
    leaves: list[bytes] = []
    for step, (data,) in enumerate(INPUTS):
        known = {
            ("INPUT", 0): np.frombuffer(data, np.float32),
            ("WEIGHT", 0): weight,
            ("STATE", 0): state,
        }
        values = compute_graph(GRAPH, known)
        changed = {}
        for node in STORED:
            changed[node] = tamper(step, node, values[node])
            if changed[node] is not values[node]:  # what follows is computed from the lie
                changed |= _follow(values, node, changed[node])
                break
        leaves.append(data)
        leaves += [changed.get(node, values[node]).tobytes() for node in STORED]
        state = changed.get(STORED[1], values[STORED[1]])
    for data in leaves:
        world.keep(data)
    return leaves


def _follow(values: dict[int, np.ndarray], node: int, value: np.ndarray) -> dict[int, np.ndarray]:
    new = {**values, node: value}
    compute_nodes(GRAPH, [i for i in range(node + 1, len(GRAPH.nodes)) if GRAPH.nodes[i].srcs], new)
    return {index: new[index] for index in STORED}


def honest(step: int, node: int, value: np.ndarray) -> np.ndarray:
    return value


def lie_at(step: int, node: int, amount: float) -> Callable[[int, int, np.ndarray], np.ndarray]:
    def tamper(s: int, n: int, value: np.ndarray) -> np.ndarray:
        if (s, n) != (step, node):
            return value
        changed = value.copy()
        changed[3] += np.float32(amount)
        return changed

    return tamper


WORLD = make_world()
DEVICE = compute_on_device(WORLD)
REFERENCE = compute_on_reference(WORLD, honest)


def trace_honestly(values: list[bytes]) -> Callable[[int, int], list[bytes]]:
    """Return the function that traces a value's operations from the party's own operands."""

    def trace(step: int, root: int) -> list[bytes]:
        operands = {}
        for index in list_operands(GRAPH, list_region(GRAPH, root)):
            found = LAYOUT.find_operand(step, index)
            operands[index] = values[found] if isinstance(found, int) else WORLD.blobs[found]
        return trace_operations(LAYOUT, step, root, operands)

    return trace


def make_context(
    trees: tuple[MerkleTree, MerkleTree], *, one_class: bool = False
) -> DisputeContext:
    return DisputeContext(
        execution_id="0x" + "ee" * 32,
        index=4,
        task_id=compute_task_id(GRAPH),
        rows=ROWS,
        signing_keys=(KEYS[0].signing_key_hex, KEYS[1].signing_key_hex),
        roots=(trees[0].root.hex(), trees[1].root.hex()),
        one_class=one_class,
    )


def make_parties(
    executor: list[bytes], challenger: list[bytes], *, one_class: bool = False
) -> tuple[Dispute, tuple[Prover, Prover]]:
    trees = (MerkleTree(list(map(sha, executor))), MerkleTree(list(map(sha, challenger))))
    context = make_context(trees, one_class=one_class)
    provers = (
        Prover(context, 0, KEYS[0], trees[0], trace_honestly(executor)),
        Prover(context, 1, KEYS[1], trees[1], trace_honestly(challenger)),
    )
    return Dispute(context, GRAPH, 0.0), provers


def play(dispute: Dispute, provers: tuple[Prover, Prover]) -> int:
    """Move until the end; return the number of turns."""
    turns = 0
    while dispute.finding is None:
        question = dispute.question
        for prover in reversed(provers):
            dispute.receive(prover.answer(question), 0.0)
        turns += 1
    return turns


def settle(
    dispute: Dispute, run_kernel: Callable[[Graph, list[bytes]], bytes] | None = None
) -> Judgement:
    """Judge what was found, and see that anybody comes to the same from the transcript."""
    assert dispute.finding is not None
    result = judge(dispute.finding, dispute.layout, WORLD.get, run_kernel)
    transcript = Transcript.parse(dispute.make_transcript().canonical_bytes())
    assert check_transcript(transcript, GRAPH.to_bytes(), WORLD.get, run_kernel) == result
    return result


# ---- trees -------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.data())
def test_every_leaf_of_a_tree_can_be_proved_and_no_other(count: int, data: st.DataObject) -> None:
    digests = [sha(bytes([index])) for index in range(count)]
    tree = MerkleTree(digests)
    index = data.draw(st.integers(0, count - 1))
    proof = tree.prove(index)
    assert is_leaf(tree.root, count, index, digests[index], proof)
    assert not is_leaf(tree.root, count, index, sha(b"other"), proof)
    for other in {*range(-1, count + 1)} - {index}:
        assert not is_leaf(tree.root, count, other, digests[index], proof)
    assert not is_leaf(
        tree.root, count, index, digests[index], (*proof, proof[0] if proof else b"")
    )


def test_trees_are_those_of_certificate_transparency() -> None:
    a, b, c = (sha(bytes([n])) for n in range(3))
    left = hash_children(hash_leaf(a), hash_leaf(b))
    assert MerkleTree([a, b, c]).root == hash_children(left, hash_leaf(c))
    assert MerkleTree([a]).root == hash_leaf(a) == hashlib.sha256(b"\0" + a).digest()
    with pytest.raises(InvalidInput):
        MerkleTree([])


# ---- traces ------------------------------------------------------------------------------------


def test_a_trace_holds_what_the_task_itself_gives() -> None:
    program = TaskProgram(GRAPH.to_bytes(), BUILDER.safetensors())
    state = program.new_state()
    for step in range(STEPS):
        (result,) = program.run(state, INPUTS[step])
        assert DEVICE[step * LAYOUT.width + LAYOUT.width - 1] == result


def test_a_kernel_on_its_own_gives_the_bytes_of_the_whole_task() -> None:
    for root in STORED:
        region = cut_region(GRAPH, root)
        operands = []
        for index in list_operands(GRAPH, list_region(GRAPH, root)):
            found = LAYOUT.find_operand(1, index)
            operands.append(DEVICE[found] if isinstance(found, int) else WORLD.blobs[found])
        slot = LAYOUT.width + len(GRAPH.inputs) + STORED.index(root)
        assert run_kernel(region, operands) == DEVICE[slot]


def test_many_values_are_exposed_in_parts() -> None:
    b = Builder()
    x = b.input("x", "float32", 2)
    for _ in range(limits.MAX_PORTS + 1):
        x = b.store("float32", b.add("NEG", "float32", x))
    graph = b.graph({"y": x})
    parts = expose_values(check_graph(graph))
    assert [len(part.outputs) for part in parts] == [limits.MAX_PORTS, 1]


def test_device_and_reference_differ_and_yet_are_honest() -> None:
    assert DEVICE != REFERENCE  # otherwise the tests below say nothing
    for step in range(STEPS):
        for slot, root in enumerate(STORED, 1):
            one, other = (
                decode_array(LAYOUT.get_spec(step, root), values[step * LAYOUT.width + slot])
                for values in (DEVICE, REFERENCE)
            )
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


# ---- disputes ----------------------------------------------------------------------------------


def test_two_honest_classes_are_not_punished() -> None:
    dispute, provers = make_parties(DEVICE, REFERENCE)
    turns = play(dispute, provers)
    assert dispute.finding is not None and dispute.finding.place is Place.VALUE
    assert turns <= 6  # 12 leaves: four splits, the leaf, the operations' root
    result = settle(dispute)
    assert (result.liars, result.is_decided) == ((), False)


@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize("node", STORED)
@pytest.mark.parametrize("liar", [0, 1])
def test_a21_a_lie_is_found_where_it_was_told(step: int, node: int, liar: int) -> None:
    lie = compute_on_reference(WORLD, lie_at(step, node, 0.01))
    pair = (lie, REFERENCE) if liar == 0 else (REFERENCE, lie)
    dispute, provers = make_parties(*pair)
    play(dispute, provers)
    finding = dispute.finding
    assert finding is not None
    assert (finding.place, finding.step, finding.root) == (Place.VALUE, step, node)
    result = settle(dispute)
    assert (result.liars, result.is_decided) == ((liar,), True), result


@pytest.mark.parametrize("liar", [0, 1])
def test_a21_a_lie_against_another_class_is_found(liar: int) -> None:
    lie = compute_on_reference(WORLD, lie_at(0, STORED[0], 0.01))
    dispute, provers = make_parties(*((lie, DEVICE) if liar == 0 else (DEVICE, lie)))
    play(dispute, provers)
    assert settle(dispute).liars == (liar,)


def test_within_a_class_the_kernel_decides_by_equal_bytes() -> None:
    lie = list(DEVICE)
    slot = LAYOUT.width + len(GRAPH.inputs) + 1  # the state, in the second step
    value = np.frombuffer(lie[slot], np.float32).copy()
    value[0] = np.nextafter(value[0], np.float32(9))  # one unit in the last place
    lie[slot] = value.tobytes()
    WORLD.keep(lie[slot])
    for liar, pair in enumerate(((lie, DEVICE), (DEVICE, lie))):
        dispute, provers = make_parties(*pair, one_class=True)
        play(dispute, provers)
        assert dispute.finding is not None
        assert (dispute.finding.place, dispute.finding.root) == (Place.KERNEL, STORED[1])
        assert not settle(dispute).is_decided  # on paper alone it cannot be
        assert settle(dispute, run_kernel).liars == (liar,)


@given(st.integers(0, 4), st.sampled_from([0, 1]))
@settings(max_examples=10, deadline=None)
def test_a_lie_about_one_operation_is_found(position: int, liar: int) -> None:
    lie = compute_on_reference(WORLD, lie_at(1, STORED[2], 0.05))
    dispute, provers = make_parties(*((lie, REFERENCE) if liar == 0 else (REFERENCE, lie)))
    honest_trace = provers[liar].trace

    def trace(step: int, root: int) -> list[bytes]:
        digests = honest_trace(step, root)
        return [
            *digests[:position],
            *(sha(b"made up %d" % i) for i in range(position, len(digests))),
        ]

    provers[liar].trace = trace
    play(dispute, provers)
    finding = dispute.finding
    assert finding is not None
    assert finding.place is Place.OPERATION
    assert finding.node == list_region(GRAPH, STORED[2])[position]
    # the operands' bytes are computed by whoever checks, or shown by the parties
    arrays = compute_region_arrays(step=1, root=STORED[2])
    for index in finding.operands:
        WORLD.keep(encode_array("float32", arrays[index]))
    result = settle(dispute)
    assert (result.liars, result.is_decided) == ((liar,), True)


def compute_region_arrays(step: int, root: int) -> dict[int, np.ndarray]:
    operands = {}
    for index in list_operands(GRAPH, list_region(GRAPH, root)):
        found = LAYOUT.find_operand(step, index)
        operands[index] = REFERENCE[found] if isinstance(found, int) else WORLD.blobs[found]
    arrays = decode_operands(LAYOUT, step, operands)
    compute_nodes(GRAPH, list_region(GRAPH, root), arrays)
    return arrays


def test_other_inputs_are_nobodys_lie() -> None:
    other = list(REFERENCE)
    other[LAYOUT.width] = bytes(96)
    dispute, provers = make_parties(REFERENCE, other)
    play(dispute, provers)
    assert dispute.finding is not None
    assert (dispute.finding.place, dispute.finding.step) == (Place.INPUT, 1)
    assert settle(dispute).liars == ()


def test_whoever_is_silent_at_the_deadline_loses() -> None:
    for present in (0, 1):
        dispute, provers = make_parties(DEVICE, REFERENCE)
        dispute.receive(provers[present].answer(dispute.question), 0.0)
        dispute.tick(limits.DISPUTE_ROUND_S - 1)
        assert dispute.finding is None and dispute.list_missing() == (1 - present,)
        early = check_transcript(dispute.make_transcript(), GRAPH.to_bytes(), WORLD.get)
        assert (early.liars, early.is_decided) == ((1 - present,), False)
        dispute.tick(limits.DISPUTE_ROUND_S)
        assert dispute.finding is not None
        assert (dispute.finding.place, dispute.finding.liars) == (Place.SILENT, (1 - present,))
        assert dispute.receive(provers[1 - present].answer(dispute.question), 99.0) is None


def test_each_turn_has_its_own_deadline() -> None:
    dispute, provers = make_parties(DEVICE, REFERENCE)
    for prover in provers:
        dispute.receive(prover.answer(dispute.question), 50.0)
    assert dispute.question.deadline_s == 50.0 + limits.DISPUTE_ROUND_S


def sign_again(signed: SignedMove, identity: Identity, **changes: object) -> SignedMove:
    move = signed.move.model_copy(update=changes)
    signature = identity.sign(MOVE_DOMAIN, move.canonical_bytes())
    return SignedMove(move=move, signature="0x" + signature.hex())


def test_a_signed_contradiction_loses() -> None:
    dispute, provers = make_parties(DEVICE, REFERENCE)
    good = provers[0].answer(dispute.question)
    bad = sign_again(good, KEYS[0], hashes=(good.move.hashes[1], good.move.hashes[0]))
    assert dispute.receive(bad, 0.0) is None
    assert dispute.finding is not None
    assert (dispute.finding.place, dispute.finding.liars) == (Place.BROKEN, (0,))
    assert settle(dispute).liars == (0,)


def test_a_false_proof_of_an_operand_loses() -> None:
    dispute, provers = make_parties(DEVICE, REFERENCE)
    while dispute.question.turn is not Turn.LEAF:
        for prover in provers:
            dispute.receive(prover.answer(dispute.question), 0.0)
    good = provers[1].answer(dispute.question)
    proof = good.move.proofs[0].model_copy(update={"value": "ab" * 32})
    for proofs in ((), (proof, *good.move.proofs[1:])):
        again = Dispute(dispute.context, GRAPH, 0.0)
        for signed in dispute.moves:
            again.receive(signed, 0.0)
        again.receive(sign_again(good, KEYS[1], proofs=proofs), 0.0)
        assert again.finding is not None and again.finding.liars == (1,)


def test_a15_a_move_counts_in_its_own_dispute_and_turn_only() -> None:
    dispute, provers = make_parties(DEVICE, REFERENCE)
    good = provers[0].answer(dispute.question)
    with pytest.raises(PeerFault, match="another dispute"):
        dispute.receive(sign_again(good, KEYS[0], dispute="0x" + "00" * 32), 0.0)
    with pytest.raises(PeerFault, match="turn 1"):
        dispute.receive(sign_again(good, KEYS[0], turn=1), 0.0)
    with pytest.raises(BadSignature):
        dispute.receive(sign_again(good, KEYS[1]), 0.0)  # signed by the other party
    with pytest.raises(BadSignature):
        dispute.receive(
            sign_again(good, KEYS[0]).model_copy(update={"signature": "0x" + "00" * 64}),
            0.0,
        )
    dispute.receive(good, 0.0)
    assert dispute.receive(good, 0.0) is None and len(dispute.moves) == 1  # duplicates are normal
    other = make_context((provers[0].tree, provers[1].tree), one_class=True)
    assert other.digest("x") != dispute.context.digest("x")


def test_whoever_does_not_show_its_value_loses() -> None:
    lie = compute_on_reference(WORLD, lie_at(0, STORED[0], 0.02))
    dispute, provers = make_parties(lie, REFERENCE)
    play(dispute, provers)
    assert dispute.finding is not None
    hidden = dispute.finding.claims[0]
    result = judge(dispute.finding, LAYOUT, lambda d: None if d == hidden else WORLD.get(d))
    assert result.liars == (0,)
    result = judge(dispute.finding, LAYOUT, lambda d: b"other bytes")  # not what was asked for
    assert (result.liars, result.is_decided) == ((), False)


def test_a_transcript_has_to_be_one() -> None:
    dispute, provers = make_parties(DEVICE, REFERENCE)
    play(dispute, provers)
    transcript = dispute.make_transcript()
    with pytest.raises(InvalidInput):
        check_transcript(transcript, cut_region(GRAPH, STORED[0]).to_bytes(), WORLD.get)
    twice = transcript.model_copy(update={"moves": (transcript.moves[0],) * 2})
    with pytest.raises(PeerFault, match="changes nothing"):
        check_transcript(twice, GRAPH.to_bytes(), WORLD.get)
    with pytest.raises(InvalidInput, match="nothing is disputed"):
        roots = (dispute.context.roots[0],) * 2
        Dispute(dispute.context.model_copy(update={"roots": roots}), GRAPH, 0.0)


def test_what_is_too_large_for_the_reference_punishes_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lie = compute_on_reference(WORLD, lie_at(0, STORED[0], 0.01))
    dispute, provers = make_parties(lie, REFERENCE)
    monkeypatch.setattr(limits, "MAX_REFERENCE_ELEMENTS", 100)
    play(dispute, provers)
    assert dispute.finding is not None and dispute.finding.place is Place.TOO_LARGE
    assert not settle(dispute).is_decided
