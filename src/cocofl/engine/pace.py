"""Whom a server asks when, and whose updates it waits for.

:class:`UntilTheDeadline` asks the devices of a round at once and waits for all of them.
:class:`AsTheyCome` keeps a number of devices busy in simulated time and merges what has arrived.
All else of a round is the same for both: :func:`cocofl.engine.rounds.play_round`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cocofl.engine.executor import Answer
from cocofl.errors import InvalidState
from cocofl.fl.federation import Faults, Federation
from cocofl.fl.state import ON_THE_WAY_PREFIX, Contribution, ServerState, Tensors
from cocofl.fl.strategies import Plan, Strategy

_ROUNDING = 1e-9  # durations are added up: what lasts a round is over when the next begins


class AskedDevice(NamedTuple):
    """A device that the server asked, and what came of that before anything was trained."""

    device: int
    plan: Plan | None
    fate: str
    time: float
    """How long it takes, in parts of the deadline."""
    active: float
    """For how much of that it trains; where its energy is short it may rest in between."""
    begun: int
    """The round whose state it was sent."""
    draw: int
    """Stands for the round in its random numbers: no device has the same twice."""
    moment: int
    """The round whose budget it has."""


class Turn(NamedTuple):
    """What happens in a round."""

    begin: Sequence[AskedDevice]
    """They train, beginning with the state before the round."""
    end: Sequence[AskedDevice]
    """What became of these is known when the round is over."""
    waits: float
    """How long the server waits, in parts of the deadline."""


class Pace(Protocol):
    """Decides who begins and who ends in a round."""

    def turn(self, round_index: int) -> Turn:
        """The round's devices; rounds are asked for one after the other."""

    def arriving(
        self, turn: Turn, round_index: int, answers: Iterable[Answer], state: ServerState
    ) -> Iterable[Answer]:
        """From what those answer who began to what arrives at the server in this round."""

    def flat(self) -> Tensors:
        """What a checkpoint has to keep beside the server's state."""

    def go_on(self, round_index: int, kept: Mapping[str, Tensor], state: ServerState) -> None:
        """Be where a run is after so many rounds, of which a checkpoint has kept this."""


class UntilTheDeadline(Pace):
    """The devices of a round are asked at once, and the server waits for them."""

    def __init__(
        self, strategy: Strategy, federation: Federation | None, faults: Faults, seed: int
    ) -> None:
        self._strategy, self._federation = strategy, federation
        self._faults, self._seed = faults, seed

    def turn(self, round_index: int) -> Turn:
        """Who is asked this round, and what comes of it before anything is trained, by device.

        An update that comes late or gets lost is never looked at, so it is not computed either.
        """
        federation, strategy = self._federation, self._strategy
        if federation is None:
            return Turn([], [], 0.0)
        by_coin = federation.coins(round_index)
        plans = (
            (device, strategy.plan(federation.situation(device, round_index)))
            for device in federation.in_random_order(round_index, by_coin)
        )
        if strategy.only_able:
            plans = ((device, plan) for device, plan in plans if plan is not None)
        asked, most = [], federation.per_round if by_coin is None else None
        for device, plan in sorted(islice(plans, most), key=lambda pair: pair[0]):
            fate, duration = "infeasible", 0.0
            if plan is not None:
                # Plans are in parts of what energy lets a device spend.
                time = plan.time * federation.active_share(device)
                fate, duration = self._faults.fate(self._seed, round_index, device, time)
            asked.append(
                AskedDevice(
                    device, plan, fate, duration, duration, round_index, round_index, round_index
                )
            )
        # The server waits for the last update that it expects.
        in_vain = any(one.fate in ("late", "lost") for one in asked)
        return Turn(asked, asked, 1.0 if in_vain else max((o.time for o in asked), default=0.0))

    def arriving(
        self, turn: Turn, round_index: int, answers: Iterable[Answer], state: ServerState
    ) -> Iterable[Answer]:
        """All answers."""
        del turn, round_index, state
        return answers

    def flat(self) -> Tensors:
        """Nothing: between rounds no device is under way."""
        return {}

    def go_on(self, round_index: int, kept: Mapping[str, Tensor], state: ServerState) -> None:
        """Any round can be the next."""


class _Flight(NamedTuple):
    """A device under way. Those that end at one time end in the order in which they began."""

    ends: float
    draw: int
    asked: AskedDevice


