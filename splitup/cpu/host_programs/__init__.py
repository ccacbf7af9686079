"""The four host programs of tinygrad's CPU device, compiled, one JSON file per architecture.

``python -m splitup.cpu.host_programs`` makes the file for this machine's architecture anew; it
needs clang. Run it when the pinned tinygrad version changes.
"""
