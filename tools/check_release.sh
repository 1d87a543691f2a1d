#!/bin/sh
# Builds the wheel and the sdist, installs each in an empty environment with the core dependencies alone, and runs `fit`
# there, outside of the checkout. Versions of torch and Pyro: the default ones, and the oldest and the newest that
# pyproject.toml allows. What cannot be had here is skipped, and said. Exits with 1 if anything that was tried fails.
#
#   tools/check_release.sh [wheel] [sdist] [oldest] [newest]     all four if none is named
#
# PYTHON (python3) makes the environments, OLDEST_PYTHON (PYTHON) that of `oldest`. TORCH (as in the Makefile) is
# installed first in the default ones. Environments are removed after use, as one with CUDA takes up to 6 GB.
set -u

ROOT=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python3}
OLDEST_PYTHON=${OLDEST_PYTHON:-$PYTHON}
TORCH=${TORCH:-$(sed -n 's/^TORCH *:= *//p' "$ROOT/Makefile")}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
export OMP_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH
FAILED=0
SKIPPED=0

build() {  # from the tracked files alone, so that nothing left in the checkout gets in
    mkdir "$WORK/source"
    (cd "$ROOT" && git ls-files -z | xargs -0 tar -cf -) | tar -xf - -C "$WORK/source" &&
        "$PYTHON" -m venv "$WORK/build" &&
        "$WORK/build/bin/pip" install -q build >"$WORK/build.log" 2>&1 &&
        "$WORK/build/bin/python" -m build -o "$WORK/dist" "$WORK/source" >"$WORK/build.log" 2>&1 ||
        { tail -20 "$WORK/build.log"; echo "FAILED  build"; exit 1; }
    WHEEL=$(echo "$WORK"/dist/*.whl)
    SDIST=$(echo "$WORK"/dist/*.tar.gz)
    echo "built   $(basename "$WHEEL") $(basename "$SDIST")"
}

oldest() {  # the lower bounds of pyproject.toml's dependencies, as pins
    sed -n '/^dependencies = \[/,/^\]/s/^ *"\(.*\)>=\(.*\)",.*/\1==\2/p' "$ROOT/pyproject.toml"
}

# check NAME PYTHON ARCHIVE REQUIREMENT...: an environment with these requirements, then the archive; `fit` in it
check() {
    name=$1 python=$2 archive=$3
    shift 3
    environment=$WORK/$name
    "$python" -m venv "$environment" || { FAILED=1; echo "FAILED  $name: no environment by $python"; return; }
    if [ $# -gt 0 ] && ! "$environment/bin/pip" install -q "$@" >"$WORK/$name.log" 2>&1; then
        SKIPPED=$((SKIPPED + 1))
        echo "skipped $name: $* cannot be had here: $(grep -m1 ERROR "$WORK/$name.log")"
    elif ! "$environment/bin/pip" install -q "$archive" >"$WORK/$name.log" 2>&1; then
        FAILED=1
        echo "FAILED  $name: $(basename "$archive") does not install"
        tail -5 "$WORK/$name.log"
    elif (cd "$WORK" && "$environment/bin/python" -I "$ROOT/tools/installed.py" "$ROOT" >"$WORK/$name.log" 2>&1); then
        echo "ok      $name: $(tail -1 "$WORK/$name.log")"
    else
        FAILED=1
        echo "FAILED  $name: $("$environment/bin/pip" list 2>/dev/null | grep -E '^(torch|pyro-ppl|numpy) ' | tr -s ' \n' ' ')"
        tail -15 "$WORK/$name.log"
    fi
    rm -rf "$environment"
}

build
for name in ${*:-wheel sdist oldest newest}; do
    case $name in
    # shellcheck disable=SC2086,SC2046 # requirements are words
    wheel) check wheel "$PYTHON" "$WHEEL" $TORCH ;;
    sdist) check sdist "$PYTHON" "$SDIST" $TORCH ;;
    oldest) check oldest "$OLDEST_PYTHON" "$WHEEL" $(oldest) ;;
    newest) check newest "$PYTHON" "$WHEEL" torch pyro-ppl ;;
    *) echo "Expected wheel, sdist, oldest or newest; got $name"; FAILED=1 ;;
    esac
done
[ "$SKIPPED" = 0 ] || echo "$SKIPPED skipped"
exit $FAILED
