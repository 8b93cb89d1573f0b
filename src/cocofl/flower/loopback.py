"""A SuperLink and SuperNodes as processes on this machine, for a first try and for tests.

They listen on 127.0.0.1 only, live in one folder, and end with the ``with`` block that began them.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat

from cocofl.flower.keys import new_device_key, new_private_key
from cocofl.flower.node_file import config_text
from cocofl.flower.settings import toml_value
from cocofl.named import search_path

LINK = "loop"
# As a file: in a module of the package it would begin with importing PyTorch.
NODE_PROGRAM = [sys.executable, "-P", str(Path(__file__).with_name("node.py"))]
_HOST = "127.0.0.1"
_PORTS = itertools.count(random.SystemRandom().randrange(10_000, 30_000))
_PATIENCE_S = 120.0


class DeploymentFailed(RuntimeError):
    """A process of the deployment ended, or did not begin; its log says why."""


class Loopback:
    """One SuperLink; SuperNodes are added, killed and brought back as one likes.

    ``secure`` turns on TLS and asks every SuperNode for a registered key. A SuperLink whose options
    name a database knows its nodes when it is started again; its work then takes twice the time.
    """

    def __init__(
        self, folder: Path, *, secure: bool = False, link_options: Sequence[str] = ()
    ) -> None:
        self.folder, self.port = folder.absolute(), _free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        home = self.folder / "home"
        home.mkdir(parents=True, exist_ok=True)
        self._link_options, self._node_options = [*link_options, "--insecure"], ["--insecure"]
        trust = "insecure = true"
        if secure:
            make_certificate(self.folder / "tls")
            certificate = str(self.folder / "tls" / "server.crt")
            self._link_options = [*link_options, "--enable-supernode-auth"]
            self._link_options += ["--ssl-ca-certfile", certificate, "--ssl-certfile", certificate]
            self._link_options += ["--ssl-keyfile", str(self.folder / "tls" / "server.key")]
            self._node_options = ["--root-certificates", certificate]
            trust = f"root-certificates = {json.dumps(certificate)}"
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\n'
            f'address = "{_HOST}:{self.port}"\n{trust}\n',
            encoding="utf-8",
        )

    def __enter__(self) -> Loopback:
        try:
            self.link = self.start_link()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # --- processes -------------------------------------------------------------------------------

    def start_link(self) -> subprocess.Popen[bytes]:
        """The SuperLink, when it listens; also a second one after the first was killed."""
        words = ["flower-superlink", "--host", _HOST, "--port", str(self.port)]
        process = self.spawn("superlink", words + self._link_options)
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end and process.poll() is None:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex((_HOST, self.port)) == 0:
                    return process
            time.sleep(0.1)
        raise DeploymentFailed(f"the SuperLink did not start: see {self.folder}/superlink.log")

    def start_node(
        self,
        name: str,
        config: Mapping[str, Any] | None = None,
        *,
        key: Path | None = None,
        program: Sequence[str] = NODE_PROGRAM,
    ) -> subprocess.Popen[bytes]:
        """A SuperNode with its node config; with TLS it needs a key."""
        words = [*program, "--superlink", f"{_HOST}:{self.port}", *self._node_options]
        if config:
            words += ["--node-config", config_text(config)]
        if key is not None:
            words += ["--auth-supernode-private-key", str(key)]
        return self.spawn(name, words)

    def new_key(self, name: str, *, register: bool = True) -> Path:
        """A key, known to the SuperLink or not."""
        path = self.folder / "keys" / name
        path.parent.mkdir(exist_ok=True)
        public = new_device_key(path)
        if register:
            self.flwr("supernode", "register", str(public), LINK)
        return path

    def spawn(self, name: str, words: list[str]) -> subprocess.Popen[bytes]:
        """A process of the deployment in a group of its own, with a log named after it."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                cwd=self.folder,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End everything that was started: politely, then not."""
        self._signal(signal.SIGTERM)
        end = time.monotonic() + 8
        while time.monotonic() < end and (
            any(process.poll() is None for process in self._processes) or self.processes()
        ):
            time.sleep(0.1)
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        while left := self.processes():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self._processes.clear()

    def _signal(self, number: int) -> None:
        for process in reversed(self._processes):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def processes(self) -> dict[int, str]:
        """All processes of the deployment with their commands; Flower starts some by itself.

        They are known by their environment (on Linux; elsewhere none is found).
        """
        mark = f"FLWR_HOME={self.folder / 'home'}".encode()
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = words.decode(errors="replace")
        return found

    def environment(self) -> dict[str, str]:
        """Of all processes: nothing is sent to anybody, nothing is installed, nothing is shared."""
        programs = str(Path(sys.executable).parent)
        return {
            **os.environ,
            "PATH": os.pathsep.join([programs, os.environ.get("PATH", "")]),
            "PYTHONPATH": search_path(),
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        }

    # --- runs ------------------------------------------------------------------------------------

    def flwr(self, *words: str) -> str:
        """What a ``flwr`` command prints."""
        done = subprocess.run(
            ["flwr", *words],
            env=self.environment(),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise DeploymentFailed(f"flwr {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def _flwr_json(self, *words: str) -> dict[str, Any]:
        """The same as data; ``flwr`` tells of a failure here, and returns 0."""
        shown = self.flwr(*words, "--format", "json")
        answer: dict[str, Any] = json.loads(shown[shown.index("{") :])
        if not answer["success"]:
            raise DeploymentFailed(f"flwr {' '.join(words)}: {shown}")
        return answer

    def submit(self, app: Path, changes: Mapping[str, Any] | None = None) -> int:
        """Start a run; its number."""
        words = ["run", str(app.absolute()), LINK]  # flwr itself runs in the folder
        for key, value in (changes or {}).items():
            words += ["-c", f"{key}={toml_value(value)}"]
        return int(self._flwr_json(*words)["run-id"])

    def status(self, run_id: int) -> str:
        """What the SuperLink says about a run: ``running`` or ``finished:completed``, …"""
        (run,) = self._flwr_json("ls", LINK, "--run-id", str(run_id))["runs"]
        return str(run["status"])

    def log(self, run_id: int) -> str:
        """What a run's ServerApp said."""
        return self.flwr("log", str(run_id), LINK, "--show")


def _free_port() -> int:
    """A port that nobody listens on, another one every time.

    From below those that the system gives to outgoing connections: between this and the moment in
    which a process listens there, one of them would take it now and then.
    """
    for port in itertools.islice(_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((_HOST, port))
            return port
    raise DeploymentFailed(f"found no free port on {_HOST}")


# A real certificate is made with openssl, as docs/guides/deployment.md shows.
def make_certificate(folder: Path) -> None:
    """``server.crt`` and ``server.key`` for a server on this machine, which vouches for itself."""
    folder.mkdir(parents=True, exist_ok=True)
    key = new_private_key(folder / "server.key", PrivateFormat.PKCS8)
    public, now = key.public_key(), datetime.now(UTC)
    name = x509.Name.from_rfc4514_string("CN=localhost")
    addresses = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(_HOST))]
    made = (
        x509.CertificateBuilder(name, name, public, x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .sign(key, hashes.SHA384())
    )
    (folder / "server.crt").write_bytes(made.public_bytes(Encoding.PEM))
