from __future__ import annotations

from collections.abc import Callable

import pytest

from splitup.cpu.assembler import (
    R8,
    R9,
    R10,
    R11,
    R12,
    R13,
    R14,
    R15,
    RAX,
    RBX,
    RCX,
    RDI,
    RSI,
    Assembler,
    Mem,
)

# what GNU objdump 2.40 (-M intel) makes of the bytes is on the left
VECTORS: dict[str, tuple[Callable[[Assembler], None], str]] = {
    "mov [rax+0x8], r14": (lambda a: a.store(Mem(RAX, 8), R14), "4c89b008000000"),
    "sub rsi, r8": (lambda a: a.subtract(RSI, R8), "492bf0"),
    "cmp r11, rcx": (lambda a: a.compare(R11, RCX), "4c3bd9"),
    "cmovl r14, r10": (lambda a: a.load_if("l", R14, R10), "4d0f4cf2"),
    "vpcmpeqd ymm1, ymm0, [rcx-0x20]": (
        lambda a: a.compare_int32(1, 0, Mem(RCX, -32)),
        "c4e17d7689e0ffffff",
    ),
    "vpermilps ymm13, ymm15, 0xe": (lambda a: a.arrange(13, 15, 0b1110), "c4437d04ef0e"),
    "vpxor ymm3, ymm12, [r15+0x40]": (
        lambda a: a.differ(3, 12, Mem(R15, 64)),
        "c4c11def9f40000000",
    ),
    "vpcmpgtd ymm9, ymm1, ymm14": (lambda a: a.is_greater_int32(9, 1, 14), "c4417566ce"),
    "vcmplt_oqps ymm2, ymm9, [r15+0x20]": (
        lambda a: a.is_less(2, 9, Mem(R15, 32)),
        "c4c134c2972000000011",
    ),
    "vcmpneqps ymm10, ymm3, ymm3": (lambda a: a.is_not(10, 3, 3), "c46164c2d304"),
    "vcvttps2dq ymm8, ymm12": (lambda a: a.truncate(8, 12), "c4417e5bc4"),
    "vpaddd ymm1, ymm9, [r15+0x60]": (
        lambda a: a.add_int32(1, 9, Mem(R15, 96)),
        "c4c135fe8f60000000",
    ),
    "vpmulld ymm11, ymm2, [r15]": (
        lambda a: a.multiply_int32(11, 2, Mem(R15)),
        "c4426d409f00000000",
    ),
    "vsubps ymm0, ymm13, ymm1": (lambda a: a.subtract_floats(0, 13, 1), "c4e1145cc1"),
    "vdivps ymm12, ymm4, [r15+0x20]": (
        lambda a: a.divide(12, 4, Mem(R15, 32)),
        "c4415c5ea720000000",
    ),
    "vsqrtps ymm9, ymm2": (lambda a: a.square_root(9, 2), "c4617c51ca"),
    "vmaxps ymm15, ymm14, ymm15": (lambda a: a.take_greater(15, 14, 15), "c4410c5fff"),
    "vpsravd ymm3, ymm11, [r15+0xa0]": (
        lambda a: a.shift_lanes_right_signed(3, 11, Mem(R15, 160)),
        "c4c225469fa0000000",
    ),
    "vmovmskps r9, ymm12": (lambda a: a.get_signs(R9, 12), "c4417c50cc"),
    "vptest ymm9, ymm9": (lambda a: a.test_bits(9), "c4427d17c9"),
    "push rbx": (lambda a: a.push(RBX), "53"),
    "push r12": (lambda a: a.push(R12), "4154"),
    "call rax": (lambda a: a.call(RAX), "ffd0"),
    "call r11": (lambda a: a.call(R11), "41ffd3"),
    "mov rbp, rsp": (lambda a: a.load(5, 4), "488bec"),
    "mov rsp, rbp": (lambda a: a.load(4, 5), "488be5"),
    "mov r8, [rdi+0x10]": (lambda a: a.load(R8, Mem(RDI, 16)), "4c8b8710000000"),
    "add r9, [rsi+0x8]": (lambda a: a.add(R9, Mem(RSI, 8)), "4c038e08000000"),
    "add r11, -4": (lambda a: a.add_const(R11, -4), "4981c3fcffffff"),
    "cmp r12, 3": (lambda a: a.compare_const(R12, 3), "4981fc03000000"),
    "movsxd r9, [r13-0x4]": (lambda a: a.load_int32(R9, Mem(R13, -4)), "4d638dfcffffff"),
    "and r10, 255": (lambda a: a.and_const(R10, 255), "4981e2ff000000"),
    "imul r9, r9, -3": (lambda a: a.multiply_const(R9, -3), "4d69c9fdffffff"),
    "cmovl rcx, [rdi+0x48]": (lambda a: a.load_if("l", RCX, Mem(RDI, 72)), "480f4c8f48000000"),
    "cmovg r8, [r9+0x50]": (lambda a: a.load_if("g", R8, Mem(R9, 80)), "4d0f4f8150000000"),
    "mov rax, 77": (lambda a: a.set_const(RAX, 77), "48c7c04d000000"),
    "mov rbp, r14": (lambda a: a.load(5, R14), "498bee"),
    "vxorps ymm9": (lambda a: a.zero(9), "c4413457c9"),
    "vmovups ymm14, [rcx+0x64]": (lambda a: a.load_vector(14, Mem(RCX, 100)), "c4617c10b164000000"),
    "vmovups [r14-0x20], ymm3": (lambda a: a.store_vector(3, Mem(R14, -32)), "c4c17c119ee0ffffff"),
    "vmovss [r8], xmm12": (lambda a: a.store_scalar(12, Mem(R8)), "c4417a11a000000000"),
    "vbroadcastss ymm13, [r13+4]": (lambda a: a.broadcast(13, Mem(R13, 4)), "c4427d18ad04000000"),
    "vpbroadcastb xmm14, [rcx+0x2]": (
        lambda a: a.broadcast_8(14, Mem(RCX, 2)),
        "c4627978b102000000",
    ),
    "vpmovzxbd ymm15, xmm14": (lambda a: a.widen_uint8(15, 14), "c4427d31fe"),
    "vpand ymm15, ymm14, [r15+0x20]": (
        lambda a: a.mask(15, 14, Mem(R15, 32)),
        "c4410ddbbf20000000",
    ),
    "vpor ymm15, ymm14, ymm13": (lambda a: a.combine(15, 14, 13), "c4410debfd"),
    "vpsllvd ymm15, ymm14, [r15+0x20]": (
        lambda a: a.shift_lanes_left(15, 14, Mem(R15, 32)),
        "c4420d47bf20000000",
    ),
    "vpsrlvd ymm15, ymm14, [r15+0x20]": (
        lambda a: a.shift_lanes_right(15, 14, Mem(R15, 32)),
        "c4420d45bf20000000",
    ),
    "vpermps ymm15, ymm14, [r15+0x20]": (
        lambda a: a.permute(15, 14, Mem(R15, 32)),
        "c4420d16bf20000000",
    ),
    "vblendvps ymm15, ymm14, ymm13, ymm12": (lambda a: a.blend(15, 14, 13, 12), "c4430d4afdc0"),
    "vaddps ymm15, ymm14, [r15+0x20]": (
        lambda a: a.add_floats(15, 14, Mem(R15, 32)),
        "c4410c58bf20000000",
    ),
    "vpbroadcastw xmm14, [rcx]": (
        lambda a: a.broadcast_16(14, Mem(RCX, 2)),
        "c4627979b102000000",
    ),
    "vcvtph2ps ymm14, xmm14": (lambda a: a.widen_half(14, 14), "c4427d13f6"),
    "vcvtph2ps ymm15, [r10+8]": (lambda a: a.widen_half(15, Mem(R10, 8)), "c4427d13ba08000000"),
    "vpmovsxbd ymm15, [r9+8]": (lambda a: a.widen_int8(15, Mem(R9, 8)), "c4427d21b908000000"),
    "vpmovzxwd ymm15, [r9+8]": (lambda a: a.widen_uint16(15, Mem(R9, 8)), "c4427d33b908000000"),
    "vpslld ymm15, ymm14, 16": (lambda a: a.shift_left(15, 14, 16), "c4c10572f610"),
    "vcvtdq2ps ymm15, ymm15": (lambda a: a.convert_int32(15, 15), "c4417c5bff"),
    "vmulps ymm15, ymm14, ymm13": (lambda a: a.multiply(15, 14, 13), "c4410c59fd"),
    "vfmadd231ps ymm11, ymm15, [rdx+0x40]": (
        lambda a: a.multiply_add(11, 15, Mem(2, 64)),
        "c46205b89a40000000",
    ),
    "vaddps xmm1, xmm2, xmm9": (lambda a: a.add_half_vectors(1, 2, 9), "c4c16858c9"),
    "vhaddps ymm1, ymm9, ymm12": (lambda a: a.add_pairs(1, 9, 12), "c4c1377ccc"),
    "vextractf128 xmm10, ymm3, 1": (lambda a: a.get_upper_half(10, 3), "c4c37d19da01"),
    "vzeroupper": (lambda a: a.forget_upper_halves(), "c5f877"),
}


@pytest.mark.parametrize("text", VECTORS)
def test_encodings(text: str) -> None:
    asm = Assembler()
    emit, expected = VECTORS[text]
    emit(asm)
    assert asm.finish().hex() == expected


def test_jumps_reach_their_labels_forwards_and_backwards() -> None:
    asm = Assembler()
    asm.label("top")
    asm.jump("jl", "end")
    asm.jump("jmp", "top")
    asm.label("end")
    assert asm.finish().hex() == "0f8c05000000" + "e9f5ffffff"


def test_the_address_of_a_label_is_relative() -> None:
    asm = Assembler()
    asm.load_address(R15, "here")  # lea r15, [rip+0x1]
    asm.ret()
    asm.label("here")
    assert asm.finish().hex() == "4c8d3d01000000" + "c3"
