#!/bin/bash
# Run Python, PyTorch and cocofl for Linux aarch64 on an x86-64 Debian machine, under emulation.
#
#     recipe.sh WORKDIR            # once: downloads, unpacks, writes WORKDIR/arm-python
#     PYTHONPATH=$PWD/src WORKDIR/arm-python -c 'from cocofl.cli import main; main()' doctor
#     ARM_CPU=cortex-a76 WORKDIR/arm-python probe.py
#
# Safe to run again: steps already done are skipped. Nothing outside WORKDIR is changed: no foreign
# architecture is added to dpkg, and no binfmt_misc entry (there was none to be had). Run as root
# so far; nothing should need it, which was not tried. Package sources are the machine's own (apt's
# debian.sources, pip's settings); apt's copy of them is removed again.
#
# Needs: apt, dpkg-deb, debian-archive-keyring, python3 >= 3.11 with pip, network to the registries.
# Speed: a process that imports torch and cocofl and makes one step of tiny mobilenet takes 23 to 25
# CPU seconds, nearly all of it the import; one such step 0.3 to 10 s of wall time, with two cores
# shared by about ten other processes. A crash reads "qemu: uncaught target signal 11". To survive
# crashes in a probe, fork after the import rather than start a process - and before the parent
# computes anything: a child forked later hung once on a futex (cortex-a72).
# Optional: aarch64 wheels already in WORKDIR are used before anything is downloaded.
set -euo pipefail

work=$(mkdir -p "${1:?usage: recipe.sh WORKDIR}" && cd "$1" && pwd)
torch=${TORCH_VERSION:-2.13.0}
python=${HOST_PYTHON:-python3.11}
command -v "$python" >/dev/null || python=python3
cd "$work"

# ---- 1. An apt of our own: qemu for this machine, a Python for the other ------------------------
# Bookworm's qemu is 7.2; trixie's 10.0 is a static binary and runs on bookworm as it is. It knows
# cortex-a72 (Pi 4), cortex-a76 (Pi 5), neoverse-n1/n2/v1 (servers), a64fx and max.
apt_for() { # NAME ARCHITECTURE SUITE
    local d=$work/apt/$1
    mkdir -p "$d/etc" "$d/state/lists/partial" "$d/cache/archives/partial"
    : >"$d/state/status"
    # The first stanza of the machine's own sources, with another suite.
    awk 'BEGIN { RS = "" } NR == 1' /etc/apt/sources.list.d/debian.sources |
        sed -E "/^#/d; s/^Suites:.*/Suites: $3/" >"$d/etc/debian.sources"
    cat >"$d/apt.conf" <<CONF
APT::Architecture "$2";
APT::Architectures { "$2"; };
APT::Install-Recommends "false";
APT::Sandbox::User "";
Dir::Etc::sourcelist "$d/etc/debian.sources";
Dir::Etc::sourceparts "$d/etc/none";
Dir::State "$d/state";
Dir::State::status "$d/state/status";
Dir::Cache "$d/cache";
CONF
    APT_CONFIG=$d/apt.conf apt-get -qq update
}

