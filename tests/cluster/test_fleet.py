"""The fleet's policy, with places that are objects: starts, deaths, lost nodes, refusals, scaling, rolling restarts."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster.autoscale import Autoscaler, EngineLoad, ScaleRules
from shoal.cluster.fleet import LONG_PLACING_S, Fleet
from shoal.cluster.holder import HolderStatus
from shoal.core.clock import VirtualClock
from shoal.engine.members import Membership
from shoal.engine.supervise import MOST_FAILED_STARTS, USERS_MISTAKE
from shoal.errors import BadConfig, EngineError

IDLE = HolderStatus()


class Place:
    """What a node would do, one step at a time."""

    def __init__(self, number: int, made: list["Place"]) -> None:
        self.number = number
        self.found: HolderStatus | ConnectionError | None = None  # None: not placed yet
        self.started: list[Mapping[str, Any]] = []
        self.drains = 0
        self.released = False
        made.append(self)

    async def status(self) -> HolderStatus | None:
        if isinstance(self.found, ConnectionError):
            raise self.found
        return self.found

    async def start(self, config: Mapping[str, Any]) -> None:
        self.started.append(config)
        self.found = HolderStatus("starting", config["epoch"])

    async def drain(self) -> None:
        self.drains += 1

    def release(self) -> None:
        self.released = True

    # ---- what happens there

    def comes_up(self) -> None:
        assert isinstance(self.found, HolderStatus)
        assert self.found.state == "starting"
        epoch = self.found.epoch
        self.found = HolderStatus("up", epoch, f"tcp://node:{self.number}{epoch}", "key", was_up=True)

    def ends(self, code: int, fault: bool = False, refusal: str = "") -> None:
        assert isinstance(self.found, HolderStatus)
        self.found = replace(self.found, state="ended", code=code, fault=fault, refusal=refusal)


class Story:
    """A fleet on a virtual clock, driven tick by tick."""

    def __init__(self, folder: Path, least: int = 1, most: int = 3) -> None:
        self.places: list[Place] = []
        self.clock = VirtualClock()
        self.folder = folder
        rules = ScaleRules(least, most, up_after_s=0, down_after_s=0, up_pause_s=0, down_pause_s=0)
        self.fleet = Fleet(
            lambda number: Place(number, self.places),
            lambda number, epoch, fault: {"number": number, "epoch": epoch, "after_fault": fault},
            folder,
            Autoscaler(rules),
            clock=self.clock,
        )

    def tick(self, seconds: float = 0.2) -> None:
        self.clock.advance(seconds)
        asyncio.run(self.fleet.tick())

    def all_up(self) -> None:
        """Every place is there, and its engine comes up."""
        self.tick()
        for place in self.places:
            place.found = place.found or IDLE
        self.tick()
        for place in self.places:
            if isinstance(place.found, HolderStatus) and place.found.state == "starting":
                place.comes_up()
        self.tick()

    @property
    def urls(self) -> list[str]:
        """As the fronts read them."""
        return [one.url for one in Membership.read(self.folder).members]


def test_engines_are_placed_started_and_published(tmp_path: Path) -> None:
    story = Story(tmp_path, least=2)
    story.tick()
    assert len(story.places) == 2
    assert story.urls == []
    story.all_up()
    assert [place.started for place in story.places] == [
        [{"number": 0, "epoch": 0, "after_fault": False}],
        [{"number": 1, "epoch": 0, "after_fault": False}],
    ]
    assert story.urls == ["tcp://node:00", "tcp://node:10"]


@pytest.mark.parametrize("fault", [False, True])
def test_an_engine_that_dies_is_started_again_in_its_place(tmp_path: Path, fault: bool) -> None:
    story = Story(tmp_path)
    story.all_up()
    (place,) = story.places
    place.ends(-11 if fault else -9, fault=fault)
    story.tick()
    assert story.urls == []
    assert place.started[-1] == {"number": 0, "epoch": 1, "after_fault": fault}
    place.comes_up()
    story.tick()
    assert story.urls == ["tcp://node:01"]
    assert not place.released


def test_a_place_that_the_cluster_moves_gets_a_new_engine(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.all_up()
    (place,) = story.places
    place.found = ConnectionError("the node is gone")
    story.tick()
    assert story.urls == []
    place.found = None  # being placed
    story.tick()
    place.found = IDLE
    story.tick()
    assert place.started[-1]["epoch"] == 1, "epochs of a number grow"
    place.comes_up()
    story.tick()
    assert story.urls == ["tcp://node:01"]
    assert len(story.places) == 1, "the place is the cluster's to move"


def test_a_busy_place_stays_a_member(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.all_up()
    story.places[0].found = None  # no answer in time
    for _ in range(10):
        story.tick(10.0)
    assert story.urls == ["tcp://node:00"]


def test_waiting_for_room_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    story = Story(tmp_path)
    for _ in range(5):
        story.tick(LONG_PLACING_S)
    assert caplog.text.count("engine 0 waits for a node with room") == 1


def test_a_config_that_no_engine_can_serve_ends_the_fleet(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.tick()
    story.places[0].found = IDLE
    story.tick()
    story.places[0].ends(USERS_MISTAKE, refusal="no such model")
    with pytest.raises(BadConfig, match="no such model"):
        story.tick()


def test_an_engine_that_never_starts_ends_the_fleet_at_last(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.tick()
    (place,) = story.places
    place.found = IDLE
    for _ in range(MOST_FAILED_STARTS):
        story.tick(20.0)  # starts it, or finds it ended; the pauses are shorter
        story.tick(20.0)
        place.ends(1)
    with pytest.raises(EngineError, match=f"{MOST_FAILED_STARTS} times"):
        story.tick()
    assert len(place.started) == MOST_FAILED_STARTS


def test_a_place_where_engines_never_start_is_given_up_for_another(tmp_path: Path) -> None:
    story = Story(tmp_path, least=2)
    story.all_up()
    bad = story.places[1]
    bad.ends(-9)
    for _ in range(100):
        story.tick(20.0)
        if bad.released:
            break
        bad.ends(1)
    assert bad.released
    story.all_up()
    assert [place.number for place in story.places] == [0, 1, 1]
    assert story.urls[0] == "tcp://node:00"
    assert len(story.urls) == 2
    assert story.places[2].started[0]["epoch"] == len(bad.started), "epochs of a number grow"


BUSY, EMPTY = EngineLoad(9000, 1000.0, 1.0), EngineLoad(0, 1000.0, 0.0)


def test_a_burst_adds_engines_and_idleness_drains_them(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.all_up()
    assert story.fleet.scale({0: BUSY}) == 3
    story.all_up()
    assert len(story.urls) == 3
    story.clock.advance(1)
    assert story.fleet.scale({0: EngineLoad(0, 1000.0, 0.2), 1: EMPTY, 2: EngineLoad(0, 1000.0, 0.1)}) == 2
    story.tick()
    emptiest = story.places[1]
    assert emptiest.drains == 1
    assert len(story.urls) == 3, "it stays known until its requests are elsewhere"
    emptiest.ends(0)
    story.tick()
    assert emptiest.released
    assert story.urls == ["tcp://node:00", "tcp://node:20"]


def test_an_engine_that_is_not_up_yet_is_the_first_to_go(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.all_up()
    story.fleet.scaler.wanted = 2
    story.tick()
    story.fleet.scaler.wanted = 1
    story.tick()
    assert [place.released for place in story.places] == [False, True]
    assert story.urls == ["tcp://node:00"]


def test_a_node_that_dies_while_its_engine_drains(tmp_path: Path) -> None:
    story = Story(tmp_path, least=1)
    story.fleet.scaler.wanted = 2
    story.all_up()
    story.fleet.scaler.wanted = 1
    story.tick()
    story.places[1].found = ConnectionError("the node is gone")
    story.tick()
    assert story.places[1].released
    assert len(story.places) == 2
    assert story.urls == ["tcp://node:00"]


def test_a_rolling_restart_takes_one_after_the_other(tmp_path: Path) -> None:
    story = Story(tmp_path, least=2)
    story.all_up()
    story.fleet.restart_all()
    story.tick()
    story.tick()
    first, second = story.places
    assert (first.drains > 0, second.drains) == (True, 0)
    first.ends(0)
    story.tick()
    assert first.started[-1]["epoch"] == 1
    story.tick()
    assert second.drains == 0, "the first is not up yet"
    first.comes_up()
    story.tick()
    story.tick()
    assert second.drains > 0
    second.ends(0)
    story.tick()
    second.comes_up()
    for _ in range(3):
        story.tick()
    assert story.urls == ["tcp://node:01", "tcp://node:11"]
    assert [len(place.started) for place in story.places] == [2, 2]


def test_the_next_fleet_goes_on_with_the_epochs(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.all_up()
    again = Story(tmp_path)  # the fleet's process died, and its engines with it
    again.tick()
    assert again.urls == []
    again.all_up()
    assert again.places[0].started[0]["epoch"] == 1


def test_stopping_releases_all(tmp_path: Path) -> None:
    story = Story(tmp_path, least=3)
    story.all_up()
    story.fleet.stop()
    assert all(place.released for place in story.places)
    assert story.urls == []
