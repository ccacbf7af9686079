#!/usr/bin/env bash
# Run a command, 'make test' unless told otherwise, in a copy of the last commit on a bare Debian 12, which has Python,
# Node, npm and make, and nothing else: it shows what the project needs and does not bring.
#
#   tests/fresh_machine.sh [COMMAND…]    as root, on a Debian with debootstrap, node and npm
#   BARE=FOLDER tests/fresh_machine.sh   keeps the machine there, with what was installed, and uses it again
set -euo pipefail

list_configuration() {  # the files and folders by which pip and npm find their registries here
    python3 -m pip config debug | sed -n 's/^ *\(.*\), exists: True$/\1/p'
    python3 -m pip config list | grep -oE "/[^/' ][^' ]*" | sed 's#/simple$##' || true  # an index names files beside it
    for name in userconfig globalconfig cafile; do npm config get "$name"; done
    echo /etc/ssl/certs
}

enter() {  # FOLDER COMMAND…: in a namespace of its own, whose mounts and processes end with it
    local bare=$1 path
    shift
    mount -t proc proc "$bare/proc"
    mount --rbind /sys "$bare/sys"
    mount --rbind /dev "$bare/dev"
    list_configuration | sort --unique | while read -r path; do
        [ -e "$path" ] || continue
        mkdir -p "$bare$(dirname "$path")"
        if [ -d "$path" ]; then mkdir -p "$bare$path"; else touch "$bare$path"; fi
        mount --bind "$path" "$bare$path"
    done
    local passed
    mapfile -t passed < <(env | grep -iE '^(pip|npm_config)_|^(https?|no|all)_proxy=|^(SSL|NODE)_.*CERT|_CA_BUNDLE=')
    exec chroot "$bare" /usr/bin/env --ignore-environment --chdir=/splitup HOME="$HOME" LANG=C.UTF-8 \
        PATH="$NODE_PREFIX/bin:/usr/sbin:/usr/bin:/sbin:/bin" "${passed[@]}" "$@"
}

make_machine() {  # FOLDER
    local mirror
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' | head -n 1)
    debootstrap --variant=minbase --include=python3,python3-venv,make,ca-certificates bookworm "$1" "$mirror"
    mkdir -p "$1$NODE_PREFIX/bin" "$1$NODE_PREFIX/lib/node_modules"
    cp "$NODE_PREFIX/bin/node" "$1$NODE_PREFIX/bin"
    cp -r "$NODE_PREFIX/lib/node_modules/npm" "$1$NODE_PREFIX/lib/node_modules"
    ln -s ../lib/node_modules/npm/bin/npm-cli.js "$1$NODE_PREFIX/bin/npm"
}

NODE_PREFIX=$(dirname "$(dirname "$(readlink -f "$(command -v node)")")")
if [ "${1:-}" = --enter ]; then
    enter "${@:2}"
fi
bare=${BARE:-$(mktemp -d)}
[ -n "${BARE:-}" ] || trap 'rm -rf --one-file-system "$bare"' EXIT
[ -e "$bare/etc/debian_version" ] || make_machine "$bare"
cp -L /etc/resolv.conf /etc/hosts "$bare/etc"
[ -e "$bare/splitup" ] || git clone --quiet "$(dirname "$0")/.." "$bare/splitup"
git -C "$bare/splitup" fetch --quiet origin HEAD
git -C "$bare/splitup" reset --quiet --hard FETCH_HEAD
[ $# -gt 0 ] || set -- make test
unshare --mount --pid --fork "$0" --enter "$bare" "$@"
