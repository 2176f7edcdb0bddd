"""Set before torch is loaded: tests compute with one thread each, unless they test threads and say so.

Two test processes with two spinning threads each take twice as long on two cores, and many times as long on a machine
whose cores are taken away now and then.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
