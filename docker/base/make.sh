#!/usr/bin/env bash
# Make the base image of docker/cpu.Dockerfile where no registry can be reached: debootstrap, then docker import.
#
#   docker/base/make.sh TAG [SITE_CA.crt]
#
# SITE_CA.crt (optional) becomes one of the base's own certificates. A build does not need it there: it gets the site's
# bundle as a secret. It is for sites that want every container of theirs to trust their authority.
# DOCKER (default: docker) is the client; BASE_MIRROR the Debian mirror (default: the one this host uses, if it is
# Debian, else debootstrap's own).
set -euo pipefail

suite=bookworm # Python 3.11
tag=${1:?usage: docker/base/make.sh TAG [SITE_CA.crt]}
site_ca=${2:-}
docker=${DOCKER:-docker}

if [ "$(id -u)" -ne 0 ]; then
    echo "debootstrap needs root; run it with sudo, or pull $tag where a registry can be reached" >&2
    exit 3
fi
if ! command -v debootstrap >/dev/null; then
    echo "debootstrap is not installed; on Debian and Ubuntu: apt-get install debootstrap" >&2
    exit 3
fi

mirror=${BASE_MIRROR:-}
if [ -z "$mirror" ] && command -v apt-get >/dev/null; then
    # shellcheck disable=SC2016  # these are apt's own variables
    mirror=$(apt-get indextargets --format '$(SITE) $(CODENAME) $(COMPONENT)' "Created-By: Packages" 2>/dev/null |
        awk -v suite="$suite" '$2 == suite && $3 == "main" { print $1; exit }') || mirror=
fi

work=$(mktemp -d)
clean_up() {
    # debootstrap mounts it while it works, and cannot unmount it when it is killed.
    if mountpoint -q "$work/root/proc"; then umount -l "$work/root/proc"; fi
    rm -rf --one-file-system "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM HUP

# C.UTF-8 is part of libc-bin; anything beyond minbase is for the Dockerfile to say.
debootstrap --variant=minbase "$suite" "$work/root" ${mirror:+"$mirror"} >"$work/log" 2>&1 || {
    tail -n 20 "$work/log" >&2
    exit 3
}
if [ -n "$site_ca" ]; then
    install -D -m 644 "$site_ca" "$work/root/usr/local/share/ca-certificates/site.crt"
fi
# What only this host or this moment needs; apt keeps no packages and no lists.
rm -rf "$work"/root/var/cache/apt/* "$work"/root/var/lib/apt/lists/* "$work"/root/var/log/* "$work"/root/tmp/*
rm -rf "$work"/root/usr/share/man/* "$work"/root/usr/share/locale/*
find "$work/root/usr/share/doc" -depth \( -type f -o -type l \) ! -name copyright -delete
: >"$work/root/etc/machine-id"
rm -f "$work/root/etc/resolv.conf" "$work/root/etc/hostname"
mkdir -p "$work/root/etc/dpkg/dpkg.cfg.d" "$work/root/etc/apt/apt.conf.d"
cat >"$work/root/etc/dpkg/dpkg.cfg.d/slim" <<'CFG'
path-exclude /usr/share/doc/*
path-exclude /usr/share/man/*
path-exclude /usr/share/locale/*
path-include /usr/share/doc/*/copyright
CFG
echo 'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };' \
    >"$work/root/etc/apt/apt.conf.d/docker-clean"

tar -C "$work/root" --numeric-owner --one-file-system -cf - . |
    "$docker" import \
        --change 'CMD ["bash"]' \
        --change "LABEL zero-regression-matrix.base=debootstrap-$suite" \
        - "$tag"
