"""The threads of the C kernels: every piece is computed once, whoever calls, after a fork too."""

import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from shoal.kernels.cpu import Library, compiled, find, make
from shoal.kernels.weights import DenseWeight
from tests.kernels.ragged import Tables

pytestmark = pytest.mark.skipif(not isinstance(find(), Library), reason="needs the C kernels")

PROGRAM = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#define INLINE static inline
#include "pool.c"

typedef struct { int *seen; long total; } Work;
static void piece(void *work, long n) {
  Work *w = work;
  w->seen[n]++;
  for (volatile int spin = 0; spin < (n * 7919) % 300; spin++) {}
}

static void *call_often(void *seed) {
  int seen[64];
  for (long round = 0; round < 3000; round++) {
    long count = (round * 31 + (long)seed) % 64;
    for (int n = 0; n < 64; n++) seen[n] = 0;
    Work work = {seen, count};
    share(1 + (int)(round % 6), count, piece, &work);
    for (long n = 0; n < 64; n++)
      if (seen[n] != (n < count)) return (void *)1;
    if (round % 500 == 0) nanosleep(&(struct timespec){0, 1000000}, NULL); /* the workers fall asleep */
  }
  return NULL;
}

int main(void) {
  pthread_t other;
  void *failed, *failed_too;
  pthread_create(&other, NULL, call_often, (void *)5);
  failed = call_often((void *)0);
  pthread_join(other, &failed_too);
  puts(failed || failed_too ? "wrong" : "right");
  return failed || failed_too;
}
"""


@pytest.fixture
def several_threads() -> "pytest.Generator[None]":
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_every_piece_is_computed_once_whoever_calls(sanitizer: str, tmp_path: Path) -> None:
    """Two threads call at the same time, with all numbers of threads and pieces."""
    compiler = compiled._compiler()
    assert compiler is not None
    (tmp_path / "program.c").write_text(PROGRAM)
    flags = ["-O1", "-g", "-std=gnu11", "-pthread", f"-I{compiled.SOURCE.parent}", f"-fsanitize={sanitizer}"]
    made = subprocess.run(
        [compiler, *flags, "program.c", "-o", "program"], cwd=tmp_path, capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"this compiler has no {sanitizer} sanitizer: {made.stderr[-200:]}")
    ran = subprocess.run(["./program"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("the sanitizer does not run on this kernel")
    assert (ran.returncode, ran.stdout) == (0, "right\n"), ran.stderr[-3000:]


def products() -> torch.Tensor:
    ops = make()
    torch.manual_seed(0)
    x, weight = torch.randn(9, 512), DenseWeight(torch.randn(700, 512))
    return ops.linear(x, weight, None)


def test_two_callers_at_a_time(several_threads: None) -> None:
    ops = make()
    torch.manual_seed(0)
    x, weight = torch.randn(9, 512), DenseWeight(torch.randn(700, 512))
    wanted = ops.linear(x, weight, None)
    found: list[bool] = []

    def call() -> None:
        torch.set_num_threads(3)
        found.extend(torch.equal(ops.linear(x, weight, None), wanted) for _ in range(50))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [True] * 150


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(several_threads: None) -> None:
    wanted = products()
    child = os.fork()
    if child == 0:
        right = False
        try:
            torch.set_num_threads(3)
            right = torch.equal(products(), wanted)
        finally:
            os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_pass_is_the_same_on_any_number_of_threads() -> None:
    """Attention, whose pieces differ most."""
    ops, tables = make(), Tables([700, 3, 64], 16)
    torch.manual_seed(0)
    cache = torch.randn(2, tables.blocks, 16, 2, 64)
    batch = tables.batch([(0, 650, 50), (1, 2, 1), (2, 63, 1)])
    q = torch.randn(batch.starts[-1], 6, 64)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(ops.attention(q, cache[0], cache[1], batch, 0.1, 0))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