class AsTheyCome(Pace):
    """``per_round`` devices are under way at any time; a round ends when enough have arrived.

    Whoever is done makes room for the next, which is sent the state of that moment. Time is
    simulated: when devices begin and end follows from their plans alone, so it can be played
    again up to any round, and only the updates on their way have to be kept. No device has two
    updates in one round.
    """

    def __init__(
        self, strategy: Strategy, federation: Federation, faults: Faults, seed: int
    ) -> None:
        assert strategy.arrival is not None
        assert strategy.tracks_statistics, "who is asked for statistics is asked at once"
        self._strategy, self._arrival = strategy, strategy.arrival
        self._federation, self._faults, self._seed = federation, faults, seed
        self._clock = 0.0
        self._under_way: list[_Flight] = []
        self._asked = 0
        self._sent: dict[int, Contribution] = {}

    def turn(self, round_index: int) -> Turn:
        """Devices begin and end until enough have arrived, or nobody is left who could."""
        begun: list[AskedDevice] = []
        ended: list[AskedDevice] = []
        before = self._clock
        while sum(one.fate == "merged" for one in ended) < self._arrival.buffer:
            self._ask(round_index, begun, ended)
            if not self._under_way:
                break
            flight = heappop(self._under_way)
            self._clock = flight.ends
            ended.append(flight.asked)
        if self._clock == before and not self._under_way:
            self._clock += 1.0  # nobody can be asked: until the next round of a trace
        return Turn(begun, ended, self._clock - before)

    def _ask(self, round_index: int, begun: list[AskedDevice], ended: list[AskedDevice]) -> None:
        """Ask devices until as many as wanted are under way."""
        while len(self._under_way) < self._federation.per_round:
            busy = {flight.asked.device for flight in self._under_way}
            busy |= {one.device for one in ended}
            moment, draw = int(self._clock + _ROUNDING), self._asked
            for device in self._federation.in_random_order(draw, moment=moment):
                if device in busy:
                    continue
                plan = self._strategy.plan(self._federation.situation(device, moment))
                if plan is not None:
                    break
                if not self._strategy.only_able:
                    nothing = AskedDevice(
                        device, None, "infeasible", 0.0, 0.0, round_index, draw, moment
                    )
                    ended.append(nothing)
            else:
                return
            self._asked += 1
            # Nobody waits: where energy is short the device rests, and takes the longer.
            fate, duration = self._faults.fate(self._seed, draw, device, plan.time)
            fate = "merged" if fate == "late" else fate  # nothing is, without a deadline
            active = duration * self._federation.active_share(device)
            asked = AskedDevice(device, plan, fate, duration, active, round_index, draw, moment)
            begun.append(asked)
            heappush(self._under_way, _Flight(self._clock + duration, draw, asked))

    def arriving(
        self, turn: Turn, round_index: int, answers: Iterable[Answer], state: ServerState
    ) -> Iterator[Answer]:
        """What arrives, as of now; what does not yet is kept."""
        for answer in answers:
            assert isinstance(answer.sent, Contribution)
            self._sent[answer.device] = self._arrival.departed(answer.sent, state)
        for one in turn.end:
            if one.fate == "merged":
                sent, stale = self._sent.pop(one.device), round_index - one.begun
                yield Answer(one.device, self._arrival.arrived(sent, state, stale))

    # In a checkpoint

    def flat(self) -> Tensors:
        """All updates that are on their way."""
        found = Tensors()
        for device, sent in self._sent.items():
            facts = (sent.samples, sent.loss, sent.nbytes)
            found[f"{ON_THE_WAY_PREFIX}{device}"] = torch.tensor(facts, dtype=torch.float64)
            found |= {f"{ON_THE_WAY_PREFIX}{device}/{key}": t for key, t in sent.tensors.items()}
        return found

    def go_on(self, round_index: int, kept: Mapping[str, Tensor], state: ServerState) -> None:
        """The same rounds again, and the updates that a checkpoint kept."""
        for index in range(round_index):
            self.turn(index)
        for flight in self._under_way:
            if flight.asked.fate == "merged":
                device = flight.asked.device
                self._sent[device] = _on_the_way(device, kept, state)


def _on_the_way(device: int, kept: Mapping[str, Tensor], state: ServerState) -> Contribution:
    """An update from a checkpoint, which anybody may have made."""
    name = f"{ON_THE_WAY_PREFIX}{device}"
    facts, known = kept.get(name), state.tensors
    tensors = {
        key.removeprefix(f"{name}/"): tensor
        for key, tensor in kept.items()
        if key.startswith(f"{name}/")
    }
    is_sound = facts is not None and facts.dtype == torch.float64 and facts.shape == (3,)
    for key, tensor in tensors.items():
        like = known.get(key, tensor)
        is_sound &= like.shape == tensor.shape and like.dtype == tensor.dtype
    if facts is None or not is_sound or not tensors:
        raise InvalidState(
            f"the checkpoint does not hold the update of device {device}, which is on its way; "
            "remove it: --resume then plays its rounds again"
        )
    samples, loss, size = facts.tolist()
    return Contribution(tensors, int(samples), loss, device=device, sent_bytes=int(size))


def pace_of(strategy: Strategy, federation: Federation | None, faults: Faults, seed: int) -> Pace:
    """The pace of a strategy; devices that plan by themselves have a deadline."""
    if strategy.arrival is None or federation is None:
        return UntilTheDeadline(strategy, federation, faults, seed)
    return AsTheyCome(strategy, federation, faults, seed)
