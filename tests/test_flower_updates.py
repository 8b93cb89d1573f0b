"""The contract of an update: what is accepted comes through whole, everything else is refused."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from cocofl.chain import split
from cocofl.errors import RejectedUpdate
from cocofl.fl.merge import Contribution
from cocofl.flower.updates import Contract, Request
from cocofl.freeze import chain_state, freeze
from cocofl.models import MODELS
from cocofl.span import Blocks, Span

Header = dict[str, Any]
FUZZ = Path(__file__).parent.parent / "bench" / "fuzz_updates.py"


def trained(name: str, blocks: Blocks, *, tiny: bool = True):
    """A chain, its state, and what a device with it would send after one step."""
    torch.manual_seed(0)
    model = MODELS[name](10, tiny=tiny)
    chain = split(model, model.example_input(4))
    state = chain_state(chain)
    net = freeze(chain, blocks, backend="reference", state=state).train()
    net.measure_scales()
    x = model.example_input(4)
    loss = torch.nn.functional.cross_entropy(net(x), torch.arange(4))
    loss.backward()
    torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05).step()
    return chain, state, Contribution(net.update().tensors, 40, float(loss.detach()))


@pytest.fixture(scope="module")
def sent():
    return trained("resnet10-digits", Span(1, 3))


def test_an_update_comes_through_whole(sent) -> None:
    chain, state, contribution = sent
    contract = Contract(chain)
    payload = contract.encode(contribution)
    span, received = contract.decode(payload, state)
    assert span == Span(1, 3)
    assert (received.samples, received.loss) == (contribution.samples, contribution.loss)
    assert set(received.tensors) == set(contribution.tensors)
    assert any(key.startswith("scales.") for key in received.tensors)
    assert all(torch.equal(t, contribution.tensors[k]) for k, t in received.tensors.items())
    assert set(load(payload)) == {"F32", "scales"}, "any reader of safetensors can open it"


def test_an_update_answers_one_request_only(sent) -> None:
    chain, state, contribution = sent
    contract, request = Contract(chain), Request(4, "5eed", "f00d")
    payload = contract.encode(contribution, request)
    assert contract.decode(payload, state, request)[0] == Span(1, 3)
    others = {
        "of round 5; asked was round 4": request._replace(round_index=3),
        "another request than this device's": request._replace(nonce="5eee"),
        "another state than was sent": request._replace(state="food"),
    }
    for message, other in others.items():
        with pytest.raises(RejectedUpdate, match=message) as caught:
            contract.decode(payload, state, other)
        assert caught.value.reason == "request"
    for wrong in (5.0, "5", True, None, [5], 10**400):
        with pytest.raises(RejectedUpdate):
            contract.decode(rewritten(payload, {"round": wrong}, leave), state, request)


def test_blocks_with_gaps_come_through_whole_and_one_way_only() -> None:
    """The classifier beside a span: 1:3+5:6."""
    chain, state, contribution = trained("resnet10-digits", Span(1, 3) | Span(5, 6))
    contract = Contract(chain)
    payload = contract.encode(contribution)
    blocks, received = contract.decode(payload, state)
    assert str(blocks) == "1:3+5:6"
    assert all(torch.equal(t, contribution.tensors[k]) for k, t in received.tensors.items())
    assert set(received.tensors) == set(contribution.tensors)
    assert b"[1,3,5,6]" in payload
    for ends in ([1, 2, 2, 3, 5, 6], [5, 6, 1, 3], [1, 3, 5], [1, 3, 5, 7], [1.0, 3, 5, 6], "1:3"):
        with pytest.raises(RejectedUpdate, match="the network has 6 blocks") as caught:
            contract.decode(rewritten(payload, {"span": ends}, leave), state)
        assert caught.value.reason == "span"
    with pytest.raises(RejectedUpdate):
        contract.decode(rewritten(payload, {"span": [1, 6]}, leave), state)


def test_one_span_is_written_as_it_always_was(sent) -> None:
    chain, *_ = sent
    contract = Contract(chain)
    tensors = {s.key: torch.zeros(s.shape) for s in contract.slots(Span(1, 3))}
    payload = contract.encode(Contribution(tensors, 5, 0.5))
    digest = hashlib.sha256(payload).hexdigest()
    assert digest == "2fde65e5e46b50534e94d1dda03e3473d65f2531a89b48e46cd8d510832eda3e"


@pytest.mark.parametrize("name", ["resnet18", "resnet10-digits", "mobilenet", "cnn"])
def test_a_reply_is_hardly_larger_than_its_update(name: str) -> None:
    """At most a tenth, for any span that has more than 4 kB; of smaller ones the header shows."""
    torch.manual_seed(0)
    model = MODELS[name](10)
    chain = split(model, model.example_input(2))
    contract, state = Contract(chain), chain_state(chain)
    for start in range(len(chain)):
        tensors = {slot.key: state[slot.key] for slot in contract.slots(Span(start, start + 1))}
        contribution = Contribution(tensors, 500, 2.302585092994046)
        overhead = len(contract.encode(contribution)) - contribution.nbytes
        assert overhead < 330
        assert contribution.nbytes < 3300 or overhead < 0.1 * contribution.nbytes, start


def changed(contribution: Contribution, **tensors: torch.Tensor) -> Contribution:
    return replace(contribution, tensors={**contribution.tensors, **tensors})


def test_only_whole_blocks_can_be_sent(sent) -> None:
    chain, _, contribution = sent
    contract = Contract(chain)
    key, tensor = next(iter(contribution.tensors.items()))
    with pytest.raises(RejectedUpdate, match="no tensor of the network"):
        contract.encode(Contribution({}, 4))
    with pytest.raises(RejectedUpdate, match="never_heard_of"):
        contract.encode(changed(contribution, **{"never_heard_of": tensor}))
    rest = {k: t for k, t in contribution.tensors.items() if k != key}
    with pytest.raises(RejectedUpdate, match="lacks"):
        contract.encode(replace(contribution, tensors=rest))
    with pytest.raises(RejectedUpdate, match="of shape"):
        contract.encode(changed(contribution, **{key: tensor[:1]}))
    with pytest.raises(RejectedUpdate, match="float64"):
        contract.encode(changed(contribution, **{key: tensor.double()}))


def rewritten(payload: bytes, about: dict[str, Any], edit: Callable[[Header], Any]) -> bytes:
    """An update with other facts and another header, which can be as wrong as one likes."""
    end = 8 + int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8:end])
    facts = json.loads(header["__metadata__"]["cocofl"]) | about
    header["__metadata__"]["cocofl"] = json.dumps(facts, separators=(",", ":"))
    edit(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + payload[end:]


def leave(_header: Header) -> None: ...


@pytest.mark.parametrize(
    ("reason", "about", "edit"),
    [
        ("format", {}, lambda header: header.update(unheard_of=header.pop("F32"))),
        ("format", {}, lambda header: header.update(unheard_of=header["scales"])),
        ("format", {}, lambda header: header.pop("scales")),
        ("format", {}, lambda header: header["F32"].update(dtype="I32")),
        ("format", {}, lambda header: header["F32"].update(shape=[1, *header["F32"]["shape"]])),
        ("format", {"device": 7}, leave),
        ("format", {"layout": "0" * 16}, leave),
        ("span", {"span": [1, 2, 3]}, leave),
        ("format", {"span": [1, 2], "scales": "0"}, leave),
        ("span", {"span": [1, 7]}, leave),
        ("span", {"span": [3, 1]}, leave),
        ("scales", {"scales": "f" * 40}, leave),
        ("format", {"scales": "0"}, leave),
    ],
)
def test_only_whole_blocks_are_accepted(
    sent, reason: str, about: dict[str, Any], edit: Callable[[Header], Any]
) -> None:
    """Unknown keys, other types and shapes, spans with holes or beyond the network."""
    chain, state, contribution = sent
    contract = Contract(chain)
    payload = contract.encode(contribution)
    assert rewritten(payload, {}, leave) == payload
    with pytest.raises(RejectedUpdate) as caught:
        contract.decode(rewritten(payload, about, edit), state)
    assert caught.value.reason == reason


def test_how_far_an_update_may_go_can_be_set(sent) -> None:
    chain, state, contribution = sent
    payload = Contract(chain).encode(contribution)
    Contract(chain, max_change=1.0).decode(payload, state)
    with pytest.raises(RejectedUpdate, match=r"max_change = 1e-06"):
        Contract(chain, max_change=1e-6).decode(payload, state)


@pytest.mark.parametrize(
    ("reason", "value"),
    [("values", float("nan")), ("values", float("inf")), ("change", 1e6)],
)
def test_values_out_of_reason_are_refused(sent, reason: str, value: float) -> None:
    chain, state, contribution = sent
    contract = Contract(chain)
    key = next(iter(contribution.tensors))
    spoilt = contribution.tensors[key].clone()
    spoilt.flatten()[0] = value
    with pytest.raises(RejectedUpdate) as caught:
        contract.decode(contract.encode(changed(contribution, **{key: spoilt})), state)
    assert caught.value.reason == reason


def test_scales_variances_and_samples_are_checked(sent) -> None:
    chain, state, contribution = sent
    contract = Contract(chain, max_samples=50)
    scale = next(key for key in contribution.tensors if key.startswith("scales."))
    variance = next(key for key in contribution.tensors if key.endswith("running_var"))
    wrong = [
        ("scales", changed(contribution, **{scale: torch.tensor(0.0)})),
        ("scales", changed(contribution, **{scale: torch.tensor(-1.0)})),
        ("values", changed(contribution, **{variance: -contribution.tensors[variance]})),
        ("samples", replace(contribution, samples=51)),
        ("samples", replace(contribution, samples=0)),
        ("values", replace(contribution, loss=float("nan"))),
    ]
    for reason, one in wrong:
        with pytest.raises(RejectedUpdate) as caught:
            contract.decode(contract.encode(one), state)
        assert caught.value.reason == reason


def test_an_update_of_another_network_is_refused(sent) -> None:
    """Also where the bytes would fit: here two tensors have changed places."""
    chain, state, _ = sent
    torch.manual_seed(0)
    one = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    other = torch.nn.Sequential()
    other.add_module("first", torch.nn.Linear(4, 4))
    other.add_module("relu", torch.nn.ReLU())
    other.add_module("last", torch.nn.Linear(4, 4))
    ours, theirs = (split(model, torch.ones(1, 4)) for model in (one, other))
    payload = Contract(theirs).encode(Contribution(chain_state(theirs), 1))
    with pytest.raises(RejectedUpdate, match="header"):
        Contract(ours).decode(payload, chain_state(ours))
    with pytest.raises(RejectedUpdate):
        Contract(chain).decode(payload, state)


def test_size_is_judged_before_anything_is_read(sent) -> None:
    chain, state, _ = sent
    contract = Contract(chain)
    with pytest.raises(RejectedUpdate) as caught:
        contract.decode(b"\xff" * (contract.max_bytes + 1), state)
    assert caught.value.reason == "size"
    with pytest.raises(RejectedUpdate, match="not bytes"):
        contract.decode(None, state)  # type: ignore[arg-type]


def test_no_mutant_of_5000_crashes_the_server_or_gets_merged_wrongly() -> None:
    done = subprocess.run(
        [sys.executable, FUZZ, "--count", "5000", "--seed", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    rejected = {word.split(": ")[1] for word in found["outcomes"] if word.startswith("rejected")}
    assert found["wrong"] == []
    assert rejected == {
        "size",
        "format",
        "request",
        "span",
        "samples",
        "values",
        "scales",
        "change",
    }
