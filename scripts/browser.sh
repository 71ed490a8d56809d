#!/usr/bin/env bash
# Installs Chromium for the tests of pages, from the distribution's packages, if it is not there.
set -euo pipefail
for program in chromium-headless-shell chromium chromium-browser google-chrome chrome; do
    if command -v "$program" > /dev/null; then
        echo "tests of pages use $(command -v "$program")"
        exit 0
    fi
done
if command -v apt-get > /dev/null; then
    run=()
    [ "$(id -u)" = 0 ] || run=(sudo -n)
    "${run[@]}" apt-get update -qq
    for package in chromium-headless-shell chromium; do # the first has no windows: it takes two thirds of the time
        if "${run[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" > /dev/null; then
            exit 0
        fi
    done
fi
echo "install Chromium or Chrome with your system's package manager" >&2
exit 1
