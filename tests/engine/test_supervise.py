"""The supervisor with real processes that do nothing but live and die."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from tests.processes.stopping import stop

CHILD = """
import json, os, signal, sys, time
sys.path.insert(0, {source!r})
from shoal.engine.supervise import die_with_parent, say_ready
die_with_parent()
config = json.load(sys.stdin)
with open({log!r}, "a") as log:
    log.write(f"{{config['name']}} {{config['life']}} {{os.getpid()}}\\n")
if config.get("exit") is not None:
    sys.exit(config["exit"])
if config["life"] < config.get("die_young", 0):
    os.kill(os.getpid(), signal.SIGKILL)
def leave(number, frame):
    with open({log!r}, "a") as log:
        log.write(f"{{config['name']}} left\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if config.get("deaf") else leave)
signal.signal(signal.SIGUSR1, signal.SIG_IGN if config.get("deaf") else leave)
if config.get("after_fault"):
    with open({log!r}, "a") as log:
        log.write(f"{{config['name']}} after a fault\\n")
if config["life"] >= config.get("never_again", 99):
    sys.exit(1)
say_ready(config["ready_fd"])
beats = 0
while True:
    time.sleep(0.1)
    beats += 1
    if beats < config.get("beats", {{}}).get(str(config["life"]), 1e9):
        os.write(config["ready_fd"], b".")
    if beats == config.get("crash", {{}}).get(str(config["life"])):
        os.kill(os.getpid(), signal.SIGSEGV)
"""

SUPERVISOR = """
import json, logging, sys
logging.basicConfig()
from shoal.engine import supervise
from shoal.errors import EngineError
options = json.loads(sys.argv[1])
supervise.KILL_AFTER_S = options.get("kill_after_s", 60.0)
supervise.FIRST_PAUSE_S = 0.01
def child(name):
    more = options.get(name, {})
    def config(life):
        if life >= more.get("no_more", 99):
            raise EngineError("its folder is gone")
        return {"name": name, "life": life, **more}
    silence_s = more.get("silence_s", 0.0)
    return supervise.Child(name, "dummy_child", config, silence_s=silence_s)
def given_up():
    if options.get("untold"):
        raise FileNotFoundError(2, "No such file or directory")
    print("given up", flush=True)
print("begin", flush=True)
front = supervise.Supervisor(
    [child(name) for name in options.get("engines", ["engine"])], [child("front")],
    options.get("drain_s", 0.3), lambda: print("ready", flush=True),
    on_hangup=lambda: print("hung up", flush=True),
    on_given_up=given_up,
)
sys.exit(front.run())
"""


class Family:
    """A supervisor and its children."""

    def __init__(self, tmp_path: Path, **options: object) -> None:
        source = str(Path(__file__).parents[2] / "src")
        self.log = tmp_path / "log"
        self.log.write_text("")
        (tmp_path / "dummy_child.py").write_text(textwrap.dedent(CHILD.format(source=source, log=str(self.log))))
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{source}"},
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def pid(self, name: str) -> int:
        lines = [line.split() for line in self.lines() if line.startswith(f"{name} ")]
        return int(next(words[2] for words in reversed(lines) if words[1].isdigit()))

    def pid_of_life(self, name: str, life: int) -> int:
        return int(next(line for line in self.lines() if line.startswith(f"{name} {life} ")).split()[2])

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=120)
        return self.process.returncode, errors


def wait_for(family: Family, text: str) -> None:
    end_s = time.monotonic() + 90
    while not any(text in line for line in family.lines()):
        assert time.monotonic() < end_s, f"never: {text}; {family.lines()}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"
    except OSError:
        return True


def test_all_children_start_and_the_fronts_end_first(tmp_path: Path) -> None:
    family = Family(tmp_path)
    assert [family.line(), family.line()] == ["begin", "ready"]
    assert family.end() == (0, "")
    assert [line for line in family.lines() if line.endswith("left")] == ["front left", "engine left"]


def test_a_killed_child_is_started_again_in_a_new_life(tmp_path: Path) -> None:
    family = Family(tmp_path)
    assert [family.line(), family.line()] == ["begin", "ready"]
    os.kill(family.pid("engine"), signal.SIGKILL)
    wait_for(family, "engine 1 ")
    os.kill(family.pid("front"), signal.SIGKILL)
    wait_for(family, "front 1 ")
    code, errors = family.end(signal.SIGINT)
    assert code == 0
    assert "engine was killed by SIGKILL" in errors


def test_a_hangup_is_handled_and_no_child_restarts(tmp_path: Path) -> None:
    family = Family(tmp_path)
    assert [family.line(), family.line()] == ["begin", "ready"]
    before = family.lines()
    for _ in range(2):
        family.process.send_signal(signal.SIGHUP)
        assert family.line() == "hung up"
    assert family.lines() == before
    assert family.end() == (0, "")


def test_engines_are_restarted_one_after_the_other(tmp_path: Path) -> None:
    family = Family(tmp_path, engines=["one", "two", "three"])
    assert [family.line(), family.line()] == ["begin", "ready"]
    began = len(family.lines())
    family.process.send_signal(signal.SIGUSR1)
    wait_for(family, "three 1 ")
    order = [" ".join(line.split()[:2]) for line in family.lines()[began:]]
    assert order == ["one left", "one 1", "two left", "two 1", "three left", "three 1"]
    code, errors = family.end()
    assert (code, errors) == (0, ""), "nothing of this is an error"


def test_an_engine_that_does_not_leave_is_killed_and_restarted(tmp_path: Path) -> None:
    family = Family(tmp_path, engines=["one", "two"], one={"deaf": True}, kill_after_s=0.5)
    assert [family.line(), family.line()] == ["begin", "ready"]
    family.process.send_signal(signal.SIGUSR1)
    wait_for(family, "two 1 ")
    code, errors = family.end()
    assert code == 0
    assert "one has not ended in time and is killed" in errors
    assert [line.split()[1] for line in family.lines() if line.startswith("one ")] == ["0", "1"]


def test_the_other_engines_stay_when_one_cannot_be_restarted(tmp_path: Path) -> None:
    family = Family(tmp_path, engines=["one", "two"], one={"never_again": 1})
    assert [family.line(), family.line()] == ["begin", "ready"]
    family.process.send_signal(signal.SIGUSR1)
    wait_for(family, "one 5 ")
    code, errors = family.end()
    assert code == 0
    assert "two 1" not in "\n".join(family.lines())
    assert not [line for line in errors.splitlines() if "503" in line], "the other engine computes"


def test_a_config_that_cannot_be_served_ends_the_server_with_code_2(tmp_path: Path) -> None:
    family = Family(tmp_path, engine={"exit": 2})
    family.process.communicate(timeout=120)
    assert family.process.returncode == 2
    assert sum(line.startswith("engine ") for line in family.lines()) == 1


def test_a_loop_of_failed_starts_ends(tmp_path: Path) -> None:
    family = Family(tmp_path, engine={"die_young": 99})
    _, errors = family.process.communicate(timeout=120)
    assert family.process.returncode == 1
    assert "giving up" in errors
    assert sum(line.startswith("engine ") and not line.endswith("left") for line in family.lines()) == 5


def test_a_few_failed_starts_do_not(tmp_path: Path) -> None:
    family = Family(tmp_path, engine={"die_young": 3})
    assert [family.line(), family.line()] == ["begin", "ready"]
    assert family.end()[0] == 0


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    family = Family(tmp_path, engine={"deaf": True}, front={"deaf": True}, kill_after_s=0.5)
    assert [family.line(), family.line()] == ["begin", "ready"]
    engine, front = family.pid("engine"), family.pid("front")
    assert family.end()[0] == 0
    assert gone(engine)
    assert gone(front)


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    import time

    family = Family(tmp_path)
    assert [family.line(), family.line()] == ["begin", "ready"]
    pids = [family.pid("engine"), family.pid("front")]
    family.process.kill()
    family.process.communicate()
    end_s = time.monotonic() + 60
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < end_s, "orphans"
        time.sleep(0.02)


def test_a_child_that_gives_no_sign_of_life_is_killed_and_started_again(tmp_path: Path) -> None:
    family = Family(tmp_path, engine={"silence_s": 1.0, "beats": {"0": 3}})
    assert [family.line(), family.line()] == ["begin", "ready"]
    wait_for(family, "engine 1 ")
    wait_for(family, "engine after a fault")
    code, errors = family.end()
    assert code == 0
    assert "no sign of life" in errors
    starts = sum(line.startswith("engine ") and line.split()[1].isdigit() for line in family.lines())
    assert starts >= 2, "more where the next one had no CPU for a second"


def test_a_front_that_gives_no_sign_of_life_is_killed_and_started_again(tmp_path: Path) -> None:
    family = Family(tmp_path, front={"silence_s": 1.0, "beats": {"0": 3}})
    assert [family.line(), family.line()] == ["begin", "ready"]
    wait_for(family, "front 1 ")
    code, errors = family.end()
    assert code == 0
    assert "front has given no sign of life" in errors
    assert sum(line.startswith("engine ") and line.split()[1].isdigit() for line in family.lines()) == 1


def test_a_pause_of_all_processes_is_no_hang(tmp_path: Path) -> None:
    """As on a laptop that sleeps. The children go on after the supervisor, so it judges them before they can beat."""
    family = Family(tmp_path, engine={"silence_s": 5.0}, front={"silence_s": 5.0})
    assert [family.line(), family.line()] == ["begin", "ready"]
    children = [family.pid("engine"), family.pid("front")]
    before = family.lines()
    for pid in children:
        stop(pid)
    time.sleep(0.5)  # the supervisor reads their last heartbeats
    stop(family.process.pid)
    time.sleep(6.0)
    family.process.send_signal(signal.SIGCONT)
    time.sleep(1.5)
    for pid in children:
        os.kill(pid, signal.SIGCONT)
    time.sleep(1.5)
    assert family.lines() == before
    assert family.end() == (0, "")


def test_a_crash_is_a_fault_and_a_kill_from_outside_is_not(tmp_path: Path) -> None:
    family = Family(tmp_path, engine={"crash": {"0": 2}})
    assert [family.line(), family.line()] == ["begin", "ready"]
    wait_for(family, "engine 1 ")
    wait_for(family, "engine after a fault")
    os.kill(family.pid_of_life("engine", 1), signal.SIGKILL)
    wait_for(family, "engine 2 ")
    assert family.end()[0] == 0
    assert sum("after a fault" in line for line in family.lines()) == 1


def test_fronts_go_on_without_an_engine_that_cannot_be_restarted(tmp_path: Path) -> None:
    family = Family(tmp_path, engine={"never_again": 1})
    assert [family.line(), family.line()] == ["begin", "ready"]
    os.kill(family.pid("engine"), signal.SIGKILL)
    assert family.line() == "given up"
    assert family.process.poll() is None
    code, errors = family.end()
    assert code == 0
    assert "is not started again" in errors
    assert sum(line.startswith("engine ") and line.split()[1].isdigit() for line in family.lines()) == 6
    assert "front left" in family.lines()


def test_if_the_fronts_cannot_learn_of_it_the_server_ends_with_code_1(tmp_path: Path) -> None:
    """They would wait for an engine forever."""
    family = Family(tmp_path, engine={"never_again": 1}, untold=True)
    assert [family.line(), family.line()] == ["begin", "ready"]
    os.kill(family.pid("engine"), signal.SIGKILL)
    _, errors = family.process.communicate(timeout=120)
    assert family.process.returncode == 1
    assert "cannot let the fronts know that no engine will come back: [Errno 2] No such file" in errors
    assert "engine failed to start 5 times in a row; giving up" in errors
    assert "Traceback" not in errors
    assert "front left" in family.lines()


def test_a_child_whose_config_cannot_be_made_ends_the_server_with_code_1(tmp_path: Path) -> None:
    family = Family(tmp_path, engine={"no_more": 1})
    assert [family.line(), family.line()] == ["begin", "ready"]
    os.kill(family.pid("engine"), signal.SIGKILL)
    _, errors = family.process.communicate(timeout=120)
    assert family.process.returncode == 1
    assert "engine cannot be started: its folder is gone" in errors
    assert "Traceback" not in errors
    assert "front left" in family.lines()


def test_without_a_single_front_the_server_ends_with_code_1(tmp_path: Path) -> None:
    family = Family(tmp_path, front={"never_again": 1})
    assert [family.line(), family.line()] == ["begin", "ready"]
    os.kill(family.pid("front"), signal.SIGKILL)
    _, errors = family.process.communicate(timeout=120)
    assert family.process.returncode == 1
    assert "front failed to start 5 times in a row; giving up" in errors
    assert "engine left" in family.lines()


def test_an_engine_that_cannot_start_while_the_fronts_drain_is_given_up(tmp_path: Path) -> None:
    family = Family(tmp_path, engine={"never_again": 1}, front={"deaf": True}, drain_s=100.0, kill_after_s=0.5)
    assert [family.line(), family.line()] == ["begin", "ready"]
    family.process.send_signal(signal.SIGTERM)
    os.kill(family.pid("engine"), signal.SIGKILL)
    assert family.line() == "given up"
    code, errors = family.end()  # the second signal: at once
    assert code == 0
    assert "is not started again" in errors
    assert sum(line.startswith("engine ") and line.split()[1].isdigit() for line in family.lines()) == 6


def test_streams_of_a_killed_engine_move_before_it_takes_cpu_time_again(tmp_path: Path) -> None:
    family = Family(tmp_path, engines=["one", "other"])
    assert [family.line(), family.line()] == ["begin", "ready"]
    os.kill(family.pid("one"), signal.SIGKILL)
    wait_for(family, "one 1 ")
    code, errors = family.end()
    assert code == 0
    assert "one was killed by SIGKILL; restarting it in 1.0 s" in errors


def test_an_only_engine_is_restarted_at_once(tmp_path: Path) -> None:
    family = Family(tmp_path)
    assert [family.line(), family.line()] == ["begin", "ready"]
    os.kill(family.pid("engine"), signal.SIGKILL)
    wait_for(family, "engine 1 ")
    _, errors = family.end()
    assert "engine was killed by SIGKILL; restarting it in 0.0 s" in errors
