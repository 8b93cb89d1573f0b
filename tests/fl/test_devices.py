"""Device groups, draws and traces."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocofl import Budget, Experiment, Run, simulate
from cocofl.data import Partition
from cocofl.data.partition import equal_groups
from cocofl.engine.executor import InProcess
from cocofl.engine.pace import pace_of
from cocofl.engine.rounds import Job
from cocofl.errors import InvalidDevices
from cocofl.experiment import Setup
from cocofl.fl.devices import (
    PAPER_GROUPS,
    POPULATIONS,
    Group,
    RecordedTrace,
    Uniform,
    groups_from,
    limited_groups,
    make_devices,
    read_trace,
)
from cocofl.fl.federation import Federation
from cocofl.fl.training import Training

TRACE = """device,round,time,memory,upload
0,0,0.5,0.5,1.0
0,3,30s,200MB,
1,0,1,1,1
"""


def test_the_papers_three_groups() -> None:
    devices = make_devices(9, PAPER_GROUPS, seed=4)
    assert np.bincount(devices.group_of).tolist() == [3, 3, 3]
    assert devices.group_of.tolist() == equal_groups(9, 3, seed=4).tolist()
    for device, group in enumerate(devices.group_of):
        budget = devices.budget(device, 0)
        assert budget.time == budget.memory == [1, 2 / 3, 1 / 3][group]
        assert budget.upload == 1 if group == 0 else 0.5 <= budget.upload < 1


def test_draws_belong_to_round_and_device() -> None:
    devices = make_devices(6, PAPER_GROUPS, seed=4)
    weak = int(np.flatnonzero(devices.group_of == 2)[0])
    uploads = [devices.budget(weak, round_index).upload for round_index in range(200)]
    assert len(set(uploads)) == 200
    assert min(uploads) < 0.55
    assert max(uploads) > 0.95
    assert devices.budget(weak, 7) == make_devices(6, PAPER_GROUPS, seed=4).budget(weak, 7)


def test_ten_percent_strong() -> None:
    devices = make_devices(100, limited_groups(0.25), seed=0)
    assert np.bincount(devices.group_of).tolist() == [10, 90]
    limited = int(np.flatnonzero(devices.group_of == 1)[0])
    assert devices.budget(limited, 0) == Budget(time=0.25, memory=0.25, upload=1.0)


@given(
    st.lists(st.floats(0.01, 10), min_size=1, max_size=5),
    st.integers(5, 60),
    st.integers(0, 99),
)
def test_groups_are_as_large_as_their_shares(shares, n_devices: int, seed: int) -> None:
    groups = [Group(str(i), share=share) for i, share in enumerate(shares)]
    sizes = np.bincount(make_devices(n_devices, groups, seed).group_of, minlength=len(groups))
    assert sizes.sum() == n_devices
    assert sizes.min() >= 1


def test_groups_from_toml_tables(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    phones, pis = groups_from(
        [
            {"name": "phones", "share": 0.3, "time": {"uniform": [0.2, 0.4]}, "memory": "200MB"},
            {"name": "pis", "trace": str(tmp_path / "trace.csv")},
        ]
    )
    assert phones == Group("phones", 0.3, time=Uniform(0.2, 0.4), memory="200MB")
    devices = make_devices(2, [pis], seed=0)
    assert devices.budget(0, 0) == devices.budget(0, 2) == Budget(0.5, 0.5, 1.0)
    assert devices.budget(0, 8, samples=64) == Budget(time_s=30, memory_bytes=200e6, samples=64)


def test_a_trace_with_a_missing_device(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    groups = groups_from([{"name": "pis", "trace": str(tmp_path / "trace.csv")}])
    with pytest.raises(InvalidDevices, match=r"group 'pis' lacks device 2.*3 here"):
        make_devices(3, groups, seed=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device,round,time\n0,0,1\n", "columns are"),
        ("device,round,time,memory,upload\n", "no rows"),
        ("device,round,time,memory,upload,available\n0,0,1,1,1,no\n", "available is 'no'"),
        ("device,round,time,memory,upload\n0,1,1,1,1\n", "no row for round 0"),
        ("device,round,time,memory,upload\n0,0,1,1,1\n0,0,1,1,1\n", "two rows for round 0"),
        ("device,round,time,memory,upload\n0,0,-1,1,1\n", "line 2: time is -1"),
        ("device,round,time,memory,upload\n0,0,1,1\n0,x,1,1,1\n", "line 3"),
        ("device,round,time,memory,upload\n0,0,soon,1,1\n", "line 2: cannot read time"),
    ],
)
def test_broken_traces(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(InvalidDevices, match=message):
        read_trace(path)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidDevices, match="cannot read the trace"):
        read_trace(tmp_path / "none.csv")


def test_a_trace_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidDevices, match=r"cannot read the trace .*trace\.csv"):
        read_trace(path)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"share": 1}, "no name"),
        ({"name": "a", "tyme": 1}, "unknown tyme"),
        ({"name": "a", "share": 0}, "share 0"),
        ({"name": "a", "share": "half"}, "share is 'half'"),
        ({"name": "a", "time": "soon"}, "cannot read time"),
        ({"name": "a", "time": True}, "time is True"),
        ({"name": "a", "time": -1}, "time is -1"),
        ({"name": "a", "upload": {"normal": [0, 1]}}, "uniform"),
        ({"name": "a", "upload": {"uniform": [1, 0]}}, "low <= high"),
        ({"name": "a", "upload": {"uniform": ["a", "b"]}}, r"expected a fraction.*\[low, high"),
    ],
)
def test_broken_groups(table, message: str) -> None:
    with pytest.raises(InvalidDevices, match=message):
        groups_from([table])


def test_groups_that_devices_cannot_form() -> None:
    with pytest.raises(InvalidDevices, match="2 devices cannot form 3 groups"):
        make_devices(2, PAPER_GROUPS, seed=0)
    with pytest.raises(InvalidDevices, match="one name"):
        make_devices(4, [Group("a"), Group("a")], seed=0)


def test_a_trace_excludes_limits_beside_it() -> None:
    with pytest.raises(InvalidDevices, match="give one"):
        Group("a", time=0.5, trace=RecordedTrace({0: [(0, Budget())]}))


def by_night(device: int, round_index: int) -> Budget | None:
    """What a user may write: device 1 is there in even rounds."""
    if device == 1 and round_index % 2:
        return None
    return Budget.parse(time="30s", samples=1)


def nonsense(_device: int, _round: int) -> str:
    return "much"


def test_a_trace_of_ones_own_is_a_function() -> None:
    devices = make_devices(2, groups_from([{"name": "a", "trace": f"{__name__}:by_night"}]), 0)
    assert [devices.is_available(1, r) for r in range(3)] == [True, False, True]
    assert devices.budget(0, 1, samples=64) == Budget(time_s=30, samples=64)
    devices = make_devices(2, groups_from([{"name": "a", "trace": f"{__name__}:nonsense"}]), 0)
    with pytest.raises(InvalidDevices, match="gave 'much' for device 1 in round 2; expected a B"):
        devices.is_available(1, 2)
    with pytest.raises(InvalidDevices, match="cannot import nowhere:trace"):
        groups_from([{"name": "a", "trace": "nowhere:trace"}])


COMING_AND_GOING = """device,round,time,memory,upload,available
0,0,1,,,
1,0,,,,0
1,2,0.5,,,1
2,0,1,,,1
2,2,,,,0
"""


def test_who_cannot_be_asked_is_not_drawn_and_others_are_instead(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(COMING_AND_GOING)
    groups = groups_from([{"name": "a", "trace": str(tmp_path / "trace.csv")}])
    parts = Partition(np.arange(6), np.array([0, 2, 4, 6]), np.arange(0))

    def drawn(group: Group, round_index: int) -> list[int]:
        federation = Federation(make_devices(3, [group], 0), parts, Training(), 1, seed=0)
        return list(federation.in_random_order(round_index))

    for round_index in range(4):
        absent = 1 if round_index < 2 else 2
        everyone = drawn(Group("a"), round_index)
        assert drawn(groups[0], round_index) == [d for d in everyone if d != absent]
    assert make_devices(3, groups, 0).budget(1, 3) == Budget(time=0.5)


# --- phones --------------------------------------------------------------------------------------


def energetic(**changes: Any) -> Experiment:
    group = {"name": "all", "time": 1.0, "power": 5.0, **changes}
    own = {"devices.groups": [group], "devices.count": 6, "devices.per_round": 6}
    return Experiment().changed(own | {"data.split": "iid", "tables.spans": "analytic"})


def asked_first(job: Job) -> Any:
    return pace_of(job.strategy, job.federation, job.faults, job.seed).turn(0).begin


def test_energy_is_time_times_power_and_its_limit_is_obeyed() -> None:
    job = Setup(energetic()).job()
    assert job.federation is not None
    most = 5.0 * job.deadline_s
    free = asked_first(job)
    limited = Setup(energetic(energy=most / 2)).job()
    assert limited.federation is not None
    assert limited.federation.active_share(0) == pytest.approx(0.5)
    for one, before in zip(asked_first(limited), free, strict=True):
        assert one.plan is not None
        assert before.plan is not None
        assert 5.0 * one.time * limited.deadline_s <= most / 2 * (1 + 1e-9)
        assert str(before.plan.work) == "0:6" != str(one.plan.work)


def test_who_has_all_the_time_has_not_all_the_energy() -> None:
    """As much is trained as by a device that has the time until the deadline."""
    most = 5.0 * Setup(energetic()).job().deadline_s
    planned = []
    for time in ({"time": 1.0}, {"time": math.inf}):
        own = energetic(energy=most / 2, **time)
        planned.append([(str(one.plan.work), one.active) for one in asked_first(Setup(own).job())])
    assert planned[0] == planned[1]
    assert all(work != "0:6" for work, _ in planned[0])


def test_where_nobody_waits_a_device_rests_to_save_energy() -> None:
    """With energy for half of the time it takes twice as long, and as much in all."""
    own = energetic().with_strategy("fedbuff", buffer=2)
    most = 5.0 * Setup(own).job().deadline_s
    group = [{"name": "all", "time": 1.0, "power": 5.0, "energy": most / 2}]
    free, limited = (
        asked_first(Setup(one).job()) for one in (own, own.changed({"devices.groups": group}))
    )
    assert [one.time for one in limited] == pytest.approx([2 * one.time for one in free])
    assert [one.active for one in limited] == pytest.approx([one.active for one in free])


def test_a_run_writes_down_what_it_took(tmp_path: Path) -> None:
    own = energetic().changed({"rounds": 1, "strategy.name": "fedavg-full"})
    run = simulate(own, out=tmp_path, executor=InProcess())
    deadline_s = Setup(own).job().deadline_s
    assert run.rounds[0].energy_j == pytest.approx(6 * 5.0 * deadline_s, rel=1e-6)
    assert Run.open(tmp_path).rounds == run.rounds


def test_phones_come_and_go_with_the_time_of_day() -> None:
    devices = make_devices(2000, POPULATIONS["phones-2024"], seed=0)
    shares = [np.mean([devices.is_available(d, r) for d in range(2000)]) for r in (0, 6, 12)]
    assert shares == pytest.approx([0.128, 0.08, 0.032], abs=0.02)


@pytest.mark.parametrize(
    ("group", "why"),
    [
        ({"energy": 5.0}, "but no power"),
        ({"power": -1.0}, "expected watts"),
        ({"available": 0.0}, "expected a share above 0"),
        ({"power": "much"}, "expected a number"),
    ],
)
def test_bad_phones_are_refused(group: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidDevices, match=why):
        groups_from([{"name": "phones", **group}])
