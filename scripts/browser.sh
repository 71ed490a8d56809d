#!/usr/bin/env bash
# Installs Chromium for the tests of pages, if it is not there. Run by `make browser` alone: no other target installs anything
# outside the clone. sudo is never called: root uses the distribution's packages, everyone else Playwright's own build, which
# goes to ~/.cache/ms-playwright.
set -uo pipefail
for program in chromium-headless-shell chromium chromium-browser google-chrome chrome; do
    if command -v "$program" > /dev/null; then
        echo "tests of pages use $(command -v "$program")"
        exit 0
    fi
done
python=${1:-.venv/bin/python}

# Says what it runs, and runs it.
run() {
    echo "+ $*"
    "$@"
}

if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    run apt-get update -qq
    for package in chromium-headless-shell chromium; do # the first has no windows: it takes two thirds of the time
        run apt-get install -y -qq --no-install-recommends "$package" > /dev/null && exit 0
    done
elif [ -x "$python" ]; then
    run "$python" -m playwright install --only-shell chromium && exit 0
fi
cat >&2 << 'END'
Chromium was not installed. Install Chromium or Chrome with your system's package manager, for example
  sudo apt-get install chromium
Without it, `make test` leaves out the tests of pages.
END
exit 1
