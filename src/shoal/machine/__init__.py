"""What this machine lets the engine use: CPUs, CPU time and memory, as Linux's files tell it."""
