"""What a closed network asks for: local wheels, an index of its own, proxies, a re-signing certificate authority.

All of it comes from the environment variables that pip, uv and curl already read, so a site that is set up for those
is set up for us. Nothing of it ends in a lock or in a layer of an image: uv on the host gets it as environment, an
image build as secrets (proxies as Docker's own predefined build arguments, which stay out of an image's history).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from ci.errors import EnvironmentUnavailable
from ci.provision import process
from ci.provision.process import Finished

PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
CERTIFICATES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
#: Names pip gives to settings that uv has under another name; (pip's, uv's, uv's older one).
INDEXES = (
    ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    ("PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"),
)
#: Switches that are passed on as they are.
SWITCHES = (
    "UV_NO_INDEX",
    "UV_OFFLINE",
    "UV_INSECURE_HOST",
    "UV_HTTP_TIMEOUT",
    "PIP_TRUSTED_HOST",
    "PIP_DEFAULT_TIMEOUT",
)


@dataclass(frozen=True)
class Site:
    """The network settings of this host."""

    #: Folders with wheels, in the order they are searched.
    wheel_folders: tuple[Path, ...] = ()
    #: Addresses of pages that list wheels.
    wheel_pages: tuple[str, ...] = ()
    certificates: Path | None = None
    proxies: Mapping[str, str] = field(default_factory=dict)
    #: Environment of uv and pip for indexes and switches.
    indexes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, environ: Mapping[str, str] | None = None) -> Site:
        """Read the settings out of an environment (default: this process's)."""
        env = os.environ if environ is None else environ
        folders: list[Path] = []
        pages: list[str] = []
        for entry in [*re.split(r"[,\s]+", env.get("UV_FIND_LINKS", "")), *env.get("PIP_FIND_LINKS", "").split()]:
            if "://" in entry and not entry.startswith("file://"):
                pages.append(entry)
            elif entry:
                folders.append(Path(entry.removeprefix("file://")).absolute())
        certificates = next((Path(env[name]) for name in CERTIFICATES if env.get(name)), None)
        indexes = {name: env[name] for name in SWITCHES if env.get(name)}
        for pip, uv, older in INDEXES:
            value = env.get(uv) or env.get(older) or env.get(pip)
            if value:
                indexes |= {pip: value, uv: value}
        if env.get("PIP_NO_INDEX"):
            indexes |= {"PIP_NO_INDEX": "1", "UV_NO_INDEX": "1"}
        proxies = {name: env.get(name) or env.get(name.upper(), "") for name in PROXIES}
        return cls(
            wheel_folders=tuple(dict.fromkeys(folder for folder in folders if folder.is_dir())),
            wheel_pages=tuple(dict.fromkeys(pages)),
            certificates=certificates if certificates and certificates.is_file() else None,
            proxies={name: value for name, value in proxies.items() if value},
            indexes=indexes,
        )

    def wheels_for(self, pins: Mapping[str, str]) -> tuple[Path, ...]:
        """The local wheels of exactly these releases (name -> version), those found first winning."""
        found: dict[str, Path] = {}
        for folder in self.wheel_folders:
            for wheel in sorted(folder.glob("*.whl")):
                try:
                    name, version, _, _ = parse_wheel_filename(wheel.name)
                except InvalidWheelFilename:
                    continue
                if pins.get(canonicalize_name(name)) == str(version):
                    found.setdefault(wheel.name, wheel)
        return tuple(found[name] for name in sorted(found))

    def uv_environment(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment uv is started with on this host."""
        env = dict(os.environ if environ is None else environ)
        for name in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "CONDA_PREFIX"):
            env.pop(name, None)
        env |= self.indexes
        links = [*map(str, self.wheel_folders), *self.wheel_pages]
        if links:
            env["UV_FIND_LINKS"] = ",".join(links)
        if self.certificates:
            env["SSL_CERT_FILE"] = str(self.certificates)
        # uv trusts only its own list of authorities unless told; a site that re-signs TLS is in the system's list.
        env["UV_SYSTEM_CERTS"] = "1"
        env["UV_NO_PROGRESS"] = "1"
        env["UV_NO_CONFIG"] = env.get("UV_NO_CONFIG", "1")
        return env

    def build_secret(self) -> str:
        """The shell lines a step of an image build reads from its secret `site`."""
        settings = dict(self.indexes)
        if self.wheel_pages:
            settings |= {"UV_FIND_LINKS": ",".join(self.wheel_pages), "PIP_FIND_LINKS": " ".join(self.wheel_pages)}
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(settings.items()))


def uv_executable() -> str:
    """The uv beside this interpreter, else the one on PATH."""
    try:
        import uv
    except ImportError:
        found = shutil.which("uv")
    else:
        found = os.fspath(uv.find_uv_bin())
    if found is None:
        raise EnvironmentUnavailable("uv is not installed; pip install uv, or start through nox")
    return found


def uv(site: Site, arguments: Sequence[str], what: str, extra_env: Mapping[str, str] | None = None) -> Finished:
    """Run uv; its failure becomes one message that says what was being done and what stands in the way."""
    env = site.uv_environment() | dict(extra_env or {})
    finished = process.run([uv_executable(), *arguments], env=env)
    if finished.code:
        raise EnvironmentUnavailable(f"{what}: {explain(finished.said)}")
    return finished


_DISK_FULL = r"no space left on device|os error 28\b|disk quota exceeded"
_CERTIFICATES = r"invalid peer certificate|certificate.verify.failed|unknownissuer|self-signed"
_UNREACHABLE = (
    r"dns error|error sending request|failed to fetch|connection refused|network is unreachable|could not connect"
    r"|temporary failure|name or service not known|timed out|could not resolve"
)
#: What a tool says -> what it means here and what to do. The first that fits is told.
_REASONS = {
    _DISK_FULL: "the disk is full; free some space and start again",
    r"no solution found": "no set of releases satisfies these pins",
    r"hash mismatch": "a download does not have the hash in the lock: the lock and the source differ",
    _CERTIFICATES: (
        "TLS is re-signed by an authority that is not trusted here; let SSL_CERT_FILE name a bundle that holds it"
    ),
    _UNREACHABLE: (
        "an index or a mirror cannot be reached; PIP_FIND_LINKS or UV_FIND_LINKS (local wheels), UV_DEFAULT_INDEX "
        "(an index of the site) and https_proxy would be used"
    ),
    r"no interpreter found": "this Python is not on the host; install it, or use --runtime docker",
    r"was not found in|no versions? of": "a release is in none of the places that were searched",
}


def explain(said: str) -> str:
    """One reason for what a tool printed, followed by its own last words."""
    reason = next((text for pattern, text in _REASONS.items() if re.search(pattern, said, re.IGNORECASE)), "it failed")
    return "\n".join([reason, *(f"  {line}" for line in last_lines(said.splitlines()))])


def hosts_fault(said: str) -> bool:
    """Whether what a tool printed is about this host (disk, network, certificates) and not about what was asked."""
    return re.search("|".join((_DISK_FULL, _CERTIFICATES, _UNREACHABLE)), said, re.IGNORECASE) is not None


def last_lines(lines: Iterable[str], count: int = 20) -> list[str]:
    """The last lines that say something."""
    return [line.rstrip() for line in lines if line.strip()][-count:]