unpack_into() { # NAME FOLDER PACKAGES...
    local name=$1 folder=$2
    shift 2
    mkdir -p "$work/debs/$name" "$folder"
    (cd "$work/debs/$name" && APT_CONFIG=$work/apt/$name/apt.conf apt-get -qq download "$@")
    for deb in "$work/debs/$name"/*.deb; do dpkg-deb -x "$deb" "$folder"; done
    rm -r "$work/debs/$name" "$work/apt/$name"
}

if [ ! -e host.done ]; then # 71 MB down, seconds
    apt_for host amd64 trixie
    unpack_into host "$work/hostbin" qemu-user
    hostbin/usr/bin/qemu-aarch64 --version | head -1
    touch host.done
fi

if [ ! -e guest.done ]; then # 23 MB down, 113 MB unpacked, seconds; debootstrap is not needed
    apt_for guest arm64 bookworm
    # With an empty status file apt names everything these need, down to libc.
    packages=$(APT_CONFIG=$work/apt/guest/apt.conf apt-get install -s -y \
        python3.11 libpython3.11 libstdc++6 libgomp1 coreutils bash | awk '/^Inst/ { print $2 }')
    # shellcheck disable=SC2086
    unpack_into guest "$work/root" $packages
    # oneDNN asks here which core it runs on; qemu looks under root/ first. Value: a Cortex-A72.
    # Without it a line "Can't open MIDR_EL1 sysfs entry" goes to stderr, and all works.
    # It stays a Cortex-A72 whatever ARM_CPU says; what oneDNN makes of a mismatch was not tried.
    id=root/sys/devices/system/cpu/cpu0/regs/identification
    mkdir -p $id && echo 0x00000000410fd083 >$id/midr_el1
    touch guest.done
fi

# ---- 2. aarch64 wheels ---------------------------------------------------------------------------
# PyPI's torch for aarch64 is linked with CUDA 13 since 2.11, so `import torch` needs NVIDIA's
# libraries even on a Raspberry Pi. They load under emulation and find no GPU. site/ is 4.9 GB, all
# of WORKDIR 5.5 GB; from nothing (with torch's wheel in WORKDIR) 95 s of CPU time and 20 minutes of
# wall time at a load of 12 on two cores; a second run 25 s of CPU time (it imports torch). 
# Every manylinux tag must be named: cupti, for one, is only there as manylinux_2_25.
# pip's markers are those of this machine, which is right: "Linux" and 3.11 are the same here.
if [ ! -e "site-$torch.done" ]; then
    [ -x pipenv/bin/pip ] || "$python" -m venv pipenv
    pipenv/bin/pip -q install -U pip
    tags=(--platform manylinux2014_aarch64)
    for minor in $(seq 17 36); do tags+=(--platform "manylinux_2_${minor}_aarch64"); done
    rm -rf site
    # One command for all: with --target, a second one would not merge the nvidia/ folder.
    pipenv/bin/pip -q install --target site --only-binary=:all: --python-version 3.11 \
        --implementation cp "${tags[@]}" --find-links "$work" \
        "torch==$torch" numpy safetensors scikit-learn typer rich pytest hypothesis psutil
    rm -f site-*.done && touch "site-$torch.done"
fi
if [ ! -d site/onnxruntime ]; then # int8 kernels that need no quantized tensors of PyTorch
    pipenv/bin/pip -q install --target site --no-deps --only-binary=:all: --python-version 3.11 \
        --implementation cp --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
        --platform any onnxruntime flatbuffers
fi

# ---- 3. The command ------------------------------------------------------------------------------
mkdir -p support
cat >support/sitecustomize.py <<'PY'
"""Children are started through the wrapper too: this kernel cannot execute an aarch64 file."""
import os
import sys

if os.environ.get("ARM_PYTHON"):
    sys.executable = sys._base_executable = os.environ["ARM_PYTHON"]
PY
# -L: files are looked for under root/ first, then where they are on this machine.
# The default core is a Pi 4's. `max` has 512-bit SVE, where oneDNN runs its sve_256 int8 code and
# crashed (SIGSEGV); max,sve-default-vector-length=32, neoverse-v1 and neoverse-n2 did not crash.
cat >arm-python <<'SH'
#!/bin/sh
W=$(cd "$(dirname "$0")" && pwd)
export ARM_PYTHON="$W/arm-python"
case ":$PYTHONPATH:" in
*":$W/site:"*) ;;
*) export PYTHONPATH="$W/support${PYTHONPATH:+:$PYTHONPATH}:$W/site" ;;
esac
exec "$W/hostbin/usr/bin/qemu-aarch64" -cpu "${ARM_CPU:-cortex-a72}" -L "$W/root" \
    "$W/root/usr/bin/python3.11" "$@"
SH
chmod +x arm-python
./arm-python -c 'import platform, torch; print(platform.machine(), torch.__version__, torch.ones(3) @ torch.ones(3))'
