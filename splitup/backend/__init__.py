"""Running a task with tinygrad: compiling, memory, launching, and the kernel cache."""
