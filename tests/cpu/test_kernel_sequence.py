"""The loop of machine code calls what ctypes calls, with the same arguments, in the same order."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from splitup.cpu.kernel_sequence import Native, is_supported, join_launches

pytestmark = pytest.mark.skipif(not is_supported(), reason="needs Linux on x86-64")
Called = list[tuple[int, ...]]


def make_native(
    called: Called, arguments: list[ctypes.c_uint64]
) -> tuple[Callable[[], None], Native]:
    """Return a function in C's conventions that notes its arguments, both ways."""
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_uint64] * len(arguments))(
        lambda *numbers: called.append(numbers)
    )
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return lambda: function(*arguments), Native(address, arguments)


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 8, 9, 20])
def test_registers_and_stack_hold_the_arguments(count: int) -> None:
    called: Called = []
    words = [ctypes.c_uint64(2**63 + n) for n in range(count)]
    launch, native = make_native(called, words)
    (joined,) = join_launches([launch] * 3, [[native]] * 3)
    joined()
    assert called == [tuple(word.value for word in words)] * 3
    for word in words:  # they are read when the kernel is launched
        word.value += 100
    joined()
    launch()
    assert called[3:] == [tuple(word.value for word in words)] * 4


def test_what_is_no_machine_code_keeps_its_place() -> None:
    called: Called = []
    parts = [make_native(called, [ctypes.c_uint64(n)] * (n + 4)) for n in range(6)]
    launches = [launch for launch, _ in parts]
    natives = [[] if n == 3 else [native] for n, (_, native) in enumerate(parts)]
    joined = join_launches(launches, natives)
    assert len(joined) == 3
    for launch in joined:
        launch()
    assert called == [(n,) * (n + 4) for n in range(6)]


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_wait_for_each_other_around_what_they_divide(threads: int) -> None:
    called: Called = []
    kernels: list[tuple[int, int]] = [(0, 1), (1, threads), (2, threads), (3, 1), (4, 2), (5, 1)]
    made = [
        [make_native(called, [ctypes.c_uint64(kernel), ctypes.c_uint64(part)]) for part in range(n)]
        for kernel, n in kernels
    ]
    launches = [parts[0][0] for parts in made]
    (joined,) = join_launches(
        launches, [[native for _, native in parts] for parts in made], threads
    )
    for _ in range(20):
        called.clear()
        joined()
        assert [kernel for kernel, _ in called] == [k for k, n in kernels for _ in range(n)]
        assert sorted(called) == [(k, part) for k, n in kernels for part in range(n)]
